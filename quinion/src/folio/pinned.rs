//! Pinned: bytes of the cache without a copy, for as long as the caller likes.
//!
//! A pin keeps its folios' bytes: they are not evicted, not reused and not
//! changed while it lives. If the file changes outside, the folios leave the
//! index, new readers read anew, and the pinned bytes stay what they were.

use std::sync::Arc;

use crate::arena::Arena;
use crate::sys::fork::ForkGuard;
use crate::units::Frame;

use super::held::{Held, unpin};

/// A pinned range of a file.
#[derive(Debug)]
pub struct Pinned {
    arena: Arc<Arena>,
    frames: Vec<Frame>,
    extents: Vec<Extent>,
    len: usize,
    process: ForkGuard,
}

/// Consecutive bytes of a pinned range.
#[derive(Clone, Copy, Debug)]
struct Extent {
    first: *const u8,
    len: usize,
}

// SAFETY: the extents are bytes that nobody writes while the pins last; the rest is Send and Sync.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(arena: Arc<Arena>, process: ForkGuard) -> Self {
        Self { arena, frames: Vec::new(), extents: Vec::new(), len: 0, process }
    }

    /// How many bytes are pinned; fewer than asked where the file ends.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether nothing is pinned: the range lies past the end of the file.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, in order, in pieces as long as they lie together in memory.
    ///
    /// # Panics
    /// In a forked child, which does not have the cache's memory.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        assert!(!self.process.is_forked(), "pinned bytes belong to the process that pinned them");
        // SAFETY: every extent lies in pages that had come and that this value's pins keep: nobody writes them
        // (a fill does not write what has landed again, a writer changes no page that is pinned and those who were
        // in one had left when the pin was given, and a change of the file replaces folios) and they stay mapped as long as the arena lives, which this value shares.
        self.extents.iter().map(|extent| unsafe { std::slice::from_raw_parts(extent.first, extent.len) })
    }

    /// Adds what `held` has of the file from `position` on, at most `len` bytes; returns how many.
    pub(crate) fn add(&mut self, held: Held<'_>, position: u64, len: usize) -> usize {
        let inside = (position - held.first().first_byte()) as usize;
        let bytes = len.min(held.ready_bytes(position));
        // SAFETY: `inside` is less than the folio's length.
        let first = unsafe { held.bytes().add(inside) };
        match self.extents.last_mut() {
            // SAFETY: one past an extent's end is still in, or just past, the arena's mapping.
            Some(last) if std::ptr::eq(unsafe { last.first.add(last.len) }, first) => last.len += bytes,
            _ => self.extents.push(Extent { first, len: bytes }),
        }
        self.frames.push(held.into_pin().0); // it may wait for a writer to leave; the bytes are lent after that
        self.len += bytes;
        bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        for &frame in &self.frames {
            unpin(&self.arena, frame);
        }
    }
}

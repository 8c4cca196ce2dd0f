//! Writer: bytes of a cached folio changed in place, while readers without a lock copy them.
//!
//! ```text
//!   Held --writer--> Writer: the folio is written from now on        (its sequence steps, once in its life)
//!                      |
//!                      +--page--> PageWriter: the page's lock, its sequence odd
//!                                   |   copy_in, zero
//!                                   +--drop--> its sequence even, the lock given back
//! ```
//!
//! Writers of different pages of one folio do not meet. Why readers get whole pages is told in
//! [`arena::written`](crate::arena::written).
//!
//! A pinned folio is not written: its user was promised bytes that do not change. The writer gets
//! [`WriteRefused::Pinned`] before it has changed a byte of that page.
//!
//! Invariants:
//!  1. The owner of a [`PageWriter`] is alone in the page, and found it unpinned when it was alone.
//!  2. No `&mut [u8]` of a page exists: bytes go in by `copy::copy_in`.
//!
//! Not an invariant: that a write of several pages is done whole or not at all. A pin may come between two of them; the
//! result says how many bytes were written. Nor that the folio is in the index when the write is over: a thread that
//! writes for a file excludes all that could take it out.
//!
//! The bytes to write must be there to be copied: a source whose page faults are served by a reader of this very
//! page would wait for itself.
//!
//! Locks: `Rank::Page`, for a copy of a page. Cost of a page: two stores, a fence, an uncontended lock, the copy.

use crate::arena::written::{enter, leave};
use crate::arena::{PageLock, WriteRefused};
use crate::sync::atomic::AtomicU32;
use crate::units::PAGE_SIZE;

use super::held::HeldFolio;
use quinion_view::folio::copy;
use quinion_view::folio::written::{PagePart, parts};

/// The right to change a held folio's bytes in place.
#[derive(Clone, Copy, Debug)]
pub struct FolioWriter<'h> {
    held: &'h HeldFolio<'h>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteOutcome {
    /// Bytes written, from the start of the range on; all of it, or up to the start of a page.
    pub bytes: usize,
    /// Why it ended there, if not all was written.
    pub refused: Option<WriteRefused>,
}

impl HeldFolio<'_> {
    /// The right to change the folio's bytes in place, for as long as it is held; see [`FolioWriter`].
    #[inline]
    pub fn writer(&self) -> Result<FolioWriter<'_>, WriteRefused> {
        FolioWriter::begin(self)
    }
}

impl<'h> FolioWriter<'h> {
    #[inline]
    fn begin(held: &'h HeldFolio<'h>) -> Result<Self, WriteRefused> {
        held.arena().view().own(held.frame()).begin_writes()?;
        Ok(Self { held })
    }

    /// Enters `page`, counted from the folio's first. Waits for a writer that is in it. Refused if the folio is
    /// pinned or has left the index; then nothing was changed.
    ///
    /// # Panics
    /// If the folio has no such page, and in builds with debug assertions if this thread is in a page already.
    #[inline]
    pub fn page(&self, page: u32) -> Result<PageWriter<'h>, WriteRefused> {
        assert!(page < self.held.order().pages(), "the folio has the page");
        let frame = self.held.frame().plus(page);
        let arena = self.held.arena();
        let view = arena.view();
        let bytes = view.bytes(frame).expect("a held folio has frames");
        let descriptor = view.own(self.held.frame());
        let lock = arena.page_locks().lock(frame);
        let sequence = view.own_write_sequence(frame);
        enter(sequence);
        let writer = PageWriter { sequence, bytes, _lock: lock };
        if descriptor.is_pinned() {
            Err(WriteRefused::Pinned)
        } else if !descriptor.word().is_live() {
            Err(WriteRefused::Left)
        } else {
            Ok(writer)
        }
    }

    /// Writes `bytes` at file position `position`, page by page. May wait for writers and slow readers of each page.
    ///
    /// # Panics
    /// If the folio does not cover all of the range, and as [`FolioWriter::page`].
    pub fn write(&self, position: u64, bytes: &[u8]) -> WriteOutcome {
        let write = |page: &mut PageWriter<'_>, part: PagePart| {
            page.copy_in(part.at, &bytes[part.done..part.done + part.len]);
        };
        self.each_page(position, bytes.len(), write)
    }

    /// Zeroes `len` bytes at file position `position`, page by page; as [`FolioWriter::write`].
    pub fn zero(&self, position: u64, len: usize) -> WriteOutcome {
        self.each_page(position, len, |page, part| page.zero(part.at, part.len))
    }

    fn each_page(
        &self,
        position: u64,
        len: usize,
        mut change: impl FnMut(&mut PageWriter<'_>, PagePart),
    ) -> WriteOutcome {
        if len == 0 {
            return WriteOutcome { bytes: 0, refused: None };
        }
        let inside = self.held.inside(position);
        assert!(len <= self.held.order().bytes() - inside, "the folio covers what is written");
        for part in parts(inside, len) {
            match self.page(part.page) {
                Ok(mut page) => change(&mut page, part),
                Err(refused) => return WriteOutcome { bytes: part.done, refused: Some(refused) },
            }
        }
        WriteOutcome { bytes: len, refused: None }
    }
}

/// A page with a writer in it. Readers try again, then wait for its lock, until this is dropped.
#[derive(Debug)]
pub struct PageWriter<'h> {
    sequence: &'h AtomicU32,
    bytes: *mut u8,
    // Given back after `drop`.
    _lock: PageLock<'h>,
}

impl PageWriter<'_> {
    /// Writes `from` from byte `at` of the page on.
    ///
    /// # Panics
    /// If it does not fit in.
    #[inline]
    pub fn copy_in(&mut self, at: usize, from: &[u8]) {
        let to = self.range(at, from.len());
        // SAFETY: the range lies in a frame that a hold keeps, and of writers only this one is in it; readers look
        // at the page's sequence. The source is a slice: if it is of an arena, it is pinned, and this page is not.
        unsafe { copy::copy_in(from.as_ptr(), to, from.len()) };
    }

    /// Zeroes `len` bytes from byte `at` of the page on; as [`PageWriter::copy_in`].
    pub fn zero(&mut self, at: usize, len: usize) {
        let to = self.range(at, len);
        // SAFETY: as in `copy_in`.
        unsafe { copy::zero(to, len) };
    }

    #[inline]
    fn range(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at <= PAGE_SIZE && len <= PAGE_SIZE - at, "{len} bytes at {at} lie in the page");
        self.bytes.wrapping_add(at)
    }
}

impl Drop for PageWriter<'_> {
    #[inline]
    fn drop(&mut self) {
        leave(self.sequence);
    }
}

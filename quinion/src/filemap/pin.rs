//! Pin: a range of a file held in the cache, folio by folio.
//!
//! ```text
//!   from `position` on, batch by batch
//!     1 hold     the folios that are ready; if the first is not, the way of a miss, and wait
//!     2 size     looked at after the data is held, so that no byte past the end is shown; and what has left the index
//!                by then is given back and sought anew
//!     3 touch    their referenced bytes; a marker starts the next window, as for a read
//!     4 add      each hold becomes a pin, the bytes join the last piece if they lie behind it
//!   if it is an uncached one, what it met goes when it is unpinned, or when its stream has passed, if that is later
//! ```
//!
//! A pin is a read without the copy: it is counted as one, and as a hit if no
//! folio had to be waited for.
//!
//! What pins keep is bounded, so that readers have memory to go on with: a pin that
//! would reach beyond fails at once. A folio counts whole, and once however many
//! pins it has.
//!
//! Invariants:
//!  1. What is pinned is one range without a hole, from `position` on.
//!  2. On an error nothing stays pinned: what was gathered is dropped on the way out.
//!
//! Not an invariant: that what fits is pinned while others pin too: two that want the last of the share may both be
//! refused. Nor that the whole range is of one version of the file. Each
//! folio is what the file was when that folio was filled.

use std::sync::Arc;

use crate::error::Error;
use crate::folio::{Held, Pinned};
use crate::mapping::{End, Mapping, ReadBatch};
use crate::sync::Locks;
use crate::sys::fork::ForkGuard;
use crate::units::{PAGE_SIZE, PageIndex};

use super::fill::Filemap;
use super::read::{Patience, Reading};
use super::uncached::Reader;

impl Filemap {
    /// Pins `len` bytes at `position`, or as many as the file has there; waits until all of them are in the
    /// cache.
    pub fn pin(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        reader: Reader<'_>,
        position: u64,
        len: usize,
        process: ForkGuard,
    ) -> Result<Pinned, Error> {
        let pinned = self.pin_known(mapping, reader, position, len, process)?;
        // Nothing there, as far as is known: as for a read, the file is looked at again, once.
        if pinned.is_empty() && len > 0 && !reader.is_sure_of_size() && self.look_at_the_end(mapping)? {
            return self.pin_known(mapping, reader, position, len, process);
        }
        Ok(pinned)
    }

    /// As [`Filemap::pin`], with the file's size as it is known.
    fn pin_known(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        reader: Reader<'_>,
        position: u64,
        len: usize,
        process: ForkGuard,
    ) -> Result<Pinned, Error> {
        let pages_max = self.pinned_pages_max();
        let reach = (len as u64).min(mapping.size().saturating_sub(position));
        if reach > pages_max * PAGE_SIZE as u64 {
            return Err(self.too_much_pinned(reach));
        }
        let mut pinned = Pinned::new(Arc::clone(&self.arena), process);
        let mut batch = ReadBatch::new();
        let mut hit = true;
        while pinned.len() < len {
            let (at, rest) = (position + pinned.len() as u64, len - pinned.len());
            // The size, before the data is held; see `read_held`.
            let size = mapping.size();
            if size <= at {
                break;
            }
            // 1
            let last = PageIndex::of_byte(at.saturating_add(rest as u64 - 1));
            let end = mapping.get_read_batch(PageIndex::of_byte(at), last, &mut batch);
            if end == End::FirstNotReady || batch.is_empty() {
                hit = false;
                // What is fetched now is nobody's pin yet.
                if self.arena.pinned_pages() >= pages_max {
                    return Err(self.too_much_pinned(rest as u64));
                }
                let first = batch.pop().into();
                match self.hold_folio(mapping, reader, Patience::Wait, at, rest, first)? {
                    Some(held) => batch.push(held),
                    None => break,
                }
            }
            // 2 to 4
            let marked = self.pin_batch((mapping, reader), &mut pinned, &mut batch, position, len, size);
            if let Some(page) = marked {
                self.advance(mapping, reader, page, Patience::Wait);
            }
            if pinned.count_pages() > pages_max {
                return Err(self.too_much_pinned(reach));
            }
        }
        self.count_read(Reading { done: pinned.len(), hit, stopped: None });
        if let Some((behind, pages)) = reader.met() {
            pinned.tell(behind, pages);
        }
        reader.end_drop_behind(position, pinned.len(), Locks::Wait);
        Ok(pinned)
    }

    /// Pins what held folios have of the rest of `len` bytes at `position`, as far as the file reached
    /// before they were held, `size`, and reaches now. Returns the first page of the one with the marker.
    fn pin_batch(
        &self,
        (mapping, reader): (&Mapping, Reader<'_>),
        pinned: &mut Pinned,
        batch: &mut ReadBatch<'_>,
        position: u64,
        len: usize,
        size: u64,
    ) -> Option<PageIndex> {
        // The size, after the data is held, too, and then whether it is still the file's; see `hit.rs`.
        let end = mapping.size().min(size);
        let mut marked = None;
        for held in batch.drain().take_while(Held::is_attached) {
            if held.has_marker() {
                marked = Some(held.first());
            }
            let at = position + pinned.len() as u64;
            let left = end.saturating_sub(at).min((len - pinned.len()) as u64) as usize;
            if left > 0 {
                reader.touch(self.arena.view().grown(), held.frame());
                pinned.add(held, at, left);
            }
        }
        marked
    }
}

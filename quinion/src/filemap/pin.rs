//! Pin: a range of a file held in the cache, folio by folio.
//!
//! ```text
//!   for each folio from `position` on
//!     1 hold     the folio if it is there and readable; else the way of a miss, and wait
//!     2 touch    its referenced byte; a marker starts the next window, as for a read
//!     3 size     looked at after the data is held, so that no byte past the end is shown
//!     4 add      the hold becomes a pin, the bytes join the last piece if they lie behind it
//! ```
//!
//! A pin is a read without the copy: it is counted as one, and as a hit if no
//! folio had to be waited for.
//!
//! Invariants:
//!  1. What is pinned is one range without a hole, from `position` on.
//!  2. On an error nothing stays pinned: what was gathered is dropped on the way out.
//!
//! Not an invariant: that the whole range is of one version of the file. Each
//! folio is what the file was when that folio was filled.

use std::sync::Arc;

use crate::arena::Readable;
use crate::error::Error;
use crate::folio::Pinned;
use crate::mapping::Mapping;
use crate::readahead::Readahead;
use crate::sync::RankedMutex;
use crate::sys::fork::ForkGuard;
use crate::units::PageIndex;

use super::fill::Filemap;
use super::read::{Patience, touch};

impl Filemap {
    /// Pins `len` bytes at `position`, or as many as the file has there; waits until all of them are in the
    /// cache.
    pub fn pin(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        readahead: &RankedMutex<Readahead>,
        position: u64,
        len: usize,
        process: ForkGuard,
    ) -> Result<Pinned, Error> {
        let pinned = self.pin_known(mapping, readahead, position, len, process)?;
        // Nothing there, as far as is known: as for a read, the file is looked at again, once.
        if pinned.is_empty() && len > 0 && self.look_at_the_end(mapping)? {
            return self.pin_known(mapping, readahead, position, len, process);
        }
        Ok(pinned)
    }

    /// As [`Filemap::pin`], with the file's size as it is known.
    fn pin_known(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        readahead: &RankedMutex<Readahead>,
        position: u64,
        len: usize,
        process: ForkGuard,
    ) -> Result<Pinned, Error> {
        let mut pinned = Pinned::new(Arc::clone(&self.arena), process);
        let mut hit = true;
        while pinned.len() < len {
            let at = position + pinned.len() as u64;
            // The size, before the data is held; see `read_folio`.
            let size = mapping.size();
            let ready = mapping.try_hold(PageIndex::of_byte(at)).ok();
            let held = match ready.filter(|held| held.is_readable() == Readable::Yes) {
                Some(held) => held,
                None => {
                    hit = false;
                    let rest = len - pinned.len();
                    match self.hold_folio(mapping, readahead, Patience::Wait, at, rest)? {
                        Some(held) => held,
                        None => break,
                    }
                }
            };
            touch(self.arena.view().grown(), held.frame());
            if held.has_marker() {
                self.advance(mapping, readahead, held.first(), Patience::Wait);
            }
            // The size, after the data is held, too.
            let left = mapping.size().min(size).saturating_sub(at).min((len - pinned.len()) as u64) as usize;
            if left == 0 {
                break;
            }
            pinned.add(held, at, left);
        }
        self.count_read(pinned.len(), hit);
        Ok(pinned)
    }
}

//! Pin: a range of a memory file, lent as it is.
//!
//! Where there are bytes, the folios are pinned as those of any file. Where there are none, in a hole or in an
//! allocated range that was not written, **shared zero pages** are lent: pages of zeros of this process that take no
//! memory of the cache, as often as they are needed. So a pin allocates nothing, and pins only pages that have bytes.
//!
//! A write to the range afterwards does not change pinned bytes: a pinned folio is replaced by a copy, and
//! the shared zeros are not the file's pages.
//!
//! Invariants: those of `filemap/pin.rs`.

use std::sync::Arc;

use crate::arena::{HOLDS_MAX, ReadableState};
use crate::error::{Error, Repr};
use crate::folio::{HeldFolio, Pinned};
use crate::mapping::{BatchEnd, Mapping, ReadBatch};
use crate::sys::fork::ForkGuard;
use crate::units::{PageIndex, met_end_within_page};

use super::Shmem;

impl Shmem {
    /// Pins `len` bytes at `position`, or as many as the file has there. Waits for a caller that is filling a page.
    ///
    /// # Errors
    /// Pins would keep more than they may, or a folio has all the holds that it can have; nothing is pinned then.
    pub(crate) fn pin(
        &self,
        mapping: &Arc<Mapping>,
        position: u64,
        len: usize,
        process: ForkGuard,
    ) -> Result<Pinned, Error> {
        let filemap = &self.filemap;
        let (mut pinned, mut batch) = (Pinned::new(Arc::clone(&filemap.arena), process), ReadBatch::new());
        while pinned.len() < len {
            let at = position.saturating_add(pinned.len() as u64);
            // A pin that has met the end of the file within a page is over; see `read.rs`.
            if met_end_within_page(position, pinned.len()) {
                break;
            }
            // The size before the batch; the lesser of it and of the size after the batch counts, see `read.rs`.
            let range = PinnedRange { position, len, size: mapping.size() };
            let want = range.size.saturating_sub(at).min((len - pinned.len()) as u64) as usize;
            if want == 0 {
                break;
            }
            let (first, last) = (PageIndex::of_byte(at), PageIndex::of_byte(at + want as u64 - 1));
            let end = mapping.get_folios_contig(first, last, &mut batch);
            if batch.is_empty() {
                if end == BatchEnd::TooMany {
                    return Err(Repr::TooManyPins { holds: HOLDS_MAX }.into());
                }
                let hole = self.hole_at(mapping, at..at + want as u64)?;
                pinned.add_zeros(hole.min(mapping.size().saturating_sub(at) as usize));
                continue;
            }
            if let Some(held) = self.pin_batch(mapping, &mut pinned, &mut batch, range) {
                self.wait_filled(mapping, &held);
            }
            if pinned.count_pages() > filemap.bound().pinned_pages_max() {
                return Err(filemap.bound().too_much_pinned(len as u64));
            }
        }
        filemap.counters.add_hit(pinned.len() as u64);
        Ok(pinned)
    }

    /// As far as the file reached before they were held, and reaches now. Returns the first if it is being filled.
    fn pin_batch<'m>(
        &self,
        mapping: &Mapping,
        pinned: &mut Pinned,
        batch: &mut ReadBatch<'m>,
        PinnedRange { position, len, size }: PinnedRange,
    ) -> Option<HeldFolio<'m>> {
        let before = pinned.len();
        for held in batch.drain() {
            let at = position + pinned.len() as u64;
            let rest = (len - pinned.len()) as u64;
            let left = || mapping.size().min(size).saturating_sub(at).min(rest) as usize;
            let behind = held.first().plus(u64::from(held.order().pages())).first_byte();
            if left() == 0 {
                return None; // cut off meanwhile
            }
            match held.is_readable() {
                ReadableState::Yes => {
                    self.touch(&held);
                    pinned.add(held, at, left);
                }
                ReadableState::Zeros => pinned.add_zeros(((behind - at) as usize).min(left())),
                ReadableState::NotYet | ReadableState::Never => {
                    return (pinned.len() == before).then_some(held);
                }
            }
            if position + (pinned.len() as u64) < behind {
                return None; // what follows does not lie behind what there is
            }
        }
        None
    }
}

#[derive(Clone, Copy, Debug)]
struct PinnedRange {
    position: u64,
    len: usize,
    size: u64,
}

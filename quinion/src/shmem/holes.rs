//! Holes: a memory file is cut, extended and punched, and asked where it has data.
//!
//! To cut and to punch are the steps of every file (`filemap/truncate.rs`), with a device that has nothing to do: alone
//! with the file, quiet, pins given their copies, folios split at the edges, the parts of pages at both ends zeroed in
//! place, and the folios between taken out. Memory that is taken out is free at once, or with its last pin.
//!
//! The tree says, under its lock and folio by folio, where there is data. An allocated folio is not data, although it
//! takes memory, and neither are pages behind the end. A folio is data as a whole, so a hole may be smaller than the
//! range that was not written.

use std::ops::Range;
use std::sync::Arc;

use crate::error::Error;
use crate::filemap::{OnPinned, Truncation};
use crate::mapping::{Mapping, SeekTarget};
use crate::units::{PageIndex, pages_of_bytes};

use super::Shmem;

impl Shmem {
    /// Makes the file `bytes` long: cuts it off there, or extends it by a hole.
    ///
    /// # Errors
    /// There is no memory for the copy of the part of a pinned folio that stays, or its pins were waited for in vain.
    pub(crate) fn set_len(
        &self,
        mapping: &Arc<Mapping>,
        bytes: u64,
        on_pinned: OnPinned,
    ) -> Result<(), Error> {
        Truncation::of(&self.filemap, mapping).cut(bytes, on_pinned)
    }

    /// Makes the bytes of `range` zeros, and gives back the memory of the folios and parts of folios that
    /// lie there. Bytes behind the end of the file are left out.
    ///
    /// # Errors
    /// As [`Shmem::set_len`].
    pub(crate) fn punch(
        &self,
        mapping: &Arc<Mapping>,
        range: Range<u64>,
        on_pinned: OnPinned,
    ) -> Result<(), Error> {
        Truncation::of(&self.filemap, mapping).punch(range, on_pinned)
    }

    /// The first byte from `position` on that lies in data, or in a hole; the end of the file counts as a hole. `None`:
    /// there is no such byte before the end, or `position` is not before it.
    pub(crate) fn seek(&self, mapping: &Mapping, position: u64, wanted: SeekTarget) -> Option<u64> {
        let size = mapping.size();
        if position >= size {
            return None;
        }
        let pages = PageIndex::of_byte(position)..PageIndex(pages_of_bytes(size));
        match mapping.seek_memory(pages, wanted) {
            Some(page) => Some(page.first_byte().max(position)),
            None if wanted == SeekTarget::Hole => Some(size),
            None => None,
        }
    }
}

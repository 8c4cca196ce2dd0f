//! Residency: which pages of a file are in the cache, by range.
//!
//! ```text
//!   residency(position, len)    how many pages are in which state
//!   residents(position, len)    which ones: ranges of one state, in rising order
//! ```
//!
//! The walk is in `mapping/residency.rs`; here pages become bytes and a range ends with the file. It reads nothing,
//! sets no referenced byte, and keeps no page. Ended reads of the device are completed first, without waiting: after
//! a hint no reader may have done so.

use std::ops::Range;

use crate::backend::ReapMode;
use crate::error::{Repr, Result};
use crate::mapping::{PageState, StateRanges};
use crate::sys::fork::ForkGuard;
use crate::units::{PAGE_SIZE, PageIndex, pages_of_bytes};

use super::{File, Handle};

/// Pages of a range that follow each other and are in one state.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ResidentRange {
    /// The bytes: whole pages, but for the file's last.
    pub bytes: Range<u64>,
    /// The number of these pages.
    pub pages: u64,
    /// State of the pages.
    pub state: PageState,
}

/// How many pages of a range are in which state; the last four add up to the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Residency {
    /// Pages of the range that the file has.
    pub pages: u64,
    /// Pages there to be read.
    pub cached_pages: u64,
    /// Pages on their way.
    pub filling_pages: u64,
    /// Pages that are absent, and whose eviction is remembered.
    pub remembered_pages: u64,
    /// Pages of which nothing is known.
    pub absent_pages: u64,
}

/// Ranges of a file, each of pages in one state, in rising order; made by [`File::residents`].
#[derive(Debug)]
pub struct ResidentRanges<'f> {
    stretches: StateRanges<'f>,
    size: u64,
    process: ForkGuard,
}

impl File {
    /// How many pages of the `len` bytes at `position`, as far as the file goes, are in which state. Holds the file's
    /// lock for some hundred folios at a time; costs some ten nanoseconds for each. The numbers are of no one moment.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn residency(&self, position: u64, len: u64) -> Result<Residency> {
        let mut residency = Residency::default();
        self.residents(position, len)?.for_each(|resident| residency.add(&resident));
        Ok(residency)
    }

    /// As [`File::residency`], range by range: neighbours differ in state. The lock is not held between two calls of
    /// `next`, which in a forked child finds nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn residents(&self, position: u64, len: u64) -> Result<ResidentRanges<'_>> {
        let Handle { shared, mapping, .. } = &*self.handle;
        if shared.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        // Fills of a hint have no reader that reaps them.
        mapping.backend().reap(ReapMode::Ready, &mut || false);
        let size = mapping.size();
        let end = PageIndex(pages_of_bytes(position.saturating_add(len).min(size)));
        let from = if len == 0 { end } else { PageIndex::of_byte(position) };
        Ok(ResidentRanges { stretches: mapping.state_ranges(from, end), size, process: shared.process })
    }
}

impl Residency {
    fn add(&mut self, resident: &ResidentRange) {
        let number = match resident.state {
            PageState::Cached => &mut self.cached_pages,
            PageState::Filling => &mut self.filling_pages,
            PageState::Remembered => &mut self.remembered_pages,
            PageState::Absent => &mut self.absent_pages,
        };
        *number += resident.pages;
        self.pages += resident.pages;
    }
}

impl Iterator for ResidentRanges<'_> {
    type Item = ResidentRange;

    fn next(&mut self) -> Option<ResidentRange> {
        if self.process.is_forked() {
            return None;
        }
        let stretch = self.stretches.next()?;
        let from = stretch.first.first_byte();
        let end = from.saturating_add(stretch.pages.saturating_mul(PAGE_SIZE as u64)).min(self.size);
        Some(ResidentRange { bytes: from..end, pages: stretch.pages, state: stretch.state })
    }
}

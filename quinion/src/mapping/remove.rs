//! Remove: the cached pages of a range of a file go, on behalf of the caller that takes it out of the file.
//!
//! ```text
//!   index    0   1   2   3   4   5   6   7   8   9
//!            [---- F ----]   [G]  s  [------ H --            range 2 to 10: F and H reach over an edge of it, and
//!                    |----------------------------|          stay; G and the shadow go
//! ```
//!
//! The caller has the invalidate lock alone, so nothing comes into the range meanwhile, and has split at its
//! edges, if that matters (`split.rs`). Nothing waits here.
//!
//! | the folio is | [`RemoveFilter::All`] | [`RemoveFilter::Clean`] |
//! |---|---|---|
//! | held by readers, pinned | goes; the last of them frees it | the same |
//! | being filled | goes; the fill frees it | stays |
//! | dirty, or being written | goes, and is not dirty any more | stays |
//! | spilled | goes, and its slots are free | stays |
//!
//! Fills and flushes in flight must end before the file is cut on its device: [`Mapping::find_in_flight`] finds it.
//!
//! Invariants:
//!  1. A folio that leaves here leaves no shadow, and shadows in the range go as well.
//!  2. No folio and nothing spilled goes that reaches over an edge of the range.
//!
//! Cost: one walk over the range, a way down for each run of neighbours; [`REMOVED_FOLIOS_MAX`] entries for each lock.

use std::ops::Range;

use crate::arena::{Flags, RetireOutcome};
use crate::folio::HeldFolio;
use crate::stats::Count;
use crate::units::{Frame, Order, PageIndex};
use crate::xarray::{INDICES_MAX, Kind};

use super::owner::{Mapping, MappingGuard};

/// Entries that are looked at under one hold of the tree lock.
pub const REMOVED_FOLIOS_MAX: usize = 512;

/// Entries that are looked at under one hold of the tree lock where none is removed.
const SCANNED_ENTRIES_MAX: usize = 4096;

/// Which folios of a range go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoveFilter {
    /// All folios: their bytes are no longer wanted.
    All,
    /// Folios whose bytes the file has: neither dirty nor under write-back.
    Clean,
}

/// The outcome of removing a range under one hold of the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removed {
    /// Pages that went.
    pub pages: u64,
    /// Where the next call should begin; the end of the range if it is done.
    pub next: PageIndex,
}

/// A fill or a flush in flight, or where none was found.
#[derive(Debug)]
pub enum InFlightFolio<'m> {
    /// A folio in flight, which is held.
    Folio(HeldFolio<'m>),
    /// No folio in flight before this page: go on there.
    None(PageIndex),
}

impl Mapping {
    /// Takes all entries in `pages` out, hold by hold of the tree lock; how many pages went.
    pub fn remove_range(&self, pages: Range<PageIndex>, what: RemoveFilter) -> u64 {
        let (mut from, mut gone) = (pages.start, 0);
        while from < pages.end {
            let mut free = Vec::with_capacity(REMOVED_FOLIOS_MAX); // before the lock
            let removed = self.lock().remove_some(from..pages.end, what, &mut free);
            self.arena().free_all(&free);
            (from, gone) = (removed.next, gone + removed.pages);
        }
        gone
    }

    /// The first folio that meets `pages` and is being filled or written, held; or how far none is. Nothing new begins
    /// while the caller has the invalidate lock alone.
    pub fn find_in_flight(&self, pages: Range<PageIndex>) -> InFlightFolio<'_> {
        let guard = self.lock();
        let nodes = self.nodes();
        let tree = guard.xarray(&nodes);
        let (mut next, mut seen) = (pages.start, 0);
        for (first, entry, order) in tree.range(pages.start.0, pages.end.0.saturating_sub(1)) {
            if let Kind::Folio(frame) = entry.kind()
                && self.view().own(Frame(frame)).word().has(Flags::LOCKED | Flags::WRITEBACK)
            {
                // Refused only if it has all the holds that it can have: come again.
                let held = HeldFolio::take(self.arena(), Frame(frame), self.id(), PageIndex(first));
                return held.map_or(InFlightFolio::None(next), InFlightFolio::Folio);
            }
            next = PageIndex(first + (1 << order));
            seen += 1;
            if seen == SCANNED_ENTRIES_MAX {
                return InFlightFolio::None(next);
            }
        }
        InFlightFolio::None(next.max(pages.end))
    }

    /// The first page of a folio that meets `pages` and is pinned; a hint, as pins come and go.
    pub fn first_pinned(&self, pages: Range<PageIndex>) -> Option<PageIndex> {
        let mut from = pages.start.0;
        while from < pages.end.0 {
            let guard = self.lock();
            let nodes = self.nodes();
            let tree = guard.xarray(&nodes);
            let mut next = pages.end.0;
            for (seen, (first, entry, order)) in tree.range(from, pages.end.0 - 1).enumerate() {
                if let Kind::Folio(frame) = entry.kind()
                    && self.view().own(Frame(frame)).is_pinned()
                {
                    return Some(PageIndex(first));
                }
                if seen == SCANNED_ENTRIES_MAX {
                    next = first + (1 << order);
                    break;
                }
            }
            from = next;
        }
        None
    }
}

impl MappingGuard<'_> {
    /// As [`Mapping::remove_range`], [`REMOVED_FOLIOS_MAX`] entries at most; the caller frees the entries of `free`.
    pub fn remove_some(
        &mut self,
        pages: Range<PageIndex>,
        what: RemoveFilter,
        free: &mut Vec<(Frame, Order)>,
    ) -> Removed {
        let mapping = self.mapping;
        let (nodes, end) = (mapping.nodes(), pages.end.0.min(INDICES_MAX));
        let mut tree = self.xarray(&nodes);
        let (mut from, mut seen) = (pages.start.0, 0);
        let mut gone: Vec<(Frame, Order)> = Vec::new();
        while from < end && seen < REMOVED_FOLIOS_MAX {
            // The next entries that go, with the empty slots between them; and where to continue behind those that
            // stay.
            let (mut run, mut then) = (from..end, end);
            for (first, entry, order) in tree.range(from, end - 1) {
                let behind = first + (1 << order);
                if seen == REMOVED_FOLIOS_MAX {
                    (run.end, then) = (first, first);
                    break;
                }
                seen += 1;
                let goes = match entry.kind() {
                    Kind::Folio(frame) => mapping.is_removable(Frame(frame), what),
                    Kind::Value(value) if value.is_spill() => what == RemoveFilter::All,
                    _ => continue, // a shadow goes also if it reaches over an edge
                };
                if !(goes && pages.start.0 <= first && behind <= end) {
                    (run.end, then) = (first.max(from), behind);
                    break;
                }
            }
            tree.erase_range(run.start, run.end, |_, entry, order| match entry.kind() {
                Kind::Folio(frame) => gone.push((Frame(frame), Order(order))),
                Kind::Value(value) => mapping.forget_value(value),
                Kind::Empty | Kind::Node(_) => {}
            });
            from = then;
        }
        // Retired when the entries are gone, as in `drop_behind.rs`.
        let unread = mapping.retire_all(&gone, |frame, order, retired| match retired {
            RetireOutcome::Free => free.push((frame, order)),
            RetireOutcome::Held => {}
        });
        mapping.count(Count::ReadaheadWasted, unread);
        let removed = gone.iter().map(|(_, order)| u64::from(order.pages())).sum();
        self.tree.pages -= removed;
        Removed { pages: removed, next: PageIndex(from).min(pages.end).max(pages.start) }
    }

    /// Where in `pages`, all of one folio, dirty pages begin or end: it is split there, so that clean pages go.
    pub fn next_mixed(&self, pages: Range<PageIndex>) -> Option<PageIndex> {
        let mut from = pages.start;
        while let Some(dirty) = self.next_dirty(from..pages.end) {
            let (first, order) = self.folio_at(dirty)?;
            let end = first.plus(u64::from(order.pages()));
            if first < dirty && pages.start < dirty {
                return Some(dirty);
            }
            let clean = (dirty.0..end.0).find(|&page| !self.is_page_dirty(PageIndex(page)));
            match clean {
                Some(clean) if clean < pages.end.0 => return Some(PageIndex(clean)),
                _ => from = end,
            }
        }
        None
    }

    /// The folio that covers `index`.
    pub fn folio_at(&self, index: PageIndex) -> Option<(PageIndex, Order)> {
        let nodes = self.mapping.nodes();
        let (first, entry, order) = self.xarray(&nodes).entry_at(index.0)?;
        matches!(entry.kind(), Kind::Folio(_)).then_some((PageIndex(first), Order(order)))
    }

    fn is_page_dirty(&self, page: PageIndex) -> bool {
        self.next_dirty(page..page.plus(1)).is_some()
    }
}

impl Mapping {
    /// Whether a folio inside a range is removed; see the table at the top. The caller holds the tree lock.
    fn is_removable(&self, frame: Frame, what: RemoveFilter) -> bool {
        let word = self.view().own(frame).word();
        what == RemoveFilter::All || !word.has(Flags::UNWRITTEN | Flags::LOCKED)
    }
}

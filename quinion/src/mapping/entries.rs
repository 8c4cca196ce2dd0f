//! Entries: queries of the index by the holder of the tree lock: gaps, entries and folios of a range.
//!
//! All of these are answers about one moment: they hold until the guard is dropped. A page that is spilled counts as
//! present here, since its bytes are not on the device.
//!
//! Cost: one way down for each call, and a step for each entry of the range.

use crate::backend::FillRun;
use crate::units::{Frame, Order, PageIndex};
use crate::xarray::{Entry, Kind};

use super::owner::MappingGuard;

impl MappingGuard<'_> {
    /// The first index at or after `from`, and before `end`, at which no folio stands and nothing that was spilled, and
    /// how many such indices follow on each other there.
    pub fn next_gap(&self, from: PageIndex, end: PageIndex) -> Option<(PageIndex, u64)> {
        let nodes = self.mapping.nodes();
        let mut gap = from.0;
        for (first, entry, order) in self.xarray(&nodes).range(from.0, end.0.saturating_sub(1)) {
            match entry.kind() {
                Kind::Value(value) if !value.is_spill() => {} // a shadow is no folio
                _ if first > gap => return Some((PageIndex(gap), first - gap)),
                _ => gap = first + (1 << order),
            }
        }
        (gap < end.0).then(|| (PageIndex(gap), end.0 - gap))
    }

    /// The first index at or after `from`, and before `end`, at which there is an entry.
    pub fn next_entry(&self, from: PageIndex, end: PageIndex) -> Option<PageIndex> {
        if from >= end {
            return None;
        }
        let nodes = self.mapping.nodes();
        let (first, ..) = self.xarray(&nodes).next(from.0, end.0 - 1)?;
        Some(PageIndex(first).max(from))
    }

    /// The folios that lie as a whole in `from..end`, in rising order.
    pub fn folios_within(&self, from: PageIndex, end: PageIndex) -> Vec<(PageIndex, Frame)> {
        let folio = |(index, entry, _): (PageIndex, Entry, Order)| match entry.kind() {
            Kind::Folio(frame) => Some((index, Frame(frame))),
            _ => None,
        };
        self.inside(from, end, end).into_iter().filter_map(folio).collect()
    }

    /// The entries that begin in `from..to` and end by `end`.
    pub(super) fn inside(
        &self,
        from: PageIndex,
        to: PageIndex,
        end: PageIndex,
    ) -> Vec<(PageIndex, Entry, Order)> {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let within = |&(first, _, order): &(u64, Entry, u8)| first >= from.0 && first + (1 << order) <= end.0;
        let entries = tree.range(from.0, to.0.saturating_sub(1)).filter(within);
        entries.map(|(first, entry, order)| (PageIndex(first), entry, Order(order))).collect()
    }

    /// Whether a folio of a fill still stands where it was put.
    pub fn holds_run(&self, run: FillRun) -> bool {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let mut page = 0;
        while page < run.pages {
            let frame = run.frame.plus(page);
            if tree.load(run.index.0 + u64::from(page)) == Entry::folio(frame.0) {
                return true;
            }
            page += self.mapping.view().own(frame).word().order().pages();
        }
        false
    }
}

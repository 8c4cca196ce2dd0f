//! Residency: the states of a range's pages, stretch by stretch.
//!
//! ```text
//!   tree        [---- F ----][ G ]  .  .  [s][s][ H ]      F, G filled   H being filled   s  shadows
//!   stretches   [--- cached ----][absent] [rem.][fill]     neighbours of one state are one stretch
//! ```
//!
//! The lock is held for a few hundred entries of the tree and let go; the next entries are sought anew from the page
//! after them. So a report of a large file keeps no reader or fill waiting for long, and no list of a whole file is
//! made.
//!
//! Invariants:
//!  1. Stretches follow each other without a gap or an overlap, and end where the range ends.
//!  2. Two that follow each other differ in state.
//!
//! Not an invariant: that all stretches are of one moment. Those gathered under one hold of the lock are.
//!
//! Cost: a step for each entry, and the nodes on the way; absent pages are stepped over by nodes.

use crate::arena::Flags;
use crate::units::{Frame, PageIndex};
use crate::xarray::Kind;

use super::owner::{Mapping, MappingGuard};

/// Entries of the tree that are looked at under one hold of its lock.
const ENTRIES_MAX: usize = 256;

/// The state of a page of a file in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PageState {
    /// The page can be read.
    Cached,
    /// The page is being fetched: a read of it waits. (Some pages of a large folio may be readable already.)
    Filling,
    /// The page is not cached, but its eviction is remembered.
    Remembered,
    /// The page is not cached.
    Absent,
}

/// Pages that follow each other and are in one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateRange {
    /// The first of the pages.
    pub first: PageIndex,
    /// How many pages they are; at least 1.
    pub pages: u64,
    /// The state of all these pages.
    pub state: PageState,
}

impl StateRange {
    fn end(&self) -> PageIndex {
        self.first.plus(self.pages)
    }
}

impl Mapping {
    /// The stretches of `from..end`, in rising order. Takes the tree lock now and again.
    pub fn state_ranges(&self, from: PageIndex, end: PageIndex) -> StateRanges<'_> {
        StateRanges { mapping: self, next: from, end, gathered: Vec::new().into_iter() }
    }
}

/// An iteration over stretches, made by [`Mapping::state_ranges`].
#[derive(Debug)]
pub struct StateRanges<'m> {
    mapping: &'m Mapping,
    next: PageIndex,
    end: PageIndex,
    gathered: std::vec::IntoIter<StateRange>,
}

impl StateRanges<'_> {
    /// The next stretch found under one hold of the lock. It may go on in the one after it.
    fn piece(&mut self) -> Option<StateRange> {
        if self.gathered.as_slice().is_empty() && self.next < self.end {
            let gathered = self.mapping.lock().stretches(self.next, self.end);
            self.next = gathered.last().map_or(self.end, StateRange::end);
            self.gathered = gathered.into_iter();
        }
        self.gathered.next()
    }

    fn next_in_same_state(&mut self, stretch: StateRange) -> Option<StateRange> {
        let next = self.piece()?;
        if next.state == stretch.state {
            return Some(next);
        }
        // It is put back: the gathered stretches are the rest behind it.
        let rest: Vec<_> = std::iter::once(next).chain(self.gathered.by_ref()).collect();
        self.gathered = rest.into_iter();
        None
    }
}

impl Iterator for StateRanges<'_> {
    type Item = StateRange;

    fn next(&mut self) -> Option<StateRange> {
        let mut stretch = self.piece()?;
        // Within one hold neighbours are joined already: only the last of it can go on in the next.
        while self.gathered.as_slice().is_empty()
            && let Some(more) = self.next_in_same_state(stretch)
        {
            stretch.pages += more.pages;
        }
        Some(stretch)
    }
}

impl MappingGuard<'_> {
    /// The first stretches of `from..end`, as far as a batch of entries goes; all of them, or up to an entry's end.
    fn stretches(&self, from: PageIndex, end: PageIndex) -> Vec<StateRange> {
        let nodes = self.mapping.nodes();
        let mut found = Vec::new();
        let (mut at, mut entries) = (from.0, 0);
        for (first, entry, order) in self.xarray(&nodes).range(from.0, end.0.saturating_sub(1)) {
            push(&mut found, at, first, PageState::Absent);
            let (first, behind) = (first.max(from.0), end.0.min(first + (1 << order)));
            push(&mut found, first, behind, self.state_of(entry.kind()));
            (at, entries) = (behind, entries + 1);
            if entries == ENTRIES_MAX {
                return found;
            }
        }
        push(&mut found, at, end.0, PageState::Absent);
        found
    }

    fn state_of(&self, kind: Kind) -> PageState {
        match kind {
            Kind::Folio(frame) if self.mapping.view().own(Frame(frame)).word().has(Flags::UPTODATE) => {
                PageState::Cached
            }
            Kind::Folio(_) => PageState::Filling,
            Kind::Value(value) if !value.is_spill() => PageState::Remembered,
            Kind::Value(_) | Kind::Node(_) | Kind::Empty => PageState::Absent,
        }
    }
}

fn push(found: &mut Vec<StateRange>, from: u64, end: u64, state: PageState) {
    if from >= end {
        return;
    }
    match found.last_mut() {
        Some(last) if last.state == state => last.pages += end - from,
        _ => found.push(StateRange { first: PageIndex(from), pages: end - from, state }),
    }
}

//! Page ranges: which pages of a file something is true of, in bounded memory.
//!
//! ```text
//!   insert 3..5, 9..12    [3 5)      [9   12)
//!   insert 5..9           [3         12)            neighbours become one
//!   remove 4..6           [3 4)  [6  12)
//!   one range too many    [first            last)   all that lies between them belongs to it now
//! ```
//!
//! Once there are too many ranges, it may also contain pages that were never inserted. Its users therefore only do
//! things that no byte of this cache is lost by for a page too many: sync it again, or write a cached page again after
//! a sync that failed. (If another program has changed that page of the file meanwhile, its bytes go.)
//!
//! Invariants:
//!  1. Ranges are not empty, do not touch, and stand in rising order.
//!  2. There are [`RANGES_MAX`] at most.
//!  3. A page that was inserted, and not removed since, belongs to it.
//!
//! Cost: a search in a tree, and one step for each range that is joined or cut.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::units::PageIndex;

/// How many ranges are kept apart: 64 KiB of the heap.
pub const RANGES_MAX: usize = 2048;

/// A set of pages of a file, as ranges.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PageRanges {
    /// The ranges: the first page of each, and the first page behind it.
    ranges: BTreeMap<u64, u64>,
}

impl PageRanges {
    /// An empty set.
    pub const fn new() -> Self {
        Self { ranges: BTreeMap::new() }
    }

    /// Whether no page belongs to it.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many pages belong to it.
    pub fn pages(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }

    /// The ranges, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = Range<PageIndex>> + '_ {
        self.ranges.iter().map(|(&start, &end)| PageIndex(start)..PageIndex(end))
    }

    /// Adds the pages of a range.
    pub fn insert(&mut self, pages: Range<PageIndex>) {
        let (mut start, mut end) = (pages.start.0, pages.end.0);
        if start >= end {
            return;
        }
        // The last that begins at or before this end may touch this range, and those before it.
        while let Some((&first, &last)) = self.ranges.range(..=end).next_back()
            && last >= start
        {
            self.ranges.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.ranges.insert(start, end);
        if self.ranges.len() > RANGES_MAX {
            self.fill_gaps();
        }
    }

    /// Adds all pages of `others`.
    pub fn insert_all(&mut self, others: &Self) {
        others.iter().for_each(|pages| self.insert(pages));
    }

    /// Takes the pages of a range out, and returns those that belonged to it.
    pub fn take(&mut self, pages: Range<PageIndex>) -> Self {
        let (start, end) = (pages.start.0, pages.end.0);
        let mut taken = Self::new();
        if start >= end {
            return taken;
        }
        while let Some((&first, &last)) = self.ranges.range(..end).next_back()
            && last > start
        {
            self.ranges.remove(&first);
            taken.ranges.insert(first.max(start), last.min(end));
            if last > end {
                self.ranges.insert(end, last);
            }
            if first < start {
                self.ranges.insert(first, start);
            }
        }
        if self.ranges.len() > RANGES_MAX {
            self.fill_gaps(); // a hole in one made two of it
        }
        taken
    }

    #[cold]
    fn fill_gaps(&mut self) {
        let first = self.ranges.first_key_value().map(|(&start, _)| start);
        let last = self.ranges.last_key_value().map(|(_, &end)| end);
        self.ranges.clear();
        self.ranges.extend(first.zip(last));
    }

    #[cfg(test)]
    fn check(&self) -> Result<(), String> {
        let mut before = None;
        for (&start, &end) in &self.ranges {
            if start >= end || before.is_some_and(|before| start <= before) {
                return Err(format!("{start}..{end} after {before:?}"));
            }
            before = Some(end);
        }
        if self.ranges.len() > RANGES_MAX { Err("too many".into()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, end: u64) -> Range<PageIndex> {
        PageIndex(start)..PageIndex(end)
    }

    fn pages_of(ranges: &PageRanges) -> BTreeSet<u64> {
        ranges.iter().flat_map(|pages| pages.start.0..pages.end.0).collect()
    }

    proptest! {
        #[test]
        fn page_ranges_are_a_set_of_pages(ops in prop::collection::vec((any::<bool>(), 0..60u64, 0..20u64), 1..60)) {
            let (mut ranges, mut twin) = (PageRanges::new(), BTreeSet::new());
            for (inserts, start, len) in ops {
                let pages = start..start + len;
                if inserts {
                    ranges.insert(range(pages.start, pages.end));
                    twin.extend(pages);
                } else {
                    let taken = ranges.take(range(pages.start, pages.end));
                    prop_assert_eq!(taken.check(), Ok(()));
                    let gone: BTreeSet<u64> = pages.filter(|page| twin.remove(page)).collect();
                    prop_assert_eq!(pages_of(&taken), gone);
                }
                prop_assert_eq!(ranges.check(), Ok(()));
                prop_assert_eq!(pages_of(&ranges), twin.clone());
                prop_assert_eq!(ranges.pages(), twin.len() as u64);
                prop_assert_eq!(ranges.is_empty(), twin.is_empty());
            }
        }
    }

    #[test]
    fn too_many_ranges_become_one_that_covers_them() {
        let mut ranges = PageRanges::new();
        (0..RANGES_MAX as u64).for_each(|at| ranges.insert(range(10 * at, 10 * at + 1)));
        assert_eq!(ranges.pages(), RANGES_MAX as u64, "so many are kept apart");
        ranges.insert(range(5, 6));
        let end = 10 * (RANGES_MAX as u64 - 1) + 1;
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [range(0, end)]);
        let mut cut = PageRanges::new();
        cut.insert(range(0, 10));
        (1..RANGES_MAX as u64).for_each(|at| cut.insert(range(20 * at, 20 * at + 1)));
        assert_eq!(pages_of(&cut.take(range(4, 5))), BTreeSet::from([4]));
        assert_eq!(cut.iter().count(), 1, "and one with a hole in it is two");
    }
}

//! Index: which pages of which content are where, in memory alone. It is made anew from the segments' tables.
//!
//! ```text
//!   content -> { first page -> extent: segment, place, pages, checksum }      extents of a content never overlap
//!   segment -> [ (content, first page) ]                                      what to forget when it is written anew
//! ```
//!
//! Invariants:
//!  1. Each extent that is found stands in the list of its segment, so forgetting a segment leaves none behind.
//!  2. No page of a content is in two extents.
//!
//! Cost: about 80 bytes of heap for each extent, which is of 1 to 16 pages.

use std::collections::hash_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap};

use crate::layout::{ContentKey, Entry};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    pub page: u64,
    pub pages: u16,
    pub segment: u32,
    pub at: u16,
    pub checksum: u64,
}

impl Extent {
    fn end(&self) -> u64 {
        self.page + u64::from(self.pages)
    }
}

#[derive(Default, Debug)]
pub struct Index {
    contents: HashMap<ContentKey, BTreeMap<u64, Indexed>>,
    segments: Vec<Vec<(ContentKey, u64)>>,
    extents: u64,
    pages: u64,
}

#[derive(Clone, Copy, Debug)]
struct Indexed {
    extent: Extent,
    was_read: bool,
}

impl Index {
    pub fn new(segments: u32) -> Self {
        Self { segments: vec![Vec::new(); segments as usize], ..Self::default() }
    }

    pub fn totals(&self) -> (u64, u64) {
        (self.extents, self.pages)
    }

    /// Whether it did: not if any of its pages is there already.
    pub fn insert(&mut self, segment: u32, entry: &Entry) -> bool {
        let Entry { key, page, at, pages, checksum } = *entry;
        let extent = Extent { page, pages, segment, at, checksum };
        let content = self.contents.entry(key).or_default();
        let before = content.range(..extent.end()).next_back();
        if before.is_some_and(|(_, other)| other.extent.end() > page) {
            return false;
        }
        content.insert(page, Indexed { extent, was_read: false });
        self.segments[segment as usize].push((key, page));
        self.extents += 1;
        self.pages += u64::from(pages);
        true
    }

    pub fn find(&self, key: &ContentKey, page: u64) -> Option<Extent> {
        let (_, found) = self.contents.get(key)?.range(..=page).next_back()?;
        (found.extent.end() > page).then_some(found.extent)
    }

    /// The extents with `pages` pages from `page` on, in order; `None` if a page is in none. Notes them as read.
    pub fn cover(&mut self, key: &ContentKey, page: u64, pages: u32) -> Option<Vec<Extent>> {
        let (mut at, end) = (page, page.checked_add(u64::from(pages))?);
        let content = self.contents.get_mut(key)?;
        let first = content.range(..=page).next_back().map(|(&first, _)| first)?;
        let mut found = Vec::new();
        for (_, indexed) in content.range_mut(first..end) {
            let Indexed { extent, was_read } = indexed;
            if extent.page > at || extent.end() <= at {
                return None;
            }
            found.push(*extent);
            *was_read = true;
            at = extent.end();
        }
        (at >= end).then_some(found)
    }

    /// The first of these pages that no extent has, and how many follow it without one.
    pub fn gap(&self, key: &ContentKey, page: u64, pages: u64) -> Option<(u64, u64)> {
        let (mut at, Some(end)) = (page, page.checked_add(pages)) else { return Some((page, pages)) };
        while at < end {
            match self.find(key, at) {
                Some(extent) => at = extent.end(),
                None => {
                    let next = self.contents.get(key).and_then(|content| content.range(at..end).next());
                    return Some((at, next.map_or(end, |(&next, _)| next) - at));
                }
            }
        }
        None
    }

    /// If it is still where it was found; whether it was.
    pub fn remove(&mut self, key: &ContentKey, extent: &Extent) -> bool {
        let Slot::Occupied(mut content) = self.contents.entry(*key) else { return false };
        let is_there = content.get().get(&extent.page).is_some_and(|indexed| indexed.extent == *extent);
        if is_there {
            content.get_mut().remove(&extent.page);
            self.extents -= 1;
            self.pages -= u64::from(extent.pages);
            if content.get().is_empty() {
                content.remove();
            }
        }
        is_there
    }

    /// Returns what of the segment was read since it was written.
    pub fn forget_segment(&mut self, segment: u32) -> Vec<(ContentKey, Extent)> {
        let listed = std::mem::take(&mut self.segments[segment as usize]);
        let mut read = Vec::new();
        for (key, page) in listed {
            let Some(&Indexed { extent, was_read }) = self.contents.get(&key).and_then(|c| c.get(&page))
            else {
                continue;
            };
            // The same pages may have come back to another segment since.
            if extent.segment == segment && self.remove(&key, &extent) && was_read {
                read.push((key, extent));
            }
        }
        read
    }

    /// Checks its invariants, and says which is broken. Cost: all extents.
    pub fn check(&self) -> Result<(), String> {
        let (mut extents, mut pages) = (0, 0);
        for (key, content) in &self.contents {
            let mut end = 0;
            for (&first, Indexed { extent, .. }) in content {
                if first != extent.page || first < end {
                    return Err(format!("{key:?}: page {first} is in two extents"));
                }
                let listed = &self.segments[extent.segment as usize];
                if !listed.contains(&(*key, first)) {
                    return Err(format!("{key:?}: page {first} is not listed in segment {}", extent.segment));
                }
                (end, extents, pages) = (extent.end(), extents + 1, pages + u64::from(extent.pages));
            }
        }
        if (extents, pages) == self.totals() {
            Ok(())
        } else {
            Err(format!("{extents} extents of {pages} pages are there, and counted are {:?}", self.totals()))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(of: u8) -> ContentKey {
        ContentKey([of; 32])
    }
    fn entry(of: u8, page: u64, pages: u16) -> Entry {
        Entry { key: key(of), page, at: 0, pages, checksum: page }
    }

    #[test]
    fn a_range_is_covered_by_all_its_pages_or_not_at_all() {
        let mut index = Index::new(2);
        assert!(index.insert(0, &entry(1, 4, 4)));
        assert!(index.insert(1, &entry(1, 8, 2)));
        assert_eq!(index.cover(&key(1), 5, 5).unwrap().len(), 2);
        assert_eq!(index.cover(&key(1), 3, 2), None);
        assert_eq!(index.cover(&key(1), 9, 2), None);
        assert_eq!(index.cover(&key(2), 4, 1), None);
        assert_eq!(index.gap(&key(1), 4, 6), None);
        assert_eq!(index.gap(&key(1), 2, 9), Some((2, 2)));
        assert_eq!(index.gap(&key(1), 5, 9), Some((10, 4)));
    }

    #[test]
    fn pages_that_are_there_are_not_added_twice() {
        let mut index = Index::new(2);
        assert!(index.insert(0, &entry(1, 4, 4)));
        for (page, pages) in [(4, 4), (3, 2), (7, 1), (0, 16)] {
            assert!(!index.insert(1, &entry(1, page, pages)), "{page}");
        }
        assert_eq!(index.totals(), (1, 4));
    }

    #[test]
    fn a_segment_that_is_forgotten_reports_read_extents() {
        let mut index = Index::new(2);
        index.insert(0, &entry(1, 0, 4));
        index.insert(0, &entry(1, 4, 4));
        index.cover(&key(1), 4, 1).unwrap();
        let read = index.forget_segment(0);
        assert_eq!(read.iter().map(|(_, extent)| extent.page).collect::<Vec<_>>(), [4]);
        assert_eq!(index.totals(), (0, 0));
        index.check().unwrap();
    }

    proptest! {
        /// Beside a map of single pages.
        #[test]
        fn the_index_agrees_with_a_naive_map(ops in prop::collection::vec(
            (0u8..3, 0u32..4, 0u64..40, 1u16..=16), 1..120,
        )) {
            let (mut index, mut naive) = (Index::new(4), HashMap::<(u8, u64), u32>::new());
            for (of, segment, page, pages) in ops {
                let range = || page..page + u64::from(pages);
                if of == 2 {
                    index.forget_segment(segment);
                    naive.retain(|_, &mut at| at != segment);
                } else {
                    let is_free = range().all(|page| !naive.contains_key(&(of, page)));
                    prop_assert_eq!(index.insert(segment, &entry(of, page, pages)), is_free);
                    if is_free {
                        naive.extend(range().map(|page| ((of, page), segment)));
                    }
                }
                let covered = index.cover(&key(of), page, pages.into()).is_some();
                prop_assert_eq!(covered, range().all(|page| naive.contains_key(&(of, page))));
                let first = range().find(|&page| !naive.contains_key(&(of, page)));
                prop_assert_eq!(index.gap(&key(of), page, pages.into()).map(|(page, _)| page), first);
                prop_assert_eq!(index.totals().1, naive.len() as u64);
                prop_assert_eq!(index.check(), Ok(()));
            }
        }
    }
}

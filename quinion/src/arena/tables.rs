//! Tables: which of their extents have memory.
//!
//! The tables have entries for every frame there may ever be, a hundredth of the largest bound. A cache that is never
//! filled needs few of them, so an extent of the tables gets its memory when the first frame is grown that has an
//! entry there. Until then the entries of the tables' own frames, which are no folios', do with some pages.
//!
//! ```text
//!   extents    0                  1      2      3                  the frames' own
//!             | header, desc..   | ..  | ..   | .., bits | data | data | not grown yet ..
//!                 x x x x . . . .  . .    x x .    x . .    `------'
//!                 entries of the frames that are grown: extents 0, 2 and 3 have memory
//! ```
//!
//! They count against the bound from the start, so growing never finds the bound in its way for their sake. An entry of
//! a frame that is not grown is never looked at. (A stale number of a node may lead a late reader into a hole of the
//! tables, as it may into a punched extent: it finds zeros, for which a page is taken.)
//!
//! Invariant: entries of all frames below `frames_grown` have memory, and odd descriptors until a folio comes.
//!
//! Locks: the caller has `Rank::Growth`.
#![deny(unsafe_code)]

use std::ops::Range;

use super::Layout;
use crate::units::EXTENT_SIZE;

#[derive(Debug)]
pub(super) struct Tables {
    has_memory: Vec<bool>,
    missing: u32,
}

impl Tables {
    pub fn new(extents: u32) -> Self {
        Self { has_memory: vec![false; extents as usize], missing: extents }
    }

    pub fn missing(&self) -> u32 {
        self.missing
    }

    /// The next extent without memory in which a frame of `frames` has an entry, in that order.
    pub fn next_wanted(&self, layout: &Layout, frames: &Range<u32>) -> Option<u32> {
        let entries = layout.entries(frames).into_iter().filter(|bytes| !bytes.is_empty());
        let extent = |byte: u64| (byte / EXTENT_SIZE as u64) as u32;
        let mut extents = entries.flat_map(|bytes| extent(bytes.start)..=extent(bytes.end - 1));
        extents.find(|extent| !self.has_memory[*extent as usize])
    }

    pub fn add(&mut self, extent: u32) {
        let place = &mut self.has_memory[extent as usize];
        self.missing -= u32::from(!*place);
        *place = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::EXTENT_PAGES;

    #[test]
    fn each_extent_is_wanted_once_and_all_are_for_all_frames() {
        for mib in [16u64, 1000, 6 << 10] {
            let layout = Layout::new(mib << 20).unwrap();
            let mut tables = Tables::new(layout.frames_meta / EXTENT_PAGES);
            for extent in 0..layout.frames_max / EXTENT_PAGES {
                let frames = extent * EXTENT_PAGES..(extent + 1) * EXTENT_PAGES;
                while let Some(wanted) = tables.next_wanted(&layout, &frames) {
                    tables.add(wanted);
                }
            }
            assert_eq!(tables.missing(), 0, "{mib} MiB");
        }
    }

    #[test]
    fn few_frames_want_few_extents() {
        let layout = Layout::new(64 << 30).unwrap();
        let mut tables = Tables::new(layout.frames_meta / EXTENT_PAGES);
        let before = tables.missing();
        while let Some(wanted) = tables.next_wanted(&layout, &(0..EXTENT_PAGES)) {
            tables.add(wanted);
        }
        assert!(
            before >= 300 && before - tables.missing() <= 6,
            "{before} before, {} then",
            tables.missing()
        );
    }
}

//! Guests: which extents of an arena are machines' memory, and which of their frames are claimed.
//!
//! ```text
//!   Guests   by first extent --> Guest: extents, a bit for each frame that is claimed
//!   demand   extents that are being emptied for a guest that is to come
//! ```
//!
//! It is a part of the frame stock and changes under its lock; the operations on guests are in `guest.rs`.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::units::{EXTENT_PAGES, Frame};

pub(super) const WORD: u32 = u64::BITS;

#[derive(Debug)]
pub(super) struct Guest {
    pub extents: u32,
    pub first: Frame,
    /// A bit for each frame.
    pub claimed: Vec<u64>,
    pub claimed_pages: u32,
    /// Whether the guest's handle was dropped.
    pub is_closing: bool,
}

impl Guest {
    pub fn new(first: Frame, extents: u32) -> Self {
        let words = (extents * EXTENT_PAGES / WORD) as usize;
        Self { extents, first, claimed: vec![0; words], claimed_pages: 0, is_closing: false }
    }

    pub fn end(&self) -> u32 {
        self.first.extent() + self.extents
    }
    pub fn has(&self, frame: Frame) -> bool {
        is_set(&self.claimed, frame.0 - self.first.0)
    }

    /// Claims those of `pages` frames from `frame` on that come before the first that is claimed; how many.
    pub fn claim(&mut self, frame: Frame, pages: u32) -> u32 {
        let start = frame.0 - self.first.0;
        let free = (0..pages).find(|page| is_set(&self.claimed, start + page)).unwrap_or(pages);
        (start..start + free).for_each(|page| set(&mut self.claimed, page));
        self.claimed_pages += free;
        free
    }

    /// Takes frames back; whether the guest has ended by that.
    pub fn unclaim(&mut self, frame: Frame, pages: u32) -> bool {
        let start = frame.0 - self.first.0;
        for page in start..start + pages {
            assert!(is_set(&self.claimed, page), "{frame:?} is freed twice");
            clear(&mut self.claimed, page);
        }
        self.claimed_pages -= pages;
        self.is_closing && self.claimed_pages == 0
    }
}

#[derive(Debug, Default)]
pub(super) struct Guests {
    pub by_first: BTreeMap<u32, Guest>,
    pub extents: u32,
    /// Extents that are being emptied for one that is to come, and how many it is to have.
    pub demand: Option<Range<u32>>,
}

impl Guests {
    pub fn is_empty(&self) -> bool {
        self.by_first.is_empty()
    }
    pub fn extents(&self) -> u32 {
        self.extents
    }
    /// Whose extent this is, with its first; `None`: no guest's.
    pub fn of(&self, extent: u32) -> Option<(u32, &Guest)> {
        let (&first, guest) = self.by_first.range(..=extent).next_back()?;
        (extent < guest.end()).then_some((first, guest))
    }
    pub fn of_mut(&mut self, extent: u32) -> Option<(u32, &mut Guest)> {
        let (&first, guest) = self.by_first.range_mut(..=extent).next_back()?;
        (extent < guest.end()).then_some((first, guest))
    }
    pub fn ranges(&self) -> Vec<Range<u32>> {
        self.by_first.iter().map(|(&first, guest)| first..guest.end()).collect()
    }
    pub fn has(&self, extent: u32) -> bool {
        self.of(extent).is_some()
    }
    /// The extents of a guest that is to come, whatever their use now.
    pub fn demand(&self) -> Option<&Range<u32>> {
        self.demand.as_ref()
    }
    /// How many extents a guest that is to come will take.
    pub fn demanded(&self) -> u32 {
        self.demand.as_ref().map_or(0, |range| range.end - range.start)
    }

    /// Takes back frames of one extent, if it is a guest's; whether it was, and whether that guest has ended.
    pub fn take_back(&mut self, frame: Frame, pages: u32) -> Option<bool> {
        self.of_mut(frame.extent()).map(|(_, guest)| guest.unclaim(frame, pages))
    }

    /// Whether the frame is free, if it is a guest's.
    pub fn is_unclaimed(&self, frame: Frame) -> bool {
        self.of(frame.extent()).is_some_and(|(_, guest)| !guest.has(frame))
    }
}

pub(super) fn is_set(words: &[u64], bit: u32) -> bool {
    words[(bit / WORD) as usize] & 1 << (bit % WORD) != 0
}
pub(super) fn set(words: &mut [u64], bit: u32) {
    words[(bit / WORD) as usize] |= 1 << (bit % WORD);
}
pub(super) fn clear(words: &mut [u64], bit: u32) {
    words[(bit / WORD) as usize] &= !(1 << (bit % WORD));
}

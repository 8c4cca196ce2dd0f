//! Returned frames: which frames of an extent that is being emptied have come back.
//!
//! An extent can be given back to the system when all of its frames have; until
//! then none of them is handed out again (`shrink.rs`).

use crate::units::{EXTENT_PAGES, Frame};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ReturnedFrames(pub [u64; EXTENT_PAGES as usize / 64]);

impl ReturnedFrames {
    pub fn add(&mut self, frame: Frame, pages: u32) {
        for at in (frame.0..frame.0 + pages).map(|frame| frame % EXTENT_PAGES) {
            let (word, bit) = (&mut self.0[at as usize / 64], 1 << (at % 64));
            assert!(*word & bit == 0, "{frame:?} is freed twice");
            *word |= bit;
        }
    }
    pub fn has(&self, frame: Frame) -> bool {
        let at = frame.0 % EXTENT_PAGES;
        self.0[at as usize / 64] & 1 << (at % 64) != 0
    }
    pub fn is_all(&self) -> bool {
        self.0.iter().all(|word| *word == u64::MAX)
    }
    pub fn pages(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
}

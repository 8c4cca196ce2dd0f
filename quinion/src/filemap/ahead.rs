//! Ahead: the use made of pages that were fetched before a read asked for them.
//!
//! ```text
//!   fetched ahead  =  used  +  wasted  +  unread
//!                      |        |           `- here still; found by a look at their referenced bytes
//!                      |        `- left unread; counted where folios leave their tree
//!                      `- the rest: no hit counts anything
//! ```
//!
//! A folio counts with all its pages: one that holds a page that was asked for is not fetched ahead, and one page
//! that is read makes the others used. Pages that come back soon after their eviction are left out.
//!
//! Not an invariant: that a viewer's read is seen at once, or at all: its ring of reads forgets.

use std::sync::atomic::Ordering;

use crate::arena::{Flags, View, referenced};
use crate::stats::Count;
use crate::units::Frame;

use super::shared::Filemap;

/// Pages that were fetched before a read asked for them, since the cache was built, by the use made of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ReadaheadUse {
    /// All pages fetched ahead: the sum of the others.
    pub pages: u64,
    /// Pages that were read.
    pub used_pages: u64,
    /// Pages that left unread: evicted, dropped, outdated, or not delivered.
    pub wasted_pages: u64,
    /// Unread pages that are in the cache, or on their way.
    pub unread_pages: u64,
}

impl ReadaheadUse {
    /// Used pages as a share of used and wasted ones, 0 to 1; `None` if there are none.
    pub fn accuracy(&self) -> Option<f64> {
        let known = self.used_pages + self.wasted_pages;
        (known > 0).then(|| self.used_pages as f64 / known as f64)
    }

    /// Every number with its name, in the order of the fields.
    pub fn numbers(&self) -> [(&'static str, u64); 4] {
        [
            ("pages", self.pages),
            ("used_pages", self.used_pages),
            ("wasted_pages", self.wasted_pages),
            ("unread_pages", self.unread_pages),
        ]
    }
}

impl Filemap {
    /// Pages that were fetched ahead so far.
    pub fn readahead_pages(&self) -> u64 {
        self.counters.sum(Count::Readahead).saturating_sub(self.counters.sum(Count::ReadaheadActivated))
    }

    /// The use made of them. Looks at one byte for each page of the arena.
    pub fn readahead_use(&self) -> ReadaheadUse {
        let (pages, wasted) = (self.readahead_pages(), self.counters.sum(Count::ReadaheadWasted));
        let unread = unread_pages(self.arena.view()).min(pages.saturating_sub(wasted));
        let used = pages.saturating_sub(wasted + unread);
        ReadaheadUse { pages, used_pages: used, wasted_pages: wasted, unread_pages: unread }
    }
}

fn unread_pages(view: &View) -> u64 {
    let grown = view.grown();
    let frames = (view.layout().frames_meta..grown.frames()).map(Frame);
    let is_unread = |frame: &Frame| {
        let byte = grown.referenced(*frame).expect("it is grown").load(Ordering::Relaxed);
        referenced::is_unread(byte)
    };
    let words = frames.filter(is_unread).map(|frame| view.own(frame).word());
    // An uncached read's pages begin as unread, and were not fetched ahead.
    words
        .filter(|word| word.is_live() && !word.has(Flags::DROPBEHIND))
        .map(|word| u64::from(word.order().pages()))
        .sum()
}

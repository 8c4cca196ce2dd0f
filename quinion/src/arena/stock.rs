//! Stock: the grown part of an arena, and its free frames.
//!
//! ```text
//!   extents   0        1      2       3         4      5                max
//!           | meta   | data | cells | punched | data |  not yet | guest |
//!                      |       |
//!                    buddy   cells         a block of the buddy, cut to the pages that it is for
//! ```
//!
//! [`FrameStock`] is under the arena's lock, [`GrowthParams`] under the growth lock. A run is cut out of one block of
//! the buddy so that pages and frames agree as [`FrameAlignment`] says; the rest of the block goes back at once.
//!
//! Invariants: 2, 4 and 5 of `owner.rs`, which asserts them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::DescriptorWord;
use super::buddy::{Buddy, FrameRun, FreeLinks};
use super::cells::{CellLinks, Cells};
use super::guests::Guests;
use super::returned_frames::ReturnedFrames;
use super::segment::PageSize;
use super::tables::Tables;
use crate::units::{EXTENT_PAGES, Frame, Order, Orders, PageIndex};
use quinion_view::arena::{CellNumber, View};

/// Kept whole and free ahead of need: one part in so many of the grown memory, and so many extents at most, 32 MiB.
const AHEAD_SHARE: u32 = 8;
const AHEAD_EXTENTS_MAX: u32 = 16;
/// Grown in one step at most, 16 MiB.
pub(super) const STEP_EXTENTS_MAX: u32 = 8;
/// A step has no more extents than came in this time before, since an allocation waits for a whole step. A virtual
/// machine that has given its free memory back to its host gets an extent in 5 milliseconds, another in a quarter.
const STEP_TIME: Duration = Duration::from_millis(4);
/// After the machine refused memory, as many further requests to grow are refused without asking it.
pub(super) const GROWTHS_REFUSED: u32 = 64;

/// How much of a request is worth having.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocAmount {
    /// All of it, or nothing is taken.
    All,
    /// Less, if there is no more.
    Less,
}

/// How frames are to lie for the pages of a file.
///
/// ```text
///   pages    5 6 7 | 8 ............ 15 | 16 ...          align: order 3
///   block    x x x x x 5 6 7 | 8 ............ 15 |        a block holds the pages at their places in it,
///            `-- back ---'                                and what it has besides goes back at once
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameAlignment {
    /// No run is longer than the larger of these; every run begins at a multiple of the smaller one, in pages
    /// and in frames, and is one long.
    pub runs: Orders,
    /// A page and its frame agree modulo so many pages, so that folios up to this order can be made of a run.
    /// At most the larger of `runs`.
    pub align: Order,
}

/// Pages of a file that follow each other, and want a frame each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    /// The first of them.
    pub first: PageIndex,
    /// How many they are.
    pub pages: u32,
}

impl FrameAlignment {
    /// Runs of these sizes, wherever their frames lie.
    pub const fn anywhere(runs: Orders) -> Self {
        Self { runs, align: runs.min }
    }

    /// The pages of `wanted` that a block of `order` takes: how many frames come before them, and how many they are.
    pub(super) fn place(self, wanted: Gap, order: Order) -> (u32, u32) {
        let before = (wanted.first.0 & u64::from(order.min(self.align).pages() - 1)) as u32;
        (before, wanted.pages.min(order.pages() - before))
    }

    /// The smallest block that takes as many of `wanted` as the largest would.
    pub(super) fn block(self, wanted: Gap) -> Order {
        let (_, most) = self.place(wanted, self.runs.max);
        let mut orders = (self.runs.min.0..self.runs.max.0).map(Order);
        orders.find(|&order| self.place(wanted, order).1 == most).unwrap_or(self.runs.max)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AllocPolicy {
    Whole,
    Pieces,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ExtentPurpose {
    Data,
    Cells,
}

#[derive(Debug)]
pub(super) struct FrameStock {
    /// The bound without the control file.
    pub(super) extents_max: u32,
    /// Extents that have memory, and those of guests, which count as if all of them had.
    pub(super) extents_grown: u32,
    /// The first extent above all that ever had memory or were a guest's.
    pub(super) extents_reached: u32,
    pub(super) extents_meta: u32,
    pub(super) extents_all: u32,
    pub(super) growths: u64,
    pub(super) is_refused: bool,
    pub(super) buddy: Buddy<{ Order::MAX.0 }>,
    pub(super) cells: Cells,
    pub(super) huge: BTreeSet<u32>,
    /// Below `extents_reached`, without memory.
    pub(super) punched: BTreeSet<u32>,
    pub(super) guests: Guests,
    /// Extents of data that are to be given back, and which of their frames have come back so far.
    pub(super) emptying: BTreeMap<u32, ReturnedFrames>,
    /// Whether the bound was lowered below the grown size, and has not been reached since.
    pub(super) is_lowered: bool,
}

impl FrameStock {
    /// Frames below the first that never had memory.
    pub(super) fn frames_reached(&self) -> u32 {
        self.extents_reached * EXTENT_PAGES
    }

    pub(super) fn reserve(&self) -> u32 {
        u32::max(1, self.extents_max / 64)
    }

    pub(super) fn reserve_left(&self) -> u32 {
        self.reserve().saturating_sub(self.cells.extents())
    }

    /// Extents by which the bound, and for data the reserve, allow to grow.
    pub(super) fn growable(&self, wanted: ExtentPurpose) -> u32 {
        let kept = match wanted {
            ExtentPurpose::Cells => 0,
            ExtentPurpose::Data => self.reserve_left(),
        };
        let kept = kept + self.guests.demanded();
        let within = self.extents_max.saturating_sub(self.extents_grown).saturating_sub(kept);
        // The arena does not grow into extents that are reserved for a guest, so there may be no number left.
        if within > 0 && self.next_extent(wanted).is_some() { within } else { 0 }
    }

    /// A punched extent, or else the first that never had memory; none that a guest is to have. As many as the reserve,
    /// the lowest, are left to cells as long as there are others: above them a guest finds room side by side.
    pub(super) fn next_extent(&self, wanted: ExtentPurpose) -> Option<u32> {
        let is_kept = |extent: &u32| self.guests.demand().is_some_and(|range| range.contains(extent));
        let (fresh, above) = (self.extents_reached..self.extents_all, self.extents_meta + self.reserve());
        let next = |from: u32| {
            let fresh = fresh.start.max(from)..fresh.end;
            self.punched.range(from..).copied().chain(fresh).find(|extent| !is_kept(extent))
        };
        match wanted {
            ExtentPurpose::Cells => next(0),
            ExtentPurpose::Data => next(above).or_else(|| next(0)),
        }
    }

    /// As [`FrameStock::next_extent`], with those behind it that may be grown as well, `most` in all.
    pub(super) fn next_extents(&self, wanted: ExtentPurpose, most: u32) -> Option<Range<u32>> {
        let (first, most) = (self.next_extent(wanted)?, most.min(self.growable(wanted)));
        let is_kept = |extent: &u32| self.guests.demand().is_some_and(|range| range.contains(extent));
        let has_none = |extent: &u32| *extent >= self.extents_reached || self.punched.contains(extent);
        let more = (first + 1..self.extents_all).take(most.saturating_sub(1) as usize);
        let more = more.take_while(|extent| has_none(extent) && !is_kept(extent));
        Some(first..first + 1 + more.count() as u32)
    }

    /// How many extents are worth growing before they are needed: a part of the grown ones, and none as long as half of
    /// these are free. Only extents that are free as a whole count: a large folio is made of no others. And none after
    /// the machine refused memory, until an allocation that needed it was given some.
    pub(super) fn extents_ahead(&self) -> u32 {
        let ahead = (self.extents_grown / AHEAD_SHARE).min(AHEAD_EXTENTS_MAX);
        let free = self.buddy.whole_extents();
        if free > ahead / 2 || self.is_refused {
            return 0;
        }
        (ahead - free).min(STEP_EXTENTS_MAX).min(self.growable(ExtentPurpose::Data))
    }

    pub(super) fn add_grown(&mut self, extent: u32, size: PageSize) {
        self.growths += 1;
        self.extents_grown += 1;
        // Extents that are stepped over, to leave numbers for cells or for a guest to come, never had memory.
        self.punched.extend(self.extents_reached..extent);
        self.extents_reached = self.extents_reached.max(extent + 1);
        self.punched.remove(&extent);
        if size == PageSize::Huge {
            self.huge.insert(extent);
        }
    }

    pub(super) const ANY: Orders = Orders { min: Order::ZERO, max: Order::MAX };

    /// Takes a run for the first of `wanted`: as many as a block can take, or with [`AllocPolicy::Pieces`] fewer.
    pub(super) fn take_run(
        &mut self,
        view: &View,
        wanted: Gap,
        fit: FrameAlignment,
        policy: AllocPolicy,
    ) -> Option<FrameRun> {
        let largest = fit.block(wanted);
        let smallest = match policy {
            AllocPolicy::Whole => largest,
            AllocPolicy::Pieces => fit.runs.min,
        };
        (smallest.0..=largest.0).rev().map(Order).find_map(|order| {
            let block = self.buddy.alloc(view, order)?;
            let (before, pages) = fit.place(wanted, order);
            let end = before + pages;
            self.buddy.free_run(view, block, before);
            self.buddy.free_run(view, block.plus(end), order.pages() - end);
            Some(FrameRun { frame: block.plus(before), pages })
        })
    }

    pub(super) fn has_for(&self, pages: u32, amount: AllocAmount) -> bool {
        amount == AllocAmount::Less || self.buddy.free_pages() >= u64::from(pages)
    }

    pub(super) fn cut_free(&mut self, view: &View) -> bool {
        let Some(frame) = self.buddy.alloc(view, Order::MAX) else { return false };
        self.cells.add_extent(frame.extent());
        true
    }
}

#[derive(Debug)]
pub(super) struct GrowthParams {
    pub(super) tables: Tables,
    pub(super) failures: u64,
    pub(super) refuse: u32,
    pub(super) returned: u64,
    /// The time that each extent of the last step took; zero before the first.
    pub(super) extent_time: Duration,
}

impl GrowthParams {
    pub(super) fn new(tables: Tables) -> Self {
        Self { tables, failures: 0, refuse: 0, returned: 0, extent_time: Duration::ZERO }
    }

    /// How many extents the next step may have.
    pub(super) fn step_max(&self) -> u32 {
        let extents = STEP_TIME.as_nanos().checked_div(self.extent_time.as_nanos());
        extents.map_or(STEP_EXTENTS_MAX, |extents| extents.clamp(1, STEP_EXTENTS_MAX.into()) as u32)
    }

    /// After a refusal the machine is left alone for a number of requests, as asking is expensive then.
    pub(super) fn ask<T>(&mut self, populate: impl FnOnce(&mut Tables) -> std::io::Result<T>) -> Option<T> {
        if self.refuse > 0 {
            self.refuse -= 1;
            return None;
        }
        match populate(&mut self.tables) {
            Ok(populated) => Some(populated),
            Err(_) => {
                self.failures += 1;
                self.refuse = GROWTHS_REFUSED;
                None
            }
        }
    }
}

impl FreeLinks for View {
    #[inline]
    fn links(&self, frame: Frame) -> [u32; 2] {
        self.own(frame).links()
    }
    #[inline]
    fn set_link(&self, frame: Frame, which: usize, to: u32) {
        self.own(frame).set_link(which, to);
    }
    #[inline]
    fn free_order(&self, frame: Frame) -> Option<Order> {
        self.own(frame).free_order()
    }
    #[inline]
    fn set_free(&self, frame: Frame, order: Option<Order>) {
        self.own(frame).set_free(order);
    }
}

impl CellLinks for View {
    #[inline]
    fn link(&self, cell: CellNumber) -> u32 {
        self.slots(cell).map_or(0, |slots| slots[0].load(Ordering::Relaxed))
    }
    #[inline]
    fn set_link(&self, cell: CellNumber, to: u32) {
        self.slots(cell).expect("a cell of our own arena exists")[0].store(to, Ordering::Relaxed);
    }
}

/// Whether a descriptor's word is that of a frame that heads no folio and is not held.
pub(super) fn is_unclaimed(word: DescriptorWord) -> bool {
    !word.is_live() && word.holds() == 0
}

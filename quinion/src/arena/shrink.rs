//! Shrink: extents of data out of use, and their memory back to the machine.
//!
//! ```text
//!   set_bound     lower: nothing grows any more                        the bound
//!   choose        which extents cost least to empty; their free        data -> emptying
//!                 frames leave the buddy, so none of them is handed out
//!      (reclaim evicts what they hold; what comes back is noted, and stays)
//!   punch_empty   all 512 frames back: a hole in the file              emptying -> punched
//!   sweep         late readers brought a page back: punched again
//! ```
//!
//! To raise the bound changes the number alone: the arena grows by extents on demand, the punched ones first.
//!
//! **Why a reader never starts into a punched extent.** It comes to a page by its folio's descriptor, and the
//! descriptors of a punched extent are odd: all its folios were retired before its frames were freed, and a frame that
//! cannot be allocated is never prepared. It comes to a node by a tree, and an extent of cells is never punched. So no
//! table of holes is asked on the way of a hit.
//!
//! **Why one that is past its first look does no harm.** It copies zeros, from a file that stays mapped. The sequence
//! became odd before the hole was made (a fence and a system call lie between), so a reader that has seen a zero sees
//! that at its second look and throws the copy away. The same holds for a caller that walks a node that is none any
//! more: a number read there is only a hint, as ever.
//!
//! **What they cost.** A read in a hole of shared memory takes a page again. So [`Arena::sweep`] comes some
//! milliseconds later, asks the file for data where there should be none, and punches again; so it does with each later
//! resize, and on the background thread as long as a sweep has found something. Until then such pages stand beside the
//! account. A thread that maps the file and reads all of it on purpose can take memory up to the largest bound; that is
//! a process of the same user, which has simpler ways to do so.
//!
//! Invariants (asserted by [`Arena::check`]):
//!  1. No frame of an extent that is being emptied or punched is in the buddy, and none of a punched one in use.
//!  2. A frame is noted as returned once, and only in an extent that is being emptied.
//!  3. An extent counts as grown until its hole is made: the account is never below the memory taken.
//!  4. Extents of cells and tables are never emptied.
//!  5. There is more than the bound allows only after it was lowered.
//!
//! Not an invariant: that chosen extents can be emptied. A pin keeps its folio for as long as it likes, and its extent
//! is slack. A better choice that comes up takes its place.
//!
//! Locks: Growth is held around each change of the grown extents, Arena around that of the lists.
#![deny(unsafe_code)]

use super::options::{ArenaError, extents_within};
use super::owner::Arena;
use super::returned_frames::ReturnedFrames;
use super::stock::FrameStock;
use crate::units::{EXTENT_PAGES, EXTENT_SIZE, Frame, Order};
use quinion_view::arena::View;
use quinion_view::arena::before_bytes;
use quinion_view::arena::referenced::is_wanted;
use std::sync::atomic::Ordering;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct EmptyingCost {
    /// Pages that are held and may stay so for ever.
    pub held_pages: u32,
    /// Pages to be evicted; those read since the last round count twice.
    pub evicted_pages: u32,
    /// High extents before low ones.
    below_top: u32,
}

impl EmptyingCost {
    /// The cost for an extent that has no memory.
    pub const NOTHING: Self = Self { held_pages: 0, evicted_pages: 0, below_top: 0 };

    /// Looked up without a lock: an estimate.
    pub fn of(view: &View, extent: u32) -> Self {
        let (mut held_pages, mut evicted_pages) = (0, 0);
        let (mut at, end) = (extent * EXTENT_PAGES, (extent + 1) * EXTENT_PAGES);
        while at < end {
            let (word, frame) = (view.own(Frame(at)).word(), Frame(at));
            let pages = if word.is_live() { word.order().min(Order::MAX).pages().min(end - at) } else { 1 };
            let wanted = view.referenced(frame).is_some_and(|byte| is_wanted(byte.load(Ordering::Relaxed)));
            if word.holds() > 0 {
                held_pages += pages;
            } else if word.is_live() {
                evicted_pages += pages << u32::from(wanted);
            }
            at += pages;
        }
        Self { held_pages, evicted_pages, below_top: u32::MAX - extent }
    }
}

/// An estimate, as it is looked up without a lock.
pub(super) fn is_pinned(view: &View, extent: u32) -> bool {
    (extent * EXTENT_PAGES..(extent + 1) * EXTENT_PAGES).map(Frame).any(|frame| {
        let descriptor = view.own(frame);
        descriptor.word().holds() > 0 && descriptor.pins() > 0
    })
}

impl Arena {
    /// Changes the bound, at once: nothing is grown beyond it from now on. Extents above it are given back by
    /// [`Arena::choose_emptying`] and [`Arena::punch_empty`]. Locks: Growth, Arena; may wait while extents are grown.
    pub fn set_bound(&self, memory: u64) -> Result<(), ArenaError> {
        if memory < self.memory_min() {
            return Err(ArenaError::TooSmall { asked: memory, min: self.memory_min() });
        }
        if memory > self.memory_max() {
            return Err(ArenaError::AboveMax { asked: memory, max: self.memory_max() });
        }
        let _growth = self.wait_for_growth();
        let mut stock = self.stock.lock();
        self.bound.store(memory, Ordering::Relaxed);
        stock.extents_max = extents_within(memory) - self.viewer_extents(); // `memory_min` counts these
        stock.note_lowered();
        stock.reopen_surplus(&self.view, self.extents_meta());
        Ok(())
    }

    /// Selects as many extents to be emptied as the bound asks for: the cheapest, and instead of one with pinned pages
    /// another one without. Returns all of them. Locks: Growth, Arena. Cost: a look at each frame's descriptor, outside
    /// the locks.
    pub fn choose_emptying(&self) -> Vec<u32> {
        let meta = self.extents_meta();
        let (wanted, mut chosen, others) = {
            let stock = self.stock.lock();
            let chosen: Vec<u32> = stock.emptying.keys().copied().collect();
            let others: Vec<u32> = (meta..stock.extents_reached).filter(|e| stock.is_data(*e)).collect();
            (stock.to_empty(meta) as usize, chosen, others)
        };
        let demand = self.stock.lock().guests.demand().cloned();
        let is_demanded = |extent: &u32| demand.as_ref().is_some_and(|range| range.contains(extent));
        let pinned: Vec<u32> =
            chosen.iter().copied().filter(|e| !is_demanded(e) && is_pinned(&self.view, *e)).collect();
        if wanted <= chosen.len() && pinned.is_empty() {
            return chosen;
        }
        let mut others: Vec<_> =
            others.into_iter().map(|extent| (EmptyingCost::of(&self.view, extent), extent)).collect();
        others.sort_unstable_by(|a, b| b.cmp(a));
        let unheld = others.iter().filter(|(cost, _)| cost.held_pages == 0).count();
        let to_swap = unheld.saturating_sub(wanted.saturating_sub(chosen.len()));
        // Not while an empty one is being punched: it would be given out again, and lose the bytes that are read into
        // it.
        let _growth = self.wait_for_growth();
        let mut stock = self.stock.lock();
        for extent in pinned.into_iter().take(to_swap) {
            stock.reopen(&self.view, extent);
        }
        // The bound may have changed meanwhile, and an extent may have become one of cells.
        while stock.emptying.len() < stock.to_empty(meta) as usize {
            let Some((_, extent)) = others.pop() else { break };
            if stock.is_data(extent) {
                stock.close(&self.view, extent);
            }
        }
        chosen.clear();
        chosen.extend(stock.emptying.keys());
        chosen
    }

    /// Makes holes of the extents that are empty by now; how many. An extent whose hole the system refuses stays, as
    /// slack. Locks: Growth, Arena. Takes a tenth of a millisecond for each.
    pub fn punch_empty(&self) -> u32 {
        let mut growth = self.wait_for_growth();
        let empty: Vec<u32> = {
            let stock = self.stock.lock();
            stock
                .emptying
                .iter()
                .filter(|(_, returned)| returned.is_all())
                .map(|(extent, _)| *extent)
                .collect()
        };
        // Partner: the Acquire fence in `end_read`. A thread that reads a zero sees that its folio was retired.
        before_bytes();
        let mut punched = 0;
        for extent in empty {
            // No other thread has it: one that grows, reopens or punches has the growth lock.
            if self.arena_segment.punch(extent).is_ok() {
                self.stock.lock().note_punched(extent);
                growth.returned += EXTENT_SIZE as u64;
                punched += 1;
            }
        }
        punched
    }

    /// Gives back memory that late readers, or a growth that failed half-way, have taken where nothing is grown;
    /// returns how many extents had some. Locks: Growth, Arena for a few steps.
    pub fn sweep(&self) -> u32 {
        let _growth = self.wait_for_growth();
        let is_grown = {
            let stock = self.stock.lock();
            let (reached, punched) = (stock.extents_reached, stock.punched.clone());
            let guests = stock.guests.ranges();
            // A guest has another file: the arena's is to be empty there.
            move |extent: u32| {
                let is_guests = guests.iter().any(|guest| guest.contains(&extent));
                extent < reached && !punched.contains(&extent) && !is_guests
            }
        };
        let (mut extent, mut found) = (self.extents_meta(), 0);
        let end = self.view.layout().frames_max / EXTENT_PAGES;
        while extent < end {
            if is_grown(extent) {
                extent += 1;
                continue;
            }
            match self.arena_segment.next_data(extent) {
                Some(next) if next == extent => {
                    found += u32::from(self.arena_segment.punch(extent).is_ok());
                    extent += 1;
                }
                Some(next) => extent = next,
                None => break,
            }
        }
        found
    }

    /// Extents that are to go and have not gone.
    pub fn excess_extents(&self) -> u32 {
        let stock = self.stock.lock();
        stock.excess().max(stock.blocking_frames())
    }

    /// Whether waiting is of no use: each extent that is still to go has a folio that a pin keeps, or goes for a guest.
    pub fn is_excess_pinned(&self) -> bool {
        let (left, demand) = {
            let stock = self.stock.lock();
            let left: Vec<u32> = stock.emptying.keys().copied().collect();
            (left, stock.guests.demand().cloned().unwrap_or_default())
        };
        let is_in_the_way = |extent: &u32| demand.contains(extent) && is_pinned(&self.view, *extent);
        left.iter().any(is_in_the_way) || left.iter().all(|extent| is_pinned(&self.view, *extent))
    }

    pub(super) fn extents_meta(&self) -> u32 {
        self.view.layout().frames_meta / EXTENT_PAGES
    }
}

impl FrameStock {
    pub(super) fn is_data(&self, extent: u32) -> bool {
        extent < self.extents_reached
            && !self.punched.contains(&extent)
            && !self.emptying.contains_key(&extent)
            && !self.cells.has_extent(extent)
            && !self.guests.has(extent)
    }

    fn blocking_frames(&self) -> u32 {
        let demand = self.guests.demand().cloned().unwrap_or_default();
        demand.filter(|extent| !self.has_no_memory(*extent)).count() as u32
    }

    /// Gives extents back to the buddy that are being emptied and need not be any more.
    pub(super) fn reopen_surplus(&mut self, view: &View, meta: u32) {
        while self.emptying.len() > self.to_empty(meta) as usize {
            let demand = self.guests.demand().cloned().unwrap_or_default();
            let surplus = self.emptying.keys().copied().find(|extent| !demand.contains(extent));
            let Some(extent) = surplus else { return };
            self.reopen(view, extent);
        }
    }

    pub(super) fn is_going(&self, frame: Frame) -> bool {
        let extent = frame.extent();
        self.punched.contains(&extent)
            || self.emptying.get(&extent).is_some_and(|returned| returned.has(frame))
    }

    pub(super) fn extents_data(&self, meta: u32) -> u32 {
        self.extents_grown - meta - self.cells.extents() - self.guests.extents()
    }

    /// Extents more than the bound, the reserve and a guest that is to come allow.
    pub(super) fn excess(&self) -> u32 {
        (self.extents_grown + self.reserve_left() + self.guests.demanded()).saturating_sub(self.extents_max)
    }

    /// Extents of data that are to be emptied. Two stay, at any bound: else nothing could be read.
    fn to_empty(&self, meta: u32) -> u32 {
        self.excess().min(self.extents_data(meta).saturating_sub(2)).max(self.blocking_frames())
    }

    pub(super) fn note_lowered(&mut self) {
        self.is_lowered = self.excess() > 0;
    }

    /// Takes the free frames of `extent` out of the buddy; frames that come back from now on are noted.
    pub(super) fn close(&mut self, view: &View, extent: u32) {
        let mut returned = ReturnedFrames::default();
        self.buddy.take_extent(view, Frame(extent * EXTENT_PAGES), |run| returned.add(run.frame, run.pages));
        self.emptying.insert(extent, returned);
    }

    fn reopen(&mut self, view: &View, extent: u32) {
        let Some(returned) = self.emptying.remove(&extent) else { return };
        let frames = (extent * EXTENT_PAGES..(extent + 1) * EXTENT_PAGES).map(Frame);
        for frame in frames.filter(|frame| returned.has(*frame)) {
            self.buddy.free(view, frame, Order::ZERO);
        }
    }

    /// Into the buddy, or as returned or unclaimed. Returns whether a guest has ended by that.
    #[must_use]
    pub(super) fn give_back(&mut self, view: &View, frame: Frame, pages: u32) -> bool {
        let (mut frame, end, mut ended) = (frame, frame.plus(pages), false);
        while frame < end {
            let next = Frame((frame.extent() + 1) * EXTENT_PAGES).min(end);
            let pages = next.0 - frame.0;
            match (self.guests.take_back(frame, pages), self.emptying.get_mut(&frame.extent())) {
                (Some(was_last), _) => ended |= was_last,
                (None, Some(returned)) => returned.add(frame, pages),
                (None, None) => self.buddy.free_run(view, frame, pages),
            }
            frame = next;
        }
        ended
    }

    fn note_punched(&mut self, extent: u32) {
        let returned = self.emptying.remove(&extent);
        debug_assert!(returned.is_some_and(|returned| returned.is_all()), "extent {extent} was in use");
        self.huge.remove(&extent);
        self.punched.insert(extent);
        self.extents_grown -= 1;
        self.note_lowered();
    }

    pub(super) fn check_extents(&self, meta: u32) -> Result<(), String> {
        if self.extents_grown as usize + self.punched.len() != self.extents_reached as usize {
            return Err(format!(
                "{} extents are grown and {} punched of {}",
                self.extents_grown,
                self.punched.len(),
                self.extents_reached
            ));
        }
        if self.excess() > self.guests.demanded() && !self.is_lowered {
            return Err("there are more extents than the bound and the reserve for cells allow".into());
        }
        for extent in self.punched.iter().chain(self.emptying.keys()) {
            if !(meta..self.extents_reached).contains(extent) || self.cells.has_extent(*extent) {
                return Err(format!("extent {extent} is emptied and is none of data"));
            }
            if self.punched.contains(extent)
                && (self.emptying.contains_key(extent) || self.huge.contains(extent))
            {
                return Err(format!("extent {extent} is punched and in use"));
            }
        }
        Ok(())
    }

    /// Frames that have come back in extents that are being emptied.
    pub(super) fn returned_pages(&self) -> u64 {
        self.emptying.values().map(|returned| u64::from(returned.pages())).sum()
    }
}

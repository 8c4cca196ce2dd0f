//! Allocate: frames and cells, handed out and given back.
//!
//! ```text
//!   something is free           one hold of the arena's lock
//!   nothing, and it may grow    the growth lock; look again, for another thread may have grown; populate as many
//!                               extents as are missing, publish them, hand out
//!   nothing, and it may not     None: the caller reclaims and asks again
//! ```
//!
//! Locks: `Rank::Growth` around growing, which may take milliseconds, and `Rank::Arena` around the lists, for a few
//! steps. Populating happens under the first only, so a thread that finds something free never waits for the kernel.
//!
//! Invariant: nothing here reclaims.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::buddy::FrameRun;
use super::cells::CellFreed;
use super::owner::Arena;
use super::stock::{
    AllocAmount, AllocPolicy, ExtentPurpose, FrameAlignment, FrameStock, Gap, GrowthParams, STEP_EXTENTS_MAX,
    is_unclaimed,
};
use crate::sync::{LockWait, RankedGuard};
use crate::units::{EXTENT_PAGES, EXTENT_SIZE, Frame, Order, PageIndex};
use quinion_view::arena::CellNumber;
use quinion_view::arena::{Flags, NodeHead};

/// The part of the first incomplete gap that has no frames, if the first `got` pages have theirs.
fn next_wanted(gaps: &[Gap], mut got: u32) -> Option<Gap> {
    gaps.iter().find_map(|&Gap { first, pages }| {
        let wanted = (got < pages).then(|| Gap { first: first.plus(u64::from(got)), pages: pages - got });
        got = got.saturating_sub(pages);
        wanted
    })
}

fn wanted_pages(gaps: &[Gap]) -> u32 {
    gaps.iter().map(|gap| gap.pages).sum()
}

pub(super) fn pages_of(runs: &[FrameRun]) -> u32 {
    runs.iter().map(|run| run.pages).sum()
}

#[derive(Clone, Copy, Debug)]
pub(super) struct GrowRequest {
    pub wanted: ExtentPurpose,
    /// Number of growths that the caller has seen: if there were more since, the arena need not grow.
    pub seen: u64,
    pub locks: LockWait,
}

/// Frames that are wanted for the pages of gaps.
#[derive(Clone, Copy, Debug)]
pub struct AllocRequest<'g> {
    /// The pages, in order.
    pub gaps: &'g [Gap],
    /// The lengths and the alignment of the runs of frames that may be taken.
    pub fit: FrameAlignment,
    /// Whether fewer frames than pages are of use.
    pub amount: AllocAmount,
    /// Whether taken locks are waited for.
    pub locks: LockWait,
}

/// Memory to be had without evicting anything; a hint, as others take and give back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AvailableMemory {
    /// Free pages, and those by which the arena may still grow.
    pub pages: u64,
    /// Whether so few extents are free as a whole that [`Arena::grow_ahead`] would ask for more.
    pub is_growth_due: bool,
}

/// Pages of a request that have no frame yet; at least 1.
#[derive(Clone, Copy, Debug)]
struct MissingPages(u32);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GrowOutcome {
    Yes,
    No,
}

impl Arena {
    /// Takes a naturally aligned run of `order` (at most 9). Its bytes are arbitrary, its descriptors odd.
    /// `None`: nothing is free and the arena may not grow; reclaim and ask again.
    /// Locks: Growth, Arena. May wait while extents are grown: half a millisecond for each of up to 8, or some for one
    /// where a virtual machine has to fetch the memory first.
    pub fn alloc(&self, order: Order) -> Option<Frame> {
        assert!(order <= Order::MAX, "{order:?} is larger than an extent");
        self.alloc_growing(LockWait::Wait, |stock, _| {
            stock.buddy.alloc(&self.view, order).ok_or(MissingPages(order.pages()))
        })
    }

    /// Takes the largest naturally aligned run of at most `pages` pages (1 to 512) that can be had: the power of two
    /// that fits if there is one or the arena may grow, else less. Otherwise as [`Arena::alloc`].
    ///
    /// With [`LockWait::Try`] it answers `None` also when a lock is taken. It still grows the arena by an extent if no
    /// other thread does, since a caller that must not wait could never begin otherwise; that takes half a millisecond
    /// (or several, where a virtual machine has to fetch the memory first), and the lock of the lists for a few steps.
    pub fn alloc_run(&self, pages: u32, locks: LockWait) -> Option<FrameRun> {
        debug_assert!((1..=EXTENT_PAGES).contains(&pages), "a run has 1 to 512 pages");
        let (fit, wanted) = (
            FrameAlignment::anywhere(FrameStock::ANY),
            Gap { first: PageIndex(0), pages: Order::fitting(pages).pages() },
        );
        self.alloc_growing(locks, |stock, policy| {
            stock.take_run(&self.view, wanted, fit, policy).ok_or(MissingPages(pages))
        })
    }

    /// Takes a frame for every page of the gaps in as few runs as can be had that fit. Appends the runs to `runs`,
    /// which begins with those for the first of the pages, if some have frames already. Says how many pages more have
    /// one now: all, or with [`AllocAmount::Less`] fewer where there are no more. No run reaches over the end of a gap.
    /// One hold of the arena's lock, and one more for each step by which it is grown. Otherwise as [`Arena::alloc`], or
    /// with [`LockWait::Try`] as [`Arena::alloc_run`]; frames that were too few are given back under the lock of the
    /// lists.
    pub fn alloc_runs(&self, request: AllocRequest<'_>, runs: &mut Vec<FrameRun>) -> u32 {
        let AllocRequest { gaps, fit, amount, locks } = request;
        let (before, had) = (runs.len(), pages_of(runs));
        let (wanted, mut got) = (wanted_pages(gaps) - had, had);
        self.alloc_growing(locks, |stock, policy| {
            if policy == AllocPolicy::Pieces && !stock.has_for(had + wanted - got, amount) {
                return Err(MissingPages(had + wanted - got));
            }
            while let Some(next) = next_wanted(gaps, got) {
                let run = stock.take_run(&self.view, next, fit, policy);
                let run = run.ok_or(MissingPages(had + wanted - got))?;
                got += run.pages;
                runs.push(run);
            }
            Ok(())
        });
        if got == had + wanted || amount == AllocAmount::Less {
            return got - had;
        }
        runs.drain(before..).for_each(|run| self.free_run(run.frame, run.pages));
        0
    }

    /// Memory to be had without evicting anything. `None` if the lock of the lists is busy and `locks` does not wait.
    pub fn available(&self, locks: LockWait) -> Option<AvailableMemory> {
        let stock = self.stock.lock_as(locks)?;
        let growable = u64::from(stock.growable(ExtentPurpose::Data)) * u64::from(EXTENT_PAGES);
        let pages = stock.buddy.free_pages() + growable;
        Some(AvailableMemory { pages, is_growth_due: stock.extents_ahead() > 0 })
    }

    /// The pages of [`Arena::available`].
    pub fn available_pages(&self, locks: LockWait) -> Option<u64> {
        self.available(locks).map(|available| available.pages)
    }

    /// The first extent of data at or after `from`, or else the first of all; `None` if there is none.
    pub fn next_data_extent(&self, from: u32) -> Option<u32> {
        let stock = self.stock.lock();
        let meta = self.view.layout().frames_meta / EXTENT_PAGES;
        let from = from.clamp(meta, stock.extents_reached);
        (from..stock.extents_reached).chain(meta..from).find(|extent| stock.is_data(*extent))
    }

    /// Gives a run back, as [`Arena::alloc`] gave it or as a naturally aligned part of it. The caller owns
    /// all its frames alone: their folios are retired and not held.
    /// Locks: Arena. Panics if the frames are no data frames of this arena, or free already.
    pub fn free(&self, frame: Frame, order: Order) {
        self.free_all(&[(frame, order)]);
    }

    /// Gives `pages` frames from `frame` on back, at any alignment; as [`Arena::free`].
    pub fn free_run(&self, frame: Frame, pages: u32) {
        let mut stock = self.stock.lock();
        self.assert_allocated(&stock, frame, pages);
        let ended = stock.give_back(&self.view, frame, pages);
        drop(stock);
        if ended {
            self.end_guests();
        }
    }

    /// Gives many runs back under one lock; as [`Arena::free`].
    pub fn free_all(&self, runs: &[(Frame, Order)]) {
        if runs.is_empty() {
            return;
        }
        self.forget_pages_read(runs);
        let mut stock = self.stock.lock();
        let mut ended = false;
        for &(frame, order) in runs {
            self.assert_allocated(&stock, frame, order.pages());
            if stock.emptying.is_empty() && stock.guests.is_empty() {
                match order {
                    Order::ZERO => stock.buddy.free_page(&self.view, frame),
                    _ => stock.buddy.free(&self.view, frame, order),
                }
            } else {
                ended |= stock.give_back(&self.view, frame, order.pages());
            }
        }
        drop(stock);
        if ended {
            self.end_guests();
        }
    }

    /// Forgets which pages of partly filled folios have arrived; see `pages_read.rs`.
    fn forget_pages_read(&self, folios: &[(Frame, Order)]) {
        let grown = self.view.grown();
        for &(frame, order) in folios {
            if grown.descriptor(frame).is_some_and(|folio| folio.word().has(Flags::PARTIAL_UPTODATE)) {
                self.view.clear_pages_read(frame, order.pages());
            }
        }
    }

    /// Asks `take` for the whole run, again after each step by which the arena could be grown, and for pieces in the
    /// end: frames that follow each other make large requests. Each step takes as many pages as are missing, since for
    /// each request the kernel has all processors give up the pages that they set aside. `None` also where a lock is
    /// busy and `locks` does not wait.
    fn alloc_growing<T>(
        &self,
        locks: LockWait,
        mut take: impl FnMut(&mut FrameStock, AllocPolicy) -> Result<T, MissingPages>,
    ) -> Option<T> {
        loop {
            let (seen, MissingPages(missing)) = {
                let mut stock = self.stock.lock_as(locks)?;
                let missing = match take(&mut stock, AllocPolicy::Whole) {
                    Ok(taken) => return Some(taken),
                    Err(missing) => missing,
                };
                if stock.growable(ExtentPurpose::Data) == 0 {
                    return take(&mut stock, AllocPolicy::Pieces).ok(); // the usual way of a full arena: one lock
                }
                (stock.growths, missing)
            };
            let extents = match locks {
                LockWait::Wait => missing.div_ceil(EXTENT_PAGES).clamp(1, STEP_EXTENTS_MAX),
                LockWait::Try => 1,
            };
            let request = GrowRequest { wanted: ExtentPurpose::Data, seen, locks };
            if self.grow_by(extents, request) == GrowOutcome::No {
                return take(&mut *self.stock.lock_as(locks)?, AllocPolicy::Pieces).ok();
            }
        }
    }

    fn assert_allocated(&self, stock: &FrameStock, frame: Frame, pages: u32) {
        let end = u64::from(frame.0) + u64::from(pages);
        let inside = frame.0 >= self.view.layout().frames_meta && end <= u64::from(stock.frames_reached());
        assert!(inside, "{frame:?} and {pages} pages are no data of this arena");
        debug_assert!(!stock.cells.has_extent(frame.extent()), "{frame:?} holds cells");
        debug_assert!(!stock.punched.contains(&frame.extent()), "{frame:?} has no memory");
        debug_assert!(
            (frame.0..frame.0 + pages).map(|f| self.view.own(Frame(f)).word()).all(is_unclaimed),
            "a folio at {frame:?} is freed while it lives or is held"
        );
    }

    /// Takes a cell: its slots and its node head are all zeros. `None` as for [`Arena::alloc`].
    /// Locks: Growth, Arena. May wait while extents are grown; as [`Arena::alloc`].
    pub fn alloc_cell(&self) -> Option<CellNumber> {
        let mut one = Vec::with_capacity(1);
        self.alloc_cells(1, &mut one, LockWait::Wait);
        one.pop().inspect(|&cell| self.clear(cell))
    }

    /// Takes up to `wanted` cells, appends them to `cells` and says how many; as [`Arena::alloc_cell`], or with
    /// [`LockWait::Try`] as [`Arena::alloc_run`]. Their content is arbitrary: the code that makes a node or a chunk of
    /// one empties it.
    pub fn alloc_cells(&self, wanted: usize, cells: &mut Vec<CellNumber>, locks: LockWait) -> usize {
        let first = cells.len();
        let cut_free = || self.stock.lock_as(locks).is_some_and(|mut stock| stock.cut_free(&self.view));
        // 1 free frames, free data extents included once the reserve is used up
        while let Some(seen) = self.take_cells(first + wanted, cells, locks) {
            // 2 more frames, or else the free ones of data after all
            if cells.len() == first + wanted
                || (self.grow(ExtentPurpose::Cells, seen, locks) == GrowOutcome::No && !cut_free())
            {
                break;
            }
        }
        cells.len() - first
    }

    /// Gives a cell back that only late readers can still reach. Locks: Arena. Panics if it was not handed out.
    pub fn free_cell(&self, cell: CellNumber) {
        self.free_cells([cell]);
    }

    /// Gives many cells back under one lock; as [`Arena::free_cell`].
    pub fn free_cells(&self, cells: impl IntoIterator<Item = CellNumber>) {
        let mut stock = self.stock.lock();
        for cell in cells {
            if let CellFreed::ExtentEmpty(extent) = stock.cells.free(&self.view, cell)
                && stock.cells.extents() > stock.reserve()
            {
                stock.cells.remove_extent(extent);
                stock.buddy.add_extent(&self.view, Frame(extent * EXTENT_PAGES));
            }
        }
    }

    /// Returns how often the arena had grown, or nothing if the lock is busy and `locks` does not wait.
    fn take_cells(&self, len: usize, cells: &mut Vec<CellNumber>, locks: LockWait) -> Option<u64> {
        let mut stock = self.stock.lock_as(locks)?;
        while cells.len() < len {
            match stock.cells.alloc_some(&self.view, len, cells) {
                0 if stock.cells.extents() >= stock.reserve() && stock.cut_free(&self.view) => {}
                0 => break,
                _ => {}
            }
        }
        Some(stock.growths)
    }

    /// Makes a cell all zeros. Late readers may look on: zero is the empty entry, and no mapping's number.
    fn clear(&self, cell: CellNumber) {
        let slots = self.view.slots(cell).expect("a cell of our own arena exists");
        slots.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
        let head: &NodeHead = self.view.head(cell).expect("a cell of our own arena exists");
        head.clear();
    }

    /// Grows before an allocation needs it, if few extents are free as a whole and the bound allows it: by one step,
    /// which takes some milliseconds. Says whether it did. Locks: Growth, Arena.
    pub fn grow_ahead(&self) -> bool {
        let (extents, seen) = {
            let stock = self.stock.lock();
            (stock.extents_ahead(), stock.growths)
        };
        let (wanted, locks) = (ExtentPurpose::Data, LockWait::Wait);
        extents > 0 && self.grow_by(extents, GrowRequest { wanted, seen, locks }) == GrowOutcome::Yes
    }

    /// Grows by one step, if it has less than `bytes` and the bound allows it. Says whether it did.
    /// Locks: Growth, Arena.
    pub fn grow_toward(&self, bytes: u64) -> bool {
        let (extents, seen) = {
            let stock = self.stock.lock();
            let missing = bytes.saturating_sub(u64::from(stock.extents_grown) * EXTENT_SIZE as u64);
            let missing = missing.div_ceil(EXTENT_SIZE as u64).min(STEP_EXTENTS_MAX.into()) as u32;
            (missing.min(stock.growable(ExtentPurpose::Data)), stock.growths)
        };
        let (wanted, locks) = (ExtentPurpose::Data, LockWait::Wait);
        extents > 0 && self.grow_by(extents, GrowRequest { wanted, seen, locks }) == GrowOutcome::Yes
    }

    /// Counts itself among those that wait, so that a thread which grows the arena step by step lets it go first.
    pub(super) fn lock_growth(&self, locks: LockWait) -> Option<RankedGuard<'_, GrowthParams>> {
        self.growth_waiters.fetch_add(1, Ordering::Relaxed);
        let growth = self.growth.lock_as(locks);
        self.growth_waiters.fetch_sub(1, Ordering::Relaxed);
        growth
    }

    pub(super) fn wait_for_growth(&self) -> RankedGuard<'_, GrowthParams> {
        self.lock_growth(LockWait::Wait).expect("a lock that is waited for is had")
    }

    /// Whether a thread waits for the growth lock; a hint.
    pub fn is_growth_awaited(&self) -> bool {
        self.growth_waiters.load(Ordering::Relaxed) > 0
    }

    pub(super) fn grow(&self, wanted: ExtentPurpose, seen: u64, locks: LockWait) -> GrowOutcome {
        self.grow_by(1, GrowRequest { wanted, seen, locks })
    }

    /// Unless it has grown since the request was made. A thread that must not wait does not grow while another does.
    pub(super) fn grow_by(&self, extents: u32, request: GrowRequest) -> GrowOutcome {
        let GrowRequest { wanted, seen, locks } = request;
        // 1 one at a time; a thread that waited here may find it done
        let Some(mut growth) = self.lock_growth(locks) else { return GrowOutcome::No };
        let extents = {
            let Some(stock) = self.stock.lock_as(locks) else { return GrowOutcome::No };
            if stock.growths != seen {
                return GrowOutcome::Yes;
            }
            if stock.growable(wanted) == 0 {
                return GrowOutcome::No;
            }
            stock.next_extents(wanted, extents.min(growth.step_max())).expect("it may grow")
        };
        // 2 memory, while others go on allocating
        let fresh = self.view.frames_grown()..extents.end * EXTENT_PAGES;
        let begun = Instant::now();
        let sizes = growth.ask(|tables| {
            self.make_entries(tables, fresh)?;
            self.arena_segment.populate_many(extents.clone())
        });
        if let Some(sizes) = &sizes {
            growth.extent_time = begun.elapsed() / sizes.len() as u32;
        }
        // 3 known to viewers, then handed out
        let mut stock = self.stock.lock();
        stock.is_refused = sizes.is_none();
        let Some(sizes) = sizes else { return GrowOutcome::No };
        let grown = || extents.clone().zip(&sizes);
        grown().for_each(|(extent, &size)| stock.add_grown(extent, size));
        // A reader that sees the new number finds memory there, and descriptors that have been odd since before. Where
        // a punched extent is grown again the number stays, and a reader is led there by its descriptors alone.
        self.publish(&stock);
        for (extent, _) in grown() {
            match wanted {
                ExtentPurpose::Data => stock.buddy.add_extent(&self.view, Frame(extent * EXTENT_PAGES)),
                ExtentPurpose::Cells => stock.cells.add_extent(extent),
            }
        }
        GrowOutcome::Yes
    }
}

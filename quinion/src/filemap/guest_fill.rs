//! Places: frames for pages that each have their own.
//!
//! ```text
//!   gaps      [---)      [---------)       what is not cached
//!   claim     [---)      [----) x          each page's frame, as far as nobody has it
//!                               `- somebody has it: it is about to put it into the tree, or it has left and is held
//! ```
//!
//! The mapping of a guest (`arena/guest.rs`) takes no frame that the buddy has, and none of its pages is charged: its
//! extents count in full from the beginning. So there is nothing to reclaim for. What a page may have to wait for is
//! its place: two may want one absent page, and one of them has claimed it and not inserted it yet. The other looks
//! again as soon as the page is there, or its place free.
//!
//! Frames are given back as any others are ([`Filemap::free_runs`], the last hold of a folio): the arena knows whose
//! they are.
//!
//! The pages of an image are **brought** in two steps, so that many can be on their way while the first are waited for:
//! fills of what is missing are started, then each folio is waited for as a whole. Where one did not come, its pages
//! are read one by one, and each that cannot be read has an error of its own.
//!
//! Invariants:
//!  1. A page's folio stands in its place and in no other (asserted by `Mapping::check`).
//!  2. The wait for a place is bounded: a folio that has left and is held for long ends it with "no memory".
#![deny(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::arena::{ClaimOutcome, FrameRun, GuestExtents, NotReady, ReadableState};
use crate::backend::DeferredWakes;
use crate::error::{Error, ErrorKind};
use crate::lists::Charge;
use crate::mapping::Mapping;
use crate::readahead::{Config, Readahead, Window};
use crate::sync::{LockWait, Rank, RankedMutex};
use crate::units::{Order, PAGE_SIZE, PageIndex, PoolNumber};

use super::fill::{AfterSubmit, Filemap, FillOutcome, FillUrgency, RUN_ORDER_MAX, SubmitBatch};
use super::uncached::Reader;
use super::wait_policy::WaitPolicy;

/// How long a place is waited for at most.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// Looks at it without sleeping: the thread that has claimed a page inserts it some steps later.
const LOOKS: u32 = 64;
/// Between two looks from then on.
const LOOK: Duration = Duration::from_micros(200);

/// How often a page is brought that was there, and had gone when its folio had ended.
const TRIES: u32 = 1000;

/// What came of pages that were brought.
#[derive(Debug, Default)]
pub(crate) struct FetchedPages {
    /// Pages that are there as a whole, in rising order; they may reach further than was asked.
    pub there: Vec<Range<PageIndex>>,
    /// Pages that cannot be had, and why, in rising order.
    pub failed: Vec<(Range<PageIndex>, Error)>,
    /// The file ends there; of what follows nothing is said.
    pub ended: Option<PageIndex>,
}

impl Filemap {
    /// Starts filling what of `pages` is missing, and waits for none of it; with [`FillUrgency::Asked`] for memory and
    /// places.
    ///
    /// # Errors
    /// There is no memory for the first page that is missing.
    pub(crate) fn start_bringing(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        pages: Range<PageIndex>,
        need: FillUrgency,
    ) -> Result<(), Error> {
        let count = (pages.end.0 - pages.start.0) as u32;
        let window = Window { order: Order::fitting(count), ..Window::exact(pages.start, count) };
        let mut together = SubmitBatch::of(mapping, PoolNumber::DEFAULT, None);
        let filled = self.insert_window(&mut together, window, pages.clone(), need, WaitPolicy::Wait);
        together.submit(AfterSubmit::Anything);
        match filled {
            FillOutcome::Submitted(_) | FillOutcome::Nothing => Ok(()),
            _ => Err(self.no_memory(pages.start.first_byte())),
        }
    }

    /// Waits until all of `pages` are there as whole folios, bringing what is not on its way.
    pub(crate) fn bring(self: &Arc<Self>, mapping: &Arc<Mapping>, pages: Range<PageIndex>) -> FetchedPages {
        // What waits inside reaps, and a waker, a stranger's, may want what the caller holds.
        let _wakes = DeferredWakes::new();
        let none = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(1)));
        let reader = Reader::new(&none, PoolNumber::DEFAULT, None).sure_of_size();
        let (mut brought, mut at, mut tries) = (FetchedPages::default(), pages.start, 0);
        while at < pages.end {
            let held = match self.hold_page(mapping, reader, at.first_byte()) {
                Ok(Some(held)) => held,
                Ok(None) => {
                    brought.ended = Some(at);
                    break;
                }
                Err(error) => {
                    let next =
                        at.plus(u64::from(self.folio_orders.min.pages())).align_down(self.folio_orders.min);
                    // Where there is no memory for this one there is none for the next.
                    let end = if error.kind() == ErrorKind::Io { next.min(pages.end) } else { pages.end };
                    brought.failed.push((at..end, error));
                    (at, tries) = (end, 0);
                    continue;
                }
            };
            self.wait_queue.wait(&*mapping.backend(), &mut || held.is_readable() != ReadableState::NotYet);
            match held.is_readable() {
                ReadableState::Yes => {
                    let end = held.first().plus(u64::from(held.order().pages()));
                    brought.there.push(at..end);
                    (at, tries) = (end, 0);
                }
                // The page had arrived, and another of its folio did not come.
                _ if tries < TRIES => tries += 1,
                _ => {
                    brought.failed.push((at..pages.end, self.no_memory(at.first_byte())));
                    at = pages.end;
                }
            }
        }
        brought
    }

    /// Copies pages that are there, of a mapping whose pages stay, from byte `position` on.
    pub(crate) fn read_brought(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        position: u64,
        to: &mut [u8],
    ) -> Result<usize, Error> {
        let none = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(PAGE_SIZE as u32)));
        let reader = Reader::new(&none, PoolNumber::DEFAULT, None).sure_of_size();
        self.read(mapping, reader, WaitPolicy::Wait, position, to)
    }

    /// The frames of `gaps` at their places, as many as nobody has from the first page on, and a charge of nothing. For
    /// the first of them its place is waited for, if `need` says so and `locks` allows it.
    ///
    /// # Errors
    /// [`FillOutcome::Nothing`]: somebody else has brought the first page; [`FillOutcome::Busy`]: a lock is; else there
    /// is no memory for the first page.
    pub(super) fn claim_places(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        places: &Arc<GuestExtents>,
        gaps: &[(PageIndex, u32)],
        need: FillUrgency,
        locks: LockWait,
    ) -> Result<(Charge<'_>, Vec<FrameRun>), FillOutcome> {
        let Some(&(first, _)) = gaps.first() else { return Err(FillOutcome::Nothing) };
        let (mut looks, mut since) = (0, None);
        loop {
            let mut runs = Vec::with_capacity(gaps.len());
            match self.claim_all(places, gaps, locks, &mut runs) {
                _ if !runs.is_empty() => {
                    return Ok((self.reclaim.lists().charge(pool, 0, Order::ZERO), runs));
                }
                ClaimOutcome::Busy => return Err(FillOutcome::Busy),
                ClaimOutcome::NoMemory(_) => return Err(FillOutcome::NoMemory),
                ClaimOutcome::Pages(_) | ClaimOutcome::Taken => {}
            }
            if mapping.probe(first) != Err(NotReady::Mismatch) {
                return Err(FillOutcome::Nothing);
            }
            let since = *since.get_or_insert_with(Instant::now);
            if need != FillUrgency::Asked || locks == LockWait::Try || since.elapsed() > WAIT_MAX {
                return Err(FillOutcome::NoMemory);
            }
            looks += 1;
            if looks < LOOKS { std::thread::yield_now() } else { std::thread::sleep(LOOK) }
        }
    }

    /// Claims from the first of `gaps` on, until a page cannot be had; says what became of the last claim.
    fn claim_all(
        &self,
        places: &GuestExtents,
        gaps: &[(PageIndex, u32)],
        locks: LockWait,
        runs: &mut Vec<FrameRun>,
    ) -> ClaimOutcome {
        let unit = self.folio_orders.min;
        let longest = u64::from(self.folio_orders.max.max(RUN_ORDER_MAX).pages());
        let end = u64::from(places.pages());
        let mut last = ClaimOutcome::Taken;
        for &(gap, pages) in gaps {
            let mut done = 0;
            while done < pages {
                let index = gap.plus(u64::from(done));
                // A run is one request, and what lies behind the guest's end has no place.
                let most = (longest - index.0 % longest).min(end.saturating_sub(index.0));
                let wanted = most.min(u64::from(pages - done)) as u32 & !(unit.pages() - 1);
                if wanted == 0 {
                    return last;
                }
                last = places.claim(index, wanted, locks);
                let ClaimOutcome::Pages(got) = last else { return last };
                let frame = places.place(index).expect("it was claimed");
                let whole = got & !(unit.pages() - 1);
                if whole < got {
                    self.arena.free_run(frame.plus(whole), got - whole);
                }
                if whole > 0 {
                    runs.push(FrameRun { frame, pages: whole });
                }
                if whole < wanted {
                    return last;
                }
                done += whole;
            }
        }
        last
    }
}

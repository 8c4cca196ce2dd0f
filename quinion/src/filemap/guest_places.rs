//! Guest places: frames for pages that each have their own.
//!
//! ```text
//!   gaps      [---)      [---------)       what is not cached
//!   claim     [---)      [----) x          each page's frame, as far as it is free
//!                               `- taken: its page is about to go into the tree, or its folio has left and is held
//! ```
//!
//! The mapping of a guest (`arena/guest.rs`) takes no frame that the buddy has, and none of its pages is charged: its
//! extents count in full from the beginning, so there is nothing to reclaim for. A page may have to wait for its
//! place: of two threads that want an absent page, one has claimed it and not inserted it yet. The arena knows the
//! frames' owners when they are given back.
//!
//! Invariants:
//!  1. A page's folio stands in its place and in no other (asserted by `Mapping::check`).
//!  2. A frame that is claimed belongs to the claiming thread until it is in the tree or given back.
//!  3. The wait for a place is bounded: a folio that has left and is held for long ends it with "no memory".
#![deny(unsafe_code)]

use std::time::{Duration, Instant};

use crate::arena::{ClaimOutcome, FrameRun, Gap, GuestExtents, NotReady};
use crate::backend::pause;
use crate::sync::LockWait;
use crate::units::Order;

use super::frame_supply::{
    FillUrgency, FrameRequest, FrameSupply, NoFrames, RUN_ORDER_MAX, SuppliedFrames, deal_out,
};

const WAIT_MAX: Duration = Duration::from_secs(10);
/// Without sleeping: the thread that has claimed a page inserts it some steps later.
const SPINS_MAX: u32 = 64;
const RETRY_PAUSE: Duration = Duration::from_micros(200);

impl FrameSupply {
    /// As many as are free from the first page on, and a charge of nothing. Waits for the place of the first page, if
    /// the urgency says so and `locks` allows it.
    pub(super) fn claim_places(
        &self,
        request: &FrameRequest<'_>,
        places: &GuestExtents,
        gaps: &[Gap],
    ) -> Result<SuppliedFrames<'_>, NoFrames> {
        let &FrameRequest { mapping, pool, urgency, locks, .. } = request;
        let Some(&Gap { first, .. }) = gaps.first() else { return Err(NoFrames::Present) };
        let (mut spins, mut since) = (0, None);
        loop {
            let mut runs = Vec::with_capacity(gaps.len());
            match self.claim_all(places, gaps, locks, &mut runs) {
                _ if !runs.is_empty() => {
                    let charge = self.reclaim.lists().charge(pool, 0, Order::ZERO);
                    return Ok(SuppliedFrames { charge, runs: deal_out(gaps, &runs) });
                }
                ClaimOutcome::Busy => return Err(NoFrames::Busy),
                ClaimOutcome::NoMemory(_) => return Err(NoFrames::NoMemory),
                ClaimOutcome::Pages(_) | ClaimOutcome::Taken => {}
            }
            if mapping.index().probe(first) != Err(NotReady::Mismatch) {
                return Err(NoFrames::Present);
            }
            let since = *since.get_or_insert_with(Instant::now);
            if urgency != FillUrgency::Asked || locks == LockWait::Try || since.elapsed() > WAIT_MAX {
                return Err(NoFrames::NoMemory);
            }
            spins += 1;
            if spins < SPINS_MAX { std::thread::yield_now() } else { pause(RETRY_PAUSE) }
        }
    }

    /// Claims until a page cannot be had; returns the result of the last claim.
    fn claim_all(
        &self,
        places: &GuestExtents,
        gaps: &[Gap],
        locks: LockWait,
        runs: &mut Vec<FrameRun>,
    ) -> ClaimOutcome {
        let unit = self.folio_orders.min;
        let longest = u64::from(self.folio_orders.max.max(RUN_ORDER_MAX).pages());
        let end = u64::from(places.pages());
        let mut last = ClaimOutcome::Taken;
        for &Gap { first, pages } in gaps {
            let mut done = 0;
            while done < pages {
                let index = first.plus(u64::from(done));
                // A run is one request, and pages behind the guest's end have no place.
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

//! Recency: how much of the cache Probation gets for pages that come back soon.
//!
//! ```text
//!   Probation, a page larger:    what came back within a fifth of the cache would have been there still
//!                                    5 soon / cache     hits for each page that arrives
//!   Main, a page larger:             use / rotation       reads for each page that goes
//!
//!   ratio of the two     above 0.8: the floor rises     below 0.6: it falls     0 <= floor <= 90 % of the cache
//! ```
//!
//! `s3fifo.rs` gives Probation the share of its folios that are read again there. That share cannot tell of what use a
//! larger Probation would be: where the working set moves on, almost no folio is read again in a hundredth of the
//! cache, and all of them in nine tenths. But it shows in how soon folios come back after they went. So both sides are
//! asked the same: how many hits would one page more bring? **The floor** is the least share of Probation; it moves by
//! a small step with each sixteenth of a cache that arrives, towards the side that is worth more.
//!
//! Four conditions keep it from cases that look the same and are not. Each was found by a trace that lost without it:
//!
//!  - Main has shown its use: half a cache of its pages was scanned once. Before, its rotation is the time since it
//!    began.
//!  - The floor does not rise while four of five pages of Main are read within one rotation. Of a loop a little larger
//!    than the cache, each page that is missing comes back soon, and yet a larger Probation keeps none: it takes the
//!    places of pages that are read.
//!  - From a tenth of the cache on, the floor has to pay: Probation's pages are read again at a quarter of the rate of
//!    Main's, at least. Else it falls, twice as fast, and then on for as long as it pauses. A pause is twice as long as
//!    the last one, which is forgotten by half with each step without a floor that returns do not ask for.
//!  - Returns that streams bring do not count: streams have a ring of their own.
//!
//! **The end of a floor is a new beginning.** A Main that the floor made small rotates fast and is read little: that is
//! no measure of the Main that there will be. So when the floor is gone, the reads of Main's pages are forgotten, and
//! Main counts as of use until it has shown the contrary. Without this, a random loop that follows a moving window
//! would find a Main that looks idle, and nine tenths of the cache in Probation, for good.
//!
//! While there is a floor, reads are to a folio's credit in Main for two rotations at most, not for three: pages that
//! were popular leave early where all moves on.
//!
//! Invariants:
//!  1. The floor is 90 % at most.
//!  2. No divisor may be zero, and no product overflows, whatever is held.
//!
//! Not an invariant: that the better share is found. It is a controller, which knows the slope where it stands, as far
//! as samples of the last cache of arrivals tell.
//!
//! Sources: N. Megiddo, D. S. Modha, "ARC", FAST 2003, whose border moves by returns, without asking what the other
//! side is worth. Marginal utility as the measure of a partition: M. Qureshi, Y. Patt, "Utility-Based Cache
//! Partitioning", MICRO 2006; G. E. Suh, L. Rudolph, S. Devadas, "Dynamic Partitioning of Shared Cache Memory", Journal
//! of Supercomputing 2004. No source is known that compares ghosts' distances with a ring's rotation.

use super::Weights;
use super::moving_share::{MovingShare, ONE};

/// A return is soon, if the absence was no longer than one part in so many of the cache.
pub const SOON_PART: u64 = 5;
/// Steps for each cache of pages that arrive.
const STEPS: u64 = 16;
const STEP: u64 = ONE / 32;
const FLOOR_MAX: u64 = ONE / 100 * 90;
/// Up to here the floor need not pay.
const FLOOR_FREE: u64 = ONE / 100 * 10;
/// In tenths: what a page of Probation is worth for one of Main, where the floor rises and where it falls.
const RISES_ABOVE: u128 = 8;
const FALLS_BELOW: u128 = 6;
/// The share of Main's pages that is read in a rotation from which on the floor does not rise.
const USE_BUSY: u64 = ONE / 100 * 80;
/// One part in so many of Main's rate of reads is enough for a floor to pay.
const PAYS_PART: u128 = 4;
/// Steps in which a floor that did not pay may not rise: at first, and at most.
const PAUSE_MIN: u32 = 16;
const PAUSE_MAX: u32 = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MainUse {
    /// The share of its scanned pages that was read within one rotation, in parts of [`ONE`].
    pub read: u64,
    /// Pages that went while it came round.
    pub rotation: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ProbationUse {
    /// The share of its scanned pages that was read again, in parts of [`ONE`].
    pub read: u64,
    /// The share of the cache that it is meant to have; in parts of [`ONE`].
    pub share: u64,
    pub pages: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FloorStep {
    Continues,
    /// The estimate was made for a smaller Main.
    Ends,
}

/// The floor of Probation's share. Numbers only; nothing here allocates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Recency {
    soon: MovingShare,
    floor: u64,
    /// Pages that arrived since the last step, and of these those that came back soon.
    since_step: u64,
    soon_since_step: u64,
    /// Pages that had arrived in all at the last step.
    arrived: u64,
    scanned: u64,
    /// Steps in which the floor may not rise, and how many there will be the next time.
    pause: u32,
    pause_next: u32,
}

impl Recency {
    pub(super) const fn new() -> Self {
        Self {
            soon: MovingShare::of(0),
            floor: 0,
            since_step: 0,
            soon_since_step: 0,
            arrived: 0,
            scanned: 0,
            pause: 0,
            pause_next: 0,
        }
    }

    pub(super) fn floor(&self) -> u64 {
        self.floor
    }

    /// `pages` pages arrived, by no stream, and `soon` that came back soon. Whether a step is due.
    #[inline]
    pub(super) fn arrive(&mut self, pages: u64, soon: u64, held: &Weights) -> bool {
        self.since_step += pages;
        self.soon_since_step += soon;
        self.since_step >= held.total() / STEPS
    }

    /// Counts the arrivals since the last step. Whether enough was seen to move the floor: a cache of pages has
    /// arrived, and half a cache of Main's was scanned.
    pub(super) fn end_step(&mut self, held: &Weights) -> bool {
        self.soon.note(self.since_step, self.soon_since_step, held);
        self.arrived = self.arrived.saturating_add(self.since_step);
        (self.since_step, self.soon_since_step) = (0, 0);
        self.arrived >= held.total() && self.scanned >= held.total() / 2 && self.scanned > 0
    }

    pub(super) fn scan(&mut self, pages: u64) {
        self.scanned = self.scanned.saturating_add(pages);
    }

    pub(super) fn step(&mut self, probation: ProbationUse, main: MainUse, held: &Weights) -> FloorStep {
        let before = self.floor;
        self.pause = self.pause.saturating_sub(1);
        // Both ratios are compared crosswise: nothing is divided.
        let (read_again, read_on) = (u128::from(probation.read), u128::from(main.read));
        let more_probation = 10 * u128::from(SOON_PART * self.soon.get()) * u128::from(main.rotation);
        let more_main = read_on * u128::from(held.total());
        let pays =
            PAYS_PART * read_again * u128::from(main.rotation) >= read_on * u128::from(probation.pages);
        if self.floor > FLOOR_FREE && !pays {
            self.floor -= 2 * STEP;
            self.pause_next = (2 * self.pause_next).clamp(PAUSE_MIN, PAUSE_MAX);
            self.pause = self.pause_next;
        } else if more_probation > RISES_ABOVE * more_main && self.pause == 0 {
            if main.read < USE_BUSY {
                self.floor = (self.floor.max(probation.share) + STEP).min(FLOOR_MAX);
            }
        } else if more_probation < FALLS_BELOW * more_main || self.pause > 0 {
            self.floor = self.floor.saturating_sub(STEP);
            if self.floor == 0 && self.pause == 0 {
                self.pause_next /= 2;
            }
        }
        if before > 0 && self.floor == 0 { FloorStep::Ends } else { FloorStep::Continues }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CACHE: u64 = 1600;

    fn held() -> Weights {
        Weights { pages: [0, 0, 160, CACHE - 160] }
    }

    fn parts(percent: u64) -> u64 {
        ONE / 100 * percent
    }

    fn probation(percent: u64) -> ProbationUse {
        ProbationUse { read: parts(percent), share: parts(10), pages: CACHE / 10 }
    }

    fn main_read(percent: u64) -> MainUse {
        MainUse { read: parts(percent), rotation: CACHE }
    }

    fn arrive(recency: &mut Recency, pages: u64, soon: u64) -> bool {
        recency.arrive(pages, soon, &held()) && recency.end_step(&held())
    }

    /// The state after `percent` % of the arriving pages came back soon, and Main was scanned.
    fn returned(percent: u64) -> Recency {
        let mut recency = Recency::new();
        recency.scan(CACHE);
        (0..10 * CACHE).for_each(|page| {
            arrive(&mut recency, 1, u64::from(page % 100 < percent));
        });
        recency
    }

    #[test]
    fn the_floor_rises_where_a_page_of_probation_is_worth_more_and_falls_where_less() {
        // A fifth of the arriving pages comes back within a fifth of the cache: worth 1 a cache of pages. Main is worth
        // 0.5.
        let mut recency = returned(20);
        recency.step(probation(50), main_read(50), &held());
        assert_eq!(recency.floor(), parts(10) + STEP, "it begins at the share that Probation has");
        for _ in 0..100 {
            recency.step(probation(50), main_read(50), &held());
        }
        assert_eq!(recency.floor(), FLOOR_MAX);
        let mut few = Recency { floor: recency.floor, ..returned(5) };
        few.step(probation(50), main_read(50), &held());
        assert_eq!(few.floor(), FLOOR_MAX - STEP);
        for _ in 0..100 {
            few.step(probation(50), main_read(50), &held());
        }
        assert_eq!(few.floor(), 0);
        let mut between = Recency { floor: parts(5), ..returned(7) };
        between.step(probation(50), main_read(50), &held());
        assert_eq!(between.floor(), parts(5), "0.7 of what Main's are worth: it stays");
    }

    #[test]
    fn the_floor_does_not_rise_beside_a_main_that_is_read() {
        let mut recency = returned(50);
        recency.step(probation(50), main_read(80), &held());
        assert_eq!(recency.floor(), 0);
        recency.step(probation(50), main_read(79), &held());
        assert!(recency.floor() > 0);
    }

    #[test]
    fn nothing_moves_before_main_has_shown_its_use() {
        let mut recency = Recency::new();
        assert!(!(0..10 * CACHE).any(|_| arrive(&mut recency, 1, 1)), "Main was not scanned");
        recency.scan(CACHE / 2);
        let steps = (0..CACHE).filter(|_| arrive(&mut recency, 1, 1)).count() as u64;
        assert_eq!(steps, STEPS);
        recency.step(probation(50), MainUse { read: ONE, rotation: 0 }, &held());
        assert_eq!(recency.floor(), 0, "none has come round");
        let mut fresh = Recency::new();
        fresh.scan(CACHE);
        assert!(!(1..CACHE).any(|_| arrive(&mut fresh, 1, 1)), "no cache of pages has arrived");
    }

    #[test]
    fn a_floor_that_does_not_pay_falls_and_pauses_longer_each_time() {
        let mut recency = returned(50);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            while recency.floor <= FLOOR_FREE {
                recency.step(probation(50), main_read(50), &held());
            }
            recency.step(probation(0), main_read(50), &held());
            pauses.push(recency.pause);
            while recency.pause > 0 {
                let before = recency.floor;
                recency.step(probation(50), main_read(50), &held());
                assert!(recency.floor <= before || recency.pause == 0, "it rose in a pause");
            }
        }
        assert_eq!(pauses, [16, 32, 64, 128, 256, 512, 1024, 1024]);
    }

    #[test]
    fn the_end_of_a_floor_is_told_once() {
        let mut recency = Recency { floor: parts(20), ..returned(0) };
        let ends: Vec<FloorStep> =
            (0..8).map(|_| recency.step(probation(50), main_read(50), &held())).collect();
        let told = ends.iter().filter(|step| **step == FloorStep::Ends).count();
        assert_eq!((ends[0], told, recency.floor()), (FloorStep::Continues, 1, 0), "{ends:?}");
    }

    #[test]
    fn a_cache_that_was_made_smaller_takes_steps_of_its_size() {
        let mut recency = returned(20);
        let large = Weights { pages: [0, 0, 1 << 20, 1 << 24] };
        recency.arrive(1 << 24, 0, &large);
        recency.end_step(&large);
        let until = (1..=CACHE).find(|_| recency.arrive(1, 0, &held()));
        assert_eq!(until, Some(CACHE / STEPS));
    }

    proptest! {
        /// Overflow and division by zero are panics here.
        #[test]
        fn the_floor_has_a_bound_with_any_folios_held(
            steps in prop::collection::vec(
                (0..3_u64, 0..u64::MAX >> 20, 0..=ONE, 0..=ONE, 0..u64::MAX >> 20, 0..=ONE), 1..200),
        ) {
            let mut recency = Recency::new();
            for (pages, large, read, again, rotation, share) in steps {
                let held = Weights { pages: [0, large % 7, large, large / 3] };
                recency.scan(large);
                recency.arrive(pages * large, large, &held);
                recency.end_step(&held);
                let probation = ProbationUse { read: again, share, pages: large };
                recency.step(probation, MainUse { read, rotation }, &held);
                prop_assert!(recency.floor() <= FLOOR_MAX, "{:?}", recency);
                prop_assert!(recency.pause <= PAUSE_MAX);
            }
        }
    }
}

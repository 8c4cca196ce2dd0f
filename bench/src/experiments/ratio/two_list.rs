//! Two-list: Linux's inactive and active lists, with refault distance, to compare with.
//!
//! ```text
//!    new -----> Probation (inactive) ---- not read again ----> out, with a shadow
//!                   ^        | read again
//!      too many     |        v
//!      in Main      +---- Main (active) <---- came back within the pages of Main
//! ```
//!
//! Linux activates a page at its second read. Here a read moves nothing: the scan finds that the page was read. That is
//! the one difference, and the price of reads that store nothing.
//!
//! Main gives pages back while it is larger than `inactive_ratio` times Probation: 1 below a GiB, the root of ten times
//! the GiB above.
//!
//! Source: mm/vmscan.c (`inactive_is_low`), mm/workingset.c of Linux; the rules, not the code.

use quinion::internals::policy::{
    ArrivingFolio, Class, FetchOrigin, NewPolicy, Policy, PolicyVerdict, Weights,
};
use quinion::internals::units::PAGE_SIZE;
use quinion::internals::workingset::Refault;

const GIB_PAGES: u64 = (1 << 30) / PAGE_SIZE as u64;

#[derive(Clone, Copy, Debug)]
struct TwoList(());

impl TwoList {
    fn new() -> Self {
        Self(())
    }
}

pub const TWO_LISTS: NewPolicy = || Box::new(TwoList::new());

/// How many times Probation Main may be, in a cache of so many pages.
fn inactive_ratio(pages: u64) -> u64 {
    match pages / GIB_PAGES {
        0 => 1,
        gib => (10 * gib).isqrt(),
    }
}

impl Policy for TwoList {
    fn admit(&mut self, arrival: ArrivingFolio, _held: &Weights) -> Class {
        match (arrival.came, arrival.refault) {
            (FetchOrigin::Uncached, _) => Class::Uncached,
            (_, Some(Refault::Recent)) => Class::Main,
            // Linux knows no streams: what they bring stands in line with the rest.
            _ => Class::Probation,
        }
    }

    fn reach(&self, held: &Weights) -> u64 {
        held.of(Class::Main)
    }

    fn next(&mut self, held: &Weights) -> Option<Class> {
        let (inactive, active) = (held.of(Class::Probation), held.of(Class::Main));
        match held.passing() {
            Some(class) => Some(class),
            None if inactive + active == 0 => None,
            None if inactive * inactive_ratio(inactive + active) < active => Some(Class::Main),
            None if inactive == 0 => Some(Class::Main),
            None => Some(Class::Probation),
        }
    }

    fn decide(&mut self, class: Class, reads: u8, _pages: u32, _held: &Weights) -> PolicyVerdict {
        match class {
            Class::Uncached => PolicyVerdict::Evict { remember: false },
            Class::Main => PolicyVerdict::Keep { class: Class::Probation, reads: 0 },
            Class::Stream | Class::Probation if reads > 0 => {
                PolicyVerdict::Keep { class: Class::Main, reads: 0 }
            }
            Class::Stream | Class::Probation => PolicyVerdict::Evict { remember: true },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quinion::internals::policy::DEFAULT_POLICY;
    use quinion_testing::twins::rings::{activates_refaulted_pages, lost_to_a_scan, makes_room};

    use super::super::ours::Ours;
    use super::super::{percent_of, real, share, synthetic};
    use super::*;
    use crate::harness::Extent;

    fn held(probation: u64, main: u64) -> Weights {
        Weights { pages: [0, 0, probation, main] }
    }

    /// W01: a refault is recent up to a distance of as many pages as the active list has, and a recent one is
    /// activated.
    #[test]
    fn w01_up_to_the_pages_of_the_active_list_a_return_is_recent() {
        assert_eq!(TwoList::new().reach(&held(70, 30)), 30);
        let came = |refault| ArrivingFolio { pages: 1, came: FetchOrigin::Asked, refault, returned_soon: 0 };
        assert_eq!(TwoList::new().admit(came(Some(Refault::Recent)), &held(1, 1)), Class::Main);
        assert_eq!(TwoList::new().admit(came(Some(Refault::Old)), &held(1, 1)), Class::Probation);
        assert_eq!(TwoList::new().admit(came(None), &held(1, 1)), Class::Probation);
    }

    #[test]
    fn the_active_list_gives_back_its_surplus() {
        let next = |held| TwoList::new().next(&held);
        assert_eq!(next(held(50, 50)), Some(Class::Probation));
        assert_eq!(next(held(49, 51)), Some(Class::Main));
        assert_eq!(next(held(0, 1)), Some(Class::Main));
        assert_eq!(next(held(0, 0)), None);
        assert_eq!([0, GIB_PAGES - 1, GIB_PAGES, 10 * GIB_PAGES].map(inactive_ratio), [1, 1, 3, 10]);
        assert_eq!(next(held(GIB_PAGES, 3 * GIB_PAGES)), Some(Class::Probation));
    }

    #[test]
    fn one_more_read_activates() {
        let decide = |class, reads| TwoList::new().decide(class, reads, 1, &held(1, 1));
        assert_eq!(decide(Class::Probation, 0), PolicyVerdict::Evict { remember: true });
        assert_eq!(decide(Class::Probation, 1), PolicyVerdict::Keep { class: Class::Main, reads: 0 });
        assert_eq!(decide(Class::Main, 3), PolicyVerdict::Keep { class: Class::Probation, reads: 0 });
    }

    #[test]
    fn two_lists_keep_pages_read_often_and_activate_refaulted_ones() {
        assert_eq!(lost_to_a_scan(TWO_LISTS), [0; 0]);
        assert!(activates_refaulted_pages(TWO_LISTS));
    }

    #[test]
    fn a_cache_that_is_built_with_two_lists_hits_as_their_simulation_does() {
        let trace = synthetic::trace(Extent::Quick);
        let real = real::answered(&trace, trace.cache_pages(10.0), TWO_LISTS).expect("it runs");
        let reached = share(real.hits, &trace);
        let simulated = |policy: NewPolicy| {
            let ours = Ours::new(&trace.places, real.pages_held, policy(), FetchOrigin::Asked);
            (percent_of(&trace, ours) - reached).abs()
        };
        let (two, other) = (simulated(TWO_LISTS), simulated(DEFAULT_POLICY));
        assert!(two < 1.0 && two < other, "{two:.2} points from two lists, {other:.2} from ours");
    }

    fn came() -> impl Strategy<Value = FetchOrigin> {
        prop::sample::select(
            &[FetchOrigin::Asked, FetchOrigin::Ahead, FetchOrigin::Stream, FetchOrigin::Uncached][..],
        )
    }

    proptest! {
        #[test]
        fn two_lists_make_room_in_bounded_turns(
            pages_max in 8..40_u64,
            reads in prop::collection::vec((0..60_u32, 0..4_u32, came()), 1..300),
        ) {
            makes_room(TWO_LISTS, pages_max, &reads);
        }
    }
}

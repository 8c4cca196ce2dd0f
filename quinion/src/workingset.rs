//! Workingset: how long ago a page left, and whether it came back too soon.
//!
//! Pure decisions. The age of a cache is a count of pages: of those that were evicted, and of those that came back and
//! were kept for it. An eviction leaves the age in a shadow; a **refault**, a page that comes back where its shadow is,
//! compares it with the age by then. The **distance** between the two is how many pages more the cache would have
//! needed to keep the page:
//!
//! ```text
//!   age     evicted here             comes back here
//!   ---------|------------------------|--------------->
//!            |<------ distance ------>|           distance <= pages held: recent, it belongs to the working set
//! ```
//!
//! A shadow has room for 25 bits:
//!
//! ```text
//!   24           23                                   0
//!   | standing  |  age in buckets, the lowest 24 bits |      bucket: 2^n pages, by the size of the arena
//! ```
//!
//! A **bucket** is as small as lets 24 bits span the cache 256 times; below 64 Ki pages (256 MiB) it is one page. So
//! the age wraps once in 256 cachefuls of evictions, and the difference of two ages is right across a wrap.
//!
//! Distances also tell which pages a larger cache would have kept: [`RefaultCounts`] counts them by least **growth**:
//!
//! ```text
//!   + 1/8   + 1/4   + 1/2   + 1   + 2   + 4  ...  + 128   more      times the pages held when they came back
//! ```
//!
//! Invariants:
//!  1. A distance is off by less than a bucket, as long as fewer than 2^24 buckets went by.
//!  2. The age only grows: by the pages of each folio that leaves or is activated.
//!
//! Not an invariant: that an old page is taken for an old one. After a whole lap of 2^24 buckets a distance looks small
//! again. It costs one folio an undeserved round. Nor that a curve has all refaults: shadow entries are bounded, and
//! a page whose shadow was forgotten counts as new. Nor that its growths are exact: pages that were activated meanwhile
//! count along, so a distance is rather too long, and the kept pages rather more than the curve says.
//!
//! Kernel cousin: mm/workingset.c. This differs: the age is the cache's and not a group's, a distance is compared with
//! all pages of the cache, and buckets are chosen so that the age seldom laps instead of so that it fits.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::units::Order;
use crate::xarray::PAYLOADS_MAX;

const AGE_BITS: u32 = 24;
const AGES: u32 = 1 << AGE_BITS;
/// How often the kept bits span the cache, at least.
const SPAN_CACHES: u64 = 256;

const _: () = assert!(AGES * 2 == PAYLOADS_MAX, "a standing and an age are a shadow's payload");

/// The state of a folio when it was evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvictedState {
    /// Evicted as one of many.
    Plain,
    /// The folio had come back soon before, and had been kept for that.
    WorkingSet,
}

/// Contents of a shadow entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShadowInfo {
    /// The folio's state.
    pub standing: EvictedState,
    /// The age at which it left, in buckets; below 2^24.
    bucket: u32,
}

/// The class of a refault, by how long the page was away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refault {
    /// A cache twice as large would have kept it: it belongs to the working set.
    Recent,
    /// The page was away too long to tell it from a new one.
    Old,
}

impl ShadowInfo {
    /// As a shadow's payload.
    pub fn payload(self) -> u32 {
        let standing = match self.standing {
            EvictedState::Plain => 0,
            EvictedState::WorkingSet => AGES,
        };
        standing | self.bucket
    }

    /// From a shadow's payload.
    pub fn from_payload(payload: u32) -> Self {
        let standing = if payload & AGES == 0 { EvictedState::Plain } else { EvictedState::WorkingSet };
        Self { standing, bucket: payload & (AGES - 1) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scale {
    shift: u32,
}

impl Scale {
    /// The finest scale that spans a cache of `pages` pages [`SPAN_CACHES`] times.
    fn of(pages: u64) -> Self {
        let span = pages.max(1).saturating_mul(SPAN_CACHES);
        let bits = u64::BITS - (span - 1).leading_zeros();
        Self { shift: bits.saturating_sub(AGE_BITS) }
    }

    fn bucket(self, age: u64) -> u32 {
        (age >> self.shift) as u32 & (AGES - 1)
    }

    fn distance(self, memory: ShadowInfo, now: u64) -> u64 {
        let buckets = self.bucket(now).wrapping_sub(memory.bucket) & (AGES - 1);
        u64::from(buckets) << self.shift
    }
}

/// One cache's age, and the scale of its buckets. Shared by all threads; no step of it waits.
#[derive(Debug)]
pub struct WorkingSet {
    scale: Scale,
    age: AtomicU64,
}

impl WorkingSet {
    /// The age of a cache of at most `pages` pages in which nothing has happened yet.
    pub fn new(pages: u64) -> Self {
        Self::beginning_at(pages, 0, 1)
    }

    /// As [`WorkingSet::new`], of an age that has gone `part` of `parts` parts of a lap already: ages that begin far
    /// apart take each other's memories for old ones, mostly.
    pub fn beginning_at(pages: u64, part: u32, parts: u32) -> Self {
        let scale = Scale::of(pages);
        let age = u64::from(AGES / parts * part) << scale.shift;
        Self { scale, age: AtomicU64::new(age) }
    }

    /// Pages evicted and activated so far.
    pub fn age(&self) -> u64 {
        self.age.load(Ordering::Relaxed)
    }

    /// A folio of `order` leaves: returns the contents of its shadow entry. The age grows by its pages.
    pub fn remember(&self, order: Order, standing: EvictedState) -> ShadowInfo {
        let age = self.age.fetch_add(u64::from(order.pages()), Ordering::Relaxed);
        ShadowInfo { standing, bucket: self.scale.bucket(age) }
    }

    /// Pages that were evicted or activated since `memory` was left: so many more would have kept the folio.
    pub fn distance(&self, memory: ShadowInfo) -> u64 {
        self.scale.distance(memory, self.age())
    }

    /// A folio of `order` comes back to where `memory` was left, in a cache that holds `held` pages.
    /// The age grows by its pages if it is to be activated, that is, if it is [`Refault::Recent`].
    pub fn refault(&self, memory: ShadowInfo, order: Order, held: u64) -> Refault {
        self.refault_after(self.distance(memory), order, held)
    }

    /// As [`WorkingSet::refault`], of a folio whose [`WorkingSet::distance`] is known.
    pub fn refault_after(&self, distance: u64, order: Order, held: u64) -> Refault {
        if distance > held {
            return Refault::Old;
        }
        self.age.fetch_add(u64::from(order.pages()), Ordering::Relaxed);
        Refault::Recent
    }
}

/// Steps by which a cache would have had to be larger, in eighths of its pages; larger growths are the rest.
const GROWTH_EIGHTHS: [u64; GROWTHS] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const GROWTHS: usize = 11;

const _: () =
    assert!(GROWTH_EIGHTHS[GROWTHS - 1] / 8 < SPAN_CACHES, "a distance that is told fits into a lap");

/// The first growth that would have kept a page away for `distance`, in a cache that held `held` pages.
fn growth_of(distance: u64, held: u64) -> usize {
    let kept = |eighths: &u64| u128::from(distance) * 8 <= u128::from(held) * u128::from(*eighths);
    GROWTH_EIGHTHS.iter().position(kept).unwrap_or(GROWTHS)
}

/// Counts the pages that came back, by how long they were away. Shared by all threads; no step of it waits.
#[derive(Debug, Default)]
pub struct RefaultCounts([AtomicU64; GROWTHS + 1]);

impl RefaultCounts {
    /// `pages` pages came back after `distance`, to a cache that held `held` pages.
    pub fn add(&self, distance: u64, held: u64, pages: u64) {
        self.0[growth_of(distance, held)].fetch_add(pages, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn curve(&self) -> RefaultCurve {
        RefaultCurve { pages: std::array::from_fn(|at| self.0[at].load(Ordering::Relaxed)) }
    }
}

/// How many of the pages that were evicted and came back a larger cache would have kept; see
/// [`Cache::refaults`](crate::Cache::refaults).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RefaultCurve {
    pages: [u64; GROWTHS + 1],
}

impl RefaultCurve {
    /// All pages that came back, also those that no growth here would have kept.
    pub fn pages(&self) -> u64 {
        self.pages.iter().sum()
    }

    /// Pages that a cache larger by `growth` would have kept: 0.5 is half as large again, 1 is twice as large. A
    /// growth between two points counts as the lower of them, so the result is not too large.
    pub fn kept_pages(&self, growth: f64) -> u64 {
        self.points().iter().rev().find(|(point, _)| *point <= growth).map_or(0, |(_, pages)| *pages)
    }

    /// Growths from an eighth to 128 times, each with the pages that a cache larger by so much would have kept.
    pub fn points(&self) -> [(f64, u64); 11] {
        let mut kept = 0;
        std::array::from_fn(|at| {
            kept += self.pages[at];
            (GROWTH_EIGHTHS[at] as f64 / 8.0, kept)
        })
    }

    /// Refaults since `before`, an earlier snapshot of the same cache.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self { pages: std::array::from_fn(|at| self.pages[at].saturating_sub(before.pages[at])) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: Order = Order::ZERO;

    fn aged(pages: u64, age: u64) -> WorkingSet {
        let set = WorkingSet::new(pages);
        set.age.store(age, Ordering::Relaxed);
        set
    }

    fn pass(set: &WorkingSet, pages: u64) {
        set.age.fetch_add(pages, Ordering::Relaxed);
    }

    /// W01: a refault at a distance up to the reach is recent, and one page further it is not.
    #[test]
    fn w01_a_distance_up_to_the_size_of_the_cache_is_recent_and_one_more_is_not() {
        for distance in [1, 2, 99, 100, 101, 1000] {
            let set = WorkingSet::new(100);
            let memory = set.remember(PAGE, EvictedState::Plain);
            pass(&set, distance - 1);
            let expected = if distance <= 100 { Refault::Recent } else { Refault::Old };
            assert_eq!(set.refault(memory, PAGE, 100), expected, "{distance}");
        }
    }

    /// W02: a distance is right to within one bucket when the age counter wraps between eviction and refault.
    #[test]
    fn w02_the_counter_wraps_in_the_middle_of_a_distance() {
        for pages in [100, 1 << 16, 1 << 20, 1 << 28] {
            let lap = u64::from(AGES) << Scale::of(pages).shift;
            for (age, distance) in [(lap - 1, 5), (lap - pages / 2, pages), (u64::MAX - 3, pages)] {
                let set = aged(pages, age);
                let memory = set.remember(PAGE, EvictedState::Plain);
                pass(&set, distance - 1);
                let found = set.scale.distance(memory, set.age());
                assert!(found.abs_diff(distance) < 1 << set.scale.shift, "{pages} {age}: {found}");
                let later = aged(pages, age.wrapping_add(pages * 2 + (1 << set.scale.shift)));
                assert_eq!(later.refault(memory, PAGE, pages), Refault::Old, "{pages} {age}");
            }
        }
    }

    /// W06: a folio of order n ages the working set by 2^n pages, when it is evicted and when it is activated.
    #[test]
    fn w06_a_folio_of_order_n_counts_its_pages() {
        let set = WorkingSet::new(1000);
        let first = set.remember(PAGE, EvictedState::Plain);
        let large = set.remember(Order(9), EvictedState::WorkingSet);
        assert_eq!(set.age(), 1 + 512);
        assert_eq!(set.scale.distance(first, set.age()), 513);
        assert_eq!(set.refault(large, Order(3), 512), Refault::Recent);
        assert_eq!(set.age(), 513 + 8, "what is activated competes too");
        assert_eq!(set.refault(large, Order(3), 519), Refault::Old);
        assert_eq!(set.age(), 521, "what is not, does not");
    }

    #[test]
    fn a_growth_is_the_least_that_would_have_kept_the_page() {
        let held = 800;
        for (distance, growth) in [(0, 0), (1, 0), (100, 0), (101, 1), (200, 1), (201, 2), (400, 2), (800, 3)]
        {
            assert_eq!(growth_of(distance, held), growth, "{distance}");
        }
        assert_eq!((growth_of(801, held), growth_of(1600, held)), (4, 4));
        assert_eq!((growth_of(128 * 800, held), growth_of(128 * 800 + 1, held)), (GROWTHS - 1, GROWTHS));
        assert_eq!((growth_of(1, 0), growth_of(u64::MAX, u64::MAX)), (GROWTHS, 3), "no overflow");
    }

    #[test]
    fn a_curve_counts_the_pages_that_each_growth_keeps() {
        let counts = RefaultCounts::default();
        let before = counts.curve();
        for (distance, pages) in [(10, 1), (100, 2), (101, 4), (799, 8), (900, 16), (1 << 40, 32)] {
            counts.add(distance, 800, pages);
        }
        let curve = counts.curve().since(&before);
        assert_eq!(curve.pages(), 63);
        let kept =
            [0.0, 0.1, 0.125, 0.2, 0.25, 1.0, 1.9, 2.0, 1000.0, f64::INFINITY].map(|by| curve.kept_pages(by));
        assert_eq!(kept, [0, 0, 3, 3, 7, 15, 15, 31, 31, 31]);
        assert!(curve.points().is_sorted(), "more memory keeps no less");
        assert_eq!(curve.since(&curve), RefaultCurve::default());
    }

    #[test]
    fn buckets_are_single_pages_in_a_small_cache_and_span_a_large_one_many_times() {
        assert_eq!(Scale::of(0).shift, 0);
        assert_eq!(Scale::of(1 << 16).shift, 0);
        assert_eq!(Scale::of((1 << 16) + 1).shift, 1);
        for pages in [1 << 20, 3 << 24, 1 << 30, u64::MAX] {
            let span = u128::from(AGES) << Scale::of(pages).shift;
            assert!(span >= u128::from(pages.saturating_mul(SPAN_CACHES)), "{pages}");
        }
    }

    #[derive(Default)]
    struct Naive {
        age: u128,
        left: Vec<(u128, ShadowInfo)>,
    }

    #[derive(Clone, Debug)]
    enum Op {
        Leave(u8, bool),
        Return(usize, u8, u64),
        Pass(u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            3 => (0..10u8, any::<bool>()).prop_map(|(order, set)| Op::Leave(order, set)),
            3 => (any::<usize>(), 0..10u8, 0..1u64 << 26)
                .prop_map(|(which, order, held)| Op::Return(which, order, held)),
            2 => (0..1u64 << 22).prop_map(Op::Pass),
        ];
        prop::collection::vec(op, 1..60)
    }

    proptest! {
        #[test]
        fn agrees_with_ages_that_never_wrap(pages in 1..1u64 << 26, start: u64, ops in ops()) {
            let set = aged(pages, start);
            let bucket = 1u128 << set.scale.shift;
            let mut naive = Naive { age: u128::from(start), ..Naive::default() };
            for op in ops {
                match op {
                    Op::Leave(order, set_member) => {
                        let standing = if set_member { EvictedState::WorkingSet } else { EvictedState::Plain };
                        let memory = set.remember(Order(order), standing);
                        let kept = ShadowInfo::from_payload(memory.payload());
                        prop_assert_eq!((kept, kept.standing), (memory, standing));
                        prop_assert!(memory.payload() < PAYLOADS_MAX);
                        naive.left.push((naive.age, memory));
                        naive.age += 1 << order;
                    }
                    Op::Return(..) if naive.left.is_empty() => {}
                    Op::Return(which, order, held) => {
                        let (left, memory) = naive.left[which % naive.left.len()];
                        let (distance, held_wide) = (naive.age - left, u128::from(held));
                        let refault = set.refault(memory, Order(order), held);
                        if distance + bucket > u128::from(AGES) * bucket {
                            // a lap has gone by: either answer
                        } else if distance + bucket <= held_wide {
                            prop_assert_eq!(refault, Refault::Recent);
                        } else if distance >= held_wide + bucket {
                            prop_assert_eq!(refault, Refault::Old);
                        }
                        naive.age += if refault == Refault::Recent { 1 << order } else { 0 };
                    }
                    Op::Pass(many) => {
                        pass(&set, many);
                        naive.age += u128::from(many);
                    }
                }
                prop_assert_eq!(set.age(), naive.age as u64);
            }
        }
    }
}

//! Workingset: how long ago a page left, and whether it came back too soon.
//!
//! Pure judgement. The age of a cache is a count of pages: of those that were
//! evicted, and of those that came back and were kept for it. An eviction leaves
//! the age in a shadow; a **refault**, a page that comes back where its shadow
//! is, compares it with the age by then. The **distance** between the two is how
//! many pages more the cache would have needed to keep the page:
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
//! A **bucket** is as small as lets 24 bits span the cache 256 times; below
//! 64 Ki pages (256 MiB) it is one page. So the age wraps once in 256 cachefuls of
//! evictions, and the difference of two ages is right across a wrap.
//!
//! Invariants:
//!  1. A distance is off by less than a bucket, as long as fewer than 2^24 buckets went by.
//!  2. The age only grows: by the pages of each folio that leaves or is activated.
//!
//! Not an invariant: that an old page is taken for an old one. After a whole lap
//! of 2^24 buckets a distance looks small again. It costs one folio an undeserved round.
//!
//! Kernel cousin: mm/workingset.c. We differ: the age is the cache's and not a
//! group's, what is compared with is all that the cache holds, and buckets are
//! chosen so that the age seldom laps instead of so that it fits.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::units::Order;
use crate::xarray::PAYLOADS_MAX;

/// Bits of an age that a shadow keeps.
const AGE_BITS: u32 = 24;
const AGES: u32 = 1 << AGE_BITS;
/// How often the kept bits span the cache, at least.
const LAPS: u64 = 256;

const _: () = assert!(AGES * 2 == PAYLOADS_MAX, "a standing and an age are a shadow's payload");

/// What a folio was to the cache when it left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// One of many.
    Plain,
    /// It had come back soon before, and had been kept for that.
    WorkingSet,
}

/// What a shadow remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// What the folio was.
    pub standing: Standing,
    /// The age at which it left, in buckets; below 2^24.
    bucket: u32,
}

/// What a page that comes back is to the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refault {
    /// A cache twice as large would have kept it: it belongs to the working set.
    Recent,
    /// It was away too long to tell it from a new one.
    Old,
}

impl Memory {
    /// As a shadow's payload.
    pub fn payload(self) -> u32 {
        let standing = match self.standing {
            Standing::Plain => 0,
            Standing::WorkingSet => AGES,
        };
        standing | self.bucket
    }

    /// From a shadow's payload.
    pub fn from_payload(payload: u32) -> Self {
        let standing = if payload & AGES == 0 { Standing::Plain } else { Standing::WorkingSet };
        Self { standing, bucket: payload & (AGES - 1) }
    }
}

/// How ages are told: the size of a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scale {
    /// log2 of the pages of a bucket.
    shift: u32,
}

impl Scale {
    /// The finest scale that spans a cache of `pages` pages [`LAPS`] times.
    fn of(pages: u64) -> Self {
        let span = pages.max(1).saturating_mul(LAPS);
        let bits = u64::BITS - (span - 1).leading_zeros();
        Self { shift: bits.saturating_sub(AGE_BITS) }
    }

    fn bucket(self, age: u64) -> u32 {
        (age >> self.shift) as u32 & (AGES - 1)
    }

    /// Pages from the age that `memory` was left at to the age `now`.
    fn distance(self, memory: Memory, now: u64) -> u64 {
        let buckets = self.bucket(now).wrapping_sub(memory.bucket) & (AGES - 1);
        u64::from(buckets) << self.shift
    }
}

/// One cache's age, and what is judged by it. Shared by all threads; no step of it waits.
#[derive(Debug)]
pub struct WorkingSet {
    scale: Scale,
    age: AtomicU64,
}

impl WorkingSet {
    /// The age of a cache of at most `pages` pages in which nothing has happened yet.
    pub fn new(pages: u64) -> Self {
        Self { scale: Scale::of(pages), age: AtomicU64::new(0) }
    }

    /// Pages evicted and activated so far.
    pub fn age(&self) -> u64 {
        self.age.load(Ordering::Relaxed)
    }

    /// A folio of `order` leaves: what its shadow is to say. The age grows by its pages.
    pub fn remember(&self, order: Order, standing: Standing) -> Memory {
        let age = self.age.fetch_add(u64::from(order.pages()), Ordering::Relaxed);
        Memory { standing, bucket: self.scale.bucket(age) }
    }

    /// A folio of `order` comes back to where `memory` was left, in a cache that holds `held` pages.
    /// The age grows by its pages if it is to be activated, that is, if it is [`Refault::Recent`].
    pub fn judge(&self, memory: Memory, order: Order, held: u64) -> Refault {
        if self.scale.distance(memory, self.age()) > held {
            return Refault::Old;
        }
        self.age.fetch_add(u64::from(order.pages()), Ordering::Relaxed);
        Refault::Recent
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

    /// Lets `pages` pages leave.
    fn pass(set: &WorkingSet, pages: u64) {
        set.age.fetch_add(pages, Ordering::Relaxed);
    }

    #[test]
    fn w01_a_distance_up_to_what_the_cache_holds_is_recent_and_one_more_is_not() {
        for distance in [1, 2, 99, 100, 101, 1000] {
            let set = WorkingSet::new(100);
            let memory = set.remember(PAGE, Standing::Plain);
            pass(&set, distance - 1);
            let expected = if distance <= 100 { Refault::Recent } else { Refault::Old };
            assert_eq!(set.judge(memory, PAGE, 100), expected, "{distance}");
        }
    }

    #[test]
    fn w02_the_counter_wraps_in_the_middle_of_a_distance() {
        for pages in [100, 1 << 16, 1 << 20, 1 << 28] {
            let lap = u64::from(AGES) << Scale::of(pages).shift;
            for (age, distance) in [(lap - 1, 5), (lap - pages / 2, pages), (u64::MAX - 3, pages)] {
                let set = aged(pages, age);
                let memory = set.remember(PAGE, Standing::Plain);
                pass(&set, distance - 1);
                let found = set.scale.distance(memory, set.age());
                assert!(found.abs_diff(distance) < 1 << set.scale.shift, "{pages} {age}: {found}");
                let later = aged(pages, age.wrapping_add(pages * 2 + (1 << set.scale.shift)));
                assert_eq!(later.judge(memory, PAGE, pages), Refault::Old, "{pages} {age}");
            }
        }
    }

    #[test]
    fn w06_a_folio_of_order_n_counts_its_pages() {
        let set = WorkingSet::new(1000);
        let first = set.remember(PAGE, Standing::Plain);
        let large = set.remember(Order(9), Standing::WorkingSet);
        assert_eq!(set.age(), 1 + 512);
        assert_eq!(set.scale.distance(first, set.age()), 513);
        assert_eq!(set.judge(large, Order(3), 512), Refault::Recent);
        assert_eq!(set.age(), 513 + 8, "what is activated competes too");
        assert_eq!(set.judge(large, Order(3), 519), Refault::Old);
        assert_eq!(set.age(), 521, "what is not, does not");
    }

    #[test]
    fn buckets_are_single_pages_in_a_small_cache_and_span_a_large_one_many_times() {
        assert_eq!(Scale::of(0).shift, 0);
        assert_eq!(Scale::of(1 << 16).shift, 0);
        assert_eq!(Scale::of((1 << 16) + 1).shift, 1);
        for pages in [1 << 20, 3 << 24, 1 << 30, u64::MAX] {
            let span = u128::from(AGES) << Scale::of(pages).shift;
            assert!(span >= u128::from(pages.saturating_mul(LAPS)), "{pages}");
        }
    }

    /// The twin: it keeps the whole age of each eviction and subtracts.
    #[derive(Default)]
    struct Naive {
        age: u128,
        left: Vec<(u128, Memory)>,
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
                        let standing = if set_member { Standing::WorkingSet } else { Standing::Plain };
                        let memory = set.remember(Order(order), standing);
                        let kept = Memory::from_payload(memory.payload());
                        prop_assert_eq!((kept, kept.standing), (memory, standing));
                        prop_assert!(memory.payload() < PAYLOADS_MAX);
                        naive.left.push((naive.age, memory));
                        naive.age += 1 << order;
                    }
                    Op::Return(..) if naive.left.is_empty() => {}
                    Op::Return(which, order, held) => {
                        let (left, memory) = naive.left[which % naive.left.len()];
                        let (distance, held_wide) = (naive.age - left, u128::from(held));
                        let refault = set.judge(memory, Order(order), held);
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

//! Policy: which folio stays.
//!
//! Pure decisions. The cache keeps its folios in four rings, each in the order
//! of arrival, and asks a policy: which ring does a folio join, which ring's
//! oldest folio is looked at next, and what becomes of it. A policy sees
//! weights and counts; it sees no folio, does no I/O, takes no lock, reads no clock,
//! allocates nothing.
//!
//! ```text
//!    arrival --admit--> [ Uncached ]   of DONTCACHE reads; leaves first
//!                       [ Stream   ]   of a sequential way through a file; leaves next
//!                       [ Probation]   new here: read again, or leave
//!                       [ Main     ]   has proved itself
//!                           |  next: which ring     decide: its oldest folio
//!                           v
//!                       Keep { class, reads }: to the young end of a ring;    Evict { remember }
//! ```
//!
//! An eviction leaves a shadow in the index, with the cache's age (`workingset.rs`). [`Policy::reach`] says up to which
//! distance a return counts as [`Refault::Recent`]; so the ghosts of the literature cost nothing here. The age counts
//! every eviction, also those that leave no shadow.
//!
//! | policy | is |
//! |---|---|
//! | [`S3Fifo`] | ours, and the default |
//! | [`TwoList`] | Linux's active and inactive lists with refault distance, to compare with |
//!
//! Each pool of a cache has rings and a policy of its own; of which pool room is made is `pools.rs`.
//!
//! Invariants of every policy, asserted by the tests at the end of this file:
//!  1. `next` names a ring that holds something, and `None` only if none does.
//!  2. A folio that is not read is evicted after it was scanned [`SCANS_MAX`] times at most.
//!
//! Not an invariant: that a scan evicts. The thread that makes room asks again, and bounds its turns.

use core::fmt::Debug;

pub use crate::tuning::PolicyKind;
use crate::workingset::Refault;

mod moving_share;
mod pools;
mod recency;
mod s3fifo;
mod turn;
mod two_list;

pub use pools::{PoolPages, PoolTurn, PoolTurns};
pub use recency::SOON_PART;
pub use s3fifo::S3Fifo;
pub use two_list::TwoList;

/// How many rings there are.
pub const CLASSES: usize = 4;
/// Reads beyond the first that are counted at most.
pub const READS_MAX: u8 = 3;
/// How often a folio that is not read meanwhile is scanned at most until it is evicted: out of Probation, and
/// once for each of its reads, and once more.
pub const SCANS_MAX: u32 = READS_MAX as u32 + 2;

/// In which ring a folio is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Class {
    /// Read by a caller that asked for it not to be cached.
    Uncached = 0,
    /// Read by a stream, which is unlikely to come back before it is gone.
    Stream = 1,
    /// New: it has not proved that it is read again.
    Probation = 2,
    /// It was read again, or came back soon.
    Main = 3,
}

impl Class {
    /// All of them, in their order.
    pub const ALL: [Self; CLASSES] = [Self::Uncached, Self::Stream, Self::Probation, Self::Main];
}

/// Pages listed in each ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Weights {
    /// Indexed by [`Class`].
    pub pages: [u64; CLASSES],
}

impl Weights {
    /// The pages of one ring.
    pub fn of(&self, class: Class) -> u64 {
        self.pages[class as usize]
    }

    /// The pages of all rings.
    pub fn total(&self) -> u64 {
        self.pages.iter().sum()
    }

    fn holds(&self, class: Class) -> bool {
        self.of(class) > 0
    }

    /// The same, as if there were one ring alone.
    pub fn only(&self, class: Class) -> Self {
        let mut only = Self::default();
        only.pages[class as usize] = self.of(class);
        only
    }

    /// The same, as if there were no streams.
    fn without_streams(mut self) -> Self {
        self.pages[Class::Stream as usize] = 0;
        self
    }

    /// The rings whose folios are not meant to stay, in the order in which they go; if one of them holds something.
    fn passing(&self) -> Option<Class> {
        [Class::Uncached, Class::Stream].into_iter().find(|class| self.holds(*class))
    }
}

/// How a folio came to be fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FetchOrigin {
    /// A reader asked for just this.
    Asked,
    /// By readahead of a short run.
    Ahead,
    /// By a stream.
    Stream,
    /// For a read that asked not to cache it.
    Uncached,
}

/// A folio that enters the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArrivingFolio {
    /// Its pages.
    pub pages: u32,
    /// How it came.
    pub came: FetchOrigin,
    /// What its shadow says, if it left one.
    pub refault: Option<Refault>,
    /// Pages that came back soon, of it and of those that arrive with it after it: after no more evictions and
    /// activations than one part in [`SOON_PART`] of the pages that are listed in its pool.
    pub returned_soon: u64,
}

/// What becomes of a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyVerdict {
    /// It leaves.
    Evict {
        /// Whether it leaves a shadow.
        remember: bool,
    },
    /// It joins the young end of a ring.
    Keep {
        /// Of this one.
        class: Class,
        /// With so many reads to its credit: 0 to [`READS_MAX`].
        reads: u8,
    },
}

/// The rules of eviction. Numbers in, decisions out; nothing here waits or allocates.
pub trait Policy: Send + Debug {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// The ring that a folio joins, which is not listed in `held` yet.
    fn admit(&mut self, arrival: ArrivingFolio, held: &Weights) -> Class;

    /// Up to which refault distance, in pages, a return counts as recent. Asked when room was made, of what is left
    /// then.
    fn reach(&self, held: &Weights) -> u64;

    /// The ring whose oldest folio is scanned next; `None` if all are empty.
    fn next(&mut self, held: &Weights) -> Option<Class>;

    /// What becomes of the oldest folio of `class`, of `pages` pages, which was read `reads` times (0 to
    /// [`READS_MAX`]) since it was put there. It is still counted in `held`.
    fn decide(&mut self, class: Class, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict;
}

impl PolicyKind {
    /// A policy of this kind that has seen nothing yet.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::S3Fifo => Box::new(S3Fifo::new()),
            Self::TwoList => Box::new(TwoList::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;
    use proptest::prelude::*;

    const KINDS: [PolicyKind; 2] = [PolicyKind::S3Fifo, PolicyKind::TwoList];

    /// A folio of a small cache.
    #[derive(Clone, Copy, Debug)]
    struct Folio {
        page: u32,
        pages: u32,
        reads: u8,
        /// Scans since the last read.
        scans: u32,
    }

    /// A cache of rings and nothing else, which is the naive way to do what a policy says.
    #[derive(Debug)]
    struct Rings {
        policy: Box<dyn Policy>,
        rings: [VecDeque<Folio>; CLASSES],
        evicted: u64,
        /// What each page that left a shadow counts from.
        shadows: HashMap<u32, u64>,
    }

    impl Rings {
        fn new(kind: PolicyKind) -> Self {
            Self { policy: kind.build(), rings: Default::default(), evicted: 0, shadows: HashMap::new() }
        }

        fn held(&self) -> Weights {
            Weights { pages: [0, 1, 2, 3].map(|ring: usize| weight(&self.rings[ring])) }
        }

        /// One scan; how many pages left.
        fn turn(&mut self) -> u32 {
            let held = self.held();
            let class = self.policy.next(&held).expect("something is held");
            let mut folio =
                self.rings[class as usize].pop_front().expect("the policy names a ring with something");
            folio.scans += 1;
            assert!(folio.scans <= SCANS_MAX, "{folio:?} of {class:?} stays for ever");
            match self.policy.decide(class, folio.reads, folio.pages, &held) {
                PolicyVerdict::Keep { class, reads } => {
                    assert!(reads <= READS_MAX);
                    self.rings[class as usize].push_back(Folio { reads, ..folio });
                    0
                }
                PolicyVerdict::Evict { remember } => {
                    if remember {
                        self.shadows.insert(folio.page, self.evicted);
                    }
                    self.evicted += u64::from(folio.pages);
                    folio.pages
                }
            }
        }

        /// Turns until `pages` pages fit into a cache of `pages_max`; how many that took.
        fn make_room(&mut self, pages: u32, pages_max: u64) -> u32 {
            let mut turns = 0;
            while self.held().total() + u64::from(pages) > pages_max {
                self.turn();
                turns += 1;
            }
            turns
        }

        fn read(&mut self, page: u32, pages: u32, came: FetchOrigin, pages_max: u64) {
            if let Some(folio) = self.rings.iter_mut().flatten().find(|folio| folio.page == page) {
                folio.reads = (folio.reads + 1).min(READS_MAX);
                folio.scans = 0;
                return;
            }
            let (folios, reach) =
                (self.rings.iter().map(VecDeque::len).sum::<usize>(), self.policy.reach(&self.held()));
            let turns = self.make_room(pages, pages_max);
            assert!(turns as usize <= folios * SCANS_MAX as usize, "{turns} turns for {folios} folios");
            let distance = self.shadows.remove(&page).map(|left| self.evicted - left);
            let is_soon = distance.is_some_and(|far| far <= pages_max / SOON_PART);
            let returned_soon = if is_soon { u64::from(pages) } else { 0 };
            let refault = distance.map(|far| if far <= reach { Refault::Recent } else { Refault::Old });
            let held = self.held();
            let class = self.policy.admit(ArrivingFolio { pages, came, refault, returned_soon }, &held);
            self.rings[class as usize].push_back(Folio { page, pages, reads: 0, scans: 0 });
        }

        fn has(&self, page: u32) -> bool {
            self.rings.iter().flatten().any(|folio| folio.page == page)
        }
    }

    fn weight(ring: &VecDeque<Folio>) -> u64 {
        ring.iter().map(|folio| u64::from(folio.pages)).sum()
    }

    /// W04: a scan of twice the cache's size evicts no page that was read four times before it.
    #[test]
    fn w04_a_scan_of_twice_the_cache_leaves_what_was_read_often() {
        for kind in KINDS {
            let mut cache = Rings::new(kind);
            for _ in 0..4 {
                (0..30).for_each(|page| cache.read(page, 1, FetchOrigin::Asked, 100));
            }
            (1000..1200).for_each(|page| cache.read(page, 1, FetchOrigin::Asked, 100));
            assert!((0..30).all(|page| cache.has(page)), "{kind:?}");
        }
    }

    /// W04: a page that a scan has evicted is activated when it refaults soon after.
    #[test]
    fn w04_pages_that_a_scan_pushed_out_are_activated_when_they_come_back() {
        for kind in KINDS {
            let mut cache = Rings::new(kind);
            // Half of the cache has proved itself, which is what two lists measure a distance by.
            for _ in 0..4 {
                (0..50).for_each(|page| cache.read(page, 1, FetchOrigin::Asked, 100));
            }
            (100..200).for_each(|page| cache.read(page, 1, FetchOrigin::Asked, 100));
            let gone: Vec<u32> = (100..200).filter(|page| !cache.has(*page)).collect();
            let back = *gone.last().expect("not all of the scan fits");
            cache.read(back, 1, FetchOrigin::Asked, 100);
            let main = &cache.rings[Class::Main as usize];
            assert!(main.iter().any(|folio| folio.page == back), "{kind:?}: {main:?}");
        }
    }

    #[test]
    fn a_stream_takes_an_eighth_and_then_goes_before_anything_else_does() {
        let mut cache = Rings::new(PolicyKind::S3Fifo);
        (0..100).for_each(|page| cache.read(page, 1, FetchOrigin::Asked, 100));
        (1000..1010).for_each(|page| cache.read(page, 1, FetchOrigin::Stream, 100));
        let before: Vec<u32> = (0..100).filter(|page| cache.has(*page)).collect();
        (1010..5000).for_each(|page| cache.read(page, 1, FetchOrigin::Stream, 100));
        let left = before.iter().filter(|page| cache.has(**page)).count();
        assert!(before.len() >= 90 && left >= 86, "{left} of {before:?}");
    }

    /// References to a cache of [`PHASE_CACHE`] pages, as many as 20 of it.
    const PHASE_CACHE: usize = 200;
    const PHASE: usize = 20 * PHASE_CACHE;

    /// Half of all reads are of a hot eighth of the cache, the others of twice what the cache holds.
    fn skewed() -> Vec<u32> {
        let mut state = 1_u32;
        let mut random = |below| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        (0..PHASE).map(|_| if random(2) == 0 { random(25) } else { random(400) }).collect()
    }

    /// Round and round over one and a quarter caches.
    fn around() -> Vec<u32> {
        (0..PHASE as u32).map(|at| 10_000 + at * 7 % 250).collect()
    }

    /// Near the place that moves on: what was left behind is not read again.
    fn moving() -> Vec<u32> {
        (0..PHASE as u32).map(|at| 20_000 + at / 2 + at * 37 % 150).collect()
    }

    /// Hits among the reads of `phase` after as many as `caches` caches have pages, as many reads as four have.
    fn hits_later(mut cache: Rings, caches: usize, phase: &[u32]) -> usize {
        let mut hits = 0;
        for (at, page) in phase.iter().enumerate().take((caches + 4) * PHASE_CACHE) {
            hits += usize::from(at >= caches * PHASE_CACHE && cache.has(*page));
            cache.read(*page, 1, FetchOrigin::Asked, PHASE_CACHE as u64);
        }
        hits
    }

    /// Of the hits of a policy that has seen no other phase, the part that one has after another phase.
    fn after_a_change(before: &[u32], caches: usize, after: &[u32]) -> f64 {
        let mut cache = Rings::new(PolicyKind::S3Fifo);
        before.iter().for_each(|page| cache.read(*page, 1, FetchOrigin::Asked, PHASE_CACHE as u64));
        let alone = hits_later(Rings::new(PolicyKind::S3Fifo), caches, after);
        assert!(alone > PHASE_CACHE / 2, "{alone} hits");
        hits_later(cache, caches, after) as f64 / alone as f64
    }

    #[test]
    fn a_main_full_of_an_earlier_phase_does_not_stay_in_the_way() {
        let phases = [skewed(), around(), moving()];
        for (from, before) in phases.iter().enumerate() {
            for (to, after) in phases.iter().enumerate().filter(|(to, _)| *to != from) {
                let [soon, later] = [1, 5].map(|caches| after_a_change(before, caches, after));
                // A loop tells by nothing but its second round that it is one; and a Main whose pages are read takes
                // little of what comes back from as far away as it comes round.
                let (soon_min, later_min) = if to == 1 { (0.35, 0.5) } else { (0.8, 0.8) };
                assert!(soon >= soon_min && later >= later_min, "{from} to {to}: {soon:.2}, {later:.2}");
            }
        }
    }

    /// In an order that looks random, round and round over `pages` pages from `first` on, `caches` caches of reads.
    fn shuffled_loop(first: u32, pages: u32, caches: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (first..first + pages).collect();
        let mut state = 7_u32;
        for at in (1..order.len()).rev() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            order.swap(at, (state >> 8) as usize % (at + 1));
        }
        order.into_iter().cycle().take(caches * PHASE_CACHE).collect()
    }

    /// Hits in per cent among the last ten caches of reads of `phase`.
    fn hits_at_the_end(cache: &mut Rings, phase: &[u32]) -> usize {
        let (mut hits, last) = (0, 10 * PHASE_CACHE);
        for (at, page) in phase.iter().enumerate() {
            hits += usize::from(phase.len() - at <= last && cache.has(*page));
            cache.read(*page, 1, FetchOrigin::Asked, PHASE_CACHE as u64);
        }
        hits * 100 / last
    }

    /// 1 All of a loop that fits is in Main, and a scan passes by: Main is read.
    /// 2 Another loop that fits comes back from further away than a share of Main's turn, as that was.
    #[test]
    fn a_loop_that_fits_is_kept_after_another_one() {
        let mut cache = Rings::new(PolicyKind::S3Fifo);
        let beside_a_scan = shuffled_loop(0, 180, 20);
        let both = beside_a_scan.iter().zip(100_000..).flat_map(|(page, scanned)| [*page, scanned]);
        hits_at_the_end(&mut cache, &both.collect::<Vec<_>>());
        for pages in [160, 180, 190] {
            let hits = hits_at_the_end(&mut cache, &shuffled_loop(pages * 1000, pages, 60));
            assert!(hits >= 95, "a loop of {pages} pages in {PHASE_CACHE}: {hits} %");
        }
    }

    /// A window leaves a floor of Probation's share that is right for it, and not for what follows.
    #[test]
    fn a_loop_after_a_moving_window_is_kept_in_part() {
        for (window, pages, wanted) in [(400, 220, 50), (400, 300, 35), (800, 240, 45), (200, 600, 15)] {
            let mut cache = Rings::new(PolicyKind::S3Fifo);
            let mut state = 1_u32;
            let moving: Vec<u32> = (0..20 * PHASE_CACHE as u32)
                .map(|at| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    1_000_000 + at / 2 + (state >> 8) % window
                })
                .collect();
            hits_at_the_end(&mut cache, &moving);
            let hits = hits_at_the_end(&mut cache, &shuffled_loop(0, pages, 60));
            assert!(hits >= wanted, "{pages} pages after a window of {window} in {PHASE_CACHE}: {hits} %");
        }
    }

    fn came() -> impl Strategy<Value = FetchOrigin> {
        prop_oneof![
            5 => Just(FetchOrigin::Asked),
            2 => Just(FetchOrigin::Ahead),
            2 => Just(FetchOrigin::Stream),
            1 => Just(FetchOrigin::Uncached),
        ]
    }

    proptest! {
        /// The bounds are asserted where a ring is named and a folio scanned.
        #[test]
        fn every_policy_makes_room_in_bounded_turns(
            pages_max in 8..40_u64,
            reads in prop::collection::vec((0..60_u32, 0..4_u32, came()), 1..300),
        ) {
            for kind in KINDS {
                let mut cache = Rings::new(kind);
                for (page, order, came) in &reads {
                    cache.read(*page, 1 << order, *came, pages_max);
                    prop_assert!(cache.held().total() <= pages_max);
                }
                let held = cache.held().total();
                while cache.held().total() > 0 {
                    cache.turn();
                }
                prop_assert!(cache.policy.next(&Weights::default()).is_none());
                prop_assert!(cache.evicted >= held, "a full cache can be emptied");
            }
        }
    }
}

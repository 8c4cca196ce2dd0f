//! Policy: which folios stay, seen over rings of a small cache.
//!
//! The letters are those of the specification's statements.

use proptest::prelude::*;
use quinion::internals::policy::{DEFAULT_POLICY, FetchOrigin};
use quinion_testing::twins::rings::{Rings, activates_refaulted_pages, lost_to_a_scan, makes_room};

fn rings(pages_max: usize) -> Rings {
    Rings::new(DEFAULT_POLICY, pages_max as u64)
}

/// W04: a scan of twice the cache's size evicts no page that was read four times before it.
#[test]
fn w04_a_scan_of_twice_the_cache_leaves_pages_that_were_read_often() {
    assert_eq!(lost_to_a_scan(DEFAULT_POLICY), [0; 0]);
}

/// W04: a page that a scan has evicted is activated when it refaults soon after.
#[test]
fn w04_pages_that_a_scan_pushed_out_are_activated_when_they_come_back() {
    assert!(activates_refaulted_pages(DEFAULT_POLICY));
}

#[test]
fn a_stream_takes_an_eighth_and_then_goes_before_anything_else_does() {
    let mut cache = rings(100);
    (0..100).for_each(|page| cache.read(page, 1, FetchOrigin::Asked));
    (1000..1010).for_each(|page| cache.read(page, 1, FetchOrigin::Stream));
    let before: Vec<u32> = (0..100).filter(|page| cache.has(*page)).collect();
    (1010..5000).for_each(|page| cache.read(page, 1, FetchOrigin::Stream));
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

/// Near a place that moves on; what is behind it is not read again.
fn moving() -> Vec<u32> {
    (0..PHASE as u32).map(|at| 20_000 + at / 2 + at * 37 % 150).collect()
}

/// Hits among the reads of `phase` after as many as `caches` caches have pages, as many reads as four have.
fn hits_later(mut cache: Rings, caches: usize, phase: &[u32]) -> usize {
    let mut hits = 0;
    for (at, page) in phase.iter().enumerate().take((caches + 4) * PHASE_CACHE) {
        hits += usize::from(at >= caches * PHASE_CACHE && cache.has(*page));
        cache.read(*page, 1, FetchOrigin::Asked);
    }
    hits
}

/// The hits of a policy after another phase, as a part of the hits of one that has seen no other phase.
fn after_a_change(before: &[u32], caches: usize, after: &[u32]) -> f64 {
    let mut cache = rings(PHASE_CACHE);
    before.iter().for_each(|page| cache.read(*page, 1, FetchOrigin::Asked));
    let alone = hits_later(rings(PHASE_CACHE), caches, after);
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

fn hits_at_the_end(cache: &mut Rings, phase: &[u32]) -> usize {
    let (mut hits, last) = (0, 10 * PHASE_CACHE);
    for (at, page) in phase.iter().enumerate() {
        hits += usize::from(phase.len() - at <= last && cache.has(*page));
        cache.read(*page, 1, FetchOrigin::Asked);
    }
    hits * 100 / last
}

/// 1 All of a loop that fits is in Main, and a scan passes by: Main is read.
/// 2 Another loop that fits comes back from further away than a share of Main's turn, as that was.
#[test]
fn a_loop_that_fits_is_kept_after_another_one() {
    let mut cache = rings(PHASE_CACHE);
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
        let mut cache = rings(PHASE_CACHE);
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
    #[test]
    fn a_policy_makes_room_in_bounded_turns(
        pages_max in 8..40_u64,
        reads in prop::collection::vec((0..60_u32, 0..4_u32, came()), 1..300),
    ) {
        makes_room(DEFAULT_POLICY, pages_max, &reads);
    }
}

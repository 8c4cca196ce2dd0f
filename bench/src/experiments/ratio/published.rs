//! Published: the peers of `peers.rs` beside the same policies of a published crate, foyer's.
//!
//! LRU, FIFO and SIEVE are defined to the letter, and answer the same. Of S3-FIFO and W-TinyLFU each author leaves
//! something open (ghosts, the sketch's width, ties), so they may differ by a few points.

use foyer_memory::{
    Cache, CacheBuilder, EvictionConfig, FifoConfig, LfuConfig, LruConfig, S3FifoConfig, SieveConfig,
};

use super::peers::{Fifo, Lru, S3Fifo, Sieve, TinyLfu};
use super::*;

/// Zipf and made-up ones. A loop is kept, or lost whole, by how many ghosts an S3-FIFO has, and its paper leaves that
/// open; and the crate's sketch of W-TinyLFU overflows in a debug build if a page is asked for too often.
const COUNTED_TRACES: usize = 5;

/// Hits in per cent of a cache of the crate, which holds `pages` pages.
fn of_crate(trace: &Trace, pages: usize, policy: impl Into<EvictionConfig>) -> f64 {
    let cache: Cache<u32, ()> = CacheBuilder::new(pages).with_shards(1).with_eviction_config(policy).build();
    let is_hit = |page: &&u32| {
        let is_hit = cache.get(*page).is_some();
        if !is_hit {
            cache.insert(**page, ());
        }
        is_hit
    };
    share(trace.references.iter().filter(is_hit).count() as u64, trace)
}

fn traces() -> Vec<(Rc<Trace>, usize)> {
    let made_up = Rc::new(synthetic::trace(Extent::Quick));
    let pages = made_up.cache_pages(10.0);
    let families = families::all(Extent::Quick);
    let of_families = families.iter().step_by(3).map(|family| (Rc::new(family.trace()), family.caches[0]));
    std::iter::once((made_up, pages)).chain(of_families).collect()
}

#[test]
fn policies_that_are_defined_to_the_letter_answer_the_same() {
    for (trace, pages) in traces() {
        let of = |ours: f64, crates: f64, name: &str| {
            assert!((ours - crates).abs() < 1e-9, "{name}: {ours}, {crates}")
        };
        let unique = trace.unique();
        of(percent_of(&trace, Fifo::new(unique, pages)), of_crate(&trace, pages, FifoConfig {}), "FIFO");
        let lru = LruConfig { high_priority_pool_ratio: 0.0 };
        of(percent_of(&trace, Lru::new(unique, pages)), of_crate(&trace, pages, lru), "LRU");
        of(percent_of(&trace, Sieve::new(unique, pages)), of_crate(&trace, pages, SieveConfig {}), "SIEVE");
    }
}

#[test]
fn s3_fifo_and_w_tiny_lfu_are_near_the_crates() {
    const POINTS: f64 = 2.5;
    for (number, (trace, pages)) in traces().into_iter().take(COUNTED_TRACES).enumerate() {
        let unique = trace.unique();
        let ours = percent_of(&trace, S3Fifo::new(unique, pages));
        let crates = of_crate(&trace, pages, S3FifoConfig::default());
        assert!((ours - crates).abs() < POINTS, "S3-FIFO, trace {number}: {ours:.2}, {crates:.2}");
        let lfu = LfuConfig {
            window_capacity_ratio: 0.01,
            protected_capacity_ratio: 0.792,
            cmsketch_eps: 1.0 / (8.0 * pages as f64),
            cmsketch_confidence: 0.9375,
        };
        let (ours, crates) = (percent_of(&trace, TinyLfu::new(unique, pages)), of_crate(&trace, pages, lfu));
        assert!((ours - crates).abs() < POINTS, "W-TinyLFU, trace {number}: {ours:.2}, {crates:.2}");
    }
}

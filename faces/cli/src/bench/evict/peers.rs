//! Peers: the caches of values that we stand beside, each as its documents say, with pages for values.
//!
//! A value is a page on the heap that the cache and whoever looks it up share, as
//! a program would have it that reads pages through such a cache.

use std::sync::Arc;

use super::Subject;
use crate::bench::pages::{PAGE, write_page};

type Page = Arc<[u8; PAGE]>;

fn page(number: u64) -> Page {
    let mut page = Arc::new([0; PAGE]);
    write_page(Arc::get_mut(&mut page).expect("nobody else has it yet"), number);
    page
}

/// A cache, by what it offers.
pub struct Peer<C> {
    cache: C,
    insert: fn(&C, u64, Page),
    has_evicted: fn(&C) -> bool,
}

impl<C: Sync> Subject for Peer<C> {
    type Hand<'s>
        = &'s Self
    where
        C: 's;
    fn hand(&self) -> &Self {
        self
    }
    fn insert(hand: &mut &Self, number: u64) {
        (hand.insert)(&hand.cache, number, page(number));
    }
    fn has_evicted(&self) -> bool {
        (self.has_evicted)(&self.cache)
    }
}

/// Every page weighs what it holds.
#[derive(Clone)]
pub struct Weight;

impl quick_cache::Weighter<u64, Page> for Weight {
    fn weight(&self, _number: &u64, _page: &Page) -> u64 {
        PAGE as u64
    }
}

/// quick_cache, of `memory` bytes of pages.
pub fn quick_cache(memory: u64) -> Peer<quick_cache::sync::Cache<u64, Page, Weight>> {
    Peer {
        cache: quick_cache::sync::Cache::with_weighter(memory as usize / PAGE, memory, Weight),
        insert: |cache, number, page| cache.insert(number, page),
        has_evicted: |cache| cache.weight() > cache.capacity() / 2,
    }
}

/// foyer, its part that is in memory.
pub fn foyer(memory: u64) -> Peer<foyer_memory::Cache<u64, Page>> {
    Peer {
        cache: foyer_memory::CacheBuilder::new(memory as usize).with_weighter(|_, _| PAGE).build(),
        insert: |cache, number, page| drop(cache.insert(number, page)),
        has_evicted: |cache| cache.usage() > cache.capacity() / 2,
    }
}

/// moka, its cache for threads.
pub fn moka(memory: u64) -> Peer<moka::sync::Cache<u64, Page>> {
    Peer {
        cache: moka::sync::Cache::builder().max_capacity(memory).weigher(|_, _| PAGE as u32).build(),
        insert: |cache, number, page| cache.insert(number, page),
        has_evicted: |cache| cache.weighted_size() > cache.policy().max_capacity().unwrap_or(0) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_holds_about_what_it_may_and_no_more() {
        const MEMORY: u64 = 4 << 20;
        let pages = MEMORY / PAGE as u64;
        let (quick_cache, foyer, moka) = (quick_cache(MEMORY), foyer(MEMORY), moka(MEMORY));
        for number in 0..pages * 4 {
            Subject::insert(&mut &quick_cache, number);
            Subject::insert(&mut &foyer, number);
            Subject::insert(&mut &moka, number);
        }
        moka.cache.run_pending_tasks();
        let held = [quick_cache.cache.len() as u64, foyer.cache.entries() as u64, moka.cache.entry_count()];
        for held in held {
            assert!((pages / 2..=pages).contains(&held), "{held} of {pages}");
        }
        assert!(quick_cache.has_evicted() && foyer.has_evicted() && moka.has_evicted());
    }
}

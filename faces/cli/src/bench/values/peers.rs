//! Peers: quick_cache, foyer and moka, which this build has.
//!
//! ```text
//!   insert(number, page)      copy(number, buffer): a look, a copy, and what was found is let go of
//! ```
//!
//! Each is built as its documents say for values that weigh something, with the bytes of a page for the weight of each.

use std::sync::Arc;

use crate::bench::pages::PAGE;

pub type Page = Arc<[u8; PAGE]>;

/// A cache, by what it offers.
pub struct Peer<C> {
    cache: C,
    insert: fn(&C, u64, Page),
    copy: fn(&C, u64, &mut [u8; PAGE]) -> bool,
    has_evicted: fn(&C) -> bool,
}

impl<C> Peer<C> {
    /// Puts `page` in under its number.
    pub fn insert(&self, number: u64, page: Page) {
        (self.insert)(&self.cache, number, page);
    }

    /// Copies the page of this number, if it is there.
    pub fn copy(&self, number: u64, to: &mut [u8; PAGE]) -> bool {
        (self.copy)(&self.cache, number, to)
    }

    /// It holds more than half of what it may, so that what was inserted beyond that has left.
    pub fn has_evicted(&self) -> bool {
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

pub type QuickCache = Peer<quick_cache::sync::Cache<u64, Page, Weight>>;
pub type Foyer = Peer<foyer_memory::Cache<u64, Page>>;
pub type Moka = Peer<moka::sync::Cache<u64, Page>>;

/// quick_cache, of `memory` bytes of pages.
pub fn quick_cache(memory: u64) -> QuickCache {
    Peer {
        cache: quick_cache::sync::Cache::with_weighter(memory as usize / PAGE, memory, Weight),
        insert: |cache, number, page| cache.insert(number, page),
        copy: |cache, number, to| cache.get(&number).is_some_and(|page| copied(&page, to)),
        has_evicted: |cache| cache.weight() > cache.capacity() / 2,
    }
}

/// foyer, its part that is in memory.
pub fn foyer(memory: u64) -> Foyer {
    Peer {
        cache: foyer_memory::CacheBuilder::new(memory as usize).with_weighter(|_, _| PAGE).build(),
        insert: |cache, number, page| drop(cache.insert(number, page)),
        copy: |cache, number, to| cache.get(&number).is_some_and(|entry| copied(entry.value(), to)),
        has_evicted: |cache| cache.usage() > cache.capacity() / 2,
    }
}

/// moka, its cache for threads.
pub fn moka(memory: u64) -> Moka {
    Peer {
        cache: moka::sync::Cache::builder().max_capacity(memory).weigher(|_, _| PAGE as u32).build(),
        insert: |cache, number, page| cache.insert(number, page),
        copy: |cache, number, to| cache.get(&number).is_some_and(|page| copied(&page, to)),
        has_evicted: |cache| cache.weighted_size() > cache.policy().max_capacity().unwrap_or(0) / 2,
    }
}

fn copied(page: &[u8; PAGE], to: &mut [u8; PAGE]) -> bool {
    *to = *page;
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::pages::write_page;

    /// `copy` of each of the first `pages`, and how many of them were right.
    fn hits<C>(peer: &Peer<C>, pages: u64) -> u64 {
        let (mut page, mut same) = ([0; PAGE], [0; PAGE]);
        let is_there = |number: &u64| {
            write_page(&mut same, *number);
            peer.copy(*number, &mut page) && page == same
        };
        (0..pages).filter(is_there).count() as u64
    }

    fn page(number: u64) -> Page {
        let mut page = [0; PAGE];
        write_page(&mut page, number);
        Arc::new(page)
    }

    #[test]
    fn each_peer_holds_about_what_it_may_and_no_more() {
        const MEMORY: u64 = 4 << 20;
        let pages = MEMORY / PAGE as u64;
        let (quick_cache, foyer, moka) = (quick_cache(MEMORY), foyer(MEMORY), moka(MEMORY));
        for number in 0..pages * 4 {
            quick_cache.insert(number, page(number));
            foyer.insert(number, page(number));
            moka.insert(number, page(number));
        }
        moka.cache.run_pending_tasks();
        let held = [quick_cache.cache.len() as u64, foyer.cache.entries() as u64, moka.cache.entry_count()];
        let found = [hits(&quick_cache, pages * 4), hits(&foyer, pages * 4), hits(&moka, pages * 4)];
        assert_eq!(held, found);
        for held in held {
            assert!((pages / 2..=pages).contains(&held), "{held} of {pages}");
        }
        assert!(quick_cache.has_evicted() && foyer.has_evicted() && moka.has_evicted());
    }
}

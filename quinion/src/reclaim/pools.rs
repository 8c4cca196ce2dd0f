//! Pools: the reclaimer's state of each.
//!
//! ```text
//!   add    a number that is not in use and to which nothing is charged --> rings, a policy that has seen nothing
//!   end    no limit, nothing protected; its folios join the young ends of the default pool's rings
//! ```
//!
//! A pool's pages and limit are kept by the rings (`lists/charge.rs`), its turns by the policy (`policy/pools.rs`).
//! Here are the rest of its numbers, and the choice that brings them together.
//!
//! Each pool ages by itself: its shadows say when they were left by **its own clock**. Clocks begin far apart, so that
//! a shadow that another pool left looks old.
//!
//! Dirty pages stay charged to the pool whose reader or writer brought them until they have been written and evicted: a
//! pool at its limit whose pages are all dirty has nothing to give.
//!
//! Not an invariant: that an ended pool has no folio. Folios that were on their way, or about to be evicted and stayed,
//! are listed under its number, are scanned like all others, and move when the number is used again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Descriptor, Flags};
use crate::lists::UNLIMITED;
use crate::policy::{NewPolicy, PoolPages, PoolTurn};
use crate::units::{POOLS_MAX, PoolNumber};
use crate::workingset::WorkingSet;

use super::{ListsGuard, PoolPolicies, RINGS, Reclaim, ReclaimScan, ReclaimTarget, kept, weights};

/// Folios that change their pool under one hold of the lock of the rings.
const MOVED_MAX: u32 = 256;

#[derive(Debug)]
pub(super) struct PoolState {
    name: Mutex<Arc<str>>,
    /// The pool's protected minimum, in pages.
    pub protected: AtomicU64,
    /// The distance in pages up to which a return is recent; as the policy said last.
    pub reach: AtomicU64,
    /// Up to which distance it came back soon: a part of the pages that were listed when the policy said so.
    pub soon: AtomicU64,
    pub workingset: WorkingSet,
    pub inserted: AtomicU64,
    pub evicted: AtomicU64,
    pub refaulted: AtomicU64,
    /// Fills for the pool: those that have ended in the high half, which wraps, and those under way in the low one.
    fills: AtomicU64,
    /// How often a scan met a folio that a thread has for a moment.
    in_use: AtomicU64,
}

const FILL_ENDED: u64 = 1 << 32;

impl PoolState {
    /// All pools of a cache of at most `pages_max` pages.
    pub fn all(pages_max: u64) -> Box<[Self]> {
        let state = |number: usize| Self {
            name: Mutex::new(Arc::from(if number == 0 { "default" } else { "" })),
            protected: AtomicU64::new(0),
            reach: AtomicU64::new(0),
            soon: AtomicU64::new(0),
            workingset: WorkingSet::beginning_at(pages_max, number as u32, POOLS_MAX as u32),
            inserted: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            refaulted: AtomicU64::new(0),
            fills: AtomicU64::new(0),
            in_use: AtomicU64::new(0),
        };
        (0..POOLS_MAX).map(state).collect()
    }
}

/// Limits and counts of a pool, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolCounts {
    /// The most it may be charged for; [`UNLIMITED`] if it has no limit.
    pub limit: u64,
    /// The minimum that other pools leave to it.
    pub protected: u64,
    /// The present charge: pages in its rings, or on their way there.
    pub charged: u64,
    /// Pages put into its rings.
    pub inserted: u64,
    /// Pages evicted from them.
    pub evicted: u64,
    /// Pages of `inserted` that had been evicted before and found their shadow entry.
    pub refaulted: u64,
}

impl Reclaim {
    pub(super) fn state(&self, pool: PoolNumber) -> &PoolState {
        &self.pools[usize::from(pool.0)]
    }

    /// Begins a pool under a number that none of `taken` has, without limit or protection. `None`: there are too many.
    pub fn add_pool(&self, name: &Arc<str>, taken: impl Fn(PoolNumber) -> bool) -> Option<PoolNumber> {
        let mut free = (1..POOLS_MAX as u8).map(PoolNumber).filter(|pool| !taken(*pool));
        let pool = free.find(|&pool| {
            self.disband(pool);
            self.lists.charged(pool) == 0
        })?;
        let policy = (self.new_policy)(); // before the lock
        let before = std::mem::replace(&mut self.policies.lock().policies[usize::from(pool.0)], policy);
        drop(before);
        self.lists.add_pool(pool);
        self.pools_begun.fetch_max(u32::from(pool.0) + 1, Ordering::Relaxed);
        let state = self.state(pool);
        *state.name.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(name);
        for number in [&state.reach, &state.soon, &state.inserted, &state.evicted, &state.refaulted] {
            number.store(0, Ordering::Relaxed);
        }
        Some(pool)
    }

    /// Ends a pool, which has no handle any more: its folios are the default pool's.
    pub fn end_pool(&self, pool: PoolNumber) {
        self.lists.set_limit(pool, UNLIMITED);
        self.set_protected(pool, 0);
        self.disband(pool);
    }

    fn disband(&self, pool: PoolNumber) {
        for class in 0..RINGS {
            loop {
                let mut lists = self.lists.lock();
                if usize::from(pool.0) >= lists.pools() {
                    return; // it never had any
                }
                let (from, to) = (super::ring(pool, class), super::ring(PoolNumber::DEFAULT, class));
                if !(0..MOVED_MAX).all(|_| lists.move_oldest(from, to)) {
                    break;
                }
            }
        }
    }

    /// The name of a pool.
    pub fn pool_name(&self, pool: PoolNumber) -> Arc<str> {
        Arc::clone(&self.state(pool).name.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the pages that others leave to a pool.
    pub fn set_protected(&self, pool: PoolNumber, pages: u64) {
        self.state(pool).protected.store(pages, Ordering::Relaxed);
    }

    pub(super) fn charged_by_others(&self) -> u64 {
        let begun = self.pools_begun.load(Ordering::Relaxed) as u8;
        (1..begun).map(|pool| self.lists.charged(PoolNumber(pool))).sum()
    }

    /// The sum of all pools' protected minima, in pages.
    pub fn protected(&self) -> u64 {
        self.pools.iter().map(|state| state.protected.load(Ordering::Relaxed)).sum()
    }

    /// Counts pages that were put into a pool's rings, and those of them that had been evicted before.
    pub fn count_inserted(&self, pool: PoolNumber, pages: u64, refaulted: u64) {
        self.state(pool).inserted.fetch_add(pages, Ordering::Relaxed);
        if refaulted > 0 {
            self.state(pool).refaulted.fetch_add(refaulted, Ordering::Relaxed);
        }
    }

    /// Pages that were put into the rings so far: of a pool, or of all.
    pub fn inserted(&self, of: Option<PoolNumber>) -> u64 {
        let inserted = |state: &PoolState| state.inserted.load(Ordering::Relaxed);
        of.map_or_else(|| self.pools.iter().map(inserted).sum(), |pool| inserted(self.state(pool)))
    }

    /// A number that changes with each folio that a scan finds locked, or held and not pinned: threads have such a
    /// folio for a moment. Of a pool, or of all.
    pub fn in_use(&self, of: Option<PoolNumber>) -> u64 {
        let in_use = |state: &PoolState| state.in_use.load(Ordering::Relaxed);
        of.map_or_else(|| self.pools.iter().map(in_use).sum(), |pool| in_use(self.state(pool)))
    }
    pub(super) fn note_stuck(&self, pool: PoolNumber, descriptor: &Descriptor) {
        let word = descriptor.settled_word();
        if (word.holds() > 0 || word.has(Flags::LOCKED)) && !descriptor.is_pinned() {
            self.state(pool).in_use.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// `fills` fills for a pool are submitted.
    pub fn fills_begin(&self, pool: PoolNumber, fills: u64) {
        self.state(pool).fills.fetch_add(fills, Ordering::Relaxed);
    }
    /// One of them has ended.
    pub fn fill_ends(&self, pool: PoolNumber) {
        self.state(pool).fills.fetch_add(FILL_ENDED - 1, Ordering::Relaxed); // one ended more, one under way less
    }
    /// Fills of a pool that are in flight, and a number that changes with each that ends.
    pub fn fills(&self, pool: PoolNumber) -> (u64, u64) {
        let fills = self.state(pool).fills.load(Ordering::Relaxed);
        (fills % FILL_ENDED, fills / FILL_ENDED)
    }
    /// As [`Reclaim::fills`], of all pools together.
    pub fn all_fills(&self) -> (u64, u64) {
        let pools = (0..POOLS_MAX as u8).map(|pool| self.fills(PoolNumber(pool)));
        pools.fold((0, 0), |(in_flight, ended), (more, further)| (in_flight + more, ended + further))
    }

    /// Numbers of a pool.
    pub fn pool_counts(&self, pool: PoolNumber) -> PoolCounts {
        let state = self.state(pool);
        PoolCounts {
            limit: self.lists.limit(pool),
            protected: state.protected.load(Ordering::Relaxed),
            charged: self.lists.charged(pool),
            inserted: state.inserted.load(Ordering::Relaxed),
            evicted: state.evicted.load(Ordering::Relaxed),
            refaulted: state.refaulted.load(Ordering::Relaxed),
        }
    }

    pub(super) fn excess(&self, lists: &ListsGuard<'_>, pool: PoolNumber) -> u64 {
        weights(lists, pool).total().saturating_sub(self.protected_of(lists, pool))
    }

    /// The rest of the protected minimum beside the kept pages, which count first.
    fn protected_of(&self, lists: &ListsGuard<'_>, pool: PoolNumber) -> u64 {
        let protected = self.state(pool).protected.load(Ordering::Relaxed);
        protected.saturating_sub(kept(lists, pool))
    }

    /// The pool that is to give `pages` pages or less; `None` if nothing more is to be had.
    pub(super) fn choose(
        &self,
        policies: &mut PoolPolicies,
        lists: &ListsGuard<'_>,
        search: &ReclaimScan,
        from: ReclaimTarget,
        pages: u32,
    ) -> Option<PoolTurn> {
        let whole = |pool: PoolNumber| PoolTurn { pool: pool.0.into(), pages: u64::MAX, of_excess: false };
        match from {
            ReclaimTarget::Pool(pool) | ReclaimTarget::Uncached(pool) => {
                (!search.met[usize::from(pool.0)].over).then(|| whole(pool))
            }
            // There is no other pool to choose, or to be protected from.
            ReclaimTarget::Any(_) | ReclaimTarget::Unprotected if lists.pools() == 1 => {
                (!search.met[0].over).then(|| whole(PoolNumber::DEFAULT))
            }
            ReclaimTarget::Any(_) | ReclaimTarget::Unprotected => {
                let asking = if let ReclaimTarget::Any(pool) = from { Some(pool.0.into()) } else { None };
                let mut shares = [PoolPages::default(); POOLS_MAX];
                for (number, share) in shares.iter_mut().take(lists.pools()).enumerate() {
                    let (pool, met) = (PoolNumber(number as u8), &search.met[number]);
                    let listed = weights(lists, pool).total();
                    *share = PoolPages {
                        pages: listed,
                        can_give: listed > 0 && !met.over,
                        can_give_excess: !met.at_minimum,
                        over: self.lists.charged(pool).saturating_sub(self.lists.limit(pool)),
                        protected: self.protected_of(lists, pool),
                    };
                }
                policies.turns.next(&shares[..lists.pools()], asking, pages.into())
            }
        }
    }
}

impl PoolPolicies {
    pub(super) fn new(policy: NewPolicy) -> Self {
        Self { policies: (0..POOLS_MAX).map(|_| policy()).collect(), turns: Default::default() }
    }
}

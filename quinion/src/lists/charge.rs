//! Charge: the memory that each pool has, to the page.
//!
//! ```text
//!   word of a pool   [ charged, 32 bits | outstanding, 32 bits ]
//!
//!   charge     + pages  + pages     before a folio is there; refused above the limit
//!   list                - pages     the folio stands in a ring of the pool: its weight carries the charge
//!   pop                 + pages     the thread that popped carries it, until it is listed again or found to have left
//!   refund     - pages  - pages     what of a charge was not used
//!   remove     - pages              a folio that leaves its ring other than by its head
//! ```
//!
//! A thread that is about to list folios has a [`Charge`], which refunds its unused pages when it is dropped; so each
//! page is refunded once, by the ring or by the charge.
//!
//! Invariants (asserted by [`Lists::check`](super::Lists::check)):
//!  1. Under the lock of the rings, the pages that a pool is charged for and that are not outstanding are those that
//!     its rings list.
//!  2. No charge is granted that brings a pool above its limit.
//!
//! Not an invariant: that a pool is below its limit. A limit may be lowered; then nothing is granted until the pool has
//! shrunk to it. Nor that pages which no pool is charged for are free: a pinned folio that has left the index is
//! charged to no pool.
//!
//! Cost: one atomic step to charge, and one for each hold of the lock of the rings.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::units::{Order, PoolNumber};

use super::Lists;

/// No limit.
pub const UNLIMITED: u64 = u64::MAX;

const CHARGED: u64 = 1 << 32;

/// The charge of one pool, and its limit.
#[derive(Debug)]
pub(super) struct Account {
    word: AtomicU64,
    /// The pool's limit in pages; [`UNLIMITED`] if there is none.
    limit: AtomicU64,
}

impl Default for Account {
    fn default() -> Self {
        Self { word: AtomicU64::new(0), limit: AtomicU64::new(UNLIMITED) }
    }
}

impl Account {
    /// Pages charged, and those not listed yet. Relaxed, here and below: the rings' content is behind their lock.
    pub fn read(&self) -> (u64, u64) {
        let word = self.word.load(Ordering::Relaxed);
        (word / CHARGED, word % CHARGED)
    }

    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }
    pub fn set_limit(&self, pages: u64) {
        self.limit.store(pages, Ordering::Relaxed);
    }

    fn charge(&self, wanted: u32, unit: Order) -> u32 {
        let limit = self.limit();
        let granted = |word: u64| {
            let unreserved = limit.saturating_sub(word / CHARGED);
            let pages = unreserved.min(u64::from(wanted));
            pages & !(u64::from(unit.pages()) - 1)
        };
        let take = |word| match granted(word) {
            0 => None,
            pages => Some(word + pages * CHARGED + pages),
        };
        match self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(before) => granted(before) as u32,
            Err(_) => 0,
        }
    }

    /// Adds to both counts; the sums are not below 0.
    pub fn add(&self, charged: i64, outstanding: i64) {
        let sum = (charged as u64).wrapping_mul(CHARGED).wrapping_add(outstanding as u64);
        self.word.fetch_add(sum, Ordering::Relaxed);
    }
}

/// Pages charged to a pool, for folios that will be listed. Unused ones go back.
#[derive(Debug)]
pub struct Charge<'a> {
    pub(super) lists: &'a Lists,
    pub(super) pool: PoolNumber,
    pub(super) pages: u32,
}

impl<'a> Charge<'a> {
    pub(super) fn none(lists: &'a Lists, pool: PoolNumber) -> Self {
        Self { lists, pool, pages: 0 }
    }
    pub(super) fn of(lists: &'a Lists, pool: PoolNumber, wanted: u32, unit: Order) -> Self {
        Self { pages: lists.account(pool).charge(wanted, unit), lists, pool }
    }
    pub fn pages(&self) -> u32 {
        self.pages
    }
    pub fn pool(&self) -> PoolNumber {
        self.pool
    }
    /// Charges more, up to `wanted` pages, as far as the limit allows.
    pub fn grow(&mut self, wanted: u32, unit: Order) {
        let missing = wanted.saturating_sub(self.pages);
        self.pages += self.lists.account(self.pool).charge(missing, unit);
    }
    /// Refunds the charge beyond `pages` pages.
    pub fn keep(&mut self, pages: u32) {
        let surplus = i64::from(self.pages.saturating_sub(pages));
        if surplus > 0 {
            self.lists.account(self.pool).add(-surplus, -surplus);
            self.pages = pages;
        }
    }
}

impl Drop for Charge<'_> {
    #[inline]
    fn drop(&mut self) {
        self.keep(0);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct ChargeDelta {
    pub pool: PoolNumber,
    pub charged: i64,
    pub outstanding: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_limit_grants_whole_folios_and_never_a_page_more() {
        let account = Account::default();
        assert_eq!(account.charge(100, Order::ZERO), 100);
        account.set_limit(110);
        assert_eq!(account.charge(100, Order(2)), 8);
        assert_eq!(account.charge(100, Order(2)), 0);
        assert_eq!(account.charge(1, Order::ZERO), 1);
        account.set_limit(50);
        assert_eq!((account.charge(1, Order::ZERO), account.read()), (0, (109, 109)));
    }

    proptest! {
        /// The twin has two signed numbers.
        #[test]
        fn the_two_counts_of_a_word_do_not_mix(steps in prop::collection::vec((0..3u8, 1..1000u32), 1..50)) {
            let account = Account::default();
            let (mut charged, mut outstanding) = (0i64, 0i64);
            for (step, pages) in steps {
                let pages = i64::from(pages);
                match step {
                    0 => {
                        prop_assert_eq!(i64::from(account.charge(pages as u32, Order::ZERO)), pages);
                        (charged, outstanding) = (charged + pages, outstanding + pages);
                    }
                    1 => {
                        let listed = pages.min(outstanding);
                        account.add(0, -listed);
                        outstanding -= listed;
                    }
                    _ => {
                        let (gone, back) = (pages.min(charged - outstanding), pages.min(outstanding));
                        account.add(-gone - back, -back);
                        (charged, outstanding) = (charged - gone - back, outstanding - back);
                    }
                }
                prop_assert_eq!(account.read(), (charged as u64, outstanding as u64));
            }
        }
    }
}

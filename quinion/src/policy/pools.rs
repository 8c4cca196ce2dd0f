//! Pools: of which one room is made.
//!
//! ```text
//!   over its limit?                     the one that is furthest over
//!   has more than is protected?         in turns, each pool as often as it has much of that:
//!
//!        index    [#### protected ####|==]              excess  2        one turn in
//!        default  [==================]                  excess 18        nine to this one
//!
//!   nothing of that left?               the pool that asks pays itself; then the pool that has the largest part of
//!                                       what is protected for it
//! ```
//!
//! A pool that has its protected minimum, or less, is not touched as long as anything else can be had. Pages above the
//! minima are taken in proportion, by **passes** as in stride scheduling: a pool's pass is the part of its excess that
//! it gave; the least pass goes next, and one that had no turn for long begins where the others are.
//!
//! Numbers in, a pool out: nothing here waits or allocates.
//!
//! Invariants (asserted by the twin at the end of this file):
//!  1. A pool is named that has something to be had, or none has.
//!  2. A pool without excess is named only if no pool is over its limit and none with excess has anything to be had.
//!  3. A turn out of a pool's excess is for no more than that.
//!
//! Source of the turns: C. Waldspurger, W. Weihl, "Stride Scheduling: Deterministic Proportional-Share Resource
//! Management", MIT/LCS/TM-528, 1995.

use crate::units::POOLS_MAX;

/// The state of one pool, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolPages {
    /// All that it has.
    pub pages: u64,
    /// Whether something of that can be had, as far as is known.
    pub can_give: bool,
    /// Whether the pages above its minimum can be had, as far as is known; not if its folios are larger than that.
    pub can_give_excess: bool,
    /// Pages above its limit.
    pub over: u64,
    /// The protected minimum.
    pub protected: u64,
}

impl PoolPages {
    /// Pages above the protected minimum.
    pub fn excess(&self) -> u64 {
        self.pages.saturating_sub(self.protected)
    }
}

/// Which pool is to give, and how much at most, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolTurn {
    /// The pool's number.
    pub pool: usize,
    /// The most pages that the pool is to give.
    pub pages: u64,
    /// Whether the pages come from the pool's excess above its minimum, of which not a page more is to be taken.
    pub of_excess: bool,
}

/// A whole turn of a pool: a pass grows by so much when it has given as much as its excess.
const ROUND: u64 = 1 << 24;

/// The order in which pools give pages above their minimum.
#[derive(Clone, Debug, Default)]
pub struct PoolTurns {
    passes: [u64; POOLS_MAX],
    now: u64,
}

impl PoolTurns {
    /// The pool that gives next, for pool `asking`, which wants `pages` pages; `None` if none has anything to give. If
    /// no pool is asking, protected pages are not given.
    pub fn next(&mut self, shares: &[PoolPages], asking: Option<usize>, pages: u64) -> Option<PoolTurn> {
        let having = || shares.iter().enumerate().filter(|(_, share)| share.can_give);
        // 1 Over the limit.
        let over = having().filter(|(_, share)| share.over > 0).max_by_key(|(_, share)| share.over);
        if let Some((pool, share)) = over {
            return Some(PoolTurn { pool, pages: share.over, of_excess: false });
        }
        // 2 Above the minimum, in turns.
        let excess = having().filter(|(_, share)| share.can_give_excess && share.excess() > 0);
        if let Some((pool, share)) = excess.min_by_key(|(pool, _)| self.passes[*pool].max(self.now)) {
            self.now = self.passes[pool].max(self.now);
            let given = pages.min(share.excess());
            let step = u128::from(given) * u128::from(ROUND) / u128::from(share.excess());
            self.passes[pool] = self.now.saturating_add((step as u64).max(1));
            return Some(PoolTurn { pool, pages: share.excess(), of_excess: true });
        }
        // 3 The pool that asks pays; or the one that has most of its share.
        let part =
            |share: &PoolPages| u128::from(share.pages) * (1 << 40) / u128::from(share.protected.max(1));
        let asking = asking?;
        let asking = having().find(|(pool, _)| *pool == asking);
        let (pool, share) = asking.or_else(|| having().max_by_key(|(_, share)| part(share)))?;
        Some(PoolTurn { pool, pages: share.pages, of_excess: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(pages: u64, protected: u64) -> PoolPages {
        PoolPages { pages, can_give: pages > 0, can_give_excess: true, over: 0, protected }
    }

    fn next(shares: &[PoolPages]) -> Option<usize> {
        PoolTurns::default().next(shares, Some(0), 64).map(|turn| turn.pool)
    }

    #[test]
    fn a_pool_over_its_limit_is_reclaimed_first_and_a_protected_one_last() {
        assert_eq!(next(&[]), None);
        assert_eq!(next(&[share(0, 0), share(0, 10)]), None);
        let over = |over| PoolPages { over, ..share(100, 100) };
        assert_eq!(next(&[share(1000, 0), over(1), over(2)]), Some(2));
        assert_eq!(next(&[share(1, 0), share(1000, 1000)]), Some(0));
        assert_eq!(next(&[share(0, 0), share(1000, 999)]), Some(1));
        assert_eq!(
            next(&[share(0, 0), share(50, 100), share(70, 100)]),
            Some(2),
            "the larger part of its own"
        );
        assert_eq!(next(&[share(10, 100), share(50, 100)]), Some(0), "who asks pays itself");
        assert_eq!(PoolTurns::default().next(&[share(10, 100), share(50, 100)], None, 64), None);
        let large = PoolPages { can_give_excess: false, ..share(1000, 999) };
        assert_eq!(next(&[share(10, 100), large]), Some(0));
    }

    #[test]
    fn turns_are_in_proportion_to_pages_above_the_minima() {
        let shares = [share(4000, 0), share(3000, 2000), share(500, 500), share(3000, 0)];
        let (mut turns, mut taken) = (PoolTurns::default(), [0u64; 4]);
        for _ in 0..1000 {
            taken[turns.next(&shares, Some(0), 64).unwrap().pool] += 64;
        }
        let all: u64 = taken.iter().sum();
        for (taken, share) in taken.iter().zip(&shares) {
            let part = all * share.excess() / 8000;
            assert!(taken.abs_diff(part) <= 128, "{taken} pages of {part}");
        }
    }

    #[test]
    fn a_pool_without_a_turn_for_long_does_not_make_up_for_it() {
        let mut turns = PoolTurns::default();
        for _ in 0..1000 {
            assert_eq!(turns.next(&[share(1000, 0), share(0, 0)], Some(0), 64).unwrap().pool, 0);
        }
        let both = [share(1000, 0), share(1000, 0)];
        let second = (0..100).filter(|_| turns.next(&both, Some(0), 64).unwrap().pool == 1).count();
        assert!((49..=51).contains(&second), "{second}");
    }

    #[derive(Default)]
    struct Naive {
        passes: [f64; POOLS_MAX],
        now: f64,
    }

    impl Naive {
        fn may(&self, shares: &[PoolPages], asking: Option<usize>) -> (Vec<usize>, bool) {
            let all = |rule: &dyn Fn(usize, &PoolPages) -> bool| -> Vec<usize> {
                (0..shares.len()).filter(|&at| shares[at].can_give && rule(at, &shares[at])).collect()
            };
            let most =
                shares.iter().filter(|share| share.can_give).map(|share| share.over).max().unwrap_or(0);
            if most > 0 {
                return (all(&|_, share| share.over == most), false);
            }
            let rich = all(&|_, share| share.can_give_excess && share.pages > share.protected);
            if !rich.is_empty() {
                let pass = |at: usize| self.passes[at].max(self.now);
                let least = rich.iter().map(|&at| pass(at)).fold(f64::INFINITY, f64::min);
                return (rich.into_iter().filter(|&at| pass(at) <= least + 1e-3).collect(), true);
            }
            let Some(asking) = asking else { return (vec![], false) };
            if shares.get(asking).is_some_and(|share| share.can_give) {
                return (vec![asking], false);
            }
            let part = |share: &PoolPages| share.pages as f64 / share.protected.max(1) as f64;
            let fullest = shares.iter().filter(|share| share.can_give).map(part).fold(0.0, f64::max);
            (all(&|_, share| part(share) >= fullest * (1.0 - 1e-9)), false)
        }
        fn took(&mut self, pool: usize, given: u64, excess: u64) {
            self.now = self.passes[pool].max(self.now);
            self.passes[pool] = self.now + given as f64 / excess as f64;
        }
    }

    proptest! {
        #[test]
        fn the_next_pool_is_the_twins_and_gives_no_more_than_may_go(
            steps in prop::collection::vec(
                (
                    prop::collection::vec((0..300u64, 0..200u64, 0..40u64, 0..4u8), 1..6),
                    prop::option::of(0..6usize),
                    1..100u64,
                ),
                1..60,
            ),
        ) {
            let (mut turns, mut naive) = (PoolTurns::default(), Naive::default());
            for (pools, asking, pages) in steps {
                let shares: Vec<_> = pools.iter().map(|&(pages, protected, over, stuck)| PoolPages {
                    pages,
                    can_give: pages > 0 && stuck != 0,
                    can_give_excess: stuck != 1,
                    over: over.saturating_sub(36),
                    protected,
                }).collect();
                let (may, of_excess) = naive.may(&shares, asking);
                let Some(turn) = turns.next(&shares, asking, pages) else {
                    prop_assert!(may.is_empty());
                    continue;
                };
                prop_assert!(may.contains(&turn.pool), "{:?} of {:?} in {:?}", turn, may, shares);
                prop_assert_eq!(turn.of_excess, of_excess);
                let share = shares[turn.pool];
                prop_assert!(turn.pages > 0 && turn.pages <= share.pages.max(share.over));
                if of_excess {
                    prop_assert_eq!(turn.pages, share.pages - share.protected);
                    naive.took(turn.pool, pages.min(turn.pages), turn.pages);
                }
            }
        }
    }
}

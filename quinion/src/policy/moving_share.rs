//! Moving share: the part of the pages seen lately that had a property, such as having been read again.
//!
//! A moving average over as many pages as the cache holds: each page that is seen replaces that part of the average. So
//! it needs no list of seen pages, and it forgets within a few caches.
//!
//! Invariant: the share is between 0 and [`ONE`].

use super::Weights;

pub(super) const ONE: u64 = 1 << 40;
/// The average is over so many pages at least, in small caches.
const LATELY_PAGES_MIN: u64 = 64;

/// The share of the pages seen lately that had the property, in parts of [`ONE`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MovingShare(u64);

impl MovingShare {
    /// The average as if so many parts of [`ONE`] of a cache of pages had had the property.
    pub(super) const fn of(share: u64) -> Self {
        Self(share)
    }

    /// In parts of [`ONE`].
    pub(super) const fn get(self) -> u64 {
        self.0
    }

    /// Another `pages` pages are seen, of which `such` had the property, in a cache that holds `held`.
    #[inline]
    pub(super) fn note(&mut self, pages: u64, such: u64, held: &Weights) {
        let lately = held.total().max(LATELY_PAGES_MIN);
        self.0 -= self.0 / lately * pages.min(lately);
        if such > 0 {
            self.0 = (self.0 + ONE / lately * such.min(lately)).min(ONE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache_of(pages: u64) -> Weights {
        Weights { pages: [0, 0, pages, 0] }
    }

    #[test]
    fn the_share_follows_seen_pages_within_a_few_caches() {
        let mut share = MovingShare::of(0);
        (0..5000).for_each(|page| share.note(1, u64::from(page % 4 == 0), &cache_of(1000)));
        let quarter = share.get() * 1000 / ONE;
        assert!((240..=260).contains(&quarter), "{quarter}");
        (0..5000).for_each(|_| share.note(1, 0, &cache_of(1000)));
        assert!(share.get() * 100 / ONE == 0, "it is forgotten");
    }

    #[test]
    fn the_share_stays_between_nothing_and_all() {
        let mut share = MovingShare::of(ONE);
        share.note(512, 512, &cache_of(100));
        assert!(share.get() <= ONE);
        share.note(512, 600, &cache_of(0));
        assert!(share.get() <= ONE);
        share.note(512, 0, &cache_of(100));
        assert!(share.get() < ONE / 1000);
    }
}

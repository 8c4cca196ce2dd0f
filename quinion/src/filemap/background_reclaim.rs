//! Background reclaim: pages are freed, or grown, before a reader needs them.
//!
//! ```text
//!   free pages   ----------- high -------- low ------------ 0
//!                             |             |               |
//!               the thread stops   it is woken   readers reclaim directly
//! ```
//!
//! Below the low watermark the background thread evicts, by the policy, up to the high one. This is an optimisation:
//! with no page free the reader evicts by itself (**direct reclaim**).
//!
//! A cache that is not full yet **grows** instead, by extents of 2 MiB, which the kernel fills with zeros; a reader
//! that finds none waits for that. So the thread keeps an eighth of the cache free, at most 32 MiB, in whole extents,
//! since large folios are made of no others. It is woken when half of that is left, and grows until more is there, by
//! 16 MiB at most in one request, and no more than came in 4 milliseconds before. A thread that waits for the growth
//! lock goes first.
//!
//! **Streams** do not use these pages: a stream reuses the pages it has passed. Pages that pools protect are not
//! evicted in the background, and write-back is not started: if all pages are dirty it finds nothing.
//!
//! Free pages cache nothing, so the watermarks are small: a 128th of the cache and at most 32 MiB, and half of that.
//! A cache below 64 MiB has none: that would be a readahead window or two.
//!
//! Invariants:
//!  1. Nothing depends on this task being done.
//!
//! Not an invariant: that free pages stay above a watermark. A burst of misses is faster than the thread.
//!
//! In Linux: kswapd and its watermarks. Difference: only random misses wake it to reclaim.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::background::BackgroundTask;
use crate::readahead::Window;
use crate::sync::LockWait;

use super::frame_supply::FrameSupply;
use super::shared::Filemap;

const HIGH_SHARE: u64 = 128;
const HIGH_PAGES_MAX: u64 = 8192;
/// Smaller caches, below 64 MiB, have no marks.
const CACHE_PAGES_MIN: u64 = 16384;
/// Long enough that a thread which waited for the growth lock has most likely taken it.
const GROWN_PAUSE: Duration = Duration::from_micros(100);
const AT_A_TIME: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Watermarks {
    low: u64,
    high: u64,
}

impl Watermarks {
    fn of(pages: u64) -> Self {
        let high = if pages < CACHE_PAGES_MIN { 0 } else { (pages / HIGH_SHARE).min(HIGH_PAGES_MAX) };
        Self { low: high / 2, high }
    }
}

#[derive(Debug)]
pub(crate) struct BackgroundReclaim {
    filemap: Weak<Filemap>,
}

impl BackgroundReclaim {
    /// Registers the task with the background thread, as long as the value lives.
    pub fn of(filemap: &Arc<Filemap>) -> Arc<Self> {
        let task = Arc::new(Self { filemap: Arc::downgrade(filemap) });
        let known: Weak<Self> = Arc::downgrade(&task);
        filemap.supply.background.add(known);
        task
    }
}

impl BackgroundTask for BackgroundReclaim {
    fn run(&self) -> Option<Duration> {
        let filemap = self.filemap.upgrade()?;
        let marks = filemap.supply.watermarks();
        if marks.high > 0 && filemap.grow_ahead() {
            return Some(GROWN_PAUSE); // pages not grown yet count as available: there is nothing to evict
        }
        // Most wake-ups are for others.
        let is_low = |available: u64| available < marks.low;
        if !filemap.arena.available_pages(LockWait::Wait).is_some_and(is_low) {
            return None;
        }
        while let Some(available) = filemap.arena.available_pages(LockWait::Wait)
            && available < marks.high
            && !filemap.supply.background.is_closed()
        {
            let pages = (marks.high - available).min(AT_A_TIME) as u32;
            if filemap.supply.reclaim.reclaim_unprotected(pages, LockWait::Wait) == 0 {
                break; // pages in flight or pinned cannot go; a thread that needs the memory finds that out itself
            }
        }
        None
    }
}

impl Filemap {
    /// Grows the arena until enough of it is free, a thread waits to do that, or the cache ends. Says whether it grew.
    fn grow_ahead(&self) -> bool {
        let mut has_grown = false;
        while !self.supply.background.is_closed() && self.arena.grow_ahead() {
            has_grown = true;
            if self.arena.is_growth_awaited() {
                break;
            }
        }
        has_grown
    }
}

impl Filemap {
    /// Grows the arena to `bytes`, or its bound, step by step; a thread that waits to grow it goes first. Says how
    /// many bytes it has.
    pub fn grow_to(&self, bytes: u64) -> u64 {
        while self.arena.grow_toward(bytes) {
            if self.arena.is_growth_awaited() {
                std::thread::sleep(GROWN_PAUSE);
            }
        }
        self.arena.stats().grown_bytes
    }
}

impl FrameSupply {
    fn watermarks(&self) -> Watermarks {
        if self.in_background { Watermarks::of(self.arena.pages_max()) } else { Watermarks::of(0) }
    }

    pub(super) fn is_low_for_stream(&self, pages: u32) -> bool {
        let wanted = self.watermarks().high + u64::from(pages);
        self.arena.available_pages(LockWait::Try).is_none_or(|available| available < wanted)
    }

    /// Does not wait. Streams' windows ask for growth only, not for reclaim.
    pub(super) fn wake_background_reclaim(&self, window: Window) {
        let low = self.watermarks().low;
        if low == 0 {
            return;
        }
        let Some(available) = self.arena.available(LockWait::Try) else { return };
        if available.is_growth_due || (window.stream.is_none() && available.pages < low) {
            self.background.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_a_small_part_of_a_large_cache_and_nothing_of_a_small_one() {
        assert_eq!(Watermarks::of(16383), Watermarks { low: 0, high: 0 });
        assert_eq!(Watermarks::of(16384), Watermarks { low: 64, high: 128 });
        assert_eq!(Watermarks::of(1 << 18), Watermarks { low: 1024, high: 2048 });
        assert_eq!(Watermarks::of(1 << 26), Watermarks { low: 4096, high: 8192 });
    }
}

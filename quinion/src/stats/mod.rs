//! Stats: counting without a shared store on the hit path.
//!
//! Every thread that reads counts in a shard of its own, a cache line that no other thread writes, with a plain load
//! and store. [`Counters::sum`] adds the shards up. A shard is a thread's as long as the thread lives; when more
//! threads than shards count at a time, the rest share the last one and count there by an atomic addition.
//!
//! The sums are exact once the counting threads are still; while they run, a sum may miss the events of that moment,
//! and never counts too many.
//!
//! The counters, and the numbers that a cache shows, are declared in one list (`table.rs`).

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

mod table;

use table::COUNTS;
pub use table::{Count, StatDescription, Stats};

const SHARDS: usize = 64;
const SHARED: usize = SHARDS - 1;

#[repr(align(128))]
#[derive(Debug)]
struct Shard([AtomicU64; COUNTS]);

impl Shard {
    #[inline(always)]
    fn add(&self, count: Count, amount: u64) {
        let number = &self.0[count as usize];
        number.store(number.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; COUNTS])
    }
}

/// One cache's counters.
#[derive(Debug)]
pub struct Counters {
    shards: Box<[Shard; SHARDS]>,
}

impl Default for Counters {
    fn default() -> Self {
        Self { shards: Box::new(std::array::from_fn(|_| Shard::default())) }
    }
}

impl Counters {
    #[inline]
    pub fn add(&self, count: Count, amount: u64) {
        self.add_all([(count, amount)]);
    }

    /// Counts a read call of `bytes` bytes that was a hit.
    #[inline]
    pub fn add_hit(&self, bytes: u64) {
        self.add_hits(1, bytes);
    }

    /// Counts `reads` read calls that were hits, of `bytes` bytes together.
    #[inline]
    pub fn add_hits(&self, reads: u64, bytes: u64) {
        let own = MY_SHARD.get();
        if own >= SHARED {
            return self.add_hits_shared(reads, bytes);
        }
        let shard = &self.shards[own];
        shard.add(Count::Bytes, bytes);
        shard.add(Count::Hits, reads);
    }

    /// As `add_shared`, of two numbers that a hit has in registers.
    #[cold]
    fn add_hits_shared(&self, reads: u64, bytes: u64) {
        self.add_shared(&[(Count::Bytes, bytes), (Count::Hits, reads)]);
    }

    /// Adds to several counts, each its amount.
    #[inline]
    pub fn add_all<const N: usize>(&self, amounts: [(Count, u64); N]) {
        let own = MY_SHARD.get();
        if own >= SHARED {
            return self.add_shared(&amounts);
        }
        for (count, amount) in amounts {
            self.shards[own].add(count, amount);
        }
    }

    /// For a thread that shares its shard, and for the first call of any thread, which may get a shard of its own.
    #[cold]
    fn add_shared(&self, amounts: &[(Count, u64)]) {
        let numbers = &self.shards[my_shard()].0;
        for &(count, amount) in amounts {
            numbers[count as usize].fetch_add(amount, Ordering::Relaxed);
        }
    }

    /// The total of `count` so far.
    pub fn sum(&self, count: Count) -> u64 {
        self.shards.iter().map(|shard| shard.0[count as usize].load(Ordering::Relaxed)).sum()
    }
}

/// Shards that belong to no living thread, and how many were ever given out.
static FREE: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));

const NONE: usize = SHARDS;
const _: () = assert!(NONE > SHARED, "a hit asks of both at once");

/// A number of the calling thread, below 64; its own, as long as not more threads than that are counting.
#[inline]
pub(crate) fn thread_number() -> usize {
    my_shard()
}

#[inline]
fn my_shard() -> usize {
    match MY_SHARD.get() {
        NONE => take_shard(),
        shard => shard,
    }
}

#[cold]
fn take_shard() -> usize {
    let shard = {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = free.1;
        match free.0.pop() {
            Some(shard) => shard,
            None if fresh < SHARED => {
                free.1 += 1;
                fresh
            }
            None => SHARED,
        }
    };
    // While the thread's locals are being torn down there is no guard to give it back: it is shared then.
    let kept = SHARD_GUARD.try_with(|guard| guard.0.set(shard)).is_ok();
    if !kept && shard != SHARED {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).0.push(shard);
    }
    MY_SHARD.set(if kept { shard } else { SHARED });
    MY_SHARD.get()
}

struct ShardGuard(Cell<usize>);

impl Drop for ShardGuard {
    fn drop(&mut self) {
        // A thread that counts in this thread after this point shares the last shard.
        MY_SHARD.set(SHARED);
        let shard = self.0.get();
        if shard < SHARED {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).0.push(shard);
        }
    }
}

std::thread_local! {
    // Apart from its guard, because a local without a destructor is one load away.
    static MY_SHARD: Cell<usize> = const { Cell::new(NONE) };
    static SHARD_GUARD: ShardGuard = const { ShardGuard(Cell::new(NONE)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_shards_lose_nothing() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            for _ in 0..SHARDS * 2 {
                scope.spawn(|| (0..1000).for_each(|_| counters.add(Count::Hits, 1)));
            }
        });
        assert_eq!(counters.sum(Count::Hits), SHARDS as u64 * 2 * 1000);
        assert_eq!(counters.sum(Count::Bytes), 0);
    }
}

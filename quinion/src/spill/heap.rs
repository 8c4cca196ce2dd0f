//! Heap: the memory of the heap that readers of slots take, bounded for all of them together.
//!
//! ```text
//!   reader --bytes--> is there so much left, or no other reader? a turn --> slots --> copy --> the turn ends
//!                     else it waits until some other turn ends
//! ```
//!
//! Pages that are read where they are go by the heap, and as many threads may read them as like. Memory is short then,
//! so all of them together take no more than [`HEAP_MAX`].
//!
//! Invariants:
//!  1. The bytes of all turns together are [`HEAP_MAX`] at most, or those of one turn, which is alone.
//!  2. A thread that has a turn waits for the device and for locks from the tree's on, and for no other turn: so each
//!     ends if the device answers.
//!
//! Not an invariant: that turns come in the order in which they were wanted.

use std::sync::atomic::Ordering;

use crate::units::{Order, PAGE_SIZE};
use crate::xarray::Value;

use super::Spill;

/// 8 MiB: more than the largest packed folio takes, and sixteen times what the largest piece of a plain one does.
pub(super) const HEAP_MAX: u64 = 8 << 20;

/// So many bytes of the heap are this reader's.
#[derive(Debug)]
pub struct HeapTurn<'s> {
    spill: &'s Spill,
    bytes: u64,
}

impl HeapTurn<'_> {
    /// Whether a read that takes so many bytes of the heap may be made in it.
    pub fn covers(&self, bytes: u64) -> bool {
        bytes <= self.bytes
    }
}

impl Drop for HeapTurn<'_> {
    fn drop(&mut self) {
        self.spill.heap.fetch_sub(self.bytes, Ordering::Relaxed);
        self.spill.wait_queue.wake();
    }
}

impl Spill {
    /// The bytes of the heap that it takes to read so many pages of the folio that `value` stands for; as in
    /// [`SharedSlots::read`](super::SharedSlots::read). The caller holds the lock of the tree in which it stands.
    pub fn heap_for(&self, value: Value, pages: u64) -> u64 {
        let store = self.store();
        let packed = u64::from(store.record(value.payload()).packed_bytes());
        let bytes = pages * PAGE_SIZE as u64;
        match packed {
            0 => 2 * bytes,
            _ => 2 * packed.next_multiple_of(PAGE_SIZE as u64) + Order(value.order()).bytes() as u64 + bytes,
        }
    }

    /// Waits for a turn of so many bytes, while other readers have too many. The caller has no turn, no slots, and no
    /// lock from the tree's on.
    pub fn take_turn(&self, bytes: u64) -> HeapTurn<'_> {
        let mut is_taken = false;
        self.wait_queue.wait(&*self.backend, &mut || {
            let grow = |taken: u64| (taken == 0 || taken + bytes <= HEAP_MAX).then_some(taken + bytes);
            // Relaxed: it is a count, and guards no memory.
            let grown = || self.heap.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok();
            is_taken = is_taken || grown();
            is_taken
        });
        HeapTurn { spill: self, bytes }
    }

    /// The bytes of the heap that readers have now.
    pub fn heap_bytes(&self) -> u64 {
        self.heap.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;
    use crate::arena::{Arena, ArenaOptions};
    use crate::backend::{Backend, MemoryFile, WaitQueue};
    use crate::spill::SpillOptions;

    fn spill() -> Arc<Spill> {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let backend = Arc::new(MemoryFile::new(Vec::new())) as Arc<dyn Backend>;
        Spill::with_backend(backend, &SpillOptions::new("", 1 << 20), &arena, &Arc::new(WaitQueue::new()))
            .unwrap()
    }

    #[test]
    fn turns_of_many_threads_take_no_more_than_the_bound_together() {
        let (spill, had) = (spill(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for thread in 1..=16 {
                let (spill, had) = (&spill, &had);
                scope.spawn(move || {
                    for nth in 0..50 {
                        let turn = spill.take_turn(HEAP_MAX / (1 + (thread + nth) % 5));
                        assert!(spill.heap_bytes() <= HEAP_MAX);
                        thread::yield_now();
                        drop(turn);
                        had.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!((had.into_inner(), spill.heap_bytes()), (16 * 50, 0));
    }

    #[test]
    fn turn_of_more_than_the_bound_is_had_alone() {
        let spill = spill();
        let turn = spill.take_turn(3 * HEAP_MAX);
        assert!(turn.covers(3 * HEAP_MAX) && !turn.covers(3 * HEAP_MAX + 1));
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                drop(spill.take_turn(1));
                spill.heap_bytes()
            });
            assert_eq!(spill.heap_bytes(), 3 * HEAP_MAX);
            drop(turn);
            assert_eq!(other.join().unwrap(), 0);
        });
    }
}

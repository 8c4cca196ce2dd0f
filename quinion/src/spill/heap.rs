//! Heap: the memory of the heap that readers of slots take, bounded for all of them together.
//!
//! ```text
//!   reader --bytes--> first in the queue, and so much is left or no other reads? a turn --> slots --> copy --> its end
//!                     else it waits until a reader before it has its turn, or some turn ends
//! ```
//!
//! Pages that are read where they are go by the heap, and as many threads may read them as like. Memory is short then,
//! so all of them together take no more than [`HEAP_MAX`].
//!
//! **In order of arrival.** Where small turns could pass a large one, they would keep the heap so full that it is never
//! had: a reader of a large packed folio would wait without a bound. So they wait behind it, also while a turn that was
//! had before waits for the device. That is no worse: all turns are of one spill file, so a device that hangs keeps the
//! readers behind it waiting as well; and one that answers late ends the wait when it answers.
//!
//! Invariants:
//!  1. The bytes of all turns together are [`HEAP_MAX`] at most, or those of one turn, which is alone.
//!  2. A thread that has a turn waits for the device and for locks from the tree's on, and for no other turn: so each
//!     ends if the device answers.
//!  3. A thread that waits is in the queue, and leaves it with a turn or by a panic. In either case it wakes the next.
//!
//! Locks: the mutex of the queue is a leaf, and is taken in conditions of the wait queue.

use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

use crate::units::{Order, PAGE_SIZE};
use crate::xarray::Value;

use super::Spill;

/// 8 MiB: more than the largest packed folio takes, and sixteen times what the largest piece of a plain one does.
pub(super) const HEAP_MAX: u64 = 8 << 20;

/// The bytes that turns have, and the tickets of the readers that wait for one.
#[derive(Default, Debug)]
pub(super) struct HeapQueue {
    taken: u64,
    /// In order of arrival.
    waiting: VecDeque<u64>,
    last_ticket: u64,
}

impl HeapQueue {
    fn enter(&mut self) -> u64 {
        self.last_ticket += 1;
        self.waiting.push_back(self.last_ticket);
        self.last_ticket
    }

    /// Takes `bytes` for the ticket, if it is the first.
    fn grant(&mut self, ticket: u64, bytes: u64) -> bool {
        let fits = self.taken == 0 || self.taken + bytes <= HEAP_MAX;
        let is_granted = fits && self.waiting.front() == Some(&ticket);
        if is_granted {
            self.waiting.pop_front();
            self.taken += bytes;
        }
        is_granted
    }
}

/// A reader's turn: so many bytes of the heap are the reader's, or are to be.
#[derive(Debug)]
pub struct HeapTurn<'s> {
    spill: &'s Spill,
    bytes: u64,
    ticket: u64,
    is_granted: bool,
}

impl HeapTurn<'_> {
    /// Whether a read that takes so many bytes of the heap may be made in it.
    pub fn covers(&self, bytes: u64) -> bool {
        bytes <= self.bytes
    }

    fn seek_grant(&mut self) -> bool {
        self.is_granted = self.is_granted || self.spill.heap().grant(self.ticket, self.bytes);
        self.is_granted
    }
}

impl Drop for HeapTurn<'_> {
    fn drop(&mut self) {
        let mut heap = self.spill.heap();
        match self.is_granted {
            true => heap.taken -= self.bytes,
            // The wait has panicked.
            false => heap.waiting.retain(|&ticket| ticket != self.ticket),
        }
        drop(heap);
        self.spill.wait_queue.wake();
    }
}

impl Spill {
    fn heap(&self) -> MutexGuard<'_, HeapQueue> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

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

    /// Waits for a turn of so many bytes, while other readers have too many, or came first. The caller has no turn, no
    /// slots, and no lock from the tree's on.
    pub fn take_turn(&self, bytes: u64) -> HeapTurn<'_> {
        let ticket = self.heap().enter();
        // From here on it gives back what it has, also if the wait panics.
        let mut turn = HeapTurn { spill: self, bytes, ticket, is_granted: false };
        self.wait_queue.wait(&*self.backend, &mut || turn.seek_grant());
        // There may be enough for the next, which was looked at when it was not yet the first. One that comes later
        // finds itself to be that.
        let has_next = !self.heap().waiting.is_empty();
        if has_next {
            self.wait_queue.wake();
        }
        turn
    }

    /// The bytes of the heap that readers have now.
    pub fn heap_bytes(&self) -> u64 {
        self.heap().taken
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

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

    /// 1 A reader has half of the heap. 2 One wants three quarters. 3 One wants a little, which is left. Were it had,
    /// as many as like could have it so, each before the last one ends, and there would never be three quarters.
    #[test]
    fn small_turn_waits_behind_a_large_one() {
        let (mut heap, large) = (HeapQueue::default(), HEAP_MAX * 3 / 4);
        let [first, second, third] = [(); 3].map(|()| heap.enter());
        assert!(heap.grant(first, HEAP_MAX / 2));
        assert!(!heap.grant(second, large) && !heap.grant(third, 1));
        heap.taken -= HEAP_MAX / 2;
        assert!(!heap.grant(third, 1) && heap.grant(second, large) && heap.grant(third, 1));
        assert_eq!((heap.taken, heap.waiting.len()), (large + 1, 0));
    }

    /// 1 A reader has all of the heap, a second wants half of it, and a third, behind that, wants as much. 2 The first
    /// ends. 3 The second has its turn, and keeps it until the third has one, too: so it was the second that woke it.
    #[test]
    fn readers_whose_turns_fit_together_have_them_together() {
        let (spill, had) = (spill(), AtomicUsize::new(0));
        let until = |is_so: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !is_so() {
                assert!(began.elapsed() < Duration::from_secs(120), "it does not happen");
                thread::yield_now();
            }
        };
        let all = spill.take_turn(HEAP_MAX);
        thread::scope(|scope| {
            for readers in 1..=2 {
                scope.spawn(|| {
                    let _turn = spill.take_turn(HEAP_MAX / 2);
                    had.fetch_add(1, Ordering::Relaxed);
                    until(&|| had.load(Ordering::Relaxed) == 2);
                });
                until(&|| spill.heap().waiting.len() == readers);
            }
            drop(all);
        });
        assert_eq!(spill.heap_bytes(), 0);
    }

    /// As a wait that panics leaves it.
    #[test]
    fn reader_that_leaves_the_queue_is_waited_for_no_longer() {
        let spill = spill();
        let alone = spill.take_turn(HEAP_MAX);
        let ticket = spill.heap().enter();
        let left = HeapTurn { spill: &spill, bytes: 1, ticket, is_granted: false };
        thread::scope(|scope| {
            let behind = scope.spawn(|| drop(spill.take_turn(HEAP_MAX)));
            drop(alone);
            drop(left);
            behind.join().unwrap();
        });
        assert_eq!(spill.heap_bytes(), 0);
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

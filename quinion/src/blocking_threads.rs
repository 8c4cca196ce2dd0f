//! Blocking threads: calls that may wait for a device, made for futures, which may not.
//!
//! ```text
//!   future --call, device--> its queue for calls of the kind --> up to 16 threads for each, 128 in all
//!          <----waker------- result                              started when none is idle, ended after idle seconds
//! ```
//!
//! A sync, a write that cannot go to the cache at once, a look at a file's end and a wait for memory are such calls.
//! They run on threads of the cache, so a future needs no runtime, and blocks none.
//!
//! **A file system that hangs**, as one of a network does, keeps a thread for each call that it does not answer. The
//! bound for each device leaves threads to the calls of others; those of the device wait for each other, as they would
//! in the device.
//!
//! Invariants:
//!  1. A call that was handed over is made once while the process lives; those of a device begin in their order.
//!  2. A call that panics takes no thread with it.
//!  3. The threads keep no cache alive by themselves: only calls in the queue do.
//!
//! Not an invariant: that a call finds a thread. Where more than seven devices hang, others' calls wait for them.

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sync::{DeviceQueues, contained};

const DEVICE_THREADS_MAX: usize = 16;
const THREADS_MAX: usize = 128;
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Calls of one kind wait for each other, where a device is slow, and for none of the other kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CallKind {
    /// A look at a file, or a wait for memory, of a read.
    Read,
    /// A write or a sync.
    Write,
}

/// The calls that wait for each other where a device is slow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CallQueue {
    /// See [`Identity`](crate::backend::Identity).
    pub device: u64,
    /// Their kind.
    pub kind: CallKind,
}

/// A call that may wait for a device.
pub type BlockingTask = Box<dyn FnOnce() + Send>;

/// The threads of one cache. Dropping this lets them end when no call is left.
#[derive(Default)]
pub struct BlockingThreads {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

struct Queue {
    calls: DeviceQueues<CallQueue, BlockingTask>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

impl Default for Queue {
    fn default() -> Self {
        Self { calls: DeviceQueues::new(DEVICE_THREADS_MAX), threads: 0, idle: 0, is_closed: false }
    }
}

impl BlockingThreads {
    /// Has a thread make `call`, after those that are in its queue.
    /// Does not wait.
    ///
    /// # Errors
    /// The system has no thread, and the cache has none.
    pub fn run(&self, queue: CallQueue, call: BlockingTask) -> io::Result<()> {
        let mut state = self.shared.lock();
        state.calls.push(queue, call);
        if state.calls.ready() <= state.idle {
            self.shared.arrived.notify_one();
        } else if state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("quinion-blocking".into());
            match thread.spawn(move || shared.work()) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => {
                    let call = state.calls.take_back(queue);
                    drop(state); // before the call is dropped
                    drop(call);
                    return Err(error);
                }
                Err(_) => {} // one of those that there are comes to it
            }
        }
        Ok(())
    }
}

impl Drop for BlockingThreads {
    fn drop(&mut self) {
        // In a fork another thread, which is not there, may have it locked; and there are no threads to be told.
        if let Ok(mut queue) = self.shared.queue.try_lock() {
            queue.is_closed = true;
        }
        self.shared.arrived.notify_all();
    }
}

impl fmt::Debug for BlockingThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingThreads")
            .field("threads", &self.shared.lock().threads)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn work(&self) {
        crate::sys::signal::block_all();
        let mut queue = self.lock();
        loop {
            if let Some((device, call)) = queue.calls.begin() {
                drop(queue);
                contained(call);
                queue = self.lock();
                queue.calls.end(device);
                continue;
            }
            if queue.is_closed {
                break;
            }
            queue.idle += 1;
            let (woken, wait) =
                self.arrived.wait_timeout(queue, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if wait.timed_out() && queue.calls.ready() == 0 {
                break;
            }
        }
        queue.threads -= 1;
    }

    /// Nothing panics with the lock held, so a poisoned one is as good as any.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn queue(device: u64, kind: CallKind) -> CallQueue {
        CallQueue { device, kind }
    }

    /// Calls of a device that hangs, far more than it has threads for, and one of another after them.
    #[test]
    fn a_device_that_hangs_keeps_its_share_of_the_threads_and_no_more() {
        let (threads, hangs) = (BlockingThreads::default(), Arc::new(AtomicBool::new(true)));
        let begun = Arc::new(AtomicUsize::new(0));
        let (sender, ended) = mpsc::channel();
        for number in 0..100 {
            let (hangs, begun, sender) = (Arc::clone(&hangs), Arc::clone(&begun), sender.clone());
            let call = move || {
                begun.fetch_add(1, Ordering::Relaxed);
                while hangs.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sender.send(number).unwrap();
            };
            threads.run(queue(1, CallKind::Write), Box::new(call)).unwrap();
        }
        for (other, calls) in [(1000, queue(2, CallKind::Write)), (1001, queue(1, CallKind::Read))] {
            let told = sender.clone();
            threads.run(calls, Box::new(move || told.send(other).unwrap())).unwrap();
            assert_eq!(ended.recv_timeout(LONG), Ok(other));
        }
        assert!(begun.load(Ordering::Relaxed) <= DEVICE_THREADS_MAX);
        hangs.store(false, Ordering::Relaxed);
        let mut numbers: Vec<_> = (0..100).map(|_| ended.recv_timeout(LONG).unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, Vec::from_iter(0..100), "each is made once");
        let queue = threads.shared.lock();
        assert!(queue.calls.ready() == 0 && queue.threads <= THREADS_MAX);
    }

    #[test]
    fn a_call_that_panics_ends_no_thread() {
        let threads = BlockingThreads::default();
        let (sender, made) = mpsc::channel();
        threads.run(queue(7, CallKind::Read), Box::new(|| panic!("a call that panics"))).unwrap();
        threads.run(queue(7, CallKind::Read), Box::new(move || sender.send(100).unwrap())).unwrap();
        assert_eq!(made.recv_timeout(LONG), Ok(100));
    }
}

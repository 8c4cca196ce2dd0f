//! Blocking threads: calls that may wait for a device, made for futures, which may not.
//!
//! ```text
//!   future --call, device--> its queue for calls of the kind --> 4 threads for reads, 16 for writes; 128 in all
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
//! Not an invariant: that a call finds a thread. Where more than six devices hang in calls of both kinds, others'
//! calls wait for them.

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sync::{DeviceQueues, contained};
use crate::sys::fork::ForkGuard;

/// Threads for one device's calls of each kind. Those of reads are short, where a device answers.
const READS_MAX: usize = 4;
const WRITES_MAX: usize = 16;
const THREADS_MAX: usize = 128;
const IDLE_MAX: Duration = Duration::from_secs(5);

/// Calls of one kind wait for each other, where a device is slow, and for none of the other kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallKind {
    /// A look at a file, or a wait for memory, of a read.
    Read,
    /// A write or a sync.
    Write,
}

/// The calls that wait for each other where a device is slow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallQueue {
    /// See [`Identity`](crate::backend::Identity).
    pub device: u64,
    /// Kind of the calls.
    pub kind: CallKind,
}

/// A call that may wait for a device.
pub type BlockingTask = Box<dyn FnOnce() + Send>;

/// The threads of one cache. Dropping this lets them end when no call is left.
#[derive(Default)]
pub struct BlockingThreads {
    shared: Arc<Shared>,
    process: ForkGuard,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

struct Queue {
    reads: DeviceQueues<BlockingTask>,
    writes: DeviceQueues<BlockingTask>,
    threads: usize,
    /// Threads that are at a call; the others take one that is ready before they sleep, or are woken for it.
    running: usize,
    is_closed: bool,
}

impl Default for Queue {
    fn default() -> Self {
        let [reads, writes] = [READS_MAX, WRITES_MAX].map(DeviceQueues::new);
        Self { reads, writes, threads: 0, running: 0, is_closed: false }
    }
}

impl Queue {
    fn calls(&mut self, kind: CallKind) -> &mut DeviceQueues<BlockingTask> {
        match kind {
            CallKind::Read => &mut self.reads,
            CallKind::Write => &mut self.writes,
        }
    }

    fn ready(&self) -> usize {
        self.reads.ready() + self.writes.ready()
    }

    fn begin(&mut self) -> Option<(CallQueue, BlockingTask)> {
        let mut of = |kind| {
            let (device, call) = self.calls(kind).begin()?;
            Some((CallQueue { device, kind }, call))
        };
        let begun = of(CallKind::Read).or_else(|| of(CallKind::Write))?;
        self.running += 1;
        Some(begun)
    }

    fn end(&mut self, queue: CallQueue) {
        self.running -= 1;
        self.calls(queue.kind).end(queue.device);
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
        state.calls(queue.kind).push(queue.device, call);
        if state.ready() <= state.threads - state.running {
            self.shared.arrived.notify_one();
        } else if state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("quinion-blocking".into());
            match thread.spawn(move || shared.work()) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => {
                    let call = state.calls(queue.kind).take_back(queue.device);
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

impl BlockingThreads {
    /// How many calls are in a queue or under way there.
    pub fn outstanding(&self, queue: CallQueue) -> usize {
        self.shared.lock().calls(queue.kind).outstanding(queue.device)
    }
}

impl Drop for BlockingThreads {
    fn drop(&mut self) {
        // In a fork a thread that is not there may have it locked; and there are no threads to be told.
        if self.process.is_forked() {
            return;
        }
        self.shared.lock().is_closed = true;
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
        let mut state = self.lock();
        loop {
            if let Some((queue, call)) = state.begin() {
                drop(state);
                contained(call);
                state = self.lock();
                state.end(queue);
                continue;
            }
            if state.is_closed {
                break;
            }
            let (woken, wait) =
                self.arrived.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if wait.timed_out() && state.ready() == 0 {
                break;
            }
        }
        state.threads -= 1;
    }

    /// Locks the queue. No thread panics with the lock held, so a poisoned one is as good as any.
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
        assert!(begun.load(Ordering::Relaxed) <= WRITES_MAX);
        hangs.store(false, Ordering::Relaxed);
        let mut numbers: Vec<_> = (0..100).map(|_| ended.recv_timeout(LONG).unwrap()).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, Vec::from_iter(0..100), "each is made once");
        let state = threads.shared.lock();
        assert!(state.ready() == 0 && state.threads <= WRITES_MAX + 2, "{} threads", state.threads);
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

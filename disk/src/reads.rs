//! Reads: requests to a device that may never answer, on threads that may be left behind.
//!
//! ```text
//!   a reader: buffer --queue--> a thread of the store: read_at --answer: buffer--> the reader
//!               |                                          |
//!               no answer for a while: gives up            an answer after that: frees the buffer
//! ```
//!
//! A call of the system that waits for a broken disk cannot be ended from outside. So a thread that waits in one has
//! nothing of its caller's: the buffer, and a count of the device, are the request's. Threads are started when there is
//! work and none is idle, and stay until the store ends. One that hangs is left to itself, and keeps the device open
//! until it has its answer.
//!
//! Invariants:
//!  1. Only requests have the device. So it is closed when the store and the last request have ended.
//!
//! Locks: two leaves, of the queue and of one request; none is held at the device.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::device::{AlignedBuffer, Device};

/// The most reading threads of a store; further reads wait for one of them.
const THREADS_MAX: usize = 16;
/// A time without an answer counts in so many pieces. A process that was stopped meanwhile has missed one of them.
pub const PIECES: u32 = 10;
/// Reads that the disk may refuse before it is left alone, or is not taken.
pub const READ_ERRORS_MAX: u64 = 16;

/// A part of a device that is to be read.
#[derive(Debug)]
pub struct ReadRequest {
    pub device: Arc<dyn Device>,
    /// The bytes come to its beginning.
    pub buffer: AlignedBuffer,
    pub len: usize,
    pub offset: u64,
}

impl ReadRequest {
    fn read(mut self) -> ReadAnswer {
        let to = &mut self.buffer.bytes_mut()[..self.len];
        let read = catch_unwind(AssertUnwindSafe(|| self.device.read_at(to, self.offset)));
        let outcome = read.unwrap_or_else(|_| Err(io::Error::other("the device's read_at panicked")));
        ReadAnswer { buffer: self.buffer, outcome }
    }
}

#[derive(Debug)]
pub struct ReadAnswer {
    pub buffer: AlignedBuffer,
    pub outcome: io::Result<()>,
}

/// A panic under a lock leaves no half-made state that a checksum would not find out.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads of one store.
#[derive(Debug)]
pub struct ReadThreads {
    queue: Arc<ReadQueue>,
    on_start: fn(),
    process: u32,
}

#[derive(Default, Debug)]
struct ReadQueue {
    state: Mutex<QueueState>,
    news: Condvar,
}

#[derive(Default, Debug)]
struct QueueState {
    requests: VecDeque<(ReadRequest, Arc<Pending>)>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

#[derive(Default, Debug)]
struct Pending {
    answer: Mutex<Option<ReadAnswer>>,
    news: Condvar,
}

impl ReadThreads {
    /// No read thread runs yet. Each calls `on_start` first.
    pub fn new(on_start: fn()) -> Self {
        Self { queue: Arc::default(), on_start, process: std::process::id() }
    }

    /// `None`: there was no answer for `time_max`. The request is left to itself.
    pub fn read(&self, request: ReadRequest, time_max: Duration) -> Option<ReadAnswer> {
        // A forked child has none of the threads.
        if std::process::id() != self.process {
            return Some(request.read());
        }
        let mut state = lock(&self.queue.state);
        if state.idle <= state.requests.len() && state.threads < THREADS_MAX {
            state.threads += usize::from(self.start_thread());
        }
        if state.threads == 0 {
            drop(state);
            return Some(request.read()); // the system has no thread for it
        }
        let pending = Arc::new(Pending::default());
        state.requests.push_back((request, Arc::clone(&pending)));
        drop(state);
        self.queue.news.notify_one();
        pending.wait(time_max)
    }

    fn start_thread(&self) -> bool {
        let (queue, on_start) = (Arc::clone(&self.queue), self.on_start);
        let thread = std::thread::Builder::new().name("quinion-disk".to_owned());
        let started = thread.spawn(move || {
            on_start();
            queue.run();
        });
        started.is_ok()
    }

    /// Idle threads end. No reader comes any more.
    pub fn close(&self) {
        let mut state = lock(&self.queue.state);
        state.is_closed = true;
        let given_up = std::mem::take(&mut state.requests);
        drop(state);
        drop(given_up); // a device may be closed by that, which may wait
        self.queue.news.notify_all();
    }
}

impl ReadQueue {
    fn run(&self) {
        while let Some((request, pending)) = self.next() {
            pending.complete(request.read());
        }
    }

    fn next(&self) -> Option<(ReadRequest, Arc<Pending>)> {
        let is_idle = |state: &mut QueueState| state.requests.is_empty() && !state.is_closed;
        let mut state = lock(&self.state);
        state.idle += 1;
        state = self.news.wait_while(state, is_idle).unwrap_or_else(PoisonError::into_inner);
        state.idle -= 1;
        state.requests.pop_front()
    }
}

impl Pending {
    /// If its reader has given up, the answer goes with the request.
    fn complete(&self, answer: ReadAnswer) {
        *lock(&self.answer) = Some(answer);
        self.news.notify_one();
    }

    fn wait(&self, time_max: Duration) -> Option<ReadAnswer> {
        let mut answer = lock(&self.answer);
        for _ in 0..PIECES {
            let waited = self.news.wait_timeout_while(answer, time_max / PIECES, |answer| answer.is_none());
            answer = waited.unwrap_or_else(PoisonError::into_inner).0;
            if answer.is_some() {
                break;
            }
        }
        answer.take()
    }
}

//! Threads: reads that block, on a few threads of our own.
//!
//! The way of reading where io_uring is refused, and for sources that users
//! write ([`ReadAt`]).
//!
//! ```text
//!   submit --> queue of (fill, source) --> a thread: read, Fill::complete
//! ```
//!
//! Threads are started when there is work and none is idle, up to the pool's
//! maximum, and stay until the pool is dropped. They take none of the program's
//! signals. If no thread can be started the work is done on the caller's.
//!
//! Invariants:
//!  1. A fill that was queued is read, even if the pool is dropped meanwhile.
//!  2. No lock is held while a source is read or a fill completed.
//!  3. A source that panics fails its fill and nothing else.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;

use super::{Attributes, Backend, Fill, WaitRoom};
use crate::sync::lock::{Condvar, Mutex, MutexGuard};
use crate::units::PAGE_SIZE;

/// Bytes of a user's source that are read at a time, by way of a buffer of the thread.
const BOUNCE_BYTES: usize = 256 << 10;
const _: () = assert!(BOUNCE_BYTES.is_multiple_of(PAGE_SIZE));

/// A source of bytes that a user writes: it is read by calls that may block.
///
/// A [`BlockingSource`] makes a [`Backend`] of it.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// Reads bytes from byte `position` on into `buffer` and returns how many; fewer than asked for if it
    /// likes, but 0 only at the end. Called by several threads at a time. May block.
    ///
    /// # Errors
    /// Whatever went wrong. [`io::ErrorKind::Interrupted`] means "again".
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize>;

    /// What the source is now: see [`Attributes`]. Two sources with one identity share pages.
    ///
    /// # Errors
    /// It cannot be said.
    fn attributes(&self) -> io::Result<Attributes>;
}

/// What a thread of the pool can read from.
pub(super) trait Source: Send + Sync {
    /// Fills `fill`; returns how many bytes came. `bounce` is a buffer of the thread's own.
    fn read(&self, fill: &mut Fill, bounce: &mut Vec<u8>) -> io::Result<usize>;
}

/// A backend that reads a user's [`ReadAt`] on a pool of threads.
#[derive(Debug)]
pub struct BlockingSource<R> {
    source: Arc<R>,
    pool: Arc<Pool>,
}

impl<R: ReadAt + 'static> BlockingSource<R> {
    /// Reads `source` on `pool`. One pool may serve many sources.
    pub fn new(source: R, pool: Arc<Pool>) -> Self {
        Self { source: Arc::new(source), pool }
    }
    /// What is read.
    pub fn source(&self) -> &R {
        &self.source
    }
}

impl<R: ReadAt + 'static> Backend for BlockingSource<R> {
    fn name(&self) -> &'static str {
        "blocking source"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.source.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        let source: Arc<dyn Source> = Arc::new(Bounced(Arc::clone(&self.source)));
        self.pool.submit(&source, fills);
    }
    fn has_room(&self, fills: usize) -> bool {
        self.pool.has_room(fills)
    }
}

/// A user's source, read by way of a buffer: the frames themselves may not be lent as a slice.
struct Bounced<R>(Arc<R>);

impl<R: ReadAt> Source for Bounced<R> {
    fn read(&self, fill: &mut Fill, bounce: &mut Vec<u8>) -> io::Result<usize> {
        bounce.resize(BOUNCE_BYTES, 0);
        let mut done = 0;
        while done < fill.len() {
            let asked = (fill.len() - done).min(BOUNCE_BYTES);
            let bytes = match self.0.read_at(&mut bounce[..asked], fill.position() + done as u64) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if bytes > asked {
                return Err(io::Error::other("the source says it read more than it was asked for"));
            }
            if bytes == 0 {
                break;
            }
            fill.write(done, &bounce[..bytes]);
            done += bytes;
            if done < fill.len() {
                // From the page's start: the first part of it may have come with the bytes before.
                let from = (done - bytes) / PAGE_SIZE * PAGE_SIZE;
                fill.landed(from..done);
            }
        }
        Ok(done)
    }
}

/// A few threads that read.
pub struct Pool {
    shared: Arc<Shared>,
    /// The process that made it.
    process: u32,
}

struct Shared {
    state: Mutex<State>,
    /// Rung when there is work or the pool closes.
    bell: Condvar,
    /// Fills given to us and not completed.
    outstanding: AtomicUsize,
    room: Arc<WaitRoom>,
    threads_max: usize,
    queue_max: usize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    is_closing: bool,
}

struct Work {
    fill: Fill,
    source: Arc<dyn Source>,
}

impl Pool {
    /// A pool of at most `threads_max` threads, at least 1, none of which runs yet. [`Backend::has_room`]
    /// says no when more than `queue_max` fills wait; `submit` takes them all the same, each holds frames,
    /// and those are bounded.
    pub fn new(room: Arc<WaitRoom>, threads_max: usize, queue_max: usize) -> Self {
        let shared = Shared {
            state: Mutex::default(),
            bell: Condvar::new(),
            outstanding: AtomicUsize::new(0),
            room,
            threads_max: threads_max.max(1),
            queue_max,
        };
        Self { shared: Arc::new(shared), process: std::process::id() }
    }

    pub(super) fn has_room(&self, fills: usize) -> bool {
        self.shared.outstanding.load(Ordering::Relaxed) + fills <= self.shared.queue_max
    }

    pub(super) fn submit(&self, source: &Arc<dyn Source>, fills: Vec<Fill>) {
        self.shared.outstanding.fetch_add(fills.len(), Ordering::Relaxed);
        let is_many = fills.len() > 1;
        let mut state = self.shared.lock();
        let work = fills.into_iter().map(|fill| Work { fill, source: Arc::clone(source) });
        state.queue.extend(work);
        self.start_threads(&mut state);
        let is_alone = state.threads.is_empty();
        drop(state);
        if is_many {
            self.shared.bell.notify_all()
        } else {
            self.shared.bell.notify_one()
        }
        if is_alone {
            // Not one thread could be started: the work is ours.
            self.shared.work_off();
        }
    }

    /// Starts as many threads as there is work for that nobody idle will take.
    fn start_threads(&self, state: &mut State) {
        while state.queue.len() > state.idle && state.threads.len() < self.shared.threads_max {
            let shared = Arc::clone(&self.shared);
            let name = format!("quinion-io-{}", state.threads.len());
            // Refused by a limit: the threads there are will do it.
            let Ok(thread) = std::thread::Builder::new().name(name).spawn(move || shared.run()) else {
                return;
            };
            state.threads.push(thread);
            // It takes one before it sleeps for the first time.
            state.idle += 1;
        }
    }

    /// Waits until every fill given to the pool has been completed. Not to be called while a fill of the
    /// pool is being completed by the caller: that one would never be done.
    pub(super) fn drain(&self) {
        // Partner: the release in `Shared::run_one`.
        let shared = &self.shared;
        shared.room.sleep(&mut || shared.outstanding.load(Ordering::Acquire) == 0);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's life: it counts as idle when it starts.
    fn run(&self) {
        crate::sys::signal::block_all();
        let mut bounce = Vec::new();
        let mut state = self.lock();
        loop {
            if let Some(work) = state.queue.pop_front() {
                state.idle -= 1;
                drop(state);
                self.run_one(work, &mut bounce);
                state = self.lock();
                state.idle += 1;
            } else if state.is_closing {
                return;
            } else {
                state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Does all the work there is, on the caller's thread.
    fn work_off(&self) {
        let mut bounce = Vec::new();
        while let Some(work) = { self.lock().queue.pop_front() } {
            self.run_one(work, &mut bounce);
        }
    }

    fn run_one(&self, work: Work, bounce: &mut Vec<u8>) {
        let Work { mut fill, source } = work;
        let read = catch_unwind(AssertUnwindSafe(|| source.read(&mut fill, bounce)));
        let outcome = read.unwrap_or_else(|_| Err(io::Error::other("the source panicked")));
        // A sink that panics must not take the thread with it.
        let _ = catch_unwind(AssertUnwindSafe(|| fill.complete(outcome)));
        drop(source);
        // Partner: the acquire in `Pool::drain`.
        self.outstanding.fetch_sub(1, Ordering::Release);
        self.room.wake();
    }
}

impl Drop for Pool {
    /// Waits for the threads, which do what is queued first. A thread of the pool that drops it does not
    /// wait for itself. In a fork of the process that made it nothing is done: the threads are not here.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        let mut state = self.shared.lock();
        state.is_closing = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.bell.notify_all();
        let me = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != me) {
            // A thread that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outstanding = self.shared.outstanding.load(Ordering::Relaxed);
        f.debug_struct("Pool")
            .field("threads_max", &self.shared.threads_max)
            .field("outstanding", &outstanding)
            .finish_non_exhaustive()
    }
}

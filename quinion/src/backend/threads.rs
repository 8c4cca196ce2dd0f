//! Threads: reads and writes that block, on a few threads of the library's.
//!
//! The way where io_uring is refused, for sources that users write ([`ReadAt`], [`WriteAt`]), and for the last partial
//! page of a file that is written directly.
//!
//! ```text
//!   submit --> the device's queue of (fill or flush, source) --> a thread: read or write, complete
//! ```
//!
//! Threads are started when there is work and none is idle, up to the pool's maximum for each device, and stay until
//! the pool is dropped. There are four times as many in all, so a device that hangs leaves some to others.
//! They take none of the program's signals. If no thread can be started the work is done on the caller's.
//!
//! Invariants:
//!  1. Queued requests are completed, even if the pool is dropped meanwhile.
//!  2. No lock is held while a source is read or written, or a fill or flush completed.
//!  3. A source that panics fails its fill or flush and nothing else.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::work::Work;
use super::{
    Attributes, Backend, ContentKey, Fill, Flush, FlushError, SyncKind, WaitQueue, read_only, zero_by,
};
use crate::sync::{DeviceQueues, contained};
use crate::units::PAGE_SIZE;

/// Bytes of a user's source that are read or written at a time, by way of a buffer of the thread.
const BOUNCE_BYTES: usize = 256 << 10;
const _: () = assert!(BOUNCE_BYTES.is_multiple_of(PAGE_SIZE));

/// A source of bytes that a user writes, read by calls that may block; a [`BlockingSource`] makes a [`Backend`] of it.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// Reads bytes from byte `position` on into `buffer` and returns how many; fewer than asked for if it
    /// likes, but 0 only at the end. Called by several threads at a time. May block.
    ///
    /// # Errors
    /// Whatever went wrong. [`io::ErrorKind::Interrupted`] means "again".
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize>;

    /// The source's attributes now: see [`Attributes`]. Two sources with one identity share pages.
    ///
    /// # Errors
    /// It cannot be said.
    fn attributes(&self) -> io::Result<Attributes>;

    /// A name that its bytes have for ever, if there is one: see [`Backend::content_key`].
    fn content_key(&self) -> Option<ContentKey> {
        None
    }
}

/// A source that can be written, too, by calls that may block: [`BlockingSource::for_writing`].
pub trait WriteAt: ReadAt {
    /// Writes bytes at byte `position` and returns how many; fewer than given if it likes, but not 0. A write
    /// behind the end makes the source longer, with zeros between. Called by several threads at a time. May block.
    ///
    /// # Errors
    /// Whatever went wrong. [`io::ErrorKind::Interrupted`] means "again".
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize>;

    /// Makes durable all writes before the call, at least in `range`: see [`Backend::sync`]. May block.
    ///
    /// # Errors
    /// Some of it may not be durable.
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()>;

    /// Cuts it or extends it with zeros. May block.
    ///
    /// # Errors
    /// Its size is unchanged.
    fn set_size(&self, bytes: u64) -> io::Result<()>;
}

pub(super) trait Source: Send + Sync {
    /// The device that its calls may wait for: one that hangs holds up no work of another.
    fn device(&self) -> u64;
    /// Fills `fill`; returns how many bytes came. `bounce` is a buffer of the thread's own.
    fn read(&self, fill: &mut Fill, bounce: &mut Vec<u8>) -> io::Result<usize>;
    fn read_failed(&self, fill: Fill, error: io::Error) {
        fill.complete(Err(error));
    }
    /// Writes `flush`. `bounce` is a buffer of the thread's own.
    fn write(&self, flush: &Flush, bounce: &mut Vec<u8>) -> Result<(), FlushError>;
}

/// A backend that reads a user's [`ReadAt`], and writes a user's [`WriteAt`], on a pool of threads.
#[derive(Debug)]
pub struct BlockingSource<R> {
    source: Arc<R>,
    writer: Option<Arc<dyn WriteAt>>,
    pool: Arc<ThreadPool>,
}

impl<R: WriteAt + 'static> BlockingSource<R> {
    /// Reads and writes `source` on `pool`. One pool may serve many sources.
    pub fn for_writing(source: R, pool: Arc<ThreadPool>) -> Self {
        let source = Arc::new(source);
        Self { writer: Some(Arc::clone(&source) as Arc<dyn WriteAt>), source, pool }
    }
}

impl<R: ReadAt + 'static> BlockingSource<R> {
    /// Reads `source` on `pool`. One pool may serve many sources.
    pub fn new(source: R, pool: Arc<ThreadPool>) -> Self {
        Self { source: Arc::new(source), writer: None, pool }
    }
    fn writer(&self) -> io::Result<&dyn WriteAt> {
        self.writer.as_deref().ok_or_else(|| read_only(self.name()))
    }
    fn copied(&self) -> Arc<dyn Source> {
        Arc::new(BounceBuffered { source: Arc::clone(&self.source), writer: self.writer.clone() })
    }
    /// The source.
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
    fn content_key(&self) -> Option<ContentKey> {
        self.source.content_key()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.pool.submit(&self.copied(), fills.into_iter().map(Work::Fill));
    }
    fn has_capacity(&self, fills: usize) -> bool {
        self.pool.has_capacity(device_of(&self.source), fills)
    }
    fn can_write(&self) -> bool {
        self.writer.is_some()
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.pool.submit(&self.copied(), flushes.into_iter().map(Work::Flush));
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.writer()?.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.writer()?.set_size(bytes)
    }
    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        let writer = self.writer()?;
        let size = self.source.attributes()?.size;
        zero_by(range.start..range.end.min(size), |bytes, position| writer.write_at(bytes, position))
    }
}

/// A user's source, read and written by way of a buffer: the frames themselves may not be lent as a slice.
struct BounceBuffered<R> {
    source: Arc<R>,
    writer: Option<Arc<dyn WriteAt>>,
}

impl<R: ReadAt> Source for BounceBuffered<R> {
    /// Whatever a user's source may wait for: its own address stands for that.
    fn device(&self) -> u64 {
        device_of(&self.source)
    }
    fn read(&self, fill: &mut Fill, bounce: &mut Vec<u8>) -> io::Result<usize> {
        bounce.resize(BOUNCE_BYTES, 0);
        let mut done = 0;
        while done < fill.len() {
            let asked = (fill.len() - done).min(BOUNCE_BYTES);
            let bytes = match self.source.read_at(&mut bounce[..asked], fill.position() + done as u64) {
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
                fill.pages_were_read(from..done);
            }
        }
        Ok(done)
    }

    fn write(&self, flush: &Flush, bounce: &mut Vec<u8>) -> Result<(), FlushError> {
        let failed = |written, error| FlushError { written, error };
        let writer = self.writer.as_ref().ok_or_else(|| failed(0, read_only("blocking source")))?;
        bounce.resize(BOUNCE_BYTES, 0);
        let mut done = 0;
        while done < flush.len() {
            let asked = (flush.len() - done).min(BOUNCE_BYTES);
            flush.read(done, &mut bounce[..asked]);
            match writer.write_at(&bounce[..asked], flush.position() + done as u64) {
                Ok(0) => return Err(FlushError::stuck(done)),
                Ok(bytes) if bytes > asked => {
                    let words = "the source says it wrote more than it was given";
                    return Err(failed(done, io::Error::other(words)));
                }
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(done, error)),
            }
        }
        Ok(())
    }
}

fn device_of<R>(source: &Arc<R>) -> u64 {
    Arc::as_ptr(source).addr() as u64
}

/// Devices that may hang, all but one, before other devices' work waits for them.
const DEVICES_AT_ONCE: usize = 4;

/// A few threads that read and write.
pub struct ThreadPool {
    shared: Arc<Shared>,
    process: u32,
}

struct Shared {
    state: Mutex<State>,
    wakeup: Condvar,
    outstanding: AtomicUsize,
    wait_queue: Arc<WaitQueue>,
    threads_max: usize,
    queue_max: usize,
}

struct State {
    queue: DeviceQueues<Queued>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    is_closing: bool,
}

struct Queued {
    work: Work,
    source: Arc<dyn Source>,
}

impl ThreadPool {
    /// A pool of at most `threads_max` threads for each device, at least 1, none of which runs yet.
    /// [`Backend::has_capacity`] says no when more than `queue_max` fills of a device wait; `submit` takes them all
    /// the same, as each holds frames.
    pub fn new(wait_queue: Arc<WaitQueue>, threads_max: usize, queue_max: usize) -> Self {
        let shared = Shared {
            state: Mutex::new(State {
                queue: DeviceQueues::new(threads_max),
                threads: Vec::new(),
                idle: 0,
                is_closing: false,
            }),
            wakeup: Condvar::new(),
            outstanding: AtomicUsize::new(0),
            wait_queue,
            threads_max: DEVICES_AT_ONCE * threads_max.max(1),
            queue_max,
        };
        Self { shared: Arc::new(shared), process: std::process::id() }
    }

    pub(super) fn has_capacity(&self, device: u64, fills: usize) -> bool {
        self.shared.lock().queue.outstanding(device) + fills <= self.shared.queue_max
    }

    pub(super) fn submit(&self, source: &Arc<dyn Source>, work: impl ExactSizeIterator<Item = Work>) {
        self.shared.submit(source, work);
    }

    pub(super) fn sender(&self) -> PoolSender {
        PoolSender(Arc::clone(&self.shared))
    }

    /// Not to be called while work of the pool is being completed by the caller: that would never be done.
    pub(super) fn drain(&self) {
        // Partner: the release in `Shared::run_one`.
        let shared = &self.shared;
        shared.wait_queue.sleep(&mut || shared.outstanding.load(Ordering::Acquire) == 0);
    }
}

/// A way to submit to a pool that does not keep it, for a caller that runs when the pool or the ring completes a
/// request.
pub(super) struct PoolSender(Arc<Shared>);

impl PoolSender {
    /// While work of the pool is completed, or work that a thread waits for before the pool is dropped.
    pub(super) fn submit(&self, source: &Arc<dyn Source>, work: Work) {
        self.0.submit(source, std::iter::once(work));
    }
}

impl Shared {
    fn submit(self: &Arc<Self>, source: &Arc<dyn Source>, work: impl ExactSizeIterator<Item = Work>) {
        self.outstanding.fetch_add(work.len(), Ordering::Relaxed);
        let is_many = work.len() > 1;
        let mut state = self.lock();
        let device = source.device();
        work.for_each(|work| state.queue.push(device, Queued { work, source: Arc::clone(source) }));
        self.start_threads(&mut state);
        let is_alone = state.threads.is_empty();
        drop(state);
        if is_many {
            self.wakeup.notify_all()
        } else {
            self.wakeup.notify_one()
        }
        if is_alone {
            // No thread could be started, or the pool is closing and this is one of its threads.
            self.work_off();
        }
    }

    fn start_threads(self: &Arc<Self>, state: &mut State) {
        while !state.is_closing && state.queue.ready() > state.idle && state.threads.len() < self.threads_max
        {
            let shared = Arc::clone(self);
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        crate::sys::signal::block_all();
        let mut bounce = Vec::new();
        let mut state = self.lock();
        loop {
            if let Some((device, queued)) = state.queue.begin() {
                state.idle -= 1;
                drop(state);
                self.run_one(queued, &mut bounce);
                state = self.lock();
                state.queue.end(device);
                state.idle += 1;
            } else if state.is_closing {
                return;
            } else {
                state = self.wakeup.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn work_off(&self) {
        let mut bounce = Vec::new();
        while let Some((device, queued)) = { self.lock().queue.begin() } {
            self.run_one(queued, &mut bounce);
            self.lock().queue.end(device);
        }
    }

    fn run_one(&self, queued: Queued, bounce: &mut Vec<u8>) {
        let Queued { mut work, source } = queued;
        let done = contained(|| match &mut work {
            Work::Fill(fill) => source.read(fill, bounce).map_err(|error| FlushError { written: 0, error }),
            Work::Flush(flush) => source.write(flush, bounce).map(|()| flush.len()),
        });
        let panicked = || FlushError { written: 0, error: io::Error::other("the source panicked") };
        let outcome = done.unwrap_or_else(|| Err(panicked()));
        // A sink that panics must not take the thread with it.
        contained(|| match (work, outcome) {
            (Work::Fill(fill), Err(failed)) => source.read_failed(fill, failed.into()),
            (work, outcome) => work.complete(outcome),
        });
        contained(|| drop(source)); // a user's, too
        // Release, partner: the Acquire in `ThreadPool`'s `drain`.
        self.outstanding.fetch_sub(1, Ordering::Release);
        self.wait_queue.wake();
    }
}

impl Drop for ThreadPool {
    /// The threads do the queued jobs first. A thread of the pool does not wait for itself. In a fork nothing is done.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        let mut state = self.shared.lock();
        state.is_closing = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.wakeup.notify_all();
        let me = std::thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != me) {
            // A thread that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outstanding = self.shared.outstanding.load(Ordering::Relaxed);
        f.debug_struct("Pool")
            .field("threads_max", &self.shared.threads_max)
            .field("outstanding", &outstanding)
            .finish_non_exhaustive()
    }
}

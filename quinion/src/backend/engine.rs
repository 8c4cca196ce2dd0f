//! Engine: how the files of one cache are read and written.
//!
//! One engine serves all files of a cache, so that one queue depth bounds the requests in flight and one leader fetches
//! all completions. It reads and writes by io_uring ([`Mechanism::Ring`]) or, where the kernel refuses that, by a few
//! threads ([`Mechanism::Threads`]).
//!
//! ```text
//!   LocalFile --submit--> Engine --> ring.rs      or, if there is no ring or the kernel takes it away,
//!                                --> threads.rs
//! ```
//!
//! A ring is made when the first file is opened or read: a cache that reads no file costs none.
//!
//! Invariants:
//!  1. An engine's memory goes away after everything in flight has ended.
//!  2. In a fork of the process that made it, an engine is left alone, dropping included.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use super::open_file::{BufferedFile, OpenFile};
use super::ring::RingDriver;
use super::threads::{BlockingSource, PoolSender, ReadAt, Source, ThreadPool, WriteAt};
use super::work::Work;
use super::{Fill, Flush, ReapMode, ReapOutcome, WaitQueue};
use crate::sys::ring::RingRefused;
use crate::units::PAGE_SIZE;

/// The least queue depth: a device that hangs leaves a place to others.
const QUEUE_DEPTH_MIN: usize = 2;

/// How files are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mechanism {
    /// io_uring if the system allows it, else threads. The environment variable `QUINION_IO`, if it is
    /// `ring` or `threads`, decides instead; it is for tests and bug reports.
    #[default]
    Auto,
    /// io_uring. If the system refuses, threads all the same; [`Engine::mechanism`] says so.
    Ring,
    /// A pool of threads.
    Threads,
}

/// How an engine reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineOptions {
    /// io_uring or threads.
    pub mechanism: Mechanism,
    /// The most requests in the kernel's hands at a time, 2 to 4096; values outside are brought inside. With 1, a
    /// device that hangs would leave no place to another.
    pub queue_depth: usize,
    /// The most bytes of one request; longer fills are cut. A multiple of 4096 up to 1 GiB; other values
    /// are rounded down, to at least 4096.
    pub io_bytes_max: usize,
    /// The most threads for files of one device, where threads read; at least 1. There are four times as many in all.
    pub threads: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { mechanism: Mechanism::Auto, queue_depth: 128, io_bytes_max: 512 << 10, threads: 4 }
    }
}

/// The mechanism that an engine reads by, and why.
#[derive(Debug)]
#[non_exhaustive]
pub enum ChosenMechanism {
    /// io_uring.
    Ring,
    /// Threads, as was asked for.
    Threads,
    /// Threads, because io_uring was refused.
    Fallback(RingRefused),
}

impl ChosenMechanism {
    /// "io_uring" or "threads".
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ring => "io_uring",
            Self::Threads | Self::Fallback(_) => "threads",
        }
    }
}

impl fmt::Display for ChosenMechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring => f.write_str("io_uring"),
            Self::Threads => f.write_str("threads, as asked for"),
            Self::Fallback(refused) => write!(f, "threads, because io_uring is refused ({refused})"),
        }
    }
}

/// The engine that reads the files of one cache. The files keep it alive.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(super) shared: Arc<EngineShared>,
}

impl Engine {
    /// An engine whose waiters sleep in `wait_queue`. Starts no thread.
    pub fn new(wait_queue: Arc<WaitQueue>, options: EngineOptions) -> Self {
        let requested = std::env::var("QUINION_IO").ok();
        Self { shared: Arc::new(EngineShared::new(wait_queue, options, requested.as_deref())) }
    }

    /// Makes a backend of a source that blocks, read by the engine's threads.
    pub fn serve<R: ReadAt + 'static>(&self, source: R) -> BlockingSource<R> {
        BlockingSource::new(source, Arc::clone(&self.shared.pool))
    }

    /// Makes a backend of a source that blocks, read and written by the engine's threads.
    pub fn serve_for_writing<R: WriteAt + 'static>(&self, source: R) -> BlockingSource<R> {
        BlockingSource::for_writing(source, Arc::clone(&self.shared.pool))
    }

    /// The mechanism that files are read by, and why; chosen now, if no file was opened yet.
    pub fn mechanism(&self) -> &ChosenMechanism {
        &self.shared.driver().chosen
    }

    /// The mechanism's name, "io_uring" or "threads"; before the first file is opened, that to be tried first.
    pub fn name(&self) -> &'static str {
        self.shared.name()
    }

    /// Waits until every fill and flush given to this engine has been completed; the devices bound how long. Not
    /// to be called from within [`FillSink::fill_completed`](super::FillSink::fill_completed) or its like.
    pub fn drain(&self) {
        self.shared.drain();
    }
}

#[derive(Debug)]
pub(super) struct EngineShared {
    driver: ManuallyDrop<OnceLock<Driver>>,
    pool: ManuallyDrop<Arc<ThreadPool>>,
    plan: DriverPlan,
    process: u32,
}

#[derive(Debug)]
struct Driver {
    ring: Option<RingDriver>,
    chosen: ChosenMechanism,
}

#[derive(Debug)]
struct DriverPlan {
    mechanism: Mechanism,
    wait_queue: Arc<WaitQueue>,
    queue_depth: usize,
    io_bytes_max: usize,
}

impl DriverPlan {
    fn make(&self) -> Driver {
        let Self { mechanism, wait_queue, queue_depth, io_bytes_max } = self;
        if *mechanism == Mechanism::Threads {
            return Driver { ring: None, chosen: ChosenMechanism::Threads };
        }
        match RingDriver::new(Arc::clone(wait_queue), *queue_depth, *io_bytes_max) {
            Ok(ring) => Driver { ring: Some(ring), chosen: ChosenMechanism::Ring },
            Err(refused) => Driver { ring: None, chosen: ChosenMechanism::Fallback(refused) },
        }
    }
}

impl EngineShared {
    fn new(wait_queue: Arc<WaitQueue>, options: EngineOptions, requested: Option<&str>) -> Self {
        let queue_depth = options.queue_depth.clamp(QUEUE_DEPTH_MIN, 4096);
        let io_bytes_max = options.io_bytes_max.clamp(PAGE_SIZE, 1 << 30) / PAGE_SIZE * PAGE_SIZE;
        let pool = ThreadPool::new(Arc::clone(&wait_queue), options.threads, queue_depth);
        let mechanism = mechanism_of(options.mechanism, requested);
        let plan = DriverPlan { mechanism, wait_queue, queue_depth, io_bytes_max };
        let (driver, pool) = (ManuallyDrop::new(OnceLock::new()), ManuallyDrop::new(Arc::new(pool)));
        Self { driver, pool, plan, process: std::process::id() }
    }

    fn driver(&self) -> &Driver {
        self.driver.get_or_init(|| self.plan.make())
    }

    fn ring(&self) -> Option<&RingDriver> {
        self.driver.get()?.ring.as_ref()
    }

    pub(super) fn name(&self) -> &'static str {
        let by_ring = match self.driver.get() {
            None => self.plan.mechanism != Mechanism::Threads,
            Some(driver) => driver.ring.as_ref().is_some_and(|ring| !ring.is_refused()),
        };
        if by_ring { "io_uring" } else { "threads" }
    }

    fn serving_ring(&self) -> Option<&RingDriver> {
        self.driver().ring.as_ref().filter(|ring| !ring.is_refused())
    }

    pub(super) fn submit(&self, file: &Arc<OpenFile>, fills: Vec<Fill>) {
        self.start(file, fills.into_iter().map(Work::Fill));
    }

    fn start(&self, file: &Arc<OpenFile>, work: impl ExactSizeIterator<Item = Work>) {
        match self.serving_ring() {
            Some(ring) => ring.submit(file, work),
            None => self.pool.submit(&(Arc::clone(file) as Arc<dyn Source>), work),
        }
    }

    /// The last partial page of a flush that is written directly goes by a thread, after the pages before it.
    pub(super) fn flush(&self, file: &Arc<OpenFile>, flushes: Vec<Flush>) {
        let mut straight = Vec::with_capacity(flushes.len());
        for flush in flushes {
            match file.tail_of(&flush) {
                None => straight.push(flush),
                Some(0) => start_tail(&self.pool.sender(), file, flush),
                Some(at) => {
                    // No request in flight may keep the engine or its pool: their drop waits for requests in flight.
                    let (sender, file) = (self.pool.sender(), Arc::clone(file));
                    straight.push(flush.split(at, move |tail| start_tail(&sender, &file, tail)));
                }
            }
        }
        if !straight.is_empty() {
            self.start(file, straight.into_iter().map(Work::Flush));
        }
    }

    pub(super) fn submit_with_reap(&self, file: &Arc<OpenFile>, fills: Vec<Fill>) {
        match self.serving_ring() {
            Some(ring) => ring.submit_with_reap(file, fills.into_iter().map(Work::Fill)),
            None => self.submit(file, fills),
        }
    }

    /// A ring hands its leadership on through one wait queue only.
    pub(super) fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        let wakes = self.driver().ring.as_ref().is_none_or(|ring| ring.wakes(wait_queue));
        assert!(wakes, "a file is read through the cache whose engine opened it; open it there");
    }

    pub(super) fn has_capacity(&self, file: &OpenFile, fills: usize) -> bool {
        match self.serving_ring() {
            Some(ring) => ring.has_capacity(file.device(), fills),
            None => self.pool.has_capacity(file.device(), fills),
        }
    }

    pub(super) fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.ring().map_or(ReapOutcome::Elsewhere, |ring| ring.reap(how, done))
    }

    pub(super) fn wants_leader(&self) -> bool {
        self.ring().is_some_and(RingDriver::wants_leader)
    }

    fn drain(&self) {
        if let Some(ring) = self.ring() {
            ring.drain();
        }
        self.pool.drain();
    }
}

impl Drop for EngineShared {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A fork: the threads are not here, and the ring and the memory are the parent's.
            return;
        }
        if let Some(ring) = self.ring() {
            ring.drain();
        }
        // SAFETY: neither is used again: this is the only place that drops them, and it runs once. The pool's own drop
        // does the queued jobs and joins its threads.
        unsafe {
            ManuallyDrop::drop(&mut self.driver);
            ManuallyDrop::drop(&mut self.pool);
        }
    }
}

fn start_tail(sender: &PoolSender, file: &Arc<OpenFile>, tail: Flush) {
    let by_cache: Arc<dyn Source> = Arc::new(BufferedFile(Arc::clone(file)));
    sender.submit(&by_cache, Work::Flush(tail));
}

/// The requested mechanism: the environment's choice stands in for [`Mechanism::Auto`].
fn mechanism_of(mechanism: Mechanism, requested: Option<&str>) -> Mechanism {
    match (mechanism, requested) {
        (Mechanism::Auto, Some("ring")) => Mechanism::Ring,
        (Mechanism::Auto, Some("threads")) => Mechanism::Threads,
        (mechanism, _) => mechanism,
    }
}

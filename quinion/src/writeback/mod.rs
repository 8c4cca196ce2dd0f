//! Write-back: dirty pages on their way to the file, and the promises that hold when they are there.
//!
//! ```text
//!   a write --note_dirty--> the list of files with dirty pages
//!                                |
//!     background (round.rs)      | by age, by amount, when asked       writes a little of each file in turn
//!     a sync (sync.rs)           | what was dirty when it began        tags, writes the tagged, waits, backend.sync
//!     a throttled writer         | its own file                        (throttle.rs)
//!     a need of memory           | anything                            (round.rs)
//!                                v
//!     run.rs   tree lock: take runs of dirty pages, give each a number --> Flush --> backend
//!              the end: bits, the account, the error --> wait_queue.wake()
//!     plan.rs  when, whom, how long: numbers in, decisions out
//!     stuck.rs which devices take nothing, so that writers of others do not wait for their pages
//! ```
//!
//! **What is guaranteed.** When a sync of some pages has returned `Ok`:
//!
//!  1. bytes written to these pages before the call are in the file, or bytes written over them since;
//!  2. it is durable: `backend.sync` began after the flushes of these pages had ended, and went well;
//!  3. the file is as long as its last such page needs;
//!  4. nothing of this file that any handle was promised has failed since the sync began.
//!
//! No order is promised: pages reach the device in any order; a page that is written while it is flushed may be there
//! in a mixture of both, until the flush that follows has ended. A caller that needs an order syncs in between.
//!
//! **Errors.** A flush that failed makes its pages dirty again. The background tries again with pauses that grow; a
//! sync tries at once. Each handle is told of each failure once (`errseq`), whoever met it; and a sync whose own pages
//! failed says so also to a handle that was told before, because `Ok` would not be true.
//!
//! **A sync of the device that fails** is worse: the kernel tells it once and forgets the pages it could not write, so
//! a second sync that succeeds says nothing of the first one's pages. So the account of a file
//! (`mapping/writeback_state.rs`) knows which pages were flushed since the last sync that went well. When one fails,
//! all of these are dirty again, those whose flushes end meanwhile among them, and the next sync writes them anew: its
//! `Ok` is true. Three ways were open. *To forget*, as Linux does, makes every later `Ok` a lie. *To keep* such pages
//! from being evicted until a sync has covered them would make all of memory unevictable for a program that never
//! syncs. The cache keeps a range for each run, and no page; pages that were evicted before a sync failed cannot be
//! written again, and are **lost** to it: the sync's error and the numbers say how much.
//!
//! **Memory.** Above a tenth of it the background writes all dirty pages it finds. Above a fifth a thread that dirties
//! more waits, before it takes a lock. A thread that finds all memory dirty starts write-back, and waits for it as for
//! fills. A device that takes nothing holds up its own writers: for those of others its pages do not count, up to a
//! bound that keeps all dirty pages together below nine tenths of memory (`plan.rs`).
//!
//! Nothing depends on the background's thread: a sync, a throttled writer and a thread that needs memory do it
//! themselves, and the thread that waits reaps. It is not the thread that makes room, and never waits for a device: one
//! that is stuck does not keep it from others.
//!
//! Invariants:
//!  1. A run is pages that follow each other in the file and in memory, of 1 MiB at most, and ends at the file's size:
//!     the size is looked at under the hold of the tree lock under which the pages are taken.
//!  2. A page is in one flush at a time, also if its folio was replaced by another meanwhile.
//!  3. A sync waits for no flush that began after all pages that it wants had been taken.
//!  4. A file with dirty pages is in the list, which keeps its mapping alive.
//!  5. No lock is held while a thread waits, but the Write lock of an append that is throttled; and when a backend is
//!     called, the invalidate lock besides, shared, which keeps the file from being cut or punched between the taking
//!     of pages and their flush.
//!
//! Not an invariant: that dirty pages stay below the limits: a writer may exceed them by its share. That is no more
//! than the ceiling, where a long call is throttled again, and a few megabytes.
//!
//! See also `mm/page-writeback.c` and `fs/fs-writeback.c` of Linux. This module differs: errors keep pages dirty, waits
//! are bounded, and no bandwidth is estimated: a waiting writer continues when enough has been written.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::arena::Arena;
use crate::backend::{Backend, WaitQueue};
use crate::background::{BackgroundTask, BackgroundThread, ThreadExit};
use crate::mapping::{DirtyPages, Mapping};
use crate::stats::Counters;
use crate::units::Millis;

mod attribute_checks;
pub mod plan;
mod round;
mod run;
mod stuck;
mod sync;
mod throttle;

use attribute_checks::AttributeChecks;
use plan::DirtyLimits;
pub use sync::SyncFailed;

/// How a cache writes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WritebackOptions {
    /// Above so many hundredths of memory, the background writes whatever is dirty. At most `throttle_share`.
    pub background_share: u8,
    /// Above so many hundredths of memory, a thread that dirties more waits. At most 80.
    pub throttle_share: u8,
    /// Pages that have been dirty for so long are written.
    pub expire: Duration,
    /// How often the background looks for pages that have been dirty for so long.
    pub interval: Duration,
    /// How long a writer is held up at most, each time that it dirties something. Also how long a call that needs
    /// memory waits for what is in flight while no page comes in, where it may be of a device that hangs; but that is
    /// a second at least. For a quarter of it a writer waits for the pages of another device that takes nothing.
    pub wait_max: Duration,
}

impl WritebackOptions {
    /// The background begins at a tenth of memory. A thread that dirties more waits at a fifth, for 5 seconds
    /// at most. Pages are written when they have been dirty for 30 seconds, which is checked every 5.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`WritebackOptions::background_share`].
    #[must_use]
    pub fn background_share(mut self, percent: u8) -> Self {
        self.background_share = percent;
        self
    }
    /// Sets [`WritebackOptions::throttle_share`].
    #[must_use]
    pub fn throttle_share(mut self, percent: u8) -> Self {
        self.throttle_share = percent;
        self
    }
    /// Sets [`WritebackOptions::expire`].
    #[must_use]
    pub fn expire(mut self, age: Duration) -> Self {
        self.expire = age;
        self
    }
    /// Sets [`WritebackOptions::interval`].
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }
    /// Sets [`WritebackOptions::wait_max`].
    #[must_use]
    pub fn wait_max(mut self, most: Duration) -> Self {
        self.wait_max = most;
        self
    }
}

impl Default for WritebackOptions {
    fn default() -> Self {
        Self {
            background_share: 10,
            throttle_share: 20,
            expire: Duration::from_secs(30),
            interval: Duration::from_secs(5),
            wait_max: Duration::from_secs(5),
        }
    }
}

/// The write-back of one cache.
pub struct Writeback {
    /// For flushes under way, which outlive a call.
    me: Weak<Writeback>,
    arena: Arc<Arena>,
    wait_queue: Arc<WaitQueue>,
    counters: Arc<Counters>,
    options: WritebackOptions,
    totals: Arc<DirtyPages>,
    clock: Instant,
    /// Files with dirty pages; and for a while those that had some.
    files: Mutex<VecDeque<Arc<Mapping>>>,
    /// Flushes that are under way, and that have ended.
    in_flight: AtomicU64,
    completed: AtomicU64,
    written: AtomicU64,
    awaited: AtomicU64,
    is_awake: AtomicBool,
    pace: Mutex<round::RoundInterval>,
    /// Devices that flushes are under way to, or that failed last.
    devices: Mutex<BTreeMap<u64, round::DeviceLoad>>,
    stuck: Mutex<stuck::StuckSnapshot>,
    attribute_checks: AttributeChecks,
    /// A thread of write-back's own, because its calls may block in a file system.
    background: BackgroundThread,
}

impl Writeback {
    /// The write-back of a cache over `arena`, whose waiters wait in `wait_queue`.
    pub fn new(
        arena: Arc<Arena>,
        wait_queue: Arc<WaitQueue>,
        counters: Arc<Counters>,
        options: WritebackOptions,
    ) -> Arc<Self> {
        let writeback = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            arena,
            wait_queue,
            counters,
            options,
            totals: Arc::default(),
            clock: Instant::now(),
            files: Mutex::default(),
            in_flight: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            written: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            is_awake: AtomicBool::new(false),
            pace: Mutex::default(),
            devices: Mutex::default(),
            stuck: Mutex::default(),
            attribute_checks: AttributeChecks::new(),
            background: BackgroundThread::named("quinion-flush"),
        });
        let task: Weak<Self> = Arc::downgrade(&writeback);
        writeback.background.add(task as Weak<dyn BackgroundTask>);
        writeback
    }

    /// How it was told to write back.
    pub fn options(&self) -> &WritebackOptions {
        &self.options
    }

    /// The numbers of all files, for [`Mapping::with_dirty_pages`].
    pub fn totals(&self) -> &Arc<DirtyPages> {
        &self.totals
    }

    /// The moment, for a caller that marks pages dirty.
    pub fn now(&self) -> Millis {
        Millis(self.clock.elapsed().as_millis() as u64)
    }

    /// The limits, by the bound in force.
    pub fn limits(&self) -> DirtyLimits {
        DirtyLimits::of(self.arena.pages_max(), &self.options)
    }

    /// Flushes that are under way, and how many have ended.
    pub fn flushes(&self) -> (u64, u64) {
        (self.in_flight.load(Ordering::Relaxed), self.completed.load(Ordering::Relaxed))
    }

    /// Pages of `mapping` became dirty. The caller does not hold the tree lock. Waits for nothing.
    pub fn note_dirty(&self, mapping: &Arc<Mapping>) {
        if !mapping.writeback().is_listed() {
            self.list(mapping);
        }
        if !self.is_awake.load(Ordering::Relaxed) && self.limits().begins_all(self.totals.total()) {
            self.wake();
        }
    }

    fn wake(&self) {
        // Not in step with `is_awake`: a wake-up that is missed so comes with the next page, or the next interval.
        if !self.is_awake.load(Ordering::Relaxed) {
            self.background.wake();
        }
    }

    #[cold]
    fn list(&self, mapping: &Arc<Mapping>) {
        let mut files = self.files();
        if !mapping.writeback().is_listed() {
            mapping.writeback().set_listed(true);
            files.push_back(Arc::clone(mapping));
            drop(files);
            self.background.wake();
        }
    }

    /// Forgets a file of which nothing is dirty or under write-back, if that is so.
    fn unlist_clean(&self, mapping: &Arc<Mapping>) {
        // A thread that marks a page has the tree lock: before this one, and then the page is seen here; or after it,
        // and then it finds that the file is not listed.
        let _tree = mapping.lock();
        if mapping.writeback().dirty_pages().total() == 0 {
            let mut files = self.files();
            files.retain(|other| !Arc::ptr_eq(other, mapping));
            mapping.writeback().set_listed(false);
        }
    }

    fn listed(&self) -> Vec<Arc<Mapping>> {
        self.files().iter().cloned().collect()
    }

    /// How many files are known to have been written to of late.
    pub fn files_listed(&self) -> usize {
        self.files().len()
    }

    fn files(&self) -> MutexGuard<'_, VecDeque<Arc<Mapping>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A backend that writes, with completions to be fetched and no thread that fetches them.
    pub fn idle_backend(&self) -> Option<Arc<dyn Backend>> {
        let files = self.files();
        files
            .iter()
            .filter_map(|mapping| mapping.writeback().writer())
            .find(|writer| writer.wants_leader())
            .cloned()
    }

    /// As [`Writeback::close`], and has the background's thread do `last` when it is at its end; waits for nothing.
    /// Where something was ever dirty there is that thread, unless the system had none: then `last` comes back.
    pub fn close_with(&self, last: ThreadExit) -> Result<(), ThreadExit> {
        self.background.close_with(last)
    }

    /// Ends the background's thread. Dirty pages stay dirty, unless another thread writes them.
    pub fn close(&self) {
        self.background.close();
        self.close_revalidations();
    }
}

impl fmt::Debug for Writeback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writeback")
            .field("options", &self.options)
            .field("dirty", &self.totals.dirty())
            .field("writeback", &self.totals.writeback())
            .finish_non_exhaustive()
    }
}

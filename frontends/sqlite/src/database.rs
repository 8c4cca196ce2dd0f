//! Database: the cached pages of one database file, for all connections of the process.
//!
//! ```text
//!   opened(times)         a connection was opened          pages of a file that was changed unseen are dropped
//!   begin(stamp)          a transaction's first read       pages to read from, if they are what the stamp says
//!   begin_writes(stamp)   the right to write was taken     the same, and from now on no stamp is compared
//!   written(range)        bytes were written to the file   they are not cached any more
//!   end_writes(stamp)     before the right is given back   the stamp that this process's writes have led to
//! ```
//!
//! Pages are in a *generation*: a file of the cache that no other generation shares. If a stamp differs from the last
//! one, another process has written, and the next reader gets a new generation; a reader that has the old one goes on
//! with it until its transaction ends, as it may. A read that was begun for an old generation cannot reach a new one.
//!
//! The right to write is the EXCLUSIVE lock on the file, or one that lets a process copy frames of the write-ahead log
//! to the file, or restart the log. One process has it at a time, so [`Database::written`] sees all writes meanwhile,
//! and no stamp has to be compared.
//!
//! A change by another program than SQLite, as `cp` over the file, no stamp shows for certain: the new bytes may have
//! the old change counter. For a connection that was open before, SQLite's own page cache is wrong, too. One that is
//! opened later compares the file's *times*, and so reads the new bytes. They are compared whenever the stamp changes,
//! and when own writes end.
//!
//! Invariants:
//!  1. A page of the present generation is as in the file, unless it is being written, in which case no transaction
//!     may read it (see `stamp.rs`).
//!  2. A page is cached whole, by one read of exactly this page, by a transaction that may read it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quinion::{Cache, Coherence, File, Hint, OpenOptions};

use crate::pages::{PageSource, SOURCE_BYTES};
use crate::place::Times;
use crate::stamp::{PAGE_LEAST, Stamp};

/// The cached pages of a database as one series of transactions may read them.
#[derive(Debug)]
pub struct Generation {
    file: File,
    page_bytes: u32,
}

impl Generation {
    /// Without pages. `None` if the cache has no room for a file, or the process was forked.
    fn new(cache: &Cache, stamp: &Stamp, fills: Arc<AtomicU64>) -> Option<Arc<Self>> {
        let mut options = OpenOptions::new();
        options.coherence(Coherence::Immutable);
        let file = cache.open_backend_with(Arc::new(PageSource::new(fills)), &options).ok()?;
        // No readahead: bytes that are read without a lock may be half written.
        file.advise(Hint::Random).ok()?;
        file.set_folio_orders(stamp.order(), stamp.order()).ok()?;
        Some(Arc::new(Self { file, page_bytes: stamp.page_bytes }))
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn is_page(&self, position: u64, len: usize) -> bool {
        len == self.page_bytes as usize
            && position.is_multiple_of(u64::from(self.page_bytes))
            && position < SOURCE_BYTES
    }

    /// Forgets the pages that `len` bytes at `position` touch. Returns whether all have gone.
    fn forget(&self, position: u64, len: u64) -> bool {
        let page = u64::from(self.page_bytes);
        let first = position / page * page;
        let end = position.saturating_add(len).div_ceil(page).saturating_mul(page).min(SOURCE_BYTES);
        let len = end.saturating_sub(first);
        if len == 0 {
            return true;
        }
        let left = self.file.dont_need(first, len).and_then(|_| self.file.residency(first, len));
        left.is_ok_and(|left| left.cached_pages == 0 && left.filling_pages == 0)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // The cache keeps pages of closed files, and this one is never opened again.
        let _ = self.file.dont_need(0, SOURCE_BYTES);
    }
}

#[derive(Debug)]
pub struct Database {
    /// The cache; `None` if the system refuses one.
    cache: Option<Cache>,
    now: Mutex<DatabaseState>,
    pub served: AtomicU64,
    /// Served reads of pages at a server, which had them or read them.
    pub by_server: AtomicU64,
    pub direct: AtomicU64,
    /// Served reads that were read from the file.
    fills: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Debug)]
pub struct Counters {
    /// Reads of pages that the cache had.
    pub hits: u64,
    /// Reads of pages that it read from the file.
    pub misses: u64,
    /// Reads of pages at a server, which had them or read them.
    pub by_server: u64,
    /// Reads past it, those of a part of a page among them.
    pub direct: u64,
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct DatabaseState {
    /// The stamp when the generation was last known to be right.
    stamp: Option<Stamp>,
    /// The file's times then.
    times: Option<Times>,
    generation: Option<Arc<Generation>>,
    writers: u32,
}

impl Database {
    /// Without pages. Without a cache it never has any.
    pub fn new(cache: Option<Cache>) -> Self {
        Self {
            cache,
            now: Mutex::default(),
            served: AtomicU64::new(0),
            by_server: AtomicU64::new(0),
            direct: AtomicU64::new(0),
            fills: Arc::default(),
        }
    }

    pub fn counters(&self) -> Counters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let generation = self.now().generation.clone();
        let cached = generation.and_then(|generation| generation.file.residency(0, SOURCE_BYTES).ok());
        let (misses, by_server) = (read(&self.fills), read(&self.by_server));
        Counters {
            hits: read(&self.served).saturating_sub(misses + by_server),
            misses,
            by_server,
            direct: read(&self.direct),
            bytes: cached.map_or(0, |cached| cached.cached_pages * u64::from(PAGE_LEAST)),
        }
    }

    /// Notes that a connection was opened, when these were the times, if they are known.
    pub fn opened(&self, times: Option<Times>) {
        let mut now = self.now();
        // While a connection of this process writes, they change, and it tells them in the end.
        if now.writers == 0 && (times.is_none() || now.times != times) {
            now.generation = None;
            now.times = times;
        }
    }

    /// The pages for a transaction that begins with this stamp; `None`: it reads by itself. `times` is called if the
    /// stamp changed.
    pub fn begin(&self, stamp: Stamp, times: impl FnOnce() -> Option<Times>) -> Option<Arc<Generation>> {
        let mut now = self.now();
        self.validate(&mut now, Some(stamp), times);
        now.generation.clone()
    }

    /// Notes that a connection has got the right to write. No stamp: the file is empty, or has pages that are not
    /// cached.
    pub fn begin_writes(
        &self,
        stamp: Option<Stamp>,
        times: impl FnOnce() -> Option<Times>,
    ) -> Option<Arc<Generation>> {
        let mut now = self.now();
        self.validate(&mut now, stamp, times);
        now.writers += 1;
        now.generation.clone().filter(|_| stamp.is_some())
    }

    /// Called before the right is given back. No stamp: nothing tells later that the file is unchanged.
    pub fn end_writes(&self, stamp: Option<Stamp>, times: Option<Times>) {
        let mut now = self.now();
        now.writers -= 1;
        (now.stamp, now.times) = (stamp, times);
        if stamp.is_none() {
            now.generation = None;
        }
    }

    /// Notes a write or a cut of `len` bytes at `position`, with the right to write. Returns the pages to read from
    /// then.
    pub fn written(&self, position: u64, len: u64) -> Option<Arc<Generation>> {
        let mut now = self.now();
        if now.generation.as_ref().is_some_and(|generation| !generation.forget(position, len)) {
            now.generation = now.stamp.and_then(|stamp| self.generation(&stamp));
        }
        now.generation.clone()
    }

    /// Makes the present generation one of this stamp.
    fn validate(&self, now: &mut DatabaseState, stamp: Option<Stamp>, times: impl FnOnce() -> Option<Times>) {
        if now.writers == 0 && now.stamp != stamp {
            now.generation = None;
            (now.stamp, now.times) = (stamp, times());
        }
        let Some(stamp) = stamp else {
            return;
        };
        if now.generation.as_ref().is_none_or(|generation| generation.page_bytes != stamp.page_bytes) {
            now.generation = self.generation(&stamp);
        }
    }

    fn generation(&self, stamp: &Stamp) -> Option<Arc<Generation>> {
        Generation::new(self.cache.as_ref()?, stamp, self.fills.clone())
    }

    fn now(&self) -> MutexGuard<'_, DatabaseState> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

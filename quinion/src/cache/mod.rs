//! Cache: the public API. One bounded memory, and the files that are read through it.
//!
//! A [`Cache`] is a handle: clones share one cache, which ends when the last clone, file and pin is gone. A [`File`]
//! (`file.rs`) is one stream through one file; `batch.rs` has several reads in one call. Two opens of one file share
//! folios, and a file that changed between two opens is read anew (**close-to-open**: an open sees all that was
//! written and closed before it). `file_table.rs` maps files to mappings, those of files without an open handle
//! included; `builder.rs` builds caches.
//!
//! ```text
//!   open(path) -> backend -> identity --table--> mapping of that file     version as known: share it
//!                                                                         changed: forget its folios, share it
//! ```
//!
//! **Memory files** (`mem_file.rs`) are in no table. **Pools** (`pool.rs`) are named shares of a cache; files
//! opened without one are of the default pool.
//!
//! When the cache ends, it writes all dirty pages back and waits for that, but does not sync them. A program that needs
//! durability, or the errors, calls [`File::sync_data`], [`Cache::sync_all`] or [`Cache::close`] before.
//!
//! **Close-to-open, with writers.** A file that is found changed by others loses its clean pages. Dirty pages stay, and
//! will be written over the changes of others.
//!
//! Invariants:
//!  1. No call of a forked child reaches the arena, a lock or a ring.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use crate::arena::Arena;
use crate::backend::{Attributes, Backend, Engine, OpenError, SyncKind, is_waking};
use crate::curve::{MissRatioCurve, Sampler};
use crate::error::{Error, ErrorKind, Repr, Result};
use crate::errseq::ErrorCursor;
use crate::filemap::{BackgroundReclaim, DeferredShrink, Filemap, Shrinker};
use crate::lease::Leases;
use crate::mapping::Mapping;
use crate::mapping::writeback_state::SyncRange;
use crate::readahead::Config;
use crate::reclaim::NODE_BYTES;
use crate::shmem::Shmem;
use crate::spill::SpillStats;
use crate::stats::Count;
use crate::sync::RankedMutex;
use crate::sys::fork::ForkGuard;
use crate::units::{EXTENT_SIZE, PAGE_SIZE, PageIndex, PoolNumber, pages_of_bytes};
use crate::workingset::RefaultCurve;
use crate::writeback::SyncFailed;
use crate::xarray::INDICES_MAX;
use quinion_disk::DiskStats;

mod batch;
mod blocking;
mod builder;
mod disk_copies;
mod file;
mod file_table;
mod first_open;
mod future;
mod guest;
pub mod hooks;
mod mem_file;
mod mem_populate;
mod open;
mod coherence;
mod io;
mod kernel_cache;
mod lock;
mod pool;
mod residency;
pub mod serving;
#[cfg(feature = "tokio")]
mod tokio_io;
mod write;

pub use crate::filemap::{ReadaheadUse, ResizeOutcome};
pub use crate::guest::GuestSlice;
pub use crate::stats::{StatDescription, Stats};
pub use batch::{BatchRead, BatchReadFuture};
pub use blocking::BlockingCall;
pub use builder::Builder;
use coherence::CoherenceState;
pub use coherence::{Coherence, CoherenceInForce};
use disk_copies::DiskCopies;
use file::PositionedRead;
pub use file::{File, ReadOptions};
use file_table::{FileTable, MappingLookup, REMOVAL_CHECKS_MAX};
use first_open::FirstOpen;
pub use future::{PinFuture, ReadFuture};
pub use guest::{GuestMemory, Image, ImageStats};
pub use io::Metadata;
pub use mem_file::{MemFile, MemFileOptions, MemFileStats};
use open::OpenMode;
pub use open::{Durability, OpenOptions};
use pool::PoolShare;
pub use pool::{Pool, PoolOptions, PoolStats};
pub use residency::{Residency, ResidentRange, ResidentRanges};
#[cfg(feature = "tokio")]
pub use tokio_io::AsyncFile;
pub use write::{BatchWrite, WriteFuture, WriteOptions};

/// A page cache of this process. Clones share it.
#[derive(Clone)]
pub struct Cache {
    pub(crate) shared: Arc<CacheInner>,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Cache");
        if !self.shared.process.is_forked() {
            text.field("memory_bytes", &self.shared.filemap.arena.stats().bound_bytes);
        }
        text.finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct CacheInner {
    pub(crate) filemap: Arc<Filemap>,
    shmem: Shmem,
    engine: Engine,
    leases: Arc<Leases>,
    /// Keeps the background tasks registered.
    _tasks: (Arc<DeferredShrink>, Arc<BackgroundReclaim>, Option<Arc<Shrinker>>),
    table: RankedMutex<FileTable>,
    pools: pool::Directory,
    pub(crate) process: ForkGuard,
    pub(crate) readahead: Config,
    idle_files_max: usize,
    /// Whether the descriptors of files without open handles are closed.
    parks: AtomicBool,
    disk: Option<Arc<DiskCopies>>,
    sampler: Option<Sampler>,
}

impl Cache {
    /// The least `memory` a cache can be built with, in bytes: 16 MiB.
    pub const MEMORY_MIN: u64 = Arena::MEMORY_MIN;

    /// Starts building a cache.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Opens a file for reading through the cache: a file with a fixed content on a file system, or a block device.
    /// If it changed since its pages were cached, they are forgotten.
    ///
    /// # Errors
    /// [`ErrorKind::Open`](crate::ErrorKind::Open): it cannot be opened, or is a directory, a pipe, a
    /// socket, a terminal, or a file of a pseudo file system such as procfs.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_in(path.as_ref(), OpenRequest { options: &OpenOptions::new(), pool: None })
    }

    /// Opens a file through the cache as `options` say. All handles of a file share its pages: bytes written by one are
    /// read at once by the others. If the file changed outside since its pages were cached, they are forgotten, except
    /// those written here and not written back: these are written over the changes of others. The first handle that
    /// writes opens the file a second time; pages are still read by the first.
    ///
    /// # Errors
    /// As [`Cache::open`]; [`ErrorKind::Open`](crate::ErrorKind::Open), also if it cannot be opened for writing;
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if it is to be made or emptied and not written; and
    /// those of [`File::set_len`] if it is to be emptied.
    pub fn open_with(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        self.open_in(path.as_ref(), OpenRequest { options, pool: None })
    }

    fn open_in(&self, path: &Path, request: OpenRequest<'_>) -> Result<File> {
        let mut file = self.open_path(path, request)?;
        let handle = Arc::get_mut(&mut file.handle).expect("no other thread has the handle yet");
        handle.path = Some(path.to_owned());
        Ok(file)
    }

    fn open_path(&self, path: &Path, request: OpenRequest<'_>) -> Result<File> {
        self.check_process()?;
        let options = request.options;
        options.check()?;
        let failed = |source| Error::from(Repr::Open { path: path.to_owned(), source });
        let engine = &self.shared.engine;
        let backend = match options.writes() {
            true => engine.open_for_writing(path, options.for_backend()),
            false if options.is_for_viewer() => engine.open_unseen(path),
            false => engine.open(path),
        };
        let backend = backend.map_err(|error| match error {
            OpenError::IsDirectory => Repr::IsDirectory { path: path.to_owned() }.into(),
            error => failed(Box::new(error)),
        })?;
        self.open_backend_in(Arc::new(backend), request).map_err(|error| match error.raw_os_error() {
            Some(code) if error.kind() == ErrorKind::Io => {
                failed(Box::new(std::io::Error::from_raw_os_error(code)))
            }
            _ => error,
        })
    }

    /// Opens the file behind a descriptor that is open for reading, without using the descriptor's own description:
    /// its offset and flags stay as they are.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn adopt(&self, descriptor: BorrowedFd<'_>) -> Result<File> {
        self.adopt_in(descriptor, OpenRequest { options: &OpenOptions::new(), pool: None })
    }

    /// As [`Cache::adopt`], opened as `options` say. The file is opened anew, with this process's rights, so a
    /// descriptor that a more privileged process opened for writing is not enough.
    ///
    /// # Errors
    /// As [`Cache::open_with`].
    pub fn adopt_with(&self, descriptor: BorrowedFd<'_>, options: &OpenOptions) -> Result<File> {
        self.adopt_in(descriptor, OpenRequest { options, pool: None })
    }

    fn adopt_in(&self, descriptor: BorrowedFd<'_>, request: OpenRequest<'_>) -> Result<File> {
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        self.open_path(Path::new(&path), request)
    }

    /// Opens the file behind `backend`. Backends with equal identities share pages.
    ///
    /// # Errors
    /// The backend cannot report the file's attributes, or no cell can be had for the mapping's record.
    pub fn open_backend(&self, backend: Arc<dyn Backend>) -> Result<File> {
        self.open_backend_in(backend, OpenRequest { options: &OpenOptions::new(), pool: None })
    }

    /// As [`Cache::open_with`], with a backend in place of a path. The parts of `options` about new files are ignored.
    ///
    /// # Errors
    /// As [`Cache::open_backend`] and [`Cache::open_with`]; [`ErrorKind::ReadOnly`](crate::ErrorKind::ReadOnly): the
    /// backend does not write.
    pub fn open_backend_with(&self, backend: Arc<dyn Backend>, options: &OpenOptions) -> Result<File> {
        options.check()?;
        self.open_backend_in(backend, OpenRequest { options, pool: None })
    }

    fn open_backend_in(&self, backend: Arc<dyn Backend>, request: OpenRequest<'_>) -> Result<File> {
        self.check_process()?;
        let OpenRequest { options, pool } = request;
        if options.writes() && !backend.can_write() {
            return Err(Repr::CannotWrite { backend: backend.name() }.into());
        }
        let backend = match &self.shared.disk {
            Some(disk) => disk.before(backend),
            None => backend,
        };
        backend.attach(&self.shared.filemap.wait_queue);
        if options.is_uncached() && !backend.can_drop_behind() {
            return Err(Repr::CannotDropBehind { backend: backend.name() }.into());
        }
        self.shared.release_removed(REMOVAL_CHECKS_MAX);
        // Ends after the handle, whatever fails.
        let FileToOpen { mapping, watch, attributes, turn } = self.file_to_open(&backend)?;
        // From here on a failure closes the handle, which has entered.
        let (cursor, access) = (mapping.writeback().errors().sample(), options.access());
        let shared = Arc::clone(&self.shared);
        let pool = pool.cloned();
        let handle =
            Handle { shared, mapping, pool, watch, access, cursor, path: None, lock: OnceLock::new() };
        handle.watch.enter(access, &attributes)?;
        if turn.is_some() && handle.mapping.renewals() == 0 {
            // Looked at anew: when it was before, another handle may have had the file, which has written it and was
            // forgotten. In this turn no other handle writes it.
            let now = backend.attributes().map_err(Repr::Attributes)?;
            handle.shared.filemap.renew(&handle.mapping, &now)?;
        }
        let file = File::new(Arc::new(handle));
        file.set_uncached(options.is_uncached())?;
        if options.empties() && !file.is_empty() && backend.can_grow() {
            file.empty_by(&backend)?;
        }
        // Nothing fails from here on. A backend whose open failed is its caller's again, and must not be called.
        if options.writes() {
            file.handle.mapping.writeback().set_writer(backend);
        }
        drop(turn);
        Ok(file)
    }

    /// The file behind `backend`, with one handle more. Waits for an open of it that is its first.
    fn file_to_open(&self, backend: &Arc<dyn Backend>) -> Result<FileToOpen<'_>> {
        loop {
            let attributes = backend.attributes().map_err(Repr::Attributes)?;
            let (mapping, watch, turn) = match self.shared.mapping_of(backend, &attributes)? {
                MappingLookup::Known(mapping, watch) => (mapping, watch, None),
                MappingLookup::Made(mapping, watch, turn) => (mapping, watch, Some(turn)),
                MappingLookup::IsOpening(end) => {
                    end.wait();
                    continue;
                }
            };
            return Ok(FileToOpen { mapping, watch, attributes, turn });
        }
    }

    /// Gives up all read leases ([`Coherence::Lease`](crate::Coherence::Lease)); cached pages stay. Call it before
    /// the process is stopped, as by job control: a writer in another process waits for a stopped one for
    /// `/proc/sys/fs/lease-break-time` seconds (45 by default). For the next second no lease is taken: this process
    /// checks the file before each read, and viewers leave it to the kernel. Waits only for locks.
    pub fn give_up_leases(&self) {
        if !self.shared.process.is_forked() {
            self.shared.leases.give_up_all();
        }
    }

    /// Changes the cache's bound to `bytes` bytes while it is in use: up to [`Builder::memory_max`], and down to
    /// [`Cache::MEMORY_MIN`], or the least that leaves room beside its tables.
    ///
    /// A smaller bound empties whole extents of 2 MiB, the cheapest first, and gives their memory back to the
    /// machine; readers go on meanwhile, here and in viewers. Takes some milliseconds for each hundred extents, waits
    /// for locks of files, and up to half a second for reads in flight. Memory kept by pins is
    /// [`ResizeOutcome::slack_bytes`], until they are dropped. Readahead's window and the largest folio stay as they
    /// were built.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the bound is out of range, or too small for the
    /// pools' protected minima, and nothing was changed. [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn resize(&self, bytes: u64) -> Result<ResizeOutcome> {
        self.check_process()?;
        // Held until the bound is in force; a thread that protects more then checks against the new one.
        let pools = self.shared.pools.lock();
        let least = self.shared.filemap.bound().memory_for_protected();
        if bytes < least {
            let text = format!(
                "cannot resize the cache to {bytes} bytes: what its pools protect needs {least}; \
                 protect less first, by Pool::set_protected"
            );
            return Err(Repr::InvalidInput(text).into());
        }
        let resized = self.shared.filemap.bound().resize(bytes, || drop(pools));
        resized.map_err(|e| Repr::Resize(Box::new(e)).into())
    }

    /// Takes memory from the machine now, until the cache has `bytes` bytes, or its bound, or there is no more; and
    /// returns how many it has. Readers go on meanwhile.
    ///
    /// By itself a cache takes memory as it fills, 2 MiB at a time, and reads that fill it wait for that: a quarter of
    /// a millisecond, or some milliseconds on a virtual machine whose host has to find the memory first. A program
    /// whose first reads are to be fast calls this when it starts, on a thread of its own. Memory that is given back
    /// later ([`Cache::resize`], [`Builder::pressure`]) is not taken again by this.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn populate(&self, bytes: u64) -> Result<u64> {
        self.check_process()?;
        Ok(self.shared.filemap.grow_to(bytes))
    }

    /// Makes durable all writes by handles of this cache, also closed ones: [`File::sync_all`] of each file in turn
    /// that was written and is known still. A file that was forgotten ([`Builder::idle_files_max`]) was durable then,
    /// or had no name any more. All files are tried, even if one fails.
    ///
    /// # Errors
    /// The first error, as of [`File::sync_all`]; also one of an earlier write-back that was reported to no handle.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn sync_all(&self) -> Result<()> {
        self.check_process()?;
        let files = self.shared.table.lock().mappings();
        let written = files.into_iter().filter(|mapping| mapping.writeback().writer().is_some());
        let synced = written.map(|mapping| {
            let cursor = mapping.writeback().errors().sample();
            let pages = PageIndex(0)..PageIndex(INDICES_MAX);
            let range = SyncRange { kind: SyncKind::All, pages: &pages };
            let sync = || self.shared.filemap.supply.writeback.sync(&mapping, range, &cursor);
            catch_unwind(AssertUnwindSafe(sync))
        });
        // All are tried before the first error is returned, or a backend's panic goes on.
        let (mut failed, mut panics) = (None, Vec::new());
        for tried in synced.collect::<Vec<_>>() {
            match tried {
                Ok(synced) => failed = failed.or(synced.err()),
                Err(panic) => panics.push(panic),
            }
        }
        if let Some(panic) = panics.pop() {
            std::mem::forget(panics); // their drops are foreign code
            self.shared.keep_untold(failed.and_then(|failed| failed.error.raw_os_error()));
            resume_unwind(panic);
        }
        let untold = || self.shared.untold_error().map(std::io::Error::from_raw_os_error);
        match failed.or_else(|| untold().map(|error| SyncFailed { error, lost_pages: 0 })) {
            Some(failed) => Err(Repr::Sync { source: Box::new(failed) }.into()),
            None => Ok(()),
        }
    }

    /// Ends this handle of the cache, and returns whether all writes are durable, which dropping it does not. The cache
    /// itself ends with its last handle, file or pool.
    ///
    /// # Errors
    /// As [`Cache::sync_all`]. The handle is gone all the same; unwritten pages are lost when the cache ends.
    pub fn close(self) -> Result<()> {
        self.sync_all()
    }

    /// Numbers of this cache; in a forked child all of them are 0.
    pub fn stats(&self) -> Stats {
        if self.shared.process.is_forked() { Stats::default() } else { self.shared.stats() }
    }

    /// The use of pages that were fetched before a read asked for them. Looks at one byte for each page of
    /// the cache, some ten microseconds for each gigabyte, and takes no lock: while others read, the numbers may not
    /// quite add up. In a forked child all of them are 0.
    pub fn readahead_use(&self) -> ReadaheadUse {
        if self.shared.process.is_forked() {
            return ReadaheadUse::default();
        }
        self.shared.filemap.readahead_use()
    }

    /// How many of the pages that were evicted and came back a larger cache would have kept. Shadow entries take at
    /// most 1.8 % of memory, and hints and changes of files remove some, so the true numbers are these or more. Costs a
    /// dozen loads and no lock. In a forked child it is empty.
    pub fn refaults(&self) -> RefaultCurve {
        if self.shared.process.is_forked() {
            return RefaultCurve::default();
        }
        self.shared.filemap.supply.reclaim.refaults()
    }

    /// The share of page reads that would miss in a cache of any size. It is estimated from a sample of all that this
    /// process read by this cache's files (not viewers in others), for a cache that evicts what was read longest ago
    /// and reads nothing ahead; measured by [`Stats::data_bytes`], this cache may miss less. `None` without
    /// [`Builder::miss_ratio_curve`], and in a forked child. Readers of sampled pages wait meanwhile.
    pub fn miss_ratio_curve(&self) -> Option<MissRatioCurve> {
        let sampler = self.shared.sampler.as_ref().filter(|_| !self.shared.process.is_forked())?;
        Some(sampler.curve(self.shared.filemap.counters.sum(Count::PageReads)))
    }

    /// Whether every invariant of the cache holds; for a bug report. Slow: takes each mapping's lock in turn and
    /// looks at every page's descriptor.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.check_process().map_err(|e| e.to_string())?;
        let reclaim = &self.shared.filemap.supply.reclaim;
        let mappings = reclaim.mappings();
        mappings.iter().try_for_each(|mapping| mapping.check())?;
        if let Some(spill) = &self.shared.filemap.supply.spill {
            spill.check(mappings.iter().flat_map(|mapping| mapping.spilled_values()))?;
        }
        reclaim.check()?;
        self.shared.filemap.arena.check()
    }

    /// Counts and sizes of the spill file; `None` if there is none.
    pub fn spill_stats(&self) -> Option<SpillStats> {
        self.shared.filemap.supply.spill.as_ref().map(|spill| spill.stats())
    }

    /// Counts and sizes of the disk tier; `None` if there is none.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        self.shared.disk.as_ref().map(|disk| disk.stats())
    }

    /// Why the disk tier is not used, for people: its disk failed. Nothing is lost by that.
    pub fn disk_trouble(&self) -> Option<String> {
        self.shared.disk.as_ref()?.trouble()
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        if self.shared.process.is_forked() { Err(Repr::Forked.into()) } else { Ok(()) }
    }
}

impl CacheInner {
    fn note_read(&self, mapping: &Mapping, position: u64, bytes: usize) {
        if let Some(sampler) = &self.sampler
            && bytes > 0
        {
            let (first, end) = (PageIndex::of_byte(position), pages_of_bytes(position + bytes as u64));
            self.filemap.counters.add(Count::PageReads, end - first.0);
            sampler.note(mapping.id(), first, end - first.0);
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let (filemap, counters) = (&self.filemap, &self.filemap.counters);
        let (supply, arena) = (&filemap.supply, filemap.arena.stats());
        // A statement of its own: the guard in the value of a field lives until all fields have theirs.
        let files = self.table.lock().len() as u64;
        // Side by side: an event between two of them would be missing in their difference.
        let (inserted, ahead) = (counters.sum(Count::Inserted), counters.sum(Count::Readahead));
        let will_need = counters.sum(Count::WillNeed);
        let counted = Stats::counted(counters);
        let mut stats = Stats {
            memory_bytes: arena.bound_bytes,
            memory_max_bytes: arena.max_bytes,
            slack_bytes: arena.slack_bytes,
            returned_bytes: arena.returned_bytes,
            pinned_bytes: arena.pinned_bytes,
            grown_bytes: arena.grown_bytes + arena.control_bytes,
            data_bytes: arena.data_bytes,
            guest_bytes: arena.guest_bytes,
            index_bytes: arena.cell_bytes,
            free_bytes: arena.free_pages * PAGE_SIZE as u64,
            huge_bytes: arena.extents_huge * EXTENT_SIZE as u64,
            files,
            memory_files: self.shmem.files(),
            unevictable_pages: supply.reclaim.unevictable_pages(),
            reads: counted.hits + counted.misses,
            dirty_pages: supply.writeback.totals().dirty(),
            writeback_pages: supply.writeback.totals().writeback(),
            inserted_pages: inserted,
            asked_pages: inserted.saturating_sub(ahead),
            guessed_pages: ahead.saturating_sub(will_need),
            will_need_pages: will_need,
            readahead_pages: filemap.readahead_pages(),
            shadow_bytes: supply.reclaim.shadow_nodes().count() * NODE_BYTES,
            in_flight: filemap.in_flight(),
            mechanism: self.engine.name(),
            ..counted
        };
        if let Some(spill) = supply.spill.as_ref().map(|spill| spill.stats()) {
            stats.spilled_pages = spill.spilled_pages;
            stats.spilled_in_pages = spill.spilled_in_pages;
            stats.spill_read_pages = spill.read_pages;
            stats.spill_pages = spill.pages;
            stats.spill_bytes = spill.bytes;
            stats.spill_errors = spill.write_errors + spill.read_errors;
        }
        stats.cached_pages = stats.inserted_pages.saturating_sub(stats.removed_pages());
        stats
    }
}

impl Drop for CacheInner {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return;
        }
        let (filemap, engine) = (Arc::clone(&self.filemap), self.engine.clone());
        let (leases, disk) = (Arc::clone(&self.leases), self.disk.clone());
        let mappings = self.table.lock().take();
        let end = move || {
            leases.close();
            // A failure to write is counted; no handle is left to report it.
            filemap.supply.writeback.write_out_all();
            filemap.supply.background.close();
            filemap.supply.spill.iter().for_each(|spill| spill.drain());
            // No future is left: each borrows a file, which keeps the cache.
            filemap.wait_queue.close();
            // Requests in flight write into the arena: it ends before anything else does.
            engine.drain();
            disk.iter().for_each(|disk| disk.end(disk_copies::END_MAX));
            mappings.iter().for_each(|mapping| filemap.supply.reclaim.remove_mapping(mapping.id()));
        };
        if is_waking() {
            // A waker held the cache last, and the fill that woke it ends when this thread has returned: not to be
            // waited for here. Where something is dirty there is a thread already.
            let Err(end) = self.filemap.supply.writeback.close_with(Box::new(end)) else { return };
            if std::thread::Builder::new().name("quinion-end".into()).spawn(end).is_err() {
                // There is no thread to be had. Requests in flight keep the memory they need.
                self.filemap.supply.writeback.start_all();
            }
        } else {
            end();
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct OpenRequest<'a> {
    options: &'a OpenOptions,
    /// `None`: the default pool.
    pool: Option<&'a Arc<PoolShare>>,
}

/// A file in the table, for which one handle more is counted.
struct FileToOpen<'a> {
    mapping: Arc<Mapping>,
    watch: Arc<CoherenceState>,
    /// To enter it with.
    attributes: Attributes,
    /// If this is the file's first open.
    turn: Option<FirstOpen<'a>>,
}

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) shared: Arc<CacheInner>,
    pub(crate) mapping: Arc<Mapping>,
    /// `None`: the default pool.
    pool: Option<Arc<PoolShare>>,
    watch: Arc<CoherenceState>,
    access: OpenMode,
    /// How far this handle has been told of errors of writing.
    cursor: ErrorCursor,
    path: Option<PathBuf>,
    lock: OnceLock<OwnedFd>,
}

impl Handle {
    fn pool_number(&self) -> PoolNumber {
        self.pool.as_ref().map_or(PoolNumber::DEFAULT, |share| share.number)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.shared.process.is_forked() {
            self.watch.leave(self.access);
            self.shared.release(&self.mapping, &self.watch, self.access.coherence);
        }
    }
}

//! Cache: the public API. One bounded memory, and the files that are read through it.
//!
//! A [`Cache`] is a handle: clones share one cache, which ends when the last
//! clone, file and pin is gone. A [`File`] is one stream through one file; it
//! is in `file.rs` beside, and several reads in one call are in `batch.rs`.
//! The table here says which file is which mapping: two opens of one file share
//! folios, and a file that changed between two opens is read anew
//! (**close-to-open**: an open sees all that was written and closed before it).
//!
//! ```text
//!   open(path) -> backend -> identity --table--> mapping of that file     version as known: share it
//!                                                                         changed: forget its folios, share it
//! ```
//!
//! A cache has **memory files**, in `mem_file.rs`, which are in no table: each is known to its handles.
//!
//! A cache has **pools**, named shares of it, in `pool.rs`; what is opened without one is of the default pool.
//!
//! A mapping without open handles is kept for its folios; the oldest such one goes when there are too many, because
//! each keeps a descriptor of the system open. (Not in a cache that reads on behalf of other programs: there it is
//! **parked**, without a descriptor, and known by its mount, identity and version; or forgotten, where these are not
//! conclusive.) One whose file was removed goes soon, because its space is not free before: each open, and each end
//! of a handle, checks some of them. If it was written, its dirty pages are written back when it is closed, and it
//! stays until that has ended.
//!
//! When the cache ends, it writes all dirty pages back and waits for that, but does not sync them. A program that needs
//! durability, or the errors, calls [`File::sync_data`], [`Cache::sync_all`] or [`Cache::close`] before.
//!
//! **Close-to-open, with writers.** A file that is found changed by others loses its clean pages. Dirty pages stay: it
//! was written here, and will be written over whatever others did there.
//!
//! Invariants:
//!  1. At most one mapping for an identity.
//!  2. No call of a forked child reaches the arena, a lock or a ring.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::arena::{Arena, ArenaError, ArenaOptions, ArenaShare, Reservation, Swap, default_memory};
use crate::backend::{
    Attributes, Backend, DiskTier, Engine, EngineOptions, Identity, Mechanism, OpenError, ParkedBackend,
    ReapMode, SyncKind, WaitQueue, is_waking,
};
use crate::curve::{MissRatioCurve, Sampler};
use crate::error::{Error, ErrorKind, Repr, Result};
use crate::errseq::ErrorCursor;
use crate::filemap::{BackgroundReclaim, DeferredShrink, Filemap, Shrinker};
use crate::lease::Leases;
use crate::mapping::{IndexHooks, Mapping, NewMapping};
use crate::policy::{DEFAULT_POLICY, NewPolicy};
use crate::pressure::Pressure;
use crate::readahead::{Config, ReadaheadStyle};
use crate::reclaim::NODE_BYTES;
use crate::shmem::Shmem;
use crate::spill::{Spill, SpillOptions, SpillStats};
use crate::stats::Count;
use crate::sync::{LockWait, Rank, RankedMutex};
use crate::sys::fork::ForkGuard;
use crate::units::{
    EXTENT_PAGES, EXTENT_SIZE, MappingId, Order, Orders, PAGE_SIZE, PageIndex, PoolNumber, pages_of_bytes,
};
use crate::workingset::RefaultCurve;
use crate::writeback::WritebackOptions;
use crate::xarray::INDICES_MAX;
use quinion_disk::{DiskOptions, DiskStats};

mod batch;
mod blocking;
mod disk_copies;
mod file;
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
#[cfg(feature = "tokio")]
mod tokio_io;
mod write;

pub use crate::filemap::{ReadaheadUse, ResizeOutcome};
pub use crate::guest::GuestSlice;
pub use crate::stats::{StatDescription, Stats};
pub use batch::{BatchRead, BatchReadFuture};
pub use blocking::BlockingCall;
use blocking::BlockingCalls;
pub(crate) use coherence::CoherenceState;
use coherence::ObservedTimes;
pub use coherence::{Coherence, CoherenceInForce};
use disk_copies::{DiskCopies, StoreOpener};
pub use file::{File, ReadOptions};
pub use future::{PinFuture, ReadFuture};
pub use guest::{GuestMemory, Image, ImageStats};
pub use io::Metadata;
pub use mem_file::{MemFile, MemFileOptions, MemFileStats};
use open::Access;
pub use open::{Durability, OpenOptions};
use pool::PoolShare;
pub use pool::{Pool, PoolOptions, PoolStats};
pub use residency::{Residency, ResidentRange, ResidentRanges};
#[cfg(feature = "tokio")]
pub use tokio_io::AsyncFile;
pub use write::{BatchWrite, WriteFuture, WriteOptions};

/// How many files without open handles are checked at a time for having been removed.
const LOOKED_AT: usize = 4;
/// How long a file without open handles keeps its descriptor, if its mount has no number of its own.
const LINGERS: Duration = Duration::from_secs(1);
/// How long the end of the last handle waits for readahead that is under way in the file, if descriptors are not kept;
/// and how often it looks.
const CLOSING_MAX: Duration = Duration::from_millis(50);
const CLOSING_PAUSE: Duration = Duration::from_micros(200);
/// How long [`Cache::release_idle`] waits for what is in flight.
const RELEASE_MAX: Duration = Duration::from_millis(500);
/// The largest readahead window that can be asked for, in bytes.
const READAHEAD_BYTES_MAX: u64 = 8 << 20;

/// A page cache of this process. Cheap to clone; clones share it.
#[derive(Clone)]
pub struct Cache {
    pub(crate) shared: Arc<CacheInner>,
}

impl fmt::Debug for Cache {
    /// Its size alone; [`Cache::stats`] says the rest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Cache");
        if !self.shared.process.is_forked() {
            text.field("memory_bytes", &self.shared.filemap.arena.stats().bound_bytes);
        }
        text.finish_non_exhaustive()
    }
}

/// What the clones of a cache share.
#[derive(Debug)]
pub(crate) struct CacheInner {
    pub(crate) filemap: Arc<Filemap>,
    /// The paths of memory files.
    shmem: Shmem,
    engine: Engine,
    leases: Arc<Leases>,
    /// Keep the background tasks known.
    _tasks: (Arc<DeferredShrink>, Arc<BackgroundReclaim>, Option<Arc<Shrinker>>),
    table: RankedMutex<Table>,
    pools: pool::Directory,
    pub(crate) process: ForkGuard,
    pub(crate) readahead: Config,
    idle_files_max: usize,
    /// Whether the descriptors of files without open handles are closed.
    parks: AtomicBool,
    /// What is kept on a local disk as well, if there is one for it.
    disk: Option<Arc<DiskCopies>>,
    /// Follows what is read, if a miss-ratio curve is wanted.
    sampler: Option<Sampler>,
    /// Makes calls that wait, for futures.
    blocking: BlockingCalls,
}

/// Which mapping is which file's.
#[derive(Debug, Default)]
struct Table {
    files: HashMap<Identity, KnownFile>,
    /// Mappings without handles, by when they became so.
    idle: BTreeMap<u64, Identity>,
    idle_clock: u64,
    /// From which on idle mappings have not been looked at, whether their files were removed.
    looked_from: u64,
    last_id: u32,
    /// What stands for files whose descriptors were let go of, and may be open for what is in flight.
    closing: Vec<ParkedBackend>,
    /// Idle mappings that are forgotten soon: since when they are idle, by the table's clock and by the system's.
    lingering: Vec<(u64, Instant)>,
}

#[derive(Debug)]
struct KnownFile {
    mapping: Arc<Mapping>,
    watch: Arc<CoherenceState>,
    handles: usize,
    idle_since: Option<u64>,
    /// While it has no descriptor: by which mount its file was open.
    parked_on: Option<u64>,
}

/// What is to be done, without the lock, when the table has changed: mappings that are forgotten, and backends whose
/// place was taken.
#[derive(Debug, Default)]
struct DeferredRelease {
    mappings: Vec<Arc<Mapping>>,
    backends: Vec<Arc<dyn Backend>>,
}

/// How to build a [`Cache`].
#[derive(Clone, Debug)]
pub struct Builder {
    memory: Option<u64>,
    /// `None`: as `memory`.
    memory_max: Option<u64>,
    /// `None`: half of `memory`.
    pinned_max: Option<u64>,
    background_reclaim: bool,
    swap: Swap,
    pressure: Option<Pressure>,
    readahead: u64,
    readahead_style: ReadaheadStyle,
    idle_files_max: usize,
    folio_order_min: Order,
    /// `None`: as the memory allows.
    folio_order_max: Option<Order>,
    engine: EngineOptions,
    /// What takes steps of the index over, for a benchmark or a test; see `hooks.rs`.
    index_hooks: Option<&'static dyn IndexHooks>,
    policy: NewPolicy,
    miss_ratio_curve: bool,
    writeback: WritebackOptions,
    spill: Option<(SpillOptions, Option<Arc<dyn Backend>>)>,
    disk: Option<DiskOptions>,
}

impl Builder {
    /// The byte bound: data, descriptors, index nodes, mapping records, viewers' pages and reads in flight
    /// together never exceed it. At least [`Cache::MEMORY_MIN`]; rounded down to whole 2 MiB. Without it, a
    /// quarter of what the machine or the container allows.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }
    /// The most that [`Cache::resize`] can ever give the cache, in bytes. At least `memory`, which is the default. Its
    /// address space is reserved, and the tables for it take their memory at once: 0.9 % of it, out of `memory`.
    #[must_use]
    pub fn memory_max(mut self, bytes: u64) -> Self {
        self.memory_max = Some(bytes);
        self
    }
    /// Whether a background thread evicts before pages are needed, so that a reader that misses does not have to: it
    /// keeps up to a 128th of the cache free, 32 MiB at most. While the cache is not full yet, it takes memory of the
    /// machine ahead of readers: an eighth of what the cache has, 16 MiB at most. It starts when it is first needed.
    /// The default is `true`. A cache below 64 MiB has no such thread.
    #[must_use]
    pub fn background_reclaim(mut self, background: bool) -> Self {
        self.background_reclaim = background;
        self
    }
    /// The most memory that pins may keep, in bytes; a pin that reaches beyond fails at once with
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory). A folio counts whole, and once however many pins it has.
    /// The default is half of `memory`; more than `memory` means all of it, and then readers may find no page to read
    /// into. A resize keeps the share, and of what guests take (guest memory and images) pins have none.
    #[must_use]
    pub fn pinned_max(mut self, bytes: u64) -> Self {
        self.pinned_max = Some(bytes);
        self
    }
    /// Whether the system must keep the cache's memory in memory and never swap it out (`mlock2`, each page from
    /// the moment it is there). The default is no. The system counts all of `memory_max` and the 2 MiB of the control
    /// file against `RLIMIT_MEMLOCK` when the cache is built, unless the process has `CAP_IPC_LOCK`; what does not
    /// fit is an error then, and none ever after. Viewers read the same pages.
    ///
    /// The cache's memory is left out of core dumps and of forked children in any case.
    #[must_use]
    pub fn lock_memory(mut self, lock: bool) -> Self {
        self.swap = if lock { Swap::Locked } else { Swap::Allowed };
        self
    }
    /// Has the cache shrink while the machine or its control group is short of memory, before the kernel kills, and
    /// come back slowly to `memory`, or what the last [`Cache::resize`] said, when there is room again. A thread looks
    /// twice a second: at the pressure stall information of the control group or the machine, and at what is left
    /// below the tightest limit. Without it, a cache stays as large as it was told.
    #[must_use]
    pub fn pressure(mut self, pressure: Pressure) -> Self {
        self.pressure = Some(pressure);
        self
    }
    /// The largest readahead window, in bytes; 0 reads no page that was not asked for. At most 1 part in 32
    /// of `memory` is used, and at most 8 MiB; twice that for a handle with [`Hint::Sequential`](crate::Hint). The
    /// default is 4 MiB.
    #[must_use]
    pub fn readahead(mut self, bytes: u64) -> Self {
        self.readahead = bytes;
        self
    }
    /// How readahead decides. The default knows several streams of each handle apart; the other way is there to
    /// compare with.
    #[must_use]
    pub fn readahead_style(mut self, style: ReadaheadStyle) -> Self {
        self.readahead_style = style;
        self
    }
    /// How many files without open handles keep their pages, and a descriptor of the system each, or up to three if
    /// they were written: for writing, too, so that other processes get no lease on them. One that was removed, on a
    /// local file system, is released a few opens and closes later, and its space is free then. With 0 none is kept,
    /// but for what is still to be written. The default is 1024, or a quarter of the descriptors this process may
    /// have.
    #[must_use]
    pub fn idle_files_max(mut self, files: usize) -> Self {
        self.idle_files_max = files;
        self
    }
    /// The largest folio a fill makes, as log2 of its pages, 0 to 9; larger values mean 9. Larger folios make
    /// hits on large files cheaper and eviction coarser. Only streams and long reads make large ones: a short
    /// read somewhere is cached by single pages whatever this is. The default is the largest that is no
    /// more than a 256th of `memory`: 4 with 16 MiB, 9 from 512 MiB on. Lowers the smallest folio to itself.
    #[must_use]
    pub fn folio_order_max(mut self, order: u8) -> Self {
        let order = Order(order).min(Order::MAX);
        self.folio_order_max = Some(order);
        self.folio_order_min = self.folio_order_min.min(order);
        self
    }
    /// The smallest folio a fill makes, as log2 of its pages, 0 to 9; larger values mean 9. The default is 0. Reads are
    /// then rounded to whole such folios, and these are never split: for devices and files whose pieces are larger than
    /// a page. Raises the largest folio to itself.
    #[must_use]
    pub fn folio_order_min(mut self, order: u8) -> Self {
        self.folio_order_min = Order(order).min(Order::MAX);
        self.folio_order_max = self.folio_order_max.map(|max| max.max(self.folio_order_min));
        self
    }
    /// When background write-back starts, and how long writers that outpace the device are throttled. Shares are of the
    /// bound in force. The defaults are the kernel's: a tenth, a fifth, 30 seconds, every 5 seconds.
    #[must_use]
    pub fn writeback(mut self, options: WritebackOptions) -> Self {
        self.writeback = options;
        self
    }
    /// A file to which pages of memory files go when memory is short, so that these can be larger than the cache. It
    /// has no name, no other process reads it, and it is gone with the cache. Without it, memory files stay in memory,
    /// as do unevictable ones ([`MemFileOptions::unevictable`]). A write that fits in neither fails with
    /// [`NoMemory`](crate::ErrorKind::NoMemory), and nothing is lost.
    #[must_use]
    pub fn spill(mut self, options: SpillOptions) -> Self {
        self.spill = Some((options, None));
        self
    }
    /// As [`Builder::spill`], in the file behind a backend of your own, which can write. It must not be used
    /// otherwise meanwhile. The path of `options` is ignored.
    #[must_use]
    pub fn spill_to(mut self, backend: Arc<dyn Backend>, options: SpillOptions) -> Self {
        self.spill = Some((options, Some(backend)));
        self
    }
    /// A disk tier: bytes of backends that have a name for them that lasts, such as versions of objects in a store
    /// ([`Backend::content_key`]), are kept on a local disk as well, and read from there when memory has them no more;
    /// also after this process has ended, however it did. One process at a time uses a folder. What arrives faster than
    /// the disk writes is copied to it later, as long as it is in memory; the end of the cache goes on with that for
    /// half a second at most. Memory for it is not part of the bound: its buffers ([`DiskOptions::buffer_bytes`]),
    /// some MiB for reads and late copies, up to 16 MiB for admission, and about 80 bytes for each extent of 4 to 64
    /// KiB that it holds.
    #[must_use]
    pub fn disk(mut self, options: DiskOptions) -> Self {
        self.disk = Some(options);
        self
    }
    /// Whether a sample of the pages that are read is followed, so that [`Cache::miss_ratio_curve`] can tell what
    /// more or less memory would do. The default is not, and then it costs nothing. If so, reads in one call do
    /// not go side by side, each read costs a hash for each of its pages, and one of a sampled page, of which there
    /// are 8192 at most, some hundred nanoseconds under a lock that all readers share; until 8192 different pages
    /// were read all are sampled. Half a MiB on the heap, which does not count to `memory`.
    #[must_use]
    pub fn miss_ratio_curve(mut self, wanted: bool) -> Self {
        self.miss_ratio_curve = wanted;
        self
    }
    /// How files are read: by io_uring, by a pool of threads, or by the first if the system lets us (the
    /// default).
    #[must_use]
    pub fn mechanism(mut self, mechanism: Mechanism) -> Self {
        self.engine.mechanism = mechanism;
        self
    }

    /// Builds the cache: reserves its address space, populates its tables, starts nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Build`](crate::ErrorKind::Build) if `memory` is below the minimum or above what can be
    /// numbered, if `memory_max` is below `memory`, or if the system refuses memory or to lock it.
    pub fn build(self) -> Result<Cache> {
        self.build_with(Box::new(DiskTier::open_store))
    }

    /// As [`Builder::build`]; the store of the disk tier, if there is to be one, is opened by `store`.
    fn build_with(self, store: StoreOpener) -> Result<Cache> {
        let process = ForkGuard::new();
        let memory = self.memory.unwrap_or_else(|| default_memory().max(Cache::MEMORY_MIN));
        let reservation = Reservation { memory_max: self.memory_max.unwrap_or(memory), swap: self.swap };
        let arena = Arena::build_within(ArenaOptions { memory }, reservation);
        let arena = arena.map_err(|e| Repr::Build(Box::new(e)))?;
        let wait_queue = Arc::new(WaitQueue::new());
        let engine = Engine::new(Arc::clone(&wait_queue), self.engine);
        let max = self.folio_order_max.unwrap_or_else(|| folio_order_default(memory));
        let orders = Orders { min: self.folio_order_min, max: max.max(self.folio_order_min) };
        let arena = Arc::new(arena);
        let spill = match self.spill {
            None => None,
            Some((options, None)) => Some(Spill::open(&options, &engine, &arena, &wait_queue)),
            Some((options, Some(backend))) => {
                Some(Spill::with_backend(backend, &options, &arena, &wait_queue))
            }
        };
        let spill = spill.transpose().map_err(|e| Repr::Build(Box::new(e)))?;
        let disk = self.disk.map(|options| DiskCopies::open(&options, store, &arena, &wait_queue));
        let disk = disk.transpose().map_err(|e| Repr::Build(Box::new(e)))?.map(Arc::new);
        let filemap = Filemap::new(arena, wait_queue, orders).with_spill(spill);
        let filemap = filemap.with_hooks(self.index_hooks).with_policy(self.policy);
        let filemap = filemap.with_writeback(self.writeback);
        let filemap = filemap.with_pinned_max(self.pinned_max.unwrap_or(memory / 2));
        let filemap = Arc::new(filemap.with_background_reclaim(self.background_reclaim));
        let readahead_bytes = self.readahead.min(memory / 32).min(READAHEAD_BYTES_MAX);
        let readahead_pages = (readahead_bytes / PAGE_SIZE as u64) as u32;
        let readahead = match self.readahead_style {
            ReadaheadStyle::Streams => Config::new(readahead_pages),
            ReadaheadStyle::KernelLike => Config::kernel_like(readahead_pages, EXTENT_PAGES, orders.max),
        };
        let readahead = readahead.orders(orders.min, orders.max);
        let shared = CacheInner {
            _tasks: (
                DeferredShrink::of(&filemap),
                BackgroundReclaim::of(&filemap),
                self.pressure.map(|pressure| Shrinker::begin(&filemap, pressure)),
            ),
            shmem: Shmem::new(Arc::clone(&filemap)),
            filemap,
            engine,
            leases: Arc::default(),
            table: RankedMutex::new(Rank::Mappings, Table::default()),
            pools: pool::no_pools(),
            process,
            readahead,
            idle_files_max: self.idle_files_max,
            parks: AtomicBool::new(false),
            disk,
            sampler: self.miss_ratio_curve.then(Sampler::default),
            blocking: BlockingCalls::default(),
        };
        Ok(Cache { shared: Arc::new(shared) })
    }
}

/// The largest folio that a cache of `memory` bytes makes by default: one of which 256 fit. Of what a
/// cache holds, less than a 256th is then kept for the sake of one page in it that is read again, and a cache
/// of 16 MiB still has some hundred folios to choose from when it evicts. From 2 MiB on a folio gains
/// nothing by being larger, and the arena has none.
fn folio_order_default(memory: u64) -> Order {
    let pages = (memory / 256 / PAGE_SIZE as u64).clamp(1, u64::from(EXTENT_PAGES));
    Order::fitting(pages as u32)
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            memory: None,
            memory_max: None,
            pinned_max: None,
            background_reclaim: true,
            swap: Swap::Allowed,
            pressure: None,
            readahead: 4 << 20,
            readahead_style: ReadaheadStyle::Streams,
            idle_files_max: crate::sys::descriptors_max().div_ceil(4).min(1024),
            folio_order_min: Order::ZERO,
            folio_order_max: None,
            engine: EngineOptions::default(),
            index_hooks: None,
            policy: DEFAULT_POLICY,
            miss_ratio_curve: false,
            writeback: WritebackOptions::default(),
            spill: None,
            disk: None,
        }
    }
}

impl Cache {
    /// The least `memory` a cache can be built with, in bytes: 16 MiB.
    pub const MEMORY_MIN: u64 = Arena::MEMORY_MIN;

    /// Starts building a cache.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Opens a file for reading through the cache. Files with a fixed content on a file system and block
    /// devices can be opened. If the file changed since its pages were cached, they are forgotten.
    ///
    /// # Errors
    /// [`ErrorKind::Open`](crate::ErrorKind::Open): it cannot be opened, or is a directory, a pipe, a
    /// socket, a terminal, or a file of a pseudo file system such as procfs.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_in(path.as_ref(), OpenRequest { options: &OpenOptions::new(), pool: None })
    }

    /// Opens a file through the cache as `options` say, for writing too, if they do.
    ///
    /// All handles of a file share its pages: what one writes the others read at once. If the file changed outside
    /// since its pages were cached, they are forgotten, but for those that were written here and not written back:
    /// these are written over what others did. The first handle that writes opens the file a second time; pages are
    /// still read by the first.
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
        let handle = Arc::get_mut(&mut file.handle).expect("nobody else has the handle yet");
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

    /// As [`Cache::adopt`], opened as `options` say: for writing, too, if they do. The file is opened anew, with this
    /// process's rights, so a descriptor that a more privileged process opened for writing is not enough.
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

    /// Opens whatever `backend` reads. Backends with equal identities share pages.
    ///
    /// # Errors
    /// The backend cannot say what its file is, or no cell can be had for the mapping's record.
    pub fn open_backend(&self, backend: Arc<dyn Backend>) -> Result<File> {
        self.open_backend_in(backend, OpenRequest { options: &OpenOptions::new(), pool: None })
    }

    /// As [`Cache::open_with`], of whatever `backend` reads and writes. Whether it may be new is the backend's matter,
    /// and what `options` say of that is not looked at.
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
        let attributes = backend.attributes().map_err(Repr::Attributes)?;
        self.shared.look_for_removed(LOOKED_AT);
        let writes = options.writes();
        let (mapping, watch) = self.shared.mapping_of(backend, &attributes, writes)?;
        // From here on it is closed if something goes wrong, and then it has entered.
        let (cursor, access) = (mapping.writeback().errors().sample(), options.access());
        let shared = Arc::clone(&self.shared);
        let pool = pool.cloned();
        let handle =
            Handle { shared, mapping, pool, watch, access, cursor, path: None, lock: OnceLock::new() };
        handle.watch.enter(access, &attributes)?;
        let file = File::new(Arc::new(handle));
        file.set_uncached(options.is_uncached())?;
        if options.empties() && !file.is_empty() && file.handle.mapping.writeback().can_grow() {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// Gives up all read leases ([`Coherence::Lease`](crate::Coherence::Lease)); cached pages stay. Call it before the
    /// process is stopped, as by job control: a stopped process gives up nothing, and a writer in another process waits
    /// for it for `/proc/sys/fs/lease-break-time` seconds (45 by default). No lease is taken in the next second. Until
    /// there is one again, this process checks the file before each read, and viewers leave it to the kernel. Waits
    /// only for locks.
    pub fn give_up_leases(&self) {
        if !self.shared.process.is_forked() {
            self.shared.leases.give_up_all();
        }
    }

    /// How long from now on leases that are believed in now may be believed in, without another look.
    pub(crate) fn leases_seen_for(&self) -> Duration {
        self.shared.leases.seen_for()
    }

    /// Gives the cache another bound, of `bytes` bytes, while it is in use: up to
    /// [`Builder::memory_max`], and down to [`Cache::MEMORY_MIN`] or what its tables leave some room beside.
    ///
    /// Larger: the cache may grow from now on. Smaller: it does not grow from now on, whole extents of 2 MiB are
    /// emptied, those first that cost least, and their memory goes back to the machine; readers go on meanwhile, here
    /// and in viewers. Takes some milliseconds for each hundred extents, waits for locks of files, and up to half a
    /// second for reads in flight. It does not wait for pins: what they keep is [`ResizeOutcome::slack_bytes`], and
    /// goes when they go.
    ///
    /// The window of readahead and the largest folio stay as they were when the cache was built.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the bound is out of range, or too small for what
    /// pools protect, and nothing was changed. [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn resize(&self, bytes: u64) -> Result<ResizeOutcome> {
        self.check_process()?;
        // Held until the bound is in force; a thread that protects more then checks what is left.
        let pools = self.shared.pools.lock();
        let least = self.shared.filemap.memory_for_protected();
        if bytes < least {
            let text = format!(
                "cannot resize the cache to {bytes} bytes: what its pools protect needs {least}; \
                 protect less first, by Pool::set_protected"
            );
            return Err(Repr::InvalidInput(text).into());
        }
        let resized = self.shared.filemap.resize(bytes, || drop(pools));
        resized.map_err(|e| Repr::Resize(Box::new(e)).into())
    }

    /// Sets memory aside for the pages of viewers; see [`Filemap::reserve_viewers`].
    pub(crate) fn reserve_viewers(&self, groups: usize) -> std::result::Result<(), ArenaError> {
        // As in `resize`.
        let pools = self.shared.pools.lock();
        self.shared.filemap.reserve_viewers(groups, || drop(pools))
    }

    /// Makes durable what was written by all handles of this cache, also by those that are closed: as
    /// [`File::sync_all`] of each file that has something to write, one after the other. All files are tried, whatever
    /// went wrong with one.
    ///
    /// # Errors
    /// The first error, as of [`File::sync_all`]; also one of an earlier write-back that no handle was told of.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn sync_all(&self) -> Result<()> {
        self.check_process()?;
        let table = self.shared.table.lock();
        let files: Vec<_> = table.files.values().map(|known| Arc::clone(&known.mapping)).collect();
        drop(table);
        let written = files.into_iter().filter(|mapping| mapping.writeback().writer().is_some());
        let synced = written.map(|mapping| {
            let cursor = mapping.writeback().errors().sample();
            let pages = PageIndex(0)..PageIndex(INDICES_MAX);
            let synced = self.shared.filemap.supply.writeback.sync(&mapping, pages, SyncKind::All, &cursor);
            synced.map_err(|failed| Error::from(Repr::Sync { source: Box::new(failed) }))
        });
        // All are tried before the first error is told.
        let all: Vec<Result<()>> = synced.collect();
        all.into_iter().collect()
    }

    /// Ends this handle of the cache, and says what dropping it would not: whether everything that was written is
    /// durable. The cache itself ends with its last handle, file or pool.
    ///
    /// # Errors
    /// As [`Cache::sync_all`]. The handle is gone all the same; what could not be written is lost when the cache ends.
    pub fn close(self) -> Result<()> {
        self.sync_all()
    }

    /// Numbers of this cache; each documented at its field.
    /// In a forked child all of them are 0.
    pub fn stats(&self) -> Stats {
        if self.shared.process.is_forked() { Stats::default() } else { self.shared.stats() }
    }

    /// What became of the pages that were fetched before a read asked for them. Looks at one byte for each page
    /// of the cache, some ten microseconds for each gigabyte, and takes no lock: while others read, the
    /// numbers may not quite add up.
    /// In a forked child all of them are 0.
    pub fn readahead_use(&self) -> ReadaheadUse {
        if self.shared.process.is_forked() {
            return ReadaheadUse::default();
        }
        self.shared.filemap.readahead_use()
    }

    /// How many of the pages that were evicted and came back a larger cache would have kept: what more memory
    /// would do, seen from what is remembered of evictions. That is bounded by 1.8 % of memory and by what
    /// hints and changes of files take away, so the truth is this or more. Costs a dozen loads and no lock.
    /// In a forked child it is empty.
    pub fn refaults(&self) -> RefaultCurve {
        if self.shared.process.is_forked() {
            return RefaultCurve::default();
        }
        self.shared.filemap.supply.reclaim.refaults()
    }

    /// What share of page reads would miss in a cache of any size: what another GiB would do. It is estimated from a
    /// sample of all that this process read by this cache's files (not viewers in others), for a cache that evicts
    /// what was read longest ago and reads nothing ahead; measured by [`Stats::data_bytes`], ours may miss less.
    /// `None` without [`Builder::miss_ratio_curve`], and in a forked child. Copies some kilobytes, in a moment
    /// during which readers of sampled pages wait.
    pub fn miss_ratio_curve(&self) -> Option<MissRatioCurve> {
        let sampler = self.shared.sampler.as_ref().filter(|_| !self.shared.process.is_forked())?;
        Some(sampler.curve(self.shared.filemap.counters.sum(Count::PageReads)))
    }

    /// Whether every invariant of the cache holds; what does not, in words, for a bug report. Takes each
    /// mapping's lock in turn and looks at every page's descriptor: it is slow.
    ///
    /// # Errors
    /// What is broken.
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

    /// Checks up to `most` files without open handles, and releases those that were removed: their space is free
    /// then. The next call continues where this one has ended. For a cache that is idle for long: each open, and each
    /// end of a handle, checks some of them anyway. Asks the file system for each; takes the lock of the table of
    /// files for some steps. In a forked child it does nothing.
    pub fn let_go_of_removed(&self, most: usize) {
        if !self.shared.process.is_forked() {
            self.shared.look_for_removed(most);
        }
    }

    /// Closes the descriptor of each file with its last handle, from now on: for a cache that reads on behalf of
    /// other programs, which cannot know that this process has their files open. Pages stay where the next open can
    /// tell that they are the file's: see [`CacheInner::release`].
    pub(crate) fn park_idle_files(&self) {
        self.shared.parks.store(true, Ordering::Relaxed);
    }

    /// Forgets that file, if it has no open handle: its descriptor is closed, and its pages go. Returns whether it is
    /// not known now, and nothing that was released is in flight still.
    pub(crate) fn forget_idle(&self, device: u64, inode: u64) -> bool {
        let mut gone = DeferredRelease::default();
        let mut table = self.shared.table.lock();
        let is_it = |identity: &Identity| (identity.device, identity.inode) == (device, inode);
        let is_written = |identity| table.files[identity].mapping.writeback().dirty_pages().total() == 0;
        let found = table.idle.iter().find(|(_, identity)| is_it(identity) && is_written(identity));
        if let Some(since) = found.map(|(&since, _)| since) {
            table.forget_into(since, &mut gone);
        }
        let is_known = table.files.keys().any(is_it);
        drop(table);
        self.shared.end_all(gone);
        !is_known && !self.shared.is_closing()
    }

    /// Forgets the files that were not opened again for a second, of those that are kept open only because their
    /// mount has no number of its own. Returns which they were, by device and inode.
    pub(crate) fn forget_lingering(&self) -> Vec<(u64, u64)> {
        let (mut gone, mut names) = (DeferredRelease::default(), Vec::new());
        let mut table = self.shared.table.lock();
        let (due, not_yet) = std::mem::take(&mut table.lingering)
            .into_iter()
            .partition(|(_, closed)| closed.elapsed() >= LINGERS);
        table.lingering = not_yet;
        let due: Vec<(u64, Instant)> = due;
        for (since, _) in due {
            // One that was opened meanwhile is not idle, or since another time.
            names.extend(table.idle.get(&since).map(|file| (file.device, file.inode)));
            table.forget_into(since, &mut gone);
        }
        drop(table);
        self.shared.end_all(gone);
        names
    }

    /// Closes the descriptors of all files without open handles, and waits for what is in flight by them, half a
    /// second at most.
    pub(crate) fn release_idle(&self) {
        self.shared.release_idle();
    }

    /// What the spill file has done and holds; `None` if there is none.
    pub fn spill_stats(&self) -> Option<SpillStats> {
        self.shared.filemap.supply.spill.as_ref().map(|spill| spill.stats())
    }

    /// What the disk tier has done and holds; `None` if there is none.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        self.shared.disk.as_ref().map(|disk| disk.stats())
    }

    /// Why the disk tier is left alone, in words for people, if it is: its disk failed. Nothing is lost by that.
    pub fn disk_trouble(&self) -> Option<String> {
        self.shared.disk.as_ref()?.trouble()
    }

    /// What of this cache's memory is shared with viewers.
    pub fn share(&self) -> ArenaShare<'_> {
        self.shared.filemap.arena.share()
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.shared.filemap.arena
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        if self.shared.process.is_forked() { Err(Repr::Forked.into()) } else { Ok(()) }
    }
}

impl CacheInner {
    /// The mapping of the file that `attributes` are of, with one handle more.
    /// From now on it is written by `backend`, if `writes` says so and it is not by another.
    fn mapping_of(
        &self,
        backend: Arc<dyn Backend>,
        attributes: &Attributes,
        writes: bool,
    ) -> Result<(Arc<Mapping>, Arc<CoherenceState>)> {
        let mut table = self.table.lock();
        // Known by the same identity, and not to be believed: another file, or another content. It is taken for new.
        let outdated = table.outdated(&*backend, attributes);
        if let Some(known) = table.files.get_mut(&attributes.identity) {
            known.handles += 1;
            let (mapping, watch) = (Arc::clone(&known.mapping), Arc::clone(&known.watch));
            if known.parked_on.take().is_some() {
                // Before another thread can find it: the pages are this file's, and a thread that asks it asks this
                // backend.
                drop(mapping.replace_backend(Arc::clone(&backend)));
            }
            if let Some(since) = known.idle_since.take() {
                table.idle.remove(&since);
            }
            drop(table);
            if writes {
                mapping.writeback().set_writer(backend);
            }
            return Ok((mapping, watch));
        }
        let id = table.next_id(&self.filemap);
        let writer = writes.then(|| Arc::clone(&backend));
        let (arena, process) = (&self.filemap.arena, self.process);
        let new = Mapping::new(NewMapping { arena, id, backend, attributes, process });
        if let Some(gone) = outdated {
            self.filemap.supply.reclaim.remove_mapping(gone.id());
        }
        let Some(mapping) = new else {
            let pages = self.filemap.arena.stats().data_bytes / PAGE_SIZE as u64;
            return Err(Repr::NoMemory { position: 0, pages }.into());
        };
        let reclaim = &self.filemap.supply.reclaim;
        let mapping = mapping.with_shadow_nodes(reclaim.shadow_nodes()).with_lists(reclaim.lists());
        let mapping = mapping.with_dirty_pages(self.filemap.supply.writeback.totals());
        let mapping = Arc::new(mapping.with_counters(&self.filemap.counters).with_hooks(self.filemap.hooks));
        if let Some(backend) = writer {
            mapping.writeback().set_writer(backend);
        }
        self.filemap.supply.reclaim.add_mapping(Arc::clone(&mapping));
        let watch = CoherenceState::new(&mapping, &self.filemap, &self.leases);
        let known = KnownFile {
            mapping: Arc::clone(&mapping),
            watch: Arc::clone(&watch),
            handles: 1,
            idle_since: None,
            parked_on: None,
        };
        table.files.insert(attributes.identity, known);
        Ok((mapping, watch))
    }

    /// `bytes` bytes at `position` were read, and the cache follows what is read.
    fn note_read(&self, mapping: &Mapping, position: u64, bytes: usize) {
        if let Some(sampler) = &self.sampler
            && bytes > 0
        {
            let (first, end) = (PageIndex::of_byte(position), pages_of_bytes(position + bytes as u64));
            self.filemap.counters.add(Count::PageReads, end - first.0);
            sampler.note(mapping.id(), first, end - first.0);
        }
    }

    /// A handle on `mapping` is gone.
    fn release(&self, mapping: &Arc<Mapping>, watch: &CoherenceState, policy: Coherence) {
        let mut gone = DeferredRelease::default();
        let parks = self.parks.load(Ordering::Relaxed);
        // Asked before the lock of the table, which is not held while a lease's is waited for.
        let told = if parks { watch.observed_times(policy) } else { None };
        let open = if parks { mapping.backend().parked() } else { None };
        let mut table = self.table.lock();
        let Some(identity) = table.identity_of(mapping) else { return };
        let known = table.files.get_mut(&identity).expect("its identity was just found");
        known.handles -= 1;
        let is_idle = known.handles == 0;
        if is_idle {
            let since = table.retire(identity, &mut gone);
            if parks {
                table.park(since, told, true, &mut gone);
            }
            table.bound_idle(self.idle_files_max, &mut gone);
        }
        drop(table);
        if is_idle && mapping.writeback().dirty_pages().dirty() > 0 {
            self.filemap.supply.writeback.start(mapping, PageIndex(0)..PageIndex(INDICES_MAX));
        }
        self.end_all(gone);
        if let Some(open) = open.filter(|_| is_idle && mapping.backend().parked().is_none()) {
            await_closed(&open);
        }
        if is_idle {
            self.look_for_removed(LOOKED_AT);
        }
    }

    /// What the table has let go of goes: with its lock given back, since closing a file may wait for its file system.
    fn end_all(&self, gone: DeferredRelease) {
        for mapping in gone.mappings {
            self.filemap.supply.reclaim.remove_mapping(mapping.id());
        }
        drop(gone.backends);
    }

    /// Releases the descriptors of all files without open handles.
    fn release_idle(&self) {
        let mut table = self.table.lock();
        let idle: Vec<_> = table
            .idle
            .iter()
            .map(|(&since, identity)| (since, Arc::clone(&table.files[identity].watch)))
            .collect();
        drop(table);
        let told: Vec<_> =
            idle.into_iter().map(|(since, watch)| (since, watch.observed_times(Coherence::Lease))).collect();
        let mut gone = DeferredRelease::default();
        table = self.table.lock();
        for (since, told) in told {
            table.park(since, told, false, &mut gone);
        }
        drop(table);
        self.end_all(gone);
        let begun = Instant::now();
        while self.is_closing() && begun.elapsed() < RELEASE_MAX {
            std::thread::sleep(CLOSING_PAUSE);
        }
    }

    /// Whether a file that was let go of is open still, for what is in flight by it. Fetches what has completed:
    /// requests in flight keep a descriptor, and readahead that no reader waits for completes only when a thread reaps
    /// it.
    fn is_closing(&self) -> bool {
        if let Some(parked) = self.closing() {
            parked.reap(ReapMode::Ready, &mut || false);
        }
        self.closing().is_some()
    }

    /// One of the files that were let go of and are open for what is in flight, if there is one.
    fn closing(&self) -> Option<ParkedBackend> {
        let mut table = self.table.lock();
        table.closing.retain(|parked| !parked.is_closed());
        table.closing.first().cloned()
    }

    /// Checks `most` files without open handles, and forgets those that were removed.
    fn look_for_removed(&self, most: usize) {
        let mut removed = self.table.lock().some_idle(most);
        // The file system is asked with no lock held. A file without open handles is not dirtied.
        removed.retain(|(_, mapping)| {
            mapping.backend().is_removed() && mapping.writeback().dirty_pages().total() == 0
        });
        if removed.is_empty() {
            return;
        }
        let mut table = self.table.lock();
        // One that was opened meanwhile is not idle, or since another time.
        removed.retain(|&(since, _)| table.forget(since).is_some());
        drop(table);
        for (_, mapping) in removed {
            self.filemap.supply.reclaim.remove_mapping(mapping.id());
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let (filemap, counters) = (&self.filemap, &self.filemap.counters);
        let (supply, arena) = (&filemap.supply, filemap.arena.stats());
        let counted = Stats::counted(counters);
        let ahead = counters.sum(Count::Readahead);
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
            files: self.table.lock().files.len() as u64,
            memory_files: self.shmem.files(),
            unevictable_pages: supply.reclaim.unevictable_pages(),
            reads: counted.hits + counted.misses,
            dirty_pages: supply.writeback.totals().dirty(),
            writeback_pages: supply.writeback.totals().writeback(),
            asked_pages: counted.inserted_pages.saturating_sub(ahead),
            guessed_pages: ahead.saturating_sub(counted.will_need_pages),
            readahead_pages: filemap.readahead_pages(),
            shadow_bytes: supply.reclaim.shadow_nodes().count() * NODE_BYTES,
            in_flight: filemap.in_flight(),
            mechanism: self.engine.name(),
            ..counted
        };
        if let Some(spill) = supply.spill.as_ref().map(|spill| spill.stats()) {
            stats.spilled_pages = spill.spilled_pages;
            stats.spilled_in_pages = spill.spilled_in_pages;
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
        let files = std::mem::take(&mut self.table.lock().files);
        let end = move || {
            leases.close();
            // Pages that were written and are not in their files yet. A failure is counted; no handle is left to report
            // it.
            filemap.supply.writeback.write_out_all();
            filemap.supply.background.close();
            filemap.supply.spill.iter().for_each(|spill| spill.drain());
            // No future is left: each borrows a file, which keeps us.
            filemap.wait_queue.close();
            // Requests in flight write into the arena: it ends before anything else does.
            engine.drain();
            disk.iter().for_each(|disk| disk.end(disk_copies::END_MAX));
            files.values().for_each(|known| filemap.supply.reclaim.remove_mapping(known.mapping.id()));
        };
        if is_waking() {
            // A waker held the last of us, and the fill that woke it ends when we have returned: not to be waited
            // for here. Where something is dirty there is a thread already.
            let Err(end) = self.filemap.supply.writeback.close_with(Box::new(end)) else { return };
            if std::thread::Builder::new().name("quinion-end".into()).spawn(end).is_err() {
                // There is no thread to be had. Requests in flight keep what they need.
                self.filemap.supply.writeback.start_all();
            }
        } else {
            end();
        }
    }
}

impl Table {
    /// A number that no known mapping has.
    fn next_id(&mut self, filemap: &Filemap) -> MappingId {
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            let id = MappingId(self.last_id);
            if !filemap.supply.reclaim.knows(id) {
                return id;
            }
        }
    }

    fn identity_of(&self, mapping: &Arc<Mapping>) -> Option<Identity> {
        let identity = mapping.identity();
        self.files
            .get(&identity)
            .is_some_and(|known| Arc::ptr_eq(&known.mapping, mapping))
            .then_some(identity)
    }

    /// A mapping has lost its last handle: it goes if it has no folios, else it becomes idle. Returns since when.
    fn retire(&mut self, identity: Identity, gone: &mut DeferredRelease) -> u64 {
        let now = self.idle_clock;
        self.idle_clock += 1;
        self.idle.insert(now, identity);
        let known = self.files.get_mut(&identity).expect("an idle mapping is known");
        known.idle_since = Some(now);
        known.mapping.give_back_nodes(LockWait::Wait);
        // Of a folio that has left, a page may be on its way to the file still: an open that comes anew must not
        // overtake it.
        if known.mapping.lock().pages() == 0 && known.mapping.writeback().dirty_pages().total() == 0 {
            self.forget_into(now, gone);
        }
        now
    }

    /// The oldest idle ones go that are more than `idle_max` and have nothing to be written.
    fn bound_idle(&mut self, idle_max: usize, gone: &mut DeferredRelease) {
        while self.idle.len() > idle_max {
            // Mappings with unwritten pages stay known, however many they are.
            let is_written = |identity| self.files[identity].mapping.writeback().dirty_pages().total() == 0;
            let oldest = self.idle.iter().find(|(_, identity)| is_written(identity)).map(|(&since, _)| since);
            let Some(oldest) = oldest else { break };
            self.forget_into(oldest, gone);
        }
    }

    /// The descriptor of one that is idle since then is closed. Its pages stay if `told`, the version of which its
    /// file's times will tell whether it still has it, is the version that they are of; else it is forgotten. One that
    /// has something to be written stays as it is; and, if it `may_linger`, one of a mount that has no number, for
    /// [`Cache::forget_lingering`].
    fn park(
        &mut self,
        since: u64,
        told: Option<ObservedTimes>,
        may_linger: bool,
        gone: &mut DeferredRelease,
    ) {
        let Some(identity) = self.idle.get(&since) else { return };
        let known = self.files.get_mut(identity).expect("an idle mapping is known");
        let (mapping, backend) = (&known.mapping, known.mapping.backend());
        let Some(place) = backend.parked() else { return }; // it is parked, or has no descriptor
        if mapping.writeback().dirty_pages().total() > 0 {
            return;
        }
        let is_told = told == Some(ObservedTimes::of(mapping)) && mapping.writeback().writer().is_none();
        let Some(mount) = backend.mount().filter(|_| is_told) else {
            if is_told && may_linger {
                return self.lingering.push((since, Instant::now()));
            }
            return self.forget_into(since, gone);
        };
        known.parked_on = Some(mount);
        gone.backends.extend([backend, mapping.replace_backend(Arc::new(place.clone()))]);
        self.note_closing(place);
    }

    /// The descriptor of the file whose place that has is let go of.
    fn note_closing(&mut self, place: ParkedBackend) {
        self.closing.retain(|parked| !parked.is_closed());
        self.closing.push(place);
    }

    /// What is parked under the identity of the file behind `backend`, and is not to be believed, as that is now.
    fn outdated(&mut self, backend: &dyn Backend, now: &Attributes) -> Option<Arc<Mapping>> {
        let known = self.files.get(&now.identity)?;
        let mount = known.parked_on?;
        let is_same =
            backend.mount() == Some(mount) && ObservedTimes::of(&known.mapping) == ObservedTimes::by(now);
        if is_same { None } else { self.forget(known.idle_since?) }
    }

    fn forget_into(&mut self, since: u64, gone: &mut DeferredRelease) {
        let Some(mapping) = self.forget(since) else { return };
        let backends = [Some(mapping.backend()), mapping.writeback().writer().cloned()];
        let places = backends.into_iter().flatten().filter_map(|backend| backend.parked());
        places.for_each(|place| self.note_closing(place));
        gone.mappings.push(mapping);
    }

    /// The idle mappings whose turn it is, `most` of them, each with the time since when.
    fn some_idle(&mut self, most: usize) -> Vec<(u64, Arc<Mapping>)> {
        let idle = self.idle.range(self.looked_from..).take(most);
        let some: Vec<_> =
            idle.map(|(&since, identity)| (since, Arc::clone(&self.files[identity].mapping))).collect();
        self.looked_from = some.last().filter(|_| some.len() == most).map_or(0, |&(since, _)| since + 1);
        some
    }

    fn forget(&mut self, since: u64) -> Option<Arc<Mapping>> {
        let identity = self.idle.remove(&since)?;
        self.files.remove(&identity).map(|known| known.mapping)
    }
}

/// Waits until a file whose descriptor was let go of is closed, [`CLOSING_MAX`] at most, and fetches what has completed
/// in it.
fn await_closed(file: &ParkedBackend) {
    let begun = Instant::now();
    while !file.is_closed() && begun.elapsed() < CLOSING_MAX {
        file.reap(ReapMode::Ready, &mut || false);
        std::thread::sleep(CLOSING_PAUSE);
    }
}

/// What an open asks for besides the file.
#[derive(Clone, Copy, Debug)]
struct OpenRequest<'a> {
    options: &'a OpenOptions,
    /// Which pool is charged for what is read; `None`: the default pool.
    pool: Option<&'a Arc<PoolShare>>,
}

/// One open of a file; the last clone gives its mapping back.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) shared: Arc<CacheInner>,
    pub(crate) mapping: Arc<Mapping>,
    /// `None`: the default pool.
    pool: Option<Arc<PoolShare>>,
    watch: Arc<CoherenceState>,
    /// What it may do.
    access: Access,
    /// How far it has been told of errors of writing.
    cursor: ErrorCursor,
    /// By which it was opened, if it was opened by a path.
    path: Option<PathBuf>,
    /// The description that [`File::lock`] locks, once it has.
    lock: OnceLock<OwnedFd>,
}

impl Handle {
    /// The pool that is charged for what is read.
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

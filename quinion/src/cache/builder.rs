//! Builder: how a cache is built, and its defaults.
//!
//! ```text
//!   options --build--> arena, engine, spill and disk files, filemap (the paths of data, with their policies), tasks
//! ```
//!
//! Invariant: a cache that cannot have the requested memory or files is not built; the error names the remedy.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use quinion_disk::{DiskOptions, DiskStore};

use crate::arena::{Arena, ArenaOptions, Reservation, Swap, default_memory};
use crate::backend::{Backend, DiskTier, Engine, EngineOptions, Mechanism, WaitQueue};
use crate::curve::Sampler;
use crate::error::{Repr, Result};
use crate::filemap::{BackgroundReclaim, DeferredShrink, Filemap, Shrinker};
use crate::mapping::IndexHooks;
use crate::policy::{DEFAULT_POLICY, NewPolicy};
use crate::pressure::Pressure;
use crate::readahead::{Config, ReadaheadStyle};
use crate::shmem::Shmem;
use crate::spill::{Spill, SpillOptions};
use crate::sync::{Rank, RankedMutex};
use crate::sys::fork::ForkGuard;
use crate::units::{EXTENT_PAGES, Order, Orders, PAGE_SIZE};
use crate::writeback::WritebackOptions;

use super::disk_copies::{DiskCopies, StoreOpener};
use super::file_table::FileTable;
use super::{Cache, CacheInner, pool};

const READAHEAD_BYTES_MAX: u64 = 8 << 20;

/// How to build a [`Cache`].
#[derive(Clone, Debug)]
pub struct Builder {
    memory: Option<u64>,
    memory_max: Option<u64>,
    pinned_max: Option<u64>,
    background_reclaim: bool,
    swap: Swap,
    pressure: Option<Pressure>,
    readahead: u64,
    readahead_style: ReadaheadStyle,
    idle_files_max: usize,
    folio_order_min: Order,
    folio_order_max: Option<Order>,
    engine: EngineOptions,
    /// Takes steps of the index over, for a benchmark or a test; see `hooks.rs`.
    pub(super) index_hooks: Option<&'static dyn IndexHooks>,
    pub(super) policy: NewPolicy,
    miss_ratio_curve: bool,
    writeback: WritebackOptions,
    spill: Option<(SpillOptions, Option<Arc<dyn Backend>>)>,
    disk: Option<DiskOptions>,
}

impl Builder {
    /// The byte bound of data, descriptors, index nodes, mapping records, viewers' pages and reads in flight together.
    /// At least [`Cache::MEMORY_MIN`]; rounded down to whole 2 MiB. The default is a quarter of the machine's or
    /// container's.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }
    /// The most that [`Cache::resize`] can ever give the cache, in bytes. The default is `memory`. The tables for it
    /// take 0.9 % of it at once, out of `memory`.
    #[must_use]
    pub fn memory_max(mut self, bytes: u64) -> Self {
        self.memory_max = Some(bytes);
        self
    }
    /// Whether a background thread evicts before pages are needed: it keeps up to a 128th of the cache free, 32 MiB
    /// at most. A cache that is not full yet takes memory of the machine ahead of readers: an eighth of its size,
    /// 16 MiB at most. The default is `true`. A cache below 64 MiB has no such thread.
    #[must_use]
    pub fn background_reclaim(mut self, background: bool) -> Self {
        self.background_reclaim = background;
        self
    }
    /// The most memory that pins may keep, in bytes; a pin beyond fails with
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory). A folio counts whole, and once. The default is half of
    /// `memory`; all of it may leave readers no page. A resize keeps the share; guests' memory does not count.
    #[must_use]
    pub fn pinned_max(mut self, bytes: u64) -> Self {
        self.pinned_max = Some(bytes);
        self
    }
    /// Whether the system must never swap the cache's memory out (`mlock2`, each page from the moment it is there).
    /// The default is no. The system counts `memory_max` and 2 MiB against `RLIMIT_MEMLOCK` when the cache is built,
    /// unless the process has `CAP_IPC_LOCK`; memory beyond the limit is an error then, and none ever after. The
    /// cache's memory is left out of core dumps and of forked children in any case.
    #[must_use]
    pub fn lock_memory(mut self, lock: bool) -> Self {
        self.swap = if lock { Swap::Locked } else { Swap::Allowed };
        self
    }
    /// Has the cache shrink while the machine or its control group is short of memory, and grow back slowly to
    /// `memory`, or the bound of the last [`Cache::resize`]. A thread looks twice a second at the pressure stall
    /// information, and at the memory left below the tightest limit. The default is no.
    #[must_use]
    pub fn pressure(mut self, pressure: Pressure) -> Self {
        self.pressure = Some(pressure);
        self
    }
    /// The largest readahead window, in bytes; 0 turns readahead off. At most 1 part in 32 of `memory` and 8 MiB are
    /// used; twice that for a handle with [`Hint::Sequential`](crate::Hint). The default is 4 MiB.
    #[must_use]
    pub fn readahead(mut self, bytes: u64) -> Self {
        self.readahead = bytes;
        self
    }
    /// The default knows several streams of each handle apart; the other style is there to compare with.
    #[must_use]
    pub fn readahead_style(mut self, style: ReadaheadStyle) -> Self {
        self.readahead_style = style;
        self
    }
    /// How many files without open handles keep their pages, and a descriptor each, or up to three if they were
    /// written: for writing, too, so that other processes get no lease on them. A removed one, on a local file
    /// system, is released a few opens and closes later. Files with unwritten pages stay beside them, however many they
    /// are, and so do files that were written and not synced: once those of a device are more than that, too, the end
    /// of a handle there syncs some. The default is 1024, or a quarter of the descriptors this process may have.
    #[must_use]
    pub fn idle_files_max(mut self, files: usize) -> Self {
        self.idle_files_max = files;
        self
    }
    /// The largest folio a fill makes, as log2 of its pages, 0 to 9; larger values mean 9. Larger folios make hits on
    /// large files cheaper and eviction coarser. Only streams and long reads make large ones. The default is at most
    /// a 256th of `memory`: 4 with 16 MiB, 9 from 512 MiB on. Lowers the smallest folio to itself.
    #[must_use]
    pub fn folio_order_max(mut self, order: u8) -> Self {
        let order = Order(order).min(Order::MAX);
        self.folio_order_max = Some(order);
        self.folio_order_min = self.folio_order_min.min(order);
        self
    }
    /// The smallest folio a fill makes, as log2 of its pages, 0 to 9; larger values mean 9. The default is 0. Reads
    /// are rounded to whole such folios, and these are never split. Raises the largest folio to itself.
    #[must_use]
    pub fn folio_order_min(mut self, order: u8) -> Self {
        self.folio_order_min = Order(order).min(Order::MAX);
        self.folio_order_max = self.folio_order_max.map(|max| max.max(self.folio_order_min));
        self
    }
    /// When background write-back starts, and how long writers that outpace the device are throttled; as shares of
    /// the bound in force. The defaults are a tenth, a fifth, 30 seconds, every 5 seconds.
    #[must_use]
    pub fn writeback(mut self, options: WritebackOptions) -> Self {
        self.writeback = options;
        self
    }
    /// A file to which pages of memory files go when memory is short, so that these can be larger than the cache. It
    /// has no name, and is gone with the cache. Unevictable memory files do not go there
    /// ([`MemFileOptions::unevictable`](crate::MemFileOptions::unevictable)). A write that fits in neither fails with
    /// [`NoMemory`](crate::ErrorKind::NoMemory), and nothing is lost. By default all memory files stay in memory.
    #[must_use]
    pub fn spill(mut self, options: SpillOptions) -> Self {
        self.spill = Some((options, None));
        self
    }
    /// As [`Builder::spill`], in the file behind a backend of your own, which can write and is not used otherwise.
    /// The path of `options` is ignored.
    #[must_use]
    pub fn spill_to(mut self, backend: Arc<dyn Backend>, options: SpillOptions) -> Self {
        self.spill = Some((options, Some(backend)));
        self
    }
    /// A disk tier: bytes of backends with a lasting name for them, such as versions of objects in a store
    /// ([`Backend::content_key`]), are kept on a local disk as well, and read from there when memory has them no
    /// more; also after this process has ended. One process at a time uses a folder. Pages that arrive faster than
    /// the disk writes are copied later, as long as they are in memory; dropping the cache goes on with that for half a
    /// second at most. Its memory is not part of the bound: its buffers ([`DiskOptions::buffer_bytes`]), some MiB for
    /// reads and late copies, up to 16 MiB for admission, and about 80 bytes for each extent of 4 to 64 KiB.
    #[must_use]
    pub fn disk(mut self, options: DiskOptions) -> Self {
        self.disk = Some(options);
        self
    }
    /// Whether [`Builder::disk`] could be had with these options, as far as that can be told while another process has
    /// the folder: for a process that is about to replace that one. Changes nothing; blocks for the disk for some
    /// seconds at most.
    ///
    /// # Errors
    /// As those of [`Builder::build`] about the disk tier.
    pub fn try_disk(options: &DiskOptions) -> Result<()> {
        DiskStore::try_open(options).map_err(|error| Repr::Build(Box::new(error)).into())
    }
    /// Whether a sample of the pages that are read is followed, for [`Cache::miss_ratio_curve`]. The default is not,
    /// and then it costs nothing. If so, reads in one call do not go side by side, and each read costs a hash for
    /// each of its pages; one of a sampled page, of which there are 8192 at most, some hundred nanoseconds under a
    /// lock that all readers share. Half a MiB on the heap, which does not count to `memory`.
    #[must_use]
    pub fn miss_ratio_curve(mut self, wanted: bool) -> Self {
        self.miss_ratio_curve = wanted;
        self
    }
    /// How files are read: by io_uring, by a pool of threads, or by the first if the system allows it (the default).
    #[must_use]
    pub fn mechanism(mut self, mechanism: Mechanism) -> Self {
        self.engine.mechanism = mechanism;
        self
    }

    /// Builds the cache: reserves its address space, populates its tables, starts nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Build`](crate::ErrorKind::Build) if `memory` is below the minimum or above the size of the largest
    /// arena, if `memory_max` is below `memory`, or if the system refuses memory or to lock it.
    pub fn build(self) -> Result<Cache> {
        self.build_with(Box::new(DiskTier::open_store))
    }

    pub(super) fn build_with(self, store: StoreOpener) -> Result<Cache> {
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
            table: RankedMutex::new(Rank::Mappings, FileTable::default()),
            pools: pool::no_pools(),
            process,
            readahead,
            idle_files_max: self.idle_files_max,
            parks: AtomicBool::new(false),
            disk,
            sampler: self.miss_ratio_curve.then(Sampler::default),
        };
        Ok(Cache { shared: Arc::new(shared) })
    }
}

/// The largest folio of which 256 fit: less than a 256th is then kept for the sake of one page, and a cache of 16 MiB
/// still has some hundred folios to choose from when it evicts. From 2 MiB on a folio gains nothing by being larger,
/// and the arena has none.
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

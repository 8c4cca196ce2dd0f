//! Spill: a file for pages that memory has no room for and no other file has.
//!
//! ```text
//!   a folio of a memory file        frames    [p0 p1 p2 p3]
//!     out    take a run of slots, note a checksum of each, one Flush      (packed first, if that saves a slot)
//!   spill file                      slots     .. [p0 p1 p2 p3] .. [packed] ..          4 KiB each
//!     in     Fills, straight into frames that are not published yet; each page checked against its checksum
//!     copy   a Fill into memory of the heap, for a reader that finds no frame; the folio stays where it is
//! ```
//!
//! A folio of a memory file has no other copy. So there may be one file of the cache's own to which such folios go when
//! memory is short: made with the cache, without a name, readable by no other process, never synced, removed with it.
//!
//! This module knows slots, frames and bytes, no mapping and no tree. `mapping/spill.rs` keeps the number of a folio's
//! first slot in the tree, as a value; `reclaim/spill.rs` chooses the folios, and `filemap/spill_in.rs` fetches them.
//!
//! A **wrong read** (too short, another checksum, another length when unpacked) **is an error** and never other bytes:
//! the folio stays where it is, and the next reader tries again.
//!
//! Invariants:
//!  1. A slot belongs to one folio at most; one that is being read is not given to another (`slots.rs`).
//!  2. Pages that one thread has under way to the file are bounded by [`Spill::in_flight_max`], but for one folio that
//!     is alone. (A thread that begins at the same moment as others does not see theirs.)
//!  3. The end of each folio that was handed over is reported once, whether it succeeded or not.
//!  4. A folio that could not be written takes no slot.
//!
//! Not an invariant: that the bytes of a folio hold still while they are written. If they do not, its writer has made
//! it dirty, it stays in memory, and its slots are given back unread.
//!
//! Locks: the mutex of the slots is a leaf, and may be taken under a tree's lock. None is held while a device is at
//! work. Cost, on the heap: three bits and eight bytes for each slot that was ever used; twice a folio's bytes while it
//! is packed or unpacked; 8 MiB for all threads that copy (`heap.rs`). Kernel cousin: `mm/swapfile.c`, zswap. This
//! differs: a checksum, and a large folio stays one entry.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::{Mode, OFlags, open, unlink};

use crate::arena::Arena;
use crate::backend::{Backend, Creation, Engine, InitialContent, OpenForWrite, WaitQueue};
use crate::units::{Order, PAGE_SIZE};
use crate::xarray::{PAYLOADS_MAX, Value};

mod heap;
mod transfer;
mod pack;
mod slots;

use heap::HeapQueue;
pub use heap::HeapTurn;
pub use slots::SpillSlots;
pub use transfer::{SpillSink, SpilledPart};

/// The most pages under way to the file at a time: 8 MiB.
const IN_FLIGHT_MAX: u64 = 2048;
/// The most pages under way as a part of the cache: one in so many.
const IN_FLIGHT_SHARE: u64 = 8;
const NAMES_MAX: u32 = 100;

/// A file to which folios of memory files go when memory is short.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SpillOptions {
    /// A folder, in which the file has no name; or the path of a file that is not there yet, and is removed once made.
    pub path: PathBuf,
    /// The file's largest size in bytes, 4096 to 128 GiB, rounded down to pages. The file takes space where it is
    /// written, and keeps it to write there again.
    pub bytes_max: u64,
    /// Whether folios of more than a page are made smaller first. Costs a core the time to pack each, and some
    /// memory of the heap; folios so small come back whole.
    pub compress: bool,
}

impl SpillOptions {
    /// In the folder, or the new file, `path`: `bytes_max` bytes at most, not compressed.
    pub fn new(path: impl Into<PathBuf>, bytes_max: u64) -> Self {
        Self { path: path.into(), bytes_max, compress: false }
    }
    /// Sets whether folios of more than a page are made smaller first.
    #[must_use]
    pub fn compress(mut self, compress: bool) -> Self {
        self.compress = compress;
        self
    }
}

/// Why there is no spill file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpillRefused {
    /// The file could not be made.
    #[error(
        "cannot make a spill file at {path}: {source}; name a folder that can be written to, on a local disk"
    )]
    File {
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file would be too small, or too large.
    #[error(
        "a spill file of {bytes} bytes was asked for, and it can have 4096 to {max}: give it a size between these",
        max = BYTES_MAX
    )]
    Size {
        /// The requested size.
        bytes: u64,
    },
}

/// The largest spill file: as many slots as a value of a tree can name.
const BYTES_MAX: u64 = PAYLOADS_MAX as u64 * PAGE_SIZE as u64;

/// Why folios stay that might have gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpillTrouble {
    /// The file has no run of free slots for them.
    Full,
    /// The device refused the last of them, with this error of the system's.
    Failed(i32),
}

impl fmt::Display for SpillTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the spill file is full"),
            Self::Failed(errno) => {
                write!(f, "the spill file cannot be written: {}", io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

/// Counts and sizes of a spill file.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct SpillStats {
    /// Pages that went out so far.
    pub spilled_pages: u64,
    /// Pages that came back so far.
    pub spilled_in_pages: u64,
    /// Pages that reads copied there so far, for want of memory, and that stayed.
    pub read_pages: u64,
    /// Pages that are there now.
    pub pages: u64,
    /// Bytes of the file that they take now. With `pages` it gives the gain of compression.
    pub bytes: u64,
    /// The file's largest size in bytes.
    pub bytes_max: u64,
    /// Folios that could not be written.
    pub write_errors: u64,
    /// Requests for spilled pages that failed.
    pub read_errors: u64,
}

/// The record of a taken slot: 32 bits of checksum, and, of the first of a packed folio, its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SlotRecord(u64);

impl SlotRecord {
    fn of(checksum: u32, packed_bytes: u32) -> Self {
        Self(u64::from(packed_bytes) << 32 | u64::from(checksum))
    }
    fn checksum(self) -> u32 {
        self.0 as u32
    }
    fn packed_bytes(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[derive(Debug)]
struct Store {
    slots: SpillSlots,
    /// As numbers, so that the system's zeros do, and memory is used only where slots were.
    records: Vec<u64>,
}

/// The spill file of one cache.
pub struct Spill {
    me: Weak<Spill>,
    arena: Arc<Arena>,
    wait_queue: Arc<WaitQueue>,
    backend: Arc<dyn Backend>,
    compress: bool,
    store: Mutex<Store>,
    /// Pages under way to the file, and how many folios have ended.
    in_flight: AtomicU64,
    ended: AtomicU64,
    /// Runs of so many slots, and longer ones, were not to be had when it was last tried; changed under the mutex.
    missing_run: AtomicU32,
    /// 0 if the last write went well.
    errno: AtomicI32,
    spilled: AtomicU64,
    spilled_in: AtomicU64,
    read: AtomicU64,
    /// Bytes of the heap that readers of slots have, and the readers that wait for some.
    heap: Mutex<HeapQueue>,
    pages: AtomicU64,
    write_errors: AtomicU64,
    read_errors: AtomicU64,
}

impl Spill {
    /// Makes a spill file, read and written by `engine`, for folios of `arena`; threads wait in `wait_queue`.
    ///
    /// # Errors
    /// See [`SpillRefused`].
    pub fn open(
        options: &SpillOptions,
        engine: &Engine,
        arena: &Arc<Arena>,
        wait_queue: &Arc<WaitQueue>,
    ) -> Result<Arc<Self>, SpillRefused> {
        let path = || options.path.clone();
        let refused = |source: io::Error| SpillRefused::File { path: path(), source };
        let file = nameless(&options.path).map_err(refused)?;
        // Opened once more by the way of all files, which settles how it is read and written.
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let how = OpenForWrite { creation: Creation::MustExist, start: InitialContent::Kept, mode: 0o600 };
        let opened = engine.open_for_writing(again, how).map_err(|error| refused(io::Error::other(error)))?;
        Self::with_backend(Arc::new(opened), options, arena, wait_queue)
    }

    /// As [`Spill::open`], in the file behind `backend`, which can write.
    ///
    /// # Errors
    /// [`SpillRefused::Size`].
    pub fn with_backend(
        backend: Arc<dyn Backend>,
        options: &SpillOptions,
        arena: &Arc<Arena>,
        wait_queue: &Arc<WaitQueue>,
    ) -> Result<Arc<Self>, SpillRefused> {
        let bytes = options.bytes_max;
        if !(PAGE_SIZE as u64..=BYTES_MAX).contains(&bytes) {
            return Err(SpillRefused::Size { bytes });
        }
        let slots = SpillSlots::new((bytes / PAGE_SIZE as u64) as u32);
        let records = vec![0; slots.slots() as usize];
        backend.attach(wait_queue);
        Ok(Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            arena: Arc::clone(arena),
            wait_queue: Arc::clone(wait_queue),
            backend,
            compress: options.compress,
            store: Mutex::new(Store { slots, records }),
            in_flight: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            missing_run: AtomicU32::new(u32::MAX),
            errno: AtomicI32::new(0),
            spilled: AtomicU64::new(0),
            spilled_in: AtomicU64::new(0),
            read: AtomicU64::new(0),
            heap: Mutex::new(HeapQueue::default()),
            pages: AtomicU64::new(0),
            write_errors: AtomicU64::new(0),
            read_errors: AtomicU64::new(0),
        }))
    }

    /// The backend that it is read and written by: for threads that wait.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Pages under way to the file, and folios whose way has ended so far.
    pub fn under_way(&self) -> (u64, u64) {
        (self.in_flight.load(Ordering::Relaxed), self.ended.load(Ordering::Relaxed))
    }

    /// Waits until nothing is under way to it.
    pub fn drain(&self) {
        self.wait_queue.wait(&*self.backend, &mut || self.in_flight.load(Ordering::Relaxed) == 0);
    }

    /// Waits until the way of some folio has ended that is under way now, fetching completions; `false`: none is.
    pub fn wait_for_one(&self) -> bool {
        let (in_flight, ended) = self.under_way();
        let has_ended = |(now, others): (u64, u64)| now == 0 || others != ended;
        self.wait_queue.wait(&*self.backend, &mut || has_ended(self.under_way()));
        in_flight > 0
    }

    /// The most pages that may be under way.
    pub fn in_flight_max(&self) -> u64 {
        (self.arena.pages_max() / IN_FLIGHT_SHARE).clamp(1, IN_FLIGHT_MAX)
    }

    /// Whether a folio of `order` may be handed over now, as far as can be told; a hint.
    pub fn has_capacity(&self, order: Order) -> bool {
        self.has_capacity_beside(order, 0)
    }

    /// As [`Spill::has_capacity`], beside `others` pages that are about to be handed over.
    pub fn has_capacity_beside(&self, order: Order, others: u64) -> bool {
        let (pages, in_flight) = (order.pages(), self.in_flight.load(Ordering::Relaxed) + others);
        let may_begin = in_flight == 0 || in_flight + u64::from(pages) <= self.in_flight_max();
        may_begin && pages < self.missing_run.load(Ordering::Relaxed)
    }

    /// Why folios stay that might have gone, if that is so.
    pub fn trouble(&self) -> Option<SpillTrouble> {
        match self.errno.load(Ordering::Relaxed) {
            0 => (self.missing_run.load(Ordering::Relaxed) < u32::MAX).then_some(SpillTrouble::Full),
            errno => Some(SpillTrouble::Failed(errno)),
        }
    }

    /// Counts and sizes of the spill file.
    pub fn stats(&self) -> SpillStats {
        let (slots, taken) = {
            let store = self.store();
            (store.slots.slots(), store.slots.taken())
        };
        SpillStats {
            spilled_pages: self.spilled.load(Ordering::Relaxed),
            spilled_in_pages: self.spilled_in.load(Ordering::Relaxed),
            read_pages: self.read.load(Ordering::Relaxed),
            pages: self.pages.load(Ordering::Relaxed),
            bytes: u64::from(taken) * PAGE_SIZE as u64,
            bytes_max: u64::from(slots) * PAGE_SIZE as u64,
            write_errors: self.write_errors.load(Ordering::Relaxed),
            read_errors: self.read_errors.load(Ordering::Relaxed),
        }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the folio that `value` stands for is packed: it comes back as a whole then, and is not split.
    pub fn is_packed(&self, value: Value) -> bool {
        self.store().is_packed(value)
    }

    /// A folio has been replaced by its value: so many pages are here now.
    pub fn note_spilled(&self, pages: u32) {
        self.spilled.fetch_add(u64::from(pages), Ordering::Relaxed);
        self.pages.fetch_add(u64::from(pages), Ordering::Relaxed);
    }

    /// Pages came back, to stand in memory again; their slots are freed by [`Spill::free`].
    pub fn note_spilled_in(&self, pages: u64) {
        self.spilled_in.fetch_add(pages, Ordering::Relaxed);
    }

    /// Notes that `pages` pages were read where they are, and that the values that stand for them stood to the end.
    pub fn note_read(&self, pages: u64) {
        self.read.fetch_add(pages, Ordering::Relaxed);
    }

    /// Frees the slots of `value`, which no tree names any more. A reader of them may go on.
    pub fn free(&self, value: Value) {
        let mut store = self.store();
        let slots = store.slots_of(value);
        store.slots.free(slots);
        self.missing_run.store(u32::MAX, Ordering::Relaxed);
        drop(store);
        self.pages.fetch_sub(u64::from(Order(value.order()).pages()), Ordering::Relaxed);
    }

    /// Gives back the slots of a folio that stays in memory after all.
    pub fn free_unused(&self, value: Value) {
        self.pages.fetch_add(u64::from(Order(value.order()).pages()), Ordering::Relaxed);
        self.free(value);
    }

    /// The values that are to be read: until [`SlotReadGuard`] is dropped their slots are not reused. The caller holds
    /// the lock of the tree in which they stand.
    ///
    /// # Errors
    /// Another thread reads some of them, and is to be waited for by [`Spill::wait_for_readers`]: their slots.
    pub fn begin_read(&self, values: &[Value]) -> Result<SlotReadGuard<'_>, Vec<Range<u32>>> {
        let mut store = self.store();
        let slots: Vec<_> = values.iter().map(|&value| store.slots_of(value)).collect();
        if slots.iter().any(|slots| store.slots.is_read(slots)) {
            return Err(slots);
        }
        for slots in &slots {
            let begun = store.slots.begin_read(slots.clone());
            debug_assert!(begun, "no slot is two folios'");
        }
        drop(store);
        Ok(SlotReadGuard { spill: self, slots })
    }

    /// As [`Spill::begin_read`], of `pages` of the folio that `value` stands for, for a thread that only wants their
    /// bytes: it shares the slots, and neither waits for another reader nor holds one up. All slots of the value, so
    /// that no later folio gets the same value while they are shared.
    pub fn begin_share(&self, value: Value, pages: Range<u32>) -> SharedSlots<'_> {
        let mut store = self.store();
        let packed_bytes = store.record(value.payload()).packed_bytes() as usize;
        let slots = store.slots_of(value);
        store.slots.begin_share(slots.clone());
        drop(store);
        SharedSlots { spill: self, value, pages, slots, packed_bytes }
    }

    /// Waits until no thread is alone with these slots, reading. They may have been given to other folios meanwhile.
    pub fn wait_for_readers(&self, slots: &[Range<u32>]) {
        self.wait_queue.wait(&*self.backend, &mut || {
            let store = self.store();
            !slots.iter().any(|slots| store.slots.is_read(slots))
        });
    }

    /// Checks the slots, given the values of all trees: each has its slots, and no other slot is
    /// taken. If something changed while the values were gathered, less is checked. Cost: all slots.
    pub fn check(&self, values: impl IntoIterator<Item = Value>) -> Result<(), String> {
        let changes = || (self.under_way(), self.stats());
        let before = changes();
        let values: Vec<Value> = values.into_iter().collect();
        let is_still = before == changes();
        let store = self.store();
        store.slots.check()?;
        if !is_still {
            return Ok(());
        }
        let mut seen = SpillSlots::new(store.slots.slots());
        let mut pages = 0;
        for value in values {
            pages += u64::from(Order(value.order()).pages());
            let slots = store.slots_of(value);
            for slot in slots {
                if !store.slots.is_taken(slot) {
                    return Err(format!("{value:?} names slot {slot}, which is free"));
                }
                if !seen.take_this(slot) {
                    return Err(format!("slot {slot} belongs to two folios"));
                }
            }
        }
        let held = self.pages.load(Ordering::Relaxed);
        if pages != held {
            return Err(format!("{held} pages are said to be in the spill file, and trees name {pages}"));
        }
        let named = seen.taken() + store.slots.condemned();
        if self.in_flight.load(Ordering::Relaxed) == 0 && named != store.slots.taken() {
            return Err(format!(
                "{} slots are taken, and trees, pins and readers name {named} of them",
                store.slots.taken()
            ));
        }
        Ok(())
    }
}

impl Store {
    fn record(&self, slot: u32) -> SlotRecord {
        SlotRecord(self.records[slot as usize])
    }
    fn is_packed(&self, value: Value) -> bool {
        self.record(value.payload()).packed_bytes() > 0
    }
    fn slots_of(&self, value: Value) -> Range<u32> {
        let first = value.payload();
        match self.record(first).packed_bytes() {
            0 => first..first + Order(value.order()).pages(),
            bytes => first..first + bytes.div_ceil(PAGE_SIZE as u32),
        }
    }
}

/// Slots that the owner of this reads beside others, for some pages of a folio.
#[derive(Debug)]
pub struct SharedSlots<'s> {
    spill: &'s Spill,
    value: Value,
    /// Pages of the folio, counted from its first.
    pages: Range<u32>,
    slots: Range<u32>,
    /// 0: the folio is plain, and each page has a slot.
    packed_bytes: usize,
}

impl Drop for SharedSlots<'_> {
    fn drop(&mut self) {
        let mut store = self.spill.store();
        if store.slots.end_share(self.slots.clone()) {
            self.spill.missing_run.store(u32::MAX, Ordering::Relaxed);
        }
    }
}

/// Slots that are being read by the owner of this.
#[derive(Debug)]
pub struct SlotReadGuard<'s> {
    spill: &'s Spill,
    slots: Vec<Range<u32>>,
}

impl Drop for SlotReadGuard<'_> {
    fn drop(&mut self) {
        let mut store = self.spill.store();
        let ended = std::mem::take(&mut self.slots);
        ended.into_iter().for_each(|slots| store.slots.end_read(slots));
        self.spill.missing_run.store(u32::MAX, Ordering::Relaxed);
        drop(store);
        self.spill.wait_queue.wake();
    }
}

impl fmt::Debug for Spill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spill")
            .field("backend", &self.backend)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// A file without a name, for this cache alone, in the folder `path`; or one that had the name `path` for a moment.
fn nameless(path: &Path) -> io::Result<OwnedFd> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    let made = |path: &Path| -> io::Result<OwnedFd> {
        let file = open(path, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode)?;
        unlink(path)?;
        Ok(file)
    };
    if !path.is_dir() {
        return made(path);
    }
    if let Ok(file) = open(path, flags | OFlags::TMPFILE, mode) {
        return Ok(file);
    }
    // Some file systems have no such files: then one with a name, for a moment.
    for nth in 0..NAMES_MAX {
        match made(&path.join(format!(".quinion-spill-{}-{nth}", std::process::id()))) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            done => return done,
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

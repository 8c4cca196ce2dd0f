//! Disk tier: a store on a local disk before backends whose bytes are dear.
//!
//! ```text
//!   submit(fills) --all pages on the disk?--yes--> a thread of the tier: read, compare checksums --> Fill::complete
//!                          |no                             | a miss after all
//!                          v                               v
//!                   the backend itself <-------------------+
//!                          | bytes have arrived
//!                          v
//!                   copy to the disk's open segment, if they are worth it --> the fill's own sink
//! ```
//!
//! A backend takes part if its bytes have a name that lasts ([`Backend::content_key`]), such as an object's version,
//! and it cannot write. So bytes on the disk are never out of date, and nothing is ever invalidated.
//!
//! **What arrives goes to the disk at once**, and not when memory evicts it: pages hot in memory would be lost with a
//! process that is killed. While the disk has free space everything is worth it. Once it is full, only pages that
//! arrive a second time are put, by a table of fingerprints: one pass over much data does not push out pages that are
//! read again and again.
//!
//! **What arrives while the disk is behind is pending.** The disk refuses it, and the arrival does not wait: it notes
//! which folios it has filled (`pending_copies.rs`). A task of the cache copies them from memory when the disk has room
//! again ([`DiskTier::copy_pending`]), oldest first, and leaves one of the disk's buffers to pages that arrive
//! meanwhile. Pages that have left memory by then are kept at their second arrival.
//!
//! A fill is read from the disk whole or not at all.
//!
//! Invariants:
//!  1. Each fill is completed once: by the disk with bytes whose checksums agree, or by the backend.
//!  2. Bytes copied to the disk are those that the backend delivered: before another thread could write there, since
//!     the fill's folios are locked until its sink is told; or later, by the rule of `pending_copies.rs`.
//!  3. A page that was pending is put late, missed, or still pending, also if the task that copies panics. A disk that
//!     is left alone owes nothing.
//!
//! Locks: the store's own, and two mutexes, of the table of fingerprints and of the pending copies, which are leaves.
//! None is held at a device, or while memory is copied.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quinion_disk::{ContentKey, DiskError, DiskOptions, DiskStats, DiskStore};

use super::pending_copies::{Arrival, PENDING_MAX, PendingCopies, PendingCopy};
use super::threads::Source;
use super::work::Work;
use super::{
    Attributes, Backend, Fill, FillRun, FillSink, Flush, Leasable, ParkedBackend, ReapMode, ReapOutcome,
    SyncKind, ThreadPool, WaitQueue,
};
use crate::arena::Arena;
use crate::units::PAGE_SIZE;

/// Threads that read from the disk: as many requests as a disk likes to have at a time, in part.
const THREADS_MAX: usize = 8;
/// Fills that wait for these threads before the backend is said to have no room.
const QUEUE_MAX: usize = 256;
/// The disk counts as full from so many of 100 of its bytes on.
const FULL_PERCENT: u64 = 90;
/// Pages that have one fingerprint together.
const FINGERPRINT_PAGES: u64 = 16;
/// Fingerprints at least, and at most: 16 KiB to 16 MiB of heap.
const FINGERPRINTS: Range<usize> = 1 << 12..1 << 22;
/// Pages that are copied late in one piece, and pieces in one call. A piece opens one segment of the disk at most.
const LATE_PAGES: u64 = 240;
const LATE_PIECES: usize = 8;
/// Free segments of the disk with which something is copied late: one is left to arrivals.
const LATE_SEGMENTS: usize = 2;
/// After so many arrivals that were pending `on_pending` is called again.
const WAKE_PUSHES: u64 = 1024;

pub(crate) struct DiskTier {
    store: DiskStore,
    pool: ThreadPool,
    arena: Arc<Arena>,
    full_pages: u64,
    arrived: Mutex<ArrivedTable>,
    pending: Mutex<PendingCopies>,
    on_pending: Box<dyn Fn() + Send + Sync>,
    late_pages: AtomicU64,
    missed_pages: AtomicU64,
}

pub(crate) struct TierParts<'a> {
    pub store: DiskStore,
    pub options: &'a DiskOptions,
    pub arena: &'a Arc<Arena>,
    pub wait_queue: &'a Arc<WaitQueue>,
    /// Callback when a folio is pending and none was, and for each 1,024th pending folio: a task that panicked
    /// runs again only if it is woken. It waits for nothing.
    pub on_pending: Box<dyn Fn() + Send + Sync>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyOutcome {
    Nothing,
    /// Something is pending, and the disk has no room: come again a little later. `took`: it had room for something.
    Behind {
        took: bool,
    },
    More,
}

impl DiskTier {
    /// Opens or makes the store of that name. Reads its tables.
    pub(crate) fn open_store(options: &DiskOptions) -> Result<DiskStore, DiskError> {
        DiskStore::open_with(options, crate::sys::signal::block_all)
    }

    pub(crate) fn new(parts: TierParts<'_>) -> Self {
        let TierParts { store, options, arena, wait_queue, on_pending } = parts;
        let pages = options.bytes / PAGE_SIZE as u64;
        Self {
            store,
            pool: ThreadPool::new(Arc::clone(wait_queue), THREADS_MAX, QUEUE_MAX),
            arena: Arc::clone(arena),
            full_pages: pages / 100 * FULL_PERCENT,
            arrived: Mutex::new(ArrivedTable::for_pages(pages)),
            pending: Mutex::new(PendingCopies::new(PENDING_MAX)),
            on_pending,
            late_pages: AtomicU64::new(0),
            missed_pages: AtomicU64::new(0),
        }
    }

    /// `inner` behind this disk, if its bytes have a name that lasts; else itself.
    pub(crate) fn before(self: &Arc<Self>, inner: Arc<dyn Backend>) -> Arc<dyn Backend> {
        let key = inner.content_key().filter(|_| !inner.can_write());
        let size = inner.attributes().map(|attributes| attributes.size);
        match (key, size) {
            (Some(key), Ok(size)) => Arc::new(TieredBackend {
                source: Arc::new(TierSource { tier: Arc::clone(self), inner, key: Arc::new(key), size }),
            }),
            _ => inner,
        }
    }

    pub(crate) fn stats(&self) -> DiskStats {
        let mut stats = self.store.stats();
        stats.pending_pages = self.pending().pages();
        stats.late_pages = self.late_pages.load(Ordering::Relaxed);
        stats.missed_pages = self.missed_pages.load(Ordering::Relaxed);
        stats
    }

    pub(crate) fn trouble(&self) -> Option<String> {
        self.store.trouble().map(|trouble| trouble.to_string())
    }

    /// Puts pages of a run on the disk: to be called by the sink of its fill, before the fill is ended.
    fn keep(&self, key: &Arc<ContentKey>, run: FillRun, bytes: &[u8]) {
        let (first, pages) = (run.index.0, (bytes.len() / PAGE_SIZE) as u64);
        let is_known = {
            let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            arrived.note(key, first..first + pages)
        };
        if !is_known && !self.has_space() {
            return;
        }
        let kept = self.store.put(key, first, bytes);
        if kept < pages && !self.store.is_off() {
            let pending = PendingCopy::of_arrival(
                self.arena.view(),
                Arrival { key, run, wanted: kept as u32..pages as u32, is_known },
            );
            self.note_pending(pending);
        }
    }

    fn has_space(&self) -> bool {
        self.store.stats().pages < self.full_pages
    }

    fn note_pending(&self, pending: impl Iterator<Item = PendingCopy>) {
        let mut list = self.pending();
        let was_empty = list.is_empty();
        let before = list.pushes();
        let missed = pending.map(|pending| list.push(pending)).sum();
        let is_first = was_empty && !list.is_empty();
        let is_due = list.pushes() / WAKE_PUSHES > before / WAKE_PUSHES;
        drop(list);
        self.note_missed(missed);
        if is_first || is_due {
            (self.on_pending)();
        }
    }

    /// Copies some MiB of pending pages at most to the disk, by way of `buffer`. Waits for no device.
    pub(crate) fn copy_pending(&self, buffer: &mut Vec<u8>) -> CopyOutcome {
        for piece in 0..LATE_PIECES {
            if self.store.is_off() {
                let missed = self.pending().clear();
                self.note_missed(missed);
                return CopyOutcome::Nothing;
            }
            if self.pending().is_empty() {
                return CopyOutcome::Nothing;
            }
            if self.store.free_segments() < LATE_SEGMENTS {
                return CopyOutcome::Behind { took: piece > 0 };
            }
            let pages = self.pending().take(LATE_PAGES);
            self.copy(&mut TakenPages { tier: self, pages }, buffer);
        }
        CopyOutcome::More
    }

    /// Copies the taken pages, which are neighbours, as far as they are in memory still; refused ones are pending
    /// again.
    fn copy(&self, taken: &mut TakenPages<'_>, buffer: &mut Vec<u8>) {
        let (taken, has_space) = (&mut taken.pages, self.has_space());
        while !taken.is_empty() {
            buffer.clear();
            let is_copied = |pending: &&PendingCopy| {
                let start = buffer.len();
                buffer.resize(start + pending.bytes(), 0);
                let is_worth = has_space || pending.is_known();
                let is_copied = is_worth && pending.peek(self.arena.view(), &mut buffer[start..]);
                buffer.truncate(if is_copied { start + pending.bytes() } else { start });
                is_copied
            };
            let copied = taken.iter().take_while(is_copied).count();
            if copied == 0 {
                let missed = taken.remove(0);
                self.note_missed(missed.pages());
                continue;
            }
            let first = taken[0].first();
            let end = first.plus(self.store.put(taken[0].key(), first.0, buffer));
            let is_kept = |pending: &&PendingCopy| pending.first().plus(pending.pages()) <= end;
            let kept = taken.iter().take(copied).take_while(is_kept).count();
            let late = taken.drain(..kept).map(|pending| pending.pages()).sum();
            self.late_pages.fetch_add(late, Ordering::Relaxed);
            if kept < copied {
                let missed = self.pending().put_back(taken.drain(..));
                self.note_missed(missed);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn free_segments(&self) -> usize {
        self.store.free_segments()
    }

    fn note_missed(&self, pages: u64) {
        self.missed_pages.fetch_add(pages, Ordering::Relaxed);
    }

    fn pending(&self) -> MutexGuard<'_, PendingCopies> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskTier").field("store", &self.store).finish_non_exhaustive()
    }
}

/// Pending pages taken off the list, being copied. Pages left in it when it is dropped, as by a panic, are missed.
struct TakenPages<'a> {
    tier: &'a DiskTier,
    pages: Vec<PendingCopy>,
}

impl Drop for TakenPages<'_> {
    fn drop(&mut self) {
        self.tier.note_missed(self.pages.iter().map(PendingCopy::pages).sum());
    }
}

/// At the place that its hash says, one fingerprint, the newest.
#[derive(Debug)]
struct ArrivedTable {
    fingerprints: Box<[u32]>,
}

impl ArrivedTable {
    /// For a disk of so many pages: with a place for each run of them that has one fingerprint, or about that.
    fn for_pages(pages: u64) -> Self {
        let places = usize::try_from(pages / FINGERPRINT_PAGES).unwrap_or(usize::MAX);
        let places = places.clamp(FINGERPRINTS.start, FINGERPRINTS.end).next_power_of_two();
        Self { fingerprints: vec![0; places].into_boxed_slice() }
    }

    /// Notes that these pages arrive. Whether all of them had arrived before.
    fn note(&mut self, key: &ContentKey, pages: Range<u64>) -> bool {
        let content = u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|at| key.0[at]));
        let mut all = true;
        for run in pages.start / FINGERPRINT_PAGES..pages.end.div_ceil(FINGERPRINT_PAGES) {
            // The key is a digest: a multiplication spreads the rest. (Fibonacci hashing, Knuth volume 3, 6.4.)
            let hash =
                (content ^ run.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
            let place = (hash >> 32) as usize & (self.fingerprints.len() - 1);
            let fingerprint = hash as u32 | 1; // 0 is none
            all &= std::mem::replace(&mut self.fingerprints[place], fingerprint) == fingerprint;
        }
        all
    }
}

/// A backend with a disk before it. All that is no read goes to the backend.
#[derive(Debug)]
struct TieredBackend {
    source: Arc<TierSource>,
}

#[derive(Debug)]
struct TierSource {
    tier: Arc<DiskTier>,
    inner: Arc<dyn Backend>,
    key: Arc<ContentKey>,
    size: u64,
}

impl TierSource {
    fn wanted(&self, fill: &Fill) -> (usize, u32) {
        let left = self.size.saturating_sub(fill.position());
        let bytes = usize::try_from(left).unwrap_or(usize::MAX).min(fill.len());
        (bytes, bytes.div_ceil(PAGE_SIZE) as u32)
    }

    fn is_on_disk(&self, fill: &Fill) -> bool {
        let (_, pages) = self.wanted(fill);
        pages > 0 && self.tier.store.has(&self.key, fill.run().index.0, pages)
    }

    /// Returns `fill`, whose bytes are copied to the disk before its sink is told of their arrival.
    fn kept_on_arrival(&self, mut fill: Fill) -> Fill {
        let (tier, key, size) = (Arc::clone(&self.tier), Arc::clone(&self.key), self.size);
        if let Some(sink) = fill.sink.take() {
            let buffer = FillBuffer(fill.buffer);
            fill.sink = Some(Arc::new(ArrivalSink { sink, tier, key, size, buffer }));
        }
        fill
    }

    fn split(&self, fills: Vec<Fill>) -> (Vec<Work>, Vec<Fill>) {
        let (here, elsewhere): (Vec<_>, Vec<_>) = fills.into_iter().partition(|fill| self.is_on_disk(fill));
        let elsewhere = elsewhere.into_iter().map(|fill| self.kept_on_arrival(fill)).collect();
        (here.into_iter().map(Work::Fill).collect(), elsewhere)
    }
}

impl Source for TierSource {
    fn device(&self) -> u64 {
        0 // all of a tier is on one
    }
    fn read(&self, fill: &mut Fill, _bounce: &mut Vec<u8>) -> io::Result<usize> {
        let (bytes, pages) = self.wanted(fill);
        let page = fill.run().index.0;
        match self.tier.store.read(&self.key, page, pages, &mut |at, bytes| fill.write(at, bytes)) {
            Ok(()) => Ok(bytes),
            Err(_) => Err(io::Error::other("not on the disk after all")),
        }
    }

    fn read_failed(&self, fill: Fill, _error: io::Error) {
        self.inner.submit(vec![self.kept_on_arrival(fill)]);
    }

    fn write(&self, _flush: &Flush, _bounce: &mut Vec<u8>) -> Result<(), super::FlushError> {
        Err(super::FlushError { written: 0, error: super::read_only("disk tier") })
    }
}

struct FillBuffer(NonNull<u8>);

// SAFETY: an address, of memory that is read only while the fill that owns it has not been completed.
unsafe impl Send for FillBuffer {}
// SAFETY: as above; a shared one gives out the address only.
unsafe impl Sync for FillBuffer {}

struct ArrivalSink {
    sink: Arc<dyn FillSink>,
    tier: Arc<DiskTier>,
    key: Arc<ContentKey>,
    size: u64,
    buffer: FillBuffer,
}

impl FillSink for ArrivalSink {
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>) {
        let left = self.size.saturating_sub(run.index.first_byte());
        // A backend that delivers less than the content has says that something is wrong: nothing of it is kept.
        let is_whole = |bytes: usize| bytes as u64 >= left.min(u64::from(run.pages) * PAGE_SIZE as u64);
        if let Ok(bytes) = result
            && bytes > 0
            && is_whole(bytes)
        {
            let pages = bytes.div_ceil(PAGE_SIZE);
            // SAFETY: the run's frames begin here and are so many pages at least. They hold the file's bytes, zeroed
            // behind its end, and are not written before the sink below is told: their folios are locked.
            let arrived = unsafe { std::slice::from_raw_parts(self.buffer.0.as_ptr(), pages * PAGE_SIZE) };
            self.tier.keep(&self.key, run, arrived);
        }
        self.sink.fill_completed(run, result);
    }
    fn pages_read(&self, run: FillRun, pages: Range<u32>) {
        self.sink.pages_read(run, pages);
    }
    fn wake_readers(&self, run: FillRun, pages: Range<u32>) {
        self.sink.wake_readers(run, pages);
    }
}

impl Backend for TieredBackend {
    fn name(&self) -> &'static str {
        self.source.inner.name()
    }
    fn submit(&self, fills: Vec<Fill>) {
        let (here, elsewhere) = self.source.split(fills);
        self.read_from_disk(here);
        if !elsewhere.is_empty() {
            self.source.inner.submit(elsewhere);
        }
    }
    fn submit_with_reap(&self, fills: Vec<Fill>) {
        let (here, elsewhere) = self.source.split(fills);
        self.read_from_disk(here);
        if !elsewhere.is_empty() {
            self.source.inner.submit_with_reap(elsewhere);
        }
    }
    fn fills_here(&self, bytes: usize) -> bool {
        self.source.inner.fills_here(bytes)
    }
    fn fill_here(&self, fill: Fill) {
        if self.source.is_on_disk(&fill) {
            self.submit(vec![fill]);
        } else {
            self.source.inner.fill_here(self.source.kept_on_arrival(fill));
        }
    }
    fn has_capacity(&self, fills: usize) -> bool {
        self.source.tier.pool.has_capacity(self.source.device(), fills)
            && self.source.inner.has_capacity(fills)
    }
    fn content_key(&self) -> Option<ContentKey> {
        self.source.inner.content_key()
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.source.inner.attributes()
    }
    fn attributes_may_wait(&self) -> bool {
        self.source.inner.attributes_may_wait()
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.source.inner.attach(wait_queue);
    }
    fn is_direct(&self) -> bool {
        self.source.inner.is_direct()
    }
    fn read_by_kernels_cache(&self) {
        self.source.inner.read_by_kernels_cache();
    }
    fn can_drop_behind(&self) -> bool {
        self.source.inner.can_drop_behind()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.source.inner.descriptor()
    }
    fn leasable(&self) -> Option<Leasable<'_>> {
        self.source.inner.leasable()
    }
    fn mount(&self) -> Option<u64> {
        self.source.inner.mount()
    }
    fn parked(&self) -> Option<ParkedBackend> {
        self.source.inner.parked()
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.source.inner.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.source.inner.wants_leader()
    }
    fn is_removed(&self) -> bool {
        self.source.inner.is_removed()
    }
    fn sync_others(&self, kind: SyncKind) -> io::Result<()> {
        self.source.inner.sync_others(kind)
    }
}

impl TieredBackend {
    fn read_from_disk(&self, fills: Vec<Work>) {
        if !fills.is_empty() {
            let source: Arc<dyn Source> = Arc::<TierSource>::clone(&self.source);
            self.source.tier.pool.submit(&source, fills.into_iter());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex as StdMutex};
    use std::thread;
    use std::time::{Duration, Instant};

    use quinion_disk::Device;

    use super::*;
    use crate::arena::{ArenaOptions, before_bytes};
    use crate::folio::copy;
    use crate::units::{Frame, MappingId, Order, PageIndex};

    const ORDER: Order = Order(2);
    const BYTES: usize = 4 * PAGE_SIZE;
    const FIRST: PageIndex = PageIndex(12);
    const LONG: Duration = Duration::from_secs(60);

    #[derive(Clone, Debug)]
    struct HeldDisk(Arc<(StdMutex<Vec<u8>>, StdMutex<bool>, Condvar)>);

    impl HeldDisk {
        fn hold(&self, holds: bool) {
            *self.0.1.lock().unwrap() = holds;
            self.0.2.notify_all();
        }
    }

    impl Device for HeldDisk {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            buffer.copy_from_slice(&self.0.0.lock().unwrap()[offset as usize..][..buffer.len()]);
            Ok(())
        }
        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            drop(self.0.2.wait_while(self.0.1.lock().unwrap(), |holds| *holds).unwrap());
            self.0.0.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Bench {
        arena: Arc<Arena>,
        tier: Arc<DiskTier>,
        disk: HeldDisk,
        wakes: Arc<AtomicU64>,
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            self.disk.hold(false);
        }
    }

    impl Bench {
        fn new() -> Self {
            let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
            let options = DiskOptions::new("", 16 << 20).buffer_bytes(3 << 20);
            let disk =
                HeldDisk(Arc::new((StdMutex::new(vec![0; 16 << 20]), StdMutex::default(), Condvar::new())));
            let store = DiskStore::open_on(Box::new(disk.clone()), &options).unwrap();
            let wakes = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&wakes);
            let on_pending = Box::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
            });
            let tier = DiskTier::new(TierParts {
                store,
                options: &options,
                arena: &arena,
                wait_queue: &Arc::new(WaitQueue::new()),
                on_pending,
            });
            Self { arena, tier: Arc::new(tier), disk, wakes }
        }

        fn hold_and_fill(&self) {
            self.disk.hold(true);
            let mut page = 0;
            while self.tier.store.put(&key(200), page, &[200; BYTES]) == 4 {
                page += 16;
            }
        }

        fn filling(&self, byte: u8) -> Frame {
            let frame = self.arena.alloc(ORDER).unwrap();
            fill_again(&self.arena, frame, byte);
            frame
        }

        fn arrived(&self, of: u8, index: PageIndex, byte: u8) {
            let frame = self.filling(byte);
            let descriptor = self.arena.view().own(frame);
            descriptor.complete();
            descriptor.try_retire().unwrap();
            descriptor.prepare(MappingId(7), index, ORDER);
            self.tier.keep(&Arc::new(key(of)), FillRun { index, frame, pages: 4 }, &[byte; BYTES]);
            descriptor.complete();
        }

        fn bytes_of(&self, frame: Frame) -> Vec<u8> {
            let mut bytes = vec![0; BYTES];
            let from = self.arena.view().bytes(frame).unwrap();
            // SAFETY: the frames are this test's, and of so many bytes.
            unsafe { copy::copy_out(from, bytes.as_mut_ptr(), BYTES) };
            bytes
        }

        fn arrive(&self, frame: Frame, of: u8, sink: Arc<dyn FillSink>) {
            let buffer = FillBuffer(NonNull::new(self.arena.view().bytes(frame).unwrap()).unwrap());
            let (tier, key) = (Arc::clone(&self.tier), Arc::new(key(of)));
            let sink = ArrivalSink { sink, tier, key, size: 1 << 20, buffer };
            sink.fill_completed(FillRun { index: FIRST, frame, pages: 4 }, Ok(BYTES));
        }

        fn copy_all(&self) {
            let (begun, mut buffer) = (Instant::now(), Vec::new());
            while self.tier.copy_pending(&mut buffer) != CopyOutcome::Nothing {
                assert!(begun.elapsed() < LONG, "{:?}", self.tier.stats());
                thread::yield_now();
            }
        }

        fn on_disk(&self, of: u8) -> Option<Vec<u8>> {
            self.on_disk_at(of, FIRST)
        }
        fn on_disk_at(&self, of: u8, index: PageIndex) -> Option<Vec<u8>> {
            let mut bytes = vec![0; BYTES];
            let mut sink = |at: usize, more: &[u8]| bytes[at..at + more.len()].copy_from_slice(more);
            self.tier.store.read(&key(of), index.0, 4, &mut sink).ok()?;
            Some(bytes)
        }
        fn counts(&self) -> (u64, u64, u64) {
            let stats = self.tier.stats();
            (stats.late_pages, stats.pending_pages, stats.missed_pages)
        }
    }

    fn key(of: u8) -> ContentKey {
        ContentKey([of; 32])
    }

    fn fill_again(arena: &Arena, frame: Frame, byte: u8) {
        before_bytes();
        let to = arena.view().bytes(frame).unwrap();
        // SAFETY: the frames are this test's, and of so many bytes.
        unsafe { copy::copy_in([byte; BYTES].as_ptr(), to, BYTES) };
        arena.view().own(frame).prepare(MappingId(7), FIRST, ORDER);
    }

    /// The cache's own sink, with an event that may follow at once: the folio leaves the index, and its frames are
    /// filled with other bytes for the same pages.
    struct RefillingSink(Arc<Arena>);

    impl FillSink for RefillingSink {
        fn fill_completed(&self, run: FillRun, _result: io::Result<usize>) {
            let descriptor = self.0.view().own(run.frame);
            descriptor.complete();
            descriptor.try_retire().unwrap();
            fill_again(&self.0, run.frame, 99);
            descriptor.complete();
        }
    }

    /// 1 A fill ends, and its sink is told. 2 The folio is not locked any more: another thread may change it before the
    /// sink's caller has gone on. 3 The bytes that are then copied to the disk, or noted as pending, are not those of
    /// the content that they are named by.
    #[test]
    fn pages_that_arrive_are_kept_before_another_thread_can_change_them() {
        let bench = Bench::new();
        let frame = bench.filling(1);
        bench.arrive(frame, 1, Arc::new(RefillingSink(Arc::clone(&bench.arena))));
        assert_eq!(bench.bytes_of(frame), [99; BYTES]);
        assert_eq!(bench.on_disk(1), Some(vec![1; BYTES]));
    }

    #[test]
    fn pages_that_arrive_are_pending_before_another_thread_can_change_them() {
        let bench = Bench::new();
        bench.hold_and_fill();
        let frame = bench.filling(1);
        bench.arrive(frame, 1, Arc::new(RefillingSink(Arc::clone(&bench.arena))));
        assert_eq!(bench.tier.stats().pending_pages, 4);
        bench.disk.hold(false);
        bench.copy_all();
        assert_eq!((bench.tier.stats().late_pages, bench.tier.stats().missed_pages), (0, 4));
        assert_eq!(bench.on_disk(1), None, "bytes of a later folio");
    }

    struct EndingSink(Arc<Arena>);

    impl FillSink for EndingSink {
        fn fill_completed(&self, run: FillRun, _result: io::Result<usize>) {
            self.0.view().own(run.frame).complete();
        }
    }

    #[test]
    fn the_task_is_woken_by_the_first_that_is_pending_and_by_each_1024th() {
        let bench = Bench::new();
        bench.hold_and_fill();
        let frame = bench.filling(1);
        let run = FillRun { index: FIRST, frame, pages: 4 };
        let wakes_after = |arrivals: u64| {
            (0..arrivals).for_each(|_| bench.tier.keep(&Arc::new(key(1)), run, &[1; BYTES]));
            bench.wakes.load(Ordering::Relaxed)
        };
        assert_eq!((wakes_after(1), wakes_after(1022), wakes_after(1)), (1, 1, 2));
        assert_eq!((wakes_after(1023), wakes_after(1)), (2, 3));
    }

    /// The disk has room for the first of two folios, and others have taken the room for the second.
    #[test]
    fn a_folio_that_is_refused_again_is_pending_again() {
        let bench = Bench::new();
        bench.hold_and_fill();
        let next = FIRST.plus(4);
        bench.arrived(1, FIRST, 1);
        bench.arrived(1, next, 2);
        let pages = bench.tier.pending().take(LATE_PAGES);
        assert_eq!(pages.len(), 2, "they are neighbours");
        bench.disk.hold(false);
        let begun = Instant::now();
        while bench.tier.free_segments() < 3 {
            assert!(begun.elapsed() < LONG, "{:?}", bench.tier.stats());
            thread::yield_now();
        }
        // All is full again, but for four pages of the last segment.
        bench.disk.hold(true);
        for page in 0..3 * quinion_disk::internals::DATA_PAGES as u64 / 4 - 1 {
            assert_eq!(bench.tier.store.put(&key(201), page * 16, &[201; BYTES]), 4);
        }
        bench.tier.copy(&mut TakenPages { tier: &bench.tier, pages }, &mut Vec::new());
        assert_eq!(bench.counts(), (4, 4, 0));
        bench.disk.hold(false);
        bench.copy_all();
        assert_eq!(bench.counts(), (8, 0, 0));
        assert_eq!(bench.on_disk(1), Some(vec![1; BYTES]));
        assert_eq!(bench.on_disk_at(1, next), Some(vec![2; BYTES]));
    }

    /// Pages that arrived once were worth a place when they arrived, and the disk has become full since.
    #[test]
    fn a_full_disk_takes_only_pages_that_arrived_twice_later() {
        let mut bench = Bench::new();
        Arc::get_mut(&mut bench.tier).unwrap().full_pages = 800;
        bench.hold_and_fill();
        bench.arrived(1, FIRST, 1);
        bench.arrived(2, FIRST, 2);
        bench.arrived(2, FIRST, 2);
        assert_eq!(bench.counts(), (0, 12, 0));
        bench.disk.hold(false);
        let begun = Instant::now();
        for page in 0..20 {
            while bench.tier.store.put(&key(201), page * 16, &[201; BYTES]) < 4 {
                assert!(begun.elapsed() < LONG, "{:?}", bench.tier.stats());
                thread::yield_now();
            }
        }
        assert!(!bench.tier.has_space());
        bench.copy_all();
        assert_eq!(bench.counts(), (4, 0, 8));
        assert_eq!((bench.on_disk(1), bench.on_disk(2)), (None, Some(vec![2; BYTES])));
    }

    #[test]
    fn pages_that_a_panic_leaves_uncopied_are_missed() {
        let bench = Bench::new();
        bench.hold_and_fill();
        let frame = bench.filling(1);
        bench.arrive(frame, 1, Arc::new(EndingSink(Arc::clone(&bench.arena))));
        let pages = bench.tier.pending().take(LATE_PAGES);
        let taken = TakenPages { tier: &bench.tier, pages };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _taken = taken;
            std::panic::resume_unwind(Box::new("in the middle of it"));
        }));
        assert!(panicked.is_err());
        assert_eq!((bench.tier.stats().pending_pages, bench.tier.stats().missed_pages), (0, 4));
    }

    #[test]
    fn a_piece_that_is_copied_late_is_less_than_a_segment() {
        assert!(LATE_PAGES <= quinion_disk::internals::DATA_PAGES as u64);
    }

    #[test]
    fn a_range_that_arrives_again_is_known_and_a_new_one_is_not() {
        let mut table = ArrivedTable::for_pages(1 << 20);
        let key = |of: u8| ContentKey([of; 32]);
        assert!(!table.note(&key(1), 0..32));
        assert!(table.note(&key(1), 0..32));
        assert!(table.note(&key(1), 3..5));
        assert!(!table.note(&key(1), 16..48), "a part of it is new");
        assert!(!table.note(&key(2), 0..32), "another content");
    }

    #[test]
    fn a_table_has_a_size_between_its_bounds() {
        assert_eq!(ArrivedTable::for_pages(1).fingerprints.len(), FINGERPRINTS.start);
        assert_eq!(ArrivedTable::for_pages(1 << 50).fingerprints.len(), FINGERPRINTS.end);
    }
}

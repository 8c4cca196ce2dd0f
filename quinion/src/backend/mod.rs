//! Backend: where the bytes of one file come from, and go to.
//!
//! A backend is given [`Fill`]s, each a locked run of folios with consecutive pages and consecutive frames, and
//! completes them, in any order, on any thread. If it can write it is given [`Flush`]es as well, which are the same the
//! other way. It never sees a mapping, a tree or a reader.
//!
//! ```text
//!   fill path --submit(Fill, Fill, ..)--> backend --device, pool, memory--> Fill::complete(bytes)
//!                                            ^                                    |
//!   a waiting reader --reap----------------- +             FillSink::fill_completed (folios unlocked,
//!                                                          waiters woken)
//! ```
//!
//! **Waiting threads may reap.** A backend whose completions must be fetched (a ring) is driven by the threads that
//! wait for it: one of them, the leader, waits for the device; the others sleep in the [`WaitQueue`] until their folio
//! is ready or there is no leader. So a lone reader needs no second thread.
//!
//! | backend | bytes from | completes |
//! |---|---|---|
//! | `LocalFile` of an `Engine` | a file or block device | when reaped (io_uring) or by itself (threads); or in `fill_here` |
//! | a revision of a local file | that file, while it is as it was | in `fill_here` |
//! | [`BlockingSource`] | a user's [`ReadAt`], or [`WriteAt`] | by itself |
//! | [`MemoryFile`] | a vector | inside `submit` and `flush` |
//! | a disk tier before any of them that is named for ever | a local disk, or that backend | by itself, or as that does |
//! | `SimulatedBackend` of `quinion-testing` | memory, a disk that crashes or a generator, with faults under a seed | when reaped |
//!
//! Of a fill of many pages some may arrive before it ends ([`Fill::pages_were_read`]); these stay readable if it fails.
//!
//! A `Fill` or a `Flush` that is dropped completes with an error: no path leaves a folio locked, or under write-back.
//!
//! **What is durable.** Power that fails may take away a flush that ended well, in whole or in part, in any order. A
//! flush that had *completed* before [`Backend::sync`] was called is durable when it returns `Ok`; one in flight is
//! not. If sync fails, all that was not durable has to be flushed again: a later sync that succeeds says nothing about
//! it, because Linux forgets pages that it could not write.
//!
//! Flushes and fills in flight have no order among themselves: a caller that wants one waits for the first.
//!
//! Invariants:
//!  1. A backend completes each fill and each flush exactly once; the type sees to it.
//!  2. No lock that the end of a fill or of a flush takes is held when a backend is called, so completing inside
//!     `submit` or `flush` is allowed. (A mapping's invalidate lock is held then, and its write lock for a cut.)
//!  3. No call of a backend waits for a fill or flush of another caller, except `reap` with a [`ReapMode`] that waits;
//!     and `sync`, for the device.
//!  4. Bytes that have arrived are not written again.
//!  5. Bytes of a file beyond those that `complete` was told of are never shown to a reader.
//!  6. Nothing is written behind the last byte of a flush.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::units::{FILE_BYTES_MAX, PAGE_SIZE};
#[doc(inline)]
pub use crate::units::{Frame, PageIndex};

mod deferred_wakes;
mod disk_tier;
mod pending_copies;
mod registration;
mod revision;
mod waker_registry;
pub(crate) mod engine;
pub(crate) mod local_file;
pub(crate) mod open_file;
mod flush;
mod memory;
mod null;
mod parked;
mod ring;
mod wait_queue;
mod slab;
#[cfg(test)]
mod tests;
mod threads;
mod transfer;
#[cfg(test)]
mod fake_kernel;
// The doubles of the crate `quinion-testing`, as source: that crate depends on this one, and its types are not those of
// this crate compiled for its unit tests. They name everything by `quinion::`, see `lib.rs`.
#[cfg(test)]
#[allow(dead_code, unused_imports, reason = "unit tests use a part")]
#[path = "../../../testing/src/doubles/mod.rs"]
pub(crate) mod doubles;
mod work;

pub use deferred_wakes::WakeCondition;
pub(crate) use deferred_wakes::{DeferredWakes, is_waking, lock_and_wake, pause};
pub(crate) use disk_tier::{CopyOutcome, DiskTier, TierParts};
pub use engine::Mechanism;
pub(crate) use engine::{Engine, EngineOptions};
pub use flush::{Flush, FlushError, FlushRun, FlushSink};
use flush::{read_only, zero_by};
pub use memory::MemoryFile;
pub(crate) use null::NullBackend;
pub(crate) use open_file::{Creation, InitialContent, OpenError, OpenForWrite, is_memory_file};
pub use parked::ParkedBackend;
pub use quinion_disk::ContentKey;
pub(crate) use registration::{Registered, RegisteredWaiter};
pub(crate) use revision::{FileRevision, RevisionOpen};
pub use threads::{BlockingSource, ReadAt, ThreadPool, WriteAt};
pub use wait_queue::WaitQueue;
pub(crate) use waker_registry::PageKey;

/// Attributes of a file at one moment: its identity, its size, the version of its content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attributes {
    /// Which file this is; two opens of one file agree on it.
    pub identity: Identity,
    /// Which content it has; see [`Version`].
    pub version: Version,
    /// Size of the file in bytes.
    pub size: u64,
}

impl Attributes {
    /// The size as the cache takes it: a backend may be wrong, and no file has more bytes than this.
    pub(crate) fn size_known(&self) -> u64 {
        self.size.min(FILE_BYTES_MAX)
    }
}

/// Which file: never the same for two files that exist at one time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// The device, or a number of the backend's own.
    pub device: u64,
    /// The inode, or a number of the backend's own.
    pub inode: u64,
    /// When the file was born, in nanoseconds since 1970; 0 where that is unknown.
    pub born: i64,
}

impl Identity {
    /// Set in the device of an identity of a digest: the kernel's devices are spread over the lower 44 bits.
    const DIGEST: u64 = 1 << 63;

    /// The identity of something that has a name in place of numbers, such as an object of a store: of the first 192
    /// bits of a cryptographic digest of all that tells it apart from others, but for one bit. A backend whose content
    /// may change under one name puts the version into the digest, too: then no page is ever of two versions. It
    /// differs from the identities of all files of the system.
    pub fn of_digest(digest: [u8; 24]) -> Self {
        let word = |at: usize| {
            let bytes = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| digest[at * 8 + i]);
            u64::from_le_bytes(bytes)
        };
        Self { device: word(0) | Self::DIGEST, inode: word(1), born: word(2) as i64 }
    }

    /// The device that calls for this file may wait for. All digests have one: their stores are not told apart.
    pub(crate) fn shared_device(&self) -> u64 {
        if self.device & Self::DIGEST == 0 { self.device } else { Self::DIGEST }
    }
}

/// Which content a file has, as far as its times tell. Equal versions of one file mean equal bytes,
/// unless the file was written within the clock's step of being looked at; see `settled`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Version {
    /// Last change of the content, in nanoseconds since 1970.
    pub modified: i64,
    /// Last change of the content or the inode, in nanoseconds since 1970.
    pub changed: i64,
    /// Whether, when this was read, the last change was old enough that a later one cannot carry the
    /// same time. An empty file is settled: no byte of it can be old.
    pub settled: bool,
    /// Whether a change that begins after this was read carries another time for sure, however soon that is. It says
    /// nothing of one that had begun before: its time may be this one, and its bytes still to come.
    pub steps: bool,
}

/// A file on which a read lease may be asked for.
#[derive(Clone, Copy, Debug)]
pub struct Leasable<'a> {
    /// Open for reading only, with a description of its own.
    pub descriptor: BorrowedFd<'a>,
    /// How its times reflect changes.
    pub times: FileTimes,
}

/// How the times of a file reflect changes of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileTimes {
    /// Any program that opens the file and changes it, in any way, changes them.
    ChangedByStores,
    /// The times may miss stores to the file's mapped memory.
    ChangedByWrites,
}

/// Where the bytes of one file come from. Implementations are shared between threads; [`Backend::attach`] says which
/// wake-ups a backend owes whose completions are reaped.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The name of the mechanism, for reports: "io_uring", "threads", "memory".
    fn name(&self) -> &'static str;

    /// Tells the backend of a wait queue in which threads wait for its fills, before the first of them is
    /// submitted. A backend that is reaped must wake each queue that it was told of whenever
    /// [`Backend::wants_leader`] may have become true; a backend that completes by itself need not remember.
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        let _ = wait_queue;
    }

    /// Whether its bytes are read past the kernel's page cache; a file system may still refuse the first read.
    fn is_direct(&self) -> bool {
        false
    }

    /// Reads go through the kernel's page cache from now on, because that holds the file, or newer bytes of it.
    fn read_by_kernels_cache(&self) {}

    /// Whether the file may be read by uncached reads. A backend whose bytes are dear, or come once only, says no.
    fn can_drop_behind(&self) -> bool {
        true
    }

    /// A name that its bytes have for ever: any two backends with this key, now or after years, have the same bytes.
    /// With it they may be kept on a disk tier ([`Builder::disk`](crate::Builder::disk)), unless the backend can write.
    fn content_key(&self) -> Option<ContentKey> {
        None
    }

    /// A descriptor of the file, if it is one of the system's: to look at it, not to read or to write by it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// The descriptor by which a read lease on the file may be asked for. `None`: no other program can open it
    /// by this system, or the library has it for writing.
    fn leasable(&self) -> Option<Leasable<'_>> {
        None
    }

    /// The mount of this system by which the file was opened: a number that no other mount ever has. `None`: not known.
    fn mount(&self) -> Option<u64> {
        None
    }

    /// Stand-in for the backend while the file has no open handle and its pages are kept; `None`: it has no descriptor.
    fn parked(&self) -> Option<ParkedBackend> {
        None
    }

    /// The file as it is now. May wait for the file system, never for the device's data.
    fn attributes(&self) -> io::Result<Attributes>;

    /// Whether [`Backend::attributes`] may wait, for another machine or another program. If not, threads that serve all
    /// files ask for them; else a thread that waits with this file's users alone.
    fn attributes_may_wait(&self) -> bool {
        true
    }

    /// Starts filling each of `fills`. Each is completed once, now or later, by [`Fill::complete`]. Does not
    /// wait for earlier fills: fills that the device cannot take yet are kept, and go to it when others reap.
    fn submit(&self, fills: Vec<Fill>);

    /// As [`Backend::submit`], by a caller that will wait for these fills by [`Backend::reap`] at once. Fills left
    /// until then goes to the device at the next reap or submission of any thread, and [`Backend::wants_leader`] is
    /// true meanwhile.
    fn submit_with_reap(&self, fills: Vec<Fill>) {
        self.submit(fills);
    }

    /// Whether a fill of `bytes` bytes, whose reader waits for it alone, is better made on its own thread.
    fn fills_here(&self, bytes: usize) -> bool {
        let _ = bytes;
        false
    }

    /// Fills on the caller's thread, which holds no lock, by a call that blocks; where [`Backend::fills_here`] says so.
    fn fill_here(&self, fill: Fill) {
        self.submit(vec![fill]);
    }

    /// Whether `fills` more requests can be submitted without waiting for earlier ones; a hint.
    fn has_capacity(&self, fills: usize) -> bool {
        let _ = fills;
        true
    }

    /// Fetches completions on the caller's thread, if this backend has any to be fetched. `done` says whether what
    /// the caller waits for has happened; it is called after leadership is taken and before waiting, so that no
    /// thread waits for what is already there. The caller holds no lock that completing a fill may take.
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        let _ = (how, done);
        ReapOutcome::Elsewhere
    }

    /// Whether no thread leads now, so that a sleeper should try to. Asked with the wait queue's lock held.
    fn wants_leader(&self) -> bool {
        false
    }

    /// Whether it takes flushes, and the calls below. If not, they fail as [`Unsupported`](io::ErrorKind::Unsupported).
    fn can_write(&self) -> bool {
        false
    }

    /// Whether a write behind its end makes the file longer. A device has the size it has.
    fn can_grow(&self) -> bool {
        true
    }

    /// Whether the file has lost its last name, so that its space is free when the last descriptor is closed; `false`
    /// if that cannot be determined. Waits for no device.
    fn is_removed(&self) -> bool {
        false
    }

    /// Starts writing each of `flushes`. Each is completed once, now or later, by [`Flush::complete`], as fills
    /// are: the thread that waits reaps. A flush that lies behind the end makes the file longer, by no more than its
    /// bytes. Two flushes of one page at a time leave either's bytes, so callers have one under way.
    fn flush(&self, flushes: Vec<Flush>) {
        for flush in flushes {
            flush.complete(Err(FlushError { written: 0, error: read_only(self.name()) }));
        }
    }

    /// Whether `flush`, which the caller waits for next, is better made on its own thread.
    fn flushes_here(&self, flush: &Flush) -> bool {
        let _ = flush;
        false
    }

    /// Flushes on the caller's thread, which holds no lock, by calls that block; if [`Backend::flushes_here`] says so.
    fn flush_here(&self, flush: Flush) {
        self.flush(vec![flush]);
    }

    /// Makes durable the bytes of `range` at least: writes that had completed before the call are durable when it
    /// returns.
    ///
    /// # Errors
    /// Bytes that were not durable before may not be so now, and are lost if the caller does not flush them again: no
    /// later sync makes up for it. Each failure is told once.
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        let _ = (kind, range);
        Err(read_only(self.name()))
    }

    /// Makes durable what others have written to the file before the call, by a backend that cannot write it. By
    /// default there is nothing to do, as no one else can write. Waits for the device.
    ///
    /// # Errors
    /// It may not be durable.
    fn sync_others(&self, kind: SyncKind) -> io::Result<()> {
        let _ = kind;
        Ok(())
    }

    /// Cuts the file at `bytes`, or extends it with zeros. No flush or fill of bytes behind the new end is in
    /// flight. May wait for the file system.
    ///
    /// # Errors
    /// The size is unchanged.
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let _ = bytes;
        Err(read_only(self.name()))
    }

    /// Makes `range` read as zeros, and gives its space back where that can be done. The size stays; the part of the
    /// range behind it is left out. No flush or fill of the range is in flight. May wait for the device.
    ///
    /// # Errors
    /// Some of the range may be zero, and the rest unchanged.
    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        let _ = range;
        Err(read_only(self.name()))
    }

    /// Has the file system keep space for `range`, so that flushes to it do not run out of it. The size stays.
    ///
    /// # Errors
    /// There is no such space, or this backend cannot keep any ([`Unsupported`](io::ErrorKind::Unsupported)):
    /// flushes find out then.
    fn allocate(&self, range: Range<u64>) -> io::Result<()> {
        let _ = range;
        let words = format!("{} keeps no space; a flush that finds none says so", self.name());
        Err(io::Error::new(io::ErrorKind::Unsupported, words))
    }
}

/// The part of a file that [`Backend::sync`] makes durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SyncKind {
    /// The bytes, the size, and all metadata that a read of them needs: `fdatasync`.
    Data,
    /// The file's times and mode, too: `fsync`.
    All,
}

/// Whether a call of [`Backend::reap`] may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReapMode {
    /// Only what is there already.
    Ready,
    /// Wait for at least one completion, unless `done` or nothing is in flight. The backend may go on until `done`.
    Wait,
    /// As `Wait`, for so long at most: a device may never answer.
    WaitFor(Duration),
}

impl ReapMode {
    /// Whether the call may wait.
    pub fn waits(self) -> bool {
        self != Self::Ready
    }
}

/// The outcome of a call of [`Backend::reap`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReapOutcome {
    /// The call completed this many fills, 0 included.
    Some(usize),
    /// Another thread leads; sleep in the wait queue.
    Busy,
    /// Completions arrive by themselves, or nothing is in flight; sleep in the wait queue.
    Elsewhere,
}

/// Receiver of the outcome of a fill. Handed down by the fill path. It wakes the threads that wait for the fill.
pub trait FillSink: Send + Sync {
    /// The fill's folios may be unlocked: the first `bytes` bytes of it hold the file's data, or there
    /// was an error. Called once for each fill, on any thread, with no lock held.
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>);

    /// Pages `pages` of the run, counted from its start, hold the file's data, and are not written again. The fill
    /// continues. Called before [`FillSink::fill_completed`], with locks of the backend held: it takes none.
    fn pages_read(&self, run: FillRun, pages: Range<u32>) {
        let _ = (run, pages);
    }

    /// Threads that wait for these pages may check again: they were read. Called with no lock held.
    fn wake_readers(&self, run: FillRun, pages: Range<u32>) {
        let _ = (run, pages);
    }
}

#[must_use = "the readers of the pages have not been woken"]
pub(crate) struct PagesRead {
    sink: Arc<dyn FillSink>,
    run: FillRun,
    pages: Range<u32>,
}

impl PagesRead {
    pub(crate) fn wake(self) {
        self.sink.wake_readers(self.run, self.pages);
    }
}

impl fmt::Debug for PagesRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagesRead")
            .field("run", &self.run)
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

/// Which folios a fill is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FillRun {
    /// The first page.
    pub index: PageIndex,
    /// The frame of the first page; the others follow.
    pub frame: Frame,
    /// How many pages.
    pub pages: u32,
}

/// A run of locked folios to be filled with a file's bytes. Completing it, or dropping it, unlocks the folios.
pub struct Fill {
    run: FillRun,
    buffer: NonNull<u8>,
    sink: Option<Arc<dyn FillSink>>,
    read: Vec<Range<u32>>,
}

// SAFETY: the buffer is frames that only this fill writes; the sink is Send and Sync.
unsafe impl Send for Fill {}
// SAFETY: a shared fill gives out numbers and an address only.
unsafe impl Sync for Fill {}

impl Fill {
    /// A fill of `run`, whose frames' bytes begin at `buffer`.
    ///
    /// # Safety
    /// `buffer` is valid for `run.pages` pages of writes until the fill has been completed, aligned to a page, and
    /// nothing else writes there.
    pub unsafe fn new(run: FillRun, buffer: NonNull<u8>, sink: Arc<dyn FillSink>) -> Self {
        Self { run, buffer, sink: Some(sink), read: Vec::new() }
    }
    /// Where in the file it begins, in bytes; a multiple of 4096.
    pub fn position(&self) -> u64 {
        self.run.index.first_byte()
    }
    /// How many bytes it wants; a multiple of 4096. The file may end before that.
    pub fn len(&self) -> usize {
        self.run.pages as usize * PAGE_SIZE
    }
    /// Never true: a fill is of at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }
    /// Which folios it is for.
    pub fn run(&self) -> FillRun {
        self.run
    }
    /// Where the bytes go, for a device or a system call. Valid for [`Fill::len`] bytes of writes until
    /// the fill is completed; aligned to 4096. Others may be looking at these bytes by mistake, so no
    /// Rust reference to them may be made. Ask for it on the thread that writes or starts the device.
    pub fn as_ptr(&self) -> *mut u8 {
        crate::arena::before_bytes(); // the caller is about to write, or to have the device write
        self.buffer.as_ptr()
    }
    /// Copies `bytes` to `at` bytes from the fill's start.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len() && bytes.len() <= self.len() - at, "a fill is written within its length");
        // SAFETY: inside the buffer by the assertion; the frames are this fill's alone.
        unsafe { crate::folio::copy::copy_in(bytes.as_ptr(), self.buffer.as_ptr().add(at), bytes.len()) };
    }
    /// Reports that bytes `bytes` of the fill hold the file's data, and the rest is on its way: readers of whole pages
    /// among them need not wait any longer, and keep them though the rest should fail. They may not be written again.
    ///
    /// # Panics
    /// If they lie outside the fill.
    pub fn pages_were_read(&mut self, bytes: Range<usize>) {
        if let Some(news) = self.note_pages_read(bytes) {
            news.wake();
        }
    }
    /// As [`Fill::pages_were_read`], but a thread that waits has yet to be told. May be called under a lock.
    fn note_pages_read(&mut self, bytes: Range<usize>) -> Option<PagesRead> {
        assert!(bytes.end <= self.len(), "what lands is part of the fill");
        let pages = bytes.start.div_ceil(PAGE_SIZE) as u32..(bytes.end / PAGE_SIZE) as u32;
        let sink = self.sink.as_ref().filter(|_| !pages.is_empty())?;
        sink.pages_read(self.run, pages.clone());
        self.read.push(pages.clone());
        Some(PagesRead { sink: Arc::clone(sink), run: self.run, pages })
    }
    /// Zeroes the bytes from `from` on, but for pages that have arrived: they may be being read.
    fn zero_from(&mut self, from: usize) {
        self.read.sort_unstable_by_key(|pages| pages.start);
        let end = self.run.pages..self.run.pages;
        let mut at = from;
        for read in self.read.iter().chain([&end]) {
            let until = read.start as usize * PAGE_SIZE;
            if at < until {
                // SAFETY: `at..until` is inside the buffer, and its frames are this fill's alone.
                unsafe { crate::folio::copy::zero(self.buffer.as_ptr().add(at), until - at) };
            }
            at = at.max(read.end as usize * PAGE_SIZE);
        }
    }
    /// Ends the fill: the first `bytes` bytes hold the file's data, fewer than [`Fill::len`] only if the
    /// file ends there; or it failed. The buffer behind the file's last byte is zeroed.
    pub fn complete(mut self, result: io::Result<usize>) {
        let result = result.map(|bytes| bytes.min(self.len()));
        if let Ok(bytes) = result
            && bytes < self.len()
        {
            self.zero_from(bytes);
        }
        if let Some(sink) = self.sink.take() {
            sink.fill_completed(self.run, result);
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        if let Some(sink) = self.sink.take() {
            sink.fill_completed(self.run, Err(io::Error::other("the backend dropped the request")));
        }
    }
}

impl fmt::Debug for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fill").field("run", &self.run).finish_non_exhaustive()
    }
}

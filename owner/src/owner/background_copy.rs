//! Background copies: which files are left to the kernel, and for how long.
//!
//! Taking a file over costs a request, and a copy of all that is read. The kernel serves a single sequential read as
//! fast, and random reads faster: a miss waits for another thread. This cache serves repeated reads better. So the
//! kernel serves a file until it holds it, and then until it has served so much that a copy does not matter; then the
//! whole file is copied, while no read waits:
//!
//! ```text
//!   asked for --cachestat--> not held --> ServedByKernel for its size ----.
//!                 ^          held     --> ServedByKernel for twice that --+
//!                 `-------------------------asked again-----------------'
//!                            held, and was served for that, or large --> Requested, copied through its page cache
//!                                                                          |
//!                                                   TakenOver <--all copied'
//! ```
//!
//! While a program runs, a copy rests between its steps. No file is copied that would not fit beside those that are
//! attached or taken over, or is larger than a quarter of the bound. No read ever waits for a copy.
//!
//! This is the ski-rental rule: hire until the hire has cost what the skis cost, and never pay more than twice
//! (Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching", 1988). Viewers ask only when the kernel has read
//! a large file twice, so that is copied at once, if the kernel holds it.
//!
//! A file that waits to be copied, or is being copied, is held open, perhaps after its viewer has closed it: for some
//! seconds at most ([`HELD_MAX`]), and until a program wants to unmount something, or to be alone with it. Pages
//! copied so far stay cached, and the rest is copied when the file is asked for again.
//!
//! The state of a file (by device and inode) may be forgotten at any time; then it is looked at again.
//!
//! Invariants:
//!  1. No lock is held while the kernel is asked for anything.
//!  2. A file that was taken over once is not left to the kernel again while it is known.
//!  3. It is filled through the kernel's page cache, which has all of it, or nearly.
//!  4. A copy that was told to end has closed its file before [`BackgroundCopies::end`] says so.
//!
//! Not an invariant: that the kernel still holds the pages that it held when it was asked. That costs time only.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, FileType, Mode, OFlags, fadvise, fstat, open};

use crate::serve::AttachReason;
use quinion::Cache;
use quinion::internals::arena::control::AttachPolicy;
use quinion::internals::serving::ServedCache;
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::io::{KernelCacheCounts, kernel_holds};
use quinion::internals::units::{FileId, PAGE_SIZE};

/// A file of 4 MiB pays for the request at its first read. A smaller one does when a descriptor reads it a second time,
/// after some dozens of reads.
pub(super) const LAZY_ATTACH: AttachPolicy = AttachPolicy {
    large_bytes: 4 << 20,
    credit_bytes: 256 << 10,
    pass_is_kernels: true,
    checks_times: false,
    any_file_system: false,
};
/// The kernel reads a file so often before it is copied.
const TIMES: u64 = 2;
const OPENINGS_MAX: u32 = 2;
/// The largest file that is copied, as a part of memory.
pub(super) const FILES_MIN: u64 = 4;
/// Above that all are forgotten but those that wait to be copied.
const KNOWN_MAX: usize = 4096;
const STEP: u64 = 1 << 20;
const REST_FACTOR: u32 = 3;
/// Short, so that the end of the service does not wait.
const REST_MAX: Duration = Duration::from_millis(10);
/// From the request on, a file is held open so long at most.
const HELD_MAX: Duration = Duration::from_secs(3);
/// From then on a copy counts as stuck in its file system: others end soon after [`HELD_MAX`].
const STUCK_AFTER: Duration = Duration::from_secs(10);
/// Stuck copies, of which each keeps a thread, after which no other is begun.
const STUCK_MAX: u32 = 4;
const RELEASE_MAX: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyState {
    /// The kernel serves the file; the owner has answered so this many times.
    ServedByKernel(u32),
    /// The file waits to be copied, or is being copied.
    Requested,
    /// The file was copied: this cache serves it when it is asked for again.
    TakenOver,
}

const DEFERRED: CopyState = CopyState::ServedByKernel(OPENINGS_MAX);

#[derive(Debug)]
pub(super) struct CopyRequest {
    id: FileId,
    file: OwnedFd,
    bytes: u64,
    until: Instant,
    is_called_off: Arc<AtomicBool>,
    #[expect(dead_code, reason = "for its end")]
    held: HeldFile,
}

/// Counted among those that are attached: viewers that remove such a file say so first.
#[derive(Debug)]
struct HeldFile {
    cache: Cache,
    place: usize,
}

impl HeldFile {
    fn new(cache: Cache, id: FileId) -> Self {
        let place = cache.arena().share().control().control().enter(id);
        Self { cache, place }
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        self.cache.arena().share().control().control().leave(self.place);
    }
}

impl CopyRequest {
    pub(super) fn is_over(&self) -> bool {
        self.is_called_off.load(Ordering::Relaxed) || self.until <= Instant::now()
    }
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
    pub(super) fn id(&self) -> FileId {
        self.id
    }
    pub(super) fn steps(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let bytes = self.bytes;
        (0..bytes.div_ceil(STEP)).map(move |i| i * STEP..bytes.min((i + 1) * STEP))
    }
}

/// How a copy ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CopyEnd {
    /// All of the file is cached.
    Copied,
    /// The copy was called off, or failed.
    Aborted,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CopyBudget {
    pub(super) file: u64,
    pub(super) all: u64,
}

/// A viewer wants a file attached.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttachAttempt<'d> {
    /// The viewer's descriptor of the file.
    pub(super) descriptor: BorrowedFd<'d>,
    pub(super) id: FileId,
    pub(super) reason: AttachReason,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct KernelCredit {
    /// Bytes that the kernel is to read before it is asked for again.
    pub(super) credit: u64,
    /// The file's bytes, if a larger memory would take it over.
    pub(super) short: Option<u64>,
}

#[derive(Debug)]
pub(super) struct BackgroundCopies {
    state: RankedMutex<State>,
    cache: Cache,
}

#[derive(Debug, Default)]
struct State {
    known: HashMap<FileId, CopyState>,
    requests: VecDeque<CopyRequest>,
    /// Bytes of the files to be copied, or copied and not attached since.
    reserved: HashMap<FileId, u64>,
    /// One at a time, so that the other threads answer.
    copying: Option<Copying>,
    stuck: u32,
}

#[derive(Clone, Debug)]
struct Copying {
    id: FileId,
    is_called_off: Arc<AtomicBool>,
    begun: Instant,
}

impl State {
    fn take_requests(&mut self, such: impl Fn(&CopyRequest) -> bool) -> VecDeque<CopyRequest> {
        let requests = std::mem::take(&mut self.requests).into_iter();
        let (gone, stay) = requests.partition(such);
        self.requests = stay;
        gone
    }

    /// Keeps those that wait to be copied: they are held, and would be requested twice.
    fn forget_others(&mut self) {
        let Self { known, reserved, .. } = self;
        known.retain(|_, now| *now == CopyState::Requested);
        reserved.retain(|id, _| known.contains_key(id));
    }

    fn call_off(&mut self, such: impl Fn(&CopyRequest) -> bool) -> VecDeque<CopyRequest> {
        let gone = self.take_requests(such);
        for request in &gone {
            self.known.insert(request.id, DEFERRED);
            self.reserved.remove(&request.id);
        }
        gone
    }
}

impl BackgroundCopies {
    pub(super) fn new(cache: Cache) -> Self {
        Self { state: RankedMutex::new(Rank::Viewer, State::default()), cache }
    }

    /// Bytes that the kernel is to read of the file before it is asked for again; `None`: it is taken over now.
    /// `attached`: bytes of all attached files.
    pub(super) fn kernel_credit(
        &self,
        attempt: AttachAttempt<'_>,
        budget: CopyBudget,
        attached: impl FnOnce() -> HashMap<FileId, u64>,
    ) -> Option<KernelCredit> {
        let AttachAttempt { descriptor, id, reason } = attempt;
        // 1 What is known?
        let known = self.state.lock().known.get(&id).copied();
        if known == Some(CopyState::TakenOver) {
            return None;
        }
        // 2 What does the kernel hold? If that cannot be found out, attaching the file will report why.
        let (file, bytes) = reopen(descriptor, id)?;
        if known == Some(CopyState::Requested) {
            return Some(KernelCredit { credit: bytes, short: None });
        }
        let holds = kernel_holds(file.as_fd(), bytes).unwrap_or_default();
        // 3 Whose turn is it?
        let times = match known {
            Some(CopyState::ServedByKernel(times)) => times,
            // Viewers ask for a large one when the kernel has read it twice, or it was opened for the third time.
            _ if bytes >= LAZY_ATTACH.large_bytes => OPENINGS_MAX,
            _ => 0,
        };
        let (credit, next) = match times {
            _ if !is_held(holds, bytes) => (bytes, CopyState::ServedByKernel(times)),
            0 => (bytes.saturating_mul(TIMES), CopyState::ServedByKernel(1)),
            _ if reason == AttachReason::CreditSpent || times >= OPENINGS_MAX => {
                (bytes, CopyState::Requested)
            }
            _ => (bytes.saturating_mul(TIMES), CopyState::ServedByKernel(times.saturating_add(1))),
        };
        // 4 Would it fit?
        if next == CopyState::Requested
            && (bytes > budget.file || self.reserved_with(attached(), id, bytes) > budget.all)
        {
            self.note(id, CopyState::ServedByKernel(times.saturating_add(1)), None);
            return Some(KernelCredit { credit: bytes.saturating_mul(TIMES), short: Some(bytes) });
        }
        self.note(id, next, (next == CopyState::Requested).then(|| self.request(id, file, bytes)));
        Some(KernelCredit { credit, short: None })
    }

    fn request(&self, id: FileId, file: OwnedFd, bytes: u64) -> CopyRequest {
        let held = HeldFile::new(self.cache.clone(), id);
        CopyRequest { id, file, bytes, until: Instant::now() + HELD_MAX, is_called_off: Arc::default(), held }
    }

    /// The bytes of all files that are taken over, are to be, or are attached; with the file `id`.
    fn reserved_with(&self, mut attached: HashMap<FileId, u64>, id: FileId, bytes: u64) -> u64 {
        attached.extend(&self.state.lock().reserved);
        attached.insert(id, bytes);
        attached.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Whether an attached file was taken over, and is filled through the kernel's page cache.
    pub(super) fn is_taken_over(&self, id: FileId) -> bool {
        let mut state = self.state.lock();
        let is_taken_over = state.known.get(&id) == Some(&CopyState::TakenOver);
        if is_taken_over {
            state.reserved.remove(&id); // it counts for as long as it is attached
        }
        is_taken_over
    }

    /// Closes a file that a program wants to be alone with; one that is being copied, soon.
    pub(super) fn forget(&self, id: FileId) {
        let mut state = self.state.lock();
        state.known.remove(&id);
        state.reserved.remove(&id);
        if let Some(copying) = state.copying.as_ref().filter(|copying| copying.id == id) {
            copying.is_called_off.store(true, Ordering::Relaxed);
        }
        let gone = state.take_requests(|request| request.id == id);
        drop(state);
        drop(gone); // outside the lock
    }

    /// As [`forget`](Self::forget), and waits for the end of its copy, for a bounded time.
    pub(super) fn close(&self, id: FileId) {
        let copying = self.state.lock().copying.clone().filter(|copying| copying.id == id);
        self.forget(id);
        copying.iter().for_each(|copying| self.wait_for_end(&copying.is_called_off));
    }

    pub(super) fn close_overdue(&self) {
        let gone = self.state.lock().call_off(CopyRequest::is_over);
        drop(gone); // outside the lock
    }

    /// Closes all, and waits for the copy under way, for a bounded time.
    pub(super) fn release(&self) {
        let mut state = self.state.lock();
        let gone = state.call_off(|_| true);
        let copying = state.copying.clone();
        drop(state);
        drop(gone); // outside the lock
        let Some(Copying { is_called_off, .. }) = copying else { return };
        is_called_off.store(true, Ordering::Relaxed);
        self.wait_for_end(&is_called_off);
    }

    fn wait_for_end(&self, is_called_off: &Arc<AtomicBool>) {
        let is_it = |now: &Copying| Arc::ptr_eq(&now.is_called_off, is_called_off);
        let begun = Instant::now();
        while begun.elapsed() < RELEASE_MAX && self.state.lock().copying.as_ref().is_some_and(is_it) {
            sleep(Duration::from_micros(200));
        }
    }

    /// `None` while another is copied: that thread takes this one next. A copy that is stuck is given up, and does
    /// not hold up the others.
    pub(super) fn next_request(&self) -> Option<CopyRequest> {
        let mut state = self.state.lock();
        if let Some(copying) = &state.copying {
            if copying.begun.elapsed() < STUCK_AFTER || state.stuck >= STUCK_MAX {
                return None;
            }
            copying.is_called_off.store(true, Ordering::Relaxed);
        }
        let request = state.requests.pop_front()?;
        let (id, is_called_off) = (request.id, Arc::clone(&request.is_called_off));
        let before = state.copying.replace(Copying { id, is_called_off, begun: Instant::now() });
        state.stuck += u32::from(before.is_some());
        Some(request)
    }

    pub(super) fn end(&self, request: CopyRequest, end: CopyEnd) {
        let next = match end {
            CopyEnd::Copied => CopyState::TakenOver,
            CopyEnd::Aborted if request.is_over() => DEFERRED,
            CopyEnd::Aborted => CopyState::ServedByKernel(0),
        };
        let (id, is_called_off) = (request.id, Arc::clone(&request.is_called_off));
        drop(request); // a caller that waits for the copy's end waits for this
        self.note(id, next, None);
        let mut state = self.state.lock();
        match state.copying.take_if(|copying| Arc::ptr_eq(&copying.is_called_off, &is_called_off)) {
            Some(_) => {}
            None => state.stuck -= 1, // it was given up, and has ended after all
        }
        if end == CopyEnd::Aborted {
            state.reserved.remove(&id);
        }
    }

    fn note(&self, id: FileId, next: CopyState, request: Option<CopyRequest>) {
        let mut state = self.state.lock();
        if state.known.len() >= KNOWN_MAX && !state.known.contains_key(&id) {
            state.forget_others();
            if state.known.len() >= KNOWN_MAX {
                return; // so many wait to be copied; this one is looked at again
            }
        }
        if next != CopyState::TakenOver && state.known.get(&id) == Some(&CopyState::TakenOver) {
            return; // it was copied during this look
        }
        // Two that ask at once request it once.
        if state.known.insert(id, next) != Some(CopyState::Requested) {
            state.reserved.extend(request.iter().map(|request| (request.id, request.bytes)));
            state.requests.extend(request);
        }
    }
}

/// How long a copy rests after a step, while a program runs: other cores share caches and memory with it. A short
/// program has ended before much was taken from it; for a long one the copy is ready soon enough.
pub(super) fn rest_after(step: Duration) -> Duration {
    (step * REST_FACTOR).min(REST_MAX)
}

/// Whether the kernel holds nearly all of a file; or unwritten bytes, which reading there would write first.
fn is_held(holds: KernelCacheCounts, bytes: u64) -> bool {
    let pages = bytes.div_ceil(PAGE_SIZE as u64);
    holds.unwritten > 0 || holds.pages >= pages - pages / 4
}

/// Opens the file anew, if it is the regular file `id`.
fn reopen(descriptor: BorrowedFd<'_>, id: FileId) -> Option<(OwnedFd, u64)> {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file =
        open(&path, flags | OFlags::NOATIME, Mode::empty()).or_else(|_| open(&path, flags, Mode::empty()));
    let file = file.ok()?;
    let stat = fstat(&file).ok()?;
    let is_it = FileId { device: stat.st_dev, inode: stat.st_ino } == id
        && FileType::from_raw_mode(stat.st_mode).is_file();
    // Where pages are tried one by one, only these are read.
    let _ = fadvise(&file, 0, None, Advice::Random);
    is_it.then_some((file, stat.st_size as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(device: u64, inode: u64) -> FileId {
        FileId { device, inode }
    }

    /// 1. A file waits to be copied.
    /// 2. So many others are looked at that all are forgotten.
    /// 3. It is asked for again, and waits twice.
    #[test]
    fn files_that_wait_to_be_copied_are_not_forgotten_with_the_others() {
        let cache = Cache::builder().memory(16 << 20).build().expect("a cache");
        let copies = BackgroundCopies::new(cache);
        let request = |id| {
            let file = tempfile::tempfile().expect("a file");
            copies.note(id, CopyState::Requested, Some(copies.request(id, file.into(), 7)));
        };
        request(file(1, 1));
        for inode in 0..2 * KNOWN_MAX as u64 {
            copies.note(file(2, inode), CopyState::ServedByKernel(1), None);
        }
        request(file(1, 1));
        let state = copies.state.lock();
        assert_eq!((state.requests.len(), state.reserved.get(&file(1, 1))), (1, Some(&7)));
        assert!(state.known.len() <= KNOWN_MAX);
        drop(state);
        for inode in 0..2 * KNOWN_MAX as u64 {
            copies.note(file(3, inode), CopyState::Requested, None);
        }
        assert!(copies.state.lock().known.len() <= KNOWN_MAX, "however many wait");
        copies.release();
    }

    /// 1. A copy is stuck in its file system, and has to end to let another begin, until it counts as stuck.
    /// 2. Others are copied meanwhile, one at a time, until too many are stuck.
    /// 3. The first ends after all: one more may begin.
    #[test]
    fn a_copy_that_is_stuck_does_not_hold_up_the_others_and_not_too_many_are() {
        let cache = Cache::builder().memory(16 << 20).build().expect("a cache");
        let copies = BackgroundCopies::new(cache);
        let request = |inode| {
            let file = tempfile::tempfile().expect("a file");
            let id = FileId { device: 1, inode };
            copies.note(id, CopyState::Requested, Some(copies.request(id, file.into(), 7)));
        };
        let age = || {
            let mut state = copies.state.lock();
            let copying = state.copying.as_mut().expect("a copy is under way");
            copying.begun = copying.begun.checked_sub(STUCK_AFTER).expect("the machine has run for so long");
        };
        (0..10).for_each(request);
        let mut stuck = vec![copies.next_request().expect("the first")];
        assert!(copies.next_request().is_none(), "one at a time");
        for _ in 0..STUCK_MAX {
            age();
            stuck.push(copies.next_request().expect("the one before is given up"));
            assert!(stuck[stuck.len() - 2].is_over(), "and is told to end");
            assert!(copies.next_request().is_none(), "one at a time");
        }
        age();
        assert!(copies.next_request().is_none(), "too many are stuck");
        copies.end(stuck.remove(0), CopyEnd::Aborted);
        assert_eq!(copies.state.lock().stuck, STUCK_MAX - 1);
        stuck.push(copies.next_request().expect("one of them has ended"));
        stuck.drain(..).for_each(|copy| copies.end(copy, CopyEnd::Aborted));
        let state = copies.state.lock();
        assert!(state.copying.is_none() && state.stuck == 0);
        drop(state);
        copies.release();
    }

    #[test]
    fn a_copy_is_at_work_a_fourth_of_the_time_and_never_rests_long() {
        assert_eq!(rest_after(Duration::from_millis(1)), Duration::from_millis(3));
        assert_eq!(rest_after(Duration::ZERO), Duration::ZERO);
        assert_eq!(rest_after(Duration::from_secs(1000)), REST_MAX);
    }
}

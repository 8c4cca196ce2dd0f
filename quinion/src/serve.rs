//! Serve: the owner's side of what viewers ask.
//!
//! ```text
//!   control file                 workers (4)                       Owner
//!     slot PENDING --take-->  whose? a handle of that viewer's? --> attach, fill, advance, ..
//!     slot DONE    <--------  answer, wake                      <--
//!
//!   ten times a second, one thread:  heartbeat + 1; up to when viewers are sure
//!                                    access rings  --frames, checked--> touched
//!                                    dead viewers  --their handles----> detach, page free again
//! ```
//!
//! Nothing a viewer writes is trusted. A number is checked before it is used, a
//! handle must have been given to the viewer that names it, and what a viewer
//! does to its own page while the owner is at work hurts only that viewer. The
//! owner's own notes about viewers, the **seats**, lie in the owner's memory.
//!
//! A viewer that dies is noticed by its process descriptor, so a new process
//! with the same number is not mistaken for it. Its page is cleared and freed
//! when no worker is at work for it.
//!
//! A cache that outlives a command serves several **runs**, one after the other and side by side. Each gets a number,
//! which its viewers put into their pages, so that each can be told what its own have done. The sums of viewers that
//! are no more lie in the seats they had: a viewer's numbers move from its page there under the seat's lock, so who
//! adds up finds them once.
//!
//! Invariants:
//!  1. A worker answers into a page only while its seat is busy; a busy seat is never freed.
//!  2. No lock of this room is held while the [`Owner`] is called.
//!  3. Every handle the owner gave is detached once: when the viewer says so, dies, or the service stops.
//!  4. Nobody has a handle before it is seen to that viewers hear of our end, however it comes (`sys/last_word.rs`).
//!  5. A panic in the owner is an answer (EIO) to one question, not the end of a worker.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use crate::arena::control::{
    ABANDONED, ATTACHED_PLACES, Advice, CREDIT_SPENT, Conduct, Control, Counter, Manners, Operation,
    Patching, RING_ENTRIES, Reason, Request, UNCACHED, VIEWERS_MAX, ViewerPage, place_of, state,
};
use crate::arena::{ArenaShare, CellNumber, OWNER_ENDED, Trust};
use crate::sync::{Rank, RankedMutex};
use crate::sys::fork::ForkGuard;
use crate::sys::last_word::{ENDED, LastWord};
use crate::units::{Frame, MappingId, PageIndex};
use crate::viewer::sys::{Errno, futex_wait, futex_wake, ticks, ticks_within};

/// How many threads answer viewers unless somebody says otherwise.
pub const WORKERS: usize = 4;
/// The time between two heartbeats, in milliseconds.
const BEAT_MILLIS: u32 = 100;
/// The run of viewers that said none.
const NO_RUN: u64 = 0;
/// How long a worker sleeps at most, in milliseconds, if nobody rings.
const NAP_MILLIS: u32 = 1000;
const _: () = assert!(ENDED == OWNER_ENDED, "what the kernel says of us is what viewers look for");

/// A file as the owner attached it for a viewer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attached {
    /// The owner's number for this attachment, different from all others that are not detached yet, and from 0.
    pub handle: u64,
    /// Where the file's record is.
    pub cell: CellNumber,
    /// The mapping's number.
    pub id: MappingId,
}

/// What is done about others who may change a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileMode {
    /// Where it was when it was attached.
    pub path: PathBuf,
    /// What was done last.
    pub trust: Trust,
    /// Why not more; empty if there is no more.
    pub why: String,
}

/// What a cache does for its viewers. Called by several threads at a time; every call may wait.
///
/// Handles are checked before they get here: one that arrives was given by `attach` and not detached
/// yet, except that `detach` may come while another call with the same handle is under way.
pub trait Owner: Send + Sync + fmt::Debug {
    /// The memory viewers look at.
    fn arena(&self) -> ArenaShare<'_>;
    /// Attaches the file behind `descriptor` of `process`, which must be the file `inode` on `device`: the
    /// descriptor may have been closed and used again since. Size and times are looked at now, and the file's record
    /// says how far viewers may believe what is cached of it ([`Trust`]) when this returns. `ETXTBSY`: they may not,
    /// somebody has it open for writing. `EOPNOTSUPP`: they may not, for another reason.
    fn attach(&self, process: u32, descriptor: i32, device: u64, inode: u64) -> Result<Attached, Errno>;
    /// When viewers ask for files. At the first read of each, unless the owner says otherwise.
    fn manners(&self) -> Manners {
        Manners::default()
    }
    /// Whether the file that a viewer is about to attach, as for [`Owner::attach`], is better left to the kernel for
    /// now; then how many bytes of it are to be read, as [`Manners::worth`] counts, before the viewer asks again.
    /// `spent` says that it does ask again.
    fn leaves_to_kernel(&self, process: u32, descriptor: i32, file: (u64, u64), spent: bool) -> Option<u64> {
        let _ = (process, descriptor, file, spent);
        None
    }
    /// Called by the thread that has just answered an [`Owner::attach`], or what stands in its place: for what is
    /// better done when nobody waits for it. It ends soon after `house` says that it is not to go on.
    fn prepare(&self, house: &dyn House) {
        let _ = house;
    }
    /// How long from now on viewers may be sure of files of which their records say so ([`Trust::Sure`]), if nothing
    /// else is heard of this owner, as when it is stopped. Asked ten times a second, and when a file was admitted.
    fn sure_for(&self) -> Duration {
        Duration::ZERO
    }
    /// A viewer is about to open that file so that it can write it. `cuts`: it cuts it, or has, in a way that the
    /// kernel tells no holder of a lease of; when this returns nobody is shown what was cached of it.
    fn writer_opened(&self, device: u64, inode: u64, cuts: bool) {
        let _ = (device, inode, cuts);
    }
    /// A viewer wants to be alone with that file: when this returns the owner has closed it, and no viewer is attached.
    fn let_go(&self, device: u64, inode: u64) {
        let _ = (device, inode);
    }
    /// This process is about to be stopped: nobody is to wait for it.
    fn about_to_stop(&self) {}
    /// What was done about others who may change viewers' files, by file.
    fn modes(&self) -> Vec<FileMode> {
        Vec::new()
    }
    /// Makes up to `len` bytes at `position` ready, and at least the first page of them, if they exist. `uncached`: the
    /// reader wants them no longer than it reads them, and says so by [`Advice::Passed`].
    fn fill(&self, handle: u64, position: u64, len: u64, uncached: bool) -> Result<(), Errno>;
    /// A reader met the readahead marker on the folio whose first page is `page`; `uncached` as in [`Owner::fill`].
    fn advance(&self, handle: u64, page: PageIndex, uncached: bool);
    /// What the program says of how it will read; `len` bytes at `position` are meant by those that speak of a range.
    /// An owner that does not care need do nothing.
    fn advise(&self, handle: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        let _ = (handle, advice, position, len);
        Ok(())
    }
    /// Looks at the file's size and times again, publishes the size in its record and returns it, in bytes.
    fn revalidate(&self, handle: u64) -> Result<u64, Errno>;
    /// The handle is not used any more.
    fn detach(&self, handle: u64);
    /// The folio that starts at `frame` was read. A hint: the frame exists, but may be anything by now. Called with a
    /// lock of the service held: it takes none.
    fn touched(&self, frame: Frame);
}

/// What the service does for an [`Owner`] that prepares files.
pub trait House {
    /// Whether to go on.
    fn goes_on(&self) -> bool;
    /// Whether a program may be running that reads from us.
    fn has_viewers(&self) -> bool;
    /// Does `work` while the file counts as attached: a viewer that is about to open it for writing says so, and
    /// [`Owner::writer_opened`] is called.
    fn while_attached(&self, device: u64, inode: u64, work: &mut dyn FnMut());
}

/// Says what the code does that a process has loaded: see [`Conduct`]. Called by several threads at a time.
pub type Examiner = Box<dyn Fn(u32) -> Conduct + Send + Sync>;

/// What all viewers did, dead ones included. Counted by themselves, so worth what they are.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ViewerTotals {
    /// Processes that attached.
    pub viewers: u64,
    /// Read calls served, wholly from the cache's side.
    pub reads: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Of the reads, those that had to ask.
    pub asked: u64,
    /// Questions for bytes.
    pub misses: u64,
    /// Files attached.
    pub files: u64,
    /// Read calls on regular files that were left to the kernel.
    pub kernel_reads: u64,
    /// Descriptors left to the kernel, in the order of [`Reason::ALL`].
    pub reasons: [u64; Reason::ALL.len()],
    /// Processes by what came of patching their C library, in the order of [`Patching::ALL`].
    pub patching: [u64; Patching::ALL.len()],
}

impl ViewerTotals {
    fn add(&mut self, page: &ViewerPage) {
        let counted = |place: usize| page.counters[place].load(Ordering::Relaxed);
        let sums = [
            (&mut self.reads, Counter::Reads),
            (&mut self.bytes, Counter::Bytes),
            (&mut self.asked, Counter::Asked),
            (&mut self.misses, Counter::Misses),
            (&mut self.files, Counter::Files),
            (&mut self.kernel_reads, Counter::KernelReads),
        ];
        for (sum, counter) in sums {
            *sum = sum.wrapping_add(counted(counter as usize));
        }
        for (number, sum) in self.reasons.iter_mut().enumerate() {
            *sum = sum.wrapping_add(counted(Counter::FirstReason as usize + number));
        }
        for (number, sum) in self.patching.iter_mut().enumerate() {
            *sum = sum.wrapping_add(counted(Counter::FirstPatching as usize + number));
        }
        self.viewers += 1;
    }
}

/// What the owner knows of the viewer that has one page.
#[derive(Debug, Default)]
struct Seat {
    /// The process, 0 for nobody.
    process: u32,
    /// Tells when the process has ended; `None` if the kernel gave us no such thing.
    alive: Option<OwnedFd>,
    /// What it has attached: the files' places among all that are.
    handles: HashMap<u64, usize>,
    /// How far its ring of what it read has been looked at.
    tail: u32,
    /// Workers that are at work for it.
    busy: u32,
    /// Sums of the viewers that had the page and are no more, by run; stays when the viewer goes.
    past: BTreeMap<u64, ViewerTotals>,
}

impl Seat {
    /// Gets to know whoever has the page now.
    fn meet(&mut self, process: u32) {
        if self.process == 0 {
            let pid = Pid::from_raw((process & !ABANDONED) as i32);
            self.process = process & !ABANDONED;
            self.alive = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        }
    }

    /// Whether its viewer is no more: dead, or another program by now.
    fn is_over(&self, process: u32) -> bool {
        let Some(alive) = &self.alive else {
            let pid = Pid::from_raw(self.process as i32);
            return pid.is_none_or(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH));
        };
        let mut fds = [PollFd::new(alive, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        process & ABANDONED != 0 || poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}

/// A question that a worker has taken.
struct Job {
    viewer: usize,
    slot: usize,
    process: u32,
    operation: u32,
    arguments: [u64; 3],
    attended: bool,
}

struct Shared {
    owner: Arc<dyn Owner>,
    examiner: Option<Examiner>,
    seats: Vec<RankedMutex<Seat>>,
    /// Runs that have begun and not ended.
    runs: RankedMutex<HashSet<u64>>,
    last_run: AtomicU64,
    /// Where the last worker found work.
    cursor: AtomicU32,
}

/// The threads that answer viewers. Dropping it stops them.
pub struct Service {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    process: ForkGuard,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Service {
    /// Starts `workers` threads (at least one) that answer, and one that keeps the house. Nobody examines processes, so
    /// those that ask are to be careful.
    pub fn start(owner: Arc<dyn Owner>, workers: usize) -> std::io::Result<Self> {
        Self::start_with(owner, workers, None)
    }

    /// The same, with who answers [`Operation::Examine`].
    pub fn start_with(
        owner: Arc<dyn Owner>,
        workers: usize,
        examiner: Option<Examiner>,
    ) -> std::io::Result<Self> {
        let seats = (0..VIEWERS_MAX).map(|_| RankedMutex::new(Rank::Viewer, Seat::default())).collect();
        let runs = RankedMutex::new(Rank::Viewer, HashSet::new());
        let (last_run, cursor) = (AtomicU64::new(0), AtomicU32::new(0));
        let shared = Arc::new(Shared { owner, examiner, seats, runs, last_run, cursor });
        shared.owner.arena().populate_control().map_err(std::io::Error::other)?;
        shared.control().set_manners(shared.owner.manners());
        let mut service = Self { shared, threads: Vec::new(), process: ForkGuard::new() };
        // A thread that cannot be started: the drop of `service` stops the other. Who starts us waits for these two
        // alone; the rest is the keeper's, and it makes do with fewer.
        service.threads.push(spawn(&service.shared, "quinion-worker", |shared| shared.answer_viewers())?);
        let keep_house = move |shared: &Arc<Shared>| shared.keep_house(workers.saturating_sub(1));
        service.threads.push(spawn(&service.shared, "quinion-keeper", keep_house)?);
        Ok(service)
    }

    /// What viewers did so far.
    pub fn totals(&self) -> ViewerTotals {
        self.shared.totals(|_| true)
    }

    /// Begins to count for a run apart. Its number, above 0, goes to its viewers, who say it by
    /// [`Viewer::count_for`](crate::viewer::Viewer::count_for).
    pub fn begin_run(&self) -> u64 {
        let run = self.shared.last_run.fetch_add(1, Ordering::Relaxed) + 1;
        self.shared.runs.lock().insert(run);
        run
    }

    /// What viewers of that run did so far, as they say themselves; of one that has ended, nothing. What they read and
    /// was not noted yet is noted first, so that the owner's numbers agree.
    pub fn totals_of(&self, run: u64) -> ViewerTotals {
        self.shared.drain_rings();
        self.shared.totals(|counted_for| counted_for == run)
    }

    /// Nobody asks for that run any more: its numbers are nobody's from now on, and those of its viewers that go on.
    pub fn end_run(&self, run: u64) {
        self.shared.runs.lock().remove(&run);
        for seat in &self.shared.seats {
            let mut seat = seat.lock();
            if let Some(past) = seat.past.remove(&run) {
                seat.past.entry(NO_RUN).or_default().merge(&past);
            }
        }
    }

    /// How many processes view the cache now. One that has died is counted for a tenth of a second or so.
    pub fn viewers(&self) -> usize {
        (0..VIEWERS_MAX).filter(|&viewer| self.shared.process(viewer) != 0).count()
    }

    /// Says that nothing is served any more, waits for the threads, detaches all handles. The last totals.
    pub fn stop(mut self) -> ViewerTotals {
        self.close();
        self.shared.totals(|_| true)
    }

    /// Says the same; who asks later is told what viewers had done until then. Nothing is served any more.
    pub fn stop_serving(&mut self) {
        self.close();
    }

    fn close(&mut self) {
        if self.process.is_forked() || self.threads.is_empty() {
            return; // neither the control file nor the threads are this process's; or all has ended
        }
        let control = self.shared.control();
        control.closed.store(1, Ordering::SeqCst); // partner: `is_closed`, and viewers that wait
        control.doorbell.fetch_add(1, Ordering::SeqCst); // partner: the sleep in `answer_viewers`
        futex_wake(&control.doorbell, u32::MAX >> 1);
        futex_wake(&control.closed, u32::MAX >> 1);
        for thread in self.threads.drain(..) {
            thread.join().expect("a thread of the service does not panic");
        }
        self.shared.wake_waiters();
        self.shared.drain_rings();
        self.shared.detach_all();
    }
}

fn spawn(
    shared: &Arc<Shared>,
    name: &str,
    life: impl FnOnce(&Arc<Shared>) + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name(name.into()).spawn(move || life(&shared))
}

impl Drop for Service {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn control(&self) -> &Control {
        self.owner.arena().control().control()
    }
    fn page(&self, viewer: usize) -> &ViewerPage {
        self.owner.arena().control().viewer_page(viewer).expect("a viewer's number is below VIEWERS_MAX")
    }
    fn process(&self, viewer: usize) -> u32 {
        // Acquire, partner: the viewer's compare-exchange; who sees it there may look at its page.
        self.control().processes[viewer].load(Ordering::Acquire)
    }
    fn is_closed(&self) -> bool {
        self.control().closed.load(Ordering::SeqCst) != 0 // partner: `close`
    }

    // ---- the workers ----------------------------------------------------------------------------

    fn answer_viewers(&self) {
        let control = self.control();
        while !self.is_closed() {
            // SeqCst here and below, partner: `ring_doorbell` in the viewer. Whoever asks after we
            // looked rings after we read the bell, so the sleep sees another bell; and a viewer that rings
            // while we are about to sleep sees a sleeper to wake.
            let bell = control.doorbell.load(Ordering::SeqCst);
            if let Some(job) = self.take_job() {
                self.do_job(&job);
                continue;
            }
            // SeqCst twice, partner: `ring_doorbell` again, which looks at this number after it has rung.
            control.sleepers.fetch_add(1, Ordering::SeqCst);
            if !self.is_closed() {
                futex_wait(&control.doorbell, bell, NAP_MILLIS);
            }
            control.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Takes the next question, of any viewer.
    fn take_job(&self) -> Option<Job> {
        let start = self.cursor.load(Ordering::Relaxed) as usize;
        (0..VIEWERS_MAX).map(|step| (start + step) % VIEWERS_MAX).find_map(|viewer| {
            let process = self.process(viewer);
            if process == 0 {
                return None;
            }
            let job = self.page(viewer).requests.iter().enumerate().find_map(|(slot, request)| {
                is_pending(request.state.load(Ordering::Relaxed))
                    .then(|| self.take(viewer, slot, process))
                    .flatten()
            });
            if job.is_some() {
                self.cursor.store(viewer as u32 + 1, Ordering::Relaxed);
            }
            job
        })
    }

    /// Takes one question, if it still stands; its seat is busy from here on.
    fn take(&self, viewer: usize, slot: usize, process: u32) -> Option<Job> {
        let mut seat = self.seats[viewer].lock();
        let request = &self.page(viewer).requests[slot];
        let pending = request.state.load(Ordering::Relaxed);
        if !is_pending(pending) || self.process(viewer) != process {
            return None;
        }
        // Acquire, partner: the viewer's Release of PENDING: we see the question.
        request.state.compare_exchange(pending, state::TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        seat.meet(process);
        seat.busy += 1;
        Some(Job {
            viewer,
            slot,
            process: seat.process,
            operation: request.operation.load(Ordering::Relaxed),
            arguments: [0, 1, 2].map(|i| request.arguments[i].load(Ordering::Relaxed)),
            attended: pending == state::PENDING,
        })
    }

    fn do_job(&self, job: &Job) {
        // What it has read since it last asked is known before room is made for more.
        self.drain_ring(job.viewer);
        let result = catch_unwind(AssertUnwindSafe(|| self.answer(job))).unwrap_or(Err(Errno::IO));
        write_answer(&self.page(job.viewer).requests[job.slot], job.attended, result);
        self.seats[job.viewer].lock().busy -= 1;
        if job.operation == Operation::Attach as u32 {
            let _ = catch_unwind(AssertUnwindSafe(|| self.owner.prepare(self)));
        }
    }

    fn answer(&self, job: &Job) -> Result<[u64; 2], Errno> {
        const ATTACH: u32 = Operation::Attach as u32;
        const FILL: u32 = Operation::Fill as u32;
        const ADVANCE: u32 = Operation::Advance as u32;
        const REVALIDATE: u32 = Operation::Revalidate as u32;
        const DETACH: u32 = Operation::Detach as u32;
        const EXAMINE: u32 = Operation::Examine as u32;
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        const HINT: u32 = Operation::Hint as u32;
        let [first, second, third] = job.arguments;
        let is_of_a_handle = !matches!(job.operation, ATTACH | EXAMINE | WRITER_OPENED | LET_GO);
        if is_of_a_handle && !self.seats[job.viewer].lock().handles.contains_key(&first) {
            return Err(Errno::BADF);
        }
        match job.operation {
            ATTACH => self.attach(job, first, second, third),
            EXAMINE => {
                let examine = self.examiner.as_ref();
                let conduct = examine.map_or(Conduct::Careful, |examine| examine(job.process));
                Ok([conduct as u64, 0])
            }
            FILL => self.owner.fill(first, second, third & !UNCACHED, third & UNCACHED != 0).map(|()| [0, 0]),
            REVALIDATE => self.owner.revalidate(first).map(|size| [size, 0]),
            ADVANCE => {
                self.owner.advance(first, PageIndex(second & !UNCACHED), second & UNCACHED != 0);
                Ok([0, 0])
            }
            HINT => {
                let (advice, len) = Advice::and_length(third).ok_or(Errno::INVAL)?;
                self.owner.advise(first, advice, second, len).map(|()| [0, 0])
            }
            DETACH => {
                // Two that ask at once: the map says who was first.
                let place = self.seats[job.viewer].lock().handles.remove(&first);
                if let Some(place) = place {
                    self.let_go(first, place);
                }
                Ok([0, 0])
            }
            WRITER_OPENED => {
                self.owner.writer_opened(first, second, third != 0);
                Ok([0, 0])
            }
            LET_GO => {
                self.owner.let_go(first, second);
                Ok([0, 0])
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn attach(&self, job: &Job, descriptor: u64, device: u64, inode: u64) -> Result<[u64; 2], Errno> {
        let spent = descriptor & CREDIT_SPENT != 0;
        let descriptor = i32::try_from(descriptor & !CREDIT_SPENT).map_err(|_| Errno::BADF)?;
        if let Some(credit) = self.owner.leaves_to_kernel(job.process, descriptor, (device, inode), spent) {
            return Ok([0, credit]);
        }
        // Nobody believes us before it is seen to that he hears of our end.
        // Acquire, partner: the store in `LastWord::new`.
        while self.owner.arena().owner_lives().load(Ordering::Acquire) == 0 && !self.is_closed() {
            std::thread::yield_now(); // the keeper, which was started, is about to say so
        }
        // First, so that who opens it for writing from here on tells us before; see `Tally`.
        let place = self.enter(device, inode);
        let attached = match self.owner.attach(job.process, descriptor, device, inode) {
            Ok(attached) => attached,
            Err(error) => {
                self.leave(place);
                return Err(error);
            }
        };
        self.vouch();
        let before = self.seats[job.viewer].lock().handles.insert(attached.handle, place);
        debug_assert!(before.is_none(), "a handle that was given already");
        Ok([attached.handle, u64::from(attached.id.0) << 32 | u64::from(attached.cell.0)])
    }

    // ---- what is attached -----------------------------------------------------------------------

    /// Counts a file as attached, for all who are about to write. Its place.
    fn enter(&self, device: u64, inode: u64) -> usize {
        let (control, place) = (self.control(), place_of(device, inode, ATTACHED_PLACES));
        control.attached_files.fetch_add(1, Ordering::Relaxed);
        control.attached[place].raise();
        place
    }

    fn leave(&self, place: usize) {
        self.control().attached[place].lower();
        self.control().attached_files.fetch_sub(1, Ordering::Relaxed);
    }

    /// The handle is nobody's any more.
    fn let_go(&self, handle: u64, place: usize) {
        let _ = catch_unwind(AssertUnwindSafe(|| self.owner.detach(handle)));
        self.leave(place);
    }

    // ---- the keeper -----------------------------------------------------------------------------

    /// The keeper's life; the workers besides the first are its children.
    fn keep_house(self: &Arc<Self>, workers: usize) {
        // Said when the last worker has ended, or by the kernel if we are killed: before that lets go of a lease.
        let arena = self.owner.arena();
        let _ended = LastWord::new(arena.owner_lives());
        let worker = |_| spawn(self, "quinion-worker", |shared| shared.answer_viewers()).ok();
        let workers: Vec<_> = (0..workers).filter_map(worker).collect();
        self.beat();
        workers.into_iter().for_each(|worker| worker.join().expect("a worker does not panic"));
    }

    fn beat(&self) {
        while !self.is_closed() {
            self.control().heartbeat.fetch_add(1, Ordering::Relaxed);
            self.vouch();
            for viewer in (0..VIEWERS_MAX).filter(|&viewer| self.process(viewer) != 0) {
                self.free_if_over(viewer);
            }
            self.drain_rings();
            futex_wait(&self.control().closed, 0, BEAT_MILLIS);
        }
    }

    /// Tells viewers up to when they may be sure. The clock is read first: whatever holds us up shortens that time, as
    /// does who says an older one a moment later.
    fn vouch(&self) {
        let from = ticks();
        let time = catch_unwind(AssertUnwindSafe(|| self.owner.sure_for())).unwrap_or(Duration::ZERO);
        // Release, partner: the Acquire in `Viewer::trust`.
        self.control().sure_until.store(from.saturating_add(ticks_within(time)), Ordering::Release);
    }

    fn drain_rings(&self) {
        (0..VIEWERS_MAX)
            .filter(|&viewer| self.process(viewer) != 0)
            .for_each(|viewer| self.drain_ring(viewer));
    }

    /// Tells the owner which frames a viewer read since it was last told.
    fn drain_ring(&self, viewer: usize) {
        self.drain_ring_of(&mut self.seats[viewer].lock(), viewer);
    }

    fn drain_ring_of(&self, seat: &mut Seat, viewer: usize) {
        let page = self.page(viewer);
        let head = page.ring_head.load(Ordering::Relaxed);
        let tail = std::mem::replace(&mut seat.tail, head);
        let entries = head.wrapping_sub(tail).min(RING_ENTRIES as u32);
        let arena = self.owner.arena();
        for place in (0..entries).map(|back| head.wrapping_sub(back + 1) as usize % RING_ENTRIES) {
            let frame = page.ring[place].load(Ordering::Relaxed);
            if arena.has_data(Frame(frame)) {
                let _ = catch_unwind(AssertUnwindSafe(|| self.owner.touched(Frame(frame))));
            }
        }
    }

    /// Frees the page of a viewer that is no more.
    fn free_if_over(&self, viewer: usize) {
        // Before the seat's lock: a run that ends meanwhile leaves some numbers behind that nobody asks for.
        let said = self.page(viewer).run.load(Ordering::Relaxed);
        let run = if self.runs.lock().contains(&said) { said } else { NO_RUN };
        let mut seat = self.seats[viewer].lock();
        let process = self.process(viewer);
        if process == 0 {
            return;
        }
        seat.meet(process);
        if seat.busy > 0 || !seat.is_over(process) {
            return;
        }
        self.drain_ring_of(&mut seat, viewer);
        seat.past.entry(run).or_default().add(self.page(viewer));
        let past = std::mem::take(&mut seat.past);
        let gone = std::mem::replace(&mut *seat, Seat { past, ..Seat::default() });
        clear(self.page(viewer));
        // Release, partner: the Acquire of the viewer that claims the page: it finds it cleared.
        self.control().processes[viewer].store(0, Ordering::Release);
        drop(seat);
        self.detach_handles(gone);
    }

    fn detach_handles(&self, seat: Seat) {
        for (handle, place) in seat.handles {
            self.let_go(handle, place);
        }
    }

    // ---- the end --------------------------------------------------------------------------------

    fn wake_waiters(&self) {
        for viewer in (0..VIEWERS_MAX).filter(|&viewer| self.process(viewer) != 0) {
            for request in &self.page(viewer).requests {
                futex_wake(&request.state, u32::MAX >> 1);
            }
        }
    }

    fn detach_all(&self) {
        for seat in &self.seats {
            let handles = std::mem::take(&mut seat.lock().handles); // its sums stay
            self.detach_handles(Seat { handles, ..Seat::default() });
        }
    }

    /// The sums of all whose run is `wanted`, the dead and the living.
    fn totals(&self, wanted: impl Fn(u64) -> bool) -> ViewerTotals {
        let mut totals = ViewerTotals::default();
        for (viewer, seat) in self.seats.iter().enumerate() {
            let seat = seat.lock();
            seat.past.iter().filter(|&(&run, _)| wanted(run)).for_each(|(_, past)| totals.merge(past));
            let page = self.page(viewer);
            if self.process(viewer) != 0 && wanted(page.run.load(Ordering::Relaxed)) {
                totals.add(page);
            }
        }
        totals
    }
}

impl House for Shared {
    fn goes_on(&self) -> bool {
        !self.is_closed()
    }
    fn has_viewers(&self) -> bool {
        (0..VIEWERS_MAX).any(|viewer| self.process(viewer) != 0)
    }
    fn while_attached(&self, device: u64, inode: u64, work: &mut dyn FnMut()) {
        // In this order, as in `attach`.
        let place = self.enter(device, inode);
        let done = catch_unwind(AssertUnwindSafe(work));
        self.leave(place);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

impl ViewerTotals {
    fn merge(&mut self, other: &ViewerTotals) {
        self.viewers += other.viewers;
        self.reads = self.reads.wrapping_add(other.reads);
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.asked = self.asked.wrapping_add(other.asked);
        self.misses = self.misses.wrapping_add(other.misses);
        self.files = self.files.wrapping_add(other.files);
        self.kernel_reads = self.kernel_reads.wrapping_add(other.kernel_reads);
        let counts = self.reasons.iter_mut().zip(other.reasons);
        for (sum, more) in counts.chain(self.patching.iter_mut().zip(other.patching)) {
            *sum = sum.wrapping_add(more);
        }
    }
}

fn is_pending(now: u32) -> bool {
    matches!(now, state::PENDING | state::PENDING_UNATTENDED)
}

/// Writes the answer and wakes who waits for it. Of a question nobody waits for, only the slot is freed.
fn write_answer(request: &Request, attended: bool, result: Result<[u64; 2], Errno>) {
    if !attended {
        // Release, partner: the Acquire by which a viewer claims the slot.
        request.state.store(state::FREE, Ordering::Release);
        return;
    }
    match result {
        Ok(answers) => {
            request.error.store(0, Ordering::Relaxed);
            for (place, answer) in request.answers.iter().zip(answers) {
                place.store(answer, Ordering::Relaxed);
            }
        }
        Err(error) => request.error.store(error.0 as u32, Ordering::Relaxed),
    }
    // SeqCst on both, partner: `wait` in the viewer, which says it sleeps and then looks at the state.
    request.state.store(state::DONE, Ordering::SeqCst);
    if request.sleeper.load(Ordering::SeqCst) != 0 {
        futex_wake(&request.state, 1);
    }
}

/// A viewer's page as the next viewer should find it.
fn clear(page: &ViewerPage) {
    for counter in &page.counters {
        counter.store(0, Ordering::Relaxed);
    }
    for request in &page.requests {
        request.state.store(state::FREE, Ordering::Relaxed);
    }
    page.ring_head.store(0, Ordering::Relaxed);
    page.run.store(NO_RUN, Ordering::Relaxed);
}

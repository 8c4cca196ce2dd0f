//! Serve: the owner's side of what viewers ask.
//!
//! ```text
//!   process, at the socket       keeper
//!     Hello    ------------>  whose process? of our domain? --> a seat, a page of its own
//!     Welcome  <------------  arena, control, page
//!
//!   viewer's page                workers (more if they hang)       Owner
//!     slot PENDING --take-->  whose? a handle of that viewer's? --> attach, fill, advance, ..
//!     slot DONE    <--------  answer, wake                      <--
//!
//!   from the 101st viewer on     a watcher for each 100
//!     its futex    ---------> doorbell up, wakes a worker, which looks at the slots of those whose doorbells are up
//!
//!   ten times a second, the keeper:  heartbeat + 1; up to when viewers are sure
//!                                    access rings  --frames, checked--> touched
//!   at once:                         dead viewers  --their handles----> detach, seat free again
//! ```
//!
//! **Who may view** (`sys/domain.rs`): processes with the very credentials of the owner, in its user and process name
//! spaces. The kernel says who is at the other end of the socket (`listener.rs`); and before each file is attached the
//! process is looked at again, since its credentials may have changed. A file is attached by a descriptor that is
//! duplicated from the process (`pidfd_getfd`) and can read: so no process learns by way of us what it could not read.
//! Where the system forbids that to us (Yama, for processes that are not our children) the process sends it, by a
//! connection of its own (`DescriptorOffer`), and asks with the ticket it gets for it.
//!
//! **What is trusted**: nothing a viewer writes. A number is checked before it is used, a
//! handle must have been given to the viewer that names it, and what a viewer
//! does to its own page, which no other viewer has, hurts only that viewer. The
//! owner's own notes about viewers, the **seats**, lie in the owner's memory.
//!
//! **Who may keep us waiting** (`workers.rs`): a file system that hangs, or a viewer that asks without end, has some
//! of the workers at most; the others get more workers, and viewers wait for a bounded time anyway. The keeper closes
//! nothing that may hang: that is done in a queue of the file system, or of the process that sent it
//! (`sys/serial_queues.rs`).
//!
//! **Many viewers** cost an owner that is idle next to nothing, and a busy one no more than those that ask. Workers
//! wait for the futexes of the first [`GROUP_VIEWERS`] themselves. Each further group is made when no seat is free
//! (`seats.rs`): its pages take an extent of the cache's bound, and its watcher sleeps for its futexes, and tells the
//! workers whose have changed ([`doorbells`](crate::arena::doorbells)). The workers take the questions of all viewers
//! in turn, one of each. A viewer that rings hundreds of times in a second and asks nothing is polled for some time,
//! and not slept for (`ring_limit.rs`). When no viewer is left in the last groups, their extents are given back
//! (`release_empty_groups`); their watchers stay, and sleep.
//!
//! A question of a viewer that unmounts or removes something waits for what is under way for others, for a bounded time
//! (`SETTLE_WAIT_MAX`). What that is the workers say, and not the viewers' pages; and a viewer, or a file system, that
//! was waited for in vain is not waited for again.
//!
//! A viewer that dies is noticed by its process descriptor, so a new process
//! with the same number is not mistaken for it. Its seat is free
//! when no worker is at work for it, and the next in that seat gets a fresh page. A process that became another program
//! joins anew; what it had before is over then.
//!
//! A cache that outlives a command serves several **runs**, one after the other and side by side. Each gets a number,
//! which its viewers put into their pages, so that each can be told what its own have done. The sums of viewers that
//! are no more lie in the seats they had: a viewer's numbers move from its page there under the seat's lock, so who
//! adds up finds them once.
//!
//! Invariants:
//!  1. A worker answers into a page only while its seat is busy; a busy seat is never freed.
//!  2. No lock of this module is held while the [`Owner`] is called, but for the lock of groups in
//!     [`Owner::reserve_viewers`], which calls nothing of this module. Only a thread that lets a process join waits for
//!     that lock: the keeper goes on without it.
//!  3. Every handle the owner gave is detached once: when the viewer says so, dies, or the service stops.
//!  4. An answer to a question that its viewer has given up is taken back: it leaves no handle behind.
//!  5. No viewer has a handle before it is certain that viewers notice our end, however it comes
//!     (`sys/death_notice.rs`).
//!  6. A panic in the owner is an answer (EIO) to one question, not the end of a worker.
//!  7. An arena has one service in its life: two would write into the same pages, and what one has said by its end
//!     (`closed`, and the mark of `DeathNotice`) its viewers have acted upon.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fchmod, fstat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::arena::control::{
    ATTACHED_PLACES, Advice, AttachPolicy, CREDIT_SPENT, Control, Counter, GROUP_VIEWERS, GROUPS_MAX,
    OPENED_ENTRIES, Operation, Patching, REQUEST_SLOTS, RING_ENTRIES, Reason, Request, SENT, SyscallAudit,
    TO_BE_SENT, UNCACHED, VIEWERS_MAX, ViewerPage, place_of, state,
};
use crate::arena::doorbells::{Doorbells, Found, WatchedViewers};
use crate::arena::{ArenaError, ArenaShare, CellNumber, OWNER_ENDED, Validation};
use crate::sync::{Rank, RankedMutex};
use crate::sys::death_notice::{DeathNotice, ENDED};
use crate::sys::domain::{Domain, Member};
use crate::sys::fork::ForkGuard;
use crate::sys::peer::ProcessName;
use crate::sys::serial_queues::{QueueKey, SerialQueues};
use crate::units::{Frame, MappingId, PageIndex};
use crate::viewer::sys::{
    Errno, FUTEXES_MAX, FutexWait, futex_wait, futex_wait_any, futex_wake, ticks, ticks_within,
};
use crate::viewer::{self, Viewer};

mod listener;
pub mod mounts;
mod named;
mod peer_connection;
mod pins;
mod ring_limit;
mod seats;
mod workers;

use listener::{HELLO_MAX, Listener};
use mounts::Mount;
pub use named::{NameRefusal, NamedAttachment};
use peer_connection::PeerConnection;
use pins::PinnedRange;
use ring_limit::{Observation, POLL_INTERVAL, RingLimit, WaitMode};
use seats::Seats;
use workers::{ThreadEnds, WorkKey, Workers};

/// How many threads answer viewers unless the options say otherwise.
pub const WORKERS: usize = 4;
/// How many processes may view a cache at a time unless the options say otherwise.
pub const VIEWERS: usize = 1024;
/// Words of the doorbells of all viewers.
const DOORBELL_WORDS: usize = (GROUPS_MAX * GROUP_VIEWERS).div_ceil(64);
/// Up to so many viewers, what they opened is added up before another joins; with more at the next beat.
const VIEWERS_SUMMED_AT_JOIN: usize = 64;
/// The time between two heartbeats.
const BEAT: Duration = Duration::from_millis(100);
/// Heartbeats of a window, after which the owner is told what viewers did.
const WINDOW_BEATS: u32 = 5;
/// The run of viewers that said none.
const NO_RUN: u64 = 0;
/// How long a worker sleeps at most, in milliseconds, if no viewer rings.
const WORKER_SLEEP_MILLIS: u32 = 1000;
/// The same where it cannot sleep on all futexes at once.
const WORKER_POLL_MILLIS: u32 = 2;
/// Files that one viewer has attached at most: each takes some memory of ours. More are left to the kernel.
const HANDLES_MAX: usize = 4096;
/// Processes that may wait to be heard at a time.
pub const LISTEN_MAX: i32 = 128;
/// How long a viewer that is about to unmount waits for requests of others.
const SETTLE_WAIT_MAX: Duration = Duration::from_millis(200);
/// How often what is under way for one viewer is waited for in vain.
const DELAYS_MAX: u32 = 4;
/// Workers that are at work for one viewer at most.
const JOBS_MAX: u32 = 16;
/// How long the end of the service waits for files that are being closed.
const END_MAX: Duration = Duration::from_secs(1);
/// Descriptors and names that one viewer has sent and not asked for, at most.
const OFFERS_MAX: usize = 16;
/// In the numbers of what is opened by a name, in place of a device: no device of the system has one so large.
pub const NAMED_DEVICE: u64 = 1 << 63;
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

/// What the system calls a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileName {
    /// The device it lies on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
}

impl FileName {
    /// That of the regular file behind a descriptor; `None` if it is none.
    pub fn of(file: impl AsFd) -> Option<Self> {
        let stat = fstat(file).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode).is_file())?;
        Some(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// What is done about others who may change a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileMode {
    /// Where it was when it was attached.
    pub path: PathBuf,
    /// What was done last.
    pub validation: Validation,
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
    /// Attaches the file `name` for a viewer. `file` is a descriptor of that viewer's, duplicated, by which it can read
    /// the file: proof that it may, and not to be read by, moved or kept, as the viewer has it too. Size and times are
    /// looked at now, and the file's record
    /// says how far viewers may believe what is cached of it ([`Validation`]) when this returns. `ETXTBSY`: they may
    /// not, another process has it open for writing. `EOPNOTSUPP`: they may not, for another reason.
    fn attach(&self, file: OwnedFd, name: FileName) -> Result<Attached, Errno>;
    /// Sets memory aside in the arena for the pages of so many groups of viewers ([`ArenaShare::reserve_viewers`]), and
    /// makes room for them first; waits for a bounded time.
    ///
    /// # Errors
    /// The bound has no room for them.
    fn reserve_viewers(&self, groups: usize) -> Result<(), ArenaError> {
        self.arena().reserve_viewers(groups)
    }
    /// When viewers ask for files. At the first read of each, unless the owner says otherwise.
    fn attach_policy(&self) -> AttachPolicy {
        AttachPolicy::default()
    }
    /// Whether the file that a viewer is about to attach, as for [`Owner::attach`], is better left to the kernel for
    /// now; then how many bytes of it are to be read, as [`AttachPolicy::worth`] counts, before the viewer asks again.
    /// `spent` says that it does ask again.
    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, name: FileName, spent: bool) -> Option<u64> {
        let _ = (file, name, spent);
        None
    }
    /// Called by the thread that has just answered an [`Owner::attach`], or what stands in its place: for what is
    /// better done when no viewer waits for it. It ends soon after `service` says that it must not go on.
    fn prepare(&self, service: &dyn ServiceHandle) {
        let _ = service;
    }
    /// How long from now on viewers may be sure of files of which their records say so ([`Validation::Leased`]), if
    /// nothing else comes from this owner, as when it is stopped. Asked ten times a second, and when a file was
    /// admitted.
    fn leases_valid_for(&self) -> Duration {
        Duration::ZERO
    }
    /// A viewer asked for a file of a file system whose files are served only if the options say so
    /// ([`AttachPolicy::any_file_system`]). It was not looked at: `name` is what the viewer says.
    fn unserved_file_system(&self, path: &Path, name: FileName) {
        let _ = (path, name);
    }
    /// A viewer is about to open that file so that it can write it. `cuts`: it cuts it, or has, in a way that the
    /// kernel tells no holder of a lease of; when this returns no viewer is shown what was cached of it.
    fn writer_opened(&self, device: u64, inode: u64, cuts: bool) {
        let _ = (device, inode, cuts);
    }
    /// A viewer wants to be alone with that file: when this returns the owner has closed it, and no viewer is attached.
    fn let_go(&self, device: u64, inode: u64) {
        let _ = (device, inode);
    }
    /// A viewer is about to watch that file, or, if both are 0, any: as `let_go`, and it is not attached any more.
    fn watched(&self, device: u64, inode: u64) {
        self.let_go(device, inode);
    }
    /// A viewer is about to unmount something: when this returns the owner has closed all files that no viewer has
    /// open.
    fn release_idle(&self) {}
    /// A viewer is about to remove that file: when this returns the owner has closed it, unless a viewer has it open.
    fn close_idle(&self, device: u64, inode: u64) {
        let _ = (device, inode);
    }
    /// This process is about to be stopped: no viewer is to wait for it.
    fn about_to_stop(&self) {}
    /// Told twice a second what all viewers have done since the start, in a thread that nothing else waits for. If that
    /// takes longer, less often.
    fn window_ended(&self, totals: &ViewerTotals) {
        let _ = totals;
    }
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
    /// The number by which work on what has that name is bounded, in place of a device's: one for each store, with
    /// [`NAMED_DEVICE`] added.
    ///
    /// # Errors
    /// Nothing of that name can be opened.
    fn device_of_name(&self, name: &[u8]) -> Result<u64, NameRefusal> {
        let _ = name;
        Err(NameRefusal { error: Errno::OPNOTSUPP, text: "this cache opens nothing by a name".into() })
    }
    /// Opens what has that name, for a viewer. It never changes: its record says so ([`Validation::Immutable`]) when
    /// this returns, and another version of the object is another file.
    ///
    /// # Errors
    /// It cannot be opened.
    fn open_named(&self, name: &[u8]) -> Result<NamedAttachment, NameRefusal> {
        self.device_of_name(name).and(Err(NameRefusal { error: Errno::OPNOTSUPP, text: String::new() }))
    }
    /// Keeps up to `len` bytes at `position` where they are in memory, until they are unpinned or the handle is
    /// detached: the pin's number, different from all others, and how many bytes are pinned.
    ///
    /// # Errors
    /// They cannot be read, or no more can be pinned.
    fn pin(&self, handle: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        let _ = (handle, position, len);
        Err(Errno::OPNOTSUPP)
    }
    /// A pin is not needed any more.
    fn unpin(&self, handle: u64, pin: u64) {
        let _ = (handle, pin);
    }
    /// The service ends, and the viewer that has pinned ranges of this file may go on looking at them: they stay where
    /// they are as long as this process lives.
    fn leave_pins(&self, handle: u64) {
        let _ = handle;
    }
    /// The folio that starts at `frame` was read. A hint: the frame exists, but may be anything by now. Called with a
    /// lock of the service held: it takes none.
    fn touched(&self, frame: Frame);
}

/// What the service does for an [`Owner`] that prepares files.
pub trait ServiceHandle {
    /// Whether to go on.
    fn goes_on(&self) -> bool;
    /// Whether a program may be running that reads from us.
    fn has_viewers(&self) -> bool;
    /// Does `work` while the file counts as attached: a viewer that is about to open it for writing says so, and
    /// [`Owner::writer_opened`] is called.
    fn while_attached(&self, device: u64, inode: u64, work: &mut dyn FnMut());
}

/// Says what the code does that a process has loaded: see [`SyscallAudit`]. Called by several threads at a time.
pub type SyscallAuditor = Box<dyn Fn(u32) -> SyscallAudit + Send + Sync>;

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
struct ViewerSlot {
    /// The process; `None` if the seat is free.
    process: Option<Process>,
    /// What it has attached.
    handles: HashMap<u64, Handle>,
    /// How far its ring of what it read has been looked at.
    tail: u32,
    /// Workers that are at work for it.
    busy: u32,
    /// For each of its slots what the worker is at that took it: not what the page says.
    jobs: [Option<RunningJob>; REQUEST_SLOTS],
    /// How often a thread waited in vain for what workers are at for it.
    delays: u32,
    /// What it has sent and not asked for, by ticket; the last ticket.
    offers: HashMap<u32, Offer>,
    /// What it has pinned, by the owner's number.
    pins: HashMap<u64, PinnedRange>,
    last_ticket: u32,
    /// Whether the process has joined anew since, as another program.
    is_replaced: bool,
    /// Sums of the viewers that had the page and are no more, by run; stays when the viewer goes.
    past: BTreeMap<u64, ViewerTotals>,
}

impl ViewerSlot {
    /// What it has sent and did not ask for.
    fn take_late_offers(&mut self) -> Vec<Offer> {
        if self.offers.is_empty() {
            return Vec::new();
        }
        let late = self.offers.extract_if(|_, offer| offer.theirs.since.elapsed() > HELLO_MAX);
        late.map(|(_, offer)| offer).collect()
    }

    /// Whether it is of a viewer that is no more.
    fn is_over(&self) -> bool {
        self.is_replaced || self.process.as_ref().is_some_and(|process| has_ended(&process.alive))
    }
}

/// What a viewer has sent.
#[derive(Debug)]
struct Offer {
    /// A descriptor lies in it, unless there is a name.
    theirs: PeerConnection,
    name: Option<Box<[u8]>>,
}

/// What a worker is at.
#[derive(Clone, Copy, Debug)]
struct RunningJob {
    operation: u32,
    /// The later it began the larger.
    number: u64,
}

/// A process that has joined.
#[derive(Clone, Debug)]
struct Process {
    number: u32,
    name: ProcessName,
    /// Tells when it has ended, and names it and no other.
    alive: Arc<OwnedFd>,
    /// Asks whether it still is of our domain.
    member: Arc<Member>,
}

/// A file that a viewer has attached.
#[derive(Clone, Copy, Debug)]
struct Handle {
    /// Its place among all that are attached.
    place: usize,
    /// The device it lies on.
    device: u64,
}

/// A question that a worker has taken.
struct ViewerJob {
    viewer: usize,
    slot: usize,
    process: Process,
    operation: u32,
    arguments: [u64; 3],
    attended: bool,
}

impl ViewerJob {
    /// The device of which something is said here that the owner must hear of, however late; `None` if the question may
    /// be refused: the kernel has a writer wait for a lease, and a file that stays open a while longer is no harm.
    fn device_to_notify(&self) -> Option<u64> {
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        let [device, _, third] = self.arguments;
        match self.operation {
            WRITER_OPENED if third != 0 => Some(device),
            LET_GO => Some(device),
            _ => None,
        }
    }
}

struct Shared {
    owner: Arc<dyn Owner>,
    examiner: Option<SyscallAuditor>,
    /// Whose processes may view the cache.
    domain: Domain,
    seats: Seats,
    /// The process that has which seat, 0 for a free seat: for a look at all of them.
    processes: Vec<AtomicU32>,
    /// How many processes had that seat.
    joins: Vec<AtomicU32>,
    /// How many questions were taken of the processes that had that seat.
    taken_of: Vec<AtomicU32>,
    /// Looks of all threads that found that a viewer had rung.
    rings_seen: AtomicU64,
    /// Held by a thread that gives out a seat, makes a group or gives one back.
    groups: RankedMutex<()>,
    /// Seats whose viewers are no more, and for which a worker was still at work.
    overdue: RankedMutex<Vec<usize>>,
    /// Which viewers have asked, of all groups but the first: the workers themselves wait for that.
    doorbells: Doorbells<DOORBELL_WORDS>,
    /// Runs that have begun and not ended.
    runs: RankedMutex<HashSet<u64>>,
    last_run: AtomicU64,
    /// Where the last worker found work.
    cursor: AtomicU32,
    /// Questions that were taken.
    taken: AtomicU64,
    /// How often what others are at was waited for in vain.
    waits_in_vain: AtomicU64,
    workers: Workers,
    listener: Listener,
    /// For what may wait as long as another process likes.
    queues: SerialQueues,
}

/// How a [`Service`] is started.
pub struct ServiceOptions {
    /// How many threads answer; at least one does.
    pub workers: usize,
    /// How many processes may view the cache at a time: one at least, and [`VIEWERS_MAX`] at most.
    pub viewers_max: usize,
    /// Answers [`Operation::Examine`]. If none is set, processes that ask are restricted.
    pub examiner: Option<SyscallAuditor>,
    /// Where processes join: a listening Unix socket of the kind SOCK_SEQPACKET. Without one they can be let in by
    /// [`Service::admit`] alone.
    pub listener: Option<OwnedFd>,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        Self { workers: 1, viewers_max: VIEWERS, examiner: None, listener: None }
    }
}

impl fmt::Debug for ServiceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceOptions").field("workers", &self.workers).finish_non_exhaustive()
    }
}

/// What a process needs to become a viewer, besides the arena's token.
#[derive(Debug)]
pub struct Admission {
    /// The arena, for reading.
    pub arena: OwnedFd,
    /// What all viewers see, for reading.
    pub control: OwnedFd,
    /// The page of this viewer alone.
    pub page: OwnedFd,
    /// Its number.
    pub viewer: usize,
    /// What both files say.
    pub token: u64,
}

impl Admission {
    /// The viewer, in this process; see [`viewer::of_files`].
    ///
    /// # Errors
    /// Those of that call.
    pub fn view(&self) -> std::io::Result<Viewer> {
        viewer::of_files([&self.arena, &self.control, &self.page], self.token)
    }
}

/// A socket at `path`, for [`ServiceOptions::listener`]. Only this user may connect.
///
/// # Errors
/// The path is taken, too long (some hundred bytes), or the folder cannot be written.
pub fn listen(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // Before it has a name: a process that finds the name finds it closed to others.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, LISTEN_MAX)?;
    Ok(socket)
}

/// The threads that answer viewers. Dropping it stops them.
pub struct Service {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    ends: ThreadEnds,
    process: ForkGuard,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Service {
    /// Starts `workers` threads (at least one) that answer, and one that does the housekeeping (the keeper). Processes
    /// are not examined, and none joins by a socket.
    pub fn start(owner: Arc<dyn Owner>, workers: usize) -> std::io::Result<Self> {
        Self::start_with(owner, ServiceOptions { workers, ..ServiceOptions::default() })
    }

    /// The same, by `options`.
    ///
    /// # Errors
    /// The owner's cache is served already, or was (`AlreadyExists`); the system refuses.
    pub fn start_with(owner: Arc<dyn Owner>, options: ServiceOptions) -> std::io::Result<Self> {
        let ServiceOptions { workers, viewers_max, examiner, listener } = options;
        let viewers_max = viewers_max.clamp(1, VIEWERS_MAX);
        owner.arena().populate_control().map_err(std::io::Error::other)?;
        let queues = SerialQueues::default();
        let listener = Listener::new(owner.arena(), listener, &queues)?;
        // Last of what is refused without a trace: a caller whose socket was at fault may try another.
        if !owner.arena().claim_service() {
            let text =
                "this cache is served already, or was: a cache is served once; build another for this server";
            return Err(std::io::Error::new(std::io::ErrorKind::AlreadyExists, text));
        }
        let shared = Arc::new(Shared {
            examiner,
            domain: Domain::ours()?,
            seats: Seats::new(viewers_max),
            processes: (0..viewers_max).map(|_| AtomicU32::new(0)).collect(),
            joins: (0..viewers_max).map(|_| AtomicU32::new(0)).collect(),
            taken_of: (0..viewers_max).map(|_| AtomicU32::new(0)).collect(),
            rings_seen: AtomicU64::new(0),
            groups: RankedMutex::new(Rank::Groups, ()),
            overdue: RankedMutex::new(Rank::Viewer, Vec::new()),
            doorbells: Doorbells::default(),
            runs: RankedMutex::new(Rank::Viewer, HashSet::new()),
            last_run: AtomicU64::new(0),
            cursor: AtomicU32::new(0),
            taken: AtomicU64::new(0),
            waits_in_vain: AtomicU64::new(0),
            workers: Workers::default(),
            listener,
            queues,
            owner,
        });
        shared.control().set_attach_policy(shared.owner.attach_policy());
        shared.workers.keep(workers.max(1));
        let ends = ThreadEnds::default();
        let mut service = Self { shared, threads: Vec::new(), ends, process: ForkGuard::new() };
        // A thread that cannot be started: the drop of `service` stops the other. The other workers are started when
        // they are needed, and if they cannot be, fewer do.
        service.shared.start_worker()?;
        service.threads.push(spawn(&service.shared, ("quinion-keeper", &service.ends), Shared::run_keeper)?);
        Ok(service)
    }

    /// Lets a process of our domain become a viewer, as it would by the socket. Its page is given to another when the
    /// process has ended, or has joined anew.
    ///
    /// # Errors
    /// There is no such process, it is of another domain (EACCES), there are as many viewers as there may be (EUSERS),
    /// the cache's bound has no room for the pages of more (ENOBUFS), or the system refuses.
    pub fn admit(&self, process: u32) -> std::io::Result<Admission> {
        let error = |errno: Errno| std::io::Error::from_raw_os_error(errno.0);
        let number = Pid::from_raw(process as i32).ok_or_else(|| error(Errno::SRCH))?;
        let alive = pidfd_open(number, PidfdFlags::empty())?;
        let (viewer, page) = self.shared.admit(process, alive).map_err(error)?;
        let [arena, control] = self.shared.listener.files()?;
        let token = self.shared.owner.arena().token();
        Ok(Admission { arena, control, page, viewer, token })
    }

    /// Keeps a plan for viewers that ask for it by its number, which this gives.
    pub fn add_plan(&self, plan: OwnedFd) -> u32 {
        self.shared.listener.add_plan(plan)
    }

    /// What viewers did so far.
    pub fn totals(&self) -> ViewerTotals {
        self.shared.totals(|_| true)
    }

    /// The queues for what may wait for others. An owner that does such things besides does them here: one bound is for
    /// all of it.
    pub fn queues(&self) -> SerialQueues {
        self.shared.queues.clone()
    }

    /// Begins to count for a run apart. Its number, above 0, goes to its viewers, who say it by
    /// [`Viewer::count_for`].
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

    /// No viewer asks for that run any more: its numbers are free from now on, and those of its viewers that go on.
    pub fn end_run(&self, run: u64) {
        self.shared.runs.lock().remove(&run);
        for seat in self.shared.seats.iter() {
            let mut seat = seat.lock();
            if let Some(past) = seat.past.remove(&run) {
                seat.past.entry(NO_RUN).or_default().merge(&past);
            }
        }
    }

    /// How many threads answer now: more than it was started with for some time after some hung.
    pub fn workers(&self) -> usize {
        self.shared.workers.count()
    }

    /// How often a process that is about to unmount or remove something waited in vain for what others are at.
    pub fn waits_in_vain(&self) -> u64 {
        self.shared.waits_in_vain.load(Ordering::Relaxed)
    }

    /// How often a thread that sleeps for viewers has found that one had rung, whether it asked or not.
    pub fn rings_seen(&self) -> u64 {
        self.shared.rings_seen.load(Ordering::Relaxed)
    }

    /// How many processes view the cache now. One that has died is counted until its end has been noticed.
    pub fn viewers(&self) -> usize {
        self.shared.present().count()
    }

    /// Says that nothing is served any more, waits for the threads, detaches all handles. The last totals.
    pub fn stop(mut self) -> ViewerTotals {
        self.close();
        self.shared.totals(|_| true)
    }

    /// Says the same; a later question is answered by what viewers had done until then. Nothing is served any more.
    pub fn stop_serving(&mut self) {
        self.close();
    }

    fn close(&mut self) {
        if self.process.is_forked() || self.threads.is_empty() {
            return; // neither the control file nor the threads are this process's; or all has ended
        }
        let control = self.shared.control();
        control.closed.store(1, Ordering::SeqCst); // partner: `is_closed`, and viewers that wait
        self.shared.wake_all();
        self.shared.listener.wake();
        self.ends.join_within(workers::END_MAX, self.threads.drain(..));
        self.shared.workers.end();
        self.shared.wake_waiters();
        self.shared.drain_rings();
        self.shared.detach_all();
    }
}

fn spawn(
    shared: &Arc<Shared>,
    (name, ends): (&str, &ThreadEnds),
    life: impl FnOnce(&Arc<Shared>) + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    let (shared, counted) = (Arc::clone(shared), ends.begin());
    std::thread::Builder::new().name(name.into()).spawn(move || {
        let _counted = counted; // dropped last
        life(&shared);
    })
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
        self.owner.arena().control().viewer_page(viewer).expect("a viewer has a page")
    }
    fn process(&self, viewer: usize) -> u32 {
        // Acquire, partner: the Release in `admit`: a thread that sees a process sees its page in place.
        self.processes[viewer].load(Ordering::Acquire)
    }
    fn present(&self) -> impl Iterator<Item = usize> {
        self.present_among(0..self.seats.count())
    }
    fn present_among(&self, among: Range<usize>) -> impl Iterator<Item = usize> {
        among.filter(|&viewer| self.process(viewer) != 0)
    }
    /// What is known of a viewer, or of a seat that one had.
    fn seat(&self, viewer: usize) -> &RankedMutex<ViewerSlot> {
        self.seats.of(viewer).expect("a viewer has a seat")
    }
    fn is_closed(&self) -> bool {
        self.control().closed.load(Ordering::SeqCst) != 0 // partner: `close`
    }

    // ---- processes join ------------------------------------------------------------------------------

    /// Gives a process a seat and a page, if it is of our domain.
    fn admit(self: &Arc<Self>, number: u32, alive: OwnedFd) -> Result<(usize, OwnedFd), Errno> {
        if self.is_closed() {
            return Err(Errno::SRCH);
        }
        let member = self.domain.member(number).map_err(|error| match error.raw_os_error() {
            Some(error @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => Errno(error), // it is we who lack something
            _ => Errno::ACCES,
        })?;
        // The number was that process's when we asked: a descriptor of one that has ended is ready.
        if has_ended(&alive) {
            return Err(Errno::SRCH);
        }
        // What it had before it became another program is given back.
        for viewer in self.present().filter(|&viewer| self.process(viewer) == number) {
            let mut seat = self.seat(viewer).lock();
            if seat.has_pins_of(number) {
                return Err(Errno::BUSY); // it looks at what is pinned, by the view that it has
            }
            seat.is_replaced = seat.process.as_ref().is_some_and(|known| known.number == number);
            drop(seat);
            self.free_soon(viewer);
        }
        if self.present().nth(VIEWERS_SUMMED_AT_JOIN).is_none() {
            self.drain_opened();
        }
        let name = ProcessName::of(number, &alive);
        let process = Process { number, name, alive: Arc::new(alive), member: Arc::new(member) };
        let _groups = self.groups.lock();
        loop {
            let seats = self.seats.count();
            for viewer in (0..seats).filter(|&viewer| self.process(viewer) == 0) {
                let mut seat = self.seat(viewer).lock();
                if seat.process.is_some() {
                    continue; // another thread was faster
                }
                let page = self.owner.arena().make_viewer_page(viewer).map_err(|_| Errno(libc::ENOMEM))?;
                self.listener.await_end(viewer, &process.alive)?;
                seat.process = Some(process);
                self.joins[viewer].fetch_add(1, Ordering::Relaxed); // the next store orders it
                // Release, partner: the Acquire in `process`.
                self.processes[viewer].store(number, Ordering::Release);
                drop(seat);
                // A worker or watcher that sleeps for its group waits for its futex, too, from now on.
                self.announce_viewer(viewer);
                return Ok((viewer, page));
            }
            self.add_group(seats)?;
        }
    }

    /// Makes room for another group of viewers behind the first `seats`. The caller holds the lock of groups.
    ///
    /// # Errors
    /// There are as many as there may be (EUSERS), the bound has no room for their pages (ENOBUFS), or the system
    /// refuses.
    fn add_group(self: &Arc<Self>, seats: usize) -> Result<(), Errno> {
        if seats >= self.processes.len() {
            return Err(Errno::USERS);
        }
        let group = seats / GROUP_VIEWERS;
        self.owner.reserve_viewers(group + 1).map_err(|_| Errno(libc::ENOBUFS))?;
        self.owner.arena().map_viewers(group).map_err(|_| Errno(libc::ENOMEM))?;
        if group > 0 && self.seats.is_unwatched(group) {
            let watch = move |shared: &Arc<Self>| shared.watch(group);
            let watcher =
                spawn(self, ("quinion-watcher", self.workers.ends()), watch).map_err(|_| Errno::AGAIN);
            self.workers.add_watcher(watcher.inspect_err(|_| self.seats.unwatch(group))?);
        }
        self.seats.add(group);
        Ok(())
    }

    /// Gives back the memory of the last groups, if no viewer is in them. Waits for nothing: where a process joins at
    /// the moment, or the cache grows, a later call does what is left.
    fn release_empty_groups(&self) {
        let Some(_groups) = self.groups.try_lock() else { return };
        let groups = self.present().last().map_or(1, |viewer| viewer / GROUP_VIEWERS + 1);
        self.seats.truncate(groups);
        self.owner.arena().release_viewers(groups);
    }

    /// Keeps a connection by which a viewer, the process `number`, has sent something, and has it `told` the ticket, or
    /// why not.
    fn keep_offer(&self, number: u32, offer: Offer, told: impl FnOnce(Result<u32, Errno>, &PeerConnection)) {
        let named = self.present().filter(|&viewer| self.process(viewer) == number);
        let mut seats = named.map(|viewer| self.seat(viewer).lock());
        let is_its = |seat: &ViewerSlot| {
            seat.process.as_ref().is_some_and(|known| known.number == number) && !seat.is_replaced
        };
        let Some(mut seat) = seats.find(|seat| is_its(seat)) else {
            return told(Err(Errno::ACCES), &offer.theirs);
        };
        if seat.offers.len() >= OFFERS_MAX {
            drop(seat);
            return told(Err(Errno::AGAIN), &offer.theirs);
        }
        let ticket = seat.last_ticket.wrapping_add(1) & i32::MAX as u32;
        seat.last_ticket = ticket;
        told(Ok(ticket), &offer.theirs); // it does not wait
        seat.offers.insert(ticket, offer);
    }

    /// Has the watcher of its group, or one worker, look again which viewers there are; a worker has others do so when
    /// it has something else to do.
    fn announce_viewer(&self, viewer: usize) {
        let joined = self.seats.joined(viewer);
        // SeqCst, partner: the sleep in `answer_viewers`, or in `watch`.
        let change = || joined.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if viewer < GROUP_VIEWERS {
            self.workers.announce(change);
        } else {
            change();
        }
        futex_wake(joined, 1);
    }

    /// This worker is about to do something, or to end: one that sleeps is to wait for all of them.
    fn hand_on(&self) {
        // SeqCst, partner: the count of sleepers before a sleep. A worker that sleeps later looks at the futex again.
        if !self.workers.are_all_awaited() && self.control().sleepers.load(Ordering::SeqCst) != 0 {
            futex_wake(self.seats.joined(0), 1);
        }
    }

    /// Has all workers look again.
    fn wake_workers(&self) {
        let wake_futex = self.seats.joined(0);
        wake_futex.fetch_add(1, Ordering::SeqCst); // partner: the sleep in `answer_viewers`
        futex_wake(wake_futex, u32::MAX >> 1);
    }

    /// Has all workers and watchers look again.
    fn wake_all(&self) {
        for joined in self.seats.all_joined() {
            joined.fetch_add(1, Ordering::SeqCst); // partner: the sleeps in `answer_viewers` and `watch`
            futex_wake(joined, u32::MAX >> 1);
        }
    }

    // ---- the workers ----------------------------------------------------------------------------

    /// Starts one more.
    fn start_worker(self: &Arc<Self>) -> std::io::Result<()> {
        self.workers.add(spawn(self, ("quinion-worker", self.workers.ends()), Self::answer_viewers)?);
        Ok(())
    }

    fn answer_viewers(self: &Arc<Self>) {
        let (mut idle_since, mut limits) = (Instant::now(), [RingLimit::default(); GROUP_VIEWERS]);
        while !self.is_closed() {
            let (control, mut futexes) = (self.control(), FutexList::new());
            // SeqCst here and below, partner: `wake_owner` in the viewer, and `wake_workers`. A viewer that asks after
            // we looked changes its futex after we read it, so the sleep sees another value; and a viewer that does so
            // while we are about to sleep sees a sleeper to wake.
            let wake_futex = self.seats.joined(0);
            let wake_count = wake_futex.load(Ordering::SeqCst); // partner: as above
            futexes.push(FutexWait::new(wake_futex, wake_count));
            let (rings, rung) = self.doorbells.rings();
            futexes.push(FutexWait::new(rings, rung));
            for viewer in self.present_among(self.seats.first_group()) {
                // SeqCst, partner: `wake_owner`, as above.
                let look = |_, request_futex: &AtomicU32| request_futex.load(Ordering::SeqCst);
                self.await_viewer(viewer, &mut limits[viewer], &mut futexes, look);
            }
            if let Some(job) = self.take_job() {
                self.hand_on();
                if self.workers.lacks_one() {
                    let _ = self.start_worker(); // else the keeper does, if this one is kept
                }
                self.do_job_or_defer(job);
                idle_since = Instant::now();
                continue;
            }
            // It is awake: a viewer that asks from here on wakes another worker.
            if self.workers.retires(idle_since) {
                return self.hand_on();
            }
            self.workers.rest(wake_count, || {
                // SeqCst twice, partner: `wake_owner`, which looks at this number after its change.
                control.sleepers.fetch_add(1, Ordering::SeqCst);
                if !self.is_closed() && !futex_wait_any(futexes.all(), futexes.sleep_millis) {
                    // This kernel waits for one word at a time: viewers are looked at again and again.
                    futex_wait(wake_futex, wake_futex.load(Ordering::Relaxed), WORKER_POLL_MILLIS);
                }
                control.sleepers.fetch_sub(1, Ordering::SeqCst); // partner: as above
            });
        }
    }

    /// The life of the watcher of a group: it sleeps for its viewers, and puts up their doorbells.
    fn watch(self: &Arc<Self>, group: usize) {
        let viewers = self.seats.of_group(group);
        let joined = self.seats.joined(viewers.start);
        let mut watched = [WatchedViewers::default(); GROUP_VIEWERS];
        let mut limits = [RingLimit::default(); GROUP_VIEWERS];
        while !self.is_closed() {
            let (control, mut futexes) = (self.control(), FutexList::new());
            // SeqCst here and below, partner: `wake_owner` in the viewer, `announce_viewer` and `wake_workers`; as in
            // `answer_viewers`.
            futexes.push(FutexWait::new(joined, joined.load(Ordering::SeqCst)));
            let mut rung = 0;
            for viewer in self.present_among(viewers.clone()) {
                let place = viewer - viewers.start;
                self.await_viewer(viewer, &mut limits[place], &mut futexes, |whose, request_futex| {
                    watched[place].look(whose, request_futex, || {
                        self.doorbells.put_up(viewer);
                        rung += 1;
                    })
                });
            }
            if rung > 0 {
                futex_wake(self.doorbells.announce(), rung);
            }
            // SeqCst twice, partner: `wake_owner`, which looks at this number after its change.
            control.sleepers.fetch_add(1, Ordering::SeqCst);
            if !self.is_closed() && !futex_wait_any(futexes.all(), futexes.sleep_millis) {
                // This kernel waits for one word at a time: viewers are looked at again and again.
                futex_wait(joined, joined.load(Ordering::Relaxed), WORKER_POLL_MILLIS);
            }
            control.sleepers.fetch_sub(1, Ordering::SeqCst); // partner: as above
        }
    }

    /// Adds the futex of a viewer to those that the thread is about to sleep on, with its number by `look`, which is
    /// told whose seat it is. The futex of one that is polled is left out, and looked at when its time has come; the
    /// sleep ends by then.
    fn await_viewer<'a>(
        &'a self,
        viewer: usize,
        limit: &mut RingLimit,
        futexes: &mut FutexList<'a>,
        look: impl FnOnce(u32, &AtomicU32) -> u32,
    ) {
        if let Some(left) = limit.until_poll(Instant::now) {
            return futexes.wake_within(left);
        }
        let request_futex = &self.page(viewer).request_futex;
        let whose = self.joins[viewer].load(Ordering::Relaxed); // `process` has ordered it
        let number = look(whose, request_futex);
        let seen = Observation { whose, number, taken: self.taken_of[viewer].load(Ordering::Relaxed) };
        if limit.has_rung(&seen) {
            self.rings_seen.fetch_add(1, Ordering::Relaxed);
        }
        match limit.note(seen, Instant::now) {
            WaitMode::Futex => futexes.push(FutexWait::new(request_futex, number)),
            WaitMode::Poll => futexes.wake_within(POLL_INTERVAL),
        }
    }

    /// Takes the next question, of any viewer: after the last one who was asked comes the next, and each in turn.
    fn take_job(&self) -> Option<ViewerJob> {
        let (start, seats) = (self.cursor.load(Ordering::Relaxed) as usize, self.seats.count());
        let start = if start < seats { start } else { 0 };
        self.take_job_among(start..seats).or_else(|| self.take_job_among(0..start))
    }

    fn take_job_among(&self, among: Range<usize>) -> Option<ViewerJob> {
        let first = self.seats.first_group().end;
        let job = self
            .present_among(among.start..among.end.min(first))
            .find_map(|viewer| self.take_of(viewer).question)
            .or_else(|| {
                let (job, more) =
                    self.doorbells.take(among.start.max(first)..among.end, |viewer| self.take_of(viewer))?;
                if more {
                    futex_wake(self.doorbells.announce(), 1);
                }
                Some(job)
            })?;
        self.cursor.store(job.viewer as u32 + 1, Ordering::Relaxed);
        Some(job)
    }

    /// Takes a question of that viewer.
    fn take_of(&self, viewer: usize) -> Found<ViewerJob> {
        if self.process(viewer) == 0 {
            return Found { question: None, more: false };
        }
        let is_pending = |request: &Request| is_pending(request.state.load(Ordering::Relaxed));
        let mut pending = self
            .page(viewer)
            .requests
            .iter()
            .enumerate()
            .filter(|(_, request)| is_pending(request))
            .peekable();
        let mut is_left = false;
        while let Some((slot, _)) = pending.next() {
            if let Some(job) = self.take(viewer, slot, |_| true) {
                return Found { question: Some(job), more: is_left || pending.peek().is_some() };
            }
            is_left = true; // it occupies too many workers, or another one was faster
        }
        Found { question: None, more: is_left }
    }

    /// Takes one question, if it still stands, is `wanted`, and its viewer does not occupy too many workers; its seat
    /// is busy from here on.
    fn take(&self, viewer: usize, slot: usize, wanted: impl Fn(u32) -> bool) -> Option<ViewerJob> {
        let mut seat = self.seat(viewer).lock();
        let request = &self.page(viewer).requests[slot];
        let pending = request.state.load(Ordering::Relaxed);
        let process = seat.process.clone()?;
        if !is_pending(pending) || seat.busy >= JOBS_MAX {
            return None;
        }
        // Acquire, partner: the viewer's Release of PENDING: we see the question.
        request.state.compare_exchange(pending, state::TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // Read once: in a moment the page may say something else.
        let operation = request.operation.load(Ordering::Relaxed);
        if !wanted(operation) {
            drop(seat);
            self.put_back(viewer, request, pending);
            return None;
        }
        seat.busy += 1;
        self.taken_of[viewer].fetch_add(1, Ordering::Relaxed);
        let number = self.taken.fetch_add(1, Ordering::Relaxed) + 1; // under the seat's lock, as it is looked at
        seat.jobs[slot] = Some(RunningJob { operation, number });
        Some(ViewerJob {
            viewer,
            slot,
            process,
            operation,
            arguments: [0, 1, 2].map(|i| request.arguments[i].load(Ordering::Relaxed)),
            attended: pending == state::PENDING,
        })
    }

    /// Leaves a question that was taken to another worker.
    fn put_back(&self, viewer: usize, request: &Request, pending: u32) {
        // Release, partner: the Acquire in `take`.
        let is_back =
            request.state.compare_exchange(state::TAKEN, pending, Ordering::Release, Ordering::Relaxed);
        if is_back.is_err() {
            // Given up meanwhile; or the viewer has gone, and the next one asks by this slot: that stays. Release,
            // partner: the Acquire by which a viewer claims the slot.
            let _ = request.state.compare_exchange(
                state::GIVEN_UP,
                state::FREE,
                Ordering::Release,
                Ordering::Relaxed,
            );
        }
        self.doorbells.put_up(viewer); // of use to none where it is of the first group
        self.wake_workers(); // the worker that was woken for it may sleep again
    }

    /// Does a job; or, if it must not be refused and its file system hangs, has it done in the queue of that.
    fn do_job_or_defer(self: &Arc<Self>, job: ViewerJob) {
        match job.device_to_notify().filter(|&device| self.workers.is_stuck(WorkKey::Notices(device))) {
            Some(device) => {
                let shared = Arc::clone(self);
                self.queues.spawn(QueueKey::Device(device), move || shared.do_job(&job));
            }
            None => self.do_job(&job),
        }
    }

    fn do_job(&self, job: &ViewerJob) {
        // What it has read since it last asked is known before room is made for more.
        self.drain_ring(job.viewer);
        let result = catch_unwind(AssertUnwindSafe(|| self.answer(job))).unwrap_or(Err(Errno::IO));
        let request = &self.page(job.viewer).requests[job.slot];
        // Before the viewer that asked is told, and may ask again by the same slot; the seat stays busy.
        self.seat(job.viewer).lock().jobs[job.slot] = None;
        if write_answer(request, job.attended, result) == AnswerDelivery::No
            && let Ok([number, _]) = result
        {
            self.take_back(job, number); // no process knows of it
        }
        self.seat(job.viewer).lock().busy -= 1;
        if job.operation == Operation::Attach as u32 {
            let _ = catch_unwind(AssertUnwindSafe(|| self.owner.prepare(self)));
        }
    }

    /// Takes back what was given by an answer that its viewer does not read: the handle or the pin of that `number`.
    fn take_back(&self, job: &ViewerJob, number: u64) {
        const ATTACH: u32 = Operation::Attach as u32;
        const OPEN_NAMED: u32 = Operation::OpenNamed as u32;
        const PIN: u32 = Operation::Pin as u32;
        match job.operation {
            ATTACH | OPEN_NAMED if number != 0 => self.detach(job.viewer, number),
            PIN => self.unpin(job.viewer, job.arguments[0], number),
            _ => {}
        }
    }

    /// Which file system may keep us waiting, where that is known before; and that the viewer has the handle it names.
    fn work_key(&self, job: &ViewerJob) -> Result<Option<WorkKey>, Errno> {
        const ATTACH: u32 = Operation::Attach as u32;
        const OPEN_NAMED: u32 = Operation::OpenNamed as u32;
        const EXAMINE: u32 = Operation::Examine as u32;
        const UNPIN: u32 = Operation::Unpin as u32;
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        const RELEASE: u32 = Operation::Release as u32;
        const REMOVES: u32 = Operation::Removes as u32;
        let [first, ..] = job.arguments;
        match job.operation {
            ATTACH | OPEN_NAMED | EXAMINE => Ok(None), // they count by themselves
            UNPIN => Ok(None), // it asks no store, and one that was refused would leave a pin
            RELEASE => Ok(Some(WorkKey::Closes)),
            WRITER_OPENED | LET_GO | REMOVES => Ok(Some(WorkKey::Notices(first))),
            _ => match self.seat(job.viewer).lock().handles.get(&first) {
                Some(handle) => Ok(Some(WorkKey::Files(handle.device))),
                None => Err(Errno::BADF),
            },
        }
    }

    fn answer(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        const ATTACH: u32 = Operation::Attach as u32;
        const FILL: u32 = Operation::Fill as u32;
        const ADVANCE: u32 = Operation::Advance as u32;
        const REVALIDATE: u32 = Operation::Revalidate as u32;
        const DETACH: u32 = Operation::Detach as u32;
        const EXAMINE: u32 = Operation::Examine as u32;
        const WRITER_OPENED: u32 = Operation::WriterOpened as u32;
        const LET_GO: u32 = Operation::LetGo as u32;
        const RELEASE: u32 = Operation::Release as u32;
        const REMOVES: u32 = Operation::Removes as u32;
        const HINT: u32 = Operation::Hint as u32;
        const OPEN_NAMED: u32 = Operation::OpenNamed as u32;
        const PIN: u32 = Operation::Pin as u32;
        const UNPIN: u32 = Operation::Unpin as u32;
        let [first, second, third] = job.arguments;
        let key = self.work_key(job)?;
        let at_work = key.map(|key| self.workers.enter(key).ok_or(Errno::AGAIN));
        let _at_work = match at_work {
            // It is not refused, and waits in the queue of its file system.
            Some(Err(_)) if job.operation == DETACH => {
                self.detach_in_queue(job.viewer, first);
                return Ok([0, 0]);
            }
            Some(Err(_)) if job.device_to_notify().is_some() => None, // see `do_job_or_defer`
            at_work => at_work.transpose()?,
        };
        match job.operation {
            ATTACH => self.attach(job, first, second, third),
            OPEN_NAMED => self.open_named(job, first),
            PIN | UNPIN => self.answer_pin(job),
            EXAMINE => self.examine(job),
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
                self.detach(job.viewer, first);
                Ok([0, 0])
            }
            WRITER_OPENED => {
                self.owner.writer_opened(first, second, third != 0);
                Ok([0, 0])
            }
            RELEASE => {
                self.release_idle();
                Ok([0, 0])
            }
            REMOVES => {
                self.close_idle(first, second);
                Ok([0, 0])
            }
            LET_GO => self.let_go_for_viewer(job),
            _ => Err(Errno::INVAL),
        }
    }

    /// A viewer wants to be alone with a file, or is about to watch it.
    fn let_go_for_viewer(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        match job.arguments {
            [device, inode, 0] => self.owner.let_go(device, inode),
            [device, inode, _] => self.owner.watched(device, inode),
        }
        Ok([0, 0])
    }

    /// A viewer is about to unmount something: what no viewer has open is closed.
    fn release_idle(&self) {
        self.drain_closed_handles(|| true);
        self.owner.release_idle();
    }

    /// A viewer is about to remove that file: it is closed, unless a viewer has it open.
    fn close_idle(&self, device: u64, inode: u64) {
        let attached = &self.control().attached[place_of(device, inode, ATTACHED_PLACES)];
        self.drain_closed_handles(|| !attached.is_zero());
        self.owner.close_idle(device, inode);
    }

    /// What the code does that the viewer's process has loaded.
    fn examine(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let _probe = self.workers.probe(job.process.name).ok_or(Errno::AGAIN)?;
        if !self.domain.has(&job.process.member) {
            return Err(Errno::ACCES);
        }
        let examine = self.examiner.as_ref();
        let audit = examine.map_or(SyscallAudit::Restricted, |examine| examine(job.process.number));
        Ok([audit as u64, 0])
    }

    /// Does what viewers have said of files that they have closed, and what they say by ending. What other workers are
    /// at of that is waited for, for a bounded time, and while it `matters`.
    ///
    /// What they are at they say themselves: a page may say anything. Only what was begun before is waited for, however
    /// much a viewer asks meanwhile; and a viewer for which that was in vain some times is waited for no more.
    fn drain_closed_handles(&self, matters: impl Fn() -> bool) {
        let begun = Instant::now();
        self.take_detaches();
        let last = self.taken.load(Ordering::Relaxed);
        loop {
            let late: Vec<usize> = self.present().filter(|&viewer| self.holds_files(viewer, last)).collect();
            let is_heard = late.is_empty() && self.queues.waiting_for_devices(SETTLE_WAIT_MAX) == 0;
            if is_heard || !matters() {
                return;
            }
            if begun.elapsed() >= SETTLE_WAIT_MAX {
                self.waits_in_vain.fetch_add(1, Ordering::Relaxed);
                return late.into_iter().for_each(|viewer| self.seat(viewer).lock().delays += 1);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Takes back all handles that viewers do not want any more and no worker is at.
    fn take_detaches(&self) {
        for viewer in self.present() {
            // A worker that was about to take one from here has given it its number, as it has the lock meanwhile.
            if self.seat(viewer).lock().handles.is_empty() {
                continue;
            }
            for (slot, request) in self.page(viewer).requests.iter().enumerate() {
                let is_one = request.operation.load(Ordering::Relaxed) == Operation::Detach as u32;
                if is_one
                    && is_pending(request.state.load(Ordering::Relaxed))
                    && let Some(said) = self.take(viewer, slot, |now| now == Operation::Detach as u32)
                {
                    self.do_job(&said);
                }
            }
            drop(self.seat(viewer).lock()); // as above
        }
    }

    /// Whether workers are at something, since before question `last` was taken, for which a file is open that no
    /// viewer who waits has; or the viewer is no more and its seat is not free yet.
    fn holds_files(&self, viewer: usize, last: u64) -> bool {
        // Of the others their viewers wait for the answer, unless they have given up.
        const HAVE_OPEN: [u32; 4] = [
            Operation::Attach as u32,
            Operation::Detach as u32,
            Operation::Advance as u32,
            Operation::Hint as u32,
        ];
        self.free_if_over(viewer);
        let seat = self.seat(viewer).lock();
        let holds = |(slot, job): (usize, &Option<RunningJob>)| {
            let is_given_up =
                || self.page(viewer).requests[slot].state.load(Ordering::Relaxed) == state::GIVEN_UP;
            job.is_some_and(|job| job.number <= last && (HAVE_OPEN.contains(&job.operation) || is_given_up()))
        };
        seat.delays < DELAYS_MAX && (seat.is_over() || seat.jobs.iter().enumerate().any(holds))
    }

    fn attach(&self, job: &ViewerJob, descriptor: u64, device: u64, inode: u64) -> Result<[u64; 2], Errno> {
        let spent = descriptor & CREDIT_SPENT != 0;
        let was_sent = descriptor & SENT != 0;
        let descriptor = i32::try_from(descriptor & !(CREDIT_SPENT | SENT)).map_err(|_| Errno::BADF)?;
        let name = FileName { device, inode };
        let probe = self.workers.probe(job.process.name).ok_or(Errno::AGAIN)?;
        // A process whose credentials have changed has no part in what is ours.
        if !self.domain.has(&job.process.member) {
            return Err(Errno::ACCES);
        }
        let (file, mount) = if was_sent {
            self.take_sent(job, descriptor, name)?
        } else {
            self.take_from(job, descriptor, name)?
        };
        drop(probe);
        // A file system that may hang in `close` is closed where no viewer waits; else here, counted as work for it.
        let close = |file: OwnedFd| match mount.answers() {
            true => drop(file),
            false => self.queues.close(QueueKey::Device(mount.device), file),
        };
        let Some(_at_work) = self.workers.enter(WorkKey::Files(mount.device)) else {
            self.queues.close(QueueKey::Device(mount.device), file);
            return Err(Errno::AGAIN);
        };
        if let Err(error) = check_file(&file, name) {
            close(file);
            return Err(error);
        }
        if let Some(credit) = self.owner.leaves_to_kernel(file.as_fd(), name, spent) {
            close(file);
            return Ok([0, credit]);
        }
        self.wait_for_death_notice();
        // First, so that a process that opens it for writing from here on tells us before; see `SaturatingCount`.
        let place = self.enter(device, inode);
        let attached = match self.owner.attach(file, name) {
            Ok(attached) => attached,
            Err(error) => {
                self.leave(place);
                return Err(error);
            }
        };
        self.vouch();
        self.note_handle(job.viewer, attached, Handle { place, device: mount.device })
    }

    /// No viewer believes us before it is seen to that our end will be noticed.
    fn wait_for_death_notice(&self) {
        // Acquire, partner: the store in `DeathNotice::new`.
        while self.owner.arena().owner_lives().load(Ordering::Acquire) == 0 && !self.is_closed() {
            std::thread::yield_now(); // the keeper, which was started, is about to say so
        }
    }

    /// Notes that the viewer has that handle. The answer that says so.
    fn note_handle(&self, viewer: usize, attached: Attached, handle: Handle) -> Result<[u64; 2], Errno> {
        let mut seat = self.seat(viewer).lock();
        if seat.handles.len() >= HANDLES_MAX {
            drop(seat);
            self.let_go(attached.handle, handle.place);
            return Err(Errno(libc::EMFILE));
        }
        let before = seat.handles.insert(attached.handle, handle);
        debug_assert!(before.is_none(), "a handle that was given already");
        Ok([attached.handle, u64::from(attached.id.0) << 32 | u64::from(attached.cell.0)])
    }

    /// Takes a descriptor out of the viewer's process, if it is of a file system whose files are served.
    ///
    /// Nothing of that process is read before: `/proc/PID/fdinfo/N` takes locks of what the number is of, and a process
    /// can hold those of an epoll descriptor for ever. What was taken has a number of ours, which no other process
    /// exchanges.
    fn take_from(&self, job: &ViewerJob, descriptor: i32, name: FileName) -> Result<(OwnedFd, Mount), Errno> {
        let file = pidfd_getfd(&job.process.alive, descriptor, PidfdGetfdFlags::empty());
        let file = file.map_err(|error| match error {
            // Not to us: the process may be none that we have started.
            rustix::io::Errno::PERM | rustix::io::Errno::NOSYS if self.listener.is_open() => {
                Errno(TO_BE_SENT)
            }
            error => Errno(error.raw_os_error()),
        })?;
        self.check_mount(job, file, name)
    }

    /// Takes a descriptor that the viewer has sent.
    fn take_sent(&self, job: &ViewerJob, ticket: i32, name: FileName) -> Result<(OwnedFd, Mount), Errno> {
        let offer = self.seat(job.viewer).lock().offers.remove(&(ticket as u32)).ok_or(Errno::BADF)?;
        // The message stays in the connection, which is closed where no viewer waits for it.
        self.check_mount(job, offer.theirs.descriptor()?, name)
    }

    /// What was taken, if it is of a file system whose files are served. What is not is closed where no viewer waits
    /// for it.
    fn check_mount(&self, job: &ViewerJob, file: OwnedFd, name: FileName) -> Result<(OwnedFd, Mount), Errno> {
        let known = mounts::path_of_own(file.as_fd())
            .and_then(|path| Ok((path, mounts::of_own(file.as_fd(), job.process.number)?)));
        let Ok((path, mount)) = known else {
            self.queues.close(QueueKey::Sender(job.process.name), file);
            return Err(Errno::OPNOTSUPP);
        };
        match self.check_file_system(mount) {
            Ok(()) => Ok((file, mount)),
            Err(error) => {
                self.owner.unserved_file_system(&path, name);
                // As a file of it that was served: a process that is about to unmount it waits for that.
                self.queues.close(QueueKey::Device(mount.device), file);
                Err(error)
            }
        }
    }

    fn check_file_system(&self, mount: Mount) -> Result<(), Errno> {
        let any = self.owner.attach_policy().any_file_system;
        if mount.system.may_be_served(any) { Ok(()) } else { Err(Errno::OPNOTSUPP) }
    }

    /// Takes a viewer's handle back. Two that ask at once: the map says who was first.
    fn detach(&self, viewer: usize, handle: u64) {
        let known = self.seat(viewer).lock().remove_handle(handle);
        if let Some(known) = known {
            self.let_go(handle, known.place);
        }
    }

    /// The same, where no viewer waits for the file system.
    fn detach_in_queue(&self, viewer: usize, handle: u64) {
        let known = self.seat(viewer).lock().remove_handle(handle);
        self.let_go_in_queues(known.map(|known| (handle, known)));
    }

    // ---- what is attached -----------------------------------------------------------------------

    /// Counts a file as attached, for all who are about to write. Its place.
    fn enter(&self, device: u64, inode: u64) -> usize {
        self.control().enter(device, inode)
    }

    fn leave(&self, place: usize) {
        self.control().leave(place);
    }

    /// The handle has no viewer any more.
    fn let_go(&self, handle: u64, place: usize) {
        let_go(&*self.owner, handle, place);
    }

    /// So it is with these, each in the queue of its file system: what the owner closes may hang.
    fn let_go_in_queues(&self, handles: impl IntoIterator<Item = (u64, Handle)>) {
        let mut by_device: HashMap<u64, Vec<(u64, usize)>> = HashMap::new();
        for (handle, known) in handles {
            by_device.entry(known.device).or_default().push((handle, known.place));
        }
        for (device, handles) in by_device {
            let owner = Arc::clone(&self.owner);
            self.queues.spawn(QueueKey::Device(device), move || {
                handles.into_iter().for_each(|(handle, place)| let_go(&*owner, handle, place));
            });
        }
    }

    // ---- the keeper -----------------------------------------------------------------------------

    /// The keeper's life.
    fn run_keeper(self: &Arc<Self>) {
        // Said when we serve no more, or by the kernel if we are killed: before that lets go of a lease.
        let arena = self.owner.arena();
        let ended = DeathNotice::new(arena.owner_lives());
        let mut beat = Instant::now();
        while !self.is_closed() {
            if beat <= Instant::now() {
                self.beat();
                beat = Instant::now() + BEAT;
            }
            self.listener.wait(beat, self);
        }
        drop(ended);
    }

    /// Ten times a second.
    fn beat(self: &Arc<Self>) {
        let beats = self.control().heartbeat.fetch_add(1, Ordering::Relaxed);
        self.vouch();
        for viewer in self.present() {
            let mut seat = self.seat(viewer).lock();
            self.drain_ring_of(&mut seat, viewer);
            self.drain_opened_of(viewer);
            let late = seat.take_late_offers();
            drop(seat);
            drop(late);
        }
        self.queues.retry();
        let overdue = std::mem::take(&mut *self.overdue.lock());
        overdue.into_iter().for_each(|viewer| self.free_soon(viewer));
        if beats.is_multiple_of(WINDOW_BEATS) {
            self.release_empty_groups();
        }
        // It may close files; while the last one is at that there is no other.
        if beats.is_multiple_of(WINDOW_BEATS) && self.queues.waiting_in(QueueKey::Background) == 0 {
            let (owner, totals) = (Arc::clone(&self.owner), self.totals(|_| true));
            self.queues.spawn(QueueKey::Background, move || owner.window_ended(&totals));
        }
        // All of them wait for another process: perhaps for one that never answers.
        if self.workers.are_all_busy() {
            let _ = self.start_worker();
        }
    }

    /// Tells viewers up to when they may be sure. The clock is read first: whatever holds us up shortens that time, as
    /// does who says an older one a moment later.
    fn vouch(&self) {
        let from = ticks();
        let time = catch_unwind(AssertUnwindSafe(|| self.owner.leases_valid_for())).unwrap_or(Duration::ZERO);
        // Release, partner: the Acquire in `Viewer::validation`.
        self.control().sure_until.store(from.saturating_add(ticks_within(time)), Ordering::Release);
    }

    fn drain_rings(&self) {
        self.present().for_each(|viewer| self.drain_ring(viewer));
    }

    /// Adds up which large files viewers opened.
    fn drain_opened(&self) {
        self.present().for_each(|viewer| {
            let _seat = self.seat(viewer).lock(); // one at a time
            self.drain_opened_of(viewer);
        });
    }

    fn drain_opened_of(&self, viewer: usize) {
        let page = self.page(viewer);
        let (head, tail) = (&page.opened_head, &page.opened_tail);
        let (head, tail) =
            (head.load(Ordering::Relaxed), tail.swap(head.load(Ordering::Relaxed), Ordering::Relaxed));
        let entries = head.wrapping_sub(tail).min(OPENED_ENTRIES as u32);
        for place in (0..entries).map(|back| head.wrapping_sub(back + 1) as usize % OPENED_ENTRIES) {
            self.control().count_opening(page.opened[place].load(Ordering::Relaxed));
        }
    }

    /// Tells the owner which frames a viewer read since it was last told.
    fn drain_ring(&self, viewer: usize) {
        self.drain_ring_of(&mut self.seat(viewer).lock(), viewer);
    }

    fn drain_ring_of(&self, seat: &mut ViewerSlot, viewer: usize) {
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

    /// Frees the seat of a viewer that is no more, at once or when no worker is at work for it any more.
    fn free_soon(&self, viewer: usize) {
        if !self.free_if_over(viewer) {
            self.overdue.lock().push(viewer);
        }
    }

    /// Frees the seat of a viewer that is no more, if no worker is at work for it; `false`: one is.
    fn free_if_over(&self, viewer: usize) -> bool {
        // Before the seat's lock: a run that ends meanwhile leaves some numbers behind that no viewer asks for.
        let said = self.page(viewer).run.load(Ordering::Relaxed);
        let run = if self.runs.lock().contains(&said) { said } else { NO_RUN };
        let mut seat = self.seat(viewer).lock();
        if !seat.is_over() {
            return true;
        }
        if seat.busy > 0 {
            return false; // it is waited for until a later beat
        }
        self.drain_ring_of(&mut seat, viewer);
        self.drain_opened_of(viewer);
        seat.past.entry(run).or_default().add(self.page(viewer));
        let past = std::mem::take(&mut seat.past);
        // The next in this seat gets another page: what this one still writes into its own is not read.
        let gone = std::mem::replace(&mut *seat, ViewerSlot { past, ..ViewerSlot::default() });
        self.processes[viewer].store(0, Ordering::Release); // partner: `process`
        drop(seat);
        gone.process.iter().for_each(|process| self.listener.forget_end(&process.alive));
        self.let_go_in_queues(gone.handles);
        true
    }

    // ---- the end --------------------------------------------------------------------------------

    fn wake_waiters(&self) {
        for viewer in self.present() {
            for request in &self.page(viewer).requests {
                futex_wake(&request.state, u32::MAX >> 1);
            }
        }
    }

    fn detach_all(&self) {
        for seat in self.seats.iter() {
            let mut seat = seat.lock(); // its sums stay
            let pinned = seat.take_pinned_handles();
            let handles = std::mem::take(&mut seat.handles);
            drop(seat);
            pinned.into_iter().for_each(|handle| self.owner.leave_pins(handle));
            self.let_go_in_queues(handles);
        }
        self.queues.wait_for_own(END_MAX);
    }

    /// The sums of all whose run is `wanted`, the dead and the living.
    fn totals(&self, wanted: impl Fn(u64) -> bool) -> ViewerTotals {
        let mut totals = ViewerTotals::default();
        for (viewer, seat) in self.seats.iter().enumerate() {
            let seat = seat.lock();
            seat.past.iter().filter(|&(&run, _)| wanted(run)).for_each(|(_, past)| totals.merge(past));
            if self.process(viewer) != 0 && wanted(self.page(viewer).run.load(Ordering::Relaxed)) {
                totals.add(self.page(viewer));
            }
        }
        totals
    }
}

impl ServiceHandle for Shared {
    fn goes_on(&self) -> bool {
        !self.is_closed()
    }
    fn has_viewers(&self) -> bool {
        self.present().next().is_some()
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

/// A handle has no viewer any more, and its file counts as attached once less.
fn let_go(owner: &dyn Owner, handle: u64, place: usize) {
    let _ = catch_unwind(AssertUnwindSafe(|| owner.detach(handle)));
    owner.arena().control().control().leave(place);
}

fn is_pending(now: u32) -> bool {
    matches!(now, state::PENDING | state::PENDING_UNATTENDED)
}

/// Whether an answer reached who asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AnswerDelivery {
    Yes,
    No,
}

/// Writes the answer and wakes the thread that waits for it. Of a question that no thread waits for, only the slot is
/// freed.
fn write_answer(request: &Request, attended: bool, result: Result<[u64; 2], Errno>) -> AnswerDelivery {
    if attended {
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
        let done =
            request.state.compare_exchange(state::TAKEN, state::DONE, Ordering::SeqCst, Ordering::Relaxed);
        if done.is_ok() {
            if request.sleeper.load(Ordering::SeqCst) != 0 {
                futex_wake(&request.state, 1);
            }
            return AnswerDelivery::Yes;
        }
        // Given up meanwhile.
    }
    // Release, partner: the Acquire by which a viewer claims the slot.
    request.state.store(state::FREE, Ordering::Release);
    AnswerDelivery::No
}

/// Checks that this descriptor is open for reading.
/// That it is the file of that name, and can be read.
fn check_file(file: &OwnedFd, name: FileName) -> Result<(), Errno> {
    check_readable(file)?;
    if FileName::of(file) != Some(name) {
        return Err(Errno(libc::ESTALE)); // the number is another file's by now
    }
    Ok(())
}

fn check_readable(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file).map_err(|error| Errno(error.raw_os_error()))?;
    // Access mode 3 is for ioctl alone: it includes O_WRONLY.
    if flags.intersects(OFlags::PATH | OFlags::WRONLY) { Err(Errno::BADF) } else { Ok(()) }
}

/// Whether the process has ended that this is a descriptor of.
fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

/// Some futexes, without a list in memory.
struct FutexList<'a> {
    words: [FutexWait<'a>; FUTEXES_MAX],
    count: usize,
    /// How long the thread may sleep on them.
    sleep_millis: u32,
}

impl<'a> FutexList<'a> {
    fn new() -> Self {
        static NOTHING: AtomicU32 = AtomicU32::new(0);
        Self {
            words: [FutexWait::new(&NOTHING, 0); FUTEXES_MAX],
            count: 0,
            sleep_millis: WORKER_SLEEP_MILLIS,
        }
    }
    /// The thread is to sleep no longer than that, in whole milliseconds.
    fn wake_within(&mut self, time: Duration) {
        self.sleep_millis = self.sleep_millis.min(time.as_micros().div_ceil(1000) as u32);
    }
    fn push(&mut self, word: FutexWait<'a>) {
        self.words[self.count] = word;
        self.count += 1;
    }
    fn all(&self) -> &[FutexWait<'a>] {
        &self.words[..self.count]
    }
}
// With those on which the owner's own threads wake each other.
const _: () = assert!(GROUP_VIEWERS + 2 <= FUTEXES_MAX);

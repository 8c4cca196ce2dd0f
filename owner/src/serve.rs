//! Serve: the owner's side of viewers' requests.
//!
//! ```text
//!   process, at the socket       event loop
//!     Hello    ------------>  whose process? of the domain? --> a viewer slot, a page of its own
//!     Welcome  <------------  arena, control, page
//!
//!   viewer's page                workers (more if they hang)       Owner
//!     slot PENDING --take-->  whose? a handle of that viewer's? --> attach, fill, advance, ..
//!     slot DONE    <--------  answer, wake                      <--
//!
//!   from the 101st viewer on     a watcher for each 100
//!     its futex    ---------> doorbell up, wakes a worker, which looks at the slots of those whose doorbells are up
//!
//!   the event loop, 10 times a second: heartbeat + 1; up to when viewers are sure
//!                                    access rings  --frames, checked--> touched
//!   at once:                         dead viewers  --their handles----> detach, viewer slot free again
//! ```
//!
//! **Who may view** (`sys/domain.rs`): processes with the very credentials of the owner, in its user and process name
//! spaces. The kernel says which process is at the other end of the socket (`listener.rs`); and before each file is
//! attached the process is looked at again, since its credentials may have changed. A file is attached by a descriptor
//! that is duplicated from the process (`pidfd_getfd`) and can read, so no process learns bytes that it could not read.
//! Where the system forbids that to the owner (Yama, for processes that are not its children) the process sends it, by
//! a connection of its own (`DescriptorOffer`), and asks with the ticket it gets for it.
//!
//! **Trust**: nothing that a viewer writes is trusted. A number is checked before it is used, a handle must have been
//! given to the viewer that names it, and a viewer's page is its own: it can hurt only itself. The owner's notes about
//! viewers, the **viewer slots**, lie in its own memory (`viewer_slot.rs`).
//!
//! **What may delay the owner** (`workers.rs`): a file system that hangs, or a viewer that asks without end, has some
//! of the workers at most; the others get more workers, and viewers wait for a bounded time. The event loop closes
//! nothing that may hang: a queue of the file system, or of the process that sent it, does (`sys/serial_queues.rs`).
//!
//! **Many viewers** (`wakeups.rs`) cost an idle owner next to nothing, and a busy one no more than those that ask.
//! Workers wait for the futexes of the first [`GROUP_VIEWERS`] themselves. Each further group is made when no
//! viewer slot is free (`viewer_slots.rs`): its pages take an extent of the cache's bound, and its watcher sleeps
//! for its futexes, and tells the workers whose have changed (`arena/doorbells.rs` of `quinion-view`). Workers take
//! one request of each viewer in turn. A viewer that rings hundreds of times in a second and asks nothing is polled
//! for some time (`ring_limit.rs`). When the last groups have no viewer, their extents are given back
//! (`release_empty_groups`).
//!
//! A request to unmount or remove something waits for the work that workers do for others, for a bounded time
//! (`closing.rs`). A viewer, or a file system, that was waited for in vain is not waited for again.
//!
//! A viewer's death is noticed by its process descriptor, so a new process with the same number is not mistaken for
//! it. Its viewer slot is free when no worker works for it, and the next viewer there gets a fresh page. A process
//! that became another program joins anew; or it does not, and is noticed (`replaced.rs`).
//!
//! A cache that outlives a command serves several **runs**, one after the other and side by side. Each has a number,
//! which its viewers put into their pages, and sums of its own. A dead viewer's sums move from its page to its viewer
//! slot under that slot's lock, so a thread that adds up counts them once.
//!
//! This file has the beginning and the end of a service. The state that its threads share is split into parts, each
//! of which owns its fields and its locks:
//!
//! | part | what |
//! |---|---|
//! | `ViewerTable` | each viewer's slot, process and page; the sums of runs |
//! | `Wakeups` | the doorbells, and how sleeping threads are woken |
//! | `PendingRequests` | takes the requests of all viewers in turn |
//! | `FileHandles` | which viewer has which handle, and how a handle goes back |
//! | `ViewerPins` | what viewers have pinned |
//! | `Workers`, `Listener`, `SerialQueues` | threads; the socket; calls that may hang |
//!
//! Operations on several of them are in `admission.rs`, `replaced.rs`, `requests.rs`, `attaching.rs`, `closing.rs`,
//! `named.rs` and `event_loop.rs`. `serve/owner.rs` lists the duties of the owner.
//!
//! Lock order: the lock of groups first, then one of the rank `Viewer` (a viewer slot, the runs, the overdue viewers,
//! the listener's and the workers' tables), and no two of these at once.
//!
//! Invariants:
//!  1. A worker answers into a page only while its viewer slot is busy; a busy viewer slot is never freed.
//!  2. No lock of this module is held while the [`Owner`] is called, but for calls that do not call back:
//!     [`Owner::touched`] and [`Owner::arena`], which take no lock; and [`Owner::reserve_viewers`], under the lock of
//!     groups. Only a thread that lets a process join waits for that lock: the event loop goes on without.
//!  3. Every handle the owner gave is detached once: when the viewer says so, dies, or the service stops.
//!  4. An answer to a request that its viewer has given up is taken back: it leaves no handle behind.
//!  5. No viewer has a handle before it is certain that viewers notice the owner's end, however it comes
//!     (`sys/death_notice.rs`).
//!  6. A panic in the owner is an answer (EIO) to one request, not the end of a worker.
//!  7. An arena has one service in its life: two would write into the same pages, and viewers have acted upon the first
//!     one's answers by its end (`closed`, and the mark of `DeathNotice`).

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sys::death_notice::ENDED;
use crate::sys::domain::Domain;
use crate::sys::serial_queues::SerialQueues;
use crate::viewer::sys::Errno;
use crate::viewer::{self, Viewer};
use quinion::internals::arena::OWNER_ENDED;
use quinion::internals::arena::control::{GROUP_VIEWERS, GROUPS_MAX, VIEWERS_MAX};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::FileId;

mod admission;
mod attaching;
mod closing;
mod event_loop;
mod listener;
pub mod mounts;
mod named;
mod owner;
mod peer_connection;
mod handles;
mod pending_requests;
mod pins;
mod replaced;
mod requests;
mod ring_limit;
mod viewer_slots;
mod viewer_table;
mod totals;
mod viewer_slot;
mod wakeups;
mod workers;

use handles::FileHandles;
use listener::Listener;
pub use owner::{
    AttachReason, Attached, Caching, FileMode, NAMED_DEVICE, NameRefusal, NamedAttachment, Owner,
    RevisionRequest, ServiceHandle, SyscallAuditor, WatchingProcess, WriterAccess, file_id,
};
use pending_requests::PendingRequests;
use pins::ViewerPins;
pub use totals::ViewerTotals;
use viewer_table::ViewerTable;
use wakeups::Wakeups;
use workers::{ThreadEnds, Workers};

/// How many threads answer viewers unless the options say otherwise.
pub const WORKERS: usize = 4;
/// How many processes may view a cache at a time unless the options say otherwise.
pub const VIEWERS: usize = 1024;
/// Percent of the cache's memory that one viewer may pin unless the options say otherwise.
pub const PIN_PERCENT: u64 = 25;
/// No more than a cache allows all of its pins together, unless it was built otherwise (`Builder::pinned_max`).
pub const PIN_PERCENT_MAX: u64 = 50;
const DOORBELL_WORDS: usize = (GROUPS_MAX * GROUP_VIEWERS).div_ceil(64);
const BEAT: Duration = Duration::from_millis(100);
/// Connections that may wait in the listen queue.
pub const LISTEN_MAX: i32 = 128;

const _: () =
    assert!(ENDED == OWNER_ENDED, "the mark that the kernel makes is the one that viewers look for");

/// State that the threads of a service share. Each part owns its fields and its locks, and knows only the parts that
/// it holds.
struct Shared {
    owner: Arc<dyn Owner>,
    examiner: Option<SyscallAuditor>,
    domain: Domain,
    viewers: Arc<ViewerTable>,
    wakeups: Arc<Wakeups>,
    requests: PendingRequests,
    handles: FileHandles,
    pins: ViewerPins,
    /// Held while a viewer slot is given out, or a group is made or given back.
    groups: RankedMutex<()>,
    /// Viewers that are dead, and for which a worker was still at work.
    overdue: RankedMutex<Vec<usize>>,
    /// Waits for operations of others that ended without it.
    waits_in_vain: AtomicU64,
    workers: Workers,
    listener: Listener,
    queues: SerialQueues,
}

/// How a [`Service`] is started.
pub struct ServiceOptions {
    /// How many threads answer: one at least.
    pub workers: usize,
    /// How many processes may view the cache at a time: 1 to [`VIEWERS_MAX`].
    pub viewers_max: usize,
    /// The part of the cache's memory that one viewer may pin, in percent: 1 to [`PIN_PERCENT_MAX`].
    pub pin_percent: u64,
    /// Answers requests to examine a file of a program (`Operation::Examine`). `None`: those are restricted.
    pub examiner: Option<SyscallAuditor>,
    /// Where processes join: a listening Unix socket of the kind SOCK_SEQPACKET; else by [`Service::admit`] alone.
    pub listener: Option<OwnedFd>,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        Self { workers: 1, viewers_max: VIEWERS, pin_percent: PIN_PERCENT, examiner: None, listener: None }
    }
}

impl fmt::Debug for ServiceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceOptions").field("workers", &self.workers).finish_non_exhaustive()
    }
}

/// The descriptors, number and token by which a process becomes a viewer.
#[derive(Debug)]
pub struct Admission {
    /// The arena, for reading.
    pub arena: OwnedFd,
    /// The control page that all viewers see, for reading.
    pub control: OwnedFd,
    /// The page of this viewer alone.
    pub page: OwnedFd,
    /// The viewer's number.
    pub viewer: usize,
    /// The number that both files carry.
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
    // Before it has a name, so that a process that finds the name finds it closed to others.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, LISTEN_MAX)?;
    Ok(socket)
}

/// Counts of a service, for as long as there is one: see [`Service::counters`].
pub struct ServiceCounters {
    viewers: Weak<ViewerTable>,
}

impl fmt::Debug for ServiceCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceCounters").finish_non_exhaustive()
    }
}

impl ServiceCounters {
    /// [`Service::totals`] and [`Service::viewers`]; `None`: the service has ended.
    pub fn now(&self) -> Option<(ViewerTotals, usize)> {
        let viewers = self.viewers.upgrade()?;
        Some((viewers.totals(|_| true), viewers.present().count()))
    }
}

/// The threads that answer viewers. Dropping it stops them.
pub struct Service {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    ends: ThreadEnds,
    is_closed: bool,
    process: ForkGuard,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

impl Service {
    /// Starts `workers` threads (at least one) that answer, and the event loop. No examiner, no socket.
    pub fn start(owner: Arc<dyn Owner>, workers: usize) -> std::io::Result<Self> {
        Self::start_with(owner, ServiceOptions { workers, ..ServiceOptions::default() })
    }

    /// Like [`Service::start`], by `options`.
    ///
    /// # Errors
    /// The owner's cache is served already, or was (`AlreadyExists`); the system refuses.
    pub fn start_with(owner: Arc<dyn Owner>, options: ServiceOptions) -> std::io::Result<Self> {
        let ServiceOptions { workers, viewers_max, pin_percent, examiner, listener } = options;
        let viewers_max = viewers_max.clamp(1, VIEWERS_MAX);
        let pin_percent = pin_percent.clamp(1, PIN_PERCENT_MAX);
        owner.arena().populate_control().map_err(std::io::Error::other)?;
        let queues = SerialQueues::default();
        let listener = Listener::new(owner.arena(), listener, &queues)?;
        // The last refusal without a trace: a caller whose socket was at fault may try another.
        if !owner.arena().claim_service() {
            let text =
                "this cache is served already, or was: a cache is served once; build another for this server";
            return Err(std::io::Error::new(std::io::ErrorKind::AlreadyExists, text));
        }
        let viewers = Arc::new(ViewerTable::new(Arc::clone(&owner), viewers_max));
        let wakeups = Arc::new(Wakeups::new(Arc::clone(&viewers)));
        let shared = Arc::new(Shared {
            examiner,
            domain: Domain::of_this_process()?,
            requests: PendingRequests::new(Arc::clone(&viewers), Arc::clone(&wakeups)),
            handles: FileHandles::new(Arc::clone(&viewers), queues.clone()),
            pins: ViewerPins::new(Arc::clone(&viewers), pin_percent),
            viewers,
            wakeups,
            groups: RankedMutex::new(Rank::Groups, ()),
            overdue: RankedMutex::new(Rank::Viewer, Vec::new()),
            waits_in_vain: AtomicU64::new(0),
            workers: Workers::default(),
            listener,
            queues,
            owner,
        });
        shared.viewers.control().set_attach_policy(shared.owner.attach_policy());
        shared.workers.keep(workers.max(1));
        let ends = ThreadEnds::default();
        let mut service =
            Self { shared, threads: Vec::new(), ends, is_closed: false, process: ForkGuard::new() };
        // If the event loop cannot be started, the drop of `service` stops the worker. More are started when needed.
        service.shared.start_worker()?;
        service.threads.push(spawn(
            &service.shared,
            "quinion-events",
            &service.ends,
            Shared::run_event_loop,
        )?);
        Ok(service)
    }

    /// Lets a process of the owner's domain become a viewer, as it would by the socket. Its page is given to another
    /// when the process has ended, or has joined anew.
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

    /// Totals of all viewers so far.
    pub fn totals(&self) -> ViewerTotals {
        self.shared.viewers.totals(|_| true)
    }

    /// The service's counts, for a holder that may outlive it: they keep nothing of the service alive.
    pub fn counters(&self) -> ServiceCounters {
        ServiceCounters { viewers: Arc::downgrade(&self.shared.viewers) }
    }

    /// For work that may wait for others. An owner that does such things itself uses them too: one bound is for all.
    pub fn queues(&self) -> SerialQueues {
        self.shared.queues.clone()
    }

    /// Begins a run; its number, above 0, goes to its viewers, which say it by [`Viewer::count_for`].
    pub fn begin_run(&self) -> u64 {
        self.shared.viewers.begin_run()
    }

    /// Totals that viewers of that run have reported so far; nothing of one that has ended. Their rings are drained
    /// first, so that the owner's numbers agree.
    pub fn totals_of(&self, run: u64) -> ViewerTotals {
        self.shared.viewers.drain_rings();
        self.shared.viewers.totals(|counted_for| counted_for == run)
    }

    /// No viewer asks for that run any more: its numbers may be dropped.
    pub fn end_run(&self, run: u64) {
        self.shared.viewers.end_run(run);
    }

    /// How many threads answer now: more than it was started with after some hung.
    pub fn workers(&self) -> usize {
        self.shared.workers.count()
    }

    /// How often a process that is about to unmount or remove something waited in vain.
    pub fn waits_in_vain(&self) -> u64 {
        self.shared.waits_in_vain.load(Ordering::Relaxed)
    }

    /// How often a sleeping thread found that a viewer had rung, whether it asked or not.
    pub fn rings_seen(&self) -> u64 {
        self.shared.wakeups.rings_seen()
    }

    /// How many processes view the cache now, dead ones whose end has not been noticed among them.
    pub fn viewers(&self) -> usize {
        self.shared.viewers.present().count()
    }

    /// As [`Service::stop_serving`], and returns the last totals.
    pub fn stop(mut self) -> ViewerTotals {
        self.close();
        self.shared.viewers.totals(|_| true)
    }

    /// Ends the service, waits for the threads, detaches all handles. Totals can still be asked for.
    pub fn stop_serving(&mut self) {
        self.close();
    }

    fn close(&mut self) {
        if self.process.is_forked() || std::mem::replace(&mut self.is_closed, true) {
            return; // neither the control file nor the threads are this process's; or all has ended
        }
        let control = self.shared.viewers.control();
        control.closed.store(1, Ordering::SeqCst); // partner: `is_closed`, and viewers that wait
        self.shared.wakeups.wake_all();
        self.shared.listener.wake();
        self.ends.join_within(workers::END_MAX, self.threads.drain(..));
        self.shared.workers.end();
        self.shared.viewers.wake_waiters();
        self.shared.viewers.drain_rings();
        self.shared.handles.detach_all();
    }
}

fn spawn(
    shared: &Arc<Shared>,
    name: &str,
    ends: &ThreadEnds,
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

impl ServiceHandle for Shared {
    fn is_running(&self) -> bool {
        !self.viewers.is_closed()
    }
    fn has_viewers(&self) -> bool {
        self.viewers.present().next().is_some()
    }
    fn while_attached(&self, id: FileId, work: &mut dyn FnMut()) {
        // In this order, as in `attach`.
        let _counted = self.handles.enter(id);
        work();
    }
}

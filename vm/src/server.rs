//! Server: many VMs, few workers: connections, whose turn it is, and the end of things.
//!
//! ```text
//!   epoll   listener --------> a thread for each that connects      each of them one-shot: the thread that is woken
//!           userfaultfd -----> a turn of that VM                    owns it, and arms it again when it is done
//!           process ended ---> remove, or, if it was killed, close at last
//!           wake-up -----> check everything
//!           timer   -----> an entry of `soon` is due
//!
//!   a thread for each greeting     accept; receive; regions and uffd: Vm, the workers' then
//!                                  other descriptors are closed; the end, however late
//!
//!   queues  ahead    VMs that have something to be supplied unasked: a turn when nothing else is to be done
//!           soon     VMs to look at again in a moment; and the listener, when the system was short, or no place free
//! ```
//!
//! Each worker waits for all of it by itself, so between a fault and its answer there is one wake-up. What a
//! connection is, its **stage**, is taken out of its place by the worker that works on it, and put back: no lock is
//! held meanwhile. A thread that finds it taken sets `is_wanted`, and one that puts it back looks for that.
//!
//! **No worker touches what an unknown peer sent.** The close of a peer's descriptor may wait for ever; so
//! may a receive (the kernel drops, in the thread that receives, descriptors for which there is no space),
//! and the close of a socket in which one lies unread. So a thread of its own accepts each peer, receives its
//! message, and closes the rest of what it sent. The workers get a connection only when its descriptor was
//! found to be a userfaultfd. Before that thread releases the socket, nothing more can come by it, and
//! nothing is in it; from then on it can be closed anywhere. The thread reports and frees the place first,
//! and closes last. While it may wait in a receive it keeps nothing of the server's alive. If it still waits
//! when the message is late, another thread frees the place (`sweep`). The listener, in whose backlog there
//! may be such sockets, is closed on a thread, too.
//!
//! Threads that wait in a close are bounded by the descriptors that this process may have. If there are that
//! many the next peer waits in the backlog, which is reported. (The kernel has no close that does not wait.)
//!
//! Peers are accepted one at a time. Epoll reports events in their order, and a listener that is armed again
//! stands behind all that was ready before: so a peer that has hung up has left its place when the next is
//! accepted, and many short connections at once do not keep a well-behaved peer out.
//!
//! A VMM that is refused may be killed, so that is done only if there is no other way. One that connects when
//! all places are taken finds one of these:
//!  1. One of them is not a VM's: its message is to come, and is late before long. It waits in the backlog.
//!  2. One was a VM's that has ended, and another worker is about to remove it. It waits.
//!  3. All are VMs'. It is accepted, and refused. Those that were refused and are dying use no place; if there
//!     are [`REFUSED_MAX`] of them it waits, and that is reported once.
//!
//! A peer that is refused may have handed over its memory already, unread. So what has come is looked at first; and one
//! that has done so is a VM that cannot be served, and no peer that was refused.
//!
//! A VM that is given up stays, with its descriptor, until its process is no more: let go earlier, its memory would
//! read as zeros for as long as the process has to run yet. If epoll has no room to tell of that, it is looked at now
//! and then.
//!
//! A panic while something is done for one peer ends that peer and no other.
//!
//! Invariants:
//!  1. A connection has one stage, and one worker at most has it, or the thread that greets it.
//!  2. The table has `vms_max` connections at most, VMs that were given up and are dying included; and beside them
//!     [`REFUSED_MAX`] that were refused for want of a place, and are dying.
//!  3. When an entry of `soon` is due, a waiting worker is woken, however busy the one is that put it there.
//!  4. The socket's file is ours when we remove it.
//!
//! Not an invariant: that a token of epoll is of a connection that is still there. It is looked up, and if it is not
//! there it was of one that has ended.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::fs;
use std::io;
use std::iter;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFlags, Timespec, eventfd};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::uffd::Uffd;
use quinion::error::{Error, Result};
use quinion::internals::sync::lock::{Mutex, MutexGuard};
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::sys::{descriptors_max, signal};
use quinion::internals::units::PAGE_SIZE;
use quinion::{Cache, File, Image};

use super::message::{BadMessage, DESCRIPTORS_MAX, ParseStep, Region, check, offer, ready};
use super::peer::{Handshake, Peer, drain, has_one_ended, refusal, say, wait_for};
use super::replay::Replay;
use super::snapshot::Snapshot;
use super::stats::{RestoreCounters, RestoreStats};
use super::trace::{ImageIdentity, Recorder, Trace};
use super::vm::{NextWait, SPACES_MAX, Source, Space, Vm, VmShared};
use super::{Event, Fill, OnFailure, PeerError, RestoreOptions};

/// Descriptors of one connection: its socket, its process, its userfaultfd. (What else came with its message is closed
/// when that is whole, or counts among those of the threads that wait.)
const DESCRIPTORS_EACH: usize = 3;
/// Descriptors of one that was refused: of what came, unread, all may be userfaultfds.
const DESCRIPTORS_REFUSED: usize = 2 + DESCRIPTORS_MAX;
/// Descriptors of a thread that waits in the close of one: its socket, its process, and what came.
const DESCRIPTORS_STUCK: usize = 2 + DESCRIPTORS_MAX + 1;
/// The least and the most threads that may wait in a close, beside those whose connection has a place.
const STUCK: std::ops::RangeInclusive<usize> = 4..=512;
/// Descriptors beside those of `vms_max` connections.
const DESCRIPTORS_SPARE: usize = 64;
/// Of these, so many are left to others.
const DESCRIPTORS_OTHERS: usize = 32;
/// After what time something that was refused is tried again.
const SOON: Duration = Duration::from_millis(1);
/// After what time peers are accepted again when the system was short of something.
const SHORT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);
/// After what time processes that were killed are checked again.
const DYING: Duration = Duration::from_millis(50);
/// How often greetings are checked for being late.
const SWEEP: Duration = Duration::from_millis(200);
/// How much later than late a greeting is when its thread is taken for one that waits in the kernel.
const GRACE: Duration = Duration::from_secs(1);
/// How long a worker sleeps if nothing is to be done.
const IDLE: Duration = Duration::from_secs(3600);
/// How long the ends of killed processes, and those of greetings, are waited for when the server ends.
const ENDING: Duration = Duration::from_secs(2);
/// The longest path of a socket, in bytes (`sun_path`, and a zero behind it).
const SOCKET_PATH_MAX: usize = 107;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Peers for which there was no room, and which are killed because their memory came with them: so many at a time.
const REFUSED_MAX: usize = 4;
const _: () = assert!(REFUSED_MAX * DESCRIPTORS_REFUSED + DESCRIPTORS_OTHERS <= DESCRIPTORS_SPARE);
/// The listener's number in `soon`: no connection has it.
const LISTENER: u64 = 0;

/// A page-fault server. Dropping it ends it.
pub struct Server {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    socket: PathBuf,
    /// Which file our socket is.
    inode: u64,
    process: ForkGuard,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("socket", &self.socket).finish_non_exhaustive()
    }
}

struct Shared {
    options: RestoreOptions,
    cache: Cache,
    device_bytes_before: u64,
    snapshot: Snapshot,
    /// What VMMs may map, if they may.
    image: Option<Image>,
    recorder: Option<Mutex<Recorder>>,
    replay: Option<Replay>,
    epoll: OwnedFd,
    listener: ClosedApart,
    wake_event: OwnedFd,
    /// It strikes when the first of `soon` is due.
    clock: OwnedFd,
    is_ending: AtomicBool,
    /// The most threads of peers.
    threads_max: usize,
    table: Mutex<Table>,
}

/// A descriptor whose close may wait for an unknown peer: a thread of its own closes it.
struct ClosedApart(Option<OwnedFd>);

impl AsFd for ClosedApart {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is taken when it is dropped").as_fd()
    }
}

impl Drop for ClosedApart {
    fn drop(&mut self) {
        let cell = Arc::new(Mutex::new(self.0.take()));
        let theirs = Arc::clone(&cell);
        let close = move || drop(theirs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if std::thread::Builder::new().name("quinion-close".to_owned()).spawn(close).is_err() {
            // Rather one that stays open than one that is waited for.
            std::mem::forget(cell);
        }
    }
}

/// A thread of a peer, as the table counts it.
struct PeerThread(Weak<Shared>);

impl Drop for PeerThread {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.table().threads -= 1;
        }
    }
}

#[derive(Default)]
struct Table {
    connections: HashMap<u64, Arc<Connection>>,
    /// Of these, those for which there was no place.
    refused: HashSet<u64>,
    /// Of the others, those that are a VM's: their message has come, or their memory did.
    vms: HashSet<u64>,
    /// Threads of peers: of those that greet, and of those whose descriptors block in close.
    threads: usize,
    /// It was reported that no further peer can be refused, or that no more threads may wait.
    is_crowd_logged: bool,
    last: u64,
    ahead: VecDeque<u64>,
    soon: VecDeque<(Instant, u64)>,
    next_sweep: Option<Instant>,
    /// When the youngest greeting is late; `None` when none is left. A sweep finds out, however late it comes itself.
    greets_until: Option<Instant>,
    vms_total: u64,
    vms_given_up: u64,
    peers_refused: u64,
    /// What was done for VMs that are no more.
    past: RestoreCounters,
}

impl Table {
    /// A connection is a VM's from now on; if it is there still, and has a place.
    fn note_vm(&mut self, number: u64) {
        if self.connections.contains_key(&number) && !self.refused.contains(&number) {
            self.vms.insert(number);
        }
    }
}

/// What is done with a VM in the backlog; see the head of this file.
enum AcceptState {
    /// It is accepted: there is a place, or it is refused.
    Open,
    /// It waits: a place becomes free by itself.
    Soon,
    /// It waits: there is no place, not even for one more refusal; why.
    Crowded(&'static str),
}

/// One connection.
struct Connection {
    number: u64,
    socket: OwnedFd,
    peer: Peer,
    numbers: Arc<Mutex<RestoreCounters>>,
    place: Mutex<ConnectionSlot>,
}

struct ConnectionSlot {
    stage: ConnectionState,
    /// Another thread came for this while it was taken.
    wanted: Option<Kind>,
    /// Whether that was told.
    is_given_up: bool,
}

/// What a connection is.
enum ConnectionState {
    /// Its message is to come; its thread waits for that.
    Greeting { since: Instant },
    /// It is served.
    Serving(Box<Vm>),
    /// It was given up, and its process is to be no more before its descriptor is let go.
    Dying { _kept: HeldUffds },
    /// It handed over its memory when the server was about to end.
    Unserved(HeldUffds),
    /// A worker has it, or its thread, which has heard all.
    Taken,
    /// It is no more.
    Over,
}

/// Userfaultfds that must not be closed yet.
enum HeldUffds {
    Vm { _vm: Box<Vm> },
    Descriptors { _uffds: Vec<Uffd> },
}

/// What a token of epoll is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Listener = 0,
    Wake = 1,
    Socket = 2,
    Process = 3,
    Faults = 4,
    Clock = 5,
    /// Of none: its regions have just come.
    Beginning = 6,
}

const KIND_BITS: u32 = 3;

fn token(number: u64, kind: Kind) -> EventData {
    EventData::new_u64(number << KIND_BITS | kind as u64)
}

fn of_token(data: EventData) -> (u64, Kind) {
    let kinds = [Kind::Listener, Kind::Wake, Kind::Socket, Kind::Process, Kind::Faults, Kind::Clock];
    (data.u64() >> KIND_BITS, kinds[(data.u64() & ((1 << KIND_BITS) - 1)) as usize])
}

const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().cast_signed(), tv_nsec: duration.subsec_nanos().into() }
}

fn failed(socket: &Path, what: &str, error: impl fmt::Display) -> Error {
    let text = format!("page faults cannot be served there: {what}{error}");
    Error::cannot_open(socket, text)
}

impl Server {
    /// Serves the snapshot at `snapshot`, read through `cache`, to VMMs that connect to a socket at `socket`.
    /// The socket is for this user only (mode 0600), unless [`RestoreOptions::socket_mode`] and
    /// [`RestoreOptions::socket_owner`] say otherwise; an existing one without a listener is replaced.
    ///
    /// # Errors
    /// An option is out of its range, the snapshot cannot be opened, another process listens there, or the
    /// system refuses a socket or a thread.
    pub fn start(cache: &Cache, snapshot: &Path, socket: &Path, options: RestoreOptions) -> Result<Self> {
        check_options(&options)?;
        let device_bytes_before = cache.stats().device_bytes;
        let path = snapshot;
        let snapshot = Snapshot::open(cache, path)?;
        let image = options.minor.then(|| snapshot.image(cache, path)).transpose()?;
        Self::start_of(cache, device_bytes_before, (snapshot, image), socket, options)
    }

    /// As [`Server::start`], with a snapshot that is open in `cache` already, also one of your own backend. A
    /// change of it is noticed only if it became longer or shorter, so nothing may write to it; and there is
    /// no image of it for VMMs to map.
    ///
    /// # Errors
    /// As [`Server::start`]; and that is wanted by [`RestoreOptions::minor`].
    pub fn start_file(cache: &Cache, file: &File, socket: &Path, options: RestoreOptions) -> Result<Self> {
        check_options(&options)?;
        if options.minor {
            let text =
                "an image for VMMs to map needs the snapshot's path; start with that, or without `minor`";
            return Err(Error::invalid_input(text.to_owned()));
        }
        let device_bytes_before = cache.stats().device_bytes;
        let snapshot = Snapshot::of(file.clone(), None)?;
        Self::start_of(cache, device_bytes_before, (snapshot, None), socket, options)
    }

    fn start_of(
        cache: &Cache,
        device_bytes_before: u64,
        (snapshot, image): (Snapshot, Option<Image>),
        socket: &Path,
        mut options: RestoreOptions,
    ) -> Result<Self> {
        let identity = snapshot.identity();
        let trace = options.replay.take();
        let recorder = options.record.then(|| match &trace {
            Some(earlier) => Recorder::merging(identity, earlier),
            None => Recorder::new(identity),
        });
        let (listener, inode) = listen(socket, &options)?;
        let workers = options.workers;
        let spare = descriptors_max().saturating_sub(descriptors_wanted(options.vms_max));
        let stuck_max = (spare / DESCRIPTORS_STUCK).clamp(*STUCK.start(), *STUCK.end());
        let shared = Shared {
            recorder: recorder.map(Mutex::new),
            replay: trace.as_ref().map(Replay::new),
            threads_max: options.vms_max + REFUSED_MAX + stuck_max,
            options,
            cache: cache.clone(),
            device_bytes_before,
            snapshot,
            image,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed(socket, "epoll: ", e))?,
            listener: ClosedApart(Some(listener)),
            wake_event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| failed(socket, "an eventfd: ", e))?,
            clock: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
                .map_err(|e| failed(socket, "a clock: ", e))?,
            is_ending: AtomicBool::new(false),
            table: Mutex::new(Table::default()),
        };
        let mut server = Self {
            shared: Arc::new(shared),
            workers: Vec::new(),
            socket: socket.to_owned(),
            inode,
            process: ForkGuard::new(),
        };
        server.begin(workers)?;
        Ok(server)
    }

    fn begin(&mut self, workers: usize) -> Result<()> {
        let shared = &self.shared;
        let watched = [
            (shared.listener.as_fd(), Kind::Listener, ONCE),
            (shared.wake_event.as_fd(), Kind::Wake, EventFlags::IN),
            // Each expiration is reported once, and need not be read.
            (shared.clock.as_fd(), Kind::Clock, EventFlags::IN | EventFlags::ET),
        ];
        for (fd, kind, flags) in watched {
            epoll::add(&shared.epoll, fd, token(0, kind), flags)
                .map_err(|e| failed(&self.socket, "epoll: ", e))?;
        }
        for _ in 0..workers {
            let shared = Arc::clone(shared);
            let thread = std::thread::Builder::new().name("quinion-restore".to_owned());
            let started = thread.spawn(move || {
                signal::block_all();
                shared.work();
            });
            self.workers.push(started.map_err(|e| failed(&self.socket, "a thread: ", e))?);
        }
        Ok(())
    }

    /// Which image is served.
    pub fn image(&self) -> ImageIdentity {
        self.shared.snapshot.identity()
    }

    /// What was done so far. In a forked child all numbers are 0.
    pub fn stats(&self) -> RestoreStats {
        if self.process.is_forked() { RestoreStats::default() } else { self.shared.stats() }
    }

    /// The order in which the image was wanted so far, if that is noted; not in a forked child.
    pub fn trace(&self) -> Option<Trace> {
        if self.process.is_forked() {
            return None;
        }
        let recorder = self.shared.recorder.as_ref()?;
        Some(recorder.lock().unwrap_or_else(PoisonError::into_inner).trace())
    }

    /// Ends the server, as dropping it does: no peer is accepted any more, and VMs that are still there are
    /// killed or left, as [`RestoreOptions::on_failure`] says. Returns what was done in all.
    pub fn stop(mut self) -> RestoreStats {
        self.end();
        self.stats()
    }

    fn end(&mut self) {
        if self.process.is_forked() {
            // The threads are the parent's, and so are the VMs and the socket.
            self.workers.drain(..).for_each(std::mem::forget);
            return;
        }
        self.shared.is_ending.store(true, Ordering::Relaxed);
        self.shared.ring();
        for worker in self.workers.drain(..) {
            // It catches panics; should one come through, the others end all the same.
            let _ = worker.join();
        }
        self.shared.drop_all();
        if fs::symlink_metadata(&self.socket).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = fs::remove_file(&self.socket);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn check_options(options: &RestoreOptions) -> Result<()> {
    options.check().map_err(Error::invalid_input)?;
    check_descriptors(options.vms_max)
}

/// There is room for the descriptors of so many VMs.
fn check_descriptors(vms_max: usize) -> Result<()> {
    let (wanted, has) = (descriptors_wanted(vms_max), descriptors_max());
    if wanted <= has {
        return Ok(());
    }
    let text = format!(
        "{vms_max} VMs at most need {wanted} open files, and this process may have {has}; \
         raise that by `ulimit -n {wanted}`, or serve fewer VMs"
    );
    Err(Error::invalid_input(text))
}

fn descriptors_wanted(vms_max: usize) -> usize {
    vms_max * DESCRIPTORS_EACH + DESCRIPTORS_SPARE
}

/// Whether a process listens at `path`. Does not wait for one that does not accept.
fn listens(path: &Path) -> rustix::io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A socket at `path` that listens, for the users that `options` say, and the number of its file.
fn listen(path: &Path, options: &RestoreOptions) -> Result<(OwnedFd, u64)> {
    let failed = |error: &dyn fmt::Display| failed(path, "", error);
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(failed(&format_args!(
            "a socket's path has {SOCKET_PATH_MAX} bytes at most; name a shorter one"
        )));
    }
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(failed(&"something else is there; name another place, or remove it"));
        }
        match listens(path) {
            Ok(true) => {
                let text = "another server listens there; name another path, or end that server";
                return Err(failed(&text));
            }
            Ok(false) => fs::remove_file(path).map_err(|e| failed(&e))?,
            Err(error) => return Err(failed(&error)),
        }
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bound = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok::<_, io::Error>(socket)
    };
    let socket = bound().map_err(|e| failed(&e))?;
    let (file, inode) = file_of_socket(path).map_err(|e| failed(&e))?;
    let listening = open_to(path, &file, options)
        .and_then(|()| rustix::net::listen(&socket, BACKLOG).map_err(|e| failed(&e)));
    match listening {
        Ok(()) => Ok((socket, inode)),
        Err(wrong) => {
            // It is ours, if no other has taken its place, and of no use.
            if fs::symlink_metadata(path).is_ok_and(|found| found.ino() == inode) {
                let _ = fs::remove_file(path);
            }
            Err(wrong)
        }
    }
}

/// The file of the socket that was just bound at `path`, by a descriptor that can neither read nor write, and its
/// number. Another user who may write to the folder can put something else under the name at any moment: what is
/// changed is what this descriptor is of, and no link is followed.
fn file_of_socket(path: &Path) -> io::Result<(OwnedFd, u64)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::other(
            "another program replaced the socket; choose a folder that only you can write",
        ));
    }
    Ok((file, stat.st_ino))
}

/// Gives the socket's file its permissions and its owner, before it listens: no process can connect before that. The
/// owner comes last, who may change the permissions.
fn open_to(path: &Path, file: &OwnedFd, options: &RestoreOptions) -> Result<()> {
    let (user, group) = (options.socket_owner, options.socket_group);
    let mode = Mode::from_raw_mode(options.socket_mode);
    // By the descriptor's own name: `fchmod` takes none of this kind.
    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)
        .map_err(|e| failed(path, "", e))?;
    if user.or(group).is_none() {
        return Ok(());
    }
    let (uid, gid) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    rustix::fs::chownat(file, "", uid, gid, AtFlags::EMPTY_PATH).map_err(|error| {
        let shown = |id: Option<u32>| id.map_or_else(String::new, |id| id.to_string());
        let what = format!("it cannot be given to {}:{}: ", shown(user), shown(group));
        failed(path, &what, format_args!("{error}; run as root, or name a group of your own"))
    })
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: &Event) {
        if let Some(observer) = &self.options.observer {
            // If the observer panics, the worker continues, and the VM is not given up.
            let _ = catch_unwind(AssertUnwindSafe(|| observer(event)));
        }
    }

    /// Has a worker look around.
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake_event, &1_u64.to_ne_bytes());
    }

    /// A worker's life.
    fn work(self: &Arc<Self>) {
        let mut events = Vec::with_capacity(1);
        while !self.is_ending.load(Ordering::Relaxed) {
            events.clear();
            let at_most = self.epoll_timeout();
            // An interrupted wait is one that found nothing.
            let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&at_most));
            match events.first().map(|event| of_token(event.data)) {
                Some((_, Kind::Wake)) => self.drain_wake_event(),
                Some((_, Kind::Listener)) => self.accept(),
                // A thread that is due has its turn below.
                Some((_, Kind::Clock)) => {}
                Some((number, kind)) => self.attend(number, kind),
                None => self.take_turn(),
            }
            self.take_due();
            self.sweep();
        }
        // A thread that heard an earlier ring may have silenced this one, while others slept on.
        self.ring();
    }

    /// How long a worker may sleep in epoll: until work ahead of faults is due, or the next sweep.
    fn epoll_timeout(&self) -> Timespec {
        let table = self.table();
        let sweep = if table.greets_until.is_some() { SWEEP } else { IDLE };
        timespec(if table.ahead.is_empty() { sweep } else { Duration::ZERO })
    }

    /// Sets the timer to the first due time: it wakes a waiting worker, so the work does not depend on a
    /// thread that passes by.
    fn set_clock(&self, table: &Table) {
        let Some(first) = table.soon.iter().map(|(when, _)| *when).min() else { return };
        // Zero would stop it.
        let left = first.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let stroke = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(left) };
        let result = timerfd_settime(&self.clock, TimerfdTimerFlags::empty(), &stroke);
        debug_assert!(result.is_ok(), "{result:?}");
    }

    /// An entry whose time has come has a turn, however many events there are.
    fn take_due(&self) {
        let now = Instant::now();
        let mut table = self.table();
        let due = table.soon.iter().position(|(when, _)| *when <= now);
        let due = due.and_then(|at| table.soon.remove(at));
        if due.is_some() {
            // For the next; this one may keep us long.
            self.set_clock(&table);
        }
        drop(table);
        match due {
            Some((_, LISTENER)) => self.arm(self.listener.as_fd(), 0, Kind::Listener),
            Some((_, number)) => self.attend(number, Kind::Faults),
            None => {}
        }
    }

    /// No event: a VM that has something to be supplied ahead has a turn.
    fn take_turn(&self) {
        let number = self.table().ahead.pop_front();
        if let Some(number) = number {
            self.attend(number, Kind::Faults);
        }
    }

    fn drain_wake_event(&self) {
        // At the server's end it rings on, until the last worker has heard it.
        if !self.is_ending.load(Ordering::Relaxed) {
            let _ = rustix::io::read(&self.wake_event, &mut [0; 8]);
        }
        self.take_turn();
    }

    /// Has it told once more. If it ended meanwhile it is not there any more.
    fn arm(&self, fd: BorrowedFd<'_>, number: u64, kind: Kind) {
        let result = epoll::modify(&self.epoll, fd, token(number, kind), ONCE | EventFlags::RDHUP);
        debug_assert!(matches!(result, Ok(()) | Err(Errno::NOENT)), "{kind:?} of {number}: {result:?}");
    }

    // Connections.

    /// Accepts one waiting peer, on a thread of its own; see the head of this file.
    fn accept(self: &Arc<Self>) {
        match self.accept_state() {
            AcceptState::Open => {}
            AcceptState::Soon => return self.want_after(LISTENER, SOON),
            AcceptState::Crowded(why) => {
                let was_logged = std::mem::replace(&mut self.table().is_crowd_logged, true);
                if !was_logged {
                    self.tell(&Event::CannotAccept(io::Error::other(why)));
                }
                return self.want_after(LISTENER, DYING);
            }
        }
        self.table().threads += 1;
        let counted = PeerThread(Arc::downgrade(self));
        let thread = std::thread::Builder::new().name("quinion-peer".to_owned());
        let started = thread.spawn(move || {
            signal::block_all();
            greet_next(&counted.0);
            drop(counted);
        });
        if let Err(error) = started {
            self.tell(&Event::CannotAccept(error));
            self.want_after(LISTENER, SHORT_OF_DESCRIPTORS);
        }
    }

    fn accept_state(&self) -> AcceptState {
        let mut table = self.table();
        let taken = table.connections.len() - table.refused.len();
        let is_full = taken >= self.options.vms_max;
        let is_crowded = is_full && table.refused.len() >= REFUSED_MAX;
        let is_stuck = table.threads >= self.threads_max;
        table.is_crowd_logged &= is_crowded || is_stuck;
        if is_stuck {
            return AcceptState::Crowded(
                "hundreds of descriptors that peers sent hang in close(2); kill those peers",
            );
        }
        if !is_full {
            return AcceptState::Open;
        }
        if table.vms.len() < taken {
            return AcceptState::Soon;
        }
        let vms: Vec<Arc<Connection>> =
            table.vms.iter().filter_map(|vm| table.connections.get(vm)).cloned().collect();
        drop(table);
        if has_one_ended(vms.iter().map(|vm| vm.end())) {
            AcceptState::Soon
        } else if is_crowded {
            AcceptState::Crowded(
                "4 refused processes were killed and have not ended; check why (uninterruptible sleep?)",
            )
        } else {
            AcceptState::Open
        }
    }

    /// Accepts a peer and gets to know it, on its thread, and goes to the end of the row. What is wrong, if it cannot
    /// be heard.
    fn accept_pending(&self) -> Option<(Arc<Connection>, Option<PeerError>)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let met = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => self.identify_peer(socket),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
            Err(error) => {
                self.tell(&Event::CannotAccept(error.into()));
                self.want_after(LISTENER, SHORT_OF_DESCRIPTORS);
                return None;
            }
        };
        self.arm(self.listener.as_fd(), 0, Kind::Listener);
        met
    }

    fn identify_peer(&self, socket: OwnedFd) -> Option<(Arc<Connection>, Option<PeerError>)> {
        let (peer, vms_max) = (Peer::of(socket.as_fd()), self.options.vms_max);
        let mut table = self.table();
        // Under the table's lock: the thread that ends the server sees to all that are in it.
        if self.is_ending.load(Ordering::Relaxed) {
            return None;
        }
        let has_capacity = table.connections.len() - table.refused.len() < vms_max;
        table.last += 1;
        let (number, since) = (table.last, Instant::now());
        table.greets_until = Some(since + self.options.greeting + GRACE + SWEEP);
        if !has_capacity {
            table.refused.insert(number);
        }
        let place =
            ConnectionSlot { stage: ConnectionState::Greeting { since }, wanted: None, is_given_up: false };
        let connection =
            Arc::new(Connection { number, socket, peer, numbers: Arc::default(), place: Mutex::new(place) });
        table.connections.insert(number, Arc::clone(&connection));
        drop(table);
        let wrong = if has_capacity {
            self.watch_peer(&connection).err().map(|error| PeerError::Socket(error.into()))
        } else {
            Some(PeerError::TooMany(vms_max))
        };
        Some((connection, wrong))
    }

    /// Has the end of a peer's process told.
    fn watch_peer(&self, connection: &Connection) -> rustix::io::Result<()> {
        let Some(alive) = connection.peer.alive() else { return Ok(()) };
        epoll::add(&self.epoll, alive, token(connection.number, Kind::Process), ONCE)
    }

    /// A peer has said all, or something is wrong with it: it becomes the workers', or is refused. On its thread.
    fn end_greeting(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
        heard: std::result::Result<Box<Vm>, PeerError>,
    ) {
        if !connection.begin() {
            // It ended meanwhile, or was too late.
            return;
        }
        let is_ending = self.is_ending.load(Ordering::Relaxed);
        match heard {
            Ok(vm) if !is_ending => self.work_on(connection, ConnectionState::Serving(vm), Kind::Beginning),
            Err(why) if !is_ending => {
                let stage = self.refuse(connection, greeting, why);
                self.settle(connection, stage);
            }
            // A thread that ends the server tells of it.
            Ok(vm) => self.settle(connection, ConnectionState::Unserved(HeldUffds::Vm { _vm: vm })),
            Err(_) => match memory_of(greeting) {
                Some(kept) => self.settle(connection, ConnectionState::Unserved(kept)),
                None => {
                    self.forget(connection);
                    self.settle(connection, ConnectionState::Over);
                }
            },
        }
    }

    /// Something happened to a connection.
    fn attend(&self, number: u64, kind: Kind) {
        let Some(connection) = self.table().connections.get(&number).cloned() else { return };
        if kind == Kind::Process {
            return self.end_connection(&connection);
        }
        if let Some(stage) = connection.take(kind) {
            self.work_on(&connection, stage, kind);
        }
    }

    /// Puts a stage back, unless something was wanted of it meanwhile; then that is done first.
    fn settle(&self, connection: &Connection, stage: ConnectionState) {
        if let Some((stage, kind)) = connection.put_back(stage) {
            self.work_on(connection, stage, kind);
        }
    }

    /// Does what is to be done for a connection that is ours, and puts it back.
    fn work_on(&self, connection: &Connection, mut stage: ConnectionState, mut kind: Kind) {
        loop {
            let done = catch_unwind(AssertUnwindSafe(|| self.step(connection, &mut stage, kind)));
            let wrong = done.unwrap_or(Err(PeerError::Panicked)).err();
            stage = match wrong {
                Some(wrong) => self.fail(connection, stage, wrong),
                None => stage,
            };
            match connection.put_back(stage) {
                Some(again) => (stage, kind) = again,
                None => return,
            }
        }
    }

    /// One step of a connection's life.
    fn step(
        &self,
        connection: &Connection,
        stage: &mut ConnectionState,
        kind: Kind,
    ) -> std::result::Result<(), PeerError> {
        match stage {
            // Nothing that it still sends matters. Without a process, its end is the VM's.
            ConnectionState::Serving(_) if kind == Kind::Socket && connection.peer.alive().is_none() => {
                *stage = ConnectionState::Over;
                self.end_connection(connection);
            }
            // Whatever it was that was told: faults that came meanwhile have left no other word.
            ConnectionState::Serving(vm) => {
                if kind == Kind::Beginning {
                    self.begin_vm(connection, vm)?;
                }
                if self.serve(connection, vm)? == NextWait::Over {
                    *stage = ConnectionState::Over;
                    self.end_connection(connection);
                }
            }
            ConnectionState::Dying { .. } => self.await_end(connection),
            ConnectionState::Greeting { .. }
            | ConnectionState::Unserved(_)
            | ConnectionState::Taken
            | ConnectionState::Over => {}
        }
        Ok(())
    }

    /// Hands out the image.
    fn give_image(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
    ) -> std::result::Result<(), PeerError> {
        let image = self.image.as_ref().ok_or(PeerError::NoImage)?;
        greeting.has_image = true;
        let offer = offer(image.len());
        say(connection.socket.as_fd(), &offer, Some(image.fd())).map_err(PeerError::Socket)
    }

    fn make_vm(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
        regions: &[Region],
    ) -> std::result::Result<Box<Vm>, PeerError> {
        self.snapshot.assure().map_err(|_| PeerError::SnapshotChanged)?;
        let pages = check(regions, self.snapshot.identity().bytes)?;
        if greeting.has_image && pages.unit() != PAGE_SIZE as u64 {
            // The image is no file of hugetlbfs.
            return Err(BadMessage::PageSize { region: 0, bytes: pages.unit() }.into());
        }
        let uffd = greeting.take_userfaultfds(1).pop().ok_or(PeerError::NoUserfaultfd)?;
        let numbers = Arc::clone(&connection.numbers);
        let source = match &self.image {
            Some(image) if greeting.has_image => Source::Mapped(image.clone()),
            _ => Source::Copied(Box::new(self.snapshot.file())),
        };
        Ok(Box::new(Vm::new(uffd, pages, source, numbers)))
    }

    /// A connection has become a VM's.
    fn begin_vm(&self, connection: &Connection, vm: &mut Vm) -> std::result::Result<(), PeerError> {
        {
            let mut table = self.table();
            table.vms_total += 1;
            table.note_vm(connection.number);
        }
        let (number, process, bytes) = (connection.number, connection.peer.process(), vm.bytes());
        self.tell(&Event::Begun { vm: number, process, bytes });
        let (used_bytes, image_bytes) = (vm.image_end(), self.snapshot.identity().bytes);
        // Less than a page more is the rest of a file whose last page is not whole.
        if image_bytes >= used_bytes + PAGE_SIZE as u64 {
            self.tell(&Event::SnapshotLarger { vm: number, process, used_bytes, image_bytes });
        }
        if vm.guard_image()? {
            // A thread that does not listen did not have to wait.
            let _ = say(connection.socket.as_fd(), &ready(), None);
        }
        self.watch(connection, vm.spaces())?;
        // Its process tells of its end; that it closes the connection means nothing then. (`HUP` is told unasked.)
        if connection.peer.alive().is_none() {
            epoll::add(&self.epoll, &connection.socket, token(number, Kind::Socket), EventFlags::ONESHOT)
                .map_err(|error| PeerError::Socket(error.into()))?;
        }
        if self.replay.is_some() || self.options.fill == Fill::All {
            self.want_ahead(number);
            self.ring();
        }
        Ok(())
    }

    /// Has spaces watched that are not.
    fn watch(&self, connection: &Connection, spaces: &mut [Space]) -> std::result::Result<(), PeerError> {
        debug_assert!(spaces.len() <= SPACES_MAX);
        for space in spaces.iter_mut().filter(|space| !space.is_watched) {
            let token = token(connection.number, Kind::Faults);
            epoll::add(&self.epoll, &space.uffd, token, ONCE)
                .map_err(|error| PeerError::Descriptor(error.into()))?;
            space.is_watched = true;
        }
        Ok(())
    }

    /// Spaces are to be closed. Others may have their descriptors too, so that closing them is not enough.
    fn unwatch(&self, spaces: &[Space]) {
        for space in spaces {
            let _ = epoll::delete(&self.epoll, &space.uffd);
        }
    }

    /// A turn of a VM.
    fn serve(&self, connection: &Connection, vm: &mut Vm) -> std::result::Result<NextWait, PeerError> {
        let common = VmShared {
            snapshot: &self.snapshot,
            // While pages are recorded, one that was not touched must not look as if it had been.
            run_bytes: if self.recorder.is_some() { PAGE_SIZE as u64 } else { self.options.run_bytes },
            recorder: self.recorder.as_ref(),
            replay: self.replay.as_ref(),
            fill: self.options.fill,
            tell: &|event: &Event| self.tell(event),
        };
        let next = vm.serve(&common)?;
        self.unwatch(&vm.take_ended());
        self.watch(connection, vm.spaces())?;
        match next {
            NextWait::Over => return Ok(next),
            NextWait::Wait => {}
            NextWait::Soon => self.want_after(connection.number, SOON),
            NextWait::Ahead => self.want_ahead(connection.number),
        }
        for space in vm.spaces() {
            self.arm(space.uffd.as_fd(), connection.number, Kind::Faults);
        }
        Ok(next)
    }

    fn want_after(&self, number: u64, pause: Duration) {
        let mut table = self.table();
        if table.soon.iter().all(|(_, other)| *other != number) {
            table.soon.push_back((Instant::now() + pause, number));
            self.set_clock(&table);
        }
    }

    fn want_ahead(&self, number: u64) {
        let mut table = self.table();
        if !table.ahead.contains(&number) {
            table.ahead.push_back(number);
        }
    }

    // Ends.

    /// Its process is no more, or its connection if there is no process.
    fn end_connection(&self, connection: &Connection) {
        // A thread that has it finds out that it is over, and lets it go.
        let (stage, is_given_up) = {
            let mut place = connection.place();
            (std::mem::replace(&mut place.stage, ConnectionState::Over), place.is_given_up)
        };
        let was_known = self.forget(connection);
        let (vm, process) = (connection.number, connection.peer.process());
        match stage {
            ConnectionState::Greeting { .. } if was_known => {
                self.table().peers_refused += 1;
                self.tell(&Event::Refused { process, why: PeerError::HungUp });
            }
            ConnectionState::Serving(_) | ConnectionState::Taken if was_known && !is_given_up => {
                let numbers = Box::new(connection.counted());
                self.tell(&Event::Ended { vm, process, numbers });
            }
            _ => {}
        }
    }

    /// Takes it out of the table. Whether it was there.
    fn forget(&self, connection: &Connection) -> bool {
        let mut table = self.table();
        let was_known = table.connections.remove(&connection.number).is_some();
        if was_known {
            table.refused.remove(&connection.number);
            table.vms.remove(&connection.number);
            table.past.merge(&connection.counted());
        }
        drop(table);
        if was_known {
            // Others may have what we close, and then epoll would go on telling of it.
            let _ = epoll::delete(&self.epoll, &connection.socket);
            if let Some(alive) = connection.peer.alive() {
                let _ = epoll::delete(&self.epoll, alive);
            }
        }
        was_known
    }

    /// Something is wrong with a VM: it is given up.
    fn fail(&self, connection: &Connection, stage: ConnectionState, why: PeerError) -> ConnectionState {
        match stage {
            ConnectionState::Serving(mut vm) => {
                self.unwatch(vm.spaces());
                self.give_up(connection, HeldUffds::Vm { _vm: vm }, why)
            }
            other => other,
        }
    }

    /// Something is wrong with a peer that greets: it is told and forgotten; or given up, if it handed over its memory.
    fn refuse(&self, connection: &Connection, greeting: &mut Handshake, why: PeerError) -> ConnectionState {
        match memory_of(greeting) {
            // It is a VM, and will wait for us.
            Some(kept) => self.give_up(connection, kept, why),
            None => {
                self.refused(connection, why);
                ConnectionState::Over
            }
        }
    }

    fn give_up(&self, connection: &Connection, kept: HeldUffds, why: PeerError) -> ConnectionState {
        let _ = say(connection.socket.as_fd(), &refusal(&why), None);
        // Its end is then not taken for one of its own, whichever thread notices it first.
        connection.place().is_given_up = true;
        let killed = self.options.on_failure == OnFailure::Kill && connection.peer.kill();
        {
            let mut table = self.table();
            table.vms_given_up += 1;
            table.note_vm(connection.number);
        }
        let (vm, process) = (connection.number, connection.peer.process());
        self.tell(&Event::GivenUp { vm, process, why, killed });
        if killed {
            self.await_end(connection);
            return ConnectionState::Dying { _kept: kept };
        }
        self.forget(connection);
        ConnectionState::Over
    }

    /// Has the end told of a process that was killed, if it is not yet. If epoll has no room for that, it is looked at
    /// now and then.
    fn await_end(&self, connection: &Connection) {
        let (number, Some(alive)) = (connection.number, connection.peer.alive()) else { return };
        match epoll::add(&self.epoll, alive, token(number, Kind::Process), ONCE) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(_) if has_one_ended(iter::once(connection.end())) => self.end_connection(connection),
            Err(_) => self.want_after(number, DYING),
        }
    }

    /// A peer that is no VM is told what is wrong, and has its place no more.
    fn refused(&self, connection: &Connection, why: PeerError) {
        self.forget(connection);
        let _ = say(connection.socket.as_fd(), &refusal(&why), None);
        self.table().peers_refused += 1;
        self.tell(&Event::Refused { process: connection.peer.process(), why });
    }

    /// Ends greetings that are so late that their threads must be waiting in the kernel. Any worker may call
    /// it.
    fn sweep(&self) {
        let now = Instant::now();
        let mut table = self.table();
        let Some(until) = table.greets_until else { return };
        if table.next_sweep.is_some_and(|next| now < next) {
            return;
        }
        table.next_sweep = Some(now + SWEEP);
        let all: Vec<Arc<Connection>> = table.connections.values().cloned().collect();
        drop(table);
        let mut may_greet_still = now < until;
        for connection in all {
            let is_late = |stage: &ConnectionState| match stage {
                ConnectionState::Greeting { since } => now >= *since + self.options.greeting + GRACE,
                _ => false,
            };
            if connection.take_if(is_late).is_none() {
                may_greet_still |= connection.may_greet();
                continue;
            }
            self.refused(&connection, PeerError::Late(self.options.greeting));
            self.settle(&connection, ConnectionState::Over);
        }
        let mut table = self.table();
        if !may_greet_still && table.greets_until == Some(until) {
            table.greets_until = None;
        }
    }

    /// Ends all connections, when no worker is left.
    fn drop_all(&self) {
        let all: Vec<Arc<Connection>> = self.table().connections.values().cloned().collect();
        // A message that has come and was not read may hand over memory, too: their threads check.
        for connection in all.iter().filter(|connection| connection.may_greet()) {
            let _ = rustix::net::shutdown(&connection.socket, Shutdown::Read);
        }
        let until = Instant::now() + ENDING;
        while all.iter().any(|connection| connection.is_busy()) && Instant::now() < until {
            std::thread::sleep(SOON);
        }
        let mut kept = Vec::new();
        for connection in all {
            let Some(stage) = connection.take(Kind::Faults) else {
                // Its thread waits in the kernel, or had nothing to keep.
                connection.place().stage = ConnectionState::Over;
                self.forget(&connection);
                continue;
            };
            let (is_vm, stage) = match stage {
                ConnectionState::Serving(_) => (true, stage),
                ConnectionState::Unserved(kept) => (true, ConnectionState::Dying { _kept: kept }),
                other => (false, other),
            };
            let mut killed = matches!(stage, ConnectionState::Dying { .. });
            if is_vm {
                let (vm, process) = (connection.number, connection.peer.process());
                killed = self.options.on_failure == OnFailure::Kill && connection.peer.kill();
                self.tell(&Event::Dropped { vm, process, killed });
            }
            self.forget(&connection);
            kept.push((killed, stage, connection));
        }
        let until = Instant::now() + ENDING;
        for (killed, stage, connection) in kept {
            if killed {
                connection.peer.wait_for_its_end(until);
            }
            drop(stage);
        }
    }

    fn stats(&self) -> RestoreStats {
        let device_bytes = self.cache.stats().device_bytes.saturating_sub(self.device_bytes_before);
        let table = self.table();
        let mut stats = RestoreStats {
            vms: 0,
            vms_total: table.vms_total,
            vms_given_up: table.vms_given_up,
            peers_refused: table.peers_refused,
            image_bytes: self.snapshot.identity().bytes,
            device_bytes,
            numbers: table.past.clone(),
        };
        for connection in table.connections.values() {
            let is_vm =
                matches!(connection.place().stage, ConnectionState::Serving(_) | ConnectionState::Taken);
            stats.vms += u64::from(is_vm);
            stats.numbers.merge(&connection.counted());
        }
        stats
    }
}

/// The userfaultfds among what came, to be kept, if there are any.
fn memory_of(greeting: &mut Handshake) -> Option<HeldUffds> {
    let uffds = greeting.take_userfaultfds(DESCRIPTORS_MAX);
    (!uffds.is_empty()).then_some(HeldUffds::Descriptors { _uffds: uffds })
}

/// A peer's thread, from its accept until nothing is left of what it sent; see the head of this file.
fn greet_next(server: &Weak<Shared>) {
    let Some(shared) = server.upgrade() else { return };
    let Some((connection, wrong)) = shared.accept_pending() else { return };
    let at_most = shared.options.greeting;
    drop(shared);
    let mut greeting = Handshake::new();
    let heard = match wrong {
        Some(wrong) => Err(wrong),
        None => {
            let hear = AssertUnwindSafe(|| hear(server, &connection, &mut greeting, at_most));
            catch_unwind(hear).unwrap_or(Err(PeerError::Panicked))
        }
    };
    if heard.is_err() {
        greeting.receive_rest(connection.socket.as_fd());
    }
    if let Some(shared) = server.upgrade() {
        shared.end_greeting(&connection, &mut greeting, heard);
    }
    // From here on no thread waits for this one.
    drain(connection.socket.as_fd());
    drop(connection);
    drop(greeting);
}

/// Takes what a peer says until it has said all. While it waits nothing of the server's is kept alive.
fn hear(
    server: &Weak<Shared>,
    connection: &Connection,
    greeting: &mut Handshake,
    at_most: Duration,
) -> std::result::Result<Box<Vm>, PeerError> {
    let (socket, until) = (connection.socket.as_fd(), Instant::now() + at_most);
    loop {
        if !wait_for(socket, PollFlags::IN | PollFlags::RDHUP, until) {
            return Err(PeerError::Late(at_most));
        }
        let said = greeting.receive(socket)?;
        let shared = server.upgrade().ok_or(PeerError::HungUp)?;
        match said {
            ParseStep::Unfinished => {}
            ParseStep::WantsImage => shared.give_image(connection, greeting)?,
            ParseStep::Regions(regions) => return shared.make_vm(connection, greeting, &regions),
        }
    }
}

impl Connection {
    fn place(&self) -> MutexGuard<'_, ConnectionSlot> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counted(&self) -> RestoreCounters {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What tells of its end.
    fn end(&self) -> (&Peer, BorrowedFd<'_>) {
        (&self.peer, self.socket.as_fd())
    }

    /// What it is, for the worker that works on it; `None`, and the event is noted, if another
    /// thread has it.
    fn take(&self, kind: Kind) -> Option<ConnectionState> {
        let mut place = self.place();
        match std::mem::replace(&mut place.stage, ConnectionState::Taken) {
            ConnectionState::Taken => {
                // Faults are looked for in any case.
                if place.wanted != Some(Kind::Socket) {
                    place.wanted = Some(kind);
                }
                None
            }
            ConnectionState::Over => {
                place.stage = ConnectionState::Over;
                None
            }
            // Its thread's.
            greeting @ ConnectionState::Greeting { .. } => {
                place.stage = greeting;
                None
            }
            stage => Some(stage),
        }
    }

    /// Whether it greets.
    fn may_greet(&self) -> bool {
        matches!(self.place().stage, ConnectionState::Greeting { .. })
    }

    /// Whether its thread has it.
    fn is_busy(&self) -> bool {
        matches!(self.place().stage, ConnectionState::Greeting { .. } | ConnectionState::Taken)
    }

    /// It has greeted, and is the caller's; or not, if it is over.
    fn begin(&self) -> bool {
        self.take_if(|stage| matches!(stage, ConnectionState::Greeting { .. })).is_some()
    }

    /// As [`Connection::take`], if no thread has it and `is_so`.
    fn take_if(&self, is_so: impl FnOnce(&ConnectionState) -> bool) -> Option<ConnectionState> {
        let mut place = self.place();
        is_so(&place.stage).then(|| std::mem::replace(&mut place.stage, ConnectionState::Taken))
    }

    /// Puts it back; or not, if it was wanted meanwhile: then it is the caller's once more. If it is over, it ends.
    fn put_back(&self, stage: ConnectionState) -> Option<(ConnectionState, Kind)> {
        let mut place = self.place();
        if matches!(place.stage, ConnectionState::Over) {
            // Its process ended meanwhile.
            return None;
        }
        if let Some(kind) = place.wanted.take() {
            return Some((stage, kind));
        }
        place.stage = stage;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_the_place_of_the_socket_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (secret, planted) = (folder.path().join("secret"), folder.path().join("planted"));
        fs::write(&secret, "mine").expect("the disk has room");
        fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .expect("it is ours");
        std::os::unix::fs::symlink(&secret, &planted).expect("it is new");
        assert!(file_of_socket(&planted).is_err());
        assert!(file_of_socket(&secret).is_err(), "no socket");
        // Swapped after it was bound, and before its permissions are set.
        let path = folder.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).expect("it is new");
        let (file, inode) = file_of_socket(&path).expect("it is one");
        assert_eq!(fs::symlink_metadata(&path).expect("it is there").ino(), inode);
        fs::rename(&path, folder.path().join("moved")).expect("the folder is ours");
        std::os::unix::fs::symlink(&secret, &path).expect("it is new");
        let options = RestoreOptions { socket_mode: 0o666, ..RestoreOptions::default() };
        open_to(&path, &file, &options).expect("the file is there still");
        let mode = |path: &Path| fs::symlink_metadata(path).expect("it is there").mode() & 0o777;
        assert_eq!((mode(&secret), mode(&folder.path().join("moved"))), (0o600, 0o666));
    }
}

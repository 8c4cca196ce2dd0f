//! Server: many VMs, few workers: connections, whose turn it is, and the end of things.
//!
//! ```text
//!   epoll   listener --------> a thread for each that connects      each of them one-shot: the thread that is woken
//!           userfaultfd -----> a turn of that VM                    owns it, and arms it again when it is done
//!           process ended ---> remove, or, if it was killed, close at last
//!           wake-up -----> a read of a VM has ended: a turn of that VM; else check everything
//!           timer   -----> an entry of `soon` is due
//!
//!   a thread for each greeting     accept; receive; regions and uffd: Vm, the workers' then
//!                                  other descriptors are closed; the end, however late
//!
//!   queues  ahead    VMs that have something to be supplied unasked: a turn when nothing else is to be done
//!           soon     VMs to look at again in a moment; the listener, when the system was short, or no place free; and
//!                    greetings, when the oldest is late
//! ```
//!
//! Each worker waits for all of it by itself, so between a fault and its answer there is one wake-up. A worker takes a
//! connection's **stage** out of its place and puts it back: no lock is held meanwhile. A thread that finds it taken
//! sets `wanted`, and one that puts it back looks for that.
//!
//! **No worker touches what an unknown peer sent.** The close of a peer's descriptor may wait for ever; so may a
//! receive (the kernel drops, in the thread that receives, descriptors for which there is no space), and the close of a
//! socket in which one lies unread. So a thread of its own accepts each peer, receives its message, and closes the rest
//! of its descriptors. The workers get a connection only with a userfaultfd. Before that thread releases the socket,
//! nothing more can come by it, and nothing is in it; then it can be closed anywhere. The thread reports and frees the
//! place first, and closes last. While it may wait in a receive it keeps nothing of the server's alive. If it still
//! waits when the message is late, another thread frees the place (`greeting.rs`, `end_late_greetings`). The listener,
//! in whose backlog there may be such sockets, is closed on a thread, too.
//!
//! The descriptors that this process may have bound the threads that wait in a close. At the bound the next peer waits
//! in the backlog, which is reported. (The kernel has no close that does not wait.)
//!
//! Peers are accepted one at a time. Epoll reports events in their order, and a listener that is armed again stands
//! behind all that was ready before. So a peer that has hung up has left its place when the next is accepted, and many
//! short connections do not keep a well-behaved peer out.
//!
//! A VMM that is refused may be killed, so that is the last resort. One that connects when all places are taken finds
//! one of these:
//!  1. One of them is not a VM's: its message is to come, and is late before long. It waits in the backlog.
//!  2. One was a VM's that has ended, and another worker is about to remove it. It waits.
//!  3. All are VMs'. It is accepted, and refused. Those that were refused and are dying use no place; if there are
//!     [`REFUSED_MAX`] of them it waits, and that is reported once.
//!
//! A peer that is refused may have handed over its memory already, in a message that was not read. So the server first
//! reads the messages that have arrived: if a userfaultfd is there, the peer counts as a VM that cannot be served.
//!
//! **The end.** First nothing can connect any more: the listener is shut, unless it is another server's by now. All
//! that have connected are accepted, so that each VM among them is killed or left as the others are. One that stayed in
//! the backlog would wait in its first fault without end. A worker that waits for a disk is left behind after some
//! seconds, with all that it has; its VM is dropped as the others are.
//!
//! A VM that is given up stays, with its descriptor, until its process is no more: else its memory would read as zeros.
//! If epoll has no room to tell of that, it is looked at now and then.
//!
//! A panic while something is done for one peer ends that peer and no other.
//!
//! This file has the state that all threads share, its beginning and end, and how workers wait. Their work for a
//! connection (`connection.rs`) is in `greeting.rs`, `turns.rs` and `ends.rs`; `socket.rs` makes the socket, and
//! `wakeups.rs` wakes workers.
//!
//! Invariants:
//!  1. A connection has one stage, and one worker at most has it, or the thread that greets it.
//!  2. Until the server ends, the table has `vms_max` connections at most, dying VMs included; beside them
//!     [`REFUSED_MAX`] dying ones that were refused for want of a place.
//!  3. When an entry of `soon` is due, a waiting worker is woken, however busy the one is that put it there.
//!  4. The server removes the socket's file only if it is its own.
//!  5. A VM that waits for a read is looked at again every [`READ_CHECK`], whether it is woken or not.
//!
//! Not an invariant: that a token of epoll is of a connection that is still there.

use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use quinion::error::Result;
use quinion::internals::hooks::invalid_input;
use quinion::internals::sync::contained;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::sys::{descriptors_max, signal};
use quinion::{Cache, File, Image};

use crate::fault_record::{FaultRecord, ImageIdentity, Recorder};
use crate::message::DESCRIPTORS_MAX;
use crate::peer::has_one_ended;
use crate::replay::{Replay, ReplayReads};
use crate::snapshot::{Snapshot, UNNAMED};
use crate::stats::{RestoreStats, VmStats};
use crate::streams::STREAMS;
use crate::vm::{Source, Vm, WARM_BYTES};
use crate::{Event, RestoreOptions};

mod connection;
mod ends;
mod greeting;
mod handover;
mod packets;
mod socket;
mod successor;
mod table;
mod turns;
mod wakeups;

use connection::{Connection, ConnectionSlot, ConnectionState, ForkState, Kind, of_token, token};
use socket::{SocketAddress, failed, listen, listen_for_successors};
use successor::{Succession, SuccessionRequest, TakenVm};
use table::Table;
use turns::PoisonedQuota;
use wakeups::Wakeups;

/// Descriptors of one connection: its socket, its process, its userfaultfd. (Others are closed when its message is
/// whole, or count among those of the threads that wait.)
const DESCRIPTORS_EACH: usize = 3;
/// Descriptors of one that was refused: all that came, unread, may be userfaultfds.
const DESCRIPTORS_REFUSED: usize = 2 + DESCRIPTORS_MAX;
/// Descriptors of a thread that waits in the close of one: its socket, its process, and those that came.
const DESCRIPTORS_STUCK: usize = 2 + DESCRIPTORS_MAX + 1;
/// The least and the most threads that may wait in a close, beside those whose connection has a place.
const STUCK: std::ops::RangeInclusive<usize> = 4..=512;
/// Descriptors beside those of `vms_max` connections.
const DESCRIPTORS_SPARE: usize = 64;
/// Spare descriptors that are left to the rest of the program.
const DESCRIPTORS_OTHERS: usize = 32;
/// How far reads may run ahead of a stream of a VM, in bytes. All of its streams together get half of its share of the
/// cache, as long as that is more than the least.
const REACH: std::ops::Range<u64> = 2 << 20..14 << 20;
/// How far the reads of a record that is replayed from an object may be ahead of what is supplied, in bytes: half of
/// the requests that a store's backend has in flight, so that a fault's own waits for no more than the others.
const REPLAY_AHEAD: std::ops::Range<u64> = WARM_BYTES..32 << 20;
/// The part of the cache's memory in which all VMs have their share of that.
const REPLAY_AHEAD_SHARE: u64 = 8;
/// When something that was refused is tried again.
const SOON: Duration = Duration::from_millis(1);
/// When a VM that waits for a read is looked at again, also if the read has not ended or has failed.
const READ_CHECK: Duration = Duration::from_millis(50);
/// When peers are accepted again after the system was short of something.
const SHORT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);
/// When forks of a process that has ended are checked again.
const FORKS_CHECK: Duration = Duration::from_millis(500);
/// When processes that were killed are checked again.
const DYING: Duration = Duration::from_millis(50);
/// How much later than late a greeting's thread is taken for one that waits in the kernel.
const GRACE: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(3600);
/// How long a server's end waits for its workers, one of which may wait for a disk that does not answer.
const WORKERS_ENDING: Duration = Duration::from_secs(5);
/// How long a server's end waits for the ends of killed processes and of greetings.
const ENDING: Duration = Duration::from_secs(2);
/// How many peers may be dying for which there was no room, killed because their memory came with them.
const REFUSED_MAX: usize = 4;
const _: () = assert!(REFUSED_MAX * DESCRIPTORS_REFUSED + DESCRIPTORS_OTHERS <= DESCRIPTORS_SPARE);
/// The listener's number in `soon`: no connection has it.
const LISTENER: u64 = 0;
/// The number in `soon` of greetings that may be late: no connection has it.
const GREETINGS: u64 = u64::MAX;
const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

/// A page-fault server. Dropping it ends it.
pub struct Server {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The thread that hands VMs over.
    handover: Option<JoinHandle<()>>,
    socket: PathBuf,
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
    image: Option<Image>,
    recorder: Option<Mutex<Recorder>>,
    replay: Option<Replay>,
    epoll: OwnedFd,
    listener: BackgroundClose,
    /// Where a server connects that is to take over.
    successors: OwnedFd,
    /// Which files these two sockets are.
    inodes: [u64; 2],
    /// Whether they are removed at the end: they are no other server's.
    owns_socket: AtomicBool,
    /// Readable when the server ends.
    ending: Arc<OwnedFd>,
    wakeups: Arc<Wakeups>,
    clock: OwnedFd,
    is_ending: AtomicBool,
    threads_max: usize,
    /// How far reads may run ahead of a VM that walks through its memory.
    reach_bytes: u64,
    /// How far all VMs' reads of a replayed record may be ahead.
    replay_share_bytes: u64,
    table: Mutex<Table>,
    poisoned: Mutex<PoisonedQuota>,
}

/// A descriptor whose close may wait for an unknown peer: a thread of its own closes it.
struct BackgroundClose(Option<OwnedFd>);

impl AsFd for BackgroundClose {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is taken when it is dropped").as_fd()
    }
}

impl Drop for BackgroundClose {
    fn drop(&mut self) {
        let cell = Arc::new(Mutex::new(self.0.take()));
        let theirs = Arc::clone(&cell);
        let close = move || drop(theirs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if std::thread::Builder::new().name("quinion-close".to_owned()).spawn(close).is_err() {
            // Rather leave it open than wait for it.
            std::mem::forget(cell);
        }
    }
}

/// A snapshot that is open in the cache.
struct OpenSnapshot {
    snapshot: Snapshot,
    /// The image that VMMs map.
    image: Option<Image>,
    /// The bytes that the cache had read from devices before it was opened.
    device_bytes_before: u64,
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().cast_signed(), tv_nsec: duration.subsec_nanos().into() }
}

impl Server {
    /// Serves the snapshot at `snapshot`, read through `cache`, to VMMs that connect to a socket at `socket`. A pack
    /// (`quinion pack`, feature `pack`) is recognized by its content; those that it refers to lie in its folder.
    /// The socket is for this user only (mode 0600), unless [`RestoreOptions::socket_mode`] and
    /// [`RestoreOptions::socket_owner`] say otherwise; an existing one without a listener is replaced.
    ///
    /// # Errors
    /// An option is out of its range, the snapshot cannot be opened, another process listens there, or the
    /// system refuses a socket or a thread.
    pub fn start(cache: &Cache, snapshot: &Path, socket: &Path, options: RestoreOptions) -> Result<Self> {
        Self::start_layers(cache, &[snapshot.to_owned()], socket, options)
    }

    /// As [`Server::start`], of a snapshot in several files: `layers` are a base and the diffs above it, each above
    /// those before it. A diff is a sparse file of the base's size, as Firecracker writes it: its data are the pages
    /// that changed, and its holes show the layer below. None of the files may change while they are served.
    ///
    /// # Errors
    /// As [`Server::start`]; and that a diff has another size than the base, or cannot be told from its holes: it has
    /// none, or its file system does not tell of them page by page.
    pub fn start_layers(
        cache: &Cache,
        layers: &[PathBuf],
        socket: &Path,
        options: RestoreOptions,
    ) -> Result<Self> {
        check_options(&options)?;
        let device_bytes_before = cache.stats().device_bytes;
        let snapshot = Snapshot::open_layers(cache, layers)?;
        let image = options.minor.then(|| snapshot.image(cache, &layers[0])).transpose()?;
        Self::start_of(cache, OpenSnapshot { snapshot, image, device_bytes_before }, socket, options)
    }

    /// As [`Server::start`], with a snapshot that is open in `cache` already: an object of a store, or a file of your
    /// own backend. A change of it is noticed by its length, and by a backend whose reads say so (`ESTALE`), so nothing
    /// else may write to it; and VMMs cannot map an image of it. It may be a pack: the packs that it refers to are
    /// [`RestoreOptions::packs`]. No worker waits for its reads, and [`RestoreOptions::retry_reads`] says how long they
    /// are tried again. Waits for those of some pages.
    ///
    /// # Errors
    /// As [`Server::start`]; and that is wanted by [`RestoreOptions::minor`].
    pub fn start_file(cache: &Cache, file: &File, socket: &Path, options: RestoreOptions) -> Result<Self> {
        check_options(&options)?;
        if options.minor {
            let text =
                "an image for VMMs to map needs the snapshot's path; start with that, or without `minor`";
            return Err(invalid_input(text.to_owned()));
        }
        let device_bytes_before = cache.stats().device_bytes;
        let name = options.snapshot_name.as_deref().unwrap_or(UNNAMED);
        let snapshot = Snapshot::of_file(cache, file, name, &options.packs)?;
        Self::start_of(cache, OpenSnapshot { snapshot, image: None, device_bytes_before }, socket, options)
    }

    fn start_of(
        cache: &Cache,
        open: OpenSnapshot,
        socket: &Path,
        mut options: RestoreOptions,
    ) -> Result<Self> {
        let OpenSnapshot { snapshot, image, device_bytes_before } = open;
        snapshot.check_is_memory()?;
        let identity = snapshot.identity();
        let record = options.replay.take();
        let recorder = options.record.then(|| match &record {
            Some(earlier) => Recorder::merging(identity, earlier),
            None => Recorder::new(identity),
        });
        let workers = options.workers;
        let spare = descriptors_max().saturating_sub(descriptors_wanted(options.vms_max));
        let stuck_max = (spare / DESCRIPTORS_STUCK).clamp(*STUCK.start(), *STUCK.end());
        let ServerSockets { listener, successors, inodes, mut succession } =
            ServerSockets::open(socket, &snapshot, &options)?;
        let shared = Shared {
            recorder: recorder.map(Mutex::new),
            replay: record.as_ref().map(|record| replay_of(record, cache, &snapshot)),
            threads_max: options.vms_max + REFUSED_MAX + stuck_max,
            replay_share_bytes: cache.stats().memory_bytes / REPLAY_AHEAD_SHARE,
            reach_bytes: (cache.stats().memory_bytes / (options.vms_max * 2 * STREAMS) as u64)
                .clamp(REACH.start, REACH.end),
            options,
            cache: cache.clone(),
            device_bytes_before,
            snapshot,
            image,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed(socket, "epoll: ", e))?,
            listener: BackgroundClose(Some(listener)),
            successors,
            inodes,
            owns_socket: AtomicBool::new(succession.is_none()),
            ending: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map(Arc::new)
                .map_err(|e| failed(socket, "an eventfd: ", e))?,
            wakeups: Arc::new(Wakeups::new().map_err(|e| failed(socket, "an eventfd: ", e))?),
            clock: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)
                .map_err(|e| failed(socket, "a clock: ", e))?,
            is_ending: AtomicBool::new(false),
            table: Mutex::new(Table::default()),
            poisoned: Mutex::default(),
        };
        let mut server = Self {
            shared: Arc::new(shared),
            workers: Vec::new(),
            handover: None,
            socket: socket.to_owned(),
            process: ForkGuard::new(),
        };
        match server.begin(workers, succession.as_mut()) {
            Ok(begin) => {
                if let Some(succession) = succession {
                    server.shared.resume_from(succession);
                }
                server.shared.arm(server.shared.listener.as_fd(), 0, Kind::Listener);
                drop(begin);
                Ok(server)
            }
            Err(error) => {
                if let Some(succession) = succession {
                    succession.refuse(&error.to_string());
                }
                Err(error)
            }
        }
    }

    /// Has all that a server needs; and takes over, which is the last that may fail. The sender is dropped when the
    /// VMs that were taken over are known: successors wait for that.
    fn begin(&mut self, workers: usize, succession: Option<&mut Succession>) -> Result<Sender<()>> {
        let shared = &self.shared;
        let watched = [
            // It tells of peers when it is armed: until then they are another server's.
            (shared.listener.as_fd(), Kind::Listener, EventFlags::ONESHOT),
            (shared.wakeups.as_fd(), Kind::Wake, EventFlags::IN),
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
        let (begin, has_begun) = channel();
        let theirs = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("quinion-handover".to_owned());
        let started = thread.spawn(move || {
            signal::block_all();
            // Nothing is sent: the end of the sender tells.
            let _ = has_begun.recv();
            // Relaxed: the end of the sender orders it.
            if theirs.owns_socket.load(Ordering::Relaxed) {
                theirs.await_successors();
            }
        });
        self.handover = Some(started.map_err(|e| failed(&self.socket, "a thread: ", e))?);
        succession.map_or(Ok(()), Succession::commit).map_err(|why| failed(&self.socket, "", why))?;
        // Relaxed: the end of the sender orders it.
        shared.owns_socket.store(true, Ordering::Relaxed);
        Ok(begin)
    }

    /// Whether another server has taken over, with [`RestoreOptions::replace`]: this one serves no VM any more, and
    /// may end.
    pub fn is_replaced(&self) -> bool {
        !self.shared.owns_socket.load(Ordering::Relaxed)
    }

    /// Which image is served.
    pub fn image(&self) -> ImageIdentity {
        self.shared.snapshot.identity()
    }

    /// Statistics so far. In a forked child all numbers are 0.
    pub fn stats(&self) -> RestoreStats {
        if self.process.is_forked() { RestoreStats::default() } else { self.shared.stats() }
    }

    /// The order in which the image was wanted so far, if that is noted; not in a forked child.
    pub fn record(&self) -> Option<FaultRecord> {
        if self.process.is_forked() {
            return None;
        }
        let recorder = self.shared.recorder.as_ref()?;
        Some(recorder.lock().unwrap_or_else(PoisonError::into_inner).record())
    }

    /// Ends the server, as dropping it does: no peer can connect any more, and VMs that are still there are killed or
    /// left, as [`RestoreOptions::on_failure`] says. Returns the totals.
    pub fn stop(mut self) -> RestoreStats {
        self.end();
        self.stats()
    }

    fn end(&mut self) {
        if self.process.is_forked() {
            // The threads are the parent's, and so are the VMs and the socket.
            self.workers.drain(..).chain(self.handover.take()).for_each(std::mem::forget);
            return;
        }
        if self.shared.is_ending.swap(true, Ordering::Relaxed) {
            return; // it was stopped, and is dropped now
        }
        let _ = rustix::io::write(&self.shared.ending, &1_u64.to_ne_bytes());
        if let Some(handover) = self.handover.take() {
            // VMs that it has are put back, or are another server's, when it has ended.
            let _ = handover.join();
        }
        if !self.is_replaced() {
            let paths =
                [SocketAddress::Vmms, SocketAddress::Successors].map(|which| which.path(&self.socket));
            for (path, inode) in paths.iter().zip(self.shared.inodes) {
                remove_if_same(path, inode);
            }
            self.shared.accept_rest();
        }
        self.shared.wake_worker();
        let until = Instant::now() + WORKERS_ENDING;
        for worker in self.workers.drain(..) {
            // One may wait for a disk that does not answer: its VM is dropped below, and it ends when it can.
            while !worker.is_finished() && Instant::now() < until {
                std::thread::sleep(SOON);
            }
            if worker.is_finished() {
                // It catches panics; should one come through, the others end all the same.
                let _ = worker.join();
            }
        }
        self.shared.drop_all();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn remove_if_same(path: &Path, inode: u64) {
    if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.ino() == inode) {
        let _ = fs::remove_file(path);
    }
}

/// The sockets of a server: new ones, or those of the server that it takes over from.
struct ServerSockets {
    listener: OwnedFd,
    successors: OwnedFd,
    inodes: [u64; 2],
    succession: Option<Succession>,
}

impl ServerSockets {
    fn open(socket: &Path, snapshot: &Snapshot, options: &RestoreOptions) -> Result<Self> {
        if options.replace {
            let (image, files) = (snapshot.identity(), snapshot.files());
            let kills = options.on_failure == crate::OnFailure::Kill;
            let (vms_max, ending) = (options.vms_max as u64, options.ending.clone());
            let request = SuccessionRequest { socket, image, files, vms_max, kills, ending };
            let asked = Succession::ask(request).map_err(|why| failed(socket, "", why))?;
            if let Some(succession) = asked {
                return Self::of(succession, socket);
            }
        }
        let (listener, inode) = listen(socket, options)?;
        match listen_for_successors(socket) {
            Ok((successors, other)) => {
                Ok(Self { listener, successors, inodes: [inode, other], succession: None })
            }
            Err(error) => {
                remove_if_same(socket, inode);
                Err(error)
            }
        }
    }

    /// The sockets of the running server: other descriptors of the same ones.
    fn of(succession: Succession, socket: &Path) -> Result<Self> {
        let doubled = |fd: &OwnedFd| fd.try_clone().map_err(|error| failed(socket, "", error));
        let (listener, successors) = (doubled(&succession.listener)?, doubled(&succession.successors)?);
        Ok(Self { listener, successors, inodes: succession.inodes, succession: Some(succession) })
    }
}

/// The plan by which `record` is replayed from `snapshot`. A snapshot that is open in the cache already counts as an
/// object: how soon its reads are answered is not known.
fn replay_of(record: &FaultRecord, cache: &Cache, snapshot: &Snapshot) -> Replay {
    let memory_bytes = cache.stats().memory_bytes;
    let is_remote = snapshot.reads_may_hang();
    let reads = if is_remote { ReplayReads::remote(record, memory_bytes) } else { ReplayReads::LOCAL };
    Replay::new(record, reads)
}

pub(crate) fn check_options(options: &RestoreOptions) -> Result<()> {
    options.check().map_err(invalid_input)?;
    check_descriptors(options.vms_max)
}

fn check_descriptors(vms_max: usize) -> Result<()> {
    let (wanted, has) = (descriptors_wanted(vms_max), descriptors_max());
    if wanted <= has {
        return Ok(());
    }
    let text = format!(
        "{vms_max} VMs at most need {wanted} open files, and this process may have {has}; \
         raise that by `ulimit -n {wanted}`, or serve fewer VMs"
    );
    Err(invalid_input(text))
}

fn descriptors_wanted(vms_max: usize) -> usize {
    vms_max * DESCRIPTORS_EACH + DESCRIPTORS_SPARE
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn emit_event(&self, event: &Event) {
        if let Some(observer) = &self.options.observer {
            // If the observer panics, the worker continues, and the VM is not given up.
            contained(|| observer(event));
        }
    }

    /// Serves the VMs that another server has handed over.
    fn resume_from(&self, mut succession: Succession) {
        if let (Some(recorder), Some(record)) = (&self.recorder, &succession.record) {
            recorder.lock().unwrap_or_else(PoisonError::into_inner).append(record);
        }
        for vm in std::mem::take(&mut succession.vms) {
            self.take_over(vm);
        }
        if let Some(why) = succession.incomplete.take() {
            self.emit_event(&Event::NotTakenOver(why));
        }
        succession.announce_serving();
    }

    fn take_over(&self, TakenVm { socket, peer, spaces }: TakenVm) {
        let counters = Arc::default();
        let source = Source::Copied(Box::new(self.snapshot.file()));
        let spaces_count = spaces.len();
        let vm = Box::new(Vm::taken_over(spaces, source, Arc::clone(&counters)));
        // Of a process that has ended this may be the only fork.
        let has_forks = spaces_count > 1 || has_one_ended(std::iter::once((&peer, socket.as_fd())));
        let forks = if has_forks { ForkState::Some } else { ForkState::None };
        let place = ConnectionSlot { stage: ConnectionState::Taken, forks, ..ConnectionSlot::default() };
        let mut table = self.table();
        table.last += 1;
        let connection = Connection { number: table.last, socket, peer, counters, place: Mutex::new(place) };
        let connection = Arc::new(connection);
        table.connections.insert(connection.number, Arc::clone(&connection));
        drop(table);
        self.work_on_for_workers(&connection, ConnectionState::Serving(vm), Kind::TakenOver);
    }

    fn replay_ahead_bytes(&self) -> u64 {
        if !self.snapshot.reads_may_hang() || self.replay.is_none() {
            return WARM_BYTES;
        }
        let vms = self.table().vms.len().max(1) as u64;
        (self.replay_share_bytes / vms).clamp(REPLAY_AHEAD.start, REPLAY_AHEAD.end)
    }

    fn wake_worker(&self) {
        self.wakeups.ring();
    }

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
        }
        // A thread that heard an earlier ring may have silenced this one, while others slept on.
        self.wake_worker();
    }

    /// How long a worker sleeps if nothing happens: not at all while there is work ahead of faults.
    fn epoll_timeout(&self) -> Timespec {
        timespec(if self.table().ahead.is_empty() { IDLE } else { Duration::ZERO })
    }

    /// Sets the timer to the first due time: it wakes a waiting worker, so the work needs no thread that passes by.
    fn set_clock(&self, table: &Table) {
        let Some(first) = table.soon.iter().map(|(when, _)| *when).min() else { return };
        // Zero would stop it.
        let left = first.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let stroke = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(left) };
        let result = timerfd_settime(&self.clock, TimerfdTimerFlags::empty(), &stroke);
        debug_assert!(result.is_ok(), "{result:?}");
    }

    fn take_due(&self) {
        let now = Instant::now();
        let mut table = self.table();
        let due = table.soon.iter().position(|(when, _)| *when <= now);
        let due = due.and_then(|at| table.soon.remove(at));
        if due.is_some() {
            // For the next; this one may take long.
            self.set_clock(&table);
        }
        drop(table);
        match due {
            Some((_, LISTENER)) => self.arm(self.listener.as_fd(), 0, Kind::Listener),
            Some((_, GREETINGS)) => self.end_late_greetings(),
            Some((_, number)) => self.attend(number, Kind::Faults),
            None => {}
        }
    }

    fn take_turn(&self) {
        let number = self.table().ahead.pop_front();
        if let Some(number) = number {
            self.attend(number, Kind::Faults);
        }
    }

    fn drain_wake_event(&self) {
        // At the server's end it rings on, until the last worker has heard it.
        if !self.is_ending.load(Ordering::Relaxed) {
            self.wakeups.silence();
        }
        match self.wakeups.next() {
            Some(number) => self.attend(number, Kind::Faults),
            None => self.take_turn(),
        }
    }

    fn arm(&self, fd: BorrowedFd<'_>, number: u64, kind: Kind) {
        let result = epoll::modify(&self.epoll, fd, token(number, kind), ONCE | EventFlags::RDHUP);
        debug_assert!(matches!(result, Ok(()) | Err(Errno::NOENT)), "{kind:?} of {number}: {result:?}");
    }

    /// After `pause`, or before, if it was wanted before.
    fn want_after(&self, number: u64, pause: Duration) {
        let (due, mut table) = (Instant::now() + pause, self.table());
        match table.soon.iter_mut().find(|(_, other)| *other == number) {
            Some((when, _)) if *when <= due => return,
            Some((when, _)) => *when = due,
            None => table.soon.push_back((due, number)),
        }
        self.set_clock(&table);
    }

    fn want_ahead(&self, number: u64) {
        let mut table = self.table();
        if !table.ahead.contains(&number) {
            table.ahead.push_back(number);
        }
    }

    fn stats(&self) -> RestoreStats {
        let device_bytes = self.cache.stats().device_bytes.saturating_sub(self.device_bytes_before);
        let table = self.table();
        let mut stats = RestoreStats {
            vms: 0,
            vms_total: table.vms_total,
            vms_taken_over: table.vms_taken_over,
            vms_handed_over: table.vms_handed_over,
            vms_given_up: table.vms_given_up,
            peers_refused: table.peers_refused,
            image_bytes: self.snapshot.identity().bytes,
            device_bytes,
            counters: table.past.clone(),
            each: Vec::new(),
        };
        let mut vms = Vec::new();
        for (&vm, connection) in &table.connections {
            let is_vm =
                matches!(connection.place().stage, ConnectionState::Serving(_) | ConnectionState::Taken);
            let counters = connection.counted();
            stats.counters.merge(&counters);
            if is_vm {
                vms.push(VmStats { vm, process: connection.peer.process(), counters });
            }
        }
        stats.vms = vms.len() as u64;
        stats.set_each(vms);
        stats
    }
}

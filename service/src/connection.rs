//! Connection: one process's view of one server's cache.
//!
//! A process joins a server once, however often it connects: a second view of the same process would displace the
//! first, whose requests would have no answer (`serve` of `quinion-owner`). So connections are kept, by the socket's
//! inode, and what the process maps stays mapped until it ends. The inode is opened before the connect, which goes by
//! that descriptor: the path may be a later server's already. It stays open as long as the connection is known, so that
//! no other socket gets its number.
//!
//! A request is repeated until it is answered, or the deadline has passed. A busy server (all slots in use, a store
//! that keeps its workers) is asked again after a pause; one that has ended, or stands still, is not.
//!
//! Handles and pins are **given back** in order, by drops, which must not wait for a server that stands still: so only
//! the first that finds no room waits, for a second. The rest is told with the next handle given back, or the next
//! request.
//!
//! A process may have so many files open at a server and no more. Stores **keep** files for later calls; an open that
//! is refused for want of a handle has them give up some, and is asked again.
//!
//! Invariants:
//!  1. Nothing here is touched in a forked child: its memory is not there.
//!  2. Every wait ends: by the deadline, or some tenths of a second after the server has ended.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

use quinion::internals::arena::LAYOUT_VERSION;
use quinion::internals::arena::control::Operation;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::FileId;
use quinion_owner::internals::viewer::handshake::{ANY_CACHE, JoinRequest, NAME_MAX, NO_PLAN, NameOffer};
use quinion_owner::internals::viewer::sys::Errno;
use quinion_owner::internals::viewer::{self, NameRequest, RequestError, Viewer};

use crate::error::{Error, ErrorKind, Result};
use crate::stores::{ObjectMetadata, OpenRequest};
use crate::threads::Threads;
use crate::totals::{ServerTotals, TOTALS, TOTALS_NAME};

/// How long the heartbeat of a server may stand still, in milliseconds: a busy machine must not look like an end.
const STILL_MILLIS_MAX: u32 = 5000;
/// How long bytes and opens are waited for, as long as the server is well: longer than a fetch with all its retries.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
/// How long a give-back waits for room among the requests, if no other is pending.
const GIVE_BACK_MAX: Duration = Duration::from_secs(1);
/// How long a connection may take, other threads' connecting there included.
pub(crate) const CONNECT_MAX: Duration = Duration::from_secs(20);
/// How long handles that were given up are waited for: workers of the server take them back, beside those that open.
const FREED_MAX: Duration = Duration::from_millis(STILL_MILLIS_MAX as u64);
/// The remedy where two versions do not understand each other.
const SAME_VERSION: &str = "use the same version of Quinion for both";
/// The least time between two calls that have stores give up files that they keep open.
const FREED_EVERY: Duration = Duration::from_secs(1);
/// How long a successor is given to answer a reader that does not wait for one.
const SEEK_MAX: Duration = Duration::from_millis(200);
/// How long such readers do not look again after that.
const SEEK_PAUSE: Duration = Duration::from_secs(1);
/// The first pause before a request is asked again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(20));

static CONNECTIONS: Mutex<Connections> =
    Mutex::new(Connections { known: Vec::new(), under_way: Vec::new(), process: None });

/// A connection by its socket.
struct KnownConnection {
    socket: FileId,
    /// Keeps the inode, so that its number is not given to another socket.
    _inode: File,
    connection: Arc<Connection>,
}

struct Connections {
    known: Vec<KnownConnection>,
    /// Sockets that threads connect to just now, without the lock: a server that does not answer holds up no other's
    /// clients.
    under_way: Vec<FileId>,
    process: Option<ForkGuard>,
}

impl Connections {
    fn tidy(&mut self) {
        if self.process.as_ref().is_none_or(|process| process.is_forked()) {
            self.under_way.clear();
            self.process = Some(ForkGuard::new());
        }
        let is_there =
            |connection: &Connection| !connection.process.is_forked() && !connection.viewer.owner_is_dead();
        self.known.retain(|known| is_there(&known.connection));
    }
}

/// Keeps files open that no call needs just now.
pub(crate) trait FileKeeper: Send + Sync {
    /// Gives up some of them; whether there was any.
    fn give_up_some(&self) -> bool;
}

#[derive(Debug)]
pub(crate) struct Connection {
    viewer: Viewer,
    socket: PathBuf,
    process: ForkGuard,
    pending: Mutex<VecDeque<ReturnRequest>>,
    /// Requests of threads that must not wait for the lock of `pending`. This lock is never kept, and taken last.
    later: Mutex<Vec<ReturnRequest>>,
    /// For those that only want to know: the lock orders the rest.
    has_pending: AtomicBool,
    dead_since: OnceLock<Instant>,
    /// When a successor was last looked for, and did not answer.
    sought: Mutex<Option<Instant>>,
    /// The connection that took the place of this one, or a later one still.
    next: Mutex<Option<Arc<Self>>>,
    /// All that have kept a file of this connection, or of one before it: such a file may have been opened again here.
    keepers: Mutex<Vec<Weak<dyn FileKeeper>>>,
    /// When these gave up files last.
    freed_at: Mutex<Option<Instant>>,
    /// For callers that must not block, and for GETs without a server; made when they are needed.
    threads: OnceLock<Threads>,
}

/// A request that gives something back to the server; see [`Connection::give_back`].
#[derive(Debug)]
struct ReturnRequest {
    operation: Operation,
    arguments: [u64; 3],
}

/// Why there is no connection in the place of one whose server has ended.
#[derive(Debug)]
pub(crate) enum NoSuccessor {
    /// No server answers there.
    Absent,
    /// One does, and admits no client: this is what it says.
    Refused(Error),
}

impl NoSuccessor {
    /// The error of a call that has failed by `ended`, the end of the last server.
    pub(crate) fn or(self, ended: Error) -> Error {
        match self {
            Self::Absent => ended,
            Self::Refused(error) => error,
        }
    }
}

impl Connection {
    /// The connection to the server that listens there; connects within some time, if there is none.
    pub(crate) fn to(socket: &Path, time: Duration) -> Result<Arc<Self>> {
        let failed = |error: std::io::Error| {
            let hint = hint_for(&error);
            let text = format!("cannot connect to the server at {}", socket.display());
            Error::of_io(ErrorKind::Connect, text, error).with_hint(hint)
        };
        let inode = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(socket).map_err(failed)?;
        let data = inode.metadata().map_err(failed)?;
        let id = FileId { device: data.dev(), inode: data.ino() };
        let begun = Instant::now();
        loop {
            let mut connections = locked(begun + time).map_err(failed)?;
            connections.tidy();
            if let Some(known) = connections.known.iter().find(|known| known.socket == id) {
                return Ok(Arc::clone(&known.connection));
            }
            if !connections.under_way.contains(&id) {
                connections.under_way.push(id);
                break;
            }
            drop(connections);
            if begun.elapsed() >= time {
                return Err(failed(std::io::ErrorKind::TimedOut.into()));
            }
            sleep(PAUSES.1);
        }
        let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: ANY_CACHE, run: 0 };
        let exactly = PathBuf::from(format!("/proc/self/fd/{}", inode.as_raw_fd()));
        let mut retry = RetryDeadline::new(time.saturating_sub(begun.elapsed()));
        let viewer = loop {
            match viewer::connect_within(&exactly, &hello, retry.left()) {
                // The next look finds no listener, or the queue of a manager's socket.
                Err(error) if is_disconnected(&error) && retry.pause() => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && !exactly.exists() => {
                    let text = "this process sees no /proc, by which it connects";
                    break Err(std::io::Error::new(std::io::ErrorKind::NotFound, text));
                }
                viewer => break viewer,
            }
        };
        // Also after an error: else no thread would ever connect there again.
        let mut connections = locked(Instant::now() + CONNECT_MAX).map_err(failed)?;
        connections.under_way.retain(|other| *other != id);
        let new = Arc::new(Self {
            viewer: viewer.map_err(failed)?.waiting_at_most(STILL_MILLIS_MAX),
            socket: socket.into(),
            process: ForkGuard::new(),
            pending: Mutex::default(),
            later: Mutex::default(),
            has_pending: AtomicBool::new(false),
            dead_since: OnceLock::new(),
            sought: Mutex::new(None),
            next: Mutex::new(None),
            keepers: Mutex::default(),
            freed_at: Mutex::default(),
            threads: OnceLock::new(),
        });
        connections.known.push(KnownConnection { socket: id, _inode: inode, connection: Arc::clone(&new) });
        Ok(new)
    }

    /// Not in a forked child.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`].
    #[inline]
    pub(crate) fn viewer(&self) -> Result<&Viewer> {
        if self.process.is_forked() { Err(Error::forked()) } else { Ok(&self.viewer) }
    }

    /// # Errors
    /// [`ErrorKind::Forked`]; [`ErrorKind::Start`].
    pub(crate) fn threads(&self) -> Result<&Threads> {
        self.viewer()?;
        if let Some(threads) = self.threads.get() {
            return Ok(threads);
        }
        let new = Threads::new()?;
        Ok(self.threads.get_or_init(|| new)) // another thread may have been faster
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The connection to the server that listens in the place of this one, which has ended. Waits until `timeout` after
    /// the end of the last server there was noticed; so many reads that find it gone wait once in all.
    ///
    /// # Errors
    /// No server answers there, or one that does refuses this process.
    pub(crate) fn successor(
        self: &Arc<Self>,
        timeout: Duration,
    ) -> std::result::Result<Arc<Self>, NoSuccessor> {
        let last = self.last();
        if !last.viewer.owner_is_dead() {
            return Ok(last);
        }
        let found = last.find_successor(timeout)?;
        last.set_next(&found);
        Ok(found)
    }

    /// The last of those that took this one's place, as far as is known.
    fn last(self: &Arc<Self>) -> Arc<Self> {
        let next_of =
            |connection: &Self| connection.next.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut last = Arc::clone(self);
        while let Some(next) = next_of(&last) {
            last = next;
        }
        self.set_next(&last); // so that the way there is short the next time
        last
    }

    fn set_next(self: &Arc<Self>, next: &Arc<Self>) {
        if !Arc::ptr_eq(self, next) {
            let keepers = self.keepers().clone();
            keepers.into_iter().for_each(|keeper| next.note_keeper(keeper));
            let old = self.next.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::clone(next));
            drop(old); // without the lock: it may be the last of its connection, and of those after it
        }
    }

    fn find_successor(&self, timeout: Duration) -> std::result::Result<Arc<Self>, NoSuccessor> {
        let noticed = *self.dead_since.get_or_init(Instant::now);
        let mut retry = RetryDeadline::new(timeout.saturating_sub(noticed.elapsed()));
        // A socket that a manager keeps takes connections though no server answers: a reader that does not wait looks
        // for one now and then only.
        let sought = *self.sought.lock().unwrap_or_else(PoisonError::into_inner);
        if retry.left().is_zero() && sought.is_some_and(|sought| sought.elapsed() < SEEK_PAUSE) {
            return Err(NoSuccessor::Absent);
        }
        let mut begun;
        let last = loop {
            begun = Instant::now();
            match Self::to(&self.socket, retry.left().clamp(SEEK_MAX, CONNECT_MAX)) {
                Ok(connection) => return Ok(connection),
                Err(error) if !error.is_refused_for_good() && retry.pause() => {}
                Err(error) => break error,
            }
        };
        if begun.elapsed() >= SEEK_MAX / 2 {
            *self.sought.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        Err(if last.is_refused() { NoSuccessor::Refused(last) } else { NoSuccessor::Absent })
    }

    /// Asks until there is an answer, for `time` at most. An error of a server that ends or has ended is
    /// [`RequestError::OwnerDead`]: the one that follows may know better.
    ///
    /// After a request that a thread waited for in vain, all requests are refused until the server's heartbeat rises
    /// again, even if that thread waited for a moment. So one with more `time` than a heartbeat may stand still is
    /// asked again for as long as that.
    pub(crate) fn ask(
        &self,
        operation: Operation,
        arguments: [u64; 3],
        time: Duration,
    ) -> std::result::Result<[u64; 2], RequestError> {
        if self.has_pending.load(Ordering::Relaxed)
            && let Ok(mut pending) = self.pending.try_lock()
        {
            self.send_pending(&mut pending, Duration::ZERO);
        }
        let (mut retry, begun) = (RetryDeadline::new(time), Instant::now());
        let still_max = Duration::from_millis(STILL_MILLIS_MAX.into());
        loop {
            let left = retry.left().as_millis().clamp(1, u32::MAX.into()) as u32;
            match self.viewer.request_within(operation, arguments, left) {
                Err(error) if is_busy(error) && retry.pause() => {}
                Err(RequestError::Late)
                    if time > still_max && begun.elapsed() < still_max && retry.pause() => {}
                // A worker may answer while the server ends: that answer counts for no later server.
                Err(RequestError::Errno(error)) if error == Errno::SRCH.0 || self.viewer.owner_is_dead() => {
                    return Err(RequestError::OwnerDead);
                }
                answer => return answer,
            }
        }
    }

    pub(crate) fn open(&self, url: &str, request: OpenRequest) -> Result<([u64; 2], ObjectMetadata)> {
        let name = request.name(url);
        if name.len() > NAME_MAX {
            let text = format!("cannot open a URL of {} bytes: a server takes {NAME_MAX} at most", url.len());
            return Err(Error::new(ErrorKind::Open, text));
        }
        let open = NamedOpen { shown: url, name: name.as_bytes(), descriptor: None, time: DEADLINE };
        let (answer, text) = self.open_named(&open)?;
        match text.ok().and_then(|text| ObjectMetadata::of(&text)) {
            Some(metadata) => Ok((answer, metadata)),
            None => {
                self.give_back(Operation::Detach, [answer[0], 0, 0]);
                Err(Error::new(
                    ErrorKind::Other,
                    format!(
                        "cannot open {url}: the server answered without its size and version; use the same version of \
                         Quinion for both"
                    ),
                ))
            }
        }
    }

    pub(crate) fn totals(&self, time: Duration) -> Result<ServerTotals> {
        let shown = "the server's totals";
        let open = NamedOpen { shown, name: TOTALS_NAME, descriptor: None, time };
        match self.ask_by_name(&open)? {
            NamedAnswer::Refused(Ok((error, text))) if error as i32 == TOTALS.0 => ServerTotals::of(&text)
                .ok_or_else(|| {
                    Error::new(ErrorKind::Other, format!("cannot read {shown}: it answered {text:?}"))
                        .with_hint(SAME_VERSION)
                }),
            NamedAnswer::Refused(Ok((error, text))) => {
                let refusal = Error::of_refusal(&text, error as i32);
                let is_busy = error as i32 == libc::EAGAIN;
                let hint = if is_busy { "try again later" } else { SAME_VERSION };
                Err(refusal.with_hint(hint))
            }
            NamedAnswer::Refused(Err(error)) => {
                let text = format!("cannot read {shown}: the server does not say why");
                Err(Error::of_io(ErrorKind::Other, text, error)
                    .with_hint("see the server's log, and ask again"))
            }
            NamedAnswer::Opened([handle, _], _) => {
                self.give_back(Operation::Detach, [handle, 0, 0]);
                let text = format!("cannot read {shown}: it has opened something");
                Err(Error::new(ErrorKind::Other, text).with_hint(SAME_VERSION))
            }
        }
    }

    /// Has the server open what has that name. Returns where it is, and what the server says of it.
    pub(crate) fn open_named(&self, open: &NamedOpen<'_>) -> Result<([u64; 2], std::io::Result<String>)> {
        let mut freed = None;
        loop {
            let reply = match self.ask_by_name(open)? {
                NamedAnswer::Opened(answer, text) => return Ok((answer, text)),
                NamedAnswer::Refused(reply) => reply,
            };
            let is_full = matches!(&reply, Ok((error, _)) if *error as i32 == libc::EMFILE);
            if is_full && self.free_handles() {
                freed.get_or_insert_with(|| RetryDeadline::new(open.time.min(FREED_MAX)));
            }
            if !is_full || !freed.as_mut().is_some_and(RetryDeadline::pause) {
                return Err(refused(open.shown, reply));
            }
        }
    }

    fn keepers(&self) -> MutexGuard<'_, Vec<Weak<dyn FileKeeper>>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `keeper` keeps a file of this connection.
    pub(crate) fn note_keeper(&self, keeper: Weak<dyn FileKeeper>) {
        let mut keepers = self.keepers();
        keepers.retain(|known| known.strong_count() > 0);
        if !keepers.iter().any(|known| known.ptr_eq(&keeper)) {
            keepers.push(keeper);
        }
    }

    /// Whether files were given up a moment ago, by this call or another: the server takes some time to close them.
    fn free_handles(&self) -> bool {
        let mut freed_at = self.freed_at.lock().unwrap_or_else(PoisonError::into_inner);
        if freed_at.is_some_and(|at| at.elapsed() < FREED_EVERY) {
            return true;
        }
        let keepers: Vec<_> = self.keepers().iter().filter_map(Weak::upgrade).collect();
        let mut is_freed = false;
        keepers.iter().for_each(|keeper| is_freed |= keeper.give_up_some());
        *freed_at = is_freed.then(Instant::now);
        is_freed
    }

    fn ask_by_name(&self, open: &NamedOpen<'_>) -> Result<NamedAnswer> {
        let (viewer, shown) = (self.viewer()?, open.shown);
        if viewer.owner_is_dead() {
            return Err(Error::owner_dead(shown)); // another may listen at the socket, or none and a manager keeps it
        }
        let offer = NameOffer { version: LAYOUT_VERSION, token: viewer.token() };
        let request = NameRequest {
            descriptor: open.descriptor,
            time: open.time,
            ..NameRequest::of_object(offer, open.name)
        };
        let mut retry = RetryDeadline::new(open.time);
        let mut disconnected = RetryDeadline::new(open.time.min(CONNECT_MAX));
        loop {
            let request = NameRequest { time: retry.left(), ..request };
            let sent = match viewer::send_name(&self.socket, &request) {
                Ok(sent) => sent,
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && retry.pause() => continue,
                Err(error) if is_disconnected(&error) && !viewer.owner_is_dead() && disconnected.pause() => {
                    continue;
                }
                Err(_) if viewer.owner_is_dead() => return Err(Error::owner_dead(shown)),
                Err(error) => return Err(self.unasked(shown, error)),
            };
            let ticket = [u64::from(sent.ticket()), 0, 0];
            match self.ask(Operation::OpenNamed, ticket, retry.left()) {
                Ok(answer) => {
                    return Ok(NamedAnswer::Opened(answer, sent.reply(open.time).map(|(_, text)| text)));
                }
                // The ticket has expired before a worker came to it.
                Err(RequestError::Errno(error)) if error == Errno::BADF.0 && retry.pause() => {}
                Err(RequestError::Errno(_)) => {
                    return match sent.reply(open.time) {
                        Err(_) if viewer.owner_is_dead() => Err(Error::owner_dead(shown)),
                        reply => Ok(NamedAnswer::Refused(reply)),
                    };
                }
                Err(error) => return Err(Error::of_request(shown, error)),
            }
        }
    }

    /// Whatever the kernel says of the socket, it is not said of the object.
    fn unasked(&self, url: &str, error: std::io::Error) -> Error {
        let is_late = error.kind() == std::io::ErrorKind::TimedOut;
        let (kind, hint) = (if is_late { ErrorKind::TimedOut } else { ErrorKind::Connect }, hint_for(&error));
        let text = format!("cannot ask the server at {} to open {url}", self.socket.display());
        Error::of_io(kind, text, error).with_hint(hint)
    }

    pub(crate) fn give_back(&self, operation: Operation, arguments: [u64; 3]) {
        if self.process.is_forked() {
            return; // it is the parent's
        }
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = if pending.is_empty() { GIVE_BACK_MAX } else { Duration::ZERO };
        pending.push_back(ReturnRequest { operation, arguments });
        self.send_pending(&mut pending, wait);
    }

    /// As [`Connection::give_back`], for a thread that must not wait: if there is no room, or another thread gives
    /// back, it goes with a later request.
    pub(crate) fn give_back_later(&self, operation: Operation, arguments: [u64; 3]) {
        if self.process.is_forked() {
            return; // it is the parent's
        }
        let mut later = self.later();
        later.push(ReturnRequest { operation, arguments });
        self.has_pending.store(true, Ordering::Relaxed);
        drop(later);
        if let Ok(mut pending) = self.pending.try_lock() {
            self.send_pending(&mut pending, Duration::ZERO);
        }
    }

    fn later(&self) -> MutexGuard<'_, Vec<ReturnRequest>> {
        self.later.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_pending(&self, pending: &mut MutexGuard<'_, VecDeque<ReturnRequest>>, wait: Duration) {
        pending.extend(self.later().drain(..));
        let mut retry = RetryDeadline::new(wait);
        while let Some(&ReturnRequest { operation, arguments }) = pending.front() {
            match self.viewer.notify(operation, arguments) {
                Ok(()) => drop(pending.pop_front()),
                Err(RequestError::NoSlot) if retry.pause() => {}
                Err(RequestError::NoSlot | RequestError::Late) => break,
                Err(_) => pending.clear(), // the server has ended, and has all of it back
            }
        }
        let later = self.later();
        self.has_pending.store(!pending.is_empty() || !later.is_empty(), Ordering::Relaxed);
    }
}

/// In a forked child the thread that has the lock may not exist.
fn locked(until: Instant) -> std::io::Result<MutexGuard<'static, Connections>> {
    loop {
        match CONNECTIONS.try_lock() {
            Ok(connections) => return Ok(connections),
            Err(TryLockError::Poisoned(error)) => return Ok(error.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(PAUSES.0),
            Err(TryLockError::WouldBlock) => return Err(std::io::ErrorKind::TimedOut.into()),
        }
    }
}

/// By a server that ends (also as an answer of it: ESRCH), or that has too many connections.
fn is_disconnected(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ECONNRESET | libc::EPIPE | libc::ESRCH))
}

fn hint_for(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EUSERS) => {
            "it has as many clients as it admits: wait until one ends, or start it with a larger clients_max"
        }
        Some(libc::ENOBUFS) => "its memory has no room for more clients: give the server more memory",
        Some(libc::EMFILE | libc::ENFILE) => {
            "the server, or this process, has as many files open as it may: raise that limit (`ulimit -n`)"
        }
        Some(libc::ENOMEM) => {
            "the server, or this process, has no memory or no files for one more client: raise its limits"
        }
        Some(libc::EPROTO) => "the server has another version: use the same version for both",
        Some(libc::EACCES | libc::EPERM) => {
            "it serves processes of its own user, groups, capabilities, user namespace and PID namespace alone: run \
             both in the same (docs/containers.md)"
        }
        None if error.kind() == std::io::ErrorKind::TimedOut => {
            "the server is stopped, or too busy: let it go on, or try again later"
        }
        // A socket that is not there is an error of the kernel, with a number.
        None if error.kind() == std::io::ErrorKind::NotFound => {
            "mount /proc for this process, and connect again"
        }
        _ => "is the server running? `quinion serve --name NAME` starts one",
    }
}

/// The request of [`Connection::open_named`].
pub(crate) struct NamedOpen<'o> {
    /// The name of the object or revision as errors show it.
    pub(crate) shown: &'o str,
    pub(crate) name: &'o [u8],
    /// A descriptor of the file whose revision is opened.
    pub(crate) descriptor: Option<BorrowedFd<'o>>,
    /// The time limit of the open.
    pub(crate) time: Duration,
}

enum NamedAnswer {
    /// Where it is, and what the server says of it.
    Opened([u64; 2], std::io::Result<String>),
    /// The error, and the server's words.
    Refused(std::io::Result<(u32, String)>),
}

fn refused(name: &str, reply: std::io::Result<(u32, String)>) -> Error {
    match reply {
        Ok((error, text)) => Error::of_refusal(&text, error as i32),
        Err(error) => {
            Error::of_io(ErrorKind::Open, format!("cannot open {name}: the server does not say why"), error)
                .with_hint("see the server's log, and open it again")
        }
    }
}

pub(crate) fn is_busy(error: RequestError) -> bool {
    error == RequestError::NoSlot || error == RequestError::Errno(Errno::AGAIN.0)
}

#[derive(Debug)]
pub(crate) struct RetryDeadline {
    /// `None`: behind the range of the clock, and so never.
    until: Option<Instant>,
    pause: Duration,
}

impl RetryDeadline {
    pub(crate) fn new(time: Duration) -> Self {
        Self { until: Instant::now().checked_add(time), pause: PAUSES.0 }
    }

    pub(crate) fn left(&self) -> Duration {
        self.until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Longer each time; `false` if there is no time left.
    pub(crate) fn pause(&mut self) -> bool {
        if self.left().is_zero() {
            return false;
        }
        sleep(self.pause);
        self.pause = (2 * self.pause).min(PAUSES.1);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::server::Server;

    #[test]
    fn a_refusal_says_what_to_do() {
        let hints = [libc::EUSERS, libc::ENOBUFS, libc::EPROTO, libc::ENOENT, libc::EACCES]
            .map(|error| hint_for(&std::io::Error::from_raw_os_error(error)));
        assert!(hints[0].contains("clients_max") && hints[1].contains("memory"), "{hints:?}");
        assert!(hints[2].contains("version") && hints[3].contains("running"), "{hints:?}");
        assert!(hints[4].contains("PID namespace"), "{hints:?}");
        assert_eq!(hint_for(&std::io::Error::other("x")), hints[3]);
        // Of a process without /proc: it was also told to start the server that it could not see.
        let unseen = hint_for(&std::io::Error::new(std::io::ErrorKind::NotFound, "no /proc"));
        assert!(unseen.contains("mount /proc") && !unseen.contains("running"), "{unseen}");
    }

    #[test]
    fn a_deadline_behind_the_range_of_the_clock_never_comes() {
        let mut retry = RetryDeadline::new(Duration::MAX);
        assert!(retry.left() > DEADLINE && retry.pause());
    }

    /// 1. A server ends, and a program that does not take this client's connect has a socket in its place.
    /// 2. The client is told so, and not that the server has ended.
    #[test]
    fn a_refusal_in_the_place_of_a_server_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q/s.sock");
        let cache = quinion::Cache::builder().memory(16 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://b", Arc::new(InMemory::new()), Default::default());
        let server = server.start(path.to_str().unwrap()).unwrap();
        let client = crate::Client::connect(path.to_str().unwrap()).unwrap();
        let client = client.with_reconnect_timeout(Duration::ZERO);
        drop(server);
        assert_eq!(client.open("s3://b/object").unwrap_err().kind(), ErrorKind::OwnerDead, "none is there");
        let _ = std::fs::remove_file(&path);
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let refused = client.open("s3://b/object").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Connect, "{refused}");
    }

    /// 1. A thread waits for a moment for an answer, as for a local file, and none comes: all requests are refused
    ///    until the heartbeat of the server rises.
    /// 2. Another thread's read of an object fails, of a server that is well.
    #[test]
    fn a_late_request_fails_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let cache = quinion::Cache::builder().memory(16 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://b", Arc::new(InMemory::new()), Default::default());
        let server = server.start(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
        let connection = Connection::to(server.socket(), DEADLINE).unwrap();
        let no_handle = [1 << 40, 0, 1];
        let is_late = || {
            let (late, begun) =
                (|| connection.viewer.request_within(Operation::Fill, no_handle, 0), Instant::now());
            while late() != Err(RequestError::Late) {
                assert!(begun.elapsed() < DEADLINE, "no answer came too late");
            }
        };
        for _ in 0..5 {
            is_late();
            let answer = connection.ask(Operation::Fill, no_handle, DEADLINE);
            assert_eq!(answer, Err(RequestError::Errno(Errno::BADF.0)));
        }
    }

    /// 1. A server stands still while pins are dropped: the messages about them find no room.
    /// 2. The server has them until this process ends.
    #[test]
    fn handles_that_could_not_be_given_back_go_with_the_next_request() {
        let folder = tempfile::tempdir().unwrap();
        let cache = quinion::Cache::builder().memory(16 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://b", Arc::new(InMemory::new()), Default::default());
        let server = server.start(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
        let connection = Connection::to(server.socket(), DEADLINE).unwrap();
        let pending = || connection.pending.lock().unwrap().len();
        let no_handle = [1 << 40, 0, 1];
        let begun = Instant::now();
        while begun.elapsed() < DEADLINE {
            // A request that is given up has all refused until the server's heartbeat rises.
            let _ = connection.viewer.request_within(Operation::Fill, no_handle, 0);
            connection.give_back(Operation::Detach, no_handle);
            if pending() > 0 {
                break;
            }
        }
        assert!(pending() > 0, "all could be told");
        while pending() > 0 {
            let answer = connection.ask(Operation::Fill, no_handle, DEADLINE);
            assert_eq!(answer, Err(RequestError::Errno(Errno::BADF.0)));
        }
        connection.give_back(Operation::Detach, no_handle);
    }
}

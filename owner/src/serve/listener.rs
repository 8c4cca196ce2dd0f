//! Listener: the socket at which processes become viewers, and where the event loop waits.
//!
//! ```text
//!   connection --accept--> the user's? --Hello in time?--> version, token --admit--> Welcome, with descriptors
//!                              no: closed    no: closed        no: said
//! ```
//!
//! The socket lies where only the owner's user can come, and the kernel says which user's process connected. It also
//! gives a descriptor of that process (`SO_PEERPIDFD`, since 6.5), by which its end is noticed; on older kernels one
//! is made of its number, and counts only if it is connected still. Nothing here waits for a process: a connection
//! that is silent for [`HELLO_MAX`] is closed, as is the oldest of more than [`GREETINGS_MAX`] silent ones.
//!
//! A viewer may also **send** a descriptor ([`DescriptorOffer`]), which this process may not duplicate. The
//! connection is kept for the worker that attaches the file; the event loop touches no descriptor that comes
//! ([`peer_connection`](super::peer_connection)). Names come in the same way ([`NameOffer`]).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with, sendmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::Shared;
use super::peer_connection::{HELLO_MAX, PeerConnection};
use super::viewer_slot::{Offer, has_ended};
use crate::sys::serial_queues::{QueueKey, SerialQueues};
use crate::viewer::handshake::{ANY_CACHE, DescriptorOffer, JoinReply, JoinRequest, NO_PLAN, NameOffer};
use crate::viewer::sys::Errno;
use quinion::internals::arena::{ArenaShare, LAYOUT_VERSION};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::peer::{self, ProcessName};

/// After a failed accept: the socket stays ready, and would be polled without end.
const ACCEPT_REST: Duration = Duration::from_millis(100);
const ENDS_MAX: usize = 256;
const GREETINGS_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct Listener {
    listener: Option<OwnedFd>,
    files: [OwnedFd; 2],
    token: u64,
    plans: RankedMutex<Vec<Arc<OwnedFd>>>,
    greetings: RankedMutex<Vec<PeerConnection>>,
    rests_until: RankedMutex<Option<Instant>>,
    queues: SerialQueues,
    /// An epoll set of viewers' processes, each reported once.
    ends: OwnedFd,
    wake: OwnedFd,
}

impl Listener {
    pub(super) fn new(
        arena: ArenaShare<'_>,
        listener: Option<OwnedFd>,
        queues: &SerialQueues,
    ) -> io::Result<Self> {
        let reopen = |file: &dyn AsFd| {
            let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
            rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        };
        if let Some(listener) = &listener {
            rustix::io::ioctl_fionbio(listener, true)?;
        }
        Ok(Self {
            listener,
            files: [reopen(&arena.arena_fd())?, reopen(&arena.control_fd())?],
            token: arena.token(),
            plans: RankedMutex::new(Rank::Viewer, Vec::new()),
            greetings: RankedMutex::new(Rank::Viewer, Vec::new()),
            rests_until: RankedMutex::new(Rank::Viewer, None),
            queues: queues.clone(),
            ends: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(super) fn files(&self) -> io::Result<[OwnedFd; 2]> {
        let [arena, control] = &self.files;
        Ok([arena.try_clone()?, control.try_clone()?])
    }

    pub(super) fn is_open(&self) -> bool {
        self.listener.is_some()
    }

    pub(super) fn add_plan(&self, plan: OwnedFd) -> u32 {
        let mut plans = self.plans.lock();
        plans.push(Arc::new(plan));
        plans.len() as u32 - 1
    }

    pub(super) fn await_end(&self, viewer: usize, alive: &OwnedFd) -> Result<(), Errno> {
        let (data, once) = (epoll::EventData::new_u64(viewer as u64), epoll::EventFlags::ONESHOT);
        epoll::add(&self.ends, alive, data, epoll::EventFlags::IN | once)
            .map_err(|error| Errno(error.raw_os_error()))
    }

    pub(super) fn forget_end(&self, alive: &OwnedFd) {
        let _ = epoll::delete(&self.ends, alive); // it is known: this viewer slot's, until now
    }

    fn ended(&self) -> impl Iterator<Item = usize> {
        let mut events = Vec::with_capacity(ENDS_MAX);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = epoll::wait(&self.ends, spare_capacity(&mut events), Some(&at_once)); // a signal: once more
        events.into_iter().map(|event| event.data.u64() as usize)
    }

    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes()); // full: it is awake
    }

    /// Handles connections and the ends of viewers until `until`. For the event loop alone.
    pub(super) fn wait(&self, until: Instant, shared: &Arc<Shared>) {
        // 1 the descriptors to wait for
        let mut greetings = std::mem::take(&mut *self.greetings.lock());
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.ends, PollFlags::IN)];
        fds.extend(greetings.iter().map(|greeting| PollFd::new(greeting, PollFlags::IN)));
        let rests = self.rests_until.lock().filter(|&end| Instant::now() < end);
        let until = rests.map_or(until, |end| until.min(end));
        let listener = self.listener.as_ref().filter(|_| rests.is_none() && !self.queues.are_full());
        fds.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        // 2 wait
        let time = until.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        if poll(&mut fds, Some(&time)).is_err() {
            fds.iter_mut().for_each(PollFd::clear_revents);
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut ready = ready.into_iter();
        let (is_woken, have_ended) = (ready.next() == Some(true), ready.next() == Some(true));
        let spoken: Vec<bool> = ready.by_ref().take(greetings.len()).collect();
        let is_called = ready.next() == Some(true);
        if is_woken {
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        // 3 viewers that have ended
        if have_ended {
            self.ended().for_each(|viewer| shared.free_soon(viewer));
        }
        // 4 connections that have said something, or nothing for too long
        let now = Instant::now();
        for (connection, has_spoken) in std::mem::take(&mut greetings).into_iter().zip(spoken) {
            let silent = if has_spoken { self.read_message(connection, shared) } else { Some(connection) };
            greetings.extend(silent.filter(|connection| now < connection.since + HELLO_MAX));
        }
        // 5 new connections
        if is_called {
            self.accept(&mut greetings, shared);
        }
        *self.greetings.lock() = greetings;
    }

    fn accept(&self, greetings: &mut Vec<PeerConnection>, shared: &Arc<Shared>) {
        let Some(listener) = &self.listener else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // A bound, so that a flood of connections leaves the event loop time for its other work.
        for _ in 0..GREETINGS_MAX {
            if self.queues.are_full() {
                return;
            }
            let socket = match accept_with(listener, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                // No descriptor is left, say: the connections wait, and so does the listener, which stays ready.
                Err(_) => {
                    *self.rests_until.lock() = Some(Instant::now() + ACCEPT_REST);
                    return;
                }
            };
            let connection = PeerConnection::new(socket, &self.queues);
            let is_ours = peer::user(connection.as_fd()) == Some(rustix::process::geteuid().as_raw());
            if !is_ours {
                continue;
            }
            // Most have spoken by now. When too many are silent the oldest goes: silence keeps no other process out.
            let Some(silent) = self.read_message(connection, shared) else { continue };
            if greetings.len() >= GREETINGS_MAX {
                greetings.remove(0);
            }
            greetings.push(silent);
        }
    }

    /// Has a process answered; returns the connection if it is silent yet. A thread of its queue admits it: a question
    /// to the kernel about a process can wait for that process. (A read of `/proc/PID/status` may be the last to hold
    /// that process's memory, and then takes it apart, mapped files and all.)
    fn read_message(&self, connection: PeerConnection, shared: &Arc<Shared>) -> Option<PeerConnection> {
        let message = match connection.peek() {
            Ok(Some(message)) => message,
            Ok(None) => return Some(connection),
            Err(_) => return None,
        };
        if !message.has_descriptors {
            connection.take();
        }
        if let Some(hello) = JoinRequest::of(message.bytes()) {
            let (shared, key) = (Arc::clone(shared), connection.process_key());
            self.queues.spawn(key, move || shared.listener.welcome(&connection, hello, &shared));
        } else if let Some(offer) = DescriptorOffer::of(message.bytes()).filter(|_| message.has_descriptors) {
            let known = self.check_token(offer.version, offer.token);
            self.accept_offer(known, Offer { connection, has_descriptor: true, name: None }, shared);
        } else if let Some((offer, name)) = NameOffer::of(message.bytes()) {
            let has_descriptor = message.has_descriptors;
            let kept = Offer { connection, has_descriptor, name: Some(name.into()) };
            self.accept_offer(self.check_token(offer.version, offer.token), kept, shared);
        }
        None
    }

    /// Whether a viewer of this cache says so.
    fn check_token(&self, version: u32, token: u64) -> Result<(), Errno> {
        if version == LAYOUT_VERSION && token == self.token { Ok(()) } else { Err(Errno::PROTO) }
    }

    /// A descriptor or a name is kept for the worker that opens the file; the viewer gets a ticket for it. `known`: the
    /// answer of [`Self::check_token`] for the viewer.
    fn accept_offer(&self, known: Result<(), Errno>, offer: Offer, shared: &Shared) {
        let sender = known.and_then(|()| caller(&offer.connection));
        // The number is that process's while it is there.
        let number =
            sender.and_then(|(number, alive)| if has_ended(&alive) { Err(Errno::SRCH) } else { Ok(number) });
        let answer = |ticket: Result<u32, Errno>, connection: &PeerConnection| {
            let welcome = ticket.map_or_else(refusal, |viewer| JoinReply { error: 0, viewer });
            // A viewer that does not get the ticket never asks for the descriptor it has sent; see
            // `ViewerSlot::take_late_offers`.
            let _ =
                rustix::net::send(connection, &welcome.bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        };
        match number {
            Ok(number) => shared.viewers.keep_offer(number, offer, answer),
            Err(error) => answer(Err(error), &offer.connection),
        }
    }

    fn welcome(&self, socket: &PeerConnection, hello: JoinRequest, shared: &Arc<Shared>) {
        let plan = self.plans.lock().get(hello.plan as usize).cloned();
        let admitted = if hello.version != LAYOUT_VERSION || ![self.token, ANY_CACHE].contains(&hello.token) {
            Err(Errno::PROTO)
        } else if plan.is_none() && hello.plan != NO_PLAN {
            Err(Errno::INVAL)
        } else {
            caller(socket).and_then(|(process, alive)| shared.admit(process, alive))
        };
        let (welcome, page) = match admitted {
            Ok((viewer, page)) => (JoinReply { error: 0, viewer: viewer as u32 }, Some(page)),
            Err(error) => (refusal(error), None),
        };
        let mut descriptors = Vec::new();
        if let Some(page) = &page {
            descriptors.extend(self.files.iter().map(AsFd::as_fd));
            descriptors.push(page.as_fd());
            descriptors.extend(plan.as_ref().map(|plan| plan.as_fd()));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            with.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let bytes = welcome.bytes();
        let _ = sendmsg(
            socket,
            &[io::IoSlice::new(&bytes)],
            &mut with,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        );
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A process that was not admitted is in it, with its message.
        if let Some(listener) = self.listener.take() {
            self.queues.close(QueueKey::Sender(ProcessName::default()), listener);
        }
    }
}

fn refusal(error: Errno) -> JoinReply {
    JoinReply { error: error.0 as u32, viewer: 0 }
}

fn caller(socket: &PeerConnection) -> Result<(u32, OwnedFd), Errno> {
    let number = peer::process(socket.as_fd()).ok_or(Errno::ACCES)?;
    match peer::descriptor(socket.as_fd()) {
        Ok(alive) => return Ok((number as u32, alive)),
        Err(libc::ENOPROTOOPT) => {} // an older kernel
        Err(error) => return Err(Errno(error)),
    }
    let number = Pid::from_raw(number).ok_or(Errno::SRCH)?;
    let alive = pidfd_open(number, PidfdFlags::empty()).map_err(|error| Errno(error.raw_os_error()))?;
    // Its number is another's only when it has ended, and then it is not connected any more.
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, Some(&at_once)) {
        Ok(0) => Ok((number.as_raw_nonzero().get() as u32, alive)),
        _ => Err(Errno::SRCH),
    }
}

//! Greeting: a peer is accepted, read from and closed on a thread of its own, and becomes a VM or is refused.
//!
//! ```text
//!   listener --is there a place?--> thread: accept --> receive until all is said --> userfaultfd, regions: a VM
//!                '--no: wait, or refuse one more            '--late, wrong, panicked--> refused; then closed
//! ```
//!
//! The head of `server.rs` says why no worker does that, and how many such threads there may be. While a thread waits
//! in a receive it keeps nothing of the server's alive. Another thread frees the place of one that still waits when its
//! message is late ([`Shared::end_late_greetings`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use super::connection::{Connection, ConnectionSlot, ConnectionState, ForkState, HeldUffds, Kind, token};
use super::{
    DYING, ENDING, GRACE, GREETINGS, LISTENER, ONCE, REFUSED_MAX, SHORT_OF_DESCRIPTORS, SOON, Shared,
};
use crate::message::{BadMessage, DESCRIPTORS_MAX, ParseStep, VmmRegion, check, offer};
use crate::peer::{Handshake, Peer, drain, has_one_ended, send_message, wait_for};
use crate::vm::{Source, Vm};
use crate::{Event, OnFailure, PeerError};
use quinion::internals::sync::contained;
use quinion::internals::sys::signal;
use quinion::internals::units::PAGE_SIZE;

struct PeerThread(Weak<Shared>);

impl Drop for PeerThread {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.table().threads -= 1;
        }
    }
}

enum AcceptState {
    /// The next peer is accepted: there is a place, or it is refused.
    Open,
    /// The next peer waits: a place becomes free by itself.
    Soon,
    /// The next peer waits: there is no place, not even for one more refusal; why.
    Crowded(&'static str),
}

impl Shared {
    pub(super) fn accept(self: &Arc<Self>) {
        // If it is paused it is armed again when VMs were not handed over.
        if self.table().is_paused || self.is_ending.load(Ordering::Relaxed) {
            return;
        }
        match self.accept_state() {
            AcceptState::Open => {}
            AcceptState::Soon => return self.want_after(LISTENER, SOON),
            AcceptState::Crowded(why) => {
                let was_logged = std::mem::replace(&mut self.table().is_crowd_logged, true);
                if !was_logged {
                    self.emit_event(&Event::CannotAccept(io::Error::other(why)));
                }
                return self.want_after(LISTENER, DYING);
            }
        }
        {
            let mut table = self.table();
            if table.is_paused {
                return;
            }
            table.threads += 1;
            table.accepting += 1;
        }
        let counted = PeerThread(Arc::downgrade(self));
        let thread = std::thread::Builder::new().name("quinion-peer".to_owned());
        let started = thread.spawn(move || {
            signal::block_all();
            greet_next(&counted.0);
            drop(counted);
        });
        if let Err(error) = started {
            self.table().accepting -= 1;
            self.emit_event(&Event::CannotAccept(error));
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
        // The end of a process says nothing of its forks, whose place this is.
        let with_process = vms.iter().filter(|vm| vm.forks() != ForkState::Orphaned);
        if has_one_ended(with_process.map(|vm| vm.end())) {
            AcceptState::Soon
        } else if is_crowded {
            AcceptState::Crowded(
                "4 refused processes were killed and have not ended; check why (uninterruptible sleep?)",
            )
        } else {
            AcceptState::Open
        }
    }

    /// Accepts a peer and gets to know it, on its thread, at the end of the queue. Returns the error as well, if it
    /// cannot be received from.
    fn accept_pending(&self) -> Option<(Arc<Connection>, Option<PeerError>)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let met = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => self.identify_peer(socket),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
            Err(error) => {
                self.emit_event(&Event::CannotAccept(error.into()));
                self.want_after(LISTENER, SHORT_OF_DESCRIPTORS);
                return None;
            }
        };
        self.arm(self.listener.as_fd(), 0, Kind::Listener);
        met
    }

    /// At the server's end: nothing connects from here on, and all that have connected get a thread that greets them.
    pub(super) fn accept_rest(self: &Arc<Self>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        let until = Instant::now() + ENDING;
        loop {
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN | Errno::INVAL) => return, // none is left
                // Connections that end make room.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) if Instant::now() < until => {
                    std::thread::sleep(SOON);
                    continue;
                }
                Err(error) => return self.emit_event(&Event::CannotAccept(error.into())),
            };
            let Some((connection, wrong)) = self.identify_peer(socket) else { return };
            self.table().threads += 1;
            let counted = PeerThread(Arc::downgrade(self));
            let thread = std::thread::Builder::new().name("quinion-peer".to_owned());
            let peer = Arc::clone(&connection);
            let started = thread.spawn(move || {
                signal::block_all();
                greet(&counted.0, connection, wrong);
                drop(counted);
            });
            if let Err(error) = started {
                self.emit_event(&Event::CannotAccept(error));
                // Its memory may have come with it, unread.
                if self.forget(&peer) {
                    self.drop_vm(&peer);
                }
            }
        }
    }

    fn identify_peer(&self, socket: OwnedFd) -> Option<(Arc<Connection>, Option<PeerError>)> {
        let ((peer, unknown), vms_max) = (Peer::of(socket.as_fd()), self.options.vms_max);
        let mut table = self.table();
        if table.is_closed {
            return None;
        }
        let has_capacity = table.connections.len() - table.refused.len() < vms_max;
        table.last += 1;
        let (number, since) = (table.last, Instant::now());
        if !has_capacity {
            table.refused.insert(number);
        }
        let place = ConnectionSlot {
            stage: ConnectionState::Greeting { since },
            wanted: None,
            is_paused: false,
            is_given_up: false,
            forks: ForkState::None,
        };
        let connection =
            Arc::new(Connection { number, socket, peer, counters: Arc::default(), place: Mutex::new(place) });
        table.connections.insert(number, Arc::clone(&connection));
        drop(table);
        self.want_after(GREETINGS, self.options.greeting + GRACE);
        let wrong = if has_capacity {
            let watched = unknown.map_or_else(|| self.watch_peer(&connection), Err);
            watched.err().map(|error| PeerError::Socket(error.into()))
        } else {
            Some(PeerError::TooMany(vms_max))
        };
        Some((connection, wrong))
    }

    pub(super) fn watch_peer(&self, connection: &Connection) -> rustix::io::Result<()> {
        let Some(alive) = connection.peer.alive() else { return Ok(()) };
        epoll::add(&self.epoll, alive, token(connection.number, Kind::Process), ONCE)
    }

    fn give_image(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
    ) -> std::result::Result<(), PeerError> {
        let image = self.image.as_ref().ok_or(PeerError::NoImage)?;
        greeting.has_image = true;
        let offer = offer(image.len());
        send_message(connection.socket.as_fd(), &offer, Some(image.fd())).map_err(PeerError::Socket)
    }

    fn make_vm(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
        regions: &[VmmRegion],
    ) -> std::result::Result<Box<Vm>, PeerError> {
        self.snapshot.assure()?;
        let pages = check(regions, self.snapshot.identity().bytes)?;
        if greeting.has_image && pages.unit() != PAGE_SIZE as u64 {
            // The image is no file of hugetlbfs.
            return Err(BadMessage::PageSize { region: 0, bytes: pages.unit() }.into());
        }
        let uffd = greeting.take_userfaultfds(1).pop().ok_or(PeerError::NoUserfaultfd)?;
        let counters = Arc::clone(&connection.counters);
        let source = match &self.image {
            Some(image) if greeting.has_image => Source::Mapped(image.clone()),
            _ => Source::Copied(Box::new(self.snapshot.file())),
        };
        Ok(Box::new(Vm::new(uffd, pages, source, counters)))
    }

    /// Makes a peer that has said all, or with which something is wrong, the workers', or refuses it. On its thread.
    fn end_greeting(
        &self,
        connection: &Connection,
        greeting: &mut Handshake,
        received: std::result::Result<Box<Vm>, PeerError>,
    ) {
        if !connection.begin() {
            // It ended meanwhile, or was too late.
            return;
        }
        let is_ending = self.is_ending.load(Ordering::Relaxed);
        match received {
            Ok(vm) if !is_ending => {
                self.work_on_for_workers(connection, ConnectionState::Serving(vm), Kind::Beginning);
            }
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

    /// Ends greetings that are so late that their threads must be waiting in the kernel, and is called again when the
    /// next is as late. Any worker may call it.
    pub(super) fn end_late_greetings(&self) {
        let late_after = self.options.greeting + GRACE;
        let all: Vec<Arc<Connection>> = self.table().connections.values().cloned().collect();
        let (late, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|connection| connection.take_late(late_after));
        // Before anything is told: an observer may block.
        if let Some(since) = others.iter().filter_map(|connection| connection.greets_since()).min() {
            self.want_after(GREETINGS, (since + late_after).saturating_duration_since(Instant::now()));
        }
        for connection in late {
            // A peer that is silent is refused by its thread. This one waits in the kernel, or for the snapshot's disk,
            // and may have the peer's memory.
            if self.options.on_failure == OnFailure::Kill {
                connection.peer.kill();
            }
            self.refused(&connection, PeerError::Late(self.options.greeting));
            self.settle(&connection, ConnectionState::Over);
        }
    }
}

pub(super) fn memory_of(greeting: &mut Handshake) -> Option<HeldUffds> {
    let uffds = greeting.take_userfaultfds(DESCRIPTORS_MAX);
    (!uffds.is_empty()).then_some(HeldUffds::Descriptors { _uffds: uffds })
}

/// A peer's thread, from its accept until nothing is left of what it sent; see the head of `server.rs`.
fn greet_next(server: &Weak<Shared>) {
    let Some(shared) = server.upgrade() else { return };
    let accepted = shared.accept_pending();
    shared.table().accepting -= 1;
    drop(shared);
    if let Some((connection, wrong)) = accepted {
        greet(server, connection, wrong);
    }
}

/// Gets to know a peer that was accepted; on its thread.
fn greet(server: &Weak<Shared>, connection: Arc<Connection>, wrong: Option<PeerError>) {
    let Some(at_most) = server.upgrade().map(|shared| shared.options.greeting) else { return };
    let mut greeting = Handshake::new();
    let received = match wrong {
        Some(wrong) => Err(wrong),
        None => {
            let receive = || receive_message(server, &connection, &mut greeting, at_most);
            contained(receive).unwrap_or(Err(PeerError::Panicked))
        }
    };
    if received.is_err() {
        greeting.receive_rest(connection.socket.as_fd());
    }
    if let Some(shared) = server.upgrade() {
        shared.end_greeting(&connection, &mut greeting, received);
    }
    // From here on no thread waits for this one.
    drain(connection.socket.as_fd());
    drop(connection);
    drop(greeting);
}

/// Takes what a peer says until it has said all. While it waits nothing of the server's is kept alive.
fn receive_message(
    server: &Weak<Shared>,
    connection: &Connection,
    greeting: &mut Handshake,
    at_most: Duration,
) -> std::result::Result<Box<Vm>, PeerError> {
    let (socket, until) = (connection.socket.as_fd(), Instant::now() + at_most);
    loop {
        if !wait_for(socket, PollFlags::IN | PollFlags::RDHUP, until) {
            return Err(if greeting.lacks_descriptor {
                PeerError::NoDescriptor
            } else {
                PeerError::Late(at_most)
            });
        }
        let said = greeting.receive(socket).map_err(|why| match why {
            PeerError::HungUp if greeting.lacks_descriptor => PeerError::NoDescriptor,
            why => why,
        })?;
        let shared = server.upgrade().ok_or(PeerError::HungUp)?;
        match said {
            ParseStep::Unfinished => {}
            ParseStep::WantsImage => shared.give_image(connection, greeting)?,
            ParseStep::Regions(regions) => return shared.make_vm(connection, greeting, &regions),
        }
    }
}

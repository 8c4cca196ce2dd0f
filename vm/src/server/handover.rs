//! Handover: a running server gives its VMs, and the socket at which they connect, to a successor.
//!
//! ```text
//!   a successor asks     of the same user? the same files? else refused, and nothing has happened
//!   pause                no peer is accepted; those that greet become VMs or are refused; each VM is taken from its
//!                        worker between two rounds: all events that were read are noted
//!   release              threads whose faults were read and not answered are woken, and fault anew
//!   send                 all that is known of each VM, with its descriptors; from here on none of it is touched
//!   the answer           taken: it is forgotten here       else: shut, and look once more      taken after all?
//!                                                          it was not: "resumed" is said, and the VMs are served on
//! ```
//!
//! **One decision.** The successor holds everything and touches nothing until its packet `Taken` is in this server's
//! queue. It is in the queue, and all is the successor's; or it is not, and never will be, since the socket is shut
//! before this server goes on. A successor whose packet is refused by the kernel looks at an event that came with the
//! offer: this server rings it before it touches a VM again. If it was not rung and this process is no more, the
//! successor serves. So of two servers one serves, whichever of them dies, and at whatever step.
//!
//! **No event is lost or read twice.** Events that wait in the kernel are read by the server that serves next. Those
//! that were read are in the states of the pages. Faults are not handed over: a woken thread faults anew, and a page
//! that is there by then is no fault.
//!
//! **A successor that dies between** the decision and its first look at a VM would leave VMs that nothing serves. So it
//! says that it serves, and until then the descriptors are kept here. If it ends without that word, the VMs are given
//! up here: by then it may have supplied pages, and what it has noted of others is lost with it. The word is waited for
//! as long as the successor is there, however late it is. It is not waited for if this server ends, nor if `Taken` was
//! found when the socket had been shut: behind that nothing can come, and the end of the connection means nothing.
//!
//! VMs that have mapped the image's memory cannot be handed over: the pages that they have not touched are this
//! process's to fill. With such a VM there is no takeover of any.
//!
//! Invariant: between the pause and the decision no worker has a VM, and no descriptor of one is read from.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::SocketFlags;
use rustix::process::{PidfdFlags, geteuid, getpid, pidfd_open};

use super::connection::{Connection, ConnectionState, Kind};
use super::packets::{Packet, PacketSocket};
use super::{GRACE, SOON, Shared};
use crate::takeover::{
    TakeoverAnswer, TakeoverError, TakeoverOffer, TakeoverRequest, VM_DESCRIPTORS_MAX, VmHead,
};
use crate::vm::Vm;
use crate::{Event, PeerError};
use quinion::internals::sync::contained;
use quinion::internals::sys::peer;

/// How long workers may have VMs before the takeover is given up: they may wait for a device, and VMs that they do not
/// have wait meanwhile.
const BUSY_MAX: Duration = Duration::from_secs(2);
/// How long all that is said may take, while no VM is served.
pub(super) const HANDOVER_MAX: Duration = Duration::from_secs(30);

/// A server whose VMs are being handed over. They are served on when it is dropped, unless that was done.
struct PausedServer<'a> {
    shared: &'a Shared,
    connections: Vec<Arc<Connection>>,
    vms: Vec<(Arc<Connection>, Box<Vm>)>,
    /// An event that is rung before any VM is touched again.
    resumed: OwnedFd,
    is_done: bool,
}

/// Checks that the other end of a connection has the user of this process.
pub(super) fn check_user(socket: BorrowedFd<'_>) -> Result<(), TakeoverError> {
    let (theirs, ours) = (peer::user(socket).unwrap_or(u32::MAX), geteuid().as_raw());
    if theirs == ours { Ok(()) } else { Err(TakeoverError::OtherUser(theirs, ours)) }
}

impl Shared {
    /// Waits for successors, one after the other, until one has taken over, or the server ends.
    pub(super) fn await_successors(&self) {
        while let Some(socket) = self.next_successor() {
            let mut socket = PacketSocket::new(socket, Some(Arc::clone(&self.ending)));
            let Ok(asked) = socket.receive() else { continue }; // it only looked whether there is a server
            let panicked =
                || TakeoverError::Refused("the running server panicked; see its message".to_owned());
            let done =
                contained(|| self.hand_over(&mut socket, &asked.bytes)).unwrap_or_else(|| Err(panicked()));
            match done {
                Ok(()) => return,
                Err(why) => {
                    let _ = socket.send(&TakeoverAnswer::Refused(why.to_string()).packet(), &[]);
                    self.emit_event(&Event::NotTakenOver(why));
                }
            }
        }
    }

    fn next_successor(&self) -> Option<OwnedFd> {
        loop {
            let mut fds =
                [PollFd::new(&self.ending, PollFlags::IN), PollFd::new(&self.successors, PollFlags::IN)];
            let waited = poll(&mut fds, None);
            if self.is_ending.load(Ordering::Relaxed) {
                return None;
            }
            if waited.is_err() {
                continue;
            }
            match rustix::net::accept_with(&self.successors, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Some(socket),
                // It has hung up, or this process is short of descriptors.
                Err(_) => std::thread::sleep(SOON),
            }
        }
    }

    fn hand_over(&self, socket: &mut PacketSocket, asked: &[u8]) -> Result<(), TakeoverError> {
        check_user(socket.as_fd())?;
        let request = TakeoverRequest::parse(asked)?;
        let files = self.snapshot.files().ok_or(TakeoverError::NoFiles)?;
        if !request.is_of(self.snapshot.identity(), &files) {
            return Err(TakeoverError::OtherSnapshot);
        }
        let mut paused = PausedServer::new(self)?;
        paused.take_vms(socket)?;
        socket.set_bound(HANDOVER_MAX);
        let vms = paused.vms.len() as u64;
        if vms > request.vms_max {
            return Err(TakeoverError::TooManyVms { vms, vms_max: request.vms_max });
        }
        paused.send(socket).map_err(|why| refusal_in(socket).unwrap_or(why))?;
        match socket.receive().and_then(|packet| TakeoverAnswer::parse(&packet.bytes)) {
            Ok(()) => {
                socket.clear_bound();
                if has_died(|| socket.receive()) {
                    // It may have supplied pages that are not noted here, so they cannot be served again.
                    paused.give_up_vms();
                    return Err(TakeoverError::HungUp);
                }
            }
            Err(why) => match socket.shut() {
                // It came in the last moment.
                Some(packet) => TakeoverAnswer::parse(&packet.bytes)?,
                None => return Err(why),
            },
        }
        paused.forget_vms();
        Ok(())
    }

    /// Whether there is a peer whose message is to come, or about to be accepted.
    fn is_greeting(&self) -> bool {
        let table = self.table();
        table.accepting > 0 || table.connections.values().any(|connection| connection.may_greet())
    }

    /// Waits until `is_so`, as long as the successor does.
    fn wait_until(
        &self,
        at_most: Duration,
        successor: &PacketSocket,
        is_so: impl Fn() -> bool,
    ) -> Result<(), TakeoverError> {
        let until = Instant::now() + at_most;
        while !is_so() {
            if self.is_ending.load(Ordering::Relaxed) {
                return Err(TakeoverError::Ending);
            }
            if successor.has_hung_up() {
                return Err(TakeoverError::HungUp);
            }
            if Instant::now() >= until {
                return Err(TakeoverError::Busy);
            }
            std::thread::sleep(SOON);
        }
        Ok(())
    }
}

/// Whether a successor that has taken all ends before it serves. One that takes long is not dead, and may die yet.
fn has_died(mut receive: impl FnMut() -> Result<Packet, TakeoverError>) -> bool {
    loop {
        match receive().map(|packet| TakeoverAnswer::is_serving(&packet.bytes)) {
            Ok(false) | Err(TakeoverError::Late | TakeoverError::BadMessage(_)) => {}
            Err(TakeoverError::HungUp) => return true,
            Ok(true) | Err(_) => return false,
        }
    }
}

/// The reason that a successor gave before it hung up.
fn refusal_in(socket: &PacketSocket) -> Option<TakeoverError> {
    TakeoverAnswer::parse(&socket.shut()?.bytes).err()
}

impl<'a> PausedServer<'a> {
    fn new(shared: &'a Shared) -> Result<Self, TakeoverError> {
        let resumed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| TakeoverError::Socket(error.into()))?;
        shared.table().is_paused = true;
        Ok(Self { shared, connections: Vec::new(), vms: Vec::new(), resumed, is_done: false })
    }

    /// Takes each VM from the workers.
    fn take_vms(&mut self, successor: &PacketSocket) -> Result<(), TakeoverError> {
        let shared = self.shared;
        // VMs are served meanwhile: a peer may take as long as a message may.
        let greetings = shared.options.greeting + 2 * GRACE;
        shared.wait_until(greetings, successor, || !shared.is_greeting())?;
        self.connections = shared.table().connections.values().cloned().collect();
        self.connections.iter().for_each(|connection| connection.pause(true));
        let is_busy = || self.connections.iter().any(|connection| connection.is_busy());
        shared.wait_until(BUSY_MAX, successor, || !is_busy())?;
        for connection in &self.connections {
            let serving = connection.take_if(|stage| matches!(stage, ConnectionState::Serving(_)));
            // Others are dying, or over: their end is this server's affair.
            if let Some(ConnectionState::Serving(vm)) = serving {
                self.vms.push((Arc::clone(connection), vm));
            }
        }
        if self.vms.iter().any(|(_, vm)| vm.is_mapped()) {
            return Err(TakeoverError::MappedVm);
        }
        self.vms.iter_mut().for_each(|(_, vm)| vm.release_faults());
        Ok(())
    }

    fn send(&self, socket: &PacketSocket) -> Result<(), TakeoverError> {
        let shared = self.shared;
        let process =
            pidfd_open(getpid(), PidfdFlags::empty()).map_err(|e| TakeoverError::Socket(e.into()))?;
        let recorder = shared.recorder.as_ref();
        let record = recorder.map(|one| one.lock().unwrap_or_else(PoisonError::into_inner).record().encode());
        let record = record.unwrap_or_default();
        let offer = TakeoverOffer::new(self.vms.len() as u64, shared.inodes, record.len() as u64);
        let doors =
            [&shared.listener.as_fd(), &shared.successors.as_fd(), &process.as_fd(), &self.resumed.as_fd()];
        socket.send(&offer.packet(), &doors.map(|fd| *fd))?;
        socket.send_bytes(&record)?;
        // All descriptors first: see `successor.rs`.
        let states: Vec<Vec<u8>> = self.vms.iter().map(|(_, vm)| vm.states_bytes()).collect();
        let mut heads = self.vms.iter().zip(&states);
        heads.try_for_each(|((connection, vm), states)| send_head(socket, connection, vm, states.len()))?;
        states.iter().try_for_each(|states| socket.send_bytes(states))
    }

    /// The successor has taken all, and has died before it served.
    fn give_up_vms(mut self) {
        for (connection, vm) in std::mem::take(&mut self.vms) {
            let stage = self.shared.fail(&connection, ConnectionState::Serving(vm), PeerError::SuccessorDied);
            connection.place().stage = stage;
        }
    }

    /// Forgets the VMs: all of them are the successor's.
    fn forget_vms(mut self) {
        self.is_done = true;
        let shared = self.shared;
        // Relaxed: the file of the socket is removed, or not, by the thread that joins this one.
        shared.owns_socket.store(false, Ordering::Relaxed);
        for (connection, mut vm) in std::mem::take(&mut self.vms) {
            shared.unwatch(vm.spaces());
            connection.place().stage = ConnectionState::Over;
            // If its process has ended meanwhile, that was told.
            if shared.forget(&connection) {
                shared.table().vms_handed_over += 1;
                let (vm, process) = (connection.number, connection.peer.process());
                shared.emit_event(&Event::HandedOver { vm, process });
            }
        }
    }
}

fn send_head(
    socket: &PacketSocket,
    connection: &Connection,
    vm: &Vm,
    state_bytes: usize,
) -> Result<(), TakeoverError> {
    let mut fds = vec![connection.socket.as_fd()];
    fds.extend(connection.peer.alive());
    let has_process = fds.len() == 2;
    fds.extend(vm.uffds().map(AsFd::as_fd));
    debug_assert!(fds.len() <= VM_DESCRIPTORS_MAX);
    let head = VmHead::new(connection.peer.process(), has_process, vm.uffds().count(), state_bytes as u64);
    socket.send(&head.packet(), &fds)
}

impl Drop for PausedServer<'_> {
    fn drop(&mut self) {
        let shared = self.shared;
        if !self.is_done {
            // Before any VM is touched: see the head of this file.
            let rung = rustix::io::write(&self.resumed, &1_u64.to_ne_bytes());
            debug_assert!(rung.is_ok(), "{rung:?}");
        }
        self.connections.iter().for_each(|connection| connection.pause(false));
        // All are put back before any is looked at: a look may wait for a device.
        for (connection, vm) in std::mem::take(&mut self.vms) {
            let mut place = connection.place();
            if !matches!(place.stage, ConnectionState::Over) {
                place.stage = ConnectionState::Serving(vm);
            }
        }
        // The workers look; also at a dying process, whose look that was due meanwhile was not taken.
        self.connections.iter().for_each(|connection| shared.want_after(connection.number, Duration::ZERO));
        if !self.is_done {
            shared.table().is_paused = false;
            shared.arm(shared.listener.as_fd(), 0, Kind::Listener);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A successor that says and does this, one after the other.
    fn dies(said: Vec<Result<&str, TakeoverError>>) -> bool {
        let mut said = said.into_iter();
        has_died(|| {
            let text = said.next().expect("it is decided by then")?;
            Ok(Packet { bytes: text.into(), fds: Vec::new() })
        })
    }

    #[test]
    fn a_successor_that_is_late_is_waited_for_until_it_serves_or_dies() {
        let serving = || Ok(r#"{"quinion_takeover":1,"answer":"serving"}"#);
        let late = || Err(TakeoverError::Late);
        let hung_up = || Err(TakeoverError::HungUp);
        assert!(dies(vec![late(), late(), hung_up()]));
        assert!(dies(vec![Ok("[]"), Err(TakeoverError::BadMessage("long".into())), hung_up()]));
        assert!(!dies(vec![late(), serving()]));
        assert!(!dies(vec![late(), Err(TakeoverError::Ending)]));
    }
}

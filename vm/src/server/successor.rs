//! Successor: a server that takes over the VMs of one that runs, with the socket at which they connect.
//!
//! ```text
//!   ask       is there a server? --> its offer: the sockets, its process, the event by which it says that it goes on
//!             each VM: its descriptors, its pages                    all is checked, and nothing touched
//!   commit    "taken" is sent --it is in the other's queue--> all is this server's
//!                             '--refused--> the event was rung: the other serves
//!                                       '-> its process is no more, and the event was not rung: all is this server's
//! ```
//!
//! The head of `handover.rs` argues why one of the two serves. A running server that dies in the middle of it leaves
//! what had come as a whole to this one. VMs whose descriptors have come and whose pages have not are killed, as
//! [`OnFailure`](crate::OnFailure) says; so are all of them, if this server cannot start after all. Those of which
//! nothing has come nothing serves, as after any kill of a server, and the error says how many.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::handover::{HANDOVER_MAX, check_user};
use super::packets::{Packet, PacketSocket};
use super::socket::{SocketAddress, connect_to};
use super::timespec;
use crate::fault_record::{FaultRecord, ImageIdentity};
use crate::pages::Pages;
use crate::peer::Peer;
use crate::snapshot::FileIdentity;
use crate::takeover::{
    LISTENER_DESCRIPTORS, TakeoverAnswer, TakeoverError, TakeoverOffer, TakeoverRequest, VmHead, parse_states,
};
use crate::uffd::Uffd;

/// How long the running server may take until its offer: a peer that greets may take as long as a message may.
const OFFER_WAIT: Duration = Duration::from_secs(120);
/// How long VMs that are killed may take to end.
const KILLED_MAX: Duration = Duration::from_secs(5);

/// A server's request to the one that runs.
pub(super) struct SuccessionRequest<'a> {
    /// Path of the running server's socket.
    pub(super) socket: &'a Path,
    pub(super) image: ImageIdentity,
    /// The files of the snapshot, if they can be told from others.
    pub(super) files: Option<Vec<FileIdentity>>,
    pub(super) vms_max: u64,
    /// Whether VMs that no server serves any more are killed.
    pub(super) kills: bool,
    /// Readable when nothing is to be taken over any more.
    pub(super) ending: Option<Arc<OwnedFd>>,
}

/// A VM as the running server has left it.
pub(super) struct TakenVm {
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) spaces: Vec<(Uffd, Pages)>,
}

/// A VM before its pages are known.
struct TakenHead {
    socket: OwnedFd,
    peer: Peer,
    uffds: Vec<Uffd>,
    state_bytes: u64,
}

/// All that a running server has handed over.
pub(super) struct Succession {
    running: PacketSocket,
    process: OwnedFd,
    resumed: OwnedFd,
    pub(super) listener: OwnedFd,
    pub(super) successors: OwnedFd,
    pub(super) inodes: [u64; 2],
    pub(super) vms: Vec<TakenVm>,
    /// VMs whose descriptors have come, and not all that is known of them.
    heads: VecDeque<TakenHead>,
    kills: bool,
    is_decided: bool,
    pub(super) record: Option<FaultRecord>,
    /// The running server died before it had handed over all.
    pub(super) incomplete: Option<TakeoverError>,
}

impl Succession {
    /// Asks the server that listens at a socket for all that it has; `None` if there is none.
    pub(super) fn ask(request: SuccessionRequest<'_>) -> Result<Option<Self>, TakeoverError> {
        let socket = match connect_to(request.socket, SocketAddress::Successors) {
            Ok(socket) => socket,
            Err(Errno::NOENT | Errno::CONNREFUSED) => return Ok(None),
            Err(error) => return Err(TakeoverError::Socket(error.into())),
        };
        check_user(socket.as_fd())?;
        let SuccessionRequest { image, files, vms_max, kills, ending, .. } = request;
        let mut running = PacketSocket::new(socket, ending);
        let asked = TakeoverRequest::new(image, files.ok_or(TakeoverError::NoFiles)?, vms_max);
        running.send(&asked.packet(), &[])?;
        let Packet { bytes, fds } = running.receive_within(OFFER_WAIT)?;
        running.set_bound(HANDOVER_MAX);
        let offer = match TakeoverOffer::parse(&bytes, fds.len(), vms_max) {
            Ok(offer) => offer,
            Err(why) => return Err(refuse(&running, why)),
        };
        let fds: [OwnedFd; LISTENER_DESCRIPTORS] = fds.try_into().expect("they were counted");
        let [listener, successors, process, resumed] = fds;
        let mut this = Self {
            running,
            process,
            resumed,
            listener,
            successors,
            inodes: offer.inodes,
            vms: Vec::new(),
            heads: VecDeque::new(),
            kills,
            is_decided: false,
            record: None,
            incomplete: None,
        };
        if let Err(why) = this.receive_all(&offer, image) {
            return this.after_failure(why, offer.vms).map(Some);
        }
        Ok(Some(this))
    }

    fn receive_all(&mut self, offer: &TakeoverOffer, image: ImageIdentity) -> Result<(), TakeoverError> {
        if offer.record_bytes > 0 {
            let bytes = self.running.receive_bytes(offer.record_bytes)?;
            let record = FaultRecord::decode(&bytes, image.pages());
            self.record = Some(record.map_err(|why| TakeoverError::BadMessage(why.to_string()))?);
        }
        // The descriptors of all before the pages of any: so a VM can be killed if the running server ends meanwhile.
        for _ in 0..offer.vms {
            let head = self.receive_head(image)?;
            self.heads.push_back(head);
        }
        while let Some(TakenHead { uffds, state_bytes, .. }) = self.heads.front() {
            let states = self.running.receive_bytes(*state_bytes)?;
            let pages = parse_states(&states, uffds.len(), image.bytes)?;
            let TakenHead { socket, peer, uffds, .. } = self.heads.pop_front().expect("it is the first");
            self.vms.push(TakenVm { socket, peer, spaces: uffds.into_iter().zip(pages).collect() });
        }
        Ok(())
    }

    fn receive_head(&self, image: ImageIdentity) -> Result<TakenHead, TakeoverError> {
        let bad = |why: &str| TakeoverError::BadMessage(why.to_owned());
        let Packet { bytes, fds } = self.running.receive()?;
        let head = VmHead::parse(&bytes, fds.len(), image.bytes)?;
        let mut fds = fds.into_iter();
        let socket = fds.next().expect("they were counted");
        let alive = if head.has_process { fds.next() } else { None };
        let uffds: Result<Vec<Uffd>, OwnedFd> = fds.map(Uffd::accept).collect();
        let uffds = uffds.map_err(|_| bad("a descriptor that is no userfaultfd"))?;
        let peer = Peer::taken_over(head.process, alive);
        Ok(TakenHead { socket, peer, uffds, state_bytes: head.bytes })
    }

    /// Something went wrong. If the other has died, what has come as a whole is served all the same, and other VMs are
    /// killed, if so wanted; else it is refused.
    fn after_failure(mut self, why: TakeoverError, vms: u64) -> Result<Self, TakeoverError> {
        if !matches!(why, TakeoverError::HungUp) && !self.is_orphaned() {
            return Err(refuse(&self.running, why));
        }
        self.wait_until_decided(why)?;
        let heads = std::mem::take(&mut self.heads);
        self.kill_all(heads.into_iter().map(|head| (head.peer, head.uffds)).collect());
        self.incomplete = Some(TakeoverError::Incomplete { taken: self.vms.len() as u64, vms });
        Ok(self)
    }

    /// Tells the other that this server refuses.
    pub(super) fn refuse(self, why: &str) {
        let _ = self.running.send(&TakeoverAnswer::Refused(why.to_owned()).packet(), &[]);
    }

    /// Decides: from here on all VMs are this server's, or it must touch none.
    pub(super) fn commit(&mut self) -> Result<(), TakeoverError> {
        if self.incomplete.is_none() {
            if self.running.is_ending() {
                return Err(TakeoverError::Ending);
            }
            if let Err(why) = self.running.send(&TakeoverAnswer::Taken.packet(), &[]) {
                self.wait_until_decided(why)?;
            }
        }
        self.is_decided = true;
        Ok(())
    }

    /// All VMs are served here: the other lets go of what it has of them.
    pub(super) fn announce_serving(self) {
        let _ = self.running.send(&TakeoverAnswer::Serving.packet(), &[]); // it may be no more
    }

    /// Whether the other is no more, and did not go on before.
    fn is_orphaned(&self) -> bool {
        let is_readable = |fd: &OwnedFd| {
            poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timespec(Duration::ZERO))) != Ok(0)
        };
        // In this order: the event outlives its process.
        is_readable(&self.process) && !is_readable(&self.resumed)
    }

    /// Kills VMs that no server serves, if so wanted. Their memory is let go when they are no more, or they would read
    /// zeros.
    fn kill_all(&self, vms: Vec<(Peer, Vec<Uffd>)>) {
        if self.kills {
            let until = Instant::now() + KILLED_MAX;
            let killed = vms.iter().filter(|(peer, _)| peer.kill()).collect::<Vec<_>>();
            killed.iter().for_each(|(peer, _)| peer.wait_for_its_end(until));
        }
    }

    /// The other takes no packet any more: it is no more, and all is this server's; or it goes on, which is `why`.
    fn wait_until_decided(&self, why: TakeoverError) -> Result<(), TakeoverError> {
        let is_resumed = || {
            let mut fds = [PollFd::new(&self.resumed, PollFlags::IN)];
            let waited = poll(&mut fds, Some(&timespec(Duration::ZERO)));
            // Where the kernel cannot tell, the other may be serving.
            waited != Ok(0)
        };
        loop {
            let mut fds =
                vec![PollFd::new(&self.resumed, PollFlags::IN), PollFd::new(&self.process, PollFlags::IN)];
            fds.extend(self.running.ending().map(|ending| PollFd::from_borrowed_fd(ending, PollFlags::IN)));
            let waited = poll(&mut fds, None);
            let is_told = fds[..2].iter().any(|fd| !fd.revents().is_empty());
            match waited {
                Ok(_) if !is_told => return Err(TakeoverError::Ending),
                Err(Errno::INTR) => {}
                Err(error) => return Err(TakeoverError::Socket(error.into())),
                // The event outlives its process, so what that has rung is seen now.
                Ok(_) if is_resumed() => return Err(why),
                Ok(_) => return Ok(()),
            }
        }
    }
}

impl Drop for Succession {
    /// A server that cannot take over after all, from one that is no more.
    fn drop(&mut self) {
        if !self.is_decided && self.is_orphaned() {
            let (heads, vms) = (std::mem::take(&mut self.heads), std::mem::take(&mut self.vms));
            let heads = heads.into_iter().map(|head| (head.peer, head.uffds));
            let whole =
                vms.into_iter().map(|vm| (vm.peer, vm.spaces.into_iter().map(|(uffd, _)| uffd).collect()));
            self.kill_all(heads.chain(whole).collect());
        }
    }
}

fn refuse(running: &PacketSocket, why: TakeoverError) -> TakeoverError {
    if !matches!(why, TakeoverError::Refused(_)) {
        let _ = running.send(&TakeoverAnswer::Refused(why.to_string()).packet(), &[]);
    }
    why
}

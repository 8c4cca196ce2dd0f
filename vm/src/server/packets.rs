//! Packets: how two servers talk while one hands its VMs to the other: whole packets, with descriptors, in their order.
//!
//! ```text
//!   send      waits until there is room, PACKET_WAIT at most      descriptors come with the packet that they go with
//!   receive   waits until one comes                               one that is cut, or lost a descriptor, is an error
//!   shut      nothing more comes from then on: what is in the queue has been said, and what is not never will be
//! ```
//!
//! The kernel puts a packet into the other's queue, or refuses it, under the lock that a shutdown takes. So after
//! [`PacketSocket::shut`] both sides agree on which packets were sent: those of the queue, and no other.
//!
//! The peer is a process of the same user, which is trusted not to send descriptors that hang in their close.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};

use super::timespec;
use crate::takeover::{PACKET_BYTES, TakeoverError, VM_DESCRIPTORS_MAX};

/// How long a packet may take to be sent or to come.
pub(super) const PACKET_WAIT: Duration = Duration::from_secs(10);

pub(super) struct Packet {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// A connection to another server.
pub(super) struct PacketSocket {
    socket: OwnedFd,
    /// Readable when no wait is to go on.
    ending: Option<Arc<OwnedFd>>,
    /// When all that is said has to have been said.
    bound: Option<Instant>,
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn of_errno(errno: Errno) -> TakeoverError {
    match errno {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => TakeoverError::HungUp,
        other => TakeoverError::Socket(other.into()),
    }
}

impl PacketSocket {
    pub(super) fn new(socket: OwnedFd, ending: Option<Arc<OwnedFd>>) -> Self {
        Self { socket, ending, bound: None }
    }

    /// Gives all packets to come this long, all together.
    pub(super) fn set_bound(&mut self, all: Duration) {
        self.bound = Some(Instant::now() + all);
    }

    /// Each packet alone has its time from here on.
    pub(super) fn clear_bound(&mut self) {
        self.bound = None;
    }

    /// Whether the other end is closed.
    pub(super) fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&timespec(Duration::ZERO))).is_ok_and(|ready| ready > 0)
    }

    pub(super) fn ending(&self) -> Option<BorrowedFd<'_>> {
        self.ending.as_ref().map(|ending| ending.as_fd())
    }

    /// Whether no wait is to go on.
    pub(super) fn is_ending(&self) -> bool {
        let Some(ending) = &self.ending else { return false };
        poll(&mut [PollFd::new(ending, PollFlags::IN)], Some(&timespec(Duration::ZERO))) != Ok(0)
    }

    fn wait(&self, events: PollFlags, until: Instant) -> Result<(), TakeoverError> {
        let until = self.bound.map_or(until, |bound| bound.min(until));
        loop {
            let mut fds = vec![PollFd::new(&self.socket, events)];
            fds.extend(self.ending.iter().map(|ending| PollFd::new(ending, PollFlags::IN)));
            let left = until.saturating_duration_since(Instant::now());
            match poll(&mut fds, Some(&timespec(left))) {
                Ok(0) => return Err(TakeoverError::Late),
                Ok(_) if fds[1..].iter().any(|ending| !ending.revents().is_empty()) => {
                    return Err(TakeoverError::Ending);
                }
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(TakeoverError::Socket(error.into())),
            }
        }
    }

    pub(super) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), TakeoverError> {
        let until = Instant::now() + PACKET_WAIT;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(VM_DESCRIPTORS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "more than a packet has");
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                // A packet is sent as a whole.
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, until)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(of_errno(error)),
            }
        }
    }

    /// In as many packets as it needs; none, if there are no bytes.
    pub(super) fn send_bytes(&self, bytes: &[u8]) -> Result<(), TakeoverError> {
        bytes.chunks(PACKET_BYTES).try_for_each(|chunk| self.send(chunk, &[]))
    }

    pub(super) fn receive(&self) -> Result<Packet, TakeoverError> {
        self.receive_within(PACKET_WAIT)
    }

    pub(super) fn receive_within(&self, at_most: Duration) -> Result<Packet, TakeoverError> {
        let until = Instant::now() + at_most;
        loop {
            match self.receive_now() {
                Err(TakeoverError::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::IN | PollFlags::RDHUP, until)?;
                }
                Err(TakeoverError::Socket(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return received,
            }
        }
    }

    fn receive_now(&self) -> Result<Packet, TakeoverError> {
        let mut bytes = vec![0; PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(VM_DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut into = [IoSliceMut::new(&mut bytes)];
        let received =
            rustix::net::recvmsg(&self.socket, &mut into, &mut control, flags).map_err(of_errno)?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(TakeoverError::Socket(io::Error::other(
                "a descriptor could not be received; raise the limit of open files (`ulimit -n`)",
            )));
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(TakeoverError::BadMessage(format!("a packet of more than {PACKET_BYTES} bytes")));
        }
        if received.bytes == 0 {
            return Err(TakeoverError::HungUp);
        }
        bytes.truncate(received.bytes);
        Ok(Packet { bytes, fds })
    }

    /// Receives `count` bytes, in as many packets as they come in. No room is made for bytes that do not come.
    pub(super) fn receive_bytes(&self, count: u64) -> Result<Vec<u8>, TakeoverError> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < count {
            let packet = self.receive()?;
            if !packet.fds.is_empty() || (bytes.len() + packet.bytes.len()) as u64 > count {
                return Err(TakeoverError::BadMessage("more than was announced".to_owned()));
            }
            bytes.extend_from_slice(&packet.bytes);
        }
        Ok(bytes)
    }

    /// Lets nothing more come, and returns the first packet that had come before.
    pub(super) fn shut(&self) -> Option<Packet> {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
        loop {
            match self.receive_now() {
                Err(TakeoverError::Socket(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return received.ok(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> [PacketSocket; 2] {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
        [one, other].map(|socket| PacketSocket::new(socket, None))
    }

    #[test]
    fn packets_keep_their_bounds_and_their_descriptors() {
        let [one, other] = pair();
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        one.send(b"first", &[reader.as_fd(), reader.as_fd()]).expect("it fits");
        one.send(b"second", &[]).expect("it fits");
        one.send_bytes(&vec![7; PACKET_BYTES + 1]).expect("it fits");
        let first = other.receive().expect("it was sent");
        assert_eq!((&first.bytes[..], first.fds.len()), (&b"first"[..], 2));
        assert_eq!(other.receive().expect("it was sent").bytes, b"second");
        assert_eq!(
            other.receive_bytes(PACKET_BYTES as u64 + 1).expect("it was sent").len(),
            PACKET_BYTES + 1
        );
        one.send(b"more than was announced", &[]).expect("it fits");
        assert!(matches!(other.receive_bytes(5), Err(TakeoverError::BadMessage(_))));
        drop(one);
        assert!(matches!(other.receive(), Err(TakeoverError::HungUp)));
        assert!(matches!(other.send(b"nobody reads it", &[]), Err(TakeoverError::HungUp)));
    }

    #[test]
    fn a_shut_socket_has_the_packets_that_were_sent_before_and_gets_no_other() {
        let [one, other] = pair();
        assert!(!one.has_hung_up());
        one.send(b"before", &[]).expect("it fits");
        assert_eq!(other.shut().expect("it had come").bytes, b"before");
        assert!(matches!(one.send(b"behind", &[]), Err(TakeoverError::HungUp)));
        assert!(other.shut().is_none());
        drop(other);
        assert!(one.has_hung_up());
    }

    #[test]
    fn packets_without_a_bound_for_all_have_their_own_time() {
        let [mut one, other] = pair();
        one.set_bound(Duration::ZERO);
        assert!(matches!(one.receive(), Err(TakeoverError::Late)));
        one.clear_bound();
        let closes = std::thread::spawn(move || drop(other));
        assert!(matches!(one.receive(), Err(TakeoverError::HungUp)));
        closes.join().expect("it does not panic");
    }

    #[test]
    fn a_wait_ends_when_the_server_does() {
        let ending = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).expect("a descriptor");
        let [one, _other] = pair();
        let one = PacketSocket { ending: Some(Arc::new(ending)), ..one };
        assert!(matches!(one.receive(), Err(TakeoverError::Ending)));
    }
}

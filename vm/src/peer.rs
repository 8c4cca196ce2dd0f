//! Peer: the other end of a connection: its process, its messages, and its end.
//!
//! ```text
//!   connect            the kernel says which process that was; a process descriptor of it tells when it is no more
//!   bytes, descriptors in as many pieces as the stream likes, until the message is whole; bounded
//!   given up           SIGKILL by the process descriptor, so that no other process is ever meant
//! ```
//!
//! **A receipt may wait.** The close of a peer's descriptor (a file of a file system that hangs, a socket that lingers)
//! may wait for as long as its maker likes; so may `recvmsg`, which drops in the calling thread what finds no room, and
//! the close of a socket in which one lies unread. Therefore only the thread of that connection receives, drains and
//! closes here; see [`server`](super::server). A descriptor's kind is read from `/proc`, which asks no file system.
//!
//! The process is the one that **connected**. If it connected on behalf of a VMM, that VMM's own end is noticed when
//! the kernel reports it in answer to a fault.
//!
//! Not an invariant: that there is a process descriptor. Without one, the end of the connection is the peer's end, and
//! no process is killed.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::PeerError;
use crate::uffd::Uffd;
use quinion::internals::sys::peer as sys;

use super::message::{BadMessage, DESCRIPTORS_MAX, MESSAGE_BYTES_MAX, ParseStep, parse};

/// The most pieces in which a message may come.
const PIECES_MAX: usize = 256;

#[derive(Debug)]
pub(super) struct Peer {
    pid: Option<Pid>,
    alive: Option<OwnedFd>,
}

impl Peer {
    /// The peer of a connection; and why its process cannot be watched, if this process is short of something. (A peer
    /// that ended already has no process to watch.)
    pub(super) fn of(socket: BorrowedFd<'_>) -> (Self, Option<Errno>) {
        let pid = sys::process(socket).and_then(Pid::from_raw);
        let by_number = || {
            let Some(pid) = pid else { return Err(Errno::SRCH) };
            let alive = pidfd_open(pid, PidfdFlags::empty())?;
            // If it ended before this open, the number may be another's by now; its connection has ended, too.
            if has_hung_up(socket) { Err(Errno::SRCH) } else { Ok(alive) }
        };
        let alive = match sys::descriptor(socket) {
            Err(libc::ENOPROTOOPT) => by_number(), // an older kernel
            alive => alive.map_err(Errno::from_raw_os_error),
        };
        let is_short = |error: &Errno| matches!(*error, Errno::MFILE | Errno::NFILE | Errno::NOMEM);
        let unknown = alive.as_ref().err().copied().filter(is_short);
        (Self { pid, alive: alive.ok() }, unknown)
    }

    /// As another server knows it, by its number and by a descriptor of the process.
    pub(super) fn taken_over(process: u32, alive: Option<OwnedFd>) -> Self {
        Self { pid: process.try_into().ok().and_then(Pid::from_raw), alive }
    }

    /// 0 if that is not known.
    pub(super) fn process(&self) -> u32 {
        self.pid.map_or(0, |pid| pid.as_raw_nonzero().get().unsigned_abs())
    }

    pub(super) fn alive(&self) -> Option<BorrowedFd<'_>> {
        self.alive.as_ref().map(AsFd::as_fd)
    }

    /// Whether it was killed, or was dead already.
    pub(super) fn kill(&self) -> bool {
        match self.alive() {
            Some(alive) => {
                matches!(pidfd_send_signal(alive, Signal::KILL), Ok(()) | Err(Errno::SRCH))
            }
            None => false,
        }
    }

    pub(super) fn wait_for_its_end(&self, until: Instant) {
        if let Some(alive) = self.alive() {
            let _ = wait_for(alive, PollFlags::IN, until);
        }
    }
}

pub(super) fn wait_for(fd: BorrowedFd<'_>, what: PollFlags, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
        let at_most = Timespec { tv_sec: seconds, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::from_borrowed_fd(fd, what)], Some(&at_most)) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Whether the process of any of them is no more; or, if that is not known, whether it has hung up.
pub(super) fn has_one_ended<'a>(peers: impl Iterator<Item = (&'a Peer, BorrowedFd<'a>)>) -> bool {
    let ends = peers.map(|(peer, socket)| match peer.alive() {
        Some(alive) => PollFd::from_borrowed_fd(alive, PollFlags::IN),
        // `HUP` is always told. (`RDHUP` is also said of a socket whose reading end this process has shut.)
        None => PollFd::from_borrowed_fd(socket, PollFlags::empty()),
    });
    let mut fds: Vec<PollFd<'a>> = ends.collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ended| ended > 0)
}

fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

#[derive(Debug)]
pub(super) struct Handshake {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// Pieces that came: each costs a look at all of them.
    pieces: usize,
    /// Whether it was given the image, and is to send its regions now.
    pub(super) has_image: bool,
    /// Whether it has said its regions, and no descriptor came with them.
    pub(super) lacks_descriptor: bool,
}

impl Handshake {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::new(), fds: Vec::new(), pieces: 0, has_image: false, lacks_descriptor: false }
    }

    /// Does not wait for more.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>) -> Result<ParseStep, PeerError> {
        loop {
            let before = self.fds.len();
            match self.receive_piece(socket) {
                Ok(0) if self.fds.len() == before => return Err(PeerError::HungUp),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(ParseStep::Unfinished),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(PeerError::Socket(error)),
            }
            self.pieces += 1;
            if self.fds.len() > DESCRIPTORS_MAX {
                return Err(PeerError::TooManyDescriptors);
            }
            if self.pieces > PIECES_MAX {
                return Err(PeerError::TooManyPieces);
            }
            match parse(&self.bytes)? {
                ParseStep::Unfinished => {}
                // The descriptor may come behind the words.
                ParseStep::Regions(_) if self.fds.is_empty() => self.lacks_descriptor = true,
                said => {
                    self.bytes.clear();
                    return Ok(said);
                }
            }
        }
    }

    /// Takes the descriptors that have arrived and were not read, and shuts the socket for more. So when the peer is
    /// refused, each of its descriptors was either found here, or its send fails.
    pub(super) fn receive_rest(&mut self, socket: BorrowedFd<'_>) {
        // One that is gone has nothing more to say.
        let _ = rustix::net::shutdown(socket, Shutdown::Read);
        for _ in 0..PIECES_MAX {
            self.bytes.clear();
            let before = self.fds.len();
            match self.receive_piece(socket) {
                Ok(0) if self.fds.len() == before => return,
                Ok(_) if self.fds.len() > DESCRIPTORS_MAX => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn receive_piece(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        // One more than is allowed, of both, to see that it is too much.
        let capacity = MESSAGE_BYTES_MAX + 1 - self.bytes.len().min(MESSAGE_BYTES_MAX);
        let mut piece = vec![0; capacity];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut piece)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) && self.fds.len() <= DESCRIPTORS_MAX {
            // Some were lost: there were more of them, or this process may not have so many open.
            return Err(io::Error::other(
                "a descriptor could not be received; raise the limit of open files",
            ));
        }
        self.bytes.extend_from_slice(&piece[..received.bytes]);
        Ok(received.bytes)
    }

    /// The userfaultfds among the descriptors that came, so many at most, for the caller. The others stay.
    pub(super) fn take_userfaultfds(&mut self, at_most: usize) -> Vec<Uffd> {
        let (mut uffds, mut others) = (Vec::new(), Vec::new());
        for fd in std::mem::take(&mut self.fds) {
            match if uffds.len() < at_most { Uffd::accept(fd) } else { Err(fd) } {
                Ok(uffd) => uffds.push(uffd),
                Err(fd) => others.push(fd),
            }
        }
        self.fds = others;
        uffds
    }
}

/// Lets nothing more come, and closes descriptors that were not read, so that the close of the socket does not wait.
/// This call may wait for as long as the peer likes.
pub(super) fn drain(socket: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(socket, Shutdown::Read);
    let mut rest = Handshake::new();
    // Behind the shutdown nothing is added, so this ends.
    loop {
        rest.bytes.clear();
        match rest.receive_piece(socket) {
            Ok(0) if rest.fds.is_empty() => return,
            // A descriptor for which there was no room is this process's error, and has no number.
            Err(error) if error.raw_os_error().is_some() && error.kind() != io::ErrorKind::Interrupted => {
                return;
            }
            _ => rest.fds.clear(),
        }
    }
}

/// Sends a message to a peer, if it listens; waits for nothing.
pub(super) fn send_message(
    socket: BorrowedFd<'_>,
    text: &str,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, flags)?;
    if sent == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

pub(super) fn refusal(wrong: &PeerError) -> String {
    format!("{}\n", serde_json::json!({ "error": wrong.to_string() }))
}

impl From<BadMessage> for PeerError {
    fn from(wrong: BadMessage) -> Self {
        Self::Message(wrong)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_message_is_received_in_any_pieces() {
        let (mut theirs, ours) = UnixStream::pair().expect("a pair");
        let mut greeting = Handshake::new();
        assert!(matches!(greeting.receive(ours.as_fd()), Ok(ParseStep::Unfinished)));
        let text = br#"[{"base_host_virt_addr":4096,"size":4096,"offset":0,"page_size":4096}]"#;
        for piece in text.chunks(7) {
            theirs.write_all(piece).expect("it fits");
            assert!(matches!(greeting.receive(ours.as_fd()), Ok(ParseStep::Unfinished)));
        }
        // The words are whole, and their descriptor follows.
        let file = tempfile::tempfile().expect("a file");
        send_message(theirs.as_fd(), " ", Some(file.as_fd())).expect("it fits");
        assert!(
            matches!(greeting.receive(ours.as_fd()), Ok(ParseStep::Regions(regions)) if regions.len() == 1)
        );
        assert_eq!(greeting.fds.len(), 1);
    }

    #[test]
    fn too_much_of_anything_is_refused() {
        let (mut theirs, ours) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        let mut greeting = Handshake::new();
        for _ in 0..DESCRIPTORS_MAX {
            send_message(theirs.as_fd(), " ", Some(file.as_fd())).expect("it fits");
            assert!(matches!(greeting.receive(ours.as_fd()), Ok(ParseStep::Unfinished)));
        }
        send_message(theirs.as_fd(), " ", Some(file.as_fd())).expect("it fits");
        assert!(matches!(greeting.receive(ours.as_fd()), Err(PeerError::TooManyDescriptors)));

        let mut greeting = Handshake::new();
        theirs.write_all(&vec![b' '; MESSAGE_BYTES_MAX + 1]).expect("it fits");
        let refused = greeting.receive(ours.as_fd());
        assert!(matches!(refused, Err(PeerError::Message(BadMessage::TooLong))), "{refused:?}");
    }

    #[test]
    fn an_end_in_the_middle_is_reported() {
        let (mut theirs, ours) = UnixStream::pair().expect("a pair");
        theirs.write_all(b"[{").expect("it fits");
        drop(theirs);
        let refused = Handshake::new().receive(ours.as_fd());
        assert!(matches!(refused, Err(PeerError::HungUp)), "{refused:?}");
    }

    #[test]
    fn unread_bytes_are_found_and_nothing_comes_behind_them() {
        let (mut theirs, ours) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        theirs.write_all(b"nonsense\n").expect("it fits");
        send_message(theirs.as_fd(), " ", Some(file.as_fd())).expect("it fits");
        let mut greeting = Handshake::new();
        greeting.receive_rest(ours.as_fd());
        assert_eq!(greeting.fds.len(), 1);
        assert!(send_message(theirs.as_fd(), " ", Some(file.as_fd())).is_err(), "nobody would read it");
        assert!(greeting.take_userfaultfds(DESCRIPTORS_MAX).is_empty());
        assert_eq!(greeting.fds.len(), 1, "what is none stays open");
    }

    #[test]
    fn a_drained_socket_holds_no_descriptor_and_gets_none() {
        let (theirs, ours) = UnixStream::pair().expect("a pair");
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        for _ in 0..20 {
            send_message(theirs.as_fd(), " ", Some(writer.as_fd())).expect("it fits");
        }
        drop(writer);
        drain(ours.as_fd());
        assert_eq!(std::io::Read::read(&mut reader, &mut [0]).expect("an end"), 0, "a writer is left");
        assert!(send_message(theirs.as_fd(), " ", Some(reader.as_fd())).is_err(), "nobody would read it");
    }

    #[test]
    fn the_peer_is_the_process_that_connected() {
        let (_theirs, ours) = UnixStream::pair().expect("a pair");
        let (peer, _) = Peer::of(ours.as_fd());
        assert_eq!(peer.process(), std::process::id());
    }
}

//! Peer connection: connections of other processes, and the descriptors that come by them.
//!
//! ```text
//!   event loop    looks at a message without taking it (MSG_PEEK): is there a descriptor with it?
//!               no: takes it        yes: leaves it where it is; the connection goes to a worker
//!   worker    has the kernel show it the descriptor without taking the message, and looks at its mount
//!   the end   nothing lies unread: closed here           something does: closed in its sender's queue
//! ```
//!
//! The close of a sent descriptor may wait for as long as its maker likes, as of a socket that lingers. So may the
//! receipt of a message (descriptors that find no room are closed by the kernel, in the calling thread), and the close
//! of a connection in which one lies unread. So a message that has a descriptor is never taken, and calls that may wait
//! are made in a queue ([`SerialQueues`]) of the process that connected. While the queues are full, no process is let
//! in.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, Shutdown, recvmsg, sockopt,
};

use crate::sys::serial_queues::{QueueKey, SerialQueues};
use crate::viewer::handshake::{HELLO_BYTES, MESSAGE_MAX};
use crate::viewer::sys::Errno;
use quinion::internals::sys::peer::ProcessName;

pub(super) const HELLO_MAX: Duration = Duration::from_secs(1);

const PEEKS_MAX: usize = 3;

/// A connection of another process. Dropping it does not wait.
#[derive(Debug)]
pub(super) struct PeerConnection {
    socket: Option<OwnedFd>,
    queues: SerialQueues,
    key: QueueKey,
    pub(super) since: Instant,
}

pub(super) struct PeekedMessage {
    bytes: [u8; MESSAGE_MAX + 1],
    count: usize,
    pub(super) has_descriptors: bool,
}

impl PeekedMessage {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.count]
    }
}

impl PeerConnection {
    pub(super) fn new(socket: OwnedFd, queues: &SerialQueues) -> Self {
        let key = QueueKey::Sender(ProcessName::of_peer(socket.as_fd()));
        Self { socket: Some(socket), queues: queues.clone(), key, since: Instant::now() }
    }

    /// For questions to the kernel about the process: the queue of its own messages may be stuck.
    pub(super) fn process_key(&self) -> QueueKey {
        match self.key {
            QueueKey::Sender(process) => QueueKey::Process(process),
            other => other,
        }
    }

    pub(super) fn peek(&self) -> io::Result<Option<PeekedMessage>> {
        let mut bytes = [0; MESSAGE_MAX + 1];
        match peek(self.as_fd(), &mut bytes) {
            Ok((count, flags)) => {
                Ok(Some(PeekedMessage { bytes, count, has_descriptors: flags.contains(ReturnFlags::CTRUNC) }))
            }
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn take(&self) {
        let _ = rustix::net::recv(self, &mut [0; HELLO_BYTES], RecvFlags::DONTWAIT);
    }

    /// The descriptor that came with the first message, which stays there: so no close of this one is the last. Its
    /// close may wait ([`PeerConnection::close_in_queue`]). Does not wait.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = recvmsg(self, &mut [IoSliceMut::new(&mut [0; HELLO_BYTES])], &mut with, flags)
            .map_err(|error| Errno(error.raw_os_error()))?;
        // The space has room for one more than was asked for.
        let mut shown: Vec<OwnedFd> = Vec::new();
        for message in with.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                shown.extend(files);
            }
        }
        match shown.pop() {
            Some(descriptor) if shown.is_empty() && !received.flags.contains(ReturnFlags::CTRUNC) => {
                Ok(descriptor)
            }
            // More than one, or this process has too many open.
            last => {
                last.into_iter().chain(shown).for_each(|descriptor| self.close_in_queue(descriptor));
                Err(Errno::BADF)
            }
        }
    }

    pub(super) fn close_in_queue(&self, descriptor: OwnedFd) {
        self.queues.close(self.key, descriptor);
    }
}

fn peek(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, ReturnFlags), rustix::io::Errno> {
    let mut nothing = RecvAncillaryBuffer::default();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut nothing, flags)?;
    Ok((received.bytes, received.flags))
}

impl AsFd for PeerConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("it is taken when it is dropped").as_fd()
    }
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if !is_empty(&socket) {
            self.queues.close(self.key, socket);
        }
    }
}

/// Whether no message lies in the connection, nor ever will. A message of no bytes looks like the end, and another
/// may lie behind it; but the kernel marks each message, as its sender's credentials found no place
/// ([`ReturnFlags::CTRUNC`]).
fn is_empty(socket: &OwnedFd) -> bool {
    if sockopt::set_socket_passcred(socket, true).is_err() {
        return false;
    }
    // Behind this nothing more comes, so a connection that is found empty stays so.
    let _ = rustix::net::shutdown(socket, Shutdown::Read);
    // A standing error is returned first, and once: the other side may have closed before it read all.
    (0..PEEKS_MAX).any(|_| match peek(socket.as_fd(), &mut [0]) {
        Ok((count, flags)) => count == 0 && !flags.contains(ReturnFlags::CTRUNC),
        Err(error) => error == rustix::io::Errno::AGAIN,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair,
    };

    use super::*;

    fn pair() -> (OwnedFd, PeerConnection) {
        let flags = SocketFlags::CLOEXEC;
        let (theirs, ours) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (theirs, PeerConnection::new(ours, &SerialQueues::default()))
    }

    fn send(socket: &OwnedFd, bytes: &[u8], descriptor: impl AsFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        assert!(with.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(socket, &[IoSlice::new(bytes)], &mut with, SendFlags::NOSIGNAL).unwrap();
    }

    /// A socket whose last close waits for some seconds, as its sent bytes are not taken.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(20))).unwrap();
        stream.set_nonblocking(true).unwrap();
        while io::Write::write(&mut &stream, &[0; 1 << 16]).is_ok() {}
        (stream, other)
    }

    #[test]
    fn a_message_is_seen_before_it_is_taken_and_its_descriptor_comes_with_it() {
        let (theirs, ours) = pair();
        assert!(ours.peek().unwrap().is_none());
        let (reader, writer) = std::io::pipe().unwrap();
        send(&theirs, b"words", &writer);
        drop(writer);
        for _ in 0..3 {
            let message = ours.peek().unwrap().unwrap();
            assert!(message.has_descriptors && message.bytes() == b"words");
        }
        let received = ours.descriptor().unwrap();
        io::Write::write_all(&mut File::from(received), b"word").unwrap();
        assert_eq!(io::Read::read(&mut &reader, &mut [0; 9]).unwrap(), 4, "it is of something else");
        drop(ours);
        assert_eq!(io::Read::read(&mut &reader, &mut [0]).unwrap(), 0, "a descriptor of it is left");
    }

    #[test]
    fn more_descriptors_than_one_are_none_and_are_closed() {
        for count in [2, 3, 200] {
            let (theirs, ours) = pair();
            let (reader, writer) = std::io::pipe().unwrap();
            let descriptors = vec![writer.as_fd(); count];
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
            let mut with = SendAncillaryBuffer::new(&mut space);
            assert!(with.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&theirs, &[IoSlice::new(b"words")], &mut with, SendFlags::NOSIGNAL).unwrap();
            drop(writer);
            assert_eq!(ours.descriptor().map(drop), Err(Errno::BADF), "{count}");
            drop(ours);
            assert_eq!(io::Read::read(&mut &reader, &mut [0]).unwrap(), 0, "{count}: one of them is left");
        }
    }

    /// 1. A process sends a socket that lingers, and closes it.
    /// 2. The thread that drops the connection waits for as long as it lingers.
    #[test]
    fn dropping_a_connection_with_a_lingering_socket_in_it_does_not_wait() {
        drop_with_a_lingering_socket(&[], b"words");
    }

    #[test]
    fn a_lingering_socket_behind_empty_messages_or_with_one_is_seen() {
        drop_with_a_lingering_socket(&[b"", b""], b"words");
        drop_with_a_lingering_socket(&[b""], b"");
        drop_with_a_lingering_socket(&[], b"");
    }

    #[test]
    fn an_empty_connection_is_closed_at_once_and_one_with_messages_in_the_queue() {
        for (messages, waiting) in [(0, true), (1, false), (2, false)] {
            let (theirs, ours) = pair();
            for _ in 0..messages {
                rustix::net::send(&theirs, b"", SendFlags::NOSIGNAL).unwrap();
            }
            assert_eq!(is_empty(ours.socket.as_ref().unwrap()), waiting, "{messages}");
            drop(theirs);
            assert_eq!(is_empty(ours.socket.as_ref().unwrap()), waiting, "{messages}, and the end");
        }
    }

    fn drop_with_a_lingering_socket(before: &[&[u8]], words: &[u8]) {
        let (theirs, ours) = pair();
        let (stream, other) = lingering();
        for bytes in before {
            rustix::net::send(&theirs, bytes, SendFlags::NOSIGNAL).unwrap();
        }
        send(&theirs, words, &stream);
        drop(stream);
        let queues = ours.queues.clone();
        let begun = Instant::now();
        ours.peek().unwrap();
        drop(ours);
        assert!(begun.elapsed() < Duration::from_secs(10), "it waited for the socket to linger");
        assert_eq!(queues.waiting(), 1, "nobody waits for it: the test shows nothing");
        drop(other); // what it has not taken resets the connection, and that ends the close
    }
}

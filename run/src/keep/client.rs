//! Client: a connection to the owner of a kept cache, as the owner has it.
//!
//! ```text
//!   hear      peeks at the message without taking it (MSG_PEEK): did a descriptor come with it?
//!               no: takes so many bytes       yes: an error, and nothing is taken
//!   drop      closed in the queue of the process that connected
//! ```
//!
//! A client has no reason to send a descriptor. One may be of anything, and its close may wait for as long as its
//! sender likes; the kernel closes it in the thread that takes the message, or that closes the connection with the
//! message in it. So neither is done here ([`SerialQueues`]).
//!
//! A byte that was sent out of band is read in its place (`SO_OOBINLINE`): else the peek would skip it, and the read of
//! the bytes behind it would drop it, and the descriptor with it.
//!
//! Invariant: nothing here waits for a process that has connected.

use std::io::{self, IoSliceMut, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use quinion::internals::sys::peer::ProcessName;
use quinion_owner::internals::sys::serial_queues::{QueueKey, SerialQueues};
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, recv, recvmsg};

/// A connection. Dropping it does not block.
#[derive(Debug)]
pub struct ClientStream {
    stream: Option<UnixStream>,
    queues: SerialQueues,
    key: QueueKey,
}

impl ClientStream {
    /// One that has connected just now.
    pub fn new(stream: UnixStream, queues: &SerialQueues) -> Self {
        let key = QueueKey::Sender(ProcessName::of_peer(stream.as_fd()));
        Self { stream: Some(stream), queues: queues.clone(), key }
    }

    /// Makes all calls on it non-blocking, and all data come in order. To be called before the first read.
    pub fn prepare(&self) -> io::Result<()> {
        set_socket_oobinline(self, true)?;
        self.stream().set_nonblocking(true)
    }

    /// Reads a message, as much as fits; 0 bytes are the end.
    ///
    /// # Errors
    /// `WouldBlock`: nothing was said. `InvalidData`: a descriptor came with it; it was not taken.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut nothing = RecvAncillaryBuffer::default();
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let seen = recvmsg(self, &mut [IoSliceMut::new(bytes)], &mut nothing, flags)?;
        if seen.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a descriptor came with it"));
        }
        // No more than the peek saw: a descriptor may have come behind that.
        match seen.bytes {
            0 => Ok(0),
            count => Ok(recv(self, &mut bytes[..count], RecvFlags::DONTWAIT)?.0),
        }
    }

    /// Sends as much as finds room; returns how many bytes.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.stream().write(bytes)
    }

    /// Shuts down both directions.
    pub fn end(&self) {
        let _ = self.stream().shutdown(Shutdown::Both); // the other may have ended it before
    }

    fn stream(&self) -> &UnixStream {
        self.stream.as_ref().expect("it is taken when it is dropped")
    }
}

impl AsFd for ClientStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.queues.close(self.key, stream.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn pair() -> (UnixStream, ClientStream) {
        let (theirs, ours) = UnixStream::pair().expect("a pair");
        let ours = ClientStream::new(ours, &SerialQueues::default());
        ours.prepare().expect("it is a socket");
        (theirs, ours)
    }

    /// Sends bytes with a socket whose last close waits for a quarter of an hour; returns the other end of that.
    fn send_lingering(to: &UnixStream, bytes: &[u8], flags: SendFlags) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("it has one")).expect("it listens");
        let (other, _) = listener.accept().expect("somebody has connected");
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(1000))).expect("a socket");
        stream.set_nonblocking(true).expect("a socket");
        while (&stream).write(&[0; 1 << 16]).is_ok() {}
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = SendAncillaryBuffer::new(&mut space);
        let descriptors = [stream.as_fd()];
        assert!(with.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(to, &[IoSlice::new(bytes)], &mut with, flags | SendFlags::NOSIGNAL).expect("it is heard");
        other
    }

    #[track_caller]
    fn is_quick(since: Instant) {
        assert!(since.elapsed() < Duration::from_secs(200), "it waited for the socket to linger");
    }

    #[test]
    fn messages_arrive_in_order_and_then_the_end() {
        let (mut theirs, ours) = pair();
        let mut bytes = [0; 4];
        assert_eq!(ours.receive(&mut bytes).map_err(|error| error.kind()), Err(io::ErrorKind::WouldBlock));
        for word in [&b"one"[..], b"two", b"three"] {
            theirs.write_all(word).expect("it is heard");
        }
        drop(theirs);
        let mut received = Vec::new();
        loop {
            match ours.receive(&mut bytes).expect("it was said") {
                0 => break,
                count => received.extend_from_slice(&bytes[..count]),
            }
        }
        assert_eq!(received, b"onetwothree");
    }

    /// In front of all, behind something, and out of band: with that byte alone, or with more behind it.
    #[test]
    fn a_descriptor_is_not_taken_and_its_close_delays_no_thread() {
        for (before, flags, behind) in [
            ("", SendFlags::empty(), ""),
            ("before", SendFlags::empty(), ""),
            ("", SendFlags::OOB, ""),
            ("before", SendFlags::OOB, "behind"),
        ] {
            let (mut theirs, ours) = pair();
            theirs.write_all(before.as_bytes()).expect("it is heard");
            let other = send_lingering(&theirs, b"x", flags);
            theirs.write_all(behind.as_bytes()).expect("it is heard");
            let (begun, queues) = (Instant::now(), ours.queues.clone());
            let mut bytes = [0; 64];
            let mut received = 0;
            let error = loop {
                match ours.receive(&mut bytes) {
                    Ok(count) => received += count,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{before} {flags:?}: {error}");
            assert!(received <= before.len(), "something was taken with the descriptor, or behind it");
            drop((theirs, ours));
            is_quick(begun);
            while queues.waiting() == 0 {
                std::thread::yield_now();
            }
            drop(other); // what it has not taken resets the connection, and that ends the close
            while queues.waiting() > 0 {
                std::thread::yield_now();
            }
            is_quick(begun);
        }
    }

    #[test]
    fn a_connection_that_is_dropped_is_closed() {
        let (mut theirs, ours) = pair();
        ours.send(b"word").expect("there is room");
        drop(ours);
        let mut received = Vec::new();
        theirs.read_to_end(&mut received).expect("it ends");
        assert_eq!(received, b"word");
    }
}

//! Connect: becoming a viewer by way of the owner's socket, with the standard library.
//!
//! The object in a program does the same by system calls alone (`frontends/preload`). This is for programs that know
//! the library: the benchmark, and tests.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
    sockopt,
};

use quinion::internals::sys::peer;
use quinion::internals::units::EXTENT_SIZE;
use quinion_view::viewer::handshake::{
    DESCRIPTORS_MAX, DescriptorOffer, JoinReply, JoinRequest, NAME_TEXT_MAX, NameOffer, NameReply,
    WELCOME_BYTES,
};
use quinion_view::viewer::{Mapped, Viewer};

const ONE_VERSION: &str = "use one version of Quinion for the owner and its viewers";
const WELCOME_MAX: Duration = Duration::from_secs(10);

/// Joins the cache whose owner listens at `socket`, for as long as the process lives. Waits ten seconds at most.
///
/// # Errors
/// No process of this user listens there, or it refuses; the message says why. ECONNRESET, EPIPE: the owner has ended,
/// or closed the connection, before it answered.
pub fn connect(socket: &Path, hello: &JoinRequest) -> io::Result<Viewer> {
    connect_within(socket, hello, WELCOME_MAX)
}

/// Like [`connect`], but waits as long as `time` says, at most ten seconds.
///
/// # Errors
/// Those of [`connect`].
pub fn connect_within(socket: &Path, hello: &JoinRequest, time: Duration) -> io::Result<Viewer> {
    let until = Instant::now() + time.min(WELCOME_MAX);
    let end = reach(socket, until)?;
    net::send(&end, &hello.bytes(), SendFlags::NOSIGNAL)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut with = RecvAncillaryBuffer::new(&mut space);
    receive_reply(&end, &mut with, until)?;
    let files: Vec<OwnedFd> = with
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        })
        .flatten()
        .collect();
    let [arena, control, page, ..] = &files[..] else {
        return Err(io::Error::other("cannot view the cache: its owner sent no files; connect again"));
    };
    of_files([arena.as_fd(), control.as_fd(), page.as_fd()], hello.token)
}

/// Sends a descriptor for an attach that was answered by `TO_BE_SENT`. Returns the ticket. Waits ten seconds at most.
///
/// # Errors
/// Those of [`connect`]; this process views no cache there, or has sent too much that it did not ask for.
pub fn send_descriptor(socket: &Path, offer: &DescriptorOffer, descriptor: impl AsFd) -> io::Result<u32> {
    let until = Instant::now() + WELCOME_MAX;
    let end = reach(socket, until)?;
    send_with(&end, descriptor.as_fd(), &offer.bytes())?;
    Ok(receive_reply(&end, &mut RecvAncillaryBuffer::default(), until)?.viewer)
}

fn send_with(end: &OwnedFd, descriptor: BorrowedFd<'_>, message: &[u8]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    with.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(end, &[IoSlice::new(message)], &mut with, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The request of [`send_name`].
#[derive(Clone, Copy, Debug)]
pub struct NameRequest<'r> {
    /// The head of the message, with the cache's token.
    pub offer: NameOffer,
    /// The name of an object; or of a revision, if there is a descriptor.
    pub name: &'r [u8],
    /// A descriptor of the file whose revision is opened.
    pub descriptor: Option<BorrowedFd<'r>>,
    /// How long to wait for the ticket at most.
    pub time: Duration,
}

impl<'r> NameRequest<'r> {
    /// A request to open an object.
    pub fn of_object(offer: NameOffer, name: &'r [u8]) -> Self {
        Self { offer, name, descriptor: None, time: WELCOME_MAX }
    }
}

/// As [`send_descriptor`], for an open by a name.
///
/// # Errors
/// Those of [`send_descriptor`].
pub fn send_name(socket: &Path, request: &NameRequest<'_>) -> io::Result<SentName> {
    let until = Instant::now() + request.time.min(WELCOME_MAX);
    let end = reach(socket, until)?;
    let message = [&request.offer.bytes()[..], request.name].concat();
    match request.descriptor {
        Some(descriptor) => send_with(&end, descriptor, &message)?,
        None => drop(net::send(&end, &message, SendFlags::NOSIGNAL)?),
    }
    let ticket = receive_reply(&end, &mut RecvAncillaryBuffer::default(), until)?.viewer;
    Ok(SentName { ticket, end })
}

/// Maps the arena, the control file and the viewer's page, until the process ends.
///
/// # Errors
/// They cannot be mapped, or are not of one cache, or of another version.
pub fn of_files([arena, control, page]: [impl AsFd; 3], token: u64) -> io::Result<Viewer> {
    let maps = (map(arena, ProtFlags::READ)?, map(control, ProtFlags::READ)?);
    let page = map(page, ProtFlags::READ | ProtFlags::WRITE)?;
    // SAFETY: all three were mapped as a whole just now, and nothing unmaps them.
    unsafe { Viewer::attach(maps.0, maps.1, page, token) }.map_err(|why| {
        let text = "cannot view the cache: its files are not of this version";
        io::Error::other(format!("{text} ({why:?}); {ONE_VERSION}"))
    })
}
/// A name that the owner has: for one request.
#[derive(Debug)]
pub struct SentName {
    ticket: u32,
    end: OwnedFd,
}

impl SentName {
    /// The number by which the request names it.
    pub fn ticket(&self) -> u32 {
        self.ticket
    }

    /// The owner's reply to the name, once the request was answered: an error number or 0, and a text. Waits `time` at
    /// most, and no longer than ten seconds.
    ///
    /// # Errors
    /// Nothing came, or no such message.
    pub fn reply(self, time: Duration) -> io::Result<(u32, String)> {
        wait_readable(&self.end, Instant::now() + time.min(WELCOME_MAX))?;
        let mut bytes = vec![0; WELCOME_BYTES + NAME_TEXT_MAX + 1];
        let received = match net::recv(&self.end, &mut bytes[..], RecvFlags::empty()) {
            // The owner has closed its end, and the message with a descriptor lies there unread. That is told once;
            // the reply was sent before, and comes next.
            Err(rustix::io::Errno::CONNRESET) => net::recv(&self.end, &mut bytes[..], RecvFlags::empty())?.0,
            received => received?.0,
        };
        let (reply, text) = NameReply::of(&bytes[..received]).ok_or_else(|| {
            io::Error::other(format!("cannot open the name: the owner's answer is not known; {ONE_VERSION}"))
        })?;
        Ok((reply.error, String::from_utf8_lossy(text).into_owned()))
    }
}

fn wait_readable(end: &OwnedFd, until: Instant) -> io::Result<()> {
    loop {
        let left = left_until(until)?;
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&time)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {} // a signal ends a `poll`, whatever its handler says
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn left_until(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Only to an owner of this user. Where the kernel waits for room among those to be accepted, a stopped owner makes
/// none: so that is bounded, too.
fn reach(socket: &Path, until: Instant) -> io::Result<OwnedFd> {
    let end = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(socket)?;
    loop {
        sockopt::set_socket_timeout(&end, sockopt::Timeout::Send, Some(left_until(until)?))?;
        match net::connect(&end, &address) {
            Ok(()) => break,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {} // no room yet, or a signal
            Err(error) => return Err(error.into()),
        }
    }
    if peer::user(end.as_fd()) != Some(rustix::process::geteuid().as_raw()) {
        return Err(io::Error::other(
            "cannot view the cache: its socket is another user's; name the socket of an owner that you run",
        ));
    }
    Ok(end)
}

fn receive_reply(end: &OwnedFd, with: &mut RecvAncillaryBuffer<'_>, until: Instant) -> io::Result<JoinReply> {
    wait_readable(end, until)?;
    let mut bytes = [0; WELCOME_BYTES + 1];
    let received = recvmsg(end, &mut [IoSliceMut::new(&mut bytes)], with, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(rustix::io::Errno::CONNRESET.into()); // the owner ends, or has closed this connection for another
    }
    let welcome = JoinReply::of(&bytes[..received.bytes]).ok_or_else(|| {
        io::Error::other(format!("cannot view the cache: the owner's answer is not known; {ONE_VERSION}"))
    })?;
    match welcome.error {
        0 => Ok(welcome),
        error => Err(io::Error::from_raw_os_error(error as i32)),
    }
}

/// In large pages where possible; not in forked children, and not in cores.
fn map(file: impl AsFd, protection: ProtFlags) -> io::Result<Mapped> {
    let bytes = rustix::fs::fstat(&file)?.st_size as u64;
    let room = bytes as usize + EXTENT_SIZE;
    // SAFETY: fresh address space, of the kernel's choice, and the file over an aligned part of it.
    let base = unsafe {
        let reserved = mmap_anonymous(null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE)?;
        let aligned = reserved.byte_add(reserved.cast::<u8>().align_offset(EXTENT_SIZE));
        let base = mmap(aligned, bytes as usize, protection, MapFlags::SHARED | MapFlags::FIXED, file, 0)?;
        madvise(base, bytes as usize, Advice::LinuxDontFork)?;
        madvise(base, bytes as usize, Advice::LinuxDontDump)?;
        base
    };
    Ok(Mapped { base: NonNull::new(base.cast()).expect("nothing is mapped at 0"), bytes })
}

//! Socket: asking the owner of a cache for something, once, over a connection that is closed with the answer.
//!
//! ```text
//!   connect --> is the listener its own user? --hello, and a descriptor or none--> wait --> reply, and descriptors
//! ```
//!
//! Only the descriptors that came outlive the call.

use quinion_view::viewer::handshake::{DESCRIPTORS_MAX, JoinReply, WELCOME_BYTES};
use quinion_view::viewer::sys::{Errno, call, clock_millis, result};

use super::files::close;
use super::identity::effective_user;
use super::number;

/// Closed when this is dropped.
pub struct ReceivedDescriptors {
    numbers: [i32; DESCRIPTORS_MAX],
    count: usize,
}

impl ReceivedDescriptors {
    pub fn all(&self) -> [Option<i32>; DESCRIPTORS_MAX] {
        core::array::from_fn(|at| self.numbers[..self.count].get(at).copied())
    }
}

impl Drop for ReceivedDescriptors {
    fn drop(&mut self) {
        self.numbers[..self.count].iter().for_each(|&number| close(number));
    }
}

/// Closed when this is dropped.
struct OwnDescriptor(i32);

impl Drop for OwnDescriptor {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// The kernel's `struct sockaddr_un`.
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; 108],
}

/// The kernel's `struct ucred`.
#[repr(C)]
#[derive(Default)]
struct Credentials {
    process: i32,
    user: u32,
    group: u32,
}

/// The kernel's `struct msghdr`.
#[repr(C)]
struct MessageHeader {
    name: usize,
    name_len: u32,
    parts: usize,
    parts_len: usize,
    control: usize,
    control_len: usize,
    flags: i32,
}

impl MessageHeader {
    fn of(part: &[usize; 2]) -> Self {
        let parts = part.as_ptr() as usize;
        Self { name: 0, name_len: 0, parts, parts_len: 1, control: 0, control_len: 0, flags: 0 }
    }
}

/// The kernel's `struct cmsghdr`, and descriptors behind it.
#[repr(C)]
struct Control {
    len: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; DESCRIPTORS_MAX],
}

impl Control {
    const EMPTY: Self = Self { len: 0, level: 0, kind: 0, descriptors: [-1; DESCRIPTORS_MAX] };
}

const HEADER_BYTES: usize = core::mem::offset_of!(Control, descriptors);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JoinError {
    /// The owner has not answered in time, or there is no descriptor to ask by: the next try may succeed.
    Late,
    /// The owner refuses, or is not there.
    Refused,
}

/// Sends `hello`, with a descriptor or none, to the listener at `socket` (a path that ends with a zero), if that is
/// this process's own user. Returns its answer, unless it refuses, and the descriptors with it. Waits `millis`
/// milliseconds at most, and no system call of it longer.
pub fn send_hello(
    socket: &[u8; 108],
    hello: &[u8],
    descriptor: Option<i32>,
    millis: u32,
) -> Result<(JoinReply, ReceivedDescriptors), JoinError> {
    const AF_UNIX: usize = 1;
    const SOCK_SEQPACKET: usize = 5;
    const FLAGS: usize = 0o2000000 | 0o4000; // SOCK_CLOEXEC, SOCK_NONBLOCK
    const SOL_SOCKET: i32 = 1;
    const SO_PEERCRED: usize = 17;
    const SCM_RIGHTS: i32 = 1;
    const MSG_NOSIGNAL: usize = 0x4000;
    const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
    // 1 connect; an owner that has no room for one more does not make this thread wait
    // SAFETY: numbers only.
    let end = result(unsafe { call(number::SOCKET, [AF_UNIX, SOCK_SEQPACKET | FLAGS, 0, 0, 0, 0]) });
    let end = OwnDescriptor(end.map_err(|_| JoinError::Late)? as i32);
    let fd = end.0 as usize;
    let address = Address { family: AF_UNIX as u16, path: *socket };
    let at = core::ptr::from_ref(&address) as usize;
    // SAFETY: the address has the size that the kernel is told of.
    let connected = result(unsafe { call(number::CONNECT, [fd, at, size_of::<Address>(), 0, 0, 0]) });
    connected.map_err(|error| if error == Errno::AGAIN { JoinError::Late } else { JoinError::Refused })?;
    // 2 is it this process's own user?
    let (mut peer, mut len) = (Credentials::default(), size_of::<Credentials>() as u32);
    let [to, length] = [&raw mut peer as usize, &raw mut len as usize];
    // SAFETY: the kernel writes at most the size that it is told of.
    result(unsafe { call(number::GETSOCKOPT, [fd, SOL_SOCKET as usize, SO_PEERCRED, to, length, 0]) })
        .map_err(|_| JoinError::Refused)?;
    if peer.user != effective_user() {
        return Err(JoinError::Refused);
    }
    let mut control =
        Control { len: HEADER_BYTES + 4, level: SOL_SOCKET, kind: SCM_RIGHTS, ..Control::EMPTY };
    control.descriptors[0] = descriptor.unwrap_or(-1);
    let part = [hello.as_ptr() as usize, hello.len()];
    let mut message = MessageHeader::of(&part);
    if descriptor.is_some() {
        // The length of one descriptor's message, as the kernel aligns it.
        (message.control, message.control_len) = (&raw const control as usize, HEADER_BYTES + 8);
    }
    // SAFETY: the kernel reads so many bytes, which are there.
    result(unsafe { call(number::SENDMSG, [fd, &raw const message as usize, MSG_NOSIGNAL, 0, 0, 0]) })
        .map_err(|_| JoinError::Refused)?;
    if !becomes_readable(end.0, millis) {
        return Err(JoinError::Late);
    }
    let mut welcome = [0u8; WELCOME_BYTES + 1];
    control = Control::EMPTY;
    let part = [welcome.as_mut_ptr() as usize, welcome.len()];
    message = MessageHeader::of(&part);
    (message.control, message.control_len) = (&raw mut control as usize, size_of::<Control>());
    // SAFETY: the kernel writes at most the sizes that it is told of.
    let heard =
        result(unsafe { call(number::RECVMSG, [fd, &raw mut message as usize, MSG_CMSG_CLOEXEC, 0, 0, 0]) });
    let has_rights = message.control_len >= HEADER_BYTES
        && (control.level, control.kind) == (SOL_SOCKET, SCM_RIGHTS)
        && control.len > HEADER_BYTES;
    let count = if has_rights { (control.len - HEADER_BYTES) / 4 } else { 0 };
    let received = ReceivedDescriptors { numbers: control.descriptors, count: count.min(DESCRIPTORS_MAX) };
    let welcome = heard.ok().and_then(|bytes| JoinReply::of(&welcome[..bytes]));
    let welcome = welcome.filter(|welcome| welcome.error == 0).ok_or(JoinError::Refused)?;
    Ok((welcome, received))
}

fn becomes_readable(fd: i32, millis: u32) -> bool {
    const POLLIN: u64 = 1;
    /// The kernel's `struct pollfd` as one word.
    fn entry(fd: i32) -> u64 {
        u64::from(fd as u32) | POLLIN << 32
    }
    let until = clock_millis() + u64::from(millis);
    loop {
        let mut one = entry(fd);
        let left = until.saturating_sub(clock_millis()) as usize;
        // SAFETY: one entry, which the kernel fills.
        let answer = result(unsafe { call(number::POLL, [&raw mut one as usize, 1, left, 0, 0, 0]) });
        match answer {
            Ok(count) => return count == 1,
            Err(Errno::INTR) if clock_millis() < until => {}
            Err(_) => return false,
        }
    }
}

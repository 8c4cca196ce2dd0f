//! Kernel: userfaultfd as its header has it, and descriptors sent over a socket.
//!
//! ```text
//!   open -> register a range -> a thread reads a page of it -> Event::Fault -> copy, zero or go_on -> it reads on
//! ```
//!
//! Written from `linux/userfaultfd.h` and the manual pages, independently of the server's code: two readings of one
//! header that agree are worth more than one.

#![allow(unsafe_code, reason = "system calls")]

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

pub const EVENT_FORK: u64 = 1 << 1;
pub const EVENT_REMAP: u64 = 1 << 2;
pub const EVENT_REMOVE: u64 = 1 << 3;
pub const EVENT_UNMAP: u64 = 1 << 6;
pub const MISSING_SHMEM: u64 = 1 << 5;
pub const MINOR_SHMEM: u64 = 1 << 10;
pub const POISON: u64 = 1 << 14;

/// Not a feature: asks for a descriptor whose reads block and which `exec` keeps, so that no caller has to change it.
pub const WAITING: u64 = 1 << 63;

/// The kinds of faults that a registration reports.
pub const MISSING: u64 = 1 << 0;
pub const MINOR: u64 = 1 << 2;

/// `_IO(0xaa, 0)` on `/dev/userfaultfd`.
const IOC_NEW: libc::c_ulong = 0xaa00;

/// `_IOWR(0xaa, number, size)`, and `_IOR`.
const fn read_write(number: u64, bytes: usize) -> libc::c_ulong {
    3 << 30 | (bytes as u64) << 16 | 0xaa << 8 | number
}
const fn read_only(number: u64, bytes: usize) -> libc::c_ulong {
    2 << 30 | (bytes as u64) << 16 | 0xaa << 8 | number
}
const UFFDIO_API: libc::c_ulong = read_write(0x3f, 24);
const UFFDIO_REGISTER: libc::c_ulong = read_write(0x00, 32);
const UFFDIO_WAKE: libc::c_ulong = read_only(0x02, 16);
const UFFDIO_COPY: libc::c_ulong = read_write(0x03, 40);
const UFFDIO_ZEROPAGE: libc::c_ulong = read_write(0x04, 32);
const UFFDIO_CONTINUE: libc::c_ulong = read_write(0x07, 32);

/// A process that stops on its way out when it is killed, until this is dropped. Only the thread that made this value
/// can ask and release it.
pub struct Held {
    process: libc::pid_t,
    is_stopped: bool,
}

impl Held {
    pub fn at_its_end(process: u32) -> io::Result<Self> {
        let process = process as libc::pid_t;
        trace(libc::PTRACE_SEIZE as _, process, libc::PTRACE_O_TRACEEXIT as usize)?;
        Ok(Self { process, is_stopped: false })
    }

    /// Whether it is on its way out.
    pub fn is_ending(&mut self) -> bool {
        let mut status = 0;
        // SAFETY: this process's child.
        let found = unsafe { libc::waitpid(self.process, &raw mut status, libc::WNOHANG | libc::__WALL) };
        if found == self.process {
            assert_eq!(status >> 8, libc::SIGTRAP | libc::PTRACE_EVENT_EXIT << 8, "it stops at its end only");
            self.is_stopped = true;
        }
        self.is_stopped
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.is_stopped && trace(libc::PTRACE_INTERRUPT as _, self.process, 0).is_ok() {
            let mut status = 0;
            // SAFETY: this process's child.
            unsafe { libc::waitpid(self.process, &raw mut status, libc::__WALL) };
        }
        let _ = trace(libc::PTRACE_DETACH as _, self.process, 0);
    }
}

fn trace(request: libc::c_int, process: libc::pid_t, data: usize) -> io::Result<()> {
    // SAFETY: none of the requests here touches memory of this process.
    let returned = unsafe { libc::ptrace(request as _, process, 0_usize, data) };
    if returned == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub struct Userfault(pub OwnedFd);

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A message of a userfaultfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Fault { address: u64, is_minor: bool },
    Fork { descriptor: RawFd },
    Remap { from: u64, to: u64, bytes: u64 },
    Remove { start: u64, end: u64 },
    Unmap { start: u64, end: u64 },
}

impl Userfault {
    /// A descriptor that also reports faults of the kernel on its process's behalf, as a guest's are: by the device if
    /// the call is forbidden.
    pub fn open(features: u64) -> io::Result<Self> {
        let wait = features & WAITING != 0;
        let flags = if wait { 0 } else { libc::O_CLOEXEC | libc::O_NONBLOCK };
        let features = features & !WAITING;
        // SAFETY: a plain call.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let descriptor = match made {
            -1 => {
                let refused = io::Error::last_os_error();
                let device = fs::File::open("/dev/userfaultfd").map_err(|_| refused)?;
                // SAFETY: the request takes flags as its argument.
                checked(unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, flags) })?
            }
            made => made as RawFd,
        };
        // SAFETY: the kernel has just returned it, and it has no other owner.
        let this = Self(unsafe { OwnedFd::from_raw_fd(descriptor) });
        this.ask(UFFDIO_API, &mut [0xaa, features, 0])?;
        Ok(this)
    }

    /// Has the faults of a range reported.
    pub fn register(&self, start: u64, bytes: u64, mode: u64) -> io::Result<()> {
        self.ask(UFFDIO_REGISTER, &mut [start, bytes, mode, 0])
    }

    pub fn copy(&self, to: u64, from: &[u8]) -> io::Result<()> {
        self.ask(UFFDIO_COPY, &mut [to, from.as_ptr() as u64, from.len() as u64, 0, 0])
    }

    pub fn zero(&self, start: u64, bytes: u64) -> io::Result<()> {
        self.ask(UFFDIO_ZEROPAGE, &mut [start, bytes, 0, 0])
    }

    /// Lets the page of the file be mapped.
    pub fn go_on(&self, start: u64, bytes: u64) -> io::Result<()> {
        self.ask(UFFDIO_CONTINUE, &mut [start, bytes, 0, 0])
    }

    pub fn wake(&self, start: u64, bytes: u64) -> io::Result<()> {
        self.ask(UFFDIO_WAKE, &mut [start, bytes])
    }

    /// The next event, if one waits.
    pub fn next(&self) -> io::Result<Option<Event>> {
        let mut message = [0u64; 4];
        // SAFETY: the buffer is as long as it says.
        let read = unsafe { libc::read(self.0.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
        match read {
            32 => {}
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => {
                let error = io::Error::last_os_error();
                return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
            }
        }
        let [head, one, two, three] = message;
        Ok(Some(match head & 0xff {
            0x12 => Event::Fault { address: two, is_minor: one & 4 != 0 },
            0x13 => Event::Fork { descriptor: one as u32 as RawFd },
            0x14 => Event::Remap { from: one, to: two, bytes: three },
            0x15 => Event::Remove { start: one, end: two },
            0x16 => Event::Unmap { start: one, end: two },
            other => panic!("an event of kind {other:#x}, which no header has"),
        }))
    }

    fn ask(&self, request: libc::c_ulong, words: &mut [u64]) -> io::Result<()> {
        // SAFETY: each request is named with the size of its structure, which is that of `words`.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) }).map(drop)
    }
}

pub fn checked(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

/// One message of `bytes`, with descriptors beside it.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let payload = mem::size_of_val(descriptors);
    let mut control = vec![0u64; 64 + payload.div_ceil(8)];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all zeros is a header of nothing.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    if !descriptors.is_empty() {
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: arithmetic only.
        header.msg_controllen = unsafe { libc::CMSG_SPACE(payload as u32) } as _;
        // SAFETY: the control buffer is long enough for the one header that is written into it, and aligned for it.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(payload as u32) as _;
            std::ptr::copy_nonoverlapping(descriptors.as_ptr().cast(), libc::CMSG_DATA(first), payload);
        }
    }
    // SAFETY: the header and what it points to live until the call is over.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// One message of up to 64 KiB and its descriptors.
pub fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0u8; 64 << 10];
    let mut control = [0u64; 64];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zeros is a header of nothing.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = mem::size_of_val(&control) as _;
    // SAFETY: the buffers are as long as the header says.
    let read = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    if read < 0 {
        return Err(io::Error::last_os_error());
    }
    bytes.truncate(read as usize);
    let mut descriptors = Vec::new();
    // SAFETY: the kernel has written whole headers, and descriptors that are this process's now.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&raw const header);
        while !next.is_null() {
            if (*next).cmsg_level == libc::SOL_SOCKET && (*next).cmsg_type == libc::SCM_RIGHTS {
                let payload = (*next).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for nth in 0..payload / mem::size_of::<RawFd>() {
                    let raw = libc::CMSG_DATA(next).cast::<RawFd>().add(nth).read_unaligned();
                    descriptors.push(OwnedFd::from_raw_fd(raw));
                }
            }
            next = libc::CMSG_NXTHDR(&raw const header, next);
        }
    }
    Ok((bytes, descriptors))
}

/// A file in memory of so many bytes.
pub fn memfd(bytes: u64) -> OwnedFd {
    // SAFETY: a name that ends, and flags.
    let descriptor = checked(unsafe { libc::memfd_create(c"monitor".as_ptr(), libc::MFD_CLOEXEC) });
    // SAFETY: the kernel has just given it.
    let file = unsafe { OwnedFd::from_raw_fd(descriptor.expect("a file in memory")) };
    // SAFETY: a plain call.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), bytes as i64) }).expect("room in memory");
    file
}

/// Whether any of them becomes readable in this time; returns which.
pub fn wait(descriptors: &[BorrowedFd<'_>], milliseconds: i32) -> io::Result<Vec<bool>> {
    let watch = |d: &BorrowedFd<'_>| libc::pollfd { fd: d.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut watched: Vec<libc::pollfd> = descriptors.iter().map(watch).collect();
    // SAFETY: the array is as long as it says.
    checked(unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as u64, milliseconds) })?;
    Ok(watched.iter().map(|one| one.revents != 0).collect())
}

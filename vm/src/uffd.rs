//! Uffd: the kernel's userfaultfd, by which one process answers the page faults of another.
//!
//! ```text
//!   the VM's process                                  this process
//!   create, handshake, register a range     --fd-->   accept
//!   touches a page that is not there, sleeps          read: Fault { address }
//!                                                     copy | zero | resume | poison   it goes on
//!   gives memory back, sleeps                         read: Removed { range }         it goes on
//! ```
//!
//! | call | the kernel's name | what it does to pages that are not there |
//! |---|---|---|
//! | [`copy`](Uffd::copy) | `UFFDIO_COPY` | gives them bytes of this process |
//! | [`zero`](Uffd::zero) | `UFFDIO_ZEROPAGE` | gives them zeros |
//! | [`resume`](Uffd::resume) | `UFFDIO_CONTINUE` | maps what their file has there |
//! | [`poison`](Uffd::poison) | `UFFDIO_POISON` | makes a touch of them a bus error, over there |
//!
//! **Part of it.** Each of the four stops where a page is there already, where nothing is registered, and while the
//! memory's layout is changing. Then it says how far it came: [`CopyResult`]. The kernel's two ways to say so (an error
//! number and a count; which counts depends on the version) become one here.
//!
//! **Changing.** While an event waits to be read, and a moment longer, the four answer [`CopyStop::Changing`]. So
//! nothing was supplied after an event that is read now: read the events, note them, and try again.
//!
//! **Reading never waits**, even if the other process, which shares the descriptor's flags, makes it one that does:
//! each read says so itself where the kernel lets it (6.10 and later).
//!
//! Not an invariant: that a fault is read after the events that came before it. The kernel hands out faults first.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::UserfaultfdFlags;

/// Features of a userfaultfd, as the kernel numbers them.
pub mod feature {
    /// Forks of the process are told.
    pub const EVENT_FORK: u64 = 1 << 1;
    /// Moves of memory are told.
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// Memory that is given back is told.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// Memory that is unmapped is told.
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// Shared memory may be registered.
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// Shared memory may be registered for minor faults.
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// Pages can be poisoned.
    pub const POISON: u64 = 1 << 14;
}

/// Which faults of a range are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Modes {
    /// Faults of pages that are nowhere.
    Missing,
    /// Faults of pages that are in the range's file and not mapped.
    Minor,
    /// Faults of both kinds.
    MissingAndMinor,
}

/// The result of a call that supplies pages.
#[derive(Debug)]
pub struct CopyResult {
    /// Bytes from the range's beginning that are supplied now.
    pub bytes: u64,
    /// Why there are none, if there are none. After some, the next call tells what ended this one.
    pub stop: Option<CopyStop>,
}

/// The reason why a call ended early; about the first page that was not supplied.
#[derive(Debug)]
pub enum CopyStop {
    /// The page is there.
    Present,
    /// The layout is changing: read events, and try again.
    Changing,
    /// No memory is registered there; it was unmapped, perhaps.
    Nowhere,
    /// The process is no more.
    Over,
    /// Something else.
    Failed(io::Error),
}

/// A message of a userfaultfd.
#[derive(Debug)]
pub enum Message {
    /// A thread has touched a page, and sleeps.
    Fault(Fault),
    /// The process was forked; the child's memory is served by this.
    Forked(Uffd),
    /// Memory was moved, so many bytes.
    Moved {
        /// Where it was.
        from: u64,
        /// Where it is.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// Memory was given back: it is zeros from now on, or what its file has.
    Removed(Range<u64>),
    /// Memory is there no more.
    Unmapped(Range<u64>),
    /// Something that this code does not know.
    Unknown(u8),
}

/// A touch that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The address, not rounded.
    pub address: u64,
    /// The kind of the touch.
    pub kind: FaultKind,
}

/// Why a touch waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The page is nowhere.
    Missing,
    /// The page is in its file, and not mapped.
    Minor,
    /// The page is protected against writing.
    Protected,
}

const MESSAGE_BYTES: usize = 32;
/// Messages that are read at a time.
pub const MESSAGES_MAX: usize = 64;

/// Room for messages as the kernel writes them.
#[derive(Debug)]
pub struct MessageBuffer(Box<[u8; MESSAGE_BYTES * MESSAGES_MAX]>);

impl Default for MessageBuffer {
    fn default() -> Self {
        Self(Box::new([0; MESSAGE_BYTES * MESSAGES_MAX]))
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Raw {
    Fault(Fault),
    Forked(RawFd),
    Moved { from: u64, to: u64, len: u64 },
    Removed(Range<u64>),
    Unmapped(Range<u64>),
    Unknown(u8),
}

impl Raw {
    fn of(bytes: &[u8; MESSAGE_BYTES]) -> Self {
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (first, second, third) = (word(8), word(16), word(24));
        match bytes[0] {
            0x12 => {
                let kind = match first {
                    flags if flags & 2 != 0 => FaultKind::Protected,
                    flags if flags & 4 != 0 => FaultKind::Minor,
                    _ => FaultKind::Missing,
                };
                Self::Fault(Fault { address: second, kind })
            }
            0x13 => Self::Forked(RawFd::from_ne_bytes(bytes[8..12].try_into().expect("four bytes"))),
            0x14 => Self::Moved { from: first, to: second, len: third },
            0x15 => Self::Removed(first..second),
            0x16 => Self::Unmapped(first..second),
            other => Self::Unknown(other),
        }
    }
}

/// A userfaultfd. Its calls change missing pages of the process that registered them; no reference of this process may
/// lead to that memory (see [`Uffd::register`]), so they are safe.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> Self {
        uffd.0
    }
}

impl Uffd {
    /// One of this process's own, for faults of programs and of the kernel on their behalf (a VM's are that).
    ///
    /// # Errors
    /// `EPERM`: it needs `CAP_SYS_PTRACE`, or the right to open `/dev/userfaultfd`, or
    /// `vm.unprivileged_userfaultfd`. `ENOSYS`: the kernel has none, or a filter forbids the call.
    pub fn create() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: a new descriptor alone changes nothing; what it can do to memory begins with `register`.
        match unsafe { rustix::mm::userfaultfd(flags) } {
            Ok(fd) => Ok(Self(fd)),
            Err(refused) => Self::by_device(flags).map_err(|_| refused.into()),
        }
    }

    fn by_device(flags: UserfaultfdFlags) -> io::Result<Self> {
        let device = std::fs::File::open("/dev/userfaultfd")?;
        let flags = libc::c_ulong::from(flags.bits());
        // SAFETY: the call takes a number and returns a new descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it, and no other thread knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// A descriptor that another process handed over, if it is a userfaultfd; else it is given back.
    ///
    /// # Errors
    /// The descriptor.
    pub fn accept(fd: OwnedFd) -> Result<Self, OwnedFd> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let is_one = link.is_ok_and(|link| link.to_string_lossy().starts_with("anon_inode:[userfaultfd]"));
        let made_ready = || {
            let flags = rustix::fs::fcntl_getfl(&fd)?;
            rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)
        };
        if is_one && made_ready().is_ok() { Ok(Self(fd)) } else { Err(fd) }
    }

    /// Requests features, once, before anything else; returns those that the kernel has.
    ///
    /// # Errors
    /// `EINVAL`: it does not have all of them, or this was said before.
    pub fn handshake(&self, features: u64) -> io::Result<u64> {
        let mut api = [0xAA, features, 0];
        // SAFETY: the kernel reads and writes these 24 bytes.
        unsafe { self.control(UFFDIO_API, &mut api) }?;
        Ok(api[1])
    }

    /// Has faults in `range` told here from now on.
    ///
    /// # Safety
    /// What is touched there waits until it is answered, and finds the answer: the range is mapped memory to which no
    /// reference leads, nor any allocator.
    ///
    /// # Errors
    /// The range is not mapped, or not of a kind that the mode is for.
    pub unsafe fn register(&self, range: Range<u64>, modes: Modes) -> io::Result<()> {
        let mode = match modes {
            Modes::Missing => 1,
            Modes::Minor => 4,
            Modes::MissingAndMinor => 5,
        };
        let mut words = [range.start, range.end - range.start, mode, 0];
        // SAFETY: the kernel reads and writes these 32 bytes; the caller guarantees the range.
        unsafe { self.control(UFFDIO_REGISTER, &mut words) }
    }

    /// Has missing and minor faults told in a range of the process that handed the descriptor over for it. A range
    /// registered for both already, and perhaps for more, stays as it is.
    ///
    /// # Errors
    /// Nothing that has minor faults is mapped there, or it is registered with another descriptor; `ENOMEM`: the
    /// process is no more.
    pub fn watch(&self, range: Range<u64>) -> io::Result<()> {
        // SAFETY: the descriptor acts on the memory of the process that made it: that threads wait there is that
        // process's own affair, and it asked for this. If that is this process, then the code that made the descriptor
        // and registered, or named, the range with it has promised what `register` wants.
        unsafe { self.register(range, Modes::MissingAndMinor) }
    }

    /// Gives the pages from `to` on the bytes `from`, whole pages both, and wakes the threads that wait for them.
    pub fn copy(&self, to: u64, from: &[u8]) -> CopyResult {
        let mut words = [to, from.as_ptr().addr() as u64, from.len() as u64, 0, 0];
        // SAFETY: the kernel reads and writes these 40 bytes, and reads those of `from`.
        moved_by(from.len() as u64, &mut words, |words| unsafe { self.control(UFFDIO_COPY, words) })
    }

    /// Gives pages zeros, and wakes the threads that wait for them.
    pub fn zero(&self, range: Range<u64>) -> CopyResult {
        self.supply(range, UFFDIO_ZEROPAGE)
    }

    /// Maps what the range's file has there, and wakes the threads that wait for it.
    pub fn resume(&self, range: Range<u64>) -> CopyResult {
        self.supply(range, UFFDIO_CONTINUE)
    }

    /// Makes touches of pages bus errors, and wakes the threads that wait for them.
    pub fn poison(&self, range: Range<u64>) -> CopyResult {
        self.supply(range, UFFDIO_POISON)
    }

    fn supply(&self, range: Range<u64>, call: libc::c_ulong) -> CopyResult {
        let len = range.end - range.start;
        let mut words = [range.start, len, 0, 0];
        // SAFETY: the kernel reads and writes these 32 bytes.
        moved_by(len, &mut words, |words| unsafe { self.control(call, words) })
    }

    /// Lets threads continue that were stopped writing to pages.
    ///
    /// # Errors
    /// Nothing is registered there.
    pub fn unprotect(&self, range: Range<u64>) -> io::Result<()> {
        let mut words = [range.start, range.end - range.start, 0];
        // SAFETY: the kernel reads these 24 bytes.
        unsafe { self.control(UFFDIO_WRITEPROTECT, &mut words) }
    }

    /// Wakes the threads that wait for pages, to check again.
    ///
    /// # Errors
    /// The range is none.
    pub fn wake(&self, range: Range<u64>) -> io::Result<()> {
        let mut words = [range.start, range.end - range.start];
        // SAFETY: the kernel reads these 16 bytes.
        unsafe { self.control(UFFDIO_WAKE, &mut words) }
    }

    /// Whether the process whose memory it is is no more.
    pub fn is_over(&self) -> bool {
        // No mapping is as long as this and begins so low, so this changes nothing. (Below `mmap_min_addr`, where none
        // can be, some kernels refuse the range before they look for the process.)
        matches!(self.zero(1 << 20..1 << 38).stop, Some(CopyStop::Over))
    }

    /// Adds what is to be read now to `messages`; waits for nothing. How many were read: none, if nothing is there.
    ///
    /// # Errors
    /// The descriptor is not one to read from any more.
    pub fn read(&self, inbox: &mut MessageBuffer, messages: &mut Vec<Message>) -> io::Result<usize> {
        let bytes = match self.read_bytes(&mut inbox.0[..]) {
            Ok(bytes) => bytes,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for message in inbox.0[..bytes].as_chunks::<MESSAGE_BYTES>().0 {
            messages.push(match Raw::of(message) {
                Raw::Fault(fault) => Message::Fault(fault),
                // SAFETY: the kernel has just made this descriptor for this process, and says its number once.
                Raw::Forked(fd) => Message::Forked(Self::inherited(unsafe { OwnedFd::from_raw_fd(fd) })),
                Raw::Moved { from, to, len } => Message::Moved { from, to, len },
                Raw::Removed(range) => Message::Removed(range),
                Raw::Unmapped(range) => Message::Unmapped(range),
                Raw::Unknown(event) => Message::Unknown(event),
            });
        }
        Ok(bytes / MESSAGE_BYTES)
    }

    /// A child's, which has the flags that its parent's was **created** with, whatever that has now: without these two
    /// a poll would find it ready for ever, and a program that this one starts would inherit it.
    fn inherited(fd: OwnedFd) -> Self {
        // These calls fail on no descriptor that is open.
        let _ = rustix::fs::fcntl_getfl(&fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK));
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        Self(fd)
    }

    fn read_bytes(&self, into: &mut [u8]) -> Result<usize, Errno> {
        match rustix::io::preadv2(&self.0, &mut [IoSliceMut::new(into)], u64::MAX, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => rustix::io::read(&self.0, into),
            result => result,
        }
    }

    /// # Safety
    /// `words` are what the kernel reads and writes for `call`.
    unsafe fn control<const N: usize>(&self, call: libc::c_ulong, words: &mut [u64; N]) -> io::Result<()> {
        // SAFETY: the caller's.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), call as _, words.as_mut_ptr()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Runs `call`, whose range has `len` bytes, and which sets the last of `words` to how far it came.
fn moved_by<const N: usize>(
    len: u64,
    words: &mut [u64; N],
    call: impl FnOnce(&mut [u64; N]) -> io::Result<()>,
) -> CopyResult {
    let result = call(words);
    moved(len, words[N - 1].cast_signed(), result.err())
}

/// The result of a call whose range has `len` bytes, if the kernel says `told` and `error`.
fn moved(len: u64, told: i64, error: Option<io::Error>) -> CopyResult {
    let Some(error) = error else { return CopyResult { bytes: len, stop: None } };
    let Ok(bytes @ 1..) = u64::try_from(told) else {
        let stop = match error.raw_os_error() {
            Some(libc::EEXIST) => CopyStop::Present,
            Some(libc::EAGAIN | libc::EINTR) => CopyStop::Changing,
            Some(libc::ENOENT) => CopyStop::Nowhere,
            Some(libc::ESRCH) => CopyStop::Over,
            _ => CopyStop::Failed(error),
        };
        return CopyResult { bytes: 0, stop: Some(stop) };
    };
    CopyResult { bytes: bytes.min(len), stop: None }
}

/// The number of a call of the kernel's, from its direction, its argument's length, and its number.
const fn call(direction: u32, bytes: u32, number: u32) -> libc::c_ulong {
    ((direction << 30) | (bytes << 16) | (0xAA << 8) | number) as libc::c_ulong
}
const READS: u32 = 2;
const BOTH: u32 = 3;
const UFFDIO_REGISTER: libc::c_ulong = call(BOTH, 32, 0x00);
const UFFDIO_WAKE: libc::c_ulong = call(READS, 16, 0x02);
const UFFDIO_COPY: libc::c_ulong = call(BOTH, 40, 0x03);
const UFFDIO_ZEROPAGE: libc::c_ulong = call(BOTH, 32, 0x04);
const UFFDIO_WRITEPROTECT: libc::c_ulong = call(BOTH, 24, 0x06);
const UFFDIO_CONTINUE: libc::c_ulong = call(BOTH, 32, 0x07);
const UFFDIO_POISON: libc::c_ulong = call(BOTH, 32, 0x08);
const UFFDIO_API: libc::c_ulong = call(BOTH, 24, 0x3F);
const USERFAULTFD_IOC_NEW: libc::c_ulong = call(0, 0, 0x00);

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u8, words: [u64; 3]) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[0] = event;
        for (number, word) in words.into_iter().enumerate() {
            bytes[8 * (number + 1)..][..8].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn messages_are_parsed_from_their_bytes() {
        let fault = |kind| Raw::Fault(Fault { address: 0x7001, kind });
        let expected = [
            (message(0x12, [0, 0x7001, 0]), fault(FaultKind::Missing)),
            (message(0x12, [1, 0x7001, 9]), fault(FaultKind::Missing)),
            (message(0x12, [4, 0x7001, 0]), fault(FaultKind::Minor)),
            (message(0x12, [3, 0x7001, 0]), fault(FaultKind::Protected)),
            (message(0x13, [(7 << 32) | 5, 0, 0]), Raw::Forked(5)),
            (message(0x14, [1, 2, 3]), Raw::Moved { from: 1, to: 2, len: 3 }),
            (message(0x15, [4096, 8192, 0]), Raw::Removed(4096..8192)),
            (message(0x16, [4096, 8192, 0]), Raw::Unmapped(4096..8192)),
            (message(0x99, [0; 3]), Raw::Unknown(0x99)),
        ];
        for (bytes, said) in expected {
            assert_eq!(Raw::of(&bytes), said);
        }
    }

    #[test]
    fn both_ways_to_say_how_far_it_came_are_understood() {
        let says = |told, errno: i32| moved(12288, told, Some(io::Error::from_raw_os_error(errno)));
        assert!(matches!(moved(12288, 12288, None), CopyResult { bytes: 12288, stop: None }));
        assert!(matches!(says(4096, libc::EAGAIN), CopyResult { bytes: 4096, stop: None }));
        assert!(matches!(says(-17, libc::EEXIST), CopyResult { bytes: 0, stop: Some(CopyStop::Present) }));
        assert!(matches!(says(0, libc::EAGAIN), CopyResult { bytes: 0, stop: Some(CopyStop::Changing) }));
        assert!(matches!(says(-3, libc::ESRCH), CopyResult { bytes: 0, stop: Some(CopyStop::Over) }));
        assert!(matches!(says(0, libc::ENOENT), CopyResult { bytes: 0, stop: Some(CopyStop::Nowhere) }));
        assert!(matches!(says(0, libc::EINVAL), CopyResult { bytes: 0, stop: Some(CopyStop::Failed(_)) }));
    }

    #[test]
    fn other_descriptors_are_given_back() {
        let file = OwnedFd::from(tempfile::tempfile().expect("a file"));
        let number = file.as_raw_fd();
        assert_eq!(Uffd::accept(file).expect_err("a file is none").as_raw_fd(), number);
    }
}

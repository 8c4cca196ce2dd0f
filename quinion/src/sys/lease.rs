//! Lease: the kernel's read leases, and how it says that one is to be given up.
//!
//! ```text
//!   library thread                 Summons::here        blocks the signal, on this thread alone
//!   any thread                     take                 F_SETOWN_EX thread, F_SETSIG signal, F_SETLEASE F_RDLCK
//!   a process opens for writing,   kernel --signal, descriptor--> that thread; it sleeps meanwhile
//!      or cuts the file
//!   library thread                 Summons::wait        rt_sigtimedwait: which descriptor
//!   any thread                     give_up              F_SETLEASE F_UNLCK: it goes on
//! ```
//!
//! **Which signal.** A signal that is sent to the process, and not to one of its threads, is fetched by whichever
//! thread asks for its number first. So whatever number the library would wait for, it could take a signal from a
//! program that waits for the same number. But for one: the first real-time signal of the kernel, 32, is kept back by
//! the C libraries for themselves. They send it to single threads only, never to a process, and their calls neither
//! give a program its number (`SIGRTMIN` lies behind it) nor let it into a set of signals. The library's comes to its
//! thread only, by its number, and is pending there and nowhere else; no handler is needed, and none is set.
//!
//! The C library's own calls do not let the number through either, so the mask and the wait are system calls made
//! directly. And they may take it out of a mask that they restore (glibc does when a thread is started). So **the
//! thread that waits does nothing else**: it starts no thread and runs no foreign code. Were the signal not blocked
//! there when it comes, it would end the process.
//!
//! **For each lease anew.** When a lease ends the kernel forgets whose it was and which signal was wanted. Both are
//! set before the lease is asked for: set after it, a signal in between would be the program's SIGIO.
//!
//! Not an invariant: that each summons comes. Where the user's queue of signals is full, the kernel sends SIGIO in
//! its place, which the library leaves alone, for it could be the program's. [`stands`] tells.
//!
//! Not an invariant: that a lease keeps every writer out. `open` with `O_RDONLY | O_TRUNC`, which POSIX leaves
//! undefined, cuts a file without breaking the lease. So do writes to the device below the file system, and, on a
//! network file system, writes by another machine.

use std::ffi::{c_int, c_long};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// The kernel's first real-time signal; see the head of this file.
const SIGNAL: c_int = 32;
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
const F_OWNER_TID: c_int = 0;
/// The kernel's set of signals, as this file's system calls have it.
type Signals = u64;
const OURS: Signals = 1 << (SIGNAL - 1);

/// A thread, by the system's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreadNumber(c_int);

/// A thread that is summoned when a lease is to be given up. It does nothing but wait.
#[derive(Debug)]
pub struct LeaseSignal {
    thread: ThreadNumber,
    _on_this_thread: PhantomData<*const ()>,
}

/// The reason why a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitEnd {
    /// The lease by this descriptor is to be given up, or was when this was sent.
    For(RawFd),
    /// Another thread wants this one to check its state ([`call`]), or the wake-up is spurious.
    ForNothing,
}

impl LeaseSignal {
    /// Blocks the signal on the calling thread, for good.
    ///
    /// # Errors
    /// The system forbids it.
    pub fn here() -> io::Result<Self> {
        let set = OURS;
        // SAFETY: the kernel reads eight bytes, which are there, and writes nothing, since nothing is wanted.
        let done = unsafe {
            let nothing = std::ptr::null_mut::<Signals>();
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_BLOCK,
                &raw const set,
                nothing,
                size_of::<Signals>(),
            )
        };
        // SAFETY: a number is asked for.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        let thread = ThreadNumber(c_int::try_from(thread).expect("threads have small numbers"));
        if done == 0 {
            Ok(Self { thread, _on_this_thread: PhantomData })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// The thread that is summoned.
    pub fn thread(&self) -> ThreadNumber {
        self.thread
    }

    /// Waits for a summons, so long at most.
    pub fn wait(&self, at_most: Duration) -> WaitEnd {
        let (set, mut told) = (OURS, SignalInfo::default());
        let seconds = libc::time_t::try_from(at_most.as_secs()).unwrap_or(libc::time_t::MAX);
        let at_most = libc::timespec { tv_sec: seconds, tv_nsec: at_most.subsec_nanos() as c_long };
        // SAFETY: the kernel reads a set and a time, and writes at most 128 bytes, which `told` has.
        let signal = unsafe {
            let (set, told, at_most) = (&raw const set, &raw mut told, &raw const at_most);
            libc::syscall(libc::SYS_rt_sigtimedwait, set, told, at_most, size_of::<Signals>())
        };
        // A lease's signal carries a descriptor; a process's does not.
        let is_of_a_lease = signal == c_long::from(SIGNAL) && told.code > 0 && told.code != SI_KERNEL;
        if is_of_a_lease { WaitEnd::For(told.descriptor) } else { WaitEnd::ForNothing }
    }
}

const SI_KERNEL: c_int = 0x80;

#[repr(C)]
struct SignalInfo {
    signal: c_int,
    error: c_int,
    code: c_int,
    band: c_long,
    descriptor: c_int,
    rest: [c_int; 26],
}

const _: () = assert!(size_of::<SignalInfo>() >= 128, "the kernel fills in 128 bytes");

impl Default for SignalInfo {
    fn default() -> Self {
        Self { signal: 0, error: 0, code: 0, band: 0, descriptor: -1, rest: [0; 26] }
    }
}

/// Ends a wait of `thread`, of this process. Whether it could be told: if not, its wait ends by its time.
pub fn call(thread: ThreadNumber) -> bool {
    // SAFETY: a signal is sent to a thread of this process, and blocked there.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.0, SIGNAL) == 0 }
}

/// Takes a read lease on the file behind `file`, whose description is this process's alone and open for reading only.
/// `thread` is signalled when it is to be given up. Does not block.
///
/// # Errors
/// `EAGAIN`: another description has the file open for writing. `EACCES`: it is another user's, and this process has no
/// `CAP_LEASE`. `EINVAL`: the file system has no leases, it is no regular file, or it has no name. `ENOLCK` or
/// `ENOMEM`: the system is short of locks or memory.
pub fn take(file: BorrowedFd<'_>, thread: ThreadNumber) -> io::Result<()> {
    // The kernel does not count the first descriptor of a memfd as one that can write, and would give a lease on a file
    // that is written all the time. Such a file never had a name.
    if rustix::fs::fstat(file)?.st_nlink == 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let owner = [F_OWNER_TID, thread.0];
    // SAFETY: the kernel reads a kind and a number, which are there; the descriptor is open while it is borrowed.
    check(unsafe { libc::fcntl(file.as_raw_fd(), F_SETOWN_EX, owner.as_ptr()) })?;
    // SAFETY: the arguments are a descriptor, which is open while it is borrowed, and a number.
    check(unsafe { libc::fcntl(file.as_raw_fd(), F_SETSIG, SIGNAL) })?;
    set(file, libc::F_RDLCK)
}

/// Gives a lease up, if there is one. The program that waited for that goes on.
///
/// # Errors
/// There was none.
pub fn give_up(file: BorrowedFd<'_>) -> io::Result<()> {
    set(file, libc::F_UNLCK)
}

/// Whether there is a lease by `file`, and no process waits for its end.
pub fn stands(file: BorrowedFd<'_>) -> bool {
    // SAFETY: the arguments are a descriptor, which is open while it is borrowed, and a number.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) == libc::F_RDLCK }
}

fn set(file: BorrowedFd<'_>, kind: c_int) -> io::Result<()> {
    // SAFETY: the arguments are a descriptor, which is open while it is borrowed, and a number.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) })
}

fn check(answer: c_int) -> io::Result<()> {
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

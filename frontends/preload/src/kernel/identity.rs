//! Identity: the numbers and rights of the calling process and thread, what `/proc` says of them, waiting and ending.
//!
//! The numbers are asked for anew each time: in a child of `vfork` they are the child's, though its memory is its
//! parent's. `/proc` shows the view of the name space in which it was mounted.

use quinion_view::viewer::sys::{Errno, call, result};

use super::files::{close, open};
use super::number;

/// The calling process, as the kernel sees it now: the child's own number in a child of `vfork`.
pub fn process() -> u32 {
    // SAFETY: no argument.
    unsafe { call(number::GETPID, [0; 6]) as u32 }
}

pub fn thread() -> u32 {
    // SAFETY: no argument.
    unsafe { call(number::GETTID, [0; 6]) as u32 }
}

/// A descriptor of a process.
pub fn open_process(number: i32) -> Result<i32, Errno> {
    // SAFETY: numbers only.
    result(unsafe { call(number::PIDFD_OPEN, [number as usize, 0, 0, 0, 0, 0]) }).map(|n| n as i32)
}

/// Ends a child of this process, and waits for that.
pub fn end_child(number: i32) {
    const SIGKILL: usize = 9;
    // SAFETY: numbers only; no status is wanted.
    unsafe {
        let _ = call(number::KILL, [number as usize, SIGKILL, 0, 0, 0, 0]);
        let _ = call(number::WAIT4, [number as usize, 0, 0, 0, 0, 0]);
    }
}

pub fn effective_user() -> u32 {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { call(number::GETEUID, [0; 6]) as u32 }
}

/// The digits by which `/proc` shows this process; how many, 0 if it does not.
pub fn digits_in_proc(to: &mut [u8; 16]) -> usize {
    let args = [c"/proc/self".as_ptr() as usize, to.as_mut_ptr() as usize, to.len(), 0, 0, 0];
    // SAFETY: the path is a string that ends, and the kernel writes at most the size it is told of.
    result(unsafe { call(number::READLINK, args) }).unwrap_or(0)
}

/// Bytes read of a process's status: up to what it says of filters, behind lists (groups, processors) that may be long.
pub const STATUS_MAX: usize = 16384;

/// The text of this process's `/proc` status. `None` if that cannot be read, or not all of it.
pub fn status(to: &mut [u8; STATUS_MAX]) -> Option<&[u8]> {
    let fd = open(b"/proc/self/status\0", 0).ok()?;
    let mut len = 0;
    let is_read = loop {
        let args = [fd as usize, to[len..].as_mut_ptr() as usize, to.len() - len, 0, 0, 0];
        // SAFETY: the kernel writes at most the bytes that are left.
        match result(unsafe { call(number::READ, args) }) {
            Ok(0) => break true,
            Ok(count) => len += count,
            Err(_) => break false,
        }
    };
    close(fd);
    (is_read && len < to.len()).then_some(&to[..len])
}

pub const RLIMIT_AS: usize = 9;

/// Whether the addresses that this process may use are limited; if that cannot be told they are not.
pub fn are_addresses_limited() -> bool {
    let mut limits = [u64::MAX; 2];
    // SAFETY: no new limit is given, and the kernel's structure is two numbers of 64 bits.
    let asked = unsafe { call(number::PRLIMIT64, [0, RLIMIT_AS, 0, limits.as_mut_ptr() as usize, 0, 0]) };
    result(asked).is_ok() && limits[0] != u64::MAX
}

/// Lets the thread run that the caller waits for; `turn` counts the waits before.
///
/// After a few turns it sleeps: a thread of a real-time class that only yields never lets one of a lower class or
/// priority run on the same processor.
pub fn wait(turn: u32) {
    /// A wait is for a few system calls: on another processor it is over before that.
    const YIELDS: u32 = 16;
    const NANOS: i64 = 50_000;
    if turn < YIELDS {
        // SAFETY: no argument.
        let _ = unsafe { call(number::SCHED_YIELD, [0; 6]) };
    } else {
        let time = [0i64, NANOS];
        // SAFETY: the kernel's structure is two numbers of 64 bits; the rest of the time is not asked for.
        let _ = unsafe { call(number::NANOSLEEP, [time.as_ptr() as usize, 0, 0, 0, 0, 0]) };
    }
}

pub fn end_process() -> ! {
    // SAFETY: an instruction that ends the process.
    unsafe { core::arch::asm!("ud2", options(noreturn)) }
}

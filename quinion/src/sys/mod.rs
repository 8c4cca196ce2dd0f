//! Sys: the system calls that cannot be made safely from outside.
//!
//! Everything here that is `unsafe` says in words what the caller must hold. Calls that the `rustix` crate offers
//! safely are made where they are needed and are not wrapped a second time.
//!
//! | file | what |
//! |---|---|
//! | [`adjacent`] | pieces of memory, mapped a second time so that they lie together |
//! | [`extents`] | whether a part of a file was allocated and never written |
//! | [`fork`] | noticing that this process is a child of the one that built a cache |
//! | [`io`] | reading into memory that is an address and not a Rust reference; a device's size |
//! | [`lease`] | read leases on files, and the notice that one is to be given up |
//! | [`mountinfo`] | the kernel's table of mounts |
//! | [`ring`] | an io_uring instance, as two halves that different threads may hold |
//! | [`peer`] | the process that connected a socket |
//! | [`signal`] | keeping a program's signals away from the library's threads |

pub mod adjacent;
pub mod extents;
pub mod fork;
pub mod io;
pub mod lease;
pub mod mountinfo;
pub mod peer;
pub mod ring;
pub mod signal;

/// How many descriptors this process may have open at a time.
pub fn descriptors_max() -> usize {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.map_or(1 << 20, |most| usize::try_from(most).unwrap_or(usize::MAX))
}

/// Nanoseconds by a clock that does not fall, is read without a system call, and steps by some milliseconds.
// By the C library: valgrind does not survive the way in which `rustix` finds the kernel's own function.
pub fn coarse_nanoseconds() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one such value, to a local. The clock is there since Linux 2.6.32.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    (now.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec as u64)
}

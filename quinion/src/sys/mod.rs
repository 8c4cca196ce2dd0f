//! Sys: the system calls that cannot be made safely from outside.
//!
//! Everything here that is `unsafe` says in words what the caller must hold.
//! Calls that the `rustix` crate offers safely are made where they are needed
//! and are not wrapped a second time.
//!
//! | file | what |
//! |---|---|
//! | [`fork`] | noticing that this process is a child of the one that built a cache |
//! | [`io`] | reading into memory that is an address and not a Rust reference; a device's size |
//! | [`lease`] | read leases on files, and hearing that one is to be given up |
//! | [`ring`] | an io_uring instance, as two halves that different threads may hold |
//! | [`signal`] | keeping a program's signals away from our threads |

pub mod fork;
pub mod io;
pub mod lease;
pub mod ring;
pub mod signal;

/// How many descriptors this process may have open at a time.
pub fn descriptors_max() -> usize {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.map_or(1 << 20, |most| usize::try_from(most).unwrap_or(usize::MAX))
}

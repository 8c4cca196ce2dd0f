//! Sys: what is asked of the system beyond what `rustix` offers safely.
//!
//! One small file for each subject. Nothing here knows what a cache is; most of
//! the library's system calls are `rustix`'s and stand where they are needed.
//!
//! ```text
//!   fork    is this still the process that built the cache?
//!   read    bytes from a descriptor to an address that is not a slice
//! ```
//!
//! Invariants:
//!  1. No function keeps state of its own, but the fork generation.
//!  2. Errors are the system's, as `std::io::Error` or `rustix::io::Errno`.

pub mod fork;
pub mod read;

/// How many descriptors this process may have open at a time.
pub fn descriptors_max() -> usize {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.map_or(1 << 20, |most| usize::try_from(most).unwrap_or(usize::MAX))
}

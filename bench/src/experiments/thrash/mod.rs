//! Thrash: what is left of a cache when the file is twice as large as it?
//!
//! ```text
//!   random    16 threads read 4 KiB anywhere in a file on a disk in memory, every alternative under one limit
//!     quinion    read_at; a cache of most of the limit           mmap     a copy from the mapping
//!     .., pinned a copy from a pin of the page
//!     pread      with the kernel's cache                         O_DIRECT pread, without any cache: the disk alone
//!     quinion, three walks: Quinion's, where a page enters the index by three ways down, split or not
//!
//!   switch    one file, in large folios from end to end; then each page of it alone, in an order that looks random,
//!             by 16 jobs under one limit
//!     single walk, three walks: how a folio finds its place where a large shadow remembers
//! ```
//!
//! The file is twice as large as the limit; and, for the rates alone, four times and a quarter more.
//!
//! `random` runs for a time and not for a number of reads: first until the cache is in its steady state, then counted.
//! Half of the reads can be hits, whichever pages are kept; the alternatives differ in what a miss costs, and how it
//! disturbs other reads. Bytes from the device per byte read are the misses: 0.50 if the cache is always full. Each
//! alternative runs in a process of its own, inside the limit; Quinion's cache is smaller than the limit by what its
//! process needs. Kernel and cache are told that the reads are random.
//!
//! Quinion's threads do as much of a miss's work as the kernel's do, except for the loop device's copy; that is in the
//! time of the kernel's threads, which is added to `cpu`.
//!
//! `switch` needs no disk: its file has no storage. The tree itself counts the shadows that are split. Without any, the
//! experiment fails, since it has not measured what it claims.

mod random;
mod switch;

pub use random::{JOB, work};
pub use switch::{JOB as SWITCH_JOB, work as switch};

use crate::harness::{Case, Settings};

pub fn cases(settings: &Settings) -> Vec<Case> {
    random::cases(settings).into_iter().chain([switch::case(settings)]).collect()
}

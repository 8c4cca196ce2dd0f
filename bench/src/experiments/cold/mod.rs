//! Cold: how fast is a file read of which no page is cached, beside the kernel?
//!
//! ```text
//!   sequential   drop the file's pages from the kernel's cache, check that; then, first byte to last:
//!     read_at, pin   a new cache in this process: built, opened, grown, read from, dropped
//!     kernel         pread with the kernel's readahead, in the same sizes; its mmap, from page to page
//!     raw io_uring   direct reads of 1 MiB, 4 in flight, registered buffers: no cache at all, the bound
//!
//!   random       the same, for pages of 4 KiB in an order that is the same random one for all
//!     futures        32 tasks on one thread, each awaits one read after the other
//!     read_at        one read after the other          O_DIRECT pread   the same without a cache
//!     raw io_uring   direct reads, 32 in flight: the bound
//!
//!   whole command    `quinion cat` beside `cat`, both to /dev/null
//! ```
//!
//! Throughput and CPU seconds are both reported, since one can be bought with the other. CPU time is that of the whole
//! process; the cache's threads, its construction and its shutdown count. A second metric adds the CPU time of all
//! kernel threads of the machine. Every alternative reads the first word of each page, so that a way without copies
//! touches each page, too.
//!
//! Three counters say what the device read:
//!
//! | metric | counted by | what disturbs it |
//! |---|---|---|
//! | device (disk) | the block device | what other processes read from it at the same time |
//! | device (process) | the kernel, for this process (`read_bytes` of `/proc/self/io`) | the file's metadata |
//! | device (cache) | Quinion's cache | nothing |
//!
//! Memory is the most that processes and the kernel's pages of the file held meanwhile (`limit`).
//!
//! Not measured: interrupts, which are charged to the thread that is running then, and the host's own cache below a
//! virtual disk, which serves every alternative in turn.

mod random;
mod sequential;
mod target;
mod tasks;

pub use sequential::no_ring;

use crate::fixtures::shared::Shared;
use crate::harness::{Case, Metric, Settings};
use target::Target;

const DISK: &str = "device (disk)";
const PROCESS: &str = "device (process)";
const CACHE: &str = "device (cache)";
/// The ideal of every alternative: the bytes asked for are read from the device, once.
const ASKED: &str = "bytes asked for";
/// Printed as 1.00: the file's metadata is read too.
const PROCESS_GOAL: f64 = 0.995;
const CACHE_GOAL: f64 = 1.0;

const fn per_byte(name: &'static str) -> Metric {
    Metric::cost(name, "bytes per byte")
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let source = Shared::new(settings, Target::new);
    vec![sequential::case(&source), random::case(&source, settings), sequential::commands(&source)]
}

fn device_rows(case: Case, ours: &'static str) -> Case {
    case.compare(PROCESS, ours, ASKED).goal(PROCESS_GOAL).compare(CACHE, ours, ASKED).goal(CACHE_GOAL)
}

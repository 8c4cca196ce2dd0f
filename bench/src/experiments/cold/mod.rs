//! Cold: how fast is a file read that nobody has cached, beside the kernel?
//!
//! ```text
//!   sequential   let go of what the kernel keeps of the file, look that it did; then, first byte to last:
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
//! Throughput and CPU seconds are both told, since one can be bought with the
//! other. CPU is that of the whole process: the cache's threads, its making and
//! its end count. Beside it stands the same with what the kernel's threads compute,
//! of the whole machine. Of what was read, everybody looks at the first word of each
//! page, so that each page has been touched once by a way that does not copy.
//!
//! What the device read is told three times over:
//!
//! | metric | counted by | what disturbs it |
//! |---|---|---|
//! | device (disk) | the block device | what others read from it at the same time |
//! | device (process) | the kernel, for this process (`read_bytes` of `/proc/self/io`) | what describes the file |
//! | device (cache) | our cache | nothing |
//!
//! Memory is the most that was held meanwhile, by processes and in the kernel's pages of the file (`limit`).
//!
//! Not measured: interrupts, which whoever computes just then pays for, and the
//! host's own cache below a virtual disk, which all of them meet in turn.

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
/// What everybody should read from the device: what was asked for, once.
const ASKED: &str = "bytes asked for";
/// 1.00, as it is printed: what describes the file is read too.
const PROCESS_GOAL: f64 = 0.995;
const CACHE_GOAL: f64 = 1.0;

const fn per_byte(name: &'static str) -> Metric {
    Metric::cost(name, "bytes per byte")
}

/// One file, sequentially and at random, by ourselves and by the command.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let source = Shared::new(settings, Target::new);
    vec![sequential::case(&source), random::case(&source, settings), sequential::commands(&source)]
}

/// The rows that say what `ours` reads from the device.
fn device_rows(case: Case, ours: &'static str) -> Case {
    case.compare(PROCESS, ours, ASKED, Some(PROCESS_GOAL)).compare(CACHE, ours, ASKED, Some(CACHE_GOAL))
}

//! Any bytes as operations on a file through a cache and on its twin through the kernel: both hold the same, and the
//! cache's own check passes.
//!
//! ```text
//!   byte 0        how files are read and written, the sizes of folios, how the cache ends
//!   the rest      operations, see `Bytes` in quinion_testing::twins::cache
//! ```
//!
//! The files lie in memory, where a run takes some milliseconds. A failure prints the operations as a list that a
//! test can be made of, and how to run the same input again.
#![no_main]

mod report;

use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use quinion::Mechanism;
use quinion_testing::twins::cache::{Bytes, Ending, Op, Setting, run};

/// Operations of one run, at most: a short run finds what a long one does.
const OPS_MAX: usize = 100;
const FOLDER: &str = "/dev/shm";
const ORDERS: [[u8; 2]; 4] = [[0, 0], [0, 9], [2, 9], [0, 4]];

fuzz_target!(|data: &[u8]| {
    let Some((&kind, rest)) = data.split_first() else { return };
    let ops: Vec<Op> = Bytes(rest).take(OPS_MAX).collect();
    report::trying("cache_ops", &ops);
    let setting = Setting {
        folder: PathBuf::from(FOLDER),
        mechanism: if kind & 1 == 0 { Mechanism::Ring } else { Mechanism::Threads },
        orders: ORDERS[usize::from(kind >> 1) % ORDERS.len()],
        ending: if kind & 8 == 0 { Ending::Synced } else { Ending::Dropped },
    };
    if let Err(complaint) = run(&setting, &ops) {
        panic!("{complaint}\nwith {setting:?}");
    }
});

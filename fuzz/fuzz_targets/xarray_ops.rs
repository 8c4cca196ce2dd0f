//! Any bytes as operations on a tree and on its naive twin: each operation on both must give the same, and the tree's
//! own check passes after every step.
//!
//! ```text
//!   byte 0        how many slots a node has: 2, 4, 8 or 64
//!   the rest      operations, see `Bytes` in quinion_testing::twins::xarray
//! ```
//!
//! A failure prints the operations as a list that a test can be made of, and how to run the same input again.
#![no_main]

mod report;

use libfuzzer_sys::fuzz_target;
use quinion_testing::twins::xarray::{Bytes, Op, run};

/// Nodes in all: few, so that they run out by themselves.
const NODES: u32 = 300;
/// Operations of one run, at most: a short run finds what a long one does.
const OPS_MAX: usize = 200;

fuzz_target!(|data: &[u8]| {
    let Some((&slots, rest)) = data.split_first() else { return };
    let ops: Vec<Op> = Bytes(rest).take(OPS_MAX).collect();
    report::trying("xarray_ops", &ops);
    match slots % 4 {
        0 => run::<1>(NODES, &ops),
        1 => run::<2>(NODES, &ops),
        2 => run::<3>(NODES, &ops),
        _ => run::<6>(NODES, &ops),
    }
});

//! Any bytes as operations on a tree and on its naive twin: whatever is done to both, both say the same, and
//! the tree's own check passes after every step.
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

/// Nodes that there are in all; small, so that they run out without being asked to.
const NODES: u32 = 300;
/// Operations of one run, at most: what a long run finds a short one finds as well.
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

//! Restore: how soon has a virtual machine the memory of its snapshot?
//!
//! ```text
//!   resident   the snapshot is in memory: what does it cost to give it to a machine?            `resident`
//!   snapshot   it is in a file: from nothing to all of it touched, cold and warm                `snapshot`
//!   populated  it is in a file, and is copied into memory ahead: what are batched grabs worth?    `populated`
//!   latency    how long does a guest wait that touches one absent page, anywhere?               `latency`
//!   clones     ten machines of one image: how soon, and in how much memory?                     `clones`
//!   remote     it is an object of a store, and the node has restored it before                  `remote`
//! ```
//!
//! The guests are threads that touch memory (`guest`); the kernel treats them as a virtual machine's threads, but for
//! the second page table.

mod clones;
mod guest;
mod host;
mod latency;
mod populated;
mod remote;
mod resident;
mod snapshot;
mod vmm;

use crate::harness::{Case, Settings};

pub use clones::{JOB, work};

/// A full run's repetitions of a snapshot's restore, and of what else is measured here: fewer than three say nothing of
/// how steady they are.
const REPEAT: usize = 5;
const REPEAT_OTHERS: usize = 3;

/// The part of a snapshot file that is in memory when it begins: nothing, or all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Cold,
    Warm,
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let cases = [resident::case(settings), clones::case(settings)];
    let files = snapshot::cases(settings).into_iter().chain(populated::cases(settings));
    let cases = cases.into_iter().chain(latency::cases(settings)).chain(files);
    cases.chain([remote::case(settings)]).collect()
}

/// A build with checks measures nothing, and only shows that all of this runs.
fn pick(settings: &Settings, checks: u64, quick: u64, full: u64) -> u64 {
    settings.pick(if cfg!(debug_assertions) { checks } else { quick }, full)
}

//! Populate: how fast is a virtual machine's memory filled, beside all ways that the kernel has?
//!
//! ```text
//!   peers    write, mmap and memcpy, userfaultfd: each fills as many bytes, in memory that it gets for that
//! ```
//!
//! One thread works unless a name says two; the memory is new in each repetition, and letting go of it is not
//! timed. Elapsed time counts, for a virtual machine waits for it; the CPU time beside it is that of the threads that
//! work.

mod peers;

use std::rc::Rc;

use super::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use super::shared::Shared;
use super::timing::Spent;
use peers::{PEERS, Peer, Stage};

pub use peers::{faults_of, timed};

const METRICS: [Metric; 2] = [Metric::cost("time", "ms"), Metric::cost("cpu", "ms")];
/// A full run's repetitions: one takes most of a minute.
const REPEAT: usize = 5;

/// One situation, with everybody in it.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let stage = Shared::new(settings, stage);
    let case = Case::new(format!("{} MiB", bytes(settings) >> 20), &METRICS, move || {
        let stage = stage.get()?;
        Ok(PEERS.iter().map(|peer| alternative(&stage, peer)).collect())
    });
    let case = case.without_warm_up().usually(REPEAT);
    vec![PEERS.iter().fold(case, |case, peer| case.told("time", peer.name).told("cpu", peer.name))]
}

/// How much is filled. A build with checks in it measures nothing, and only shows that all of this runs.
fn bytes(settings: &Settings) -> u64 {
    settings.pick(if cfg!(debug_assertions) { 16 << 20 } else { 256 << 20 }, 3 << 30)
}

fn stage(settings: &Settings) -> Result<Stage, Unmeasured> {
    let bytes = bytes(settings);
    // The file that is copied from, one that is filled, ours that has grown, and what is still going away.
    let wanted = 4 * bytes + (512 << 20);
    if quinion::process_limit() < wanted {
        return Err(Unmeasured::Missing(format!(
            "it takes {} MiB of memory, more than we may use; with --quick it takes less",
            wanted >> 20
        )));
    }
    Stage::new(bytes)
}

fn alternative(stage: &Rc<Stage>, peer: &'static Peer) -> Alternative {
    let stage = Rc::clone(stage);
    let run = move |_| stage.fill(peer).map(in_ms);
    Alternative::new(peer.name, run).excused(METRICS.len())
}

fn in_ms(spent: Spent) -> Vec<f64> {
    vec![spent.elapsed_ns / 1e6, spent.cpu_ns / 1e6]
}

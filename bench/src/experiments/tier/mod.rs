//! Tier: what do writes to a cache's disk tier and reads from it cost, beside foyer's on the same disk?
//!
//! ```text
//!   write   entries of 64 KiB in order, until all are on the disk     full tiers: each overwrites older ones
//!   read    entries of 64 KiB at random places, all on the disk       one at a time, and eight
//!
//!   quinion          quinion-disk: put and flush, read; threads that block
//!   foyer            foyer's block engine by its usual engine for I/O: tasks of a runtime
//!   foyer, io_uring  the same by its other one
//! ```
//!
//! Both keep their files past the kernel's page cache, check each entry by a checksum when it comes back, and have 64
//! MiB of memory for what is on its way. Both refuse entries that come faster than the disk takes them: the writer
//! waits and offers them again, or waits before. Afterwards every entry has to be there. Nothing is compressed.
//!
//! Only the tiers are compared, without a cache in memory above them. CPU time is that of the whole process.
//!
//! Not measured: what the device does after a write has returned. Quinion syncs once before the clock stops, foyer does
//! not.

mod ours;
#[cfg(feature = "peers")]
mod peers;

use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use crate::fixtures::places::Places;
use crate::fixtures::shared::Shared;
use crate::harness::folder::ScratchFolder;
use crate::harness::timing::process_cpu_ns;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const THROUGHPUT: &str = "throughput";
const CPU: &str = "cpu";
const METRICS: [Metric; 2] = [Metric::gain(THROUGHPUT, "MiB/s"), Metric::cost(CPU, "s/GiB")];

const OURS: &str = "quinion";
const FOYER: &str = "foyer";
const FOYER_RING: &str = "foyer, io_uring";
const PEERS: [&str; 2] = [FOYER, FOYER_RING];
const THROUGHPUT_GOAL: f64 = 1.0;
const CPU_GOAL: f64 = 1.0 / 0.75;
const REPEAT: usize = 9;

const ENTRY_BYTES: usize = 64 << 10;
const BUFFER_BYTES: usize = 64 << 20;
/// How many contents entries have: one for each, by its number.
const CONTENTS: u64 = 16;

trait Tier {
    fn write(&self, numbers: Range<u64>) -> Result<(), Unmeasured>;
    fn read(&self, numbers: &[u64], at_a_time: usize) -> Result<(), Unmeasured>;
}

#[derive(Clone, Copy, Debug)]
struct Load {
    tier_bytes: u64,
    entries: u64,
    reads: usize,
}

impl Load {
    fn of(settings: &Settings) -> Self {
        Self {
            tier_bytes: settings.pick(256 << 20, 1 << 30),
            entries: settings.pick(1024, 6144),
            reads: settings.pick(256, 2048),
        }
    }
}

type Open = fn(&Path, u64) -> Result<Box<dyn Tier>, Unmeasured>;

const OPEN: &[(&str, Open)] = &[
    (OURS, ours::open),
    #[cfg(feature = "peers")]
    (FOYER, peers::open),
    #[cfg(feature = "peers")]
    (FOYER_RING, peers::open_ring),
];

struct Tiers {
    tiers: Vec<(&'static str, Rc<dyn Tier>)>,
    _folder: ScratchFolder,
}

impl Tiers {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let (folder, load) = (ScratchFolder::new(&settings.folder)?, Load::of(settings));
        let mut tiers = Vec::new();
        for (number, &(name, open)) in OPEN.iter().enumerate() {
            let path = folder.path().join(number.to_string());
            std::fs::create_dir(&path)?;
            let tier: Rc<dyn Tier> = Rc::from(open(&path, load.tier_bytes)?);
            tier.write(0..load.entries)?;
            tiers.push((name, tier));
        }
        Ok(Self { tiers, _folder: folder })
    }

    fn alternative(
        &self,
        name: &'static str,
        work: impl Fn(&dyn Tier, u64) -> Result<u64, Unmeasured> + 'static,
    ) -> Alternative {
        let tier = self.tiers.iter().find(|(other, _)| *other == name).map(|(_, tier)| Rc::clone(tier));
        let run = move |repetition| {
            let missing =
                || Unmeasured::Missing("not built: call `cargo xtask bench`, which builds peers".into());
            let tier = tier.as_ref().ok_or_else(missing)?;
            let (begun, before) = (Instant::now(), process_cpu_ns());
            let entries = work(&**tier, repetition)?;
            let (seconds, cpu_ns) = (begun.elapsed().as_secs_f64(), process_cpu_ns() - before);
            let bytes = (entries * ENTRY_BYTES as u64) as f64;
            Ok(vec![bytes / f64::from(1 << 20) / seconds, cpu_ns / 1e9 / (bytes / f64::from(1 << 30))])
        };
        Alternative::new(name, run).excused(METRICS.len())
    }
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let load = Load::of(settings);
    // Each of its own: the writes overwrite what is read.
    let (written, read) = (Shared::new(settings, Tiers::new), Shared::new(settings, Tiers::new));
    let write = case("64 KiB written", &written, move |tier, repetition| {
        let first = (repetition + 1) * load.entries;
        tier.write(first..first + load.entries)?;
        Ok(load.entries)
    });
    let reads = [1, 8].map(|at_a_time| {
        let name = format!("64 KiB read at random, {at_a_time} at a time");
        case(&name, &read, move |tier, repetition| {
            let mut places = Places(repetition + 1);
            let numbers: Vec<u64> = (0..load.reads).map(|_| places.next(load.entries)).collect();
            tier.read(&numbers, at_a_time)?;
            Ok(load.reads as u64)
        })
    });
    [write].into_iter().chain(reads).collect()
}

fn case(
    name: &str,
    tiers: &Shared<Tiers>,
    work: impl Fn(&dyn Tier, u64) -> Result<u64, Unmeasured> + Clone + 'static,
) -> Case {
    let tiers = tiers.clone();
    let case = Case::new(name, &METRICS, move || {
        let tiers = tiers.get()?;
        Ok([OURS].into_iter().chain(PEERS).map(|name| tiers.alternative(name, work.clone())).collect())
    });
    PEERS.into_iter().fold(case.usually(REPEAT).at_least(REPEAT), |case, peer| {
        case.compare(THROUGHPUT, OURS, peer).goal(THROUGHPUT_GOAL).compare(CPU, OURS, peer).goal(CPU_GOAL)
    })
}

fn content(number: u64) -> Vec<u8> {
    let mut places = Places(number % CONTENTS + 1);
    (0..ENTRY_BYTES / 8).flat_map(|_| places.next(u64::MAX).to_le_bytes()).collect()
}

fn contents() -> Vec<Vec<u8>> {
    (0..CONTENTS).map(content).collect()
}

/// Whether `bytes` begin and end as the entry does, and are as long.
fn is_entry(bytes: &[u8], content: &[u8]) -> bool {
    const EDGE_BYTES: usize = 64;
    bytes.len() == content.len()
        && bytes[..EDGE_BYTES] == content[..EDGE_BYTES]
        && bytes.ends_with(&content[ENTRY_BYTES - EDGE_BYTES..])
}

fn wrong(number: u64, why: &dyn std::fmt::Display) -> Unmeasured {
    Unmeasured::Failed(format!("entry {number}: {why}"))
}

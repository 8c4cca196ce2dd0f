//! Latency: how long does a guest wait that touches one absent page, anywhere?
//!
//! ```text
//!   COPY, CONTINUE      a thread of ours answers, the simplest that there can be: asleep between faults, or spinning
//!   MAP_PRIVATE, ..     the kernel answers, alone
//! ```
//!
//! Each page is touched once, in an order that looks random, and each touch is timed by who makes it.

use std::fs::File;
use std::rc::Rc;

use super::guest::{Content, Touch, handled, touch_scattered};
use super::{REPEAT, check_memory, pick};
use crate::bench::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::bench::pages::PAGE;
use crate::bench::populate::faults_of;
use crate::bench::scratch::write_content;
use crate::bench::shared::Shared;
use crate::bench::statistics::percentile;
use crate::bench::store::Store;
use crate::sys::{Absent, HugeMemory, PageKind, Region, Waiting};

const METRICS: [Metric; 3] =
    [Metric::cost("p50", "us"), Metric::cost("p99", "us"), Metric::cost("mean", "us")];

const COPY: &str = "COPY anon 4K, handler thread";
const COPY_SPINNING: &str = "COPY anon 4K, spinning handler";
const COPY_MEMFD: &str = "COPY memfd 4K, handler thread";
const CONTINUE: &str = "CONTINUE memfd 4K, handler thread";
const PRIVATE_READ: &str = "kernel: MAP_PRIVATE read";
const PRIVATE_WRITE: &str = "kernel: MAP_PRIVATE write";
const SHARED_READ: &str = "kernel: MAP_SHARED read";
const ZERO_WRITE: &str = "kernel: anon zero page write";

/// Whom the kernel's handlers serve, and from what.
struct Stage {
    /// The snapshot, in memory.
    snap: File,
    source: HugeMemory,
    bytes: usize,
    faults: usize,
}

/// Bytes that are copied from, again and again.
const SOURCE_BYTES: usize = 2 << 20;

impl Stage {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = pick(settings, 8 << 20, 128 << 20, 2 << 30);
        check_memory(3 * bytes + (256 << 20))?;
        let mut snap = Store::memfd().file(bytes)?;
        write_content(&mut snap, bytes)?;
        let mut source = HugeMemory::new(SOURCE_BYTES)?;
        std::os::unix::fs::FileExt::read_exact_at(&snap, &mut source, 0)?;
        let faults = pick(settings, 1000, 10_000, 100_000) as usize;
        Ok(Self { snap, source, bytes: bytes as usize, faults })
    }
}

/// Scattered faults, answered by everybody.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let stage = Shared::new(settings, Stage::new);
    let name = format!("{} scattered faults", pick(settings, 1000, 10_000, 100_000));
    let case = Case::new(name, &METRICS, move || {
        let stage = stage.get()?;
        Ok(PEERS.iter().map(|(name, run)| alternative(&stage, name, *run)).collect())
    });
    let case = PEERS.iter().fold(case, |case, (name, _)| case.told("p50", name).told("p99", name));
    vec![case.usually(REPEAT)]
}

/// Microseconds of each touch.
type Run = fn(&Stage) -> Result<Vec<f64>, Unmeasured>;

const PEERS: [(&str, Run); 8] = [
    (COPY, |stage| copied(stage, Region::anonymous(stage.bytes, PageKind::Small)?, Waiting::Asleep)),
    (COPY_SPINNING, |stage| {
        copied(stage, Region::anonymous(stage.bytes, PageKind::Small)?, Waiting::Spinning)
    }),
    (COPY_MEMFD, |stage| {
        let file = Store::memfd().file(stage.bytes as u64)?;
        copied(stage, Region::shared(&file, stage.bytes)?, Waiting::Asleep)
    }),
    (CONTINUE, continued),
    (PRIVATE_READ, |stage| touched(stage, Region::private(&stage.snap, stage.bytes)?, Touch::Read)),
    (PRIVATE_WRITE, |stage| touched(stage, Region::private(&stage.snap, stage.bytes)?, Touch::Write)),
    (SHARED_READ, |stage| touched(stage, Region::shared(&stage.snap, stage.bytes)?, Touch::Read)),
    (ZERO_WRITE, |stage| touched(stage, Region::anonymous(stage.bytes, PageKind::Small)?, Touch::Write)),
];

fn alternative(stage: &Rc<Stage>, name: &'static str, run: Run) -> Alternative {
    let stage = Rc::clone(stage);
    Alternative::new(name, move |_| run(&stage).map(|taken| told(&taken))).excused(METRICS.len())
}

fn told(taken: &[f64]) -> Vec<f64> {
    let mean = taken.iter().sum::<f64>() / taken.len() as f64;
    vec![percentile(taken, 0.5), percentile(taken, 0.99), mean]
}

fn copied(stage: &Stage, mut region: Region, waiting: Waiting) -> Result<Vec<f64>, Unmeasured> {
    let uffd = faults_of(&region, Absent::Missing)?;
    let page = |at: usize| &stage.source[at % SOURCE_BYTES..][..PAGE];
    let content = Content::Repeated(SOURCE_BYTES);
    handled(
        &uffd,
        waiting,
        |uffd, at| uffd.copy(at, page(at)),
        || touch_scattered(&mut region, PAGE, stage.faults, Touch::Read, content),
    )
}

fn continued(stage: &Stage) -> Result<Vec<f64>, Unmeasured> {
    let mut region = Region::private(&stage.snap, stage.bytes)?;
    let uffd = faults_of(&region, Absent::Minor)?;
    handled(
        &uffd,
        Waiting::Asleep,
        |uffd, at| uffd.map(at, PAGE),
        || touch_scattered(&mut region, PAGE, stage.faults, Touch::Read, Content::Snapshot),
    )
}

fn touched(stage: &Stage, mut region: Region, touch: Touch) -> Result<Vec<f64>, Unmeasured> {
    region.read_anywhere();
    touch_scattered(&mut region, PAGE, stage.faults, touch, Content::Snapshot)
}

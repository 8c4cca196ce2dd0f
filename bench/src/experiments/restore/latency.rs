//! Latency: how long does a guest wait that touches one absent page?
//!
//! ```text
//!   server, ..          Quinion's: a page-fault server, all of whose snapshot is in memory. By one page a fault; by
//!                       64 KiB, and by mapping 512 KiB, where only one page in so many is touched
//!   COPY, CONTINUE      a thread of this process, the simplest handler: asleep between faults, or spinning
//!   MAP_PRIVATE, ..     the kernel answers, alone
//! ```
//!
//! Each page is touched once, in an order that looks random, and each touch is timed by the touching thread.

use std::fs::File;
use std::rc::Rc;

use quinion_vm::RestoreOptions;

use super::guest::{Content, ScatteredTouches, Touch, handled};
use super::host::{Host, handing_out_the_image};
use super::vmm::Guest;
use super::{REPEAT_OTHERS, pick};
use crate::experiments::populate::faults_of;
use crate::fixtures::pages::PAGE;
use crate::fixtures::scratch::write_content;
use crate::fixtures::shared::Shared;
use crate::fixtures::store::Store;
use crate::harness::machine::check_memory;
use crate::harness::statistics::percentile;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{Absent, HugeMemory, PageKind, Region, Waiting};

const METRICS: [Metric; 3] =
    [Metric::cost("p50", "us"), Metric::cost("p99", "us"), Metric::cost("mean", "us")];

const SERVER: &str = "server, COPY 4K";
const SERVER_RUN: &str = "server, COPY 64K";
const SERVER_MAPPED: &str = "server, CONTINUE 512K";
const COPY: &str = "COPY anon 4K, handler thread";
const COPY_SPINNING: &str = "COPY anon 4K, spinning handler";
const COPY_MEMFD: &str = "COPY memfd 4K, handler thread";
const CONTINUE: &str = "CONTINUE memfd 4K, handler thread";
const PRIVATE_READ: &str = "kernel: MAP_PRIVATE read";
const PRIVATE_WRITE: &str = "kernel: MAP_PRIVATE write";
const SHARED_READ: &str = "kernel: MAP_SHARED read";
const ZERO_WRITE: &str = "kernel: anon zero page write";

struct LatencyFixture {
    host: Host,
    snap: File,
    source: HugeMemory,
    bytes: usize,
    faults: usize,
}

/// Bytes by which the server answers a fault by default.
const RUN_BYTES: usize = 64 << 10;
/// Bytes that it maps for a fault, of an image that is fully resident.
const MAPPED_BYTES: usize = 512 << 10;
const SOURCE_BYTES: usize = 2 << 20;

impl LatencyFixture {
    /// Reads of pages here and there in a region that has the snapshot.
    fn reads(&self) -> ScatteredTouches {
        let (touch, content) = (Touch::Read, Content::Snapshot);
        ScatteredTouches { stretch: PAGE, count: self.faults, touch, content }
    }

    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = pick(settings, 8 << 20, 128 << 20, 2 << 30);
        check_memory(4 * bytes + (512 << 20))?;
        let host = Host::new(settings, bytes)?;
        let mut snap = Store::memfd().file(bytes)?;
        write_content(&mut snap, bytes)?;
        let mut source = HugeMemory::new(SOURCE_BYTES)?;
        std::os::unix::fs::FileExt::read_exact_at(&snap, &mut source, 0)?;
        let faults = pick(settings, 1000, 10_000, 100_000) as usize;
        Ok(Self { host, snap, source, bytes: bytes as usize, faults })
    }
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let fixture = Shared::new(settings, LatencyFixture::new);
    let name = format!("{} scattered faults", pick(settings, 1000, 10_000, 100_000));
    let case = Case::new(name, &METRICS, move || {
        let fixture = fixture.get()?;
        let all = OURS.iter().chain(&PEERS);
        Ok(all.map(|(name, run)| alternative(&fixture, name, *run)).collect())
    });
    let beside = |case: Case, ours, peer| case.compare("p50", ours, peer).compare("p99", ours, peer);
    // The simplest handler has a goal.
    let goal = Some(1.0);
    let case = case.compare("p50", SERVER, COPY).goal(goal).compare("p99", SERVER, COPY).goal(goal);
    let case = PEERS[1..].iter().fold(case, |case, (peer, _)| beside(case, SERVER, peer));
    let case = beside(beside(case, SERVER_MAPPED, CONTINUE), SERVER_MAPPED, COPY);
    vec![beside(case, SERVER_RUN, COPY).usually(REPEAT_OTHERS)]
}

type Run = fn(&LatencyFixture) -> Result<Vec<f64>, Unmeasured>;

const OURS: [(&str, Run); 3] = [
    (SERVER, |fixture| served(fixture, PAGE)),
    (SERVER_RUN, |fixture| served(fixture, RUN_BYTES)),
    (SERVER_MAPPED, mapped),
];

const PEERS: [(&str, Run); 8] = [
    (COPY, |fixture| copied(fixture, Region::anonymous(fixture.bytes, PageKind::Small)?, Waiting::Asleep)),
    (COPY_SPINNING, |fixture| {
        copied(fixture, Region::anonymous(fixture.bytes, PageKind::Small)?, Waiting::Spinning)
    }),
    (COPY_MEMFD, |fixture| {
        let file = Store::memfd().file(fixture.bytes as u64)?;
        copied(fixture, Region::shared(&file, fixture.bytes)?, Waiting::Asleep)
    }),
    (CONTINUE, continued),
    (PRIVATE_READ, |fixture| touched(fixture, Region::private(&fixture.snap, fixture.bytes)?, Touch::Read)),
    (PRIVATE_WRITE, |fixture| touched(fixture, Region::private(&fixture.snap, fixture.bytes)?, Touch::Write)),
    (SHARED_READ, |fixture| touched(fixture, Region::shared(&fixture.snap, fixture.bytes)?, Touch::Read)),
    (ZERO_WRITE, |fixture| {
        touched(fixture, Region::anonymous(fixture.bytes, PageKind::Small)?, Touch::Write)
    }),
];

fn alternative(fixture: &Rc<LatencyFixture>, name: &'static str, run: Run) -> Alternative {
    let fixture = Rc::clone(fixture);
    Alternative::new(name, move |_| run(&fixture).map(|taken| summary(&taken))).excused(METRICS.len())
}

fn summary(taken: &[f64]) -> Vec<f64> {
    let mean = taken.iter().sum::<f64>() / taken.len() as f64;
    vec![percentile(taken, 0.5), percentile(taken, 0.99), mean]
}

/// Times of faults at a server that answers each with so many bytes. Pages are touched that far from each other, so
/// that each touch is a fault.
fn served(fixture: &LatencyFixture, run: usize) -> Result<Vec<f64>, Unmeasured> {
    let (cache, mut options) = (fixture.host.warm_cache()?, RestoreOptions::new());
    options.run_bytes = run as u64;
    let touches = ScatteredTouches { stretch: run, ..fixture.reads() };
    Ok(fixture.host.start(&cache, options)?.run(Guest::copied, |region| touches.run(region))?.0)
}

/// Times of faults in an image that is fully resident: so all around a fault is mapped with it.
fn mapped(fixture: &LatencyFixture) -> Result<Vec<f64>, Unmeasured> {
    let touches = ScatteredTouches { stretch: MAPPED_BYTES, ..fixture.reads() };
    fixture.host.serve_resident(handing_out_the_image(), |region| touches.run(region))
}

fn copied(fixture: &LatencyFixture, mut region: Region, waiting: Waiting) -> Result<Vec<f64>, Unmeasured> {
    let uffd = faults_of(&region, Absent::Missing)?;
    let source: &[u8] = &fixture.source;
    let page = |at: usize| &source[at % SOURCE_BYTES..][..PAGE];
    let touches = ScatteredTouches { content: Content::Repeated(SOURCE_BYTES), ..fixture.reads() };
    handled(&uffd, waiting, |uffd, at| uffd.copy(at, page(at)), || touches.run(&mut region))
}

fn continued(fixture: &LatencyFixture) -> Result<Vec<f64>, Unmeasured> {
    let mut region = Region::private(&fixture.snap, fixture.bytes)?;
    let uffd = faults_of(&region, Absent::Minor)?;
    handled(&uffd, Waiting::Asleep, |uffd, at| uffd.map(at, PAGE), || fixture.reads().run(&mut region))
}

fn touched(fixture: &LatencyFixture, mut region: Region, touch: Touch) -> Result<Vec<f64>, Unmeasured> {
    region.read_anywhere();
    ScatteredTouches { touch, ..fixture.reads() }.run(&mut region)
}

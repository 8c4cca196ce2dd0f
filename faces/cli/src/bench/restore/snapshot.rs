//! Snapshot: it is in a file. From nothing to all of it touched by the guest, page by page, how long does it take?
//!
//! ```text
//!   cold   nothing of the file is in memory, ours or the kernel's         warm   all of it is
//!
//!   MAP_PRIVATE         the kernel's own way: the file is mapped, and read ahead as it likes
//!   handler, COPY 4K    as the example handlers do it: the file is mapped, and each fault copies a page from there
//!   eager, COPY 2M      all of the file is copied before the guest begins
//! ```
//!
//! CPU time is the whole process's, who touches and who answers together.

use std::fs::File;
use std::rc::Rc;
use std::time::Instant;

use super::guest::{handled, touch_all};
use super::{REPEAT, check_memory, pick};
use crate::bench::caches::{Drops, check_warm};
use crate::bench::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::bench::pages::PAGE;
use crate::bench::populate::faults_of;
use crate::bench::scratch::Scratch;
use crate::bench::shared::Shared;
use crate::bench::timing::process_cpu_ns;
use crate::sys::{Absent, Mapped, PageKind, Region, Waiting};

const METRICS: [Metric; 2] = [Metric::cost("time", "s"), Metric::cost("cpu", "s")];

const MAP_PRIVATE: &str = "MAP_PRIVATE";
const HANDLER: &str = "handler, COPY 4K";
const EAGER: &str = "eager, COPY 2M";
const UNIT: usize = 2 << 20;

/// What is in memory when it begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Cold,
    Warm,
}

/// The file, and who has it open.
struct Snapshot {
    scratch: Scratch,
    file: File,
    drops: Drops,
}

impl Snapshot {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = bytes(settings);
        // The guest's, the kernel's, ours.
        check_memory(3 * bytes + (512 << 20))?;
        let scratch = Scratch::new(&settings.folder, bytes)?;
        let file = File::open(scratch.path())?;
        Ok(Self { scratch, file, drops: Drops::of(settings) })
    }

    fn len(&self) -> usize {
        self.scratch.bytes() as usize
    }

    /// The kernel has nothing of it, or all.
    fn prepare(&self, before: Before) -> Result<(), Unmeasured> {
        let files = std::slice::from_ref(&self.file);
        match before {
            Before::Cold => self.drops.make_cold(files),
            Before::Warm => {
                let mapped = Mapped::new(&self.file, self.len())?;
                let sum = mapped.iter().step_by(PAGE).fold(0_u64, |sum, &byte| sum + u64::from(byte));
                std::hint::black_box(sum);
                check_warm(files)
            }
        }
    }
}

fn bytes(settings: &Settings) -> u64 {
    pick(settings, 8 << 20, 256 << 20, 3 << 30)
}

/// Cold and warm.
pub fn cases(settings: &Settings) -> [Case; 2] {
    let snapshot = Shared::new(settings, Snapshot::new);
    [("cold", Before::Cold), ("warm", Before::Warm)].map(|(name, before)| {
        let snapshot = snapshot.clone();
        let name = format!("snapshot file of {} MiB, {name}", bytes(settings) >> 20);
        let case = Case::new(name, &METRICS, move || {
            let snapshot = snapshot.get()?;
            Ok(PEERS.iter().map(|(name, run)| alternative(&snapshot, name, *run, before)).collect())
        });
        let told = |case: Case, name| case.told("time", name).told("cpu", name);
        PEERS.iter().fold(case.usually(REPEAT).without_warm_up(), |case, (name, _)| told(case, name))
    })
}

/// From nothing to all of it touched.
type Run = fn(&Snapshot) -> Result<(), Unmeasured>;

const PEERS: [(&str, Run); 3] = [(MAP_PRIVATE, map_private), (HANDLER, handler), (EAGER, eager)];

fn alternative(snapshot: &Rc<Snapshot>, name: &'static str, run: Run, before: Before) -> Alternative {
    let snapshot = Rc::clone(snapshot);
    let run = move |_| {
        snapshot.prepare(before)?;
        let (start, cpu) = (Instant::now(), process_cpu_ns());
        run(&snapshot)?;
        Ok(vec![start.elapsed().as_secs_f64(), (process_cpu_ns() - cpu) / 1e9])
    };
    Alternative::new(name, run).excused(METRICS.len())
}

fn map_private(snapshot: &Snapshot) -> Result<(), Unmeasured> {
    touch_all(&Region::private(&snapshot.file, snapshot.len())?)
}

fn handler(snapshot: &Snapshot) -> Result<(), Unmeasured> {
    let source = Mapped::new(&snapshot.file, snapshot.len())?;
    let region = Region::anonymous(snapshot.len(), PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    let copy = |uffd: &crate::sys::Uffd, at: usize| uffd.copy(at, &source[at..at + PAGE]);
    handled(&uffd, Waiting::Asleep, copy, || touch_all(&region))
}

fn eager(snapshot: &Snapshot) -> Result<(), Unmeasured> {
    let source = Mapped::new(&snapshot.file, snapshot.len())?;
    let region = Region::anonymous(snapshot.len(), PageKind::Small)?;
    let uffd = faults_of(&region, Absent::Missing)?;
    for (at, bytes) in (0..).step_by(UNIT).zip(source.chunks(UNIT)) {
        uffd.copy(at, bytes)?;
    }
    touch_all(&region)
}

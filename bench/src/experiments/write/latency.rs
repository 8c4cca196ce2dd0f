//! Latency: how long does one write in a thousand take, and how much longer while everything is written back?
//!
//! ```text
//!   thread 0    4 KiB over cached pages, one after another, each timed
//!   thread 1    nothing (idle)      or      sync_data, again and again: the dirty pages are always on their way
//! ```
//!
//! A cache that held its locks while it writes, or blocked pages under write-back, would show here. No cache can help
//! that two threads share a machine.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{MEMORY_OF_CHANGED, Source, Written};
use crate::fixtures::pages::PAGE;
use crate::fixtures::places::Places;
use crate::fixtures::shared::Shared;
use crate::harness::machine::check_memory;
use crate::harness::statistics::percentile;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const METRICS: [Metric; 2] = [Metric::cost("p99.9", "ns"), Metric::cost("p50", "ns")];
const IDLE: &str = "idle";
const BUSY: &str = "while written back";
const KERNEL_IDLE: &str = "kernel idle";
const KERNEL_BUSY: &str = "kernel while written back";
const GOAL: f64 = 0.5;
const ORDER: u8 = 9;

struct Files {
    ours: Written,
    kernel: Written,
    /// How long each alternative writes.
    time: Duration,
}

impl Files {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = settings.pick(8 << 20, 64 << 20);
        check_memory(bytes * (MEMORY_OF_CHANGED + 2) + (256 << 20))?;
        let folder = &settings.folder;
        let (ours, kernel) = (Written::ours(folder, bytes, ORDER)?, Written::kernel(folder, bytes)?);
        let time = settings.pick(Duration::from_millis(200), Duration::from_secs(2));
        Ok(Self { ours, kernel, time })
    }
}

pub fn cases(settings: &Settings) -> Vec<Case> {
    let files = Shared::new(settings, Files::new);
    let prepare = move || {
        let files = files.get()?;
        let of = |name, of: FileOf, load| alternative(&files, name, of, load);
        Ok(vec![
            of(IDLE, |files| &files.ours, ConcurrentLoad::Nothing),
            of(BUSY, |files| &files.ours, ConcurrentLoad::Syncs),
            of(KERNEL_IDLE, |files| &files.kernel, ConcurrentLoad::Nothing),
            of(KERNEL_BUSY, |files| &files.kernel, ConcurrentLoad::Syncs),
        ])
    };
    let case = Case::new("4 KiB over cached pages", &METRICS, prepare)
        .compare("p99.9", BUSY, IDLE)
        .goal(GOAL)
        .compare("p99.9", BUSY, KERNEL_BUSY)
        .compare("p99.9", IDLE, KERNEL_IDLE)
        .compare("p50", BUSY, KERNEL_BUSY)
        .compare("p50", IDLE, KERNEL_IDLE);
    vec![case]
}

type FileOf = fn(&Files) -> &Written;

#[derive(Clone, Copy, PartialEq, Eq)]
enum ConcurrentLoad {
    Nothing,
    Syncs,
}

fn alternative(files: &Rc<Files>, name: &'static str, of: FileOf, load: ConcurrentLoad) -> Alternative {
    let files = Rc::clone(files);
    let taken = RefCell::new(Vec::new());
    Alternative::new(name, move |repetition| {
        let written = of(&files);
        written.target.make_warm(written.bytes)?;
        written.target.sync()?;
        let mut taken = taken.borrow_mut();
        taken.clear();
        let stop = AtomicBool::new(false);
        let syncs = std::thread::scope(|scope| {
            let syncs = || -> Result<u64, Unmeasured> {
                let mut syncs = 0;
                while !stop.load(Ordering::Relaxed) {
                    written.target.sync()?;
                    syncs += 1;
                }
                Ok(syncs)
            };
            let other = (load == ConcurrentLoad::Syncs).then(|| scope.spawn(syncs));
            write_timed(written, repetition, files.time, &mut taken);
            stop.store(true, Ordering::Relaxed);
            other.map_or(Ok(0), |other| other.join().expect("it does not panic"))
        })?;
        if load == ConcurrentLoad::Syncs && syncs == 0 {
            return Err(Unmeasured::Failed("nothing was written back meanwhile".to_owned()));
        }
        Ok(vec![percentile(&taken, 0.999), percentile(&taken, 0.5)])
    })
}

fn write_timed(written: &Written, repetition: u64, time: Duration, taken: &mut Vec<f64>) {
    let mut source = Source::new(PAGE);
    let mut places = Places(repetition * 77 + 1);
    let end = Instant::now() + time;
    let mut before = Instant::now();
    while before < end {
        let position = places.next(written.bytes / PAGE as u64) * PAGE as u64;
        let bytes = source.of(position, repetition);
        before = Instant::now();
        written.target.write(0, bytes, position);
        taken.push(before.elapsed().as_nanos() as f64);
    }
}

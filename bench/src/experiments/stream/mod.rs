//! Stream: what does it cost to read a file four times as large as memory once, and how much of the hot file survives?
//!
//! ```text
//!   hot file     read before: once, or twice; or all the time meanwhile, a page every 250 us
//!   stream       then, by 1 or 4 jobs, each its own part from end to end, in reads of 4 KiB, 64 KiB, 1 MiB
//!     quinion       uncached reads through a cache of most of the limit; and pinned, not copied
//!     buffered      the kernel's reads           DONTCACHE   the same with RWF_DONTCACHE
//!     O_DIRECT      io_uring, 512 KiB a read, many in flight, registered buffers: no cache at all
//!   hot file     how much of it is still there
//!
//!   RAM-backed   32 files on a disk in memory, reads of 64 KiB, a job for each core: the cost of reclaim shows
//!   full machine no group has a limit, but a process holds all memory except as much: kswapd reclaims
//! ```
//!
//! Every alternative runs in a process of its own inside one memory limit, Quinion's too: its cache is smaller than the
//! limit by what the process itself needs. The hot file is read into the same cache as the stream; an alternative
//! without a cache reads it by the kernel's.
//!
//! The program chooses the sizes of its reads; a way that has no cache uses its own. The kernel counts the bytes that
//! the device read for the process (`read_bytes` of `/proc/self/io`), and so does Quinion's cache. `cpu` is that of the
//! process and of all kernel threads of the machine; `cpu (process)` is exact, and `kswapd` is that thread alone.
//!
//! A job does not know that its part ends before the file does: what it read ahead past its end, the next job reads
//! once more. That is a window for each of 4 jobs, 2 % of what a quick run streams and 1 in 2000 of a full one.
//!
//! Evenness is the slowest interval of a run, of 100 ms, beside the median one. All intervals of the last repetition
//! are recorded with the throughput of each way, in MB/s: a curve on the page of `--out`, and a line of its
//! `series.jsonl`.

mod way;
mod work;

pub use work::{JOB, work};

use std::fs::File;
use std::path::PathBuf;
use std::rc::Rc;

use crate::fixtures::caches::Drops;
use crate::fixtures::disk::Disk;
use crate::fixtures::limit::Limit;
use crate::fixtures::pages::PAGE;
use crate::fixtures::scratch::Scratch;
use crate::fixtures::shared::Shared;
use crate::fixtures::worker::{Answer, CPU, FROM_DEVICE, KERNEL, KSWAPD, SECONDS, WorkerTask};
use crate::harness::machine;
use crate::harness::rows::Series;
use crate::harness::{Alternative, Case, LastSeries, Metric, Settings, Unmeasured};
use crate::sys::{PageKind, Region};
use way::Way;

const THROUGHPUT: &str = "throughput";
const CPU_ALL: &str = "cpu";
const KSWAPD_TIME: &str = "kswapd";
const DEVICE: &str = "device (process)";
const CACHE: &str = "device (cache)";
const EVEN: &str = "evenness";
const HOT: &str = "hot kept";
const P50: &str = "hot p50";
const P99: &str = "hot p99";
const METRICS: [Metric; 10] = [
    Metric::gain(THROUGHPUT, "GiB/s"),
    Metric::cost(CPU_ALL, "s/GiB"),
    Metric::cost("cpu (process)", "s/GiB"),
    Metric::cost(KSWAPD_TIME, "s/GiB"),
    Metric::cost(DEVICE, "bytes per byte"),
    Metric::cost(CACHE, "bytes per byte"),
    Metric::gain(EVEN, "slowest per middle"),
    Metric::gain(HOT, "of all"),
    Metric::cost(P50, "us"),
    Metric::cost(P99, "us"),
];
/// The ideal of every alternative: each byte read once, and all of the hot file still cached.
const WANTED: &str = "wanted";

/// The least ratios wanted: three quarters of the CPU time of buffered reads (pinned, a tenth), 0.4 of that of
/// DONTCACHE; each byte from the device once, as it is printed, and all of the hot file.
const BUFFERED_CPU_GOAL: f64 = 1.0 / 0.75;
const DONTCACHE_CPU_GOAL: f64 = 1.0 / 0.4;
const PINNED_CPU_GOAL: f64 = 1.0 / 0.1;
const DEVICE_GOAL: f64 = 0.995;
const HOT_GOAL: f64 = 0.995;
const EVEN_GOAL: f64 = 0.9;
const REPEAT: usize = 5;
/// Memory of the machine that is left, beside the limit, to all other processes while one process holds the rest.
const LEFT_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hot {
    Never,
    Once,
    Twice,
    Meanwhile,
}

impl Hot {
    fn name(self) -> &'static str {
        match self {
            Self::Never => "nothing hot",
            Self::Once => "hot read once before",
            Self::Twice => "hot read twice before",
            Self::Meanwhile => "hot read meanwhile",
        }
    }
    /// How often the hot file is read from end to end before the stream.
    fn before(self) -> u64 {
        match self {
            Self::Never => 0,
            Self::Once => 1,
            Self::Twice | Self::Meanwhile => 2,
        }
    }
}

const KIB: u64 = 1 << 10;
/// Bytes of a read, jobs, and the hot file; a quick run takes the first of each four.
const SITUATIONS: [(u64, u64, Hot); 5] = [
    (64 * KIB, 1, Hot::Once),
    (4 * KIB, 1, Hot::Once),
    (64 * KIB, 1, Hot::Meanwhile),
    (64 * KIB, 4, Hot::Twice),
    (1024 * KIB, 4, Hot::Twice),
];

pub fn cases(settings: &Settings) -> Vec<Case> {
    let files = Shared::new(settings, Files::new);
    let in_memory = Shared::new(settings, Files::in_memory);
    let shortened = settings.pick(4, 1);
    let on_disk = SITUATIONS.into_iter().step_by(shortened).map(|(block, jobs, hot)| {
        let name = format!("{}, {}, {}", size(block), count(jobs), hot.name());
        case(name, &files, Situation { block, jobs, hot })
    });
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let situation = Situation { block: 64 * KIB, jobs: cores, hot: Hot::Never };
    let name = format!("RAM-backed, 32 files, {}, {}", size(situation.block), count(cores));
    let full = Shared::new(settings, Files::on_a_full_machine);
    let on_full = Situation { block: 64 * KIB, jobs: 1, hot: Hot::Once };
    let full_name =
        format!("full machine, {}, {}, {}", size(on_full.block), count(on_full.jobs), on_full.hot.name());
    let is_full = settings.pick(None, Some(()));
    let on_full = is_full.map(|()| case(full_name, &full, on_full));
    on_disk.chain([case(name, &in_memory, situation)]).chain(on_full).collect()
}

fn size(bytes: u64) -> String {
    if bytes < 1024 * KIB { format!("{} KiB", bytes / KIB) } else { format!("{} MiB", bytes / KIB / KIB) }
}

fn count(jobs: u64) -> String {
    if jobs == 1 { "1 job".to_owned() } else { format!("{jobs} jobs") }
}

#[derive(Clone, Copy)]
struct Situation {
    block: u64,
    jobs: u64,
    hot: Hot,
}

impl Situation {
    /// Whether Quinion's is read as a plain stream, too: in the situation of the original's figures, by one job.
    fn has_plain(self) -> bool {
        self.block == 64 * KIB && self.jobs == 1 && self.hot == Hot::Once
    }
}

fn case(name: String, files: &Shared<Files>, situation: Situation) -> Case {
    let files = files.clone();
    let case = Case::new(name, &METRICS, move || {
        let files = files.get()?;
        let of = |way| alternative(&files, situation, way);
        let ways = Way::ALL.into_iter().filter(|way| *way != Way::Plain || situation.has_plain());
        Ok(ways.map(of).chain([wanted()]).collect())
    });
    let ours = Way::Ours.name();
    let beside = |case: Case, (way, cpu): (Way, Option<f64>)| {
        let case = case.compare(THROUGHPUT, ours, way.name()).compare(CPU_ALL, ours, way.name()).goal(cpu);
        let even = (way == Way::Direct).then_some(EVEN_GOAL);
        let case = case.compare("cpu (process)", ours, way.name()).compare(EVEN, ours, way.name()).goal(even);
        let case = case.compare(DEVICE, ours, way.name());
        let case = if situation.hot == Hot::Never { case } else { case.compare(HOT, ours, way.name()) };
        if situation.hot != Hot::Meanwhile {
            return case;
        }
        case.compare(P50, ours, way.name()).compare(P99, ours, way.name())
    };
    let peers = [
        (Way::Buffered, Some(BUFFERED_CPU_GOAL)),
        (Way::DontCache, Some(DONTCACHE_CPU_GOAL)),
        (Way::Direct, None),
    ];
    let case = peers.into_iter().fold(case.without_warm_up().usually(REPEAT), beside);
    let case = case.compare(CACHE, ours, WANTED).goal(DEVICE_GOAL);
    let case =
        if situation.hot == Hot::Never { case } else { case.compare(HOT, ours, WANTED).goal(HOT_GOAL) };
    let case = pinned_rows(case);
    let case = if situation.has_plain() { plain_rows(case) } else { case };
    Way::ALL
        .into_iter()
        .filter(|way| *way != Way::Plain)
        .fold(case, |case, way| case.report(THROUGHPUT, way.name()).report(KSWAPD_TIME, way.name()))
}

fn pinned_rows(case: Case) -> Case {
    let (pinned, buffered, direct) = (Way::Pinned.name(), Way::Buffered.name(), Way::Direct.name());
    case.compare(THROUGHPUT, pinned, buffered)
        .compare(CPU_ALL, pinned, buffered)
        .goal(PINNED_CPU_GOAL)
        .compare("cpu (process)", pinned, buffered)
        .bound(THROUGHPUT, pinned, direct)
        .bound(CPU_ALL, pinned, direct)
        .compare(CACHE, pinned, WANTED)
        .goal(DEVICE_GOAL)
}

fn plain_rows(case: Case) -> Case {
    let (ours, plain) = (Way::Ours.name(), Way::Plain.name());
    [THROUGHPUT, CPU_ALL, CACHE, HOT].into_iter().fold(case, |case, metric| case.compare(metric, ours, plain))
}

fn wanted() -> Alternative {
    let mut values = vec![f64::NAN; METRICS.len()];
    for (metric, value) in METRICS.iter().zip(&mut values) {
        *value = if [DEVICE, CACHE, HOT].contains(&metric.name) { 1.0 } else { f64::NAN };
    }
    Alternative::new(WANTED, move |_| Ok(values.clone()))
}

fn alternative(files: &Rc<Files>, situation: Situation, way: Way) -> Alternative {
    let (files, series) = (Rc::clone(files), LastSeries::default());
    let last = Rc::clone(&series);
    let alternative = Alternative::new(way.name(), move |_| {
        let answer = files.measure(situation, way)?;
        let (seconds, series) = (answer.list(work::SERIES_SECONDS), answer.list(work::SERIES));
        *last.borrow_mut() = Series { unit: "MB/s", seconds, values: series };
        Ok(values(&answer, files.bytes()))
    });
    alternative.excused(METRICS.len()).with_series(THROUGHPUT, series)
}

fn values(answer: &Answer, bytes: u64) -> Vec<f64> {
    let of = |key| answer.number(key);
    let (bytes, gib) = (bytes as f64, bytes as f64 / f64::from(1 << 30));
    vec![
        gib / of(SECONDS),
        (of(CPU) + of(KERNEL)) / gib,
        of(CPU) / gib,
        of(KSWAPD) / gib,
        of(FROM_DEVICE) / bytes,
        of(work::FROM_DEVICE_BY_CACHE) / bytes,
        work::evenness(&answer.list(work::SERIES)),
        of(work::HOT_KEPT),
        of(work::HOT_P50) / 1e3,
        of(work::HOT_P99) / 1e3,
    ]
}

struct Files {
    place: Place,
    stream: Vec<PathBuf>,
    each: u64,
    hot: Option<Scratch>,
    limit: u64,
    /// All other memory, in the case in which no group has the limit.
    held: Option<Region>,
    interval_ms: u64,
    depth: u64,
}

enum Place {
    Device { stream: Scratch, drops: Drops },
    Memory(Disk),
}

impl Files {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let (bytes, hot) = (settings.pick(128 << 20, 4 << 30), settings.pick(16 << 20, 256 << 20));
        let stream = Scratch::new(&settings.folder, bytes)?;
        let hot = Some(Scratch::new(&settings.folder, hot)?);
        Ok(Self::of(settings, Place::Device { stream, drops: Drops::of(settings) }, hot))
    }

    /// As [`Self::new`], while one process holds all memory that the machine has beside the limit.
    fn on_a_full_machine(settings: &Settings) -> Result<Self, Unmeasured> {
        let files = Self::new(settings)?;
        let spare = machine::available_bytes().unwrap_or(0);
        let hold = spare.checked_sub(files.limit + LEFT_BYTES).filter(|hold| *hold >= LEFT_BYTES);
        let hold = hold.ok_or_else(|| {
            Unmeasured::Missing(format!(
                "{} MiB of the machine's memory are available, too few to hold most of them",
                spare >> 20
            ))
        })?;
        let mut held = Region::anonymous(hold as usize, PageKind::Huge)?;
        (0..held.len()).step_by(PAGE).for_each(|at| held.set_word(at, 1));
        Ok(Self { held: Some(held), ..files })
    }

    fn in_memory(settings: &Settings) -> Result<Self, Unmeasured> {
        let disk = Disk::new(settings, 32, settings.pick(8 << 20, 256 << 20))?;
        Ok(Self::of(settings, Place::Memory(disk), None))
    }

    fn of(settings: &Settings, place: Place, hot: Option<Scratch>) -> Self {
        let (stream, each) = match &place {
            Place::Device { stream, .. } => (vec![stream.path()], stream.bytes()),
            Place::Memory(disk) => (disk.paths().collect(), disk.bytes()),
        };
        let (limit, interval_ms) = (settings.pick(64 << 20, 1 << 30), settings.pick(20, 100));
        Self { place, stream, each, hot, limit, held: None, interval_ms, depth: settings.pick(8, 32) }
    }

    fn bytes(&self) -> u64 {
        self.each * self.stream.len() as u64
    }

    fn measure(&self, situation: Situation, way: Way) -> Result<Answer, Unmeasured> {
        let Situation { block, jobs, hot } = situation;
        let mut task = match &self.place {
            Place::Device { stream, drops } => {
                drops.make_cold(&[File::open(stream.path())?])?;
                WorkerTask::new(JOB)
            }
            Place::Memory(disk) => disk.task(JOB),
        };
        for (number, path) in self.stream.iter().enumerate() {
            task = task.with(&work::file_key(number as u64), path.display());
        }
        if let Some(scratch) = self.hot.as_ref().filter(|_| hot != Hot::Never) {
            let is_meanwhile = u64::from(hot == Hot::Meanwhile);
            task = task.with("hot", scratch.path().display());
            task = task.with("hot-before", hot.before()).with("hot-meanwhile", is_meanwhile);
        }
        let task = task.with("way", way.name()).with("block", block).with("jobs", jobs);
        let task = task.with("files", self.stream.len()).with("each", self.each);
        let task = task.with("interval-ms", self.interval_ms).with("depth", self.depth);
        let limit = self.held.is_none().then_some(self.limit);
        task.with("memory", Limit::memory_within(self.limit)).run(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_numbers_become_metrics() {
        let answer =
            Answer::default().with(SECONDS, [2.0]).with(CPU, [0.5]).with(KERNEL, [0.25]).with(KSWAPD, [0.0]);
        let answer = answer.with(FROM_DEVICE, [f64::from(1 << 30)]).with(work::SERIES, [100.0, 50.0, 80.0]);
        let answer = answer.with(work::HOT_KEPT, [1.0]).with(work::HOT_P50, [2000.0]);
        let values = values(&answer, 1 << 30);
        assert_eq!(values.len(), METRICS.len());
        assert_eq!(values[..5], [0.5, 0.75, 0.5, 0.0, 1.0]);
        assert!(values[5].is_nan() && values[9].is_nan());
        assert_eq!(values[6..9], [0.625, 1.0, 2.0]);
    }

    #[test]
    fn a_value_is_wanted_of_each_metric_that_has_a_right_answer() {
        let wanted = wanted().run_once(0).expect("it computes nothing");
        let has_one =
            METRICS.iter().zip(&wanted).filter(|(_, value)| **value == 1.0).map(|(metric, _)| metric.name);
        assert_eq!(has_one.collect::<Vec<_>>(), [DEVICE, CACHE, HOT]);
    }

    #[test]
    fn sizes_are_named_as_people_do() {
        assert_eq!([4 * KIB, 64 * KIB, 1024 * KIB].map(size), ["4 KiB", "64 KiB", "1 MiB"]);
        assert_eq!([1, 4].map(count), ["1 job", "4 jobs"]);
    }
}

//! Random: threads that read pages anywhere, for a while.
//!
//! Each sixteenth read is timed: to time each of them would cost as much as a hit does.

use std::fs::File as KernelFile;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use quinion::{File, Hint};
use quinion_testing::ablations::{self, ThreeWalks};
use rustix::fs::{Advice, OFlags, fadvise};

use crate::fixtures::caches::Drops;
use crate::fixtures::disk::Disk;
use crate::fixtures::limit::Limit;
use crate::fixtures::pages::PAGE;
use crate::fixtures::places::Places;
use crate::fixtures::scratch::is_from;
use crate::fixtures::shared::Shared;
use crate::fixtures::worker::{Answer, CPU, FROM_DEVICE, KERNEL, KSWAPD, Meter, SECONDS};
use crate::harness::plots::MEMORIES;
use crate::harness::statistics::percentile;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{HugeMemory, Mapped};

pub const JOB: &str = "thrash";

const OURS: &str = "quinion";
const PINNED: &str = "quinion, pinned";
const NAIVE: &str = "quinion, three walks";
const MMAP: &str = "kernel mmap";
const PREAD: &str = "kernel pread";
const DIRECT: &str = "O_DIRECT pread";
const DEVICE: &str = "device (process)";
const METRICS: [Metric; 7] = [
    Metric::gain("rate", "1000 reads/s"),
    Metric::cost("cpu", "us/read"),
    Metric::cost("cpu (process)", "us/read"),
    Metric::cost("kswapd", "us/read"),
    Metric::cost("p50", "us"),
    Metric::cost("p99", "us"),
    Metric::cost(DEVICE, "bytes per byte"),
];
const MMAP_GOAL: f64 = 2.0;
const PINNED_GOAL: f64 = 1.5;
const PREAD_GOAL: f64 = 1.4;
const REPEAT: usize = 2;
const TIMED: u64 = 16;

/// All sides under one limit, which is half of the file; and under others.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let load = Load::of(settings);
    let disk = Shared::new(settings, |settings| Disk::new(settings, 1, 2 * Load::of(settings).limit));
    let [least, half, most] = MEMORIES;
    let with = |limit| Load { limit, ..load };
    vec![
        case(&disk, half, load),
        rates(&disk, least, with(load.limit / 2)),
        rates(&disk, most, with(load.limit / 5 * 8)),
    ]
}

fn of(
    disk: &Shared<Disk>,
    times: &str,
    load: Load,
    ways: impl IntoIterator<Item = &'static str> + 'static,
) -> Case {
    let disk = disk.clone();
    let name = format!("random 4 KiB of {times} the limit, {} threads", load.jobs);
    let case = Case::new(name, &METRICS, move || {
        let disk = disk.get()?;
        let of = |name| {
            let disk = std::rc::Rc::clone(&disk);
            Alternative::new(name, move |repetition| measured(&disk, load, name, repetition))
        };
        Ok(ways.into_iter().map(of).collect())
    });
    case.without_warm_up().usually(REPEAT)
}

fn rates(disk: &Shared<Disk>, times: &str, load: Load) -> Case {
    let case = of(disk, times, load, [OURS, MMAP, PREAD]);
    [MMAP, PREAD]
        .into_iter()
        .fold(case, |case, peer| case.compare("rate", OURS, peer).compare(DEVICE, OURS, peer))
}

fn case(disk: &Shared<Disk>, times: &str, load: Load) -> Case {
    let case = of(disk, times, load, [OURS, PINNED, MMAP, PREAD, DIRECT, NAIVE]);
    let case = case
        .compare("rate", OURS, MMAP)
        .goal(MMAP_GOAL)
        .compare("rate", PINNED, MMAP)
        .goal(PINNED_GOAL)
        .compare("rate", OURS, PREAD)
        .goal(PREAD_GOAL)
        .compare("rate", OURS, DIRECT)
        .compare("rate", OURS, NAIVE)
        .compare("cpu", OURS, NAIVE)
        .compare("cpu (process)", OURS, NAIVE);
    let beside = |case: Case, metric| case.compare(metric, OURS, MMAP).compare(metric, OURS, PREAD);
    METRICS[1..].iter().map(|metric| metric.name).fold(case, beside)
}

#[derive(Clone, Copy)]
struct Load {
    limit: u64,
    jobs: u64,
    before_ms: u64,
    counted_ms: u64,
}

impl Load {
    fn of(settings: &Settings) -> Self {
        let (limit, jobs) = (settings.pick(80 << 20, 1 << 30), settings.pick(4, 16));
        let (before_ms, counted_ms) = (settings.pick(100, 5_000), settings.pick(100, 7_000));
        Self { limit, jobs, before_ms, counted_ms }
    }
}

fn measured(disk: &Disk, load: Load, way: &'static str, seed: u64) -> Result<Vec<f64>, Unmeasured> {
    let path = disk.paths().next().expect("it has one file");
    let task = disk.task(JOB).with("way", way).with("path", path.display()).with("bytes", disk.bytes());
    let task = task
        .with("jobs", load.jobs)
        .with("before-ms", load.before_ms)
        .with("memory", Limit::memory_within(load.limit));
    let answer = task.with("counted-ms", load.counted_ms).with("seed", seed).run(Some(load.limit))?;
    Ok(values(&answer))
}

fn values(answer: &Answer) -> Vec<f64> {
    let (reads, of) = (answer.number("reads"), |key| answer.number(key));
    let each = |seconds: f64| seconds * 1e6 / reads;
    vec![
        reads / 1e3 / of(SECONDS),
        each(of(CPU) + of(KERNEL)),
        each(of(CPU)),
        each(of(KSWAPD)),
        of("p50") / 1e3,
        of("p99") / 1e3,
        of(FROM_DEVICE) / (reads * PAGE as f64),
    ]
}

enum Reader {
    Ours(Box<File>),
    Pinned(Box<File>),
    Mapped(Arc<Mapped>),
    Kernel(KernelFile),
}

impl Reader {
    fn read(&self, buffer: &mut [u8], position: u64) -> Result<(), Unmeasured> {
        match self {
            Self::Ours(file) => file.read_exact_at(buffer, position)?,
            Self::Pinned(file) => buffer.copy_from_slice(file.pin(position, buffer.len())?.as_ref()),
            Self::Mapped(mapped) => buffer.copy_from_slice(&mapped[position as usize..][..buffer.len()]),
            Self::Kernel(file) => file.read_exact_at(buffer, position)?,
        }
        Ok(())
    }
}

fn readers(way: &str, path: &str, memory: u64, jobs: u64) -> Result<Vec<Reader>, Unmeasured> {
    let open = || -> Result<KernelFile, Unmeasured> { Ok(KernelFile::open(path)?) };
    let advised = || -> Result<Reader, Unmeasured> {
        let file = open()?;
        fadvise(&file, 0, None, Advice::Random).map_err(std::io::Error::from)?;
        Ok(Reader::Kernel(file))
    };
    let direct = || -> Result<Reader, Unmeasured> {
        let flags = OFlags::DIRECT.bits() as i32;
        Ok(Reader::Kernel(KernelFile::options().read(true).custom_flags(flags).open(path)?))
    };
    match way {
        OURS | PINNED | NAIVE => {
            let hooks = if way == NAIVE { ThreeWalks::HOOKS } else { None };
            let file = ablations::builder(hooks).memory(memory).build()?.open(path)?;
            let of = |_| -> Result<Reader, Unmeasured> {
                let file = file.clone();
                file.advise(Hint::Random)?;
                let file = Box::new(file);
                Ok(if way == PINNED { Reader::Pinned(file) } else { Reader::Ours(file) })
            };
            (0..jobs).map(of).collect()
        }
        MMAP => {
            let file = open()?;
            let mapped = Arc::new(Mapped::at_random(&file, file.metadata()?.len() as usize)?);
            Ok((0..jobs).map(|_| Reader::Mapped(Arc::clone(&mapped))).collect())
        }
        PREAD => (0..jobs).map(|_| advised()).collect(),
        DIRECT => (0..jobs).map(|_| direct()).collect(),
        _ => Err(Unmeasured::Failed(format!("`{way}` is no way to read"))),
    }
}

const BEFORE: u8 = 0;
const COUNTED: u8 = 1;
const OVER: u8 = 2;

pub fn work(task: &crate::fixtures::worker::WorkerTask) -> Result<Answer, Unmeasured> {
    let (path, jobs) = (task.text("path")?, task.number("jobs")?);
    let (bytes, seed) = (task.number("bytes")?, task.number("seed")?);
    Drops::OurFiles.make_cold(&[KernelFile::open(path)?])?;
    let readers = readers(task.text("way")?, path, task.number("memory")?, jobs)?;
    let pause = |key| -> Result<Duration, Unmeasured> { Ok(Duration::from_millis(task.number(key)?)) };
    let (before, counted) = (pause("before-ms")?, pause("counted-ms")?);
    let phase = AtomicU8::new(BEFORE);
    let (parts, answer) = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..)
            .zip(&readers)
            .map(|(number, reader)| {
                let phase = &phase;
                scope.spawn(move || read(reader, phase, bytes / PAGE as u64, seed * 1000 + number))
            })
            .collect();
        std::thread::sleep(before);
        let meter = Meter::start();
        phase.store(COUNTED, Ordering::Relaxed);
        std::thread::sleep(counted);
        phase.store(OVER, Ordering::Relaxed);
        let parts: Vec<_> =
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect();
        (parts, meter.stop())
    });
    let (mut reads, mut waits) = (0, Vec::new());
    for part in parts {
        let part = part?;
        reads += part.reads;
        waits.extend(part.waits_ns);
    }
    let percentiles = [0.5, 0.99].map(|share| percentile(&waits, share));
    Ok(answer.with("reads", [reads as f64]).with("p50", [percentiles[0]]).with("p99", [percentiles[1]]))
}

#[derive(Default)]
struct Part {
    reads: u64,
    waits_ns: Vec<f64>,
}

fn read(reader: &Reader, phase: &AtomicU8, pages: u64, seed: u64) -> Result<Part, Unmeasured> {
    let (mut buffer, mut part, mut places) = (HugeMemory::new(PAGE)?, Part::default(), Places(seed));
    for count in 0_u64.. {
        let now = phase.load(Ordering::Relaxed);
        if now == OVER {
            break;
        }
        let position = places.next(pages) * PAGE as u64;
        let start = (count % TIMED == 0).then(Instant::now);
        reader.read(&mut buffer, position)?;
        let wait = start.map(|start| start.elapsed().as_nanos() as f64);
        if !is_from(&buffer, position) {
            return Err(Unmeasured::Failed(format!("what was read is not what stands at {position}")));
        }
        if now == COUNTED {
            part.reads += 1;
            part.waits_ns.extend(wait);
        }
    }
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::worker::WorkerTask;

    #[test]
    fn a_workers_numbers_become_metrics() {
        let answer = Answer::default().with("reads", [2000.0]).with(SECONDS, [2.0]).with(CPU, [0.5]);
        let answer =
            answer.with(KERNEL, [0.25]).with(KSWAPD, [0.0]).with("p50", [1000.0]).with("p99", [9000.0]);
        let answer = answer.with(FROM_DEVICE, [1000.0 * 4096.0]);
        assert_eq!(values(&answer), [1.0, 375.0, 250.0, 0.0, 1.0, 9.0, 0.5]);
        assert_eq!(values(&answer).len(), METRICS.len());
    }

    #[test]
    fn all_threads_read_the_bytes_of_the_file() {
        let folder = tempfile::tempdir_in(".").expect("a folder");
        let path = folder.path().join("file");
        let mut file = KernelFile::create(&path).expect("a file");
        crate::fixtures::scratch::write_content(&mut file, 32 << 20).expect("room for it");
        for way in [OURS, PINNED, NAIVE, MMAP, PREAD, DIRECT] {
            let task =
                WorkerTask::new(JOB).with("way", way).with("path", path.display()).with("bytes", 32 << 20);
            let task = task.with("jobs", 2).with("before-ms", 1).with("counted-ms", 300).with("seed", 1);
            // A file system in memory keeps the file, and may have no direct reads (EINVAL).
            match work(&task.with("memory", 16 << 20)) {
                Ok(answer) => assert!(values(&answer)[0] > 0.0, "{way}: {answer:?}"),
                Err(why) => {
                    let is_refused = way == DIRECT && why.to_string().contains("os error 22");
                    assert!(matches!(why, Unmeasured::Missing(_)) || is_refused, "{way}: {why}");
                    eprintln!("not tested: {way}: {why}");
                }
            }
        }
    }
}

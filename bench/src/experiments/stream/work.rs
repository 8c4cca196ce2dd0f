//! Work: the worker of a stream.
//!
//! ```text
//!   1  nothing of the files is in the kernel's memory
//!   2  the hot file is read, as often as the situation says
//!   3  jobs stream their parts        one thread notes how far they are       one reads hot pages
//!   4  what is kept of the hot file
//! ```
//!
//! Only 3 is measured.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::way::{HotFile, Streams, Way};
use crate::fixtures::caches::Drops;
use crate::fixtures::pages::PAGE;
use crate::fixtures::places::Places;
use crate::fixtures::scratch::is_from;
use crate::fixtures::worker::{Answer, Meter, WorkerTask};
use crate::harness::Unmeasured;
use crate::harness::statistics::percentile;
use crate::sys::HugeMemory;

pub const JOB: &str = "stream";
/// Keys of the answer: MB/s of each whole interval, and the seconds from the start at which they ended; what the cache
/// says it has read; the part of the hot file that is kept, and nanoseconds of reads of its pages.
pub const SERIES: &str = "series";
pub const SERIES_SECONDS: &str = "series-seconds";
pub const FROM_DEVICE_BY_CACHE: &str = "from-device-by-cache";
pub const HOT_KEPT: &str = "hot-kept";
pub const HOT_P50: &str = "hot-p50";
pub const HOT_P99: &str = "hot-p99";

const HOT_PAUSE: Duration = Duration::from_micros(250);

pub fn file_key(number: u64) -> String {
    format!("file-{number}")
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Part {
    file: usize,
    range: Range<u64>,
}

/// The parts of each job: the files in turn, and a file that is alone in as many parts as there are jobs.
fn parts(files: usize, each: u64, jobs: u64) -> Vec<Vec<Part>> {
    let pieces = if files == 1 { jobs } else { 1 };
    let part = |file, piece| Part { file, range: each / pieces * piece..each / pieces * (piece + 1) };
    let all = (0..files).flat_map(|file| (0..pieces).map(move |piece| part(file, piece)));
    let mut parts = vec![Vec::new(); jobs as usize];
    all.enumerate().for_each(|(number, part)| parts[number % jobs as usize].push(part));
    parts
}

pub fn work(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let way = Way::of(task.text("way")?);
    let way = way.ok_or_else(|| Unmeasured::Failed("there is no such way to stream".to_owned()))?;
    let (block, depth) = (task.number("block")? as usize, task.number("depth")? as usize);
    let files = (0..task.number("files")?).map(|file| Ok(PathBuf::from(task.text(&file_key(file))?)));
    let files = files.collect::<Result<Vec<PathBuf>, Unmeasured>>()?;
    make_cold(files.iter().map(PathBuf::as_path).chain(task.text("hot").map(Path::new)))?;
    let streams = Streams::new(way, block, task.number("memory")?, depth)?;
    let hot = task.text("hot").ok().map(|path| streams.hot(Path::new(path))).transpose()?;
    if let Some(hot) = &hot {
        (0..task.number("hot-before")?).try_for_each(|_| read_all(hot))?;
    }
    let meanwhile = hot.as_ref().filter(|_| task.number("hot-meanwhile") == Ok(1));
    let parts = parts(files.len(), task.number("each")?, task.number("jobs")?);
    let interval = Duration::from_millis(task.number("interval-ms")?);
    let run = StreamRun { streams: &streams, files: &files, parts: &parts, interval, hot: meanwhile };
    let answer = run.measure()?;
    let Some(hot) = hot else { return Ok(answer) };
    Ok(answer.with(HOT_KEPT, [hot.kept()? as f64 / hot.len()? as f64]))
}

fn make_cold<'p>(paths: impl Iterator<Item = &'p Path>) -> Result<(), Unmeasured> {
    let files = paths.map(|path| Ok(File::open(path)?)).collect::<Result<Vec<File>, Unmeasured>>()?;
    Drops::OurFiles.make_cold(&files)
}

fn read_all(hot: &HotFile) -> Result<(), Unmeasured> {
    let (mut buffer, len) = (HugeMemory::new(64 << 10)?, hot.len()?);
    for at in (0..len).step_by(buffer.len()) {
        let bytes = buffer.len().min((len - at) as usize);
        hot.read(&mut buffer[..bytes], at)?;
    }
    Ok(())
}

/// A measurement of all jobs.
struct StreamRun<'r> {
    streams: &'r Streams,
    files: &'r [PathBuf],
    /// The parts of each job.
    parts: &'r [Vec<Part>],
    /// Between two values of the series.
    interval: Duration,
    /// The file that is read here and there meanwhile.
    hot: Option<&'r HotFile>,
}

impl StreamRun<'_> {
    fn measure(&self) -> Result<Answer, Unmeasured> {
        let Self { streams, files, parts, interval, hot } = *self;
        let (far, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        let by_cache = || streams.cache.as_ref().map(|cache| cache.stats().device_bytes as f64);
        let job = |parts: &[Part]| {
            let seen = |bytes| {
                far.fetch_add(bytes, Ordering::Relaxed);
            };
            parts.iter().try_for_each(|part| streams.read(&files[part.file], part.range.clone(), seen))
        };
        let job = &job;
        thread::scope(|scope| {
            let noting = scope.spawn(|| note(&far, &is_over, interval));
            let hot = hot.map(|hot| scope.spawn(|| read_hot(hot, &is_over)));
            let (before, meter) = (by_cache(), Meter::start());
            let jobs: Vec<_> = parts.iter().map(|parts| scope.spawn(move || job(parts))).collect();
            let ended: Vec<_> = jobs.into_iter().map(|job| job.join().expect("it does not panic")).collect();
            let answer = meter.stop();
            is_over.store(true, Ordering::Relaxed);
            noting.thread().unpark();
            let read = by_cache().zip(before).map(|(after, before)| after - before);
            let (seconds, series): (Vec<_>, Vec<_>) =
                noting.join().expect("it does not panic").into_iter().unzip();
            let answer = answer.with(SERIES, series).with(SERIES_SECONDS, seconds);
            let answer = answer.with(FROM_DEVICE_BY_CACHE, read.map_or(Vec::new(), |bytes| vec![bytes]));
            let waits = hot.map(|hot| hot.join().expect("it does not panic")).transpose()?;
            ended.into_iter().collect::<Result<(), Unmeasured>>()?;
            let Some(waits) = waits else { return Ok(answer) };
            let percentiles = [0.5, 0.99].map(|share| percentile(&waits, share));
            Ok(answer.with(HOT_P50, [percentiles[0]]).with(HOT_P99, [percentiles[1]]))
        })
    }
}

/// The end in seconds, and the MB/s, of each whole interval until it is over.
fn note(far: &AtomicU64, is_over: &AtomicBool, interval: Duration) -> Vec<(f64, f64)> {
    let (mut series, start, mut before) = (Vec::new(), Instant::now(), far.load(Ordering::Relaxed));
    let mut last = start;
    loop {
        while last.elapsed() < interval && !is_over.load(Ordering::Relaxed) {
            thread::park_timeout(interval - last.elapsed().min(interval));
        }
        if is_over.load(Ordering::Relaxed) {
            return series;
        }
        let (now, bytes) = (Instant::now(), far.load(Ordering::Relaxed));
        let rate = (bytes - before) as f64 / 1e6 / (now - last).as_secs_f64();
        series.push(((now - start).as_secs_f64(), rate));
        (last, before) = (now, bytes);
    }
}

/// Nanoseconds of reads of pages here and there, one at least, until it is over.
fn read_hot(hot: &HotFile, is_over: &AtomicBool) -> Result<Vec<f64>, Unmeasured> {
    let (mut buffer, mut waits, mut places) = (HugeMemory::new(PAGE)?, Vec::new(), Places(1));
    let pages = hot.len()? / PAGE as u64;
    loop {
        let at = places.next(pages) * PAGE as u64;
        let start = Instant::now();
        hot.read(&mut buffer, at)?;
        waits.push(start.elapsed().as_nanos() as f64);
        if !is_from(&buffer, at) {
            return Err(Unmeasured::Failed(format!("what was read is not what stands at {at}")));
        }
        if is_over.load(Ordering::Relaxed) {
            return Ok(waits);
        }
        thread::sleep(HOT_PAUSE);
    }
}

/// The slowest interval beside the middle one; not a number if there are fewer than three.
pub fn evenness(series: &[f64]) -> f64 {
    if series.len() < 3 { f64::NAN } else { percentile(series, 0.0) / percentile(series, 0.5) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_of_it_and_each_job_has_as_many() {
        let part = |file, start, end| Part { file, range: start..end };
        assert_eq!(parts(1, 80, 1), [[part(0, 0, 80)]]);
        assert_eq!(parts(1, 80, 4).concat(), [0, 20, 40, 60].map(|start| part(0, start, start + 20)));
        let many = parts(32, 8, 2);
        assert!(many.iter().all(|parts| parts.len() == 16));
        assert_eq!(many[1][..2], [part(1, 0, 8), part(3, 0, 8)]);
    }

    #[test]
    fn evenness_is_the_slowest_beside_the_middle() {
        assert_eq!(evenness(&[4.0, 1.0, 2.0, 2.0, 8.0]), 0.5);
        assert!(evenness(&[1.0, 2.0]).is_nan());
    }

    #[test]
    fn every_way_reads_the_whole_file_and_says_how_many_pages_stay() {
        // More than the memory. Uncached reads take nothing of what is hot. Plain ones are scanned as any: a stream
        // read the hot file, so half of it is where streams are evicted first. Twice proves nothing there, and a second
        // job that begins late, and has passed nothing yet, takes a part of that.
        let folder = tempfile::tempdir_in(".").expect("a folder");
        let [path, hot] = ["stream", "hot"].map(|name| folder.path().join(name));
        for (path, bytes) in [(&path, 24 << 20), (&hot, 2 << 20)] {
            let mut file = File::create(path).expect("a file");
            crate::fixtures::scratch::write_content(&mut file, bytes).expect("room for it");
        }
        for way in Way::ALL {
            let task = WorkerTask::new(JOB).with("way", way.name()).with("block", 64 << 10).with("jobs", 2);
            let task = task.with("files", 1).with(&file_key(0), path.display()).with("each", 24 << 20);
            let task = task.with("hot", hot.display()).with("hot-before", 2).with("hot-meanwhile", 1);
            let task = task.with("interval-ms", 1).with("depth", 4).with("memory", 16 << 20);
            match work(&task) {
                Ok(answer) => {
                    let kept = answer.number(HOT_KEPT);
                    assert!(
                        (0.0..=1.0).contains(&kept) && answer.number(HOT_P50) > 0.0,
                        "{way:?}: {answer:?}"
                    );
                    let is_uncached = matches!(way, Way::Ours | Way::Pinned);
                    assert!(!is_uncached || kept == 1.0, "{way:?} took what was hot: {answer:?}");
                    let (seconds, series) = (answer.list(SERIES_SECONDS), answer.list(SERIES));
                    assert!(seconds.is_sorted() && seconds.len() == series.len(), "{answer:?}");
                    let read = answer.number(FROM_DEVICE_BY_CACHE);
                    assert_eq!(read.is_nan(), !way.is_ours(), "{read}");
                }
                // A file system in memory keeps its files, and may have no direct reads (EINVAL).
                Err(why) => {
                    let is_refused = way == Way::Direct && why.to_string().contains("os error 22");
                    assert!(matches!(why, Unmeasured::Missing(_)) || is_refused, "{way:?}: {why}");
                    eprintln!("not tested: {way:?}: {why}");
                }
            }
        }
    }
}

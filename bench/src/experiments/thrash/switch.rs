//! Switch: a file that was read in large folios is read page by page.
//!
//! ```text
//!   in sequence     [---- folio ----][---- folio ----]    of which most are evicted:
//!   remembered      [---- shadow ---][---- shadow ---]
//!   page by page          [f]                             the shadow around it is cut, and the rest remembered
//! ```
//!
//! | way | a page that is read alone enters the index |
//! |---|---|
//! | single walk | as a batch of one: conflict, shadow, cut and store on one way down |
//! | three walks | a way down each for the conflict check, the order of the shadow, and the store |
//!
//! Both find the same, split the same shadows and end with the same tree; they differ in the number of walks. The rest
//! of a read, a new page and the copy, is the same too, so a ratio of times says what the walks cost in a whole read.
//!
//! As in the original's measurement there are 16 jobs, and a limit on the memory of the process: each measured
//! alternative is a worker in a group of its own, and the cache is smaller than the limit by what the process needs.
//! Which of two jobs gets the file's lock first is not determined: counts differ a little from run to run.

use std::sync::Arc;
use std::thread;

use quinion::internals::hooks;
use quinion::internals::mapping::IndexHooks;
use quinion::{File, Hint};
use quinion_testing::ablations::{self, ThreeWalks};

use crate::fixtures::limit::Limit;
use crate::fixtures::pages::{PAGE, Pages, shuffled, word_of};
use crate::fixtures::worker::{Answer, CPU, Meter, SECONDS, WorkerTask};
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

pub const JOB: &str = "switch";

const METRICS: [Metric; 5] = [
    Metric::cost("time", "ns/read"),
    Metric::cost("cpu", "ns/read"),
    Metric::cost("descents", "per insertion"),
    Metric::gain("splits", "steps per 1000 insertions"),
    Metric::gain("shadows found", "per 1000 insertions"),
];
const SINGLE: &str = "single walk";
const NAIVE: &str = "three walks";

pub fn case(settings: &Settings) -> Case {
    let load = Load {
        memory: Limit::memory_within(settings.pick(64 << 20, 512 << 20)),
        pages_log2: settings.pick(15, 18),
        jobs: settings.pick(4, 16),
    };
    let limit = settings.pick(64 << 20, 512 << 20);
    let name = format!("large folios, then 4 KiB of twice the limit, {} jobs", load.jobs);
    let case = Case::new(name, &METRICS, move || {
        let of = |name| {
            Alternative::new(name, move |_| {
                let task = WorkerTask::new(JOB).with("way", name).with("memory", load.memory);
                let task = task.with("pages-log2", load.pages_log2).with("jobs", load.jobs);
                let answer = task.run(Some(limit))?;
                Ok(METRICS.map(|metric| answer.number(&key(metric))).to_vec())
            })
        };
        Ok(vec![of(SINGLE), of(NAIVE)])
    });
    case.compare("time", SINGLE, NAIVE)
        .compare("cpu", SINGLE, NAIVE)
        .compare("descents", SINGLE, NAIVE)
        .report("splits", SINGLE)
        .report("splits", NAIVE)
        .report("shadows found", SINGLE)
}

/// How much is read, through how large a cache: less than the file of 2^`pages_log2` pages; and by how many.
#[derive(Clone, Copy)]
struct Load {
    memory: u64,
    pages_log2: u32,
    jobs: u64,
}

pub fn work(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let hooks = if task.text("way")? == SINGLE { None } else { ThreeWalks::HOOKS };
    let load = Load {
        memory: task.number("memory")?,
        pages_log2: task.number("pages-log2")? as u32,
        jobs: task.number("jobs")?,
    };
    run(load, hooks)
}

fn run(load: Load, hooks: Option<&'static dyn IndexHooks>) -> Result<Answer, Unmeasured> {
    let cache = ablations::builder(hooks).memory(load.memory).build()?;
    let file = cache.open_backend(Arc::new(Pages(1 << load.pages_log2)))?;
    in_sequence(&file)?;
    let (stats, counts) = (cache.stats(), hooks::tree_counts(&file));
    let meter = Meter::start();
    page_by_page(&file, load)?;
    let answer = meter.stop();
    let (after, tree) = (cache.stats(), hooks::tree_counts(&file));
    let inserted = (after.inserted_pages - stats.inserted_pages) as f64;
    let splits = tree.splits - counts.splits;
    if splits == 0 {
        return Err(Unmeasured::Failed("no shadow was cut, so nothing was measured".to_owned()));
    }
    cache.check().map_err(Unmeasured::Failed)?;
    let found = after.refaulted_pages - stats.refaulted_pages;
    let each = |seconds: f64| seconds * 1e9 / (1_u64 << load.pages_log2) as f64;
    let values = [
        each(answer.number(SECONDS)),
        each(answer.number(CPU)),
        (tree.descents - counts.descents) as f64 / inserted,
        splits as f64 * 1e3 / inserted,
        found as f64 * 1e3 / inserted,
    ];
    Ok(METRICS.iter().zip(values).fold(answer, |answer, (metric, value)| answer.with(&key(*metric), [value])))
}

/// A metric's key in an answer; keys have no spaces.
fn key(metric: Metric) -> String {
    metric.name.replace(' ', "-")
}

fn in_sequence(file: &File) -> Result<(), Unmeasured> {
    file.advise(Hint::Sequential)?;
    let (mut buffer, mut position) = (vec![0; 1 << 20], 0);
    while let bytes @ 1.. = file.read_at(&mut buffer, position)? {
        check(&buffer[..bytes], position)?;
        position += bytes as u64;
    }
    Ok(())
}

fn page_by_page(file: &File, load: Load) -> Result<(), Unmeasured> {
    let job = |first: u64| -> Result<(), Unmeasured> {
        let file = file.clone();
        file.advise(Hint::Random)?;
        let mut buffer = [0; PAGE];
        for number in (first..1 << load.pages_log2).step_by(load.jobs as usize) {
            let position = shuffled(number, load.pages_log2) * PAGE as u64;
            file.read_exact_at(&mut buffer, position)?;
            check(&buffer, position)?;
        }
        Ok(())
    };
    let job = &job;
    thread::scope(|scope| {
        let jobs: Vec<_> = (0..load.jobs).map(|first| scope.spawn(move || job(first))).collect();
        jobs.into_iter().try_for_each(|job| job.join().expect("it does not panic"))
    })
}

fn check(bytes: &[u8], position: u64) -> Result<(), Unmeasured> {
    let mut pages = (position / PAGE as u64..).zip(bytes.chunks(PAGE));
    match pages.find(|(page, bytes)| bytes[..8] != word_of(*page)) {
        None => Ok(()),
        Some((page, _)) => Err(Unmeasured::Failed(format!("what was read is not page {page}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shadows_are_cut_the_same_by_either_way_and_a_single_walk_goes_down_less() {
        let of = |hooks| {
            let answer = run(Load { memory: 32 << 20, pages_log2: 14, jobs: 1 }, hooks).expect("it runs");
            METRICS.map(|metric| answer.number(&key(metric)))
        };
        let (single, naive) = (of(None), of(ThreeWalks::HOOKS));
        assert!((single[2] + 1.9..single[2] + 2.1).contains(&naive[2]), "{single:?} {naive:?}");
        assert_eq!(single[3..], naive[3..]);
        assert!(single[3] > 0.0 && single[4] > 0.0, "{single:?}");
    }

    #[test]
    fn all_jobs_together_read_the_whole_file() {
        let answer = run(Load { memory: 32 << 20, pages_log2: 14, jobs: 4 }, None).expect("it runs");
        assert!(answer.number("shadows-found") > 0.0 && answer.number("time") > 0.0, "{answer:?}");
    }

    #[test]
    fn a_wrong_page_is_seen() {
        let mut bytes = vec![0; 2 * PAGE];
        bytes[..8].copy_from_slice(&word_of(3));
        bytes[PAGE..PAGE + 8].copy_from_slice(&word_of(4));
        assert!(check(&bytes, 3 * PAGE as u64).is_ok());
        assert!(check(&bytes, 4 * PAGE as u64).is_err());
    }
}

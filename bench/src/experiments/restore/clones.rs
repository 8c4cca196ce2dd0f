//! Clones: how soon have ten machines of one image touched all of it, and in how much memory?
//!
//! ```text
//!   image            Quinion's: ten private mappings of its file, by the kernel's faults, or by CONTINUE
//!   UFFDIO_COPY      ten times the bytes, in memory that is each machine's alone
//!   MAP_PRIVATE      ten private mappings of a file that the kernel has cached
//! ```
//!
//! Each way works in a process of its own, whose memory is measured: what the image's file takes, once, and the pages
//! that are private; and beside it the process's share of all that it has mapped (PSS), in which a page of ten mappings
//! counts once.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use quinion::{Cache, Image};

use super::guest::touch_all;
use super::{REPEAT_OTHERS, pick};
use crate::experiments::populate::faults_of;
use crate::fixtures::caches::{check_warm, kept_bytes};
use crate::fixtures::scratch::Scratch;
use crate::fixtures::shared::Shared;
use crate::fixtures::worker::{Answer, WorkerTask};
use crate::harness::machine::check_memory;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::{Absent, Mapped, PageKind, Region};

pub const JOB: &str = "clones";

const CLONES: usize = 10;
const UNIT: usize = 2 << 20;

const METRICS: [Metric; 3] =
    [Metric::cost("time", "s"), Metric::cost("memory", "MiB"), Metric::cost("PSS", "MiB")];
const KEYS: [&str; 3] = ["seconds", "memory", "pss"];

const IMAGE: &str = "image";
const IMAGE_CONTINUE: &str = "image, CONTINUE";
const COPY: &str = "UFFDIO_COPY";
const MAP_PRIVATE: &str = "MAP_PRIVATE of a cached file";

const WAYS: [&str; 4] = [IMAGE, IMAGE_CONTINUE, COPY, MAP_PRIVATE];

pub fn case(settings: &Settings) -> Case {
    let bytes = pick(settings, 4 << 20, 64 << 20, 512 << 20);
    let scratch = Shared::new(settings, |settings| {
        let bytes = pick(settings, 4 << 20, 64 << 20, 512 << 20);
        // Ten copies; and the file.
        check_memory((CLONES as u64 + 2) * bytes + (256 << 20))?;
        Scratch::new(&settings.folder, bytes)
    });
    let case = Case::new(format!("{CLONES} clones of {} MiB", bytes >> 20), &METRICS, move || {
        let scratch = scratch.get()?;
        Ok(WAYS.iter().map(|way| alternative(&scratch, way)).collect())
    });
    // A cached file that is mapped ten times takes the memory of one: no more than a twentieth beyond that.
    let goal = |metric, ours, peer| match (metric, ours, peer) {
        ("time", IMAGE, MAP_PRIVATE) => Some(0.9),
        ("memory", _, MAP_PRIVATE) => Some(1.0 / 1.05),
        _ => None,
    };
    let rows = |case: Case, (ours, peer)| {
        METRICS.iter().fold(case, |case, metric| {
            case.compare(metric.name, ours, peer).goal(goal(metric.name, ours, peer))
        })
    };
    let pairs = [(IMAGE, COPY), (IMAGE, MAP_PRIVATE), (IMAGE_CONTINUE, COPY), (IMAGE_CONTINUE, MAP_PRIVATE)];
    pairs.into_iter().fold(case, rows).usually(REPEAT_OTHERS).without_warm_up()
}

fn alternative(scratch: &Rc<Scratch>, way: &'static str) -> Alternative {
    let scratch = Rc::clone(scratch);
    let run = move |_| {
        let task = WorkerTask::new(JOB).with("way", way).with("snapshot", scratch.path().display());
        let answer = task.run(None)?;
        Ok(KEYS.iter().map(|key| answer.number(key)).collect())
    };
    Alternative::new(way, run).excused(METRICS.len())
}

pub fn work(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let snapshot = File::open(task.text("snapshot")?)?;
    match task.text("way")? {
        IMAGE => images(task.text("snapshot")?.as_ref(), Ahead::Nothing),
        IMAGE_CONTINUE => images(task.text("snapshot")?.as_ref(), Ahead::All),
        COPY => copies(&snapshot),
        MAP_PRIVATE => private_maps(&snapshot),
        way => Err(Unmeasured::Failed(format!("there is no way `{way}` to make clones"))),
    }
}

/// Pages that are put into a clone's page table before it is touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ahead {
    Nothing,
    All,
}

fn images(snapshot: &Path, ahead: Ahead) -> Result<Answer, Unmeasured> {
    let len = std::fs::metadata(snapshot)?.len();
    let cache = Cache::builder().memory(len + len / 8 + (64 << 20)).build()?;
    let image = Image::from_snapshot(&cache, snapshot)?;
    image.populate()?;
    let clone = || -> Result<Region, Unmeasured> {
        let region = Region::private(image.fd(), len as usize)?;
        if ahead == Ahead::All {
            let uffd = faults_of(&region, Absent::Minor)?;
            for at in (0..region.len()).step_by(UNIT) {
                uffd.map(at, UNIT)?;
            }
        }
        Ok(region)
    };
    measured(clone, || Ok(File::from(image.fd().try_clone_to_owned()?).metadata()?.blocks() * 512))
}

fn copies(snapshot: &File) -> Result<Answer, Unmeasured> {
    let len = snapshot.metadata()?.len() as usize;
    let source = warm(snapshot)?;
    let clone = || -> Result<Region, Unmeasured> {
        let region = Region::anonymous(len, PageKind::Small)?;
        let uffd = faults_of(&region, Absent::Missing)?;
        for (at, bytes) in (0..).step_by(UNIT).zip(source.chunks(UNIT)) {
            uffd.copy(at, bytes)?;
        }
        Ok(region)
    };
    measured(clone, || Ok(0))
}

fn private_maps(snapshot: &File) -> Result<Answer, Unmeasured> {
    let len = snapshot.metadata()?.len() as usize;
    warm(snapshot)?;
    let kept = || kept_bytes(std::slice::from_ref(snapshot));
    measured(|| Ok(Region::private(snapshot, len)?), kept)
}

fn warm(snapshot: &File) -> Result<Mapped, Unmeasured> {
    let mapped = Mapped::new(snapshot, snapshot.metadata()?.len() as usize)?;
    let sum = mapped.iter().step_by(4096).fold(0_u64, |sum, &byte| sum + u64::from(byte));
    std::hint::black_box(sum);
    check_warm(std::slice::from_ref(snapshot))?;
    Ok(mapped)
}

/// Makes the clones and touches all of them; `image` is the number of bytes that they have in common.
fn measured(
    clone: impl Fn() -> Result<Region, Unmeasured>,
    image: impl FnOnce() -> Result<u64, Unmeasured>,
) -> Result<Answer, Unmeasured> {
    let start = Instant::now();
    let mut clones = Vec::new();
    for _ in 0..CLONES {
        let region = clone()?;
        touch_all(&region)?;
        clones.push(region);
    }
    let seconds = start.elapsed().as_secs_f64();
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let memory = image()? + bytes_of(&rollup, "Anonymous:")?;
    let pss = bytes_of(&rollup, "Pss:")?;
    drop(clones);
    Ok(Answer::default().with(KEYS[0], [seconds]).with(KEYS[1], [mib(memory)]).with(KEYS[2], [mib(pss)]))
}

/// A line of `/proc/self/smaps_rollup`, which are in KiB.
fn bytes_of(rollup: &str, key: &str) -> Result<u64, Unmeasured> {
    let line = rollup.lines().find_map(|line| line.strip_prefix(key));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let missing = || Unmeasured::Missing(format!("this kernel's smaps_rollup has no line {key}"));
    kib.map(|kib| kib << 10).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_key_alone() {
        let rollup =
            "ffff-ffff ---p 00000000 00:00 0 [rollup]\nRss:  12 kB\nPss:    8 kB\nPss_Dirty:  3 kB\n";
        assert_eq!([bytes_of(rollup, "Rss:"), bytes_of(rollup, "Pss:")], [Ok(12 << 10), Ok(8 << 10)]);
        assert!(bytes_of(rollup, "Anonymous:").is_err());
    }
}

//! Another: what does a hit cost in another process, which reads the owner's memory by a read-only mapping?
//!
//! ```text
//!   own process      File::read_at by the process that owns the cache
//!   viewer           this program again, with read-only maps of the same memory, as a process that is served freely
//!   by run, restricted  this program again under `quinion run`: its pread is answered out of the owner's memory
//!   pread            the same process without `run`, by the kernel
//! ```
//!
//! All read the whole file first, and then the same random pages of it.
//!
//! This program enters the kernel by instructions of its own, so `run` serves it in the restricted mode: before each
//! read it checks the descriptor, by two system calls. The row beside `pread` shows that cost. Most programs are served
//! without it, and then a hit is the viewer's read, which `cargo bench -p quinion-owner --bench viewer` measures in
//! more situations.

use std::fs::File as KernelFile;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use quinion::{Cache, File};
use quinion_owner::internals::serve::Service;
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};

use super::{Aligned, Files, METRICS, warm};
use crate::fixtures::caches::check_warm;
use crate::fixtures::command::served_bytes;
use crate::fixtures::pages::PAGE;
use crate::fixtures::places::Places;
use crate::fixtures::scratch::{FirstWords, is_from, write_content};
use crate::fixtures::shared::Shared;
use crate::fixtures::worker::{Answer, CPU, WorkerTask};
use crate::harness::folder::ScratchFolder;
use crate::harness::machine::check_memory;
use crate::harness::timing::alone;
use crate::harness::{Alternative, Case, Extent, Settings, Unmeasured};
use crate::sys::{self, Viewed};

pub const JOB: &str = "hit";
const PATH: &str = "path";
const READS: &str = "reads";
const SEED: &str = "seed";

/// Where a viewer finds the cache; without it, the file is read by `pread`.
const CACHE: &str = "cache";

const OWN: &str = "own process";
const VIEWER: &str = "viewer";
const BY_RUN: &str = "by run, restricted";
const PREAD: &str = "pread";
/// The least ratio wanted of the viewer, beside the process that owns the cache.
const GOAL: f64 = 0.95;
/// Passes of kernel reads at most, until the kernel has cached the whole file.
const WARM_RUNS_MAX: u32 = 5;
/// Runs by `run` at most, until the cache has answered all reads.
const SERVED_RUNS_MAX: u32 = 3;

pub fn case(settings: &Settings) -> Case {
    let ground = Shared::new(settings, Ground::new);
    let case = Case::new("4 KiB random, DRAM, in another process", &METRICS, move || {
        let ground = ground.get()?;
        let of = |name, read: fn(&Ground, u64) -> Result<f64, Unmeasured>| {
            let ground = Rc::clone(&ground);
            Alternative::new(name, move |repetition| Ok(vec![read(&ground, repetition)?]))
        };
        let kernel = of(PREAD, Ground::by_kernel).excused(METRICS.len());
        let others = [of(VIEWER, Ground::by_view), of(BY_RUN, Ground::by_run), kernel];
        Ok([of(OWN, Ground::own)].into_iter().chain(others).collect())
    });
    case.compare("cpu", VIEWER, OWN)
        .goal(GOAL)
        .compare("cpu", VIEWER, PREAD)
        .compare("cpu", BY_RUN, OWN)
        .compare("cpu", BY_RUN, PREAD)
}

/// A file that no process writes to, so that the owner may serve it, and its handle in the cache.
struct Ground {
    bytes: u64,
    reads: u64,
    path: PathBuf,
    own: File,
    /// Serves viewers, which find its memory at `cache`.
    _service: Service,
    cache: String,
    folder: ScratchFolder,
}

impl Ground {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let bytes = Files::bytes_in(settings);
        check_memory(4 * bytes + (512 << 20))?;
        let folder = ScratchFolder::new(&settings.folder)?;
        let path = folder.path().join("pages");
        write_content(&mut KernelFile::create_new(&path)?, bytes)?;
        let cache = Cache::builder().memory(memory_for(bytes)).build()?;
        let own = warm(cache.open(&path)?)?;
        let owner = Arc::new(CacheOwner::new(cache).with_rules(by_times()));
        let (service, cache) = sys::serve(owner, folder.path())?;
        // In the restricted mode, files that changed a moment ago are not served.
        std::thread::sleep(Duration::from_millis(2500));
        let reads = if settings.extent == Extent::Full { 200_000 } else { 10_000 };
        Ok(Self { bytes, reads, path, own, _service: service, cache, folder })
    }

    fn own(&self, seed: u64) -> Result<f64, Unmeasured> {
        let read = |page: &mut [u8; PAGE], position| Ok(self.own.read_at(page, position)?);
        cpu_ns(read, self.bytes, self.reads, seed)
    }

    fn by_view(&self, seed: u64) -> Result<f64, Unmeasured> {
        Ok(self.task(seed).with(CACHE, &self.cache).run(None)?.number(CPU))
    }

    /// A run whose owner came too late for some of the reads, which the kernel answered then, is repeated.
    fn by_run(&self, seed: u64) -> Result<f64, Unmeasured> {
        let memory = memory_for(self.bytes).to_string();
        let report = self.folder.path().join("report.json");
        let report_file = report.display().to_string();
        let options = ["run", "--attach", "at-once", "--memory", &memory];
        let reported = ["--report", "json", "--report-file", &report_file, "--"];
        let run: Vec<String> = options.iter().chain(&reported).map(|&word| word.to_owned()).collect();
        let mut served = 0.0;
        for _ in 0..SERVED_RUNS_MAX {
            let cpu_ns = self.task(seed).run_by(&run)?.number(CPU);
            served = served_bytes(&std::fs::read_to_string(&report)?);
            if served >= (self.bytes + self.reads * PAGE as u64) as f64 {
                return Ok(cpu_ns);
            }
        }
        Err(Unmeasured::Failed(format!("by `run` only {served} bytes were served from the cache")))
    }

    /// Where the kernel reclaims pages ahead of need, the file may no longer be fully cached after a run; the run is
    /// repeated then.
    fn by_kernel(&self, seed: u64) -> Result<f64, Unmeasured> {
        let (file, mut runs) = ([KernelFile::open(&self.path)?], 0);
        loop {
            let cpu_ns = self.task(seed).run(None)?.number(CPU);
            runs += 1;
            match check_warm(&file) {
                Err(_) if runs < WARM_RUNS_MAX => {}
                warm => return warm.map(|()| cpu_ns),
            }
        }
    }

    fn task(&self, seed: u64) -> WorkerTask {
        WorkerTask::new(JOB).with(PATH, self.path.display()).with(READS, self.reads).with(SEED, seed)
    }
}

fn memory_for(bytes: u64) -> u64 {
    bytes + bytes / 16 + (64 << 20)
}

pub fn work(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let file = KernelFile::open(task.text(PATH)?)?;
    let bytes = file.metadata()?.len();
    let (reads, seed) = (task.number(READS)?, task.number(SEED)?);
    let cpu_ns = match task.text(CACHE) {
        Ok(cache) => {
            let viewed = Viewed::attach(cache, task.text(PATH)?.as_ref())?;
            after_all(|buffer, position| Ok(viewed.read_at(buffer, position)?), bytes, reads, seed)?
        }
        Err(_) => after_all(|buffer, position| Ok(file.read_at(buffer, position)?), bytes, reads, seed)?,
    };
    Ok(Answer::default().with(CPU, [cpu_ns]))
}

fn after_all(
    read: impl Fn(&mut [u8], u64) -> Result<usize, Unmeasured>,
    bytes: u64,
    reads: u64,
    seed: u64,
) -> Result<f64, Unmeasured> {
    let (mut piece, mut first_words) = (vec![0; 1 << 20], FirstWords::default());
    for position in (0..bytes).step_by(piece.len()) {
        let came = read(&mut piece, position)?;
        first_words.at(&piece[..came], position);
    }
    first_words.expect(bytes)?;
    cpu_ns(|page, position| read(page, position), bytes, reads, seed)
}

fn cpu_ns(
    read: impl Fn(&mut [u8; PAGE], u64) -> Result<usize, Unmeasured>,
    bytes: u64,
    reads: u64,
    seed: u64,
) -> Result<f64, Unmeasured> {
    let (mut places, mut page, mut right) = (Places(seed), Box::new(Aligned([1; PAGE])), 0);
    let spent = alone(|| {
        for _ in 0..reads {
            let position = places.next(bytes / PAGE as u64) * PAGE as u64;
            let is_whole = read(&mut page.0, position).is_ok_and(|bytes| bytes == PAGE);
            right += u64::from(is_whole && is_from(&page.0, position));
        }
    });
    if right == reads {
        return Ok(spent.cpu_ns / reads as f64);
    }
    Err(Unmeasured::Failed(format!("{right} of {reads} pages were read as they stand in the file")))
}

fn by_times() -> ServeRules {
    ServeRules { coherence: WithoutLease::CheckTimes, ..ServeRules::default() }
}

//! Cold: how fast is a file read that nobody has cached, beside the kernel?
//!
//! ```text
//!   drop what the kernel keeps of the file, look that it did, then from the first byte to the last:
//!     quinion       a new cache, in this process: opened, grown, read by File::read_at or pinned
//!     kernel        pread with its readahead, in the same sizes
//!     quinion cat   this command again, beside `cat`, both to /dev/null
//! ```
//!
//! Throughput and CPU seconds are both told, since one can be bought with the
//! other; CPU is that of the whole process, the cache's threads and its making
//! included. The bytes that the device read say whether anything was read twice;
//! what others read from it at the same time counts too.
//!
//! Not measured here: the kernel's mmap, and raw O_DIRECT requests by io_uring.

use std::cell::OnceCell;
use std::fs::File as KernelFile;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Instant;

use quinion::{Cache, File};

use super::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use super::machine::device_bytes;
use super::scratch::{Scratch, is_from};
use super::timing::process_cpu_ns;
use crate::sys;

const METRICS: [Metric; 3] = [
    Metric::gain("throughput", "GB/s"),
    Metric::cost("cpu", "s/GB"),
    Metric::cost("device", "bytes per byte"),
];
/// What is wanted of us at least: the kernel's throughput, for three quarters of its CPU time.
const THROUGHPUT_GOAL: f64 = 1.0;
const CPU_GOAL: f64 = 1.0 / 0.75;

const SIZES: [(&str, usize); 2] = [("reads of 64 KiB", 64 << 10), ("reads of 1 MiB", 1 << 20)];

/// One file, sequentially, in two sizes, and by the command.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let source = Source::new(settings);
    let reads = SIZES.map(|(name, bytes)| reads(&source, name, bytes));
    reads.into_iter().chain([commands(&source)]).collect()
}

fn reads(source: &Source, name: &'static str, bytes: usize) -> Case {
    let source = source.clone();
    let case = Case::new(name, &METRICS, move || {
        let target = source.get()?;
        let of =
            |name, read: Read| target.alternative(name, process_cpu_ns, move |target| read(target, bytes));
        Ok(vec![of("read_at", read_at), of("pinned", pinned), of("kernel", kernel)])
    });
    case.without_warm_up()
        .compare("throughput", "read_at", "kernel", Some(THROUGHPUT_GOAL))
        .compare("cpu", "read_at", "kernel", Some(CPU_GOAL))
        .compare("device", "read_at", "kernel", None)
        .compare("throughput", "pinned", "kernel", Some(THROUGHPUT_GOAL))
        .compare("cpu", "pinned", "kernel", Some(CPU_GOAL))
}

fn commands(source: &Source) -> Case {
    let source = source.clone();
    let case = Case::new("whole command", &METRICS, move || {
        let target = source.get()?;
        let of = |name, run: fn(&Target) -> Result<(), Unmeasured>| {
            target.alternative(name, sys::children_cpu_ns, run)
        };
        Ok(vec![of("quinion cat", quinion_cat), of("cat", kernel_cat)])
    });
    case.without_warm_up()
        .compare("throughput", "quinion cat", "cat", Some(THROUGHPUT_GOAL))
        .compare("cpu", "quinion cat", "cat", Some(CPU_GOAL))
        .compare("device", "quinion cat", "cat", None)
}

/// The file, made when the first case asks for it.
#[derive(Clone)]
struct Source {
    settings: Settings,
    target: Rc<OnceCell<Result<Rc<Target>, Unmeasured>>>,
}

impl Source {
    fn new(settings: &Settings) -> Self {
        Self { settings: settings.clone(), target: Rc::default() }
    }

    fn get(&self) -> Result<Rc<Target>, Unmeasured> {
        self.target.get_or_init(|| Target::new(&self.settings).map(Rc::new)).clone()
    }
}

/// The file that is read, and with how much memory.
struct Target {
    scratch: Scratch,
    folder: PathBuf,
    /// MiB of the caches.
    memory_mib: u64,
}

impl Target {
    fn new(settings: &Settings) -> Result<Self, Unmeasured> {
        let scratch = Scratch::new(&settings.folder, settings.pick(128 << 20, 4 << 30))?;
        Ok(Self { scratch, folder: settings.folder.clone(), memory_mib: settings.pick(64, 256) })
    }

    fn alternative(
        self: &Rc<Self>,
        name: &'static str,
        cpu_ns: fn() -> f64,
        run: impl Fn(&Self) -> Result<(), Unmeasured> + 'static,
    ) -> Alternative {
        let target = Rc::clone(self);
        Alternative::new(name, move |_| target.measure(cpu_ns, &run))
    }

    /// Throughput, CPU time and device bytes of one run from a cold start.
    fn measure(
        &self,
        cpu_ns: fn() -> f64,
        run: &dyn Fn(&Self) -> Result<(), Unmeasured>,
    ) -> Result<Vec<f64>, Unmeasured> {
        self.make_cold()?;
        let (device, cpu, start) = (device_bytes(&self.folder), cpu_ns(), Instant::now());
        run(self)?;
        let seconds = start.elapsed().as_secs_f64();
        let cpu = (cpu_ns() - cpu) / 1e9;
        let read = device_bytes(&self.folder).zip(device).map(|(after, before)| (after - before) as f64);
        let gb = self.scratch.bytes() as f64 / 1e9;
        Ok(vec![gb / seconds, cpu / gb, read.map_or(f64::NAN, |read| read / 1e9 / gb)])
    }

    fn make_cold(&self) -> Result<(), Unmeasured> {
        self.scratch.drop_from_kernel()?;
        let kept =
            sys::residency(&KernelFile::open(self.scratch.path())?, self.scratch.bytes())?.pages * 4096;
        if kept > self.scratch.bytes() / 100 {
            return Err(Unmeasured::Missing(format!(
                "{} keeps {} MiB of the file in memory and does not let go of them; choose a folder on a disk \
                 by --dir",
                self.folder.display(),
                kept >> 20
            )));
        }
        Ok(())
    }

    fn cached(&self) -> Result<File, Unmeasured> {
        let cache = Cache::builder().memory(self.memory_mib << 20).build()?;
        Ok(cache.open(self.scratch.path())?)
    }

    /// All of the file was read: `bytes` of it.
    fn expect_all(&self, bytes: u64) -> Result<(), Unmeasured> {
        if bytes == self.scratch.bytes() {
            return Ok(());
        }
        Err(Unmeasured::Failed(format!("{bytes} of {} bytes were read", self.scratch.bytes())))
    }
}

type Read = fn(&Target, usize) -> Result<(), Unmeasured>;

fn read_at(target: &Target, bytes: usize) -> Result<(), Unmeasured> {
    let file = target.cached()?;
    read_all(target, bytes, |buffer, position| Ok(file.read_at(buffer, position)?))
}

fn kernel(target: &Target, bytes: usize) -> Result<(), Unmeasured> {
    let file = KernelFile::open(target.scratch.path())?;
    read_all(target, bytes, |buffer, position| Ok(file.read_at(buffer, position)?))
}

fn read_all(
    target: &Target,
    bytes: usize,
    read: impl Fn(&mut [u8], u64) -> Result<usize, Unmeasured>,
) -> Result<(), Unmeasured> {
    let (mut buffer, mut position) = (vec![0; bytes], 0);
    while let bytes @ 1.. = read(&mut buffer, position)? {
        assert!(is_from(&buffer, position), "what was read is not what stands at {position}");
        position += bytes as u64;
    }
    target.expect_all(position)
}

fn pinned(target: &Target, bytes: usize) -> Result<(), Unmeasured> {
    let file = target.cached()?;
    let mut position = 0;
    loop {
        let piece = file.pin(position, bytes)?;
        let Some(chunk) = piece.chunks().next().filter(|chunk| !chunk.is_empty()) else { break };
        assert!(is_from(chunk, position), "what was pinned is not what stands at {position}");
        position += piece.len() as u64;
    }
    target.expect_all(position)
}

fn quinion_cat(target: &Target) -> Result<(), Unmeasured> {
    let memory = format!("{}M", target.memory_mib);
    finish(target, Command::new(std::env::current_exe()?).args(["cat", "--memory", &memory]))
}

fn kernel_cat(target: &Target) -> Result<(), Unmeasured> {
    finish(target, &mut Command::new("cat"))
}

fn finish(target: &Target, command: &mut Command) -> Result<(), Unmeasured> {
    let status = command.arg(target.scratch.path()).stdout(Stdio::null()).status()?;
    if status.success() {
        Ok(())
    } else {
        Err(Unmeasured::Failed(format!("the command ended with {status}")))
    }
}

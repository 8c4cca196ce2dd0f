//! Sequential: the file from its first byte to its last.
//!
//! A way that copies does so into memory of its own, which is warm after the first read. A way that does not copy (pin,
//! mmap, raw reads into its own buffers) only reads the first words of pages, as every other way does, too; the saved
//! copy shows in the CPU time.

use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::rc::Rc;

use super::target::{Cost, Target};
use super::{ASKED, CACHE, DISK, PROCESS, device_rows, per_byte};
use crate::fixtures::command::quinion;
use crate::fixtures::limit::MEMORY;
use crate::fixtures::scratch::FirstWords;
use crate::fixtures::shared::Shared;
use crate::harness::timing::process_cpu_ns;
use crate::harness::{Alternative, Case, Metric, Unmeasured};
use crate::sys::{self, HugeMemory, Mapped, RawReader};

const CPU_ALL: &str = "cpu (with kernel threads)";
const METRICS: [Metric; 7] = [
    Metric::gain("throughput", "GiB/s"),
    Metric::cost("cpu", "s/GiB"),
    Metric::cost(CPU_ALL, "s/GiB"),
    Metric::cost(MEMORY, "MiB"),
    per_byte(DISK),
    per_byte(PROCESS),
    per_byte(CACHE),
];

const SMALL: usize = 64 << 10;
const LARGE: usize = 1 << 20;
const READ_SMALL: &str = "read_at 64 KiB";
const READ_LARGE: &str = "read_at 1 MiB";
const PIN: &str = "pin 1 MiB";
const KERNEL_SMALL: &str = "kernel 64 KiB";
const KERNEL_LARGE: &str = "kernel 1 MiB";
const MMAP: &str = "kernel mmap";
const RAW: &str = "raw io_uring";
const RAW_DEPTH: usize = 4;

/// The least ratios wanted: the kernel's throughput, for three quarters of its CPU time, and most of what the device
/// gives to a caller that has no cache.
const THROUGHPUT_GOAL: f64 = 1.0;
const CPU_GOAL: f64 = 1.0 / 0.75;
const RAW_GOAL: f64 = 0.93;
/// As [`RAW_GOAL`], for a pin, which copies nothing.
const RAW_PIN_GOAL: f64 = 0.95;

type Run = fn(&Target) -> Result<Option<u64>, Unmeasured>;

pub fn case(source: &Shared<Target>) -> Case {
    let source = source.clone();
    let case = Case::new("sequential", &METRICS, move || {
        let target = source.get()?;
        let of = |name, run: Run| alternative(&target, name, process_cpu_ns, run);
        Ok(vec![
            of(READ_SMALL, |target| read_at(target, SMALL)),
            of(KERNEL_SMALL, |target| kernel(target, SMALL)),
            of(READ_LARGE, |target| read_at(target, LARGE)),
            of(KERNEL_LARGE, |target| kernel(target, LARGE)),
            of(PIN, |target| pinned(target, LARGE)),
            of(MMAP, mapped),
            of(RAW, raw),
            requested_bytes(),
        ])
    });
    [(READ_SMALL, KERNEL_SMALL), (READ_LARGE, KERNEL_LARGE), (PIN, KERNEL_LARGE)]
        .into_iter()
        .fold(case.without_warm_up(), |case, (ours, kernel)| rows(case, ours, kernel))
        .compare("throughput", READ_LARGE, MMAP)
        .compare("cpu", READ_LARGE, MMAP)
        .compare("throughput", PIN, MMAP)
        .compare("cpu", PIN, MMAP)
}

fn rows(case: Case, ours: &'static str, kernel: &'static str) -> Case {
    let goal = if ours == PIN { RAW_PIN_GOAL } else { RAW_GOAL };
    let case = beside(case, ours, kernel).bound("throughput", ours, RAW).goal(goal).bound("cpu", ours, RAW);
    device_rows(case, ours)
}

fn beside(case: Case, ours: &'static str, kernel: &'static str) -> Case {
    case.compare("throughput", ours, kernel)
        .goal(THROUGHPUT_GOAL)
        .compare("cpu", ours, kernel)
        .goal(CPU_GOAL)
        .compare(CPU_ALL, ours, kernel)
        .compare(MEMORY, ours, kernel)
        .compare(DISK, ours, kernel)
}

pub fn commands(source: &Shared<Target>) -> Case {
    let source = source.clone();
    let case = Case::new("whole command", &METRICS, move || {
        let target = source.get()?;
        let of = |name, run: Run| alternative(&target, name, sys::children_cpu_ns, run);
        Ok(vec![of("quinion cat", quinion_cat), of("cat", kernel_cat), requested_bytes()])
    });
    beside(case.without_warm_up(), "quinion cat", "cat")
        .compare(PROCESS, "quinion cat", ASKED)
        .goal(super::PROCESS_GOAL)
}

fn alternative(target: &Rc<Target>, name: &'static str, cpu_ns: fn() -> f64, run: Run) -> Alternative {
    let target = Rc::clone(target);
    Alternative::new(name, move |_| {
        let cost = target.measure(cpu_ns, || run(&target))?;
        let Cost { seconds, cpu_seconds, kernel_seconds, memory_bytes, device_bytes } = cost;
        let bytes = target.scratch.bytes() as f64;
        let (gib, device) = (bytes / f64::from(1 << 30), device_bytes.map(|device| device / bytes));
        let cpu = [cpu_seconds, cpu_seconds + kernel_seconds].map(|seconds| seconds / gib);
        let rest = [gib / seconds, cpu[0], cpu[1], memory_bytes / f64::from(1 << 20)];
        Ok(rest.into_iter().chain(device).collect())
    })
    .excused(METRICS.len())
}

/// The bytes asked for, each once, in no time: the reference for the device rows.
fn requested_bytes() -> Alternative {
    let none = [f64::NAN; METRICS.len() - 3];
    Alternative::new(ASKED, move |_| Ok(none.into_iter().chain([1.0; 3]).collect()))
}

fn read_at(target: &Target, bytes: usize) -> Result<Option<u64>, Unmeasured> {
    let cached = target.cached(target.memory_mib << 20)?;
    read_all(target, bytes, |buffer, position| Ok(cached.file.read_at(buffer, position)?))?;
    Ok(cached.device_bytes())
}

fn kernel(target: &Target, bytes: usize) -> Result<Option<u64>, Unmeasured> {
    let file = target.open()?;
    read_all(target, bytes, |buffer, position| Ok(file.read_at(buffer, position)?))?;
    Ok(None)
}

fn read_all(
    target: &Target,
    bytes: usize,
    read: impl Fn(&mut [u8], u64) -> Result<usize, Unmeasured>,
) -> Result<(), Unmeasured> {
    let (mut buffer, mut position, mut first_words) = (HugeMemory::new(bytes)?, 0, FirstWords::default());
    while let bytes @ 1.. = read(&mut buffer, position)? {
        first_words.at(&buffer[..bytes], position);
        position += bytes as u64;
    }
    first_words.expect(target.scratch.bytes())
}

fn pinned(target: &Target, bytes: usize) -> Result<Option<u64>, Unmeasured> {
    let cached = target.cached(target.memory_mib << 20)?;
    let (mut position, mut first_words) = (0, FirstWords::default());
    loop {
        let pinned = cached.file.pin(position, bytes)?;
        if pinned.is_empty() {
            break;
        }
        for chunk in pinned.chunks() {
            first_words.at(chunk, position);
            position += chunk.len() as u64;
        }
    }
    first_words.expect(target.scratch.bytes())?;
    Ok(cached.device_bytes())
}

fn mapped(target: &Target) -> Result<Option<u64>, Unmeasured> {
    let mapped = Mapped::new(&target.open()?, target.scratch.bytes() as usize)?;
    let mut first_words = FirstWords::default();
    first_words.at(&mapped, 0);
    first_words.expect(target.scratch.bytes())?;
    Ok(None)
}

fn raw(target: &Target) -> Result<Option<u64>, Unmeasured> {
    let (file, mut first_words) = (target.scratch.open_direct()?, FirstWords::default());
    let mut places = (0..target.scratch.bytes()).step_by(LARGE);
    let reader = RawReader::new(&file, LARGE, RAW_DEPTH).map_err(|error| no_ring(&error))?;
    reader.read_all(|| places.next(), |bytes, position| first_words.at(bytes, position))?;
    first_words.expect(target.scratch.bytes())?;
    Ok(None)
}

/// The error of a missing io_uring, without which there is no bound.
pub fn no_ring(error: &std::io::Error) -> Unmeasured {
    Unmeasured::Missing(format!(
        "io_uring with registered buffers is refused: {error}; allow it, and as much locked memory (ulimit -l)"
    ))
}

fn quinion_cat(target: &Target) -> Result<Option<u64>, Unmeasured> {
    let memory = format!("{}M", target.memory_mib);
    finish(target, Command::new(quinion()?).args(["cat", "--memory", &memory]))
}

fn kernel_cat(target: &Target) -> Result<Option<u64>, Unmeasured> {
    finish(target, &mut Command::new("cat"))
}

fn finish(target: &Target, command: &mut Command) -> Result<Option<u64>, Unmeasured> {
    let status = command.arg(target.scratch.path()).stdout(Stdio::null()).status()?;
    if status.success() {
        Ok(None)
    } else {
        Err(Unmeasured::Failed(format!("the command ended with {status}")))
    }
}

//! Readseq: RocksDB's benchmark, unmodified, by `quinion run` and by the kernel.
//!
//! ```text
//!   made once     db_bench --benchmarks=fillseq ..      in a scratch folder, written to the device
//!
//!   cold          nothing of the databases is in the kernel's memory; then
//!     quinion       quinion run -- db_bench --benchmarks=readseq ..
//!     kernel        db_bench --benchmarks=readseq ..
//!
//!   short of memory, as the original of batched insertion was measured: 32 threads, RocksDB's own cache a 26th of the
//!   data, the page cache half of it, every alternative under one limit; in folios of a page, and as usual
//!     quinion       the same, cold; its threads wait up to two seconds for the owner
//!     one by one    the same, but each folio enters the index under a lock of its own: Quinion without batches,
//!                   in folios of the same orders
//!     kernel        db_bench under the same limit
//!
//!   instructions  of a read of 8 KiB, one after the other through a file 26 times as large as the cache, by
//!                 callgrind: inside one process, since callgrind does not survive the signals of a cache's owner
//!
//!   warm          read once before, by the same cache, and then measured
//!     quinion       quinion run -- sh: db_bench .. and again db_bench ..
//!     kernel        db_bench .. and again db_bench ..
//!
//!   cold and warm, a thread a core: the same by as many threads as there are cores, so that none waits for another
//! ```
//!
//! **Percentiles of more threads than cores** are the scheduler's. The mean is threads / throughput in any case, and
//! what is above 100 us is time in a run queue: so fewer waits are longer ones. The cases with a thread a core show how
//! long a reader waits for the owner and for the device.
//!
//! Every thread reads every database from its first key to its last, so the bytes that one thread reads from a file are
//! in a cache for another. Throughput and percentiles are from db_bench's output. CPU seconds are those of all
//! processes that were started for a run, the owner of the cache and its shutdown included; in the warm runs, of all
//! since the first reading ended.
//!
//! Memory is the most that a run's processes held, with the kernel's page cache for them (`limit`). In the warm runs it
//! is Quinion's alone, of both readings: the kernel had cached the databases before.
//!
//! Cold and warm, both get enough memory for all of the databases. Two checks: after Quinion's runs the kernel must
//! have cached nearly nothing of the databases, and before its own second run it must have cached all of them.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};
use std::rc::Rc;

use quinion::Cache;

use crate::fixtures::caches::{Drops, bytes, check_warm, kept_bytes};
use crate::fixtures::callgrind;
use crate::fixtures::command::quinion;
use crate::fixtures::counted::Snippet;
use crate::fixtures::db_bench::{self, BenchOutput, Shape};
use crate::fixtures::limit::{Limit, MEMORY, peak_of};
use crate::fixtures::shared::Shared;
use crate::fixtures::tuned::{self, TunedRun};
use crate::harness::folder::ScratchFolder;
use crate::harness::machine::process_bytes;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys;

const THROUGHPUT: &str = "throughput";
const P99: &str = "P99";
const P999: &str = "P99.9";
const DEVICE: &str = "device (process)";
const METRICS: [Metric; 8] = [
    Metric::gain(THROUGHPUT, "1000 ops/s"),
    Metric::cost("P50", "us"),
    Metric::cost("P75", "us"),
    Metric::cost(P99, "us"),
    Metric::cost(P999, "us"),
    Metric::cost("cpu", "s"),
    Metric::cost(MEMORY, "MiB"),
    Metric::cost(DEVICE, "bytes per byte"),
];

const COUNTED: [Metric; 2] =
    [Metric::cost("instructions", "per operation"), Metric::cost("branches", "per operation")];

const OURS: &str = "quinion run";
const ONE_BY_ONE: &str = "one by one";
const KERNEL: &str = "kernel";

/// The least ratios wanted: cold, the kernel's throughput and half of its longest waits; warm, more. No tail is to be
/// worse.
const COLD_GOAL: f64 = 1.0;
const COLD_P99_GOAL: f64 = 2.0;
const WARM_GOAL: f64 = 1.1;
const TAIL_GOAL: f64 = 1.0;
const REPEAT: usize = 2;

const REPEAT_SHORT: usize = 3;
/// Memory of a db_bench process beside both caches: threads, iterators and the tables' indexes.
const PROGRAM_BYTES: u64 = 192 << 20;

/// How long a thread waits for the owner before it reads by itself, in milliseconds. 32 threads on few processors keep
/// the owner from one for longer than the usual time. Then the kernel would read, ahead too, which is not compared
/// here.
const WAIT: &str = "QUINION_WAIT_MS";
const WAIT_MS: &str = "2000";

/// The orders of the folios on both sides: their name, and the cache's option.
const ORDERS: [(&str, &str); 2] = [("order 0", "orders=0"), ("default orders", "orders=default")];

/// Runs the program once before it is measured, in a shell that `run` started: the program's words are the shell's `$0`
/// and the rest. Prints the CPU time of the owner (its parent) and of the first reading.
const TWICE: &str = r#""$0" "$@" > /dev/null 2>&1 || exit; cat /proc/$PPID/stat; times; exec "$0" "$@""#;

pub fn cases(settings: &Settings, options: &db_bench::Options) -> Vec<Case> {
    let shared = |shape: Shape| Shared::new(settings, move |settings| Databases::new(settings, shape));
    let shape = Shape::of_the_original(settings, options);
    let [databases, short] = [Shape::of(settings, options), shape].map(shared);
    let counted = COUNTED_STREAMS.map(counted);
    let many = Readers::AS_SAID;
    let few = Readers { name: ", a thread a core", threads: Some(cores()) };
    let cases =
        vec![cold(&databases, many), warm(&databases, many), cold(&databases, few), warm(&databases, few)];
    let short = ORDERS.map(|(name, orders)| short_of_memory(&short, shape, name, orders));
    cases.into_iter().chain(short).chain(counted).collect()
}

#[derive(Clone, Copy, Debug)]
struct Readers {
    name: &'static str,
    /// Number of reader threads; `None`: the number that the databases' shape says.
    threads: Option<u32>,
}

impl Readers {
    const AS_SAID: Self = Self { name: "", threads: None };
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1))
}

fn cold(databases: &Shared<Databases>, readers: Readers) -> Case {
    let databases = databases.clone();
    let case = Case::new(format!("cold{}", readers.name), &METRICS, move || {
        let databases = databases.get()?;
        let of = |name, run: Run| databases.alternative(name, move |databases| run(databases, readers));
        Ok(vec![of(OURS, Databases::ours_cold), of(KERNEL, Databases::kernel_cold)])
    });
    let case =
        case.compare(THROUGHPUT, OURS, KERNEL).goal(COLD_GOAL).compare(P99, OURS, KERNEL).goal(COLD_P99_GOAL);
    let case = case.compare(P999, OURS, KERNEL).goal(TAIL_GOAL);
    let case = rows(case, KERNEL).compare(MEMORY, OURS, KERNEL).compare(DEVICE, OURS, KERNEL);
    case.without_warm_up().usually(REPEAT)
}

fn short_of_memory(databases: &Shared<Databases>, shape: Shape, name: &str, orders: &'static str) -> Case {
    let databases = databases.clone();
    let name = format!("short of memory, {} threads, {name}", shape.threads());
    let case = Case::new(name, &METRICS, move || {
        let databases = databases.get()?;
        let of = |name, insertion: &'static str| {
            let databases = Rc::clone(&databases);
            databases.clone().alternative(name, move |_| databases.short(Some((insertion, orders))))
        };
        let kernel = databases.alternative(KERNEL, |databases: &Databases| databases.short(None));
        Ok(vec![of(OURS, BATCHED), of(ONE_BY_ONE, SINGLY), kernel])
    });
    [ONE_BY_ONE, KERNEL]
        .into_iter()
        .fold(case, |case, peer| {
            let case = case.compare(THROUGHPUT, OURS, peer).compare(P99, OURS, peer);
            rows(case.compare(P999, OURS, peer), peer).compare(DEVICE, OURS, peer)
        })
        .without_warm_up()
        .usually(REPEAT_SHORT)
}

const BATCHED: &str = "insertion=batched";
const SINGLY: &str = "insertion=one-by-one";

/// A stream by two snippets: one inserts in batches, the other one by one.
struct CountedStream {
    name: &'static str,
    batched: &'static str,
    singly: &'static str,
}

const COUNTED_STREAMS: [CountedStream; 2] = [
    CountedStream {
        name: "stream of 8 KiB, order 0",
        batched: "8 KiB read, batched, order 0",
        singly: "8 KiB read, one by one, order 0",
    },
    CountedStream {
        name: "stream of 8 KiB, default orders",
        batched: "8 KiB read, batched",
        singly: "8 KiB read, one by one",
    },
];

fn counted(stream: CountedStream) -> Case {
    let CountedStream { name, batched, singly } = stream;
    let case = Case::new(name, &COUNTED, move || {
        let of = |name: &'static str| {
            let snippet = Snippet::of(name).expect("the names above are those of snippets");
            Alternative::new(name, move |_| {
                let counted = callgrind::count(snippet)?;
                Ok(vec![counted.instructions, counted.branches])
            })
        };
        Ok(vec![of(batched), of(singly)])
    });
    COUNTED.iter().fold(case.once(), |case, metric| case.compare(metric.name, batched, singly))
}

fn warm(databases: &Shared<Databases>, readers: Readers) -> Case {
    let databases = databases.clone();
    let case = Case::new(format!("warm{}", readers.name), &METRICS, move || {
        let databases = databases.get()?;
        let of = |name, run: Run| databases.alternative(name, move |databases| run(databases, readers));
        Ok(vec![of(OURS, Databases::ours_warm), of(KERNEL, Databases::kernel_warm)])
    });
    let case = case.compare(THROUGHPUT, OURS, KERNEL).goal(WARM_GOAL);
    let case =
        [P99, P999].into_iter().fold(case, |case, tail| case.compare(tail, OURS, KERNEL).goal(TAIL_GOAL));
    rows(case, KERNEL).report(MEMORY, OURS).without_warm_up().usually(REPEAT)
}

fn rows(case: Case, peer: &'static str) -> Case {
    ["P50", "P75", "cpu"].into_iter().fold(case, |case, metric| case.compare(metric, OURS, peer))
}

struct Databases {
    folder: ScratchFolder,
    files: Vec<File>,
    shape: Shape,
    drops: Drops,
}

type Run = fn(&Databases, Readers) -> Result<Measured, Unmeasured>;

struct Measured {
    result: BenchOutput,
    cpu_seconds: f64,
    /// The peak of memory; not a number if it was not counted.
    memory_bytes: f64,
    /// Bytes read from devices, if all of them belong to what is measured.
    device_bytes: Option<u64>,
}

impl Databases {
    fn new(settings: &Settings, shape: Shape) -> Result<Self, Unmeasured> {
        db_bench::check_installed()?;
        let wanted = 3 * shape.bytes() + (1 << 30);
        if quinion::process_limit() < wanted {
            return Err(Unmeasured::Missing(format!(
                "it takes {} MiB of memory, more than we may use; --dbs, --num and --value-size make it smaller",
                wanted >> 20
            )));
        }
        let folder = ScratchFolder::new(&settings.folder)?;
        finish(command(&shape.fill(folder.path())))?;
        // A second opening, so that the work that RocksDB does after the first one is done.
        finish(command(&shape.read(folder.path())))?;
        let mut files = Vec::new();
        take_tables(folder.path(), &mut files)?;
        Ok(Self { folder, files, shape, drops: Drops::of(settings) })
    }

    fn alternative(
        self: &Rc<Self>,
        name: &'static str,
        run: impl Fn(&Databases) -> Result<Measured, Unmeasured> + 'static,
    ) -> Alternative {
        let databases = Rc::clone(self);
        Alternative::new(name, move |_| {
            let Measured { result, cpu_seconds, memory_bytes, device_bytes } = run(&databases)?;
            let [p50, p75, p99, p999] = result.percentiles;
            let device = device_bytes.map_or(f64::NAN, |device| device as f64);
            let device = device / bytes(&databases.files)? as f64;
            let memory = memory_bytes / f64::from(1 << 20);
            Ok(vec![result.ops_per_second / 1e3, p50, p75, p99, p999, cpu_seconds, memory, device])
        })
    }

    fn words(&self, readers: Readers) -> Vec<String> {
        let shape = readers.threads.map_or(self.shape, |threads| self.shape.with_threads(threads));
        shape.read(self.folder.path())
    }

    fn memory(&self) -> Result<u64, Unmeasured> {
        Ok(bytes(&self.files)? * 9 / 8 + (128 << 20))
    }

    fn run(&self, words: &[String]) -> Result<Command, Unmeasured> {
        let mut command = Command::new(quinion()?);
        command.args(["run", "--attach", "at-once", "--report", "none", "--memory"]);
        command.arg(self.memory()?.to_string()).arg("--").args(words);
        Ok(command)
    }

    /// Evicts the databases from memory. The program itself stays cached: reading it from the device is not part of the
    /// question.
    fn make_cold(&self) -> Result<(), Unmeasured> {
        self.drops.make_cold(&self.files)?;
        db_bench::check_installed()
    }

    fn ours_cold(&self, readers: Readers) -> Result<Measured, Unmeasured> {
        self.cold_by(self.run(&self.words(readers))?)
    }

    fn tuned(&self, insertion: &str, orders: &str, memory: u64) -> Result<Command, Unmeasured> {
        let program = self.words(Readers::AS_SAID).into_iter().map(OsString::from).collect();
        let run = TunedRun { choices: format!("{insertion},{orders}"), memory, program };
        let mut command = tuned::command(&run)?;
        command.env(WAIT, WAIT_MS);
        Ok(command)
    }

    /// Cold, and with room for half of the databases under one limit: by `quinion run` with these options, or the
    /// kernel.
    fn short(&self, ours: Option<(&str, &str)>) -> Result<Measured, Unmeasured> {
        let memory = (bytes(&self.files)? / 2).max(Cache::MEMORY_MIN);
        let limit = Limit::new(memory + self.shape.cache_bytes() + PROGRAM_BYTES)?;
        self.make_cold()?;
        let command = match ours {
            Some((insertion, orders)) => self.tuned(insertion, orders, memory)?,
            None => command(&self.words(Readers::AS_SAID)),
        };
        let measured = limit.explain_end(measure(limit.inside(&command), |_| Some(0.0)))?;
        if ours.is_some() {
            self.check_ours()?;
        }
        // The processes are in a group of their own, so this process's peak says nothing about them.
        Ok(Measured { memory_bytes: f64::NAN, ..measured })
    }

    fn cold_by(&self, command: Command) -> Result<Measured, Unmeasured> {
        self.make_cold()?;
        let measured = measure(command, |_| Some(0.0))?;
        self.check_ours()?;
        Ok(measured)
    }

    fn kernel_cold(&self, readers: Readers) -> Result<Measured, Unmeasured> {
        self.make_cold()?;
        measure(command(&self.words(readers)), |_| Some(0.0))
    }

    fn ours_warm(&self, readers: Readers) -> Result<Measured, Unmeasured> {
        self.make_cold()?;
        let shell = ["sh", "-c", TWICE].map(str::to_owned);
        let words: Vec<String> = shell.into_iter().chain(self.words(readers)).collect();
        let measured = measure(self.run(&words)?, first_reading)?;
        self.check_ours()?;
        Ok(Measured { device_bytes: None, ..measured })
    }

    fn kernel_warm(&self, readers: Readers) -> Result<Measured, Unmeasured> {
        finish(command(&self.words(readers)))?;
        check_warm(&self.files)?;
        measure(command(&self.words(readers)), |_| Some(0.0))
    }

    /// Checks that the kernel has not cached what was just read. Where the owner had no time for a file's first reads,
    /// the kernel makes them and reads ahead; `read_ahead_kb` may be 8 MiB, of files of 63 MiB.
    fn check_ours(&self) -> Result<(), Unmeasured> {
        let (kept, all) = (kept_bytes(&self.files)?, bytes(&self.files)?);
        if kept < all / 4 {
            return Ok(());
        }
        Err(Unmeasured::Missing(format!(
            "{} of {} MiB were read by the kernel and not by us; `quinion run -- db_bench ..` says why",
            kept >> 20,
            all >> 20
        )))
    }
}

/// Takes the files of `folder` that hold keys and values, once they are written to the device.
fn take_tables(folder: &Path, tables: &mut Vec<File>) -> Result<(), Unmeasured> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            take_tables(&path, tables)?;
        } else if path.extension().is_some_and(|extension| extension == "sst") {
            let file = File::open(path)?;
            file.sync_all()?;
            tables.push(file);
        }
    }
    Ok(())
}

fn command(words: &[String]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

fn finish(mut command: Command) -> Result<Output, Unmeasured> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.trim_end().rsplit(['\n', '\r']).next().unwrap_or_default();
    Err(Unmeasured::Failed(format!(
        "{} ended with {}: {last}",
        command.get_program().display(),
        output.status
    )))
}

/// The output and the cost of `command`, less the cost that `before` finds in the output: what it had spent before the
/// part that is measured.
fn measure(command: Command, before: fn(&str) -> Option<f64>) -> Result<Measured, Unmeasured> {
    let (cpu, device) = (sys::children_cpu_ns(), process_bytes());
    let (output, memory_bytes) = peak_of(|| finish(command))?;
    let cpu_seconds = (sys::children_cpu_ns() - cpu) / 1e9;
    let device_bytes = process_bytes().zip(device).map(|(after, before)| after - before);
    let text = String::from_utf8_lossy(&output.stdout);
    let not_understood =
        |what| Unmeasured::Failed(format!("{what} is not in what db_bench printed:\n{text}"));
    let result = db_bench::parse_output(&text).ok_or_else(|| not_understood("a result"))?;
    let before = before(&text).ok_or_else(|| not_understood("what the first reading took"))?;
    Ok(Measured { result, cpu_seconds: cpu_seconds - before, memory_bytes, device_bytes })
}

fn first_reading(text: &str) -> Option<f64> {
    let mut lines = text.lines();
    let ticks: Vec<f64> =
        lines.next()?.rsplit_once(')')?.1.split_whitespace().skip(11).take(2).flat_map(str::parse).collect();
    let owner = ticks.iter().sum::<f64>() / rustix::param::clock_ticks_per_second() as f64;
    let shell_and_children: Option<Vec<f64>> =
        lines.take(2).flat_map(str::split_whitespace).map(minutes_and_seconds).collect();
    let shell_and_children = shell_and_children.filter(|times| times.len() == 4 && ticks.len() == 2)?;
    Some(owner + shell_and_children.iter().sum::<f64>())
}

fn minutes_and_seconds(text: &str) -> Option<f64> {
    let (minutes, seconds) = text.strip_suffix('s')?.split_once('m')?;
    Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_first_reading_are_added_up() {
        let ticks = rustix::param::clock_ticks_per_second();
        let stat = format!("7 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 {} {} 0 0 20", 2 * ticks, ticks);
        let text = format!("{stat}\n0m0.250s 0m0.250s\n1m2.000000s 0m0.5s\nreadseq : 1\n");
        assert_eq!(first_reading(&text), Some(66.0));
        assert_eq!(first_reading(&text.replace("1m2.000000s", "soon")), None);
        assert_eq!(first_reading("readseq : 1\n"), None);
    }
}

//! Turn: one run of a program, its cost, and whether it printed what it should.
//!
//! ```text
//!   parent -- starts --> program  its output is read to the end, so that it never waits for its reader
//!    |                 | ends     /proc/PID/io: bytes read by it and its children, until its status is collected
//!    '-- status <------'
//! ```
//!
//! fio and db_bench measure themselves, and print times. Their speed is taken from their output, and the rest of the
//! output has to be the same each time.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, getppid, waitid};

use crate::fixtures::worker::{Answer, CPU, SECONDS, WorkerTask};
use crate::harness::Unmeasured;
use crate::sys;

pub const JOB: &str = "turn";
pub const OWNERS: &str = "owners";
pub const FOLDER: &str = "folder";
pub const SAYS: &str = "says";
pub const WORDS: &str = "words";
pub const BEFORE: &str = "before";
/// The separator of a command's words in one value, and the substitute for a line end in a word.
const BETWEEN: &str = "\u{1f}";
const LINE_END: &str = "\u{1e}";
const OPERATIONS: &str = "operations";
const READ: &str = "read";
/// A checksum of the output, in two halves that a number holds exactly.
const SAID: &str = "said";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputCheck {
    Output,
    Fio,
    DbBench(&'static str),
}

const BENCHMARKS: [&str; 3] = ["readrandom", "readseq", "multireadrandom"];

impl OutputCheck {
    pub fn written(self) -> &'static str {
        match self {
            Self::Output => "output",
            Self::Fio => "fio",
            Self::DbBench(benchmark) => benchmark,
        }
    }

    fn read(word: &str) -> Result<Self, Unmeasured> {
        let benchmark = BENCHMARKS.into_iter().find(|benchmark| *benchmark == word).map(Self::DbBench);
        let known = [Self::Output, Self::Fio].into_iter().find(|says| says.written() == word).or(benchmark);
        known.ok_or_else(|| Unmeasured::Failed(format!("nothing says `{word}`")))
    }

    /// Operations per second, if the output tells them, and a checksum of the rest; `None` if the output has another
    /// form.
    fn parse(self, output: &[u8]) -> Option<(f64, u64)> {
        let text = || String::from_utf8_lossy(output).into_owned();
        match self {
            Self::Output => Some((f64::NAN, sum(output))),
            Self::Fio => fio(&text()),
            Self::DbBench(benchmark) => db_bench(&text(), benchmark),
        }
    }
}

fn sum(said: impl Hash) -> u64 {
    let mut sum = DefaultHasher::new();
    said.hash(&mut sum);
    sum.finish()
}

/// Version 3 of fio's format: the error, the KiB read, their speed, and operations per second.
fn fio(text: &str) -> Option<(f64, u64)> {
    let line = text.lines().find(|line| line.starts_with("3;fio-"))?;
    let fields: Vec<&str> = line.split(';').collect();
    Some((fields.get(7)?.parse().ok()?, sum(&fields[4..6])))
}

/// The name of the benchmark, operations per second, their number, and what was found.
fn db_bench(text: &str, benchmark: &str) -> Option<(f64, u64)> {
    let is_result = |line: &&str| line.split_once(" :").is_some_and(|(name, _)| name.trim_end() == benchmark);
    let line = text.lines().find(is_result)?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let before = |unit: &str| {
        let at = words.iter().position(|word| word.starts_with(unit))?;
        words.get(at.checked_sub(1)?).copied()
    };
    let found = line.split_once('(').map(|(_, found)| found);
    Some((before("ops/sec")?.parse().ok()?, sum((before("operations"), found))))
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProgramRun {
    pub operations: f64,
    pub seconds: f64,
    pub cpu_seconds: f64,
    /// Bytes that it read by calls, if the kernel counts them.
    pub read_bytes: Option<u64>,
    pub checksum: u64,
}

impl ProgramRun {
    pub fn of(answer: &Answer) -> Self {
        let said = answer.list(SAID);
        let half = |at: usize| said.get(at).map_or(0, |&half| half as u64);
        Self {
            operations: answer.number(OPERATIONS),
            seconds: answer.number(SECONDS),
            cpu_seconds: answer.number(CPU),
            read_bytes: answer.list(READ).first().map(|&bytes| bytes as u64),
            checksum: half(0) << 32 | half(1),
        }
    }

    fn answer(self) -> Answer {
        let answer = Answer::default().with(SECONDS, [self.seconds]).with(CPU, [self.cpu_seconds]);
        let answer = answer.with(OPERATIONS, [self.operations]);
        let halves = [self.checksum >> 32, self.checksum & u64::from(u32::MAX)];
        let answer = answer.with(SAID, halves.map(|half| half as f64));
        self.read_bytes.map_or(answer.clone(), |bytes| answer.with(READ, [bytes as f64]))
    }
}

pub fn joined(words: &[String]) -> String {
    words.join(BETWEEN).replace('\n', LINE_END)
}

fn split(words: &str) -> Vec<String> {
    words.replace(LINE_END, "\n").split(BETWEEN).map(str::to_owned).collect()
}

pub fn work(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let says = OutputCheck::read(task.text(SAYS)?)?;
    let words = split(task.text(WORDS)?);
    let folder = PathBuf::from(task.text(FOLDER)?);
    let has_owner = task.number(OWNERS)? > 0;
    let owner_ns = || getppid().filter(|_| has_owner).map_or(0.0, sys::cpu_ns_of);
    let command = || {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(&folder);
        plain(&mut command);
        command
    };
    for _ in 0..task.number(BEFORE)? {
        run_and_parse(command(), says)?;
        wait_until_idle(owner_ns);
    }
    let owner = owner_ns();
    let turn = run_and_parse(command(), says)?;
    let owner_seconds = (owner_ns() - owner) / 1e9;
    Ok(ProgramRun { cpu_seconds: turn.cpu_seconds + owner_seconds, ..turn }.answer())
}

/// Waits until the owner computes nothing more. A user does not run a program again within a millisecond, so an owner
/// that copies in the background has time to finish.
fn wait_until_idle(owner_ns: impl Fn() -> f64) {
    const PAUSE: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(5);
    const IDLE_NS: f64 = 1e6;
    let begun = Instant::now();
    loop {
        let before = owner_ns();
        std::thread::sleep(PAUSE);
        if owner_ns() - before < IDLE_NS || begun.elapsed() >= LONGEST {
            return;
        }
    }
}

/// Without a terminal, in a plain locale, and without this machine's settings.
pub fn plain(command: &mut Command) {
    command.env("LC_ALL", "C").env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    command.stdin(Stdio::null());
}

pub fn run_and_parse(mut command: Command, says: OutputCheck) -> Result<ProgramRun, Unmeasured> {
    let program = command.get_program().display().to_string();
    let missing = |error| {
        Unmeasured::Missing(format!(
            "{program} cannot be run: {error}; scripts/setup installs what this wants"
        ))
    };
    let (cpu, start) = (sys::children_cpu_ns(), Instant::now());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(missing)?;
    let (output, wrong) = read_all(&mut child)?;
    let (status, read_bytes) = end_of(&mut child)?;
    let seconds = start.elapsed().as_secs_f64();
    let cpu_seconds = (sys::children_cpu_ns() - cpu) / 1e9;
    if !status.success() {
        let last = wrong.trim_end().rsplit(['\n', '\r']).next().unwrap_or_default();
        return Err(Unmeasured::Failed(format!("{program} ended with {status}: {last}")));
    }
    let (operations, checksum) = says.parse(&output).ok_or_else(|| {
        let output = String::from_utf8_lossy(&output);
        Unmeasured::Failed(format!("what {program} printed is not understood:\n{output}{wrong}"))
    })?;
    Ok(ProgramRun { operations, seconds, cpu_seconds, read_bytes, checksum })
}

fn read_all(child: &mut Child) -> Result<(Vec<u8>, String), Unmeasured> {
    let (output, wrong) = (child.stdout.take(), child.stderr.take());
    let wrong = std::thread::spawn(move || {
        let mut text = Vec::new();
        // Standard error is only for messages: a failed read leaves them out.
        let _ = wrong.expect("it is a pipe").read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let mut bytes = Vec::new();
    output.expect("it is a pipe").read_to_end(&mut bytes)?;
    Ok((bytes, wrong.join().unwrap_or_default()))
}

/// The exit status of a child, and the bytes that it and its children read: known until the status is collected.
fn end_of(child: &mut Child) -> Result<(ExitStatus, Option<u64>), Unmeasured> {
    let pid = Pid::from_child(child);
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).map_err(std::io::Error::from)?;
    let told = std::fs::read_to_string(format!("/proc/{}/io", pid.as_raw_nonzero()));
    let read = told.ok().and_then(|told| told.lines().next()?.strip_prefix("rchar: ")?.parse().ok());
    Ok((child.wait()?, read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_and_db_bench_are_understood() {
        let line = "note\n3;fio-3.33;x;0;0;24576;18660;4665;1317;0\n";
        let (operations, said) = OutputCheck::Fio.parse(line.as_bytes()).expect("it is fio's");
        assert_eq!(operations, 4665.0);
        let slower = line.replace("18660;4665;1317", "9330;2332;2634");
        assert_eq!(OutputCheck::Fio.parse(slower.as_bytes()), Some((2332.0, said)));
        let wrong = line.replace("x;0;0;24576", "x;0;84;14172");
        assert_ne!(OutputCheck::Fio.parse(wrong.as_bytes()).expect("it is fio's").1, said);
        assert_eq!(OutputCheck::Fio.parse(b"fio: no such file\n"), None);

        let line = "readrandom   :  10.1 micros/op 196858 ops/sec 0.1 seconds 20000 operations; 1 MB/s (7 of 9 found)";
        let says = OutputCheck::DbBench("readrandom");
        let (operations, said) = says.parse(line.as_bytes()).expect("it is db_bench's");
        assert_eq!(operations, 196_858.0);
        assert_eq!(says.parse(line.replace("196858", "5").as_bytes()), Some((5.0, said)));
        assert_ne!(says.parse(line.replace("7 of", "8 of").as_bytes()).expect("it is").1, said);
        assert_eq!(OutputCheck::DbBench("readseq").parse(line.as_bytes()), None);
    }

    #[test]
    fn words_arrive_as_they_were() {
        let words = ["python3", "-c", "a = 1\nprint(a)\n", ""].map(str::to_owned);
        assert!(!joined(&words).contains('\n'));
        assert_eq!(split(&joined(&words)), words);
    }

    #[test]
    fn a_turn_arrives_as_it_was_sent() {
        let turn = ProgramRun {
            operations: 1.5,
            seconds: 2.0,
            cpu_seconds: 3.0,
            read_bytes: Some(4),
            checksum: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(ProgramRun::of(&turn.answer()), turn);
        for says in [OutputCheck::Output, OutputCheck::Fio, OutputCheck::DbBench("readseq")] {
            assert_eq!(OutputCheck::read(says.written()), Ok(says));
        }
    }

    #[test]
    fn reads_of_a_program_and_its_children_are_counted() {
        let mut command = Command::new("sh");
        command.args(["-c", "head -c 1000000 /dev/zero | wc -c; exit 0"]);
        plain(&mut command);
        let turn = run_and_parse(command, OutputCheck::Output).expect("it runs");
        assert!(turn.read_bytes.is_none_or(|bytes| bytes >= 2_000_000), "{turn:?}");
        assert_eq!(turn.checksum, sum(b"1000000\n".as_slice()));
        let mut command = Command::new("sh");
        command.args(["-c", "echo why >&2; exit 3"]);
        let wrong = run_and_parse(command, OutputCheck::Output).expect_err("it failed").to_string();
        assert!(wrong.contains("why") && wrong.contains('3'), "{wrong}");
    }
}

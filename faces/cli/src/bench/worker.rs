//! Worker: a piece of work in a process of its own, with a limit on its memory and a disk that only it sees.
//!
//! ```text
//!   this process                       this command again: bench --worker ERRAND
//!     |-- makes the group and the disk     joins the group, mounts the disk, does the job
//!     |<-- what it measured --------------'  a line for each number or list of numbers
//!     '-- holds a pipe: when it ends, so does the worker
//! ```
//!
//! A memory limit is one of processes, and so is what a process has computed and
//! has had read. So everybody who is compared under a limit, we too, works in a
//! process that has nothing else to do, and begins with nothing.
//!
//! The words of an task are lines of a key and a value, so a path with a line
//! break in it is refused; the lines that come back are a key and numbers.
//!
//! Not measured: interrupts, which whoever computes just then pays for. What
//! threads of the kernel compute is measured for the whole machine, and what they
//! did for others at the same time is in it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::harness::Unmeasured;
use super::limit::Limit;
use super::machine::{kernel_thread_seconds, process_bytes};
use super::timing::process_cpu_ns;
use super::{disk, hit, programs, restore, stream, thrash};
use crate::sys;

/// What workers can do.
const JOBS: [(&str, Job); 6] = [
    (hit::JOB, hit::work),
    (disk::MAKE, disk::make),
    (thrash::JOB, thrash::work),
    (stream::JOB, stream::work),
    (restore::JOB, restore::work),
    (programs::JOB, programs::work),
];
type Job = fn(&WorkerTask) -> Result<Answer, Unmeasured>;

const JOB: &str = "job";
const GROUP: &str = "group";
const DEVICE: &str = "device";
const AT: &str = "at";
const IS_WRITTEN: &str = "is-written";
/// How often a mount is tried again while the last worker's is still going away, and the pauses between.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// What a worker is to do, and with what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerTask(BTreeMap<String, String>);

impl WorkerTask {
    /// To do `job`.
    pub fn new(job: &str) -> Self {
        Self(BTreeMap::new()).with(JOB, job)
    }

    /// With this value.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl ToString) -> Self {
        self.0.insert(key.to_owned(), value.to_string());
        self
    }

    /// With the file system of `device` mounted over `at`, for this worker alone.
    #[must_use]
    pub fn on(self, device: &Path, at: &Path) -> Self {
        self.with(DEVICE, device.display()).with(AT, at.display())
    }

    /// And writable.
    #[must_use]
    pub fn writing(self) -> Self {
        self.with(IS_WRITTEN, 1)
    }

    /// The value of `key`.
    pub fn text(&self, key: &str) -> Result<&str, Unmeasured> {
        let value = self.0.get(key);
        value.map(String::as_str).ok_or_else(|| Unmeasured::Failed(format!("the task has no `{key}`")))
    }

    /// The value of `key`, a number.
    pub fn number(&self, key: &str) -> Result<u64, Unmeasured> {
        let text = self.text(key)?;
        text.parse().map_err(|_| Unmeasured::Failed(format!("`{text}` of the task's `{key}` is no number")))
    }

    fn written(&self) -> Result<String, Unmeasured> {
        let broken = self.0.values().find(|value| value.contains('\n'));
        if let Some(broken) = broken {
            return Err(Unmeasured::Missing(format!(
                "{broken:?} has a line break in it; choose another name"
            )));
        }
        Ok(self.0.iter().map(|(key, value)| format!("{key} {value}\n")).collect())
    }

    fn read(text: &str) -> Self {
        let words = text.lines().filter_map(|line| line.split_once(' '));
        Self(words.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
    }

    /// Has it done by a worker that may use `limit` bytes of memory, if there is one.
    pub fn run(self, limit: Option<u64>) -> Result<Answer, Unmeasured> {
        let Some(limit) = limit.map(Limit::new).transpose()? else { return self.run_by(&[]) };
        let ended = self.with(GROUP, limit.door().display()).run_by(&[]);
        limit.judge(ended)
    }

    /// Has it done by a worker that this command starts by `words`, such as those of `run`.
    pub fn run_by(self, words: &[String]) -> Result<Answer, Unmeasured> {
        let us = std::env::current_exe()?;
        let mut command = Command::new(&us);
        command.args(words).args((!words.is_empty()).then_some(us));
        command.args(["bench", "--worker"]).arg(self.written()?);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut worker = command.spawn()?;
        let pipe = worker.stdin.take();
        let output = worker.wait_with_output()?;
        drop(pipe);
        if output.status.success() {
            return Answer::read(&String::from_utf8_lossy(&output.stdout));
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(Unmeasured::Failed(format!(
            "the worker of `{}` ended with {}: {}",
            self.text(JOB)?,
            output.status,
            said.trim_end()
        )))
    }
}

/// Numbers that a worker brings back.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Answer(BTreeMap<String, Vec<f64>>);

/// What a line begins with that says why there is no answer.
const MISSING: &str = "missing";
const FAILED: &str = "failed";

impl Answer {
    /// With these numbers.
    #[must_use]
    pub fn with(mut self, key: &str, numbers: impl Into<Vec<f64>>) -> Self {
        self.0.insert(key.to_owned(), numbers.into());
        self
    }

    /// The number of `key`, which is not one if there is none.
    pub fn number(&self, key: &str) -> f64 {
        self.list(key).first().copied().unwrap_or(f64::NAN)
    }

    /// All numbers of `key`.
    pub fn list(&self, key: &str) -> Vec<f64> {
        self.0.get(key).cloned().unwrap_or_default()
    }

    fn written(&self) -> String {
        let mut text = String::new();
        for (key, numbers) in &self.0 {
            text.push_str(key);
            for number in numbers {
                let _ = write!(text, " {number}");
            }
            text.push('\n');
        }
        text
    }

    fn read(text: &str) -> Result<Self, Unmeasured> {
        let mut answer = Self::default();
        for line in text.lines() {
            let (key, rest) = line.split_once(' ').unwrap_or((line, ""));
            match key {
                MISSING => return Err(Unmeasured::Missing(rest.to_owned())),
                FAILED => return Err(Unmeasured::Failed(rest.to_owned())),
                _ => answer = answer.with(key, rest.split(' ').flat_map(str::parse).collect::<Vec<f64>>()),
            }
        }
        Ok(answer)
    }
}

/// What a worker does with the words it was started with: prints what came of it.
pub fn main(text: &str) -> String {
    match work(&WorkerTask::read(text)) {
        Ok(answer) => answer.written(),
        Err(Unmeasured::Missing(why)) => format!("{MISSING} {}\n", why.replace('\n', " ")),
        Err(Unmeasured::Failed(why)) => format!("{FAILED} {}\n", why.replace('\n', " ")),
    }
}

fn work(task: &WorkerTask) -> Result<Answer, Unmeasured> {
    let name = task.text(JOB)?;
    let job = JOBS.iter().find(|(known, _)| *known == name);
    let (_, job) = job.ok_or_else(|| Unmeasured::Failed(format!("there is no job `{name}`")))?;
    if let Ok(group) = task.text(GROUP) {
        fs::write(group, std::process::id().to_string())?;
    }
    if let (Ok(device), Ok(at)) = (task.text(DEVICE), task.text(AT)) {
        mount(Path::new(device), Path::new(at), task.text(IS_WRITTEN).is_err())?;
    }
    // Threads come after the mount, which is for those that this one starts.
    std::thread::spawn(end_with_the_pipe);
    job(task)
}

fn mount(device: &Path, at: &Path, is_read_only: bool) -> Result<(), Unmeasured> {
    let mut tries = 0;
    loop {
        match sys::mount_privately(device, at, is_read_only) {
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy && tries < TRIES => {
                tries += 1;
                std::thread::sleep(PAUSE);
            }
            Err(error) => {
                return Err(Unmeasured::Missing(format!(
                    "{} cannot be mounted where only we see it: {error}; it takes root",
                    device.display()
                )));
            }
            Ok(()) => return Ok(()),
        }
    }
}

/// The process that started us holds the other end, and may be killed.
fn end_with_the_pipe() {
    let mut nothing = Vec::new();
    // An error is an end as well.
    let _ = std::io::stdin().read_to_end(&mut nothing);
    std::process::exit(1);
}

/// What a piece of work costs, from a moment on.
pub struct Meter {
    start: Instant,
    cpu_ns: f64,
    kernel_seconds: [f64; 2],
    device_bytes: Option<u64>,
}

/// Keys of what a meter answers: seconds that passed, that the process computed, that threads of the kernel did, that
/// those of them did that look for memory; and bytes from devices.
pub const SECONDS: &str = "seconds";
pub const CPU: &str = "cpu";
pub const KERNEL: &str = "kernel";
pub const KSWAPD: &str = "kswapd";
pub const FROM_DEVICE: &str = "from-device";

impl Meter {
    /// From now on.
    pub fn start() -> Self {
        // The threads take longest to look at, and go first.
        let kernel_seconds = kernel_thread_seconds();
        Self {
            device_bytes: process_bytes(),
            kernel_seconds,
            cpu_ns: process_cpu_ns(),
            start: Instant::now(),
        }
    }

    /// Until now.
    pub fn stop(self) -> Answer {
        let seconds = self.start.elapsed().as_secs_f64();
        let cpu = (process_cpu_ns() - self.cpu_ns) / 1e9;
        let device = process_bytes().zip(self.device_bytes).map(|(after, before)| (after - before) as f64);
        let [all, kswapd] = kernel_thread_seconds();
        Answer::default()
            .with(SECONDS, [seconds])
            .with(CPU, [cpu])
            .with(KERNEL, [all - self.kernel_seconds[0]])
            .with(KSWAPD, [kswapd - self.kernel_seconds[1]])
            .with(FROM_DEVICE, device.map_or(Vec::new(), |bytes| vec![bytes]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errand_arrives_as_it_was_sent() {
        let task = WorkerTask::new("x")
            .with("path", "/a folder/file")
            .with("bytes", 5)
            .on("/d".as_ref(), "/m".as_ref());
        let arrived = WorkerTask::read(&task.written().expect("it has no line breaks"));
        assert_eq!(arrived, task);
        assert_eq!((arrived.number("bytes"), arrived.text("path")), (Ok(5), Ok("/a folder/file")));
        assert!(arrived.text("none").is_err() && arrived.number("path").is_err());
        assert!(task.with("path", "a\nb").written().is_err());
    }

    #[test]
    fn an_answer_arrives_as_it_was_sent_and_so_does_a_reason() {
        let answer = Answer::default().with("a", [1.5]).with("b", [1.0, 2.0]).with("none", []);
        let arrived = Answer::read(&answer.written()).expect("it says no reason");
        assert_eq!((arrived.number("a"), arrived.list("b")), (1.5, vec![1.0, 2.0]));
        assert!(arrived.number("none").is_nan() && arrived.number("other").is_nan());
        assert_eq!(Answer::read("missing a disk\n"), Err(Unmeasured::Missing("a disk".to_owned())));
        assert_eq!(Answer::read("failed at all\n"), Err(Unmeasured::Failed("at all".to_owned())));
        assert!(main("job dancing\n").starts_with("failed there is no job"));
    }
}

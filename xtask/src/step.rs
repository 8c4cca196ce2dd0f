//! Step: one thing that must work, and how a list of them is run.
//!
//! A step announces itself, streams what its command prints, and ends with its time. Test runners say how many tests
//! passed; those numbers are added up, and a step that runs no tests counts as one. The last line of a run is always `N
//! passed, N failed`, for people and for scripts.
//!
//! A command that hangs would hang the run, and hide the steps after it: unless it prints to a terminal, one that
//! prints nothing for [`SILENCE_MAX`] is killed with the processes below it, and its step has failed.
//!
//! Invariant: a run fails if any step failed, whatever it printed.

use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any test and any program's compilation on a slow machine.
const SILENCE_MAX: Duration = Duration::from_secs(20 * 60);

pub enum Action {
    /// A command that must exit with 0.
    Run(Command),
    /// A command that must also print exactly this on its standard output.
    Expect(Command, String),
    Call(fn() -> Result<(), Failure>),
    Skip(String),
    /// The step's prerequisites could not be prepared.
    Fail(Failure),
}

pub struct Step {
    name: &'static str,
    action: Action,
    /// Folders that no later step uses.
    leaves: Vec<PathBuf>,
}

impl Step {
    pub fn new(name: &'static str, action: Action) -> Self {
        Self { name, action, leaves: Vec::new() }
    }

    /// Says that no later step uses `folder`.
    pub fn leaving(mut self, folder: PathBuf) -> Self {
        self.leaves.push(folder);
        self
    }

    #[cfg(test)]
    pub fn leaves(&self) -> &[PathBuf] {
        &self.leaves
    }

    pub fn name(&self) -> &'static str {
        self.name
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnFailure {
    Stop,
    GoOn,
}

/// Whether folders that no later step uses are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BuildFiles {
    Keep,
    Remove,
}

#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    pub fn of(path: &Path, error: &std::io::Error) -> Self {
        Self(format!("{}: {error}", path.display()))
    }
}

pub fn execute(command: &mut Command) -> Result<(), Failure> {
    println!("{command:?}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => {
            Err(Failure::new(format!("{command:?} ended with {status}; its output above says why")))
        }
        Err(error) => Err(Failure::new(format!("{command:?} cannot be run: {error}"))),
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Count {
    passed: u64,
    failed: u64,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }

    /// The counts in a line of a test runner's output: `test result: ok. 12 passed; 0 failed; ..`.
    fn of_line(line: &str) -> Self {
        let Some(result) = line.strip_prefix("test result: ") else { return Self::default() };
        let number_before = |word: &str| {
            let before = result.split_once(word).map_or("", |(before, _)| before);
            before.split_whitespace().last().and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        Self { passed: number_before("passed"), failed: number_before("failed") }
    }

    /// A step without tests counts as one; one that failed has failed at least once.
    fn of_step(tests: Self, outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Passed if tests == Self::default() => Self { passed: 1, failed: 0 },
            Outcome::Failed(_) => Self { failed: tests.failed.max(1), ..tests },
            Outcome::Skipped(_) => Self::default(),
            Outcome::Passed => tests,
        }
    }
}

enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

/// A step's line in the summary.
struct Line {
    name: &'static str,
    outcome: Outcome,
    time: Duration,
}

/// Runs `steps` in order, prints a summary, and fails if any of them failed.
pub fn run_all(steps: Vec<Step>, on_failure: OnFailure, build_files: BuildFiles) -> Result<(), Failure> {
    let (planned, mut total, mut lines) = (steps.len(), Count::default(), Vec::new());
    for (number, step) in steps.into_iter().enumerate() {
        println!("\n== {}/{planned} {}", number + 1, step.name);
        let start = Instant::now();
        let (tests, outcome) = run_one(step.action);
        let line = Line { name: step.name, outcome, time: start.elapsed() };
        println!("== {line}");
        if build_files == BuildFiles::Remove {
            step.leaves.iter().for_each(|folder| remove(folder));
        }
        total.add(Count::of_step(tests, &line.outcome));
        let stop = matches!(line.outcome, Outcome::Failed(_)) && on_failure == OnFailure::Stop;
        lines.push(line);
        if stop {
            break;
        }
    }
    summarize(&lines, planned, total)
}

/// A folder that cannot be removed costs room on the disk, and fails no run.
fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Ok(()) => println!("   removed {}, which no later step uses", folder.display()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => println!("   {} cannot be removed: {error}", folder.display()),
    }
}

fn summarize(lines: &[Line], planned: usize, total: Count) -> Result<(), Failure> {
    println!();
    for line in lines {
        println!("{line}");
    }
    if lines.len() < planned {
        println!("{} steps were not run", planned - lines.len());
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    let failed: Vec<&str> =
        lines.iter().filter(|l| matches!(l.outcome, Outcome::Failed(_))).map(|l| l.name).collect();
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(format!("failed: {}", failed.join(", ")))) }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.time.as_secs_f64();
        match &self.outcome {
            Outcome::Passed => write!(f, "{:<12} ok in {seconds:.1} s", self.name),
            Outcome::Failed(why) => write!(f, "{:<12} FAILED in {seconds:.1} s: {why}", self.name),
            Outcome::Skipped(why) => write!(f, "{:<12} skipped: {why}", self.name),
        }
    }
}

fn run_one(action: Action) -> (Count, Outcome) {
    let no_tests = Count::default();
    match action {
        Action::Run(command) => match stream(command) {
            Ok(Streamed { status, tests, .. }) => (tests, outcome_of(status)),
            Err(failure) => (no_tests, Outcome::Failed(failure.0)),
        },
        Action::Expect(command, expected) => match stream(command) {
            Ok(Streamed { status, output, .. }) if status.success() && output != expected => {
                let why = format!("it printed {output:?}, {expected:?} was expected");
                (no_tests, Outcome::Failed(why))
            }
            Ok(Streamed { status, .. }) => (no_tests, outcome_of(status)),
            Err(failure) => (no_tests, Outcome::Failed(failure.0)),
        },
        Action::Call(function) => match function() {
            Ok(()) => (no_tests, Outcome::Passed),
            Err(failure) => (no_tests, Outcome::Failed(failure.0)),
        },
        Action::Skip(why) => (no_tests, Outcome::Skipped(why)),
        Action::Fail(failure) => (no_tests, Outcome::Failed(failure.0)),
    }
}

fn outcome_of(status: ExitStatus) -> Outcome {
    if status.success() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("the command ended with {status}"))
    }
}

#[derive(Debug)]
struct Streamed {
    status: ExitStatus,
    output: String,
    tests: Count,
}

/// Runs `command` without a terminal's input, passing its output on while reading it.
fn stream(command: Command) -> Result<Streamed, Failure> {
    // To a terminal it prints by itself, in colours, and a user sees that it hangs.
    let silence_max = if io::stderr().is_terminal() { Duration::MAX } else { SILENCE_MAX };
    stream_watched(command, silence_max)
}

fn stream_watched(mut command: Command, silence_max: Duration) -> Result<Streamed, Failure> {
    println!("   {}", shown(&command));
    let errors = if silence_max == Duration::MAX { Stdio::inherit() } else { Stdio::piped() };
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors).spawn();
    let mut child = spawned.map_err(|error| Failure::new(format!("it cannot be started: {error}")))?;
    let read = read_lines(&output_lines(&mut child), silence_max);
    let (output, tests) = read.inspect_err(|_| kill(&mut child))?;
    let status = child.wait().map_err(|error| Failure::new(format!("it cannot be waited for: {error}")))?;
    Ok(Streamed { status, output, tests })
}

/// A line of a command's output, or that there is no more of it.
enum OutputLine {
    Output(io::Result<Vec<u8>>),
    Error(Vec<u8>),
    OutputEnded,
}

/// The lines that `child` prints. The threads end with its output, or with this program.
fn output_lines(child: &mut Child) -> Receiver<OutputLine> {
    let (to, said) = mpsc::channel();
    if let Some(errors) = child.stderr.take() {
        let to = to.clone();
        thread::spawn(move || {
            let mut lines = BufReader::new(errors).split(b'\n').map_while(Result::ok);
            lines.try_for_each(|line| to.send(OutputLine::Error(line)))
        });
    }
    let output = BufReader::new(child.stdout.take().expect("it is piped"));
    thread::spawn(move || {
        output.split(b'\n').try_for_each(|line| to.send(OutputLine::Output(line)))?;
        to.send(OutputLine::OutputEnded)
    });
    said
}

/// Passes the lines on, and counts the tests they tell of.
fn read_lines(said: &Receiver<OutputLine>, silence_max: Duration) -> Result<(String, Count), Failure> {
    let (mut output, mut tests) = (String::new(), Count::default());
    loop {
        match said.recv_timeout(silence_max) {
            Ok(OutputLine::Output(line)) => {
                let line =
                    line.map_err(|error| Failure::new(format!("its output cannot be read: {error}")))?;
                let line = String::from_utf8_lossy(&line);
                println!("{line}");
                tests.add(Count::of_line(&line));
                output.push_str(&line);
                output.push('\n');
            }
            Ok(OutputLine::Error(line)) => eprintln!("{}", String::from_utf8_lossy(&line)),
            Ok(OutputLine::OutputEnded) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let minutes = silence_max.as_secs() / 60;
                let why = format!("it printed nothing for {minutes} minutes, and was killed; it may hang");
                return Err(Failure::new(why));
            }
        }
    }
    // Its last words may come after its output; a process that outlives it may keep that open.
    while let Ok(OutputLine::Error(line)) = said.recv_timeout(Duration::from_secs(1)) {
        eprintln!("{}", String::from_utf8_lossy(&line));
    }
    Ok((output, tests))
}

/// Ends `child` and the processes below it.
fn kill(child: &mut Child) {
    let below = processes_below(child.id());
    let _ = child.kill(); // it may have ended
    let mut command = Command::new("kill");
    command.arg("-KILL").args(below.iter().map(u32::to_string)).stderr(Stdio::null());
    if !below.is_empty() {
        let _ = command.status(); // they may have ended, too
    }
    let _ = child.wait();
}

fn processes_below(top: u32) -> Vec<u32> {
    // The number of a process and that of its parent: the name between them may hold spaces and brackets.
    let parts = |stat: String| -> Option<(u32, u32)> {
        let (number, rest) = (stat.split(' ').next()?, stat.rsplit_once(')')?.1);
        Some((number.parse().ok()?, rest.split_whitespace().nth(1)?.parse().ok()?))
    };
    let stats = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = stats.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    let parents: Vec<(u32, u32)> = stats.filter_map(parts).collect();
    let mut found = vec![top];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(number, _)| number));
        next += 1;
    }
    found.split_off(1)
}

fn shown(command: &Command) -> String {
    let settings = command.get_envs().filter_map(|(name, value)| {
        let value = value?.to_string_lossy();
        let value = if value.contains(' ') { format!("\"{value}\"") } else { value.into_owned() };
        Some(format!("{}={value}", name.display()))
    });
    let program = command.get_program().to_string_lossy();
    let program = program.rsplit('/').next().unwrap_or_default().to_owned();
    let arguments = command.get_args().map(|argument| argument.to_string_lossy().into_owned());
    settings.chain([program]).chain(arguments).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn results_of_test_runners_are_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out";
        assert_eq!(Count::of_line(line), Count { passed: 12, failed: 3 });
        assert_eq!(Count::of_line("12 passed; 3 failed"), Count::default());
    }

    #[test]
    fn a_command_that_fails_is_a_failure() {
        assert!(matches!(run_one(Action::Run(shell("true"))).1, Outcome::Passed));
        assert!(matches!(run_one(Action::Run(shell("exit 3"))).1, Outcome::Failed(_)));
        assert!(matches!(run_one(Action::Run(Command::new("no-such-program-here"))).1, Outcome::Failed(_)));
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_all_below_it() {
        let silent = |script: &str| stream_watched(shell(script), Duration::from_secs(1));
        // A shell waits for its child, and both would outlive this test by far.
        let failure = silent("sleep 617.25; true").expect_err("it is killed");
        assert!(failure.to_string().contains("printed nothing"), "{failure}");
        let is_sleep = |entry: fs::DirEntry| {
            fs::read(entry.path().join("cmdline")).is_ok_and(|line| line == b"sleep\x00617.25\0")
        };
        // A process that was killed is there until the system has taken it down.
        let (killed, is_there) = (Instant::now(), || fs::read_dir("/proc").unwrap().flatten().any(is_sleep));
        while is_there() {
            assert!(killed.elapsed() < Duration::from_secs(60), "the child is not killed");
            thread::sleep(Duration::from_millis(1));
        }
        let talks = silent("for n in 1 2 3 4; do echo $n; sleep 0.4; done; echo 5 >&2").expect("it ends");
        assert_eq!(talks.output, "1\n2\n3\n4\n");
    }

    #[test]
    fn output_that_differs_is_a_failure() {
        let run = |script: &str| run_one(Action::Expect(shell(script), "7\n".to_owned())).1;
        assert!(matches!(run("echo 7"), Outcome::Passed));
        assert!(matches!(run("echo 8"), Outcome::Failed(_)));
        assert!(matches!(run("echo 7; exit 1"), Outcome::Failed(_)));
    }

    #[test]
    fn a_run_stops_at_the_first_failure_unless_asked_otherwise() {
        let steps = || ["exit 1", "true"].map(|script| Step::new("x", Action::Run(shell(script)))).into();
        assert!(run_all(steps(), OnFailure::Stop, BuildFiles::Keep).is_err());
        assert!(run_all(steps(), OnFailure::GoOn, BuildFiles::Keep).is_err());
        let skipped = vec![Step::new("x", Action::Skip(String::new()))];
        assert!(run_all(skipped, OnFailure::Stop, BuildFiles::Keep).is_ok());
    }

    #[test]
    fn a_folder_that_no_later_step_uses_is_removed_if_asked_for() {
        let folder = std::env::temp_dir().join(format!("quinion-xtask-{}", std::process::id()));
        let run = |build_files| {
            fs::create_dir_all(folder.join("inner")).unwrap();
            let step = Step::new("x", Action::Run(shell("true"))).leaving(folder.clone());
            assert!(run_all(vec![step], OnFailure::Stop, build_files).is_ok());
            folder.exists()
        };
        assert!(run(BuildFiles::Keep));
        assert!(!run(BuildFiles::Remove));
    }

    #[test]
    fn a_step_counts_once_or_by_its_tests() {
        let tests = Count { passed: 5, failed: 0 };
        assert_eq!(Count::of_step(tests, &Outcome::Passed), tests);
        assert_eq!(Count::of_step(Count::default(), &Outcome::Passed), Count { passed: 1, failed: 0 });
        assert_eq!(Count::of_step(tests, &Outcome::Failed(String::new())), Count { passed: 5, failed: 1 });
    }

    #[test]
    fn commands_are_shown_as_they_would_be_typed() {
        let mut command = Command::new("cargo");
        command.args(["test", "-p", "quinion"]).env("RUSTFLAGS", "--cfg x");
        assert_eq!(shown(&command), "RUSTFLAGS=\"--cfg x\" cargo test -p quinion");
    }
}

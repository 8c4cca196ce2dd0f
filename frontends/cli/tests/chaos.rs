//! Chaos: random file operations of programs, from a seed, beside a twin without the cache, while the cache's owner is
//! stopped, killed and restarted: no byte, result, error or offset differs.
//!
//! ```text
//!   programs/chaos.c twin SEED     --without--> a line for each call     each actor has files of its own, so what it
//!                                  --with-----> the same lines           gets follows from the seed
//!   programs/chaos.c shared PHASE  roles 0, 1, 3 with, 2 without         the same files at once; each checks its reads
//!                                  1 and 3 may be killed and restarted   against what was complete before it asked
//!   this test                      --SIGSTOP, SIGKILL, a new run--> the owner, at times from the seed
//! ```
//!
//! A round is one of these for a second or two. Rounds follow each other for `QUINION_CHAOS_SECONDS` in all, half of
//! the time for each mode. The default of 120 seconds runs each kind of round at least once in each mode, and delays
//! every merge by two minutes; `cargo xtask nightly chaos` sets 3600, and so does `chaos-late`, which also has programs
//! wait for the owner no longer than users' programs do, so that many of its answers come too late. A round that fails
//! is reported with its seed, its class and its last operations; `QUINION_CHAOS_SEED` repeats the rounds of one seed.
//! The seed decides the operations, not how threads are interleaved: a difference that one twin causes alone can be
//! repeated, a race may take some rounds.
//!
//! The harness itself is tested here, too: without the cache on both sides nothing differs, and each kind of round
//! finds a change that is recorded and not made.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;

mod disk;
use disk::{MEMORY, plain, quinion, scratch};

const KINDS: [&str; 8] = ["twin", "locked", "records", "versions", "twin", "renames", "consumed", "appends"];
const OPERATIONS: &str = "3000";
const PHASE_MILLISECONDS: u64 = 1500;
/// How much longer than without the cache a round may take. Any round that takes this long hangs.
const HANGS: Duration = Duration::from_secs(90);
const FAILURES_MAX: usize = 12;

/// Rounds run one at a time: two at once would slow each other, and they share the time limit.
static TURN: Mutex<()> = Mutex::new(());

fn program() -> &'static Path {
    static PROGRAM: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PROGRAM.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("chaos");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/chaos.c");
        let status =
            Command::new("cc").args(["-O2", "-w", "-pthread", "-o"]).arg(&program).arg(source).status();
        assert!(status.expect("a C compiler named cc").success());
        (folder, program)
    });
    path
}

fn seconds() -> u64 {
    std::env::var("QUINION_CHAOS_SECONDS")
        .map_or(120, |value| value.parse().expect("QUINION_CHAOS_SECONDS: a number"))
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) % bound
    }
}

#[allow(unsafe_code, reason = "a plain call")]
fn signal(process: i32, signal: i32) {
    // SAFETY: the arguments are plain numbers.
    unsafe { libc::kill(process, signal) };
}

struct Started {
    child: Child,
    output: Receiver<String>,
    errors: Receiver<String>,
}

impl Started {
    fn new(mut command: Command) -> Self {
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let (sender, output) = channel();
        let (errors_sender, errors) = channel();
        // The output ends when the last process that could write to it ends, whichever was killed.
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = out.read_to_end(&mut text);
            let _ = sender.send(String::from_utf8_lossy(&text).into_owned());
        });
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = err.read_to_end(&mut text);
            let _ = errors_sender.send(String::from_utf8_lossy(&text).into_owned());
        });
        Self { child, output, errors }
    }
    fn pid(&self) -> i32 {
        self.child.id() as i32
    }
    fn errors(&self) -> String {
        self.errors.recv_timeout(Duration::from_secs(5)).unwrap_or_default()
    }
    /// Whether it has started a program, which survives it.
    fn has_started(process: i32) -> bool {
        let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        tasks
            .map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default())
            .any(|all| !all.is_empty())
    }
    fn kill(&mut self) {
        signal(-self.pid(), libc::SIGKILL);
        let _ = self.output.recv_timeout(Duration::from_secs(20));
        let _ = self.child.wait();
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        signal(-self.pid(), libc::SIGKILL);
        let _ = self.child.wait();
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// Without the cache, to test the harness.
    Alone,
    Default,
    AtOnce,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    /// The owner is not disturbed: its report is written afterwards.
    Calm,
    /// The owner is the `run` itself, which is stopped at times, and killed once.
    Own,
    /// The owner outlives the run; it is stopped, killed and restarted.
    Kept,
}

struct Round {
    seed: u64,
    mode: Mode,
    life: Life,
    kind: &'static str,
    lie: u32,
    files: TempDir,
    runtime: TempDir,
}

type Failure = (String, String);

impl Round {
    fn new(seed: u64, mode: Mode) -> Self {
        let runtime = TempDir::new().expect("a folder");
        fs::set_permissions(runtime.path(), fs::Permissions::from_mode(0o700)).expect("it is ours");
        let life = [Life::Calm, Life::Kept, Life::Own, Life::Kept][(seed / 8 % 4 + seed % 4) as usize % 4];
        let kind = KINDS[(seed % 8) as usize];
        Self { seed, mode, life, kind, lie: 0, files: scratch(), runtime }
    }

    fn report(&self) -> PathBuf {
        self.files.path().join("report")
    }

    fn run(&self, words: &[String]) -> Command {
        if self.mode == Mode::Alone {
            let mut command = plain(&words[0]);
            command.args(&words[1..]);
            return command;
        }
        let mut command = quinion();
        command.args(["run", "--memory", MEMORY, "--report", "json", "--report-file"]).arg(self.report());
        if self.mode == Mode::AtOnce {
            command.args(["--attach", "at-once"]);
        }
        if self.life == Life::Kept {
            command.arg("--keep=chaos");
        }
        command.env("XDG_RUNTIME_DIR", self.runtime.path()).arg("--").args(words);
        command
    }

    fn twin(&self, folder: &str) -> Vec<String> {
        let folder = self.files.path().join(folder);
        fs::create_dir(&folder).expect("the disk has room");
        let folder = folder.to_str().expect("a plain path");
        let words = [program().to_str().expect("a plain path"), "twin", folder];
        let numbers = [self.seed.to_string(), OPERATIONS.to_owned(), "0".to_owned()];
        words.map(str::to_owned).into_iter().chain(numbers).collect()
    }

    fn shared(&self, phase: &str, role: u32, milliseconds: u64) -> Vec<String> {
        let folder = self.files.path().to_str().expect("a plain path").to_owned();
        let control = format!("{folder}/control");
        let numbers = [self.seed + 1000 * u64::from(role), role.into(), milliseconds, self.lie.into()];
        let words = [program().to_str().expect("a plain path"), "shared", phase, &folder, &control];
        words.map(str::to_owned).into_iter().chain(numbers.map(|number| number.to_string())).collect()
    }

    fn owners(&self, first: &[i32]) -> Vec<i32> {
        if self.life == Life::Own {
            return first.to_vec();
        }
        let folder = self.runtime.path().join("quinion");
        let folder = folder.as_os_str().as_encoded_bytes();
        let owner = |entry: fs::DirEntry| {
            let process: i32 = entry.file_name().to_str()?.parse().ok()?;
            let words = fs::read(format!("/proc/{process}/cmdline")).ok()?;
            let has = |word: &[u8]| words.split(|&byte| byte == 0).any(|part| part == word);
            (has(b"keep-owner") && has(folder)).then_some(process)
        };
        fs::read_dir("/proc").expect("there is /proc").flatten().filter_map(owner).collect()
    }

    /// Stops, kills and restarts the owner as the seed says, until `is_over`.
    fn disturb(&self, first: &[i32], mut also: impl FnMut(&mut Random), mut is_over: impl FnMut() -> bool) {
        let mut random = Random(self.seed ^ 0xc4a05);
        let mut killed = false;
        while !is_over() {
            std::thread::sleep(Duration::from_millis(10 + random.below(150)));
            if self.life == Life::Calm || self.mode == Mode::Alone {
                also(&mut random);
                continue;
            }
            let action = random.below(10);
            if action > 6 {
                also(&mut random);
            }
            let owners = if killed { Vec::new() } else { self.owners(first) };
            for owner in owners {
                match action {
                    0..=4 => {
                        signal(owner, libc::SIGSTOP);
                        std::thread::sleep(Duration::from_millis(random.below(300)));
                        signal(owner, libc::SIGCONT);
                    }
                    // A `run` that is killed before it has started its program leaves no program to check.
                    5 | 6 if self.life == Life::Own && !Started::has_started(owner) => (),
                    5 | 6 => {
                        signal(owner, libc::SIGKILL);
                        killed = self.life == Life::Own;
                    }
                    _ => (),
                }
            }
            if self.life == Life::Kept && random.below(3) == 0 && !is_over() {
                // Starts a new owner, if there is none; the older programs continue without one.
                Started::new(self.run(&["true".to_owned()])).output.recv_timeout(HANGS).ok();
            }
        }
    }

    fn hang(&self, started: &Started) -> Failure {
        let mut told = String::new();
        for entry in fs::read_dir("/proc").expect("there is /proc").flatten() {
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let stat = read("stat");
            let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            if fields.get(2) == Some(&started.pid().to_string().as_str()) {
                told.push_str(&format!(
                    "{} {} waits in {}\n",
                    stat,
                    read("cmdline").replace('\0', " "),
                    read("wchan")
                ));
            }
        }
        (format!("{} hangs", self.kind), told)
    }

    fn go(&self) -> Result<u64, Failure> {
        if self.kind == "twin" { self.go_twin() } else { self.go_shared() }
    }

    fn served(&self) -> u64 {
        let calm = self.life == Life::Calm && self.mode != Mode::Alone && self.report().exists();
        if calm { disk::Report::read(&self.report()).served() } else { 0 }
    }

    fn go_twin(&self) -> Result<u64, Failure> {
        let mut words = self.twin("without");
        let mut beside = plain(&words[0]);
        beside.args(&words[1..]);
        let without = Started::new(beside);
        words = self.twin("with");
        words[5] = self.lie.to_string();
        let with = Started::new(self.run(&words));
        let mut said = [None, None];
        let begun = Instant::now();
        self.disturb(
            &[with.pid()],
            |_| (),
            || {
                for (said, started) in said.iter_mut().zip([&with, &without]) {
                    *said = said.take().or_else(|| started.output.try_recv().ok());
                }
                said.iter().all(Option::is_some) || begun.elapsed() > HANGS
            },
        );
        let [Some(said), Some(expected)] = said else { return Err(self.hang(&with)) };
        assert!(expected.starts_with("ok"), "the program without the cache: {expected}");
        self.compare_logs()
            .map_err(|(class, words)| (class, format!("{words}\nit told: {}", with.errors())))?;
        if !said.starts_with("ok") {
            return Err(("twin: the program ends badly".to_owned(), said));
        }
        Ok(self.served())
    }

    fn compare_logs(&self) -> Result<(), Failure> {
        for actor in 0..4 {
            let [with, without] = ["with", "without"].map(|side| {
                let log =
                    fs::read(self.files.path().join(side).join(format!("log.{actor}"))).unwrap_or_default();
                let text = log.get(64..).unwrap_or_default();
                let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
                String::from_utf8_lossy(&text[..end]).into_owned()
            });
            if with == without {
                continue;
            }
            let (with, without): (Vec<&str>, Vec<&str>) = (with.lines().collect(), without.lines().collect());
            let common = with.iter().zip(&without).take_while(|(with, without)| with == without).count();
            let line =
                |lines: &[&str]| lines.get(common).map_or("(no more)".to_owned(), |line| line.to_string());
            let before = without[common.saturating_sub(25)..common].join("\n");
            let words = format!(
                "actor {actor}, line {common}\n{before}\nwith:    {}\nwithout: {}",
                line(&with),
                line(&without)
            );
            let of = |line: String| line.split_whitespace().nth(1).unwrap_or("end").to_owned();
            let what = if common == with.len() { "the program ended at" } else { "differs:" };
            return Err((format!("twin {what} {}", of(line(&without))), words));
        }
        Ok(())
    }

    fn go_shared(&self) -> Result<u64, Failure> {
        let mut make = plain(program());
        let output = make.args(&self.shared("make", 0, 0)[1..]).output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        let start = |role: u32| {
            let words = self.shared(self.kind, role, PHASE_MILLISECONDS);
            if role != 2 {
                return Started::new(self.run(&words));
            }
            let mut external = plain(&words[0]);
            external.args(&words[1..]);
            Started::new(external)
        };
        // In these kinds, a program may be killed and restarted with the same role.
        let may_be_killed = matches!(self.kind, "locked" | "versions" | "renames") && self.life != Life::Own;
        let mut programs: Vec<Started> = (0..3).map(start).collect();
        let first: Vec<i32> = [0, 1].map(|role: usize| programs[role].pid()).to_vec();
        let begun = Instant::now();
        let end = Duration::from_millis(PHASE_MILLISECONDS);
        let is_late = |part: u32| begun.elapsed() > end / part;
        self.disturb(
            &first,
            |random| match programs.len() {
                3 if is_late(3) => programs.push(start(3)),
                4 if may_be_killed && !is_late(1) && random.below(3) == 0 => {
                    let role = [1, 3][random.below(2) as usize];
                    programs[role].kill();
                    programs[role] = start(role as u32);
                }
                _ => (),
            },
            || is_late(1),
        );
        for (role, started) in programs.iter().enumerate() {
            let Ok(said) = started.output.recv_timeout(HANGS) else { return Err(self.hang(started)) };
            let last = said.lines().last().unwrap_or_default().to_owned();
            if last.starts_with("wrong") {
                let class: Vec<&str> = last.split_whitespace().skip(1).take(3).collect();
                return Err((class.join(" "), said));
            }
            // A program that stopped because another one found a difference reports nothing; the other one does.
            if last != "ok" && last != "stopped" {
                return Err((
                    format!("{}: a program ends badly", self.kind),
                    format!("role {role}: {said:?}; it told: {}", started.errors()),
                ));
            }
        }
        Ok(self.served())
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        if self.life == Life::Kept {
            for owner in self.owners(&[]) {
                signal(owner, libc::SIGKILL);
            }
        }
    }
}

#[track_caller]
fn rounds(mode: Mode, time: Duration) {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let asked = std::env::var("QUINION_CHAOS_SEED").ok();
    let asked = asked.map(|seed| seed.parse::<u64>().expect("QUINION_CHAOS_SEED: a number"));
    // Each short run starts with the same seeds, so that a merge fails because of its own changes; a longer run
    // continues from there.
    let first = asked.unwrap_or(0);
    let (begun, mut count, mut served) = (Instant::now(), 0, 0);
    let mut failures: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    while begun.elapsed() < time || count == 0 {
        let seed = if asked.is_some() { first } else { first + count };
        match Round::new(seed, mode).go() {
            Ok(bytes) => served += bytes,
            Err((class, words)) => {
                println!("chaos: {mode:?} seed {seed}: {class}\n{words}");
                let wait = std::env::var("QUINION_WAIT_MS").unwrap_or_default();
                println!(
                    "again: QUINION_WAIT_MS={wait} QUINION_CHAOS_SEED={seed} \
                     cargo test -p quinion-cli --test chaos {mode:?}\n"
                );
                failures.entry(class).or_default().push(seed);
            }
        }
        count += 1;
        if failures.values().map(Vec::len).sum::<usize>() >= FAILURES_MAX {
            break;
        }
    }
    println!(
        "chaos: {mode:?}: {count} rounds, {served} bytes served in the calm ones, failures {failures:?}"
    );
    assert!(failures.is_empty(), "{mode:?}: of {count} rounds, by class, the seeds: {failures:#?}");
    // One seed may have no calm rounds, which alone are counted.
    let is_any_calm = asked.is_none() && count >= 8;
    assert!(mode == Mode::Alone || !is_any_calm || served > 0, "nothing was served in {count} rounds");
}

#[test]
#[expect(non_snake_case, reason = "the mode's name")]
fn nothing_differs_Default() {
    rounds(Mode::Default, Duration::from_secs(seconds() / 2));
}

#[test]
#[expect(non_snake_case, reason = "the mode's name")]
fn nothing_differs_AtOnce() {
    rounds(Mode::AtOnce, Duration::from_secs(seconds() / 2));
}

/// The harness itself: programs without the cache on both sides.
#[test]
#[expect(non_snake_case, reason = "the mode's name")]
fn nothing_differs_Alone() {
    rounds(Mode::Alone, Duration::from_secs(seconds() / 12));
}

/// Each kind of round finds a change that is recorded and not made.
#[test]
fn each_kind_of_round_would_find_it() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for (seed, kind) in KINDS.iter().enumerate() {
        // Not every lie shows: bytes may be written again before they are read. At least one of several must show.
        let finds = |lie: u32| {
            let mut round = Round::new(seed as u64, Mode::Alone);
            round.lie = lie;
            round.go().is_err()
        };
        assert!([20, 3, 40, 7, 90].into_iter().any(finds), "{kind}: no lie is found");
    }
}

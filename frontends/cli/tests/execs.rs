//! Execs: programs under `run` that become other programs, or spawn some, give the output they give without; and what
//! they had is given back.
//!
//! ```text
//!   reads FILE --> becomes a program that does not join      the owner closes FILE while that runs
//!   handler on a small stack --> becomes a program           the stack does not overflow
//!   pidfd_spawn --> the child gives FILE's number away       the parent reads FILE on where it was
//! ```
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

mod disk;
use disk::{noise, plain, quinion, scratch};

/// The program `execs.c`, and the library that stands in for a C library with `pidfd_spawn`.
fn built(folder: &Path) -> [PathBuf; 3] {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/execs.c");
    let cc = |name: &str, options: &[&str]| {
        let made = folder.join(name);
        let mut command = Command::new("cc");
        command.args(["-O2", "-w"]).arg(&source).args(options).arg("-o").arg(&made);
        assert!(command.status().expect("a C compiler named cc").success());
        made
    };
    let library = cc("libstandin.so", &["-shared", "-fPIC", "-DSTANDIN"]);
    let library_path = library.to_str().expect("a path in UTF-8");
    let linked = ["-Wl,--no-as-needed", library_path, "-Wl,-rpath,$ORIGIN"];
    [cc("execs", &[]), cc("execs-standin", &linked), library]
}

fn under_run(program: &Path, words: &[&str]) -> Output {
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--"]).arg(program).args(words);
    command.output().expect("our own command starts")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_handler_on_a_small_stack_becomes_another_program() {
    let folder = scratch();
    let [program, ..] = built(folder.path());
    let output = under_run(&program, &["crash", "crashed"]);
    assert_eq!((output.status.code(), text(&output)), (Some(0), "crashed\n".into()), "{output:?}");
}

/// 1. A program has read parts of two files, and spawns another by `pidfd_spawn`.
/// 2. The child gives the first file's number to the second, in the parent's memory: the parent reads on where it was.
#[test]
fn a_child_of_pidfd_spawn_changes_nothing_of_its_parents() {
    let folder = scratch();
    let [program, standin, _] = built(folder.path());
    let files = [1, 2].map(|seed| {
        let file = folder.path().join(format!("file-{seed}"));
        std::fs::write(&file, noise(300_000, seed)).expect("the disk has room");
        file.to_str().expect("a path in UTF-8").to_owned()
    });
    let words = ["spawn", &files[0], &files[1]];
    let without = plain(&standin).args(words).output().expect("it starts");
    assert!(text(&without).starts_with("spawned\nended 0, closes at exec 1\n"), "{without:?}");
    let report = folder.path().join("report");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    let with = command.arg(&report).arg("--").arg(&standin).args(words).output().expect("it starts");
    assert_eq!(text(&with), text(&without), "{with:?}");
    // The descriptors that the child duplicated are not taken for the parent's.
    let report = disk::Report::read(&report);
    assert_eq!(report.number("reasons", "duplicated"), 0, "{report:?}");
    // A C library without the function: a program finds that of `run`, which has to do the same.
    let output = under_run(&program, &words);
    assert_eq!((output.status.code(), text(&output)), (Some(0), text(&without)), "{output:?}");
}

/// Reads a file, tries in vain to become another program, reads on, and becomes one without an environment.
const BECOMES: &str = "
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(20): os.pread(file, 5000, 0)
try: os.execve('/no/such/program', ['none'], {})
except OSError: pass
print('ready', flush=True)
input()
for _ in range(20): os.pread(file, 5000, 0)
print('goes on', flush=True)
input()
os.execve('/bin/sleep', ['sleep', '100'], {})
";

fn has_open(process: u32, path: &Path) -> bool {
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs");
    files.flatten().any(|file| std::fs::read_link(file.path()).is_ok_and(|link| link == path))
}

/// 1. A program has read a file, and fails to become another program: the owner keeps the file.
/// 2. It becomes a program that the object is not loaded into: the owner closes the file while that runs.
#[test]
fn files_of_a_program_that_became_another_are_closed() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(300_000, 1)).expect("the disk has room");
    let mut command = quinion();
    command
        .args(["run", "--attach", "at-once", "--memory", "64M", "--", "python3", "-c", BECOMES])
        .arg(&path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut run = command.spawn().expect("our own command starts");
    let mut input = run.stdin.take().expect("a pipe");
    let mut lines = BufReader::new(run.stdout.take().expect("a pipe")).lines();
    let mut next = || lines.next().expect("a line").expect("it can be read");
    assert_eq!(next(), "ready");
    assert!(has_open(run.id(), &path), "it is served");
    std::thread::sleep(Duration::from_millis(2500));
    assert!(has_open(run.id(), &path), "the program runs still");
    writeln!(input).expect("it reads");
    assert_eq!(next(), "goes on");
    writeln!(input).expect("it reads");
    let begun = Instant::now();
    while has_open(run.id(), &path) && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let is_open = has_open(run.id(), &path);
    #[allow(unsafe_code, reason = "a plain call")]
    // SAFETY: numbers only; it passes that on to its program.
    unsafe {
        libc::kill(run.id() as i32, libc::SIGTERM);
    }
    run.wait().expect("it is ours");
    assert!(!is_open, "the owner has the file open still");
}

//! Limits: a program that limits its addresses or locks its memory can use as much as without the cache. A program that
//! forks in a handler continues in the child. Errors that the kernel returns before it looks at the file are returned.
//! The program is `programs/limits.c`.
//!
//! ```text
//!   programs/limits.c CASE --alone-----------> its output, and how it ended
//!                          --under `run`-----> the same, byte for byte
//! ```
//!
//! The cache is larger than the address space that the limits leave.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

mod disk;
use disk::{Report, noise, quinion, scratch};

const FILE_BYTES: usize = 300_123;

fn program() -> &'static Path {
    static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, program) = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("there is room");
        let program = folder.path().join("limits");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/limits.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-w", "-pthread", "-o"]).arg(&program).arg(&source);
        assert!(compiler.status().expect("a C compiler named cc").success());
        (folder, program)
    });
    program
}

#[track_caller]
fn told(mut command: Command) -> (String, Option<i32>) {
    let output = command.stdin(Stdio::null()).output().expect("it starts");
    assert!(output.stderr.is_empty(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    (String::from_utf8(output.stdout).expect("text"), output.status.code())
}

#[track_caller]
fn run(attach: &str, words: &Command) -> ((String, Option<i32>), Report) {
    let report = scratch();
    let report = report.path().join("report");
    let mut command = quinion();
    command.args(["run", "--attach", attach, "--memory", "512M", "--report", "json", "--report-file"]);
    command.arg(&report).arg("--").arg(words.get_program()).args(words.get_args());
    (told(command), Report::read(&report))
}

/// Runs a case with and without the cache, its file in `folder`; checks the least number of served bytes.
#[track_caller]
fn same_with_and_without(case: &str, folder: &Path, bytes_min: u64) {
    let file = folder.join("file");
    let fresh = || std::fs::write(&file, noise(FILE_BYTES, 7)).expect("the disk has room");
    let mut words = Command::new(program());
    words.arg(case).arg(&file);
    fresh();
    let mut alone = Command::new(program());
    alone.arg(case).arg(&file);
    let expected = told(alone);
    for attach in ["at-once", "auto"] {
        fresh();
        let (found, report) = run(attach, &words);
        for (at, (found, expected)) in found.0.lines().zip(expected.0.lines()).enumerate() {
            assert_eq!(
                found,
                expected,
                "{case}, {attach}: line {} differs (right: without the cache)",
                at + 1
            );
        }
        assert_eq!(found, expected, "{case}, {attach} differs (right: without the cache)");
        assert!(attach != "at-once" || report.served() >= bytes_min, "too little was served: {}", report.0);
    }
}

macro_rules! limits {
    ($($name:ident: $bytes:literal)*) => { $(
        #[test]
        fn $name() {
            same_with_and_without(stringify!($name), scratch().path(), $bytes);
        }
    )* };
}
limits! {
    limits_itself: 4_000_000
    limited_children: 900_000
    no_limit: 4_000_000
    watches_and_limits_itself: 900_000
    threads: 20_000_000
    locks: 1_500_000
    forking_handler: 1_000_000
    forking_handler_with_signals_held: 1_000_000
    limiting_handler: 40_000_000
    kernel_addresses: 900_000
    flags: 900_000
    cut_by_calls: 900_000
}

/// Without a device below, the kernel does not support such reads.
#[test]
fn flags_of_files_in_memory() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return println!("SKIPPED: there is no /dev/shm");
    };
    same_with_and_without("flags", folder.path(), 900_000);
}

/// A shell limits itself, and so does a program of Python's.
#[test]
fn programs_that_limit_themselves() {
    let shell = "ulimit -v 500000; x=$(head -c 3000000 /dev/zero | tr '\\0' a); echo ${#x}";
    let python = "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30)); print(len(bytearray(600 << 20)))";
    for words in [["bash", "-c", shell], ["python3", "-c", python]] {
        let command = || {
            let mut command = disk::plain(words[0]);
            command.args(&words[1..]);
            command
        };
        let expected = told(command());
        for attach in ["at-once", "auto"] {
            assert_eq!(run(attach, &command()).0, expected, "{words:?}");
        }
    }
}

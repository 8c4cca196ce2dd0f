//! Disk: real files, real programs, and the same command with and without Quinion.
//!
//! The large files are four times the smallest cache, so every program that reads one makes the cache turn over several
//! times. Each part of a file differs from every other part: bytes from a wrong place cannot look right.
//!
//! They are made once and kept beside the build, because making them costs more
//! than most tests. They never change: tests that write make files of their own.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

/// The smallest memory a cache may have.
pub const MEMORY: &str = "16M";
/// Bytes of the large files, about: four times [`MEMORY`].
pub const LARGE_BYTES: usize = 64 << 20;
/// How many small files there are in the folder `many`.
pub const MANY_FILES: usize = 200;

/// What `fstatfs` says of file systems that have no device: nothing is read from one there.
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

pub fn quinion() -> Command {
    plain(env!("CARGO_BIN_EXE_quinion"))
}

pub fn plain(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("LC_ALL", "C").env("TMPDIR", disk()).stdin(Stdio::null());
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    command
}

pub fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("there is no `{name}` on this machine; scripts/setup installs it"))
}

/// The interpreter itself, without a script that only looks for it.
pub fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let output = plain(program("python3")).args(["-c", "import sys; print(sys.executable)"]).output();
        let output = output.expect("python3 starts");
        assert!(output.status.success(), "python3 does not work: {output:?}; scripts/setup installs it");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path in ASCII").trim())
    })
}

/// A Python that has duckdb, if scripts/setup could install it.
pub fn duckdb() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools/duckdb-2.0.0");
    folder.join("complete").exists().then(|| folder.join("bin/python"))
}

pub fn disk() -> &'static Path {
    static DISK: OnceLock<PathBuf> = OnceLock::new();
    DISK.get_or_init(|| {
        let temporary = std::env::temp_dir();
        let folders = [env!("CARGO_TARGET_TMPDIR"), temporary.to_str().unwrap_or(".")];
        let on_disk = |folder: &&&str| {
            rustix::fs::statfs(**folder).is_ok_and(|data| !IN_MEMORY.contains(&(data.f_type as u32)))
        };
        let folder = folders.iter().find(on_disk).unwrap_or_else(|| {
            panic!("none of {folders:?} is on a disk; set CARGO_TARGET_DIR to a folder that is")
        });
        PathBuf::from(folder)
    })
}

pub fn scratch() -> TempDir {
    TempDir::new_in(disk()).expect("the disk can be written")
}

/// The folder with the files `binary`, `text`, `database` and the folder `many`.
pub fn files() -> &'static Path {
    static FILES: OnceLock<PathBuf> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = disk().join("matrix-files-1");
        if !folder.exists() {
            make_files(&folder);
        }
        folder
    })
}

/// Makes the files in a new folder and renames it into place, so that other processes see it only complete.
fn make_files(folder: &Path) {
    let aside = scratch();
    fs::write(aside.path().join("binary"), noise(LARGE_BYTES + 4097, 1)).expect("the disk has room");
    write_text(&aside.path().join("text"), LARGE_BYTES).expect("the disk has room");
    make_database(&aside.path().join("database"));
    fs::create_dir(aside.path().join("many")).expect("the folder is ours");
    for i in 0..MANY_FILES {
        let path = aside.path().join(format!("many/{i:03}"));
        write_text(&path, i * 997 + i).expect("the disk has room");
    }
    let aside = aside.keep();
    if fs::rename(&aside, folder).is_err() {
        assert!(folder.exists(), "neither this process nor another one could make {}", folder.display());
        fs::remove_dir_all(aside).expect("the folder is ours");
    }
}

pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        noise.extend_from_slice(&next().to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}

/// Lines that contain their numbers; at least `bytes` bytes, and no line end at the end.
fn write_text(path: &Path, bytes: usize) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut written = 0;
    for number in 0u64.. {
        if written >= bytes {
            break;
        }
        let scattered = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let line = match number % 3 {
            0 => format!("{scattered:08x} is the line {number}\n"),
            1 => format!("{scattered:08x} line {number}\n"),
            _ => format!("{scattered:08x} other {number} the longer by some words than all the rest\n"),
        };
        file.write_all(line.as_bytes())?;
        written += line.len();
    }
    file.write_all(b"the end")?;
    file.flush()
}

fn make_database(path: &Path) {
    let statements = "
        PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA page_size=4096;
        CREATE TABLE line(id INTEGER PRIMARY KEY, scattered INTEGER, words TEXT);
        WITH RECURSIVE counted(n) AS (SELECT 0 UNION ALL SELECT n+1 FROM counted WHERE n < 250000)
            INSERT INTO line SELECT n, (n * 2654435761) % 4294967296, printf('%0230d', n * n) FROM counted;
        CREATE INDEX by_scattered ON line(scattered);";
    let output = plain(program("sqlite3")).arg(path).arg(statements).output().expect("sqlite3 starts");
    assert!(output.status.success() && size(path) >= LARGE_BYTES as u64, "{output:?}");
}

pub fn size(path: &Path) -> u64 {
    path.metadata().expect("the file is there").len()
}

/// What `quinion run` reported in its form for programs.
#[derive(Debug)]
pub struct Report(pub String);

impl Report {
    /// Reads the report a command left at `path`.
    pub fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("there is no report: {error}"));
        assert!(text.starts_with("{\"schema\":1,") && text.ends_with("}\n"), "{text}");
        Self(text)
    }

    /// The number `key` in the object `group`, which holds no other object before it.
    #[track_caller]
    pub fn number(&self, group: &str, key: &str) -> u64 {
        let value = after(after(&self.0, &format!("\"{group}\":{{")), &format!("\"{key}\":"));
        let digits = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
        value[..digits].parse().unwrap_or_else(|_| panic!("{group}.{key} is no number in {}", self.0))
    }

    pub fn served(&self) -> u64 {
        self.number("served", "bytes")
    }
}

#[track_caller]
fn after<'a>(text: &'a str, what: &str) -> &'a str {
    text.split_once(what).unwrap_or_else(|| panic!("{what} is not in {text}")).1
}

pub type Words<'a> = &'a [&'a str];

/// Runs the command in the folder of the files, both ways, and compares all that can be seen of it.
#[track_caller]
pub fn same(words: Words) -> Report {
    same_in(files(), words)
}

#[track_caller]
pub fn same_in(folder: &Path, words: Words) -> Report {
    let (served, expected, report) = both_in(folder, words);
    assert_same(&format!("{words:?}"), &served, &expected);
    report
}

/// What the command prints in a folder with the cache, what it prints there without it, and the report.
#[track_caller]
pub fn both_in(folder: &Path, words: Words) -> (Output, Output, Report) {
    let expected = plain(words[0]).args(&words[1..]).current_dir(folder).output();
    let expected = expected.unwrap_or_else(|error| panic!("{}: {error}; see scripts/setup", words[0]));
    let scratch = scratch();
    let report = scratch.path().join("report");
    let mut run = quinion();
    run.args(["run", "--attach", "at-once", "--memory", MEMORY, "--report", "json", "--report-file"]);
    run.arg(&report).arg("--");
    let served = run.args(words).current_dir(folder).output().expect("our own command starts");
    (served, expected, Report::read(&report))
}

#[track_caller]
pub fn assert_same(what: &str, left: &Output, right: &Output) {
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(left.status, right.status, "{what}: {} / {}", said(left), said(right));
    assert_bytes(what, &left.stdout, &right.stdout);
    assert_eq!(said(left), said(right), "{what}: standard error");
}

#[track_caller]
pub fn assert_bytes(what: &str, left: &[u8], right: &[u8]) {
    if left != right {
        let common = left.iter().zip(right).take_while(|(left, right)| left == right).count();
        panic!(
            "{what}: {} bytes with the cache, {} without, and byte {common} is the first that differs",
            left.len(),
            right.len()
        );
    }
}

/// Kills a child when it is dropped, whatever the test's result.
pub struct Ended(pub std::process::Child);

impl Ended {
    pub fn wait(&mut self) -> ExitStatus {
        self.0.wait().expect("it is our child")
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

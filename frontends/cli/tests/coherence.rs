//! Coherence: what a program reads under `run` is what the kernel would have given, whichever process changes the file
//! and however. The program is `programs/coherence.c`, and each test has the name of its case.
//!
//! ```text
//!   the case alone --------> its output
//!            under `run` --> the same, and no writer waited
//! ```

mod disk;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use disk::{Report, quinion};

const NOBODY: u32 = 65534;
const AT_ONCE: &[&str] = &["--attach", "at-once"];
const TIMES: &[&str] = &["--attach", "at-once", "--coherence", "times"];

fn program() -> &'static Path {
    static PROGRAM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PROGRAM.get_or_init(|| {
        let folder = open_folder();
        let program = folder.path().join("coherence");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/coherence.c");
        let status =
            Command::new("cc").args(["-O1", "-w", "-pthread", "-o"]).arg(&program).arg(&source).status();
        assert!(status.expect("a C compiler named cc").success());
        (folder, program)
    });
    path
}

fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).expect("it is ours");
    folder
}

fn file(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, disk::noise(300_000, 7)).expect("the disk has room");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).expect("it is ours");
    std::thread::sleep(Duration::from_millis(200));
    path
}

fn alone(case: &str, file: &Path) -> Command {
    let mut command = Command::new(program());
    command.arg(case).arg(file);
    command
}

fn served(options: &[&str], case: &str, file: &Path) -> Command {
    let mut command = quinion();
    command.args(["run", "--report", "none"]).args(options).arg("--").arg(program()).arg(case).arg(file);
    command
}

fn output(mut command: Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).expect("plain text")
}

/// The case prints the same with the cache and without, each with a file of its own, which `make` makes.
fn same(options: &[&str], case: &str, make: impl Fn(&str) -> PathBuf) {
    let expected = output(alone(case, &make("without")));
    assert_eq!(output(served(options, case, &make("with"))), expected, "{case} {options:?} (right: without)");
}

/// With these options, a file that no process writes is served to its owner. So a case in which nothing is served was
/// left to the kernel for a reason, and not because nothing is ever served.
fn expect_that_some_file_is_served(options: &[&str], user: Option<u32>) {
    let folder = open_folder();
    let (control, report) = (file(folder.path(), "control"), folder.path().join("report"));
    let mut command = quinion();
    command.args(["run", "--report", "json", "--report-file"]).arg(&report).args(options);
    command.args(["--attach", "at-once", "--", "cat"]).arg(&control).stdout(Stdio::null());
    if let Some(user) = user {
        std::os::unix::fs::chown(&control, Some(user), Some(user)).expect("root may");
        command.uid(user).gid(user).current_dir("/");
    }
    assert!(command.status().expect("it starts").success(), "{command:?}");
    let report = std::fs::read_to_string(report).expect("it reports");
    let served = report.split_once("\"served\":{").and_then(|(_, served)| served.split_once("\"bytes\":"));
    let is_some = served.is_some_and(|(_, bytes)| bytes.starts_with(|digit| matches!(digit, '1'..='9')));
    assert!(is_some, "nothing is served by {options:?}: {report}");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

struct Actor {
    child: Child,
    from: BufReader<ChildStdout>,
}

impl Actor {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let from = BufReader::new(child.stdout.take().expect("it was asked for"));
        Self { child, from }
    }
    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).expect("it answers");
        line.trim_end().to_owned()
    }
    fn ask(&mut self) -> String {
        writeln!(self.child.stdin.as_mut().expect("it was asked for")).expect("it listens");
        self.answer()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        drop(self.child.stdin.take()); // the end of its input ends it
        let _ = self.child.wait();
    }
}

#[test]
fn lost_write() {
    for options in [&[], TIMES] {
        let folder = open_folder();
        let mut command = served(options, "lost_write", &folder.path().join("file"));
        command.args(["8", "3"]);
        assert_eq!(output(command), "0 with lost or misplaced records\n", "{options:?}");
        expect_that_some_file_is_served(&options[options.len().min(2)..], None);
    }
}

/// 1. A process stores to a mapped file. A program of another user reads it, for which the kernel grants no lease.
/// 2. The process stores again to the same page, which changes no time, and unmaps it.
/// 3. The program opens the file anew.
#[test]
fn mapped_writer() {
    if !is_root() {
        return println!("SKIPPED: only root becomes another user");
    }
    let shared_memory = Path::new("/dev/shm");
    expect_that_some_file_is_served(&[], Some(NOBODY));
    for options in [AT_ONCE, &[]] {
        for place in [None, Some(shared_memory).filter(|place| place.is_dir())] {
            let folder =
                place.map_or_else(open_folder, |place| tempfile::tempdir_in(place).expect("a folder"));
            std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).expect("it is ours");
            let file = file(folder.path(), "file");
            let mut writer = Actor::start(alone("mapped_writer", &file));
            assert_eq!(writer.answer(), "stored 1");
            let mut command = served(options, "reopen", &file);
            command.uid(NOBODY).gid(NOBODY).current_dir("/");
            let mut reader = Actor::start(command);
            for _ in 0..4 {
                std::thread::sleep(Duration::from_millis(100));
                assert_eq!(reader.ask(), "version1");
            }
            assert_eq!(writer.ask(), "stored 2");
            for _ in 0..3 {
                assert_eq!(reader.ask(), "version2", "{options:?} {folder:?}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// A process of another user maps the file, and its orphaned child reads what it stores.
#[test]
fn own_map() {
    if !is_root() {
        return println!("SKIPPED: only root becomes another user");
    }
    for options in [AT_ONCE, TIMES] {
        let folder = open_folder();
        let mut command = served(options, "own_map", &file(folder.path(), "file"));
        command.uid(NOBODY).gid(NOBODY).current_dir("/");
        assert_eq!(output(command), "0 wrong\n", "{options:?}");
        expect_that_some_file_is_served(&options[2..], Some(NOBODY));
    }
}

#[test]
fn own_write_lock() {
    for options in [AT_ONCE, TIMES, &[]] {
        let folder = open_folder();
        same(options, "own_write_lock", |name| file(folder.path(), name));
    }
}

/// Readahead that no reader waits for keeps a file open in the owner until a thread fetches its completion. The program
/// asks for a write lease meanwhile, which only a process gets that is alone with the file.
#[test]
fn own_write_lock_after_readahead() {
    for options in [AT_ONCE, TIMES, &[]] {
        let folder = open_folder();
        same(options, "own_write_lock_after_readahead", |name| folder.path().join(name));
        expect_that_some_file_is_served(&options[options.len().min(2)..], None);
    }
}

/// A lower file of an overlay is edited while the upper one is open. The kernel serves it, unless all file systems are
/// asked for.
#[test]
fn overlay_lower() {
    let folder = open_folder();
    for name in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir(folder.path().join(name)).expect("it is new");
    }
    let lower = folder.path().join("lower");
    let file = file(&lower, "file");
    let script = "mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged || exit 3; exec \"$@\"";
    let within = |command: Command| {
        let mut unshared = Command::new("unshare");
        unshared.args(["--mount", "sh", "-c", script, "sh"]).arg(command.get_program());
        unshared.args(command.get_args()).current_dir(folder.path());
        for (name, value) in command.get_envs().filter_map(|(name, value)| Some((name, value?))) {
            unshared.env(name, value);
        }
        unshared
    };
    if !within(Command::new("true")).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        return println!("SKIPPED: overlayfs cannot be mounted here");
    }
    let merged = folder.path().join("merged/file");
    for options in [AT_ONCE, TIMES] {
        expect_that_some_file_is_served(&options[2..], None);
        let mut reader = Actor::start(within(served(options, "reread", &merged)));
        for round in 0..5 {
            let version = format!("version{round}");
            let writer = std::fs::OpenOptions::new().write(true).open(&file).expect("it is ours");
            writer.write_all_at(version.as_bytes(), 0).expect("the disk has room");
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(reader.ask(), version, "{options:?}");
        }
    }
}

/// The results of `SEEK_DATA` and `SEEK_HOLE` for an allocated and unwritten range depend on who has read it.
#[test]
fn preallocated() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let make = |name: &str| {
        let path = folder.path().join(name);
        let file = std::fs::File::create(&path).expect("it is new");
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 1 << 20)
            .expect("the disk has room");
        file.write_all_at(&[1; 4096], 200_000).expect("the disk has room");
        file.sync_all().expect("the disk takes it");
        drop(file);
        let file = std::fs::File::open(&path).expect("it is there");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a hint");
        std::thread::sleep(Duration::from_millis(200));
        path
    };
    same(AT_ONCE, "preallocated", make);
    let report = folder.path().join("report");
    let mut command = quinion();
    command
        .args(["run", "--report", "json", "--report-file"])
        .arg(&report)
        .args(AT_ONCE)
        .arg("--")
        .arg(program());
    command.arg("preallocated").arg(make("reported"));
    output(command);
    let report = Report::read(&report);
    assert!(report.0.contains("allocated and never written"), "it is said why: {report:?}");
}

#[test]
fn access_times() {
    let folder = open_folder();
    for case in ["access_times", "access_times_unmoved"] {
        same(AT_ONCE, case, |name| file(folder.path(), name));
    }
    // On this mount each read changes the access time, so files on it are left to the kernel.
    let script = "mount -t tmpfs -o strictatime none mounted && cp file mounted && exec \"$@\"";
    std::fs::create_dir(folder.path().join("mounted")).expect("it is new");
    file(folder.path(), "file");
    let within = |words: &mut dyn Iterator<Item = &std::ffi::OsStr>| {
        let mut unshared = Command::new("unshare");
        unshared.args(["--mount", "sh", "-c", script, "sh"]).args(words).current_dir(folder.path());
        unshared
    };
    let mounted = folder.path().join("mounted/file");
    let words = [program().as_os_str(), "access_times_each".as_ref(), mounted.as_os_str()];
    let expected = within(&mut words.into_iter()).output().expect("it starts");
    if !expected.status.success() {
        return println!("SKIPPED: tmpfs cannot be mounted here");
    }
    let command = served(AT_ONCE, "access_times_each", &mounted);
    let all = std::iter::once(command.get_program()).chain(command.get_args());
    let got = output(within(&mut { all }));
    assert_eq!(got, String::from_utf8_lossy(&expected.stdout), "strictatime (right: without)");
    assert_eq!(got, "moved 1\nmoved 1\nmoved 1\n");
}

/// 1. A file is served without a lease, because its folder was declared immutable.
/// 2. A file beside that folder is not.
#[test]
fn a_file_declared_immutable_is_served_without_a_lease() {
    let (declared, other) = (open_folder(), open_folder());
    let options = ["--attach", "at-once", "--immutable", declared.path().to_str().expect("a plain name")];
    for (folder, mode) in [(&declared, "immutable"), (&other, "kernel")] {
        let file = file(folder.path(), "file");
        let _writer = std::fs::OpenOptions::new().append(true).open(&file).expect("it is ours");
        let report = folder.path().join("report");
        let mut command = quinion();
        command
            .args(["run", "--report", "json", "--report-file"])
            .arg(&report)
            .args(options)
            .args(["--", "cat"]);
        let read = command.arg(&file).output().expect("it starts");
        disk::assert_bytes("cat", &read.stdout, &std::fs::read(&file).expect("it is there"));
        let (report, served) = (Report::read(&report), if mode == "immutable" { 300_000 } else { 0 });
        let entry = format!("{{\"path\":\"{}\",\"mode\":\"{mode}\"", file.display());
        assert!(report.0.contains(&entry), "{report:?}");
        assert_eq!(report.served(), served, "{report:?}");
    }
}

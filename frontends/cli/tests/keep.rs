//! A cache that outlives the command: what the next run finds, what it is told, and that the death of any process
//! leaves nothing behind that breaks the next run.
//!
//! Each test has a folder for kept caches of its own, and ends the owners of that folder whatever its result. An owner
//! is found by its command line, which names the folder; so it is found even if it cannot be reached.

use quinion_testing::hanging;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use tempfile::TempDir;

mod disk;
use disk::{Ended, Report, noise, plain, quinion, scratch};

const FILE_BYTES: usize = 3 << 20;

/// A process that another test forks has this process's descriptors until its `exec`, which closes them: a lingering
/// socket would block it there. So the test with such sockets runs alone.
static LINGERING: RwLock<()> = RwLock::new(());

/// The lock that lets a test run beside others, or alone, while it is held.
#[allow(dead_code, reason = "what counts is when they are dropped")]
enum Turn {
    Beside(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

struct Home {
    runtime: TempDir,
    files: TempDir,
    _turn: Turn,
}

impl Home {
    fn new() -> Self {
        Self::with(Turn::Beside(LINGERING.read().unwrap_or_else(PoisonError::into_inner)))
    }

    fn alone() -> Self {
        Self::with(Turn::Alone(LINGERING.write().unwrap_or_else(PoisonError::into_inner)))
    }

    fn with(turn: Turn) -> Self {
        let runtime = TempDir::new().expect("a folder");
        fs::set_permissions(runtime.path(), fs::Permissions::from_mode(0o700)).expect("it is ours");
        Self { runtime, files: scratch(), _turn: turn }
    }

    fn file(&self, name: &str, seed: u64) -> PathBuf {
        self.file_of(FILE_BYTES, name, seed)
    }

    fn file_of(&self, bytes: usize, name: &str, seed: u64) -> PathBuf {
        let path = self.files.path().join(name);
        let mut file = File::create(&path).expect("the disk has room");
        file.write_all(&noise(bytes, seed)).expect("the disk has room");
        file.sync_all().expect("the disk has room");
        drop(file);
        // A process that another test forks has the file open for writing until its `exec`: no lease can be had until
        // then, and a program's read would be the kernel's.
        let file = File::open(&path).expect("it was made");
        until(|| has_no_writer(&file));
        path
    }

    fn quinion(&self, words: &[&str]) -> Command {
        let mut command = quinion();
        command.args(words).env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    fn run(&self, words: &[&str]) -> Command {
        self.run_as("default", &[], words)
    }

    fn run_as(&self, name: &str, options: &[&str], words: &[&str]) -> Command {
        let mut command =
            self.quinion(&["run", &format!("--keep={name}"), "--attach", "at-once", "--report", "json"]);
        command.arg("--report-file").arg(self.report_of(name)).args(options).arg("--").args(words);
        command
    }

    fn report_of(&self, name: &str) -> PathBuf {
        self.files.path().join(format!("{name}.report"))
    }

    #[track_caller]
    fn ran(&self, options: &[&str], words: &[&str]) -> (Vec<u8>, Report) {
        let output = self.run_as("default", options, words).output().expect("our own command starts");
        assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {output:?}");
        (output.stdout, Report::read(&self.report_of("default")))
    }

    #[track_caller]
    fn reads(&self, path: &Path) -> Report {
        let (read, report) = self.ran(&[], &["cat", path.to_str().expect("a plain path")]);
        disk::assert_bytes("cat", &read, &fs::read(path).expect("it is there"));
        assert_eq!(report.served(), read.len() as u64, "its own bytes, and no other run's: {report:?}");
        assert_eq!(after(&report.0, "\"processes\":"), 1, "{report:?}");
        let name = path.file_name().and_then(|name| name.to_str()).expect("a plain name");
        assert!(
            report.0.contains(&format!("{name}\",\"mode\":\"")),
            "how changes of {name} are seen: {report:?}"
        );
        report
    }

    fn owners(&self) -> Vec<u32> {
        let folder = self.runtime.path().join("quinion");
        let is_owner = |words: &[u8]| {
            let mut words = words.split(|&byte| byte == 0);
            words.any(|word| word == b"keep-owner")
                && words.any(|word| word == folder.as_os_str().as_encoded_bytes())
        };
        let processes = fs::read_dir("/proc").expect("there is /proc").filter_map(|entry| {
            let process = entry.ok()?.file_name().to_str()?.parse().ok()?;
            // A process that has ended and was not reaped has an empty command line.
            is_owner(&fs::read(format!("/proc/{process}/cmdline")).ok()?).then_some(process)
        });
        processes.collect()
    }

    #[track_caller]
    fn owner(&self) -> u32 {
        let owners = self.owners();
        assert_eq!(owners.len(), 1, "{owners:?}");
        owners[0]
    }

    /// The names left in the folder, except the records about files and the objects that programs load.
    fn left(&self) -> Vec<String> {
        let folder = fs::read_dir(self.runtime.path().join("quinion")).expect("it was made");
        let names =
            folder.map(|entry| entry.expect("it can be read").file_name().into_string().expect("plain"));
        let stays =
            |name: &String| ["plan-", "objects-", "libquinion-"].iter().any(|what| name.starts_with(what));
        names.filter(|name| !stays(name)).collect()
    }

    fn keeps(&self) -> String {
        text(&self.quinion(&["keeps", "--json"]).output().expect("our own command starts").stdout)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        for owner in self.owners() {
            kill(owner, libc::SIGKILL);
        }
    }
}

#[allow(unsafe_code, reason = "a plain call")]
fn kill(process: u32, signal: i32) {
    // SAFETY: the arguments are plain numbers.
    unsafe { libc::kill(process as i32, signal) };
}

/// Whether no process has `file`, which is open for reading, open for writing: else the kernel gives no lease on it.
#[allow(unsafe_code, reason = "plain calls")]
fn has_no_writer(file: &File) -> bool {
    // SAFETY: numbers only.
    let lease = |kind: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) };
    let is_refused = lease(libc::F_RDLCK) != 0;
    let why = std::io::Error::last_os_error().raw_os_error();
    lease(libc::F_UNLCK);
    !is_refused || why != Some(libc::EAGAIN)
}

/// Waits until `so` holds. It has no time limit of its own.
fn until(mut so: impl FnMut() -> bool) {
    while !so() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn has_ended(process: u32) -> bool {
    // A container without an init does not reap an owner; an ended one has an empty command line.
    fs::read(format!("/proc/{process}/cmdline")).map_or(true, |words| words.is_empty())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn after(text: &str, what: &str) -> u64 {
    let value = text.split_once(what).unwrap_or_else(|| panic!("{what} is not in {text}")).1;
    let digits = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
    value[..digits].parse().unwrap_or_else(|_| panic!("{what} is no number in {text}"))
}

/// Reads all of a file for each line of input, and prints how often and a digest.
const READS_WHEN_TOLD: &str = "import sys,os,hashlib
fd = os.open(sys.argv[1], os.O_RDONLY); print('ready', flush=True)
for line in sys.stdin:
    h = hashlib.md5(); at = 0
    while True:
        b = os.pread(fd, 65536, at)
        if not b: break
        h.update(b); at += len(b)
    print(h.hexdigest(), flush=True)
";

struct Waiting {
    run: Ended,
    input: Option<std::process::ChildStdin>,
    lines: BufReader<std::process::ChildStdout>,
}

impl Waiting {
    fn start(mut command: Command) -> Self {
        let mut run = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(run.stdout.take().expect("it is piped"));
        let input = run.stdin.take();
        let mut waiting = Self { run: Ended(run), input, lines };
        assert_eq!(waiting.line(), "ready");
        waiting
    }
    fn reading(home: &Home, name: &str, path: &Path) -> Self {
        let path = path.to_str().expect("a plain path");
        let python = disk::python().to_str().expect("a plain path");
        Self::start(home.run_as(name, &[], &[python, "-c", READS_WHEN_TOLD, path]))
    }
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("it says something");
        line.trim_end().to_owned()
    }
    fn tell(&mut self) -> String {
        writeln!(self.input.as_mut().expect("it was not ended"), "go").expect("it listens");
        self.line()
    }
    fn end(&mut self) -> std::process::ExitStatus {
        self.input = None;
        self.run.wait()
    }
    fn process(&self) -> u32 {
        self.run.0.id()
    }
}

fn md5(path: &Path) -> String {
    let output = plain("md5sum").arg(path).output().expect("md5sum starts");
    text(&output.stdout).split_whitespace().next().expect("a sum").to_owned()
}

// ---- what the next run finds --------------------------------------------------------------------

/// The first run attaches to it, and it ends with that run.
#[test]
fn a_cache_that_stays_no_time_serves_the_run_that_started_it() {
    let home = Home::new();
    let path = home.file("short", 31);
    let words = ["cat", path.to_str().expect("a plain path")];
    let (read, report) = home.ran(&["--idle", "0s"], &words);
    disk::assert_bytes("cat", &read, &fs::read(&path).expect("it is there"));
    assert_eq!(report.served(), read.len() as u64, "{report:?}");
    until(|| home.owners().is_empty());
    assert!(home.left().is_empty(), "{:?}", home.left());
}

/// Only the error: no cache is started, and no report replaces an older one.
#[test]
fn a_missing_program_starts_no_cache_and_writes_no_report() {
    let home = Home::new();
    let report = home.report_of("default");
    fs::write(&report, "an older one").expect("the disk has room");
    let script = home.files.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n").expect("the disk has room");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let script = script.to_str().expect("a plain path");
    for (program, status, wrong) in [
        ("no-such-program-anywhere", 127, "there is no such program"),
        (script, 126, "its interpreter /no/such/interpreter is missing"),
    ] {
        let output = home.run(&[program]).output().expect("our own command starts");
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.lines().count() == 1 && said.contains(wrong), "{said}");
        assert_eq!(home.owners(), [0; 0]);
        assert_eq!(fs::read(&report).expect("it is there"), b"an older one");
    }
    let plain = home.files.path().join("plain");
    fs::copy(script, &plain).and_then(|_| fs::write(&plain, "echo hello\n")).expect("the disk has room");
    let plain = plain.to_str().expect("a plain path");
    let output = home.quinion(&["run", "--", plain]).output().expect("our own command starts");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(126), "{output:?}");
    assert!(said.lines().count() == 1 && said.contains("run -- sh SCRIPT"), "{said}");
}

#[test]
fn a_command_that_only_looks_makes_no_folder() {
    let home = Home::new();
    assert!(home.keeps().contains("\"kept\":[]"), "{}", home.keeps());
    for words in [&["stop", "--all"][..], &["stop"], &["stop", "none"]] {
        let output = home.quinion(words).output().expect("our own command starts");
        let is_wanted = output.status.success() == (words == ["stop", "--all"]);
        assert!(is_wanted && !text(&output.stderr).contains("cannot"), "{words:?}: {output:?}");
    }
    assert_eq!(fs::read_dir(home.runtime.path()).expect("it is ours").count(), 0);
}

#[test]
fn the_second_run_hits_pages_that_the_first_has_read() {
    let home = Home::new();
    let path = home.file("file", 1);
    let first = home.reads(&path);
    assert!(first.number("device", "bytes") >= FILE_BYTES as u64, "{first:?}");
    let owner = home.owner();
    // A file that was written a moment before it was first checked is read once more: it might have been written again
    // in that moment.
    home.reads(&path);
    let third = home.reads(&path);
    assert_eq!((third.number("device", "bytes"), third.number("asked", "questions")), (0, 0), "{third:?}");
    assert_eq!(third.number("served", "hits"), third.number("served", "reads"), "{third:?}");
    assert!(
        third.0.contains("\"kept\":{\"name\":\"default\",\"other_runs\":0,\"ended\":false}"),
        "{third:?}"
    );
    assert_eq!(home.owner(), owner);
}

#[test]
fn a_file_that_was_changed_between_two_runs_is_read_anew() {
    let home = Home::new();
    let path = home.file("file", 1);
    home.reads(&path);
    home.reads(&path);
    // 1 written in place, as long as before
    fs::write(&path, noise(FILE_BYTES, 2)).expect("the disk has room");
    home.reads(&path);
    // 2 longer, and shorter
    let changed = |change: &dyn Fn(&mut File)| {
        let mut file = File::options().append(true).open(&path).expect("it is there");
        change(&mut file);
        // While it is open for writing the kernel serves it, with the current bytes.
        let (read, _) = home.ran(&[], &["cat", path.to_str().expect("a plain path")]);
        disk::assert_bytes("cat", &read, &fs::read(&path).expect("it is there"));
        drop(file);
        home.reads(&path);
    };
    changed(&|file| file.write_all(b"and more").expect("the disk has room"));
    changed(&|file| file.set_len(12_345).expect("it is ours"));
    // 3 another file of the same name
    fs::rename(home.file("other", 3), &path).expect("one folder");
    home.reads(&path);
    // 4 removed and made anew, perhaps with the same inode number
    fs::remove_file(&path).expect("it is there");
    home.file("file", 4);
    home.reads(&path);
}

#[test]
fn files_that_a_program_writes_are_right_in_the_next_run() {
    let home = Home::new();
    let path = home.file("file", 1);
    let name = path.to_str().expect("a plain path");
    home.reads(&path);
    home.ran(
        &[],
        &["sh", "-c", &format!("printf changed | dd of={name} bs=1 seek=100000 conv=notrunc status=none")],
    );
    assert_eq!(&fs::read(&path).expect("it is there")[100_000..100_007], b"changed");
    home.reads(&path);
    home.ran(
        &[],
        &["sh", "-c", &format!("echo more >> {name}; cat {name} > {name}.copy; mv {name}.copy {name}")],
    );
    home.reads(&path);
}

#[test]
fn memory_is_one_bound_however_many_runs_there_are() {
    let home = Home::new();
    let name = disk::files().join("binary");
    let name = name.to_str().expect("a plain path");
    let runs: Vec<Ended> = (0..4)
        .map(|i| {
            let mut run = home.run_as("default", &["--memory", disk::MEMORY], &["cksum", name]);
            run.arg(disk::files().join("text")).arg(disk::files().join(format!("many/{:03}", 100 + i)));
            Ended(run.stdout(Stdio::null()).spawn().expect("our own command starts"))
        })
        .collect();
    for mut run in runs {
        assert!(run.wait().success());
    }
    let kept = home.keeps();
    let (bound, grown) = (after(&kept, "\"bound_bytes\":"), after(&kept, "\"grown_bytes\":"));
    assert!(bound == 16 << 20 && (1..=bound).contains(&grown), "{kept}");
    assert_eq!((after(&kept, "\"runs_begun\":"), home.owners().len()), (4, 1), "{kept}");
}

/// A closed file keeps no file system busy, and the space of a removed one is freed at once.
#[test]
fn an_unused_file_is_closed_though_no_client_comes() {
    let home = Home::new();
    let paths: Vec<PathBuf> = (0..3).map(|seed| home.file(&format!("file{seed}"), seed)).collect();
    for path in &paths {
        home.reads(path);
    }
    let open = || {
        let fds = fs::read_dir(format!("/proc/{}/fd", home.owner())).expect("it lives");
        let names: Vec<PathBuf> =
            fds.filter_map(|fd| fs::read_link(fd.expect("it can be read").path()).ok()).collect();
        names.iter().filter(|name| name.starts_with(home.files.path())).count()
    };
    until(|| open() == 0);
    let report = home.reads(&paths[2]);
    assert_eq!(report.number("kept", "other_runs"), 0);
}

// ---- whose numbers ------------------------------------------------------------------------------

#[test]
fn runs_side_by_side_report_their_own_numbers() {
    let home = Home::new();
    let (one, two) = (home.file("one", 1), home.file("two", 2));
    let mut first = Waiting::reading(&home, "default", &one);
    let owner = home.owner();
    assert_eq!(first.tell(), md5(&one));
    let mut second = Waiting::start({
        let (path, python) = (two.to_str().expect("plain"), disk::python().to_str().expect("plain"));
        let mut command = home.quinion(&["run", "--keep", "--report", "json", "--report-file"]);
        command.arg(home.report_of("second")).args(["--", python, "-c", READS_WHEN_TOLD, path]);
        command
    });
    assert_eq!((second.tell(), second.tell()), (md5(&two), md5(&two)));
    assert_eq!(after(&home.keeps(), "\"runs\":"), 2);
    assert!(second.end().success() && first.end().success());
    let report = |name| Report::read(&home.report_of(name));
    let (first, second) = (report("default"), report("second"));
    // Each run reads its file, once or twice, and python's own files, which are much smaller.
    let times = |report: &Report| report.served() / FILE_BYTES as u64;
    assert_eq!((times(&first), times(&second)), (1, 2), "{first:?} {second:?}");
    for report in [&first, &second] {
        assert_eq!((report.number("kept", "other_runs"), after(&report.0, "\"processes\":")), (1, 1));
        assert!(report.0.contains("served other runs at the same time"), "{report:?}");
    }
    assert_eq!(home.owner(), owner);
}

#[test]
fn children_count_for_their_run() {
    let home = Home::new();
    let path = home.file("file", 1);
    let name = path.to_str().expect("a plain path");
    home.reads(&path);
    let script = format!("for i in 1 2 3; do cat {name} | cksum; (exec cat {name} > /dev/null); done");
    let (_, report) = home.ran(&[], &["sh", "-c", &script]);
    assert_eq!(report.served(), 6 * FILE_BYTES as u64, "{report:?}");
    assert!(after(&report.0, "\"processes\":") >= 10, "{report:?}");
}

/// A forked child that executes nothing: it has its parent's descriptor, and counters in a page of its own.
#[test]
fn reads_of_a_forked_child_count_for_its_run() {
    const READS_AS_A_CHILD: &str = "import os,sys,hashlib
fd = os.open(sys.argv[1], os.O_RDONLY); os.pread(fd, 4096, 0)
if os.fork() == 0:
    for _ in range(4): print(hashlib.md5(os.pread(fd, 1 << 30, 0)).hexdigest(), flush=True)
    os._exit(0)
os.wait()
";
    let home = Home::new();
    let path = home.file("file", 1);
    let python = disk::python().to_str().expect("a plain path");
    let (said, report) =
        home.ran(&[], &[python, "-c", READS_AS_A_CHILD, path.to_str().expect("a plain path")]);
    assert_eq!(text(&said), format!("{}\n", md5(&path)).repeat(4));
    // Python's own files are smaller than the file.
    let served = report.served();
    assert!((4 * FILE_BYTES as u64..5 * FILE_BYTES as u64).contains(&served), "{report:?}");
    assert_eq!(after(&report.0, "\"processes\":"), 2, "{report:?}");
}

/// 1. A run ends, and leaves a waiting shell behind.
/// 2. The shell continues, and starts a program that reads only inside the C library.
/// 3. The plan that the run brought is still available to it.
#[test]
fn a_program_that_one_left_behind_starts_is_patched() {
    let home = Home::new();
    let path = home.file("file", 1);
    let fifo = home.files.path().join("fifo");
    assert!(plain("mkfifo").arg(&fifo).status().expect("mkfifo starts").success());
    let sum = home.files.path().join("sum");
    let [path_, fifo_, sum_] = [&path, &fifo, &sum].map(|path| path.to_str().expect("a plain path"));
    let script = format!("(read line < {fifo_}; sha256sum {path_}; echo end) > {sum_} 2>&1 &");
    let (_, report) = home.ran(&[], &["sh", "-c", &script]);
    assert!(after(&report.0, "\"functions\":") > 0, "there is a plan: {report:?}");
    until(|| home.keeps().contains("\"runs\":0"));
    let before = after(&home.keeps(), "\"served_bytes\":");
    fs::write(&fifo, "go\n").expect("the shell waits there");
    until(|| fs::read_to_string(&sum).expect("the shell made it").contains("end\n"));
    let plain = plain("sha256sum").arg(&path).output().expect("sha256sum starts");
    assert_eq!(fs::read_to_string(&sum).expect("it is there"), text(&plain.stdout) + "end\n");
    let served = after(&home.keeps(), "\"served_bytes\":") - before;
    // The next run's report says how each file is served, and why not.
    assert!(served >= FILE_BYTES as u64, "{served}; {}; {:?}", home.keeps(), home.ran(&[], &["true"]).1);
}

// ---- what a run is told -------------------------------------------------------------------------

#[test]
fn options_that_contradict_the_cache_are_refused_with_a_remedy() {
    let home = Home::new();
    home.ran(&["--memory", "32M", "--idle", "1h"], &["true"]);
    home.ran(&["--memory", "32M", "--idle", "60m"], &["true"]); // the same time, spelled differently
    home.ran(&["--memory", "33M"], &["true"]); // rounded down to whole extents: 32
    home.ran(&[], &["true"]);
    for (options, what) in [(["--memory", "64M"], "has 32.0 MiB of memory"), (["--idle", "2h"], "--idle 1h")]
    {
        let output =
            home.run_as("default", &options, &["touch", "/nowhere/ran"]).output().expect("it starts");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains(what) && said.contains("quinion stop default") && said.contains("--keep=OTHER"),
            "{said}"
        );
    }
    let mut lazily = home.quinion(&["run", "--keep", "--attach", "auto", "--", "true"]);
    let output = lazily.output().expect("our own command starts");
    assert!(
        output.status.code() == Some(1) && text(&output.stderr).contains("--attach at-once"),
        "{output:?}"
    );
    let other = home.run_as("other", &["--memory", "64M"], &["true"]).output().expect("it starts");
    assert!(other.status.success(), "{other:?}");
    assert_eq!(home.owners().len(), 2);
    for (words, what) in [
        (&["--keep=no/name"][..], "begin with a letter"),
        (&["--keep", "--idle", "5"], "90s"),
        (&["--idle", "5s"], "--keep"),
        (&["--keep=small", "--memory", "1M"], "at least"),
    ] {
        let output = home.quinion(&["run"]).args(words).args(["--", "true"]).output().expect("it starts");
        assert!(!output.status.success() && text(&output.stderr).contains(what), "{words:?}: {output:?}");
    }
    assert_eq!(home.owners().len(), 2, "a run that failed to start leaves no owner");
}

fn said(home: &Home, name: &str, line: &str) -> String {
    let socket = home.runtime.path().join(format!("quinion/{name}.socket"));
    let mut stream = UnixStream::connect(socket).expect("the owner listens");
    // The owner may close the connection before all of it is sent.
    let _ = writeln!(stream, "{line}");
    let mut answer = String::new();
    let _ = BufReader::new(stream).read_line(&mut answer);
    answer
}

#[test]
fn another_version_is_refused_and_can_still_be_stopped() {
    let home = Home::new();
    home.ran(&[], &["true"]);
    for question in [
        r#"{"ask":"join","protocol":2,"version":"0.0.0","layout":4,"object":1}"#,
        r#"{"ask":"join","protocol":99,"version":"99.0.0","layout":99,"object":99,"new":"word"}"#,
        r#"{"ask":"join"}"#,
    ] {
        let answer = said(&home, "default", question);
        assert!(answer.contains("refused") && answer.contains("quinion stop default"), "{answer}");
    }
    assert!(said(&home, "default", r#"{"ask":"status","later":1}"#).contains("\"answer\":\"status\""));
    assert!(said(&home, "default", r#"{"ask":"numbers"}"#).contains("refused"));
    // An invalid request ends the connection, and nothing else.
    assert_eq!(said(&home, "default", "nonsense"), "");
    assert_eq!(said(&home, "default", &"x".repeat(2 << 20)), "");
    home.ran(&[], &["true"]);
    assert_eq!(said(&home, "default", r#"{"ask":"stop","protocol":99}"#), "{\"answer\":\"stopping\"}\n");
    until(|| home.owners().is_empty());
}

fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let stream =
        std::net::TcpStream::connect(listener.local_addr().expect("it has one")).expect("it listens");
    let (other, _) = listener.accept().expect("the other end has connected");
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(1000))).expect("a socket");
    stream.set_nonblocking(true).expect("a socket");
    while (&stream).write(&[0; 1 << 16]).is_ok() {}
    (stream, other)
}

/// Sends `bytes` with a descriptor whose only copy is then the owner's; returns its other end.
fn say_with_descriptor(to: &UnixStream, bytes: &[u8]) -> std::net::TcpStream {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::os::fd::{AsFd, AsRawFd};
    let (stream, other) = lingering();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    let descriptors = [stream.as_fd()];
    assert!(with.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(to, &[std::io::IoSlice::new(bytes)], &mut with, SendFlags::NOSIGNAL).expect("it is heard");
    // The owner may have closed it by now, and then this close is the one that waits. A later fork does not inherit it,
    // since a close removes the descriptor before it waits.
    let entry = format!("/proc/self/fd/{}", stream.as_raw_fd());
    let socket = fs::read_link(&entry).expect("it is open");
    std::thread::spawn(move || drop(stream));
    until(|| fs::read_link(&entry).ok().as_ref() != Some(&socket));
    other
}

/// Descriptors whose close blocks: with an invalid request, with a valid one, behind one, and in a connection that ends
/// at once. The owner answers other clients meanwhile, and ends when it is asked to.
#[test]
fn a_strangers_descriptor_costs_its_own_connection() {
    let home = Home::alone();
    home.ran(&[], &["true"]);
    let socket = home.runtime.path().join("quinion/default.socket");
    let status = "{\"ask\":\"status\"}\n";
    let begun = Instant::now();
    let mut others = Vec::new();
    for (before, with, stays) in
        [("", "nonsense", true), ("", status, true), (status, status, true), ("", "x", false)]
    {
        let mut stream = UnixStream::connect(&socket).expect("the owner listens");
        stream.write_all(before.as_bytes()).expect("it is heard");
        others.push((say_with_descriptor(&stream, with.as_bytes()), stays.then_some(stream)));
        assert!(said(&home, "default", status.trim_end()).contains("\"answer\":\"status\""), "{with}");
    }
    home.ran(&[], &["true"]);
    let output = home.quinion(&["stop"]).output().expect("our own command starts");
    assert!(output.status.success() && !text(&output.stdout).contains("was killed"), "{output:?}");
    assert!(begun.elapsed() < Duration::from_secs(300), "a client waited: {:?}", begun.elapsed());
    assert_eq!((home.owners(), home.left()), (vec![], vec![]));
}

/// More such descriptors than the owner has connections for.
#[test]
fn silent_or_endless_strangers_keep_no_client_away() {
    let home = Home::new();
    home.ran(&[], &["true"]);
    let socket = home.runtime.path().join("quinion/default.socket");
    let silent: Vec<_> = (0..300).map(|_| UnixStream::connect(&socket).expect("the owner listens")).collect();
    home.ran(&[], &["true"]);
    let talks = Arc::new(AtomicBool::new(true));
    let talkers: Vec<_> = (0..2)
        .map(|_| {
            let (mut stream, talks) = (UnixStream::connect(&socket).expect("it listens"), Arc::clone(&talks));
            let mut ears = stream.try_clone().expect("a second");
            let hears = std::thread::spawn(move || std::io::copy(&mut ears, &mut std::io::sink()));
            std::thread::spawn(move || {
                let many = "{\"ask\":\"status\"}\n".repeat(1000);
                while talks.load(Ordering::Relaxed) && stream.write_all(many.as_bytes()).is_ok() {}
                let _ = stream.shutdown(std::net::Shutdown::Both);
                let _ = hears.join();
            })
        })
        .collect();
    for _ in 0..3 {
        home.ran(&[], &["true"]);
    }
    talks.store(false, Ordering::Relaxed);
    talkers.into_iter().for_each(|talker| talker.join().expect("it does not panic"));
    drop(silent);
    assert!(home.quinion(&["stop"]).status().expect("it starts").success());
}

/// The owner keeps the plan for patching programs: it exists after the run that brought it has ended.
#[test]
fn a_plan_is_kept_once_and_found_by_its_number() {
    let home = Home::new();
    home.ran(&[], &["true"]);
    let number = |line: &str| after(&said(&home, "default", line), "\"number\":");
    let long: String = (0..20_000).map(|byte| format!("{:02x}", byte % 251)).collect();
    let first = number(r#"{"ask":"plan","plan":"00ff10"}"#);
    let second = number(&format!("{{\"ask\":\"plan\",\"plan\":\"{long}\"}}"));
    assert_ne!(first, second);
    assert_eq!(number(r#"{"ask":"plan","plan":"00FF10"}"#), first);
    let descriptors = fs::read_dir(format!("/proc/{}/fd", home.owner())).expect("it is there");
    let is_plan = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|name| name.to_string_lossy().contains("quinion-plan"))
    };
    let plans: Vec<PathBuf> =
        descriptors.filter_map(|entry| Some(entry.ok()?.path())).filter(is_plan).collect();
    let bytes: Vec<Vec<u8>> = plans.iter().map(|path| fs::read(path).expect("it is there")).collect();
    let long: Vec<u8> = (0..20_000).map(|byte| (byte % 251) as u8).collect();
    for plan in [vec![0, 255, 16], long] {
        assert_eq!(bytes.iter().filter(|bytes| **bytes == plan).count(), 1);
    }
    assert!(plans.iter().all(|path| fs::write(path, "changed").is_err()), "the plan can be changed");
    for wrong in [r#"{"ask":"plan"}"#, r#"{"ask":"plan","plan":"0"}"#, r#"{"ask":"plan","plan":"xx"}"#] {
        assert!(said(&home, "default", wrong).contains("refused"), "{wrong}");
    }
}

/// An owner of another version, with another protocol.
#[test]
fn an_owner_that_is_not_understood_is_reported_with_a_remedy() {
    let home = Home::new();
    let folder = home.runtime.path().join("quinion");
    fs::create_dir(&folder).expect("it is ours");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("it is ours");
    for (answer, wanted) in [
        ("{\"answer\":\"joined\",\"in\":\"another way\"}\n", "another version"),
        ("welcome\n", "another version"),
        (
            "{\"answer\":\"refused\",\"why\":\"it is too late; come earlier\"}\n",
            "it is too late; come earlier",
        ),
        ("{\"answer\":\"joined\",\"run\":1,\"process\":1,\"socket\":\"2f61\",\"token\":1}\n", "name space"),
    ] {
        let _ = fs::remove_file(folder.join("default.socket"));
        let listener = UnixListener::bind(folder.join("default.socket")).expect("it is free");
        let owner = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a run connects");
            let mut question = String::new();
            BufReader::new(stream.try_clone().expect("a second")).read_line(&mut question).expect("it asks");
            stream.write_all(answer.as_bytes()).expect("it listens");
            question
        });
        let output = home.run(&["true"]).output().expect("our own command starts");
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(wanted), "{answer}: {said}");
        assert!(
            owner
                .join()
                .expect("it has answered")
                .starts_with("{\"ask\":\"join\",\"protocol\":2,\"version\":")
        );
    }
    assert!(home.owners().is_empty());
}

/// All commands that look for the folder skip one that other users may enter, and choose the same next one.
#[test]
fn a_folder_that_is_not_ours_alone_is_passed_over() {
    let (home, next) = (Home::new(), Home::new());
    let folder = home.runtime.path().join("quinion");
    fs::create_dir(&folder).expect("it is ours");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let output = |words: &[&str]| {
        let mut command = home.quinion(words);
        command.env_remove("XDG_CACHE_HOME").env("HOME", next.runtime.path());
        let output = command.output().expect("our own command starts");
        assert!(output.status.success() && output.stderr.is_empty(), "{words:?}: {output:?}");
        text(&output.stdout)
    };
    output(&["run", "--keep", "--memory", "64M", "--report", "none", "--", "true"]);
    assert_eq!(fs::read_dir(&folder).expect("it is ours").count(), 0);
    assert!(next.runtime.path().join(".cache/quinion/default.lock").exists());
    assert!(output(&["keeps", "--json"]).contains("\"name\":\"default\""));
    output(&["stop"]);
    assert!(!next.runtime.path().join(".cache/quinion/default.lock").exists());
    let by_hand = home.quinion(&["keep-owner", "--name", "x", "--folder"]).arg(home.files.path()).output();
    assert_eq!(
        by_hand.expect("it starts").status.code(),
        Some(1),
        "no process becomes an owner without the lock"
    );
}

// ---- what the owner has of its first runner -----------------------------------------------------

#[test]
fn the_owner_has_nothing_of_its_starters() {
    let home = Home::new();
    let folder = scratch();
    let held = File::create(folder.path().join("held")).expect("the disk has room");
    let script = "exec 9>held; trap '' TERM HUP; nohup \"$0\" run --keep --report none -- true 2>&1";
    let mut command = plain("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_quinion")]).current_dir(folder.path());
    // The output ends when all processes have closed its write end.
    let output = command.env("XDG_RUNTIME_DIR", home.runtime.path()).output().expect("sh starts");
    assert!(output.status.success(), "{output:?}");
    let owner = home.owner();
    let proc = |name: &str| PathBuf::from(format!("/proc/{owner}/{name}"));
    let held = held.metadata().expect("it is open").ino();
    for entry in fs::read_dir(proc("fd")).expect("it lives") {
        let path = entry.expect("it can be read").path();
        let is_held = fs::metadata(&path).is_ok_and(|data| data.ino() == held);
        assert!(!is_held, "{} is the starter's", path.display());
    }
    for number in 0..3 {
        assert_eq!(fs::read_link(proc(&format!("fd/{number}"))).expect("it is open"), Path::new("/dev/null"));
    }
    assert_eq!(fs::read_link(proc("cwd")).expect("it lives"), Path::new("/"));
    let stat = fs::read_to_string(proc("stat")).expect("it lives");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    let (group, session, terminal) = (fields[2], fields[3], fields[4]);
    assert_eq!((group, session, terminal), (&*owner.to_string(), &*owner.to_string(), "0"), "{stat}");
    assert!(!fs::read_to_string(proc("environ")).expect("it lives").contains("XDG_RUNTIME_DIR"));
    kill(owner, libc::SIGTERM); // which the process that started it ignored
    until(|| home.owners().is_empty());
    until(|| home.left().is_empty());
}

// ---- its end ------------------------------------------------------------------------------------

#[test]
fn a_kept_cache_is_listed_and_stopped() {
    let home = Home::new();
    assert_eq!(home.keeps(), "{\"schema\":1,\"kept\":[]}\n");
    assert!(text(&home.quinion(&["keeps"]).output().expect("it starts").stdout).contains("no cache is kept"));
    let absent = home.quinion(&["stop"]).output().expect("it starts");
    assert!(
        absent.status.code() == Some(1) && text(&absent.stderr).contains("no cache `default`"),
        "{absent:?}"
    );
    assert!(home.quinion(&["stop", "--all"]).status().expect("it starts").success());
    for name in ["default", "b", "a"] {
        assert!(home.run_as(name, &["--memory", "16M"], &["true"]).status().expect("it starts").success());
    }
    let kept = home.keeps();
    let at =
        |name: &str| kept.find(&format!("\"name\":\"{name}\"")).unwrap_or_else(|| panic!("{name}: {kept}"));
    assert!(at("a") < at("b") && at("b") < at("default"), "{kept}");
    let shown = text(&home.quinion(&["keeps"]).output().expect("it starts").stdout);
    assert!(shown.lines().count() == 4 && shown.contains("16.0 MiB") && shown.contains("30m"), "{shown}");
    assert!(home.quinion(&["stop", "a"]).status().expect("it starts").success());
    assert_eq!(home.owners().len(), 2, "it has ended when `stop` has");
    assert!(home.quinion(&["stop"]).status().expect("it starts").success());
    assert!(home.quinion(&["stop", "--all"]).status().expect("it starts").success());
    assert_eq!((home.owners(), home.left()), (vec![], vec![]));
}

#[test]
fn a_program_goes_on_when_its_cache_is_stopped_and_its_numbers_are_those_until_then() {
    let home = Home::new();
    let path = home.file("file", 1);
    let mut run = Waiting::reading(&home, "default", &path);
    assert_eq!(run.tell(), md5(&path));
    assert!(home.quinion(&["stop"]).status().expect("it starts").success());
    assert_eq!(run.tell(), md5(&path));
    assert!(run.end().success());
    let report = Report::read(&home.report_of("default"));
    assert_eq!(report.served() / FILE_BYTES as u64, 1, "once, and python's own files: {report:?}");
    assert!(report.0.contains("\"ended\":true"), "it is said that it is kept: {report:?}");
    assert!(home.owners().is_empty());
    home.reads(&path);
}

#[test]
fn a_kept_cache_ends_when_it_was_unused_for_long_and_not_before() {
    let home = Home::new();
    let path = home.file("file", 1);
    let mut run =
        Waiting::start(home.run_as("default", &["--idle", "30ms"], &["sh", "-c", "echo ready; read x"]));
    let owner = home.owner();
    until(|| after(&home.keeps(), "\"age_ms\":") > 300);
    assert_eq!(home.owner(), owner, "a run keeps it");
    assert!(run.end().code() == Some(1));
    until(|| home.owners().is_empty() && home.left().is_empty());
    // A program that its run has left behind keeps it alive, too.
    let script = "sleep 1000 > /dev/null 2>&1 & echo $!";
    let (left, _) = home.ran(&["--idle", "30ms"], &["sh", "-c", script]);
    let left: u32 = text(&left).trim().parse().expect("a number");
    until(|| home.keeps().contains("\"runs\":0") && after(&home.keeps(), "\"age_ms\":") > 300);
    assert!(after(&home.keeps(), "\"programs\":") == 1 && home.owners().len() == 1);
    kill(left, libc::SIGKILL);
    until(|| home.owners().is_empty() && home.left().is_empty());
    home.reads(&path);
}

// ---- kill -9 ------------------------------------------------------------------------------------

#[test]
fn a_killed_owner_leaves_nothing_that_stops_the_next_run() {
    let home = Home::new();
    let path = home.file("file", 1);
    home.reads(&path);
    let first = home.owner();
    kill(first, libc::SIGKILL);
    until(|| has_ended(first));
    assert!(!home.left().is_empty(), "it could remove nothing");
    home.reads(&path);
    assert_ne!(home.owner(), first);
    // Under a program, which continues, and whose report says what is known.
    let mut run = Waiting::reading(&home, "default", &path);
    assert_eq!(run.tell(), md5(&path));
    kill(home.owner(), libc::SIGKILL);
    until(|| home.owners().is_empty());
    assert_eq!(run.tell(), md5(&path));
    assert!(run.end().success());
    let report = Report::read(&home.report_of("default"));
    assert!(report.0.contains("ended before the program"), "{report:?}");
    assert!(report.0.contains("\"ended\":true"), "it is said that it is kept: {report:?}");
    // The next command that looks at the folder removes what the owner left.
    assert_eq!(home.keeps(), "{\"schema\":1,\"kept\":[]}\n");
    assert!(home.left().is_empty());
}

#[test]
fn rubbish_in_the_folder_does_no_harm() {
    let home = Home::new();
    let folder = home.runtime.path().join("quinion");
    fs::create_dir(&folder).expect("it is ours");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("it is ours");
    fs::write(folder.join("default.lock"), "4711\n").expect("it can be written");
    fs::write(folder.join("default.socket"), "no socket").expect("it can be written");
    fs::write(folder.join("b.lock"), "").expect("it can be written");
    fs::write(folder.join("-.lock"), "no name").expect("it can be written");
    home.ran(&[], &["true"]);
    assert!(home.keeps().matches("\"name\":").count() == 1, "{}", home.keeps());
    assert!(home.quinion(&["stop"]).status().expect("it starts").success());
    assert_eq!(home.left(), ["-.lock"]);
}

/// A user removes the files in the folder: the next run cannot find the cache and starts another, and the first owner
/// ends without removing any file of the second.
#[test]
fn a_kept_cache_that_cannot_be_found_any_more_ends() {
    let home = Home::new();
    home.ran(&[], &["true"]);
    let first = home.owner();
    for file in home.left() {
        fs::remove_file(home.runtime.path().join("quinion").join(file)).expect("it is there");
    }
    home.ran(&["--idle", "1h"], &["true"]);
    until(|| has_ended(first));
    assert_eq!(home.left().len(), 3, "a lock, and where it listens for runs and for programs");
    let second = home.owner();
    home.ran(&["--idle", "1h"], &["true"]);
    assert_eq!(home.owner(), second);
}

#[test]
fn a_killed_runner_leaves_its_program_served_and_the_cache_to_others() {
    let home = Home::new();
    let path = home.file("file", 1);
    let mut run = Waiting::reading(&home, "default", &path);
    let owner = home.owner();
    kill(run.process(), libc::SIGKILL);
    run.run.wait();
    until(|| home.keeps().contains("\"runs\":0"));
    let before = after(&home.keeps(), "\"served_bytes\":");
    assert_eq!(run.tell(), md5(&path));
    assert_eq!(after(&home.keeps(), "\"served_bytes\":"), before + FILE_BYTES as u64);
    home.reads(&path);
    run.input = None;
    let mut rest = String::new();
    run.lines.read_to_string(&mut rest).expect("it ends");
    assert_eq!((rest.as_str(), home.owner()), ("", owner));
}

#[test]
fn a_killed_program_is_reported_as_ever() {
    let home = Home::new();
    let path = home.file("file", 1);
    let script = format!("cat {} > /dev/null; kill -9 $$", path.display());
    let output: Output = home.run(&["sh", "-c", &script]).output().expect("our own command starts");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(libc::SIGKILL));
    let report = Report::read(&home.report_of("default"));
    assert_eq!(report.served(), FILE_BYTES as u64, "{report:?}");
    until(|| home.keeps().contains("\"programs\":0"));
    home.reads(&path);
}

/// Runs and owners are killed at different moments, from before the first step to after the last. Whatever is left, the
/// next run works, and there is one owner.
#[test]
fn killed_at_any_moment_of_the_start_nothing_is_left_in_the_way() {
    let home = Home::new();
    let path = home.file("file", 1);
    let name = path.to_str().expect("a plain path");
    for moment in 0..16u64 {
        let mut run: Child = home.run(&["cat", name]).stdout(Stdio::null()).spawn().expect("it starts");
        std::thread::sleep(Duration::from_micros(moment * 1500));
        match moment % 3 {
            0 => kill(run.id(), libc::SIGKILL),
            1 => home.owners().into_iter().for_each(|owner| kill(owner, libc::SIGKILL)),
            _ => {
                home.owners().into_iter().for_each(|owner| kill(owner, libc::SIGKILL));
                kill(run.id(), libc::SIGKILL);
            }
        }
        run.wait().expect("it is our child");
        home.reads(&path);
        home.owner();
        if moment % 2 == 1 {
            kill(home.owner(), libc::SIGKILL); // the next run starts without an owner
        }
    }
}

#[test]
fn many_that_start_at_once_start_one_owner() {
    let home = Home::new();
    let path = home.file("file", 1);
    for round in 0..3 {
        let runs: Vec<Child> = (0..8)
            .map(|number| {
                let mut command = home.quinion(&["run", "--keep", "--report", "none", "--", "cksum"]);
                command.arg(&path).stdout(Stdio::piped()).stderr(Stdio::piped());
                command.spawn().unwrap_or_else(|error| panic!("{number}: {error}"))
            })
            .collect();
        let expected = plain("cksum").arg(&path).output().expect("cksum starts");
        for run in runs {
            disk::assert_same("cksum", &run.wait_with_output().expect("it is our child"), &expected);
        }
        assert_eq!((home.owners().len(), after(&home.keeps(), "\"runs_begun\":")), (1, 8), "round {round}");
        // The runs end in every possible way, and the next round starts at once.
        match round {
            0 => assert!(home.quinion(&["stop"]).status().expect("it starts").success()),
            1 => kill(home.owner(), libc::SIGTERM),
            _ => kill(home.owner(), libc::SIGKILL),
        }
        if round == 1 {
            until(|| home.owners().is_empty());
        }
    }
}

#[test]
fn one_that_stands_still_is_ended_by_stop() {
    let home = Home::new();
    home.ran(&[], &["true"]);
    kill(home.owner(), libc::SIGSTOP);
    let output = home.quinion(&["stop"]).output().expect("our own command starts");
    assert!(output.status.success() && text(&output.stdout).contains("was killed"), "{output:?}");
    assert_eq!((home.owners(), home.left()), (vec![], vec![]));
    home.ran(&[], &["true"]);
}

/// 1. A file system answers reads, and does not answer when a file is closed.
/// 2. The owner closes the descriptors that it has of the programs that read there.
/// 3. Reads of other programs are not answered, no new program is served, and the owner cannot be ended.
#[test]
fn a_file_system_that_hangs_when_a_file_is_closed_delays_no_other() {
    closes_hang("at-once");
}

/// As above, where files are copied in the background, and the descriptors for the copies are closed then.
#[test]
fn a_file_system_that_hangs_when_a_copied_file_is_closed_delays_no_other() {
    closes_hang("auto");
}

fn closes_hang(attach: &str) {
    const FILES: usize = 10;
    /// Opens the files and reads them for each line of input, for as long as it takes to start the maximum of workers,
    /// and prints that it has; it closes none.
    const READS: &str = "import sys,os,time
print('ready', flush=True)
sys.stdin.readline()
first, end = map(int, sys.argv[2:])
for turn in range(80):
    fd = os.open(sys.argv[1] + str(first + turn % (end - first)), os.O_RDONLY)
    for _ in range(5):
        for at in range(0, 1 << 20, 1 << 16): assert os.pread(fd, 1 << 16, at) == bytes(1 << 16)
    time.sleep(0.1)
print('read', flush=True); sys.stdin.readline()
";
    let attached = ["--attach", attach];
    let options = [&["--file-systems", "all", "--coherence", "times"][..], &attached].concat();
    let home = Home::new();
    let python = disk::python().to_str().expect("a plain path");
    // The readers have files of it open, and end when it has ended: so it is dropped first, whatever fails.
    let mut readers = Vec::new();
    let Some(hanging) = hanging::Hanging::in_flush() else { return };
    let hung = hanging.path();
    let hung = hung.to_str().expect("a plain path");
    let run = |options: &[&str], words: &[&str]| {
        let mut command = home.quinion(&["run", "--keep=default", "--report", "json", "--report-file"]);
        command.arg(home.report_of("default")).args(options).arg("--").args(words);
        command
    };
    for reader in 0..8 {
        let files = [reader * FILES, (reader + 1) * FILES].map(|file| file.to_string());
        let mut command = run(&options, &[python, "-c", READS, hung, &files[0], &files[1]]);
        command.env("QUINION_WAIT_MS", "20"); // waits only briefly for an owner that does not answer
        readers.push(Waiting::start(command));
    }
    hanging.hang();
    let begun = Instant::now();
    for reader in &mut readers {
        writeln!(reader.input.as_mut().expect("it was not ended"), "go").expect("it listens");
    }
    let said: Vec<_> = readers.iter_mut().map(Waiting::line).collect();
    assert!(said.iter().all(|line| line == "read"), "{said:?}");
    let owner = home.owner();
    let closes = std::fs::read_dir(format!("/proc/{owner}/task")).expect("it lives").filter_map(|task| {
        std::fs::read_to_string(task.ok()?.path().join("syscall")).ok().filter(|call| call.starts_with("3 "))
    });
    assert!(closes.count() > 0, "no close hangs: this shows nothing");
    // Other programs read other files, large and often enough to be copied.
    for round in 0..4 {
        let local = home.file_of(2 * FILE_BYTES, &format!("local{round}"), 5 + round);
        let local = local.to_str().expect("a plain path");
        let script = format!("for i in 1 2 3 4 5 6 7 8 9; do cat {local} | md5sum; sleep 0.1; done");
        let expected = text(&plain("sh").args(["-c", &script]).output().expect("a shell").stdout);
        let output = run(&options, &["sh", "-c", &script]).output().expect("our own command starts");
        assert_eq!((text(&output.stdout), text(&output.stderr)), (expected, String::new()), "round {round}");
        let report = Report::read(&home.report_of("default"));
        assert!(report.served() >= FILE_BYTES as u64, "round {round}: {report:?}");
    }
    kill(owner, libc::SIGTERM);
    until(|| !home.left().iter().any(|name| name.ends_with(".socket")));
    // What hangs does so until the end of the test.
    assert!(begun.elapsed() < Duration::from_secs(400), "{:?}", begun.elapsed());
    drop(hanging);
    until(|| has_ended(owner));
    drop(readers);
}

/// 1. Some programs read files on a file system that hangs, and the owner reads them into the cache.
/// 2. Reads of other programs are not answered, no new program is served, and the owner cannot be ended.
#[test]
fn a_file_system_that_hangs_keeps_its_own_programs_alone() {
    /// Reads a page at once, and the whole file when it gets a line of input.
    const READS: &str = "import sys,os
fd = os.open(sys.argv[1], os.O_RDONLY); n = len(os.pread(fd, 4096, 0)); print('ready', flush=True)
sys.stdin.readline(); print('begins', flush=True)
for at in range(4096, 1 << 20, 4096): os.pread(fd, 4096, at)
";
    let options = ["--file-systems", "all", "--coherence", "times"];
    let home = Home::new();
    let (local, python) = (home.file("local", 5), disk::python().to_str().expect("a plain path"));
    let Some(hanging) = hanging::Hanging::new() else { return };
    let hung = hanging.path();
    let words = [python, "-c", READS, hung.to_str().expect("a plain path")];
    // More programs than the owner has workers, and than may be at work on one file system.
    let mut readers: Vec<_> =
        (0..12).map(|_| Waiting::start(home.run_as("default", &options, &words))).collect();
    let served = home.quinion(&["keeps", "--json"]).output().expect("our own command starts");
    hanging.hang();
    let told: Vec<_> = readers.iter_mut().map(Waiting::tell).collect();
    assert!(told.iter().all(|line| line == "begins"), "{told:?}");
    let begun = Instant::now();
    for round in 0..4 {
        let (read, report) = home.ran(&options, &["cat", local.to_str().expect("a plain path")]);
        disk::assert_bytes("cat", &read, &fs::read(&local).expect("it is there"));
        assert_eq!(report.served(), FILE_BYTES as u64, "round {round}: {report:?}; {}", text(&served.stdout));
    }
    let owner = home.owner();
    kill(owner, libc::SIGTERM);
    // Threads that hang in the kernel stay there until the file system is removed; but no run finds this owner any
    // more.
    until(|| !home.left().iter().any(|name| name.ends_with(".socket")));
    // What hangs does so until the end of the test.
    assert!(begun.elapsed() < Duration::from_secs(400), "{:?}", begun.elapsed());
    home.ran(&options, &["true"]);
    drop(hanging);
    until(|| has_ended(owner));
    drop(readers);
}

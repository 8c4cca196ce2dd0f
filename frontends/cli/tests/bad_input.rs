//! Bad input: files that are missing, forbidden, not regular or changed; and owners that end early.
//!
//! The promise is the same for all of it: nothing hangs, an error message names the file and a remedy, and a program
//! under `run` sees exactly what it would see without.
//!
//! Cases that need rights this process does not have are skipped, with a message on standard error. Failing devices are
//! not tested here: making one takes the device mapper, which containers do not have. The library's tests have a device
//! that fails on demand.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

mod disk;
use disk::{
    Ended, MEMORY, Report, assert_bytes, assert_same, noise, plain, program, python, quinion, scratch,
};

const HANGS: Duration = Duration::from_secs(300);

#[track_caller]
fn output(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let readers = [read_all(child.stdout.take()), read_all(child.stderr.take())];
    let mut child = Ended(child);
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("it is our child") {
            break status;
        }
        assert!(began.elapsed() < HANGS, "{command:?} hangs");
        std::thread::sleep(Duration::from_millis(5));
    };
    let [stdout, stderr] = readers.map(|reader| reader.join().expect("it only reads"));
    Output { status, stdout, stderr }
}

fn read_all(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    let mut pipe = pipe.expect("it is piped");
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe can be read");
        bytes
    })
}

fn run(words: &[&str]) -> Command {
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", MEMORY, "--report", "none", "--"]).args(words);
    command
}

#[track_caller]
fn reported(words: &[&str]) -> (Output, Report) {
    let scratch = scratch();
    let path = scratch.path().join("report");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", MEMORY, "--report", "json", "--report-file"]);
    command.arg(&path).arg("--");
    let output = output(command.args(words));
    (output, Report::read(&path))
}

#[track_caller]
fn same(words: &[&str]) {
    let expected = output(plain(words[0]).args(&words[1..]));
    assert_same(&format!("{words:?}"), &output(&mut run(words)), &expected);
}

#[track_caller]
fn assert_complains(output: &Output, code: i32, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in: {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn left_out(what: &str) {
    eprintln!("LEFT OUT: {what}");
}

// ---- what is named --------------------------------------------------------------------------------------

#[test]
fn missing_files_and_directories() {
    let scratch = scratch();
    let missing = scratch.path().join("missing");
    for command in ["cat", "stat"] {
        let said = output(quinion().arg(command).arg(&missing));
        assert_complains(&said, 1, &[text(&missing), "No such file"]);
    }
    assert_complains(
        &output(quinion().arg("cat").arg(scratch.path())),
        1,
        &[text(scratch.path()), "directory"],
    );
    assert_complains(&output(quinion().arg("stat").arg(scratch.path())), 1, &[text(scratch.path())]);
    same(&["cat", text(&missing), text(scratch.path())]);
    same(&["cat", "/dev/null/below"]);
}

#[test]
fn files_that_may_not_be_read() {
    let scratch = scratch();
    let path = scratch.path().join("secret");
    fs::write(&path, "secret").expect("the disk has room");
    fs::set_permissions(&path, Permissions::from_mode(0o000)).expect("it is ours");
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).expect("it is ours");
    let as_nobody = |words: &[&str]| {
        let mut command = if is_root() { plain("setpriv") } else { plain(words[0]) };
        if is_root() {
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(words[0]);
        }
        output(command.args(&words[1..]))
    };
    let quinion = env!("CARGO_BIN_EXE_quinion");
    if is_root() && !as_nobody(&["test", "-x", quinion]).status.success() {
        return left_out("files without permission: another user cannot reach the command");
    }
    assert_complains(&as_nobody(&[quinion, "cat", text(&path)]), 1, &[text(&path), "Permission denied"]);
    let served = |report: &str| {
        let run = [quinion, "run", "--attach", "at-once", "--memory", MEMORY, "--report", report];
        as_nobody(&[&run[..], &["--", "cat", text(&path)]].concat())
    };
    assert_same("cat", &served("none"), &as_nobody(&["cat", text(&path)]));
    // A file that an ordinary user may read is served to that user, too, if it is declared immutable: the kernel gives
    // no lease on another user's file.
    fs::set_permissions(&path, Permissions::from_mode(0o444)).expect("it is ours");
    let bytes = |served: &Output| {
        assert_eq!(served.stdout, b"secret");
        Report(String::from_utf8_lossy(&served.stderr).into_owned()).served()
    };
    if is_root() {
        let served = served("json");
        assert_eq!(bytes(&served), 0, "{served:?}");
    }
    let declared = ["--immutable", text(scratch.path()), "--report", "json", "--", "cat", text(&path)];
    let run = [quinion, "run", "--attach", "at-once", "--memory", MEMORY];
    let served = as_nobody(&[&run[..], &declared].concat());
    assert_eq!(bytes(&served), 6, "{served:?}");
}

#[test]
fn empty_files_pipes_and_answers_of_the_kernel() {
    let scratch = scratch();
    let (empty, fifo) = (scratch.path().join("empty"), scratch.path().join("fifo"));
    fs::write(&empty, "").expect("the disk has room");
    assert!(output(plain("mkfifo").arg(&fifo)).status.success());
    let nothing = output(quinion().arg("cat").arg(&empty));
    assert!(nothing.status.success() && nothing.stdout.is_empty());
    assert!(output(quinion().arg("stat").arg(&empty)).status.success());
    same(&["wc", text(&empty)]);
    // No process writes into the pipe: an open for reading would wait for ever.
    assert_complains(&output(quinion().arg("cat").arg(&fifo)), 1, &[text(&fifo), "pipe"]);
    assert_complains(&output(quinion().arg("stat").arg(&fifo)), 1, &[text(&fifo)]);
    assert_complains(&output(quinion().arg("cat").arg("/dev/null")), 1, &["/dev/null"]);
    same(&["sh", "-c", "echo through >$0 & cat $0; echo again | cat", text(&fifo)]);
    same(&[
        "cat",
        "/proc/sys/kernel/ostype",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/proc/filesystems",
    ]);
    same(&["head", "-c", "70000", "/dev/zero"]);
    // Their size is reported as 0, though they have content.
    let kernel = output(quinion().args(["cat", "/proc/sys/kernel/ostype"]));
    assert!(kernel.stdout == b"Linux\n" || !kernel.status.success(), "{kernel:?} lost the content silently");
}

/// A loop device over a file: `st_size` says 0, the device has its own size.
#[test]
fn block_devices() {
    struct Loop(String);
    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = plain("losetup").args(["-d", &self.0]).status();
        }
    }
    let scratch = scratch();
    let path = scratch.path().join("image");
    let content = noise((20 << 20) + 512, 3);
    fs::write(&path, &content).expect("the disk has room");
    let made = Command::new("losetup").args(["-r", "-f", "--show"]).arg(&path).output();
    let device = match made {
        Ok(made) if made.status.success() => Loop(String::from_utf8_lossy(&made.stdout).trim().to_owned()),
        other => return left_out(&format!("block devices: losetup says {other:?}")),
    };
    let read = output(quinion().args(["cat", "--memory", MEMORY, &device.0]));
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    assert_bytes("cat of a device", &read.stdout, &content);
    assert!(output(quinion().args(["stat", &device.0])).status.success());
    same(&["cat", &device.0]);
    same(&["tail", "-c", "5000", &device.0]);
}

#[test]
fn memory_that_cannot_be_had() {
    let scratch = scratch();
    let path = scratch.path().join("some");
    fs::write(&path, "some").expect("the disk has room");
    for command in [&["cat"][..], &["run", "--"]] {
        let with = |memory: &str| {
            let mut all = quinion();
            all.arg(command[0]).args(["--memory", memory]).args(&command[1..]);
            output(if command.len() > 1 { all.arg("cat").arg(&path) } else { all.arg(&path) })
        };
        assert_complains(&with("1M"), 1, &["--memory 1M is too small: a cache needs at least 16M"]);
        assert_complains(&with("4MB"), 1, &["--memory 4MB is too small: a cache needs at least 17MB"]);
        assert_complains(&with("0"), 1, &["memory"]);
        assert_complains(
            &with("1.5"),
            1,
            &["--memory is 1 byte and too small", "at least 16M", "write a unit"],
        );
        assert_complains(&with("8000T"), 1, &["memory"]);
        assert_complains(&with("many"), 2, &["many", "such as 256M"]);
        assert_complains(&with("64XB"), 2, &["use K, M, G or T"]);
        assert_complains(&with("-5M"), 2, &[]);
    }
}

// ---- programs -------------------------------------------------------------------------------------------

#[test]
fn programs_that_cannot_be_started() {
    let scratch = scratch();
    let path = scratch.path().join("words");
    fs::write(&path, "no program").expect("the disk has room");
    assert_complains(
        &output(&mut run(&["no-such-program-here"])),
        127,
        &["cannot start `no-such-program-here`: ", "check the name"],
    );
    assert_complains(
        &output(&mut run(&["", "x"])),
        127,
        &["cannot start ``: there is no such program; its name is empty"],
    );
    assert_complains(
        &output(&mut run(&["--memroy", "1G", "true"])),
        127,
        &["--memroy", "not an option", "--help"],
    );
    assert_complains(&output(&mut run(&["db", "--", "true"])), 127, &["db", "--keep=NAME"]);
    assert_complains(&output(&mut run(&[text(&path)])), 126, &[text(&path), "executed"]);
    assert_complains(&output(&mut run(&[text(scratch.path())])), 126, &[text(scratch.path())]);
    assert_complains(&output(quinion().arg("run")), 2, &["PROGRAM"]);
}

/// Whichever resource runs out first, the message names it and a remedy.
#[test]
fn too_few_open_files() {
    let quinion = env!("CARGO_BIN_EXE_quinion");
    let with = |limit: u32| {
        // Only the standard streams are inherited, so that the limit says how many more descriptors there may be.
        let script =
            format!("for n in 3 4 5 6 7 8 9; do eval \"exec $n>&-\"; done; ulimit -n {limit}; exec \"$@\"");
        let mut command = plain("sh");
        command.args(["-c", &script, "sh", quinion, "run", "--memory", MEMORY, "--report", "none"]);
        output(command.args(["--", "cat", "/etc/passwd"]))
    };
    let mut refused = 0;
    for limit in 4..=20 {
        let said = with(limit);
        if !said.status.success() {
            refused += 1;
            let allowed = format!("may have {limit} files open");
            assert_complains(&said, 1, &["Too many open files", &allowed, "`ulimit -n 256`"]);
        }
    }
    assert!(refused > 2, "a run needs more than that: {refused}");
    assert!(with(256).status.success());
}

/// A program's status is worth more than a report: a report that cannot be written is an error before the program
/// starts.
#[test]
fn a_report_that_cannot_be_written() {
    let scratch = scratch();
    let (made, nowhere) = (scratch.path().join("made"), scratch.path().join("no/such"));
    for place in [&nowhere, &scratch.path().to_owned()] {
        let mut command = quinion();
        command.args(["run", "--memory", MEMORY, "--report-file", text(place), "--", "touch", text(&made)]);
        let words = [text(place), "name a file that can be written", "the program was not started"];
        assert_complains(&output(&mut command), 1, &words);
    }
    assert!(!made.exists(), "the program has not run");
}

fn compiled(folder: &Path, flags: &[&str]) -> Option<PathBuf> {
    let path = folder.join("copier");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/static.c");
    let said = output(plain(program("cc")).args(flags).arg("-o").arg(&path).arg(source));
    said.status.success().then_some(path)
}

#[test]
fn a_static_program() {
    let scratch = scratch();
    let Some(copier) = compiled(scratch.path(), &["-static"]) else {
        return left_out("static programs: the C library's static form is not installed");
    };
    let (output, report) = reported(&[text(&copier), "/proc/self/exe"]);
    assert_eq!(output.status.code(), Some(7));
    assert_bytes("copier", &output.stdout, &fs::read(&copier).expect("it is ours"));
    assert!(report.0.contains("statically linked") && report.served() == 0, "{report:?}");
}

#[test]
fn a_set_uid_program() {
    let scratch = scratch();
    let copier = compiled(scratch.path(), &[]).expect("a small C program compiles");
    if !is_root() {
        return left_out("set-uid programs: only root can make one of another user");
    }
    std::os::unix::fs::chown(&copier, Some(65534), None).expect("root may");
    fs::set_permissions(&copier, Permissions::from_mode(0o4755)).expect("root may");
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).expect("it is ours");
    let path = scratch.path().join("some");
    fs::write(&path, "some").expect("the disk has room");
    let (output, report) = reported(&[text(&copier), text(&path)]);
    if output.status.code() == Some(9) {
        return left_out("set-uid programs: another user cannot reach the file");
    }
    assert_eq!(
        (output.status.code(), &output.stdout[..], &output.stderr[..]),
        (Some(7), &b"some"[..], &b""[..])
    );
    assert!(report.0.contains("set-uid") && report.served() == 0, "{report:?}");
}

#[test]
fn statuses_and_signals_of_programs() {
    for script in ["exit 0", "exit 3", "exit 255", "kill -KILL $$", "kill -SEGV $$", "kill -HUP $$"] {
        same(&["sh", "-c", script]);
    }
}

#[test]
fn streams_that_are_closed() {
    same(&[
        "sh",
        "-c",
        "cat <&- ; echo $?; cat /etc/passwd >&-; echo $?; exec 0<&- 1>&- 2>&-; cat /etc/passwd; exit 5",
    ]);
    let scratch = scratch();
    let path = scratch.path().join("large");
    fs::write(&path, noise(8 << 20, 5)).expect("the disk has room");
    same(&["sh", "-c", "cat $0 | head -c 10 | wc -c", text(&path)]);
    for closed in ["<&-", ">&-", "<&- >&- 2>&-", "<&- >&-"] {
        for inner in ["cat $1", "run --memory 16M --report none -- cat $1"] {
            let script = format!("\"$0\" {inner} {closed}");
            let said = output(plain("sh").args(["-c", &script, env!("CARGO_BIN_EXE_quinion"), text(&path)]));
            let code = said.status.code();
            assert!(code.is_some_and(|code| code < 126), "{script}: {:?}", said.status);
            assert!(!String::from_utf8_lossy(&said.stderr).contains("panicked"), "{script}: {said:?}");
            assert!(closed.contains(">&-") || said.stdout.len() == 8 << 20, "{script}: {said:?}");
        }
    }
    let mut child = run(&["cat", text(&path)]).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut first = [0; 10];
    child.stdout.take().expect("it is piped").read_exact(&mut first).expect("it writes");
    assert_eq!(Ended(child).wait().signal(), Some(13), "it ends as cat does");
}

// ---- files that change ----------------------------------------------------------------------------------

/// A program under `run` that reads commands from a pipe.
struct CommandedProgram {
    child: Ended,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl CommandedProgram {
    fn new() -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/asked.py");
        let mut command = run(&[text(python()), script]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let (to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { child: Ended(child), to, from: BufReader::new(from) }
    }
    fn ask(&mut self, what: &str) -> String {
        writeln!(self.to, "{what}").expect("it listens");
        let mut answer = String::new();
        self.from.read_line(&mut answer).expect("it answers");
        answer.trim().to_owned()
    }
    fn end(self) {
        let Self { mut child, to, .. } = self;
        drop(to);
        assert!(child.wait().success());
    }
}

fn answer(bytes: &[u8]) -> String {
    let mut child =
        plain("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().expect("piped").write_all(bytes).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let digest = String::from_utf8(output.stdout).expect("digits");
    format!("{} {}", bytes.len(), &digest[..64])
}

#[test]
fn a_file_that_grows_is_read_to_its_new_end() {
    let scratch = scratch();
    let path = scratch.path().join("log");
    let content = noise(300_000, 11);
    fs::write(&path, &content[..100_001]).expect("the disk has room");
    let mut asked = CommandedProgram::new();
    asked.ask(&format!("open {}", text(&path)));
    let mut end = 100_001;
    assert_eq!(asked.ask("rest"), answer(&content[..end]));
    for more in [1, 4095, 70_000, 3] {
        let mut file = OpenOptions::new().append(true).open(&path).expect("it is ours");
        file.write_all(&content[end..end + more]).expect("the disk has room");
        assert_eq!(asked.ask("rest"), answer(&content[end..end + more]), "{more} bytes more");
        end += more;
    }
    asked.end();
}

#[test]
fn a_file_that_shrinks_gives_its_former_bytes_or_its_end() {
    let scratch = scratch();
    let path = scratch.path().join("shrinks");
    let content = noise(400_000, 12);
    fs::write(&path, &content).expect("the disk has room");
    let mut asked = CommandedProgram::new();
    asked.ask(&format!("open {}", text(&path)));
    assert_eq!(asked.ask("read 0 100000"), answer(&content[..100_000]));
    OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(50_001)).expect("it is ours");
    // Still open: the old bytes, or the end of the file; nothing else.
    let seen = asked.ask("read 60000 1000");
    assert!([answer(&content[60_000..61_000]), answer(&[])].contains(&seen), "{seen}");
    assert_eq!(asked.ask("read 399000 5000"), answer(&[]), "the end is looked at again");
    // Opened again: the current file.
    asked.ask(&format!("open {}", text(&path)));
    assert_eq!(asked.ask("rest"), answer(&content[..50_001]));
    asked.end();
}

#[test]
fn a_file_that_is_replaced_is_the_old_one_until_it_is_opened_again() {
    let scratch = scratch();
    let (path, other) = (scratch.path().join("file"), scratch.path().join("other"));
    let (old, new) = (noise(200_000, 13), noise(200_000, 14));
    fs::write(&path, &old).expect("the disk has room");
    fs::write(&other, &new).expect("the disk has room");
    let mut asked = CommandedProgram::new();
    asked.ask(&format!("open {}", text(&path)));
    assert_eq!(asked.ask("read 0 10"), answer(&old[..10]));
    fs::rename(&other, &path).expect("both are ours");
    assert_eq!(asked.ask("rest"), answer(&old));
    asked.ask(&format!("open {}", text(&path)));
    assert_eq!(asked.ask("rest"), answer(&new));
    // Written in place with the same size: the next open sees it.
    fs::write(&path, &old).expect("it is ours");
    asked.ask(&format!("open {}", text(&path)));
    assert_eq!(asked.ask("rest"), answer(&old));
    fs::remove_file(&path).expect("it is ours");
    assert_eq!(asked.ask("read 1000 5000"), answer(&old[1000..6000]), "it lives while it is open");
    asked.end();
}

// ---- owners that go away ----------------------------------------------------------------------------------

/// Runs a command in a process in which no signal is ignored, as from a terminal. The tests may be run with ignored
/// signals: by `nohup`, or by `&` in a shell without job control; and python itself ignores two.
const HEEDING: &str = "import os, signal, sys\n\
    for name in 'HUP', 'INT', 'TERM', 'PIPE', 'XFSZ': signal.signal(getattr(signal, 'SIG' + name), signal.SIG_DFL)\n\
    os.execv(sys.argv[1], sys.argv[1:])";

fn slow(path: &Path, naps: &str) -> (Child, JoinHandle<Vec<u8>>) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/slow.py");
    let command = run(&[text(python()), script, text(path), naps]);
    let mut heeding = plain(python());
    heeding.args(["-c", HEEDING]).arg(command.get_program()).args(command.get_args());
    let mut child = heeding.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // The program writes more than a pipe holds when it begins, so a thread has to read its output.
    let mut said = child.stderr.take().expect("piped");
    let reader = read_all(child.stdout.take());
    let mut begun = [0; 6];
    said.read_exact(&mut begun).expect("it begins");
    assert_eq!(&begun, b"begun\n");
    (child, reader)
}

fn signal(child: &Child, signal: Signal) {
    let process = Pid::from_raw(child.id() as i32).expect("a child has a number");
    kill_process(process, signal).expect("it is our child");
}

fn large(folder: &Path) -> (PathBuf, Vec<u8>) {
    let (path, content) = (folder.join("large"), noise(32 << 20, 15));
    fs::write(&path, &content).expect("the disk has room");
    (path, content)
}

#[test]
fn an_owner_that_is_killed() {
    let scratch = scratch();
    let (path, content) = large(scratch.path());
    let (owner, printed) = slow(&path, "30");
    signal(&owner, Signal::KILL);
    assert_bytes("after its owner was killed", &printed.join().expect("it only reads"), &content);
    assert_eq!(Ended(owner).wait().signal(), Some(9));
}

#[test]
fn an_owner_that_is_stopped() {
    let scratch = scratch();
    let (path, content) = large(scratch.path());
    let (owner, printed) = slow(&path, "30");
    signal(&owner, Signal::STOP);
    std::thread::sleep(Duration::from_secs(3));
    signal(&owner, Signal::CONT);
    assert_bytes("while its owner was stopped", &printed.join().expect("it only reads"), &content);
    assert!(Ended(owner).wait().success());
}

#[test]
fn signals_are_passed_on() {
    let scratch = scratch();
    let (path, content) = large(scratch.path());
    for number in [Signal::INT, Signal::TERM, Signal::HUP] {
        let (owner, printed) = slow(&path, "100000");
        signal(&owner, number);
        let status = Ended(owner).wait();
        // Python turns the first signal into an exit status of its own; the process ends by that signal, too.
        assert_eq!(status.signal(), Some(number.as_raw()), "{status}");
        assert!(content.starts_with(&printed.join().expect("it only reads")));
    }
}

//! Left alone: programs whose reads another object answers, that watch files by dnotify, or that begin under a filter
//! of system calls. They print the same under `run` and without it. The program is `programs/left_alone.c`.
//!
//! ```text
//!   LD_PRELOAD=xor.so  program read FILE          a user's object changes what `read` brings
//!   program filtered NUMBER program read FILE     the second one starts with the system call NUMBER forbidden
//! ```
//!
//! The reads that are made before or outside of these rules are served, and that is checked.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

mod disk;
use disk::{Report, noise, quinion, scratch};

const FILE_BYTES: usize = 300_123;

fn built(name: &str) -> PathBuf {
    static BUILT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("there is room");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/left_alone.c");
        for (name, options) in [("left_alone", &[][..]), ("xor.so", &["-shared", "-fPIC", "-DXOR"])] {
            let mut compiler = Command::new("cc");
            compiler.args(["-O2", "-w"]).args(options).arg("-o").arg(folder.path().join(name)).arg(&source);
            assert!(compiler.status().expect("a C compiler named cc").success());
        }
        folder
    });
    folder.path().join(name)
}

#[track_caller]
fn same_with_and_without(words: &[&str], variables: &[(&str, &Path)]) -> Report {
    let folder = scratch();
    let (file, report) = (folder.path().join("file"), folder.path().join("report"));
    std::fs::write(&file, noise(FILE_BYTES, 7)).expect("the disk has room");
    let tell = |mut command: Command| {
        command.args(words).arg(&file).envs(variables.iter().copied()).stdin(Stdio::null());
        let output = command.output().expect("it starts");
        (String::from_utf8_lossy(&output.stdout).into_owned(), output.status)
    };
    let expected = tell(Command::new(built("left_alone")));
    assert!(expected.1.success() && !expected.0.is_empty(), "{expected:?}");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&report).arg("--").arg(built("left_alone"));
    assert_eq!(tell(command), expected, "{words:?} (right: without the cache)");
    Report::read(&report)
}

#[test]
fn a_users_object_that_changes_the_bytes_of_read_is_called() {
    for case in ["read", "pread"] {
        assert!(
            same_with_and_without(&[case], &[]).served() > 0,
            "{case}: it is served where no object wraps"
        );
        let report = same_with_and_without(&[case], &[("LD_PRELOAD", &built("xor.so"))]);
        assert_eq!(report.served(), 0, "{case}: {report:?}");
        assert!(report.number("reasons", "wrapped") > 0, "{case}: {report:?}");
    }
}

/// Each system call that the interposer makes at its start, and that programs can do without.
#[test]
fn a_program_that_starts_under_a_filter_is_not_ended_by_it() {
    const GETPID: &str = "39";
    const SOCKET: &str = "41";
    const CONNECT: &str = "42";
    const READLINK: &str = "89";
    const GETEUID: &str = "107";
    let program = built("left_alone");
    let program = program.to_str().expect("a plain name");
    for number in [GETPID, SOCKET, CONNECT, READLINK, GETEUID] {
        same_with_and_without(&["filtered", number, program, "read"], &[]);
    }
}

/// As in most containers: `run` itself is under a filter, which forbids `unshare` to those who are not root.
#[test]
fn a_run_under_a_filter_serves_its_programs() {
    const UNSHARE: &str = "272";
    let folder = scratch();
    let (file, report) = (folder.path().join("file"), folder.path().join("report"));
    std::fs::write(&file, noise(FILE_BYTES, 7)).expect("the disk has room");
    for case in ["read", "child"] {
        let mut command = Command::new(built("left_alone"));
        command.args(["filtered", UNSHARE]).arg(quinion().get_program());
        command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
        command.arg(&report).arg("--").arg(built("left_alone")).arg(case).arg(&file).stdin(Stdio::null());
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{case}: {output:?}");
        let report = Report::read(&report);
        assert!(
            report.served() >= FILE_BYTES as u64,
            "{case} is served under the run's own filter: {report:?}"
        );
    }
}

#[test]
fn a_program_that_asks_for_signals_of_accesses_gets_them() {
    for case in ["notified", "notified_by_number"] {
        let report = same_with_and_without(&[case], &[]);
        assert!(report.served() > 0 && report.number("reasons", "watched") > 0, "{case}: {report:?}");
    }
}

#[test]
fn readahead_of_too_much_is_the_kernels_error() {
    assert!(same_with_and_without(&["readahead"], &[]).served() > 0);
}

/// Where there is no memory for a thread, `run` says so and ends. (A command that hangs is ended after a minute.)
#[test]
fn a_run_that_has_no_memory_for_a_thread_ends_with_an_error() {
    let limited = |kibibytes: u32| {
        let mut command = Command::new("timeout");
        let script = format!("ulimit -d {kibibytes}; exec \"$@\"");
        command.args(["--signal=KILL", "60", "bash", "-c", &script, "bash"]);
        let command = command.arg(quinion().get_program()).args(["run", "--", "true"]).stdin(Stdio::null());
        let output = command.output().expect("it starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = limited(1000);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.starts_with("quinion: ") && said.contains("thread") && said.contains("ulimit -d"), "{said}");
}

/// Reads, closes and replaces descriptors by functions that it looks up in the C library, past all names.
const PASSES_NAMES_BY: &str = r"
import ctypes, hashlib, os, sys
library = ctypes.CDLL('libc.so.6')
path, other = sys.argv[1], sys.argv[1] + '.other'
with open(other, 'wb') as file: file.write(b'other' * 100)
def digest(data): return hashlib.md5(data).hexdigest()
def offset_moved():
    file, buffer = os.open(path, os.O_RDONLY), ctypes.create_string_buffer(500)
    os.read(file, 1000)
    print(library.read(file, buffer, 500), digest(buffer.raw), digest(os.read(file, 500)), os.lseek(file, 0, 1))
    library.lseek(file, 7, 0)
    print(digest(os.read(file, 500)), digest(os.pread(file, 500, 9)))
    os.close(file)
def replaced(close):
    file = os.open(path, os.O_RDONLY)
    os.read(file, 10), os.pread(file, 10, 5)
    if close: library.close(file); print(library.open(other.encode(), 0) == file)
    else: new = library.open(other.encode(), 0); library.dup2(new, file); library.close(new)
    print(os.read(file, 10), os.pread(file, 10, 100))
    os.close(file)
for _ in range(3):
    offset_moved()
    replaced(True)
    replaced(False)
";

/// Also where the kernel lets no code be changed, so that the C library cannot be patched: only positional reads are
/// served then, each after a look at its descriptor.
#[test]
fn calls_that_pass_names_by_find_the_kernels_offset_and_file() {
    let folder = scratch();
    let (file, report) = (folder.path().join("file"), folder.path().join("report"));
    std::fs::write(&file, noise(FILE_BYTES, 7)).expect("the disk has room");
    std::thread::sleep(std::time::Duration::from_millis(2500)); // a file that was just changed is not served by looks
    let told = |mut command: Command| {
        let output = command.args(["-c", PASSES_NAMES_BY]).arg(&file).output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let expected = told(Command::new("python3"));
    const FORBIDS: &str = "import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0: print('SKIPPED: this kernel has no PR_SET_MDWE', file=sys.stderr)
os.execvp(sys.argv[1], sys.argv[1:])";
    // Three descriptors are what a viewer needs, and how the C library is to be patched comes by a fourth.
    const FEW: &str = "ulimit -n 7; exec \"$@\"";
    let starts = [&[][..], &["python3", "-c", FORBIDS], &["sh", "-c", FEW, "sh"]];
    for start in starts {
        let mut command = quinion();
        command.args(["run", "--attach", "at-once", "--memory", "64M"]);
        command.args(["--report", "json", "--report-file"]).arg(&report).arg("--").args(start).arg("python3");
        assert_eq!(told(command), expected, "{start:?} (right: without the cache)");
        assert!(Report::read(&report).served() > 0, "{start:?}: nothing was served, so nothing is shown");
    }
}

/// A read that must not wait, of what is in no memory, brings it in the end if it is tried again and again.
const TRIES_AGAIN: &str = r"
import hashlib, os, sys, time
file, buffer, digest = os.open(sys.argv[1], os.O_RDONLY), bytearray(4096), hashlib.md5()
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
os.pread(file, 100, 0)
for page in range(40):
    position = page * 7919 % 70 * 4096
    for _ in range(20_000):
        try: read = os.preadv(file, [buffer], position, os.RWF_NOWAIT); break
        except BlockingIOError: time.sleep(0.0005)
    else: sys.exit(f'page {page} does not come')
    digest.update(buffer[:read])
print(digest.hexdigest())
";

#[test]
fn a_read_that_must_not_wait_brings_its_bytes_when_it_is_tried_again() {
    let folder = scratch();
    let file = folder.path().join("file");
    std::fs::write(&file, noise(FILE_BYTES, 7)).expect("the disk has room");
    std::fs::File::open(&file).and_then(|file| file.sync_all()).expect("it is written");
    let told = |mut command: Command| {
        let output = command.args(["-c", TRIES_AGAIN]).arg(&file).output().expect("it starts");
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    let expected = told(Command::new("python3"));
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--", "python3"]);
    assert_eq!(told(command), expected);
}

/// Forks, and in each child opens something over and over while another thread reads for the first time.
const OPENS_MEANWHILE: &str = r"
import os, sys, threading
file, wrong = os.open(sys.argv[1], os.O_RDONLY), 0
os.pread(file, 10, 0)
for _ in range(100):
    child = os.fork()
    if child == 0:
        numbers, begun = set(), threading.Event()
        def look():
            for _ in range(300):
                number = os.open('/dev/null', os.O_WRONLY)
                os.close(number)
                numbers.add(number)
                begun.set()
        thread = threading.Thread(target=look)
        thread.start()
        begun.wait()
        for at in range(20): os.pread(file, 100, at)
        thread.join()
        os._exit(len(numbers) > 1)
    wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(wrong, 'children got another number')
";

/// A child becomes a viewer by descriptors, so one that has threads does not: its threads get the numbers that they get
/// without Quinion.
#[test]
fn a_child_with_threads_gets_the_numbers_of_descriptors_that_it_gets_without() {
    let folder = scratch();
    let file = folder.path().join("file");
    std::fs::write(&file, noise(FILE_BYTES, 7)).expect("the disk has room");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--"]);
    let output = command.args(["python3", "-c", OPENS_MEANWHILE]).arg(&file).output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 children got another number\n", "{output:?}");
}

const CUTS_MEANWHILE: &str = r"
import os, sys, threading
for reads in (False, True):
    with open(sys.argv[1], 'wb') as file: file.write(b'old' * 3000)
    file = os.open(sys.argv[1], os.O_RDONLY)
    os.pread(file, 100, 0), os.pread(file, 100, 100)
    child = os.fork()
    if child == 0:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        if reads: os.pread(os.open(sys.argv[2], os.O_RDONLY), 10, 0)
        os.close(os.open(sys.argv[1], os.O_RDONLY | os.O_TRUNC))
        os._exit(0)
    os.waitpid(child, 0)
    print(os.pread(file, 10, 0), os.read(os.open(sys.argv[1], os.O_RDONLY), 10), os.pread(file, 10, 0))
";

/// The child is served no reads, and the owner is told what it does all the same: no lease tells of such a cut.
#[test]
fn a_child_with_threads_tells_the_owner_of_its_changes() {
    let folder = scratch();
    let [file, other] = ["file", "other"].map(|name| folder.path().join(name));
    std::fs::write(&other, noise(FILE_BYTES, 7)).expect("the disk has room");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--"]);
    let output =
        command.args(["python3", "-c", CUTS_MEANWHILE]).args([file, other]).output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'' b'' b''\n".repeat(2), "{output:?}");
}

/// Cuts files that it, and a child, are served, when the owner has been too late to answer a read and is well again.
const CUTS_AFTER_A_LATE_READ: &str = r"
import os, signal, sys, threading, time
file, other = sys.argv[1:]
owner, missing = os.getppid(), os.open(other, os.O_RDONLY)
def served(path):
    file = os.open(path, os.O_RDONLY)
    os.pread(file, 100, 0), os.pread(file, 100, 100)
    return file
os.pread(missing, 1, 0)
for turn in range(10):
    with open(file, 'wb') as new: new.write(b'old' * 3000)
    ours, (heard, told), (asked, asks) = served(file), os.pipe(), os.pipe()
    if os.fork() == 0:
        theirs = served(file)
        os.write(told, b'.')
        os.read(asked, 1)
        time.sleep(0.3)
        for _ in range(100): # the owner may have no processor for a while
            if not os.pread(theirs, 10, 0): break
            time.sleep(0.1)
        os._exit(len(os.pread(theirs, 10, 0)))
    os.read(heard, 1)
    time.sleep(0.013 * turn)
    os.kill(owner, signal.SIGSTOP)
    goes_on = threading.Timer(0.06, os.kill, (owner, signal.SIGCONT))
    goes_on.start()
    os.pread(missing, 4096, turn + 1 << 20)
    goes_on.join()
    os.close(os.open(file, os.O_RDONLY | os.O_TRUNC))
    os.write(asks, b'.')
    print(os.pread(ours, 10, 0), os.wait()[1] >> 8)
";

/// A read whose answer was late keeps no cut from being told: no lease tells of it, and the old bytes would stay.
#[test]
fn a_cut_is_told_after_a_read_was_late() {
    let folder = scratch();
    let [file, other] = ["file", "other"].map(|name| folder.path().join(name));
    std::fs::write(&other, noise(16 << 20, 7)).expect("the disk has room");
    let mut command = quinion();
    command.env_remove("QUINION_WAIT_MS"); // an answer is late as soon as anywhere
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--"]);
    command.args(["python3", "-c", CUTS_AFTER_A_LATE_READ]).args([file, other]);
    let output = command.output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'' 0\n".repeat(10), "{output:?}");
}

/// Twice as many threads as an owner has slots for questions make their first reads while it is stopped.
const MORE_READERS_THAN_SLOTS: &str = r"
import os, signal, sys, threading
owner, paths = os.getppid(), [f'{sys.argv[1]}/{number}' for number in range(64)]
files = [os.open(path, os.O_RDONLY) for path in paths]
os.kill(owner, signal.SIGSTOP)
goes_on = threading.Timer(0.3, os.kill, (owner, signal.SIGCONT))
readers = [threading.Thread(target=os.pread, args=(file, 100, 0)) for file in files]
for each in readers + [goes_on]: each.start()
for each in readers + [goes_on]: each.join()
for turn in range(40):
    for file in files:
        if os.pread(file, 65536, 65536 * turn) != bytes([turn]) * 65536: print('wrong')
";

/// Slots that are all taken for a moment are no reason to leave a file to the kernel for good.
#[test]
fn files_are_served_that_more_threads_open_than_there_are_slots() {
    let folder = scratch();
    let report = folder.path().join("report");
    let content: Vec<u8> = (0..40).flat_map(|turn| vec![turn; 65536]).collect();
    for number in 0..64 {
        std::fs::write(folder.path().join(number.to_string()), &content).expect("the disk has room");
    }
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&report).args(["--", "python3", "-c", MORE_READERS_THAN_SLOTS]).arg(folder.path());
    let output = command.output().expect("it starts");
    assert_eq!((&*output.stdout, output.status.code()), (&b""[..], Some(0)), "{output:?}");
    let told = std::fs::read_to_string(&report).expect("the report was written");
    assert!(told.contains("\"no_owner\":0") || !told.contains("no_owner"), "{told}");
}

/// A program of another C library that a program of the run starts runs as without `run`.
#[test]
fn a_program_of_another_c_library_runs_as_without() {
    let folder = scratch();
    let (source, program) = (folder.path().join("hello.c"), folder.path().join("hello"));
    std::fs::write(&source, "#include <stdio.h>\nint main(void) { return puts(\"hello\") < 0; }\n")
        .expect("it has room");
    let compiled = Command::new("musl-gcc").arg("-o").arg(&program).arg(&source).status();
    if !compiled.is_ok_and(|status| status.success()) {
        return println!("SKIPPED: there is no musl-gcc");
    }
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--", "sh", "-c"]);
    let output = command.arg("\"$0\"; \"$0\"").arg(&program).output().expect("it starts");
    assert_eq!((output.stdout, output.status.code()), (b"hello\nhello\n".to_vec(), Some(0)));
}

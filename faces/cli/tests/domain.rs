//! Who may see what is cached: a process that changes its credentials under `run`, its children, and programs that it
//! becomes. Each reads a file until it is served, becomes somebody else, and looks at what it has mapped: nothing of
//! the cache may be left, and its reads go on by the kernel.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

mod disk;
use disk::{Report, noise, quinion, scratch};

/// Reads a file until it is served, does `then`, and says what of the cache is mapped before and after.
const PROGRAM: &str = "
import os, sys
def mapped():
    return sum('quinion-arena' in line or 'quinion-viewer' in line for line in open('/proc/self/maps'))
path, then = sys.argv[1], sys.argv[2]
file = os.open(path, os.O_RDONLY)
for _ in range(50):
    read = os.pread(file, 100000, 0)
print('before', mapped())
exec(then)
print('after', mapped(), os.pread(file, 100000, 0) == read, flush=True)
";

fn said(path: &Path, then: &str) -> (String, Report) {
    let scratch = scratch();
    let report = scratch.path().join("report");
    let mut command: Command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&report).args(["--", "python3", "-c", PROGRAM]).arg(path).arg(then);
    let output = command.output().expect("our own command starts");
    assert!(output.status.success(), "{then}: {output:?}");
    (String::from_utf8(output.stdout).expect("text"), Report::read(&report))
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: only root can become another user");
    }
    is_root
}

/// 1. A program of root's becomes another user without becoming another program.
/// 2. It reads all that root's programs have cached, by the memory that it has mapped.
#[test]
fn other_domain() {
    if !is_root() {
        return;
    }
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    for then in [
        "os.setuid(65534)",
        "os.setgid(65534)",
        "os.setgroups([1])",
        "os.setresuid(65534, 65534, 0)",
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.unshare(0x10000000)",
        "import ctypes; ctypes.CDLL(None).syscall(105, 65534)",
        "os.chroot('/')",
    ] {
        let (said, report) = said(&path, then);
        assert_eq!(said, "before 2\nafter 0 True\n", "{then}");
        assert!(report.served() > 0, "it was served before: {report:?}");
        assert!(report.number("reasons", "domain") > 0, "{report:?}");
    }
}

/// 1. A program forks; its child, which may become anybody, has the memory of its parent's.
#[test]
fn a_forked_child_has_nothing_of_its_parents_view() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    let fork = "
child = os.fork()
if child: os.waitpid(child, 0)
";
    let (said, _) = said(&path, fork);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.contains(&"before 2"), "{said}");
    assert!(lines.contains(&"after 0 True"), "the child: {said}");
    assert!(lines.contains(&"after 2 True"), "the parent: {said}");
}

/// Forbids itself and all that it becomes to duplicate descriptors of other processes, as Yama does between processes
/// that are not each other's children, and becomes the command.
const FORBIDDEN: &str = "
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
GETFD = 438
code = [(0x20, 0, 0, 0), (0x15, 0, 1, GETFD), (6, 0, 0, 0x00050001), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code))
program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0
assert libc.syscall(GETFD, -1, 0, 0) == -1 and ctypes.get_errno() == 1
os.execvp(sys.argv[1], sys.argv[1:])
";

/// 1. The system lets nobody duplicate descriptors of a process that is not its child (kernel.yama.ptrace_scope), as
///    the owner of a cache that stays is to do.
/// 2. Nothing is served.
/// 3. Descriptors are sent instead, and threads that open, duplicate and close meanwhile find a number that is not
///    theirs, or lose one.
#[test]
fn an_owner_that_may_not_take_descriptors_is_sent_them() {
    const READER: &str = "
import os, sys, threading
before = os.listdir('/proc/self/fd')
paths = sys.argv[1:]
whole = [open(path, 'rb').read() for path in paths]
def read(path, data):
    for _ in range(5):
        file = os.open(path, os.O_RDONLY)
        for at in range(0, len(data), 65536):
            assert os.pread(file, 65536, at) == data[at:at + 65536], (path, at)
        os.close(file)
def churn(stop):
    while not stop.is_set():
        file = os.open('/dev/null', os.O_RDONLY)
        other = os.dup(file)
        os.dup2(file, other)
        os.close(file)
        os.close(other)
stop = threading.Event()
churners = [threading.Thread(target=churn, args=(stop,)) for _ in range(2)]
readers = [threading.Thread(target=read, args=one) for one in zip(paths, whole)]
for thread in churners + readers: thread.start()
for thread in readers: thread.join()
stop.set()
for thread in churners: thread.join()
child = os.fork()
if child == 0:
    read(paths[0], whole[0])
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.listdir('/proc/self/fd') == before)
";
    let folder = scratch();
    let paths: Vec<_> = (0..8).map(|file| folder.path().join(format!("file{file}"))).collect();
    for (seed, path) in paths.iter().enumerate() {
        std::fs::write(path, noise(1 << 20, seed as u64)).expect("the disk has room");
    }
    let path = folder.path().join("report");
    let mut command = disk::plain("python3");
    command.args(["-c", FORBIDDEN]).arg(quinion().get_program());
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&path).args(["--", "python3", "-c", READER]).args(&paths);
    let output = command.output().expect("python3 starts");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "True\n", "a number is left");
    let report = Report::read(&path);
    assert!(report.served() > 8 << 20, "{report:?}");
}

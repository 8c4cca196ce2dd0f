//! Access to cached bytes: a process that changes its credentials under `run`, its children, and programs that it
//! executes. Each reads a file until it is served, changes its user or another credential, and checks its mappings:
//! none of the cache may be left, and the kernel serves its reads from then on.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

mod disk;
use disk::{Report, noise, quinion, scratch};

/// Reads a file until it is served, does `then`, and prints how many mappings of the cache it had before and after.
/// Then it reads four times as much, by the old descriptor and by a new one.
const PROGRAM: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def mapped():
    return sum('quinion-arena' in line or 'quinion-viewer' in line for line in open('/proc/self/maps'))
def reads(file, times):
    return [os.pread(file, 100000, 0) for _ in range(times)][-1]
def succeeds(answer):
    assert answer == 0, os.strerror(ctypes.get_errno())
path, then = sys.argv[1], sys.argv[2]
file = os.open(path, os.O_RDONLY)
read = reads(file, 50)
print('before', mapped(), flush=True)
exec(then)
print('after', mapped(), reads(file, 100) == read == reads(os.open(path, os.O_RDONLY), 100), flush=True)
";
/// Bytes that it reads before `then`, and after.
const READ_BEFORE: u64 = 50 * 100_000;
const READ_AFTER: u64 = 4 * READ_BEFORE;

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

/// 1. A program of root's changes its user without executing another program.
/// 2. It reads all that root's programs have cached, through the mappings that it still has.
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
        "libc.syscall(105, 65534)",
        "os.chroot('/')",
    ] {
        is_served_no_more_after(&path, then);
    }
}

/// The program above stays served if `then` changes no credential: without this check the other tests would show
/// nothing.
#[test]
fn a_program_that_keeps_its_credentials_stays_served() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    let (said, report) = said(&path, "pass");
    assert_eq!(said, "before 2\nafter 2 True\n");
    assert!(report.served() > READ_AFTER, "{report:?}");
    assert_eq!(report.number("reasons", "domain"), 0, "{report:?}");
}

/// Runs the program, which changes its credentials by `then`: from then on nothing is mapped, and nothing is served.
#[track_caller]
fn is_served_no_more_after(path: &Path, then: &str) {
    let (said, report) = said(path, then);
    assert_eq!(said, "before 2\nafter 0 True\n", "{then}");
    assert!(report.served() >= READ_BEFORE / 2, "{then}: it was not served before: {report:?}");
    assert!(report.served() < READ_AFTER, "{then}: it was served on: {report:?}");
    assert!(report.number("reasons", "domain") > 0, "{then}: {report:?}");
}

/// `capset` without any capability, `setns` into a process and a user name space, `unshare` of both: each with its C
/// library name and its system call number.
const CHANGES: [(&str, &str, u32); 5] = [
    (
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); sets = (ctypes.c_uint32 * 6)(); words = (header, sets)",
        "capset",
        126,
    ),
    ("words = (os.open('/proc/self/ns/pid', os.O_RDONLY), 0)", "setns", 308),
    (
        "
ours, theirs = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    succeeds(libc.unshare(0x10000000))
    os.write(ours[1], b'1')
    os.read(theirs[0], 1)
    os._exit(0)
os.read(ours[0], 1)
words = (os.open(f'/proc/{child}/ns/user', os.O_RDONLY), 0x10000000)
os.write(theirs[1], b'1')
os.waitpid(child, 0)",
        "setns",
        308,
    ),
    ("words = (0x10000000,)", "unshare", 272),
    ("words = (0x20000000,)", "unshare", 272),
];

/// Each of [`CHANGES`], by name and by number; a change that the container forbids is skipped with a message.
fn each_change(does: impl Fn(&str, &str)) {
    if !is_root() {
        return;
    }
    for (words, name, number) in CHANGES {
        let by_name = format!("succeeds(libc.{name}(*words))");
        let by_number = format!("succeeds(libc.syscall({number}, *words))");
        let alone = format!("{PROGRAM}{words}\n{by_name}").replace("exec(then)", "");
        let alone =
            disk::plain("python3").args(["-c", &alone, "/etc/passwd", ""]).output().expect("python3 starts");
        if !alone.status.success() {
            println!("SKIPPED: {name} is not allowed here: {}", String::from_utf8_lossy(&alone.stderr));
            continue;
        }
        does(words, &by_name);
        does(words, &by_number);
    }
}

/// 1. A program of root's gives up its capabilities, or enters or makes another name space of users or processes.
/// 2. It still reads what root's programs have cached.
#[test]
fn other_domain_by_capset_setns_and_unshare() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    each_change(|words, call| is_served_no_more_after(&path, &format!("{words}\n{call}")));
}

/// 1. A program forks, and its child attaches and is served.
/// 2. The child changes its credentials, and still reads its mappings. Its parent stays served.
#[test]
fn other_domain_of_a_forked_child() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    each_change(|words, call| {
        let change = format!("{words}\n{call}").replace('\n', "\n    ");
        let fork = format!(
            "
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print('parent', mapped(), reads(file, 50) == read)
    sys.exit()
else:
    assert reads(os.open(path, os.O_RDONLY), 50) == read
    print('child', mapped(), flush=True)
    {change}
"
        );
        let (said, report) = said(&path, &fork);
        assert_eq!(said, "before 2\nchild 2\nafter 0 True\nparent 2 True\n", "{fork}");
        assert!(report.served() >= READ_BEFORE, "{call}: {report:?}");
        assert!(report.served() < READ_AFTER, "{call}: the child was served on: {report:?}");
        assert!(report.number("reasons", "domain") > 0, "{call}: {report:?}");
    });
}

/// 1. A program does something after which it is no longer served. Its mappings stay.
/// 2. It changes its user, by a function or by a system call number, and its mappings are still there.
#[test]
fn other_domain_of_a_process_that_was_no_longer_served_before() {
    if !is_root() {
        return;
    }
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    for then in ["os.setuid(65534)", "libc.syscall(105, 65534)", "libc.syscall(272, 0x20000000)"] {
        // An io_uring for which there is no room: its only effect is that the program is no longer served.
        let (said, report) = said(&path, &format!("libc.syscall(425, 0, 0); assert mapped() == 2\n{then}"));
        assert_eq!(said, "before 2\nafter 0 True\n", "{then}");
        assert!(report.served() > 0 && report.served() < READ_AFTER, "{then}: {report:?}");
    }
}

/// 1. A program installs a system call filter that kills it if it calls `getpid`.
/// 2. It becomes another user. The mappings were removed before, without a call of `getpid`.
#[test]
fn a_program_that_forbids_our_calls_changes_its_user_without_any() {
    if !is_root() {
        return;
    }
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    let forbids = "
import struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 39), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code))
program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(code))
succeeds(libc.prctl(38, 1, 0, 0, 0))
succeeds(libc.prctl(22, 2, program))
assert mapped() == 0
";
    for then in ["os.setuid(65534)", "libc.syscall(105, 65534)"] {
        let (said, report) = said(&path, &format!("{forbids}{then}"));
        assert_eq!(said, "before 2\nafter 0 True\n", "{then}");
        assert!(report.served() > 0 && report.served() < READ_AFTER, "{then}: {report:?}");
    }
}

/// A core dump of a program would contain what all programs have read. A child that attaches again has the same mapping
/// flags as its parent.
#[test]
fn the_mapped_cache_is_in_no_core_dump_and_in_no_child() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    let look = "
def flags():
    found, name = [], ''
    for line in open('/proc/self/smaps'):
        words = line.split()
        if '-' in words[0]: name = line
        if words[0] == 'VmFlags:' and ('quinion-arena' in name or 'quinion-viewer' in name):
            found.append([flag in words for flag in ('dd', 'dc')])
    return found
print(flags(), flush=True)
child = os.fork()
if child == 0:
    assert reads(os.open(path, os.O_RDONLY), 50) == read
    print(flags(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
";
    let (said, _) = said(&path, look);
    let all = "[[True, True], [True, True]]";
    assert_eq!(said, format!("before 2\n{all}\n{all}\nafter 2 True\n"));
}

/// 1. A program forks; its child, which may change its user, still has its parent's mappings.
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

/// Forbids itself and its descendants to duplicate descriptors of other processes, as Yama does for processes that are
/// not its children, and executes the command.
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

/// 1. The system forbids a process to duplicate descriptors of a process that is not its child
///    (kernel.yama.ptrace_scope), which the owner of a kept cache has to do.
/// 2. Nothing is served.
/// 3. Descriptors are sent instead. Threads that open, duplicate and close at the same time find a number that is not
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

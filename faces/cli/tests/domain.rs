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

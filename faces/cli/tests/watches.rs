//! A program under `run` that watches files hears what it hears without: its own reads, and nobody else's. It is served
//! nothing from the moment it wants to watch, and what the owner had open for it is closed before. The program here
//! says all that it hears, with and without the cache.
#![cfg(target_os = "linux")]

mod disk;
use disk::{Report, noise, plain, quinion, scratch};

/// Watches a file, opens, reads and closes it, and says what it heard of that.
const PROGRAM: &str = "
import ctypes, os, struct, sys
libc, path = ctypes.CDLL(None, use_errno=True), sys.argv[1]
early = os.open(path, os.O_RDONLY)
for _ in range(20): os.pread(early, 5000, 0)
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, path.encode(), 0xfff) > 0
os.pread(early, 100, 0)
for _ in range(3):
    file = os.open(path, os.O_RDONLY)
    for at in range(0, 100000, 1000): os.pread(file, 1000, at)
    os.read(file, 10)
    os.close(file)
os.close(early)
heard = b''
try:
    while True: heard += os.read(watch, 4096)
except BlockingIOError: pass
at = 0
while at < len(heard):
    _, mask, _, length = struct.unpack_from('iIII', heard, at)
    print(hex(mask))
    at += 16 + length
";

#[test]
fn a_program_that_watches_files_hears_what_it_hears_without() {
    let folder = scratch();
    let path = folder.path().join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    let without = plain("python3").args(["-c", PROGRAM]).arg(&path).output().expect("it starts");
    assert!(without.status.success() && !without.stdout.is_empty(), "{without:?}");
    let report = folder.path().join("report");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&report).args(["--", "python3", "-c", PROGRAM]).arg(&path);
    let with = command.output().expect("our own command starts");
    assert_eq!(String::from_utf8_lossy(&with.stdout), String::from_utf8_lossy(&without.stdout), "{with:?}");
    let report = Report::read(&report);
    assert!(report.served() > 0 && report.number("reasons", "watched") > 0, "{report:?}");
}

//! A program under `run` that watches files gets the same events as without: all reads of the programs of the run, and
//! none of the owner's. From the moment a program sets a watch, the watched file is not served to any program, and the
//! owner closes its descriptors of it before. The programs here print all their events, with and without the cache.
#![cfg(target_os = "linux")]

mod disk;
use disk::{Report, noise, plain, quinion, scratch};

/// Watches a file, opens, reads and closes it, and prints the events.
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
fn a_program_that_watches_files_gets_the_same_events_as_without() {
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

/// A child reads a file, before and after its parent watches it, or its folder, by inotify or fanotify; by a descriptor
/// from before the watch, and by one from after it. Prints the parent's events.
const OF_ANOTHER: &str = "
import ctypes, os, struct, sys
libc, path, how = ctypes.CDLL(None, use_errno=True), sys.argv[1], sys.argv[2]
(wait, go), (hear, say) = os.pipe(), os.pipe()
child = os.fork()
if not child:
    early = os.open(path, os.O_RDONLY)
    for _ in range(20): os.pread(early, 5000, 0)
    os.write(say, b'x')
    os.read(wait, 1)
    for at in range(0, 50000, 1000): os.pread(early, 1000, at)
    late = os.open(path, os.O_RDONLY)
    for at in range(0, 50000, 1000): os.read(late, 1000)
    os.close(early)
    os.close(late)
    os._exit(0)
os.read(hear, 1)
folder = os.path.dirname(path)
if how == 'fanotify':
    watch = libc.fanotify_init(2, os.O_RDONLY)
    if watch < 0:
        print('cannot')
    else:
        assert libc.fanotify_mark(watch, 1, ctypes.c_uint64(0x31), -100, path.encode()) == 0
elif how == 'by number':
    watch = libc.syscall(294, os.O_NONBLOCK)
    assert libc.syscall(254, watch, path.encode(), 0xfff) > 0
else:
    watch = libc.inotify_init1(os.O_NONBLOCK)
    if how == 'changes': assert libc.inotify_add_watch(watch, folder.encode(), 0x3c6) > 0
    else: assert libc.inotify_add_watch(watch, (folder if how == 'folder' else path).encode(), 0xfff) > 0
os.write(go, b'x')
os.waitpid(child, 0)
heard = b''
try:
    while watch >= 0: heard += os.read(watch, 4096)
except BlockingIOError: pass
at, masks = 0, set()
while at < len(heard):
    if how == 'fanotify':
        length, _, _, _, mask, _, _ = struct.unpack_from('IBBHQii', heard, at)
        masks.add(hex(mask))
        at += length
    else:
        _, mask, _, length = struct.unpack_from('iIII', heard, at)
        print(hex(mask))
        at += 16 + length
print(sorted(masks))
";

fn reads_of_another(how: &str) -> Report {
    let folder = scratch();
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner).expect("the disk has room");
    let path = inner.join("file");
    std::fs::write(&path, noise(1 << 20, 1)).expect("the disk has room");
    let without = plain("python3").args(["-c", OF_ANOTHER]).arg(&path).arg(how).output().expect("it starts");
    assert!(without.status.success() && !without.stdout.is_empty(), "{without:?}");
    if without.stdout.starts_with(b"cannot") {
        println!("SKIPPED: this user may not watch by {how}");
    }
    let report = folder.path().join("report");
    let mut command = quinion();
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&report).args(["--", "python3", "-c", OF_ANOTHER]).arg(&path).arg(how);
    let with = command.output().expect("our own command starts");
    let [heard, expected] = [&with, &without].map(|output| String::from_utf8_lossy(&output.stdout));
    assert_eq!(heard, expected, "{how}: {with:?}");
    Report::read(&report)
}

#[test]
fn reads_of_another_process_of_the_run_are_reported() {
    for how in ["file", "folder", "by number", "fanotify"] {
        let report = reads_of_another(how);
        assert!(report.served() > 0, "{how}: {report:?}");
        assert!(how == "fanotify" || report.number("reasons", "watched") > 0, "{how}: {report:?}");
    }
}

/// A watch for changes only, of the files of a folder, gets its events from the kernel: reads are served.
#[test]
fn a_watch_for_changes_takes_nothing_from_the_cache() {
    let report = reads_of_another("changes");
    assert!(report.served() >= 100, "{report:?}");
    assert_eq!(report.number("reasons", "watched"), 0, "{report:?}");
}

//! Never worse: `run` leaves files to the kernel that the kernel serves as well, and takes over the others.
//!
//! ```text
//!   a file of some size, in the kernel's page cache or not --run: a program reads it--> the same output
//!                                                                               `-> who served it, by the report
//! ```
//!
//! By the numbers of the report, never by time.

mod disk;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use disk::{Report, quinion, scratch};

/// Larger than any single read request.
const LARGE: usize = 6 << 20;

/// Makes a file of `bytes` bytes that is fully in the kernel's page cache, and written back.
fn make(path: &Path, bytes: usize) {
    let mut file = File::create(path).expect("the disk has room");
    let bytes: Vec<u8> = (0..bytes).map(|i| (i / 7) as u8 ^ (i >> 12) as u8).collect();
    file.write_all(&bytes).expect("the disk has room");
    file.sync_all().expect("the disk takes it");
    std::fs::read(path).expect("it is ours");
}

/// Has the kernel drop its cached pages of a file, where it can; some file systems are in memory.
fn make_cold(path: &Path) {
    let file = File::open(path).expect("it is ours");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a hint");
}

/// Runs a program with the options, and returns its report. The program must print what it prints without the cache.
#[track_caller]
fn run(options: &[&str], words: &[&str]) -> Report {
    run_with("64M", options, words)
}

#[track_caller]
fn run_with(memory: &str, options: &[&str], words: &[&str]) -> Report {
    let folder = scratch();
    let report = folder.path().join("report");
    let mut command = quinion();
    command.args(["run", "--memory", memory, "--report", "json", "--report-file"]).arg(&report);
    let served = command.args(options).arg("--").args(words).output().expect("our own command starts");
    let expected = disk::plain(words[0]).args(&words[1..]).output().expect("it is there");
    disk::assert_same(&format!("{words:?}"), &served, &expected);
    Report::read(&report)
}

fn left(report: &Report) -> u64 {
    report.number("reasons", "left")
}

#[test]
fn a_small_file_that_is_read_once_is_the_kernels() {
    let folder = scratch();
    let path = folder.path().join("small");
    make(&path, 100_000);
    make_cold(&path);
    let path = path.to_str().expect("a plain name");
    let report = run(&[], &["cat", path, path, path]);
    assert_eq!((report.served(), report.number("served", "files"), left(&report)), (0, 0, 3), "{report:?}");
    assert!(
        report.0.contains("read too few times"),
        "nothing is served, and the report does not say why: {report:?}"
    );
    // The loader maps more libraries than the program reads files, which is no reason that a user can act on.
    let report = run(&[], &["grep", "-c", "x", path]);
    let note = report.0.split('"').find(|text| text.starts_with("nothing was served")).expect("a note");
    assert!(note.contains(" read too few times") && note.contains("copied into the cache"), "{note}");
    assert!(!note.contains("at-once"), "it would cost more than the few reads: {note}");
    assert!(!note.contains("mapped") && !note.contains("--memory"), "its size is not the reason: {note}");
    let report = run(&["--attach", "at-once"], &["cat", path, path, path]);
    assert_eq!((report.served(), report.number("served", "files")), (300_000, 3), "{report:?}");
}

/// Whether the kernel has the file cached or not: the kernel reads it as fast as the cache, and has it cached for the
/// next reader.
#[test]
fn a_large_file_that_is_read_once_is_the_kernels() {
    let folder = scratch();
    let path = folder.path().join("large");
    make(&path, LARGE);
    let name = path.to_str().expect("a plain name");
    for _ in 0..2 {
        let report = run(&[], &["cat", name]);
        assert_eq!(
            (report.served(), left(&report), report.number("device", "bytes")),
            (0, 1, 0),
            "{report:?}"
        );
        let report = run(&["--attach", "at-once"], &["cat", name]);
        assert_eq!((report.served(), left(&report)), (LARGE as u64, 0), "{report:?}");
        make_cold(&path);
    }
}

/// 1. The kernel has a file cached, which a program reads in small pieces, over and over.
/// 2. After some rounds, the file is copied from the kernel's page cache in the background.
/// 3. From then on its reads are hits.
#[test]
fn a_file_read_often_is_copied_out_of_the_kernels_memory() {
    const READS: &str = "
import os, sys, time
def calls():
    return int(next(line for line in open('/proc/self/io') if line.startswith('syscr')).split()[1])
fd = os.open(sys.argv[1], os.O_RDONLY)
rounds, end = 0, time.monotonic() + 60
while time.monotonic() < end:
    before = calls()
    for page in range(1536):
        os.pread(fd, 4096, page * 7919 % 1536 * 4096)
    rounds += 1
    if calls() - before < 100:
        break
print(rounds >= 4, os.pread(fd, 4096, 4096)[:8])
";
    let folder = scratch();
    let (path, program) = (folder.path().join("large"), folder.path().join("reads.py"));
    make(&path, LARGE);
    std::fs::write(&program, READS).expect("the disk has room");
    let [path, program] = [&path, &program].map(|path| path.to_str().expect("a plain name"));
    // Without `run` it would run for a minute, since no round of it is free of system calls.
    let report = report_of(&["python3", program, path]);
    assert!(left(&report) >= 1, "the interpreter's own files are, too: {report:?}");
    assert_eq!(report.number("served", "reads"), report.number("served", "hits"), "it was there: {report:?}");
    let kernels = report.number("kernel", "reads");
    assert!(kernels >= 4 * 1536, "the kernel was to read it some times: {report:?}");
    assert!(report.number("served", "reads") >= 1400, "it was never taken over: {report:?}");
}

/// As above, by a program that opens the file for each round.
#[test]
fn a_file_opened_often_is_taken_over_too() {
    const READS: &str = "
import os, sys, time
def calls():
    return int(next(line for line in open('/proc/self/io') if line.startswith('syscr')).split()[1])
end = time.monotonic() + 60
while time.monotonic() < end:
    fd = os.open(sys.argv[1], os.O_RDONLY)
    before = calls()
    while os.read(fd, 4096):
        pass
    after = calls()
    os.close(fd)
    if after - before < 100:
        break
print(after - before < 100)
";
    let folder = scratch();
    let (path, program) = (folder.path().join("large"), folder.path().join("reads.py"));
    make(&path, LARGE);
    std::fs::write(&program, READS).expect("the disk has room");
    let [path, program] = [&path, &program].map(|path| path.to_str().expect("a plain name"));
    let report = report_of(&["python3", program, path]);
    assert!(report.served() >= LARGE as u64, "it was never taken over: {report:?}");
}

/// 1. A program opens a file of 1 MiB again and again, and reads it to its end in a few calls each time.
/// 2. The file is copied, and each opening asks for it when hardly anything is left to read: asking costs more than all
///    that it reads.
#[test]
fn a_smaller_file_opened_often_and_read_once_each_time_is_the_kernels() {
    const READS: &str = "
import os, sys
for size in 1 << 16, 1 << 14:
    for _ in range(300):
        fd = os.open(sys.argv[1], os.O_RDONLY)
        while os.read(fd, size):
            pass
        os.close(fd)
print(True)
";
    let folder = scratch();
    let (path, program) = (folder.path().join("file"), folder.path().join("reads.py"));
    make(&path, 1 << 20);
    std::fs::write(&program, READS).expect("the disk has room");
    let [path, program] = [&path, &program].map(|path| path.to_str().expect("a plain name"));
    let report = report_of(&["python3", program, path]);
    assert_eq!((report.number("served", "files"), report.number("asked", "questions")), (0, 0), "{report:?}");
}

/// 1. Several programs read a large file, each of them once, as the commands of a script do.
/// 2. At the third, the file is copied in the background.
/// 3. From then on they read it from the cache.
#[test]
fn a_file_that_several_programs_read_in_turn_is_taken_over_too() {
    let folder = scratch();
    let path = folder.path().join("large");
    make(&path, LARGE);
    let script = format!(
        "n=0; while [ $n -lt 20 ]; do cat {} | tail -c 1; sleep 0.05; n=$((n + 1)); done; echo",
        path.display()
    );
    let report = run(&[], &["sh", "-c", &script]);
    assert!(report.served() >= LARGE as u64, "it was never taken over: {report:?}");
}

fn report_of(words: &[&str]) -> Report {
    let folder = scratch();
    let report = folder.path().join("report");
    let mut command = quinion();
    command.args(["run", "--memory", "64M", "--report", "json", "--report-file"]).arg(&report);
    let output = command.arg("--").args(words).output().expect("our own command starts");
    assert!(output.status.success() && output.stdout.starts_with(b"True"), "{output:?}");
    Report::read(&report)
}

/// 1. A program reads a file four times the memory from end to end.
/// 2. The file is evicted behind the reader, and no page is read again: it stays served.
#[test]
fn a_scan_of_a_file_larger_than_memory_stays_served() {
    const BYTES: usize = 256 << 20;
    let folder = scratch();
    let path = folder.path().join("large");
    make(&path, BYTES);
    let report = run(&["--attach", "at-once"], &["cksum", path.to_str().expect("a plain name")]);
    assert_eq!(report.served(), BYTES as u64, "{report:?}");
    assert!(!report.0.contains("would have held"), "{report:?}");
}

/// Reads pages of a file at random, in rounds, and prints a sum of the bytes, which are the same in each round. It ends
/// when the kernel, or the cache, has served nearly all reads of two rounds, or after a number of rounds.
const AT_RANDOM: &str = "
import hashlib, os, random, sys
def calls():
    return int(next(line for line in open('/proc/self/io') if line.startswith('syscr')).split()[1])
fd = os.open(sys.argv[1], os.O_RDONLY)
pages = random.Random(7).choices(range(os.fstat(fd).st_size // 4096), k=12000)
sums, rounds = set(), 0
for number in range(int(sys.argv[3])):
    before, sum = calls(), hashlib.sha256()
    for page in pages:
        sum.update(os.pread(fd, 4096, page * 4096))
    sums.add(sum.hexdigest())
    by_kernel = calls() - before
    # In the first rounds it is the kernel's in any case.
    is_so = by_kernel > 11000 and number >= 8 if sys.argv[2] == 'kernel' else by_kernel < 1000
    rounds += is_so
    if rounds == 2:
        break
print(sums)
";

/// 1. A program reads at random in a file six times as large as the memory: the pages that it needs next were evicted
///    for those that it needed before.
/// 2. The file is left to the kernel. The report says how much memory would have been enough.
/// 3. With that much memory it is served, and nothing is left to the kernel.
#[test]
fn too_little_memory_leaves_the_file_to_the_kernel_and_says_how_much_would_do() {
    const BYTES: usize = 96 << 20;
    let folder = scratch();
    let (path, program) = (folder.path().join("large"), folder.path().join("reads.py"));
    make(&path, BYTES);
    std::fs::write(&program, AT_RANDOM).expect("the disk has room");
    let [path, program] = [&path, &program].map(|path| path.to_str().expect("a plain name"));
    let report = run_with("16M", &[], &["python3", program, path, "kernel", "400"]);
    let words = "would have held all that was read";
    let note = report.0.split('"').find(|text| text.contains(words)).unwrap_or_else(|| panic!("{report:?}"));
    assert!(note.contains(" of ") && note.contains(" left to the kernel for want of memory"), "{note}");
    let (_, rest) = note.split_once("`--memory ").expect("it says how much");
    let memory = rest.split('`').next().expect("a size").to_owned();
    let mib: usize = memory.strip_suffix('M').and_then(|digits| digits.parse().ok()).expect("in MiB");
    // A file is taken over only if it takes at most a fourth of the memory.
    assert!((BYTES >> 20..=(5 * BYTES) >> 20).contains(&mib), "{note}");
    assert!(report.number("kernel", "reads") >= 8 * 11_000, "it was not left to the kernel: {report:?}");
    // The same with as much memory as the report named.
    let report = run_with(&memory, &[], &["python3", program, path, "cache", "150"]);
    assert!(!report.0.contains(words), "{report:?}");
    assert!(report.number("served", "reads") >= 2 * 11_000, "it was not served: {report:?}");
}

/// 1. A program announces random reads of a file, as RocksDB does for each table that it opens.
/// 2. It reads the file from end to end, page by page.
/// 3. If the hint were believed, each page would be a read of the device, which the program waits for.
#[test]
fn reads_count_for_more_than_the_advice_given() {
    const READS: &str = "
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
size, total = os.fstat(fd).st_size, 0
for page in range(0, size, 4096):
    total += sum(os.pread(fd, 4096, page)[:9])
print(total)
";
    const BYTES: usize = 16 << 20;
    let folder = scratch();
    let (path, program) = (folder.path().join("large"), folder.path().join("reads.py"));
    make(&path, BYTES);
    make_cold(&path);
    std::fs::write(&program, READS).expect("the disk has room");
    let [path, program] = [&path, &program].map(|path| path.to_str().expect("a plain name"));
    let report = run(&["--attach", "at-once"], &["python3", program, path]);
    assert!(report.served() >= BYTES as u64, "{report:?}");
    // The interpreter's own files are read as well; with a shim before it these are a hundred and more.
    let reads = report.number("device", "reads");
    assert!((1..1000).contains(&reads), "{reads} reads of the device for 4096 pages: {report:?}");
}

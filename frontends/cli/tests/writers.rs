//! Writers and readers in every order, viewers and other processes: each read gives what was written before. Files are
//! served nevertheless until a process opens them for writing, and again after it has closed them.
//!
//! ```text
//!   this test --line--> programs/writers.c, under the cache     A, B: two viewers of one owner
//!             --line--> programs/writers.c, without it          O: another process
//! ```
//!
//! Each step is answered before the next one is sent, so the order is known, and each read must give the current
//! contents of the file, which the test reads through the kernel. The viewers' counters show that reads were served;
//! that reads were not served is checked only while another process writes.
//!
//! The owner asks for leases, as `quinion run` does, and where there are none says so: then the steps are the same, and
//! so must be the reads through newly opened descriptors.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

mod disk;

use quinion::Cache;
use quinion::internals::arena::Validation;
use quinion_owner::internals::serve::Owner;
use quinion_owner::{CacheOwner, ServeRules, WithoutLease};
use quinion_run::Session;

const FILE_BYTES: usize = 300_000;

/// The program, compiled once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = PROGRAM.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("writers");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/writers.c");
        let status = Command::new("cc").args(["-O1", "-w", "-o"]).arg(&program).arg(&source).status();
        assert!(status.expect("a C compiler named cc").success());
        (folder, program)
    });
    path
}

/// A process that reads commands from a pipe.
struct Actor {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Actor {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }
    fn ask(&mut self, line: &str) -> String {
        writeln!(self.to, "{line}").unwrap();
        self.answer()
    }
    fn answer(&mut self) -> String {
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }
    /// Sends a command that must succeed.
    fn tell(&mut self, line: &str) {
        let answer = self.ask(line);
        assert!(
            !answer.starts_with("error") && answer != "what?" && !answer.is_empty(),
            "{line}: {answer:?}"
        );
    }
    fn open(&mut self, name: char, file: &Path, flags: i32) {
        self.tell(&format!("open {name} {} {flags}", file.display()));
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program's digest.
fn digest(bytes: &[u8]) -> String {
    let digest = bytes
        .iter()
        .fold(14695981039346656037u64, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(1099511628211));
    format!("{} {digest:016x}", bytes.len())
}

struct Fixture {
    folder: tempfile::TempDir,
    owner: Arc<CacheOwner>,
    session: Session,
}

impl Fixture {
    fn with(coherence: WithoutLease) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let rules = ServeRules { coherence, ..ServeRules::default() };
        let owner = Arc::new(CacheOwner::new(cache).with_rules(rules));
        let session = Session::start(owner.clone()).unwrap();
        Self { folder, owner, session }
    }
    fn new() -> Self {
        Self::with(WithoutLease::LeaveToKernel)
    }
    /// A fixture that serves files without a lease by a check of their times.
    fn by_times() -> Self {
        Self::with(WithoutLease::CheckTimes)
    }
    /// A file with times so old that a later write changes them.
    fn file(&self) -> PathBuf {
        let path = self.folder.path().join("file");
        let content: Vec<u8> = (0..FILE_BYTES).map(|i| (i / 512 + i % 7) as u8).collect();
        std::fs::write(&path, content).unwrap();
        rest();
        path
    }
    fn viewer(&self) -> Actor {
        let mut command = Command::new(program());
        self.session.point_to(&mut command);
        Actor::start(command)
    }
    fn other(&self) -> Actor {
        Actor::start(Command::new(program()))
    }
    fn served(&self) -> u64 {
        self.session.totals().bytes
    }
    /// Whether the kernel grants leases on files there: then much more can be promised.
    fn has_leases(&self, file: &Path) -> bool {
        self.owner.modes().iter().any(|mode| mode.path == file && mode.validation == Validation::Leased)
    }
    fn mode(&self, file: &Path) -> Validation {
        let mode = self.owner.modes().into_iter().find(|mode| mode.path == file);
        mode.expect("the file was attached").validation
    }
}

/// Longer than the age up to which a file's times cannot be trusted.
fn rest() {
    std::thread::sleep(Duration::from_millis(150));
}

/// Reads some parts of a file, which must all be right; returns whether all were served.
fn reads_right(fixture: &Fixture, actor: &mut Actor, name: char, file: &Path) -> bool {
    let truth = std::fs::read(file).unwrap();
    let before = fixture.served();
    let mut asked = 0;
    for (at, len) in [(0, 5000), (100_000, 70_000), (FILE_BYTES - 3000, 9000), (7, 1)] {
        let expected = &truth[at.min(truth.len())..(at + len).min(truth.len())];
        asked += expected.len() as u64;
        assert_eq!(actor.ask(&format!("pread {name} {len} {at}")), digest(expected), "{len} bytes at {at}");
    }
    fixture.served() - before == asked && asked > 0
}

/// Opens, reads and closes until the file is served; each read must be right.
fn is_served_again(fixture: &Fixture, actor: &mut Actor, file: &Path) {
    for _ in 0..3000 {
        actor.open('z', file, libc::O_RDONLY);
        let served = reads_right(fixture, actor, 'z', file);
        actor.tell("close z");
        if served {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{} is not served again", file.display());
}

#[test]
fn a_file_opened_to_read_and_write_is_the_kernels() {
    let fixture = Fixture::new();
    let (file, mut a) = (fixture.file(), fixture.viewer());
    a.open('a', &file, libc::O_RDWR);
    assert!(!reads_right(&fixture, &mut a, 'a', &file), "there is no guarantee that it does not change");
    a.tell("pwrite a 200 5000 4000");
    reads_right(&fixture, &mut a, 'a', &file);
    a.tell("close a");
    is_served_again(&fixture, &mut a, &file);
}

/// With coherence by times, positional reads are served, and writes are seen.
#[test]
fn a_file_opened_to_read_and_write_is_served_by_times_and_writes_are_read() {
    let fixture = Fixture::by_times();
    let (file, mut a) = (fixture.file(), fixture.viewer());
    a.open('a', &file, libc::O_RDWR);
    assert!(reads_right(&fixture, &mut a, 'a', &file), "no process has written");
    assert_eq!(fixture.mode(&file), Validation::CheckTimes);
    for byte in 1..20 {
        a.tell(&format!("pwrite a {byte} 5000 4000"));
        reads_right(&fixture, &mut a, 'a', &file);
    }
    rest();
    assert!(reads_right(&fixture, &mut a, 'a', &file), "it is long ago");
}

/// Reads of a writable descriptor use the kernel's offset, as writes do.
#[test]
fn a_write_goes_where_the_reads_before_it_ended() {
    for fixture in [Fixture::new(), Fixture::by_times()] {
        let (file, mut a, mut o) = (fixture.file(), fixture.viewer(), fixture.other());
        let twin = fixture.folder.path().join("twin");
        std::fs::copy(&file, &twin).unwrap();
        a.open('a', &file, libc::O_RDWR);
        o.open('a', &twin, libc::O_RDWR);
        for line in ["read a 5000", "write a 200 3000", "read a 777", "write a 201 100", "read a 4096"] {
            assert_eq!(a.ask(line), o.ask(line), "{line}");
        }
        assert_eq!(fixture.served(), 0, "its offset is the kernel's");
        assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(&twin).unwrap());
    }
}

#[test]
fn one_viewers_writes_are_read_by_the_other() {
    for write in ["pwrite b 200 9000 0", "write b 77 100", "ftruncate b 100100", "ftruncate b 500000"] {
        let fixture = Fixture::new();
        let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
        a.open('a', &file, libc::O_RDONLY);
        assert!(reads_right(&fixture, &mut a, 'a', &file));
        let has_leases = fixture.has_leases(&file);
        b.open('b', &file, libc::O_RDWR);
        assert!(!reads_right(&fixture, &mut a, 'a', &file), "a process has it open for writing");
        assert!(!reads_right(&fixture, &mut b, 'b', &file), "a process has it open for writing");
        b.tell(write);
        assert!(!reads_right(&fixture, &mut a, 'a', &file), "{write}: it is being written");
        b.tell(write);
        reads_right(&fixture, &mut a, 'a', &file);
        a.open('c', &file, libc::O_RDONLY);
        reads_right(&fixture, &mut a, 'c', &file);
        b.tell(write);
        reads_right(&fixture, &mut a, 'c', &file);
        b.tell("close b");
        rest();
        is_served_again(&fixture, &mut a, &file);
        assert_eq!(fixture.has_leases(&file), has_leases);
    }
}

/// A descriptor that can only write, or whose open truncates the file.
#[test]
fn an_open_only_to_write_is_noticed_too() {
    for (flags, write) in [
        (libc::O_WRONLY, "pwrite b 200 9000 0"),
        (libc::O_WRONLY | libc::O_APPEND, "write b 200 9000"),
        (libc::O_WRONLY | libc::O_TRUNC, "write b 200 9000"),
        (libc::O_RDONLY | libc::O_TRUNC, "close b"),
    ] {
        let fixture = Fixture::new();
        let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
        a.open('a', &file, libc::O_RDONLY);
        assert!(reads_right(&fixture, &mut a, 'a', &file));
        b.open('b', &file, flags);
        reads_right(&fixture, &mut a, 'a', &file);
        b.tell(write);
        reads_right(&fixture, &mut a, 'a', &file);
    }
}

#[test]
fn a_file_cut_by_its_name_is_cut() {
    let fixture = Fixture::new();
    let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
    a.open('a', &file, libc::O_RDONLY);
    assert!(reads_right(&fixture, &mut a, 'a', &file));
    b.tell(&format!("truncate {} 100500", file.display()));
    reads_right(&fixture, &mut a, 'a', &file);
    a.open('b', &file, libc::O_RDONLY);
    reads_right(&fixture, &mut a, 'b', &file);
}

/// 1. A reads by a lease.
/// 2. Another process opens the file for writing, which waits for the owner.
/// 3. It writes, piece by piece; A reads each.
/// 4. It closes the file, and the file is served again.
#[test]
fn another_processs_writes_are_read() {
    let fixture = Fixture::new();
    let (file, mut a, mut o) = (fixture.file(), fixture.viewer(), fixture.other());
    a.open('a', &file, libc::O_RDONLY);
    assert!(reads_right(&fixture, &mut a, 'a', &file));
    if !fixture.has_leases(&file) {
        return; // it is seen at the next open only
    }
    o.open('o', &file, libc::O_RDWR);
    for write in ["pwrite o 1 4096 0", "pwrite o 2 70000 99000", "ftruncate o 150000"] {
        o.tell(write);
        assert!(!reads_right(&fixture, &mut a, 'a', &file), "{write}: another process writes");
    }
    a.open('b', &file, libc::O_RDONLY);
    assert!(!reads_right(&fixture, &mut a, 'b', &file), "another process writes");
    o.tell("pwrite o 3 70000 99000");
    reads_right(&fixture, &mut a, 'b', &file);
    o.tell("close o");
    is_served_again(&fixture, &mut a, &file);
    o.tell(&format!("truncate {} 100500", file.display()));
    reads_right(&fixture, &mut a, 'b', &file);
    is_served_again(&fixture, &mut a, &file);
}

/// A has the file open for writing itself, so there is no lease, and the file is served by its times.
#[test]
fn another_processs_writes_are_read_by_a_viewer_that_can_write() {
    let fixture = Fixture::by_times();
    let (file, mut a, mut o) = (fixture.file(), fixture.viewer(), fixture.other());
    a.open('a', &file, libc::O_RDWR);
    assert!(reads_right(&fixture, &mut a, 'a', &file));
    o.open('o', &file, libc::O_RDWR);
    for write in ["pwrite o 1 4096 0", "pwrite o 2 70000 99000", "ftruncate o 150000"] {
        o.tell(write);
        reads_right(&fixture, &mut a, 'a', &file);
        rest();
        assert!(reads_right(&fixture, &mut a, 'a', &file), "{write}: it is long ago");
    }
}

#[test]
fn stores_to_mapped_memory_are_read() {
    let fixture = Fixture::new();
    let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
    a.open('a', &file, libc::O_RDONLY);
    assert!(reads_right(&fixture, &mut a, 'a', &file));
    b.open('b', &file, libc::O_RDWR);
    b.tell("map b 200000");
    b.tell("close b");
    for byte in 1..5 {
        b.tell(&format!("store {byte} 3000 4000"));
        assert!(!reads_right(&fixture, &mut a, 'a', &file), "stores are not seen coming");
        a.open('b', &file, libc::O_RDONLY);
        assert!(!reads_right(&fixture, &mut a, 'b', &file), "stores are not seen coming");
        a.tell("close b");
    }
    b.tell("unmap");
    if fixture.has_leases(&file) {
        is_served_again(&fixture, &mut a, &file);
    }
}

/// With a lease, an open for writing waits; an open that must not wait fails. Neither happens to a program under `run`,
/// whether it reads the file itself or another program does.
#[test]
fn a_viewers_open_for_writing_is_not_refused() {
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_WRONLY | libc::O_TRUNC] {
        let fixture = Fixture::new();
        let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
        for turn in 0..10 {
            a.open('a', &file, libc::O_RDONLY);
            reads_right(&fixture, &mut a, 'a', &file);
            let writer = if turn % 2 == 0 { &mut a } else { &mut b };
            writer.open('w', &file, flags | libc::O_NONBLOCK);
            writer.tell("pwrite w 99 300000 0");
            reads_right(&fixture, &mut a, 'a', &file);
            for actor in [&mut a, &mut b] {
                let _ = actor.ask("close w");
            }
            a.tell("close a");
        }
    }
}

/// Opens a file for writing and without waiting, while threads open and read it; prints how often that is refused.
const NONBLOCKING: &str = r"
import os, sys, threading
path = sys.argv[1]
with open(path, 'wb') as file: file.write(b'old' * 3000)
is_over, refused = threading.Event(), 0
def read():
    while not is_over.is_set():
        file = os.open(path, os.O_RDONLY)
        for _ in range(5): assert os.pread(file, 3, 3) == b'old'
        os.close(file)
readers = [threading.Thread(target=read) for _ in range(3)]
for thread in readers: thread.start()
for _ in range(300):
    try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError: refused += 1
is_over.set()
for thread in readers: thread.join()
print(refused)
";

/// 1. The owner is told of an open for writing, and gives its lease up.
/// 2. Before that open begins, another thread attaches the file anew.
#[test]
fn an_open_that_does_not_wait_is_not_refused_while_threads_attach_the_file() {
    let folder = disk::scratch();
    let mut command = disk::quinion();
    command
        .args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--", "python3", "-c"]);
    let output = command.arg(NONBLOCKING).arg(folder.path().join("file")).output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{output:?}");
}

/// 1. A's reads bring the file into the cache.
/// 2. B opens it to read and write, and does not write.
/// 3. B closes it, and A reads it again: no byte is read from the file twice.
#[test]
fn a_viewer_that_could_write_and_does_not_costs_no_pages() {
    let fixture = Fixture::new();
    let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
    a.open('a', &file, libc::O_RDONLY);
    assert!(reads_right(&fixture, &mut a, 'a', &file));
    let misses = fixture.session.totals().misses;
    assert!(misses > 0);
    b.open('b', &file, libc::O_RDWR);
    assert!(!reads_right(&fixture, &mut b, 'b', &file));
    assert!(!reads_right(&fixture, &mut a, 'a', &file));
    b.tell("close b");
    is_served_again(&fixture, &mut a, &file);
    assert_eq!(fixture.session.totals().misses, misses);
}

/// The file description stays open by another descriptor, or in a child that is not a viewer.
#[test]
fn a_description_that_others_have_too_writes() {
    let fixture = Fixture::new();
    let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
    a.open('a', &file, libc::O_RDONLY);
    assert!(reads_right(&fixture, &mut a, 'a', &file));
    b.open('b', &file, libc::O_RDWR);
    b.tell("dup b c");
    b.tell("close b");
    b.tell("pwrite c 200 9000 0");
    reads_right(&fixture, &mut a, 'a', &file);
    a.open('d', &file, libc::O_RDONLY);
    b.tell("pwrite c 201 9000 0");
    reads_right(&fixture, &mut a, 'd', &file);
    b.tell("close c");

    is_served_again(&fixture, &mut a, &file);
    a.open('e', &file, libc::O_RDONLY);
    b.open('b', &file, libc::O_RDWR);
    reads_right(&fixture, &mut a, 'e', &file);
    assert_eq!(b.ask("fork"), "0");
    b.tell("pwrite b 202 9000 0");
    reads_right(&fixture, &mut a, 'e', &file);
    b.tell("pwrite b 203 9000 0");
    a.open('f', &file, libc::O_RDONLY);
    reads_right(&fixture, &mut a, 'f', &file);
    let _ = writeln!(b.to, "exit");
    assert_eq!(b.answer(), "back");
}

/// Bytes written before a lock was taken are read under the lock, by leases and by times.
#[test]
fn bytes_written_before_a_lock_are_read_after_it() {
    for fixture in [Fixture::new(), Fixture::by_times()] {
        let (file, mut a, mut o) = (fixture.file(), fixture.viewer(), fixture.other());
        a.open('a', &file, libc::O_RDONLY);
        assert!(reads_right(&fixture, &mut a, 'a', &file));
        o.open('o', &file, libc::O_RDWR);
        for byte in 1..20 {
            o.tell(&format!("pwrite o {byte} 9000 3000"));
            a.tell("lock a");
            reads_right(&fixture, &mut a, 'a', &file);
        }
    }
}

/// A writer that dies counts as closed.
#[test]
fn a_writer_that_is_killed_is_through() {
    let fixture = Fixture::new();
    let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
    b.open('b', &file, libc::O_RDWR);
    b.tell("pwrite b 99 100 0");
    a.open('a', &file, libc::O_RDONLY);
    assert!(!reads_right(&fixture, &mut a, 'a', &file), "it is being written");
    drop(b);
    is_served_again(&fixture, &mut a, &file);
}

/// 1. A process writes, and forks.
/// 2. It ends, and the kernel still serves the file.
/// 3. Its child writes, as its very first action.
#[test]
fn a_child_whose_first_call_writes_is_seen_when_its_parent_has_ended() {
    let fixture = Fixture::new();
    let (file, mut a, mut b) = (fixture.file(), fixture.viewer(), fixture.viewer());
    b.open('b', &file, libc::O_RDWR);
    b.tell("pwrite b 99 100 0");
    let child = b.ask("orphan b 100 4096 0").parse().ok().and_then(rustix::process::Pid::from_raw).unwrap();
    let _ = writeln!(b.to, "exit");
    b.child.wait().unwrap();
    a.open('a', &file, libc::O_RDONLY);
    assert!(!reads_right(&fixture, &mut a, 'a', &file), "the child can write it");
    rustix::process::kill_process(child, rustix::process::Signal::USR1).unwrap();
    let written = b.answer();
    reads_right(&fixture, &mut a, 'a', &file);
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    assert_eq!(written, "4096");
}

/// Random steps of two viewers and another process, compared with the contents of the file.
#[test]
fn writes_of_any_process_in_any_order_are_read() {
    let mut state = 88172645463325252u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for round in 0..4 {
        let fixture = if round % 2 == 0 { Fixture::new() } else { Fixture::by_times() };
        let file = fixture.file();
        let mut actors = [fixture.viewer(), fixture.viewer(), fixture.other()];
        let mut open = [[false; 3]; 3];
        let truth = File::open(&file).unwrap();
        for _ in 0..400 {
            let (who, which) = (random(3) as usize, random(3) as usize);
            let (actor, name) = (&mut actors[who], ['a', 'b', 'c'][which]);
            if !open[who][which] {
                let flags = [libc::O_RDONLY, libc::O_RDONLY, libc::O_RDWR][which];
                actor.open(name, &file, flags);
                open[who][which] = true;
            } else if random(8) == 0 {
                actor.tell(&format!("close {name}"));
                open[who][which] = false;
            } else if which == 2 && random(3) == 0 {
                let (byte, len, at) = (random(256), random(20_000) + 1, random(FILE_BYTES as u64));
                actor.tell(&format!("pwrite {name} {byte} {len} {at}"));
            } else {
                let (len, at) = (random(50_000) as usize, random(FILE_BYTES as u64 + 100));
                let mut expected = vec![0; len];
                let bytes = truth.read_at(&mut expected, at).unwrap();
                assert_eq!(actor.ask(&format!("pread {name} {len} {at}")), digest(&expected[..bytes]));
            }
        }
    }
}

// ---- databases ----------------------------------------------------------------------------------------

fn turns(fixture: Option<&Fixture>, database: &Path) -> Actor {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/turns.py");
    let mut command = Command::new("python3");
    command.arg("-S").arg(script).arg(database);
    if let Some(fixture) = fixture {
        fixture.session.point_to(&mut command);
    }
    let mut actor = Actor::start(command);
    assert_eq!(actor.answer(), "ready");
    actor
}

/// Two sqlite processes write one database in turns, one of them served, and each sees all of the other's writes.
fn two_databases_in_turns(mode: &str) {
    let fixture = Fixture::new();
    let path = fixture.folder.path().join("database");
    let (mut outside, mut inside) = (turns(None, &path), turns(Some(&fixture), &path));
    assert_eq!(outside.ask(&format!("PRAGMA journal_mode = {mode}")), format!("[('{mode}',)]"));
    outside.ask("CREATE TABLE t(n INTEGER, text TEXT)");
    let grow = "INSERT INTO t SELECT random() % 1000, hex(randomblob(400)) FROM t LIMIT 500";
    outside.ask("INSERT INTO t VALUES (1, 'one')");
    for _ in 0..10 {
        outside.ask(grow);
    }
    let sum = "SELECT count(*), sum(n), sum(unicode(substr(text, 7, 1))), max(rowid) FROM t";
    rest();
    let before = fixture.served();
    assert_eq!(inside.ask(sum), outside.ask(sum));
    assert_eq!(inside.ask(sum), outside.ask(sum));
    assert_eq!(fixture.served(), before, "what is open for writing is the kernel's");
    for turn in 0..12 {
        let (writer, reader) = match turn % 3 {
            0 => (&mut inside, &mut outside),
            _ => (&mut outside, &mut inside),
        };
        writer.ask(&format!("UPDATE t SET n = n + {turn} WHERE rowid % 17 = {turn}"));
        writer.ask(grow);
        let (theirs, ours) = (writer.ask(sum), reader.ask(sum));
        assert_eq!(ours, theirs, "turn {turn}");
        if turn % 4 == 0 {
            rest();
            assert_eq!(inside.ask(sum), theirs, "turn {turn}, a while later");
        }
    }
    for actor in [&mut inside, &mut outside] {
        assert_eq!(actor.ask("PRAGMA integrity_check"), "[('ok',)]");
    }
}

#[test]
fn two_databases_in_turns_with_a_journal() {
    two_databases_in_turns("delete");
}

#[test]
fn two_databases_in_turns_with_a_log() {
    two_databases_in_turns("wal");
}

#[test]
fn the_report_says_how_changes_by_others_are_noticed() {
    let fixture = Fixture::new();
    let (file, report) = (fixture.file(), fixture.folder.path().join("report"));
    let mut lines = Command::new(env!("CARGO_BIN_EXE_quinion"));
    lines.args(["run", "--attach", "at-once", "--report", "json", "--report-file"]).arg(&report);
    let status = lines.args(["--", "cat"]).arg(&file).stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
    let text = std::fs::read_to_string(&report).unwrap();
    let at = text.find("\"others\":{\"lease\":").unwrap_or_else(|| panic!("no others in {text}"));
    let entry = format!("{{\"path\":\"{}\",\"mode\":\"", file.display());
    let mode = &text[at..][text[at..].find(&entry).expect(&text) + entry.len()..];
    assert!(mode.starts_with("lease\",\"why\":\"\"}") || mode.starts_with("kernel\",\"why\":\""), "{mode}");

    // A file that a process has open for writing is left to the kernel.
    let _writer = OpenOptions::new().append(true).open(&file).unwrap();
    let mut lines = Command::new(env!("CARGO_BIN_EXE_quinion"));
    lines.args(["run", "--attach", "at-once", "--report", "text", "--report-file"]).arg(&report);
    let status = lines.args(["--", "cat"]).arg(&file).stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
    if mode.starts_with("lease") {
        let text = std::fs::read_to_string(&report).unwrap();
        assert!(
            text.contains("1 left to the kernel") && text.contains("another process has the file open"),
            "{text}"
        );
    }
}

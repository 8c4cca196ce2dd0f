//! Forks: threads that fork while others become viewers, send descriptors to the cache, or give its addresses back. A
//! child has no descriptor of the cache's, reads what it would read without it, and waits for no thread that it lacks.
//!
//! ```text
//!   thread 1   opens FILE, reads it for the first time: its descriptor is sent to the owner by a connection
//!   thread 2   forks: the child lists its descriptors, reads FILE, compares
//! ```
#![cfg(target_os = "linux")]

use std::process::Command;

mod disk;
use disk::{Report, noise, plain, quinion, scratch};

/// What the storms have in common. The owner is stopped now and then, so that what it is asked takes a while.
const CHILD: &str = r"
import os, signal, sys, threading, time
owner, is_over = os.getppid(), threading.Event()
def pause():
    while not is_over.wait(0.002):
        os.kill(owner, signal.SIGSTOP)
        time.sleep(0.004)
        os.kill(owner, signal.SIGCONT)
pauser = threading.Thread(target=pause)
pauser.start()
def wrong(paths, whole):
    found = 0
    for number in os.listdir('/proc/self/fd'):
        try: link = os.readlink(f'/proc/self/fd/{number}')
        except OSError: continue
        found += link.startswith(('socket:', '/memfd:'))
    for path, data in zip(paths, whole):
        file = os.open(path, os.O_RDONLY)
        found += os.read(file, 5000) != data[:5000] or os.read(file, 5000) != data[5000:10000]
        found += os.pread(file, 300, 77) != data[77:377] or os.lseek(file, 0, 1) != 10000
        os.close(file)
    return found
def ends(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
";

/// Forbids itself and its descendants to duplicate descriptors of other processes, and executes the command.
const FORBIDDEN: &str = r"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 438), (6, 0, 0, 0x00050001), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack('HxxxxxxQ', 4, ctypes.addressof(code))) == 0
os.execvp(sys.argv[1], sys.argv[1:])
";

/// Threads read files that were just opened, so their descriptors are sent; others fork.
const SENDS: &str = r"
paths = sys.argv[1:]
whole = [open(path, 'rb').read() for path in paths]
found = []
def read():
    while not is_over.is_set(): found.append(compared())
def compared():
    bad = 0
    for path, data in zip(paths, whole):
        file = os.open(path, os.O_RDONLY)
        for at in range(0, len(data), 20000): bad += os.pread(file, 20000, at) != data[at:at + 20000]
        os.close(file)
    return bad
def fork():
    for _ in range(150):
        child = os.fork()
        if child == 0: os._exit(min(wrong(paths[:2], whole), 100))
        found.append(ends(child))
readers = [threading.Thread(target=read) for _ in range(3)]
forkers = [threading.Thread(target=fork) for _ in range(2)]
for thread in readers + forkers: thread.start()
for thread in forkers: thread.join()
is_over.set()
for thread in readers + [pauser]: thread.join()
print(sum(found))
";

/// In a child with threads one cuts a file that its parent is served, and so becomes a viewer to tell the owner; others
/// fork.
const JOINS: &str = r"
paths, victim = sys.argv[1:], sys.argv[1] + '.cut'
whole, found = [open(path, 'rb').read() for path in paths], 0
def grandchildren(found):
    for _ in range(4):
        child = os.fork()
        if child == 0: os._exit(min(wrong(paths[:1], whole), 100))
        found.append(ends(child))
for _ in range(60):
    with open(victim, 'wb') as file: file.write(b'old' * 3000)
    file = os.open(victim, os.O_RDONLY)
    os.pread(file, 100, 0), os.pread(file, 100, 100)
    child = os.fork()
    if child == 0:
        bad = []
        threads = [threading.Thread(target=grandchildren, args=(bad,)) for _ in range(2)]
        for thread in threads: thread.start()
        os.close(os.open(victim, os.O_RDONLY | os.O_TRUNC))
        for thread in threads: thread.join()
        os._exit(min(sum(bad), 100))
    found += ends(child) + len(os.pread(file, 100, 0))
    os.close(file)
is_over.set()
pauser.join()
print(found)
";

/// Runs a storm under `run`, started by `start`.
fn storm(start: &[&str], program: &str) -> Report {
    let folder = scratch();
    let report = folder.path().join("report");
    let paths: Vec<_> = (0..6).map(|file| folder.path().join(format!("file{file}"))).collect();
    for (seed, path) in paths.iter().enumerate() {
        std::fs::write(path, noise(100_123, seed as u64)).expect("the disk has room");
    }
    let mut command = Command::new("timeout");
    command.env_remove("QUINION_WAIT_MS"); // a fork may wait for the owner, and with it the thread that lets it go on
    command.args(["--signal=KILL", "300"]).args(start).arg(quinion().get_program());
    command.args(["run", "--attach", "at-once", "--memory", "64M", "--report", "json", "--report-file"]);
    command.arg(&report).args(["--", "python3", "-c", &format!("{CHILD}{program}")]).args(&paths);
    let output = command.output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n", "{output:?}");
    Report::read(&report)
}

/// 1. A thread begins to fork, and has seen that no other one sends a descriptor.
/// 2. Another one opens a connection to send one.
/// 3. The first forks: the child would keep the connection.
#[test]
fn children_that_are_forked_while_descriptors_are_sent_have_none_of_ours() {
    assert!(storm(&["python3", "-c", FORBIDDEN], SENDS).served() > 0);
}

/// A thread forks while another one becomes a viewer, by five descriptors, to tell the owner of a cut.
#[test]
fn children_that_are_forked_while_another_thread_joins_have_no_descriptor_of_ours() {
    assert!(storm(&[], JOINS).served() > 0);
}

/// 1. A thread limits the process's addresses, and waits with that for another one that holds SIGSEGV back.
/// 2. A third one forks; its child has not the first.
/// 3. The child limits its addresses.
const LIMITS: &str = r"
import ctypes, os, signal, sys, threading, time
libc, limits = ctypes.CDLL(None), (ctypes.c_ulong * 2)(1 << 40, 1 << 40)
file = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(50): assert len(os.pread(file, 4096, 8192)) == 4096
def limit(): libc.setrlimit(9, limits)
is_held, is_over = threading.Event(), threading.Event()
def hold():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGSEGV])
    is_held.set()
    is_over.wait()
threading.Thread(target=hold).start()
is_held.wait()
limiter, hung = threading.Thread(target=limit), 0
limiter.start()
children = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        limit()
        os._exit(len(os.pread(file, 4096, 8192)) != 4096)
    children.append(child)
    time.sleep(0.005)
limiter.join()
is_over.set()
for _ in range(300):
    children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
    if not children: break
    time.sleep(0.1)
for child in children: os.kill(child, signal.SIGKILL)
print(len(children), 'hang')
";

#[test]
fn a_child_waits_for_no_thread_of_its_parents_that_gives_addresses_back() {
    let folder = scratch();
    let file = folder.path().join("file");
    std::fs::write(&file, noise(300_123, 7)).expect("the disk has room");
    let mut command = quinion();
    command
        .args(["run", "--attach", "at-once", "--memory", "64M", "--report", "none", "--", "python3", "-c"]);
    let output = command.arg(LIMITS).arg(&file).output().expect("it starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 hang\n", "{output:?}");
    let alone = plain("python3").args(["-c", LIMITS]).arg(&file).output().expect("it starts");
    assert_eq!(alone.stdout, output.stdout, "{alone:?}");
}

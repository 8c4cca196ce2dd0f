//! Unreachable: programs that are started where the cache has ended, cannot be reached, or refuses them; and a `run`
//! that is stopped itself.
//!
//! Such a program runs without any message on its standard error and without waiting for the cache.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

mod disk;
use disk::{Ended, plain, quinion, scratch};

/// `quinion run` without a report.
fn run(words: &[&str]) -> Command {
    let mut command = quinion();
    command.args(["run", "--memory", "64M", "--attach", "at-once", "--report", "none", "--"]).args(words);
    command
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < end, "{what} did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[track_caller]
fn assert_silent(output: &Output, expected: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}

/// 1. A shell is started under `run`, and leaves another one behind that waits.
/// 2. `run` ends, and the cache with it.
/// 3. The second shell starts programs: at once, by `posix_spawn` in one of them, and by way of another name. (A
///    program that starts at the very moment of the end may still complain: the linker may find the object removed
///    between its check and its open.)
#[test]
fn programs_that_are_started_when_the_cache_has_ended_say_nothing() {
    let folder = scratch();
    let script = "
        ( exec </dev/null >out.new 2>/dev/null
          while kill -0 $PARENT; do sleep 0.01; done
          exec 2>said
          echo one; cat text; python3 spawn.py; env cat text
          mv out.new out ) &";
    let spawn = "
import os, sys
sys.stdout.flush()
os.waitpid(os.posix_spawnp('cat', ['cat', 'text'], os.environ), 0)
";
    std::fs::write(folder.path().join("text"), "two\n").expect("the disk has room");
    std::fs::write(folder.path().join("spawn.py"), spawn).expect("the disk has room");
    let script = format!("PARENT=$PPID; {script}");
    let output = run(&["sh", "-c", &script]).current_dir(folder.path()).output().expect("it starts");
    assert_silent(&output, "");
    let [out, said] = ["out", "said"].map(|name| folder.path().join(name));
    wait_for("the end", || out.exists());
    assert_eq!(std::fs::read_to_string(&out).expect("it is there"), "one\ntwo\ntwo\ntwo\n");
    assert_eq!(std::fs::read_to_string(&said).expect("it is there"), "");
}

/// A program may not open the object, or is in another process name space than the owner.
#[test]
fn programs_that_cannot_reach_the_cache_say_nothing() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root becomes another user");
    }
    let expected = std::fs::read_to_string("/etc/hostname").expect("it is there");
    let nobody = ["setpriv", "--reuid=65534", "--clear-groups", "cat", "/etc/hostname"];
    let apart = ["unshare", "--pid", "--fork", "--mount-proc", "cat", "/etc/hostname"];
    for words in [&nobody[..], &apart[..]] {
        // If the container forbids it, it is forbidden without the cache, too.
        let alone = Command::new(words[0]).args(&words[1..]).output().expect("it is there");
        if alone.status.success() {
            assert_silent(&run(words).output().expect("it starts"), &expected);
        }
    }
}

/// 1. A program is the first process of its name space, and reads a file for some time.
/// 2. Another program is the first of another name space, and so has the same number.
/// 3. Neither is served: the owner would mistake one for the other, and free what the first has, which then waits for
///    ever.
#[test]
fn programs_in_name_spaces_of_their_own_are_left_alone() {
    if !Command::new("unshare")
        .args(["--pid", "--fork", "true"])
        .status()
        .is_ok_and(|status| status.success())
    {
        return println!("SKIPPED: name spaces cannot be made here");
    }
    let folder = scratch();
    let [file, reader] = ["file", "reader.py"].map(|name| folder.path().join(name));
    let reads = "
import os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
for i in range(12):
    if i >= 6:
        file = os.open(sys.argv[1], os.O_RDONLY)
    print(len(os.pread(file, 65536, i * 65536)), flush=True)
    time.sleep(0.3 if i < 6 else 0.2)
";
    std::fs::write(&file, vec![b'x'; 3 << 20]).expect("the disk has room");
    std::fs::write(&reader, reads).expect("the disk has room");
    let apart = format!("unshare --pid --fork python3 {} {}", reader.display(), file.display());
    let script = format!("{apart} & sleep 0.7; {apart}; wait");
    let output = run(&["timeout", "30", "sh", "-c", &script]).output().expect("it starts");
    assert_silent(&output, &"65536\n".repeat(24));
}

/// A program with a limit on its address space has all of it for itself.
#[test]
fn a_program_with_few_addresses_has_them_all() {
    let script = "ulimit -v 1000000; exec python3 -c 'import mmap; print(len(mmap.mmap(-1, 500 << 20)))'";
    let mut limited = quinion();
    limited.args([
        "run", "--memory", "700M", "--attach", "at-once", "--report", "none", "--", "sh", "-c", script,
    ]);
    assert_silent(&limited.output().expect("it starts"), &format!("{}\n", 500 << 20));
}

/// A program that limits its own address space, or locks its memory, has it for itself, too; and so have its children.
#[test]
fn own_limits() {
    let folder = scratch();
    let file = folder.path().join("file");
    std::fs::write(&file, vec![b'x'; 300_000]).expect("it has room");
    let script = r"
import ctypes, mmap, os, resource, sys
def read():
    file = os.open(sys.argv[1], os.O_RDONLY)
    for _ in range(50): assert len(os.pread(file, 4096, 8192)) == 4096
    return file
libc = ctypes.CDLL(None, use_errno=True)
file = read()
if sys.argv[2] == 'child' and os.fork():
    status = os.wait()[1]
    read()
    print('child', status)
    sys.exit()
if sys.argv[2] == 'grandchild':
    libc.setuid(os.getuid()) # the process goes on without the cache, and so does its child
    if os.fork():
        print('grandchild', os.wait()[1])
        sys.exit()
if sys.argv[2] == 'locked':
    answer = libc.mlockall(1)
    locked = [int(line.split()[1]) for line in open('/proc/self/status') if 'VmLck' in line]
    print('locked', answer, locked[0] < 300_000)
else:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    print(len(mmap.mmap(-1, 500 << 20)))
assert len(os.pread(file, 4096, 8192)) == 4096
read()
";
    for (case, expected) in [
        ("self", "524288000\n"),
        ("child", "524288000\nchild 0\n"),
        ("grandchild", "524288000\ngrandchild 0\n"),
        ("locked", "locked 0 True\n"),
    ] {
        let mut limited = quinion();
        limited.args(["run", "--memory", "700M", "--attach", "at-once", "--report", "none", "--"]);
        limited.args(["python3", "-c", script]).arg(&file).arg(case);
        assert_silent(&limited.output().expect("it starts"), expected);
    }
}

/// A handler that interrupts a read forks, and the child returns from it into the read: it has not inherited the
/// mapping that it was reading from.
#[test]
fn forks_in_handlers() {
    let folder = scratch();
    let (source, program) = (folder.path().join("forks.c"), folder.path().join("forks"));
    std::fs::write(&source, FORKS).expect("it has room");
    let compiled = plain("cc").args(["-O1", "-w", "-o"]).arg(&program).arg(&source).status();
    assert!(compiled.expect("a C compiler named cc").success());
    let file = folder.path().join("file");
    std::fs::write(&file, (0..300_000u32).map(|at| (at / 7) as u8).collect::<Vec<_>>()).expect("it has room");
    for bytes in ["64", "4096", "200000"] {
        let mut run = quinion();
        run.args(["run", "--memory", "64M", "--attach", "at-once", "--report", "none", "--"]);
        let output = run.arg(&program).arg(&file).arg(bytes).output().expect("it starts");
        assert_silent(&output, "400 good, 0 bad, 0 killed\n");
    }
}

/// The program's AddressSanitizer runtime has to be the first of all loaded objects, and is not.
#[test]
fn a_program_that_watches_its_memory_runs_as_without_us() {
    let folder = scratch();
    let source = "
        #include <stdio.h>
        int main(int argc, char **argv) {
            FILE *file = fopen(argv[1], \"r\");
            char line[100];
            while (fgets(line, sizeof line, file)) fputs(line, stdout);
            return fclose(file);
        }";
    let [code, program, text] = ["watched.c", "watched", "text"].map(|name| folder.path().join(name));
    std::fs::write(&code, source).expect("the disk has room");
    std::fs::write(&text, "one\ntwo\n").expect("the disk has room");
    let mut compiler = Command::new("cc");
    let status = compiler.args(["-fsanitize=address", "-o"]).arg(&program).arg(&code).status();
    assert!(status.expect("a C compiler named cc").success());
    let [program, text] = [&program, &text].map(|path| path.to_str().expect("a plain name"));
    assert_silent(&run(&[program, text]).output().expect("it starts"), "one\ntwo\n");
    let child = format!("{program} {text}; true");
    assert_silent(&run(&["sh", "-c", &child]).output().expect("it starts"), "one\ntwo\n");
    let mut told = run(&[program, text]);
    told.env("ASAN_OPTIONS", "detect_leaks=0:help=1");
    let said = told.output().expect("it starts");
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("Available flags for AddressSanitizer"), "its user's options are heard: {said}");
}

/// Starts programs that read a file while the process that started it, the cache's owner, is stopped.
const STARTS_BESIDE_A_STOPPED_OWNER: &str = r"
import os, signal, subprocess, sys, time
path, owner = sys.argv[1], os.getppid()
os.kill(owner, signal.SIGSTOP)
begun = time.monotonic()
for _ in range(40):
    subprocess.run(['cmp', path, path + '.same'], check=True)
passed = time.monotonic() - begun
os.kill(owner, signal.SIGCONT)
print('all the same', 'at once' if passed < 60 else passed)
";

/// 1. The owner is stopped.
/// 2. Each new program waits for it for two to four and a half seconds, to be welcomed and to be answered. (The bound
///    is less than forty of these waits, and more than forty programs take on a busy machine.)
#[test]
fn a_stopped_owner_costs_new_programs_no_seconds() {
    let folder = scratch();
    let path = folder.path().join("file");
    for name in [&path, &path.with_extension("same")] {
        std::fs::write(name, vec![b'x'; 1 << 20]).expect("the disk has room");
    }
    let mut command = run(&["python3", "-c", STARTS_BESIDE_A_STOPPED_OWNER]);
    let output = command.arg(&path).env_remove("QUINION_WAIT_MS").output().expect("it starts");
    assert_silent(&output, "all the same at once\n");
}

/// 1. A program reads a file by a lease of the cache's.
/// 2. Both are stopped, as by Ctrl-Z.
/// 3. Another process opens the file for writing, and does not wait for the stopped processes.
/// 4. They continue, and the program reads what was written.
#[test]
fn a_writer_does_not_wait_for_a_stopped_run() {
    let folder = scratch();
    let (path, ready) = (folder.path().join("file"), folder.path().join("ready"));
    std::fs::write(&path, vec![b'a'; 1 << 20]).expect("the disk has room");
    let program = "
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
first = os.pread(fd, 8, 5000)
open(sys.argv[2], 'w').close()
end = time.monotonic() + 20
while os.pread(fd, 8, 5000) == first and time.monotonic() < end:
    time.sleep(0.01)
print(os.pread(fd, 8, 5000).decode())
";
    let [file, flag] = [&path, &ready].map(|path| path.to_str().expect("a plain name"));
    let mut command = run(&["python3", "-c", program, file, flag]);
    let child = command.process_group(0).stdout(Stdio::piped()).spawn().expect("it starts");
    let (process, mut child) = (child.id(), Ended(child));
    wait_for("the first read", || ready.exists());
    let group = rustix::process::Pid::from_raw(process as i32).expect("it is a process");
    let send = |signal| rustix::process::kill_process_group(group, signal).expect("it is our child");
    send(rustix::process::Signal::TSTP);
    wait_for("the stop", || state_of(process) == Some('T'));
    let begun = Instant::now();
    let mut writer = OpenOptions::new().write(true).open(&path).expect("it is ours");
    let waited = begun.elapsed();
    writer.write_all(&vec![b'b'; 1 << 20]).expect("the disk has room");
    drop(writer);
    send(rustix::process::Signal::CONT);
    let mut said = String::new();
    let mut out = child.0.stdout.take().expect("it is piped");
    std::io::Read::read_to_string(&mut out, &mut said).expect("it is text");
    assert_eq!((said.as_str(), child.wait().success()), ("bbbbbbbb\n", true));
    // The kernel breaks a lease after 45 seconds if its holder does not answer.
    assert!(waited < Duration::from_secs(40), "the writer waited for {waited:?}");
}

/// The letter of a process's state.
fn state_of(process: u32) -> Option<char> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

const FORKS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
static char got[300000], expected[300000];
static volatile int is_child, good, bad, killed;
static void on_alarm(int signal) {
    int status;
    if (is_child || good + bad + killed >= 400) return;
    pid_t child = fork();
    if (child == 0) { is_child = 1; return; }
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) killed++; else if (WEXITSTATUS(status)) bad++; else good++;
}
int main(int count, char **words) {
    int file = open(words[1], O_RDONLY);
    long bytes = strtol(words[2], 0, 10);
    for (int i = 0; i < 20; i++) pread(file, expected, sizeof expected, 0);
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval each = {{0, 700}, {0, 700}};
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &each, 0);
    for (unsigned state = 1; good + bad + killed < 400;) {
        state = state * 1103515245 + 12345;
        long at = (state >> 8) % (sizeof expected - bytes);
        if (pread(file, got, bytes, at) != bytes || memcmp(got, expected + at, bytes)) {
            if (is_child) _exit(3);
            bad++;
        }
        if (is_child) _exit(0);
    }
    printf("%d good, %d bad, %d killed\n", good, bad, killed);
    return 0;
}
"#;

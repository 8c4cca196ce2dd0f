//! Forks: threads that fork while others become viewers, send descriptors to the cache, or give its addresses back. A
//! child has no descriptor of the cache's, reads what it would read without it, and waits for no thread that it lacks.
//!
//! ```text
//!   thread 1   opens FILE, reads it for the first time: its descriptor is sent to the owner by a connection
//!   thread 2   forks: the child lists its descriptors, reads FILE, compares
//! ```
#![cfg(target_os = "linux")]

mod disk;
use disk::{noise, plain, quinion, scratch};

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

//! Hazards: what a system does to a program, done on purpose.
//!
//! System calls that a sandbox refuses, signals that interrupt, and the state of the process: its threads, its context
//! switches. A test that changes its whole process runs in one of its own; see [`in_a_process_of_its_own`].

#![allow(unsafe_code, reason = "system calls that no library wraps")]

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

const ROLE: &str = "QUINION_TEST_ROLE";

/// Called by the test that the runner started: runs `test`, the caller's own name, once more in another process, fails
/// if that fails, and returns false. In that process: returns true.
pub fn in_a_process_of_its_own(test: &str) -> bool {
    if std::env::var(ROLE).is_ok() {
        return true;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", test])
        .env(ROLE, "alone")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{test} in a process of its own: {out}{err}");
    assert!(out.contains("1 passed"), "{test} is this test's name");
    print!("{out}");
    false
}

/// The threads that are refused a system call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The calling thread, and those it starts from now on.
    Caller,
    /// Every thread of the process.
    Process,
}

/// From now on `call` fails with `error`.
pub fn refuse(call: libc::c_long, error: i32, scope: Scope) {
    let statement = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | error as u32, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let flags = if scope == Scope::Process { libc::SECCOMP_FILTER_FLAG_TSYNC } else { 0 };
    // SAFETY: the program outlives the call, which copies it; it refuses one system call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::SECCOMP_SET_MODE_FILTER;
        assert_eq!(libc::syscall(libc::SYS_seccomp, set, flags, &raw const program), 0);
    }
}

/// Threads of this process whose names begin with `name`.
pub fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.starts_with(name))
        })
        .count()
}

/// How often a thread of this process gave up its processor to wait, so far.
pub fn waits() -> i64 {
    // SAFETY: an all-zero record is valid, and the call fills it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage.ru_nvcsw
    }
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// How many signals of [`Target::hit`] were taken.
pub fn signals_taken() -> u64 {
    SIGNALS.load(Ordering::Relaxed)
}

/// Installs a handler that does not ask for interrupted system calls to be restarted.
pub fn install_interruption() {
    // SAFETY: the handler does one atomic addition; the record is valid when all else is zero.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count_signal as *const () as libc::sighandler_t;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// A thread that can be hit with a signal.
#[derive(Clone, Copy, Debug)]
pub struct Target(libc::pid_t);

impl Target {
    /// The calling thread.
    pub fn me() -> Self {
        // SAFETY: a plain system call.
        Self(unsafe { libc::gettid() })
    }
    /// Interrupts it. Nothing happens if it has ended.
    pub fn hit(self) {
        // SAFETY: a signal to a thread of this very process, for which there is a handler.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.0, libc::SIGUSR1) };
    }
}

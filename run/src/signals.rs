//! Signals, as the parent of a program in the same process group sees them.
//!
//! ```text
//!   ctrl-C             the terminal tells the whole group: the program has it already    not passed on
//!   kill US            the sender means the program and knows only this process          passed on
//!   timeout(1)         signals this process, and then the whole group, with itself       not passed on
//!   alarm(2)           set by this process's parent, which meant the program                passed on
//!   the program stops  this process stops too, so that the shell notices: see `stop.rs`
//! ```
//!
//! Caught are the signals whose default ends or stops a process. Not caught are SIGKILL and SIGSTOP, which cannot be,
//! and those that report a fault of this process's own code: SIGSEGV and its like, and SIGTRAP and SIGSYS.
//!
//! A signal to a group looks to each of its processes as one that was meant for it alone. But a process that signals
//! its own group must not be ended by that signal: it ignores it by then. So a signal was for the group, and the
//! program has it already, if an ancestor of the same group sent it, which ignores the signal now and did not when this
//! process was started. A script that says `trap '' TERM; kill $US` looks the same and means this process alone, so the
//! rule holds only for `timeout`. From any other group (`kill -- -GROUP`, `trap '' TERM; kill 0`) the program gets the
//! signal twice: one too many is better than none.
//!
//! Each signal is caught by a handler that writes it to a pipe; [`Signals::next`] reads the pipe. A signal that this
//! process inherited as ignored (`nohup`) stays ignored, here and in the program. One that it inherited as blocked is
//! caught all the same, and is blocked in the program: the program decides when it takes it.
//!
//! Some inherited things change here, and the program should get them as they were. Rust's runtime ignores SIGPIPE,
//! with its default restored in children, and opens a closed standard stream as `/dev/null`. This file unblocks
//! signals, and catches SIGCHLD even if that was ignored. So all of these are noted before `main`, and the program gets
//! them as this process did: see [`pass_on_inherited`].
#![allow(unsafe_code, reason = "handlers are installed by the C library's call")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// The signal that stops a background process that writes to a terminal, where that is asked for.
pub const BACKGROUND_WRITE: i32 = libc::SIGTTOU;

/// The signal that continues a stopped process.
pub const CONTINUE: i32 = libc::SIGCONT;

/// Signals by which people and shells end, stop and continue a program.
const CAUGHT: [i32; 12] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGCONT,
    libc::SIGWINCH,
    libc::SIGCHLD,
];

/// Other signals whose default ends a process. One that has a handler already, as a profiler's has, is left to that.
const CAUGHT_IF_DEFAULT: [i32; 9] = [
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
    libc::SIGXCPU,
    libc::SIGXFSZ,
    libc::SIGABRT,
];

/// The kernel sends these when a timer runs out that the process was started with.
const OF_TIMERS: [i32; 3] = [libc::SIGALRM, libc::SIGVTALRM, libc::SIGPROF];

/// The handler's end of the pipe; -1 while there is no reader.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// Which standard streams were closed at the start of this process.
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Whether SIGPIPE was ignored then.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);

/// Whether SIGCHLD was ignored then.
static CHILD_IGNORED: AtomicBool = AtomicBool::new(false);

/// The signals that were blocked then, as the kernel's set: bit 0 is signal 1.
static BLOCKED: AtomicU64 = AtomicU64::new(0);

/// The C library calls the functions of this section before `main`, where Rust's runtime begins.
// SAFETY: the section holds such functions, and this one needs nothing that the runtime makes.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note_inherited;

/// A signal that arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Signal {
    /// The signal's number.
    pub number: i32,
    /// Above 0 if the kernel sent it by itself: for a terminal, to the whole group.
    code: i32,
    /// The sending process, if a process sent the signal.
    sender: u32,
    /// The value that it was queued with, if there is one.
    value: u64,
}

/// The longest time between a sender's signal to this process and that to its group.
const BETWEEN: Duration = Duration::from_millis(5);

const ANCESTORS_MAX: usize = 16;

const SIGNAL_BYTES: usize = size_of::<Signal>();
const VALUE_AT: usize = SIGNAL_BYTES - size_of::<u64>();

impl Signal {
    /// Whether the program has to be told: a process other than the program sent it to this process alone, or a timer
    /// that this process was started with has run out.
    pub fn is_directed_at_run(&self, program: u32) -> bool {
        let is_of_timer = self.code > 0 && OF_TIMERS.contains(&self.number);
        let is_own = self.sender == std::process::id(); // an abort
        let is_sent = self.code <= 0 && self.sender != program && !is_own;
        self.number != libc::SIGCHLD && (is_sent || is_of_timer)
    }
    /// Whether this process continues because of that one.
    pub fn is_continue_by(&self, process: u32) -> bool {
        self.number == CONTINUE && self.sender == process
    }
    /// Passes it on to `program`, which may just have ended, with the value that came with it.
    pub fn pass_on(&self, program: u32) {
        if self.code == libc::SI_QUEUE {
            let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(self.value as usize) };
            // SAFETY: numbers only; the value is not looked at as an address here.
            unsafe { libc::sigqueue(program as i32, self.number, value) };
        } else {
            send(program, self.number);
        }
    }
    /// Whether it asks a process without a program to end.
    pub fn ends(&self) -> bool {
        matches!(self.number, libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT)
    }
    fn bit(&self) -> u64 {
        u32::try_from(self.number - 1).ok().and_then(|shift| 1u64.checked_shl(shift)).unwrap_or(0)
    }
    fn from_bytes(bytes: [u8; SIGNAL_BYTES]) -> Self {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        Self {
            number: i32::from_ne_bytes(word(0)),
            code: i32::from_ne_bytes(word(4)),
            sender: u32::from_ne_bytes(word(8)),
            value: u64::from_ne_bytes(std::array::from_fn(|at| bytes[VALUE_AT + at])),
        }
    }
    fn to_bytes(self) -> [u8; SIGNAL_BYTES] {
        let mut bytes = [0; SIGNAL_BYTES];
        bytes[..4].copy_from_slice(&self.number.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.code.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.sender.to_ne_bytes());
        bytes[VALUE_AT..].copy_from_slice(&self.value.to_ne_bytes());
        bytes
    }
}

/// The caught signals, while this lives; afterwards each has its former handler.
#[derive(Debug)]
pub struct Signals {
    reader: OwnedFd,
    writer: OwnedFd,
    before: Vec<(i32, PreviousAction)>,
    ancestors: Vec<Ancestor>,
}

/// An ancestor in the same process group.
#[derive(Clone, Copy, Debug)]
struct Ancestor {
    process: u32,
    /// The signals that it ignored when catching began.
    ignored: u64,
}

struct PreviousAction(libc::sigaction);

impl std::fmt::Debug for PreviousAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Action")
    }
}

impl Signals {
    /// Installs the handlers.
    pub fn catch() -> io::Result<Self> {
        use rustix::pipe::PipeFlags;
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // The handler must never wait. The reader may.
        rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK)?;
        PIPE.store(writer.as_raw_fd(), Ordering::Relaxed);
        let mut signals = Self { reader, writer, before: Vec::new(), ancestors: ancestors() };
        for number in CAUGHT {
            signals.catch_one(number, |_| true)?;
        }
        for number in CAUGHT_IF_DEFAULT.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX()) {
            signals.catch_one(number, |handler| handler == libc::SIG_DFL)?;
        }
        // Here alone: the other threads let this one take them.
        signals.before.iter().for_each(|&(number, _)| unblock(number));
        Ok(signals)
    }

    fn catch_one(&mut self, number: i32, is_wanted: impl Fn(libc::sighandler_t) -> bool) -> io::Result<()> {
        // SAFETY: all zeros is a value of this C structure; the call reads one and writes the other.
        unsafe {
            let (mut before, mut action): (libc::sigaction, libc::sigaction) =
                (std::mem::zeroed(), std::mem::zeroed());
            check(libc::sigaction(number, std::ptr::null(), &raw mut before))?;
            let is_ignored = before.sa_sigaction == libc::SIG_IGN && number != libc::SIGCHLD;
            if is_ignored || !is_wanted(before.sa_sigaction) {
                return Ok(());
            }
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            check(libc::sigaction(number, &raw const action, std::ptr::null_mut()))?;
            self.before.push((number, PreviousAction(before)));
        }
        Ok(())
    }

    /// Whether `signal` was for the group, and so for the program, too, as far as that is known: see the head of this
    /// file.
    pub fn was_for_group(&self, signal: &Signal, program: u32) -> bool {
        let sender = self.ancestors.iter().find(|ancestor| ancestor.process == signal.sender);
        let Some(sender) = sender.filter(|sender| sender.ignored & signal.bit() == 0) else { return false };
        if !is_timeout(sender.process) {
            return false;
        }
        if [sender.process, program].into_iter().any(|process| !is_of_our_group(process)) {
            return false;
        }
        std::thread::sleep(BETWEEN);
        status(sender.process).is_some_and(|(_, ignored)| ignored & signal.bit() != 0)
    }

    /// Waits for the next signal. `None` if something else came first; check that and call again.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut bytes = [0; SIGNAL_BYTES];
        match rustix::io::read(&self.reader, &mut bytes) {
            Ok(SIGNAL_BYTES) => Ok(Some(Signal::from_bytes(bytes))),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Signals {
    /// The descriptor that is readable when [`Signals::next`] need not wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (number, action) in &self.before {
            // SAFETY: the action is one that the kernel returned.
            unsafe { libc::sigaction(*number, &raw const action.0, std::ptr::null_mut()) };
        }
        // Only then may the number be another descriptor's.
        let ours = self.writer.as_raw_fd();
        let _ = PIPE.compare_exchange(ours, -1, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Whether a process has the name of the one command that signals its child and then its group.
fn is_timeout(process: u32) -> bool {
    std::fs::read(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim_ascii() == b"timeout")
}

/// Writes a signal to the pipe. A full pipe loses it: the reader is busy then.
extern "C" fn handler(number: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let pipe: RawFd = PIPE.load(Ordering::Relaxed);
    // SAFETY: the kernel hands over a filled structure; write and errno may be used in a handler.
    unsafe {
        let errno = *libc::__errno_location();
        let (code, sender) = ((*info).si_code, (*info).si_pid() as u32);
        let value = (*info).si_value().sival_ptr.addr() as u64;
        let signal = Signal { number, code, sender, value };
        let bytes = signal.to_bytes();
        libc::write(pipe, bytes.as_ptr().cast(), SIGNAL_BYTES);
        *libc::__errno_location() = errno;
    }
}

fn ancestors() -> Vec<Ancestor> {
    let mut found = Vec::new();
    let mut next = std::os::unix::process::parent_id();
    while found.len() < ANCESTORS_MAX && next != 0 && is_of_our_group(next) {
        let Some((parent, ignored)) = status(next) else { break };
        found.push(Ancestor { process: next, ignored });
        next = parent;
    }
    found
}

fn is_of_our_group(process: u32) -> bool {
    // SAFETY: numbers only.
    unsafe { libc::getpgid(process as i32) == libc::getpgrp() }
}

fn status(process: u32) -> Option<(u32, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Some((field("PPid:")?.parse().ok()?, u64::from_str_radix(field("SigIgn:")?, 16).ok()?))
}

fn check(answer: i32) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends a signal to a process that may just have ended.
pub fn send(process: u32, number: i32) {
    // SAFETY: numbers only.
    unsafe { libc::kill(process as i32, number) };
}

/// The signal by which a child has stopped since this was asked last.
pub fn stop_of(process: u32) -> Option<i32> {
    change_of(process, libc::WSTOPPED)
}

/// Whether a child has stopped since [`stop_of`] was asked last.
pub fn has_stopped(process: u32) -> bool {
    change_of(process, libc::WSTOPPED | libc::WNOWAIT).is_some()
}

/// Whether a child that had stopped was continued, and has not stopped again.
pub fn is_continued(process: u32) -> bool {
    change_of(process, libc::WCONTINUED | libc::WNOWAIT).is_some()
}

fn change_of(process: u32, which: i32) -> Option<i32> {
    // SAFETY: all zeros is a value of this C structure, and the call fills it.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let answer = libc::waitid(libc::P_PID, process, &raw mut info, which | libc::WNOHANG);
        (answer == 0 && info.si_pid() == process as i32).then(|| info.si_status())
    }
}

/// Stops this process until another process continues it.
pub fn stop_here() {
    // SAFETY: a number only.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Ends this process by a signal, without a second core file. Returns if the signal does not end processes.
pub fn die_by(number: i32) {
    // SAFETY: plain calls with structures of their own.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(number, libc::SIG_DFL);
        unblock(number);
        libc::raise(number);
    }
}

pub fn block(number: i32) {
    set_blocked(number, libc::SIG_BLOCK);
}

/// Unblocks a signal in this thread: it may have been blocked by the parent process.
fn unblock(number: i32) {
    set_blocked(number, libc::SIG_UNBLOCK);
}

fn set_blocked(number: i32, how: i32) {
    // SAFETY: all zeros is a value of this C structure; plain calls with it.
    unsafe {
        let mut only: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut only);
        libc::sigaddset(&raw mut only, number);
        libc::pthread_sigmask(how, &raw const only, std::ptr::null_mut());
    }
}

/// Notes what the runtime and this file change afterwards.
extern "C" fn note_inherited() {
    for (stream, closed) in (0..).zip(&CLOSED) {
        // SAFETY: numbers only; there is an errno for each thread, and it is not in use yet.
        let is_closed =
            unsafe { libc::fcntl(stream, libc::F_GETFD) == -1 && *libc::__errno_location() == libc::EBADF };
        closed.store(is_closed, Ordering::Relaxed);
    }
    PIPE_IGNORED.store(is_ignored(libc::SIGPIPE), Ordering::Relaxed);
    CHILD_IGNORED.store(is_ignored(libc::SIGCHLD), Ordering::Relaxed);
    BLOCKED.store(blocked(), Ordering::Relaxed);
}

fn is_ignored(number: i32) -> bool {
    // SAFETY: all zeros is a value of this C structure, and the call fills it.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(number, std::ptr::null(), &raw mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

/// The signals that this thread blocks, as the kernel's set.
fn blocked() -> u64 {
    // SAFETY: all zeros is a value of this C structure; the call fills it.
    unsafe {
        let mut now: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut now);
        let is_member = |&number: &i32| libc::sigismember(&raw const now, number) == 1;
        (1..=64).filter(is_member).fold(0, |set, number| set | 1 << (number - 1))
    }
}

/// Lets the program of `command` inherit what was changed here. Does nothing where nothing was changed: a program with
/// this hook is started by fork, which takes longer than a spawn.
pub fn pass_on_inherited(command: &mut Command) {
    let closed = [0, 1, 2].map(|stream: usize| CLOSED[stream].load(Ordering::Relaxed));
    let ignored = [(libc::SIGPIPE, &PIPE_IGNORED), (libc::SIGCHLD, &CHILD_IGNORED)]
        .map(|(number, is_ignored)| is_ignored.load(Ordering::Relaxed).then_some(number));
    let blocked = BLOCKED.load(Ordering::Relaxed);
    if ignored == [None; 2] && !closed.contains(&true) && blocked == 0 {
        return;
    }
    let restore = move || {
        for (stream, is_closed) in (0..).zip(closed) {
            if is_closed {
                // SAFETY: a number only; it is the runtime's /dev/null, and nothing of Rust writes to it before exec.
                unsafe { libc::close(stream) };
            }
        }
        for number in ignored.into_iter().flatten() {
            // SAFETY: ignoring a signal needs no handler. The library set its default before this is called.
            unsafe { libc::signal(number, libc::SIG_IGN) };
        }
        for number in (1..=64).filter(|number| blocked & 1 << (number - 1) != 0) {
            block(number);
        }
        Ok(())
    };
    // SAFETY: it makes system calls alone, which a child of a process with threads may do, and allocates nothing.
    unsafe { command.pre_exec(restore) };
}

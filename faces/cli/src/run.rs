//! `quinion run`: a program whose reads come from our cache.
//!
//! ```text
//!   quinion run -- grep -c the FILE
//!     |  owner: arena, device, threads that answer      LD_PRELOAD=/proc/US/fd/N     the embedded object
//!     |                                                 QUINION_VIEW=US:ARENA:CONTROL:TOKEN
//!     `--starts--> grep, a viewer, and every program it starts: viewers of their own
//! ```
//!
//! We are the program's parent and nothing else to it: it has our terminal,
//! our descriptors and our process group, gets the signals that are meant for
//! it, and its status becomes ours. Nothing is left on a disk: the object lies
//! in a sealed memory file that the programs load by way of `/proc`.
//!
//! A program that cannot be served (static, set-uid, another machine's) runs as
//! it would without us, and the report says why.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;

use quinion::HotFile;
use quinion::serve::{Owner, Service, ViewerTotals, WORKERS};

use crate::report::Form;

mod live;
mod program;
mod report;
mod signals;

use live::{Live, Look};
pub use live::{MEND, mend};
pub use program::Kind;
pub use report::{OwnerNumbers, RunReport};
use signals::Signals;

/// The interposer; empty where there is none.
static PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// What `quinion run` was asked to do.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Whether to report at the end, and how.
    pub report: Option<Form>,
    /// Where to report; standard error if `None`.
    pub report_file: Option<PathBuf>,
    /// Whether to show on the terminal, while the program runs, what the cache does.
    pub live: bool,
    /// The program and its arguments.
    pub program: Vec<OsString>,
}

/// What a run can ask of whoever made the owner.
pub trait Numbers: Sync {
    /// What the owner did so far.
    fn numbers(&self) -> OwnerNumbers;
    /// The files that are read most, hottest first, at most `most`; none if nobody knows.
    fn hottest(&self, _most: usize) -> Vec<HotFile> {
        Vec::new()
    }
}

impl<F: Fn() -> OwnerNumbers + Sync> Numbers for F {
    fn numbers(&self) -> OwnerNumbers {
        self()
    }
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The program ended with this status, or could not be started (126, 127).
    Status(i32),
    /// A signal ended the program.
    Signal(i32),
}

/// The status of a program that is there but cannot be started.
pub const CANNOT_START: i32 = 126;
/// The status of a program that is not there.
pub const NOT_FOUND: i32 = 127;

impl Ended {
    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Status(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Status(1), // no third way is known
        }
    }

    /// Ends this process the same way: with that status, or by that signal.
    pub fn leave(self) -> ! {
        match self {
            Self::Status(status) => std::process::exit(status),
            Self::Signal(signal) => {
                signals::die_by(signal);
                std::process::exit(128 + signal)
            }
        }
    }
}

/// Runs the program with `owner` as the owner of what it views, to its end. `numbers` is asked for the owner's
/// numbers: afterwards, and while the program runs if somebody watches.
///
/// # Errors
/// If the owner's side cannot be set up, or the report cannot be written. That a program cannot be started is said
/// on standard error and in the result.
pub fn run(options: &RunOptions, owner: Arc<dyn Owner>, numbers: &impl Numbers) -> io::Result<Ended> {
    let (name, arguments) = options.program.split_first().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "no program is named; say `quinion run -- PROGRAM ARGS`")
    })?;
    let kind = program::look_at(name);
    let session = Session::start(owner)?;
    let signals = Signals::catch()?;

    let mut command = Command::new(name);
    command.args(arguments);
    if kind.may_be_told() {
        session.point_to(&mut command);
    }
    let ended = std::thread::scope(|scope| {
        let look = |files: usize| Look {
            totals: session.totals(),
            stats: session.owner.arena().stats(),
            owner: numbers.numbers(),
            hottest: numbers.hottest(files),
        };
        let live = options.live.then(|| Live::start(scope, title(&options.program), look)).flatten();
        match command.spawn() {
            Ok(child) => wait(child, &signals, live.as_ref()).map(Ended::of),
            Err(error) => {
                drop(live); // the message stays
                Ok(cannot_start(name, &error))
            }
        }
    })?;

    // From here on a signal is meant for us.
    drop(signals);
    let stats = session.owner.arena().stats();
    let totals = session.stop();
    if let Some(form) = options.report {
        let report = RunReport {
            program: &options.program,
            ended,
            kind: &kind,
            totals,
            stats,
            owner: numbers.numbers(),
        };
        report.write(form, options.report_file.as_deref())?;
    }
    Ok(ended)
}

/// A cache that programs can be pointed to, while this lives.
#[derive(Debug)]
pub struct Session {
    service: Service,
    object: OwnedFd,
    owner: Arc<dyn Owner>,
}

impl Session {
    /// Starts to answer viewers of `owner`'s cache.
    pub fn start(owner: Arc<dyn Owner>) -> io::Result<Self> {
        let service = Service::start(Arc::clone(&owner), WORKERS)?;
        Ok(Self { service, object: preload_file()?, owner })
    }

    /// Lets the program of `command`, once started, view the cache. Objects that are preloaded already stay so,
    /// behind ours.
    pub fn point_to(&self, command: &mut Command) {
        if PRELOAD.is_empty() {
            return;
        }
        let (us, arena) = (std::process::id(), self.owner.arena());
        let mut preload = OsString::from(format!("/proc/{us}/fd/{}", self.object.as_raw_fd()));
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        let (data, control) = (arena.arena_fd().as_raw_fd(), arena.control_fd().as_raw_fd());
        command.env("LD_PRELOAD", preload);
        command.env("QUINION_VIEW", format!("{us}:{data}:{control}:{:x}", arena.token()));
    }

    /// What viewers did so far.
    pub fn totals(&self) -> ViewerTotals {
        self.service.totals()
    }

    /// Ends the service; viewers that still live go on by the kernel.
    pub fn stop(self) -> ViewerTotals {
        self.service.stop()
    }
}

/// The object as a file that nobody can change and that is gone when we are.
fn preload_file() -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, Mode, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("quinion-preload", flags)?;
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::XUSR)?;
    let mut rest = PRELOAD;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

fn cannot_start(name: &OsString, error: &io::Error) -> Ended {
    let status = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_START };
    let hint = if status == NOT_FOUND {
        "check the name, or give its path"
    } else {
        "check that it may be executed"
    };
    eprintln!("quinion: cannot start {}: {error}; {hint}", name.display());
    Ended::Status(status)
}

/// The program and its arguments on one line.
fn title(program: &[OsString]) -> String {
    program.iter().map(|word| word.to_string_lossy().escape_debug().to_string()).collect::<Vec<_>>().join(" ")
}

/// Waits for the program, passing signals on and stopping when it stops.
fn wait(mut child: Child, signals: &Signals, live: Option<&Live<'_>>) -> io::Result<ExitStatus> {
    let process = child.id();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if signals::has_stopped(process) {
            // Whoever started us sees us stop with the program, and continues both.
            live.inspect(|live| live.hide());
            signals::stop_here();
            signals::send(process, signals::CONTINUE);
            live.inspect(|live| live.show());
        }
        if let Some(signal) = signals.next()?
            && signal.is_for_us_alone(process)
        {
            signals::send(process, signal.number);
        }
    }
}

//! `quinion run`: a program whose reads come from the owner's cache.
//!
//! ```text
//!   quinion run -- grep -c the FILE
//!     |  owner: arena, device, threads that answer      LD_PRELOAD=FILE     the embedded object
//!     |  plan of the C library's functions              QUINION_VIEW=TOKEN:PLAN:SOCKET
//!     `--starts--> grep, a viewer, and every program it starts: viewers of their own
//! ```
//!
//! The command is the program's parent and nothing else to it: the program has its terminal, descriptors and process
//! group, gets the signals that are meant for it, and its status becomes the command's. Nothing of the program is
//! changed on a disk: the object is a file in a folder of the user's that no other user can write (`object.rs`,
//! `user_folder.rs`). Plans and verdicts about files are kept for the next run (`plan_cache.rs`).
//!
//! With `--keep` the owner is another process, which stays for the next run (`keep.rs`).
//!
//! In a control group with a limit the cache has half of that at most, and shrinks under pressure (`group.rs`).
//!
//! A program that cannot be served (static, set-uid, another machine's) runs as without the command, and the report
//! says why.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use quinion::internals::arena::ArenaStats;
use quinion_owner::HotFile;
use quinion_owner::internals::serve::{
    Owner, Service, ServiceOptions, SyscallAuditor, ViewerTotals, WORKERS,
};
use quinion_owner::internals::sys::serial_queues::SerialQueues;

use crate::elf::Elf;
use crate::report::Form;

pub mod elf;
pub mod examine;
pub mod group;
pub mod keep;
pub mod live;
mod modes;
mod object;
pub mod open_files;
pub mod plan;
mod plan_cache;
mod planned;
mod program;
pub mod report;
mod run_notes;
mod run_numbers;
mod run_report;
mod signals;
mod socket;
mod stop;
pub mod syscall_scan;
mod user_folder;

use keep::{CacheRequest, JoinedCache, Message};
pub use live::{HotFileSize, REPAIR_VERB, repair_terminal};
use live::{Live, RunSample};
use plan::Plan;
use plan_cache::PlanCache;
pub use planned::Planned;
pub use program::{Kind, Obstacle, chain_of, classify, obstacle, quoted};
pub use run_notes::leases_files_of_others;
pub use run_numbers::{Interception, KeptRunNumbers, OwnerNumbers, RunReport};
use signals::Signals;
use socket::Socket;
pub use stop::{WATCH_STOP_VERB, watch_stop};
use user_folder::Folder;

/// The interposer; empty where there is none.
pub static PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/preload.so"));

/// The options of `quinion run`.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Whether to report at the end, and how.
    pub report: Option<Form>,
    /// Where to report; standard error if `None`, standard output if `-`.
    pub report_file: Option<PathBuf>,
    /// How the program's calls reach the interposer.
    pub intercept: Intercept,
    /// Whether to show on the terminal, while the program runs, what the cache does.
    pub live: bool,
    /// The program and its arguments.
    pub program: Vec<OsString>,
}

impl RunOptions {
    /// Checks the options, as far as that can be done before the start.
    fn check(&self) -> io::Result<()> {
        let file = self.report.and(self.report_file.as_deref());
        file.map_or(Ok(()), run_report::can_be_written)
    }
}

/// How a program's calls reach the interposer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Intercept {
    /// Calls are intercepted by symbol name, and by patching the C library where that is safe.
    #[default]
    Auto,
    /// Calls are intercepted by symbol name alone: the kernel gets the calls that the C library makes inside itself.
    Plt,
    /// No call is intercepted.
    Off,
}

impl Intercept {
    /// The option's word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Intercept::Auto => "auto",
            Intercept::Plt => "plt",
            Intercept::Off => "off",
        }
    }
}

/// The owner's numbers, as a run asks for them.
pub trait OwnerNumbersSource {
    /// The owner's numbers so far.
    fn numbers(&self) -> OwnerNumbers;
    /// The files that are read most, hottest first, at most `most`; none if that is not known.
    fn hottest(&self, _most: usize) -> Vec<HotFile> {
        Vec::new()
    }
}

impl<F: Fn() -> OwnerNumbers> OwnerNumbersSource for F {
    fn numbers(&self) -> OwnerNumbers {
        self()
    }
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunEnd {
    /// The program ended with this status, or could not be started (126, 127).
    Status(i32),
    /// A signal ended the program.
    Signal(i32),
}

/// The status of a program that exists but cannot be started.
pub const CANNOT_START: i32 = 126;
/// The status of a program that does not exist.
pub const NOT_FOUND: i32 = 127;

impl RunEnd {
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

/// Runs the program to its end, with `owner` as the owner of its cache, patched as `planning` says. `numbers` is asked
/// for the owner's numbers: afterwards, and while the program runs if the live display is on.
///
/// # Errors
/// The owner's side cannot be set up, or it is seen before the start that the report cannot be written; the program is
/// not started then. Afterwards the program's status counts: a report that cannot be written is only said on standard
/// error. That a program cannot be started is said there, too, and in the result.
pub fn run(
    options: &RunOptions,
    planning: Planning,
    owner: Arc<dyn Owner>,
    numbers: &(impl OwnerNumbersSource + Sync),
) -> io::Result<RunEnd> {
    options.check()?;
    let mut session = open_files::needed_for("the cache's service", Session::start(owner))?;
    let planned = planning.end(|plan| session.patch_by(plan));
    let sample = |files: usize| RunSample {
        totals: session.totals(),
        stats: session.stats(),
        owner: numbers.numbers(),
        hottest: numbers.hottest(files).into_iter().map(HotFileSize::from).collect(),
    };
    let before_stop = || session.owner.about_to_stop();
    let (ended, kind) = match run_program(options, |command| session.point_to(command), sample, before_stop)?
    {
        ProgramEnd::ToItsEnd(ended, kind) => (ended, kind),
        ProgramEnd::Not(ended) => return Ok(ended),
    };
    let (stats, owner) = (session.stats(), Arc::clone(&session.owner));
    let totals = session.stop();
    if let Some(form) = options.report {
        let intercept = Interception { how: options.intercept, planned };
        let report = RunReport {
            program: &options.program,
            ended,
            kind: &kind,
            intercept: &intercept,
            totals,
            stats,
            owner: numbers.numbers(),
            modes: owner.modes(),
            kept: None,
        };
        write_report(&report, form, options.report_file.as_deref());
    }
    Ok(ended)
}

/// Runs the program in the kept cache that is wanted, to its end. The cache is started if it is not there.
///
/// # Errors
/// Those of [`JoinedCache::join`]; or it is seen before the start that the report cannot be written. If the cache has
/// ended, the report says so.
pub fn run_kept(options: &RunOptions, wanted: &CacheRequest) -> io::Result<RunEnd> {
    if let Err(ended) = check_startable(options) {
        return Ok(ended);
    }
    options.check()?;
    let planning = Planning::begin(options)?;
    let mut kept = open_files::needed_for("the way to the cache that stays", JoinedCache::join(wanted))?;
    let planned = planning.end(|plan| kept.patch_by(plan));
    let kept = Mutex::new(kept);
    let numbers = |files| lock(&kept).numbers(files).ok().flatten();
    let sample = |files| {
        let keep::KeptCacheNumbers { totals, stats, owner, hottest, .. } = numbers(files).unwrap_or_default();
        RunSample { totals, stats, owner, hottest }
    };
    // The process of a kept cache is not stopped with this one.
    let (ended, kind) = match run_program(options, |command| lock(&kept).point_to(command), sample, || ())? {
        ProgramEnd::ToItsEnd(ended, kind) => (ended, kind),
        ProgramEnd::Not(ended) => return Ok(ended),
    };
    if let Some(form) = options.report {
        let mut kept = lock(&kept);
        let asked = kept.numbers(0);
        let has_ended = match &asked {
            Ok(Some(_)) => kept.has_ended(), // its last word may have been there
            Ok(None) => true,
            Err(_) => false,
        };
        let numbers = asked.ok().flatten();
        let is_known = numbers.is_some();
        let keep::KeptCacheNumbers { totals, stats, owner, others, modes, hottest: _ } =
            numbers.unwrap_or_default();
        let intercept = Interception { how: options.intercept, planned };
        let in_kept = KeptRunNumbers { name: kept.name(), others, is_known, has_ended };
        let report = RunReport {
            program: &options.program,
            ended,
            kind: &kind,
            intercept: &intercept,
            totals,
            stats,
            owner,
            modes,
            kept: Some(in_kept),
        };
        write_report(&report, form, options.report_file.as_deref());
    }
    Ok(ended)
}

/// Writes the report. A failure must not replace the program's status, or the signal that ended it; so it is only
/// reported, and lost if standard error fails, too.
fn write_report(report: &RunReport<'_>, form: Form, file: Option<&Path>) {
    if let Err(error) = report.write(form, file) {
        complain(&error);
    }
}

/// Writes a line to standard error; a missing reader is no reason to panic.
fn complain(wrong: &dyn Display) {
    let _ = writeln!(io::stderr(), "quinion: {wrong}");
}

/// A plan of the patches in the program's C library, made beside other work, such as building the cache.
#[derive(Debug)]
pub struct Planning(Option<JoinHandle<Result<Planned, String>>>);

impl Planning {
    /// Begins, if the program is to be patched.
    ///
    /// # Errors
    /// There can be no further thread, as under a small `ulimit -d`: the cache has no memory then either.
    pub fn begin(options: &RunOptions) -> io::Result<Self> {
        let name = options.program.first().filter(|_| options.intercept == Intercept::Auto).cloned();
        let begin = |name: OsString| {
            std::thread::Builder::new().name("quinion-plan".into()).spawn(move || {
                let linker = program::linker_of(&name);
                Planned::of(linker.as_deref().unwrap_or(Path::new(LINKER)))
            })
        };
        name.map(begin).transpose().map(Self).map_err(|error| {
            let remedy = open_files::THREAD_REMEDY;
            io::Error::new(error.kind(), format!("cannot start a thread of `run`'s own: {error}; {remedy}"))
        })
    }

    /// Waits for the plan, and passes it to `hand`, which shows it to programs. The error says why there is none.
    fn end(self, hand: impl FnOnce(&[u8]) -> io::Result<()>) -> Option<Result<Planned, String>> {
        let defect =
            "planning the patches panicked; this is a defect of Quinion: report it, and use --intercept plt";
        let plan = self.0?.join().unwrap_or_else(|_| Err(defect.into()));
        Some(plan.and_then(|plan| hand(&plan.bytes).map(|()| plan).map_err(|error| error.to_string())))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks whether the program can be started, before anything is made for it. If it cannot, that is said on standard
/// error, and the error is how the command ends.
pub fn check_startable(options: &RunOptions) -> Result<(), RunEnd> {
    let program = &options.program;
    let found = program::obstacle(program).or_else(|| program::linker_missing(program));
    found.map_or(Ok(()), |found| Err(cannot_start(program, &found)))
}

enum ProgramEnd {
    ToItsEnd(RunEnd, Kind),
    Not(RunEnd),
}

/// Starts the program, which `point` points to a cache, and waits for its end; meanwhile the display shows what
/// `sample` returns, if it is wanted. Whenever the program stops, this process calls `before_stop` and stops with it.
fn run_program(
    options: &RunOptions,
    point: impl FnOnce(&mut Command),
    sample: impl Fn(usize) -> RunSample + Send + Sync,
    before_stop: impl Fn(),
) -> io::Result<ProgramEnd> {
    let (name, arguments) = options.program.split_first().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "no program is named; say `quinion run -- PROGRAM ARGS`")
    })?;
    let kind = program::classify(name);
    // Until this is dropped a signal is meant for the program.
    let signals = open_files::needed_for("the catching of signals", Signals::catch())?;
    let mut command = Command::new(name);
    command.args(arguments);
    if kind.may_be_intercepted() && options.intercept != Intercept::Off {
        point(&mut command);
    }
    signals::pass_on_inherited(&mut command);
    std::thread::scope(|scope| {
        let live = options.live.then(|| Live::start(scope, title(&options.program), &sample)).flatten();
        match command.spawn() {
            Ok(child) => {
                let ended = wait(child, &signals, live.as_ref(), &before_stop)?;
                Ok(ProgramEnd::ToItsEnd(RunEnd::of(ended), kind))
            }
            Err(error) => {
                drop(live); // the message stays
                Ok(ProgramEnd::Not(cannot_start(&options.program, &Obstacle::of(&options.program, &error))))
            }
        }
    })
}

/// The dynamic linker of programs that were not looked at.
pub const LINKER: &str = "/lib64/ld-linux-x86-64.so.2";

/// A plan for the C library that `linker` loads. The error says why there is none.
pub fn plan_for(linker: &Path) -> Result<Plan, String> {
    let library = plan::library_of(linker)
        .ok_or_else(|| format!("no C library lies beside the dynamic linker {}", linker.display()))?;
    let read = |wrong: &dyn std::fmt::Display| format!("{}: {wrong}", library.display());
    let elf = Elf::open(&library).map_err(|error| read(&error))?;
    let object = Elf::parse(PRELOAD.to_vec()).map_err(|error| format!("our own object: {error}"))?;
    Plan::make(&elf, &object).map_err(|none| read(&none))
}

/// The addresses of a cache, as the object in a program gets them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheLocation {
    process: u32,
    object: PathBuf,
    socket: PathBuf,
    token: u64,
    /// The number of the plan for the program's C library; `None` if there is none.
    plan: Option<u32>,
}

impl CacheLocation {
    /// Lets the program of `command`, once started, view the cache, and count for that run if there is one. Other
    /// preloaded objects stay so, before this one.
    pub fn point_to(&self, command: &mut Command, run: Option<u64>) {
        if PRELOAD.is_empty() {
            return;
        }
        let Self { process: _, object, socket, token, plan } = self;
        command.env("LD_PRELOAD", preload(object, std::env::var_os("LD_PRELOAD")));
        command.env("ASAN_OPTIONS", asan_options(std::env::var_os("ASAN_OPTIONS")));
        let plan = plan.map_or_else(|| "-".to_owned(), |plan| plan.to_string());
        let mut view = OsString::from(format!("{token:x}:{plan}:"));
        view.push(socket);
        command.env("QUINION_VIEW", view);
        match filters_of_system_calls() {
            Some(filters) => command.env("QUINION_FILTERS", filters.to_string()),
            None => command.env_remove("QUINION_FILTERS"),
        };
        match run {
            Some(run) => command.env("QUINION_RUN", run.to_string()),
            None => command.env_remove("QUINION_RUN"),
        };
    }

    /// The owner's process.
    pub fn process(&self) -> u32 {
        self.process
    }

    fn put(&self, message: Message) -> Message {
        let message = message.number("process", self.process.into()).number("token", self.token);
        message.bytes("socket", self.socket.as_os_str().as_bytes())
    }

    fn of(message: &Message, object: &Path) -> Option<Self> {
        let process = u32::try_from(message.number_of("process")?).ok()?;
        let socket = OsString::from_vec(message.bytes_of("socket")?);
        let (object, token) = (object.to_owned(), message.number_of("token")?);
        Some(Self { process, object, socket: socket.into(), token, plan: None })
    }
}

/// The number of filters of system calls of this process, and so of all that it starts. A program that finds more than
/// the run has is served nothing. `None` if it is not known.
fn filters_of_system_calls() -> Option<u64> {
    let status = std::fs::read("/proc/self/status").ok()?;
    let status = String::from_utf8_lossy(&status);
    let value =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
    // Kernels before 5.9 say whether there are filters, and not how many.
    value("Seccomp_filters:").or_else(|| (value("Seccomp:").unwrap_or(0) == 0).then_some(0))
}

/// The value of LD_PRELOAD: the user's objects first, since a function that they wrap is theirs first, as without the
/// command. In a run in a run the object may be among them already.
fn preload(object: &Path, others: Option<OsString>) -> OsString {
    let mut all = OsString::new();
    let others = others.unwrap_or_default();
    let is_separator = |byte: &u8| matches!(byte, b':' | b' ');
    for other in others.as_bytes().split(is_separator).filter(|other| !other.is_empty()) {
        if other != object.as_os_str().as_bytes() {
            all.push(OsStr::from_bytes(other));
            all.push(":");
        }
    }
    all.push(object);
    all
}

/// The options of AddressSanitizer's runtime besides the user's `options`. It ends a program if any object was loaded
/// before it, as this one is; the order makes no difference to either. A child of the program may be built with it, so
/// all get the options.
fn asan_options(options: Option<OsString>) -> OsString {
    let mut all = options.filter(|options| !options.is_empty()).unwrap_or_default();
    if !all.is_empty() {
        all.push(":");
    }
    all.push("verify_asan_link_order=0");
    all
}

/// A cache that programs can be pointed to, while this lives.
#[derive(Debug)]
pub struct Session {
    /// Answers viewers, and tells runs apart.
    service: Service,
    socket: Socket,
    object: PathBuf,
    plan: Option<u32>,
    owner: Arc<dyn Owner>,
}

impl Session {
    /// Starts to answer viewers of `owner`'s cache.
    pub fn start(owner: Arc<dyn Owner>) -> io::Result<Self> {
        Self::start_in(owner, Folder::of_user()?)
    }

    /// Like `start`, in the user's `folder`: programs load the object from there and connect there, and it remembers
    /// earlier runs.
    fn start_in(owner: Arc<dyn Owner>, folder: Folder) -> io::Result<Self> {
        let (socket, listener) = Socket::listen_in(folder.path())?;
        let object = object::place(&folder)?;
        let memory = owner.arena().stats().bound_bytes;
        let examiner = examine::ProcessAuditor::new(object.clone(), PRELOAD, PlanCache::of(folder), memory);
        let examiner: SyscallAuditor = Box::new(move |process| examiner.examine(process));
        let options = ServiceOptions {
            workers: WORKERS,
            examiner: Some(examiner),
            listener: Some(listener),
            ..ServiceOptions::default()
        };
        let service = Service::start_with(Arc::clone(&owner), options)?;
        Ok(Self { service, socket, object, plan: None, owner })
    }

    /// Has programs that are pointed to the cache from now on patch their C library as `plan` says.
    pub fn patch_by(&mut self, plan: &[u8]) -> io::Result<()> {
        self.plan = Some(self.add_plan(plan)?);
        Ok(())
    }

    /// The service's queues for work that may wait: one bound is for all that holds a descriptor of this process
    /// meanwhile.
    fn queues(&self) -> SerialQueues {
        self.service.queues()
    }

    fn add_plan(&self, plan: &[u8]) -> io::Result<u32> {
        Ok(self.service.add_plan(sealed_file("quinion-plan", plan)?))
    }

    /// Where the cache is.
    pub fn place(&self) -> CacheLocation {
        CacheLocation {
            process: std::process::id(),
            object: self.object.clone(),
            socket: self.socket.path().to_owned(),
            token: self.owner.arena().token(),
            plan: self.plan,
        }
    }

    /// Lets the program of `command`, once started, view the cache; see [`CacheLocation::point_to`].
    pub fn point_to(&self, command: &mut Command) {
        self.place().point_to(command, None);
    }

    /// Numbers of the cache's memory.
    pub fn stats(&self) -> ArenaStats {
        self.owner.arena().stats()
    }

    /// Totals of all viewers so far.
    pub fn totals(&self) -> ViewerTotals {
        self.service.totals()
    }

    /// Ends the service; viewers that still live go on by the kernel.
    pub fn stop(self) -> ViewerTotals {
        self.service.stop()
    }
}

/// A memory file with these bytes, which cannot be changed.
fn sealed_file(name: &str, mut rest: &[u8]) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, Mode, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::XUSR)?;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

fn cannot_start(program: &[OsString], found: &Obstacle) -> RunEnd {
    let Obstacle { status, wrong, remedy } = found;
    complain(&format!("cannot start {}: {wrong}; {remedy}", quoted(&program[0])));
    RunEnd::Status(*status)
}

fn title(program: &[OsString]) -> String {
    program.iter().map(|word| word.to_string_lossy().escape_debug().to_string()).collect::<Vec<_>>().join(" ")
}

/// Waits for the program, passing signals on and stopping when it stops.
fn wait(
    mut child: Child,
    signals: &Signals,
    live: Option<&Live<'_>>,
    before_stop: &dyn Fn(),
) -> io::Result<ExitStatus> {
    let (process, mut watcher) = (child.id(), None);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if let Some(by) = signals::stop_of(process) {
            live.inspect(|live| live.hide());
            before_stop();
            watcher = stop::stop_with(process, by).or(watcher);
            live.inspect(|live| live.show());
        }
        if let Some(signal) = signals.next()?
            && signal.is_directed_at_run(process)
            && !watcher.is_some_and(|watcher| signal.is_continue_by(watcher))
            && !signals.was_for_group(&signal, process)
        {
            signal.pass_on(process);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_object_is_preloaded_once_and_last() {
        let with = |others: &str| preload(Path::new("/a/ours.so"), Some(others.into()));
        assert_eq!(preload(Path::new("/a/ours.so"), None), "/a/ours.so");
        assert_eq!(with(""), "/a/ours.so");
        assert_eq!(with("one.so /two.so"), "one.so:/two.so:/a/ours.so");
        assert_eq!(with("/a/ours.so::/one.so"), "/one.so:/a/ours.so");
    }

    #[test]
    fn a_plan_that_panics_is_no_plan() {
        let planning = Planning(Some(std::thread::spawn(|| panic!("as it should"))));
        assert!(planning.end(|_| Ok(())).is_some_and(|planned| planned.is_err()));
        assert!(Planning(None).end(|_| Ok(())).is_none());
    }
}

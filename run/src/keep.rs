//! Keep: a cache that outlives the command, for the next `quinion run`.
//!
//! ```text
//!   run --keep -- A      connect: no owner --lock--> start the owner, hand it the lock --"ready"--> connect, join
//!                                                     |
//!                                                     |  a process of its own: arena, device, threads that answer
//!   run --keep -- B      connect, join <------------->|  each run has a number, its programs count for it
//!                                                     |
//!   stop                 connect, "stop" ------------>|  or a signal, or unused for --idle
//!                                                     v
//!                                              socket removed, viewers told, lock removed and given back
//! ```
//!
//! There is one such cache for each user and name. Its `memory` is one bound, however many runs it serves. A run
//! **joins**: it sends its version and its options, and gets the address where the owner accepts programs. These load
//! the runner's own object, in the folder that both have; a command whose object differs from the owner's does not
//! join, so the object and the arena are always of one build. The connection lives as long as the run; by it the owner
//! knows which runs exist.
//!
//! Files stay cached when no program has them open, until there are too many or their memory is needed. Each open
//! checks the file again, so one that was changed between two runs is read anew.
//!
//! The remains of a crash, and why they break no later run:
//!
//! | killed | what is left | the next that comes |
//! |---|---|---|
//! | the owner | a socket without a listener, a free lock | finds the lock free, removes it, starts another |
//! | the runner, starting an owner | an owner that has the lock, or one that ends by itself | joins that; or starts one |
//! | the runner, later | programs that go on, served as before | harmless: the owner sees the connection end |
//! | a program | a page of the control file | harmless: the owner sees the process end |
//!
//! The files in the folder prove nothing about caches, and no number of a process does: only the holder of the lock
//! counts, and the process at the other end of the socket.
//!
//! Invariants:
//!  1. At most one owner of a user and name: it has the lock from before its start until its end.
//!  2. A run never waits without end for an owner.
//!  3. The owner has nothing of its first runner's (`keep/sys.rs`), and is in no shell's job.
//!
//! Not an invariant: that the cache is still there at the end of a run. Its programs go on by the kernel then.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::user_folder::Folder;
use super::{CacheLocation, object, socket};
use connection::{ANSWER_TIMEOUT, Connection};
use start::StartOutcome;

pub(super) use message::Message;
pub use numbers::KeptCacheNumbers;
pub use owner::{Cache, KeepOptions, keep};

mod locks;
mod client;
mod connection;
mod message;
mod numbers;
mod owner;
mod start;
mod sys;

/// The version of the messages between runner and owner. "stop" and "status" are the same in all versions.
const PROTOCOL: u64 = 2;
const PAUSE: Duration = Duration::from_millis(5);
/// Owners killed by a signal while they start, after which no other is started.
const KILLED_MAX: u32 = 4;
/// How often a cache that closes the connection is looked at.
const OBSERVE_TRIES_MAX: u32 = 2;
/// How long an owner may take to end before it is killed: its cache has no data that is not in files.
const ENDING_MAX: Duration = Duration::from_secs(3);

/// The name of a kept cache.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Name(String);

impl Name {
    const LETTERS_MAX: usize = 64;
}

impl Default for Name {
    fn default() -> Self {
        Self("default".to_owned())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
        let begins = text.starts_with(|letter: char| letter.is_ascii_alphanumeric());
        if begins && text.len() <= Self::LETTERS_MAX && text.chars().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "`{text}` cannot name a cache; use up to {} letters a-z, A-Z, digits, `-`, `_` and `.`, and begin with \
             a letter or a digit",
            Self::LETTERS_MAX
        ))
    }
}

/// How long a kept cache stays when it is not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Idle {
    /// The cache stays for this time.
    For(Duration),
    /// Until it is stopped.
    Never,
}

impl Default for Idle {
    fn default() -> Self {
        Self::For(Duration::from_secs(30 * 60))
    }
}

impl FromStr for Idle {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "never" {
            return Ok(Self::Never);
        }
        let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
        let unit_millis = match &text[digits..] {
            "ms" => Some(1),
            "s" => Some(1000),
            "m" => Some(60_000),
            "h" => Some(3_600_000),
            _ => None,
        };
        let number: Option<u64> = text[..digits].parse().ok();
        let millis = number.zip(unit_millis).and_then(|(number, unit)| number.checked_mul(unit));
        millis.map(|millis| Self::For(Duration::from_millis(millis))).ok_or_else(|| {
            format!(
                "`{text}` is not a time; write a whole number and a unit, such as 90s, 30m or 2h, or `never`"
            )
        })
    }
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::For(time) = self else { return f.write_str("never") };
        let millis = time.as_millis();
        match millis {
            0 => f.write_str("0s"),
            _ if !millis.is_multiple_of(1000) => write!(f, "{millis}ms"),
            _ if !millis.is_multiple_of(60_000) => write!(f, "{}s", millis / 1000),
            _ if !millis.is_multiple_of(3_600_000) => write!(f, "{}m", millis / 60_000),
            _ => write!(f, "{}h", millis / 3_600_000),
        }
    }
}

/// The cache a run wants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheRequest {
    /// The cache's name.
    pub name: Name,
    /// The cache's memory in bytes, if that was said.
    pub memory: Option<u64>,
    /// How long it stays, if that was said.
    pub idle: Option<Idle>,
    /// When files are taken over from the kernel, as the option's word, if that was said.
    pub attach: Option<String>,
    /// Which files are served, and by what, as options; none for the default. Always compared.
    pub rules: Vec<String>,
}

/// A cache of another process, joined by one run; left when it is dropped.
#[derive(Debug)]
pub struct JoinedCache {
    name: Name,
    line: Connection,
    place: CacheLocation,
    run: u64,
}

impl JoinedCache {
    /// Joins the cache that is wanted, and starts it if it is not there.
    ///
    /// Waits while it is started, and while one that is ending ends; ten seconds at most.
    ///
    /// # Errors
    /// It is of another version, or was started with other options; it cannot be started, or does not answer.
    pub fn join(wanted: &CacheRequest) -> io::Result<Self> {
        let (folder, until) = (Folder::of_user()?, Instant::now() + ANSWER_TIMEOUT);
        let object = object::place(&folder)?;
        let mut killed = 0;
        loop {
            // 1 there is an owner: join
            if let Some(line) = Connection::to(&folder, &wanted.name)?
                && let Some(kept) = Self::ask_to_join(line, wanted, &object)?
            {
                return Ok(kept);
            }
            // 2 there is none, and none is starting: start one
            match folder.try_lock(&wanted.name)? {
                Some(lock) => match start::start(&folder, lock, wanted)? {
                    StartOutcome::Listens => (),
                    StartOutcome::Killed(error) if killed == KILLED_MAX => return Err(error),
                    StartOutcome::Killed(_) => {
                        killed += 1;
                        std::thread::sleep(PAUSE);
                    }
                },
                // 3 an owner is starting, or ending
                None if Instant::now() < until => std::thread::sleep(PAUSE),
                None => return Err(silent(&wanted.name)),
            }
        }
    }

    /// Joins by this connection; `None` if the owner ended before it answered.
    fn ask_to_join(mut line: Connection, wanted: &CacheRequest, object: &Path) -> io::Result<Option<Self>> {
        let Some(answer) = line.ask(&owner::question(wanted))? else { return Ok(None) };
        if answer.answers("refused") {
            let why = answer.text_of("why").ok_or_else(|| line.not_understood())?;
            return Err(io::Error::other(why.to_owned()));
        }
        let joined = answer.answers("joined").then(|| CacheLocation::of(&answer, object)).flatten();
        let (Some(place), Some(run)) = (joined, answer.number_of("run")) else {
            return Err(line.not_understood());
        };
        if line.process() != place.process() {
            return Err(io::Error::other(format!(
                "the cache `{0}` lives in another name space of processes (a container?), and its files cannot be \
                 reached by way of /proc from here; use another by --keep=OTHER",
                wanted.name
            )));
        }
        Ok(Some(Self { name: wanted.name.clone(), line, place, run }))
    }

    /// Lets the program of `command`, once started, view the cache.
    pub fn point_to(&self, command: &mut Command) {
        self.place.point_to(command, Some(self.run));
    }

    /// Hands the owner a plan of what is patched in the C library of programs; those that are pointed to the cache from
    /// now on find it there. The owner keeps it for programs that outlive this run.
    ///
    /// # Errors
    /// The owner takes no more of them, or has ended.
    pub fn patch_by(&mut self, plan: &[u8]) -> io::Result<()> {
        let answer = self.line.ask(&Message::ask("plan").bytes("plan", plan))?;
        let number = answer.and_then(|answer| answer.number_of("number"));
        let number = number.and_then(|number| u32::try_from(number).ok());
        self.place.plan = Some(number.ok_or_else(|| {
            io::Error::other(format!(
                "the cache `{}` does not accept how the C library is to be patched; end it by `quinion stop {0}`",
                self.name
            ))
        })?);
        Ok(())
    }

    /// The cache's name.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The run's numbers so far, with the `files` that are read most; if the cache was stopped meanwhile, those until
    /// then. `None` if it has ended without an answer.
    pub fn numbers(&mut self, files: usize) -> io::Result<Option<KeptCacheNumbers>> {
        let Some(answer) = self.line.ask(&numbers::question(files))? else { return Ok(None) };
        KeptCacheNumbers::of(&answer).map(Some).ok_or_else(|| self.line.not_understood())
    }

    /// Whether the owner of the cache has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.line.ask(&Message::ask("status")), Ok(None))
    }
}

fn silent(name: &Name) -> io::Error {
    io::Error::other(format!(
        "the cache `{name}` is there and does not answer: it is stopped, or hangs; end it by `quinion stop {name}`"
    ))
}

/// How stopping a cache went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopOutcome {
    /// The cache ended as it should.
    Ended,
    /// The cache did not answer, and was killed.
    Killed,
    /// There was none.
    NotThere,
}

/// Ends the cache `name`, and waits for its end. Programs that use it go on by the kernel.
///
/// # Errors
/// It cannot be reached, or not be killed.
pub fn stop(name: &Name) -> io::Result<StopOutcome> {
    let Some(folder) = Folder::of_user_if_any()? else { return Ok(StopOutcome::NotThere) };
    let until = Instant::now() + ANSWER_TIMEOUT;
    loop {
        if let Some(line) = Connection::to(&folder, name)? {
            let stopped = stop_owner(line)?;
            tidy(&folder, name)?;
            return Ok(stopped);
        }
        match tidy(&folder, name)? {
            CleanupOutcome::All => return Ok(StopOutcome::NotThere),
            // It is being started, or ends by itself.
            CleanupOutcome::Locked if Instant::now() < until => std::thread::sleep(PAUSE),
            CleanupOutcome::Locked => return Err(silent(name)),
        }
    }
}

fn stop_owner(mut line: Connection) -> io::Result<StopOutcome> {
    let process = i32::try_from(line.process()).ok().and_then(Pid::from_raw);
    let Some(process) = process else {
        return Err(io::Error::other(
            "it lives in another name space of processes (a container?); stop it from there",
        ));
    };
    // While this process is connected, the process that listens there is this one.
    let alive = match pidfd_open(process, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(StopOutcome::Ended),
        alive => alive?,
    };
    line.give_up_after(ENDING_MAX)?;
    let asked = line.ask(&Message::ask("stop")).is_ok();
    let mut fds = [PollFd::new(&alive, PollFlags::IN)];
    let time = if asked { ENDING_MAX } else { Duration::ZERO };
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: 0 };
    if poll(&mut fds, Some(&time))? > 0 {
        return Ok(StopOutcome::Ended);
    }
    if kill(&alive)? == StopOutcome::Ended {
        return Ok(StopOutcome::Ended);
    }
    poll(&mut [PollFd::new(&alive, PollFlags::IN)], None)?;
    Ok(StopOutcome::Killed)
}

/// Kills the process, which may end by itself just now.
fn kill(process: &OwnedFd) -> io::Result<StopOutcome> {
    match pidfd_send_signal(process, Signal::KILL) {
        Ok(()) => Ok(StopOutcome::Killed),
        Err(rustix::io::Errno::SRCH) => Ok(StopOutcome::Ended),
        Err(error) => Err(error.into()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CleanupOutcome {
    All,
    Locked,
}

/// Removes the files of an owner that was killed. In a folder that cannot be written they stay, and are ignored.
fn tidy(folder: &Folder, name: &Name) -> io::Result<CleanupOutcome> {
    super::socket::remove_left(folder.path());
    if !folder.has(name)? {
        return Ok(CleanupOutcome::All);
    }
    let tidied = match folder.try_lock(name) {
        Ok(Some(lock)) => {
            socket::remove_left(folder.path());
            folder.remove_all(lock, name).map(|()| CleanupOutcome::All)
        }
        Ok(None) => Ok(CleanupOutcome::Locked),
        Err(error) => Err(error),
    };
    match tidied {
        Err(error) if is_read_only(&error) => Ok(CleanupOutcome::All),
        tidied => tidied,
    }
}

fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied)
}

/// A kept cache as it is seen from outside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedCache {
    /// The cache's name.
    pub name: Name,
    /// The cache's process; 0 if that has no number here.
    pub process: u32,
    /// `None` if it does not answer.
    pub status: Option<Status>,
}

/// A kept cache's description of itself. Times are in milliseconds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs, reason = "the fields are the names that the list shows, and its help explains them")]
pub struct Status {
    pub version: String,
    pub bound_bytes: u64,
    pub grown_bytes: u64,
    pub cached_bytes: u64,
    pub served_bytes: u64,
    pub runs: u64,
    pub runs_begun: u64,
    pub viewers: u64,
    pub age_ms: u64,
    pub unused_ms: u64,
    /// `None`: it stays until it is stopped.
    pub idle_ms: Option<u64>,
}

impl Status {
    fn put(&self) -> Message {
        let message = Message::answer("status")
            .text("version", &self.version)
            .number("bound", self.bound_bytes)
            .number("grown", self.grown_bytes)
            .number("cached", self.cached_bytes)
            .number("served", self.served_bytes)
            .number("runs", self.runs)
            .number("runs_begun", self.runs_begun)
            .number("viewers", self.viewers)
            .number("age_ms", self.age_ms)
            .number("unused_ms", self.unused_ms);
        match self.idle_ms {
            Some(idle) => message.number("idle_ms", idle),
            None => message,
        }
    }

    /// Numbers that another version does not send are 0.
    fn of(message: &Message) -> Self {
        let number = |name| message.number_of(name).unwrap_or(0);
        Self {
            version: message.text_of("version").unwrap_or("?").to_owned(),
            bound_bytes: number("bound"),
            grown_bytes: number("grown"),
            cached_bytes: number("cached"),
            served_bytes: number("served"),
            runs: number("runs"),
            runs_begun: number("runs_begun"),
            viewers: number("viewers"),
            age_ms: number("age_ms"),
            unused_ms: number("unused_ms"),
            idle_ms: message.number_of("idle_ms"),
        }
    }
}

/// How many files a kept cache checks for removal each time: some hundred microseconds.
pub const REMOVED_FILES_CHECKED_MAX: usize = 256;

/// How many files that no program has open a kept cache knows at most. Each may have a descriptor for a moment; half of
/// a process's descriptors are for programs' open files and connections.
pub fn files_max() -> usize {
    const FILES_MAX: u64 = 1 << 16;
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    (descriptors.unwrap_or(u64::MAX) / 2).min(FILES_MAX) as usize
}

/// All kept caches of the user, by name. Removes what killed ones have left; does not make the folder.
pub fn list() -> io::Result<Vec<ObservedCache>> {
    let Some(folder) = Folder::of_user_if_any()? else { return Ok(Vec::new()) };
    let seen = folder.names()?.into_iter().map(|name| observe(&folder, name));
    seen.filter_map(io::Result::transpose).collect()
}

/// `None`: it is no more.
fn observe(folder: &Folder, name: Name) -> io::Result<Option<ObservedCache>> {
    let mut process = 0;
    for _ in 0..OBSERVE_TRIES_MAX {
        let Ok(line) = Connection::to(folder, &name) else { break };
        let Some(mut line) = line else {
            tidy(folder, &name)?;
            return Ok(None);
        };
        process = line.process();
        match line.ask(&Message::ask("status")) {
            Ok(None) => {} // it ends, and its socket is gone by now; or it has too many connections
            said => {
                let status = said.ok().flatten().map(|said| Status::of(&said));
                return Ok(Some(ObservedCache { name, process, status }));
            }
        }
    }
    Ok(Some(ObservedCache { name, process, status: None }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn names_are_plain() {
        for name in ["default", "a", "7.b_c-D", &"x".repeat(64)] {
            assert_eq!(name.parse::<Name>().map(|name| name.to_string()).as_deref(), Ok(name));
        }
        for name in ["", ".", "..", "-x", "a/b", "a b", "\u{e4}", "a\n", &"x".repeat(65)] {
            assert!(name.parse::<Name>().is_err_and(|why| why.contains("letters")), "{name:?}");
        }
    }

    #[test]
    fn times_are_read_and_written_and_other_words_are_refused() {
        for time in ["90s", "30m", "2h", "250ms", "never", "90m", "0s"] {
            assert_eq!(time.parse::<Idle>().map(|time| time.to_string()).as_deref(), Ok(time));
        }
        assert_eq!("120s".parse::<Idle>().unwrap().to_string(), "2m");
        for time in
            ["", "5", "s", "1.5h", "-1s", "1 h", "1d", "99999999999999999999s", "18446744073709551615h"]
        {
            assert!(time.parse::<Idle>().is_err_and(|why| why.contains("90s")), "{time:?}");
        }
    }

    /// 1. A list connects to a cache.
    /// 2. The cache ends: it removes its socket, and closes its connections.
    #[test]
    fn a_cache_that_ends_while_it_is_looked_at_is_not_in_the_list() {
        let outer = tempfile::tempdir().unwrap();
        std::fs::set_permissions(outer.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let folder = Folder::open(outer.path()).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(folder.socket(&Name::default())).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (stream, _) = listener.accept().unwrap();
                std::fs::remove_file(outer.path().join("default.socket")).unwrap();
                drop(stream);
            });
            assert_eq!(observe(&folder, Name::default()).unwrap(), None);
        });
    }

    /// 1. A cache does not answer, and its process is found.
    /// 2. The process ends, and its parent has its status.
    /// 3. It is killed.
    #[test]
    fn a_cache_that_ends_before_it_is_killed_has_ended() {
        let mut process = Command::new("sleep").arg("60").spawn().unwrap();
        let found = pidfd_open(Pid::from_child(&process), PidfdFlags::empty()).unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(kill(&found).unwrap(), StopOutcome::Ended);
    }

    #[test]
    fn a_status_arrives_as_it_was() {
        let status = Status { version: "1".into(), viewers: 3, idle_ms: Some(4), ..Status::default() };
        for status in [Status { idle_ms: None, ..status.clone() }, status] {
            assert_eq!(Status::of(&Message::parse(&status.put().line()).unwrap()), status);
        }
    }
}

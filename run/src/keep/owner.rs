//! Owner: the process that stays, and keeps a cache for one run after the other.
//!
//! ```text
//!   begin   leave what is the starter's -> keep the lock -> build the cache -> listen -> say "ready"
//!   turn    wait for: a signal, a connection, a question, the end of a connection, a timeout
//!           join      is it of the same build, with the same options?  -> a number, and the addresses
//!           plan      kept, for programs to find            -> its number
//!           numbers   what its viewers and the cache did since it joined
//!           status    name, version, options, memory
//!           stop      as a signal
//!   end     remove the socket -> serve no more -> send each run its last numbers -> drop the cache
//!           -> remove the lock and give it back
//! ```
//!
//! One thread does all that; the cache and its viewers have their own. It writes no log: only clients that ask get
//! answers.
//!
//! The cache is **unused** while no run is connected and no process views it. A program that its runner has left behind
//! views it still, and so it stays. When it was unused for the time of `--idle` it ends, but not before its first run
//! had time to join, whatever `--idle` says. A run that has connected by then is served first; one that connects after
//! the socket was removed sees the connection end, waits for the lock, and starts another. An owner whose lock was
//! removed from the folder, by a process that cleans up there, cannot be found: it ends when it has no run.
//!
//! Invariants:
//!  1. A process that connects is the same user's, or gets no answer.
//!  2. No client makes the owner wait: a message that is not read in time, is longer than a line, or has a descriptor
//!     with it, ends that connection, and it is closed elsewhere (`keep/client.rs`). A client that sends much gets one
//!     read in a turn. A silent one is closed for a new one, if there are too many.
//!  3. The lock is released last: there are never two caches of one name, even while one ends.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinion::internals::arena::LAYOUT_VERSION;
use quinion::internals::sys::peer::{self, ProcessName};
use quinion_owner::internals::serve::Owner;
use quinion_owner::internals::sys::serial_queues::{QueueKey, SerialQueues};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::client::ClientStream;
use super::connection::ANSWER_TIMEOUT;
use super::locks::Lock;
use super::message::{LINE_MAX, Message};
use super::numbers::{self, KeptCacheNumbers};
use super::start::READY;
use super::{CacheRequest, Idle, Name, PAUSE, PROTOCOL, Status, sys};
use crate::open_files;
use crate::signals::Signals;
use crate::user_folder::Folder;
use crate::{HotFileSize, OwnerNumbers, OwnerNumbersSource, Session, object};
use quinion_size as size;

/// Plans that are kept: one for each C library of the machine's programs, and for each version of one.
const PLANS_MAX: usize = 64;
/// Connections at a time. One more replaces the first that has not joined; if all have, it is closed.
const CONNECTIONS_MAX: usize = 256;
const RECEIVE_BYTES_MAX: usize = 16 << 10;
/// While no run has joined: the longest time between two checks whether a process views the cache and can find it.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Like `CHECK_INTERVAL`, for a cache that stays until it is stopped: only the loss of its name in the folder ends it.
const RARE_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest time between two such checks: with `--idle 0s` the owner would check without a pause.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(20);
/// The unit in which a cache has its memory.
const EXTENT: u64 = quinion::internals::units::EXTENT_SIZE as u64;

/// Start options of a process that stays.
#[derive(Clone, Debug)]
pub struct KeepOptions {
    /// Where its lock and its socket are.
    pub folder: PathBuf,
    /// The cache's name.
    pub name: Name,
    /// How long it stays unused.
    pub idle: Idle,
    /// When it takes files over from the kernel; see [`CacheRequest::attach`].
    pub attach: String,
    /// Which files it serves, and by what; see [`CacheRequest::rules`].
    pub rules: Vec<String>,
}

/// The cache that is kept.
pub struct Cache {
    /// The cache's owner, as viewers see it.
    pub owner: Arc<dyn Owner>,
    /// Gives the owner's own numbers.
    pub numbers: Box<dyn OwnerNumbersSource>,
    /// Checks some of its files, and releases those that were removed: called now and then while it is not used.
    pub tidy: Box<dyn Fn()>,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("owner", &self.owner).finish_non_exhaustive()
    }
}

/// Runs the owner of a kept cache, from the first moment of this process to its end. `build` builds the cache.
///
/// # Errors
/// The error, in words; the starter was told.
pub fn keep(keeping: &KeepOptions, build: impl FnOnce() -> Result<Cache, String>) -> Result<(), String> {
    sys::leave_starter().map_err(|error| error.to_string())?;
    let lock = take_lock().map_err(|error| open_files::describe(&error, error.raw_os_error()))?;
    let begun = begin(keeping, lock, build);
    let said = match &begun {
        Ok(_) => READY,
        Err(wrong) => wrong,
    };
    // The starter may have ended; the next run will find this owner.
    let _ = writeln!(io::stdout(), "{said}");
    let _ = leave_pipe();
    begun?.serve().map_err(|error| error.to_string())
}

/// The lock, which this process was started with in the place of standard input. It alone has it from here on.
fn take_lock() -> io::Result<Lock> {
    let lock = rustix::io::fcntl_dupfd_cloexec(io::stdin(), 3)?;
    rustix::stdio::dup2_stdin(nothing()?)?;
    Ok(Lock::handed(lock))
}

fn leave_pipe() -> io::Result<()> {
    let nothing = nothing()?;
    rustix::stdio::dup2_stdout(&nothing)?;
    rustix::stdio::dup2_stderr(&nothing)?;
    Ok(())
}

fn nothing() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

fn begin(
    keeping: &KeepOptions,
    lock: Lock,
    build: impl FnOnce() -> Result<Cache, String>,
) -> Result<ControlSocket, String> {
    let said = |error: io::Error| open_files::describe(&error, error.raw_os_error());
    let KeepOptions { folder, name, idle, attach, rules } = keeping.clone();
    let folder = Folder::open(&folder).map_err(said)?;
    if !folder.is_lock_of(&lock, &name).map_err(said)? {
        return Err("an owner is started by `quinion run --keep`, and not by hand".to_owned());
    }
    let Cache { owner, numbers, tidy } = build()?;
    let session = Session::start_in(owner, Folder::open(folder.path()).map_err(said)?).map_err(said)?;
    let signals = Signals::catch().map_err(said)?;
    folder.remove_socket(&lock, &name).map_err(said)?;
    let listener = UnixListener::bind(folder.socket(&name)).map_err(said)?;
    listener.set_nonblocking(true).map_err(said)?;
    let now = Instant::now();
    let use_ = Use { begun: now, last: now, viewers: 0, runs: 0 };
    Ok(ControlSocket {
        folder,
        name,
        idle,
        attach,
        rules: joined_rules(&rules),
        lock,
        listener,
        queues: session.queues(),
        signals,
        memory: session.stats().bound_bytes,
        session,
        numbers,
        tidy,
        use_,
        clients: Vec::new(),
        plans: Vec::new(),
    })
}

/// The question of a run that wants to join.
pub fn question(wanted: &CacheRequest) -> Message {
    let message = Message::ask("join")
        .number("protocol", PROTOCOL)
        .text("version", env!("CARGO_PKG_VERSION"))
        .number("layout", u64::from(LAYOUT_VERSION))
        .text("object", object::HASH)
        .text("rules", &joined_rules(&wanted.rules));
    let message = match wanted.memory {
        Some(memory) => message.number("memory", memory),
        None => message,
    };
    let message = match wanted.idle {
        Some(idle) => message.text("idle", &idle.to_string()),
        None => message,
    };
    match &wanted.attach {
        Some(attach) => message.text("attach", attach),
        None => message,
    }
}

fn joined_rules(rules: &[String]) -> String {
    if rules.is_empty() { "the default rules".to_owned() } else { rules.join(" ") }
}

/// When, and by which processes, the cache is used.
struct Use {
    begun: Instant,
    /// When it was last seen used.
    last: Instant,
    /// Processes that had viewed it by then.
    viewers: u64,
    runs: u64,
}

struct JoinedRun {
    run: u64,
    before: OwnerNumbers,
    /// Other runs that were there or have joined.
    others: u64,
}

struct Client {
    stream: ClientStream,
    received: Vec<u8>,
    joined: Option<JoinedRun>,
    is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LoopControl {
    Wait,
    End,
}

struct ControlSocket {
    folder: Folder,
    name: Name,
    idle: Idle,
    attach: String,
    rules: String,
    lock: Lock,
    listener: UnixListener,
    queues: SerialQueues,
    signals: Signals,
    session: Session,
    /// The cache's memory as it was started with, in bytes; under pressure it is less for a while.
    memory: u64,
    numbers: Box<dyn OwnerNumbersSource>,
    tidy: Box<dyn Fn()>,
    use_: Use,
    clients: Vec<Client>,
    /// Plans of runs, each once, with their numbers.
    plans: Vec<(Vec<u8>, u32)>,
}

/// Events that a turn has to handle.
#[derive(Default)]
struct Ready {
    signal: bool,
    connection: bool,
    /// The clients that have sent something, or have ended.
    clients: Vec<usize>,
}

impl ControlSocket {
    fn serve(mut self) -> io::Result<()> {
        while self.turn()? == LoopControl::Wait {}
        self.end()
    }

    fn turn(&mut self) -> io::Result<LoopControl> {
        let Ready { signal, connection, clients } = self.wait()?;
        // 2 a signal that ends this process; others mean nothing here
        if signal && self.signals.next()?.is_some_and(|signal| signal.ends()) {
            return Ok(LoopControl::End);
        }
        for client in clients {
            if self.receive(client) == LoopControl::End {
                return Ok(LoopControl::End);
            }
        }
        self.drop_finished();
        if connection {
            self.accept();
        }
        // 5 a run that uses the cache checks its files; the space of a removed file is not free before
        if self.runs() == 0 {
            (self.tidy)();
        }
        // 6 unused for long; a process that has connected by now counts
        if (self.has_been_unused() || self.is_lost()) && !self.accept() {
            return Ok(LoopControl::End);
        }
        Ok(LoopControl::Wait)
    }

    /// Whether it is unused for good: its files were removed, so no run can find it.
    fn is_lost(&self) -> bool {
        self.runs() == 0 && !self.is_named()
    }

    /// Whether the lock in the folder under this name is this process's.
    fn is_named(&self) -> bool {
        self.folder.is_lock_of(&self.lock, &self.name).unwrap_or(false)
    }

    fn wait(&self) -> io::Result<Ready> {
        // While all are busy no connection is accepted.
        let is_busy = self.queues.are_full();
        let who = if is_busy { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN), PollFd::new(&self.listener, who)];
        fds.extend(self.clients.iter().map(|client| PollFd::new(&client.stream, PollFlags::IN)));
        let interval = is_busy.then_some(CHECK_INTERVAL);
        let time = self
            .poll_timeout()
            .map_or(interval, |time| Some(time.min(interval.unwrap_or(time))))
            .map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) });
        match poll(&mut fds, time.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            other => other?,
        };
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let clients = (0..self.clients.len()).filter(|&client| is_ready(&fds[2 + client])).collect();
        Ok(Ready { signal: is_ready(&fds[0]), connection: is_ready(&fds[1]), clients })
    }

    /// How long `poll` may sleep; `None`: until something comes.
    fn poll_timeout(&self) -> Option<Duration> {
        match self.idle {
            _ if self.runs() > 0 => None,
            Idle::Never => Some(RARE_CHECK_INTERVAL),
            Idle::For(time) => {
                let end = self.use_.last + self.stays(time);
                Some(end.saturating_duration_since(Instant::now()).clamp(CHECK_INTERVAL_MIN, CHECK_INTERVAL))
            }
        }
    }

    /// How long it stays unused if `--idle` says `time`. The run that has started it waits so long for its answer, and
    /// would start one after the other if each ended before the run can join.
    fn stays(&self, time: Duration) -> Duration {
        if self.use_.runs == 0 { time.max(ANSWER_TIMEOUT) } else { time }
    }

    fn runs(&self) -> usize {
        self.clients.iter().filter(|client| client.joined.is_some()).count()
    }

    fn has_been_unused(&mut self) -> bool {
        let viewers = self.session.totals().viewers;
        // Processes that started and ended since the last check have used it, too.
        let is_used = self.runs() > 0 || self.session.service.viewers() > 0 || viewers != self.use_.viewers;
        self.use_.viewers = viewers;
        if is_used {
            self.use_.last = Instant::now();
        }
        !is_used && matches!(self.idle, Idle::For(time) if self.use_.last.elapsed() >= self.stays(time))
    }

    fn accept(&mut self) -> bool {
        let mut accepted_any = false;
        for _ in 0..CONNECTIONS_MAX {
            if self.queues.are_full() {
                return accepted_any;
            }
            let stream = match self.listener.accept() {
                Ok((stream, _)) => ClientStream::new(stream, &self.queues),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return accepted_any,
                // No descriptor is left, say: they wait, and this thread pauses instead of spinning.
                Err(_) => {
                    std::thread::sleep(PAUSE);
                    return accepted_any;
                }
            };
            let is_ours = peer::user(stream.as_fd()) == Some(rustix::process::geteuid().as_raw());
            if is_ours && self.has_capacity() && stream.prepare().is_ok() {
                self.clients.push(Client { stream, received: Vec::new(), joined: None, is_over: false });
                accepted_any = true;
            }
        }
        accepted_any
    }

    fn has_capacity(&mut self) -> bool {
        if self.clients.len() < CONNECTIONS_MAX {
            return true;
        }
        let silent = self.clients.iter().position(|client| client.joined.is_none());
        silent.map(|client| self.clients.remove(client)).is_some()
    }

    /// Reads what one client sent, once, and answers. More waits for the next turn.
    fn receive(&mut self, client: usize) -> LoopControl {
        let mut bytes = [0; RECEIVE_BYTES_MAX];
        match self.clients[client].stream.receive(&mut bytes) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                LoopControl::Wait
            }
            Ok(0) | Err(_) => {
                self.leave(client);
                LoopControl::Wait
            }
            Ok(count) => {
                self.clients[client].received.extend_from_slice(&bytes[..count]);
                self.answer_all(client)
            }
        }
    }

    fn answer_all(&mut self, client: usize) -> LoopControl {
        while let Some(end) = self.clients[client].received.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.clients[client].received.drain(..=end).collect();
            let question = std::str::from_utf8(&line).ok().and_then(Message::parse);
            let Some(question) = question else {
                self.leave(client);
                return LoopControl::Wait;
            };
            let answer = self.answer(client, &question);
            self.send(client, &answer);
            if question.asks("stop") {
                return LoopControl::End;
            }
        }
        if self.clients[client].received.len() > LINE_MAX {
            self.leave(client);
        }
        LoopControl::Wait
    }

    /// Sends a message. A run that does not read it has left.
    fn send(&mut self, client: usize, message: &Message) {
        let line = message.line();
        let said = self.clients[client].stream.send(line.as_bytes());
        if !said.is_ok_and(|count| count == line.len()) {
            self.leave(client);
        }
    }

    /// Stops reading from a client, and ends its run.
    fn leave(&mut self, client: usize) {
        let client = &mut self.clients[client];
        client.stream.end();
        client.received.clear();
        client.is_over = true;
        if let Some(joined) = client.joined.take() {
            self.session.service.end_run(joined.run);
            self.use_.last = Instant::now();
        }
    }

    fn drop_finished(&mut self) {
        self.clients.retain(|client| !client.is_over);
    }

    fn answer(&mut self, client: usize, question: &Message) -> Message {
        match question.text_of("ask") {
            Some("join") => self.join(client, question),
            Some("plan") => self.take_plan(question),
            Some("numbers") => match &self.clients[client].joined {
                Some(joined) => {
                    let files = numbers::hottest_in(question);
                    self.numbers_of(joined, files).put(Message::answer("numbers"))
                }
                None => refused("you have not joined"),
            },
            Some("status") => self.status().put(),
            Some("stop") => Message::answer("stopping"),
            _ => refused("this is not understood"),
        }
    }

    fn join(&mut self, client: usize, question: &Message) -> Message {
        if let Some(why) = self.objection(question) {
            return refused(&why);
        }
        let others = self.runs() as u64;
        let running = self.clients.iter_mut().filter_map(|client| client.joined.as_mut());
        running.for_each(|joined| joined.others += 1);
        self.leave_run(client);
        let run = self.session.service.begin_run();
        self.clients[client].joined = Some(JoinedRun { run, before: self.numbers.numbers(), others });
        self.use_.runs += 1;
        self.session.place().put(Message::answer("joined")).number("run", run)
    }

    /// A run that joins twice has left once.
    fn leave_run(&mut self, client: usize) {
        if let Some(joined) = self.clients[client].joined.take() {
            self.session.service.end_run(joined.run);
        }
    }

    /// Why a run may not join, if it may not.
    fn objection(&self, question: &Message) -> Option<String> {
        let (name, ours) = (&self.name, question_of_ours());
        let is_ours =
            ["protocol", "layout"].iter().all(|&what| question.number_of(what) == ours.number_of(what))
                && question.text_of("object") == ours.text_of("object");
        let version = question.text_of("version").unwrap_or("?");
        if !is_ours || question.text_of("version") != ours.text_of("version") {
            let built = if version == env!("CARGO_PKG_VERSION") { ", built another time" } else { "" };
            return Some(format!(
                "the cache `{name}` was started by quinion {}, and this is {version}{built}; end it by `quinion stop \
                 {name}`, or use another by --keep=OTHER",
                env!("CARGO_PKG_VERSION")
            ));
        }
        let bound = self.memory;
        if let Some(memory) = question.number_of("memory").filter(|memory| memory / EXTENT != bound / EXTENT)
        {
            return Some(format!(
                "the cache `{name}` has {} of memory, and not {}; leave out --memory, or end it by `quinion stop \
                 {name}`, or use another by --keep=OTHER",
                size::shown(bound),
                size::shown(memory)
            ));
        }
        let rules = question.text_of("rules").unwrap_or_default();
        if rules != self.rules {
            return Some(format!(
                "the cache `{name}` was started with {}, and this run is to have {rules}; say the same, or end it by \
                 `quinion stop {name}`, or use another by --keep=OTHER",
                self.rules
            ));
        }
        let idle = self.idle.to_string();
        [("idle", &idle), ("attach", &self.attach)].into_iter().find_map(|(option, ours)| {
            let wanted = question.text_of(option).filter(|wanted| wanted != ours)?;
            Some(format!(
                "the cache `{name}` was started with --{option} {ours}, and not {wanted}; leave that out, or end it by \
                 `quinion stop {name}`, or use another by --keep=OTHER"
            ))
        })
    }

    /// Keeps a plan until the owner ends: a program may start others when its run is long over.
    fn take_plan(&mut self, question: &Message) -> Message {
        let Some(plan) = question.bytes_of("plan") else { return refused("this is not a plan") };
        let known = self.plans.iter().position(|(known, _)| *known == plan);
        let place = match known {
            Some(place) => place,
            None if self.plans.len() == PLANS_MAX => return refused("there are too many plans"),
            None => match self.session.add_plan(&plan) {
                Err(error) => return refused(&error.to_string()),
                Ok(number) => {
                    self.plans.push((plan, number));
                    self.plans.len() - 1
                }
            },
        };
        Message::answer("planned").number("number", self.plans[place].1.into())
    }

    /// The numbers of a run so far, with the `files` that are read most.
    fn numbers_of(&self, joined: &JoinedRun, files: usize) -> KeptCacheNumbers {
        let hottest = if files > 0 { self.numbers.hottest(files) } else { Vec::new() };
        KeptCacheNumbers {
            hottest: hottest.into_iter().map(HotFileSize::from).collect(),
            totals: self.session.service.totals_of(joined.run),
            owner: self.numbers.numbers().since(&joined.before),
            stats: self.session.stats(),
            others: joined.others,
            modes: self.session.owner.modes(),
        }
    }

    fn status(&self) -> Status {
        let (stats, totals) = (self.session.stats(), self.session.totals());
        let millis = |time: Duration| time.as_millis() as u64;
        let viewers = self.session.service.viewers();
        let is_used = self.runs() > 0 || viewers > 0;
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            bound_bytes: stats.bound_bytes,
            grown_bytes: stats.grown_bytes + stats.control_bytes,
            cached_bytes: stats
                .data_bytes
                .saturating_sub(stats.free_pages * quinion::internals::units::PAGE_SIZE as u64),
            served_bytes: totals.bytes,
            runs: self.runs() as u64,
            runs_begun: self.use_.runs,
            viewers: viewers as u64,
            age_ms: millis(self.use_.begun.elapsed()),
            unused_ms: if is_used { 0 } else { millis(self.use_.last.elapsed()) },
            idle_ms: match self.idle {
                Idle::For(time) => Some(millis(time)),
                Idle::Never => None,
            },
        }
    }

    fn end(mut self) -> io::Result<()> {
        // 1 no run finds this owner any more; another may have the name by now
        let is_named = self.is_named();
        if is_named {
            self.folder.remove_socket(&self.lock, &self.name)?;
        }
        // 2 viewers go on by the kernel
        self.session.service.stop_serving();
        // 3 each run gets its last numbers; it may be asking just now, and takes this for the answer
        for client in 0..self.clients.len() {
            if let Some(joined) = self.clients[client].joined.take() {
                let last = self.numbers_of(&joined, 0).put(Message::answer("stopped"));
                let _ = self.clients[client].stream.send(last.line().as_bytes());
            }
        }
        // 4 the memory is freed
        let Self { folder, name, lock, session, numbers, tidy, clients, listener, queues, .. } = self;
        // A process that has connected and was not accepted is in the listener's queue, with its message.
        queues.close(QueueKey::Sender(ProcessName::default()), listener.into());
        drop((clients, session, numbers, tidy));
        // 5 and the next owner may start
        if is_named { folder.remove_all(lock, &name) } else { Ok(()) }
    }
}

fn question_of_ours() -> Message {
    question(&CacheRequest::default())
}

fn refused(why: &str) -> Message {
    Message::answer("refused").text("why", why)
}

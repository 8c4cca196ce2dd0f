//! Monitor: a process that plays a machine monitor, and the test's handle of it.
//!
//! ```text
//!   begin SOCKET ...             maps, registers, connects, sends
//!   lie SOCKET MESSAGE           the same of two pages, with a message of its own; ADDRESS in it is where they are
//!   hang_up                      closes the socket and the descriptor; the memory stays
//!   touch FIRST PAGES THREADS    each thread reads all pages, each in a different order
//!   balloon FIRST PAGES HOW      gives pages back: dontneed, remove
//!   reset FIRST PAGES            gives pages of a private mapping back, which are the file's again
//!   race ROUNDS THREADS          threads read anywhere while one gives pages back
//!   probe PAGE                   reads by the kernel's hand; answers with its error
//!   unmap FIRST PAGES, remap REGION
//!   fork COMMAND; COMMAND; ..    a child does them, and its end says whether they were right
//!   orphan FILE COMMAND; ..      a child does them when the monitor has ended, and writes their outcome to the file
//!   sum FIRST PAGES, set FIRST PAGES VALUE     a guest under KVM does it
//!   idle                         ends when the test does
//! ```
//!
//! It says `ready` when it has become this program, and answers each with a line: `done`, or what is wrong. A test file
//! that uses it has a test named `be_the_monitor` which only calls [`be_the_monitor`].

#![allow(unsafe_code, reason = "forks")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use super::kernel::{self, Userfault};
use super::machine::{Machine, Work};
use super::memory::{Balloon, Memory, Of, Region, map};
use super::{Image, PAGE};
use crate::content::Dice;

const VARIABLE: &str = "QUINION_TEST_MONITOR";
/// The prefix of the monitor's lines; the test harness prints lines, too.
const SAYS: &str = "monitor: ";
/// The prefix of the server's messages, which tell only what is wrong.
const REFUSED: &str = "refused: ";
/// The first line of a monitor.
const READY: &str = "ready";
/// A monitor that has not answered by now hangs.
const WATCHDOG: Duration = Duration::from_secs(300);

/// The kind of a guest's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Backing {
    /// As Firecracker has it. Faults are MISSING.
    Anonymous,
    /// A file in memory of the monitor's own, sent beside the first descriptor. Faults are MISSING.
    Shared,
    /// A private mapping of a file that another process fills. Faults are MINOR.
    Clone(PathBuf),
    /// A private mapping of the image that the server hands over when it is asked. Faults are MINOR, or MISSING.
    Offered,
    /// As [`Backing::Offered`], but the monitor asks for one kind of fault only; the server registers the other.
    OfferedFor(u64),
}

/// A monitor that is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub socket: PathBuf,
    pub image: Image,
    /// Offset and bytes of each region; empty: one region, of the whole image.
    pub regions: Vec<(u64, u64)>,
    pub backing: Backing,
    /// `UFFD_FEATURE_*`; Firecracker asks for events of removal, and for nothing else.
    pub features: u64,
}

impl Plan {
    pub fn new(socket: impl AsRef<Path>, image: Image) -> Self {
        Self {
            socket: socket.as_ref().to_owned(),
            image,
            regions: Vec::new(),
            backing: Backing::Anonymous,
            features: kernel::EVENT_REMOVE,
        }
    }

    pub fn features(mut self, features: u64) -> Self {
        self.features = features;
        self
    }

    pub fn backing(mut self, backing: Backing) -> Self {
        self.backing = backing;
        self
    }

    /// In two regions of which the second comes first in memory's order and has half of the image, and so on.
    pub fn in_regions(mut self, count: u64) -> Self {
        let pages = self.image.pages / count;
        let last = |nth: u64| if nth == count - 1 { self.image.pages } else { (nth + 1) * pages };
        let bytes = PAGE as u64;
        self.regions =
            (0..count).map(|nth| (nth * pages * bytes, (last(nth) - nth * pages) * bytes)).collect();
        self
    }

    /// The command that has a monitor begin.
    pub fn command(&self) -> String {
        let Image { number, pages, generation, zero_every } = self.image;
        let backing = match &self.backing {
            Backing::Anonymous => "anonymous",
            Backing::Shared => "shared",
            Backing::Offered => "offered",
            Backing::OfferedFor(kernel::MINOR) => "offered-minor",
            Backing::OfferedFor(_) => "offered-missing",
            Backing::Clone(path) => path.to_str().expect("a path of plain letters"),
        };
        let socket = self.socket.to_str().expect("a path of plain letters");
        let features = self.features;
        let mut command =
            format!("begin {socket} {number} {pages} {generation} {zero_every} {backing} {features}");
        for (offset, bytes) in &self.regions {
            command += &format!(" {offset} {bytes}");
        }
        command
    }
}

/// A monitor that runs. It is killed when it goes out of scope.
pub struct Monitor {
    child: Child,
    answers: Receiver<String>,
}

impl Monitor {
    /// Starts a monitor that has not begun. It has none of this process's descriptors any more.
    pub fn idle() -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a test knows its own name"));
        command.args(["--exact", "be_the_monitor", "--nocapture", "--test-threads=1"]);
        command.env(VARIABLE, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a test can be started again");
        let lines = BufReader::new(child.stdout.take().expect("it is a pipe"));
        let (teller, answers) = channel();
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                if let Some((_, said)) = line.split_once(SAYS)
                    && teller.send(said.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        let mut this = Self { child, answers };
        assert_eq!(this.hear().as_deref(), Some(READY), "a monitor starts");
        this
    }

    /// Starts a monitor that introduces itself to its server.
    pub fn start(plan: &Plan) -> Self {
        let mut this = Self::idle();
        this.does(&plan.command());
        this
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command, and does not wait for the answer.
    pub fn tell(&mut self, command: &str) {
        let input = self.child.stdin.as_mut().expect("it is a pipe");
        // One that has died is noticed when it does not answer.
        let _ = writeln!(input, "{command}").and_then(|()| input.flush());
    }

    /// The next answer; `None` if the monitor has ended. Messages of the server are skipped.
    pub fn answer(&mut self) -> Option<String> {
        loop {
            let heard = self.hear();
            if !heard.as_ref().is_some_and(|words| words.starts_with(REFUSED)) {
                return heard;
            }
        }
    }

    /// The next answer, or an earlier message of the server.
    pub fn hear(&mut self) -> Option<String> {
        match self.answers.recv_timeout(WATCHDOG) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                panic!("the monitor has not answered for {WATCHDOG:?}: a fault of its is not served");
            }
        }
    }

    pub fn ask(&mut self, command: &str) -> Option<String> {
        self.tell(command);
        self.answer()
    }

    /// Sends a command, which must succeed.
    #[track_caller]
    pub fn does(&mut self, command: &str) {
        match self.ask(command) {
            Some(answer) => assert_eq!(answer, "done", "`{command}`"),
            None => panic!("`{command}`: the monitor ended by {}", self.ended()),
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it is our own child");
    }

    /// Waits for its end, whatever it still says.
    pub fn wait(&mut self) -> ExitStatus {
        while self.answer().is_some() {}
        self.child.wait().expect("it is our own child")
    }

    /// How it ended, when it does.
    pub fn ended(&mut self) -> ExitStatus {
        while let Some(answer) = self.answer() {
            assert_eq!(answer, "", "it was to end");
        }
        self.child.wait().expect("it is our own child")
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct State {
    memory: Memory,
    _userfault: Userfault,
    stream: UnixStream,
}

/// Runs as a monitor, if this process was started as one.
pub fn be_the_monitor() {
    if std::env::var_os(VARIABLE).is_none() {
        return;
    }
    let mut state = None;
    say(READY);
    for line in std::io::stdin().lines() {
        let Ok(line) = line else { break };
        let answer = match obey(&mut state, &line) {
            Ok(()) => "done".to_owned(),
            Err(why) => why,
        };
        say(&answer);
    }
    std::process::exit(0);
}

fn say(answer: &str) {
    let mut out = std::io::stdout();
    let said = writeln!(out, "\n{SAYS}{}", answer.replace('\n', " ")).and_then(|()| out.flush());
    if said.is_err() {
        std::process::exit(1);
    }
}

fn obey(state: &mut Option<State>, line: &str) -> Result<(), String> {
    let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
    let words: Vec<&str> = rest.split(' ').collect();
    if verb == "begin" {
        *state = Some(begin(&words)?);
        return Ok(());
    }
    if verb == "hang_up" {
        if let Some(gone) = state.take() {
            gone.stream.shutdown(Shutdown::Both).map_err(|error| error.to_string())?;
        }
        return Ok(());
    }
    if verb == "lie" {
        *state = Some(lie(&words)?);
        return Ok(());
    }
    if verb == "fork" {
        return fork(state, rest);
    }
    if verb == "orphan" {
        let (file, commands) = rest.split_once(' ').expect("a file and commands");
        return orphan(state, Path::new(file), commands);
    }
    let number = |at: usize| -> u64 { words[at].parse().expect("a number") };
    let pages = || number(0)..number(0) + number(1);
    let State { memory, .. } = state.as_mut().ok_or("it has not begun")?;
    let plain = |done: std::io::Result<()>| done.map_err(|error| format!("{verb}: {error}"));
    match verb {
        "touch" => touch(memory, pages(), number(2)),
        "write" => {
            memory.write(pages(), number(2));
            Ok(())
        }
        "balloon" => {
            let how = if words[2] == "remove" { Balloon::Remove } else { Balloon::DontNeed };
            plain(memory.balloon(pages(), how))
        }
        "reset" => plain(memory.reset(pages())),
        "race" => race(memory, number(0), number(1)),
        "probe" => memory.probe(number(0)).map_err(|e| format!("errno {}", e.raw_os_error().unwrap_or(0))),
        "unmap" => plain(memory.unmap(pages())),
        "remap" => plain(memory.remap(number(0) as usize)),
        "sum" => sum(memory, pages()),
        "set" => set(memory, pages(), number(2)),
        other => Err(format!("a monitor cannot {other}")),
    }
}

fn begin(words: &[&str]) -> Result<State, String> {
    let number = |at: usize| -> u64 { words[at].parse().expect("a number") };
    let image = Image {
        number: number(1) as u32,
        pages: number(2),
        generation: number(3) as u32,
        zero_every: number(4),
    };
    let failed = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
    let mut ranges: Vec<(u64, u64)> =
        (7..words.len()).step_by(2).map(|at| (number(at), number(at + 1))).collect();
    if ranges.is_empty() {
        ranges.push((0, image.bytes()));
    }
    let stream = UnixStream::connect(words[0]).map_err(failed("connect"))?;
    let (file, mode): (Option<OwnedFd>, u64) = match words[5] {
        "anonymous" => (None, kernel::MISSING),
        "shared" => (Some(kernel::memfd(image.bytes())), kernel::MISSING),
        "offered" => {
            // Where the image has holes, a fault is not a minor one.
            (Some(ask_for_the_image(&stream, image.bytes())?), kernel::MISSING | kernel::MINOR)
        }
        "offered-minor" => (Some(ask_for_the_image(&stream, image.bytes())?), kernel::MINOR),
        "offered-missing" => (Some(ask_for_the_image(&stream, image.bytes())?), kernel::MISSING),
        path => (Some(std::fs::File::open(path).map_err(failed("image"))?.into()), kernel::MINOR),
    };
    let of = match &file {
        None => Of::Anonymous,
        Some(file) if words[5] == "shared" => Of::Shared(file),
        Some(file) => Of::Private(file),
    };
    let userfault = Userfault::open(number(6)).map_err(failed("userfaultfd"))?;
    let mut regions = Vec::new();
    for (offset, bytes) in ranges {
        let address = map(&of, offset, bytes).map_err(failed("map"))?;
        userfault.register(address, bytes, mode).map_err(failed("register"))?;
        regions.push(Region { address, offset, bytes });
    }
    let mut descriptors: Vec<BorrowedFd<'_>> = vec![userfault.as_fd()];
    if words[5] == "shared" {
        descriptors.extend(file.as_ref().map(OwnedFd::as_fd));
    }
    kernel::send(&stream, message(&regions).as_bytes(), &descriptors).map_err(failed("send"))?;
    if matches!(words[5], "offered-minor" | "offered-missing") {
        wait_until_ready(&stream)?;
    }
    listen(&stream);
    Ok(State { memory: Memory::new(image, regions), _userfault: userfault, stream })
}

/// Passes on what the server says. It ends when the server closes.
fn listen(stream: &UnixStream) {
    let mut stream = stream.try_clone().expect("a descriptor more");
    std::thread::spawn(move || {
        let mut said = Vec::new();
        // The server may close with data of the monitor unread, which is an error here; earlier messages are kept.
        let _ = stream.read_to_end(&mut said);
        say(&format!("{REFUSED}{}", String::from_utf8_lossy(&said)));
    });
}

/// The server's own handshake: asks for the image.
fn ask_for_the_image(stream: &UnixStream, bytes: u64) -> Result<OwnedFd, String> {
    let want = b"{\"quinion_restore\":1,\"want\":\"image\"}\n";
    kernel::send(stream, want, &[]).map_err(|error| format!("asking for the image: {error}"))?;
    let (answer, descriptors) = kernel::receive(stream).map_err(|error| format!("the image: {error}"))?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let expected = format!("{{\"quinion_restore\":1,\"size\":{bytes},\"page_size\":4096}}\n");
    match <[OwnedFd; 1]>::try_from(descriptors) {
        Ok([image]) if answer == expected => Ok(image),
        other => Err(format!("the server answers {answer:?} with {other:?}, and not {expected:?}")),
    }
}

/// Until the server sees all faults.
fn wait_until_ready(stream: &UnixStream) -> Result<(), String> {
    let (answer, _) = kernel::receive(stream).map_err(|error| format!("the server's word: {error}"))?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    if answer == "{\"quinion_restore\":1,\"ready\":true}\n" { Ok(()) } else { Err(answer) }
}

/// Sends a message that is not true, with a descriptor that is.
fn lie(words: &[&str]) -> Result<State, String> {
    let bytes = 2 * PAGE as u64;
    let told = |error: std::io::Error| error.to_string();
    let userfault = Userfault::open(kernel::EVENT_REMOVE).map_err(told)?;
    let address = map(&Of::Anonymous, 0, bytes).map_err(told)?;
    userfault.register(address, bytes, kernel::MISSING).map_err(told)?;
    let stream = UnixStream::connect(words[0]).map_err(told)?;
    let message = words[1..].join(" ").replace("ADDRESS", &address.to_string());
    kernel::send(&stream, message.as_bytes(), &[userfault.as_fd()]).map_err(told)?;
    let region = Region { address, offset: 0, bytes };
    Ok(State { memory: Memory::new(Image::new(0, 2), vec![region]), _userfault: userfault, stream })
}

/// The regions, in Firecracker's words.
pub fn message(regions: &[Region]) -> String {
    let region = |region: &Region| {
        format!(
            "{{\"base_host_virt_addr\":{},\"size\":{},\"offset\":{},\"page_size\":4096,\"page_size_kib\":4096}}",
            region.address, region.bytes, region.offset
        )
    };
    format!("[{}]", regions.iter().map(region).collect::<Vec<_>>().join(","))
}

/// Every thread reads every page, so several may wait for one fault.
fn touch(memory: &Memory, pages: Range<u64>, threads: u64) -> Result<(), String> {
    let reader = |seed: u64| {
        let mut order: Vec<u64> = pages.clone().collect();
        let mut dice = Dice::new(seed);
        for at in (1..order.len()).rev() {
            order.swap(at, dice.below(at as u64 + 1) as usize);
        }
        order.into_iter().try_for_each(|page| memory.check_page(page))
    };
    let reader = &reader;
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|seed| scope.spawn(move || reader(seed))).collect();
        readers
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a reader panicked".to_owned())?)
    })
}

/// Threads read anywhere while pages are given back, a few at a time.
fn race(memory: &Memory, rounds: u64, threads: u64) -> Result<(), String> {
    let pages = memory.image().pages;
    let is_over = AtomicBool::new(false);
    let reader = |seed: u64| {
        let mut dice = Dice::new(seed + 1000);
        while !is_over.load(Ordering::Relaxed) {
            memory.check_page(dice.below(pages))?;
        }
        Ok::<(), String>(())
    };
    let reader = &reader;
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|seed| scope.spawn(move || reader(seed))).collect();
        let mut dice = Dice::new(rounds);
        let mut given = Ok(());
        for _ in 0..rounds {
            let first = dice.below(pages);
            let count = 1 + dice.below((pages - first).min(40));
            given = memory.balloon(first..first + count, Balloon::DontNeed);
            if given.is_err() {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        for thread in readers {
            thread.join().map_err(|_| "a reader panicked".to_owned())??;
        }
        given.map_err(|error| format!("balloon: {error}"))
    })
}

/// A child, with a copy of all that is mapped, does the commands and ends by their outcome.
fn fork(state: &mut Option<State>, commands: &str) -> Result<(), String> {
    // SAFETY: the child does what the monitor does, which needs nothing of threads that are not there any more.
    match unsafe { libc::fork() } {
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        0 => {
            let outcome = commands.split("; ").try_for_each(|command| obey(state, command));
            if let Err(why) = &outcome {
                eprintln!("a child of the monitor: {why}");
            }
            // SAFETY: nothing of this process's is to be cleaned up by its copy.
            unsafe { libc::_exit(i32::from(outcome.is_err())) }
        }
        child => {
            let mut status = 0;
            // SAFETY: this process's child.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            if status == 0 { Ok(()) } else { Err(format!("the child ended by {status:#x}")) }
        }
    }
}

/// A child, with a copy of all that is mapped, does the commands after this process has ended. The file is there when
/// they are done: it says `done`, or why not.
fn orphan(state: &mut Option<State>, file: &Path, commands: &str) -> Result<(), String> {
    let parent = std::process::id();
    // SAFETY: the child does what the monitor does, which needs nothing of threads that are not there any more.
    match unsafe { libc::fork() } {
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        0 => {
            for fd in 0..2 {
                // SAFETY: the test would wait for the other ends of these; nothing here uses them.
                unsafe { libc::close(fd) };
            }
            while std::os::unix::process::parent_id() == parent {
                std::thread::sleep(Duration::from_millis(10));
            }
            // The server, too, is to know of it.
            std::thread::sleep(Duration::from_millis(500));
            let outcome = commands.split("; ").try_for_each(|command| obey(state, command));
            let words = outcome.err().unwrap_or_else(|| "done".to_owned());
            let whole = file.with_extension("whole");
            let written = std::fs::write(&whole, words).and_then(|()| std::fs::rename(&whole, file));
            // SAFETY: nothing of this process's is to be cleaned up by its copy.
            unsafe { libc::_exit(i32::from(written.is_err())) }
        }
        _ => Ok(()),
    }
}

fn guest(memory: &Memory, work: Work) -> Result<u32, String> {
    let slots: Vec<_> = memory.regions.iter().map(|r| (r.offset, r.address, r.bytes)).collect();
    Machine::new(&slots).map_err(|error| format!("kvm: {error}"))?.run(work)
}

fn sum(memory: &Memory, pages: Range<u64>) -> Result<(), String> {
    let work = Work::Sum { first: pages.start, pages: pages.end - pages.start };
    let (found, expected) = (guest(memory, work)?, memory.sum(pages));
    if found == expected {
        Ok(())
    } else {
        Err(format!("the guest's sum is {found:#x}, and not {expected:#x}"))
    }
}

fn set(memory: &Memory, pages: Range<u64>, value: u64) -> Result<(), String> {
    guest(memory, Work::Write { first: pages.start, pages: pages.end - pages.start, value })?;
    pages.for_each(|page| memory.note_written(page, value));
    Ok(())
}

//! Several processes, one server: what they read, what it costs, and what is left when one of them is killed.
//!
//! A client, or a server, in another process is this test program started again (`the_child`). The store is the server
//! on loopback of `quinion-testing-s3`, whose bytes follow from a version and a position: each byte is checked.
#![allow(unsafe_code, reason = "a child forks, and forbids itself system calls")]

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use quinion::Cache;
use quinion::internals::arena::control::{Advice, Operation};
use quinion::internals::arena::{CellNumber, LAYOUT_VERSION};
use quinion::internals::units::MappingId;
use quinion_object::internals::Newest;
use quinion_object::{Freshness, ObjectCache, Options};
use quinion_owner::internals::viewer::handshake::{
    ANY_CACHE, DescriptorOffer, JoinRequest, NAME_MAX, NO_PLAN, NameOffer,
};
use quinion_owner::internals::viewer::{self, NameRequest, RequestError, SentName, ViewedFile, Viewer};
use quinion_service::{Client, ClientFile, ErrorKind, RangeRead, Server};
use quinion_testing::content::Dice;
use quinion_testing_s3 as s3;
use rustix::process::{Resource, Rlimit, setrlimit};

use quinion_testing_s3::Fault;
use reads::read_once;

mod reads;

const URL: &str = "s3://bucket/object";
/// Longer than anything here takes on a machine that is busy with other tests.
const LONG: Duration = Duration::from_secs(60);

fn cache(bytes: u64) -> Cache {
    Cache::builder().memory(bytes).build().unwrap()
}

struct Fixture {
    store: s3::Server,
    server: Option<Server>,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(object: usize, memory: u64) -> Self {
        Self::with(object, memory, Options::new())
    }

    fn with(object: usize, memory: u64, options: Options) -> Self {
        let store = s3::Server::with_object(object);
        let folder = tempfile::tempdir().unwrap();
        let server = Server::builder(cache(memory)).store("s3://bucket", store.store(), options);
        let server = server.start(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
        Self { store, server: Some(server), folder }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }
    fn socket(&self) -> PathBuf {
        self.folder.path().join("q/s.sock")
    }
    fn client(&self) -> Client {
        Client::connect(self.socket().to_str().unwrap()).unwrap()
    }
    fn child(&self, role: &str) -> Process {
        Process::start(role, &self.socket(), &[])
    }
    fn reads(&self) {
        let mut reader = self.child("read");
        reader.says("open");
        reader.go_on();
        reader.says("read");
    }
}

struct Process {
    child: Child,
    output: mpsc::Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(role: &str, socket: &Path, environment: &[(&str, String)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env("QUINION_CHILD", role).env("QUINION_SOCKET", socket);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (sender, output) = mpsc::channel();
        std::thread::spawn(move || send_lines(lines, &sender));
        Self { child, output }
    }

    #[track_caller]
    fn says(&self, words: &str) -> String {
        let until = Instant::now() + LONG;
        loop {
            let line = self.output.recv_timeout(until.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|_| panic!("the child does not say {words:?}"));
            if let Some((_, rest)) = line.split_once(words) {
                return rest.trim().to_owned();
            }
        }
    }

    fn go_on(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap(); // SIGKILL
        self.child.wait().unwrap();
    }
}

fn send_lines(lines: BufReader<ChildStdout>, to: &mpsc::Sender<String>) {
    for line in lines.lines().map_while(Result::ok) {
        if to.send(line).is_err() {
            return;
        }
    }
}

#[track_caller]
fn becomes(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn read_all(file: &ClientFile, version: u32, seed: u64) {
    let mut random = Dice::new(seed | 1);
    let mut buffer = vec![0; 300_000];
    for _ in 0..60 {
        let (at, len) = (random.below(file.len() + 1000), random.below(300_000) as usize);
        let read = file.read_at(&mut buffer[..len], at).unwrap();
        assert_eq!(read as u64, file.len().saturating_sub(at).min(len as u64), "{len} bytes at {at}");
        s3::check(version, at, &buffer[..read]);
    }
    let mut at = 0;
    while at < file.len() {
        let read = file.read_at(&mut buffer, at).unwrap();
        s3::check(version, at, &buffer[..read]);
        at += read as u64;
    }
}

// ---- the other process ------------------------------------------------------------------------------------------

/// Not a test: what a child does that another test has started.
#[test]
fn the_child() {
    let Ok(role) = std::env::var("QUINION_CHILD") else { return };
    let socket = std::env::var("QUINION_SOCKET").unwrap();
    let connect = || Client::connect(&socket).unwrap();
    match role.as_str() {
        "server" => be_server(&socket),
        "read" => {
            let file = connect().open(URL).unwrap();
            say("open");
            wait();
            read_all(&file, 1, u64::from(std::process::id()) << 20);
            say("read");
        }
        "hit" => read_without_system_calls(&connect(), FirstLook::Hit),
        "miss" => read_without_system_calls(&connect(), FirstLook::Miss),
        "go-on" => read_and_go_on(&connect()),
        "open-on" => open_and_go_on(&connect()),
        "hold" => {
            let client = connect();
            let files: Vec<_> = (0..10).map(|_| client.open(URL).unwrap()).collect();
            let pins: Vec<_> = files.iter().map(|file| file.pin(5000..200_000).unwrap()).collect();
            say("holds");
            wait();
            drop((pins, files));
        }
        "fork" => fork_and_read(&connect(), &socket),
        "fork-store" => fork_and_ask_a_store(),
        "fork-following" => fork_and_follow(),
        "no-threads" => ask_for_threads(&connect()),
        "be-interrupted" => be_interrupted(&connect()),
        "serve-and-fork" => serve_and_fork(&socket),
        "stranger" => {
            let error = Client::connect(&socket).map(drop).unwrap_err();
            say(&format!("refused {:?} {error}", error.kind()));
        }
        role => panic!("nobody is {role}"),
    }
    std::process::exit(0);
}

fn say(words: &str) {
    println!("{words}");
    std::io::stdout().flush().unwrap();
}

fn wait() {
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

fn be_server(socket: &str) -> ! {
    let store = s3::store_at(&std::env::var("QUINION_STORE").unwrap());
    let server = Server::builder(cache(64 << 20)).store("s3://bucket", store, Options::new().whole_max(0));
    let server = server.start(socket).unwrap();
    say("serves");
    wait();
    drop(server);
    std::process::exit(0);
}

/// Reads in all ways, and checks each byte; each line says how many reads there were, and how long the longest of them
/// took since the line before, in milliseconds.
fn read_and_go_on(client: &Client) -> ! {
    let (client, mut file) = (client.clone().with_reconnect_timeout(LONG), client.open(URL).unwrap());
    let totals = Arc::new(Mutex::new((0_u64, Duration::ZERO)));
    let counted = Arc::clone(&totals);
    std::thread::spawn(move || {
        let mut random = Dice::new(std::process::id().into());
        loop {
            let begun = Instant::now();
            if random.below(8) == 0 {
                file = client.open(URL).unwrap();
            }
            read_once(&file, &mut random);
            let mut totals = counted.lock().unwrap();
            *totals = (totals.0 + 1, totals.1.max(begun.elapsed()));
        }
    });
    say("goes on");
    loop {
        wait();
        let mut totals = totals.lock().unwrap();
        say(&format!("reads {} {}", totals.0, totals.1.as_millis()));
        totals.1 = Duration::ZERO;
    }
}

/// Opens, again and again, and reads a byte; ends with an error that no server has a reason for.
fn open_and_go_on(client: &Client) -> ! {
    let client = client.clone().with_reconnect_timeout(LONG);
    let opener = std::thread::spawn(move || {
        let mut opened = 0_u64;
        loop {
            if opened.is_multiple_of(100) {
                say("opens");
            }
            let mut byte = [0];
            client.open(URL).unwrap().read_exact_at(&mut byte, 5).unwrap();
            s3::check(1, 5, &byte);
            opened += 1;
        }
    });
    let _: std::thread::Result<()> = opener.join();
    std::process::exit(1)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FirstLook {
    Hit,
    Miss,
}

/// From a moment on, this thread is ended by the kernel if it makes any system call but `read`, `write` and `exit`.
fn read_without_system_calls(client: &Client, look: FirstLook) -> ! {
    let file = client.open(URL).unwrap();
    let (mut buffer, end) = (vec![0; 20_000], file.len() - 20_000);
    if look == FirstLook::Hit {
        for _ in 0..2 {
            read_all(&file, 1, 7);
        }
    }
    say("begins");
    // SAFETY: it concerns this thread alone, which knows.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) }, 0);
    let mut random = Dice::new(99);
    let mut right = true;
    for _ in 0..2000 {
        let at = random.below(end);
        let read = file.read_at(&mut buffer, at);
        right &= matches!(read, Ok(20_000));
        let is_right = |(place, &byte): (usize, &u8)| byte == s3::byte(1, at + place as u64);
        right &= buffer.iter().enumerate().all(is_right);
    }
    let words: &[u8] = if right { b"hits are right\n" } else { b"hits are wrong\n" };
    // SAFETY: the bytes are there, and the thread ends.
    unsafe {
        libc::write(1, words.as_ptr().cast(), words.len());
        libc::syscall(libc::SYS_exit, 0);
    }
    unreachable!()
}

fn fork_and_read(client: &Client, socket: &str) {
    let file = client.open(URL).unwrap();
    let pin = file.pin(0..10_000).unwrap();
    read_all(&file, 1, 1);
    // SAFETY: the child goes on with this thread alone, and ends by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let old = file.read_at(&mut [0; 10], 0).unwrap_err().kind();
            let open = client.open(URL).unwrap_err().kind();
            let lent = pin.chunks().count();
            let anew = Client::connect(socket).unwrap().open(URL).unwrap();
            read_all(&anew, 1, 2);
            say(&format!("fork says {old:?} {open:?} {lent}"));
            drop((file, pin)); // they are the parent's still
            // SAFETY: it ends the process.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the number is there.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            s3::check(1, 0, pin.as_slice().unwrap_or(&pin.to_vec()));
            read_all(&file, 1, 3);
            say(&format!("origin says {status}"));
        }
    }
}

/// The child calls methods that answer from memory, where nothing but a look at the process tells that it is a child.
fn fork_and_ask_a_store() {
    let (inner, key) = (Arc::new(InMemory::new()), Key::from("object"));
    let objects = ObjectCache::new(cache(16 << 20), inner.clone(), Options::new()).unwrap();
    let store = quinion_object::cached_with(objects, Freshness::Immutable);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(inner.put(&key, s3::content(1, 9000).into())).unwrap();
    runtime.block_on(store.head(&key)).unwrap();
    // SAFETY: the child goes on with this thread alone, and ends by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            let mut head = pin!(store.head(&key));
            let answer = head.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            let error = answer.map(|answer| answer.err().map(|error| error.to_string()));
            store.invalidate(&key);
            store.invalidate_all();
            say(&format!("fork says {error:?}"));
            // SAFETY: it ends the process.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the number is there.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            let size = runtime.block_on(store.head(&key)).unwrap().size;
            say(&format!("origin says {status} {size}"));
        }
    }
}

/// At the fork a thread has what all reads by a following handle lock.
fn fork_and_follow() {
    static IS_LOCKED: AtomicBool = AtomicBool::new(false);
    static IS_OVER: AtomicBool = AtomicBool::new(false);
    fn wait_for(flag: &AtomicBool) {
        while !flag.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let newest = Newest::new(1, |_, _| {
        IS_LOCKED.store(true, Ordering::Relaxed);
        wait_for(&IS_OVER);
        true
    });
    std::thread::scope(|scope| {
        scope.spawn(|| newest.replace(&1, 2));
        wait_for(&IS_LOCKED);
        // SAFETY: the child goes on with this thread alone, and ends by `_exit`.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: it ends a child that waits for ever.
                unsafe { libc::alarm(60) };
                let read = newest.repeat(|_| Ok::<_, ()>(()), |_, ()| false, || Ok(3));
                say(&format!("fork says {read:?} {:?}", newest.own()));
                // SAFETY: it ends the process.
                unsafe { libc::_exit(0) }
            }
            child => {
                let mut status = 0;
                // SAFETY: the number is there.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                IS_OVER.store(true, Ordering::Relaxed);
                say(&format!("origin says {status}"));
            }
        }
    });
}

/// Asks for threads that the system does not give: for a cache of objects, for a client, and for a store that has begun
/// with as many as it needs.
fn ask_for_threads(client: &Client) {
    let (cache, bare) = (cache(16 << 20), Arc::new(InMemory::new()));
    let store = quinion_service::cached(bare.clone(), client.clone(), "s3://bucket").unwrap();
    // SAFETY: they ask for a number, and change the user of this process alone, whose threads are bounded from then on.
    let is_bounded = unsafe { libc::geteuid() != 0 || libc::setresuid(65_534, 65_534, 65_534) == 0 };
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Nproc, none).unwrap();
    if !is_bounded || std::thread::Builder::new().spawn(|| ()).is_ok() {
        return say("threads are given");
    }
    let objects = ObjectCache::new(cache, bare, Options::new());
    let is_told = matches!(objects, Err(quinion_object::Error::Runtime(_)));
    let mut context = Context::from_waker(Waker::noop());
    let open = pin!(client.open_async(URL)).poll(&mut context);
    let key = Key::from("object");
    let head = pin!(store.head(&key)).poll(&mut context);
    let head = head.map(|head| head.is_err_and(|error| error.to_string().contains("cannot start threads")));
    say(&format!("threads are {is_told} {:?} {head:?}", open.map(|open| open.unwrap_err().kind())));
}

fn be_interrupted(client: &Client) {
    static HANDLED: AtomicBool = AtomicBool::new(false);
    extern "C" fn handle(_: libc::c_int) {
        HANDLED.store(true, Ordering::Relaxed);
    }
    let file = client.open(URL).unwrap();
    say("open");
    wait();
    // SAFETY: the handler stores a word, and nothing else.
    unsafe { libc::signal(libc::SIGUSR1, handle as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    // SAFETY: it asks for a number.
    let reader = unsafe { libc::pthread_self() };
    let interrupter = std::thread::spawn(move || {
        let begun = Instant::now();
        while !HANDLED.load(Ordering::Relaxed) && begun.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(200));
            // SAFETY: that thread waits for this one.
            unsafe { libc::pthread_kill(reader, libc::SIGUSR1) };
        }
        HANDLED.load(Ordering::Relaxed)
    });
    let mut buffer = vec![0; 10_000];
    let read = file.read_at(&mut buffer, 0).unwrap();
    s3::check(1, 0, &buffer[..read]);
    say(&format!("interrupted {} {read}", interrupter.join().unwrap()));
}

fn serve_and_fork(socket: &str) {
    let server = Server::builder(cache(16 << 20)).start(socket).unwrap();
    // SAFETY: the child goes on with this thread alone, and ends by `_exit`.
    match unsafe { libc::fork() } {
        0 => {
            drop(server);
            // SAFETY: it ends the process.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the number is there.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            say(&format!("forked {status} {:?}", Client::connect(socket).map(drop).is_ok()));
        }
    }
}

// ---- tests ------------------------------------------------------------------------------------------------------

/// 1. A client has an object open, and the server gets a store in the place of the one before: with other credentials.
/// 2. What the client reads is fetched by the old store until the object is opened again.
#[test]
fn a_store_of_the_same_name_fetches_open_objects_and_one_without_a_name_does_not() {
    for (name, is_same) in [(Some("one"), true), (None, false)] {
        let options = || {
            let options = Options::new().whole_max(0).fill_min(4096);
            name.map_or(options.clone(), |name| options.store_name(name))
        };
        let fixture = Fixture::with(8_000_000, 32 << 20, options());
        let client = fixture.client();
        let file = client.open(URL).unwrap();
        let mut buffer = vec![0; 10_000];
        file.read_exact_at(&mut buffer, 0).unwrap();
        let before = (fixture.store.control.gets(), fixture.server().stats().fetches[0].1.gets);
        assert!(before.0 > 0 && before.0 == before.1, "{before:?}");
        let other = s3::Server::with_object(8_000_000);
        fixture.server().set_store("s3://bucket", other.store(), options()).unwrap();
        for at in [4_000_000, 6_000_000] {
            file.read_exact_at(&mut buffer, at).unwrap();
            s3::check(1, at, &buffer);
        }
        let (old, new) = (fixture.store.control.gets() - before.0, other.control.gets());
        assert_eq!(
            (old == 0, new > 0),
            (is_same, is_same),
            "{name:?}: {old} of the old store, {new} of the new"
        );
        let counted = fixture.server().stats().fetches[0].1.gets;
        assert_eq!(counted, if is_same { before.1 + new } else { 0 }, "{name:?}");
        // What is opened now is of the new store in both cases.
        let (again, known) = (client.open(URL).unwrap(), other.control.gets());
        again.read_exact_at(&mut buffer, 2_000_000).unwrap();
        s3::check(1, 2_000_000, &buffer);
        assert!(other.control.gets() > known && other.control.heads() == 1, "{name:?}");
    }
}

/// 1. A server of a cache ends, or is there still.
/// 2. Another is started on the same cache: it listens, and answers no client.
#[test]
fn a_second_server_of_one_cache_is_refused_and_the_first_serves_on() {
    let mut fixture = Fixture::new(100_000, 16 << 20);
    let cache = fixture.server().cache().clone();
    let other = fixture.folder.path().join("q/other.sock");
    let second = || {
        let error = Server::builder(cache.clone()).start(other.to_str().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Start);
        assert!(error.to_string().contains("a cache is served once"), "{error}");
        assert!(!other.exists(), "its socket is removed");
    };
    second();
    read_all(&fixture.client().open(URL).unwrap(), 1, 3);
    fixture.server.take().unwrap().stop();
    second();
    // Its own process reads on by it, and a cache that never was served can be.
    let objects =
        quinion_object::ObjectCache::new(cache.clone(), fixture.store.store(), Options::new()).unwrap();
    let file = objects.open(&object_store::path::Path::from("object")).unwrap();
    s3::check(1, 0, &file.bytes(0..100_000).unwrap());
    let next =
        Server::builder(self::cache(16 << 20)).store("s3://bucket", fixture.store.store(), Options::new());
    let _next = next.start(other.to_str().unwrap()).unwrap();
    read_all(&Client::connect(other.to_str().unwrap()).unwrap().open(URL).unwrap(), 1, 3);
}

#[test]
fn eight_processes_cost_the_bytes_of_one_and_a_late_one_costs_none() {
    const BYTES: usize = 5_000_003;
    let fixture = Fixture::new(BYTES, 64 << 20);
    let mut children: Vec<_> = (0..8).map(|_| fixture.child("read")).collect();
    children.iter().for_each(|child| drop(child.says("open")));
    assert_eq!(fixture.server().stats().clients, 8);
    children.iter_mut().for_each(Process::go_on);
    children.iter().for_each(|child| drop(child.says("read")));
    // A GET may bring what lies between two ranges as well, which is thrown away.
    let fetched = fixture.server().stats().fetches[0].1;
    assert_eq!(fetched.bytes - fetched.gap_bytes, BYTES as u64, "each byte is fetched once: {fetched:?}");
    drop(children);
    becomes("all handles are given back", || fixture.server().stats().open_files == 0);
    // The object has no handle any more, and its bytes are there.
    let gets = fixture.store.control.gets();
    let mut late = fixture.child("read");
    late.says("open");
    late.go_on();
    late.says("read");
    assert_eq!(fixture.store.control.gets(), gets, "a late reader's bytes were fetched again");
}

#[test]
fn a_small_object_costs_eight_processes_one_get() {
    let fixture = Fixture::new(200_000, 64 << 20);
    fixture.store.control.set_latency(Duration::from_millis(20));
    let mut children: Vec<_> = (0..8).map(|_| fixture.child("read")).collect();
    children.iter().for_each(|child| drop(child.says("open")));
    children.iter_mut().for_each(Process::go_on);
    children.iter().for_each(|child| drop(child.says("read")));
    assert_eq!((fixture.store.control.gets(), fixture.store.control.heads()), (1, 8));
}

#[test]
fn a_hit_in_a_client_makes_no_system_call() {
    let fixture = Fixture::new(3_000_000, 64 << 20);
    let child = fixture.child("hit");
    child.says("hits are right");
    // That a call is noticed: a read that has to ask ends its thread.
    let fixture = Fixture::with(3_000_000, 64 << 20, Options::new().whole_max(0));
    let child = fixture.child("miss");
    child.says("begins");
    let task = format!("/proc/{}/task", child.child.id());
    becomes("the thread that asks is ended", || std::fs::read_dir(&task).unwrap().count() == 1);
    assert!(child.output.try_iter().all(|line| !line.contains("hits are")));
}

#[test]
fn a_client_that_is_killed_gives_back_handles_and_pins() {
    let fixture = Fixture::new(1_000_000, 64 << 20);
    let mut child = fixture.child("hold");
    child.says("holds");
    let stats = fixture.server().stats();
    assert_eq!((stats.clients, stats.open_files, stats.pins), (1, 10, 10));
    assert!(fixture.server().cache().stats().pinned_bytes > 0);
    child.kill();
    becomes("nothing is left of it", || {
        let stats = fixture.server().stats();
        (stats.clients, stats.open_files, stats.pins) == (0, 0, 0)
    });
    becomes("nothing is pinned", || fixture.server().cache().stats().pinned_bytes == 0);
    // And one that ends by itself.
    let mut child = fixture.child("hold");
    child.says("holds");
    child.go_on();
    child.child.wait().unwrap();
    becomes("nothing is left of it", || fixture.server().stats().open_files == 0);
}

#[test]
fn objects_of_a_killed_server_fail_soon_and_files_are_read_by_the_kernel() {
    let store = s3::Server::with_object(8_000_000);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("q/s.sock");
    let environment = [("QUINION_STORE", store.address())];
    let mut server = Process::start("server", &socket, &environment);
    server.says("serves");
    let client = Client::connect(socket.to_str().unwrap()).unwrap();
    let object = client.open(URL).unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, s3::content(3, 500_000)).unwrap();
    let file = client.open(path.to_str().unwrap()).unwrap();
    let mut buffer = vec![0; 100_000];
    assert_eq!(object.read_at(&mut buffer, 0).unwrap(), 100_000);
    let pin = object.pin(0..100_000).unwrap();
    // A reader that waits for the store.
    store.control.set_latency(Duration::from_secs(30));
    let (waiting, gets) = (object.clone(), store.control.gets());
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || {
        let result = waiting.read_at(&mut [0; 100_000], 5_000_000);
        sender.send(result.map_err(|error| error.kind())).unwrap();
    });
    becomes("it is asked for", || store.control.gets() > gets);
    server.kill();
    let killed = Instant::now();
    let answer = answer.recv_timeout(Duration::from_secs(20)).expect("it waits for a server that is no more");
    assert_eq!(answer, Err(ErrorKind::OwnerDead), "after {:?}", killed.elapsed());
    let error = object.read_at(&mut buffer, 0).unwrap_err();
    assert!(error.kind() == ErrorKind::OwnerDead && error.to_string().contains("connect again"), "{error}");
    assert!(client.owner_is_dead().unwrap());
    assert_eq!(client.open(URL).unwrap_err().kind(), ErrorKind::OwnerDead);
    s3::check(1, 0, &pin.to_vec());
    assert_eq!(file.read_at(&mut buffer, 1000).unwrap(), 100_000);
    s3::check(3, 1000, &buffer);
    assert!(!file.is_served().unwrap());
    // Another server takes its place, and its socket's.
    store.control.set_latency(Duration::ZERO);
    let server = Process::start("server", &socket, &environment);
    server.says("serves");
    let object = Client::connect(socket.to_str().unwrap()).unwrap().open(URL).unwrap();
    read_all(&object, 1, 5);
}

fn serve_elsewhere(socket: &Path, store: &s3::Server) -> Process {
    let server = Process::start("server", socket, &[("QUINION_STORE", store.address())]);
    server.says("serves");
    server
}

fn elsewhere() -> (s3::Server, tempfile::TempDir, PathBuf, Process) {
    let store = s3::Server::with_object(8_000_000);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("q/s.sock");
    let server = serve_elsewhere(&socket, &store);
    (store, folder, socket, server)
}

#[test]
fn readers_go_on_at_the_next_server_however_the_one_before_has_ended() {
    let (store, _folder, socket, mut server) = elsewhere();
    let mut readers: Vec<_> = (0..8).map(|_| Process::start("go-on", &socket, &[])).collect();
    readers.iter().for_each(|reader| drop(reader.says("goes on")));
    // How many reads each has done, and the longest of them.
    let mut progress = || -> Vec<(u64, u64)> {
        let said = readers.iter_mut().map(|reader| {
            reader.go_on();
            let said = reader.says("reads ");
            let (reads, longest) = said.split_once(' ').unwrap();
            (reads.parse().unwrap(), longest.parse().unwrap())
        });
        said.collect()
    };
    for round in 0..4 {
        let begun = progress();
        becomes("each reads", || progress().iter().zip(&begun).all(|(now, then)| now.0 > then.0 + 20));
        if round % 2 == 0 {
            server.kill();
        } else {
            server.go_on();
            server.child.wait().unwrap();
        }
        server = serve_elsewhere(&socket, &store);
        let begun = progress();
        let longest_of = |progress: &[(u64, u64)]| progress.iter().map(|reader| reader.1).max().unwrap();
        let mut longest = longest_of(&begun);
        becomes("each goes on", || {
            let now = progress();
            longest = longest_of(&now).max(longest);
            now.iter().zip(&begun).all(|(now, then)| now.0 > then.0 + 20)
        });
        println!("round {round}: the longest read took {longest} ms");
    }
}

#[test]
fn an_open_beside_the_end_of_a_server_is_answered_by_the_next() {
    let (store, _folder, socket, mut server) = elsewhere();
    let openers: Vec<_> = (0..6).map(|_| Process::start("open-on", &socket, &[])).collect();
    for _round in 0..15 {
        for opener in &openers {
            opener.output.try_iter().for_each(drop);
            opener.says("opens");
        }
        server.go_on();
        server.child.wait().unwrap();
        server = serve_elsewhere(&socket, &store);
    }
    openers.iter().for_each(|opener| drop(opener.says("opens")));
}

#[test]
fn an_object_that_was_replaced_between_two_servers_is_not_read_on() {
    let (store, _folder, socket, mut server) = elsewhere();
    let client = Client::connect(socket.to_str().unwrap()).unwrap();
    let (object, mut buffer) = (client.open(URL).unwrap(), [0; 10_000]);
    object.read_exact_at(&mut buffer, 0).unwrap();
    let pin = object.pin(0..10_000).unwrap();
    server.kill();
    assert_eq!(store.control.change("object"), 2);
    let mut server = serve_elsewhere(&socket, &store);
    for _ in 0..2 {
        assert_eq!(object.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Changed);
        assert_eq!(object.pin(0..10).unwrap_err().kind(), ErrorKind::Changed);
    }
    s3::check(1, 0, &pin.to_vec());
    let object = client.open(URL).unwrap();
    object.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(2, 0, &buffer);
    server.kill();
    store.control.delete("object");
    let mut server = serve_elsewhere(&socket, &store);
    assert_eq!(object.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Changed);
    // No other comes in its place.
    server.kill();
    let (begun, client) = (Instant::now(), client.with_reconnect_timeout(Duration::ZERO));
    assert_eq!(client.open(URL).unwrap_err().kind(), ErrorKind::OwnerDead);
    assert!(begun.elapsed() < Duration::from_secs(5), "it was waited for");
}

#[test]
fn a_forked_child_has_nothing_of_its_parent_and_can_connect_anew() {
    let fixture = Fixture::new(1_000_000, 64 << 20);
    let child = fixture.child("fork");
    assert_eq!(child.says("fork says"), "Forked Forked 0");
    assert_eq!(child.says("origin says"), "0");
}

/// 1 A process reads a store through its own cache, and forks. 2 The child asks the store, which locks what is known
/// before it sees that the threads are the parent's: it waits for ever if one of them had locked that at the fork.
#[test]
fn a_store_over_a_cache_says_in_a_forked_child_that_it_is_the_parents() {
    let fixture = Fixture::new(1_000, 64 << 20);
    let child = fixture.child("fork-store");
    let answer = child.says("fork says");
    assert!(answer.contains("forked"), "{answer}");
    assert_eq!(child.says("origin says"), "0 9000");
}

/// 1. A thread goes on to another version of an object that is followed, and has its lock; another thread forks.
/// 2. The child reads the object, and waited for ever for the lock.
#[test]
fn an_object_that_is_followed_says_in_a_forked_child_that_it_is_the_parents() {
    let fixture = Fixture::new(1_000, 64 << 20);
    let child = fixture.child("fork-following");
    assert_eq!(child.says("fork says"), "None None");
    assert_eq!(child.says("origin says"), "0");
}

/// 1. The system gives a process no more threads.
/// 2. A cache of objects, and the first async call of a client, panicked. A call of a store that had no idle thread
///    waited for ever.
#[test]
fn threads_that_the_system_does_not_give_are_an_error() {
    let fixture = Fixture::new(1_000, 64 << 20);
    match &*fixture.child("no-threads").says("threads are") {
        "given" => println!("SKIPPED: this user's threads cannot be bounded"),
        told => assert_eq!(told, "true Ready(Start) Ready(true)"),
    }
}

#[test]
fn a_thread_that_waits_for_a_slow_store_handles_its_signals() {
    let fixture = Fixture::with(1_000_000, 16 << 20, Options::new().whole_max(0));
    let mut child = fixture.child("be-interrupted");
    child.says("open");
    fixture.store.control.set_latency(Duration::from_secs(6));
    child.go_on();
    assert_eq!(child.says("interrupted"), "true 10000");
}

#[test]
fn a_server_that_forks_is_found_still() {
    let folder = tempfile::tempdir().unwrap();
    let child = Process::start("serve-and-fork", &folder.path().join("q/s.sock"), &[]);
    assert_eq!(child.says("forked"), "0 true");
}

/// As many wait to be accepted as may, by a server that is stopped: the kernel lets a connecting thread wait for ever.
#[test]
fn a_server_that_accepts_no_process_is_waited_for_for_a_bounded_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s.sock");
    let _listener = quinion_owner::internals::serve::listen(&path).unwrap();
    let mut waiting = Vec::new();
    while let Some(end) = connect_at_once(&path) {
        waiting.push(end);
    }
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || sender.send(Client::connect(path.to_str().unwrap()).map(drop)));
    let error = answer.recv_timeout(LONG).expect("it waits for ever").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect, "{error}");
}

#[test]
fn an_object_that_is_replaced_is_an_error_and_a_new_open_reads_the_new_one() {
    let fixture = Fixture::with(8_000_000, 64 << 20, Options::new().whole_max(0));
    let client = fixture.client();
    let old = client.open(URL).unwrap();
    let mut buffer = vec![0; 100_000];
    old.read_exact_at(&mut buffer, 0).unwrap();
    let version = fixture.store.control.change("object");
    let error = old.read_at(&mut buffer, 6_000_000).unwrap_err();
    assert!(error.kind() == ErrorKind::Changed && error.to_string().contains("open it again"), "{error}");
    old.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(1, 0, &buffer); // what is cached of the old version
    let new = client.open(URL).unwrap();
    assert_ne!((old.e_tag(), old.e_tag().is_some()), (new.e_tag(), false));
    read_all(&new, version, 3);
    // While others read: each read is of one version or an error.
    for round in 0..10 {
        let version = fixture.store.control.change("object");
        let file = client.open(URL).unwrap();
        let mut random = Dice::new(round + 17);
        for step in 0..30 {
            if step == 15 {
                fixture.store.control.change("object");
            }
            let at = random.below(7_900_000);
            match file.read_at(&mut buffer, at) {
                Ok(read) => s3::check(version, at, &buffer[..read]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Changed, "{error}"),
            }
        }
    }
}

#[test]
fn a_failed_open_reports_the_servers_words() {
    let fixture = Fixture::new(10, 16 << 20);
    let client = fixture.client();
    for (url, words) in
        [("s3://bucket/none", "none"), ("gs://other/x", "no store for it; it has [s3://bucket]")]
    {
        let error = client.open(url).unwrap_err();
        assert!(error.kind() == ErrorKind::Open && error.to_string().contains(words), "{error}");
    }
    let long = format!("s3://bucket/{}", "x".repeat(5000));
    assert!(client.open(&long).is_err());
    assert_eq!(client.open("/nowhere").unwrap_err().kind(), ErrorKind::Open);
    assert_eq!(Client::connect("nobody-has-this-name").unwrap_err().kind(), ErrorKind::Connect);
    let object = client.open(URL).unwrap();
    assert_eq!((object.len(), object.e_tag()), (10, Some("\"v1\"")));
    assert_eq!(object.read_exact_at(&mut [0; 11], 0).unwrap_err().kind(), ErrorKind::EndOfFile);
    assert_eq!(object.read_at(&mut [0; 5], 10).unwrap(), 0);
    assert_eq!(object.read_at(&mut [], 0).unwrap(), 0);
}

#[test]
fn ranges_are_fetched_side_by_side() {
    let fixture = Fixture::with(16_000_000, 64 << 20, Options::new().whole_max(0));
    let (control, object) = (&fixture.store.control, fixture.client().open(URL).unwrap());
    let mut buffers = vec![vec![0; 10_000]; 12];
    let mut ranges: Vec<_> = buffers
        .iter_mut()
        .enumerate()
        .map(|(place, buffer)| RangeRead { offset: place as u64 * 1_300_000 + 77, buffer })
        .collect();
    control.hold();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| object.read_ranges(&mut ranges));
        becomes("three are asked for before the first is answered", || control.under_way() >= 3);
        control.release();
        reader.join().unwrap().unwrap();
    });
    for range in &ranges {
        s3::check(1, range.offset, range.buffer);
    }
}

#[test]
fn pinned_bytes_stay_under_pressure_and_when_the_server_stops() {
    let mut fixture = Fixture::with(30_000_000, 16 << 20, Options::new().whole_max(0));
    let client = fixture.client();
    let object = client.open(URL).unwrap();
    let pins: Vec<_> = (0..3).map(|n| object.pin(n * 900_000 + 5..n * 900_000 + 700_005).unwrap()).collect();
    assert_eq!((fixture.server().stats().pins, pins[0].len(), pins[0].is_copied()), (3, 700_000, false));
    let check = || {
        for (n, pin) in pins.iter().enumerate() {
            s3::check(1, n as u64 * 900_000 + 5, &pin.to_vec());
        }
    };
    check();
    read_all(&object, 1, 11); // twice the memory
    check();
    let full = object.pin(20_000_000..28_000_000).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Full, "{full}");
    let over = object.pin(29_999_000..40_000_000).unwrap();
    s3::check(1, 29_999_000, &over.to_vec());
    assert_eq!(over.len(), 1000);
    drop(over);
    becomes("one is given back", || fixture.server().stats().pins == 3);
    // The cache goes on in this process, without clients.
    let server = fixture.server.take().unwrap();
    let kept = server.cache().clone();
    server.stop();
    assert_eq!(object.read_at(&mut [0; 10], 0).unwrap_err().kind(), ErrorKind::OwnerDead);
    let objects = quinion_object::ObjectCache::new(kept, fixture.store.store(), Options::new()).unwrap();
    let other = objects.open(&object_store::path::Path::from("object")).unwrap();
    for at in (0..30_000_000).step_by(500_000) {
        s3::check(1, at, &other.bytes(at..at + 500_000).unwrap());
    }
    check();
}

#[test]
fn a_client_is_told_what_is_cached_and_asks_for_none_of_it() {
    let mut fixture = Fixture::with(30_000_000, 16 << 20, Options::new().whole_max(0));
    let object = fixture.client().open(URL).unwrap();
    assert_eq!(object.residents(0..u64::MAX).unwrap(), []);
    let mut bytes = vec![0; 100_000];
    object.read_exact_at(&mut bytes, 5_000_000).unwrap();
    object.read_exact_at(&mut bytes, 29_900_000).unwrap();
    let some = object.residents(0..u64::MAX).unwrap();
    let covers =
        |range: &std::ops::Range<u64>| some.iter().any(|r| r.start <= range.start && range.end <= r.end);
    assert!(covers(&(5_000_000..5_100_000)) && covers(&(29_900_000..30_000_000)), "{some:?}");
    assert!(
        some.is_sorted_by(|a, b| a.end < b.start)
            && some.iter().map(|r| r.end - r.start).sum::<u64>() < 16 << 20
    );
    let part = object.residents(5_000_001..5_000_009).unwrap();
    assert!(part.len() == 1 && part[0] == (5_000_001..5_000_009), "{part:?}");
    assert_eq!(object.residents(31_000_000..32_000_000).unwrap(), []);
    read_all(&object, 1, 11); // twice the memory
    assert!(
        object.residents(0..30_000_000).unwrap().iter().map(|r| r.end - r.start).sum::<u64>() <= 16 << 20
    );
    // What a reader without the server may copy is what it was told: no more, no less.
    for range in object.residents(0..30_000_000).unwrap() {
        let mut ready = vec![0; (range.end - range.start) as usize];
        assert!(object.read_ready(&mut ready, range.start).unwrap(), "{range:?}");
        s3::check(1, range.start, &ready);
    }
    fixture.server.take().unwrap().stop();
    assert_eq!(object.residents(0..30_000_000).unwrap(), []);
}

/// 1. A viewer pins a range of a folio, the rest of which has not come; its fill fails, and the folio leaves the index.
/// 2. Another client reads: another folio is in its place, which is not pinned.
/// 3. The viewer looks for what it has pinned, finds that one, and it is used again for other bytes.
#[test]
fn a_range_pinned_of_a_folio_whose_fill_fails_is_not_looked_up_in_the_next_one() {
    const STALL: Duration = Duration::from_secs(2);
    let options = Options::new().whole_max(0).attempts_max(1).failure_pause(Duration::from_millis(1));
    let fixture = Fixture::with(30_000_000, 16 << 20, options.stall_max(STALL));
    let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: ANY_CACHE, run: 0 };
    let viewer = viewer::connect(&fixture.socket(), &hello).unwrap();
    let offer = NameOffer { version: LAYOUT_VERSION, token: viewer.token() };
    let sent = viewer::send_name(&fixture.socket(), &NameRequest::of_object(offer, URL.as_bytes())).unwrap();
    let ask = |operation, arguments| viewer.request_within(operation, arguments, 60_000);
    let [handle, place] = ask(Operation::OpenNamed, [sent.ticket().into(), 0, 0]).unwrap();
    // Large folios come of a range that will be needed; the first GET of it ends in the first of them.
    const AT: u64 = 8 << 20;
    const LEN: usize = 10_000;
    fixture.store.control.trouble([Fault::Stall(20_000)]);
    let needed = Advice::WillNeed.with_length(4 << 20);
    ask(Operation::Hint, [handle, AT, needed]).unwrap();
    let begun = Instant::now();
    let pin = || ask(Operation::Pin, [handle, AT, LEN as u64]);
    let mut answer = pin();
    while answer == Err(RequestError::Errno(libc::EAGAIN)) && begun.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(20));
        answer = pin();
    }
    assert_eq!(answer.map(|[_, bytes]| bytes), Ok(LEN as u64));
    std::thread::sleep((begun + 3 * STALL / 2).saturating_duration_since(Instant::now()));
    fixture.reads();
    let (told, touched) = Default::default();
    let (cell, id) = (CellNumber(place as u32), MappingId((place >> 32) as u32));
    let file = ViewedFile { handle, cell, id, marker_reported: &told, touched: &touched };
    let mut pieces = Vec::new();
    let found = viewer.locate(&file, AT..AT + LEN as u64, |first, len| pieces.push((first, len)));
    assert_eq!(found, LEN, "what was pinned is not found");
    fixture.reads();
    let mut at = AT;
    for (first, len) in pieces {
        // SAFETY: the viewer's mapping stays as long as the process.
        s3::check(1, at, unsafe { std::slice::from_raw_parts(first, len) });
        at += len as u64;
    }
}

#[test]
fn a_process_is_one_client_and_cannot_join_twice_while_it_has_pins() {
    let fixture = Fixture::new(100_000, 16 << 20);
    let (first, second) = (fixture.client(), fixture.client());
    let pin = first.open(URL).unwrap().pin(0..50_000).unwrap();
    read_all(&second.open(URL).unwrap(), 1, 1);
    assert_eq!(fixture.server().stats().clients, 1);
    let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: ANY_CACHE, run: 0 };
    let refused = viewer::connect(&fixture.socket(), &hello).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
    s3::check(1, 0, &pin.to_vec());
}

#[test]
fn a_local_file_is_served_until_it_is_written() {
    let fixture = Fixture::new(10, 32 << 20);
    let path = fixture.folder.path().join("file");
    std::fs::write(&path, s3::content(4, 1_000_000)).unwrap();
    let file = fixture.client().open(path.to_str().unwrap()).unwrap();
    let mut buffer = vec![0; 300_000];
    for at in [0, 5, 800_000, 999_999, 1_000_000, 2_000_000] {
        let read = file.read_at(&mut buffer, at).unwrap();
        assert_eq!(read as u64, 1_000_000_u64.saturating_sub(at).min(300_000));
        s3::check(4, at, &buffer[..read]);
    }
    if file.is_served().unwrap() {
        assert!(fixture.server().cache().stats().device_bytes >= 300_000, "the kernel has read it");
    } else {
        println!("SKIPPED: no read lease can be had here");
    }
    let pin = file.pin(10..2000).unwrap();
    assert!(pin.is_copied());
    s3::check(4, 10, pin.as_slice().unwrap());
    std::fs::write(&path, s3::content(5, 700_000)).unwrap();
    assert_eq!(file.read_at(&mut buffer, 600_000).unwrap(), 100_000);
    s3::check(5, 600_000, &buffer[..100_000]);
}

#[test]
fn another_user_is_not_let_in() {
    // SAFETY: it asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root can start a process of another user");
        return;
    }
    let fixture = Fixture::new(10, 16 << 20);
    // The very user, in another group: it finds the socket, and the server turns it away.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_child", "--nocapture"]).env("QUINION_CHILD", "stranger");
    command.env("QUINION_SOCKET", fixture.socket());
    use std::os::unix::process::CommandExt;
    let output = command.gid(12_345).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("refused Connect") && said.contains("Permission denied"), "{said}");
    assert_eq!(fixture.server().stats().clients, 0);
}

struct Liar {
    fixture: Fixture,
    _honest: Process,
    viewer: Viewer,
    offer: NameOffer,
}

impl Liar {
    /// The honest client has ten handles, and ten pins.
    fn new() -> Self {
        let fixture = Fixture::new(2_000_000, 32 << 20);
        let honest = fixture.child("hold");
        honest.says("holds");
        let hello = JoinRequest { version: LAYOUT_VERSION, plan: NO_PLAN, token: ANY_CACHE, run: 0 };
        let viewer = viewer::connect(&fixture.socket(), &hello).unwrap();
        let offer = NameOffer { version: LAYOUT_VERSION, token: viewer.token() };
        Self { fixture, _honest: honest, viewer, offer }
    }

    fn ask(&self, operation: Operation, arguments: [u64; 3]) -> Result<[u64; 2], RequestError> {
        self.viewer.request_within(operation, arguments, 60_000)
    }

    fn send_name(&self, name: &[u8]) -> std::io::Result<SentName> {
        viewer::send_name(&self.fixture.socket(), &NameRequest::of_object(self.offer, name))
    }

    fn pins(&self) -> usize {
        self.fixture.server().stats().pins
    }
}

const BAD: Result<[u64; 2], RequestError> = Err(RequestError::Errno(libc::EBADF));

#[test]
fn hostile_names_and_bytes_at_the_socket_harm_no_other_client() {
    let liar = Liar::new();
    let socket = liar.fixture.socket();
    // 1 names of another cache or version, and none
    let offer = liar.offer;
    for offer in [NameOffer { version: 1, ..offer }, NameOffer { token: offer.token ^ 1, ..offer }] {
        assert!(viewer::send_name(&socket, &NameRequest::of_object(offer, b"s3://bucket/object")).is_err());
    }
    for name in [&b""[..], &[b'x'; NAME_MAX + 1]] {
        assert!(liar.send_name(name).is_err());
    }
    // 2 names that mean nothing, and tickets of no name, of a used one, and of a descriptor
    let mut random = Dice::new(5);
    for len in [1, 7, 300, NAME_MAX] {
        let name: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
        let sent = liar.send_name(&name).unwrap();
        let ticket = u64::from(sent.ticket());
        assert!(liar.ask(Operation::OpenNamed, [ticket, 0, 0]).is_err());
        assert_eq!(liar.ask(Operation::OpenNamed, [ticket, 0, 0]), BAD);
        assert!(sent.reply(Duration::from_secs(10)).unwrap().0 != 0);
    }
    for ticket in [0, 1 << 40, u64::MAX] {
        assert_eq!(liar.ask(Operation::OpenNamed, [ticket, 0, 0]), BAD);
    }
    let descriptor = DescriptorOffer { version: LAYOUT_VERSION, token: offer.token };
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let ticket = viewer::send_descriptor(&socket, &descriptor, &file).unwrap();
    assert_eq!(liar.ask(Operation::OpenNamed, [ticket.into(), 0, 0]), BAD);
    // 3 raw bytes, and silence
    for len in [0, 1, 31, 33, 4127, 4128, 4129, 60_000] {
        let raw = silent_connection(&socket);
        let bytes: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
        // SAFETY: the bytes are there.
        unsafe { libc::send(raw.as_raw_fd(), bytes.as_ptr().cast(), len, libc::MSG_NOSIGNAL) };
    }
    read_all(&liar.fixture.client().open(URL).unwrap(), 1, 9);
    assert_eq!(liar.pins(), 10);
}

#[test]
fn hostile_questions_harm_no_other_client() {
    let liar = Liar::new();
    // 1 handles and pins of others: the honest client's are small numbers
    for handle in 0..40 {
        assert_eq!(liar.ask(Operation::Pin, [handle, 0, 100]), BAD);
        assert_eq!(liar.ask(Operation::Fill, [handle, 0, 100]), BAD);
        for pin in 0..40 {
            let _ = liar.ask(Operation::Unpin, [handle, pin, 0]);
        }
    }
    assert_eq!(liar.pins(), 10, "a pin of another process was given back");
    // 2 ranges that cannot be, with a handle of its own; and pins of others by that
    let sent = liar.send_name(URL.as_bytes()).unwrap();
    let [handle, _] = liar.ask(Operation::OpenNamed, [sent.ticket().into(), 0, 0]).unwrap();
    let all = u64::MAX;
    for (position, len) in [(0, all), (all, 1), (all, all), (1 << 62, 1 << 62), (3_000_000, 5)] {
        let _ = liar.ask(Operation::Pin, [handle, position, len]);
        let _ = liar.ask(Operation::Fill, [handle, position, len]);
    }
    let before = liar.pins();
    for pin in 0..40 {
        let _ = liar.ask(Operation::Unpin, [handle, pin, 0]);
    }
    assert!((10..=before).contains(&liar.pins()), "a pin of another process was given back");
    // 3 more pins than there may be; then the handle goes, and they with it
    let refused = (0..1100).filter(|_| liar.ask(Operation::Pin, [handle, 0, 10]).is_err()).count();
    assert!(refused >= 76, "{refused} refused");
    liar.ask(Operation::Detach, [handle, 0, 0]).unwrap();
    becomes("they are gone", || liar.pins() == 10);
    assert_eq!(liar.ask(Operation::Pin, [handle, 0, 10]), BAD);
    read_all(&liar.fixture.client().open(URL).unwrap(), 1, 9);
}

fn silent_connection(path: &Path) -> std::os::fd::OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
    let end = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&end, &SocketAddrUnix::new(path).unwrap()).unwrap();
    end
}

fn connect_at_once(path: &Path) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let end = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    match connect(&end, &SocketAddrUnix::new(path).unwrap()) {
        Ok(()) => Some(end),
        Err(error) => {
            assert_eq!(error, rustix::io::Errno::AGAIN);
            None
        }
    }
}

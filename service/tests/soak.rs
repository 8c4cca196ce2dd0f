//! Soak: reads under faults, by clients in processes of their own. The server is killed and started again, objects are
//! replaced, and requests of the store fail in every way that the test server knows. Each byte is checked.
//!
//! ```text
//!   this process     the store; kills the server, starts the next; replaces objects; adds up what clients say
//!   a server         a cache that is too small for the data, until it is killed
//!   two clients      threads that read by handles, pins, ranges and the trait, of one server after the other
//! ```
//!
//! What is right is what `object/tests/soak.rs` says, with one more error: the server is gone. In a client process no
//! answer is older than what any of its threads was told before it asked.
//!
//! `QUINION_SOAK=1 cargo test --release -p quinion-service --test soak -- --nocapture` reads a million times and tells
//! how far it is; `QUINION_SOAK_READS` says another number.

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use object_store::path::Path as Key;
use object_store::{GetOptions, ObjectStore};
use quinion::Cache;
use quinion_object::Options;
use quinion_service::{
    Client, ClientFile, ClientStore, Error, ErrorKind, PinnedBytes, RangeRead, Server, cached,
};
use quinion_testing_s3 as s3;
use quinion_testing_s3::{Checker, FaultPlan, version_of};

const READS: u64 = 20_000;
const READS_SOAK: u64 = 1_000_000;
const CLIENTS: usize = 2;
const THREADS: u64 = 2;
const SIZES: [usize; 3] = [300_001, 2 << 20, 3_000_007];
const VERSIONS: u32 = 1 << 24;
const FAULTS: FaultPlan = FaultPlan { seed: 22, per_mille: 60, bytes_max: 400_000 };
/// A server lives for so long.
const LIFE: Duration = Duration::from_millis(1500);
/// An object is replaced so often.
const REPLACED: Duration = Duration::from_millis(40);
/// No child says nothing for so long.
const LONG: Duration = Duration::from_secs(120);

fn reads_wanted() -> u64 {
    let said = std::env::var("QUINION_SOAK_READS").ok().and_then(|reads| reads.parse().ok());
    said.unwrap_or(if std::env::var_os("QUINION_SOAK").is_some() { READS_SOAK } else { READS })
}

fn key(at: usize) -> String {
    format!("object-{at}")
}

// ---- the other processes ----------------------------------------------------------------------------------------

/// Not a test: what a child does that the test has started.
#[test]
fn the_child() {
    let Ok(role) = std::env::var("QUINION_CHILD") else { return };
    let (socket, store) = (std::env::var("QUINION_SOCKET").unwrap(), std::env::var("QUINION_STORE").unwrap());
    match role.as_str() {
        "server" => serve(&socket, &store),
        _ => read(&socket, &store),
    }
    std::process::exit(0);
}

fn serve(socket: &str, store: &str) {
    let options = Options::new()
        .backoff(Duration::from_millis(1), Duration::from_millis(8))
        .stall_max(Duration::from_millis(400))
        .deadline(Duration::from_secs(20))
        .failure_pause(Duration::from_millis(1))
        .request_max(1 << 20)
        .whole_max(400_000)
        .fill_min(16 << 10);
    let cache = Cache::builder().memory(Cache::MEMORY_MIN + (4 << 20)).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", s3::store_at(store), options);
    let _server = server.start(socket).unwrap();
    say("serves");
    // It is killed, or ends with its parent.
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

fn say(words: &str) {
    println!("\nchild: {words}");
    std::io::stdout().flush().unwrap();
}

struct Reading {
    client: Client,
    store: ClientStore,
    checkers: Vec<Checker>,
    told: Vec<AtomicU32>,
    reads: AtomicU64,
    changed: AtomicU64,
    dead: AtomicU64,
    failed: AtomicU64,
}

fn read(socket: &str, store: &str) {
    let client = Client::connect(socket).unwrap().with_reconnect_timeout(Duration::from_secs(30));
    let reading = Reading {
        store: cached(s3::store_at(store), client.clone(), "s3://bucket").unwrap(),
        client,
        checkers: SIZES.iter().map(|&len| Checker::new(len)).collect(),
        told: SIZES.iter().map(|_| AtomicU32::new(0)).collect(),
        reads: AtomicU64::new(0),
        changed: AtomicU64::new(0),
        dead: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    };
    let reading = Arc::new(reading);
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let reading = Arc::clone(&reading);
            std::thread::spawn(move || Reader::new(&reading, thread).run())
        })
        .collect();
    std::thread::spawn(|| {
        let _ = std::io::stdin().lock().read_line(&mut String::new()); // the parent is dead
        std::process::exit(0);
    });
    loop {
        std::thread::sleep(Duration::from_millis(100));
        if threads.iter().any(std::thread::JoinHandle::is_finished) {
            say("wrong: a thread has ended, see its panic message");
            std::process::exit(1);
        }
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Reading { reads, changed, dead, failed, .. } = &*reading;
        say(&format!("reads {} {} {} {}", of(reads), of(changed), of(dead), of(failed)));
    }
}

struct Reader<'r> {
    shared: &'r Reading,
    state: u64,
    runtime: tokio::runtime::Runtime,
    files: Vec<Option<(ClientFile, u32)>>,
    pins: Vec<(usize, u32, u64, PinnedBytes)>,
}

impl<'r> Reader<'r> {
    fn new(shared: &'r Reading, thread: u64) -> Self {
        let state =
            (u64::from(std::process::id()) << 20 | thread << 8 | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let files = SIZES.iter().map(|_| None).collect();
        Self { shared, state, runtime, files, pins: Vec::new() }
    }

    fn run(mut self) {
        loop {
            let at = self.below(SIZES.len() as u64) as usize;
            match self.below(1000) {
                0..8 => self.get_by_the_trait(at),
                8..10 => self.get_ranges_by_the_trait(at),
                10..40 => self.read_ranges(at),
                40..60 => self.pin(at),
                _ => self.read_at(at),
            }
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % end.max(1)
    }

    fn range(&mut self, at: usize) -> Range<u64> {
        let size = SIZES[at] as u64;
        let most = if self.below(24) == 0 { 200_000 } else { 6000 };
        let start = self.below(size);
        start..(start + 1 + self.below(most)).min(size)
    }

    fn told(&self, at: usize) -> u32 {
        self.shared.told[at].load(Ordering::SeqCst)
    }

    /// An answer to a question that was asked when `least` was told.
    fn tell(&self, at: usize, least: u32, e_tag: Option<&str>) -> u32 {
        let version = version_of(e_tag.unwrap()).unwrap();
        assert!(version >= least, "version {version} of object {at}, and {least} was told before");
        self.shared.told[at].fetch_max(version, Ordering::SeqCst);
        version
    }

    fn file(&mut self, at: usize) -> Option<(ClientFile, u32)> {
        if self.files[at].is_none() || self.below(4000) == 0 {
            let least = self.told(at);
            match self.shared.client.open(&format!("s3://bucket/{}", key(at))) {
                Ok(file) => {
                    let version = self.tell(at, least, file.e_tag());
                    self.files[at] = Some((file, version));
                }
                Err(error) => self.failed(at, &error),
            }
        }
        self.files[at].clone()
    }

    fn failed(&mut self, at: usize, error: &Error) {
        let count = match error.kind() {
            ErrorKind::Changed => &self.shared.changed,
            ErrorKind::OwnerDead => &self.shared.dead,
            ErrorKind::Fetch | ErrorKind::Open | ErrorKind::Full | ErrorKind::TimedOut => &self.shared.failed,
            kind => panic!("{kind:?}: {error}"),
        };
        count.fetch_add(1, Ordering::Relaxed);
        if error.kind() == ErrorKind::Changed {
            self.files[at] = None;
        }
    }

    #[track_caller]
    fn check(&self, at: usize, version: u32, offset: u64, bytes: &[u8]) {
        let is_right = self.shared.checkers[at].is_of(version, offset, bytes);
        assert!(is_right, "{} bytes at {offset} of object {at} are not of version {version}", bytes.len());
        self.shared.reads.fetch_add(1, Ordering::Relaxed);
    }

    fn read_at(&mut self, at: usize) {
        let Some((file, version)) = self.file(at) else { return };
        let range = self.range(at);
        let mut buffer = vec![0; (range.end - range.start) as usize];
        match file.read_exact_at(&mut buffer, range.start) {
            Ok(()) => self.check(at, version, range.start, &buffer),
            Err(error) => self.failed(at, &error),
        }
    }

    fn read_ranges(&mut self, at: usize) {
        let Some((file, version)) = self.file(at) else { return };
        let ranges = [self.range(at), self.range(at), self.range(at)];
        let mut buffers = ranges.each_ref().map(|range| vec![0; (range.end - range.start) as usize]);
        let mut reads: Vec<_> = ranges
            .iter()
            .zip(&mut buffers)
            .map(|(range, buffer)| RangeRead { offset: range.start, buffer })
            .collect();
        match file.read_ranges(&mut reads) {
            Ok(()) => reads.iter().for_each(|read| self.check(at, version, read.offset, read.buffer)),
            Err(error) => self.failed(at, &error),
        }
    }

    /// Pins are kept for a while, also when their server is gone, and are then what they were.
    fn pin(&mut self, at: usize) {
        let Some((file, version)) = self.file(at) else { return };
        let range = self.range(at);
        match file.pin(range.clone()) {
            Ok(pinned) => {
                assert_eq!(pinned.len() as u64, range.end - range.start);
                self.check(at, version, range.start, &pinned.to_vec());
                self.pins.push((at, version, range.start, pinned));
            }
            Err(error) => self.failed(at, &error),
        }
        if self.pins.len() > 6 {
            let place = self.below(self.pins.len() as u64) as usize;
            let (at, version, offset, pinned) = self.pins.swap_remove(place);
            self.check(at, version, offset, &pinned.to_vec());
        }
    }

    fn get_by_the_trait(&mut self, at: usize) {
        let (range, least) = (self.range(at), self.told(at));
        let options = GetOptions::new().with_range(Some(range.clone()));
        let got = self.runtime.block_on(async {
            let result = self.shared.store.get_opts(&Key::from(key(at)), options).await?;
            let version = self.tell(at, least, result.meta.e_tag.as_deref());
            result.bytes().await.map(|bytes| (version, bytes))
        });
        match got {
            Ok((version, bytes)) => {
                assert_eq!(bytes.len() as u64, range.end - range.start);
                self.check(at, version, range.start, &bytes);
            }
            Err(error) => self.note_store_error(&error),
        }
    }

    fn get_ranges_by_the_trait(&mut self, at: usize) {
        let (ranges, least) = ([self.range(at), self.range(at)], self.told(at));
        let path = Key::from(key(at));
        let got = self.runtime.block_on(self.shared.store.get_ranges(&path, &ranges));
        let parts = match &got {
            Ok(all) => ranges.iter().zip(all).map(|(range, bytes)| (range.start, &bytes[..])),
            Err(error) => return self.note_store_error(error),
        };
        let parts: Vec<_> = parts.collect();
        let is_whole =
            |(range, part): (&Range<u64>, &(u64, &[u8]))| part.1.len() as u64 == range.end - range.start;
        assert!(ranges.iter().zip(&parts).all(is_whole), "{ranges:?}");
        // The newest is not known here; none is so far from what was told.
        let most = least.max(at as u32 * VERSIONS + 1) + 100_000;
        let near = self.shared.checkers[at].version_of_all(least..=least + 50, &parts);
        let version = near.or_else(|| self.shared.checkers[at].version_of_all(least..=most, &parts));
        assert!(version.is_some(), "of none from {least} on: {ranges:?}");
        self.shared.reads.fetch_add(parts.len() as u64, Ordering::Relaxed);
    }

    fn note_store_error(&self, error: &object_store::Error) {
        use object_store::Error as E;
        let is_change = matches!(error, E::Precondition { .. });
        assert!(is_change || matches!(error, E::Generic { .. }), "{error:?}");
        let count = if is_change { &self.shared.changed } else { &self.shared.failed };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

// ---- the test ---------------------------------------------------------------------------------------------------

struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(role: &str, socket: &Path, store: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env("QUINION_CHILD", role).env("QUINION_SOCKET", socket).env("QUINION_STORE", store);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let said = output.lines().map_while(Result::ok);
            let words = said.filter_map(|line| line.strip_prefix("child: ").map(str::to_owned));
            words.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        Self { child, lines }
    }

    fn server(socket: &Path, store: &str) -> Self {
        let server = Self::start("server", socket, store);
        assert_eq!(server.lines.recv_timeout(LONG).as_deref(), Ok("serves"), "the server does not start");
        server
    }

    fn numbers(&self) -> Option<[u64; 4]> {
        let mut last = None;
        loop {
            let line = match self.lines.try_recv() {
                Ok(line) => line,
                Err(mpsc::TryRecvError::Empty) => return last,
                Err(mpsc::TryRecvError::Disconnected) => panic!("a client has ended"),
            };
            let numbers = line.strip_prefix("reads ").unwrap_or_else(|| panic!("{line}"));
            let mut numbers = numbers.split(' ').map(|number| number.parse().unwrap());
            last = Some(std::array::from_fn(|_| numbers.next().unwrap()));
        }
    }
}

#[test]
fn clients_read_one_version_under_faults_while_their_server_is_killed_again_and_again() {
    let store = s3::Server::new();
    for (at, &len) in SIZES.iter().enumerate() {
        store.control.put_version(&key(at), len, at as u32 * VERSIONS + 1);
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("q/s.sock");
    let mut server = Process::server(&socket, &store.address());
    let clients: Vec<_> = (0..CLIENTS).map(|_| Process::start("read", &socket, &store.address())).collect();
    store.control.set_plan(Some(FAULTS));
    let (wanted, begun) = (reads_wanted(), Instant::now());
    let (mut told, mut lived, mut moved) = (begun, begun, begun);
    let (mut kills, mut replaced, mut before) = (0_u64, 0_usize, 0);
    let mut numbers = vec![[0; 4]; CLIENTS];
    loop {
        std::thread::sleep(REPLACED);
        store.control.change(&key(replaced % SIZES.len()));
        replaced += 1;
        for (client, numbers) in clients.iter().zip(&mut numbers) {
            *numbers = client.numbers().unwrap_or(*numbers);
        }
        let reads: u64 = numbers.iter().map(|numbers| numbers[0]).sum();
        if reads >= wanted && kills >= 3 {
            break;
        }
        if reads > before {
            (before, moved) = (reads, Instant::now());
        }
        assert!(moved.elapsed() < LONG, "no read has ended for long: {numbers:?}");
        if lived.elapsed() > LIFE {
            drop(server); // SIGKILL
            server = Process::server(&socket, &store.address());
            (kills, lived) = (kills + 1, Instant::now());
        }
        if told.elapsed() > Duration::from_secs(10) && std::io::stderr().is_terminal() {
            eprintln!("{reads} of {wanted} reads in {:?}, {kills} servers killed", begun.elapsed());
            told = Instant::now();
        }
    }
    let [reads, changed, gone, failed] = numbers
        .iter()
        .fold([0; 4], |sum: [u64; 4], numbers| std::array::from_fn(|place| sum[place] + numbers[place]));
    println!(
        "{reads} reads in {:?}; {kills} servers killed; {changed} of a replaced object, {gone} without a server, \
         {failed} failed\n{:?} {:?}",
        begun.elapsed(),
        store.control.requests(),
        store.control.faults()
    );
    assert!(changed > 0 && failed < reads / 10, "most reads bring bytes");
    let kinds = store.control.faults().len();
    assert!(kinds >= 8, "{kinds} kinds of faults");
}

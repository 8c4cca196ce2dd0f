//! Objects: what a cache of the node costs and saves its readers, beside reading the store itself.
//!
//! ```text
//!   this process: a store on loopback with a set latency,    a reader: this program started again,
//!                 a server with a cache                      by `object_store` itself or by a client of the server
//!   rows of processes, and of their ends: the server is this program started again as well
//! ```
//!
//! `cargo bench -p quinion-service --bench objects [-- --json] [ROW...]`: a row is named by a part of its name.
//! Alternatives take turns, their order is rotated, and each repetition of a cold row has a server with an empty cache.
//! The machine's memory is made resident before it: a virtual machine gives free memory back to its host, and to have
//! it again takes longer than all else that is measured here.
//! A row is the median of its repetitions with the quartiles; rows whose repetitions differ by more than 2x are "not
//! steady", and neither met nor missed.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStore, ObjectStoreExt, path::Path as Key};
use quinion::{Cache, DiskOptions};
use quinion_object::{ObjectCache, Options};
use quinion_service::{Builder, Client, ClientFile, RangeRead, Server, Socket};
use quinion_testing_s3 as s3;
use tokio::signal::unix::{SignalKind, signal};

const OBJECTS: usize = 8;
const OBJECT_BYTES: u64 = 32 << 20;
/// The processes whose memory is looked at read 2 GiB: what each of them has beside is the same for any data.
const RESIDENT_OBJECTS: usize = 64;
const DATA_BYTES: u64 = OBJECTS as u64 * OBJECT_BYTES;
const LATENCY: Duration = Duration::from_millis(20);
/// What a connection to a store in the same region brings in a second.
const CONNECTION_BYTES: u64 = 80_000_000;
const REPETITIONS: usize = 7;
/// A bare reader reads ranges of this many bytes, so many at a time.
const BARE: (u64, usize) = (8 << 20, 8);
/// What a client asks for ahead of where it reads.
const AHEAD: u64 = BARE.0 * BARE.1 as u64;
const MIB: u64 = 1 << 20;
/// Scattered ranges: their length, how many at a time, and how often.
const SCATTERED: (u64, usize, usize) = (64 << 10, 32, 16);
/// Rounds of scattered ranges that one reader reads one after the other.
const ONE_BY_ONE: usize = 4;
const HITS: u64 = 200_000;
/// Processes that read beside each other.
const WORKERS: usize = 8;
/// The roles of the processes that this one talks with: a line on their input, and lines on their output.
const SERVES: &str = "serves";
const HOLDS: &str = "holds";
const PAUSES: &str = "pauses";
/// How long a server that is to be replaced may take to end.
const REPLACE_MAX: Duration = Duration::from_secs(60);
/// How long readers go on beside an end of a server: longer than any pause that could be right.
const BESIDE: Duration = Duration::from_secs(2);
/// The pause of a reader between two reads: eight of them leave a machine of two processors some time.
const BETWEEN: Duration = Duration::from_millis(2);
/// Before the role of a reader: the server has taken its memory from the machine before.
const POPULATED: &str = "populated ";

/// How many objects a process of the benchmark serves or reads.
fn objects() -> usize {
    std::env::var("QUINION_OBJECTS").map_or(OBJECTS, |objects| objects.parse().unwrap())
}

fn key(object: usize) -> String {
    format!("part-{object}")
}

fn main() {
    let name = |variable| std::env::var(variable).ok();
    if let Some(role) = name("QUINION_ROLE") {
        let (store, socket) = (name("QUINION_STORE").unwrap(), name("QUINION_SOCKET").unwrap());
        return match &*role {
            SERVES => be_server(&store, &socket),
            HOLDS => hold(&socket),
            PAUSES => tell_pauses(&socket),
            role => println!("{}", read_as(role, &store, &socket)),
        };
    }
    if !std::env::args().any(|word| word == "--bench") {
        return; // `cargo test --benches`: there is nothing to check
    }
    let json = std::env::args().any(|word| word == "--json");
    let store = s3::Server::new();
    (0..OBJECTS).for_each(|object| store.control.put(&key(object), OBJECT_BYTES as usize));
    store.control.set_latency(LATENCY);
    let bench = Bench { store, folder: tempfile::tempdir().unwrap(), json };
    let words: Vec<_> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let is_wanted = |row: &str| words.is_empty() || words.iter().any(|word| row.contains(word));
    let cold: [(&str, &[&str]); 4] = [
        ("cold scan", &["bare-scan", "client-scan", "populated client-scan"]),
        ("cold streams, one after another", &["bare-streams", "client-streams", "populated client-streams"]),
        ("cold scattered 64 KiB, 32 at a time", &["bare-scattered", "client-scattered"]),
        ("cold scattered 64 KiB, by 32 readers", &["bare-readers", "client-threads"]),
    ];
    cold.iter().filter(|(row, _)| is_wanted(row)).for_each(|(row, roles)| bench.cold(row, roles));
    let row = "cold streams, of 80 MB/s a connection";
    if is_wanted(row) {
        bench.store.control.set_bandwidth(CONNECTION_BYTES);
        bench.cold(row, &["bare-streams", "client-streams"]);
        bench.store.control.set_bandwidth(0);
    }
    let rows: [Row; 6] = [
        ("warm scan", Bench::warm),
        ("hit of 4 KiB", Bench::hits),
        ("GETs of workers", Bench::workers),
        ("restart with a warm disk tier", Bench::restart),
        ("resident bytes of all processes", Bench::resident),
        ("longest pause at an end of the server", Bench::pauses),
    ];
    rows.iter().filter(|(row, _)| is_wanted(row)).for_each(|(_, run)| run(&bench));
}

type Row = (&'static str, fn(&Bench));

struct Bench {
    store: s3::Server,
    folder: tempfile::TempDir,
    json: bool,
}

/// A server of the benchmark's store.
fn builder_of(store: Arc<dyn ObjectStore>, tier: Option<&Path>) -> Builder {
    let mut cache = Cache::builder().memory(objects() as u64 * OBJECT_BYTES + (64 << 20));
    if let Some(tier) = tier {
        cache = cache.disk(DiskOptions::new(tier, 2 * DATA_BYTES));
    }
    let options = Options::new().store_name("the store of the benchmark");
    Server::builder(cache.build().unwrap()).store("s3://bucket", store, options)
}

/// Serves until it is told to end, as `quinion serve` does. With `QUINION_REPLACES` it takes another server's place.
fn be_server(store: &str, socket: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut terminate = runtime.block_on(async { signal(SignalKind::terminate()) }).unwrap();
    let claimed = match std::env::var_os("QUINION_REPLACES") {
        Some(_) => Socket::replace(socket, REPLACE_MAX),
        None => Socket::bind(socket),
    };
    let claimed = claimed.and_then(Socket::replaceable).unwrap();
    let tier = std::env::var_os("QUINION_TIER");
    let server = builder_of(s3::store_at(store), tier.as_deref().map(Path::new)).start_at(claimed).unwrap();
    println!("is there");
    runtime.block_on(terminate.recv());
    drop(server);
}

fn open_all(client: &Client) -> Vec<ClientFile> {
    (0..objects()).map(|object| client.open(&format!("s3://bucket/{}", key(object))).unwrap()).collect()
}

/// Opens, reads all after a line, and stays until another.
fn hold(socket: &str) {
    let files = open_all(&Client::connect(socket).unwrap());
    let mut lines = std::io::stdin().lines();
    println!("is open");
    lines.next();
    scan_files(&files);
    println!("has read");
    lines.next();
}

/// Reads, and checks each byte. After each line of its input it tells how long a read has taken at most since the line
/// before.
fn tell_pauses(socket: &str) {
    let files = open_all(&Client::connect(socket).unwrap());
    let (sender, asked) = mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|_| sender.send(()))
    });
    let (mut state, mut longest, mut buffer) =
        (u64::from(std::process::id()), Duration::ZERO, vec![0; 64 << 10]);
    scan_files(&files);
    println!("is open");
    loop {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (file, at) =
            (&files[(state >> 33) as usize % OBJECTS], (state >> 20) % (OBJECT_BYTES - (64 << 10)));
        let begun = Instant::now();
        file.read_exact_at(&mut buffer, at).unwrap();
        longest = longest.max(begun.elapsed());
        s3::check(1, at, &buffer);
        match asked.try_recv() {
            Ok(()) => println!("pause {}", std::mem::take(&mut longest).as_nanos()),
            Err(mpsc::TryRecvError::Empty) => std::thread::sleep(BETWEEN),
            Err(mpsc::TryRecvError::Disconnected) => return,
        }
    }
}

/// A process that is talked with; it ends with this value.
struct Process {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Process {
    /// What it says behind `words`.
    fn says(&mut self, words: &str) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().strip_prefix(words).unwrap_or_else(|| panic!("not {words:?}: {line:?}")).trim().to_owned()
    }

    fn tell(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
    }

    /// The process's proportional set size, in bytes: a page of several processes counts once in their sum.
    fn resident(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
        1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // SIGKILL
        let _ = self.child.wait();
    }
}

/// A reader's measure: nanoseconds, for all that it did.
fn read_as(role: &str, store: &str, socket: &str) -> u128 {
    let bare = s3::store_at(store);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let client = || Client::connect(socket).unwrap();
    // What is measured is reading: connections and handles are there before.
    runtime.block_on(bare.head(&Key::from(key(0)))).unwrap();
    let open = || open_all(&client());
    match role {
        "bare-scan" => timed(|| runtime.block_on(scan_bare(&*bare))),
        "bare-streams" => timed(|| runtime.block_on(scan_streams(&*bare))),
        "client-streams" => {
            let store = quinion_service::cached(bare, client(), "s3://bucket").unwrap();
            timed(|| runtime.block_on(scan_streams(&store)))
        }
        "client-scan" => {
            let files = open();
            timed(|| scan_files(&files))
        }
        "bare-scattered" => timed(|| runtime.block_on(async { scattered(|at| get_all(&bare, at)).await })),
        "client-scattered" => {
            let file = open().swap_remove(0);
            timed(|| {
                for round in 0..SCATTERED.2 {
                    let mut buffers = vec![vec![0; SCATTERED.0 as usize]; SCATTERED.1];
                    let places = places_of(round);
                    let mut ranges: Vec<_> = places
                        .into_iter()
                        .zip(&mut buffers)
                        .map(|(offset, buffer)| RangeRead { offset, buffer })
                        .collect();
                    file.read_ranges(&mut ranges).unwrap();
                }
            })
        }
        "client-one" => {
            let file = open().swap_remove(0);
            timed(|| {
                let mut buffer = vec![0; SCATTERED.0 as usize];
                for at in (0..ONE_BY_ONE).flat_map(places_of) {
                    file.read_exact_at(&mut buffer, at).unwrap();
                }
            })
        }
        "bare-readers" => timed(|| runtime.block_on(readers_of(&*bare))),
        "client-threads" => {
            let file = open().swap_remove(0);
            timed(|| threads_of(&file))
        }
        "client-hit" => {
            let file = open().swap_remove(0);
            timed_hits(|buffer, at| file.read_exact_at(buffer, at).unwrap())
        }
        role => panic!("no reader is {role}"),
    }
}

fn scan_files(files: &[ClientFile]) {
    let mut buffer = vec![0; MIB as usize];
    let place = |at: u64| ((at / OBJECT_BYTES) as usize, at % OBJECT_BYTES);
    let prefetch = |at: u64| {
        let (object, begin) = place(at);
        files.get(object).map(|file| file.prefetch(begin..begin + BARE.0).unwrap())
    };
    (0..AHEAD).step_by(BARE.0 as usize).filter_map(prefetch).for_each(|()| {});
    for at in (0..files.len() as u64 * OBJECT_BYTES).step_by(MIB as usize) {
        if at % BARE.0 == 0 {
            prefetch(at + AHEAD);
        }
        let (object, begin) = place(at);
        files[object].read_exact_at(&mut buffer, begin).unwrap();
    }
}

async fn readers_of(bare: &dyn ObjectStore) {
    let readers = (0..SCATTERED.1).map(|reader| async move {
        for round in 0..SCATTERED.2 {
            let at = places_of(round)[reader];
            let bytes = bare.get_range(&Key::from(key(0)), at..at + SCATTERED.0).await.unwrap();
            assert_eq!(bytes.len() as u64, SCATTERED.0);
        }
    });
    futures_util::future::join_all(readers).await;
}

fn threads_of(file: &ClientFile) {
    std::thread::scope(|scope| {
        for thread in 0..SCATTERED.1 {
            scope.spawn(move || {
                let mut buffer = vec![0; SCATTERED.0 as usize];
                for round in 0..SCATTERED.2 {
                    file.read_exact_at(&mut buffer, places_of(round)[thread]).unwrap();
                }
            });
        }
    });
}

fn timed(work: impl FnOnce()) -> u128 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_nanos()
}

fn timed_hits(read: impl Fn(&mut [u8], u64)) -> u128 {
    let mut buffer = vec![0; 4096];
    let mut pass = || {
        let mut state = 88_172_645_463_325_252_u64;
        for _ in 0..HITS {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            read(&mut buffer, state % (OBJECT_BYTES / 4096) * 4096);
        }
    };
    pass();
    timed(pass)
}

async fn scan_bare(store: &dyn ObjectStore) {
    let ranges = (0..OBJECTS).flat_map(|object| {
        (0..OBJECT_BYTES).step_by(BARE.0 as usize).map(move |at| (key(object), at..at + BARE.0))
    });
    let gets = stream::iter(ranges).map(|(key, range)| async move {
        store.get_range(&Key::from(key), range).await.map(|bytes| bytes.len() as u64)
    });
    let read: Vec<u64> = gets.buffer_unordered(BARE.1).try_collect().await.unwrap();
    assert_eq!(read.iter().sum::<u64>(), DATA_BYTES);
}

async fn scan_streams(store: &dyn ObjectStore) {
    for object in 0..OBJECTS {
        let mut parts = store.get(&Key::from(key(object))).await.unwrap().into_stream();
        let mut read = 0;
        while let Some(part) = parts.next().await {
            read += part.unwrap().len() as u64;
        }
        assert_eq!(read, OBJECT_BYTES);
    }
}

fn places_of(round: usize) -> Vec<u64> {
    let pages = OBJECT_BYTES / SCATTERED.0;
    let place = |n: usize| (n as u64 * 197 + 11) % pages * SCATTERED.0;
    (0..SCATTERED.1).map(|n| place(round * SCATTERED.1 + n)).collect()
}

async fn scattered<F: Future<Output = ()>>(read: impl Fn(Vec<u64>) -> F) {
    for round in 0..SCATTERED.2 {
        read(places_of(round)).await;
    }
}

async fn get_all(store: &impl ObjectStore, places: Vec<u64>) {
    let key = &Key::from(key(0));
    let gets = stream::iter(places).map(|at| store.get_range(key, at..at + SCATTERED.0));
    let parts: Vec<_> = gets.buffer_unordered(SCATTERED.1).try_collect().await.unwrap();
    assert!(parts.iter().all(|part| part.len() as u64 == SCATTERED.0));
}

impl Bench {
    fn server(&self) -> Server {
        self.server_on(None)
    }

    fn server_on(&self, tier: Option<&Path>) -> Server {
        builder_of(self.store.store(), tier).start(self.socket().to_str().unwrap()).unwrap()
    }

    fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("q/s.sock")
    }

    fn spawn(&self, role: &str) -> std::process::Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("QUINION_ROLE", role).env("QUINION_STORE", self.store.address());
        command.env("QUINION_SOCKET", self.socket()).stdout(Stdio::piped());
        command.spawn().unwrap()
    }

    fn talk(&self, role: &str, environment: &[(&str, &Path)]) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("QUINION_ROLE", role).env("QUINION_STORE", self.store.address());
        command.env("QUINION_SOCKET", self.socket()).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Process { child, said }
    }

    fn run(&self, role: &str) -> f64 {
        finished(self.spawn(role))
    }

    fn cold(&self, row: &str, roles: &[&str]) {
        let times = rotated(roles, |role| {
            make_resident();
            let server = self.server();
            let reader = role.strip_prefix(POPULATED);
            if reader.is_some() {
                server.cache().populate(u64::MAX).unwrap();
            }
            let time = self.run(reader.unwrap_or(role));
            drop(server);
            time
        });
        for (role, theirs) in roles.iter().zip(&times) {
            self.count(&format!("{row}, {role}, ms"), median(theirs) / 1e6);
        }
        for (role, theirs) in roles.iter().zip(&times).skip(1) {
            self.say(row, &format!("{role} beside {}", roles[0]), &ratios(&times[0], theirs));
        }
    }

    fn warm(&self) {
        let server = self.server();
        self.run("client-scan");
        let mut gets = 0;
        let times = rotated(&["bare-scan", "client-scan"], |role| {
            let before = self.store.control.gets();
            let time = self.run(role);
            gets += if role == "client-scan" { self.store.control.gets() - before } else { 0 };
            time
        });
        let [bare, warm] = &times[..] else { unreachable!("there are two") };
        self.count("warm scan, client-scan, ms", median(warm) / 1e6);
        self.say("a late worker's warm scan", "client-scan beside bare-scan", &ratios(bare, warm));
        self.count("a late worker's GETs", gets as f64);
        drop(server);
    }

    fn hits(&self) {
        let cache = Cache::builder().memory(DATA_BYTES).build().unwrap();
        let objects = ObjectCache::new(cache, self.store.store(), Options::new()).unwrap();
        let own = objects.open(&Key::from(key(0))).unwrap();
        let server = self.server();
        self.run("client-hit");
        let times = rotated(&["own", "client-hit"], |role| match role {
            "own" => timed_hits(|buffer, at| assert_eq!(own.read_at(buffer, at).unwrap(), 4096)) as f64,
            role => self.run(role),
        });
        self.say("hit of 4 KiB", "client beside its own process", &ratios(&times[0], &times[1]));
        self.count("hit of 4 KiB in a client, ns", median(&times[1]) / HITS as f64);
        drop(server);
    }

    fn workers(&self) {
        let gets_of = |workers: usize| {
            let server = self.server();
            let before = self.store.control.gets();
            let workers: Vec<_> = (0..workers).map(|_| self.spawn("client-scan")).collect();
            for worker in workers {
                finished(worker);
            }
            (self.store.control.gets() - before, server.cache().stats().data_bytes)
        };
        let (one, _) = gets_of(1);
        let (eight, resident) = gets_of(WORKERS);
        self.count("GETs of one worker", one as f64);
        self.count("GETs of eight workers, to one's", eight as f64 / one as f64);
        self.count("memory of the data for eight, to the data", resident as f64 / DATA_BYTES as f64);
    }

    /// A server that starts with a disk tier that another one has left, beside one that starts with nothing.
    fn restart(&self) {
        // Past the kernel's page cache: what is read is read from the disk.
        let tier = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let server = self.server_on(Some(tier.path()));
        self.run("client-scan");
        drop(server);
        for (row, role, bandwidth) in [
            ("restart, scan", "client-scan", 0),
            ("restart, scan, of 80 MB/s a connection", "client-scan", CONNECTION_BYTES),
            ("restart, 64 KiB one after the other", "client-one", 0),
        ] {
            self.store.control.set_bandwidth(bandwidth);
            let mut gets = 0;
            let times = rotated(&["cold", "warm"], |way| {
                let server = self.server_on((way == "warm").then_some(tier.path()));
                let before = self.store.control.gets();
                let time = self.run(role);
                gets += if way == "warm" { self.store.control.gets() - before } else { 0 };
                drop(server);
                time
            });
            for (way, theirs) in ["cold", "warm"].iter().zip(&times) {
                self.count(&format!("{row}, {way}, ms"), median(theirs) / 1e6);
            }
            self.say(row, "warm disk tier beside cold", &ratios(&times[0], &times[1]));
            self.count(&format!("{row}, GETs with a warm tier"), gets as f64);
        }
        self.store.control.set_bandwidth(0);
    }

    /// How much larger the server and its clients have become, all together, when each has read all of the data.
    fn resident(&self) {
        (OBJECTS..RESIDENT_OBJECTS)
            .for_each(|object| self.store.control.put(&key(object), OBJECT_BYTES as usize));
        let objects = RESIDENT_OBJECTS.to_string();
        let of_all = ("QUINION_OBJECTS", Path::new(&objects));
        let mut server = self.talk(SERVES, &[of_all]);
        server.says("is there");
        let mut holders: Vec<_> = (0..WORKERS).map(|_| self.talk(HOLDS, &[of_all])).collect();
        holders.iter_mut().for_each(|holder| drop(holder.says("is open")));
        let all =
            |holders: &[Process]| server.resident() + holders.iter().map(Process::resident).sum::<u64>();
        let before = all(&holders);
        holders.iter_mut().for_each(Process::tell);
        holders.iter_mut().for_each(|holder| drop(holder.says("has read")));
        let grown = all(&holders).saturating_sub(before);
        let data = RESIDENT_OBJECTS as u64 * OBJECT_BYTES;
        self.count("resident bytes of all processes, to the data", grown as f64 / data as f64);
    }

    /// How long a read takes at most that meets the end of the server: one that another replaces, as an upgrade does,
    /// and one that is killed, and started again. The disk tier is that of the server before.
    fn pauses(&self) {
        let tier = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let kept = ("QUINION_TIER", tier.path());
        let mut server = self.talk(SERVES, &[kept]);
        server.says("is there");
        let mut readers: Vec<_> = (0..WORKERS).map(|_| self.talk(PAUSES, &[])).collect();
        readers.iter_mut().for_each(|reader| drop(reader.says("is open")));
        let mut longest = || {
            readers.iter_mut().for_each(Process::tell);
            let told = readers.iter_mut().map(|reader| reader.says("pause").parse::<f64>().unwrap());
            told.fold(0.0, f64::max)
        };
        let (mut still, mut upgrades, mut kills) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..REPETITIONS {
            longest();
            std::thread::sleep(BESIDE);
            still.push(longest());
            let mut next = self.talk(SERVES, &[kept, ("QUINION_REPLACES", Path::new("1"))]);
            next.says("is there");
            std::thread::sleep(BESIDE);
            upgrades.push(longest());
            server = next; // the one before has ended
            drop(server);
            server = self.talk(SERVES, &[kept]);
            server.says("is there");
            std::thread::sleep(BESIDE);
            kills.push(longest());
        }
        drop(readers);
        drop(server);
        for (what, pauses) in [
            ("none", &still),
            ("a server that another replaces", &upgrades),
            ("kill -9 and a restart", &kills),
        ] {
            self.count(&format!("longest read of {WORKERS} clients beside {what}, ms"), median(pauses) / 1e6);
            let most = pauses.iter().copied().fold(0.0, f64::max);
            self.count(&format!("the same, longest of {REPETITIONS}, ms"), most / 1e6);
        }
    }

    fn say(&self, row: &str, what: &str, ratios: &[f64]) {
        let (low, middle, high) = quartiles(ratios);
        let of = |pick: fn(f64, f64) -> f64| ratios.iter().copied().reduce(pick).unwrap_or_default();
        let steady = of(f64::max) <= 2.0 * of(f64::min);
        let note = if steady { "" } else { "not steady" };
        if self.json {
            let names = format!("\"row\":\"{row}\",\"what\":\"{what}\"");
            let ratio = format!("\"ratio\":{middle:.3},\"quartiles\":[{low:.3},{high:.3}]");
            println!("{{{names},{ratio},\"steady\":{steady}}}");
        } else {
            println!("{row:40} {what:42} {middle:6.2}x  [{low:.2}, {high:.2}] {note}");
        }
    }

    fn count(&self, row: &str, value: f64) {
        if self.json {
            println!("{{\"row\":\"{row}\",\"value\":{value:.3}}}");
        } else {
            println!("{row:40} {value:10.3}");
        }
    }
}

/// Has the machine's host give as much memory as a repetition takes: a page that was given back lately is at hand.
fn make_resident() {
    let mut memory = vec![0_u8; 2 * DATA_BYTES as usize];
    memory.chunks_mut(4096).for_each(|page| page[0] = 1);
    std::hint::black_box(&memory);
}

fn finished(mut child: std::process::Child) -> f64 {
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success());
    said.trim().parse().unwrap()
}

fn rotated(roles: &[&str], mut run: impl FnMut(&str) -> f64) -> Vec<Vec<f64>> {
    let mut times = vec![Vec::new(); roles.len()];
    for repetition in 0..REPETITIONS {
        for place in 0..roles.len() {
            let role = (repetition + place) % roles.len();
            times[role].push(run(roles[role]));
        }
    }
    times
}

fn ratios(first: &[f64], second: &[f64]) -> Vec<f64> {
    first.iter().zip(second).map(|(first, second)| first / second).collect()
}

fn quartiles(values: &[f64]) -> (f64, f64, f64) {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |part: usize| values[(values.len() - 1) * part / 4];
    (at(1), at(2), at(3))
}

fn median(values: &[f64]) -> f64 {
    quartiles(values).1
}

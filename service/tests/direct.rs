//! Reads without a server, and reads that block no task: each byte against the content that the open version has.
//!
//! A server that is killed is this test program started again (`the_child`). The store is the server on loopback of
//! `quinion-testing-s3`, whose bytes follow from a version and a position.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use object_store::ObjectStore;
use quinion::Cache;
use quinion_object::Options;
use quinion_service::{Client, ClientFile, ErrorKind, RangeRead, Server};
use quinion_testing::content::Dice;
use quinion_testing_s3 as s3;
use reads::read_once;

mod reads;

const URL: &str = "s3://bucket/object";
const OBJECT_BYTES: usize = 4_000_000;
/// Longer than anything here takes on a machine that is busy with other tests.
const LONG: Duration = Duration::from_secs(60);

struct Fixture {
    store: s3::Server,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(bytes: usize) -> Self {
        Self { store: s3::Server::with_object(bytes), folder: tempfile::tempdir().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("q/s.sock")
    }

    fn serve(&self) -> Server {
        let cache = Cache::builder().memory(32 << 20).build().unwrap();
        // A child of another test has the name's lock, too, until it executes its program.
        let begun = Instant::now();
        loop {
            let store = self.store.store();
            let server = Server::builder(cache.clone()).store("s3://bucket", store, Options::new());
            match server.start(self.socket().to_str().unwrap()) {
                Ok(server) => return server,
                Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
            }
        }
    }

    /// A client with a store of its own.
    fn client(&self) -> Client {
        let begun = Instant::now();
        loop {
            match Client::connect(self.socket().to_str().unwrap()) {
                Ok(client) => return client.with_direct_store("s3://bucket/", self.store.store()),
                Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
            }
        }
    }
}

#[test]
fn an_object_is_read_from_the_clients_own_store_while_no_server_is_there() {
    let fixture = Fixture::new(OBJECT_BYTES);
    let server = fixture.serve();
    let client = fixture.client();
    let file = client.open(URL).unwrap();
    let without = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let without = without.with_reconnect_timeout(Duration::ZERO).open(URL).unwrap();
    drop(server);
    let mut random = Dice::new(1);
    (0..60).for_each(|_| read_once(&file, &mut random));
    assert!(!file.is_served().unwrap() && file.pin(5..50_000).unwrap().is_copied());
    let mut whole = vec![0; OBJECT_BYTES + 9];
    assert_eq!(file.read_at(&mut whole, 0).unwrap(), OBJECT_BYTES);
    s3::check(1, 0, &whole[..OBJECT_BYTES]);
    let end = OBJECT_BYTES as u64 - 7;
    assert_eq!(file.read_exact_at(&mut [0; 8], end).unwrap_err().kind(), ErrorKind::EndOfFile);
    assert_eq!(file.read_at(&mut [0; 8], end + 7).unwrap(), 0);
    let mut buffer = [0; 8];
    let beyond = file.read_ranges(&mut [RangeRead { offset: end, buffer: &mut buffer }]).unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::EndOfFile);
    // As before, for those that have not asked for it, and for opens.
    assert_eq!(without.read_at(&mut [0; 8], 0).unwrap_err().kind(), ErrorKind::OwnerDead);
    let hasty = client.with_reconnect_timeout(Duration::ZERO);
    assert_eq!(hasty.open(URL).unwrap_err().kind(), ErrorKind::OwnerDead);
    // A server that is there again has the reads.
    let _server = fixture.serve();
    file.read_exact_at(&mut whole[..9000], 70_000).unwrap();
    let gets = fixture.store.control.gets();
    file.read_exact_at(&mut whole[..9000], 70_000).unwrap();
    s3::check(1, 70_000, &whole[..9000]);
    assert!(
        file.is_served().unwrap() && fixture.store.control.gets() == gets,
        "it is not read by the server"
    );
}

/// 1. A server ends, and the object is replaced.
/// 2. A read of the version that is open is made at the store.
#[test]
fn another_version_is_an_error_also_at_the_store() {
    let fixture = Fixture::new(40_000_000);
    let server = fixture.serve();
    let file = fixture.client().open(URL).unwrap();
    drop(server);
    file.read_exact_at(&mut [0; 9], 5).unwrap();
    fixture.store.control.change("object");
    let mut buffer = vec![0; 30_000_000];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Changed);
    let (one, two) = buffer.split_at_mut(15_000_000);
    let mut ranges = [RangeRead { offset: 0, buffer: one }, RangeRead { offset: 20_000_000, buffer: two }];
    assert_eq!(file.read_ranges(&mut ranges).unwrap_err().kind(), ErrorKind::Changed);
    fixture.store.control.delete("object");
    assert_eq!(file.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Changed);
}

/// A store in memory, which counts its ETags from 0 on: the same tag, and other bytes.
#[test]
fn another_store_with_the_same_tags_is_not_taken_for_the_objects_own() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let put = |text: &'static str| {
        let store = Arc::new(object_store::memory::InMemory::new());
        let path = object_store::path::Path::from("object");
        runtime.block_on(store.put_opts(&path, text.into(), Default::default())).unwrap();
        store
    };
    let (own, other) = (put("bytes"), put("other"));
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", own.clone(), Options::new());
    let server = server.start(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let [right, wrong] = [own as Arc<dyn ObjectStore>, other]
        .map(|store| client.clone().with_direct_store("s3://bucket", store).open(URL).unwrap());
    drop(server);
    let mut buffer = [0; 5];
    right.read_exact_at(&mut buffer, 0).unwrap();
    assert_eq!(&buffer, b"bytes");
    assert_eq!(wrong.read_exact_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Changed);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// One read by an async call, of the ways that there are.
async fn read_once_async(file: &ClientFile, version: u32, random: &mut Dice) -> quinion_service::Result<()> {
    let len = 1 + random.below(200_000);
    let at = random.below(file.len() - 2 * len);
    let mut buffer = vec![0; len as usize];
    match random.below(4) {
        0 => s3::check(version, at, &file.pin_async(at..at + len).await?.to_vec()),
        1 => {
            let mut second = buffer.clone();
            let mut ranges = [
                RangeRead { offset: at, buffer: &mut buffer },
                RangeRead { offset: at + len, buffer: &mut second },
            ];
            file.read_ranges_async(&mut ranges).await?;
            ranges.iter().for_each(|range| s3::check(version, range.offset, range.buffer));
        }
        _ => {
            file.read_exact_at_async(&mut buffer, at).await?;
            s3::check(version, at, &buffer);
        }
    }
    Ok(())
}

async fn tick(ticks: &AtomicU64) {
    loop {
        tokio::time::sleep(Duration::from_millis(2)).await;
        ticks.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_hit_is_there_at_the_first_poll_and_a_miss_blocks_no_other_task() {
    let fixture = Fixture::new(OBJECT_BYTES);
    let _server = fixture.serve();
    let file = fixture.client().open(URL).unwrap();
    fixture.store.control.set_latency(Duration::from_millis(300));
    let mut buffer = vec![0; 50_000];
    let ticks = AtomicU64::new(0);
    runtime().block_on(async {
        tokio::select! {
            biased;
            () = tick(&ticks) => {}
            read = file.read_exact_at_async(&mut buffer, 1_000_000) => read.unwrap(),
        }
    });
    s3::check(1, 1_000_000, &buffer);
    let ticks = ticks.load(Ordering::Relaxed);
    assert!(ticks > 10, "another task had {ticks} turns while the store was waited for");
    let gets = fixture.store.control.gets();
    let hit = file.read_at_async(&mut buffer, 1_000_000).now_or_never();
    assert_eq!(hit.expect("cached bytes are there at once").unwrap(), 50_000);
    let mut ranges = [RangeRead { offset: 1_000_000, buffer: &mut buffer }];
    file.read_ranges_async(&mut ranges).now_or_never().expect("cached bytes are there at once").unwrap();
    s3::check(1, 1_000_000, &buffer);
    assert_eq!(fixture.store.control.gets(), gets);
}

/// Objects and local files, hits and misses, ends and errors.
#[test]
fn async_calls_answer_as_the_others() {
    // More than a thread reads at a time.
    let fixture = Fixture::new(20_000_000);
    let server = fixture.serve();
    let local = fixture.folder.path().join("local");
    std::fs::write(&local, s3::content(3, 300_000)).unwrap();
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let client = client.with_reconnect_timeout(Duration::ZERO);
    let runtime = runtime();
    let open = |name: &str| runtime.block_on(client.open_async(name));
    let (object, local) = (open(URL).unwrap(), open(local.to_str().unwrap()).unwrap());
    assert_eq!(open("s3://bucket/none").unwrap_err().kind(), ErrorKind::Open);
    let mut random = Dice::new(7);
    for (file, version) in [(&object, 1), (&local, 3)] {
        let size = file.len();
        for _ in 0..40 {
            let len = random.below(20_000_000) as usize;
            let at = random.below(size + 1000);
            let (mut own, mut other) = (vec![0; len], vec![0; len]);
            let found = runtime.block_on(file.read_at_async(&mut own, at)).unwrap();
            assert_eq!(found, file.read_at(&mut other, at).unwrap(), "{len} bytes at {at}");
            s3::check(version, at, &own[..found.min(50_000)]);
            assert!(own[..found] == other[..found]);
        }
        let beyond = runtime.block_on(file.read_exact_at_async(&mut [0; 9], size - 5)).unwrap_err();
        assert_eq!(beyond.kind(), ErrorKind::EndOfFile);
    }
    runtime.block_on(async {
        for _ in 0..50 {
            read_once_async(&object, 1, &mut random).await.unwrap();
        }
    });
    drop(server);
    let dead = runtime.block_on(object.read_at_async(&mut [0; 9], 0)).unwrap_err();
    assert_eq!(dead.kind(), ErrorKind::OwnerDead);
}

// ---- servers that are killed --------------------------------------------------------------------------------------

/// Not a test: a server that another test has started, and kills.
#[test]
fn the_child() {
    let Ok(socket) = std::env::var("QUINION_SOCKET") else { return };
    let store = s3::store_at(&std::env::var("QUINION_STORE").unwrap());
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store, Options::new().whole_max(0));
    let _server = server.start(&socket).unwrap();
    println!("serves");
    // As long as the test is there.
    let _ = std::io::stdin().lines().count();
    std::process::exit(0);
}

struct ServerProcess(Child);

impl ServerProcess {
    fn start(socket: &Path, store: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env("QUINION_SOCKET", socket).env("QUINION_STORE", store);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let server = Self(child);
        assert!(lines.any(|line| line.contains("serves")), "the server has not started");
        server
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap(); // SIGKILL
        self.0.wait().unwrap();
    }
}

/// Reads of one version until it is replaced, again and again; how many reads there were.
fn read_versions(fixture: &Fixture, seed: u64, is_over: &AtomicBool) -> u64 {
    let (mut random, mut reads, runtime) = (Dice::new(seed), 0, runtime());
    let client = fixture.client();
    while !is_over.load(Ordering::Relaxed) {
        let file = match client.open(URL) {
            Ok(file) => file,
            // There is no server just now.
            Err(error) => {
                let kinds = [ErrorKind::OwnerDead, ErrorKind::Connect, ErrorKind::TimedOut, ErrorKind::Open];
                assert!(kinds.contains(&error.kind()), "{error}");
                continue;
            }
        };
        let version = s3::version_of(file.e_tag().unwrap()).unwrap();
        while !is_over.load(Ordering::Relaxed) {
            let len = 1 + random.below(100_000);
            let at = random.below(file.len() - len);
            let mut buffer = vec![0; len as usize];
            let read = match random.below(3) {
                0 => runtime.block_on(read_once_async(&file, version, &mut random)),
                1 => file.pin(at..at + len).map(|pin| s3::check(version, at, &pin.to_vec())),
                _ => file.read_exact_at(&mut buffer, at).map(|()| s3::check(version, at, &buffer)),
            };
            match read {
                Ok(()) => reads += 1,
                Err(error) if error.kind() == ErrorKind::Changed => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    reads
}

/// Servers are killed one after the other, with times without a server between them, and the object is replaced at any
/// time: a read has bytes of the version that its handle has open, or says that it was replaced.
#[test]
fn readers_with_a_store_of_their_own_go_on_while_servers_are_killed_and_objects_replaced() {
    const KILLS: usize = 20;
    let fixture = Fixture::new(OBJECT_BYTES);
    let (is_over, socket, store) = (AtomicBool::new(false), fixture.socket(), fixture.store.address());
    let mut server = Some(ServerProcess::start(&socket, &store));
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let readers: Vec<_> = (0..3)
            .map(|seed| {
                scope.spawn({
                    let (fixture, is_over) = (&fixture, &is_over);
                    move || read_versions(fixture, seed, is_over)
                })
            })
            .collect();
        let mut random = Dice::new(11);
        for kill in 0..KILLS {
            // The end of the one before is noticed within some tenths of a second.
            std::thread::sleep(Duration::from_millis(100 + random.below(300)));
            drop(server.take());
            if kill % 3 == 0 {
                fixture.store.control.change("object");
            }
            std::thread::sleep(Duration::from_millis(random.below(300)));
            assert!(!readers.iter().any(|reader| reader.is_finished()), "a reader has failed");
            server = Some(ServerProcess::start(&socket, &store));
            if kill % 5 == 0 {
                fixture.store.control.change("object");
            }
        }
        drop(over);
        let reads: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        println!("{reads:?} reads beside {KILLS} kills");
        assert!(reads.iter().all(|reads| *reads > 20), "{reads:?}");
    });
    drop(server);
}

/// Also when the test fails.
struct Over<'f>(&'f AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

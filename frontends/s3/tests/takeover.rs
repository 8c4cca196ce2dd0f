//! Takeover: the server of the cache behind the endpoint is killed, or replaced by the next one, while clients read.
//!
//! ```text
//!   eight clients, threads here --> quinion-s3 --server --> a server, this program again --> versitygw
//!                                                            killed, or told to end by the one that replaces it
//! ```
//!
//! The clients try again by themselves, as SDKs do, and so no read may fail. Each byte is checked. The longest read is
//! printed: `QUINION_SOAK=1 cargo test --release -p quinion-s3 --test takeover -- --nocapture` takes twenty turns.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use object_store::aws::AmazonS3;
use object_store::{ObjectStoreExt, path::Path};
use quinion::Cache;
use quinion_object::Options;
use quinion_service::{Server as CacheServer, Socket};
use quinion_testing_s3 as s3;
use tokio::signal::unix::{SignalKind, signal};

mod common;
#[path = "../../../object/tests/real/mod.rs"]
mod real;

use common::{Endpoint, KEY, SECRET, below, runtime, versitygw};

const CLIENTS: usize = 8;
const OBJECTS: usize = 6;
const OBJECT_BYTES: usize = 1 << 20;
const TURNS: usize = 3;
const TURNS_SOAK: usize = 20;
/// The deadline for a replaced server's end on a busy machine.
const END_MAX: Duration = Duration::from_secs(60);

/// Not a test: the server that the test has started.
#[test]
fn the_child() {
    let Ok(name) = std::env::var("QUINION_SOCKET") else { return };
    let runtime = runtime();
    let mut terminate = runtime.block_on(async { signal(SignalKind::terminate()) }).unwrap();
    let address = std::env::var("QUINION_STORE").unwrap().parse().unwrap();
    let store = real::builder(address, "bucket").with_access_key_id(real::KEY);
    let store =
        store.with_secret_access_key(real::SECRET).with_http_connector(s3::Connector).build().unwrap();
    let socket = Socket::replace(&name, END_MAX).and_then(Socket::replaceable).unwrap();
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let server = CacheServer::builder(cache).store("s3://bucket", Arc::new(store), Options::new());
    let server = server.start_at(socket).unwrap();
    println!("\nserves");
    std::io::stdout().flush().unwrap();
    std::thread::spawn(|| {
        let _ = std::io::stdin().lock().read_line(&mut String::new()); // the parent is dead
        std::process::exit(0);
    });
    runtime.block_on(terminate.recv());
    server.stop();
    std::process::exit(0);
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// Starts the next server, which replaces the present one, and waits until it serves.
    fn start(name: &str, store: &real::Server) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env("QUINION_SOCKET", name);
        command.env("QUINION_STORE", store.endpoint().trim_start_matches("http://"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "serves"), "the server does not start");
        Self(child)
    }
}

/// A client that tries again as often as users' do.
fn client(endpoint: &Endpoint) -> AmazonS3 {
    let builder = real::builder(endpoint.address, "bucket").with_retry(object_store::RetryConfig::default());
    let builder = builder.with_access_key_id(KEY).with_secret_access_key(SECRET);
    builder.with_http_connector(s3::Connector).build().unwrap()
}

#[derive(Default)]
struct Reading {
    is_over: AtomicBool,
    reads: AtomicU64,
    /// The longest read since this was taken last, in microseconds.
    longest: AtomicU64,
}

impl Reading {
    /// Reads whole objects and parts of them, until it is over.
    fn read(&self, client: &AmazonS3, first: usize) {
        let runtime = runtime();
        for turn in (first..).take_while(|_| !self.is_over.load(Ordering::Relaxed)) {
            let object = turn % OBJECTS;
            let path = Path::from(format!("object-{object}"));
            let from = turn * 70_001 % OBJECT_BYTES;
            let range =
                if turn % 3 == 0 { 0..OBJECT_BYTES } else { from..(from + 300_000).min(OBJECT_BYTES) };
            let begun = Instant::now();
            let read = client.get_range(&path, range.start as u64..range.end as u64);
            let bytes = runtime.block_on(read).expect("no client's read fails");
            self.longest.fetch_max(begun.elapsed().as_micros() as u64, Ordering::Relaxed);
            assert_eq!(bytes.len(), range.len());
            s3::check(object as u32, range.start as u64, &bytes);
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until each client, on the average, has read twice more; nothing is known of how long that takes.
    fn go_on(&self, clients: &[std::thread::ScopedJoinHandle<'_, ()>]) {
        let until = self.reads.load(Ordering::Relaxed) + 2 * CLIENTS as u64;
        while self.reads.load(Ordering::Relaxed) < until {
            assert!(clients.iter().all(|client| !client.is_finished()), "a client has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.longest.swap(0, Ordering::Relaxed))
    }
}

#[test]
fn eight_clients_read_on_while_the_server_of_the_cache_is_killed_and_replaced() {
    let test = "eight_clients_read_on_while_the_server_of_the_cache_is_killed_and_replaced";
    let Some(store) = versitygw(test) else { return };
    let bucket = below(&store, "bucket");
    for object in 0..OBJECTS {
        let content = s3::content(object as u32, OBJECT_BYTES);
        runtime().block_on(bucket.put(&Path::from(format!("object-{object}")), content.into())).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("q/s.sock").to_str().unwrap().to_owned();
    let mut server = Process::start(&name, &store);
    let turns = if std::env::var_os("QUINION_SOAK").is_some() { TURNS_SOAK } else { TURNS };
    for freshness in ["always", "immutable"] {
        let arguments = ["--store", "s3://bucket", "--server", &name, "--freshness", freshness];
        let (endpoint, reading) = (Endpoint::start(&store, &arguments), Reading::default());
        std::thread::scope(|scope| {
            let read = |first| reading.read(&client(&endpoint), first);
            let clients: Vec<_> = (0..CLIENTS).map(|first| scope.spawn(move || read(first))).collect();
            reading.go_on(&clients);
            println!("{freshness}: a read took {:?} at most before", reading.longest());
            let mut pauses = [Vec::new(), Vec::new()];
            for _ in 0..turns {
                server.0.kill().unwrap(); // SIGKILL
                server.0.wait().unwrap();
                server = Process::start(&name, &store);
                reading.go_on(&clients);
                pauses[0].push(reading.longest());
                let next = Process::start(&name, &store);
                assert_eq!(
                    server.0.wait().unwrap().code(),
                    Some(0),
                    "the server that was replaced did not end in order"
                );
                server = next;
                reading.go_on(&clients);
                pauses[1].push(reading.longest());
            }
            reading.is_over.store(true, Ordering::Relaxed);
            for client in clients {
                client.join().expect("no client ends before the others");
            }
            let reads = reading.reads.load(Ordering::Relaxed);
            println!(
                "{freshness}: {reads} reads; the longest around each kill {:?}, {:?} around each replacement",
                pauses[0], pauses[1]
            );
        });
    }
}

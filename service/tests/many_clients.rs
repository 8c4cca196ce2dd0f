//! Many clients: as many processes as one server admits, some of which are killed at random while all read.
//!
//! ```text
//!   this process     the server; starts 1,024 processes, kills a third of them with SIGKILL, starts as many again
//!   each of them     one client: reads ranges of objects and checks each byte, until it is told to end
//! ```
//!
//! The cache is smaller than the objects, so that all clients ask all the time. A client that meets a wrong byte or an
//! error ends with another status than those that were told to end. The processes are this test program, started again.
//!
//! `QUINION_CLIENTS` says another number of processes.

use std::collections::HashSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::memory::InMemory;
use object_store::{ObjectStoreExt, PutPayload};
use quinion::Cache;
use quinion_object::Options;
use quinion_service::{Client, ErrorKind, Server};
use quinion_testing::content::Dice;
use quinion_testing_s3 as s3;

const CLIENTS: usize = 1024;
const OBJECTS: usize = 12;
const OBJECT_BYTES: usize = 4 << 20;
/// The server's own pages take 22 MiB of it.
const MEMORY: u64 = 56 << 20;
/// Reads of each client at least.
const READS_LEAST: u64 = 20;
const LONG: Duration = Duration::from_secs(500);

fn clients() -> usize {
    std::env::var("QUINION_CLIENTS").ok().and_then(|number| number.parse().ok()).unwrap_or(CLIENTS)
}

/// Not a test: what a child does that the test has started.
#[test]
fn the_child() {
    let Ok(folder) = std::env::var("QUINION_FOLDER") else { return };
    let folder = Path::new(&folder);
    let client = Client::connect(folder.join("q/s.sock").to_str().unwrap()).unwrap();
    let files: Vec<_> = (0..2)
        .map(|at| client.open(&url((std::process::id() as usize + 5 * at) % OBJECTS)).unwrap())
        .collect();
    let mut random = Dice::new(u64::from(std::process::id()) << 20 | 1);
    let (mut buffer, mut reads, end) = (vec![0; 20_000], 0, folder.join("end"));
    while reads < READS_LEAST || !end.exists() {
        let file = &files[random.below(2) as usize];
        let (at, len) = (random.below(OBJECT_BYTES as u64), 1 + random.below(20_000) as usize);
        let read = file.read_at(&mut buffer[..len], at).unwrap();
        assert_eq!(read, len.min(OBJECT_BYTES - at as usize));
        s3::check(1, at, &buffer[..read]);
        reads += 1;
        std::thread::sleep(Duration::from_millis(20 + random.below(200)));
    }
    std::process::exit(0);
}

fn url(at: usize) -> String {
    format!("s3://bucket/object-{at}")
}

struct Children {
    folder: tempfile::TempDir,
    all: Vec<Child>,
}

impl Children {
    fn start(&mut self, count: usize) {
        for _ in 0..count {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "the_child", "--test-threads=1", "--quiet"]);
            command.env("QUINION_FOLDER", self.folder.path()).stdin(Stdio::null()).stdout(Stdio::null());
            self.all.push(command.spawn().unwrap());
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.all {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[track_caller]
fn becomes(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{:>8} ms until {what}", begun.elapsed().as_millis());
}

#[test]
fn a_thousand_processes_read_right_bytes_while_a_third_of_them_is_killed() {
    allow_descriptors();
    let clients = clients();
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for at in 0..OBJECTS {
        let content = PutPayload::from(s3::content(1, OBJECT_BYTES));
        runtime.block_on(store.put(&format!("object-{at}").into(), content)).unwrap();
    }
    let cache = Cache::builder().memory(MEMORY).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store, Options::new()).clients_max(clients);
    let server = server.start(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
    let mut children = Children { folder, all: Vec::new() };

    children.start(clients);
    becomes("all are connected and read", || {
        let stats = server.stats();
        stats.clients == clients && stats.reads > 3 * clients as u64
    });
    let stats = server.cache().stats();
    assert!(stats.grown_bytes <= MEMORY, "with their pages they take {} bytes", stats.grown_bytes);
    // This process would be one more.
    let refused = Client::connect(server.socket().to_str().unwrap()).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Connect);
    assert!(refused.to_string().contains("as many clients as it admits"), "{refused}");

    let mut random = Dice::new(22);
    let mut killed = HashSet::new();
    while killed.len() < clients / 3 {
        killed.insert(random.below(clients as u64) as usize);
    }
    for &at in &killed {
        children.all[at].kill().unwrap(); // SIGKILL
    }
    for &at in &killed {
        children.all[at].wait().unwrap();
    }
    becomes("the slots of the dead are free", || server.stats().clients == clients - killed.len());
    let before = server.stats();
    becomes("the others read on", || server.stats().reads > before.reads + clients as u64);
    let mut at = 0;
    children.all.retain(|_| {
        at += 1;
        !killed.contains(&(at - 1))
    });
    children.start(killed.len());
    becomes("others have their slots", || server.stats().clients == clients);

    std::fs::write(children.folder.path().join("end"), "").unwrap();
    for child in &mut children.all {
        let status = child.wait().unwrap();
        assert!(status.success(), "{status}: a client met a wrong byte or an error; see above");
    }
    becomes("all is given back", || {
        let stats = server.stats();
        (stats.clients, stats.open_files, stats.pins) == (0, 0, 0)
    });
    let stats = server.stats();
    assert!(stats.asked > stats.reads / 100, "{stats:?}: hardly any of them asked");
    server.cache().check().unwrap();
}

/// A server has two descriptors for each client.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

//! Ends of servers under load: what clients in other processes are answered while one server follows another.
//!
//! A server, and a client, in another process is this test program started again (`the_child`). The store is the server
//! on loopback of `quinion-testing-s3`, whose bytes follow from a version and a position: each byte is checked.

use std::fs::DirBuilder;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use object_store::{ObjectStore, ObjectStoreExt};
use quinion::Cache;
use quinion_object::{Freshness, Options};
use quinion_service::{Client, ClientStore, ErrorKind, Server, Socket};
use quinion_testing::content::Dice;
use quinion_testing_s3 as s3;
use reads::read_once;

mod reads;

const URL: &str = "s3://bucket/object";
const OBJECT_BYTES: usize = 8_000_000;
const LOCAL_BYTES: usize = 300_000;
/// How often each client says that it goes on.
const ROUNDS: usize = 100;
/// Longer than anything here takes on a machine that is busy with other tests.
const LONG: Duration = Duration::from_secs(60);

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
    fn start(role: &str, socket: &Path, store: &s3::Server, input: Stdio) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env("QUINION_CHILD", role).env("QUINION_SOCKET", socket);
        command.env("QUINION_STORE", store.address()).stdin(input).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (sender, output) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let _ = sender.send(line); // the test may have ended
            }
        });
        Self { child, output }
    }

    #[track_caller]
    fn says(&self, words: &str) {
        let until = Instant::now() + LONG;
        loop {
            let line = self.output.recv_timeout(until.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|_| panic!("the child does not say {words:?}"));
            if line.contains(words) {
                return;
            }
        }
    }
}

fn say(words: &str) {
    println!("{words}");
    std::io::stdout().flush().unwrap();
}

// ---- the other process ------------------------------------------------------------------------------------------

/// Not a test: what a child does that another test has started.
#[test]
fn the_child() {
    let Ok(role) = std::env::var("QUINION_CHILD") else { return };
    let socket = std::env::var("QUINION_SOCKET").unwrap();
    match role.as_str() {
        "server" => be_server(Socket::bind(&socket).unwrap()),
        "activated" => {
            be_server(Socket::adopt(std::io::stdin().as_fd().try_clone_to_owned().unwrap()).unwrap())
        }
        "connect" => for_ever(|| {
            let file = connect(&socket).open(URL).unwrap();
            let mut bytes = [0; 300];
            file.read_exact_at(&mut bytes, 70_000).unwrap();
            s3::check(1, 70_000, &bytes);
        }),
        "read" => {
            let file = connect_at_last(&socket).open(URL).unwrap();
            let mut random = Dice::new(std::process::id().into());
            for_ever(|| read_once(&file, &mut random));
        }
        "local" => {
            let client = connect_at_last(&socket);
            let path = Path::new(&socket).with_file_name("local");
            let mut random = Dice::new(std::process::id().into());
            for_ever(|| read_local(&client, path.to_str().unwrap(), &mut random));
        }
        "store" => be_store(&connect_at_last(&socket)),
        role => panic!("no child is {role}"),
    }
    std::process::exit(0);
}

/// Serves for some tenths of a second, and ends in order.
fn be_server(socket: Socket) {
    let store = s3::store_at(&std::env::var("QUINION_STORE").unwrap());
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store, Options::new().whole_max(0));
    let server = server.start_at(socket).unwrap();
    say("serves");
    std::thread::sleep(Duration::from_millis(100));
    drop(server);
}

fn connect(socket: &str) -> Client {
    Client::connect(socket).unwrap().with_reconnect_timeout(LONG)
}

/// Where no manager keeps the socket, there may be none for a moment.
fn connect_at_last(socket: &str) -> Client {
    let begun = Instant::now();
    loop {
        match Client::connect(socket) {
            Ok(client) => return client.with_reconnect_timeout(LONG),
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Says how often it was done; a panic of it ends the process.
fn for_ever(mut act: impl FnMut()) {
    let mut begun = Instant::now();
    loop {
        act();
        if begun.elapsed() > Duration::from_millis(20) {
            say("goes on");
            begun = Instant::now();
        }
    }
}

fn read_local(client: &Client, path: &str, random: &mut Dice) {
    let file = client.open(path).unwrap();
    for _ in 0..20 {
        let len = 1 + random.below(50_000);
        let at = random.below(file.len() - len);
        let mut buffer = vec![0; len as usize];
        file.read_exact_at(&mut buffer, at).unwrap();
        s3::check(3, at, &buffer);
    }
}

fn be_store(client: &Client) {
    let bare = s3::store_at(&std::env::var("QUINION_STORE").unwrap());
    let store = ClientStore::builder(bare, client.clone(), "s3://bucket");
    let store = store.freshness(Freshness::For(Duration::from_millis(50))).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut random = Dice::new(std::process::id().into());
    let path = object_store::path::Path::from("object");
    for_ever(|| {
        let len = 1 + random.below(200_000);
        let at = random.below(OBJECT_BYTES as u64 - 2 * len);
        runtime.block_on(async {
            match random.below(4) {
                0 => assert_eq!(store.head(&path).await.unwrap().size, OBJECT_BYTES as u64),
                1 => {
                    let ranges = [at..at + len, at + len..at + 2 * len];
                    let all = store.get_ranges(&path, &ranges).await.unwrap();
                    ranges.iter().zip(&all).for_each(|(range, bytes)| s3::check(1, range.start, bytes));
                }
                2 => {
                    let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
                    assert_eq!(bytes.len(), OBJECT_BYTES);
                    s3::check(1, 0, &bytes);
                }
                _ => s3::check(1, at, &store.get_range(&path, at..at + len).await.unwrap()),
            }
        });
    });
}

// ---- tests ------------------------------------------------------------------------------------------------------

struct Fixture {
    store: s3::Server,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        DirBuilder::new().mode(0o700).create(folder.path().join("q")).unwrap();
        std::fs::write(folder.path().join("q/local"), s3::content(3, LOCAL_BYTES)).unwrap();
        Self { store: s3::Server::with_object(OBJECT_BYTES), folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("q/s.sock")
    }

    fn child(&self, role: &str) -> Process {
        Process::start(role, &self.socket(), &self.store, Stdio::null())
    }

    /// A socket as a service manager keeps it.
    fn listening(&self) -> OwnedFd {
        quinion_owner::internals::serve::listen(&self.socket()).unwrap()
    }
}

/// Servers end in order, and are killed, one after the other, and no client is told.
fn clients_go_on(roles: &[&str], fixture: &Fixture, serve: impl Fn() -> Process + Sync) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let servers = scope.spawn(|| {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                let mut server = serve();
                server.says("serves");
                if count % 3 == 2 {
                    std::thread::sleep(Duration::from_millis(50));
                    server.child.kill().unwrap();
                }
                server.child.wait().unwrap();
                count += 1;
            }
            count
        });
        let over = Over(&is_over);
        let clients: Vec<_> = roles.iter().map(|role| fixture.child(role)).collect();
        for _ in 0..ROUNDS {
            clients.iter().for_each(|client| client.says("goes on"));
        }
        let ended = clients.into_iter().filter_map(|mut client| client.child.try_wait().unwrap());
        assert_eq!(ended.count(), 0, "clients that have ended: see what they say");
        drop(over);
        println!("{} servers", servers.join().unwrap());
    });
}

/// Also when a client has failed.
struct Over<'f>(&'f AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_client_is_told_that_servers_end_while_a_manager_keeps_their_socket() {
    let fixture = Fixture::new();
    let listening = fixture.listening();
    let activated = || {
        Process::start("activated", &fixture.socket(), &fixture.store, listening.try_clone().unwrap().into())
    };
    clients_go_on(&["connect", "connect", "connect", "read", "local", "store"], &fixture, activated);
}

#[test]
fn readers_by_all_calls_go_on_while_servers_end() {
    let fixture = Fixture::new();
    clients_go_on(&["read", "read", "local", "store", "store"], &fixture, || fixture.child("server"));
}

/// 1. A client goes on at the second of three servers, for longer than it waits for a server.
/// 2. The second ends, and the third is not there yet.
/// 3. An open waits for it, from the end of the second on, and not of the first.
#[test]
fn each_end_of_a_server_gives_the_next_its_time() {
    let fixture = Fixture::new();
    // A child of another test has the name's lock, too, until it executes its program.
    let begun = Instant::now();
    let serve = || loop {
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://bucket", fixture.store.store(), Options::new());
        match server.start(fixture.socket().to_str().unwrap()) {
            Ok(server) => break server,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
    };
    let timeout = Duration::from_secs(2);
    let first = serve();
    let client = Client::connect(first.socket().to_str().unwrap()).unwrap().with_reconnect_timeout(timeout);
    let (idle, mut bytes) = (client.open(URL).unwrap(), [0; 100]);
    drop(first);
    let second = serve();
    drop(client.open(URL).unwrap());
    std::thread::sleep(timeout);
    drop(second);
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| client.open(URL).map(drop));
        std::thread::sleep(timeout / 20);
        let _third = serve();
        opened.join().unwrap().unwrap();
        idle.read_exact_at(&mut bytes, 7).unwrap();
    });
    s3::check(1, 7, &bytes);
}

#[test]
fn a_server_that_cannot_be_asked_says_nothing_of_the_object() {
    let fixture = Fixture::new();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", fixture.store.store(), Options::new());
    let server = server.start(fixture.socket().to_str().unwrap()).unwrap();
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let io_kind = |error: quinion_service::Error| std::io::Error::from(error).kind();
    let error = client.open("s3://bucket/none").unwrap_err();
    assert!(error.kind() == ErrorKind::Open && io_kind(error) == std::io::ErrorKind::NotFound);
    let error = client.open(&format!("s3://bucket/{}", "x".repeat(5000))).unwrap_err();
    assert!(error.kind() == ErrorKind::Open && error.to_string().contains("4096"), "{error}");
    assert_eq!(io_kind(error), std::io::ErrorKind::Other);
    // As one that cleans up in /tmp does.
    std::fs::remove_file(fixture.socket()).unwrap();
    let error = client.open(URL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect, "{error}");
    assert_ne!(io_kind(error), std::io::ErrorKind::NotFound);
}

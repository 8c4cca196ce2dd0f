//! The program itself: started, told to end, killed; clients are this process.
//!
//! ```text
//!   versitygw over a folder   <-- quinion-serve, a process -->   Client, here
//! ```
//!
//! versitygw is installed by `scripts/setup`; where it could not be, its tests say SKIPPED.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use object_store::aws::AmazonS3Builder;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use quinion_service::{Client, ErrorKind};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long anything may take on a busy machine.
const TIME_MAX: Duration = Duration::from_secs(60);

/// What versitygw asks for.
const USER: &str = "loopback";
const SECRET: &str = "only-for-tests";

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Its exit code.
    fn ended(&mut self) -> Option<i32> {
        let begun = Instant::now();
        while begun.elapsed() < TIME_MAX {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            sleep(Duration::from_millis(5));
        }
        panic!("it does not end");
    }
}

/// A server that listens, and its events.
struct Server {
    process: Process,
    events: BufReader<ChildStderr>,
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let mut server = Self::spawn(command);
        let event = server.event();
        assert!(event.contains("listening"), "{event}");
        server
    }

    fn spawn(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process(command.spawn().unwrap());
        let events = BufReader::new(process.0.stderr.take().unwrap());
        Self { process, events }
    }

    fn event(&mut self) -> String {
        let mut line = String::new();
        self.events.read_line(&mut line).unwrap();
        line
    }
}

/// The program, with a socket in that folder, and no credentials of this process's environment.
fn serve(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-serve"));
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_string_lossy().starts_with("AWS_")).for_each(|name| {
        command.env_remove(name);
    });
    command.env_remove("NOTIFY_SOCKET").args(["--memory", "32M", "--name"]).arg(socket(folder));
    command
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("q/s.sock")
}

fn data(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 4096) as u8 ^ seed).collect()
}

fn read(folder: &Path, url: &str) -> Vec<u8> {
    let client = Client::connect(socket(folder).to_str().unwrap()).unwrap();
    let object = client.open(url).unwrap();
    let mut bytes = vec![0; object.len() as usize];
    object.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A bucket with some objects, in a server of its own.
struct Bucket {
    _gateway: Process,
    endpoint: String,
    _folder: TempDir,
}

impl Bucket {
    /// `None` if versitygw is not installed.
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::create_dir(folder.path().join("bucket")).unwrap();
        let Some((gateway, endpoint)) = versitygw(folder.path()) else {
            println!("SKIPPED: versitygw is not installed; run scripts/setup");
            return None;
        };
        Some(Self { _gateway: gateway, endpoint, _folder: folder })
    }

    fn put(&self, key: &str, bytes: Vec<u8>) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = AmazonS3Builder::new()
            .with_bucket_name("bucket")
            .with_region("us-east-1")
            .with_endpoint(&self.endpoint)
            .with_allow_http(true)
            .with_access_key_id(USER)
            .with_secret_access_key(SECRET)
            .build()
            .unwrap();
        let store: &dyn ObjectStore = &store;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(store.put(&ObjectPath::from(key), bytes.into())).unwrap();
    }

    /// The program, with such a secret in its environment and this bucket's endpoint.
    fn serve(&self, folder: &Path, secret: &str, prefix: &str) -> Command {
        let mut command = serve(folder);
        command.env("AWS_ACCESS_KEY_ID", USER).env("AWS_SECRET_ACCESS_KEY", secret);
        command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL_S3", &self.endpoint);
        command.args(["--store", prefix]);
        command
    }
}

#[test]
fn it_is_ready_when_it_says_so_and_a_signal_ends_it_in_order() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("table/a", data(1, 3 << 20));
    bucket.put("outside", data(9, 100));
    for (signal, name) in [(Signal::TERM, "notices"), (Signal::INT, "notices2")] {
        let path = folder.path().join(name);
        let receiver = UnixDatagram::bind(&path).unwrap();
        receiver.set_read_timeout(Some(TIME_MAX)).unwrap();
        let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket/table");
        let mut server = Server::spawn(command.arg("--json").env("NOTIFY_SOCKET", &path));
        let mut notice = [0; 64];
        let len = receiver.recv(&mut notice).unwrap();
        assert_eq!(&notice[..len], b"READY=1");
        assert_eq!(read(folder.path(), "s3://bucket/table/a"), data(1, 3 << 20));
        let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
        for url in ["s3://bucket/table/../outside", "s3://bucket/table/%2e%2e/outside", "s3://bucket/outside"]
        {
            assert_eq!(client.open(url).unwrap_err().kind(), ErrorKind::Open, "{url}");
        }
        assert!(server.event().starts_with("{\"event\":\"listening\",\"socket\":"));
        server.process.signal(Signal::HUP);
        assert!(server.event().starts_with("{\"event\":\"not reloaded\""));
        server.process.signal(signal);
        assert_eq!(server.process.ended(), Some(0));
        let len = receiver.recv(&mut notice).unwrap();
        assert_eq!(&notice[..len], b"STOPPING=1");
        assert!(server.event().starts_with("{\"event\":\"ended\""));
        assert!(!socket(folder.path()).exists(), "the socket is left");
        let mut out = String::new();
        server.process.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!(out, "");
    }
}

#[test]
fn after_a_kill_the_next_server_has_the_name_and_clients_that_open_again_read_on() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a", data(2, 1 << 20));
    let url = "s3://bucket/a";
    let start = || Server::start(&mut bucket.serve(folder.path(), SECRET, "s3://bucket"));
    let mut server = start();
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let object = client.open(url).unwrap();
    let mut bytes = vec![0; 1 << 20];
    object.read_exact_at(&mut bytes, 0).unwrap();
    server.process.signal(Signal::KILL);
    assert_eq!(server.process.ended(), None, "it was not the signal that ended it");
    let begun = Instant::now();
    let error = loop {
        match object.read_exact_at(&mut bytes, 0) {
            Ok(()) => assert_eq!(bytes, data(2, 1 << 20)),
            Err(error) => break error,
        }
        assert!(begun.elapsed() < TIME_MAX, "reads of a server that is gone go on");
    };
    assert_eq!(error.kind(), ErrorKind::OwnerGone, "{error}");
    let _next = start();
    assert_eq!(read(folder.path(), url), data(2, 1 << 20));
}

#[test]
fn what_cannot_start_says_why_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("serve.toml");
    let prefix = "http://127.0.0.1:1/folder";
    std::fs::write(&config, format!("[[store]]\nprefix = {prefix:?}\nregoin = 'x'\n")).unwrap();
    let config = config.to_str().unwrap();
    let _first = Server::start(serve(folder.path()).args(["--store", prefix]));
    for (arguments, why) in [
        (&["--config", config][..], "regoin"),
        (&[], "there is no store"),
        (&["--store", "ftp://h"], "ftp://h"),
        (&["--store", "file:///tmp"], "open them themselves"),
        (&["--store", prefix], "another server has that name"),
        (&["--store", prefix, "--disk", "/dev/null/x:16M"], "/dev/null/x"),
    ] {
        let mut server = Server::spawn(serve(folder.path()).args(arguments));
        let mut all = String::new();
        server.events.read_to_string(&mut all).unwrap();
        assert_eq!(server.process.ended(), Some(1), "{all}");
        assert!(all.contains(why) && all.starts_with("quinion-serve: failed"), "{why}: {all}");
    }
}

/// versitygw on a folder, whose attributes are extended ones, so it is not on a tmpfs.
fn versitygw(data: &Path) -> Option<(Process, String)> {
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools/versitygw-1.8.0");
    if !tools.join("complete").exists() {
        return None;
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = Command::new(tools.join("versitygw"));
    command.args(["--quiet", "--access", USER, "--secret", SECRET, "--port"]);
    command.arg(address.to_string()).arg("posix").arg(data);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Process(command.spawn().unwrap());
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(begun.elapsed() < TIME_MAX, "versitygw does not answer");
        sleep(Duration::from_millis(20));
    }
    Some((process, format!("http://{address}")))
}

#[test]
fn a_configuration_names_the_endpoint_and_a_wrong_secret_opens_nothing() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("table/part", data(3, 5 << 20));
    let (config, endpoint) = (folder.path().join("serve.toml"), &bucket.endpoint);
    let text = format!("[[store]]\nprefix = 's3://bucket'\nendpoint = '{endpoint}'\nregion = 'us-east-1'\n");
    std::fs::write(&config, text).unwrap();
    let serve = |secret: &str| {
        let mut command = serve(folder.path());
        command.env("AWS_ACCESS_KEY_ID", USER).env("AWS_SECRET_ACCESS_KEY", secret);
        Server::start(command.arg("--config").arg(&config))
    };
    let mut server = serve(SECRET);
    assert_eq!(read(folder.path(), "s3://bucket/table/part"), data(3, 5 << 20));
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.ended(), Some(0));
    let _wrong = serve("another");
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    assert_eq!(client.open("s3://bucket/table/part").unwrap_err().kind(), ErrorKind::Open);
}

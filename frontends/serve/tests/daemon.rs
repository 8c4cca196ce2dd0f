//! The programs themselves: the server is started, told to end, killed; clients are this process, and `quinion-object`.
//!
//! ```text
//!   versitygw over a folder   <-- quinion-serve, a process -->   Client, here
//! ```
//!
//! versitygw is installed by `scripts/setup`; where it could not be, its tests say SKIPPED, or fail under `cargo xtask
//! test` (`object/tests/real/skip.rs`).

use std::fs::{DirBuilder, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use object_store::aws::AmazonS3Builder;
use object_store::path::Path as ObjectPath;
use object_store::{Certificate, ClientOptions, ObjectStore, ObjectStoreExt};
use quinion_service::{Client, ErrorKind, RevisionRead, RevisionRequest};
use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// A watchdog for a busy machine.
const TIME_MAX: Duration = Duration::from_secs(60);

mod certificates;
mod exposition;
#[path = "../../../object/tests/real/skip.rs"]
mod skip;

use certificates::Certificates;

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

    /// The exit code of the process, once it has ended.
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
        let gateway = versitygw(folder.path(), &[]);
        Self::of(gateway, "http", folder)
    }

    /// Like `new`, behind HTTPS, with a certificate of an untrusted authority; returns the authority's file as well.
    fn behind_tls() -> Option<(Self, PathBuf)> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::create_dir_all(folder.path().join("data/bucket")).unwrap();
        let certificates = Certificates::within(folder.path());
        let gateway = versitygw(&folder.path().join("data"), &certificates.of_versitygw());
        Self::of(gateway, "https", folder).map(|bucket| (bucket, certificates.authority))
    }

    fn of(gateway: Option<(Process, String)>, scheme: &str, folder: TempDir) -> Option<Self> {
        let Some((gateway, address)) = gateway else {
            skip::missing(std::thread::current().name().unwrap_or("a test"), "versitygw");
            return None;
        };
        Some(Self { _gateway: gateway, endpoint: format!("{scheme}://{address}"), _folder: folder })
    }

    fn put(&self, key: &str, bytes: Vec<u8>) {
        self.put_by(ClientOptions::new().with_allow_http(true), key, bytes);
    }

    fn put_by(&self, client: ClientOptions, key: &str, bytes: Vec<u8>) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = AmazonS3Builder::new()
            .with_bucket_name("bucket")
            .with_region("us-east-1")
            .with_endpoint(&self.endpoint)
            .with_client_options(client)
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
fn the_server_is_ready_when_it_says_so_and_a_signal_ends_it_in_order() {
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
        assert!(server.event().starts_with("{\"event\":\"reloaded\""));
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
fn the_server_after_a_killed_one_has_the_name_and_clients_that_open_again_read_on() {
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
    assert_eq!(error.kind(), ErrorKind::OwnerDead, "{error}");
    let _next = start();
    assert_eq!(read(folder.path(), url), data(2, 1 << 20));
}

#[test]
fn a_server_that_cannot_start_says_why_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("serve.toml");
    let prefix = "http://127.0.0.1:1/folder";
    std::fs::write(&config, format!("[[store]]\nprefix = {prefix:?}\nregoin = 'x'\n")).unwrap();
    let config = config.to_str().unwrap();
    let first = Server::start(serve(folder.path()).args(["--store", prefix]));
    let refused = |arguments: &[&str], why: &str| {
        let mut server = Server::spawn(serve(folder.path()).args(arguments));
        let mut all = String::new();
        server.events.read_to_string(&mut all).unwrap();
        assert_eq!(server.process.ended(), Some(1), "{all}");
        assert!(all.contains(why) && all.starts_with("quinion-serve: failed"), "{why}: {all}");
    };
    for (arguments, why) in [
        (&["--config", config][..], "serve.toml: line 3: unknown field `regoin`"),
        (
            &["--store", "ftp://h"],
            "cannot use the store ftp://h: it is no URL of a store; write it as s3://BUCKET",
        ),
        (&["--store", "file:///tmp"], "open them themselves"),
        (&["--store", prefix], "another server has that name; give this one another name, or"),
        (&["--clients", "0"], "1 to 4096"),
        (&["--clients", "5000"], "1 to 4096"),
    ] {
        refused(arguments, why);
    }
    drop(first);
    refused(&["--store", prefix, "--disk", "/dev/null/x:16M"], "/dev/null/x");
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    refused(&["--store", prefix, "--metrics", &address], &address);
}

/// A web server that gives to each request, by the lines of its head, the answer of `answer`. Ends with the process.
fn web_server(answer: impl Fn(&[String]) -> Vec<u8> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let _ = stream.write_all(&answer(&head));
        }
    });
    format!("http://{address}")
}

/// A web server that knows no ranges: it answers each GET with the whole file.
fn web_server_without_ranges() -> String {
    web_server(|head| {
        let mut answer = b"HTTP/1.1 200 OK\r\nContent-Length: 8192\r\nConnection: close\r\n\
                           Last-Modified: Sat, 01 Aug 2026 10:00:00 GMT\r\n\r\n"
            .to_vec();
        if head.first().is_some_and(|line| line.starts_with("GET")) {
            answer.extend(data(1, 8192));
        }
        answer
    })
}

/// The client is told that its read failed, and that the log says why.
#[test]
fn a_fetch_that_fails_is_in_the_log_with_its_reason() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = web_server_without_ranges();
    let mut server = Server::start(serve(folder.path()).args(["--store", &store]));
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let object = client.open(&format!("{store}/file")).unwrap();
    let error = object.read_exact_at(&mut [0; 9], 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fetch, "{error}");
    assert!(error.to_string().contains("see the server's log"), "{error}");
    let event = server.event();
    assert!(event.starts_with(&format!("quinion-serve: store failed store=\"{store}\" why=\"")), "{event}");
    assert!(event.contains("cannot fetch bytes") && event.contains("of file"), "{event}");
}

/// A web server that gives one answer to all requests.
fn web_server_of_one_answer(status: &'static str, body: &'static str) -> String {
    let len = body.len();
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{body}");
    web_server(move |_| answer.clone().into_bytes())
}

/// 1. A container's token service refuses, and its answer has a token.
/// 2. The server passed that on to its clients, in the words of an open that is refused.
#[test]
fn a_refused_open_tells_the_reason_and_nothing_else_of_an_answer() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "own").unwrap();
    for (body, reason) in [
        ("<E><Code>No</Code><Token>T0KEN</Token></E>", "No"),
        ("{\"message\": \"No.\", \"token\": \"T0KEN\"}", "No."),
        ("Authorization: T0KEN", "a document without a code"),
    ] {
        let service = web_server_of_one_answer("403 Forbidden", body);
        let mut command = serve(folder.path());
        command.env("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{service}/role?sig=T0KEN"));
        command.env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &token);
        // It is tried again until then: a service may be well in a moment.
        command.args(["--store", "s3://bucket", "--deadline", "0.5", "--json"]);
        let mut server = Server::start(&mut command);
        let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
        let error = client.open("s3://bucket/a").unwrap_err();
        let text = format!("{error} {error:?}");
        assert_eq!(error.kind(), ErrorKind::Open, "{text}");
        let names = "AWS_CONTAINER_CREDENTIALS_FULL_URI and AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
        assert!(text.contains(names), "{text}");
        assert!(text.contains(&format!("the answer was 403 Forbidden: {reason}; correct these")), "{text}");
        assert!(!text.contains("T0KEN"), "{text}");
        server.process.signal(Signal::TERM);
        assert_eq!(server.process.ended(), Some(0));
    }
}

/// 1. No process listens at the store's address.
/// 2. The open failed after half a minute, of which the message said two seconds, and no reason.
#[test]
fn an_open_at_a_store_that_is_not_there_fails_soon_and_says_why() {
    let begun = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-object"));
    let output = command.args(["cat", "http://127.0.0.1:1/x"]).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("Connection refused"), "{said}");
    let whole = said.split_once(" requests in ").expect(&said).1;
    let seconds: f64 = whole.split(' ').next().unwrap().parse().unwrap();
    let (elapsed, told) = (begun.elapsed(), Duration::from_secs_f64(seconds));
    let rounding = Duration::from_millis(50);
    assert!(told <= elapsed + rounding && told.as_secs() > 2, "the whole time is told: {elapsed:?}: {said}");
}

/// 1. A store takes connections and never answers; the deadline is shorter than the longest silence of a connection.
/// 2. The error spoke of the latter.
#[test]
fn a_hung_store_fails_an_open_with_the_time_that_was_waited() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let hung = TcpListener::bind("127.0.0.1:0").unwrap(); // the kernel accepts
    let store = format!("http://{}", hung.local_addr().unwrap());
    let _server = Server::start(serve(folder.path()).args(["--store", &store, "--deadline", "1"]));
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let text = client.open(&format!("{store}/file")).unwrap_err().to_string();
    let told = text.split_once("no byte came for ").expect(&text).1.split(' ').next().unwrap();
    let is_right = (900..=1000).contains(&told.parse::<u32>().unwrap());
    assert!(is_right && text.contains("--deadline"), "{text}");
}

/// 1. A user without credentials reads an object.
/// 2. The error came after a minute, and was about an address of a metadata service.
#[test]
fn a_store_without_credentials_is_an_error_that_says_which_to_give() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let nothing = "http://127.0.0.1:1";
    let parts = ["s3://bucket", "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY", "AWS_SKIP_SIGNATURE=true"];
    let begun = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-object"));
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_string_lossy().starts_with("AWS_")).for_each(|name| {
        command.env_remove(name);
    });
    command.env("AWS_METADATA_ENDPOINT", nothing).args(["cat", "s3://bucket/a"]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.lines().count() == 1, "{said}");
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    let mut command = serve(folder.path());
    let _server =
        Server::start(command.env("AWS_METADATA_ENDPOINT", nothing).args(["--store", "s3://bucket"]));
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let error = client.open("s3://bucket/a").unwrap_err();
    let (kind, text) = (error.kind(), error.to_string());
    assert!(kind == ErrorKind::Open && parts.iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::PermissionDenied);
}

/// 1. A server is to be replaced by one whose disk tier's folder is none.
/// 2. The server that was there ended, and the other could not start.
#[test]
fn a_server_whose_disk_folder_is_none_ends_no_other() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let foreign = folder.path().join("foreign");
    DirBuilder::new().mode(0o700).create(&foreign).unwrap();
    let mut options = File::options();
    let mut letter =
        options.write(true).create_new(true).mode(0o600).open(foreign.join("quinion.disk")).unwrap();
    letter.write_all(b"a letter").unwrap();
    let mut first = Server::start(&mut serve(folder.path()));
    for (tier, size, words) in [
        (&file, "16M", ["cannot use", "; name a folder that this user"]),
        (&foreign, "16M", ["cannot use", "not a disk tier of Quinion"]),
        (&folder.path().join("new"), "1M", ["1048576 bytes", "16 MiB or more"]),
        (&folder.path().join("new"), "60T", ["no such space", "ask for less"]),
    ] {
        let disk = format!("{}:{size}", tier.display());
        let mut second = Server::spawn(serve(folder.path()).args(["--replace", "--disk", &disk]));
        let event = second.event();
        assert!(words.iter().all(|words| event.contains(words)), "{event}");
        assert_eq!(second.process.ended(), Some(1));
        assert!(first.process.0.try_wait().unwrap().is_none(), "{event}: the first has ended");
    }
}

/// 1. A server has ended for another one, whose disk tier cannot be opened now, though it could before: here its file
///    is written over meanwhile.
/// 2. That one ended as well: there was no server.
#[test]
fn a_server_that_has_replaced_another_goes_on_without_its_disk() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tier = folder.path().join("disk");
    DirBuilder::new().mode(0o700).create(&tier).unwrap();
    let mut options = File::options();
    let mut file = options.write(true).create_new(true).mode(0o600).open(tier.join("quinion.disk")).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    let mut first = Server::start(&mut serve(folder.path()));
    let disk = format!("{}:16M", tier.display());
    let mut second = Server::spawn(serve(folder.path()).args(["--replace", "--disk", &disk]));
    assert_eq!(first.process.ended(), Some(0));
    file.write_all(b"a letter").unwrap();
    drop(file);
    let events = [second.event(), second.event()];
    assert!(events[0].contains("disk tier off") && events[1].contains("listening"), "{events:?}");
    let path = folder.path().join("file");
    std::fs::write(&path, data(3, 100_000)).unwrap();
    assert_eq!(read(folder.path(), path.to_str().unwrap()), data(3, 100_000));
}

/// 1. A server is to be replaced by one whose snapshots of VMs cannot be served, which this machine can tell.
/// 2. The server that was there ended, and the other said `listening` and then `failed`.
#[test]
fn a_server_whose_snapshots_cannot_be_served_ends_no_other() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let made = |name: &str, bytes: &[u8]| std::fs::write(path(name), bytes).unwrap();
    made("vm.mem", &data(1, 1 << 20));
    made("short.diff", &data(2, 1 << 16));
    made("damaged.pack", &[b"quinion vm pack\n".as_slice(), &[7; 1 << 16]].concat());
    made("cut.mem", &data(1, (1 << 20) - 1));
    made("file", b"a program's own");
    File::create(path("large.mem")).unwrap().set_len(256 << 20).unwrap();
    let mut first = Server::start(&mut serve(folder.path()));
    let (no_folder, no_socket, socket) = (path("none/vm.sock"), path("file"), path("vm.sock"));
    let diff = format!("diff = [{:?}]", path("short.diff"));
    for (snapshot, socket, more, says) in [
        ("vm.mem", &no_folder, "", "none/vm.sock"),
        ("vm.mem", &no_socket, "", "something else is there"),
        ("large.mem", &socket, "minor = true", "give memory 296M or more"),
        ("cut.mem", &socket, "", "no whole pages"),
        ("vm.mem", &socket, &diff, "short.diff"),
        ("damaged.pack", &socket, "", "damaged.pack"),
    ] {
        let text = format!("[[restore]]\nsnapshot = {:?}\nsocket = {socket:?}\n{more}\n", path(snapshot));
        std::fs::write(path("config.toml"), text).unwrap();
        let words = ["--replace", "--config", &path("config.toml")];
        let mut second = Server::spawn(serve(folder.path()).args(words));
        let event = second.event();
        assert!(event.contains("failed") && event.contains(says), "{says}: {event}");
        assert_eq!(second.process.ended(), Some(1));
        assert!(first.process.0.try_wait().unwrap().is_none(), "{says}: the first has ended");
    }
    assert_eq!(std::fs::read(path("file")).unwrap(), b"a program's own");
}

/// 1. The disk of a server that is replaced takes longer than 2 seconds for the last writes and their sync. Here the
///    test has the folder in its place.
/// 2. Its successor had the name, found the folder in use and ended: no server was left.
#[test]
fn a_server_that_replaces_another_waits_for_its_disk_folder() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tier = folder.path().join("disk");
    DirBuilder::new().mode(0o700).create(&tier).unwrap();
    let mut options = File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(tier.join("quinion.disk")).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    let mut first = Server::start(&mut serve(folder.path()));
    let disk = format!("{}:16M", tier.display());
    let mut second = Server::spawn(serve(folder.path()).args(["--replace", "--disk", &disk]));
    assert_eq!(first.process.ended(), Some(0));
    sleep(Duration::from_millis(2500));
    drop(file);
    let event = second.event();
    assert!(event.contains("listening"), "{event}");
}

/// The server serves local files, and its memory is there before it is used.
#[test]
fn a_server_without_stores_that_is_populated_has_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::spawn(serve(folder.path()).args(["--populate", "--metrics", "127.0.0.1:0"]));
    let address = monitors_of(&server.event());
    let grown = || number(&ask(&address, "GET /metrics").1, "quinion_cache_grown_bytes ");
    let begun = Instant::now();
    while grown() < 20 << 20 {
        assert!(begun.elapsed() < TIME_MAX, "{} bytes", grown());
        sleep(Duration::from_millis(5));
    }
    let path = folder.path().join("file");
    std::fs::write(&path, data(3, 100_000)).unwrap();
    assert_eq!(read(folder.path(), path.to_str().unwrap()), data(3, 100_000));
    // A database that is open to be written has no lease; its revisions are served.
    sleep(Duration::from_millis(60));
    let file = std::fs::File::open(&path).unwrap();
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let revision = client.open_revision(RevisionRequest { file: file.as_fd(), name: b"1" }).unwrap();
    let mut bytes = vec![0; 100_000];
    assert_eq!(revision.read_exact_at(&mut bytes, 0).unwrap(), RevisionRead::Whole);
    assert_eq!(bytes, data(3, 100_000));
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.ended(), Some(0));
}

/// The metric of that name, a space behind it included.
fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name}: {text}")).trim().parse().unwrap()
}

/// The address at which a listening server answers monitors.
fn monitors_of(event: &str) -> String {
    event.split("metrics=\"http://").nth(1).expect(event).split('/').next().unwrap().to_owned()
}

/// The answer to a monitor: the status and the body.
fn ask(address: &str, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

#[test]
fn monitors_get_the_numbers_and_whether_clients_can_connect() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a", data(5, 3 << 20));
    let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket");
    command.args(["--store", "http://127.0.0.1:1/x", "--metrics", "127.0.0.1:0"]);
    command.arg("--disk").arg(format!("{}:64M", folder.path().join("disk").display()));
    let mut server = Server::spawn(&mut command);
    let event = server.event();
    let address =
        event.split("metrics=\"http://").nth(1).expect(&event).split('/').next().unwrap().to_owned();
    let gets = "quinion_store_gets_total{store=\"s3://bucket\"}";
    let (status, before) = ask(&address, "GET /metrics");
    assert_eq!((status, number(&before, gets), number(&before, "quinion_service_clients ")), (200, 0, 0));
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let object = client.open("s3://bucket/a").unwrap();
    let mut bytes = vec![0; 3 << 20];
    for _ in 0..5 {
        object.read_exact_at(&mut bytes, 0).unwrap();
    }
    assert_eq!(bytes, data(5, 3 << 20));
    let (_, text) = ask(&address, "GET /metrics");
    assert!(number(&text, gets) > 0);
    let whose = format!("quinion_service_socket{{socket=\"{}\"}} 1\n", socket(folder.path()).display());
    assert!(text.contains(&whose), "{text}");
    for (name, least, most) in [
        ("quinion_service_clients ", 1, 1),
        ("quinion_service_open_files ", 1, 1),
        ("quinion_service_reads_total ", 5, 5),
        ("quinion_service_read_bytes_total ", 15 << 20, 15 << 20),
        ("quinion_service_asked_reads_total ", 1, 1),
        ("quinion_store_fetched_bytes_total{store=\"s3://bucket\"}", 3 << 20, 3 << 20),
        ("quinion_store_gets_total{store=\"http://127.0.0.1:1/x\"}", 0, 0),
        ("quinion_cache_memory_bytes ", 32 << 20, 32 << 20),
        ("quinion_cache_cached_pages ", 768, 800),
        ("quinion_disk_errors_total ", 0, 0),
        ("quinion_saved_bytes ", 12 << 20, 12 << 20),
        ("quinion_saved_gets ", 1, 4),
        ("quinion_store_answer_seconds_count{store=\"s3://bucket\"}", 1, 100),
        ("quinion_store_answer_seconds_count{store=\"http://127.0.0.1:1/x\"}", 0, 0),
        ("quinion_store_answer_seconds_bucket{le=\"0.001\",store=\"http://127.0.0.1:1/x\"}", 0, 0),
    ] {
        let found = number(&text, name);
        assert!((least..=most).contains(&found), "{name}: {found}");
    }
    assert_eq!(exposition::check(&text), Ok(()), "{text}");
    assert_eq!(ask(&address, "GET /healthz").0, 200);
    assert_eq!((ask(&address, "POST /metrics").0, ask(&address, "GET /s3://bucket/a").0), (405, 404));
    // More of them than are answered, which say nothing.
    let silent: Vec<_> = (0..40).map(|_| TcpStream::connect(&address).unwrap()).collect();
    object.read_exact_at(&mut bytes, 0).unwrap();
    drop(silent);
    let begun = Instant::now();
    std::fs::remove_file(socket(folder.path())).unwrap();
    loop {
        // Earlier connections may still be open: then it is closed without an answer.
        let asked = std::panic::catch_unwind(|| ask(&address, "GET /healthz").0);
        match asked {
            Ok(status) => break assert_eq!(status, 503),
            Err(_) => assert!(begun.elapsed() < TIME_MAX, "it does not answer any more"),
        }
    }
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.ended(), Some(0));
}

/// 1. The disk under the tier fails while the server runs: here its file is cut.
/// 2. All reads go to the store. The operator sees no reason in the log, and no number that tells it from a cold disk.
#[test]
fn a_disk_that_fails_is_an_event_and_a_number() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    let objects: Vec<_> = (0..24).map(|n| format!("{n}")).collect();
    objects.iter().zip(0..).for_each(|(name, seed)| bucket.put(name, data(seed, 9000)));
    let disk = format!("{}:64M", folder.path().join("disk").display());
    let start = || {
        let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket");
        let mut server = Server::spawn(command.args(["--disk", &disk, "--metrics", "127.0.0.1:0"]));
        let address = monitors_of(&server.event());
        (server, address)
    };
    let read_all = || {
        for (name, seed) in objects.iter().zip(0..) {
            assert_eq!(read(folder.path(), &format!("s3://bucket/{name}")), data(seed, 9000));
        }
    };
    let (mut server, _) = start();
    read_all();
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.ended(), Some(0));
    let (mut server, address) = start();
    let is_off = || number(&ask(&address, "GET /metrics").1, "quinion_disk_off ");
    assert_eq!(is_off(), 0);
    File::create(folder.path().join("disk/quinion.disk")).unwrap(); // cuts it
    read_all();
    let event = server.event();
    assert!(event.contains("disk tier off why=") && event.contains("failed to read"), "{event}");
    assert_eq!(is_off(), 1);
}

#[test]
fn stores_come_and_go_at_a_hangup_and_a_wrong_configuration_changes_nothing() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a/x", data(1, 3 << 20));
    bucket.put("b/x", data(2, 1 << 20));
    let path = folder.path().join("serve.toml");
    let configure = |text: &str| std::fs::write(&path, text).unwrap();
    let store = |prefix: &str| format!("[[store]]\nprefix = '{prefix}'\n");
    configure(&("memory = '32M'\n".to_owned() + &store("s3://bucket/a")));
    let mut command = serve(folder.path());
    command.env("AWS_ACCESS_KEY_ID", USER).env("AWS_SECRET_ACCESS_KEY", SECRET);
    command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL_S3", &bucket.endpoint);
    let mut server = Server::start(command.arg("--json").arg("--config").arg(&path));
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let object = client.open("s3://bucket/a/x").unwrap();
    let mut hang_up = |text: &str| {
        configure(text);
        server.process.signal(Signal::HUP);
        server.event()
    };
    assert!(client.open("s3://bucket/b/x").is_err());
    for wrong in [
        store("s3://bucket/a") + &store("s3://bucket/b") + &store("ftp://x"),
        store("s3://bucket/b") + &store("s3://bucket/b/"),
        "nothing = 1".into(),
        store("s3://bucket/a") + &store("https://user:hidden@h/x"),
    ] {
        let event = hang_up(&wrong);
        assert!(
            event.starts_with("{\"event\":\"not reloaded\"") && !event.contains("hidden"),
            "{wrong}: {event}"
        );
        assert!(client.open("s3://bucket/a/x").is_ok() && client.open("s3://bucket/b/x").is_err(), "{wrong}");
    }
    let event = hang_up(&(store("s3://bucket/b") + "[disk]\nfolder='/d'\nsize='1G'\n"));
    assert!(
        event.starts_with("{\"event\":\"reloaded\"") && event.contains("after_restart\":\"disk\""),
        "{event}"
    );
    assert_eq!(read(folder.path(), "s3://bucket/b/x"), data(2, 1 << 20));
    assert!(client.open("s3://bucket/a/x").is_err());
    let mut bytes = vec![0; 3 << 20];
    object.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, data(1, 3 << 20), "what is open is read on");
}

/// 1. A unit has a watchdog.
/// 2. The server told it nothing, and was ended each time that it was over.
#[test]
fn a_watchdog_hears_of_the_server_as_long_as_it_is_meant() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notices");
    let receiver = UnixDatagram::bind(&path).unwrap();
    receiver.set_read_timeout(Some(TIME_MAX)).unwrap();
    let heard = || {
        let mut notice = [0; 64];
        let len = receiver.recv(&mut notice).unwrap();
        String::from_utf8(notice[..len].to_vec()).unwrap()
    };
    let mut watched = serve(folder.path());
    watched.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "20000");
    let server = Server::start(&mut watched);
    assert_eq!([heard(), heard(), heard()], ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]);
    server.process.signal(Signal::TERM);
    while heard() != "STOPPING=1" {}
    drop(server);
    // Of another process: nothing comes between these.
    let mut server = Server::start(watched.env("WATCHDOG_PID", "1"));
    assert_eq!(heard(), "READY=1");
    server.process.signal(Signal::HUP);
    assert!(server.event().contains("reloaded"));
    server.process.signal(Signal::TERM);
    assert_eq!(heard(), "STOPPING=1");
}

/// A named pipe for writing, once another process reads it: an open that waits for that would wait for ever for one
/// that has ended.
fn pipe_with_reader(path: &Path) -> File {
    let begun = Instant::now();
    loop {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        match File::options().write(true).custom_flags(flags).open(path) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {}
            opened => return opened.unwrap(),
        }
        assert!(begun.elapsed() < TIME_MAX, "no process reads {}", path.display());
        sleep(Duration::from_millis(5));
    }
}

/// 1. A server reads its configuration for the first time, and SIGHUP comes: an operator has changed it.
/// 2. Nothing waited for signals yet, and SIGHUP ended the server.
#[test]
fn a_hangup_at_the_start_reloads_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serve.toml");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let mut server = Server::spawn(serve(folder.path()).arg("--config").arg(&path));
    let mut configuration = pipe_with_reader(&path);
    server.process.signal(Signal::HUP);
    configuration.write_all(b"clients = 10").unwrap();
    drop(configuration);
    let event = server.event();
    assert!(event.contains("listening"), "{event}");
    pipe_with_reader(&path).write_all(b"clients = 20").unwrap();
    let event = server.event();
    assert!(event.contains("reloaded") && event.contains("after_restart=\"clients\""), "{event}");
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.ended(), Some(0));
}

#[test]
fn a_newer_server_replaces_the_one_that_is_there_and_readers_go_on() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a", data(7, 3 << 20));
    let disk = format!("{}:64M", folder.path().join("disk").display());
    let start = |more: &[&str]| {
        let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket");
        Server::start(command.args(["--disk", &disk, "--json"]).args(more))
    };
    let mut server = start(&["--replace"]);
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    let object = client.with_reconnect_timeout(TIME_MAX).open("s3://bucket/a").unwrap();
    let (is_over, expected) = (AtomicBool::new(false), data(7, 3 << 20));
    let longest = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..8)
            .map(|n| {
                let (object, is_over, expected) = (&object, &is_over, &expected);
                scope.spawn(move || {
                    let (mut buffer, mut longest) = (vec![0; 300_000], Duration::ZERO);
                    for at in (n..).map(|n| n * 70_001 % (2 << 20)) {
                        let begun = Instant::now();
                        object.read_exact_at(&mut buffer, at as u64).unwrap();
                        longest = longest.max(begun.elapsed());
                        assert_eq!(buffer, expected[at..at + buffer.len()]);
                        if is_over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                    longest
                })
            })
            .collect();
        for _ in 0..3 {
            let mut newer = start(&["--replace"]);
            assert_eq!(server.process.ended(), Some(0), "it was not ended in order");
            std::mem::swap(&mut server, &mut newer);
        }
        is_over.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().unwrap()).max()
    });
    println!("the longest read took {longest:?}");
    // One that cannot start ends no other.
    for wrong in [["--store", "ftp://h"], ["--disk", "/dev/null/x:64M"], ["--metrics", "192.0.2.1:80"]] {
        let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket");
        assert_eq!(
            command.arg("--replace").args(wrong).output().unwrap().status.code(),
            Some(1),
            "{wrong:?}"
        );
    }
    object.read_exact_at(&mut [0; 100], 5).unwrap();
    assert_eq!(server.process.0.try_wait().unwrap(), None);
}

/// The socket is made here, as by systemd: a shell gives it the number 3, and tells the program that it is the one.
#[test]
fn clients_that_connect_while_no_server_runs_wait_in_the_managers_socket() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a", data(8, 1 << 20));
    let path = socket(folder.path());
    DirBuilder::new().mode(0o700).create(path.parent().unwrap()).unwrap();
    let listening =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listening, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listening, 100).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\"";
    let start = || {
        let mut program = bucket.serve(folder.path(), SECRET, "s3://bucket");
        program.args(["--metrics", "127.0.0.1:0"]);
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(listening.try_clone().unwrap()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = Process(command.spawn().unwrap());
        let events = BufReader::new(process.0.stderr.take().unwrap());
        let mut server = Server { process, events };
        let event = server.event();
        assert!(event.contains("listening"), "{event}");
        (server, monitors_of(&event))
    };
    let name = path.to_str().unwrap();
    for signal in [Signal::TERM, Signal::KILL, Signal::TERM] {
        let early = std::thread::scope(|scope| {
            let early = scope.spawn(|| Client::connect(name));
            sleep(Duration::from_millis(50));
            let server = start();
            (early.join().unwrap(), server)
        });
        let (client, (mut server, address)) = (early.0.unwrap(), early.1);
        let object = client.open("s3://bucket/a").unwrap();
        let mut bytes = vec![0; 1 << 20];
        object.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, data(8, 1 << 20));
        assert_eq!(ask(&address, "GET /healthz").0, 200);
        for more in [&["--replace"][..], &[]] {
            let mut beside = bucket.serve(folder.path(), SECRET, "s3://bucket");
            assert_eq!(
                beside.args(more).output().unwrap().status.code(),
                Some(1),
                "it took the manager's socket"
            );
        }
        server.process.signal(signal);
        server.process.ended();
        assert!(path.exists(), "the manager's socket was removed");
        let beside = bucket.serve(folder.path(), SECRET, "s3://bucket").output().unwrap();
        assert_eq!(beside.status.code(), Some(1), "it took the manager's socket");
        // No server answers at the socket now: a client that waits for none is told soon.
        let (begun, client) = (Instant::now(), client.with_reconnect_timeout(Duration::ZERO));
        assert_eq!(client.open("s3://bucket/a").unwrap_err().kind(), ErrorKind::OwnerDead);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

/// versitygw on a folder with extended attributes, so it is not on a tmpfs.
fn versitygw(data: &Path, words: &[&str]) -> Option<(Process, String)> {
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools/versitygw-1.8.0");
    if skip::is_switched_off("versitygw") || !tools.join("complete").exists() {
        return None;
    }
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = Command::new(tools.join("versitygw"));
    command.args(["--quiet", "--access", USER, "--secret", SECRET, "--port"]);
    command.arg(address.to_string()).args(words).arg("posix").arg(data);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Process(command.spawn().unwrap());
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(begun.elapsed() < TIME_MAX, "versitygw does not answer");
        sleep(Duration::from_millis(20));
    }
    Some((process, address.to_string()))
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

#[test]
fn a_store_of_a_private_authority_is_read_by_servers_that_trust_it_and_by_no_other() {
    let Some((bucket, trusted)) = Bucket::behind_tls() else { return };
    let authority = Certificate::from_pem(&std::fs::read(&trusted).unwrap()).unwrap();
    bucket.put_by(ClientOptions::new().with_root_certificate(authority), "a", data(6, 2 << 20));
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&mut bucket.serve(folder.path(), SECRET, "s3://bucket"));
    let client = Client::connect(socket(folder.path()).to_str().unwrap()).unwrap();
    assert_eq!(
        client.open("s3://bucket/a").unwrap_err().kind(),
        ErrorKind::Open,
        "nothing has said to trust it"
    );
    server.process.signal(Signal::TERM);
    assert_eq!(server.process.ended(), Some(0));
    // The bucket is named once on the command line, and once in the file.
    let endpoint = &bucket.endpoint;
    let config = folder.path().join("serve.toml");
    let store = format!("[[store]]\nprefix = 's3://bucket'\nendpoint = '{endpoint}'\n");
    for (text, words) in [
        (store.clone(), vec!["--ca-certificates", trusted.to_str().unwrap()]),
        (format!("{store}ca_certificates = '{}'\n", trusted.display()), vec![]),
    ] {
        std::fs::write(&config, text).unwrap();
        let mut command = serve(folder.path());
        command.env("AWS_ACCESS_KEY_ID", USER).env("AWS_SECRET_ACCESS_KEY", SECRET);
        let mut server =
            Server::start(command.env("AWS_REGION", "us-east-1").arg("--config").arg(&config).args(words));
        assert_eq!(read(folder.path(), "s3://bucket/a"), data(6, 2 << 20));
        server.process.signal(Signal::TERM);
        assert_eq!(server.process.ended(), Some(0));
    }
    for (file, why) in [("/nowhere.pem", "cannot read"), ("/dev/null", "has none in PEM")] {
        let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket");
        let output = command.args(["--ca-certificates", file]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains(why) && said.contains(file), "{said}");
    }
}

/// `quinion-object` with such words, with the bucket's credentials in its environment.
fn object(bucket: &Bucket, words: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-object"));
    command.env("AWS_ACCESS_KEY_ID", USER).env("AWS_SECRET_ACCESS_KEY", SECRET);
    command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL_S3", &bucket.endpoint);
    command.args(words).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn an_object_is_written_whole_or_in_part_by_a_server_and_by_the_store() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    let bytes = data(7, (20 << 20) + 5);
    bucket.put("a b", bytes.clone());
    bucket.put("empty", Vec::new());
    let _server = Server::start(&mut bucket.serve(folder.path(), SECRET, "s3://bucket"));
    let name = socket(folder.path());
    for place in [&[][..], &["--server", name.to_str().unwrap()]] {
        let cat = |words: &[&str]| object(&bucket, &[&["cat"], place, words].concat());
        let of = |words: &[&str]| {
            let output = cat(words);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && said.is_empty(), "{words:?}: {said}");
            output.stdout
        };
        let url = "s3://bucket/a%20b";
        assert!(of(&[url]) == bytes, "all of it");
        assert!(of(&["s3://bucket/empty", url, "s3://bucket/empty"]) == bytes, "in order");
        let (len, end) = (bytes.len(), bytes.len() as u64 - 3);
        assert_eq!(of(&["--range", "5..4105", url]), bytes[5..4105]);
        assert_eq!(of(&["--range", &format!("{end}.."), url]), bytes[len - 3..]);
        assert_eq!(of(&["--range", &format!("{len}.."), url]), b"");
        // What is wrong with one is said, and the others are written.
        let output = cat(&["s3://bucket/none", "/etc/passwd", "s3://bucket//x", url]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && output.stdout == bytes, "{said}");
        assert!(said.contains("bucket/none") || said.contains("none"), "{said}");
        assert!(said.contains("/etc/passwd is not the URL"), "{said}");
        assert_eq!(said.lines().count(), 3, "{said}");
        let output = cat(&["--range", &format!("{}..", len + 1), url]);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty());
    }
    assert_eq!(object(&bucket, &["cat", "--range", "9..1", "s3://bucket/a%20b"]).status.code(), Some(2));
    let output = object(&bucket, &["cat", "--server", "no-such-server", "s3://bucket/a%20b"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
}

#[test]
fn size_version_and_time_of_an_object_are_shown_for_people_and_as_json() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a", data(7, 12_345));
    let _server = Server::start(&mut bucket.serve(folder.path(), SECRET, "s3://bucket"));
    let name = socket(folder.path());
    let server = ["--server", name.to_str().unwrap()];
    let mut shown = Vec::new();
    for place in [&[][..], &server] {
        let output = object(&bucket, &[&["stat"], place, &["s3://bucket/a"]].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains("12345 bytes"), "{text}");
        let output =
            object(&bucket, &[&["stat", "--json"], place, &["s3://bucket/a", "s3://bucket/b"]].concat());
        let json = String::from_utf8(output.stdout).unwrap();
        assert_eq!((output.status.code(), json.lines().count()), (Some(1), 1), "{json}");
        assert!(json.starts_with("{\"size_bytes\":12345,\"object\":\"s3://bucket/a\",\"etag\":"), "{json}");
        shown.push(json.split(",\"answered_by\"").next().unwrap().to_owned());
    }
    assert_eq!(shown[0], shown[1], "the server and the store say the same");
    assert!(shown[0].contains("\"modified\":\"20"), "{}", shown[0]);
}

#[test]
fn an_answer_of_the_store_serves_opens_as_long_as_the_configuration_or_the_client_says() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[[store]]\nprefix = 's3://bucket/file'\nfreshness = 'always'\n").unwrap();
    let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket/line");
    command.args(["--freshness", "immutable", "--metrics", "127.0.0.1:0", "--config"]).arg(&config);
    let mut server = Server::spawn(&mut command);
    let address = monitors_of(&server.event());
    let heads = |prefix: &str| -> u64 {
        let (_, text) = ask(&address, "GET /metrics");
        let name = format!("quinion_store_heads_total{{store=\"{prefix}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap_or_else(|| panic!("{name}: {text}")).parse().unwrap()
    };
    let name = socket(folder.path());
    let by_server = ["--server", name.to_str().unwrap()];
    // The configuration decides; the command line decides for what the configuration leaves out.
    for (prefix, heads_by_default) in [("s3://bucket/file", 3), ("s3://bucket/line", 1)] {
        let url = format!("{prefix}/a");
        bucket.put(url.strip_prefix("s3://bucket/").unwrap(), data(1, 9000));
        let times = |count, words: &[&str]| {
            let before = heads(prefix);
            for verb in ["cat", "stat"].into_iter().cycle().take(count) {
                let output = object(&bucket, &[&[verb], &by_server[..], words, &[&url]].concat());
                assert!(output.status.success() && (verb == "stat" || output.stdout == data(1, 9000)));
            }
            heads(prefix) - before
        };
        assert_eq!(times(3, &[]), heads_by_default);
        assert_eq!(times(3, &["--freshness", "3600"]), 0);
        assert_eq!(times(3, &["--freshness", "immutable"]), 0);
        assert_eq!(times(3, &["--freshness", "always"]), 3);
    }
    for words in [&["--freshness", "never"][..], &["--freshness", "-1"]] {
        let output = object(&bucket, &[&["cat"], &by_server[..], words, &["s3://bucket/file/a"]].concat());
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    }
    let without_server = object(&bucket, &["cat", "--freshness", "5", "s3://bucket/file/a"]);
    assert_eq!(without_server.status.code(), Some(2));
}

#[test]
fn gets_and_bytes_that_were_spent_and_saved_have_the_configured_price() {
    let Some(bucket) = Bucket::new() else { return };
    let folder = tempfile::tempdir().unwrap();
    bucket.put("a", data(5, 3 << 20));
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[price]\ngets_1000 = 500\ngigabyte = 2").unwrap();
    let mut command = bucket.serve(folder.path(), SECRET, "s3://bucket");
    let mut server = Server::spawn(command.args(["--metrics", "127.0.0.1:0", "--config"]).arg(&config));
    let event = server.event();
    let address =
        event.split("metrics=\"http://").nth(1).expect(&event).split('/').next().unwrap().to_owned();
    for _ in 0..5 {
        assert!(read(folder.path(), "s3://bucket/a") == data(5, 3 << 20));
    }
    let (_, text) = ask(&address, "GET /metrics");
    let number = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name}: {text}")).trim().parse().unwrap()
    };
    let sent = number("quinion_store_gets_total{store=\"s3://bucket\"}");
    let saved = number("quinion_saved_gets ");
    assert!(sent > 0.0 && saved == 5.0 - sent, "{text}");
    let price_of = |gets: f64, mib: u32| gets * 0.5 + f64::from(mib << 20) / 1e9 * 2.0;
    assert!((number("quinion_spent_price ") - price_of(sent, 3)).abs() < 1e-9, "{text}");
    assert!((number("quinion_saved_price ") - price_of(saved, 12)).abs() < 1e-9, "{text}");
}

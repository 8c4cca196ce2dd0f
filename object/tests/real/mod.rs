//! Servers of objects that others wrote, as processes on loopback: versitygw, over files, and moto, both of S3;
//! fake-gcs-server, of Google's protocol, and Azurite, of Azure's. The last three keep their objects in memory.
//!
//! `scripts/setup` installs them in the target folder. Where it could not (without Go, Node, or the registries of their
//! packages), there is none, and a test is skipped or fails by [`or_skipped`].

// Each test program has a part of it.
#![allow(dead_code)]

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use object_store::aws::{AmazonS3Builder, S3ConditionalPut, S3CopyIfNotExists};

pub mod skip;

pub const KEY: &str = "loopback";
pub const SECRET: &str = "only-for-tests";
/// The account of Azure's protocol; the key is "only-for-tests" in base 64, as the protocol has keys.
pub const ACCOUNT: &str = "loopback";
pub const ACCOUNT_KEY: &str = "b25seS1mb3ItdGVzdHM=";
const START_MAX: Duration = Duration::from_secs(300);

/// A server process, which ends when this is dropped.
pub struct Server {
    process: Child,
    address: SocketAddr,
    buckets: Buckets,
    _folder: tempfile::TempDir,
}

enum Buckets {
    /// As a folder in this one.
    Folder(PathBuf),
    /// A request that nothing signs.
    Request,
    /// A request of the JSON API.
    Json,
    /// A request that is signed: the clients make it.
    Signed,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A program of such a folder of tools, as `versitygw-1.8.0`.
pub fn installed(folder: &str, program: &str) -> Option<PathBuf> {
    if folder.rsplit_once('-').is_some_and(|(name, _)| skip::is_switched_off(name)) {
        return None;
    }
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools").join(folder);
    folder.join("complete").exists().then(|| folder.join(program))
}

impl Server {
    /// On a folder of its own, not on a tmpfs: its attributes are extended ones.
    pub fn versitygw() -> Option<Self> {
        Self::versitygw_with(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), &[])
    }

    pub fn versitygw_with(folder: tempfile::TempDir, words: &[&str]) -> Option<Self> {
        let program = installed("versitygw-1.8.0", "versitygw")?;
        let data = folder.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let mut command = Command::new(program);
        let address = free_address();
        command.args(["--quiet", "--access", KEY, "--secret", SECRET, "--port", &address.to_string()]);
        command.args(words).arg("posix").arg(&data);
        Some(Self::start(command, address, Buckets::Folder(data), folder))
    }

    pub fn moto() -> Option<Self> {
        let program = installed("moto-5.2.5", "bin/python")?;
        let address = free_address();
        let mut command = Command::new(program);
        command.args(["-m", "moto.server", "--host", "127.0.0.1", "--port", &address.port().to_string()]);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Some(Self::start(command, address, Buckets::Request, folder))
    }

    pub fn fake_gcs_server() -> Option<Self> {
        let program = installed("fake-gcs-server-1.56.1", "fake-gcs-server")?;
        let address = free_address();
        let mut command = Command::new(program);
        command.args(["-scheme", "http", "-backend", "memory", "-log-level", "error", "-host", "127.0.0.1"]);
        command.args(["-port", &address.port().to_string(), "-public-host", &address.to_string()]);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Some(Self::start(command, address, Buckets::Json, folder))
    }

    /// With the one account [`ACCOUNT`]. Its own check of versions would refuse those that are newer than itself.
    pub fn azurite() -> Option<Self> {
        let program = installed("azurite-3.35.0", "node_modules/.bin/azurite-blob")?;
        let address = free_address();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut command = Command::new(program);
        command.args(["--blobHost", "127.0.0.1", "--blobPort", &address.port().to_string(), "--silent"]);
        command.args(["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]);
        command.env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{ACCOUNT_KEY}")).current_dir(folder.path());
        Some(Self::start(command, address, Buckets::Signed, folder))
    }

    fn start(mut command: Command, address: SocketAddr, buckets: Buckets, folder: tempfile::TempDir) -> Self {
        let log = folder.path().join("log");
        let out = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out);
        let process = command.spawn().unwrap();
        let mut server = Self { process, address, buckets, _folder: folder };
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            let ended = server.process.try_wait().unwrap();
            let is_late = begun.elapsed() > START_MAX;
            if ended.is_some() || is_late {
                panic!("{command:?} does not answer ({ended:?}): {}", std::fs::read_to_string(&log).unwrap());
            }
            sleep(Duration::from_millis(20));
        }
        server
    }

    pub fn make_bucket(&self, name: &str) {
        match &self.buckets {
            Buckets::Folder(folder) => std::fs::create_dir(folder.join(name)).unwrap(),
            Buckets::Request => self.expect("PUT", &format!("/{name}"), ""),
            Buckets::Json => {
                self.expect("POST", "/storage/v1/b?project=p", &format!("{{\"name\":\"{name}\"}}"))
            }
            Buckets::Signed => panic!("a container is made by a client that signs"),
        }
    }

    /// Makes a bucket; its client tries nothing again by itself.
    pub fn bucket_builder(&self, name: &str) -> AmazonS3Builder {
        self.make_bucket(name);
        builder(self.address, name).with_access_key_id(KEY).with_secret_access_key(SECRET)
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn expect(&self, method: &str, target: &str, body: &str) {
        let (status, answer) = ask(self.address, &format!("{method} {target}"), body.as_bytes());
        assert_eq!(status, 200, "{method} {target}: {answer}");
    }
}

/// The status and the body of the answer to a request that nothing signs. `request`: its method, its target, and then
/// lines of headers.
pub fn ask(address: SocketAddr, request: &str, body: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let (line, headers) = request.split_once('\n').unwrap_or((request, ""));
    let (headers, len) = (headers.replace('\n', "\r\n"), body.len());
    let head = format!(
        "{line} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {len}\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Without credentials; it tries nothing again by itself.
pub fn builder(address: SocketAddr, bucket: &str) -> AmazonS3Builder {
    AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_region("us-east-1")
        .with_endpoint(format!("http://{address}"))
        .with_allow_http(true)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_copy_if_not_exists(S3CopyIfNotExists::Multipart)
        .with_retry(object_store::RetryConfig { max_retries: 0, ..Default::default() })
}

/// One that the system gives to no program that leaves the choice to it.
pub fn free_address() -> SocketAddr {
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    let ports = || 20_000 + (std::process::id() * 31 + GIVEN.fetch_add(1, Ordering::Relaxed)) % 12_000;
    let mut addresses = std::iter::repeat_with(|| SocketAddr::from(([127, 0, 0, 1], ports() as u16)));
    addresses.find(|address| TcpListener::bind(address).is_ok()).unwrap()
}

/// Prints which test is skipped, and why, if there is no server; or fails, where servers are required.
pub fn or_skipped(server: Option<Server>, test: &str, name: &str) -> Option<Server> {
    if server.is_none() {
        skip::missing(test, name);
    }
    server
}

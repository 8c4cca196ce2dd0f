//! Servers of S3 that others wrote, as processes on loopback: versitygw, over files, and moto, over memory.
//!
//! `scripts/setup` installs them in the target folder. Where it could not (versitygw takes Go, moto the registry of
//! Python packages), there is none, and a test is skipped or fails by [`or_skipped`].

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
const START_MAX: Duration = Duration::from_secs(300);

/// It ends when this is dropped.
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
            Buckets::Request => self.put_bucket(name),
        }
    }

    /// It tries nothing again by itself.
    pub fn bucket_builder(&self, name: &str) -> AmazonS3Builder {
        self.make_bucket(name);
        builder(self.address, name).with_access_key_id(KEY).with_secret_access_key(SECRET)
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    fn put_bucket(&self, name: &str) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let host = self.address;
        write!(
            stream,
            "PUT /{name} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
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

//! Real S3 servers that others wrote: versitygw, over files, and moto, over memory. Both run on loopback.
//!
//! ```text
//!   cached store --signed HTTP--> server <--signed HTTP-- bare store      two buckets, the same calls, equal answers
//! ```
//!
//! `scripts/setup` installs the servers in the target folder. Where it could not (versitygw takes Go, moto the registry
//! of Python packages), the tests of that server say SKIPPED.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut, S3CopyIfNotExists};
use object_store::{ObjectStore, ObjectStoreExt, integration, path::Path};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quinion::Cache;
use quinion_object::{CachedStore, Freshness, ObjectCache, Options, cached_with};
use quinion_testing_s3 as s3;

mod differential;

use differential::{Call, Condition, calls, kind, made, path};

const KEY: &str = "loopback";
const SECRET: &str = "only-for-tests";
/// How long a server may take to start on a busy machine.
const START_MAX: Duration = Duration::from_secs(60);
/// Calls of a differential run: a server makes some hundred in a second.
const CALLS: usize = 400;

/// A server of another project's, as a process. It ends when this is dropped.
struct Server {
    process: Child,
    address: SocketAddr,
    buckets: Buckets,
    _folder: tempfile::TempDir,
}

/// How a bucket is made.
enum Buckets {
    /// As a folder in this one.
    Folder(PathBuf),
    /// By a request that nothing signs.
    Request,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A program of `scripts/setup`'s in the target folder.
fn installed(folder: &str, program: &str) -> Option<PathBuf> {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools").join(folder);
    folder.join("complete").exists().then(|| folder.join(program))
}

impl Server {
    /// versitygw on a folder of its own. Its attributes are extended ones, so the folder is not on a tmpfs.
    fn versitygw() -> Option<Self> {
        let program = installed("versitygw-1.8.0", "versitygw")?;
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let data = folder.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let mut command = Command::new(program);
        let address = free_address();
        command.args([
            "--quiet",
            "--access",
            KEY,
            "--secret",
            SECRET,
            "--port",
            &address.to_string(),
            "posix",
        ]);
        command.arg(&data);
        Some(Self::start(command, address, Buckets::Folder(data), folder))
    }

    /// moto's server.
    fn moto() -> Option<Self> {
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

    /// A client of a new bucket, which tries nothing again by itself.
    fn bucket(&self, name: &str) -> Arc<AmazonS3> {
        match &self.buckets {
            Buckets::Folder(folder) => std::fs::create_dir(folder.join(name)).unwrap(),
            Buckets::Request => self.put_bucket(name),
        }
        let store = AmazonS3Builder::new()
            .with_bucket_name(name)
            .with_region("us-east-1")
            .with_endpoint(format!("http://{}", self.address))
            .with_allow_http(true)
            .with_access_key_id(KEY)
            .with_secret_access_key(SECRET)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_copy_if_not_exists(S3CopyIfNotExists::Multipart)
            .with_retry(object_store::RetryConfig { max_retries: 0, ..Default::default() })
            .with_http_connector(s3::Connector);
        Arc::new(store.build().unwrap())
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

/// An address that nothing listens at now.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The server, or a line that says which test was skipped and why.
fn or_skipped(server: Option<Server>, test: &str, name: &str) -> Option<Server> {
    if server.is_none() {
        println!("SKIPPED {test}: there is no {name} in the target folder; scripts/setup installs it");
    }
    server
}

fn over(store: Arc<dyn ObjectStore>, options: Options, freshness: Freshness) -> CachedStore {
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    cached_with(ObjectCache::new(cache, store, options).unwrap(), freshness)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// object_store's own tests, but for those that the bare store fails on versitygw as well: it compares conditions of
/// time to parts of a second, and shows whole ones.
async fn the_crates_own_tests(store: &CachedStore) {
    integration::put_get_delete_list(store).await;
    integration::list_with_delimiter(store).await;
    integration::rename_and_copy(store).await;
    integration::copy_rename_nonexistent_object(store).await;
    integration::stream_get(store).await;
    store.objects().cache().check().unwrap();
}

/// Whether the interface says what comes of `call`. It does not for ranges of an object without bytes (S3 refuses them;
/// a store that knows the object's size need not ask), for no ranges of an object that is not there, nor for several of
/// which one begins behind the end (the crate's own way to cut them panics). Nor for what was not modified since a time
/// to come: HTTP has servers ignore such a time (RFC 9110, 13.1.3), and it passes between two calls.
async fn is_defined(call: &Call, store: &AmazonS3) -> bool {
    let size = async |key: &u8| store.head(&path(*key)).await.map_or(0, |meta| meta.size);
    match call {
        Call::Ranges { key, ranges } => {
            let size = size(key).await;
            !ranges.is_empty() && ranges.iter().all(|range| range.start < size)
        }
        Call::Get { condition: Condition::ModifiedSince(1..), .. } => false,
        Call::Get { key, range: Some(_), .. } => size(key).await > 0,
        _ => true,
    }
}

/// The same calls of a bare bucket and of a cached one. What others write to the cached bucket is written to the bare
/// one as well.
async fn compare(server: &Server, options: Options, name: &str) {
    let bare = server.bucket(&format!("bare-{name}"));
    let below = server.bucket(&format!("below-{name}"));
    let cached = over(below.clone(), options, Freshness::Always);
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let drawn = calls();
    for at in 0..CALLS {
        let call = drawn.new_tree(&mut runner).unwrap().current();
        if !is_defined(&call, &bare).await {
            continue;
        }
        let one = made(&call, at, &*bare, Some(&*bare)).await;
        let other = made(&call, at, &cached, Some(&*below)).await;
        assert_eq!(one, other, "call {at}: {call:?}");
    }
    cached.objects().cache().check().unwrap();
}

/// An object that others replace again and again: a read is of one version, as a whole, or an error that says so.
fn read_while_replaced(server: &Server) {
    const LEN: usize = 16 << 20;
    let below = server.bucket("replaced");
    let path = Path::from("object");
    let put = async |version: u32| {
        below.put(&path, s3::content(version, LEN).into()).await.unwrap();
    };
    runtime().block_on(put(0));
    let options = Options::new().request_max(1 << 20).requests_max(1).whole_max(0);
    let store = over(below.clone(), options, Freshness::Always);
    let ended = AtomicBool::new(false);
    let (whole, changed) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let runtime = runtime();
            for version in 1..30 {
                runtime.block_on(put(version));
            }
            ended.store(true, Ordering::Relaxed);
        });
        let (mut whole, mut changed) = (0, 0);
        let runtime = runtime();
        while !ended.load(Ordering::Relaxed) || whole == 0 {
            let read = runtime.block_on(async { store.get(&path).await?.bytes().await });
            match read {
                Ok(bytes) => {
                    assert_eq!(bytes.len(), LEN);
                    let version = (0..30).find(|&version| bytes == s3::content(version, LEN));
                    assert!(version.is_some(), "bytes of no version, or of two");
                    whole += 1;
                }
                Err(error) => {
                    assert_eq!(kind(&error), "precondition", "{error}");
                    changed += 1;
                }
            }
        }
        (whole, changed)
    });
    println!("{whole} reads of one version, {changed} errors");
}

#[test]
fn versitygw_passes_the_crates_own_tests() {
    let name = "versitygw_passes_the_crates_own_tests";
    let Some(server) = or_skipped(Server::versitygw(), name, "versitygw") else { return };
    let store = over(server.bucket("own"), Options::new(), Freshness::Always);
    runtime().block_on(the_crates_own_tests(&store));
}

#[test]
fn versitygw_is_read_through_the_cache_as_without() {
    let name = "versitygw_is_read_through_the_cache_as_without";
    let Some(server) = or_skipped(Server::versitygw(), name, "versitygw") else { return };
    runtime().block_on(async {
        compare(&server, Options::new(), "large").await;
        compare(&server, Options::new().whole_max(0).fill_min(0).gap_max(0), "small").await;
    });
}

#[test]
fn an_object_that_is_replaced_on_versitygw_is_read_as_one_version() {
    let name = "an_object_that_is_replaced_on_versitygw_is_read_as_one_version";
    let Some(server) = or_skipped(Server::versitygw(), name, "versitygw") else { return };
    read_while_replaced(&server);
}

#[test]
fn moto_is_read_through_the_cache_as_without() {
    let name = "moto_is_read_through_the_cache_as_without";
    let Some(server) = or_skipped(Server::moto(), name, "moto") else { return };
    runtime().block_on(async {
        compare(&server, Options::new(), "large").await;
        compare(&server, Options::new().whole_max(0).fill_min(0).gap_max(0), "small").await;
    });
}

#[test]
fn an_object_that_is_replaced_on_moto_is_read_as_one_version() {
    let name = "an_object_that_is_replaced_on_moto_is_read_as_one_version";
    let Some(server) = or_skipped(Server::moto(), name, "moto") else { return };
    read_while_replaced(&server);
}

//! The trait over a client against stores without: object_store's own tests, a differential run, and ends of servers.
//!
//! What needs another process (a server that is killed, workers) is this test program started again (`the_child`).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Attribute, Attributes, Error, GetOptions, ObjectStore, ObjectStoreExt, integration};
use proptest::prelude::*;
use quinion::Cache;
use quinion_object::{Freshness, Options};
use quinion_service::{Client, ClientStore, ErrorKind, Failover, Server, cached};
use quinion_testing_s3 as s3;

#[path = "../../object/tests/differential/mod.rs"]
mod differential;

use differential::{calls, kind, made};

const ALL: [Freshness; 3] =
    [Freshness::Always, Freshness::For(Duration::from_secs(3600)), Freshness::Immutable];

fn serve(folder: &std::path::Path, store: Arc<dyn ObjectStore>, memory: u64) -> Server {
    let cache = Cache::builder().memory(memory).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store, Options::new());
    server.start(folder.join("q/s.sock").to_str().unwrap()).unwrap()
}

struct Fixture {
    server: Option<Server>,
    client: Client,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(store: Arc<dyn ObjectStore>, memory: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let server = serve(folder.path(), store, memory);
        let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
        Self { server: Some(server), client, folder }
    }

    fn over(&self, store: Arc<dyn ObjectStore>, freshness: Freshness) -> ClientStore {
        ClientStore::builder(store, self.client.clone(), "s3://bucket").freshness(freshness).build().unwrap()
    }
}

#[tokio::test]
async fn the_crates_own_tests_pass_over_a_client() {
    for freshness in ALL {
        let bare = Arc::new(InMemory::new());
        let fixture = Fixture::new(bare.clone(), 32 << 20);
        let store = &fixture.over(bare, freshness);
        integration::put_get_delete_list(store).await;
        integration::get_opts(store).await;
        integration::list_uses_directories_correctly(store).await;
        integration::list_with_delimiter(store).await;
        integration::rename_and_copy(store).await;
        integration::copy_if_not_exists(store).await;
        integration::copy_rename_nonexistent_object(store).await;
        integration::stream_get(store).await;
        integration::list_with_offset_exclusivity(store).await;
        integration::put_get_attributes(store).await;
        integration::put_opts(store, true).await;
    }
}

/// 1. A store does not answer, and as many gets wait for it as a client has threads.
/// 2. A get of bytes that are cached, which needs no answer, waited as well.
#[tokio::test]
async fn cached_bytes_are_read_while_a_store_holds_all_threads_of_a_client() {
    let server = s3::Server::with_object(1 << 20);
    let fixture = Fixture::new(server.store(), 64 << 20);
    let store = fixture.over(server.store(), Freshness::Immutable);
    let read = async || store.get(&Path::from("object")).await.unwrap().bytes().await.unwrap();
    s3::check(1, 0, &read().await);
    server.control.hold();
    let wait = |at: usize| {
        let (store, path) = (store.clone(), Path::from(format!("none{at}")));
        tokio::spawn(async move { store.get(&path).await.map(drop) })
    };
    let waiting: Vec<_> = (0..64).map(wait).collect();
    // Each of them has begun.
    tokio::task::yield_now().await;
    tokio::task::yield_now().await;
    let bytes = tokio::time::timeout(Duration::from_secs(20), read()).await.expect("it is cached");
    s3::check(1, 0, &bytes);
    server.control.release();
    for one in waiting {
        let error = one.await.unwrap().unwrap_err();
        assert!(matches!(error, Error::NotFound { .. }), "{error}");
    }
}

/// 1. Three stores of one process keep objects open: as many in all as a server gives a process.
/// 2. Each further open was refused, of the stores and of their client, for as long as the process lived.
#[tokio::test]
async fn objects_that_stores_keep_open_are_given_up_for_others() {
    let bare = Arc::new(InMemory::new());
    let fixture = Fixture::new(bare.clone(), 64 << 20);
    let stores = [(); 3].map(|()| fixture.over(bare.clone(), Freshness::Immutable));
    for number in 0..4500 {
        let path = Path::from(number.to_string());
        bare.put(&path, "a".into()).await.unwrap();
        assert_eq!(stores[number / 1500].get(&path).await.unwrap().bytes().await.unwrap(), "a");
    }
    let own: Vec<_> = (0..2000).map(|number| fixture.client.open(&format!("s3://bucket/{number}"))).collect();
    assert!(own.iter().all(Result::is_ok), "{:?}", own.iter().find(|opened| opened.is_err()));
}

/// 1. `quinion serve` keeps the storage class of an object as metadata.
/// 2. A program reads the attributes through a client, and writes the object back with them.
/// 3. The object had metadata of that name for good, which no user has given.
#[tokio::test]
async fn headers_that_a_server_keeps_are_attributes_only_for_those_that_ask() {
    let bare = Arc::new(InMemory::new());
    let fixture = Fixture::new(bare.clone(), 32 << 20);
    let path = Path::from("a");
    let own = [(Attribute::ContentType, "text/plain"), (Attribute::Metadata("mine".into()), "1")];
    let own = Attributes::from_iter(own);
    let mut all = own.clone();
    all.insert(Attribute::Metadata("quinion-kept-x-amz-storage-class".into()), "414243".into());
    bare.put_opts(&path, "a".into(), all.clone().into()).await.unwrap();
    let builder = || ClientStore::builder(bare.clone(), fixture.client.clone(), "s3://bucket");
    for (store, told) in
        [(builder().build().unwrap(), own), (builder().kept_headers(true).build().unwrap(), all)]
    {
        assert_eq!(store.get(&path).await.unwrap().attributes, told);
        let head = GetOptions::new().with_head(true);
        assert_eq!(store.get_opts(&path, head).await.unwrap().attributes, told);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn a_client_store_answers_as_the_bare_one(
        calls in prop::collection::vec(calls(), 1..60),
        freshness in prop::sample::select(&ALL[..]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (bare, below) = (InMemory::new(), Arc::new(InMemory::new()));
            let fixture = Fixture::new(below.clone(), 16 << 20);
            let cached = fixture.over(below.clone(), freshness);
            // What others write is seen at once only if it is always asked for.
            let has_other_client = freshness == Freshness::Always;
            for (at, call) in calls.iter().enumerate() {
                let one = made(call, at, &bare, has_other_client.then_some(&bare as _)).await;
                let other = made(call, at, &cached, has_other_client.then_some(&*below as _)).await;
                assert_eq!(one, other, "call {at}: {call:?}");
            }
            fixture.server.as_ref().unwrap().cache().check().unwrap();
        });
    }
}

#[tokio::test]
async fn an_object_larger_than_the_pin_limit_is_copied_beyond_that() {
    let bare = Arc::new(InMemory::new());
    let fixture = Fixture::new(bare.clone(), 32 << 20);
    let store = cached(bare, fixture.client.clone(), "s3://bucket/").unwrap();
    let (path, content) = (Path::from("large"), s3::content(1, 50 << 20));
    store.put(&path, content.clone().into()).await.unwrap();
    let stream = store.get(&path).await.unwrap().into_stream();
    let parts: Vec<Bytes> = stream.map(|part| part.unwrap()).collect().await;
    let pins = fixture.server.as_ref().unwrap().stats().pins;
    assert!((1..=8).contains(&pins), "{pins} MiB of 50 are pinned, and a quarter of the memory may be");
    assert_eq!(parts.concat(), content);
    drop(parts);
    let pins = || fixture.server.as_ref().unwrap().stats().pins;
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while pins() > 0 {
        assert!(std::time::Instant::now() < until, "pins are never given back");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test]
async fn a_cold_stream_is_one_get_after_another_without_a_question_before_them() {
    let server = s3::Server::with_object(20 << 20);
    let fixture = Fixture::new(server.store(), 64 << 20);
    let store = fixture.over(server.store(), Freshness::Always);
    let read = async || {
        let all = store.get(&Path::from("object")).await.unwrap().bytes().await.unwrap();
        assert_eq!(all.len(), 20 << 20);
        s3::check(1, 0, &all);
    };
    read().await;
    let (heads, bytes) =
        (server.control.heads(), fixture.server.as_ref().unwrap().stats().fetches[0].1.bytes);
    assert_eq!((heads, bytes, server.control.ranges()[0]), (0, 20 << 20, (0, 8 << 20)));
    read().await;
    let again = fixture.server.as_ref().unwrap().stats().fetches[0].1.bytes;
    assert_eq!((server.control.heads(), again), (1, bytes), "what may be cached is asked for by a HEAD");
}

#[tokio::test]
async fn a_prefix_that_the_server_has_not_is_no_missing_object() {
    let bare = Arc::new(InMemory::new());
    let fixture = Fixture::new(bare.clone(), 16 << 20);
    bare.put(&Path::from("a"), "1".into()).await.unwrap();
    let store = cached(bare.clone(), fixture.client.clone(), "s3://other").unwrap();
    let error = store.get(&Path::from("a")).await.unwrap_err();
    assert!(kind(&error) == "generic" && error.to_string().contains("has no store for it"), "{error}");
    let store = cached(bare, fixture.client.clone(), "s3://bucket").unwrap();
    assert_eq!(kind(&store.get(&Path::from("b")).await.unwrap_err()), "not found");
}

#[tokio::test]
async fn a_stream_whose_object_is_replaced_is_of_one_version_or_an_error() {
    let server = s3::Server::with_object(24 << 20);
    let fixture = Fixture::new(server.store(), 64 << 20);
    let store = fixture.over(server.store(), Freshness::Immutable);
    let path = Path::from("object");
    store.head(&path).await.unwrap();
    server.control.change("object");
    // Nothing was given out yet: it begins again with what the object is now.
    let result = store.get(&path).await.unwrap();
    assert_eq!(result.meta.e_tag.as_deref(), Some("\"v2\""));
    let (mut stream, mut at, mut error) = (result.into_stream(), 0, None);
    while let Some(part) = stream.next().await {
        match part {
            Ok(part) => {
                s3::check(2, at, &part);
                if at == 0 {
                    server.control.change("object");
                }
                at += part.len() as u64;
            }
            Err(failed) => error = Some(failed),
        }
    }
    let is_told = matches!(error, Some(Error::Precondition { .. }));
    assert!(is_told || at == 24 << 20, "{at} bytes, then {error:?}");
    let all = store.get(&path).await.unwrap().bytes().await.unwrap();
    s3::check(3, 0, &all);
}

/// 1. An object is taken for one that never changes, and changes.
/// 2. A get on the condition that it is the new one fails by the metadata of the old one.
#[tokio::test]
async fn a_condition_that_fails_by_known_metadata_is_asked_of_the_server() {
    let server = s3::Server::with_object(100_000);
    let fixture = Fixture::new(server.store(), 16 << 20);
    let store = fixture.over(server.store(), Freshness::Immutable);
    let path = Path::from("object");
    store.head(&path).await.unwrap();
    server.control.change("object");
    let if_match = |tag: &str| GetOptions::new().with_if_match(Some(tag.to_owned()));
    let result = store.get_opts(&path, if_match("\"v2\"")).await.unwrap();
    s3::check(2, 0, &result.bytes().await.unwrap());
    let error = store.get_opts(&path, if_match("\"v1\"")).await.unwrap_err();
    assert!(matches!(error, Error::Precondition { .. }), "{error}");
}

/// 1. A server ends, and another listens in its place.
/// 2. Clients of the first fail for as long as they live.
#[tokio::test]
async fn objects_opened_after_a_new_server_came_are_of_that_server() {
    let bare = Arc::new(InMemory::new());
    let mut fixture = Fixture::new(bare.clone(), 16 << 20);
    let path = Path::from("a");
    bare.put(&path, "one".into()).await.unwrap();
    let store = fixture.over(bare.clone(), Freshness::Immutable);
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "one");
    fixture.server.take().unwrap().stop();
    bare.put(&path, "two".into()).await.unwrap();
    assert!(fixture.client.owner_is_dead().unwrap());
    let error = fixture.client.open("s3://bucket/a").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OwnerDead, "{error}");
    fixture.server = Some(serve(fixture.folder.path(), bare, 16 << 20));
    assert!(!fixture.client.owner_is_dead().unwrap());
    assert_eq!(fixture.client.open("s3://bucket/a").unwrap().len(), 3);
    let other = fixture.over(Arc::new(InMemory::new()), Freshness::Always);
    assert_eq!(other.get(&path).await.unwrap().bytes().await.unwrap(), "two");
}

/// 1. A store has the keys `a`, `/a` and `a/`, as S3 may.
/// 2. The names of the last two open the first.
#[test]
fn a_name_whose_slashes_would_be_cut_opens_nothing() {
    let bare = Arc::new(InMemory::new());
    let fixture = Fixture::new(bare.clone(), 16 << 20);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(bare.put(&Path::from("a"), "1".into())).unwrap();
    assert_eq!(fixture.client.open("s3://bucket/%61").unwrap().len(), 1);
    for name in ["s3://bucket//a", "s3://bucket/a/", "s3://bucket/%2fa", "s3://bucket/a%2F"] {
        let error = fixture.client.open(name).unwrap_err();
        assert!(error.to_string().contains("slash"), "{name}: {error}");
    }
}

/// 1. A local file says that it has more bytes than there is memory.
/// 2. To pin it ends the process.
#[test]
fn a_pin_of_a_local_file_beyond_all_memory_is_an_error() {
    let policy = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap();
    if policy.trim() == "1" {
        println!("SKIPPED: this kernel promises memory that it has not");
        return;
    }
    let fixture = Fixture::new(Arc::new(InMemory::new()), 16 << 20);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8 << 40).unwrap();
    let local = fixture.client.open(file.path().to_str().unwrap()).unwrap();
    let error = local.pin(0..8 << 40).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    assert_eq!(local.pin(0..4096).unwrap().to_vec(), [0; 4096]);
}

// ---- other processes --------------------------------------------------------------------------------------------

/// Not a test: what a child does that another test has started.
#[tokio::test]
async fn the_child() {
    let Ok(role) = std::env::var("QUINION_CHILD") else { return };
    let (socket, address) =
        (std::env::var("QUINION_SOCKET").unwrap(), std::env::var("QUINION_STORE").unwrap());
    let bare = s3::store_at(&address);
    if role == "server" {
        let cache = Cache::builder().memory(64 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://bucket", bare.clone(), Options::new());
        let _server = server.start(&socket).unwrap();
        println!("\nchild: serves");
        std::thread::sleep(Duration::from_secs(600));
    }
    let store = cached(bare, Client::connect(&socket).unwrap(), "s3://bucket").unwrap();
    let all = store.get(&Path::from("object")).await.unwrap().bytes().await.unwrap();
    s3::check(1, 0, &all);
    let ranges = [5..100, 1_000_000..3_000_000, 4_999_000..5_000_003];
    for (range, bytes) in ranges.iter().zip(store.get_ranges(&Path::from("object"), &ranges).await.unwrap()) {
        assert_eq!(bytes.len() as u64, range.end - range.start);
        s3::check(1, range.start, &bytes);
    }
    println!("\nchild: has read {}", all.len());
    std::io::stdout().flush().unwrap();
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn start(role: &str, socket: &str, store: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_child", "--nocapture", "--test-threads=1"]);
        command.env("QUINION_CHILD", role).env("QUINION_SOCKET", socket).env("QUINION_STORE", store);
        Self(command.stdout(Stdio::piped()).spawn().unwrap())
    }

    #[track_caller]
    fn says(&mut self, words: &str) {
        let lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        let is_said = lines.map_while(Result::ok).any(|line| line == format!("child: {words}"));
        assert!(is_said, "the child has ended without saying {words:?}");
    }
}

#[test]
fn eight_processes_cost_the_bytes_of_one() {
    let server = s3::Server::with_object(5_000_003);
    server.control.set_latency(Duration::from_millis(20));
    let fixture = Fixture::new(server.store(), 64 << 20);
    let socket = fixture.server.as_ref().unwrap().socket().to_str().unwrap().to_owned();
    let mut children: Vec<_> = (0..8).map(|_| Process::start("read", &socket, &server.address())).collect();
    children.iter_mut().for_each(|child| child.says("has read 5000003"));
    let fetched = fixture.server.as_ref().unwrap().stats().fetches[0].1;
    assert_eq!(fetched.bytes - fetched.gap_bytes, 5_000_003, "each byte is fetched once: {fetched:?}");
    assert_eq!(server.control.gets(), fetched.gets, "and nobody but the server has asked");
}

async fn read_after_a_kill(failover: Failover) -> (Result<Bytes, Error>, Result<u64, (u64, Error)>) {
    let store_server = s3::Server::with_object(30 << 20);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("q/s.sock").to_str().unwrap().to_owned();
    let mut server = Process::start("server", &socket, &store_server.address());
    server.says("serves");
    let client = Client::connect(&socket).unwrap();
    let bare = store_server.store();
    let store = ClientStore::builder(bare, client, "s3://bucket").failover(failover).build().unwrap();
    let path = Path::from("object");
    let mut stream = store.get(&path).await.unwrap().into_stream();
    let (mut at, mut failed) = (0, None);
    while let Some(part) = stream.next().await {
        match part {
            Err(error) => failed = Some(error),
            Ok(part) => {
                s3::check(1, at, &part);
                at += part.len() as u64;
                // With the first part; afterwards there is nothing to kill.
                let _ = server.0.kill();
                server.0.wait().unwrap();
            }
        }
    }
    let read = store.get_range(&path, 100..5_000_000).await;
    (read, failed.map_or(Ok(at), |error| Err((at, error))))
}

#[tokio::test]
async fn a_killed_server_is_an_error_that_says_so() {
    let (read, streamed) = read_after_a_kill(Failover::Error).await;
    let error = read.unwrap_err();
    assert!(kind(&error) == "generic" && error.to_string().contains("has ended"), "{error}");
    let (at, error) = streamed.unwrap_err();
    assert!(at < 30 << 20 && error.to_string().contains("has ended"), "{at} {error}");
}

#[tokio::test]
async fn a_killed_server_is_failed_over_if_that_was_asked_for() {
    let (read, streamed) = read_after_a_kill(Failover::Direct).await;
    let bytes = read.unwrap();
    assert_eq!(bytes.len(), 4_999_900);
    s3::check(1, 100, &bytes);
    assert_eq!(streamed.unwrap(), 30 << 20);
}

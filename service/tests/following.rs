//! An object that is replaced while a client has it open: an error by default, and the new version for those that
//! follow it, with the server that they began with or another.
//!
//! Each byte tells its version, so a read of bytes of two versions would be seen.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};
use quinion::Cache;
use quinion_object::{Freshness, Options};
use quinion_service::{Client, ClientStore, ErrorKind, FollowingFile, RangeRead, Server};
use quinion_testing_s3 as s3;

#[path = "../../object/tests/held/mod.rs"]
mod held;

use held::HeldStore;

const URL: &str = "s3://bucket/object";
const LEN: usize = 3 << 20;

/// Small fills, so that an object is partly cached.
fn serve(folder: &Path, store: &s3::Server) -> Server {
    let options = Options::new().whole_max(0).tail_max(0).fill_min(4096).failure_pause(Duration::ZERO);
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store.store(), options);
    server.start(folder.join("q/s.sock").to_str().unwrap()).unwrap()
}

#[test]
fn a_client_that_follows_goes_on_with_the_new_version_and_its_size() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store);
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let (plain, following) = (client.open(URL).unwrap(), client.open_following(URL).unwrap());
    let mut buffer = vec![0; LEN];
    following.read_exact_at(&mut buffer[..4096], 0).unwrap();
    s3::check(1, 0, &buffer[..4096]);
    store.control.change("object");
    // Partly cached: none of it is of the old version.
    following.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(2, 0, &buffer);
    let error = plain.read_at(&mut buffer[..10], 2 << 20).unwrap_err();
    assert_eq!((error.kind(), following.changes()), (ErrorKind::Changed, 1), "an error is the default");
    drop(following);
    store.control.change("object");
    let following = client.open_following(URL).unwrap();
    store.control.put_version("object", 10_000, 4);
    let error = following.read_exact_at(&mut buffer[..10], 2 << 20).unwrap_err();
    assert_eq!((error.kind(), following.len()), (ErrorKind::EndOfFile, 10_000), "{error}");
    let (mut one, mut other) = ([0; 10], [0; 20]);
    store.control.change("object");
    let mut ranges =
        [RangeRead { offset: 9000, buffer: &mut one }, RangeRead { offset: 0, buffer: &mut other }];
    following.read_ranges(&mut ranges).unwrap();
    s3::check(5, 9000, &one);
    s3::check(5, 0, &other);
    assert_eq!((following.changes(), following.is_empty()), (2, false));
}

#[tokio::test]
async fn a_client_that_follows_goes_on_with_the_new_version_by_async_calls_too() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store);
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let following = client.open_following_async(URL).await.unwrap();
    let mut buffer = vec![0; LEN + 10];
    assert_eq!(following.read_at_async(&mut buffer[..4096], 0).await.unwrap(), 4096);
    s3::check(1, 0, &buffer[..4096]);
    store.control.change("object");
    // Partly cached: none of it is of the old version.
    assert_eq!(following.read_at_async(&mut buffer, 0).await.unwrap(), LEN);
    s3::check(2, 0, &buffer[..LEN]);
    assert!(!following.refresh_async().await.unwrap());
    store.control.put_version("object", LEN + 10, 3);
    assert!(following.refresh_async().await.unwrap());
    assert_eq!((following.len(), following.changes()), (LEN as u64 + 10, 2));
    let file = folder.path().join("file");
    std::fs::write(&file, [1; 10]).unwrap();
    let error = client.open_following_async(file.to_str().unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Open, "{error}");
}

#[test]
fn a_client_that_follows_goes_on_at_the_next_server_with_the_object_as_it_is_there() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let first = serve(folder.path(), &store);
    let client = Client::connect(first.socket().to_str().unwrap()).unwrap();
    let (plain, following) = (client.open(URL).unwrap(), client.open_following(URL).unwrap());
    let mut buffer = vec![0; 9000];
    following.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(1, 0, &buffer);
    first.stop();
    store.control.change("object");
    let _second = serve(folder.path(), &store);
    following.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(2, 0, &buffer);
    assert_eq!(following.changes(), 1);
    assert_eq!(plain.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Changed);
}

/// 1. A local file is opened to be followed.
/// 2. Its reads are never of a kept version, and so `changes` and "one call is of one version" were not true.
#[test]
fn local_files_are_not_followed() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store);
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [1; 10]).unwrap();
    let path = path.to_str().unwrap();
    for name in [path.to_owned(), format!("file://{path}")] {
        let error = client.open_following(&name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Open);
        assert!(error.to_string().contains("is for objects"), "{error}");
    }
}

#[test]
fn a_client_that_follows_finds_growth_by_a_refresh() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store);
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let following = client.with_freshness(Freshness::Immutable).open_following(URL).unwrap();
    let mut buffer = vec![0; LEN + 10];
    assert_eq!(following.read_at(&mut buffer, 0).unwrap(), LEN);
    assert!(!following.refresh().unwrap());
    store.control.put_version("object", LEN + 10, 2);
    assert_eq!(following.read_at(&mut buffer[..10], LEN as u64).unwrap(), 0, "no fetch, and no question");
    assert!(following.refresh().unwrap());
    assert_eq!((following.changes(), following.len()), (1, LEN as u64 + 10));
    following.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(2, 0, &buffer);
    store.control.delete("object");
    assert_eq!(following.refresh().unwrap_err().kind(), ErrorKind::Open);
    assert_eq!(following.read_at(&mut buffer[..10], 0).unwrap(), 10, "the version that was open stays so");
}

/// 1. Two threads ask which version an object is. The store tells the first one, is written, and tells the second a
///    newer one.
/// 2. The first goes on with what it was told. The second went on with that as well.
#[test]
fn a_refresh_by_a_client_goes_on_with_no_older_version_than_the_store_has_told_it() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (store, folder) = (Arc::new(HeldStore::default()), tempfile::tempdir().unwrap());
    let put =
        |len| runtime().block_on(store.inner.put(&Key::from("object"), vec![0_u8; len].into())).unwrap();
    put(10);
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store.clone(), Options::new());
    let server = server.start(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
    let client = Client::connect(server.socket().to_str().unwrap()).unwrap();
    let following = &client.open_following(URL).unwrap();
    let refreshes: [&(dyn Fn(&FollowingFile) -> bool + Sync); 2] =
        [&|following| following.refresh().unwrap(), &|following| {
            runtime().block_on(following.refresh_async()).unwrap()
        }];
    for refresh in refreshes {
        std::thread::scope(|scope| {
            put(20);
            let held = store.hold_next();
            let first = scope.spawn(|| refresh(following));
            held.wait();
            put(30);
            let held_too = store.hold_next();
            let second = scope.spawn(|| refresh(following));
            held_too.wait();
            drop(held);
            assert!(first.join().unwrap() && following.len() == 20);
            drop(held_too);
            assert!(second.join().unwrap() && following.len() == 30, "{} bytes", following.len());
        });
    }
}

/// A store that tells neither ETags nor versions.
#[derive(Debug)]
struct Unnamed(InMemory);

impl std::fmt::Display for Unnamed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unnamed")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Unnamed {
    async fn put_opts(&self, path: &Key, payload: PutPayload, options: PutOptions) -> StoreResult<PutResult> {
        self.0.put_opts(path, payload, options).await
    }
    async fn put_multipart_opts(
        &self,
        path: &Key,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(path, options).await
    }
    async fn get_opts(&self, path: &Key, options: GetOptions) -> StoreResult<GetResult> {
        let mut result = self.0.get_opts(path, options).await?;
        result.meta.e_tag = None;
        Ok(result)
    }
    fn delete_stream(
        &self,
        paths: BoxStream<'static, StoreResult<Key>>,
    ) -> BoxStream<'static, StoreResult<Key>> {
        self.0.delete_stream(paths)
    }
    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.0.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Key>) -> StoreResult<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }
    async fn copy_opts(&self, from: &Key, to: &Key, options: CopyOptions) -> StoreResult<()> {
        self.0.copy_opts(from, to, options).await
    }
}

/// 1. An object has no strong ETag and no version id. A store over a client takes what it knows of it for current.
/// 2. The server ends, and another listens in its place. The handle that is kept cannot go on there, so each get
///    failed.
#[tokio::test]
async fn a_store_over_a_client_opens_an_object_without_a_name_for_its_version_at_the_next_server() {
    let (store, folder) = (Arc::new(Unnamed(InMemory::new())), tempfile::tempdir().unwrap());
    let socket = folder.path().join("q/s.sock");
    let serve = || {
        let cache = Cache::builder().memory(32 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://bucket", store.clone(), Options::new());
        server.start(socket.to_str().unwrap()).unwrap()
    };
    let key = Key::from("object");
    store.0.put(&key, s3::content(1, 90_000).into()).await.unwrap();
    let first = serve();
    let client = Client::connect(socket.to_str().unwrap()).unwrap();
    let over = ClientStore::builder(store.clone(), client, "s3://bucket");
    let over = over.freshness(Freshness::Immutable).build().unwrap();
    s3::check(1, 0, &over.get(&key).await.unwrap().bytes().await.unwrap());
    first.stop();
    store.0.put(&key, s3::content(2, 90_000).into()).await.unwrap();
    let _second = serve();
    s3::check(2, 0, &over.get_range(&key, 0..90_000).await.unwrap());
}

/// 1. Two gets at a time read by the handle that is kept, whose server has ended, of an object that cannot go on there.
/// 2. The first of them to find that out forgets the handle and opens another. The other found none to forget, and
///    failed.
#[tokio::test]
async fn all_gets_by_one_kept_handle_go_on_at_the_next_server() {
    let (store, folder) = (Arc::new(Unnamed(InMemory::new())), tempfile::tempdir().unwrap());
    let socket = folder.path().join("q/s.sock");
    let serve = || {
        let cache = Cache::builder().memory(32 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://bucket", store.clone(), Options::new());
        server.start(socket.to_str().unwrap()).unwrap()
    };
    let key = Key::from("object");
    store.0.put(&key, s3::content(1, 90_000).into()).await.unwrap();
    let mut server = serve();
    let client = Client::connect(socket.to_str().unwrap()).unwrap();
    let over = ClientStore::builder(store.clone(), client, "s3://bucket");
    let over = over.freshness(Freshness::Immutable).build().unwrap();
    s3::check(1, 0, &over.get(&key).await.unwrap().bytes().await.unwrap());
    for version in 2..6 {
        server.stop();
        store.0.put(&key, s3::content(version, 90_000).into()).await.unwrap();
        server = serve();
        let ranges = [0..50_000, 20_000..90_000];
        let (one, other, both) = tokio::join!(
            over.get_range(&key, 0..90_000),
            over.get_range(&key, 30_000..90_000),
            over.get_ranges(&key, &ranges)
        );
        s3::check(version, 0, &one.unwrap());
        s3::check(version, 30_000, &other.unwrap());
        for (bytes, range) in both.unwrap().iter().zip(ranges) {
            s3::check(version, range.start, bytes);
        }
    }
}

/// 1. An object has no strong ETag and no version id; its server ends, and another listens in its place.
/// 2. A plain handle cannot go on there, since it may be another version. The reader that follows it was told for ever
///    that the server has ended, too.
#[test]
fn a_client_that_follows_an_object_without_a_name_for_its_version_goes_on_at_the_next_server() {
    let (store, folder) = (Arc::new(Unnamed(InMemory::new())), tempfile::tempdir().unwrap());
    let path = folder.path().join("q/s.sock");
    let serve = || {
        let cache = Cache::builder().memory(32 << 20).build().unwrap();
        let server = Server::builder(cache).store("s3://bucket", store.clone(), Options::new());
        server.start(path.to_str().unwrap()).unwrap()
    };
    let put = |version| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let content = s3::content(version, 9000).into();
        runtime.block_on(store.0.put(&Key::from("object"), content)).unwrap();
    };
    put(1);
    let first = serve();
    let client = Client::connect(path.to_str().unwrap()).unwrap();
    let (plain, following) = (client.open(URL).unwrap(), client.open_following(URL).unwrap());
    let mut buffer = vec![0; 9000];
    following.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(1, 0, &buffer);
    first.stop();
    put(2);
    let _second = serve();
    following.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(2, 0, &buffer);
    assert_eq!(following.changes(), 1);
    assert_eq!(plain.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::OwnerDead);
}

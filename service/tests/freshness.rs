//! How fresh clients want objects to be: which calls ask the store, what a handle reads when the object was replaced
//! meanwhile, and what a write through a client's store does to what the server knows.
//!
//! Each test counts what the store was asked: a HEAD that was saved is one that the store has not seen.

use std::path::Path as FilePath;
use std::time::Duration;

use object_store::{ObjectStoreExt, path::Path};
use quinion::Cache;
use quinion_object::Options;
use quinion_service::{Client, ClientFile, ClientStore, ErrorKind, Freshness, Server};
use quinion_testing_s3 as s3;

const URL: &str = "s3://bucket/object";
const LEN: usize = 12 << 20;
const LONG: Freshness = Freshness::For(Duration::from_secs(3600));

fn serve(folder: &FilePath, store: &s3::Server, options: Options) -> Server {
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let server = Server::builder(cache).store("s3://bucket", store.store(), options);
    server.start(folder.join("q/s.sock").to_str().unwrap()).unwrap()
}

fn connect(server: &Server) -> Client {
    Client::connect(server.socket().to_str().unwrap()).unwrap()
}

fn is_of(file: &ClientFile, version: u32) {
    let mut buffer = vec![0; LEN];
    file.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(version, 0, &buffer);
}

#[test]
fn a_second_open_asks_the_store_unless_the_client_or_the_store_says_otherwise() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store, Options::new());
    let client = connect(&server);
    let requests = || (store.control.heads(), store.control.gets());
    is_of(&client.open(URL).unwrap(), 1);
    let (heads, gets) = requests();
    is_of(&client.open(URL).unwrap(), 1);
    assert_eq!(requests(), (heads + 1, gets), "by default each open asks");
    for freshness in [LONG, Freshness::Immutable] {
        let client = client.clone().with_freshness(freshness);
        is_of(&client.open(URL).unwrap(), 1);
        assert_eq!(requests(), (heads + 1, gets), "{freshness}");
    }
    drop(server);

    let folder = tempfile::tempdir().unwrap();
    let server = serve(folder.path(), &store, Options::new().freshness(LONG));
    let client = connect(&server);
    is_of(&client.open(URL).unwrap(), 1);
    let (heads, gets) = requests();
    is_of(&client.open(URL).unwrap(), 1);
    assert_eq!(requests(), (heads, gets), "the store's option is that of clients that say nothing");
    is_of(&client.clone().with_freshness(Freshness::Always).open(URL).unwrap(), 1);
    let expired = Freshness::For(Duration::from_nanos(1));
    is_of(&client.with_freshness(expired).open(URL).unwrap(), 1);
    assert_eq!(requests(), (heads + 2, gets));
}

/// 1. A client has read a part of an object, which is replaced then.
/// 2. Another open takes what is known: it is of the old version, and no byte of the new one is in it.
/// 3. What is missing of the old one is an error, by which the server knows, and the next open reads the new one.
#[test]
fn an_object_found_changed_by_one_client_is_asked_for_when_any_client_opens_it_next() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store, Options::new().whole_max(0).request_max(1 << 20));
    let client = connect(&server).with_freshness(Freshness::Immutable);
    let mut buffer = vec![0; 1 << 20];
    client.open(URL).unwrap().read_exact_at(&mut buffer, 0).unwrap();
    store.control.change("object");
    let old = client.open(URL).unwrap();
    old.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(1, 0, &buffer);
    let mut all = vec![0; LEN];
    assert_eq!(old.read_exact_at(&mut all, 0).unwrap_err().kind(), ErrorKind::Changed);
    is_of(&client.clone().with_freshness(LONG).open(URL).unwrap(), 2);
    is_of(&client.open(URL).unwrap(), 2);
    old.read_exact_at(&mut buffer, 0).unwrap();
    s3::check(1, 0, &buffer);
}

/// What a client's store knows is kept by that store: with what the server keeps besides it would be older than it
/// says, and a write through it would not be seen.
#[test]
fn a_clients_store_sees_its_own_writes_though_the_server_knows_older_metadata() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let server = serve(folder.path(), &store, Options::new().freshness(Freshness::Immutable));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    store.control.put("other", 1000);
    let path = Path::from("object");
    for freshness in [Freshness::Always, LONG, Freshness::Immutable] {
        store.control.put_version("object", LEN, 1);
        let client = connect(&server).with_freshness(Freshness::Immutable);
        let through = ClientStore::builder(store.store(), client.clone(), "s3://bucket").freshness(freshness);
        let through = through.build().unwrap();
        let size = || runtime.block_on(through.head(&path)).unwrap().size;
        assert_eq!(size(), LEN as u64, "{freshness}");
        runtime.block_on(through.copy(&Path::from("other"), &path)).unwrap();
        assert_eq!(size(), 1000, "{freshness}: what was written is read");
        assert_eq!(client.open(URL).unwrap().len(), 1000, "its question was the server's as well");
    }
}

/// 1. A client has an object open, and its server ends.
/// 2. The next server asks whether the object is the same, whatever is known of it.
#[test]
fn an_object_is_reopened_at_the_next_server_by_the_stores_word() {
    let (store, folder) = (s3::Server::with_object(LEN), tempfile::tempdir().unwrap());
    let options = || Options::new().freshness(Freshness::Immutable);
    let server = serve(folder.path(), &store, options());
    let file = connect(&server).open(URL).unwrap();
    is_of(&file, 1);
    server.stop();
    let server = serve(folder.path(), &store, options());
    drop(connect(&server).open(URL).unwrap());
    let heads = store.control.heads();
    is_of(&file, 1);
    assert_eq!(store.control.heads(), heads + 1);
    server.stop();
}

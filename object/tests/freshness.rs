//! How old what is known of an object may be when an open takes it for current, and what ends it earlier.
//!
//! The store counts HEADs and GETs, and each byte tells the version that it is of.

use std::time::Duration;

use object_store::path::Path;
use object_store::{Error as StoreError, ObjectStoreExt};
use quinion::Cache;
use quinion_object::{Error, FetchFailure, Freshness, ObjectCache, ObjectFile, Options, cached_with};

use quinion_testing_s3::{Fault, Server, check};

const MIB: usize = 1 << 20;
const LONG: Freshness = Freshness::For(Duration::from_secs(3600));

fn options() -> Options {
    Options::new().backoff(Duration::from_millis(1), Duration::from_millis(8)).whole_max(0)
}

fn objects(server: &Server, options: Options) -> ObjectCache {
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    ObjectCache::new(cache, server.store(), options).unwrap()
}

fn open(objects: &ObjectCache) -> ObjectFile {
    objects.open(&Path::from("object")).unwrap()
}

fn is_of(file: &ObjectFile, version: u32, offset: usize, len: usize) {
    let bytes = file.bytes(offset as u64..(offset + len) as u64).unwrap();
    check(version, offset as u64, &bytes);
}

#[test]
fn an_open_asks_unless_known_metadata_is_as_fresh_as_it_wants() {
    let server = Server::with_object(4 * MIB);
    let by_default = objects(&server, options());
    (0..3).for_each(|_| drop(open(&by_default)));
    assert_eq!(server.control.heads(), 3, "each asks, unless something else is said");
    for freshness in [LONG, Freshness::Immutable] {
        let (objects, before) = (objects(&server, options().freshness(freshness)), server.control.heads());
        (0..5).for_each(|_| is_of(&open(&objects), 1, 0, 4 * MIB));
        let gets = server.control.gets();
        assert_eq!(server.control.heads(), before + 1, "{freshness}: one question for all");
        // An open may say otherwise, either way.
        (0..2).for_each(|_| drop(open(&objects.clone().with_freshness(Freshness::Always))));
        let expired = objects.clone().with_freshness(Freshness::For(Duration::from_nanos(1)));
        (0..2).for_each(|_| drop(open(&expired)));
        assert_eq!(server.control.heads(), before + 5, "{freshness}");
        let first = objects.open_first(&Path::from("object"), 4 << 20).unwrap().0;
        is_of(&first, 1, 0, 4 * MIB);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        is_of(&runtime.block_on(objects.open_async(&Path::from("object"))).unwrap(), 1, 0, 4 * MIB);
        assert_eq!((server.control.heads(), server.control.gets()), (before + 5, gets), "{freshness}");
    }
    // What one open has asked serves another that would not have asked.
    let (objects, before) = (objects(&server, options()), server.control.heads());
    drop(open(&objects));
    drop(open(&objects.clone().with_freshness(Freshness::Immutable)));
    assert_eq!(server.control.heads(), before + 1);
}

/// 1. An object is known, and half of it cached. It is replaced.
/// 2. An open takes what is known: it reads the old version's bytes that are cached, and the rest is an error.
/// 3. By that error it is known to be another: the next open asks, and all of its bytes are the new version's.
#[test]
fn an_object_found_changed_is_asked_for_by_the_next_open_and_no_handle_mixes_versions() {
    let server = Server::with_object(16 * MIB);
    for freshness in [LONG, Freshness::Immutable] {
        let objects = objects(&server, options().freshness(freshness).request_max(1 << 20));
        let version = server.control.version("object").unwrap();
        is_of(&open(&objects), version, 0, MIB);
        server.control.change("object");
        let before = server.control.heads();
        let old = open(&objects);
        is_of(&old, version, 0, MIB);
        assert_eq!(server.control.heads(), before, "{freshness}: it is taken for current");
        // One request: what fails while the next open asks would have the open after that ask once more.
        let error = old.bytes(15 << 20..16 << 20).unwrap_err();
        assert!(matches!(&error, Error::Changed(_)), "{freshness}: {error}");
        let new = open(&objects);
        assert_eq!(server.control.heads(), before + 1, "{freshness}");
        is_of(&new, version + 1, 0, 16 * MIB);
        // The old handle goes on as it was: what it fails of says nothing of the new version.
        is_of(&old, version, 0, MIB);
        assert!(old.bytes(12 << 20..16 << 20).is_err());
        is_of(&open(&objects), version + 1, 0, 16 * MIB);
        assert_eq!(server.control.heads(), before + 1, "{freshness}");
    }
}

#[test]
fn an_object_found_deleted_is_known_no_more() {
    let server = Server::with_object(4 * MIB);
    let objects = objects(&server, options().freshness(Freshness::Immutable));
    let old = open(&objects);
    server.control.delete("object");
    let path = Path::from("object");
    let not_found = |error: &Error| matches!(error, Error::Open { source: StoreError::NotFound { .. }, .. });
    assert_eq!(open(&objects).len(), 4 << 20);
    let error = objects.clone().with_freshness(Freshness::Always).open(&path).unwrap_err();
    assert!(not_found(&error), "{error}");
    let error = objects.open(&path).unwrap_err();
    assert!(not_found(&error), "{error}");
    // The same by a fetch.
    server.control.put("object", 4 * MIB);
    drop(open(&objects));
    server.control.delete("object");
    assert!(matches!(old.bytes(0..1 << 20).unwrap_err(), Error::Changed(_)));
    let error = objects.open(&path).unwrap_err();
    assert!(not_found(&error), "{error}");
}

#[test]
fn a_write_through_the_cached_store_forgets_the_metadata() {
    let server = Server::with_object(MIB);
    let objects = objects(&server, options().freshness(Freshness::Immutable));
    let store = cached_with(objects.clone(), Freshness::Immutable);
    assert_eq!(open(&objects).len(), MIB as u64);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let path = Path::from("object");
    let copied = runtime.block_on(async {
        server.control.put("other", 2 * MIB);
        store.copy(&Path::from("other"), &path).await
    });
    copied.unwrap();
    assert_eq!(open(&objects).len(), 2 * MIB as u64, "a write of one's own is seen at once");
    server.control.put("object", 3 * MIB);
    assert_eq!(open(&objects).len(), 2 * MIB as u64);
    store.invalidate_all();
    assert_eq!(open(&objects).len(), 3 * MIB as u64);
}

/// The store did not say that the object is as it was, so nothing new is known of what has failed.
#[test]
fn an_open_that_does_not_ask_leaves_failed_ranges_alone() {
    let server = Server::with_object(4 * MIB);
    let patient = options().attempts_max(1).failure_pause(Duration::from_secs(3600));
    let objects = objects(&server, patient.freshness(Freshness::Immutable));
    let file = open(&objects);
    server.control.trouble([Fault::Status(503)]);
    let failed = |file: &ObjectFile| match file.bytes(0..1 << 20).unwrap_err() {
        Error::Fetch(error) => assert!(matches!(error.failure(), FetchFailure::Store(_)), "{error}"),
        error => panic!("{error}"),
    };
    failed(&file);
    let gets = server.control.gets();
    failed(&open(&objects));
    assert_eq!(server.control.gets(), gets, "it is refused by what is remembered");
    is_of(&open(&objects.clone().with_freshness(Freshness::Always)), 1, 0, MIB);
}

#[test]
fn another_client_of_the_store_asks_anew() {
    let server = Server::with_object(MIB);
    let named = || options().freshness(Freshness::Immutable).store_name("the store");
    let objects = objects(&server, named());
    drop(open(&objects));
    objects.set_store(server.store(), named()).unwrap();
    drop(open(&objects));
    assert_eq!(server.control.heads(), 2);
    drop(open(&objects));
    assert_eq!(server.control.heads(), 2);
}

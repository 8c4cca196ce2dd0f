//! An object that is replaced while a client has it open: an error by default, and the new version for those that
//! follow it, with the server that they began with or another.
//!
//! Each byte tells its version, so a read of bytes of two versions would be seen.

use std::path::Path;
use std::time::Duration;

use quinion::Cache;
use quinion_object::Options;
use quinion_service::{Client, ErrorKind, RangeRead, Server};
use quinion_testing_s3 as s3;

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

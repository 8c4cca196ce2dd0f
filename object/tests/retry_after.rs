//! A store that is busy is left alone for as long as it says, and one that refuses for good is not asked again.
//!
//! Nothing here measures time: pauses are counted, and requests.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, RetryConfig};
use quinion::Cache;
use quinion_object::{Error, FetchFailure, ObjectCache, Options, RetryAfterConnector};
use quinion_testing_s3::{Connector, Fault, FaultPlan, Server, check};

const LEN: usize = 300_000;

/// A store that keeps its own retries, as users' clients have them.
fn store(server: &Server) -> Arc<dyn ObjectStore> {
    let retry = RetryConfig { max_retries: 10, ..RetryConfig::default() };
    let builder = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_endpoint(format!("http://{}", server.address()))
        .with_allow_http(true)
        .with_skip_signature(true)
        .with_retry(retry)
        .with_http_connector(RetryAfterConnector(Connector));
    Arc::new(builder.build().unwrap())
}

fn objects(server: &Server, deadline: Duration, attempts: u32) -> ObjectCache {
    let options = Options::new()
        .backoff(Duration::from_millis(1), Duration::from_millis(1))
        .stall_max(Duration::from_secs(60))
        .failure_pause(Duration::from_secs(3600)) // one fetch for a test, also if a prefetch was first
        .attempts_max(attempts)
        .deadline(deadline);
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    ObjectCache::new(cache, store(server), options).unwrap()
}

#[test]
fn a_fetch_waits_for_as_long_as_the_store_says() {
    for (status, value, advised) in [(503, "0", 1), (429, "1", 1), (503, "absurd", 0), (429, "-1", 0)] {
        let server = Server::with_object(LEN);
        server.control.set_retry_after(Some(value));
        let objects = objects(&server, Duration::from_secs(120), 8);
        let file = objects.open(&Path::from("object")).unwrap();
        server.control.trouble([Fault::Status(status)]);
        let mut buffer = vec![0; LEN];
        assert_eq!(file.read_at(&mut buffer, 0).unwrap(), LEN);
        check(1, 0, &buffer);
        assert_eq!(server.control.gets(), 2, "the store's client has not asked by itself as well");
        let stats = objects.stats();
        assert_eq!(stats.advised, advised, "{value}");
        assert!(advised == 0 || stats.retries == 1, "{stats:?}");
    }
}

#[test]
fn an_open_and_a_first_get_wait_as_well() {
    let server = Server::with_object(LEN);
    server.control.set_retry_after(Some("0"));
    let objects = objects(&server, Duration::from_secs(120), 8);
    server.control.trouble([Fault::Status(503)]);
    let (file, _) = objects.open_first(&Path::from("object"), LEN as u64).unwrap();
    let mut buffer = vec![0; LEN];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), LEN);
    check(1, 0, &buffer);
    assert_eq!((objects.stats().advised, server.control.heads()), (1, 1));
}

/// 1. The first GET of an open is answered 503, with a `Retry-After` as long as the deadline.
/// 2. It waits for half of the deadline or more; then the HEAD had a deadline of its own, and so two attempts.
#[test]
fn an_open_that_was_told_to_wait_keeps_its_deadline() {
    let server = Server::with_object(LEN);
    server.control.set_retry_after(Some("3600"));
    server.control.trouble([Fault::Status(503)]);
    // Chance answers HEADs alone here, and by this seed the first three of them by 503 and 429.
    server.control.set_plan(Some(FaultPlan { seed: 872, per_mille: 1000, bytes_max: 0 }));
    let deadline = Duration::from_secs(2);
    let options = Options::new().backoff(deadline, deadline).stall_max(Duration::from_secs(60));
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let objects = ObjectCache::new(cache, store(&server), options.deadline(deadline)).unwrap();
    objects.open_first(&Path::from("object"), LEN as u64).unwrap_err();
    // A pause is half of the deadline at least, and so there is none before its end after the first.
    assert_eq!((objects.stats().gets, objects.stats().heads), (1, 1));
}

#[test]
fn a_store_that_asks_for_more_than_the_deadline_is_asked_few_times_and_then_the_read_fails() {
    let server = Server::with_object(LEN);
    server.control.set_retry_after(Some("3600"));
    let objects = objects(&server, Duration::from_secs(4), 10_000);
    let file = objects.open(&Path::from("object")).unwrap();
    server.control.trouble([Fault::Status(503); 10_000]);
    let error = file.read_at(&mut [0; 10], 0).unwrap_err();
    assert!(
        matches!(&error, Error::Fetch(fetch) if matches!(fetch.failure(), FetchFailure::Store(_))),
        "{error}"
    );
    assert!(error.to_string().contains("to be asked again after 3600 s"), "{error}");
    let gets = server.control.gets();
    // Each pause is half of the time that is left, and more than a millisecond.
    assert!((2..=13).contains(&gets), "{gets} GETs in four seconds");
}

#[test]
fn a_request_that_the_store_calls_wrong_is_sent_once() {
    let server = Server::with_object(LEN);
    let objects = objects(&server, Duration::from_secs(120), 8);
    let file = objects.open(&Path::from("object")).unwrap();
    server.control.trouble([Fault::Status(400)]);
    let error = file.read_at(&mut [0; 10], 0).unwrap_err();
    assert!(error.to_string().contains("InvalidArgument"), "{error}");
    assert_eq!((server.control.gets(), objects.stats().retries), (1, 0));
    let (again, mut buffer) = (objects.open(&Path::from("object")).unwrap(), [0; 10]);
    assert_eq!(again.read_at(&mut buffer, 0).unwrap(), 10, "an open has it asked for again");
    check(1, 0, &buffer);
}

/// Requests that no fetch has sent, as lists and writes, keep the retries of the store's client.
#[test]
fn requests_of_others_are_left_to_the_client_of_the_store() {
    let server = Server::with_object(LEN);
    server.control.set_retry_after(Some("0"));
    server.control.trouble([Fault::Status(503)]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let bytes = runtime.block_on(async { store(&server).get(&Path::from("object")).await?.bytes().await });
    check(1, 0, &bytes.unwrap());
    assert_eq!(server.control.gets(), 2);
}

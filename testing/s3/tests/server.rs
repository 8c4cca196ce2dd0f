//! The server by itself: what it answers, and that each fault is what it is called.
//!
//! The client is the one that the tests of other packages have. A fault is judged by what that client sees, which those
//! tests are about, and by the server's counts.

use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{Error, GetOptions, ObjectStore, ObjectStoreExt, Result};
use quinion_testing_s3::{Fault, FaultPlan, Server, byte, check, content, version_of};

const LEN: usize = 300_000;

fn path() -> Path {
    Path::from("object")
}

fn if_match(tag: &str) -> GetOptions {
    GetOptions::new().with_if_match(Some(tag.to_owned()))
}

#[tokio::test]
async fn a_store_of_it_reads_writes_lists_and_deletes() {
    let server = Server::new();
    let store = server.store();
    for key in ["a/one", "a/two", "b"] {
        store.put(&Path::from(key), content(7, 1000).into()).await.unwrap();
    }
    let meta = store.head(&Path::from("b")).await.unwrap();
    assert_eq!((meta.size, meta.e_tag.as_deref()), (1000, Some("\"v1\"")));
    check(7, 10, &store.get_range(&Path::from("b"), 10..900).await.unwrap());
    store.copy(&Path::from("b"), &Path::from("a/one")).await.unwrap();
    assert_eq!(store.head(&Path::from("a/one")).await.unwrap().e_tag.as_deref(), Some("\"v2\""));
    let listed: Vec<_> =
        store.list(Some(&Path::from("a"))).map_ok(|meta| meta.location).try_collect().await.unwrap();
    assert_eq!(listed, [Path::from("a/one"), Path::from("a/two")]);
    let shallow = store.list_with_delimiter(None).await.unwrap();
    assert_eq!((shallow.common_prefixes, shallow.objects.len()), (vec![Path::from("a")], 1));
    store.delete(&Path::from("b")).await.unwrap();
    let error = store.get(&Path::from("b")).await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    let requests = server.control.requests();
    assert_eq!((requests.gets, requests.heads, requests.lists), (2, 2, 2), "{requests:?}");
}

#[tokio::test]
async fn conditions_are_looked_at_and_refusals_counted() {
    let server = Server::with_object(LEN);
    let store = server.store();
    let told = store.head(&path()).await.unwrap();
    server.control.change("object");
    let error = store.get_opts(&path(), if_match("\"v1\"")).await.unwrap_err();
    assert!(matches!(error, Error::Precondition { .. }), "{error}");
    let unmodified = GetOptions::new().with_if_unmodified_since(Some(told.last_modified));
    let error = store.get_opts(&path(), unmodified).await.unwrap_err();
    assert!(matches!(error, Error::Precondition { .. }), "{error}");
    let new = GetOptions::new().with_if_none_match(Some("\"v2\""));
    let error = store.get_opts(&path(), new).await.unwrap_err();
    assert!(matches!(error, Error::NotModified { .. }), "{error}");
    let result = store.get_opts(&path(), if_match("\"v2\"")).await.unwrap();
    assert_eq!(result.meta.e_tag.as_deref().and_then(version_of), Some(2));
    assert_eq!(server.control.refused(), 2);
}

/// What a GET of `10..LEN` under `fault` brings, and the version that the object has afterwards.
async fn under(fault: Fault) -> (Result<Vec<u8>>, u32) {
    let server = Server::with_object(LEN);
    server.control.trouble([fault]);
    let store = server.store();
    let got = tokio::time::timeout(Duration::from_secs(2), async {
        store.get_opts(&path(), if_match("\"v1\"").with_range(Some(10..LEN as u64 - 10))).await?.bytes().await
    });
    let stalled = || Err(Error::Generic { store: "test", source: "it stalls".into() });
    let got = got.await.unwrap_or_else(|_| stalled()).map(|bytes| bytes.to_vec());
    let (kinds, version) = (server.control.faults(), server.control.version("object").unwrap());
    assert!(matches!(kinds[..], [(_, 1)]), "{kinds:?}");
    (got, version)
}

#[tokio::test]
async fn each_fault_does_as_its_name_says() {
    let failed = |got: Result<Vec<u8>>, words: &str| {
        let error = got.unwrap_err();
        // The words may be of an error below.
        let text = format!("{error:?}").to_lowercase();
        assert!(text.contains(words), "{words}: {text}");
    };
    for (status, words) in [(503, "slowdown"), (429, "toomanyrequests"), (500, "internalerror")] {
        failed(under(Fault::Status(status)).await.0, words);
    }
    failed(under(Fault::Cut(100_000)).await.0, "incomplete");
    failed(under(Fault::Reset(100_000)).await.0, "reset");
    failed(under(Fault::Stall(100_000)).await.0, "it stalls");
    failed(under(Fault::Whole).await.0, "notpartial");
    let (short, _) = under(Fault::Short(100_000)).await;
    let short = short.unwrap();
    check(1, 10, &short);
    assert_eq!(short.len(), 100_000);
    let (long, _) = under(Fault::Longer(77)).await;
    let long = long.unwrap();
    check(1, 10, &long[..LEN - 20]);
    assert_eq!(long.len(), LEN - 20 + 77);
    let (whole, version) = under(Fault::ChangedWithin(50_000)).await;
    check(1, 10, &whole.unwrap());
    assert_eq!(version, 2);
    for fault in [Fault::ChangedBefore, Fault::ChangedAfter(9)] {
        let (got, version) = under(fault).await;
        assert!(got.is_err() && version == 2, "{fault:?}");
    }
    let (new, version) = under(Fault::Unconditional).await;
    check(2, 10, &new.unwrap());
    assert_eq!(version, 2);
    let (late, _) = under(Fault::Late(5)).await;
    check(1, 10, &late.unwrap());
}

#[tokio::test]
async fn another_range_says_which_it_is() {
    let server = Server::with_object(LEN);
    server.control.trouble([Fault::OtherRange]);
    let wanted = GetOptions::new().with_range(Some(8192..16_384));
    // The client of the crate compares it itself, or tells it.
    match server.store().get_opts(&path(), wanted).await {
        Ok(result) => {
            let range = result.range.clone();
            assert_ne!(range, 8192..16_384);
            check(1, range.start, &result.bytes().await.unwrap());
        }
        Err(error) => assert!(error.to_string().contains("8192..16384, got 4096..12288"), "{error}"),
    }
}

#[tokio::test]
async fn latency_and_bandwidth_are_least_times() {
    let server = Server::with_object(LEN);
    let store = server.store();
    server.control.set_latency(Duration::from_millis(30));
    let begun = Instant::now();
    store.head(&path()).await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(30));
    server.control.set_bandwidth(10 * LEN as u64);
    let begun = Instant::now();
    store.get(&path()).await.unwrap().bytes().await.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(130));
}

#[tokio::test]
async fn a_plan_draws_faults_of_every_kind_and_none_when_it_is_taken_away() {
    let server = Server::with_object(LEN);
    let store = server.store();
    server.control.set_plan(Some(FaultPlan { seed: 3, per_mille: 1000, bytes_max: 1000 }));
    for _ in 0..400 {
        let get = async { store.get_range(&path(), 0..2000).await };
        let _ = tokio::time::timeout(Duration::from_millis(100), get).await;
    }
    let faults = server.control.faults();
    assert_eq!(faults.len(), 13, "{faults:?}");
    server.control.set_plan(None);
    let version = server.control.version("object").unwrap();
    let bytes = store.get_range(&path(), 100..2000).await.unwrap();
    assert!(bytes.iter().enumerate().all(|(at, &is)| is == byte(version, 100 + at as u64)));
}

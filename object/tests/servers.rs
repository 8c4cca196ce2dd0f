//! Real S3 servers that others wrote: versitygw, over files, and moto, over memory. Both run on loopback.
//!
//! ```text
//!   cached store --signed HTTP--> server <--signed HTTP-- bare store      two buckets, the same calls, equal answers
//! ```
//!
//! `scripts/setup` installs the servers in the target folder. Where it could not (versitygw takes Go, moto the registry
//! of Python packages), the tests of that server say SKIPPED, or fail under `cargo xtask test` (`real/skip.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use object_store::aws::AmazonS3;
use object_store::{ObjectStore, ObjectStoreExt, integration, path::Path};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quinion::Cache;
use quinion_object::{CachedStore, Freshness, ObjectCache, Options, cached_with};
use quinion_testing_s3 as s3;

mod differential;
mod real;

use differential::{calls, is_defined, kind, made};
use real::{Server, or_skipped};

/// Calls of a differential run: a server makes some hundred in a second.
const CALLS: usize = 400;

fn bucket(server: &Server, name: &str) -> Arc<AmazonS3> {
    Arc::new(server.bucket_builder(name).with_http_connector(s3::Connector).build().unwrap())
}

fn over(store: Arc<dyn ObjectStore>, options: Options, freshness: Freshness) -> CachedStore {
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    cached_with(ObjectCache::new(cache, store, options).unwrap(), freshness)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Without those tests that the bare store fails on versitygw as well: it compares conditions of time to parts of a
/// second, and shows whole ones.
async fn the_crates_own_tests(store: &CachedStore) {
    integration::put_get_delete_list(store).await;
    integration::list_with_delimiter(store).await;
    integration::rename_and_copy(store).await;
    integration::copy_rename_nonexistent_object(store).await;
    integration::stream_get(store).await;
    store.objects().cache().check().unwrap();
}

/// What others write to the cached bucket is written to the bare one as well.
async fn compare(server: &Server, options: Options, name: &str) {
    let bare = bucket(server, &format!("bare-{name}"));
    let below = bucket(server, &format!("below-{name}"));
    let cached = over(below.clone(), options, Freshness::Always);
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let drawn = calls();
    for at in 0..CALLS {
        let call = drawn.new_tree(&mut runner).unwrap().current();
        if !is_defined(&call, &*bare).await {
            continue;
        }
        let one = made(&call, at, &*bare, Some(&*bare)).await;
        let other = made(&call, at, &cached, Some(&*below)).await;
        assert_eq!(one, other, "call {at}: {call:?}");
    }
    cached.objects().cache().check().unwrap();
}

/// A read is of one version, as a whole, or an error that says so.
fn read_while_replaced(server: &Server) {
    const LEN: usize = 16 << 20;
    let below = bucket(server, "replaced");
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
    let store = over(bucket(&server, "own"), Options::new(), Freshness::Always);
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

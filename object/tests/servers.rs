//! Real servers that others wrote, on loopback: versitygw and moto, of S3; fake-gcs-server, of Google Cloud Storage;
//! Azurite, of Azure Blob Storage.
//!
//! ```text
//!   cached store --HTTP--> server <--HTTP-- bare store      two buckets, the same calls, equal answers
//! ```
//!
//! `scripts/setup` installs the servers in the target folder. Where it could not, the tests of that server say SKIPPED,
//! or fail under `cargo xtask test` (`real/skip.rs`).
//!
//! Where a server is not as the store whose protocol it speaks, a test has that in its name: it ends when a newer
//! version of the server mends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::TryStreamExt;
use object_store::aws::AmazonS3;
use object_store::{Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, integration, path::Path};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quinion::Cache;
use quinion_object::{CachedStore, Error as ObjectError, Freshness, ObjectCache, Options, cached_with};
use quinion_testing_s3 as s3;

mod clouds;
mod differential;
mod real;

use clouds::{azure, google, google_xml};
use differential::{Call, calls, is_defined, kind, made};
use real::{Server, or_skipped};

/// Calls of a differential run: a server makes some hundred in a second.
const CALLS: usize = 400;
/// Azurite, in one thread of JavaScript, makes some tens of calls in a second, and takes long for large bodies.
const CALLS_OF_AZURITE: usize = 80;

fn bucket(server: &Server, name: &str) -> Arc<AmazonS3> {
    Arc::new(server.bucket_builder(name).with_http_connector(s3::Connector).build().unwrap())
}

fn over(store: Arc<dyn ObjectStore>, options: Options, freshness: Freshness) -> CachedStore {
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    cached_with(ObjectCache::new(cache, store, options).unwrap(), freshness)
}

fn small_fills() -> Options {
    Options::new().whole_max(0).fill_min(0).gap_max(0)
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

/// A comparison of the same calls of a bare store and of a cached one. Others write to both in the same way.
struct Comparison {
    bare: Arc<dyn ObjectStore>,
    below: Arc<dyn ObjectStore>,
    options: Options,
    calls: usize,
    /// Whether the store itself takes such a call.
    takes: fn(&Call) -> bool,
}

impl Comparison {
    fn of_s3(server: &Server, options: Options, name: &str) -> Self {
        let bare = bucket(server, &format!("bare-{name}"));
        let below = bucket(server, &format!("below-{name}"));
        Self { bare, below, options, calls: CALLS, takes: |_| true }
    }

    async fn run(self) {
        let Self { bare, below, options, calls: count, takes } = self;
        let cached = over(below.clone(), options, Freshness::Always);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
        let mut runner = TestRunner::new_with_rng(Config::default(), rng);
        let (mut of_one, mut of_other) = (Vec::new(), Vec::new());
        let drawn = calls();
        for at in 0..count {
            let call = drawn.new_tree(&mut runner).unwrap().current();
            if !takes(&call) || !is_defined(&call, &*bare).await {
                continue;
            }
            let one = made(&call, at, &*bare, Some(&*bare)).await;
            let other = made(&call, at, &cached, Some(&*below)).await;
            let (one, other) = (numbered(&one, &mut of_one), numbered(&other, &mut of_other));
            assert_eq!(one, other, "call {at}: {call:?}");
        }
        cached.objects().cache().check().unwrap();
    }
}

/// With each ETag of Azure's, which no two puts share, as the number of its first appearance in `seen`.
fn numbered(words: &str, seen: &mut Vec<String>) -> String {
    let mut parts = words.split("0x");
    let mut all = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(part.len());
        let at = seen.iter().position(|tag| *tag == part[..end]).unwrap_or(seen.len());
        if at == seen.len() {
            seen.push(part[..end].to_owned());
        }
        all.push_str(&format!("tag {at}{}", &part[end..]));
    }
    all
}

/// A read is of one version, as a whole, or an error that says so.
fn read_while_replaced(below: Arc<dyn ObjectStore>, versions: u32) {
    const LEN: usize = 16 << 20;
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
            for version in 1..versions {
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
                    let version = (0..versions).find(|&version| bytes == s3::content(version, LEN));
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
        Comparison::of_s3(&server, Options::new(), "large").run().await;
        Comparison::of_s3(&server, small_fills(), "small").run().await;
    });
}

#[test]
fn an_object_that_is_replaced_on_versitygw_is_read_as_one_version() {
    let name = "an_object_that_is_replaced_on_versitygw_is_read_as_one_version";
    let Some(server) = or_skipped(Server::versitygw(), name, "versitygw") else { return };
    read_while_replaced(bucket(&server, "replaced"), 30);
}

#[test]
fn moto_is_read_through_the_cache_as_without() {
    let name = "moto_is_read_through_the_cache_as_without";
    let Some(server) = or_skipped(Server::moto(), name, "moto") else { return };
    runtime().block_on(async {
        Comparison::of_s3(&server, Options::new(), "large").run().await;
        Comparison::of_s3(&server, small_fills(), "small").run().await;
    });
}

#[test]
fn an_object_that_is_replaced_on_moto_is_read_as_one_version() {
    let name = "an_object_that_is_replaced_on_moto_is_read_as_one_version";
    let Some(server) = or_skipped(Server::moto(), name, "moto") else { return };
    read_while_replaced(bucket(&server, "replaced"), 30);
}

/// Bytes that a handle reads are of the version that it was opened with, whether the server knows conditions or not.
fn read_as_files(below: Arc<dyn ObjectStore>, has_versions: bool) {
    const LEN: usize = 3 << 20;
    let path = Path::from("folder/with a space, a %25 and \u{fc}");
    let put = |version: u32, len: usize| {
        runtime().block_on(below.put(&path, s3::content(version, len).into())).unwrap();
    };
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let objects = ObjectCache::new(cache, below.clone(), small_fills()).unwrap();
    assert!(matches!(
        objects.open(&path).unwrap_err(),
        ObjectError::Open { source: Error::NotFound { .. }, .. }
    ));
    put(1, LEN);
    let (first, following) = (objects.open(&path).unwrap(), objects.open_following(&path).unwrap());
    assert_eq!((first.len(), first.meta().version.is_some()), (LEN as u64, has_versions));
    assert!(first.meta().e_tag.is_some());
    s3::check(1, 0, &first.bytes(0..9000).unwrap());
    for (range, bytes) in [(0..1, 1), (5..100_005, 100_000), (LEN as u64 - 8..LEN as u64, 8)] {
        let read = &first.read_ranges(std::slice::from_ref(&range)).unwrap()[0];
        assert_eq!(read.len(), bytes);
        s3::check(1, range.start, read);
    }
    let mut buffer = [0; 4096];
    assert_eq!(following.read_at(&mut buffer, 0).unwrap(), 4096);
    s3::check(1, 0, &buffer);
    // Of the same length, within the same second.
    put(2, LEN);
    s3::check(1, 0, &first.bytes(0..9000).unwrap());
    let error = first.bytes(1 << 20..2 << 20).unwrap_err();
    assert!(matches!(error, ObjectError::Changed(_)), "{error}");
    let second = objects.open(&path).unwrap();
    s3::check(2, 0, &second.bytes(0..LEN as u64).unwrap());
    assert_eq!(following.read_at(&mut buffer, 2 << 20).unwrap(), 4096);
    s3::check(2, 2 << 20, &buffer);
    assert!(objects.open(&path).unwrap().meta() == second.meta());
    runtime().block_on(below.delete(&path)).unwrap();
    s3::check(2, 0, &second.bytes(0..LEN as u64).unwrap());
    assert!(matches!(
        objects.open(&path).unwrap_err(),
        ObjectError::Open { source: Error::NotFound { .. }, .. }
    ));
    objects.cache().check().unwrap();
}

#[test]
fn objects_of_azurite_are_read_as_files_of_one_version() {
    let name = "objects_of_azurite_are_read_as_files_of_one_version";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    read_as_files(runtime().block_on(azure(&server, "files")), false);
}

/// Azure's own store begins after the offset. Azurite ignores it: what it lists, the cached store lists too.
#[test]
fn azurite_lists_objects_before_an_offset_as_well() {
    let name = "azurite_lists_objects_before_an_offset_as_well";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    runtime().block_on(async {
        let below = azure(&server, "offset").await;
        let store = over(below.clone(), Options::new(), Freshness::Always);
        for key in ["a", "b", "c"] {
            store.put(&Path::from(key), key.into()).await.unwrap();
        }
        for store in [&*below as &dyn ObjectStore, &store] {
            let listed =
                store.list_with_offset(None, &Path::from("b")).try_collect::<Vec<_>>().await.unwrap();
            assert_eq!(listed.iter().map(|meta| meta.location.as_ref()).collect::<String>(), "abc");
        }
    });
}

/// Without the one that lists from an offset.
#[test]
fn azurite_passes_the_crates_own_tests() {
    let name = "azurite_passes_the_crates_own_tests";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    runtime().block_on(async {
        let store = over(azure(&server, "own").await, Options::new(), Freshness::Always);
        integration::list_with_delimiter(&store).await;
        integration::rename_and_copy(&store).await;
        integration::copy_if_not_exists(&store).await;
        integration::copy_rename_nonexistent_object(&store).await;
        integration::stream_get(&store).await;
        // These leave objects.
        integration::multipart_race_condition(&store, false).await;
        integration::put_opts(&store, true).await;
        store.objects().cache().check().unwrap();
    });
}

#[test]
fn azurite_is_read_through_the_cache_as_without() {
    let name = "azurite_is_read_through_the_cache_as_without";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    runtime().block_on(async {
        for (name, options) in [("large", Options::new()), ("small", small_fills())] {
            let bare = azure(&server, &format!("bare-{name}")).await;
            let below = azure(&server, &format!("below-{name}")).await;
            // The next test has the last bytes, for which the bare client has no request.
            let takes = |call: &Call| {
                !matches!(call, Call::Get { range: Some(GetRange::Suffix(_)), head: false, .. })
            };
            Comparison { bare, below, options, calls: CALLS_OF_AZURITE, takes }.run().await;
        }
    });
}

#[test]
fn the_last_bytes_of_an_object_of_azure_are_read_by_the_cache_and_not_by_the_bare_client() {
    let name = "the_last_bytes_of_an_object_of_azure_are_read_by_the_cache_and_not_by_the_bare_client";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    runtime().block_on(async {
        let (below, path) = (azure(&server, "last").await, Path::from("object"));
        let cached = over(below.clone(), Options::new(), Freshness::Always);
        below.put(&path, s3::content(1, 5 << 20).into()).await.unwrap();
        let last = || GetOptions::new().with_range(Some(GetRange::Suffix(100)));
        let error = below.get_opts(&path, last()).await.unwrap_err();
        assert!(matches!(error, Error::NotSupported { .. }), "{error}");
        let bytes = cached.get_opts(&path, last()).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes.len(), 100);
        s3::check(1, (5 << 20) - 100, &bytes);
    });
}

#[test]
fn an_object_that_is_replaced_on_azurite_is_read_as_one_version() {
    let name = "an_object_that_is_replaced_on_azurite_is_read_as_one_version";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    read_while_replaced(runtime().block_on(azure(&server, "replaced")), 6);
}

#[test]
fn objects_of_fake_gcs_server_are_read_as_files_of_one_generation() {
    let name = "objects_of_fake_gcs_server_are_read_as_files_of_one_generation";
    let Some(server) = or_skipped(Server::fake_gcs_server(), name, "fake-gcs-server") else { return };
    read_as_files(google(&server, "files"), true);
}

#[test]
fn fake_gcs_server_is_read_through_the_cache_as_without() {
    let name = "fake_gcs_server_is_read_through_the_cache_as_without";
    let Some(server) = or_skipped(Server::fake_gcs_server(), name, "fake-gcs-server") else { return };
    runtime().block_on(async {
        for (name, options) in [("large", Options::new()), ("small", small_fills())] {
            let bare = google(&server, &format!("bare-{name}"));
            let below = google(&server, &format!("below-{name}"));
            // It has no uploads in parts by the XML API.
            let takes = |call: &Call| !matches!(call, Call::Upload { .. });
            Comparison { bare, below, options, calls: CALLS, takes }.run().await;
        }
    });
}

#[test]
fn an_object_that_is_replaced_on_fake_gcs_server_is_read_as_one_version() {
    let name = "an_object_that_is_replaced_on_fake_gcs_server_is_read_as_one_version";
    let Some(server) = or_skipped(Server::fake_gcs_server(), name, "fake-gcs-server") else { return };
    read_while_replaced(google(&server, "replaced"), 30);
}

/// Google's own store heeds `If-Match` of a GET. This server answers with the bytes of another version, and says of
/// which: so the cache compares each answer.
#[test]
fn fake_gcs_server_ignores_conditions_of_a_get() {
    let name = "fake_gcs_server_ignores_conditions_of_a_get";
    let Some(server) = or_skipped(Server::fake_gcs_server(), name, "fake-gcs-server") else { return };
    runtime().block_on(async {
        let (store, path) = (google(&server, "conditions"), Path::from("object"));
        let put = store.put(&path, "bytes".into()).await.unwrap();
        for options in [
            GetOptions::new().with_if_match(Some("\"another\"")),
            GetOptions::new().with_if_none_match(put.e_tag.clone()),
            GetOptions::new().with_if_unmodified_since(Some(std::time::UNIX_EPOCH)),
        ] {
            assert_eq!(store.get_opts(&path, options).await.unwrap().bytes().await.unwrap(), "bytes");
        }
        // What it heeds is the generation.
        let of = |version: String| store.get_opts(&path, GetOptions::new().with_version(Some(version)));
        assert_eq!(of(put.version.unwrap()).await.unwrap().bytes().await.unwrap(), "bytes");
        assert!(matches!(of("5".to_owned()).await.unwrap_err(), Error::NotFound { .. }));
    });
}

/// Google's own store has all of them. So the other tests write by the JSON API (`clouds/mod.rs`).
#[test]
fn fake_gcs_server_refuses_puts_and_copies_by_the_xml_api_and_the_cache_says_so() {
    let name = "fake_gcs_server_refuses_puts_and_copies_by_the_xml_api_and_the_cache_says_so";
    let Some(server) = or_skipped(Server::fake_gcs_server(), name, "fake-gcs-server") else { return };
    runtime().block_on(async {
        let (others, path, to) = (google(&server, "xml"), Path::from("object"), Path::from("to"));
        others.put(&path, "bytes".into()).await.unwrap();
        let store = over(Arc::new(google_xml(&server, "xml")), Options::new(), Freshness::Immutable);
        let bytes = async || store.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes().await, "bytes");
        assert_eq!(kind(&store.put(&path, "other".into()).await.unwrap_err()), "generic");
        assert_eq!(kind(&store.copy(&path, &to).await.unwrap_err()), "generic");
        assert_eq!(kind(&store.put_multipart(&path).await.map(drop).unwrap_err()), "generic");
        assert_eq!(bytes().await, "bytes");
        // A write that failed may have been done: what was known is forgotten all the same.
        others.put(&path, "newer".into()).await.unwrap();
        assert_eq!(bytes().await, "bytes", "immutable");
        store.put(&path, "other".into()).await.unwrap_err();
        assert_eq!(bytes().await, "newer");
        // Only deletions are there.
        store.delete(&path).await.unwrap();
        assert_eq!(kind(&store.get(&path).await.map(drop).unwrap_err()), "not found");
    });
}

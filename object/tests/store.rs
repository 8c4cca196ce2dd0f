//! The store over the cache against stores without: object_store's own tests for stores, and a differential run.
//!
//! The differential run makes the same calls of two equal stores, one bare and one behind the cache, some of them
//! behind the cache's back, and compares each answer: bytes, ranges, ETags, attributes and kinds of errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, integration};
use proptest::prelude::*;
use quinion::Cache;
use quinion_object::{CachedStore, Freshness, ObjectCache, Options, cached, cached_with};
use quinion_testing_s3 as s3;

mod differential;

use differential::{calls, kind, made};

fn cache() -> Cache {
    Cache::builder().memory(32 << 20).build().unwrap()
}

fn over(store: Arc<dyn ObjectStore>, freshness: Freshness) -> CachedStore {
    cached_with(ObjectCache::new(cache(), store, Options::default()).unwrap(), freshness)
}

const ALL: [Freshness; 3] =
    [Freshness::Always, Freshness::For(Duration::from_secs(60)), Freshness::Immutable];

async fn pass_the_crates_own_tests(store: &CachedStore) {
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
    store.objects().cache().check().unwrap();
}

#[tokio::test]
async fn the_crates_own_tests_pass_over_memory() {
    for freshness in ALL {
        let store = over(Arc::new(InMemory::new()), freshness);
        pass_the_crates_own_tests(&store).await;
        integration::put_opts(&store, true).await;
    }
}

/// As `Range: bytes=0-18446744073709551615` asks for it.
#[tokio::test]
async fn a_range_that_ends_where_numbers_end_is_cut_to_the_object() {
    let bare = Arc::new(InMemory::new());
    let path = Path::from("object");
    bare.put(&path, s3::content(1, 5000).into()).await.unwrap();
    for freshness in ALL {
        let store = over(bare.clone(), freshness);
        for end in [u64::MAX, u64::MAX - 1, 1 << 63] {
            for start in [0, 4999] {
                let range = GetRange::Bounded(start..end);
                let result = store.get_opts(&path, GetOptions::new().with_range(Some(range))).await.unwrap();
                assert_eq!(result.range, start..5000);
                s3::check(1, start, &result.bytes().await.unwrap());
            }
        }
    }
}

#[tokio::test]
async fn the_crates_own_tests_pass_over_files() {
    for freshness in ALL {
        let folder = tempfile::tempdir().unwrap();
        let store = over(Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap()), freshness);
        pass_the_crates_own_tests(&store).await;
        integration::put_opts(&store, false).await;
    }
}

#[tokio::test]
async fn a_get_streams_the_caches_pages_and_a_warm_one_fetches_nothing() {
    let bare = Arc::new(InMemory::new());
    let store = cached(bare.clone(), cache()).unwrap();
    let (path, content) = (Path::from("a/b"), s3::content(1, 9_000_001));
    store.put(&path, content.clone().into()).await.unwrap();
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), content);
    let cold = store.objects().stats();
    assert_eq!(cold.bytes, 9_000_001);
    let ranges = [5..9, 8_000_000..9_000_001, 0..1_000_000, 100..100_000];
    for (range, bytes) in ranges.iter().zip(store.get_ranges(&path, &ranges).await.unwrap()) {
        assert_eq!(bytes, content.slice(range.start as usize..range.end as usize));
    }
    let suffix = GetOptions::new().with_range(Some(GetRange::Suffix(70_000)));
    let tail = store.get_opts(&path, suffix).await.unwrap().bytes().await.unwrap();
    assert_eq!(tail, content.slice(9_000_001 - 70_000..));
    let warm = store.objects().stats();
    assert_eq!((warm.gets, warm.bytes), (cold.gets, cold.bytes), "data came from the cache");
    assert_eq!(warm.heads, cold.heads + 2, "and one look for each call");

    // Behind its back: seen at once, as by the bare store.
    bare.put(&path, Bytes::from_static(b"new").into()).await.unwrap();
    assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap(), "new");
    bare.delete(&path).await.unwrap();
    assert!(matches!(store.get(&path).await.unwrap_err(), Error::NotFound { .. }));
    assert_eq!(store.to_string(), "Quinion(InMemory)");
}

#[tokio::test]
async fn an_object_trusted_for_a_time_costs_no_request_and_own_writes_are_seen() {
    for freshness in [Freshness::For(Duration::from_secs(3600)), Freshness::Immutable] {
        let bare = Arc::new(InMemory::new());
        let store = over(bare.clone(), freshness);
        let (one, two, path) = (Path::from("one"), Path::from("two"), Path::from("three"));
        store.put(&one, "1".into()).await.unwrap();
        store.put(&two, "2".into()).await.unwrap();
        let get = async |path: &Path| match store.get(path).await {
            Ok(result) => Some(result.bytes().await.unwrap()),
            Err(Error::NotFound { .. }) => None,
            Err(error) => panic!("{error}"),
        };
        for _ in 0..5 {
            assert_eq!(get(&one).await.unwrap(), "1");
        }
        assert_eq!(
            (store.objects().stats().heads, store.objects().stats().gets),
            (0, 1),
            "one request in all"
        );
        bare.put(&one, "unseen".into()).await.unwrap();
        assert_eq!(get(&one).await.unwrap(), "1", "that is what was asked for");
        store.copy(&two, &one).await.unwrap();
        assert_eq!(get(&one).await.unwrap(), "2");
        store.rename(&one, &path).await.unwrap();
        assert_eq!((get(&one).await, get(&path).await.unwrap()), (None, Bytes::from_static(b"2")));
        let mut upload = store.put_multipart(&path).await.unwrap();
        upload.put_part("3".into()).await.unwrap();
        assert_eq!(get(&path).await.unwrap(), "2", "not before its end");
        upload.complete().await.unwrap();
        assert_eq!(get(&path).await.unwrap(), "3");
        store.delete(&path).await.unwrap();
        assert_eq!(get(&path).await, None);
    }
}

#[tokio::test]
async fn a_stream_whose_object_is_replaced_is_of_one_version_or_an_error() {
    let server = s3::Server::with_object(24 << 20);
    let objects = ObjectCache::new(cache(), server.store(), Options::default()).unwrap();
    let store = cached_with(objects, Freshness::Immutable);
    let path = Path::from("object");
    store.head(&path).await.unwrap();
    server.control.change("object");
    // Nothing was given out yet: it begins again with what the object is now.
    let result = store.get(&path).await.unwrap();
    assert_eq!(result.meta.e_tag.as_deref(), Some("\"v2\""));
    let mut stream = result.into_stream();
    let first = stream.next().await.unwrap().unwrap();
    s3::check(2, 0, &first);
    let (mut at, mut error) = (first.len() as u64, None);
    server.control.change("object");
    while let Some(part) = stream.next().await {
        match part {
            Ok(part) => {
                s3::check(2, at, &part);
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

async fn read_by(workers: u64) -> (u64, u64) {
    let server = s3::Server::with_object(32 << 20);
    server.control.set_latency(Duration::from_millis(5));
    let cache = Cache::builder().memory(96 << 20).build().unwrap();
    let store = cached(server.store(), cache).unwrap();
    let workers = (0..workers).map(|_| async {
        for at in 0..32_u64 {
            let range = at << 20..(at + 1) << 20;
            let bytes = store.get_range(&Path::from("object"), range.clone()).await.unwrap();
            s3::check(1, range.start, &bytes);
        }
    });
    futures_util::future::join_all(workers).await;
    (server.control.gets(), store.objects().stats().bytes)
}

#[tokio::test]
async fn eight_workers_cost_the_gets_of_one() {
    let (one, eight) = (read_by(1).await, read_by(8).await);
    println!("(GETs, bytes) of one worker {one:?}, of eight {eight:?}");
    assert_eq!((one.1, eight.1), (32 << 20, 32 << 20), "each byte came once");
    assert!(eight.0 <= one.0 + 2, "one: {one:?}, eight: {eight:?}");
}

#[tokio::test]
async fn an_object_that_is_replaced_all_the_time_can_be_read() {
    let bare = Arc::new(InMemory::new());
    let store = over(bare.clone(), Freshness::Always);
    let (path, is_over) = (Path::from("hot"), Arc::new(AtomicBool::new(false)));
    bare.put(&path, vec![0; 20_000].into()).await.unwrap();
    let writer = std::thread::spawn({
        let (bare, path, is_over) = (bare.clone(), path.clone(), is_over.clone());
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            while !is_over.load(Ordering::Relaxed) {
                let byte = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_micros() as u8;
                runtime.block_on(bare.put(&path, vec![byte; 20_000].into())).unwrap();
            }
        }
    });
    for _ in 0..300 {
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        assert!(bytes.len() == 20_000 && bytes.iter().all(|&byte| byte == bytes[0]), "it is of one version");
        let ranges = store.get_ranges(&path, &[0..9, 10_000..20_000]).await.unwrap();
        assert!(ranges.iter().flatten().all(|&byte| byte == ranges[0][0]), "and so are these");
    }
    is_over.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

#[tokio::test]
async fn an_object_larger_than_the_cache_streams_through_it() {
    let bare = Arc::new(InMemory::new());
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let store = cached(bare, cache).unwrap();
    let (path, content) = (Path::from("large"), s3::content(1, 50 << 20));
    store.put(&path, content.clone().into()).await.unwrap();
    // All of it is kept by the caller, which is more than pins may keep: the rest is copied.
    let parts: Vec<Bytes> =
        store.get(&path).await.unwrap().into_stream().map(|part| part.unwrap()).collect().await;
    assert_eq!(parts.concat(), content);
    assert!(store.objects().cache().stats().pinned_bytes <= 8 << 20);
    assert!(store.objects().stats().bytes <= 54 << 20, "{:?}", store.objects().stats());
    drop(parts);
    assert_eq!(store.objects().cache().stats().pinned_bytes, 0);
    store.objects().cache().check().unwrap();
}

#[tokio::test]
async fn a_store_that_blocks_finds_threads_while_many_reads_wait() {
    let folder = tempfile::tempdir().unwrap();
    let files = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    let (path, content) = (Path::from("file"), s3::content(1, 20 << 20));
    files.put(&path, content.clone().into()).await.unwrap();
    let options = Options::new().threads(1).deadline(Duration::from_secs(10));
    let objects = ObjectCache::new(cache(), files, options).unwrap();
    let file = objects.open_async(&path).await.unwrap();
    let reads = (0..20_u64).rev().map(|at| file.bytes_async(at << 20..(at << 20) + 100_000));
    for (at, bytes) in (0..20_u64).rev().zip(futures_util::future::join_all(reads).await) {
        s3::check(1, at << 20, &bytes.unwrap());
    }
}

#[tokio::test]
async fn implausible_answers_of_a_store_are_refused() {
    let store = Arc::new(InMemory::new());
    let options = Options::new().attempts_max(2).backoff(Duration::from_millis(1), Duration::from_millis(1));
    let objects = ObjectCache::new(cache(), store.clone(), options).unwrap();
    let path = Path::from("object");
    store.put(&path, s3::content(1, 5000).into()).await.unwrap();
    let meta = store.head(&path).await.unwrap();
    for size in [u64::MAX, 1 << 63] {
        let error = objects.open_known(ObjectMeta { size, ..meta.clone() }).unwrap_err();
        assert!(matches!(error, quinion_object::Error::TooLarge { .. }), "{error}");
    }
    // It is shorter than was said: an error, and no zeros.
    for size in [5001, 9000, 1 << 40, (1 << 62) + 7] {
        let file = objects.open_known(ObjectMeta { size, ..meta.clone() }).unwrap();
        for range in [0..5000, 0..5001, 4999..5001, size - 1..size, size - 70_000.min(size)..size] {
            let error = file.bytes_async(range).await.unwrap_err();
            assert!(
                matches!(error, quinion_object::Error::Changed(_) | quinion_object::Error::Fetch(_)),
                "{error}"
            );
        }
        let mut buffer = [0; 100];
        assert_eq!(file.read_at_async(&mut buffer, u64::MAX).await.unwrap(), 0);
        assert_eq!(file.read_at_async(&mut buffer, size).await.unwrap(), 0);
        #[allow(clippy::reversed_empty_ranges)]
        for range in [u64::MAX..0, 5..3, u64::MAX..u64::MAX] {
            file.prefetch(range.clone()).unwrap();
            assert!(file.pin(range).unwrap().is_empty());
        }
    }
    let empty = Path::from("empty");
    store.put(&empty, Bytes::new().into()).await.unwrap();
    let file = objects.open_async(&empty).await.unwrap();
    assert_eq!((file.read_at_async(&mut [0; 9], 0).await.unwrap(), file.is_empty()), (0, true));
    assert!(file.bytes_async(0..0).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_first_get_is_one_request_and_its_body_is_not_fetched_again() {
    let server = s3::Server::new();
    for (len, gets) in [(1, 1), (9000, 1), (1 << 20, 1), (3_000_001, 1), (20 << 20, 3), (0, 1)] {
        server.control.put("object", len);
        let cache = Cache::builder().memory(256 << 20).build().unwrap();
        let objects = ObjectCache::new(cache, server.store(), Options::new()).unwrap();
        let store = cached_with(objects, Freshness::Immutable);
        let before = (server.control.heads(), server.control.gets());
        let path = Path::from("object");
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes.len(), len);
        s3::check(1, 0, &bytes);
        let made = (server.control.heads() - before.0, server.control.gets() - before.1);
        assert_eq!(made, (u64::from(len == 0), gets), "{len} bytes");
        let stats = store.objects().stats();
        assert_eq!((stats.bytes, stats.gap_bytes), (len as u64, 0), "{len} bytes");
    }
    // One that is dropped before its first part, and one whose version is replaced before its second GET.
    server.control.put("object", 20 << 20);
    let objects = ObjectCache::new(cache(), server.store(), Options::new()).unwrap();
    let store = cached_with(objects, Freshness::Immutable);
    let path = Path::from("object");
    drop(tokio::time::timeout(Duration::from_millis(1), store.get(&path)).await);
    server.control.trouble([s3::Fault::ChangedAfter(500_000)]);
    let result = store.get(&path).await.unwrap();
    let version = result.meta.e_tag.as_ref().unwrap().trim_matches(['"', 'v']).parse().unwrap();
    match result.bytes().await {
        Ok(bytes) => s3::check(version, 0, &bytes),
        Err(error) => assert_eq!(kind(&error), "precondition"),
    }
}

/// 1. An object is replaced before each GET of a read, so that the store itself is asked at last.
/// 2. Its answer has more bytes than its range, or fewer, or is of one version for one range and of the next for the
///    other.
#[tokio::test]
async fn answers_of_the_store_itself_have_the_bytes_of_their_range_and_are_of_one_version() {
    use s3::Fault::{ChangedBefore, Late, Longer, Short};
    let server = s3::Server::with_object(300_000);
    let objects = ObjectCache::new(cache(), server.store(), Options::new()).unwrap();
    let store = cached_with(objects, Freshness::Always);
    let path = Path::from("object");
    let now = || server.control.version("object").unwrap();
    let overtaken = |last: &[s3::Fault]| server.control.trouble([&[ChangedBefore; 3], last].concat());
    overtaken(&[Longer(77)]);
    let bytes = store.get_range(&path, 10..200_000).await.unwrap();
    assert_eq!((bytes.len(), now()), (199_990, 4));
    s3::check(4, 10, &bytes);
    overtaken(&[Short(70_000)]);
    let error = store.get_range(&path, 10..200_000).await.unwrap_err();
    assert!(error.to_string().contains("ends at byte 70010"), "{error}");
    let ranges = [10..100, 200_000..200_100, 5000..5010];
    // A range that is there, and one that is of the next version.
    overtaken(&[Late(0), ChangedBefore]);
    let all = store.get_ranges(&path, &ranges).await.unwrap();
    for (range, bytes) in ranges.iter().zip(&all) {
        assert_eq!(bytes.len() as u64, range.end - range.start);
        s3::check(now(), range.start, bytes);
    }
}

proptest! {
    #[test]
    fn a_cached_store_answers_as_the_bare_one(
        calls in prop::collection::vec(calls(), 1..60),
        small in any::<bool>(),
        freshness in prop::sample::select(&ALL[..]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (bare, below) = (InMemory::new(), Arc::new(InMemory::new()));
            let options = if small { Options::new().whole_max(0).fill_min(0).gap_max(0) } else { Options::new() };
            let objects = ObjectCache::new(cache(), below.clone(), options).unwrap();
            let cached = cached_with(objects, freshness);
            // What others write is seen at once only if it is always asked for.
            let has_other_client = freshness == Freshness::Always;
            for (at, call) in calls.iter().enumerate() {
                let one = made(call, at, &bare, has_other_client.then_some(&bare as _)).await;
                let other = made(call, at, &cached, has_other_client.then_some(&*below as _)).await;
                assert_eq!(one, other, "call {at}: {call:?}");
            }
            cached.objects().cache().check().unwrap();
        });
    }
}

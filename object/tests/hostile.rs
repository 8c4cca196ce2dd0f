//! Stores that do what none should, and callers that go away: against a store whose answers a test makes itself.
//!
//! Bytes tell their version and position, so every read here is checked byte by byte.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt, join_all};
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error as StoreError, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result as StoreResult,
};
use quinion::Cache;
use quinion_object::{Error, FetchFailure, Freshness, ObjectCache, Options, cached_with};
use quinion_testing_s3 as s3;

use quinion_testing_s3::check;
use tokio::sync::watch;

const MIB: u64 = 1 << 20;

type Answer = BoxFuture<'static, StoreResult<GetResult>>;

struct Made {
    gets: AtomicU64,
    answer: Box<dyn Fn(GetOptions, u64) -> Answer + Send + Sync>,
}

impl Made {
    fn new(answer: impl Fn(GetOptions, u64) -> Answer + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { gets: AtomicU64::new(0), answer: Box::new(answer) })
    }
}

impl fmt::Debug for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Made")
    }
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Made")
    }
}

fn no<T>() -> StoreResult<T> {
    Err(StoreError::NotImplemented { operation: "that".into(), implementer: "Made".into() })
}

#[async_trait]
impl ObjectStore for Made {
    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> StoreResult<PutResult> {
        no()
    }
    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        no()
    }
    async fn get_opts(&self, _: &Path, options: GetOptions) -> StoreResult<GetResult> {
        let before = if options.head { 0 } else { self.gets.fetch_add(1, Ordering::Relaxed) };
        (self.answer)(options, before).await
    }
    fn delete_stream(
        &self,
        _: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        stream::empty().boxed()
    }
    fn list(&self, _: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        stream::empty().boxed()
    }
    async fn list_with_delimiter(&self, _: Option<&Path>) -> StoreResult<ListResult> {
        no()
    }
    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> StoreResult<()> {
        no()
    }
}

fn meta(size: u64, e_tag: Option<&str>, seconds: u64) -> ObjectMeta {
    let last_modified = (std::time::UNIX_EPOCH + Duration::from_secs(seconds)).into();
    ObjectMeta {
        location: Path::from("object"),
        last_modified,
        size,
        e_tag: e_tag.map(str::to_owned),
        version: None,
    }
}

fn asked(options: &GetOptions, size: u64) -> Range<u64> {
    options.range.as_ref().map_or(0..size, |range| range.as_range(size).unwrap())
}

fn answer(options: &GetOptions, meta: ObjectMeta, version: u32) -> StoreResult<GetResult> {
    let range = asked(options, meta.size);
    let bytes: Bytes = (range.start..range.end).map(|at| s3::byte(version, at)).collect();
    Ok(of_parts(meta, range, vec![Ok(bytes)]))
}

fn of_parts(meta: ObjectMeta, range: Range<u64>, parts: Vec<StoreResult<Bytes>>) -> GetResult {
    let payload = GetResultPayload::Stream(stream::iter(parts).boxed());
    GetResult { payload, meta, range, attributes: Default::default(), extensions: Default::default() }
}

/// Without pauses. A store that is slow because the machine is busy does not count as one that hangs.
fn quick() -> Options {
    Options::new()
        .backoff(Duration::from_millis(1), Duration::from_millis(8))
        .stall_max(Duration::from_secs(60))
        .deadline(Duration::from_secs(120))
        .failure_pause(Duration::ZERO)
}

fn objects(store: Arc<dyn ObjectStore>, options: Options) -> ObjectCache {
    ObjectCache::new(Cache::builder().memory(64 << 20).build().unwrap(), store, options).unwrap()
}

fn path() -> Path {
    Path::from("object")
}

/// The version that the first bytes of an object tell.
fn version_in(bytes: &[u8]) -> u32 {
    let is = |version: &u32| (0..64).all(|at| bytes[at] == s3::byte(*version, at as u64));
    (0..100).find(is).expect("one of the first versions")
}

/// 1. A web server tells of a file neither an ETag nor a time, and the file is replaced by one of the same size.
/// 2. Reads by pieces mixed the two, and later ones gave the old bytes.
#[test]
fn an_object_whose_versions_cannot_be_told_apart_is_neither_cached_nor_read_by_pieces() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for e_tag in [None, Some("W/\"x\"")] {
        // Each GET is of another version.
        let made = |size| {
            Made::new(move |options, before| {
                let answer = answer(&options, meta(size, e_tag, 0), before as u32 + 1);
                async { answer }.boxed()
            })
        };
        let objects = objects(made(3 * MIB), quick());
        for opened in [objects.open(&path()).map(drop), objects.open_first(&path(), MIB).map(drop)] {
            let error = opened.unwrap_err();
            assert!(matches!(error, Error::Unversioned(_)), "{error}");
            assert!(error.to_string().contains("ETag") && error.to_string().contains("configure"), "{error}");
        }
        let store = cached_with(objects, Freshness::Immutable);
        let whole = || runtime.block_on(async { store.get(&path()).await?.bytes().await }).unwrap();
        let (first, second) = (whole(), whole());
        let versions = [&first, &second].map(|bytes| version_in(bytes));
        assert!(versions[0] < versions[1], "{versions:?}");
        check(versions[0], 0, &first);
        check(versions[1], 0, &second);
        let pieces = runtime.block_on(store.get_ranges(&path(), &[0..MIB, 2 * MIB..3 * MIB])).unwrap();
        let version = version_in(&pieces[0]);
        check(version, 0, &pieces[0]);
        check(version, 2 * MIB, &pieces[1]);
        // Too far from each other for one GET.
        let far = made(64 * MIB);
        let store = cached_with(self::objects(far.clone(), quick()), Freshness::Always);
        let error = runtime.block_on(store.get_ranges(&path(), &[0..9, 63 * MIB..64 * MIB])).unwrap_err();
        assert!(matches!(error, StoreError::Precondition { .. }), "{error}");
        assert_eq!(far.gets.load(Ordering::Relaxed), 1, "another GET does not help");
    }
}

#[test]
fn a_store_that_panics_fails_its_waiters_and_nothing_else() {
    let store = Made::new(|options, before| {
        let meta = meta(4 * MIB, Some("\"x\""), 5);
        Box::pin(async move {
            match (options.head, before) {
                (false, 0) => panic!("in the answer, on purpose"),
                (false, 1) => {
                    let range = asked(&options, meta.size);
                    let mut result = of_parts(meta, range, Vec::new());
                    let body = stream::poll_fn(|_| panic!("in the body, on {}", "purpose"));
                    result.payload = GetResultPayload::Stream(body.boxed());
                    Ok(result)
                }
                _ => answer(&options, meta, 1),
            }
        })
    });
    let objects = objects(store, quick().requests_max(1).in_flight_max(MIB).threads(1));
    let file = objects.open(&path()).unwrap();
    // The cache asks again for the page of a fill that failed, so one read may meet both.
    let mut errors = Vec::new();
    while let Err(error) = file.bytes(0..100_000) {
        let Error::Fetch(fetch) = &error else { panic!("{error}") };
        assert!(matches!(fetch.failure(), FetchFailure::Panicked(_)), "{error}");
        errors.push(error.to_string());
    }
    let last = errors.last().expect("it panicked");
    assert!(errors.len() <= 2 && last.contains("in the body, on purpose"), "{errors:?}");
    check(1, 0, &file.bytes(0..4 * MIB).unwrap()); // no turn and no thread is lost
    objects.cache().check().unwrap();

    let store = Made::new(|_, _| Box::pin(async { panic!("at a HEAD") }));
    let objects = self::objects(store, quick());
    let error = objects.open(&path()).unwrap_err();
    assert!(error.to_string().contains("at a HEAD"), "{error}");
}

/// A folder whose file another program changes between the store's answer to the first GET and its body.
fn changed_in_between(change: impl Fn(&std::path::Path) + Send + Sync + 'static) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("object");
    std::fs::write(&file, s3::content(1, 3 * MIB as usize)).unwrap();
    let before = std::time::SystemTime::now() - Duration::from_secs(100);
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(before).unwrap();
    let files = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    let change = Arc::new(change);
    let store = Made::new(move |options, before| {
        let (files, file, change) = (Arc::clone(&files), file.clone(), Arc::clone(&change));
        Box::pin(async move {
            let is_first = !options.head && before == 0;
            let answer = files.get_opts(&path(), options).await;
            if is_first {
                change(&file);
            }
            answer
        })
    });
    let objects = objects(store, quick().deadline(Duration::from_secs(20)));
    let file = objects.open(&path()).unwrap();
    let mut bytes = vec![0; 3 * MIB as usize];
    match file.read_at(&mut bytes, 0) {
        Err(error) => error,
        Ok(read) => {
            panic!("{read} bytes; the version that was opened: {}", bytes[..read] == s3::content(1, read))
        }
    }
}

#[test]
fn a_file_of_a_folder_that_is_overwritten_after_the_answer_is_another_version() {
    let error = changed_in_between(|file| std::fs::write(file, s3::content(2, 3 * MIB as usize)).unwrap());
    assert!(matches!(error, Error::Changed(_)), "{error}");
}

#[test]
fn a_file_of_a_folder_that_is_cut_after_the_answer_fails_at_once() {
    let error = changed_in_between(|file| {
        std::fs::File::options().write(true).open(file).unwrap().set_len(5000).unwrap()
    });
    assert!(matches!(error, Error::Changed(_)), "{error}");
}

#[test]
fn a_body_that_is_too_long_gives_the_range_that_was_asked_for() {
    let store = Made::new(|options, _| {
        let meta = meta(4 * MIB, Some("\"x\""), 5);
        let range = asked(&options, meta.size);
        let bytes =
            |range: Range<u64>| -> StoreResult<Bytes> { Ok(range.map(|at| s3::byte(1, at)).collect()) };
        let more = range.end..range.end + 70_000;
        // And pieces of no bytes, and of odd lengths.
        let odd = range.start + 4097.min(range.end - range.start);
        let parts = vec![
            Ok(Bytes::new()),
            bytes(range.start..odd),
            Ok(Bytes::new()),
            bytes(odd..range.end),
            bytes(more),
        ];
        Box::pin(async move { Ok(of_parts(meta, range, parts)) })
    });
    let objects = objects(store, quick());
    let file = objects.open(&path()).unwrap();
    for range in [0..10, MIB..MIB + 50_000, 4 * MIB - 9..4 * MIB, 0..4 * MIB] {
        check(1, range.start, &file.bytes(range.clone()).unwrap());
    }
}

/// A store that ignores conditions, whose object is replaced before GET number `at`, as `metas` tell.
fn replaced(at: u64, metas: [ObjectMeta; 2]) -> Arc<Made> {
    Made::new(move |options, before| {
        let version = if !options.head && before >= at { 2 } else { 1 };
        let meta = metas[version - 1].clone();
        Box::pin(async move { answer(&options, meta, version as u32) })
    })
}

#[test]
fn an_object_replaced_between_two_gets_of_one_read_is_an_error_with_any_kind_of_version() {
    let size = 4 * MIB;
    let version = |id: &str| ObjectMeta { version: Some(id.to_owned()), ..meta(size, None, 5) };
    let told = [
        ("a strong ETag", [meta(size, Some("\"a\""), 5), meta(size, Some("\"b\""), 5)]),
        ("a weak ETag", [meta(size, Some("W/\"a\""), 5), meta(size, Some("W/\"b\""), 5)]),
        ("a weak ETag that stays", [meta(size, Some("W/\"a\""), 5), meta(size, Some("W/\"a\""), 6)]),
        ("an ETag that becomes weak", [meta(size, Some("\"a\""), 5), meta(size, Some("W/\"a\""), 5)]),
        ("an ETag that goes", [meta(size, Some("\"a\""), 5), meta(size, None, 5)]),
        ("its times", [meta(size, None, 5), meta(size, None, 6)]),
        ("its size", [meta(size, None, 5), meta(size + 1, None, 5)]),
        ("a version id", [version("a"), version("b")]),
        ("a version id that goes", [version("a"), meta(size, None, 6)]),
    ];
    for (name, metas) in told {
        for at in 0..4 {
            let options = quick().request_max(MIB).requests_max(1).whole_max(0);
            let objects = objects(replaced(at, metas.clone()), options);
            let file = objects.open(&path()).unwrap();
            let mut buffer = vec![0; size as usize];
            match file.read_at(&mut buffer, 0) {
                // What came before is told, and the error by the next read.
                Ok(read) => check(1, 0, &buffer[..read]),
                Err(error) => assert!(error.is_change(), "{name}, {at}: {error}"),
            }
            let error = file.bytes(0..size).unwrap_err();
            assert!(error.is_change(), "{name}, {at}: {error}");
            match file.read_ranges(&[0..9, size - 9..size]) {
                // What came before that GET.
                Ok(bytes) => {
                    check(1, 0, &bytes[0]);
                    check(1, size - 9, &bytes[1]);
                }
                Err(error) => assert!(error.is_change(), "{name}, {at}: {error}"),
            }
        }
    }
}

#[test]
fn a_store_that_tells_etags_in_two_ways_can_be_read_from_its_list() {
    let store =
        Made::new(|options, _| Box::pin(async move { answer(&options, meta(MIB, Some("\"a\""), 5), 1) }));
    let objects = objects(store, quick());
    let head = objects.open(&path()).unwrap();
    for e_tag in [Some("a"), Some("\"a\""), None] {
        let file = objects.open_known(meta(MIB, e_tag, 5)).unwrap();
        check(1, 0, &file.bytes(0..MIB).unwrap());
    }
    check(1, 0, &head.bytes(0..MIB).unwrap());
    assert_eq!(objects.stats().gets, 2, "with an ETag they are one file, without a file of their own");
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[tokio::test]
async fn reads_that_are_dropped_leave_nothing_behind_and_waiting_ones_need_no_thread() {
    // No GET is answered before reads have been dropped.
    let (answers, gate) = watch::channel(false);
    let store = Made::new(move |options, _| {
        let mut gate = gate.clone();
        Box::pin(async move {
            if !options.head {
                gate.wait_for(|is_open| *is_open).await.unwrap();
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            answer(&options, meta(32 * MIB, Some("\"x\""), 5), 1)
        })
    });
    let objects = objects(store, quick().requests_max(8).whole_max(0).gap_max(0));
    let store = cached_with(objects.clone(), Freshness::Immutable);
    let file = objects.open_async(&path()).await.unwrap();
    let before = threads();
    let (file, store) = (&file, &store);
    for at in 0..24_u64 {
        let range = at * MIB..at * MIB + 200_000;
        let mut buffer = [0; 100];
        let reads: [BoxFuture<'_, ()>; 4] = [
            Box::pin(async { drop(file.bytes_async(range.clone()).await) }),
            Box::pin(async { drop(file.read_at_async(&mut buffer, range.start).await) }),
            Box::pin(async { drop(file.read_ranges_async(&[range.clone(), 0..20_000]).await) }),
            Box::pin(async { drop(store.get_range(&path(), range.clone()).await) }),
        ];
        // Each is polled, and dropped in the middle.
        tokio::time::timeout(Duration::from_millis(2), join_all(reads)).await.unwrap_err();
    }
    answers.send_replace(true);
    let waiting = (0..400_u64).map(|at| async move {
        let at = at * 70_000;
        check(1, at, &file.bytes_async(at..at + 30_000).await.unwrap());
    });
    let most = async {
        let mut most = 0;
        for _ in 0..50 {
            tokio::time::sleep(Duration::from_millis(4)).await;
            most = most.max(threads());
        }
        most
    };
    let (_, most) = futures_util::future::join(join_all(waiting), most).await;
    // Other tests of this program have theirs; one for each read would be hundreds.
    assert!(most < before + 100, "{before} threads before, {most} while reads wait");
    let stats = objects.cache().stats();
    assert_eq!(stats.pinned_bytes, 0, "{stats:?}");
    check(1, 0, &store.get(&path()).await.unwrap().bytes().await.unwrap());
    objects.cache().check().unwrap();
}

#[test]
fn a_runtime_that_ends_while_its_reads_wait_leaves_a_cache_that_works() {
    let store = Made::new(|options, _| {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(if options.head { 0 } else { 100 })).await;
            answer(&options, meta(8 * MIB, Some("\"x\""), 5), 1)
        })
    });
    let objects = objects(store, quick().requests_max(2));
    let file = objects.open(&path()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    for at in 0..8 {
        let file = file.clone();
        runtime.spawn(async move { drop(file.bytes_async(at * MIB..(at + 1) * MIB).await) });
    }
    std::thread::sleep(Duration::from_millis(20));
    drop(runtime);
    check(1, 0, &file.bytes(0..8 * MIB).unwrap());
    assert_eq!(objects.cache().stats().pinned_bytes, 0);
    // And one whose own threads end: the last handle goes while fetches are under way.
    let cache = objects.cache().clone();
    file.file().dont_need(0, 8 * MIB).unwrap();
    file.prefetch(0..8 * MIB).unwrap();
    drop((file, objects));
    cache.check().unwrap();
}

#[test]
fn a_long_queue_is_no_failure_and_a_dead_store_is_one_for_all_that_wait() {
    let is_dead = Arc::new(Mutex::new(false));
    let dead = Arc::clone(&is_dead);
    let store = Made::new(move |options, _| {
        let is_dead = *dead.lock().unwrap();
        Box::pin(async move {
            match (options.head, is_dead) {
                (true, _) => {}
                (false, false) => tokio::time::sleep(Duration::from_millis(100)).await,
                (false, true) => std::future::pending().await,
            }
            answer(&options, meta(24 * MIB, Some("\"x\""), 5), 1)
        })
    });
    const DEADLINE: Duration = Duration::from_secs(2);
    let options = quick().requests_max(1).request_max(MIB).deadline(DEADLINE);
    let objects = objects(store.clone(), options.failure_pause(Duration::from_secs(600)));
    let file = objects.open(&path()).unwrap();
    let begun = Instant::now();
    file.prefetch(0..24 * MIB).unwrap();
    check(1, 23 * MIB, &file.bytes(23 * MIB..24 * MIB).unwrap());
    check(1, 0, &file.bytes(0..24 * MIB).unwrap());
    assert!(begun.elapsed() > DEADLINE, "the last of 24 GETs, one after the other, is later than that");

    file.file().dont_need(0, 24 * MIB).unwrap();
    *is_dead.lock().unwrap() = true;
    let before = store.gets.load(Ordering::Relaxed);
    file.prefetch(0..24 * MIB).unwrap();
    for at in [0, 9, 23] {
        let Err(Error::Fetch(error)) = file.bytes(at * MIB..(at + 1) * MIB) else { panic!("it is dead") };
        assert!(matches!(error.failure(), FetchFailure::Deadline | FetchFailure::Stalled(_)), "{error}");
    }
    // Reads in the queue fail with the first, or with the one that had its turn just before they gave up.
    let gets = store.gets.load(Ordering::Relaxed) - before;
    assert!(gets < 8, "{gets} of 24 failed one after the other");
}

#[test]
fn blocking_calls_inside_a_task_of_a_single_threaded_runtime_do_not_hang() {
    let server = s3::Server::with_object(4 << 20);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let bare = server.store();
        // Its connection lives on this runtime, whose only thread is about to block: it stalls.
        bare.head(&path()).await.unwrap();
        let objects = objects(bare.clone(), quick().stall_max(Duration::from_secs(2)));
        let file = objects.open(&path()).unwrap();
        let mut buffer = vec![0; 100_000];
        assert_eq!(file.read_at(&mut buffer, 77).unwrap(), 100_000);
        check(1, 77, &buffer);
        check(1, 2 * MIB, &file.bytes(2 * MIB..3 * MIB).unwrap());
        let file = objects.open_async(&path()).await.unwrap();
        check(1, 3 * MIB, &file.bytes_async(3 * MIB..4 * MIB).await.unwrap());
    });
}

#[test]
fn a_read_beside_writers_is_of_one_version() {
    let server = s3::Server::with_object(3 << 20);
    let options = quick().request_max(MIB).whole_max(0).fill_min(4096).gap_max(0);
    let objects = objects(server.store(), options);
    let store = cached_with(objects, Freshness::Always);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let version = |meta: &ObjectMeta| meta.e_tag.as_ref().unwrap().trim_matches(['"', 'v']).parse().unwrap();
    let (read, changed) = (AtomicU64::new(0), AtomicU64::new(0));
    runtime.block_on(async {
        let reader = |seed: u64| {
            let (store, read, changed) = (&store, &read, &changed);
            async move {
                for at in 0..60_u64 {
                    let at = (at * 7919 + seed * 104_729) * 4099 % (2 * MIB);
                    let options = GetOptions::new().with_range(Some(at..at + MIB / 2));
                    let result = match store.get_opts(&path(), options).await {
                        Ok(result) => result,
                        Err(error) => panic!("{error}"),
                    };
                    let version = version(&result.meta);
                    match result.bytes().await {
                        Ok(bytes) => {
                            check(version, at, &bytes);
                            read.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(StoreError::Precondition { .. }) => drop(changed.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => panic!("{error}"),
                    }
                    // The test does not know which version these bytes are of, but it is one version.
                    let ranges = [at..at + 4096, at + MIB - 4096..at + MIB, at + 65_536..at + 65_546];
                    let all = store.get_ranges(&path(), &ranges).await.unwrap();
                    let is_of = |version| {
                        let is = |(range, bytes): (&Range<u64>, &Bytes)| {
                            let wanted = range.clone().map(|at| s3::byte(version, at));
                            bytes.iter().copied().eq(wanted)
                        };
                        ranges.iter().zip(&all).all(is)
                    };
                    assert!((version..version + 1000).any(is_of), "a mixture, or older than what was told");
                }
            }
        };
        let writer = async {
            for _ in 0..150 {
                tokio::time::sleep(Duration::from_millis(2)).await;
                server.control.change("object");
            }
        };
        futures_util::future::join(join_all((0..4).map(reader)), writer).await;
    });
    assert!(read.load(Ordering::Relaxed) > 100, "{read:?} read, {changed:?} changed");
    store.objects().cache().check().unwrap();
}

#[tokio::test]
async fn an_object_that_no_file_can_be_is_read_past_the_cache() {
    let store = Made::new(|options, _| {
        Box::pin(async move {
            let meta = meta(u64::MAX, Some("\"x\""), 5);
            if options.head { Ok(of_parts(meta, 0..u64::MAX, Vec::new())) } else { answer(&options, meta, 1) }
        })
    });
    let store = cached_with(objects(store, quick()), Freshness::Always);
    let at = 1 << 63;
    check(1, at, &store.get_range(&path(), at..at + 9000).await.unwrap());
    let two = store.get_ranges(&path(), &[at..at + 9000, at + 9..at + 10]).await.unwrap();
    check(1, at, &two[0]);
    check(1, at + 9, &two[1]);
    assert_eq!(store.head(&path()).await.unwrap().size, u64::MAX);
}

#[tokio::test]
async fn an_answer_that_was_asked_for_later_is_not_overtaken_by_an_older_one() {
    // The first HEAD is answered last.
    let (answers, gate) = watch::channel(false);
    let heads = Arc::new(AtomicU64::new(0));
    let count = heads.clone();
    let store = Made::new(move |options, _| {
        let number = if options.head { count.fetch_add(1, Ordering::Relaxed) } else { 9 };
        let mut gate = gate.clone();
        Box::pin(async move {
            if number == 0 {
                gate.wait_for(|is_open| *is_open).await.unwrap();
            }
            let (tag, version) = if number == 0 { ("\"a\"", 1) } else { ("\"b\"", 2) };
            answer(&options, meta(9000, Some(tag), 5), version)
        })
    });
    let store = cached_with(objects(store, quick()), Freshness::Immutable);
    let (first, second) = futures_util::future::join(store.head(&path().clone()), async {
        while heads.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        let second = store.head(&path()).await;
        answers.send_replace(true);
        second
    })
    .await;
    assert_eq!(first.unwrap().e_tag.as_deref(), Some("\"a\""));
    assert_eq!(second.unwrap().e_tag.as_deref(), Some("\"b\""));
    assert_eq!(
        store.head(&path()).await.unwrap().e_tag.as_deref(),
        Some("\"b\""),
        "what is known goes not back"
    );
    check(2, 0, &store.get(&path()).await.unwrap().bytes().await.unwrap());
}

#[test]
fn ranges_that_the_store_answers_with_other_bytes_are_refused() {
    use quinion_object::internals::bare_get_ranges;
    // The answer begins where it should not, and is as long as it should be.
    let shifted = Made::new(|options, before| {
        let meta = meta(MIB, Some("\"x\""), 5);
        Box::pin(async move {
            let mut result = answer(&options, meta, 1)?;
            if before > 0 {
                result.range = result.range.start + 7..result.range.end + 7;
            }
            Ok(result)
        })
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(bare_get_ranges(&*shifted, &path(), &[10..20, 500..600])).unwrap_err();
    assert!(error.to_string().contains("500..600 was asked for"), "{error}");
}

/// 1. Each GET of an object finds it replaced since the one before.
/// 2. Ranges that are near come by one GET, and are of its version; those that are far end as an error.
#[test]
fn ranges_of_an_object_that_is_replaced_before_each_get_are_of_one_version() {
    use quinion_object::internals::bare_get_ranges;
    const LEN: u64 = 40 << 20;
    let hot = Made::new(|options, before| {
        let meta = meta(LEN, Some(&format!("\"{before}\"")), 5);
        Box::pin(async move { answer(&options, meta, before as u32) })
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let read = |ranges: &[Range<u64>]| runtime.block_on(bare_get_ranges(&*hot, &path(), ranges));
    let near = [70_000..70_100, 0..5, 8_000_000..8_000_001, 100..100 + MIB];
    let parts = read(&near).unwrap();
    // One by one: one GET for the first, one for each other; then the one for all.
    let version = hot.gets.load(Ordering::Relaxed) as u32 - 1;
    for (range, bytes) in near.iter().zip(&parts) {
        assert_eq!(bytes.len() as u64, range.end - range.start);
        check(version, range.start, bytes);
    }
    let error = read(&[0..5, LEN - 5..LEN]).unwrap_err();
    assert!(matches!(error, StoreError::Precondition { .. }), "{error}");
}

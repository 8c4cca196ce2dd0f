//! An object that is replaced while it is open: an error by default, and the new version for those that follow it. Each
//! byte tells its version.
//!
//! The bytes of one call are always of one version, also if some of them were cached of the old one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use quinion::Cache;
use quinion_object::{Error, FollowingObject, Freshness, ObjectCache, Options};
use quinion_testing_s3::{Checker, Server, check, version_of};

mod held;

use held::HeldStore;

const LEN: usize = 3 << 20;

/// Small fills, so that an object is partly cached.
fn objects(server: &Server) -> ObjectCache {
    let options = Options::new()
        .whole_max(0)
        .tail_max(0)
        .fill_min(4096)
        .backoff(Duration::from_millis(1), Duration::from_millis(8))
        .failure_pause(Duration::ZERO);
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    ObjectCache::new(cache, server.store(), options).unwrap()
}

fn path() -> Path {
    Path::from("object")
}

#[test]
fn a_read_of_cached_and_uncached_bytes_after_a_change_is_all_of_the_new_version() {
    let server = Server::with_object(LEN);
    let objects = objects(&server);
    let (plain, following) = (objects.open(&path()).unwrap(), objects.open_following(&path()).unwrap());
    let mut buffer = vec![0; LEN];
    assert_eq!(following.read_at(&mut buffer[..4096], 0).unwrap(), 4096);
    check(1, 0, &buffer[..4096]);
    server.control.change("object");
    // What is cached is read without asking the store.
    assert_eq!(following.read_at(&mut buffer[..4096], 0).unwrap(), 4096);
    check(1, 0, &buffer[..4096]);
    assert_eq!(following.changes(), 0);
    assert_eq!(following.read_at(&mut buffer, 0).unwrap(), LEN);
    check(2, 0, &buffer);
    assert_eq!((following.changes(), server.control.refused() > 0), (1, true));
    let error = plain.read_at(&mut buffer[..4096], 2 << 20).unwrap_err();
    assert!(matches!(error, Error::Changed(_)), "an error is the default: {error}");
}

#[test]
fn a_new_size_is_told_and_ranges_behind_it_are_refused() {
    let server = Server::with_object(LEN);
    let objects = objects(&server);
    let following = objects.open_following(&path()).unwrap();
    let mut buffer = vec![0; 8192];
    for (version, len) in [(2, 100_000), (3, 2 * LEN), (4, 0)] {
        server.control.put_version("object", len, version);
        let at = following.len() - 5000; // not cached
        let had = len.saturating_sub(at as usize).min(buffer.len());
        assert_eq!(following.read_at(&mut buffer, at).unwrap(), had);
        check(version, at, &buffer[..had]);
        assert_eq!((following.len(), following.changes()), (len as u64, u64::from(version - 1)));
        if len == 100_000 {
            let error = following.bytes(0..LEN as u64).unwrap_err();
            assert!(matches!(error, Error::Range { size: 100_000, .. }), "{error}");
        }
    }
    assert!(following.is_empty());
}

#[test]
fn ranges_are_of_one_version_and_async_reads_follow_as_well() {
    let server = Server::with_object(LEN);
    let objects = objects(&server);
    let following = objects.open_following(&path()).unwrap();
    check(1, 0, &following.bytes(0..4096).unwrap());
    server.control.change("object");
    let all = following.read_ranges(&[0..4096, 1 << 20..(1 << 20) + 9]).unwrap();
    check(2, 0, &all[0]);
    check(2, 1 << 20, &all[1]);
    server.control.change("object");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut buffer = vec![0; LEN];
    assert_eq!(runtime.block_on(following.read_at_async(&mut buffer, 0)).unwrap(), LEN);
    check(3, 0, &buffer);
    let again = runtime.block_on(objects.open_following_async(&path())).unwrap();
    assert_eq!((again.changes(), following.changes()), (0, 2));
    assert_eq!(version_of(again.current().meta().e_tag.as_deref().unwrap()), Some(3));
}

/// 1. A reader has read an object to its end; all of it is cached.
/// 2. The object is replaced, by a longer one or by one of the same size.
/// 3. No read finds the change, since none is a fetch: the reader has to ask.
#[test]
fn growth_and_a_change_of_cached_bytes_are_found_by_a_refresh() {
    let server = Server::with_object(LEN);
    let objects = objects(&server).with_freshness(Freshness::Immutable);
    let following = objects.open_following(&path()).unwrap();
    let mut buffer = vec![0; LEN + 10];
    assert_eq!(following.read_at(&mut buffer, 0).unwrap(), LEN);
    assert!(!following.refresh().unwrap());
    server.control.put_version("object", LEN + 10, 2);
    assert_eq!(following.read_at(&mut buffer[..10], LEN as u64).unwrap(), 0, "no fetch, and no question");
    assert!(following.refresh().unwrap());
    assert_eq!((following.changes(), following.len()), (1, LEN as u64 + 10));
    assert_eq!(following.read_at(&mut buffer, 0).unwrap(), LEN + 10);
    check(2, 0, &buffer);
    server.control.change("object");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert!(runtime.block_on(following.refresh_async()).unwrap());
    assert!(!runtime.block_on(following.refresh_async()).unwrap());
    assert_eq!(following.read_at(&mut buffer, 0).unwrap(), LEN + 10);
    check(3, 0, &buffer);
    server.control.delete("object");
    assert!(following.refresh().is_err());
    assert_eq!(following.read_at(&mut buffer[..10], 0).unwrap(), 10, "the version that was open stays so");
    check(3, 0, &buffer[..10]);
}

/// 1. Two threads ask which version an object is. The store tells the first one, is written, and tells the second a
///    newer one.
/// 2. The first goes on with what it was told. The second found that the handle was another than it had begun with,
///    and went on with that, though the store had told it of a newer version.
#[test]
fn a_refresh_goes_on_with_no_older_version_than_the_store_has_told_it() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = Arc::new(HeldStore::default());
    let put = |len| runtime().block_on(store.inner.put(&path(), vec![0_u8; len].into())).unwrap();
    put(10);
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let objects = ObjectCache::new(cache, store.clone(), Options::new()).unwrap();
    let following = &objects.open_following(&path()).unwrap();
    let refreshes: [&(dyn Fn(&FollowingObject) -> bool + Sync); 2] =
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

#[test]
fn threads_that_share_a_handle_read_versions_that_only_rise() {
    let server = Server::with_object(LEN);
    let objects = objects(&server);
    let (following, is_over) = (objects.open_following(&path()).unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let read = |seed: u64| {
            let (checker, mut buffer) = (Checker::new(LEN), vec![0; 300_000]);
            let (mut turn, mut newest) = (seed, 1);
            while !is_over.load(Ordering::Relaxed) {
                turn += 1;
                // Else all of a version is cached at last, and no fetch finds the next one.
                following.current().file().dont_need(0, LEN as u64).unwrap();
                let at = turn * 997_331 % (LEN as u64 - buffer.len() as u64);
                match following.read_at(&mut buffer, at) {
                    Ok(read) => assert_eq!(read, buffer.len()),
                    Err(error) if error.is_change() => continue, // it changes faster than it is read
                    Err(error) => panic!("{error}"),
                }
                let most = server.control.version("object").unwrap();
                let version = checker.version_of_all(newest..=most, &[(at, &buffer[..])]);
                newest = version.expect("of no version, of two, or of an older one than before");
            }
        };
        let readers: Vec<_> = [1, 500, 90_000].map(|seed| scope.spawn(move || read(seed))).into();
        // Some reads between two changes, however slow the machine.
        for _ in 0..60 {
            let before = server.control.gets();
            while server.control.gets() < before + 3 && !readers.iter().any(|reader| reader.is_finished()) {
                std::thread::yield_now();
            }
            server.control.change("object");
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(following.changes() > 0);
    assert!(following.changes() <= 60, "one version is gone on to once");
}

//! Pools: what is protected stays, what is limited is never more, and each page is charged and refunded once.
//!
//! ```text
//!   index    [ protected ]            scans and random reads of ten times the memory go by and take none of it
//!   small    [ limit ]                eight threads, sampled all the while: never a page more
//!   any      fails, is invalidated, dropped, pinned, cut      used_pages is what its files have cached, each time
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use quinion::{Cache, ErrorKind, File, Hint, Pool, PoolOptions, PoolStats, ReadOptions};
use quinion_testing::content::Dice;
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
const MEMORY: u64 = 32 * MIB;

fn cache() -> Cache {
    Cache::builder().memory(MEMORY).build().unwrap()
}

fn limited(cache: &Cache, name: &str, pages: u64) -> Pool {
    cache.add_pool(name, PoolOptions::new().limit(pages * PAGE)).unwrap()
}

fn open(pool: &Pool, number: u64, bytes: u64) -> (Arc<Device>, File) {
    let device = Device::with_number(number, bytes);
    (device.clone(), pool.open_backend(device).unwrap())
}

fn open_default(cache: &Cache, number: u64, bytes: u64) -> (Arc<Device>, File) {
    let device = Device::with_number(number, bytes);
    (device.clone(), cache.open_backend(device).unwrap())
}

fn read(file: &File, device: &Device, position: u64, len: u64, piece: u64) {
    let mut buffer = vec![0; piece as usize];
    for at in (position..position + len).step_by(piece as usize) {
        let bytes = file.read_at(&mut buffer, at).unwrap();
        assert_eq!(bytes as u64, piece.min(position + len - at));
        verify(&buffer[..bytes], device, at);
    }
}

fn storm(file: &File, device: &Device, bytes: u64) {
    read(file, device, 0, bytes, 64 << 10);
    let mut dice = Dice::new(1);
    (0..5 * MEMORY / PAGE).for_each(|_| read(file, device, dice.below(bytes / PAGE) * PAGE, PAGE, PAGE));
    read(file, device, 0, bytes / 4, PAGE);
}

fn stats(cache: &Cache, name: &str) -> PoolStats {
    cache.pools().into_iter().find(|stats| stats.name == name).unwrap()
}

fn check(cache: &Cache) {
    cache.check().unwrap();
    let used: u64 = cache.pools().iter().map(|pool| pool.used_pages).sum();
    assert_eq!(used, cache.stats().cached_pages, "{:?}", cache.pools());
}

#[test]
fn protected_pages_stay_while_others_read_ten_times_the_memory() {
    let cache = cache();
    let bytes = 8 * MIB;
    let index = cache.add_pool("index", PoolOptions::new().protected(bytes)).unwrap();
    let (device, file) = open(&index, 1, bytes);
    read(&file, &device, 0, bytes, PAGE);
    let (others, other) = open_default(&cache, 2, 5 * MEMORY);
    storm(&other, &others, 5 * MEMORY);
    check(&cache);
    assert_eq!((file.cached_pages(), index.stats().evicted_pages), (bytes / PAGE, 0));
    assert!(device.times_read().iter().all(|&times| times == 1));
    assert!(stats(&cache, "default").evicted_pages > 5 * MEMORY / PAGE);
    // Once it is not protected any more, it is evicted like any unused page.
    index.set_protected(0).unwrap();
    storm(&other, &others, 5 * MEMORY);
    assert!(file.cached_pages() < bytes / PAGE / 10, "{}", file.cached_pages());
    check(&cache);
}

#[test]
fn a_pool_loses_its_pages_above_the_minimum_and_not_one_more() {
    let cache = cache();
    let index = cache.add_pool("index", PoolOptions::new().protected(4 * MIB)).unwrap();
    let (device, file) = open(&index, 1, 16 * MIB);
    read(&file, &device, 0, 16 * MIB, 64 << 10); // in large folios
    let (others, other) = open_default(&cache, 2, 5 * MEMORY);
    // A stream takes nothing of others: it makes room of what it has passed.
    read(&other, &others, 0, 5 * MEMORY, 64 << 10);
    let before = file.cached_pages();
    assert!(before > 8 * MIB / PAGE, "{before}");
    let mut dice = Dice::new(1);
    for _ in 0..40_000 {
        read(&other, &others, dice.below(5 * MEMORY / PAGE) * PAGE, PAGE, PAGE);
        assert!(file.cached_pages() >= 4 * MIB / PAGE, "{}", file.cached_pages());
    }
    assert!(file.cached_pages() <= 5 * MIB / PAGE, "{}", file.cached_pages());
    check(&cache);
}

/// Ends the program if a reader hangs.
fn sampled(cache: &Cache, names: &[(&str, u64)], readers: impl FnOnce() + Send) -> Vec<u64> {
    let done = AtomicBool::new(false);
    let most: Vec<_> = names.iter().map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for ((name, limit), most) in names.iter().zip(&most) {
                    let used = stats(cache, name).used_pages;
                    assert!(used <= *limit, "{used} pages of {name}, which may have {limit}");
                    most.fetch_max(used, Ordering::Relaxed);
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(readers));
        done.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    most.into_iter().map(AtomicU64::into_inner).collect()
}

#[test]
fn limits_hold_to_the_page_while_eight_threads_read_in_two_pools() {
    let cache = cache();
    let limits = [("small", 300), ("smaller", 77)];
    let pools = limits.map(|(name, pages)| limited(&cache, name, pages));
    let files: Vec<_> = (0..2).map(|nth| open(&pools[nth], nth as u64 + 1, 20 * MIB)).collect();
    let most = sampled(&cache, &limits, || {
        thread::scope(|scope| {
            for thread in 0..8 {
                let (device, file) = &files[thread % 2];
                let (file, pages) = (file.clone(), limits[thread % 2].1);
                scope.spawn(move || {
                    let mut dice = Dice::new(thread as u64);
                    for step in 0..400 {
                        let len = 1 + dice.below(if step % 10 == 0 { 400_000 } else { 9000 });
                        let position = dice.below(20 * MIB - len);
                        let options = ReadOptions::new().uncached(step % 7 == 0);
                        let mut buffer = vec![0; len as usize];
                        let bytes = file.read_at_with(&mut buffer, position, options).unwrap();
                        verify(&buffer[..bytes], device, position);
                        assert!(file.cached_pages() <= pages);
                        match step % 50 {
                            49 => drop(file.dont_need(0, 20 * MIB).unwrap()),
                            30 => drop(file.pin(position, 5000).unwrap()),
                            20 => drop(file.will_need(position, len).unwrap()),
                            _ => {}
                        }
                    }
                });
            }
        });
    });
    // Each look asserts that they are not exceeded; here, that the looks came near them.
    assert!(most.iter().zip(&limits).all(|(most, (_, limit))| *most > limit / 2), "{most:?} of {limits:?}");
    check(&cache);
    for (pool, (_, file)) in pools.iter().zip(&files) {
        assert_eq!(pool.stats().used_pages, file.cached_pages());
    }
}

#[test]
fn a_pool_smaller_than_a_window_reads_streams_and_large_folios() {
    for (limit, order) in [(1, 0), (3, 0), (16, 9), (70, 4)] {
        let cache = cache();
        let pool = limited(&cache, "tiny", limit);
        let (device, file) = open(&pool, 1, 4 * MIB);
        file.set_folio_orders(order, 9).unwrap();
        read(&file, &device, 0, 4 * MIB, 64 << 10);
        read(&file, &device, 0, MIB, 1 << 20);
        assert!((1..=limit).contains(&pool.stats().used_pages));
        check(&cache);
    }
}

#[test]
fn pools_with_limits_do_not_take_each_others_pages() {
    let cache = cache();
    let (a, b) = (limited(&cache, "a", 500), limited(&cache, "b", 500));
    let ((device, file), (others, other)) = (open(&a, 1, MIB), open(&b, 2, 64 * MIB));
    read(&file, &device, 0, MIB, PAGE);
    read(&other, &others, 0, 64 * MIB, 64 << 10);
    assert_eq!((file.cached_pages(), a.stats().evicted_pages), (256, 0));
    assert!(b.stats().evicted_pages >= 64 * MIB / PAGE - 500);
    assert!(b.stats().used_pages <= 500);
    check(&cache);
}

#[test]
fn a_folio_is_the_pools_whose_read_brought_it_and_a_hit_charges_nothing() {
    let cache = cache();
    let pool = limited(&cache, "a", 500);
    let (device, file) = open(&pool, 1, MIB);
    let same = cache.open_backend(device.clone()).unwrap();
    [&file, &same].iter().for_each(|file| file.advise(Hint::Random).unwrap());
    assert_eq!((file.pool(), same.pool(), file.clone().pool()), ("a", "default", "a"));
    read(&file, &device, 0, MIB / 2, PAGE);
    read(&same, &device, 0, MIB / 2, PAGE);
    assert_eq!((pool.stats().used_pages, stats(&cache, "default").used_pages), (128, 0));
    read(&same, &device, MIB / 2, MIB / 2, PAGE);
    read(&file, &device, MIB / 2, MIB / 2, PAGE);
    assert_eq!((pool.stats().used_pages, stats(&cache, "default").used_pages), (128, 128));
    check(&cache);
}

#[test]
fn removed_pages_are_uncharged_once_however_they_leave() {
    let cache = cache();
    let pool = limited(&cache, "a", 600);
    let (device, file) = open(&pool, 1, 2 * MIB);
    let fill = || (0..512).for_each(|page| drop(file.read_at(&mut [0; 100], page * PAGE)));
    let agrees = || {
        check(&cache);
        assert_eq!(pool.stats().used_pages, file.cached_pages());
    };
    // 1 The device fails.
    (0..512).step_by(5).for_each(|page| device.fail(page));
    fill();
    agrees();
    assert!((300..512).contains(&file.cached_pages()), "{}", file.cached_pages());
    (0..512).for_each(|page| device.mend(page));
    // 2 `dont_need`
    fill();
    agrees();
    let pin = file.pin(0, 40 * PAGE as usize).unwrap();
    file.dont_need(0, 2 * MIB).unwrap();
    assert_eq!(pool.stats().used_pages, file.cached_pages());
    assert!(file.cached_pages() >= 40);
    agrees();
    // 3 The file changes; pinned bytes live on, and are charged to no pool.
    device.generation.store(1, Ordering::Relaxed);
    assert!(file.revalidate().unwrap());
    assert_eq!(pool.stats().used_pages, 0);
    agrees();
    drop(pin);
    agrees();
    // 4 Uncached reads.
    let mut buffer = vec![0; 1 << 16];
    for position in (0..2 * MIB).step_by(1 << 16) {
        file.read_at_with(&mut buffer, position, ReadOptions::new().uncached(true)).unwrap();
    }
    agrees();
    // 5 The file shrinks.
    fill();
    device.size.store(MIB, Ordering::Relaxed);
    device.generation.store(2, Ordering::Relaxed);
    file.revalidate().unwrap();
    fill();
    agrees();
    // 6 The handle is closed, the file idle.
    drop(file);
    check(&cache);
}

#[test]
fn a_pool_whose_pages_are_all_pinned_says_so_by_name() {
    let cache = cache();
    let pool = limited(&cache, "pinned", 20);
    let (device, file) = open(&pool, 1, MIB);
    let pin = file.pin(0, 20 * PAGE as usize).unwrap();
    assert_eq!(pool.stats().used_pages, 20);
    let error = file.read_at(&mut [0; 10], 30 * PAGE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(error.to_string().contains("\"pinned\"") && error.to_string().contains("81920"), "{error}");
    let error = file.read_at_with(&mut [0; 10], 30 * PAGE, ReadOptions::new().nowait(true)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    // Others are not concerned.
    let same = cache.open_backend(device.clone()).unwrap();
    read(&same, &device, 30 * PAGE, PAGE, PAGE);
    drop(pin);
    read(&file, &device, 40 * PAGE, PAGE, PAGE);
    check(&cache);
}

#[test]
fn a_reader_waits_for_fills_in_flight_of_its_own_pool() {
    let cache = cache();
    let pool = limited(&cache, "slow", 1);
    let (device, file) = open(&pool, 1, MIB);
    device.hold();
    thread::scope(|scope| {
        let (one, other) = (file.clone(), file.clone());
        let device = &device;
        scope.spawn(move || read(&one, device, 0, PAGE, PAGE));
        device.wait_for_fills(1);
        let late = scope.spawn(move || read(&other, device, 50 * PAGE, PAGE, PAGE));
        // Longer than it would look for what is not in flight.
        thread::sleep(std::time::Duration::from_millis(300));
        assert!(!late.is_finished(), "{:?}", late.join());
        device.release();
    });
    assert_eq!(pool.stats().used_pages, 1);
    check(&cache);
}

#[test]
fn limits_and_minima_change_while_in_use() {
    let cache = cache();
    let pool = cache.add_pool("a", PoolOptions::new()).unwrap();
    let (device, file) = open(&pool, 1, 8 * MIB);
    read(&file, &device, 0, 8 * MIB, PAGE);
    assert_eq!(pool.stats().used_pages, 2048);
    let pin = file.pin(0, 600 * PAGE as usize).unwrap();
    pool.set_limit(Some(500 * PAGE)).unwrap();
    assert!(pool.stats().used_pages >= 600, "what is pinned stays");
    assert!(pool.stats().used_pages < 1300, "{:?}", pool.stats());
    assert_eq!(file.read_at(&mut [0; 1], 2000 * PAGE).unwrap_err().kind(), ErrorKind::NoMemory);
    drop(pin);
    read(&file, &device, 0, 8 * MIB, PAGE);
    assert!(pool.stats().used_pages <= 500);
    pool.set_limit(None).unwrap();
    read(&file, &device, 0, 8 * MIB, PAGE);
    assert_eq!((pool.stats().used_pages, pool.stats().limit_bytes), (2048, None));
    thread::scope(|scope| {
        let reader = scope.spawn(|| (0..3).for_each(|_| read(&file, &device, 0, 8 * MIB, 8192)));
        for step in 0..200u64 {
            pool.set_limit(Some((100 + step * 37 % 900) * PAGE)).unwrap();
            pool.set_protected(step % 100 * PAGE).unwrap();
        }
        pool.set_protected(0).unwrap();
        pool.set_limit(Some(64 * PAGE)).unwrap();
        reader.join().unwrap();
    });
    assert!(pool.stats().used_pages <= 64);
    check(&cache);
}

#[test]
fn a_pool_ends_with_its_last_handle_and_its_pages_stay() {
    let cache = cache();
    let pool = limited(&cache, "a", 300);
    let (device, file) = open(&pool, 1, MIB);
    read(&file, &device, 0, MIB, PAGE);
    drop(pool);
    assert_eq!(cache.pool("a").unwrap().stats().used_pages, 256);
    let same = cache.open_backend(device.clone()).unwrap();
    drop(file);
    assert!(cache.pool("a").is_none());
    assert_eq!(cache.pools().len(), 1);
    assert_eq!((stats(&cache, "default").used_pages, same.cached_pages()), (256, 256));
    check(&cache);
    // The number and the name are free again, many times over.
    for round in 0..40 {
        let pool = limited(&cache, "a", 100 + round);
        let (device, file) = open(&pool, 2 + round, MIB);
        read(&file, &device, 0, MIB, PAGE);
        assert!(pool.stats().used_pages <= 100 + round && pool.stats().inserted_pages >= 256);
    }
    check(&cache);
    let (others, other) = open_default(&cache, 99, 3 * MEMORY);
    read(&other, &others, 0, 3 * MEMORY, 64 << 10);
    check(&cache);
}

#[test]
fn a_quiet_pool_remembers_by_its_own_age() {
    let cache = cache();
    let pool = limited(&cache, "quiet", 100);
    let (device, file) = open(&pool, 1, 120 * PAGE);
    file.advise(Hint::Random).unwrap();
    let (others, other) = open_default(&cache, 2, 4 * MEMORY);
    let before = cache.stats().activated_pages;
    for round in 0..4 {
        read(&file, &device, 0, 120 * PAGE, PAGE);
        read(&other, &others, round % 2 * 2 * MEMORY, 2 * MEMORY, 64 << 10);
    }
    assert!(pool.stats().refaulted_pages > 0);
    assert!(cache.stats().activated_pages > before, "twenty pages more would have kept them");
    check(&cache);
}

#[test]
fn either_a_smaller_bound_or_more_protection_is_refused() {
    let cache = cache();
    let pool = cache.add_pool("a", PoolOptions::new()).unwrap();
    for round in 0..500 {
        let begin = Barrier::new(2);
        let (smaller, protects) = thread::scope(|scope| {
            let resize = scope.spawn(|| {
                begin.wait();
                cache.resize(MEMORY / 2).is_ok()
            });
            begin.wait();
            let protects = pool.set_protected(MEMORY * 3 / 4).is_ok();
            (resize.join().unwrap(), protects)
        });
        assert!(smaller != protects, "round {round}: {smaller} {protects}");
        pool.set_protected(0).unwrap();
        cache.resize(MEMORY).unwrap();
    }
}

#[test]
fn names_and_options_that_do_not_fit_are_refused_with_a_remedy() {
    let cache = cache();
    let refused = |name: &str, options: PoolOptions| {
        let error = cache.add_pool(name, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        error.to_string()
    };
    let none = PoolOptions::new();
    let first = cache.add_pool("a", none.protected(20 * MIB)).unwrap();
    for name in ["", "default", "a"] {
        assert!(refused(name, none).contains("choose a name"));
    }
    assert!(refused("b", none.limit(100)).contains("4096"));
    assert!(refused("b", none.limit(MIB).protected(MIB + 1)).contains("no more than the limit"));
    assert!(refused("b", none.protected(20 * MIB)).contains("protect less"));
    assert!(refused("b", none.protected(u64::MAX)).contains("protect less"));
    let mut second = cache.add_pool("b", none.protected(4 * MIB).limit(4 * MIB)).unwrap();
    assert_eq!(second.set_protected(5 * MIB).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(second.set_limit(Some(3 * MIB)).unwrap_err().kind(), ErrorKind::InvalidInput);
    second.set_limit(None).unwrap();
    second.set_protected(5 * MIB).unwrap();
    let error = cache.resize(20 * MIB).unwrap_err();
    assert!(error.to_string().contains("protect less first"), "{error}");
    first.set_protected(0).unwrap();
    cache.resize(20 * MIB).unwrap();
    let others: Vec<_> = (0..13).map(|nth| cache.add_pool(&nth.to_string(), none).unwrap()).collect();
    assert!(refused("c", none).contains("15"));
    drop(others);
    second = cache.add_pool("c", none).unwrap();
    assert_eq!((second.name(), cache.pools().len()), ("c", 3), "b went with its handle");
    check(&cache);
}

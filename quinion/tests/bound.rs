//! Bound: a cache never takes more memory than it was given, and never hangs for want of it.
//!
//! The system's count of the memory of the two files is read all the while, from outside: the cache's own account is
//! compared with it. With far more readers than memory, each read succeeds or reports that there is no free page. A
//! child of a fork gets an error from every call.

#![allow(unsafe_code, reason = "fork")]

use quinion_testing::block_on;
use quinion_testing::device;
use std::fs;
use std::future::Future;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use quinion::backend::Mechanism;
use quinion::error::Result;
use quinion::internals::serving::ServedCache;
use quinion::{Cache, ErrorKind, ReadOptions};

use quinion_testing::content::{Dice, fill_content, verify};
use quinion_testing::device::Device;

const SIZE: u64 = (96 << 20) + 1234;

fn content() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let mut bytes = vec![0; SIZE as usize];
    fill_content(&mut bytes, 1, 0, 1);
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn cache(order: u8, mechanism: Mechanism) -> Cache {
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(order);
    builder.mechanism(mechanism).build().unwrap()
}

fn taken(cache: &Cache) -> u64 {
    let arena = cache.arena().share();
    let blocks =
        [arena.arena_fd(), arena.control_fd()].map(|file| rustix::fs::fstat(file).unwrap().st_blocks);
    blocks.iter().sum::<i64>() as u64 * 512
}

/// Ends the program if `body` takes longer than any machine should need.
fn within_minutes(body: impl FnOnce()) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            for _ in 0..3000 {
                thread::park_timeout(Duration::from_millis(100));
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
            eprintln!("five minutes have passed and some thread still waits");
            std::process::abort();
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        done.store(true, Ordering::Relaxed);
        watch.thread().unpark();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn the_system_never_gives_more_than_the_bound() {
    let (_folder, path) = content();
    for (order, mechanism) in [(0, Mechanism::Ring), (2, Mechanism::Threads), (9, Mechanism::Ring)] {
        let cache = cache(order, mechanism);
        let file = cache.open(&path).unwrap();
        let most = AtomicU64::new(0);
        let left = AtomicU64::new(12);
        within_minutes(|| {
            thread::scope(|scope| {
                for seed in 0..12 {
                    let (file, left) = (file.clone(), &left);
                    scope.spawn(move || {
                        churn(&file, seed);
                        left.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                let mut looks = 0;
                while left.load(Ordering::Relaxed) > 0 && looks < 1_000_000 {
                    most.fetch_max(taken(&cache), Ordering::Relaxed);
                    looks += 1;
                }
            });
        });
        let (most, stats) = (most.into_inner(), cache.stats());
        println!("order {order}, {mechanism:?}: {most} bytes at most of {}", stats.memory_bytes);
        assert!(most <= Cache::MEMORY_MIN, "{most} bytes, {stats:?}");
        assert!(most > Cache::MEMORY_MIN / 2, "{most} bytes: the test looked at nothing");
        assert!(stats.grown_bytes <= stats.memory_bytes && stats.evicted_pages > 0, "{stats:?}");
        cache.check().unwrap();
    }
}

fn churn(file: &quinion::File, seed: u64) {
    let (mut dice, mut buffer) = (Dice::new(seed), vec![0; 300_000]);
    for _ in 0..150 {
        let (position, len) = (dice.below(SIZE), 1 + dice.below(300_000) as usize);
        let bytes = file.read_at(&mut buffer[..len], position).unwrap();
        assert_eq!(bytes as u64, (SIZE - position).min(len as u64));
        verify(&buffer[..bytes], 1, position).unwrap();
    }
}

fn crowd(order: u8, mechanism: Mechanism, readers: u64, len: usize) {
    let (_folder, path) = content();
    let cache = cache(order, mechanism);
    let file = cache.open(&path).unwrap();
    let (start, refused) = (Barrier::new(readers as usize), AtomicU64::new(0));
    within_minutes(|| {
        thread::scope(|scope| {
            for reader in 0..readers {
                let (file, start, refused) = (file.clone(), &start, &refused);
                let body = move || {
                    let (region, mut buffer) = (SIZE / readers, vec![0; len]);
                    start.wait();
                    for step in 0..6 {
                        let position = reader * region + step * 15_000;
                        match file.read_at(&mut buffer, position) {
                            Ok(bytes) => verify(&buffer[..bytes], 1, position).unwrap(),
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}");
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        let pin = file.pin(position, 4096 + reader as usize);
                        if let Ok(pin) = &pin {
                            let bytes: Vec<u8> = pin.chunks().flatten().copied().collect();
                            verify(&bytes, 1, position).unwrap();
                        }
                    }
                };
                thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, body).unwrap();
            }
        });
    });
    let refused = refused.into_inner();
    println!("{readers} readers, order {order}, {mechanism:?}: {refused} of {} refused", readers * 6);
    assert!(taken(&cache) <= Cache::MEMORY_MIN);
    cache.check().unwrap();
    // Whatever was refused was refused for the moment only.
    let mut buffer = [0; 100_000];
    assert_eq!(file.read_at(&mut buffer, SIZE / 2).unwrap(), 100_000);
}

#[test]
fn more_readers_than_memory_succeed_or_get_an_error() {
    for mechanism in [Mechanism::Ring, Mechanism::Threads] {
        crowd(0, mechanism, 50, 300_000);
        crowd(9, mechanism, 200, 100_000);
    }
}

/// Loads a window that is one folio of 2 MiB: reads some bytes somewhere in it until they are there. Returns how often
/// there was no memory.
fn load(device: &Device, window: u64, read: impl Fn(&mut [u8], u64) -> quinion::error::Result<usize>) -> u64 {
    let (mut buffer, mut refused) = (vec![0; 3000], 0);
    let position = window * (2 << 20) + window * 997 % (1 << 20);
    loop {
        match read(&mut buffer, position) {
            Ok(bytes) => {
                assert_eq!(bytes, buffer.len());
                device::verify(&buffer, device, position);
                return refused;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}"),
        }
        refused += 1;
    }
}

/// A thousand loads of maximum folios are under way at once, 500 by threads and 500 by futures, and there is memory
/// for thirteen of them.
#[test]
fn a_thousand_loads_of_the_largest_folios_stay_within_the_bound() {
    const MEMORY: u64 = 32 << 20;
    const LOADS: u64 = 1000;
    let device = Device::new(LOADS * (2 << 20));
    let builder = Cache::builder().memory(MEMORY).readahead(0).folio_order_min(9);
    let cache = builder.build().unwrap();
    let file = cache.open_backend(std::sync::Arc::clone(&device) as _).unwrap();
    let (left, refused) = (AtomicU64::new(LOADS), AtomicU64::new(0));
    let (most, most_counted, looks) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let start = Barrier::new(LOADS as usize);
    within_minutes(|| {
        thread::scope(|scope| {
            for window in 0..LOADS {
                let (device, file) = (&device, file.clone());
                let (start, left, refused) = (&start, &left, &refused);
                let body = move || {
                    start.wait();
                    let told = if window % 2 == 0 {
                        load(device, window, |to, at| file.read_at(to, at))
                    } else {
                        load(device, window, |to, at| block_on::block_on(file.read_at_async(to, at)))
                    };
                    refused.fetch_add(told, Ordering::Relaxed);
                    left.fetch_sub(1, Ordering::Relaxed);
                };
                thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, body).unwrap();
            }
            // Requests stay at the device for a moment, so that as many as possible are in flight.
            scope.spawn(|| {
                while left.load(Ordering::Relaxed) > 0 {
                    device.hold();
                    thread::yield_now();
                    device.release();
                }
            });
            while left.load(Ordering::Relaxed) > 0 {
                most.fetch_max(taken(&cache), Ordering::Relaxed);
                most_counted.fetch_max(cache.stats().grown_bytes, Ordering::Relaxed);
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
    });
    let [most, counted, looks, refused] = [most, most_counted, looks, refused].map(AtomicU64::into_inner);
    println!("{most} bytes taken, {counted} counted at most of {MEMORY}; {looks} looks, {refused} refusals");
    assert!(most <= MEMORY && counted <= MEMORY, "{most} {counted}");
    assert!(most > MEMORY - (6 << 20) && looks > 100, "the test looked at nothing: {most}, {looks} looks");
    assert!(device.reads().iter().all(|(_, pages)| *pages == 512));
    cache.check().unwrap();
}

/// Pins that keep as much as they may: one more is refused at once, and readers go on.
#[test]
fn pins_beyond_their_share_are_refused_at_once_and_readers_go_on() {
    for (order, share) in [(0, None), (4, None), (9, Some(6 << 20))] {
        let device = Device::new(4 * Cache::MEMORY_MIN);
        let mut builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_min(order);
        if let Some(bytes) = share {
            builder = builder.pinned_max(bytes);
        }
        let cache = builder.build().unwrap();
        let max = share.unwrap_or(Cache::MEMORY_MIN / 2);
        let file = cache.open_backend(std::sync::Arc::clone(&device) as _).unwrap();
        let (step, mut pins) = (4096u64 << order, Vec::new());
        let error = loop {
            match file.pin(pins.len() as u64 * step, 10) {
                Ok(pin) => pins.push(pin),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoMemory);
        assert!(error.to_string().contains("pinned_max"), "{error}");
        assert_eq!((pins.len() as u64 * step, cache.stats().pinned_bytes), (max, max), "folios count whole");
        // Nothing was asked of the device for the pin that was refused, nor is for one that is too long.
        let asked = device.reads().len();
        assert_eq!(asked, pins.len());
        assert!(file.pin(0, max as usize + 1).is_err());
        assert_eq!(device.reads().len(), asked);
        // What is pinned already can be pinned again: it costs nothing more.
        let again = file.pin(0, 10).unwrap();
        assert_eq!(cache.stats().pinned_bytes, max);
        within_minutes(|| {
            let mut buffer = vec![0; 100_000];
            for position in (0..4 * Cache::MEMORY_MIN - 100_000).step_by(100_000) {
                assert_eq!(file.read_at(&mut buffer, position).unwrap(), buffer.len());
                device::verify(&buffer, &device, position);
            }
        });
        for (nth, pin) in pins.iter().enumerate() {
            device::verify(pin.chunks().next().unwrap(), &device, nth as u64 * step);
        }
        // The first folio has two pins, and the second alone keeps it.
        drop(pins);
        assert_eq!(cache.stats().pinned_bytes, step);
        drop(again);
        assert_eq!(cache.stats().pinned_bytes, 0);
        drop(file.pin(0, max as usize / 2).unwrap());
        cache.check().unwrap();
    }
}

fn poll_once<T>(future: &mut (impl Future<Output = Result<T>> + Unpin)) -> Option<ErrorKind> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer.err().map(|e| e.kind()),
        Poll::Pending => None,
    }
}

/// The first reads of a cache wait for each 2 MiB that it takes from the machine, unless it has taken them before.
#[test]
fn a_populated_cache_has_its_memory_before_the_first_read_and_no_more_than_its_bound() {
    const MEMORY: u64 = 64 << 20;
    let (_folder, path) = content();
    let cache = Cache::builder().memory(MEMORY).build().unwrap();
    let half = cache.populate(MEMORY / 2).unwrap();
    assert!((MEMORY / 2..MEMORY / 2 + (2 << 20)).contains(&half) && taken(&cache) >= half, "{half}");
    assert_eq!(cache.populate(1).unwrap(), half, "it has that already");
    let all = cache.populate(u64::MAX).unwrap();
    assert!(all <= MEMORY && all + (6 << 20) > MEMORY, "{:?}", cache.stats());
    assert!((all..=MEMORY).contains(&taken(&cache)), "{}", taken(&cache));
    let file = cache.open(&path).unwrap();
    let mut buffer = vec![0; 1 << 20];
    for at in (0..32 << 20).step_by(buffer.len()) {
        file.read_exact_at(&mut buffer, at).unwrap();
    }
    // The index and the rings of folios have extents of their own, which are kept for them.
    assert!(cache.stats().grown_bytes <= all + (4 << 20), "{all} {:?}", cache.stats());
    cache.check().unwrap();
}

#[test]
fn every_call_of_a_forked_child_says_so() {
    let (_folder, path) = content();
    let (ring, threads) = (cache(0, Mechanism::Ring), cache(0, Mechanism::Threads));
    let followed = Cache::builder().memory(Cache::MEMORY_MIN).miss_ratio_curve(true).build().unwrap();
    for cache in [ring, threads, followed] {
        let mut file = cache.open(&path).unwrap();
        let mut buffer = [0; 10_000];
        file.read_at(&mut buffer, 0).unwrap();
        let pin = file.pin(0, 5000).unwrap();
        // A thread of the parent makes it, or has made it.
        let mut call = file.sync_data_async();
        // SAFETY: the child calls what a child of a program with threads may not rely on (it allocates); glibc and the
        // other libraries of the tests' machines keep their allocators whole across a fork. It ends by `_exit` and does
        // not return.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let answers = [
                file.read_at(&mut buffer, 0).err().map(|e| e.kind()),
                file.read_at_with(&mut buffer, 0, ReadOptions::new().cached_only(true))
                    .err()
                    .map(|e| e.kind()),
                file.read_exact_at(&mut buffer, 0).err().map(|e| e.kind()),
                file.pin(0, 10).err().map(|e| e.kind()),
                file.revalidate().err().map(|e| e.kind()),
                poll_once(&mut file.read_at_async(&mut [0; 10], 0)),
                poll_once(&mut call),
                cache.open(&path).err().map(|e| e.kind()),
                cache.resize(Cache::MEMORY_MIN).err().map(|e| e.kind()),
                cache.populate(Cache::MEMORY_MIN).err().map(|e| e.kind()),
                file.residency(0, 10).err().map(|e| e.kind()),
                file.read_at(&mut [], 0).err().map(|e| e.kind()),
            ];
            let streams = file.read(&mut buffer).is_err() && file.seek(SeekFrom::End(0)).is_err();
            let quiet = file.is_empty()
                && file.cached_pages() == 0
                && cache.stats().memory_bytes == 0
                && cache.miss_ratio_curve().is_none();
            let wrong = answers.iter().position(|answer| *answer != Some(ErrorKind::Forked));
            drop(pin);
            drop(file.clone());
            drop(file);
            let unchecked = cache.check().is_ok();
            drop(cache);
            let status = wrong.map_or(
                i32::from(!streams) * 50 + i32::from(!quiet) * 70 + i32::from(unchecked) * 60,
                |at| at as i32 + 1,
            );
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        within_minutes(|| {
            // SAFETY: `status` is written by the call only.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        });
        assert!(libc::WIFEXITED(status), "the child ended by signal {}", libc::WTERMSIG(status));
        assert_eq!(libc::WEXITSTATUS(status), 0, "which of the child's calls went wrong");
        // The parent notices nothing.
        let held: Vec<u8> = pin.chunks().flatten().copied().collect();
        verify(&held, 1, 0).unwrap();
        assert_eq!(file.read_at(&mut buffer, 50 << 20).unwrap(), buffer.len());
        verify(&buffer, 1, 50 << 20).unwrap();
        drop((pin, file));
        cache.check().unwrap();
    }
}

/// Free pages cache nothing: a cache of 2,000 pages that made room for 256 at a time would have up to an eighth empty.
#[test]
fn a_small_cache_makes_room_by_a_64th_of_its_pages_at_a_time() {
    const PAGES: u64 = 8192;
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_max(0);
    let cache = builder.build().unwrap();
    let content = quinion::backend::MemoryFile::new(vec![7; PAGES as usize * 4096]);
    let file = cache.open_backend(std::sync::Arc::new(content)).unwrap();
    file.advise(quinion::Hint::Random).unwrap();
    let (mut evicted, mut most) = (0, 0);
    for at in 0..PAGES {
        file.read_exact_at(&mut [0; 4096], at * 7919 % PAGES * 4096).unwrap();
        let now = cache.stats().evicted_pages;
        (evicted, most) = (now, most.max(now - evicted));
    }
    let most_wanted = Cache::MEMORY_MIN / 4096 / 64;
    assert!(evicted > PAGES / 4 && (1..=most_wanted).contains(&most), "{evicted} pages, {most} at a time");
}

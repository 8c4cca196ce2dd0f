//! The read path's promises, with a device that can be watched, held and broken.
//!
//! Tests named with a letter and a number hold the statement of that name: S and R of the read state machine, B of
//! batched insertion, Q of readahead. S04 speaks of a signal that kills a thread that waits. Here that is a future that
//! is dropped (`async_read.rs`), or a process that shares a cache (`killed_owner.rs` of `quinion-owner`); a thread of
//! the owner's ends only with its process.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread;

use quinion::{Cache, ErrorKind, File, ReadOptions};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;

fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).build().expect("a small cache")
}

fn exact() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().expect("a small cache")
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}

fn read(file: &File, device: &Device, position: u64, len: usize) -> usize {
    let mut buffer = vec![0; len];
    let bytes = file.read_at(&mut buffer, position).expect("a read");
    verify(&buffer[..bytes], device, position);
    bytes
}

/// R14: a read of no bytes, or at or past the end of the file, returns 0 bytes and no error.
#[test]
fn r14_reads_at_and_past_the_end_return_nothing_and_no_error() {
    let (cache, device) = (cache(), Device::new(10_000));
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 10_000, 100), 0);
    assert_eq!(read(&file, &device, 1 << 40, 100), 0);
    assert_eq!(read(&file, &device, u64::MAX, 100), 0);
    assert_eq!(read(&file, &device, 0, 0), 0);
    assert_eq!(read(&file, &device, 9_990, 100), 10);
    assert!(file.read_exact_at(&mut [0; 100], 9_990).is_err_and(|e| e.kind() == ErrorKind::UnexpectedEof));
    cache.check().unwrap();
}

/// Q03: a file of no bytes is read without I/O.
#[test]
fn q03_an_empty_file_is_read_without_a_device() {
    let (cache, device) = (cache(), Device::new(0));
    let file = open(&cache, &device);
    assert!(file.is_empty());
    assert_eq!(read(&file, &device, 0, 4096), 0);
    assert_eq!(device.reads(), []);
}

/// S01: several readers of one cold page make one device read, and all get its bytes.
#[test]
fn s01_two_readers_of_one_cold_page_make_one_device_read() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    device.hold();
    let file = open(&cache, &device);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..4).map(|_| scope.spawn(|| read(&file, &device, 5 * PAGE, 4096))).collect();
        device.wait_for_fills(1);
        thread::sleep(std::time::Duration::from_millis(20));
        device.release();
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() == 4096));
    });
    assert_eq!(device.reads(), [(5, 1)]);
    assert_eq!(cache.stats().device_reads, 1, "each request is counted once");
}

/// S02: a reader that waits for a read which fails tries with a read of its own, and then reports the error of that.
#[test]
fn s02_a_waiter_of_a_failed_read_tries_itself_and_reports_its_own_error() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    device.fail(7);
    device.hold();
    let file = open(&cache, &device);
    thread::scope(|scope| {
        let readers: Vec<_> =
            (0..3).map(|_| scope.spawn(|| file.read_at(&mut [0; 4096], 7 * PAGE))).collect();
        device.wait_for_fills(1);
        device.release();
        for reader in readers {
            let error = reader.join().unwrap().unwrap_err();
            assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(5)));
        }
    });
    assert!(device.reads().len() >= 2, "the failure was not cached");
    device.mend(7);
    assert_eq!(read(&file, &device, 7 * PAGE, 4096), 4096, "the next reader asks the device again");
    cache.check().unwrap();
}

#[test]
fn a_bad_page_in_a_window_fails_its_own_readers_only() {
    let (cache, device) = (cache(), Device::new(256 * PAGE));
    device.fail(3);
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 0, 4096), 4096, "page 0 is read though its window holds a bad page");
    assert_eq!(read(&file, &device, 2 * PAGE, 4096), 4096);
    assert_eq!(file.read_at(&mut [0; 4096], 3 * PAGE).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(read(&file, &device, 4 * PAGE, 65536), 65536);
    cache.check().unwrap();
}

/// S06: bytes copied before an error are returned, and the next call reports the error.
#[test]
fn s06_bytes_before_an_error_are_returned_and_the_error_comes_with_the_next_call() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    device.fail(2);
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 0, 5 * 4096), 2 * 4096);
    assert_eq!(file.read_at(&mut [0; 4096], 2 * PAGE).unwrap_err().kind(), ErrorKind::Io);
}

/// S03: a read that does not wait returns the prefix that is ready, or is refused for now if there is none.
#[test]
fn s03_nowait_takes_the_ready_prefix_and_never_waits() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 0, 4096), 4096);
    device.hold();
    let nowait = ReadOptions::new().nowait(true);
    let mut buffer = [0; 3 * 4096];
    assert_eq!(file.read_at_with(&mut buffer, 0, nowait).unwrap(), 4096, "the ready prefix");
    let error = file.read_at_with(&mut buffer, 4 * PAGE, nowait).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    device.wait_for_fills(1);
    device.release();
    assert_eq!(file.read_at_with(&mut buffer, 4 * PAGE, nowait).unwrap(), 3 * 4096, "it had been started");
    verify(&buffer, &device, 4 * PAGE);
}

/// S03: a read that does not wait is refused for now where it would have to wait for a lock, of the tree, of those who
/// take pages out, or of readahead, and where no memory is free. It has started nothing then.
#[test]
fn s03_nowait_waits_for_no_lock_and_for_no_memory() {
    use quinion::backend::{Backend, WaitQueue};
    use quinion::internals::arena::{Arena, ArenaOptions};
    use quinion::internals::filemap::{Filemap, Reader, WaitPolicy};
    use quinion::internals::mapping::{Mapping, NewMapping};
    use quinion::internals::readahead::{Config, Readahead};
    use quinion::internals::sync::{Rank, RankedMutex};
    use quinion::internals::sys::fork::ForkGuard;
    use quinion::internals::units::{MappingId, Order, Orders};
    let arena = Arc::new(Arena::build(ArenaOptions { memory: Cache::MEMORY_MIN }).unwrap());
    let queue = Arc::new(WaitQueue::new());
    let filemap = Arc::new(Filemap::new(Arc::clone(&arena), queue, Orders::PAGES));
    let device = Device::new(64 * PAGE);
    let known = device.attributes().unwrap();
    let (id, process, backend) = (MappingId(1), ForkGuard::new(), Arc::clone(&device) as _);
    let new = NewMapping { arena: &arena, id, backend, attributes: &known, process };
    let mapping = Arc::new(Mapping::new(new).unwrap());
    let readahead = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(8)));
    let read = || {
        let call = Reader::plain(&readahead).call(&mapping, WaitPolicy::Now);
        filemap.read(&call, 5 * PAGE, &mut [0; 100]).map_err(|error| error.kind())
    };
    // The read is in another thread: one that waited would never come back.
    let refused = |of_what: &str| {
        let outcome = thread::scope(|scope| scope.spawn(read).join().unwrap());
        assert_eq!((outcome, device.reads().len()), (Err(ErrorKind::WouldBlock), 0), "{of_what}");
    };
    let tree = mapping.lock();
    refused("the tree's lock");
    drop(tree);
    let alone = mapping.invalidate_alone();
    refused("the lock of those who take pages out");
    drop(alone);
    let state = readahead.lock();
    refused("readahead's lock");
    drop(state);
    let frames: Vec<_> = std::iter::from_fn(|| arena.alloc(Order::ZERO)).collect();
    refused("memory");
    frames.into_iter().for_each(|frame| arena.free(frame, Order::ZERO));
    // Nothing is in its way now: it is started, and the device answers at once.
    assert_eq!((read(), device.reads().len()), (Ok(100), 1));
    mapping.check().unwrap();
}

/// S05: a reader whose folio leaves the cache while it waits for it asks the device again, at the same position.
#[test]
fn s05_a_reader_whose_folio_leaves_while_it_waits_asks_again_at_the_same_place() {
    for len in [100, 4000, 3 * 4096].repeat(5) {
        let (cache, device) = (exact(), Device::new(64 * PAGE));
        let (file, begins) = (open(&cache, &device), Barrier::new(2));
        device.hold();
        let nowait = ReadOptions::new().nowait(true);
        assert!(
            file.read_at_with(&mut vec![0; len], 5 * PAGE + 7, nowait).is_err(),
            "its pages are on their way"
        );
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                begins.wait();
                let mut buffer = vec![0; len];
                file.read_exact_at(&mut buffer, 5 * PAGE + 7).map(|()| buffer)
            });
            begins.wait();
            (0..1000).for_each(|_| thread::yield_now()); // so that it waits, if not each time
            device.generation.fetch_add(1, Ordering::Relaxed);
            assert!(file.revalidate().unwrap(), "its folio has left");
            device.release();
            verify(&reader.join().unwrap().unwrap(), &device, 5 * PAGE + 7);
        });
        let reads = device.reads();
        assert!(reads.len() >= 2 && reads[0].0 == 5 && reads[1].0 == 5, "{reads:?}");
        assert_eq!(cache.stats().in_flight, 0);
        cache.check().unwrap();
    }
}

#[test]
fn a_reader_that_never_waits_reads_a_file_through_a_fresh_cache() {
    for (cache, pages) in [(cache(), 600), (exact(), 70)] {
        let device = Device::new(pages * PAGE);
        let file = open(&cache, &device);
        let nowait = ReadOptions::new().nowait(true);
        let (mut buffer, mut at, mut tries) = ([0; 3000], 0, 0);
        while at < pages * PAGE {
            match file.read_at_with(&mut buffer, at, nowait) {
                Ok(bytes) => {
                    verify(&buffer[..bytes], &device, at);
                    (at, tries) = (at + bytes as u64, 0);
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            tries += 1;
            assert!(tries < 1000, "nothing was started at byte {at}");
        }
        cache.check().unwrap();
    }
}

#[test]
fn cached_only_starts_nothing() {
    let (cache, device) = (cache(), Device::new(1024 * PAGE));
    let file = open(&cache, &device);
    let cached_only = ReadOptions::new().cached_only(true);
    let mut buffer = vec![0; 1024 * 4096];
    assert_eq!(file.read_at_with(&mut buffer, 0, cached_only).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(device.reads(), []);
    assert_eq!(read(&file, &device, 0, 4096), 4096);
    let started = device.reads();
    let bytes = file.read_at_with(&mut buffer, 0, cached_only).unwrap();
    verify(&buffer[..bytes], &device, 0);
    assert_eq!(device.reads(), started, "not even a marker starts a window");
}

/// Q05: a sequential scan by reads of any length reads each page from the device once.
#[test]
fn q05_a_forward_scan_reads_each_page_once() {
    for step in [1, 512, 4096, 10_000, 65_536, 1 << 20] {
        let (cache, device) = (cache(), Device::new(900 * PAGE + 17));
        let file = open(&cache, &device);
        let mut position = 0;
        loop {
            match read(&file, &device, position, if step == 1 { 100 } else { step }) {
                0 => break,
                bytes => position += bytes as u64,
            }
        }
        assert_eq!(position, 900 * PAGE + 17);
        assert_eq!(device.times_read(), vec![1; 901], "reading {step} bytes at a time");
        cache.check().unwrap();
    }
}

/// Q07: random reads within a page read that page from the device, and no other.
#[test]
fn q07_random_reads_ask_for_the_asked_pages_alone() {
    let (cache, device) = (cache(), Device::new(2048 * PAGE));
    let file = open(&cache, &device);
    let mut pages = 0;
    for i in 1..200u64 {
        let page = i * 769 % 2000 + 2;
        if device.times_read()[page as usize] == 0 {
            assert_eq!(read(&file, &device, page * PAGE + 5, 10), 10);
            pages += 1;
        }
    }
    assert_eq!(device.times_read().iter().sum::<u32>(), pages);
}

/// B14: where cached and uncached pages alternate, each uncached page is a run of its own and one device read.
#[test]
fn b14_every_uncached_stretch_is_one_device_read() {
    let (cache, device) = (exact(), Device::new(32 * PAGE));
    let file = open(&cache, &device);
    for page in (0..32).step_by(2) {
        assert_eq!(read(&file, &device, page * PAGE, 1), 1);
    }
    let cache_all = Cache::clone(&cache);
    assert_eq!(device.reads().len(), 16);
    assert_eq!(read(&file, &device, 0, 32 * 4096), 32 * 4096);
    assert_eq!(device.reads().len(), 32, "each of the 16 odd pages alone, and no even page again");
    cache_all.check().unwrap();
}

/// B17: pages of a run that the device did not deliver leave the cache, and no read returns bytes of them.
#[test]
fn b17_pages_the_device_did_not_deliver_are_not_in_the_cache() {
    let (cache, device) = (cache(), Device::new(100 * PAGE));
    let file = open(&cache, &device);
    device.size.store(10 * PAGE + 100, Ordering::Relaxed); // it became shorter, without notice
    let mut buffer = vec![0xee; 100 * 4096];
    let mut position = 0;
    loop {
        match file.read_at(&mut buffer[position..], position as u64).unwrap() {
            0 => break,
            bytes => position += bytes,
        }
    }
    assert_eq!(position as u64, 10 * PAGE + 100, "nothing is shown that the device did not deliver");
    verify(&buffer[..position], &device, 0);
    assert!(file.cached_pages() <= 16, "the folio in which the file ends, and nothing behind it");
    cache.check().unwrap();
}

/// B17: readers that wait for pages of a run which the device does not deliver wake and look again. Behind the end of a
/// file that became shorter they find that end; where the run failed, they read their own pages.
#[test]
fn b17_readers_that_wait_for_undelivered_pages_wake_and_look_again() {
    let waiting = |pages: [u64; 3], change: &dyn Fn(&Device)| {
        let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_max(0);
        let (cache, device) = (builder.build().unwrap(), Device::new(64 * PAGE));
        let file = open(&cache, &device);
        device.hold();
        let nowait = ReadOptions::new().nowait(true);
        let error = file.read_at_with(&mut vec![0; 64 * 4096], 0, nowait).unwrap_err();
        assert_eq!((error.kind(), device.reads()), (ErrorKind::WouldBlock, vec![(0, 64)]));
        let found = thread::scope(|scope| {
            let (file, device) = (&file, &device);
            let readers = pages.map(|page| scope.spawn(move || read(file, device, page * PAGE, 4096)));
            (0..1000).for_each(|_| thread::yield_now());
            change(device);
            device.release();
            readers.map(|reader| reader.join().unwrap())
        });
        assert_eq!(cache.stats().in_flight, 0);
        cache.check().unwrap();
        (found, file.cached_pages(), device.reads()[1..].to_vec())
    };
    let shrinks = |device: &Device| device.size.store(10 * PAGE + 100, Ordering::Relaxed);
    let (found, cached, _) = waiting([5, 10, 40], &shrinks);
    assert_eq!((found, cached), ([4096, 100, 0], 11), "nothing behind the end is left");
    let (found, cached, mut reads) = waiting([5, 40, 41], &|device| device.fail(63));
    reads.sort_unstable();
    assert_eq!((found, cached), ([4096; 3], 3), "nothing of the run that failed is left");
    assert_eq!(reads, [(5, 1), (40, 1), (41, 1)]);
}

#[test]
fn a_dead_device_answers_with_its_own_error_and_is_not_asked_for_ever() {
    let (cache, device) = (cache(), Device::new(256 * PAGE));
    (0..256).for_each(|page| device.fail(page));
    let file = open(&cache, &device);
    let error = file.read_at(&mut vec![0; 1 << 20], 0).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(5)));
    assert!(device.reads().len() <= 10, "{} reads of a dead device", device.reads().len());
    cache.check().unwrap();
}

#[test]
fn scattered_pages_after_a_dense_file_find_nodes() {
    let cache = Cache::builder().memory(48 << 20).readahead(0).build().unwrap();
    let dense = Device::new(48 << 20);
    scan(&open(&cache, &dense), &dense);
    let sparse = Device::with_number(2, 200 << 30);
    let file = open(&cache, &sparse);
    for i in 0..15_000u64 {
        assert_eq!(read(&file, &sparse, i * 7919 % (200 << 18) * PAGE, 100), 100, "read {i}");
    }
    cache.check().unwrap();
}

#[test]
fn a_pin_looks_at_the_end_of_a_file_that_grew() {
    let (cache, device) = (cache(), Device::new(PAGE));
    let file = open(&cache, &device);
    assert_eq!(file.pin(0, 100_000).unwrap().len() as u64, PAGE);
    device.size.store(3 * PAGE, Ordering::Relaxed);
    let pinned = file.pin(PAGE, 100_000).unwrap();
    assert_eq!(pinned.len() as u64, 2 * PAGE);
    verify(&pinned.chunks().flatten().copied().collect::<Vec<u8>>(), &device, PAGE);
}

#[test]
fn a_file_that_grew_is_seen_at_its_end() {
    let (cache, device) = (cache(), Device::new(PAGE + 10));
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, PAGE, 100), 10);
    device.size.store(3 * PAGE, Ordering::Relaxed);
    assert_eq!(read(&file, &device, PAGE + 10, 100), 100, "its old last page is read anew");
    assert_eq!(file.len(), 3 * PAGE);
}

#[test]
fn an_open_after_a_change_sees_the_change() {
    let (cache, device) = (cache(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    assert_eq!(read(&file, &device, 0, 64 * 4096), 64 * 4096);
    device.generation.fetch_add(1, Ordering::Relaxed);
    let second = open(&cache, &device);
    assert_eq!(read(&second, &device, 0, 64 * 4096), 64 * 4096);
    assert_eq!(read(&file, &device, 0, 64 * 4096), 64 * 4096, "and so does the older handle");
    assert_eq!(cache.stats().files, 1);
}

#[test]
fn an_unchanged_file_is_not_read_again() {
    let (cache, device) = (cache(), Device::new(64 * PAGE));
    assert_eq!(read(&open(&cache, &device), &device, 0, 64 * 4096), 64 * 4096);
    let before = device.reads();
    assert_eq!(read(&open(&cache, &device), &device, 0, 64 * 4096), 64 * 4096);
    assert_eq!(device.reads(), before);
}

#[test]
fn pinned_bytes_do_not_change() {
    let (cache, device) = (cache(), Device::new(256 * PAGE + 5));
    let file = open(&cache, &device);
    let pinned = file.pin(PAGE + 7, 20 * 4096).unwrap();
    let before: Vec<u8> = pinned.chunks().flatten().copied().collect();
    assert_eq!(before.len(), 20 * 4096);
    verify(&before, &device, PAGE + 7);
    device.generation.fetch_add(1, Ordering::Relaxed);
    assert!(file.revalidate().unwrap());
    assert_eq!(read(&file, &device, 0, 30 * 4096), 30 * 4096, "new readers see the new bytes");
    // A scan of four times the memory reuses every frame but the pinned ones.
    let large = Device::with_number(9, 4 * Cache::MEMORY_MIN);
    scan(&open(&cache, &large), &large);
    let after: Vec<u8> = pinned.chunks().flatten().copied().collect();
    assert!(before == after, "pinned bytes changed");
    cache.check().unwrap();
    drop(pinned);
    cache.check().unwrap();
    assert_eq!(file.pin(256 * PAGE, 100).unwrap().len(), 5, "a pin ends where the file ends");
    assert!(file.pin(300 * PAGE, 100).unwrap().is_empty());
}

#[test]
fn a_pin_may_outlive_the_cache() {
    let (cache, device) = (cache(), Device::new(64 * PAGE));
    let pinned = open(&cache, &device).pin(0, 64 * 4096).unwrap();
    drop(cache);
    let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
    verify(&bytes, &device, 0);
}

#[test]
fn pinning_more_than_there_is_fails_clearly_and_loses_nothing() {
    let (cache, device) = (cache(), Device::new(4 * Cache::MEMORY_MIN));
    let file = open(&cache, &device);
    let error = file.pin(0, 4 * Cache::MEMORY_MIN as usize).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}");
    cache.check().unwrap();
    scan(&file, &device);
    cache.check().unwrap();
}

fn scan(file: &File, device: &Device) {
    let mut position = 0;
    loop {
        match read(file, device, position, 300_000) {
            0 => break,
            bytes => position += bytes as u64,
        }
    }
    assert_eq!(position, device.size.load(Ordering::Relaxed));
}

#[test]
fn a_scan_of_many_times_the_memory_stays_within_the_bound() {
    for order in [0, 2, 9] {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(order).build().unwrap();
        let device = Device::new(6 * Cache::MEMORY_MIN + 123);
        let file = open(&cache, &device);
        scan(&file, &device);
        scan(&file, &device);
        let stats = cache.stats();
        assert!(stats.grown_bytes <= stats.memory_bytes, "{stats:?}");
        assert!(stats.evicted_pages > 0);
        cache.check().unwrap();
    }
}

#[test]
fn many_threads_over_more_than_the_memory_read_the_right_bytes() {
    let (cache, device) = (cache(), Device::new(3 * Cache::MEMORY_MIN));
    let file = open(&cache, &device);
    thread::scope(|scope| {
        let readers = [1, 2, 3, 4, 5, 6, 7, 8u64].map(|seed| {
            let (file, device) = (file.clone(), &device);
            scope.spawn(move || {
                let mut state = seed;
                for _ in 0..3000 {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let position = (state >> 20) % device.size.load(Ordering::Relaxed);
                    read(&file, device, position, (state >> 50) as usize + 1);
                }
            })
        });
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    cache.check().unwrap();
    assert_eq!(cache.stats().in_flight, 0);
}

#[test]
fn many_small_files_come_and_go() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(50).build().unwrap();
    for number in 0..500 {
        let device = Device::with_number(number, (number % 7) * 3000);
        let file = open(&cache, &device);
        scan(&file, &device);
    }
    let stats = cache.stats();
    assert!(stats.files <= 51, "{} files are known", stats.files);
    cache.check().unwrap();
}

#[test]
fn read_and_seek_walk_through_the_file() {
    use std::io::{Read, Seek, SeekFrom};
    let (cache, device) = (cache(), Device::new(10 * PAGE));
    let mut file = open(&cache, &device);
    let mut all = Vec::new();
    file.read_to_end(&mut all).unwrap();
    verify(&all, &device, 0);
    assert_eq!(file.seek(SeekFrom::End(-100)).unwrap(), 10 * PAGE - 100);
    let mut clone = file.clone();
    let mut rest = Vec::new();
    assert_eq!(clone.read_to_end(&mut rest).unwrap(), 100);
    assert_eq!(file.stream_position().unwrap(), 10 * PAGE - 100, "a clone has a position of its own");
    assert!(file.seek(SeekFrom::Current(-(11 * PAGE as i64))).is_err());
}

#[test]
fn a_late_answer_says_nothing_of_the_size_of_a_file_that_changed() {
    let (cache, device) = (exact(), Device::new(10 * PAGE));
    let file = open(&cache, &device);
    let nowait = ReadOptions::new().nowait(true);
    device.hold();
    assert!(file.read_at_with(&mut [0; 4096], 3 * PAGE, nowait).is_err(), "its fill is on its way");
    // The file was cut off while the device read it, and has been written anew since.
    device.generation.fetch_add(1, Ordering::Relaxed);
    assert!(file.revalidate().unwrap());
    let size = device.size.swap(PAGE, Ordering::Relaxed);
    device.release();
    device.size.store(size, Ordering::Relaxed);
    assert_eq!(file.len(), 10 * PAGE);
    assert_eq!(read(&file, &device, 0, 10 * 4096), 10 * 4096);
    assert_eq!(file.pin(2 * PAGE, 4096).unwrap().len(), 4096);
}

#[test]
fn a_held_folio_is_its_holders_after_it_left_the_index() {
    use quinion::backend::Backend;
    use quinion::backend::FillRun;
    use quinion::internals::arena::{Arena, ArenaOptions, ReadableState};
    use quinion::internals::mapping::{FolioShape, Mapping, NewMapping};
    use quinion::internals::units::{MappingId, Orders, PageIndex};
    let arena = Arc::new(Arena::build(ArenaOptions { memory: Cache::MEMORY_MIN }).unwrap());
    let (device, process) = (Device::new(PAGE), quinion::internals::sys::fork::ForkGuard::new());
    let known = device.attributes().unwrap();
    let id = MappingId(1);
    let new = NewMapping { arena: &arena, id, backend: device, attributes: &known, process };
    let mapping = Mapping::new(new).unwrap();
    let frame = arena.alloc_run(1, quinion::internals::sync::LockWait::Wait).unwrap().frame;
    let run = FillRun { index: PageIndex(0), frame, pages: 1 };
    let mut guard = mapping.lock_to_add(run.index, 1, quinion::internals::sync::LockWait::Wait).unwrap();
    assert_eq!(guard.add_folio_range(run, FolioShape::of(Orders::PAGES), &mut |_, _| {}).pages, 1);
    drop(guard);
    arena.view().own(frame).complete();
    let held = mapping.try_hold(PageIndex(0)).unwrap();
    assert_eq!(held.is_readable(), ReadableState::Yes);
    assert_eq!(mapping.invalidate().unwrap(), 1, "between a reader's look and its copy");
    assert_eq!(held.copy_out(0, &mut [0; 100]), 100);
    drop(held);
    mapping.check().unwrap();
}

//! Drop behind: what uncached reads leave in the cache, and what they do not.
//!
//! The statements D01 to D20 by their numbers, each by Quinion's rule where that differs from the kernel's; a
//! sequential pass that never asks the device twice; a naive twin that knows only which reader wanted which page; and a
//! crowd.
//!
//! D06, D07 and D14 to D16 are about dirty folios: the mapping's part is in `dirty.rs`, with D08, of a folio that is
//! dropped while others hold it. D16 after a split is in `split_folio.rs`.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use quinion::backend::{Attributes, Backend, Fill, MemoryFile};
use quinion::{BatchRead, Cache, ErrorKind, File, Hint, OpenOptions, PageState, PoolOptions, ReadOptions};
use quinion_testing::block_on::block_on;
use quinion_testing::device::{Device, content, verify};

const PAGE: u64 = 4096;

fn cache(readahead: u64, order: u8) -> Cache {
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(readahead);
    builder.folio_order_max(order).folio_order_min(order).build().expect("a small cache")
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}

fn uncached(cache: &Cache, device: &Arc<Device>) -> File {
    let file = open(cache, device);
    file.set_uncached(true).unwrap();
    file
}

fn read(file: &File, device: &Device, position: u64, len: usize) {
    read_with(file, device, position, len, ReadOptions::new());
}

fn read_with(file: &File, device: &Device, position: u64, len: usize, options: ReadOptions) {
    let mut buffer = vec![0; len];
    let bytes = file.read_at_with(&mut buffer, position, options).unwrap();
    let left = device.size.load(Ordering::Relaxed).saturating_sub(position);
    assert_eq!(bytes as u64, left.min(len as u64));
    verify(&buffer[..bytes], device, position);
}

/// The pages that are cached. Asked last: it is a plain read of them.
fn cached(file: &File) -> Vec<u64> {
    let options = ReadOptions::new().cached_only(true).uncached(false);
    let pages = 0..file.len().div_ceil(PAGE);
    pages.filter(|page| file.read_at_with(&mut [0], page * PAGE, options).is_ok()).collect()
}

/// A device that cannot drop anything behind a reader.
#[derive(Debug)]
struct Once(Arc<Device>);

impl Backend for Once {
    fn name(&self) -> &'static str {
        "once"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.0.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.0.submit(fills);
    }
    fn can_drop_behind(&self) -> bool {
        false
    }
}

/// D01: an uncached read of a backend that cannot drop behind is refused as unsupported, and transfers nothing.
#[test]
fn d01_a_backend_that_does_not_support_it_says_so_and_transfers_nothing() {
    let (cache, device) = (cache(0, 0), Device::new(8 * PAGE));
    let file = cache.open_backend(Arc::new(Once(Arc::clone(&device)))).unwrap();
    let options = ReadOptions::new().uncached(true);
    let refused = |error: &quinion::Error| error.kind() == ErrorKind::Unsupported;
    let mut buffer = [7; 100];
    assert!(refused(&file.read_at_with(&mut buffer, 0, options).unwrap_err()));
    assert!(refused(&block_on(file.read_at_async_with(&mut buffer, 0, options)).unwrap_err()));
    let mut reads = [BatchRead::new(&mut buffer, 0)];
    file.read_batch_with(&mut reads, options);
    assert!(refused(reads[0].result().unwrap_err()));
    assert!(refused(&file.set_uncached(true).unwrap_err()));
    // Nor does a handle open as an uncached one.
    let wanted = OpenOptions::new().uncached(true).to_owned();
    let opened = cache.open_backend_with(Arc::new(Once(Arc::clone(&device))), &wanted);
    assert!(refused(&opened.map(drop).unwrap_err()));
    assert!(!file.is_uncached() && buffer == [7; 100] && device.reads().is_empty());
    read(&file, &device, 0, 100);
    assert_eq!(file.cached_pages(), 1);
}

/// D02: when an uncached read of a cold range returns, no page of the range is cached.
#[test]
fn d02_a_fully_read_range_is_dropped_when_the_call_returns() {
    for order in 0..=4 {
        let (cache, device) = (cache(0, order), Device::new(64 * PAGE));
        let file = open(&cache, &device);
        let options = ReadOptions::new().uncached(true);
        read_with(&file, &device, 16 * PAGE, 32 * PAGE as usize, options);
        assert_eq!(file.cached_pages(), 0, "order {order}");
        let times: Vec<u32> = (0..64).map(|page| u32::from((16..48).contains(&page))).collect();
        assert_eq!(device.times_read(), times);
        assert_eq!(cache.stats().dropped_behind_pages, 32);
        cache.check().unwrap();
    }
}

/// D02: the last folio is dropped when the read reaches the end of the file in it.
#[test]
fn d02_the_last_folio_goes_with_the_end_of_the_file() {
    let (cache, device) = (cache(0, 3), Device::new(10 * PAGE + 5));
    let file = uncached(&cache, &device);
    read(&file, &device, 0, 20 * PAGE as usize);
    assert_eq!(file.cached_pages(), 0);
}

/// D03: a page that a plain reader cached before is used by uncached reads, and neither dropped nor flagged.
#[test]
fn d03_pages_that_others_cached_are_used_and_neither_dropped_nor_flagged() {
    let (cache, device) = (cache(0, 0), Device::new(16 * PAGE));
    let (plain, file) = (open(&cache, &device), uncached(&cache, &device));
    read(&plain, &device, 8 * PAGE, 4096);
    read(&file, &device, 0, 16 * PAGE as usize);
    assert_eq!(file.cached_pages(), 1);
    assert_eq!(device.times_read(), [1; 16]);
    read(&file, &device, 8 * PAGE, 4096);
    drop(file);
    assert_eq!(cached(&plain), [8]);
    assert_eq!(cache.stats().adopted_pages, 0, "it was never flagged");
}

/// A stream of `reads` reads of a page each; what readahead left then.
fn with_left_overs(cache: &Cache, device: &Arc<Device>) -> File {
    let file = uncached(cache, device);
    (0..4).for_each(|page| read(&file, device, page * PAGE, 4096));
    assert!(file.cached_pages() > 0, "readahead is ahead");
    file
}

/// D04: pages fetched ahead that no read reached are dropped when the handle is closed, or is uncached no longer.
#[test]
fn d04_left_overs_go_when_the_handle_is_closed() {
    for order in [0, 3] {
        let (cache, device) = (cache(64 << 10, order), Device::new(256 * PAGE));
        let plain = open(&cache, &device);
        drop(with_left_overs(&cache, &device));
        assert_eq!(plain.cached_pages(), 0);
        assert!(cache.stats().left_over_pages > 0);
        let file = with_left_overs(&cache, &device);
        file.set_uncached(false).unwrap();
        assert_eq!(plain.cached_pages(), 0, "nor when it is uncached no longer");
        cache.check().unwrap();
    }
}

/// D04: pages whose fills are in flight when the handle is closed are dropped, and their frames come back.
#[test]
fn d04_fills_in_flight_at_the_close_are_dropped_and_their_frames_come_back() {
    let (cache, device) = (cache(64 << 10, 0), Device::new(256 * PAGE));
    let (plain, file) = (open(&cache, &device), uncached(&cache, &device));
    let free = cache.stats().free_bytes;
    device.hold();
    let nowait = ReadOptions::new().nowait(true);
    for page in 0..4 {
        let error = file.read_at_with(&mut [0; 4096], page * PAGE, nowait).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
    }
    assert!(plain.cached_pages() > 0);
    drop(file);
    assert_eq!(plain.cached_pages(), 0);
    device.release();
    assert_eq!(cache.stats().in_flight, 0);
    let stats = cache.stats();
    assert_eq!(stats.free_bytes, stats.data_bytes, "every frame is free; it began with {free}");
    cache.check().unwrap();
}

/// D04: a handle remembers what a bounded number of streams left over, and drops that of the oldest first.
#[test]
fn d04_a_handle_keeps_so_many_trails_and_the_oldest_goes() {
    let (cache, device) = (cache(0, 0), Device::new(4096 * PAGE));
    let file = uncached(&cache, &device);
    for nth in 0..100 {
        read(&file, &device, nth * 40 * PAGE, 100); // a page that is not passed
        let most = quinion::internals::filemap::TRAILS_MAX as u64;
        assert_eq!(file.cached_pages(), (nth + 1).min(most));
    }
    drop(file);
    let plain = open(&cache, &device);
    assert_eq!(plain.cached_pages(), 0);
}

/// D04: what a stream left over is dropped when it pauses, and the stream goes on as it began.
#[test]
fn d04_a_stream_that_pauses_leaves_nothing() {
    let (cache, device) = (cache(64 << 10, 0), Device::new(256 * PAGE));
    let file = with_left_overs(&cache, &device);
    while file.cached_pages() > 0 {
        thread::yield_now();
    }
    (4..8).for_each(|page| read(&file, &device, page * PAGE, 4096));
    assert!(file.cached_pages() > 0, "and goes on as it began");
}

/// D05: a plain read of a left-over clears its flag, and the page stays cached.
#[test]
fn d05_a_plain_reader_of_a_left_over_adopts_it() {
    let (cache, device) = (cache(64 << 10, 0), Device::new(256 * PAGE));
    let (plain, file) = (open(&cache, &device), with_left_overs(&cache, &device));
    plain.advise(Hint::Random).unwrap();
    read(&plain, &device, 5 * PAGE, 4096);
    read(&file, &device, 4 * PAGE, 4 * 4096);
    read(&plain, &device, 9 * PAGE, 1);
    drop(file);
    assert_eq!(cached(&plain), [5, 9]);
    assert_eq!(cache.stats().adopted_pages, 2);
    assert!(device.times_read().iter().all(|&times| times <= 1));
}

/// D08: the first uncached reader to pass a folio drops it, though another has read a part of it; the next one to want
/// it reads the device.
#[test]
fn d08_two_uncached_readers_of_a_folio_and_a_third() {
    let (cache, device) = (cache(0, 2), Device::new(16 * PAGE));
    let (one, two) = (uncached(&cache, &device), uncached(&cache, &device));
    // The second has read a part of it when the first drops it.
    let pinned = open(&cache, &device);
    read(&two, &device, 0, 100);
    read(&one, &device, 0, 4 * 4096);
    assert_eq!((one.cached_pages(), device.times_read()[0]), (0, 1), "the first to pass it drops it");
    read(&two, &device, 100, 4 * 4096);
    assert_eq!(device.times_read()[0], 2, "the next reads the device");
    drop((one, two));
    assert_eq!(pinned.cached_pages(), 0);
    cache.check().unwrap();
}

/// D08: of uncached readers that wait for one fill, the first to pass the folio drops it and the others still get their
/// bytes.
#[test]
fn d08_all_readers_that_wait_for_one_fill_get_their_bytes() {
    let (cache, device) = (cache(0, 4), Device::new(16 * PAGE));
    let file = uncached(&cache, &device);
    device.hold();
    thread::scope(|scope| {
        for _ in 0..4 {
            let (file, device) = (file.clone(), &device);
            scope.spawn(move || read(&file, device, 0, 16 * 4096));
        }
        device.wait_for_fills(1);
        device.release();
    });
    assert_eq!(file.cached_pages(), 0);
    cache.check().unwrap();
}

/// D09: a folio that is being filled when it is to be dropped is skipped, and is dropped later.
#[test]
fn d09_a_folio_locked_when_it_is_passed_is_skipped_and_dropped_later() {
    let (cache, device) = (cache(0, 0), Device::new(64 * PAGE));
    let (file, other) = (uncached(&cache, &device), uncached(&cache, &device));
    device.hold();
    let nowait = ReadOptions::new().nowait(true);
    assert!(other.read_at_with(&mut [0; 4096], 3 * PAGE, nowait).is_err());
    // A reader waits for it, and the stream that made it ends.
    thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&file, &device, 3 * PAGE, 100));
        device.wait_for_fills(1);
        drop(other);
        device.release();
        waiting.join().unwrap();
    });
    assert!(file.cached_pages() <= 1);
    read(&file, &device, 3 * PAGE + 100, 8192);
    drop(file);
    assert_eq!(open(&cache, &device).cached_pages(), 0);
    cache.check().unwrap();
}

/// A device of which a part of each request lands at once, and the rest when it is let go.
#[derive(Debug)]
struct Parts {
    device: Arc<Device>,
    /// What of so many bytes lands at once.
    lands: fn(usize) -> Range<usize>,
    held: Mutex<Vec<Fill>>,
}

impl Parts {
    fn new(device: &Arc<Device>, lands: fn(usize) -> Range<usize>) -> Arc<Self> {
        Arc::new(Self { device: Arc::clone(device), lands, held: Mutex::default() })
    }
    fn let_go(&self) {
        for fill in self.held.lock().unwrap().drain(..) {
            let bytes = fill.len();
            fill.complete(Ok(bytes));
        }
    }
    fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }
}

impl Backend for Parts {
    fn name(&self) -> &'static str {
        "parts"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.device.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        for mut fill in fills {
            let mut bytes = vec![0; fill.len()];
            content(&self.device, fill.position(), &mut bytes);
            fill.write(0, &bytes);
            fill.pages_were_read((self.lands)(fill.len()));
            self.held.lock().unwrap().push(fill);
        }
    }
}

/// D09: a folio whose own pages have all come and been read is dropped, though the fill that it is a part of goes on.
#[test]
fn d09_a_passed_folio_that_is_fully_read_is_dropped_before_its_fill_ends() {
    let (cache, device) = (cache(0, 2), Device::new(64 * PAGE));
    let halves = Parts::new(&device, |len| 0..len / 2);
    let file = cache.open_backend(Arc::clone(&halves) as _).unwrap();
    file.set_uncached(true).unwrap();
    let nowait = ReadOptions::new().nowait(true);
    let mut buffer = vec![0; 32 * 4096];
    let bytes = file.read_at_with(&mut buffer, 32 * PAGE, nowait).unwrap();
    assert_eq!(bytes, 16 * 4096);
    verify(&buffer[..bytes], &device, 32 * PAGE);
    assert_eq!(file.cached_pages(), 16, "the second half");
    assert_eq!(halves.held(), 1);
    halves.let_go();
    read(&file, &device, 48 * PAGE, 16 * 4096);
    assert_eq!(file.cached_pages(), 0);
    assert_eq!(halves.held(), 0, "nothing was asked for again");
    drop(file);
    let stats = cache.stats();
    assert_eq!(stats.free_bytes, stats.data_bytes);
    cache.check().unwrap();
}

/// D09: a folio of which some pages are still to come is skipped when it is passed, and is dropped later.
#[test]
fn d09_a_passed_folio_that_is_partially_read_stays_and_is_dropped_later() {
    let (cache, device) = (cache(0, 3), Device::new(64 * PAGE));
    // Two folios of 8 pages: the first half of the first is late.
    let late = Parts::new(&device, |len| len / 4..len);
    let file = cache.open_backend(Arc::clone(&late) as _).unwrap();
    file.set_uncached(true).unwrap();
    let nowait = ReadOptions::new().nowait(true);
    assert!(file.read_at_with(&mut [0; 16 * 4096], 0, nowait).is_err());
    read_with(&file, &device, 4 * PAGE, 4 * 4096, nowait);
    read_with(&file, &device, 8 * PAGE, 8 * 4096, nowait);
    assert_eq!(file.cached_pages(), 8, "the second folio went, and the first is still being filled");
    late.let_go();
    drop(file);
    assert_eq!(open(&cache, &device).cached_pages(), 0);
    cache.check().unwrap();
}

/// D10: a flagged folio that a plain handle has pinned is not dropped; its flag is cleared, and it stays cached.
#[test]
fn d10_a_pinned_folio_stays_and_is_its_users() {
    let (cache, device) = (cache(64 << 10, 0), Device::new(256 * PAGE));
    let (plain, file) = (open(&cache, &device), with_left_overs(&cache, &device));
    plain.advise(Hint::Random).unwrap();
    let pinned = plain.pin(5 * PAGE, 4096).unwrap();
    read(&file, &device, 4 * PAGE, 4 * 4096);
    drop(file);
    verify(pinned.chunks().next().unwrap(), &device, 5 * PAGE);
    drop(pinned);
    assert_eq!(cached(&plain), [5]);
    assert_eq!(cache.stats().adopted_pages, 1);
}

/// D10: a folio pinned by an uncached handle is dropped when the pin is gone and the stream has passed it.
#[test]
fn d10_a_folio_pinned_uncached_is_dropped_with_the_pin_or_the_stream_whichever_is_later() {
    let (cache, device) = (cache(0, 2), Device::new(256 * PAGE));
    let (plain, file) = (open(&cache, &device), uncached(&cache, &device));
    let whole = file.pin(0, 8 * 4096).unwrap();
    assert_eq!(plain.cached_pages(), 8);
    verify(whole.chunks().next().unwrap(), &device, 0);
    drop(whole);
    assert_eq!(plain.cached_pages(), 0, "the stream had passed it");
    let part = file.pin(16 * PAGE, 100).unwrap();
    drop(part);
    assert_eq!(plain.cached_pages(), 4, "the stream is in it");
    let part = file.pin(16 * PAGE + 100, 100).unwrap();
    read(&file, &device, 16 * PAGE + 200, 4 * 4096);
    assert!(plain.cached_pages() >= 4, "it is pinned");
    drop(file);
    assert_eq!(plain.cached_pages(), 4, "and outlives the handle");
    drop(part);
    assert_eq!(plain.cached_pages(), 0);
    cache.check().unwrap();
}

/// D11, D12: an uncached scan of ten times the cache, by reads of many pages and of parts of one, evicts nothing,
/// promotes nothing and leaves no shadow; a page that it dropped is a plain miss when it is read again.
#[test]
fn d11_d12_a_scan_of_ten_times_the_cache_evicts_nothing_and_leaves_no_shadow() {
    let (cache, device) = (cache(512 << 10, 0), Device::new(10 * Cache::MEMORY_MIN));
    let hot = Device::with_number(2, 1 << 20);
    let (kept, file) = (open(&cache, &hot), uncached(&cache, &device));
    read(&kept, &hot, 0, 1 << 20);
    let before = cache.stats();
    for at in (0..10 * Cache::MEMORY_MIN).step_by(1 << 20) {
        // A part of it by many reads of each folio: none of them is a use that counts.
        if at % (8 << 20) == 0 {
            for piece in (at..at + (1 << 20)).step_by(700) {
                read(&file, &device, piece, 700.min((at + (1 << 20) - piece) as usize));
            }
        } else {
            read(&file, &device, at, 1 << 20);
        }
    }
    let after = cache.stats();
    assert_eq!((after.adopted_pages, after.activated_pages), (0, 0), "nothing of it was promoted");
    assert_eq!(kept.cached_pages(), 256);
    assert_eq!((after.evicted_pages, after.shadowed_pages), (before.evicted_pages, before.shadowed_pages));
    assert_eq!(after.shadow_bytes, 0);
    assert!(device.times_read().iter().all(|&times| times == 1));
    read(&file, &device, 0, 1 << 20);
    assert_eq!(cache.stats().refaulted_pages, 0, "what comes back is a stranger");
}

/// D11: uncached streams whose windows together are larger than the free part, and are all on their way, take no page
/// that others cached:
///  1 A file is read once, and kept; three quarters of the cache are free.
///  2 Readers that leave nothing begin, each a stream of its own, at a device that takes its time.
///  3 Nothing is free, fills in flight cannot be evicted, and the next window takes frames of the file that was kept.
#[test]
fn d11_windows_on_their_way_take_no_pages_that_others_cached() {
    const STREAMS: u64 = 80;
    const EACH: u64 = 1 << 20;
    for order in [0, 4] {
        let (cache, device) = (cache(512 << 10, order), Device::new(STREAMS * EACH));
        let hot = Device::with_number(2, 2 << 20);
        let kept = open(&cache, &hot);
        read(&kept, &hot, 0, 2 << 20);
        let files: Vec<File> = (0..STREAMS).map(|_| uncached(&cache, &device)).collect();
        let each = |step: &dyn Fn(&File, u64)| {
            files.iter().zip((0..).step_by(EACH as usize)).for_each(|(file, start)| step(file, start));
        };
        device.hold();
        // Two rounds, so that there is a window that is asked for and one ahead of it.
        for _ in 0..2 {
            each(&|file, start| {
                file.advise(Hint::Sequential).unwrap();
                let nowait = ReadOptions::new().nowait(true);
                let mut buffer = vec![0; 64 << 10];
                let waits = file.read_at_with(&mut buffer, start, nowait).unwrap_err();
                assert_eq!(waits.kind(), ErrorKind::WouldBlock);
            });
        }
        assert_eq!((cache.stats().evicted_pages, kept.cached_pages()), (0, 512), "order {order}");
        device.release();
        thread::scope(|scope| {
            for (file, start) in files.iter().zip((0..).step_by(EACH as usize)) {
                let device = &device;
                scope.spawn(move || {
                    for at in (start..start + EACH).step_by(64 << 10) {
                        read(file, device, at, 64 << 10);
                    }
                });
            }
        });
        assert_eq!(kept.cached_pages(), 512, "order {order}");
        drop(files);
        cache.check().unwrap();
    }
}

/// D11: an uncached reader that does not wait takes nothing of others beyond the share, and begins with as much as
/// there is:
///  1 The pages of uncached reads are pinned, and are an eighth of the pool; the rest is another file's.
///  2 Three pages of that are evicted.
///  3 A read of sixteen that waits for nothing begins three.
#[test]
fn d11_a_reader_that_does_not_wait_takes_no_more_than_there_is() {
    let cache = cache(0, 0);
    let pool = cache.add_pool("streams", PoolOptions::new().limit(4 << 20)).unwrap();
    let (device, other) = (Device::new(4 << 20), Device::with_number(2, 8 << 20));
    let file = pool.open_backend(Arc::clone(&device) as _).unwrap();
    file.set_uncached(true).unwrap();
    let pins: Vec<_> = (0..512 << 10).step_by(64 << 10).map(|at| file.pin(at, 64 << 10).unwrap()).collect();
    let kept = pool.open_backend(other.clone() as _).unwrap();
    (0..2048).for_each(|turn| read(&kept, &other, turn * 1_003 % 2048 * PAGE, 1));
    let there = cached(&kept);
    there[..3].iter().for_each(|page| assert_eq!(kept.dont_need(page * PAGE, PAGE).unwrap(), 1));
    let mut buffer = vec![0; 64 << 10];
    let waits = file.read_at_with(&mut buffer, 1 << 20, ReadOptions::new().nowait(true));
    let begun: u32 = device.reads().iter().filter(|(first, _)| *first >= 256).map(|(_, pages)| pages).sum();
    assert_eq!((begun, cached(&kept)), (3, there[3..].to_vec()), "{waits:?}");
    drop(pins);
}

/// D11: what is asked for gets memory from others though its folio begins before it:
///  1 The pages of uncached reads are pinned, and are an eighth of the pool; the rest is another file's.
///  2 Reads go down page by page, and begin within folios; others begin at any place of one.
#[test]
fn d11_a_folio_that_begins_before_the_asked_page_gets_memory() {
    for order in [0, 2, 4] {
        let cache = cache(0, order);
        let pool = cache.add_pool("streams", PoolOptions::new().limit(4 << 20)).unwrap();
        let (device, other) = (Device::new(4 << 20), Device::with_number(2, 8 << 20));
        let file = pool.open_backend(Arc::clone(&device) as _).unwrap();
        file.set_uncached(true).unwrap();
        let pins: Vec<_> =
            (0..512 << 10).step_by(64 << 10).map(|at| file.pin(at, 64 << 10).unwrap()).collect();
        let kept = pool.open_backend(other.clone() as _).unwrap();
        (0..2048).for_each(|turn| read(&kept, &other, turn * 1_003 % 2048 * PAGE, 1));
        for page in (512..1024).rev() {
            read(&file, &device, page * PAGE, 4096);
        }
        for folio in (128..512).step_by(32) {
            read(&file, &device, (folio + 13) * PAGE + 7, 1);
        }
        drop(pins);
        cache.check().unwrap();
    }
}

/// D13: reads of parts of a large flagged folio leave it cached until one has reached its end.
#[test]
fn d13_a_part_of_a_large_folio_leaves_it_until_its_end_is_reached() {
    let (cache, device) = (cache(0, 4), Device::new(64 * PAGE));
    let file = uncached(&cache, &device);
    let mut at = 0;
    while at + 100 < 16 * PAGE {
        read(&file, &device, at, 100);
        at += 100;
        assert_eq!(file.cached_pages(), 16, "at byte {at}");
    }
    read(&file, &device, at, 100);
    assert_eq!(file.cached_pages(), 16, "the next one");
    assert!(device.times_read()[..32].iter().all(|&times| times == 1));
}

/// D13: a folio within which a stream began is dropped when the stream turns out to go upwards.
#[test]
fn d13_a_folio_in_which_a_stream_began_goes_when_it_has_gone_up_from_it() {
    let (cache, device) = (cache(0, 2), Device::new(64 * PAGE));
    let file = uncached(&cache, &device);
    read(&file, &device, PAGE + 7, 4 * 4096);
    assert_eq!(file.cached_pages(), 8, "it may go down from here");
    read(&file, &device, 5 * PAGE + 7, 3 * 4096);
    assert_eq!(file.cached_pages(), 4, "it went up");
}

/// D13: a stream that goes downwards reads each page from the device once, and leaves a bounded number of pages.
#[test]
fn d13_a_stream_that_goes_down_reads_each_page_once() {
    for order in 0..=4 {
        let (cache, device) = (cache(64 << 10, order), Device::new(512 * PAGE));
        let file = uncached(&cache, &device);
        for page in (0..512).rev() {
            read(&file, &device, page * PAGE, 4096);
            assert!(file.cached_pages() <= 200, "{} pages at {page}", file.cached_pages());
        }
        let times = device.times_read();
        assert!(times.iter().all(|&times| times == 1), "order {order}: {:?} {times:?}", device.reads());
    }
}

/// D18: an uncached read that fails reports its error once, and leaves no page cached.
#[test]
fn d18_an_error_is_reported_once_and_nothing_is_cached() {
    let (cache, device) = (cache(0, 0), Device::new(16 * PAGE));
    let file = uncached(&cache, &device);
    device.fail(5);
    assert_eq!(file.read_at(&mut [0; 4096], 5 * PAGE).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(file.cached_pages(), 0);
    device.mend(5);
    read(&file, &device, 5 * PAGE, 4096);
    assert_eq!(file.cached_pages(), 0);
    cache.check().unwrap();
}

/// D19: an uncached read of a cold page that does not wait is refused for now, and leaves no page once its handle is
/// closed.
#[test]
fn d19_nowait_on_a_cold_page_says_again_and_leaves_nothing() {
    let (cache, device) = (cache(0, 0), Device::new(16 * PAGE));
    let (plain, file) = (open(&cache, &device), uncached(&cache, &device));
    device.hold();
    let nowait = ReadOptions::new().nowait(true);
    let again = |file: &File| file.read_at_with(&mut [0; 4096], 0, nowait).unwrap_err().kind();
    assert_eq!(again(&file), ErrorKind::WouldBlock);
    assert_eq!(again(&file), ErrorKind::WouldBlock);
    device.release();
    read_with(&file, &device, 0, 4096, nowait);
    assert_eq!((plain.cached_pages(), device.times_read()[0]), (0, 1));
    device.hold();
    assert_eq!(again(&file), ErrorKind::WouldBlock);
    device.release();
    drop(file);
    assert_eq!(plain.cached_pages(), 0, "nobody came for it");
    cache.check().unwrap();
}

/// D20: folios that any kind of uncached read creates are flagged from the start, so that all are dropped with the
/// handle.
#[test]
fn d20_folios_of_every_route_are_born_with_the_flag() {
    // The drop is made by a miss with its window, by the marker's window, by a batch, by a future and by its blocking
    // task.
    let (cache, device) = (cache(256 << 10, 0), Device::new(2048 * PAGE));
    let (plain, file) = (open(&cache, &device), open(&cache, &device));
    let options = ReadOptions::new().uncached(true);
    (0..64).for_each(|page| read_with(&file, &device, page * PAGE, 4096, options));
    let mut buffers = [[0; 4096]; 8];
    let mut reads: Vec<_> =
        buffers.iter_mut().zip(500..).map(|(b, page)| BatchRead::new(b, page * PAGE)).collect();
    file.read_batch_with(&mut reads, options);
    reads.iter().for_each(|read| verify(read.bytes(), &device, read.position()));
    let mut buffer = vec![0; 5000];
    block_on(file.read_at_async_with(&mut buffer, 1000 * PAGE, options)).unwrap();
    verify(&buffer, &device, 1000 * PAGE);
    device.fail(1501);
    assert!(block_on(file.read_at_async_with(&mut [0; 4096], 1501 * PAGE, options)).is_err());
    assert!(plain.cached_pages() > 0, "something is left over");
    drop(file);
    assert_eq!(plain.cached_pages(), 0);
    assert!(cache.stats().adopted_pages == 0 && cache.stats().readahead_wasted_pages == 0);
    cache.check().unwrap();
}

/// D20: an uncached read works at any offset, for any length and any alignment of the buffer. The kernel's direct reads
/// want all three aligned; these are of a file that is read directly.
#[test]
fn d20_any_offset_length_and_alignment_of_the_buffer_works() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let device = Device::new(40 * PAGE + 77);
    let mut bytes = vec![0; 40 * PAGE as usize + 77];
    content(&device, 0, &mut bytes);
    std::fs::write(&path, &bytes).unwrap();
    for order in [0, 3] {
        let cache = cache(0, order);
        let file = cache.open(&path).unwrap();
        let options = ReadOptions::new().uncached(true);
        let mut buffer = vec![0; 9 * PAGE as usize];
        for (offset, skew) in
            [0, 1, 511, 512, 4095].into_iter().flat_map(|at| [0, 1, 7, 512].map(|by| (at, by)))
        {
            for len in [1, 511, 512, 4096, 4097, 8 * 4096 - 1] {
                let position = 5 * PAGE + offset;
                let to = &mut buffer[skew..skew + len];
                assert_eq!(file.read_at_with(to, position, options).unwrap(), len);
                verify(to, &device, position);
            }
        }
        let last = 40 * PAGE + 3;
        assert_eq!(file.read_at_with(&mut buffer[1..4096], last, options).unwrap(), 74);
        verify(&buffer[1..75], &device, last);
        drop(file);
        assert_eq!(cache.open(&path).unwrap().cached_pages(), 0, "order {order}");
        cache.check().unwrap();
    }
}

#[test]
fn a_clone_begins_as_its_original_and_leaves_its_own_behind() {
    let (cache, device) = (cache(0, 0), Device::new(16 * PAGE));
    let file = uncached(&cache, &device);
    let clone = file.clone();
    assert!(clone.is_uncached());
    read(&clone, &device, 0, 100);
    read(&file, &device, 5 * PAGE, 100);
    drop(clone);
    assert_eq!(file.cached_pages(), 1);
    file.set_uncached(false).unwrap();
    assert_eq!(file.cached_pages(), 0);
    read(&file, &device, 0, 100);
    assert_eq!(file.cached_pages(), 1);
}

#[test]
fn one_sequential_pass_never_reads_a_byte_twice_and_leaves_nothing() {
    for order in 0..=9 {
        for (len, start) in
            [(4096, 0), (65536, 0), (1 << 20, 0), (100, 0), (4096, 77), (65536, 1000), (777, 4095)]
        {
            let builder = Cache::builder().memory(32 << 20).folio_order_max(order);
            let cache = builder.build().unwrap();
            let device = Device::new((4 << 20) + 321);
            let file = uncached(&cache, &device);
            let mut at = start;
            while at < device.size.load(Ordering::Relaxed) {
                read(&file, &device, at, len);
                at += len as u64;
            }
            let times = device.times_read();
            assert!(times.iter().all(|&times| times == 1), "order {order}, {len} bytes from {start}");
            let kept = file.cached_pages();
            drop(file);
            assert!(kept <= 1024, "{kept} pages");
            assert_eq!(open(&cache, &device).cached_pages(), 0, "order {order}, {len} bytes from {start}");
        }
    }
}

#[test]
fn streams_that_share_a_handle_do_not_disturb_each_other() {
    let (cache, device) = (cache(64 << 10, 0), Device::new(4096 * PAGE));
    let file = uncached(&cache, &device);
    for step in 0..256 {
        for stream in 0..8 {
            read(&file, &device, (stream * 512 + step) * PAGE, 4096);
        }
    }
    let times = device.times_read();
    assert!(times.iter().enumerate().all(|(page, &times)| times == 1 || page % 512 >= 256));
    drop(file);
    assert_eq!(open(&cache, &device).cached_pages(), 0);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Plain {
        at: u64,
        len: usize,
    },
    /// A read of the uncached handle, or an uncached one of the third.
    Uncached {
        at: u64,
        len: usize,
        third: bool,
    },
    Reopen,
    /// A plain pin, given back at once.
    Pin {
        at: u64,
        len: usize,
    },
}

const TWIN_PAGES: u64 = 96;

fn ops() -> impl Strategy<Value = Op> {
    let range = || {
        let aligned = (0..TWIN_PAGES, 1..20usize).prop_map(|(page, pages)| (page * PAGE, pages * 4096));
        prop_oneof![aligned, (0..TWIN_PAGES * PAGE, 1..30_000usize)]
    };
    prop_oneof![
        2 => range().prop_map(|(at, len)| Op::Plain { at, len }),
        6 => (range(), any::<bool>()).prop_map(|((at, len), third)| Op::Uncached { at, len, third }),
        1 => Just(Op::Reopen),
        1 => range().prop_map(|(at, len)| Op::Pin { at, len }),
    ]
}

proptest! {
    #[test]
    fn uncached_reads_leave_exactly_the_pages_of_plain_readers(
        ops in prop::collection::vec(ops(), 1..40),
        order in 0..4u8,
        readahead in prop_oneof![Just(0u64), Just(64 << 10)],
    ) {
        let (cache, device) = (cache(readahead, order), Device::new(TWIN_PAGES * PAGE - 1000));
        let (plain, third) = (open(&cache, &device), open(&cache, &device));
        plain.advise(Hint::Random).unwrap(); // what it reads is what it wants
        third.advise(Hint::Random).unwrap();
        let mut file = uncached(&cache, &device);
        let mut wanted = vec![false; TWIN_PAGES as usize];
        let mut want = |at: u64, len: usize| {
            let end = (at + len as u64).min(device.size.load(Ordering::Relaxed));
            if at < end {
                let block = 1 << order;
                let pages = at / PAGE / block * block..((end - 1) / PAGE / block + 1) * block;
                pages.for_each(|page| wanted[page as usize] = true);
            }
        };
        for op in ops {
            match op {
                Op::Plain { at, len } => {
                    read(&plain, &device, at, len);
                    want(at, len);
                }
                Op::Pin { at, len } => {
                    drop(plain.pin(at, len).unwrap());
                    want(at, len);
                }
                Op::Uncached { at, len, third: false } => read(&file, &device, at, len),
                Op::Uncached { at, len, third: true } => {
                    read_with(&third, &device, at, len, ReadOptions::new().uncached(true));
                }
                Op::Reopen => file = uncached(&cache, &device),
            }
            cache.check().unwrap();
        }
        drop((file, third));
        let pages = wanted.iter().filter(|wanted| **wanted).count() as u64;
        prop_assert_eq!(plain.cached_pages(), pages);
        let in_file = (0..TWIN_PAGES).filter(|page| wanted[*page as usize]).collect::<Vec<_>>();
        prop_assert_eq!(cached(&plain), in_file);
    }
}

#[derive(Clone, Copy, Debug)]
struct WholeRead {
    first: u64,
    folios: u64,
    is_plain: bool,
    other: bool,
}

proptest! {
    #[test]
    fn each_call_leaves_and_fetches_exactly_the_whole_folios_that_the_twin_says(
        reads in prop::collection::vec(
            (0..24u64, 1..8u64, prop::bool::weighted(0.2), any::<bool>())
                .prop_map(|(first, folios, is_plain, other)| WholeRead { first, folios, is_plain, other }),
            1..60,
        ),
        order in 0..4u8,
    ) {
        let block = 1u64 << order;
        let (cache, device) = (cache(0, order), Device::new(32 * block * PAGE));
        let handles = [open(&cache, &device), open(&cache, &device)];
        let mut stays = [false; 32];
        let mut times = [0; 32];
        for WholeRead { first, folios, is_plain, other } in reads {
            let options = ReadOptions::new().uncached(!is_plain);
            let (at, len) = (first * block * PAGE, (folios * block * PAGE) as usize);
            read_with(&handles[usize::from(other)], &device, at, len, options);
            for folio in first as usize..(first + folios) as usize {
                times[folio] += u32::from(!stays[folio]);
                stays[folio] |= is_plain;
            }
            let staying = stays.iter().filter(|stays| **stays).count() as u64;
            prop_assert_eq!(handles[0].cached_pages(), staying * block);
        }
        let read: Vec<u32> = times.iter().flat_map(|&times| vec![times; block as usize]).collect();
        prop_assert_eq!(device.times_read(), read);
        cache.check().unwrap();
    }
}

#[test]
fn a_crowd_reads_right_bytes_and_leaves_only_pages_of_plain_readers() {
    let pages = 6000; // more than the cache holds
    let (cache, device) = (cache(128 << 10, 0), Device::new(pages * PAGE));
    let (shared, stop) = (uncached(&cache, &device), AtomicBool::new(false));
    let reads = if std::env::var_os("QUINION_SOAK").is_some() { 20_000 } else { 1_000 };
    let region = pages / 2; // no plain reader comes behind it
    thread::scope(|scope| {
        let (cache, device, shared, stop) = (&cache, &device, &shared, &stop);
        let readers: Vec<_> = (0..4u64)
            .map(|nth| {
                scope.spawn(move || {
                    let own = shared.clone();
                    let file = if nth % 2 == 0 { shared } else { &own };
                    let mut at = nth * 900 * PAGE;
                    for turn in 0..reads {
                        let len = [100, 4096, 65536, 30_000][(turn + nth) as usize % 4];
                        read(file, device, at, len);
                        at = (at + len as u64) % ((pages - 16) * PAGE);
                        if turn % 97 == 0 {
                            at = turn * 7919 % (pages - 16) * PAGE;
                        }
                        if turn % 31 == 0 {
                            drop(own.pin(at, 9000).unwrap());
                        }
                    }
                })
            })
            .collect();
        for nth in 0..2u64 {
            scope.spawn(move || {
                let plain = open(cache, device);
                plain.advise(Hint::Random).unwrap();
                let mut turn = nth;
                while !stop.load(Ordering::Relaxed) {
                    turn += 2;
                    read(&plain, device, turn * 6151 % (region * PAGE - 10_000), 9_999);
                }
            });
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        stop.store(true, Ordering::Relaxed);
    });
    drop(shared);
    cache.check().unwrap();
    let plain = open(&cache, &device);
    let behind: Vec<_> = cached(&plain).into_iter().filter(|page| *page >= region).collect();
    assert_eq!(behind, Vec::<u64>::new(), "nobody wanted these to stay");
}

/// D11: a cache that is full of what others read gives an eighth to uncached streams, however many they are, and each
/// of them gets on. A pool at its limit is as a cache.
#[test]
fn d11_many_streams_in_a_full_cache_take_an_eighth_of_it() {
    const STREAMS: u64 = 16;
    const EACH: u64 = 2 << 20;
    for limit in [None, Some(4 << 20)] {
        let cache = cache(512 << 10, 0);
        let pool = limit.map(|limit| cache.add_pool("streams", PoolOptions::new().limit(limit)).unwrap());
        let device = Device::new(STREAMS * EACH);
        let (other, kept) = {
            let other = Device::with_number(2, 2 * Cache::MEMORY_MIN);
            let kept = match &pool {
                Some(pool) => pool.open_backend(other.clone() as _).unwrap(),
                None => open(&cache, &other),
            };
            (other, kept)
        };
        // In no order, so by no stream, and until nothing is free.
        let pages = other.size.load(Ordering::Relaxed) / PAGE;
        (0..pages).for_each(|turn| read(&kept, &other, turn * 1_000_003 % pages * PAGE, 1));
        let before = kept.cached_pages();
        thread::scope(|scope| {
            for nth in 0..STREAMS {
                let file = match &pool {
                    Some(pool) => pool.open_backend(Arc::clone(&device) as _).unwrap(),
                    None => open(&cache, &device),
                };
                file.set_uncached(true).unwrap();
                let device = &device;
                scope.spawn(move || {
                    for at in (nth * EACH..(nth + 1) * EACH).step_by(64 << 10) {
                        read(&file, device, at, 64 << 10);
                    }
                });
            }
        });
        // Beyond the eighth, each may take what it asks for, if all that the others have is on its way.
        let (after, most) = (kept.cached_pages(), before / 8 + STREAMS * 16);
        assert!(before - after <= most, "{before} pages before, {after} after, {limit:?}");
        cache.check().unwrap();
    }
}

/// 1. An uncached write inserts its folios, locked; another thread takes them for write-back.
/// 2. The device is faster than the writer: the write-back ends while they are locked, and keeps them for that.
/// 3. The writer unlocks them, and they stay.
#[test]
fn folios_that_are_written_back_before_they_are_unlocked_go() {
    const WRITES: u64 = 3000;
    let cache = cache(0, 4);
    let memory = Arc::new(MemoryFile::new(Vec::new()));
    let file = open_to_write(&cache, &memory);
    file.set_uncached(true).unwrap();
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                file.write_back().unwrap();
            }
        });
        for nth in 0..WRITES {
            file.write_at(&[nth as u8; 64 << 10], nth << 16).unwrap();
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    file.sync_data().unwrap();
    let began = Instant::now();
    while file.cached_pages() > 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "{} pages are left", file.cached_pages());
        thread::yield_now();
    }
    cache.check().unwrap();
    let mut page = [0; 4096];
    for nth in 0..WRITES {
        file.read_at(&mut page, nth << 16).unwrap();
        assert_eq!(page, [nth as u8; 4096]);
    }
}

#[derive(Clone, Copy, Debug)]
enum MixedOp {
    Read {
        at: u64,
        len: usize,
        uncached: bool,
    },
    Write {
        at: u64,
        len: usize,
        uncached: bool,
    },
    Pin {
        at: u64,
        len: usize,
    },
    Sync,
    WriteBack,
    SetLen {
        bytes: u64,
    },
    /// What is clean and whole in the range is evicted.
    Evict {
        at: u64,
        len: usize,
    },
    Reopen,
}

fn mixed_ops() -> impl Strategy<Value = (usize, MixedOp)> {
    let range = || {
        let aligned = (0..TWIN_PAGES, 1..20usize).prop_map(|(page, pages)| (page * PAGE, pages * 4096));
        prop_oneof![aligned, (0..TWIN_PAGES * PAGE, 1..30_000usize)]
    };
    let op = prop_oneof![
        6 => (range(), any::<bool>()).prop_map(|((at, len), uncached)| MixedOp::Read { at, len, uncached }),
        4 => (range(), any::<bool>()).prop_map(|((at, len), uncached)| MixedOp::Write { at, len, uncached }),
        1 => range().prop_map(|(at, len)| MixedOp::Pin { at, len }),
        1 => Just(MixedOp::Sync),
        1 => Just(MixedOp::WriteBack),
        1 => (0..TWIN_PAGES * PAGE).prop_map(|bytes| MixedOp::SetLen { bytes }),
        1 => range().prop_map(|(at, len)| MixedOp::Evict { at, len }),
        1 => Just(MixedOp::Reopen),
    ];
    (0..2usize, op)
}

/// The cached pages, found without a read: a reader wants what it reads.
fn resident(file: &File) -> BTreeSet<u64> {
    let ranges = file.residents(0, u64::MAX).unwrap().filter(|range| range.state == PageState::Cached);
    ranges.flat_map(|range| range.bytes.start / PAGE..range.bytes.end.div_ceil(PAGE)).collect()
}

fn open_to_write(cache: &Cache, memory: &Arc<MemoryFile>) -> File {
    let writes = OpenOptions::new().write(true).to_owned();
    cache.open_backend_with(Arc::clone(memory) as _, &writes).unwrap()
}

/// A file, its two handles, its bytes, and which of its pages have to be cached, and may be.
struct Mixed {
    memory: Arc<MemoryFile>,
    plain: File,
    stream: Option<File>,
    bytes: Vec<u8>,
    must: BTreeSet<u64>,
    may: BTreeSet<u64>,
    /// Pages of uncached writes whose drop may be still to come: it may meet a plain read half way, which keeps nothing
    /// then.
    passing: BTreeSet<u64>,
    order: u8,
}

impl Mixed {
    fn new(cache: &Cache, order: u8) -> Self {
        let bytes: Vec<u8> = (0..TWIN_PAGES * PAGE - 1000).map(|at| (at / 7 + at / PAGE) as u8).collect();
        let memory = Arc::new(MemoryFile::new(bytes.clone()));
        let plain = open_to_write(cache, &memory);
        plain.advise(Hint::Random).unwrap(); // what it reads is what it wants
        let mut mixed = Self {
            memory,
            plain,
            stream: None,
            bytes,
            must: BTreeSet::new(),
            may: BTreeSet::new(),
            passing: BTreeSet::new(),
            order,
        };
        mixed.reopen(cache);
        mixed
    }
    fn reopen(&mut self, cache: &Cache) {
        self.stream = None;
        let stream = open_to_write(cache, &self.memory);
        stream.set_uncached(true).unwrap();
        self.stream = Some(stream);
    }
    /// The pages are wanted; their folios may be as large as the cache's are.
    fn want(&mut self, at: u64, len: usize) {
        let end = (at + len as u64).min(self.bytes.len() as u64);
        if at < end {
            let block = 1 << self.order;
            self.must.extend((at / PAGE..end.div_ceil(PAGE)).filter(|page| !self.passing.contains(page)));
            self.may.extend(at / PAGE / block * block..(end.div_ceil(PAGE)).next_multiple_of(block));
        }
    }
    /// The end of the file moves; the page of either end may be cached, since a part of it becomes zeros.
    fn resize(&mut self, bytes: u64) {
        let old = self.bytes.len() as u64;
        self.bytes.resize(bytes as usize, 0);
        let block = 1 << self.order;
        for end in [old, bytes] {
            let first = end / PAGE / block * block;
            self.may.extend(first..first + block);
        }
        self.must.retain(|page| *page < bytes.div_ceil(PAGE));
    }
    fn read(&self, file: &File, at: u64, len: usize) {
        let mut buffer = vec![0; len];
        let got = file.read_at(&mut buffer, at).unwrap();
        let from = (at as usize).min(self.bytes.len());
        let want = &self.bytes[from..(from + len).min(self.bytes.len())];
        assert!(buffer[..got] == *want, "{len} bytes at {at}: {got} came of {}", want.len());
    }
    fn write(&mut self, at: u64, len: usize, uncached: bool, stamp: u8) {
        let given = vec![stamp; len];
        let file = if uncached { self.stream.as_ref().unwrap() } else { &self.plain };
        assert_eq!(file.write_at(&given, at).unwrap(), len);
        let end = at as usize + len;
        if end > self.bytes.len() {
            self.resize(end as u64);
        }
        self.bytes[at as usize..end].fill(stamp);
        let pages = at / PAGE..(end as u64).div_ceil(PAGE);
        if uncached {
            let block = 1 << self.order;
            self.passing.extend(pages.start / block * block..pages.end.next_multiple_of(block));
        } else {
            self.want(at, len);
            self.must.extend(pages);
        }
    }

    fn step(&mut self, cache: &Cache, op: MixedOp, stamp: u8) {
        match op {
            MixedOp::Read { at, len, uncached: true } => self.read(self.stream.as_ref().unwrap(), at, len),
            MixedOp::Read { at, len, uncached: false } => {
                self.read(&self.plain, at, len);
                self.want(at, len);
            }
            MixedOp::Write { at, len, uncached } => self.write(at, len, uncached, stamp),
            MixedOp::Pin { at, len } => {
                drop(self.plain.pin(at, len).unwrap());
                self.want(at, len);
            }
            MixedOp::Sync => {
                self.plain.sync_data().unwrap();
                let cached = self.cached();
                self.passing.retain(|page| cached.contains(page));
            }
            MixedOp::WriteBack => self.plain.write_back().unwrap(),
            MixedOp::SetLen { bytes } => {
                self.plain.set_len(bytes).unwrap();
                self.resize(bytes);
            }
            MixedOp::Evict { at, len } => {
                self.plain.dont_need(at, len as u64).unwrap();
                self.must.retain(|page| page * PAGE + PAGE <= at || at + len as u64 <= page * PAGE);
            }
            MixedOp::Reopen => self.reopen(cache),
        }
    }

    fn cached(&self) -> BTreeSet<u64> {
        resident(&self.plain)
    }

    /// The stream has ended, and all is written: its pages are gone, the others' are there, and the bytes are right.
    /// The thread that ends a write-back drops its pages a moment after the sync returns: that is waited for.
    fn end(mut self) {
        self.stream = None;
        self.plain.sync_data().unwrap();
        let begun = Instant::now();
        while !self.cached().is_subset(&self.may) {
            let left: Vec<_> = self.cached().difference(&self.may).copied().collect();
            assert!(begun.elapsed() < Duration::from_secs(60), "pages {left:?} are left");
            thread::yield_now();
        }
        let lost: Vec<_> = self.must.difference(&self.cached()).copied().collect();
        assert!(lost.is_empty(), "pages {lost:?} are lost");
        self.read(&self.plain, 0, self.bytes.len() + 1);
        self.memory.change(|bytes| assert!(*bytes == self.bytes, "what was synced is not what the file has"));
    }
}

proptest! {
    #[test]
    fn among_writes_a_stream_leaves_only_pages_that_others_wanted(
        ops in prop::collection::vec(mixed_ops(), 1..40),
        order in 0..4u8,
        readahead in prop_oneof![Just(0u64), Just(64 << 10)],
    ) {
        let cache = cache(readahead, order);
        let mut files = [Mixed::new(&cache, order), Mixed::new(&cache, order)];
        for (nth, (file, op)) in ops.into_iter().enumerate() {
            files[file].step(&cache, op, nth as u8 + 1);
            cache.check().unwrap();
        }
        files.into_iter().for_each(Mixed::end);
        cache.check().unwrap();
    }
}

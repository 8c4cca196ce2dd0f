//! What readahead promises, seen at the device: which pages are read, and how often.
//!
//! The decision itself is tested beside it, around a naive cache; here it works in the real read path, with a small
//! cache and a device that is watched.

use std::sync::Arc;

use quinion::{AccessPattern, Cache, ErrorKind, File, Hint, ReadaheadReport, ReadaheadStyle};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;
const PAGES: u64 = 3000;

fn cache() -> Cache {
    Cache::builder().memory(64 << 20).readahead(1 << 20).build().expect("a small cache")
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}

fn read(file: &File, device: &Device, page: u64, pages: u64) {
    let mut buffer = vec![0; (pages * PAGE) as usize];
    let bytes = file.read_at(&mut buffer, page * PAGE).expect("a read");
    verify(&buffer[..bytes], device, page * PAGE);
}

/// Pages that were read without being asked for, and reads of pages that were read before.
fn waste(device: &Device, wanted: impl Fn(u64) -> bool) -> (u64, u64) {
    let times = device.times_read();
    let unwanted = (0..).zip(&times).filter(|&(page, &times)| times > 0 && !wanted(page)).count();
    let again = times.iter().filter(|&&times| times > 1).count();
    (unwanted as u64, again as u64)
}

#[test]
fn backward_and_strided_reads_fetch_each_page_once() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    (0..PAGES).rev().for_each(|page| read(&file, &device, page, 1));
    let report = file.readahead_report().unwrap();
    assert_eq!((waste(&device, |_| true), report.pattern), ((0, 0), AccessPattern::Backward));
    assert!(report.prefetched_pages > PAGES - 10, "{report:?}");
    assert!(device.reads().len() < 100, "{} reads", device.reads().len());

    let device = Device::with_number(2, PAGES * PAGE);
    let file = open(&cache, &device);
    (1..PAGES).step_by(2).for_each(|page| read(&file, &device, page, 1));
    let report = file.readahead_report().unwrap();
    assert_eq!((waste(&device, |page| page % 2 == 1), report.pattern), ((0, 0), AccessPattern::Strided));
    assert!(report.prefetched_pages > PAGES / 2 - 10, "{report:?}");
    cache.check().unwrap();
}

/// 1. A cache is full of pages that a stream has read.
/// 2. The hand comes round: pages that were read are spared once, pages that lie ahead of the reader are not.
/// 3. The reader comes to them, and they are read again.
#[test]
fn a_stream_through_a_small_cache_reads_each_page_once() {
    const LONG: u64 = 40_000;
    for (pages, readahead) in [(1, 1 << 20), (16, 1 << 20), (256, 4 << 20)] {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(readahead).build().unwrap();
        let device = Device::new(LONG * PAGE);
        let file = open(&cache, &device);
        (0..LONG).step_by(pages).for_each(|page| read(&file, &device, page, pages as u64));
        assert_eq!(waste(&device, |_| true), (0, 0), "reads of {pages} pages");
        assert!(cache.stats().evicted_pages > LONG / 2);
        cache.check().unwrap();
    }
}

#[test]
fn the_next_window_is_in_flight_before_the_reader_waits() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    read(&file, &device, 100, 1);
    device.hold();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&file, &device, 99, 1));
        device.wait_for_fills(3);
        device.release();
        reader.join().unwrap();
    });
    assert_eq!(device.reads()[..2], [(100, 1), (99, 1)]);
    assert_eq!(device.times_read()[95..101], [0, 1, 1, 1, 1, 1]);
}

#[test]
fn streams_that_take_turns_on_one_handle_are_all_read_ahead() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    for i in 0..700 {
        (0..4).for_each(|stream| read(&file, &device, stream * 750 + i, 1));
    }
    assert_eq!(waste(&device, |_| true), (0, 0));
    let report = file.readahead_report().unwrap();
    assert!(report.exact <= 4 && report.windows > 16, "{report:?}");
}

#[test]
fn the_hint_random_reads_exactly_and_the_hint_sequential_starts_at_once() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    file.advise(Hint::Random).unwrap();
    (100..200).for_each(|page| read(&file, &device, page, 1));
    assert_eq!(waste(&device, |page| (100..200).contains(&page)), (0, 0));
    assert_eq!(device.reads().len(), 100);
    file.advise(Hint::Sequential).unwrap();
    read(&file, &device, 1000, 1);
    assert_eq!(device.reads().last(), Some(&(1000, 4)));
    assert_eq!(file.readahead_report().unwrap().pages_max, 512);
}

/// Q11: a cached page in the middle of a window is not read again: the window goes to the device as two runs around it.
#[test]
fn q11_a_cached_page_splits_its_window_into_two_runs() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let (file, other) = (open(&cache, &device), open(&cache, &device));
    other.advise(Hint::Random).unwrap();
    read(&other, &device, 10, 1);
    (0..100).for_each(|page| read(&file, &device, page, 1));
    assert_eq!(device.reads()[..4], [(10, 1), (0, 4), (4, 6), (11, 9)]);
    assert_eq!(waste(&device, |_| true), (0, 0));
}

/// Q04: after a failed read the largest window is a quarter of what it was; reads that succeed let it grow again.
#[test]
fn q04_a_failed_read_makes_windows_smaller_and_only_its_readers_see_it() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    device.fail(0);
    let mut buffer = [0; 4096];
    assert_eq!(file.read_at(&mut buffer, 0).unwrap_err().kind(), ErrorKind::Io);
    let report = file.readahead_report().unwrap();
    assert_eq!((report.pages_max, report.failures), (64, 1));
    device.mend(0);
    (0..PAGES).for_each(|page| read(&file, &device, page, 1));
    assert!(file.readahead_report().unwrap().pages_max > 64, "it grows again");
    cache.check().unwrap();
}

#[test]
fn a_loop_through_more_than_the_cache_holds_is_seen() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let device = Device::new(8000 * PAGE);
    let file = open(&cache, &device);
    (0..8000).step_by(16).for_each(|page| read(&file, &device, page, 16));
    assert_eq!(file.readahead_report().unwrap().pattern, AccessPattern::Sequential);
    // Its first pages may have been kept: the loop is seen where the second lap misses first.
    (0..3000).step_by(16).for_each(|page| read(&file, &device, page, 16));
    assert_eq!(file.readahead_report().unwrap().pattern, AccessPattern::Looping);
    cache.check().unwrap();
}

#[test]
fn the_kernels_style_draws_the_kernels_windows() {
    let builder = Cache::builder().memory(64 << 20).readahead(128 << 10);
    // As for a file system without large folios: with them its windows end where folios do.
    let cache = builder.readahead_style(ReadaheadStyle::KernelLike).folio_order_max(0).build().unwrap();
    let device = Device::new(PAGES * PAGE);
    let file = open(&cache, &device);
    (0..60).for_each(|page| read(&file, &device, page, 1));
    assert_eq!(device.reads(), [(0, 4), (4, 8), (12, 16), (28, 32), (60, 32)]);
    assert_eq!(file.readahead_report().unwrap().pages_max, 32);
}

/// Reads `streams` parts of a file of four times `memory` in turns, `pages` at a time, and returns the device,
/// the misses and the report.
fn scan_more_than_memory(memory: u64, streams: u64, pages: u64) -> (Arc<Device>, u64, ReadaheadReport) {
    let cache = Cache::builder().memory(memory).build().unwrap();
    let part = 4 * memory / PAGE / streams / pages * pages;
    let distance = part + 5000; // so that what is ahead of one at its end is not the other's beginning
    let device = Device::new(streams * distance * PAGE);
    let file = open(&cache, &device);
    for page in (0..part).step_by(pages as usize) {
        (0..streams).for_each(|stream| read(&file, &device, stream * distance + page, pages));
    }
    cache.check().unwrap();
    (device, cache.stats().misses, file.readahead_report().unwrap())
}

#[test]
fn a_scan_of_four_times_the_memory_reads_each_page_once_and_waits_twice() {
    for (memory, streams, pages) in
        [(Cache::MEMORY_MIN, 1, 1), (Cache::MEMORY_MIN, 1, 64), (Cache::MEMORY_MIN, 2, 4), (32 << 20, 2, 16)]
    {
        let (device, misses, report) = scan_more_than_memory(memory, streams, pages);
        let case = format!("{memory} bytes, {streams} streams of {pages} pages: {report:?}");
        assert_eq!(waste(&device, |_| true), (0, 0), "{case}");
        assert!(misses <= 2 * streams, "{misses} misses, {case}");
        assert_eq!(report.lost_windows, 0, "{case}");
    }
}

/// What lies ahead of four streams is a quarter of the cache. Rarely the hand passes there once more than it should: in
/// a window of a hundred, at most.
#[test]
fn four_streams_through_a_small_cache_lose_next_to_nothing() {
    let (device, misses, report) = scan_more_than_memory(32 << 20, 4, 16);
    let (unwanted, again) = waste(&device, |_| true);
    assert!(unwanted == 0 && again * 100 <= report.prefetched_pages, "{again} pages came twice, {report:?}");
    assert!(misses <= 2 * 4 + 2 && report.lost_windows <= 2, "{misses} misses, {report:?}");
}

#[test]
fn pieces_ahead_go_to_the_device_in_one_call() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    (0..PAGES / 10).for_each(|piece| read(&file, &device, piece * 10, 1));
    assert_eq!(file.readahead_report().unwrap().pattern, AccessPattern::Strided);
    let (calls, reads) = (device.submissions(), device.reads().len());
    assert_eq!(reads as u64, PAGES / 10);
    assert!(calls * 6 < reads, "{calls} calls for {reads} pieces");
}

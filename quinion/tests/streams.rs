//! Streams: a reader that reads once evicts no other reader's page, and one that reads again finds what can be kept.
//!
//! ```text
//!   cache      [ resident part of the file            | behind | window ]
//!   reader                                             ^ a sixteenth of the cache is left for followers
//!                                             goes first ^
//! ```
//!
//! All counts are the device's, of how often each page was asked for.

use std::sync::Arc;

use quinion::{Cache, File, Hint, ReadOptions};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// 32 MiB: small enough to be quick, large enough that windows are a small part of it.
const MEMORY: u64 = 32 * MIB;

fn cache() -> Cache {
    Cache::builder().memory(MEMORY).readahead(MIB).build().unwrap()
}

fn open(cache: &Cache, number: u64, bytes: u64) -> (Arc<Device>, File) {
    let device = Device::with_number(number, bytes);
    let file = cache.open_backend(device.clone()).unwrap();
    (device, file)
}

fn read_through(file: &File, device: &Device, range: std::ops::Range<u64>, step: usize) {
    let mut buffer = vec![0; step];
    let mut at = range.start;
    while at < range.end {
        let bytes = file.read_at(&mut buffer, at).unwrap();
        assert!(bytes > 0, "the file ends at {at}");
        verify(&buffer[..bytes], device, at);
        at += bytes as u64;
    }
}

fn pages_read(device: &Device) -> u64 {
    device.times_read().iter().map(|&times| u64::from(times)).sum()
}

fn resident(file: &File, range: std::ops::Range<u64>) -> u64 {
    let options = ReadOptions::new().cached_only(true);
    let pages = range.start / PAGE..range.end / PAGE;
    pages.filter(|page| file.read_at_with(&mut [0; 1], page * PAGE, options).is_ok()).count() as u64
}

/// Data pages that the cache can hold.
fn capacity(cache: &Cache) -> u64 {
    let (device, file) = open(cache, 99, 2 * MEMORY);
    read_through(&file, &device, 0..2 * MEMORY, 1 << 16);
    let pages = file.cached_pages();
    file.dont_need(0, u64::MAX).unwrap();
    pages
}

/// Reads a file of `size` bytes in laps, each of which finds most of what the cache can hold.
fn go_in_laps(cache: &Cache, size: u64, laps: u32) {
    let held = capacity(cache) as f64;
    let (device, file) = open(cache, 1, size);
    read_through(&file, &device, 0..size, 1 << 16);
    for lap in 1..laps {
        let before = pages_read(&device);
        read_through(&file, &device, 0..size, 1 << 16);
        let pages = (size / PAGE) as f64;
        let hits = 1.0 - (pages_read(&device) - before) as f64 / pages;
        // A sixteenth stays behind the reader, and windows are on their way.
        let best = held / pages;
        assert!(hits >= 0.8 * best, "lap {lap} over {size} bytes: {hits:.3}, at best {best:.3}");
        cache.check().unwrap();
    }
}

#[test]
fn a_loop_larger_than_memory_keeps_as_many_pages_as_fit() {
    for size in [MEMORY * 5 / 4, MEMORY * 2, MEMORY * 4] {
        go_in_laps(&cache(), size, 7);
    }
}

#[test]
fn so_does_a_cache_that_may_grow_to_sixteen_times_as_much() {
    let cache = Cache::builder().memory(MEMORY).memory_max(16 * MEMORY).readahead(MIB).build().unwrap();
    go_in_laps(&cache, MEMORY * 2, 4);
}

#[test]
fn a_scan_of_many_times_the_memory_leaves_pages_that_others_read_again() {
    let cache = cache();
    let (hot_device, hot) = open(&cache, 1, MEMORY / 3);
    let (device, file) = open(&cache, 2, 8 * MEMORY);
    // Read once in no order, so by no stream, and once more.
    let pages = MEMORY / 3 / PAGE;
    for turn in 0..2 * pages {
        let page = turn * 1_000_003 % pages;
        read_through(&hot, &hot_device, page * PAGE..page * PAGE + 1, 1);
    }
    assert_eq!(resident(&hot, 0..pages * PAGE), pages);
    read_through(&file, &device, 0..8 * MEMORY, 1 << 16);
    assert_eq!(resident(&hot, 0..pages * PAGE), pages, "the scan pushed them out");
    assert!(pages_read(&device) <= 8 * MEMORY / PAGE, "and read a page twice");
    cache.check().unwrap();
}

#[test]
fn a_file_that_fits_stays_though_it_was_read_by_a_stream() {
    let cache = cache();
    let (device, file) = open(&cache, 1, MEMORY / 2);
    for _ in 0..3 {
        read_through(&file, &device, 0..MEMORY / 2, 1 << 16);
    }
    assert!(device.times_read().iter().all(|&times| times == 1));
}

#[test]
fn a_reader_close_behind_another_finds_passed_pages() {
    let cache = cache();
    let (device, first) = open(&cache, 1, 4 * MEMORY);
    let second = cache.open_backend(device.clone()).unwrap();
    let behind = MEMORY / 32;
    for at in (0..4 * MEMORY).step_by(1 << 16) {
        read_through(&first, &device, at..at + 1, 1 << 16);
        if let Some(at) = at.checked_sub(behind) {
            read_through(&second, &device, at..at + 1, 1 << 16);
        }
    }
    let twice = device.times_read().iter().filter(|&&times| times > 1).count() as u64;
    assert!(twice <= 4 * MEMORY / PAGE / 100, "{twice} of {} pages were read twice", 4 * MEMORY / PAGE);
    cache.check().unwrap();
}

#[test]
fn a_read_once_stream_evicts_its_own_pages_from_the_first_page_on() {
    let cache = cache();
    let (hot_device, hot) = open(&cache, 1, MEMORY / 3);
    let (device, file) = open(&cache, 2, 4 * MEMORY);
    // The hot set was read by a stream, too, and only once: but earlier.
    read_through(&hot, &hot_device, 0..MEMORY / 3, 1 << 16);
    file.advise(Hint::NoReuse).unwrap();
    read_through(&file, &device, 0..4 * MEMORY, 1 << 16);
    let left = resident(&hot, 0..MEMORY / 3);
    assert!(left >= MEMORY / 3 / PAGE * 99 / 100, "{left} of {} pages are left", MEMORY / 3 / PAGE);
}

//! Background: room is made before it is needed, and nothing is wrong where it is not.
//!
//! ```text
//!   single pages, here and there     a full cache, and a little free       the background thread evicts
//!   a stream through it              as much evicted as it brought         it makes its own room
//! ```
//!
//! What is free is read from the cache's numbers, and what was read from the device.

use std::thread;
use std::time::{Duration, Instant};

use quinion::{Cache, File, Hint};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;
const MEMORY: u64 = 128 << 20;
/// How long a test waits for a thread of the cache before it fails.
const LONG: Duration = Duration::from_secs(60);

fn cache() -> Cache {
    Cache::builder().memory(MEMORY).build().unwrap()
}

fn overfill(file: &File, device: &Device) {
    file.advise(Hint::Random).unwrap();
    let pages = 2 * MEMORY / PAGE;
    for turn in 0..MEMORY / PAGE * 5 / 4 {
        let position = turn * 7919 % pages * PAGE;
        let mut byte = [0];
        file.read_at(&mut byte, position).unwrap();
        verify(&byte, device, position);
    }
}

#[test]
fn free_pages_are_kept_for_the_next_miss() {
    let cache = cache();
    let device = Device::new(2 * MEMORY);
    let file = cache.open_backend(device.clone()).unwrap();
    overfill(&file, &device);
    let begun = Instant::now();
    // The high mark is a 128th; what has been taken since it was reached is less than the rest of it.
    while cache.stats().free_bytes < MEMORY / 256 - (1 << 16) {
        assert!(begun.elapsed() < LONG, "nobody makes room: {:?}", cache.stats());
        thread::sleep(Duration::from_millis(1));
    }
    assert!(cache.stats().free_bytes <= MEMORY / 64, "a little is kept free, and no more");
    cache.check().unwrap();
}

#[test]
fn a_full_cache_without_background_reclaim_is_full() {
    let cache = Cache::builder().memory(MEMORY).background_reclaim(false).build().unwrap();
    let device = Device::new(2 * MEMORY);
    let file = cache.open_backend(device.clone()).unwrap();
    overfill(&file, &device);
    thread::sleep(Duration::from_millis(20));
    assert!(cache.stats().free_bytes < 2 << 20, "{:?}", cache.stats());
    cache.check().unwrap();
}

#[test]
fn a_stream_leaves_the_room_that_was_made_to_others() {
    let cache = cache();
    let device = Device::new(2 * MEMORY);
    let file = cache.open_backend(device.clone()).unwrap();
    overfill(&file, &device);
    let evicted_for_all = cache.stats().evicted_pages;
    let scanned = Device::with_number(2, 4 * MEMORY);
    let scan = cache.open_backend(scanned.clone()).unwrap();
    let mut buffer = vec![0; 1 << 16];
    for position in (0..4 * MEMORY).step_by(1 << 16) {
        let bytes = scan.read_at(&mut buffer, position).unwrap();
        verify(&buffer[..bytes], &scanned, position);
    }
    // What it brought, it made room for itself: as much was evicted as was brought, besides what was being made for
    // others when it began.
    let evicted = cache.stats().evicted_pages - evicted_for_all;
    assert!(evicted <= (4 * MEMORY + MEMORY / 64) / PAGE, "{evicted} {:?}", cache.stats());
    // At its beginning it has nothing behind it, and takes its turn with the others.
    let twice = scanned.times_read().iter().filter(|&&times| times > 1).count() as u64;
    assert!(twice <= 4 * MEMORY / PAGE / 200, "{twice} pages were read twice");
    cache.check().unwrap();
}

#[test]
fn a_cache_may_end_while_room_is_made() {
    for _ in 0..5 {
        let cache = cache();
        let device = Device::new(2 * MEMORY);
        let file = cache.open_backend(device.clone()).unwrap();
        overfill(&file, &device);
        drop((file, cache));
    }
}

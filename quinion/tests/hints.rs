//! Hints: ranges that will be needed are there when they are read, ranges that will not be are gone.
//!
//! A device that counts says that nothing is fetched twice, and a device that is held says that nothing is waited for.

use std::sync::Arc;
use std::thread;

use quinion::{Cache, File};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;

fn exact() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().expect("a small cache")
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}

fn read(file: &File, device: &Device, position: u64, len: usize) {
    let mut buffer = vec![0; len];
    file.read_exact_at(&mut buffer, position).unwrap();
    verify(&buffer, device, position);
}

#[test]
fn a_range_that_will_be_needed_is_fetched_whole_without_waiting() {
    let (cache, device) = (exact(), Device::new(2000 * PAGE));
    let file = open(&cache, &device);
    read(&file, &device, 100 * PAGE, 1);
    device.hold();
    // 3 MiB and a bit, with one page there already: the pages that the range touches.
    let done = file.will_need(50 * PAGE + 4000, 3 << 20).unwrap();
    assert_eq!((done.started_pages, done.cached_pages, done.left_pages), (768, 1, 0));
    let again = file.will_need(50 * PAGE, 10 * PAGE).unwrap();
    assert_eq!(
        (again.started_pages, again.cached_pages, again.left_pages),
        (0, 10, 0),
        "they are on their way"
    );
    let (reading, released) = (file.clone(), Arc::clone(&device));
    thread::scope(|scope| {
        scope.spawn(|| read(&reading, &device, 50 * PAGE, 769 * PAGE as usize));
        released.release();
    });
    let times = device.times_read();
    assert!(times.iter().enumerate().all(|(page, &n)| n == u32::from((50..819).contains(&page))));
    cache.check().unwrap();
}

#[test]
fn ranges_that_will_be_needed_are_fetched_once_each_without_waiting() {
    let (cache, device) = (exact(), Device::new(6000 * PAGE + 10));
    let file = open(&cache, &device);
    read(&file, &device, 100 * PAGE, 1);
    device.hold();
    // Many ranges; one that is there in part, one of several pieces, an empty one, and the file's end.
    let mut ranges: Vec<_> = (0..100).map(|n| n * 50 * PAGE..(n * 50 + 1) * PAGE + 1).collect();
    ranges.extend([5000 * PAGE..5700 * PAGE, 3 * PAGE..3 * PAGE, 5999 * PAGE..u64::MAX]);
    let done = file.will_need_ranges(&ranges).unwrap();
    assert_eq!((done.started_pages, done.cached_pages, done.left_pages), (200 - 1 + 700 + 2, 1, 0));
    let again = file.will_need_ranges(&ranges).unwrap();
    assert_eq!((again.started_pages, again.cached_pages), (0, 902), "they are on their way");
    device.release();
    for range in &ranges {
        let len = range.end.min(6000 * PAGE + 10) - range.start;
        read(&file, &device, range.start, len as usize);
    }
    assert!(device.times_read().iter().all(|&times| times <= 1));
    assert_eq!(device.times_read().iter().filter(|&&times| times == 1).count(), 902);
    // More ranges than a batch has; and no more than half of the memory.
    let (cache, device) = (exact(), Device::new(4 * Cache::MEMORY_MIN));
    let file = open(&cache, &device);
    let pages = 4 * Cache::MEMORY_MIN / PAGE;
    let ranges: Vec<_> = (0..pages).step_by(2).map(|page| page * PAGE..(page + 1) * PAGE).collect();
    let much = file.will_need_ranges(&ranges).unwrap();
    assert_eq!(much.started_pages + much.cached_pages + much.left_pages, pages / 2);
    assert!(much.started_pages <= Cache::MEMORY_MIN / PAGE / 2 && much.started_pages > 0, "{much:?}");
    assert_eq!(cache.stats().evicted_pages, 0, "it evicts nothing of its own");
    cache.check().unwrap();
}

#[test]
fn will_need_ends_with_the_file_and_takes_no_more_than_half_the_memory() {
    let (cache, device) = (exact(), Device::new(4 * Cache::MEMORY_MIN + 100));
    let file = open(&cache, &device);
    let pages = 4 * Cache::MEMORY_MIN / PAGE + 1;
    let end = file.will_need((pages - 2) * PAGE, u64::MAX).unwrap();
    assert_eq!((end.started_pages, end.cached_pages, end.left_pages), (2, 0, 0));
    let none = file.will_need(pages * PAGE, 100).unwrap();
    assert_eq!(none, quinion::Prefetch::default());
    let much = file.will_need(0, u64::MAX).unwrap();
    assert_eq!(much.started_pages + much.cached_pages + much.left_pages, pages);
    let half = Cache::MEMORY_MIN / PAGE / 2;
    assert!((half / 2..half + 256).contains(&much.started_pages), "{much:?}");
    assert_eq!(cache.stats().evicted_pages, 0, "it evicts nothing of its own");
    read(&file, &device, 0, much.started_pages as usize * PAGE as usize);
    assert!(device.times_read().iter().all(|&times| times <= 1));
    cache.check().unwrap();
}

#[test]
fn dont_need_drops_its_pages_and_no_others() {
    // In folios of one page, so that what goes is told by the page.
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_max(0).build().unwrap();
    let device = Device::new(100 * PAGE + 50);
    let (file, other) = (open(&cache, &device), open(&cache, &Device::with_number(2, 10 * PAGE)));
    read(&file, &device, 0, 100 * PAGE as usize + 50);
    other.read_exact_at(&mut [0; 100], 0).unwrap();
    let pin = file.pin(20 * PAGE, 100).unwrap();
    // Half of the pages 9 and 31 lie in the range: they stay, and so does what is pinned.
    assert_eq!(file.dont_need(9 * PAGE + 2048, 22 * PAGE).unwrap(), 20);
    assert_eq!((file.cached_pages(), other.cached_pages()), (81, 1));
    drop(pin);
    assert_eq!(file.dont_need(9 * PAGE + 2048, 22 * PAGE).unwrap(), 1);
    // The last page is the file's up to its end.
    assert_eq!(file.dont_need(100 * PAGE, 50).unwrap(), 1);
    assert_eq!(file.dont_need(100 * PAGE, u64::MAX).unwrap(), 0);
    read(&file, &device, 0, 100 * PAGE as usize + 50);
    let twice = device.times_read().iter().filter(|&&times| times == 2).count();
    assert_eq!(twice, 22);
    assert_eq!(cache.stats().dropped_pages, 22);
    cache.check().unwrap();
}

#[test]
fn dont_need_forgets_the_shadows_of_evicted_pages_too() {
    let (cache, device) = (exact(), Device::new(8192 * PAGE));
    let file = open(&cache, &device);
    let read_all = |from: u64, to: u64| {
        (from..to).step_by(64).for_each(|page| read(&file, &device, page * PAGE, 64 * PAGE as usize));
    };
    read_all(0, 8192); // twice the memory: of the first half there are shadows
    let before = cache.stats();
    assert!(before.shadowed_pages >= 2048, "{before:?}");
    assert_eq!(file.dont_need(0, 1024 * PAGE).unwrap(), 0, "nothing of it is there");
    read_all(0, 1024);
    assert_eq!(cache.stats().refaulted_pages, before.refaulted_pages, "nobody remembers them");
    read_all(1024, 1088);
    assert_eq!(cache.stats().refaulted_pages, before.refaulted_pages + 64, "the others are remembered");
    cache.check().unwrap();
}

#[test]
fn a_large_folio_goes_only_if_all_of_it_is_not_needed() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(4).build().unwrap();
    let device = Device::new(1024 * PAGE);
    let file = open(&cache, &device);
    file.will_need(0, 1024 * PAGE).unwrap();
    let before = file.cached_pages();
    assert_eq!(before, 1024);
    let dropped = file.dont_need(5 * PAGE, 600 * PAGE).unwrap();
    assert!((600 - 30..=600).contains(&dropped), "{dropped} pages went");
    assert_eq!(file.cached_pages(), before - dropped);
    read(&file, &device, 0, 1024 * PAGE as usize);
    cache.check().unwrap();
}

#[test]
fn dont_need_drops_a_whole_file_that_ends_inside_a_smallest_folio() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_min(2).build().unwrap();
    let device = Device::new(5 * PAGE + 1);
    let file = open(&cache, &device);
    read(&file, &device, 0, 5 * PAGE as usize + 1);
    assert_eq!(file.cached_pages(), 8);
    assert_eq!(file.dont_need(4 * PAGE + 1, u64::MAX).unwrap(), 0, "its folio begins before the range");
    assert_eq!(file.dont_need(0, 5 * PAGE).unwrap(), 4, "its folio ends behind the range");
    assert_eq!(file.dont_need(0, 5 * PAGE + 1).unwrap(), 4);
    assert_eq!(file.cached_pages(), 0);
    cache.check().unwrap();
}

#[test]
fn dont_need_looks_only_where_pages_are_cached() {
    let (cache, device) = (exact(), Device::new(i64::MAX as u64 - 10));
    let file = open(&cache, &device);
    let far = 1 << 60;
    read(&file, &device, 0, 1);
    read(&file, &device, far, 1);
    // A walk over all of its pages would not end.
    assert_eq!(file.dont_need(PAGE, u64::MAX).unwrap(), 1);
    assert_eq!(file.dont_need(0, u64::MAX).unwrap(), 1);
    cache.check().unwrap();
}

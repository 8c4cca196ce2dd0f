//! Readahead's account: of the pages that were fetched ahead, how many were used, and how many were evicted unused.
//!
//! A hit counts nothing, so the account is made when pages leave, and by a look at those that are cached. The twin
//! keeps it the naive way: a word for each page.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use quinion::{Cache, File, Hint, ReadaheadUse};
use quinion_testing::device::{Device, verify};

const PAGE: u64 = 4096;

/// In folios of one page, so that the account is by the page.
fn cache() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(0).build().expect("a small cache")
}

fn open(cache: &Cache, device: &Arc<Device>) -> File {
    cache.open_backend(Arc::clone(device) as _).expect("the device opens")
}

fn read(file: &File, device: &Device, page: u64, pages: u64) {
    let mut buffer = vec![0; (pages * PAGE) as usize];
    file.read_exact_at(&mut buffer, page * PAGE).unwrap();
    verify(&buffer, device, page * PAGE);
}

/// The account as (used, wasted, unread). Checks that it adds up.
fn account(cache: &Cache) -> (u64, u64, u64) {
    let ReadaheadUse { pages, used_pages, wasted_pages, unread_pages, .. } = cache.readahead_use();
    assert_eq!(pages, used_pages + wasted_pages + unread_pages);
    let stats = cache.stats();
    assert_eq!((stats.readahead_pages, stats.readahead_wasted_pages), (pages, wasted_pages));
    (used_pages, wasted_pages, unread_pages)
}

fn evict(cache: &Cache, file: &File) {
    for number in 100..200 {
        let device = Device::with_number(number, 256 * PAGE);
        let other = open(cache, &device);
        other.advise(Hint::Random).unwrap();
        (0..256).for_each(|page| read(&other, &device, page, 1));
        if file.cached_pages() == 0 {
            return;
        }
    }
    panic!("it stays for ever");
}

#[test]
fn a_scan_uses_all_that_was_fetched_ahead_of_it() {
    let cache = cache();
    let device = Device::new(3 * Cache::MEMORY_MIN);
    let file = open(&cache, &device);
    let pages = 3 * Cache::MEMORY_MIN / PAGE;
    (0..pages).for_each(|page| read(&file, &device, page, 1));
    let (used, wasted, unread) = account(&cache);
    assert_eq!((wasted, unread), (0, 0));
    assert!(used > pages * 9 / 10, "{used} of {pages}");
    assert_eq!(cache.readahead_use().accuracy(), Some(1.0));
    let report = file.readahead_report().unwrap();
    assert_eq!(report.prefetched_pages, used, "the handle is the only one");
    assert!(report.window_pages > 1 && report.window_pages <= u64::from(report.pages_max), "{report:?}");
}

#[test]
fn the_rest_of_a_stream_that_ends_is_wasted_when_it_goes() {
    let (cache, device) = (cache(), Device::new(8192 * PAGE));
    let file = open(&cache, &device);
    (0..40).for_each(|page| read(&file, &device, page, 1));
    let (used, wasted, unread) = account(&cache);
    assert_eq!((used + 1, wasted), (40, 0), "all but the page that was missed");
    assert_eq!(unread, file.cached_pages() - 40);
    assert_eq!(cache.readahead_use().accuracy(), Some(1.0), "of the others nothing is known");
    evict(&cache, &file);
    assert_eq!(account(&cache), (used, unread, 0));
    assert!(cache.readahead_use().accuracy().unwrap() < 1.0);
    cache.check().unwrap();
}

#[test]
fn a_request_of_many_pages_has_none_of_them_fetched_ahead() {
    let (cache, device) = (cache(), Device::new(8192 * PAGE));
    let file = open(&cache, &device);
    file.advise(Hint::Random).unwrap();
    read(&file, &device, 1000, 700);
    assert_eq!((file.cached_pages(), cache.readahead_use()), (700, ReadaheadUse::default()));
    assert_eq!(cache.readahead_use().accuracy(), None);
}

#[test]
fn pages_that_come_back_soon_do_not_count_as_readahead() {
    let (cache, device) = (cache(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    read(&file, &device, 0, 64);
    evict(&cache, &file);
    let (before, returned) = (cache.readahead_use(), cache.stats().activated_pages);
    file.will_need(0, 64 * PAGE).unwrap();
    read(&file, &device, 0, 64);
    assert_eq!(cache.stats().activated_pages, returned + 64, "they came back");
    assert_eq!(cache.readahead_use(), before);
}

#[test]
fn folios_count_with_all_their_pages() {
    let cache =
        Cache::builder().memory(Cache::MEMORY_MIN).folio_order_min(3).folio_order_max(3).build().unwrap();
    let device = Device::new(64 * PAGE);
    let file = open(&cache, &device);
    file.advise(Hint::Random).unwrap();
    read(&file, &device, 3, 1);
    assert_eq!(cache.readahead_use().pages, 0, "the others came with the page that was asked for");
    file.will_need(8 * PAGE, 32 * PAGE).unwrap();
    read(&file, &device, 17, 1);
    assert_eq!(account(&cache), (8, 0, 24));
    assert_eq!(file.dont_need(0, 24 * PAGE).unwrap(), 24);
    assert_eq!(account(&cache), (8, 8, 16));
}

#[test]
fn undelivered_readahead_counts_as_wasted() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).build().unwrap();
    let device = Device::new(64 * PAGE);
    device.fail(3);
    let file = open(&cache, &device);
    file.will_need(0, 16 * PAGE).unwrap();
    let (used, wasted, unread) = account(&cache);
    assert_eq!((used, wasted + unread, unread), (0, 16, file.cached_pages()));
    assert!(wasted > 0);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    WillNeed(u64, u64),
    Read(u64, u64),
    DontNeed(u64, u64),
    Change,
}

fn op() -> impl Strategy<Value = Op> {
    let range = || (0..PAGES, 1..40u64).prop_map(|(from, pages)| (from, pages.min(PAGES - from)));
    prop_oneof![
        3 => range().prop_map(|(from, pages)| Op::WillNeed(from, pages)),
        5 => range().prop_map(|(from, pages)| Op::Read(from, pages.min(4))),
        2 => range().prop_map(|(from, pages)| Op::DontNeed(from, pages)),
        1 => Just(Op::Change),
    ]
}

const PAGES: u64 = 200;

/// What the twin knows of a cached page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Asked,
    Unread,
    Used,
}

#[derive(Debug, Default)]
struct Twin {
    cached: BTreeMap<u64, Is>,
    used: u64,
    wasted: u64,
}

impl Twin {
    fn step(&mut self, op: Op) {
        match op {
            Op::WillNeed(from, pages) => {
                for page in from..from + pages {
                    self.cached.entry(page).or_insert(Is::Unread);
                }
            }
            Op::Read(from, pages) => (from..from + pages).for_each(|page| {
                let is = self.cached.entry(page).or_insert(Is::Asked);
                if *is == Is::Unread {
                    (*is, self.used) = (Is::Used, self.used + 1);
                }
            }),
            Op::DontNeed(from, pages) => (from..from + pages).for_each(|page| self.leave(page)),
            Op::Change => (0..PAGES).for_each(|page| self.leave(page)),
        }
    }

    fn leave(&mut self, page: u64) {
        self.wasted += u64::from(self.cached.remove(&page) == Some(Is::Unread));
    }

    fn account(&self) -> (u64, u64, u64) {
        let unread = self.cached.values().filter(|is| **is == Is::Unread).count();
        (self.used, self.wasted, unread as u64)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn the_account_is_that_of_a_naive_one(ops in prop::collection::vec(op(), 1..40)) {
        let (cache, device) = (cache(), Device::new(PAGES * PAGE));
        let file = open(&cache, &device);
        file.advise(Hint::Random).unwrap();
        let mut twin = Twin::default();
        for op in ops {
            match op {
                Op::WillNeed(from, pages) => drop(file.will_need(from * PAGE, pages * PAGE).unwrap()),
                Op::Read(from, pages) => read(&file, &device, from, pages),
                Op::DontNeed(from, pages) => drop(file.dont_need(from * PAGE, pages * PAGE).unwrap()),
                Op::Change => {
                    device.generation.fetch_add(1, Ordering::Relaxed);
                    file.revalidate().unwrap();
                }
            }
            twin.step(op);
            prop_assert_eq!(account(&cache), twin.account(), "{:?}", op);
            prop_assert_eq!(file.cached_pages(), twin.cached.len() as u64);
        }
        cache.check().unwrap();
    }
}

/// A read that missed went on to look for the rest of its range, which was empty, and touched the page behind.
#[test]
fn a_miss_does_not_touch_the_page_behind_its_range() {
    let (cache, device) = (cache(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    file.advise(Hint::Random).unwrap();
    file.will_need(193 * PAGE, PAGE).unwrap();
    read(&file, &device, 192, 1);
    assert_eq!(account(&cache), (0, 0, 1));
}

//! Statistics: a cache's numbers are true.
//!
//! Pages come for three reasons and go for six. In any case, those that came less those that went are those that are
//! there; and the cache reports range by range what is cached, and what is remembered.

use quinion_testing::block_on;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use quinion::backend::{Backend, ReapMode};
use quinion::{BatchRead, Cache, ErrorKind, File, PageState, ReadOptions, RefaultCurve, Stats};
use quinion_testing::content::Dice;
use quinion_testing::device::Device;
use quinion_testing::doubles::{CompletionOrder, CompletionPoint, Faults, SimulatedBackend};

const PAGE: u64 = 4096;

fn counted(files: &[File]) -> u64 {
    files.iter().map(File::cached_pages).sum()
}

/// Checks that pages came for three reasons, went for six, and that the rest is here.
fn assert_adds_up(stats: &Stats, cached: u64) {
    let came = stats.asked_pages + stats.guessed_pages + stats.will_need_pages;
    assert_eq!(came, stats.inserted_pages, "{stats:?}");
    assert_eq!(stats.inserted_pages - stats.removed_pages(), cached, "{stats:?}");
    assert_eq!(stats.cached_pages, cached);
}

const SIZE: u64 = 3000 * PAGE + 777;

fn failing(number: u64, seed: u64, completing: CompletionPoint) -> Arc<SimulatedBackend> {
    let sequence = CompletionOrder::Shuffled;
    let faults = Faults { seed, errors: 30, early_ends: 10, drops: 10, delay_max: 5, sequence, completing };
    let page = |_: u64, page: u64, bytes: &mut [u8]| bytes.fill(page as u8);
    Arc::new(SimulatedBackend::generated(number, SIZE, page, faults))
}

fn read_somewhere(file: &File, dice: &mut Dice, options: ReadOptions) {
    let mut buffer = vec![0; dice.below(60_000) as usize + 1];
    if let Err(error) = file.read_at_with(&mut buffer, dice.below(SIZE), options) {
        assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::WouldBlock), "{error}");
    }
}

fn one_step(cache: &Cache, files: &[File], dice: &mut Dice) {
    let file = &files[dice.below(files.len() as u64) as usize];
    match dice.below(40) {
        0..4 => drop(file.will_need(dice.below(SIZE), dice.below(4 << 20)).unwrap()),
        4..8 => drop(file.dont_need(dice.below(SIZE), dice.below(2 << 20)).unwrap()),
        8 => drop(file.revalidate().unwrap()),
        9 => {
            // A file that is dropped as soon as it is not open.
            let passing = failing(10 + dice.below(3), dice.roll(), CompletionPoint::WhenSubmitted);
            read_somewhere(&cache.open_backend(passing).unwrap(), dice, ReadOptions::new());
        }
        10..16 => read_somewhere(file, dice, ReadOptions::new().nowait(true)),
        16..22 => {
            // A stream, for which readahead guesses.
            let from = dice.below(2900) * PAGE;
            (0..50).for_each(|page| drop(file.read_at(&mut [0; 4096], from + page * PAGE)));
        }
        _ => read_somewhere(file, dice, ReadOptions::new()),
    }
}

/// All of these by three threads, over devices that fail.
fn storm(seed: u64) -> Stats {
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(64 * PAGE).idle_files_max(0);
    let cache = builder.folio_order_max([0, 4, 9][seed as usize % 3]).build().unwrap();
    let devices: Vec<_> =
        (1..4).map(|number| failing(number, seed + number, CompletionPoint::WhenReaped)).collect();
    let files: Vec<_> =
        devices.iter().map(|device| cache.open_backend(Arc::clone(device) as _).unwrap()).collect();
    thread::scope(|scope| {
        for user in 0..3 {
            let (cache, files) = (&cache, &files);
            scope.spawn(move || {
                let mut dice = Dice::new(seed ^ user << 32);
                (0..400).for_each(|_| one_step(cache, files, &mut dice));
            });
        }
    });
    // Requests in flight complete when a thread reaps.
    for device in &devices {
        while device.held() > 0 {
            device.reap(ReapMode::Ready, &mut || false);
        }
    }
    let stats = cache.stats();
    assert_eq!((stats.in_flight, stats.files), (0, 3));
    cache.check().unwrap();
    assert_adds_up(&stats, counted(&files));
    stats
}

#[test]
fn inserted_pages_less_removed_pages_are_the_cached_pages() {
    for seed in 0..6 {
        let stats = storm(seed);
        // Each reason was at work, or this says little.
        for reason in REASONS {
            let number = stats.numbers().into_iter().find(|(name, _)| *name == reason);
            assert!(number.expect("it is a number").1 > 0, "{reason}, seed {seed}: {stats:?}");
        }
    }
}

#[test]
fn every_number_has_its_name_in_a_report() {
    let stats = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap().stats();
    let names: Vec<_> =
        stats.numbers().into_iter().map(|(name, number)| format!("{name}: {number}")).collect();
    let printed = format!("{stats:?}").replace("Stats { ", "");
    let fields: Vec<_> = printed.split(", ").filter(|field| !field.starts_with("mechanism")).collect();
    assert_eq!(names, fields);
}

const REASONS: [&str; 9] = [
    "asked_pages",
    "guessed_pages",
    "will_need_pages",
    "evicted_pages",
    "dropped_pages",
    "invalidated_pages",
    "failed_pages",
    "undelivered_pages",
    "forgotten_pages",
];

fn exact() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).folio_order_max(0).build().unwrap()
}

#[test]
fn each_page_is_counted_by_its_reason() {
    let (cache, device) = (exact(), Device::new(100 * PAGE));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    file.read_exact_at(&mut [0; 3 * 4096], 0).unwrap();
    file.will_need(10 * PAGE, 5 * PAGE).unwrap();
    file.dont_need(0, PAGE).unwrap();
    device.fail(50);
    file.read_at(&mut [0], 50 * PAGE).unwrap_err();
    device.mend(50);
    device.size.store(60 * PAGE, Ordering::Relaxed);
    assert_eq!(file.read_at(&mut [0], 70 * PAGE).unwrap(), 0);
    let stats = cache.stats();
    // The last read found that the file had become shorter: what was cached was forgotten for it.
    assert_eq!((stats.will_need_pages, stats.guessed_pages, stats.dropped_pages), (5, 0, 1));
    assert_eq!(stats.asked_pages, 3 + stats.failed_pages + stats.undelivered_pages);
    assert!(stats.failed_pages > 0 && stats.undelivered_pages > 0, "{stats:?}");
    assert_eq!(stats.invalidated_pages, 7);
    assert_adds_up(&stats, 0);
}

#[test]
fn refaults_are_counted_by_the_memory_that_would_have_kept_the_page() {
    // Reads so many pages, and then again those of them that have gone first.
    let again = |pages: u64, again: u64| {
        let cache = exact();
        let file = cache.open_backend(Device::new(16_000 * PAGE) as _).unwrap();
        assert_eq!(cache.refaults(), RefaultCurve::default());
        for page in (0..pages).chain(0..again) {
            file.read_exact_at(&mut [0; 64], page * PAGE).unwrap();
        }
        let (curve, stats) = (cache.refaults(), cache.stats());
        assert_eq!(curve.pages(), stats.refaulted_pages);
        assert_eq!(curve.kept_pages(1.0), stats.activated_pages, "that is what activation asks");
        (curve, stats.data_bytes / PAGE)
    };
    let (_, held) = again(2 * Cache::MEMORY_MIN / PAGE, 0);
    // A little more than there is memory for: half as much again would have kept all of it.
    let (little, _) = again(held + held / 8, held / 8);
    assert!(little.pages() > held / 9, "{little:?}");
    assert_eq!(little.kept_pages(0.5), little.pages());
    // Twice what there is memory for: a quarter more would have kept nothing, twice as much again all.
    let (much, _) = again(2 * held, held / 8);
    assert!(much.pages() > held / 9, "{much:?}");
    assert_eq!((much.kept_pages(0.5), much.kept_pages(2.0)), (0, much.pages()));
}

/// The reported state of a range, as (first page, pages, state).
fn told(file: &File, position: u64, len: u64) -> Vec<(u64, u64, PageState)> {
    let mut told = Vec::new();
    let mut at = position / PAGE * PAGE;
    for resident in file.residents(position, len).unwrap() {
        assert_eq!(resident.bytes.start, at, "no gap and no overlap");
        assert_eq!((resident.bytes.end - at).div_ceil(PAGE), resident.pages);
        at = resident.bytes.end;
        told.push((resident.bytes.start / PAGE, resident.pages, resident.state));
    }
    told
}

#[test]
fn a_range_is_reported_by_its_states() {
    use PageState::{Absent, Cached, Filling};
    let (cache, device) = (exact(), Device::new(100 * PAGE + 50));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    assert_eq!(told(&file, 0, u64::MAX), [(0, 101, Absent)]);
    file.read_exact_at(&mut [0; 3 * 4096], 10 * PAGE).unwrap();
    file.read_exact_at(&mut [0; 1], 14 * PAGE).unwrap();
    file.read_exact_at(&mut [0; 1], 100 * PAGE).unwrap();
    device.hold();
    file.will_need(20 * PAGE, 2 * PAGE).unwrap();
    let all = [
        (0, 10, Absent),
        (10, 3, Cached),
        (13, 1, Absent),
        (14, 1, Cached),
        (15, 5, Absent),
        (20, 2, Filling),
        (22, 78, Absent),
        (100, 1, Cached),
    ];
    assert_eq!(told(&file, 0, u64::MAX), all);
    assert_eq!(told(&file, 11 * PAGE + 4095, PAGE + 2), [(11, 2, Cached), (13, 1, Absent)]);
    assert_eq!(told(&file, 12 * PAGE, 1), [(12, 1, Cached)]);
    for (position, len) in [(0, 0), (12 * PAGE + 5, 0), (101 * PAGE, 1), (u64::MAX, u64::MAX)] {
        assert_eq!(told(&file, position, len), [], "{position} {len}");
    }
    device.release();
    let total = file.residency(0, u64::MAX).unwrap();
    assert_eq!((total.pages, total.cached_pages, total.filling_pages, total.absent_pages), (101, 7, 0, 94));
}

#[test]
fn evicted_ranges_are_reported_as_remembered_in_any_number_of_pieces() {
    let pages = 12_000;
    for order in [0, 4] {
        let builder = Cache::builder().memory(Cache::MEMORY_MIN).readahead(64 * PAGE).folio_order_max(order);
        let cache = builder.build().unwrap();
        let file = cache.open_backend(Device::new(pages * PAGE) as _).unwrap();
        let mut dice = Dice::new(order.into());
        for step in 0..pages {
            // Every other page or so, so that stretches are many and short, more than a batch of them.
            let page = if step % 5 == 0 { dice.below(pages) } else { step };
            file.read_exact_at(&mut [0; 100], page * PAGE).unwrap();
            if dice.below(3) == 0 {
                file.dont_need(page * PAGE, PAGE).unwrap();
            }
        }
        let told = told(&file, 0, u64::MAX);
        assert!(told.len() > 1000 || order > 0, "{}", told.len());
        assert!(told.windows(2).all(|two| two[0].2 != two[1].2), "neighbours differ");
        assert_eq!(told.iter().map(|(_, pages, _)| pages).sum::<u64>(), pages);
        let total = file.residency(0, u64::MAX).unwrap();
        assert_eq!(total.cached_pages + total.filling_pages, file.cached_pages());
        assert!(total.remembered_pages > 0 && total.absent_pages > 0, "{total:?}");
        // Page by page it is the same, and a page that is cached is one that is read without the device.
        for (first, pages, state) in told {
            for page in first..first + pages {
                assert_eq!(told_of(&file, page), state);
                let hit = file.read_at_with(&mut [0], page * PAGE, ReadOptions::new().cached_only(true));
                assert_eq!(hit.is_ok(), state == PageState::Cached, "page {page} is {state:?}");
            }
        }
    }
}

fn told_of(file: &File, page: u64) -> PageState {
    file.residents(page * PAGE, 1).unwrap().next().expect("it is the file's").state
}

/// A cache that records its reads for the curve.
fn followed() -> Cache {
    Cache::builder().memory(Cache::MEMORY_MIN).readahead(0).miss_ratio_curve(true).build().unwrap()
}

#[test]
fn every_kind_of_read_is_part_of_the_curve() {
    assert!(exact().miss_ratio_curve().is_none(), "nobody asked for it");
    let (cache, device) = (followed(), Device::new(100 * PAGE + 50));
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let read = || cache.miss_ratio_curve().unwrap().reads();
    assert_eq!((file.len(), read()), (100 * PAGE + 50, 0));
    for _ in 0..2 {
        // 4 pages, a bit of one; the second time they are hits.
        file.read_exact_at(&mut [0; 3 * 4096 + 2], 4095).unwrap();
        file.read_exact_at(&mut [0; 10], 0).unwrap();
    }
    assert_eq!(read(), 2 * (5 + 1));
    assert_eq!(file.read_at(&mut [0; 8192], 100 * PAGE).unwrap(), 50);
    assert_eq!(file.read_at(&mut [0; 1], 101 * PAGE).unwrap(), 0);
    assert_eq!(read(), 13, "behind the end there are no pages");
    assert_eq!(file.pin(10 * PAGE, 3 * 4096).unwrap().len(), 3 * 4096);
    assert_eq!(block_on::block_on(file.read_at_async(&mut [0; 4097], 20 * PAGE)).unwrap(), 4097);
    assert_eq!(read(), 13 + 3 + 2);
    for _ in 0..2 {
        // Hits and misses in one batch, and then hits only.
        let (mut one, mut two) = ([0; 100], [0; 100]);
        let mut reads = [BatchRead::new(&mut one, 10 * PAGE), BatchRead::new(&mut two, 50 * PAGE)];
        file.read_batch(&mut reads);
        assert!(reads.iter().all(|read| read.result().is_ok_and(|bytes| bytes == 100)));
    }
    let curve = cache.miss_ratio_curve().unwrap();
    assert_eq!(curve.reads(), 18 + 4);
    // Pages 0 to 4, 100, 10 to 12, 20, 21 and 50 were read for the first time once.
    let first = 12.0 / 22.0;
    assert!((curve.at(u64::MAX) - first).abs() < 1e-9 && curve.at(0) == 1.0, "{curve:?}");
    assert_eq!(curve.sampled(), (curve.sampled().0, 12));
}

#[test]
fn the_curve_tells_the_effect_of_more_memory() {
    let cache = followed();
    let device = Device::new(16_000 * PAGE);
    let held = 2 * Cache::MEMORY_MIN / PAGE;
    thread::scope(|scope| {
        for _ in 0..2 {
            let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
            scope.spawn(move || {
                for read in 0..5 * held {
                    file.read_exact_at(&mut [0; 64], read % held * PAGE).unwrap();
                }
            });
        }
    });
    // Two readers, each in a loop over twice the memory, together or apart: with three times as much all of it fits.
    let (stats, curve) = (cache.stats(), cache.miss_ratio_curve().unwrap());
    assert_eq!(curve.reads(), 10 * held);
    assert!(stats.misses > 2 * held, "it does not fit: {stats:?}");
    let first = 1.0 / 10.0;
    assert!((curve.at(3 * stats.memory_bytes) - first).abs() < 0.02, "{}", curve.at(3 * stats.memory_bytes));
    assert!(curve.at(stats.memory_bytes / 64) > curve.at(3 * stats.memory_bytes) + 0.2);
    let points = curve.points();
    assert!(points.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 >= two[1].1), "it only falls");
}

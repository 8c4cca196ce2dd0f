//! The batch call answers each read as a call of its own would, and asks the device for all at once.
//!
//! The twin is `File::read_at` on a second cache of the same device. Devices can be watched, held and broken
//! (`device`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;
use quinion::{BatchRead, Cache, ErrorKind, File, ReadOptions};
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

fn buffers(ranges: &[(u64, usize)]) -> Vec<Vec<u8>> {
    ranges.iter().map(|&(_, len)| vec![0xee; len]).collect()
}

fn batch<'b>(ranges: &[(u64, usize)], buffers: &'b mut [Vec<u8>]) -> Vec<BatchRead<'b>> {
    ranges.iter().zip(buffers).map(|(&(position, _), buffer)| BatchRead::new(buffer, position)).collect()
}

type Answers = Vec<Result<Vec<u8>, ErrorKind>>;

fn answers(reads: &[BatchRead<'_>]) -> Answers {
    reads.iter().map(|read| read.result().map(|_| read.bytes().to_vec()).map_err(|e| e.kind())).collect()
}

fn read_batch(file: &File, ranges: &[(u64, usize)], options: ReadOptions) -> Answers {
    let mut buffers = buffers(ranges);
    let mut reads = batch(ranges, &mut buffers);
    file.read_batch_with(&mut reads, options);
    answers(&reads)
}

fn read_singly(file: &File, ranges: &[(u64, usize)], options: ReadOptions) -> Answers {
    let read = |&(position, len): &(u64, usize)| {
        let mut buffer = vec![0xee; len];
        let bytes = file.read_at_with(&mut buffer, position, options).map_err(|e| e.kind())?;
        buffer.truncate(bytes);
        Ok(buffer)
    };
    ranges.iter().map(read).collect()
}

fn read_pages(file: &File, device: &Device, pages: &[u64]) {
    let ranges: Vec<_> = pages.iter().map(|page| (page * PAGE, PAGE as usize)).collect();
    for (answer, &(position, len)) in read_batch(file, &ranges, ReadOptions::new()).iter().zip(&ranges) {
        let bytes = answer.as_ref().expect("a read");
        assert_eq!(bytes.len(), len);
        verify(bytes, device, position);
    }
}

// ---- answers ------------------------------------------------------------------------------------------

fn range(size: u64) -> impl Strategy<Value = (u64, usize)> {
    let position = prop_oneof![
        8 => 0..size + 5000,
        1 => (0..size / PAGE + 1).prop_map(|page| page * PAGE),
        1 => prop::sample::select(vec![size, size.saturating_sub(1), 1 << 40, u64::MAX, u64::MAX - 4096]),
    ];
    let len = prop_oneof![4 => 0usize..200, 4 => Just(4096), 2 => 0usize..30_000, 1 => 0usize..2_000_000];
    (position, len)
}

/// Files from empty to several times the cache, batches from none to more than two groups.
fn story() -> impl Strategy<Value = (u64, Vec<Vec<(u64, usize)>>)> {
    prop_oneof![Just(0u64), 1u64..10_000, 10_000u64..3_000_000, Just((40 << 20) + 77)].prop_flat_map(|size| {
        let ranges = prop::collection::vec(range(size), 0..40);
        (Just(size), prop::collection::vec(ranges, 1..4))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_batch_answers_as_its_reads_one_by_one(
        (size, batches) in story(), order in 0u8..6, bad in prop::collection::vec(0u64..700, 0..3),
        warm in any::<bool>(),
    ) {
        let device = Device::new(size);
        let build = |order| Cache::builder().memory(Cache::MEMORY_MIN).folio_order_max(order).build().unwrap();
        let (batched, single) = (build(order), build(0));
        let (file, twin) = (open(&batched, &device), open(&single, &device));
        if warm {
            file.read_at(&mut vec![0; 1 << 20], 0).unwrap();
        }
        bad.iter().for_each(|page| device.fail(*page));
        for ranges in &batches {
            let got = read_batch(&file, ranges, ReadOptions::new());
            let want = read_singly(&twin, ranges, ReadOptions::new());
            for (at, ((got, want), &(position, _))) in got.iter().zip(&want).zip(ranges).enumerate() {
                if let Ok(bytes) = got {
                    verify(bytes, &device, position);
                }
                // A page that a warm or an earlier read has is there though the device is broken by now.
                let same = got.as_ref().map(Vec::len) == want.as_ref().map(Vec::len);
                prop_assert!(same || !bad.is_empty(), "read {at} of {ranges:?}");
            }
            batched.check().unwrap();
        }
    }
}

#[test]
fn a_batch_of_nothing_reads_nothing() {
    let (cache, device) = (cache(), Device::new(10_000));
    let file = open(&cache, &device);
    file.read_batch(&mut []);
    cache.read_batch(&mut []);
    assert_eq!(
        read_batch(&file, &[(0, 0), (10_000, 5), (u64::MAX, 1)], ReadOptions::new()),
        vec![Ok(vec![]); 3]
    );
    assert_eq!(device.reads(), []);
}

#[test]
fn a_batch_read_shows_its_state_before_and_after() {
    let (cache, device) = (cache(), Device::new(10_000));
    let file = open(&cache, &device);
    let mut buffer = [0xee; 100];
    let mut read = BatchRead::new(&mut buffer, 9_950);
    assert_eq!((read.result().unwrap(), read.bytes().len(), read.position()), (0, 0, 9_950));
    for _ in 0..2 {
        file.read_batch(std::slice::from_mut(&mut read));
        assert_eq!((read.result().unwrap(), read.bytes().len()), (50, 50), "an old answer is no answer");
    }
    verify(read.bytes(), &device, 9_950);
    read.set_position(0);
    assert_eq!(read.result().unwrap(), 0);
    file.read_batch(std::slice::from_mut(&mut read));
    verify(read.bytes(), &device, 0);
    assert_eq!(read.into_result().unwrap(), 100);
}

#[test]
fn duplicates_are_read_once_and_answered_each() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    read_pages(&file, &device, &[9; 40]);
    assert_eq!(device.reads(), [(9, 1)]);
}

#[test]
fn the_end_of_the_file_cuts_the_reads_that_meet_it() {
    let (cache, device) = (cache(), Device::new(3 * PAGE + 10));
    let file = open(&cache, &device);
    let ranges = [(3 * PAGE, 4096), (3 * PAGE + 9, 4096), (3 * PAGE + 10, 4096), (0, 4096), (PAGE, 100_000)];
    for _ in 0..2 {
        let lens: Vec<_> = read_batch(&file, &ranges, ReadOptions::new())
            .into_iter()
            .map(|answer| answer.map(|bytes| bytes.len()))
            .collect();
        assert_eq!(lens, [Ok(10), Ok(1), Ok(0), Ok(4096), Ok(2 * 4096 + 10)]);
    }
}

#[test]
fn a_file_that_grew_is_read_to_its_new_end() {
    let (cache, device) = (exact(), Device::new(PAGE));
    let file = open(&cache, &device);
    read_pages(&file, &device, &[0]);
    device.size.store(4 * PAGE, Ordering::Relaxed);
    device.generation.store(1, Ordering::Relaxed);
    read_pages(&file, &device, &[2, 3, 1]);
}

#[test]
fn one_bad_page_spoils_its_own_reads_only() {
    let (cache, device) = (exact(), Device::new(256 * PAGE));
    device.fail(40);
    let file = open(&cache, &device);
    let ranges: Vec<_> = (0..50).map(|at| (at * 2 * PAGE, 4096)).collect();
    let found = read_batch(&file, &ranges, ReadOptions::new());
    for (answer, &(position, _)) in found.iter().zip(&ranges) {
        match answer {
            Ok(bytes) => verify(bytes, &device, position),
            Err(kind) => assert_eq!((position / PAGE, *kind), (40, ErrorKind::Io)),
        }
    }
    assert_eq!(found.iter().filter(|answer| answer.is_err()).count(), 1);
    // The neighbours of a bad page share its span, and are read all the same.
    let ranges: Vec<_> = (38..43).map(|page| (page * PAGE, 4096)).collect();
    let kinds: Vec<_> = read_batch(&file, &ranges, ReadOptions::new())
        .into_iter()
        .map(|answer| answer.map(|bytes| bytes.len()))
        .collect();
    assert_eq!(kinds, [Ok(4096), Ok(4096), Err(ErrorKind::Io), Ok(4096), Ok(4096)]);
    device.mend(40);
    read_pages(&file, &device, &[40]);
    cache.check().unwrap();
}

// ---- misses -------------------------------------------------------------------------------------------

#[test]
fn all_missing_pages_are_asked_for_before_the_first_is_waited_for() {
    const READS: u64 = 100;
    let (cache, device) = (exact(), Device::new(1024 * PAGE));
    let file = open(&cache, &device);
    read_pages(&file, &device, &[30, 70]);
    let before = device.reads().len();
    device.hold();
    thread::scope(|scope| {
        let pages: Vec<u64> = (0..READS).map(|at| (at * 370 + 30) % 1024).collect();
        let reader = scope.spawn({
            let (file, device, pages) = (&file, &device, pages.clone());
            move || read_pages(file, device, &pages)
        });
        let missing = pages.iter().filter(|page| ![30, 70].contains(*page)).count();
        device.wait_for_fills(before + missing); // while the first of them is still held
        device.release();
        reader.join().unwrap();
        let mut asked: Vec<_> = device.reads().into_iter().skip(before).collect();
        asked.sort_unstable();
        let mut want: Vec<_> = pages.iter().filter(|p| ![30, 70].contains(*p)).map(|&p| (p, 1)).collect();
        want.sort_unstable();
        assert_eq!(asked, want, "one request for each missing page");
    });
    let stats = cache.stats();
    assert_eq!((stats.reads, stats.hits, stats.misses), (2 + READS, 1, READS + 1));
}

#[test]
fn neighbours_are_one_request() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    read_pages(&file, &device, &[6, 7, 20, 21, 21, 3]);
    assert_eq!(device.reads(), [(6, 2), (20, 2), (3, 1)]);
}

#[test]
fn scattered_batches_are_no_stream_and_batches_in_a_row_are() {
    let (cache, device) = (cache(), Device::new(4096 * PAGE));
    let file = open(&cache, &device);
    let mut asked = BTreeSet::new();
    for round in 0..20 {
        // Neighbours within the batch, at no distance from each other and from the batch before that comes again.
        let scattered = |at: u64| (round * 8 + at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53 << 1;
        let pages: Vec<u64> = (0..8).flat_map(|at| [0, 1].map(|by| scattered(at) + by)).collect();
        read_pages(&file, &device, &pages);
        asked.extend(pages);
    }
    assert_eq!(cache.stats().inserted_pages, asked.len() as u64, "nothing but what was asked for");

    let (cache, device) = (self::cache(), Device::new(4096 * PAGE));
    let file = open(&cache, &device);
    for round in 0..64 {
        read_pages(&file, &device, &(round * 16..round * 16 + 16).collect::<Vec<_>>());
    }
    let ahead = cache.stats().readahead_pages;
    assert!(ahead > 500, "a scan by batches reads ahead: {ahead} of 1024 pages");
    assert!(device.times_read().iter().all(|times| *times <= 1));
}

#[test]
fn a_batch_larger_than_the_cache_does_not_evict_itself() {
    const PAGES: u64 = 3 * (Cache::MEMORY_MIN / PAGE);
    let (cache, device) = (exact(), Device::new(PAGES * PAGE));
    let file = open(&cache, &device);
    // Every second page from both ends inwards, so that none joins another.
    let pages: Vec<u64> = (0..PAGES / 4).flat_map(|at| [at * 2, PAGES - 1 - at * 2]).collect();
    read_pages(&file, &device, &pages);
    let twice = device.times_read().iter().filter(|times| **times > 1).count();
    assert_eq!(twice, 0, "pages were read again");
    assert!(cache.stats().evicted_pages > 0);
    cache.check().unwrap();
}

/// S03: a batch of reads without waiting returns what is cached, starts each other device read once, and waits for
/// none.
#[test]
fn s03_batch_nowait_starts_all_and_waits_for_none() {
    let (cache, device) = (exact(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    read_pages(&file, &device, &[4, 10]);
    device.hold();
    let nowait = ReadOptions::new().nowait(true);
    let ranges = [(PAGE, 4096), (4 * PAGE, 4096), (10 * PAGE, 2 * 4096), (30 * PAGE, 4096)];
    let lens = |answers: Answers| -> Vec<_> { answers.into_iter().map(|a| a.map(|b| b.len())).collect() };
    let blocked = Err(ErrorKind::WouldBlock);
    assert_eq!(lens(read_batch(&file, &ranges, nowait)), [blocked, Ok(4096), Ok(4096), blocked]);
    assert_eq!(device.reads()[2..], [(1, 1), (11, 1), (30, 1)], "they were started, once");
    device.release();
    assert_eq!(lens(read_batch(&file, &ranges, nowait)), [Ok(4096), Ok(4096), Ok(2 * 4096), Ok(4096)]);
    assert_eq!(device.reads().len(), 5);
}

#[test]
fn cached_only_batches_start_nothing() {
    let (cache, device) = (cache(), Device::new(64 * PAGE));
    let file = open(&cache, &device);
    read_pages(&file, &device, &[4]);
    let before = device.reads();
    let cached_only = ReadOptions::new().cached_only(true);
    let found = read_batch(&file, &[(4 * PAGE, 4096), (50 * PAGE, 4096), (u64::MAX, 9)], cached_only);
    assert_eq!(found[0].as_ref().map(Vec::len), Ok(4096));
    assert_eq!(found[1..], [Err(ErrorKind::WouldBlock), Ok(vec![])]);
    assert_eq!(device.reads(), before);
}

// ---- several files ------------------------------------------------------------------------------------

#[test]
fn one_batch_reads_several_files_of_one_cache_and_of_others() {
    let (cache, other) = (exact(), exact());
    let devices: Vec<_> = (1..4).map(|number| Device::with_number(number, 200 * PAGE)).collect();
    let files: Vec<_> =
        devices.iter().zip([&cache, &cache, &other]).map(|(device, cache)| open(cache, device)).collect();
    let ranges: Vec<_> = (0..60).map(|at| ((at * 37 % 200) * PAGE + at, 1000)).collect();
    for _ in 0..2 {
        let mut buffers = buffers(&ranges);
        let mut reads: Vec<_> = batch(&ranges, &mut buffers)
            .into_iter()
            .enumerate()
            .map(|(at, read)| (&files[at % 3], read))
            .collect();
        cache.read_batch(&mut reads);
        for (at, (_, read)) in reads.iter().enumerate() {
            assert_eq!(read.result().unwrap(), 1000);
            verify(read.bytes(), &devices[at % 3], read.position());
        }
    }
    assert!(devices.iter().all(|device| device.times_read().iter().all(|times| *times <= 1)));
    assert_eq!((cache.stats().hits, other.stats().hits), (40, 20), "the second round is hits");
}

// ---- stress -------------------------------------------------------------------------------------------

#[test]
fn batches_are_right_while_others_evict() {
    let (cache, device) = (cache(), Device::new(5 * Cache::MEMORY_MIN));
    let noise = Device::with_number(2, 3 * Cache::MEMORY_MIN);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (stop, cache, device, noise) = (&stop, &cache, &device, &noise);
        scope.spawn(move || {
            let file = open(cache, noise);
            let mut buffer = vec![0; 1 << 18];
            let mut position = 0;
            while !stop.load(Ordering::Relaxed) {
                let bytes = file.read_at(&mut buffer, position).unwrap();
                verify(&buffer[..bytes], noise, position);
                position = if bytes == 0 { 0 } else { position + bytes as u64 };
            }
        });
        let readers: Vec<_> = (0..2)
            .map(|seed| scope.spawn(move || read_at_random(&open(cache, device), device, seed)))
            .collect();
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.expect("a reader found nothing wrong"));
    });
    assert!(cache.stats().evicted_pages > 0);
    cache.check().unwrap();
}

fn read_at_random(file: &File, device: &Device, seed: u64) {
    let mut dice = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut roll = |below: u64| {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        dice % below
    };
    let size = device.size.load(Ordering::Relaxed);
    for _ in 0..1_500 {
        let ranges: Vec<_> = (0..roll(40))
            .map(|_| {
                let span = if roll(4) > 0 { size / 20 } else { size };
                let len_end = if roll(8) == 0 { 20_000 } else { 5_000 };
                (roll(span), roll(len_end) as usize)
            })
            .collect();
        for (answer, &(position, len)) in read_batch(file, &ranges, ReadOptions::new()).iter().zip(&ranges) {
            let bytes = answer.as_ref().expect("a read");
            assert_eq!(bytes.len() as u64, (len as u64).min(size - position));
            verify(bytes, device, position);
        }
    }
}

#[test]
fn misses_of_a_batch_go_to_the_device_in_one_call() {
    let (cache, device) = (cache(), Device::new(4096 * PAGE));
    let file = open(&cache, &device);
    let pages: Vec<u64> = (0..32).map(|at: u64| at * at * 3 + 100).collect();
    read_pages(&file, &device, &pages);
    assert_eq!((device.submissions(), device.reads().len()), (1, 32));
    cache.check().unwrap();
}

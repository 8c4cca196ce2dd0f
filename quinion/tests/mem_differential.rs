//! Mem differential: each operation on a memory file has the same effect as the kernel's on a file of tmpfs.
//!
//! ```text
//!   seed -> operations --run on a pair--> nothing to say              (what is compared: `twins::mem_file`)
//!                              '--------> a complaint --shrink--> a short list that still fails, printed
//! ```
//!
//! The pairs live in caches in which everything fits, in such as are full before the file is as long as it may be,
//! and in such as spill what does not fit; with folios of a page and with large ones. A list that was printed can be
//! run again: put it into a test that calls [`check`] with the setting beside it.
//!
//! Then several threads change and read one file at once, each its own part of it, by two handles.
//!
//! `QUINION_SOAK=1 cargo test --release --test mem_differential -- --nocapture` does a million operations.

use quinion_testing::shrinking;
use quinion_testing::twins::mem_file;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use quinion::{Cache, MemFile, MemFileOptions};
use quinion_testing::content::{Dice, PAGE, fill_content, generations};
use quinion_testing::shrinking::shrunk;
use quinion_testing::twins::mem_file::{At, Capacity, How, Op, Setting, op, run, simpler};

const OPS: u64 = 20_000;
const OPS_SOAK: u64 = 1_000_000;
const OPS_OF_PAIR: usize = 250;
/// How often a shorter list is tried: some fail only now and then.
const TRIES: u32 = 2;

fn is_soak() -> bool {
    std::env::var_os("QUINION_SOAK").is_some()
}

/// Files whose folios are of up to `order_max`, in a cache with that room.
fn setting(capacity: Capacity, order_max: u8) -> Setting {
    Setting { capacity, order_max, spill_folder: env!("CARGO_TARGET_TMPDIR") }
}

fn complaint(setting: &Setting, ops: &[Op]) -> Option<String> {
    let (setting, ops) = (setting.clone(), ops.to_vec());
    shrinking::complaint(move || run(&setting, &ops).map(drop))
}

#[track_caller]
fn check(setting: &Setting, ops: &[Op]) {
    let Some(why) = complaint(setting, ops) else { return };
    eprintln!("a run of {} operations failed: {why}\nlooking for a shorter one", ops.len());
    let fails = |ops: &[Op]| (0..TRIES).find_map(|_| complaint(setting, ops));
    let (ops, why) = shrunk(ops.to_vec(), why, simpler, fails);
    let list: String = ops.iter().map(|op| format!("    Op::{op:?},\n")).collect();
    panic!("{why}\nwith {setting:?}\nafter these operations:\nvec![\n{list}]");
}

fn differ(setting: &Setting, seed: u64) {
    let wanted = if is_soak() { OPS_SOAK } else { OPS } / 6;
    let mut dice = Dice::new(seed);
    for _ in 0..wanted.div_ceil(OPS_OF_PAIR as u64) {
        let ops: Vec<Op> = (0..OPS_OF_PAIR).map(|_| op(&mut dice)).collect();
        check(setting, &ops);
    }
    println!("{wanted} operations with {setting:?}");
}

#[test]
fn pages_with_room_are_as_tmpfs_has_them() {
    differ(&setting(Capacity::Wide, 0), 51);
}

#[test]
fn large_folios_with_room_are_as_tmpfs_has_them() {
    differ(&setting(Capacity::Wide, 9), 52);
}

#[test]
fn pages_without_room_are_as_tmpfs_has_them() {
    differ(&setting(Capacity::Tight, 0), 53);
}

#[test]
fn large_folios_without_room_are_as_tmpfs_has_them() {
    differ(&setting(Capacity::Tight, 9), 54);
}

#[test]
fn pages_that_spill_are_as_tmpfs_has_them() {
    differ(&setting(Capacity::Spilling, 0), 55);
}

#[test]
fn large_folios_that_spill_are_as_tmpfs_has_them() {
    differ(&setting(Capacity::Spilling, 9), 56);
}

/// A cache that is full refuses writes, and a refused one changes nothing.
#[test]
fn a_tight_pair_meets_the_end_of_its_memory() {
    let fill = |at: u64| Op::Write { by: 0, at: At::Byte(at), len: 5 << 20, how: How::Plain };
    let ops: Vec<Op> = (0..4).map(|nth| fill(nth * (5 << 20))).chain([Op::Check]).collect();
    let refused = |capacity| run(&setting(capacity, 9), &ops).unwrap();
    assert!(refused(Capacity::Tight) > 0);
    assert_eq!([Capacity::Wide, Capacity::Spilling].map(refused), [0, 0]);
}

#[test]
fn a_wrong_file_is_found_wrong() {
    // The twin is told less: as if the cache had kept bytes that it should have lost.
    let setting = setting(Capacity::Wide, 9);
    let mut pair = mem_file::MemPair::new(&setting).unwrap();
    pair.step(&Op::Write { by: 0, at: At::Byte(0), len: 9000, how: How::Plain }).unwrap();
    pair.spoil(5000);
    let wrong = pair.step(&Op::Read { by: 1, at: At::Byte(0), len: 9000, how: How::Vectored }).unwrap_err();
    assert!(wrong.contains("the first is byte 5000"), "{wrong}");
}

// ---- many threads -------------------------------------------------------------------------------------

const PART: u64 = 600;
const THREADS: u64 = 2;
const FILE: u32 = 9;

/// Writes pages, each whole and of a higher generation than before, and punches holes; checks some of its own each
/// time, and returns the last generation of each, 0 for a hole.
fn write_part(file: &MemFile, thread: u64, rounds: u64) -> Vec<u32> {
    let (mut dice, first) = (Dice::new(thread + 60), thread * PART);
    let mut now = vec![0; PART as usize];
    let mut found = vec![0; 16 * PAGE];
    for generation in 1..=rounds as u32 {
        let page = dice.below(PART);
        let pages = (1 + dice.below(16)).min(PART - page);
        let at = (first + page) * PAGE as u64;
        let mut bytes = vec![0; pages as usize * PAGE];
        if dice.below(5) == 0 {
            file.punch_hole(at, bytes.len() as u64).unwrap();
            now[page as usize..(page + pages) as usize].fill(0);
        } else {
            fill_content(&mut bytes, FILE, at, generation);
            file.write_all_at(&bytes, at).unwrap();
            now[page as usize..(page + pages) as usize].fill(generation);
        }
        let page = dice.below(PART);
        let pages = (1 + dice.below(16)).min(PART - page) as usize;
        let found = &mut found[..pages * PAGE];
        file.read_exact_at(found, (first + page) * PAGE as u64).unwrap();
        for (page, bytes) in (page..).zip(found.chunks(PAGE)) {
            expect_page(bytes, first + page, now[page as usize]);
        }
    }
    now
}

fn expect_page(bytes: &[u8], page: u64, generation: u32) {
    if generation == 0 {
        assert!(bytes.iter().all(|&byte| byte == 0), "page {page} is no hole");
    } else {
        let told = generations(bytes, FILE, page * PAGE as u64).unwrap();
        assert_eq!(told, Some(generation..=generation), "page {page}");
    }
}

fn read_anything(file: &MemFile, stop: &AtomicBool, checked: &AtomicU64) {
    let mut dice = Dice::new(70);
    let mut buffer = vec![0; 24 * PAGE];
    // Relaxed, here and below: the threads are joined before anything depends on it.
    while !stop.load(Ordering::Relaxed) {
        let page = dice.below(THREADS * PART);
        let pages = (1 + dice.below(24)).min(THREADS * PART - page) as usize;
        let buffer = &mut buffer[..pages * PAGE];
        if dice.below(8) == 0 {
            let pinned = file.pin(page * PAGE as u64, buffer.len()).unwrap();
            let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
            buffer.copy_from_slice(&bytes);
        } else {
            file.read_exact_at(buffer, page * PAGE as u64).unwrap();
        }
        for (page, bytes) in (page..).zip(buffer.chunks(PAGE)) {
            if bytes.iter().any(|&byte| byte != 0) {
                generations(bytes, FILE, page * PAGE as u64).unwrap();
            }
        }
        checked.fetch_add(pages as u64, Ordering::Relaxed);
    }
}

fn two_threads(order_max: u8) {
    let cache = Cache::builder().memory(32 << 20).folio_order_max(order_max).build().unwrap();
    let size = THREADS * PART * PAGE as u64;
    let file = cache.mem_file(MemFileOptions::new().size(size)).unwrap();
    let rounds = if is_soak() { 100_000 } else { 1500 };
    let (stop, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    let parts: Vec<Vec<u32>> = thread::scope(|scope| {
        let reader = scope.spawn(|| read_anything(&file, &stop, &checked));
        // Each writes by a handle of its own.
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let file = file.clone();
                scope.spawn(move || write_part(&file, thread, rounds))
            })
            .collect();
        let parts: Vec<_> = writers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        // Also when one has failed, so that the reader ends.
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        parts.into_iter().map(Result::unwrap).collect()
    });
    assert!(checked.load(Ordering::Relaxed) > 0, "the reader read");
    cache.check().unwrap();
    let mut page = vec![0; PAGE];
    for (number, &generation) in (0..).zip(parts.iter().flatten()) {
        file.read_exact_at(&mut page, number * PAGE as u64).unwrap();
        expect_page(&page, number, generation);
    }
}

#[test]
fn threads_with_pages_find_their_own_and_no_reader_sees_half_a_page() {
    two_threads(0);
}

#[test]
fn threads_with_large_folios_find_their_own_and_no_reader_sees_half_a_page() {
    two_threads(9);
}

#[test]
fn appends_of_two_handles_do_not_mix() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let file = cache.mem_file(MemFileOptions::new()).unwrap();
    let lens = |nth: u64| 1 + (nth * 7919) % 5000;
    let places: Vec<(u64, u64, u8)> = thread::scope(|scope| {
        let threads = [1_u8, 2].map(|of| {
            let file = file.clone();
            let append = move |nth| (file.append(&vec![of; lens(nth) as usize]).unwrap(), lens(nth), of);
            scope.spawn(move || (0..300).map(append).collect::<Vec<_>>())
        });
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut places = places;
    places.sort_unstable();
    let mut end = 0;
    for (at, len, of) in places {
        assert_eq!(at, end, "they follow each other without a gap");
        let mut found = vec![0; len as usize];
        file.read_exact_at(&mut found, at).unwrap();
        assert!(found.iter().all(|&byte| byte == of), "{len} bytes of {of} at {at}");
        end = at + len;
    }
    assert_eq!(file.len(), end);
}

//! Memory files larger than the cache: what does not fit goes to the spill file, and every byte comes back, or an error
//! says why not.
//!
//! ```text
//!   cache of 16 MiB    file of 40 MiB    its bytes say where they belong and of which generation they are, or a vector
//!                                        says what they should be
//! ```
//!
//! The device is memory that a test can read and damage, or a simulated one with delays and faults under a seed, or a
//! file without a name. After each test every slot is in use, or free.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use std::{fmt, io, thread};

use proptest::prelude::*;
use quinion::backend::{Attributes, Backend, Fill, Flush, MemoryFile};
use quinion::{Builder, Cache, ErrorKind, MemFile, MemFileOptions, MemFileStats, PoolOptions, SpillOptions};
use quinion_testing::content::{Dice, PAGE, fill_content, generations, page_content, verify};
use quinion_testing::doubles::{CompletionOrder, FailureCount, Faults, SimulatedBackend, WriteFaults};

const MIB: u64 = 1 << 20;
/// The cache of these tests, almost the smallest.
const MEMORY: u64 = 16 * MIB;
/// Size of a file that does not fit, in MiB.
const BIG: u64 = 40;
const FILE: u32 = 7;

fn options(mib: u64) -> SpillOptions {
    SpillOptions::new("nowhere", mib * MIB)
}

fn builder() -> Builder {
    Cache::builder().memory(MEMORY)
}

fn in_memory(mib: u64) -> (Cache, Arc<MemoryFile>) {
    let disk = Arc::new(MemoryFile::new(Vec::new()));
    let backend = Arc::clone(&disk) as Arc<dyn Backend>;
    (builder().spill_to(backend, options(mib)).build().unwrap(), disk)
}

fn simulated(mib: u64, faults: Faults, writes: WriteFaults) -> (Cache, Arc<SimulatedBackend>) {
    let disk =
        SimulatedBackend::of_memory(Arc::new(MemoryFile::new(Vec::new())), faults).with_write_faults(writes);
    let disk = Arc::new(disk);
    let backend = Arc::clone(&disk) as Arc<dyn Backend>;
    (builder().spill_to(backend, options(mib)).build().unwrap(), disk)
}

fn file(cache: &Cache) -> MemFile {
    cache.mem_file(MemFileOptions::new()).unwrap()
}

fn numbers(file: &MemFile) -> MemFileStats {
    file.stats().unwrap()
}

fn fill(file: &MemFile, mib: u64, generation: u32) {
    let mut piece = vec![0; 1 << 18];
    for at in (0..mib * MIB).step_by(piece.len()) {
        fill_content(&mut piece, FILE, at, generation);
        file.write_all_at(&piece, at).unwrap();
    }
}

fn read_all(file: &MemFile, generation: u32) {
    let mut piece = vec![0; 100_000];
    let mut at = 0;
    while at < file.len() {
        let bytes = file.read_at(&mut piece, at).unwrap();
        assert_eq!(generations(&piece[..bytes], FILE, at).unwrap(), Some(generation..=generation), "at {at}");
        at += bytes as u64;
    }
}

/// R21: reads and pins of spilled pages bring them back with their bytes.
#[test]
fn r21_reads_and_pins_bring_spilled_pages_back() {
    let (cache, _disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    let stats = cache.stats();
    assert!(stats.spill_pages > 3 * MEMORY / PAGE as u64 / 2, "most of it is out: {stats:?}");
    assert_eq!(stats.spill_bytes, stats.spill_pages * PAGE as u64);
    let numbers = numbers(&file);
    assert_eq!(numbers.spilled_pages, stats.spill_pages);
    assert_eq!(
        (numbers.data_pages + numbers.spilled_pages, numbers.hole_pages),
        (BIG * MIB / PAGE as u64, 0)
    );
    let memory = cache.stats().cached_pages;
    assert!(memory <= MEMORY / PAGE as u64 && memory >= numbers.data_pages, "{memory} pages are cached");
    cache.check().unwrap();
    read_all(&file, 1);
    for at in (0..BIG * MIB).step_by(MIB as usize) {
        let pinned = file.pin(at + 5, 300_000).unwrap();
        let bytes: Vec<u8> = pinned.chunks().flatten().copied().collect();
        assert_eq!(bytes.len(), 300_000.min(BIG * MIB - at - 5) as usize);
        verify(&bytes, FILE, at + 5).unwrap();
    }
    assert!(cache.stats().spilled_in_pages > 0);
    cache.check().unwrap();
}

/// G17: a spilled folio that is preallocated, pinned or populated in part is brought back first, so that no byte is
/// lost.
#[test]
fn g17_a_grabbed_folio_is_brought_back_first() {
    let (cache, _disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    // Checks that pages came back with the call; all that was written first is spilled.
    let brought_back = |what: &str, act: &mut dyn FnMut()| {
        let before = cache.stats().spilled_in_pages;
        act();
        assert!(cache.stats().spilled_in_pages > before, "{what} met no spilled folio");
    };
    // To preallocate gives memory to what has none, and changes nothing that is there.
    for at in [0, 3 * MIB + 1, 6 * MIB] {
        brought_back("preallocate", &mut || file.preallocate(at, 200_000).unwrap());
        let pinned = file.pin_folios(at..at + 100_000, 1000).unwrap();
        let bytes: u64 = pinned.folios().map(|folio| folio.len() as u64).sum();
        assert!(bytes >= 100_000 + pinned.offset() as u64);
        drop(pinned);
    }
    read_all(&file, 1);
    let mut lent = None;
    brought_back("pin_folios", &mut || {
        lent = Some(file.pin_folios(5 * MIB + 9..5 * MIB + 70_000, 1000).unwrap())
    });
    drop(lent);
    // A part of a page is populated, and the rest of it was spilled.
    let (from, end) = (MIB + 1000, MIB + 300_000);
    let mut at = from;
    brought_back("populate_with", &mut || {
        let put = file.populate_with(from..end, |slice| {
            let mut bytes = vec![0; slice.left()];
            fill_content(&mut bytes, FILE, at, 1);
            at += bytes.len() as u64;
            assert_eq!(slice.put(&bytes), bytes.len());
            Ok(())
        });
        assert_eq!(put.unwrap(), end - from);
    });
    cache.check().unwrap();
    read_all(&file, 1);
    assert_eq!(numbers(&file).allocated_pages, 0);
}

#[test]
fn a_read_of_a_page_does_not_bring_all_of_a_large_folio() {
    let (cache, _disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    let before = cache.stats().spilled_in_pages;
    let mut page = [0; PAGE];
    file.read_exact_at(&mut page, 0).unwrap();
    assert_eq!(page, page_content(FILE, 0, 1));
    let came = cache.stats().spilled_in_pages - before;
    assert!((1..=64).contains(&came), "{came} pages");
    cache.check().unwrap();
}

#[test]
fn a_partial_overwrite_of_a_spilled_folio_keeps_the_rest() {
    let (cache, _disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    // Pieces that begin and end inside pages, all over the file.
    let mut model: Vec<u8> = vec![0; (BIG * MIB) as usize];
    fill_content(&mut model, FILE, 0, 1);
    let mut rng = Dice::new(3);
    for _ in 0..300 {
        let (at, len) = (rng.below(BIG * MIB - 20_000), 1 + rng.below(20_000));
        let byte = rng.below(256) as u8;
        file.write_all_at(&vec![byte; len as usize], at).unwrap();
        model[at as usize..][..len as usize].fill(byte);
    }
    let mut bytes = vec![0; model.len()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == model, "byte {:?} differs", bytes.iter().zip(&model).position(|(a, b)| a != b));
    cache.check().unwrap();
}

#[test]
fn a_dropped_file_gives_its_slots_back() {
    let (cache, _disk) = in_memory(64);
    for round in 0..4 {
        let file = file(&cache);
        fill(&file, BIG, round);
        assert!(cache.stats().spill_pages > 0);
        drop(file);
        let stats = cache.stats();
        assert_eq!((stats.spill_pages, stats.spill_bytes), (0, 0));
        cache.check().unwrap();
    }
}

#[test]
fn truncated_or_punched_pages_give_their_slots_back_and_read_as_zeros() {
    let (cache, _disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    let spilled = cache.stats().spill_pages;
    // Edges inside pages, and inside folios.
    file.punch_hole(2 * MIB + 5000, 5 * MIB + 111).unwrap();
    file.set_len(12 * MIB + 777).unwrap();
    cache.check().unwrap();
    assert!(cache.stats().spill_pages < spilled / 2);
    file.set_len(13 * MIB).unwrap();
    let mut bytes = vec![1; (13 * MIB) as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let mut wanted = vec![0; bytes.len()];
    fill_content(&mut wanted, FILE, 0, 1);
    wanted[(2 * MIB + 5000) as usize..][..(5 * MIB + 111) as usize].fill(0);
    wanted[(12 * MIB + 777) as usize..].fill(0);
    assert!(bytes == wanted, "byte {:?} differs", bytes.iter().zip(&wanted).position(|(a, b)| a != b));
    cache.check().unwrap();
}

#[test]
fn a_full_spill_file_is_an_error_and_nothing_is_lost() {
    let (cache, _disk) = in_memory(4);
    let file = file(&cache);
    let mut piece = vec![0; 1 << 16];
    let mut at = 0;
    let error = loop {
        fill_content(&mut piece, FILE, at, 1);
        match file.write_at(&piece, at) {
            Ok(bytes) => at += bytes as u64,
            Err(error) => break error,
        }
        assert!(at < 64 * MIB, "it cannot all be there");
    };
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(error.to_string().contains("the spill file is full"), "{error}");
    assert!(at > 4 * MIB, "both are used: {at}");
    cache.check().unwrap();
    let mut bytes = vec![0; at as usize];
    // What is not in memory finds none to come back to: it is read where it is. A pin lends frames, and there is none.
    file.read_exact_at(&mut bytes, 0).unwrap();
    verify(&bytes, FILE, 0).unwrap();
    let refused = file.pin(0, PAGE).unwrap_err();
    assert!(refused.to_string().contains("the spill file is full"), "{refused}");
    file.punch_hole(at - MIB, MIB).unwrap();
    file.read_exact_at(&mut bytes[..(at - MIB) as usize], 0).unwrap();
    verify(&bytes[..(at - MIB) as usize], FILE, 0).unwrap();
    fill_content(&mut piece, FILE, at - MIB, 1);
    file.write_all_at(&piece, at - MIB).unwrap();
    cache.check().unwrap();
}

/// Appends runs of pages that can be packed until neither memory nor the spill file takes more; returns how many pages
/// there are.
fn fill_both(file: &MemFile, run: u64) -> u64 {
    let mut page = file.len() / PAGE as u64;
    loop {
        let bytes: Vec<u8> = (page..page + run).flat_map(dull_page).collect();
        match file.write_at(&bytes, page * PAGE as u64) {
            Ok(bytes) if bytes == bytes / PAGE * PAGE => page += (bytes / PAGE) as u64,
            Ok(bytes) => panic!("{bytes} bytes of whole pages were written"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}");
                return page;
            }
        }
        assert!(page * (PAGE as u64) < 64 * MIB, "it cannot all be there");
    }
}

/// A page full of its own number, which can be packed with its neighbours.
fn dull_page(page: u64) -> Vec<u8> {
    (page + 1).to_le_bytes().repeat(PAGE / 8)
}

#[test]
fn written_bytes_are_read_while_memory_and_the_spill_file_are_full() {
    for (compress, mib, run) in [(false, 16, 1), (false, 4, 16), (true, 1, 16)] {
        let disk = Arc::new(MemoryFile::new(Vec::new())) as Arc<dyn Backend>;
        let cache = builder().spill_to(disk, options(mib).compress(compress)).build().unwrap();
        let file = file(&cache);
        let pages = fill_both(&file, run);
        let spilled = numbers(&file).spilled_pages;
        assert!(spilled > 0, "compress {compress}");
        assert!(file.pin(0, PAGE).is_err(), "page 0 is spilled, and there is no memory for it");
        let wanted: Vec<u8> = (0..pages).flat_map(dull_page).collect();
        let mut dice = Dice::new(mib);
        for nth in 0..300 {
            let at = dice.below(wanted.len() as u64 - 1) as usize;
            let at = if nth == 0 { 0 } else { at };
            let len =
                (1 + dice.below(if nth % 30 == 0 { 500_000 } else { 9000 }) as usize).min(wanted.len() - at);
            let (mut bytes, middle) = (vec![0xee; len], len / 3);
            let read = if nth % 4 == 0 {
                let (one, other) = bytes.split_at_mut(middle);
                file.read_vectored_at(&mut [IoSliceMut::new(one), IoSliceMut::new(other)], at as u64)
            } else {
                file.read_at(&mut bytes, at as u64)
            };
            assert_eq!(read.unwrap(), len, "at {at}");
            assert!(bytes == wanted[at..at + len], "{len} bytes at {at}");
        }
        assert_eq!(numbers(&file).spilled_pages, spilled, "they stay where they are");
        let stats = cache.stats();
        let of_spill = cache.spill_stats().unwrap();
        assert!(stats.spill_read_pages >= 300, "{stats:?}");
        assert_eq!((of_spill.read_pages, of_spill.spilled_in_pages), (stats.spill_read_pages, 0));
        assert!(stats.to_string().contains("MiB read there"), "{stats}");
        cache.check().unwrap();
        // As soon as there is memory, a page that is read comes back.
        file.set_len((pages - 1024) * PAGE as u64).unwrap();
        let mut bytes = vec![0; PAGE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == dull_page(0));
        assert!(numbers(&file).spilled_pages < spilled);
        cache.check().unwrap();
    }
}

/// A pin, a write of a part of a page and a cut inside one need a frame. Where none can come they are refused, and not
/// after a wait, and have done nothing.
#[test]
fn calls_that_need_a_frame_are_refused_without_a_wait_and_without_effect_while_both_are_full() {
    const TIMES: u64 = 100;
    for (compress, mib, run) in [(false, 16, 1), (false, 4, 16), (true, 1, 16)] {
        let disk = Arc::new(MemoryFile::new(Vec::new())) as Arc<dyn Backend>;
        let cache = builder().spill_to(disk, options(mib).compress(compress)).build().unwrap();
        let file = file(&cache);
        let pages = fill_both(&file, run);
        let before = numbers(&file);
        let (tell, told) = mpsc::channel();
        let same = file.clone();
        let refused = thread::spawn(move || {
            for nth in 0..TIMES {
                let inside = nth % 16 * PAGE as u64 + 100;
                let errors = [
                    same.pin(inside, 200).unwrap_err(),
                    same.write_at(&[0xee; 200], inside).unwrap_err(),
                    same.punch_hole(inside, 200).unwrap_err(),
                    same.set_len(inside).unwrap_err(),
                ];
                for error in errors {
                    assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}");
                    assert!(error.to_string().contains("the spill file is full"), "{error}");
                }
            }
            tell.send(()).unwrap();
        });
        // A tenth of a second each would be forty.
        let is_over = told.recv_timeout(Duration::from_secs(20)).is_ok();
        refused.join().unwrap();
        assert!(is_over, "each of them waits for memory, compress {compress}");
        assert_eq!((numbers(&file), file.len()), (before, pages * PAGE as u64));
        let mut bytes = vec![0; pages as usize * PAGE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.chunks(PAGE).zip(0..).all(|(bytes, page)| bytes == dull_page(page)));
        cache.check().unwrap();
    }
}

/// 1 R reads a page where it is, in the spill file, because both are full.
/// 2 C punches that page meanwhile, or writes it, and others' bytes want its slots.
/// R gets what the page is when its read has ended; and its slots are free then.
#[test]
fn a_page_that_changes_while_it_is_read_in_the_spill_file_is_looked_at_again() {
    for (compress, mib) in [(false, 4), (true, 1)] {
        let disk = Arc::new(Stepping {
            memory: MemoryFile::new(Vec::new()),
            fills: AtomicU32::new(0),
            step: Mutex::new(None),
        });
        let backend = Arc::clone(&disk) as Arc<dyn Backend>;
        let cache = builder().spill_to(backend, options(mib).compress(compress)).build().unwrap();
        let file = file(&cache);
        let pages = fill_both(&file, 16);
        let read_beside = |page: u64, step: Box<dyn FnOnce() + Send>| {
            assert!(
                file.pin(page * PAGE as u64, PAGE).is_err(),
                "page {page} finds memory, compress {compress}"
            );
            disk.fills.store(1, Ordering::Relaxed); // the next fill is the one with the step
            *disk.step.lock().unwrap() = Some(step);
            let mut bytes = vec![0xee; PAGE];
            file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
            assert!(disk.step.lock().unwrap().is_none(), "the step was taken beside a read of slots");
            bytes
        };
        assert!(read_beside(2, Box::new(|| {})) == dull_page(2));
        // Whole folios are punched, which needs no memory; then others take memory, and the slots.
        let punch =
            |file: &MemFile, page: u64| file.punch_hole(page * PAGE as u64, 64 * PAGE as u64).unwrap();
        let same = file.clone();
        let bytes = read_beside(
            2,
            Box::new(move || {
                punch(&same, 0);
                assert!(fill_both(&same, 1) > pages, "there was no room for others");
            }),
        );
        assert!(bytes.iter().all(|byte| *byte == 0), "the page was punched");
        fill_both(&file, 1); // the slots of that read, too
        let same = file.clone();
        let bytes = read_beside(
            130,
            Box::new(move || {
                punch(&same, 64);
                same.write_all_at(&dull_page(999), 130 * PAGE as u64).unwrap();
            }),
        );
        assert!(bytes == dull_page(999), "the page was written");
        cache.check().unwrap();
        drop(file);
        assert_eq!(cache.stats().spill_bytes, 0, "no slot is kept for a reader that has ended");
        cache.check().unwrap();
    }
}

#[test]
fn written_bytes_are_read_while_a_pool_is_at_its_limit_and_the_spill_file_is_full() {
    let (cache, _disk) = in_memory(4);
    let pool = cache.add_pool("small", PoolOptions::new().limit(2 * MIB)).unwrap();
    let file = pool.mem_file(MemFileOptions::new()).unwrap();
    let pages = fill_both(&file, 16);
    assert!(file.pin(0, PAGE).is_err(), "page 0 is spilled, and the pool is full");
    let mut bytes = vec![0; pages as usize * PAGE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.chunks(PAGE).zip(0..).all(|(bytes, page)| bytes == dull_page(page)));
    cache.check().unwrap();
}

#[test]
fn a_page_that_cannot_be_read_where_it_is_is_an_error_for_its_reader() {
    let (cache, disk) = simulated(4, Faults::default(), WriteFaults::default());
    let file = file(&cache);
    fill_both(&file, 16);
    let mut bytes = vec![0; 4 * PAGE];
    disk.fail_at(0..4 * MIB, FailureCount::First(2));
    // The pages together, then the first alone.
    let error = file.read_at(&mut bytes, 0).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(libc::EIO)), "{error}");
    assert_eq!(cache.stats().spill_errors, 2, "both requests are counted");
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.chunks(PAGE).zip(0..).all(|(bytes, page)| bytes == dull_page(page)));
    cache.check().unwrap();
}

#[test]
fn unevictable_files_stay_and_the_others_make_room_for_them() {
    let (cache, _disk) = in_memory(64);
    let (cold, stays) = (file(&cache), cache.mem_file(MemFileOptions::new().unevictable(true)).unwrap());
    fill(&cold, 32, 1);
    fill(&stays, 4, 2);
    assert_eq!(numbers(&stays).spilled_pages, 0);
    read_all(&cold, 1);
    assert_eq!((numbers(&stays).spilled_pages, numbers(&stays).data_pages), (0, 4 * MIB / PAGE as u64));
    read_all(&stays, 2);
    cache.check().unwrap();
}

#[test]
fn packable_pages_take_less_and_others_are_kept_as_they_are() {
    let disk = Arc::new(MemoryFile::new(Vec::new())) as Arc<dyn Backend>;
    let cache = builder().spill_to(disk, options(64).compress(true)).build().unwrap();
    let (dull, noisy) = (file(&cache), file(&cache));
    for mib in 0..32 {
        dull.write_all_at(&vec![mib as u8; MIB as usize], mib * MIB).unwrap();
    }
    let mut rng = Dice::new(1);
    let noise: Vec<u8> = (0..BIG * MIB / 2 / 8).flat_map(|_| rng.roll().to_le_bytes()).collect();
    noisy.write_all_at(&noise, 0).unwrap();
    let (stats, dull_pages) = (cache.stats(), numbers(&dull).spilled_pages);
    assert!(dull_pages > 0 && numbers(&noisy).spilled_pages > 0, "{stats:?}");
    let saved = stats.spill_pages - stats.spill_bytes / PAGE as u64;
    assert!(saved > dull_pages / 2, "{saved} pages are saved of {dull_pages}");
    cache.check().unwrap();
    // An edge inside what is packed.
    dull.set_len(7 * MIB + 12_345).unwrap();
    let mut bytes = vec![0; (7 * MIB + 12_345) as usize];
    dull.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == (at as u64 / MIB) as u8));
    let mut back = vec![0; noise.len()];
    noisy.read_exact_at(&mut back, 0).unwrap();
    assert!(back == noise);
    cache.check().unwrap();
}

#[test]
fn other_bytes_than_were_written_are_an_error_for_their_reader() {
    let (cache, disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    disk.change(|bytes| {
        good = bytes.clone();
        bytes.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
        bad = bytes.clone();
    });
    let mut page = [0; PAGE];
    let (mut failed, mut fine) = (0, 0);
    for at in (0..BIG * MIB).step_by(17 * PAGE) {
        match file.read_at(&mut page, at) {
            Ok(_) => {
                verify(&page, FILE, at).unwrap();
                fine += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                assert!(error.to_string().contains("other bytes"), "{error}");
                failed += 1;
            }
        }
    }
    assert!(failed > 0 && fine > 0, "{failed} failed, {fine} did not");
    cache.check().unwrap();
    // What went out since is right as it is.
    disk.change(|bytes| {
        for (nth, bytes) in bytes.chunks_mut(PAGE).enumerate() {
            let slot = nth * PAGE..(nth + 1) * PAGE;
            if bad.get(slot.clone()) == Some(&*bytes) {
                bytes.copy_from_slice(&good[slot]);
            }
        }
    });
    read_all(&file, 1);
}

#[test]
fn a_page_that_cannot_be_read_fails_alone_and_stays_where_it_is() {
    let (cache, disk) = simulated(64, Faults::default(), WriteFaults::default());
    let file = file(&cache);
    fill(&file, BIG, 1);
    disk.fail_at(0..64 * MIB, FailureCount::First(2));
    let mut page = [0; PAGE];
    // Page 0 is out: the batch fails, then the page alone.
    let error = file.read_at(&mut page, 0).unwrap_err();
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(libc::EIO)), "{error}");
    cache.check().unwrap();
    file.read_exact_at(&mut page, 0).unwrap();
    assert_eq!(page, page_content(FILE, 0, 1));
    read_all(&file, 1);
    cache.check().unwrap();
}

#[test]
fn a_device_that_takes_nothing_is_an_error_and_written_bytes_are_there() {
    let (cache, disk) =
        simulated(64, Faults::default(), WriteFaults { errors: 1000, ..WriteFaults::default() });
    let file = file(&cache);
    let mut piece = vec![0; 1 << 16];
    let mut at = 0;
    let error = loop {
        fill_content(&mut piece, FILE, at, 1);
        match file.write_at(&piece, at) {
            Ok(bytes) => at += bytes as u64,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(error.to_string().contains("the spill file cannot be written"), "{error}");
    let mut bytes = vec![0; at as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    verify(&bytes, FILE, 0).unwrap();
    assert_eq!(cache.stats().spill_pages, 0);
    cache.check().unwrap();
    drop(disk);
}

#[test]
fn errors_under_a_seed_lose_nothing() {
    for seed in 0..6 {
        let faults = Faults {
            seed,
            errors: 100,
            early_ends: 50,
            drops: 20,
            delay_max: 4,
            sequence: CompletionOrder::Shuffled,
            ..Faults::default()
        };
        let writes = WriteFaults { errors: 100, full: 50, drops: 20, ..WriteFaults::default() };
        let (cache, _disk) = simulated(64, faults, writes);
        let file = file(&cache);
        let pages = 7168;
        let mut rng = Dice::new(seed);
        let mut known = vec![None; pages as usize];
        for step in 0..10_000u32 {
            let page = if step < 7168 { u64::from(step) } else { rng.below(pages) };
            let at = page * PAGE as u64;
            if step < 7168 || rng.below(2) == 0 {
                // What memory cannot be had for is told, and is not written.
                match file.write_at(&page_content(FILE, page, step), at) {
                    Ok(_) => known[page as usize] = Some(step),
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::NoMemory | ErrorKind::Io), "{error}")
                    }
                }
            } else if let Some(generation) = known[page as usize] {
                let mut bytes = [0; PAGE];
                match file.read_at(&mut bytes, at) {
                    Ok(read) => {
                        assert_eq!(read, PAGE);
                        assert!(bytes == page_content(FILE, page, generation), "page {page}, seed {seed}");
                    }
                    Err(error) => {
                        assert!(matches!(error.kind(), ErrorKind::NoMemory | ErrorKind::Io), "{error}")
                    }
                }
            }
        }
        cache.check().unwrap();
        let stats = cache.stats();
        assert!(stats.spill_errors > 0 && stats.spilled_pages > 0 && stats.spilled_in_pages > 0, "{stats:?}");
    }
}

/// Four threads, each of which owns a quarter of the pages, and reads those of all.
fn press(cache: &Cache, file: &MemFile, rounds: u64) {
    let pages = BIG * MIB / PAGE as u64;
    let latest: Vec<AtomicU32> = (0..pages).map(|_| AtomicU32::new(1)).collect();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (file, latest, failed) = (file.clone(), &latest, &failed);
            scope.spawn(move || {
                let mut rng = Dice::new(thread);
                let mut bytes = vec![0; 16 * PAGE];
                for _ in 0..rounds {
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                    let page = rng.below(pages - 16);
                    let at = page * PAGE as u64;
                    let outcome = if rng.below(3) == 0 {
                        let own = page / 4 * 4 + thread;
                        let generation = latest[own as usize].load(Ordering::Relaxed) + 1;
                        file.write_all_at(&page_content(FILE, own, generation), own * PAGE as u64).unwrap();
                        latest[own as usize].store(generation, Ordering::Release);
                        Ok(())
                    } else {
                        let least: Vec<u32> = (0..16)
                            .map(|nth| latest[(page + nth) as usize].load(Ordering::Acquire))
                            .collect();
                        let len = if rng.below(2) == 0 { PAGE } else { 16 * PAGE };
                        file.read_exact_at(&mut bytes[..len], at).unwrap();
                        bytes[..len].chunks(PAGE).zip(least).enumerate().try_for_each(
                            |(nth, (bytes, least))| {
                                let seen = generations(bytes, FILE, at + (nth * PAGE) as u64)?;
                                match seen {
                                    Some(seen) if *seen.start() >= least => Ok(()),
                                    seen => Err(format!("{seen:?} instead of {least} and later")),
                                }
                            },
                        )
                    };
                    if let Err(wrong) = outcome {
                        failed.store(true, Ordering::Relaxed);
                        panic!("page {page}: {wrong}");
                    }
                }
            });
        }
    });
    cache.check().unwrap();
    let mut bytes = [0; PAGE];
    for page in 0..pages {
        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        assert!(
            bytes == page_content(FILE, page, latest[page as usize].load(Ordering::Relaxed)),
            "page {page}"
        );
    }
    cache.check().unwrap();
}

#[test]
fn threads_under_pressure_read_written_bytes() {
    let (cache, _disk) = in_memory(64);
    let file = file(&cache);
    fill(&file, BIG, 1);
    press(&cache, &file, 2000);
}

#[test]
fn threads_under_pressure_with_a_device_that_takes_its_time() {
    let faults = Faults { seed: 5, delay_max: 6, sequence: CompletionOrder::Shuffled, ..Faults::default() };
    let (cache, _disk) = simulated(64, faults, WriteFaults::default());
    let file = file(&cache);
    fill(&file, BIG, 1);
    press(&cache, &file, 1000);
}

#[test]
fn threads_under_pressure_with_a_file_without_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let spill = SpillOptions::new(folder.path(), 64 * MIB).compress(true);
    let cache = builder().spill(spill).build().unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it has no name");
    let file = file(&cache);
    fill(&file, BIG, 1);
    press(&cache, &file, 1000);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// 1 R reads slots of a packed folio, and is about to put it back; it waits for the thread that cuts the file.
/// 2 C, which cuts it, wants that folio back, because the edge is inside it, and waits for R.
#[test]
fn cuts_and_punches_run_beside_readers_and_spills_under_way() {
    let faults = Faults { seed: 9, delay_max: 4, sequence: CompletionOrder::Shuffled, ..Faults::default() };
    let disk = Arc::new(SimulatedBackend::of_memory(Arc::new(MemoryFile::new(Vec::new())), faults));
    let cache = builder().spill_to(disk, options(64).compress(true)).build().unwrap();
    let file = file(&cache);
    // Pages that can be packed: each is full of one byte, which says which it is.
    let mark = |page: u64| 1 + (page % 251) as u8;
    let pages = 28 * MIB / PAGE as u64;
    let put = |from: u64, end: u64| {
        let bytes: Vec<u8> = (from..end).flat_map(|page| [mark(page); PAGE]).collect();
        file.write_all_at(&bytes, from * PAGE as u64).unwrap();
    };
    (0..pages).step_by(64).for_each(|page| put(page, page + 64));
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (file, is_done) = (file.clone(), &is_done);
            scope.spawn(move || {
                let (mut rng, mut bytes) = (Dice::new(100 + seed), vec![0; 8 * PAGE]);
                while !is_done.load(Ordering::Relaxed) {
                    let page = rng.below(pages - 8);
                    let read = file.read_at(&mut bytes, page * PAGE as u64).unwrap();
                    for (nth, bytes) in bytes[..read].chunks_exact(PAGE).enumerate() {
                        let (first, wanted) = (bytes[0], mark(page + nth as u64));
                        assert!(first == 0 || first == wanted, "page {page} + {nth}: {first}");
                        assert!(bytes.iter().all(|byte| *byte == first), "page {page} + {nth} is torn");
                    }
                }
            });
        }
        let mut rng = Dice::new(1);
        for _ in 0..200 {
            let page = rng.below(pages - 300);
            let end = if rng.below(3) == 0 { pages } else { page + 1 + rng.below(300) };
            match end == pages {
                true => file.set_len(page * PAGE as u64).unwrap(),
                false => file.punch_hole(page * PAGE as u64, (end - page) * PAGE as u64).unwrap(),
            }
            put(page, end);
        }
        is_done.store(true, Ordering::Relaxed);
    });
    cache.check().unwrap();
    let mut bytes = vec![0; PAGE];
    for page in 0..pages {
        file.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        assert!(bytes.iter().all(|byte| *byte == mark(page)), "page {page}");
    }
    drop(file);
    // The reclaiming thread may hold the file for a moment, and spills in flight hold it until the background thread
    // has fetched their completions.
    let is_late = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while cache.stats().spill_pages > 0 && std::time::Instant::now() < is_late {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(cache.stats().spill_pages, 0);
    cache.check().unwrap();
}

/// Memory, and a step of the test before the second fill.
struct Stepping {
    memory: MemoryFile,
    fills: AtomicU32,
    step: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for Stepping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stepping")
    }
}

impl Backend for Stepping {
    fn name(&self) -> &'static str {
        "stepping"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.memory.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        let step = match self.fills.fetch_add(1, Ordering::Relaxed) {
            1 => self.step.lock().unwrap().take(),
            _ => None,
        };
        if let Some(step) = step {
            step();
        }
        self.memory.submit(fills);
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.memory.flush(flushes);
    }
}

/// 1 P, which punches, brings the pages with both edges back from the spill file, one after the other.
/// 2 W wants memory meanwhile: the first of them is spilled again, with its neighbours.
/// 3 P alone with the file parts what is spilled at its edges, and brings the first page back again to zero its end.
/// The neighbours that came with it reached over the edge, as one folio, and so were left in the file.
#[test]
fn punched_pages_do_not_come_back_with_the_page_at_the_edge() {
    let disk = Arc::new(Stepping {
        memory: MemoryFile::new(Vec::new()),
        fills: AtomicU32::new(0),
        step: Mutex::new(None),
    });
    let backend = Arc::clone(&disk) as Arc<dyn Backend>;
    let cache = builder().spill_to(backend, options(128)).build().unwrap();
    let (punched, other) = (file(&cache), file(&cache));
    fill(&punched, 8, 1);
    let push_out = move |file: &MemFile| {
        while numbers(file).data_pages > 0 {
            fill(&other, BIG, 1);
        }
    };
    push_out(&punched);
    let same = punched.clone();
    disk.fills.store(0, Ordering::Relaxed);
    *disk.step.lock().unwrap() = Some(Box::new(move || push_out(&same)));
    let (start, end) = (MIB + 5 * PAGE as u64 + 100, 3 * MIB + 7);
    punched.punch_hole(start, end - start).unwrap();
    assert!(disk.fills.load(Ordering::Relaxed) > 2, "the page with the first edge is brought back again");
    let mut bytes = vec![0; (end - start) as usize];
    punched.read_exact_at(&mut bytes, start).unwrap();
    let left = bytes.iter().position(|byte| *byte != 0);
    assert_eq!(left.map(|at| at as u64 + start), None, "this byte was punched");
    verify_all_but(&punched, start..end);
    cache.check().unwrap();
}

fn verify_all_but(file: &MemFile, range: Range<u64>) {
    for part in [0..range.start, range.end..file.len()] {
        let mut bytes = vec![0; (part.end - part.start) as usize];
        file.read_exact_at(&mut bytes, part.start).unwrap();
        verify(&bytes, FILE, part.start).unwrap();
    }
}

#[test]
fn a_place_without_a_spill_file_is_an_error_of_the_build() {
    let build = |options| builder().spill(options).build().unwrap_err();
    let nowhere = build(SpillOptions::new("/proc/nowhere/at/all", MIB));
    assert_eq!(nowhere.kind(), ErrorKind::Build);
    assert!(nowhere.to_string().contains("/proc/nowhere/at/all"), "{nowhere}");
    let folder = tempfile::tempdir().unwrap();
    for bytes in [0, 4095, (128 << 30) + 4096] {
        let error = build(SpillOptions::new(folder.path(), bytes));
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    }
    let taken = folder.path().join("taken");
    std::fs::write(&taken, b"somebody's").unwrap();
    build(SpillOptions::new(&taken, MIB));
    assert_eq!(std::fs::read(&taken).unwrap(), b"somebody's");
    let named = folder.path().join("named");
    drop(builder().spill(SpillOptions::new(&named, MIB)).build().unwrap());
    assert!(!named.exists());
}

#[derive(Clone, Debug)]
enum Op {
    Write(u64, usize, u8),
    Read(u64, usize),
    Punch(u64, u64),
    SetLen(u64),
    /// Spills cold pages.
    Squeeze(u64),
}

const TWIN_BYTES: u64 = 24 * MIB;

fn op() -> impl Strategy<Value = Op> {
    let at = || prop_oneof![2 => 0..TWIN_BYTES, 1 => (0..TWIN_BYTES / 4096).prop_map(|page| page * 4096)];
    let len = || prop_oneof![1usize..5000, (1usize..300).prop_map(|pages| pages * 4096), 1usize..1_500_000];
    prop_oneof![
        5 => (at(), len(), any::<u8>()).prop_map(|(at, len, byte)| Op::Write(at, len, byte)),
        4 => (at(), len()).prop_map(|(at, len)| Op::Read(at, len)),
        2 => (at(), len()).prop_map(|(at, len)| Op::Punch(at, len as u64)),
        1 => at().prop_map(Op::SetLen),
        2 => (1u64..14).prop_map(Op::Squeeze),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn a_file_that_spills_behaves_as_a_vector(
        seed in any::<u64>(),
        compress in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..40),
    ) {
        let faults = Faults { seed, delay_max: 5, sequence: CompletionOrder::Shuffled, ..Faults::default() };
        let disk = SimulatedBackend::of_memory(Arc::new(MemoryFile::new(Vec::new())), faults);
        let cache = builder().spill_to(Arc::new(disk), options(64).compress(compress)).build().unwrap();
        let (file, other, mut twin) = (file(&cache), file(&cache), Vec::new());
        for op in ops {
            match op {
                Op::Write(at, len, byte) => {
                    let bytes: Vec<u8> = (0..len).map(|nth| byte ^ (nth / 999) as u8).collect();
                    file.write_all_at(&bytes, at).unwrap();
                    twin.resize(twin.len().max(at as usize + len), 0);
                    twin[at as usize..][..len].copy_from_slice(&bytes);
                }
                Op::Read(at, len) => {
                    let mut bytes = vec![0xee; len];
                    let read = file.read_at(&mut bytes, at).unwrap();
                    let wanted = twin.get(at as usize..).unwrap_or_default();
                    prop_assert!(bytes[..read] == wanted[..len.min(wanted.len())], "{len} bytes at {at}");
                }
                Op::Punch(at, len) => {
                    file.punch_hole(at, len).unwrap();
                    let end = twin.len().min((at + len) as usize);
                    twin[end.min(at as usize)..end].fill(0);
                }
                Op::SetLen(len) => {
                    file.set_len(len).unwrap();
                    twin.resize(len as usize, 0);
                }
                Op::Squeeze(mib) => {
                    other.write_all_at(&vec![9; (mib * MIB) as usize], 0).unwrap();
                    other.set_len(0).unwrap();
                }
            }
            prop_assert_eq!(file.len(), twin.len() as u64);
            prop_assert_eq!(cache.check(), Ok(()));
        }
        let mut bytes = vec![0; twin.len()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        prop_assert!(bytes == twin);
        drop((file, other));
        prop_assert_eq!(cache.check(), Ok(()));
    }
}

//! Memory files, statement by statement: what is not there is zeros, what is there stays, and what goes is free.
//!
//! The letters are those of the kernel facts: R for reads, T for what cuts and punches.
#![allow(unsafe_code, reason = "fork")]

use std::io::{IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use quinion::backend::{Attributes, Backend, Fill, MemoryFile, ReapMode, ReapOutcome};
use quinion::internals::hooks;
use quinion::{Cache, ErrorKind, MemFile, MemFileOptions, OnPinned, Pinned, PoolOptions};
use quinion_testing::content::{Dice, PAGE as PAGE_BYTES, fill_content, generations, page_content, verify};

const PAGE: u64 = PAGE_BYTES as u64;
const MIB: u64 = 1 << 20;

fn cache(mib: u64) -> Cache {
    Cache::builder().memory(mib * MIB).build().unwrap()
}

fn file(cache: &Cache) -> MemFile {
    cache.mem_file(MemFileOptions::new()).unwrap()
}

fn sized(cache: &Cache, bytes: u64) -> MemFile {
    cache.mem_file(MemFileOptions::new().size(bytes)).unwrap()
}

fn read(file: &MemFile, position: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let read = file.read_at(&mut bytes, position).unwrap();
    bytes.truncate(read);
    bytes
}

fn bytes_of(pinned: &Pinned) -> Vec<u8> {
    pinned.chunks().flatten().copied().collect()
}

fn pages(file: &MemFile) -> (u64, u64) {
    let stats = file.stats().unwrap();
    assert_eq!(stats.allocated_pages, 0);
    (stats.data_pages, stats.hole_pages)
}

fn taken(cache: &Cache) -> u64 {
    let stats = cache.stats();
    (stats.data_bytes - stats.free_bytes) / PAGE
}

#[test]
fn written_bytes_are_read_and_the_gaps_are_zeros() {
    let cache = cache(16);
    let file = file(&cache);
    assert_eq!(file.write_at(b"hello", 10_000).unwrap(), 5);
    assert_eq!(file.len(), 10_005);
    assert_eq!(read(&file, 0, 20_000), [&[0; 10_000][..], b"hello"].concat());
    assert_eq!(file.write_at(&[7; 5 * 4096], 3 * PAGE + 100).unwrap(), 5 * 4096);
    assert_eq!(read(&file, 3 * PAGE, 101), [&[0; 100][..], &[7]].concat());
    assert_eq!(read(&file, 8 * PAGE + 90, 20), [7; 10]);
    assert_eq!(file.append(b"end").unwrap(), 8 * PAGE + 100);
    assert_eq!(pages(&file), (7, 2), "page 2 has the greeting, 3 to 8 the sevens");
    cache.check().unwrap();
}

#[test]
fn writes_and_reads_of_pieces_are_those_of_all_of_them_together() {
    let cache = cache(16);
    let file = file(&cache);
    let pieces = [&[1; 3000][..], &[], &[2; 3000], &[3; 9000]].map(IoSlice::new);
    assert_eq!(file.write_vectored_at(&pieces, 500).unwrap(), 15_000);
    let right = [&[0; 500][..], &[1; 3000], &[2; 3000], &[3; 9000]].concat();
    assert_eq!(read(&file, 0, 20_000), right);
    let (mut a, mut b, mut c) = ([9; 10], [9; 7000], [9; 20_000]);
    let mut targets = [&mut a[..], &mut b, &mut c].map(IoSliceMut::new);
    assert_eq!(file.read_vectored_at(&mut targets, 495).unwrap(), 15_005);
    assert_eq!([&a[..], &b, &c[..15_005 - 7010]].concat(), right[495..]);
    assert_eq!(c[15_005 - 7010..], [9; 12_005], "what lies behind the end is not touched");
}

/// R01: an empty range is empty and no error: reads, writes, pins and punches of no bytes change nothing. (The batch of
/// such a range is in `read_batch.rs`.)
#[test]
fn r01_empty_reads_writes_and_pins_do_nothing() {
    let cache = cache(16);
    let file = sized(&cache, MIB);
    assert_eq!(file.read_at(&mut [], 0).unwrap(), 0);
    assert_eq!(file.read_vectored_at(&mut [], 0).unwrap(), 0);
    assert_eq!(file.write_at(&[], 5 * MIB).unwrap(), 0);
    assert!(file.pin(0, 0).unwrap().is_empty());
    assert_eq!((file.len(), pages(&file)), (MIB, (0, 256)), "a write of nothing makes nothing longer");
    file.write_all_at(&[5; 3 * PAGE_BYTES], 0).unwrap();
    for at in [0, 10, PAGE, 2 * MIB] {
        file.punch_hole(at, 0).unwrap();
        assert_eq!(file.write_vectored_at(&[IoSlice::new(&[]), IoSlice::new(&[])], at).unwrap(), 0);
        assert_eq!(file.read_vectored_at(&mut [IoSliceMut::new(&mut [])], at).unwrap(), 0);
        assert!(file.pin(at, 0).unwrap().is_empty());
    }
    assert_eq!(read(&file, 0, 4 * PAGE_BYTES), [&[5; 3 * PAGE_BYTES][..], &[0; PAGE_BYTES]].concat());
    assert_eq!((file.len(), pages(&file)), (MIB, (3, 253)));
    cache.check().unwrap();
}

/// R02 to R05: a read that begins and ends anywhere in folios of any order returns each byte of its range once. What
/// the batches of it are made of and cost is in `read_batch.rs`, by the rules of both kinds of files.
#[test]
fn r02_to_r05_reads_of_any_part_of_folios_of_any_size_are_right() {
    let cache = cache(32);
    let file = file(&cache);
    // Folios of many orders: each write is one run.
    let mut at = 0;
    for order in [4, 0, 2, 5, 1, 3, 0] {
        let mut bytes = vec![0; PAGE_BYTES << order];
        fill_content(&mut bytes, 1, at, order);
        file.write_all_at(&bytes, at).unwrap();
        at += bytes.len() as u64;
    }
    let mut dice = Dice::new(5);
    for _ in 0..3000 {
        let position = dice.below(at);
        let len = 1 + dice.below(40 * PAGE) as usize;
        let bytes = read(&file, position, len);
        assert_eq!(bytes.len() as u64, (len as u64).min(at - position));
        verify(&bytes, 1, position).unwrap();
    }
    cache.check().unwrap();
}

/// R12, T01: readers of a file that is truncated and grows meanwhile see its own bytes or zeros, and none of another
/// file.
#[test]
fn r12_t01_a_reader_of_a_file_that_is_cut_and_grows_sees_no_byte_behind_its_end_and_no_other_files() {
    let cache = cache(32);
    let (file, other) = (file(&cache), file(&cache));
    let (short, long) = (20 * PAGE + 1000, 60 * PAGE);
    let write = |generation| {
        let mut bytes = vec![0; long as usize];
        fill_content(&mut bytes, 1, 0, generation);
        file.write_all_at(&bytes, 0).unwrap();
    };
    write(0);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for reader in 0..3 {
            let (file, is_over) = (&file, &is_over);
            scope.spawn(move || {
                let mut dice = Dice::new(reader);
                let mut reads = 0;
                while !is_over.load(Ordering::Relaxed) || reads < 50 {
                    let (from, pages) = (dice.below(60), 1 + dice.below(30));
                    let bytes = read(file, from * PAGE, (pages * PAGE) as usize);
                    let pinned = file.pin(from * PAGE, 3 * PAGE_BYTES).unwrap();
                    for (seen, at) in [(bytes, from), (bytes_of(&pinned), from)] {
                        assert!(at * PAGE + seen.len() as u64 <= long);
                        for (page, bytes) in seen.chunks(PAGE_BYTES).enumerate() {
                            check_cut_page(bytes, (at + page as u64) * PAGE, short);
                        }
                    }
                    reads += 1;
                }
            });
        }
        scope.spawn(|| {
            // Takes the frames that the first lets go.
            for round in 0..200 {
                other.write_all_at(&[0xab; 64 * PAGE_BYTES], 0).unwrap();
                other.set_len(round % 3 * PAGE).unwrap();
            }
        });
        for generation in 1..200 {
            file.set_len(short).unwrap();
            // T02: nothing behind the end is there any more.
            assert_eq!(pages(&file), (21, 0));
            file.set_len(long).unwrap();
            // T07: what was cut off is zeros when the file grows.
            let tail = read(&file, short, (long - short) as usize);
            assert!(tail.len() as u64 == long - short && tail.iter().all(|&byte| byte == 0));
            write(generation);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    cache.check().unwrap();
}

fn check_cut_page(bytes: &[u8], position: u64, cut: u64) {
    let kept = cut.saturating_sub(position).min(bytes.len() as u64) as usize;
    verify(&bytes[..kept], 1, position).unwrap();
    let rest = &bytes[kept..];
    if !rest.iter().all(|&byte| byte == 0) {
        verify(bytes, 1, position).unwrap();
    }
}

/// R14: a read at or past the end of the file returns 0 bytes and no error. Sizes and writes past the largest size are
/// refused.
#[test]
fn r14_reads_at_and_behind_the_end_give_nothing_and_no_error() {
    let cache = cache(16);
    let file = file(&cache);
    file.write_all_at(&[1; 5000], 0).unwrap();
    for position in [5000, 5001, 8192, 1 << 40, i64::MAX as u64, u64::MAX] {
        assert!(read(&file, position, 100).is_empty());
        assert!(file.pin(position, 100).unwrap().is_empty());
        assert_eq!(file.read_vectored_at(&mut [IoSliceMut::new(&mut [0; 9])], position).unwrap(), 0);
    }
    assert_eq!(read(&file, 4990, 100), [1; 10]);
    let error = file.read_exact_at(&mut [0; 100], 4990).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert!(
        error.to_string().contains("cannot read 100 bytes at byte 4990: the file ends at byte 5000"),
        "{error}"
    );
    let error = file.write_at(&[1, 2], i64::MAX as u64 - 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(file.set_len(1 << 63).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(
        cache.mem_file(MemFileOptions::new().size(1 << 63)).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    assert_eq!(file.len(), 5000);
}

/// R16: a hole of any length reads as zeros in one step, and takes no memory.
#[test]
fn r16_a_hole_of_any_length_is_zeros_in_one_step_and_takes_no_memory() {
    let cache = cache(16);
    let file = sized(&cache, 1 << 50);
    let before = (taken(&cache), cache.stats().index_bytes);
    let mut bytes = vec![0xee; 64 << 20];
    let locks = hooks::mem_tree_counts(&file).locks;
    assert_eq!(file.read_at(&mut bytes, (1 << 49) + 17).unwrap(), 64 << 20, "four times the cache");
    assert_eq!(hooks::mem_tree_counts(&file).locks - locks, 1);
    assert!(bytes.iter().all(|&byte| byte == 0));
    // Over several buffers, in one step as well.
    bytes.fill(0xee);
    let (first, rest) = bytes.split_at_mut(1);
    let (second, third) = rest.split_at_mut(5000);
    let mut pieces = [first, &mut [][..], second, third].map(IoSliceMut::new);
    let locks = hooks::mem_tree_counts(&file).locks;
    assert_eq!(file.read_vectored_at(&mut pieces, 3).unwrap(), 64 << 20);
    // Where no folio is found a look under the lock says so.
    assert_eq!(hooks::mem_tree_counts(&file).locks - locks, 1);
    assert!(bytes.iter().all(|&byte| byte == 0));
    assert_eq!((taken(&cache), cache.stats().index_bytes), before);
    assert_eq!(pages(&file), (0, 1 << 38));
}

/// R16: a pin of a hole lends zeros that are shared, allocates nothing, and is not changed by a later write.
#[test]
fn r16_a_pin_of_a_hole_lends_shared_zeros_and_allocates_nothing() {
    let cache = cache(16);
    let file = sized(&cache, 1 << 40);
    file.write_all_at(&[5; 3 * PAGE_BYTES], 100 * PAGE + 10).unwrap();
    let before = taken(&cache);
    let pinned = file.pin(10, 8 << 20).unwrap();
    assert_eq!(pinned.len(), 8 << 20);
    let mut right = vec![0; 8 << 20];
    right[100 * PAGE_BYTES..][..3 * PAGE_BYTES].fill(5);
    assert!(bytes_of(&pinned) == right);
    assert_eq!(taken(&cache), before);
    assert_eq!(cache.stats().pinned_bytes / PAGE, 4, "the folios with bytes, and no more");
    // More than pins may keep, and more than the cache: it keeps nothing.
    let holes = file.pin(1 << 30, 512 << 20).unwrap();
    assert_eq!(holes.len(), 512 << 20);
    assert!(holes.chunks().all(|chunk| chunk[0] == 0 && chunk[chunk.len() - 1] == 0));
    assert_eq!(cache.stats().pinned_bytes / PAGE, 4);
    // A write there changes no lent byte.
    file.write_all_at(&[9; 200 * PAGE_BYTES], 0).unwrap();
    assert!(bytes_of(&pinned) == right);
    assert_eq!(read(&file, 103 * PAGE, 10), [9; 10]);
    drop((pinned, holes));
    assert_eq!(cache.stats().pinned_bytes, 0);
    cache.check().unwrap();
}

/// R16: a pin of a hole keeps no more memory the longer the hole is.
#[test]
fn r16_a_pin_of_a_hole_of_any_length_takes_no_memory_for_being_long() {
    let cache = cache(16);
    let file = sized(&cache, 1 << 60);
    file.write_all_at(&[7], 1 << 50).unwrap();
    let pinned = file.pin(4096, 1 << 59).unwrap();
    assert_eq!((pinned.len(), cache.stats().pinned_bytes), (1 << 59, PAGE));
    let first = pinned.chunks().next().unwrap();
    assert!(first.len() >= PAGE_BYTES && first.iter().all(|&byte| byte == 0));
    assert_eq!(first.as_ptr() as usize % PAGE_BYTES, 0, "as aligned as it is in the file");
    assert!(pinned.mapped().is_none(), "its pieces, 2^43 of them, are not even listed");
    drop(pinned);
    // In the middle of pages, with data between.
    let pinned = file.pin((1 << 50) - 200_001, 500_000).unwrap();
    let bytes = bytes_of(&pinned);
    assert_eq!((bytes.len(), bytes[200_001]), (500_000, 7));
    assert_eq!(bytes.iter().filter(|&&byte| byte != 0).count(), 1);
}

/// R18: reads and pins leave no hold: a truncation frees every page after them.
#[test]
fn r18_reads_and_pins_give_back_all_that_they_held() {
    let cache = cache(16);
    let file = file(&cache);
    let before = taken(&cache);
    file.write_all_at(&[5; 300 * PAGE_BYTES], 0).unwrap();
    read(&file, 100, 250 * PAGE_BYTES);
    read(&file, 1, 1);
    file.read_vectored_at(&mut [IoSliceMut::new(&mut [0; 9000]), IoSliceMut::new(&mut [0; 90_000])], 77)
        .unwrap();
    drop(file.pin(3, 299 * PAGE_BYTES).unwrap());
    // What is held is not free when it is cut off.
    file.set_len(0).unwrap();
    assert_eq!(taken(&cache), before);
    cache.check().unwrap();
}

/// T04, T06: a punched hole reads as zeros to its last byte, frees the whole pages in it, and leaves the bytes outside,
/// also of the folio of order 9 in which it lies.
#[test]
fn t04_t06_a_punch_zeroes_the_parts_of_pages_frees_the_pages_between_and_leaves_the_rest() {
    let cache = Cache::builder().memory(64 * MIB).folio_order_max(9).build().unwrap();
    let file = file(&cache);
    let len = 4 << 20;
    let mut right = vec![0; len];
    fill_content(&mut right, 1, 0, 0);
    file.write_all_at(&right, 0).unwrap();
    let full = taken(&cache);
    // In the middle of a folio of order 9, within one page, over several folios, whole folios, at both ends.
    for (from, end) in [
        (700_001, 900_003),
        (5000, 5001),
        (1 << 20, 3 << 20),
        (0, 4096),
        (4_000_000, 4 << 20),
        (4_100_000, 9 << 20),
        (0, 1),
    ] {
        file.punch_hole(from as u64, (end - from) as u64).unwrap();
        right[from..end.min(len)].fill(0);
        assert!(read(&file, 0, len) == right, "{from} to {end}");
        cache.check().unwrap();
    }
    assert_eq!(file.len(), len as u64);
    let (data, holes) = pages(&file);
    assert_eq!((taken(&cache), data + holes), (full - holes, 1024));
    assert_eq!(holes, (900_003 / 4096 - 700_001 / 4096 - 1) + 512 + 1 + (1024 - 4_000_000 / 4096 - 1));
    fill_content(&mut right[600_000..3_500_000], 1, 600_000, 7);
    file.write_all_at(&right[600_000..3_500_000], 600_000).unwrap();
    assert!(read(&file, 0, len) == right);
    cache.check().unwrap();
}

#[test]
fn data_and_holes_are_found() {
    let cache = cache(16);
    let file = sized(&cache, 100 * PAGE + 5);
    assert_eq!((file.seek_data(0).unwrap(), file.seek_hole(7).unwrap()), (None, Some(7)));
    file.write_all_at(&[1; 10], 3 * PAGE + 100).unwrap();
    file.write_all_at(&[1; 2 * PAGE_BYTES], 4 * PAGE).unwrap();
    file.write_all_at(&[1; 5], 100 * PAGE).unwrap();
    let data = |at| file.seek_data(at).unwrap();
    let hole = |at| file.seek_hole(at).unwrap();
    assert_eq!(
        (data(0), data(3 * PAGE + 50), data(6 * PAGE)),
        (Some(3 * PAGE), Some(3 * PAGE + 50), Some(100 * PAGE))
    );
    assert_eq!((hole(0), hole(3 * PAGE + 9), hole(6 * PAGE)), (Some(0), Some(6 * PAGE), Some(6 * PAGE)));
    assert_eq!(hole(100 * PAGE + 1), Some(100 * PAGE + 5), "the end counts as a hole");
    assert_eq!((data(100 * PAGE + 5), hole(100 * PAGE + 5), hole(1 << 60)), (None, None, None));
    file.punch_hole(4 * PAGE, 96 * PAGE).unwrap();
    assert_eq!((data(4 * PAGE), hole(3 * PAGE)), (Some(100 * PAGE), Some(4 * PAGE)));
}

#[test]
fn a_pin_keeps_its_bytes_from_writes_punches_cuts_and_the_end_of_the_file() {
    let cache = cache(16);
    let before = taken(&cache);
    let file = file(&cache);
    let mut right = vec![0; 40 * PAGE_BYTES];
    fill_content(&mut right, 1, 0, 3);
    file.write_all_at(&right, 0).unwrap();
    let pinned = file.pin(5 * PAGE + 9, 30 * PAGE_BYTES).unwrap();
    let lent = right[5 * PAGE_BYTES + 9..][..30 * PAGE_BYTES].to_vec();
    file.write_all_at(&[1; 10], 6 * PAGE).unwrap();
    right[6 * PAGE_BYTES..][..10].fill(1);
    assert!(read(&file, 0, right.len()) == right && bytes_of(&pinned) == lent);
    file.punch_hole(7 * PAGE + 1, 3 * PAGE).unwrap();
    right[7 * PAGE_BYTES + 1..][..3 * PAGE_BYTES].fill(0);
    assert!(read(&file, 0, right.len()) == right && bytes_of(&pinned) == lent);
    let again = file.pin(0, 40 * PAGE_BYTES).unwrap();
    file.set_len(20 * PAGE + 100).unwrap();
    file.set_len(40 * PAGE).unwrap();
    assert!(bytes_of(&pinned) == lent && bytes_of(&again) == right);
    right[20 * PAGE_BYTES + 100..].fill(0);
    assert!(read(&file, 0, right.len()) == right);
    cache.check().unwrap();
    drop(again);
    drop(file);
    cache.check().unwrap();
    assert!(bytes_of(&pinned) == lent, "pinned bytes outlive their file");
    let stats = cache.stats();
    assert_eq!((stats.memory_files, stats.unevictable_pages, stats.cached_pages), (0, 0, 0));
    drop(pinned);
    assert_eq!(taken(&cache), before);
    cache.check().unwrap();
}

#[test]
fn a_write_that_is_to_wait_for_pins_waits_and_says_so() {
    let cache = cache(16);
    let options = MemFileOptions::new().name("scratch").on_pinned(OnPinned::Wait(Duration::from_millis(20)));
    let file = cache.mem_file(options).unwrap();
    file.write_all_at(&[1; 3 * PAGE_BYTES], 0).unwrap();
    let pinned = file.pin(PAGE, 10).unwrap();
    assert_eq!(file.write_at(&[2], PAGE + 5).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(file.punch_hole(0, PAGE + 1).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(file.set_len(PAGE).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(read(&file, 0, 4 * PAGE_BYTES), [1; 3 * PAGE_BYTES]);
    drop(pinned);
    file.write_all_at(&[2], PAGE + 5).unwrap();
    assert_eq!(file.name(), "scratch");
}

#[test]
fn handles_share_a_file_which_ends_with_the_last_of_them() {
    let cache = cache(16);
    let before = taken(&cache);
    let mut one = file(&cache);
    one.write_all(b"0123456789").unwrap();
    let mut two = one.clone();
    assert_eq!(two.stream_position().unwrap(), 10, "a clone begins where its original stands");
    two.rewind().unwrap();
    let mut text = String::new();
    two.read_to_string(&mut text).unwrap();
    assert_eq!((&*text, one.stream_position().unwrap()), ("0123456789", 10));
    assert_eq!(two.seek(SeekFrom::End(-3)).unwrap(), 7);
    two.write_all(b"seven").unwrap();
    two.flush().unwrap();
    assert_eq!((one.len(), read(&one, 0, 20)), (12, b"0123456seven".to_vec()));
    assert!(one.seek(SeekFrom::Current(-11)).is_err());
    let stats = cache.stats();
    assert_eq!((stats.memory_files, stats.unevictable_pages, stats.dirty_pages), (1, 1, 0));
    drop(one);
    assert_eq!(read(&two, 0, 7), b"0123456");
    drop(two);
    let stats = cache.stats();
    assert_eq!((stats.memory_files, stats.unevictable_pages, stats.cached_pages), (0, 0, 0));
    assert_eq!(taken(&cache), before);
    cache.check().unwrap();
}

#[test]
fn a_full_cache_says_so_and_loses_nothing() {
    let cache = cache(16);
    let file = cache.mem_file(MemFileOptions::new().name("hog")).unwrap();
    let mut bytes = vec![0; 1 << 20];
    let error = loop {
        let at = file.len();
        fill_content(&mut bytes, 1, at, 0);
        match file.write_all_at(&bytes, at) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    let text = error.to_string();
    assert!(text.starts_with("hog: ") && text.contains("punch or drop"), "{text}");
    cache.check().unwrap();
    let len = file.len();
    assert!((8 * MIB..16 * MIB).contains(&len), "{len}");
    assert_eq!(pages(&file), (len.div_ceil(PAGE), 0), "the first bytes of a write that fails are there");
    verify(&read(&file, 0, len as usize), 1, 0).unwrap();
    // Cached pages can still be written; punched ones are room for others, files among them.
    file.write_all_at(&page_content(1, 7, 9), 7 * PAGE).unwrap();
    file.punch_hole(0, 4 * MIB).unwrap();
    let other = file_of(&cache);
    assert_eq!(other.read_at(&mut bytes, 0).unwrap(), 1 << 20);
    assert!(bytes.iter().all(|&byte| byte == 7));
    // A file's pages go for those of a memory file.
    file.write_all_at(&vec![1; 4 << 20], 0).unwrap();
    assert_eq!(read(&file, 0, 4 << 20), vec![1; 4 << 20]);
    verify(&read(&file, 4 * MIB, (len - 4 * MIB) as usize), 1, 4 * MIB).unwrap();
    cache.check().unwrap();
}

#[test]
fn a_smaller_bound_takes_nothing_of_a_memory_file() {
    let cache = cache(64);
    let file = file(&cache);
    let mut right = vec![0; 24 << 20];
    fill_content(&mut right, 1, 0, 0);
    file.write_all_at(&right, 0).unwrap();
    cache.resize(16 * MIB).unwrap();
    assert!(read(&file, 0, right.len()) == right);
    assert!(cache.stats().slack_bytes > 0, "it does not fit, and that is told");
    assert_eq!(file.write_at(&[1; 64 << 10], 100 * MIB).unwrap_err().kind(), ErrorKind::NoMemory);
    assert!(read(&file, 0, right.len()) == right, "what was written before is untouched");
    cache.check().unwrap();
}

fn file_of(cache: &Cache) -> quinion::File {
    let memory = quinion::backend::MemoryFile::new(vec![7; 1 << 20]);
    cache.open_backend(std::sync::Arc::new(memory)).unwrap()
}

#[test]
fn a_pool_is_charged_for_its_memory_files_and_for_no_page_more() {
    let cache = cache(32);
    let pool = cache.add_pool("scratch", PoolOptions::new().limit(64 * PAGE)).unwrap();
    let file = pool.mem_file(MemFileOptions::new()).unwrap();
    assert_eq!((file.pool(), pool.stats().used_pages), ("scratch", 0));
    file.write_all_at(&[1; 40 * PAGE_BYTES], 0).unwrap();
    assert_eq!(pool.stats().used_pages, 40);
    let pinned = file.pin(0, 5).unwrap();
    file.punch_hole(2 * PAGE, 5 * PAGE).unwrap();
    assert_eq!(pool.stats().used_pages, 35);
    let error = file.write_all_at(&[2; 40 * PAGE_BYTES], 40 * PAGE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(error.to_string().contains("scratch"), "{error}");
    assert!(pool.stats().used_pages <= 64, "{:?}", pool.stats());
    assert_eq!(pages(&file).0, pool.stats().used_pages);
    // It goes on where others would be evicted: a file of that pool makes room of its own only.
    file.set_len(10 * PAGE).unwrap();
    assert_eq!(pool.stats().used_pages, 5);
    assert_eq!(read(&file, 0, PAGE_BYTES), [1; PAGE_BYTES]);
    drop(file);
    assert_eq!(pool.stats().used_pages, 0);
    drop(pinned);
    cache.check().unwrap();
}

#[test]
fn files_pages_are_evicted_before_a_memory_file_is_refused_memory_and_not_the_other_way() {
    let cache = cache(16);
    let memory = file(&cache);
    memory.write_all_at(&[3; 2 << 20], 0).unwrap();
    let bytes: Vec<u8> = vec![7; 64 << 20];
    let file = cache.open_backend(std::sync::Arc::new(quinion::backend::MemoryFile::new(bytes))).unwrap();
    let mut buffer = vec![0; 1 << 20];
    for at in 0..64 {
        assert_eq!(file.read_at(&mut buffer, at << 20).unwrap(), 1 << 20);
    }
    assert_eq!(pages(&memory), (512, 0), "a scan takes nothing of a memory file");
    memory.write_all_at(&[4; 4 << 20], 2 * MIB).unwrap();
    assert_eq!(read(&memory, 0, 6 << 20), [vec![3; 2 << 20], vec![4; 4 << 20]].concat());
    cache.check().unwrap();
}

/// Fills that complete when a thread waits for them, of a device that seems to have a leader at the first call.
#[derive(Debug)]
struct Left {
    memory: MemoryFile,
    kept: Mutex<Vec<Fill>>,
    seems_led: AtomicBool,
}

impl Backend for Left {
    fn name(&self) -> &'static str {
        "left"
    }
    fn attributes(&self) -> std::io::Result<Attributes> {
        self.memory.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.kept.lock().unwrap().extend(fills);
    }
    fn reap(&self, how: ReapMode, _done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        let fills = if how.waits() { std::mem::take(&mut *self.kept.lock().unwrap()) } else { Vec::new() };
        match fills.len() {
            0 => ReapOutcome::Elsewhere,
            some => {
                self.memory.submit(fills);
                ReapOutcome::Some(some)
            }
        }
    }
    fn wants_leader(&self) -> bool {
        !self.kept.lock().unwrap().is_empty() && !self.seems_led.swap(false, Ordering::Relaxed)
    }
}

/// No other thread fetches the fills in flight when their leader has left and only this one wants memory.
#[test]
fn a_thread_that_wants_memory_for_a_memory_file_reaps_fills_without_waiters() {
    let piece = vec![3; 1 << 18];
    let fill = |file: &MemFile| (0..).find(|&at| file.write_all_at(&piece, at << 18).is_err()).unwrap();
    let most = fill(&file(&cache(16)));
    let cache = cache(16);
    let memory = file(&cache);
    let left = Left {
        memory: MemoryFile::new(vec![7; 4 << 20]),
        kept: Mutex::default(),
        seems_led: AtomicBool::new(false),
    };
    let left = Arc::new(left);
    let other = cache.open_backend(Arc::clone(&left) as Arc<dyn Backend>).unwrap();
    let ahead = other.will_need(0, 2 << 20).unwrap();
    assert!(!left.kept.lock().unwrap().is_empty(), "it is under way: {ahead:?}");
    left.seems_led.store(true, Ordering::Relaxed);
    let written = fill(&memory);
    assert!(left.kept.lock().unwrap().is_empty(), "its read has ended");
    assert!(written + 4 > most, "and gone: {written} pieces were written, where {most} can be");
    assert_eq!(read(&memory, 0, 1 << 18), piece);
    cache.check().unwrap();
}

#[test]
fn readers_writers_punches_and_appends_at_once_leave_each_page_of_one_piece() {
    const PAGES: u64 = 200;
    let cache = Cache::builder().memory(32 * MIB).folio_order_max(6).build().unwrap();
    let file = sized(&cache, PAGES * PAGE);
    let (is_over, generation) = (AtomicBool::new(false), AtomicU32::new(1));
    thread::scope(|scope| {
        for reader in 0..2 {
            let (file, is_over) = (&file, &is_over);
            scope.spawn(move || {
                let (mut dice, mut reads) = (Dice::new(reader), 0);
                while !is_over.load(Ordering::Relaxed) || reads < 100 {
                    let at = dice.below(PAGES) * PAGE;
                    let bytes = match dice.below(3) {
                        0 => bytes_of(&file.pin(at, 20 * PAGE_BYTES).unwrap()),
                        1 => read(file, at, PAGE_BYTES),
                        _ => read(file, at, 64 * PAGE_BYTES),
                    };
                    for (page, bytes) in bytes.chunks(PAGE_BYTES).enumerate() {
                        if bytes.iter().any(|&byte| byte != 0) {
                            generations(bytes, 1, at + page as u64 * PAGE).unwrap();
                        }
                    }
                    reads += 1;
                }
            });
        }
        let changers: Vec<_> = (0..3)
            .map(|changer| {
                let (file, generation) = (&file, &generation);
                scope.spawn(move || {
                    let mut dice = Dice::new(100 + changer);
                    for _ in 0..400 {
                        let (first, pages) = (dice.below(PAGES), 1 + dice.below(40));
                        let pages = pages.min(PAGES - first);
                        if dice.below(3) == 0 {
                            file.punch_hole(first * PAGE, pages * PAGE).unwrap();
                            continue;
                        }
                        let mut bytes = vec![0; (pages * PAGE) as usize];
                        let generation = generation.fetch_add(1, Ordering::Relaxed);
                        fill_content(&mut bytes, 1, first * PAGE, generation);
                        file.write_all_at(&bytes, first * PAGE).unwrap();
                    }
                })
            })
            .collect();
        for changer in changers {
            changer.join().unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
    cache.check().unwrap();
    assert_eq!(file.len(), PAGES * PAGE);
    let (data, holes) = pages(&file);
    assert_eq!(data + holes, PAGES);
    drop(file);
    assert_eq!(cache.stats().unevictable_pages, 0);
    cache.check().unwrap();
}

#[test]
fn appends_at_once_each_have_their_place() {
    let cache = cache(32);
    let file = file(&cache);
    let places: Vec<(u64, usize, u8)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4u8)
            .map(|number| {
                let file = &file;
                scope.spawn(move || {
                    let mut dice = Dice::new(u64::from(number));
                    let append = |len: usize| (file.append(&vec![number + 1; len]).unwrap(), len, number + 1);
                    (0..100).map(|_| append(1 + dice.below(9000) as usize)).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let all = read(&file, 0, 8 << 20);
    assert_eq!(all.len(), places.iter().map(|(_, len, _)| len).sum::<usize>());
    for (at, len, byte) in places {
        assert!(all[at as usize..][..len].iter().all(|&found| found == byte), "{len} bytes at {at}");
    }
    cache.check().unwrap();
}

#[test]
fn every_call_of_a_forked_child_says_so_and_its_parent_notices_nothing() {
    let cache = cache(16);
    let mut file = file(&cache);
    file.write_all_at(&[4; 9000], 0).unwrap();
    let pinned = file.pin(0, 5000).unwrap();
    // SAFETY: the child calls what a child of a program with threads may not rely on (it allocates); the C libraries
    // of the tests' machines keep their allocators whole across a fork. It ends by `_exit` and does not return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut buffer = [0; 100];
        let forked =
            |result: quinion::error::Result<()>| result.err().map(|e| e.kind()) == Some(ErrorKind::Forked);
        let answers = [
            forked(file.read_at(&mut buffer, 0).map(drop)),
            forked(file.read_at(&mut [], 0).map(drop)),
            forked(file.read_vectored_at(&mut [IoSliceMut::new(&mut buffer)], 0).map(drop)),
            forked(file.read_exact_at(&mut buffer, 0)),
            forked(file.write_at(&buffer, 0).map(drop)),
            forked(file.write_all_at(&buffer, 0)),
            forked(file.write_vectored_at(&[IoSlice::new(&[1])], 0).map(drop)),
            forked(file.append(&buffer).map(drop)),
            forked(file.set_len(0)),
            forked(file.punch_hole(0, 10)),
            forked(file.seek_data(0).map(drop)),
            forked(file.seek_hole(0).map(drop)),
            forked(file.pin(0, 10).map(drop)),
            forked(file.stats().map(drop)),
            forked(cache.mem_file(MemFileOptions::new()).map(drop)),
            file.is_empty() && file.read(&mut buffer).is_err() && file.write(&buffer).is_err(),
            file.seek(SeekFrom::End(0)).is_err(),
        ];
        drop((pinned, file.clone(), file, cache));
        let status = answers.iter().position(|is_right| !is_right).map_or(0, |at| at as i32 + 1);
        // SAFETY: ends the child.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: `status` is written by the call only.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child ended by signal {}", libc::WTERMSIG(status));
    assert_eq!(libc::WEXITSTATUS(status), 0, "which of the child's answers is wrong, from 1 on");
    assert_eq!((bytes_of(&pinned), read(&file, 0, 9001)), (vec![4; 5000], vec![4; 9000]));
    cache.check().unwrap();
}

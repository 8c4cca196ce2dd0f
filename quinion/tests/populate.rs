//! Memory files filled, given memory, and lent, many pages at a time.
//!
//! ```text
//!   source --Slice--> frames that no reader has seen --commit--> readers
//!             |
//!             +-- ends, fails, panics: what came stays, the rest is as it was
//! ```
//!
//! G13, G14 and G15 once more, at the public API, and G17; the other lettered statements are in `grab.rs`.

use std::io::{self, Cursor, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use proptest::prelude::*;
use quinion::backend::{Backend, MemoryFile};
use quinion::internals::hooks;
use quinion::{Cache, ErrorKind, MemFile, MemFileOptions, OnPinned, SpillOptions};
use quinion_testing::ablations::{self, OneByOne};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

fn cache(memory: usize) -> Cache {
    Cache::builder().memory(memory as u64).build().unwrap()
}
fn file(cache: &Cache, size: usize) -> MemFile {
    cache.mem_file(MemFileOptions::new().size(size as u64)).unwrap()
}
/// Bytes that hold their place.
fn content(at: usize) -> u8 {
    (at ^ at >> 8 ^ at >> 17) as u8
}
fn contents(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(content).collect()
}
fn read(file: &MemFile, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    file.read_exact_at(&mut bytes, at as u64).unwrap();
    bytes
}
#[track_caller]
fn assert_same(left: &[u8], right: &[u8]) {
    assert_eq!(left.len(), right.len());
    if let Some(at) = left.iter().zip(right).position(|(a, b)| a != b) {
        panic!("byte {at} of {} is {} and not {}", left.len(), left[at], right[at]);
    }
}

/// A source that fails at a byte, after those before it.
struct Faulty {
    at: usize,
    end: usize,
}
impl Read for Faulty {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let some = to.len().min(self.end - self.at);
        if some == 0 {
            return Err(io::Error::other("a source that faults"));
        }
        to[..some].copy_from_slice(&contents(self.at, some));
        self.at += some;
        Ok(some)
    }
}

#[test]
fn populated_pages_are_read() {
    for hooks in [None, OneByOne::GRABS, OneByOne::GRABS_AND_LOOKUPS] {
        for order in [0, 3, 9] {
            let cache = ablations::builder(hooks).memory(32 << 20).build().unwrap();
            let file = cache
                .mem_file(MemFileOptions::new().size(6 * MIB as u64 + 77).folio_order_max(order))
                .unwrap();
            let len = file.len() as usize;
            let came = file.populate_from_reader(0..len as u64, Cursor::new(contents(0, len))).unwrap();
            assert_eq!(came, len as u64);
            assert_same(&read(&file, 0, len), &contents(0, len));
            assert_eq!(file.stats().unwrap().hole_pages, 0);
            file.set_len(8 * MIB as u64).unwrap();
            assert_same(&read(&file, len, 4000), &[0; 4000]);
            cache.check().unwrap();
        }
    }
}

#[test]
fn a_slice_takes_the_bytes_that_fit_and_says_where_it_is() {
    let cache = cache(32 << 20);
    let file = file(&cache, 5 * MIB);
    let (from, to) = (PAGE + 100, 4 * MIB + 5005);
    let mut slices = Vec::new();
    let came = file.populate_with(from as u64..to as u64, |slice| {
        slices.push((slice.position(), slice.left()));
        let at = slice.position() as usize;
        assert_eq!(slice.put(&contents(at, 1000)), 1000);
        assert_eq!(slice.put_zeros(500), 500);
        let rest = contents(at + 1500, slice.left());
        slice.write_all(&rest)?;
        assert_eq!((slice.put(&[1]), slice.write(&[1])?, slice.left()), (0, 0, 0));
        Ok(())
    });
    assert_eq!(came.unwrap(), (to - from) as u64);
    assert_eq!(slices.len(), 3, "to each multiple of 2 MiB: {slices:?}");
    let mut want = contents(0, 5 * MIB);
    want[..from].fill(0);
    want[to..].fill(0);
    for (at, _) in slices {
        want[at as usize + 1000..at as usize + 1500].fill(0);
    }
    assert_same(&read(&file, 0, 5 * MIB), &want);
}

/// G15: when the source fails after k bytes, the call returns k, those bytes are there, and the rest is as it was.
#[test]
fn g15_a_reader_that_faults_at_page_k_leaves_k_pages_and_holes() {
    for order in [0, 9] {
        let cache = cache(32 << 20);
        let file = cache.mem_file(MemFileOptions::new().size(8 << 20).folio_order_max(order)).unwrap();
        for (start, k) in [(0, 5 * PAGE), (MIB, 3 * MIB / 2), (4 * MIB, 2 * MIB + PAGE + 9), (PAGE, 1)] {
            let before = read(&file, 0, 8 * MIB);
            let holes = file.stats().unwrap().hole_pages;
            let source = Faulty { at: start, end: start + k };
            let came = file.populate_from_reader(start as u64..8 << 20, source).unwrap();
            assert_eq!(came as usize, k);
            let mut want = before;
            want[start..start + k].copy_from_slice(&contents(start, k));
            assert_same(&read(&file, 0, 8 * MIB), &want);
            let filled = (holes - file.stats().unwrap().hole_pages) as usize * PAGE;
            let most = k + if order == 0 { PAGE } else { 2 * MIB };
            assert!(filled <= most, "{filled} bytes were given memory for {k}");
        }
        let before = file.stats().unwrap();
        let error = file.populate_from_reader(7 << 20..8 << 20, Faulty { at: 0, end: 0 }).unwrap_err();
        assert!(error.to_string().contains("a source that faults"), "{error}");
        assert_eq!(file.stats().unwrap(), before, "where nothing came, nothing stays");
        cache.check().unwrap();
    }
}

/// G13: a source that panics leaves no folio locked, and what it has put stays.
#[test]
fn g13_a_source_that_panics_leaves_nothing_locked() {
    let cache = cache(32 << 20);
    let file = file(&cache, 4 * MIB);
    for put in [0, 10, 3 * PAGE, MIB] {
        file.punch_hole(0, 4 << 20).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _ = file.populate_with(PAGE as u64..4 << 20, |slice| {
                slice.put(&vec![7; put]);
                panic!("a source that panics")
            });
        }));
        assert!(outcome.is_err());
        // No call waits: to read, to write, to populate, to cut.
        let mut want = vec![0; 4 * MIB];
        want[PAGE..PAGE + put].fill(7);
        assert_same(&read(&file, 0, 4 * MIB), &want);
        file.write_all_at(&[9; 100], PAGE as u64).unwrap();
        assert_eq!(file.populate_from_reader(0..4 << 20, io::repeat(3)).unwrap(), 4 << 20);
        assert_same(&read(&file, 0, 4 * MIB), &vec![3; 4 * MIB]);
        cache.check().unwrap();
    }
    file.set_len(0).unwrap();
    assert_eq!(file.stats().unwrap().memory_bytes(), 0);
}

/// G14: a reader of a page that is being populated sees none of it before it is filled, and then all of it.
#[test]
fn g14_a_reader_waits_for_the_page_that_is_being_populated_and_gets_it() {
    let cache = cache(32 << 20);
    let file = cache.mem_file(MemFileOptions::new().size(2 << 20).folio_order_max(0)).unwrap();
    let (has_begun, is_read) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            has_begun.wait();
            let bytes = read(&file, 5 * PAGE, PAGE);
            is_read.store(true, Ordering::SeqCst);
            bytes
        });
        let mut is_first = true;
        file.populate_with(0..2 << 20, |slice| {
            if std::mem::take(&mut is_first) {
                has_begun.wait();
            }
            while slice.left() > 0 {
                let at = slice.position() as usize;
                assert!(at > 5 * PAGE || !is_read.load(Ordering::SeqCst), "read before it was there");
                slice.put(&contents(at, PAGE));
            }
            Ok(())
        })
        .unwrap();
        assert_same(&reader.join().unwrap(), &contents(5 * PAGE, PAGE));
    });
}

#[test]
fn threads_populate_ranges_of_one_file_side_by_side_and_over_each_other() {
    let cache = cache(64 << 20);
    for order in [0, 9] {
        let file = cache.mem_file(MemFileOptions::new().size(16 << 20).folio_order_max(order)).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                let file = &file;
                scope.spawn(move || {
                    // Ranges of 4 MiB, of which each shares one MiB with the next.
                    let from = thread * 4 * MIB - thread.min(1) * MIB;
                    let to = (thread + 1) * 4 * MIB;
                    let source = Cursor::new(contents(from, to - from));
                    let came = file.populate_from_reader(from as u64..to as u64, source).unwrap();
                    assert_eq!(came as usize, to - from);
                });
            }
        });
        assert_same(&read(&file, 0, 16 * MIB), &contents(0, 16 * MIB));
        cache.check().unwrap();
    }
}

#[test]
fn a_truncation_waits_for_the_source_of_a_populate_and_removes_the_pages_behind_it() {
    let cache = cache(32 << 20);
    let file = file(&cache, 8 * MIB);
    let has_begun = Barrier::new(2);
    std::thread::scope(|scope| {
        let cutter = scope.spawn(|| {
            has_begun.wait();
            file.set_len((MIB + 5) as u64).unwrap();
        });
        let mut is_first = true;
        let came = file.populate_with(0..8 << 20, |slice| {
            if std::mem::take(&mut is_first) {
                has_begun.wait();
            }
            let bytes = contents(slice.position() as usize, slice.left());
            slice.put(&bytes);
            Ok(())
        });
        assert!(came.unwrap() >= 2 << 20, "the slice that was begun is ended");
        cutter.join().unwrap();
    });
    assert_eq!(file.len() as usize, MIB + 5);
    assert_same(&read(&file, 0, MIB + 5), &contents(0, MIB + 5));
    file.set_len(8 << 20).unwrap();
    assert_same(&read(&file, MIB + 5, 7 * MIB - 5), &vec![0; 7 * MIB - 5]);
    cache.check().unwrap();
}

#[test]
fn pinned_folios_are_replaced_by_a_populate_as_by_a_write() {
    let cache = cache(32 << 20);
    let file = file(&cache, 4 * MIB);
    file.write_all_at(&vec![1; 4 * MIB], 0).unwrap();
    let pinned = file.pin((MIB + 100) as u64, 10_000).unwrap();
    assert_eq!(file.populate_from_reader(0..4 << 20, Cursor::new(contents(0, 4 * MIB))).unwrap(), 4 << 20);
    assert!(pinned.chunks().flatten().all(|&byte| byte == 1), "what is lent does not change");
    assert_same(&read(&file, 0, 4 * MIB), &contents(0, 4 * MIB));
    drop(pinned);
    let patient = MemFileOptions::new().size(1 << 20).on_pinned(OnPinned::Wait(std::time::Duration::ZERO));
    let other = cache.mem_file(patient).unwrap();
    other.write_all_at(&vec![1; MIB], 0).unwrap();
    let pinned = other.pin(0, 1).unwrap();
    let error = other.populate_from_reader(0..1 << 20, io::repeat(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    drop(pinned);
    assert_eq!(other.populate_from_reader(0..1 << 20, io::repeat(2)).unwrap(), 1 << 20);
}

#[test]
fn memory_that_ends_ends_a_populate_and_says_so_when_nothing_came() {
    let cache = cache(16 << 20);
    let file = file(&cache, 64 * MIB);
    let came = file.populate_from_reader(0..64 << 20, io::repeat(5)).unwrap();
    assert!(came > 8 << 20 && came < 16 << 20, "{came} bytes");
    assert_same(&read(&file, 0, came as usize), &vec![5; came as usize]);
    let error = file.populate_from_reader(came..64 << 20, io::repeat(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert!(error.to_string().starts_with("memory file: "), "{error}");
    let error = file.preallocate(0, 64 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    assert_same(&read(&file, 0, came as usize), &vec![5; came as usize]);
    cache.check().unwrap();
    file.punch_hole(0, 64 << 20).unwrap();
    assert_eq!(file.populate_from_reader(0..1 << 20, io::repeat(6)).unwrap(), 1 << 20);
}

/// G17: pinning, populating and preallocating bring spilled folios back with their bytes. A memory file of 40 MiB in a
/// cache of 16: most of it is spilled.
#[test]
fn g17_a_spilled_folio_is_brought_back_by_its_grab() {
    let disk = Arc::new(MemoryFile::new(Vec::new()));
    let backend = Arc::clone(&disk) as Arc<dyn Backend>;
    let options = SpillOptions::new("nowhere", 64 << 20);
    let cache = Cache::builder().memory(16 << 20).spill_to(backend, options).build().unwrap();
    let file = file(&cache, 40 * MIB);
    assert_eq!(file.populate_from_reader(0..40 << 20, Cursor::new(contents(0, 40 * MIB))).unwrap(), 40 << 20);
    let spilled = |file: &MemFile| file.stats().unwrap().spilled_pages;
    assert!(spilled(&file) > 5000, "{} pages", spilled(&file));
    let mut want = contents(0, 40 * MIB);
    // What was spilled there came back, in the first half at least: what was written last may be there.
    let brought_back = |at: usize, act: &mut dyn FnMut()| {
        let before = cache.stats().spilled_in_pages;
        act();
        assert!(at > 20 * MIB || cache.stats().spilled_in_pages > before, "{at} was not spilled");
    };
    for at in (0..39 * MIB).step_by(3 * MIB) {
        // Pinned: whole, and with its bytes.
        brought_back(at, &mut || {
            let pinned = file.pin_folios(at as u64..(at + 5000) as u64, 9).unwrap();
            assert!(!pinned.is_empty() && pinned.folios().all(|folio| folio.len() >= PAGE));
        });
        assert_same(&read(&file, at, 5000), &want[at..at + 5000]);
        // Populated in part: the rest of the page, and of the folio, is what it was.
        let (from, len) = (at + MIB + 100, 9000);
        brought_back(from, &mut || {
            let came = file.populate_from_reader(from as u64..(from + len) as u64, io::repeat(7)).unwrap();
            assert_eq!(came as usize, len);
        });
        want[from..from + len].fill(7);
        assert_same(&read(&file, from - 100, len + 200), &want[from - 100..from + len + 100]);
        // Given memory: it has its bytes.
        let at = at + 2 * MIB;
        brought_back(at, &mut || file.preallocate(at as u64, 20_000).unwrap());
        assert_same(&read(&file, at, 20_000), &want[at..at + 20_000]);
    }
    assert_same(&read(&file, 0, 40 * MIB), &want);
    assert!(spilled(&file) > 5000, "and others went");
    cache.check().unwrap();
}

#[test]
fn a_large_write_into_a_hole_is_one_grab() {
    let cache = cache(32 << 20);
    let file = cache.mem_file(MemFileOptions::new().size(16 << 20).folio_order_max(0)).unwrap();
    let locks = || hooks::mem_tree_counts(&file).locks;
    let before = locks();
    file.write_all_at(&contents(0, 2 * MIB), 0).unwrap();
    assert_eq!(locks() - before, 1, "512 folios");
    let ended = 4 * MIB + 77;
    file.write_all_at(&contents(2 * MIB + 5, ended), (2 * MIB + 5) as u64).unwrap();
    let pinned = file.pin(MIB as u64, 3 * PAGE).unwrap();
    file.punch_hole(0, MIB as u64 / 2).unwrap();
    file.write_all_at(&vec![3; 2 * MIB], 0).unwrap();
    assert_same(&read(&file, 0, 2 * MIB), &vec![3; 2 * MIB]);
    assert_same(&read(&file, 2 * MIB, 5), &[0; 5]);
    assert_same(&read(&file, 2 * MIB + 5, ended), &contents(2 * MIB + 5, ended));
    assert_same(&pinned.chunks().flatten().copied().collect::<Vec<_>>(), &contents(MIB, 3 * PAGE));
    cache.check().unwrap();
}

#[test]
fn a_range_that_is_not_the_files_is_refused() {
    let cache = cache(16 << 20);
    let file = file(&cache, MIB);
    let end = MIB as u64;
    let errors = [
        file.populate_with(0..end + 1, |_| Ok(())).unwrap_err(),
        file.preallocate(end, 1).unwrap_err(),
        file.preallocate(1, u64::MAX).unwrap_err(),
        file.pin_folios(0..2 * end, 9).unwrap_err(),
    ];
    assert!(errors.iter().all(|error| error.kind() == ErrorKind::InvalidInput), "{errors:?}");
    assert!(errors[0].to_string().contains("make it longer first"), "{}", errors[0]);
    file.preallocate(end, 0).unwrap();
    assert_eq!(file.populate_with(end..end, |_| panic!("nothing is asked for")).unwrap(), 0);
}

#[test]
fn preallocated_pages_take_memory_and_read_as_zeros_until_they_are_written() {
    let cache = cache(32 << 20);
    let file = file(&cache, 8 * MIB);
    file.write_all_at(&[1; 10], 3 << 20).unwrap();
    file.preallocate(PAGE as u64, 6 << 20).unwrap();
    let stats = file.stats().unwrap();
    assert_eq!(stats.allocated_pages + stats.data_pages, 1536);
    assert_same(&read(&file, 0, 3 * MIB), &vec![0; 3 * MIB]);
    assert_eq!(file.seek_data(0).unwrap(), Some(3 << 20), "what has no bytes is no data");
    file.write_all_at(&contents(0, 100), 5 << 20).unwrap();
    assert_same(&read(&file, 5 * MIB - 50, 50), &[0; 50]);
    assert_same(&read(&file, 5 * MIB, 100), &contents(0, 100));
    assert_eq!(file.populate_from_reader(0..8 << 20, Cursor::new(contents(0, 8 * MIB))).unwrap(), 8 << 20);
    assert_same(&read(&file, 0, 8 * MIB), &contents(0, 8 * MIB));
    cache.check().unwrap();
}

#[test]
fn a_file_of_the_cache_is_copied_into_a_memory_file() {
    let cache = cache(32 << 20);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("source");
    std::fs::write(&path, contents(0, 5 * MIB + 123)).unwrap();
    let source = cache.open(&path).unwrap();
    let file = file(&cache, 8 * MIB);
    let came = file.populate_from_file(100..8 << 20, &source, 1000).unwrap();
    assert_eq!(came as usize, 5 * MIB + 123 - 1000, "to the end of the source");
    assert_same(&read(&file, 100, came as usize), &contents(1000, came as usize));
    assert_same(&read(&file, 0, 100), &[0; 100]);
    assert_eq!(file.populate_from_file(0..4096, &source, 6 << 20).unwrap(), 0);
    cache.check().unwrap();
}

#[test]
fn pinned_folios_are_whole_and_stay_where_they_are() {
    let cache = cache(32 << 20);
    let file = cache.mem_file(MemFileOptions::new().size(6 << 20).folio_order_max(4)).unwrap();
    file.write_all_at(&contents(0, 300_000), 0).unwrap();
    file.preallocate(400_000, 100_000).unwrap();
    let pinned = file.pin_folios(70_000..600_000, 1000).unwrap();
    let folios: Vec<_> = pinned.folios().collect();
    assert_eq!(folios[0].position() as usize + pinned.offset(), 70_000);
    let mut at = folios[0].position();
    for folio in &folios {
        assert_eq!((folio.position(), folio.address() as usize % folio.len()), (at, 0));
        at += folio.len() as u64;
    }
    assert!(at >= 600_000);
    let want = read(&file, 65_536, 600_000 - 65_536);
    let mut seen = Vec::new();
    for folio in &folios {
        // No thread writes meanwhile.
        let bytes = (0..folio.len()).map(|at| {
            #[allow(unsafe_code, reason = "pinned folios are lent by address")]
            // SAFETY: the folio is pinned, as long as it says, and not written.
            unsafe {
                folio.address().add(at).read()
            }
        });
        seen.extend(bytes);
    }
    assert_same(&seen[..want.len()], &want);
    assert_eq!(file.pin_folios(0..6 << 20, 3).unwrap().len(), 3, "as many as were wanted");
    assert!(file.pin_folios(5..5, 3).unwrap().is_empty());
    assert!(cache.stats().pinned_bytes > 0);
    drop(pinned);
    assert_eq!(cache.stats().pinned_bytes, 0);
    cache.check().unwrap();
    let error = file.pin_folios(0..6 << 20, usize::MAX);
    assert!(error.is_ok(), "6 MiB of 32 may be pinned");
    let small = self::cache(16 << 20);
    let large = self::file(&small, 16 << 20);
    assert_eq!(large.pin_folios(0..16 << 20, usize::MAX).unwrap_err().kind(), ErrorKind::NoMemory);
    assert_eq!(small.stats().pinned_bytes, 0);
    small.check().unwrap();
}

#[test]
fn a_forked_child_or_an_empty_source_get_nothing() {
    let cache = cache(16 << 20);
    let file = file(&cache, MIB);
    assert_eq!(file.populate_from_reader(0..1 << 20, io::empty()).unwrap(), 0);
    assert_eq!(file.populate_with(0..1 << 20, |_| Ok(())).unwrap(), 0);
    assert_eq!(file.stats().unwrap().hole_pages, 256);
    assert_eq!(file.stats().unwrap().memory_bytes(), 0);
}

// ---- the twin -----------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Op {
    Populate { from: usize, len: usize, source: usize, chunk: usize },
    Write { from: usize, len: usize },
    Preallocate { from: usize, len: usize },
    Punch { from: usize, len: usize },
    Resize { len: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let range = || (0..400_000usize, 0..300_000usize);
    prop_oneof![
        (range(), 0..300_000usize, 1..70_000usize).prop_map(|((from, len), source, chunk)| Op::Populate {
            from,
            len,
            source,
            chunk
        }),
        range().prop_map(|(from, len)| Op::Write { from, len }),
        range().prop_map(|(from, len)| Op::Preallocate { from, len }),
        range().prop_map(|(from, len)| Op::Punch { from, len }),
        (0..500_000usize).prop_map(|len| Op::Resize { len }),
    ]
}

struct Slow<'b>(&'b [u8], usize);
impl Read for Slow<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let some = to.len().min(self.1).min(self.0.len());
        let (now, rest) = self.0.split_at(some);
        to[..some].copy_from_slice(now);
        self.0 = rest;
        Ok(some)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn a_memory_file_behaves_as_a_vector(
        order in 0..6u8, ops in prop::collection::vec(op(), 1..20),
    ) {
        let cache = cache(16 << 20);
        let file = cache.mem_file(MemFileOptions::new().size(400_000).folio_order_max(order)).unwrap();
        let mut twin = vec![0u8; 400_000];
        for (nth, op) in ops.into_iter().enumerate() {
            let bytes = |from: usize, len: usize| -> Vec<u8> {
                (from..from + len).map(|at| content(at) ^ nth as u8).collect()
            };
            match op {
                Op::Populate { from, len, source, chunk } => {
                    let from = from.min(twin.len());
                    let to = (from + len).min(twin.len());
                    let bytes = bytes(from, source);
                    let came = file.populate_from_reader(from as u64..to as u64, Slow(&bytes, chunk)).unwrap();
                    let want = source.min(to - from);
                    prop_assert_eq!(came as usize, want);
                    twin[from..from + want].copy_from_slice(&bytes[..want]);
                }
                Op::Write { from, len } => {
                    let bytes = bytes(from, len);
                    file.write_all_at(&bytes, from as u64).unwrap();
                    if len > 0 {
                        twin.resize(twin.len().max(from + len), 0);
                        twin[from..from + len].copy_from_slice(&bytes);
                    }
                }
                Op::Preallocate { from, len } => {
                    let from = from.min(twin.len());
                    file.preallocate(from as u64, len.min(twin.len() - from) as u64).unwrap();
                }
                Op::Punch { from, len } => {
                    file.punch_hole(from as u64, len as u64).unwrap();
                    let (from, to) = (from.min(twin.len()), (from + len).min(twin.len()));
                    twin[from..to].fill(0);
                }
                Op::Resize { len } => {
                    file.set_len(len as u64).unwrap();
                    twin.resize(len, 0);
                }
            }
            prop_assert_eq!(file.len() as usize, twin.len());
            let mut now = vec![1; twin.len()];
            file.read_exact_at(&mut now, 0).unwrap();
            prop_assert!(now == twin, "byte {:?} differs", now.iter().zip(&twin).position(|(a, b)| a != b));
            cache.check().unwrap();
        }
    }
}

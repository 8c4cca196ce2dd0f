//! Files are cut, extended and punched while others read them: what is cut is cut for all readers, what stays stays.
//!
//! ```text
//!   writers   cut, extend, punch, write                     a twin, a vector, is changed in the same way
//!   readers   see each byte as it was before or after, and none behind the end
//!   device    loses what the file loses, and only that; nothing that comes late brings it back
//! ```

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use quinion::backend::{
    Attributes, Backend, Fill, Flush, MemoryFile, ReapMode, ReapOutcome, SyncKind, WaitQueue,
};
use quinion::internals::hooks;
use quinion::{Cache, Coherence, ErrorKind, File, OnPinned, OpenOptions, ReadOptions, WritebackOptions};
use quinion_testing::content::Dice;
use quinion_testing::doubles::{Faults, SimulatedBackend};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// The byte at each place of an unchanged file; never zero.
fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / PAGE * 7 + at % 251) as u8 | 1).collect()
}

// ---- a device that can refuse ---------------------------------------------------------------------------------

/// A file in memory whose cuts and holes fail while it says so.
#[derive(Debug)]
struct Refusing {
    file: Arc<MemoryFile>,
    refuses: AtomicBool,
}

impl Refusing {
    fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { file: Arc::new(MemoryFile::new(bytes)), refuses: AtomicBool::new(false) })
    }
    /// Another backend of the same file.
    fn beside(&self, refuses: bool) -> Arc<Self> {
        Arc::new(Self { file: Arc::clone(&self.file), refuses: AtomicBool::new(refuses) })
    }
    fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::Relaxed);
    }
    fn refusal(&self) -> io::Result<()> {
        if self.refuses.load(Ordering::Relaxed) { Err(io::Error::from_raw_os_error(28)) } else { Ok(()) }
    }
    fn now(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.file.change(|content| bytes.clone_from(content));
        bytes
    }
}

impl Backend for Refusing {
    fn name(&self) -> &'static str {
        "refusing"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.file.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.file.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.file.reap(how, done)
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.file.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.file.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.refusal()?;
        Backend::set_size(&*self.file, bytes)
    }
    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        self.refusal()?;
        self.file.punch(range)
    }
}

// ---- a file and its twin --------------------------------------------------------------------------------------

struct Pair {
    cache: Cache,
    device: Arc<Refusing>,
    file: File,
    twin: Vec<u8>,
}

impl Pair {
    /// A file of `len` bytes in a cache that makes large folios of long reads.
    fn new(len: usize) -> Self {
        Self::with(
            Cache::builder().memory(64 << 20).folio_order_max(9).build().unwrap(),
            len,
            OnPinned::Detach,
        )
    }
    fn with(cache: Cache, len: usize, on_pinned: OnPinned) -> Self {
        let device = Refusing::new(content(len));
        let options = *OpenOptions::new().write(true).on_pinned(on_pinned);
        let file = cache.open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, &options).unwrap();
        Self { cache, device, file, twin: content(len) }
    }
    fn warm(&self) {
        let mut all = vec![0; self.twin.len()];
        self.file.read_exact_at(&mut all, 0).unwrap();
    }
    fn cut(&mut self, len: usize) {
        self.file.set_len(len as u64).unwrap();
        self.twin.resize(len, 0);
    }
    fn punch(&mut self, range: Range<usize>) {
        self.file.punch_hole(range.start as u64, range.len() as u64).unwrap();
        let end = range.end.min(self.twin.len());
        if range.start < end {
            self.twin[range.start..end].fill(0);
        }
    }
    fn write(&mut self, position: usize, bytes: &[u8]) {
        self.file.write_all_at(bytes, position as u64).unwrap();
        self.twin.resize(self.twin.len().max(position + bytes.len()), 0);
        self.twin[position..position + bytes.len()].copy_from_slice(bytes);
    }
    #[track_caller]
    fn reads_as_twin(&self) {
        assert_eq!(self.file.len(), self.twin.len() as u64);
        let mut all = vec![1; self.twin.len() + 100];
        let mut done = 0;
        while done < all.len() {
            match self.file.read_at(&mut all[done..], done as u64).unwrap() {
                0 => break,
                bytes => done += bytes,
            }
        }
        assert_eq!(done, self.twin.len());
        let wrong = (0..done).find(|&at| all[at] != self.twin[at]);
        assert_eq!(wrong.map(|at| (at, all[at], self.twin[at])), None);
    }
    /// Compares the cache, then the device, then an empty cache with the twin.
    #[track_caller]
    fn check(&self) {
        self.reads_as_twin();
        self.cache.check().unwrap();
        self.file.sync_all().unwrap();
        assert_eq!(self.file.dirty_bytes().unwrap(), 0);
        let now = self.device.now();
        assert_eq!(now.len(), self.twin.len());
        let wrong = (0..now.len()).find(|&at| now[at] != self.twin[at]);
        assert_eq!(wrong.map(|at| (at, now[at], self.twin[at])), None, "on the device");
        self.file.dont_need(0, u64::MAX >> 12).unwrap();
        self.reads_as_twin();
        self.cache.check().unwrap();
    }
}

// ---- one after the other ----------------------------------------------------------------------------------------

/// T02: when a truncation returns, no page past the new end is cached, and each one before it still is.
#[test]
fn t02_nothing_behind_a_new_end_is_cached() {
    for len in [0, 1, PAGE, 5 * PAGE + 17, 2 * MIB, 2 * MIB + PAGE - 1, 3 * MIB + 300 * PAGE + 5] {
        let mut pair = Pair::new(5 * MIB);
        pair.warm();
        pair.write(4 * MIB + 100, &[9; 3 * PAGE]);
        let before = pair.file.cached_pages();
        assert!(before >= (5 * MIB / PAGE) as u64);
        pair.cut(len);
        // All before the edge stays, as it was.
        assert_eq!(pair.file.cached_pages(), len.div_ceil(PAGE) as u64, "cut at {len}");
        pair.check();
    }
}

/// T04: the parts of pages at the edges of a punched hole read as zeros, whether they were cached, dirty or neither.
#[test]
fn t04_the_edges_of_a_hole_read_as_zeros() {
    for (start, end) in
        [(100, 200), (4000, 4200), (PAGE, 3 * PAGE), (PAGE - 1, 3 * PAGE + 1), (0, 2 * MIB + 5)]
    {
        for warm in [false, true] {
            for write in [None, Some(start.saturating_sub(50)), Some(end)] {
                let mut pair = Pair::new(4 * MIB);
                if warm {
                    pair.warm();
                }
                if let Some(at) = write {
                    pair.write(at, &[7; 100]);
                }
                pair.punch(start..end);
                pair.check();
            }
        }
    }
}

/// T06: a hole within a folio of order 9 leaves the bytes outside as they were: cached, and dirty if they were.
#[test]
fn t06_a_hole_in_a_folio_of_2_mib_leaves_the_pages_around_it() {
    let mut pair = Pair::new(2 * MIB);
    pair.warm();
    pair.write(77 * PAGE + 5, &[3; 40]);
    let dirty = pair.file.dirty_bytes().unwrap();
    let reads = pair.device.file.reads();
    pair.punch(80 * PAGE..93 * PAGE);
    pair.reads_as_twin();
    assert_eq!(pair.file.dirty_bytes().unwrap(), dirty, "what was dirty outside is dirty");
    assert_eq!(pair.device.file.reads(), reads + 1, "the hole was read anew, and nothing else");
    pair.check();
}

/// T07: when a file is shortened and then lengthened, by a cut or by a write, the bytes between read as zeros.
#[test]
fn t07_bytes_between_a_shorter_and_a_longer_end_are_zero() {
    for (shorter, longer) in
        [(5000, 9000), (PAGE, 3 * PAGE), (PAGE + 1, PAGE + 2), (0, 10), (MIB + 5, 4 * MIB)]
    {
        for dirty in [false, true] {
            let mut pair = Pair::new(3 * MIB);
            pair.warm();
            if dirty {
                pair.write(shorter.saturating_sub(10), &[5; 3 * PAGE]);
            }
            pair.cut(shorter);
            pair.cut(longer);
            pair.reads_as_twin();
            pair.cut(shorter);
            pair.write(longer, b"behind a gap");
            pair.check();
        }
    }
}

#[test]
fn a_hole_behind_the_end_of_a_file_is_nothing() {
    let mut pair = Pair::new(3 * PAGE + 100);
    pair.warm();
    pair.punch(3 * PAGE + 100..10 * PAGE);
    pair.punch(2 * PAGE + 10..10 * PAGE);
    pair.check();
}

#[test]
fn folios_that_must_not_be_smaller_are_cut_where_they_end() {
    let cache = || Cache::builder().memory(64 << 20).folio_order_min(3).folio_order_max(9).build().unwrap();
    for len in [0, 5, 3 * PAGE + 7, 8 * PAGE, MIB + 9 * PAGE] {
        let mut pair = Pair::with(cache(), 2 * MIB, OnPinned::Detach);
        pair.warm();
        pair.write(3 * PAGE, &[8; 6 * PAGE]);
        pair.cut(len);
        assert_eq!(pair.file.cached_pages(), len.div_ceil(8 * PAGE) as u64 * 8);
        pair.reads_as_twin();
        pair.cut(len + 3 * PAGE);
        pair.punch(len / 2..len / 2 + 9 * PAGE);
        pair.check();
    }
}

// ---- the device refuses -------------------------------------------------------------------------------------------

#[test]
fn a_cut_that_fails_changes_nothing() {
    let mut pair = Pair::new(2 * MIB);
    pair.warm();
    pair.write(MIB, &[4; 2 * PAGE]);
    let dirty = pair.file.dirty_bytes().unwrap();
    pair.device.refuse(true);
    for len in [10, MIB + PAGE, 3 * MIB] {
        let error = pair.file.set_len(len as u64).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert_eq!(pair.file.dirty_bytes().unwrap(), dirty);
        pair.reads_as_twin();
    }
    pair.device.refuse(false);
    pair.check();
}

/// The edge lies in a folio that is pinned, and so is replaced by copies before the device is asked.
#[test]
fn a_cut_that_fails_loses_no_dirty_page_of_a_pinned_folio() {
    for cuts in [true, false] {
        let mut pair = Pair::new(2 * MIB);
        pair.warm();
        pair.write(MIB + 8 * PAGE, &[4; 8 * PAGE]);
        let dirty = pair.file.dirty_bytes().unwrap();
        let _pin = pair.file.pin((MIB + 8 * PAGE) as u64, 8 * PAGE).unwrap();
        pair.device.refuse(true);
        let edge = (MIB + 12 * PAGE) as u64;
        if cuts {
            assert_eq!(pair.file.set_len(edge).unwrap_err().kind(), ErrorKind::NoSpace);
            assert_eq!(pair.file.dirty_bytes().unwrap(), dirty);
            pair.reads_as_twin();
        } else {
            // Of a hole, what was written around it.
            assert_eq!(pair.file.punch_hole(edge, 64 * PAGE as u64).unwrap_err().kind(), ErrorKind::NoSpace);
        }
        pair.device.refuse(false);
        let mut found = vec![0; edge as usize];
        pair.file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, pair.twin[..edge as usize]);
    }
}

#[test]
fn a_hole_that_fails_leaves_the_bytes_written_around_it() {
    let mut pair = Pair::new(2 * MIB);
    pair.warm();
    pair.write(MIB - 3 * PAGE, &[4; 8 * PAGE]);
    pair.device.refuse(true);
    assert_eq!(
        pair.file.punch_hole((MIB - PAGE + 5) as u64, 3 * PAGE as u64).unwrap_err().kind(),
        ErrorKind::NoSpace
    );
    pair.device.refuse(false);
    let hole = MIB - PAGE + 5..MIB + 2 * PAGE + 5;
    let mut found = vec![0; 2 * MIB];
    pair.file.read_exact_at(&mut found, 0).unwrap();
    for (at, (&is, &was)) in found.iter().zip(&pair.twin).enumerate() {
        assert!(is == was || is == 0 && hole.contains(&at), "byte {at} is {is} and was {was}");
    }
    pair.twin = found;
    pair.check();
}

/// 1. A clean page of a file has as many pins as a page may have.
/// 2. A thread punches a hole from inside the page before it to inside that page.
/// 3. The thread zeroes the end of the first page, is refused at the second, and does not ask the device.
/// 4. The first page reads as zeros as long as it is cached, and later as the device has it.
#[test]
fn a_hole_that_finds_a_page_with_all_its_pins_leaves_no_zeros_in_clean_pages() {
    for hole in [PAGE + 100..2 * PAGE + 100, 100..2 * PAGE + 100] {
        let cache = Cache::builder().memory(1 << 30).folio_order_max(0).build().unwrap();
        let pair = Pair::with(cache, 4 * PAGE, OnPinned::Detach);
        pair.warm();
        let pins: Vec<_> = std::iter::from_fn(|| pair.file.pin(2 * PAGE as u64, 1).ok()).collect();
        assert!(pins.len() > 1 << 15);
        let error = pair.file.punch_hole(hole.start as u64, hole.len() as u64).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoMemory, "{error}");
        pair.reads_as_twin();
        drop(pins);
        pair.check();
    }
}

/// 1. A folio that must not be smaller is dirty in part.
/// 2. A thread punches a part of another page of it. The thread zeroes that; the device refuses.
/// 3. The page is clean and zero, and cannot leave without the dirty one: no later look finds that it differs.
#[test]
fn a_hole_that_fails_in_a_smallest_folio_is_forgotten_by_the_next_open() {
    let cache = Cache::builder().memory(64 << 20).folio_order_min(3).build().unwrap();
    let mut pair = Pair::with(cache, 16 * PAGE, OnPinned::Detach);
    pair.warm();
    pair.write(5 * PAGE + 100, &[3; 9]);
    pair.device.refuse(true);
    assert_eq!(pair.file.punch_hole(PAGE as u64 + 50, 100).unwrap_err().kind(), ErrorKind::NoSpace);
    pair.device.refuse(false);
    let again = pair.cache.open_backend(Arc::clone(&pair.device) as Arc<dyn Backend>).unwrap();
    pair.reads_as_twin();
    drop(again);
    pair.check();
}

// ---- pins ---------------------------------------------------------------------------------------------------------

#[test]
fn pinned_bytes_live_on_when_the_file_is_cut_and_punched() {
    let mut pair = Pair::new(2 * MIB);
    pair.warm();
    pair.write(10 * PAGE + 100, &[6; 2 * PAGE]);
    let was = pair.twin.clone();
    let pinned = pair.file.pin(0, 2 * MIB).unwrap();
    pair.punch(11 * PAGE + 7..300 * PAGE + 9);
    pair.reads_as_twin();
    pair.cut(10 * PAGE + 50);
    pair.reads_as_twin();
    pair.cut(MIB);
    pair.write(20 * PAGE, &[2; PAGE]);
    pair.reads_as_twin();
    assert_eq!(pinned.chunks().flatten().copied().collect::<Vec<_>>(), was);
    drop(pinned);
    pair.check();
}

#[test]
fn a_page_with_an_edge_that_is_pinned_gives_way_to_a_copy() {
    for dirty in [false, true] {
        let mut pair = Pair::new(4 * PAGE);
        pair.file.read_exact_at(&mut [0; 1], PAGE as u64).unwrap();
        if dirty {
            pair.write(PAGE + 5, &[3; 9]);
        }
        let pinned = pair.file.pin(PAGE as u64, PAGE).unwrap();
        let was = pinned.chunks().flatten().copied().collect::<Vec<_>>();
        pair.punch(PAGE + 100..PAGE + 200);
        pair.reads_as_twin();
        pair.cut(PAGE + 50);
        pair.cut(3 * PAGE);
        assert_eq!(pinned.chunks().flatten().copied().collect::<Vec<_>>(), was);
        pair.check();
    }
}

#[test]
fn a_truncation_reports_pins_that_stay_and_goes_on_when_they_end() {
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let mut pair = Pair::with(cache, MIB, OnPinned::Wait(Duration::from_millis(20)));
    pair.warm();
    let pinned = pair.file.pin(100 * PAGE as u64, PAGE).unwrap();
    let error = pair.file.set_len(PAGE as u64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    let error = pair.file.punch_hole(99 * PAGE as u64, 2 * PAGE as u64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    pair.reads_as_twin();
    pair.punch(0..PAGE); // that is not pinned
    drop(pinned);
    pair.cut(PAGE + 1);
    pair.check();
}

// ---- what is in flight ----------------------------------------------------------------------------------------------

/// A file of 64 pages whose device completes when it is told to, 10 pages of it dirty.
fn slow() -> (Cache, Arc<MemoryFile>, Arc<SimulatedBackend>, File) {
    slow_of(64)
}

fn slow_of(pages: usize) -> (Cache, Arc<MemoryFile>, Arc<SimulatedBackend>, File) {
    let cache = Cache::builder().memory(16 << 20).readahead(0).build().unwrap();
    let memory = Arc::new(MemoryFile::new(content(pages * PAGE)));
    let device = Arc::new(SimulatedBackend::of_memory(Arc::clone(&memory), Faults::default()));
    let options = *OpenOptions::new().write(true);
    let file = cache.open_backend_with(Arc::clone(&device) as Arc<dyn Backend>, &options).unwrap();
    file.write_all_at(&[9; 10 * PAGE], 20 * PAGE as u64).unwrap();
    (cache, memory, device, file)
}

fn size(file: &MemoryFile) -> u64 {
    file.attributes().unwrap().size
}

fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        thread::yield_now();
    }
}

/// T03: while a cut waits, no page is added: a call that does not wait is refused and has started nothing, and one that
/// waits reaches the device when the cut is over, or not at all.
#[test]
fn t03_no_page_is_added_while_a_file_is_being_truncated() {
    const PAGES: usize = 3000;
    let (cache, _memory, device, file) = slow_of(PAGES);
    let read = |page: usize| {
        let mut byte = [0];
        file.read_at(&mut byte, (page * PAGE) as u64).map(|read| (read, byte[0])).unwrap()
    };
    // Reads a page that is not cached, without waiting; says whether that has started a read of the device.
    let starts = |page: usize| {
        let before = device.held();
        let nowait = ReadOptions::new().nowait(true);
        let error = file.read_at_with(&mut [0], (page * PAGE) as u64, nowait).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        device.held() > before
    };
    device.pause();
    thread::scope(|scope| {
        scope.spawn(|| file.sync_data().unwrap());
        wait_until(|| device.held() > 0);
        let cutter = scope.spawn(|| file.set_len(25 * PAGE as u64).unwrap());
        // A single refusal may come from another lock that was taken for a moment.
        let kept_off = (100..PAGES - 3).step_by(3).find(|&page| {
            thread::sleep(Duration::from_millis(1));
            (page..page + 3).all(|page| !starts(page))
        });
        let held = device.held();
        let readers = [1, 24, 2000].map(|page| scope.spawn(move || read(page)));
        (0..1000).for_each(|_| thread::yield_now()); // time enough, if they did not wait
        let (now, is_cut) = (device.held(), cutter.is_finished());
        device.resume(); // before anything is asserted: others wait for it
        cutter.join().unwrap();
        assert!(kept_off.is_some(), "pages are added as ever");
        assert_eq!((now, is_cut), (held, false), "pages were added under a cut");
        let found = readers.map(|reader| reader.join().unwrap());
        assert_eq!(found, [(1, content(2 * PAGE)[PAGE]), (1, 9), (0, 0)]);
    });
    cache.check().unwrap();
}

/// T05: a cut waits for pages under write-back. Readers of cached pages go on meanwhile, and no late write makes the
/// file longer.
#[test]
fn t05_a_cut_waits_for_flushes_under_way() {
    let (cache, memory, device, file) = slow();
    file.read_exact_at(&mut [0; 8], 3 * PAGE as u64).unwrap();
    let reads = device.reads();
    device.pause();
    let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| file.sync_data().unwrap());
        wait_until(|| device.held() > 0);
        let cutter = scope.spawn({
            let (begun, ended, file) = (&begun, &ended, &file);
            move || {
                begun.store(true, Ordering::Relaxed);
                file.set_len(5 * PAGE as u64 + 7).unwrap();
                ended.store(true, Ordering::Relaxed);
            }
        });
        wait_until(|| begun.load(Ordering::Relaxed));
        let reader = scope.spawn(|| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, PAGE as u64).unwrap();
            byte[0]
        });
        let (mut byte, mut waits) = ([0], true);
        for _ in 0..2000 {
            thread::yield_now();
            let read = file.read_at(&mut byte, 3 * PAGE as u64);
            waits &= read.is_ok() && size(&memory) == 64 * PAGE as u64 && !ended.load(Ordering::Relaxed);
        }
        device.resume(); // before anything is asserted: others wait for it
        assert!(waits, "the file was cut under a flush");
        cutter.join().unwrap();
        assert_eq!(reader.join().unwrap(), content(2 * PAGE)[PAGE]);
    });
    assert_eq!(device.reads(), reads + 1);
    assert_eq!(size(&memory), 5 * PAGE as u64 + 7, "no late write made it longer");
    file.sync_all().unwrap();
    assert_eq!(size(&memory), 5 * PAGE as u64 + 7);
    cache.check().unwrap();
}

/// 1 S, a sync, flushes the last page of a file, which is of 512 bytes, past the kernel's page cache.
/// 2 E extends the file: Linux reads the block of its end into the page cache, and zeroes the rest there.
/// 3 The flush of S arrives. The kernel cannot drop its page, which is dirty: the sync fails with `EIO`, and the bytes
///   of before the flush are written over those of S.
fn extends_under_a_flush_of_the_end(longer_in_the_cache: bool) {
    let (cache, memory, device, file) = slow();
    let end = 40 * PAGE as u64 + 512;
    file.set_len(end).unwrap();
    file.sync_data().unwrap();
    file.write_all_at(&[8; 512], 40 * PAGE as u64).unwrap();
    device.pause();
    let begun = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| file.sync_data().unwrap());
        wait_until(|| device.held() > 0);
        if longer_in_the_cache {
            file.write_all_at(&[6; PAGE], 60 * PAGE as u64).unwrap();
        }
        let extender = scope.spawn(|| {
            begun.store(true, Ordering::Relaxed);
            file.set_len(50 * PAGE as u64).unwrap();
        });
        wait_until(|| begun.load(Ordering::Relaxed));
        let waits = (0..2000).all(|_| {
            thread::yield_now();
            size(&memory) == end
        });
        device.resume(); // before anything is asserted: others wait for it
        assert!(waits, "the file was extended under a flush of its end");
        extender.join().unwrap();
    });
    assert_eq!((size(&memory), file.len()), (50 * PAGE as u64, 50 * PAGE as u64));
    let mut bytes = [7; PAGE];
    file.read_exact_at(&mut bytes, 40 * PAGE as u64).unwrap();
    assert!(bytes[..512] == [8; 512] && bytes[512..] == [0; PAGE - 512]);
    cache.check().unwrap();
}

#[test]
fn an_extension_waits_for_the_flush_of_the_page_with_the_end() {
    extends_under_a_flush_of_the_end(false);
}

/// As before, but the file is longer in the cache than it is to be: a cut here, and an extension on the device.
#[test]
fn a_cut_to_more_than_the_device_has_waits_for_the_flush_of_the_page_with_the_end() {
    extends_under_a_flush_of_the_end(true);
}

/// T08: a reader that waits for a page which is cut off or punched meanwhile returns its bytes of before, or finds the
/// end or the hole.
#[test]
fn t08_a_waiter_for_a_truncated_page_finds_the_end() {
    for cut in [true, false] {
        let (cache, _memory, device, file) = slow();
        device.pause();
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut bytes = [0; PAGE];
                let read = file.read_at(&mut bytes, 40 * PAGE as u64).unwrap();
                (read, bytes)
            });
            wait_until(|| device.held() > 0);
            let cutter = scope.spawn(|| match cut {
                true => file.set_len(5 * PAGE as u64).unwrap(),
                false => file.punch_hole(30 * PAGE as u64, 20 * PAGE as u64).unwrap(),
            });
            thread::yield_now();
            device.resume();
            let (read, bytes) = reader.join().unwrap();
            cutter.join().unwrap();
            let was = &content(41 * PAGE)[40 * PAGE..];
            let is_right = if cut { read == 0 || bytes == *was } else { is_page(&bytes, was).is_some() };
            assert!(is_right, "{read} bytes, {:?}...", &bytes[..8]);
        });
        let mut byte = [1];
        assert_eq!(file.read_at(&mut byte, 40 * PAGE as u64).unwrap(), usize::from(!cut));
        assert!(cut || byte == [0]);
        cache.check().unwrap();
    }
}

/// T09: pages that were dirty when they were cut off or punched are not written.
#[test]
fn t09_no_page_that_was_cut_off_is_written() {
    let (cache, memory, device, file) = slow();
    file.punch_hole(20 * PAGE as u64, 3 * PAGE as u64).unwrap();
    file.set_len(25 * PAGE as u64).unwrap();
    file.sync_all().unwrap();
    assert_eq!(device.written_bytes(), 2 * PAGE as u64, "pages 23 and 24 are left");
    file.set_len(0).unwrap();
    file.sync_all().unwrap();
    assert_eq!((device.written_bytes(), size(&memory)), (2 * PAGE as u64, 0));
    cache.check().unwrap();
}

// ---- beside readers -------------------------------------------------------------------------------------------------

fn rounds(few: u64, many: u64) -> u64 {
    if std::env::var_os("QUINION_SOAK").is_some() { many } else { few }
}

/// Whether a page is as it was, or zeros as a whole.
fn is_page(bytes: &[u8], was: &[u8]) -> Option<bool> {
    if bytes == was {
        Some(true)
    } else if bytes.iter().all(|&byte| byte == 0) {
        Some(false)
    } else {
        None
    }
}

/// A17: readers of the tail of a live folio that is split never see bytes of another page. The shape is that of the
/// kernel's folio_split_race_test: five folios of 2 MiB, holes of three pages in every fifty, sixteen readers.
#[test]
fn a17_live_folios_are_split_under_readers_of_their_tails() {
    const PAGES: usize = 5 * 512;
    let was = content(PAGES * PAGE);
    for round in 0..rounds(8, 100) {
        let mut pair = Pair::new(PAGES * PAGE);
        pair.warm();
        let splits = hooks::tree_counts(&pair.file).splits;
        let (done, ready) = (AtomicBool::new(false), Barrier::new(17));
        let punched = |page: usize| page % 50 < 3;
        thread::scope(|scope| {
            for reader in 0..16 {
                let (was, done, ready, file) = (&was, &done, &ready, &pair.file);
                scope.spawn(move || {
                    let (mut dice, mut bytes) = (Dice::new(round * 16 + reader), vec![0; 3 * PAGE]);
                    ready.wait();
                    loop {
                        let last = done.load(Ordering::Acquire); // partner: the Release behind the last hole
                        let page = dice.below(PAGES as u64 - 2) as usize;
                        let pages = 1 + dice.below(3) as usize;
                        let read = &mut bytes[..pages * PAGE];
                        file.read_exact_at(read, (page * PAGE) as u64).unwrap();
                        for (nth, got) in read.chunks(PAGE).enumerate() {
                            let page = page + nth;
                            let is = is_page(got, &was[page * PAGE..][..PAGE]);
                            let fits = match is {
                                Some(true) => !(last && punched(page)),
                                Some(false) => punched(page),
                                None => false,
                            };
                            assert!(fits, "page {page} reads {:?}..., last {last}", &got[..8]);
                        }
                        if last {
                            break;
                        }
                    }
                });
            }
            ready.wait();
            for page in (0..PAGES).step_by(50) {
                pair.file.punch_hole((page * PAGE) as u64, 3 * PAGE as u64).unwrap();
            }
            done.store(true, Ordering::Release); // partner: the Acquire of the readers
        });
        for page in (0..PAGES).step_by(50) {
            pair.twin[page * PAGE..(page + 3).min(PAGES) * PAGE].fill(0);
        }
        assert!(hooks::tree_counts(&pair.file).splits > splits, "folios were split");
        pair.check();
    }
}

/// T01: a read that races with cuts returns bytes of the file alone, and none past an end that a finished cut has set.
#[test]
fn t01_reads_that_race_with_cuts_end_where_the_file_does() {
    const PAGES: usize = 600;
    let mut pair = Pair::new(PAGES * PAGE);
    pair.warm();
    let was = content(PAGES * PAGE);
    let mut twin = was.clone();
    // The size that the last cut has told, odd while one is under way.
    let (told, done) = (AtomicU64::new((PAGES * PAGE) as u64 * 2), AtomicBool::new(false));
    thread::scope(|scope| {
        for reader in 0..4 {
            let (was, told, done, file) = (&was, &told, &done, &pair.file);
            scope.spawn(move || {
                let (mut dice, mut bytes) = (Dice::new(reader), vec![0; 20 * PAGE]);
                while !done.load(Ordering::Relaxed) {
                    let before = told.load(Ordering::Acquire); // partner: the cutter's Release
                    let at = dice.below((PAGES * PAGE) as u64);
                    let read = file.read_at(&mut bytes, at).unwrap();
                    let after = told.load(Ordering::Acquire); // partner: as above
                    if before == after && before % 2 == 0 {
                        let reach = (before / 2).saturating_sub(at).min(bytes.len() as u64);
                        assert!(read as u64 <= reach, "{read} bytes at {at} of a file of {}", before / 2);
                    }
                    for (nth, &byte) in bytes[..read].iter().enumerate() {
                        let place = at as usize + nth;
                        assert!(
                            byte == was[place] || byte == 0,
                            "byte {place} is {byte}, not {}",
                            was[place]
                        );
                    }
                }
            });
        }
        let mut dice = Dice::new(99);
        for _ in 0..rounds(300, 5000) {
            let len = dice.below((PAGES * PAGE) as u64);
            told.fetch_or(1, Ordering::Release);
            pair.file.set_len(len).unwrap();
            twin.resize(len as usize, 0);
            told.store(len * 2, Ordering::Release); // partner: the readers' Acquire
            if dice.below(3) == 0 {
                // Longer again, with what was there.
                told.fetch_or(1, Ordering::Release);
                let from = twin.len();
                let end = (from + 50 * PAGE).min(PAGES * PAGE);
                pair.file.write_all_at(&was[from..end], from as u64).unwrap();
                twin.extend_from_slice(&was[from..end]);
                told.store(end as u64 * 2, Ordering::Release); // partner: the readers' Acquire
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    pair.twin = twin;
    pair.check();
}

/// A page of which a read has met the end is not completed by what is written when the file has grown again.
fn storm_of_cuts_within_a_page(file: &(impl Storable + Sync)) {
    const CUT: usize = 1000;
    let done = AtomicBool::new(false);
    file.write(&[1; 2 * PAGE]);
    thread::scope(|scope| {
        for reader in 0..4 {
            let done = &done;
            scope.spawn(move || {
                let mut bytes = vec![0; 2 * PAGE];
                while !done.load(Ordering::Relaxed) {
                    let read = if reader % 2 == 0 { file.read(&mut bytes) } else { file.pin(&mut bytes) };
                    assert!(read >= CUT, "the file is never shorter");
                    let (kept, rest) = bytes[..read.min(PAGE)].split_at(CUT);
                    assert!(kept.iter().all(|byte| *byte == kept[0]), "of two writings");
                    let is_all = |value| rest.iter().all(|byte| *byte == value);
                    assert!(is_all(0) || is_all(kept[0]), "{} and then {:?}", kept[0], rest.iter().max());
                }
            });
        }
        for round in 0..rounds(20_000, 400_000) {
            file.cut(CUT as u64);
            file.write(&[(round % 250) as u8 + 2; 2 * PAGE]);
        }
        done.store(true, Ordering::Relaxed);
    });
}

trait Storable {
    fn write(&self, bytes: &[u8]);
    fn cut(&self, len: u64);
    fn read(&self, to: &mut [u8]) -> usize;
    fn pin(&self, to: &mut [u8]) -> usize;
}

fn copy_pinned(pinned: &quinion::Pinned, to: &mut [u8]) -> usize {
    pinned.chunks().fold(0, |done, chunk| {
        to[done..done + chunk.len()].copy_from_slice(chunk);
        done + chunk.len()
    })
}

macro_rules! storable {
    ($file:ty) => {
        impl Storable for $file {
            fn write(&self, bytes: &[u8]) {
                self.write_all_at(bytes, 0).unwrap();
            }
            fn cut(&self, len: u64) {
                self.set_len(len).unwrap();
            }
            fn read(&self, to: &mut [u8]) -> usize {
                self.read_at(to, 0).unwrap()
            }
            fn pin(&self, to: &mut [u8]) -> usize {
                copy_pinned(&<$file>::pin(self, 0, to.len()).unwrap(), to)
            }
        }
    };
}
storable!(File);
storable!(quinion::MemFile);

/// T01: the page in which a read meets the end of a file is of one moment, though the file is cut and written
/// meanwhile.
#[test]
fn t01_no_read_of_a_file_joins_two_writings_of_the_page_with_its_end() {
    let pair = Pair::new(2 * PAGE);
    pair.warm();
    storm_of_cuts_within_a_page(&pair.file);
}

/// T01: the page in which a read meets the end of a memory file is of one moment, though it is cut and written
/// meanwhile.
#[test]
fn t01_no_read_of_a_memory_file_joins_two_writings_of_the_page_with_its_end() {
    let cache = Cache::builder().memory(16 * MIB as u64).build().unwrap();
    storm_of_cuts_within_a_page(&cache.mem_file(quinion::MemFileOptions::new()).unwrap());
}

/// T01: a pin that races with a cut lends bytes of before the cut, and none that the cut has zeroed. The pin is of two
/// pages, that of the new end among them.
#[test]
fn t01_pins_that_race_with_cuts_lend_nothing_that_was_zeroed() {
    let rounds = rounds(20_000, 100_000);
    let mut pair = Pair::new(2 * PAGE);
    let whole = content(2 * PAGE);
    let gate = Barrier::new(2);
    let (reader, lengths) = (pair.file.clone(), Mutex::new(BTreeSet::new()));
    let read = |round: u64| {
        gate.wait();
        (0..round % 500 * 4).for_each(|_| std::hint::spin_loop());
        let pinned = reader.pin(0, 2 * PAGE).unwrap();
        gate.wait(); // cut
        let lent: Vec<u8> = pinned.chunks().flatten().copied().collect();
        assert_eq!(lent.iter().zip(&whole).position(|(is, was)| is != was), None, "round {round}");
        lengths.lock().unwrap().insert(lent.len());
        drop(pinned);
        gate.wait();
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let outcome = catch_unwind(AssertUnwindSafe(|| (0..rounds).for_each(read)));
            if outcome.is_err() {
                std::process::abort(); // the other waits at the gate, and would for ever
            }
        });
        for _ in 0..rounds {
            gate.wait();
            pair.cut(100);
            gate.wait();
            gate.wait();
            pair.write(0, &whole);
        }
    });
    let lengths = lengths.into_inner().unwrap();
    assert!(lengths.is_subset(&BTreeSet::from([100, PAGE, 2 * PAGE])), "{lengths:?}");
    assert!(lengths.len() > 1, "no pin came before a cut and another behind it: {lengths:?}");
    pair.check();
}

/// B11: no page that readers bring in while a range is punched is in the hole afterwards: all of it reads as zeros.
#[test]
fn b11_no_page_from_before_a_hole_comes_back_into_it() {
    const PAGES: usize = 2048;
    let mut pair = Pair::new(PAGES * PAGE);
    let was = content(PAGES * PAGE);
    let (done, mut twin) = (AtomicBool::new(false), was.clone());
    thread::scope(|scope| {
        for reader in 0..3 {
            let (was, done, file) = (&was, &done, &pair.file);
            scope.spawn(move || {
                let (mut dice, mut bytes) = (Dice::new(reader), vec![0; 64 * PAGE]);
                while !done.load(Ordering::Relaxed) {
                    let page = dice.below(PAGES as u64 - 64) as usize;
                    let uncached = ReadOptions::new().uncached(dice.below(4) == 0);
                    let read = file.read_at_with(&mut bytes, (page * PAGE) as u64, uncached).unwrap();
                    for (nth, got) in bytes[..read].chunks(PAGE).enumerate() {
                        let was = &was[(page + nth) * PAGE..][..got.len()];
                        assert!(is_page(got, was).is_some(), "page {} is {:?}...", page + nth, &got[..8]);
                    }
                    if dice.below(8) == 0 {
                        file.dont_need((page * PAGE) as u64, (200 * PAGE) as u64).unwrap();
                    }
                }
            });
        }
        let mut dice = Dice::new(7);
        let mut bytes = vec![0; 300 * PAGE];
        for _ in 0..rounds(100, 1000) {
            let from = dice.below(PAGES as u64 - 300) as usize;
            let hole = &mut bytes[..(1 + dice.below(300) as usize) * PAGE];
            pair.file.punch_hole((from * PAGE) as u64, hole.len() as u64).unwrap();
            twin[from * PAGE..][..hole.len()].fill(0);
            pair.file.read_exact_at(hole, (from * PAGE) as u64).unwrap();
            assert!(hole.iter().all(|&byte| byte == 0), "a page from before the hole at {from}");
        }
        done.store(true, Ordering::Relaxed);
    });
    pair.twin = twin;
    pair.check();
}

// ---- any order ------------------------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Op {
    Write { at: usize, len: usize, seed: u8 },
    Cut { len: usize },
    Punch { at: usize, len: usize },
    Read { at: usize, len: usize, uncached: bool },
    Pin { at: usize, len: usize },
    Unpin,
    Sync,
    WriteBack,
    Forget { at: usize, len: usize },
}

const SPAN: usize = 1200 * PAGE;

fn place() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 0..SPAN, 2 => (0..SPAN / PAGE).prop_map(|page| page * PAGE), 1 => 0..3 * PAGE]
}
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1..3 * PAGE, 2 => (1..600usize).prop_map(|pages| pages * PAGE), 1 => 1..SPAN]
}
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (place(), length(), 1..255u8).prop_map(|(at, len, seed)| Op::Write { at, len, seed }),
        3 => place().prop_map(|len| Op::Cut { len }),
        4 => (place(), length()).prop_map(|(at, len)| Op::Punch { at, len }),
        4 => (place(), length(), any::<bool>()).prop_map(|(at, len, uncached)| Op::Read { at, len, uncached }),
        2 => (place(), length()).prop_map(|(at, len)| Op::Pin { at, len }),
        2 => Just(Op::Unpin),
        1 => Just(Op::Sync),
        1 => Just(Op::WriteBack),
        1 => (place(), length()).prop_map(|(at, len)| Op::Forget { at, len }),
    ]
}

fn run(ops: &[Op], order_min: u8) {
    let cache =
        Cache::builder().memory(24 << 20).folio_order_min(order_min).folio_order_max(9).build().unwrap();
    let mut pair = Pair::with(cache, 700 * PAGE + 123, OnPinned::Detach);
    let mut pins = Vec::new();
    for op in ops {
        match *op {
            Op::Write { at, len, seed } => pair.write(at, &vec![seed; len.min(SPAN)]),
            Op::Cut { len } => pair.cut(len),
            Op::Punch { at, len } => pair.punch(at..at + len),
            Op::Read { at, len, uncached } => {
                let mut bytes = vec![0; len];
                let read =
                    pair.file.read_at_with(&mut bytes, at as u64, ReadOptions::new().uncached(uncached));
                let read = read.unwrap();
                assert!(at >= pair.twin.len() || bytes[..read] == pair.twin[at..at + read], "{op:?}");
            }
            Op::Pin { at, len } => {
                let pinned = pair.file.pin(at as u64, len.min(200 * PAGE)).unwrap();
                let lent: Vec<u8> = pinned.chunks().flatten().copied().collect();
                assert!(lent.is_empty() || lent == pair.twin[at..at + lent.len()]);
                pins.push((pinned, lent));
            }
            Op::Unpin => drop(pins.pop()),
            Op::Sync => pair.file.sync_data().unwrap(),
            Op::WriteBack => pair.file.write_back().unwrap(),
            Op::Forget { at, len } => drop(pair.file.dont_need(at as u64, len as u64).unwrap()),
        }
        for (pinned, lent) in &pins {
            assert!(pinned.chunks().flatten().eq(lent.iter()), "pinned bytes changed by {op:?}");
        }
        pair.reads_as_twin();
        pair.cache.check().unwrap();
    }
    drop(pins);
    pair.check();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_file_equals_its_twin_after_any_operations(ops in proptest::collection::vec(op(), 1..30)) {
        run(&ops, 0);
    }
    #[test]
    fn so_it_is_in_folios_that_are_never_small(ops in proptest::collection::vec(op(), 1..20)) {
        run(&ops, 2);
    }
}

// ---- an open that empties -------------------------------------------------------------------------------------

/// 1 A opens a file to read, or no thread does. 2 B opens it to write and to empty it, and its device refuses that: the
/// open fails. 3 C opens it to write. The file's writer was B's backend, as the failed open had left it.
#[test]
fn a_backend_whose_open_failed_is_not_kept() {
    let emptying = *OpenOptions::new().write(true).truncate(true);
    for reads_before in [false, true] {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let first = Refusing::new(content(3 * PAGE));
        let reader = reads_before.then(|| cache.open_backend(Arc::clone(&first) as _).unwrap());
        let refusing = first.beside(true);
        let error = cache.open_backend_with(Arc::clone(&refusing) as _, &emptying).unwrap_err();
        assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::NoSpace, Some(28)), "{error}");
        assert_eq!(Arc::strong_count(&refusing), 1, "a reader before: {reads_before}");
        assert_eq!(first.now(), content(3 * PAGE), "a refused cut changes nothing");
        let second = first.beside(false);
        let writer =
            cache.open_backend_with(Arc::clone(&second) as _, OpenOptions::new().write(true)).unwrap();
        writer.write_all_at(b"bytes of C", 5).unwrap();
        writer.sync_data().unwrap();
        let mut expected = content(3 * PAGE);
        expected[5..15].copy_from_slice(b"bytes of C");
        assert_eq!(first.now(), expected);
        for file in reader.iter().chain([&writer]) {
            let mut read = vec![0; 3 * PAGE];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(read, expected);
        }
    }
}

/// With a reader, and without, and with pages that another writer has not written back.
#[test]
fn an_open_that_empties_leaves_nothing_of_the_file_for_any_handle() {
    let writing = *OpenOptions::new().write(true);
    for opened_before in [None, Some(OpenOptions::new()), Some(writing)] {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let first = Refusing::new(content(3 * PAGE));
        let before =
            opened_before.map(|options| cache.open_backend_with(Arc::clone(&first) as _, &options).unwrap());
        if let Some(file) = &before {
            file.read_exact_at(&mut [0; 3 * PAGE], 0).unwrap();
            if opened_before.unwrap() == writing {
                file.write_all_at(&[9; PAGE], 5 * PAGE as u64).unwrap();
            }
        }
        let second = first.beside(false);
        let file = cache
            .open_backend_with(Arc::clone(&second) as _, &*OpenOptions::new().write(true).truncate(true));
        let file = file.unwrap();
        assert!(first.now().is_empty());
        file.write_all_at(b"new", 2).unwrap();
        for file in before.iter().chain([&file]) {
            let mut read = vec![0; 3 * PAGE];
            assert_eq!((file.len(), file.read_at(&mut read, 0).unwrap()), (5, 5));
            assert_eq!(read[..5], *b"\0\0new");
        }
        file.sync_data().unwrap();
        assert_eq!(first.now(), b"\0\0new");
        cache.check().unwrap();
    }
}

/// Another backend of a file, one of whose calls has done its work, says so, and returns when it may.
#[derive(Debug)]
struct Slow {
    file: Arc<Refusing>,
    /// Each cut, or else the first look.
    is_cut: bool,
    has_looked: AtomicBool,
    is_done: Barrier,
    may_return: Barrier,
}

impl Slow {
    fn new(file: Arc<Refusing>, is_cut: bool) -> Arc<Self> {
        let (is_done, may_return) = (Barrier::new(2), Barrier::new(2));
        Arc::new(Self { file, is_cut, has_looked: AtomicBool::new(is_cut), is_done, may_return })
    }
    fn wait(&self) {
        self.is_done.wait();
        self.may_return.wait();
    }
}

impl Backend for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.file.attach(wait_queue);
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let found = Backend::attributes(&*self.file);
        if !self.has_looked.swap(true, Ordering::Relaxed) {
            self.wait();
        }
        found
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.file.reap(how, done)
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        self.file.flush(flushes);
    }
    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        self.file.sync(kind, range)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let cut = Backend::set_size(&*self.file, bytes);
        if self.is_cut {
            self.wait();
        }
        cut
    }
}

/// 1 A opens a file to empty it, and the device has cut it. 2 B opens it, finds it empty, writes, and syncs. 3 A goes
/// on. B's bytes went by a second cut, for which A had a reason: the mapping that B had made has bytes.
#[test]
fn an_open_that_empties_cuts_no_byte_that_was_written_after_its_cut() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let first = Refusing::new(content(3 * PAGE));
    let slow = Slow::new(first.beside(false), true);
    let has_written = AtomicBool::new(false);
    thread::scope(|scope| {
        let emptier = scope.spawn(|| {
            let emptying = *OpenOptions::new().write(true).truncate(true);
            cache.open_backend_with(Arc::clone(&slow) as _, &emptying).unwrap().len()
        });
        slow.is_done.wait();
        let writer = scope.spawn(|| {
            let second = first.beside(false);
            let file = cache.open_backend_with(second as _, OpenOptions::new().write(true)).unwrap();
            assert!(file.is_empty());
            file.write_all_at(b"bytes of B", 0).unwrap();
            file.sync_data().unwrap();
            has_written.store(true, Ordering::Relaxed);
        });
        // Long enough for B, if it does not wait for A's open.
        for _ in 0..200 {
            if has_written.load(Ordering::Relaxed) {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        slow.may_return.wait();
        writer.join().unwrap();
        emptier.join().unwrap();
    });
    assert_eq!(first.now(), b"bytes of B");
    cache.check().unwrap();
}

/// 1 A opens a file to append, and has looked at it. 2 B opens it, appends, syncs and closes, and the cache forgets the
/// file. 3 A goes on: it took the file for as long as before, and wrote over B's bytes.
#[test]
fn an_open_that_was_slow_appends_behind_the_bytes_of_a_file_that_was_forgotten() {
    // The background has a file in its list until it looks there.
    let options = WritebackOptions::new().interval(Duration::from_millis(10));
    let builder = Cache::builder().memory(Cache::MEMORY_MIN).idle_files_max(0);
    let cache = builder.writeback(options).build().unwrap();
    let first = Refusing::new(b"old, ".to_vec());
    let slow = Slow::new(first.beside(false), false);
    let append = |backend: Arc<dyn Backend>, bytes: &[u8]| {
        let file = cache.open_backend_with(backend, OpenOptions::new().write(true)).unwrap();
        file.append(bytes).unwrap();
        file.sync_all().unwrap();
    };
    thread::scope(|scope| {
        let appender = scope.spawn(|| append(Arc::clone(&slow) as _, b"and A's"));
        slow.is_done.wait();
        let second = first.beside(false);
        let appended = catch_unwind(AssertUnwindSafe(|| append(Arc::clone(&second) as _, b"B's ")));
        let begun = Instant::now();
        while Arc::strong_count(&second) > 1 && begun.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
        }
        slow.may_return.wait();
        appender.join().unwrap();
        assert!(appended.is_ok());
        assert_eq!(Arc::strong_count(&second), 1, "the file is known still");
    });
    assert_eq!(first.now(), b"old, B's and A's");
    cache.check().unwrap();
}

/// A file whose looks fail after the first.
#[derive(Debug)]
struct LookedAtOnce {
    file: MemoryFile,
    has_looked: AtomicBool,
}

impl Backend for LookedAtOnce {
    fn name(&self) -> &'static str {
        "looked at once"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        if self.has_looked.swap(true, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.file.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.file.submit(fills);
    }
}

/// The open that makes a mapping looks twice. If the second fails, whatever the handle was to be, nothing of it stays.
#[test]
fn an_open_whose_second_look_fails_leaves_nothing() {
    let every = Coherence::CheckEvery(Duration::ZERO);
    for coherence in [Coherence::Check, every, Coherence::Lease, Coherence::Immutable] {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let file = MemoryFile::new(content(PAGE));
        let device = Arc::new(LookedAtOnce { file, has_looked: AtomicBool::new(false) });
        let options = *OpenOptions::new().coherence(coherence);
        let error = cache.open_backend_with(Arc::clone(&device) as _, &options).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{coherence:?}: {error}");
        assert_eq!(Arc::strong_count(&device), 1, "{coherence:?}");
    }
}

/// An open that waits for another that empties the file, and fails, empties it itself, or reads it as it was.
#[test]
fn an_open_that_empties_and_fails_lets_others_open_the_file() {
    let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
    let first = Refusing::new(content(3 * PAGE));
    thread::scope(|scope| {
        for thread in 0..4 {
            let (cache, first) = (&cache, &first);
            scope.spawn(move || {
                for _ in 0..200 {
                    let options = *OpenOptions::new().write(true).truncate(thread % 2 == 0);
                    let opened = cache.open_backend_with(first.beside(thread == 0) as _, &options);
                    // The first is refused until the third has emptied the file.
                    assert!(opened.is_ok() || thread == 0, "{:?}", opened.err());
                }
            });
        }
    });
    assert!(first.now().is_empty());
    cache.check().unwrap();
}

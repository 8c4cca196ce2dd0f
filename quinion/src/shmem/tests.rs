//! Tests of cases that a caller of the public API cannot bring about at will.
//!
//! Allocated folios of a chosen size, with junk in their frames; a fill that does not proceed; a cut between
//! a batch and its copy. The letters are those of the kernel facts. `tests/mem_file.rs` tests the public API.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::arena::{Arena, ArenaOptions, Descriptor, FillEnd, ReadableState};
use crate::backend::doubles::{Faults, SimulatedBackend};
use crate::backend::{FillRun, MemoryFile, PageKey, WaitQueue};
use crate::filemap::{Filemap, OnPinned, StreamPositions, WriteContext};
use crate::folio::{FreshFolio, HeldFolio, LockedFolio, Pinned};
use crate::mapping::{
    BatchEnd, DetachOutcome, InsertPurpose, Mapping, MemoryEntry, MemoryPages, NewFolio, ReadBatch,
    SeekTarget,
};
use crate::spill::{Spill, SpillOptions};
use crate::sync::LockWait;
use crate::sys::fork::ForkGuard;
use crate::units::{MappingId, Millis, Order, Orders, PAGE_SIZE, PageIndex, PoolNumber};

use super::{FolioPinRequest, NewMemory, OneBuffer, Shmem, Target};

const BYTES: u64 = PAGE_SIZE as u64;
const LONG: Duration = Duration::from_secs(60);
/// A byte that no reader may see unless it was filled.
const JUNK: u8 = 0xdd;

struct ShmemFixture {
    shmem: Shmem,
    mapping: Arc<Mapping>,
    /// Another file, of a page, whose bytes are in the frames that are to be filled.
    scratch: Arc<Mapping>,
    touched: StreamPositions,
}

impl ShmemFixture {
    fn of(pages: u64) -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 32 << 20 }).unwrap());
        Self::with(pages, (arena, Arc::new(WaitQueue::new()), None))
    }

    /// A fixture of a cache with a spill file that holds back its writes until a thread waits for them.
    fn that_spills(pages: u64) -> (Self, Arc<Spill>) {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 32 << 20 }).unwrap());
        let (disk, wait_queue) = (Arc::new(MemoryFile::new(Vec::new())), Arc::new(WaitQueue::new()));
        let disk = Arc::new(SimulatedBackend::of_memory(disk, Faults::default()));
        let spill = Spill::with_backend(disk, &SpillOptions::new("", 1 << 20), &arena, &wait_queue).unwrap();
        (Self::with(pages, (arena, wait_queue, Some(Arc::clone(&spill)))), spill)
    }

    fn with(
        pages: u64,
        (arena, wait_queue, spill): (Arc<Arena>, Arc<WaitQueue>, Option<Arc<Spill>>),
    ) -> Self {
        let orders = Orders { min: Order(0), max: Order(9) };
        let spills = spill.as_ref().map(|_| PoolNumber::DEFAULT);
        let filemap = Filemap::new(arena, wait_queue, orders).with_spill(spill);
        let shmem = Shmem::new(Arc::new(filemap));
        let new = |id, spills| {
            let process = ForkGuard::new();
            let new = NewMemory { id: MappingId(id), folio_order_max: Order(9), spills, process };
            shmem.new_mapping(new).unwrap()
        };
        let (mapping, scratch) = (new(1, spills), new(2, None));
        mapping.set_size(pages * BYTES);
        let fixture = Self { shmem, mapping, scratch, touched: StreamPositions::default() };
        fixture.write_to(&fixture.scratch, 0, &[JUNK; PAGE_SIZE]);
        fixture
    }

    /// Puts a folio there with [`JUNK`] in its frames, which is being filled.
    fn begin(&self, index: u64, order: u8) -> FillRun {
        let (filemap, order) = (&self.shmem.filemap, Order(order));
        let reservation = filemap.reclaim().lists().reserve(1, LockWait::Wait).unwrap();
        let mut fresh = FreshFolio::alloc(&filemap.arena, order).unwrap();
        let junk = self.scratch.try_hold(PageIndex(0)).unwrap();
        (0..order.pages()).for_each(|page| fresh.copy_page(page, &junk, PageIndex(0)));
        let frame = fresh.into_frame();
        let run = FillRun { index: PageIndex(index), frame, pages: order.pages() };
        let folio = NewFolio { index: run.index, frame, order };
        self.mapping.add_folio(folio, InsertPurpose::Write, LockWait::Wait);
        let _marked = self.mapping.lock().mark_run_dirty(run, Millis(0));
        filemap.reclaim().list_kept([frame], reservation);
        run
    }

    /// Ends that, with the bytes that are there.
    fn end(&self, run: FillRun) {
        self.end_by(run, Descriptor::complete);
    }

    /// Ends that, without any bytes.
    fn end_empty(&self, run: FillRun) {
        self.end_by(run, Descriptor::complete_empty);
    }

    fn end_by(&self, run: FillRun, end: impl FnOnce(&Descriptor) -> FillEnd) {
        assert_eq!(end(self.shmem.filemap.arena.view().own(run.frame)), FillEnd::Attached);
        let place = PageKey { mapping: self.mapping.id(), page: run.index };
        self.shmem.filemap.wait_queue.wake_filled(place, run.pages);
    }

    /// Puts a folio there that was allocated and not written, with junk in its frames.
    fn allocate(&self, index: u64, order: u8) -> FillRun {
        let run = self.begin(index, order);
        self.end_empty(run);
        run
    }

    fn write_to(&self, mapping: &Arc<Mapping>, position: u64, bytes: &[u8]) {
        let writer = WriteContext::of_memory(mapping, PoolNumber::DEFAULT, &self.touched, OnPinned::Detach);
        assert_eq!(self.shmem.write(writer, position, bytes).unwrap(), bytes.len());
    }
    fn write(&self, position: u64, bytes: &[u8]) {
        self.write_to(&self.mapping, position, bytes);
    }
    fn read(&self, position: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; len];
        let mut target = OneBuffer::from(&mut bytes, 0);
        let read = self.shmem.read(&self.mapping, position, &mut target, None).unwrap();
        bytes.truncate(read);
        bytes
    }
    fn pin(&self, position: u64, len: usize) -> Pinned {
        self.shmem.pin(&self.mapping, position, len, ForkGuard::new()).unwrap()
    }
    fn punch(&self, position: u64, end: u64) {
        self.shmem.punch(&self.mapping, position..end, OnPinned::Detach).unwrap();
    }
    fn pages(&self) -> (u64, u64) {
        let MemoryPages { data, allocated, spilled } = self.mapping.memory_pages();
        assert_eq!(spilled, 0);
        (data, allocated)
    }
    fn check(&self) {
        self.mapping.check().unwrap();
        self.shmem.filemap.reclaim().check().unwrap();
        self.shmem.filemap.arena.check().unwrap();
    }
    fn hold(&self, page: u64) -> HeldFolio<'_> {
        self.mapping.try_hold(PageIndex(page)).unwrap()
    }
}

fn bytes_of(pinned: &Pinned) -> Vec<u8> {
    pinned.chunks().flatten().copied().collect()
}

/// 1. P has the lock of a folio with bytes, into which it will put others: that takes no write lock.
/// 2. W, alone with the file, copies the pages of the folio, which is held. It has copied page 0; page 1 has a writer.
/// 3. P puts its bytes into page 0, and unlocks.
/// 4. W puts its copies in the folio's place: the bytes that P has put are lost.
#[test]
fn bytes_put_into_a_locked_folio_are_not_lost_when_it_is_detached() {
    let fixture = ShmemFixture::of(2);
    fixture.end(fixture.begin(0, 1));
    let (fixture, mut locked) = (&fixture, LockedFolio::lock(fixture.hold(0)).unwrap());
    let (entered, has_entered) = mpsc::channel();
    let (leaving, is_leaving) = mpsc::channel::<()>();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            let held = fixture.hold(0);
            let page = held.writer().unwrap().page(1).unwrap();
            entered.send(()).unwrap();
            is_leaving.recv().unwrap_err(); // the other end is dropped
            drop(page);
        });
        has_entered.recv().unwrap();
        let detached = scope.spawn(|| {
            let (_alone, none) = (fixture.mapping.write_alone(), PageIndex(0)..PageIndex(0));
            fixture.mapping.detach_copy(&fixture.hold(0), none, Order(0))
        });
        // Copies are made only by the code that loses the bytes: it has the time to begin.
        let began = Instant::now();
        while !detached.is_finished() && began.elapsed() < Duration::from_secs(1) {
            thread::yield_now();
        }
        locked.write(0, &[2; 100]).unwrap();
        drop((locked, leaving));
        detached.join().unwrap()
    });
    assert_eq!((fixture.read(0, 100), outcome), (vec![2; 100], DetachOutcome::InFlight));
    fixture.check();
}

/// R17: a folio that was allocated and never written reads as zeros, and reads leave it so.
#[test]
fn r17_an_allocated_folio_of_any_order_reads_as_zeros_and_stays_allocated() {
    let fixture = ShmemFixture::of(2048);
    fixture.allocate(512, 9);
    fixture.allocate(1024, 0);
    fixture.allocate(1028, 2);
    assert_eq!(fixture.read(512 * BYTES, 2 << 20), vec![0; 2 << 20]);
    assert_eq!(fixture.read(512 * BYTES + 100, 4000), vec![0; 4000]);
    assert_eq!(fixture.read(500 * BYTES + 7, 600 * PAGE_SIZE), vec![0; 600 * PAGE_SIZE], "between holes");
    assert_eq!(fixture.pages(), (0, 517));
    assert_eq!(fixture.hold(600).is_readable(), ReadableState::Zeros);
    fixture.check();
}

/// R17: the first write to a part of an allocated folio zeroes the rest of it, and replaces no frame.
#[test]
fn r17_the_first_write_to_an_allocated_folio_zeroes_the_rest() {
    let fixture = ShmemFixture::of(600);
    fixture.allocate(0, 9);
    fixture.allocate(512, 0);
    fixture.write(5000, &[7; 10_000]);
    fixture.write(512 * BYTES + 5, &[8]);
    let mut right = vec![0; 513 * PAGE_SIZE];
    right[5000..15_000].fill(7);
    right[512 * PAGE_SIZE + 5] = 8;
    assert_eq!(fixture.read(0, 513 * PAGE_SIZE), right);
    assert_eq!(fixture.pages(), (513, 0));
    fixture.check();
    drop(fixture.read(0, 1));
    assert_eq!(fixture.hold(3).frame(), fixture.hold(511).frame(), "it is the folio that was allocated");
}

#[test]
fn a_write_over_allocated_and_holes_and_data_at_once_is_read_back() {
    let fixture = ShmemFixture::of(64);
    fixture.allocate(2, 1);
    fixture.write(6 * BYTES, &[1; PAGE_SIZE]);
    fixture.allocate(8, 3);
    let bytes: Vec<u8> = (0..14 * PAGE_SIZE + 50).map(|at| at as u8 | 1).collect();
    fixture.write(100, &bytes);
    assert_eq!(fixture.read(100, bytes.len()), bytes);
    assert_eq!(fixture.read(0, 100), [0; 100]);
    assert_eq!(fixture.read(100 + bytes.len() as u64, 3000), [0; 3000]);
    assert_eq!(fixture.pages(), (16, 0));
    fixture.check();
}

/// T06: a hole punched within an allocated folio of order 9 frees the whole pages in it and leaves the others as they
/// are.
#[test]
fn t06_a_punch_in_the_middle_of_an_allocated_folio_leaves_the_rest_of_it_allocated() {
    let fixture = ShmemFixture::of(1024);
    fixture.allocate(512, 9);
    fixture.punch(600 * BYTES + 10, 700 * BYTES + 20);
    assert_eq!(fixture.pages(), (0, 512 - 99), "the pages at both ends are not whole in it");
    assert_eq!(
        fixture.mapping.lock().at(PageIndex(601), PageIndex(1024)),
        MemoryEntry::Hole { end: PageIndex(700) }
    );
    assert_eq!(fixture.read(512 * BYTES, 2 << 20), vec![0; 2 << 20]);
    fixture.write(600 * BYTES, &[9; 10]);
    assert_eq!(fixture.read(600 * BYTES, 20), [[9; 10], [0; 10]].concat());
    fixture.check();
    // The rest of it is cut in the middle, and extended again.
    let author = OnPinned::Detach;
    fixture.shmem.set_len(&fixture.mapping, 800 * BYTES + 1, author).unwrap();
    fixture.shmem.set_len(&fixture.mapping, 1024 * BYTES, author).unwrap();
    assert_eq!(
        fixture.mapping.lock().at(PageIndex(801), PageIndex(1024)),
        MemoryEntry::Hole { end: PageIndex(1024) }
    );
    assert_eq!(fixture.read(700 * BYTES, 4 << 20), vec![0; 324 * PAGE_SIZE]);
    fixture.check();
}

#[test]
fn an_allocated_folio_that_is_held_gives_way_to_allocated_pages() {
    let fixture = ShmemFixture::of(64);
    fixture.allocate(16, 4);
    let held = fixture.hold(20);
    fixture.punch(18 * BYTES, 24 * BYTES);
    assert_eq!(fixture.pages(), (0, 10));
    assert_eq!(held.is_readable(), ReadableState::Never, "it has left, and its holder keeps it");
    fixture.check();
    drop(held);
    fixture.check();
    assert_eq!(fixture.read(0, 64 * PAGE_SIZE), vec![0; 64 * PAGE_SIZE]);
}

/// R22: on a hole, a lookup that allocates nothing finds no folio and a read finds zeros; neither is an error.
#[test]
fn r22_a_lookup_that_allocates_nothing_finds_nothing_on_a_hole_and_a_read_finds_zeros_and_neither_an_error() {
    let fixture = ShmemFixture::of(100);
    fixture.write(40 * BYTES, &[1; PAGE_SIZE]);
    let mut batch = ReadBatch::new();
    let end = fixture.mapping.get_folios_contig(PageIndex(0), PageIndex(99), &mut batch);
    assert_eq!((end, batch.len()), (BatchEnd::Absent, 0));
    assert!(fixture.mapping.try_hold(PageIndex(0)).is_err());
    assert_eq!(
        fixture.mapping.lock().at(PageIndex(0), PageIndex(100)),
        MemoryEntry::Hole { end: PageIndex(40) }
    );
    assert_eq!(fixture.mapping.lock().at(PageIndex(40), PageIndex(100)), MemoryEntry::Folio);
    assert_eq!(
        fixture.mapping.lock().at(PageIndex(41), PageIndex(50)),
        MemoryEntry::Hole { end: PageIndex(50) }
    );
    assert_eq!(fixture.read(0, 40 * PAGE_SIZE), vec![0; 40 * PAGE_SIZE]);
    assert_eq!(fixture.pages(), (1, 0));
}

/// R06: a batch ends before a hole. The read goes on behind it after one locked lookup for the whole hole.
#[test]
fn r06_a_batch_ends_before_a_hole_and_the_read_goes_on_with_one_look_for_each_hole() {
    let fixture = ShmemFixture::of(1000);
    for page in [0, 1, 2, 500, 501] {
        fixture.write(page * BYTES, &[page as u8 + 1; PAGE_SIZE]);
    }
    let before = fixture.mapping.index().tree_counts().locks;
    let read = fixture.read(0, 1000 * PAGE_SIZE);
    assert_eq!(
        fixture.mapping.index().tree_counts().locks - before,
        2,
        "one for each hole, and none for folios"
    );
    for (page, bytes) in read.chunks(PAGE_SIZE).enumerate() {
        let right = if matches!(page, 0..3 | 500..502) { page as u8 + 1 } else { 0 };
        assert!(bytes.iter().all(|&byte| byte == right), "page {page}");
    }
}

/// R07: a folio that is being filled is the last of its batch, and reads of the folios before it do not wait for it.
#[test]
fn r07_a_folio_that_is_being_filled_is_waited_for_only_when_it_is_the_first() {
    let fixture = ShmemFixture::of(8);
    fixture.write(0, &[1; 2 * PAGE_SIZE]);
    let run = fixture.begin(2, 1);
    let mut batch = ReadBatch::new();
    assert_eq!(fixture.mapping.get_folios_contig(PageIndex(0), PageIndex(3), &mut batch), BatchEnd::Covered);
    let readable: Vec<_> = batch.iter().map(HeldFolio::is_readable).collect();
    assert_eq!(readable.last(), Some(&ReadableState::NotYet));
    drop(batch);
    let copied = AtomicUsize::new(0);
    let read = || {
        let mut bytes = vec![0xee; 8 * PAGE_SIZE];
        let mut watch = |given| copied.store(given, Relaxed);
        let mut target = CountedBuffer::new(&mut bytes, &mut watch);
        assert_eq!(fixture.shmem.read(&fixture.mapping, 0, &mut target, None).unwrap(), 8 * PAGE_SIZE);
        bytes
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(read);
        let pinner = scope.spawn(|| bytes_of(&fixture.pin(BYTES, 3 * PAGE_SIZE)));
        // Ready pages can be read meanwhile, and the reader that goes further has them before it waits.
        assert_eq!(fixture.read(0, 2 * PAGE_SIZE), [1; 2 * PAGE_SIZE]);
        let begun = Instant::now();
        while copied.load(Relaxed) < 2 * PAGE_SIZE && begun.elapsed() < LONG {
            std::thread::yield_now();
        }
        let before = copied.load(Relaxed);
        fixture.end(run); // before anything is asserted: others wait for it
        assert_eq!(before, 2 * PAGE_SIZE, "bytes that the reader had when it waited");
        let right =
            [[1; 2 * PAGE_SIZE], [JUNK; 2 * PAGE_SIZE], [0; 2 * PAGE_SIZE], [0; 2 * PAGE_SIZE]].concat();
        assert_eq!(reader.join().unwrap(), right);
        assert_eq!(pinner.join().unwrap(), right[PAGE_SIZE..4 * PAGE_SIZE]);
    });
    fixture.check();
}

/// One buffer that says how many bytes it has given out for a copy, with each piece and before it is copied.
struct CountedBuffer<'b, 't> {
    buffer: OneBuffer<'b>,
    given: usize,
    watch: &'t mut dyn FnMut(usize),
}

impl<'b, 't> CountedBuffer<'b, 't> {
    fn new(bytes: &'b mut [u8], watch: &'t mut dyn FnMut(usize)) -> Self {
        Self { buffer: OneBuffer::from(bytes, 0), given: 0, watch }
    }
}

impl Target for CountedBuffer<'_, '_> {
    fn left(&self) -> usize {
        self.buffer.left()
    }
    fn next(&mut self, max: usize) -> &mut [u8] {
        let piece = self.buffer.next(max);
        self.given += piece.len();
        (self.watch)(self.given);
        piece
    }
}

/// T08: a thread that waits for a folio which is removed meanwhile looks the page up again.
#[test]
fn t08_a_waiter_for_a_folio_that_is_taken_out_meanwhile_looks_again() {
    let fixture = ShmemFixture::of(8);
    let run = fixture.begin(4, 2);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| fixture.read(4 * BYTES, 4 * PAGE_SIZE));
        let writer = scope.spawn(|| fixture.write(5 * BYTES, &[3; 10]));
        // A folio that is being filled does not keep a punch of all of it waiting.
        fixture.punch(4 * BYTES, 8 * BYTES);
        let completed = fixture.shmem.filemap.arena.view().own(run.frame).complete();
        if let FillEnd::Detached(crate::arena::PutOutcome::Last(order)) = completed {
            fixture.shmem.filemap.arena.free(run.frame, order);
        }
        let place = PageKey { mapping: fixture.mapping.id(), page: run.index };
        fixture.shmem.filemap.wait_queue.wake_filled(place, run.pages);
        writer.join().unwrap();
        let read = reader.join().unwrap();
        assert!(
            read.iter().enumerate().all(|(at, &byte)| byte == 0 || byte == 3 && (4096..4106).contains(&at))
        );
    });
    assert_eq!(fixture.read(5 * BYTES, 11), [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0]);
    assert_eq!(fixture.pages(), (1, 0));
    fixture.check();
}

/// One buffer; the file is changed when a read looks a second time how many bytes are wanted.
struct ChangesWhileRead<'b, F: FnMut()> {
    buffer: OneBuffer<'b>,
    looks: std::cell::Cell<u32>,
    change: std::cell::RefCell<F>,
}

impl<F: FnMut()> Target for ChangesWhileRead<'_, F> {
    fn left(&self) -> usize {
        if self.looks.replace(self.looks.get() + 1) == 1 {
            (self.change.borrow_mut())();
        }
        self.buffer.left()
    }
    fn next(&mut self, max: usize) -> &mut [u8] {
        self.buffer.next(max)
    }
}

/// T01: the page in which a read meets the end of the file is of one moment, though the file has grown meanwhile.
#[test]
fn t01_a_read_that_met_the_end_within_a_page_does_not_go_on_in_a_longer_file() {
    let fixture = ShmemFixture::of(0);
    fixture.write(0, &[1; PAGE_SIZE + 1000]);
    let mut bytes = vec![0xee; 3 * PAGE_SIZE];
    let mut target = ChangesWhileRead {
        buffer: OneBuffer::from(&mut bytes, 0),
        looks: std::cell::Cell::new(0),
        change: std::cell::RefCell::new(|| fixture.write(0, &[2; 3 * PAGE_SIZE])),
    };
    assert_eq!(fixture.shmem.read(&fixture.mapping, 0, &mut target, None).unwrap(), PAGE_SIZE + 1000);
    assert_eq!(bytes, [vec![1; PAGE_SIZE + 1000], vec![0xee; 2 * PAGE_SIZE - 1000]].concat());
    fixture.check();
}

/// R12: a file that is cut after a read has looked its folios up gives no byte behind the new end: the size is looked
/// at again when the bytes have been copied. In a batch, and in the read of a single page.
#[test]
fn r12_a_file_cut_between_look_up_and_copy_gives_no_byte_behind_its_new_end() {
    for (want, cut, left) in [
        (40 * PAGE_SIZE, 10 * PAGE_SIZE + 5, 2 * PAGE_SIZE + 5),
        (40 * PAGE_SIZE, 8 * PAGE_SIZE, 0),
        (40 * PAGE_SIZE, 3, 0),
        (100, 8 * PAGE_SIZE + 5, 5),
        (100, 8 * PAGE_SIZE, 0),
    ] {
        let fixture = ShmemFixture::of(0);
        fixture.write(0, &[6; 64 * PAGE_SIZE]);
        let mut bytes = vec![0xee; want];
        let mut once = Some(());
        let mut watch = |_| {
            if once.take().is_some() {
                fixture.shmem.set_len(&fixture.mapping, cut as u64, OnPinned::Detach).unwrap();
            }
        };
        let mut target = CountedBuffer::new(&mut bytes, &mut watch);
        let read = fixture.shmem.read(&fixture.mapping, 8 * BYTES, &mut target, None).unwrap();
        assert_eq!((read, once), (left, None), "{want} bytes, cut at {cut}");
        assert!(bytes[..read].iter().all(|&byte| byte == 6));
        fixture.check();
    }
}

/// R18: after reads and pins, each folio has as many holds as before.
#[test]
fn r18_no_hold_is_left_behind_by_reads_and_pins() {
    let fixture = ShmemFixture::of(64);
    fixture.write(0, &[1; 20 * PAGE_SIZE]);
    fixture.allocate(32, 4);
    let holds = || {
        let pages = (0..20).chain(32..48);
        pages
            .map(|page| fixture.hold(page).frame())
            .map(|frame| fixture.shmem.filemap.arena.view().own(frame).word().holds())
            .sum::<u32>()
    };
    let before = holds();
    fixture.read(100, 60 * PAGE_SIZE);
    fixture.read(0, 10);
    fixture.read(63 * BYTES, 10 * PAGE_SIZE);
    drop(fixture.pin(0, 64 * PAGE_SIZE));
    drop(fixture.pin(33 * BYTES, 10));
    assert_eq!((holds(), before), (0, 0), "each hold that is counted has been given back when it is");
}

/// R19: a batch that is held while the file is truncated stays readable memory, and no later read returns bytes of it
/// that lie past the new end.
#[test]
fn r19_a_batch_that_is_held_across_a_cut_stays_readable_and_nothing_of_it_is_delivered() {
    let fixture = ShmemFixture::of(64);
    fixture.write(0, &[6; 64 * PAGE_SIZE]);
    let mut batch = ReadBatch::new();
    let end = fixture.mapping.get_folios_contig(PageIndex(8), PageIndex(63), &mut batch);
    assert_eq!(end, BatchEnd::Covered);
    fixture.shmem.set_len(&fixture.mapping, 10 * BYTES + 5, OnPinned::Detach).unwrap();
    for held in batch.iter() {
        let mut bytes = [0; PAGE_SIZE];
        let last = held.first().plus(u64::from(held.order().pages()) - 1);
        assert_eq!(held.copy_out(last.first_byte(), &mut bytes), PAGE_SIZE);
    }
    assert_eq!(fixture.read(8 * BYTES, 64 * PAGE_SIZE), [6; 2 * PAGE_SIZE + 5]);
    assert!(fixture.read(11 * BYTES, 10).is_empty());
    assert_eq!(fixture.pages(), (11, 0), "what is held is out of the file");
    drop(batch);
    fixture.check();
}

#[test]
fn a_pinned_folio_is_replaced_by_one_folio_if_there_is_one() {
    let fixture = ShmemFixture::of(64);
    fixture.write(0, &[1; 64 * PAGE_SIZE]);
    let order = fixture.hold(0).order();
    assert!(order > Order(0), "a write of many pages makes a large folio");
    let pinned = fixture.pin(0, 64 * PAGE_SIZE);
    fixture.write(5, &[2]);
    assert_eq!(fixture.hold(0).order(), order);
    assert_eq!(bytes_of(&pinned), vec![1; 64 * PAGE_SIZE]);
    assert_eq!(fixture.read(0, 7), [1, 1, 1, 1, 1, 2, 1]);
    fixture.check();
    drop(pinned);
    fixture.check();
}

#[test]
fn seeking_passes_over_allocated_folios() {
    let fixture = ShmemFixture::of(100);
    fixture.allocate(8, 3);
    fixture.write(20 * BYTES, &[1; 3 * PAGE_SIZE]);
    let seek = |at: u64, wanted| fixture.shmem.seek(&fixture.mapping, at, wanted);
    assert_eq!(seek(0, SeekTarget::Data), Some(20 * BYTES));
    assert_eq!(seek(21 * BYTES + 7, SeekTarget::Data), Some(21 * BYTES + 7));
    assert_eq!(seek(23 * BYTES, SeekTarget::Data), None);
    assert_eq!(seek(20 * BYTES, SeekTarget::Hole), Some(23 * BYTES));
    assert_eq!(seek(9 * BYTES + 1, SeekTarget::Hole), Some(9 * BYTES + 1), "it has no bytes");
    assert_eq!(seek(100 * BYTES, SeekTarget::Hole), None);
}

/// T03: a thread that would add a page waits while another holds off all insertions; readers go on.
#[test]
fn t03_a_thread_that_adds_pages_waits_while_another_is_alone_with_the_file() {
    let fixture = ShmemFixture::of(8);
    std::thread::scope(|scope| {
        let alone = fixture.mapping.invalidate_alone();
        let writer = scope.spawn(|| fixture.write(0, &[1; PAGE_SIZE]));
        (0..1000).for_each(|_| {
            assert_eq!(fixture.pages(), (0, 0));
            std::thread::yield_now();
        });
        assert_eq!(fixture.read(0, 10), [0; 10], "readers go on");
        drop(alone);
        writer.join().unwrap();
    });
    assert_eq!((fixture.pages(), fixture.read(0, 10)), ((1, 0), vec![1; 10]));
}

#[test]
fn a_check_finds_a_page_that_could_be_taken_for_one_that_is_elsewhere_too() {
    let fixture = ShmemFixture::of(8);
    fixture.write(0, &[1; 3 * PAGE_SIZE]);
    fixture.check();
    fixture.mapping.lock().forget_dirty(PageIndex(1)..PageIndex(2));
    let wrong = fixture.mapping.check().unwrap_err();
    assert!(wrong.contains("of a memory file"), "{wrong}");
    // A folio whose bytes are not there is nothing that a file could have.
    let run = fixture.begin(4, 0);
    fixture.end_empty(run);
    fixture.punch(0, 3 * BYTES);
    fixture.check();
}

fn on_its_way() -> (ShmemFixture, Arc<Spill>) {
    let (fixture, spill) = ShmemFixture::that_spills(16);
    fixture.write(0, &[1; 16 * PAGE_SIZE]);
    assert_eq!(fixture.shmem.filemap.reclaim().reclaim(16, LockWait::Wait), 0);
    assert_eq!(spill.under_way().0, 16);
    (fixture, spill)
}

#[test]
fn a_folio_populated_on_its_way_to_the_spill_file_stays() {
    let (fixture, spill) = on_its_way();
    let writer =
        WriteContext::of_memory(&fixture.mapping, PoolNumber::DEFAULT, &fixture.touched, OnPinned::Detach);
    let put = fixture.shmem.populate(writer, 3 * BYTES..5 * BYTES, &mut |slice| {
        assert_eq!(slice.put(&[2; 2 * PAGE_SIZE]), 2 * PAGE_SIZE);
        Ok(())
    });
    assert_eq!(put.unwrap(), 2 * BYTES);
    spill.drain();
    assert_eq!((fixture.mapping.backing().spilled_pages(), spill.stats().bytes), (0, 0));
    let wanted: Vec<u8> =
        [(3, 1), (2, 2), (11, 1)].map(|(pages, byte)| vec![byte; pages * PAGE_SIZE]).concat();
    assert!(fixture.read(0, 16 * PAGE_SIZE) == wanted);
    fixture.check();
}

#[test]
fn a_folio_with_an_address_on_its_way_to_the_spill_file_stays() {
    let (fixture, spill) = on_its_way();
    let (pool, process) = (PoolNumber::DEFAULT, ForkGuard::new());
    let request = FolioPinRequest { range: 0..BYTES, folios_max: 9, pool, process };
    let folios = fixture.shmem.pin_folios(&fixture.mapping, request).unwrap();
    assert_eq!(folios.len(), 1);
    drop(folios); // a thread may have stored there
    spill.drain();
    assert_eq!((fixture.mapping.backing().spilled_pages(), spill.stats().bytes), (0, 0));
    fixture.check();
}

/// 1. A folio of the file is on its way to the spill file, and its request keeps the mapping.
/// 2. The last handle goes.
/// 3. The device has written the folio, and no thread waits for it: the request ended with the next one that did.
#[test]
fn a_file_that_ends_on_its_way_to_the_spill_file_gives_its_memory_back_without_a_reader() {
    let (fixture, _spill) = on_its_way();
    let ShmemFixture { shmem, mapping, .. } = fixture;
    let free = |shmem: &Shmem| shmem.filemap.arena.stats().free_pages;
    let before = free(&shmem);
    shmem.end(&mapping);
    let gone = Arc::downgrade(&mapping);
    drop(mapping);
    let begun = Instant::now();
    while gone.strong_count() > 0 {
        assert!(begun.elapsed() < LONG, "its memory stays behind");
        std::thread::yield_now();
    }
    assert_eq!(free(&shmem), before + 16);
    shmem.filemap.reclaim().check().unwrap();
    shmem.filemap.arena.check().unwrap();
}

//! One folio on its way to the spill file and back, step by step: what happens in between, and what stands in the tree.
//!
//! The device is simulated, and holds its requests until a thread waits for them: so between the submission of the
//! folio and its end the test can hold it, write, lock or cut it, or end the mapping. Behind each test the tree, the
//! rings, the arena and the slots agree.

use std::sync::Arc;

use quinion::backend::{Backend, FillRun, MemoryFile, WaitQueue};
use quinion::internals::arena::{Arena, ArenaOptions, Gap};
use quinion::internals::mapping::{
    AddedFolio, FolioShape, FrameSource, GapFrames, Grab, GrabEnd, GrabRequest, Grabbed, InsertPurpose,
    Mapping, MarkDirty, MemoryEntry, MemoryWait, NewFolio, NewMemoryMapping, OnLocked, PartOutcome,
    RemoveFilter, RestoreOutcome, SeekTarget, SpillTarget,
};
use quinion::internals::policy::FetchOrigin;
use quinion::internals::reclaim::Reclaim;
use quinion::internals::spill::{Spill, SpillOptions};
use quinion::internals::stats::Counters;
use quinion::internals::sync::LockWait;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Frame, MappingId, Millis, Order, Orders, PageIndex, PoolNumber};
use quinion::internals::xarray::Value;
use quinion_testing::doubles::{Faults, SimulatedBackend, WriteFaults};

struct Fixture {
    mapping: Arc<Mapping>,
    reclaim: Reclaim,
    spill: Arc<Spill>,
    disk: Arc<SimulatedBackend>,
    arena: Arc<Arena>,
}

/// A source of no frames, for grabs of folios that are cached.
struct NoFrames;

impl FrameSource for NoFrames {
    type Error = ();
    fn take(&mut self, _: &[Gap], _: MemoryWait) -> Result<GapFrames, ()> {
        Err(())
    }
    fn settle(&mut self, _: &[FillRun], _: &[FillRun]) {}
    fn make_nodes(&mut self) -> bool {
        false
    }
    fn spill_in(&mut self, _: PageIndex, _: PageIndex) -> Result<(), ()> {
        Err(())
    }
}

const FIRST: PageIndex = PageIndex(16);
const ORDER: Order = Order(4);

impl Fixture {
    fn new(writes: WriteFaults) -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let disk = SimulatedBackend::of_memory(Arc::new(MemoryFile::new(Vec::new())), Faults::default());
        let (disk, wait_queue) = (Arc::new(disk.with_write_faults(writes)), Arc::new(WaitQueue::new()));
        let backend = Arc::clone(&disk) as Arc<dyn Backend>;
        let spill =
            Spill::with_backend(backend, &SpillOptions::new("", 8 << 20), &arena, &wait_queue).unwrap();
        let reclaim = Reclaim::new(Arc::clone(&arena), Arc::new(Counters::default()));
        reclaim.spill_to(&spill);
        let mapping = Mapping::memory(NewMemoryMapping {
            arena: &arena,
            id: MappingId(1),
            folio_order_max: Order(9),
            spill: Some(SpillTarget { spill: Arc::clone(&spill), pool: PoolNumber::DEFAULT }),
            process: ForkGuard::new(),
        });
        let mapping = mapping.unwrap().with_lists(reclaim.lists());
        let mapping = Arc::new(mapping.with_shadow_nodes(reclaim.shadow_nodes()));
        mapping.set_size(8 << 20);
        reclaim.add_mapping(Arc::clone(&mapping));
        let fixture = Self { mapping, reclaim, spill, disk, arena };
        fixture.add();
        fixture
    }

    fn add(&self) {
        self.add_at(FIRST);
    }

    fn add_at(&self, index: PageIndex) {
        let frame = self.arena.alloc(ORDER).unwrap();
        let reservation = self.reclaim.lists().reserve(1, LockWait::Wait).unwrap();
        let charge = self.reclaim.lists().charge(PoolNumber::DEFAULT, ORDER.pages(), ORDER);
        let folio = NewFolio { index, frame, order: ORDER };
        let added = self.mapping.add_folio(folio, InsertPurpose::Write, LockWait::Wait);
        assert_eq!(added, AddedFolio::Added { shadow: None });
        let run = FillRun { index, frame, pages: ORDER.pages() };
        self.mapping.lock().mark_run_dirty(run, Millis(1));
        self.reclaim.list([(frame, FetchOrigin::Asked)], reservation.with_charge(charge));
        self.arena.view().own(frame).complete();
    }

    fn send(&self) {
        assert_eq!(self.reclaim.reclaim(1, LockWait::Wait), 0);
        assert_eq!(self.spill.under_way().0, u64::from(ORDER.pages()));
        assert_eq!(self.at(), MemoryEntry::Folio, "readers find it where it was");
    }

    fn spilled() -> Self {
        let fixture = Self::new(WriteFaults::default());
        fixture.send();
        fixture.spill.drain();
        let value = Value::spill(ORDER.0, 0);
        assert_eq!(fixture.at(), MemoryEntry::Spilled { first: FIRST, order: ORDER, value });
        fixture.check();
        fixture
    }

    fn grab<'a>(&'a self, wait_queue: &'a WaitQueue) -> Grabbed<'a> {
        let orders = Orders { min: Order(0), max: Order(9) };
        let shape = FolioShape { purpose: InsertPurpose::Write, ..FolioShape::of(orders) };
        let how = Grab { shape, on_locked: OnLocked::Wait, dirty: MarkDirty::OnInsert(Millis(3)) };
        let request = GrabRequest { pages: FIRST..FIRST.plus(16), how };
        let (grabbed, end) = self.mapping.grab(wait_queue, request, &mut NoFrames, &mut |_| {});
        assert_eq!((grabbed.len(), end), (1, GrabEnd::All));
        grabbed
    }

    fn at(&self) -> MemoryEntry {
        self.mapping.lock().at(FIRST, FIRST.plus(16))
    }

    /// Checks that all pages of the folio are dirty, and that it has no slots.
    fn stays(&self) {
        self.spill.drain();
        assert_eq!((self.at(), self.mapping.writeback().dirty_pages().dirty()), (MemoryEntry::Folio, 16));
        assert_eq!((self.spill.stats().pages, self.spill.stats().bytes), (0, 0));
        self.check();
    }

    fn check(&self) {
        self.mapping.check().unwrap();
        self.spill.check(self.mapping.spilled_values()).unwrap();
        self.reclaim.check().unwrap();
        self.arena.check().unwrap();
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.reclaim.remove_mapping(self.mapping.id());
    }
}

#[test]
fn a_folio_goes_and_its_frames_are_free() {
    let fixture = Fixture::spilled();
    assert_eq!((fixture.mapping.backing().spilled_pages(), fixture.spill.stats().bytes), (16, 16 << 12));
    assert_eq!(fixture.reclaim.weights().total(), 0);
    assert_eq!(fixture.mapping.lock().pages(), 0);
}

#[test]
fn no_more_folios_are_spilled_at_once_than_may_be_under_way() {
    let fixture = Fixture::new(WriteFaults::default());
    (2..64).for_each(|nth| fixture.add_at(PageIndex(16 * nth)));
    let max = fixture.spill.in_flight_max();
    assert!(max < 63 * 16, "there are more than {max}");
    assert_eq!(fixture.reclaim.reclaim(1000, LockWait::Wait), 0);
    let under_way = fixture.spill.under_way().0;
    assert!(under_way <= max && under_way > max / 2, "{under_way} pages, and {max} may be");
    fixture.spill.drain();
    fixture.check();
}

#[test]
fn a_folio_that_is_held_when_its_flush_ends_stays() {
    let fixture = Fixture::new(WriteFaults::default());
    fixture.send();
    let held = fixture.mapping.try_hold(FIRST).unwrap();
    fixture.stays();
    drop(held);
    fixture.send();
    fixture.spill.drain();
    assert_eq!(fixture.mapping.backing().spilled_pages(), 16);
    fixture.check();
}

#[test]
fn a_folio_that_is_written_on_its_way_stays() {
    let fixture = Fixture::new(WriteFaults::default());
    fixture.send();
    let held = fixture.mapping.try_hold(FIRST).unwrap();
    let page = FIRST.plus(3);
    assert!(!fixture.mapping.seems_dirty(&held, page), "its writer takes the lock");
    fixture.mapping.lock().mark_dirty(&held, page..page.plus(1), Millis(2));
    drop(held);
    fixture.stays();
}

#[test]
fn a_folio_that_is_locked_by_a_grab_when_its_flush_ends_stays() {
    let fixture = Fixture::new(WriteFaults::default());
    fixture.send();
    let held = fixture.mapping.try_hold(FIRST).unwrap();
    let descriptor = fixture.arena.view().own(held.frame());
    let stamp = descriptor.identify(fixture.mapping.id(), FIRST).unwrap();
    assert!(descriptor.try_lock(stamp).is_ok());
    fixture.spill.drain();
    assert_eq!((fixture.at(), fixture.mapping.writeback().dirty_pages().dirty()), (MemoryEntry::Folio, 16));
    assert_eq!(fixture.reclaim.reclaim(1, LockWait::Wait), 0);
    assert_eq!(fixture.spill.under_way().0, 0, "what is locked does not set out");
    descriptor.unlock();
    drop(held);
    fixture.stays();
}

#[test]
fn a_folio_that_is_populated_on_its_way_stays_with_its_new_bytes() {
    let (fixture, wait_queue) = (Fixture::new(WriteFaults::default()), WaitQueue::new());
    fixture.send();
    let mut grabbed = fixture.grab(&wait_queue);
    let page = FIRST.plus(3);
    grabbed.front_mut().unwrap().write(page.first_byte() + 5, &[9; 10]).unwrap();
    let ended = grabbed.commit();
    assert_eq!((ended.pages, ended.left), (16, 0));
    fixture.stays();
    let mut bytes = [0; 10];
    let held = fixture.mapping.try_hold(page).unwrap();
    assert_eq!((held.copy_out(page.first_byte() + 5, &mut bytes), bytes), (10, [9; 10]));
}

#[test]
fn a_folio_that_was_lent_to_be_stored_to_on_its_way_stays() {
    let (fixture, wait_queue) = (Fixture::new(WriteFaults::default()), WaitQueue::new());
    fixture.send();
    let mut grabbed = fixture.grab(&wait_queue);
    grabbed.front_mut().unwrap().touch_all();
    drop(grabbed.commit_into_held());
    fixture.stays();
}

#[test]
fn a_folio_that_was_grabbed_on_its_way_and_left_alone_goes() {
    let (fixture, wait_queue) = (Fixture::new(WriteFaults::default()), WaitQueue::new());
    fixture.send();
    drop(fixture.grab(&wait_queue));
    fixture.spill.drain();
    assert_eq!(fixture.mapping.backing().spilled_pages(), 16);
    fixture.check();
}

#[test]
fn a_folio_that_could_not_be_written_stays() {
    let fixture = Fixture::new(WriteFaults { errors: 1000, ..WriteFaults::default() });
    fixture.send();
    fixture.stays();
    assert_eq!(fixture.spill.stats().write_errors, 1);
    assert!(fixture.spill.trouble().unwrap().to_string().contains("cannot be written"));
    fixture.disk.mend();
}

#[test]
fn a_folio_that_is_taken_out_on_its_way_leaves_no_slot() {
    let fixture = Fixture::new(WriteFaults::default());
    fixture.send();
    assert_eq!(fixture.mapping.remove_range(FIRST..FIRST.plus(16), RemoveFilter::All), 16);
    assert_eq!(fixture.mapping.writeback().detached_pages(), 16, "who cuts the file waits for this");
    fixture.spill.drain();
    assert_eq!((fixture.mapping.writeback().detached_pages(), fixture.spill.stats().bytes), (0, 0));
    assert_eq!(fixture.at(), MemoryEntry::Hole { end: FIRST.plus(16) });
    fixture.check();
}

#[test]
fn a_mapping_that_dies_with_a_folio_on_its_way_leaves_no_slot() {
    let fixture = Fixture::new(WriteFaults::default());
    fixture.send();
    let (spill, arena) = (Arc::clone(&fixture.spill), Arc::clone(&fixture.arena));
    drop(fixture);
    spill.drain();
    assert_eq!(spill.stats().bytes, 0);
    spill.check([]).unwrap();
    arena.check().unwrap();
}

/// G17: an insertion, of one folio or of a run, takes no place of a spilled folio, whatever its size or purpose.
#[test]
fn g17_an_insertion_never_takes_the_place_of_spilled_pages() {
    let fixture = Fixture::spilled();
    for (index, order) in
        [(FIRST, ORDER), (FIRST.plus(5), Order(0)), (PageIndex(0), Order(5)), (FIRST.plus(8), Order(3))]
    {
        let frame = fixture.arena.alloc(order).unwrap();
        let folio = NewFolio { index, frame, order };
        for purpose in [InsertPurpose::Read, InsertPurpose::Write] {
            assert_eq!(fixture.mapping.add_folio(folio, purpose, LockWait::Wait), AddedFolio::Present);
        }
        let run = FillRun { index, frame, pages: order.pages() };
        let orders = Orders { min: Order(0), max: Order(0) };
        let before = FIRST.0.saturating_sub(index.0) as u32;
        let added = fixture
            .mapping
            .add_folio_range(run, FolioShape::of(orders), LockWait::Wait, &mut |_, _| {})
            .unwrap();
        assert_eq!(added.pages, before.min(order.pages()), "what comes before it");
        let (left, pages) = (Frame(frame.0 + added.pages), order.pages() - added.pages);
        for page in 0..added.pages {
            fixture.arena.view().own(frame.plus(page)).complete_empty();
        }
        fixture.mapping.remove_range(PageIndex(0)..FIRST, RemoveFilter::All);
        fixture.arena.free_run(left, pages);
        assert_eq!(fixture.mapping.backing().spilled_pages(), 16);
    }
    assert_eq!(
        fixture.mapping.lock().next_gap(FIRST, FIRST.plus(20)),
        Some((FIRST.plus(16), 4)),
        "it is no gap"
    );
    assert_eq!(fixture.mapping.seek_memory(PageIndex(0)..FIRST.plus(20), SeekTarget::Data), Some(FIRST));
    assert_eq!(fixture.mapping.remove_range(FIRST..FIRST.plus(16), RemoveFilter::Clean), 0, "and not clean");
    fixture.check();
}

#[test]
fn a_value_is_parted_at_an_edge_and_its_slots_go_with_its_pieces() {
    let fixture = Fixture::spilled();
    let edge = FIRST.plus(5);
    assert_eq!(fixture.mapping.remove_range(edge..FIRST.plus(40), RemoveFilter::All), 0);
    assert_eq!(fixture.mapping.backing().spilled_pages(), 16, "what reaches over an edge stays");
    let part = |edge| fixture.mapping.lock_to_add(PageIndex(0), 512, LockWait::Wait).unwrap().part_at(edge);
    assert_eq!(part(edge), PartOutcome::Done);
    let pieces = [(2, 0), (0, 4), (0, 5), (1, 6), (3, 8)];
    assert_eq!(fixture.mapping.spilled_values(), pieces.map(|(order, slot)| Value::spill(order, slot)));
    fixture.check();
    assert_eq!(part(edge), PartOutcome::Done, "nothing is left to be done");
    fixture.mapping.remove_range(edge..FIRST.plus(40), RemoveFilter::All);
    assert_eq!((fixture.mapping.backing().spilled_pages(), fixture.spill.stats().bytes), (5, 5 << 12));
    fixture.check();
}

#[test]
fn a_part_is_restored_and_the_pages_around_it_stay_spilled() {
    let fixture = Fixture::spilled();
    let values = fixture.mapping.lock().spilled_from(FIRST.plus(9)..FIRST.plus(10));
    assert_eq!(values, [(FIRST, Value::spill(ORDER.0, 0))]);
    let frame = fixture.arena.alloc(Order(2)).unwrap();
    let folios: Vec<_> = [(4, 0, 0), (5, 1, 0), (6, 2, 1)]
        .map(|(page, nth, order)| NewFolio {
            index: FIRST.plus(page),
            frame: frame.plus(nth),
            order: Order(order),
        })
        .into();
    let mut held = Vec::new();
    let lock = || fixture.mapping.lock_to_add(FIRST, 16, LockWait::Wait).unwrap();
    assert_eq!(lock().restore(&values, &folios, &mut held), RestoreOutcome::Done);
    assert_eq!(
        (held.len(), fixture.mapping.writeback().dirty_pages().dirty(), fixture.mapping.lock().pages()),
        (3, 4, 4)
    );
    let pieces = [(2, 0), (3, 8)];
    assert_eq!(fixture.mapping.spilled_values(), pieces.map(|(order, slot)| Value::spill(order, slot)));
    assert_eq!(fixture.spill.stats().bytes, 12 << 12);
    fixture.spill.check(fixture.mapping.spilled_values()).unwrap();
    assert_eq!(
        lock().restore(&values, &folios, &mut held),
        RestoreOutcome::Changed,
        "it was there, and is no more"
    );
    drop(held);
}

/// A value says no more than its order and its first slot: a later folio that got that slot would have the value of the
/// folio of which a part is read.
#[test]
fn a_folio_of_which_a_part_is_read_keeps_all_of_its_slots() {
    let fixture = Fixture::spilled();
    let value = fixture.mapping.spilled_values()[0];
    let shared = fixture.spill.begin_share(value, 2..4);
    fixture.mapping.remove_range(FIRST..FIRST.plus(16), RemoveFilter::All);
    assert_eq!(fixture.spill.stats().bytes, 16 << 12, "they are shared");
    fixture.add();
    fixture.send();
    fixture.spill.drain();
    assert_eq!(fixture.mapping.spilled_values(), [Value::spill(ORDER.0, 16)], "other slots");
    drop(shared);
    assert_eq!(fixture.spill.stats().bytes, 16 << 12, "those of the later folio");
}

#[test]
fn slots_truncated_during_a_read_are_not_given_out() {
    let fixture = Fixture::spilled();
    let values = fixture.mapping.spilled_values();
    let reading = fixture.spill.begin_read(&values).unwrap();
    assert!(fixture.spill.begin_read(&values).is_err(), "one at a time");
    fixture.mapping.remove_range(FIRST..FIRST.plus(16), RemoveFilter::All);
    assert_eq!(fixture.spill.stats().bytes, 16 << 12, "they are being read");
    fixture.add();
    fixture.send();
    fixture.spill.drain();
    assert_eq!(fixture.mapping.spilled_values(), [Value::spill(ORDER.0, 16)], "other slots");
    drop(reading);
    assert_eq!(fixture.spill.stats().bytes, 16 << 12);
    fixture.check();
}

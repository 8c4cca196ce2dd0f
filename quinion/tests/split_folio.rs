//! Live folios are split: the pieces are what the whole was, page by page, in the tree, the rings, the bits and the
//! counts.
//!
//! ```text
//!   a few folios, dirty here and there --split at random edges--> the same pages, the same numbers, smaller folios
//! ```
#![cfg(not(quinion_model))]
#![allow(unsafe_code, reason = "frames are filled by address")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use quinion::backend::{Backend, FillRun, MemoryFile};
use quinion::internals::arena::{Arena, ArenaOptions, Flags, NotReady};
use quinion::internals::folio::{copy, unpin};
use quinion::internals::mapping::{
    AskedFor, DetachOutcome, FolioLifetime, FolioShape, InFlightFolio, Mapping, MarkOutcome, NewMapping,
    RemoveFilter, SplitOutcome, TakeFilter, WritebackOutcome,
};
use quinion::internals::policy::FetchOrigin;
use quinion::internals::reclaim::Reclaim;
use quinion::internals::stats::Counters;
use quinion::internals::sync::LockWait;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{Frame, MappingId, Millis, Order, Orders, PAGE_SIZE, PageIndex, PoolNumber};
use quinion_testing::content::{page_content, verify};

const FILE: u32 = 3;

struct Fixture {
    arena: Arc<Arena>,
    reclaim: Reclaim,
    mapping: Arc<Mapping>,
}

fn page(index: u64) -> PageIndex {
    PageIndex(index)
}

impl Fixture {
    fn new() -> Self {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 24 << 20 }).unwrap());
        let reclaim = Reclaim::new(Arc::clone(&arena), Arc::new(Counters::default()));
        let file: Arc<dyn Backend> = Arc::new(MemoryFile::new(vec![0; 4096 * PAGE_SIZE]));
        let known = file.attributes().unwrap();
        let (id, process) = (MappingId(1), ForkGuard::new());
        let new = NewMapping { arena: &arena, id, backend: file, attributes: &known, process };
        let mapping =
            Mapping::new(new).unwrap().with_shadow_nodes(reclaim.shadow_nodes()).with_lists(reclaim.lists());
        let mapping = Arc::new(mapping);
        reclaim.add_mapping(Arc::clone(&mapping));
        Self { arena, reclaim, mapping }
    }

    fn add_filling(&self, first: u64, order: u8, fate: FolioLifetime) -> Frame {
        let (frame, order) = (self.arena.alloc(Order(order)).unwrap(), Order(order));
        let run = FillRun { index: page(first), frame, pages: order.pages() };
        let marker = Some(page(first));
        let wanted = AskedFor::All;
        let shape =
            FolioShape { marker, wanted, fate, ..FolioShape::of(Orders { min: Order::ZERO, max: order }) };
        let lists = self.reclaim.lists();
        let charge = lists.charge(PoolNumber::DEFAULT, order.pages(), Order::ZERO);
        let reservation = lists.reserve(1, LockWait::Wait).unwrap().with_charge(charge);
        let added = self.mapping.add_folio_range(run, shape, LockWait::Wait, &mut |_, _| {}).unwrap();
        assert_eq!(added.pages, order.pages());
        self.reclaim.list([(frame, FetchOrigin::Asked)], reservation);
        for nth in 0..order.pages() {
            let content = page_content(FILE, first + u64::from(nth), 1);
            let to = self.arena.view().bytes(frame.plus(nth)).unwrap();
            // SAFETY: the folio is locked and its fill is this test's, so no other thread writes its frames.
            unsafe { copy::copy_in(content.as_ptr(), to, content.len()) };
        }
        frame
    }

    fn add(&self, first: u64, order: u8, fate: FolioLifetime) -> Frame {
        let frame = self.add_filling(first, order, fate);
        self.arena.view().own(frame).complete();
        frame
    }

    fn dirty(&self, index: u64) {
        let held = self.mapping.try_hold(page(index)).unwrap();
        let marked = self.mapping.lock().mark_dirty(&held, page(index)..page(index + 1), Millis(5));
        assert!(matches!(marked, MarkOutcome::Done { .. }));
    }

    fn folio(&self, index: u64) -> Option<(u64, u8)> {
        let held = self.mapping.try_hold(page(index)).ok()?;
        Some((held.first().0, held.order().0))
    }

    #[track_caller]
    fn check(&self) {
        self.mapping.check().unwrap();
        self.reclaim.check().unwrap();
        self.arena.check().unwrap();
    }
    fn charged(&self) -> u64 {
        self.reclaim.lists().charged(PoolNumber::DEFAULT)
    }
    fn word(&self, frame: Frame) -> quinion::internals::arena::DescriptorWord {
        self.arena.view().own(frame).word()
    }

    fn finish(self) {
        self.check();
        self.reclaim.remove_mapping(self.mapping.id());
        let pages = self.mapping.lock().pages();
        assert_eq!(self.mapping.remove_range(page(0)..page(1 << 40), RemoveFilter::All), pages);
        assert_eq!((self.charged(), self.mapping.writeback().dirty_pages().total()), (0, 0));
        drop((self.mapping, self.reclaim));
        let stats = self.arena.stats();
        assert_eq!(stats.free_pages * 4096, stats.data_bytes);
        self.arena.check().unwrap();
    }
}

#[test]
fn pieces_have_the_state_of_the_whole() {
    let fixture = Fixture::new();
    let frame = fixture.add(512, 9, FolioLifetime::Stays);
    fixture.arena.view().referenced(frame).unwrap().store(2, Ordering::Relaxed);
    fixture.dirty(512 + 77);
    fixture.dirty(512 + 100);
    let (pages, charged) = (fixture.mapping.lock().pages(), fixture.charged());
    assert_eq!(fixture.mapping.split_at(page(512 + 77)), SplitOutcome::Done);
    fixture.check();
    assert_eq!((fixture.mapping.lock().pages(), fixture.charged()), (pages, charged));
    let orders = [(0, 6), (64, 3), (72, 2), (76, 0), (77, 0), (78, 1), (80, 4), (96, 5), (128, 7), (256, 8)];
    for (first, order) in orders {
        let head = frame.plus(first);
        assert_eq!(fixture.folio(u64::from(512 + first)), Some((u64::from(512 + first), order)));
        let word = fixture.word(head);
        assert!(word.has(Flags::UPTODATE) && word.has(Flags::STEADY) && word.holds() == 0);
        assert_eq!(word.has(Flags::MARKER), first == 0, "the marker is the first's");
        assert_eq!(word.has(Flags::DIRTY), first == 77 || first == 96);
        assert_eq!(fixture.arena.view().referenced(head).unwrap().load(Ordering::Relaxed), 2);
    }
    for nth in 0..512 {
        let held = fixture.mapping.try_hold(page(512 + nth)).unwrap();
        let mut bytes = [0; PAGE_SIZE];
        held.copy_out((512 + nth) * 4096, &mut bytes);
        verify(&bytes, FILE, (512 + nth) * 4096).unwrap();
    }
    assert_eq!(fixture.mapping.split_at(page(512 + 77)), SplitOutcome::Done, "and that is all");
    assert_eq!(fixture.mapping.split_at(page(5000)), SplitOutcome::Done, "nobody is there");
    fixture.finish();
}

/// D17: when a flagged folio is split each piece is flagged, and the count of flagged dirty pages stays right.
#[test]
fn d17_every_piece_of_a_flagged_folio_is_flagged() {
    let fixture = Fixture::new();
    fixture.add(0, 5, FolioLifetime::DropsBehind);
    fixture.dirty(9);
    fixture.dirty(30);
    assert_eq!(fixture.mapping.writeback().dirty_pages().drop_behind(), 2);
    assert_eq!(fixture.mapping.split_at(page(9)), SplitOutcome::Done);
    assert_eq!(fixture.mapping.split_at(page(10)), SplitOutcome::Done);
    let mut at = 0;
    while at < 32 {
        let (first, order) = fixture.mapping.index().find_behind(page(at)).expect("it is flagged");
        assert_eq!(first.0, at);
        at += u64::from(order.pages());
    }
    fixture.check();
    assert_eq!(
        fixture.mapping.writeback().dirty_pages().drop_behind(),
        2,
        "D16: the count is that of the pages"
    );
    fixture.mapping.remove_range(page(9)..page(10), RemoveFilter::All);
    assert_eq!(fixture.mapping.writeback().dirty_pages().drop_behind(), 1);
    fixture.mapping.remove_range(page(0)..page(32), RemoveFilter::All);
    assert_eq!(fixture.mapping.writeback().dirty_pages().drop_behind(), 0);
    fixture.finish();
}

/// D16: after a split the counter of flagged dirty pages returns to 0 by write-back and by a plain overwrite as well:
/// each piece takes its own pages out of it.
#[test]
fn d16_the_counter_of_flagged_dirty_pages_returns_to_nothing_after_a_split() {
    type EndsBeingDirty = fn(&Fixture);
    let ends: [(&str, EndsBeingDirty); 2] = [
        ("write-back", |fixture| {
            let mut runs = Vec::new();
            fixture.mapping.lock().begin_writeback(page(0)..page(32), TakeFilter::Dirty, 100, &mut runs);
            assert_eq!(runs.iter().map(|run| run.pages).sum::<u32>(), 2);
            for run in runs {
                fixture.mapping.lock().end_writeback(run, WritebackOutcome::Written, Millis(9));
            }
        }),
        ("a plain overwrite", |fixture| {
            for (at, left) in [(9, 1), (30, 0)] {
                let held = fixture.mapping.try_hold(page(at)).unwrap();
                fixture.mapping.lock().adopt(&held);
                assert_eq!(fixture.mapping.writeback().dirty_pages().drop_behind(), left);
            }
        }),
    ];
    for (name, end) in ends {
        let fixture = Fixture::new();
        fixture.add(0, 5, FolioLifetime::DropsBehind);
        fixture.dirty(9);
        fixture.dirty(30);
        assert_eq!(fixture.mapping.split_at(page(16)), SplitOutcome::Done);
        assert_eq!(fixture.mapping.writeback().dirty_pages().drop_behind(), 2, "{name}");
        end(&fixture);
        assert_eq!(fixture.mapping.writeback().dirty_pages().drop_behind(), 0, "{name}");
        fixture.finish();
    }
}

#[test]
fn a_reader_of_a_folio_that_is_split_meanwhile_reads_anew() {
    let fixture = Fixture::new();
    let frame = fixture.add(16, 4, FolioLifetime::Stays);
    let descriptor = fixture.arena.view().own(frame);
    let (early, late) = (
        descriptor.begin_read(MappingId(1), page(16)).unwrap(),
        descriptor.begin_read(MappingId(1), page(31)).unwrap(),
    );
    assert_eq!(fixture.mapping.split_at(page(20)), SplitOutcome::Done);
    assert!(!descriptor.end_read(early) && !descriptor.end_read(late));
    assert_eq!(descriptor.begin_read(MappingId(1), page(31)).unwrap_err(), NotReady::Mismatch);
    let stamp = descriptor.begin_read(MappingId(1), page(19)).unwrap();
    assert!(descriptor.end_read(stamp));
    // A stale victim of the reclaimer's is not taken for a piece, written or not.
    let sequence = descriptor.word().sequence();
    fixture.mapping.try_hold(page(16)).unwrap().writer().unwrap();
    assert!(descriptor.word().is_still(sequence) && descriptor.word().is_written());
    assert_eq!(fixture.mapping.split_at(page(18)), SplitOutcome::Done);
    assert!(!descriptor.word().is_still(sequence) && !descriptor.word().is_still(sequence + 2));
    assert!(descriptor.word().is_written(), "what was written stays so");
    fixture.finish();
}

#[test]
fn a_folio_held_pinned_filled_written_or_unlisted_is_not_split() {
    let fixture = Fixture::new();
    fixture.add(0, 3, FolioLifetime::Stays);
    let held = fixture.mapping.try_hold(page(1)).unwrap();
    assert_eq!(fixture.mapping.split_at(page(4)), SplitOutcome::Busy);
    let (pinned, _) = held.into_pin();
    assert_eq!(fixture.mapping.split_at(page(4)), SplitOutcome::Busy);
    assert_eq!(fixture.mapping.first_pinned(page(7)..page(9)), Some(page(0)));
    unpin(&fixture.arena, pinned);
    assert_eq!(fixture.mapping.first_pinned(page(0)..page(100)), None);
    // Under write-back.
    fixture.dirty(6);
    let mut runs = Vec::new();
    fixture.mapping.lock().begin_writeback(page(0)..page(8), TakeFilter::Dirty, 100, &mut runs);
    assert_eq!(fixture.mapping.split_at(page(4)), SplitOutcome::Busy);
    assert!(matches!(fixture.mapping.find_in_flight(page(0)..page(8)), InFlightFolio::Folio(_)));
    fixture.mapping.lock().end_writeback(runs[0], WritebackOutcome::Written, Millis(9));
    assert_eq!(fixture.mapping.split_at(page(4)), SplitOutcome::Done);
    // Being filled.
    let frame = fixture.add_filling(8, 3, FolioLifetime::Stays);
    assert_eq!(fixture.mapping.split_at(page(9)), SplitOutcome::Busy);
    assert!(matches!(fixture.mapping.find_in_flight(page(0)..page(16)), InFlightFolio::Folio(_)));
    fixture.arena.view().own(frame).complete();
    assert!(matches!(fixture.mapping.find_in_flight(page(0)..page(16)), InFlightFolio::None(PageIndex(16))));
    // Popped by the reclaimer, who has yet to evict it.
    {
        let mut reservation = fixture.reclaim.lists().empty_reservation(PoolNumber::DEFAULT);
        let popped: Vec<_> = (0..4)
            .filter_map(|ring| fixture.reclaim.lists().lock().pop(ring, &mut reservation).map(|_| ring))
            .collect();
        assert!(!popped.is_empty());
    }
    fixture.mapping.lock().remove_all();
    fixture.finish();
}

#[test]
fn a_detached_folio_leaves_copies_of_its_dirty_and_wanted_pages() {
    for unit in [0, 2] {
        let fixture = Fixture::new();
        let frame = fixture.add(64, 5, FolioLifetime::Stays);
        [65, 70, 71, 90].into_iter().for_each(|index| fixture.dirty(index));
        let held = fixture.mapping.try_hold(page(64)).unwrap();
        let copied = fixture.mapping.detach_copy(&held, page(88)..page(96), Order(unit));
        let pages = if unit == 0 { 3 } else { 8 };
        assert_eq!(copied, DetachOutcome::Done { pages });
        assert_eq!(fixture.mapping.detach_copy(&held, page(0)..page(0), Order(unit)), DetachOutcome::Removed);
        fixture.check();
        assert_eq!(fixture.mapping.writeback().dirty_pages().dirty(), 3);
        for index in [65, 70, 71] {
            let copy = fixture.mapping.try_hold(page(index)).unwrap();
            assert!(copy.frame() != frame && copy.order() == Order(unit));
            assert!(fixture.mapping.is_dirty(&copy, page(index)..page(index + 1)));
            let mut bytes = [0; PAGE_SIZE];
            copy.copy_out(index * 4096, &mut bytes);
            verify(&bytes, FILE, index * 4096).unwrap();
        }
        assert_eq!(fixture.folio(90), None);
        let mut bytes = vec![0; 32 * PAGE_SIZE];
        held.copy_out(64 * 4096, &mut bytes);
        verify(&bytes, FILE, 64 * 4096).unwrap();
        drop(held);
        fixture.finish();
    }
}

#[test]
fn clean_pages_go_and_dirty_ones_stay_when_only_clean_pages_are_removed() {
    let fixture = Fixture::new();
    fixture.add(0, 4, FolioLifetime::Stays);
    fixture.add(16, 2, FolioLifetime::Stays);
    [3, 4, 9, 16].into_iter().for_each(|index| fixture.dirty(index));
    let mut edges = Vec::new();
    let mut at = 0;
    while let Some(edge) = { fixture.mapping.lock().next_mixed(page(at)..page(20)) } {
        assert_eq!(fixture.mapping.split_at(edge), SplitOutcome::Done);
        edges.push(edge.0);
        at = edge.0.max(at + 1);
    }
    assert_eq!(edges, [3, 5, 9, 17]);
    assert_eq!(fixture.mapping.remove_range(page(0)..page(20), RemoveFilter::Clean), 16);
    let left: Vec<u64> = (0..20).filter(|&index| fixture.folio(index).is_some()).collect();
    assert_eq!(left, [3, 4, 9, 16]);
    fixture.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]
    /// The twin knows which pages there are, which are dirty, and where a folio may not reach over.
    #[test]
    fn any_splits_and_removals_leave_the_pages_that_they_should(
        orders in proptest::collection::vec((0..10u8, any::<bool>()), 1..6),
        dirty in proptest::collection::vec(0..2048u64, 0..60),
        steps in proptest::collection::vec((0..2048u64, 0..200u64, 0..4u8), 1..25),
    ) {
        let fixture = Fixture::new();
        let (mut pages, mut at) = (BTreeSet::new(), 0u64);
        for (order, behind) in orders {
            at = page(at).align_up(Order(order)).0;
            fixture.add(at, order, if behind { FolioLifetime::DropsBehind } else { FolioLifetime::Stays });
            pages.extend(at..at + (1 << order));
            at += 1 << order;
        }
        let mut dirty: BTreeSet<u64> = dirty.into_iter().filter(|index| pages.contains(index)).collect();
        dirty.iter().for_each(|&index| fixture.dirty(index));
        for (from, len, what) in steps {
            let end = from + len;
            match what {
                0 | 1 => {
                    prop_assert_eq!(fixture.mapping.split_at(page(from)), SplitOutcome::Done);
                    prop_assert!(fixture.folio(from).is_none_or(|(first, _)| first == from));
                }
                _ => {
                    prop_assert_eq!(fixture.mapping.split_at(page(from)), SplitOutcome::Done);
                    prop_assert_eq!(fixture.mapping.split_at(page(end)), SplitOutcome::Done);
                    let gone: Vec<u64> = pages.range(from..end).copied().collect();
                    let removed = fixture.mapping.remove_range(page(from)..page(end), RemoveFilter::All);
                    prop_assert_eq!(removed, gone.len() as u64);
                    for index in gone {
                        pages.remove(&index);
                        dirty.remove(&index);
                    }
                }
            }
            fixture.check();
            prop_assert_eq!(fixture.mapping.lock().pages(), pages.len() as u64);
            prop_assert_eq!(fixture.charged(), pages.len() as u64);
            prop_assert_eq!(fixture.mapping.writeback().dirty_pages().dirty(), dirty.len() as u64);
        }
        for index in 0..at {
            let held = fixture.mapping.try_hold(page(index)).ok();
            prop_assert_eq!(held.is_some(), pages.contains(&index));
            if let Some(held) = held {
                let mut bytes = [0; PAGE_SIZE];
                held.copy_out(index * 4096, &mut bytes);
                prop_assert!(verify(&bytes, FILE, index * 4096).is_ok());
                prop_assert_eq!(fixture.mapping.is_dirty(&held, page(index)..page(index + 1)), dirty.contains(&index));
            }
        }
        fixture.finish();
    }
}

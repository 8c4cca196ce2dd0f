//! Batched reads: which folios a batch is made of, what it reads of the tree, what it leaves behind.
//!
//! Tests named R and a number hold the statement of that number. Those that are not here:
//!
//! | statement | where, or why not |
//! |---|---|
//! | R12 a file that shrinks between look-up and copy | `tests/write.rs`, `src/shmem/tests.rs` |
//! | R13 a file that grows during a read | `tests/write.rs` |
//! | R14 reads at and past the end | `tests/read.rs` |
//! | R15 a destination that faults | a destination is a `&mut [u8]`: it does not fault |
//! | R16 a hole of many pages is zeroes in one step | `tests/mem_file.rs`; a file's hole is the device's to fill |
//! | R17 a folio that was allocated and never written | `src/shmem/tests.rs` |
//! | R19 truncation while a batch is held | `tests/write.rs`, `src/shmem/tests.rs`; for invalidation: `tests/read.rs` |
//! | R21 pages that were spilled | `tests/spill.rs` |
//! | R22 a lookup that allocates nothing | `src/shmem/tests.rs` |
//!
//! Slot reads are counted: the batch is gathered over an allocator of nodes that sees each of them, and that can remove
//! and insert folios between two of them. Trees here have two levels, because a page far out makes them so: a descent
//! reads two slots.

use quinion_testing::content;
use quinion_testing::device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use quinion::internals::arena::{HOLDS_MAX, ReadableState};
use quinion::internals::mapping::{BATCH_FOLIOS_MAX, BatchEnd, BatchRules, LastFolioRule, ReadBatch};
use quinion::internals::policy::FetchOrigin;
use quinion::internals::reclaim::Reclaim;
use quinion::internals::stats::Counters;
use quinion::internals::units::PageIndex;
use quinion::internals::xarray::{Entry, Walker};
use quinion_testing::content::Dice;
use quinion_testing::fixtures::batch::{BatchFixture, FILE, Moment, Shape, State, Watch, shape, shapes};

const PAGE: u64 = 4096;
/// Far enough for a tree of two levels.
const FAR: u64 = 64 * 63;
const DESCENT: u32 = 2;
const CONFIRM: u32 = 1;
const STEP: u32 = 1;

fn fixture_of(pages: impl IntoIterator<Item = u64>) -> BatchFixture {
    let fixture = BatchFixture::new();
    fixture.add(FAR, 0, State::Ready);
    pages.into_iter().for_each(|page| _ = fixture.add(page, 0, State::Ready));
    fixture
}

fn ones(pages: impl IntoIterator<Item = u64>) -> Vec<Shape> {
    pages.into_iter().map(|page| (page, 0)).collect()
}

// ---- what is in -----------------------------------------------------------------------------------------

/// R01: a batch of a range that ends before it begins is empty.
#[test]
fn r01_a_range_that_ends_before_it_begins_is_empty() {
    let fixture = fixture_of(0..4);
    assert_eq!(fixture.gather(3, 2, BatchRules::READ), (BatchEnd::Covered, vec![], 0));
    assert_eq!(fixture.gather(u64::MAX, 0, BatchRules::CONTIG), (BatchEnd::Covered, vec![], 0));
    // The folios of the first batch are released all the same.
    let (_, mut batch) = fixture.batch(0, 3);
    assert_eq!(fixture.mapping.get_read_batch(PageIndex(1), PageIndex(0), &mut batch), BatchEnd::Covered);
    assert!(batch.is_empty());
    fixture.let_all_go();
    fixture.check();
}

const BOTH: [BatchRules; 2] = [BatchRules::READ, BatchRules::CONTIG];

/// R02: a batch of one cached page costs its descent and one slot read after it, of a file and of a memory file.
#[test]
fn r02_one_cached_page_costs_one_slot_read_after_the_descent() {
    let fixture = fixture_of(0..64);
    for (page, rules) in [0, 5, 62, 63].into_iter().flat_map(|page| BOTH.map(|rules| (page, rules))) {
        let gathered = fixture.gather(page, page, rules);
        assert_eq!(gathered, (BatchEnd::Covered, ones([page]), DESCENT + CONFIRM));
        let past = fixture.gather(page, page, BatchRules { at_end: LastFolioRule::ReadPast, ..rules });
        assert_eq!((past.0, past.1), (gathered.0, gathered.1));
        // Behind 63 the leaf ends; 64 is not there, and to learn that takes a descent to the hole above.
        assert_eq!(past.2, gathered.2 + STEP, "the step that is not taken would have been seen");
    }
}

/// R03: a batch holds as many cached folios as it has places, and the next goes on behind it: none skipped, none
/// repeated.
#[test]
fn r03_a_read_of_many_folios_is_batches_that_join() {
    let fixture = fixture_of(0..100);
    let lengths = [1, 2, 30, 31, 32, 62, 63, 64, 65, 100];
    for (pages, rules) in lengths.into_iter().flat_map(|pages| BOTH.map(|rules| (pages, rules))) {
        let (mut from, mut seen) = (0, Vec::new());
        while from < pages {
            let (end, folios, reads) = fixture.gather(from, pages - 1, rules);
            let count = (pages - from).min(BATCH_FOLIOS_MAX as u64);
            assert_eq!(folios.len() as u64, count);
            assert_eq!(end, if from + count == pages { BatchEnd::Covered } else { BatchEnd::Full });
            let leaves = ((from + count - 1) / 64 - from / 64 + 1) as u32;
            let slots = leaves * DESCENT + (count as u32 - leaves) * STEP + count as u32 * CONFIRM;
            assert_eq!(reads, slots, "{count} folios from {from} on");
            seen.extend(folios);
            from += count;
        }
        assert_eq!(seen, ones(0..pages), "no skip, no repeat");
    }
}

/// R04: a range that begins within a large folio gets that folio first and once, and the bytes from there.
#[test]
fn r04_a_range_that_begins_inside_a_folio_gets_it_once_and_first() {
    for order in [1u8, 4, 6] {
        let fixture = fixture_of([1 << 7]);
        fixture.add(1 << 6, order, State::Ready);
        let behind = (1 << 6) + (1 << order);
        if order < 6 {
            fixture.add(behind, 0, State::Ready);
        }
        let inside = behind - 1;
        let (end, batch) = fixture.batch(inside, behind);
        assert_eq!(shapes(&batch), [(64, order), (behind, 0)]);
        assert_eq!(end, BatchEnd::Covered);
        for rules in BOTH {
            assert_eq!(fixture.gather(inside, behind, rules).1, [(64, order), (behind, 0)]);
        }
        let (mut bytes, position) = ([0; 1000], inside * PAGE + 77);
        assert_eq!(batch.iter().next().unwrap().copy_out(position, &mut bytes), 1000);
        content::verify(&bytes, FILE, position).unwrap();
    }
}

/// R05: a range that ends within a large folio includes it, and reads no slot behind it.
#[test]
fn r05_a_range_that_ends_inside_a_folio_ends_with_it() {
    let fixture = fixture_of([15, 32]);
    fixture.add(16, 4, State::Ready);
    for (last, rules) in (16..32).flat_map(|last| BOTH.map(|rules| (last, rules))) {
        let (end, folios, reads) = fixture.gather(15, last, rules);
        assert_eq!((end, folios), (BatchEnd::Covered, vec![(15, 0), (16, 4)]));
        assert_eq!(reads, DESCENT + CONFIRM + STEP + CONFIRM, "no slot behind the folio, and none twice");
    }
    // A folio that takes a whole slot of the upper level, and the end of the tree behind it.
    fixture.add(64, 6, State::Ready);
    let (end, folios, reads) = fixture.gather(70, 80, BatchRules::READ);
    assert_eq!((end, folios, reads), (BatchEnd::Covered, vec![(64, 6)], 1 + CONFIRM));
}

/// R06: a batch ends before a hole or a shadow.
#[test]
fn r06_a_hole_or_a_shadow_ends_a_batch_before_it() {
    let fixture = fixture_of([0, 1, 2, 8, 9]);
    fixture.add_shadow(10, 1);
    for rules in [BatchRules::READ, BatchRules::CONTIG] {
        assert_eq!(
            fixture.gather(1, 9, rules),
            (BatchEnd::Absent, ones([1, 2]), DESCENT + 2 * STEP + 2 * CONFIRM)
        );
        assert_eq!(fixture.gather(8, 20, rules).0, BatchEnd::Absent);
        assert_eq!(fixture.gather(8, 20, rules).1, ones([8, 9]));
        for nothing in [3, 7, 10, 11, 100, FAR + 1, 1 << 40, u64::MAX] {
            assert_eq!(fixture.gather(nothing, u64::MAX, rules).0, BatchEnd::Absent);
            assert_eq!(fixture.gather(nothing, u64::MAX, rules).1, []);
        }
    }
}

/// R07: a folio that is not ready ends a batch. It is waited for only if it is the first; else the batch is what came
/// before it.
#[test]
fn r07_a_folio_that_is_not_ready_is_left_out_unless_it_is_the_first() {
    let fixture = fixture_of([0, 1, 2, 4]);
    let frame = fixture.add(3, 0, State::Filling);
    assert_eq!(fixture.gather(0, 4, BatchRules::READ).1, ones(0..3));
    assert_eq!(fixture.gather(0, 4, BatchRules::READ).0, BatchEnd::NotReady);
    assert_eq!(fixture.holds(frame), 1, "the fill's alone");
    let (end, batch) = fixture.batch(3, 4);
    assert_eq!((end, shapes(&batch)), (BatchEnd::FirstNotReady, ones([3])));
    assert_eq!(fixture.holds(frame), 2, "the fill's and ours");
    assert_eq!(batch.last().unwrap().is_readable(), ReadableState::NotYet);
    assert_eq!(
        fixture.gather(0, 4, BatchRules::CONTIG).1,
        ones(0..5),
        "the contiguous look-up takes it as it is"
    );
    fixture.complete(frame);
    assert_eq!(batch.last().unwrap().is_readable(), ReadableState::Yes, "what was waited for");
    assert_eq!(fixture.gather(0, 4, BatchRules::READ).1, ones(0..5));
}

/// R08: a folio with the readahead marker is the last of its batch.
#[test]
fn r08_a_folio_with_the_marker_is_the_last() {
    let fixture = fixture_of([0, 1, 4, 5]);
    fixture.add(2, 1, State::Marked);
    assert_eq!(fixture.gather(0, 5, BatchRules::READ).0, BatchEnd::Marked);
    assert_eq!(fixture.gather(0, 5, BatchRules::READ).1, [(0, 0), (1, 0), (2, 1)]);
    assert_eq!(fixture.gather(0, 2, BatchRules::READ).0, BatchEnd::Marked, "though it covers the last index");
    assert_eq!(fixture.gather(0, 5, BatchRules::CONTIG).0, BatchEnd::Covered);
    assert!(fixture.mapping.index().take_marker(PageIndex(3)));
    assert_eq!(fixture.gather(0, 5, BatchRules::READ).0, BatchEnd::Covered);
    fixture.add(6, 1, State::MarkedFilling);
    assert_eq!(
        fixture.gather(4, 7, BatchRules::READ).0,
        BatchEnd::NotReady,
        "a marker on what is not ready waits too"
    );
    assert_eq!(
        fixture.gather(6, 7, BatchRules::READ),
        (BatchEnd::FirstNotReady, vec![(6, 1)], DESCENT + CONFIRM)
    );
}

// ---- what changes meanwhile -----------------------------------------------------------------------------

fn gather_while<'s>(
    fixture: &'s BatchFixture,
    moment: Moment,
    act: impl FnMut() + 's,
) -> (BatchEnd, ReadBatch<'s>, u32) {
    let watch = Watch::acting(fixture.arena.view().grown(), moment, act);
    let mut batch = ReadBatch::new();
    let end = fixture.mapping.gather(&watch, PageIndex(0), PageIndex(3), &mut batch, BatchRules::READ);
    (end, batch, watch.reads.get())
}

/// R09: a folio that leaves between the read of its slot and the hold on it is sought again, and is not held.
#[test]
fn r09_a_folio_that_leaves_between_slot_and_hold_is_sought_again_and_never_held() {
    // The first folio, and then one that was reached by a step within the leaf.
    for (page, slot_read) in [(0, DESCENT), (1, DESCENT + CONFIRM + STEP)] {
        let fixture = fixture_of([]);
        let frames: Vec<_> = (0..4).map(|page| fixture.add(page, 0, State::Ready)).collect();
        let frame = frames[page as usize];
        let (end, batch, reads) =
            gather_while(&fixture, Moment::After(slot_read), || assert!(fixture.evict(page, frame)));
        assert_eq!((end, shapes(&batch)), (BatchEnd::Absent, ones(0..page)));
        assert_eq!(reads, slot_read + DESCENT, "from the root again, once");
        assert_eq!(fixture.holds(frame), 0);
        drop(batch);
        fixture.check();
    }
}

/// R09: when the page has come back meanwhile, in another frame, the new folio is the one that is found.
#[test]
fn r09_a_folio_that_came_back_meanwhile_is_found_where_it_is_now() {
    let fixture = fixture_of(1..4);
    let (old, new) = (fixture.add(0, 0, State::Ready), std::cell::Cell::new(None));
    let (end, batch, _) = gather_while(&fixture, Moment::After(DESCENT), || {
        // Another frame, because the old one holds another page by now.
        assert!(fixture.evict(0, old));
        fixture.add(40, 0, State::Ready);
        new.set(Some(fixture.add(0, 0, State::Ready)));
    });
    assert_eq!((end, shapes(&batch)), (BatchEnd::Covered, ones(0..4)));
    assert_eq!(batch.iter().next().map(|held| held.frame()), new.get());
}

/// R10: a folio that is replaced between the two reads of its slot is sought again, and the newer one is returned.
#[test]
fn r10_a_folio_replaced_between_the_two_looks_at_its_slot_is_sought_again() {
    for (page, confirm_read) in [(0, DESCENT + CONFIRM), (2, DESCENT + 2 * STEP + 3 * CONFIRM)] {
        let fixture = fixture_of([]);
        let frames: Vec<_> = (0..4).map(|page| fixture.add(page, 0, State::Ready)).collect();
        let new = std::cell::Cell::new(None);
        let (end, batch, _) = gather_while(&fixture, Moment::Before(confirm_read), || {
            // The file changed outside: all its folios go, held ones too, and others come in.
            fixture.mapping.invalidate().unwrap();
            let added: Vec<_> = (0..4).map(|page| fixture.add(page, 0, State::Ready)).collect();
            new.set(Some(added[page as usize]));
        });
        assert_eq!((end, shapes(&batch)), (BatchEnd::Covered, ones(0..4)));
        let found = batch.iter().nth(page as usize).map(|held| held.frame());
        assert_eq!(found, new.get(), "the newer one, not the one that was held");
        assert_ne!(found, Some(frames[page as usize]));
        drop(batch);
        fixture.check();
    }
}

/// R10: a folio that leaves between the two reads of its slot, and is not replaced, is not returned.
#[test]
fn r10_a_folio_that_only_left_between_the_two_looks_is_not_handed_out() {
    let fixture = fixture_of(0..4);
    let (end, batch, _) = gather_while(&fixture, Moment::Before(DESCENT + CONFIRM), || fixture.let_all_go());
    assert_eq!((end, batch.len()), (BatchEnd::Absent, 0));
    fixture.check();
}

/// R11: when a large folio becomes small ones before it is held, the folio that is returned contains the index asked
/// for.
#[test]
fn r11_a_folio_always_contains_its_index() {
    let fixture = fixture_of([]);
    let large = fixture.add(0, 4, State::Ready);
    let watch = Watch::acting(fixture.arena.view().grown(), Moment::After(DESCENT), || {
        // The same frames again, as folios of a page: the slot that was read names the one at 0 now.
        assert!(fixture.evict(0, large));
        (0..16).for_each(|page| _ = fixture.add(page, 0, State::Ready));
    });
    let mut batch = ReadBatch::new();
    let end = fixture.mapping.gather(&watch, PageIndex(5), PageIndex(7), &mut batch, BatchRules::READ);
    assert_eq!((end, shapes(&batch)), (BatchEnd::Covered, ones(5..8)));
    let mut bytes = [0; 4096];
    batch.iter().for_each(|held| {
        held.copy_out(held.first().first_byte(), &mut bytes);
        content::verify(&bytes, FILE, held.first().first_byte()).unwrap();
    });
}

// ---- what it leaves behind ------------------------------------------------------------------------------

/// R18: whatever ends a batch and however it is used up, each folio has as many holds as before.
#[test]
fn r18_every_way_out_gives_every_hold_back() {
    let fixture = fixture_of([]);
    let states = [State::Ready, State::Ready, State::Marked, State::Ready, State::Filling, State::Ready];
    let frames: Vec<_> = (0..6).zip(states).map(|(page, state)| fixture.add(page, 0, state)).collect();
    let holds = || frames.iter().map(|&frame| fixture.holds(frame)).collect::<Vec<_>>();
    let before = holds();
    let mut ends = Vec::new();
    for rules in [BatchRules::READ, BatchRules::CONTIG, BatchRules::SINGLE] {
        for (from, to) in [(0, 1), (0, 9), (3, 9), (4, 9), (5, 9), (6, 9), (1, 0)] {
            ends.push(fixture.gather(from, to, rules).0);
            assert_eq!(holds(), before, "{from} to {to} by {rules:?}");
        }
    }
    use BatchEnd::{Absent, Covered, FirstNotReady, Full, Marked, NotReady};
    assert!([Absent, Covered, FirstNotReady, Full, Marked, NotReady].iter().all(|end| ends.contains(end)));
    // Taken out in part, and the rest dropped; used again; left by a panic.
    let (_, mut batch) = fixture.batch(0, 1);
    assert_eq!(batch.drain().map(|held| shape(&held)).take(1).collect::<Vec<_>>(), ones([0]));
    assert!(batch.is_empty());
    fixture.mapping.get_read_batch(PageIndex(3), PageIndex(3), &mut batch);
    assert_eq!(batch.pop().map(|held| shape(&held)), Some((3, 0)));
    drop(batch);
    assert_eq!(holds(), before);
    let (_, mut batch) = fixture.batch(0, 1);
    assert_eq!(fixture.mapping.get_read_batch(PageIndex(6), PageIndex(6), &mut batch), BatchEnd::Absent);
    assert_eq!(holds(), before, "what the last use held");
    drop(batch);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _batch = fixture.batch(0, 2);
        panic!("in a reader's hands");
    }));
    assert!(panicked.is_err());
    assert_eq!(holds(), before);
}

/// R18: a folio that has all the holds it can have ends a batch before it.
#[test]
fn r18_a_folio_without_a_hold_to_spare_ends_a_batch_and_says_so() {
    let fixture = fixture_of(0..3);
    let all: Vec<_> = (0..HOLDS_MAX).map(|_| fixture.mapping.try_hold(PageIndex(1)).unwrap()).collect();
    assert_eq!(fixture.gather(0, 2, BatchRules::READ).0, BatchEnd::TooMany);
    assert_eq!(fixture.gather(0, 2, BatchRules::READ).1, ones([0]));
    drop(all);
    assert_eq!(fixture.gather(0, 2, BatchRules::READ).0, BatchEnd::Covered);
}

/// R18: no read and no pin leaves a hold, whether it fails, would have to wait, or ends well.
#[test]
fn r18_no_way_out_of_a_read_or_of_a_pin_leaves_a_hold() {
    let cache = quinion::Cache::builder().memory(quinion::Cache::MEMORY_MIN).readahead(0).build().unwrap();
    let device = device::Device::new(40 * PAGE + 100);
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let mut bytes = vec![0; 50 * PAGE as usize];
    let eight = 8 * PAGE as usize;
    let nowait = quinion::ReadOptions::new().nowait(true);
    let cached_only = quinion::ReadOptions::new().cached_only(true);
    // An error: behind a prefix, at once, and of a pin that has held the prefix.
    device.fail(5);
    assert_eq!(file.read_at(&mut bytes[..eight], 0).unwrap() as u64, 5 * PAGE);
    assert!(file.read_at(&mut bytes[..eight], 5 * PAGE).is_err());
    assert!(file.pin(0, eight).is_err());
    device.mend(5);
    // Nothing to wait for: behind a prefix, and at once, on its way or absent.
    device.hold();
    assert!(file.read_at_with(&mut bytes[..10], 5 * PAGE, nowait).is_err());
    assert_eq!(file.read_at_with(&mut bytes[..eight], 0, nowait).unwrap() as u64, 5 * PAGE);
    assert!(file.read_at_with(&mut bytes[..eight], 5 * PAGE, nowait).is_err());
    assert!(file.read_at_with(&mut bytes[..eight], 30 * PAGE, cached_only).is_err());
    device.release();
    // All of it, to the end of the file; a pin that is given back.
    assert_eq!(file.read_at(&mut bytes, 0).unwrap() as u64, 40 * PAGE + 100);
    drop(file.pin(3, usize::MAX).unwrap());
    // What is held is not dropped, so everything is dropped only if nothing is.
    assert_eq!(file.cached_pages(), 41);
    assert_eq!(file.dont_need(0, u64::MAX).unwrap(), 41);
    assert_eq!(file.cached_pages(), 0);
    cache.check().unwrap();
}

/// R20: eviction passes over the folios of a held batch and evicts others; given back, they can be evicted too.
#[test]
fn r20_a_held_batch_is_passed_over_and_others_are_evicted() {
    let mut reclaim = None;
    let fixture = BatchFixture::with(|arena, mapping| {
        let reclaim = reclaim.insert(Reclaim::new(Arc::clone(arena), Arc::new(Counters::default())));
        mapping.with_lists(reclaim.lists())
    });
    let reclaim = reclaim.unwrap();
    reclaim.add_mapping(Arc::clone(&fixture.mapping));
    let frames: Vec<_> =
        [FAR].into_iter().chain(0..64).map(|page| fixture.add(page, 0, State::Ready)).collect();
    let reservation = reclaim.lists().reserve(65, quinion::internals::sync::LockWait::Wait).unwrap();
    reclaim.list(frames.iter().map(|&frame| (frame, FetchOrigin::Asked)), reservation);
    reclaim.lists().check().unwrap();
    let (end, batch) = fixture.batch(0, 63);
    assert_eq!((end, batch.len()), (BatchEnd::Full, BATCH_FOLIOS_MAX));
    let others = 64 - BATCH_FOLIOS_MAX as u32 + 1; // the page far out is one
    assert_eq!(reclaim.reclaim(1000, quinion::internals::sync::LockWait::Wait), others);
    assert_eq!(fixture.mapping.lock().pages(), BATCH_FOLIOS_MAX as u64);
    let mut bytes = [0; 4096];
    for held in batch.iter() {
        held.copy_out(held.first().first_byte(), &mut bytes);
        content::verify(&bytes, FILE, held.first().first_byte()).unwrap();
    }
    drop(batch);
    assert_eq!(frames.iter().map(|&frame| fixture.holds(frame)).sum::<u32>(), 0);
    assert_eq!(reclaim.reclaim(1000, quinion::internals::sync::LockWait::Wait), BATCH_FOLIOS_MAX as u32);
    fixture.check();
}

// ---- the walker -----------------------------------------------------------------------------------------

/// C01: a step moves a cursor that was never walked or was reset, and from within a large entry goes behind it.
#[test]
fn c01_a_step_moves_a_walker_that_was_never_walked_or_was_reset() {
    let fixture = fixture_of([]);
    let frames: Vec<_> = (0..4).map(|page| Entry::folio(fixture.add(page, 0, State::Ready).0)).collect();
    let large = Entry::folio(fixture.add(64, 4, State::Ready).0);
    let watch = Watch::new(fixture.arena.view().grown());
    let record = fixture.arena.view().record(fixture.mapping.index().cell()).unwrap();
    let mut walk = Walker::<_, 6>::new(&watch, &record.root, 0);
    walk.step_past(0);
    assert_eq!((walk.index(), watch.reads.get()), (1, 0), "never walked: it moves, and reads nothing");
    assert_eq!((walk.load().entry, watch.reads.get()), (frames[1], DESCENT));
    walk.reset();
    assert_eq!(walk.index(), 1, "a reset keeps the index");
    walk.step_past(0);
    assert_eq!(walk.index(), 2);
    assert_eq!((walk.load().entry, watch.reads.get()), (frames[2], 2 * DESCENT));
    walk.step_past(0);
    assert_eq!((walk.load().entry, watch.reads.get()), (frames[3], 2 * DESCENT + STEP));
    // From inside a large entry a step goes behind it, walked or not.
    walk.seek(71);
    walk.step_past(4);
    assert_eq!(walk.index(), 80);
    walk.seek(71);
    assert_eq!(walk.load().entry, large);
    walk.step_past(4);
    assert_eq!((walk.index(), walk.load().entry), (80, Entry::EMPTY));
    walk.seek(u64::MAX);
    walk.step_past(0);
    assert_eq!(walk.index(), u64::MAX, "there is nothing beyond the last index");
}

// ---- a naive twin ---------------------------------------------------------------------------------------

/// Folios as they stand from index 0 on: a gap or a folio, one after the other, each where its order lets it.
fn lay_out(pieces: &[(bool, u8, State)]) -> Vec<(Shape, State)> {
    let mut folios = Vec::new();
    let mut at = 0u64;
    for &(gap, order, state) in pieces {
        if gap {
            at += 1;
        }
        let first = at.next_multiple_of(1 << order);
        folios.push(((first, order), state));
        at = first + (1 << order);
    }
    folios
}

/// What a batch must be, looked up page by page in the list.
fn twin(folios: &[(Shape, State)], from: u64, to: u64, rules: BatchRules) -> (BatchEnd, Vec<Shape>) {
    let (mut at, mut batch) = (from, Vec::new());
    while at <= to {
        if batch.len() == rules.folios_max {
            return (BatchEnd::Full, batch);
        }
        let covers = |&&((first, order), _): &&(Shape, State)| first <= at && at < first + (1 << order);
        let Some(&(found, state)) = folios.iter().find(covers) else { return (BatchEnd::Absent, batch) };
        let reads = rules.stops == BatchRules::READ.stops;
        match state {
            State::Filling | State::MarkedFilling if reads && batch.is_empty() => {
                return (BatchEnd::FirstNotReady, vec![found]);
            }
            State::Filling | State::MarkedFilling if reads => return (BatchEnd::NotReady, batch),
            _ => batch.push(found),
        }
        if reads && state == State::Marked {
            return (BatchEnd::Marked, batch);
        }
        at = found.0 + (1 << found.1);
    }
    (BatchEnd::Covered, batch)
}

fn piece() -> impl Strategy<Value = (bool, u8, State)> {
    let state = prop_oneof![
        12 => Just(State::Ready),
        1 => Just(State::Filling),
        1 => Just(State::Marked),
        1 => Just(State::MarkedFilling),
    ];
    (prop::bool::weighted(0.08), prop_oneof![6 => Just(0u8), 3 => 1u8..4, 1 => 4u8..7], state)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_batch_equals_a_naive_look_at_each_page(
        pieces in prop::collection::vec(piece(), 1..90),
        ranges in prop::collection::vec((0u64..200, 0u64..120), 20),
        max in 1..=BATCH_FOLIOS_MAX,
    ) {
        let fixture = BatchFixture::new();
        let folios = lay_out(&pieces);
        folios.iter().for_each(|&((first, order), state)| _ = fixture.add(first, order, state));
        for (from, pages) in ranges {
            let some = BatchRules { folios_max: max, ..BatchRules::READ };
            let rules = [BatchRules::READ, BatchRules::CONTIG, BatchRules::SINGLE, some];
            for rules in rules {
                let (end, batch, reads) = fixture.gather(from, from + pages, rules);
                let want = twin(&folios, from, from + pages, rules);
                prop_assert_eq!((end, batch), want, "{} to {} by {:?}", from, from + pages, rules);
                let past = fixture.gather(from, from + pages, BatchRules { at_end: LastFolioRule::ReadPast, ..rules });
                prop_assert_eq!(past.0, end);
                prop_assert!(past.2 >= reads);
            }
        }
        fixture.check();
    }
}

// ---- everything at once ---------------------------------------------------------------------------------

const STRESS_PAGES: u64 = 96;

fn churn(fixture: &BatchFixture, stop: &AtomicBool) {
    let mut dice = Dice::new(11);
    let mut standing = std::collections::BTreeMap::new();
    for generation in 2.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let order = dice.below(3) as u8;
        let first = dice.below(STRESS_PAGES) >> order << order;
        let mut free = true;
        for page in first..first + (1 << order) {
            let over = standing.range(..=page).next_back().map(|(&at, &(frame, under))| (at, frame, under));
            let Some((at, frame, _)) = over.filter(|&(at, _, under): &(u64, _, u8)| at + (1 << under) > page)
            else {
                continue;
            };
            let gone = fixture.evict(at, frame); // not while a reader holds it
            free &= gone;
            if gone {
                standing.remove(&at);
            }
        }
        if free && let Some(frame) = fixture.add_generation(first, order, generation) {
            standing.insert(first, (frame, order));
        }
    }
}

/// Takes one batch and checks every byte of it; returns how many folios it had.
fn check_batch(fixture: &BatchFixture, dice: &mut Dice, bytes: &mut [u8]) -> u64 {
    let from = dice.below(STRESS_PAGES);
    let to = from + dice.below(40);
    let (end, batch) = fixture.batch(from, to);
    let mut at = from;
    for held in batch.iter() {
        let (first, order) = shape(held);
        assert!(first <= at && at < first + (1 << order), "{at} is not in {first} of order {order}");
        assert!(at <= to, "a folio behind the one that covers the last index");
        if end != BatchEnd::FirstNotReady {
            let n = held.copy_out(at * PAGE, bytes);
            content::verify(&bytes[..n], FILE, at * PAGE).unwrap();
        }
        at = first + (1 << order);
    }
    assert!(end != BatchEnd::Covered || at > to);
    batch.len() as u64
}

#[test]
fn batches_are_right_while_folios_come_and_go() {
    let fixture = fixture_of(0..STRESS_PAGES);
    fixture.let_all_go();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| churn(&fixture, &stop));
        let readers: Vec<_> = (0..3)
            .map(|seed| {
                let fixture = &fixture;
                scope.spawn(move || {
                    let (mut dice, mut bytes) = (Dice::new(seed), vec![0; 4 * PAGE as usize]);
                    // As many folios, however late the other thread begins to put them in.
                    let mut folios = 0;
                    while folios < 20_000 {
                        folios += check_batch(fixture, &mut dice, &mut bytes);
                    }
                })
            })
            .collect();
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.expect("a reader found nothing wrong"));
    });
    fixture.let_all_go();
    fixture.check();
}

// ---- the paths that use it ------------------------------------------------------------------------------

#[test]
fn a_read_and_a_pin_across_cached_filling_and_absent_pages_are_right() {
    let cache = quinion::Cache::builder().memory(quinion::Cache::MEMORY_MIN).readahead(0).build().unwrap();
    let device = device::Device::new(80 * PAGE + 100);
    let file = cache.open_backend(Arc::clone(&device) as _).unwrap();
    let read_page = |page: u64| file.read_at(&mut [0; 10], page * PAGE).unwrap();
    [0, 1, 2, 3, 5, 6, 40, 80].into_iter().for_each(|page| assert_eq!(read_page(page), 10));
    // Page 4 is on its way: the prefix is read without it.
    device.hold();
    let nowait = quinion::ReadOptions::new().nowait(true);
    assert!(file.read_at_with(&mut [0; 10], 4 * PAGE, nowait).is_err());
    let mut bytes = vec![0; 82 * PAGE as usize];
    assert_eq!(file.read_at_with(&mut bytes, 100, nowait).unwrap() as u64, 4 * PAGE - 100);
    device::verify(&bytes[..4 * PAGE as usize - 100], &device, 100);
    device.release();
    let pinned = file.pin(PAGE + 3, 8 * PAGE as usize).unwrap();
    assert_eq!(pinned.len() as u64, 8 * PAGE);
    device::verify(&pinned.chunks().flatten().copied().collect::<Vec<u8>>(), &device, PAGE + 3);
    let all = file.pin(0, usize::MAX).unwrap();
    assert_eq!(all.len() as u64, 80 * PAGE + 100, "a pin ends where the file ends");
    device::verify(&all.chunks().flatten().copied().collect::<Vec<u8>>(), &device, 0);
    assert_eq!(file.read_at(&mut bytes, 0).unwrap() as u64, 80 * PAGE + 100);
    device::verify(&bytes[..80 * PAGE as usize + 100], &device, 0);
    assert!(device.times_read().iter().all(|&times| times == 1), "no page was asked for twice");
    drop((pinned, all));
    cache.check().unwrap();
}

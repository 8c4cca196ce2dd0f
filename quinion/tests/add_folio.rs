//! One folio into a mapping: two at once, nodes that run out, and what happens while the lock is let go.
//!
//! ```text
//!   a shadow of order 15, a folio for page 77, one node at a time
//!
//!   hold 1    15 -> 12 -> [node] 11 -> 6 -> no node          the lock is let go, and here the test steps in:
//!   gap       a thread inserts page 77 (A09) | the shadow goes (A10) | another shadow comes (A11)
//!   hold 2    from the root, with what is there now
//! ```
//!
//! The letters are those of the specification's statements; A01 to A06, A13 and A19 are the tree's
//! (`xarray_insert.rs`), but for what A01 says of the count of pages. A17, the split of a folio that is being read, is
//! with what splits one (`truncate.rs`); A15 through the whole cache is in `shadows.rs`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use quinion::internals::mapping::{AddedFolio, FolioShape, InsertPurpose, NewFolio, SPARE_MAX};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Frame, Order, Orders, PAGE_SIZE};
use quinion::internals::xarray::{Kind, Value};
use quinion_testing::ablations::{NodesAtMost, ThreeWalks};
use quinion_testing::fixtures::mapping::{MappingFixture, is_folio, page};

const ONE: FolioShape = FolioShape::of(Orders::PAGES);

fn short(nodes: u32) -> MappingFixture {
    MappingFixture::new().with_hooks(NodesAtMost::hooks(nodes))
}
fn three_walks() -> MappingFixture {
    MappingFixture::new().with_hooks(ThreeWalks::HOOKS)
}
fn added(shadow: Option<Value>) -> AddedFolio {
    AddedFolio::Added { shadow }
}

/// A01: a folio of any order counts with all its pages, and each page that it covers finds it.
#[test]
fn a01_a_folio_counts_with_its_pages_and_each_of_them_finds_it() {
    let fixture = MappingFixture::new();
    let mut pages = 0;
    for order in 0..=9u8 {
        let folio = fixture.folio(u64::from(order) << 9, order);
        assert_eq!(fixture.add(folio), added(None));
        pages += 1 << order;
        assert_eq!(fixture.pages(), pages, "order {order}");
        for nth in 0..1 << order {
            assert!(is_folio(fixture.walk(folio.index.0 + nth), folio.frame), "page {nth} of order {order}");
        }
        fixture.complete(folio);
        let held = fixture.mapping.try_hold(folio.index).unwrap();
        assert_eq!((held.order(), held.frame()), (Order(order), folio.frame));
        drop(held);
        // What is in the way is not counted twice.
        let other = fixture.folio(folio.index.0, 0);
        assert_eq!((fixture.add(other), fixture.pages()), (AddedFolio::Present, pages));
        fixture.free(other);
    }
    fixture.finish();
}

/// A07: of two threads that add folios at one index, one inserts its folio; the other is told so, and its frame is as
/// before.
#[test]
fn a07_one_of_two_folios_at_an_index_goes_in_and_the_other_keeps_its_frame() {
    let fixture = MappingFixture::new();
    for round in 0..300 {
        let folios = [fixture.folio(round, 0), fixture.folio(round, 0)];
        let before = folios.map(|folio| fixture.word(folio.frame));
        let start = Barrier::new(2);
        let got = thread::scope(|scope| {
            let add = |folio| {
                start.wait();
                fixture.add(folio)
            };
            let other = scope.spawn(move || add(folios[1]));
            [add(folios[0]), other.join().unwrap()]
        });
        let winner = usize::from(got[1] == added(None));
        assert_eq!((got[winner], got[1 - winner]), (added(None), AddedFolio::Present));
        assert_eq!(
            fixture.word(folios[1 - winner].frame),
            before[1 - winner],
            "as if nothing had been tried"
        );
        assert!(is_folio(fixture.walk(round), folios[winner].frame));
        fixture.complete(folios[winner]);
        fixture.free(folios[1 - winner]);
    }
    assert_eq!(fixture.pages(), 300);
    fixture.finish();
}

/// A08: two threads that add pages at different indices of one shadow both succeed, and no index loses its entry.
#[test]
fn a08_two_in_one_shadow_lose_no_index() {
    in_one_shadow(0, 40);
}

/// A16: readers without a lock, beside two threads that add pages in one shadow, see no folio at an index or the right
/// one.
#[test]
fn a16_readers_of_a_shadow_that_is_taken_apart_see_no_folio_of_another_page() {
    in_one_shadow(2, 40);
}

fn in_one_shadow(readers: u64, rounds: u64) {
    let fixture = MappingFixture::new();
    let (stop, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for seed in 0..readers {
            let (fixture, stop, seen) = (&fixture, &stop, &seen);
            scope.spawn(move || {
                let mut at = seed;
                while !stop.load(Ordering::Relaxed) {
                    at = (at * 13 + 7) % 512;
                    seen.fetch_add(u64::from(read_page(fixture, 512 + at)), Ordering::Relaxed);
                }
            });
        }
        let finish = AtEnd(&stop);
        let nobody_read = || readers > 0 && seen.load(Ordering::Relaxed) == 0;
        // Until the readers have read something: on a busy machine they begin late.
        for round in (0..).take_while(|&round| round < rounds || nobody_read()) {
            fixture.put_shadow(512, 9, round as u32);
            let start = Barrier::new(2);
            let fill = |first: u64| {
                start.wait();
                for at in (first..128).step_by(2) {
                    let folio = fixture.folio(512 + at * 3, 0);
                    assert_eq!(fixture.add(folio), added(Some(Value::shadow(0, round as u32))));
                    fixture.complete(folio);
                }
            };
            thread::scope(|pair| {
                pair.spawn(|| fill(0));
                fill(1);
            });
            for index in 0..512 {
                match fixture.load(512 + index).kind() {
                    Kind::Folio(_) => assert!(index % 3 == 0 && index / 3 < 128, "a folio at {index}"),
                    Kind::Value(value) => {
                        assert_eq!((value.payload(), index < 384 && index % 3 == 0), (round as u32, false))
                    }
                    lost => panic!("{lost:?} at {index}"),
                }
            }
            fixture.check();
            fixture.mapping.lock().remove_all();
        }
        drop(finish);
    });
    fixture.finish();
}

/// Stops the readers also when the test fails.
struct AtEnd<'a>(&'a AtomicBool);
impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads a page without a lock, and checks its bytes; returns whether there was one.
fn read_page(fixture: &MappingFixture, index: u64) -> bool {
    let Ok(held) = fixture.mapping.try_hold(page(index)) else { return false };
    let covered = held.first().0..held.first().0 + u64::from(held.order().pages());
    assert!(covered.contains(&index), "a folio of {covered:?} for page {index}");
    if held.is_readable() != quinion::internals::arena::ReadableState::Yes {
        return false;
    }
    let mut bytes = [0; PAGE_SIZE];
    held.copy_out(index * PAGE_SIZE as u64, &mut bytes);
    assert!(bytes.chunks(8).all(|word| word == index.to_le_bytes()), "bytes of another page at {index}");
    true
}

/// Adds a folio at 77 into a shadow of order 15 with one node at a time; `gap` happens in between, once.
fn with_a_gap(fixture: &MappingFixture, gap: impl FnOnce()) -> (NewFolio, AddedFolio) {
    fixture.put_shadow(0, 15, 5);
    let folio = fixture.folio(77, 0);
    let mut gap = Some(gap);
    let before = fixture.mapping.index().tree_counts();
    let got = fixture.mapping.add_folio_watched(folio, ONE, LockWait::Wait, &mut || {
        if let Some(gap) = gap.take() {
            gap();
        }
    });
    assert!(gap.is_none(), "the nodes did not run out");
    assert!(fixture.mapping.index().tree_counts().refills > before.refills);
    (folio, got)
}

/// A09: a folio inserted at the index while the lock is let go for nodes refuses the insertion, and spare nodes go
/// back.
#[test]
fn a09_a_folio_that_came_while_nodes_were_fetched_is_present() {
    let fixture = short(1);
    let winner = fixture.folio(77, 0);
    let word = fixture.word(winner.frame);
    let (loser, got) =
        with_a_gap(&fixture, || assert_eq!(fixture.add(winner), added(Some(Value::shadow(0, 5)))));
    assert_eq!(got, AddedFolio::Present);
    assert!(is_folio(fixture.walk(77), winner.frame));
    assert!(!fixture.word(loser.frame).is_live() && fixture.word(loser.frame).holds() == 0);
    assert_ne!(fixture.word(winner.frame), word);
    fixture.free(loser);
    assert_eq!(fixture.mapping.index().spare_nodes(), 0, "what was fetched in vain went back");
    fixture.complete(winner);
    fixture.finish();
}

/// A10: when the shadow is removed while the lock is let go for nodes, the folio is stored plainly and no shadow is
/// returned.
#[test]
fn a10_a_shadow_that_went_while_nodes_were_fetched_is_not_reported() {
    let fixture = short(1);
    let (folio, got) =
        with_a_gap(&fixture, || fixture.tree(|tree| tree.erase_range(0, 1 << 15, |_, _, _| {})));
    assert_eq!(got, added(None));
    assert_eq!(fixture.dump().lines().count(), 1, "the folio alone");
    assert!(is_folio(fixture.walk(77), folio.frame));
    fixture.complete(folio);
    fixture.finish();
}

/// A11: when a shadow of another order takes the place of the first while the lock is let go for nodes, that one is
/// split and returned.
#[test]
fn a11_a_shadow_that_came_while_nodes_were_fetched_is_the_one_that_is_split() {
    let fixture = short(1);
    let (folio, got) = with_a_gap(&fixture, || {
        fixture.tree(|tree| tree.erase_range(0, 1 << 15, |_, _, _| {}));
        fixture.put_shadow(0, 9, 6);
    });
    assert_eq!(got, added(Some(Value::shadow(0, 6))));
    assert!(is_folio(fixture.walk(77), folio.frame));
    for index in (0..600).filter(|index| *index != 77) {
        match fixture.load(index).kind() {
            Kind::Value(value) => assert_eq!((value.payload(), index < 512), (6, true)),
            other => assert!(index >= 512 && other == Kind::Empty, "{other:?} at {index}"),
        }
    }
    fixture.complete(folio);
    fixture.finish();
}

/// A12: when no node can be had, the folio is as before and still the caller's, and each index loads what it did.
#[test]
fn a12_a_folio_without_nodes_stays_its_callers_as_it_was() {
    for order in [1u8, 9, 15] {
        let fixture = short(0);
        fixture.put_shadow(0, order, 3);
        let (folio, free) = (fixture.folio(0, 0), fixture.free_pages());
        let (word, cells) = (fixture.word(folio.frame), fixture.arena.stats().cells_used);
        let got = fixture.add(folio);
        if order == 1 {
            assert_eq!(got, added(Some(Value::shadow(0, 3))), "two slots of one node need no other");
            fixture.complete(folio);
            fixture.finish();
            continue;
        }
        assert_eq!(got, AddedFolio::NoNode);
        assert_eq!((fixture.word(folio.frame), fixture.arena.stats().cells_used), (word, cells));
        assert!(
            (0..1 << order)
                .all(|index| matches!(fixture.load(index).kind(), Kind::Value(v) if v.payload() == 3))
        );
        assert_eq!((fixture.pages(), fixture.free_pages()), (0, free));
        fixture.free(folio);
        fixture.finish();
    }
}

/// A12: when fewer nodes can be had than are needed, those that were fetched go back.
#[test]
fn a12_an_arena_without_cells_leaves_nothing_in_stock() {
    let fixture = MappingFixture::new();
    fixture.put_shadow(0, 15, 3);
    let folio = fixture.folio(77, 0);
    while fixture.arena.alloc(Order::MAX).is_some() {}
    let mut all = Vec::new();
    fixture.arena.alloc_cells(usize::MAX / 2, &mut all, LockWait::Wait);
    fixture.arena.free_cell(all.pop().unwrap());
    assert_eq!(fixture.add(folio), AddedFolio::NoNode, "it needs two and there is one");
    assert_eq!(fixture.mapping.index().spare_nodes(), 0);
    fixture.arena.free_cells(all);
    assert_eq!(fixture.add(folio), added(Some(Value::shadow(0, 3))));
    fixture.complete(folio);
    fixture.finish();
}

/// A14: a folio too large, or not aligned, is refused before the lock is taken.
#[test]
fn a14_an_impossible_folio_is_refused_before_anything_is_done() {
    let fixture = MappingFixture::new();
    fixture.put_shadow(0, 9, 1);
    let good = fixture.folio(512, 9);
    let (before, counts) = (fixture.dump(), fixture.mapping.index().tree_counts());
    for (index, frame, order, why) in [
        (0, good.frame.0, 10, "order 9 at most"),
        (4, good.frame.0, 3, "align"),
        (8, good.frame.0 + 4, 3, "align"),
        (0, good.frame.0, 255, "order 9 at most"),
    ] {
        let folio = NewFolio { index: page(index), frame: Frame(frame), order: Order(order) };
        let refused = catch_unwind(AssertUnwindSafe(|| fixture.add(folio))).unwrap_err();
        let message = refused.downcast_ref::<String>().unwrap();
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(fixture.mapping.index().tree_counts(), counts, "not even the lock was taken");
    assert_eq!(fixture.dump(), before);
    fixture.free(good);
}

/// A15: an insertion for a write consumes the shadow and reports none, so that nothing is activated.
#[test]
fn a15_an_insertion_for_a_write_takes_the_shadow_and_says_nothing() {
    let fixture = MappingFixture::new();
    fixture.put_shadow(64, 6, 9);
    let folio = fixture.folio(70, 0);
    let got = fixture.mapping.add_folio(folio, InsertPurpose::Write, LockWait::Wait);
    assert_eq!(got, added(None));
    assert!(is_folio(fixture.load(70), folio.frame));
    let run = fixture.run(80, 16);
    let shape = FolioShape { purpose: InsertPurpose::Write, ..ONE };
    let heard = &mut |_, value| panic!("{value:?} was reported");
    assert_eq!(fixture.mapping.add_folio_range(run, shape, LockWait::Wait, heard).unwrap().pages, 16);
    assert!((80..96).all(|index| is_folio(fixture.load(index), run.frame.plus(index as u32 - 80))));
}

#[test]
fn a_shadow_is_cut_in_steps_and_each_is_counted_the_same_by_either_way() {
    let steps = |fixture: &MappingFixture, order| {
        let before = fixture.mapping.index().tree_counts().splits;
        cost(fixture, order);
        fixture.mapping.index().tree_counts().splits - before
    };
    for order in [7, 9, 12, 15] {
        assert_eq!(
            steps(&MappingFixture::new(), order),
            steps(&three_walks(), order),
            "a shadow of order {order}"
        );
    }
    assert_eq!([7, 9, 12, 15].map(|order| steps(&MappingFixture::new(), order)), [3, 3, 4, 5]);
}

/// The cost of an insertion at 77 into a shadow of `order`: descents, holds of the lock, refills.
fn cost(fixture: &MappingFixture, order: u8) -> [u64; 3] {
    fixture.put_shadow(0, order, 1);
    let folio = fixture.folio(77, 0);
    let before = fixture.mapping.index().tree_counts();
    assert_eq!(fixture.add(folio), added(Some(Value::shadow(0, 1))));
    let after = fixture.mapping.index().tree_counts();
    [after.descents - before.descents, after.locks - before.locks, after.refills - before.refills]
}

/// A18: an insertion costs one descent under one lock, with a split or without; the naive way costs three descents.
#[test]
fn a18_a_folio_costs_one_way_down_split_or_not_and_the_naive_way_three() {
    assert_eq!(cost(&MappingFixture::new(), 9), [1, 1, 0]);
    assert_eq!(cost(&MappingFixture::new(), 15), [1, 1, 0]);
    assert_eq!(cost(&three_walks(), 9), [3, 1, 0]);
    let naive = three_walks();
    assert_eq!(cost(&naive, 15), [3, 1, 0]);
    let single = MappingFixture::new();
    cost(&single, 15);
    let shape = |fixture: &MappingFixture| -> Vec<String> {
        fixture.dump().lines().filter(|line| !line.contains("folio")).map(str::to_owned).collect()
    };
    assert_eq!(shape(&naive), shape(&single), "both leave the same pieces");
    let before = naive.mapping.index().tree_counts();
    assert_eq!(naive.add(naive.folio(76, 0)), added(Some(Value::shadow(0, 1))));
    let after = naive.mapping.index().tree_counts();
    assert_eq!((after.splits, after.descents - before.descents), (before.splits, 3), "nothing is split");
    assert_eq!(cost(&short(1), 15), [2, 2, 1], "a short reserve: once more from the root");
}

/// A18: an insertion into a node that is there allocates nothing, and spare nodes are given back on demand.
#[test]
fn a18_a_folio_in_a_node_that_is_there_allocates_nothing() {
    let fixture = MappingFixture::new();
    for index in [0, 63] {
        let folio = fixture.folio(index, 0);
        assert_eq!(fixture.add(folio), added(None));
        fixture.complete(folio);
    }
    let (cells, spare) = (fixture.arena.stats().cells_used, fixture.mapping.index().spare_nodes());
    assert!((1..=SPARE_MAX).contains(&spare));
    for index in 1..63 {
        let folio = fixture.folio(index, 0);
        assert_eq!(fixture.add(folio), added(None));
        fixture.complete(folio);
    }
    assert_eq!((fixture.arena.stats().cells_used, fixture.mapping.index().spare_nodes()), (cells, spare));
    fixture.mapping.give_back_nodes(LockWait::Wait);
    assert_eq!(fixture.mapping.index().spare_nodes(), 0);
    fixture.finish();
}

#[test]
fn a_busy_lock_costs_a_caller_that_does_not_wait_nothing() {
    let fixture = MappingFixture::new();
    let folio = fixture.folio(0, 0);
    let guard = fixture.mapping.lock();
    let got = thread::scope(|scope| {
        let add = || fixture.mapping.add_folio(folio, InsertPurpose::Read, LockWait::Try);
        scope.spawn(add).join().unwrap()
    });
    assert_eq!(got, AddedFolio::NoNode);
    drop(guard);
    fixture.free(folio);
    fixture.finish();
}

//! Iteration, marks, gaps, removal: by entries, whole, each once, wherever the search starts.
//!
//! ```text
//!   index   0   1   2   3   4   5   6   7   8
//!           [------ F -----] [ G ]  .   s   .     next from 2, 3: F at 0, then G at 4
//!                                                 next gap from 1: 6      previous gap from 7: 7, the shadow
//! ```
//!
//! Most of these are defects that such an index has had elsewhere: a mark missed by a search that started in the tail
//! of a large folio, a gap reported a page too high, an erased entry of which a part was left. In common they have a
//! position inside an entry that was taken for its first.

use quinion::internals::xarray::{Entry, ExchangeOutcome, ForgetOutcome, Kind, Mark, Stored, Value};
use quinion_testing::nodes::{Forest, Reuse, folio};

fn forest<const BITS: u32>() -> Forest<BITS> {
    Forest::new(1 << 13, Reuse::AtOnce)
}
fn shadow(order: u8, payload: u32) -> Entry {
    Entry::value(Value::shadow(order, payload))
}
fn put<const BITS: u32>(forest: &Forest<BITS>, index: u64, order: u8, entry: Entry) {
    assert_eq!(forest.tree().store(index, order, entry, |_, _, _| {}), Stored::Done);
}
fn put_folio<const BITS: u32>(forest: &Forest<BITS>, index: u64, order: u8) -> Entry {
    let entry = Entry::folio(folio((index >> order) as u32 & 0xfff, order));
    put(forest, index, order, entry);
    entry
}

#[test]
fn a_search_from_inside_an_entry_finds_it_whole_and_once() {
    for order in 0..=9u8 {
        let forest = forest::<2>();
        let (first, size) = (3u64 << order, 1u64 << order);
        let entry = put_folio(&forest, first, order);
        let after = put_folio(&forest, first + size, 0);
        for from in first..first + size {
            let all: Vec<_> = forest.tree().range(from, u64::MAX).collect();
            assert_eq!(all, [(first, entry, order), (first + size, after, 0)]);
            assert_eq!(forest.tree().prev(0, from), Some((first, entry, order)));
        }
        assert_eq!(forest.tree().next(first + size + 1, u64::MAX), None);
        assert_eq!(forest.tree().next(0, first - 1), None);
    }
}

/// Two streams interleaved in one file made the kernel's search, started inside an order-3 folio, report
/// the gap one page too high, and page 2016 was never read ahead.
#[test]
fn a_gap_is_not_reported_a_page_too_high() {
    let forest = forest::<6>();
    for first in (1952..2016).step_by(8) {
        put_folio(&forest, first, 3);
    }
    for from in 1952..2016 {
        assert_eq!(forest.tree().next_gap(from, 200), Some(2016), "from {from}");
        assert_eq!(forest.tree().prev_gap(from, 200), Some(1951), "from {from}");
    }
    assert_eq!(forest.tree().next_gap(1960, 56), None, "no gap within reach");
    assert_eq!(forest.tree().next_gap(1960, 57), Some(2016));
    assert_eq!(forest.tree().prev_gap(2015, 64), None);
    assert_eq!(forest.tree().prev_gap(2015, 65), Some(1951));
}

#[test]
fn a_shadow_is_a_gap_and_a_spill_is_not() {
    let forest = forest::<3>();
    put_folio(&forest, 8, 3);
    put(&forest, 16, 2, Entry::value(Value::spill(2, 1)));
    put(&forest, 20, 2, shadow(2, 1));
    assert_eq!(forest.tree().next_gap(11, 100), Some(20));
    assert_eq!(forest.tree().prev_gap(19, 100), Some(7));
    assert_eq!(forest.tree().prev_gap(23, 100), Some(23));
    put_folio(&forest, 0, 3);
    assert_eq!(forest.tree().prev_gap(19, 100), None, "taken down to index 0");
}

#[test]
fn an_iteration_goes_on_where_it_was_after_the_tree_changed() {
    let forest = forest::<2>();
    for index in 0..100 {
        put_folio(&forest, index, 0);
    }
    let (mut from, mut seen) = (0, Vec::new());
    while let Some((first, _, order)) = forest.tree().next(from, 99) {
        seen.push(first);
        from = first + (1 << order);
        // The lock was dropped: what was passed goes, and the tree's shape with it.
        forest.tree().erase(first);
        forest.check();
    }
    assert_eq!(seen, (0..100).collect::<Vec<_>>());
    assert!(forest.tree().is_empty());
}

#[test]
fn conflicts_of_a_range_are_its_entries_each_once() {
    let forest = forest::<2>();
    let large = put_folio(&forest, 0, 4);
    assert_eq!(forest.tree().range(5, 5).collect::<Vec<_>>(), [(0, large, 4)]);
    let value = shadow(1, 3);
    put(&forest, 16, 1, value);
    assert_eq!(forest.tree().range(8, 17).collect::<Vec<_>>(), [(0, large, 4), (16, value, 1)]);
    assert_eq!(forest.tree().range(18, 1000).count(), 0);
}

#[test]
fn marks_are_found_from_any_page_and_only_where_they_are() {
    let forest = forest::<2>();
    for order in [0u8, 2, 3, 5] {
        put_folio(&forest, 1 << (order + 6), order);
    }
    for order in [0u8, 2, 3, 5] {
        let (first, last) = (1u64 << (order + 6), (1u64 << (order + 6)) + (1 << order) - 1);
        forest.tree().set_mark(last, Mark::Zero);
        for index in first..=last {
            assert!(forest.tree().has_mark(index, Mark::Zero));
            let found = forest.tree().next_marked(index, u64::MAX, Mark::Zero).expect("it is marked");
            assert_eq!((found.0, found.2), (first, order), "a search that starts in its tail finds it");
        }
        assert_eq!(forest.tree().next_marked(last + 1, u64::MAX, Mark::Zero), None);
        assert!(!forest.tree().is_marked(Mark::One));
        forest.check();
        forest.tree().clear_mark(first, Mark::Zero);
        assert!(!forest.tree().is_marked(Mark::Zero));
        forest.check();
    }
}

#[test]
fn marks_go_with_their_entry() {
    let forest = forest::<2>();
    for (index, order) in [(0, 0), (64, 3), (80, 4)] {
        put_folio(&forest, index, order);
        forest.tree().set_mark(index, Mark::Two);
        forest.tree().replace(index, Value::shadow(order, 1));
        assert!(!forest.tree().is_marked(Mark::Two), "what eviction leaves is not dirty");
        put_folio(&forest, index, order);
        forest.tree().set_mark(index, Mark::Two);
        forest.tree().erase(index);
        assert!(!forest.tree().is_marked(Mark::Two));
        forest.check();
    }
    assert!(forest.tree().is_empty());
}

#[test]
fn a_mark_on_nothing_marks_nothing() {
    let forest = forest::<6>();
    assert_eq!(forest.tree().set_mark(5, Mark::Zero), Entry::EMPTY);
    put_folio(&forest, 100, 0);
    assert_eq!(forest.tree().set_mark(5, Mark::Zero), Entry::EMPTY);
    assert_eq!(forest.tree().set_mark(1 << 40, Mark::Zero), Entry::EMPTY);
    assert!(!forest.tree().is_marked(Mark::Zero));
    forest.check();
}

#[test]
fn erasing_takes_the_whole_entry_and_the_nodes_with_it() {
    for order in 0..=15u8 {
        for far in [0u64, 1, 77] {
            let forest = forest::<3>();
            let entry = put_folio(&forest, far << order, order);
            assert_eq!(forest.tree().erase((far << order) + (1 << order) - 1), entry);
            assert!(forest.tree().is_empty());
            assert_eq!(forest.nodes.live(), 0);
            assert_eq!(forest.tree().erase(far << order), Entry::EMPTY);
        }
    }
}

#[test]
fn the_tree_gets_lower_when_far_entries_go() {
    let forest = forest::<2>();
    let near = put_folio(&forest, 0, 0);
    for far in (1..52).map(|bit| 1u64 << bit) {
        put_folio(&forest, far, 0);
        forest.check();
        forest.tree().erase(far);
        assert_eq!(forest.nodes.live(), 0, "one page at index 0 needs no node");
        assert_eq!(forest.tree().load(0), near);
    }
}

#[test]
fn erasing_a_range_takes_entries_that_reach_over_its_edges_but_no_spill() {
    let forest = forest::<2>();
    let at_start = put_folio(&forest, 0, 4);
    let inside = put_folio(&forest, 17, 0);
    put(&forest, 32, 4, shadow(4, 1));
    put(&forest, 48, 0, Entry::value(Value::spill(0, 5)));
    let spill = Entry::value(Value::spill(4, 6));
    put(&forest, 64, 4, spill);
    let mut gone = Vec::new();
    forest.tree().erase_range(15, 70, |first, entry, order| gone.push((first, entry, order)));
    let small = Entry::value(Value::spill(0, 5));
    assert_eq!(gone, [(0, at_start, 4), (17, inside, 0), (32, shadow(4, 1), 4), (48, small, 0)]);
    assert_eq!(forest.tree().range(0, u64::MAX).collect::<Vec<_>>(), [(64, spill, 4)]);
    forest.check();
    forest.tree().erase_range(70, 70, |_, _, _| panic!("an empty range holds nothing"));
    forest.tree().erase_range(0, 1 << 52, |_, _, _| {});
    assert_eq!(forest.nodes.live(), 0);
}

#[test]
fn compare_exchange_changes_only_the_expected_entry() {
    let forest = forest::<2>();
    let first = put_folio(&forest, 8, 3);
    let second = put_folio(&forest, 16, 3);
    let other = Entry::folio(folio(500, 3));
    assert_eq!(forest.tree().compare_exchange(10, other, first), ExchangeOutcome::Found(first));
    assert_eq!(forest.tree().compare_exchange(99, other, first), ExchangeOutcome::Found(Entry::EMPTY));
    assert_eq!(forest.tree().compare_exchange(10, first, other), ExchangeOutcome::Done);
    assert!((8..16).all(|index| forest.tree().load(index) == other));
    assert_eq!(forest.tree().compare_exchange(15, other, Entry::EMPTY), ExchangeOutcome::Done);
    assert!((8..16).all(|index| forest.tree().load(index).is_empty()));
    assert!((16..24).all(|index| forest.tree().load(index) == second));
    assert_eq!(forest.tree().order_at(20), Some(3));
    forest.check();
}

#[test]
fn nodes_of_shadows_only_are_known_and_forgotten_one_by_one() {
    for start in [0u64, 64, 4096] {
        let forest = forest::<6>();
        put_folio(&forest, start, 0);
        put_folio(&forest, start + 64, 0);
        put_folio(&forest, start + 65, 0);
        assert!(forest.nodes.shadow_only_nodes().is_empty());
        forest.tree().replace(start + 64, Value::shadow(0, 1));
        assert!(forest.nodes.shadow_only_nodes().is_empty(), "a folio is left");
        forest.tree().replace(start + 65, Value::shadow(0, 2));
        let [node] = forest.nodes.shadow_only_nodes()[..] else { panic!("a node remembers only") };
        forest.check();
        let tree = forest.tree();
        let gone: Vec<_> = tree.shadows_in(node).map(|(first, value)| (first, value.payload())).collect();
        assert_eq!(forest.tree().forget(node), ForgetOutcome::Done);
        assert_eq!(gone, [(start + 64, 1), (start + 65, 2)]);
        assert!(forest.nodes.shadow_only_nodes().is_empty());
        assert_eq!(forest.tree().range(0, u64::MAX).count(), 1);
        forest.check();
    }
}

#[test]
fn a_node_with_a_spill_is_no_node_of_shadows_only() {
    let forest = forest::<6>();
    put(&forest, 64, 0, shadow(0, 1));
    put(&forest, 65, 0, Entry::value(Value::spill(0, 1)));
    assert!(forest.nodes.shadow_only_nodes().is_empty());
    let Kind::Node(top) =
        quinion::internals::xarray::Root::from_bits(forest.root.load(std::sync::atomic::Ordering::Relaxed))
            .entry
            .kind()
    else {
        panic!("there are nodes");
    };
    assert_eq!(forest.tree().forget(top), ForgetOutcome::Kept);
    forest.tree().erase(65);
    assert_eq!(forest.nodes.shadow_only_nodes().len(), 1);
}

#[test]
fn a_dump_shows_the_entries_of_the_tree() {
    let forest = forest::<6>();
    put_folio(&forest, 4, 2);
    put(&forest, 64, 6, shadow(6, 9));
    put(&forest, 8, 0, Entry::value(Value::spill(0, 3)));
    forest.tree().set_mark(5, Mark::One);
    assert_eq!(
        forest.tree().dump(),
        "4..=7 folio 18 order 2 .*.\n\
         8..=8 spill 3 order 0 ...\n\
         64..=127 shadow 9 order 6 ...\n"
    );
}

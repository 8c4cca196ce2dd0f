//! What the kernel's own tests of its tree check, checked of this tree by independent code and values. The `check_` of
//! its names is left out.
//!
//! ```text
//! the kernel's test         what it checks                                   here
//! xa_err                    what a store says when there is no node          a_store_without_nodes_..
//! xas_retry                 a reader that meets a retry entry                none: no such entries. A reader
//!                                                                            checks what it finds: xarray_walk
//! xa_load                   every index while the tree grows, shrinks        every_index_loads_while_..
//! xa_mark_1                 set, ask, clear; marks under a large store       a_mark_is_set_asked_cleared_..
//! xa_mark_2, _3             a marked search at its bounds, in a large entry  a_marked_search_keeps_to_..
//! xa_shrink                 back to the root's word, from any order          the_tree_shrinks_back_..
//! insert                    what is there is not overwritten                 an_insertion_overwrites_nothing
//! cmpxchg, _order           only what is expected; the whole of an entry     a_compare_exchange_takes_..
//! reserve                   a reserved index looks empty                     none: entries are not reserved;
//!                                                                            nodes are: a_reserve_is_enough_..
//! xas_erase                 erase on the way, while the tree changes height  erasing_on_the_way_..
//! multi_store, _1, _2, _3   each covered index, neighbours, counts           a_large_entry_is_everywhere_..
//! multi_store_advanced      all orders far apart                             all_orders_stand_far_apart
//! get_order, xas_get_order  the order, asked at any covered index            the_order_is_reported_at_any_index
//! xas_conflict_get_order    each conflict once, with its order               conflicts_come_once_..
//! xa_alloc_1, _2, _3        free ids are handed out                          none: the tree gives no ids;
//!                                                                            next_gap is asked in xarray_twin
//! find_1 .. _4, _entry      a search at, between, after entries              a_search_finds_the_entry_at_or_after
//! multi_find_1, _2, _3      a search that starts inside a large entry        a_search_from_inside_..
//! pause                     go on after the lock was dropped                 an_iteration_goes_on_after_..
//! move_*                    next and previous over holes and at the ends     steps_to_both_sides_..
//! create_range_1 .. _5      slots made before they are filled                a_reserve_is_enough_..
//! store_range, _iter        one value over any range                         a_range_is_stored_as_..
//! align                     the bits of an entry and its tag                 an_entry_keeps_all_its_bits
//! split_1, _2               every split, all marks copied                    every_split_copies_its_marks
//!                           a wrong step is refused                          none: the tree chooses its steps
//! workingset                nodes of shadows alone are listed                nodes_of_shadows_alone_are_listed
//! account                   counts of a large entry                          counts_of_a_large_entry_..
//! destroy                   everything goes, every node comes back           everything_goes_and_..
//! multiorder, regression1   readers against stores, erasures, moved roots    xarray_walk, xarray_model
//! iteration_check           marks and entries change under an iteration      none: an iteration holds the lock;
//!                                                                            dropped: an_iteration_goes_on_..
//! iteration_check_2         erasing a marked entry does not end the walk     erasing_what_is_marked_..
//! regression2               a marked search that has passed the last one     a_marked_search_ends_..
//! regression3               a search that goes on in an emptied chunk        a_search_goes_on_in_an_emptied_..
//! regression4               index 0 while another comes and goes             xarray_walk
//! tag_check                 marks at random                                  xarray_twin
//! ```
//!
//! The kernel's orders go to 19, this tree's to 15: the four bits that a value has for its order.

use quinion::internals::xarray::{
    ENTRY_ORDER_MAX, Entry, ExchangeOutcome, INDICES_MAX, Inserted, Kind, Mark, NUMBERS_MAX, PAYLOADS_MAX,
    Reserve, ReserveFill, Root, Stored, Value, XArray,
};
use quinion_testing::nodes::{Forest, Reuse, folio};

const LAST: u64 = INDICES_MAX - 1;

/// Runs a check of any shape of node: 2, 4, 8 and 64 slots.
macro_rules! in_every_shape {
    ($check:ident) => {
        $check::<1>();
        $check::<2>();
        $check::<3>();
        $check::<6>();
    };
}

fn forest<const BITS: u32>() -> Forest<BITS> {
    Forest::new(1 << 13, Reuse::AtOnce)
}
fn shadow(order: u8, payload: u32) -> Entry {
    Entry::value(Value::shadow(order, payload))
}
fn put<const BITS: u32>(forest: &Forest<BITS>, index: u64, order: u8, entry: Entry) {
    assert_eq!(forest.tree().store(index, order, entry, |_, _, _| {}), Stored::Done);
}
fn put_folio<const BITS: u32>(forest: &Forest<BITS>, index: u64, order: u8, id: u32) -> Entry {
    let entry = Entry::folio(folio(id, order));
    put(forest, index, order, entry);
    entry
}
fn put_page<const BITS: u32>(forest: &Forest<BITS>, index: u64) {
    put_folio(forest, index, 0, 1);
}
fn clear<const BITS: u32>(forest: &Forest<BITS>) {
    forest.tree().erase_range(0, INDICES_MAX, |_, _, _| {});
    assert_eq!(forest.nodes.live(), 0, "all nodes came back");
}
fn firsts(found: impl Iterator<Item = (u64, Entry, u8)>) -> Vec<u64> {
    found.map(|(first, ..)| first).collect()
}

#[test]
fn a_store_without_nodes_says_so_and_with_one_does_it() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        let at =
            |index, nodes| forest.with_budget(nodes, |tree| tree.store(index, 0, shadow(0, 1), |_, _, _| {}));
        assert_eq!(at(0, 0), Stored::Done, "index 0 stands in the root's word");
        assert_eq!(at(1, 0), Stored::NoNode);
        assert_eq!(at(1, 1), Stored::Done);
        assert_eq!(forest.tree().erase(LAST), Entry::EMPTY, "nothing is erased where nothing is");
        assert_eq!(forest.tree().load(1), shadow(0, 1));
        forest.check();
    }
    in_every_shape!(check);
}

#[test]
fn every_index_loads_while_the_tree_grows_and_shrinks() {
    fn check<const BITS: u32>() {
        const COUNT: u64 = 600;
        let forest = forest::<BITS>();
        let exactly = |range: std::ops::Range<u64>| {
            for index in 0..COUNT {
                let want = if range.contains(&index) { shadow(0, index as u32) } else { Entry::EMPTY };
                assert_eq!((forest.tree().load(index), forest.walk(index)), (want, want));
            }
        };
        for index in 0..COUNT {
            put(&forest, index, 0, shadow(0, index as u32));
            exactly(0..index + 1);
        }
        for index in 0..COUNT {
            assert_eq!(forest.tree().erase(index), shadow(0, index as u32));
            exactly(index + 1..COUNT);
        }
        assert_eq!(forest.nodes.live(), 0);
    }
    in_every_shape!(check);
}

#[test]
fn a_mark_is_set_asked_cleared_and_removed_with_its_entry() {
    fn check<const BITS: u32>() {
        for order in 0..=ENTRY_ORDER_MAX {
            let (forest, base) = (forest::<BITS>(), 5 << order);
            assert_eq!(forest.tree().set_mark(base, Mark::Zero), Entry::EMPTY, "nothing is not marked");
            let entry = put_folio(&forest, base, order, 1);
            let last = base + (1 << order) - 1;
            assert_eq!(forest.tree().set_mark(last, Mark::One), entry);
            assert_eq!(Mark::ALL.map(|mark| forest.tree().has_mark(base, mark)), [false, true, false]);
            assert_eq!(Mark::ALL.map(|mark| forest.tree().is_marked(mark)), [false, true, false]);
            assert!(
                !forest.tree().has_mark(last + 1, Mark::One) && !forest.tree().has_mark(base - 1, Mark::One)
            );
            forest.tree().clear_mark(base, Mark::One);
            assert!(!forest.tree().is_marked(Mark::One));
            forest.tree().set_mark(base, Mark::Two);
            // Another entry there begins without marks; the kernel's would inherit them.
            put_folio(&forest, base, order, 2);
            assert!(!forest.tree().is_marked(Mark::Two));
            forest.check();
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_marked_search_keeps_to_its_bounds() {
    fn check<const BITS: u32>() {
        for order in 0..=9u8 {
            let (forest, pages) = (forest::<BITS>(), 1u64 << order);
            for n in 0..6 {
                put_folio(&forest, n * pages, order, n as u32 + 1);
            }
            for n in [1, 2, 4] {
                forest.tree().set_mark(n * pages + pages - 1, Mark::Zero);
            }
            let from_to = |from, to| firsts(forest.tree().marked(from, to, Mark::Zero));
            assert_eq!(from_to(0, LAST), [pages, 2 * pages, 4 * pages]);
            assert_eq!(from_to(2 * pages - 1, LAST), [pages, 2 * pages, 4 * pages], "from inside the first");
            assert_eq!(from_to(2 * pages, 4 * pages - 1), [2 * pages], "up to right before the last");
            assert_eq!(from_to(2 * pages, 4 * pages), [2 * pages, 4 * pages], "up to its first index");
            assert!(from_to(5 * pages, LAST).is_empty());
            assert!(firsts(forest.tree().marked(0, LAST, Mark::One)).is_empty());
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_marked_search_ends_after_the_last_one() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        (0..200).for_each(|index| put_page(&forest, index));
        for marked in 0..200 {
            forest.tree().set_mark(marked, Mark::Two);
            assert_eq!(forest.tree().next_marked(0, LAST, Mark::Two).map(|found| found.0), Some(marked));
            assert_eq!(forest.tree().next_marked(marked + 1, LAST, Mark::Two), None);
            assert_eq!(
                forest.tree().next_marked(0, marked.saturating_sub(1), Mark::Two).is_some(),
                marked == 0
            );
            forest.tree().clear_mark(marked, Mark::Two);
        }
    }
    in_every_shape!(check);
}

#[test]
fn the_tree_shrinks_back_to_its_former_height() {
    fn check<const BITS: u32>() {
        for order in 0..=ENTRY_ORDER_MAX {
            let forest = forest::<BITS>();
            let near = put_folio(&forest, 0, order, 1);
            let low = (forest.tree().dump(), forest.nodes.live());
            for far in (order..52).map(|bit| 1u64 << bit) {
                put_folio(&forest, far, 0, 2);
                assert_eq!((forest.tree().load(0), forest.walk(0)), (near, near));
                forest.tree().erase(far);
                assert_eq!((forest.tree().dump(), forest.nodes.live()), low, "as low as before");
            }
            forest.tree().erase((1 << order) - 1);
            assert!(forest.tree().is_empty() && forest.nodes.live() == 0);
        }
    }
    in_every_shape!(check);
}

#[test]
fn an_insertion_overwrites_nothing() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        for index in [0, 1, 77, 12_345, LAST] {
            assert_eq!(forest.tree().insert(index, 0, folio(1, 0)), Inserted::Done { shadow: None });
            let there = Inserted::Present(Entry::folio(folio(1, 0)));
            assert_eq!(forest.tree().insert(index, 0, folio(2, 0)), there);
            assert_eq!(forest.tree().load(index), Entry::folio(folio(1, 0)));
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_compare_exchange_takes_the_whole_expected_entry() {
    fn check<const BITS: u32>() {
        for order in 0..=ENTRY_ORDER_MAX {
            let (forest, pages) = (forest::<BITS>(), 1u64 << order);
            let (one, two) = (put_folio(&forest, 0, order, 1), put_folio(&forest, pages, order, 2));
            let exchange = |index, old, new| forest.tree().compare_exchange(index, old, new);
            assert_eq!(exchange(pages - 1, two, Entry::EMPTY), ExchangeOutcome::Found(one));
            assert_eq!(exchange(2 * pages, two, Entry::EMPTY), ExchangeOutcome::Found(Entry::EMPTY));
            assert_eq!(exchange(LAST, two, Entry::EMPTY), ExchangeOutcome::Found(Entry::EMPTY));
            assert_eq!(exchange(pages - 1, one, Entry::EMPTY), ExchangeOutcome::Done);
            assert!([0, pages / 2, pages - 1].map(|i| forest.tree().load(i)).iter().all(|e| e.is_empty()));
            assert_eq!(forest.tree().order_at(0), None);
            for index in [pages, pages + pages / 2, 2 * pages - 1] {
                assert_eq!(
                    forest.tree().entry_at(index),
                    Some((pages, two, order)),
                    "the neighbour is whole"
                );
            }
            let (done, descents) =
                forest.descents(|tree| tree.compare_exchange(pages, two, shadow(order, 9)));
            assert_eq!((done, descents), (ExchangeOutcome::Done, 1));
            assert_eq!(forest.tree().entry_at(2 * pages - 1), Some((pages, shadow(order, 9), order)));
            forest.check();
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_reserve_is_enough_for_any_range() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        for (index, pages) in [(0, 1), (1, 1), (0, 64), (60, 9), (4090, 300), (1 << 30, 70), (LAST - 99, 100)]
        {
            let mut reserve = Reserve::new(&forest.nodes);
            assert_eq!(reserve.fill(forest.tree().nodes_needed(index, pages)), ReserveFill::Whole);
            let batch = (0..pages as u32).map(|n| (0, folio(n, 0)));
            forest.nodes.budget.store(0, std::sync::atomic::Ordering::Relaxed);
            let got = XArray::<_, BITS>::new(&reserve, &forest.root).insert_range(index, batch, |_, _| {});
            forest.nodes.budget.store(u64::MAX, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(got.pages, pages, "nothing was taken from behind the reserve");
            drop(reserve);
            forest.check();
            clear(&forest);
        }
    }
    in_every_shape!(check);
}

#[test]
fn erasing_on_the_way_is_right_while_the_tree_changes_its_height() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        for index in 0..60 {
            for gap in index..60 {
                put(&forest, gap, 0, shadow(0, gap as u32 + 1));
            }
            let mut from = 0;
            while let Some((first, entry, order)) = forest.tree().next(from, LAST) {
                assert_eq!(entry, shadow(0, first as u32 + 1));
                put_folio(&forest, LAST, 0, 1);
                forest.tree().erase(first);
                forest.tree().erase(LAST);
                forest.check();
                from = first + (1 << order);
            }
            assert!(forest.tree().is_empty());
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_large_entry_is_everywhere_it_covers_and_nowhere_else() {
    fn check<const BITS: u32>() {
        for order in 0..=11u8 {
            let (forest, base, pages) = (forest::<BITS>(), 3u64 << order, 1u64 << order);
            let whole = put_folio(&forest, base, order, 1);
            for index in base - 1..=base + pages {
                let want = if (base..base + pages).contains(&index) { whole } else { Entry::EMPTY };
                assert_eq!((forest.tree().load(index), forest.walk(index)), (want, want));
            }
            assert_eq!(firsts(forest.tree().range(0, LAST)), [base], "one entry, met once");
            // What is smaller does not go into a folio; what is as large or larger takes it over whole.
            if order > 0 {
                let inside = forest.tree().store(base, order - 1, shadow(order - 1, 1), |_, _, _| {});
                assert_eq!(inside, Stored::Present(whole));
            }
            let mut gone = Vec::new();
            let over = base & !(4 * pages - 1);
            forest.tree().store(over, order + 2, shadow(order + 2, 2), |first, entry, order| {
                gone.push((first, entry, order));
            });
            assert_eq!(gone, [(base, whole, order)]);
            assert_eq!(forest.tree().entry_at(base), Some((over, shadow(order + 2, 2), order + 2)));
            forest.check();
            assert_eq!(forest.tree().erase(base + pages - 1), shadow(order + 2, 2));
            assert!(forest.tree().is_empty() && forest.nodes.live() == 0);
        }
    }
    in_every_shape!(check);
}

#[test]
fn all_orders_stand_far_apart() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        let place = |order: u8| 1u64 << (16 + 2 * u32::from(order));
        let mut there = Vec::new();
        for order in (0..=ENTRY_ORDER_MAX).rev() {
            there.insert(0, (place(order), put_folio(&forest, place(order), order, 3), order));
            assert!(forest.tree().range(0, LAST).eq(there.iter().copied()));
            forest.check();
        }
        for order in 0..=ENTRY_ORDER_MAX {
            let inside = place(order) + (1 << order) / 3;
            assert_eq!(forest.tree().entry_at(inside), Some(there.remove(0)));
            assert!(!forest.tree().erase(inside).is_empty());
            assert!(forest.tree().range(0, LAST).eq(there.iter().copied()));
            forest.check();
        }
    }
    in_every_shape!(check);
}

#[test]
fn the_order_is_reported_at_any_index() {
    fn check<const BITS: u32>() {
        for order in 0..=ENTRY_ORDER_MAX {
            let (forest, base) = (forest::<BITS>(), 7u64 << order);
            for entry in
                [Entry::folio(folio(1, order)), shadow(order, 1), Entry::value(Value::spill(order, 1))]
            {
                put(&forest, base, order, entry);
                let end = base + (1 << order);
                assert!((base..end).all(|index| forest.tree().order_at(index) == Some(order)));
                assert_eq!([base - 1, end].map(|index| forest.tree().order_at(index)), [None, None]);
                clear(&forest);
            }
        }
    }
    in_every_shape!(check);
}

#[test]
fn conflicts_come_once_each_with_its_order() {
    fn check<const BITS: u32>() {
        for big in 1..=10u8 {
            let (forest, pages) = (forest::<BITS>(), 1u64 << big);
            // One that covers the whole range is the only conflict, wherever inside it the range lies.
            let whole = shadow(big, 1);
            put(&forest, pages, big, whole);
            for small in 0..big {
                for from in (pages..2 * pages).step_by(1 << small) {
                    let to = from + (1 << small) - 1;
                    assert!(forest.tree().range(from, to).eq([(pages, whole, big)]));
                }
            }
            // Many small entries: each is visited, and no hole is.
            clear(&forest);
            let order = big / 2;
            let want: Vec<_> =
                (pages..2 * pages).step_by(2 << order).map(|at| (at, shadow(order, 2), order)).collect();
            want.iter().for_each(|&(at, entry, order)| put(&forest, at, order, entry));
            assert!(forest.tree().range(pages, 2 * pages - 1).eq(want));
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_search_finds_the_entry_at_or_after() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        for (one, two) in (0..70).flat_map(|one| (one + 1..70).map(move |two| (one, two))) {
            put_folio(&forest, one, 0, 1);
            put_folio(&forest, two, 0, 2);
            let next = |from, to| forest.tree().next(from, to).map(|found| found.0);
            assert_eq!([next(0, LAST), next(one, LAST), next(one, one)], [Some(one); 3]);
            assert_eq!([next(one + 1, LAST), next(two, two), next(two, LAST)], [Some(two); 3]);
            assert_eq!([next(two + 1, LAST), next(one + 1, two - 1), next(70, 69)], [None; 3]);
            forest.tree().erase(one);
            forest.tree().erase(two);
        }
        put_folio(&forest, LAST, 0, 3);
        assert_eq!(forest.tree().next(0, u64::MAX).map(|found| found.0), Some(LAST), "to the very end");
        assert_eq!(forest.tree().next(INDICES_MAX, u64::MAX), None, "nothing lies beyond it");
    }
    in_every_shape!(check);
}

#[test]
fn a_search_from_inside_a_large_entry_finds_it_and_then_the_next() {
    fn check<const BITS: u32>() {
        for order in 1..=9u8 {
            let (forest, base, end) = (forest::<BITS>(), 1u64 << order, 2u64 << order);
            let big = (base, put_folio(&forest, base, order, 1), order);
            let page = (end, put_folio(&forest, end, 0, 2), 0);
            for from in base..end {
                assert!(forest.tree().range(from, LAST).eq([big, page]));
                assert_eq!(forest.tree().next(from, from), Some(big), "a range inside it meets it");
                assert_eq!(forest.tree().prev(0, from), Some(big));
            }
            assert_eq!(forest.tree().next(end, LAST), Some(page));
            assert_eq!(forest.tree().next(0, base - 1), None);
        }
    }
    in_every_shape!(check);
}

#[test]
fn an_iteration_goes_on_after_the_tree_changed() {
    fn check<const BITS: u32>() {
        for order in 0..=ENTRY_ORDER_MAX - 3 {
            let (forest, pages) = (forest::<BITS>(), 1u64 << order);
            for n in 0..5 {
                put_folio(&forest, n * pages, order, n as u32 + 1);
            }
            // Begun inside the first; each is met once, whatever becomes of those before and behind.
            let (mut from, mut met) = (pages - 1, Vec::new());
            while let Some((first, entry, order)) = forest.tree().next(from, LAST) {
                met.push(entry);
                from = first + (1 << order);
                forest.tree().erase(first);
                put_folio(&forest, (40 + met.len() as u64) << 30, 0, 9);
                forest.tree().erase((40 + met.len() as u64) << 30);
                if met.len() == 2 {
                    put(&forest, first, order, shadow(order, 1));
                    forest.tree().erase(4 * pages);
                }
            }
            assert_eq!(met, [1, 2, 3, 4].map(|id| Entry::folio(folio(id, order))));
        }
    }
    in_every_shape!(check);
}

#[test]
fn a_search_goes_on_in_an_emptied_node_and_finds_nothing() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        put_folio(&forest, 0, 0, 1);
        put_folio(&forest, 1, 0, 2);
        assert_eq!(forest.tree().next(0, LAST).map(|found| found.0), Some(0));
        forest.tree().erase(1);
        assert_eq!(forest.tree().next(1, LAST), None);
        put_folio(&forest, 2, 0, 3);
        assert_eq!(forest.tree().next(1, LAST).map(|found| found.0), Some(2));
    }
    in_every_shape!(check);
}

#[test]
fn steps_to_both_sides_go_over_holes_and_end_at_the_ends() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        assert_eq!((forest.tree().next(0, LAST), forest.tree().prev(0, LAST)), (None, None));
        let places: Vec<u64> = (0..8).chain((3..52).map(|bit| 1 << bit)).chain([LAST]).collect();
        places.iter().for_each(|&at| put_page(&forest, at));
        assert_eq!(firsts(forest.tree().range(0, u64::MAX)), places);
        let mut back = firsts(forest.tree().range(0, u64::MAX).rev());
        back.reverse();
        assert_eq!(back, places);
        for pair in places.windows(2) {
            let &[one, two] = pair else { unreachable!() };
            assert_eq!(forest.tree().next(one + 1, LAST).map(|found| found.0), Some(two));
            assert_eq!(forest.tree().prev(0, two - 1).map(|found| found.0), Some(one));
            assert_eq!(forest.tree().next(one + 1, two - 1), None);
            assert_eq!(forest.tree().prev(one + 1, two - 1), None);
        }
        assert_eq!(forest.tree().prev(0, 0).map(|found| found.0), Some(0), "down to the first index");
        assert_eq!(forest.tree().next(LAST, LAST).map(|found| found.0), Some(LAST), "and up to the last");
    }
    in_every_shape!(check);
}

#[test]
fn gaps_are_found_from_inside_and_in_few_steps() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        (100..600).for_each(|index| put_page(&forest, index));
        put_folio(&forest, 96, 2, 2);
        put(&forest, 600, 3, shadow(3, 1));
        for inside in 96..600 {
            assert_eq!(forest.tree().next_gap(inside, LAST - inside), Some(600), "a shadow is a gap");
            assert_eq!(forest.tree().prev_gap(inside, inside), Some(95));
            assert_eq!(forest.tree().prev_gap(inside, inside - 95), None, "95 lies right before the pages");
        }
        let (gap, descents) = forest.descents(|tree| tree.prev_gap(599, 599));
        assert_eq!((gap, descents), (Some(95), 0), "it steps; it does not look each entry up");
    }
    in_every_shape!(check);
}

#[test]
fn a_range_is_stored_as_the_largest_pieces_that_fit() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        for (from, end) in (0..40).flat_map(|from| (from + 1..41).map(move |end| (from, end))) {
            let stored = forest.tree().store_range(from, end, Value::spill(0, 7), |_, _, _| {});
            assert_eq!(stored.pages, end - from);
            let mut next = from;
            for (first, entry, order) in forest.tree().range(0, LAST) {
                assert_eq!((first, entry), (next, Entry::value(Value::spill(order, 7))));
                next += 1 << order;
            }
            assert_eq!(next, end);
            assert!([from.wrapping_sub(1), end].iter().all(|&i| forest.tree().load(i).is_empty()));
            forest.check();
            clear(&forest);
        }
    }
    in_every_shape!(check);
}

#[test]
fn an_entry_keeps_all_its_bits() {
    let ones = |bits: u32| (0..bits).map(|bit| 1 << bit);
    for number in ones(30).chain([0, NUMBERS_MAX - 1]) {
        assert_eq!(Entry::from_bits(Entry::folio(number).bits()).kind(), Kind::Folio(number));
        assert_eq!(Entry::from_bits(Entry::node(number).bits()).kind(), Kind::Node(number));
    }
    for payload in ones(25).chain([0, PAYLOADS_MAX - 1]) {
        for order in 0..=ENTRY_ORDER_MAX {
            for value in [Value::shadow(order, payload), Value::spill(order, payload)] {
                assert_eq!(Entry::from_bits(Entry::value(value).bits()).kind(), Kind::Value(value));
                assert_eq!((value.order(), value.payload()), (order, payload));
                assert_eq!(value.with_order(ENTRY_ORDER_MAX).with_order(order), value);
            }
            assert!(Value::spill(order, payload).is_spill() && !Value::shadow(order, payload).is_spill());
        }
    }
    let root = Root { entry: Entry::node(NUMBERS_MAX - 1), levels: 52 };
    assert_eq!(Root::from_bits(root.bits()), root);
}

#[test]
fn every_split_copies_its_marks_to_every_piece() {
    fn check<const BITS: u32>() {
        for (order, to) in (1..=ENTRY_ORDER_MAX).flat_map(|order| (0..order).map(move |to| (order, to))) {
            let (forest, base) = (forest::<BITS>(), 1u64 << order);
            put(&forest, base, order, shadow(order, 5));
            forest.tree().set_mark(base + 1, Mark::Zero);
            forest.tree().set_mark(base + 1, Mark::Two);
            let (middle, new) = (base + (base >> 1), Entry::folio(folio(1, to)));
            assert_eq!(forest.tree().store(middle, to, new, |_, _, _| {}), Stored::Done);
            let mut next = base;
            for (first, entry, order) in forest.tree().range(0, LAST) {
                let marks = Mark::ALL.map(|mark| forest.tree().has_mark(first, mark));
                if first == middle {
                    assert_eq!((entry, order, marks), (new, to, [false; 3]));
                } else {
                    assert_eq!((entry, marks), (shadow(order, 5), [true, false, true]));
                }
                assert_eq!(first, next);
                next += 1 << order;
            }
            assert_eq!(next, 2 << order);
            forest.check();
        }
    }
    in_every_shape!(check);
}

#[test]
fn nodes_of_shadows_alone_are_listed() {
    fn check<const BITS: u32>() {
        for base in [0u64, 64, 4096] {
            let forest = forest::<BITS>();
            let listed = || forest.nodes.shadow_only_nodes().len();
            put(&forest, base, 0, shadow(0, 1));
            assert_eq!(listed(), usize::from(base > 0), "the root's word is no node");
            put(&forest, base + 1, 0, shadow(0, 2));
            assert_eq!(listed(), 1);
            put_folio(&forest, base, 0, 3);
            assert_eq!(listed(), 0, "a folio beside it takes the node off the list");
            assert_eq!(forest.tree().replace(base, Value::shadow(0, 4)), Entry::folio(folio(3, 0)));
            assert_eq!(listed(), 1, "its eviction puts the node back");
            forest.check();
            let node = forest.nodes.shadow_only_nodes()[0];
            forest.tree().forget(node);
            assert!(forest.tree().is_empty() && listed() == 0 && forest.nodes.live() == 0);
        }
    }
    in_every_shape!(check);
}

#[test]
fn counts_of_a_large_entry_are_those_of_its_slots() {
    fn check<const BITS: u32>() {
        for order in 1..=ENTRY_ORDER_MAX {
            let (forest, base) = (forest::<BITS>(), 1u64 << order);
            // `check` counts every node's slots and shadows anew and compares them with what the node says.
            put(&forest, base, order, shadow(order, 1));
            forest.check();
            put_folio(&forest, base, order, 1);
            forest.check();
            assert!(forest.nodes.shadow_only_nodes().is_empty(), "no slot counts as a shadow any more");
            forest.tree().replace(base, Value::spill(order, 2));
            forest.check();
            assert!(forest.nodes.shadow_only_nodes().is_empty(), "a spill is no shadow");
            forest.tree().erase(base);
            assert_eq!(forest.nodes.live(), 0, "no slot counts as taken any more");
        }
    }
    in_every_shape!(check);
}

#[test]
fn everything_goes_and_every_node_comes_back() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        clear(&forest);
        for order in 0..=ENTRY_ORDER_MAX {
            put_folio(&forest, 0, 0, 1);
            put_folio(&forest, 1 << order, order, 2);
            put(&forest, 1 << 51, order, shadow(order, 3));
            put(&forest, INDICES_MAX - (1 << order), order, Entry::value(Value::spill(order, 4)));
            let mut gone = 0;
            forest.tree().erase_range(0, INDICES_MAX, |_, _, _| gone += 1);
            assert_eq!((gone, forest.nodes.live()), (4, 0));
            assert!(forest.tree().is_empty());
            forest.check();
        }
    }
    in_every_shape!(check);
}

#[test]
fn erasing_marked_entries_does_not_end_a_marked_walk() {
    fn check<const BITS: u32>() {
        let forest = forest::<BITS>();
        let there: Vec<u64> = (0..300).step_by(3).collect();
        for &at in &there {
            put_folio(&forest, at, 0, 1);
            forest.tree().set_mark(at, Mark::One);
        }
        let (mut from, mut met) = (0, Vec::new());
        while let Some((first, ..)) = forest.tree().next_marked(from, LAST, Mark::One) {
            met.push(first);
            forest.tree().erase(first);
            // The next one's mark goes as well, every second time; the walk passes it over and goes on.
            if met.len() % 2 == 0 {
                forest.tree().clear_mark(first + 3, Mark::One);
            }
            from = first + 1;
        }
        let want: Vec<u64> =
            there.into_iter().enumerate().filter(|(n, _)| n % 3 != 2).map(|(_, at)| at).collect();
        assert_eq!(met, want);
        assert!(!forest.tree().is_marked(Mark::One));
        forest.check();
    }
    in_every_shape!(check);
}

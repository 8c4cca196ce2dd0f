//! Insertion of one entry: conflicts, shadows consumed, shadows split, and nodes that run out.
//!
//! ```text
//!   what covers the range     the answer                  the tree
//!   nothing                   Done, no shadow             the folio
//!   shadows, not larger       Done, the last of them      the folio instead
//!   one larger shadow         Done, the piece cut out     the folio, and pieces that say what the whole said
//!   a folio or a spill        Present                     the same, node by node
//!   no node to be had         NoNode                      the same, page by page
//! ```
//!
//! The letters are those of the specification's statements. A07 to A11 and A15 to A17 are about locks, reserves and
//! folios: they belong to the mapping.

use std::panic::{AssertUnwindSafe, catch_unwind};

use quinion::internals::xarray::{
    ENTRY_ORDER_MAX, Entry, INDICES_MAX, Inserted, Kind, Mark, RangeStop, Split, Stored, Value,
};
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
fn done(shadow: Option<Value>) -> Inserted {
    Inserted::Done { shadow }
}

/// The entries in a range, as (first, order), and that each is `want` where it is not the folio.
fn pieces<const BITS: u32>(forest: &Forest<BITS>) -> Vec<(u64, u8)> {
    forest.tree().range(0, u64::MAX).map(|(first, _, order)| (first, order)).collect()
}

/// A01: a folio added to an empty range is loaded at each index that it covers, with its order, and at no other.
#[test]
fn a01_an_empty_slot_takes_a_folio_of_any_order() {
    for order in 0..=15 {
        for far in [0u64, 1, 5, 1 << 20, (1 << (52 - order)) - 1] {
            let (forest, index, f) = (forest::<6>(), far << order, folio(3, order));
            assert_eq!(forest.tree().insert(index, order, f), done(None));
            let last = index + (1 << order) - 1;
            for covered in [index, last, index + (1 << order) / 3] {
                assert_eq!(forest.tree().load(covered), Entry::folio(f));
                assert_eq!(forest.walk(covered), Entry::folio(f));
                assert_eq!(forest.tree().order_at(covered), Some(order));
            }
            assert_eq!(forest.tree().load(last + 1), Entry::EMPTY);
            assert_eq!(index.checked_sub(1).map_or(Entry::EMPTY, |i| forest.tree().load(i)), Entry::EMPTY);
            forest.check();
        }
    }
}

/// A02: a folio at any index of the range refuses the insertion, and the tree stays the same, node by node.
#[test]
fn a02_any_folio_in_the_way_refuses_and_nothing_changes() {
    for order in 0..=6 {
        for in_the_way in 0..1u64 << order {
            let forest = forest::<2>();
            put(&forest, 64 + in_the_way, 0, Entry::folio(folio(1, 0)));
            put(&forest, 500, 0, shadow(0, 9));
            let before = forest.tree().dump_nodes();
            let got = forest.tree().insert(64, order, folio(2, order));
            assert_eq!(got, Inserted::Present(Entry::folio(folio(1, 0))));
            assert_eq!(forest.tree().dump_nodes(), before);
            forest.check();
        }
    }
}

/// A02: a folio of any order in the way refuses the insertion, also one that covers all of the range and more, and the
/// tree stays the same, node by node.
#[test]
fn a02_a_larger_folio_around_the_range_refuses_as_well() {
    fn of_every_order<const BITS: u32>() {
        for (there, asked) in (0..=9u8).flat_map(|there| (0..=9u8).map(move |asked| (there, asked))) {
            let forest = forest::<BITS>();
            let base = 1 << 12;
            put(&forest, base, there, Entry::folio(folio(1, there)));
            put(&forest, 7, 0, shadow(0, 9));
            let before = forest.tree().dump_nodes();
            for index in [base, base + (1 << there) - 1].map(|index| index >> asked << asked) {
                let got = forest.tree().insert(index, asked, folio(2, asked));
                assert_eq!(got, Inserted::Present(Entry::folio(folio(1, there))), "{asked} over {there}");
            }
            assert_eq!(forest.tree().dump_nodes(), before);
            forest.check();
        }
    }
    of_every_order::<2>();
    of_every_order::<6>();
}

/// A02: a folio in the way refuses an insertion that would need a taller tree, and the tree does not grow.
#[test]
fn a02_a_folio_that_needs_a_taller_tree_is_refused_without_a_trace() {
    let forest = forest::<2>();
    put(&forest, 3, 0, Entry::folio(folio(1, 0)));
    let before = forest.tree().dump_nodes();
    assert_eq!(forest.tree().insert(0, 9, folio(2, 9)), Inserted::Present(Entry::folio(folio(1, 0))));
    assert_eq!(forest.tree().dump_nodes(), before);
    forest.check();
}

/// A03: a folio of order n over 2^n single shadows replaces them all, and returns the one at the highest index.
#[test]
fn a03_a_folio_takes_the_place_of_all_shadows_under_it_and_hears_of_the_last() {
    for order in 0..=9 {
        let forest = forest::<3>();
        for i in 0..1 << order {
            put(&forest, 1024 + i, 0, shadow(0, 100 + i as u32));
        }
        let last = Value::shadow(0, 100 + (1 << order) - 1);
        assert_eq!(forest.tree().insert(1024, order, folio(1, order)), done(Some(last)));
        assert_eq!(
            forest.tree().dump(),
            format!("1024..={} folio {} order {order} ...\n", 1023 + (1 << order), folio(1, order))
        );
        forest.check();
    }
}

/// A04: a folio over any mix of shadows and holes replaces them all, and returns the shadow at the highest index.
#[test]
fn a04_holes_among_the_shadows_do_not_matter() {
    for holes in 0..1u32 << 8 {
        let forest = forest::<2>();
        let mut last = None;
        for i in (0..8).filter(|i| holes >> i & 1 == 0) {
            put(&forest, 8 + i, 0, shadow(0, i as u32));
            last = Some(Value::shadow(0, i as u32));
        }
        assert_eq!(forest.tree().insert(8, 3, folio(1, 3)), done(last));
        assert_eq!(pieces(&forest), [(8, 3)]);
        forest.check();
    }
}

/// A05, A06 and A18 for one case: an order-`big` shadow, a folio of order `small` somewhere in it. Leaves the
/// forest empty.
fn insert_inside<const BITS: u32>(forest: &Forest<BITS>, big: u8, small: u8, place: u64) {
    let (base, value) = (3 << big, Value::shadow(big, 77));
    put(forest, base, big, Entry::value(value));
    let index = base + (place << small);
    let (got, descents) = forest.descents(|tree| tree.insert(index, small, folio(1, small)));
    assert_eq!(got, done(Some(value.with_order(small))));
    assert_eq!(descents, 1, "A18: one way down, split or not");
    let mut next = base;
    for (first, entry, order) in forest.tree().range(0, u64::MAX) {
        assert_eq!(first, next, "the pieces and the folio lie side by side");
        next += 1u64 << order;
        if first == index {
            assert_eq!((entry, order), (Entry::folio(folio(1, small)), small));
        } else {
            assert_eq!(entry, Entry::value(value.with_order(order)));
        }
    }
    assert_eq!(next - base, 1 << big, "the pieces and the folio are as large as the whole was");
    forest.check();
    load_every_index(forest, base, index, (big, small));
    forest.tree().erase_range(0, INDICES_MAX, |_, _, _| {});
    assert_eq!(forest.nodes.live(), 0);
}

/// Each index of the shadow loads the folio or the shadow's value, with the lock and without: all of them of a small
/// one, those around the edges of a large one.
fn load_every_index<const BITS: u32>(forest: &Forest<BITS>, base: u64, index: u64, (big, small): (u8, u8)) {
    let edges = [base, index.max(base + 1) - 1, index, index + (1 << small) - 1, index + (1 << small)];
    let (all, last) = (base..base + (1 << big), base + (1 << big) - 1);
    let probes: Vec<u64> = if big <= 7 { all.collect() } else { edges.map(|i| i.min(last)).to_vec() };
    for covered in probes {
        let inside = covered >> small == index >> small;
        let found = forest.tree().load(covered);
        assert_eq!(found == Entry::folio(folio(1, small)), inside);
        assert_eq!(matches!(found.kind(), Kind::Value(v) if v.payload() == 77), !inside);
        assert_eq!(forest.walk(covered), found);
    }
}

/// A05: a page added at any index of a shadow of any order lies there exactly, and the other indices still load the
/// shadow.
#[test]
fn a05_a_page_at_every_index_of_a_shadow_of_every_order() {
    fn at_every_index<const BITS: u32>() {
        let forest = forest::<BITS>();
        for order in 1..=ENTRY_ORDER_MAX {
            (0..1 << order).for_each(|place| insert_inside(&forest, order, 0, place));
        }
    }
    at_every_index::<2>();
    at_every_index::<6>();
}

/// A06: a folio of any order smaller than a shadow lies exactly where it was put in it, and the other indices still
/// load the shadow.
#[test]
fn a06_a_folio_of_every_smaller_order_at_every_place() {
    fn at_every_place<const BITS: u32>(order_max: u8) {
        let forest = forest::<BITS>();
        for (big, small) in (1..=order_max).flat_map(|big| (0..big).map(move |small| (big, small))) {
            (0..1 << (big - small)).for_each(|place| insert_inside(&forest, big, small, place));
        }
    }
    at_every_place::<1>(11);
    at_every_place::<2>(11);
    at_every_place::<3>(11);
    at_every_place::<6>(ENTRY_ORDER_MAX);
}

/// A12: when nodes run out in a split, nothing is stored, and each index still loads the shadow's value.
#[test]
fn a12_pages_without_nodes_keep_their_entries() {
    for order in 1..=9u8 {
        for budget in 0..10 {
            let forest = forest::<1>();
            put(&forest, 512, order, shadow(order, 5));
            let live = forest.nodes.live();
            let got = forest.with_budget(budget, |tree| tree.insert(512 + 1, 0, folio(1, 0)));
            if got == done(Some(Value::shadow(0, 5))) {
                assert!(budget >= u64::from(order), "it takes a node for every step");
                continue;
            }
            assert_eq!(got, Inserted::NoNode);
            assert!(forest.nodes.live() <= live + budget as u32);
            for index in 512..512 + (1 << order) {
                let Kind::Value(value) = forest.tree().load(index).kind() else {
                    panic!("a shadow was lost")
                };
                assert_eq!(value.payload(), 5);
            }
            forest.check();
        }
    }
}

/// A12: when nodes run out on the way to an empty place, the tree stays the same, node by node.
#[test]
fn a12_an_empty_place_without_nodes_stays_empty() {
    for budget in 0..6 {
        let forest = forest::<2>();
        put(&forest, 2, 0, Entry::folio(folio(1, 0)));
        let before = forest.tree().dump_nodes();
        let far = 1 << 12;
        let got = forest.with_budget(budget, |tree| tree.insert(far, 0, folio(2, 0)));
        assert_eq!(got, Inserted::NoNode);
        assert_eq!(forest.tree().dump_nodes(), before, "neither the height nor a node is left over");
        forest.check();
    }
}

/// A13: the marks of a shadow that is split are copied to each piece, and the folio has none.
#[test]
fn a13_pieces_of_a_split_inherit_the_marks_and_a_folio_has_none() {
    for big in 1..=8u8 {
        for place in 0..1u64 << big {
            let forest = forest::<2>();
            put(&forest, 0, big, shadow(big, 1));
            put(&forest, 1 << big, 0, shadow(0, 2));
            forest.tree().set_mark(place, Mark::One);
            assert!(matches!(forest.tree().insert(place, 0, folio(1, 0)), Inserted::Done { .. }));
            for (first, _, _) in forest.tree().range(0, u64::MAX) {
                let inherits = first != place && first < 1 << big;
                assert_eq!(forest.tree().has_mark(first, Mark::One), inherits);
                assert!(!forest.tree().has_mark(first, Mark::Zero));
            }
            forest.check();
        }
    }
}

/// A13: a folio that replaces marked shadows has none of their marks.
#[test]
fn a13_a_store_over_marked_shadows_leaves_no_mark_anywhere() {
    let forest = forest::<2>();
    for i in 0..64 {
        put(&forest, 64 + i, 0, shadow(0, 1));
        forest.tree().set_mark(64 + i, Mark::ALL[i as usize % 3]);
    }
    assert!(Mark::ALL.into_iter().all(|mark| forest.tree().is_marked(mark)));
    assert_eq!(forest.tree().insert(64, 6, folio(1, 6)), done(Some(Value::shadow(0, 1))));
    assert!(!Mark::ALL.into_iter().any(|mark| forest.tree().is_marked(mark)));
    forest.check();
}

/// Checks that an insertion is refused with these words, and that the tree is the same afterwards, node by node.
fn refuses(index: u64, order: u8, why: &str) {
    let forest = forest::<6>();
    put(&forest, 0, 9, shadow(9, 1));
    put(&forest, 1 << 20, 0, Entry::folio(folio(2, 0)));
    let (before, live) = (forest.tree().dump_nodes(), forest.nodes.live());
    let insert = || forest.tree().insert(index, order, folio(0, 0));
    let refused = catch_unwind(AssertUnwindSafe(insert)).unwrap_err();
    let said = refused.downcast_ref::<String>().map(String::as_str).or(refused.downcast_ref().copied());
    assert!(said.is_some_and(|said| said.contains(why)), "{said:?}");
    assert_eq!((forest.tree().dump_nodes(), forest.nodes.live()), (before, live));
    forest.check();
}

/// A14: an order larger than the tree stores is refused before anything is done.
#[test]
fn a14_an_order_beyond_the_largest_is_refused_up_front() {
    refuses(0, 16, "the tree stores orders up to 15");
    refuses(0, u8::MAX, "the tree stores orders up to 15");
}

/// A14: an index that is not aligned to the order is refused before anything is done.
#[test]
fn a14_so_is_an_index_that_is_not_aligned() {
    refuses(4, 3, "align it");
    refuses(511, 1, "align it");
}

/// A14: an index past the last one that the tree reaches is refused before anything is done.
#[test]
fn a14_so_is_an_index_beyond_the_end_of_all_files() {
    refuses(1 << 52, 0, "the tree reaches to");
}

/// A18: an insertion costs one descent. One that splits nothing, into a node that is there, needs no new node.
#[test]
fn a18_an_insertion_without_a_split_takes_one_way_down_and_no_node() {
    let forest = forest::<6>();
    put(&forest, 0, 0, Entry::folio(folio(1, 0)));
    put(&forest, 63, 0, Entry::folio(folio(1, 0)));
    let got = forest.with_budget(0, |tree| tree.insert(7, 0, folio(2, 0)));
    assert_eq!(got, done(None));
    let (_, descents) = forest.descents(|tree| tree.insert(8, 0, folio(3, 0)));
    assert_eq!(descents, 1);
}

/// A18: an insertion that splits a shadow needs one node for each level between the two orders, and no more.
#[test]
fn a18_a_split_takes_the_nodes_of_its_way_down_and_no_more() {
    fn from_every_order<const BITS: u32>() {
        for (big, small) in (1..=ENTRY_ORDER_MAX).flat_map(|big| (0..big).map(move |small| (big, small))) {
            let forest = forest::<BITS>();
            put(&forest, 3 << big, big, shadow(big, 1));
            let steps = u32::from(big) / BITS - u32::from(small) / BITS; // levels between the two
            let before = forest.nodes.live();
            let got =
                forest.with_budget(u64::from(steps), |tree| tree.insert(3 << big, small, folio(1, small)));
            assert!(matches!(got, Inserted::Done { .. }), "{steps} nodes suffice");
            assert_eq!(forest.nodes.live(), before + steps, "a node for each level, for {big} to {small}");
        }
    }
    from_every_order::<1>();
    from_every_order::<2>();
    from_every_order::<6>();
}

/// A19: a spilled entry is as much in the way as a folio, and is never split, replaced in part or erased in part.
#[test]
fn a19_a_spill_is_present_and_is_never_split() {
    fn of_every_order<const BITS: u32>() {
        for order in 0..=ENTRY_ORDER_MAX {
            let forest = forest::<BITS>();
            let (base, spill) = (1 << 16, Entry::value(Value::spill(order, 4)));
            put(&forest, base, order, spill);
            let before = forest.tree().dump_nodes();
            refuse_all_but_the_whole(&forest, base, order, spill);
            assert_eq!(forest.tree().dump_nodes(), before);
            forest.check();
        }
    }
    of_every_order::<2>();
    of_every_order::<3>();
    of_every_order::<6>();
}

/// Whatever is inserted over the spill or into it, or stored into it, is told of it.
fn refuse_all_but_the_whole<const BITS: u32>(forest: &Forest<BITS>, base: u64, order: u8, spill: Entry) {
    let last = base + (1 << order) - 1;
    for other in 0..=ENTRY_ORDER_MAX {
        for index in [base, last].map(|index| index >> other << other) {
            assert_eq!(forest.tree().insert(index, other, folio(1, other)), Inserted::Present(spill));
            if other < order {
                let got = forest.tree().store(index, other, shadow(other, 1), |_, _, _| {});
                assert_eq!(got, Stored::Present(spill), "a store inside it would split it");
            }
        }
    }
    let mut tree = forest.tree();
    let stopped = tree.insert_range(base, [(0, folio(1, 0))], |_, _| panic!("a spill is no shadow"));
    assert_eq!((stopped.added, stopped.stop), (0, RangeStop::Present(spill)));
    if order > 0 {
        tree.erase_range(base, last, |_, _, _| panic!("part of it was not meant"));
        tree.erase_range(base + 1, last + 1, |_, _, _| panic!("part of it was not meant"));
    }
}

#[test]
fn a_split_leaves_the_sizes_it_documents() {
    let forest = forest::<6>();
    put(&forest, 0, 9, shadow(9, 1));
    forest.tree().insert(77, 0, folio(1, 0));
    let mut want = vec![(0, 6)];
    want.extend((64..96).map(|index| (index, 0)));
    want.push((96, 5));
    want.extend((2..8).map(|i| (64 * i, 6)));
    assert_eq!(pieces(&forest), want);
}

#[test]
fn two_folios_in_one_shadow_lose_no_index() {
    for (first, second) in (0..64u64).flat_map(|a| (0..64).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        let forest = forest::<2>();
        put(&forest, 0, 6, shadow(6, 1));
        assert!(matches!(forest.tree().insert(first, 0, folio(1, 0)), Inserted::Done { .. }));
        assert!(matches!(forest.tree().insert(second, 0, folio(2, 0)), Inserted::Done { .. }));
        assert_eq!(forest.tree().load(first), Entry::folio(folio(1, 0)));
        assert_eq!(forest.tree().load(second), Entry::folio(folio(2, 0)));
        assert!((0..64).all(|index| !forest.tree().load(index).is_empty()));
        forest.check();
    }
}

#[test]
fn a_split_alone_leaves_the_pieces_an_insertion_would() {
    for (big, small) in (1..=9u8).flat_map(|big| (0..big).map(move |small| (big, small))) {
        for place in (0..1u64 << big).step_by(1 << small) {
            let (alone, inserted) = (forest::<2>(), forest::<2>());
            for forest in [&alone, &inserted] {
                put(forest, 512, big, shadow(big, 5));
                put(forest, 3, 0, Entry::value(Value::spill(0, 1)));
            }
            let (got, descents) = alone.descents(|tree| tree.split(512 + place, small));
            assert_eq!((got, descents), (Split::Done, 1));
            assert_eq!(alone.tree().load(512 + place), shadow(small, 5));
            alone.check();
            inserted.tree().insert(512 + place, small, folio(1, small));
            assert_eq!(pieces(&alone), pieces(&inserted), "{big} to {small} at {place}");
            assert_eq!(alone.tree().split(512 + place, big), Split::Done, "it is small enough");
        }
    }
    let forest = forest::<2>();
    put(&forest, 512, 6, shadow(6, 5));
    put(&forest, 3, 0, Entry::value(Value::spill(0, 1)));
    put(&forest, 4, 2, Entry::folio(folio(1, 2)));
    for index in [0, 3, 4, 600, 1 << 30] {
        assert_eq!(forest.tree().split(index, 0), Split::Nothing);
    }
    let got = forest.with_budget(1, |tree| tree.split(512, 0));
    assert_eq!(got, Split::NoNode);
    forest.check();
}

#[test]
fn a_tree_of_one_shadow_gets_lower_when_that_is_split() {
    for (big, small) in (1..=9u8).flat_map(|big| (0..big).map(move |small| (big, small))) {
        for budget in [1, 9] {
            let (split, inserted) = (forest::<2>(), forest::<2>());
            put(&split, 0, big, shadow(big, 5));
            split.with_budget(budget, |tree| tree.split(0, small));
            split.check();
            put(&inserted, 0, big, shadow(big, 5));
            inserted.with_budget(budget, |tree| tree.insert(0, small, folio(1, small)));
            inserted.check();
        }
    }
}

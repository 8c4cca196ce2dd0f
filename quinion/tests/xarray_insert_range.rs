//! Insertion of a run: a prefix of the batch goes in, and what comes after it stays the caller's.
//!
//! ```text
//!   batch    F0 F1 F2 F3 F4 F5        Present(G), added 3: the caller still owns F3, F4, F5
//!   tree     .  s  .  G  .  .   -->   F0 F1 F2 G  .  .        and was told that F1 took s
//! ```
//!
//! The letters are those of the specification's statements. B08 and B10 to B17 are about what happens between two holds
//! of the lock, and B19 counts locks: they belong to the mapping.

use quinion::internals::xarray::{
    AddedRange, Entry, Inserted, RangeStop, Reserve, ReserveFill, Stored, Value, XArray,
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
fn batch(n: u32, order: u8) -> impl Iterator<Item = (u8, u32)> {
    (0..n).map(move |id| (order, folio(id, order)))
}
fn no_shadow(_: usize, shadow: Value) {
    panic!("{shadow:?} came from nowhere");
}
fn prefix(added: usize, order: u8, stop: RangeStop) -> AddedRange {
    AddedRange { added, pages: (added as u64) << order, stop }
}

/// B01: an empty batch inserts nothing, and is no error.
#[test]
fn b01_an_empty_batch_does_nothing() {
    let forest = forest::<6>();
    assert_eq!(forest.tree().insert_range(17, [], no_shadow), prefix(0, 0, RangeStop::All));
    assert!(forest.tree().is_empty());
}

/// B02: a batch over an empty range goes in whole, and each index loads its folio.
#[test]
fn b02_over_nothing_all_of_it_goes_in() {
    for (order, n, start) in [(0u8, 512u32, 0u64), (0, 700, 1 << 21), (4, 50, 16), (9, 8, 1 << 30), (2, 1, 4)]
    {
        let forest = forest::<6>();
        let got = forest.tree().insert_range(start, batch(n, order), no_shadow);
        assert_eq!(got, prefix(n as usize, order, RangeStop::All));
        for id in 0..n {
            let first = start + (u64::from(id) << order);
            for index in first..first + (1 << order) {
                assert_eq!(forest.tree().load(index), Entry::folio(folio(id, order)));
                assert_eq!(forest.walk(index), Entry::folio(folio(id, order)));
            }
        }
        assert_eq!(forest.tree().range(0, u64::MAX).count(), n as usize);
        forest.check();
    }
}

/// B02: a batch of folios of several orders over an empty range goes in whole.
#[test]
fn b02_orders_may_be_mixed() {
    let forest = forest::<3>();
    let orders = [0u8, 0, 1, 2, 3, 4, 4, 0, 1, 0, 2, 3];
    let mut index = 0u64;
    let mut batch = Vec::new();
    for (id, order) in orders.into_iter().enumerate() {
        let order = order.min(index.trailing_zeros() as u8);
        batch.push((order, folio(id as u32, order)));
        index += 1 << order;
    }
    let got = forest.tree().insert_range(0, batch.iter().copied(), no_shadow);
    assert_eq!(got, AddedRange { added: orders.len(), pages: index, stop: RangeStop::All });
    forest.check();
}

/// B03: a folio at the first index stops the batch, and nothing is inserted.
#[test]
fn b03_a_folio_at_the_start_stops_it_before_anything() {
    let forest = forest::<6>();
    put(&forest, 100, 0, Entry::folio(folio(99, 0)));
    let before = forest.tree().dump_nodes();
    let got = forest.tree().insert_range(100, batch(8, 0), no_shadow);
    assert_eq!(got, prefix(0, 0, RangeStop::Present(Entry::folio(folio(99, 0)))));
    assert_eq!(forest.tree().dump_nodes(), before);
}

/// B04: a folio further on stops the batch there: the prefix stays, and a second call from there inserts nothing.
#[test]
fn b04_a_folio_further_on_leaves_the_prefix_and_a_second_call_says_why() {
    for k in 1..200u64 {
        let forest = forest::<6>();
        put(&forest, 40 + k, 0, Entry::folio(folio(999, 0)));
        let present = RangeStop::Present(Entry::folio(folio(999, 0)));
        assert_eq!(forest.tree().insert_range(40, batch(200, 0), no_shadow), prefix(k as usize, 0, present));
        assert_eq!(forest.tree().insert_range(40 + k, batch(200, 0), no_shadow), prefix(0, 0, present));
        assert_eq!(forest.tree().load(40 + k + 1), Entry::EMPTY, "nothing goes in beyond the stop");
        forest.check();
    }
}

/// B05: shadows are no conflict: each is replaced, and is reported with the folio that took its place.
#[test]
fn b05_shadows_are_no_conflict_and_each_is_reported_with_its_taker() {
    let forest = forest::<2>();
    for index in [3u64, 4, 9, 30] {
        put(&forest, index, 0, shadow(0, index as u32));
    }
    put(&forest, 16, 2, shadow(2, 16));
    let mut seen = Vec::new();
    let got = forest.tree().insert_range(0, batch(20, 1), |taker, value| seen.push((taker, value)));
    assert_eq!(got, prefix(20, 1, RangeStop::All));
    let one = |payload| Value::shadow(0, payload);
    let half = Value::shadow(1, 16);
    assert_eq!(seen, [(1, one(3)), (2, one(4)), (4, one(9)), (8, half), (9, half), (15, one(30))]);
    forest.check();
}

/// B06: pages inserted at 77 to 79 of a shadow of order 9 lie there exactly, and all other indices still load the
/// shadow.
#[test]
fn b06_a_run_inside_one_large_shadow_lies_exactly_where_it_was_put() {
    let forest = forest::<6>();
    put(&forest, 0, 9, shadow(9, 5));
    let mut seen = 0;
    let got = forest.tree().insert_range(77, batch(3, 0), |_, value| {
        assert_eq!(value, Value::shadow(0, 5));
        seen += 1;
    });
    assert_eq!((got, seen), (prefix(3, 0, RangeStop::All), 3));
    for index in 0..512 {
        let want = match index {
            77..=79 => Entry::folio(folio(index as u32 - 77, 0)),
            64..=95 => shadow(0, 5),
            96..=127 => shadow(5, 5),
            _ => shadow(6, 5),
        };
        assert_eq!(forest.tree().load(index), want, "at {index}");
    }
    forest.check();
}

/// B07: a batch that ends in its middle inserts the prefix.
#[test]
fn b07_a_batch_that_ends_early_is_a_prefix() {
    // A hole among the folios cannot be written down: a batch is an iterator, and ends where it ends.
    let forest = forest::<6>();
    let folios = [Some((0u8, folio(1, 0))), Some((0, folio(2, 0))), None, Some((0, folio(3, 0)))];
    let got = forest.tree().insert_range(10, folios.into_iter().map_while(|f| f), no_shadow);
    assert_eq!(got, prefix(2, 0, RangeStop::All));
    assert_eq!(forest.tree().load(12), Entry::EMPTY);
}

/// B09: when nodes run out for good the prefix stays, no node is lost, and the rest can be inserted later.
#[test]
fn b09_the_prefix_stays_and_nothing_leaks_when_nodes_run_out_for_good() {
    for budget in 0..12 {
        let forest = forest::<2>();
        let got = forest.with_budget(budget, |tree| tree.insert_range(0, batch(64, 0), no_shadow));
        assert_eq!(got.stop, if got.added == 64 { RangeStop::All } else { RangeStop::NoNode });
        assert!(got.added > 0, "index 0 needs no node");
        for index in 0..64 {
            assert_eq!(forest.tree().load(index).is_empty(), index >= got.pages);
        }
        forest.check();
        // The same batch goes on where it stopped.
        let rest = batch(64, 0).skip(got.added);
        assert_eq!(forest.tree().insert_range(got.pages, rest, no_shadow).stop, RangeStop::All);
        forest.check();
    }
}

/// A18: a batch costs one descent as well, also when it splits a shadow.
#[test]
fn a18_a_batch_takes_one_way_down_as_well() {
    let forest = forest::<6>();
    put(&forest, 1 << 20, 0, Entry::folio(folio(1, 0)));
    let (got, descents) = forest.descents(|tree| tree.insert_range(64, batch(512, 0), no_shadow));
    assert_eq!((got, descents), (prefix(512, 0, RangeStop::All), 1));
    put(&forest, 4096, 9, shadow(9, 1));
    let (_, descents) = forest.descents(|tree| tree.insert_range(4096, batch(512, 0), |_, _| {}));
    assert_eq!(descents, 1, "also when a shadow is split on the way");
}

#[test]
fn a_batch_is_the_same_as_one_by_one() {
    for start in [0u64, 1, 60, 63, 64, 4090] {
        let (together, alone) = (forest::<3>(), forest::<3>());
        for f in [&together, &alone] {
            put(f, 64, 5, shadow(5, 1));
            put(f, 3, 0, shadow(0, 2));
        }
        let got = together.tree().insert_range(start, batch(100, 0), |_, _| {});
        assert_eq!(got.stop, RangeStop::All);
        for id in 0..100 {
            let one = alone.tree().insert(start + u64::from(id), 0, folio(id, 0));
            assert!(matches!(one, Inserted::Done { .. }));
        }
        assert_eq!(together.tree().dump(), alone.tree().dump());
        together.check();
        alone.check();
    }
}

/// The posted kernel series positioned its cursor from its own, rounded-down index after a split: with an
/// order-9 shadow at 0, a folio for index 77 ended up at 64.
#[test]
fn a_split_does_not_move_the_folio() {
    fn lands_where_asked<const BITS: u32>() {
        for index in 0..512u64 {
            let forest = forest::<BITS>();
            put(&forest, 0, 9, shadow(9, 1));
            forest.tree().insert_range(index, batch(1, 0), |_, _| {});
            let found: Vec<u64> =
                (0..512).filter(|&i| forest.tree().load(i) == Entry::folio(folio(0, 0))).collect();
            assert_eq!(found, [index]);
        }
    }
    lands_where_asked::<6>();
    lands_where_asked::<3>();
}

#[test]
fn a_reserve_taken_before_the_lock_suffices_and_gives_back_its_rest() {
    for (start, n) in [(0u64, 1u32), (0, 512), (4000, 300), (1 << 40, 64), (63, 2)] {
        let forest = forest::<3>();
        put(&forest, 4096, 9, shadow(9, 1));
        put(&forest, 7 << 20, 0, Entry::folio(folio(1, 0)));
        let mut reserve = Reserve::new(&forest.nodes);
        assert_eq!(reserve.fill(forest.tree().nodes_needed(start, u64::from(n))), ReserveFill::Whole);
        // From here on the slab itself has no node.
        let got = forest.with_budget(0, |_| {
            XArray::<_, 3>::new(&reserve, &forest.root).insert_range(start, batch(n, 0), |_, _| {})
        });
        assert_eq!(got, prefix(n as usize, 0, RangeStop::All));
        drop(reserve);
        forest.check();
        forest.tree().erase_range(0, 1 << 52, |_, _, _| {});
        assert_eq!(forest.nodes.live(), 0);
    }
}

#[test]
fn a_reserve_says_how_short_it_is() {
    let forest = forest::<3>();
    forest.nodes.budget.store(3, std::sync::atomic::Ordering::Relaxed);
    let mut reserve = Reserve::new(&forest.nodes);
    assert_eq!(reserve.fill(5), ReserveFill::Short(3));
    assert_eq!(forest.nodes.live(), 3);
    drop(reserve);
    assert_eq!(forest.nodes.live(), 0);
}

/// A14: a folio of a batch that is not aligned where it comes to lie is refused.
#[test]
#[should_panic(expected = "align it")]
fn a14_a_folio_that_is_not_aligned_where_it_comes_to_lie_is_refused() {
    forest::<6>().tree().insert_range(0, [(0, folio(1, 0)), (1, folio(2, 1))], no_shadow);
}

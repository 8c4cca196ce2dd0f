//! Every operation in every small state, against the naive twin.
//!
//! A tree's shape follows from its entries alone (no node is empty, no level too many), so all states of a tree of a
//! few indices are all the ways to lay entries side by side:
//!
//! ```text
//!   indices     0 1 2 3 4 5 6 7
//!               [--F2---|. s s-1]     one state of very many: a folio of order 2, a hole, two shadows
//!
//!   windows     every state of 4 indices, beside each of several neighbours, x every operation x 0 to 3 nodes
//!   pairs       every state of 8 indices of folios and shadows, x the operations that change entries
//!   sequences   every three operations in a row from an empty tree of 16 indices, one far out
//!   splits      a folio of every order, split at every edge, and what comes of it once more
//! ```

use quinion_testing::twins::xarray::{Op, Pair};

const NODES: u32 = 64;
/// What [`Op::Store`] calls a folio, a shadow and a spill.
const KINDS: [u8; 3] = [0, 2, 5];

/// One entry: first index, order, kind.
type Piece = (u64, u8, u8);

fn states(at: u64, order: u8, kinds: &[u8]) -> Vec<Vec<Piece>> {
    let mut all: Vec<Vec<Piece>> = kinds.iter().map(|&kind| vec![(at, order, kind)]).collect();
    if order == 0 {
        all.push(Vec::new());
        return all;
    }
    let low = states(at, order - 1, kinds);
    let high = states(at + (1 << (order - 1)), order - 1, kinds);
    all.extend(low.iter().flat_map(|low| high.iter().map(move |high| [&low[..], &high[..]].concat())));
    all
}

fn build<const BITS: u32>(pair: &mut Pair<BITS>, pieces: &[Piece]) {
    pair.clear();
    for (n, &(at, order, what)) in pieces.iter().enumerate() {
        pair.step(&Op::Store { at, order, what });
        if n % 2 == 1 {
            pair.step(&Op::Mark { at, mark: (n % 3) as u8 });
        }
    }
}

fn places(end: u64) -> impl Iterator<Item = (u64, u8)> {
    (0..4u8).flat_map(move |order| (0..end >> order).map(move |i| (i << order, order)))
}
fn ranges(end: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..end).flat_map(move |at| (1..=end - at).map(move |pages| (at, pages)))
}

fn growing(end: u64) -> Vec<Op> {
    let mut ops = Vec::new();
    for (at, order) in places(end) {
        ops.push(Op::Insert { at, order });
        ops.extend(KINDS.map(|what| Op::Store { at, order, what }));
    }
    for at in 0..end {
        let batches = [[0u8; 4], [1; 4], [0, 0, 1, 2], [2, 1, 0, 0]];
        ops.extend(batches.map(|orders| Op::InsertRange { at, orders: orders.to_vec() }));
    }
    ops.extend((0..end).map(|at| Op::Split { at }));
    ops.extend(ranges(end).map(|(at, pages)| Op::StoreRange { at, pages, spill: at % 2 == 0 }));
    ops
}

fn others(end: u64) -> Vec<Op> {
    let mut ops = Vec::new();
    for at in 0..end {
        ops.push(Op::Erase { at });
        ops.extend([false, true].map(|spill| Op::Replace { at, spill }));
        ops.extend([0, 1, 2].map(|to| Op::Exchange { at, hit: true, to }));
        ops.extend([
            Op::Exchange { at, hit: false, to: 0 },
            Op::Mark { at, mark: 1 },
            Op::Unmark { at, mark: 1 },
        ]);
    }
    ops.extend(ranges(end).map(|(at, pages)| Op::EraseRange { at, pages }));
    ops.extend((0..2).map(|which| Op::Forget { which }));
    ops
}

/// In one state: every search, every operation, and those that grow with too few nodes as well.
fn try_all<const BITS: u32>(pair: &mut Pair<BITS>, state: &[Piece], growing: &[Op], others: &[Op]) {
    build(pair, state);
    pair.compare();
    ranges(8).for_each(|(at, pages)| pair.step(&Op::Scan { at, pages }));
    for op in others {
        build(pair, state);
        pair.step(op);
        pair.compare();
    }
    for (op, nodes) in growing.iter().flat_map(|op| [0, 1, 2, u64::MAX].map(|nodes| (op, nodes))) {
        build(pair, state);
        pair.step(&Op::Budget { nodes });
        pair.step(op);
        pair.compare();
    }
}

fn windows<const BITS: u32>() {
    let neighbours: [&[Piece]; 5] =
        [&[], &[(4, 2, 0)], &[(4, 2, 2)], &[(4, 0, 5), (6, 1, 2)], &[(1 << 20, 0, 0)]];
    let (mut pair, growing, others) = (Pair::<BITS>::new(NODES), growing(8), others(8));
    for state in states(0, 2, &KINDS) {
        for beside in neighbours {
            try_all(&mut pair, &[&state[..], beside].concat(), &growing, &others);
        }
    }
}

#[test]
fn every_operation_in_every_window_of_two_slot_nodes() {
    windows::<1>();
}

#[test]
fn every_operation_in_every_window_of_four_slot_nodes() {
    windows::<2>();
}

#[test]
fn every_insertion_and_erasure_in_every_pair_of_nodes_of_folios_and_shadows() {
    let mut ops: Vec<Op> = places(8).map(|(at, order)| Op::Insert { at, order }).collect();
    ops.extend((0..8).map(|at| Op::Erase { at }));
    ops.extend((0..8).map(|at| Op::InsertRange { at, orders: vec![0; 8] }));
    ops.extend((0..8).map(|at| Op::EraseRange { at, pages: 8 - at }));
    let mut pair = Pair::<2>::new(NODES);
    for state in states(0, 3, &KINDS[..2]) {
        for op in &ops {
            build(&mut pair, &state);
            pair.step(op);
            pair.compare();
        }
    }
}

/// A folio of every order, marked or not, alone or beside another, split at every edge and then at every other, with
/// too few nodes as well.
fn splits<const BITS: u32>(orders: std::ops::RangeInclusive<u8>) {
    let mut pair = Pair::<BITS>::new(NODES);
    for order in orders {
        let base = 1u64 << order;
        for (one, two) in
            (1..base).flat_map(|one| (one..base).step_by(1 + base as usize / 16).map(move |two| (one, two)))
        {
            for (at, mark, nodes) in [(0, None, u64::MAX), (base, Some(1), u64::MAX), (base, Some(2), 1)] {
                pair.clear();
                pair.step(&Op::Store { at, order, what: 0 });
                mark.into_iter().for_each(|mark| pair.step(&Op::Mark { at: at + base - 1, mark }));
                pair.step(&Op::Budget { nodes });
                pair.step(&Op::Split { at: at + one });
                pair.compare();
                pair.step(&Op::Split { at: at + two });
                pair.compare();
            }
        }
    }
}

#[test]
fn every_split_of_every_folio() {
    splits::<1>(1..=5);
    splits::<2>(1..=5);
    splits::<3>(1..=6);
    splits::<6>(1..=7);
}

#[test]
fn every_three_operations_in_a_row() {
    let mut ops = Vec::new();
    for (at, order) in [(0, 0), (0, 1), (0, 2), (0, 3), (3, 0), (4, 2), (5, 0), (8, 3), (15, 0), (1 << 30, 0)]
    {
        ops.push(Op::Insert { at, order });
        ops.extend([2, 5].map(|what| Op::Store { at, order, what }));
        ops.extend([Op::Erase { at }, Op::Mark { at, mark: 0 }, Op::Replace { at, spill: false }]);
        ops.extend((order > 1).then_some(Op::Split { at: at + 1 }));
    }
    ops.extend([Op::EraseRange { at: 3, pages: 9 }, Op::StoreRange { at: 1, pages: 14, spill: false }]);
    ops.extend([Op::InsertRange { at: 2, orders: vec![0; 9] }, Op::Forget { which: 0 }]);
    let mut pair = Pair::<2>::new(NODES);
    for one in &ops {
        for two in &ops {
            for three in &ops {
                pair.clear();
                [one, two, three].into_iter().for_each(|op| pair.step(op));
                pair.compare();
            }
        }
    }
}

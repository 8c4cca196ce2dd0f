//! The tree against a naive twin, by random operations that are made shorter when they fail: with nodes of 2, 4, 8 and
//! 64 slots and an allocator of nodes that runs out at random.
//!
//! `quinion_testing::twins::xarray` says what is compared, and with what.

use proptest::prelude::*;
use quinion_testing::twins::xarray::{Bytes, Op, run};

/// Indices mostly near each other, sometimes far out.
fn index(span: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0..span,
        2 => 0..span.min(70),
        1 => (0u64..20, 0..span).prop_map(|(far, near)| (1 << (20 + far)) + near),
        1 => ((1u64 << 52) - 4096)..(1u64 << 52),
    ]
}

fn op(span: u64, orders: u8) -> impl Strategy<Value = Op> {
    let order = prop_oneof![3 => Just(0u8), 3 => 0..orders, 1 => 0..=15u8];
    prop_oneof![
        6 => (index(span), order.clone()).prop_map(|(at, order)| Op::Insert { at, order }),
        4 => (index(span), proptest::collection::vec(prop_oneof![2 => Just(0u8), 1 => 0..orders], 0..40))
            .prop_map(|(at, orders)| Op::InsertRange { at, orders }),
        6 => (index(span), order, 0..6u8).prop_map(|(at, order, what)| Op::Store { at, order, what }),
        4 => index(span).prop_map(|at| Op::Erase { at }),
        1 => (index(span), 0..span).prop_map(|(at, pages)| Op::EraseRange { at, pages }),
        2 => (index(span), 0..span, any::<bool>())
            .prop_map(|(at, pages, spill)| Op::StoreRange { at, pages, spill }),
        3 => (index(span), any::<bool>()).prop_map(|(at, spill)| Op::Replace { at, spill }),
        3 => (index(span), prop_oneof![2 => Just(1), 1 => 1..80u64], proptest::collection::vec(0..3u8, 1..150))
            .prop_map(|(at, step, fates)| Op::Revise { at, step, fates }),
        2 => (index(span), any::<bool>(), 0..3u8).prop_map(|(at, hit, to)| Op::Exchange { at, hit, to }),
        4 => (index(span), 0..3u8).prop_map(|(at, mark)| Op::Mark { at, mark }),
        2 => (index(span), 0..3u8).prop_map(|(at, mark)| Op::Unmark { at, mark }),
        3 => index(span).prop_map(|at| Op::Split { at }),
        2 => (index(span), 0..8u8, 0..8u8).prop_map(|(at, give, take)| Op::Remark { at, give, take }),
        2 => (index(span), 0..span, 0..3u8, 0..3u8, 0..9usize)
            .prop_map(|(at, pages, have, give, max)| Op::MarkMarked { at, pages, have, give, max }),
        1 => (0..9usize).prop_map(|which| Op::Forget { which }),
        3 => (index(span), 0..span).prop_map(|(at, pages)| Op::Scan { at, pages }),
        2 => (0..6u64).prop_map(|nodes| Op::Budget { nodes }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn two_slots(ops in proptest::collection::vec(op(64, 5), 1..80)) { run::<1>(20_000, &ops) }
    #[test]
    fn four_slots(ops in proptest::collection::vec(op(200, 6), 1..80)) { run::<2>(20_000, &ops) }
    #[test]
    fn eight_slots(ops in proptest::collection::vec(op(300, 8), 1..80)) { run::<3>(20_000, &ops) }
    #[test]
    fn sixty_four_slots(ops in proptest::collection::vec(op(2000, 11), 1..80)) { run::<6>(20_000, &ops) }
}

#[test]
fn any_bytes_are_operations() {
    let bytes: Vec<u8> = (0..2000u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
    let ops: Vec<Op> = Bytes(&bytes).collect();
    assert!(ops.len() > 200, "a step takes few bytes");
    run::<2>(20_000, &ops);
}

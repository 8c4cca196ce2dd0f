//! Readers without the lock, while a writer inserts, splits, erases, grows and shrinks.
//!
//! The tree's entries describe themselves: a folio's number holds its place and order, a shadow's payload its block. So
//! a reader can check every entry that it finds by itself.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use quinion::internals::xarray::{Entry, Kind, NodeSlab, RacySlots, Stored, Value, XArray};
use quinion_testing::nodes::{Forest, Reuse, TestNodes};

const SPAN: u64 = 512;
const BLOCK_ORDER: u8 = 6;

/// A folio with its place: in units of its size, above its order.
fn folio_at(index: u64, order: u8) -> u32 {
    ((index >> order) as u32) << 4 | u32::from(order)
}
/// A shadow with its block of 64 pages, whole or split.
fn shadow_at(index: u64, order: u8) -> Entry {
    Entry::value(Value::shadow(order, (index >> BLOCK_ORDER) as u32))
}

/// Whether `entry` may ever have covered `index`.
fn is_legal(index: u64, entry: Entry) -> bool {
    match entry.kind() {
        Kind::Empty => true,
        Kind::Node(_) => false,
        Kind::Folio(folio) => index >> (folio & 15) == u64::from(folio >> 4),
        Kind::Value(value) => {
            value.order() <= BLOCK_ORDER && index >> BLOCK_ORDER == u64::from(value.payload())
        }
    }
}

struct Random(u64);
impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

fn write<const BITS: u32>(forest: &Forest<BITS>, steps: u32) {
    let mut random = Random(0x1234_5678_9abc_def1);
    for _ in 0..steps {
        let index = random.below(SPAN);
        let order = random.below(u64::from(BLOCK_ORDER) + 1) as u8;
        let first = index & !((1 << order) - 1);
        let mut tree = forest.tree();
        match random.below(12) {
            0..=3 => {
                tree.insert(first, order, folio_at(first, order));
            }
            4 => {
                tree.insert_range(index, (index..SPAN).map(|i| (0, folio_at(i, 0))).take(40), |_, _| {});
            }
            5..=6 => {
                tree.store(first, order, shadow_at(first, order), |_, _, _| {});
            }
            7 => {
                tree.erase(index);
            }
            8 => tree.erase_range(index, index + random.below(200), |_, _, _| {}),
            9 => evict(&mut tree, index),
            // Far out and back: the tree gets taller, and lower again.
            10 => {
                tree.insert(1 << 30, 0, folio_at(1 << 20, 0));
            }
            _ => {
                tree.erase(1 << 30);
            }
        }
    }
}

/// Leaves a shadow in place of what covers `index`.
fn evict<const BITS: u32>(tree: &mut XArray<'_, TestNodes, BITS>, index: u64) {
    if let Some((first, _, order)) = tree.entry_at(index)
        && let Kind::Value(value) = shadow_at(first, order).kind()
    {
        tree.replace(index, value);
    }
}

/// Two readers and a writer; returns how many entries the readers saw that never were legal.
fn race<const BITS: u32>(forest: &Forest<BITS>, steps: u32) -> u64 {
    let (stop, wrong) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let readers = [1, 2].map(|seed| {
            let (stop, wrong) = (&stop, &wrong);
            scope.spawn(move || {
                let mut random = Random(seed);
                while !stop.load(Relaxed) {
                    let index = random.below(SPAN);
                    let entries = [forest.walk(index), forest.walk_by_steps(index).0];
                    if !entries.iter().all(|entry| is_legal(index, *entry)) {
                        wrong.fetch_add(1, Relaxed);
                    }
                }
            })
        });
        write(forest, steps);
        stop.store(true, Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    forest.check();
    wrong.into_inner()
}

/// Whether both ways of walking find the same everywhere near the entries of a tree that stands still.
fn steps_find_the_entries_that_walks_find<const BITS: u32>() {
    let forest = Forest::<BITS>::new(60_000, Reuse::Never);
    let same = |index| {
        let (entry, levels) = forest.walk_by_steps(index);
        assert_eq!(entry, forest.walk(index), "at {index}");
        assert!(levels <= 64 / BITS + 1);
    };
    (0..4).chain([u64::MAX]).for_each(same);
    for round in 0..20 {
        write(&forest, 40 + round);
        (0..SPAN + 70).for_each(same);
        [1 << 30, (1 << 30) + 1, 1 << 40, u64::MAX - 1, u64::MAX].into_iter().for_each(same);
    }
}

#[test]
fn a_walk_in_steps_finds_the_entries_of_a_walk() {
    steps_find_the_entries_that_walks_find::<2>();
    steps_find_the_entries_that_walks_find::<6>();
}

#[test]
fn readers_see_only_entries_that_were_there_once() {
    // Nodes are not reused, so that a reader in an unlinked node finds what was there.
    for _ in 0..4 {
        let small = Forest::<2>::new(150_000, Reuse::Never);
        assert_eq!(race(&small, 10_000), 0);
        let large = Forest::<6>::new(60_000, Reuse::Never);
        assert_eq!(race(&large, 20_000), 0);
    }
}

#[test]
fn readers_stay_in_bounds_when_nodes_are_reused_at_once() {
    // What they find is a hint that may be wrong; that they come back at all is the point.
    let small = Forest::<1>::new(3_000, Reuse::AtOnce);
    race(&small, 40_000);
    let large = Forest::<6>::new(300, Reuse::AtOnce);
    race(&large, 40_000);
}

#[test]
fn a_walk_over_rubbish_ends_and_stays_in_bounds() {
    let mut random = Random(99);
    let forest = Forest::<3>::new(64, Reuse::AtOnce);
    let nodes: Vec<u32> = std::iter::from_fn(|| forest.nodes.alloc()).collect();
    for _ in 0..2_000 {
        for &node in &nodes {
            for slot in forest.nodes.slots(node) {
                // Mostly links from node to node, in circles and to nowhere; sometimes just bits.
                let link = Entry::node(nodes[0] + random.below(70) as u32).bits();
                slot.store(if random.below(4) > 0 { link } else { random.below(1 << 32) as u32 }, Relaxed);
            }
        }
        forest.root.store(random.below(u64::MAX), Relaxed);
        for _ in 0..100 {
            let entry = forest.walk(random.below(1 << 52));
            assert!(!matches!(entry.kind(), Kind::Node(_)), "a walk ends at no node");
        }
    }
    assert!(forest.nodes.racy_slots(0).is_none());
}

#[test]
fn a_reader_of_index_0_never_misses_it_while_the_tree_grows_and_shrinks() {
    let forest = Forest::<2>::new(200_000, Reuse::Never);
    forest.tree().insert(0, 0, folio_at(0, 0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Relaxed) {
                assert_eq!(forest.walk(0), Entry::folio(folio_at(0, 0)));
            }
        });
        for step in 0..10_000u32 {
            let far = 1 << (step % 12);
            forest.tree().insert(far, 0, folio_at(far, 0));
            forest.tree().erase(far);
        }
        stop.store(true, Relaxed);
        reader.join().unwrap();
    });
    forest.check();
}

#[test]
fn a_split_never_hides_a_shadow_from_a_reader() {
    let forest = Forest::<2>::new(100_000, Reuse::Never);
    let stop = AtomicBool::new(false);
    let put = |order| {
        let stored = forest.tree().store(0, order, shadow_at(0, order), |_, _, _| {});
        assert_eq!(stored, Stored::Done);
    };
    put(6);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut random = Random(5);
            while !stop.load(Relaxed) {
                let index = random.below(64);
                let entry = forest.walk(index);
                assert!(!entry.is_empty(), "a hole at {index}");
                assert!(is_legal(index, entry));
            }
        });
        for step in 0..2_000u64 {
            let index = step * 37 % 64;
            forest.tree().insert(index, 0, folio_at(index, 0));
            if step % 8 == 7 {
                put(6); // over folios and pieces alike
            }
        }
        stop.store(true, Relaxed);
        reader.join().unwrap();
    });
    forest.check();
}

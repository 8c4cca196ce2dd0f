//! The tree under a model checker: a reader without the lock against a writer, in every interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg quinion_model" cargo test -p quinion --release --test xarray_model --target-dir target/model
//! ```
//!
//! Without that cfg this file is empty. With it the checker lets each load return whatever the memory model of Rust
//! allows, so a node that is linked before its slots are seen as prepared is found.
//!
//! # What is promised
//!
//! 1. While no node is handed out again, a reader of an index finds what stood there at some moment of
//!    its walk: nothing, the shadow or a piece of it, or a folio that contains the index, with its descriptor
//!    as it was set up. New nodes are full of rubbish, which it never finds. (A16, B18)
//! 2. What the writer does not touch is never hidden: neither by growth nor by shrinking, nor by a split.
//! 3. If nodes are handed out again at once, a walk still ends at no node, and what it finds is a hint:
//!    whoever holds the descriptor it names holds a folio that contains the index, or is refused.
//! 4. A reader that finds the shadow of an eviction finds the folio retired.
//!
//! # Every step is needed
//!
//! | left out | scenario | what happens |
//! |---|---|---|
//! | `SlotRelease`, `SlotAcquire` | `a_plant_below` | rubbish of a node that was not yet prepared |
//! | | `a_split` | the same |
//! | | `an_eviction` | the shadow is found, and its folio passes for readable |
//! | `RootRelease`, `RootAcquire` | `an_insertion` | rubbish, below the root |
//! | | `growth` | rubbish, where a folio stands all the while |
//! | `NodeInit` | `a_plant_below` | rubbish beside the new entry |
//! | `PlantLast` | `a_plant_below` | rubbish, on every machine |
//! | `SplitLast` | `a_split` | a hole where a shadow is |
//! | `CutLast` | `a_split_of_a_folio` | a hole where a folio is |
//! | `WalkLeaf` | `nodes_handed_out_again` | a walk ends at a node |
//!
//! And of the descriptor's steps those on which promise 3 rests, without which a reader that came by a stale slot holds
//! another page's folio: `ReaderIndex`, `HoldCompare`, `PrepareRelease`, `RetireHolds`.
//!
//! A hint needs none of the orderings to be safe: the descriptor decides (promise 3). They make the hint good at once
//! (promises 1 and 2), so that "absent" is rare and never said of what stays in place.

#![cfg(quinion_model)]
#![allow(unsafe_code, reason = "bytes under a hold are plain memory; the model watches them for races")]

use std::sync::{Arc, Mutex};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use model_support::{Needed, all_needed, each_fails, explore};
use quinion::internals::arena::{Descriptor, HoldRefused, ReadableState};
use quinion::internals::sync::Mutant;
use quinion::internals::units::{MappingId, Order, PageIndex};
use quinion::internals::xarray::{
    Entry, Head, Kind, NodeSlab, RacySlots, Split, Value, XArray, load_root, walk,
};

mod model_support;

const FILE: MappingId = MappingId(1);
const NODES: u32 = 8;
const FOLIOS: u32 = 5;
/// The folio that rubbish names.
const RUBBISH: u32 = 99;
const SHADOW: u32 = 7;
/// Times that a thread is interrupted within one run, at most: a walk has three loads.
const PREEMPTIONS: Option<usize> = Some(3);

/// What becomes of a node that comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reuse {
    Never,
    AtOnce,
}

struct Folio {
    descriptor: Descriptor,
    bytes: UnsafeCell<u64>,
}

// SAFETY: the model runs one thread at a time, and its cell reports what would be a race.
unsafe impl Sync for Folio {}

struct Tree<const BITS: u32> {
    slots: Vec<Vec<AtomicU32>>,
    heads: Vec<Head>,
    folios: Vec<Folio>,
    root: AtomicU64,
    /// Used by the writer alone.
    free: Mutex<Vec<u32>>,
    reuse: Reuse,
}

impl<const BITS: u32> Tree<BITS> {
    fn new(reuse: Reuse) -> Self {
        let rubbish = |_| AtomicU32::new(Entry::folio(RUBBISH).bits());
        let folio = |_| Folio { descriptor: Descriptor::new(), bytes: UnsafeCell::new(0) };
        Self {
            slots: (0..NODES).map(|_| (0..1 << BITS).map(rubbish).collect()).collect(),
            heads: (0..NODES).map(|_| std::array::from_fn(|_| AtomicU64::new(u64::MAX))).collect(),
            folios: (0..FOLIOS).map(folio).collect(),
            root: AtomicU64::new(0),
            free: Mutex::new((0..NODES).rev().collect()),
            reuse,
        }
    }

    fn writer(&self) -> XArray<'_, Self, BITS> {
        XArray::new(self, &self.root)
    }
    fn prepare(&self, index: u64, order: u8, folio: u32) {
        self.folios[folio as usize].descriptor.prepare(FILE, PageIndex(index), Order(order));
    }
    fn fill(&self, folio: u32) {
        let Folio { descriptor, bytes } = &self.folios[folio as usize];
        let content = descriptor.index().0;
        // SAFETY: the model checks that no other thread accesses it.
        bytes.with_mut(|bytes| unsafe { *bytes = content });
        descriptor.complete();
    }
    fn insert(&self, index: u64, order: u8, folio: u32) {
        self.prepare(index, order, folio);
        self.writer().insert(index, order, folio);
        self.fill(folio);
    }
    fn insert_range(&self, index: u64, orders: &[u8]) {
        let mut at = index;
        for (folio, &order) in (1..).zip(orders) {
            self.prepare(at, order, folio);
            at += 1 << order;
        }
        let added =
            self.writer().insert_range(index, orders.iter().copied().zip(1..).collect::<Vec<_>>(), |_, _| {});
        assert_eq!(added.added, orders.len());
    }
    fn put_shadow(&self, order: u8) {
        self.writer().store(0, order, Entry::value(Value::shadow(order, SHADOW)), |_, _, _| {});
    }
    fn remove(&self, index: u64, folio: u32) -> bool {
        let is_ours = self.folios[folio as usize].descriptor.try_retire().is_some();
        if is_ours {
            self.writer().erase(index);
        }
        is_ours
    }

    /// What a walk finds: never a node.
    fn find(&self, index: u64) -> Entry {
        let entry = walk::<_, BITS>(self, load_root(&self.root), index);
        assert!(!matches!(entry.kind(), Kind::Node(_)), "wrong end: a walk to {index} ended at {entry:?}");
        entry
    }
    /// What a reader finds while no node is handed out again.
    fn see(&self, index: u64) -> String {
        match self.find(index).kind() {
            Kind::Empty => "-".into(),
            Kind::Value(value) => {
                assert_eq!(value.payload(), SHADOW, "a shadow is a piece of what stood there");
                "shadow".into()
            }
            Kind::Folio(folio) => {
                assert!(folio < FOLIOS, "rubbish: index {index} of a node that was not prepared");
                let descriptor = &self.folios[folio as usize].descriptor;
                let first = descriptor.index().align_down(Order(0)).0;
                let pages = u64::from(descriptor.word().order().pages());
                let is_ours = descriptor.mapping() == FILE && index.wrapping_sub(first) < pages;
                assert!(is_ours, "wrong folio: index {index} has one that is set up for {first}");
                format!("folio {folio}")
            }
            Kind::Node(_) => unreachable!("asserted in `find`"),
        }
    }
    fn hold(&self, index: u64) -> String {
        let Kind::Folio(folio) = self.find(index).kind() else { return "not there".into() };
        let Some(Folio { descriptor, bytes }) = self.folios.get(folio as usize) else {
            return "refused".into();
        };
        let stamp = match descriptor.try_hold_unfilled(FILE, PageIndex(index)) {
            Ok(stamp) => stamp,
            Err(HoldRefused::Mismatch) => return "refused".into(),
            Err(other) => panic!("nothing else can be refused here: {other:?}"),
        };
        let readable = descriptor.is_readable(stamp);
        if readable == ReadableState::Yes {
            // SAFETY: the model checks that no thread writes.
            let content = bytes.with(|bytes| unsafe { *bytes });
            assert!(content == index, "wrong bytes: page {content} for page {index}");
        }
        descriptor.put();
        format!("{readable:?}")
    }
}

impl<const BITS: u32> NodeSlab for Tree<BITS> {
    fn slots(&self, node: u32) -> &[AtomicU32] {
        &self.slots[node as usize]
    }
    fn head(&self, node: u32) -> &Head {
        &self.heads[node as usize]
    }
    fn alloc(&self) -> Option<u32> {
        self.free.lock().unwrap().pop()
    }
    fn free(&self, node: u32) {
        if self.reuse == Reuse::AtOnce {
            self.free.lock().unwrap().push(node);
        }
    }
    fn order(&self, folio: u32) -> u8 {
        self.folios[folio as usize].descriptor.word().order().0
    }
}

impl<const BITS: u32> RacySlots for Tree<BITS> {
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]> {
        self.slots.get(node as usize).map(Vec::as_slice)
    }
}

// ---- scenarios ----------------------------------------------------------------------------------------

/// `write` on the first thread against `read` on another, for a tree that `prepare` made. The reader's result must be
/// one of `expected`, and each of these must occur.
fn race<const BITS: u32>(
    reuse: Reuse,
    prepare: fn(&Tree<BITS>),
    write: fn(&Tree<BITS>),
    read: impl Fn(&Tree<BITS>) -> String + Copy + Send + Sync + 'static,
    expected: &'static [&'static str],
) {
    explore(PREEMPTIONS, expected, move || {
        let tree = Arc::new(Tree::new(reuse));
        prepare(&tree);
        let reader = loom::thread::spawn({
            let tree = tree.clone();
            move || {
                let told = read(&tree);
                assert!(expected.contains(&&*told), "wrong: a reader found '{told}', right is {expected:?}");
                told
            }
        });
        write(&tree);
        let told = reader.join().unwrap();
        tree.writer().check().expect("the tree is whole");
        told
    });
}

/// As [`race`], for a reader of `index`, while no node is handed out again.
fn seen<const BITS: u32>(
    prepare: fn(&Tree<BITS>),
    write: fn(&Tree<BITS>),
    index: u64,
    expected: &'static [&'static str],
) {
    race(Reuse::Never, prepare, write, move |tree| tree.see(index), expected);
}

fn nothing(_: &Tree<1>) {}

#[test]
fn an_insertion() {
    let write = |tree: &Tree<1>| tree.insert(3, 0, 1);
    seen(nothing, write, 3, &["-", "folio 1"]);
    seen(nothing, write, 2, &["-"]);
    seen(nothing, write, 0, &["-"]);
}

/// A new node below one that is there.
#[test]
fn a_plant_below() {
    let two = |tree: &Tree<1>| {
        tree.insert(0, 0, 1);
        tree.insert(4, 0, 2);
    };
    let write = |tree: &Tree<1>| tree.insert(2, 0, 3);
    seen(two, write, 2, &["-", "folio 3"]);
    seen(two, write, 3, &["-"]);
    seen(two, write, 0, &["folio 1"]);
}

#[test]
fn a_folio_of_several_slots() {
    let write = |tree: &Tree<2>| tree.insert(2, 1, 1);
    seen(|_| {}, write, 2, &["-", "folio 1"]);
    seen(|_| {}, write, 3, &["-", "folio 1"]);
    seen(|_| {}, write, 1, &["-"]);
}

#[test]
fn growth() {
    seen::<1>(|tree| tree.insert(0, 0, 1), |tree| tree.insert(2, 0, 2), 0, &["folio 1"]);
    seen::<1>(|tree| tree.insert(1, 0, 1), |tree| tree.insert(5, 0, 2), 1, &["folio 1"]);
}

#[test]
fn shrinking() {
    let two = |tree: &Tree<1>| {
        tree.insert(0, 0, 1);
        tree.insert(2, 0, 2);
    };
    seen(two, |tree| assert!(tree.remove(2, 2)), 0, &["folio 1"]);
    seen(two, |tree| assert!(tree.remove(2, 2)), 2, &["-", "folio 2"]);
    seen(two, |tree| assert!(tree.remove(0, 1)), 2, &["folio 2"]);
}

#[test]
fn a_batch_in_one_leaf() {
    let write = |tree: &Tree<1>| tree.insert_range(2, &[0, 0]);
    seen(nothing, write, 2, &["-", "folio 1"]);
    seen(nothing, write, 3, &["-", "folio 2"]);
}

#[test]
fn a_batch_over_a_leaf_boundary() {
    let write = |tree: &Tree<1>| tree.insert_range(1, &[0, 0]);
    seen(nothing, write, 1, &["-", "folio 1"]);
    seen(nothing, write, 2, &["-", "folio 2"]);
    seen(nothing, write, 3, &["-"]);
    let mixed = |tree: &Tree<1>| tree.insert_range(1, &[0, 1]);
    seen(nothing, mixed, 1, &["-", "folio 1"]);
    seen(nothing, mixed, 3, &["-", "folio 2"]);
}

/// A reader that saw the second folio of a batch may still miss the first, or not: no order is promised.
/// Either way each is nothing or the right folio.
#[test]
fn a_batch_read_backwards() {
    let read = |tree: &Tree<1>| format!("{}, {}", tree.see(2), tree.see(1));
    race(
        Reuse::Never,
        nothing,
        |tree| tree.insert_range(1, &[0, 0]),
        read,
        &["-, -", "-, folio 1", "folio 2, folio 1"],
    );
}

#[test]
fn a_split() {
    let four = |tree: &Tree<1>| tree.put_shadow(2);
    let write = |tree: &Tree<1>| tree.insert(0, 0, 1);
    seen(four, write, 0, &["folio 1", "shadow"]);
    for index in 1..4 {
        seen(four, write, index, &["shadow"]);
    }
}

/// A shadow of two slots, which is first cut in its slots and then split below.
#[test]
fn a_split_in_its_slots() {
    let eight = |tree: &Tree<2>| tree.put_shadow(3);
    let write = |tree: &Tree<2>| tree.insert(0, 0, 1);
    seen(eight, write, 0, &["folio 1", "shadow"]);
    seen(eight, write, 1, &["shadow"]);
    seen(eight, write, 2, &["shadow"]);
    seen(eight, write, 5, &["shadow"]);
}

/// A folio of four pages becomes two of one and one of two. A reader finds the whole or its piece. It may hold the
/// piece, or is refused, because the folio that it found has just been split. It never finds nothing.
#[test]
fn a_split_of_a_folio() {
    let four = |tree: &Tree<1>| tree.insert(0, 2, 1);
    let write = |tree: &Tree<1>| {
        let whole = tree.folios[1].descriptor.try_begin_split().expect("nobody holds it");
        let split = tree.writer().split_folio(1, |first, order| {
            // Its frames follow each other, and so do the numbers of its pieces.
            let piece = 1 + first as u32;
            tree.folios[piece as usize].descriptor.prepare_piece(
                FILE,
                PageIndex(first),
                Order(order),
                whole,
                0,
            );
            piece
        });
        assert_eq!(split, Split::Done);
    };
    // The bytes of a page are in its frame: only the first page's are looked at here.
    let read = |index: u64| {
        move |tree: &Tree<1>| match tree.find(index).kind() {
            Kind::Folio(folio) => {
                assert!(folio < FOLIOS, "rubbish: index {index} of a node that was not prepared");
                let descriptor = &tree.folios[folio as usize].descriptor;
                match descriptor.begin_read(FILE, PageIndex(index)) {
                    Ok(stamp) if stamp.order() == Order(2) => "whole".into(),
                    Ok(stamp) => format!("piece {}", stamp.order().pages()),
                    Err(_) => "refused".to_owned(),
                }
            }
            other => format!("{other:?}"),
        }
    };
    for (index, piece) in [(0, "piece 1"), (1, "piece 1"), (2, "piece 2"), (3, "piece 2")] {
        let expected: &'static [&'static str] = match piece {
            "piece 1" => &["piece 1", "refused", "whole"],
            _ => &["piece 2", "refused", "whole"],
        };
        race(Reuse::Never, four, write, read(index), expected);
    }
}

#[test]
fn a_batch_into_a_shadow() {
    let four = |tree: &Tree<1>| tree.put_shadow(2);
    let write = |tree: &Tree<1>| tree.insert_range(1, &[0, 0]);
    seen(four, write, 0, &["shadow"]);
    seen(four, write, 1, &["folio 1", "shadow"]);
    seen(four, write, 2, &["folio 2", "shadow"]);
}

/// Two folios and their leaves go in one call.
#[test]
fn a_range_is_erased() {
    let three = |tree: &Tree<1>| {
        tree.insert(1, 0, 1);
        tree.insert(2, 0, 2);
        tree.insert(4, 0, 3);
    };
    let write = |tree: &Tree<1>| tree.writer().erase_range(0, 4, |_, _, _| {});
    seen(three, write, 1, &["-", "folio 1"]);
    seen(three, write, 2, &["-", "folio 2"]);
    seen(three, write, 3, &["-"]);
    seen(three, write, 4, &["folio 3"]);
}

#[test]
fn a_replacement() {
    let one = |tree: &Tree<2>| tree.insert(2, 1, 1);
    let write = |tree: &Tree<2>| {
        tree.writer().replace(3, Value::shadow(1, SHADOW));
    };
    seen(one, write, 2, &["folio 1", "shadow"]);
    seen(one, write, 3, &["folio 1", "shadow"]);
}

// ---- nodes and frames handed out again ------------------------------------------------------------

/// The tree gets lower and taller again, of the same nodes: what was a leaf is an inner node.
#[test]
fn nodes_handed_out_again() {
    let two = |tree: &Tree<1>| {
        tree.insert(0, 0, 1);
        tree.insert(2, 0, 2);
    };
    let write = |tree: &Tree<1>| {
        tree.remove(2, 2);
        tree.insert(4, 0, 3);
    };
    race(Reuse::AtOnce, two, write, |tree| tree.hold(2), &["Yes", "not there", "refused"]);
    race(Reuse::AtOnce, two, write, |tree| tree.hold(4), &["NotYet", "Yes", "not there"]);
}

/// What was the leaf of 2 is the leaf of 4, with another folio in the same slot.
#[test]
fn a_leaf_handed_out_again() {
    let two = |tree: &Tree<1>| {
        tree.insert(0, 0, 1);
        tree.insert(2, 0, 2);
        tree.insert(6, 0, 3);
    };
    let write = |tree: &Tree<1>| {
        tree.remove(2, 2);
        tree.insert(4, 0, 4);
    };
    race(Reuse::AtOnce, two, write, |tree| tree.hold(2), &["Yes", "not there", "refused"]);
}

/// The frame that a reader found in a slot is evicted and filled for another page before the reader holds
/// it: as in each step of a batched read, it holds its page's folio or none.
#[test]
fn a_frame_refilled_for_another_page() {
    let one = |tree: &Tree<1>| tree.insert(0, 0, 1);
    let write = |tree: &Tree<1>| {
        if tree.remove(0, 1) {
            tree.insert(2, 0, 1);
        }
    };
    race(Reuse::AtOnce, one, write, |tree| tree.hold(0), &["Yes", "not there", "refused"]);
    race(Reuse::AtOnce, one, write, |tree| tree.hold(2), &["NotYet", "Yes", "not there"]);
}

/// Eviction leaves a shadow. A reader that finds the shadow finds the folio retired; a holder of the folio finds its
/// bytes.
#[test]
fn an_eviction() {
    let two = |tree: &Tree<1>| {
        tree.insert(0, 0, 1);
        tree.insert(1, 0, 2);
    };
    let evict = |tree: &Tree<1>| {
        if tree.folios[1].descriptor.try_retire().is_some() {
            tree.writer().replace(0, Value::shadow(0, SHADOW));
        }
    };
    let read = |tree: &Tree<1>| {
        if let Kind::Value(_) = tree.find(0).kind() {
            let hit = tree.folios[1].descriptor.begin_read(FILE, PageIndex(0));
            assert!(hit.is_err(), "wrong hit: the folio of a shadow is readable");
            return "shadow".into();
        }
        tree.hold(0)
    };
    race(Reuse::AtOnce, two, evict, read, &["Yes", "not there", "refused", "shadow"]);
}

// ---- each step is needed ------------------------------------------------------------------------------

const TREE: &[Needed] = &[
    (
        Mutant::SlotRelease,
        &[("a_plant_below", "rubbish"), ("a_split", "rubbish"), ("an_eviction", "wrong hit")],
    ),
    (
        Mutant::SlotAcquire,
        &[("a_plant_below", "rubbish"), ("a_split", "rubbish"), ("an_eviction", "wrong hit")],
    ),
    (Mutant::RootRelease, &[("an_insertion", "rubbish"), ("growth", "rubbish")]),
    (Mutant::RootAcquire, &[("an_insertion", "rubbish"), ("growth", "rubbish")]),
    (Mutant::NodeInit, &[("a_plant_below", "rubbish")]),
    (Mutant::PlantLast, &[("a_plant_below", "rubbish")]),
    (Mutant::SplitLast, &[("a_split", "wrong: a reader found '-'")]),
    (Mutant::CutLast, &[("a_split_of_a_folio", "wrong: a reader found 'Empty'")]),
    (Mutant::WalkLeaf, &[("nodes_handed_out_again", "wrong end")]),
];

const HOLDS: &[Needed] = &[
    (
        Mutant::ReaderIndex,
        &[("a_frame_refilled_for_another_page", "wrong bytes"), ("a_leaf_handed_out_again", "wrong bytes")],
    ),
    (Mutant::HoldCompare, &[("a_frame_refilled_for_another_page", "found 'Never'")]),
    (Mutant::PrepareRelease, &[("a_frame_refilled_for_another_page", "found 'NotYet'")]),
    (Mutant::RetireHolds, &[("a_frame_refilled_for_another_page", "Causality violation")]),
];

#[test]
fn no_step_of_the_tree_can_be_left_out() {
    all_needed(Mutant::of_trees(), TREE);
}

#[test]
fn a_hold_by_a_stale_slot_rests_on_the_descriptor() {
    each_fails(HOLDS);
}

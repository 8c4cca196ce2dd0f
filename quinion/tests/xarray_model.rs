//! The tree under a model checker: a reader without the lock against a writer, in every interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg quinion_model" cargo test -p quinion --release --test xarray_model --target-dir target/model
//! ```
//!
//! Without that cfg this file is empty. With it the checker lets each load return whatever the memory
//! model of Rust allows, so a node that is linked before its slots are seen as prepared is found.
//!
//! Each scenario says what the reader may see. A folio carries a plain cell that is written before the
//! insertion: that the reader may read it is what Release and Acquire at the slot promise.
#![cfg(quinion_model)]

use std::cell::RefCell;
use std::sync::Arc;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use quinion::xarray::{Entry, Head, Kind, RacySlots, Root, Slab, Value, XArray, walk};

const NODES: u32 = 6;
/// Times that a thread is interrupted within one run, at most: a walk has three loads.
const PREEMPTIONS: usize = 4;

struct Tree {
    slots: Vec<[AtomicU32; 2]>,
    heads: Vec<Head>,
    /// Written by the writer before the folio goes in; read by whoever finds it.
    folios: Vec<AtomicU32>,
    root: AtomicU64,
    free: Mutex<RefCell<Vec<u32>>>,
}

impl Tree {
    fn new() -> Self {
        let rubbish = || AtomicU32::new(Entry::folio(99).bits());
        Self {
            slots: (0..NODES).map(|_| [rubbish(), rubbish()]).collect(),
            heads: (0..NODES).map(|_| std::array::from_fn(|_| AtomicU64::new(u64::MAX))).collect(),
            folios: (0..4).map(|_| AtomicU32::new(0)).collect(),
            root: AtomicU64::new(0),
            free: Mutex::new(RefCell::new((0..NODES).rev().collect())),
        }
    }
    fn writer(&self) -> XArray<'_, Self, 1> {
        XArray::new(self, &self.root)
    }
    fn insert(&self, index: u64, folio: u32) {
        self.folios[folio as usize].store(1, Ordering::Relaxed);
        self.writer().insert(index, 0, folio);
    }
    /// What a reader finds; that it is no rubbish, and that a folio is seen as it was prepared.
    fn read(&self, index: u64) -> Entry {
        // Acquire, partner: the tree's store of its root.
        let root = Root::from_bits(self.root.load(Ordering::Acquire));
        let entry = walk::<_, 1>(self, root, index);
        if let Kind::Folio(folio) = entry.kind() {
            assert!(folio < 4, "rubbish of a node that was not prepared");
            assert_eq!(self.folios[folio as usize].load(Ordering::Relaxed), 1, "a folio not yet prepared");
        }
        entry
    }
}

impl Slab for Tree {
    fn slots(&self, node: u32) -> &[AtomicU32] {
        &self.slots[node as usize]
    }
    fn head(&self, node: u32) -> &Head {
        &self.heads[node as usize]
    }
    fn alloc(&self) -> Option<u32> {
        self.free.lock().unwrap().borrow_mut().pop()
    }
    fn free(&self, _node: u32) {} // never handed out again: the reader is to judge what it finds
    fn order(&self, _folio: u32) -> u8 {
        0
    }
}

impl RacySlots for Tree {
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]> {
        self.slots.get(node as usize).map(|slots| slots.as_slice())
    }
}

/// `write` against a reader of `index`, who may find what `legal` says.
fn race(prepare: fn(&Tree), write: fn(&Tree), index: u64, legal: fn(Entry) -> bool) {
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = Some(PREEMPTIONS);
    checker.check(move || {
        let tree = Arc::new(Tree::new());
        prepare(&tree);
        let reader = loom::thread::spawn({
            let tree = tree.clone();
            move || {
                let entry = tree.read(index);
                assert!(legal(entry), "a reader of {index} found {entry:?}");
            }
        });
        write(&tree);
        reader.join().unwrap();
    });
}

fn shadow_of_four(tree: &Tree) {
    tree.writer().store(0, 2, Entry::value(Value::shadow(2, 7)), |_, _, _| {});
}

#[test]
fn an_insertion_shows_nothing_or_the_folio() {
    race(|_| {}, |tree| tree.insert(3, 1), 3, |entry| entry.is_empty() || entry == Entry::folio(1));
    race(|_| {}, |tree| tree.insert(3, 1), 2, Entry::is_empty);
}

#[test]
fn growth_hides_nothing() {
    race(|tree| tree.insert(0, 1), |tree| tree.insert(2, 2), 0, |entry| entry == Entry::folio(1));
    race(|tree| tree.insert(1, 1), |tree| tree.insert(5, 2), 1, |entry| entry == Entry::folio(1));
}

#[test]
fn shrinking_hides_nothing() {
    let two = |tree: &Tree| {
        tree.insert(0, 1);
        tree.insert(2, 2);
    };
    race(
        two,
        |tree| assert_eq!(tree.writer().erase(2), Entry::folio(2)),
        0,
        |entry| entry == Entry::folio(1),
    );
    race(
        two,
        |tree| assert_eq!(tree.writer().erase(0), Entry::folio(1)),
        2,
        |entry| entry == Entry::folio(2),
    );
}

#[test]
fn a_split_shows_the_shadow_or_a_piece_of_it() {
    for index in 0..4 {
        let legal = |entry: Entry| matches!(entry.kind(), Kind::Value(value) if value.payload() == 7);
        race(
            shadow_of_four,
            |tree| tree.insert(0, 1),
            index,
            if index == 0 { |entry| !entry.is_empty() } else { legal },
        );
    }
}

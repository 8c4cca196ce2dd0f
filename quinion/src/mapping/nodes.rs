//! Nodes: the stock of spare nodes of one mapping, between its tree and the arena.
//!
//! ```text
//!            before the lock                under it                     after it
//!   arena --alloc_cells(missing)--> [stock] <--alloc, free--> tree       [stock] --surplus--> arena
//!                                   count: read by all
//! ```
//!
//! Under the tree lock the tree takes nodes from the stock alone. So no insertion waits for the arena while others wait
//! for the tree; and all nodes that a window can need are had in one call.
//!
//! A stock, and not a reserve for each insertion: how many nodes one *can* need is mostly far more than it does need.
//! Nodes that are left over stay for the next insertion: a stream of windows seldom meets the arena's lock for nodes.
//!
//! The spare nodes form a list through a word of their heads that readers never look at; the slots stay as they are
//! until the next use. So a reader who is late finds old entries, which their descriptors refuse, and never a list.
//!
//! Invariants:
//!  1. Only the holder of the tree lock changes a stock; its count may be read by any thread, as a hint.
//!  2. When no lock is held, a stock has at most [`SPARE_MAX`] nodes, and that of a mapping without folios none.
//!  3. Spare nodes are cells in use by the arena's account, and so within the bound.
//!
//! An insertion that ran out carries the rest of the stock with it while it fetches more, so that it comes back with
//! more than it went with; if there is no more, all of it goes back.
//!
//! Not an invariant: that nodes counted before the lock are there under it.
//! Another insertion may have used it; then this one runs out, and comes back.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::arena::{Arena, CellNumber, GrownView};
use crate::units::{Frame, MappingId};
use crate::xarray::{ALLOCATOR_WORD, Head, NodeSlab, ShadowOnly};

use super::shadow_nodes::ShadowNodes;

/// Spare nodes that a mapping with folios keeps, at most.
pub const SPARE_MAX: u32 = 8;
/// Nodes given back under one hold of the arena's lock.
const GIVE_BACK_BATCH: usize = 256;
const NIL: u32 = 0;

#[derive(Debug, Default)]
pub(super) struct SpareNodes {
    first: AtomicU32,
    count: AtomicU32,
    locks: AtomicU64,
    descents: AtomicU64,
    splits: AtomicU64,
    refills: AtomicU64,
}

/// Counted of one mapping's tree since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TreeCounts {
    /// How often its lock was taken.
    pub locks: u64,
    /// Ways down from the root.
    pub descents: u64,
    /// Steps by which shadows were cut into smaller ones.
    pub splits: u64,
    /// Insertions that ran out of nodes, let the lock go and came back with more.
    pub refills: u64,
}

impl SpareNodes {
    /// Spare nodes there are; a hint without the lock.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }
    pub fn counts(&self) -> TreeCounts {
        TreeCounts {
            locks: self.locks.load(Ordering::Relaxed),
            descents: self.descents.load(Ordering::Relaxed),
            splits: self.splits.load(Ordering::Relaxed),
            refills: self.refills.load(Ordering::Relaxed),
        }
    }
    #[inline]
    pub fn count_lock(&self) {
        step(&self.locks);
    }
    pub fn count_refill(&self) {
        step(&self.refills);
    }

    /// Only the holder of the lock calls this, as [`SpareNodes::take`] and [`SpareNodes::cut`].
    pub fn put(&self, grown: GrownView<'_>, cell: CellNumber) {
        link(grown, cell).store(u64::from(self.first.load(Ordering::Relaxed)), Ordering::Relaxed);
        self.first.store(cell.0, Ordering::Relaxed);
        self.count.store(self.count() + 1, Ordering::Relaxed);
    }
    /// Takes a node. Its contents are arbitrary, its head's words too.
    fn take(&self, grown: GrownView<'_>) -> Option<CellNumber> {
        let first = CellNumber(self.first.load(Ordering::Relaxed));
        if first.0 == NIL {
            return None;
        }
        self.first.store(next(grown, first).0, Ordering::Relaxed);
        self.count.store(self.count() - 1, Ordering::Relaxed);
        Some(first)
    }
    /// Takes the nodes beyond `keep` off.
    pub fn cut<'a>(&self, arena: &'a Arena, keep: u32) -> Surplus<'a> {
        let mut surplus = Surplus { arena, first: NIL, count: 0 };
        let more = self.count().saturating_sub(keep);
        if more == 0 {
            return surplus;
        }
        surplus = Surplus { arena, first: self.first.load(Ordering::Relaxed), count: more };
        let (mut last, grown) = (CellNumber(surplus.first), arena.view().grown());
        for _ in 1..more {
            last = next(grown, last);
        }
        self.first.store(next(grown, last).0, Ordering::Relaxed);
        self.count.store(keep, Ordering::Relaxed);
        surplus
    }
}

fn step(number: &AtomicU64) {
    number.store(number.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

fn link(grown: GrownView<'_>, cell: CellNumber) -> &AtomicU64 {
    &grown.own_head(cell).words[ALLOCATOR_WORD]
}
fn next(grown: GrownView<'_>, cell: CellNumber) -> CellNumber {
    CellNumber(link(grown, cell).load(Ordering::Relaxed) as u32)
}

/// Nodes on their way back to the arena. They go when it is dropped: after the tree lock is let go.
#[derive(Debug)]
pub(super) struct Surplus<'a> {
    arena: &'a Arena,
    first: u32,
    count: u32,
}

impl<'a> Surplus<'a> {
    pub fn none(arena: &'a Arena) -> Self {
        Self { arena, first: NIL, count: 0 }
    }
    pub fn count(&self) -> u32 {
        self.count
    }
    /// Puts them into a stock after all. By the holder of its lock.
    pub fn put_into(mut self, stock: &SpareNodes) {
        while let Some(cell) = self.pop() {
            stock.put(self.arena.view().grown(), cell);
        }
    }
    fn pop(&mut self) -> Option<CellNumber> {
        self.count = self.count.checked_sub(1)?;
        let cell = CellNumber(self.first);
        self.first = next(self.arena.view().grown(), cell).0;
        Some(cell)
    }
    #[inline(never)]
    fn give_back(&mut self) {
        while self.count > 0 {
            // Each is asked for its next before the arena has it.
            let arena = self.arena;
            arena.free_cells(std::iter::from_fn(|| self.pop()).take(GIVE_BACK_BATCH));
        }
    }
}

impl Drop for Surplus<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.count > 0 {
            self.give_back(); // apart, because every hold of a tree's lock ends here, mostly with none
        }
    }
}

/// The nodes of a mapping's tree, for the holder of its lock: out of the stock, and back into it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nodes<'a> {
    /// The frames that there were when the lock was taken, in which all nodes of the tree and the stock lie. So
    /// numbers are checked against a bound that is loaded once, and again where one is beyond it.
    pub grown: GrownView<'a>,
    pub stock: &'a SpareNodes,
    /// Whose nodes they are, and where those of them are listed that only remember.
    pub mapping: MappingId,
    pub shadow_nodes: &'a ShadowNodes,
}

impl NodeSlab for Nodes<'_> {
    #[inline]
    fn slots(&self, node: u32) -> &[AtomicU32] {
        self.grown.own_slots(CellNumber(node))
    }
    #[inline]
    fn head(&self, node: u32) -> &Head {
        &self.grown.own_head(CellNumber(node)).words
    }
    fn alloc(&self) -> Option<u32> {
        self.stock.take(self.grown).map(|cell| cell.0)
    }
    fn free(&self, node: u32) {
        self.stock.put(self.grown, CellNumber(node));
    }
    #[inline]
    fn order(&self, folio: u32) -> u8 {
        self.grown.own_descriptor(Frame(folio)).word().order().0
    }
    fn shadow_only(&self, node: u32, change: ShadowOnly) {
        self.shadow_nodes.note(self.mapping, node, change);
    }
    #[inline]
    fn descended(&self) {
        step(&self.stock.descents);
    }
    #[inline]
    fn split(&self) {
        step(&self.stock.splits);
    }
}

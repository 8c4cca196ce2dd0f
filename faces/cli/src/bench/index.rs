//! Index: a tree by itself, as the experiments on it need one.
//!
//! The nodes are cells of a real arena, taken and given back under its lock as a
//! cache does it, and the tree stands behind a lock of the same kind. Only the
//! folios are made up: numbers without frames, all of one order, so that nothing
//! but the index is measured.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64};

use quinion::arena::{Arena, ArenaOptions, CellNumber};
use quinion::mapping::NODE_BITS;
use quinion::sync::{Rank, RankedGuard, RankedMutex};
use quinion::xarray::{Entry, Head, NUMBERS_MAX, Slab, Value, XArray};

use super::harness::Unmeasured;

/// A tree, its lock, and the arena its nodes lie in.
pub struct Index {
    arena: Arena,
    root: AtomicU64,
    lock: RankedMutex<()>,
    /// log2 of the pages of each of its folios.
    pub order: u8,
}

impl Index {
    /// An empty tree of folios of `order`, in an arena of `memory` bytes.
    pub fn new(order: u8, memory: u64) -> Result<Self, Unmeasured> {
        let arena =
            Arena::build(ArenaOptions { memory }).map_err(|error| Unmeasured::Failed(error.to_string()))?;
        let lock = RankedMutex::new(Rank::Tree, ());
        Ok(Self { arena, root: AtomicU64::new(0), lock, order })
    }

    /// Takes the lock; waits for it.
    pub fn lock(&self) -> RankedGuard<'_, ()> {
        self.lock.lock()
    }

    /// The tree, through `nodes`. The caller holds the lock.
    pub fn tree<'n>(
        &'n self,
        nodes: &'n Nodes<'n>,
        _lock: &RankedGuard<'_, ()>,
    ) -> XArray<'n, Nodes<'n>, NODE_BITS> {
        XArray::new(nodes, &self.root)
    }

    /// The keeper of its nodes, for one thread.
    pub fn nodes(&self) -> Nodes<'_> {
        Nodes { arena: &self.arena, order: self.order, descents: Cell::new(0) }
    }

    /// Empties `from..end`.
    pub fn erase(&self, from: u64, end: u64) {
        let (nodes, lock) = (self.nodes(), self.lock());
        self.tree(&nodes, &lock).erase_range(from, end, |_, _, _| {});
    }

    /// Everything in `from..end`: first index, entry, order.
    #[cfg(test)]
    pub fn content(&self, from: u64, end: u64) -> Vec<(u64, Entry, u8)> {
        let (nodes, lock) = (self.nodes(), self.lock());
        self.tree(&nodes, &lock).range(from, end - 1).collect()
    }

    /// Fills `from..end`, both multiples of it, with shadows of `order`.
    pub fn remember(&self, from: u64, end: u64, order: u8) {
        let (nodes, lock) = (self.nodes(), self.lock());
        let mut tree = self.tree(&nodes, &lock);
        for index in (from..end).step_by(1 << order) {
            tree.store(index, order, Entry::value(Value::shadow(order, 1)), |_, _, _| {});
        }
    }
}

/// Keeps the nodes of an [`Index`], and counts descents. One thread's.
pub struct Nodes<'a> {
    arena: &'a Arena,
    order: u8,
    descents: Cell<u64>,
}

impl Nodes<'_> {
    /// Ways down that were begun so far.
    pub fn descents(&self) -> u64 {
        self.descents.get()
    }
}

impl Slab for Nodes<'_> {
    #[inline]
    fn slots(&self, node: u32) -> &[AtomicU32] {
        self.arena.view().slots(CellNumber(node)).expect("a node of ours is a cell")
    }
    #[inline]
    fn head(&self, node: u32) -> &Head {
        &self.arena.view().head(CellNumber(node)).expect("a node of ours is a cell").words
    }
    fn alloc(&self) -> Option<u32> {
        self.arena.alloc_cell().map(|cell| cell.0)
    }
    fn free(&self, node: u32) {
        self.arena.free_cell(CellNumber(node));
    }
    #[inline]
    fn order(&self, _folio: u32) -> u8 {
        self.order
    }
    #[inline]
    fn descended(&self) {
        self.descents.set(self.descents.get() + 1);
    }
}

/// The number of the `count`th folio that comes from nowhere.
#[inline]
pub fn made_up(count: usize) -> u32 {
    count as u32 & (NUMBERS_MAX - 1)
}

//! Reserve: nodes taken before the lock, so that nothing runs out under it.
//!
//! A reserve is a slab in front of a slab: a tree made over it takes from the
//! reserve first. [`XArray::nodes_needed`](super::XArray::nodes_needed) says how many to take. Nodes left
//! over go back when the reserve is dropped, best after the lock is.
//!
//! The nodes form a list through their first slots; a reserve is two words.

use core::cell::Cell;

use crate::sync::atomic::{AtomicU32, Ordering};

use super::node::Head;
use super::tree::{NodeSlab, ShadowOnly};
use quinion_view::xarray::{Entry, Kind};

/// Nodes taken in advance, and behind them the slab they came from. One operation's or one thread's: not shared.
#[derive(Debug)]
pub struct Reserve<'s, S: NodeSlab> {
    slab: &'s S,
    first: Cell<Entry>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReserveFill {
    /// With all that was asked for.
    Whole,
    /// With so many nodes; the slab had no more.
    Short(u32),
}

impl<'s, S: NodeSlab> Reserve<'s, S> {
    /// An empty reserve. A tree over it takes its nodes from `slab`.
    pub fn new(slab: &'s S) -> Self {
        Self { slab, first: Cell::new(Entry::EMPTY) }
    }

    /// Takes `nodes` more nodes, or as many as there are. May wait: no.
    pub fn fill(&mut self, nodes: u32) -> ReserveFill {
        for got in 0..nodes {
            let Some(node) = self.slab.alloc() else { return ReserveFill::Short(got) };
            self.slab.slots(node)[0].store(self.first.get().bits(), Ordering::Relaxed);
            self.first.set(Entry::node(node));
        }
        ReserveFill::Whole
    }

    fn take(&self) -> Option<u32> {
        let Kind::Node(node) = self.first.get().kind() else { return None };
        self.first.set(Entry::from_bits(self.slab.slots(node)[0].load(Ordering::Relaxed)));
        Some(node)
    }
}

impl<S: NodeSlab> NodeSlab for Reserve<'_, S> {
    #[inline]
    fn slots(&self, node: u32) -> &[AtomicU32] {
        self.slab.slots(node)
    }
    #[inline]
    fn head(&self, node: u32) -> &Head {
        self.slab.head(node)
    }
    fn alloc(&self) -> Option<u32> {
        self.take().or_else(|| self.slab.alloc())
    }
    fn free(&self, node: u32) {
        self.slab.free(node);
    }
    #[inline]
    fn order(&self, folio: u32) -> u8 {
        self.slab.order(folio)
    }
    #[inline]
    fn placing(&self, folio: u32, index: u64, order: u8) {
        self.slab.placing(folio, index, order);
    }
    fn shadow_only(&self, node: u32, change: ShadowOnly) {
        self.slab.shadow_only(node, change);
    }
    #[inline]
    fn descended(&self) {
        self.slab.descended();
    }
    #[inline]
    fn split(&self) {
        self.slab.split();
    }
}

impl<S: NodeSlab> Drop for Reserve<'_, S> {
    fn drop(&mut self) {
        while let Some(node) = self.take() {
            self.slab.free(node);
        }
    }
}

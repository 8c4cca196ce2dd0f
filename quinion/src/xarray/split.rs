//! Split: a live folio becomes several smaller ones in the same place, each an entry of its own.
//!
//! ```text
//!   a folio of order 9 at 0, in 64-slot nodes       split at 77
//!
//!   slot   0   1   2   3   4       7                0   1   2   3   4       7
//!        +---+---+---+---+---+-+-+---+            +---+---+---+---+---+-+-+---+
//!        | F9| F9| F9| F9| F9| . | F9|            |a 6| * |h 7| h | i8| . | i8|     64 pages a slot
//!        +---+---+---+---+---+-+-+---+            +---+-|-+---+---+---+-+-+---+
//!                                                       |  64   72   76   77   78   80   96    127
//!        the fewest pieces none of which                +->[b 3 |c 2 |d 0 |e 0 |f 1 |g.. |h.. 5 ]  a page a slot
//!        reaches over 77: one more for each halving
//! ```
//!
//! Each piece is a folio with a number of its own, and its descriptor has to be set up before a reader finds it. So the
//! caller is asked for each piece, in rising order, right before it is stored. New nodes are full before they are
//! linked, by one store. All nodes are there before the first piece is asked for: a split is done whole or not at all.
//!
//! A reader without the lock finds at any moment, at any index of the folio, the whole folio's number, or that of the
//! piece that covers the index. The whole's number means nothing any more when its descriptor has become a piece's.
//!
//! Marks stand at every piece as they stood at the whole. A caller that knows better of a piece takes them off.
//!
//! Invariant: the count of no node that was there changes.
//!
//! Cost: one way down, and a store for each slot of the whole on its level and of each new node: one node a level.

use super::insert::{LEVELS_MAX, Split};
use super::tree::{NodeSlab, SlotHome, SlotRef, XArray};
use crate::sync::{Mutant, mutant};
use quinion_view::xarray::{Entry, Kind};

#[derive(Clone, Copy, Debug)]
struct LargeEntry {
    at: SlotRef,
    first: u64,
    order: u8,
}

impl<S: NodeSlab, const BITS: u32> XArray<'_, S, BITS> {
    /// Splits the folio that reaches over `edge`, that is, covers it and begins before it, into the fewest aligned
    /// pieces of which none does. `piece` is told the first index and the order of each, in rising order, and says
    /// its number, which may be the whole's; from then on the slab is not asked for the whole's order any more. With
    /// [`Split::NoNode`] it was not called, and the tree is unchanged. Cost: one descent.
    ///
    /// # Panics
    /// If `edge` is not below 2^52.
    pub fn split_folio(&mut self, edge: u64, mut piece: impl FnMut(u64, u8) -> u32) -> Split {
        let Some(whole) = self.reaching_over(edge) else { return Split::Nothing };
        let mut numbers = [0; LEVELS_MAX];
        let numbers = &mut numbers[..Self::levels_below(whole, edge) as usize];
        if self.alloc_all(numbers).is_err() {
            return Split::NoNode;
        }
        self.slab.split();
        let marks = self.marks_at(whole.at);
        // 1 The new nodes, one below the other, each in the slot that covers the edge.
        let hung = self.hang_below(whole, edge, numbers);
        if mutant(Mutant::CutLast)
            && let (Some(at), Some(&top)) = (hung, numbers.first())
        {
            self.put(at, Entry::node(top));
        }
        // 2 The pieces, each in the node of its level.
        for (first, order) in pieces(whole.first, whole.order, edge) {
            let at = Self::slot_of_piece(whole, numbers, first, order);
            self.put_run(at, Self::run_of(order), Entry::folio(piece(first, order)));
        }
        // 3 The new nodes are found from here on.
        if let (Some(at), Some(&top)) = (hung, numbers.first()) {
            self.put(at, Entry::node(top));
            self.reshaped.set(true);
        }
        for (first, order) in pieces(whole.first, whole.order, edge) {
            self.mark_all(Self::slot_of_piece(whole, numbers, first, order), marks);
        }
        self.shrink_if_reshaped();
        Split::Done
    }

    /// Nodes that [`XArray::split_folio`] takes at this edge, neither more nor fewer.
    ///
    /// # Panics
    /// As there.
    pub fn nodes_to_split(&self, edge: u64) -> u32 {
        self.reaching_over(edge).map_or(0, |whole| Self::levels_below(whole, edge))
    }

    fn reaching_over(&self, edge: u64) -> Option<LargeEntry> {
        assert!(
            edge < super::INDICES_MAX,
            "a folio was to be split at {edge}; the tree reaches to {}",
            super::INDICES_MAX
        );
        let at = self.leaf(edge)?;
        let entry = self.get(at);
        let Kind::Folio(_) = entry.kind() else { return None };
        let (first, _, order) = self.canonical(edge, entry);
        (first < edge).then_some(LargeEntry { at: Self::first_slot(at, order), first, order })
    }

    fn levels_below(whole: LargeEntry, edge: u64) -> u32 {
        let mut shift = whole.at.shift;
        while edge & ((1 << shift) - 1) != 0 {
            shift -= BITS;
        }
        (whole.at.shift - shift) / BITS
    }

    /// Prepares the new nodes and hangs each but the first into the one above. Returns where the first is to hang.
    fn hang_below(&self, whole: LargeEntry, edge: u64, numbers: &[u32]) -> Option<SlotRef> {
        let mut above = Self::on_level_of(whole, edge);
        let hung = above;
        for (i, &number) in numbers.iter().enumerate() {
            let SlotHome::Node(parent) = above.home else { unreachable!("a page reaches over no edge") };
            let at = Self::down(above, number, edge);
            let node = self.node(number);
            node.init(at.shift, Some((parent, above.slot)));
            node.account(Self::SLOTS as i32, 0); // it will be full
            if i > 0 {
                self.put(above, Entry::node(number));
            }
            above = at;
        }
        (!numbers.is_empty()).then_some(hung)
    }

    fn slot_of_piece(whole: LargeEntry, numbers: &[u32], first: u64, order: u8) -> SlotRef {
        let shift = Self::shift_for(order);
        if shift == whole.at.shift {
            return Self::on_level_of(whole, first);
        }
        let below = (whole.at.shift - shift) / BITS - 1;
        SlotRef { home: SlotHome::Node(numbers[below as usize]), shift, slot: Self::slot_of(first, shift) }
    }

    fn on_level_of(whole: LargeEntry, index: u64) -> SlotRef {
        SlotRef { slot: Self::slot_of(index, whole.at.shift), ..whole.at }
    }
}

/// The fewest aligned pieces of 2^`order` indices from `first` on of which none reaches over `edge`, in rising order,
/// as (first index, order): those before the edge shrink towards it, those behind it grow.
pub(super) fn pieces(first: u64, order: u8, edge: u64) -> impl Iterator<Item = (u64, u8)> {
    let (mut at, end) = (first, first + (1 << order));
    core::iter::from_fn(move || {
        if at == end {
            return None;
        }
        let piece = match at < edge {
            true => (edge - at).ilog2(),
            false => at.trailing_zeros().min((end - at).ilog2()),
        };
        at += 1 << piece;
        Some((at - (1 << piece), piece as u8))
    })
}

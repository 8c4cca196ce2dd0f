//! Marking: three searchable bits of an entry, set, found and taken off.
//!
//! ```text
//!   root's word  [*]            a mark at an entry shows in every slot above it,
//!                 |             so that a search skips what is not marked
//!   node     [ ][*][ ][ ]
//!                |
//!   node     [*][=][ ][ ]       the first slot of a larger entry carries the mark for all of it
//! ```
//!
//! A mark belongs to the entry, not to its place: a thread that stores another entry
//! there begins without marks. Only a split hands them on, to every piece.

use super::mark::Mark;
use super::tree::{NodeSlab, SlotHome, SlotRef, XArray};
use quinion_view::xarray::Entry;

impl<S: NodeSlab, const BITS: u32> XArray<'_, S, BITS> {
    /// Marks the entry that covers `index`, and returns it. Nothing happens where there is none.
    pub fn set_mark(&mut self, index: u64, mark: Mark) -> Entry {
        if let Some((at, entry)) = self.marked_place(index) {
            self.mark_up(at, mark);
            return entry;
        }
        Entry::EMPTY
    }

    /// Takes the mark off the entry that covers `index`, and returns the entry.
    pub fn clear_mark(&mut self, index: u64, mark: Mark) -> Entry {
        if let Some((at, entry)) = self.marked_place(index) {
            self.unmark_up(at, 1, mark);
            return entry;
        }
        Entry::EMPTY
    }

    /// Gives the entry that covers `index` the marks in `give`, and takes those in `take` off; one way down for all.
    /// Nothing happens where there is no entry.
    pub fn remark(&mut self, index: u64, give: &[Mark], take: &[Mark]) {
        if let Some((at, _)) = self.marked_place(index) {
            give.iter().for_each(|&mark| self.mark_up(at, mark));
            take.iter().for_each(|&mark| self.unmark_up(at, 1, mark));
        }
    }

    /// Whether the entry that covers `index` carries the mark.
    pub fn has_mark(&self, index: u64, mark: Mark) -> bool {
        self.marked_place(index).is_some_and(|(at, _)| self.marks_at(at) & mark.bit() != 0)
    }

    /// Whether anything in the tree carries the mark. Cost: one load.
    pub fn is_marked(&self, mark: Mark) -> bool {
        self.root_marks() & mark.bit() != 0
    }

    pub(super) fn marked_place(&self, index: u64) -> Option<(SlotRef, Entry)> {
        let at = self.leaf(index)?;
        let entry = self.get(at);
        (!entry.is_empty()).then(|| (Self::first_slot(at, self.order_of(entry)), entry))
    }

    pub(super) fn mark_up(&self, mut at: SlotRef, mark: Mark) {
        while let SlotHome::Node(number) = at.home {
            let node = self.state(number);
            let marks = node.marks(mark);
            if marks >> at.slot & 1 != 0 {
                return; // and so is all above
            }
            node.set_marks(mark, marks | 1 << at.slot);
            at = self.above(number, at.shift);
        }
        self.set_root(self.root(), self.root_marks() | mark.bit());
    }

    pub(super) fn mark_all(&self, at: SlotRef, marks: u8) {
        for mark in Mark::ALL {
            if marks & mark.bit() != 0 {
                self.mark_up(at, mark);
            }
        }
    }

    /// Takes the mark off `run` slots from `at` on, and off those above that have none left below.
    pub(super) fn unmark_up(&self, mut at: SlotRef, run: u32, mark: Mark) {
        let mut mask = (u64::MAX >> (64 - run)) << at.slot;
        while let SlotHome::Node(number) = at.home {
            let node = self.state(number);
            let marks = node.marks(mark);
            if marks & mask == 0 {
                return;
            }
            node.set_marks(mark, marks & !mask);
            if marks & !mask != 0 {
                return;
            }
            at = self.above(number, at.shift);
            mask = 1 << at.slot;
        }
        self.set_root(self.root(), self.root_marks() & !mark.bit());
    }

    #[inline]
    pub(super) fn unmark_all(&self, at: SlotRef, run: u32) {
        if self.root_marks() == 0 {
            return;
        }
        for mark in Mark::ALL {
            self.unmark_up(at, run, mark);
        }
    }
}

//! Iterate: entries in order, each once, whole.
//!
//! A step goes by entries, not by indices: it begins at the first index of
//! whatever covers the start, and goes on right after its last. So a search
//! that starts inside a large entry finds that entry, once, and nothing is
//! reported a page too high. Every call names its start, so a search may be
//! taken up again after the lock was dropped.

use crate::sync::atomic::{AtomicU32, Ordering};

use super::entry::{Entry, Kind};
use super::mark::Mark;
use super::tree::{At, Home, INDICES_MAX, Slab, XArray, is_shadow};

impl<'a, S: Slab, const BITS: u32> XArray<'a, S, BITS> {
    /// The first entry that meets `from..=to`: its first index (which may lie before `from`), the entry,
    /// its order.
    #[inline]
    pub fn next(&self, from: u64, to: u64) -> Option<(u64, Entry, u8)> {
        let mut cursor = Cursor::new(self);
        let entry = cursor.find(self, from, to)?;
        Some(self.canonical(cursor.index, entry))
    }

    /// The last entry that meets `from..=to`; see [`next`](XArray::next).
    pub fn prev(&self, from: u64, to: u64) -> Option<(u64, Entry, u8)> {
        let reach = 1u64.checked_shl(self.top().shift).unwrap_or(INDICES_MAX);
        let mut index = to.min(reach - 1);
        let mut at = self.leaf(index)?;
        while index >= from {
            let entry = self.get(at);
            if !entry.is_empty() {
                return Some(self.canonical(index, entry));
            }
            let first = index >> at.shift << at.shift;
            let last = index;
            index = first.checked_sub(1)?;
            at = self.across(at, last, index)?;
        }
        None
    }

    /// The entries that meet `from..=to`, in rising order, each once: also what an insertion there would
    /// conflict with.
    pub fn range(&self, from: u64, to: u64) -> Range<'_, 'a, S, BITS> {
        Range { tree: self, cursor: Cursor::new(self), from, to }
    }

    /// The first entry that carries the mark and meets `from..=to`; see [`next`](XArray::next).
    pub fn next_marked(&self, from: u64, to: u64, mark: Mark) -> Option<(u64, Entry, u8)> {
        if !self.is_marked(mark) || from > to {
            return None;
        }
        let Some((at, entry)) = self.marked_place(from) else { return self.seek_marked(from, to, mark) };
        let found @ (first, _, order) = self.canonical(from, entry);
        if self.marks_at(at) & mark.bit() != 0 {
            Some(found)
        } else {
            self.seek_marked(first + (1 << order), to, mark)
        }
    }

    /// The first of `pages` indices from `from` on where an insertion would find nothing in its way: a hole
    /// or a shadow.
    pub fn next_gap(&self, from: u64, pages: u64) -> Option<u64> {
        let mut gap = from;
        for (first, entry, order) in self.range(from, from.saturating_add(pages).saturating_sub(1)) {
            if is_shadow(entry) || first > gap {
                break;
            }
            gap = first + (1 << order);
        }
        (gap - from < pages).then_some(gap)
    }

    /// The last of `pages` indices, `from` and those before it, where an insertion would find nothing in
    /// its way. `None` also if it is all taken down to index 0.
    pub fn prev_gap(&self, from: u64, pages: u64) -> Option<u64> {
        let mut gap = from;
        while from - gap < pages {
            match self.entry_at(gap) {
                Some((first, entry, _)) if !is_shadow(entry) => gap = first.checked_sub(1)?,
                _ => return Some(gap),
            }
        }
        None
    }

    /// From a slot that covers `last` to the lowest that covers `index`, as high up as it must go.
    #[inline]
    fn across(&self, mut at: At, last: u64, index: u64) -> Option<At> {
        while let Home::Node(node) = at.home {
            if (index ^ last) >> (at.shift + BITS) == 0 {
                at.slot = Self::slot_of(index, at.shift);
                return Some(self.descend(at, index));
            }
            at = self.above(node, at.shift);
        }
        (index >> at.shift == 0).then(|| self.descend(at, index))
    }

    /// The first marked entry whose first index lies in `from..=to`, where none reaches over `from`.
    fn seek_marked(&self, from: u64, to: u64, mark: Mark) -> Option<(u64, Entry, u8)> {
        let (mut at, mut index) = (self.top(), from);
        if index >> at.shift != 0 {
            return None;
        }
        while index <= to {
            // Down, along slots that are marked.
            let entry = self.get(at);
            match entry.kind() {
                Kind::Node(node) => at = Self::down(at, node, index),
                _ => return Some(self.canonical(index, entry)),
            }
            // Right to the next marked slot, and up where a node has none left.
            (at, index) = self.marked_right(at, index, mark)?;
        }
        None
    }

    /// From `at`, the slot of `index`, to the next marked one: itself, one to the right of it, or one to
    /// the right of those above it.
    fn marked_right(&self, mut at: At, mut index: u64, mark: Mark) -> Option<(At, u64)> {
        let mut passed = 0; // slots of the node at hand that are done with: `at` itself, after a climb
        while let Home::Node(node) = at.home {
            let right = self.node(node).marks(mark).checked_shr(at.slot + passed).unwrap_or(0);
            if right != 0 {
                let skip = passed + right.trailing_zeros();
                if skip > 0 {
                    index = ((index >> at.shift) + u64::from(skip)) << at.shift;
                }
                return Some((At { slot: at.slot + skip, ..at }, index));
            }
            (at, passed) = (self.above(node, at.shift), 1);
        }
        None
    }
}

/// A place in a tree that moves to the right. The tree may change under it, as long as no node on the way
/// down to it goes.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    /// The slot it is at.
    pub at: At,
    /// An index that this slot covers: the one last looked for.
    pub index: u64,
    /// The slots of the node it is in; none while it is at the root.
    slots: &'a [AtomicU32],
}

impl<'a> Cursor<'a> {
    /// A cursor at the root.
    #[inline]
    pub fn new<S: Slab, const BITS: u32>(tree: &XArray<'a, S, BITS>) -> Self {
        Self { at: tree.top(), index: 0, slots: &[] }
    }

    /// Moves to the first slot from that of `from` on, up to that of `to`, that holds an entry.
    #[inline]
    pub fn find<S: Slab, const BITS: u32>(
        &mut self,
        tree: &XArray<'a, S, BITS>,
        mut from: u64,
        to: u64,
    ) -> Option<Entry> {
        while from <= to {
            let entry = match self.at.home {
                Home::Node(node) if (from ^ self.index) >> (self.at.shift + BITS) != 0 => {
                    self.enter(tree, tree.above(node, self.at.shift));
                    continue;
                }
                Home::Node(_) => {
                    self.at.slot = XArray::<S, BITS>::slot_of(from, self.at.shift);
                    Entry::from_bits(self.slots[self.at.slot as usize].load(Ordering::Relaxed))
                }
                Home::Root if from >> self.at.shift != 0 => return None,
                Home::Root => tree.root().entry,
            };
            self.index = from;
            match entry.kind() {
                Kind::Node(node) => self.enter(tree, XArray::<S, BITS>::down(self.at, node, from)),
                Kind::Empty => from = ((from >> self.at.shift) + 1) << self.at.shift,
                Kind::Folio(_) | Kind::Value(_) => return Some(entry),
            }
        }
        None
    }

    #[inline]
    fn enter<S: Slab, const BITS: u32>(&mut self, tree: &XArray<'a, S, BITS>, at: At) {
        self.at = at;
        self.slots = match at.home {
            Home::Node(node) => tree.slab.slots(node),
            Home::Root => &[],
        };
    }
}

/// An iteration over entries, made by [`XArray::range`].
#[derive(Debug)]
pub struct Range<'t, 'a, S: Slab, const BITS: u32> {
    tree: &'t XArray<'a, S, BITS>,
    cursor: Cursor<'a>,
    from: u64,
    to: u64,
}

impl<S: Slab, const BITS: u32> Iterator for Range<'_, '_, S, BITS> {
    type Item = (u64, Entry, u8);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.cursor.find(self.tree, self.from, self.to)?;
        let found @ (first, _, order) = self.tree.canonical(self.cursor.index, entry);
        self.from = first + (1 << order);
        Some(found)
    }
}

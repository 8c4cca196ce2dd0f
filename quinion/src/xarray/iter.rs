//! Iterate: entries in order, each once, whole.
//!
//! A step goes by entries, not by indices: it begins at the first index of
//! whatever covers the start, and goes on right after its last. So a search
//! that starts inside a large entry finds that entry, once, and nothing is
//! reported a page too high. Every call names its start, so a search may be
//! taken up again after the lock was dropped.

use super::entry::{Entry, Kind};
use super::mark::Mark;
use super::tree::{At, Home, INDICES_MAX, Slab, XArray, is_shadow};

impl<'a, S: Slab, const BITS: u32> XArray<'a, S, BITS> {
    /// The first entry that meets `from..=to`: its first index (which may lie before `from`), the entry,
    /// its order.
    pub fn next(&self, from: u64, to: u64) -> Option<(u64, Entry, u8)> {
        let (index, at) = self.seek(from, to)?;
        Some(self.canonical(index, self.get(at)))
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
        Range { tree: self, place: None, from, to }
    }

    /// The first entry that carries the mark and meets `from..=to`; see [`next`](XArray::next).
    pub fn next_marked(&self, from: u64, to: u64, mark: Mark) -> Option<(u64, Entry, u8)> {
        if !self.is_marked(mark) || from > to {
            return None;
        }
        let mut from = from;
        if let Some(found @ (first, _, order)) = self.entry_at(from) {
            if self.has_mark(from, mark) {
                return Some(found);
            }
            from = first + (1 << order);
        }
        self.seek_marked(from, to, mark)
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

    /// The first slot that is not empty and meets `from..=to`, and an index of the range in it.
    pub(super) fn seek(&self, from: u64, to: u64) -> Option<(u64, At)> {
        self.seek_at(self.leaf(from)?, from, to)
    }

    /// As [`seek`](Self::seek), from `at`, a slot that covers `last`.
    pub(super) fn seek_on(&self, at: At, last: u64, from: u64, to: u64) -> Option<(u64, At)> {
        self.seek_at(self.across(at, last, from)?, from, to)
    }

    fn seek_at(&self, mut at: At, mut index: u64, to: u64) -> Option<(u64, At)> {
        while index <= to {
            if !self.get(at).is_empty() {
                return Some((index, at));
            }
            let last = index;
            index = ((index >> at.shift) + 1) << at.shift;
            at = self.across(at, last, index)?;
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

/// An iteration over entries, made by [`XArray::range`].
#[derive(Debug)]
pub struct Range<'t, 'a, S: Slab, const BITS: u32> {
    tree: &'t XArray<'a, S, BITS>,
    place: Option<(At, u64)>,
    from: u64,
    to: u64,
}

impl<S: Slab, const BITS: u32> Iterator for Range<'_, '_, S, BITS> {
    type Item = (u64, Entry, u8);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.from > self.to {
            return None;
        }
        let found = match self.place {
            None => self.tree.seek(self.from, self.to),
            Some((at, last)) => self.tree.seek_on(at, last, self.from, self.to),
        };
        let Some((index, at)) = found else {
            self.from = u64::MAX; // nothing is left: from > to ends it
            self.to = 0;
            return None;
        };
        let (first, entry, order) = self.tree.canonical(index, self.tree.get(at));
        self.from = first + (1 << order);
        self.place = Some((at, index));
        Some((first, entry, order))
    }
}

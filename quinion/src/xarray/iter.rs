//! Iterate: entries in order, each once, whole.
//!
//! A step goes by entries, not by indices: a search that starts inside a large entry finds that entry, once, and
//! nothing is reported a page too high. Every call names its start, so a search may go on after the lock was dropped.

use crate::sync::atomic::{AtomicU32, Ordering};

use super::mark::Mark;
use super::node::NodeSlots;
use super::tree::{NodeSlab, SlotHome, SlotRef, XArray, is_shadow};
use quinion_view::xarray::{Entry, Kind};

impl<'a, S: NodeSlab, const BITS: u32> XArray<'a, S, BITS> {
    /// The first entry that meets `from..=to`: its first index (which may lie before `from`), the entry, its order.
    #[inline]
    pub fn next(&self, from: u64, to: u64) -> Option<(u64, Entry, u8)> {
        let mut cursor = Cursor::new(self);
        let entry = cursor.find(self, from, to)?;
        Some(self.canonical(cursor.index, entry))
    }

    /// The last entry that meets `from..=to`; see [`next`](XArray::next).
    pub fn prev(&self, from: u64, to: u64) -> Option<(u64, Entry, u8)> {
        self.range(from, to).next_back()
    }

    /// The entries that meet `from..=to`, in rising order, each once: also those that an insertion there would conflict
    /// with. From the back they come in falling order; from both ends each still comes once.
    pub fn range(&self, from: u64, to: u64) -> Range<'_, 'a, S, BITS> {
        Range { tree: self, front: Cursor::new(self), back: None, from, to }
    }

    /// The first entry that carries the mark and meets `from..=to`; see [`next`](XArray::next).
    #[inline]
    pub fn next_marked(&self, from: u64, to: u64, mark: Mark) -> Option<(u64, Entry, u8)> {
        self.marked(from, to, mark).next()
    }

    /// The entries that carry the mark and meet `from..=to`, in rising order, each once. Where nothing in the
    /// tree carries the mark it costs one load; else one way down and steps along marked slots only.
    pub fn marked(&self, from: u64, to: u64, mark: Mark) -> Marked<'_, 'a, S, BITS> {
        let place = if self.is_marked(mark) && from <= to { self.marked_start(from) } else { None };
        Marked { tree: self, mark, place, passed: 0, to }
    }

    /// Gives the mark `give` to the entries that carry `have` and meet `from..=to`, in rising order, `max` of them at
    /// most. The first index of the next one, if there is one. Cost: as [`marked`](XArray::marked).
    pub fn mark_marked(&mut self, from: u64, to: u64, have: Mark, give: Mark, max: usize) -> Option<u64> {
        let (mut found, mut count) = (self.marked(from, to, have), 0);
        while let Some((first, ..)) = found.next() {
            if count == max {
                return Some(first);
            }
            let (at, _) = found.place.expect("it stands at what it has found");
            self.mark_up(at, give);
            count += 1;
        }
        None
    }

    /// Where a search for marks begins: at the slot of `from`, or the first one of the entry there.
    fn marked_start(&self, from: u64) -> Option<(SlotRef, u64)> {
        let at = self.leaf(from)?;
        let entry = self.get(at);
        if entry.is_empty() {
            return Some((at, from));
        }
        let (first, _, order) = self.canonical(from, entry);
        Some((Self::first_slot(at, order), first))
    }

    /// The first of `pages` indices from `from` on where an insertion would find a hole or a shadow.
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

    /// The last of the `pages` indices that end with `from` where an insertion would find a hole or a shadow.
    /// `None` if there is none; the indices end at 0 if `from` is too small.
    pub fn prev_gap(&self, from: u64, pages: u64) -> Option<u64> {
        let lowest = from.saturating_sub(pages.checked_sub(1)?);
        let mut gap = from;
        for (first, entry, order) in self.range(lowest, from).rev() {
            if is_shadow(entry) || first + (1 << order) <= gap {
                break;
            }
            gap = first.checked_sub(1)?;
        }
        (lowest <= gap).then_some(gap)
    }

    /// From `at`, the slot of `index`, to the first entry with a marked slot, `passed` slots or more to the right.
    fn marked_right(
        &self,
        mut at: SlotRef,
        mut index: u64,
        mut passed: u32,
        mark: Mark,
    ) -> Option<(SlotRef, u64)> {
        while let SlotHome::Node(node) = at.home {
            let right = self.node(node).marks(mark).checked_shr(at.slot + passed).unwrap_or(0);
            if right == 0 {
                (at, passed) = (self.above(node, at.shift), 1);
                continue;
            }
            let skip = passed + right.trailing_zeros();
            if skip > 0 {
                (at.slot, index) = (at.slot + skip, ((index >> at.shift) + u64::from(skip)) << at.shift);
            }
            match self.get(at).kind() {
                Kind::Node(below) => (at, passed) = (Self::down(at, below, index), 0),
                _ => return Some((at, index)),
            }
        }
        // The root's slot. If the search began here, it holds the tree's only entry; else the whole tree was searched.
        (passed == 0).then_some((at, index))
    }
}

/// A place that moves right or left in a tree, which may change under it, as long as no node on the way to it goes.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    pub at: SlotRef,
    /// An index that this slot covers: the one last looked for.
    pub index: u64,
    /// The slots of the node it is in; none while it is at the root.
    slots: &'a [AtomicU32],
}

impl<'a> Cursor<'a> {
    #[inline]
    pub fn new<S: NodeSlab, const BITS: u32>(tree: &XArray<'a, S, BITS>) -> Self {
        Self { at: tree.top(), index: 0, slots: &[] }
    }

    /// Moves to the first slot from that of `from` on, up to that of `to`, that holds an entry.
    #[inline]
    pub fn find<S: NodeSlab, const BITS: u32>(
        &mut self,
        tree: &XArray<'a, S, BITS>,
        mut from: u64,
        to: u64,
    ) -> Option<Entry> {
        while from <= to {
            let entry = match self.at.home {
                SlotHome::Node(node) if (from ^ self.index) >> (self.at.shift + BITS) != 0 => {
                    self.enter(tree, tree.above(node, self.at.shift));
                    continue;
                }
                SlotHome::Node(_) => {
                    self.at.slot = XArray::<S, BITS>::slot_of(from, self.at.shift);
                    NodeSlots(self.slots).get(self.at.slot)
                }
                SlotHome::Root if from >> self.at.shift != 0 => return None,
                SlotHome::Root => tree.root().entry,
            };
            self.index = from;
            let entry = self.descend(tree, entry, from);
            if !entry.is_empty() {
                return Some(entry);
            }
            from = ((from >> self.at.shift) + 1) << self.at.shift;
        }
        None
    }

    /// Moves to the last slot down from that of `to`, to that of `from`, that holds an entry.
    pub fn find_back<S: NodeSlab, const BITS: u32>(
        &mut self,
        tree: &XArray<'a, S, BITS>,
        from: u64,
        mut to: u64,
    ) -> Option<Entry> {
        while from <= to {
            let entry = match self.at.home {
                SlotHome::Node(node) if (to ^ self.index) >> (self.at.shift + BITS) != 0 => {
                    self.enter(tree, tree.above(node, self.at.shift));
                    continue;
                }
                SlotHome::Node(_) => {
                    self.at.slot = XArray::<S, BITS>::slot_of(to, self.at.shift);
                    Entry::from_bits(self.slots[self.at.slot as usize].load(Ordering::Relaxed))
                }
                SlotHome::Root if to >> self.at.shift != 0 => {
                    to = (1 << self.at.shift) - 1; // beyond what the tree reaches there is nothing
                    continue;
                }
                SlotHome::Root => tree.root().entry,
            };
            self.index = to;
            match entry.kind() {
                Kind::Node(node) => self.enter(tree, XArray::<S, BITS>::down(self.at, node, to)),
                Kind::Empty => to = (to >> self.at.shift << self.at.shift).checked_sub(1)?,
                Kind::Folio(_) | Kind::Value(_) => return Some(entry),
            }
        }
        None
    }

    #[inline]
    fn descend<S: NodeSlab, const BITS: u32>(
        &mut self,
        tree: &XArray<'a, S, BITS>,
        mut entry: Entry,
        index: u64,
    ) -> Entry {
        while let Kind::Node(node) = entry.kind() {
            self.at = XArray::<S, BITS>::down(self.at, node, index);
            self.slots = tree.slab.slots(node);
            entry = NodeSlots(self.slots).get(self.at.slot);
        }
        entry
    }

    #[inline]
    fn enter<S: NodeSlab, const BITS: u32>(&mut self, tree: &XArray<'a, S, BITS>, at: SlotRef) {
        self.at = at;
        self.slots = match at.home {
            SlotHome::Node(node) => tree.slab.slots(node),
            SlotHome::Root => &[],
        };
    }
}

/// An iteration over entries, made by [`XArray::range`].
#[derive(Debug)]
pub struct Range<'t, 'a, S: NodeSlab, const BITS: u32> {
    tree: &'t XArray<'a, S, BITS>,
    front: Cursor<'a>,
    /// Made when the first entry is asked for from the back.
    back: Option<Cursor<'a>>,
    /// The rest of the range: `from..=to`, nothing if `from` is larger.
    from: u64,
    to: u64,
}

impl<S: NodeSlab, const BITS: u32> Iterator for Range<'_, '_, S, BITS> {
    type Item = (u64, Entry, u8);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.front.find(self.tree, self.from, self.to)?;
        let found @ (first, _, order) = self.tree.canonical(self.front.index, entry);
        self.from = first + (1 << order);
        Some(found)
    }
}

impl<S: NodeSlab, const BITS: u32> DoubleEndedIterator for Range<'_, '_, S, BITS> {
    fn next_back(&mut self) -> Option<Self::Item> {
        let back = self.back.get_or_insert_with(|| Cursor::new(self.tree));
        let entry = back.find_back(self.tree, self.from, self.to)?;
        let found @ (first, ..) = self.tree.canonical(back.index, entry);
        match first.checked_sub(1) {
            Some(last) => self.to = last,
            None => (self.from, self.to) = (1, 0),
        }
        Some(found)
    }
}

/// An iteration over entries that carry a mark, made by [`XArray::marked`].
#[derive(Debug)]
pub struct Marked<'t, 'a, S: NodeSlab, const BITS: u32> {
    tree: &'t XArray<'a, S, BITS>,
    mark: Mark,
    /// The slot to go on from and an index of it; none at the end.
    place: Option<(SlotRef, u64)>,
    /// Slots from `place` on that need no look any more: 0 or 1.
    passed: u32,
    to: u64,
}

impl<S: NodeSlab, const BITS: u32> Iterator for Marked<'_, '_, S, BITS> {
    type Item = (u64, Entry, u8);

    fn next(&mut self) -> Option<Self::Item> {
        let (at, index) = self.place.take()?;
        let found @ (at, index) = self.tree.marked_right(at, index, self.passed, self.mark)?;
        if index > self.to {
            return None;
        }
        (self.place, self.passed) = (Some(found), 1); // the first slot of an entry is its only marked one
        Some(self.tree.canonical(index, self.tree.get(at)))
    }
}

//! Erase and replace: entries leave, whole, and nodes that hold nothing leave with them.
//!
//! A node is unlinked first and given back after: a reader that is still in it finds the old entries, or those of its
//! next user, and is told by the descriptor. When only slot 0 of the topmost node is left, the tree gets lower.

use super::iter::Cursor;
use super::tree::{NodeSlab, SlotHome, SlotRef, XArray, is_shadow};
use quinion_view::xarray::{Entry, Kind, Root, Value};

/// Entries that are located together before the first of them is revised.
const LOCATED_MAX: usize = 64;

/// The outcome of a compare-exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExchangeOutcome {
    /// The expected entry was there; the new one is now.
    Done,
    /// The entry that was there instead, and stays.
    Found(Entry),
}

/// The change to make to an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Revision {
    /// The entry stays.
    Keep,
    /// The entry goes, and none takes its place.
    Erase,
    /// A value of the same order takes the entry's place, without marks.
    Replace(Value),
}

/// The outcome of forgetting a node that held shadows only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForgetOutcome {
    /// The node's shadows are gone, and the node is given back.
    Done,
    /// The node holds something else as well; it is as it was.
    Kept,
}

impl<S: NodeSlab, const BITS: u32> XArray<'_, S, BITS> {
    /// Removes the whole entry that covers `index`, and returns it.
    pub fn erase(&mut self, index: u64) -> Entry {
        let Some(at) = self.leaf(index) else { return Entry::EMPTY };
        let entry = self.get(at);
        if !entry.is_empty() {
            self.remove(at, entry);
        }
        entry
    }

    /// Removes every entry that meets `from..end`. `removed` is told of each, in rising order: first index,
    /// entry, order. A folio or a shadow that reaches over an edge goes whole, and the report says so; a
    /// spill that reaches over an edge stays, unreported, because part of it is data that was not meant.
    pub fn erase_range(&mut self, from: u64, end: u64, mut removed: impl FnMut(u64, Entry, u8)) {
        let (mut from, mut last, mut cursor) = (from, None, Cursor::new(self));
        while from < end
            && let Some(entry) = cursor.find(self, from, end - 1)
        {
            // The node left behind goes before anything here does: the node above both is not empty yet.
            let at = cursor.at;
            match last.replace(at.home) {
                Some(home) if home != at.home => self.prune(home),
                _ => {}
            }
            let (first, entry, order) = self.canonical(cursor.index, entry);
            let beyond = first + (1 << order);
            let spill = matches!(entry.kind(), Kind::Value(value) if value.is_spill());
            if !spill || (from <= first && beyond <= end) {
                self.clear_run(at, entry);
                removed(first, entry, order);
            }
            from = beyond;
        }
        if let Some(home) = last {
            self.prune(home);
            self.shrink();
        }
    }

    /// Asks `decide` whether to keep or erase the entry that covers each of `indices`, in rising order, and does it. It
    /// is told the place of the index among them, and the entry, or that nothing is there. One way down for each leaf;
    /// neighbours cost a slot each.
    ///
    /// Where nothing is, nothing is done, whatever it answers.
    ///
    /// # Panics
    /// If a value is to replace something of another order.
    pub fn revise(
        &mut self,
        indices: impl IntoIterator<Item = u64>,
        mut decide: impl FnMut(usize, Entry) -> Revision,
    ) {
        let (mut indices, mut nth, mut last) = (indices.into_iter(), 0, None);
        loop {
            let mut places = [None; LOCATED_MAX];
            let located = self.locate(&mut indices, &mut places);
            for place in &places[..located] {
                // A folio of several slots is erased at its first slot, and is gone at the next.
                let entry = place.map_or(Entry::EMPTY, |at| self.get(at));
                let revision = decide(nth, entry);
                nth += 1;
                let Some(at) = place.filter(|_| !entry.is_empty()) else { continue };
                match revision {
                    Revision::Keep => {}
                    Revision::Replace(value) => self.swap_run(at, entry, Entry::value(value)),
                    Revision::Erase => {
                        // The node left behind goes before anything here does, as in `erase_range`.
                        match last.replace(at.home) {
                            Some(home) if home != at.home => self.prune(home),
                            _ => {}
                        }
                        self.clear_run(at, entry);
                    }
                }
            }
            if located < LOCATED_MAX {
                break;
            }
        }
        if let Some(home) = last {
            self.prune(home);
            self.shrink();
        }
    }

    /// Puts into `places` where the lowest slots are that cover the next of `indices`, in rising order, until these end
    /// or `places` is full; how many. Where nothing stands there is no place. A place stays right while entries are
    /// revised in their order: its node goes after all places in it have been passed.
    ///
    /// No way down waits for the outcome of another, so the processor fetches for many of them at once.
    #[inline(never)]
    fn locate(
        &self,
        indices: &mut impl Iterator<Item = u64>,
        places: &mut [Option<SlotRef>; LOCATED_MAX],
    ) -> usize {
        let (mut seen, mut last, mut located) = (0, None, 0);
        for (place, index) in places.iter_mut().zip(indices) {
            located += 1;
            let found = match last {
                // Neighbours share a leaf, as a rule.
                Some((at @ SlotRef { home: SlotHome::Node(_), shift, .. }, before))
                    if (index ^ before) >> (shift + BITS) == 0 =>
                {
                    Some(self.descend_to(SlotRef { slot: Self::slot_of(index, shift), ..at }, index))
                }
                _ => self.leaf_entry(index),
            };
            last = found.map(|(at, _)| (at, index));
            *place = found.and_then(|(at, entry)| (!entry.is_empty()).then_some(at));
            if let Some((SlotRef { home: SlotHome::Node(node), .. }, _)) = found {
                seen ^= self.state(node).count();
            }
        }
        std::hint::black_box(seen);
        located
    }

    /// For eviction: puts a value in place of the entry that covers `index`, of the same order; returns that entry.
    ///
    /// # Panics
    /// If nothing covers `index`, or something of another order.
    pub fn replace(&mut self, index: u64, value: Value) -> Entry {
        let at = self.leaf(index).expect("a value replaces an entry, and the tree does not reach there");
        let old = self.get(at);
        assert!(!old.is_empty(), "a value replaces an entry, and nothing covers index {index}");
        self.swap_run(at, old, Entry::value(value));
        old
    }

    /// If `expected` covers `index`, puts `new`, of the same order and without marks, in its place, or nothing.
    ///
    /// # Panics
    /// If the two are not of the same order, or `expected` is empty: to fill a hole, insert.
    pub fn compare_exchange(&mut self, index: u64, expected: Entry, new: Entry) -> ExchangeOutcome {
        assert!(!expected.is_empty(), "a hole is filled by an insertion");
        let Some(at) = self.leaf(index) else { return ExchangeOutcome::Found(Entry::EMPTY) };
        let found = self.get(at);
        if found != expected {
            return ExchangeOutcome::Found(found);
        }
        if new.is_empty() {
            self.remove(at, found);
        } else {
            self.swap_run(at, found, new);
        }
        ExchangeOutcome::Done
    }

    /// Drops all shadows of a node that holds nothing else, and the node, without a look at them; see
    /// [`shadows_in`](XArray::shadows_in). `node` is one of this tree, of which the slab was told that it [became
    /// shadow-only](NodeSlab::shadow_only), and not yet that it ceased.
    pub fn forget(&mut self, number: u32) -> ForgetOutcome {
        let node = self.node(number);
        if !node.is_shadow_only() {
            return ForgetOutcome::Kept;
        }
        // Its slots stay as they are: a late reader finds shadows there, which are no folios.
        let slots = node.count() as i32;
        node.account(-slots, -slots);
        self.unmark_all(SlotRef { home: SlotHome::Node(number), shift: node.shift(), slot: 0 }, Self::SLOTS);
        self.prune(SlotHome::Node(number));
        self.shrink();
        ForgetOutcome::Done
    }

    /// The shadows that stand in a node of this tree, and nowhere below it, in rising order: first index, shadow.
    pub fn shadows_in(&self, number: u32) -> impl Iterator<Item = (u64, Value)> {
        let (node, base) = (self.node(number), self.base(number));
        let mut next = 0;
        core::iter::from_fn(move || {
            while next < Self::SLOTS {
                let (slot, entry) = (next, node.get(next));
                match entry.kind() {
                    Kind::Value(value) if is_shadow(entry) => {
                        next += Self::run_of(value.order());
                        return Some((base + (u64::from(slot) << node.shift()), value));
                    }
                    _ => next += 1,
                }
            }
            None
        })
    }

    fn base(&self, number: u32) -> u64 {
        let (mut base, mut number, mut shift) = (0, number, self.node(number).shift());
        while let SlotRef { home: SlotHome::Node(parent), slot, .. } = self.above(number, shift) {
            (number, shift) = (parent, shift + BITS);
            base += u64::from(slot) << shift;
        }
        base
    }

    fn remove(&self, at: SlotRef, entry: Entry) {
        self.clear_run(at, entry);
        self.prune(at.home);
        self.shrink();
    }

    fn clear_run(&self, at: SlotRef, entry: Entry) {
        let order = self.order_of(entry);
        let (first, run) = (Self::first_slot(at, order), Self::run_of(order));
        self.unmark_all(first, run);
        self.put_run(first, run, Entry::EMPTY);
        self.account(at.home, -(run as i32), if is_shadow(entry) { -(run as i32) } else { 0 });
    }

    fn swap_run(&self, at: SlotRef, old: Entry, new: Entry) {
        let order = self.order_of(old);
        assert!(
            self.order_of(new) == order,
            "{new:?} cannot take the place of {old:?} of order {order}: split or erase first"
        );
        let (first, run) = (Self::first_slot(at, order), Self::run_of(order));
        self.unmark_all(first, run);
        self.put_run(first, run, new);
        self.account_and_settle(
            at.home,
            0,
            run as i32 * (i32::from(is_shadow(new)) - i32::from(is_shadow(old))),
        );
    }

    pub(super) fn prune(&self, mut home: SlotHome) {
        while let SlotHome::Node(number) = home {
            let node = self.state(number);
            if node.count() > 0 {
                break;
            }
            let at = self.above(number, node.shift());
            self.put(at, Entry::EMPTY);
            self.account(at.home, -1, 0);
            self.release(number);
            home = at.home;
        }
        self.settle(home);
    }

    /// After insertions over shadows: only a new level, or a shadow that became a node, leaves one node at the top.
    #[inline]
    pub(super) fn shrink_if_reshaped(&self) {
        if self.reshaped.take() {
            self.shrink();
        }
    }

    pub(super) fn shrink(&self) {
        loop {
            let Root { entry, levels } = self.root();
            let Kind::Node(number) = entry.kind() else { return };
            let node = self.node(number);
            let left = node.get(0);
            if node.count() != 1 || left.is_empty() {
                return;
            }
            match left.kind() {
                Kind::Node(child) => self.node(child).set_parent(None),
                _ if levels > 1 => return, // larger than a page: the root's word has no place for it
                _ => {}
            }
            self.set_root(Root { entry: left, levels: levels - 1 }, self.root_marks());
            self.release(number);
        }
    }
}

//! Insert: one way down, on which everything is found out and done.
//!
//! ```text
//!   1 start     at the root, made taller if it must be; in a batch: where the last folio went in
//!   2 descend   to the level that holds entries of this order
//!                 a node           go down
//!                 nothing          plant: the missing nodes with the entry in the lowest, published at once
//!                 a shadow         split it by one step, go on
//!                 a folio, spill   stop: present
//!   3 check     the slots it will fill, and whatever hangs below them
//!   4 report    the shadows that it takes the place of
//!   5 store     in every slot; then free what hung below
//! ```
//!
//! Nothing is prepared outside the lock, so nothing can be out of date. Nodes are taken one by one as they are needed;
//! if there is none, the tree is as it was, except that a shadow may have become several smaller ones that say the
//! same. [`XArray::insert_range`] keeps its place between folios: neighbours cost no new descent, and a new node costs
//! a climb no higher than it must.

use core::ops::ControlFlow;

use super::mark::Mark;
use super::tree::{INDICES_MAX, NodeSlab, SlotHome, SlotRef, XArray, is_shadow};
use crate::sync::{Mutant, mutant};
use quinion_view::xarray::{ENTRY_ORDER_MAX, Entry, Kind, Root, Value};

/// The outcome of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Inserted {
    /// The folio is in the tree.
    Done {
        /// The shadow it took the place of; of several, the one at the highest index; of one larger than
        /// the folio, the piece that was split off.
        shadow: Option<Value>,
    },
    /// A folio or a spill is in the way: the first one. The tree is unchanged.
    Present(Entry),
    /// There is no node to be had. The tree is unchanged, but for shadows that may be split more finely.
    NoNode,
}

/// The outcome of a batch of insertions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddedRange {
    /// Folios inserted: the first so many of the batch. The rest is still the caller's.
    pub added: usize,
    /// Pages that the inserted folios cover.
    pub pages: u64,
    /// Why it ended there.
    pub stop: RangeStop,
}

impl AddedRange {
    #[inline]
    fn count(&mut self, order: u8) {
        self.added += 1;
        self.pages += 1 << order;
    }
}

/// Why a batch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeStop {
    /// All of it is inserted.
    All,
    /// The next folio would cover this one or this spill.
    Present(Entry),
    /// The next folio needs a node and there is none to be had.
    NoNode,
}

/// The outcome of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// The folio or the value is in the tree.
    Done,
    /// A folio or a spill reaches beyond the range of the store. The tree is unchanged.
    Present(Entry),
    /// As for [`Inserted::NoNode`].
    NoNode,
}

/// The outcome of a store over a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredRange {
    /// Pages from the start of the range on that the value covers now.
    pub pages: u64,
    /// Why it ended there.
    pub stop: RangeStop,
}

/// The outcome of a split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// The split is done, or there was no need.
    Done,
    /// There is nothing to be split: no shadow covers the index, or no folio reaches over the edge.
    Nothing,
    /// As for [`Inserted::NoNode`].
    NoNode,
}

#[derive(Clone, Copy, Debug)]
struct NewEntry {
    index: u64,
    order: u8,
    entry: Entry,
    over: Overwrite,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Overwrite {
    Shadows,
    /// Shadows, and whatever lies inside the new entry's range.
    Inside,
}

#[derive(Clone, Copy)]
pub(super) enum PlaceRefused {
    Present(Entry),
    NoNode,
}

impl From<PlaceRefused> for RangeStop {
    fn from(refused: PlaceRefused) -> Self {
        match refused {
            PlaceRefused::Present(entry) => RangeStop::Present(entry),
            PlaceRefused::NoNode => RangeStop::NoNode,
        }
    }
}

enum Placed {
    /// At the first of the slots that the entry will fill.
    Slot(SlotRef),
    /// The entry is in, with the nodes that were missing.
    Stored(SlotRef),
}

pub(super) const LEVELS_MAX: usize = 64;

impl<S: NodeSlab, const BITS: u32> XArray<'_, S, BITS> {
    /// Inserts `folio` of `order` at `index`, over shadows only. Cost: one descent, split or not.
    ///
    /// # Panics
    /// If the order is above 15, the index is not aligned to it, or the range ends above 2^52.
    pub fn insert(&mut self, index: u64, order: u8, folio: u32) -> Inserted {
        let mut shadow = None;
        let note = |_, entry: Entry, _| shadow = shadow_of(entry).or(shadow);
        let placed = self.place(
            &mut None,
            NewEntry { index, order, entry: Entry::folio(folio), over: Overwrite::Shadows },
            note,
        );
        self.shrink_if_reshaped();
        match placed {
            Ok(()) => Inserted::Done { shadow },
            Err(PlaceRefused::Present(entry)) => Inserted::Present(entry),
            Err(PlaceRefused::NoNode) => Inserted::NoNode,
        }
    }

    /// Inserts a run of folios, each `(order, folio)`, side by side from `index` on, up to the first that
    /// cannot go in. `consumed` is told of each shadow that went, in rising order: the place in the batch of
    /// the folio that took it, and the shadow; of one larger than the folio, the piece that was split off.
    /// Cost: one descent, and one step per node that the run enters.
    ///
    /// # Panics
    /// As [`insert`](XArray::insert), for the first folio that is not aligned to where it comes to lie.
    pub fn insert_range(
        &mut self,
        index: u64,
        folios: impl IntoIterator<Item = (u8, u32)>,
        mut consumed: impl FnMut(usize, Value),
    ) -> AddedRange {
        let mut done = AddedRange { added: 0, pages: 0, stop: RangeStop::All };
        let mut place = None;
        let mut folios = folios.into_iter();
        let mut next = folios.next();
        while let Some((order, folio)) = next {
            let at = index + done.pages;
            let note = |_, entry: Entry, _| consumed(done.added, shadow_of(entry).expect("only shadows go"));
            if let Err(refused) = self.place(
                &mut place,
                NewEntry { index: at, order, entry: Entry::folio(folio), over: Overwrite::Shadows },
                note,
            ) {
                done.stop = refused.into();
                break;
            }
            done.count(order);
            next = self.fill_node(&mut place, order, &mut folios, &mut done, &mut consumed);
        }
        self.shrink_if_reshaped();
        done
    }

    /// Inserts the next entries of a batch as long as they go into the node at `place`, right after the entry of order
    /// `last` there. Returns the first folio that is to go in otherwise.
    #[inline]
    fn fill_node(
        &self,
        place: &mut Option<(SlotRef, u64)>,
        last: u8,
        folios: &mut impl Iterator<Item = (u8, u32)>,
        done: &mut AddedRange,
        consumed: &mut impl FnMut(usize, Value),
    ) -> Option<(u8, u32)> {
        let Some((SlotRef { home: SlotHome::Node(number), shift, slot }, index)) = *place else {
            return folios.next();
        };
        let node = self.node(number);
        let (first, unmarked) = (slot, self.root_marks() == 0);
        let (mut slot, mut filled, mut shadows) = (slot + Self::run_of(last), 0, 0);
        let next = loop {
            let Some((order, folio)) = folios.next() else { break None };
            let run = Self::run_of(order);
            let fits = Self::shift_for(order) == shift && slot & (run - 1) == 0 && slot + run <= Self::SLOTS;
            if !fits {
                break Some((order, folio));
            }
            if node.is_vacant(slot, run) {
                filled += run as i32;
            } else if let Some(shadow) = shadow_of(node.get(slot))
                && shadow.order() == order
                && unmarked
            {
                consumed(done.added, shadow);
                shadows -= run as i32;
            } else {
                break Some((order, folio));
            }
            self.slab.placing(folio, index + (u64::from(slot - first) << shift), order);
            node.put_run(slot, run, Entry::folio(folio));
            slot += run;
            done.count(order);
        };
        node.account(filled, shadows);
        self.settle(SlotHome::Node(number));
        if let Some((at, index)) = place {
            *index += u64::from(slot - 1 - first) << shift; // the last slot filled: where the next climb starts
            at.slot = slot - 1;
        }
        next
    }

    /// Stores a folio or a value at `index`, over whatever lies inside its range of 2^`order` pages. A shadow that
    /// reaches beyond is split; a folio or spill that does is in the way. `displaced` is told each displaced entry, in
    /// rising order: first index, entry, order.
    ///
    /// # Panics
    /// As [`insert`](XArray::insert); also if a value's order is not `order`, or the entry is empty or a node.
    pub fn store(
        &mut self,
        index: u64,
        order: u8,
        entry: Entry,
        displaced: impl FnMut(u64, Entry, u8),
    ) -> Stored {
        match entry.kind() {
            Kind::Folio(_) => {}
            Kind::Value(value) => assert!(value.order() == order, "a value is stored with its own order"),
            Kind::Empty | Kind::Node(_) => panic!("only folios and values are stored; to remove, erase"),
        }
        let placed =
            self.place(&mut None, NewEntry { index, order, entry, over: Overwrite::Inside }, displaced);
        self.shrink();
        match placed {
            Ok(()) => Stored::Done,
            Err(PlaceRefused::Present(entry)) => Stored::Present(entry),
            Err(PlaceRefused::NoNode) => Stored::NoNode,
        }
    }

    /// Splits the shadow that covers `index` until the piece there is of `order` or smaller. An insertion does
    /// that on its own way down; this is for a caller that wants pieces without one. Cost: one descent.
    ///
    /// # Panics
    /// If the index is not below 2^52.
    pub fn split(&mut self, index: u64, order: u8) -> Split {
        let split = self.split_down(index, order);
        self.shrink_if_reshaped();
        split
    }

    fn split_down(&self, index: u64, order: u8) -> Split {
        assert!(index < INDICES_MAX, "index {index} was asked for; the tree reaches to {INDICES_MAX}");
        let Some(mut at) = self.leaf(index) else { return Split::Nothing };
        loop {
            let Kind::Value(value) = self.get(at).kind() else { return Split::Nothing };
            if value.is_spill() {
                return Split::Nothing;
            }
            if value.order() <= order {
                self.settle(at.home);
                return Split::Done;
            }
            if let Err(refused) = self.split_towards(at, value, order) {
                debug_assert!(matches!(refused, PlaceRefused::NoNode), "a split meets no other writer");
                return Split::NoNode;
            }
            at = self.descend(at, index);
        }
    }

    fn split_towards(&self, at: SlotRef, value: Value, order: u8) -> Result<(), PlaceRefused> {
        if Self::shift_for(order) == at.shift {
            self.split_here(at, value, order);
            return Ok(());
        }
        self.split_step(at, value)
    }

    /// Stores one value over `from..end`, cut into the largest aligned pieces, over whatever lies inside each
    /// piece's range; see [`store`](XArray::store). Cost: as [`insert_range`](XArray::insert_range).
    ///
    /// # Panics
    /// If the range ends above 2^52.
    pub fn store_range(
        &mut self,
        from: u64,
        end: u64,
        value: Value,
        mut displaced: impl FnMut(u64, Entry, u8),
    ) -> StoredRange {
        let (mut at, mut place, mut stop) = (from, None, RangeStop::All);
        while at < end {
            let aligned = at.trailing_zeros().min((end - at).ilog2());
            let order = aligned.min(u32::from(ENTRY_ORDER_MAX)) as u8;
            let piece = Entry::value(value.with_order(order));
            if let Err(refused) = self.place(
                &mut place,
                NewEntry { index: at, order, entry: piece, over: Overwrite::Inside },
                &mut displaced,
            ) {
                stop = refused.into();
                break;
            }
            at += 1 << order;
        }
        self.shrink();
        StoredRange { pages: at - from, stop }
    }

    /// Places one entry. `place` is where the last one went, with its index; it is left where this one did. Afterwards
    /// the topmost node may hold no more than one below; the caller shrinks the tree when it has placed its last, or,
    /// where nothing goes but shadows, only if it was [reshaped](XArray::shrink_if_reshaped).
    #[inline]
    fn place(
        &mut self,
        place: &mut Option<(SlotRef, u64)>,
        new: NewEntry,
        displaced: impl FnMut(u64, Entry, u8),
    ) -> Result<(), PlaceRefused> {
        let NewEntry { index, order, entry, .. } = new;
        Self::assert_place(index, order);
        let at = self.start(*place, index, order)?;
        let at = match self.find_or_create_slot(at, index, order, entry)? {
            Placed::Stored(at) => at,
            Placed::Slot(at) => self.fill(at, new, displaced)?,
        };
        *place = Some((at, index));
        Ok(())
    }

    /// Step 1: a position above which nothing of this entry lies.
    #[inline]
    fn start(&self, place: Option<(SlotRef, u64)>, index: u64, order: u8) -> Result<SlotRef, PlaceRefused> {
        let Some((mut at, last)) = place else {
            self.slab.descended();
            return self.reach(index, order);
        };
        while let SlotHome::Node(node) = at.home {
            if (index ^ last) >> (at.shift + BITS) == 0 {
                // An entry of a higher level begins where a node of this level does, and `last` is before it.
                debug_assert!(at.shift >= Self::shift_for(order));
                return Ok(SlotRef { slot: Self::slot_of(index, at.shift), ..at });
            }
            at = self.above(node, at.shift);
        }
        self.reach(index, order)
    }

    /// The slot above the topmost node of a tree tall enough for this entry.
    fn reach(&self, index: u64, order: u8) -> Result<SlotRef, PlaceRefused> {
        let levels = self.levels_for(index + ((1 << order) - 1), order);
        let top = self.top();
        if levels * BITS <= top.shift {
            return Ok(top);
        }
        if self.is_empty() {
            return Ok(SlotRef { shift: levels * BITS, ..top });
        }
        while u32::from(self.root().levels) < levels {
            self.grow()?;
        }
        Ok(self.top())
    }

    fn grow(&self) -> Result<(), PlaceRefused> {
        self.reshaped.set(true);
        let Root { entry, levels } = self.root();
        let number = self.slab.alloc().ok_or(PlaceRefused::NoNode)?;
        let node = self.node(number);
        node.init(u32::from(levels) * BITS, None);
        node.put(0, entry);
        node.account(1, i32::from(is_shadow(entry)));
        let marks = self.root_marks();
        for mark in Mark::ALL {
            node.set_marks(mark, u64::from(marks >> mark as u8 & 1));
        }
        if let Kind::Node(child) = entry.kind() {
            self.node(child).set_parent(Some((number, 0)));
            self.settle(SlotHome::Node(child)); // it may be the last step's, with a shadow from the root's word
        }
        self.set_root(Root { entry: Entry::node(number), levels: levels + 1 }, marks);
        Ok(())
    }

    /// Step 2. If nodes are missing on the way, the entry goes in with them.
    #[inline]
    fn find_or_create_slot(
        &self,
        mut at: SlotRef,
        index: u64,
        order: u8,
        entry: Entry,
    ) -> Result<Placed, PlaceRefused> {
        let shift = Self::shift_for(order);
        if at.shift <= shift {
            return Ok(Placed::Slot(at));
        }
        let mut found = self.get(at);
        loop {
            match found.kind() {
                Kind::Node(node) => {
                    at = Self::down(at, node, index);
                    if at.shift <= shift {
                        return Ok(Placed::Slot(at));
                    }
                    found = self.slots(node).get(at.slot);
                }
                Kind::Empty => return self.place_entry(at, index, order, entry).map(Placed::Stored),
                Kind::Value(value) if !value.is_spill() => {
                    self.split_step(at, value)?;
                    found = self.get(at);
                }
                Kind::Folio(_) | Kind::Value(_) => return Err(PlaceRefused::Present(found)),
            }
        }
    }

    fn place_entry(&self, at: SlotRef, index: u64, order: u8, entry: Entry) -> Result<SlotRef, PlaceRefused> {
        let mut numbers = [0; LEVELS_MAX];
        let numbers = &mut numbers[..((at.shift - Self::shift_for(order)) / BITS) as usize];
        self.alloc_all(numbers)?;
        let mut low = at;
        if mutant(Mutant::PlantLast) {
            self.put(at, Entry::node(numbers[0]));
        }
        for (i, &number) in numbers.iter().enumerate() {
            let parent = match low.home {
                SlotHome::Node(parent) => Some((parent, low.slot)),
                SlotHome::Root => None,
            };
            low = Self::down(low, number, index);
            self.node(number).init(low.shift, parent);
            if let Some(&child) = numbers.get(i + 1) {
                self.put(low, Entry::node(child));
                self.account(low.home, 1, 0);
            }
        }
        let run = Self::run_of(order);
        self.announce(index, order, entry);
        self.put_run(low, run, entry);
        self.account_and_settle(low.home, run as i32, shadows_in(entry, run));
        self.put(at, Entry::node(numbers[0]));
        self.account_and_settle(at.home, 1, 0);
        Ok(low)
    }

    #[inline]
    fn announce(&self, index: u64, order: u8, entry: Entry) {
        if let Kind::Folio(folio) = entry.kind() {
            self.slab.placing(folio, index, order);
        }
    }

    pub(super) fn alloc_all(&self, numbers: &mut [u32]) -> Result<(), PlaceRefused> {
        for i in 0..numbers.len() {
            match self.slab.alloc() {
                Some(number) => numbers[i] = number,
                None => {
                    numbers[..i].iter().for_each(|&number| self.slab.free(number));
                    return Err(PlaceRefused::NoNode);
                }
            }
        }
        Ok(())
    }

    /// Into pieces that fill one slot each, or two halves in a new node below.
    fn split_step(&self, at: SlotRef, value: Value) -> Result<(), PlaceRefused> {
        let whole = value.order();
        let one_slot = whole - (u32::from(whole) % BITS) as u8;
        if one_slot < whole {
            self.split_here(at, value, one_slot);
            return Ok(());
        }
        self.split_below(at, value.with_order(whole - 1))
    }

    fn split_here(&self, at: SlotRef, value: Value, piece: u8) {
        self.slab.split();
        let first = Self::first_slot(at, value.order());
        let (run, step) = (Self::run_of(value.order()), Self::run_of(piece));
        let marks = self.marks_at(first);
        for slot in first.slot..first.slot + run {
            // A reader sees the whole or the piece, and both say the same.
            self.put(SlotRef { slot, ..first }, Entry::value(value.with_order(piece)));
        }
        for slot in (first.slot..first.slot + run).step_by(step as usize) {
            self.mark_all(SlotRef { slot, ..first }, marks);
        }
    }

    fn split_below(&self, at: SlotRef, half: Value) -> Result<(), PlaceRefused> {
        let Some(number) = self.slab.alloc() else {
            self.settle(at.home); // it may be the last step's new node, and stays as it is
            return Err(PlaceRefused::NoNode);
        };
        let SlotHome::Node(parent) = at.home else { unreachable!("an entry in the root's word has order 0") };
        self.slab.split();
        self.reshaped.set(true);
        let node = self.node(number);
        node.init(at.shift - BITS, Some((parent, at.slot)));
        let marks = self.marks_at(at);
        if mutant(Mutant::SplitLast) {
            self.put(at, Entry::node(number));
        }
        for slot in 0..Self::SLOTS {
            node.put(slot, Entry::value(half));
        }
        node.account(Self::SLOTS as i32, Self::SLOTS as i32);
        for mark in Mark::ALL {
            let both = 1 | 1 << (Self::SLOTS / 2);
            node.set_marks(mark, if marks & mark.bit() != 0 { both } else { 0 });
        }
        self.put(at, Entry::node(number));
        self.account_and_settle(at.home, 0, -1);
        Ok(())
    }

    /// Steps 3 to 5. `at` is the first of the slots.
    #[inline]
    fn fill(
        &self,
        at: SlotRef,
        NewEntry { index, order, entry, over }: NewEntry,
        mut displaced: impl FnMut(u64, Entry, u8),
    ) -> Result<SlotRef, PlaceRefused> {
        let shift = at.shift;
        let run = Self::run_of(order);
        match at.home {
            SlotHome::Node(number) => {
                let slots = self.slots(number);
                if slots.is_vacant(at.slot, run) {
                    self.announce(index, order, entry);
                    slots.put_run(at.slot, run, entry);
                    self.account_and_settle(at.home, run as i32, shadows_in(entry, run));
                    return Ok(at);
                }
            }
            SlotHome::Root if self.is_empty() => {
                self.announce(index, order, entry);
                self.put(at, entry);
                return Ok(at);
            }
            SlotHome::Root => {}
        }
        // 3
        self.check_run(at, index, order, over)?;
        // 4
        let _all = self.each_in_run(at, index, run, &mut |first, entry, order| {
            displaced(first, entry, order);
            ControlFlow::Continue(())
        });
        self.unmark_all(at, run);
        // 5
        self.announce(index, order, entry);
        let (mut slots, mut shadows) = (0, 0);
        for slot in at.slot..at.slot + run {
            let at = SlotRef { slot, ..at };
            let old = self.get(at);
            self.put(at, entry);
            slots += i32::from(old.is_empty());
            shadows += i32::from(is_shadow(entry)) - i32::from(is_shadow(old));
            if let Kind::Node(node) = old.kind() {
                self.free_below(node, shift - BITS);
            }
        }
        self.account_and_settle(at.home, slots, shadows);
        Ok(at)
    }

    /// Whether a new entry may fill the run of slots at `at`. A shadow that is larger is cut to size.
    fn check_run(&self, at: SlotRef, index: u64, order: u8, over: Overwrite) -> Result<(), PlaceRefused> {
        let found = self.get(at);
        match found.kind() {
            Kind::Empty | Kind::Node(_) => {}
            Kind::Value(value) if !value.is_spill() => {
                if value.order() > order {
                    self.split_here(at, value, order);
                }
            }
            Kind::Folio(_) | Kind::Value(_) => {
                if over == Overwrite::Shadows || self.order_of(found) > order {
                    return Err(PlaceRefused::Present(found));
                }
            }
        }
        if over == Overwrite::Inside {
            return Ok(());
        }
        let seen = self.each_in_run(at, index, Self::run_of(order), &mut |_, entry, _| {
            if is_shadow(entry) { ControlFlow::Continue(()) } else { ControlFlow::Break(entry) }
        });
        match seen {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(entry) => Err(PlaceRefused::Present(entry)),
        }
    }

    /// Visits the entries in `run` slots from `at` (the slot of `index`) on, and below them, once, in rising order.
    pub(super) fn each_in_run(
        &self,
        at: SlotRef,
        index: u64,
        run: u32,
        visit: &mut EntryVisitor<'_>,
    ) -> ControlFlow<Entry> {
        let end = at.slot + run;
        let (mut at, mut index) = (at, index);
        while at.slot < end {
            let entry = self.get(at);
            let step = match entry.kind() {
                Kind::Empty => 1,
                Kind::Node(node) => {
                    let below = SlotRef { home: SlotHome::Node(node), shift: at.shift - BITS, slot: 0 };
                    self.each_in_run(below, index, Self::SLOTS, visit)?;
                    1
                }
                Kind::Folio(_) | Kind::Value(_) => {
                    let order = self.order_of(entry);
                    visit(index, entry, order)?;
                    Self::run_of(order)
                }
            };
            at.slot += step;
            index += u64::from(step) << at.shift;
        }
        ControlFlow::Continue(())
    }

    /// Gives back `node`, of slots of `shift`, and all nodes below it. Nothing points to it any more.
    fn free_below(&self, number: u32, shift: u32) {
        if shift > 0 {
            for slot in 0..Self::SLOTS {
                if let Kind::Node(child) = self.node(number).get(slot).kind() {
                    self.free_below(child, shift - BITS);
                }
            }
        }
        self.release(number);
    }
}

pub(super) type EntryVisitor<'v> = dyn FnMut(u64, Entry, u8) -> ControlFlow<Entry> + 'v;

#[inline]
fn shadows_in(entry: Entry, run: u32) -> i32 {
    if is_shadow(entry) { run as i32 } else { 0 }
}

fn shadow_of(entry: Entry) -> Option<Value> {
    match entry.kind() {
        Kind::Value(value) if !value.is_spill() => Some(value),
        _ => None,
    }
}

//! Tree: the owner of the nodes, and finding the way among them under the lock.
//!
//! A **position** ([`SlotRef`]) is one slot: of a node, or the root's word, which is the slot above the topmost node.
//! Everything that a writer does is moving a position up and down and storing at it.

use core::cell::Cell;

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutant, ordering};

use super::mark::Mark;
use super::node::{Head, Node, NodeSlots, NodeState};
use quinion_view::xarray::{ENTRY_ORDER_MAX, Entry, Kind, Root};

/// The first index that does not fit: 2^52 pages of 4 KiB are all that 64 bits of bytes can name.
pub const INDICES_MAX: u64 = 1 << 52;

/// Supplies nodes, and knows how large a folio is.
pub trait NodeSlab {
    /// The slots of a node, 2^BITS of them. `node` is one that [`alloc`](NodeSlab::alloc) gave.
    fn slots(&self, node: u32) -> &[AtomicU32];
    /// The writer's bookkeeping of a node that [`alloc`](NodeSlab::alloc) gave.
    fn head(&self, node: u32) -> &Head;
    /// A node, or `None` if there is none. Never waits and never reclaims. The number is below 2^30; the
    /// content is arbitrary, the tree initialises all but the allocator's words.
    fn alloc(&self) -> Option<u32>;
    /// Takes back a node that is in no tree any more. It may be given out at once: readers that are still in it are
    /// told by the entries they find, not by the node.
    fn free(&self, node: u32);
    /// log2 of the pages of a folio that is in the tree or being inserted; the same as long as it is.
    fn order(&self, folio: u32) -> u8;

    /// A folio of 2^`order` pages is stored at `index` next: nothing can refuse it any more, and no reader finds it
    /// yet. Here a folio gets all properties that it must have before it can be found. Told of each folio that an
    /// insertion or a store puts in, once, under the tree's lock.
    #[inline]
    fn placing(&self, _folio: u32, _index: u64, _order: u8) {}
    /// A node came to hold nothing but shadows, or ceased to. Told at most once per change and at the end
    /// of an operation, under the tree's lock; a node is freed only after it ceased.
    fn shadow_only(&self, _node: u32, _change: ShadowOnly) {}
    /// A way down from the root, or from where a batch left off, begins. For counting.
    #[inline]
    fn descended(&self) {}
    /// A shadow was cut into smaller ones, by one step of a split. For counting.
    #[inline]
    fn split(&self) {}
}

/// How a node stands to the list of nodes that only remember.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShadowOnly {
    /// From now on the node holds shadows and nothing else.
    Became,
    /// The node holds something else as well, or nothing.
    Ceased,
}

/// A tree, as seen by the holder of its lock: made on the fly from the nodes' allocator and the root's word. The caller
/// holds the one lock that guards this root for as long as this value exists; readers without it use
/// [`walk()`](quinion_view::xarray::walk()). Nothing here waits, or allocates except through [`NodeSlab::alloc`].
#[derive(Debug)]
pub struct XArray<'a, S: NodeSlab, const BITS: u32 = 6> {
    pub(super) slab: &'a S,
    root: &'a AtomicU64,
    /// Whether the topmost node was made or filled anew, so that it may not be needed any more.
    pub(super) reshaped: Cell<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlotHome {
    Root,
    Node(u32),
}

/// One slot, which covers 2^`shift` pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRef {
    pub home: SlotHome,
    pub shift: u32,
    pub slot: u32,
}

const ROOT_MARKS_SHIFT: u32 = 40;

impl<'a, S: NodeSlab, const BITS: u32> XArray<'a, S, BITS> {
    pub(super) const SLOTS: u32 = 1 << BITS;

    /// The tree whose root is `root`. An empty tree's root is [`Root::EMPTY`], 0 as bits.
    #[inline]
    pub fn new(slab: &'a S, root: &'a AtomicU64) -> Self {
        const { assert!(BITS >= 1 && BITS <= 6, "a mark is a bit a slot in 64 bits") };
        Self { slab, root, reshaped: Cell::new(false) }
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.root().entry.is_empty()
    }

    /// The entry that covers `index`: a folio, a value or nothing; never a node.
    #[inline]
    pub fn load(&self, index: u64) -> Entry {
        self.leaf_entry(index).map_or(Entry::EMPTY, |(_, entry)| entry)
    }

    /// The order of the entry that covers `index`.
    pub fn order_at(&self, index: u64) -> Option<u8> {
        let entry = self.load(index);
        (!entry.is_empty()).then(|| self.order_of(entry))
    }

    /// The entry that covers `index`: its first index, the entry, its order.
    pub fn entry_at(&self, index: u64) -> Option<(u64, Entry, u8)> {
        let entry = self.load(index);
        (!entry.is_empty()).then(|| self.canonical(index, entry))
    }

    /// Nodes that inserting folios over `pages` pages from `index` on can need at most: for a reserve taken
    /// before the lock. A hint if the tree may change meanwhile; too few shows as "no node".
    pub fn nodes_needed(&self, index: u64, pages: u64) -> u32 {
        let last = index + pages.max(1) - 1;
        let levels_now = u32::from(self.root().levels); // once: without the lock it may be another next time
        let levels = self.levels_for(last, 0).max(levels_now).max(1);
        let on_level = |level: u32| (last >> (level * BITS)) - (index >> (level * BITS)) + 1;
        let path = if index >> BITS == last >> BITS {
            levels.into()
        } else {
            (1..=levels).map(on_level).sum::<u64>()
        };
        let growth = levels - levels_now;
        u32::try_from(path).unwrap_or(u32::MAX).saturating_add(growth)
    }

    #[inline]
    pub(super) fn root(&self) -> Root {
        Root::from_bits(self.root.load(Ordering::Relaxed))
    }
    /// The marks that anything in the tree carries, a bit each.
    #[inline]
    pub(super) fn root_marks(&self) -> u8 {
        (self.root.load(Ordering::Relaxed) >> ROOT_MARKS_SHIFT) as u8
    }
    pub(super) fn set_root(&self, root: Root, marks: u8) {
        // Release, partner: the Acquire in `load_root`: a thread that finds a node there finds its slots as they
        // were prepared.
        let order = ordering(Mutant::RootRelease, Ordering::Release, Ordering::Relaxed);
        self.root.store(root.bits() | u64::from(marks) << ROOT_MARKS_SHIFT, order);
    }
    #[inline]
    pub(super) fn node(&self, node: u32) -> Node<'a> {
        Node::new(self.slab.head(node), self.slab.slots(node))
    }
    #[inline]
    pub(super) fn state(&self, node: u32) -> NodeState<'a> {
        NodeState(self.slab.head(node))
    }
    #[inline]
    pub(super) fn slots(&self, node: u32) -> NodeSlots<'a> {
        NodeSlots(self.slab.slots(node))
    }
    #[inline]
    pub(super) fn slot_of(index: u64, shift: u32) -> u32 {
        (index >> shift) as u32 & (Self::SLOTS - 1)
    }
    #[inline]
    pub(super) fn top(&self) -> SlotRef {
        SlotRef { home: SlotHome::Root, shift: u32::from(self.root().levels) * BITS, slot: 0 }
    }
    #[inline]
    pub(super) fn down(at: SlotRef, node: u32, index: u64) -> SlotRef {
        let shift = at.shift - BITS;
        SlotRef { home: SlotHome::Node(node), shift, slot: Self::slot_of(index, shift) }
    }
    /// The slot that `node`, of slots of `shift`, hangs in.
    #[inline]
    pub(super) fn above(&self, node: u32, shift: u32) -> SlotRef {
        let shift = shift + BITS;
        match self.state(node).parent() {
            Some((parent, slot)) => SlotRef { home: SlotHome::Node(parent), shift, slot },
            None => SlotRef { home: SlotHome::Root, shift, slot: 0 },
        }
    }
    #[inline]
    pub(super) fn get(&self, at: SlotRef) -> Entry {
        match at.home {
            SlotHome::Root => self.root().entry,
            SlotHome::Node(node) => self.slots(node).get(at.slot),
        }
    }
    /// Stores at one position; counts and marks are the caller's.
    #[inline]
    pub(super) fn put(&self, at: SlotRef, entry: Entry) {
        match at.home {
            SlotHome::Root if entry.is_empty() => self.set_root(Root::EMPTY, 0),
            SlotHome::Root => {
                self.set_root(Root { entry, levels: (at.shift / BITS) as u8 }, self.root_marks())
            }
            SlotHome::Node(node) => self.slots(node).put(at.slot, entry),
        }
    }
    #[inline]
    pub(super) fn put_run(&self, at: SlotRef, run: u32, entry: Entry) {
        let SlotHome::Node(node) = at.home else { return self.put(at, entry) };
        self.slots(node).put_run(at.slot, run, entry);
    }
    #[inline]
    pub(super) fn descend(&self, at: SlotRef, index: u64) -> SlotRef {
        self.descend_to(at, index).0
    }
    /// As [`descend`](XArray::descend), with the entry there.
    #[inline]
    pub(super) fn descend_to(&self, mut at: SlotRef, index: u64) -> (SlotRef, Entry) {
        let mut entry = self.get(at);
        while let Kind::Node(node) = entry.kind() {
            at = Self::down(at, node, index);
            entry = self.slots(node).get(at.slot);
        }
        (at, entry)
    }
    #[inline]
    pub(super) fn leaf(&self, index: u64) -> Option<SlotRef> {
        self.leaf_entry(index).map(|(at, _)| at)
    }
    #[inline]
    pub(super) fn leaf_entry(&self, index: u64) -> Option<(SlotRef, Entry)> {
        let top = self.top();
        self.slab.descended();
        (index >> top.shift == 0).then(|| self.descend_to(top, index))
    }

    #[inline]
    pub(super) fn order_of(&self, entry: Entry) -> u8 {
        match entry.kind() {
            Kind::Folio(folio) => self.slab.order(folio),
            Kind::Value(value) => value.order(),
            Kind::Empty | Kind::Node(_) => unreachable!("only folios and values have an order"),
        }
    }
    #[inline]
    pub(super) fn canonical(&self, index: u64, entry: Entry) -> (u64, Entry, u8) {
        let order = self.order_of(entry);
        (index & !((1 << order) - 1), entry, order)
    }
    /// The shift of the slots that hold entries of `order`.
    #[inline]
    pub(super) fn shift_for(order: u8) -> u32 {
        u32::from(order) / BITS * BITS
    }
    /// The slots of one node that an entry of `order` fills.
    #[inline]
    pub(super) fn run_of(order: u8) -> u32 {
        1 << (u32::from(order) % BITS)
    }
    #[inline]
    pub(super) fn first_slot(at: SlotRef, order: u8) -> SlotRef {
        SlotRef { slot: at.slot & !(Self::run_of(order) - 1), ..at }
    }
    /// Levels of nodes that it takes to reach `last` and to hold an entry of `order`.
    pub(super) fn levels_for(&self, last: u64, order: u8) -> u32 {
        let reach = (64 - last.leading_zeros()).div_ceil(BITS);
        let hold = if order == 0 { 0 } else { Self::shift_for(order) / BITS + 1 };
        reach.max(hold)
    }
    pub(super) fn assert_place(index: u64, order: u8) {
        assert!(
            order <= ENTRY_ORDER_MAX,
            "order {order} was asked for; the tree stores orders up to {ENTRY_ORDER_MAX}"
        );
        assert!(index < INDICES_MAX, "index {index} was asked for; the tree reaches to {INDICES_MAX}");
        assert!(
            index & ((1 << order) - 1) == 0,
            "an entry of order {order} cannot start at index {index}: align it"
        );
    }

    #[inline]
    pub(super) fn account(&self, home: SlotHome, slots: i32, shadows: i32) {
        if let SlotHome::Node(node) = home {
            self.state(node).account(slots, shadows);
        }
    }
    /// Tells the allocator if `home` came to hold shadows only, or ceased to.
    #[inline]
    pub(super) fn settle(&self, home: SlotHome) {
        if let SlotHome::Node(number) = home {
            self.settle_node(number, self.state(number));
        }
    }
    #[inline]
    pub(super) fn account_and_settle(&self, home: SlotHome, slots: i32, shadows: i32) {
        if let SlotHome::Node(number) = home {
            let node = self.state(number);
            node.account(slots, shadows);
            self.settle_node(number, node);
        }
    }
    #[inline]
    fn settle_node(&self, number: u32, node: NodeState<'_>) {
        if node.is_shadow_only() != node.is_listed() {
            let change = if node.is_listed() { ShadowOnly::Ceased } else { ShadowOnly::Became };
            node.flip_listed();
            self.slab.shadow_only(number, change);
        }
    }
    pub(super) fn release(&self, number: u32) {
        let node = self.state(number);
        if node.is_listed() {
            node.flip_listed();
            self.slab.shadow_only(number, ShadowOnly::Ceased);
        }
        self.slab.free(number);
    }
    pub(super) fn marks_at(&self, at: SlotRef) -> u8 {
        match at.home {
            SlotHome::Root => self.root_marks(),
            SlotHome::Node(node) => Mark::ALL
                .into_iter()
                .map(|mark| ((self.state(node).marks(mark) >> at.slot & 1) as u8) << mark as u8)
                .sum(),
        }
    }
}

#[inline]
pub(super) fn is_shadow(entry: Entry) -> bool {
    matches!(entry.kind(), Kind::Value(value) if !value.is_spill())
}

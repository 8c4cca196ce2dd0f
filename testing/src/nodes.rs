//! An allocator of nodes for the tree's tests: it can run out on purpose, notices leaks and double frees, and fills
//! what it hands out with rubbish.
//!
//! A folio's order is part of its number here, so that a test makes folios at will.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use quinion::internals::xarray::{Entry, Head, NodeSlab, RacySlots, Root, ShadowOnly, Steps, XArray, walk};

/// Whether a node that comes back is handed out again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reuse {
    /// The node is filled with rubbish and handed out again, the last one first.
    AtOnce,
    /// The node stays as it was and is never handed out again.
    Never,
}

pub struct TestNodes {
    slots: Vec<AtomicU32>,
    heads: Vec<Head>,
    bits: u32,
    reuse: Reuse,
    inner: Mutex<Inner>,
    /// Allocations that still succeed.
    pub budget: AtomicU64,
    pub descents: AtomicU64,
    pub allocs: AtomicU64,
    /// Whether the hook of shadow-only nodes was ever called wrongly.
    pub hook_broken: AtomicBool,
}

#[derive(Default)]
struct Inner {
    free: Vec<u32>,
    live: BTreeSet<u32>,
    shadow_only: BTreeSet<u32>,
}

/// The first node's number: 0 and its neighbours are no node.
const FIRST: u32 = 7;
/// The allocator's value for a folio's head word, which the tree must not change.
const ALLOCATORS_OWN: u64 = 0x5eed_5eed;

impl TestNodes {
    pub fn new(bits: u32, nodes: u32, reuse: Reuse) -> Self {
        let heads = || std::array::from_fn(|_| AtomicU64::new(u64::MAX));
        Self {
            slots: (0..nodes << bits).map(|_| AtomicU32::new(u32::MAX)).collect(),
            heads: (0..nodes).map(|_| heads()).collect(),
            bits,
            reuse,
            inner: Mutex::new(Inner { free: (FIRST..FIRST + nodes).rev().collect(), ..Inner::default() }),
            budget: AtomicU64::new(u64::MAX),
            descents: AtomicU64::new(0),
            allocs: AtomicU64::new(0),
            hook_broken: AtomicBool::new(false),
        }
    }
    pub fn live(&self) -> u32 {
        self.inner.lock().unwrap().live.len() as u32
    }
    pub fn shadow_only_nodes(&self) -> Vec<u32> {
        self.inner.lock().unwrap().shadow_only.iter().copied().collect()
    }
    fn place(&self, node: u32) -> usize {
        (node - FIRST) as usize
    }
    fn rubbish(&self, node: u32, salt: u32) {
        for (i, slot) in self.slots(node).iter().enumerate() {
            slot.store((i as u32).wrapping_add(salt).wrapping_mul(0x9e37_79b1), Relaxed);
        }
        for word in self.head(node) {
            word.store(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(u64::from(salt) + 1), Relaxed);
        }
    }
}

impl NodeSlab for TestNodes {
    fn slots(&self, node: u32) -> &[AtomicU32] {
        let start = self.place(node) << self.bits;
        &self.slots[start..start + (1 << self.bits)]
    }
    fn head(&self, node: u32) -> &Head {
        &self.heads[self.place(node)]
    }
    fn alloc(&self) -> Option<u32> {
        self.allocs.fetch_add(1, Relaxed);
        if self.budget.load(Relaxed) == 0 {
            return None;
        }
        let mut inner = self.inner.lock().unwrap();
        let node = inner.free.pop()?;
        if self.budget.load(Relaxed) != u64::MAX {
            self.budget.fetch_sub(1, Relaxed);
        }
        self.rubbish(node, node);
        self.head(node)[7].store(ALLOCATORS_OWN, Relaxed);
        assert!(inner.live.insert(node));
        Some(node)
    }
    fn free(&self, node: u32) {
        assert_eq!(self.head(node)[7].load(Relaxed), ALLOCATORS_OWN, "the tree touched the allocator's word");
        let mut inner = self.inner.lock().unwrap();
        assert!(inner.live.remove(&node), "node {node} was freed twice");
        if inner.shadow_only.contains(&node) {
            self.hook_broken.store(true, Relaxed);
        }
        if self.reuse == Reuse::AtOnce {
            self.rubbish(node, !node);
            inner.free.push(node);
        }
    }
    fn order(&self, folio: u32) -> u8 {
        order_of(folio)
    }
    fn shadow_only(&self, node: u32, change: ShadowOnly) {
        let mut inner = self.inner.lock().unwrap();
        let right = inner.live.contains(&node)
            && match change {
                ShadowOnly::Became => inner.shadow_only.insert(node),
                ShadowOnly::Ceased => inner.shadow_only.remove(&node),
            };
        if !right {
            self.hook_broken.store(true, Relaxed);
        }
    }
    fn descended(&self) {
        self.descents.fetch_add(1, Relaxed);
    }
}

impl RacySlots for TestNodes {
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]> {
        let start = (node.checked_sub(FIRST)? as usize) << self.bits;
        self.slots.get(start..start + (1 << self.bits))
    }
}

/// A folio of `order`, told from others by `id`.
pub fn folio(id: u32, order: u8) -> u32 {
    id << 4 | u32::from(order)
}
pub fn order_of(folio: u32) -> u8 {
    (folio & 15) as u8
}

/// An allocator and a root: what a mapping is to a tree.
pub struct Forest<const BITS: u32> {
    pub nodes: TestNodes,
    pub root: AtomicU64,
}

impl<const BITS: u32> Forest<BITS> {
    pub fn new(nodes: u32, reuse: Reuse) -> Self {
        Self { nodes: TestNodes::new(BITS, nodes, reuse), root: AtomicU64::new(0) }
    }
    pub fn tree(&self) -> XArray<'_, TestNodes, BITS> {
        XArray::new(&self.nodes, &self.root)
    }
    /// The entry that a reader without the lock finds.
    pub fn walk(&self, index: u64) -> Entry {
        // Acquire, partner: the tree's store of its root.
        let root = Root::from_bits(self.root.load(std::sync::atomic::Ordering::Acquire));
        walk::<_, BITS>(&self.nodes, root, index)
    }
    /// As [`Forest::walk`], a level at a time; also how many levels that were.
    pub fn walk_by_steps(&self, index: u64) -> (Entry, u32) {
        // Acquire, partner: the tree's store of its root.
        let root = Root::from_bits(self.root.load(std::sync::atomic::Ordering::Acquire));
        let mut steps = Steps::<BITS>::new(&self.nodes, root, index);
        let mut levels = 0;
        while steps.slot().is_some() {
            steps.step(&self.nodes);
            levels += 1;
        }
        (steps.entry(), levels)
    }
    /// Checks the tree, that no node leaked, and that the hook was called as promised.
    #[track_caller]
    pub fn check(&self) {
        let nodes = self.tree().check().unwrap_or_else(|why| panic!("{why}\n{}", self.tree().dump_nodes()));
        assert_eq!(nodes, self.nodes.live(), "nodes of the tree, and nodes handed out");
        assert!(!self.nodes.hook_broken.load(Relaxed), "the hook of shadow-only nodes was called wrongly");
    }
    /// The descents that `act` takes.
    pub fn descents<R>(&self, act: impl FnOnce(&mut XArray<'_, TestNodes, BITS>) -> R) -> (R, u64) {
        let before = self.nodes.descents.load(Relaxed);
        let result = act(&mut self.tree());
        (result, self.nodes.descents.load(Relaxed) - before)
    }
    /// Calls `act` while only `nodes` allocations succeed.
    pub fn with_budget<R>(&self, nodes: u64, act: impl FnOnce(&mut XArray<'_, TestNodes, BITS>) -> R) -> R {
        self.nodes.budget.store(nodes, Relaxed);
        let result = act(&mut self.tree());
        self.nodes.budget.store(u64::MAX, Relaxed);
        result
    }
}

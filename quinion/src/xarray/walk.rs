//! Walk: a reader's way from a root to an entry, without a lock.
//!
//! The tree may change under a walk, and a node may be recycled for another
//! tree. So a walk promises little, and always keeps it: it ends after at most
//! `levels` steps, every number it follows was checked by the slab, and what it
//! returns is a **hint**. Whoever asked holds the hint against the descriptor
//! it names; an empty or foreign hint means "ask under the lock", never "hole".

use crate::sync::atomic::{AtomicU32, Ordering};

use super::entry::{Entry, Kind, Root};

/// What a walk needs of whoever keeps the nodes: the slots of a node whose number may be stale.
pub trait RacySlots {
    /// The slots of `node`, 2^BITS of them, or `None` if the number is out of bounds.
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]>;
}

/// The entry a reader finds for `index`; a hint.
#[inline]
pub fn walk<S: RacySlots + ?Sized, const BITS: u32>(slab: &S, root: Root, index: u64) -> Entry {
    walk_to_leaf::<S, BITS>(slab, root, index).0
}

/// As [`walk`], and the slots of the lowest node on the way if the walk ended in one of level 1,
/// so that the caller may step to neighbours of the same node by itself.
#[inline]
pub fn walk_to_leaf<S: RacySlots + ?Sized, const BITS: u32>(
    slab: &S,
    root: Root,
    index: u64,
) -> (Entry, Option<&[AtomicU32]>) {
    let mut shift = u32::from(root.levels).min(64 / BITS + 1) * BITS;
    if index.checked_shr(shift).is_some_and(|above| above != 0) {
        return (Entry::EMPTY, None);
    }
    let mut entry = root.entry;
    while let Kind::Node(node) = entry.kind() {
        if shift == 0 {
            return (Entry::EMPTY, None); // a node below the last level: the walk met a recycled one
        }
        shift -= BITS;
        let Some(slots) = slab.racy_slots(node) else {
            return (Entry::EMPTY, None);
        };
        let slot = (index >> shift) as usize & ((1 << BITS) - 1);
        // Acquire, partner: the Release by which the tree's writer stores a slot: who sees a new node
        // sees its slots as they were prepared.
        entry = Entry::from_bits(slots[slot].load(Ordering::Acquire));
        if shift == 0 {
            return if matches!(entry.kind(), Kind::Node(_)) {
                (Entry::EMPTY, None)
            } else {
                (entry, Some(slots))
            };
        }
    }
    (entry, None)
}

/// A walk that is led one level at a time, so that several go side by side: while one waits for its slot to
/// come from memory, the others' are on their way. Finds what [`walk`] finds.
#[derive(Clone, Copy, Debug)]
pub struct Steps<'a, const BITS: u32> {
    index: u64,
    /// Bits of the index below the level that `slot` is of.
    shift: u32,
    /// What the last step read.
    entry: Entry,
    /// Where the next one reads.
    slot: Option<&'a AtomicU32>,
}

impl<'a, const BITS: u32> Steps<'a, BITS> {
    /// A walk for `index`, at the top of a tree.
    #[inline]
    pub fn new<S: RacySlots + ?Sized>(slab: &'a S, root: Root, index: u64) -> Self {
        let shift = u32::from(root.levels).min(64 / BITS + 1) * BITS;
        let outside = index.checked_shr(shift).is_some_and(|above| above != 0);
        let entry = if outside { Entry::EMPTY } else { root.entry };
        let mut steps = Self { index, shift, entry, slot: None };
        steps.descend(slab);
        steps
    }

    /// The slot that the next step reads, to be fetched early; `None` once the walk has ended.
    #[inline]
    pub fn slot(&self) -> Option<&'a AtomicU32> {
        self.slot
    }

    /// Goes one level down, if the walk has not ended.
    #[inline]
    pub fn step<S: RacySlots + ?Sized>(&mut self, slab: &'a S) {
        if let Some(slot) = self.slot {
            // Acquire, partner: as in `walk_to_leaf`.
            self.entry = Entry::from_bits(slot.load(Ordering::Acquire));
            self.descend(slab);
        }
    }

    /// What was found: a hint, once the walk has ended.
    #[inline]
    pub fn entry(&self) -> Entry {
        self.entry
    }

    /// Turns to the slot in the node that was met, if it was one and a level is left for it.
    #[inline]
    fn descend<S: RacySlots + ?Sized>(&mut self, slab: &'a S) {
        let Kind::Node(node) = self.entry.kind() else {
            self.slot = None;
            return;
        };
        let slots = if self.shift == 0 { None } else { slab.racy_slots(node) };
        let Some(slots) = slots else {
            (self.entry, self.slot) = (Entry::EMPTY, None);
            return;
        };
        self.shift -= BITS;
        self.slot = Some(&slots[(self.index >> self.shift) as usize & ((1 << BITS) - 1)]);
    }
}

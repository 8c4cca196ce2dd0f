//! Walk: a reader's way from a root to an entry, without a lock.
//!
//! The tree may change under a walk, and a node may be recycled for another
//! tree. So a walk promises little, and always keeps it: it ends after at most
//! `levels` steps, every number it follows was checked by the slab, and what it
//! returns is a **hint**. Whoever asked holds the hint against the descriptor
//! it names; an empty or foreign hint means "ask under the lock", never "hole".

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutant, mutant, ordering};

use super::entry::{Entry, Kind, Root};

/// What a walk needs of whoever keeps the nodes: the slots of a node whose number may be stale.
pub trait RacySlots {
    /// The slots of `node`, 2^BITS of them, or `None` if the number is out of bounds.
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]>;
}

/// A tree's root, as a reader finds it.
#[inline]
pub fn load_root(root: &AtomicU64) -> Root {
    // Acquire, partner: the Release by which the tree's writer stores its root: who sees a new top node
    // sees its slots as they were prepared.
    Root::from_bits(root.load(ordering(Mutant::RootAcquire, Ordering::Acquire, Ordering::Relaxed)))
}

/// What stands in a slot of a node, as a reader finds it; a hint.
#[inline]
pub fn load_slot(slot: &AtomicU32) -> Entry {
    // Acquire, partner: the Release by which the tree's writer stores a slot: who sees a new node
    // sees its slots as they were prepared.
    Entry::from_bits(slot.load(ordering(Mutant::SlotAcquire, Ordering::Acquire, Ordering::Relaxed)))
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
        entry = load_slot(&slots[slot]);
        if shift == 0 {
            return if matches!(entry.kind(), Kind::Node(_)) && !mutant(Mutant::WalkLeaf) {
                (Entry::EMPTY, None)
            } else {
                (entry, Some(slots))
            };
        }
    }
    (entry, None)
}

//! Walk: a reader's way from a root to an entry, without a lock, and on to the entries behind it.
//!
//! ```text
//!   walker at 61   load: root -> node -> leaf -> slot 61     a descent: a slot of each level
//!                  step_past(order 1): 62                    no slot
//!                  load: slot 62                             one slot, in the leaf it is in
//!                  step_past(order 0), step_past(order 0): 64
//!                  load: root -> node -> next leaf -> slot 0  the leaf has ended: a descent
//! ```
//!
//! The tree may change under a walk, and a node may be recycled for another tree. So a walk ends after at most `levels`
//! steps, the slab checks every number it follows, and its result is a **hint**, to be checked against the descriptor
//! it names. An empty or foreign hint means "ask under the lock", never "hole".
//!
//! A [`Finder`] remembers the leaf it is in; the hit has one. A [`Walker`] is a finder that stands somewhere and moves
//! on. It does not know how large a folio is: its caller does, and says what to step past.
//!
//! Invariants:
//!  1. A look into the leaf of the last one reads one slot; any other reads one slot of each level.
//!  2. A step reads nothing and always moves the index, whether the walker was ever in the tree or not.
//!
//! Not an invariant: that the leaf is still the tree's. A thread whose descriptor does not fit resets the reader and
//! looks again.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutant, mutant, ordering};

use super::entry::{Entry, Kind, Root};

/// The nodes' allocator, as a walk needs it: the slots of a node whose number may be stale.
pub trait RacySlots {
    /// The slots of `node`, 2^BITS of them, or `None` if the number is out of bounds.
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]>;

    /// The bits of a slot, as they are now. A walk reads every slot by this: an allocator of a test's own can count
    /// steps, or change the tree between two of them.
    #[inline(always)]
    fn read_slot(&self, slot: &AtomicU32) -> u32 {
        // Acquire, partner: the Release by which the tree's writer stores a slot: a new node's slots are seen as
        // prepared.
        slot.load(ordering(Mutant::SlotAcquire, Ordering::Acquire, Ordering::Relaxed))
    }
}

/// A tree's root, as a reader finds it.
#[inline]
pub fn load_root(root: &AtomicU64) -> Root {
    // Acquire, partner: the Release by which the tree's writer stores its root: a new top node's slots are seen as
    // prepared.
    Root::from_bits(root.load(ordering(Mutant::RootAcquire, Ordering::Acquire, Ordering::Relaxed)))
}

/// The entry a reader finds for `index`; a hint.
#[inline]
pub fn walk<S: RacySlots + ?Sized, const BITS: u32>(slab: &S, root: Root, index: u64) -> Entry {
    let Some(mut shift) = shift_of_top::<BITS>(root, index) else { return Entry::EMPTY };
    let mut entry = root.entry;
    while let Kind::Node(node) = entry.kind() {
        if shift == 0 {
            // A node below the last level: the walk met a recycled one.
            return if mutant(Mutant::WalkLeaf) { entry } else { Entry::EMPTY };
        }
        shift -= BITS;
        let Some(slots) = slab.racy_slots(node) else { return Entry::EMPTY };
        entry = Entry::from_bits(slab.read_slot(&slots[(index >> shift) as usize & ((1 << BITS) - 1)]));
    }
    entry
}

/// How many bits of an index lie below the level of a tree's top; `None` if the tree does not reach to `index`.
#[inline(always)]
fn shift_of_top<const BITS: u32>(root: Root, index: u64) -> Option<u32> {
    let shift = u32::from(root.levels).min(64 / BITS + 1) * BITS;
    index.checked_shr(shift).is_none_or(|above| above == 0).then_some(shift)
}

struct Descent<'a> {
    entry: Entry,
    /// `None` if the entry is the root's, or nothing.
    slot: Option<&'a AtomicU32>,
    /// The slots of the lowest level, if it ended there.
    leaf: Option<&'a [AtomicU32]>,
}

impl Descent<'_> {
    const NOTHING: Self = Descent { entry: Entry::EMPTY, slot: None, leaf: None };
}

/// As [`walk`], for a caller that wants the slot, and the leaf, too. A walk of its own: as one, they cost a hit five
/// instructions, or a batch one in a hundred.
#[inline(always)]
fn walk_to_leaf<S: RacySlots + ?Sized, const BITS: u32>(slab: &S, root: Root, index: u64) -> Descent<'_> {
    let Some(mut shift) = shift_of_top::<BITS>(root, index) else { return Descent::NOTHING };
    let mut entry = root.entry;
    let mut place = None;
    while let Kind::Node(node) = entry.kind() {
        if shift == 0 {
            return Descent::NOTHING; // a node below the last level: the walk met a recycled one
        }
        shift -= BITS;
        let Some(slots) = slab.racy_slots(node) else {
            return Descent::NOTHING;
        };
        let slot = &slots[(index >> shift) as usize & ((1 << BITS) - 1)];
        entry = Entry::from_bits(slab.read_slot(slot));
        if shift == 0 {
            return if matches!(entry.kind(), Kind::Node(_)) && !mutant(Mutant::WalkLeaf) {
                Descent::NOTHING
            } else {
                Descent { entry, slot: Some(slot), leaf: Some(slots) }
            };
        }
        place = Some(slot);
    }
    Descent { entry, slot: place, leaf: None }
}

/// The entry at a walker's index, and where it was found; a hint.
#[derive(Clone, Copy, Debug)]
pub struct WalkResult<'a> {
    /// The entry.
    pub entry: Entry,
    slot: Option<&'a AtomicU32>,
}

/// A reader of one tree that remembers the leaf it is in. The word of the tree's root is read anew at each descent.
#[derive(Debug)]
pub struct Finder<'a, S: ?Sized, const BITS: u32> {
    slab: &'a S,
    root: &'a AtomicU64,
    /// The leaf of the last look, with the upper bits of its indices.
    leaf: Option<(u64, &'a [AtomicU32])>,
}

impl<'a, S: RacySlots + ?Sized, const BITS: u32> Finder<'a, S, BITS> {
    /// A reader that has read nothing yet.
    #[inline]
    pub fn new(slab: &'a S, root: &'a AtomicU64) -> Self {
        Self { slab, root, leaf: None }
    }

    /// The owner of the nodes.
    #[inline]
    pub fn slab(&self) -> &'a S {
        self.slab
    }

    /// Forgets the leaf it is in, so that the next look descends from the root.
    #[inline]
    pub fn reset(&mut self) {
        self.leaf = None;
    }

    /// The entry at `index`. One slot read if it is in the leaf of the last look.
    #[inline]
    pub fn find(&mut self, index: u64) -> WalkResult<'a> {
        let base = index >> BITS;
        if let Some((leaf_base, slots)) = self.leaf
            && leaf_base == base
        {
            let slot = &slots[index as usize & ((1 << BITS) - 1)];
            return WalkResult { entry: Entry::from_bits(self.slab.read_slot(slot)), slot: Some(slot) };
        }
        let root = load_root(self.root);
        let Descent { entry, slot, leaf } = walk_to_leaf::<S, BITS>(self.slab, root, index);
        self.leaf = leaf.map(|slots| (base, slots));
        WalkResult { entry, slot }
    }

    /// Whether the found entry still stands in the same slot: one slot read.
    #[inline]
    pub fn is_still(&self, found: WalkResult<'a>) -> bool {
        let now = match found.slot {
            Some(slot) => Entry::from_bits(self.slab.read_slot(slot)),
            // Relaxed: it is compared, not followed.
            None => Root::from_bits(self.root.load(Ordering::Relaxed)).entry,
        };
        now == found.entry
    }
}

/// A [`Finder`] with an index, on its way up from entry to entry.
#[derive(Debug)]
pub struct Walker<'a, S: ?Sized, const BITS: u32> {
    finder: Finder<'a, S, BITS>,
    index: u64,
}

impl<'a, S: RacySlots + ?Sized, const BITS: u32> Walker<'a, S, BITS> {
    /// A walker at `index`, which has read nothing yet.
    #[inline]
    pub fn new(slab: &'a S, root: &'a AtomicU64, index: u64) -> Self {
        Self { finder: Finder::new(slab, root), index }
    }

    /// Where it stands.
    #[inline]
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Goes to any index. Reads nothing.
    #[inline]
    pub fn seek(&mut self, index: u64) {
        self.index = index;
    }

    /// Goes right behind the entry of `order` that covers the index; not beyond the last index there is. Reads nothing,
    /// whether the walker was ever in the tree or not.
    #[inline]
    pub fn step_past(&mut self, order: u8) {
        debug_assert!(order < 64, "an entry of order {order} covers every index");
        let last = self.index | ((1 << order) - 1);
        self.index = last.saturating_add(1);
    }

    /// Forgets the leaf it is in, and stays at its index; see [`Finder::reset`].
    #[inline]
    pub fn reset(&mut self) {
        self.finder.reset();
    }

    /// The entry at its index; see [`Finder::find`].
    #[inline]
    pub fn load(&mut self) -> WalkResult<'a> {
        self.finder.find(self.index)
    }

    /// Whether the found entry still stands there; see [`Finder::is_still`].
    #[inline]
    pub fn is_still(&self, found: WalkResult<'a>) -> bool {
        self.finder.is_still(found)
    }
}

/// A walk that is led one level at a time, so that several overlap their waits for memory. Finds the entry that
/// [`walk`] finds.
#[derive(Clone, Copy, Debug)]
pub struct Steps<'a, const BITS: u32> {
    index: u64,
    shift: u32,
    entry: Entry,
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
            self.entry = Entry::from_bits(slab.read_slot(slot));
            self.descend(slab);
        }
    }

    /// The entry found: a hint, once the walk has ended.
    #[inline]
    pub fn entry(&self) -> Entry {
        self.entry
    }

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

//! Node: 2^BITS slots, and a head that only the writer reads.
//!
//! ```text
//!   slots   | s0 | s1 | s2 | ...              u32 each: read by any thread, without a lock
//!
//!   head    word 0   count, low half: slots that are not empty
//!                    shadows, high half: slots that hold a shadow
//!           word 1   parent's number | slot in the parent << 32 | shift << 40 | flags << 48
//!           word 2-4 the three marks, a bit a slot
//!           word 5-7 the allocator's: the tree never looks at them
//! ```
//!
//! A mark stands at the first slot of an entry, and at every slot on the way down to it. The head's words are atomics
//! because they lie in memory that others map; under the writers' lock plain loads and stores do, so all of them are
//! Relaxed.

use core::ops::Deref;

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutant, mutant, ordering};

use super::mark::Mark;
use quinion_view::xarray::Entry;

/// A node's state for the tree's writers: eight words, of which the allocator of nodes may use the last
/// three ([`ALLOCATOR_WORD`] and on) as it likes.
pub type Head = [AtomicU64; 8];

/// The first word of a [`Head`] that belongs to the allocator of the nodes. The tree neither reads nor
/// writes it, from the node's allocation to its end.
pub const ALLOCATOR_WORD: usize = 5;

const COUNTS: usize = 0;
const PLACE: usize = 1;
const MARKS: usize = 2;
const HAS_PARENT: u64 = 1 << 48;
const LISTED: u64 = 1 << 49;

#[derive(Clone, Copy)]
pub(super) struct NodeState<'a>(pub &'a Head);

#[derive(Clone, Copy)]
pub(super) struct NodeSlots<'a>(pub &'a [AtomicU32]);

/// Code that needs one of the two halves takes that one alone: to find a half is to check a number.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    state: NodeState<'a>,
    slots: NodeSlots<'a>,
}

impl<'a> Deref for Node<'a> {
    type Target = NodeState<'a>;
    #[inline]
    fn deref(&self) -> &NodeState<'a> {
        &self.state
    }
}

impl<'a> Node<'a> {
    #[inline]
    pub fn new(head: &'a Head, slots: &'a [AtomicU32]) -> Self {
        Self { state: NodeState(head), slots: NodeSlots(slots) }
    }

    /// Makes the node empty, whatever was in it, of `shift` and below `parent` (a node and a slot of it).
    pub fn init(&self, shift: u32, parent: Option<(u32, u32)>) {
        for slot in self.slots.0.iter().filter(|_| !mutant(Mutant::NodeInit)) {
            slot.store(Entry::EMPTY.bits(), Ordering::Relaxed);
        }
        self.set(COUNTS, 0);
        self.set(PLACE, u64::from(shift) << 40);
        self.set_parent(parent);
        for mark in Mark::ALL {
            self.set_marks(mark, 0);
        }
    }

    #[inline]
    pub fn get(&self, slot: u32) -> Entry {
        self.slots.get(slot)
    }
    #[inline]
    pub fn put(&self, slot: u32, entry: Entry) {
        self.slots.put(slot, entry);
    }
    #[inline]
    pub fn put_run(&self, slot: u32, run: u32, entry: Entry) {
        self.slots.put_run(slot, run, entry);
    }
    #[inline]
    pub fn is_vacant(&self, slot: u32, run: u32) -> bool {
        self.slots.is_vacant(slot, run)
    }
}

impl NodeSlots<'_> {
    /// The entry in `slot`, for a writer: no other thread stores.
    #[inline]
    pub fn get(self, slot: u32) -> Entry {
        Entry::from_bits(self.0[slot as usize].load(Ordering::Relaxed))
    }
    #[inline]
    pub fn put(self, slot: u32, entry: Entry) {
        // Release, partner: the Acquire in `RacySlots::read_slot`: a thread that finds a node here finds its
        // slots as they were prepared, and one that finds a folio finds its descriptor as it was set up.
        let order = ordering(Mutant::SlotRelease, Ordering::Release, Ordering::Relaxed);
        self.0[slot as usize].store(entry.bits(), order);
    }

    /// Stores `entry` in `run` slots from `slot` on; see [`put`](Self::put).
    #[inline]
    pub fn put_run(self, slot: u32, run: u32, entry: Entry) {
        if run == 1 {
            return self.put(slot, entry); // a page: by far the most frequent
        }
        for slot in &self.0[slot as usize..][..run as usize] {
            // Release, partner: as in `put`.
            slot.store(entry.bits(), Ordering::Release);
        }
    }
    #[inline]
    pub fn is_vacant(self, slot: u32, run: u32) -> bool {
        if run == 1 {
            return self.get(slot).is_empty();
        }
        let mut slots = self.0[slot as usize..][..run as usize].iter();
        slots.all(|slot| Entry::from_bits(slot.load(Ordering::Relaxed)).is_empty())
    }
}

impl NodeState<'_> {
    #[inline]
    pub fn count(&self) -> u32 {
        self.counts().0
    }
    #[inline]
    pub fn counts(&self) -> (u32, u32) {
        let counts = self.word(COUNTS);
        (counts as u32, (counts >> 32) as u32)
    }
    #[inline]
    pub fn account(&self, slots: i32, shadows: i32) {
        let (count, now) = self.counts();
        let (count, shadows) = (count.wrapping_add_signed(slots), now.wrapping_add_signed(shadows));
        debug_assert!(count <= u64::BITS && shadows <= count);
        self.set(COUNTS, u64::from(shadows) << 32 | u64::from(count));
    }
    #[inline]
    pub fn is_shadow_only(&self) -> bool {
        let (count, shadows) = self.counts();
        count > 0 && count == shadows
    }

    /// The node above and the slot there; `None` for the topmost.
    #[inline]
    pub fn parent(&self) -> Option<(u32, u32)> {
        let place = self.word(PLACE);
        (place & HAS_PARENT != 0).then_some((place as u32, (place >> 32) as u32 & 0xff))
    }
    pub fn set_parent(&self, parent: Option<(u32, u32)>) {
        let rest = self.word(PLACE) & (0xff << 40 | LISTED);
        self.set(
            PLACE,
            rest | parent.map_or(0, |(node, slot)| HAS_PARENT | u64::from(slot) << 32 | u64::from(node)),
        );
    }
    /// log2 of the pages that one slot covers.
    pub fn shift(&self) -> u32 {
        (self.word(PLACE) >> 40) as u32 & 0xff
    }
    /// Whether the allocator was told that this node holds shadows only.
    #[inline]
    pub fn is_listed(&self) -> bool {
        self.word(PLACE) & LISTED != 0
    }
    pub fn flip_listed(&self) {
        self.set(PLACE, self.word(PLACE) ^ LISTED);
    }

    #[inline]
    pub fn marks(&self, mark: Mark) -> u64 {
        self.word(MARKS + mark as usize)
    }
    #[inline]
    pub fn set_marks(&self, mark: Mark, slots: u64) {
        self.set(MARKS + mark as usize, slots);
    }

    #[inline]
    fn word(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Relaxed)
    }
    #[inline]
    fn set(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Relaxed);
    }
}

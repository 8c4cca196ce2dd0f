//! Lookup: from a page index to a hint, without a lock, in any process.
//!
//! This file joins the tree, which knows no arena, to the arena, which knows no
//! tree: a node's number is a cell's number.

use core::sync::atomic::AtomicU32;

use crate::arena::{CellNumber, Grown, Record};
use crate::units::PageIndex;
use crate::xarray::{Entry, RacySlots, load_root, walk_to_leaf};

/// Bits of an index that one level of the cache's trees resolves.
pub const NODE_BITS: u32 = 6;

impl RacySlots for Grown<'_> {
    #[inline]
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]> {
        self.slots(CellNumber(node)).map(|slots| slots.as_slice())
    }
}

/// What stands at `index` in the tree of `record`; a hint, to be held against its descriptor.
#[inline]
pub fn find(grown: &Grown<'_>, record: &Record, index: PageIndex) -> Entry {
    find_with_leaf(grown, record, index).0
}

/// As [`find`], and the 64 slots of the leaf that the walk ended in, if it did, so that neighbours of
/// `index` with the same upper bits can be looked up there.
#[inline]
pub fn find_with_leaf<'a>(
    grown: &'a Grown<'a>,
    record: &Record,
    index: PageIndex,
) -> (Entry, Option<&'a [AtomicU32]>) {
    walk_to_leaf::<Grown<'a>, NODE_BITS>(grown, load_root(&record.root), index.0)
}

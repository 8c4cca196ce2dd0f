//! Lookup: from a page index to a hint, without a lock, in any process.
//!
//! This file joins the tree to the arena, which do not know each other: a node's number is a cell's number.

use core::sync::atomic::AtomicU32;

use crate::arena::{CellNumber, GrownView, Record};
use crate::units::PageIndex;
use crate::xarray::{Entry, Finder, RacySlots, Steps, load_root, walk};

/// Bits of an index that one level of the cache's trees resolves.
pub const NODE_BITS: u32 = 6;

/// A reader of one of the cache's trees.
pub type FolioFinder<'a> = Finder<'a, GrownView<'a>, NODE_BITS>;

impl RacySlots for GrownView<'_> {
    #[inline]
    fn racy_slots(&self, node: u32) -> Option<&[AtomicU32]> {
        self.slots(CellNumber(node)).map(|slots| slots.as_slice())
    }
}

/// The entry at `index` in the tree of `record`; a hint, to be held against its descriptor.
#[inline]
pub fn find(grown: &GrownView<'_>, record: &Record, index: PageIndex) -> Entry {
    walk::<_, NODE_BITS>(grown, load_root(&record.root), index.0)
}

/// A finder in the tree of `record`, for a reader of several folios.
#[inline]
pub fn finder<'a>(grown: &'a GrownView<'a>, record: &'a Record) -> FolioFinder<'a> {
    Finder::new(grown, &record.root)
}

/// As [`find`], to be led level by level.
#[inline]
pub fn seek<'a>(grown: &'a GrownView<'a>, record: &Record, index: PageIndex) -> Steps<'a, NODE_BITS> {
    Steps::new(grown, load_root(&record.root), index.0)
}

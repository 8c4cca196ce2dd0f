//! Index: the tree of one mapping's folios, and the look-ups in it that take no lock.
//!
//! ```text
//!   record (arena)   root of the tree, number, size: what readers in any process look at
//!   here (heap)      the tree lock, spare nodes, the list of nodes that hold shadows only
//! ```
//!
//! A look-up without the lock gives an answer about the past: whatever is found is checked against its descriptor,
//! which carries the mapping's number and the index; [`FolioIndex::try_hold`] makes the answer last.
//!
//! Locks: none to look up; the tree lock to change, held for a batch and never while a thread waits for a device. The
//! arena's lock is taken under it to give a list of frames back, never to take anything.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::arena::{Arena, CellNumber, Descriptor, HoldRefused, NotReady, OwnedRecord, Record, View};
use crate::folio::HeldFolio;
use crate::mapping::{ShadowNodes, find, finder};
use crate::sync::{Rank, RankedMutex};
use crate::units::{Frame, MappingId, Order, PageIndex};
use crate::xarray::{Kind, Root};

use super::hooks::IndexHooks;
use super::nodes::{Nodes, SpareNodes, TreeCounts};

/// The folios of one mapping, by their pages.
#[derive(Debug)]
pub struct FolioIndex {
    id: MappingId,
    cell: CellNumber,
    record: OwnedRecord,
    pub(super) tree: RankedMutex<Tree>,
    /// Spare nodes of the tree; changed under its lock.
    pub(super) stock: SpareNodes,
    shadow_nodes: Arc<ShadowNodes>,
    /// Hooks that replace steps of it; `None` in a cache that ships.
    pub(super) hooks: Option<&'static dyn IndexHooks>,
}

#[derive(Debug)]
pub(super) struct Tree {
    /// Pages of all folios in the tree.
    pub pages: u64,
    /// Whether evictions leave shadows; no longer once the cache has let the mapping go.
    pub remembers: bool,
}

impl FolioIndex {
    /// An index of no folios, whose record no reader knows yet. `None` if the arena has no cell for the record.
    pub(super) fn new(arena: &Arc<Arena>, id: MappingId) -> Option<Self> {
        let cell = arena.alloc_cell()?;
        let index = Self {
            id,
            cell,
            record: arena.owned_record(cell),
            tree: RankedMutex::new(Rank::Tree, Tree { pages: 0, remembers: true }),
            stock: SpareNodes::default(),
            shadow_nodes: Arc::new(ShadowNodes::new(Arc::clone(arena))),
            hooks: None,
        };
        index.record().root.store(Root::EMPTY.bits(), Ordering::Relaxed);
        Some(index)
    }

    pub(super) fn set_shadow_nodes(&mut self, shadow_nodes: &Arc<ShadowNodes>) {
        assert_eq!(self.shadow_nodes.count(), 0, "a mapping changes its list before it has nodes");
        self.shadow_nodes = Arc::clone(shadow_nodes);
    }

    /// The mapping's number.
    #[inline]
    pub fn id(&self) -> MappingId {
        self.id
    }
    /// Where its record is.
    #[inline]
    pub fn cell(&self) -> CellNumber {
        self.cell
    }
    /// The arena its folios are in.
    #[inline]
    pub fn arena(&self) -> &Arena {
        self.record.arena()
    }
    #[inline]
    pub(super) fn record(&self) -> &Record {
        &self.record
    }
    #[inline]
    pub(super) fn view(&self) -> &View {
        self.arena().view()
    }
    /// For the holder of the lock, who takes this after the lock: more frames may be grown later.
    #[inline]
    pub(super) fn nodes(&self) -> Nodes<'_> {
        let grown = self.view().grown();
        Nodes { grown, stock: &self.stock, mapping: self.id, shadow_nodes: &self.shadow_nodes }
    }
    /// The list of nodes that hold shadows only, of this tree and of others.
    pub fn shadow_nodes(&self) -> &ShadowNodes {
        &self.shadow_nodes
    }
    pub(super) fn lookup_pages_max(&self) -> u64 {
        self.hooks.map_or(u64::MAX, |hooks| hooks.lookup_pages_max())
    }
    /// The counts of its tree so far.
    pub fn tree_counts(&self) -> TreeCounts {
        self.stock.counts()
    }
    /// Spare nodes in stock; a hint while other threads insert.
    pub fn spare_nodes(&self) -> u32 {
        self.stock.count()
    }

    /// Takes the marker off the folio at `index`; true if it was there and this call took it.
    pub fn take_marker(&self, index: PageIndex) -> bool {
        let Some(descriptor) = self.find(index) else { return false };
        descriptor.identify(self.id, index).is_ok_and(|stamp| descriptor.take_marker(stamp))
    }

    /// The folio that covers `index`, as its first page and its order, if it drops behind an uncached reader. A hint.
    pub fn find_behind(&self, index: PageIndex) -> Option<(PageIndex, Order)> {
        let stamp = self.find(index)?.identify(self.id, index).ok()?;
        stamp.drops_behind().then(|| (stamp.first, stamp.order()))
    }

    /// The first of `indices` where no folio seems to stand, filled or not: a hint, by looks without a lock.
    pub fn first_missing(&self, mut indices: impl Iterator<Item = PageIndex>) -> Option<PageIndex> {
        let grown = self.view().grown();
        let mut finder = finder(&grown, self.record());
        indices.find(|index| !matches!(finder.find(index.0).entry.kind(), Kind::Folio(_)))
    }

    /// Whether the page at `index` is ready to be read, as far as can be seen without a lock.
    pub fn probe(&self, index: PageIndex) -> Result<(), NotReady> {
        let frame = self.find_frame(index).ok_or(NotReady::Mismatch)?;
        let descriptor = self.view().descriptor(frame).ok_or(NotReady::Mismatch)?;
        match descriptor.begin_read(self.id, index) {
            Err(NotReady::Filling) if self.is_page_read(descriptor, frame, index) => Ok(()),
            Err(NotReady::Written) => Ok(()), // its reader waits for no more than a writer's copy
            probed => probed.map(drop),
        }
    }

    /// A hint, because the caller does not hold the folio.
    fn is_page_read(&self, descriptor: &Descriptor, head: Frame, index: PageIndex) -> bool {
        let page = index.0.wrapping_sub(descriptor.index().0);
        page < u64::from(descriptor.word().order().pages())
            && self.view().is_page_read(head.plus(page as u32))
    }

    /// Holds the folio at `index`, filled or not.
    #[inline]
    pub fn try_hold(&self, index: PageIndex) -> Result<HeldFolio<'_>, HoldRefused> {
        let frame = self.find_frame(index).ok_or(HoldRefused::Mismatch)?;
        HeldFolio::take(self.arena(), frame, self.id, index)
    }
    /// As [`FolioIndex::try_hold`], of a folio that `likely` heads: if it does, it need not be sought.
    pub fn try_hold_at(&self, likely: Frame, index: PageIndex) -> Result<HeldFolio<'_>, HoldRefused> {
        HeldFolio::take(self.arena(), likely, self.id, index).or_else(|_| self.try_hold(index))
    }

    #[inline]
    fn find_frame(&self, index: PageIndex) -> Option<Frame> {
        match find(&self.view().grown(), self.record(), index).kind() {
            Kind::Folio(frame) => Some(Frame(frame)),
            _ => None,
        }
    }

    fn find(&self, index: PageIndex) -> Option<&Descriptor> {
        self.find_frame(index).and_then(|frame| self.view().descriptor(frame))
    }
}

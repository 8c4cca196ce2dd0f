//! Insert: folios into the tree, one or a window of them, under one hold of its lock.
//!
//! ```text
//!   before the lock   1 nodes: as many as the insertion can need, into the mapping's stock     nodes.rs
//!   under it          2 one way down for each run of frames; at each place
//!                        nothing, or shadows: the folio is prepared, then stored
//!                        a folio:             here the prefix ends
//!                        no node:             here it ends too
//!   after it          3 no node? more of them, and on where the prefix ended, from the root
//! ```
//!
//! **Prefix.** Folios before the stop are in the tree; those behind it were not touched. A folio's descriptor is
//! prepared at the one moment when nothing can refuse it any more and no reader can find it yet
//! ([`NodeSlab::placing`]). So the frames that were not inserted are the caller's exactly as they were.
//!
//! **Shortage.** Between two holds of the lock anything may have happened. So nothing is kept across it but two
//! constants, the index to go on at and the frame to go on with: there is no cursor that could be stale.
//!
//! **Shadows** that a folio takes the place of are reported once for each folio, with the value at its highest index,
//! under the lock. An insertion for a [`InsertPurpose::Write`] does not report them: an overwrite is no read again.
//!
//! Invariants:
//!  1. Nothing is allocated from the arena while the tree lock is held, nor waited for.
//!  2. A frame is the mapping's once it is counted in the result, and the caller's otherwise.
//!  3. A folio is locked, not up to date and held by its fill before a reader can find it, and so is its marker.
//!  4. `pages` of the tree grows by exactly the reported pages.
//!
//! Not an invariant: that a window ends up complete, or in one piece. Between
//! the look for gaps and the insertion others may have filled some of them.
//!
//! Cost: a window of n pages costs one hold of the lock, one way down for each run of frames, and about a store for
//! each slot. Kernel cousin: `__filemap_add_folio`. This differs: nodes come before the lock, the batch is a primitive
//! of the tree, and the lock is a value instead of a flag.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::arena::{CellNumber, Flags, referenced};
use crate::backend::FillRun;
use crate::stats::Count;
use crate::sync::LockWait;
use crate::units::{Frame, MappingId, Order, Orders, PageIndex};
use crate::xarray::{Head, Inserted, Kind, NodeSlab, RangeStop, ShadowOnly, Value, XArray};

use super::NODE_BITS;
use super::hooks::{RunInsertion, TreeWalks};
use super::new_folio::{
    AddedFolio, AddedRuns, AskedFor, FolioLifetime, FolioShape, InsertPurpose, NewFolio, RunOutcome,
    ShadowObserver, cut, folios_of,
};
use super::nodes::{Nodes, SPARE_MAX};
use super::owner::{Mapping, MappingGuard};

impl Mapping {
    /// Inserts a folio. One hold of the lock and one way down, or, if nodes run out, one more of each.
    /// Waits for locks as `locks` says; with [`LockWait::Try`] a busy lock counts as [`AddedFolio::NoNode`].
    ///
    /// # Panics
    /// If the order is above 9 or the index or the frame is not aligned to it. Nothing has happened then.
    pub fn add_folio(&self, folio: NewFolio, purpose: InsertPurpose, locks: LockWait) -> AddedFolio {
        self.add_folio_watched(
            folio,
            FolioShape { purpose, ..FolioShape::of(Orders::PAGES) },
            locks,
            &mut || {},
        )
    }

    /// As [`Mapping::add_folio`], with a marker if `shape` has one for it; its orders do not matter. `gap` is
    /// called each time between two holds of the lock, after nodes ran out: for tests of races there.
    pub fn add_folio_watched(
        &self,
        folio: NewFolio,
        shape: FolioShape,
        locks: LockWait,
        gap: &mut dyn FnMut(),
    ) -> AddedFolio {
        folio.assert_fits();
        let pages = folio.order.pages();
        let mut guard = self.lock_to_add(folio.index, u64::from(pages), locks);
        while let Some(mut held) = guard {
            if let Some(hooks) = self.index().hooks {
                hooks.before_folio(&held, folio);
            }
            match held.add_folio(folio, shape) {
                AddedFolio::NoNode => {
                    guard = held.refill(folio.index..folio.index.plus(u64::from(pages)), locks, gap)
                }
                done => return done,
            }
        }
        AddedFolio::NoNode
    }

    /// Inserts the folios of a run: a prefix, up to the first place that is taken. A shortage of nodes in the middle
    /// does not end it: the lock is let go, nodes are taken, and it goes on where the prefix ended.
    /// [`RangeStop::NoNode`] says that there were none to be taken. `None`: the lock is busy and `locks` does not wait.
    /// `consumed` is called for shadows, see [`ShadowObserver`]. The frames behind the prefix are the caller's.
    ///
    /// # Panics
    /// As [`MappingGuard::add_folio_range`].
    pub fn add_folio_range(
        &self,
        run: FillRun,
        shape: FolioShape,
        locks: LockWait,
        consumed: ShadowObserver<'_>,
    ) -> Option<RunOutcome> {
        self.add_folio_range_watched(run, shape, locks, consumed, &mut || {})
    }

    /// As [`Mapping::add_folio_range`]; `gap` as in [`Mapping::add_folio_watched`].
    pub fn add_folio_range_watched(
        &self,
        run: FillRun,
        shape: FolioShape,
        locks: LockWait,
        consumed: ShadowObserver<'_>,
        gap: &mut dyn FnMut(),
    ) -> Option<RunOutcome> {
        let mut guard = Some(self.lock_to_add(run.index, u64::from(run.pages), locks)?);
        let mut insertion = Insertion { shape, locks, consumed, inserted: &mut |_, _| {}, gap };
        Some(self.add_run(&mut guard, run, &mut insertion))
    }

    /// Inserts the runs of a window, in rising order, under one hold of the lock. Where a place is taken, its frames
    /// are left over and the run goes on behind it, by the smallest folio. Frames of a larger folio that cannot go in
    /// are left over, too. `None` as in [`Mapping::add_folio_range`].
    ///
    /// # Panics
    /// As [`MappingGuard::add_folio_range`], for each run.
    pub fn add_window(
        &self,
        runs: &[FillRun],
        shape: FolioShape,
        locks: LockWait,
        consumed: ShadowObserver<'_>,
    ) -> Option<AddedRuns> {
        // Allocated before the lock: under it these grow only if another thread inserted pages since the look for gaps.
        let mut done =
            AddedRuns { inserted: Vec::with_capacity(runs.len()), left: Vec::new(), stop: RangeStop::All };
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return Some(done) };
        let pages = end_of(last).0 - first.index.0;
        let mut guard = Some(self.lock_to_add(first.index, pages, locks)?);
        let (inserted, gap) = (&mut |_: &mut MappingGuard<'_>, _| {}, &mut || {});
        let mut insertion = Insertion { shape, locks, consumed, inserted, gap };
        for &run in runs {
            let mut rest = run;
            while rest.pages > 0 {
                let added = self.add_run(&mut guard, rest, &mut insertion);
                let (inserted, behind) = cut(rest, added.pages);
                done.inserted.extend((inserted.pages > 0).then_some(inserted));
                let taken = match added.stop {
                    RangeStop::All => 0,
                    RangeStop::Present(_) => shape.orders.min.pages().min(behind.pages),
                    RangeStop::NoNode => behind.pages,
                };
                let (left, behind) = cut(behind, taken);
                done.left.extend((left.pages > 0).then_some(left));
                if added.stop != RangeStop::All && done.stop != RangeStop::NoNode {
                    done.stop = added.stop;
                }
                rest = behind;
            }
        }
        Some(done)
    }

    /// The one way in for runs, of ranges, windows and grabs: a prefix, under the lock in `guard`.
    pub(super) fn add_run<'m>(
        &'m self,
        guard: &mut Option<MappingGuard<'m>>,
        run: FillRun,
        insertion: &mut Insertion<'_>,
    ) -> RunOutcome {
        match self.index().hooks {
            None => insertion.add_prefix(guard, run),
            Some(hooks) => hooks.add_run(&mut HookedInsertion { mapping: self, guard, insertion }, run),
        }
    }

    /// Takes the tree lock, with nodes in stock for folios over `pages` pages from `index` on. `None` if the lock is
    /// busy and `locks` does not wait. May wait: for the arena before the lock, if nodes are missing.
    pub fn lock_to_add(&self, index: PageIndex, pages: u64, locks: LockWait) -> Option<MappingGuard<'_>> {
        let (needed, spare) = (self.nodes_needed(index, pages), self.index().stock.count());
        if spare >= needed {
            return self.lock_keeping(locks); // as a rule
        }
        let goal = needed.max(SPARE_MAX.min(2 * needed)); // a few for the next ones
        let nodes = self.take_nodes(goal - spare, locks);
        self.lock_with(nodes, locks)
    }

    #[inline(always)]
    fn lock_keeping(&self, locks: LockWait) -> Option<MappingGuard<'_>> {
        let mut guard = self.lock_as(locks)?;
        guard.keep = self.index().hooks.map_or(SPARE_MAX, |hooks| hooks.nodes_kept_max().min(SPARE_MAX));
        Some(guard)
    }

    /// Takes the lock and puts `nodes` in stock; if the lock cannot be had, they go back.
    fn lock_with(&self, nodes: Vec<CellNumber>, locks: LockWait) -> Option<MappingGuard<'_>> {
        let Some(guard) = self.lock_keeping(locks) else {
            self.arena().free_cells(nodes);
            return None;
        };
        for node in nodes {
            self.index().stock.put(self.view().grown(), node);
        }
        Some(guard)
    }

    /// The most nodes that an insertion can need; a hint, since the tree may change before it is locked.
    fn nodes_needed(&self, index: PageIndex, pages: u64) -> u32 {
        let nodes = self.nodes();
        XArray::<_, NODE_BITS>::new(&nodes, &self.record().root).nodes_needed(index.0, pages)
    }

    /// Takes `wanted` nodes from the arena, or as many as there are. The caller holds no lock.
    fn take_nodes(&self, wanted: u32, locks: LockWait) -> Vec<CellNumber> {
        let wanted = wanted.min(self.index().hooks.map_or(u32::MAX, |hooks| hooks.nodes_taken_max()));
        let mut nodes = Vec::new();
        if wanted > 0 {
            nodes.reserve_exact(wanted as usize); // before the arena's lock
            self.arena().alloc_cells(wanted as usize, &mut nodes, locks);
        }
        nodes
    }

    /// Gives the spare nodes back to the arena, unless the lock is busy and `locks` does not wait. Called when the file
    /// is open no more, and when other mappings have no nodes.
    pub fn give_back_nodes(&self, locks: LockWait) {
        if self.index().stock.count() > 0
            && let Some(mut guard) = self.lock_as(locks)
        {
            guard.keep = 0;
        }
    }
}

impl<'a> MappingGuard<'a> {
    /// Inserts a folio with the nodes there are: one way down, split or not.
    ///
    /// # Panics
    /// As [`Mapping::add_folio`].
    pub fn add_folio(&mut self, folio: NewFolio, shape: FolioShape) -> AddedFolio {
        folio.assert_fits();
        let slab = FolioPlacement::new(self.mapping, shape);
        let mut tree = XArray::<_, NODE_BITS>::new(&slab, &self.mapping.record().root);
        let NewFolio { index, frame, order } = folio;
        let inserted = tree.insert(index.0, order.0, frame.0);
        self.mapping.count(Count::Readahead, slab.ahead.get());
        match inserted {
            Inserted::Done { shadow } => {
                self.tree.pages += u64::from(order.pages());
                AddedFolio::Added { shadow: shadow.filter(|_| shape.purpose == InsertPurpose::Read) }
            }
            Inserted::Present(_) => AddedFolio::Present,
            Inserted::NoNode => AddedFolio::NoNode,
        }
    }

    /// Inserts the folios of a run with the nodes there are: a prefix. See [`Mapping::add_folio_range`], which
    /// also sees to it that there are enough.
    ///
    /// # Panics
    /// If `run` does not start at a multiple of the smallest folio, in index or frame, or is no multiple long.
    pub fn add_folio_range(
        &mut self,
        run: FillRun,
        shape: FolioShape,
        consumed: ShadowObserver<'_>,
    ) -> RunOutcome {
        let smallest = u64::from(shape.orders.min.pages());
        let unaligned = (run.index.0 | u64::from(run.frame.0 | run.pages)) & (smallest - 1);
        assert!(unaligned == 0, "{run:?} is not cut for folios of at least {:?}", shape.orders.min);
        let slab = FolioPlacement::new(self.mapping, shape);
        let mut tree = XArray::<_, NODE_BITS>::new(&slab, &self.mapping.record().root);
        // The folio that the tree is at: it asks for the next when it is done with the last.
        let at = Cell::new(run.frame);
        let folios = folios_of(run, shape.orders).map(|(frame, order)| {
            at.set(frame);
            (order.0, frame.0)
        });
        let mut last: Option<(Frame, Value)> = None;
        let mut report = |shadow: Option<(Frame, Value)>| match shadow {
            Some((frame, value)) if shape.purpose == InsertPurpose::Read => consumed(frame, value),
            _ => {}
        };
        let added = tree.insert_range(run.index.0, folios, |_, value| {
            let before = last.replace((at.get(), value));
            report(before.filter(|(frame, _)| *frame != at.get()));
        });
        report(last);
        self.mapping.count(Count::Readahead, slab.ahead.get());
        self.tree.pages += added.pages;
        RunOutcome { pages: added.pages as u32, stop: added.stop }
    }

    /// Takes nodes for folios over the pages `missing`, without the lock meanwhile. `None` if there are no nodes, or
    /// the lock is busy; the nodes there were have gone back then.
    fn refill(
        self,
        missing: Range<PageIndex>,
        locks: LockWait,
        gap: &mut dyn FnMut(),
    ) -> Option<MappingGuard<'a>> {
        let mapping = self.mapping;
        let carried = mapping.index().stock.cut(mapping.arena(), 0);
        drop(self);
        gap();
        // At least one: the count taken before was too low.
        let needed = mapping.nodes_needed(missing.start, missing.end.0 - missing.start.0);
        let nodes = mapping.take_nodes(needed.saturating_sub(carried.count()).max(1), locks);
        if nodes.is_empty() {
            return None;
        }
        let guard = mapping.lock_with(nodes, locks)?;
        carried.put_into(&mapping.index().stock);
        mapping.index().stock.count_refill();
        Some(guard)
    }
}

/// How runs are inserted, under one hold of the lock or, where nodes run out, several.
pub(super) struct Insertion<'i> {
    pub shape: FolioShape,
    pub locks: LockWait,
    pub consumed: ShadowObserver<'i>,
    /// Called for each part of a run, under the hold in which the part went in.
    pub inserted: InsertObserver<'i>,
    /// Called between two holds of the lock.
    pub gap: &'i mut dyn FnMut(),
}

/// Called under the tree lock.
pub(super) type InsertObserver<'i> = &'i mut dyn FnMut(&mut MappingGuard<'_>, FillRun);

impl Insertion<'_> {
    /// Inserts a prefix of a run, refilling the stock as often as that brings nodes. Without a lock, nothing.
    fn add_prefix(&mut self, guard: &mut Option<MappingGuard<'_>>, run: FillRun) -> RunOutcome {
        let mut done = 0;
        while let Some(mut held) = guard.take() {
            let (_, rest) = cut(run, done);
            let added = held.add_folio_range(rest, self.shape, self.consumed);
            let (went, rest) = cut(rest, added.pages);
            if went.pages > 0 {
                (self.inserted)(&mut held, went);
            }
            done += added.pages;
            if added.stop != RangeStop::NoNode {
                *guard = Some(held);
                return RunOutcome { pages: done, ..added };
            }
            *guard = held.refill(rest.index..end_of(&rest), self.locks, self.gap);
        }
        RunOutcome { pages: done, stop: RangeStop::NoNode }
    }
}

struct HookedInsertion<'s, 'm, 'i> {
    mapping: &'m Mapping,
    guard: &'s mut Option<MappingGuard<'m>>,
    insertion: &'s mut Insertion<'i>,
}

impl RunInsertion for HookedInsertion<'_, '_, '_> {
    fn shape(&self) -> FolioShape {
        self.insertion.shape
    }
    fn tree(&self) -> Option<&dyn TreeWalks> {
        self.guard.as_ref().map(|guard| guard as &dyn TreeWalks)
    }
    fn relock(&mut self, run: FillRun) {
        *self.guard = None; // before it is taken again
        *self.guard = self.mapping.lock_to_add(run.index, u64::from(run.pages), self.insertion.locks);
    }
    fn add_folio(&mut self, folio: NewFolio) -> bool {
        let Some(held) = self.guard else { return false };
        let AddedFolio::Added { shadow } = held.add_folio(folio, self.insertion.shape) else { return false };
        if let Some(shadow) = shadow {
            (self.insertion.consumed)(folio.frame, shadow);
        }
        let NewFolio { index, frame, order } = folio;
        (self.insertion.inserted)(held, FillRun { index, frame, pages: order.pages() });
        true
    }
    fn add_run(&mut self, run: FillRun) -> RunOutcome {
        self.insertion.add_prefix(self.guard, run)
    }
}

impl TreeWalks for MappingGuard<'_> {
    fn has_folio(&self, first: PageIndex, pages: u64) -> bool {
        let nodes = self.mapping.nodes();
        nodes.descended(); // a range is not counted by itself
        let tree = self.xarray(&nodes);
        let mut entries = tree.range(first.0, first.0 + pages - 1);
        entries.any(|(_, entry, _)| matches!(entry.kind(), Kind::Folio(_)))
    }
    fn order_at(&self, index: PageIndex) -> Option<Order> {
        self.xarray(&self.mapping.nodes()).order_at(index.0).map(Order)
    }
}

#[derive(Debug)]
struct FolioPlacement<'a> {
    nodes: Nodes<'a>,
    mapping: MappingId,
    marker: Option<PageIndex>,
    wanted: AskedFor,
    fate: FolioLifetime,
    ahead: Cell<u64>,
}

impl<'a> FolioPlacement<'a> {
    fn new(mapping: &'a Mapping, shape: FolioShape) -> Self {
        let FolioShape { marker, wanted, fate, .. } = shape;
        Self { nodes: mapping.nodes(), mapping: mapping.id(), marker, wanted, fate, ahead: Cell::new(0) }
    }

    #[inline]
    fn set_referenced(&self, frame: Frame, index: PageIndex, order: Order) {
        let byte = match self.fate {
            FolioLifetime::Stays => self.wanted.first_byte(index, order.pages()),
            // Asked for or not: only a use by a reader or writer that is not uncached changes this.
            FolioLifetime::DropsBehind => referenced::AHEAD,
        };
        if byte == referenced::AHEAD && self.fate == FolioLifetime::Stays {
            self.ahead.set(self.ahead.get() + u64::from(order.pages()));
        }
        let referenced = self.nodes.grown.own_referenced(frame);
        referenced.store(byte, Ordering::Relaxed);
    }
}

impl NodeSlab for FolioPlacement<'_> {
    #[inline]
    fn slots(&self, node: u32) -> &[AtomicU32] {
        self.nodes.slots(node)
    }
    #[inline]
    fn head(&self, node: u32) -> &Head {
        self.nodes.head(node)
    }
    fn alloc(&self) -> Option<u32> {
        self.nodes.alloc()
    }
    fn free(&self, node: u32) {
        self.nodes.free(node);
    }
    #[inline]
    fn order(&self, folio: u32) -> u8 {
        self.nodes.order(folio)
    }
    fn shadow_only(&self, node: u32, change: ShadowOnly) {
        self.nodes.shadow_only(node, change);
    }
    #[inline]
    fn descended(&self) {
        self.nodes.descended();
    }
    #[inline]
    fn split(&self) {
        self.nodes.split();
    }
    /// From here on readers may find it; see the table of states in `arena/descriptor.rs`.
    #[inline]
    fn placing(&self, folio: u32, index: u64, order: u8) {
        let (index, order) = (PageIndex(index), Order(order));
        let marked = self.marker.is_some_and(|marker| marker.align_down(order) == index);
        let marker = if marked { Flags::MARKER } else { 0 };
        let behind = if self.fate == FolioLifetime::DropsBehind { Flags::DROPBEHIND } else { 0 };
        self.set_referenced(Frame(folio), index, order);
        let descriptor = self.nodes.grown.own_descriptor(Frame(folio));
        descriptor.prepare_with(self.mapping, index, order, marker | behind);
    }
}

fn end_of(run: &FillRun) -> PageIndex {
    run.index.plus(u64::from(run.pages))
}

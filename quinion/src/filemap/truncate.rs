//! Truncate: a file is cut, extended or punched, and ranges of it are forgotten, while others read it.
//!
//! ```text
//!   truncate to n    1 the write lock alone        no thread writes
//!                    2 the invalidate lock alone   no thread adds folios, or hands fills and flushes to a backend
//!                    3 quiet      fills and flushes of what goes, and of the page with the edge, end
//!                    4 pins       OnPinned: detached, or waited for before anything is changed
//!                    5 edges      a folio that reaches over the edge is split, or gives way to a copy of what is dirty
//!                    6 device     set_size; an error here leaves all as it was
//!                    7 size       n from now on: readers look at it behind their copies
//!                    8 remove     what lies behind
//!                    9 zero       the rest of the last page
//!
//!   punch            1 to 5, then zero the parts of pages at both ends, then the device, then remove the pages between
//!   extend           1 and 2, flushes of the old last page end, then zero the rest of it, then the device, then the
//!                    size
//!   invalidate       1 to 5, then remove; with RemoveFilter::Clean dirty pages stay, and folios are split around it
//! ```
//!
//! The order is for readers, who take no lock. *Cut*: the size is stored before any page is freed or zeroed, so a
//! reader that copied another folio's page or zeros sees the new size after its copy, and returns nothing behind it
//! (T01). *Extend*: zeros before the size (T07). *Punch*: the device before the pages, so that pages that are read
//! anew are zeros.
//!
//! And for the device: nothing is in flight in the range when it is cut, because 3 has waited and 2 lets nothing
//! begin. So no late flush writes to space that was given back or makes the file longer again (T05, T09): write-back
//! holds the invalidate lock shared until the backend has its pages. Nor is the page with the end of the file on the
//! device when that is extended: Linux zeroes the rest of its block then, in the page cache of its own, and so would
//! later write old bytes over those of a direct write that was under way.
//!
//! **Edges.** Pages on the other side of an edge stay in the cache. A folio that is held for a moment is tried
//! again; one that is held longer, or pinned, is detached: its holders keep the bytes, the index gets copies of its
//! dirty pages, and the clean ones are read again on demand. A cache with a smallest folio keeps such folios whole:
//! the part of one behind the edge is zeroed. Spilled folios of a memory file are cut in their slots, or brought
//! back, if a page of one is to be zeroed in part or it is packed.
//!
//! **A memory file** has no device, so 3 waits for nothing: folios between the edges are taken out even while a
//! thread fills them, which keeps them until it is done. A folio that reaches over an edge, and a page that is zeroed
//! in part, are waited for. Allocated folios without bytes are split.
//!
//! Invariants:
//!  1. When a cut returns, no page at or behind the new end is cached, but zeros in the last smallest folio. (T02)
//!  2. Data of the file outside the range is not changed, and no dirty page of it becomes clean. (T06)
//!  3. After an error, of the device or of memory, dirty pages are dirty. Clean pages that may differ are forgotten, or
//!     go at the next look.
//!
//! Not an invariant: that a read of several pages sees a punch whole.
//!
//! Locks: Write, Invalidate, then the locks below. A device is waited for under both: misses wait, hits go on. Cost: a
//! walk over the cached part of the range; two splits at most; the backend's call.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::arena::{Flags, HOLDS_MAX, HoldRefused, ReadableState, WriteRefused};
use crate::backend::{Backend, DeferredWakes, Version, pause};
use crate::error::{Error, Repr};
use crate::folio::HeldFolio;
use crate::mapping::{DetachOutcome, InFlightFolio, Mapping, MemoryEntry, RemoveFilter, SplitOutcome};
use crate::stats::Count;
use crate::sync::{LockWait, RankedWriteGuard};
use crate::units::{Millis, PAGE_SIZE, PageIndex, PoolNumber};

use super::shared::Filemap;
use super::spill_in::SpillIn;

/// Wait for other holders of a folio that reaches over an edge; then the folio is detached.
const HOLDS_WAIT: Duration = Duration::from_millis(20);
const AGAIN: Duration = Duration::from_micros(50);
const PINS_AGAIN: Duration = Duration::from_millis(1);
const RECLAIM_PAGES: u32 = 64;
/// Under locks that readers want: no longer than some 0.1 seconds in all.
const MEMORY_TRIES: u32 = 100;
const MEMORY_AGAIN: Duration = Duration::from_millis(1);

/// How a change by this cache treats bytes that a user has pinned.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum OnPinned {
    /// The pinned bytes stay while they are pinned; new reads find the new bytes.
    #[default]
    Detach,
    /// Waits so long at most for the pins to go, before anything is changed; then the error is
    /// [`Busy`](crate::ErrorKind::Busy). A pin that is made while the change is under way is detached.
    Wait(Duration),
}

/// No other thread writes to the file, adds folios, or hands fills and flushes to its backend.
#[derive(Debug)]
struct ExclusiveAccess<'m> {
    mapping: &'m Arc<Mapping>,
    opening: Option<&'m Arc<dyn Backend>>,
    version: RankedWriteGuard<'m, Version>,
    _write: Option<RankedWriteGuard<'m, ()>>,
    // Last: a waker runs its owner's code, which may take locks, when all here are released.
    _wakes: DeferredWakes,
}

impl<'m> ExclusiveAccess<'m> {
    fn with(mapping: &'m Arc<Mapping>, opening: Option<&'m Arc<dyn Backend>>) -> Self {
        let (wakes, write) = (DeferredWakes::new(), mapping.write_alone());
        Self { mapping, opening, version: mapping.invalidate_alone(), _write: Some(write), _wakes: wakes }
    }

    /// Changes the file; if the version before was this cache's, the new one is. That cannot be told while a look after
    /// flushes is due: what others did since they ended has no times of its own.
    fn change(&mut self, change: impl FnOnce(&dyn Backend) -> std::io::Result<()>) -> std::io::Result<()> {
        let device = match (self.mapping.writeback().writer(), self.opening) {
            (None, Some(opening)) => Arc::clone(opening),
            _ => device_of(self.mapping),
        };
        let probe = self.mapping.begin_revalidation();
        let was_known =
            device.attributes().is_ok_and(|before| self.mapping.is_as_known(*self.version, probe, &before));
        let was_known = was_known && self.mapping.writeback().not_revalidated().is_none();
        change(&*device)?;
        // After it: a sync that began before may not cover it.
        self.mapping.writeback().note_cut();
        let all_ended = self.mapping.writeback().all_ended();
        if was_known && let Ok(after) = device.attributes() {
            *self.version = after.version;
            self.mapping.reset_own_changes(all_ended);
        } else {
            self.mapping.note_unknown_change();
        }
        Ok(())
    }
}

/// One change of a file's range, by the cache itself: a cut, a punch, or a range that is forgotten.
#[derive(Clone, Copy, Debug)]
pub struct Truncation<'c> {
    filemap: &'c Arc<Filemap>,
    mapping: &'c Arc<Mapping>,
    opening: Option<&'c Arc<dyn Backend>>,
}

impl<'c> Truncation<'c> {
    /// A change of a range of `mapping`, not begun yet.
    pub fn of(filemap: &'c Arc<Filemap>, mapping: &'c Arc<Mapping>) -> Self {
        Self { filemap, mapping, opening: None }
    }

    /// A file without a writer is changed by `opening`, which becomes its writer if the open that asks succeeds.
    pub fn by(self, opening: &'c Arc<dyn Backend>) -> Self {
        Self { opening: Some(opening), ..self }
    }

    /// Cuts the file, or extends it with zeros. Waits for the device, for writers, and for requests in flight there.
    ///
    /// # Errors
    /// The backend's, [`ErrorKind::Busy`](crate::ErrorKind::Busy), or no memory for an edge; nothing was changed.
    pub fn cut(self, size: u64, on_pinned: OnPinned) -> Result<(), Error> {
        let failed = |source| Error::from(Repr::SetSize { bytes: size, source });
        let touched = PageIndex(size / PAGE_SIZE as u64)..PageIndex(u64::MAX / PAGE_SIZE as u64);
        SpillIn::of(self.filemap, self.mapping).bring_edges([size])?;
        let mut alone = self.lock_exclusive(touched.clone(), on_pinned)?;
        self.wait_for_flushes_at_end();
        let before = self.mapping.size();
        if size >= before {
            self.zero_behind_end()?;
            alone.change(|device| device.set_size(size)).map_err(failed)?;
            self.mapping.writeback().set_size_on_device(size);
            self.mapping.set_size(size);
            return Ok(());
        }
        // 5: also pages that are to go are kept, until the device has agreed. Memory files have none.
        let edge = self.page_behind(size);
        let unwanted = if self.mapping.is_memory() { edge..touched.end } else { edge..edge };
        self.split(edge, unwanted)?;
        // 6
        alone.change(|device| device.set_size(size)).map_err(failed)?;
        // 7: in one hold of the tree lock, so that no page behind the end is taken for write-back.
        self.mapping.writeback().set_size_on_device(size);
        let behind = PageIndex(size.div_ceil(PAGE_SIZE as u64));
        let mut tree = self.mapping.lock();
        self.mapping.set_size(size);
        // A memory file's pages are always dirty.
        if !self.mapping.is_memory() {
            tree.forget_dirty(behind..touched.end);
        }
        drop(tree);
        // 8
        self.remove(edge..touched.end, RemoveFilter::All);
        // 9: readers do not see it before the file is extended, which zeroes it again.
        let _rest = self.zero(size..edge.first_byte());
        Ok(())
    }

    /// Makes the bytes of `range` zero, and gives their space back where the backend can. The size stays; the part of
    /// the range behind it is ignored. Waits as [`Truncation::cut`].
    ///
    /// # Errors
    /// As there; but some of the range may be zero.
    pub fn punch(self, range: Range<u64>, on_pinned: OnPinned) -> Result<(), Error> {
        let page = PAGE_SIZE as u64;
        let touched = PageIndex(range.start / page)..PageIndex(range.end.div_ceil(page));
        SpillIn::of(self.filemap, self.mapping)
            .bring_edges([range.start, range.end.min(self.mapping.size())])?;
        let mut alone = self.lock_exclusive(touched.clone(), on_pinned)?;
        let range = range.start..range.end.min(self.mapping.size());
        if range.is_empty() {
            return Ok(());
        }
        // 5: whole folios between the edges go, the rest is zeroed. Behind the end of the file is nothing to keep.
        let from = self.page_behind(range.start);
        let end = match range.end == self.mapping.size() {
            true => self.page_behind(range.end),
            false => PageIndex(range.end / page).align_down(self.filemap.supply.folio_orders.min),
        };
        let between = from.min(end)..end.max(from.min(end));
        let edges = if between.is_empty() {
            [range.clone(), range.end..range.end]
        } else {
            // As in a cut, the device may refuse.
            let first = between.start;
            let unwanted = if self.mapping.is_memory() { between.clone() } else { first..first };
            self.split(between.start, unwanted.clone())?;
            self.split(between.end, unwanted)?;
            [range.start..between.start.first_byte(), between.end.first_byte()..range.end]
        };
        let zeroed = edges.into_iter().try_for_each(|edge| self.zero(edge));
        let punched = zeroed.and_then(|()| {
            let lengthened =
                if range.end == self.mapping.size() { self.reach_end(&mut alone) } else { Ok(()) };
            let punched = lengthened.and_then(|()| alone.change(|device| device.punch(range.clone())));
            let (position, len) = (range.start, range.end - range.start);
            punched.map_err(|source| Repr::Punch { position, len, source }.into())
        });
        if let Err(error) = punched {
            // A memory file's pages are never clean.
            if !self.mapping.is_memory() {
                self.forget_clean(touched);
            }
            return Err(error);
        }
        self.remove(between, RemoveFilter::All);
        Ok(())
    }

    /// Forgets the cached pages that lie wholly in the bytes of `range`, the file's last one counting as
    /// whole; returns how many went. With [`RemoveFilter::Clean`] dirty pages stay, and folios are split around them;
    /// with [`RemoveFilter::All`] they are lost. Waits for writers, and for requests in flight.
    ///
    /// # Errors
    /// There is no memory for the copy of the part of a held folio that stays; or the file could not be made longer,
    /// which was left to the flush of pages that go.
    pub fn invalidate(self, range: Range<u64>, what: RemoveFilter) -> Result<u64, Error> {
        let (from, size) = (self.page_behind(range.start), self.mapping.size());
        let end = match range.end >= size {
            true => self.page_behind(size),
            false => PageIndex::of_byte(range.end).align_down(self.filemap.supply.folio_orders.min),
        };
        if from >= end {
            return Ok(0);
        }
        let mut alone = self.lock_exclusive(from..end, OnPinned::Detach)?;
        let unwanted = if what == RemoveFilter::All { from..end } else { from..from };
        self.split(from, unwanted.clone())?;
        self.split(end, unwanted)?;
        match what {
            RemoveFilter::All => {
                let failed = |source| Repr::SetSize { bytes: self.mapping.size(), source };
                self.reach_end(&mut alone).map_err(failed)?;
                Ok(self.remove(from..end, what))
            }
            RemoveFilter::Clean => self.remove_clean(from..end),
        }
    }

    /// Before a write extends the file: zeroes the rest of its last page. The caller has the write lock alone.
    ///
    /// # Errors
    /// There is no memory for the copy of that page, which is pinned.
    pub fn zero_behind_end(self) -> Result<(), Error> {
        let size = self.mapping.size();
        self.zero(size..self.page_behind(size).first_byte())
    }

    /// Makes the file on the device as long as it is, if that was left to the flush of pages that go now.
    fn reach_end(self, alone: &mut ExclusiveAccess<'_>) -> std::io::Result<()> {
        let size = self.mapping.size();
        if self.mapping.writeback().size_on_device() < size {
            self.wait_for_flushes_at_end();
            alone.change(|device| device.set_size(size))?;
            self.mapping.writeback().set_size_on_device(size);
        }
        Ok(())
    }

    /// Before the file on the device may be extended, which a cut does, too, if what it leaves was not written yet:
    /// waits for flushes of the page in which the file ends there, and of those behind. None begins meanwhile.
    fn wait_for_flushes_at_end(self) {
        let size = self.mapping.size();
        let end = self.mapping.writeback().size_on_device().min(size);
        let pages = PageIndex(end / PAGE_SIZE as u64)..PageIndex(size.div_ceil(PAGE_SIZE as u64));
        self.filemap.supply.writeback.wait_for(self.mapping, pages);
    }

    /// The first page from byte `at` on that begins a smallest folio.
    fn page_behind(self, at: u64) -> PageIndex {
        PageIndex(at.div_ceil(PAGE_SIZE as u64)).align_up(self.filemap.supply.folio_orders.min)
    }

    // ---- steps 1 to 4 -----------------------------------------------------------------------------

    /// Alone with a file of which `pages` are to be changed, with nothing in flight there.
    fn lock_exclusive(
        self,
        pages: Range<PageIndex>,
        on_pinned: OnPinned,
    ) -> Result<ExclusiveAccess<'c>, Error> {
        let begun = Instant::now();
        loop {
            let alone = ExclusiveAccess::with(self.mapping, self.opening);
            if !self.mapping.is_memory() {
                self.wait_for_in_flight(pages.clone());
            }
            let OnPinned::Wait(most) = on_pinned else { return Ok(alone) };
            let Some(pinned) = self.mapping.first_pinned(pages.clone()) else { return Ok(alone) };
            drop(alone); // others go on during the wait
            if begun.elapsed() >= most {
                return Err(Repr::Pinned { position: pinned.first_byte() }.into());
            }
            pause(PINS_AGAIN);
        }
    }

    /// Waits until no fill and no flush of these pages is in flight. None begins meanwhile.
    fn wait_for_in_flight(self, pages: Range<PageIndex>) {
        let mut from = pages.start;
        while from < pages.end {
            match self.mapping.find_in_flight(from..pages.end) {
                InFlightFolio::None(next) => from = next,
                InFlightFolio::Folio(held) => self.wait_for_folio(&held),
            }
        }
        // Pages that left the index while they were being written.
        self.filemap
            .wait_queue
            .wait(&*flushed_by(self.mapping), &mut || self.mapping.writeback().detached_pages() == 0);
    }

    fn wait_for_folio(self, held: &HeldFolio<'_>) {
        let word = || self.filemap.arena.view().own(held.frame()).word();
        self.filemap.wait_queue.wait(&*self.mapping.backend(), &mut || !word().has(Flags::LOCKED));
        self.filemap.wait_queue.wait(&*flushed_by(self.mapping), &mut || !word().has(Flags::WRITEBACK));
    }

    // ---- step 5 ---------------------------------------------------------------------------------

    /// No folio reaches over `edge` when this returns. Pages in `unwanted` need not be kept.
    fn split(self, edge: PageIndex, unwanted: Range<PageIndex>) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            match self.mapping.split_at(edge) {
                SplitOutcome::Done => return Ok(()),
                SplitOutcome::Packed => SpillIn::of(self.filemap, self.mapping).bring_alone(edge)?,
                SplitOutcome::NoNode if self.filemap.supply.make_nodes(PoolNumber::DEFAULT) => {}
                SplitOutcome::NoNode => return Err(self.filemap.no_memory(edge.first_byte())),
                SplitOutcome::Busy if begun.elapsed() < HOLDS_WAIT && !is_pinned(self.mapping, edge) => {
                    pause(AGAIN);
                }
                SplitOutcome::Busy => self.yield_to_pins(edge, unwanted.clone())?,
            }
        }
    }

    /// Copies dirty pages that are not in `unwanted`.
    fn yield_to_pins(self, index: PageIndex, unwanted: Range<PageIndex>) -> Result<(), Error> {
        match self.mapping.try_hold(index) {
            Ok(held) => self.detach(&held, unwanted),
            Err(HoldRefused::TooMany) => Err(Repr::TooManyPins { holds: HOLDS_MAX }.into()),
            Err(HoldRefused::Mismatch | HoldRefused::Filling) => Ok(()),
        }
    }

    /// The held folio's bytes are to change, and it is pinned: copies of its dirty pages take its place, and its
    /// clean ones are read again on demand. The caller has the write lock alone.
    ///
    /// # Errors
    /// There is no memory for the copies.
    pub(super) fn detach_copy(self, held: &HeldFolio<'_>) -> Result<(), Error> {
        self.detach(held, held.first()..held.first())
    }

    fn detach(self, held: &HeldFolio<'_>, unwanted: Range<PageIndex>) -> Result<(), Error> {
        // In a memory file every page is copied: into one folio, if that can be had.
        let smallest = self.filemap.supply.folio_orders.min;
        let stays_whole = self.mapping.is_memory() && unwanted.is_empty();
        let mut unit = if stays_whole { held.order().max(smallest) } else { smallest };
        for _ in 0..MEMORY_TRIES {
            match self.mapping.detach_copy(held, unwanted.clone(), unit) {
                DetachOutcome::Done { pages } => {
                    self.filemap.counters.add(Count::Invalidated, u64::from(held.order().pages()));
                    self.filemap.counters.add(Count::Inserted, u64::from(pages));
                    // Pages that write-back has cleaned since they were copied are dirty again, in a file that it may
                    // have taken for clean.
                    if pages > 0 && !self.mapping.is_memory() {
                        self.filemap.supply.writeback.note_dirty(self.mapping);
                    }
                    return Ok(());
                }
                DetachOutcome::Removed => return Ok(()),
                DetachOutcome::InFlight => self.wait_for_folio(held),
                DetachOutcome::NoMemory if unit > smallest => unit = smallest,
                DetachOutcome::NoMemory => {
                    self.filemap.supply.make_nodes(PoolNumber::DEFAULT);
                    let reclaim = &self.filemap.supply.reclaim;
                    if reclaim.reclaim_for(PoolNumber::DEFAULT, RECLAIM_PAGES, LockWait::Wait) == 0 {
                        pause(MEMORY_AGAIN); // others' fills may have it
                    }
                }
                DetachOutcome::NoPlace => break,
            }
        }
        Err(self.filemap.no_memory(held.first().first_byte()))
    }

    // ---- steps 8 and 9 ------------------------------------------------------------------------------

    fn remove(self, pages: Range<PageIndex>, what: RemoveFilter) -> u64 {
        let gone = self.mapping.remove_range(pages, what);
        self.filemap.counters.add(Count::Invalidated, gone);
        gone
    }

    /// Takes out the clean ones of `pages`. Folios with dirty pages are split, as far as there may be smaller ones.
    fn remove_clean(self, pages: Range<PageIndex>) -> Result<u64, Error> {
        let mut at = pages.start;
        while let Some(edge) = { self.mapping.lock().next_mixed(at..pages.end) } {
            self.split(edge.align_down(self.filemap.supply.folio_orders.min), at..at)?;
            at = edge.max(at.plus(1));
        }
        Ok(self.remove(pages, RemoveFilter::Clean))
    }

    /// A punch failed half-way: the file may differ from clean cached pages. Those that cannot be forgotten, because
    /// their smallest folio is dirty in part or there is no memory to split a larger one, go at the next look at the
    /// file.
    fn forget_clean(self, pages: Range<PageIndex>) {
        let (from, end) = (
            pages.start.align_down(self.filemap.supply.folio_orders.min),
            pages.end.align_up(self.filemap.supply.folio_orders.min),
        );
        let split = self.split(from, from..from).and_then(|()| self.split(end, from..from));
        let forgotten = split.and_then(|()| self.remove_clean(from..end));
        if forgotten.is_err() || self.mapping.keeps_clean() {
            self.mapping.note_unknown_change();
        }
    }

    /// Zeroes in place, page by page. A pinned folio is replaced by a copy.
    fn zero(self, range: Range<u64>) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let index = PageIndex::of_byte(at);
            let page_end = index.plus(1).first_byte().min(range.end);
            let held = match self.mapping.try_hold(index) {
                Ok(held) => held,
                Err(HoldRefused::TooMany) => return Err(Repr::TooManyPins { holds: HOLDS_MAX }.into()),
                // It may be on its way to the spill file or back: the lock tells.
                Err(_) if self.mapping.backing().spill().is_some() => {
                    let found = self.mapping.lock().at(index, index.plus(1));
                    match found {
                        MemoryEntry::Spilled { .. } => {
                            SpillIn::of(self.filemap, self.mapping).bring_alone(index)?;
                        }
                        MemoryEntry::Folio => {}
                        MemoryEntry::Hole { .. } => at = page_end,
                    }
                    continue;
                }
                Err(_) => {
                    at = page_end; // not cached, and nothing comes in meanwhile that is not zero there
                    continue;
                }
            };
            match zero_page(&held, at, (page_end - at) as usize) {
                Ok(()) => {
                    // A folio on its way to the spill file must be marked, or other bytes come back.
                    if self.mapping.is_memory() {
                        self.mapping.lock().mark_dirty(&held, index..index.plus(1), Millis(0));
                    }
                    at = page_end;
                }
                Err(WriteRefused::Left) => {}
                // Allocated, not being written: it is zeros.
                Err(WriteRefused::Filling) if held.is_readable() == ReadableState::Zeros => at = page_end,
                Err(WriteRefused::Filling) => {
                    let filled = || held.is_readable() != ReadableState::NotYet;
                    self.filemap.wait_queue.wait(&*self.mapping.backend(), &mut || filled());
                }
                Err(WriteRefused::Pinned) => {
                    drop(held);
                    self.yield_to_pins(index, index..index)?;
                }
            }
        }
        Ok(())
    }
}

fn zero_page(held: &HeldFolio<'_>, position: u64, len: usize) -> Result<(), WriteRefused> {
    match held.writer()?.zero(position, len).refused {
        None => Ok(()),
        Some(refused) => Err(refused),
    }
}

fn is_pinned(mapping: &Mapping, index: PageIndex) -> bool {
    mapping.try_hold(index).is_ok_and(|held| held.is_pinned())
}

fn flushed_by(mapping: &Mapping) -> Arc<dyn Backend> {
    mapping.backing().spill().map_or_else(|| device_of(mapping), |spill| Arc::clone(spill.backend()))
}

fn device_of(mapping: &Mapping) -> Arc<dyn Backend> {
    mapping.writeback().writer().map_or_else(|| mapping.backend(), Arc::clone)
}

//! Fill: pages into the cache, from the window to the completed folio.
//!
//! ```text
//!   window    [..... . . 5 6 7 8 . . . . . .)         whole folios, as far as the file goes
//!   gaps       [---)         [---------)               what of it is not cached
//!   charge     the reader's pool, for all of them; at its limit: it evicts of its own, then fewer; what is not
//!              inserted in the end is refunded
//!   frames     all of them in one hold of the arena's lock;  none or too few: reclaim, once more;
//!                                                            then as many as memory allows
//!   runs       [---)         [----)[---)               where gaps end and frames break off
//!   insert     locked folios, all runs in one hold of the tree's lock; places in the rings are reserved before
//!   list       each in the ring that the policy says
//!   submit     one Fill each, several windows' in one call; a single small one, of which the reader waits for a
//!              page, is read by its reader's own system call, with no lock held
//! ```
//!
//! A window becomes gaps, gaps become runs of consecutive frames (`frame_supply.rs`), runs become locked folios in
//! the tree and one [`Fill`] each. Fewer frames than pages is not an error: a window is a request. A random read,
//! which misses one page, takes the same steps with a value where others have a list (`insert_folio`), as long as
//! nothing is short: that saves 2,400 instructions of 8,600.
//!
//! **Budget** of such a miss in a full cache, in instructions beside the bytes, by callgrind (`miss of 64 B,
//! evicting` of `cargo xtask test instructions`). Each page of its file is the only one cached of its leaf, so seven
//! misses of ten take a node of the tree and give one back.
//!
//! | step | instructions |
//! |---|---|
//! | the look without a lock, the call and its counters, the bytes copied out | 760 |
//! | readahead decides that the page is read alone, and whether it has come | 770 |
//! | victims found, a 64th of a batch | 420 |
//! | victims evicted, a 64th of a batch: sorted, located, retired, a shadow for each, frames given back | 760 |
//! | charge, place in the rings, frame, invalidation held off | 520 |
//! | into the tree: nodes and lock 170, the way down 450, the rest 310 | 930 |
//! | nodes that only remember are forgotten, a 64th of a batch | 170 |
//! | listed | 400 |
//! | the fill is made 190, made on the reader's thread and ended 630, waited for and let go 530 | 1,350 |
//!
//! It allocates nothing but lists that several misses share, of victims and of nodes: the memory of a window is that of
//! the thread's last one, which saves 150.
//!
//! Where the cache has a smallest folio, windows, gaps and runs start and end at multiples of it; the last folio may
//! reach over the end of the file, and its rest is zeros.
//!
//! The end of a fill comes by [`FillSink`], on whatever thread reaped it. Pages are announced as they arrive, so a
//! thread that waits for one reads it while the rest of its folio is on its way. Folios that the device did not
//! deliver whole leave the tree before they are unlocked, so a failed page is absent, never empty.
//!
//! A failed page takes with it its folio, and no other folio of its request. Keeping the folio with a hole would add
//! a state for eviction, batches, pins and viewers; its good pages are read again on demand.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{FillEnd, Gap, PutOutcome, View};
use crate::backend::{Backend, DeferredWakes, Fill, FillRun, FillSink, PageKey, Version};
use crate::lists::ListReservation;
use crate::mapping::{
    AddedFolio, AddedRuns, AskedFor, FolioLifetime, FolioShape, InsertPurpose, Mapping, MappingGuard,
    NewFolio, cut,
};
use crate::policy;
use crate::readahead::Window;
use crate::stats::Count;
use crate::sync::{LockWait, RankedReadGuard};
use crate::units::{Frame, Order, Orders, PAGE_SIZE, PageIndex, PoolNumber};
use crate::xarray::RangeStop;

use super::frame_supply::{
    AnnouncedWindow, FillUrgency, FrameRequest, FrameSupply, NoFrames, SuppliedFrames, UncachedReservation,
};
use super::shared::Filemap;
use super::uncached::DropBehindState;
use super::wait_policy::WaitPolicy;

/// Gaps for which there is room: more are rare, and take their list anew under the tree's lock.
const GAPS_USUAL: usize = 16;

impl From<NoFrames> for FillOutcome {
    fn from(refused: NoFrames) -> Self {
        match refused {
            NoFrames::NoMemory => Self::NoMemory,
            NoFrames::PoolFull => Self::PoolFull,
            NoFrames::Present => Self::Nothing,
            NoFrames::Busy => Self::Busy,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AfterSubmit {
    /// The caller waits for this page, and reaps, if one of its own submissions fetches that page: it cannot arrive
    /// before that. A page that another thread fetches may arrive before.
    Reap(PageIndex),
    Anything,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Refaults {
    /// Pages of folios that found a shadow.
    pub pages: u64,
    /// Pages among these that came back soon.
    pub soon: u64,
    /// Pages among these that had not been away for long.
    pub activated: u64,
    /// Folios among these that had been in the working set when they were evicted.
    pub working_set: u32,
}

#[derive(Clone, Debug)]
pub(super) struct FillRequest {
    pub window: Window,
    /// Pages that a reader asked for; the rest of the window is readahead's.
    pub wanted: Range<PageIndex>,
    pub urgency: FillUrgency,
    pub wait_policy: WaitPolicy,
}

impl FillRequest {
    /// Whether a folio of order `unit` at `first` has a page that was asked for.
    fn asks_for(&self, first: PageIndex, unit: Order) -> bool {
        self.wanted.start < first.plus(u64::from(unit.pages())) && first < self.wanted.end
    }

    /// Cuts `gaps` down to the part from the folio of the first missing page that was asked for; to nothing, if none of
    /// these is missing.
    fn begin_with_asked(&self, gaps: &mut Vec<Gap>, unit: Order) {
        debug_assert!(!self.wanted.is_empty(), "memory is waited for, for no page");
        let from = self.wanted.start.align_down(unit);
        gaps.retain(|gap| gap.first.plus(u64::from(gap.pages)) > self.wanted.start);
        match gaps.first_mut() {
            Some(gap) if gap.first < self.wanted.end => {
                let ahead = from.0.saturating_sub(gap.first.0) as u32;
                *gap = Gap { first: gap.first.plus(u64::from(ahead)), pages: gap.pages - ahead };
            }
            _ => gaps.clear(),
        }
    }
}

#[derive(Debug)]
pub(crate) enum FillOutcome {
    /// A part of the window is on its way, beginning with the first page that was not there.
    Submitted(Arc<WindowFills>),
    /// Every page of it is there, or another thread fetches it.
    Nothing,
    NoMemory,
    PoolFull,
    /// A lock was held or the device's queue full, and the caller does not wait.
    Busy,
}

/// Fills of one file that go to the device together. Invalidation is held off from the first insertion until then.
/// Fills that never go end with an error.
#[derive(Debug)]
pub(super) struct SubmitBatch<'m> {
    filemap: &'m Arc<Filemap>,
    mapping: &'m Arc<Mapping>,
    pool: PoolNumber,
    /// Where what they make is noted, if it is dropped behind their reader.
    behind: Option<&'m DropBehindState>,
    fills: PendingFills,
    held_off: Option<RankedReadGuard<'m, Version>>,
}

/// Fills in the order in which they were added. A single one, as a random miss has, takes no allocation.
#[derive(Debug, Default)]
struct PendingFills {
    first: Option<Fill>,
    /// Empty without a first.
    more: Vec<Fill>,
}

impl PendingFills {
    fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.more.len()
    }

    fn iter(&self) -> impl Iterator<Item = &Fill> {
        self.first.iter().chain(&self.more)
    }

    fn single(&self) -> Option<&Fill> {
        self.first.as_ref().filter(|_| self.more.is_empty())
    }

    fn reserve(&mut self, fills: usize) {
        if fills > 1 {
            self.more.reserve(fills);
        }
    }

    fn push(&mut self, fill: Fill) {
        match self.first {
            None => self.first = Some(fill),
            Some(_) => self.more.push(fill),
        }
    }

    /// Ends the fills that begin at byte `end` of the file or behind it, as of a file that has no bytes there.
    fn complete_from(&mut self, end: u64) {
        if self.iter().all(|fill| fill.position() < end) {
            return; // nearly always
        }
        for fill in std::mem::take(self).into_vec() {
            if fill.position() < end { self.push(fill) } else { fill.complete(Ok(0)) }
        }
    }

    fn into_vec(self) -> Vec<Fill> {
        let Self { first, mut more } = self;
        match first {
            Some(first) if more.is_empty() => vec![first],
            Some(first) => {
                more.insert(0, first);
                more
            }
            None => more,
        }
    }
}

impl<'m> SubmitBatch<'m> {
    /// No fills yet. With `behind`: of an uncached read.
    pub fn of(
        filemap: &'m Arc<Filemap>,
        mapping: &'m Arc<Mapping>,
        pool: PoolNumber,
        behind: Option<&'m DropBehindState>,
    ) -> Self {
        Self { filemap, mapping, pool, behind, fills: PendingFills::default(), held_off: None }
    }

    pub fn fate(&self) -> FolioLifetime {
        if self.behind.is_some() { FolioLifetime::DropsBehind } else { FolioLifetime::Stays }
    }

    fn shape(&self, window: Window, wanted: &Range<PageIndex>, orders: Orders) -> FolioShape {
        let wanted = AskedFor::Only { from: wanted.start, end: wanted.end };
        let (marker, purpose, fate) = (window.marker, InsertPurpose::Read, self.fate());
        FolioShape { orders, marker, purpose, wanted, fate }
    }

    fn note_made(&self, runs: &[FillRun]) {
        if let (Some(behind), Some(first), Some(last)) = (self.behind, runs.first(), runs.last()) {
            behind.note_made(first.index..last.index.plus(u64::from(last.pages)));
        }
    }

    pub fn mapping(&self) -> &'m Arc<Mapping> {
        self.mapping
    }

    /// Holds invalidation off; `None` if the caller would have to wait, and does not.
    fn hold_off(&mut self, wait_policy: WaitPolicy) -> Option<()> {
        if self.held_off.is_none() {
            self.held_off = match wait_policy.locks() {
                LockWait::Wait => Some(self.mapping.hold_off_invalidation()),
                LockWait::Try => self.mapping.try_hold_off_invalidation(),
            };
        }
        self.held_off.as_ref().map(|_| ())
    }

    fn brings(&self, page: PageIndex) -> bool {
        let covers = |run: FillRun| run.index <= page && page < run.index.plus(u64::from(run.pages));
        self.fills.iter().any(|fill| covers(fill.run()))
    }

    /// Gives them to the device, in one call. Waits for none; but a single small one, of which the caller waits for a
    /// page next, may be filled here.
    pub fn submit(mut self, next: AfterSubmit) -> Arc<dyn Backend> {
        // A backend may complete inside the call, and a waker runs its owner's code, which may take locks held here.
        let wakes = DeferredWakes::new();
        self.end_behind_device();
        let backend = self.mapping.backend();
        let mut alone = None;
        match next {
            _ if self.fills.is_empty() => {}
            AfterSubmit::Reap(page) if self.brings(page) && self.is_for_reader(&*backend) => {
                alone = self.fills.first.take();
            }
            AfterSubmit::Reap(page) if self.brings(page) => backend.submit_with_reap(self.fills.into_vec()),
            AfterSubmit::Reap(_) | AfterSubmit::Anything => backend.submit(self.fills.into_vec()),
        }
        // In flight from here on: a folio that invalidation takes out is filled for its holders.
        drop(self.held_off);
        if let Some(fill) = alone {
            backend.fill_here(fill);
        }
        drop(wakes);
        backend
    }

    /// Whether there is one fill, which the backend had better make on the thread of its reader.
    fn is_for_reader(&self, backend: &dyn Backend) -> bool {
        self.fills.single().is_some_and(|fill| backend.fills_here(fill.len()))
    }

    /// Ends fills that begin behind the stored end of the file: uncached pages there are zeros. The end is looked
    /// at when the folios are in the tree: a flush of such a page has raised it before the page could leave the tree.
    fn end_behind_device(&mut self) {
        if self.mapping.writeback().writer().is_some() {
            let end = self.mapping.writeback().size_on_device();
            self.fills.complete_from(end);
        }
    }
}

/// Inserts the missing pages of windows.
impl SubmitBatch<'_> {
    /// Inserts the gaps of the window; they go to the device with the rest of the batch. May wait for locks
    /// with [`WaitPolicy::Wait`], and for memory with [`FillUrgency::Asked`], which is not for callers that have
    /// others' fills in the batch already; never for the window's own bytes.
    pub(super) fn insert_window(&mut self, request: &FillRequest) -> FillOutcome {
        debug_assert!(
            request.urgency != FillUrgency::Asked || self.fills.is_empty(),
            "memory is not waited for with fills in hand"
        );
        let window = self.filemap.supply.whole_folios(request.window, self.mapping.size_pages());
        if window.pages == self.filemap.supply.folio_orders.min.pages()
            && window.stream.is_none()
            && let Some(filled) = self.insert_folio(request, window)
        {
            return filled;
        }
        self.insert_missing(request, window).unwrap_or_else(|refused| refused)
    }

    fn insert_missing(&mut self, request: &FillRequest, window: Window) -> Result<FillOutcome, FillOutcome> {
        let FillRequest { urgency, wait_policy, .. } = *request;
        let fate = self.fate();
        let Self { filemap, mapping, pool, .. } = *self;
        // 1 The gaps. Memory is waited for only for the pages that were asked for: they may have come meanwhile, and
        // their folio may begin before them.
        let (mut gaps, unit) = (self.gaps(window, wait_policy)?, filemap.supply.smallest_of(window));
        if urgency == FillUrgency::Asked {
            request.begin_with_asked(&mut gaps, unit);
        }
        let Some(first) = gaps.first() else { return Err(FillOutcome::Nothing) };
        // 2 A charge for it, and frames.
        let is_asked = request.asks_for(first.first, unit);
        let announced = (fate == FolioLifetime::DropsBehind)
            .then(|| UncachedReservation::of(&filemap.supply, AnnouncedWindow { gaps: &gaps, is_asked }));
        let (reservation, locks) = (announced.as_ref(), wait_policy.locks());
        let frames = FrameRequest { mapping, pool, window, urgency, reservation, locks };
        let SuppliedFrames { charge, runs } = filemap.supply.take(&frames, gaps)?;
        // 3 Into the tree and the rings, with invalidation held off until it goes to the device.
        if self.hold_off(wait_policy).is_none() {
            filemap.supply.free_runs(&runs);
            return Err(FillOutcome::Busy);
        }
        let Some(list_entries) = filemap.supply.reserve_list_entries(mapping, &runs, wait_policy) else {
            filemap.supply.free_runs(&runs);
            return Err(self.nodes_ran_out(pool, wait_policy));
        };
        let shape = self.shape(window, &request.wanted, filemap.supply.orders_for(window));
        let mut refaults = Refaults::default();
        let Some(added) = self.insert(shape, runs, wait_policy, &mut refaults) else {
            return Err(FillOutcome::Busy);
        };
        let list_entries = list_entries.with_charge(charge).with_returned_soon(refaults.soon);
        filemap.supply.list(&added.inserted, window, shape, list_entries);
        self.note_made(&added.inserted);
        if added.inserted.is_empty() {
            return Err(match added.stop {
                RangeStop::NoNode => self.nodes_ran_out(pool, wait_policy),
                _ => FillOutcome::Nothing,
            });
        }
        // 4 A request for each run.
        Ok(self.begin_fills(&added.inserted, refaults, urgency))
    }

    /// The fast path of [`SubmitBatch::insert_window`] for a window of one folio of the smallest order, as random reads
    /// need. It looks for no gaps: the insertion finds out whether the page is still missing. `None`, with nothing
    /// changed, if a page cannot be had without reclaim, or the caller must not wait. Then the window takes the general
    /// path, which reclaims and looks at the device's queue.
    fn insert_folio(&mut self, request: &FillRequest, window: Window) -> Option<FillOutcome> {
        let FillRequest { urgency, wait_policy, .. } = *request;
        let Self { filemap, mapping, pool, .. } = *self;
        if wait_policy.locks() == LockWait::Try || mapping.backing().places().is_some() {
            return None;
        }
        // 2
        let order = filemap.supply.folio_orders.min;
        let charge = filemap.supply.reclaim.lists().charge(pool, window.pages, order);
        if charge.pages() == 0 {
            return None;
        }
        let frame = filemap.arena.alloc(order)?;
        let run = FillRun { index: window.start, frame, pages: window.pages };
        // 3
        self.hold_off(wait_policy);
        let Some(list_entries) = filemap.supply.reserve_list_entries(mapping, &[run], wait_policy) else {
            filemap.arena.free(frame, order);
            return Some(self.nodes_ran_out(pool, wait_policy));
        };
        let shape = self.shape(window, &request.wanted, Orders { min: order, max: order });
        let folio = NewFolio { index: run.index, frame, order };
        let added = match run.index.0 < mapping.size_pages() {
            true => mapping.add_folio_watched(folio, shape, LockWait::Wait, &mut || {}),
            false => AddedFolio::Present, // the file has become shorter: nothing is missing there
        };
        let mut refaults = Refaults::default();
        match added {
            AddedFolio::Added { shadow: Some(shadow) } if shape.fate == FolioLifetime::Stays => {
                filemap.note_refault(pool, frame, shadow, &mut refaults);
            }
            AddedFolio::Added { .. } => {}
            AddedFolio::Present => {
                filemap.arena.free(frame, order);
                return Some(FillOutcome::Nothing);
            }
            AddedFolio::NoNode => {
                filemap.arena.free(frame, order);
                return Some(self.nodes_ran_out(pool, wait_policy));
            }
        }
        filemap.supply.wake_background_reclaim(window);
        if list_entries.entries() > 0 {
            let came = completion_of(run.index, order, window, shape);
            let list_entries = list_entries.with_charge(charge).with_returned_soon(refaults.soon);
            filemap.supply.reclaim.list([(frame, came)], list_entries);
        }
        self.note_made(&[run]);
        // 4
        Some(self.begin_fills(&[run], refaults, urgency))
    }

    fn begin_fills(&mut self, runs: &[FillRun], refaults: Refaults, urgency: FillUrgency) -> FillOutcome {
        let (pool, pages) = (self.pool, pages_of(runs));
        let (filemap, mapping) = (Arc::clone(self.filemap), Arc::clone(self.mapping));
        let fills = WindowFills::new(FilledWindow { filemap, mapping, pool, first: runs[0], refaults });
        self.filemap.supply.reclaim.count_inserted(pool, pages, refaults.pages);
        self.filemap.counters.add(Count::Inserted, pages);
        if urgency == FillUrgency::Hinted {
            self.filemap.counters.add(Count::WillNeed, pages);
        }
        if refaults.pages > 0 {
            self.filemap.count_refaults(refaults);
        }
        self.add_fills(&fills, runs);
        FillOutcome::Submitted(fills)
    }

    /// The gaps of the window: pages that no folio covers. Never empty.
    fn gaps(&self, window: Window, wait_policy: WaitPolicy) -> Result<Vec<Gap>, FillOutcome> {
        let mut gaps = Vec::with_capacity(GAPS_USUAL); // before the lock
        let guard = self.mapping.lock_as(wait_policy.locks()).ok_or(FillOutcome::Busy)?;
        add_gaps(&mut gaps, &guard, window);
        drop(guard);
        if gaps.is_empty() {
            return Err(FillOutcome::Nothing);
        }
        let requests = self.fills.len() + gaps.len();
        if wait_policy == WaitPolicy::Now && !self.mapping.backend().has_capacity(requests) {
            return Err(FillOutcome::Busy);
        }
        Ok(gaps)
    }

    /// Puts runs into the tree, as far as the file still goes, and frees the rest. `None`: busy.
    fn insert(
        &self,
        shape: FolioShape,
        runs: Vec<FillRun>,
        wait_policy: WaitPolicy,
        refaults: &mut Refaults,
    ) -> Option<AddedRuns> {
        let Self { filemap, mapping, pool, .. } = *self;
        // The file may have become shorter since the window was planned.
        let end = PageIndex(mapping.size_pages()).align_up(filemap.supply.folio_orders.min);
        let (inside, beyond) = cut_at(runs, end);
        filemap.supply.free_runs(&beyond);
        if inside.is_empty() {
            return Some(AddedRuns { inserted: inside, left: beyond, stop: RangeStop::All });
        }
        let consumed = &mut |frame, shadow| match shape.fate {
            FolioLifetime::Stays => filemap.note_refault(pool, frame, shadow, refaults),
            FolioLifetime::DropsBehind => {} // that an uncached read comes back says nothing
        };
        let added = mapping.add_window(&inside, shape, wait_policy.locks(), consumed);
        match &added {
            Some(added) => filemap.supply.free_runs(&added.left),
            None => filemap.supply.free_runs(&inside),
        }
        added
    }

    fn add_fills(&mut self, fills: &Arc<WindowFills>, runs: &[FillRun]) {
        self.filemap.supply.fills_begin(self.pool, runs.len() as u64);
        self.mapping.fills_begin(runs.len() as u64);
        self.fills.reserve(runs.len());
        for &run in runs {
            let bytes = self.filemap.arena.view().bytes(run.frame).expect("a run of ours exists");
            let buffer = NonNull::new(bytes).expect("no frame is at address 0");
            let sink = Arc::clone(fills) as Arc<dyn FillSink>;
            // SAFETY: the run's folios are locked by this thread, with a hold until `fill_completed`, so their frames
            // are this fill's alone; the batch keeps the arena alive.
            self.fills.push(unsafe { Fill::new(run, buffer, sink) });
        }
    }

    fn nodes_ran_out(&self, pool: PoolNumber, wait_policy: WaitPolicy) -> FillOutcome {
        let made = wait_policy == WaitPolicy::Wait && self.filemap.supply.make_nodes(pool);
        if made { FillOutcome::Nothing } else { FillOutcome::NoMemory }
    }
}

impl FrameSupply {
    /// As [`FrameSupply::list`]; a memory file that does not spill is in the ring that reclaim does not scan.
    pub(super) fn list_new(
        &self,
        mapping: &Mapping,
        runs: &[FillRun],
        window: Window,
        shape: FolioShape,
        list_entries: ListReservation<'_>,
    ) {
        if !mapping.backing().is_kept() {
            return self.list(runs, window, shape, list_entries);
        }
        let heads =
            |&run: &FillRun| folios_in(self.arena.view(), run).map(move |(page, _)| run.frame.plus(page));
        self.reclaim.list_kept(runs.iter().flat_map(heads), list_entries);
    }

    /// A folio that was dropped behind another uncached reader meanwhile is not listed.
    pub(super) fn list(
        &self,
        runs: &[FillRun],
        window: Window,
        shape: FolioShape,
        list_entries: ListReservation<'_>,
    ) {
        if list_entries.entries() == 0 {
            return;
        }
        let folios = runs.iter().flat_map(|&run| {
            folios_in(self.arena.view(), run).map(move |(page, order)| {
                let index = run.index.plus(u64::from(page));
                (run.frame.plus(page), completion_of(index, order, window, shape))
            })
        });
        self.reclaim.list(folios, list_entries);
    }

    /// The order of the smallest folios that the window is made of, where its file goes on.
    fn smallest_of(&self, window: Window) -> Order {
        self.folio_orders.min.max(window.order_min.min(self.folio_orders.max))
    }

    /// The window, made of whole folios: its start at a multiple of the smallest and what that adds, its end
    /// and its marker at the next. The smallest is the cache's, or what the window wants at least; but behind the
    /// last of the file's `size_pages` pages only the cache's smallest goes, and no frames are taken for more.
    pub(super) fn whole_folios(&self, window: Window, size_pages: u64) -> Window {
        let min = self.smallest_of(window);
        if min == Order::ZERO {
            let end = window.end().min(PageIndex(size_pages)).max(window.start);
            let marker = window.marker.filter(|marker| *marker < end);
            return Window { pages: (end.0 - window.start.0) as u32, marker, ..window };
        }
        let start = window.start.align_down(min);
        let end_of_file = PageIndex(size_pages).align_up(self.folio_orders.min);
        let end = window.start.plus(u64::from(window.pages)).align_up(min).min(end_of_file).max(start);
        let marker = window.marker.map(|marker| marker.align_up(min)).filter(|marker| *marker < end);
        Window { start, pages: (end.0 - start.0) as u32, marker, ..window }
    }
}

fn completion_of(index: PageIndex, order: Order, window: Window, shape: FolioShape) -> policy::FetchOrigin {
    match () {
        () if shape.fate == FolioLifetime::DropsBehind => policy::FetchOrigin::Uncached,
        () if window.stream.is_some() => policy::FetchOrigin::Stream,
        () if shape.wanted.overlaps(index, order.pages()) => policy::FetchOrigin::Asked,
        () => policy::FetchOrigin::Ahead,
    }
}

pub(super) fn pages_of(runs: &[FillRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.pages)).sum()
}

fn add_gaps(gaps: &mut Vec<Gap>, guard: &MappingGuard<'_>, window: Window) {
    let end = window.start.plus(u64::from(window.pages));
    let mut from = window.start;
    while let Some((first, pages)) = guard.next_gap(from, end) {
        gaps.push(Gap { first, pages: pages as u32 });
        from = first.plus(pages);
    }
}

fn cut_at(runs: Vec<FillRun>, end: PageIndex) -> (Vec<FillRun>, Vec<FillRun>) {
    if runs.last().is_none_or(|run| run.index.plus(u64::from(run.pages)) <= end) {
        return (runs, Vec::new()); // nearly always
    }
    let (mut inside, mut beyond) = (Vec::with_capacity(runs.len()), Vec::new());
    for run in runs {
        let (before, behind) = cut(run, end.0.saturating_sub(run.index.0).min(u64::from(run.pages)) as u32);
        inside.extend((before.pages > 0).then_some(before));
        beyond.extend((behind.pages > 0).then_some(behind));
    }
    (inside, beyond)
}

pub(crate) struct WindowFills {
    /// `None` while its memory waits for the next window, see [`WindowFills::recycle`].
    window: Option<FilledWindow>,
    failures: Mutex<Vec<(FillRun, io::Error)>>,
}

#[derive(Debug)]
struct FilledWindow {
    filemap: Arc<Filemap>,
    mapping: Arc<Mapping>,
    pool: PoolNumber,
    first: FillRun,
    refaults: Refaults,
}

thread_local! {
    /// The memory of this thread's last window: of no window, and without failures.
    static SPARE: Cell<Option<Arc<WindowFills>>> = const { Cell::new(None) };
}

impl WindowFills {
    fn new(window: FilledWindow) -> Arc<Self> {
        if let Some(mut spare) = SPARE.try_with(Cell::take).ok().flatten()
            && let Some(fills) = Arc::get_mut(&mut spare)
        {
            fills.window = Some(window);
            return spare;
        }
        Arc::new(Self { window: Some(window), failures: Mutex::default() })
    }

    /// Keeps the memory for the thread's next window, if the fills have ended and all went well: a random read needs
    /// no allocation then.
    pub(super) fn recycle(mut self: Arc<Self>) {
        if let Some(fills) = Arc::get_mut(&mut self)
            && fills.failures.get_mut().is_ok_and(|failures| failures.is_empty())
        {
            fills.window = None;
            let _ = SPARE.try_with(|spare| spare.set(Some(self))); // a thread that ends keeps nothing
        }
    }

    fn window(&self) -> &FilledWindow {
        self.window.as_ref().expect("fills are of a window as long as there are some")
    }

    /// Where the folio that covers `index` likely begins: right for the first of the window.
    pub(crate) fn likely_frame(&self, index: PageIndex) -> Frame {
        let first = self.window().first;
        let page = index.0.wrapping_sub(first.index.0).min(u64::from(first.pages));
        first.frame.plus(page as u32)
    }

    /// Whether a folio of this window was in the working set not long ago: a wait for it is for want of memory.
    pub(crate) fn refaulted(&self) -> bool {
        self.window().refaults.working_set > 0
    }

    /// The error that kept `index` from being filled. Returned once.
    pub(crate) fn take_failure(&self, index: PageIndex) -> Option<io::Error> {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let covers = |run: &FillRun| index.0.wrapping_sub(run.index.0) < u64::from(run.pages);
        let place = failures.iter().position(|(run, _)| covers(run))?;
        Some(failures.swap_remove(place).1)
    }

    fn settle(&self, run: FillRun, result: io::Result<usize>) -> FillCompletion {
        let FilledWindow { filemap, mapping, .. } = self.window();
        let counters = &filemap.counters;
        let wanted = run.pages as usize * PAGE_SIZE;
        let is_zeros = matches!(result, Ok(0)) && mapping.writeback().writer().is_some();
        let (came, bytes) = match result {
            Ok(bytes) => (FillCompletion::Before(self.reaches(run, bytes.min(wanted))), bytes.min(wanted)),
            Err(error) => {
                let is_stale = error.kind() == io::ErrorKind::StaleNetworkFileHandle; // ESTALE, of any backend
                counters.add(if is_stale { Count::StaleReads } else { Count::DeviceErrors }, 1);
                self.failures.lock().unwrap_or_else(PoisonError::into_inner).push((run, error));
                let read = filemap.arena.view().count_pages_read(run.frame, run.pages);
                (FillCompletion::ReadPages, read as usize * PAGE_SIZE)
            }
        };
        counters.add_all([(Count::DeviceReads, u64::from(!is_zeros)), (Count::DeviceBytes, bytes as u64)]);
        if came != FillCompletion::Before(wanted) {
            let mut guard = mapping.lock();
            // The file ends here: first its size, then the pages. But a fill that was let go meanwhile tells nothing
            // of the file as it is now.
            if let FillCompletion::Before(bytes) = came
                && mapping.writeback().writer().is_none()
                && guard.holds_run(run)
            {
                mapping.shrink_size(run.index.first_byte() + bytes as u64);
            }
            let gone = guard.remove_failed(run, |page, order| self.is_complete(came, run, page, order));
            let why = if came == FillCompletion::ReadPages { Count::Failed } else { Count::Undelivered };
            counters.add(why, gone);
        }
        came
    }

    /// How many bytes of a run are the file's, of which the device had `bytes`; the rest is zeros. A file that is
    /// written here reaches as far as this cache says, also where the device does not know it yet.
    fn reaches(&self, run: FillRun, bytes: usize) -> usize {
        let mapping = &self.window().mapping;
        if mapping.writeback().writer().is_none() {
            return bytes;
        }
        let (inside, wanted) = (mapping.size().saturating_sub(run.index.first_byte()), run.pages as usize);
        bytes.max(inside.min((wanted * PAGE_SIZE) as u64) as usize)
    }

    fn is_complete(&self, came: FillCompletion, run: FillRun, page: u32, order: Order) -> bool {
        match came {
            FillCompletion::Before(end) => (page as usize * PAGE_SIZE) < end,
            FillCompletion::ReadPages => {
                let view = self.window().filemap.arena.view();
                view.run_read(run.frame.plus(page), order.pages()) == order.pages()
            }
        }
    }

    fn folios(&self, run: FillRun) -> impl Iterator<Item = (u32, Order)> {
        folios_in(self.window().filemap.arena.view(), run)
    }
}

/// As (page of the run, order).
pub(super) fn folios_in(view: &View, run: FillRun) -> impl Iterator<Item = (u32, Order)> {
    let mut page = 0;
    std::iter::from_fn(move || {
        let at = page;
        (at < run.pages).then(|| {
            let order = view.own(run.frame.plus(at)).word().order();
            page += order.pages();
            (at, order)
        })
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FillCompletion {
    /// Number of bytes, all that the file has of the run: bytes after them lie behind the file's size.
    Before(usize),
    /// The pages that arrived before something failed.
    ReadPages,
}

impl FillSink for WindowFills {
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>) {
        let &FilledWindow { ref filemap, ref mapping, pool, .. } = self.window();
        let came = self.settle(run, result);
        let (grown, mut page) = (filemap.arena.view().grown(), 0);
        let mut free: Vec<(Frame, Order)> = Vec::new();
        while page < run.pages {
            let frame = run.frame.plus(page);
            let descriptor = grown.descriptor(frame).expect("a fill's folio has its frame");
            let (at, order) = (page, descriptor.word().order());
            page += order.pages();
            let completed = match self.is_complete(came, run, at, order) {
                true => descriptor.complete(),
                false => descriptor.complete_empty(),
            };
            if let FillEnd::Detached(PutOutcome::Last(order)) = completed {
                free.push((frame, order));
            }
        }
        if !free.is_empty() {
            filemap.arena.free_all(&free);
        }
        mapping.fill_ends();
        filemap.supply.fill_ends(pool);
        let first = PageKey { mapping: mapping.id(), page: run.index };
        filemap.wait_queue.wake_filled(first, run.pages);
    }

    fn pages_read(&self, run: FillRun, pages: Range<u32>) {
        let view = self.window().filemap.arena.view();
        for (page, order) in self.folios(run) {
            if page < pages.end && pages.start < page + order.pages() {
                view.own(run.frame.plus(page)).note_pages_read();
            }
        }
        view.set_pages_read(run.frame.plus(pages.start), pages.end - pages.start);
    }

    fn wake_readers(&self, run: FillRun, pages: Range<u32>) {
        let FilledWindow { filemap, mapping, .. } = self.window();
        let first = PageKey { mapping: mapping.id(), page: run.index.plus(u64::from(pages.start)) };
        filemap.wait_queue.wake_filled(first, pages.end - pages.start);
    }
}

impl std::fmt::Debug for WindowFills {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mapping = self.window.as_ref().map(|window| window.mapping.id());
        f.debug_struct("Batch").field("mapping", &mapping).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::arena::{Arena, ArenaOptions};
    use crate::backend::{Attributes, Backend, MemoryFile, WaitQueue};
    use crate::sys::fork::ForkGuard;
    use crate::units::MappingId;

    use super::*;
    use crate::mapping::NewMapping;

    #[derive(Debug)]
    struct ReapBacklog {
        file: MemoryFile,
        left: AtomicUsize,
    }

    impl Backend for ReapBacklog {
        fn name(&self) -> &'static str {
            "leaving"
        }
        fn attributes(&self) -> io::Result<Attributes> {
            self.file.attributes()
        }
        fn submit(&self, fills: Vec<Fill>) {
            self.file.submit(fills);
        }
        fn submit_with_reap(&self, fills: Vec<Fill>) {
            self.left.fetch_add(fills.len(), Ordering::Relaxed);
            self.file.submit(fills);
        }
    }

    fn file_of(backend: Arc<dyn Backend>, smallest: Order) -> (Arc<Filemap>, Arc<Mapping>) {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let wait_queue = Arc::new(WaitQueue::new());
        let orders = Orders { min: smallest, max: Order(9) };
        let filemap = Arc::new(Filemap::new(Arc::clone(&arena), wait_queue, orders));
        let (known, process) = (backend.attributes().unwrap(), ForkGuard::new());
        let (id, attributes) = (MappingId(1), &known);
        let mapping = Mapping::new(NewMapping { arena: &arena, id, backend, attributes, process });
        (filemap, Arc::new(mapping.unwrap()))
    }

    /// A window may begin before the page that is asked for, with the folio of that page, and that page may come while
    /// its reader waits for a lock. A wait for memory then must neither wait for other pages nor fail for the lack
    /// of them.
    #[test]
    fn memory_is_waited_for_only_where_a_page_was_asked_for() {
        for unit in [Order(0), Order(2)] {
            let file = Arc::new(MemoryFile::new(vec![7; 256 * PAGE_SIZE]));
            let (filemap, mapping) = file_of(file, unit);
            let step = u64::from(unit.pages());
            let fetch = |window: Range<u64>, page: u64, urgency| {
                let pages = ((window.end - window.start) * step) as u32;
                let window = Window::exact(PageIndex(window.start * step), pages);
                // The last page of a folio is asked for.
                let wanted = PageIndex((page + 1) * step - 1)..PageIndex((page + 1) * step);
                let mut submit_batch = SubmitBatch::of(&filemap, &mapping, PoolNumber::DEFAULT, None);
                let wait_policy = WaitPolicy::Wait;
                let filled =
                    submit_batch.insert_window(&FillRequest { window, wanted, urgency, wait_policy });
                submit_batch.submit(AfterSubmit::Anything);
                match filled {
                    FillOutcome::Submitted(_) => true,
                    FillOutcome::Nothing => false,
                    refused => panic!("{refused:?}"),
                }
            };
            let cached = || -> Vec<u64> {
                (0..12).filter(|folio| mapping.try_hold(PageIndex(folio * step)).is_ok()).collect()
            };
            assert!(fetch(3..4, 3, FillUrgency::Asked));
            assert!(!fetch(0..8, 3, FillUrgency::Asked), "it is there, and nothing else was asked for");
            assert_eq!(cached(), [3]);
            assert!(fetch(0..8, 6, FillUrgency::Asked));
            assert_eq!(cached(), [3, 6, 7], "what is before it waits for no memory");
            assert!(fetch(0..12, 6, FillUrgency::Ahead), "what does not wait takes all");
            assert_eq!(cached(), Vec::from_iter(0..12));
        }
    }

    /// Page 0 comes by another thread, so the reader, which has left its other fills to its own reap, need not wait,
    /// and does not reap: a thread that waits for these would sleep until another read.
    #[test]
    fn a_fill_is_left_to_a_reap_only_if_the_reap_comes_for_sure() {
        let file = MemoryFile::new(vec![7; 64 * PAGE_SIZE]);
        let leaving = Arc::new(ReapBacklog { file, left: AtomicUsize::new(0) });
        let (filemap, mapping) = file_of(Arc::clone(&leaving) as _, Order::ZERO);
        let fetch = |first: u64, pages: u32, next| {
            let (window, wanted) = (
                Window::exact(PageIndex(first), pages),
                PageIndex(first)..PageIndex(first + u64::from(pages)),
            );
            let before = leaving.left.load(Ordering::Relaxed);
            let mut submit_batch = SubmitBatch::of(&filemap, &mapping, PoolNumber::DEFAULT, None);
            let (urgency, wait_policy) = (FillUrgency::Asked, WaitPolicy::Wait);
            let request = FillRequest { window, wanted, urgency, wait_policy };
            let filled = submit_batch.insert_window(&request);
            submit_batch.submit(next);
            assert!(matches!(filled, FillOutcome::Submitted(_)), "{filled:?}");
            leaving.left.load(Ordering::Relaxed) - before
        };
        let page = PageIndex;
        assert_eq!(fetch(0, 1, AfterSubmit::Anything), 0);
        assert_eq!(fetch(0, 4, AfterSubmit::Reap(page(0))), 0, "page 0 was brought by others");
        assert_eq!(fetch(10, 4, AfterSubmit::Reap(page(12))), 1, "page 12 is among what is submitted");
        assert_eq!(fetch(20, 4, AfterSubmit::Reap(page(24))), 0, "page 24 is not");
    }

    /// The memory of a window is used again only when its fills have ended and none failed, and keeps no file.
    #[test]
    fn the_memory_of_a_window_is_used_again_and_keeps_no_file() {
        let file = Arc::new(MemoryFile::new(vec![7; 64 * PAGE_SIZE]));
        let (filemap, mapping) = file_of(file, Order::ZERO);
        let references = || (Arc::strong_count(&filemap), Arc::strong_count(&mapping));
        let before = references();
        let window = |page: u32| {
            let (filemap, mapping) = (Arc::clone(&filemap), Arc::clone(&mapping));
            let (pool, refaults) = (PoolNumber::DEFAULT, Refaults::default());
            let first = FillRun { index: PageIndex(u64::from(page)), frame: Frame(page), pages: 1 };
            WindowFills::new(FilledWindow { filemap, mapping, pool, first, refaults })
        };
        let first = window(1);
        let memory = Arc::as_ptr(&first);
        first.recycle();
        assert_eq!(references(), before);
        let second = window(2);
        assert_eq!(Arc::as_ptr(&second), memory);
        assert_eq!(second.likely_frame(PageIndex(2)), Frame(2));
        // A fill is under way still: its window is its own.
        let in_flight = Arc::clone(&second);
        second.recycle();
        let third = window(3);
        assert_ne!(Arc::as_ptr(&third), memory);
        assert_eq!(in_flight.likely_frame(PageIndex(2)), Frame(2));
        // A failure that its reader has not taken is not the next window's.
        let run = FillRun { index: PageIndex(3), frame: Frame(3), pages: 1 };
        third.failures.lock().unwrap().push((run, io::Error::other("a bad sector")));
        third.recycle();
        assert!(window(3).take_failure(PageIndex(3)).is_none());
        drop(in_flight);
        assert_eq!(references(), before);
    }
}

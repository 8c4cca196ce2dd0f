//! Spill in: pages of a memory file that went to the spill file, for a caller that wants one of them.
//!
//! ```text
//!   tree     ... F  [s0 ---------- order 5 ----------][s1][s2][s3]  G ...      page 7 of s0 is wanted
//!                       |-- around ------ ahead ----------------|              values without a gap, a batch of them
//!
//!   1 look      the tree lock: which values, as far as they follow each other
//!   2 charge    and frames, as for a read; few frames: fewer pages, the wanted one among them
//!   3 claim     the tree lock: the values still stand there; from now on their slots are this thread's
//!   4 fetch     into frames that no reader sees, and wait; each page is what was written, or it is an error
//!   5 restore   the tree lock: folios in the place of values, up to date, dirty; the slots are free
//!   6 list      in the rings, and let go
//! ```
//!
//! A page on its way is not visible: the value stands until the bytes are there. A thread that meets the value
//! meanwhile comes here, waits for its slots and looks again. A page that cannot be read stays spilled, and only
//! callers that asked for it see the error; after a failed batch the page is tried alone. Of a plain value a part is
//! brought back; a packed folio comes as a whole.
//!
//! A reader that copies bytes needs no frame for that. If there is none, since the spill file is full as well, it reads
//! the slots into memory of the heap, beside all others that read them, and looks at the tree again: if the value still
//! stands there, these are the page's bytes; else it begins anew. The page stays spilled ([`SpillIn::read_through`]).
//! While the spill file takes nothing, such a reader waits for no memory at all ([`SpillIn::without_waiting`]), and a
//! caller that needs a frame is refused at once, unless something is under way that memory may come of.
//!
//! Invariants:
//!  1. No lock of the index is held while memory or the device is waited for. (A thread that cuts the file
//!     has Write and Invalidate alone, as when it waits for a device.)
//!  2. Frames are this call's alone until they are in the tree, and are given back on every other way out.
//!  3. Nothing is put into a range that is being cut or punched, except by the thread that does that.
//!  4. A thread that reads slots waits for the device and for locks from the tree's on: never for a thread that may
//!     wait for slots, nor for its turn of the heap (`spill/heap.rs`), which it has before.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::arena::Gap;
use crate::backend::{FillRun, pause};
use crate::error::{Error, Repr};
use crate::folio::HeldFolio;
use crate::lists::ListReservation;
use crate::mapping::{
    AskedFor, FolioLifetime, FolioShape, InsertPurpose, Mapping, MappingGuard, NewFolio, RestoreOutcome,
};
use crate::readahead::Window;
use crate::spill::{HeapTurn, Spill, SpilledPart};
use crate::stats::Count;
use crate::sync::LockWait;
use crate::units::{Order, Orders, PAGE_SIZE, PageIndex, PoolNumber};
use crate::xarray::Value;

use super::fill::pages_of;
use super::frame_supply::{FillUrgency, FrameRequest, NoFrames, ShortageWait, SuppliedFrames};
use super::shared::Filemap;
use super::wait_policy::WaitPolicy;

const AROUND: Order = Order(4);
const BATCH_PAGES: u64 = 64;
const BATCH_PAGES_MAX: u64 = Order::MAX.pages() as u64;
/// Tries with too few frames for folios that have to come as a whole; a pause before each.
const SHORT_MAX: u32 = 200;
/// Tries with too few frames of a caller that waits for no memory: one for all that is wanted, one for the page alone.
const SHORT_MAX_UNWAITED: u32 = 2;
/// Tries in a row in which nothing was there that memory may come of, until a caller that waits is refused as well.
const REFUSED_MAX: u32 = 3;
/// The most pages of a plain folio that are read through the heap at a time: 256 KiB.
const THROUGH_PAGES_MAX: u64 = 64;
const PAUSE: Duration = Duration::from_millis(1);
const TRIES: u32 = 1000;

/// Whether the caller keeps the file from being cut and punched while pages come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TruncateExclusion {
    /// The caller holds the write lock, or is the thread that cuts.
    ByCaller,
    No,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SpillInExtent {
    Batch,
    Alone,
}

#[derive(Debug)]
struct SpillInPlan {
    values: Vec<(PageIndex, Value)>,
    pages: Range<PageIndex>,
}

impl SpillInPlan {
    fn count(&self) -> u32 {
        (self.pages.end.0 - self.pages.start.0) as u32
    }
    fn bare_values(&self) -> Vec<Value> {
        self.values.iter().map(|(_, value)| *value).collect()
    }
    /// Whether it takes packed folios whole. The caller holds the tree's lock, and the values stand: since they were
    /// planned, one may have come back, and a folio been packed under the same value.
    fn parts_none_packed(&self, spill: &Spill) -> bool {
        self.values.iter().all(|&(first, value)| {
            let is_whole = self.pages.start <= first && end_of(first, value) <= self.pages.end;
            is_whole || !spill.is_packed(value)
        })
    }
    /// Keeps the first `count` pages, as far as their folios are whole; `None` if `wanted` is not among them.
    fn cut(mut self, count: u32, unit: Order, wanted: PageIndex, spill: &Spill) -> Option<Self> {
        let mut end = self.pages.start.plus(u64::from(count)).align_down(unit);
        while let Some(&(first, value)) = self.values.last() {
            let is_split = end < end_of(first, value) && end > first && end < self.pages.end;
            if first >= end {
                self.values.pop();
            } else if is_split && spill.is_packed(value) {
                end = first;
            } else {
                break;
            }
        }
        self.pages.end = end.min(self.pages.end);
        self.pages.contains(&wanted).then_some(self)
    }
}

fn end_of(first: PageIndex, value: Value) -> PageIndex {
    first.plus(1 << value.order())
}

/// Bytes that were read in the spill file, in their reader's turn.
#[derive(Debug)]
pub(crate) struct SpilledBytes<'c> {
    pub bytes: Vec<u8>,
    // Last: the heap has its bytes back then.
    _turn: Option<HeapTurn<'c>>,
}

impl SpilledBytes<'_> {
    fn none() -> Self {
        Self { bytes: Vec::new(), _turn: None }
    }
}

/// Pages of one value, to be read where they are.
#[derive(Debug)]
struct SpilledValuePages {
    first: PageIndex,
    value: Value,
    /// Pages of the value, counted from its first.
    pages: Range<u32>,
}

impl SpilledValuePages {
    /// The first of `wanted`, and those behind it, as far as they are the value's and not too many.
    fn first_of(tree: &MappingGuard<'_>, wanted: &Range<PageIndex>) -> Option<Self> {
        let at = wanted.start;
        let &(first, value) = tree.spilled_from(at..at.plus(1)).first()?;
        let end = wanted.end.min(end_of(first, value)).min(at.plus(THROUGH_PAGES_MAX));
        Some(Self { first, value, pages: (at.0 - first.0) as u32..(end.0 - first.0) as u32 })
    }

    fn count(&self) -> u64 {
        self.pages.len() as u64
    }
}

/// How a caller waits for frames. While the spill file takes nothing, it does only where something is under way that
/// memory may come of.
struct FrameWait<'c> {
    shortage: ShortageWait<'c>,
    pool: PoolNumber,
    /// The caller's, and that of the next try.
    whole: FillUrgency,
    urgency: FillUrgency,
    refused: u32,
    short: u32,
}

impl<'c> FrameWait<'c> {
    fn of(caller: SpillIn<'c>) -> Self {
        let whole = caller.urgency;
        let urgency = if whole == FillUrgency::Asked { caller.without_waiting().urgency } else { whole };
        let shortage = caller.filemap.supply.shortage(caller.mapping, None);
        let pool = caller.mapping.backing().spill_pool();
        Self { shortage, pool, whole, urgency, refused: 0, short: 0 }
    }

    /// There were no frames. Whether to try again: another time for a folio that a thread had for a moment, or as long
    /// as the caller waits.
    fn lasts_without_frames(&mut self) -> bool {
        if self.urgency == self.whole {
            return false;
        }
        if !self.shortage.is_in_vain(self.pool) {
            self.urgency = self.whole;
        }
        self.refused += 1;
        self.urgency == self.whole || self.refused < REFUSED_MAX
    }

    /// There were too few frames for folios that have to come as a whole. Whether to try again.
    fn lasts_with_few(&mut self) -> bool {
        self.short += 1;
        if self.short >= SHORT_MAX_UNWAITED && !self.shortage.is_in_vain(self.pool) {
            self.urgency = self.whole;
        }
        let most = if self.urgency == FillUrgency::Asked { SHORT_MAX } else { SHORT_MAX_UNWAITED };
        self.short < most
    }
}

/// The way of one file's pages back from the spill file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpillIn<'c> {
    filemap: &'c Arc<Filemap>,
    mapping: &'c Arc<Mapping>,
    urgency: FillUrgency,
}

impl<'c> SpillIn<'c> {
    /// A spill-in of pages of `mapping`, not begun yet.
    pub fn of(filemap: &'c Arc<Filemap>, mapping: &'c Arc<Mapping>) -> Self {
        Self { filemap, mapping, urgency: FillUrgency::Asked }
    }

    /// For a caller that can do without frames: while folios cannot go to the spill file, memory is taken from what can
    /// be evicted at once, and not waited for.
    #[must_use]
    pub fn without_waiting(self) -> Self {
        let is_stuck = self.mapping.backing().spill().is_some_and(|spill| spill.trouble().is_some());
        Self { urgency: if is_stuck { FillUrgency::Ahead } else { FillUrgency::Asked }, ..self }
    }

    /// Reads `pages.start`, and more of `pages`, in the spill file, and leaves them there. These are the bytes of whole
    /// pages, as they were when this returned; none if the first is not there any more, or was changed meanwhile: look
    /// again. Waits for the device, and while others that do so have much of the heap. The caller holds no lock, and
    /// no earlier result of this.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read_through(self, pages: Range<PageIndex>) -> Result<SpilledBytes<'c>, Error> {
        let (Some(spill), wanted) = (self.mapping.backing().spill(), pages.start) else {
            return Ok(SpilledBytes::none());
        };
        // After a failed read of several pages, the first alone: it may be another of them that is bad.
        let read =
            self.read_shared(spill, pages).or_else(|_| self.read_shared(spill, wanted..wanted.plus(1)));
        read.map_err(|source| Repr::Read { position: wanted.first_byte(), len: PAGE_SIZE, source }.into())
    }

    fn read_shared(self, spill: &'c Spill, pages: Range<PageIndex>) -> std::io::Result<SpilledBytes<'c>> {
        let none = || Ok(SpilledBytes::none());
        let bytes = {
            let guard = self.mapping.lock();
            let Some(part) = SpilledValuePages::first_of(&guard, &pages) else { return none() };
            spill.heap_for(part.value, part.count())
        };
        let turn = spill.take_turn(bytes);
        let (part, reading) = {
            let guard = self.mapping.lock();
            let Some(part) = SpilledValuePages::first_of(&guard, &pages) else { return none() };
            if !turn.covers(spill.heap_for(part.value, part.count())) {
                return none(); // it was changed meanwhile
            }
            let reading = spill.begin_share(part.value, part.pages.clone());
            (part, reading)
        };
        let bytes = reading.read()?;
        // No other folio was given its slots, so a value that still stands there has stood for these bytes all along.
        let stands = self.mapping.lock().has_values(&[(part.first, part.value)]);
        drop(reading);
        if !stands {
            return none();
        }
        spill.note_read(part.count());
        Ok(SpilledBytes { bytes, _turn: Some(turn) })
    }

    /// Brings `pages.start` back from the spill file, and more of `pages` and around. When this returns the page is
    /// in memory, or was for a moment: look again. Waits for memory, and for the device.
    ///
    /// # Errors
    /// It cannot be read, or there is no memory for it. It stays where it is.
    pub fn bring(self, pages: Range<PageIndex>, kept: TruncateExclusion) -> Result<(), Error> {
        self.bring_within(pages, kept, SpillInExtent::Batch)
    }

    /// As [`SpillIn::bring`], for the thread that cuts or punches the file: of `page`, its value at most. In a batch,
    /// values on both sides of an edge would become one folio, which reaches over the edge.
    ///
    /// # Errors
    /// As there.
    pub fn bring_alone(self, page: PageIndex) -> Result<(), Error> {
        self.bring_within(page..page.plus(1), TruncateExclusion::ByCaller, SpillInExtent::Alone)
    }

    fn bring_within(
        self,
        pages: Range<PageIndex>,
        kept: TruncateExclusion,
        mut reach: SpillInExtent,
    ) -> Result<(), Error> {
        let (Some(spill), wanted) = (self.mapping.backing().spill(), pages.start) else { return Ok(()) };
        let mut wait = FrameWait::of(self);
        for _ in 0..TRIES {
            // 1
            let Some(plan) = self.plan(spill, pages.clone(), reach) else { return Ok(()) };
            // 2
            wait.shortage.prepare_to_wait();
            let SuppliedFrames { mut charge, runs } = match self.frames_back(&plan, wait.urgency) {
                Ok(supplied) => supplied,
                Err(_) if wait.lasts_without_frames() => continue,
                Err(error) => return Err(error),
            };
            let got = pages_of(&runs) as u32;
            let Some(plan) = plan.cut(got, self.filemap.supply.folio_orders.min, wanted, spill) else {
                self.filemap.supply.free_runs(&runs);
                reach = SpillInExtent::Alone;
                if !wait.lasts_with_few() {
                    break;
                }
                if wait.urgency == FillUrgency::Asked && !spill.wait_for_one() {
                    pause(PAUSE); // others are at it, and take what gets free
                }
                continue;
            };
            let runs = self.keep_first(runs, plan.count());
            let Some(list_entries) =
                self.filemap.supply.reserve_list_entries(self.mapping, &runs, WaitPolicy::Wait)
            else {
                self.filemap.supply.free_runs(&runs);
                self.nodes_for(wanted)?;
                continue;
            };
            charge.keep(plan.count());
            // 3 to 6
            match self.fetch_back(&plan, &runs, list_entries.with_charge(charge), kept) {
                Ok(RestoreOutcome::Done) => return Ok(()),
                Ok(restored) => {
                    self.filemap.supply.free_runs(&runs);
                    match restored {
                        RestoreOutcome::NoNode => self.nodes_for(wanted)?,
                        // Waits until the thread that cuts is done.
                        _ if kept == TruncateExclusion::No => drop(self.mapping.hold_off_invalidation()),
                        _ => {}
                    }
                }
                Err(_)
                    if reach == SpillInExtent::Batch
                        && plan.count() > self.filemap.supply.folio_orders.min.pages() =>
                {
                    self.filemap.supply.free_runs(&runs);
                    reach = SpillInExtent::Alone;
                }
                Err(source) => {
                    self.filemap.supply.free_runs(&runs);
                    return Err(Repr::Read { position: wanted.first_byte(), len: PAGE_SIZE, source }.into());
                }
            }
        }
        Err(self.filemap.no_memory(wanted.first_byte()))
    }

    fn plan(self, spill: &Spill, pages: Range<PageIndex>, reach: SpillInExtent) -> Option<SpillInPlan> {
        let unit = self.filemap.supply.folio_orders.min;
        let around = if reach == SpillInExtent::Batch { AROUND.max(unit) } else { unit };
        let from = pages.start.align_down(around);
        let end = match reach {
            SpillInExtent::Batch => pages.end.max(from.plus(BATCH_PAGES)).min(from.plus(BATCH_PAGES_MAX)),
            SpillInExtent::Alone => pages.start.plus(1),
        };
        let end = end.align_up(around);
        let values = self.mapping.lock().spilled_from(pages.start..end);
        let (&(first, first_value), &(last, last_value)) = (values.first()?, values.last()?);
        let from = if spill.is_packed(first_value) { first } else { from.max(first) };
        let reached = end.min(end_of(last, last_value));
        let end = if spill.is_packed(last_value) { end_of(last, last_value) } else { reached };
        Some(SpillInPlan { values, pages: from..end })
    }

    fn frames_back(self, plan: &SpillInPlan, urgency: FillUrgency) -> Result<SuppliedFrames<'c>, Error> {
        let (pool, position) = (self.mapping.backing().spill_pool(), plan.pages.start.first_byte());
        let gaps = vec![Gap { first: plan.pages.start, pages: plan.count() }];
        let window = self.window_of(plan);
        let (reservation, locks) = (None, LockWait::Wait);
        let request = FrameRequest { mapping: self.mapping, pool, window, urgency, reservation, locks };
        self.filemap.supply.take(&request, gaps).map_err(|refused| match refused {
            NoFrames::PoolFull => self.filemap.pool_full(pool, position),
            NoFrames::NoMemory | NoFrames::Present | NoFrames::Busy => self.filemap.no_memory(position),
        })
    }

    fn window_of(self, plan: &SpillInPlan) -> Window {
        let order = Order::fitting(plan.count()).min(self.mapping.backing().folio_order_max());
        Window { order, ..Window::exact(plan.pages.start, plan.count()) }
    }

    fn keep_first(self, runs: Vec<FillRun>, pages: u32) -> Vec<FillRun> {
        let (mut left, mut kept, mut rest) = (pages, Vec::with_capacity(runs.len()), Vec::new());
        for run in runs {
            let (before, behind) = crate::mapping::cut(run, left.min(run.pages));
            left -= before.pages;
            kept.extend((before.pages > 0).then_some(before));
            rest.extend((behind.pages > 0).then_some(behind));
        }
        self.filemap.supply.free_runs(&rest);
        kept
    }

    fn nodes_for(self, wanted: PageIndex) -> Result<(), Error> {
        match self.filemap.supply.make_nodes(self.mapping.backing().spill_pool()) {
            true => Ok(()),
            false => Err(self.filemap.no_memory(wanted.first_byte())),
        }
    }

    /// 3 to 6. Unless it is done the frames are still the caller's.
    fn fetch_back(
        self,
        plan: &SpillInPlan,
        runs: &[FillRun],
        list_entries: ListReservation<'_>,
        kept: TruncateExclusion,
    ) -> std::io::Result<RestoreOutcome> {
        let spill = self.mapping.backing().spill().expect("what is planned is spilled");
        // 3
        let reading = {
            let guard = self.mapping.lock();
            if !guard.has_values(&plan.values) || !plan.parts_none_packed(spill) {
                return Ok(RestoreOutcome::Changed);
            }
            spill.begin_read(&plan.bare_values())
        };
        let reading = match reading {
            Ok(reading) => reading,
            Err(slots) => {
                spill.wait_for_readers(&slots);
                return Ok(RestoreOutcome::Changed);
            }
        };
        // 4
        let parts = parts_of(&plan.values, runs);
        // SAFETY: the frames are this thread's alone, by the arena, and in no tree before the next step.
        unsafe { spill.fetch(&parts) }?;
        // 5
        let window = self.window_of(plan);
        let folios = cut_to_folios(runs, self.filemap.supply.orders_for(window));
        let mut held: Vec<HeldFolio<'_>> = Vec::with_capacity(folios.len());
        let held_off = match kept {
            TruncateExclusion::ByCaller => None,
            TruncateExclusion::No => match self.mapping.try_hold_off_invalidation() {
                Some(held_off) => Some(held_off),
                // A thread that cuts the file may want these slots and memory: it is waited for with neither.
                None => return Ok(RestoreOutcome::Changed),
            },
        };
        let first = plan.values.first().map_or(plan.pages.start, |(first, _)| *first);
        let end = plan.values.last().map_or(plan.pages.end, |&(last, value)| end_of(last, value));
        let Some(mut guard) = self.mapping.lock_to_add(first, end.0 - first.0, LockWait::Wait) else {
            return Ok(RestoreOutcome::NoNode);
        };
        let restored = guard.restore(&plan.values, &folios, &mut held);
        drop(guard);
        if restored != RestoreOutcome::Done {
            return Ok(restored);
        }
        // 6
        let shape = FolioShape {
            orders: self.filemap.supply.orders_for(window),
            marker: None,
            purpose: InsertPurpose::Write,
            wanted: AskedFor::All,
            fate: FolioLifetime::Stays,
        };
        self.filemap.supply.list_new(self.mapping, runs, window, shape, list_entries);
        self.filemap.counters.add(Count::Inserted, u64::from(plan.count()));
        self.filemap.supply.reclaim.count_inserted(
            self.mapping.backing().spill_pool(),
            u64::from(plan.count()),
            0,
        );
        drop(held_off);
        drop(reading); // now the slots are free
        Ok(RestoreOutcome::Done)
    }

    /// A hint. Takes the tree lock only if anything of the file seems to be spilled.
    pub fn is_spilled(self, index: PageIndex) -> bool {
        self.mapping.backing().spilled_pages() > 0
            && !self.mapping.lock().spilled_from(index..index.plus(1)).is_empty()
    }

    /// Before locks are taken to cut the file: brings the pages back that are cut in two, so that no memory has to be
    /// waited for under the locks.
    pub fn bring_edges(self, edges: impl IntoIterator<Item = u64>) -> Result<(), Error> {
        for edge in edges.into_iter().filter(|edge| !edge.is_multiple_of(PAGE_SIZE as u64)) {
            let page = PageIndex::of_byte(edge);
            if self.is_spilled(page) {
                self.bring(page..page.plus(1), TruncateExclusion::No)?;
            }
        }
        Ok(())
    }
}

fn parts_of(values: &[(PageIndex, Value)], runs: &[FillRun]) -> Vec<SpilledPart> {
    let mut parts = Vec::with_capacity(values.len() + runs.len());
    for &run in runs {
        let run_end = run.index.plus(u64::from(run.pages));
        for &(first, value) in values {
            let (from, end) = (first.max(run.index), end_of(first, value).min(run_end));
            if from < end {
                parts.push(SpilledPart {
                    value,
                    at: (from.0 - first.0) as u32,
                    frame: run.frame.plus((from.0 - run.index.0) as u32),
                    pages: (end.0 - from.0) as u32,
                });
            }
        }
    }
    parts
}

/// Makes each folio the largest of `orders` that index, frame and rest of the run allow.
fn cut_to_folios(runs: &[FillRun], orders: Orders) -> Vec<NewFolio> {
    let mut folios = Vec::new();
    for &run in runs {
        let mut page = 0;
        while page < run.pages {
            let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
            let fits = |order: &Order| {
                index.is_aligned(*order)
                    && frame.0.is_multiple_of(order.pages())
                    && order.pages() <= run.pages - page
            };
            let order = (0..=orders.max.0).rev().map(Order).find(fits).expect("a page fits");
            folios.push(NewFolio { index, frame, order });
            page += order.pages();
        }
    }
    folios
}

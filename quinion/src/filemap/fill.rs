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
//!   insert     locked folios, all runs in one hold of the tree's lock; places in the rings are promised before
//!   list       each in the ring that the policy says
//!   submit     one Fill each, several windows' in one call; a single small one, of which the reader waits for a
//!              page, is read by its reader's own system call, with no lock held
//! ```
//!
//! A window becomes gaps, gaps become runs of consecutive frames, runs become
//! locked folios in the tree and one [`Fill`] each. Frames are taken for what is
//! not cached and for nothing else, all or none: a window for which there is
//! no memory takes none away from others while it reclaims. Fewer frames than
//! pages is not an error in the end: a window is a wish. Only the first missing
//! page of a read is worth waiting for memory.
//!
//! A random read misses one page. Its window takes the same steps with a value where others have a list
//! (`insert_folio`), as long as nothing is short.
//!
//! **An uncached reader** leaves what others cached. What uncached reads have in the cache may take from others an
//! eighth of it, or of their pool's limit; beyond that a window is as large as what is free, and one ahead that
//! would be small is none. But what is asked for gets 64 KiB: of what uncached reads have made, and if that cannot
//! go, of what others cached. So many streams at once have small windows, and what is hot stays. One who does not
//! wait even for locks has to do with what there is without others.
//!
//! Where the cache has a smallest folio, a window starts and ends at multiples
//! of it, as do gaps and runs; the last folio may reach over the end of the
//! file, and its rest is zeros.
//!
//! The end of a fill comes by [`FillSink`], on whatever thread reaped it, and before it the news that pages have
//! arrived: these are read by a thread that waits for them, while the rest of their folio is on its way. Folios that
//! the device did not deliver whole leave the tree before they are unlocked, so a failed page is absent, never empty.
//!
//! A failed page takes with it the folio that it is a page of, and no other folio of its request. The folio could
//! stay, with a hole to be filled on demand; but then a folio that is neither filled nor being
//! filled would be a state for eviction, batches, pins and viewers to know, for the sake of bad sectors. Its good pages
//! come again when they are wanted, by themselves.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::arena::{AllocAmount, Arena, FillEnd, FrameAlignment, FrameRun, PutOutcome, View};
use crate::backend::{DeferredWakes, Fill, FillRun, FillSink, PageKey, ReapMode, Version, WaitQueue};
use crate::background::BackgroundThread;
use crate::lists::{Charge, ListReservation};
use crate::mapping::{
    AddedFolio, AddedRuns, AskedFor, Backing, FolioLifetime, FolioShape, InsertPurpose, Mapping,
    MappingGuard, NewFolio, ShadowObserver, cut, folios_of,
};
use crate::policy;
use crate::readahead::Window;
use crate::reclaim::{Protection, Reclaim};
use crate::spill::Spill;
use crate::stats::{Count, Counters};
use crate::sync::lock::Mutex;
use crate::sync::{LockWait, Rank, RankedMutex, RankedReadGuard};
use crate::tuning::{Descent, Insertion, Tuning};
use crate::units::{Frame, Order, Orders, PAGE_SIZE, PageIndex, PoolNumber};
use crate::writeback::{Writeback, WritebackOptions};
use crate::xarray::RangeStop;

use super::uncached::DropBehindState;
use super::wait_policy::WaitPolicy;

/// Room for the gaps of a window: more of them are rare, and take their list anew under the tree's lock.
const GAPS_USUAL: usize = 16;
/// Nodes that only remember, forgotten at a time when nodes run out.
const FORGET_NODES: u64 = 64;
/// log2 of the pages of the longest run that one fill asks for, 1 MiB; a larger folio is more.
pub(super) const RUN_ORDER_MAX: Order = Order(8);
/// Pages reclaimed at a time, so that a window of evictions frees neighbouring frames together.
const RECLAIM_PAGES: u32 = 256;
/// How often memory is waited for before it is said that there is none.
const STALLS_MAX: u32 = 100;
/// A window is one part in so many of its pool's limit at most, if that is in its way.
const WINDOW_SHARE: u64 = 4;
/// What uncached reads have may take from others one part in so many of the cache, or of their pool's limit.
const UNCACHED_SHARE: u64 = 8;
/// Pages that an uncached reader gets of what it asks for, whosever they were.
const UNCACHED_LEAST: u32 = 16;
/// How long, where there is nothing in flight to wait for.
const STALL: Duration = Duration::from_millis(1);

/// What the paths of one cache share.
#[derive(Debug)]
pub struct Filemap {
    pub(crate) arena: Arc<Arena>,
    pub(crate) wait_queue: Arc<WaitQueue>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) reclaim: Reclaim,
    /// Dirty pages on their way to their files.
    pub(crate) writeback: Arc<Writeback>,
    /// What nobody waits for.
    pub(crate) background: BackgroundThread,
    /// Whether room is made before it is needed.
    pub(super) makes_room: bool,
    /// Where folios of memory files go when memory is short, if there is such a place.
    pub(crate) spill: Option<Arc<Spill>>,
    /// Held by the thread that resizes.
    pub(super) resizing: RankedMutex<()>,
    /// The bound that the user wants, in bytes; the one in force may be smaller under pressure.
    pub(super) memory_told: AtomicU64,
    /// What of the bound users' pins may keep: a part of a whole.
    pub(super) pinned_share: (u64, u64),
    /// The folios that fills make.
    pub(crate) folio_orders: Orders,
    tuning: Tuning,
    /// Fills submitted and not completed.
    in_flight: AtomicU64,
    /// Fills completed, so that one who waits for memory sees that something happened.
    completed: AtomicU64,
    /// Pages of the windows that uncached reads are putting into the cache just now.
    uncached_coming: AtomicU64,
}

/// How much the caller needs the first missing page of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FillUrgency {
    /// It was asked for, and the caller will wait for it: worth waiting for memory.
    Asked,
    /// It may come handy.
    Ahead,
    /// A program said that it will need it, and waits for none of it.
    Hinted,
}

/// What the caller does after it has submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AfterSubmit {
    /// It waits for this page, and reaps, if what it has submitted brings that page: nobody else can have brought it
    /// before it reaped, so the reap comes for sure. Of others' pages that is not so.
    Reap(PageIndex),
    /// Perhaps that, and perhaps not, or not at once.
    Anything,
}

/// Pages that need frames.
#[derive(Clone, Copy, Debug)]
struct WantedFrames<'g> {
    /// Where they are, as (first page, pages).
    gaps: &'g [(PageIndex, u32)],
    /// How many they are.
    pages: u32,
    /// The largest folio to be made of them.
    align: Order,
    /// How many are evicted at a time for them, under pressure.
    at_a_time: u32,
    locks: LockWait,
}

/// What of one window came back from an eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Refaults {
    /// Pages of folios that found a shadow.
    pub pages: u64,
    /// Of these, pages that had not been away for long.
    pub activated: u64,
    /// Folios among these that had been in the working set when they were evicted.
    pub working_set: u32,
}

/// Where room is short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RoomScope {
    /// In the cache as a whole.
    Cache,
    /// Below the limit of the reader's pool.
    Pool,
}

/// What an uncached reader lacks for a window.
#[derive(Clone, Copy, Debug)]
struct Shortfall {
    pool: PoolNumber,
    within: RoomScope,
    /// Pages for which there is no room.
    pages: u32,
    /// Pages in all that it is to have, if that can be.
    least: u32,
    locks: LockWait,
}

/// A window that an uncached read is about to put into the cache, until it is listed, or is not to be had.
#[derive(Debug)]
pub(super) struct Reservation<'f> {
    filemap: &'f Filemap,
    pages: Cell<u64>,
    /// Somebody has asked for its first page.
    is_asked: bool,
}

impl<'f> Reservation<'f> {
    fn of(filemap: &'f Filemap, gaps: &[(PageIndex, u32)], is_asked: bool) -> Self {
        let pages = gaps.iter().map(|(_, pages)| u64::from(*pages)).sum();
        filemap.uncached_coming.fetch_add(pages, Ordering::Relaxed);
        Self { filemap, pages: Cell::new(pages), is_asked }
    }

    /// Whether a window of so many pages is worth its request: to whom asks, any; ahead, as many as these at least.
    fn is_content(&self, pages: u32, least: u32) -> bool {
        pages >= least || self.is_asked && pages > 0
    }

    /// Whether it takes of others what it needs to begin.
    fn may_press(&self, locks: LockWait) -> bool {
        self.is_asked && locks == LockWait::Wait
    }

    /// It is of so many pages at most.
    fn keep(&self, pages: u32) {
        let fewer = self.pages.get().saturating_sub(u64::from(pages));
        self.filemap.uncached_coming.fetch_sub(fewer, Ordering::Relaxed);
        self.pages.set(self.pages.get() - fewer);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.keep(0);
    }
}

/// What became of a wish to fill a window.
#[derive(Debug)]
pub(crate) enum FillOutcome {
    /// Some of it is on its way, beginning with the first page that was not there.
    Submitted(Arc<WindowFills>),
    /// Every page of it is there, or on its way by somebody else.
    Nothing,
    /// No frame or no node could be had for its first missing page.
    NoMemory,
    /// The reader's pool is at its limit, and has nothing that can go.
    PoolFull,
    /// A lock was held or the device's queue full, and the caller does not wait.
    Busy,
}

impl Filemap {
    /// The paths of a cache over `arena`, which makes folios of `folio_orders`.
    ///
    /// # Panics
    /// If the smallest is larger than the largest.
    pub fn new(arena: Arc<Arena>, wait_queue: Arc<WaitQueue>, folio_orders: Orders, tuning: Tuning) -> Self {
        assert!(folio_orders.min <= folio_orders.max, "{folio_orders:?} are no orders");
        let (counters, memory_told) = (Arc::new(Counters::default()), arena.bound());
        let writeback = WritebackOptions::default();
        Self {
            reclaim: Reclaim::with_policy(Arc::clone(&arena), Arc::clone(&counters), tuning.policy),
            writeback: Writeback::new(
                Arc::clone(&arena),
                Arc::clone(&wait_queue),
                Arc::clone(&counters),
                writeback,
            ),
            arena,
            wait_queue,
            counters,
            background: BackgroundThread::new(),
            makes_room: false,
            spill: None,
            resizing: RankedMutex::new(Rank::Resize, ()),
            memory_told: AtomicU64::new(memory_told),
            pinned_share: (1, 2),
            folio_orders,
            tuning,
            in_flight: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            uncached_coming: AtomicU64::new(0),
        }
    }

    /// With users' pins that may keep `bytes` bytes, and that share of the bound when it is changed.
    #[must_use]
    pub fn with_pinned_max(mut self, bytes: u64) -> Self {
        let bound = self.arena.bound();
        self.pinned_share = (bytes.min(bound), bound);
        self
    }

    /// The same, which writes back in this way. To be called before any mapping counts its dirty pages.
    #[must_use]
    pub fn with_writeback(mut self, options: WritebackOptions) -> Self {
        let (arena, wait_queue, counters) =
            (Arc::clone(&self.arena), Arc::clone(&self.wait_queue), Arc::clone(&self.counters));
        self.writeback = Writeback::new(arena, wait_queue, counters, options);
        self
    }

    /// The same, with a place where folios of memory files go when memory is short.
    #[must_use]
    pub fn with_spill(mut self, spill: Option<Arc<Spill>>) -> Self {
        spill.iter().for_each(|spill| self.reclaim.spill_to(spill));
        self.spill = spill;
        self
    }

    /// The part that makes room.
    pub fn reclaim(&self) -> &Reclaim {
        &self.reclaim
    }

    /// How much of `count` was counted so far.
    pub fn count(&self, count: Count) -> u64 {
        self.counters.sum(count)
    }

    /// Dirty pages on their way to their files.
    pub fn writeback(&self) -> &Arc<Writeback> {
        &self.writeback
    }

    /// The same, and the background thread makes room before it is needed; see `background_reclaim.rs`.
    #[must_use]
    pub(crate) fn with_room_made(mut self, makes_room: bool) -> Self {
        self.makes_room = makes_room;
        self
    }

    /// Fills submitted and not yet completed.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Inserts what of `window` is not cached; it goes to the device with the rest of `together`. Pages in
    /// `wanted` were asked for. May wait for locks with [`WaitPolicy::Wait`], and for memory with
    /// [`FillUrgency::Asked`], which is not for those who have others' fills there already; never for the window's own
    /// bytes.
    pub(super) fn insert_window(
        self: &Arc<Self>,
        together: &mut SubmitBatch<'_>,
        window: Window,
        wanted: Range<PageIndex>,
        need: FillUrgency,
        wait_policy: WaitPolicy,
    ) -> FillOutcome {
        debug_assert!(
            need != FillUrgency::Asked || together.fills.is_empty(),
            "nobody waits with fills in hand"
        );
        let mapping = together.mapping;
        let window = self.whole_folios(window, mapping.size_pages());
        if window.pages == self.folio_orders.min.pages()
            && window.stream.is_none()
            && let Some(filled) = self.insert_folio(together, window, &wanted, need, wait_policy)
        {
            return filled;
        }
        // 1 What is not there.
        let Some(mut gaps) = self.gaps(mapping, window, wait_policy) else { return FillOutcome::Busy };
        if gaps.is_empty() {
            return FillOutcome::Nothing;
        }
        if wait_policy == WaitPolicy::Now && !mapping.backend().has_room(together.fills.len() + gaps.len()) {
            return FillOutcome::Busy;
        }
        // 2 A charge for it, and frames.
        let (pool, fate) = (together.pool, together.fate());
        let is_asked = wanted.contains(&gaps[0].0);
        let coming = (fate == FolioLifetime::DropsBehind).then(|| Reservation::of(self, &gaps, is_asked));
        let how = (need, coming.as_ref());
        let reserved = self.charge_and_frames((pool, mapping), &mut gaps, window, how, wait_policy.locks());
        let (charge, frames) = match reserved {
            Ok(wait_queue) => wait_queue,
            Err(refused) => return refused,
        };
        let runs = deal_out(&gaps, &frames);
        // 3 Into the tree and the rings, with invalidation held off until it goes to the device.
        if together.hold_off(wait_policy).is_none() {
            self.free_runs(&runs);
            return FillOutcome::Busy;
        }
        let mut refaults = Refaults::default();
        let wanted = AskedFor::Only { from: wanted.start, end: wanted.end };
        let Some(promise) = self.promise_places(mapping, &runs, wait_policy) else {
            self.free_runs(&runs);
            return self.nodes_ran_out(pool, wait_policy);
        };
        let orders = self.orders_for(window);
        let shape = FolioShape { orders, marker: window.marker, purpose: InsertPurpose::Read, wanted, fate };
        let Some(added) = self.insert((pool, mapping), shape, runs, wait_policy, &mut refaults) else {
            return FillOutcome::Busy;
        };
        self.list(&added.inserted, window, shape, promise.with_charge(charge));
        if let (Some(behind), Some(first), Some(last)) =
            (together.behind, added.inserted.first(), added.inserted.last())
        {
            behind.note_made(first.index..last.index.plus(u64::from(last.pages)));
        }
        if added.inserted.is_empty() {
            return match added.stop {
                RangeStop::NoNode => self.nodes_ran_out(pool, wait_policy),
                _ => FillOutcome::Nothing,
            };
        }
        // 4 A request for each run.
        self.begin_fills(together, &added.inserted, refaults, need)
    }

    /// As [`Filemap::insert_window`], of a window of one folio, the smallest there is: what random reads miss. It is
    /// asked for because somebody missed it; whether it is still missing is seen when it is inserted. The same steps,
    /// with a value where a window has a list. `None` if no page can be had just so, or nothing may be waited for:
    /// nothing has happened then, and the window goes the long way, which makes room and asks the device for its.
    fn insert_folio(
        self: &Arc<Self>,
        together: &mut SubmitBatch<'_>,
        window: Window,
        wanted: &Range<PageIndex>,
        need: FillUrgency,
        wait_policy: WaitPolicy,
    ) -> Option<FillOutcome> {
        let SubmitBatch { mapping, pool, .. } = *together;
        if wait_policy.locks() == LockWait::Try || mapping.places().is_some() {
            return None;
        }
        // 2
        let order = self.folio_orders.min;
        let charge = self.reclaim.lists().charge(pool, window.pages, order);
        if charge.pages() == 0 {
            return None;
        }
        let frame = self.arena.alloc(order)?;
        let run = FillRun { index: window.start, frame, pages: window.pages };
        // 3
        together.hold_off(wait_policy);
        let Some(promise) = self.promise_places(mapping, &[run], wait_policy) else {
            self.arena.free(frame, order);
            return Some(self.nodes_ran_out(pool, wait_policy));
        };
        let wanted = AskedFor::Only { from: wanted.start, end: wanted.end };
        let (orders, fate) = (Orders { min: order, max: order }, together.fate());
        let shape = FolioShape { orders, marker: window.marker, purpose: InsertPurpose::Read, wanted, fate };
        let folio = NewFolio { index: run.index, frame, order };
        let added = match run.index.0 < mapping.size_pages() {
            true => mapping.add_folio_watched(folio, shape, LockWait::Wait, &mut || {}),
            false => AddedFolio::Present, // the file has become shorter: nothing is missing there
        };
        let mut refaults = Refaults::default();
        match added {
            AddedFolio::Added { shadow: Some(shadow) } if fate == FolioLifetime::Stays => {
                self.note_refault(pool, frame, shadow, &mut refaults);
            }
            AddedFolio::Added { .. } => {}
            AddedFolio::Present => {
                self.arena.free(frame, order);
                return Some(FillOutcome::Nothing);
            }
            AddedFolio::NoNode => {
                self.arena.free(frame, order);
                return Some(self.nodes_ran_out(pool, wait_policy));
            }
        }
        self.wake_background_reclaim(window);
        if promise.entries() > 0 {
            let came = completion_of(run.index, order, window, shape);
            self.reclaim.list([(frame, came)], promise.with_charge(charge));
        }
        if let Some(behind) = together.behind {
            behind.note_made(run.index..run.index.plus(u64::from(run.pages)));
        }
        // 4
        Some(self.begin_fills(together, &[run], refaults, need))
    }

    /// Makes a request for each run that went into the tree, and counts what went.
    fn begin_fills(
        self: &Arc<Self>,
        together: &mut SubmitBatch<'_>,
        runs: &[FillRun],
        refaults: Refaults,
        need: FillUrgency,
    ) -> FillOutcome {
        let (pool, pages) = (together.pool, pages_of(runs));
        let batch = Arc::new(WindowFills::new(
            Arc::clone(self),
            Arc::clone(together.mapping),
            pool,
            runs[0],
            refaults,
        ));
        self.reclaim.count_inserted(pool, pages, refaults.pages);
        self.counters.add(Count::Inserted, pages);
        if need == FillUrgency::Hinted {
            self.counters.add(Count::WillNeed, pages);
        }
        if refaults.pages > 0 {
            self.count_refaults(refaults);
        }
        self.add_fills(&batch, runs, &mut together.fills);
        FillOutcome::Submitted(batch)
    }

    /// What of `window` no folio covers, as (first page, pages). `None` if the lock is busy and the caller does not
    /// wait. A window of one folio comes here only if memory is short: one way down is enough for it.
    fn gaps(
        &self,
        mapping: &Mapping,
        window: Window,
        wait_policy: WaitPolicy,
    ) -> Option<Vec<(PageIndex, u32)>> {
        if window.pages == self.folio_orders.min.pages() {
            return Some(vec![(window.start, window.pages)]);
        }
        let mut gaps = Vec::with_capacity(GAPS_USUAL); // before the lock
        add_gaps(&mut gaps, &mapping.lock_as(wait_policy.locks())?, window);
        Some(gaps)
    }

    /// The orders of the folios that are made for `window`.
    pub(super) fn orders_for(&self, window: Window) -> Orders {
        let Orders { min, max } = self.folio_orders;
        Orders { min, max: max.min(window.order.max(window.order_min)).max(min) }
    }

    /// The window, made of whole folios: its start at a multiple of the smallest and what that adds, its end
    /// and its marker at the next. The smallest is the cache's, or what the window wants at least; but behind the
    /// last of the file's `size_pages` pages only the cache's smallest goes, and no frames are taken for more.
    fn whole_folios(&self, window: Window, size_pages: u64) -> Window {
        let min = self.folio_orders.min.max(window.order_min.min(self.folio_orders.max));
        let start = window.start.align_down(min);
        let end_of_file = PageIndex(size_pages).align_up(self.folio_orders.min);
        let end = window.start.plus(u64::from(window.pages)).align_up(min).min(end_of_file).max(start);
        let marker = window.marker.map(|marker| marker.align_up(min)).filter(|marker| *marker < end);
        Window { start, pages: (end.0 - start.0) as u32, marker, ..window }
    }

    /// A charge of the pool for the pages of `gaps`, as far as that goes, and frames for what it is for. Where pages
    /// have their places, those at their places, and no charge; [`FillOutcome::Nothing`] then says that somebody else
    /// has brought the first page, and the caller looks again.
    pub(super) fn charge_and_frames(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        gaps: &mut Vec<(PageIndex, u32)>,
        window: Window,
        (need, coming): (FillUrgency, Option<&Reservation<'_>>),
        locks: LockWait,
    ) -> Result<(Charge<'_>, Vec<FrameRun>), FillOutcome> {
        if let Some(places) = mapping.places() {
            return self.claim_places((pool, mapping), places, gaps, need, locks);
        }
        let mut charge = self.charge((pool, mapping), gaps, window, (need, coming), locks);
        if charge.pages() == 0 {
            return Err(FillOutcome::PoolFull);
        }
        let frames = self.alloc_frames((pool, mapping), gaps, window, (need, coming), locks);
        if frames.is_empty() {
            return Err(FillOutcome::NoMemory);
        }
        charge.keep(frames.iter().map(|run| run.pages).sum());
        Ok((charge, frames))
    }

    /// A charge of the pool for the pages of `gaps`, which are cut short to what it is for. A pool at its limit evicts
    /// of its own, a stream's pages of what its reader has passed first. For the first of the pages that is waited
    /// for, if `need` says so and `locks` allows it.
    fn charge(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        gaps: &mut Vec<(PageIndex, u32)>,
        window: Window,
        (need, coming): (FillUrgency, Option<&Reservation<'_>>),
        locks: LockWait,
    ) -> Charge<'_> {
        let (unit, lists) = (self.folio_orders.min, self.reclaim.lists());
        let wanted = gaps.iter().map(|(_, pages)| pages).sum();
        let mut charge = lists.charge(pool, wanted, unit);
        if charge.pages() == wanted {
            return charge; // always, where there is no limit
        }
        // A window as large as the pool would empty it for its own sake.
        let share = (lists.limit(pool) / WINDOW_SHARE).max(u64::from(unit.pages()));
        let mut wanted = wanted.min(share.try_into().unwrap_or(u32::MAX) & !(unit.pages() - 1));
        charge.keep(wanted);
        if let Some(passed) = window.stream {
            self.reclaim.reclaim_passed((pool, mapping), passed, wanted - charge.pages(), locks);
            charge.grow(wanted, unit);
        }
        if let Some(coming) = coming.filter(|_| charge.pages() < wanted) {
            let (least, lacking) = (self.uncached_least(wanted), wanted - charge.pages());
            let lack = Shortfall { pool, within: RoomScope::Pool, pages: lacking, least, locks };
            let has = self.make_room_for_uncached(lack, coming, || {
                charge.grow(wanted, unit);
                charge.pages()
            });
            wanted = match () {
                () if coming.is_content(has, least) => has,
                () if coming.may_press(locks) => least,
                () => 0,
            };
            charge.keep(wanted);
        }
        self.charge_slow(mapping, &mut charge, wanted, need, locks);
        cut_short(gaps, charge.pages());
        charge
    }

    /// Charges the pool for `wanted` pages in all, as long as it can evict something for them.
    fn charge_slow(
        &self,
        mapping: &Mapping,
        charge: &mut Charge<'_>,
        wanted: u32,
        need: FillUrgency,
        locks: LockWait,
    ) {
        let (pool, unit, mut stalls) = (charge.pool(), self.folio_orders.min, 0);
        let mut began = None;
        while charge.pages() < wanted {
            let (_, completed) = self.under_way_for(pool);
            if self.reclaim.reclaim_in(pool, wanted - charge.pages(), locks) == 0 {
                charge.grow(wanted, unit); // others may have given something back
                let waits = charge.pages() == 0 && need == FillUrgency::Asked && locks == LockWait::Wait;
                if waits {
                    self.writeback.ask_for_room();
                }
                let began = *began.get_or_insert_with(Instant::now);
                if !waits || stalls >= STALLS_MAX && !self.may_bring_room(pool, began) {
                    return;
                }
                stalls += 1;
                self.wait_for_fill_progress(mapping, || self.under_way_for(pool), completed);
            }
            charge.grow(wanted, unit);
            if locks == LockWait::Try {
                return;
            }
        }
    }

    /// Evicts of a pool what it has above its limit, as far as it can go.
    pub(crate) fn shrink_to_limit(&self, pool: PoolNumber) {
        let lists = self.reclaim.lists();
        loop {
            let over = lists.charged(pool).saturating_sub(lists.limit(pool)).min(u64::from(RECLAIM_PAGES));
            if over == 0 || self.reclaim.reclaim_in(pool, over as u32, LockWait::Wait) == 0 {
                return;
            }
        }
    }

    /// Frames for all the gaps, in one hold of the arena's lock, or with one reclaim in two: a stream's of what its
    /// reader has passed, if it can be. Under more pressure than that, in pieces, as many as can be had.
    fn alloc_frames(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        gaps: &[(PageIndex, u32)],
        window: Window,
        (need, coming): (FillUrgency, Option<&Reservation<'_>>),
        locks: LockWait,
    ) -> Vec<FrameRun> {
        let (pages, align) = (gaps.iter().map(|(_, pages)| pages).sum(), self.orders_for(window).max);
        let wanted = WantedFrames { gaps, pages, align, at_a_time: RECLAIM_PAGES, locks };
        let mut runs = Vec::new();
        if let Some(passed) = window.stream
            && self.is_low_for_stream(wanted.pages)
        {
            self.reclaim.reclaim_passed((pool, mapping), passed, wanted.pages, locks);
        }
        if self.take_frames(wanted, AllocAmount::All, &mut runs) > 0 {
            self.wake_background_reclaim(window);
            return runs;
        }
        if let Some(coming) = coming {
            return self.alloc_for_uncached((pool, mapping), wanted, (need, coming), runs);
        }
        let (_, completed) = self.under_way();
        let some = match window.stream {
            // It takes of others what it lacks now and no more.
            Some(_) => self.lacking(pages),
            None => pages.max(RECLAIM_PAGES),
        };
        let reclaimed = self.reclaim.reclaim_for(pool, some.max(1), locks);
        if reclaimed == 0 || self.take_frames(wanted, AllocAmount::All, &mut runs) == 0 {
            self.alloc_frames_slow((pool, mapping), wanted, (need, completed), &mut runs);
        }
        runs
    }

    /// Frames for an uncached reader, for whom there is not all that is wanted; as the head of this file says.
    fn alloc_for_uncached(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        wanted: WantedFrames<'_>,
        (need, coming): (FillUrgency, &Reservation<'_>),
        mut runs: Vec<FrameRun>,
    ) -> Vec<FrameRun> {
        let (least, locks, mut has) = (self.uncached_least(wanted.pages), wanted.locks, 0);
        let pages = self.lacking(wanted.pages).max(1);
        let lack = Shortfall { pool, within: RoomScope::Cache, pages, least, locks };
        self.make_room_for_uncached(lack, coming, || {
            has += self.take_frames(wanted, AllocAmount::Less, &mut runs);
            has
        });
        if coming.is_content(has, least) {
            return runs;
        }
        // What is not asked for can wait, and leaves that to others.
        runs.drain(..).for_each(|run| self.arena.free_run(run.frame, run.pages));
        if coming.may_press(locks) {
            // Others were quicker to take what was made.
            let (_, completed) = self.under_way();
            let mut gaps = wanted.gaps.to_vec();
            cut_short(&mut gaps, least);
            let wanted = WantedFrames { gaps: &gaps, pages: least, at_a_time: least, ..wanted };
            self.alloc_frames_slow((pool, mapping), wanted, (need, completed), &mut runs);
        }
        runs
    }

    /// Makes room for an uncached read, until `take`, which takes what room there is and says how many pages it has
    /// then, has enough of them. Waits for nothing but locks.
    fn make_room_for_uncached(
        &self,
        lack: Shortfall,
        coming: &Reservation<'_>,
        mut take: impl FnMut() -> u32,
    ) -> u32 {
        let Shortfall { pool, within, pages, least, locks } = lack;
        let evict = |pages| match within {
            RoomScope::Cache => self.reclaim.reclaim_for(pool, pages, locks),
            RoomScope::Pool => self.reclaim.reclaim_in(pool, pages, locks),
        };
        // 1 Of others, within the share.
        let may = self.uncached_may_take((within, pool), coming, locks).min(pages);
        if may > 0 {
            evict(may);
        }
        let mut has = take();
        if has >= least {
            return has;
        }
        // 2 Of what uncached reads have.
        coming.keep(least);
        self.reclaim.reclaim_uncached(pool, least - has, locks);
        has = take();
        if has >= least || !coming.may_press(locks) {
            return has;
        }
        // 3 Of anybody.
        evict(least - has);
        take()
    }

    /// Pages without which a window of `pages` is not worth its request to an uncached reader.
    fn uncached_least(&self, pages: u32) -> u32 {
        UNCACHED_LEAST.max(self.folio_orders.min.pages()).min(pages)
    }

    /// Of `pages` that are wanted, those for which no frame is free.
    fn lacking(&self, pages: u32) -> u32 {
        u64::from(pages).saturating_sub(self.arena.room_pages(LockWait::Try).unwrap_or(0)) as u32
    }

    /// Pages that uncached reads may take from others yet. Others who are coming as well, in whatever pool, are
    /// counted as if they had all that they want; so several at a time may get little for a moment, and not too
    /// much.
    fn uncached_may_take(
        &self,
        (within, pool): (RoomScope, PoolNumber),
        coming: &Reservation<'_>,
        locks: LockWait,
    ) -> u32 {
        let others = self.uncached_coming.load(Ordering::Relaxed).saturating_sub(coming.pages.get());
        let (whole, of) = match within {
            RoomScope::Cache => (self.arena.pages_max(), None),
            RoomScope::Pool => (self.reclaim.lists().limit(pool), Some(pool)),
        };
        let has = self.reclaim.uncached_pages(of, locks).map_or(u64::MAX, |pages| pages + others);
        (whole / UNCACHED_SHARE).saturating_sub(has).try_into().unwrap_or(u32::MAX)
    }

    /// Takes what frames there are of those wanted, and reclaims for the rest as long as that brings some. For
    /// the first of them memory is waited for, if `need` says so and `locks` allows it.
    fn alloc_frames_slow(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        wanted: WantedFrames<'_>,
        (need, mut completed): (FillUrgency, u64),
        runs: &mut Vec<FrameRun>,
    ) {
        let (mut got, mut stalls, began) = (0, 0, Instant::now());
        loop {
            got += self.take_frames(wanted, AllocAmount::Less, runs);
            if got == wanted.pages {
                return;
            }
            let evicted = self.reclaim.reclaim_for(pool, wanted.at_a_time, wanted.locks);
            if evicted > 0 && wanted.locks == LockWait::Wait {
                continue;
            }
            let waits = got == 0 && need == FillUrgency::Asked && wanted.locks == LockWait::Wait;
            if !waits || stalls >= STALLS_MAX && !self.spill_brings_room(began) {
                break;
            }
            stalls += 1;
            self.writeback.ask_for_room();
            self.wait_for_fill_progress(mapping, || self.under_way(), completed);
            (_, completed) = self.under_way();
        }
        // Once more, for what the last look brought.
        self.take_frames(wanted, AllocAmount::Less, runs);
    }

    /// Frames for those of the wanted pages for which `runs` has none, in runs that are whole folios; how many.
    fn take_frames(&self, wanted: WantedFrames<'_>, amount: AllocAmount, runs: &mut Vec<FrameRun>) -> u32 {
        let WantedFrames { gaps, align, locks, .. } = wanted;
        let fit = FrameAlignment {
            runs: Orders { min: self.folio_orders.min, max: align.max(RUN_ORDER_MAX) },
            align,
        };
        self.arena.alloc_runs(gaps, fit, amount, locks, runs)
    }

    /// Fills and flushes that are in flight, and how many have ended: what of it holds pages that cannot go.
    fn under_way(&self) -> (u64, u64) {
        let ((flushes, flushed), (spills, spilled)) = (self.writeback.flushes(), self.spills());
        (self.in_flight() + flushes + spills, self.completed.load(Ordering::Relaxed) + flushed + spilled)
    }

    /// Pages on their way to the spill file, and folios whose way has ended.
    fn spills(&self) -> (u64, u64) {
        self.spill.as_ref().map_or((0, 0), |spill| spill.under_way())
    }

    /// The same, of a pool; whose the pages of a flush are is not known, so all of these count.
    fn under_way_for(&self, pool: PoolNumber) -> (u64, u64) {
        let ((fills, filled), (flushes, flushed)) = (self.reclaim.fills(pool), self.writeback.flushes());
        let (spills, spilled) = self.spills();
        (fills + flushes + spills, filled + flushed + spilled)
    }

    /// Whether folios on their way to the spill file are still waited for, by a thread that began at that moment:
    /// others may have been quicker to take what the last of them left.
    fn spill_brings_room(&self, began: Instant) -> bool {
        let is_well = |spill: &Arc<Spill>| spill.under_way().0 > 0 && spill.trouble().is_none();
        self.spill.as_ref().is_some_and(is_well) && began.elapsed() < self.writeback.options().wait_max
    }

    /// Whether what is in flight is still waited for on behalf of a pool, by a thread that began at that moment. A file
    /// that takes nothing always has flushes under way for it, because it asks for them: they are waited for so long
    /// and no longer.
    fn may_bring_room(&self, pool: PoolNumber, began: Instant) -> bool {
        let is_writing = || self.writeback.flushes().0 + self.spills().0 > 0;
        self.reclaim.fills(pool).0 > 0 || is_writing() && began.elapsed() < self.writeback.options().wait_max
    }

    /// Nothing can be evicted: what is in flight may be, once it has arrived. Waits for a fill or a flush to end after
    /// `completed` had, reaping what nobody else reaps; or a moment, if none is in flight: frames may be on
    /// their way between the arena and a tree. `fills` are those that count: how many are in flight, and how many have
    /// ended.
    fn wait_for_fill_progress(
        &self,
        mapping: &Mapping,
        fills: impl Fn() -> (u64, u64) + Sync,
        completed: u64,
    ) {
        // It may be in flight at another backend than ours, which nobody waits at: then we do, until anything ends.
        // For what is meant may be at a third.
        let (_, any) = self.under_way();
        let idle = self.reclaim.idle_backend().or_else(|| self.writeback.idle_backend());
        // One that is led now may be left the next moment, so a thread that has no device waits at another's: nobody
        // would ask it to lead nothing.
        let own = || match mapping.spill() {
            Some(spill) => Arc::clone(spill.backend()),
            None if mapping.is_memory() => self.reclaim.some_backend().unwrap_or_else(|| mapping.backend()),
            None => mapping.backend(),
        };
        let backend = idle.unwrap_or_else(own);
        backend.reap(ReapMode::Ready, &mut || false);
        if fills() == (0, completed) {
            std::thread::sleep(STALL);
        } else {
            let landed = |(in_flight, ended)| ended != completed || in_flight == 0;
            let looks_again = || self.under_way().1 != any;
            self.wait_queue.wait(&*backend, &mut || landed(fills()) || looks_again());
        }
    }

    /// Puts the runs of a window into the tree, as far as the file still goes, and frees what stays outside.
    /// `None` if the lock is busy and the caller does not wait.
    fn insert(
        &self,
        (pool, mapping): (PoolNumber, &Mapping),
        shape: FolioShape,
        runs: Vec<FillRun>,
        wait_policy: WaitPolicy,
        refaults: &mut Refaults,
    ) -> Option<AddedRuns> {
        // The file may have become shorter since the window was judged.
        let end = PageIndex(mapping.size_pages()).align_up(self.folio_orders.min);
        let (inside, beyond) = cut_at(runs, end);
        self.free_runs(&beyond);
        if inside.is_empty() {
            return Some(AddedRuns { inserted: inside, left: beyond, stop: RangeStop::All });
        }
        let consumed = &mut |frame, shadow| match shape.fate {
            FolioLifetime::Stays => self.note_refault(pool, frame, shadow, refaults),
            FolioLifetime::DropsBehind => {} // that an uncached read comes back says nothing
        };
        let added = match self.tuning.insertion {
            Insertion::Batched if !self.is_for_the_naive(&inside, shape.orders) => {
                mapping.add_window(&inside, shape, wait_policy.locks(), consumed)
            }
            _ => Some(one_by_one(mapping, &inside, shape, wait_policy.locks(), consumed)),
        };
        match &added {
            Some(added) => self.free_runs(&added.left),
            None => self.free_runs(&inside),
        }
        added
    }

    /// Places in the rings for the folios that `runs` become, the smallest that they can be; none are needed where
    /// the mapping has no rings. `None`: there is no cell for them.
    pub(super) fn promise_places(
        &self,
        mapping: &Mapping,
        runs: &[FillRun],
        wait_policy: WaitPolicy,
    ) -> Option<ListReservation<'_>> {
        if mapping.lists().is_none() {
            return Some(self.reclaim.lists().empty_reservation(PoolNumber::DEFAULT));
        }
        let pages: u32 = runs.iter().map(|run| run.pages).sum();
        self.reclaim.lists().reserve(pages >> self.folio_orders.min.0, wait_policy.locks())
    }

    /// Lists the folios of `runs`, which were just inserted into `mapping`: a memory file's that stay where nobody
    /// judges them, and all others as [`Filemap::list`] does.
    pub(crate) fn list_new(
        &self,
        mapping: &Mapping,
        runs: &[FillRun],
        window: Window,
        shape: FolioShape,
        promise: ListReservation<'_>,
    ) {
        if mapping.backing() != Backing::Kept {
            return self.list(runs, window, shape, promise);
        }
        let heads =
            |&run: &FillRun| folios_in(self.arena.view(), run).map(move |(page, _)| run.frame.plus(page));
        self.reclaim.list_kept(runs.iter().flat_map(heads), promise);
    }

    /// Lists the folios of `runs`, which were just inserted. Their frames are still theirs: the fills hold them, and
    /// are not submitted. One that was dropped behind another uncached reader meanwhile is not listed any more.
    pub(super) fn list(
        &self,
        runs: &[FillRun],
        window: Window,
        shape: FolioShape,
        promise: ListReservation<'_>,
    ) {
        if promise.entries() == 0 {
            return;
        }
        let folios = runs.iter().flat_map(|&run| {
            folios_in(self.arena.view(), run).map(move |(page, order)| {
                let index = run.index.plus(u64::from(page));
                (run.frame.plus(page), completion_of(index, order, window, shape))
            })
        });
        self.reclaim.list(folios, promise);
    }

    /// A fill for each run of locked folios, which counts as in flight from here on.
    fn add_fills(&self, batch: &Arc<WindowFills>, runs: &[FillRun], fills: &mut Vec<Fill>) {
        self.in_flight.fetch_add(runs.len() as u64, Ordering::Relaxed);
        self.reclaim.fills_begin(batch.pool, runs.len() as u64);
        let requests = runs.iter().map(|&run| {
            let bytes = self.arena.view().bytes(run.frame).expect("a run of ours exists");
            let buffer = NonNull::new(bytes).expect("no frame is at address 0");
            let sink = Arc::clone(batch) as Arc<dyn FillSink>;
            // SAFETY: the run's folios are locked by us, with a hold until `fill_completed`, so their
            // frames are this fill's alone; the batch keeps the arena alive.
            unsafe { Fill::new(run, buffer, sink) }
        });
        match fills.is_empty() {
            true => *fills = requests.collect(), // of just that length
            false => fills.extend(requests),
        }
    }

    pub(super) fn free_runs(&self, runs: &[FillRun]) {
        for run in runs {
            self.arena.free_run(run.frame, run.pages);
        }
    }

    /// There is no cell for a node or a chunk: the caller looks again if one can be made.
    fn nodes_ran_out(&self, pool: PoolNumber, wait_policy: WaitPolicy) -> FillOutcome {
        let made = wait_policy == WaitPolicy::Wait && self.make_nodes(pool);
        if made { FillOutcome::Nothing } else { FillOutcome::NoMemory }
    }

    /// Takes cells from those who only keep them, mappings and rings; then forgets and evicts until one can be
    /// had; whether one can. Nodes that only remember go first, then scattered folios (and what they leave, at the next
    /// turn), then whole extents of them.
    pub(super) fn make_nodes(&self, pool: PoolNumber) -> bool {
        self.reclaim.collect_spare_nodes();
        self.reclaim.lists().give_back();
        for attempt in 0..8 {
            let scattered = attempt < 4;
            let mut freed = self.reclaim.forget_nodes(FORGET_NODES, LockWait::Wait) as u32;
            if freed == 0 {
                freed = if scattered {
                    self.reclaim.reclaim_for(pool, RECLAIM_PAGES, LockWait::Wait)
                } else {
                    let protection = if attempt < 6 { Protection::Kept } else { Protection::Ignored };
                    self.reclaim.reclaim_extent(protection)
                };
            }
            if let Some(cell) = self.arena.alloc_cell() {
                self.arena.free_cell(cell);
                return true;
            }
            if freed == 0 && attempt == 7 {
                return false;
            }
        }
        false
    }
}

/// Fills of one file that go to the device together. From the first insertion until then invalidation is held
/// off. If they never go, each ends with an error.
#[derive(Debug)]
pub(super) struct SubmitBatch<'m> {
    mapping: &'m Arc<Mapping>,
    /// Whose pages they are.
    pool: PoolNumber,
    /// Where it is noted what they make, if that is dropped behind their reader.
    behind: Option<&'m DropBehindState>,
    fills: Vec<Fill>,
    held_off: Option<RankedReadGuard<'m, Version>>,
}

impl<'m> SubmitBatch<'m> {
    /// None yet, for a reader of `pool`; with `behind`, of an uncached read.
    pub fn of(mapping: &'m Arc<Mapping>, pool: PoolNumber, behind: Option<&'m DropBehindState>) -> Self {
        Self { mapping, pool, behind, fills: Vec::new(), held_off: None }
    }

    /// How long what they make is to stay.
    pub fn fate(&self) -> FolioLifetime {
        if self.behind.is_some() { FolioLifetime::DropsBehind } else { FolioLifetime::Stays }
    }

    /// Whose they are.
    pub fn mapping(&self) -> &'m Arc<Mapping> {
        self.mapping
    }

    /// Holds invalidation off from now on; `None` if that would need waiting and the caller does not wait.
    fn hold_off(&mut self, wait_policy: WaitPolicy) -> Option<()> {
        if self.held_off.is_none() {
            self.held_off = match wait_policy.locks() {
                LockWait::Wait => Some(self.mapping.hold_off_invalidation()),
                LockWait::Try => self.mapping.try_hold_off_invalidation(),
            };
        }
        self.held_off.as_ref().map(|_| ())
    }

    /// Whether `page` is among what they bring.
    fn brings(&self, page: PageIndex) -> bool {
        let covers = |run: FillRun| run.index <= page && page < run.index.plus(u64::from(run.pages));
        self.fills.iter().any(|fill| covers(fill.run()))
    }

    /// Gives them to the device, in one call. Waits for none of them; but a single small one, of which the caller
    /// waits for a page next, may be filled here.
    pub fn submit(mut self, next: AfterSubmit) {
        // A backend may complete inside the call, and a waker, a stranger's, may want what we hold.
        let wakes = DeferredWakes::new();
        self.end_behind_device();
        let backend = self.mapping.backend();
        let mut alone = None;
        match next {
            _ if self.fills.is_empty() => {}
            AfterSubmit::Reap(page) if self.brings(page) && self.is_for_reader() => alone = self.fills.pop(),
            AfterSubmit::Reap(page) if self.brings(page) => backend.submit_with_reap(self.fills),
            AfterSubmit::Reap(_) | AfterSubmit::Anything => backend.submit(self.fills),
        }
        // In flight from here on: what invalidation takes out of the tree is filled for those who hold it.
        drop(self.held_off);
        if let Some(fill) = alone {
            backend.fill_here(fill);
        }
        drop(wakes);
    }

    /// Whether they are one, and better made by its reader.
    fn is_for_reader(&self) -> bool {
        matches!(&self.fills[..], [fill] if self.mapping.backend().fills_here(fill.len()))
    }

    /// Ends the fills that begin where the file, as it is kept, has ended: what was written there and is not cached
    /// would have made it longer before it left, so there are zeros. It is looked at when the folios are in the tree:
    /// a flush of such a page has raised that end before the page could leave its place to ours.
    fn end_behind_device(&mut self) {
        if self.mapping.writes_by().is_some() {
            let end = self.mapping.size_on_device();
            let behind = self.fills.extract_if(.., |fill| fill.position() >= end);
            behind.for_each(|fill| fill.complete(Ok(0)));
        }
    }
}

/// How the folio of `order` at `index` came, which was made for `window` in that shape.
fn completion_of(index: PageIndex, order: Order, window: Window, shape: FolioShape) -> policy::FetchOrigin {
    match () {
        () if shape.fate == FolioLifetime::DropsBehind => policy::FetchOrigin::Uncached,
        () if window.stream.is_some() => policy::FetchOrigin::Stream,
        () if shape.wanted.meets(index, order.pages()) => policy::FetchOrigin::Asked,
        () => policy::FetchOrigin::Ahead,
    }
}

pub(super) fn pages_of(runs: &[FillRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.pages)).sum()
}

/// Adds to `gaps` what of `window` no folio covers, as (first page, pages).
fn add_gaps(gaps: &mut Vec<(PageIndex, u32)>, guard: &MappingGuard<'_>, window: Window) {
    let end = window.start.plus(u64::from(window.pages));
    let mut from = window.start;
    while let Some((first, pages)) = guard.next_gap(from, end) {
        gaps.push((first, pages as u32));
        from = first.plus(pages);
    }
}

/// Cuts the last of `gaps` off, until they are `pages` pages.
fn cut_short(gaps: &mut Vec<(PageIndex, u32)>, pages: u32) {
    let mut left = pages;
    for (_, gap) in gaps.iter_mut() {
        *gap = left.min(*gap);
        left -= *gap;
    }
    gaps.retain(|(_, pages)| *pages > 0);
}

/// Cuts `frames` to the gaps they are for: both in order, and the last gaps go without if frames are few.
pub(super) fn deal_out(gaps: &[(PageIndex, u32)], frames: &[FrameRun]) -> Vec<FillRun> {
    let mut runs = Vec::with_capacity(gaps.len() + frames.len());
    let mut frames = frames.iter().copied();
    let mut rest = FrameRun { frame: Frame(0), pages: 0 };
    for &(mut index, mut pages) in gaps {
        while pages > 0 {
            if rest.pages == 0 {
                let Some(next) = frames.next() else { return runs };
                rest = next;
            }
            let taken = rest.pages.min(pages);
            runs.push(FillRun { index, frame: rest.frame, pages: taken });
            (index, pages) = (index.plus(u64::from(taken)), pages - taken);
            rest = FrameRun { frame: rest.frame.plus(taken), pages: rest.pages - taken };
        }
    }
    debug_assert_eq!(rest.pages, 0, "no more frames were taken than there are gaps");
    runs
}

/// What of `runs` lies before `end`, and what at or behind it.
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

impl Filemap {
    /// Whether `runs` are one folio of the smallest order, which goes the naive way if there is one to compare with.
    fn is_for_the_naive(&self, runs: &[FillRun], orders: Orders) -> bool {
        let is_one = matches!(runs, [run] if run.pages == orders.min.pages());
        self.tuning.descent == Descent::Naive && is_one
    }
}

/// Inserts `runs` in the folios that a batch would make of them, each under a lock of its own: what batches are
/// measured against.
fn one_by_one(
    mapping: &Mapping,
    runs: &[FillRun],
    shape: FolioShape,
    locks: LockWait,
    consumed: ShadowObserver<'_>,
) -> AddedRuns {
    let mut done = AddedRuns { inserted: Vec::new(), left: Vec::new(), stop: RangeStop::All };
    for &run in runs {
        let mut rest = run;
        for (_, order) in folios_of(run, shape.orders) {
            let (one, behind) = cut(rest, order.pages());
            let folio = NewFolio { index: one.index, frame: one.frame, order };
            match mapping.add_folio_watched(folio, shape, locks, &mut || {}) {
                AddedFolio::Added { shadow } => {
                    shadow.into_iter().for_each(|shadow| consumed(one.frame, shadow));
                    push_or_join(&mut done.inserted, one);
                }
                AddedFolio::Present => done.left.push(one),
                AddedFolio::NoNode => {
                    done.left.push(one);
                    done.stop = RangeStop::NoNode;
                }
            }
            rest = behind;
        }
    }
    done
}

/// Adds `run` to the last of `runs` if it continues that one, as far as one request goes.
fn push_or_join(runs: &mut Vec<FillRun>, run: FillRun) {
    match runs.last_mut() {
        Some(last)
            if last.index.plus(u64::from(last.pages)) == run.index
                && last.frame.plus(last.pages) == run.frame
                && last.pages + run.pages <= RUN_ORDER_MAX.pages() =>
        {
            last.pages += run.pages;
        }
        _ => runs.push(run),
    }
}

/// The fills of one window, and what went wrong with them.
pub(crate) struct WindowFills {
    filemap: Arc<Filemap>,
    mapping: Arc<Mapping>,
    pool: PoolNumber,
    /// The first of its runs.
    first: FillRun,
    failures: Mutex<Vec<(FillRun, io::Error)>>,
    refaults: Refaults,
}

impl WindowFills {
    fn new(
        filemap: Arc<Filemap>,
        mapping: Arc<Mapping>,
        pool: PoolNumber,
        first: FillRun,
        refaults: Refaults,
    ) -> Self {
        Self { filemap, mapping, pool, first, failures: Mutex::default(), refaults }
    }

    /// Where the folio is likely to begin that covers `index`: a hint, right for the first of the window.
    pub(crate) fn likely_frame(&self, index: PageIndex) -> Frame {
        let page = index.0.wrapping_sub(self.first.index.0).min(u64::from(self.first.pages));
        self.first.frame.plus(page as u32)
    }

    /// Whether a folio of this window had been in the working set and was evicted not long ago: whoever
    /// waits for it waits for want of memory.
    pub(crate) fn refaulted(&self) -> bool {
        self.refaults.working_set > 0
    }

    /// The error that kept `index` from being filled, if there was one. Asked once.
    pub(crate) fn take_failure(&self, index: PageIndex) -> Option<io::Error> {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let covers = |run: &FillRun| index.0.wrapping_sub(run.index.0) < u64::from(run.pages);
        let place = failures.iter().position(|(run, _)| covers(run))?;
        Some(failures.swap_remove(place).1)
    }

    /// What of the run holds the file's bytes: takes the rest out of the tree.
    fn settle(&self, run: FillRun, result: io::Result<usize>) -> FillCompletion {
        let counters = &self.filemap.counters;
        let wanted = run.pages as usize * PAGE_SIZE;
        let is_zeros = matches!(result, Ok(0)) && self.mapping.writes_by().is_some();
        let (came, bytes) = match result {
            Ok(bytes) => (FillCompletion::Before(self.reaches(run, bytes.min(wanted))), bytes.min(wanted)),
            Err(error) => {
                counters.add(Count::DeviceErrors, 1);
                self.failures.lock().unwrap_or_else(PoisonError::into_inner).push((run, error));
                let landed = self.filemap.arena.view().count_pages_read(run.frame, run.pages);
                (FillCompletion::Landed, landed as usize * PAGE_SIZE)
            }
        };
        counters.add_all([(Count::DeviceReads, u64::from(!is_zeros)), (Count::DeviceBytes, bytes as u64)]);
        if came != FillCompletion::Before(wanted) {
            let mut guard = self.mapping.lock();
            // The file ends here: first its size, then the pages that may be looked at. But what a fill
            // found that was let go meanwhile says nothing of the file as it is now.
            if let FillCompletion::Before(bytes) = came
                && self.mapping.writes_by().is_none()
                && guard.holds_run(run)
            {
                self.mapping.shrink_size(run.index.first_byte() + bytes as u64);
            }
            let gone = guard.remove_failed(run, |page, order| self.is_complete(came, run, page, order));
            let why = if came == FillCompletion::Landed { Count::Failed } else { Count::Undelivered };
            counters.add(why, gone);
        }
        came
    }

    /// How many bytes of a run hold the file's, of which the device had `bytes`, and the rest is zeros. A file that is
    /// written here reaches as far as we say, also where the device does not know it yet.
    fn reaches(&self, run: FillRun, bytes: usize) -> usize {
        if self.mapping.writes_by().is_none() {
            return bytes;
        }
        let (inside, wanted) =
            (self.mapping.size().saturating_sub(run.index.first_byte()), run.pages as usize);
        bytes.max(inside.min((wanted * PAGE_SIZE) as u64) as usize)
    }

    /// Whether the folio of `order` at the `page`th page of a run that ended so has come as a whole.
    fn is_complete(&self, came: FillCompletion, run: FillRun, page: u32, order: Order) -> bool {
        match came {
            FillCompletion::Before(end) => (page as usize * PAGE_SIZE) < end,
            FillCompletion::Landed => {
                let view = self.filemap.arena.view();
                view.run_read(run.frame.plus(page), order.pages()) == order.pages()
            }
        }
    }

    /// The folios of a run that is being filled, as (page of the run, order).
    fn folios(&self, run: FillRun) -> impl Iterator<Item = (u32, Order)> {
        folios_in(self.filemap.arena.view(), run)
    }
}

/// The folios of a run that was inserted, as (page of the run, order).
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

/// What of a run has come when its fill has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FillCompletion {
    /// So many bytes, which is all that the file has. What follows them in the last page's folio is zeroes, or
    /// pages that arrived when the file was longer; nobody is shown them.
    Before(usize),
    /// What had arrived before something failed.
    Landed,
}

impl FillSink for WindowFills {
    fn fill_completed(&self, run: FillRun, result: io::Result<usize>) {
        let came = self.settle(run, result);
        let view = self.filemap.arena.view();
        let mut free: Vec<(Frame, Order)> = Vec::new();
        for (page, order) in self.folios(run) {
            let frame = run.frame.plus(page);
            let completed = view.own(frame).complete(self.is_complete(came, run, page, order));
            if let FillEnd::Detached(PutOutcome::Last(order)) = completed {
                free.push((frame, order));
            }
        }
        self.filemap.arena.free_all(&free);
        self.filemap.completed.fetch_add(1, Ordering::Relaxed);
        self.filemap.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.filemap.reclaim.fill_ends(self.pool);
        let first = PageKey { mapping: self.mapping.id(), page: run.index };
        self.filemap.wait_queue.wake_filled(first, run.pages);
    }

    fn pages_read(&self, run: FillRun, pages: Range<u32>) {
        let view = self.filemap.arena.view();
        for (page, order) in self.folios(run) {
            if page < pages.end && pages.start < page + order.pages() {
                view.own(run.frame.plus(page)).note_landed();
            }
        }
        view.set_pages_read(run.frame.plus(pages.start), pages.end - pages.start);
    }

    fn wake_readers(&self, run: FillRun, pages: Range<u32>) {
        let first = PageKey { mapping: self.mapping.id(), page: run.index.plus(u64::from(pages.start)) };
        self.filemap.wait_queue.wake_filled(first, pages.end - pages.start);
    }
}

impl std::fmt::Debug for WindowFills {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("mapping", &self.mapping.id()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use crate::arena::ArenaOptions;
    use crate::backend::{Attributes, Backend, MemoryFile};
    use crate::sys::fork::ForkGuard;
    use crate::units::MappingId;

    use super::*;

    /// A file that counts what was left to a reap.
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

    /// 1 R misses page 0, and is about to fetch pages 0 to 3.
    /// 2 Others bring page 0 meanwhile, and it lands.
    /// 3 R inserts pages 1 to 3; W finds page 2 on its way, sees nothing in flight, and sleeps.
    /// 4 R leaves its fills to the reap that comes with its wait; but it need not wait, and does not reap.
    /// 5 W sleeps until somebody else happens to read.
    #[test]
    fn a_fill_is_left_to_a_reap_only_if_the_reap_comes_for_sure() {
        let file = MemoryFile::new(vec![7; 64 * PAGE_SIZE]);
        let leaving = Arc::new(ReapBacklog { file, left: AtomicUsize::new(0) });
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let wait_queue = Arc::new(WaitQueue::new());
        let orders = Orders { min: Order(0), max: Order(9) };
        let filemap = Arc::new(Filemap::new(Arc::clone(&arena), wait_queue, orders, Tuning::default()));
        let (id, backend) = (MappingId(1), Arc::clone(&leaving) as Arc<dyn Backend>);
        let known = leaving.attributes().unwrap();
        let mapping = Mapping::new(arena, id, backend, &known, ForkGuard::new(), Tuning::default());
        let mapping = Arc::new(mapping.unwrap());
        let fetch = |first: u64, pages: u32, next| {
            let (window, wanted) =
                (Window::exact(PageIndex(first), pages), PageIndex(first)..PageIndex(first));
            let before = leaving.left.load(Ordering::Relaxed);
            let mut together = SubmitBatch::of(&mapping, PoolNumber::DEFAULT, None);
            let filled =
                filemap.insert_window(&mut together, window, wanted, FillUrgency::Asked, WaitPolicy::Wait);
            together.submit(next);
            assert!(matches!(filled, FillOutcome::Submitted(_)), "{filled:?}");
            leaving.left.load(Ordering::Relaxed) - before
        };
        let page = PageIndex;
        assert_eq!(fetch(0, 1, AfterSubmit::Anything), 0);
        assert_eq!(fetch(0, 4, AfterSubmit::Reap(page(0))), 0, "page 0 was brought by others");
        assert_eq!(fetch(10, 4, AfterSubmit::Reap(page(12))), 1, "page 12 is among what is submitted");
        assert_eq!(fetch(20, 4, AfterSubmit::Reap(page(24))), 0, "page 24 is not");
    }
}

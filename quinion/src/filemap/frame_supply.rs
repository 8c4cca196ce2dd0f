//! Frame supply: frames for the pages of a window, and a charge of the reader's pool for them.
//!
//! ```text
//!   gaps       (first page, pages) of uncached ranges
//!   charge     the pool's, for all of them; at its limit the pool evicts of its own, then the gaps are cut short
//!   frames     all of them in one hold of the arena's lock
//!              none or too few: reclaim, then once more
//!              still too few: in pieces, evicting and waiting for what is in flight, as many as memory allows
//! ```
//!
//! Frames are taken only for pages that are not cached, all or none: a window for which there is no memory takes none
//! from others while it reclaims. Only the first missing page of a read is worth waiting for memory
//! ([`FillUrgency::Asked`]): for the end of a fill, a flush or a spill, after which its pages can go.
//!
//! **An uncached reader** spares the pages of others. Uncached pages displace others only up to an eighth of the cache,
//! or of their pool's limit; beyond that a window is as large as the free memory allows, and a small one ahead is left
//! out. But a read that waits gets 64 KiB: pages of uncached reads are evicted for it, then those of others. A reader
//! that does not wait even for locks gets the frames that are free without evicting.
//!
//! Invariants:
//!  1. Frames and charge that are returned are for the same pages: the first of the gaps, as many as could be had.
//!  2. Nothing is waited for but locks, unless the urgency is `Asked` and the first page has no frame yet.
//!  3. A wait for memory ends as this table says. Its time begins anew with each page that comes in for another thread:
//!     where others get memory, there is some. `wait_max` is how long a writer is held up at most; the hang time is the
//!     same, but [`HANG_MIN`] at least.
//!
//! | waits for | how long | ends with |
//! |---|---|---|
//! | a fill, a flush or a spill in flight | until it ends, at most for the hang time while no page comes in | another look; an error if all memory is pinned or in flight at such devices |
//! | requests that seem to hang: none has begun or ended for the hang time | not at all, once one wait has found that | an error, until one begins or ends |
//! | fills of the device that the missing page is on | as long as they last: the reader waits for that device in any case, and they may free memory | another look; no error, however late the device is |
//! | a folio that another thread holds, or has locked and not pinned | `wait_max`, since a thread may not run for long while it copies; not at all where requests seem to hang, whose folios look alike | another look |
//! | a look before a flush | `wait_max`, once for each hang of a device | another look |
//! | for a charge: a dirty page whose write-back is requested | until it is written; not at all if its device hangs | another look |
//! | for a charge: pages that others of the pool are charged for and have not inserted yet | until they insert them | another look |
//! | none of these: all memory is pinned | [`STALLS_MAX`] waits in a row in which no page came in | an error |
//!
//!  4. Memory that comes free is noticed within [`RETRY_WAIT_MAX`], whatever is in flight.
//!
//! Not an invariant: that frames which others have and have not inserted are waited for.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::arena::{AllocAmount, AllocRequest, Arena, FrameAlignment, FrameRun, Gap};
use crate::backend::{FillRun, ReapMode, WaitQueue, pause};
use crate::background::BackgroundThread;
use crate::lists::{Charge, ListReservation};
use crate::mapping::Mapping;
use crate::readahead::Window;
use crate::reclaim::{PassedStream, Protection, Reclaim};
use crate::spill::Spill;
use crate::sync::LockWait;
use crate::units::{Frame, Order, Orders, PoolNumber};
use crate::writeback::Writeback;

use super::wait_policy::WaitPolicy;

const FORGET_NODES: u64 = 64;
/// log2 of pages, 1 MiB; a folio may be larger.
pub(super) const RUN_ORDER_MAX: Order = Order(8);
/// Evicted at a time, so that neighbouring frames are freed together; of a small cache one part in so many, since free
/// frames cache nothing: a cache of 2,000 pages that freed 256 at a time hit as one of 1,870.
const RECLAIM_PAGES: u32 = 256;
const RECLAIM_SHARE: u64 = 64;
/// Waits in a row in which nothing came in, until memory counts as pinned.
const STALLS_MAX: u32 = 100;
/// The most of its pool's limit that a window takes, as 1 / so many.
const WINDOW_SHARE: u64 = 4;
/// The most that uncached reads take from others, as 1 / so many of the cache, or of their pool's limit.
const UNCACHED_SHARE: u64 = 8;
/// Pages of its request that an uncached reader gets in any case, from any pool.
const UNCACHED_LEAST: u32 = 16;
const STALL: Duration = Duration::from_millis(1);
/// The longest wait for fills and flushes in flight before memory is looked for again, at first and after many looks in
/// vain: pins may be dropped meanwhile, and a fill may never end.
const RETRY_WAIT: Duration = Duration::from_millis(20);
const RETRY_WAIT_MAX: Duration = Duration::from_millis(160);
/// Requests in flight are not taken to hang before that, however short writers are held up: the device may be slow.
const HANG_MIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FillUrgency {
    /// The caller will wait for it: worth waiting for memory.
    Asked,
    Ahead,
    Hinted,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FrameRequest<'r> {
    pub mapping: &'r Mapping,
    pub pool: PoolNumber,
    /// Has the order of its folios, and the pages that its stream has passed and can lose.
    pub window: Window,
    pub urgency: FillUrgency,
    /// The announced window of an uncached reader.
    pub reservation: Option<&'r UncachedReservation<'r>>,
    /// Whether locks, and with them memory, may be waited for.
    pub locks: LockWait,
}

#[derive(Debug)]
pub(super) struct SuppliedFrames<'s> {
    /// A charge of as many pages as `runs`; of none where pages have their places.
    pub charge: Charge<'s>,
    /// Never empty: it begins with the first page of the first gap.
    pub runs: Vec<FillRun>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NoFrames {
    NoMemory,
    PoolFull,
    /// Another thread has brought the page to its place meanwhile.
    Present,
    Busy,
}

#[derive(Debug)]
pub(crate) struct FrameSupply {
    pub(super) arena: Arc<Arena>,
    wait_queue: Arc<WaitQueue>,
    pub(crate) reclaim: Reclaim,
    pub(crate) writeback: Arc<Writeback>,
    pub(crate) spill: Option<Arc<Spill>>,
    pub(crate) background: BackgroundThread,
    pub(super) in_background: bool,
    pub(crate) folio_orders: Orders,
    /// Pages of the windows that uncached reads have announced.
    uncached_coming: AtomicU64,
    /// The requests in flight, as a thread that waits for memory saw them last.
    in_flight_seen: Mutex<InFlightSnapshot>,
}

/// The requests in flight when a thread that waits for memory looked, and since when there are these.
#[derive(Clone, Copy, Debug)]
struct InFlightSnapshot {
    in_flight: u64,
    /// How many have ended: with one that begins or ends, one of the two counts is another.
    ended: u64,
    since: Instant,
}

impl InFlightSnapshot {
    fn none() -> Self {
        Self { in_flight: 0, ended: 0, since: Instant::now() }
    }

    /// Whether some are in flight, and none has begun or ended for as long as `hang_time`.
    fn hangs(&mut self, in_flight: u64, ended: u64, hang_time: Duration) -> bool {
        if (self.in_flight, self.ended) != (in_flight, ended) {
            *self = Self { in_flight, ended, since: Instant::now() };
        }
        in_flight > 0 && self.since.elapsed() >= hang_time
    }
}

#[derive(Clone, Copy, Debug)]
struct WantedFrames<'g> {
    /// Ranges of pages that want frames.
    gaps: &'g [Gap],
    pages: u32,
    align: Order,
    /// Pages evicted at a time, under pressure.
    at_a_time: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ShortageScope {
    Cache,
    Pool,
}

/// A thread that waits for memory, from its first look until it gets some: each wait follows a look that found none.
pub(super) struct ShortageWait<'s> {
    supply: &'s FrameSupply,
    mapping: &'s Mapping,
    /// Whose charge it waits for; `None`: for memory that any pool may have.
    pool: Option<PoolNumber>,
    /// When it began, or others got memory last.
    began: Instant,
    stalls: u32,
    /// How long the next wait is for what may never end.
    retry_wait: Duration,
    /// Pages that had come in by the last wait.
    inserted: Option<u64>,
    /// The state at the last look. The count of completed work was read first: a thread may pass from one state that
    /// counts to the next between two looks at them.
    completed: u64,
    inserted_before: u64,
    in_use: u64,
    was_charged: bool,
}

#[derive(Clone, Copy, Debug)]
struct Shortfall {
    pool: PoolNumber,
    within: ShortageScope,
    pages: u32,
    least: u32,
    locks: LockWait,
}

/// The gaps of a window of an uncached read.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnnouncedWindow<'g> {
    pub gaps: &'g [Gap],
    /// Whether the reader waits for the first of it.
    pub is_asked: bool,
}

/// A window of an uncached read, until it is listed or refused.
#[derive(Debug)]
pub(super) struct UncachedReservation<'f> {
    supply: &'f FrameSupply,
    pages: Cell<u64>,
    is_asked: bool,
}

impl<'f> UncachedReservation<'f> {
    pub(super) fn of(supply: &'f FrameSupply, announced: AnnouncedWindow<'_>) -> Self {
        let AnnouncedWindow { gaps, is_asked } = announced;
        let pages = gaps.iter().map(|gap| u64::from(gap.pages)).sum();
        supply.uncached_coming.fetch_add(pages, Ordering::Relaxed);
        Self { supply, pages: Cell::new(pages), is_asked }
    }

    fn has_enough(&self, pages: u32, least: u32) -> bool {
        pages >= least || self.is_asked && pages > 0
    }

    /// Whether it may evict from others for its first page.
    fn may_evict_others(&self, locks: LockWait) -> bool {
        self.is_asked && locks == LockWait::Wait
    }

    fn keep(&self, pages: u32) {
        let fewer = self.pages.get().saturating_sub(u64::from(pages));
        self.supply.uncached_coming.fetch_sub(fewer, Ordering::Relaxed);
        self.pages.set(self.pages.get() - fewer);
    }
}

impl Drop for UncachedReservation<'_> {
    fn drop(&mut self) {
        self.keep(0);
    }
}

impl FrameSupply {
    pub(super) fn new(
        arena: Arc<Arena>,
        wait_queue: Arc<WaitQueue>,
        reclaim: Reclaim,
        writeback: Arc<Writeback>,
        folio_orders: Orders,
    ) -> Self {
        Self {
            arena,
            wait_queue,
            reclaim,
            writeback,
            spill: None,
            background: BackgroundThread::new(),
            in_background: false,
            folio_orders,
            uncached_coming: AtomicU64::new(0),
            in_flight_seen: Mutex::new(InFlightSnapshot::none()),
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.reclaim.all_fills().0
    }

    pub(super) fn fills_begin(&self, pool: PoolNumber, fills: u64) {
        self.reclaim.fills_begin(pool, fills);
    }

    pub(super) fn fill_ends(&self, pool: PoolNumber) {
        self.reclaim.fill_ends(pool);
    }

    pub(super) fn orders_for(&self, window: Window) -> Orders {
        let Orders { min, max } = self.folio_orders;
        Orders { min, max: max.min(window.order.max(window.order_min)).max(min) }
    }

    /// Frames for the first of `gaps` at least, and a charge for as many pages. Pages that have their places get
    /// these, and a charge of nothing.
    pub(super) fn take(
        &self,
        request: &FrameRequest<'_>,
        mut gaps: Vec<Gap>,
    ) -> Result<SuppliedFrames<'_>, NoFrames> {
        if let Some(places) = request.mapping.backing().places() {
            return self.claim_places(request, places, &gaps);
        }
        let mut charge = self.charge(request, &mut gaps);
        if charge.pages() == 0 {
            return Err(NoFrames::PoolFull);
        }
        let frames = self.alloc_frames(request, &gaps);
        if frames.is_empty() {
            return Err(NoFrames::NoMemory);
        }
        charge.keep(frames.iter().map(|run| run.pages).sum());
        Ok(SuppliedFrames { charge, runs: deal_out(&gaps, &frames) })
    }

    /// A charge for the pages of `gaps`, which are cut short to it. A pool at its limit evicts of its own, a stream's
    /// passed pages first. Waits for the first of the pages, if the urgency says so and `locks` allows it.
    fn charge(&self, request: &FrameRequest<'_>, gaps: &mut Vec<Gap>) -> Charge<'_> {
        let &FrameRequest { mapping, pool, window, reservation, locks, .. } = request;
        let (unit, lists) = (self.folio_orders.min, self.reclaim.lists());
        let wanted = gaps.iter().map(|gap| gap.pages).sum();
        let mut charge = lists.charge(pool, wanted, unit);
        if charge.pages() == wanted {
            return charge; // always, where there is no limit
        }
        // A window as large as the pool would empty it for its own sake.
        let share = (lists.limit(pool) / WINDOW_SHARE).max(u64::from(unit.pages()));
        let mut wanted = wanted.min(share.try_into().unwrap_or(u32::MAX) & !(unit.pages() - 1));
        charge.keep(wanted);
        if let Some(passed) = window.stream {
            self.reclaim.reclaim_passed(
                PassedStream { pool, mapping, passed },
                wanted - charge.pages(),
                locks,
            );
            charge.grow(wanted, unit);
        }
        if let Some(coming) = reservation.filter(|_| charge.pages() < wanted) {
            let (least, lacking) = (self.uncached_least(wanted), wanted - charge.pages());
            let lack = Shortfall { pool, within: ShortageScope::Pool, pages: lacking, least, locks };
            let has = self.reclaim_for_uncached(lack, coming, || {
                charge.grow(wanted, unit);
                charge.pages()
            });
            wanted = if coming.has_enough(has, least) {
                has
            } else if coming.may_evict_others(locks) {
                least
            } else {
                0
            };
            charge.keep(wanted);
        }
        self.charge_slow(request, &mut charge, wanted);
        cut_short(gaps, charge.pages());
        charge
    }

    fn charge_slow(&self, request: &FrameRequest<'_>, charge: &mut Charge<'_>, wanted: u32) {
        let &FrameRequest { mapping, urgency, locks, .. } = request;
        let (pool, unit) = (charge.pool(), self.folio_orders.min);
        let mut shortage = self.shortage(mapping, Some(pool));
        while charge.pages() < wanted {
            shortage.prepare_to_wait();
            if self.reclaim.reclaim_in(pool, wanted - charge.pages(), locks) == 0 {
                charge.grow(wanted, unit); // others may have given something back
                let waits = charge.pages() == 0 && urgency == FillUrgency::Asked && locks == LockWait::Wait;
                if !waits || !shortage.wait() {
                    return;
                }
            }
            charge.grow(wanted, unit);
            if locks == LockWait::Try {
                return;
            }
        }
    }

    pub(crate) fn shrink_to_limit(&self, pool: PoolNumber) {
        let lists = self.reclaim.lists();
        loop {
            let over = lists.charged(pool).saturating_sub(lists.limit(pool)).min(u64::from(RECLAIM_PAGES));
            if over == 0 || self.reclaim.reclaim_in(pool, over as u32, LockWait::Wait) == 0 {
                return;
            }
        }
    }

    /// Frames for all the gaps, in one hold of the arena's lock, or with one reclaim in two: of pages that the stream's
    /// reader has passed, if possible. Under more pressure in pieces, as many as can be had.
    fn alloc_frames(&self, request: &FrameRequest<'_>, gaps: &[Gap]) -> Vec<FrameRun> {
        let &FrameRequest { mapping, pool, window, locks, .. } = request;
        let pages: u32 = gaps.iter().map(|gap| gap.pages).sum();
        let align = self.orders_for(window).max;
        let at_a_time = pages.max(self.reclaim_pages()).min(RECLAIM_PAGES);
        let wanted = WantedFrames { gaps, pages, align, at_a_time };
        let mut runs = Vec::new();
        if let Some(passed) = window.stream
            && self.is_low_for_stream(wanted.pages)
        {
            self.reclaim.reclaim_passed(PassedStream { pool, mapping, passed }, wanted.pages, locks);
        }
        if self.take_frames(wanted, AllocAmount::All, locks, &mut runs) > 0 {
            self.wake_background_reclaim(window);
            return runs;
        }
        if let Some(reservation) = request.reservation {
            return self.alloc_for_uncached(request, reservation, wanted, runs);
        }
        let some = match window.stream {
            // It takes from others only as many as it lacks now.
            Some(_) => self.lacking(pages),
            None => pages.max(self.reclaim_pages()),
        };
        let reclaimed = self.reclaim.reclaim_for(pool, some.max(1), locks);
        if reclaimed == 0 || self.take_frames(wanted, AllocAmount::All, locks, &mut runs) == 0 {
            self.alloc_frames_slow(request, wanted, &mut runs);
        }
        runs
    }

    fn reclaim_pages(&self) -> u32 {
        (self.arena.pages_max() / RECLAIM_SHARE).clamp(1, u64::from(RECLAIM_PAGES)) as u32
    }

    fn alloc_for_uncached(
        &self,
        request: &FrameRequest<'_>,
        coming: &UncachedReservation<'_>,
        wanted: WantedFrames<'_>,
        mut runs: Vec<FrameRun>,
    ) -> Vec<FrameRun> {
        let (least, locks, mut has) = (self.uncached_least(wanted.pages), request.locks, 0);
        let pages = self.lacking(wanted.pages).max(1);
        let lack = Shortfall { pool: request.pool, within: ShortageScope::Cache, pages, least, locks };
        self.reclaim_for_uncached(lack, coming, || {
            has += self.take_frames(wanted, AllocAmount::Less, locks, &mut runs);
            has
        });
        if coming.has_enough(has, least) {
            return runs;
        }
        // A fill that no reader asked for can wait, and leaves reclaim to others.
        runs.drain(..).for_each(|run| self.arena.free_run(run.frame, run.pages));
        if coming.may_evict_others(locks) {
            let mut gaps = wanted.gaps.to_vec();
            cut_short(&mut gaps, least);
            let wanted = WantedFrames { gaps: &gaps, pages: least, at_a_time: least, ..wanted };
            self.alloc_frames_slow(request, wanted, &mut runs);
        }
        runs
    }

    /// Makes room for an uncached read, until `take` returns enough pages. Waits only for locks.
    fn reclaim_for_uncached(
        &self,
        lack: Shortfall,
        coming: &UncachedReservation<'_>,
        mut take: impl FnMut() -> u32,
    ) -> u32 {
        let Shortfall { pool, within, pages, least, locks } = lack;
        let evict = |pages| match within {
            ShortageScope::Cache => self.reclaim.reclaim_for(pool, pages, locks),
            ShortageScope::Pool => self.reclaim.reclaim_in(pool, pages, locks),
        };
        // 1 Of others, within the share.
        let may = self.uncached_may_take(lack, coming).min(pages);
        if may > 0 {
            evict(may);
        }
        let mut has = take();
        if has >= least {
            return has;
        }
        // 2 Of uncached reads' pages.
        coming.keep(least);
        self.reclaim.reclaim_uncached(pool, least - has, locks);
        has = take();
        if has >= least || !coming.may_evict_others(locks) {
            return has;
        }
        // 3 From any pool.
        evict(least - has);
        take()
    }

    fn uncached_least(&self, pages: u32) -> u32 {
        UNCACHED_LEAST.max(self.folio_orders.min.pages()).min(pages)
    }

    fn lacking(&self, pages: u32) -> u32 {
        u64::from(pages).saturating_sub(self.arena.available_pages(LockWait::Try).unwrap_or(0)) as u32
    }

    /// Pages that uncached reads may still take from others. Announced windows in all pools count in full; so several
    /// at a time may get little for a moment, and not too much.
    fn uncached_may_take(&self, lack: Shortfall, coming: &UncachedReservation<'_>) -> u32 {
        let Shortfall { pool, within, locks, .. } = lack;
        let others = self.uncached_coming.load(Ordering::Relaxed).saturating_sub(coming.pages.get());
        let (whole, of) = match within {
            ShortageScope::Cache => (self.arena.pages_max(), None),
            ShortageScope::Pool => (self.reclaim.lists().limit(pool), Some(pool)),
        };
        let has = self.reclaim.uncached_pages(of, locks).map_or(u64::MAX, |pages| pages + others);
        (whole / UNCACHED_SHARE).saturating_sub(has).try_into().unwrap_or(u32::MAX)
    }

    /// Takes the frames there are, and reclaims for the rest as long as that brings some. For the first memory is
    /// waited for, if the urgency says so and `locks` allows it.
    fn alloc_frames_slow(
        &self,
        request: &FrameRequest<'_>,
        wanted: WantedFrames<'_>,
        runs: &mut Vec<FrameRun>,
    ) {
        let locks = request.locks;
        let (mut got, mut shortage) = (0, self.shortage(request.mapping, None));
        loop {
            shortage.prepare_to_wait();
            got += self.take_frames(wanted, AllocAmount::Less, locks, runs);
            if got == wanted.pages {
                return;
            }
            let evicted = self.reclaim.reclaim_for(request.pool, wanted.at_a_time, locks);
            if evicted > 0 && locks == LockWait::Wait {
                continue;
            }
            let waits = got == 0 && request.urgency == FillUrgency::Asked && locks == LockWait::Wait;
            if !waits || !shortage.wait() {
                break;
            }
        }
        // Once more, for the frames that the last look brought.
        self.take_frames(wanted, AllocAmount::Less, locks, runs);
    }

    /// Takes runs that are whole folios; returns how many pages.
    fn take_frames(
        &self,
        wanted: WantedFrames<'_>,
        amount: AllocAmount,
        locks: LockWait,
        runs: &mut Vec<FrameRun>,
    ) -> u32 {
        let WantedFrames { gaps, align, .. } = wanted;
        let fit = FrameAlignment {
            runs: Orders { min: self.folio_orders.min, max: align.max(RUN_ORDER_MAX) },
            align,
        };
        self.arena.alloc_runs(AllocRequest { gaps, fit, amount, locks }, runs)
    }

    /// Fills and flushes in flight, whose pages cannot go yet, and how many have ended.
    fn under_way(&self) -> (u64, u64) {
        let ((fills, filled), (flushes, flushed)) = (self.reclaim.all_fills(), self.writeback.under_way());
        let (spills, spilled) = self.spills();
        (fills + flushes + spills, filled + flushed + spilled)
    }

    /// How long a thread that needs memory waits for what is in flight while no page comes in.
    fn hang_time(&self) -> Duration {
        self.writeback.options().wait_max.max(HANG_MIN)
    }

    /// Whether all requests in flight seem to hang: as seen by threads that wait for memory, none has begun or ended
    /// for the hang time.
    fn hangs(&self) -> bool {
        let mut seen = self.in_flight_seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (in_flight, ended) = self.under_way();
        seen.hangs(in_flight, ended, self.hang_time())
    }

    /// Pages in flight to the spill file, and how many folios have ended.
    fn spills(&self) -> (u64, u64) {
        self.spill.as_ref().map_or((0, 0), |spill| spill.under_way())
    }

    /// As [`Self::under_way`]; a flush's pool is not known, so all flushes count.
    fn under_way_for(&self, pool: PoolNumber) -> (u64, u64) {
        let ((fills, filled), (flushes, flushed)) = (self.reclaim.fills(pool), self.writeback.under_way());
        let (spills, spilled) = self.spills();
        (fills + flushes + spills, filled + flushed + spilled)
    }

    /// A wait for memory that is short, for a page of `mapping`: a charge of `pool`, or whatever any pool has.
    pub(super) fn shortage<'s>(&'s self, mapping: &'s Mapping, pool: Option<PoolNumber>) -> ShortageWait<'s> {
        let (began, inserted) = (Instant::now(), None);
        let (stalls, completed, inserted_before, in_use, was_charged) = (0, 0, 0, 0, false);
        ShortageWait {
            supply: self,
            mapping,
            pool,
            began,
            stalls,
            retry_wait: RETRY_WAIT,
            inserted,
            completed,
            inserted_before,
            in_use,
            was_charged,
        }
    }

    /// Places in the rings for the smallest folios of `runs`, if the mapping has rings. `None`: no cell.
    pub(super) fn reserve_list_entries(
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

    pub(super) fn free_runs(&self, runs: &[FillRun]) {
        for run in runs {
            self.arena.free_run(run.frame, run.pages);
        }
    }

    /// Takes unused cells back from mappings and rings, then forgets and evicts until one can be had; returns
    /// whether. Nodes that only remember go first, then scattered folios, then whole extents of them.
    pub(crate) fn make_nodes(&self, pool: PoolNumber) -> bool {
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

impl ShortageWait<'_> {
    /// Notes the state before a look for memory, for the wait that follows it.
    pub(super) fn prepare_to_wait(&mut self) {
        (_, self.completed) = self.under_way();
        self.in_use = self.supply.reclaim.in_use(self.pool);
        self.inserted_before = self.supply.reclaim.inserted(self.pool);
        self.was_charged = self.is_charged();
    }

    /// Waits until memory may have come free since that look. `false`, at once or after a wait: there is none to wait
    /// for. The caller has no fills in hand, and no lock that their end takes.
    fn wait(&mut self) -> bool {
        let inserted = self.supply.reclaim.inserted(self.pool);
        if self.inserted.replace(inserted) != Some(inserted) {
            (self.stalls, self.began) = (0, Instant::now()); // others have got memory: they were faster
        }
        let is_late = self.began.elapsed() >= self.supply.hang_time();
        // Each wait looks at it, so that the next need knows.
        let hangs = self.supply.hangs();
        let mut in_flight = InFlightState::MayEnd;
        if (is_late || hangs) && self.has_own_device_in_flight() {
            self.began = Instant::now(); // when that has ended, there may be memory
        } else if is_late || hangs {
            in_flight = InFlightState::Hung;
        }
        let is_over = is_late && in_flight == InFlightState::Hung;
        if is_over || self.stalls >= STALLS_MAX && !self.may_end(in_flight) {
            return false;
        }
        self.supply.writeback.write_for_reclaim();
        if self.wait_for_progress(in_flight) {
            (self.stalls, self.retry_wait) = (self.stalls + 1, RETRY_WAIT);
        } else {
            // A slow device is no reason to give up, and no reason to look ever so often.
            self.retry_wait = (2 * self.retry_wait).min(RETRY_WAIT_MAX);
        }
        true
    }

    /// Whether fills are in flight that memory may come of, and some are of the device that the page is to come from.
    fn has_own_device_in_flight(&self) -> bool {
        let device = self.mapping.identity().shared_device();
        self.fills() > 0 && !self.mapping.is_memory() && self.supply.reclaim.has_fills_of(device)
    }

    fn fills(&self) -> u64 {
        let reclaim = &self.supply.reclaim;
        self.pool.map_or_else(|| reclaim.all_fills(), |pool| reclaim.fills(pool)).0
    }

    /// Waits for a fill or a flush to end since the last look, and reaps where no other thread does; or a moment, if
    /// none is in flight, or all hang: frames may be on their way between arena and tree. `false`: none has ended in
    /// `retry_wait`, and memory may have come free otherwise.
    fn wait_for_progress(&self, in_flight: InFlightState) -> bool {
        let Self { supply, mapping, completed, .. } = *self;
        // It may be in flight at another backend, where no thread waits: then this thread waits there.
        let (_, any) = supply.under_way();
        let idle = supply.reclaim.idle_backend().or_else(|| supply.writeback.idle_backend());
        // A backend may lose its leader at any moment, so a thread without a device waits at another's.
        let own = || match mapping.backing().spill() {
            Some(spill) => Arc::clone(spill.backend()),
            None if mapping.is_memory() => supply.reclaim.some_backend().unwrap_or_else(|| mapping.backend()),
            None => mapping.backend(),
        };
        let backend = idle.unwrap_or_else(own);
        backend.reap(ReapMode::Ready, &mut || false);
        if self.under_way() == (0, completed) || in_flight == InFlightState::Hung {
            pause(STALL);
            return true;
        }
        let has_ended = |(in_flight, ended)| ended != completed || in_flight == 0;
        let mut has_moved = || has_ended(self.under_way()) || supply.under_way().1 != any;
        supply.wait_queue.wait_for(&*backend, &mut has_moved, self.retry_wait)
    }

    /// Whether nothing was under way since that look that memory, or a charge of `pool`, may come of: no wait for it
    /// is of use then, unless others punch, unpin or drop something.
    pub(super) fn is_in_vain(&self, pool: PoolNumber) -> bool {
        let FrameSupply { reclaim, writeback, .. } = self.supply;
        self.under_way() == (0, self.completed)
            && reclaim.lists().outstanding(pool) == 0
            && !writeback.pages_may_be_written()
            && !self.may_end(InFlightState::MayEnd)
    }

    fn under_way(&self) -> (u64, u64) {
        self.pool.map_or_else(|| self.supply.under_way(), |pool| self.supply.under_way_for(pool))
    }

    fn is_charged(&self) -> bool {
        self.pool.is_some_and(|pool| self.supply.reclaim.lists().outstanding(pool) > 0)
    }

    /// Whether pages in flight, or held by others, are still waited for. A file whose device takes nothing always has
    /// dirty pages, and holders of folios may wait for this thread's locks: these are waited for so long and no longer.
    /// Where requests or looks at files hang, each hang is waited for so long, and not by each need anew: folios that
    /// hung requests hold look as if threads did.
    fn may_end(&self, in_flight: InFlightState) -> bool {
        let FrameSupply { reclaim, writeback, spill, .. } = self.supply;
        let may_end = in_flight == InFlightState::MayEnd;
        let is_spilling = |spill: &Arc<Spill>| spill.under_way().0 > 0 && spill.trouble().is_none();
        let is_flushing = || may_end && writeback.under_way().0 > 0;
        let is_under_way = || {
            self.pool.is_some() && (is_flushing() || writeback.pages_may_be_written())
                || may_end && spill.as_ref().is_some_and(is_spilling)
                || writeback.revalidations_may_end()
                || self.was_charged
                || self.is_charged()
                || may_end && reclaim.in_use(self.pool) != self.in_use
                || reclaim.inserted(self.pool) != self.inserted_before
                || self.under_way().1 != self.completed
        };
        may_end && self.fills() > 0 || self.began.elapsed() < writeback.options().wait_max && is_under_way()
    }
}

/// Whether requests in flight are a reason to wait for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InFlightState {
    MayEnd,
    /// Requests in flight were waited for so long that they may never end.
    Hung,
}

fn cut_short(gaps: &mut Vec<Gap>, pages: u32) {
    let mut left = pages;
    for gap in gaps.iter_mut() {
        gap.pages = left.min(gap.pages);
        left -= gap.pages;
    }
    gaps.retain(|gap| gap.pages > 0);
}

/// Deals `frames` out to `gaps`, both in order; the last gaps go without if frames are few.
pub(super) fn deal_out(gaps: &[Gap], frames: &[FrameRun]) -> Vec<FillRun> {
    let mut runs = Vec::with_capacity(gaps.len() + frames.len());
    let mut frames = frames.iter().copied();
    let mut rest = FrameRun { frame: Frame(0), pages: 0 };
    for &Gap { first: mut index, mut pages } in gaps {
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

#[cfg(test)]
mod tests {
    use crate::arena::ArenaOptions;
    use crate::backend::{Backend, MemoryFile};
    use crate::mapping::NewMapping;
    use crate::sys::fork::ForkGuard;
    use crate::units::MappingId;

    use super::super::shared::Filemap;
    use super::*;

    #[test]
    fn requests_in_flight_hang_while_none_begins_or_ends() {
        let (none, never) = (Duration::ZERO, Duration::MAX);
        let mut seen = InFlightSnapshot::none();
        assert!(!seen.hangs(0, 7, none), "nothing is in flight");
        assert!(seen.hangs(2, 7, none) && !seen.hangs(2, 7, never));
        let since = Instant::now().checked_sub(RETRY_WAIT_MAX).expect("the machine runs for longer");
        for (in_flight, ended) in [(3, 7), (2, 8)] {
            seen = InFlightSnapshot { in_flight: 2, ended: 7, since };
            assert!(seen.hangs(2, 7, RETRY_WAIT_MAX) && !seen.hangs(in_flight, ended, RETRY_WAIT_MAX));
        }
    }

    /// Where pages come in, others have got memory, however often this thread was late.
    #[test]
    fn waits_count_only_in_a_row_in_which_no_page_came_in() {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let filemap = Filemap::new(Arc::clone(&arena), Arc::new(WaitQueue::new()), Orders::PAGES);
        let file = Arc::new(MemoryFile::new(vec![7; 4096]));
        let (attributes, backend) = (&file.attributes().unwrap(), Arc::clone(&file) as Arc<dyn Backend>);
        let (arena, id, process) = (&arena, MappingId(1), ForkGuard::new());
        let mapping = Mapping::new(NewMapping { arena, id, backend, attributes, process }).unwrap();
        let (supply, pool, other) = (&filemap.supply, PoolNumber(1), PoolNumber(2));
        for of in [None, Some(pool)] {
            let mut shortage = supply.shortage(&mapping, of);
            for nth in 0..STALLS_MAX * 3 / 2 {
                supply.reclaim.count_inserted(pool, u64::from(nth % 2), 0);
                shortage.prepare_to_wait();
                assert!(shortage.wait(), "after {nth} waits");
            }
            // Insertions into another pool are no progress for the pool whose charge is waited for.
            let mut waits = 0;
            while shortage.wait() {
                supply.reclaim.count_inserted(other, u64::from(of.is_some()), 0);
                shortage.prepare_to_wait();
                waits += 1;
                assert!(waits <= STALLS_MAX);
            }
            assert!(waits >= STALLS_MAX - 2);
        }
    }
}

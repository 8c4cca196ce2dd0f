//! Uncached: reads that leave in the cache the pages that others want, and no others.
//!
//! An uncached read is an ordinary read, but its folios are flagged from birth, and go when it has passed them.
//!
//! ```text
//!   pages     0   1   2   3   4   5   6   7   8   9  10  11  12
//!            [ gone  ]  [p] [---- F ----]  [---- G ----] [u] [u]
//!                       |        ^run     ^              ^
//!                       |        |        here           read ahead
//!                       |        a small read began in F
//!                       another reader's
//!            trail:         [4 ------------------------------ 13)     may hold what it made and has not dropped
//!
//!   next read of 100 bytes in G     nothing: G is not passed
//!   reads until page 12             G goes; so does F, since the stream went up from it
//!   a read at page 900              a new trail; this one waits for its stream to come back
//!   no read comes for a second, or the handle is closed, or it has too many trails: all of it goes
//! ```
//!
//! A **trail** is a range of pages in which this handle's uncached reads may have made folios, or met flagged ones,
//! that are still there. Each stream of a handle has one or a few, so threads that share a handle do not drop each
//! other's. A trail grows where a window is made or a flagged folio is flagged, and shrinks where its reader passes.
//! Its **run** is the bytes read last that follow each other: a folio is passed when the run covers it, or when the run
//! began inside it and went up beyond. The reader that passes a flagged folio first drops it; another that holds it
//! reads on from its hold.
//!
//! | | here | the kernel's RWF_DONTCACHE |
//! |---|---|---|
//! | a read of 100 bytes of a large folio | leaves it: the next one finds it | drops it: the next asks the device |
//! | read ahead and never read | goes when the stream ends, pauses, or jumps often | stays |
//! | a plain read of a left-over | adopts it: it stays | drops it, at the plain reader's cost |
//! | cached before | is used, and neither dropped nor flagged | the same |
//! | not supported | an error, and nothing is read | the same |
//!
//! A reader that wants a folio to stay says so by reading it: a plain read sets the referenced byte, an uncached one
//! never does. A flagged folio that is found touched is adopted (`mapping/drop_behind.rs`, under the tree lock).
//!
//! Invariants:
//!  1. A flagged folio lies in a trail, or is pinned, or is being filled while a reader waits for it, or a drop of it
//!     is under way. (One that a race left behind is met by a thread that reads it next, and ages as any other.)
//!  2. A page in front of a forward stream is not dropped: only the pages of its run, the folio it began in, and pages
//!     far behind.
//!  3. The lock of the trails is held for a few steps, and nothing is taken under it.
//!  4. When a handle is closed its trails are gone.
//!
//! Not an invariant: that dropped pages are gone for good, or that trails do not overlap those of other handles.
//!
//! A folio that is dirty, or being written, keeps its flag; the thread that ends its write-back drops it
//! (`mapping/dirty.rs`). A folio that is split hands its flag to every piece (D17, `mapping/split.rs`).
//!
//! Cost: a read that meets nothing flagged and has no trail pays one uncontended lock; one that passes folios pays
//! the tree lock once. No read looks at a clock: the background thread looks for pauses.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::arena::{Flags, GrownView};
use crate::background::BackgroundTask;
use crate::folio::UnpinObserver;
use crate::mapping::{DropReason, Mapping};
use crate::readahead::Readahead;
use crate::sync::{LockWait, RankedMutex};
use crate::sys::fork::ForkGuard;
use crate::units::{Frame, Order, PageIndex, PoolNumber};

use super::shared::Filemap;
use super::touch::touch;
use super::wait_policy::WaitPolicy;

/// A stream that goes in steps has up to 16 pieces on their way, each a trail of its own.
pub const TRAILS_MAX: usize = 24;
/// The pause of a stream before the pages it left behind go; at most twice as long.
pub const PAUSE: Duration = Duration::from_secs(1);
/// The most pages that left-overs stay behind their reader, at most 1 part in 64 of the cache; half of it at least,
/// as pieces may be read out of order.
const LAG_PAGES_MAX: u64 = 1024;
const LAG_PAGES_MIN: u64 = 16;
const FOLIO_BYTES_MAX: u64 = Order::MAX.bytes() as u64;

type Pages = Range<PageIndex>;

/// A read, and how it may wait.
#[derive(Clone, Copy, Debug)]
pub struct ReadCall<'c> {
    /// The file.
    pub mapping: &'c Arc<Mapping>,
    /// The handle's readahead and pool.
    pub reader: Reader<'c>,
    /// How far it goes for bytes that are not there.
    pub wait_policy: WaitPolicy,
}

/// One handle's readahead state, and where an uncached read leaves its traces.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'r> {
    readahead: &'r RankedMutex<Readahead>,
    pool: PoolNumber,
    uncached: Option<&'r UncachedRead<'r>>,
    skips_size_check: bool,
}

impl<'r> Reader<'r> {
    /// A reader of this readahead state; with `uncached`, of an uncached read.
    pub fn new(
        readahead: &'r RankedMutex<Readahead>,
        pool: PoolNumber,
        uncached: Option<&'r UncachedRead<'r>>,
    ) -> Self {
        Self { readahead, pool, uncached, skips_size_check: false }
    }
    /// A reader for the default pool, whose folios stay.
    pub fn plain(readahead: &'r RankedMutex<Readahead>) -> Self {
        Self::new(readahead, PoolNumber::DEFAULT, None)
    }
    /// The reader, for a caller that need not look at the file again where it ends.
    #[must_use]
    pub fn without_size_check(self) -> Self {
        Self { skips_size_check: true, ..self }
    }
    pub fn call<'c>(self, mapping: &'c Arc<Mapping>, wait_policy: WaitPolicy) -> ReadCall<'c>
    where
        'r: 'c,
    {
        ReadCall { mapping, reader: self, wait_policy }
    }
    pub(super) fn skips_size_check(self) -> bool {
        self.skips_size_check
    }
    pub(super) fn pool(self) -> PoolNumber {
        self.pool
    }
    pub(super) fn readahead(self) -> &'r RankedMutex<Readahead> {
        self.readahead
    }
    pub(super) fn behind(self) -> Option<&'r DropBehindState> {
        self.uncached.map(|uncached| &**uncached.behind)
    }
    pub(super) fn shared_behind(self) -> Option<&'r Arc<DropBehindState>> {
        self.uncached.map(|uncached| uncached.behind)
    }

    /// A plain read marks the folio that `frame` heads; an uncached one notes whether it is flagged.
    #[inline]
    pub(super) fn touch(self, grown: GrownView<'_>, frame: Frame) {
        match self.uncached {
            None => touch(grown, frame),
            Some(uncached) => uncached.note_flagged(grown, frame),
        }
    }

    /// The read gave `bytes` bytes from byte `position` on. Drops the folios that an uncached one has passed; later, if
    /// the mapping's lock is busy and `locks` forbids to wait.
    pub fn end_drop_behind(self, position: u64, bytes: usize, locks: LockWait) {
        if let Some(uncached) = self.uncached {
            uncached.behind.end_drop_behind(uncached.take_merged(), position..position + bytes as u64, locks);
        }
    }

    /// The flagged folios that the read has passed so far, for a caller that keeps this longer than the read lasts.
    pub(super) fn flagged(self) -> Option<(Arc<DropBehindState>, Pages)> {
        let uncached = self.uncached?;
        let (first, end) = uncached.flagged.get()?;
        Some((Arc::clone(uncached.behind), first..end))
    }
}

/// One uncached read on its way.
#[derive(Debug)]
pub struct UncachedRead<'r> {
    behind: &'r Arc<DropBehindState>,
    /// A range that covers the flagged folios it has passed: the first page, and the one after the last.
    flagged: Cell<Option<(PageIndex, PageIndex)>>,
}

impl<'r> UncachedRead<'r> {
    /// A read that has passed no folio yet.
    pub fn new(behind: &'r Arc<DropBehindState>) -> Self {
        Self { behind, flagged: Cell::new(None) }
    }

    fn note_flagged(&self, grown: GrownView<'_>, frame: Frame) {
        let Some(descriptor) = grown.descriptor(frame) else { return };
        // If the frame is another folio's by now, the noted range is only a hint.
        let word = descriptor.word();
        if word.is_live() && word.has(Flags::DROPBEHIND) {
            let first = descriptor.index();
            let end = first.plus(u64::from(word.order().pages()));
            let (from, to) = self.flagged.get().unwrap_or((first, end));
            self.flagged.set(Some((from.min(first), to.max(end))));
        }
    }

    fn take_merged(&self) -> Option<Pages> {
        self.flagged.take().map(|(first, end)| first..end)
    }
}

impl Drop for UncachedRead<'_> {
    fn drop(&mut self) {
        if let Some(flagged) = self.take_merged() {
            self.behind.note(&flagged, RangeReason::Passed);
        }
    }
}

/// Folios that the uncached reads of one handle have made and not dropped yet.
#[derive(Debug)]
pub struct DropBehindState {
    filemap: Arc<Filemap>,
    mapping: Arc<Mapping>,
    process: ForkGuard,
    trails: Mutex<StreamTrails>,
}

impl DropBehindState {
    /// State of a handle of `mapping` that has read nothing uncached yet.
    pub fn new(filemap: &Arc<Filemap>, mapping: &Arc<Mapping>, process: ForkGuard) -> Arc<Self> {
        let lag = (filemap.pages_max() / 64).clamp(LAG_PAGES_MIN, LAG_PAGES_MAX);
        let behind = Arc::new(Self {
            filemap: Arc::clone(filemap),
            mapping: Arc::clone(mapping),
            process,
            trails: Mutex::new(StreamTrails::new(lag)),
        });
        let task: Weak<Self> = Arc::downgrade(&behind);
        filemap.supply.background.add(task);
        behind
    }

    pub(super) fn note_made(&self, pages: Pages) {
        self.note(&pages, RangeReason::Made);
    }

    /// Step 8 of a read: the bytes `read` of the file were read, and `flagged` are flagged folios among them.
    fn end_drop_behind(&self, flagged: Option<Pages>, read: Range<u64>, locks: LockWait) {
        let mut trails = self.lock();
        if let Some(flagged) = flagged {
            trails.note(&flagged, RangeReason::Passed);
        }
        // The last folio may reach over the file's end.
        let is_last = read.end >= self.mapping.size();
        let end = if is_last { read.end.next_multiple_of(FOLIO_BYTES_MAX) } else { read.end };
        let passed = match read.is_empty() {
            true => None,
            false => trails.pass(read.start..end, |index| self.mapping.index().find_behind(index)),
        };
        let left = std::mem::take(&mut trails.leaving);
        let watch = trails.wants_watch();
        drop(trails);
        if let Some(pages) = passed {
            self.drop_pages(pages, DropReason::Passed, locks);
        }
        for pages in left {
            self.drop_pages(pages, DropReason::LeftOver, locks);
        }
        if watch {
            self.filemap.supply.background.wake();
        }
    }

    /// The stream is over: drops the folios it left behind, now or when their fills end, but for those that others wait
    /// for or have pinned.
    pub fn end(&self) {
        if self.process.is_forked() {
            return;
        }
        let left = self.lock().take_all();
        for pages in left {
            self.drop_pages(pages, DropReason::LeftOver, LockWait::Wait);
        }
    }

    fn note(&self, pages: &Pages, noted: RangeReason) {
        let mut trails = self.lock();
        trails.note(pages, noted);
        let watch = trails.wants_watch();
        drop(trails);
        if watch {
            self.filemap.supply.background.wake();
        }
    }

    /// Drops flagged folios of `pages`. Folios that were passed and cannot go yet are noted again; leftovers that
    /// cannot go are left to their next reader.
    fn drop_pages(&self, pages: Pages, leaving: DropReason, locks: LockWait) {
        let mut rest = pages;
        while rest.start < rest.end {
            let Some(done) = self.mapping.drop_behind(rest.clone(), leaving, locks) else {
                return self.note(&rest, RangeReason::Passed); // busy, and not to be waited for
            };
            if let Some(kept) = done.kept
                && leaving == DropReason::Passed
            {
                self.note(&kept, RangeReason::Passed);
            }
            rest.start = done.next;
        }
    }

    fn lock(&self) -> MutexGuard<'_, StreamTrails> {
        self.trails.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// Ranges noted after the handle was closed, by a blocking task of a future that was dropped, go here.
impl Drop for DropBehindState {
    fn drop(&mut self) {
        self.end();
    }
}

impl BackgroundTask for DropBehindState {
    fn run(&self) -> Option<Duration> {
        let mut trails = self.lock();
        let left = trails.take_paused(Instant::now());
        let again = trails.is_watched.then_some(PAUSE);
        drop(trails);
        for pages in left {
            self.drop_pages(pages, DropReason::LeftOver, LockWait::Wait);
        }
        again
    }
}

/// Drops the pages that an uncached read pinned, if the stream has passed them.
impl UnpinObserver for DropBehindState {
    fn unpinned(&self, pages: Pages) {
        let left = self.lock().outside(pages);
        for pages in left {
            self.drop_pages(pages, DropReason::LeftOver, LockWait::Wait);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RangeReason {
    Made,
    /// An uncached read has passed flagged folios there.
    Passed,
}

#[derive(Clone, Debug)]
struct StreamTrail {
    pages: Pages,
    run: Range<u64>,
    /// Where the flagged folio begins in whose middle the run began, until the run has gone up from it.
    edge: Option<PageIndex>,
    newest_end: PageIndex,
    /// `None` if it has been read since the last look.
    idle_since: Option<Instant>,
}

/// The one used last stands last.
#[derive(Debug)]
struct StreamTrails {
    list: Vec<StreamTrail>,
    leaving: Vec<Pages>,
    lag: u64,
    is_watched: bool,
}

impl StreamTrails {
    fn new(lag: u64) -> Self {
        Self { list: Vec::new(), leaving: Vec::new(), lag, is_watched: false }
    }

    /// There may be flagged folios in `pages`: a trail that touches them absorbs them, or one begins.
    fn note(&mut self, pages: &Pages, noted: RangeReason) {
        let touches = |trail: &StreamTrail| trail.pages.start <= pages.end && pages.start <= trail.pages.end;
        let mut trail = match self.list.iter().rposition(touches) {
            Some(at) => self.list.remove(at),
            None => StreamTrail {
                pages: pages.clone(),
                run: 0..0,
                edge: None,
                newest_end: pages.end,
                idle_since: None,
            },
        };
        trail.pages = hull(&trail.pages, pages);
        if noted == RangeReason::Made {
            (trail.newest_end, trail.idle_since) = (pages.end, None);
        }
        self.list.retain(|other| {
            let overlaps = other.pages.start < trail.pages.end && trail.pages.start < other.pages.end;
            if overlaps {
                trail.pages = hull(&trail.pages, &other.pages);
            }
            !overlaps
        });
        self.list.push(trail);
        if self.list.len() > TRAILS_MAX {
            self.leaving.push(self.list.remove(0).pages);
        }
    }

    /// Returns the pages of the trail that can go after `read` was read; adds those far behind to the leaving ones.
    /// `behind` looks for a flagged folio that covers a page.
    fn pass(
        &mut self,
        read: Range<u64>,
        behind: impl Fn(PageIndex) -> Option<(PageIndex, Order)>,
    ) -> Option<Pages> {
        let (first, end) = (PageIndex::of_byte(read.start), PageIndex::of_byte(read.end));
        let touched = first..end.max(first.plus(1));
        let overlaps =
            |trail: &StreamTrail| trail.pages.start < touched.end && touched.start < trail.pages.end;
        let at = self.list.iter().rposition(overlaps)?;
        let mut trail = self.list.remove(at);
        trail.idle_since = None;
        let passed = trail.pass(&read, &behind);
        self.leaving.extend(trail.cut_far_behind(first..end, self.lag, &behind));
        if trail.pages.start < trail.pages.end {
            self.list.push(trail);
        }
        passed
    }

    /// If none is left, the background thread need not look again.
    fn take_paused(&mut self, now: Instant) -> Vec<Pages> {
        let mut left = std::mem::take(&mut self.leaving);
        self.list.retain_mut(|trail| {
            let since = *trail.idle_since.get_or_insert(now);
            let paused = now.duration_since(since) >= PAUSE;
            if paused {
                left.push(trail.pages.clone());
            }
            !paused
        });
        self.is_watched = !self.list.is_empty();
        left
    }

    fn take_all(&mut self) -> Vec<Pages> {
        let mut left = std::mem::take(&mut self.leaving);
        left.extend(self.list.drain(..).map(|trail| trail.pages));
        left
    }

    /// Whether the background thread is to start looking for pauses; true once.
    fn wants_watch(&mut self) -> bool {
        let wants = !self.is_watched && !self.list.is_empty();
        self.is_watched |= wants;
        wants
    }

    fn outside(&self, pages: Pages) -> Vec<Pages> {
        let mut outside = vec![pages];
        for StreamTrail { pages: inside, .. } in &self.list {
            let cut = outside.into_iter().flat_map(|part| {
                let before = part.start..part.end.min(inside.start);
                let after = part.start.max(inside.end)..part.end;
                [before, after].into_iter().filter(|part| part.start < part.end)
            });
            outside = cut.collect();
        }
        outside
    }
}

impl StreamTrail {
    fn pass(
        &mut self,
        read: &Range<u64>,
        behind: &impl Fn(PageIndex) -> Option<(PageIndex, Order)>,
    ) -> Option<Pages> {
        // 1 The run goes on at one of its ends, or begins anew, perhaps in the middle of a folio.
        let first = PageIndex::of_byte(read.start);
        let run = self.run.clone();
        let goes_up =
            run.start <= read.start && read.start <= run.end && run.end < read.end && !run.is_empty();
        let goes_down = read.start < run.start && run.start <= read.end && read.end <= run.end;
        let before = behind(first);
        if goes_up || goes_down {
            self.run = run.start.min(read.start)..run.end.max(read.end);
        } else {
            self.run = read.clone();
            self.edge = before.map(|(start, _)| start).filter(|start| start.first_byte() < read.start);
        }
        // 2 To the last folio that ends where this read does, or before; or behind it, but in the run.
        let mut end = PageIndex::of_byte(read.end);
        if let Some((start, order)) = behind(end) {
            let next = start.plus(u64::from(order.pages()));
            let covered = goes_down && next.first_byte() <= self.run.end;
            end = if covered { next } else { start };
        }
        let end = end.min(self.pages.end);
        // 3 From the first folio of this read that the run covers, or the one that it began in and went up from.
        let mut from = match before {
            Some((start, order)) if start.first_byte() < self.run.start => {
                start.plus(u64::from(order.pages()))
            }
            Some((start, _)) => start,
            None => first,
        };
        if goes_up && let Some(edge) = self.edge.filter(|edge| *edge < end) {
            (from, self.edge) = (from.min(edge), None);
        }
        let from = from.max(self.pages.start);
        if from >= end {
            return None;
        }
        if from == self.pages.start {
            self.pages.start = end;
        } else if end == self.pages.end {
            self.pages.end = from;
        }
        Some(from..end)
    }

    /// Cuts off the pages far below a reader of the pages `at`; or far above it, if the stream goes down.
    fn cut_far_behind(
        &mut self,
        at: Pages,
        lag: u64,
        behind: &impl Fn(PageIndex) -> Option<(PageIndex, Order)>,
    ) -> Option<Pages> {
        let whole = |page: PageIndex| behind(page).map_or(page, |(start, _)| start);
        let Pages { start, end } = self.pages;
        if at.start < self.newest_end && at.start.0.saturating_sub(start.0) > lag {
            let cut = whole(PageIndex(at.start.0 - lag / 2)).max(start);
            self.pages.start = cut;
            return Some(start..cut);
        }
        if self.newest_end <= at.end && end.0.saturating_sub(at.end.0) > lag {
            let cut = whole(at.end.plus(lag / 2)).min(end);
            self.pages.end = cut;
            return Some(cut..end);
        }
        None
    }
}

fn hull(a: &Pages, b: &Pages) -> Pages {
    a.start.min(b.start)..a.end.max(b.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn pages(start: u64, end: u64) -> Pages {
        PageIndex(start)..PageIndex(end)
    }
    fn trails(made: &[Pages]) -> StreamTrails {
        let mut trails = StreamTrails::new(32);
        made.iter().for_each(|made| trails.note(made, RangeReason::Made));
        trails
    }
    fn all(trails: &StreamTrails) -> Vec<Pages> {
        trails.list.iter().map(|trail| trail.pages.clone()).collect()
    }
    fn folios(order: u8) -> impl Fn(PageIndex) -> Option<(PageIndex, Order)> + Copy {
        move |index| Some((index.align_down(Order(order)), Order(order)))
    }

    #[test]
    fn a_trail_grows_where_it_is_touched_and_takes_in_trails_it_overlaps() {
        let mut trails = trails(&[pages(0, 4), pages(8, 12), pages(20, 24)]);
        assert_eq!(all(&trails), [pages(0, 4), pages(8, 12), pages(20, 24)]);
        trails.note(&pages(4, 6), RangeReason::Made);
        assert_eq!(all(&trails), [pages(8, 12), pages(20, 24), pages(0, 6)], "the one used last stands last");
        trails.note(&pages(5, 21), RangeReason::Passed);
        assert_eq!(all(&trails), [pages(0, 24)]);
    }

    #[test]
    fn a_stream_takes_out_passed_pages_and_no_more() {
        let mut trails = trails(&[pages(0, 32)]);
        assert_eq!(trails.pass(0..PAGE, folios(0)), Some(pages(0, 1)));
        assert_eq!(trails.pass(PAGE..PAGE + 100, folios(0)), None);
        assert_eq!(trails.pass(PAGE + 100..4 * PAGE + 1, folios(0)), Some(pages(1, 4)));
        assert_eq!(all(&trails), [pages(4, 32)]);
        assert_eq!(trails.pass(4 * PAGE + 1..32 * PAGE, folios(0)), Some(pages(4, 32)));
        assert_eq!(all(&trails), []);
        assert_eq!(trails.pass(32 * PAGE..33 * PAGE, folios(0)), None, "nothing was made there");
    }

    #[test]
    fn a_folio_is_passed_when_the_run_covers_it_from_either_side() {
        let mut trails = trails(&[pages(0, 16)]);
        assert_eq!(
            trails.pass(3 * PAGE..8 * PAGE, folios(2)),
            Some(pages(4, 8)),
            "its first may be read yet"
        );
        assert_eq!(trails.pass(PAGE..3 * PAGE, folios(2)), None);
        assert_eq!(trails.pass(0..PAGE, folios(2)), Some(pages(0, 4)), "it was read downward");
        assert_eq!(trails.pass(9 * PAGE..12 * PAGE, folios(2)), None, "the run began anew, inside a folio");
        assert_eq!(trails.pass(12 * PAGE..13 * PAGE, folios(2)), Some(pages(8, 12)), "and went up from it");
    }

    #[test]
    fn a_former_run_says_nothing_of_folios_made_anew() {
        let mut trails = trails(&[pages(0, 64)]);
        assert_eq!(trails.pass(0..16 * PAGE, folios(0)), Some(pages(0, 16)));
        trails.note(&pages(0, 16), RangeReason::Made);
        assert_eq!(trails.pass(0..PAGE, folios(0)), Some(pages(0, 1)));
        assert_eq!(trails.pass(PAGE..2 * PAGE, folios(0)), Some(pages(1, 2)));
    }

    #[test]
    fn pages_far_behind_a_stream_are_dropped_and_pages_in_front_are_not() {
        let mut trails = trails(&[pages(0, 200)]);
        assert_eq!(trails.pass(40 * PAGE..41 * PAGE, folios(3)), None);
        assert_eq!(trails.leaving, [pages(0, 24)], "up to a whole folio");
        assert_eq!(all(&trails), [pages(24, 200)]);
        trails.leaving.clear();
        // Downward: the newest folios lie below.
        trails.note(&pages(10, 24), RangeReason::Made);
        assert_eq!(trails.pass(60 * PAGE..61 * PAGE, folios(0)), Some(pages(60, 61)));
        assert_eq!(trails.leaving, [pages(77, 200)]);
        assert_eq!(all(&trails), [pages(10, 77)]);
    }

    #[test]
    fn the_oldest_of_too_many_trails_leaves() {
        let mut trails = StreamTrails::new(32);
        for nth in 0..=TRAILS_MAX as u64 {
            trails.note(&pages(nth * 10, nth * 10 + 5), RangeReason::Made);
            assert_eq!(trails.pass(0..1, folios(0)), None, "the first is the one used last");
        }
        assert_eq!((trails.leaving.len(), trails.list.len()), (1, TRAILS_MAX));
        assert_eq!(trails.leaving, [pages(10, 15)]);
    }

    #[test]
    fn a_trail_leaves_when_no_reader_came_for_a_pause() {
        let mut trails = trails(&[pages(0, 8), pages(100, 108)]);
        assert!(trails.wants_watch() && !trails.wants_watch());
        let start = Instant::now();
        assert!(trails.take_paused(start).is_empty());
        trails.pass(100 * PAGE..101 * PAGE, folios(0));
        assert_eq!(trails.take_paused(start + PAUSE), [pages(0, 8)]);
        assert!(trails.is_watched);
        assert_eq!(trails.take_paused(start + 2 * PAUSE), [pages(101, 108)]);
        assert!(!trails.is_watched, "nobody need look any more");
    }

    #[test]
    fn unpinned_pages_are_dropped_where_no_trail_is() {
        let trails = trails(&[pages(4, 8), pages(12, 16)]);
        assert_eq!(trails.outside(pages(0, 20)), [pages(0, 4), pages(8, 12), pages(16, 20)]);
        assert_eq!(trails.outside(pages(5, 8)), []);
        assert_eq!(trails.outside(pages(6, 10)), [pages(8, 10)]);
    }
}

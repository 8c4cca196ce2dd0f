//! Write-back state: how far the content of one mapping has come on its way to the file.
//!
//! ```text
//!   dirty pages --begin--> under way --end--> written, not durable --take_unsynced, sync, Ok--> durable
//!                              |                       |
//!                              +--failed: dirty        +--sync failed: dirty again, and those that end meanwhile, too
//! ```
//!
//! Flushes have numbers, which rise. So a caller that waits for the flushes under way *now* waits for those below the
//! next number. Syncs have numbers as well: a caller accepts a sync that began after its own flushes had ended, and
//! succeeded, in place of a sync of its own (group commit). The rules are those of `writeback`.
//!
//! Invariants:
//!  1. A page is in one flush at a time: a thread that begins one asks [`WritebackState::first_clear`] under the same
//!     hold of the tree lock.
//!  2. A page whose flush went well is among the unsynced ones, or a sync covers them, until one that went well
//!     has covered it. (Some others may be, too; see [`PageRanges`].)
//!  3. One sync at a time is under way for a file. If two were, one could be told of the system's error, which the
//!     system tells once, and the other that all is well.
//!
//! Not an invariant: that a page that is not under way here is not under write-back. Pages are taken, and their end is
//! noted, under the tree lock; a thread that does not hold it may see the one before the other.
//!
//! Locks: one mutex, a leaf, for a few steps; it is taken under the tree lock, and by a thread that wakes and is woken.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::backend::{Backend, SyncKind};
use crate::errseq::ErrorSequence;
use crate::units::{FILE_BYTES_MAX, Millis, PageIndex, pages_of_bytes};

use super::dirty_counts::{DirtyCounts, DirtyPages, NEVER};
use super::own_changes::OwnChanges;
use super::page_ranges::PageRanges;

/// How long the background leaves a file alone after its first failure, and at most after many.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The way of one mapping's content to its file.
#[derive(Default, Debug)]
pub struct WritebackState {
    writer: OnceLock<Arc<dyn Backend>>,
    /// How long the file on the device is, in bytes, as far as the cache's own flushes and cuts go.
    size_on_device: AtomicU64,
    /// Changed under the mapping's tree lock.
    pub(super) dirty: DirtyCounts,
    pub(super) own_changes: OwnChanges,
    errors: ErrorSequence,
    /// Changed with the lock of write-back's list held.
    is_listed: AtomicBool,
    /// Whether a thread revalidates the file, and goes on with its pass then.
    is_revalidated_elsewhere: AtomicBool,
    account: Mutex<FlushAccount>,
}

/// The number of a flush; later ones have higher numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct FlushNumber(u64);

/// The last failure, and the number of failures.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Failures {
    /// Flushes and syncs of this file that failed so far.
    pub count: u64,
    /// The number of the last error, by the system's count; 0 if there was none.
    pub errno: i32,
}

/// Where a pass goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WritebackCursor {
    pass: u64,
    /// When it began: all pages that were dirty then are taken when it ends.
    pub began: Millis,
    pub at: PageIndex,
}

/// The part of a file that a sync makes durable.
#[derive(Clone, Copy, Debug)]
pub struct SyncRange<'r> {
    /// The data alone, or all that is needed to find it.
    pub kind: SyncKind,
    pub pages: &'r Range<PageIndex>,
}

/// A sync that has the turn of its file: [`WritebackState::end_sync`] gives that back.
#[derive(Debug)]
pub struct BegunSync<'r> {
    /// The pages that it makes durable, and which metadata with them.
    pub range: SyncRange<'r>,
    /// The pages that were flushed and are not durable before it has gone well, as [`Commit::Own`] has them.
    pub taken: PageRanges,
}

/// The outcome of a flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushResult {
    /// Pages of the flush that are in the file, from its first on, as [`WritebackState::valid_pages`] said.
    pub written: u32,
    /// Why its other pages are not; `None` if all are, or a sync has failed meanwhile.
    pub errno: Option<i32>,
}

/// How a request to make something durable goes on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Commit {
    /// A sync of another caller has done it.
    Shared,
    /// A sync of another caller is under way: wait for its end, and ask again.
    Wait,
    /// The caller syncs. It makes these pages durable, and ends by [`WritebackState::end_sync`].
    Own(PageRanges),
}

#[derive(Debug, Default)]
struct FlushAccount {
    next: u64,
    under_way: FlushesInFlight,
    ended: u64,
    /// When a flush ended last.
    ended_at: Millis,
    /// How many flushes had begun, and ended, when the file was revalidated last after one.
    revalidated: u64,
    /// Flushes below this number were under way when a sync failed.
    tainted: u64,
    /// How many of the tainted flushes have ended well, and did not count.
    voided: u64,
    unsynced: PageRanges,
    /// How often the file was cut or punched, and how many of these times a sync of the whole file has followed.
    cuts: u64,
    synced_cuts: u64,
    failures: Failures,
    failing: Option<Failing>,
    pass: WritebackPass,
    syncs: Syncs,
}

/// Flushes by their numbers, and by their first pages, since no two have a page in common. There may be thousands.
#[derive(Debug, Default)]
struct FlushesInFlight {
    by_number: BTreeMap<u64, Range<u64>>,
    /// From the first page to the page behind the last, and the number.
    by_start: BTreeMap<u64, (u64, u64)>,
}

impl FlushesInFlight {
    fn begin(&mut self, number: u64, pages: Range<u64>) {
        self.by_start.insert(pages.start, (pages.end, number));
        self.by_number.insert(number, pages);
    }
    fn end(&mut self, number: u64) -> Range<u64> {
        let pages = self.by_number.remove(&number).expect("a flush ends once");
        self.by_start.remove(&pages.start);
        pages
    }
    fn at(&self, page: u64) -> Option<(u64, u64)> {
        self.by_start.range(..=page).next_back().map(|(_, flush)| *flush).filter(|(end, _)| page < *end)
    }
    fn next_start(&self, page: u64) -> Option<u64> {
        self.by_start.range(page + 1..).next().map(|(start, _)| *start)
    }
    fn meeting(&self, pages: Range<u64>) -> impl Iterator<Item = u64> {
        let flushes = self.by_start.range(..pages.end).rev();
        flushes
            .map(|(_, flush)| *flush)
            .take_while(move |(end, _)| pages.start < *end)
            .map(|(_, number)| number)
    }
}

#[derive(Clone, Copy, Debug)]
struct Failing {
    /// The flush that failed last; a later one that goes well ends the state.
    number: u64,
    pause: Duration,
    until: Millis,
}

#[derive(Debug, Default)]
struct WritebackPass {
    number: u64,
    at: u64,
    began: Option<Millis>,
    /// How many passes are asked for, this one among them.
    requested: u8,
}

#[derive(Debug, Default)]
struct Syncs {
    begun: u64,
    is_under_way: bool,
    /// How many cuts were before the sync under way.
    cuts_before: u64,
    /// The last sync that went well: its number, its kind, and its pages.
    done: Option<(u64, SyncKind, Range<u64>)>,
}

impl WritebackState {
    /// The backend that writes the file; `None` as long as the file has not been opened for writing.
    pub fn writer(&self) -> Option<&Arc<dyn Backend>> {
        self.writer.get()
    }
    /// Opens the file for writing, by `backend`; or the backend of the first caller stays, which is returned.
    pub fn set_writer(&self, backend: Arc<dyn Backend>) -> &Arc<dyn Backend> {
        self.writer.get_or_init(|| backend)
    }
    /// Whether a write behind the end of the file makes it longer.
    pub fn can_grow(&self) -> bool {
        self.writer().is_none_or(|writer| writer.can_grow())
    }
    /// How long the file on the device is, in bytes: behind that a fill need not ask it. Without a writer its size.
    pub fn size_on_device(&self) -> u64 {
        // Acquire, partner: the Release in the two below: a thread that sees a longer file finds its bytes there.
        self.size_on_device.load(Ordering::Acquire)
    }
    /// A flush that ends at byte `end` of the file has completed.
    pub fn raise_size_on_device(&self, end: u64) {
        self.size_on_device.fetch_max(end, Ordering::Release); // partner: `size_on_device`
    }
    /// The file on the device was cut at `bytes`, or extended to them, or was found so.
    pub fn set_size_on_device(&self, bytes: u64) {
        self.size_on_device.store(bytes, Ordering::Release); // partner: `size_on_device`
    }

    /// How many pages are dirty, and under write-back, as of a moment ago; exact for the holder of the tree lock.
    #[inline]
    pub fn dirty_pages(&self) -> &DirtyPages {
        &self.dirty.own
    }
    /// Pages under write-back of folios that have left the index; as [`WritebackState::dirty_pages`]. While there are
    /// any, the device may still be writing to places from which the index knows nothing.
    pub fn detached_pages(&self) -> u64 {
        self.dirty.detached.load(Ordering::Relaxed)
    }
    /// When the oldest dirty page became dirty; `None` if none is. As [`WritebackState::dirty_pages`].
    pub fn dirty_since(&self) -> Option<Millis> {
        let since = self.dirty.since.load(Ordering::Relaxed);
        (since != NEVER).then_some(Millis(since))
    }

    /// The errors of writing that each handle reports once.
    pub fn errors(&self) -> &ErrorSequence {
        &self.errors
    }

    /// Whether write-back knows of it. Changed under that list's lock.
    pub fn is_listed(&self) -> bool {
        self.is_listed.load(Ordering::Relaxed)
    }

    /// Write-back lists it, or no more; the caller holds that list's lock, and to forget it the tree lock, too.
    pub fn set_listed(&self, is_listed: bool) {
        self.is_listed.store(is_listed, Ordering::Relaxed);
    }

    /// A thread is to revalidate the file before its pass goes on. `false`: one does already.
    pub fn begin_revalidation_elsewhere(&self) -> bool {
        !self.is_revalidated_elsewhere.swap(true, Ordering::Relaxed)
    }

    /// The thread of [`WritebackState::begin_revalidation_elsewhere`] is done.
    pub fn end_revalidation_elsewhere(&self) {
        self.is_revalidated_elsewhere.store(false, Ordering::Relaxed);
    }

    /// A flush of `pages` begins. The caller holds the tree lock, under which it took the pages.
    pub fn begin_flush(&self, pages: Range<PageIndex>) -> FlushNumber {
        let mut account = self.account();
        let number = account.next;
        account.next += 1;
        debug_assert!(account.first_clear(&pages) == pages, "{pages:?} is in one flush at a time");
        account.under_way.begin(number, pages.start.0..pages.end.0);
        FlushNumber(number)
    }

    /// How many of the `written` pages of a flush that ends count as written, from its first on. None of them, if a
    /// sync failed while it was under way: then it is not known what the system does with pages that it takes over.
    ///
    /// The caller holds the tree lock, has the other pages dirty again there, and then calls
    /// [`WritebackState::end_flush`].
    pub fn valid_pages(&self, number: FlushNumber, written: u32) -> u32 {
        if number.0 < self.account().tainted { 0 } else { written }
    }

    /// The flush has ended, at `now`; pages of it that are not in the file are dirty again. The caller has the tree
    /// lock since it asked for [`WritebackState::valid_pages`], and a thread that waits is to be woken when it has let
    /// that go.
    pub fn end_flush(&self, number: FlushNumber, FlushResult { written, errno }: FlushResult, now: Millis) {
        let mut account = self.account();
        let pages = account.under_way.end(number.0);
        account.ended += 1;
        account.ended_at = account.ended_at.max(now);
        account.unsynced.insert(PageIndex(pages.start)..PageIndex(pages.start + u64::from(written)));
        if let Some(errno) = errno {
            self.errors.record(errno);
            account.fail(errno, now, Some(number.0));
        } else if number.0 < account.tainted {
            account.voided += 1;
        } else if written > 0 && account.failing.is_some_and(|failing| number.0 > failing.number) {
            account.failing = None;
        }
    }

    /// The flush that `page` is in, and where that ends; `None` if it is in none.
    pub fn flush_at(&self, page: PageIndex) -> Option<(FlushNumber, PageIndex)> {
        let account = self.account();
        let (end, number) = account.under_way.at(page.0)?;
        Some((FlushNumber(number), PageIndex(end)))
    }

    /// The first pages of `pages` that follow each other and are in no flush; empty if all are.
    pub fn first_clear(&self, pages: Range<PageIndex>) -> Range<PageIndex> {
        self.account().first_clear(&pages)
    }

    /// The number of the next flush: those with lower numbers have begun.
    pub fn next_flush(&self) -> FlushNumber {
        FlushNumber(self.account().next)
    }

    /// The file was cut or punched on its device.
    pub fn note_cut(&self) {
        self.account().cuts += 1;
    }

    /// Whether syncs that went well have covered all flushes that have ended, and all cuts. For the holder of the tree
    /// lock that is exact.
    pub fn is_durable(&self) -> bool {
        let account = self.account();
        let is_synced = account.unsynced.is_empty() && account.cuts == account.synced_cuts;
        is_synced && !account.syncs.is_under_way
    }

    /// How many flushes have ended well and do not count, as [`WritebackState::valid_pages`] says.
    pub fn flushes_voided(&self) -> u64 {
        self.account().voided
    }

    /// Whether a flush of some of `pages` is under way, with a number below `before`, if there is one.
    pub fn is_under_way(&self, pages: &Range<PageIndex>, before: Option<FlushNumber>) -> bool {
        let before = before.map_or(u64::MAX, |number| number.0);
        self.account().under_way.meeting(pages.start.0..pages.end.0).any(|number| number < before)
    }

    pub fn flushes_ended(&self) -> u64 {
        self.account().ended
    }

    /// How many flushes have begun, if all of them have ended.
    pub fn all_ended(&self) -> Option<u64> {
        let account = self.account();
        (account.next == account.ended).then_some(account.next)
    }

    /// As [`WritebackState::all_ended`], if the file was not revalidated since.
    pub fn not_revalidated(&self) -> Option<u64> {
        self.flushes_to_revalidate_after().map(|(flushes, _)| flushes)
    }

    /// As [`WritebackState::not_revalidated`], and when the last of the flushes ended.
    pub(super) fn flushes_to_revalidate_after(&self) -> Option<(u64, Millis)> {
        let account = self.account();
        let is_due = account.next == account.ended && account.revalidated < account.next;
        is_due.then_some((account.next, account.ended_at))
    }

    /// As [`WritebackState::all_ended`], if the file was revalidated since, so that all changes by the cache are known.
    /// Equal numbers before and after a revalidation say that no flush of the cache has changed the file's attributes
    /// meanwhile.
    pub fn flushes_if_revalidated(&self) -> Option<u64> {
        let account = self.account();
        (account.next == account.revalidated).then_some(account.next)
    }

    /// The file was revalidated when so many flushes had begun, and all of them had ended.
    pub fn note_revalidation(&self, flushes: u64) {
        let account = &mut self.account();
        account.revalidated = account.revalidated.max(flushes);
    }

    /// The failures so far.
    pub fn failures(&self) -> Failures {
        self.account().failures
    }

    /// The last error, if nothing has gone well since.
    pub fn failing(&self) -> Option<i32> {
        let account = self.account();
        account.failing.map(|_| account.failures.errno)
    }

    /// Until when the background leaves it alone.
    pub fn paused_until(&self) -> Option<Millis> {
        self.account().failing.map(|failing| failing.until)
    }

    /// A pass begins at `now`, or goes on: where.
    pub fn begin_pass(&self, now: Millis) -> WritebackCursor {
        let pass = &mut self.account().pass;
        let began = *pass.began.get_or_insert(now);
        WritebackCursor { pass: pass.number, began, at: PageIndex(pass.at) }
    }

    /// The pass has come to `at`. (Another thread may be further on by now, or the pass over.)
    pub fn pause_pass(&self, place: WritebackCursor, at: PageIndex) {
        let pass = &mut self.account().pass;
        if pass.number == place.pass {
            pass.at = pass.at.max(at.0);
        }
    }

    /// The pass has come to the file's end. The next one begins at its start.
    pub fn end_pass(&self, place: WritebackCursor) {
        let pass = &mut self.account().pass;
        if pass.number == place.pass {
            let requested = pass.requested.saturating_sub(1);
            *pass = WritebackPass { number: pass.number + 1, requested, ..WritebackPass::default() };
        }
    }

    /// Asks for a pass that writes all that is dirty now.
    pub fn request_pass(&self) {
        let pass = &mut self.account().pass;
        // A pass that is under way may have passed the pages that are meant.
        pass.requested = if pass.began.is_some() { 2 } else { 1 };
    }

    /// Whether such a pass is asked for.
    pub fn is_pass_requested(&self) -> bool {
        self.account().pass.requested > 0
    }

    /// How many syncs have begun: one that begins later and goes well makes durable all flushes that have ended by now.
    pub fn syncs_begun(&self) -> u64 {
        self.account().syncs.begun
    }

    /// Whether a sync is under way.
    pub fn is_syncing(&self) -> bool {
        self.account().syncs.is_under_way
    }

    /// The caller wants pages durable, of which all flushes had ended when [`WritebackState::syncs_begun`] said `seen`.
    pub fn begin_sync(&self, SyncRange { kind, pages }: SyncRange<'_>, seen: u64) -> Commit {
        let mut account = self.account();
        let covers = |&(number, done, ref range): &(u64, SyncKind, Range<u64>)| {
            let is_kind = done == kind || done == SyncKind::All;
            number >= seen && is_kind && range.start <= pages.start.0 && pages.end.0 <= range.end
        };
        if account.syncs.done.as_ref().is_some_and(covers) {
            return Commit::Shared;
        }
        if account.syncs.is_under_way {
            return Commit::Wait;
        }
        account.syncs.is_under_way = true;
        account.syncs.begun += 1;
        account.syncs.cuts_before = account.cuts;
        Commit::Own(account.unsynced.take(pages.clone()))
    }

    /// The sync that was begun by [`WritebackState::begin_sync`] has ended, at `now`. If it failed, returns the pages
    /// that have to be dirty again: all that are not durable. Those that a flush has under way follow when it ends.
    pub fn end_sync(
        &self,
        BegunSync { range: SyncRange { kind, pages }, taken }: BegunSync<'_>,
        failed: Option<i32>,
        now: Millis,
    ) -> PageRanges {
        let mut account = self.account();
        account.syncs.is_under_way = false;
        let Some(errno) = failed else {
            if pages.start == PageIndex(0) && pages.end.0 >= pages_of_bytes(FILE_BYTES_MAX) {
                account.synced_cuts = account.syncs.cuts_before;
            }
            let number = account.syncs.begun - 1;
            account.syncs.done = Some((number, kind, pages.start.0..pages.end.0));
            return PageRanges::new();
        };
        self.errors.record(errno);
        account.fail(errno, now, None);
        account.tainted = account.next;
        let mut again = std::mem::take(&mut account.unsynced);
        again.insert_all(&taken);
        again
    }

    fn account(&self) -> MutexGuard<'_, FlushAccount> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FlushAccount {
    fn first_clear(&self, pages: &Range<PageIndex>) -> Range<PageIndex> {
        let mut start = pages.start.0;
        while let Some((end, _)) = self.under_way.at(start) {
            start = end;
        }
        let start = start.min(pages.end.0);
        let end = self.under_way.next_start(start).map_or(pages.end.0, |next| next.min(pages.end.0));
        PageIndex(start)..PageIndex(end)
    }

    /// The background lets the file alone for longer each time, but for flushes that were under way with a failed one.
    fn fail(&mut self, errno: i32, now: Millis, number: Option<u64>) {
        self.failures = Failures { count: self.failures.count + 1, errno };
        let pause = match self.failing {
            None => PAUSE_MIN,
            Some(before) if number.is_some_and(|number| number <= before.number) => before.pause,
            Some(before) => (before.pause * 2).min(PAUSE_MAX),
        };
        let until = Millis(now.0 + pause.as_millis() as u64);
        // All that have begun by now say nothing about whether it goes well again.
        self.failing = Some(Failing { number: self.next.saturating_sub(1), pause, until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EIO: i32 = 5;

    fn data(pages: &Range<PageIndex>) -> SyncRange<'_> {
        SyncRange { kind: SyncKind::Data, pages }
    }
    fn everything(pages: &Range<PageIndex>) -> SyncRange<'_> {
        SyncRange { kind: SyncKind::All, pages }
    }
    fn pages(start: u64, end: u64) -> Range<PageIndex> {
        PageIndex(start)..PageIndex(end)
    }

    fn well(written: u32) -> FlushResult {
        FlushResult { written, errno: None }
    }
    fn failed(written: u32) -> FlushResult {
        FlushResult { written, errno: Some(EIO) }
    }

    fn written(state: &WritebackState, range: Range<PageIndex>) {
        let number = state.begin_flush(range);
        let pages = state.valid_pages(number, pages_in(number, state));
        state.end_flush(number, well(pages), Millis(0));
    }

    fn pages_in(number: FlushNumber, state: &WritebackState) -> u32 {
        let account = state.account();
        let range = &account.under_way.by_number[&number.0];
        (range.end - range.start) as u32
    }

    fn all(ranges: &PageRanges) -> Vec<Range<PageIndex>> {
        ranges.iter().collect()
    }

    #[test]
    fn a_wait_for_flushes_under_way_ignores_later_ones() {
        let state = WritebackState::default();
        let first = state.begin_flush(pages(0, 4));
        let now = state.next_flush();
        let second = state.begin_flush(pages(4, 8));
        let before = Some(now);
        assert!(state.is_under_way(&pages(3, 5), before) && !state.is_under_way(&pages(4, 8), before));
        assert!(state.is_under_way(&pages(4, 8), None) && !state.is_under_way(&pages(8, 9), None));
        state.end_flush(first, well(4), Millis(0));
        assert!(!state.is_under_way(&pages(0, 100), before));
        state.end_flush(second, well(4), Millis(0));
        assert!(!state.is_under_way(&pages(0, 100), None));
        assert_eq!((state.all_ended(), state.flushes_if_revalidated()), (Some(2), None));
        state.note_revalidation(2);
        assert_eq!(state.flushes_if_revalidated(), Some(2));
        state.begin_flush(pages(0, 4));
        assert_eq!((state.all_ended(), state.flushes_if_revalidated()), (None, None));
    }

    #[test]
    fn first_clear_finds_pages_that_are_in_no_flush() {
        let state = WritebackState::default();
        for range in [pages(2, 4), pages(4, 5), pages(10, 12)] {
            state.begin_flush(range);
        }
        for (asked, clear) in [
            (pages(0, 20), pages(0, 2)),
            (pages(2, 20), pages(5, 10)),
            (pages(3, 4), pages(4, 4)),
            (pages(11, 20), pages(12, 20)),
            (pages(5, 7), pages(5, 7)),
        ] {
            assert_eq!(state.first_clear(asked.clone()), clear, "of {asked:?}");
        }
    }

    #[test]
    fn a_failed_sync_leaves_no_page_durable() {
        let state = WritebackState::default();
        written(&state, pages(0, 4));
        let under_way = state.begin_flush(pages(20, 21));
        let Commit::Own(taken) = state.begin_sync(data(&pages(0, 3)), state.syncs_begun()) else {
            panic!("nobody else syncs");
        };
        assert_eq!(all(&taken), [pages(0, 3)]);
        written(&state, pages(10, 12)); // while it fails
        let again = state.end_sync(BegunSync { range: data(&pages(0, 3)), taken }, Some(EIO), Millis(0));
        assert_eq!(all(&again), [pages(0, 4), pages(10, 12)]);
        assert_eq!(state.valid_pages(under_way, 1), 0, "who knows what became of it");
        state.end_flush(under_way, well(0), Millis(0));
        let later = state.begin_flush(pages(20, 21));
        assert_eq!(state.valid_pages(later, 1), 1);
        assert_eq!(state.failures(), Failures { count: 1, errno: EIO });
    }

    #[test]
    fn a_later_sync_of_another_caller_counts_and_an_earlier_one_does_not() {
        let state = WritebackState::default();
        let range = pages(0, 100);
        let sync = |kind, range: &Range<PageIndex>, seen| {
            let Commit::Own(taken) = state.begin_sync(SyncRange { kind, pages: range }, seen) else {
                panic!("it is my turn")
            };
            assert_eq!(state.begin_sync(SyncRange { kind, pages: range }, seen), Commit::Wait);
            state.end_sync(BegunSync { range: SyncRange { kind, pages: range }, taken }, None, Millis(0));
        };
        let early = state.syncs_begun();
        sync(SyncKind::Data, &range, early);
        assert_eq!(state.begin_sync(data(&pages(5, 6)), early), Commit::Shared);
        let seen = state.syncs_begun();
        sync(SyncKind::Data, &range, seen);
        assert!(
            matches!(state.begin_sync(everything(&range), seen), Commit::Own(_)),
            "it was not of this kind"
        );
        let half = pages(0, 50);
        let begun = BegunSync { range: everything(&half), taken: PageRanges::new() };
        state.end_sync(begun, None, Millis(0));
        assert_eq!(state.begin_sync(data(&pages(0, 50)), seen), Commit::Shared);
        assert!(matches!(state.begin_sync(data(&range), seen), Commit::Own(_)), "nor of all of it");
    }

    #[test]
    fn the_written_part_of_a_failed_flush_counts() {
        let state = WritebackState::default();
        let number = state.begin_flush(pages(5, 9));
        assert_eq!(state.flush_at(PageIndex(8)), Some((number, PageIndex(9))));
        state.end_flush(number, failed(state.valid_pages(number, 3)), Millis(0));
        let Commit::Own(taken) = state.begin_sync(data(&pages(0, 100)), 0) else { panic!() };
        assert_eq!((all(&taken), state.flush_at(PageIndex(8))), (vec![pages(5, 8)], None));
    }

    #[test]
    fn a_pass_requested_during_a_pass_is_followed_by_another() {
        let state = WritebackState::default();
        state.request_pass();
        let first = state.begin_pass(Millis(7));
        assert_eq!((first.began, first.at), (Millis(7), PageIndex(0)));
        state.pause_pass(first, PageIndex(50));
        state.pause_pass(first, PageIndex(20)); // who was slower
        state.request_pass();
        let second = state.begin_pass(Millis(8));
        assert_eq!((second.began, second.at), (Millis(7), PageIndex(50)));
        state.end_pass(second);
        assert!(state.is_pass_requested());
        state.pause_pass(first, PageIndex(70)); // of a pass that is over
        state.end_pass(first);
        let third = state.begin_pass(Millis(9));
        assert_eq!((third.began, third.at), (Millis(9), PageIndex(0)));
        state.end_pass(third);
        assert!(!state.is_pass_requested());
    }

    #[test]
    fn pauses_grow_and_end_with_a_later_success() {
        let state = WritebackState::default();
        let fail = |range| {
            let number = state.begin_flush(range);
            state.end_flush(number, failed(0), Millis(1000));
        };
        let together = [state.begin_flush(pages(0, 1)), state.begin_flush(pages(1, 2))];
        let went_well = state.begin_flush(pages(2, 3));
        for number in together {
            state.end_flush(number, failed(0), Millis(1000));
        }
        assert_eq!(state.paused_until(), Some(Millis(2000)), "two that failed together are one failure");
        state.end_flush(went_well, well(1), Millis(1000));
        assert_eq!(state.failing(), Some(EIO), "it began before");
        fail(pages(0, 1));
        assert_eq!(state.paused_until(), Some(Millis(3000)));
        (0..20).for_each(|_| fail(pages(0, 1)));
        assert_eq!(state.paused_until(), Some(Millis(61_000)));
        written(&state, pages(0, 1));
        assert_eq!((state.failing(), state.failures().count), (None, 23));
    }
}

//! Grab: find or create the folios of a range, all of them locked and held, in rising order.
//!
//! ```text
//!   range           0   1   2   3   4   5   6   7   8   9          before   G a folio of order 0, F of order 1
//!                   .   .  [G]  .   s   .  [-- F --] .  .                   s what remembers an eviction
//!   1 look          ----->      --------->          ------         gaps, without a lock: a hint
//!   2 frames        for the gaps, before anything is locked        fewer than that: the round ends where they do
//!   3 lock                  G                 F                    what is there, in rising order; may wait
//!   4 insert        [-----] G  [3] [- 4 --]   F     [-----]        all gaps in one hold of the tree's lock
//!   5 look again    is what was locked in 3 still there?           under the same hold
//! ```
//!
//! The result is a **prefix** of the range, in which every page is covered: [`Grabbed`]. A round ends early where the
//! index differs from what the look found; the prefix is kept, folios locked behind it are released, so that the
//! locking order below holds, and the next round begins there with a new look. [`GrabEnd`] says where the grab ends.
//!
//! **Who waits for whom.** A thread that waits for a folio lock has locks of smaller indices only: it locks folios that
//! it finds in rising order, and those that it inserts are locked before another thread can want them. So two that grab
//! ranges that overlap meet at the first folio of both, and one is through before the other goes on. While it waits it
//! has none of the mapping's locks but Write. Memory is waited for, and spilled pages are brought back, only while
//! nothing is locked yet. Reclaim waits for no folio lock. (A thread that has a [`Grabbed`] and grabs once more must
//! keep the order itself, or use [`OnLocked::Again`].)
//!
//! **A thread that takes pages out** of a file meanwhile, locked or not, detaches the folio; bytes that were put into
//! it are then lost ([`Committed::left`]). That cannot happen to a file whose bytes have to reach a device: its
//! grabbers hold its write lock, shared, as long as they have a [`Grabbed`]. Grabbers of a memory file hold it during
//! the grab alone, and a thread that cuts the file waits for locked folios.
//!
//! The end of a [`Grabbed`], whichever it is, unlocks everything, gives every hold back, and wakes the waiters:
//!
//! | a folio | bytes were put in | none were |
//! |---|---|---|
//! | new | zeros around them, up to date | taken out again; or left allocated, by [`Grabbed::leave_allocated`] |
//! | allocated | the same | as it was |
//! | with data | they are changed, and dirty | as it was |
//!
//! Invariants:
//!  1. The folios of a [`Grabbed`] follow each other without a gap; the first covers the first page asked for.
//!  2. When they were handed out, all were in the index at one moment of the last round that found them.
//!  3. Frames of the source are in the tree, or were given back to it, when a round has ended.
//!  4. A round that meets no surprise takes the tree's lock once, and not at all if every folio is there.
//!
//! Not an invariant: that a folio lies inside the range: the first and the last may reach over its ends. Nor that
//! grabbed folios stay in the index.
//!
//! Cost: a look at each slot, a step on a word for each folio that is found, and an insertion as that of a window.
//!
//! The way of N. Kalyazin's `filemap_grab_folios` (RFC, January 2025), with the changes that its reviews asked for:
//! large folios, shadows, and the batched lookup. This differs: no bitmap of present pages, since gaps are ranges;
//! frames come before locks; a surprise ends a round and is no special case of it.

use std::collections::VecDeque;
use std::ops::Range;

use crate::arena::{Flags, Gap, HoldRefused, LockRefused, ReadableState};
use crate::backend::{FillRun, PageKey, WaitQueue};
use crate::folio::{FinishOutcome, HeldFolio, LockedFolio, LockedState};
use crate::stats::Count;
use crate::sync::LockWait;
use crate::units::{Frame, Millis, Order, PageIndex};
use crate::xarray::{Kind, RangeStop};

use super::batch::ReadBatch;
use super::dirty::MarkOutcome;
use super::insert::Insertion;
use super::new_folio::{FolioShape, RunOutcome, cut};
use super::owner::{Mapping, MappingGuard};
use quinion_view::lookup::finder;

/// Pages of one round: a folio of the largest order.
pub const GRAB_PAGES_MAX: u64 = Order::MAX.pages() as u64;
/// Rounds that gained no page because another thread changed the same place, until the grab gives up.
const ROUNDS_MAX: u32 = 1000;

/// The grab's treatment of a folio that another thread has locked.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum OnLocked {
    /// The grab waits for the folio.
    #[default]
    Wait,
    /// The grab ends before it.
    Again,
}

/// When the pages that are grabbed are marked dirty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MarkDirty {
    /// New folios are marked dirty as a whole when they are inserted: for a mapping without write-back. Folios that
    /// were there are dirty already, and are marked again if they were touched on their way to the spill file.
    OnInsert(Millis),
    /// Folios that were touched are marked before they are unlocked, as dirty since this moment.
    OnUnlock(Millis),
}

/// How a range is grabbed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grab {
    /// The shape of new folios; each is the largest of its orders that range and frames allow.
    pub shape: FolioShape,
    /// The treatment of locked ones.
    pub on_locked: OnLocked,
    /// When pages become dirty.
    pub dirty: MarkDirty,
}

/// A range to be grabbed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GrabRequest {
    /// The pages, which become whole folios of the smallest order.
    pub pages: Range<PageIndex>,
    /// How they are grabbed.
    pub how: Grab,
}

/// Why a grab ended where it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrabEnd<E> {
    /// At the end of the range.
    All,
    /// Where the file ends.
    Size,
    /// Before a folio that is locked, with [`OnLocked::Again`].
    Locked,
    /// Before a folio for which there were no frames.
    NoFrames,
    /// Before a folio for which there was no node of the tree.
    NoNode,
    /// Before a page that is spilled: it is brought back for a caller that has nothing locked.
    Spilled,
    /// Other threads inserted folios there in every round.
    Contended,
    /// The source has failed.
    Failed(E),
}

/// Between which steps of a round a watcher is called: for tests of races there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrabStep {
    /// Frames are there, and nothing of this round is locked.
    Framed,
    /// Folios that are there are locked.
    Locked,
    /// Missing ones are inserted, and the tree lock is released.
    Inserted,
}

/// Callback between the steps of a grab.
pub type GrabObserver<'w> = &'w mut dyn FnMut(GrabStep);

/// Whether a source may wait for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryWait {
    /// The caller has no folio locked: the source may wait.
    Wait,
    /// The caller has folios locked: it takes frames that are free, or can be made so at once.
    Hurry,
}

/// A source's answer to a request for gaps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GapFrames {
    /// Frames, in the order of the gaps: for a prefix of them, if there are no more.
    Runs(Vec<FillRun>),
    /// No frames just now, but things have changed: it is worth looking for the gaps anew.
    Retry,
}

/// Where the frames of a grab come from. In each round it is asked once, and told once of their outcome.
pub trait FrameSource {
    /// An error of the source.
    type Error;
    /// Frames for `gaps`, of which there is one at least. The caller has no lock of the mapping's
    /// but Write, and perhaps folios of smaller indices.
    fn take(&mut self, gaps: &[Gap], memory: MemoryWait) -> Result<GapFrames, Self::Error>;
    /// The outcome of the last `take`: `inserted` are locked folios of the mapping now, and `left` are the source's
    /// again.
    fn settle(&mut self, inserted: &[FillRun], left: &[FillRun]);
    /// Nodes ran out: whether it could make some, so that another try is worth while.
    fn make_nodes(&mut self) -> bool;
    /// The page at `index` is spilled: brings it back, with the spilled pages behind it up to `to`. The caller has
    /// nothing locked, and no lock of the mapping's but Write.
    fn spill_in(&mut self, index: PageIndex, to: PageIndex) -> Result<(), Self::Error>;
}

/// Folios that follow each other, each locked and held. However it ends, they are unlocked; see the head of this file.
#[derive(Debug)]
pub struct Grabbed<'a> {
    mapping: &'a Mapping,
    wait_queue: &'a WaitQueue,
    dirty: MarkDirty,
    folios: VecDeque<LockedFolio<'a>>,
}

/// The outcome of a [`Grabbed`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Committed {
    /// Pages that have their bytes now, those that had them before among them.
    pub pages: u64,
    /// Pages that were touched and are lost: their folios had left the index.
    pub left: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UntouchedFolios {
    Remove,
    /// Untouched new folios stay, without bytes, and read as zeros.
    Keep,
}

impl<'a> Grabbed<'a> {
    fn none(mapping: &'a Mapping, wait_queue: &'a WaitQueue, dirty: MarkDirty) -> Self {
        Self { mapping, wait_queue, dirty, folios: VecDeque::new() }
    }
    /// The folios, in rising order.
    pub fn folios(&self) -> impl Iterator<Item = &LockedFolio<'a>> {
        self.folios.iter()
    }
    /// The folios, to put bytes into.
    pub fn folios_mut(&mut self) -> impl Iterator<Item = &mut LockedFolio<'a>> {
        self.folios.iter_mut()
    }
    /// The first folio, to put bytes into.
    pub fn front_mut(&mut self) -> Option<&mut LockedFolio<'a>> {
        self.folios.front_mut()
    }
    /// The `nth` folio, to put bytes into.
    pub fn folio_mut(&mut self, nth: usize) -> Option<&mut LockedFolio<'a>> {
        self.folios.get_mut(nth)
    }
    /// Lets go of all but the first `folios`.
    pub fn truncate(&mut self, folios: usize) {
        let mut rest = Grabbed::none(self.mapping, self.wait_queue, self.dirty);
        rest.folios = self.folios.split_off(folios.min(self.folios.len()));
    }
    /// How many folios there are.
    pub fn len(&self) -> usize {
        self.folios.len()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }
    /// The first page of the first folio.
    pub fn start(&self) -> Option<PageIndex> {
        self.folios.front().map(LockedFolio::first)
    }
    /// The page behind the last folio.
    pub fn end(&self) -> Option<PageIndex> {
        self.folios.back().map(LockedFolio::end)
    }

    /// Ends the work on all of them; see the table at the head of this file.
    pub fn commit(mut self) -> Committed {
        self.release(self.folios.len(), UntouchedFolios::Remove)
    }
    /// Ends the work on the first `folios` of them; threads that wait for these are woken now.
    pub fn commit_first(&mut self, folios: usize) -> Committed {
        self.release(folios, UntouchedFolios::Remove)
    }
    /// As [`Grabbed::commit`], but new folios into which nothing was put stay: they have frames and no bytes, and read
    /// as zeros. Only memory files know such folios.
    pub fn leave_allocated(mut self) -> Committed {
        self.release(self.folios.len(), UntouchedFolios::Keep)
    }
    /// Ends the work on all of them, and keeps the holds of those that have their bytes: in rising order, up to the
    /// first that has none, or that has all the holds it can have.
    ///
    /// # Errors
    /// The first has no bytes, or all the holds it can have.
    pub fn commit_into_held(mut self) -> Result<Vec<HeldFolio<'a>>, HoldRefused> {
        let (mut held, mut refused) = (Vec::with_capacity(self.len()), None);
        for folio in &self.folios {
            match HeldFolio::take(self.mapping.arena(), folio.frame(), self.mapping.id(), folio.first()) {
                Ok(hold) => held.push(hold),
                Err(why) => {
                    refused = Some(why);
                    break;
                }
            }
        }
        self.release(self.folios.len(), UntouchedFolios::Remove);
        let is_there = |held: &HeldFolio<'a>| held.is_readable() == ReadableState::Yes;
        let ready = held.iter().take_while(|held| is_there(held)).count();
        held.truncate(ready);
        match refused {
            Some(HoldRefused::TooMany) if held.is_empty() => Err(HoldRefused::TooMany),
            _ => Ok(held),
        }
    }

    fn release(&mut self, count: usize, untouched: UntouchedFolios) -> Committed {
        let (first, mut ended) = (self.start(), Committed::default());
        let mut folios: Vec<LockedFolio<'a>> = self.folios.drain(..count).collect();
        let Some(end) = folios.last().map(LockedFolio::end) else { return ended };
        ended.left = self.settle(&folios, untouched);
        for folio in folios.drain(..) {
            let (pages, touched) = (u64::from(folio.order().pages()), folio.is_touched());
            let has_bytes = touched || folio.state() == LockedState::Data;
            match folio.finish() {
                FinishOutcome::Kept if has_bytes => ended.pages += pages,
                FinishOutcome::Left if touched && matches!(self.dirty, MarkDirty::OnInsert(_)) => {
                    ended.left += pages
                }
                FinishOutcome::Kept | FinishOutcome::Left => {}
            }
        }
        if let Some(page) = first {
            self.wait_queue
                .wake_filled(PageKey { mapping: self.mapping.id(), page }, (end.0 - page.0) as u32);
        }
        ended
    }

    /// Before `folios` are unlocked, under the tree's lock: marks touched folios dirty, and takes unwanted ones out.
    /// Returns the touched pages whose folios have left.
    fn settle(&self, folios: &[LockedFolio<'a>], untouched: UntouchedFolios) -> u64 {
        // A memory file's pages are dirty from birth, unless one is on its way to the spill file: pages that were
        // changed since have to be marked, or other bytes come back.
        let mark = |folio: &LockedFolio<'a>| match self.dirty {
            _ if !folio.is_touched() => None,
            MarkDirty::OnUnlock(now) => Some(now),
            MarkDirty::OnInsert(_) if folio.state() != LockedState::Data => None,
            MarkDirty::OnInsert(now) => {
                (!self.mapping.is_dirty(folio.held(), folio.touched_pages())).then_some(now)
            }
        };
        let goes = |folio: &LockedFolio<'a>| {
            untouched == UntouchedFolios::Remove && folio.state() == LockedState::New && !folio.is_touched()
        };
        if !folios.iter().any(|folio| mark(folio).is_some() || goes(folio)) {
            return 0;
        }
        let (mut tree, mut left, mut removed) = (self.mapping.lock(), 0, 0);
        for folio in folios {
            if goes(folio) {
                let run =
                    FillRun { index: folio.first(), frame: folio.frame(), pages: folio.order().pages() };
                removed += tree.remove_failed(run, |_, _| false);
            } else if let Some(now) = mark(folio) {
                let pages = folio.touched_pages();
                let count = pages.end.0 - pages.start.0;
                let marked = tree.mark_folio(folio.frame(), pages, now);
                // For a folio that was inserted dirty, its completion reports whether it has left.
                let counts = marked == MarkOutcome::Left && matches!(self.dirty, MarkDirty::OnUnlock(_));
                left += if counts { count } else { 0 };
            }
        }
        drop(tree);
        self.mapping.count(Count::Undelivered, removed);
        left
    }
}

impl Drop for Grabbed<'_> {
    fn drop(&mut self) {
        self.release(self.folios.len(), UntouchedFolios::Remove);
    }
}

struct GrabRound<'a> {
    end: PageIndex,
    runs: Vec<FillRun>,
    /// Folios that were there, locked.
    present: Vec<LockedFolio<'a>>,
    created: Vec<LockedFolio<'a>>,
    stop: Option<RoundEnd>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RoundEnd {
    Locked,
    NoNode,
}

/// A grab under way.
struct GrabCall<'g, 'a, S> {
    mapping: &'a Mapping,
    wait_queue: &'a WaitQueue,
    how: Grab,
    source: &'g mut S,
    watch: GrabObserver<'g>,
}

impl Mapping {
    /// Finds or creates folios for the pages of `request`, and locks them. Waits for folio locks as it says, and for
    /// memory as `source` does; the caller has no lock of the mapping's but Write.
    pub fn grab<'a, S: FrameSource>(
        &'a self,
        wait_queue: &'a WaitQueue,
        request: GrabRequest,
        source: &mut S,
        watch: GrabObserver<'_>,
    ) -> (Grabbed<'a>, GrabEnd<S::Error>) {
        let GrabRequest { pages, how } = request;
        let unit = how.shape.orders.min;
        let (mut at, end) = (pages.start.align_down(unit), pages.end.align_up(unit));
        let mut grabbed = Grabbed::none(self, wait_queue, how.dirty);
        let mut call = GrabCall { mapping: self, wait_queue, how, source, watch };
        let mut fruitless = 0;
        while at < end {
            let limit = end.min(self.grab_limit(unit));
            if at >= limit {
                return (grabbed, GrabEnd::Size);
            }
            let behind = at.align_down(Order::MAX).plus(GRAB_PAGES_MAX);
            if let Err(stopped) = call.round(&mut grabbed, at..limit.min(behind)) {
                return (grabbed, stopped);
            }
            let now = grabbed.end().unwrap_or(at);
            fruitless = if now > at { 0 } else { fruitless + 1 };
            if fruitless == ROUNDS_MAX {
                return (grabbed, GrabEnd::Contended);
            }
            if fruitless > 0 {
                // A thread that is changing the page has the lock until it is done.
                drop(self.lock());
            }
            at = now;
        }
        (grabbed, GrabEnd::All)
    }

    fn grab_limit(&self, unit: Order) -> PageIndex {
        PageIndex(self.size_pages()).align_up(unit)
    }
}

impl<'a, S: FrameSource> GrabCall<'_, 'a, S> {
    fn round(&mut self, grabbed: &mut Grabbed<'a>, pages: Range<PageIndex>) -> Result<(), GrabEnd<S::Error>> {
        // 1
        let GapScan { gaps, end } = self.find_gaps(pages.clone());
        if end == pages.start {
            // Memory is waited for to bring it back, and the device.
            return match grabbed.is_empty() {
                true => self.source.spill_in(end, pages.end).map_err(GrabEnd::Failed),
                false => Err(GrabEnd::Spilled),
            };
        }
        // 2
        let mut round =
            GrabRound { end, runs: Vec::new(), present: Vec::new(), created: Vec::new(), stop: None };
        if !gaps.is_empty() {
            let memory = if grabbed.is_empty() { MemoryWait::Wait } else { MemoryWait::Hurry };
            round.runs = match self.source.take(&gaps, memory).map_err(GrabEnd::Failed)? {
                GapFrames::Runs(runs) => runs,
                GapFrames::Retry => return Ok(()),
            };
            round.end = end.min(first_without_frame(&gaps, &round.runs).unwrap_or(end));
            if round.end == pages.start {
                self.source.settle(&[], &round.runs);
                return Err(GrabEnd::NoFrames);
            }
        }
        let framed = round.end;
        (self.watch)(GrabStep::Framed);
        // 3
        self.lock_present(pages.start, &mut round);
        (self.watch)(GrabStep::Locked);
        // 4, 5
        let (inserted, left) = self.insert_gaps(&mut round);
        self.source.settle(&inserted, &left);
        (self.watch)(GrabStep::Inserted);
        let got = self.keep_prefix(grabbed, &mut round, pages.start);
        match round.stop {
            Some(RoundEnd::Locked) if got == round.end => Err(GrabEnd::Locked),
            Some(RoundEnd::NoNode) if got == pages.start && !self.source.make_nodes() => Err(GrabEnd::NoNode),
            _ if framed < end && got >= framed => Err(GrabEnd::NoFrames),
            _ => Ok(()),
        }
    }

    /// Step 1, up to the first page that is spilled.
    fn find_gaps(&self, pages: Range<PageIndex>) -> GapScan {
        let mapping = self.mapping;
        let grown = mapping.view().grown();
        let mut finder = finder(&grown, mapping.record());
        let (mut gaps, mut at): (Vec<Gap>, _) = (Vec::new(), pages.start);
        let (mut walked, together) = (at.0, mapping.index().lookup_pages_max());
        while at < pages.end {
            if at.0 - walked >= together {
                finder.reset();
                walked = at.0;
            }
            match finder.find(at.0).entry.kind() {
                Kind::Folio(frame) => {
                    let folio = mapping.view().descriptor(Frame(frame));
                    let stamp = folio.and_then(|folio| folio.identify(mapping.id(), at).ok());
                    // One that is on its way out or in is met again in step 3.
                    at = stamp.map_or(at.plus(1), |it| it.first.plus(u64::from(it.order().pages())));
                }
                Kind::Value(value) if value.is_spill() => break,
                _ => {
                    match gaps.last_mut() {
                        Some(gap) if gap.first.plus(u64::from(gap.pages)) == at => gap.pages += 1,
                        _ => gaps.push(Gap { first: at, pages: 1 }),
                    }
                    at = at.plus(1);
                }
            }
        }
        GapScan { gaps, end: at.min(pages.end) }
    }

    /// Step 3. The round ends before the first page without a folio, or with one that is locked and not waited for.
    fn lock_present(&self, from: PageIndex, round: &mut GrabRound<'a>) {
        let GrabRound { end, runs, present, stop, .. } = round;
        let (mut at, mut runs) = (from, runs.iter().peekable());
        let (mut batch, together) = (ReadBatch::new(), self.mapping.index().lookup_pages_max());
        while at < *end {
            if let Some(run) = runs.next_if(|run| run.index <= at) {
                at = run.index.plus(u64::from(run.pages));
                continue;
            }
            let behind = runs.peek().map_or(*end, |run| run.index.min(*end));
            let last = (behind.0 - 1).min(at.0.saturating_add(together - 1));
            self.mapping.get_folios_contig(at, PageIndex(last), &mut batch);
            if batch.is_empty() {
                *end = at; // it has left since the look
            }
            for held in batch.drain() {
                match self.lock_folio(held) {
                    Ok(locked) => {
                        at = locked.end();
                        present.push(locked);
                    }
                    Err(refused) => {
                        *end = at;
                        *stop = (refused == LockRefused::Locked).then_some(RoundEnd::Locked);
                        return;
                    }
                }
            }
            if at > behind {
                *end = behind.min(*end); // a larger one than the look had seen: it covers what frames are for
            }
        }
    }

    fn lock_folio(&self, mut held: HeldFolio<'a>) -> Result<LockedFolio<'a>, LockRefused> {
        loop {
            match LockedFolio::lock(held) {
                // If it has left since it is not kept; a thread that waits for it is woken at the end of the round.
                Ok(locked) => return Ok(locked),
                Err((LockRefused::Locked, it)) if self.how.on_locked == OnLocked::Wait => {
                    let descriptor = self.mapping.view().own(it.frame());
                    self.wait_queue
                        .wait(&*self.mapping.backend(), &mut || !descriptor.word().has(Flags::LOCKED));
                    held = it;
                }
                Err((refused, _)) => return Err(refused),
            }
        }
    }

    /// Steps 4 and 5. The runs that were inserted, and those that were not.
    fn insert_gaps(&self, round: &mut GrabRound<'a>) -> (Vec<FillRun>, Vec<FillRun>) {
        let runs = std::mem::take(&mut round.runs);
        let (mut inserted, mut left) = (Vec::with_capacity(runs.len()), Vec::new());
        let Some(first) = runs.first().filter(|run| run.index < round.end) else { return (inserted, runs) };
        let mut guard = self.mapping.lock_to_add(first.index, round.end.0 - first.index.0, LockWait::Wait);
        // A file that has become shorter gets nothing behind its end; the thread that cuts it takes out the folios
        // there.
        round.end = round.end.min(self.mapping.grab_limit(self.how.shape.orders.min));
        let mut conflict = None;
        for run in runs {
            let (wanted, beyond) = cut_before(run, round.end);
            let added = match conflict {
                None => self.insert_run(&mut guard, wanted, &mut round.created),
                Some(_) => RunOutcome { pages: 0, stop: RangeStop::All },
            };
            let (went, rest) = cut(wanted, added.pages);
            inserted.extend((went.pages > 0).then_some(went));
            left.extend([rest, beyond].into_iter().filter(|run| run.pages > 0));
            if conflict.is_none() && rest.pages > 0 {
                conflict = Some(rest.index);
                round.stop = (added.stop == RangeStop::NoNode).then_some(RoundEnd::NoNode);
            }
        }
        round.end = round.end.min(conflict.unwrap_or(round.end));
        (inserted, left)
    }

    /// Inserts a prefix of a run, and adds its folios to `created`: locked, and the caller's. Those that are born dirty
    /// are marked under the hold of the lock in which they go in. Waits for locks, and ignores shadows.
    fn insert_run(
        &self,
        guard: &mut Option<MappingGuard<'a>>,
        run: FillRun,
        created: &mut Vec<LockedFolio<'a>>,
    ) -> RunOutcome {
        let (mapping, how) = (self.mapping, self.how);
        let inserted = &mut |tree: &mut MappingGuard<'_>, run: FillRun| {
            if let MarkDirty::OnInsert(now) = how.dirty {
                tree.mark_run_dirty(run, now);
            }
            let mut page = 0;
            while page < run.pages {
                let folio = LockedFolio::of_new(mapping.arena(), run.frame.plus(page));
                page += folio.order().pages();
                created.push(folio);
            }
        };
        let (shape, locks, consumed, gap) = (how.shape, LockWait::Wait, &mut |_, _| {}, &mut || {});
        mapping.add_run(guard, run, &mut Insertion { shape, locks, consumed, inserted, gap })
    }

    /// Adds to `grabbed` the folios of a round that follow it without a gap and are in the index. Returns the page
    /// behind.
    fn keep_prefix(
        &self,
        grabbed: &mut Grabbed<'a>,
        round: &mut GrabRound<'a>,
        from: PageIndex,
    ) -> PageIndex {
        let mut all = std::mem::take(&mut round.present);
        all.append(&mut round.created);
        all.sort_by_key(LockedFolio::first); // two rising sequences: one pass
        let mut end = from;
        let follows = |folio: &&LockedFolio<'a>| {
            let ok = folio.first() <= end && folio.first() < round.end && folio.is_live();
            end = if ok { folio.end() } else { end };
            ok
        };
        let kept = all.iter().take_while(follows).count();
        let rest = all.split_off(kept);
        grabbed.folios.extend(all);
        let mut surplus = Grabbed::none(self.mapping, self.wait_queue, self.how.dirty);
        surplus.folios.extend(rest);
        drop(surplus);
        end
    }
}

struct GapScan {
    gaps: Vec<Gap>,
    end: PageIndex,
}

fn first_without_frame(gaps: &[Gap], runs: &[FillRun]) -> Option<PageIndex> {
    let mut got: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
    gaps.iter().find_map(|&Gap { first, pages }| {
        let some = got.min(u64::from(pages));
        got -= some;
        (some < u64::from(pages)).then(|| first.plus(some))
    })
}

fn cut_before(run: FillRun, end: PageIndex) -> (FillRun, FillRun) {
    cut(run, end.0.saturating_sub(run.index.0).min(u64::from(run.pages)) as u32)
}

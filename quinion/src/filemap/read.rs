//! Read: the steps of one read call, for the owner's threads and on behalf of viewers.
//!
//! ```text
//!   read      hits as far as they go --end--> look at the file again, once, if nothing was read
//!                  ^        |
//!                  |      a page is missing
//!                  |        v
//!             copy <-- get_read_batch: what is ready by now, as far as it goes
//!                  |        | nothing is
//!                  |        v
//!             copy <-- hold_folio: there and readable? hold it
//!                           |   being filled? wait for that
//!                           |   absent?       fill_miss: plan, fill, wait for the page asked for
//!                           +-- and again, until it is held, an error is its own, or the file ends
//! ```
//!
//! A caller that has tried the hit already says why that ended, and it is not tried again. A [`Reader`] is a handle's
//! readahead state and, for an uncached read, the folios to be dropped at its end (`uncached.rs`). Each step that may
//! wait asks the caller's [`WaitPolicy`] first.
//!
//! A window that failed says little about the page that was asked for: the bad sector may lie anywhere in it. So the
//! next attempt reads that page alone, and only its error is the reader's.
//!
//! Invariants:
//!  1. No lock is held while the device or memory is waited for.
//!  2. Bytes are shown only up to a size that was looked at after they were copied, and only if the file was not taken
//!     for another between the hold and that look; `view/src/hit/mod.rs` tells why.
//!  3. A batch is held for a copy and for nothing else: it is given back before memory is asked for.
//!  4. An error is returned only if no byte was read; otherwise it comes with the next call.
//!
//! Not an invariant: that a filled page is still there when its reader looks. It tries again, [`SEEKS`] times.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::arena::{GrownView, HOLDS_MAX, HoldRefused, NotReady, ReadableState};
use crate::backend::{Attributes, Backend, ReapMode};
use crate::error::{Error, Repr};
use crate::folio::HeldFolio;
use crate::mapping::{BatchEnd, Mapping, ReadBatch, RemoveFilter};
use crate::readahead::{Cached, Config, ReadRequest, Readahead, Window, Windows};
use crate::stats::Count;
use crate::sync::{Rank, RankedGuard, RankedMutex};
use crate::units::{
    FILE_BYTES_MAX, Order, PAGE_SIZE, PageIndex, PoolNumber, met_end_within_page, pages_of_bytes,
};

use super::fill::{AfterSubmit, FillOutcome, FillRequest, SubmitBatch, WindowFills};
use super::frame_supply::FillUrgency;
use super::shared::Filemap;
use super::truncate::Truncation;
use super::uncached::{DropBehindState, ReadCall, Reader, UncachedRead};
use super::wait_policy::WaitPolicy;
use quinion_view::hit::{HitStop, read_hits_into};

/// A page may be there and gone again each time, or its fill end without it and without an error.
const SEEKS: u32 = 1000;

/// Answers for readahead: hints, by lookups without a lock; a slot for each page, and a way down for each leaf.
impl Cached for Mapping {
    fn cached_before(&self, index: PageIndex, max: u32) -> u32 {
        let max = index.0.min(u64::from(max)) as u32;
        let before = (0..max).map(|i| PageIndex(index.0 - 1 - u64::from(i)));
        self.index().first_missing(before).map_or(max, |missing| (index.0 - 1 - missing.0) as u32)
    }
    fn next_missing(&self, index: PageIndex, max: u32) -> Option<PageIndex> {
        self.index().first_missing((0..u64::from(max)).map(|i| index.plus(i)))
    }
}

impl Filemap {
    /// Returns how many bytes were read: fewer at the end of the file, or where the read failed or would have waited.
    pub fn read(self: &Arc<Self>, call: &ReadCall<'_>, position: u64, to: &mut [u8]) -> Result<usize, Error> {
        let read = self.finish(call, position, to, ReadProgress::default());
        call.reader.end_drop_behind(position, *read.as_ref().unwrap_or(&0), call.wait_policy.locks());
        read
    }

    pub(crate) fn finish(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
        mut reading: ReadProgress,
    ) -> Result<usize, Error> {
        let outcome = self.read_on(call, position, to, &mut reading);
        self.end_read(reading, outcome)
    }

    /// Counts a read that has ended, and returns the bytes read; the error comes again with the next call.
    pub(super) fn end_read(&self, reading: ReadProgress, outcome: Result<(), Error>) -> Result<usize, Error> {
        self.count_read(reading);
        if reading.done > 0 { Ok(reading.done) } else { outcome.map(|()| 0) }
    }

    /// As [`Self::finish`], for a read that has counted: only its bytes are added.
    #[cfg(feature = "tokio")]
    pub(crate) fn read_counted(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
    ) -> Result<usize, Error> {
        let mut reading = ReadProgress { done: 0, hit: true, stopped: None };
        let outcome = self.read_on(call, position, to, &mut reading);
        self.counters.add(Count::Bytes, reading.done as u64);
        call.reader.end_drop_behind(position, reading.done, call.wait_policy.locks());
        if reading.done > 0 { Ok(reading.done) } else { outcome.map(|()| 0) }
    }

    pub(crate) fn read_on(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
        run: &mut ReadProgress,
    ) -> Result<(), Error> {
        let &ReadCall { mapping, reader, wait_policy } = call;
        let mut end_checked = reader.skips_size_check();
        while run.done < to.len() {
            let stopped = match run.stopped.take() {
                Some(stopped) => stopped,
                None => self.read_hits(call, position, to, run),
            };
            match stopped {
                HitStop::Full => return Ok(()),
                HitStop::EndOfFile(_) if run.done > 0 || end_checked || wait_policy != WaitPolicy::Wait => {
                    return Ok(());
                }
                HitStop::EndOfFile(_) => {
                    end_checked = true;
                    self.revalidate_at_end(mapping)?;
                }
                HitStop::Absent | HitStop::Filling | HitStop::Writing | HitStop::Stale => {
                    debug_assert_ne!(stopped, HitStop::Stale, "an open handle keeps its mapping");
                    run.hit = false;
                    let at = position + run.done as u64;
                    let rest = &mut to[run.done..];
                    run.done += self.read_slowly(call, at, rest, stopped)?;
                    // The end of the file, within a page: bytes that a growth puts behind it are of a later moment.
                    if met_end_within_page(position, run.done) {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn read_hits(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
        run: &mut ReadProgress,
    ) -> HitStop {
        let (at, rest) = (position + run.done as u64, &mut to[run.done..]);
        let touch = |grown: GrownView<'_>, frame| call.reader.touch(grown, frame);
        let hits = read_hits_into(self.view_of(call.mapping), at, rest, touch);
        run.done += hits.bytes;
        if let Some(page) = hits.marker {
            self.advance(call, page);
        }
        hits.stopped
    }

    pub(crate) fn count_read(&self, ReadProgress { done, hit, .. }: ReadProgress) {
        let outcome = if hit { Count::Hits } else { Count::Misses };
        self.counters.add_all([(Count::Bytes, done as u64), (outcome, 1)]);
    }

    fn read_slowly(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
        mut stopped: HitStop,
    ) -> Result<usize, Error> {
        loop {
            match self.read_held(call, position, to, stopped)? {
                Some(bytes) => return Ok(bytes),
                None => stopped = HitStop::Filling, // it may be there again, and be on its way
            }
        }
    }

    /// As [`Filemap::read_slowly`]: the folios ready by now, else the first folio. `None`: of another file than now.
    fn read_held(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
        stopped: HitStop,
    ) -> Result<Option<usize>, Error> {
        let mapping = call.mapping;
        // The size, before the data is held: a folio from before a growth is not found with the new size, so the
        // zeros behind the old end in it are not taken for the file's.
        let from = ReadStart { position, renewals: mapping.renewals() };
        let left = mapping.size().saturating_sub(position);
        let len = to.len();
        let to = &mut to[..left.min(len as u64) as usize];
        if to.is_empty() {
            return Ok(Some(0));
        }
        // 1 Ready folios. A read within one page needs no batch.
        let index = PageIndex::of_byte(position);
        let last = PageIndex::of_byte(position + to.len() as u64 - 1);
        let mut first = if stopped == HitStop::Absent { FirstPage::Absent } else { FirstPage::Unknown };
        if index != last && stopped != HitStop::Absent {
            let mut batch = ReadBatch::new();
            match mapping.get_read_batch(index, last, &mut batch) {
                BatchEnd::FirstNotReady => first = batch.pop().into(),
                _ if batch.is_empty() => {}
                _ => return Ok(self.read_batch(call, from, batch, to)),
            }
        }
        // 2 The first folio is what the reader waits for.
        let Some(held) = self.hold_folio(call, position, len, first)? else {
            return Ok(Some(0));
        };
        call.reader.touch(self.arena.view().grown(), held.frame());
        let bytes = held.copy_out(position, to);
        let shown = shown(mapping, from, bytes, [&held]);
        if held.has_marker() {
            self.advance(call, held.first());
        }
        Ok(shown)
    }

    /// Copies the bytes of ready folios into `to` and gives them back; only then does readahead go on, which may need
    /// memory. `None` as [`Filemap::read_held`].
    fn read_batch(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        from: ReadStart,
        batch: ReadBatch<'_>,
        to: &mut [u8],
    ) -> Option<usize> {
        let mut done = 0;
        for held in batch.iter() {
            call.reader.touch(self.arena.view().grown(), held.frame());
            done += held.copy_out(from.position + done as u64, &mut to[done..]);
        }
        let shown = shown(call.mapping, from, done, batch.iter());
        let marked = batch.last().filter(|held| held.has_marker()).map(HeldFolio::first);
        drop(batch);
        if let Some(page) = marked {
            self.advance(call, page);
        }
        shown
    }

    /// Holds the readable folio that covers `position`, filling it first if need be; `first` is the caller's own look
    /// at the first page. `None` if the file ends there.
    pub(crate) fn hold_folio<'m>(
        self: &Arc<Self>,
        call: &ReadCall<'m>,
        position: u64,
        len: usize,
        first: FirstPage<'m>,
    ) -> Result<Option<HeldFolio<'m>>, Error> {
        let index = PageIndex::of_byte(position);
        let miss = Miss { index, position, len, reach: ReadExtent::Window };
        self.hold_reaching(MissedRead { call: *call, miss }, first)
    }

    pub(super) fn wait_for_page(
        self: &Arc<Self>,
        mapping: &Arc<Mapping>,
        position: u64,
        pool: PoolNumber,
        behind: Option<&Arc<DropBehindState>>,
    ) -> Result<(), Error> {
        let none = RankedMutex::new(Rank::Readahead, Readahead::new(Config::new(1)));
        let passing = behind.map(UncachedRead::new);
        let reader = Reader::new(&none, pool, passing.as_ref());
        self.hold_page(mapping, reader, position).map(drop)
    }

    /// As [`Filemap::hold_folio`]; a page that is not there is read alone.
    pub(super) fn hold_page<'m>(
        self: &Arc<Self>,
        mapping: &'m Arc<Mapping>,
        reader: Reader<'m>,
        position: u64,
    ) -> Result<Option<HeldFolio<'m>>, Error> {
        let index = PageIndex::of_byte(position);
        let miss = Miss { index, position, len: 1, reach: ReadExtent::Page };
        let call = ReadCall { mapping, reader, wait_policy: WaitPolicy::Wait };
        self.hold_reaching(MissedRead { call, miss }, FirstPage::Unknown)
    }

    /// As [`Filemap::hold_folio`], beginning with an attempt that reaches as far as the miss says.
    fn hold_reaching<'m>(
        self: &Arc<Self>,
        mut missed: MissedRead<'m>,
        mut first: FirstPage<'m>,
    ) -> Result<Option<HeldFolio<'m>>, Error> {
        let MissedRead { call: ReadCall { mapping, .. }, miss: Miss { index, position, .. } } = missed;
        for _ in 0..SEEKS {
            if position >= mapping.size() {
                return Ok(None);
            }
            let held = match std::mem::take(&mut first) {
                FirstPage::Held(held) => Ok(held),
                FirstPage::Absent => Err(HoldRefused::Mismatch), // the planner of the miss looks once more
                FirstPage::Unknown => mapping.try_hold(index),
            };
            match held {
                Ok(held) => match self.wait_readable(&missed, &held) {
                    ReadableState::Yes => return Ok(Some(held)),
                    ReadableState::NotYet => return Err(Repr::WouldBlock { position }.into()),
                    ReadableState::Never | ReadableState::Zeros => missed.miss.reach = ReadExtent::Page,
                },
                Err(HoldRefused::TooMany) => return Err(Repr::TooManyPins { holds: HOLDS_MAX }.into()),
                Err(HoldRefused::Mismatch | HoldRefused::Filling) => match self.fill_miss(&missed)? {
                    MissOutcome::Ready(held) => return Ok(Some(held)),
                    MissOutcome::Again(further) => missed.miss.reach = further,
                },
            }
        }
        Err(Repr::NoMemory { position, pages: self.pages_max() }.into())
    }

    fn wait_readable(&self, missed: &MissedRead<'_>, held: &HeldFolio<'_>) -> ReadableState {
        let &MissedRead { call: ReadCall { mapping, wait_policy, .. }, miss } = missed;
        let readable = || held.is_readable_at(miss.index);
        match wait_policy {
            WaitPolicy::Wait => {
                self.wait_queue.wait(&*mapping.backend(), &mut || readable() != ReadableState::NotYet);
            }
            // Reaping completions starts nothing and waits for nothing.
            WaitPolicy::Start | WaitPolicy::Now | WaitPolicy::CacheOnly => {
                mapping.backend().reap(ReapMode::Ready, &mut || false);
            }
        }
        readable()
    }

    /// Fills a page that is not there. If that failed, says how far the next attempt reaches: after a failed window,
    /// the page alone; after that, the error.
    fn fill_miss<'m>(self: &Arc<Self>, missed: &MissedRead<'m>) -> Result<MissOutcome<'m>, Error> {
        let &MissedRead { call: ReadCall { mapping, reader, wait_policy }, miss } = missed;
        let Miss { index, position, reach, .. } = miss;
        let would_block = || Error::from(Repr::WouldBlock { position });
        if wait_policy == WaitPolicy::CacheOnly {
            return Err(would_block());
        }
        // 1 Which pages? None if it has come meanwhile, or the file became shorter.
        let mut windows = Windows::none();
        let readahead = plan_miss(missed, &mut windows)?;
        // 2 The first window, with the page that is waited for.
        let Some(&window) = windows.first() else { return Ok(MissOutcome::Again(reach)) };
        let is_all = windows.len() == 1;
        let next = if wait_policy == WaitPolicy::Wait && is_all {
            AfterSubmit::Reap(index)
        } else {
            AfterSubmit::Anything
        };
        let wanted = MissWindow { window, wanted: windows.wanted(), readahead, next };
        let (filled, backend) = self.begin_miss(missed, wanted);
        if matches!(filled, FillOutcome::Busy | FillOutcome::NoMemory | FillOutcome::PoolFull)
            && let Some(mut state) = reader.readahead().lock_as(wait_policy.locks())
        {
            state.on_refused(index);
        }
        match filled {
            FillOutcome::Nothing => Ok(MissOutcome::Again(reach)),
            FillOutcome::Busy => Err(would_block()),
            FillOutcome::NoMemory | FillOutcome::PoolFull if wait_policy != WaitPolicy::Wait => {
                Err(would_block())
            }
            FillOutcome::PoolFull => Err(self.pool_full(reader.pool(), position)),
            FillOutcome::NoMemory => Err(Repr::NoMemory { position, pages: self.pages_max() }.into()),
            FillOutcome::Submitted(batch) => {
                // 3 Those that no reader waits for.
                if !is_all {
                    let mut submit_batch = SubmitBatch::of(self, mapping, reader.pool(), reader.behind());
                    let _ =
                        self.insert_ahead(&mut submit_batch, &windows[1..], windows.wanted(), wait_policy);
                    submit_batch.submit(AfterSubmit::Anything);
                }
                // 4 The page.
                let outcome = self.await_miss(missed, &BegunFill { batch: &batch, backend: &*backend, next });
                batch.recycle();
                outcome
            }
        }
    }

    /// Starts filling the first window, with readahead still locked: a thread that misses the same page sees it on
    /// its way, and does not plan once more. Memory is waited for without that lock. Returns the backend as well.
    fn begin_miss(
        self: &Arc<Self>,
        missed: &MissedRead<'_>,
        first: MissWindow<'_>,
    ) -> (FillOutcome, Arc<dyn Backend>) {
        let ReadCall { mapping, reader, wait_policy } = missed.call;
        let MissWindow { window, wanted, readahead, next } = first;
        let mut request = FillRequest { window, wanted, urgency: FillUrgency::Ahead, wait_policy };
        let begin = |request: &FillRequest, readahead: Option<RankedGuard<'_, Readahead>>| {
            let mut submit_batch = SubmitBatch::of(self, mapping, reader.pool(), reader.behind());
            let filled = submit_batch.insert_window(request);
            drop(readahead); // a fill may end inside the call, and a thread that it wakes may want this lock
            (filled, submit_batch.submit(next))
        };
        match begin(&request, readahead) {
            (FillOutcome::NoMemory | FillOutcome::PoolFull, _) if wait_policy == WaitPolicy::Wait => {
                request.urgency = FillUrgency::Asked;
                begin(&request, None)
            }
            filled => filled,
        }
    }

    /// Waits for the missed page, if the caller does. Else returns how far the next attempt reaches, or the error.
    fn await_miss<'m>(
        &self,
        missed: &MissedRead<'m>,
        begun: &BegunFill<'_>,
    ) -> Result<MissOutcome<'m>, Error> {
        let &MissedRead { call: ReadCall { mapping, reader, wait_policy }, miss } = missed;
        let Miss { index, position, reach, .. } = miss;
        let &BegunFill { batch, backend, next } = begun;
        if let Ok(held) = mapping.index().try_hold_at(batch.likely_frame(index), index) {
            let readable = match held.is_readable_at(index) {
                ReadableState::NotYet => self.wait_for_fill(missed, &held, batch),
                there => {
                    if next != AfterSubmit::Anything {
                        // It arrived inside the call; or its folio was dropped and another thread has fetched the
                        // page. This thread will not wait, and so does not reap.
                        backend.reap(ReapMode::Ready, &mut || false);
                    }
                    there
                }
            };
            match readable {
                ReadableState::Yes => return Ok(MissOutcome::Ready(held)),
                ReadableState::NotYet => return Err(Repr::WouldBlock { position }.into()),
                ReadableState::Never | ReadableState::Zeros => {}
            }
        }
        if next != AfterSubmit::Anything {
            // This thread may not have waited, and others may wait for completions that were left to it.
            backend.reap(ReapMode::Ready, &mut || false);
        }
        let failure = batch.take_failure(index);
        if failure.is_some() && reach == ReadExtent::Window {
            let state = reader.readahead().lock_as(wait_policy.locks());
            state.into_iter().for_each(|mut state| state.on_failure());
        }
        extent_of_retry(failure, miss).map(MissOutcome::Again)
    }

    /// Waits for a page of `batch` as [`Filemap::wait_readable`] does; counts how long, if it was for want of memory.
    fn wait_for_fill(
        &self,
        missed: &MissedRead<'_>,
        held: &HeldFolio<'_>,
        batch: &WindowFills,
    ) -> ReadableState {
        let stalled = (missed.call.wait_policy == WaitPolicy::Wait && batch.refaulted()).then(Instant::now);
        let readable = self.wait_readable(missed, held);
        if let Some(since) = stalled {
            self.counters.add(Count::MemoryStall, since.elapsed().as_micros() as u64);
        }
        readable
    }

    /// The marked page was read: starts the next window, if the stream has one. Waits for none of it.
    pub fn advance(self: &Arc<Self>, call: &ReadCall<'_>, page: PageIndex) {
        let &ReadCall { mapping, reader, wait_policy } = call;
        if wait_policy == WaitPolicy::CacheOnly {
            return;
        }
        let Some(mut state) = reader.readahead().lock_as(wait_policy.locks()) else { return };
        if !mapping.index().take_marker(page) {
            return;
        }
        let before = *state;
        let asked = ReadRequest { index: page, pages: 1, file_pages: mapping.size_pages() };
        let windows = state.on_marker(asked, &**mapping);
        let mut submit_batch = SubmitBatch::of(self, mapping, reader.pool(), reader.behind());
        match self.insert_ahead(&mut submit_batch, &windows, windows.wanted(), wait_policy) {
            ReadaheadOutcome::Started => {}
            ReadaheadOutcome::Refused => *state = before, // the stream goes on with a miss
        }
        drop(state); // a fill may end inside the call, and a thread that it wakes may want this lock
        submit_batch.submit(AfterSubmit::Anything);
    }

    /// Inserts windows that no reader waits for, until one finds no memory or a busy lock; they go to the device with
    /// `together`. The pages in `wanted` were asked for.
    pub(super) fn insert_ahead(
        self: &Arc<Self>,
        submit_batch: &mut SubmitBatch<'_>,
        windows: &[Window],
        wanted: Range<PageIndex>,
        wait_policy: WaitPolicy,
    ) -> ReadaheadOutcome {
        for (at, &window) in windows.iter().enumerate() {
            let (wanted, urgency) = (wanted.clone(), FillUrgency::Ahead);
            match submit_batch.insert_window(&FillRequest { window, wanted, urgency, wait_policy }) {
                FillOutcome::Submitted(_) | FillOutcome::Nothing => {}
                FillOutcome::NoMemory | FillOutcome::PoolFull | FillOutcome::Busy if at == 0 => {
                    return ReadaheadOutcome::Refused;
                }
                FillOutcome::NoMemory | FillOutcome::PoolFull | FillOutcome::Busy => break,
            }
        }
        ReadaheadOutcome::Started
    }

    /// Makes the page at `position` ready for a viewer, and starts the other fills that a read of `len` bytes needs.
    pub fn make_ready(self: &Arc<Self>, call: &ReadCall<'_>, position: u64, len: usize) -> Result<(), Error> {
        if let Some(held) = self.hold_folio(call, position, len, FirstPage::Unknown)? {
            call.reader.touch(self.arena.view().grown(), held.frame());
            // A viewer cannot take the page's lock: it looks again when its writer has released it.
            held.wait_for_writer(PageIndex::of_byte(position));
        }
        Ok(())
    }

    /// Stats the file again; if it may have changed, forgets its folios, except dirty pages. Returns whether it
    /// did. The caller holds no lock of the index.
    pub fn revalidate(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Result<bool, Error> {
        let settled = mapping.is_settled();
        let changed = self.revalidate_at_end(mapping)?;
        if !changed && !settled {
            self.invalidate(mapping)?;
        }
        Ok(changed || !settled)
    }

    pub(crate) fn renew(self: &Arc<Self>, mapping: &Arc<Mapping>, now: &Attributes) -> Result<(), Error> {
        if mapping.is_settled() && mapping.is_as_in(mapping.begin_revalidation(), now) {
            return Ok(());
        }
        // The attributes were read before, perhaps before a flush by this cache.
        match mapping.writeback().writer() {
            Some(_) => self.revalidate(mapping).map(drop)?,
            None => drop(self.invalidate(mapping)?),
        }
        Ok(())
    }

    /// As [`Filemap::revalidate`], for a reader that met the end of the file: equal times are enough, or a file that
    /// was just written would be forgotten each time.
    pub(crate) fn revalidate_at_end(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Result<bool, Error> {
        let probe = mapping.begin_revalidation();
        let now = mapping.backend().attributes().map_err(Repr::Attributes)?;
        let changed = !mapping.is_as_in(probe, &now);
        if changed {
            self.invalidate(mapping)?;
        }
        Ok(changed)
    }

    /// Forgets the clean pages of a file and takes its attributes anew. A folio that is dirty in part loses its clean
    /// pages before the attributes are taken: a page that stayed would pass for the file as it is now. Waits for fills
    /// and flushes in flight there, and in a cache with a smallest folio for those of its dirty pages. Fails if the
    /// file cannot be looked at, or written to for that; or as [`Truncation::invalidate`].
    pub fn invalidate(self: &Arc<Self>, mapping: &Arc<Mapping>) -> Result<(), Error> {
        let mut keeps_clean = mapping.keeps_clean();
        if keeps_clean {
            Truncation::of(self, mapping).invalidate(0..FILE_BYTES_MAX, RemoveFilter::Clean)?;
            keeps_clean = self.supply.folio_orders.min > Order::ZERO && mapping.keeps_clean();
        }
        // Smallest folios are not split. They go whole when their dirty pages are in the file.
        if keeps_clean {
            let failed = |source| Repr::Sync { source: Box::new(source) };
            self.supply.writeback.write_out(mapping).map_err(failed)?;
        }
        let pages = mapping.invalidate().map_err(Repr::Attributes)?;
        self.counters.add(Count::Invalidated, pages);
        Ok(())
    }

    pub(super) fn pool_full(&self, pool: PoolNumber, position: u64) -> Error {
        let limit = self.supply.reclaim.lists().limit(pool).saturating_mul(PAGE_SIZE as u64);
        Repr::PoolFull { position, pool: self.supply.reclaim.pool_name(pool), limit }.into()
    }

    pub(super) fn pages_max(&self) -> u64 {
        self.arena.pages_max()
    }
}

/// How many of `bytes` bytes, read at `from` out of `folios`, which are still held, may be shown: up to the size,
/// which may have become smaller; and if the file was taken for another since `from`, up to the first folio that was
/// forgotten. `None` if that is the first of all.
fn shown<'h, 'm: 'h>(
    mapping: &Mapping,
    from: ReadStart,
    bytes: usize,
    folios: impl IntoIterator<Item = &'h HeldFolio<'m>>,
) -> Option<usize> {
    let ReadStart { position, renewals } = from;
    if let Some(left) = mapping.left_since(renewals, position) {
        return Some(left.min(bytes as u64) as usize);
    }
    let left = mapping.size().saturating_sub(position).min(bytes as u64);
    let kept = folios.into_iter().take_while(|held| held.is_attached()).last()?;
    let end = kept.first().plus(u64::from(kept.order().pages())).first_byte();
    Some(left.min(end - position) as usize)
}

/// A byte of a file, and the renewals of the file that had been seen before anything was held.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadStart {
    pub position: u64,
    pub renewals: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadProgress {
    pub done: usize,
    /// Whether all came from the cache.
    pub hit: bool,
    /// Why the cache gave no more, if it was just asked.
    pub stopped: Option<HitStop>,
}

impl Default for ReadProgress {
    fn default() -> Self {
        Self { done: 0, hit: true, stopped: None }
    }
}

#[derive(Debug, Default)]
pub(crate) enum FirstPage<'m> {
    #[default]
    Unknown,
    /// No folio, as far as a look without a lock tells.
    Absent,
    Held(HeldFolio<'m>),
}

impl<'m> From<Option<HeldFolio<'m>>> for FirstPage<'m> {
    fn from(held: Option<HeldFolio<'m>>) -> Self {
        held.map_or(Self::Unknown, Self::Held)
    }
}

#[derive(Clone, Copy, Debug)]
struct Miss {
    index: PageIndex,
    position: u64,
    len: usize,
    reach: ReadExtent,
}

#[derive(Clone, Copy)]
struct MissedRead<'c> {
    call: ReadCall<'c>,
    miss: Miss,
}

struct MissWindow<'r> {
    window: Window,
    wanted: Range<PageIndex>,
    /// The state that planned the window, still locked.
    readahead: Option<RankedGuard<'r, Readahead>>,
    next: AfterSubmit,
}

struct BegunFill<'b> {
    batch: &'b WindowFills,
    backend: &'b dyn Backend,
    next: AfterSubmit,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadExtent {
    Window,
    /// The page alone, because a longer read that covered it failed: the fault may lie elsewhere in it.
    Page,
}

/// The outcome of windows that no reader waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadaheadOutcome {
    Started,
    Refused,
}

enum MissOutcome<'m> {
    Ready(HeldFolio<'m>),
    Again(ReadExtent),
}

/// Puts into `windows` the pages to fetch for `miss`: nothing if it has come meanwhile. Returns the readahead that said
/// so, locked, if one was asked.
fn plan_miss<'r>(
    missed: &MissedRead<'r>,
    windows: &mut Windows,
) -> Result<Option<RankedGuard<'r, Readahead>>, Error> {
    let &MissedRead { call: ReadCall { mapping, reader, wait_policy }, miss } = missed;
    let Miss { index, position, len, reach } = miss;
    if reach == ReadExtent::Page {
        windows.push(Window::exact(index, 1));
        windows.want(index..index.plus(1));
        return Ok(None);
    }
    let Some(mut guard) = reader.readahead().lock_as(wait_policy.locks()) else {
        return Err(Repr::WouldBlock { position }.into());
    };
    // Another thread may have filled the page meanwhile: readahead must not take that for a lost window.
    if mapping.index().probe(index) != Err(NotReady::Mismatch) {
        return Ok(None);
    }
    let pages = pages_of_bytes((position % PAGE_SIZE as u64).saturating_add(len as u64));
    let pages = pages.min(u64::from(u32::MAX)) as u32;
    guard.on_miss_into(ReadRequest { index, pages, file_pages: mapping.size_pages() }, &**mapping, windows);
    Ok(Some(guard))
}

fn extent_of_retry(failure: Option<std::io::Error>, miss: Miss) -> Result<ReadExtent, Error> {
    match (failure, miss.reach) {
        (Some(source), ReadExtent::Page) => {
            Err(Repr::Read { position: miss.position, len: miss.len, source }.into())
        }
        // It may be another page of the window that is bad, or the page was let go meanwhile.
        (Some(_), ReadExtent::Window) | (None, _) => Ok(ReadExtent::Page),
    }
}

//! Start: the reads of a batch that missed, from the first look to their end.
//!
//! A read by itself waits for its page before the next read asks for its own, so a device that could serve thirty-two
//! at a time serves one. The reads of a batch are known together:
//!
//! ```text
//!   look      each read that was no plain hit: what the cache holds of it, as far as it goes
//!   start     the first missing page of each and what follows it: neighbours join into one span;
//!             readahead plans each span, once; the windows go to the device together  no wait
//!   finish    each read in order, the ordinary way: it finds its page there, on its way, or gone again
//! ```
//!
//! Joining tells scattered positions from a stream: two neighbours in one batch are one request of two pages, not a
//! second read that continues the first. A batch that begins where the last one ended does continue it.
//!
//! Invariants:
//!  1. A page is asked of the device at most once by a start, and not again by the finish, unless it failed
//!     or was evicted between the two.
//!  2. A start waits for no device and no memory, and reports no error: the finish meets it.
//!
//! Not an invariant: that every span starts. One without memory, or room at the device, is filled by the finish.

use std::sync::Arc;

use crate::arena::{GrownView, referenced};
use crate::mapping::{FolioLifetime, Mapping, find};
use crate::readahead::{ReadRequest, Readahead};
use crate::units::{Frame, PAGE_SIZE, PageIndex, pages_of_bytes};
use crate::xarray::Kind;

use super::fill::{AfterSubmit, FillOutcome, FillRequest, SubmitBatch};
use super::frame_supply::FillUrgency;
use super::read::ReadProgress;
use super::shared::Filemap;
use super::uncached::ReadCall;
use super::wait_policy::WaitPolicy;
use quinion_view::hit::{HitStop, read_hits_into};

/// In pages: so much is read at once, however large the largest readahead window is.
const JOINED_PAGES_MAX: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// Not looked up, or the file seemed to end before its first byte.
    Unread,
    Read(usize),
    Missing(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    first: PageIndex,
    end: PageIndex,
}

impl Span {
    pub(crate) fn of(position: u64, len: usize) -> Self {
        debug_assert!(len > 0);
        let first = PageIndex::of_byte(position);
        let pages = pages_of_bytes((position % PAGE_SIZE as u64).saturating_add(len as u64));
        Self { first, end: first.plus(pages) }
    }
    pub(crate) fn pages(self) -> u64 {
        self.end.0 - self.first.0
    }
    /// If `next` begins in this one or right behind it, and one window can cover both.
    pub(crate) fn joined(self, next: Span) -> Option<Span> {
        let joins = self.first <= next.first && next.first <= self.end;
        let both = Span { first: self.first, end: self.end.max(next.end) };
        (joins && both.pages() <= JOINED_PAGES_MAX).then_some(both)
    }
}

impl Filemap {
    /// Copies the cached bytes, and returns how far they go. Counts the read if that is all.
    pub(crate) fn copy_cached(
        self: &Arc<Self>,
        call: &ReadCall<'_>,
        position: u64,
        to: &mut [u8],
    ) -> Progress {
        let touch = |grown: GrownView<'_>, frame| call.reader.touch(grown, frame);
        let hits = read_hits_into(self.view_of(call.mapping), position, to, touch);
        if let Some(page) = hits.marker {
            self.advance(call, page);
        }
        match hits.stopped {
            HitStop::EndOfFile(_) if hits.bytes == 0 => Progress::Unread,
            HitStop::Full | HitStop::EndOfFile(_) => {
                self.count_read(ReadProgress { done: hits.bytes, ..ReadProgress::default() });
                Progress::Read(hits.bytes)
            }
            HitStop::Absent | HitStop::Filling | HitStop::Writing | HitStop::Stale => {
                Progress::Missing(hits.bytes)
            }
        }
    }

    /// Fills the missing pages of `spans`, and those that readahead adds, in one call of the device. Waits only for
    /// locks, as the call's wait policy says.
    pub(crate) fn start(self: &Arc<Self>, call: &ReadCall<'_>, spans: &[Span]) {
        let &ReadCall { mapping, reader, wait_policy } = call;
        if wait_policy == WaitPolicy::CacheOnly {
            return;
        }
        let Some(mut readahead) = reader.readahead().lock_as(wait_policy.locks()) else { return };
        let mut submit_batch = SubmitBatch::of(self, mapping, reader.pool(), reader.behind());
        for &span in spans {
            self.start_span(&mut submit_batch, &mut readahead, wait_policy, span);
        }
        drop(readahead); // a fill may end inside the call, and a thread that it wakes may want this lock
        submit_batch.submit(AfterSubmit::Anything);
    }

    fn start_span(
        self: &Arc<Self>,
        submit_batch: &mut SubmitBatch<'_>,
        readahead: &mut Readahead,
        wait_policy: WaitPolicy,
        span: Span,
    ) {
        let mapping = submit_batch.mapping();
        let size_pages = mapping.size_pages();
        if span.first.0 >= size_pages {
            return;
        }
        let pages = span.pages().min(size_pages - span.first.0).min(u64::from(u32::MAX)) as u32;
        let before = *readahead;
        let windows =
            readahead.on_miss(ReadRequest { index: span.first, pages, file_pages: size_pages }, &**mapping);
        let Some((&window, ahead)) = windows.split_first() else { return };
        let wanted = windows.wanted();
        let (asked, urgency) = (wanted.clone(), FillUrgency::Ahead);
        match submit_batch.insert_window(&FillRequest { window, wanted: asked, urgency, wait_policy }) {
            FillOutcome::Submitted(_) | FillOutcome::Nothing => {
                if submit_batch.fate() == FolioLifetime::Stays {
                    self.touch_asked(mapping, span.first, pages);
                }
                let _ = self.insert_ahead(submit_batch, ahead, wanted, wait_policy); // what is refused comes by a miss
            }
            // The finish begins anew.
            FillOutcome::NoMemory | FillOutcome::PoolFull | FillOutcome::Busy => *readahead = before,
        }
    }

    /// Keeps reclaim from pages fetched ahead that the batch will read; it holds the fills that it started itself.
    fn touch_asked(&self, mapping: &Mapping, first: PageIndex, pages: u32) {
        let grown = self.arena.view().grown();
        let Some(record) = grown.record(mapping.index().cell()) else { return };
        for page in 0..u64::from(pages) {
            // A hint may name another folio's frame by now, which is spared once more then.
            if let Kind::Folio(number) = find(&grown, record, first.plus(page)).kind() {
                grown.referenced(Frame(number)).into_iter().for_each(referenced::expect_reader);
            }
        }
    }

    /// Few enough that the last pages that a batch starts do not evict the first.
    pub(crate) fn started_pages_max(&self) -> u64 {
        self.pages_max() / 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_join_and_others_do_not() {
        let span = |position, len| Span::of(position, len);
        assert_eq!(span(4095, 2).pages(), 2);
        assert_eq!(span(4096, 4096).pages(), 1);
        let two = span(0, 4096).joined(span(4096, 1)).expect("right behind it");
        assert_eq!(two.pages(), 2);
        assert_eq!(two.joined(span(100, 1)), Some(two), "a part of it adds nothing");
        assert_eq!(span(8192, 1).joined(span(4096, 1)), None, "one before it is another request");
        assert_eq!(span(0, 4096).joined(span(8192, 1)), None, "a page lies between");
    }
}

//! Hint: ranges that a program says it will need, or will not.
//!
//! ```text
//!   will_need   range -> pieces -> fill each, wait for none     until all of it, or half the memory, is on its way
//!               ranges -> a batch of them to the device at a time: it may join what lies close together
//!   dont_need   range -> pieces -> drop folios not held         whole folios inside the range only,
//!                                  and shadow entries there
//! ```
//!
//! A hint costs no reader anything: the locks are released between pieces, no device is waited for, and a hint that
//! cannot be followed says how far it was. A batch of ranges holds off the invalidation of its file, as a window does.
//!
//! Invariants:
//!  1. The three counts of a [`Prefetch`] add up to the pages of the range that the file has.
//!  2. A will-need fetches at most half of the pages that the cache, and its pool, can hold, so that it does not evict
//!     its own.
//!  3. A don't-need drops no page outside its range, and none that is pinned, held or being filled.
//!  4. After a don't-need there is no shadow entry in its range: a page that comes back there is new.

use std::ops::Range;
use std::sync::Arc;

use crate::mapping::{Mapping, MappingGuard};
use crate::readahead::Window;
use crate::stats::Count;
use crate::units::{Order, PageIndex, PoolNumber, pages_of_bytes};
use crate::xarray::INDICES_MAX;

use super::fill::{AfterSubmit, FillRequest, SubmitBatch};
use super::frame_supply::FillUrgency;
use super::shared::Filemap;
use super::wait_policy::WaitPolicy;

/// 1 MiB, so that a lock is held for a moment only.
const PIECE_PAGES: u64 = 256;
/// Ranges that go to the device together, and pages of them: 8 MiB.
const BATCH_RANGES: usize = 256;
const BATCH_PAGES: u64 = 2048;

/// The outcome of a prefetch, by pages of the range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Prefetch {
    /// Pages whose reads were started.
    pub started_pages: u64,
    /// Pages in the cache already, or on their way.
    pub cached_pages: u64,
    /// Pages left alone: half of the memory is on its way already, or no more can be had.
    pub left_pages: u64,
}

impl Filemap {
    /// Starts reading the pages that are not cached, for `pool`, and waits for none of them.
    pub(crate) fn will_need(
        self: &Arc<Self>,
        pool: PoolNumber,
        mapping: &Arc<Mapping>,
        position: u64,
        len: u64,
    ) -> Prefetch {
        let (first, end) = pages_touched(mapping, position, len);
        let limit = self.pages_max().min(self.supply.reclaim.lists().limit(pool)) / 2;
        let mut done = Prefetch::default();
        let mut at = first;
        while at < end && done.started_pages < limit {
            let piece_end = PageIndex(end.0.min(at.0 + PIECE_PAGES.min(limit - done.started_pages)));
            let piece = self.fetch_piece(pool, mapping, at..piece_end);
            done.started_pages += piece.started_pages;
            done.cached_pages += piece.cached_pages;
            done.left_pages += piece.left_pages;
            at = piece_end;
            if piece.left_pages > 0 {
                break;
            }
        }
        done.left_pages += end.0.saturating_sub(at.0);
        done
    }

    /// As [`Filemap::will_need`], of ranges whose fills go to the device together, as many as a batch has.
    pub(crate) fn will_need_ranges(
        self: &Arc<Self>,
        pool: PoolNumber,
        mapping: &Arc<Mapping>,
        ranges: &[Range<u64>],
    ) -> Prefetch {
        let limit = self.pages_max().min(self.supply.reclaim.lists().limit(pool)) / 2;
        let mut done = Prefetch::default();
        for ranges in ranges.chunks(BATCH_RANGES) {
            let mut submit_batch = SubmitBatch::of(self, mapping, pool, None);
            let mut batch_pages = 0;
            for range in ranges {
                let len = range.end.saturating_sub(range.start);
                let (mut at, end) = pages_touched(mapping, range.start, len);
                while at < end && done.started_pages < limit && done.left_pages == 0 {
                    let pages = PIECE_PAGES.min(limit - done.started_pages).min(end.0 - at.0);
                    let piece = at..PageIndex(at.0 + pages);
                    let missing = insert_piece(&mut submit_batch, &piece);
                    let left = if missing > 0 {
                        missing.min(self::missing(&mapping.lock(), at, piece.end))
                    } else {
                        0
                    };
                    done.started_pages += missing - left;
                    done.cached_pages += pages - missing;
                    done.left_pages += left;
                    (at, batch_pages) = (piece.end, batch_pages + missing);
                    if batch_pages >= BATCH_PAGES {
                        submit_batch.submit(AfterSubmit::Anything);
                        (submit_batch, batch_pages) = (SubmitBatch::of(self, mapping, pool, None), 0);
                    }
                }
                done.left_pages += end.0.saturating_sub(at.0);
            }
            submit_batch.submit(AfterSubmit::Anything);
        }
        done
    }

    fn fetch_piece(
        self: &Arc<Self>,
        pool: PoolNumber,
        mapping: &Arc<Mapping>,
        Range { start: from, end }: Range<PageIndex>,
    ) -> Prefetch {
        let mut submit_batch = SubmitBatch::of(self, mapping, pool, None);
        let missing = insert_piece(&mut submit_batch, &(from..end));
        submit_batch.submit(AfterSubmit::Anything);
        let left = if missing > 0 { missing.min(self::missing(&mapping.lock(), from, end)) } else { 0 };
        Prefetch { started_pages: missing - left, cached_pages: end.0 - from.0 - missing, left_pages: left }
    }

    pub(crate) fn dont_need(&self, mapping: &Mapping, position: u64, len: u64) -> u64 {
        let (first, end) = pages_within(mapping, position, len);
        let mut dropped = 0;
        let mut at = first;
        loop {
            let mut guard = mapping.lock();
            // A file may be much longer than its cached part.
            let Some(next) = guard.next_entry(at, end) else { break };
            at = PageIndex(end.0.min(next.0 + PIECE_PAGES));
            // The folio must lie in the whole range, not in the piece.
            dropped += guard.drop_range(next, at, end);
        }
        self.counters.add(Count::Dropped, dropped);
        dropped
    }
}

/// Inserts the missing pages of a piece, as far as that can be done now. How many were missing.
fn insert_piece(submit_batch: &mut SubmitBatch<'_>, piece: &Range<PageIndex>) -> u64 {
    let missing = missing(&submit_batch.mapping().lock(), piece.start, piece.end);
    if missing > 0 {
        let (from, pages) = (piece.start, (piece.end.0 - piece.start.0) as u32);
        let window = Window { order: Order::fitting(pages), ..Window::exact(from, pages) };
        let (urgency, wait_policy) = (FillUrgency::Hinted, WaitPolicy::Start);
        let request = FillRequest { window, wanted: from..from, urgency, wait_policy };
        let _ = submit_batch.insert_window(&request);
    }
    missing
}

/// Pages of a range of bytes that are not in the index.
pub(super) fn missing_pages(mapping: &Mapping, bytes: Range<u64>) -> u64 {
    let (mut at, end) = pages_touched(mapping, bytes.start, bytes.end.saturating_sub(bytes.start));
    let mut pages = 0;
    while at < end {
        let piece_end = PageIndex(end.0.min(at.0 + PIECE_PAGES));
        pages += missing(&mapping.lock(), at, piece_end);
        at = piece_end;
    }
    pages
}

fn missing(guard: &MappingGuard<'_>, from: PageIndex, end: PageIndex) -> u64 {
    let (mut missing, mut at) = (0, from);
    while let Some((first, pages)) = guard.next_gap(at, end) {
        missing += pages;
        at = first.plus(pages);
    }
    missing
}

fn pages_touched(mapping: &Mapping, position: u64, len: u64) -> (PageIndex, PageIndex) {
    let end = position.saturating_add(len).min(mapping.size());
    let first = PageIndex::of_byte(position);
    (first, PageIndex(pages_of_bytes(end)).max(first))
}

/// The pages that lie wholly inside. A range that reaches the file's end holds the last page whole.
fn pages_within(mapping: &Mapping, position: u64, len: u64) -> (PageIndex, PageIndex) {
    let (size, end) = (mapping.size(), position.saturating_add(len));
    let first = PageIndex(pages_of_bytes(position));
    let end = if end >= size { PageIndex(INDICES_MAX) } else { PageIndex::of_byte(end) };
    (first, end.max(first))
}

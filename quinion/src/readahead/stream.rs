//! Stream: one reader's way through a file, and the pages fetched for it.
//!
//! ```text
//!   forward        seen             edge            [M] is the marker
//!        ---read---->[ . . [M] . . . )next window
//!
//!   backward       edge             seen
//!        next window[ . . . . . [M]) <---read---
//!
//!   strided    [..]      [M.]      [..]      [..]      next, next + distance, ...
//! ```
//!
//! A window of a miss begins with the pages that were asked for; the marker sits on the first page after that which is
//! not cached yet. A window that a marker started is ahead as a whole, and its marker is on the page that the reader
//! reaches first: so there are two windows in flight at most.
//!
//! Cached pages are skipped, and a stream that finds all of its next window cached waits for the reader to miss.
//!
//! Invariants:
//!  1. No window of a stream reaches past the file, or past `until`.
//!  2. A window has a marker only if there is something left to read after it.
//!  3. A marker is on a page that was not cached when the window was planned.

use crate::units::{Order, PageIndex};

use super::Hint;
use super::window::{
    ReadRequest, StreamProgress, Window, WindowLimits, WindowRequest, Windows, clamp, first_size, next_size,
};

pub(super) const PAGES_MIN: u32 = 4;
/// Pages that were asked for are no readahead: so many pages of it, 1 MiB, are read at once whatever the window.
const ASKED_PAGES_MAX: u32 = 256;
/// From so many pages asked for at once on, 64 KiB, they may share a folio.
const ASKED_FOLIO_PAGES_MIN: u32 = 16;
/// Pieces that a strided stream fetches ahead at first, and at most.
const PIECES_FIRST: u32 = 2;
const PIECES_MAX: u32 = Windows::MAX as u32 - 1;
/// A stream was at least so long, in pages, if coming back to its origin is a lap.
const LAP_PAGES_MIN: u64 = 16;
/// From so many pages on, 1 MiB, a forward stream is one that may never come back.
const LONG_PAGES_MIN: u64 = 256;
/// How far a stream looks for its reader behind pages that were cached before, in pages.
const ISLAND_PAGES_MAX: u32 = 64;
/// The order grows by so much with each window that a marker starts.
const ORDER_STEP: u8 = 2;
const NO_END: PageIndex = PageIndex(u64::MAX);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadDirection {
    Forward,
    Backward,
    /// Pieces of `pages` pages, each `distance` after the one before; `next` was not fetched yet.
    Strided {
        next: i64,
        distance: i64,
        pages: u32,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub way: ReadDirection,
    pub origin: PageIndex,
    /// Where its reader was at the last miss or marker.
    seen: PageIndex,
    /// The end of the pages fetched for it: forward the first page behind them, backward the last of them.
    edge: PageIndex,
    marker: Option<PageIndex>,
    /// Where it ends though the file goes on: a long request that is read in pieces and is no stream yet.
    until: PageIndex,
    requested_pages: u32,
    /// In pages, or pieces ahead of a strided stream.
    size: u32,
    order: Order,
    pub restarts: u32,
    /// When it was used last, by its owner's clock.
    pub used: u64,
}

impl Stream {
    pub fn begin(way: ReadDirection, origin: PageIndex, asked: ReadRequest, limits: &WindowLimits) -> Self {
        let size = match way {
            ReadDirection::Strided { .. } => PIECES_FIRST,
            ReadDirection::Forward | ReadDirection::Backward => ramp_start(asked.pages, limits),
        };
        Self {
            way,
            origin,
            seen: asked.index,
            edge: asked.index,
            marker: None,
            until: NO_END,
            requested_pages: asked.pages,
            size,
            order: limits.order_min,
            restarts: 0,
            used: 0,
        }
    }

    pub fn long_request(asked: ReadRequest, limits: &WindowLimits) -> Self {
        let mut stream = Self::begin(ReadDirection::Forward, asked.index, asked, limits);
        (stream.until, stream.size) = (asked.end(), piece_pages(limits));
        stream
    }

    /// Whether it ends though the file may go on.
    pub fn is_long_request(&self) -> bool {
        self.until != NO_END
    }

    /// The page after the last one that is known to be wanted; page 0 if the stream is a guess as a whole.
    pub fn wanted_end(&self) -> PageIndex {
        if self.is_long_request() { self.until } else { PageIndex(0) }
    }

    pub fn is_complete(&self) -> bool {
        self.edge >= self.until
    }

    /// Whether page `index` was fetched for it and its reader has not come so far yet.
    pub fn has_ahead(&self, index: PageIndex) -> bool {
        self.way == ReadDirection::Forward
            && !self.is_long_request()
            && self.seen < index
            && index < self.edge
    }

    /// Whether its reader has been at `index` before, on a way of some length.
    pub fn has_been_at(&self, index: PageIndex) -> bool {
        let length = self.edge.0.saturating_sub(self.origin.0);
        let is_long =
            self.way == ReadDirection::Forward && !self.is_long_request() && length >= LAP_PAGES_MIN;
        is_long && self.origin <= index && index <= self.seen
    }

    /// The pages its reader has passed, if it is long, or in its second lap, or was said to be a stream.
    pub fn passed(&self, limits: &WindowLimits) -> Option<StreamProgress> {
        let is_said = matches!(limits.hint, Hint::Sequential | Hint::NoReuse);
        let is_shown = self.edge.0.saturating_sub(self.origin.0) >= LONG_PAGES_MIN || self.restarts > 0;
        let is_stream =
            self.way == ReadDirection::Forward && !self.is_long_request() && (is_said || is_shown);
        is_stream.then(|| StreamProgress { from: self.origin.min(self.seen), to: self.seen })
    }

    /// Whether its reader, at `index`, begins again.
    pub fn begins_again(&self, index: PageIndex) -> bool {
        index == self.origin && self.has_been_at(index)
    }

    /// Whether the marker is on the folio that begins with page `first`. The fill may put it on the folio that
    /// covers its page or, where folios have a least size, on the one behind.
    pub fn has_marker_on(&self, first: PageIndex) -> bool {
        self.marker.is_some_and(|marker| first.0.abs_diff(marker.0) < u64::from(self.order.pages()))
    }

    pub fn ends_at(&self, index: PageIndex) -> bool {
        self.way == ReadDirection::Forward && self.edge == index
    }

    /// Whether a miss of `asked` is the stream's reader at the end of the fetched pages.
    pub fn continues(&self, access: &WindowRequest<'_>) -> bool {
        let WindowRequest { limits, asked, .. } = *access;
        let index = asked.index;
        match self.way {
            ReadDirection::Forward if index == self.edge => true,
            ReadDirection::Forward => index > self.edge && index < self.until && self.reaches_over(access),
            _ if asked.pages > piece_pages(limits) => false,
            ReadDirection::Backward => {
                index < self.edge && asked.end() >= self.edge && asked.end() <= self.seen
            }
            ReadDirection::Strided { .. } => {
                self.pieces_to(index).is_some_and(|pieces| (0..=i64::from(PIECES_MAX) * 2).contains(&pieces))
            }
        }
    }

    /// Whether it was lost sight of, without a marker, not far before `index`.
    pub fn was_lost_near(&self, index: PageIndex, limits: &WindowLimits) -> bool {
        let between = index.0.wrapping_sub(self.edge.0);
        let near = between <= u64::from(limits.pages_max.max(ASKED_PAGES_MAX)) * 2;
        self.way == ReadDirection::Forward && !self.is_long_request() && self.marker.is_none() && near
    }

    /// Whether there is nothing but cached pages between the end of the stream and the access.
    fn reaches_over(&self, access: &WindowRequest<'_>) -> bool {
        let WindowRequest { limits, asked: ReadRequest { index, .. }, cached } = *access;
        let between = index.0 - self.edge.0;
        let scan_pages = between.min(u64::from(ISLAND_PAGES_MAX)) as u32;
        between <= u64::from(limits.pages_max) * 2 && cached.cached_before(index, scan_pages) >= scan_pages
    }

    /// How many pieces `index` lies ahead of the next one, if a piece begins there and it is not far.
    fn pieces_to(&self, index: PageIndex) -> Option<i64> {
        let ReadDirection::Strided { next, distance, .. } = self.way else { return None };
        let pages = index.0 as i64 - next;
        let near = (pages / distance).abs() <= i64::from(PIECES_MAX) * 2;
        (pages % distance == 0 && near).then_some(pages / distance)
    }

    /// The windows after the stream's reader missed a page, at which the first of them begins.
    pub fn after_miss(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, .. } = *access;
        if self.is_complete() {
            self.until = NO_END;
            self.size = ramp_start(asked.pages, limits);
        }
        if !self.is_long_request() {
            self.size = self.size.min(limits.pages_max);
        }
        (self.marker, self.requested_pages) = (None, asked.pages);
        self.order = self.order.max(requested_order(asked.pages, limits));
        let mut windows = match self.way {
            ReadDirection::Forward => self.forward_after_miss(access),
            ReadDirection::Backward => self.backward_after_miss(access),
            ReadDirection::Strided { .. } => self.strided_after_miss(access),
        };
        windows.set_stream(self.passed(limits));
        windows
    }

    /// The windows that come next after the stream's reader met the marker, none of them asked for.
    pub fn after_marker(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, .. } = *access;
        self.marker = None;
        self.seen = match self.way {
            // At the end of the request, or of the folio, that was met.
            ReadDirection::Backward => {
                asked.index.plus(u64::from(self.requested_pages.max(self.order.pages())))
            }
            ReadDirection::Forward | ReadDirection::Strided { .. } => asked.index,
        };
        self.grow(limits);
        self.order = Order((self.order.0 + ORDER_STEP).min(limits.order_max.0)).max(limits.order_min);
        let mut windows = match self.way {
            ReadDirection::Forward => self.forward_after_marker(access),
            ReadDirection::Backward => self.push_before_all(access),
            ReadDirection::Strided { .. } => {
                let mut windows = Windows::none();
                self.push_pieces(&mut windows, access);
                windows
            }
        };
        windows.set_stream(self.passed(limits));
        windows
    }

    pub fn grow(&mut self, limits: &WindowLimits) {
        self.size = match self.way {
            ReadDirection::Strided { .. } => (self.size * 2).min(PIECES_MAX),
            _ if self.is_long_request() => piece_pages(limits),
            _ => next_size(self.size, limits.pages_max),
        };
    }

    /// A page that was fetched ahead was evicted before it was read: smaller windows, from where the reader is.
    pub fn shrink(&mut self, at: PageIndex, limits: &WindowLimits) {
        self.size = (self.size / 2).max(PAGES_MIN.min(limits.pages_max));
        self.order = limits.order_min;
        self.move_to(at);
    }

    pub fn restart(&mut self, at: PageIndex) {
        self.restarts += 1;
        self.move_to(at);
    }

    /// No page could be fetched for the miss at `index`: the stream is where it was.
    pub fn refuse(&mut self, index: PageIndex) {
        if self.way == ReadDirection::Forward && self.seen == index {
            self.marker = None;
            self.move_to(index);
        }
    }

    fn move_to(&mut self, at: PageIndex) {
        (self.seen, self.edge) = (at, at);
    }

    fn forward_after_miss(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, cached } = *access;
        let bound = self.until.0.min(asked.file_pages);
        let wanted = self.size.max(asked.pages.min(piece_pages(limits)));
        let window =
            Window { order: self.order, ..Window::exact(asked.index, clamp(asked.index, wanted, bound)) };
        let end = window.end();
        let ahead =
            if asked.end() < end { asked.end() } else { asked.index.plus(u64::from(window.pages / 4)) };
        if end.0 < bound {
            self.marker = cached.next_missing(ahead, (end.0 - ahead.0) as u32);
        }
        (self.seen, self.edge) = (asked.index, end);
        Windows::one(Window { marker: self.marker, ..window })
    }

    fn forward_after_marker(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, cached } = *access;
        let bound = self.until.0.min(asked.file_pages);
        let scan_pages = clamp(self.edge, piece_pages(limits), bound);
        let Some(start) = cached.next_missing(self.edge, scan_pages) else { return Windows::none() };
        let order = self.window_order();
        let mut end = start.plus(u64::from(clamp(start, self.size, bound)));
        if end.0 < bound && end.align_down(order) > start {
            end = end.align_down(order);
        }
        if end.0 < bound {
            self.marker = Some(start);
        }
        self.edge = end;
        let pages = (end.0 - start.0) as u32;
        Windows::one(Window { marker: self.marker, order, ..Window::exact(start, pages) })
    }

    fn window_order(&self) -> Order {
        self.order.min(Order::fitting((self.size / 2).max(1)))
    }

    fn backward_after_miss(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, .. } = *access;
        let mut windows =
            Windows::one(Window { order: self.order, ..Window::exact(asked.index, asked.pages) });
        (self.seen, self.edge) = (asked.end(), asked.index);
        // Room for the next request at least.
        let ahead = self.size.saturating_sub(asked.pages).max(asked.pages).min(limits.pages_max);
        self.push_before(&mut windows, ahead, access);
        windows
    }

    fn push_before_all(&mut self, access: &WindowRequest<'_>) -> Windows {
        let mut windows = Windows::none();
        self.push_before(&mut windows, self.size, access);
        windows
    }

    fn push_before(&mut self, windows: &mut Windows, pages: u32, access: &WindowRequest<'_>) {
        let WindowRequest { limits, cached, .. } = *access;
        let over = cached.cached_before(self.edge, limits.pages_max);
        let end = PageIndex(self.edge.0.saturating_sub(u64::from(over)));
        if over >= limits.pages_max || end.0 == 0 {
            return;
        }
        // Whole requests: part of one is a miss at its first page, however much of the rest is there.
        let request = u64::from(self.requested_pages.min(limits.pages_max));
        let pages = (u64::from(pages) / request).max(1) * request;
        let order = self.window_order();
        let mut start = PageIndex(end.0.saturating_sub(pages));
        let aligned = PageIndex(start.0.next_multiple_of(u64::from(order.pages())));
        if aligned < end && (aligned.0 - start.0).is_multiple_of(request) {
            start = aligned;
        }
        self.edge = start;
        if start.0 > 0 {
            let first_touched = PageIndex(end.0.saturating_sub(request)).max(start);
            self.marker = cached.next_missing(first_touched, (end.0 - first_touched.0) as u32);
        }
        let pages = (end.0 - start.0) as u32;
        windows.push(Window { marker: self.marker, order, ..Window::exact(start, pages) });
    }

    fn strided_after_miss(&mut self, access: &WindowRequest<'_>) -> Windows {
        let asked = access.asked;
        let mut windows =
            Windows::one(Window { order: self.order, ..Window::exact(asked.index, asked.pages) });
        if let ReadDirection::Strided { next, distance, pages } = &mut self.way {
            *next = asked.index.0 as i64 + *distance;
            *pages = asked.pages.max(*pages).min(distance.unsigned_abs().min(u64::from(u32::MAX)) as u32);
        }
        self.push_pieces(&mut windows, access);
        windows
    }

    /// The next pieces, as many as the size says and the largest window allows; the first carries the marker.
    fn push_pieces(&mut self, windows: &mut Windows, access: &WindowRequest<'_>) {
        let WindowRequest { limits, asked: ReadRequest { file_pages, .. }, cached } = *access;
        let ReadDirection::Strided { mut next, distance, pages } = self.way else { return };
        let inside = |next: i64| u64::try_from(next).is_ok_and(|next| next < file_pages);
        let (first, mut count) = (windows.len(), self.size.min((limits.pages_max / pages).max(1)));
        while count > 0 && inside(next) {
            let start = PageIndex(next as u64);
            let pages = clamp(start, pages, file_pages);
            if let Some(missing) = cached.next_missing(start, pages) {
                let marker = if windows.len() == first { Some(missing) } else { None };
                windows.push(Window { marker, order: self.order, ..Window::exact(start, pages) });
            }
            (next, count) = (next + distance, count - 1);
        }
        self.way = ReadDirection::Strided { next, distance, pages };
        if inside(next) {
            self.marker = windows.get(first).and_then(|window| window.marker);
        } else {
            windows.clear_marker(first);
        }
    }
}

pub(super) fn piece_pages(limits: &WindowLimits) -> u32 {
    limits.pages_max.max(ASKED_PAGES_MAX)
}

pub(super) fn requested_order(pages: u32, limits: &WindowLimits) -> Order {
    let fitting = if pages >= ASKED_FOLIO_PAGES_MIN { Order::fitting(pages) } else { Order::ZERO };
    fitting.min(limits.order_max).max(limits.order_min)
}

fn ramp_start(asked: u32, limits: &WindowLimits) -> u32 {
    first_size(asked, limits.pages_max).max(PAGES_MIN.min(limits.pages_max))
}

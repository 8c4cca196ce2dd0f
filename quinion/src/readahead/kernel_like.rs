//! Kernel-like: windows as Linux 6.18 draws them, so that users can compare.
//!
//! ```text
//!   miss    at the start, too long, or right behind the last read   -> a stream's first window
//!           more cached pages before it than it asks for            -> a window of that run's length
//!           else                                                    -> exactly what was asked
//!   marker  the one that was set last                               -> the next window, larger
//!           another one                                             -> a window from the next gap on
//!   fault   a window around the page, unless misses have become too many
//! ```
//!
//! One stream for each handle: its newest window is all that is remembered. So its weaknesses are kept here: a step of
//! two pages looks like a stream, backward streams and steps are never seen, the end of a window is trimmed to the
//! folio order and so grows more slowly, and streams that take turns meet strange markers.
//!
//! Invariants:
//!  1. The first window begins with the missed page; around a fault it covers it.
//!  2. No window reaches past the file's last page, and none that ends there has a marker.
//!
//! Not kept: that a marker at the end of a file starts an empty window.

use crate::units::{Order, PageIndex};

use super::Hint;
use super::window::{
    ReadRequest, Window, WindowLimits, WindowRequest, Windows, clamp, first_size, next_size,
};

/// A forced read goes to the device in pieces of so many pages: 2 MiB.
const FORCED_PIECE_PAGES: u32 = 512;
/// From so many page faults on that missed, no window is read around one.
const FAULT_MISSES_LIMIT: u16 = 100;
/// The count of missed faults goes no further.
const FAULT_MISSES_MAX: u16 = 1000;

#[derive(Clone, Copy, Debug)]
pub(super) struct KernelLike {
    start: PageIndex,
    size: u32,
    /// Pages of the window, at its end, that no reader had asked for.
    async_pages: u32,
    order: u8,
    /// The page after which the last read ended; the largest number before the first read.
    previous: u64,
    fault_misses: u16,
}

impl KernelLike {
    pub fn new() -> Self {
        Self { start: PageIndex(0), size: 0, async_pages: 0, order: 0, previous: u64::MAX, fault_misses: 0 }
    }

    pub fn on_read_end(&mut self, position: u64) {
        self.previous = PageIndex::of_byte(position).0;
    }

    pub fn on_miss(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, cached } = *access;
        if limits.pages_max == 0 {
            return forced(limits, ReadRequest { pages: 1, ..asked });
        }
        if limits.hint == Hint::Random {
            return forced(limits, asked);
        }
        let (index, max) = (asked.index, max_for(limits, asked.pages));
        let follows = index.0.wrapping_sub(self.previous) <= 1;
        // The reader does not report where its reads end, so the pages that it asks for count.
        self.previous = asked.end().0;
        if index.0 == 0 || asked.pages > max || follows {
            let size = first_size(asked.pages, max);
            let ahead = if size > asked.pages { size - asked.pages } else { size / 2 };
            self.begin_stream(index, size, ahead);
            return self.window(access);
        }
        let run = cached.cached_before(index, max);
        if run <= asked.pages {
            return exact(limits, asked);
        }
        // A run that reaches back to the file's start counts twice.
        let run = if u64::from(run) == index.0 { run.saturating_mul(2) } else { run };
        let size = run.saturating_add(asked.pages).min(max);
        self.begin_stream(index, size, 1);
        self.window(access)
    }

    pub fn on_marker(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, cached } = *access;
        if limits.pages_max == 0 {
            return Windows::none();
        }
        let max = max_for(limits, asked.pages);
        if self.expects(asked.index) {
            self.start = self.start.plus(u64::from(self.size));
            self.size = self.size.max(next_size(self.size, max));
        } else {
            let Some(gap) = cached.next_missing(asked.index.plus(1), max) else { return Windows::none() };
            self.start = gap;
            let run = (gap.0 - asked.index.0) as u32;
            self.size = next_size(run.saturating_add(asked.pages).min(max), max);
        }
        let order_max = limits.order_max.0.min(max.trailing_zeros() as u8);
        self.order = (self.order + 2).min(order_max);
        self.trim_end();
        self.async_pages = self.size;
        self.window(access)
    }

    /// A page fault missed page `asked.index`; `asked.pages` is of no account.
    pub fn on_fault(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, .. } = *access;
        let max = limits.pages_max;
        if limits.hint == Hint::Random || max == 0 {
            return exact(limits, ReadRequest { pages: 1, ..asked });
        }
        if limits.hint == Hint::Sequential {
            return self.on_miss(&WindowRequest { asked: ReadRequest { pages: max, ..asked }, ..*access });
        }
        self.fault_misses = (self.fault_misses + 1).min(FAULT_MISSES_MAX);
        if self.fault_misses > FAULT_MISSES_LIMIT {
            return exact(limits, ReadRequest { pages: 1, ..asked });
        }
        let start = PageIndex(asked.index.0.saturating_sub(u64::from(max / 2)));
        self.begin_stream(start, max, max / 4);
        self.window(access)
    }

    pub fn on_fault_hit(&mut self) {
        self.fault_misses = self.fault_misses.saturating_sub(1);
    }

    fn expects(&self, index: PageIndex) -> bool {
        let expected = self.start.0 + u64::from(self.size - self.async_pages);
        index.0 <= expected && expected - index.0 < 1 << self.order
    }

    fn begin_stream(&mut self, start: PageIndex, size: u32, async_pages: u32) {
        (self.start, self.size, self.async_pages, self.order) = (start, size, async_pages, 0);
    }

    fn trim_end(&mut self) {
        let end = self.start.plus(u64::from(self.size));
        let aligned = end.align_down(Order(self.order));
        if aligned > self.start {
            self.size -= (end.0 - aligned.0) as u32;
        }
    }

    fn window(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked: ReadRequest { file_pages, .. }, .. } = *access;
        let pages = clamp(self.start, self.size, file_pages);
        if pages == 0 {
            return Windows::none();
        }
        let fitting = Order::fitting(self.size).0.min(limits.order_max.0);
        self.order = self.order.min(fitting).max(limits.order_min.0);
        let more = self.start.0 + u64::from(self.size) < file_pages && self.async_pages > 0;
        let marker = self.start.plus(u64::from(self.size - self.async_pages));
        let order = Order(self.order);
        let marker = more.then_some(marker);
        Windows::one(Window { marker, order, ..Window::exact(self.start, pages) })
    }
}

/// The largest window for a request of `pages`: a long request may be read in one piece.
fn max_for(limits: &WindowLimits, pages: u32) -> u32 {
    if pages > limits.pages_max && limits.io_pages > limits.pages_max {
        pages.min(limits.io_pages)
    } else {
        limits.pages_max
    }
}

fn exact(limits: &WindowLimits, asked: ReadRequest) -> Windows {
    let pages = clamp(asked.index, asked.pages, asked.file_pages);
    let window = Window { order: limits.order_min, ..Window::exact(asked.index, pages) };
    if pages == 0 { Windows::none() } else { Windows::one(window) }
}

/// Splits the request into pieces no larger than a request to the device, or a window, may be.
fn forced(limits: &WindowLimits, asked: ReadRequest) -> Windows {
    let asked_pages = asked.pages.min(limits.io_pages.max(limits.pages_max).max(1));
    let mut left = clamp(asked.index, asked_pages, asked.file_pages);
    let (mut windows, mut start) = (Windows::none(), asked.index);
    while left > 0 && windows.len() < Windows::MAX {
        let pages = left.min(FORCED_PIECE_PAGES);
        windows.push(Window { order: limits.order_min, ..Window::exact(start, pages) });
        (start, left) = (start.plus(u64::from(pages)), left - pages);
    }
    windows
}

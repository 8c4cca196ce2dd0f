//! Readahead: which pages to fetch besides those that were asked for.
//!
//! Pure decisions: numbers in, [`Windows`] out. No input, no output, no lock,
//! no clock, no memory but the few numbers of one open handle.
//!
//! ```text
//!      miss                  marker                            marker
//!       v                      v                                 v
//!   |   asked   | . . . . . . [M] . . . . . |  next window      [M] ...
//! ```
//!
//! A stream gets a window, then another before it has used up the first: the **marker** sits on a page some way ahead,
//! and a thread that reads that page starts the next window without waiting for it. Windows grow from a few pages to
//! the largest. A miss that belongs to no stream reads exactly the requested pages.
//!
//! Two policies share one interface. `streams` is the default. `kernel_like` draws the windows of Linux, to compare
//! with. Both share the code here: hints, the largest window and how trouble shrinks it, and the counts.
//!
//! A forward stream of more than 1 MiB, or in its second lap, notes in its windows which pages its reader has passed:
//! when memory is short, these are evicted first ([`StreamProgress`]).
//!
//! Trouble is a read that failed, which makes the largest window a quarter, or a window that was gone before it was
//! read, which halves it. After `CALM_WINDOWS` windows without trouble it doubles again (kernel-like, with a hint).
//!
//! Invariants:
//!  1. After a miss the first window begins with the missed page. (Around a page fault it covers it.)
//!  2. No window reaches past the file's last page, and none is empty.
//!  3. A marker is on a page of its window, and there is something left to read after that window.
//!
//! Not an invariant: that a window is filled. It is a request; a shortage shows as a miss inside it.

mod kernel_like;
mod recent;
mod stream;
mod streams;
mod window;

#[cfg(test)]
mod simulator;
#[cfg(test)]
mod tests;

pub use window::{Cached, NothingCached, PageFault, ReadRequest, StreamProgress, Window, Windows};

use std::ops::Range;

use crate::units::{Order, Orders, PageIndex};

use kernel_like::KernelLike;
use streams::Streams;
use window::{WindowLimits, WindowRequest};

/// After so many windows in a row without trouble the largest window grows again.
const CALM_WINDOWS: u32 = 16;

/// A user's hint about a handle's reads to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Hint {
    /// No hint: readahead sees for itself.
    #[default]
    Normal,
    /// Reads go forward: windows from the first read on, and twice as large.
    Sequential,
    /// Reads go anywhere: exactly the requested pages are read.
    Random,
    /// Reads come once: as [`Hint::Normal`], but forward windows are taken for a stream's from the first on, and such a
    /// stream's own passed pages make room for it, before other streams' do.
    NoReuse,
}

/// The pattern of a handle's newest reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AccessPattern {
    /// No particular pattern.
    Random,
    /// Forward, page after page.
    Sequential,
    /// Backward, page before page.
    Backward,
    /// Pieces at a constant distance.
    Strided,
    /// Forward, and again from where it began.
    Looping,
}

/// How readahead decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum ReadaheadStyle {
    /// Several streams of each handle are known: forward, backward, in steps, in loops.
    #[default]
    Streams,
    /// As Linux does it, to compare with: one forward stream for each handle.
    KernelLike,
}

/// How readahead is done, for all handles of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    style: ReadaheadStyle,
    pages_max: u32,
    io_pages: u32,
    order_min: Order,
    order_max: Order,
}

impl Config {
    /// The default policy, with windows of at most `pages_max` pages; 0 reads nothing that was not asked for.
    pub const fn new(pages_max: u32) -> Self {
        let (order_min, order_max) = (Order::ZERO, Order::MAX);
        Self { style: ReadaheadStyle::Streams, pages_max, io_pages: pages_max, order_min, order_max }
    }

    /// As the kernel does it: windows of at most `pages_max` pages, requests to the device of at most
    /// `io_pages`, and folios of at most `order_max` (order 0 for a file system without large folios).
    pub const fn kernel_like(pages_max: u32, io_pages: u32, order_max: Order) -> Self {
        Self { style: ReadaheadStyle::KernelLike, pages_max, io_pages, order_min: Order::ZERO, order_max }
    }

    /// The smallest and the largest folio that windows ask for.
    #[must_use]
    pub const fn orders(mut self, order_min: Order, order_max: Order) -> Self {
        (self.order_min, self.order_max) = (order_min, order_max);
        self
    }
}

/// The state of a handle's readahead, and counts of its work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ReadaheadReport {
    /// The pattern of its newest reads.
    pub pattern: AccessPattern,
    /// The user's last hint.
    pub hint: Hint,
    /// The largest window as things are, in pages.
    pub pages_max: u32,
    /// The current window: pages of the newest decision, those that were asked for among them.
    pub window_pages: u64,
    /// Decisions that had windows with pages no reader had asked for.
    pub windows: u64,
    /// Pages of these that no reader had asked for. Some may have been in the cache. How many of a handle's were read
    /// is not known, since any handle may read them; for the whole cache it is ([`ReadaheadUse`](crate::ReadaheadUse)).
    pub prefetched_pages: u64,
    /// Decisions for exactly the requested pages.
    pub exact: u64,
    /// Windows that were gone before they were read.
    pub lost_windows: u64,
    /// Reads that failed.
    pub failures: u64,
}

impl ReadaheadReport {
    const fn new(config: &Config) -> Self {
        Self {
            pattern: AccessPattern::Random,
            hint: Hint::Normal,
            pages_max: config.pages_max,
            window_pages: 0,
            windows: 0,
            prefetched_pages: 0,
            exact: 0,
            lost_windows: 0,
            failures: 0,
        }
    }
}

#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "the large one is the default, and a handle has one")]
enum ReadaheadPolicy {
    Streams(Streams),
    KernelLike(KernelLike),
}

impl ReadaheadPolicy {
    fn on_miss(&mut self, access: &WindowRequest<'_>, windows: &mut Windows) {
        match self {
            ReadaheadPolicy::Streams(streams) => streams.on_miss(access, windows),
            ReadaheadPolicy::KernelLike(kernel) => *windows = kernel.on_miss(access),
        }
    }
}

/// The readahead state of one open handle.
#[derive(Clone, Copy, Debug)]
pub struct Readahead {
    config: Config,
    hint: Hint,
    pages_max: u32,
    /// Windows since there was trouble or the largest window grew.
    calm: u32,
    policy: ReadaheadPolicy,
    /// Only its counts are used.
    done: ReadaheadReport,
}

impl Readahead {
    /// The state of a handle that has read nothing.
    pub fn new(config: Config) -> Self {
        let policy = match config.style {
            ReadaheadStyle::Streams => ReadaheadPolicy::Streams(Streams::new()),
            ReadaheadStyle::KernelLike => ReadaheadPolicy::KernelLike(KernelLike::new()),
        };
        let (hint, pages_max, done) = (Hint::Normal, config.pages_max, ReadaheadReport::new(&config));
        Self { config, hint, pages_max, calm: 0, policy, done }
    }

    /// The state of the handle's readahead, and its counts. The kernel-like policy says random.
    pub fn report(&self) -> ReadaheadReport {
        let pattern = match &self.policy {
            ReadaheadPolicy::Streams(streams) => streams.pattern(),
            ReadaheadPolicy::KernelLike(_) => AccessPattern::Random,
        };
        ReadaheadReport { pattern, hint: self.hint, pages_max: self.pages_max, ..self.done }
    }

    /// The largest window is as configured again, or twice that for sequential reads; streams are forgotten.
    pub fn set_hint(&mut self, hint: Hint) {
        let done = self.done;
        *self = Self { hint, done, ..Self::new(self.config) };
        self.pages_max = self.configured_max();
    }

    /// From now on windows ask for folios of these orders. Forgets all streams.
    pub fn set_orders(&mut self, orders: Orders) {
        self.config = self.config.orders(orders.min, orders.max);
        self.set_hint(self.hint);
    }

    /// `asked.index` is wanted and not in the cache. Returns the windows to fetch: the first begins there,
    /// and the reader does not wait for the others. No window only if the file ends before `asked.index`.
    pub fn on_miss(&mut self, asked: ReadRequest, cached: &dyn Cached) -> Windows {
        let mut windows = Windows::none();
        self.on_miss_into(asked, cached, &mut windows);
        windows
    }

    /// As [`Readahead::on_miss`], into `windows`, which is empty: there is room for many, and mostly one is written.
    pub fn on_miss_into(&mut self, asked: ReadRequest, cached: &dyn Cached, windows: &mut Windows) {
        if asked.index.0 < asked.file_pages {
            let (limits, clamped) = (self.limits(), asked.clamped());
            let access = WindowRequest { limits: &limits, asked: clamped, cached };
            self.policy.on_miss(&access, windows);
            self.note(windows, clamped.index..clamped.end());
        }
    }

    /// The marked folio that begins with page `asked.index` was read: the stream is alive, the next window
    /// may start. No window if the file ends, or its pages are there.
    pub fn on_marker(&mut self, asked: ReadRequest, cached: &dyn Cached) -> Windows {
        if asked.index.0 >= asked.file_pages {
            return Windows::none();
        }
        let (limits, clamped) = (self.limits(), asked.clamped());
        let access = WindowRequest { limits: &limits, asked: clamped, cached };
        let mut windows = match &mut self.policy {
            ReadaheadPolicy::Streams(streams) => streams.on_marker(&access),
            ReadaheadPolicy::KernelLike(kernel) => kernel.on_marker(&access),
        };
        let wanted_end = match &self.policy {
            ReadaheadPolicy::Streams(streams) => streams.wanted_end(),
            ReadaheadPolicy::KernelLike(_) => clamped.end(),
        };
        self.note(&mut windows, clamped.index..wanted_end);
        windows
    }

    /// The window of the miss at `index` could not be filled: the next miss there is the stream's again.
    pub fn on_refused(&mut self, index: PageIndex) {
        if let ReadaheadPolicy::Streams(streams) = &mut self.policy {
            streams.on_refused(index);
        }
    }

    /// A page fault missed. The default treats it like a read of one page; kernel-like, the window lies around the
    /// page.
    pub fn on_fault(&mut self, fault: PageFault, cached: &dyn Cached) -> Windows {
        let PageFault { index, file_pages, hint } = fault;
        if index.0 >= file_pages {
            return Windows::none();
        }
        let (limits, asked) =
            (WindowLimits { hint, ..self.limits() }, ReadRequest { index, pages: 1, file_pages });
        let access = WindowRequest { limits: &limits, asked, cached };
        let mut windows = Windows::none();
        match &mut self.policy {
            ReadaheadPolicy::Streams(streams) => streams.on_miss(&access, &mut windows),
            ReadaheadPolicy::KernelLike(kernel) => windows = kernel.on_fault(&access),
        }
        self.note(&mut windows, index..asked.end());
        windows
    }

    /// A page fault found its page in the cache.
    pub fn on_fault_hit(&mut self) {
        if let ReadaheadPolicy::KernelLike(kernel) = &mut self.policy {
            kernel.on_fault_hit();
        }
    }

    /// A read ended before byte `position`. Only the kernel-like policy wants to know.
    pub fn on_read_end(&mut self, position: u64) {
        if let ReadaheadPolicy::KernelLike(kernel) = &mut self.policy {
            kernel.on_read_end(position);
        }
    }

    /// The device failed to read a page of a window: windows become a quarter as large.
    pub fn on_failure(&mut self) {
        self.done.failures += 1;
        let min = match self.policy {
            ReadaheadPolicy::Streams(_) => stream::PAGES_MIN.min(self.config.pages_max),
            ReadaheadPolicy::KernelLike(_) => 0,
        };
        self.pages_max = (self.pages_max / 4).max(min);
        self.calm = 0;
    }

    fn limits(&self) -> WindowLimits {
        let Config { io_pages, order_min, order_max, .. } = self.config;
        WindowLimits { pages_max: self.pages_max, io_pages, order_min, order_max, hint: self.hint }
    }

    fn note(&mut self, windows: &mut Windows, wanted: Range<PageIndex>) {
        windows.want(wanted.clone());
        let (mut pages, mut asked) = (0, 0);
        for window in windows.iter_mut() {
            window.order_min = self.config.order_min;
            let (from, to) = (window.start.max(wanted.start), window.end().min(wanted.end));
            pages += u64::from(window.pages);
            asked += to.0.saturating_sub(from.0);
        }
        if pages > 0 {
            self.done.window_pages = pages;
        }
        match pages - asked {
            0 if pages == 0 => {}
            0 => self.done.exact += 1,
            ahead => {
                self.done.windows += 1;
                self.done.prefetched_pages += ahead;
                self.calm += 1;
            }
        }
        self.adapt();
    }

    fn adapt(&mut self) {
        let ReadaheadPolicy::Streams(streams) = &mut self.policy else { return };
        let lost = streams.take_lost();
        if lost > 0 {
            self.done.lost_windows += lost;
            self.pages_max = (self.pages_max / 2).max(stream::PAGES_MIN.min(self.config.pages_max));
            self.calm = 0;
        } else if self.calm >= CALM_WINDOWS {
            self.pages_max = self.pages_max.saturating_mul(2).min(self.configured_max());
            self.calm = 0;
        }
    }

    fn configured_max(&self) -> u32 {
        match self.hint {
            Hint::Sequential => self.config.pages_max.saturating_mul(2),
            Hint::Normal | Hint::Random | Hint::NoReuse => self.config.pages_max,
        }
    }
}

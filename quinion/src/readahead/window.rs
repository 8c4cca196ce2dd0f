//! Window: the result of a decision, and the questions that it may ask before.
//!
//! ```text
//!      start                 marker                 start + pages
//!        [----- asked for -----[M]------ ahead ---------)
//! ```
//!
//! [`Windows`] are the few requests that one decision gives, the one that was asked for first: a stream that goes
//! backward or in steps wants pages that do not follow the missed one. [`Cached`] answers the questions of a decision.

use std::ops::Range;

use arrayvec::ArrayVec;

use crate::units::{Order, PageIndex};

/// Pages to fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub start: PageIndex,
    /// How many pages; at least 1.
    pub pages: u32,
    /// The page whose reader starts the next window; one of this window's.
    pub marker: Option<PageIndex>,
    /// The largest folio the fill should make of it. The fill makes smaller ones where frames or alignment want it so.
    pub order: Order,
    /// The smallest folio that is worth making: the fill rounds the window to whole ones. 0 asks for nothing.
    pub order_min: Order,
    /// The pages that the reader of its stream has passed; `None` if it has no stream, or the stream is new.
    pub stream: Option<StreamProgress>,
}

/// The way of a stream's reader so far: pages that were read once by it, and perhaps by others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamProgress {
    pub from: PageIndex,
    /// The page that is read now.
    pub to: PageIndex,
}

impl Window {
    /// `pages` pages from `start` on and nothing else: no marker, folios of one page.
    pub const fn exact(start: PageIndex, pages: u32) -> Self {
        Self { start, pages, marker: None, order: Order::ZERO, order_min: Order::ZERO, stream: None }
    }

    /// The page after the last one.
    pub const fn end(&self) -> PageIndex {
        self.start.plus(self.pages as u64)
    }

    /// Whether `index` is one of its pages.
    pub fn covers(&self, index: PageIndex) -> bool {
        self.start <= index && index < self.end()
    }
}

const WINDOWS_MAX: usize = 9;

/// The windows of one decision, at most [`Windows::MAX`] of them. After a miss the first begins with the
/// missed page; the reader does not wait for the others.
#[derive(Clone, Debug)]
pub struct Windows {
    list: ArrayVec<Window, WINDOWS_MAX>,
    /// The requested pages: the first, and the one after the last.
    wanted: (PageIndex, PageIndex),
}

impl Windows {
    /// The most windows that one decision gives: one that was asked for and eight ahead.
    pub const MAX: usize = WINDOWS_MAX;

    /// No window.
    pub const fn none() -> Self {
        let nothing = (PageIndex(0), PageIndex(0));
        Self { list: ArrayVec::new_const(), wanted: nothing }
    }

    pub fn one(window: Window) -> Self {
        let mut windows = Self::none();
        windows.push(window);
        windows
    }

    /// Adds a window behind the others.
    ///
    /// # Panics
    /// If there are [`Windows::MAX`] of them, or the window has no pages.
    pub fn push(&mut self, window: Window) {
        assert!(window.pages > 0 && !self.list.is_full(), "a window is not empty, and few are given at once");
        self.list.push(window);
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Window> {
        self.list.iter_mut()
    }

    pub(super) fn set_stream(&mut self, stream: Option<StreamProgress>) {
        self.iter_mut().for_each(|window| window.stream = stream);
    }

    /// Notes that the windows are for a request of `wanted`.
    pub fn want(&mut self, wanted: Range<PageIndex>) {
        self.wanted = (wanted.start, wanted.end);
    }

    /// The pages that were asked for; all others of the windows are fetched ahead.
    pub fn wanted(&self) -> Range<PageIndex> {
        self.wanted.0..self.wanted.1
    }

    pub(super) fn clear_marker(&mut self, at: usize) {
        if let Some(window) = self.list.get_mut(at) {
            window.marker = None;
        }
    }

    pub fn pages(&self) -> u64 {
        self.iter().map(|window| u64::from(window.pages)).sum()
    }
}

impl std::ops::Deref for Windows {
    type Target = [Window];
    fn deref(&self) -> &[Window] {
        &self.list
    }
}

/// The questions about the cache that a decision may ask. Answers are hints: pages come and go meanwhile, and a wrong
/// one costs a read or two, never wrong data. Asked seldom, and cheap: the first page looked at ends most questions.
pub trait Cached {
    /// How many pages right before `index` are cached without a gap; looks at no more than `max`.
    fn cached_before(&self, index: PageIndex, max: u32) -> u32;
    /// The first page from `index` on that is not cached; looks at `max` at most. `None`: all of them are cached.
    fn next_missing(&self, index: PageIndex, max: u32) -> Option<PageIndex>;
}

/// An empty cache, for decisions that do not depend on it.
#[derive(Clone, Copy, Debug)]
pub struct NothingCached;

impl Cached for NothingCached {
    fn cached_before(&self, _: PageIndex, _: u32) -> u32 {
        0
    }
    fn next_missing(&self, index: PageIndex, max: u32) -> Option<PageIndex> {
        (max > 0).then_some(index)
    }
}

/// A request, as far as readahead has to do with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadRequest {
    /// The page that is missing, or carries the marker.
    pub index: PageIndex,
    /// How many pages the request wants from there on; at least 1.
    pub pages: u32,
    /// How many pages the file has; more than `index`.
    pub file_pages: u64,
}

impl ReadRequest {
    pub(super) fn end(&self) -> PageIndex {
        self.index.plus(u64::from(self.pages))
    }

    /// The request without pages past the file's end, but of one page at least.
    pub(super) fn clamped(self) -> Self {
        let left = self.file_pages.saturating_sub(self.index.0).max(1);
        Self { pages: u64::from(self.pages.max(1)).min(left) as u32, ..self }
    }
}

/// A page fault that missed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageFault {
    /// The page that is missing.
    pub index: PageIndex,
    pub file_pages: u64,
    /// The hint that was given for the map.
    pub hint: super::Hint,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WindowLimits {
    /// The largest window, in pages; 0 if nothing is to be read that was not asked for.
    pub pages_max: u32,
    pub io_pages: u32,
    pub order_min: Order,
    pub order_max: Order,
    pub hint: super::Hint,
}

/// An access that a policy answers with windows: a miss, or the read of a marked folio.
#[derive(Clone, Copy)]
pub(super) struct WindowRequest<'a> {
    pub limits: &'a WindowLimits,
    /// Clamped to the file.
    pub asked: ReadRequest,
    pub cached: &'a dyn Cached,
}

/// Room for two to four of a stream's reads, of `asked` pages each.
pub(super) fn first_size(asked: u32, pages_max: u32) -> u32 {
    let asked = asked.min(pages_max).next_power_of_two();
    if asked <= pages_max / 32 {
        asked * 4
    } else if asked <= pages_max / 4 {
        asked * 2
    } else {
        pages_max
    }
}

/// The window after one of `size` pages: four times as large while small, then twice, then the largest.
pub(super) fn next_size(size: u32, pages_max: u32) -> u32 {
    if size < pages_max / 16 {
        size * 4
    } else if size <= pages_max / 2 {
        size * 2
    } else {
        pages_max
    }
}

pub(super) fn clamp(start: PageIndex, pages: u32, end: u64) -> u32 {
    u64::from(pages).min(end.saturating_sub(start.0)) as u32
}

//! Readahead: which pages to fetch besides those that were asked for.
//!
//! Pure judgement: numbers in, a [`Window`] out. No input, no output, no lock,
//! no clock, no memory but the few numbers of one open handle.
//!
//! ```text
//!      miss                  marker                            marker
//!       v                      v                                 v
//!   |   asked   | . . . . . . [M] . . . . . |  next window      [M] ...
//!   ^ start                    ^ start + size - async part
//! ```
//!
//! A stream that goes forward gets a window, then another before it has used
//! up the first: the **marker** sits on a page some way ahead, and whoever
//! reads that page starts the next window without waiting for it. Windows grow
//! from a few pages to the largest. A miss that continues nothing is taken as
//! random and reads exactly what was asked.
//!
//! This is the simple ramp: forward streams, one for each handle. Strided,
//! backward, interleaved and looping streams are taken as random.
//!
//! Invariants:
//!  1. A window covers the page that was missed.
//!  2. No window reaches past the file's last page.
//!  3. At most one page of a window carries the marker, and it was not asked for.

use crate::units::PageIndex;

/// Pages to fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// The first page.
    pub start: PageIndex,
    /// How many pages; at least 1.
    pub pages: u32,
    /// The page whose reader starts the next window.
    pub marker: Option<PageIndex>,
}

/// The readahead state of one open handle.
#[derive(Clone, Copy, Debug)]
pub struct Readahead {
    /// The page after the last one that was fetched for this stream.
    next: PageIndex,
    /// Size of the newest window, in pages; 0 while no stream is seen.
    size: u32,
    /// The largest window, in pages.
    pages_max: u32,
}

/// What was asked for is no readahead: so many pages of it, 1 MiB, are read at once however small the largest
/// window is.
const ASKED_PAGES_MAX: u32 = 256;
/// The smallest window of a stream, in pages.
const PAGES_MIN: u32 = 4;

impl Readahead {
    /// The state of a handle that has read nothing; windows of at most `pages_max` pages, at least 1.
    pub fn new(pages_max: u32) -> Self {
        Self { next: PageIndex(0), size: 0, pages_max: pages_max.max(1) }
    }

    /// The largest window, in pages.
    pub fn pages_max(&self) -> u32 {
        self.pages_max
    }

    /// `asked` pages (at least 1) are wanted from `index` on, and `index` is not in the cache; the file
    /// has `file_pages` pages, more than `index`.
    pub fn on_miss(&mut self, index: PageIndex, asked: u32, file_pages: u64) -> Window {
        debug_assert!(asked > 0 && index.0 < file_pages);
        let continues = index == self.next;
        self.size = match () {
            () if !continues => 0,
            () if self.size == 0 => first_size(asked, self.pages_max),
            () => next_size(self.size, self.pages_max),
        };
        let pages = clamp(index, self.size.max(asked.min(self.pages_max.max(ASKED_PAGES_MAX))), file_pages);
        self.next = index.plus(u64::from(pages));
        // The first window is half asked for and half ahead; what is ahead begins with the marker.
        let ahead = index.plus(u64::from(asked.max(pages / 4)));
        let more = self.size > 0 && self.next.0 < file_pages && ahead < self.next;
        Window { start: index, pages, marker: more.then_some(ahead) }
    }

    /// The marked page `index` was read: the stream is alive, the next window may start. `None` if the
    /// marker was another stream's or the file ends.
    pub fn on_marker(&mut self, index: PageIndex, file_pages: u64) -> Option<Window> {
        let ours = index < self.next && self.next.0 - index.0 <= u64::from(self.pages_max) * 2;
        if !ours || self.size == 0 || self.next.0 >= file_pages {
            return None;
        }
        self.size = next_size(self.size, self.pages_max);
        let start = self.next;
        let pages = clamp(start, self.size, file_pages);
        self.next = start.plus(u64::from(pages));
        // All of it is ahead: the first page carries the marker.
        Some(Window { start, pages, marker: (self.next.0 < file_pages).then_some(start) })
    }
}

/// The first window of a stream whose reads are of `asked` pages: room for two to four of them.
fn first_size(asked: u32, pages_max: u32) -> u32 {
    let asked = asked.min(pages_max).next_power_of_two();
    let factor = if asked <= pages_max / 32 { 4 } else { 2 };
    (asked * factor).clamp(PAGES_MIN, pages_max.max(PAGES_MIN)).min(pages_max)
}

/// The window after one of `size` pages: four times as large while small, then twice, then the largest.
fn next_size(size: u32, pages_max: u32) -> u32 {
    let factor = if size < pages_max / 16 { 4 } else { 2 };
    (size * factor).min(pages_max)
}

/// `pages` from `start` on, but not past the file's end.
fn clamp(start: PageIndex, pages: u32, file_pages: u64) -> u32 {
    u64::from(pages).min(file_pages - start.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads a file forward, `asked` pages at a time, and returns the windows and the misses.
    fn stream(asked: u32, file_pages: u64, pages_max: u32) -> (Vec<Window>, usize) {
        let mut state = Readahead::new(pages_max);
        let mut cached = std::collections::BTreeMap::new();
        let (mut windows, mut misses) = (Vec::new(), 0);
        let mut insert = |w: Window, cached: &mut std::collections::BTreeMap<u64, bool>| {
            for page in w.start.0..w.start.0 + u64::from(w.pages) {
                assert!(
                    cached.insert(page, w.marker == Some(PageIndex(page))).is_none(),
                    "page {page} twice"
                );
            }
            windows.push(w);
        };
        let mut page = 0;
        while page < file_pages {
            let wanted = u64::from(asked).min(file_pages - page) as u32;
            for p in page..page + u64::from(wanted) {
                if !cached.contains_key(&p) {
                    misses += 1;
                    let rest = (page + u64::from(wanted) - p) as u32;
                    insert(state.on_miss(PageIndex(p), rest, file_pages), &mut cached);
                }
                if cached.insert(p, false) == Some(true)
                    && let Some(w) = state.on_marker(PageIndex(p), file_pages)
                {
                    insert(w, &mut cached);
                }
            }
            page += u64::from(wanted);
        }
        (windows, misses)
    }

    #[test]
    fn q05_q06_a_forward_stream_misses_at_its_start_only_and_reads_each_page_once() {
        for asked in [1, 2, 4, 16, 32, 256] {
            let (windows, misses) = stream(asked, 10_000, 1024);
            assert!(misses <= 2, "{misses} misses when reading {asked} pages at a time");
            assert!(windows.iter().any(|w| w.pages == 1024), "the window grows to its largest");
        }
    }

    #[test]
    fn q07_a_random_miss_reads_what_was_asked() {
        let mut state = Readahead::new(1024);
        for index in [500, 17, 9000, 3, 4000] {
            let window = state.on_miss(PageIndex(index), 2, 10_000);
            assert_eq!(window, Window { start: PageIndex(index), pages: 2, marker: None });
        }
    }

    #[test]
    fn a_second_miss_right_after_the_first_starts_a_stream() {
        let mut state = Readahead::new(1024);
        state.on_miss(PageIndex(500), 1, 10_000);
        let window = state.on_miss(PageIndex(501), 1, 10_000);
        assert_eq!((window.pages, window.marker), (4, Some(PageIndex(502))));
    }

    proptest! {
        #[test]
        fn q02_windows_hold_their_invariants(
            pages_max in 1u32..3000, file_pages in 1u64..5000,
            steps in prop::collection::vec((0u64..5000, 1u32..600, any::<bool>()), 1..60),
        ) {
            let mut state = Readahead::new(pages_max);
            for (at, asked, miss) in steps {
                let index = PageIndex(at % file_pages);
                let asked = u64::from(asked).min(file_pages - index.0) as u32;
                let window = if miss {
                    Some(state.on_miss(index, asked, file_pages))
                } else {
                    state.on_marker(index, file_pages)
                };
                let Some(window) = window else { continue };
                let end = window.start.0 + u64::from(window.pages);
                prop_assert!(window.pages >= 1 && window.pages <= pages_max.max(ASKED_PAGES_MAX) && end <= file_pages);
                if miss {
                    prop_assert_eq!(window.start, index);
                }
                if let Some(marker) = window.marker {
                    prop_assert!(marker >= window.start && marker.0 < end);
                    prop_assert!(!miss || marker.0 >= index.0 + u64::from(asked));
                }
            }
        }

        #[test]
        fn a_forward_stream_of_any_step_is_read_once(
            asked in 1u32..300, file_pages in 1u64..4000, pages_max in 1u32..2000,
        ) {
            stream(asked, file_pages, pages_max);
        }
    }
}

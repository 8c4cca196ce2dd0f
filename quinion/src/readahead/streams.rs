//! Streams: the default policy, which tells several streams of one handle apart.
//!
//! ```text
//!   miss 1 a stream expects it     -> its next window, larger
//!        2 it touches a request    -> a stream: forward, backward; one that had fetched it shrinks
//!        3 equal distances         -> a strided stream
//!        4 a stream began there    -> another lap of it
//!        5 the file's first page, or a run of cached pages before it -> a forward stream
//!        6 else                    -> what was asked for, and it is remembered
//!   marker 1 a stream's own        -> its next window, larger
//!          2 a strange one         -> a forward stream from the next gap on
//! ```
//!
//! Hits are not reported. So a stream through cached pages is seen where it leaves them, by the run of cached pages
//! before the miss, and a handle that has read at random lately needs more than that.
//!
//! Invariants: at most [`STREAMS_MAX`] streams, the one used longest ago goes
//! first; requests that no stream expects are read exactly, page for page.

use crate::units::PageIndex;

use super::recent::{DetectedPattern, RecentRequests};
use super::stream::{ReadDirection, Stream, piece_pages, requested_order};
use super::window::{ReadRequest, Window, WindowRequest, Windows};
use super::{AccessPattern, Hint};

pub(super) const STREAMS_MAX: usize = 8;
/// After so many misses in a row that no stream expected, a run of cached pages is no evidence any more.
const RANDOM_RUN_LIMIT: u32 = 4;
/// After so many, two adjacent requests do not make a stream any more: it takes three.
const RANDOM_TOUCH_LIMIT: u32 = 8;
const RUN_SCAN_MAX: u32 = 512;

#[derive(Clone, Copy, Debug)]
pub(super) struct Streams {
    table: [Option<Stream>; STREAMS_MAX],
    recent: RecentRequests,
    clock: u64,
    /// Misses in a row that no stream expected.
    randoms: u32,
    pattern: AccessPattern,
    lost: u64,
    /// The end of the requested pages in the newest windows.
    wanted_end: PageIndex,
}

impl Streams {
    pub fn new() -> Self {
        let table = [None; STREAMS_MAX];
        let (pattern, wanted_end) = (AccessPattern::Random, PageIndex(0));
        Self { table, recent: RecentRequests::new(), clock: 0, randoms: 0, pattern, lost: 0, wanted_end }
    }

    /// The pattern of the handle's requests, by the newest decision.
    pub fn pattern(&self) -> AccessPattern {
        self.pattern
    }

    /// How often a window was found gone before it was read, since this was asked last.
    pub fn take_lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    pub fn wanted_end(&self) -> PageIndex {
        self.wanted_end
    }

    /// Puts the windows to fetch into `windows`, which is empty.
    pub fn on_miss(&mut self, access: &WindowRequest<'_>, windows: &mut Windows) {
        self.clock += 1;
        self.wanted_end = access.asked.end();
        match self.windows_of_stream(access) {
            Some(found) => *windows = found,
            // 6 Only the pages that were asked for: one window.
            None => windows.push(self.exact(access)),
        }
    }

    fn windows_of_stream(&mut self, access: &WindowRequest<'_>) -> Option<Windows> {
        let WindowRequest { limits, asked, .. } = *access;
        let streams = if limits.pages_max == 0 || limits.hint == Hint::Random {
            ContinuationRule::Requests
        } else {
            ContinuationRule::All
        };
        // 1 A stream expects it.
        if let Some(at) = self.expecting(streams, access) {
            return Some(self.continue_stream(at, access));
        }
        if streams == ContinuationRule::Requests {
            return self.in_pieces(access);
        }
        // 2, 3 It goes with requests before it.
        let links_min = if self.randoms >= RANDOM_TOUCH_LIMIT { 2 } else { 1 };
        let short = asked.pages <= piece_pages(limits);
        let pattern = if short { self.recent.note(asked, links_min) } else { DetectedPattern::None };
        match pattern {
            DetectedPattern::Forward(origin) => return Some(self.resume(origin, access)),
            DetectedPattern::Backward => {
                let stream = Stream::begin(ReadDirection::Backward, asked.end(), asked, limits);
                return Some(self.start(stream, access));
            }
            DetectedPattern::Strided(distance) if distance.unsigned_abs() > u64::from(asked.pages) => {
                let way = ReadDirection::Strided { next: asked.index.0 as i64, distance, pages: asked.pages };
                let stream = Stream::begin(way, asked.index, asked, limits);
                return Some(self.start(stream, access));
            }
            DetectedPattern::Strided(_) | DetectedPattern::None => {}
        }
        // 4 A stream began there.
        if let Some(at) = self.position(|stream| stream.begins_again(asked.index)) {
            return Some(self.restart_loop(at, access));
        }
        // 5 Nothing but the place speaks for a stream.
        if self.is_likely_start(access) {
            return Some(self.resume(asked.index, access));
        }
        self.in_pieces(access)
    }

    pub fn on_marker(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, .. } = *access;
        self.clock += 1;
        self.wanted_end = PageIndex(0);
        if let Some(at) = self.position(|stream| stream.has_marker_on(asked.index)) {
            let stream = self.table[at].as_mut().expect("it was just found");
            stream.used = self.clock;
            self.wanted_end = stream.wanted_end();
            let windows = stream.after_marker(access);
            self.recognise(at);
            return windows;
        }
        if limits.pages_max == 0 || limits.hint == Hint::Random {
            return Windows::none();
        }
        self.on_foreign_marker(access)
    }

    /// No page could be fetched for the miss at `index`.
    pub fn on_refused(&mut self, index: PageIndex) {
        self.table.iter_mut().flatten().for_each(|stream| stream.refuse(index));
    }

    /// A marker of no stream of this handle: another handle's, or of a stream that was forgotten.
    fn on_foreign_marker(&mut self, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, cached } = *access;
        let next = asked.index.plus(1);
        let scan_pages = u64::from(limits.pages_max).min(asked.file_pages.saturating_sub(next.0)) as u32;
        let Some(gap) = cached.next_missing(next, scan_pages) else { return Windows::none() };
        let run = (gap.0 - asked.index.0) as u32;
        let at = self.position(|stream| stream.ends_at(gap));
        let at = at.unwrap_or_else(|| {
            let from_gap = ReadRequest { index: gap, pages: run.max(asked.pages), ..asked };
            self.insert(Stream::begin(ReadDirection::Forward, gap, from_gap, limits))
        });
        let stream = self.table[at].as_mut().expect("it was just found or inserted");
        let windows = stream.after_marker(access);
        self.recognise(at);
        windows
    }

    fn expecting(&self, follow: ContinuationRule, access: &WindowRequest<'_>) -> Option<usize> {
        // A stream that ends just here before one that has to reach.
        let ends_here =
            |stream: &Stream| follow == ContinuationRule::All && stream.ends_at(access.asked.index);
        self.position(ends_here).or_else(|| {
            self.position(|stream| match follow {
                ContinuationRule::All => stream.continues(access),
                ContinuationRule::Requests => {
                    stream.is_long_request() && !stream.is_complete() && stream.continues(access)
                }
            })
        })
    }

    fn continue_stream(&mut self, at: usize, access: &WindowRequest<'_>) -> Windows {
        self.table[at].iter_mut().for_each(|stream| stream.grow(access.limits));
        self.proceed(at, access)
    }

    fn start(&mut self, mut stream: Stream, access: &WindowRequest<'_>) -> Windows {
        let windows = stream.after_miss(access);
        let at = self.insert(stream);
        self.recognise(at);
        windows
    }

    /// A forward stream from here on: one that had fetched or read these pages, or was lost just before; or a new one.
    fn resume(&mut self, origin: PageIndex, access: &WindowRequest<'_>) -> Windows {
        let WindowRequest { limits, asked, .. } = *access;
        if let Some(at) = self.position(|stream| stream.has_ahead(asked.index)) {
            self.lost += 1;
            self.table[at].iter_mut().for_each(|stream| stream.shrink(asked.index, limits));
            return self.proceed(at, access);
        }
        if let Some(at) = self.position(|stream| stream.has_been_at(asked.index)) {
            return self.restart_loop(at, access);
        }
        if let Some(at) = self.position(|stream| stream.was_lost_near(asked.index, limits)) {
            return self.proceed(at, access);
        }
        self.start(Stream::begin(ReadDirection::Forward, origin, asked, limits), access)
    }

    fn restart_loop(&mut self, at: usize, access: &WindowRequest<'_>) -> Windows {
        self.table[at].iter_mut().for_each(|stream| stream.restart(access.asked.index));
        self.proceed(at, access)
    }

    fn proceed(&mut self, at: usize, access: &WindowRequest<'_>) -> Windows {
        let stream = self.table[at].as_mut().expect("a known stream is in the table");
        stream.used = self.clock;
        let windows = stream.after_miss(access);
        self.recognise(at);
        windows
    }

    fn is_likely_start(&self, access: &WindowRequest<'_>) -> bool {
        let WindowRequest { limits, asked, cached } = *access;
        if limits.hint == Hint::Sequential || (self.clock == 1 && asked.index.0 == 0) {
            return true;
        }
        let scan_pages = asked.pages.saturating_add(1);
        self.randoms < RANDOM_RUN_LIMIT
            && scan_pages <= RUN_SCAN_MAX
            && cached.cached_before(asked.index, scan_pages) >= scan_pages
    }

    fn in_pieces(&mut self, access: &WindowRequest<'_>) -> Option<Windows> {
        let WindowRequest { limits, asked, .. } = *access;
        self.randoms = self.randoms.saturating_add(1);
        if self.randoms > 1 {
            self.pattern = AccessPattern::Random;
        }
        (asked.pages > piece_pages(limits)).then(|| {
            let mut stream = Stream::long_request(asked, limits);
            let windows = stream.after_miss(access);
            self.insert(stream);
            windows
        })
    }

    fn exact(&self, access: &WindowRequest<'_>) -> Window {
        let WindowRequest { limits, asked, .. } = *access;
        Window { order: requested_order(asked.pages, limits), ..Window::exact(asked.index, asked.pages) }
    }

    fn position(&self, is_it: impl Fn(&Stream) -> bool) -> Option<usize> {
        self.table.iter().map_while(Option::as_ref).position(is_it) // from the front on, and none is taken out
    }

    fn insert(&mut self, mut stream: Stream) -> usize {
        let age = |at: &usize| self.table[*at].map_or(0, |stream| stream.used);
        let at = (0..STREAMS_MAX).min_by_key(age).expect("the table has room for some");
        stream.used = self.clock;
        self.table[at] = Some(stream);
        at
    }

    /// The stream at `at` made progress: what is the handle doing?
    fn recognise(&mut self, at: usize) {
        let Some(stream) = self.table[at] else { return };
        if stream.is_long_request() {
            return;
        }
        self.randoms = 0;
        self.pattern = match stream.way {
            ReadDirection::Forward if stream.restarts > 0 => AccessPattern::Looping,
            ReadDirection::Forward => AccessPattern::Sequential,
            ReadDirection::Backward => AccessPattern::Backward,
            ReadDirection::Strided { .. } => AccessPattern::Strided,
        };
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ContinuationRule {
    All,
    /// Long requests, which are read in pieces; nothing is read that was not asked for.
    Requests,
}

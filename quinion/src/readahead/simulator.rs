//! Simulator: a naive cache around a policy, so that windows can be seen at work.
//!
//! A set of folios, some of them marked. A read goes page by page: a missing page is a miss, a marked folio is met
//! once, and windows are filled at once by the rules of the real fill: the largest folios that alignment allows, none
//! over a cached one, the marker on a folio that is new. Events are written down as `start+pages(marker pages from the
//! end)`.

use std::collections::{BTreeMap, BTreeSet};

use crate::units::{Order, PageIndex};

use super::{Cached, Config, Hint, PageFault, ReadRequest, Readahead, Window, Windows};

/// The pages that are cached: each with the first page of its folio.
#[derive(Default)]
pub struct SimulatedPages {
    folio_of: BTreeMap<u64, u64>,
    marked: BTreeSet<u64>,
}

impl Cached for SimulatedPages {
    fn cached_before(&self, index: PageIndex, max: u32) -> u32 {
        let before = (0..index.0).rev().take(max as usize);
        before.take_while(|page| self.folio_of.contains_key(page)).count() as u32
    }
    fn next_missing(&self, index: PageIndex, max: u32) -> Option<PageIndex> {
        (index.0..index.0 + u64::from(max)).find(|page| !self.folio_of.contains_key(page)).map(PageIndex)
    }
}

impl SimulatedPages {
    pub fn all(&self) -> impl Iterator<Item = u64> {
        self.folio_of.keys().copied()
    }
}

pub struct Simulator {
    pub state: Readahead,
    pub file_pages: u64,
    pub pages: SimulatedPages,
    /// Windows as they came, and those of them that were not told yet.
    pub log: Vec<Window>,
    pub windows: Vec<Window>,
    /// Folios as they were filled: first page and order.
    pub folios: Vec<(u64, u8)>,
    /// How often each page was fetched.
    pub fetched: BTreeMap<u64, u32>,
    /// Misses that a reader had to wait for.
    pub misses: Vec<u64>,
}

impl Simulator {
    pub fn new(config: Config, file_pages: u64) -> Self {
        Self {
            state: Readahead::new(config),
            file_pages,
            pages: SimulatedPages::default(),
            log: Vec::new(),
            windows: Vec::new(),
            folios: Vec::new(),
            fetched: BTreeMap::new(),
            misses: Vec::new(),
        }
    }

    /// Reads `pages` pages from page `first` on.
    pub fn read(&mut self, first: u64, pages: u64) {
        let end = (first + pages).min(self.file_pages);
        for page in first..end {
            let (wanted, file_pages) = ((end - page) as u32, self.file_pages);
            let asked = |index| ReadRequest { index: PageIndex(index), pages: wanted, file_pages };
            if !self.pages.folio_of.contains_key(&page) {
                let windows = self.state.on_miss(asked(page), &self.pages);
                assert_eq!(
                    windows.first().map(|w| w.start),
                    Some(PageIndex(page)),
                    "the missed page comes first"
                );
                self.misses.push(page);
                self.fill(&windows);
            }
            let folio = self.pages.folio_of[&page];
            if self.pages.marked.remove(&folio) {
                let windows = self.state.on_marker(asked(folio), &self.pages);
                self.fill(&windows);
            }
        }
        self.state.on_read_end(end * 4096);
    }

    /// Touches a page through a map of which `hint` was said.
    pub fn fault(&mut self, page: u64, hint: Hint) {
        if self.pages.folio_of.contains_key(&page) {
            self.state.on_fault_hit();
        } else {
            let fault = PageFault { index: PageIndex(page), file_pages: self.file_pages, hint };
            let windows = self.state.on_fault(fault, &self.pages);
            self.misses.push(page);
            self.fill(&windows);
        }
        let folio = self.pages.folio_of[&page];
        if self.pages.marked.remove(&folio) {
            let pages = self.state.report().pages_max;
            let asked = ReadRequest { index: PageIndex(folio), pages, file_pages: self.file_pages };
            let windows = self.state.on_marker(asked, &self.pages);
            self.fill(&windows);
        }
    }

    pub fn evict(&mut self, page: u64) {
        let Some(&folio) = self.pages.folio_of.get(&page) else { return };
        self.pages.folio_of.retain(|_, first| *first != folio);
        self.pages.marked.remove(&folio);
    }

    /// Puts a page in that was cached before.
    pub fn put(&mut self, page: u64) {
        self.pages.folio_of.insert(page, page);
    }

    pub fn newest_marker(&self) -> u64 {
        self.pages.marked.iter().next_back().copied().expect("there is a marker")
    }

    /// A miss of a scan by `pages` from `first` on that its first two reads do not explain, if there is one.
    pub fn late_miss(&self, first: u64, pages: u64) -> Option<u64> {
        self.misses.iter().copied().find(|&page| page >= first + 2 * pages)
    }

    fn fill(&mut self, windows: &Windows) {
        for window in windows.iter() {
            self.log.push(*window);
            self.windows.push(*window);
            let (mut at, end) = (window.start.0, window.end().0);
            assert!(window.pages > 0 && end <= self.file_pages, "{window:?} is not in the file");
            assert!(window.marker.is_none_or(|marker| window.covers(marker)), "{window:?}");
            while at < end {
                if self.pages.folio_of.contains_key(&at) {
                    at += 1;
                    continue;
                }
                let order = self.order_at(at, end, window.order);
                self.insert(at, order, window.marker);
                at += u64::from(order.pages());
            }
        }
    }

    /// The largest folio at `at` that its index, the end and the cached pages behind allow.
    fn order_at(&self, at: u64, end: u64, order_max: Order) -> Order {
        let fits = |order: u8| {
            let pages = 1 << order;
            at.is_multiple_of(pages)
                && at + pages <= end
                && !(at..at + pages).any(|p| self.pages.folio_of.contains_key(&p))
        };
        Order((0..=order_max.0).rev().find(|&order| fits(order)).expect("a page fits"))
    }

    fn insert(&mut self, at: u64, order: Order, marker: Option<PageIndex>) {
        let range = at..at + u64::from(order.pages());
        for page in range.clone() {
            self.pages.folio_of.insert(page, at);
            *self.fetched.entry(page).or_default() += 1;
        }
        self.folios.push((at, order.0));
        if marker.is_some_and(|marker| range.contains(&marker.0)) {
            self.pages.marked.insert(at);
        }
    }

    /// The windows since this was asked last, as text.
    pub fn log(&mut self) -> String {
        let text: Vec<String> = self.windows.drain(..).map(tell).collect();
        text.join(" ")
    }

    /// The folios since this was asked last, as text: how many of which order follow each other.
    pub fn folios_log(&mut self) -> String {
        let mut runs: Vec<(u8, u32)> = Vec::new();
        for (_, order) in self.folios.drain(..) {
            match runs.last_mut() {
                Some((last, count)) if *last == order => *count += 1,
                _ => runs.push((order, 1)),
            }
        }
        let text: Vec<String> = runs.iter().map(|(order, count)| format!("{count}xo{order}")).collect();
        text.join(" ")
    }
}

/// `start+pages(async)`, or `start+pages` without a marker.
fn tell(window: Window) -> String {
    let Window { start, pages, marker, .. } = window;
    match marker {
        Some(marker) => format!("{}+{pages}({})", start.0, window.end().0 - marker.0),
        None => format!("{}+{pages}", start.0),
    }
}

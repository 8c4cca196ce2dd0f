//! The stage of large folios: a device that lands its requests in parts, and a cache of one file that a test can
//! inspect.
//!
//! The device serves by itself, the last part first and with rubbish where a page is bad, or it keeps its requests for
//! the test to land page by page.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use quinion::Error;
use quinion::backend::{Attributes, Backend, Fill, Identity, Version, WaitQueue};
use quinion::internals::arena::{Arena, ArenaOptions};
use quinion::internals::filemap::{Filemap, Reader, WaitPolicy};
use quinion::internals::mapping::{Mapping, NewMapping};
use quinion::internals::readahead::{Config, Readahead};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{MappingId, Order, Orders, PageIndex};

use crate::content::{self, page_content};

const PAGE: u64 = 4096;

/// A device that lands each request in parts of `part_pages`, or keeps it for the test to land.
#[derive(Debug)]
pub struct Parts {
    pub size: AtomicU64,
    part_pages: u64,
    pub state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub struct State {
    pub keeps: bool,
    kept: Vec<Fill>,
    bad: BTreeSet<u64>,
    requests: Vec<(u64, u32)>,
}

impl Parts {
    pub fn new(pages: u64, part_pages: u64) -> Arc<Self> {
        let size = AtomicU64::new(pages * PAGE);
        Arc::new(Self { size, part_pages, state: Mutex::default(), changed: Condvar::new() })
    }
    pub fn keep(&self) {
        self.state.lock().unwrap().keeps = true;
    }
    /// Waits for a request that is kept.
    pub fn kept(&self) -> Fill {
        let mut state = self.state.lock().unwrap();
        loop {
            if !state.kept.is_empty() {
                return state.kept.remove(0);
            }
            state = self.changed.wait(state).unwrap();
        }
    }
    pub fn spoil(&self, page: u64) {
        self.state.lock().unwrap().bad.insert(page);
    }
    pub fn mend(&self) {
        self.state.lock().unwrap().bad.clear();
    }
    /// Requests since the last call, as (first page, pages).
    pub fn requests(&self) -> Vec<(u64, u32)> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn serve(&self, mut fill: Fill) {
        let (first, pages) = (fill.run().index.0, u64::from(fill.run().pages));
        let bad = self.state.lock().unwrap().bad.clone();
        let mut failure = None;
        for part in (0..pages.div_ceil(self.part_pages)).rev() {
            let (from, to) = (part * self.part_pages, pages.min((part + 1) * self.part_pages));
            match bad.range(first + from..first + to).next() {
                Some(_) => {
                    fill.write((from * PAGE) as usize, &vec![0xbd; ((to - from) * PAGE) as usize]);
                    failure = Some(io::Error::from_raw_os_error(5));
                }
                None => land(&mut fill, from..to),
            }
        }
        let left = self.size.load(Ordering::Relaxed).saturating_sub(first * PAGE);
        fill.complete(failure.map_or(Ok(left.min(pages * PAGE) as usize), Err));
    }
}

/// Lands these pages of a request.
pub fn land(fill: &mut Fill, pages: std::ops::Range<u64>) {
    let first = fill.run().index.0;
    for page in pages.clone() {
        fill.write((page * PAGE) as usize, &page_content(1, first + page, 0));
    }
    fill.pages_were_read((pages.start * PAGE) as usize..(pages.end * PAGE) as usize);
}

impl Backend for Parts {
    fn name(&self) -> &'static str {
        "parts"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        Ok(Attributes {
            identity: Identity { device: 7, inode: 1, born: 0 },
            version: Version { modified: 0, changed: 0, settled: true, steps: true },
            size: self.size.load(Ordering::Relaxed),
        })
    }
    fn submit(&self, fills: Vec<Fill>) {
        for fill in fills {
            let mut state = self.state.lock().unwrap();
            state.requests.push((fill.run().index.0, fill.run().pages));
            if state.keeps {
                state.kept.push(fill);
                self.changed.notify_all();
            } else {
                drop(state);
                self.serve(fill);
            }
        }
    }
}

#[derive(Debug)]
pub struct Rig {
    pub arena: Arc<Arena>,
    pub filemap: Arc<Filemap>,
    pub mapping: Arc<Mapping>,
    pub device: Arc<Parts>,
    pub readahead: RankedMutex<Readahead>,
}

/// How a rig caches.
#[derive(Clone, Copy, Debug)]
pub struct RigOptions {
    pub memory: u64,
    /// The orders of folios.
    pub orders: Orders,
    /// Pages that a readahead window has at most.
    pub window: u32,
    /// The orders that the handle asks for.
    pub handle: Orders,
}

impl Default for RigOptions {
    /// 64 MiB for folios of all orders, without readahead.
    fn default() -> Self {
        Self { memory: 64 << 20, orders: ALL, window: 0, handle: ALL }
    }
}

impl Rig {
    pub fn new(device: Arc<Parts>, options: RigOptions) -> Self {
        let RigOptions { memory, orders, window, handle } = options;
        let arena = Arc::new(Arena::build(ArenaOptions { memory }).unwrap());
        let wait_queue = Arc::new(WaitQueue::new());
        let filemap = Arc::new(Filemap::new(Arc::clone(&arena), wait_queue, orders));
        let known = device.attributes().unwrap();
        let backend = Arc::clone(&device) as Arc<dyn Backend>;
        let (id, process) = (MappingId(1), ForkGuard::new());
        let new = NewMapping { arena: &arena, id, backend, attributes: &known, process };
        let mapping = Mapping::new(new);
        let readahead = Readahead::new(Config::new(window).orders(handle.min, handle.max));
        Self {
            arena,
            filemap,
            mapping: Arc::new(mapping.unwrap()),
            device,
            readahead: RankedMutex::new(Rank::Readahead, readahead),
        }
    }

    pub fn large(device: Arc<Parts>, window: u32) -> Self {
        Self::new(device, RigOptions { window, ..RigOptions::default() })
    }

    /// Reads `pages` pages from `first` on, as far as one call goes, and checks them; returns how many bytes.
    pub fn try_read(&self, first: u64, pages: u64) -> Result<usize, Error> {
        let mut buffer = vec![0; (pages * PAGE) as usize];
        let call = Reader::plain(&self.readahead).call(&self.mapping, WaitPolicy::Wait);
        let position = first * PAGE;
        let bytes = self.filemap.read(&call, position, &mut buffer)?;
        content::verify(&buffer[..bytes], 1, position).unwrap();
        Ok(bytes)
    }

    pub fn read(&self, first: u64, pages: u64) {
        assert_eq!(self.try_read(first, pages).unwrap() as u64, pages * PAGE);
    }

    /// The order of the folio at `page`; `None` if there is none.
    pub fn order(&self, page: u64) -> Option<u8> {
        self.mapping.try_hold(PageIndex(page)).ok().map(|held| held.order().0)
    }

    /// How many of the first `pages` pages are in folios of each order.
    pub fn pages_by_order(&self, pages: u64) -> BTreeMap<u8, u64> {
        let mut counts = BTreeMap::new();
        for order in (0..pages).filter_map(|page| self.order(page)) {
            *counts.entry(order).or_default() += 1;
        }
        counts
    }

    /// Checks the cache, and that all frames come back when the file is dropped.
    pub fn finish(self) {
        assert_eq!(self.filemap.in_flight(), 0);
        self.mapping.check().unwrap();
        self.arena.check().unwrap();
        drop((self.mapping, self.filemap));
        let stats = self.arena.stats();
        assert_eq!(stats.free_pages * PAGE, stats.data_bytes, "no frame is lost");
        assert_eq!(stats.cells_used, 0);
        self.arena.check().unwrap();
    }
}

pub const ALL: Orders = Orders { min: Order(0), max: Order(9) };

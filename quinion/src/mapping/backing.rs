//! Backing: the store behind the pages of a mapping, with the state that only that kind of mapping has.
//!
//! ```text
//!   File                a page that is not cached is read from the file, and a dirty one is written to it
//!   Memory, no spill    the folio is the only copy: it stays until it is punched or the file ends
//!   Memory, spill       the folio is the only copy: reclaim moves it to the spill file and back
//!   Guest               as File, but page N always stands in frame N of a guest's memory and is never evicted
//! ```
//!
//! The kind is chosen when the mapping is built and never changes. The paths of files (`filemap`) and of memory files
//! (`shmem`) ask for it where they meet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::GuestExtents;
use crate::spill::Spill;
use crate::units::{Order, PoolNumber};

/// The store behind the pages of a mapping.
#[derive(Debug)]
pub enum Backing {
    File,
    /// No store but the mapping's own pages: a memory file.
    Memory(MemoryBacking),
    /// A file whose pages have fixed places in a guest's memory.
    Guest(Arc<GuestExtents>),
}

/// State of a memory file besides its pages.
#[derive(Debug)]
pub struct MemoryBacking {
    pub(super) folio_order_max: Order,
    pub(super) spill: Option<SpillTarget>,
    /// Pages of values in the tree that stand for pages in the spill file; changed under the tree's lock.
    pub(super) spilled: AtomicU64,
}

/// Where a mapping's folios go when memory is short.
#[derive(Clone, Debug)]
pub struct SpillTarget {
    /// The spill file.
    pub spill: Arc<Spill>,
    /// The pool that is charged when they come back.
    pub pool: PoolNumber,
}

impl Backing {
    /// Whether it is that of a memory file: pages not in the tree are zeros, and those in it are nowhere else.
    #[inline]
    pub fn is_memory(&self) -> bool {
        matches!(self, Backing::Memory(_))
    }
    /// Whether folios go to the spill file when memory is short.
    #[inline]
    pub fn spills(&self) -> bool {
        self.spill_target().is_some()
    }
    /// Whether folios stay in memory until the file itself gives them up.
    #[inline]
    pub fn is_kept(&self) -> bool {
        matches!(self, Backing::Memory(MemoryBacking { spill: None, .. }))
    }
    #[inline]
    fn spill_target(&self) -> Option<&SpillTarget> {
        match self {
            Backing::Memory(memory) => memory.spill.as_ref(),
            Backing::File | Backing::Guest(_) => None,
        }
    }
    /// The spill file to which folios go when memory is short, if they do.
    #[inline]
    pub fn spill(&self) -> Option<&Arc<Spill>> {
        self.spill_target().map(|target| &target.spill)
    }
    /// The pool that is charged for pages that come back from the spill file.
    pub fn spill_pool(&self) -> PoolNumber {
        self.spill_target().map_or(PoolNumber::DEFAULT, |target| target.pool)
    }
    /// The guest's memory in which each page has its place, if it has one.
    #[inline]
    pub fn places(&self) -> Option<&Arc<GuestExtents>> {
        match self {
            Backing::Guest(places) => Some(places),
            Backing::File | Backing::Memory(_) => None,
        }
    }
    /// The largest folio that writers make.
    #[inline]
    pub fn folio_order_max(&self) -> Order {
        match self {
            Backing::Memory(memory) => memory.folio_order_max,
            Backing::File | Backing::Guest(_) => Order::MAX,
        }
    }
    /// Pages that are in the spill file, as of a moment ago; exact for the holder of the tree lock.
    #[inline]
    pub fn spilled_pages(&self) -> u64 {
        match self {
            Backing::Memory(memory) => memory.spilled.load(Ordering::Relaxed),
            Backing::File | Backing::Guest(_) => 0,
        }
    }
    /// Counts pages that went to the spill file, and pages that left it. For the holder of the tree lock.
    pub(super) fn count_spilled(&self, more: u64, less: u64) {
        if let Backing::Memory(memory) = self {
            memory.spilled.fetch_add(more, Ordering::Relaxed);
            memory.spilled.fetch_sub(less, Ordering::Relaxed);
        }
    }
}

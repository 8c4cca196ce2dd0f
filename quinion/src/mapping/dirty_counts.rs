//! Dirty counts: how many pages of a mapping, and of all mappings of a cache, wait for write-back or are in it.
//!
//! They change under the tree lock of their mapping, with the marks of the pages (`dirty.rs`). Write-back control reads
//! them without a lock: the counts it reads were so a moment ago.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::new_folio::FolioLifetime;
use crate::units::Millis;

pub(super) const NEVER: u64 = u64::MAX;

/// How many pages are dirty, and how many under write-back: of one mapping, or of all those of a cache. They change
/// under tree locks; a thread that has none reads the state of a moment ago.
#[derive(Debug, Default)]
pub struct DirtyPages {
    pub(super) dirty: AtomicU64,
    pub(super) writeback: AtomicU64,
    pub(super) behind: AtomicU64,
}

impl DirtyPages {
    /// Pages that are to be written.
    pub fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }
    /// Pages that are being written, those of folios that have left the index among them.
    pub fn writeback(&self) -> u64 {
        self.writeback.load(Ordering::Relaxed)
    }
    /// Dirty pages of folios that leave the cache after their write-back, because only uncached writers used them.
    pub fn drop_behind(&self) -> u64 {
        self.behind.load(Ordering::Relaxed)
    }
    /// Pages not in the files yet: a page that was changed while it is being written counts twice.
    pub fn total(&self) -> u64 {
        self.dirty() + self.writeback()
    }
}

#[derive(Debug)]
pub(super) struct DirtyCounts {
    pub(super) own: DirtyPages,
    /// Pages under write-back of folios that have left the index.
    pub(super) detached: AtomicU64,
    /// When the oldest dirty page became so; [`NEVER`] if nothing is.
    pub(super) since: AtomicU64,
    pub(super) totals: Arc<DirtyPages>,
}

impl Default for DirtyCounts {
    fn default() -> Self {
        let (own, detached) = (DirtyPages::default(), AtomicU64::new(0));
        Self { own, detached, since: AtomicU64::new(NEVER), totals: Arc::default() }
    }
}

pub(super) type DirtyCounter = fn(&DirtyPages) -> &AtomicU64;

impl DirtyCounts {
    pub(super) fn add(&self, number: DirtyCounter, pages: u32) {
        number(&self.own).fetch_add(u64::from(pages), Ordering::Relaxed);
        number(&self.totals).fetch_add(u64::from(pages), Ordering::Relaxed);
    }
    pub(super) fn sub(&self, number: DirtyCounter, pages: u32) {
        let before = number(&self.own).fetch_sub(u64::from(pages), Ordering::Relaxed);
        debug_assert!(before >= u64::from(pages), "{pages} pages are taken off {before}");
        number(&self.totals).fetch_sub(u64::from(pages), Ordering::Relaxed);
    }
    pub(super) fn dirtied(&self, pages: u32, fate: FolioLifetime, now: Millis) {
        if self.own.dirty() == 0 && pages > 0 {
            self.since.store(now.0.min(NEVER - 1), Ordering::Relaxed);
        }
        self.add(|pages| &pages.dirty, pages);
        self.add(|pages| &pages.behind, if fate == FolioLifetime::DropsBehind { pages } else { 0 });
    }
    pub(super) fn cleaned(&self, pages: u32, fate: FolioLifetime) {
        self.sub(|pages| &pages.dirty, pages);
        self.sub(|pages| &pages.behind, if fate == FolioLifetime::DropsBehind { pages } else { 0 });
        if self.own.dirty() == 0 {
            self.since.store(NEVER, Ordering::Relaxed);
        }
    }
}

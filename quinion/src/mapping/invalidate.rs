//! Invalidate: forgets the folios of a file that another process may have changed.
//!
//! A folio with a page that was written here and is not in the file yet is the only copy of that page. It stays, and is
//! written over the other process's bytes; all other folios go.
//!
//! ```text
//!   invalidate   1 the invalidate lock: no window is between insertion and submission
//!                2 the file's attributes, again if one of the cache's flushes has ended meanwhile
//!                3 a shorter size first, then the folios, then a longer size
//! ```
//!
//! Invariant: the version is replaced only under the invalidate lock, together with the size.
//!
//! Locks: the invalidate lock alone, then the tree lock. Waits for the file system under the first.

use std::io;
use std::sync::atomic::Ordering;

use crate::arena::Flags;
use crate::arena::dirty::BitTable;
use crate::units::{Frame, Order, PageIndex};
use crate::xarray::{INDICES_MAX, Kind};

use super::owner::{Mapping, MappingGuard};

impl Mapping {
    /// Forgets every folio without unwritten pages, and takes the file's attributes as they are now. Pinned and held
    /// bytes live on with their holders; fills in flight end in folios that are out of the index. The file reaches at
    /// least as far as the folios that stay; clean pages of these go at the next look at the file. Waits until no
    /// window is between insertion and submission, and for the file system. Returns the pages forgotten.
    pub fn invalidate(&self) -> io::Result<u64> {
        let mut version = self.invalidate_alone();
        // Asked for under the lock: of two who come here at once, the one that asks later stores later. A flush that
        // ended between the question and the tree's lock has made the file longer than was said, and its pages are
        // no longer among those that are kept: then it is asked again. (None begins under this lock.)
        // The tree's lock before the size: a fill that ends between the two must not find its folios still
        // in their places and cut the new size off.
        let (attributes, all_ended, mut tree) = loop {
            let (ended, all_ended) = (self.writeback().flushes_ended(), self.writeback().all_ended());
            let attributes = self.backend().attributes()?;
            let tree = self.lock();
            if self.writeback().flushes_ended() == ended {
                break (attributes, all_ended, tree);
            }
        };
        // A shorter size first, so that no reader takes the removed pages for the file's; a longer one last, so that
        // none takes the zeroes after the old end for the file's.
        let unwritten = tree.unwritten();
        let keeps_clean = !unwritten.is_empty() && tree.keeps_clean();
        let kept_end = unwritten.last().map_or(0, |(_, end)| end.first_byte().min(self.size()));
        let size = attributes.size_known().max(kept_end);
        self.record().size.fetch_min(size, Ordering::Relaxed);
        *version = attributes.version;
        self.reset_own_changes(all_ended);
        if keeps_clean {
            self.note_unknown_change(); // a writer was faster than the caller; the next look comes here again
        }
        self.writeback().set_size_on_device(attributes.size_known());
        let pages = tree.remove_all_but(&unwritten);
        self.renewals.fetch_add(1, Ordering::Release); // partner: the Acquire in `renewals`
        // Release, partner: the Acquire in `read_hits`, and in `size`.
        self.record().size.store(size, Ordering::Release);
        drop(tree);
        Ok(pages)
    }

    /// Whether an invalidation would leave clean pages: others of a folio of which some page is not in the file yet.
    pub fn keeps_clean(&self) -> bool {
        self.writeback().dirty_pages().total() > 0 && self.lock().keeps_clean()
    }

    /// As [`Mapping::invalidate`], and uses nothing that is known of the file from now on until it is looked at: for a
    /// caller that knows that it is about to change. Waits for no file system.
    pub fn invalidate_unsettled(&self) -> u64 {
        let mut version = self.invalidate_alone();
        version.settled = false;
        let mut tree = self.lock();
        let unwritten = tree.unwritten();
        tree.remove_all_but(&unwritten)
    }
}

impl MappingGuard<'_> {
    /// As [`Mapping::keeps_clean`].
    fn keeps_clean(&self) -> bool {
        let (nodes, view) = (self.mapping.nodes(), self.mapping.view());
        let tree = self.xarray(&nodes);
        tree.range(0, INDICES_MAX - 1).any(|(_, entry, order)| {
            let (Kind::Folio(frame), pages) = (entry.kind(), Order(order).pages()) else { return false };
            let head = Frame(frame);
            let is_clean = |page: u32| {
                let at = head.plus(page);
                view.count_bits(BitTable::Dirty, at, 1) + view.count_bits(BitTable::Writeback, at, 1) == 0
            };
            view.own(head).word().has(Flags::UNWRITTEN) && (0..pages).any(is_clean)
        })
    }

    /// The folios of which a page is not in the file yet, as their first pages and the page behind the last such page.
    fn unwritten(&self) -> Vec<(PageIndex, PageIndex)> {
        if self.mapping.writeback().dirty_pages().total() == 0 {
            return Vec::new();
        }
        let (nodes, view) = (self.mapping.nodes(), self.mapping.view());
        let tree = self.xarray(&nodes);
        let unwritten = tree.range(0, INDICES_MAX - 1).filter_map(|(first, entry, order)| {
            let Kind::Folio(frame) = entry.kind() else { return None };
            if !view.own(Frame(frame)).word().has(Flags::UNWRITTEN) {
                return None;
            }
            let is_unwritten = |page: &u32| {
                let at = Frame(frame).plus(*page);
                view.count_bits(BitTable::Dirty, at, 1) + view.count_bits(BitTable::Writeback, at, 1) > 0
            };
            let last = (0..Order(order).pages()).rev().find(is_unwritten).expect("one of its pages is");
            Some((PageIndex(first), PageIndex(first).plus(u64::from(last) + 1)))
        });
        unwritten.collect()
    }
}

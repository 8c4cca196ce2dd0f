//! Refault: the meaning, for a folio, of a shadow in its place.
//!
//! The tree tells, folio by folio, which shadow an insertion consumed. If the page left not long ago, the cache was
//! too small to keep it and should try again:
//!
//! ```text
//!   away for long                    as if it had never been here
//!   recent                           WORKINGSET set: joins the ring of       activated
//!                                    what is kept, when it is listed
//!   recent, and WORKINGSET before    as if it had never been here            the working set does not fit
//! ```
//!
//! The last line is the one to watch: a folio that had proved itself was evicted and is wanted again. It is new
//! again: kept at once, such folios cost others their first time (up to two points of hits, on the traces of the
//! benchmark `ratio`). A window remembers it, to tell waits for want of memory from those of any first read.
//!
//! Runs under the tree's lock, between insertion and submission: only the fill can hold the folio yet.

use std::sync::atomic::Ordering;

use crate::arena::referenced;
use crate::stats::Count;
use crate::units::{Frame, PoolNumber};
use crate::workingset::{EvictedState, Refault, ShadowInfo};
use crate::xarray::Value;

use super::fill::Refaults;
use super::shared::Filemap;

impl Filemap {
    pub(super) fn note_refault(&self, pool: PoolNumber, frame: Frame, shadow: Value, seen: &mut Refaults) {
        let descriptor = self.arena.view().own(frame);
        let order = descriptor.word().order();
        let memory = ShadowInfo::from_payload(shadow.payload());
        seen.pages += u64::from(order.pages());
        let returned = self.supply.reclaim.note_refault(pool, memory, order);
        seen.soon += if returned.is_soon { u64::from(order.pages()) } else { 0 };
        match returned.refault {
            Refault::Old => {}
            Refault::Recent => {
                let had_its_time = memory.standing == EvictedState::WorkingSet;
                if !had_its_time {
                    descriptor.join_working_set();
                }
                let pages = u64::from(order.pages());
                let byte = self.arena.view().referenced(frame).expect("a frame of ours");
                if referenced::is_unread(byte.swap(referenced::ASKED, Ordering::Relaxed)) {
                    // It was fetched ahead, but was known to be wanted.
                    self.counters.add(Count::ReadaheadActivated, pages);
                }
                seen.activated += pages;
                seen.working_set += u32::from(had_its_time);
            }
        }
    }

    pub(super) fn count_refaults(&self, seen: Refaults) {
        self.counters.add_all([
            (Count::Refaults, seen.pages),
            (Count::Activated, seen.activated),
            (Count::WorkingsetWindows, u64::from(seen.working_set > 0)),
        ]);
    }
}

//! Grab: frames for folios that are grabbed, and the grab of a mapping of the cache.
//!
//! ```text
//!   mapping/grab.rs          here                                                    below
//!   round: gaps      -->     charge the pool, frames for them, reserve entries -->   reclaim, arena, lists
//!          inserted  -->     list them, count them; what was left goes back
//!          a spill   -->     the part that brings it back, handed down by the paths of memory files
//! ```
//!
//! `mapping/grab.rs` tells how a range is grabbed; this file supplies its frames. A grab waits for memory only as
//! long as it has no folio locked; after that it takes free frames, and may return a part of the range. So a thread
//! that waits for memory never blocks others at a folio lock.
//!
//! Invariant: a charge, a reservation and frames are taken together; the rest is given back before the round ends.

use std::ops::Range;
use std::sync::Arc;

use crate::arena::Gap;
use crate::backend::FillRun;
use crate::error::{Error, Repr};
use crate::lists::{Charge, ListReservation};
use crate::mapping::{
    AskedFor, FolioLifetime, FolioShape, FrameSource, GapFrames, Grab, GrabEnd, GrabRequest, Grabbed,
    InsertPurpose, Mapping, MarkDirty, MemoryWait, OnLocked,
};
use crate::readahead::Window;
use crate::stats::Count;
use crate::sync::LockWait;
use crate::units::{Order, Orders, PageIndex, PoolNumber};

use super::fill::pages_of;
use super::frame_supply::{FillUrgency, FrameRequest, NoFrames, SuppliedFrames};
use super::shared::Filemap;
use super::wait_policy::WaitPolicy;

/// Brings back the spilled pages from one on and before another, for the paths of memory files.
pub(crate) type SpillInCall<'b> = &'b mut dyn FnMut(PageIndex, PageIndex) -> Result<(), Error>;

struct CacheFrames<'f> {
    filemap: &'f Arc<Filemap>,
    mapping: &'f Arc<Mapping>,
    pool: PoolNumber,
    shape: FolioShape,
    spill_in: SpillInCall<'f>,
    reserved: Option<(Charge<'f>, ListReservation<'f>)>,
    refused: Option<Error>,
}

impl Filemap {
    /// Finds or creates folios for `pages` on behalf of `pool`, locked and held; see `mapping/grab.rs`. Waits for
    /// folio locks. A prefix if memory ends; none if the file ends. The caller has the mapping's Write lock alone.
    ///
    /// # Errors
    /// Why there is not even the first folio.
    pub(crate) fn grab<'a>(
        self: &'a Arc<Self>,
        mapping: &'a Arc<Mapping>,
        pool: PoolNumber,
        pages: Range<PageIndex>,
        spill_in: SpillInCall<'_>,
    ) -> Result<Grabbed<'a>, Error> {
        let Orders { min, max } = self.supply.folio_orders;
        let orders = Orders { min, max: max.min(mapping.backing().folio_order_max()).max(min) };
        let shape = FolioShape {
            orders,
            marker: None,
            purpose: InsertPurpose::Write,
            wanted: AskedFor::All,
            fate: FolioLifetime::Stays,
        };
        let now = self.supply.writeback.now();
        let dirty = if mapping.is_memory() { MarkDirty::OnInsert(now) } else { MarkDirty::OnUnlock(now) };
        let first = pages.start.first_byte();
        let (reserved, refused) = (None, None);
        let mut frames = CacheFrames { filemap: self, mapping, pool, shape, spill_in, reserved, refused };
        let request = GrabRequest { pages, how: Grab { shape, on_locked: OnLocked::Wait, dirty } };
        let (grabbed, end) = mapping.grab(&self.wait_queue, request, &mut frames, &mut |_| {});
        match end {
            _ if !grabbed.is_empty() => Ok(grabbed),
            GrabEnd::All | GrabEnd::Size => Ok(grabbed),
            GrabEnd::Locked => Err(Repr::WouldBlock { position: first }.into()),
            GrabEnd::NoFrames | GrabEnd::NoNode | GrabEnd::Contended | GrabEnd::Spilled => {
                Err(frames.refused.unwrap_or_else(|| self.no_memory(first)))
            }
            GrabEnd::Failed(error) => Err(error),
        }
    }
}

impl FrameSource for CacheFrames<'_> {
    type Error = Error;

    fn take(&mut self, gaps: &[Gap], memory: MemoryWait) -> Result<GapFrames, Error> {
        let (filemap, mapping, pool) = (self.filemap, self.mapping, self.pool);
        let urgency = match memory {
            MemoryWait::Wait => FillUrgency::Asked,
            MemoryWait::Hurry => FillUrgency::Ahead,
        };
        let (first, largest) = (gaps[0].first, gaps.iter().map(|gap| gap.pages).max().unwrap_or(1));
        let order = Order::fitting(largest).min(self.shape.orders.max);
        let window = Window { order, ..Window::exact(first, largest) };
        let (reservation, locks) = (None, LockWait::Wait);
        let request = FrameRequest { mapping, pool, window, urgency, reservation, locks };
        let SuppliedFrames { charge, runs } = match filemap.supply.take(&request, gaps.to_vec()) {
            Ok(supplied) => supplied,
            Err(NoFrames::Present | NoFrames::Busy) => return Ok(GapFrames::Retry),
            Err(NoFrames::PoolFull) => {
                self.refused = Some(filemap.pool_full(pool, first.first_byte()));
                return Ok(GapFrames::Runs(Vec::new()));
            }
            Err(NoFrames::NoMemory) => return Ok(GapFrames::Runs(Vec::new())),
        };
        match filemap.supply.reserve_list_entries(mapping, &runs, WaitPolicy::Wait) {
            Some(list_entries) => {
                self.reserved = Some((charge, list_entries));
                Ok(GapFrames::Runs(runs))
            }
            None => {
                filemap.supply.free_runs(&runs);
                drop(charge);
                let again = filemap.supply.make_nodes(pool);
                Ok(if again { GapFrames::Retry } else { GapFrames::Runs(Vec::new()) })
            }
        }
    }

    fn settle(&mut self, inserted: &[FillRun], left: &[FillRun]) {
        self.filemap.supply.free_runs(left);
        let Some((charge, list_entries)) = self.reserved.take() else { return };
        if inserted.is_empty() {
            return;
        }
        let (filemap, pages) = (self.filemap, pages_of(inserted));
        let window = Window::exact(inserted[0].index, 1);
        filemap.supply.list_new(self.mapping, inserted, window, self.shape, list_entries.with_charge(charge));
        filemap.counters.add(Count::Inserted, pages);
        filemap.supply.reclaim.count_inserted(self.pool, pages, 0);
    }

    fn make_nodes(&mut self) -> bool {
        self.filemap.supply.make_nodes(self.pool)
    }

    fn spill_in(&mut self, index: PageIndex, to: PageIndex) -> Result<(), Error> {
        (self.spill_in)(index, to)
    }
}

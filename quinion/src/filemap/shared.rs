//! Shared: state that the paths of one cache have in common.
//!
//! A [`Filemap`] is the state that all paths need besides a mapping. The read path is its own methods, in files by
//! topic. State of one call has a type of its own, which lives as long as the call: a write (`WriteCall`), a
//! change of a range (`Truncation`), pages that come back from the spill file (`SpillIn`), fills that go to the device
//! together (`SubmitBatch`). Frames come from the [`FrameSupply`], and [`Bound`] says how much memory there may be.
//!
//! Invariant: nothing here changes while the cache lives but numbers.

use std::sync::Arc;

use crate::arena::Arena;
use crate::backend::WaitQueue;
use crate::blocking_threads::BlockingThreads;
use crate::mapping::{IndexHooks, Mapping};
use crate::policy::NewPolicy;
use crate::reclaim::Reclaim;
use crate::spill::Spill;
use crate::stats::{Count, Counters};
use crate::units::Orders;
use crate::writeback::{Writeback, WritebackOptions};

use quinion_view::hit::FileView;

use super::frame_supply::FrameSupply;
use super::resize::{Bound, BoundState};

/// The state that the paths of one cache share.
#[derive(Debug)]
pub struct Filemap {
    pub(crate) arena: Arc<Arena>,
    pub(crate) wait_queue: Arc<WaitQueue>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) supply: FrameSupply,
    pub(crate) blocking_threads: BlockingThreads,
    pub(super) bound_state: BoundState,
    /// Takes steps of the mappings' indexes over; `None` in a cache that ships.
    pub(crate) hooks: Option<&'static dyn IndexHooks>,
}

impl Filemap {
    #[inline(always)]
    pub(super) fn view_of(&self, mapping: &Mapping) -> FileView<'_> {
        FileView { view: self.arena.view(), cell: mapping.index().cell(), id: mapping.id() }
    }

    /// The paths of a cache over `arena`, which makes folios of `folio_orders`.
    ///
    /// # Panics
    /// If the smallest is larger than the largest.
    pub fn new(arena: Arc<Arena>, wait_queue: Arc<WaitQueue>, folio_orders: Orders) -> Self {
        assert!(folio_orders.min <= folio_orders.max, "{folio_orders:?} are no orders");
        let (counters, bound_state) = (Arc::new(Counters::default()), BoundState::new(arena.bound()));
        let reclaim = Reclaim::new(Arc::clone(&arena), Arc::clone(&counters));
        let writeback = Writeback::new(
            Arc::clone(&arena),
            Arc::clone(&wait_queue),
            Arc::clone(&counters),
            WritebackOptions::default(),
        );
        let supply =
            FrameSupply::new(Arc::clone(&arena), Arc::clone(&wait_queue), reclaim, writeback, folio_orders);
        let blocking_threads = BlockingThreads::default();
        Self { arena, wait_queue, counters, supply, blocking_threads, bound_state, hooks: None }
    }

    /// Pins may keep `bytes` bytes, and that share of the bound when it is changed.
    #[must_use]
    pub fn with_pinned_max(mut self, bytes: u64) -> Self {
        self.bound_state.set_pinned_max(bytes, self.arena.bound());
        self
    }

    /// Sets the options of write-back. To be called before any mapping counts its dirty pages.
    #[must_use]
    pub fn with_writeback(mut self, options: WritebackOptions) -> Self {
        let (arena, wait_queue, counters) =
            (Arc::clone(&self.arena), Arc::clone(&self.wait_queue), Arc::clone(&self.counters));
        self.supply.writeback = Writeback::new(arena, wait_queue, counters, options);
        self
    }

    /// Sets the place where folios of memory files go when memory is short.
    #[must_use]
    pub fn with_spill(mut self, spill: Option<Arc<Spill>>) -> Self {
        spill.iter().for_each(|spill| self.supply.reclaim.spill_to(spill));
        self.supply.spill = spill;
        self
    }

    /// Sets hooks for the indexes of mappings to come.
    #[must_use]
    pub fn with_hooks(mut self, hooks: Option<&'static dyn IndexHooks>) -> Self {
        self.hooks = hooks;
        self
    }

    /// Sets the eviction policy, in place of S3-FIFO.
    #[must_use]
    pub fn with_policy(mut self, policy: NewPolicy) -> Self {
        self.supply.reclaim.set_policy(policy);
        self
    }

    /// How much memory the cache may have, and how that is changed.
    #[inline]
    pub(crate) fn bound(&self) -> Bound<'_> {
        Bound::of(&self.supply, &self.bound_state)
    }

    /// The part that makes room.
    pub fn reclaim(&self) -> &Reclaim {
        &self.supply.reclaim
    }

    /// How much of `count` was counted so far.
    pub fn count(&self, count: Count) -> u64 {
        self.counters.sum(count)
    }

    /// Dirty pages on their way to their files.
    pub fn writeback(&self) -> &Arc<Writeback> {
        &self.supply.writeback
    }

    /// Sets whether the thread of `background_reclaim.rs` is used.
    #[must_use]
    pub(crate) fn with_background_reclaim(mut self, in_background: bool) -> Self {
        self.supply.in_background = in_background;
        self
    }

    /// Fills submitted and not yet completed.
    pub fn in_flight(&self) -> u64 {
        self.supply.in_flight()
    }
}

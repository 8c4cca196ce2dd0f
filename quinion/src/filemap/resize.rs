//! Resize: the bound of a cache, another one while it is in use, and memory back to the machine.
//!
//! ```text
//!   resize   1 bound      in force at once: up to it the cache may grow, above it nothing grows any more
//!            2 forget     nodes that only remember, down to their share of the new bound
//!            3 choose     extents to be emptied: no frame of theirs is handed out
//!            4 evict      their folios; those in flight or held for a moment are waited for,
//!            5 punch      the empty ones          half a second in all;   3 to 5 until none is left
//!            6 sweep      a moment later: memory that late readers took there
//!   later    3 to 6 without waiting, by the background thread, as long as something is left   deferred_shrink.rs
//!
//!   guest    1 take       where there is room side by side and within the bound
//!            2 demand     else: which extents cost least that lie side by side; then 4 and 5 of these, and of as many
//!                         others as the bound wants; and 1 again
//! ```
//!
//! The rest in the end is **slack**: extents with a page that is pinned, slow to be read or released, or dirty.
//! It is reported, and goes when the pins go and the pages have been written.
//!
//! Invariants:
//!  1. A resize returns in bounded time: it waits for no pin, and for all else half a second at most.
//!  2. Readers go on meanwhile, and find the right bytes.
//!
//! Not an invariant: that the least-wanted pages go. Whole extents go, the cheapest first, protected pages too.
//!
//! Locks: Resize, one at a time; under it mappings' locks, as any reclaim.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use std::ffi::CStr;

use crate::arena::{ArenaError, GuestExtents, GuestRefused, GuestUse};
use crate::backend::{DeferredWakes, ReapMode, pause};
use crate::error::{Error, Repr};
use crate::reclaim::Protection;
use crate::sync::{LockWait, Rank, RankedMutex};
use crate::units::{EXTENT_SIZE, PAGE_SIZE};

use super::frame_supply::FrameSupply;

const UNPROTECTED_SHARE: u64 = 16;
const WAIT_MAX: Duration = Duration::from_millis(500);
/// Longer, because gigabytes may have to be evicted, and written before.
const GUEST_WAIT_MAX: Duration = Duration::from_secs(10);
const ROUND: Duration = Duration::from_millis(1);
/// A reader has most likely ended its copy after that.
const GRACE: Duration = Duration::from_millis(3);

/// The result of [`Cache::resize`](crate::Cache::resize), in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ResizeOutcome {
    /// The bound in force now.
    pub memory_bytes: u64,
    /// Memory of the machine that the cache has now; above the bound by the slack.
    pub grown_bytes: u64,
    /// Memory that this call gave back to the machine.
    pub returned_bytes: u64,
    /// Memory still to be given back: extents of 2 MiB with something in them that is pinned, dirty, being read
    /// into, or held. It goes when that goes, by itself or with the next resize.
    pub slack_bytes: u64,
    /// Memory kept by users' pins in the whole cache.
    pub pinned_bytes: u64,
}

/// The bound that the user set; the arena has the one in force.
#[derive(Debug)]
pub(super) struct BoundState {
    resizing: RankedMutex<()>,
    /// The bound that the user wants, in bytes; pressure may make the one in force smaller.
    configured: AtomicU64,
    pinned_share: PinnedShare,
}

/// The share of the bound that pins may keep: `part` bytes of `whole`.
#[derive(Clone, Copy, Debug)]
struct PinnedShare {
    part: u64,
    whole: u64,
}

impl BoundState {
    /// `memory` bytes, of which pins may keep half.
    pub fn new(memory: u64) -> Self {
        let (resizing, configured) = (RankedMutex::new(Rank::Resize, ()), AtomicU64::new(memory));
        Self { resizing, configured, pinned_share: PinnedShare { part: 1, whole: 2 } }
    }

    /// Pins may keep `bytes` of `memory` bytes, and that share of another bound.
    pub fn set_pinned_max(&mut self, bytes: u64, memory: u64) {
        self.pinned_share = PinnedShare { part: bytes.min(memory), whole: memory };
    }
}

/// The bound of a cache: how it is changed, and the shares of it that pools and pins may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound<'f> {
    supply: &'f FrameSupply,
    state: &'f BoundState,
}

impl<'f> Bound<'f> {
    #[inline]
    pub(super) fn of(supply: &'f FrameSupply, state: &'f BoundState) -> Self {
        Self { supply, state }
    }
}

impl Bound<'_> {
    /// Calls `in_force` when the bound is, before anything is emptied; see the head of this file.
    ///
    /// # Errors
    /// The bound is below the least or above the most that the arena was built for; nothing was changed.
    pub fn resize(self, memory: u64, in_force: impl FnOnce()) -> Result<ResizeOutcome, ArenaError> {
        // Completions are fetched under the lock of resizing; their wakers are called after it.
        let _wakes = DeferredWakes::new();
        let _one = self.state.resizing.lock();
        let resized = self.resize_within(memory, WAIT_MAX, in_force)?;
        self.state.configured.store(memory, Ordering::Relaxed);
        Ok(resized)
    }

    /// Sets an extent aside for each of so many further groups of viewers, and empties as many where the bound was
    /// reached; waits as a resize. Calls `in_force` before anything is emptied.
    ///
    /// # Errors
    /// The bound has no room for them beside the pools' protected minima, or beside the least that it must hold.
    pub fn reserve_viewers(self, groups: usize, in_force: impl FnOnce()) -> Result<(), ArenaError> {
        let _wakes = DeferredWakes::new();
        let _one = self.state.resizing.lock();
        let more = self.supply.arena.viewer_bytes_missing(groups);
        match self.memory_for_protected() {
            protected if protected > 0 && protected + more > self.supply.arena.bound() => {
                return Err(ArenaError::TooSmall { asked: self.supply.arena.bound(), min: protected + more });
            }
            _ => self.supply.arena.reserve_viewers(groups)?,
        }
        in_force();
        if more > 0 {
            self.empty_extents(Instant::now() + WAIT_MAX);
            self.supply.background.wake(); // late readers, and the rest
        }
        Ok(())
    }

    pub fn configured(self) -> u64 {
        self.state.configured.load(Ordering::Relaxed)
    }

    /// Without waiting, unless the user has set another than `told`.
    pub fn resize_if_configured(self, memory: u64, told: u64) {
        let _one = self.state.resizing.lock();
        if self.configured() == told {
            // If a guest was taken meanwhile, the next look at the machine finds that out.
            let _in_range = self.resize_within(memory, Duration::ZERO, || {});
        }
    }

    /// Empties other extents where there is no room.
    ///
    /// # Errors
    /// So much is not to be had in one piece, or the system refuses.
    pub fn take_guest(self, extents: u32, name: &CStr, usage: GuestUse) -> Result<Arc<GuestExtents>, Error> {
        let _wakes = DeferredWakes::new();
        let _one = self.state.resizing.lock();
        let bytes = u64::from(extents) * EXTENT_SIZE as u64;
        let no_space = || Error::from(Repr::NoSpaceForGuest { bytes, memory: self.supply.arena.bound() });
        if self.memory_for_protected().saturating_add(bytes) > self.supply.arena.bound() {
            return Err(no_space());
        }
        // 1
        let mut taken = self.supply.arena.take_guest(extents, name, usage);
        if matches!(taken, Err(GuestRefused::NoSpace)) && self.supply.arena.demand_guest(extents) {
            // 2
            self.empty_extents(Instant::now() + GUEST_WAIT_MAX);
            taken = self.supply.arena.take_guest(extents, name, usage);
            self.supply.arena.end_demand();
            self.supply.background.wake(); // late readers
        }
        match taken {
            Ok(guest) => Ok(Arc::new(guest)),
            Err(GuestRefused::NoSpace) => Err(no_space()),
            Err(GuestRefused::Failed(source)) => Err(Repr::Guest { bytes, source: Box::new(source) }.into()),
        }
    }

    /// Waits for `wait_max` at most. The caller has the lock of resizing.
    fn resize_within(
        self,
        memory: u64,
        wait_max: Duration,
        in_force: impl FnOnce(),
    ) -> Result<ResizeOutcome, ArenaError> {
        let before = self.supply.arena.stats().returned_bytes;
        // 1
        self.supply.arena.set_bound(memory)?;
        in_force();
        // 2
        let remembered = self.supply.reclaim.shadow_nodes().count();
        let too_many = remembered.saturating_sub(self.supply.reclaim.shadow_nodes_max());
        self.supply.reclaim.forget_nodes(too_many, LockWait::Wait);
        // 3 to 5
        self.empty_extents(Instant::now() + wait_max);
        // 6
        let stats = self.supply.arena.stats();
        if stats.returned_bytes > before {
            pause(GRACE);
        }
        // Also memory that earlier resizes gave back: a reader may have been late for them.
        let found = if stats.returned_bytes > 0 { self.supply.arena.sweep() } else { 0 };
        if stats.returned_bytes > before || found > 0 || stats.slack_bytes > 0 {
            self.supply.background.wake();
        }
        Ok(ResizeOutcome {
            memory_bytes: stats.bound_bytes,
            grown_bytes: stats.grown_bytes + stats.control_bytes,
            returned_bytes: stats.returned_bytes - before,
            slack_bytes: stats.slack_bytes,
            pinned_bytes: stats.pinned_bytes,
        })
    }

    fn empty_extents(self, deadline: Instant) {
        loop {
            let gone = self.empty_once();
            let left = self.supply.arena.excess_extents();
            if left == 0 || Instant::now() >= deadline {
                return;
            }
            if gone == 0 {
                if self.supply.arena.is_excess_pinned() {
                    return;
                }
                self.wait_for_transfers();
            }
        }
    }

    fn empty_once(self) -> u32 {
        let mut gone = 0;
        for extent in self.supply.arena.choose_emptying() {
            self.supply.reclaim.evict_extent(extent, Protection::Ignored);
            gone += self.supply.arena.punch_empty();
        }
        gone
    }

    /// Starts write-back, reaps where no other thread does, and waits a moment.
    fn wait_for_transfers(self) {
        self.supply.writeback.write_for_reclaim();
        for backend in
            [self.supply.reclaim.idle_backend(), self.supply.writeback.idle_backend()].into_iter().flatten()
        {
            backend.reap(ReapMode::Ready, &mut || false);
        }
        pause(ROUND);
    }

    /// Empties the remaining extents without waiting. Says whether to look again.
    pub fn continue_resize(self) -> bool {
        let _one = self.state.resizing.lock();
        if self.supply.arena.excess_extents() > 0 && self.empty_once() == 0 {
            self.supply.writeback.write_for_reclaim();
        }
        let found = self.supply.arena.sweep();
        found > 0 || self.supply.arena.excess_extents() > 0
    }

    /// The least bound, in bytes, beside which the pools' protected minima fit; 0 if nothing is protected.
    pub fn memory_for_protected(self) -> u64 {
        match self.supply.reclaim.protected() {
            0 => 0,
            pages => self.supply.arena.bound_for(pages.div_ceil(UNPROTECTED_SHARE - 1) * UNPROTECTED_SHARE),
        }
    }

    /// The limit for all pools together, from the bound in force.
    pub fn protected_pages_max(self) -> u64 {
        self.supply.arena.pages_max() / UNPROTECTED_SHARE * (UNPROTECTED_SHARE - 1)
    }

    /// The limit from the bound in force: a share of the part of it that guests leave.
    pub fn pinned_pages_max(self) -> u64 {
        let PinnedShare { part, whole } = self.state.pinned_share;
        let left =
            self.supply.arena.bound().saturating_sub(self.supply.arena.guest_pages() * PAGE_SIZE as u64);
        (u128::from(left) * u128::from(part) / u128::from(whole)) as u64 / PAGE_SIZE as u64
    }

    pub fn too_much_pinned(self, asked: u64) -> Error {
        let pinned = self.supply.arena.pinned_pages() * PAGE_SIZE as u64;
        Repr::TooMuchPinned { asked, pinned, max: self.pinned_pages_max() * PAGE_SIZE as u64 }.into()
    }
}

//! Stuck: the devices that take no page, and their pages in the count by which writers of other devices are throttled.
//!
//! ```text
//!   idle --a flush begins, or a look before one is wanted--> busy --a part of a writer's longest wait--> stuck
//!     ^                                                      |  ^                                          |
//!     +---- all have ended, the last of them well -----------+  +---- it takes a page, or a look ends -----+
//! ```
//!
//! **It begins** without an event: the clock is compared with the moment at which the device took a page last, or at
//! which the first flush after an idle time began. A flush that fails is no progress, and does not make the device
//! idle: one whose requests time out after half a minute takes nothing, between them as well. **It ends** with the
//! first page that the device takes; or when no file of it is dirty any more.
//!
//! **Dirty pages that are there** stay dirty and cached, whatever the state: it decides only whose writers wait for
//! them. When a device takes pages again they count for all, as much as the pages of any device.
//!
//! A device that is found stuck and is only slow has this effect: writers of others dirty up to their own throttle, as
//! if its pages were not there, below the bound for all (`plan.rs`). Its own writers wait as before.
//!
//! Invariants:
//!  1. For a writer of a stuck device all dirty pages count.
//!  2. The pages of stuck devices that are left out were there within the last millisecond or so.
//!
//! Locks: that of the snapshot, and under it, one after the other, those of the two maps of devices and of the list of
//! files; nothing is taken under these.
//!
//! Cost: for a writer above the throttle one lock. Once in a millisecond, two more, of maps with a place for each
//! device that flushes are under way to; and while a device is stuck, a look at each file of the list.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Duration;

use crate::mapping::Mapping;
use crate::units::Millis;

use super::Writeback;
use super::plan::DirtyLimits;

/// The part of a writer's longest wait after which a device that takes nothing is stuck, as 1 / so many. A writer of
/// another device waits so long for it, once.
const STUCK_PART: u32 = 4;

/// The pages that a writer is throttled by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CountedPages {
    pub pages: u64,
    /// Whether the writer's own device is stuck.
    pub is_own_stuck: bool,
}

/// The devices that are stuck, and their pages, as of a moment: so that not each write looks at all files.
#[derive(Default, Debug)]
pub(super) struct StuckSnapshot {
    at: Option<Millis>,
    devices: BTreeSet<u64>,
    pages: u64,
}

impl Writeback {
    /// The devices that are stuck, by the numbers that [`Identity`](crate::backend::Identity) has for them. Waits for
    /// nothing but locks that are held for some steps.
    pub fn stuck_devices(&self) -> BTreeSet<u64> {
        self.devices_that_take_nothing(self.options.wait_max / STUCK_PART)
    }

    /// The devices that were given flushes, or looks before these, and for `hang_time` took no page and ended no look.
    pub(super) fn devices_that_take_nothing(&self, hang_time: Duration) -> BTreeSet<u64> {
        let mut devices = self.devices_without_flushes_taken(hang_time);
        devices.extend(self.devices_with_hung_revalidations(hang_time));
        devices
    }

    /// Pages not in the files, as far as they count for a writer of `mapping`.
    pub(super) fn counted_for(&self, mapping: &Mapping, limits: &DirtyLimits) -> CountedPages {
        let mut stuck = self.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        if stuck.at != Some(now) {
            let devices = self.stuck_devices();
            let pages =
                if devices.is_empty() { 0 } else { self.pages_of(|device| devices.contains(&device)) };
            *stuck = StuckSnapshot { at: Some(now), devices, pages };
        }
        let is_own_stuck = stuck.devices.contains(&device_of(mapping));
        let of_stuck = if is_own_stuck { 0 } else { stuck.pages };
        drop(stuck);
        CountedPages { pages: limits.counted(self.totals.total(), of_stuck), is_own_stuck }
    }

    /// Whether a writer of `mapping` has waited for pages of other devices.
    pub(super) fn is_held_up_by_others(&self, mapping: &Mapping, limits: &DirtyLimits) -> bool {
        let own = device_of(mapping);
        limits.is_held_up_by_others(self.totals.total(), self.pages_of(|device| device == own))
    }

    fn pages_of(&self, is_meant: impl Fn(u64) -> bool) -> u64 {
        let files = self.files();
        let meant = files.iter().filter(|mapping| is_meant(device_of(mapping)));
        meant.map(|mapping| mapping.writeback().dirty_pages().total()).sum()
    }
}

/// The device that calls for a file may wait for.
pub(super) fn device_of(mapping: &Mapping) -> u64 {
    mapping.identity().shared_device()
}

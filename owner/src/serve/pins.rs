//! Pins: ranges of files that stay where they are in memory while a viewer looks at them.
//!
//! A viewer that wants bytes without a copy asks for a pin; the owner holds it, and the viewer finds the pages by the
//! same walk as a read does. A viewer's pins are bounded in number and in bytes; a pin ends by a request, with its
//! handle, or when the viewer ends.
//!
//! A pin never ends while its viewer may look at the bytes and does not know:
//!  - A process that has pins is not let in again, as another program or from another part of the same: no viewer
//!    would have these.
//!  - When the service ends and the viewer does not, its pinned pages stay in memory as long as this process does.
//!
//! Invariant: each pin in a viewer slot's list is the owner's, of a handle in the same list of handles.

use std::sync::Arc;

use super::viewer_slot::{PinnedRange, ViewerJob, ViewerSlot};
use super::viewer_table::ViewerTable;
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::Operation;
use quinion::internals::sync::contained;

const PINS_MAX: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct PinRequest {
    position: u64,
    len: u64,
}

pub(super) struct ViewerPins {
    viewers: Arc<ViewerTable>,
    /// The part of the cache's memory that one viewer may pin, in percent.
    share: u64,
}

impl ViewerPins {
    pub(super) fn new(viewers: Arc<ViewerTable>, share: u64) -> Self {
        Self { viewers, share }
    }

    pub(super) fn answer(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let [handle, second, len] = job.arguments;
        if job.operation == Operation::Pin as u32 {
            return self.pin(job.viewer, handle, PinRequest { position: second, len });
        }
        self.unpin(job.viewer, handle, second);
        Ok([0, 0])
    }

    fn pin(&self, viewer: usize, handle: u64, range: PinRequest) -> Result<[u64; 2], Errno> {
        let most = self.viewers.owner.arena().stats().bound_bytes * self.share / 100;
        let fits = |viewer_slot: &ViewerSlot, more| {
            viewer_slot.pins.len() < PINS_MAX && viewer_slot.pinned_bytes() + more <= most
        };
        if range.len > most || !fits(&self.viewers.slot(viewer).lock(), range.len) {
            return Err(Errno(libc::ENOBUFS));
        }
        let (pin, bytes) = self.viewers.owner.pin(handle, range.position, range.len)?;
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        // The viewer may have pinned more, or given the handle back, meanwhile.
        if viewer_slot.handles.contains_key(&handle) && !viewer_slot.is_replaced && fits(&viewer_slot, bytes)
        {
            viewer_slot.pins.insert(pin, PinnedRange { handle, bytes });
            return Ok([pin, bytes]);
        }
        drop(viewer_slot);
        self.unpin_in_cache(handle, pin);
        Err(Errno(libc::ENOBUFS))
    }

    pub(super) fn unpin(&self, viewer: usize, handle: u64, pin: u64) {
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        if viewer_slot.pins.get(&pin).is_some_and(|known| known.handle == handle) {
            viewer_slot.pins.remove(&pin);
            drop(viewer_slot);
            self.unpin_in_cache(handle, pin);
        }
    }

    fn unpin_in_cache(&self, handle: u64, pin: u64) {
        contained(|| self.viewers.owner.unpin(handle, pin));
    }
}

//! Pins: ranges of files that stay where they are in memory while a viewer looks at them.
//!
//! A viewer that wants bytes without a copy asks for a pin; the owner holds it, and the viewer finds the pages by the
//! same walk as a read does. A viewer's pins are bounded in number and in bytes; a pin ends by a request, with its
//! handle, or when the viewer ends.
//!
//! A pin never ends while its viewer may look at the bytes and does not know:
//!  - A process that has pins is not let in again, as another program or from another part of the same: no viewer
//!    would have these.
//!  - When the service ends and the viewer does not, what it has pinned stays in memory as long as this process does.
//!
//! Invariant: each pin in a seat's list is the owner's, of a handle in the same list of handles.

use super::Shared;
use super::viewer_slot::{PinnedRange, ViewerJob, ViewerSlot};
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::Operation;

const PINS_MAX: usize = 1024;
/// The part of the cache's memory that one viewer may pin, as 1 / so many.
const PART_OF_MEMORY: u64 = 4;

#[derive(Clone, Copy, Debug)]
struct PinRequest {
    position: u64,
    len: u64,
}

impl Shared {
    pub(super) fn answer_pin(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let [handle, second, len] = job.arguments;
        if job.operation == Operation::Pin as u32 {
            return self.pin(job.viewer, handle, PinRequest { position: second, len });
        }
        self.unpin(job.viewer, handle, second);
        Ok([0, 0])
    }

    fn pin(&self, viewer: usize, handle: u64, range: PinRequest) -> Result<[u64; 2], Errno> {
        let most = self.owner.arena().stats().bound_bytes / PART_OF_MEMORY;
        let fits = |seat: &ViewerSlot, more| seat.pins.len() < PINS_MAX && seat.pinned_bytes() + more <= most;
        if range.len > most || !fits(&self.seat(viewer).lock(), range.len) {
            return Err(Errno(libc::ENOBUFS));
        }
        let (pin, bytes) = self.owner.pin(handle, range.position, range.len)?;
        let mut seat = self.seat(viewer).lock();
        // The viewer may have pinned more, or given the handle back, meanwhile.
        if seat.handles.contains_key(&handle) && !seat.is_replaced && fits(&seat, bytes) {
            seat.pins.insert(pin, PinnedRange { handle, bytes });
            return Ok([pin, bytes]);
        }
        drop(seat);
        self.owner.unpin(handle, pin);
        Err(Errno(libc::ENOBUFS))
    }

    pub(super) fn unpin(&self, viewer: usize, handle: u64, pin: u64) {
        let mut seat = self.seat(viewer).lock();
        if seat.pins.get(&pin).is_some_and(|known| known.handle == handle) {
            seat.pins.remove(&pin);
            drop(seat);
            self.owner.unpin(handle, pin);
        }
    }
}

//! Pins: ranges of files that stay where they are in memory while a viewer looks at them.
//!
//! A viewer's reads copy, and need no pin. A viewer that wants bytes without a copy asks for a pin; the owner holds it,
//! and the viewer finds the pages by the same walk as a read does. What a viewer has pinned is bounded in number and
//! in bytes; a pin ends by a request, with its handle, or when the viewer ends, however it ends.
//!
//! A pin never ends while its viewer may look at the bytes and does not know:
//!  - A process that joins again, as another program or from another part of the same, would leave what it had
//!    pinned for no viewer. While there is such a pin, it is not let in again.
//!  - When the service ends and the viewer does not, what it has pinned stays in memory as long as this process does.
//!
//! Invariant: each pin in a seat's list is the owner's, of a handle in the same list of handles.

use super::Shared;
use super::viewer_slot::{PinnedRange, ViewerJob, ViewerSlot};
use crate::arena::control::Operation;
use crate::viewer::sys::Errno;

/// Ranges that one viewer has pinned at most.
const PINS_MAX: usize = 1024;
/// Of the cache's memory, the part that one viewer may pin.
const PART_OF_MEMORY: u64 = 4;

/// A range that is to be pinned, in bytes.
#[derive(Clone, Copy, Debug)]
struct PinRequest {
    position: u64,
    len: u64,
}

impl Shared {
    /// Answers a request about a pin.
    pub(super) fn answer_pin(&self, job: &ViewerJob) -> Result<[u64; 2], Errno> {
        let [handle, second, len] = job.arguments;
        if job.operation == Operation::Pin as u32 {
            return self.pin(job.viewer, handle, PinRequest { position: second, len });
        }
        self.unpin(job.viewer, handle, second);
        Ok([0, 0])
    }

    /// Pins a range for a viewer: the pin's number and how many bytes there are.
    fn pin(&self, viewer: usize, handle: u64, range: PinRequest) -> Result<[u64; 2], Errno> {
        let most = self.owner.arena().stats().bound_bytes / PART_OF_MEMORY;
        let fits = |seat: &ViewerSlot, more| seat.pins.len() < PINS_MAX && seat.pinned_bytes() + more <= most;
        if range.len > most || !fits(&self.seat(viewer).lock(), range.len) {
            return Err(Errno(libc::ENOBUFS));
        }
        let (pin, bytes) = self.owner.pin(handle, range.position, range.len)?;
        let mut seat = self.seat(viewer).lock();
        // Meanwhile others may have been pinned for it, or it may have given the handle back.
        if seat.handles.contains_key(&handle) && !seat.is_replaced && fits(&seat, bytes) {
            seat.pins.insert(pin, PinnedRange { handle, bytes });
            return Ok([pin, bytes]);
        }
        drop(seat);
        self.owner.unpin(handle, pin);
        Err(Errno(libc::ENOBUFS))
    }

    /// Gives a pin back, if the viewer has it.
    pub(super) fn unpin(&self, viewer: usize, handle: u64, pin: u64) {
        let mut seat = self.seat(viewer).lock();
        if seat.pins.get(&pin).is_some_and(|known| known.handle == handle) {
            seat.pins.remove(&pin);
            drop(seat);
            self.owner.unpin(handle, pin);
        }
    }
}

//! Handles: which viewer has which of the owner's handles, and how a handle goes back.
//!
//! A descriptor whose `close` may hang is closed in the queue of its file system.
//!
//! Invariant: each handle is in the list of one viewer slot, or was taken out of it once, by the thread that detaches
//! it. No lock is held while the owner is called.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::owner::{Attached, Owner};
use super::viewer_slot::Handle;
use super::viewer_table::ViewerTable;
use crate::sys::serial_queues::{QueueKey, SerialQueues};
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::Control;
use quinion::internals::sync::contained;
use quinion::internals::units::FileId;

pub(super) const HANDLES_MAX: usize = 4096;
const END_MAX: Duration = Duration::from_secs(1);

pub(super) struct FileHandles {
    viewers: Arc<ViewerTable>,
    queues: SerialQueues,
}

impl FileHandles {
    pub(super) fn new(viewers: Arc<ViewerTable>, queues: SerialQueues) -> Self {
        Self { viewers, queues }
    }

    /// `ESRCH`: the service has ended. A worker may come so late that [`Self::detach_all`] has been here: its handle
    /// would stay with the process.
    pub(super) fn note(&self, viewer: usize, attached: Attached, handle: Handle) -> Result<[u64; 2], Errno> {
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        let refused = match () {
            () if self.viewers.is_closed() => Some(Errno::SRCH),
            () if viewer_slot.handles.len() >= HANDLES_MAX => Some(Errno(libc::EMFILE)),
            () => None,
        };
        if let Some(error) = refused {
            drop(viewer_slot);
            self.release(attached.handle, handle.place);
            return Err(error);
        }
        let before = viewer_slot.handles.insert(attached.handle, handle);
        debug_assert!(before.is_none(), "a handle that was given already");
        Ok([attached.handle, u64::from(attached.id.0) << 32 | u64::from(attached.cell.0)])
    }

    pub(super) fn detach(&self, viewer: usize, handle: u64) {
        let known = self.viewers.slot(viewer).lock().remove_handle(handle);
        if let Some(known) = known {
            self.release(handle, known.place);
        }
    }

    /// As [`Self::detach`], where no viewer waits for the file system.
    pub(super) fn detach_in_queue(&self, viewer: usize, handle: u64) {
        let known = self.viewers.slot(viewer).lock().remove_handle(handle);
        self.release_in_queues(known.map(|known| (handle, known)));
    }

    /// Counts a file as attached, so that processes about to write it notify the owner.
    pub(super) fn enter(&self, id: FileId) -> AttachCount<'_> {
        let control = self.viewers.control();
        AttachCount { control, place: control.enter(id) }
    }

    fn release(&self, handle: u64, place: usize) {
        release(&*self.viewers.owner, handle, place);
    }

    /// Takes them back, each in the queue of its file system: a close by the owner may hang.
    pub(super) fn release_in_queues(&self, handles: impl IntoIterator<Item = (u64, Handle)>) {
        let mut by_device: HashMap<u64, Vec<(u64, usize)>> = HashMap::new();
        for (handle, known) in handles {
            by_device.entry(known.device).or_default().push((handle, known.place));
        }
        for (device, handles) in by_device {
            let owner = Arc::clone(&self.viewers.owner);
            self.queues.spawn(QueueKey::Device(device), move || {
                handles.into_iter().for_each(|(handle, place)| release(&*owner, handle, place));
            });
        }
    }

    pub(super) fn detach_all(&self) {
        for viewer_slot in self.viewers.slots.iter() {
            let mut viewer_slot = viewer_slot.lock(); // its sums stay
            let pinned = viewer_slot.take_pinned_handles();
            let handles = std::mem::take(&mut viewer_slot.handles);
            drop(viewer_slot);
            for handle in pinned {
                contained(|| self.viewers.owner.leave_pins(handle));
            }
            self.release_in_queues(handles);
        }
        self.queues.wait_for_own(END_MAX);
    }
}

/// A file that counts as attached until this is dropped.
#[must_use = "the file counts as attached until this is dropped"]
pub(super) struct AttachCount<'c> {
    control: &'c Control,
    place: usize,
}

impl AttachCount<'_> {
    /// The file counts on: its handle ends that.
    pub(super) fn into_place(self) -> usize {
        let place = self.place;
        std::mem::forget(self);
        place
    }
}

impl Drop for AttachCount<'_> {
    fn drop(&mut self) {
        self.control.leave(self.place);
    }
}

fn release(owner: &dyn Owner, handle: u64, place: usize) {
    contained(|| owner.detach(handle));
    owner.arena().control().control().leave(place);
}

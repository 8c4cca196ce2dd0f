//! Replaced: a viewer's process has become a program that is no viewer.
//!
//! ```text
//!   viewer: "about to become another program" (its page)      1 s      the owner looks: is the arena mapped still?
//!     '--joins anew: its slot is free at once (`admission.rs`)             no: its slot is free
//!     '--cannot, and says that it goes on                                  yes: a later look, ever more rarely
//! ```
//!
//! A program that does not join, as a static one, has none of the files that the one before had attached. They would
//! stay open here until the process ends: a file system could not be unmounted, and the space of a removed file not be
//! used again.
//!
//! The mark in the page is only a reason to look. A slot is free if it is certain that the process has the arena not
//! mapped: exec unmaps all, and a program that has unmapped the arena reads nothing there.

use std::sync::Arc;

use super::Shared;
use super::viewer_slot::{Process, has_ended};
use crate::sys::processes::has_not_mapped;
use crate::sys::serial_queues::QueueKey;

impl Shared {
    /// Looks in a queue, since the kernel may wait for the process.
    pub(super) fn check_for_exec(self: &Arc<Self>, viewer: usize, process: Process) {
        let key = QueueKey::Process(process.name);
        if self.queues.waiting_in(key) > 0 {
            return;
        }
        let shared = Arc::clone(self);
        self.queues.spawn(key, move || shared.free_if_replaced(viewer, &process));
    }

    fn free_if_replaced(&self, viewer: usize, process: &Process) {
        let is_viewer = !has_not_mapped(process.number, self.owner.arena().arena_fd());
        // If it has ended the number may be another's by now, and the slot is free for that reason.
        if is_viewer || has_ended(&process.alive) {
            return;
        }
        self.viewers.slot(viewer).lock().note_replaced(process);
        self.free_soon(viewer);
    }
}

//! Closing: before a viewer unmounts or removes something, the owner closes the files that other viewers have closed.
//!
//! The owner takes their requests at once, and waits for its workers and for the queues of file systems for a bounded
//! time ([`SETTLE_WAIT_MAX`]). It does not wait again for a viewer that it has waited for in vain several times.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Shared;
use super::pending_requests::is_pending;
use super::viewer_slot::RunningJob;
use quinion::internals::arena::control::{ATTACHED_PLACES, Operation, place_of, state};
use quinion::internals::units::FileId;

const SETTLE_WAIT_MAX: Duration = Duration::from_millis(200);
const DELAYS_MAX: u32 = 4;

impl Shared {
    /// A viewer is about to unmount something.
    pub(super) fn release_idle(&self) {
        self.drain_closed_handles(|| true);
        self.owner.release_idle();
    }

    /// A viewer is about to remove that file, which no other has open.
    pub(super) fn close_idle(&self, id: FileId) {
        let attached = &self.viewers.control().attached[place_of(id, ATTACHED_PLACES)];
        self.drain_closed_handles(|| !attached.is_zero());
        self.owner.close_idle(id);
    }

    /// Closes the files that viewers have closed, by request or by ending. Waits for other workers that are at that,
    /// while it `matters` and for a bounded time; only for work that began before, and by the workers' notes, not the
    /// pages.
    fn drain_closed_handles(&self, matters: impl Fn() -> bool) {
        let begun = Instant::now();
        self.take_detaches();
        let last = self.requests.last_taken();
        loop {
            let late: Vec<usize> =
                self.viewers.present().filter(|&viewer| self.holds_files(viewer, last)).collect();
            let is_heard = late.is_empty() && self.queues.waiting_for_devices(SETTLE_WAIT_MAX) == 0;
            if is_heard || !matters() {
                return;
            }
            if begun.elapsed() >= SETTLE_WAIT_MAX {
                self.waits_in_vain.fetch_add(1, Ordering::Relaxed);
                return late.into_iter().for_each(|viewer| self.viewers.slot(viewer).lock().delays += 1);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn take_detaches(&self) {
        for viewer in self.viewers.present() {
            // A worker that was about to take one from here has given it its number under the lock.
            if self.viewers.slot(viewer).lock().handles.is_empty() {
                continue;
            }
            for (request_slot, request) in self.viewers.page(viewer).requests.iter().enumerate() {
                let is_one = request.operation.load(Ordering::Relaxed) == Operation::Detach as u32;
                if is_one
                    && is_pending(request.state.load(Ordering::Relaxed))
                    && let Some(said) =
                        self.requests.take(viewer, request_slot, |now| now == Operation::Detach as u32)
                {
                    self.do_job(&said);
                }
            }
            drop(self.viewers.slot(viewer).lock()); // as above
        }
    }

    /// Whether workers are at something from before request `last` that keeps a file open for no viewer that waits;
    /// or the viewer is dead and its viewer slot is not free yet.
    fn holds_files(&self, viewer: usize, last: u64) -> bool {
        // For all other operations the viewer waits for the answer, unless it has given up.
        const HAVE_OPEN: [u32; 4] = [
            Operation::Attach as u32,
            Operation::Detach as u32,
            Operation::Advance as u32,
            Operation::Hint as u32,
        ];
        self.free_if_over(viewer);
        let viewer_slot = self.viewers.slot(viewer).lock();
        let holds = |(request_slot, job): (usize, &Option<RunningJob>)| {
            let is_given_up = || {
                self.viewers.page(viewer).requests[request_slot].state.load(Ordering::Relaxed)
                    == state::GIVEN_UP
            };
            job.is_some_and(|job| job.number <= last && (HAVE_OPEN.contains(&job.operation) || is_given_up()))
        };
        viewer_slot.delays < DELAYS_MAX
            && (viewer_slot.is_over() || viewer_slot.jobs.iter().enumerate().any(holds))
    }
}

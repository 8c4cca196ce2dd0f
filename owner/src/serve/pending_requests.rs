//! Pending requests: a worker takes the requests of a viewer.
//!
//! The page is read once, as it may change at any moment. The viewer slot notes the job before, and stays busy until
//! the answer is written. The workers take the requests of all viewers in turn.
//!
//! Locks: that of one viewer slot, while its request is taken.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::viewer_slot::{RunningJob, ViewerJob};
use super::viewer_table::ViewerTable;
use super::wakeups::Wakeups;
use crate::viewer::sys::futex_wake;
use quinion::internals::arena::control::{Request, state};
use quinion::internals::arena::doorbells::Found;

const JOBS_MAX: u32 = 16;

pub(super) struct PendingRequests {
    viewers: Arc<ViewerTable>,
    wakeups: Arc<Wakeups>,
    /// Where the last worker found work.
    cursor: AtomicU32,
    taken: AtomicU64,
}

impl PendingRequests {
    pub(super) fn new(viewers: Arc<ViewerTable>, wakeups: Arc<Wakeups>) -> Self {
        Self { viewers, wakeups, cursor: AtomicU32::new(0), taken: AtomicU64::new(0) }
    }

    /// The number of the request that was taken last.
    pub(super) fn last_taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn take_job(&self) -> Option<ViewerJob> {
        let (start, slots) = (self.cursor.load(Ordering::Relaxed) as usize, self.viewers.slots.count());
        let start = if start < slots { start } else { 0 };
        self.take_job_among(start..slots).or_else(|| self.take_job_among(0..start))
    }

    fn take_job_among(&self, among: Range<usize>) -> Option<ViewerJob> {
        let first = self.viewers.slots.first_group().end;
        let job = self
            .viewers
            .present_among(among.start..among.end.min(first))
            .find_map(|viewer| self.take_of(viewer).request)
            .or_else(|| {
                let (job, more) = self
                    .wakeups
                    .doorbells
                    .take(among.start.max(first)..among.end, |viewer| self.take_of(viewer))?;
                if more {
                    futex_wake(self.wakeups.doorbells.announce(), 1);
                }
                Some(job)
            })?;
        self.cursor.store(job.viewer as u32 + 1, Ordering::Relaxed);
        Some(job)
    }

    fn take_of(&self, viewer: usize) -> Found<ViewerJob> {
        if self.viewers.process(viewer) == 0 {
            return Found { request: None, more: false };
        }
        let is_pending = |request: &Request| is_pending(request.state.load(Ordering::Relaxed));
        let mut pending = self
            .viewers
            .page(viewer)
            .requests
            .iter()
            .enumerate()
            .filter(|(_, request)| is_pending(request))
            .peekable();
        let mut is_left = false;
        while let Some((request_slot, _)) = pending.next() {
            if let Some(job) = self.take(viewer, request_slot, |_| true) {
                return Found { request: Some(job), more: is_left || pending.peek().is_some() };
            }
            is_left = true; // it occupies too many workers, or another one was faster
        }
        Found { request: None, more: is_left }
    }

    /// Takes the request in that slot, if it is pending and `wanted` and its viewer does not occupy too many workers.
    /// The viewer slot is busy from then on.
    pub(super) fn take(
        &self,
        viewer: usize,
        request_slot: usize,
        wanted: impl Fn(u32) -> bool,
    ) -> Option<ViewerJob> {
        let mut viewer_slot = self.viewers.slot(viewer).lock();
        let request = &self.viewers.page(viewer).requests[request_slot];
        let pending = request.state.load(Ordering::Relaxed);
        let process = viewer_slot.process.clone()?;
        if !is_pending(pending) || viewer_slot.busy >= JOBS_MAX {
            return None;
        }
        // Acquire, partner: the viewer's Release of PENDING: this thread sees the request.
        request.state.compare_exchange(pending, state::TAKEN, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // Read once: in a moment the page may say something else.
        let operation = request.operation.load(Ordering::Relaxed);
        if !wanted(operation) {
            drop(viewer_slot);
            self.put_back(viewer, request, pending);
            return None;
        }
        viewer_slot.busy += 1;
        self.viewers.taken_of[viewer].fetch_add(1, Ordering::Relaxed);
        let number = self.taken.fetch_add(1, Ordering::Relaxed) + 1; // under the viewer slot's lock, as it is looked at
        viewer_slot.jobs[request_slot] = Some(RunningJob { operation, number });
        Some(ViewerJob {
            viewer,
            request_slot,
            process,
            operation,
            arguments: [0, 1, 2].map(|i| request.arguments[i].load(Ordering::Relaxed)),
            attended: pending == state::PENDING,
        })
    }

    fn put_back(&self, viewer: usize, request: &Request, pending: u32) {
        // Release, partner: the Acquire in `take`.
        let is_back =
            request.state.compare_exchange(state::TAKEN, pending, Ordering::Release, Ordering::Relaxed);
        if is_back.is_err() {
            // Given up meanwhile; or the next viewer asks by this slot: that stays. Release, partner: the Acquire by
            // which a viewer claims the slot.
            let _ = request.state.compare_exchange(
                state::GIVEN_UP,
                state::FREE,
                Ordering::Release,
                Ordering::Relaxed,
            );
        }
        self.wakeups.doorbells.put_up(viewer); // of use to none where it is of the first group
        self.wakeups.wake_workers(); // the worker that was woken for it may sleep again
    }
}

pub(super) fn is_pending(now: u32) -> bool {
    matches!(now, state::PENDING | state::PENDING_UNATTENDED)
}

//! Pending requests: a worker takes the requests of a viewer.
//!
//! The page is read once, as it may change at any moment. The viewer slot notes the job before, and stays busy until
//! the answer is written. The workers take the requests of all viewers in turn.
//!
//! Invariant: without a viewer slot's lock, each request of it that is taken has a job. So the slot is busy, and is
//! given to no other viewer, whose page would be another.
//!
//! Locks: that of one viewer slot, while its request is taken, or taken and put back.

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
            put_back(request, pending);
            drop(viewer_slot);
            self.wakeups.doorbells.put_up(viewer); // of use to none where it is of the first group
            self.wakeups.wake_workers(); // the worker that was woken for it may sleep again
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
}

/// The caller has the viewer slot's lock since it took the request.
fn put_back(request: &Request, pending: u32) {
    // Release, partner: the Acquire in `take`.
    let is_back = request.state.compare_exchange(state::TAKEN, pending, Ordering::Release, Ordering::Relaxed);
    if is_back.is_err() {
        // Given up meanwhile. Release, partner: the Acquire by which a viewer claims the slot.
        let _ = request.state.compare_exchange(
            state::GIVEN_UP,
            state::FREE,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }
}

pub(super) fn is_pending(now: u32) -> bool {
    matches!(now, state::PENDING | state::PENDING_UNATTENDED)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::viewer_slot::Process;
    use super::*;
    use crate::CacheOwner;
    use crate::sys::domain::Domain;
    use quinion::Cache;
    use quinion::internals::arena::control::GROUP_VIEWERS;
    use quinion::internals::sys::peer::ProcessName;

    const VIEWER: usize = 0;
    const REQUEST_SLOT: usize = 3;

    fn requests_of_one_viewer() -> PendingRequests {
        let cache = Cache::builder().memory(Cache::MEMORY_MIN).build().unwrap();
        let owner = CacheOwner::new(cache);
        let viewers = Arc::new(ViewerTable::new(Arc::new(owner), GROUP_VIEWERS));
        viewers.owner.arena().map_viewers(0).unwrap();
        viewers.slots.add(0);
        viewers.owner.arena().make_viewer_page(VIEWER).unwrap();
        let number = std::process::id();
        let alive = File::open("/proc/self/status").unwrap();
        let member = Domain::of_this_process().unwrap().member(number).unwrap();
        viewers.slot(VIEWER).lock().process = Some(Process {
            number,
            name: ProcessName::of(number, &alive),
            alive: Arc::new(alive.into()),
            member: Arc::new(member),
        });
        PendingRequests::new(Arc::clone(&viewers), Arc::new(Wakeups::new(viewers)))
    }

    /// 1 A worker takes a request that is of another operation than it looks for, and unlocks the viewer slot to put
    /// the request back. 2 Its viewer ends, and its slot is given to the next viewer, since it is not busy. 3 That one
    /// asks by the same request slot, and a second worker takes the request. 4 The first worker puts back the second's
    /// request, since its state is the same. 5 A third worker takes it, too, and it is answered twice: the second
    /// answer meets a later request.
    #[test]
    fn a_request_without_a_job_is_not_taken_when_another_thread_has_its_viewer_slots_lock() {
        const ROUNDS: usize = 3_000;
        let requests = requests_of_one_viewer();
        let viewers = &requests.viewers;
        let state = &viewers.page(VIEWER).requests[REQUEST_SLOT].state;
        for pending in [state::PENDING, state::PENDING_UNATTENDED] {
            state.store(pending, Ordering::Relaxed);
            let looks = std::thread::scope(|scope| {
                let worker = scope.spawn(|| {
                    let not_wanted = |_| {
                        std::thread::yield_now();
                        false
                    };
                    for _ in 0..ROUNDS {
                        assert!(requests.take(VIEWER, REQUEST_SLOT, not_wanted).is_none());
                    }
                });
                let mut looks = 0;
                while !worker.is_finished() {
                    let viewer_slot = viewers.slot(VIEWER).lock();
                    assert_eq!(viewer_slot.busy, 0);
                    assert_eq!(state.load(Ordering::Relaxed), pending, "look {looks}");
                    looks += 1;
                }
                looks
            });
            assert!(looks > 0);
        }
    }
}

//! Wakeups: how the threads that answer sleep until a viewer asks, and how the owner wakes them.
//!
//! ```text
//!   first group      worker --sleeps for--> its viewers' futexes, the doorbells' word, and `joined` of the group
//!   further groups   watcher --sleeps for--> its viewers' futexes, and `joined`; puts doorbells up, wakes a worker
//! ```
//!
//! A thread reads all words, looks for work, counts itself among the sleepers and sleeps on the values that it has
//! read. A viewer that asks changes its futex and then looks at the count. So either the sleep does not begin, or the
//! viewer wakes it. Where the kernel sleeps on one word at a time, the threads wake up again and again and look.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::ring_limit::{Observation, POLL_INTERVAL, RingLimit, WaitMode};
use super::viewer_table::ViewerTable;
use super::workers::Workers;
use super::{DOORBELL_WORDS, Shared, spawn};
use crate::viewer::sys::{FUTEXES_MAX, FutexWait, futex_wait, futex_wait_any, futex_wake};
use quinion::internals::arena::control::GROUP_VIEWERS;
use quinion::internals::arena::doorbells::{Doorbells, WatchedViewers};

const WORKER_SLEEP_MILLIS: u32 = 1000;
/// A worker's sleep where the kernel cannot wait for several futexes at once.
const WORKER_POLL_MILLIS: u32 = 2;

/// Where threads are woken that wait for viewers.
pub(super) struct Wakeups {
    viewers: Arc<ViewerTable>,
    /// The doorbells of all groups but the first; the workers themselves wait for that of the first.
    pub(super) doorbells: Doorbells<DOORBELL_WORDS>,
    /// Looks that found that a viewer had rung.
    rings_seen: AtomicU64,
}

impl Wakeups {
    pub(super) fn new(viewers: Arc<ViewerTable>) -> Self {
        Self { viewers, doorbells: Doorbells::default(), rings_seen: AtomicU64::new(0) }
    }

    pub(super) fn rings_seen(&self) -> u64 {
        self.rings_seen.load(Ordering::Relaxed)
    }

    /// Has its group's watcher, or one worker, look again; a worker that is busy then wakes the next.
    pub(super) fn announce_viewer(&self, viewer: usize, workers: &Workers) {
        let joined = self.viewers.slots.joined(viewer);
        // SeqCst, partner: the sleep in `answer_viewers`, or in `watch`.
        let change = || joined.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if viewer < GROUP_VIEWERS {
            workers.announce(change);
        } else {
            change();
        }
        futex_wake(joined, 1);
    }

    /// Called by a worker that is about to do something, or to end: a sleeping one is to wait for all futexes.
    pub(super) fn wake_next_worker(&self, workers: &Workers) {
        // SeqCst, partner: the count of sleepers before a sleep. A worker that sleeps later looks at the futex again.
        if !workers.are_all_awaited() && self.viewers.control().sleepers.load(Ordering::SeqCst) != 0 {
            futex_wake(self.viewers.slots.joined(0), 1);
        }
    }

    pub(super) fn wake_workers(&self) {
        let wake_futex = self.viewers.slots.joined(0);
        wake_futex.fetch_add(1, Ordering::SeqCst); // partner: the sleep in `answer_viewers`
        futex_wake(wake_futex, u32::MAX >> 1);
    }

    pub(super) fn wake_all(&self) {
        for joined in self.viewers.slots.all_joined() {
            joined.fetch_add(1, Ordering::SeqCst); // partner: the sleeps in `answer_viewers` and `watch`
            futex_wake(joined, u32::MAX >> 1);
        }
    }

    pub(super) fn watch(&self, group: usize) {
        let viewers = self.viewers.slots.of_group(group);
        let joined = self.viewers.slots.joined(viewers.start);
        let mut watched = [WatchedViewers::default(); GROUP_VIEWERS];
        let mut limits = [RingLimit::default(); GROUP_VIEWERS];
        while !self.viewers.is_closed() {
            let (control, mut futexes) = (self.viewers.control(), FutexList::new());
            // SeqCst here and below, partner: `wake_owner` in the viewer, `announce_viewer` and `wake_workers`; as in
            // `answer_viewers`.
            futexes.push(FutexWait::new(joined, joined.load(Ordering::SeqCst)));
            let mut rung = 0;
            for viewer in self.viewers.present_among(viewers.clone()) {
                let place = viewer - viewers.start;
                self.await_viewer(viewer, &mut limits[place], &mut futexes, |whose, request_futex| {
                    watched[place].check(whose, request_futex, || {
                        self.doorbells.put_up(viewer);
                        rung += 1;
                    })
                });
            }
            if rung > 0 {
                futex_wake(self.doorbells.announce(), rung);
            }
            // SeqCst twice, partner: `wake_owner`, which looks at this number after its change.
            control.sleepers.fetch_add(1, Ordering::SeqCst);
            if !self.viewers.is_closed() && !futex_wait_any(futexes.all(), futexes.sleep_millis) {
                // This kernel waits for one word at a time.
                futex_wait(joined, joined.load(Ordering::Relaxed), WORKER_POLL_MILLIS);
            }
            control.sleepers.fetch_sub(1, Ordering::SeqCst); // partner: as above
        }
    }

    /// Adds the viewer's futex to those that the thread is about to sleep on, with its number by `check`. One that is
    /// polled is left out, and the sleep ends when its time has come.
    fn await_viewer<'a>(
        &'a self,
        viewer: usize,
        limit: &mut RingLimit,
        futexes: &mut FutexList<'a>,
        check: impl FnOnce(u32, &AtomicU32) -> u32,
    ) {
        if let Some(left) = limit.until_poll(Instant::now) {
            return futexes.wake_within(left);
        }
        let request_futex = &self.viewers.page(viewer).request_futex;
        let whose = self.viewers.joins[viewer].load(Ordering::Relaxed); // `process` has ordered it
        let number = check(whose, request_futex);
        let seen =
            Observation { whose, number, taken: self.viewers.taken_of[viewer].load(Ordering::Relaxed) };
        if limit.has_rung(&seen) {
            self.rings_seen.fetch_add(1, Ordering::Relaxed);
        }
        match limit.note(seen, Instant::now) {
            WaitMode::Futex => futexes.push(FutexWait::new(request_futex, number)),
            WaitMode::Poll => futexes.wake_within(POLL_INTERVAL),
        }
    }
}

impl Shared {
    pub(super) fn start_worker(self: &Arc<Self>) -> std::io::Result<()> {
        self.workers.add(spawn(self, "quinion-worker", self.workers.ends(), Self::answer_viewers)?);
        Ok(())
    }

    fn answer_viewers(self: &Arc<Self>) {
        let (mut idle_since, mut limits) = (Instant::now(), [RingLimit::default(); GROUP_VIEWERS]);
        while !self.viewers.is_closed() {
            let (control, mut futexes) = (self.viewers.control(), FutexList::new());
            // SeqCst here and below, partner: `wake_owner` in the viewer, and `wake_workers`. A viewer that asks
            // after the look changes its futex after it was read, so the sleep sees another value; one that asks just
            // before the sleep sees a sleeper to wake.
            let wake_futex = self.viewers.slots.joined(0);
            let wake_count = wake_futex.load(Ordering::SeqCst); // partner: as above
            futexes.push(FutexWait::new(wake_futex, wake_count));
            let (rings, rung) = self.wakeups.doorbells.rings();
            futexes.push(FutexWait::new(rings, rung));
            for viewer in self.viewers.present_among(self.viewers.slots.first_group()) {
                // SeqCst, partner: `wake_owner`, as above.
                let check = |_, request_futex: &AtomicU32| request_futex.load(Ordering::SeqCst);
                self.wakeups.await_viewer(viewer, &mut limits[viewer], &mut futexes, check);
            }
            if let Some(job) = self.requests.take_job() {
                self.wakeups.wake_next_worker(&self.workers);
                if self.workers.lacks_one() {
                    let _ = self.start_worker(); // else the event loop does, if this one is kept
                }
                self.do_job_or_defer(job);
                idle_since = Instant::now();
                continue;
            }
            // It is awake: a viewer that asks from here on wakes another worker.
            if self.workers.retires(idle_since) {
                return self.wakeups.wake_next_worker(&self.workers);
            }
            self.workers.rest(wake_count, || {
                // SeqCst twice, partner: `wake_owner`, which looks at this number after its change.
                control.sleepers.fetch_add(1, Ordering::SeqCst);
                if !self.viewers.is_closed() && !futex_wait_any(futexes.all(), futexes.sleep_millis) {
                    // This kernel waits for one word at a time.
                    futex_wait(wake_futex, wake_futex.load(Ordering::Relaxed), WORKER_POLL_MILLIS);
                }
                control.sleepers.fetch_sub(1, Ordering::SeqCst); // partner: as above
            });
        }
    }
}

struct FutexList<'a> {
    words: [FutexWait<'a>; FUTEXES_MAX],
    count: usize,
    sleep_millis: u32,
}

impl<'a> FutexList<'a> {
    fn new() -> Self {
        static NOTHING: AtomicU32 = AtomicU32::new(0);
        Self {
            words: [FutexWait::new(&NOTHING, 0); FUTEXES_MAX],
            count: 0,
            sleep_millis: WORKER_SLEEP_MILLIS,
        }
    }
    fn wake_within(&mut self, time: Duration) {
        self.sleep_millis = self.sleep_millis.min(time.as_micros().div_ceil(1000) as u32);
    }
    fn push(&mut self, word: FutexWait<'a>) {
        self.words[self.count] = word;
        self.count += 1;
    }
    fn all(&self) -> &[FutexWait<'a>] {
        &self.words[..self.count]
    }
}

// Two more: the owner's threads wake each other on these.
const _: () = assert!(GROUP_VIEWERS + 2 <= FUTEXES_MAX);

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
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::ring_limit::{Observation, POLL_INTERVAL, RingLimit, WaitMode};
use super::{Shared, spawn};
use crate::viewer::sys::{FUTEXES_MAX, FutexWait, futex_wait, futex_wait_any, futex_wake};
use quinion::internals::arena::control::GROUP_VIEWERS;
use quinion::internals::arena::doorbells::WatchedViewers;

const WORKER_SLEEP_MILLIS: u32 = 1000;
/// Where it cannot sleep on all futexes at once.
const WORKER_POLL_MILLIS: u32 = 2;

impl Shared {
    /// Has its group's watcher, or one worker, look again; a worker that is busy then wakes the next.
    pub(super) fn announce_viewer(&self, viewer: usize) {
        let joined = self.seats.joined(viewer);
        // SeqCst, partner: the sleep in `answer_viewers`, or in `watch`.
        let change = || joined.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if viewer < GROUP_VIEWERS {
            self.workers.announce(change);
        } else {
            change();
        }
        futex_wake(joined, 1);
    }

    /// This worker is about to do something, or to end: a sleeping one is to wait for all futexes.
    fn hand_on(&self) {
        // SeqCst, partner: the count of sleepers before a sleep. A worker that sleeps later looks at the futex again.
        if !self.workers.are_all_awaited() && self.control().sleepers.load(Ordering::SeqCst) != 0 {
            futex_wake(self.seats.joined(0), 1);
        }
    }

    pub(super) fn wake_workers(&self) {
        let wake_futex = self.seats.joined(0);
        wake_futex.fetch_add(1, Ordering::SeqCst); // partner: the sleep in `answer_viewers`
        futex_wake(wake_futex, u32::MAX >> 1);
    }

    pub(super) fn wake_all(&self) {
        for joined in self.seats.all_joined() {
            joined.fetch_add(1, Ordering::SeqCst); // partner: the sleeps in `answer_viewers` and `watch`
            futex_wake(joined, u32::MAX >> 1);
        }
    }

    pub(super) fn start_worker(self: &Arc<Self>) -> std::io::Result<()> {
        self.workers.add(spawn(self, ("quinion-worker", self.workers.ends()), Self::answer_viewers)?);
        Ok(())
    }

    fn answer_viewers(self: &Arc<Self>) {
        let (mut idle_since, mut limits) = (Instant::now(), [RingLimit::default(); GROUP_VIEWERS]);
        while !self.is_closed() {
            let (control, mut futexes) = (self.control(), FutexList::new());
            // SeqCst here and below, partner: `wake_owner` in the viewer, and `wake_workers`. A viewer that asks
            // after the look changes its futex after it was read, so the sleep sees another value; one that asks just
            // before the sleep sees a sleeper to wake.
            let wake_futex = self.seats.joined(0);
            let wake_count = wake_futex.load(Ordering::SeqCst); // partner: as above
            futexes.push(FutexWait::new(wake_futex, wake_count));
            let (rings, rung) = self.doorbells.rings();
            futexes.push(FutexWait::new(rings, rung));
            for viewer in self.present_among(self.seats.first_group()) {
                // SeqCst, partner: `wake_owner`, as above.
                let look = |_, request_futex: &AtomicU32| request_futex.load(Ordering::SeqCst);
                self.await_viewer(viewer, &mut limits[viewer], &mut futexes, look);
            }
            if let Some(job) = self.take_job() {
                self.hand_on();
                if self.workers.lacks_one() {
                    let _ = self.start_worker(); // else the keeper does, if this one is kept
                }
                self.do_job_or_defer(job);
                idle_since = Instant::now();
                continue;
            }
            // It is awake: a viewer that asks from here on wakes another worker.
            if self.workers.retires(idle_since) {
                return self.hand_on();
            }
            self.workers.rest(wake_count, || {
                // SeqCst twice, partner: `wake_owner`, which looks at this number after its change.
                control.sleepers.fetch_add(1, Ordering::SeqCst);
                if !self.is_closed() && !futex_wait_any(futexes.all(), futexes.sleep_millis) {
                    // This kernel waits for one word at a time.
                    futex_wait(wake_futex, wake_futex.load(Ordering::Relaxed), WORKER_POLL_MILLIS);
                }
                control.sleepers.fetch_sub(1, Ordering::SeqCst); // partner: as above
            });
        }
    }

    pub(super) fn watch(self: &Arc<Self>, group: usize) {
        let viewers = self.seats.of_group(group);
        let joined = self.seats.joined(viewers.start);
        let mut watched = [WatchedViewers::default(); GROUP_VIEWERS];
        let mut limits = [RingLimit::default(); GROUP_VIEWERS];
        while !self.is_closed() {
            let (control, mut futexes) = (self.control(), FutexList::new());
            // SeqCst here and below, partner: `wake_owner` in the viewer, `announce_viewer` and `wake_workers`; as in
            // `answer_viewers`.
            futexes.push(FutexWait::new(joined, joined.load(Ordering::SeqCst)));
            let mut rung = 0;
            for viewer in self.present_among(viewers.clone()) {
                let place = viewer - viewers.start;
                self.await_viewer(viewer, &mut limits[place], &mut futexes, |whose, request_futex| {
                    watched[place].look(whose, request_futex, || {
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
            if !self.is_closed() && !futex_wait_any(futexes.all(), futexes.sleep_millis) {
                // This kernel waits for one word at a time.
                futex_wait(joined, joined.load(Ordering::Relaxed), WORKER_POLL_MILLIS);
            }
            control.sleepers.fetch_sub(1, Ordering::SeqCst); // partner: as above
        }
    }

    /// Adds the viewer's futex to those that the thread is about to sleep on, with its number by `look`. One that is
    /// polled is left out, and the sleep ends when its time has come.
    fn await_viewer<'a>(
        &'a self,
        viewer: usize,
        limit: &mut RingLimit,
        futexes: &mut FutexList<'a>,
        look: impl FnOnce(u32, &AtomicU32) -> u32,
    ) {
        if let Some(left) = limit.until_poll(Instant::now) {
            return futexes.wake_within(left);
        }
        let request_futex = &self.page(viewer).request_futex;
        let whose = self.joins[viewer].load(Ordering::Relaxed); // `process` has ordered it
        let number = look(whose, request_futex);
        let seen = Observation { whose, number, taken: self.taken_of[viewer].load(Ordering::Relaxed) };
        if limit.has_rung(&seen) {
            self.rings_seen.fetch_add(1, Ordering::Relaxed);
        }
        match limit.note(seen, Instant::now) {
            WaitMode::Futex => futexes.push(FutexWait::new(request_futex, number)),
            WaitMode::Poll => futexes.wake_within(POLL_INTERVAL),
        }
    }

    pub(super) fn wake_waiters(&self) {
        for viewer in self.present() {
            for request in &self.page(viewer).requests {
                futex_wake(&request.state, u32::MAX >> 1);
            }
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

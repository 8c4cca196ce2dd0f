//! Workers: how many threads answer, and which processes may keep them waiting.
//!
//! A request can take as long as a file system takes, and one that hangs (a network that is gone, a FUSE daemon that
//! sleeps) would take all workers. So if [`AT_WORK_MAX`] work on one file system and none has come back for
//! [`STUCK_MIN`], another request is refused at once: its viewer reads by the kernel. Notices about a file (it is
//! cut; a program watches it) wait in the queue of that file system (`Shared::do_job_or_defer`), as a
//! handle does that is taken back. The requests of one viewer are bounded in the same way (`Shared::take`). While all
//! workers are busy, another is started with each heartbeat, up to [`WORKERS_MAX`].
//!
//! Queries about a process itself (its descriptors, its memory map) can hang, too: the kernel takes locks that the
//! process can hold in an `exec` or a page fault. A request of a process that keeps [`PROBES_STUCK_MAX`] waiting
//! is refused, and so is every one while half of the workers wait so.
//!
//! A sleeping worker waits for the futexes of the first group's viewers of that moment, and for the doorbells of the
//! others (`arena/doorbells.rs` of `quinion-view`). A further viewer of that group wakes one worker, which waits for
//! its futex, too; when that one is busy, it wakes the next. So a new process costs one or two wake-ups.
//!
//! The first few are started one by one, each by the worker before it that begins to work. One beyond these that
//! finds nothing to do for [`IDLE_MAX`] ends. One that hangs at the end of the service is left behind.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::sys::peer::ProcessName;

const WORKERS_MAX: usize = 64;
const AT_WORK_MAX: usize = 8;
/// No healthy file system takes so long.
const STUCK_MIN: Duration = Duration::from_millis(500);
const NOTICES_MAX: usize = 4;
const PROBES_STUCK_MAX: usize = 2;
pub(super) const IDLE_MAX: Duration = Duration::from_secs(5);
pub(super) const END_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum WorkKey {
    Files(u64),
    /// Viewers' notices about a file on this device, the number given by the viewer; a file may be closed for one.
    Notices(u64),
    Closes,
}

impl WorkKey {
    fn at_work_max(self) -> usize {
        match self {
            Self::Files(_) => AT_WORK_MAX,
            Self::Notices(_) | Self::Closes => NOTICES_MAX,
        }
    }
}

/// The workers at one key.
#[derive(Clone, Copy, Debug)]
struct BusyCount {
    count: usize,
    /// When one began alone or came back last.
    progress: Instant,
}

impl BusyCount {
    fn are_stuck(self, key: WorkKey, now: Instant) -> bool {
        self.count >= key.at_work_max() && now.saturating_duration_since(self.progress) >= STUCK_MIN
    }
}

/// The workers that wait for the futexes of all viewers.
#[derive(Debug, Default)]
struct Listeners {
    /// The wake-up count when the last viewer joined.
    wake_count: u32,
    /// The workers that began to sleep after that.
    asleep: usize,
}

#[derive(Debug)]
pub(super) struct Workers {
    threads: RankedMutex<Vec<JoinHandle<()>>>,
    ends: ThreadEnds,
    count: AtomicUsize,
    least: AtomicUsize,
    resting: AtomicUsize,
    listeners: RankedMutex<Listeners>,
    at_work: RankedMutex<HashMap<WorkKey, BusyCount>>,
    probes: RankedMutex<Vec<(ProcessName, Instant)>>,
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            threads: RankedMutex::new(Rank::Viewer, Vec::new()),
            ends: ThreadEnds::default(),
            count: AtomicUsize::new(0),
            least: AtomicUsize::new(0),
            resting: AtomicUsize::new(0),
            listeners: RankedMutex::new(Rank::Viewer, Listeners::default()),
            at_work: RankedMutex::new(Rank::Viewer, HashMap::new()),
            probes: RankedMutex::new(Rank::Viewer, Vec::new()),
        }
    }
}

#[derive(Debug)]
pub(super) struct BusyWorker<'a> {
    workers: &'a Workers,
    key: WorkKey,
}

impl Workers {
    pub(super) fn ends(&self) -> &ThreadEnds {
        &self.ends
    }

    /// One more was started, counted by [`Workers::ends`].
    pub(super) fn add(&self, thread: JoinHandle<()>) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished()); // those that have retired
        threads.push(thread);
    }

    /// A thread that answers nothing was started, counted by [`Workers::ends`], and is to be waited for at the end.
    pub(super) fn add_watcher(&self, thread: JoinHandle<()>) {
        self.threads.lock().push(thread);
    }

    pub(super) fn keep(&self, least: usize) {
        self.least.store(least, Ordering::Relaxed);
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether the worker, idle since `idle_since`, is to end; it is not counted then.
    pub(super) fn retires(&self, idle_since: Instant) -> bool {
        let least = self.least.load(Ordering::Relaxed);
        let one_less = |count: usize| count.checked_sub(1).filter(|&rest| rest >= least);
        idle_since.elapsed() >= IDLE_MAX
            && self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    /// A worker sleeps by `sleep`, which waits for the futexes of all viewers at `wake_count`.
    pub(super) fn rest(&self, wake_count: u32, sleep: impl FnOnce()) {
        self.resting.fetch_add(1, Ordering::Relaxed); // a hint, as all counts of threads here
        let count = |change: fn(usize) -> usize| {
            let mut listeners = self.listeners.lock();
            if listeners.wake_count == wake_count {
                listeners.asleep = change(listeners.asleep);
            }
        };
        count(|workers| workers + 1);
        sleep();
        count(|workers| workers - 1);
        self.resting.fetch_sub(1, Ordering::Relaxed);
    }

    /// `change` notes another viewer and returns the new count; no worker waits for its futex yet.
    pub(super) fn announce(&self, change: impl FnOnce() -> u32) {
        let mut listeners = self.listeners.lock();
        *listeners = Listeners { wake_count: change(), asleep: 0 };
    }

    /// Whether a worker that sleeps, or is about to, waits for all futexes.
    pub(super) fn are_all_awaited(&self) -> bool {
        self.listeners.lock().asleep > 0
    }

    pub(super) fn lacks_one(&self) -> bool {
        self.count.load(Ordering::Relaxed) < self.least.load(Ordering::Relaxed)
            && self.resting.load(Ordering::Relaxed) == 0
    }

    pub(super) fn are_all_busy(&self) -> bool {
        self.resting.load(Ordering::Relaxed) == 0 && self.count.load(Ordering::Relaxed) < WORKERS_MAX
    }

    /// Begins to work at that; `None`: too many do so already.
    pub(super) fn enter(&self, key: WorkKey) -> Option<BusyWorker<'_>> {
        self.enter_at(key, Instant::now())
    }

    fn enter_at(&self, key: WorkKey, now: Instant) -> Option<BusyWorker<'_>> {
        let mut at_work = self.at_work.lock();
        let known = at_work.entry(key).or_insert(BusyCount { count: 0, progress: now });
        if known.are_stuck(key, now) {
            return None;
        }
        known.count += 1;
        Some(BusyWorker { workers: self, key })
    }

    /// As many are at work as may be, and none of them comes back.
    pub(super) fn is_stuck(&self, key: WorkKey) -> bool {
        self.at_work.lock().get(&key).is_some_and(|known| known.are_stuck(key, Instant::now()))
    }

    /// `None`: that process, or all together, keep too many waiting.
    pub(super) fn probe(&self, process: ProcessName) -> Option<Probe<'_>> {
        self.probe_at(process, Instant::now())
    }

    fn probe_at(&self, process: ProcessName, now: Instant) -> Option<Probe<'_>> {
        let mut probes = self.probes.lock();
        let stuck = || probes.iter().filter(|(_, since)| now.saturating_duration_since(*since) >= STUCK_MIN);
        let of_it = stuck().filter(|(other, _)| *other == process).count();
        if of_it >= PROBES_STUCK_MAX || stuck().count() >= WORKERS_MAX / 2 {
            return None;
        }
        probes.push((process, now));
        Some(Probe { workers: self, probe: (process, now) })
    }

    /// Waits for all, which have been told to end; not for those that hang.
    pub(super) fn end(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        self.ends.join_within(END_MAX, threads);
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct ThreadEnds(Arc<(Mutex<usize>, Condvar)>);

#[derive(Debug)]
pub(super) struct CountedThread(ThreadEnds);

impl ThreadEnds {
    pub(super) fn begin(&self) -> CountedThread {
        *self.lock() += 1;
        CountedThread(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all, which have been told to end; one that hangs in the kernel is left behind.
    pub(super) fn join_within(&self, time: Duration, threads: impl IntoIterator<Item = JoinHandle<()>>) {
        let waited = self.0.1.wait_timeout_while(self.lock(), time, |left| *left > 0);
        let all_ended = *waited.unwrap_or_else(PoisonError::into_inner).0 == 0;
        for thread in threads.into_iter().filter(|thread| all_ended || thread.is_finished()) {
            thread.join().expect("a thread of the service does not panic");
        }
    }
}

impl Drop for CountedThread {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.0.0.1.notify_all();
    }
}

impl Drop for BusyWorker<'_> {
    fn drop(&mut self) {
        let mut at_work = self.workers.at_work.lock();
        match at_work.get_mut(&self.key) {
            Some(known) if known.count > 1 => {
                *known = BusyCount { count: known.count - 1, progress: Instant::now() };
            }
            _ => drop(at_work.remove(&self.key)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Probe<'a> {
    workers: &'a Workers,
    probe: (ProcessName, Instant),
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        let mut probes = self.workers.probes.lock();
        if let Some(place) = probes.iter().position(|probe| *probe == self.probe) {
            probes.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_process_that_keeps_requests_waiting_is_asked_nothing_more_and_others_are() {
        let (workers, begun) = (Workers::default(), Instant::now());
        let later = begun + STUCK_MIN;
        let probe_at =
            |number, now| workers.probe_at(crate::sys::serial_queues::process_numbered(number), now);
        let first: Vec<_> = (0..4).map(|_| probe_at(7, begun).unwrap()).collect();
        assert!(probe_at(7, later).is_none() && probe_at(8, later).is_some());
        drop(first);
        assert!(probe_at(7, later).is_some());
        let all: Vec<_> = (0..WORKERS_MAX as u32 / 2).map(|n| probe_at(n, begun).unwrap()).collect();
        assert!(probe_at(1000, begun).is_some(), "none of them waits for long");
        assert!(probe_at(1000, later).is_none(), "the other half is for other requests");
        drop(all);
        assert!(workers.probes.lock().is_empty());
    }

    #[test]
    fn a_file_system_has_some_workers_at_most_and_gives_them_back() {
        let workers = Workers::default();
        let begun = Instant::now();
        let all: Vec<_> =
            (0..AT_WORK_MAX).map(|_| workers.enter_at(WorkKey::Files(1), begun).unwrap()).collect();
        assert!(workers.enter_at(WorkKey::Files(1), begun).is_some(), "one that is well comes back soon");
        let later = begun + 3 * STUCK_MIN;
        let stuck = Workers::default();
        let _all: Vec<_> =
            (0..AT_WORK_MAX).map(|_| stuck.enter_at(WorkKey::Files(1), begun).unwrap()).collect();
        assert!(stuck.enter_at(WorkKey::Files(1), later).is_none());
        assert!(stuck.enter_at(WorkKey::Files(2), later).is_some(), "another file system is not concerned");
        drop(all);
        assert!(workers.enter_at(WorkKey::Files(1), later).is_some());
        assert!(workers.at_work.lock().is_empty());
    }

    #[test]
    fn the_end_waits_for_workers_that_end_and_not_for_those_that_hang() {
        let (workers, has_ended) = (Workers::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let counted = workers.ends().begin();
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                has_ended.store(true, Ordering::Relaxed);
                drop(counted);
            });
            workers.ends().join_within(Duration::from_secs(600), []);
            assert!(has_ended.load(Ordering::Relaxed), "it was waited for");
        });
        let counted = workers.ends().begin();
        workers.add(std::thread::spawn(move || {
            let _counted = counted;
            loop {
                std::thread::park();
            }
        }));
        workers.end();
    }
}

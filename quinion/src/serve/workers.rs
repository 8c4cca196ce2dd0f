//! Workers: how many threads answer, and which processes may keep them waiting.
//!
//! A request can take as long as a file system takes. One that hangs (a network that is gone, a FUSE daemon that
//! sleeps) would take one worker after the other, until no request is answered any more. So the workers that are at
//! work on the files of one file system are counted, and if [`AT_WORK_MAX`] are and none of them has come back for
//! [`STUCK_MIN`], another request is refused at once: its viewer reads by the kernel, and waits there by itself.
//! What the owner must be told of a file (it is cut; a program watches it) is not refused: it waits in the queue of
//! that file system (`Shared::do_job_or_defer`), as a handle does that is taken back. The requests of one viewer are
//! bounded in the same way (`Shared::take`). And while all workers are busy, another is started with each heartbeat,
//! up to [`WORKERS_MAX`]; so some file systems that hang leave enough for the others.
//!
//! What a worker asks of a process itself before the file system is known (its descriptor, its memory map) can hang,
//! too: the kernel takes locks of that process, which it can hold in an `exec` or a page fault. Such requests are
//! counted as well: one of a process that keeps [`PROBES_STUCK_MAX`] waiting is refused, and so is every one while half
//! of the workers wait so.
//!
//! A worker that sleeps waits for the futexes of all viewers of the first group that there were when it fell
//! asleep, and for the doorbells of the others ([`doorbells`](crate::arena::doorbells)). Another viewer of that group
//! wakes one of them, and the others do not wait for its futex. When that one has something to do, and no other that
//! sleeps waits for all of them, it wakes the next. So a process that starts costs one wake-up, or two, and not one
//! for each.
//!
//! The first few are started one by one, each by the worker before it that begins to do something: programs that read
//! nothing of ours need one. A worker beyond the first few that finds nothing to do for [`IDLE_MAX`] ends.
//!
//! A worker that hangs at the end of the service is left behind: what it holds is counted, and goes when it comes back,
//! or with the process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::sync::{Rank, RankedMutex};
use crate::sys::peer::ProcessName;

/// Threads that answer at most.
const WORKERS_MAX: usize = 64;
/// Workers that are at work on files of one file system at most, if none of them comes back.
const AT_WORK_MAX: usize = 8;
/// How long that takes on no file system that is well.
const STUCK_MIN: Duration = Duration::from_millis(500);
/// The same of what viewers say of the files of one file system, or of all.
const NOTICES_MAX: usize = 4;
/// Requests about one process that may wait for longer than that.
const PROBES_STUCK_MAX: usize = 2;
/// How long a worker that is one too many waits for something to do.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(5);
/// How long the end of the service waits for workers that are at work.
pub(super) const END_MAX: Duration = Duration::from_secs(1);

/// What a worker is at, as far as that may keep it waiting.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum WorkKey {
    /// Files of the file system on this device: they are read, say.
    Files(u64),
    /// What a viewer says of a file on this device, which may be closed for it. Apart from the files: the number is
    /// what the viewer says.
    Notices(u64),
    /// Files of any file system are closed.
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

/// The threads that answer.
#[derive(Debug)]
pub(super) struct Workers {
    threads: RankedMutex<Vec<JoinHandle<()>>>,
    ends: ThreadEnds,
    count: AtomicUsize,
    /// So many do not end before the service does.
    least: AtomicUsize,
    resting: AtomicUsize,
    /// What the wake-up count was when the last viewer joined, and how many sleep since then.
    listeners: RankedMutex<(u32, usize)>,
    /// How many are at work at each, and when one began alone or came back last.
    at_work: RankedMutex<HashMap<WorkKey, (usize, Instant)>>,
    /// Requests about processes that are under way: which process, and since when.
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
            listeners: RankedMutex::new(Rank::Viewer, (0, 0)),
            at_work: RankedMutex::new(Rank::Viewer, HashMap::new()),
            probes: RankedMutex::new(Rank::Viewer, Vec::new()),
        }
    }
}

/// A worker is at work on a file of a file system, until this is dropped.
#[derive(Debug)]
pub(super) struct BusyWorker<'a> {
    workers: &'a Workers,
    key: WorkKey,
}

impl Workers {
    /// What counts the workers that have not ended.
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

    /// So many stay, whether there is something to do or not.
    pub(super) fn keep(&self, least: usize) {
        self.least.store(least, Ordering::Relaxed);
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether the worker that asks, and has found nothing to do since `idle_since`, is to end; then it counts no more.
    pub(super) fn retires(&self, idle_since: Instant) -> bool {
        let least = self.least.load(Ordering::Relaxed);
        let one_less = |count: usize| count.checked_sub(1).filter(|&rest| rest >= least);
        idle_since.elapsed() >= IDLE_MAX
            && self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    /// A worker has nothing to do, and does `sleep`, which waits for the futexes of all viewers that there were at
    /// `wake_count`.
    pub(super) fn rest(&self, wake_count: u32, sleep: impl FnOnce()) {
        self.resting.fetch_add(1, Ordering::Relaxed); // a hint, as all counts of threads here
        let count = |change: fn(usize) -> usize| {
            let mut listeners = self.listeners.lock();
            if listeners.0 == wake_count {
                listeners.1 = change(listeners.1);
            }
        };
        count(|workers| workers + 1);
        sleep();
        count(|workers| workers - 1);
        self.resting.fetch_sub(1, Ordering::Relaxed);
    }

    /// There is another viewer, which `change` notes: the count is then as it answers. No worker waits for its futex
    /// yet.
    pub(super) fn announce(&self, change: impl FnOnce() -> u32) {
        let mut listeners = self.listeners.lock();
        *listeners = (change(), 0);
    }

    /// Whether a worker that sleeps, or is about to, waits for the futexes of all viewers.
    pub(super) fn are_all_awaited(&self) -> bool {
        self.listeners.lock().1 > 0
    }

    /// Whether one of the first few is missing, and none has nothing to do.
    pub(super) fn lacks_one(&self) -> bool {
        self.count.load(Ordering::Relaxed) < self.least.load(Ordering::Relaxed)
            && self.resting.load(Ordering::Relaxed) == 0
    }

    /// Whether one more should be started.
    pub(super) fn are_all_busy(&self) -> bool {
        self.resting.load(Ordering::Relaxed) == 0 && self.count.load(Ordering::Relaxed) < WORKERS_MAX
    }

    /// Begins to work at that; `None` if too many do so already.
    pub(super) fn enter(&self, key: WorkKey) -> Option<BusyWorker<'_>> {
        self.enter_at(key, Instant::now())
    }

    fn enter_at(&self, key: WorkKey, now: Instant) -> Option<BusyWorker<'_>> {
        let mut at_work = self.at_work.lock();
        let known = at_work.entry(key).or_insert((0, now));
        if are_stuck(key, *known, now) {
            return None;
        }
        known.0 += 1;
        Some(BusyWorker { workers: self, key })
    }

    /// Whether as many are at work at that as may, and none of them comes back.
    pub(super) fn is_stuck(&self, key: WorkKey) -> bool {
        self.at_work.lock().get(&key).is_some_and(|&known| are_stuck(key, known, Instant::now()))
    }

    /// Begins to ask something about that process; `None` if it, or all together, keep too many waiting.
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

fn are_stuck(key: WorkKey, (count, progress): (usize, Instant), now: Instant) -> bool {
    count >= key.at_work_max() && now.saturating_duration_since(progress) >= STUCK_MIN
}

/// How many of some threads have not come to their end.
#[derive(Clone, Debug, Default)]
pub(super) struct ThreadEnds(Arc<(Mutex<usize>, Condvar)>);

/// A thread that is counted, until this is dropped at its end.
#[derive(Debug)]
pub(super) struct CountedThread(ThreadEnds);

impl ThreadEnds {
    /// One more, which is to take this with it.
    pub(super) fn begin(&self) -> CountedThread {
        *self.lock() += 1;
        CountedThread(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `threads`, all that are counted, which have been told to end; for so long at most: one that hangs in
    /// the kernel is left behind.
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
            Some((count, progress)) if *count > 1 => (*count, *progress) = (*count - 1, Instant::now()),
            _ => drop(at_work.remove(&self.key)),
        }
    }
}

/// A request about a process is under way, until this is dropped.
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
    fn a_process_that_keeps_questions_waiting_is_asked_nothing_more_and_others_are() {
        let (workers, begun) = (Workers::default(), Instant::now());
        let later = begun + STUCK_MIN;
        let probe_at = |number, now| workers.probe_at(ProcessName::numbered(number), now);
        let first: Vec<_> = (0..4).map(|_| probe_at(7, begun).unwrap()).collect();
        assert!(probe_at(7, later).is_none() && probe_at(8, later).is_some());
        drop(first);
        assert!(probe_at(7, later).is_some());
        let all: Vec<_> = (0..WORKERS_MAX as u32 / 2).map(|n| probe_at(n, begun).unwrap()).collect();
        assert!(probe_at(1000, begun).is_some(), "none of them waits for long");
        assert!(probe_at(1000, later).is_none(), "the other half is for other questions");
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

//! Background: a thread of a cache that does work that no caller waits for.
//!
//! ```text
//!   memory runs low      --wake-->  +--------+  run()   reclaim: evicts until enough is free
//!   a stream has paused  --wake-->  | thread |  run()   uncached: drops what it left behind
//!                        <-sleep--  +--------+  run()   pressure: looks whether the machine is short
//!                         until the first time a task named, or a wake-up
//! ```
//!
//! A **task** is work that can be done late or not at all: a thread that needs it done now does it itself. So a cache
//! that the system gives no thread is as right as any, and a little slower. The first wake-up starts the thread.
//!
//! Tasks are known weakly. One whose owner is gone is forgotten, and while it runs, its owner lives.
//!
//! Invariants:
//!  1. A change that was made before a wake-up is seen by a run of every task that begins after that wake-up.
//!  2. Tasks run one after another, with no lock of this module held.
//!  3. A task that panics takes neither the thread nor another task with it.
//!  4. When [`BackgroundThread::close`] has returned to another thread than the background's, no task runs any more.
//!
//! Not an invariant: that a task runs only when it asked to. Each wake-up reaches every task.
//!
//! Cost: a wake-up is one atomic step, and a lock and a wake-up if the thread sleeps.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crate::sync::contained;
use crate::sys::fork::ForkGuard;

/// Work without a deadline.
pub trait BackgroundTask: Send + Sync {
    /// Does the work due now. Returns after how long to come again without a wake-up; `None`: only then.
    /// May take locks and wait for them, as a thread that holds none.
    fn run(&self) -> Option<Duration>;
}

/// A closure that a background thread runs last.
pub type ThreadExit = Box<dyn FnOnce() + Send>;

/// One cache's tasks, and the thread that does them.
pub struct BackgroundThread {
    shared: Arc<Shared>,
    process: ForkGuard,
}

struct Shared {
    name: &'static str,
    /// Whether a thread called `wake` since the thread last began its round.
    woken: AtomicBool,
    list: Mutex<TaskList>,
    wakeup: Condvar,
}

#[derive(Default)]
struct TaskList {
    tasks: Vec<Weak<dyn BackgroundTask>>,
    thread: Thread,
    is_closed: bool,
    last: Option<ThreadExit>,
}

#[derive(Default)]
enum Thread {
    #[default]
    None,
    Running(JoinHandle<()>, ThreadId),
    /// Closed, or the system has no thread for it.
    Never,
}

impl TaskList {
    /// Adds a task; and forgets those whose owners are gone before the list grows, as there may never be a wake-up.
    fn add(&mut self, task: Weak<dyn BackgroundTask>) {
        if self.tasks.len() == self.tasks.capacity() {
            self.prune_dead();
            // So much room that the next look at all of them comes after as many more.
            self.tasks.reserve(self.tasks.len() + 1);
        }
        self.tasks.push(task);
    }

    fn prune_dead(&mut self) {
        self.tasks.retain(|task| task.strong_count() > 0);
    }
}

impl BackgroundThread {
    /// No tasks and no thread yet.
    pub fn new() -> Self {
        Self::named("quinion-bg")
    }

    /// No tasks and no thread yet; the thread will be named `name`, of 15 characters at most.
    pub fn named(name: &'static str) -> Self {
        let (woken, list, wakeup) = (AtomicBool::new(false), Mutex::default(), Condvar::default());
        Self { shared: Arc::new(Shared { name, woken, list, wakeup }), process: ForkGuard::new() }
    }

    /// Adds a task, which runs from the next wake-up on.
    pub fn add(&self, task: Weak<dyn BackgroundTask>) {
        self.shared.lock().add(task);
    }

    /// Has every task run soon. Waits for nothing but a lock that is held for a few steps, and the start of the
    /// thread if this is the first wake-up. In a forked child, and after [`BackgroundThread::close`], it does nothing.
    pub fn wake(&self) {
        if self.process.is_forked() {
            return;
        }
        // Release, partner: the Acquire in `begin_round`: the round that takes this wake-up sees the stores of this
        // thread before it. The exchange is needed also where it says that another thread's `wake` is pending: a plain
        // load could read one that the thread has taken already.
        if !self.shared.woken.swap(true, Ordering::Release) {
            self.shared.ensure_thread();
            self.shared.wakeup.notify_one();
        }
    }

    /// Whether the cache is about to end: a task that takes long looks at this now and then.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().is_closed
    }

    /// Ends the thread after the task it is at, and waits for that; a task that calls this is not waited for.
    pub fn close(&self) {
        if self.process.is_forked() {
            return;
        }
        let mut list = self.shared.lock();
        list.is_closed = true;
        let thread = std::mem::replace(&mut list.thread, Thread::Never);
        drop(list);
        self.shared.wakeup.notify_one();
        if let Thread::Running(handle, id) = thread
            && id != std::thread::current().id()
        {
            let _ = handle.join(); // it catches tasks' panics
        }
    }
}

impl BackgroundThread {
    /// As [`BackgroundThread::close`], and has the thread do `last` then; waits for nothing. Else `last` comes back.
    pub fn close_with(&self, last: ThreadExit) -> Result<(), ThreadExit> {
        let mut list = self.shared.lock();
        if self.process.is_forked() || !matches!(list.thread, Thread::Running(..)) {
            return Err(last);
        }
        list.is_closed = true;
        list.thread = Thread::Never; // no thread waits for it
        list.last = Some(last);
        drop(list);
        self.shared.wakeup.notify_one();
        Ok(())
    }
}

impl Default for BackgroundThread {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for BackgroundThread {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn ensure_thread(self: &Arc<Self>) {
        let mut list = self.lock();
        if matches!(list.thread, Thread::None) {
            let shared = Arc::clone(self);
            let started = std::thread::Builder::new().name(self.name.into()).spawn(move || shared.live());
            list.thread = match started {
                Ok(handle) => {
                    let id = handle.thread().id();
                    Thread::Running(handle, id)
                }
                Err(_) => Thread::Never, // a thread that needs work done now does it itself
            };
        }
    }

    fn live(&self) {
        crate::sys::signal::block_all();
        let mut again = None;
        while let Some(tasks) = self.begin_round(again) {
            // A moment beyond the range of the clock never comes.
            let after = tasks.iter().filter_map(|task| self.run(task)).min();
            again = after.and_then(|after| Instant::now().checked_add(after));
        }
        let last = self.lock().last.take();
        if let Some(last) = last {
            contained(last);
        }
    }

    fn begin_round(&self, again: Option<Instant>) -> Option<Vec<Weak<dyn BackgroundTask>>> {
        let mut list = self.lock();
        while !list.is_closed {
            let left = again.map(|again| again.saturating_duration_since(Instant::now()));
            // Acquire, partner: the Release in `wake`.
            if self.woken.swap(false, Ordering::Acquire) || left == Some(Duration::ZERO) {
                list.prune_dead();
                return Some(list.tasks.clone());
            }
            list = match left {
                Some(left) => self.wakeup.wait_timeout(list, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.wakeup.wait(list).unwrap_or_else(PoisonError::into_inner),
            };
        }
        None
    }

    fn run(&self, task: &Weak<dyn BackgroundTask>) -> Option<Duration> {
        if self.lock().is_closed {
            return None;
        }
        let task = task.upgrade()?;
        contained(|| task.run()).flatten()
    }

    fn lock(&self) -> MutexGuard<'_, TaskList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for BackgroundThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = self.shared.lock();
        let runs = matches!(list.thread, Thread::Running(..));
        f.debug_struct("BackgroundThread").field("tasks", &list.tasks.len()).field("runs", &runs).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const LONG: Duration = Duration::from_secs(60);

    struct Recording {
        runs: Mutex<Sender<u64>>,
        count: AtomicU64,
        again: Option<Duration>,
        panics: bool,
    }

    impl BackgroundTask for Recording {
        fn run(&self) -> Option<Duration> {
            let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            let _ = self.runs.lock().unwrap().send(count);
            assert!(!self.panics, "this task always panics");
            self.again
        }
    }

    fn recording(again: Option<Duration>) -> (Arc<Recording>, Receiver<u64>) {
        task(again, false)
    }

    fn panicking() -> (Arc<Recording>, Receiver<u64>) {
        task(None, true)
    }

    fn task(again: Option<Duration>, panics: bool) -> (Arc<Recording>, Receiver<u64>) {
        let (runs, runs_seen) = channel();
        (Arc::new(Recording { runs: Mutex::new(runs), count: AtomicU64::new(0), again, panics }), runs_seen)
    }

    fn add(background: &BackgroundThread, task: &Arc<Recording>) {
        let task = Arc::downgrade(task);
        background.add(task);
    }

    #[test]
    fn no_task_runs_before_a_wake_and_each_wake_is_followed_by_a_run() {
        let background = BackgroundThread::new();
        let (task, runs_seen) = recording(None);
        add(&background, &task);
        assert!(matches!(background.shared.lock().thread, Thread::None), "no wake-up, no thread");
        for turn in 1..=100 {
            background.wake();
            // Calls of `wake` may be taken together, but never one that comes after its round began.
            assert!(runs_seen.recv_timeout(LONG).unwrap() >= turn);
        }
    }

    #[test]
    fn changes_made_before_a_wake_are_seen() {
        struct Follows(AtomicU64, AtomicU64);
        impl BackgroundTask for Follows {
            fn run(&self) -> Option<Duration> {
                self.1.store(self.0.load(Ordering::Relaxed), Ordering::Relaxed);
                None
            }
        }
        let background = BackgroundThread::new();
        let task = Arc::new(Follows(AtomicU64::new(0), AtomicU64::new(0)));
        let weak: Weak<Follows> = Arc::downgrade(&task);
        background.add(weak);
        for turn in 1..=1000 {
            task.0.store(turn, Ordering::Relaxed);
            background.wake();
        }
        let begun = Instant::now();
        while task.1.load(Ordering::Relaxed) != 1000 {
            assert!(begun.elapsed() < LONG, "the last wake-up was lost");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_task_comes_again_when_it_said_and_a_panic_is_its_own() {
        let background = BackgroundThread::new();
        let (bad, bad_runs) = panicking();
        let (good, good_runs) = recording(Some(Duration::from_millis(1)));
        add(&background, &bad);
        add(&background, &good);
        background.wake();
        for _ in 0..5 {
            good_runs.recv_timeout(LONG).unwrap();
        }
        bad_runs.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn a_task_that_comes_again_in_eternity_runs_when_woken() {
        let background = BackgroundThread::new();
        let (task, runs_seen) = recording(Some(Duration::MAX));
        add(&background, &task);
        background.wake();
        assert_eq!(runs_seen.recv_timeout(LONG).unwrap(), 1);
        background.wake();
        assert!(runs_seen.recv_timeout(LONG).unwrap() >= 2, "the thread is there");
    }

    #[test]
    fn the_exit_work_runs_after_the_running_task_and_only_on_a_thread() {
        let background = BackgroundThread::new();
        assert!(background.close_with(Box::new(|| ())).is_err(), "there is no thread yet");
        let (task, runs_seen) = panicking();
        add(&background, &task);
        background.wake();
        runs_seen.recv_timeout(LONG).unwrap();
        let (done, ended) = channel();
        let (theirs, runs) = (Arc::clone(&background.shared), Arc::clone(&task));
        let last = move || {
            assert!(theirs.lock().is_closed);
            done.send(runs.count.load(Ordering::Relaxed)).unwrap();
        };
        assert!(background.close_with(Box::new(last)).is_ok());
        let runs = ended.recv_timeout(LONG).unwrap();
        background.wake();
        background.close();
        assert_eq!(task.count.load(Ordering::Relaxed), runs, "no task runs any more");
        assert!(background.close_with(Box::new(|| ())).is_err(), "it is gone");
    }

    #[test]
    fn a_task_of_a_dead_owner_is_forgotten_and_nothing_runs_after_the_end() {
        let background = BackgroundThread::new();
        let (gone, dead_runs) = recording(None);
        let (kept, kept_runs) = recording(None);
        add(&background, &gone);
        add(&background, &kept);
        drop(gone);
        background.wake();
        kept_runs.recv_timeout(LONG).unwrap();
        assert!(dead_runs.try_recv().is_err());
        assert_eq!(background.shared.lock().tasks.len(), 1);
        background.close();
        let runs = kept.count.load(Ordering::Relaxed);
        background.wake();
        background.close();
        assert_eq!(kept.count.load(Ordering::Relaxed), runs);
    }

    #[test]
    fn tasks_of_dead_owners_are_forgotten_without_a_poke_too() {
        let background = BackgroundThread::new();
        let kept: Vec<_> = (0..10).map(|_| recording(None).0).collect();
        kept.iter().for_each(|task| add(&background, task));
        (0..1000).for_each(|_| add(&background, &recording(None).0));
        let list = background.shared.lock();
        assert!(matches!(list.thread, Thread::None), "nobody woken");
        assert!(list.tasks.len() < 50, "{} are known", list.tasks.len());
        assert_eq!(list.tasks.iter().filter(|task| task.strong_count() > 0).count(), 10);
    }

    #[test]
    fn a_task_may_close_the_background_thread_itself() {
        struct Ends(Mutex<Option<BackgroundThread>>, Mutex<Sender<()>>);
        impl BackgroundTask for Ends {
            fn run(&self) -> Option<Duration> {
                drop(self.0.lock().unwrap().take());
                self.1.lock().unwrap().send(()).unwrap();
                None
            }
        }
        let (ended, runs_seen) = channel();
        let task = Arc::new(Ends(Mutex::new(None), Mutex::new(ended)));
        let background = BackgroundThread::new();
        let weak: Weak<Ends> = Arc::downgrade(&task);
        background.add(weak);
        let mut place = task.0.lock().unwrap();
        background.wake();
        *place = Some(background);
        drop(place);
        runs_seen.recv_timeout(LONG).unwrap();
    }
}

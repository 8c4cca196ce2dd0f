//! Serial queues: tasks that another process or a device may block without bound, in threads of their own.
//!
//! ```text
//!   spawn(Sender(P), close)       Sender(P):  close, close, close    one thread, in this order
//!   spawn(Device(2), detach)      Device(2):  detach                 another
//! ```
//!
//! A descriptor that another process has sent may be of anything, and its last close may wait for as long as its maker
//! likes: a socket that lingers, a file of a hung file system. So may that of a socket in which such a message lies
//! unread, and of a file that a cache serves from a file system that hangs. A thread that others wait for leaves all
//! these to a queue of the process that sent it, or of the file system: one that blocks keeps no other waiting.
//!
//! A thread whose queue is empty waits a moment for the next queue: to start and end a thread for each process of a
//! shell script costs as much as to admit it.
//!
//! Invariants:
//!  1. [`SerialQueues::spawn`] and [`SerialQueues::close`] do not wait.
//!  2. A queue has one thread at most. There are as many threads as processes and file systems that keep tasks waiting.
//!     Besides, two threads without a queue wait for one, half a second at most.
//!  3. While [`SerialQueues::are_full`], the owner admits no process that might add to them: so they are bounded.
//!  4. There are at least as many idle threads as queues handed to them; an idle thread ends only if none is handed.

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use quinion::internals::sync::contained;
use quinion::internals::sys::peer::ProcessName;

/// Tasks that wait before the queues are full, if this process may have so many descriptors open twice over.
const TASKS_MAX: usize = 4096;

/// Threads without a queue that wait for one, at most.
const IDLE_MAX: usize = 2;
/// How long each of them waits.
const IDLE_TIME: Duration = Duration::from_millis(500);

/// The process or device whose calls a queue runs one by one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QueueKey {
    /// Descriptors that this process has sent.
    Sender(ProcessName),
    /// Queries to the kernel about this process.
    Process(ProcessName),
    /// Files of the file system on this device.
    Device(u64),
    /// Periodic checks, which may close files of several file systems.
    Background,
}

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    running: Option<Instant>,
    has_thread: bool,
}

impl Queue {
    fn waiting(&self) -> usize {
        self.tasks.len() + usize::from(self.running.is_some())
    }
}

#[derive(Default)]
struct State {
    queues: HashMap<QueueKey, Queue>,
    idle: usize,
    handed: VecDeque<QueueKey>,
}

/// The queues. A clone is the same ones.
#[derive(Clone)]
pub struct SerialQueues {
    state: Arc<(Mutex<State>, Condvar)>,
    tasks_max: usize,
}

impl std::fmt::Debug for SerialQueues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SerialQueues").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}

impl Default for SerialQueues {
    /// Full with half of the descriptors that this process may have open: each task may hold one.
    fn default() -> Self {
        let tasks_max = (quinion::internals::sys::descriptors_max() / 2).clamp(1, TASKS_MAX);
        Self { state: Arc::default(), tasks_max }
    }
}

impl SerialQueues {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner) // no task runs under it
    }

    /// Whether as many tasks wait as may.
    pub fn are_full(&self) -> bool {
        self.waiting() >= self.tasks_max // a bound that need not be exact
    }

    /// Tasks that are not done.
    pub fn waiting(&self) -> usize {
        self.waiting_where(|_| true)
    }

    /// Tasks for file systems that are not done, but for those of file systems that have been at one for `stuck`.
    pub fn waiting_for_devices(&self, stuck: Duration) -> usize {
        let is_stuck = |queue: &Queue| queue.running.is_some_and(|since| since.elapsed() >= stuck);
        let state = self.lock();
        let of_devices = state.queues.iter().filter(|(key, _)| matches!(key, QueueKey::Device(_)));
        of_devices.filter(|(_, queue)| !is_stuck(queue)).map(|(_, queue)| queue.waiting()).sum()
    }

    fn waiting_where(&self, is_meant: impl Fn(QueueKey) -> bool) -> usize {
        let state = self.lock();
        state.queues.iter().filter(|(key, _)| is_meant(**key)).map(|(_, queue)| queue.waiting()).sum()
    }

    /// Tasks of one queue that are not done.
    pub fn waiting_in(&self, key: QueueKey) -> usize {
        self.lock().queues.get(&key).map_or(0, Queue::waiting)
    }

    /// Waits until no task is left for file systems and in the background, for so long at most.
    pub fn wait_for_own(&self, time: Duration) {
        let until = Instant::now() + time;
        let is_own = |key| matches!(key, QueueKey::Device(_) | QueueKey::Background);
        let are_left = || self.waiting_where(is_own) > 0;
        while are_left() && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Closes a descriptor whose close may wait for `key`.
    pub fn close(&self, key: QueueKey, descriptor: OwnedFd) {
        // A task that never runs must not close the descriptor, which could block here: it is leaked.
        let descriptor = ManuallyDrop::new(descriptor);
        self.spawn(key, move || drop(ManuallyDrop::into_inner(descriptor)));
    }

    /// Does `task` behind all others with this key. One that panics is over. Without a thread (the system has none to
    /// give) it waits, until the next with this key is given one, or [`SerialQueues::retry`] is called.
    pub fn spawn(&self, key: QueueKey, task: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        let queue = state.queues.entry(key).or_default();
        queue.tasks.push_back(Box::new(task));
        if std::mem::replace(&mut queue.has_thread, true) {
            return;
        }
        let is_handed = state.idle > state.handed.len();
        if is_handed {
            state.handed.push_back(key);
        }
        drop(state);
        if is_handed {
            self.state.1.notify_one();
        } else {
            self.start(key);
        }
    }

    /// Starts threads for queues that have tasks and could be given none before. To be called from time to time.
    pub fn retry(&self) {
        let mut left = Vec::new();
        for (key, queue) in self.lock().queues.iter_mut().filter(|(_, queue)| !queue.has_thread) {
            queue.has_thread = true;
            left.push(*key);
        }
        left.into_iter().for_each(|key| self.start(key));
    }

    fn start(&self, key: QueueKey) {
        let own = self.clone();
        let spawned = std::thread::Builder::new().name("quinion-serial".into()).spawn(move || own.run(key));
        if spawned.is_err()
            && let Some(queue) = self.lock().queues.get_mut(&key)
        {
            queue.has_thread = false;
        }
    }

    fn run(&self, first: QueueKey) {
        let mut key = Some(first);
        while let Some(queue) = key {
            self.empty(queue);
            key = self.wait_for_queue();
        }
    }

    fn empty(&self, key: QueueKey) {
        loop {
            let mut state = self.lock();
            let Some(queue) = state.queues.get_mut(&key) else { return };
            queue.running = None;
            let Some(task) = queue.tasks.pop_front() else {
                state.queues.remove(&key);
                return;
            };
            queue.running = Some(Instant::now());
            drop(state);
            contained(task);
        }
    }

    fn wait_for_queue(&self) -> Option<QueueKey> {
        let until = Instant::now() + IDLE_TIME;
        let mut state = self.lock();
        if state.idle >= IDLE_MAX {
            return None;
        }
        state.idle += 1;
        let next = loop {
            if let Some(key) = state.handed.pop_front() {
                break Some(key);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break None;
            }
            let waited = self.state.1.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.idle -= 1;
        next
    }
}

/// Another process for each number.
#[cfg(test)]
pub(crate) fn process_numbered(number: u32) -> ProcessName {
    ProcessName::of(number, std::fs::File::open("/dev/null").expect("it is there"))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn tasks_of_one_key_are_done_in_order_and_of_another_meanwhile() {
        let queues = SerialQueues::default();
        let (go, waits) = channel::<()>();
        let (say, said) = channel();
        let says = |word: u32| {
            let say = say.clone();
            move || say.send(word).unwrap()
        };
        let first = says(1);
        queues.spawn(QueueKey::Sender(process_numbered(1)), move || {
            waits.recv().unwrap();
            first();
        });
        queues.spawn(QueueKey::Sender(process_numbered(1)), || panic!("a task that panics is over"));
        queues.spawn(QueueKey::Sender(process_numbered(1)), says(2));
        queues.spawn(QueueKey::Device(1), says(3));
        assert_eq!(said.recv(), Ok(3));
        assert!(queues.waiting() >= 3 && !queues.are_full());
        go.send(()).unwrap();
        assert_eq!([said.recv(), said.recv()], [Ok(1), Ok(2)]);
        while queues.waiting() > 0 {
            std::thread::yield_now();
        }
        assert!(queues.lock().queues.is_empty(), "a queue without tasks stays");
    }

    /// 1. Processes join one after the other: each has a task in a queue of its own.
    /// 2. A thread is started and ended for each.
    #[test]
    fn a_thread_that_has_emptied_its_queue_does_the_next() {
        let queues = SerialQueues::default();
        let (say, said) = channel();
        let mut threads = HashMap::new();
        for number in 0..100 {
            let say = say.clone();
            queues.spawn(QueueKey::Sender(process_numbered(number)), move || {
                say.send(std::thread::current().id()).unwrap();
            });
            *threads.entry(said.recv().unwrap()).or_insert(0) += 1;
            // The thread says so before it looks for another queue.
            while queues.lock().idle == 0 {
                std::thread::yield_now();
            }
        }
        assert_eq!(threads.len(), 1, "{threads:?}");
    }

    /// 1. Idle threads are handed queues, all at once, and end when their time is over.
    /// 2. A queue is handed to a thread that ends: its task is never done.
    #[test]
    fn every_queue_that_is_handed_over_is_emptied() {
        let queues = SerialQueues::default();
        let (say, said) = channel();
        for round in 0..20u32 {
            for number in 0..8 {
                let say = say.clone();
                queues.spawn(QueueKey::Device(number), move || say.send(round).unwrap());
            }
            for _ in 0..8 {
                assert_eq!(said.recv_timeout(Duration::from_secs(60)), Ok(round));
            }
            let state = queues.lock();
            assert!(state.idle <= IDLE_MAX && state.handed.len() <= state.idle, "{}", state.idle);
        }
        while queues.lock().idle > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(queues.lock().handed.is_empty() && queues.lock().queues.is_empty());
    }

    /// 1. The system has no thread for a queue when its task comes.
    /// 2. No other task comes with that key, as of the one that is only added when none waits.
    #[test]
    fn a_queue_that_was_given_no_thread_is_tried_again() {
        let queues = SerialQueues::default();
        let (say, said) = channel();
        let mut tasks = VecDeque::new();
        tasks.push_back(Box::new(move || say.send(7).unwrap()) as Task);
        queues.lock().queues.insert(QueueKey::Background, Queue { tasks, ..Queue::default() });
        queues.retry();
        assert_eq!(said.recv(), Ok(7));
        queues.retry(); // nothing is left, and no thread is started for that
        while queues.waiting() > 0 {
            std::thread::yield_now();
        }
    }

    /// 1. A file system hangs in a close.
    /// 2. Each program that is about to unmount another waits for it.
    #[test]
    fn a_file_system_that_hangs_is_waited_for_no_more_and_others_are() {
        let queues = SerialQueues::default();
        let (go, waits) = channel::<()>();
        queues.spawn(QueueKey::Device(1), move || {
            let _ = waits.recv();
        });
        queues.spawn(QueueKey::Device(1), || ());
        assert_eq!(queues.waiting_for_devices(Duration::from_secs(1000)), 2);
        while queues.waiting_for_devices(Duration::from_millis(1)) > 0 {
            std::thread::yield_now();
        }
        assert_eq!(queues.waiting(), 2);
        let (other, waits) = channel::<()>();
        queues.spawn(QueueKey::Device(2), move || {
            let _ = waits.recv();
        });
        assert_eq!(queues.waiting_for_devices(Duration::from_secs(1000)), 3);
        drop((go, other));
    }

    #[test]
    fn queues_are_full_with_as_many_tasks_as_may_wait() {
        let queues = SerialQueues { tasks_max: 2, ..SerialQueues::default() };
        let (go, waits) = channel::<()>();
        queues.spawn(QueueKey::Sender(process_numbered(1)), move || {
            let _ = waits.recv();
        });
        assert!(!queues.are_full());
        queues.spawn(QueueKey::Device(1), || ());
        queues.spawn(QueueKey::Sender(process_numbered(1)), || ());
        assert!(queues.are_full());
        drop(go);
        while queues.are_full() {
            std::thread::yield_now();
        }
    }
}

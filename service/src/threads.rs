//! Threads: requests that wait, for callers that must not; and GETs, for callers that may.
//!
//! ```text
//!   async caller     --task, owned-->  a queue, for `THREADS_MAX` threads  --> a future of its result, for any runtime
//!   blocking caller  --future-------->  the runtime's worker, which drives connections  --> its result, or a time-out
//! ```
//!
//! A client's requests to a server block. They are made on threads of its own, so that no thread of the caller's
//! runtime waits, whichever runtime that is. A task whose future was dropped is finished all the same, or, if it has
//! not begun, not begun.
//!
//! The threads for tasks are not the runtime's. Where the system gives no thread, a runtime leaves a task to the
//! threads that it has, and its worker is one of these, which never takes any.
//!
//! Invariants:
//!  1. In a forked child, which has none of these threads, all of it is an error, and nothing waits.
//!  2. The last to let go may be a task of these very threads, or of the caller's runtime: its drop does not block.
//!  3. A task waits in the queue only while a thread is there that will take it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;
use std::{fmt, io};

use quinion::internals::sys::fork::ForkGuard;
use quinion_object::internals::start_runtime;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::error::{Error, ErrorKind, Result};

/// The most threads; further tasks wait for a free one.
const THREADS_MAX: usize = 64;
/// A thread without a task ends after that.
const IDLE_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Threads {
    /// `None` only while the threads are being dropped.
    runtime: Option<Runtime>,
    queue: Arc<TaskQueue>,
    /// Tasks that have not ended.
    tasks: Arc<AtomicUsize>,
    process: ForkGuard,
}

/// A task that has not ended.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(tasks: &Arc<AtomicUsize>) -> Self {
        tasks.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(tasks))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct TaskQueue {
    state: Mutex<QueueState>,
    news: Condvar,
}

#[derive(Default)]
struct QueueState {
    waiting: VecDeque<Task>,
    threads: usize,
    idle: usize,
    is_over: bool,
}

impl fmt::Debug for TaskQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TaskQueue")
    }
}

impl TaskQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// There is no thread for it, and the system gives none.
    fn push(self: &Arc<Self>, task: Task) -> io::Result<()> {
        let mut state = self.lock();
        if state.idle <= state.waiting.len() && state.threads < THREADS_MAX {
            let queue = Arc::clone(self);
            let thread = std::thread::Builder::new().name("quinion-client".to_owned());
            let work = move || {
                while let Some(task) = queue.next() {
                    // The caller's waker may panic. Then this thread goes on, for it is counted.
                    let _ = catch_unwind(AssertUnwindSafe(task)).map_err(std::mem::forget);
                }
            };
            match thread.spawn(work) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => return Err(error),
                Err(_) => {} // it is taken after another
            }
        }
        state.waiting.push_back(task);
        drop(state);
        self.news.notify_one();
        Ok(())
    }

    /// `None`: there was none for some time, and the thread counts no more.
    fn next(&self) -> Option<Task> {
        let is_idle = |state: &mut QueueState| state.waiting.is_empty() && !state.is_over;
        let mut state = self.lock();
        state.idle += 1;
        let waited = self.news.wait_timeout_while(state, IDLE_MAX, is_idle);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.idle -= 1;
        let task = state.waiting.pop_front();
        state.threads -= usize::from(task.is_none());
        task
    }

    fn close(&self) {
        let mut state = self.lock();
        state.is_over = true;
        let unbegun = std::mem::take(&mut state.waiting);
        drop(state);
        drop(unbegun); // without the lock: they give handles back
        self.news.notify_all();
    }
}

fn no_threads(error: io::Error) -> Error {
    Error::of_io(ErrorKind::Start, "cannot start threads for a client", error)
        .with_hint("allow this user more of them (ulimit -u, pids.max)")
}

impl Threads {
    pub(crate) fn new() -> Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(1).thread_name("quinion-client").enable_all();
        let runtime = Some(start_runtime(&mut runtime).map_err(no_threads)?);
        Ok(Self { runtime, queue: Arc::default(), tasks: Arc::default(), process: ForkGuard::new() })
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.process.is_forked()
    }

    /// Whether a task that comes now waits for another to end.
    pub(crate) fn is_full(&self) -> bool {
        self.tasks.load(Ordering::Relaxed) >= THREADS_MAX
    }

    fn runtime(&self) -> Result<&Runtime> {
        self.runtime.as_ref().filter(|_| !self.is_forked()).ok_or_else(Error::forked)
    }

    /// The result of a task that may block.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.runtime()?;
        let (counted, (sender, done)) = (Counted::new(&self.tasks), oneshot::channel());
        let task = move || {
            if sender.is_closed() {
                return; // its future was dropped
            }
            let result = catch_unwind(AssertUnwindSafe(task));
            drop(counted);
            let _ = sender.send(result); // the future may be dropped meanwhile
        };
        self.queue.push(Box::new(task)).map_err(no_threads)?;
        match done.await {
            Ok(Ok(result)) => result,
            _ => Err(Error::new(ErrorKind::Other, "a read has ended: its thread has panicked")),
        }
    }

    /// The result of a future, which is given up after `time`. Not on the thread of this runtime that drives futures.
    /// `None`: there was no time, or it has panicked.
    pub(crate) fn wait_for<T: Send + 'static>(
        &self,
        time: Duration,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<Option<T>> {
        // Not by `block_on`, which a thread of another runtime may not call.
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.runtime()?.spawn(async move {
            let _ = sender.send(future.await); // a caller that is gone wants no answer
        });
        let answer = receiver.recv_timeout(time).ok();
        task.abort(); // of no effect on one that has ended
        Ok(answer)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.is_forked() {
            std::mem::forget(runtime); // its threads, and perhaps its locks, are the parent's
        } else {
            self.queue.close();
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn a_future_that_never_ends_is_given_up() {
        let threads = Threads::new().unwrap();
        let (sender, dropped) = mpsc::channel::<()>();
        let held = async move {
            let _sender = sender;
            std::future::pending::<()>().await;
        };
        assert_eq!(threads.wait_for(Duration::from_millis(20), held).unwrap(), None);
        assert_eq!(dropped.recv_timeout(Duration::from_secs(20)), Err(mpsc::RecvTimeoutError::Disconnected));
        assert_eq!(threads.wait_for(Duration::from_secs(20), async { 7 }).unwrap(), Some(7));
        // Inside a runtime, too.
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let inside = runtime.block_on(async { threads.wait_for(Duration::from_secs(20), async { 8 }) });
        assert_eq!(inside.unwrap(), Some(8));
    }

    #[test]
    fn a_task_that_has_not_begun_does_not_begin_when_its_future_is_dropped() {
        let threads = Threads::new().unwrap();
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let mut context = Context::from_waker(Waker::noop());
        let busy = || {
            let held = Arc::clone(&held);
            Box::pin(threads.run(move || Ok(held.lock().unwrap().recv().is_ok())))
        };
        let mut busy: Vec<_> = (0..THREADS_MAX).map(|_| busy()).collect();
        assert!(busy.iter_mut().all(|one| one.as_mut().poll(&mut context).is_pending()));
        assert!(threads.is_full());
        let (begun, begins) = mpsc::channel();
        let mut dropped = Box::pin(threads.run(move || Ok(begun.send(()).is_ok())));
        assert!(dropped.as_mut().poll(&mut context).is_pending());
        drop(dropped);
        drop(release);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(busy.into_iter().all(|one| !runtime.block_on(one).unwrap()), "nothing was sent");
        assert_eq!(begins.recv_timeout(Duration::from_secs(20)), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}

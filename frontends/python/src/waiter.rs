//! Waiter: reads of an event loop, which threads wait for.
//!
//! ```text
//!   event loop                                threads, 64 at most
//!   start(job) ------> queue ---------------> take one, wait for it
//!   is told by a socket <---- one byte ------ put the answer into `done`
//!   take(): answers, by their numbers
//! ```
//!
//! The loop watches the socket like any other, so no thread here knows of it, of Python, or of the GIL: threads may
//! outlive all three. Each loop has its own waiter, so a forked child, which lacks the threads, takes none of the
//! parent's locks.
//!
//! A job that is cancelled is not begun; if it was, its answer is dropped when it comes. Its memory is its own, so no
//! buffer of a caller's is written to after the call.
//!
//! Invariant: each job that is not cancelled has one answer. A panic is one, too.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::error::{Failure, Result};
use crate::memory::{Held, Pin};
use crate::wait::drop_detached;

/// A thread waits for one job, so this is the number of parallel jobs.
const THREADS_MAX: usize = 64;
/// A thread that has had nothing to do for so long ends.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// The result of a job.
pub(crate) enum Answer {
    Bytes(Vec<u8>),
    Ranges(Vec<Bytes>),
    Pin(Held),
    /// An object of a type that this file does not know, made under the GIL.
    Object(IntoObject),
}

type IntoObject = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

impl Answer {
    fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(match self {
            Answer::Bytes(bytes) => PyBytes::new(py, &bytes).into_any().unbind(),
            Answer::Ranges(ranges) => {
                PyList::new(py, ranges.iter().map(|range| PyBytes::new(py, range)))?.into_any().unbind()
            }
            Answer::Pin(held) => Py::new(py, Pin::from(held))?.into_any(),
            Answer::Object(into_object) => into_object(py)?,
        })
    }
}

type Work = Box<dyn FnOnce() -> Result<Answer> + Send>;

struct Job {
    number: u64,
    is_cancelled: Arc<AtomicBool>,
    work: Work,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    done: Vec<(u64, Result<Answer>)>,
    /// The flags of jobs that have no answer yet.
    flags: HashMap<u64, Arc<AtomicBool>>,
    threads: usize,
    idle: usize,
    /// Whether the loop is gone.
    is_closed: bool,
}

struct Shared {
    state: Mutex<State>,
    has_work: Condvar,
    bell: UnixStream,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's work until the queue stays empty.
    fn serve(&self) {
        while let Some(Job { number, is_cancelled, work }) = self.next() {
            // Relaxed: it only spares work. The lock orders what happens to the answer.
            if is_cancelled.load(Ordering::Relaxed) {
                continue;
            }
            let answer = catch_unwind(AssertUnwindSafe(work))
                .unwrap_or_else(|_| Err(Failure::io("a read panicked; standard error has its message")));
            let mut state = self.state();
            let is_wanted = state.flags.remove(&number).is_some();
            if !is_wanted {
                drop(state); // what gives back a pin takes locks of its own
                continue;
            }
            state.done.push((number, answer));
            drop(state);
            let _ = (&self.bell).write(&[0]); // a socket that is full has rung
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.queue.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                break;
            }
            state.idle += 1;
            let (waited, time) =
                self.has_work.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = waited;
            state.idle -= 1;
            if time.timed_out() && state.queue.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        None
    }
}

/// The reads of one event loop.
#[pyclass(frozen, module = "quinion._quinion")]
pub(crate) struct RawWaiter {
    shared: Arc<Shared>,
    ear: UnixStream,
    process: u32,
}

impl RawWaiter {
    /// Has a thread do `work`; its answer has that number.
    pub(crate) fn start(
        &self,
        number: u64,
        work: impl FnOnce() -> Result<Answer> + Send + 'static,
    ) -> PyResult<()> {
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let mut state = self.shared.state();
        state.flags.insert(number, Arc::clone(&is_cancelled));
        state.queue.push_back(Job { number, is_cancelled, work: Box::new(work) });
        let is_short = state.queue.len() > state.idle && state.threads < THREADS_MAX;
        if !is_short {
            drop(state);
            self.shared.has_work.notify_one();
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("quinion-async".into());
        match builder.spawn(move || shared.serve()) {
            Ok(_) => state.threads += 1,
            Err(_) if state.threads > 0 => {} // the others will come to it
            Err(error) => {
                state.queue.pop_back();
                state.flags.remove(&number);
                return Err(Failure::no_thread(&error).into());
            }
        }
        Ok(())
    }
}

#[pymethods]
impl RawWaiter {
    #[new]
    fn new() -> PyResult<Self> {
        let (ear, bell) = UnixStream::pair()?;
        ear.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        let shared = Shared { state: Mutex::default(), has_work: Condvar::new(), bell };
        Ok(Self { shared: Arc::new(shared), ear, process: std::process::id() })
    }

    fn fileno(&self) -> i32 {
        self.ear.as_raw_fd()
    }

    /// The answers that have come: number, value, and error.
    fn take(&self, py: Python<'_>) -> Vec<(u64, Option<Py<PyAny>>, Option<PyErr>)> {
        let mut rung = [0; 256];
        // Before the answers are taken: a later one writes another byte.
        while (&self.ear).read(&mut rung).is_ok_and(|bytes| bytes == rung.len()) {}
        let done = std::mem::take(&mut self.shared.state().done);
        let answers = done.into_iter().map(|(number, answer)| {
            let answer = answer.map_err(PyErr::from).and_then(|answer| answer.into_python(py));
            match answer {
                Ok(value) => (number, Some(value), None),
                Err(error) => (number, None, Some(error)),
            }
        });
        answers.collect()
    }

    /// The answer of that number is not wanted any more.
    fn cancel(&self, number: u64) {
        let flag = self.shared.state().flags.remove(&number);
        if let Some(flag) = flag {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for RawWaiter {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return; // a thread of the parent's may have had the lock
        }
        let mut state = self.shared.state();
        state.is_closed = true;
        state.flags.clear();
        let (queue, done) = (std::mem::take(&mut state.queue), std::mem::take(&mut state.done));
        drop(state);
        self.shared.has_work.notify_all();
        drop_detached((queue, done));
    }
}

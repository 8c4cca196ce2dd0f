//! Wait: Ctrl-C while a store is waited for, and ends that may wait.
//!
//! ```text
//!   main thread                      a thread of its own
//!   hands over what may wait ------> asks, fetches; its memory is its own
//!   waits 50 ms, lets Python look
//!   at its signals, waits again
//!   takes the answer  <------------- answers
//! ```
//!
//! Python runs signal handlers on its main thread, and there only between two steps of its own. So another thread does
//! what may wait for the main thread. If a handler raises, the answer is dropped when it comes, and its pins are
//! released. Other threads wait themselves.
//!
//! The end of a value may wait as well: a server that stalls is told of a pin for up to a second, and the close of a
//! file asks its file system, which may be served by another thread of this interpreter. Python collects its objects
//! under the GIL, so what such an object has is [`Detached`].
//!
//! Invariants:
//!  1. A thread that waits has neither memory of Python's nor the GIL. It may outlive the interpreter.
//!  2. Only threads of Python's drop a [`Detached`]: others would wait for a GIL that they do not need.

use std::ops::Deref;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::{Failure, Result};

/// The longest delay of Ctrl-C.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Drops a value without the GIL, or as it is where this thread has none: the interpreter has ended.
pub(crate) fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    Python::try_attach(|py| py.detach(|| drop(value.take())));
    drop(value);
}

/// A value of one of Python's objects whose end may wait: it is dropped without the GIL.
pub(crate) struct Detached<T: Send>(Option<T>);

impl<T: Send> From<T> for Detached<T> {
    fn from(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is taken by the drop alone")
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        drop_detached(self.0.take());
    }
}

/// The result of `work`, which may wait for long.
///
/// # Errors
/// That of `work`; what a signal handler raises.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    if !is_main_thread(py)? {
        return Ok(py.detach(work)?);
    }
    let (sender, mut receiver) = sync_channel(1);
    let answering = move || {
        let _ = sender.send(work()); // the main thread may have been interrupted
    };
    let spawned = std::thread::Builder::new().name("quinion-wait".into()).spawn(answering);
    spawned.map_err(|error| Failure::no_thread(&error))?;
    loop {
        let answer;
        (answer, receiver) = py.detach(move || (receiver.recv_timeout(SIGNALS_EVERY), receiver));
        match answer {
            Ok(answer) => return Ok(answer?),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(interrupt) = py.check_signals() {
                    py.detach(move || drop(receiver)); // an answer may be in it by now
                    return Err(interrupt);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::io("a read panicked; standard error has its message").into());
            }
        }
    }
}

/// Whether Python runs its signal handlers on this thread.
pub(crate) fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    threading.call_method0("get_ident")?.eq(main)
}

//! Blocking: calls that wait for a device, as futures of their results.
//!
//! ```text
//!   future --call, owned--> a thread for blocking calls
//!          <----waker------ result
//! ```
//!
//! A sync, and a write that cannot go to the cache at once, wait inside system calls or for memory, on a thread of
//! the cache: see `blocking_threads.rs`. Dropping a [`BlockingCall`] does not stop the call.
//!
//! Invariant: a call that panics is an error for its future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::File;
use crate::blocking_threads::{CallKind, CallQueue};
use crate::error::{Repr, Result};
use crate::sync::contained;

impl File {
    /// Has a thread make `call`, which may wait for this file's device.
    pub(super) fn run_blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> BlockingCall<T> {
        let outcome = Arc::new(Mutex::new(CallState::Running(Waker::noop().clone())));
        let told = Arc::clone(&outcome);
        let call = Box::new(move || {
            let ended = contained(call).unwrap_or_else(|| Err(Repr::Panicked.into()));
            let before = std::mem::replace(&mut *lock(&told), CallState::Ended(ended));
            if let CallState::Running(waker) = before {
                waker.wake();
            }
        });
        let device = self.handle.mapping.identity().shared_device();
        let queue = CallQueue { device, kind: CallKind::Write };
        match self.blocking_threads().run(queue, call) {
            Ok(()) => BlockingCall { outcome },
            Err(error) => BlockingCall::ready(Err(Repr::NoThread(error).into())),
        }
    }
}

/// Nothing panics inside a lock of this file, so a poisoned one is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum CallState<T> {
    Running(Waker),
    Ended(Result<T>),
    Taken,
}

/// A call that a thread of the cache makes, as a future of its result: see
/// [`File::sync_data_async`](crate::File::sync_data_async). Neither its first poll starts it nor its drop stops it.
#[must_use = "the call is made, but whether it succeeded is only known by waiting for it"]
pub struct BlockingCall<T> {
    outcome: Arc<Mutex<CallState<T>>>,
}

impl<T> BlockingCall<T> {
    pub(super) fn ready(result: Result<T>) -> Self {
        Self { outcome: Arc::new(Mutex::new(CallState::Ended(result))) }
    }
}

impl<T> Future for BlockingCall<T> {
    type Output = Result<T>;

    /// # Panics
    /// When it is polled after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut outcome = lock(&self.outcome);
        match std::mem::replace(&mut *outcome, CallState::Taken) {
            CallState::Running(_) => {
                *outcome = CallState::Running(context.waker().clone());
                Poll::Pending
            }
            CallState::Ended(result) => Poll::Ready(result),
            CallState::Taken => panic!("a future is not polled after it was ready"),
        }
    }
}

impl<T> fmt::Debug for BlockingCall<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_running = matches!(*lock(&self.outcome), CallState::Running(_));
        f.debug_struct("BlockingCall").field("is_running", &is_running).finish_non_exhaustive()
    }
}

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
//! Invariants:
//!  1. A call that panics is an error for its future.
//!  2. No waker is cloned, called or dropped with the outcome locked, or taken out: all three run foreign code.
//!  3. A forked child is told so, and never waits: the thread that makes the call is its parent's.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::File;
use crate::blocking_threads::{CallKind, CallQueue};
use crate::error::{Repr, Result};
use crate::sync::contained;
use crate::sys::fork::ForkGuard;

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
            Ok(()) => BlockingCall { outcome, process: self.process },
            Err(error) => BlockingCall::ready(Err(Repr::NoThread(error).into())),
        }
    }
}

/// Locks `mutex`. No thread panics inside a lock of this file, so a poisoned one is as good as any.
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
    process: ForkGuard,
}

impl<T> BlockingCall<T> {
    pub(super) fn ready(result: Result<T>) -> Self {
        Self { outcome: Arc::new(Mutex::new(CallState::Ended(result))), process: ForkGuard::new() }
    }
}

impl<T> Future for BlockingCall<T> {
    type Output = Result<T>;

    /// # Panics
    /// When it is polled after it was ready.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.process.is_forked() {
            return Poll::Ready(Err(Repr::Forked.into()));
        }
        let own = context.waker().clone();
        let mut outcome = lock(&self.outcome);
        if let CallState::Running(known) = &mut *outcome {
            let before = std::mem::replace(known, own);
            drop(outcome); // before the waker goes
            drop(before);
            return Poll::Pending;
        }
        let taken = std::mem::replace(&mut *outcome, CallState::Taken);
        drop(outcome);
        match taken {
            CallState::Ended(result) => Poll::Ready(result),
            _ => panic!("a future is not polled after it was ready"),
        }
    }
}

impl<T> fmt::Debug for BlockingCall<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In a fork a thread that is not there may have it locked.
        let is_running = !self.process.is_forked() && matches!(*lock(&self.outcome), CallState::Running(_));
        f.debug_struct("BlockingCall").field("is_running", &is_running).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    use super::*;

    fn running() -> BlockingCall<u32> {
        let outcome = Arc::new(Mutex::new(CallState::Running(Waker::noop().clone())));
        BlockingCall { outcome, process: ForkGuard::new() }
    }

    fn poll(call: &mut BlockingCall<u32>, waker: &Waker) -> Poll<Result<u32>> {
        Pin::new(call).poll(&mut Context::from_waker(waker))
    }

    /// Looks at its call as it goes.
    struct ChecksAtItsEnd(Arc<Mutex<CallState<u32>>>, Arc<AtomicBool>);

    impl Wake for ChecksAtItsEnd {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for ChecksAtItsEnd {
        fn drop(&mut self) {
            self.1.store(self.0.try_lock().is_ok(), Ordering::Relaxed);
        }
    }

    /// 1 a call is polled with a waker. 2 It is polled with another: the first is dropped, and its task may go with it.
    #[test]
    fn a_waker_is_dropped_with_the_outcome_unlocked() {
        let (mut call, is_free) = (running(), Arc::new(AtomicBool::new(false)));
        let checks = ChecksAtItsEnd(Arc::clone(&call.outcome), Arc::clone(&is_free));
        assert!(poll(&mut call, &Waker::from(Arc::new(checks))).is_pending());
        assert!(poll(&mut call, Waker::noop()).is_pending());
        assert!(is_free.load(Ordering::Relaxed));
    }
}

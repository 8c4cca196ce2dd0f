//! Blocking: calls that wait for a device, made on threads of the cache for futures.
//!
//! ```text
//!   future --call, owned--> queue --> up to 8 threads, started when none is idle
//!          <----waker------ result    a thread without work ends after some seconds
//! ```
//!
//! A sync, and a write that cannot go to the cache at once, wait inside system calls or for memory, on a thread of
//! the cache: so such a future needs no runtime, and blocks none. Dropping a [`BlockingCall`] does not stop the call.
//!
//! Invariants:
//!  1. A call that was handed over is made once, in its turn, while the process lives.
//!  2. A call that panics is an error for its future, and takes no thread with it.
//!  3. The threads keep no cache alive by themselves: only calls in the queue do.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::error::{Repr, Result};
use crate::sync::contained;

const THREADS_MAX: usize = 8;
const IDLE_MAX: Duration = Duration::from_secs(5);

type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct BlockingCalls {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    calls: VecDeque<Call>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

impl BlockingCalls {
    pub fn run<T: Send + 'static>(
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
        match self.shared.hand_over(call) {
            Ok(()) => BlockingCall { outcome },
            Err(error) => BlockingCall::ready(Err(Repr::NoThread(error).into())),
        }
    }
}

impl Drop for BlockingCalls {
    fn drop(&mut self) {
        lock(&self.shared.queue).is_closed = true;
        self.shared.arrived.notify_all();
    }
}

impl fmt::Debug for BlockingCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = lock(&self.shared.queue);
        f.debug_struct("BlockingCalls").field("threads", &queue.threads).finish_non_exhaustive()
    }
}

impl Shared {
    fn hand_over(self: &Arc<Self>, call: Call) -> io::Result<()> {
        let mut queue = lock(&self.queue);
        queue.calls.push_back(call);
        if queue.calls.len() <= queue.idle {
            self.arrived.notify_one();
        } else if queue.threads < THREADS_MAX {
            let shared = Arc::clone(self);
            let started =
                std::thread::Builder::new().name("quinion-blocking".into()).spawn(move || shared.work());
            match started {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    queue.calls.pop_back();
                    return Err(error);
                }
                Err(_) => {} // one of those that there are comes to it
            }
        }
        Ok(())
    }

    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(call) = queue.calls.pop_front() {
                drop(queue);
                call();
                queue = lock(&self.queue);
                continue;
            }
            if queue.is_closed {
                break;
            }
            queue.idle += 1;
            let (woken, wait) =
                self.arrived.wait_timeout(queue, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if wait.timed_out() && queue.calls.is_empty() {
                break;
            }
        }
        queue.threads -= 1;
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

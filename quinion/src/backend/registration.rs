//! Registration: how a future joins the wait queue, and leaves it.
//!
//! The queue knows its registry of futures and nothing of the poller's thread; this file starts that thread with the
//! first registration, and lets it end with the cache.

use std::io;
use std::sync::Arc;
use std::task::Waker;

use super::Backend;
use super::deferred_wakes::{Waiter, WakeCondition};
use super::wait_queue::WaitQueue;
use super::waker_registry::{PageKey, WaiterId};
use crate::sys::fork::ForkGuard;

/// The outcome of a registration.
#[derive(Debug)]
pub enum Registered {
    /// The condition is true already; the waker will not be called.
    Ready,
    /// The waker will be called when it is true, unless this is dropped before.
    Waiting(RegisteredWaiter),
}

/// A registered waiter; dropping this removes it.
#[derive(Debug)]
pub struct RegisteredWaiter {
    queue: Arc<WaitQueue>,
    number: WaiterId,
    process: ForkGuard,
}

impl Drop for RegisteredWaiter {
    fn drop(&mut self) {
        // In a fork the registry may be locked by a thread that is not there.
        if !self.process.is_forked() {
            drop(self.queue.waker_registry().cancel(self.number));
        }
    }
}

impl WaitQueue {
    /// Registers a future: `waker` is called once when `condition` is true, which is evaluated after every
    /// [`WaitQueue::wake_filled`] that covers `page`. `backend` is the one that makes it true; the poller leads it if
    /// no other thread does. Does not wait.
    ///
    /// # Errors
    /// The system has no thread for the poller.
    pub(crate) fn register(
        self: &Arc<Self>,
        backend: &Arc<dyn Backend>,
        page: PageKey,
        condition: Box<WakeCondition<'static>>,
        waker: Waker,
    ) -> io::Result<Registered> {
        let waiter = Waiter { condition, backend: Arc::clone(backend), waker };
        let Some(number) = self.waker_registry().register(page, waiter) else { return Ok(Registered::Ready) };
        let waiter = RegisteredWaiter { queue: Arc::clone(self), number, process: ForkGuard::new() };
        self.start_poller()?;
        Ok(Registered::Waiting(waiter))
    }

    /// Lets the poller end when it has nothing to do. No future registers after this.
    pub fn close(&self) {
        self.waker_registry().end_poller();
    }

    fn start_poller(self: &Arc<Self>) -> io::Result<()> {
        self.waker_registry().start_poller(|| {
            let queue = Arc::clone(self);
            let poller = std::thread::Builder::new().name("quinion-poller".into());
            poller.spawn(move || queue.waker_registry().poll()).map(drop)
        })
    }
}

//! Closers: threads that close descriptors whose close may wait.
//!
//! A descriptor that another process has sent may be of anything, and its last close may wait for as long as its maker
//! likes: a socket that lingers, a file of a hung file system. The same is true of a socket in which such a message
//! lies unread, and of a listener with such a connection in its queue. Who must not wait has a thread of its own close
//! them.
//!
//! Invariants:
//!  1. [`CloserThreads::close`] waits for nobody.
//!  2. While [`CloserThreads::are_all_busy`], nobody who might add to them is to be let in: so they are bounded.

use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that wait in a close at a time.
const CLOSERS_MAX: usize = 64;

/// How many threads wait in a close.
#[derive(Clone, Debug, Default)]
pub struct CloserThreads(Arc<AtomicUsize>);

impl CloserThreads {
    /// Whether there are as many as there may be.
    pub fn are_all_busy(&self) -> bool {
        self.waiting() >= CLOSERS_MAX // a bound that need not be exact
    }

    /// Closes that are under way.
    pub fn waiting(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Closes a descriptor whose close may wait, on a thread of its own.
    pub fn close(&self, descriptor: OwnedFd) {
        let closers = Arc::clone(&self.0);
        closers.fetch_add(1, Ordering::Relaxed);
        let close = ManuallyDrop::new(descriptor);
        let name = std::thread::Builder::new().name("quinion-close".into());
        let spawned = name.spawn(move || {
            drop(ManuallyDrop::into_inner(close));
            closers.fetch_sub(1, Ordering::Relaxed);
        });
        // No thread: it stays open, and counted, until this process ends; better than to wait.
        drop(spawned);
    }
}

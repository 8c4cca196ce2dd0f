//! Room: where readers wait for folios that somebody else is filling.
//!
//! Invariant: a sleeper that is counted before a change is woken after it. Not an
//! invariant: that who is woken finds its folio ready; it looks again and may sleep again.

use std::sync::Condvar;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use super::{Backend, Reap, Reaped};

/// One place to sleep for all who wait on one cache's fills.
///
/// A sleeper is woken when any fill completes or when leadership of a ring falls vacant, and looks
/// again. That is more waking than there need be with many sleepers and none too many with few.
#[derive(Debug, Default)]
pub struct WaitRoom {
    door: Mutex<()>,
    bell: Condvar,
    sleepers: AtomicUsize,
}

impl WaitRoom {
    /// An empty room.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until `done`, reaping `backend`'s completions meanwhile if nobody else does.
    pub fn wait(&self, backend: &dyn Backend, done: &mut dyn FnMut() -> bool) {
        while !done() {
            match backend.reap(Reap::Wait, done) {
                Reaped::Some(_) => {}
                Reaped::Busy | Reaped::Elsewhere => self.sleep(&mut || done() || backend.wants_leader()),
            }
        }
    }

    /// Sleeps until `woken`, which is looked at again after every [`WaitRoom::wake`].
    pub fn sleep(&self, woken: &mut dyn FnMut() -> bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Partner: the fence in `wake`. Either the waker sees us counted and rings, or its change came
        // first and we see it below.
        fence(Ordering::SeqCst);
        let mut door = self.door.lock().unwrap_or_else(PoisonError::into_inner);
        while !woken() {
            door = self.bell.wait(door).unwrap_or_else(PoisonError::into_inner);
        }
        drop(door);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Wakes all sleepers to look again. Called after the change they wait for.
    pub fn wake(&self) {
        // Partner: the fence in `sleep`.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // With the door held, a sleeper is either before its look, and will see the change, or asleep.
            drop(self.door.lock().unwrap_or_else(PoisonError::into_inner));
            self.bell.notify_all();
        }
    }
}

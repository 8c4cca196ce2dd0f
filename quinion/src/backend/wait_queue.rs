//! Room: where readers sleep until a folio that somebody else fills is ready.
//!
//! ```text
//!   sleeper: count itself, fence, lock, look, lie down ----------> rung: get up, look again
//!                                  |                                ^
//!   waker:   change, fence, anybody counted? lock, ask for each ----+
//! ```
//!
//! A sleeper leaves behind what it waits for, and it is the waker that looks:
//! it rouses those who are done and, for each backend that wants a leader, one
//! more. So with many sleepers a completion wakes the one whom it concerns, not
//! all of them; measured with 32 threads on one file that is a fifth of the context switches.
//! It rings when it has unlocked the door, and takes the bed out itself, so that a thread that is rung for does not
//! meet a locked door.
//!
//! Invariants:
//!  1. A bed's pointers are followed with the door locked only, and a bed is taken out, with the door
//!     locked, before it is rung for; its sleeper returns after that. So what they point to, on the
//!     sleeper's stack, is there.
//!  2. Between a sleeper's look and its lying down the door stays locked.
//!  3. A thread that was roused to lead and does not, because it is done, looks whether another should.
//!
//! Not an invariant: that a roused sleeper finds true what it was roused for. It looks again.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, PoisonError};

use crate::sync::lock::{Condvar, Mutex, MutexGuard};

use super::waker_registry::{PageKey, WakerRegistry};
use super::{Backend, ReapMode, ReapOutcome};

/// What a sleeper waits for: asked by itself and, while it sleeps, by a thread that wakes the room. So it must
/// be quick, and take no lock that is held by a caller of [`WaitQueue::wake`].
pub type WakeCondition<'a> = dyn FnMut() -> bool + Send + 'a;

/// One place to sleep for all who wait on one cache's fills.
#[derive(Default)]
pub struct WaitQueue {
    beds: Mutex<ParkedWaiters>,
    sleepers: AtomicUsize,
    /// Those who wait without a thread.
    waker_registry: WakerRegistry,
}

#[derive(Default)]
struct ParkedWaiters {
    taken: Vec<ParkedWaiter>,
}

/// One sleeper, for its wakers.
struct ParkedWaiter {
    wish: *mut WakeCondition<'static>,
    /// The backend that the sleeper would lead.
    backend: Option<*const dyn Backend>,
    bell: Arc<WakeEvent>,
}

/// What wakes one sleeper, once.
#[derive(Default)]
struct WakeEvent {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl WakeEvent {
    fn ring(&self) {
        *self.is_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
    fn wait(&self) {
        let mut is_rung = self.is_rung.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_rung {
            is_rung = self.changed.wait(is_rung).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

// SAFETY: the wish is `Send`, the backend is `Sync`, and both are used with the door locked.
unsafe impl Send for ParkedWaiter {}

impl WaitQueue {
    /// An empty room.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until `done`, reaping `backend`'s completions meanwhile if nobody else does.
    pub fn wait(&self, backend: &dyn Backend, done: &mut WakeCondition<'_>) {
        let mut has_slept = false;
        while !done() {
            match backend.reap(ReapMode::Wait, done) {
                ReapOutcome::Some(_) => {}
                ReapOutcome::Busy | ReapOutcome::Elsewhere => {
                    self.park(done, Some(backend));
                    has_slept = true;
                }
            }
        }
        // We may have been roused to lead, and only us.
        if has_slept && backend.wants_leader() {
            self.wake();
        }
    }

    /// Sleeps until `woken`, which is looked at again after every [`WaitQueue::wake`].
    pub fn sleep(&self, woken: &mut WakeCondition<'_>) {
        while !woken() {
            self.park(woken, None);
        }
    }

    /// Wakes those to look again for whom something may have changed. Called after the change they wait
    /// for, with no lock held that a sleeper's wish takes.
    pub fn wake(&self) {
        self.wake_sleepers();
        if self.waker_registry.has_waiters() {
            self.waker_registry.seek_leader();
        }
    }

    /// As [`WaitQueue::wake`], after a fill of `pages` pages from `first` on has ended: those futures, too, are
    /// woken who wait for one of these and may go on.
    pub fn wake_filled(&self, first: PageKey, pages: u32) {
        self.wake_sleepers();
        if self.waker_registry.has_waiters() {
            self.waker_registry.rouse(first, pages);
        }
    }

    fn wake_sleepers(&self) {
        // Partners: the fences in `park` and in `WakerRegistry::leave`. Either we see the sleeper counted and look
        // for it, or our change came first and it sees it before it lies down. For words: after this, as well.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            let rung = self.lock().rouse(); // and unlocked
            rung.iter().for_each(|bell| bell.ring());
        }
    }

    pub(super) fn waker_registry(&self) -> &WakerRegistry {
        &self.waker_registry
    }

    /// Sleeps, once, unless the wish has come true or `backend` wants a leader.
    fn park(&self, wish: &mut WakeCondition<'_>, backend: Option<&dyn Backend>) {
        let _counted = SleeperCount::new(&self.sleepers);
        // Partner: the fence in `wake`.
        fence(Ordering::SeqCst);
        let mut beds = self.lock();
        if wish() || backend.is_some_and(|backend| backend.wants_leader()) {
            return;
        }
        let bell = beds.take(wish, backend);
        drop(beds);
        bell.wait();
    }

    fn lock(&self) -> MutexGuard<'_, ParkedWaiters> {
        self.beds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ParkedWaiters {
    /// A bed for the caller, who must wait for its bell before what is given here goes away.
    fn take(&mut self, wish: &mut WakeCondition<'_>, backend: Option<&dyn Backend>) -> Arc<WakeEvent> {
        let wish = std::ptr::from_mut(wish);
        // SAFETY: only the lifetime changes, and invariant 1 keeps the pointer within the true one.
        let wish =
            unsafe { std::mem::transmute::<*mut WakeCondition<'_>, *mut WakeCondition<'static>>(wish) };
        let backend = backend.map(|backend| {
            // SAFETY: as above.
            unsafe {
                std::mem::transmute::<*const (dyn Backend + '_), *const (dyn Backend + 'static)>(backend)
            }
        });
        let bell = Arc::new(WakeEvent::default());
        self.taken.push(ParkedWaiter { wish, backend, bell: Arc::clone(&bell) });
        bell
    }

    /// Takes the beds out of everybody whose wish has come true, and of one sleeper for each backend that
    /// wants a leader. Their bells are to be rung, with the door unlocked.
    #[must_use]
    fn rouse(&mut self) -> Vec<Arc<WakeEvent>> {
        let mut led: Vec<*const ()> = Vec::new();
        let roused = self.taken.extract_if(.., |bed| {
            // SAFETY: the sleeper has not been rung for, and the door is locked: invariant 1. It lent its wish
            // for as long as it is in bed, so no other reference to it is in use.
            let is_granted = unsafe { (*bed.wish)() };
            is_granted || bed.should_lead(&mut led)
        });
        roused.map(|bed| bed.bell).collect()
    }
}

impl ParkedWaiter {
    /// Whether the sleeper's backend wants a leader and none of `led` has been roused for it; then it is
    /// put there.
    fn should_lead(&self, led: &mut Vec<*const ()>) -> bool {
        let Some(backend) = self.backend else { return false };
        // SAFETY: the sleeper has not been rung for, and the door is locked: invariant 1 of this file.
        let wants_leader = unsafe { (*backend).wants_leader() };
        let is_wanted = wants_leader && !led.contains(&backend.cast());
        if is_wanted {
            led.push(backend.cast());
        }
        is_wanted
    }
}

/// Counts a sleeper for as long as it lives.
struct SleeperCount<'a>(&'a AtomicUsize);

impl<'a> SleeperCount<'a> {
    fn new(sleepers: &'a AtomicUsize) -> Self {
        sleepers.fetch_add(1, Ordering::Relaxed);
        Self(sleepers)
    }
}

impl Drop for SleeperCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for WaitQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitRoom")
            .field("sleepers", &self.sleepers.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::super::testing::Request;
    use super::super::{Faults, MemoryFile, SimulatedBackend};
    use super::*;

    fn device(room: &Arc<WaitQueue>) -> SimulatedBackend {
        let device = SimulatedBackend::of_memory(Arc::new(MemoryFile::new(vec![1; 4096])), Faults::default());
        device.attach(room);
        device
    }

    #[test]
    fn a_wake_rings_for_those_it_concerns() {
        let room = Arc::new(WaitQueue::new());
        let (busy, idle) = (device(&room), device(&room));
        let (fill, _request) = Request::new(&room, 0, 1);
        busy.submit(vec![fill]);
        let (mut granted, mut open) = (|| true, [(); 5].map(|()| || false));
        let mut beds = ParkedWaiters::default();
        let mut bells = vec![beds.take(&mut granted, None)];
        let backends: [Option<&dyn Backend>; 5] = [None, Some(&idle), Some(&busy), Some(&busy), Some(&idle)];
        for (wish, backend) in open.iter_mut().zip(backends) {
            bells.push(beds.take(wish, backend));
        }
        let rung = beds.rouse();
        let is_rung = |bell: &Arc<WakeEvent>| rung.iter().any(|other| Arc::ptr_eq(bell, other));
        assert_eq!(bells.iter().map(is_rung).collect::<Vec<_>>(), [true, false, false, true, false, false]);
        assert_eq!(beds.taken.len(), 4, "who is rung for has no bed");
    }

    /// The leader goes and one follower is roused to lead; but it is done by then. The other must hear of it.
    #[test]
    fn who_is_roused_to_lead_and_does_not_passes_it_on() {
        for _ in 0..20 {
            let room = Arc::new(WaitQueue::new());
            let device = device(&room);
            let (fill, request) = Request::new(&room, 0, 1);
            device.submit(vec![fill]);
            let (early, late) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let are_there = AtomicBool::new(false);
            let asked = |asks: &AtomicUsize| {
                while asks.load(Ordering::Relaxed) < 2 {
                    std::thread::yield_now();
                }
            };
            std::thread::scope(|scope| {
                device.reap(ReapMode::Wait, &mut || {
                    // Asked when it comes, when it lies down, by its waker, and when it is up: done only then.
                    scope.spawn(|| {
                        room.wait(&device, &mut || early.fetch_add(1, Ordering::Relaxed) >= 3);
                    });
                    asked(&early);
                    scope.spawn(|| {
                        room.wait(&device, &mut || {
                            late.fetch_add(1, Ordering::Relaxed);
                            request.is_done()
                        });
                    });
                    asked(&late);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    are_there.store(true, Ordering::Relaxed);
                    true
                });
            });
            assert!(are_there.load(Ordering::Relaxed) && request.take().is_ok());
        }
    }
}

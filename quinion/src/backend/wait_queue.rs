//! Wait queue: where threads sleep until a folio that another thread fills is ready.
//!
//! ```text
//!   waiter:  count itself, fence, lock, evaluate its condition, sleep ----> woken: evaluate it again
//!                                  |                                         ^
//!   waker:   change, fence, any waiter counted? lock, evaluate theirs -------+
//! ```
//!
//! A waiter leaves a pointer to its condition behind, and the waker evaluates it: it wakes the threads whose condition
//! is true and, for each backend that wants a leader, one more. So a completion wakes the waiter that it concerns, and
//! not all of them; with 32 threads on one file that is a fifth of the context switches. The waker sets a waiter's
//! event after it has released the lock, so that the woken thread does not wait for that.
//!
//! Futures wait in the same queue without a thread: see `waker_registry.rs`. Those that the waiting thread is to wake,
//! as it reaps, do not wait for its own end: see `deferred_wakes.rs`.
//!
//! Invariants:
//!  1. The pointers of a waiter are followed with the list locked only; a waiter is removed, with the list locked,
//!     before its event is set, or by its own thread; and that returns after that. So the stack of that thread, which
//!     they point into, is there.
//!  2. Between the evaluation of a waiter's condition and its place in the list the list stays locked.
//!  3. A thread that was woken to lead and does not, because it is done or panics, wakes another if one is wanted.
//!  4. A condition or a backend that panics takes no other waiter with it, nor the thread that wakes: its own thread is
//!     woken, asks again, and has the panic.
//!
//! Not an invariant: that the condition of a woken thread is still true when it runs. It looks again.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::deferred_wakes::{BlockingWait, WakeCondition};
use super::waker_registry::{PageKey, WakerRegistry};
use super::{Backend, ReapMode, ReapOutcome};
use crate::sync::contained;

/// Where all threads and futures of one cache wait for fills.
#[derive(Default)]
pub struct WaitQueue {
    parked: Mutex<ParkedWaiters>,
    sleepers: AtomicUsize,
    /// Futures, which wait without a thread.
    waker_registry: WakerRegistry,
}

#[derive(Default)]
struct ParkedWaiters {
    waiters: Vec<ParkedWaiter>,
}

struct ParkedWaiter {
    condition: *mut WakeCondition<'static>,
    backend: Option<*const dyn Backend>,
    event: Arc<WakeEvent>,
}

#[derive(Default)]
struct WakeEvent {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl WakeEvent {
    fn set(&self) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
    fn wait(&self) {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(is_set, |is_set| !*is_set).unwrap_or_else(PoisonError::into_inner));
    }
    /// Whether it was set in time.
    fn wait_for(&self, time: Duration) -> bool {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(is_set, time, |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

// SAFETY: the condition is `Send`, the backend is `Sync`, and both are used with the queue locked.
unsafe impl Send for ParkedWaiter {}

impl WaitQueue {
    /// An empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until `done`, reaping `backend`'s completions meanwhile if no other thread does.
    pub fn wait(&self, backend: &dyn Backend, done: &mut WakeCondition<'_>) {
        self.wait_until(backend, done, None);
    }

    /// As [`WaitQueue::wait`], for about `time` at most, for a condition that may become true without a wake, or never.
    /// Whether it became true.
    pub fn wait_for(&self, backend: &dyn Backend, done: &mut WakeCondition<'_>, time: Duration) -> bool {
        self.wait_until(backend, done, Some(Instant::now() + time))
    }

    fn wait_until(
        &self,
        backend: &dyn Backend,
        done: &mut WakeCondition<'_>,
        until: Option<Instant>,
    ) -> bool {
        let mut blocking = None;
        let mut turn = LeaderTurn { queue: self, backend, has_slept: false };
        let mut is_done = done();
        while !is_done {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            blocking.get_or_insert_with(BlockingWait::begin);
            match backend.reap(left.map_or(ReapMode::Wait, ReapMode::WaitFor), done) {
                ReapOutcome::Some(_) => {}
                ReapOutcome::Busy | ReapOutcome::Elsewhere => {
                    self.park(done, Some(backend), left);
                    turn.has_slept = true;
                }
            }
            is_done = done();
        }
        is_done
    }

    /// Sleeps until `woken`, which is looked at again after every [`WaitQueue::wake`].
    pub fn sleep(&self, woken: &mut WakeCondition<'_>) {
        let mut blocking = None;
        while !woken() {
            blocking.get_or_insert_with(BlockingWait::begin);
            self.park(woken, None, None);
        }
    }

    /// Wakes the threads for which something may have changed. To be called after the change, with no lock of a
    /// condition held.
    pub fn wake(&self) {
        self.wake_sleepers();
        if self.waker_registry.has_waiters() {
            self.waker_registry.seek_leader();
        }
    }

    /// As [`WaitQueue::wake`], after a fill of `pages` pages from `first` on has ended: futures that wait for one of
    /// these pages and may go on are woken, too.
    pub(crate) fn wake_filled(&self, first: PageKey, pages: u32) {
        self.wake_sleepers();
        if self.waker_registry.has_waiters() {
            self.waker_registry.wake_filled(first, pages);
        }
    }

    fn wake_sleepers(&self) {
        // Partners: the fences in `park` and in `WakerRegistry::register`. Either this thread sees the waiter counted
        // and looks for it, or its change came first and the waiter sees that before it sleeps. Of futures: after
        // this, as well.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            let woken_events = self.lock().take_woken(); // and the lock is released
            woken_events.iter().for_each(|event| event.set());
        }
    }

    pub(super) fn waker_registry(&self) -> &WakerRegistry {
        &self.waker_registry
    }

    /// Sleeps, once, unless the condition is true or `backend` wants a leader; for `time` at most, if there is a bound.
    fn park(&self, condition: &mut WakeCondition<'_>, backend: Option<&dyn Backend>, time: Option<Duration>) {
        let _counted = SleeperCount::new(&self.sleepers);
        // Partner: the fence in `wake`.
        fence(Ordering::SeqCst);
        let mut parked = self.lock();
        if condition() || backend.is_some_and(|backend| backend.wants_leader()) {
            return;
        }
        let event = parked.take(condition, backend);
        drop(parked);
        let Some(time) = time else { return event.wait() };
        if !event.wait_for(time) && !self.lock().forget(&event) {
            event.wait(); // it was removed just now, and is set at once
        }
    }

    fn lock(&self) -> MutexGuard<'_, ParkedWaiters> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ParkedWaiters {
    /// Adds the caller, which must wait for the event before the lent references end.
    fn take(&mut self, condition: &mut WakeCondition<'_>, backend: Option<&dyn Backend>) -> Arc<WakeEvent> {
        let condition = std::ptr::from_mut(condition);
        // SAFETY: only the lifetime changes, and invariant 1 keeps the pointer within the true one.
        let condition =
            unsafe { std::mem::transmute::<*mut WakeCondition<'_>, *mut WakeCondition<'static>>(condition) };
        let backend = backend.map(|backend| {
            // SAFETY: as above.
            unsafe {
                std::mem::transmute::<*const (dyn Backend + '_), *const (dyn Backend + 'static)>(backend)
            }
        });
        let event = Arc::new(WakeEvent::default());
        self.waiters.push(ParkedWaiter { condition, backend, event: Arc::clone(&event) });
        event
    }

    /// Removes a waiter that waits no longer. `false`: it was removed already.
    fn forget(&mut self, event: &Arc<WakeEvent>) -> bool {
        let at = self.waiters.iter().position(|waiter| Arc::ptr_eq(&waiter.event, event));
        at.is_some_and(|at| {
            self.waiters.remove(at);
            true
        })
    }

    /// Removes waiters to wake, and one for each backend that wants a leader. Set their events with the lock released.
    #[must_use]
    fn take_woken(&mut self) -> Vec<Arc<WakeEvent>> {
        let mut led: Vec<*const ()> = Vec::new();
        let woken = self.waiters.extract_if(.., |waiter| {
            // SAFETY: the waiter is in the list, and that is locked: invariant 1. It lent its condition for as long as
            // it is there, so no other reference to it is in use.
            let is_true = contained(|| unsafe { (*waiter.condition)() }).unwrap_or(true);
            is_true || waiter.should_lead(&mut led)
        });
        woken.map(|waiter| waiter.event).collect()
    }
}

impl ParkedWaiter {
    /// Whether the thread's backend wants a leader, and is not in `led`, where it is put then.
    fn should_lead(&self, led: &mut Vec<*const ()>) -> bool {
        let Some(backend) = self.backend else { return false };
        // SAFETY: the waiter is in the list, and that is locked: invariant 1 of this file.
        let wants_leader = contained(|| unsafe { (*backend).wants_leader() }).unwrap_or(true);
        let is_wanted = wants_leader && !led.contains(&backend.cast());
        if is_wanted {
            led.push(backend.cast());
        }
        is_wanted
    }
}

/// A thread that waits, and may have been the only one that was woken to lead. Dropping this, also as a condition or
/// the backend panics, wakes another if one is wanted.
struct LeaderTurn<'w> {
    queue: &'w WaitQueue,
    backend: &'w dyn Backend,
    has_slept: bool,
}

impl Drop for LeaderTurn<'_> {
    fn drop(&mut self) {
        let may_have_led = self.has_slept || std::thread::panicking();
        if may_have_led && contained(|| self.backend.wants_leader()).unwrap_or(true) {
            self.queue.wake();
        }
    }
}

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
        f.debug_struct("WaitQueue")
            .field("sleepers", &self.sleepers.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::super::MemoryFile;
    use super::super::doubles::{Faults, Request, SimulatedBackend};
    use super::*;

    fn device(queue: &Arc<WaitQueue>) -> SimulatedBackend {
        let device = SimulatedBackend::of_memory(Arc::new(MemoryFile::new(vec![1; 4096])), Faults::default());
        device.attach(queue);
        device
    }

    #[test]
    fn a_wake_wakes_those_that_it_concerns() {
        let queue = Arc::new(WaitQueue::new());
        let (busy, idle) = (device(&queue), device(&queue));
        let (fill, _request) = Request::new(&queue, 0, 1);
        busy.submit(vec![fill]);
        let (mut granted, mut open) = (|| true, [(); 5].map(|()| || false));
        let mut parked = ParkedWaiters::default();
        let mut events = vec![parked.take(&mut granted, None)];
        let backends: [Option<&dyn Backend>; 5] = [None, Some(&idle), Some(&busy), Some(&busy), Some(&idle)];
        for (condition, backend) in open.iter_mut().zip(backends) {
            events.push(parked.take(condition, backend));
        }
        let woken_events = parked.take_woken();
        let is_set = |event: &Arc<WakeEvent>| woken_events.iter().any(|other| Arc::ptr_eq(event, other));
        assert_eq!(events.iter().map(is_set).collect::<Vec<_>>(), [true, false, false, true, false, false]);
        assert_eq!(parked.waiters.len(), 4, "what was woken is in the list no more");
    }

    #[test]
    fn a_condition_that_panics_loses_no_other_waiter() {
        let mut parked = ParkedWaiters::default();
        let mut granted = [(); 2].map(|()| || true);
        let [first, last] = &mut granted;
        let (mut panics, mut open) = (|| panic!("a condition that panics"), || false);
        let mut events = vec![parked.take(first, None)];
        events.push(parked.take(&mut panics, None));
        events.push(parked.take(last, None));
        events.push(parked.take(&mut open, None));
        let woken_events = parked.take_woken();
        let is_set = |event: &Arc<WakeEvent>| woken_events.iter().any(|other| Arc::ptr_eq(event, other));
        assert_eq!(events.iter().map(is_set).collect::<Vec<_>>(), [true, true, true, false]);
        assert_eq!(parked.waiters.len(), 1);
    }

    /// Waits that end by themselves, beside wakes that take them out at the same moment.
    #[test]
    fn a_wait_with_a_bound_ends_and_leaves_nothing_behind() {
        let queue = Arc::new(WaitQueue::new());
        let idle = device(&queue);
        assert!(!queue.wait_for(&idle, &mut || false, Duration::from_millis(1)));
        assert!(queue.wait_for(&idle, &mut || true, Duration::ZERO));
        let (ends, waits) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ends.load(Ordering::Relaxed) {
                        let mut is_even = waits.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
                        let mut turns = || std::mem::replace(&mut is_even, true);
                        queue.wait_for(&idle, &mut turns, Duration::from_micros(50));
                    }
                });
            }
            while waits.load(Ordering::Relaxed) < 2000 {
                queue.wake();
            }
            ends.store(true, Ordering::Relaxed);
        });
        assert!(queue.lock().waiters.is_empty() && queue.sleepers.load(Ordering::Relaxed) == 0);
    }

    /// The leader goes and one follower is woken to lead; but it is done by then. The other must be woken.
    #[test]
    fn a_thread_that_was_woken_to_lead_and_does_not_wakes_another() {
        for _ in 0..20 {
            let queue = Arc::new(WaitQueue::new());
            let device = device(&queue);
            let (fill, request) = Request::new(&queue, 0, 1);
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
                    // Asked when it comes, before it sleeps, by its waker, and when it is awake: done only then.
                    scope.spawn(|| {
                        queue.wait(&device, &mut || early.fetch_add(1, Ordering::Relaxed) >= 3);
                    });
                    asked(&early);
                    scope.spawn(|| {
                        queue.wait(&device, &mut || {
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

    /// As above, but the thread that was woken to lead panics when it asks whether it is done.
    #[test]
    fn a_thread_that_was_woken_to_lead_and_panics_wakes_another() {
        for _ in 0..20 {
            let queue = Arc::new(WaitQueue::new());
            let device = device(&queue);
            let (fill, request) = Request::new(&queue, 0, 1);
            device.submit(vec![fill]);
            let (early, late) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let asked = |asks: &AtomicUsize| {
                while asks.load(Ordering::Relaxed) < 2 {
                    std::thread::yield_now();
                }
            };
            std::thread::scope(|scope| {
                device.reap(ReapMode::Wait, &mut || {
                    scope.spawn(|| {
                        let mut done = || {
                            assert!(early.fetch_add(1, Ordering::Relaxed) < 3, "a condition that panics");
                            false
                        };
                        assert!(contained(|| queue.wait(&device, &mut done)).is_none());
                    });
                    asked(&early);
                    scope.spawn(|| {
                        let mut done = || {
                            late.fetch_add(1, Ordering::Relaxed);
                            request.is_done()
                        };
                        assert!(queue.wait_for(&device, &mut done, Duration::from_secs(10)), "nobody leads");
                    });
                    asked(&late);
                    std::thread::sleep(Duration::from_millis(1));
                    true
                });
            });
            assert!(request.take().is_ok());
        }
    }
}

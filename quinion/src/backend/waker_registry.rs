//! Waker registry: the futures that wait for a fill, and the poller, one thread that waits for all of them.
//!
//! ```text
//!   future --register: page, condition, waker--> registry <--a fill has ended: its pages-- condition true? wake()
//!                                          |
//!                                          +--> the poller: leads a backend that futures wait for and no
//!                                               thread leads
//! ```
//!
//! A **waiter** is a page, a condition and a waker: the thread that ends a fill of the page evaluates the condition,
//! and if it is true removes the waiter and calls the waker, once. Waiters lie in the order of their pages, so a fill
//! looks at those that it concerns only.
//!
//! The **poller** is a thread that starts with the first future of a cache that waits, and leads for all of them when
//! no waiting reader does. It sleeps while there are none, and ends with the cache.
//!
//! Invariants:
//!  1. Wakers are called and waiters dropped with the registry unlocked: both run foreign code.
//!  2. Between the evaluation of a condition and the registration the registry stays locked.
//!  3. While there is a waiter, `waiters` is not 0; so every wake of the queue comes here. A condition becomes true
//!     only by a fill of its page that ends.
//!  4. The poller sleeps only after it saw, with the registry locked, that no waiter's backend wants a leader.
//!  5. A waker or a backend that panics takes neither the poller nor another future's wake-up with it.
//!  6. No waker is called by a thread while it has a [`DeferredWakes`](super::DeferredWakes): then it holds locks, and
//!     a backend that completes inside `submit` would have wakers called under them. See `deferred_wakes.rs`.
//!  7. A waker that drops the last handle of a cache inside the end of a fill can be told from others (`is_waking`):
//!     that fill counts as under way until the waker returns, so its end cannot be waited for there.
//!
//! Not an invariant: that the condition of a waiter that was woken is still true when its future looks.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::deferred_wakes::Waiter;
use super::{Backend, ReapMode};
use crate::sync::contained;
use crate::units::{MappingId, PageIndex};

#[derive(Default)]
pub(super) struct WakerRegistry {
    state: Mutex<RegistryState>,
    waiters: AtomicUsize,
    wakes_poller: Condvar,
}

#[derive(Default)]
struct RegistryState {
    last: u64,
    waiters: BTreeMap<WaiterId, Waiter>,
    /// The backends of all waiters, by address, and how many waiters wait for each.
    backends: BTreeMap<usize, (Arc<dyn Backend>, usize)>,
    poller: Poller,
    /// Whether the poller sleeps, and has not been woken yet.
    is_asleep: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Poller {
    /// The poller has not been needed yet.
    #[default]
    None,
    Running,
    /// The queue is closed: it ends when nothing is left to do.
    Ending,
}

/// A page that is waited for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PageKey {
    /// The mapping of the page's file.
    pub mapping: MappingId,
    /// Which page.
    pub page: PageIndex,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct WaiterId {
    page: PageKey,
    turn: u64,
}

impl WakerRegistry {
    /// To be asked after a full fence by a thread that made a change.
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// After a fill of `pages` pages from `first` on.
    pub(super) fn wake_filled(&self, first: PageKey, pages: u32) {
        let mut state = self.lock();
        let ready = state.take_ready(first, pages);
        if state.may_end() {
            self.wake_poller(state);
        } else {
            self.wake_poller_to_lead(state);
        }
        self.waiters.fetch_sub(ready.len(), Ordering::Relaxed);
        ready.into_iter().for_each(Waiter::notify);
    }

    pub(super) fn seek_leader(&self) {
        self.wake_poller_to_lead(self.lock());
    }

    /// Has `start` start the poller, if it has not been needed yet.
    pub(super) fn start_poller(&self, start: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.lock();
        if state.poller == Poller::None {
            start()?;
            state.poller = Poller::Running;
        }
        Ok(())
    }

    pub(super) fn end_poller(&self) {
        let mut state = self.lock();
        if state.poller == Poller::Running {
            state.poller = Poller::Ending;
        }
        self.wake_poller(state);
    }

    /// Wakes the poller, unless it is awake: then it looks at the state before it sleeps, and a system call is saved.
    fn wake_poller(&self, mut state: MutexGuard<'_, RegistryState>) {
        let is_asleep = std::mem::take(&mut state.is_asleep);
        drop(state);
        if is_asleep {
            self.wakes_poller.notify_one();
        }
    }

    fn wake_poller_to_lead(&self, state: MutexGuard<'_, RegistryState>) {
        if state.is_asleep && state.leaderless().is_some() {
            self.wake_poller(state);
        }
    }

    /// Registers a waiter, unless its condition is true already; returns its number then.
    pub(super) fn register(&self, page: PageKey, mut waiter: Waiter) -> Option<WaiterId> {
        let counted = WaiterCount::new(&self.waiters);
        // Partner: the fence in `WaitQueue::wake_filled`. Either the waker sees this waiter counted and
        // evaluates its condition, or the waker's change came first and is seen now.
        fence(Ordering::SeqCst);
        let mut state = self.lock();
        if (waiter.condition)() {
            drop(state); // before the waiter is dropped
            return None;
        }
        let is_needed = waiter.backend.wants_leader();
        counted.keep(); // last: a backend that panics registers nothing
        let number = state.put(page, waiter);
        if is_needed {
            self.wake_poller(state);
        }
        Some(number)
    }

    pub(super) fn cancel(&self, number: WaiterId) -> Option<Waiter> {
        let mut state = self.lock();
        let waiter = state.take(number)?;
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        if state.may_end() {
            self.wake_poller(state);
        }
        Some(waiter)
    }

    pub(super) fn poll(&self) {
        crate::sys::signal::block_all();
        while let Some(backend) = self.next_to_lead() {
            // A user's backend or waker that panics has printed so; the others go on.
            contained(|| self.lead(&*backend));
        }
    }

    /// Not before a completion has come, so that the poller does not switch between two backends for nothing.
    fn lead(&self, backend: &dyn Backend) {
        let mut has_checked = false;
        backend.reap(ReapMode::Wait, &mut || {
            let (state, is_first_check) = (self.lock(), !std::mem::replace(&mut has_checked, true));
            // Backends that share what is being led want no leader.
            state.waiters.is_empty() || !is_first_check && state.leaderless().is_some()
        });
    }

    fn next_to_lead(&self) -> Option<Arc<dyn Backend>> {
        let mut state = self.lock();
        loop {
            if let Some(backend) = state.leaderless() {
                return Some(backend);
            }
            if state.may_end() {
                return None;
            }
            state.is_asleep = true;
            state = self.wakes_poller.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.is_asleep = false;
        }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RegistryState {
    /// Whether the poller is to end, and has no one left to wait for.
    fn may_end(&self) -> bool {
        self.poller == Poller::Ending && self.waiters.is_empty()
    }

    fn put(&mut self, page: PageKey, waiter: Waiter) -> WaiterId {
        let backend = || (Arc::clone(&waiter.backend), 0);
        self.backends.entry(address(&waiter.backend)).or_insert_with(backend).1 += 1;
        self.last += 1;
        let number = WaiterId { page, turn: self.last };
        self.waiters.insert(number, waiter);
        number
    }

    /// Removes a waiter. It still holds its backend, so no foreign code is dropped here.
    fn take(&mut self, number: WaiterId) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        let address = address(&waiter.backend);
        let (_, waiters) = self.backends.get_mut(&address).expect("a waiter's backend is counted");
        *waiters -= 1;
        if *waiters == 0 {
            self.backends.remove(&address);
        }
        Some(waiter)
    }

    /// Removes the waiters for `pages` pages from `first` on whose condition is true.
    fn take_ready(&mut self, first: PageKey, pages: u32) -> Vec<Waiter> {
        let end = PageKey { page: first.page.plus(u64::from(pages)), ..first };
        let [first, end] = [first, end].map(|page| WaiterId { page, turn: 0 });
        let asked = self.waiters.range_mut(first..end);
        let ready: Vec<_> =
            asked.filter_map(|(number, waiter)| waiter.is_ready().then_some(*number)).collect();
        ready.into_iter().filter_map(|number| self.take(number)).collect()
    }

    fn leaderless(&self) -> Option<Arc<dyn Backend>> {
        let wants_leader = |backend: &dyn Backend| contained(|| backend.wants_leader()) == Some(true);
        let (backend, _) = self.backends.values().find(|(backend, _)| wants_leader(&**backend))?;
        Some(Arc::clone(backend))
    }
}

impl Waiter {
    /// Whether its future is to look. One whose condition panics is: it asks again, and has the panic.
    fn is_ready(&mut self) -> bool {
        contained(|| (self.condition)()).unwrap_or(true)
    }
}

fn address(backend: &Arc<dyn Backend>) -> usize {
    Arc::as_ptr(backend).cast::<()>().addr()
}

struct WaiterCount<'a>(&'a AtomicUsize);

impl<'a> WaiterCount<'a> {
    fn new(waiters: &'a AtomicUsize) -> Self {
        waiters.fetch_add(1, Ordering::Relaxed);
        Self(waiters)
    }
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for WaiterCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for WakerRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WakerRegistry")
            .field("waiters", &self.waiters.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Wake, Waker};

    use super::super::MemoryFile;
    use super::*;

    struct Counts(AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Three futures wait for a page. The second's condition panics when it is asked by the thread that has filled it.
    #[test]
    fn a_condition_that_panics_loses_no_other_future() {
        let (registry, counts) = (WakerRegistry::default(), Arc::new(Counts(AtomicUsize::new(0))));
        let page = PageKey { mapping: MappingId(1), page: PageIndex(0) };
        for number in 0..3 {
            let mut is_asked = false;
            let condition = Box::new(move || {
                assert!(number != 1 || !is_asked, "a condition that panics");
                std::mem::replace(&mut is_asked, true)
            });
            let (backend, waker) = (Arc::new(MemoryFile::new([])), Waker::from(Arc::clone(&counts)));
            assert!(registry.register(page, Waiter { condition, backend, waker }).is_some());
        }
        registry.wake_filled(page, 1);
        assert_eq!(counts.0.load(Ordering::Relaxed), 3);
        assert!(!registry.has_waiters());
    }

    #[derive(Debug)]
    struct PanicsWhenAsked(MemoryFile);

    impl Backend for PanicsWhenAsked {
        fn name(&self) -> &'static str {
            "panics when asked"
        }
        fn attributes(&self) -> io::Result<super::super::Attributes> {
            self.0.attributes()
        }
        fn submit(&self, fills: Vec<super::super::Fill>) {
            self.0.submit(fills);
        }
        fn wants_leader(&self) -> bool {
            panic!("a backend that panics")
        }
    }

    /// A waiter that was not registered is not counted: each wake-up would look for it.
    #[test]
    fn a_backend_that_panics_while_a_future_registers_leaves_no_count() {
        let registry = WakerRegistry::default();
        let page = PageKey { mapping: MappingId(1), page: PageIndex(0) };
        let (condition, waker) = (Box::new(|| false), Waker::noop().clone());
        let waiter = Waiter { condition, backend: Arc::new(PanicsWhenAsked(MemoryFile::new([]))), waker };
        assert!(contained(|| registry.register(page, waiter)).is_none());
        assert!(!registry.has_waiters() && registry.lock().waiters.is_empty());
    }
}

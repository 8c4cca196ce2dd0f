//! Deferred wakes: the wakers of futures that a thread may not call yet, because it holds locks.
//!
//! ```text
//!   DeferredWakes    wakers that this thread is to call go to a list of its own; it calls them at the end
//!     BlockingWait   while it sleeps in between they go to a thread for wakes, and so does what is in the list
//! ```
//!
//! A thread that waits for memory, for pins or for a transfer ends the fills of others meanwhile. It may wait for one
//! of their futures: a task that pins all memory, say, and lets go after one more read. So a thread that blocks calls
//! no waker and keeps none. The thread for wakes is started with the first of them and ends with the [`DeferredWakes`];
//! it holds nothing, and does nothing else.
//!
//! Invariants:
//!  1. No waker is called by a thread while it has a [`DeferredWakes`].
//!  2. A thread that sleeps in a [`BlockingWait`] has no waker in its list, unless the system had no thread.
//!  3. Each waiter that comes here is notified once.
//!
//! The locks of a mapping that others may hold while they wait are taken by [`lock_and_wake`]: what the thread has
//! deferred does not wait for them either.
//!
//! Not an invariant: that wakers are called in the order in which their fills ended. Nor that a thread calls what it
//! deferred before it blocks elsewhere: in a backend of the user's. Nor that there are few threads for wakes: a waker
//! that blocks, which it must not, keeps its thread, and the next call that sleeps starts another.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::{Arc, mpsc};
use std::task::Waker;
use std::time::Duration;

use super::Backend;
use crate::sync::contained;

/// The condition that a thread or a future waits for, evaluated by the waiter and, meanwhile, by a thread that wakes
/// it. So it must be quick, and take no lock that is held by a caller of [`WaitQueue::wake`](super::WaitQueue::wake).
pub type WakeCondition<'a> = dyn FnMut() -> bool + Send + 'a;

pub(super) struct Waiter {
    pub condition: Box<WakeCondition<'static>>,
    pub backend: Arc<dyn Backend>,
    pub waker: Waker,
}

std::thread_local! {
    static WAKING: Cell<u32> = const { Cell::new(0) };
    static DEFERRING: Cell<u32> = const { Cell::new(0) };
    static BLOCKING: Cell<u32> = const { Cell::new(0) };
    /// Whether there may be something in the list below: it has a destructor, so that to look at it costs more.
    static HAS_DEFERRED: Cell<bool> = const { Cell::new(false) };
    static DEFERRED: RefCell<DeferredList> = const { RefCell::new(DeferredList::EMPTY) };
}

impl Waiter {
    /// Calls the waker, or has it called when this thread may, or by another.
    pub(super) fn notify(self) {
        defer(self).into_iter().for_each(Waiter::wake);
    }

    fn wake(self) {
        let _waking = WakingGuard::new();
        contained(|| {
            let waiter = self;
            waiter.waker.wake_by_ref();
        });
    }
}

/// Whether the caller is called by a waker, and so inside the end of a fill.
pub(crate) fn is_waking() -> bool {
    WAKING.get() > 0
}

/// A thread that calls a waker does not sleep, though the call that made it do so may: the waker may read and defer.
struct WakingGuard {
    blocking: u32,
}

impl WakingGuard {
    fn new() -> Self {
        WAKING.set(WAKING.get() + 1);
        Self { blocking: BLOCKING.replace(0) }
    }
}

impl Drop for WakingGuard {
    fn drop(&mut self) {
        BLOCKING.set(self.blocking);
        WAKING.set(WAKING.get() - 1);
    }
}

struct DeferredList {
    waiters: Vec<Waiter>,
    /// To the thread for wakes, which ends when this is dropped.
    elsewhere: Option<mpsc::Sender<Waiter>>,
}

impl DeferredList {
    const EMPTY: Self = Self { waiters: Vec::new(), elsewhere: None };

    /// Sends all waiters to the thread for wakes. Those that it does not get stay here.
    fn hand_over(&mut self) {
        if self.waiters.is_empty() {
            return;
        }
        if self.elsewhere.is_none() {
            self.elsewhere = start_thread();
        }
        while let (Some(elsewhere), Some(waiter)) = (&self.elsewhere, self.waiters.pop()) {
            if let Err(mpsc::SendError(waiter)) = elsewhere.send(waiter) {
                self.waiters.push(waiter);
                self.elsewhere = None;
            }
        }
    }
}

fn start_thread() -> Option<mpsc::Sender<Waiter>> {
    let (elsewhere, waiters) = mpsc::channel::<Waiter>();
    let calls_wakers = move || {
        crate::sys::signal::block_all();
        waiters.into_iter().for_each(Waiter::wake);
    };
    let thread = std::thread::Builder::new().name("quinion-wakes".into()).spawn(calls_wakers);
    thread.is_ok().then_some(elsewhere)
}

/// Defers the wakers that the thread would call until it is dropped, and calls them then. To be dropped after the locks
/// for whose sake it was made are released.
#[derive(Debug)]
pub(crate) struct DeferredWakes(PhantomData<*const ()>);

impl DeferredWakes {
    pub(crate) fn new() -> Self {
        DEFERRING.set(DEFERRING.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for DeferredWakes {
    fn drop(&mut self) {
        DEFERRING.set(DEFERRING.get() - 1);
        if DEFERRING.get() == 0 && HAS_DEFERRED.replace(false) {
            let taken = DEFERRED.try_with(|list| list.replace(DeferredList::EMPTY));
            taken.into_iter().for_each(|list| list.waiters.into_iter().for_each(Waiter::wake));
        }
    }
}

/// Made by a thread before it sleeps, for as long as it does: no future sleeps with it.
#[derive(Debug)]
pub(super) struct BlockingWait(PhantomData<*const ()>);

impl BlockingWait {
    pub(super) fn begin() -> Self {
        BLOCKING.set(BLOCKING.get() + 1);
        if HAS_DEFERRED.get() {
            let _ = DEFERRED.try_with(|list| list.borrow_mut().hand_over());
        }
        Self(PhantomData)
    }
}

impl Drop for BlockingWait {
    fn drop(&mut self) {
        BLOCKING.set(BLOCKING.get() - 1);
    }
}

/// Takes a lock that may be held for long. If it is not free, what the thread has deferred does not wait with it.
#[inline]
pub(crate) fn lock_and_wake<G>(try_lock: impl FnOnce() -> Option<G>, lock: impl FnOnce() -> G) -> G {
    if HAS_DEFERRED.get() {
        if let Some(held) = try_lock() {
            return held;
        }
        drop(BlockingWait::begin());
    }
    lock()
}

/// Sleeps so long. To be used wherever a thread may have a [`DeferredWakes`].
pub(crate) fn pause(duration: Duration) {
    let _blocking = BlockingWait::begin();
    std::thread::sleep(duration);
}

/// Keeps the waiter for later, or for another thread, if this one may not call wakers now. Else the caller has it back.
fn defer(waiter: Waiter) -> Option<Waiter> {
    let mut waiter = Some(waiter);
    if DEFERRING.get() > 0 {
        // A thread that is ending may be without the list, and still read: in a destructor of its program.
        let put = DEFERRED.try_with(|list| {
            let mut list = list.borrow_mut();
            list.waiters.extend(waiter.take());
            if BLOCKING.get() > 0 {
                list.hand_over();
            }
        });
        HAS_DEFERRED.set(HAS_DEFERRED.get() | put.is_ok());
    }
    waiter
}

#[cfg(test)]
mod tests {
    use std::task::Wake;
    use std::thread::ThreadId;

    use super::super::MemoryFile;
    use super::*;

    /// Sends the thread that calls it.
    struct Tells(mpsc::Sender<ThreadId>);

    impl Wake for Tells {
        fn wake(self: Arc<Self>) {
            self.0.send(std::thread::current().id()).unwrap();
        }
    }

    fn waiter(tell: &mpsc::Sender<ThreadId>) -> Waiter {
        let waker = Waker::from(Arc::new(Tells(tell.clone())));
        Waiter { condition: Box::new(|| true), backend: Arc::new(MemoryFile::new(vec![])), waker }
    }

    #[test]
    fn wakers_are_called_at_the_end_by_the_thread_that_deferred_them() {
        let (tell, told) = mpsc::channel();
        assert!(defer(waiter(&tell)).is_some());
        let (outer, inner) = (DeferredWakes::new(), DeferredWakes::new());
        assert!(defer(waiter(&tell)).is_none());
        drop(inner);
        assert!(told.try_recv().is_err());
        drop(outer);
        assert_eq!(told.try_recv(), Ok(std::thread::current().id()));
    }

    #[test]
    fn wakers_of_a_thread_that_blocks_are_called_by_another() {
        let (tell, told) = mpsc::channel();
        let deferring = DeferredWakes::new();
        assert!(defer(waiter(&tell)).is_none());
        let blocking = BlockingWait::begin();
        let other = told.recv().unwrap();
        assert_ne!(other, std::thread::current().id());
        assert!(defer(waiter(&tell)).is_none());
        assert_eq!(told.recv(), Ok(other), "the same, while wakes are deferred");
        drop(blocking);
        assert!(defer(waiter(&tell)).is_none());
        drop(deferring);
        assert_eq!(told.recv(), Ok(std::thread::current().id()));
        drop(tell);
        assert_eq!(told.iter().count(), 0, "each is notified once");
    }

    #[test]
    fn a_lock_that_is_free_wakes_no_other_and_one_that_is_held_does() {
        let (tell, told) = mpsc::channel();
        let lock = std::sync::Mutex::new(());
        let deferring = DeferredWakes::new();
        assert!(defer(waiter(&tell)).is_none());
        drop(lock_and_wake(|| lock.try_lock().ok(), || unreachable!("the lock is free")));
        assert!(told.try_recv().is_err());
        let other = lock_and_wake(|| None, || told.recv().unwrap());
        assert_ne!(other, std::thread::current().id());
        drop(deferring);
        drop(tell);
        assert_eq!(told.iter().count(), 0);
    }

    /// A waker that is called while its thread blocks, and defers another, as does a read that is polled in a waker.
    struct Defers(mpsc::Sender<ThreadId>);

    impl Wake for Defers {
        fn wake(self: Arc<Self>) {
            let _deferring = DeferredWakes::new();
            assert!(defer(waiter(&self.0)).is_none());
        }
    }

    #[test]
    fn a_waker_does_not_block_though_its_caller_does() {
        let (tell, told) = mpsc::channel();
        let _blocking = BlockingWait::begin();
        let waker = Waker::from(Arc::new(Defers(tell.clone())));
        Waiter { waker, ..waiter(&tell) }.notify();
        assert_eq!(told.try_recv(), Ok(std::thread::current().id()));
        assert_eq!(BLOCKING.get(), 1);
    }

    struct PanicsAgain;

    impl Drop for PanicsAgain {
        fn drop(&mut self) {
            panic!("again");
        }
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            std::panic::panic_any(PanicsAgain);
        }
    }

    #[test]
    fn a_waker_that_panics_takes_no_other_with_it() {
        let (tell, told) = mpsc::channel();
        let _deferring = DeferredWakes::new();
        assert!(defer(waiter(&tell)).is_none());
        assert!(defer(Waiter { waker: Waker::from(Arc::new(Panics)), ..waiter(&tell) }).is_none());
        drop(tell);
        let _blocking = BlockingWait::begin();
        assert!(told.recv().is_ok());
    }

    #[test]
    fn a_thread_that_blocks_and_defers_nothing_calls_its_wakers() {
        let (tell, _told) = mpsc::channel();
        let _blocking = BlockingWait::begin();
        assert!(defer(waiter(&tell)).is_some());
    }

    /// A read that fills, at the end of a thread.
    struct AtTheEnd(mpsc::Sender<()>);

    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            drop(DeferredWakes::new());
            self.0.send(()).unwrap();
        }
    }

    std::thread_local! {
        static EARLY: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) };
        static LATE: RefCell<Option<AtTheEnd>> = const { RefCell::new(None) };
    }

    #[test]
    fn a_thread_may_read_when_it_ends() {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            EARLY.set(Some(AtTheEnd(tell.clone())));
            drop(DeferredWakes::new());
            LATE.set(Some(AtTheEnd(tell)));
        });
        assert_eq!(told.iter().count(), 2);
    }
}

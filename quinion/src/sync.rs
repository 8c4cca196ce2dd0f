//! Sync: locks with a rank; and the atomics and fences of [`quinion_view::sync`], which go by one cfg.
//!
//! Locks carry a **rank**. A thread may only take a lock of a higher rank than every lock it holds; builds with debug
//! assertions check that at each [`RankedMutex::lock`], and a violation panics with both names. The ranks are the lock
//! order that ARCHITECTURE.md prints.

mod device_queues;
mod panics;

pub use device_queues::DeviceQueues;
pub use panics::contained;
pub use quinion_view::sync::*;

/// Whether a call may wait for a lock that another thread holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockWait {
    Wait,
    /// The call goes on without the lock.
    Try,
}

pub use ranked::{Rank, RankedGuard, RankedMutex, RankedReadGuard, RankedRwLock, RankedWriteGuard};

mod ranked {
    use super::LockWait;
    use std::ops::{Deref, DerefMut};
    use std::sync::{PoisonError, TryLockError};

    use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

    /// The place of a lock in the lock order; a thread takes locks of rising rank only.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    #[repr(u8)]
    pub enum Rank {
        /// The groups of an owner's viewers.
        Groups = 0,
        /// The cache's table of pools.
        Pools = 1,
        /// A cache's resize.
        Resize = 2,
        /// The cache's table of mappings.
        Mappings = 3,
        /// One file's read lease.
        Lease = 4,
        /// One mapping: writes to the file, and changes of its length.
        Write = 5,
        /// One handle's readahead state.
        Readahead = 6,
        /// One mapping's invalidate lock.
        Invalidate = 7,
        /// The reclaimer's policy.
        Policy = 8,
        /// One mapping's tree.
        Tree = 9,
        /// The list of nodes that only remember.
        Shadows = 10,
        /// The rings of folios.
        Lists = 11,
        /// The table from mapping number to mapping.
        Directory = 12,
        /// The arena's growth.
        Growth = 13,
        /// The arena's frames and index nodes.
        Arena = 14,
        /// The submission side of a ring.
        Submit = 15,
        /// The owner's state of one viewer.
        Viewer = 16,
        /// A change of one page's bytes in place, or a read of them that must not race.
        Page = 17,
    }

    #[cfg(debug_assertions)]
    mod held {
        use super::{LockWait, Rank};
        use std::cell::RefCell;

        std::thread_local! {
            static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
        }
        pub fn push(rank: Rank, wait: LockWait) {
            HELD.with_borrow_mut(|held| {
                if let Some(&top) = held.iter().max() {
                    assert!(
                        wait == LockWait::Try || top < rank,
                        "lock order: {rank:?} asked for while {top:?} is held"
                    );
                }
                held.push(rank);
            });
        }
        pub fn pop(rank: Rank) {
            HELD.with_borrow_mut(|held| {
                let at = held.iter().rposition(|&r| r == rank).expect("a lock is given back once");
                held.remove(at);
            });
        }
    }
    #[cfg(not(debug_assertions))]
    mod held {
        use super::{LockWait, Rank};
        #[inline(always)]
        pub fn push(_: Rank, _: LockWait) {}
        #[inline(always)]
        pub fn pop(_: Rank) {}
    }

    #[derive(Debug)]
    struct Held(Rank);
    impl Drop for Held {
        fn drop(&mut self) {
            held::pop(self.0);
        }
    }

    /// A mutex with a place in the lock order. A panic while it is held does not poison it: its data is kept consistent
    /// at every step, and a cache that answers beats one that is lost.
    #[derive(Debug)]
    pub struct RankedMutex<T> {
        rank: Rank,
        inner: Mutex<T>,
    }

    #[derive(Debug)]
    pub struct RankedGuard<'a, T> {
        inner: MutexGuard<'a, T>,
        _held: Held,
    }

    impl<T> RankedMutex<T> {
        /// A mutex of `rank` around `value`.
        pub const fn new(rank: Rank, value: T) -> Self {
            Self { rank, inner: Mutex::new(value) }
        }
        /// Waits for the lock. Panics in debug builds if the lock order is broken.
        #[inline]
        pub fn lock(&self) -> RankedGuard<'_, T> {
            held::push(self.rank, LockWait::Wait);
            let held = Held(self.rank);
            let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            RankedGuard { inner, _held: held }
        }
        /// Takes the lock, or not if that means waiting and `locks` says no.
        #[inline]
        pub fn lock_as(&self, locks: LockWait) -> Option<RankedGuard<'_, T>> {
            match locks {
                LockWait::Wait => Some(self.lock()),
                LockWait::Try => self.try_lock(),
            }
        }
        /// The guarded value, for a caller with exclusive access to the mutex.
        pub fn get_mut(&mut self) -> &mut T {
            self.inner.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
        /// Takes the lock only if no thread holds it.
        #[inline]
        pub fn try_lock(&self) -> Option<RankedGuard<'_, T>> {
            let inner = match self.inner.try_lock() {
                Ok(inner) => inner,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            held::push(self.rank, LockWait::Try);
            Some(RankedGuard { inner, _held: Held(self.rank) })
        }
    }
    impl<T> Deref for RankedGuard<'_, T> {
        type Target = T;
        #[inline]
        fn deref(&self) -> &T {
            &self.inner
        }
    }
    impl<T> DerefMut for RankedGuard<'_, T> {
        #[inline]
        fn deref_mut(&mut self) -> &mut T {
            &mut self.inner
        }
    }

    /// A reader-writer lock with a place in the lock order; not poisoned by a panic.
    #[derive(Debug)]
    pub struct RankedRwLock<T> {
        rank: Rank,
        inner: RwLock<T>,
    }
    /// The guard of a [`RankedRwLock`] that is locked shared.
    #[derive(Debug)]
    pub struct RankedReadGuard<'a, T> {
        inner: RwLockReadGuard<'a, T>,
        _held: Held,
    }
    /// The guard of a [`RankedRwLock`] that is locked exclusively.
    #[derive(Debug)]
    pub struct RankedWriteGuard<'a, T> {
        inner: RwLockWriteGuard<'a, T>,
        _held: Held,
    }
    impl<T> RankedRwLock<T> {
        /// A lock of `rank` around `value`.
        pub const fn new(rank: Rank, value: T) -> Self {
            Self { rank, inner: RwLock::new(value) }
        }
        /// Waits until no writer holds it.
        #[inline]
        pub fn read(&self) -> RankedReadGuard<'_, T> {
            held::push(self.rank, LockWait::Wait);
            let held = Held(self.rank);
            let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
            RankedReadGuard { inner, _held: held }
        }
        /// Takes it shared only if that needs no waiting.
        #[inline]
        pub fn try_read(&self) -> Option<RankedReadGuard<'_, T>> {
            let inner = match self.inner.try_read() {
                Ok(inner) => inner,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            held::push(self.rank, LockWait::Try);
            Some(RankedReadGuard { inner, _held: Held(self.rank) })
        }
        /// Waits until no thread holds it.
        #[inline]
        pub fn write(&self) -> RankedWriteGuard<'_, T> {
            held::push(self.rank, LockWait::Wait);
            let held = Held(self.rank);
            let inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
            RankedWriteGuard { inner, _held: held }
        }
        /// Takes it alone only if that needs no waiting.
        pub fn try_write(&self) -> Option<RankedWriteGuard<'_, T>> {
            let inner = match self.inner.try_write() {
                Ok(inner) => inner,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            held::push(self.rank, LockWait::Try);
            Some(RankedWriteGuard { inner, _held: Held(self.rank) })
        }
    }
    impl<T> Deref for RankedReadGuard<'_, T> {
        type Target = T;
        #[inline]
        fn deref(&self) -> &T {
            &self.inner
        }
    }
    impl<T> Deref for RankedWriteGuard<'_, T> {
        type Target = T;
        #[inline]
        fn deref(&self) -> &T {
            &self.inner
        }
    }
    impl<T> DerefMut for RankedWriteGuard<'_, T> {
        #[inline]
        fn deref_mut(&mut self) -> &mut T {
            &mut self.inner
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn rising_ranks_pass() {
            let (low, high) = (RankedMutex::new(Rank::Tree, ()), RankedMutex::new(Rank::Arena, ()));
            let _a = low.lock();
            let _b = high.lock();
        }

        #[test]
        #[cfg(debug_assertions)]
        #[should_panic(expected = "lock order")]
        fn falling_ranks_panic() {
            let (low, high) = (RankedMutex::new(Rank::Tree, ()), RankedMutex::new(Rank::Arena, ()));
            let _b = high.lock();
            let _a = low.lock();
        }
    }
}

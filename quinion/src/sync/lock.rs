//! Lock: the standard library's locks, in a form that ThreadSanitizer sees.
//!
//! It sees what was compiled with it. The standard library was not, and a lock that had to be waited for is taken
//! inside it: what the lock orders looks like a race. So under the cfg `quinion_tsan`, and only there, each lock has an
//! **edge**, an atomic of this file's, which says the same again:
//!
//! ```text
//!   unlock, wait    edge += 1, Release, then the lock is given up
//!   lock, woken     the lock is taken, then edge, Acquire
//! ```
//!
//! Invariants:
//!  1. An edge orders only what its lock orders: it is touched while the lock is held.
//!  2. Without the cfg these are the standard library's types themselves.
//!
//! Not an invariant: that readers of a shared lock are not ordered with each other. They are, a little more
//! than the lock promises, so a race between two readers can be missed.

#[cfg(not(quinion_tsan))]
pub use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(quinion_tsan)]
pub use seen::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(quinion_tsan)]
mod seen {
    use std::ops::{Deref, DerefMut};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult, WaitTimeoutResult};
    use std::time::Duration;

    /// A lock's happens-before edges, repeated by an atomic that ThreadSanitizer sees.
    #[derive(Debug, Default)]
    struct Edge(AtomicU32);

    impl Edge {
        fn enter(&self) {
            self.0.load(Ordering::Acquire); // partner: `leave`, of every earlier holder
        }
        fn leave(&self) {
            self.0.fetch_add(1, Ordering::Release); // partner: `enter`, of every later holder
        }
    }

    macro_rules! guard {
        ($(#[$about:meta])* $guard:ident) => {
            $(#[$about])*
            #[derive(Debug)]
            pub struct $guard<'a, T> {
                /// `None` while a condition is waited for.
                inner: Option<std::sync::$guard<'a, T>>,
                edge: &'a Edge,
            }
            impl<'a, T> $guard<'a, T> {
                fn new(inner: std::sync::$guard<'a, T>, edge: &'a Edge) -> Self {
                    edge.enter();
                    Self { inner: Some(inner), edge }
                }
            }
            impl<T> Deref for $guard<'_, T> {
                type Target = T;
                fn deref(&self) -> &T {
                    self.inner.as_ref().expect("a guard in use has its lock")
                }
            }
            impl<T> Drop for $guard<'_, T> {
                fn drop(&mut self) {
                    if self.inner.is_some() {
                        self.edge.leave();
                    }
                }
            }
        };
    }
    guard!(
        /// See the standard library's.
        MutexGuard
    );
    guard!(
        /// See the standard library's.
        RwLockReadGuard
    );
    guard!(
        /// See the standard library's.
        RwLockWriteGuard
    );
    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.inner.as_mut().expect("a guard in use has its lock")
        }
    }
    impl<T> DerefMut for RwLockWriteGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.inner.as_mut().expect("a guard in use has its lock")
        }
    }

    fn wrap<I, G>(locked: LockResult<I>, guard: impl FnOnce(I) -> G) -> LockResult<G> {
        match locked {
            Ok(inner) => Ok(guard(inner)),
            Err(poisoned) => Err(PoisonError::new(guard(poisoned.into_inner()))),
        }
    }
    fn try_wrap<I, G>(locked: TryLockResult<I>, guard: impl FnOnce(I) -> G) -> TryLockResult<G> {
        match locked {
            Ok(inner) => Ok(guard(inner)),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(poisoned)) => {
                Err(TryLockError::Poisoned(PoisonError::new(guard(poisoned.into_inner()))))
            }
        }
    }

    /// See the standard library's.
    #[derive(Debug, Default)]
    pub struct Mutex<T> {
        inner: std::sync::Mutex<T>,
        edge: Edge,
    }
    impl<T> Mutex<T> {
        /// See the standard library's; so for the rest.
        pub const fn new(value: T) -> Self {
            Self { inner: std::sync::Mutex::new(value), edge: Edge(AtomicU32::new(0)) }
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            wrap(self.inner.lock(), |inner| MutexGuard::new(inner, &self.edge))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
            try_wrap(self.inner.try_lock(), |inner| MutexGuard::new(inner, &self.edge))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn get_mut(&mut self) -> LockResult<&mut T> {
            self.inner.get_mut()
        }
    }

    /// See the standard library's.
    #[derive(Debug, Default)]
    pub struct RwLock<T> {
        inner: std::sync::RwLock<T>,
        edge: Edge,
    }
    impl<T> RwLock<T> {
        /// See the standard library's; so for the rest.
        pub const fn new(value: T) -> Self {
            Self { inner: std::sync::RwLock::new(value), edge: Edge(AtomicU32::new(0)) }
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
            wrap(self.inner.read(), |inner| RwLockReadGuard::new(inner, &self.edge))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn try_read(&self) -> TryLockResult<RwLockReadGuard<'_, T>> {
            try_wrap(self.inner.try_read(), |inner| RwLockReadGuard::new(inner, &self.edge))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
            wrap(self.inner.write(), |inner| RwLockWriteGuard::new(inner, &self.edge))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn try_write(&self) -> TryLockResult<RwLockWriteGuard<'_, T>> {
            try_wrap(self.inner.try_write(), |inner| RwLockWriteGuard::new(inner, &self.edge))
        }
    }

    /// See the standard library's.
    #[derive(Debug, Default)]
    pub struct Condvar(std::sync::Condvar);
    impl Condvar {
        /// See the standard library's; so for the rest.
        pub const fn new() -> Self {
            Self(std::sync::Condvar::new())
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
            let edge = guard.edge;
            edge.leave();
            let inner = guard.inner.take().expect("a guard in use has its lock");
            wrap(self.0.wait(inner), |inner| MutexGuard::new(inner, edge))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn wait_timeout<'a, T>(
            &self,
            mut guard: MutexGuard<'a, T>,
            most: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
            let edge = guard.edge;
            edge.leave();
            let inner = guard.inner.take().expect("a guard in use has its lock");
            wrap(self.0.wait_timeout(inner, most), |(inner, woken)| (MutexGuard::new(inner, edge), woken))
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn notify_one(&self) {
            self.0.notify_one();
        }
        #[allow(missing_docs, reason = "the standard library's")]
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

//! Newest: the handle that all clones of a following handle read by now, and the number of those that it has replaced.
//!
//! Invariants:
//!  1. A handle is replaced only if it is the one that was found stale: one that another thread has opened since may be
//!     newer than this thread's.
//!  2. A replaced handle is dropped with nothing locked: its end may ask a server.
//!  3. In a forked child calls that may fail do so before they lock: a thread that the child has not may have the lock.

use std::sync::{PoisonError, RwLock};

use quinion::internals::sys::fork::ForkGuard;

/// How often a call opens the object again before it tells that it has changed.
pub const CHANGES_MAX: u32 = 8;

/// A handle that newer ones replace.
#[derive(Debug)]
pub struct Newest<F> {
    current: RwLock<(F, u64)>,
    is_same: fn(&F, &F) -> bool,
    process: ForkGuard,
}

impl<F: Clone> Newest<F> {
    /// Begins with `file`; `is_same` tells whether two are one handle.
    pub fn new(file: F, is_same: fn(&F, &F) -> bool) -> Self {
        Self { current: RwLock::new((file, 0)), is_same, process: ForkGuard::new() }
    }

    /// The handle that the next read is by. `None` in a forked child.
    pub fn own(&self) -> Option<F> {
        if self.process.is_forked() { None } else { Some(self.get()) }
    }

    /// As [`Newest::own`], for calls that cannot fail: in a forked child it may wait for ever.
    pub fn get(&self) -> F {
        self.current.read().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// How often it was replaced.
    pub fn changes(&self) -> u64 {
        self.current.read().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Takes `new` in place of `stale`, unless another thread was faster. Whether it did.
    pub fn replace(&self, stale: &F, new: F) -> bool {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let is_stale = (self.is_same)(&current.0, stale);
        if is_stale {
            let changes = current.1 + 1;
            let before = std::mem::replace(&mut *current, (new, changes));
            drop(current);
            drop(before);
        }
        is_stale
    }

    /// Goes on with `new`, which the store has told while `stale` was the handle, if that is of another version.
    /// `false`: another thread has gone on to a third version meanwhile, which may be older or newer.
    pub fn advance(&self, stale: &F, new: &F, is_same_version: impl Fn(&F, &F) -> bool) -> bool {
        let is_there = is_same_version(stale, new) || self.replace(stale, new.clone());
        // A version that the store tells nothing of equals not even itself: another thread's will do.
        is_there || is_same_version(&self.get(), new) || !is_same_version(new, new)
    }

    /// The answer of `read`, by a handle that `open` has opened again as often as the error `is_change`. `None` in a
    /// forked child.
    ///
    /// # Errors
    /// Those of `read` and of `open`; a change only after [`CHANGES_MAX`] of them.
    pub fn repeat<T, E>(
        &self,
        mut read: impl FnMut(&F) -> Result<T, E>,
        is_change: impl Fn(&F, &E) -> bool,
        open: impl Fn() -> Result<F, E>,
    ) -> Option<Result<T, E>> {
        let mut reopened = 0;
        loop {
            let file = self.own()?;
            let answer = read(&file);
            let is_stale = |error: &E| reopened < CHANGES_MAX && is_change(&file, error);
            if !answer.as_ref().err().is_some_and(is_stale) {
                return Some(answer);
            }
            reopened += 1;
            match open() {
                Ok(new) => drop(self.replace(&file, new)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

//! Page locks: one writer at a time is in a page, and a reader that found no quiet moment waits for it.
//!
//! ```text
//!   frame    0    1    2    3   ...  255  256  257         neighbours have different locks,
//!   lock     0    1    2    3   ...  255    0    1         256 of them serve the whole arena
//! ```
//!
//! A lock is held for one copy of at most a page. So writers of different pages run in parallel, also in one folio. A
//! writer that is stopped in the middle of a copy blocks only writers of its page, or of a page with the same lock (1
//! in 256), and readers of its page after they have tried without the lock.
//!
//! The locks are the owner's and lie on its heap: a viewer waits by asking the owner.
//!
//! Invariant: nothing is locked under a page's lock, another page's included. Builds with debug assertions see to it.
//!
//! Not an invariant: that two pages have two locks.

use core::fmt;

use crate::sync::{Rank, RankedGuard, RankedMutex};
use crate::units::Frame;

const LOCKS: usize = 256;

/// The guard of a page's lock.
pub type PageLock<'a> = RankedGuard<'a, ()>;

/// The locks of all pages of an arena.
pub struct PageLocks(Box<[RankedMutex<()>]>);

impl PageLocks {
    /// Locks that are free.
    pub fn new() -> Self {
        Self((0..LOCKS).map(|_| RankedMutex::new(Rank::Page, ())).collect())
    }

    /// Locks the page in `frame`. Waits for the thread that has it, which is in a copy of at most a page.
    #[inline]
    pub fn lock(&self, frame: Frame) -> PageLock<'_> {
        self.0[frame.0 as usize % LOCKS].lock()
    }
}

impl fmt::Debug for PageLocks {
    /// Without the locks: there are 256 of them, and each says nothing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageLocks").finish_non_exhaustive()
    }
}

impl Default for PageLocks {
    fn default() -> Self {
        Self::new()
    }
}

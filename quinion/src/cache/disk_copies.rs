//! Disk copies: what a disk tier was too slow to take is copied to it from memory, on a thread of its own.
//!
//! ```text
//!   an arrival that the disk refused --owed, wake--> the tier's thread: copies while the disk has room
//!                                                        |  ^ 2 ms, while something is owed
//!                                                        +--+
//!   the end of the cache: copies what is owed still, half a second at most, then the disk writes what it has
//! ```
//!
//! Which bytes are copied, and why they cannot be others, is told in `backend/owed.rs`. Here is only when: at the
//! disk's pace, by a thread that no reader waits for. It is not the cache's other background thread, since a reader
//! that needs memory is better off if that one is free.
//!
//! **The end.** A program that reads once and ends would leave the next one with what its disk took at the first
//! arrival. So the end of a cache copies on, for half a second at most: some hundred MiB on a fast disk. It is less
//! than the 2 seconds for which a successor waits for the folder; what the disk's own thread writes at the end comes on
//! top, some MiB. So where a server takes the place of another (`--replace`) the pause is up to half a second longer if
//! something is owed. What is owed after that is lost to the disk, and the next reader of it asks the backend. A
//! process that is killed copies nothing more.
//!
//! Invariants:
//!  1. Nothing depends on the thread: without it the disk has less.
//!
//! Not an invariant: that what is owed is ever copied.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use quinion_disk::{DiskError, DiskOptions, DiskStats, DiskStore};

use crate::arena::Arena;
use crate::backend::{Backend, CopyOutcome, DiskTier, WaitQueue};
use crate::background::{BackgroundTask, BackgroundThread};

/// After which a disk that had no room is asked again: a fast one has written some MiB by then, less than it buffers.
const BEHIND_PAUSE: Duration = Duration::from_millis(2);
/// How long the end of a cache copies what is owed.
pub(super) const END_MAX: Duration = Duration::from_millis(500);

/// Opens the store of a tier.
pub(super) type StoreOpener = Box<dyn FnOnce(&DiskOptions) -> Result<DiskStore, DiskError>>;

/// A cache's disk tier, and the thread that copies to it what is owed.
pub(super) struct DiskCopies {
    tier: Arc<DiskTier>,
    thread: Arc<BackgroundThread>,
}

impl DiskCopies {
    /// Opens the tier. Its thread starts when something is owed.
    pub(super) fn open(
        options: &DiskOptions,
        store: StoreOpener,
        arena: &Arc<Arena>,
        wait_queue: &Arc<WaitQueue>,
    ) -> Result<Self, DiskError> {
        let thread = Arc::new(BackgroundThread::named("quinion-tier"));
        let woken = Arc::clone(&thread);
        let on_owed = Box::new(move || woken.wake());
        let tier = Arc::new(DiskTier::new(store(options)?, options, (arena, wait_queue), on_owed));
        let task: Weak<DiskTier> = Arc::downgrade(&tier);
        thread.add(task);
        Ok(Self { tier, thread })
    }

    /// See [`DiskTier::before`].
    pub(super) fn before(&self, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        self.tier.before(backend)
    }
    /// See [`DiskTier::stats`].
    pub(super) fn stats(&self) -> DiskStats {
        self.tier.stats()
    }
    /// See [`DiskTier::trouble`].
    pub(super) fn trouble(&self) -> Option<String> {
        self.tier.trouble()
    }

    /// Ends the thread, and copies what is owed still, so long at most. Not in a forked child.
    pub(super) fn end(&self, time_max: Duration) {
        self.thread.close();
        let begun = Instant::now();
        while begun.elapsed() < time_max {
            match self.tier.copy_owed() {
                CopyOutcome::Nothing => return,
                CopyOutcome::Behind => std::thread::sleep(BEHIND_PAUSE),
                CopyOutcome::More => {}
            }
        }
    }
}

impl fmt::Debug for DiskCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tier.fmt(f)
    }
}

impl BackgroundTask for DiskTier {
    fn run(&self) -> Option<Duration> {
        match self.copy_owed() {
            CopyOutcome::Nothing => None,
            CopyOutcome::Behind => Some(BEHIND_PAUSE),
            CopyOutcome::More => Some(Duration::ZERO),
        }
    }
}

#[cfg(test)]
#[path = "disk_copies/tests.rs"]
mod tests;

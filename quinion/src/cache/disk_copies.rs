//! Disk copies: pages that a disk tier was too slow to take are copied to it from memory, on a thread of its own.
//!
//! ```text
//!   an arrival that the disk refused --pending, wake--> the tier's thread: copies while the disk has room
//!                                                        |  ^ 2 ms, while something is pending; up to 100 ms,
//!                                                        +--+ while the disk takes nothing
//!   the end of the cache: copies what is pending still, half a second at most, then the disk writes what it has
//! ```
//!
//! `backend/pending_copies.rs` says which bytes are copied. Here is only when: at the disk's pace, by a thread of its
//! own, since readers that need memory want the cache's other background thread free.
//!
//! **The end.** A program that reads once and ends would leave to the next one only the pages that its disk took at the
//! first arrival. So the end of a cache copies on, for half a second at most: some hundred MiB on a fast disk, and less
//! than the 2 seconds for which the next cache waits for the folder. The rest is lost to the disk.
//!
//! Invariants:
//!  1. Nothing depends on the thread: without it the disk has less.
//!
//! Not an invariant: that a pending page is ever copied.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use quinion_disk::{DiskError, DiskOptions, DiskStats, DiskStore};

use crate::arena::Arena;
use crate::backend::{Backend, CopyOutcome, DiskTier, TierParts, WaitQueue};
use crate::background::{BackgroundTask, BackgroundThread};

/// The shortest pause: a fast disk writes some MiB in it, less than it buffers.
const PAUSE_MIN: Duration = Duration::from_millis(2);
/// The longest pause: for a disk that takes nothing, such as one that hangs.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// A unit test's copies all, however busy the machine is.
pub(super) const END_MAX: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 500 });

pub(super) type StoreOpener = Box<dyn FnOnce(&DiskOptions) -> Result<DiskStore, DiskError>>;

pub(super) struct DiskCopies {
    tier: Arc<DiskTier>,
    task: Arc<CopyTask>,
    thread: Arc<BackgroundThread>,
}

struct CopyTask {
    tier: Arc<DiskTier>,
    /// Locked by a run of the task alone.
    state: Mutex<CopyTaskState>,
}

#[derive(Default)]
struct CopyTaskState {
    backoff: CopyBackoff,
    buffer: Vec<u8>,
}

/// The next pause for a disk that takes nothing.
#[derive(Debug)]
struct CopyBackoff(Duration);

impl CopyBackoff {
    /// After the disk has taken something since the last pause.
    fn next_after_progress(&mut self) -> Duration {
        self.0 = PAUSE_MIN;
        self.next()
    }

    fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(PAUSE_MAX);
        pause
    }
}

impl Default for CopyBackoff {
    fn default() -> Self {
        Self(PAUSE_MIN)
    }
}

impl DiskCopies {
    pub(super) fn open(
        options: &DiskOptions,
        store: StoreOpener,
        arena: &Arc<Arena>,
        wait_queue: &Arc<WaitQueue>,
    ) -> Result<Self, DiskError> {
        let thread = Arc::new(BackgroundThread::named("quinion-tier"));
        let woken = Arc::clone(&thread);
        let on_pending = Box::new(move || woken.wake());
        let tier = Arc::new(DiskTier::new(TierParts {
            store: store(options)?,
            options,
            arena,
            wait_queue,
            on_pending,
        }));
        let task = Arc::new(CopyTask { tier: Arc::clone(&tier), state: Mutex::default() });
        let weak: Weak<CopyTask> = Arc::downgrade(&task);
        thread.add(weak);
        Ok(Self { tier, task, thread })
    }

    pub(super) fn before(&self, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        self.tier.before(backend)
    }
    pub(super) fn stats(&self) -> DiskStats {
        self.tier.stats()
    }
    pub(super) fn trouble(&self) -> Option<String> {
        self.tier.trouble()
    }

    /// Copies the pages that are still pending, for so long at most. Not in a forked child.
    pub(super) fn end(&self, time_max: Duration) {
        self.thread.close();
        let begun = Instant::now();
        while let Some(left) = time_max.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
            match self.task.run() {
                Some(pause) => std::thread::sleep(pause.min(left)),
                None => return,
            }
        }
    }
}

impl fmt::Debug for DiskCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tier.fmt(f)
    }
}

impl BackgroundTask for CopyTask {
    fn run(&self) -> Option<Duration> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.tier.copy_pending(&mut state.buffer) {
            CopyOutcome::Nothing => {
                *state = CopyTaskState::default();
                None
            }
            CopyOutcome::Behind { took: true } => Some(state.backoff.next_after_progress()),
            CopyOutcome::Behind { took: false } => Some(state.backoff.next()),
            CopyOutcome::More => {
                state.backoff = CopyBackoff::default();
                Some(Duration::ZERO)
            }
        }
    }
}

#[cfg(test)]
#[path = "disk_copies/tests.rs"]
mod tests;

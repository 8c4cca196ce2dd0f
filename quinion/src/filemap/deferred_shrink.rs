//! Deferred shrink: memory that a resize left is given back later, by the background thread.
//!
//! A resize waits for half a second at most. Extents with pinned, dirty or in-flight pages go when they can: this task
//! looks every tenth of a second as long as something is left, without waiting. As long as nothing was to be given
//! back, a look costs a read of the arena's numbers.
//!
//! Invariant: nothing depends on this task being done; the next resize does the same.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::background::BackgroundTask;

use super::shared::Filemap;

const AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct DeferredShrink {
    filemap: Weak<Filemap>,
    last_run: Mutex<Option<Instant>>,
}

impl DeferredShrink {
    /// Registers the task with the background thread, as long as the value lives.
    pub fn of(filemap: &Arc<Filemap>) -> Arc<Self> {
        let task = Arc::new(Self { filemap: Arc::downgrade(filemap), last_run: Mutex::new(None) });
        let known: Weak<Self> = Arc::downgrade(&task);
        filemap.supply.background.add(known);
        task
    }
}

impl BackgroundTask for DeferredShrink {
    fn run(&self) -> Option<Duration> {
        let filemap = self.filemap.upgrade()?;
        // Most wake-ups are for others: nothing was ever to be given back, or a moment ago.
        let stats = filemap.arena.stats();
        if stats.returned_bytes == 0 && stats.slack_bytes == 0 {
            return None;
        }
        let mut last_run = self.last_run.lock().unwrap_or_else(PoisonError::into_inner);
        let early = last_run.and_then(|at| AGAIN.checked_sub(at.elapsed())).filter(|left| !left.is_zero());
        if early.is_some() {
            return early;
        }
        *last_run = Some(Instant::now());
        drop(last_run);
        filemap.bound().continue_resize().then_some(AGAIN)
    }
}

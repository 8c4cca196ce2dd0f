//! Stats: what fetching has cost, in numbers that only rise.
//!
//! Hits and misses are the cache's ([`quinion::Cache::stats`]); here is what went over the network for them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::answer_times::AnswerCounters;
use crate::error::FetchError;
use crate::first_byte::FirstByteTimes;

/// Counts of an [`ObjectCache`](crate::ObjectCache)'s fetches so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct FetchStats {
    /// HEADs that were sent, with those that were sent again.
    pub heads: u64,
    /// GETs that were sent, with those that were sent again.
    pub gets: u64,
    /// Bytes of bodies that came.
    pub bytes: u64,
    /// Bytes between two ranges that one GET has brought, which were thrown away.
    pub gap_bytes: u64,
    /// GETs and HEADs that did not do and were sent again.
    pub retries: u64,
    /// Retries before which the store was left alone because it asked for that (`Retry-After`), as far as its HTTP
    /// client hears that ([`RetryAdvice`](crate::RetryAdvice)).
    pub advised: u64,
    /// Fetches that failed for good.
    pub failures: u64,
    /// Failed fetches whose object was replaced or deleted.
    pub changes: u64,
    /// Fetches that were not begun, because their range had failed a moment before.
    pub refused: u64,
    /// GETs that were sent beside a late one ([`Options::hedge_slower_than`](crate::Options::hedge_slower_than)).
    pub hedges: u64,
    /// Hedges whose answer began before that of the late one.
    pub hedges_won: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) heads: AtomicU64,
    pub(crate) gets: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) gap_bytes: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) advised: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) changes: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) hedges: AtomicU64,
    pub(crate) hedges_won: AtomicU64,
    pub(crate) first_byte: FirstByteTimes,
    /// Whether the store has ever answered.
    pub(crate) has_answered: AtomicBool,
    /// The newest failure for good that was not taken yet. Locked for moments.
    last_failure: Mutex<Option<FetchError>>,
    pub(crate) answer_times: AnswerCounters,
}

pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counters {
    /// A fetch has failed for good.
    pub(crate) fn add_failure(&self, error: &FetchError) {
        add(&self.failures, 1);
        if error.is_change() {
            add(&self.changes, 1);
        } else {
            *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
        }
    }

    pub(crate) fn take_failure(&self) -> Option<FetchError> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn sum(&self) -> FetchStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FetchStats {
            heads: read(&self.heads),
            gets: read(&self.gets),
            bytes: read(&self.bytes),
            gap_bytes: read(&self.gap_bytes),
            retries: read(&self.retries),
            advised: read(&self.advised),
            failures: read(&self.failures),
            changes: read(&self.changes),
            refused: read(&self.refused),
            hedges: read(&self.hedges),
            hedges_won: read(&self.hedges_won),
        }
    }
}

//! Backend: one version of an object, as the cache's fills want it.
//!
//! ```text
//!   submit(fills) --plugged?--> kept until the plug goes ---+
//!        |                                                  |
//!        +--> failed a moment ago? refused                  |
//!        +--> join neighbours --> a task for each GET <-----+
//! ```
//!
//! The cache gives fills of at most 1 MiB, as many in one call as a window has. A range that an [`ObjectFile`] wants is
//! given in several calls; a **plug** (as the block layer's) keeps these together, so that they become one plan. It is
//! held only while such calls are made, and none of them waits for a fill.
//!
//! When a fetch has failed, all of its readers wake at once, and each would ask again, one after the other, each for as
//! long as a deadline. So a range that has failed is remembered for a moment, and refused with the same error.
//!
//! [`ObjectFile`]: crate::ObjectFile
//!
//! Invariants:
//!  1. What it says of itself never changes: another version is another backend, with another identity.
//!  2. It holds nothing of the cache, which holds it.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use object_store::ObjectMeta;
use quinion::backend::{Attributes, Backend, Fill};

use crate::error::FetchError;
use crate::fetch::Fetcher;
use crate::plan::{JoinLimits, join};
use crate::stats::add;

/// How many ranges that have failed are remembered.
const FAILED_MAX: usize = 64;

/// Where the pages of one version of an object come from.
#[derive(Debug)]
pub(crate) struct ObjectBackend {
    fetcher: Arc<Fetcher>,
    meta: Arc<ObjectMeta>,
    attributes: Attributes,
    plug: Mutex<Plug>,
    failed: Arc<Mutex<VecDeque<FailedRange>>>,
}

/// Fills that are kept together.
#[derive(Debug, Default)]
struct Plug {
    holders: usize,
    fills: Vec<Fill>,
}

#[derive(Debug)]
struct FailedRange {
    range: Range<u64>,
    until: Instant,
    error: FetchError,
}

/// As long as it lives, fills are kept together.
#[derive(Debug)]
pub(crate) struct PlugGuard<'b>(&'b ObjectBackend);

impl Drop for PlugGuard<'_> {
    fn drop(&mut self) {
        let mut plug = lock(&self.0.plug);
        plug.holders -= 1;
        if plug.holders == 0 {
            let fills = std::mem::take(&mut plug.fills);
            drop(plug);
            self.0.start(fills);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bytes of the object that a fill wants.
fn bytes_of(fill: &Fill, size: u64) -> Range<u64> {
    fill.position()..(fill.position() + fill.len() as u64).min(size)
}

impl ObjectBackend {
    /// The version that `meta` says, of the store of `fetcher`, known to the cache by `attributes`.
    pub(crate) fn new(fetcher: Arc<Fetcher>, meta: Arc<ObjectMeta>, attributes: Attributes) -> Self {
        Self { fetcher, meta, attributes, plug: Mutex::default(), failed: Arc::default() }
    }

    /// Keeps fills together until the guard is dropped. Nothing is waited for meanwhile.
    pub(crate) fn plug(&self) -> PlugGuard<'_> {
        lock(&self.plug).holders += 1;
        PlugGuard(self)
    }

    /// The store says that the object is this version: what has failed may be asked for again.
    pub(crate) fn forget_failures(&self) {
        lock(&self.failed).clear();
    }

    /// The error of a range that has failed a moment ago and has bytes of `range`.
    fn failure(&self, range: &Range<u64>) -> Option<FetchError> {
        let mut failed = lock(&self.failed);
        if failed.is_empty() {
            return None;
        }
        let now = Instant::now();
        failed.retain(|failed| failed.until > now);
        let meets = |failed: &&FailedRange| failed.range.start < range.end && range.start < failed.range.end;
        failed.iter().find(meets).map(|failed| failed.error.clone())
    }

    fn start(&self, mut fills: Vec<Fill>) {
        fills.sort_unstable_by_key(Fill::position);
        let size = self.meta.size;
        let mut wanted = Vec::with_capacity(fills.len());
        let mut kept = Vec::with_capacity(fills.len());
        for fill in fills {
            let range = bytes_of(&fill, size);
            if range.is_empty() {
                fill.complete(Ok(0)); // behind the end
            } else if let Some(error) = self.failure(&range) {
                add(&self.fetcher.counters.refused, 1);
                fill.complete(Err(io::Error::other(error)));
            } else {
                wanted.push(range);
                kept.push(fill);
            }
        }
        let options = &self.fetcher.options;
        let groups = join(&wanted, JoinLimits { gap: options.gap_max, bytes: options.request_max });
        let mut kept = kept.into_iter();
        for group in groups {
            self.fetch(kept.by_ref().take(group.len()).collect());
        }
    }

    /// Fetches what goes together.
    fn fetch(&self, fills: Vec<Fill>) {
        let (fetcher, meta) = (Arc::clone(&self.fetcher), Arc::clone(&self.meta));
        let failed = Arc::clone(&self.failed);
        let all = fills.first().map_or(0, Fill::position)
            ..fills.last().map_or(0, |fill| fill.position() + fill.len() as u64);
        self.fetcher.spawn(async move {
            let note = |error: FetchError| {
                let pause = fetcher.options.failure_pause;
                let range = error.range().start..all.end;
                let mut failed = lock(&failed);
                if failed.len() == FAILED_MAX {
                    failed.pop_front();
                }
                failed.push_back(FailedRange { range, until: Instant::now() + pause, error });
            };
            fetcher.run(&meta, fills, note).await;
        });
    }
}

impl Backend for ObjectBackend {
    fn name(&self) -> &'static str {
        "object"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        Ok(self.attributes)
    }
    fn submit(&self, fills: Vec<Fill>) {
        let mut plug = lock(&self.plug);
        if plug.holders > 0 {
            plug.fills.extend(fills);
            return;
        }
        drop(plug);
        self.start(fills);
    }
}

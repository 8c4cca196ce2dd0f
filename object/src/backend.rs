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
//! given in several calls; a **plug** (as the block layer's) makes one plan of these. It is held only while such calls
//! are made, and none of them waits for a fill. Threads that want the same bytes share a plug, since each of them gets
//! some of the fills; but none joins a plug that has lasted for a while, so that no plug lasts as long as there are
//! readers.
//!
//! When a fetch has failed, all of its readers wake at once, and each would ask again, one after the other, each for as
//! long as a deadline. So a range that has failed is refused with the same error for a moment. If the object is another
//! by now, opens that use this version are told so (`metadata_cache.rs`).
//!
//! [`ObjectFile`]: crate::ObjectFile
//!
//! Invariants:
//!  1. Its identity and attributes never change: another version is another backend, with another identity.
//!  2. It holds nothing of the cache, which holds it.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use object_store::{GetResult, ObjectMeta};
use quinion::backend::{Attributes, Backend, ContentKey, Fill};

use crate::error::FetchError;
use crate::fetch::{FetchJob, Fetcher, FetcherSlot};
use crate::metadata_cache::{KnownVersion, MetadataCache};
use crate::plan::{JoinLimits, join};
use crate::stats::add;
use crate::version::{VersionNames, is_same};

/// How long after its begin a plug is still shared.
const PLUG_SHARED: Duration = Duration::from_millis(20);
const FAILED_MAX: usize = 64;

/// Where the pages of one version of an object come from.
#[derive(Debug)]
pub(crate) struct ObjectBackend {
    fetcher: Arc<FetcherSlot>,
    meta: Arc<ObjectMeta>,
    attributes: Attributes,
    content_key: Option<ContentKey>,
    plugs: Mutex<Vec<Plug>>,
    failed: Arc<Mutex<VecDeque<FailedRange>>>,
    known: Arc<MetadataCache<KnownVersion>>,
    /// The answer to a GET that was sent before the version was known.
    answered: Mutex<Option<GetResult>>,
}

#[derive(Debug)]
struct Plug {
    begun: Instant,
    span: Range<u64>,
    holders: Vec<ThreadId>,
    fills: Vec<Fill>,
}

impl Plug {
    /// Keeps `fills`. Gives those back that are a whole GET of `most` bytes by now: a long range is under way before
    /// the last of its pages is allocated.
    fn keep(&mut self, fills: Vec<Fill>, most: u64) -> Vec<Fill> {
        self.fills.extend(fills);
        self.fills.sort_unstable_by_key(Fill::position);
        let Some(start) = self.fills.first().map(Fill::position) else { return Vec::new() };
        let mut end = start;
        for at in 0..self.fills.len() {
            let fill = &self.fills[at];
            if fill.position() != end {
                break;
            }
            end += fill.len() as u64;
            if end - start >= most {
                let later = self.fills.split_off(at + 1);
                return std::mem::replace(&mut self.fills, later);
            }
        }
        Vec::new()
    }
}

#[derive(Debug)]
struct FailedRange {
    range: Range<u64>,
    until: Instant,
    error: FetchError,
}

#[derive(Debug)]
pub(crate) struct PlugGuard<'b> {
    backend: &'b ObjectBackend,
    _thread: PhantomData<*const ()>,
}

impl Drop for PlugGuard<'_> {
    fn drop(&mut self) {
        let thread = thread::current().id();
        let mut plugs = lock(&self.backend.plugs);
        let Some(at) = plug_of(&plugs, thread) else { return };
        let holders = &mut plugs[at].holders;
        if let Some(place) = holders.iter().position(|holder| *holder == thread) {
            holders.swap_remove(place);
        }
        if holders.is_empty() {
            let fills = plugs.swap_remove(at).fills;
            drop(plugs);
            self.backend.start(fills);
        }
    }
}

fn plug_of(plugs: &[Plug], thread: ThreadId) -> Option<usize> {
    plugs.iter().position(|plug| plug.holders.contains(&thread))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bytes_of(fill: &Fill, size: u64) -> Range<u64> {
    fill.position()..(fill.position() + fill.len() as u64).min(size)
}

impl ObjectBackend {
    /// The version in `meta`, of the store that `fetcher` has, known to the cache by `names`.
    pub(crate) fn new(
        fetcher: Arc<FetcherSlot>,
        meta: Arc<ObjectMeta>,
        names: VersionNames,
        known: Arc<MetadataCache<KnownVersion>>,
    ) -> Self {
        let VersionNames { attributes, content_key } = names;
        Self {
            fetcher,
            meta,
            attributes,
            content_key,
            plugs: Mutex::default(),
            failed: Arc::default(),
            known,
            answered: Mutex::default(),
        }
    }

    /// Keeps what this thread asks for, of bytes in `span`, together until the guard is dropped. Nothing waits
    /// meanwhile.
    pub(crate) fn plug(&self, span: Range<u64>) -> PlugGuard<'_> {
        let thread = thread::current().id();
        let mut plugs = lock(&self.plugs);
        let is_shared = |plug: &Plug| {
            let meets = plug.span.start < span.end && span.start < plug.span.end;
            meets && plug.begun.elapsed() < PLUG_SHARED
        };
        match plug_of(&plugs, thread).or_else(|| plugs.iter().position(is_shared)) {
            Some(at) => plugs[at].holders.push(thread),
            None => {
                plugs.push(Plug { begun: Instant::now(), span, holders: vec![thread], fills: Vec::new() })
            }
        }
        drop(plugs);
        PlugGuard { backend: self, _thread: PhantomData }
    }

    /// Answers the next fetch that begins where `result` does. `None` ends it.
    pub(crate) fn set_answered(&self, result: Option<GetResult>) {
        let before = std::mem::replace(&mut *lock(&self.answered), result);
        drop(before); // not under the lock: it is a store's
    }

    /// The store says that the object is this version: ranges that have failed may be asked for again.
    pub(crate) fn forget_failures(&self) {
        lock(&self.failed).clear();
    }

    /// The error of a range with bytes of `range` that has failed a moment ago.
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
        let (size, fetcher) = (self.meta.size, self.fetcher.get());
        let mut wanted = Vec::with_capacity(fills.len());
        let mut kept = Vec::with_capacity(fills.len());
        for fill in fills {
            let range = bytes_of(&fill, size);
            if range.is_empty() {
                fill.complete(Ok(0)); // behind the end
            } else if let Some(error) = self.failure(&range) {
                add(&fetcher.counters.refused, 1);
                fill.complete(Err(error.into_io()));
            } else {
                wanted.push(range);
                kept.push(fill);
            }
        }
        let options = &fetcher.options;
        let groups = join(&wanted, JoinLimits { gap: options.gap_max, bytes: options.request_max });
        let mut kept = kept.into_iter();
        for group in groups {
            self.fetch(&fetcher, kept.by_ref().take(group.len()).collect());
        }
    }

    fn fetch(&self, by: &Arc<Fetcher>, fills: Vec<Fill>) {
        let (fetcher, meta) = (Arc::clone(by), Arc::clone(&self.meta));
        let (failed, known) = (Arc::clone(&self.failed), Arc::clone(&self.known));
        let all = fills.first().map_or(0, Fill::position)
            ..fills.last().map_or(0, |fill| fill.position() + fill.len() as u64);
        let answered = lock(&self.answered).take_if(|result| result.range.start == all.start);
        by.spawn(async move {
            let note = |error: FetchError| {
                if error.is_change() {
                    known.forget_if(&meta.location, |known| is_same(&meta, &known.meta));
                }
                let pause = fetcher.options.failure_pause;
                let range = error.range().start..all.end;
                let mut failed = lock(&failed);
                if failed.len() == FAILED_MAX {
                    failed.pop_front();
                }
                failed.push_back(FailedRange { range, until: Instant::now() + pause, error });
            };
            fetcher.run(FetchJob { meta: &meta, fills, answered }, note).await;
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
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn content_key(&self) -> Option<ContentKey> {
        self.content_key
    }
    fn submit(&self, fills: Vec<Fill>) {
        let thread = thread::current().id();
        let mut plugs = lock(&self.plugs);
        let fills = match plug_of(&plugs, thread) {
            Some(at) => plugs[at].keep(fills, self.fetcher.get().options.request_max),
            None => fills,
        };
        drop(plugs);
        self.start(fills);
    }
}

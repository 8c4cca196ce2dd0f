//! Cache: objects of one store, read through one page cache.
//!
//! ```text
//!   open(key) --HEAD--> what the object is --digest--> identity --registry--> the backend of that version, one for all
//!                                                                  |
//!                                               quinion::Cache <---+   one mapping for all handles
//! ```
//!
//! `metadata_cache.rs` keeps what a store has told of an object, as long as an open may take that for current
//! ([`Freshness`]); it is metadata alone, and keeps no page.
//!
//! The registry lets all handles of a version plug the very backend that fills their pages. It keeps no backend alive:
//! a version that the cache has let go of is forgotten here as well.
//!
//! Invariants:
//!  1. The parts that a backend keeps alive (the threads that fetch, the metadata) keep no cache alive.
//!  2. An object whose versions cannot be told apart has no backend (`version.rs`).
//!  3. Whichever version an open takes, all bytes of its handle are of that one: each GET has the condition.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use object_store::{
    Attributes, Error as StoreError, GetOptions, GetResult, ObjectMeta, ObjectStore, Result as StoreResult,
    path::Path,
};
use quinion::backend::Identity;
use quinion::internals::sys::fork::ForkGuard;
use quinion::internals::units::{FILE_BYTES_MAX, Order};
use quinion::{Cache, Coherence, OpenOptions};
use tokio::time::Instant;

use crate::answer_times::AnswerTimes;
use crate::backend::ObjectBackend;
use crate::error::{Error, FetchError, Result};
use crate::fetch::{Fetcher, FetcherSlot, wait_for};
use crate::file::{ObjectFile, OpenedObject};
use crate::first_byte::FirstByte;
use crate::metadata_cache::{KnownVersion, MetadataCache, Question};
use crate::options::{Freshness, Options};
use crate::stats::FetchStats;
use crate::version;

/// Steps in which the first bytes of an object are asked for.
const FIRST_STEP: u64 = 1 << 20;
/// How long an open waits for another's first bytes.
const OPENING_MAX: Duration = Duration::from_millis(100);
static UNNAMED: AtomicU64 = AtomicU64::new(0);

/// The objects of a store, through a page cache. Cheap to clone; clones share it.
#[derive(Clone)]
pub struct ObjectCache {
    shared: Arc<Shared>,
    freshness: Option<Freshness>,
}

struct Shared {
    cache: Cache,
    fetcher: Arc<FetcherSlot>,
    /// Name of the store: a part of the identity of each object.
    store_name: Vec<u8>,
    backends: Mutex<Registry>,
    opened: Condvar,
    known: Arc<MetadataCache<KnownVersion>>,
    process: ForkGuard,
}

#[derive(Default)]
struct Registry {
    known: HashMap<Identity, Weak<ObjectBackend>>,
    latest: HashMap<Path, Weak<ObjectBackend>>,
    opening: HashSet<Path>,
    /// How many there may be before those that are gone are looked for.
    swept_at: usize,
}

impl Registry {
    fn backend(&mut self, identity: Identity, new: impl FnOnce() -> ObjectBackend) -> Arc<ObjectBackend> {
        if let Some(known) = self.known.get(&identity).and_then(Weak::upgrade) {
            return known;
        }
        if self.known.len() >= self.swept_at {
            self.known.retain(|_, backend| backend.strong_count() > 0);
            self.latest.retain(|_, backend| backend.strong_count() > 0);
            self.swept_at = (2 * self.known.len()).max(64);
        }
        let backend = Arc::new(new());
        self.known.insert(identity, Arc::downgrade(&backend));
        backend
    }
}

/// One thread asks for the first bytes of an object, of which nothing is known.
struct Opening<'s> {
    shared: &'s Shared,
    path: &'s Path,
}

impl<'s> Opening<'s> {
    /// `None`: a version is known, whose bytes may be cached, or another thread asks.
    fn begin(shared: &'s Shared, path: &'s Path) -> Option<Self> {
        let mut registry = shared.registry();
        let is_known = registry.latest.get(path).is_some_and(|backend| backend.strong_count() > 0);
        let is_first = !is_known && registry.opening.insert(path.clone());
        drop(registry);
        if is_first { Some(Self { shared, path }) } else { None } // a value that is not wanted would end the first
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.shared.registry().opening.remove(self.path);
        self.shared.opened.notify_all();
    }
}

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.backends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits a moment for another thread that asks for an object's first bytes: a fetch that begins before would ask
    /// for them again.
    fn wait_for_opening(&self, path: &Path) {
        let is_opening = |registry: &mut Registry| registry.opening.contains(path);
        drop(self.opened.wait_timeout_while(self.registry(), OPENING_MAX, is_opening));
    }
}

struct StoreAnswer {
    answer: StoreResult<GetResult>,
    question: Question,
}

impl Shared {
    fn note(&self, path: &Path, StoreAnswer { answer, question }: StoreAnswer) -> Result<GetResult> {
        match &answer {
            // The next open asks again: its file may tell versions apart then.
            Ok(result) if version::is_untold(&result.meta) => drop(self.known.forget(path)),
            Ok(result) => {
                let version =
                    KnownVersion { meta: result.meta.clone(), attributes: result.attributes.clone() };
                self.known.keep(path, version, question);
            }
            Err(StoreError::NotFound { .. }) => drop(self.known.forget(path)),
            Err(_) => {}
        }
        answer.map_err(|source| Error::Open { path: path.clone(), source })
    }
}

impl fmt::Debug for ObjectCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("ObjectCache");
        text.field("store", &format_args!("{}", self.fetcher().store)).finish_non_exhaustive()
    }
}

impl ObjectCache {
    /// Reads objects of `store` through `cache`. Starts the threads that fetch, [`Options::threads`] of them, which end
    /// when this and all that was opened by it is gone.
    ///
    /// The store's own retries come first: give it few (`RetryConfig`), or a fetch may wait for long in one. A
    /// `Retry-After` is not in the errors of the crate `object_store`: build the store with a `RetryAfterConnector`
    /// (feature `http`), or [`Options::backoff`] alone sets the pauses.
    ///
    /// HTTP clients keep connections, each driven by the runtime that opened it. If a caller uses the same store on a
    /// single-threaded runtime and then blocks that thread in a read of this cache, the fetch may meet such a
    /// connection, and waits for [`Options::stall_max`] before it takes another: give the cache a store of its own
    /// there.
    ///
    /// # Errors
    /// [`Error::Options`], [`Error::Runtime`].
    pub fn new(cache: Cache, store: Arc<dyn ObjectStore>, options: Options) -> Result<Self> {
        let options = options.checked()?;
        let store_name = match &options.store_name {
            Some(name) => [b"named ", name.as_bytes()].concat(),
            None => {
                let number = UNNAMED.fetch_add(1, Ordering::Relaxed);
                [&b"unnamed "[..], &number.to_le_bytes()].concat()
            }
        };
        let fetcher = Fetcher::new(store, options, Arc::default())?;
        let fetcher = Arc::new(FetcherSlot::new(fetcher));
        let (backends, opened) = (Mutex::default(), Condvar::new());
        let known = Arc::new(MetadataCache::new(Freshness::Always));
        let process = ForkGuard::new();
        let shared = Shared { cache, fetcher, store_name, backends, opened, known, process };
        Ok(Self { shared: Arc::new(shared), freshness: None })
    }

    /// A handle whose opens take the known metadata of an object for current as long as `freshness` says, in place of
    /// [`Options::freshness`].
    #[must_use]
    pub fn with_freshness(mut self, freshness: Freshness) -> Self {
        self.freshness = Some(freshness);
        self
    }

    fn fresh(&self, path: &Path) -> Option<KnownVersion> {
        let freshness = self.freshness.unwrap_or_else(|| self.fetcher().options.freshness);
        // The lock is not taken for nothing.
        if freshness == Freshness::Always { None } else { self.shared.known.fresh_for(path, freshness) }
    }

    /// Forgets the metadata of an object: the next open asks the store. For writes that went by another way; call it
    /// when they have ended.
    pub(crate) fn note_write(&self, path: &Path) {
        drop(self.shared.known.note_write(path));
    }

    /// As [`ObjectCache::note_write`], of all objects.
    pub(crate) fn note_writes(&self) {
        self.shared.known.note_writes();
    }

    /// Reads by `store` from now on, as `options` say: the same store with other credentials, by another client or
    /// with other limits. Open files fetch by it as well, except for GETs under way. Cached pages stay, and so do the
    /// numbers of [`ObjectCache::stats`].
    ///
    /// # Errors
    /// [`Error::Options`]: the options' [`Options::store_name`] is not the one that this was made with, or there is
    /// none, so `store` may have other objects; [`Error::Runtime`].
    pub fn set_store(&self, store: Arc<dyn ObjectStore>, options: Options) -> Result<()> {
        let options = options.checked()?;
        let before = self.fetcher();
        if options.store_name.is_none() || options.store_name != before.options.store_name {
            let (old, new) = (before.options.name(), options.name());
            let text =
                format!("a store of the name {new:?} cannot take the place of {old:?}; give both one name");
            return Err(Error::Options(text));
        }
        let counters = Arc::clone(&before.counters);
        self.shared.fetcher.set(Fetcher::new(store, options, counters)?);
        // The new store may give other answers than the one before.
        self.note_writes();
        Ok(())
    }

    /// Opens an object: asks the store for its version, by one HEAD, and waits for the answer; or takes an earlier
    /// answer, as far as [`Options::freshness`] allows that. The handle reads that version, and no other.
    ///
    /// May be called on any thread; in a task of an async runtime, use [`ObjectCache::open_async`].
    ///
    /// # Errors
    /// [`Error::Open`]: there is no such object, or the store could not be asked; [`Error::Unversioned`]: nothing tells
    /// its versions apart; [`Error::Cache`]; [`Error::Ended`]: in a forked child.
    pub fn open(&self, path: &Path) -> Result<ObjectFile> {
        self.open_with_attributes(path).map(|(file, _)| file)
    }

    /// As [`ObjectCache::open`], with the attributes that the store has told in the same answer.
    ///
    /// # Errors
    /// As [`ObjectCache::open`].
    pub fn open_with_attributes(&self, path: &Path) -> Result<(ObjectFile, Attributes)> {
        self.check_process(path)?;
        if let Some(version) = self.fresh(path) {
            return self.open_fresh(version);
        }
        self.open_asked(path, self.fetcher().deadline())
    }

    /// Opens the version that the store's answer to a HEAD names.
    fn open_asked(&self, path: &Path, deadline: Instant) -> Result<(ObjectFile, Attributes)> {
        let (by, wanted, question) = (self.fetcher(), path.clone(), self.shared.known.question());
        let fetcher = Arc::clone(&by);
        let head = async move { fetcher.head(&wanted, &GetOptions::new(), deadline).await };
        let answer = wait_for(&by, head).ok_or_else(|| Error::Ended(path.clone()))?;
        let result = self.shared.note(path, StoreAnswer { answer, question })?;
        Ok((self.open_known(result.meta)?, result.attributes))
    }

    /// As [`ObjectCache::open_with_attributes`], for a caller that is about to read the first `len` bytes. If nothing
    /// is known of the object, a GET of them (of [`Options::request_max`] at most) takes the place of the HEAD, and the
    /// fetch is under way when this returns.
    ///
    /// # Errors
    /// As [`ObjectCache::open`].
    pub fn open_first(&self, path: &Path, len: u64) -> Result<(ObjectFile, Attributes)> {
        self.check_process(path)?;
        if let Some(version) = self.fresh(path) {
            return self.open_fresh(version);
        }
        let Some(_opening) = Opening::begin(&self.shared, path) else {
            let opened = self.open_with_attributes(path);
            self.shared.wait_for_opening(path);
            return opened;
        };
        let (by, question) = (self.fetcher(), self.shared.known.question());
        let most = by.options.request_max.min(self.ahead_max().max(FIRST_STEP));
        let range = 0..len.clamp(1, most).next_multiple_of(FIRST_STEP).min(most);
        let (fetcher, wanted) = (Arc::clone(&by), path.clone());
        let get = GetOptions::new().with_range(Some(range));
        let deadline = by.deadline();
        let get = async move { fetcher.open_get(&wanted, get, deadline).await };
        let answer = wait_for(&by, get).ok_or_else(|| Error::Ended(path.clone()))?;
        let result = match self.shared.note(path, StoreAnswer { answer, question }) {
            Ok(result) => result,
            Err(error @ Error::Open { source: StoreError::NotFound { .. }, .. }) => return Err(error),
            // It has no bytes, or the store fails for the moment.
            Err(_) => return self.open_asked(path, deadline),
        };
        let (attributes, end) = (result.attributes.clone(), result.range.end);
        let file = self.open_known(result.meta.clone())?;
        let _answered = file.answered(Some(result));
        // A prefetch that cannot be started now is left to the read.
        let _ = file.prefetch(0..end);
        Ok((file, attributes))
    }

    /// As [`ObjectCache::open`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`ObjectCache::open`].
    pub async fn open_async(&self, path: &Path) -> Result<ObjectFile> {
        self.check_process(path)?;
        if let Some(version) = self.fresh(path) {
            return self.open_fresh(version).map(|(file, _)| file);
        }
        let result = self.head(path, GetOptions::new(), self.fetcher().deadline()).await?;
        self.open_known(result.meta)
    }

    /// Asks the store by a HEAD with the conditions of `options`.
    pub(crate) async fn head(
        &self,
        path: &Path,
        options: GetOptions,
        deadline: Instant,
    ) -> Result<GetResult> {
        let (by, wanted, question) = (self.fetcher(), path.clone(), self.shared.known.question());
        let (fetcher, ended) = (Arc::clone(&by), || Error::Ended(path.clone()));
        let head = by.spawn(async move { fetcher.head(&wanted, &options, deadline).await });
        let answer = head.ok_or_else(ended)?.await.map_err(|_| ended())?;
        self.shared.note(path, StoreAnswer { answer, question })
    }

    /// See [`Fetcher::open_get`].
    pub(crate) async fn open_get(
        &self,
        path: &Path,
        options: GetOptions,
        deadline: Instant,
    ) -> Result<GetResult> {
        let (by, wanted, question) = (self.fetcher(), path.clone(), self.shared.known.question());
        let (fetcher, ended) = (Arc::clone(&by), || Error::Ended(path.clone()));
        let get = by.spawn(async move { fetcher.open_get(&wanted, options, deadline).await });
        let answer = get.ok_or_else(ended)?.await.map_err(|_| ended())?;
        self.shared.note(path, StoreAnswer { answer, question })
    }

    /// Opens a version by an earlier answer. A range that has failed is not asked for again at once, since the store
    /// said nothing new.
    fn open_fresh(
        &self,
        KnownVersion { meta, attributes }: KnownVersion,
    ) -> Result<(ObjectFile, Attributes)> {
        self.open_version(meta).map(|file| (file, attributes))
    }

    /// Opens the version of an object that the store has told of, as in a list, without a request. Whether it is still
    /// there shows with the first read of bytes that are not cached.
    ///
    /// # Errors
    /// [`Error::Cache`], [`Error::TooLarge`], [`Error::Unversioned`].
    pub fn open_known(&self, meta: ObjectMeta) -> Result<ObjectFile> {
        let file = self.open_version(meta)?;
        file.confirm();
        Ok(file)
    }

    /// Before anything is locked: a thread that a forked child does not have may have locked it.
    pub(crate) fn check_process(&self, path: &Path) -> Result<()> {
        if self.is_forked() { Err(Error::Ended(path.clone())) } else { Ok(()) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.shared.process.is_forked()
    }

    fn open_version(&self, meta: ObjectMeta) -> Result<ObjectFile> {
        self.check_process(&meta.location)?;
        let Shared { cache, fetcher: slot, store_name, known, .. } = &*self.shared;
        let fetcher = slot.get();
        if meta.size > FILE_BYTES_MAX {
            return Err(Error::TooLarge { path: meta.location, size: meta.size });
        }
        if version::is_untold(&meta) {
            return Err(Error::Unversioned(meta.location));
        }
        // A store without a name of its own may have another number in the next process.
        let lasts = fetcher.options.store_name.is_some() && !fetcher.options.etags_are_times;
        let names = version::names(store_name, lasts, &meta);
        let meta = Arc::new(meta);
        let new = || ObjectBackend::new(Arc::clone(slot), Arc::clone(&meta), names, Arc::clone(known));
        let mut registry = self.shared.registry();
        let backend = registry.backend(names.attributes.identity, new);
        registry.latest.insert(meta.location.clone(), Arc::downgrade(&backend));
        drop(registry);
        let mut options = OpenOptions::new();
        options.coherence(Coherence::Immutable);
        let file = cache.open_backend_with(Arc::clone(&backend) as Arc<_>, &options);
        let failed = |source| Error::Cache { path: meta.location.clone(), source };
        let file = file.map_err(failed)?;
        let least = fetcher.options.fill_order();
        file.set_folio_orders(least, Order::MAX.0).map_err(failed)?;
        let opened = OpenedObject { file, meta: Arc::clone(&meta), backend, fetcher: Arc::clone(slot) };
        Ok(ObjectFile::new(opened, self.ahead_max()))
    }

    /// The most that it is worth asking for ahead of a reader, in bytes: more could be evicted before it is read.
    pub fn ahead_max(&self) -> u64 {
        self.shared.cache.stats().memory_bytes / 8
    }

    /// The page cache behind it.
    pub fn cache(&self) -> &Cache {
        &self.shared.cache
    }

    /// Counts of fetches from the store so far.
    pub fn stats(&self) -> FetchStats {
        self.fetcher().counters.sum()
    }
    /// The newest fetch that has failed for good since the last call, unless it failed because its object had changed:
    /// for the log of a program whose readers are told by other processes.
    pub fn take_failure(&self) -> Option<FetchError> {
        self.fetcher().counters.take_failure()
    }
    /// How long the store took to begin its last answers to GETs; known to within 25 %. `None` until 32 are known.
    pub fn first_byte(&self) -> Option<FirstByte> {
        self.fetcher().counters.first_byte.summary()
    }
    /// How long the answers to the GETs of fetches so far took to begin, in buckets that can be added to those of other
    /// nodes; [`AnswerTimes`] says which are not among them.
    pub fn answer_times(&self) -> AnswerTimes {
        self.fetcher().counters.answer_times.snapshot()
    }

    pub(crate) fn fetcher(&self) -> Arc<Fetcher> {
        self.shared.fetcher.get()
    }
}

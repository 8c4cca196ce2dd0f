//! Cache: a page cache of this process, and the stores and local files that it reads.
//!
//! ```text
//!   "s3://bucket/key"   longest prefix among the stores; none: the bucket's, with the environment's credentials
//!   "file:///x", "x"    through the cache; by the kernel, if it is nothing that can be cached
//! ```
//!
//! Files keep the cache alive, and so do threads that wait for a store. The last of them ends it.
//!
//! A forked child has none of it: each call checks the process first, before it takes a lock that a thread of the
//! parent's may have had.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use object_store::path::Path;
use percent_encoding::percent_decode_str;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use quinion::{Cache, Coherence, DiskOptions, ErrorKind, OpenOptions};
use quinion_object::{FetchStats, Freshness, ObjectCache};

use crate::error::{EISDIR, ENODEV, ESPIPE, Failure, Result};
use crate::file::{OpenedFile, RawFile, ReadCounters, freshness_of};
use crate::source::{CachedFile, CachedObject, KernelFile, Source};
use crate::stores::{self, StoreRequest};
use crate::target::Target;
use crate::wait::{Detached, interruptible};
use crate::waiter::RawWaiter;

const PAGE_BYTES: u64 = 4096;
/// Memory that is taken between two checks of signals.
const POPULATE_STEP_BYTES: u64 = 32 << 20;

/// Opens URLs and paths.
struct Opener {
    cache: Cache,
    /// The opened stores, by prefix.
    stores: Mutex<HashMap<String, ObjectCache>>,
    counters: Arc<ReadCounters>,
    /// The freshness of opens that give none.
    freshness: Freshness,
}

impl Opener {
    fn add(&self, prefix: &str, request: StoreRequest) -> std::result::Result<ObjectCache, String> {
        let prefix = prefix.trim_end_matches('/');
        if prefix.split_once("://").is_none_or(|(scheme, _)| scheme.is_empty() || scheme == "file") {
            return Err(format!("{prefix:?} is not a URL prefix; name a store as s3://bucket"));
        }
        let (store, options) = stores::open(prefix, request)?;
        let options = options.freshness(self.freshness);
        let new = ObjectCache::new(self.cache.clone(), store, options).map_err(|error| error.to_string())?;
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have made it; all files of a store use one.
        Ok(stores.entry(prefix.to_owned()).or_insert(new).clone())
    }

    /// The store for a URL, and the key there, as it is written.
    fn find<'u>(&self, url: &'u str) -> Option<(ObjectCache, &'u str)> {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let key_of = |prefix: &str| url.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/'));
        let found = stores.iter().filter_map(|(prefix, store)| Some((prefix, store, key_of(prefix)?)));
        found.max_by_key(|(prefix, ..)| prefix.len()).map(|(_, store, key)| (store.clone(), key))
    }

    /// Like `find`, for a store that may have to be made.
    fn store<'u>(&self, url: &'u str) -> Result<(ObjectCache, &'u str)> {
        if let Some(found) = self.find(url) {
            return Ok(found);
        }
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let (bucket, key) = rest.split_once('/').unwrap_or_default();
        if !stores::is_network(url) || bucket.is_empty() {
            return Err(Failure::Os(ENODEV, format!("cannot open {url}: the cache has no store for it")));
        }
        let store = self.add(&format!("{scheme}://{bucket}"), StoreRequest::Network(HashMap::new()));
        Ok((store.map_err(|why| Failure::invalid(format!("cannot open {url}: {why}")))?, key))
    }

    fn object(&self, url: &str, freshness: Option<Freshness>) -> Result<Arc<dyn Source>> {
        let (store, key) = self.store(url)?;
        let store = match freshness {
            Some(freshness) => store.with_freshness(freshness),
            None => store,
        };
        let invalid = |error: &dyn std::fmt::Display| Failure::invalid(format!("cannot open {url}: {error}"));
        let key = percent_decode_str(key).decode_utf8().map_err(|error| invalid(&error))?;
        let path = Path::parse(&key).map_err(|error| invalid(&error))?;
        if path.as_ref() != key {
            return Err(invalid(&"a key that begins or ends with a slash cannot be opened"));
        }
        Ok(Arc::new(CachedObject { url: url.to_owned(), object: store.open(&path)? }))
    }

    fn local(&self, path: &std::path::Path) -> Result<Arc<dyn Source>> {
        let name = path.to_string_lossy().into_owned();
        let text = format!("cannot open {name}");
        let failed = |error: std::io::Error| Failure::of_kernel(&text, &error);
        let kind = std::fs::metadata(path).map_err(failed)?.file_type();
        if kind.is_dir() {
            return Err(Failure::Os(EISDIR, format!("{text}: it is a directory; name a file in it")));
        }
        if kind.is_fifo() {
            // An open of it would wait for a writer.
            let remedy = "its bytes have no positions; read it by Python's own open";
            return Err(Failure::Os(ESPIPE, format!("{text}: it is a pipe; {remedy}")));
        }
        let file = std::fs::File::open(path).map_err(failed)?;
        // Without a lease the file is checked before each read, so no read returns old bytes.
        match self.cache.open_with(path, OpenOptions::new().coherence(Coherence::Lease)) {
            Ok(file) => Ok(Arc::new(CachedFile { path: name, file })),
            Err(error) if error.kind() == ErrorKind::Open => Ok(Arc::new(KernelFile { path: name, file })),
            Err(error) => Err(Failure::of_cache(&name, &error)),
        }
    }

    fn open(&self, target: &Target, freshness: Option<&str>) -> Result<OpenedFile> {
        let freshness = freshness_of(freshness)?;
        let source = match target {
            Target::Path(_) => self.local(target.path()),
            Target::Url(url) => self.object(url, freshness),
        };
        let source = source.map_err(|failure| failure.of_open(target))?;
        Ok(OpenedFile { source, counters: Arc::clone(&self.counters) })
    }

    fn fetched(&self) -> Vec<FetchStats> {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.values().map(ObjectCache::stats).collect()
    }
}

/// A cache of this very process, until it is closed or collected.
#[pyclass(frozen, module = "quinion._quinion")]
pub(crate) struct RawCache {
    opener: Mutex<Option<Arc<Opener>>>,
    process: u32,
}

impl RawCache {
    fn opener(&self) -> PyResult<Arc<Opener>> {
        if self.process != std::process::id() {
            let text = "this cache is of the process that this one was forked from; make one here";
            return Err(Failure::Forked(text.into()).into());
        }
        let opener = self.opener.lock().unwrap_or_else(PoisonError::into_inner);
        opener.clone().ok_or_else(|| PyValueError::new_err("this cache is closed"))
    }

    fn take(&self) -> Option<Arc<Opener>> {
        self.opener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for RawCache {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(std::mem::take(&mut *match self.opener.get_mut() {
                Ok(opener) => opener,
                Err(poisoned) => poisoned.into_inner(),
            }));
            return;
        }
        // Reads in flight are waited for, without the GIL.
        let Some(opener) = self.take() else { return };
        let ending = std::thread::Builder::new().name("quinion-close".into());
        let _ = ending.spawn(move || drop(opener)); // what could not be moved is dropped here
    }
}

#[pymethods]
impl RawCache {
    #[new]
    fn new(
        py: Python<'_>,
        memory: u64,
        disk: Option<(PathBuf, u64)>,
        stores: HashMap<String, StoreRequest>,
        freshness: Option<&str>,
    ) -> PyResult<Self> {
        let freshness = freshness_of(freshness)?.unwrap_or_default();
        let mut builder = Cache::builder().memory(memory);
        if let Some((folder, bytes)) = disk {
            builder = builder.disk(DiskOptions::new(folder, bytes));
        }
        let cache =
            py.detach(|| builder.build()).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let (stores_made, counters) = (Mutex::default(), Arc::default());
        let opener = Arc::new(Opener { cache, stores: stores_made, counters, freshness });
        for (prefix, request) in stores {
            opener.add(&prefix, request).map_err(PyValueError::new_err)?;
        }
        Ok(Self { opener: Mutex::new(Some(opener)), process: std::process::id() })
    }

    fn open(&self, py: Python<'_>, target: Target, freshness: Option<String>) -> PyResult<RawFile> {
        let opener = self.opener()?;
        if matches!(target, Target::Url(_)) {
            return interruptible(py, move || opener.open(&target, freshness.as_deref())).map(RawFile::from);
        }
        Ok(py.detach(move || opener.open(&target, freshness.as_deref()))?.into())
    }

    fn start_open(
        &self,
        waiter: &RawWaiter,
        number: u64,
        target: Target,
        freshness: Option<String>,
    ) -> PyResult<()> {
        let opener = self.opener()?;
        waiter.start(number, move || opener.open(&target, freshness.as_deref()).map(OpenedFile::into_answer))
    }

    /// Takes memory from the machine until the cache has `bytes`; returns how much it has. Ctrl-C ends it between two
    /// steps.
    fn populate(&self, py: Python<'_>, bytes: u64) -> PyResult<u64> {
        let opener = Detached::from(self.opener()?);
        let mut wanted = bytes.min(POPULATE_STEP_BYTES);
        loop {
            let failed = |error| Failure::of_cache("memory", &error);
            let grown = py.detach(|| opener.cache.populate(wanted)).map_err(failed)?;
            py.check_signals()?;
            // The bound, or the end of the machine's memory.
            let is_all = grown.saturating_add(POPULATE_STEP_BYTES) < wanted;
            if wanted == bytes || is_all {
                return Ok(grown);
            }
            wanted = bytes.min(wanted.saturating_add(POPULATE_STEP_BYTES));
        }
    }

    /// Statistics of the cache.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (opener, dict) = (Detached::from(self.opener()?), PyDict::new(py));
        let (stats, fetched) = (opener.cache.stats(), opener.fetched());
        let sum = |part: fn(&FetchStats) -> u64| fetched.iter().map(part).sum::<u64>();
        let counters = &opener.counters;
        dict.set_item("reads", counters.reads.load(Ordering::Relaxed))?;
        dict.set_item("hits", counters.hits.load(Ordering::Relaxed))?;
        dict.set_item("bytes", counters.bytes.load(Ordering::Relaxed))?;
        dict.set_item("gets", sum(|fetched| fetched.gets))?;
        dict.set_item("heads", sum(|fetched| fetched.heads))?;
        dict.set_item("fetched_bytes", sum(|fetched| fetched.bytes))?;
        dict.set_item("memory_bytes", stats.memory_bytes)?;
        dict.set_item("grown_bytes", stats.grown_bytes)?;
        dict.set_item("cached_bytes", stats.cached_pages * PAGE_BYTES)?;
        dict.set_item("pinned_bytes", stats.pinned_bytes)?;
        if let Some(disk) = opener.cache.disk_stats() {
            dict.set_item("disk_bytes", disk.pages * PAGE_BYTES)?;
            dict.set_item("disk_hit_bytes", disk.hit_pages * PAGE_BYTES)?;
        }
        Ok(dict)
    }

    /// Gives back what no file, pin or read in flight keeps.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let Some(opener) = self.take() else { return Ok(()) };
        interruptible(py, move || {
            drop(opener);
            Ok(())
        })
    }
}

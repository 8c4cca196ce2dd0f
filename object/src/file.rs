//! File: one version of an object, open for reading.
//!
//! ```text
//!   read_at                copies                              hits as quinion::File's: no lock, no system call
//!   bytes, read_ranges     the cache's own pages, pinned       what is shorter than 16 KiB is copied: a pin would keep
//!                                                              a folio of up to 2 MiB for it
//!   .._async               the same; a hit at once, else the GETs are started, and no thread waits for them
//! ```
//!
//! Readahead is the cache's. This file knows more of objects: a small one comes whole; a first read of the last bytes
//! brings the footer that they tell of; a long read, or many ranges, are one plan, under a plug, of few GETs side by
//! side; and with each of long reads that follow each other, the next is asked for.
//!
//! Invariant: an announced range is a hint. A read that finds it not fulfilled fetches for itself.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use object_store::{GetResult, ObjectMeta, path::Path};
use quinion::internals::sys::fork::ForkGuard;
use quinion::{ErrorKind, File, Pinned, Prefetch, ReadOptions};

use crate::backend::ObjectBackend;
use crate::error::{Error, Result};
use crate::fetch::FetcherSlot;
use crate::plan::covering;

const COPIED_MAX: usize = 16 << 10;
/// Longer ranges are asked for before they are read: the cache reads as much at once by itself.
const LONG_MIN: u64 = 1 << 20;

/// A version of an object, open for reading. Cheap to clone; clones share their readahead.
#[derive(Clone, Debug)]
pub struct ObjectFile {
    inner: Arc<Inner>,
}

/// A version of an object that the cache has opened.
pub(crate) struct OpenedObject {
    pub(crate) file: File,
    pub(crate) meta: Arc<ObjectMeta>,
    pub(crate) backend: Arc<ObjectBackend>,
    pub(crate) fetcher: Arc<FetcherSlot>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    meta: Arc<ObjectMeta>,
    backend: Arc<ObjectBackend>,
    fetcher: Arc<FetcherSlot>,
    is_begun: AtomicBool,
    long_end: AtomicU64,
    /// Up to where was asked for, for long reads that follow each other.
    requested_end: AtomicU64,
    ahead_max: u64,
    process: ForkGuard,
}

#[derive(Debug)]
pub(crate) struct AnsweredGuard(Arc<ObjectBackend>);

impl Drop for AnsweredGuard {
    fn drop(&mut self) {
        self.0.set_answered(None);
    }
}

fn nowait() -> ReadOptions {
    ReadOptions::new().nowait(true)
}

impl ObjectFile {
    pub(crate) fn new(opened: OpenedObject, ahead_max: u64) -> Self {
        let OpenedObject { file, meta, backend, fetcher } = opened;
        let (is_begun, long_end) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
        let requested_end = AtomicU64::new(0);
        let process = ForkGuard::new();
        let inner =
            Inner { file, meta, backend, fetcher, is_begun, long_end, requested_end, ahead_max, process };
        Self { inner: Arc::new(inner) }
    }

    /// The store's metadata of it when it was opened.
    pub fn meta(&self) -> &ObjectMeta {
        &self.inner.meta
    }
    /// The object's key.
    pub fn path(&self) -> &Path {
        &self.inner.meta.location
    }
    /// The object's size in bytes.
    pub fn len(&self) -> u64 {
        self.inner.meta.size
    }
    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.inner.meta.size == 0
    }
    /// The cache's handle, for all that a [`quinion::File`] can besides.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// Reads up to `buffer.len()` bytes at byte `offset` and returns how many: fewer only at the object's end, or where
    /// the next read will tell an error.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::Fetch`], [`Error::Cache`].
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.announce(offset..offset.saturating_add(buffer.len() as u64));
        self.inner.file.read_at(buffer, offset).map_err(|error| self.failed(error))
    }

    /// As [`ObjectFile::read_at`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`ObjectFile::read_at`].
    pub async fn read_at_async(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.announce(offset..offset.saturating_add(buffer.len() as u64));
        self.inner.file.read_at_async(buffer, offset).await.map_err(|error| self.failed(error))
    }

    /// The bytes of `range`, which lies inside the object: without a copy, if they lie together in memory and are not
    /// few. They stay in the cache as long as the `Bytes`, or a part of it, lives, up to
    /// [`quinion::Builder::pinned_max`]; beyond that they are copied.
    ///
    /// # Errors
    /// [`Error::Range`]; and those of [`ObjectFile::read_at`].
    pub fn bytes(&self, range: Range<u64>) -> Result<Bytes> {
        self.check(&range)?;
        self.announce(range.clone());
        self.bytes_with(range, ReadOptions::default())
    }

    /// As [`ObjectFile::bytes`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`ObjectFile::bytes`].
    pub async fn bytes_async(&self, range: Range<u64>) -> Result<Bytes> {
        self.check(&range)?;
        self.announce(range.clone());
        match self.bytes_with(range.clone(), nowait()) {
            Err(error) if is_wait(&error) => self.bytes_when_there(range).await,
            answer => answer,
        }
    }

    /// The bytes of each of `ranges`, which lie inside the object, in any order, and may overlap. Missing ranges are
    /// asked for together: ranges close to each other by one GET, the others side by side.
    ///
    /// # Errors
    /// As [`ObjectFile::bytes`], of the first range that failed.
    pub fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let mut found = self.start_ranges(ranges)?;
        self.finish_ranges(ranges, &mut found)
    }

    /// As [`ObjectFile::read_ranges`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`ObjectFile::read_ranges`].
    pub async fn read_ranges_async(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let found = self.start_ranges(ranges)?;
        let mut bytes = Vec::with_capacity(ranges.len());
        for (range, found) in ranges.iter().zip(found) {
            bytes.push(match found {
                Some(found) => found,
                None => self.bytes_when_there(range.clone()).await?,
            });
        }
        Ok(bytes)
    }

    /// Pins the bytes of `range`, or as many as the object has there: see [`quinion::File::pin`].
    ///
    /// # Errors
    /// As [`ObjectFile::read_at`].
    pub fn pin(&self, range: Range<u64>) -> Result<Pinned> {
        self.announce(range.clone());
        self.pin_with(range, ReadOptions::default())
    }

    /// Starts fetching what of `range` is not cached, by few GETs, and waits for none of them.
    ///
    /// # Errors
    /// [`Error::Cache`]; [`Error::Ended`]: in a forked child.
    pub fn prefetch(&self, range: Range<u64>) -> Result<Prefetch> {
        if self.inner.process.is_forked() {
            // A lock that is taken here may be held by a thread that the child does not have.
            return Err(Error::Ended(self.path().clone()));
        }
        let end = range.end.min(self.len());
        let _plug = self.inner.backend.plug(range.start..end);
        let started = self.inner.file.will_need(range.start, end.saturating_sub(range.start));
        started.map_err(|error| self.failed(error))
    }

    /// Whether it is that handle, or a clone of it.
    pub(crate) fn is_same_handle(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The store says that the object still is this version: ranges that have failed may be asked for again.
    pub(crate) fn confirm(&self) {
        self.inner.backend.forget_failures();
    }

    /// While the guard lives, `result` answers the fetch that begins where it does.
    pub(crate) fn answered(&self, result: Option<GetResult>) -> AnsweredGuard {
        self.inner.backend.set_answered(result);
        AnsweredGuard(Arc::clone(&self.inner.backend))
    }

    pub(crate) fn drop_pages(&self) {
        // In a forked child there is nothing of it.
        let _ = self.inner.file.dont_need(0, self.len());
    }

    /// The bytes of `range` in pieces as they lie in memory, not copied if pins have room for them.
    pub(crate) async fn pieces(&self, range: Range<u64>) -> Result<Vec<Bytes>> {
        let len = (range.end - range.start) as usize;
        if len <= COPIED_MAX {
            return self.bytes_async(range).await.map(|bytes| vec![bytes]);
        }
        if len as u64 <= LONG_MIN {
            self.announce(range.clone()); // longer ones were, as a whole
        }
        let pinned = match self.pin_with(range.clone(), nowait()) {
            Err(error) if is_wait(&error) => self.pin_when_there(range.clone()).await,
            answer => answer,
        };
        match pinned {
            Ok(pinned) if pinned.len() == len => Ok(pieces_of(&pinned)),
            Err(error) if !is_full(&error) => Err(error),
            // There is no room, or it is to be told that the object is shorter than it says.
            _ => self.copy_when_there(range).await.map(|bytes| vec![bytes]),
        }
    }

    pub(crate) fn ahead_max(&self) -> u64 {
        self.inner.ahead_max
    }

    /// The meaning of an error that the cache has returned for this object's [`file`](ObjectFile::file).
    pub fn error_of(&self, error: quinion::Error) -> Error {
        self.failed(error)
    }

    fn failed(&self, error: quinion::Error) -> Error {
        Error::of_read(self.path(), error)
    }

    fn check(&self, range: &Range<u64>) -> Result<()> {
        if range.start <= range.end && range.end <= self.len() {
            return Ok(());
        }
        Err(Error::Range { path: self.path().clone(), range: range.clone(), size: self.len() })
    }

    /// Asks, without waiting, for bytes that are about to be read, as far as the cache would not do so by itself: for a
    /// reader that uses the cache's [`file`](ObjectFile::file) itself.
    pub fn announce(&self, range: Range<u64>) {
        if self.inner.process.is_forked() {
            return; // as in `prefetch`; the read says so
        }
        if range.end.saturating_sub(range.start) > LONG_MIN {
            self.announce_long(range, u64::MAX);
        } else if !self.inner.is_begun.load(Ordering::Relaxed) {
            self.inner.is_begun.store(true, Ordering::Relaxed);
            let (fetcher, len) = (self.inner.fetcher.get(), self.len());
            let options = &fetcher.options;
            // A prefetch that cannot be started now is left to the read.
            if len <= options.whole_max {
                let _ = self.prefetch(0..len);
            } else if range.start < len && len - range.start <= options.fill_min.min(options.tail_max) {
                let _ = self.prefetch(len - options.tail_max.min(len)..len);
            }
        }
    }

    /// Before a long read, whose first `most` bytes may be asked for. If it follows the last one, what comes after it
    /// is asked for as well, in steps of a GET. Returns up to where was asked for.
    pub(crate) fn announce_long(&self, range: Range<u64>, most: u64) -> u64 {
        let Inner { fetcher, long_end, requested_end, ahead_max, process, .. } = &*self.inner;
        if process.is_forked() {
            return range.start; // as in `prefetch`
        }
        let step = fetcher.get().options.request_max.max(range.end - range.start).min(*ahead_max);
        let is_next = long_end.swap(range.end, Ordering::Relaxed) == range.start;
        let asked = requested_end.load(Ordering::Relaxed);
        if is_next && range.end.saturating_add(step / 2) <= asked {
            return asked;
        }
        let until = range.end.saturating_add(if is_next { step } else { 0 });
        let until = until.min(range.start.saturating_add(most));
        requested_end.store(until, Ordering::Relaxed);
        let _ = self.prefetch(range.start..until);
        until
    }

    fn start_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Option<Bytes>>> {
        ranges.iter().try_for_each(|range| self.check(range))?;
        let cached_only = ReadOptions::new().cached_only(true);
        let cached = |range: &Range<u64>| match self.bytes_with(range.clone(), cached_only) {
            Err(error) if is_wait(&error) => Ok(None),
            answer => answer.map(Some),
        };
        let found: Vec<_> = ranges.iter().map(cached).collect::<Result<_>>()?;
        let missing = ranges.iter().zip(&found).filter(|(_, found)| found.is_none());
        let missing: Vec<_> = missing.map(|(range, _)| range.clone()).collect();
        if !missing.is_empty() {
            self.announce(0..0); // a small object comes whole
            let wanted = covering(&missing, self.inner.fetcher.get().options.gap_max);
            let span =
                wanted.first().map_or(0, |first| first.start)..wanted.last().map_or(0, |last| last.end);
            let _plug = self.inner.backend.plug(span);
            for range in wanted {
                let _ = self.prefetch(range);
            }
        }
        Ok(found)
    }

    fn finish_ranges(&self, ranges: &[Range<u64>], found: &mut [Option<Bytes>]) -> Result<Vec<Bytes>> {
        let bytes = ranges.iter().zip(found).map(|(range, found)| match found.take() {
            Some(bytes) => Ok(bytes),
            None => self.bytes_with(range.clone(), ReadOptions::default()),
        });
        bytes.collect()
    }

    fn bytes_with(&self, range: Range<u64>, options: ReadOptions) -> Result<Bytes> {
        let len = (range.end - range.start) as usize;
        if len <= COPIED_MAX {
            return self.copy(range, options);
        }
        match self.pin_with(range.clone(), options) {
            Ok(pinned) if pinned.len() == len => Ok(in_one_piece(pinned)),
            Err(error) if !is_full(&error) => Err(error),
            _ => self.copy(range, options),
        }
    }

    fn pin_with(&self, range: Range<u64>, options: ReadOptions) -> Result<Pinned> {
        self.inner.file.pin_with(range.start, len_of(&range), options).map_err(|error| self.failed(error))
    }

    /// All bytes of `range`.
    fn copy(&self, range: Range<u64>, options: ReadOptions) -> Result<Bytes> {
        let mut buffer = vec![0; (range.end - range.start) as usize];
        let mut done = 0;
        while done < buffer.len() {
            let at = range.start + done as u64;
            let read = self.inner.file.read_at_with(&mut buffer[done..], at, options);
            match read.map_err(|error| self.failed(error))? {
                0 => return Err(self.ends_before(range, at)),
                bytes => done += bytes,
            }
        }
        Ok(buffer.into())
    }

    async fn bytes_when_there(&self, range: Range<u64>) -> Result<Bytes> {
        let len = (range.end - range.start) as usize;
        if len <= COPIED_MAX {
            return self.copy_when_there(range).await;
        }
        match self.pin_when_there(range.clone()).await {
            Ok(pinned) if pinned.len() == len => Ok(in_one_piece(pinned)),
            Err(error) if !is_full(&error) => Err(error),
            _ => self.copy_when_there(range).await,
        }
    }

    async fn pin_when_there(&self, range: Range<u64>) -> Result<Pinned> {
        let pinned = self.inner.file.pin_async(range.start, len_of(&range)).await;
        pinned.map_err(|error| self.failed(error))
    }

    async fn copy_when_there(&self, range: Range<u64>) -> Result<Bytes> {
        let mut buffer = vec![0; (range.end - range.start) as usize];
        let mut done = 0;
        while done < buffer.len() {
            let at = range.start + done as u64;
            let read = self.inner.file.read_at_async(&mut buffer[done..], at).await;
            match read.map_err(|error| self.failed(error))? {
                0 => return Err(self.ends_before(range, at)),
                bytes => done += bytes,
            }
        }
        Ok(buffer.into())
    }

    /// The object has what its store said; only a backend that is at fault ends before.
    fn ends_before(&self, range: Range<u64>, size: u64) -> Error {
        Error::Range { path: self.path().clone(), range, size }
    }
}

fn is_wait(error: &Error) -> bool {
    matches!(error, Error::Cache { source, .. } if source.kind() == ErrorKind::WouldBlock)
}

fn is_full(error: &Error) -> bool {
    matches!(error, Error::Cache { source, .. } if source.kind() == ErrorKind::NoMemory)
}

fn len_of(range: &Range<u64>) -> usize {
    usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX)
}

/// Without a copy, if it lies together in memory.
fn in_one_piece(pinned: Pinned) -> Bytes {
    if pinned.as_slice().is_some() { Bytes::from_owner(pinned) } else { pinned.to_vec().into() }
}

struct PinnedPiece {
    pinned: Pinned,
    place: usize,
}

impl AsRef<[u8]> for PinnedPiece {
    fn as_ref(&self) -> &[u8] {
        self.pinned.chunks().nth(self.place).unwrap_or(&[])
    }
}

fn pieces_of(pinned: &Pinned) -> Vec<Bytes> {
    let piece = |place| Bytes::from_owner(PinnedPiece { pinned: pinned.clone(), place });
    (0..pinned.chunks().count()).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ObjectCache, Options};
    use object_store::{ObjectStoreExt, memory::InMemory};

    #[test]
    fn a_plug_of_one_thread_delays_no_other() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let (store, path) = (Arc::new(InMemory::new()), Path::from("object"));
        runtime.block_on(store.put(&path, vec![7; 4 << 20].into())).expect("a put");
        let cache = quinion::Cache::builder().memory(32 << 20).build().expect("a cache");
        let objects = ObjectCache::new(cache, store, Options::new().whole_max(0)).expect("threads");
        let file = objects.open(&path).expect("it is there");
        let plug = file.inner.backend.plug(2 << 20..4 << 20);
        let (sender, receiver) = std::sync::mpsc::channel();
        let others = file.clone();
        std::thread::spawn(move || sender.send(others.bytes(100_000..1_900_000).expect("it is there")));
        let bytes =
            receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("it is not kept waiting");
        assert!(bytes.len() == 1_800_000 && bytes.iter().all(|&byte| byte == 7));
        // This thread's fills are kept back, also when another guard of it ends before.
        let before = objects.stats().gets;
        file.prefetch(2 << 20..3 << 20).expect("it is started");
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(objects.stats().gets, before);
        drop(plug);
        assert_eq!(file.bytes(2 << 20..3 << 20).expect("it is there").len(), 1 << 20);
    }
}

//! Store: the trait `ObjectStore` over the cache, for engines that know nothing of it.
//!
//! ```text
//!   get_opts    HEAD, or what is known --> conditions, range --> a stream of the cache's own pages
//!               the first bytes of an object that nothing is known of: a GET in place of the HEAD, whose body is used
//!   get_ranges  HEAD, or what is known --> ranges, close ones together
//!   put, copy, rename, delete, the end of an upload   the bare store; then what is known is forgotten
//!   list, uploads                                     the bare store
//!   get of a version by its id                        the bare store
//!   get of an object that no file can be, or whose versions cannot be told apart    the bare store, by one GET
//! ```
//!
//! An object's **known** state is its open handle and its attributes. [`Freshness`] says for how long; by default not
//! at all: each call asks, and its conditions go to the store with the question. The answer to a HEAD is kept by the
//! rules of `metadata_cache.rs`; the call itself may use it.
//!
//! Extensions of a request go with the HEAD; the GETs behind it carry none, since many callers may wait for one.
//!
//! A get that finds its object replaced before it has given a byte begins again with the new version; the bare store
//! answers one that writers overtake again and again (`bare.rs`). Later it is an error: a stream is of one version.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error as StoreError, GetOptions, GetRange, GetResult, GetResultPayload,
    ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, RenameOptions, Result as StoreResult,
};
use quinion::Cache;

use crate::bare;
use crate::cache::ObjectCache;
use crate::error::{Error, Result};
use crate::file::ObjectFile;
use crate::metadata_cache::{
    MetadataCache, NoteWrites, Upload, Written, is_to_be_asked, noting_deletions, resolve,
};
use crate::options::{Freshness, Options};

/// A long stream gives its bytes in parts of this many at most, cut where this is a divisor.
const PART_BYTES: u64 = 1 << 20;
const WHOLE_PART_MAX: u64 = 8 << 20;
/// How far a stream asks ahead of its reader, if the cache is large enough: a second of one connection, or what a
/// network of 2 GB/s brings in the time to the first byte.
const AHEAD_BYTES: u64 = 64 << 20;
/// How often a get whose object is replaced each time, between HEAD and GET, is tried, before the bare store answers,
/// by one request.
const CHANGES_MAX: u32 = 3;

/// `store`, read through `cache`, with the default [`Options`] and [`Freshness`].
///
/// # Errors
/// [`Error::Runtime`].
pub fn cached(store: Arc<dyn ObjectStore>, cache: Cache) -> Result<CachedStore> {
    Ok(cached_with(ObjectCache::new(cache, store, Options::default())?, Freshness::default()))
}

/// The store of `objects`, read through its cache, with answers as old as `freshness` allows.
pub fn cached_with(objects: ObjectCache, freshness: Freshness) -> CachedStore {
    CachedStore { shared: Arc::new(Shared { objects, known: MetadataCache::new(freshness) }) }
}

/// An `ObjectStore` whose reads come from a page cache. Cheap to clone; clones share the known metadata.
#[derive(Clone)]
pub struct CachedStore {
    shared: Arc<Shared>,
}

struct Shared {
    objects: ObjectCache,
    known: MetadataCache<KnownObject>,
}

#[derive(Clone)]
struct KnownObject {
    file: ObjectFile,
    attributes: Attributes,
}

impl fmt::Debug for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("CachedStore");
        text.field("objects", &self.shared.objects)
            .field("freshness", &self.shared.known.freshness())
            .finish()
    }
}

impl fmt::Display for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quinion({})", self.shared.bare())
    }
}

impl Shared {
    fn bare(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.objects.fetcher().store)
    }

    /// The object by its known metadata, if that is fresh, or as the store tells, under the conditions of `options`. If
    /// it was asked by a GET, also the answer to that.
    async fn lookup(&self, path: &Path, options: &GetOptions) -> Result<(KnownObject, Option<GetResult>)> {
        self.objects.check_process(path)?;
        let known = self.known.fresh(path);
        if let Some(object) = known.filter(|object| !is_to_be_asked(options, object.file.meta())) {
            let checked = options.check_preconditions(object.file.meta());
            checked.map_err(|source| Error::Open { path: path.clone(), source })?;
            return Ok((object, None));
        }
        let (question, deadline) = (self.known.question(), self.objects.fetcher().deadline());
        let is_known = self.known.handle(path).is_some();
        let mut answered = None;
        let most = self.objects.fetcher().options.request_max.min(self.objects.ahead_max().max(PART_BYTES));
        if let Some(range) = first_bytes(options, most).filter(|_| !is_known) {
            let get = GetOptions { range: Some(range), ..options.clone() };
            match self.objects.open_get(path, get, deadline).await {
                Ok(result) => answered = Some(result),
                Err(error @ Error::Open { source: StoreError::NotFound { .. }, .. })
                | Err(error @ Error::Open { source: StoreError::Precondition { .. }, .. })
                | Err(error @ Error::Open { source: StoreError::NotModified { .. }, .. }) => {
                    return Err(error);
                }
                // It has no bytes, or the store fails for the moment.
                Err(_) => {}
            }
        }
        let head = GetOptions { range: None, version: None, head: true, ..options.clone() };
        let told = match &answered {
            Some(result) => Ok((result.meta.clone(), result.attributes.clone())),
            None => {
                self.objects.head(path, head, deadline).await.map(|result| (result.meta, result.attributes))
            }
        };
        if matches!(&told, Err(Error::Open { source: StoreError::NotFound { .. }, .. })) {
            self.forget(path);
        }
        let (meta, attributes) = told?;
        let handle = self.known.handle(path).map(|known| known.file);
        // The handle of the same version goes on: its readahead knows its reader.
        let file = match handle {
            Some(file) if *file.meta() == meta => {
                file.confirm();
                file
            }
            _ => self.objects.open_known(meta)?,
        };
        let object = KnownObject { file, attributes };
        self.known.keep(path, object.clone(), question);
        Ok((object, answered))
    }

    fn forget(&self, path: &Path) {
        release(self.known.forget(path));
    }
}

/// Handles that others have of it can go on, but it is not worth its memory.
fn release(gone: Option<KnownObject>) {
    if let Some(object) = gone {
        object.file.drop_pages();
    }
}

impl NoteWrites for Shared {
    fn note_write(&self, path: &Path) {
        if !self.objects.is_forked() {
            self.objects.note_write(path);
            release(self.known.note_write(path));
        }
    }
    fn note_writes(&self) {
        if !self.objects.is_forked() {
            self.objects.note_writes();
            self.known.note_writes();
        }
    }
}

/// The range of a GET that may take the place of a HEAD for a get with `options`: it is long, and begins with the
/// object.
fn first_bytes(options: &GetOptions, most: u64) -> Option<GetRange> {
    let len = match &options.range {
        _ if options.head => return None,
        None | Some(GetRange::Offset(0)) => most,
        Some(GetRange::Bounded(range)) if range.start == 0 && range.end > PART_BYTES => range.end,
        _ => return None,
    };
    Some(GetRange::Bounded(0..len.min(most).next_multiple_of(PART_BYTES).min(most)))
}

struct Reading {
    shared: Arc<Shared>,
    file: ObjectFile,
    at: u64,
    end: u64,
    requested_end: u64,
    part_max: u64,
}

impl Reading {
    fn new(shared: &Arc<Shared>, file: ObjectFile, range: Range<u64>) -> Self {
        let len = range.end - range.start;
        // A short range is left to the cache's readahead, which then sees each miss.
        let requested_end = match len > PART_BYTES {
            true => file.announce_long(range.clone(), Self::ahead(&file)),
            false => range.end,
        };
        let part_max = if len <= WHOLE_PART_MAX { WHOLE_PART_MAX * 2 } else { PART_BYTES };
        Self { shared: Arc::clone(shared), file, at: range.start, end: range.end, requested_end, part_max }
    }

    fn ahead(file: &ObjectFile) -> u64 {
        AHEAD_BYTES.min(file.ahead_max()).max(PART_BYTES)
    }

    async fn part(&mut self) -> Result<Vec<Bytes>> {
        let ahead = Self::ahead(&self.file);
        // A GET at a time: to allocate the pages of half a window takes as long as to fetch them.
        let step = self.shared.objects.fetcher().options.request_max.min(ahead / 2);
        if self.at + ahead >= self.requested_end + step && self.requested_end < self.end {
            let until = self.end.min((self.at + ahead).min(self.requested_end + step));
            let _ = self.file.prefetch(self.requested_end..until);
            self.requested_end = until;
        }
        let end = self.end.min(self.at.saturating_add(self.part_max) / PART_BYTES * PART_BYTES);
        let part = self.file.pieces(self.at..end).await;
        if matches!(&part, Err(error) if error.is_change()) {
            self.shared.forget(self.file.path());
        }
        self.at = end;
        part
    }

    fn into_stream(self, first: Vec<Bytes>) -> BoxStream<'static, StoreResult<Bytes>> {
        let rest = stream::unfold(Some(self), |reading| async move {
            let mut reading = reading.filter(|reading| reading.at < reading.end)?;
            match reading.part().await {
                Ok(part) => Some((stream::iter(part.into_iter().map(Ok)).boxed(), Some(reading))),
                Err(error) => Some((stream::iter([Err(error.into())]).boxed(), None)),
            }
        });
        stream::iter(first.into_iter().map(Ok)).chain(rest.flatten()).boxed()
    }
}

impl CachedStore {
    /// The objects behind it, to be read as files.
    pub fn objects(&self) -> &ObjectCache {
        &self.shared.objects
    }

    /// Forgets the metadata of an object. For writes that went to the store by another way: call it when they have
    /// ended, however they ended, and before that is told to anyone.
    pub fn invalidate(&self, path: &Path) {
        self.shared.note_write(path);
    }

    /// As [`CachedStore::invalidate`], of all objects.
    pub fn invalidate_all(&self) {
        self.shared.note_writes();
    }

    async fn answer(
        &self,
        object: KnownObject,
        answered: Option<GetResult>,
        options: &GetOptions,
    ) -> StoreResult<GetResult> {
        let KnownObject { file, attributes, .. } = object;
        let _answered = answered.is_some().then(|| file.answered(answered));
        let range = resolve(options.range.as_ref(), file.len())?;
        let meta = file.meta().clone();
        let payload = if options.head || range.is_empty() {
            stream::empty().boxed()
        } else {
            let mut reading = Reading::new(&self.shared, file, range.clone());
            let first = reading.part().await?;
            reading.into_stream(first)
        };
        let payload = GetResultPayload::Stream(payload);
        Ok(GetResult { payload, meta, range, attributes, extensions: Default::default() })
    }
}

fn is_replaced(error: &StoreError) -> bool {
    let fetch = match error {
        StoreError::Precondition { source, .. } | StoreError::NotFound { source, .. } => source,
        _ => return false,
    };
    fetch.downcast_ref::<crate::FetchError>().is_some()
}

#[async_trait]
impl ObjectStore for CachedStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        let _written = Written(Arc::clone(&self.shared), vec![path.clone()]);
        self.shared.bare().put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        let upload = self.shared.bare().put_multipart_opts(path, options).await?;
        Ok(Box::new(Upload { upload, path: path.clone(), shared: Arc::clone(&self.shared) }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> StoreResult<GetResult> {
        if options.version.is_some() {
            return bare::get(&*self.shared.bare(), path, options).await;
        }
        for _ in 0..CHANGES_MAX {
            let (object, answered) = match self.shared.lookup(path, &options).await {
                Err(Error::TooLarge { .. } | Error::Unversioned(_)) => break,
                object => object?,
            };
            match self.answer(object, answered, &options).await {
                Err(error) if is_replaced(&error) => self.shared.forget(path),
                answer => return answer,
            }
        }
        bare::get(&*self.shared.bare(), path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> StoreResult<Vec<Bytes>> {
        for _ in 0..CHANGES_MAX {
            // A HEAD asks for the metadata, since the bytes that are wanted are not one range.
            let file = match self.shared.lookup(path, &GetOptions::new().with_head(true)).await {
                Err(Error::TooLarge { .. } | Error::Unversioned(_)) => break,
                found => found?.0.file,
            };
            let size = file.len();
            let resolved = ranges.iter().map(|range| resolve(Some(&range.clone().into()), size));
            let resolved = resolved.collect::<StoreResult<Vec<_>>>()?;
            match file.read_ranges_async(&resolved).await.map_err(StoreError::from) {
                Err(error) if is_replaced(&error) => self.shared.forget(path),
                answer => return answer,
            }
        }
        bare::get_ranges(&*self.shared.bare(), path, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        noting_deletions(Arc::clone(&self.shared), self.shared.bare().delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.shared.bare().list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.shared.bare().list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.shared.bare().list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> StoreResult<()> {
        let _written = Written(Arc::clone(&self.shared), vec![to.clone()]);
        self.shared.bare().copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> StoreResult<()> {
        let _written = Written(Arc::clone(&self.shared), vec![from.clone(), to.clone()]);
        self.shared.bare().rename_opts(from, to, options).await
    }
}

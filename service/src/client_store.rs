//! Client store: the trait `ObjectStore` over a client, for engines that know nothing of it.
//!
//! ```text
//!   get, get_ranges, head   the server opens the object (its HEAD) --> conditions, range --> bytes of its cache
//!   a long get from the first byte, of what the server does not know: its first GET in place of the HEAD
//!                           up to 16 KiB: copied, at once if cached    longer: pinned, or copied where pins are full
//!   put, copy, rename, delete, the end of an upload    the store given; then what is known is forgotten
//!   list, uploads, get of a version by its id          the store given
//! ```
//!
//! A client's requests block. They are asked on threads of the store's own, so that no thread of the caller's runtime
//! waits, whichever runtime that is. Short reads of cached bytes are copied without them, and all reads of cached bytes
//! when none of the threads is free: a store that does not answer may hold them all.
//!
//! An object's **known** state is its open handle; [`Freshness`] says for how long, by default not at all. It is kept
//! and forgotten by the rules of `quinion_object`'s `metadata_cache.rs`, and sooner if the process wants the handle for
//! another file (`connection.rs`).
//!
//! When the server has ended, reads go on at the one that listens in its place. Without one, or when it cannot be
//! asked, a read is an error; or, by [`Failover::Direct`], which waits for none, a GET of the store given. A stream
//! that has begun goes on there under the condition of its strong ETag, and is an error without one.
//!
//! Invariants:
//!  1. A read, and a stream, is of one version, also if it ends at the store given.
//!  2. Only the server's own answer says that there is no object: a server that is gone never does.
//!  3. Attributes are the object's own: headers that `quinion serve` keeps as metadata are told only to those that ask.
//!
//! Not promised: that `Bytes` can be read in a forked child. They may lie in memory that only this process has.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, CopyOptions, Error as StoreError, GetOptions, GetRange, GetResult,
    GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, RenameOptions, Result as StoreResult,
};
use quinion_object::Freshness;
use quinion_object::internals::{
    MetadataCache, NoteWrites, Upload, Written, bare_get, bare_get_ranges, exactly, is_to_be_asked,
    noting_deletions, resolve,
};

use crate::client::Client;
use crate::connection::FileKeeper;
use crate::error::{Error, ErrorKind, Result};
use crate::file::ClientFile;
use crate::ranges::RangeRead;
use crate::threads::Threads;

/// Shorter ranges are copied: a pin would keep a folio of up to 2 MiB for them.
const COPIED_MAX: u64 = 16 << 10;
const PART_BYTES: u64 = 1 << 20;
const WHOLE_PART_MAX: u64 = 8 << 20;
/// How far a stream asks ahead of its reader, if the server's cache is large enough; see `quinion_object`'s `store.rs`.
const AHEAD_BYTES: u64 = 64 << 20;
/// As much as a GET brings, unless the server's options say otherwise.
const STEP_BYTES: u64 = 8 << 20;
/// A server gives a process twice as many handles.
const KNOWN_MAX: usize = 2048;
/// How often a get whose object is replaced each time is tried, before the store given answers.
const CHANGES_MAX: u32 = 3;

/// `store`, read through the cache of the server that `client` is connected to, which has the same objects under
/// `prefix`, as `s3://bucket`.
///
/// # Errors
/// [`ErrorKind::Start`].
pub fn cached(store: Arc<dyn ObjectStore>, client: Client, prefix: &str) -> Result<ClientStore> {
    ClientStore::builder(store, client, prefix).build()
}

/// How reads go on when the server has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Failover {
    /// Reads fail with an error that says that the server has ended.
    #[default]
    Error,
    /// Reads are GETs of the store that was given.
    Direct,
}

/// How a [`ClientStore`] is made.
#[derive(Debug)]
pub struct ClientStoreBuilder {
    store: Arc<dyn ObjectStore>,
    client: Client,
    prefix: String,
    freshness: Freshness,
    failover: Failover,
    kept_headers: bool,
}

impl ClientStoreBuilder {
    /// How old the known metadata of an object may be. By default each call asks.
    #[must_use]
    pub fn freshness(mut self, freshness: Freshness) -> Self {
        self.freshness = freshness;
        self
    }

    /// How reads go on when the server has ended. By default they are errors.
    #[must_use]
    pub fn failover(mut self, failover: Failover) -> Self {
        self.failover = failover;
        self
    }

    /// Whether the attributes of an object include the headers that `quinion serve` keeps as metadata, by names that
    /// begin with [`ClientStore::KEPT_HEADER`]. By default they do not: a program that writes back the attributes that
    /// it has read would make metadata of them. For endpoints that make headers of them again.
    #[must_use]
    pub fn kept_headers(mut self, kept_headers: bool) -> Self {
        self.kept_headers = kept_headers;
        self
    }

    /// Makes it.
    ///
    /// # Errors
    /// [`ErrorKind::Start`]: the system gives no threads.
    pub fn build(self) -> Result<ClientStore> {
        let Self { store, client, prefix, freshness, failover, kept_headers } = self;
        let client = match failover {
            Failover::Error => client,
            Failover::Direct => client.with_reconnect_timeout(Duration::ZERO), // the store given is there at once
        };
        // Open handles are kept here alone: with the server's freshness on top they would be twice as old, and a
        // write through this store would not be seen.
        let client = client.with_freshness(Freshness::Always);
        let threads = Threads::new()?;
        let prefix = prefix.trim_end_matches('/').to_owned();
        let known = MetadataCache::new(freshness).with_max(KNOWN_MAX);
        let shared = Shared { store, client, prefix, failover, kept_headers, threads, known };
        Ok(ClientStore { shared: Arc::new(shared) })
    }
}

/// An `ObjectStore` whose reads come from a server's cache. Cheap to clone; clones share the known metadata.
#[derive(Clone)]
pub struct ClientStore {
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<dyn ObjectStore>,
    client: Client,
    prefix: String,
    failover: Failover,
    kept_headers: bool,
    threads: Threads,
    known: MetadataCache<KnownObject>,
}

#[derive(Clone)]
struct KnownObject {
    file: ClientFile,
    meta: ObjectMeta,
}

struct LookupResult {
    object: KnownObject,
    /// Whether the handle is one that calls share for a while, so that its server may have ended before this call.
    is_kept: bool,
}

impl fmt::Debug for ClientStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { store, prefix, known, failover, .. } = &*self.shared;
        let mut text = f.debug_struct("ClientStore");
        text.field("store", &format_args!("{store}"))
            .field("prefix", prefix)
            .field("freshness", &known.freshness());
        text.field("failover", failover).finish_non_exhaustive()
    }
}

impl fmt::Display for ClientStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QuinionClient({})", self.shared.store)
    }
}

enum ServerAnswer<T> {
    Answer(T),
    Replaced,
    /// The server has ended, and the store given is to be asked.
    Direct,
}

impl Shared {
    /// The name by which the server opens it: a URL is percent-decoded there.
    fn url(&self, path: &Path) -> String {
        format!("{}/{}", self.prefix, path.as_ref().replace('%', "%25"))
    }

    /// The object by its known metadata, if that is fresh and fulfils the conditions, or as the server tells.
    async fn lookup(self: &Arc<Self>, path: &Path, options: &GetOptions) -> Result<LookupResult> {
        // First: in a forked child a lock may be one that no thread gives back.
        if self.threads.is_forked() {
            return Err(Error::forked());
        }
        let known = self.known.fresh(path);
        if let Some(object) = known.filter(|object| !is_to_be_asked(options, &object.meta)) {
            return Ok(LookupResult { object, is_kept: true });
        }
        let question = self.known.question();
        let (client, url, first) = (self.client.clone(), self.url(path), first_bytes(options));
        let opened = self.threads.run(move || match first {
            Some(len) => client.open_first(&url, len),
            None => client.open(&url),
        });
        let opened = opened.await;
        if matches!(&opened, Err(error) if error.errno() == Some(libc::ENOENT)) {
            self.forget(path);
        }
        let file = opened?;
        let object = KnownObject { meta: meta_of(path, &file), file };
        let is_kept = self.known.freshness() != Freshness::Always;
        if is_kept {
            let keeper: Weak<Self> = Arc::downgrade(self);
            object.file.inner.connection.note_keeper(keeper);
            self.known.keep(path, object.clone(), question);
        }
        Ok(LookupResult { object, is_kept })
    }

    fn forget(&self, path: &Path) {
        if !self.threads.is_forked() {
            drop(self.known.forget(path)); // unlocked: the server has it back
        }
    }

    /// Forgets `file`, but not the handle by which another call has replaced it meanwhile.
    fn forget_handle(&self, path: &Path, file: &ClientFile) {
        if !self.threads.is_forked() {
            self.known.forget_if(path, |known| Arc::ptr_eq(&known.file.inner, &file.inner));
        }
    }

    /// `range` lies inside the object; the pieces are as they lie in memory.
    async fn read(&self, file: &ClientFile, range: Range<u64>) -> Result<Vec<Bytes>> {
        let len = range.end - range.start;
        // A copy is dearer than a pin, and cheaper than to wait for the threads of a store that hangs.
        if len <= COPIED_MAX || self.threads.is_full() {
            let mut buffer = vec![0; len as usize];
            if file.read_ready(&mut buffer, range.start)? {
                return Ok(vec![buffer.into()]);
            }
        }
        let file = file.clone();
        self.threads.run(move || pieces(&file, range)).await
    }

    /// After an error of a look.
    fn after_lookup<T>(&self, path: &Path, error: Error) -> StoreResult<ServerAnswer<T>> {
        if error.kind() == ErrorKind::Changed {
            self.forget(path);
            return Ok(ServerAnswer::Replaced);
        }
        if self.is_direct(&error) {
            self.forget(path);
            return Ok(ServerAnswer::Direct);
        }
        Err(store_error(path, error))
    }

    /// After an error of a read of an object that was looked up. Others may read by the same handle, and each of them
    /// comes here.
    fn after_read<T>(&self, found: &LookupResult, error: Error) -> StoreResult<ServerAnswer<T>> {
        let KnownObject { file, meta } = &found.object;
        let path = &meta.location;
        // A handle that others know as well may be one of a server before the one that is there now.
        let is_of_old_server = error.kind() == ErrorKind::OwnerDead && found.is_kept;
        let is_direct = self.is_direct(&error);
        if error.kind() != ErrorKind::Changed && !is_direct && !is_of_old_server {
            return Err(store_error(path, error));
        }
        self.forget_handle(path, file);
        Ok(if is_direct { ServerAnswer::Direct } else { ServerAnswer::Replaced })
    }

    fn is_direct(&self, error: &Error) -> bool {
        let is_unanswered = error.kind() == ErrorKind::Open && error.errno().is_none();
        let is_direct = error.kind() == ErrorKind::OwnerDead || error.is_unasked() || is_unanswered;
        self.failover == Failover::Direct && is_direct
    }

    fn shown(&self, attributes: Attributes) -> Attributes {
        let is_kept = |kind: &Attribute| match kind {
            Attribute::Metadata(name) => name.starts_with(ClientStore::KEPT_HEADER),
            _ => false,
        };
        if self.kept_headers || !attributes.iter().any(|(kind, _)| is_kept(kind)) {
            return attributes;
        }
        let own = attributes.iter().filter(|(kind, _)| !is_kept(kind));
        own.map(|(kind, value)| (kind.clone(), value.clone())).collect()
    }

    async fn get(
        self: &Arc<Self>,
        path: &Path,
        options: &GetOptions,
    ) -> StoreResult<ServerAnswer<GetResult>> {
        let found = match self.lookup(path, options).await {
            Ok(found) => found,
            Err(error) => return self.after_lookup(path, error),
        };
        let KnownObject { file, meta } = found.object.clone();
        options.check_preconditions(&meta)?;
        let range = resolve(options.range.as_ref(), meta.size)?;
        let attributes = self.shown(file.attributes());
        let payload = if options.head || range.is_empty() {
            stream::empty().boxed()
        } else {
            let mut reading = Reading::new(self, found.object.clone(), range.clone());
            match reading.part().await {
                Ok(first) => reading.into_stream(first),
                Err(error) => return self.after_read(&found, error),
            }
        };
        let payload = GetResultPayload::Stream(payload);
        Ok(ServerAnswer::Answer(GetResult {
            payload,
            meta,
            range,
            attributes,
            extensions: Default::default(),
        }))
    }

    async fn get_ranges(
        self: &Arc<Self>,
        path: &Path,
        ranges: &[Range<u64>],
    ) -> StoreResult<ServerAnswer<Vec<Bytes>>> {
        let found = match self.lookup(path, &GetOptions::new().with_head(true)).await {
            Ok(found) => found,
            Err(error) => return self.after_lookup(path, error),
        };
        let KnownObject { file, meta } = found.object.clone();
        let resolved = ranges.iter().map(|range| resolve(Some(&range.clone().into()), meta.size));
        let resolved = resolved.collect::<StoreResult<Vec<_>>>()?;
        let is_short = resolved.iter().all(|range| range.end - range.start <= COPIED_MAX);
        if is_short || self.threads.is_full() {
            match ready_ranges(&file, &resolved) {
                Ok(Some(bytes)) => return Ok(ServerAnswer::Answer(bytes)),
                Ok(None) => {}
                Err(error) => return self.after_read(&found, error),
            }
        }
        match self.threads.run(move || whole_ranges(&file, &resolved)).await {
            Ok(bytes) => Ok(ServerAnswer::Answer(bytes)),
            Err(error) => self.after_read(&found, error),
        }
    }
}

impl FileKeeper for Shared {
    fn give_up_some(&self) -> bool {
        self.known.forget_older_half()
    }
}

impl NoteWrites for Shared {
    fn note_write(&self, path: &Path) {
        if !self.threads.is_forked() {
            drop(self.known.note_write(path));
        }
    }
    fn note_writes(&self) {
        if !self.threads.is_forked() {
            self.known.note_writes();
        }
    }
}

/// How many bytes from the first on a get with `options` is about to read, if that is long: its first GET can then tell
/// what the object is.
fn first_bytes(options: &GetOptions) -> Option<u64> {
    match &options.range {
        _ if options.head => None,
        None | Some(GetRange::Offset(0)) => Some(u64::MAX),
        Some(GetRange::Bounded(range)) if range.start == 0 && range.end > PART_BYTES => Some(range.end),
        _ => None,
    }
}

fn meta_of(path: &Path, file: &ClientFile) -> ObjectMeta {
    ObjectMeta {
        location: path.clone(),
        last_modified: file.modified().unwrap_or(std::time::SystemTime::UNIX_EPOCH).into(),
        size: file.len(),
        e_tag: file.e_tag().map(str::to_owned),
        version: file.version().map(str::to_owned),
    }
}

fn store_error(path: &Path, error: Error) -> StoreError {
    let (path, errno) = (path.to_string(), error.errno());
    match error.kind() {
        ErrorKind::Open if errno == Some(libc::ENOENT) => StoreError::NotFound { path, source: error.into() },
        ErrorKind::Open if errno == Some(libc::EACCES) => {
            StoreError::PermissionDenied { path, source: error.into() }
        }
        ErrorKind::Changed => StoreError::Precondition { path, source: error.into() },
        _ => StoreError::Generic { store: "Quinion", source: error.into() },
    }
}

/// Pinned, if it is long and pins have room for it, else copied. Waits.
fn pieces(file: &ClientFile, range: Range<u64>) -> Result<Vec<Bytes>> {
    let len = range.end - range.start;
    if len > COPIED_MAX {
        match file.pin(range.clone()) {
            Ok(pinned) if pinned.len() as u64 == len => return Ok(pinned.pieces()),
            Err(error) if error.kind() != ErrorKind::Full => return Err(error),
            _ => {}
        }
    }
    let mut buffer = vec![0; len as usize];
    file.read_exact_at(&mut buffer, range.start)?;
    Ok(vec![buffer.into()])
}

/// Each in one piece. Waits.
/// Copies of them, if all are cached.
fn ready_ranges(file: &ClientFile, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>> {
    let mut all = Vec::with_capacity(ranges.len());
    for range in ranges {
        let mut buffer = vec![0; (range.end - range.start) as usize];
        if !file.read_ready(&mut buffer, range.start)? {
            return Ok(None);
        }
        all.push(buffer.into());
    }
    Ok(Some(all))
}

fn whole_ranges(file: &ClientFile, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
    let len = |range: &Range<u64>| range.end - range.start;
    if ranges.len() > 1 {
        ranges
            .iter()
            .filter(|range| len(range) > COPIED_MAX)
            .try_for_each(|range| file.prefetch(range.clone()))?;
    }
    let mut short: Vec<_> = ranges
        .iter()
        .map(|range| vec![0; if len(range) > COPIED_MAX { 0 } else { len(range) as usize }])
        .collect();
    let mut reads: Vec<_> = ranges
        .iter()
        .zip(&mut short)
        .filter(|(_, buffer)| !buffer.is_empty())
        .map(|(range, buffer)| RangeRead { offset: range.start, buffer })
        .collect();
    file.read_ranges(&mut reads)?;
    let all = ranges.iter().zip(short).map(|(range, short)| {
        if len(range) <= COPIED_MAX {
            return Ok(short.into());
        }
        let mut pieces = pieces(file, range.clone())?;
        Ok(if pieces.len() == 1 { pieces.remove(0) } else { pieces.concat().into() })
    });
    all.collect()
}

struct Reading {
    shared: Arc<Shared>,
    file: ClientFile,
    meta: ObjectMeta,
    at: u64,
    end: u64,
    requested_end: u64,
    part_max: u64,
}

impl Reading {
    fn new(shared: &Arc<Shared>, object: KnownObject, range: Range<u64>) -> Self {
        let KnownObject { file, meta } = object;
        let part_max = if range.end - range.start <= WHOLE_PART_MAX { WHOLE_PART_MAX } else { PART_BYTES };
        let (at, end) = (range.start, range.end);
        Self { shared: Arc::clone(shared), file, meta, at, end, requested_end: at, part_max }
    }

    async fn part(&mut self) -> Result<Vec<Bytes>> {
        let end = self.end.min(self.at + self.part_max);
        let most = AHEAD_BYTES.min(self.file.ahead_max()).max(PART_BYTES);
        let ahead = self.end.min(end + most);
        // Some at a time, so that it becomes few GETs.
        let step = STEP_BYTES.min(most / 2);
        if end < self.end && ahead >= self.end.min(self.requested_end + step) && self.requested_end < ahead {
            self.file.prefetch(self.requested_end.max(self.at)..ahead)?;
            self.requested_end = ahead;
        }
        let part = self.shared.read(&self.file, self.at..end).await?;
        self.at = end;
        Ok(part)
    }

    /// The stream after an error: the rest by the store given, if that is wanted and sure to be of this version.
    async fn rest_after(self, error: Error) -> BoxStream<'static, StoreResult<Bytes>> {
        let path = &self.meta.location;
        self.shared.forget_handle(path, &self.file);
        let tag = self.meta.e_tag.clone().filter(|tag| !tag.is_empty() && !tag.starts_with("W/"));
        let (true, Some(tag)) = (self.shared.is_direct(&error), tag) else {
            return stream::iter([Err(store_error(path, error))]).boxed();
        };
        let rest = self.at..self.end;
        let options = GetOptions::new().with_range(Some(rest.clone())).with_if_match(Some(tag));
        match self.shared.store.get_opts(path, options).await {
            // Not every store looks at conditions.
            Ok(result) if result.meta.e_tag == self.meta.e_tag && result.range == rest => {
                exactly(result).into_stream()
            }
            Ok(_) => {
                let text = format!("cannot read {path}: it was replaced since it was opened; open it again");
                let error = Error::new(ErrorKind::Changed, text);
                stream::iter([Err(store_error(path, error))]).boxed()
            }
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    fn into_stream(self, first: Vec<Bytes>) -> BoxStream<'static, StoreResult<Bytes>> {
        let rest = stream::unfold(Some(self), |reading| async move {
            let mut reading = reading.filter(|reading| reading.at < reading.end)?;
            match reading.part().await {
                Ok(part) => Some((stream::iter(part.into_iter().map(Ok)).boxed(), Some(reading))),
                Err(error) => Some((reading.rest_after(error).await, None)),
            }
        });
        stream::iter(first.into_iter().map(Ok)).chain(rest.flatten()).boxed()
    }
}

impl ClientStore {
    /// The beginning of the names of metadata that are headers of the store's answer, in hexadecimal digits, which the
    /// crate `object_store` does not read; see [`ClientStoreBuilder::kept_headers`].
    pub const KEPT_HEADER: &'static str = "quinion-kept-";

    /// A builder, for a store that is not as [`cached`] makes it.
    pub fn builder(
        store: Arc<dyn ObjectStore>,
        client: Client,
        prefix: impl Into<String>,
    ) -> ClientStoreBuilder {
        let (freshness, failover, kept_headers) = Default::default();
        ClientStoreBuilder { store, client, prefix: prefix.into(), freshness, failover, kept_headers }
    }

    /// Forgets the metadata of an object. For writes that went to the store by another way: call it when they have
    /// ended, however they ended, and before that is told to anyone.
    pub fn invalidate(&self, path: &Path) {
        self.shared.note_write(path);
    }

    /// As [`ClientStore::invalidate`], of all objects.
    pub fn invalidate_all(&self) {
        self.shared.note_writes();
    }
}

#[async_trait]
impl ObjectStore for ClientStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        let _written = Written(Arc::clone(&self.shared), vec![path.clone()]);
        self.shared.store.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        let upload = self.shared.store.put_multipart_opts(path, options).await?;
        Ok(Box::new(Upload { upload, path: path.clone(), shared: Arc::clone(&self.shared) }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> StoreResult<GetResult> {
        for _ in 0..CHANGES_MAX {
            if options.version.is_some() {
                break;
            }
            match self.shared.get(path, &options).await? {
                ServerAnswer::Answer(result) => return Ok(result),
                ServerAnswer::Replaced => {}
                ServerAnswer::Direct => break,
            }
        }
        bare_get(&*self.shared.store, path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> StoreResult<Vec<Bytes>> {
        for _ in 0..CHANGES_MAX {
            match self.shared.get_ranges(path, ranges).await? {
                ServerAnswer::Answer(bytes) => return Ok(bytes),
                ServerAnswer::Replaced => {}
                ServerAnswer::Direct => break,
            }
        }
        bare_get_ranges(&*self.shared.store, path, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        noting_deletions(Arc::clone(&self.shared), self.shared.store.delete_stream(locations))
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.shared.store.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        self.shared.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.shared.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> StoreResult<()> {
        let _written = Written(Arc::clone(&self.shared), vec![to.clone()]);
        self.shared.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> StoreResult<()> {
        let _written = Written(Arc::clone(&self.shared), vec![from.clone(), to.clone()]);
        self.shared.store.rename_opts(from, to, options).await
    }
}

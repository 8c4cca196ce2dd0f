//! Direct: an open object that is read from its store, when its server has ended and no other listens in its place.
//!
//! ```text
//!   Client::with_direct_store("s3://bucket", store) --> each object that is opened there knows store and key
//!   read, server gone --> range GETs with If-Match (or the version's id) --> size, ETag, version, time are compared
//!                                                                              as before: bytes     else: Changed
//! ```
//!
//! A client that asks for it has a store of its own for that, with credentials of its own: the server's are not told.
//! The bytes of such reads are cached nowhere.
//!
//! Invariant: a read is of the version that is open, with all its GETs, or an error.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error as StoreError, ObjectMeta, ObjectStore, Result as StoreResult};
use percent_encoding::percent_decode_str;
use quinion_object::internals::{bare_get_of_version, shown};

use crate::connection::DEADLINE;
use crate::error::{Error, ErrorKind, Result};
use crate::ranges::RangeRead;
use crate::stores::ObjectMetadata;
use crate::threads::Threads;

/// The bytes of a GET, and how many GETs are under way: so much memory a read takes beside its buffer.
const PIECE_BYTES: usize = 8 << 20;
const GETS_MAX: usize = 8;
/// How often a GET that fails for the moment is sent, beside the store's own retries, and the first pause.
const ATTEMPTS_MAX: u32 = 3;
const PAUSE: Duration = Duration::from_millis(50);

/// A store that a client reads when no server does.
#[derive(Clone)]
pub(crate) struct DirectStore {
    /// Without a slash at the end.
    prefix: Arc<str>,
    store: Arc<dyn ObjectStore>,
}

impl fmt::Debug for DirectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the store's own text for debugging, which may have its keys.
        f.debug_struct("DirectStore").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl DirectStore {
    pub(crate) fn new(prefix: &str, store: Arc<dyn ObjectStore>) -> Self {
        Self { prefix: prefix.trim_end_matches('/').into(), store }
    }

    pub(crate) fn is_of(&self, prefix: &str) -> bool {
        *self.prefix == *prefix.trim_end_matches('/')
    }

    /// The key of a URL of this prefix, as a server reads it.
    fn path_of(&self, url: &str) -> Option<Path> {
        let key = url.strip_prefix(&*self.prefix)?.strip_prefix('/')?;
        let key = percent_decode_str(key).decode_utf8().ok()?;
        Path::parse(&key).ok().filter(|path| path.as_ref() == key)
    }
}

/// An object of one version, at a store of the client's.
pub(crate) struct DirectObject {
    store: Arc<dyn ObjectStore>,
    known: ObjectMeta,
}

impl fmt::Debug for DirectObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectObject").field("known", &self.known).finish_non_exhaustive()
    }
}

impl DirectObject {
    /// By the store with the longest prefix of `url`. `None` if there is none.
    pub(crate) fn of(stores: &[DirectStore], url: &str, metadata: &ObjectMetadata) -> Option<Arc<Self>> {
        let fitting = stores.iter().filter_map(|store| Some((store, store.path_of(url)?)));
        let (DirectStore { store, .. }, location) = fitting.max_by_key(|(store, _)| store.prefix.len())?;
        let last_modified = SystemTime::UNIX_EPOCH.checked_add(metadata.modified)?.into();
        let (e_tag, version) = (metadata.e_tag.clone(), metadata.version.clone());
        let known = ObjectMeta { location, last_modified, size: metadata.size, e_tag, version };
        Some(Arc::new(Self { store: Arc::clone(store), known }))
    }

    /// Fills the buffers, all of which lie inside the object. Waits for GETs on this thread.
    ///
    /// # Errors
    /// [`ErrorKind::Changed`], [`ErrorKind::Fetch`], [`ErrorKind::TimedOut`], [`ErrorKind::Forked`].
    pub(crate) fn read(
        self: &Arc<Self>,
        threads: &Threads,
        name: &str,
        ranges: &mut [RangeRead<'_>],
    ) -> Result<()> {
        let pieces = ranges.iter_mut().flat_map(|RangeRead { offset, buffer }| {
            let at = (*offset..).step_by(PIECE_BYTES);
            at.zip(buffer.chunks_mut(PIECE_BYTES))
        });
        let mut pieces: Vec<(u64, &mut [u8])> = pieces.collect();
        for batch in pieces.chunks_mut(GETS_MAX) {
            let asked: Vec<_> = batch.iter().map(|(at, buffer)| *at..*at + buffer.len() as u64).collect();
            let object = Arc::clone(self);
            let answers = threads.wait_for(DEADLINE, async move { object.get(asked).await })?;
            let answers = answers.ok_or_else(|| late(name))?.map_err(|error| failed(name, &error))?;
            for ((_, buffer), bytes) in batch.iter_mut().zip(answers) {
                buffer.copy_from_slice(&bytes);
            }
        }
        Ok(())
    }

    async fn get(&self, ranges: Vec<Range<u64>>) -> StoreResult<Vec<Bytes>> {
        let gets = ranges.into_iter().map(|range| self.get_one(range));
        stream::iter(gets).buffered(GETS_MAX).try_collect().await
    }

    async fn get_one(&self, range: Range<u64>) -> StoreResult<Bytes> {
        let (mut attempts, mut pause) = (1, PAUSE);
        loop {
            match bare_get_of_version(&*self.store, &self.known, &range).await {
                Ok(bytes) if bytes.len() as u64 == range.end - range.start => return Ok(bytes),
                Ok(bytes) => {
                    let source = format!("{range:?} was asked for, and {} bytes came", bytes.len()).into();
                    return Err(StoreError::Generic { store: "Quinion", source });
                }
                Err(StoreError::Generic { .. }) if attempts < ATTEMPTS_MAX => {
                    tokio::time::sleep(pause).await;
                    (attempts, pause) = (attempts + 1, 2 * pause);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

fn late(name: &str) -> Error {
    let text = format!(
        "cannot read {name}: the server of the cache has ended, and the object's store did not answer in time; read \
         again later"
    );
    Error::new(ErrorKind::TimedOut, text)
}

fn failed(name: &str, error: &StoreError) -> Error {
    match error {
        StoreError::Precondition { .. } | StoreError::NotFound { .. } => Error::changed(name),
        error => {
            let why = shown(&error.to_string());
            let text = format!(
                "cannot read {name}: the server of the cache has ended, and the object's store says: {why}; start a \
                 server, or read again later"
            );
            Error::new(ErrorKind::Fetch, text)
        }
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn the_store_with_the_longest_prefix_has_the_url() {
        let metadata = |modified| ObjectMetadata {
            size: 5,
            modified: Duration::from_nanos(modified),
            e_tag: Some("\"tag\"".into()),
            version: None,
            store: None,
            ahead: 1,
            attributes: Default::default(),
        };
        let store = |prefix| DirectStore::new(prefix, Arc::new(InMemory::new()));
        let stores = [store("s3://b/deep/"), store("s3://b"), store("s3://bb")];
        let key = |url: &str| {
            let object = DirectObject::of(&stores, url, &metadata(7))?;
            Some(object.known.location.to_string())
        };
        assert_eq!(key("s3://b/a%20b").as_deref(), Some("a b"));
        assert_eq!(key("s3://b/deep/x").as_deref(), Some("x"));
        assert_eq!(key("s3://b/deeper/x").as_deref(), Some("deeper/x"));
        for url in ["s3://b", "s3://bbb/x", "gs://b/x", "s3://b/x/", "s3://b//x", "s3://b/%ff"] {
            assert_eq!(key(url), None, "{url}");
        }
        let known = &DirectObject::of(&stores, "s3://b/x", &metadata(7)).unwrap().known;
        assert_eq!(known.last_modified.timestamp_nanos_opt(), Some(7));
    }
}

//! Metadata cache: what a store that is read through a cache knows of objects, and the writes that end it.
//!
//! ```text
//!   fresh(path)     ---> a handle, as long as `Freshness` allows
//!   question() -> the store is asked -> keep(path, handle, question)
//!   Written, Upload, deletions: a write has ended ---> note_write, note_writes
//! ```
//!
//! An object that a fetch has found to be another by now is forgotten too ([`MetadataCache::forget_if`]).
//!
//! A write that is under way while a question is answered may be before or after it. So an answer is kept only if no
//! write through this store has ended since the question, and no newer question was answered first.
//!
//! Handles that are forgotten are given to the caller or dropped when the lock is free: to drop one may take long.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    Attributes, Error as StoreError, GetOptions, GetRange, MultipartUpload, ObjectMeta, PutPayload,
    PutResult, Result as StoreResult, UploadPart,
};

use crate::options::Freshness;

/// Unless [`MetadataCache::with_max`] says otherwise.
const KNOWN_MAX: usize = 4096;

/// Handles of objects, by their paths.
pub struct MetadataCache<H> {
    freshness: Freshness,
    known_max: usize,
    state: Mutex<State<H>>,
}

struct State<H> {
    objects: HashMap<Path, Entry<H>>,
    writes: u64,
}

struct Entry<H> {
    handle: H,
    requested_at: Instant,
}

/// A store's answer about an object.
#[derive(Clone, Debug)]
pub struct KnownVersion {
    /// Which version it is.
    pub meta: ObjectMeta,
    /// The attributes that came with it.
    pub attributes: Attributes,
}

/// When a store was asked.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    requested_at: Instant,
    writes: u64,
}

impl<H> fmt::Debug for MetadataCache<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetadataCache").field("freshness", &self.freshness).finish_non_exhaustive()
    }
}

impl<H: Clone> MetadataCache<H> {
    /// An empty cache: no object is known.
    pub fn new(freshness: Freshness) -> Self {
        let state = Mutex::new(State { objects: HashMap::new(), writes: 0 });
        Self { freshness, known_max: KNOWN_MAX, state }
    }

    /// With as many handles at most.
    #[must_use]
    pub fn with_max(self, known_max: usize) -> Self {
        Self { known_max, ..self }
    }

    /// How long known metadata is used without a question.
    pub fn freshness(&self) -> Freshness {
        self.freshness
    }

    fn lock(&self) -> MutexGuard<'_, State<H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of an object, if it may be used without a question.
    pub fn fresh(&self, path: &Path) -> Option<H> {
        self.fresh_for(path, self.freshness)
    }

    /// As [`MetadataCache::fresh`], for a caller that wants it as fresh as that.
    pub fn fresh_for(&self, path: &Path, freshness: Freshness) -> Option<H> {
        let state = self.lock();
        let entry = state.objects.get(path)?;
        freshness.allows(entry.requested_at.elapsed()).then(|| entry.handle.clone())
    }

    /// The handle of an object, however old.
    pub fn handle(&self, path: &Path) -> Option<H> {
        self.lock().objects.get(path).map(|entry| entry.handle.clone())
    }

    /// To be taken before the store is asked.
    pub fn question(&self) -> Question {
        Question { requested_at: Instant::now(), writes: self.lock().writes }
    }

    /// Keeps what an answer has told, unless it is known to be old.
    pub fn keep(&self, path: &Path, handle: H, Question { requested_at, writes }: Question) {
        let mut state = self.lock();
        let is_newest = state.objects.get(path).is_none_or(|entry| entry.requested_at <= requested_at);
        if state.writes != writes || !is_newest {
            return;
        }
        let is_full = state.objects.len() >= self.known_max && !state.objects.contains_key(path);
        let gone = if is_full { state.take_older_half() } else { Vec::new() };
        let before = state.objects.insert(path.clone(), Entry { handle, requested_at });
        drop(state);
        drop((gone, before));
    }

    /// A write of the object has ended, well or not: nothing is known of it. Returns what was.
    pub fn note_write(&self, path: &Path) -> Option<H> {
        let mut state = self.lock();
        state.writes += 1;
        state.objects.remove(path).map(|entry| entry.handle)
    }

    /// As [`MetadataCache::note_write`], of objects whose names are not known.
    pub fn note_writes(&self) {
        let mut state = self.lock();
        state.writes += 1;
        let gone = std::mem::take(&mut state.objects);
        drop(state);
        drop(gone);
    }

    /// Forgets the metadata of the object, if `is_wrong` says so, and the answer to a question that was asked before
    /// this.
    pub fn forget_if(&self, path: &Path, is_wrong: impl FnOnce(&H) -> bool) {
        let mut state = self.lock();
        let is_right = state.objects.get(path).is_some_and(|entry| !is_wrong(&entry.handle));
        let gone = if is_right { None } else { state.objects.remove(path) };
        state.writes += u64::from(!is_right);
        drop(state);
        drop(gone);
    }

    /// Forgets the objects that were asked for longest ago, the older half of all; whether there was any.
    pub fn forget_older_half(&self) -> bool {
        let gone = self.lock().take_older_half();
        !gone.is_empty()
    }

    /// Forgets the object's metadata and returns it. An answer to a question that was asked before this is not kept.
    pub fn forget(&self, path: &Path) -> Option<H> {
        self.note_write(path)
    }
}

impl<H> State<H> {
    fn take_older_half(&mut self) -> Vec<Entry<H>> {
        let mut times: Vec<_> = self.objects.values().map(|entry| entry.requested_at).collect();
        let Some(last) = times.len().checked_sub(1) else { return Vec::new() };
        let (_, &mut median, _) = times.select_nth_unstable(last / 2);
        self.objects.extract_if(|_, entry| entry.requested_at <= median).map(|(_, entry)| entry).collect()
    }
}

/// Whether a condition fails by metadata that is only known from before: the object may fulfil it by now, so the store
/// has to be asked. (That it was *not* modified is an answer as old as the metadata, as all others are.)
pub fn is_to_be_asked(options: &GetOptions, known: &ObjectMeta) -> bool {
    matches!(options.check_preconditions(known), Err(StoreError::Precondition { .. }))
}

/// The range of an object of `size` bytes that is asked for, as the crate `object_store` reads it.
///
/// # Errors
/// It does not lie in the object.
pub fn resolve(range: Option<&GetRange>, size: u64) -> StoreResult<Range<u64>> {
    let Some(range) = range else { return Ok(0..size) };
    range.as_range(size).map_err(|source| {
        let source = Box::new(RangeOutside { size, source: source.into() });
        StoreError::Generic { store: "Quinion", source }
    })
}

/// The source of an error about a range that does not lie in its object.
#[derive(thiserror::Error, Debug)]
#[error("{source}")]
pub struct RangeOutside {
    /// The object's size in bytes.
    pub size: u64,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// A store to which writes are told when they have ended.
pub trait NoteWrites: Send + Sync + 'static {
    /// A write of that object has ended, well or not.
    fn note_write(&self, path: &Path);
    /// Writes of objects whose names are not known have ended.
    fn note_writes(&self);
}

/// Objects that are being written: nothing is known of them afterwards, whatever comes of it. Also if the caller drops
/// the future, when the write may have been done.
pub struct Written<S: NoteWrites>(pub Arc<S>, pub Vec<Path>);

impl<S: NoteWrites> Drop for Written<S> {
    fn drop(&mut self) {
        self.1.iter().for_each(|path| self.0.note_write(path));
    }
}

/// If the caller drops the stream before its end, it is not known which are gone.
struct Deletion<S: NoteWrites> {
    shared: Arc<S>,
    is_over: bool,
}

impl<S: NoteWrites> Deletion<S> {
    fn end(mut self) {
        self.is_over = true;
    }
}

impl<S: NoteWrites> Drop for Deletion<S> {
    fn drop(&mut self) {
        if !self.is_over {
            self.shared.note_writes();
        }
    }
}

/// Notes the answers of a store that deletes.
pub fn noting_deletions<S: NoteWrites>(
    shared: Arc<S>,
    deleted: BoxStream<'static, StoreResult<Path>>,
) -> BoxStream<'static, StoreResult<Path>> {
    let deletion = Deletion { shared, is_over: false };
    let noted = stream::unfold((deleted, deletion), |(mut answers, deletion)| async move {
        let Some(deleted) = answers.next().await else {
            deletion.end();
            return None;
        };
        match &deleted {
            Ok(path) => deletion.shared.note_write(path),
            Err(_) => deletion.shared.note_writes(),
        }
        Some((deleted, (answers, deletion)))
    });
    noted.boxed()
}

/// An upload whose end is a write.
pub struct Upload<S: NoteWrites> {
    /// The upload that the bare store has begun.
    pub upload: Box<dyn MultipartUpload>,
    /// The object.
    pub path: Path,
    /// State that is told of the write.
    pub shared: Arc<S>,
}

impl<S: NoteWrites> fmt::Debug for Upload<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Upload");
        text.field("path", &self.path).field("upload", &self.upload).finish_non_exhaustive()
    }
}

#[async_trait]
impl<S: NoteWrites> MultipartUpload for Upload<S> {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.upload.put_part(data)
    }
    async fn complete(&mut self) -> StoreResult<PutResult> {
        let _written = Written(Arc::clone(&self.shared), vec![self.path.clone()]);
        self.upload.complete().await
    }
    async fn abort(&mut self) -> StoreResult<()> {
        self.upload.abort().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_older_half_makes_room_for_more_handles_than_may_be() {
        let known = MetadataCache::new(Freshness::Immutable).with_max(4);
        let (path, begun) = (|number: u64| Path::from(number.to_string()), Instant::now());
        for number in 0..5 {
            let requested_at = begun + Duration::from_secs(number);
            known.keep(&path(number), number, Question { requested_at, writes: 0 });
        }
        let kept = || (0..5).filter(|&number| known.handle(&path(number)).is_some()).collect::<Vec<_>>();
        assert_eq!(kept(), [2, 3, 4]);
        assert!(known.forget_older_half() && kept() == [4]);
        assert!(known.forget_older_half() && !known.forget_older_half());
    }
}

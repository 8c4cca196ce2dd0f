//! Following: an object that is read as its newest known version, for readers that do not need one version for all
//! their reads.
//!
//! ```text
//!   read --> the version that is open --> its bytes
//!                |  the store says that it is another by now (412)
//!                v
//!            open again --> the whole read, by the new version
//! ```
//!
//! An [`ObjectFile`] is of one version, and fails once the store has another. This one opens the object again then.
//! Cached bytes of a version are read without asking the store, so old bytes are read until a fetch finds out. Reads at
//! or behind the end of that version ask nothing either: a reader that waits for growth calls
//! [`FollowingObject::refresh`].
//!
//! Invariants:
//!  1. The bytes of one call are of one version: a call that has found a change begins anew, from its first byte.
//!  2. Of one handle, no call brings bytes of a version older than one that an earlier call on the same thread has
//!     brought.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;

use crate::cache::ObjectCache;
use crate::error::{Error, Result};
use crate::file::ObjectFile;
use crate::newest::{CHANGES_MAX, Newest};
use crate::options::Freshness;
use crate::version;

/// An object that is opened again when it has changed: see [`ObjectCache::open_following`]. Cheap to clone; clones go
/// on to a new version together.
#[derive(Clone, Debug)]
pub struct FollowingObject {
    objects: ObjectCache,
    path: Path,
    newest: Arc<Newest<ObjectFile>>,
}

impl ObjectCache {
    /// Opens an object whose handle goes on with the new version when the object has changed, in place of an error.
    /// Until a fetch finds the change, reads of cached bytes are of the version that is open, and reads at or behind
    /// its end find nothing; [`FollowingObject::refresh`] asks the store.
    ///
    /// # Errors
    /// As [`ObjectCache::open`].
    pub fn open_following(&self, path: &Path) -> Result<FollowingObject> {
        Ok(FollowingObject::new(self, path, self.open(path)?))
    }

    /// As [`ObjectCache::open_following`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`ObjectCache::open`].
    pub async fn open_following_async(&self, path: &Path) -> Result<FollowingObject> {
        Ok(FollowingObject::new(self, path, self.open_async(path).await?))
    }
}

impl FollowingObject {
    fn new(objects: &ObjectCache, path: &Path, file: ObjectFile) -> Self {
        let newest = Arc::new(Newest::new(file, ObjectFile::is_same_handle));
        Self { objects: objects.clone(), path: path.clone(), newest }
    }

    /// The version that the next read is of, unless the object has changed meanwhile: its size, its metadata, and reads
    /// that stay with it. Not for forked children, where this and what is told of it may wait for ever.
    pub fn current(&self) -> ObjectFile {
        self.newest.get()
    }

    fn own(&self) -> Result<ObjectFile> {
        self.newest.own().ok_or_else(|| Error::Ended(self.path.clone()))
    }

    /// The size of [`FollowingObject::current`] in bytes.
    pub fn len(&self) -> u64 {
        self.current().len()
    }

    /// Whether that has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Asks the store which version the object is now, and goes on with that if it is another. Returns whether it is.
    /// For readers of what is appended, and of objects that are wholly cached.
    ///
    /// # Errors
    /// Those of [`ObjectCache::open`]; [`Error::Open`] also if the object changes faster than the store can be asked.
    /// The version that was open stays so.
    pub fn refresh(&self) -> Result<bool> {
        let before = self.own()?;
        for _ in 0..CHANGES_MAX {
            let file = self.own()?;
            let new = self.revalidating().open(&self.path)?;
            if self.newest.advance(&file, &new, is_same_version) {
                return Ok(!is_same_version(&before, &new));
            }
        }
        Err(replaced_each_time(&self.path))
    }

    /// As [`FollowingObject::refresh`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`FollowingObject::refresh`].
    pub async fn refresh_async(&self) -> Result<bool> {
        let before = self.own()?;
        for _ in 0..CHANGES_MAX {
            let file = self.own()?;
            let new = self.revalidating().open_async(&self.path).await?;
            if self.newest.advance(&file, &new, is_same_version) {
                return Ok(!is_same_version(&before, &new));
            }
        }
        Err(replaced_each_time(&self.path))
    }

    /// The objects, for an open that asks the store.
    fn revalidating(&self) -> ObjectCache {
        self.objects.clone().with_freshness(Freshness::Always)
    }

    /// How often it went on to another version: if the number is the same before and after some reads, these were of
    /// one version, and its size was the same.
    pub fn changes(&self) -> u64 {
        self.newest.changes()
    }

    /// Fills as much of `buffer` from byte `offset` on as the object has, and returns how many bytes that are: all of
    /// one version.
    ///
    /// # Errors
    /// Those of [`ObjectFile::read_at`] and of [`ObjectCache::open`]. [`Error::Changed`] only if the object
    /// changes faster than it can be read. The buffer may have been written to.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.repeat(|file| {
            let mut read = 0;
            // A short read inside the object tells of an error, which the next one returns.
            loop {
                match file.read_at(&mut buffer[read..], offset + read as u64)? {
                    0 => return Ok(read),
                    more => read += more,
                }
            }
        })
    }

    /// As [`FollowingObject::read_at`], without blocking. Needs no particular runtime.
    ///
    /// # Errors
    /// As [`FollowingObject::read_at`].
    pub async fn read_at_async(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut reopened = 0;
        loop {
            let file = self.own()?;
            let mut read = 0;
            let error = loop {
                match file.read_at_async(&mut buffer[read..], offset + read as u64).await {
                    Ok(0) => return Ok(read),
                    Ok(more) => read += more,
                    Err(error) => break error,
                }
            };
            if !error.is_change() || reopened == CHANGES_MAX {
                return Err(error);
            }
            reopened += 1;
            self.newest.replace(&file, self.objects.open_async(&self.path).await?);
        }
    }

    /// The bytes of `range`, which lies inside the object as it is now: see [`ObjectFile::bytes`].
    ///
    /// # Errors
    /// Those of [`ObjectFile::bytes`] and of [`ObjectCache::open`]. [`Error::Range`] has the size of the version
    /// that does not have the range.
    pub fn bytes(&self, range: Range<u64>) -> Result<Bytes> {
        self.repeat(|file| file.bytes(range.clone()))
    }

    /// The bytes of each of `ranges`, all of one version: see [`ObjectFile::read_ranges`].
    ///
    /// # Errors
    /// As [`FollowingObject::bytes`].
    pub fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.repeat(|file| file.read_ranges(ranges))
    }

    fn repeat<T>(&self, read: impl FnMut(&ObjectFile) -> Result<T>) -> Result<T> {
        let answer = self.newest.repeat(read, |_, error| error.is_change(), || self.objects.open(&self.path));
        answer.unwrap_or_else(|| Err(Error::Ended(self.path.clone())))
    }
}

fn replaced_each_time(path: &Path) -> Error {
    let source = "it was replaced each time the store was asked; ask again".into();
    let source = object_store::Error::Precondition { path: path.to_string(), source };
    Error::Open { path: path.clone(), source }
}

fn is_same_version(one: &ObjectFile, other: &ObjectFile) -> bool {
    version::is_same(one.meta(), other.meta())
}

//! Following: an object that a client reads as its newest known version, as `following.rs` of `quinion-object` does
//! without a server.
//!
//! A [`ClientFile`] of an object is of one version: once the store, or the next server, has another, its reads are
//! [`ErrorKind::Changed`]. A [`FollowingFile`] opens the object again then, and reads all that was asked for anew.
//!
//! Invariant: the bytes of one call are of one version.

use std::sync::{Arc, PoisonError, RwLock};

use crate::client::Client;
use crate::error::{ErrorKind, Result};
use crate::file::{ClientFile, RangeRead};

/// How often a call opens the object again before it tells that it has changed.
const CHANGES_MAX: u32 = 8;

/// An object, or a local file, that is opened again when it has changed: see [`Client::open_following`]. Cheap to
/// clone; clones go on to a new version together.
#[derive(Clone, Debug)]
pub struct FollowingFile {
    client: Client,
    name: Arc<str>,
    current: Arc<RwLock<Current>>,
}

#[derive(Clone, Debug)]
struct Current {
    file: ClientFile,
    changes: u64,
}

impl Client {
    /// As [`Client::open`], for a reader that goes on with the new version when the object has changed, in place of an
    /// error. Until a fetch finds the change, reads of cached bytes are of the version that is open.
    ///
    /// # Errors
    /// As [`Client::open`].
    pub fn open_following(&self, name: &str) -> Result<FollowingFile> {
        let current = Current { file: self.open(name)?, changes: 0 };
        Ok(FollowingFile { client: self.clone(), name: name.into(), current: Arc::new(RwLock::new(current)) })
    }
}

impl FollowingFile {
    fn get(&self) -> Current {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The version that the next read is of, unless the object has changed meanwhile.
    pub fn current(&self) -> ClientFile {
        self.get().file
    }

    /// The size of [`FollowingFile::current`] in bytes.
    pub fn len(&self) -> u64 {
        self.current().len()
    }

    /// Whether that has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How often it went on to another version: if the number is the same before and after some reads, these were of
    /// one version, and its size was the same.
    pub fn changes(&self) -> u64 {
        self.get().changes
    }

    /// As [`ClientFile::read_at`]: all bytes of one call are of one version.
    ///
    /// # Errors
    /// Those of [`ClientFile::read_at`] and of [`Client::open`]; [`ErrorKind::Changed`] only if the object changes
    /// faster than it can be read. The buffer may have been written to.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.repeat(|file| file.read_at(buffer, offset))
    }

    /// As [`ClientFile::read_exact_at`].
    ///
    /// # Errors
    /// Those of [`FollowingFile::read_at`]; [`ErrorKind::EndOfFile`], also if the new version is shorter.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.repeat(|file| file.read_exact_at(buffer, offset))
    }

    /// As [`ClientFile::read_ranges`]: the ranges of one call are of one version.
    ///
    /// # Errors
    /// As [`FollowingFile::read_exact_at`].
    pub fn read_ranges(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        self.repeat(|file| file.read_ranges(ranges))
    }

    fn repeat<T>(&self, mut read: impl FnMut(&ClientFile) -> Result<T>) -> Result<T> {
        let mut reopened = 0;
        loop {
            let file = self.current();
            match read(&file) {
                Err(error) if error.kind() == ErrorKind::Changed && reopened < CHANGES_MAX => {
                    reopened += 1;
                    self.replace(&file, self.client.open(&self.name)?);
                }
                answer => return answer,
            }
        }
    }

    /// Takes `new` in place of `stale`, unless another thread was faster: what that has opened may be newer.
    fn replace(&self, stale: &ClientFile, new: ClientFile) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if Arc::ptr_eq(&current.file.inner, &stale.inner) {
            let changes = current.changes + 1;
            let before = std::mem::replace(&mut *current, Current { file: new, changes });
            drop(current);
            drop(before); // not under the lock: it is given back to the server
        }
    }
}

//! Following: an object that a client reads as its newest known version, as `following.rs` of `quinion-object` does
//! without a server.
//!
//! A [`ClientFile`] of an object is of one version: once the store, or the next server, has another, its reads are
//! [`ErrorKind::Changed`]. A [`FollowingFile`] opens the object again then, and reads all that was asked for anew. It
//! does the same when the server has ended and the object has no name for its version, which a plain handle needs to
//! go on at the next server ([`ErrorKind::OwnerDead`]).
//!
//! Reads of cached bytes, and reads at or behind the end of the open version, ask neither the server nor the store: a
//! reader that waits for growth calls [`FollowingFile::refresh`].
//!
//! Invariant: the bytes of one call are of one version.
//!
//! Local files have no versions, and their handles read what they are now: they are not followed.

use std::sync::Arc;

use quinion_object::Freshness;
use quinion_object::internals::{CHANGES_MAX, Newest};

use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};
use crate::file::ClientFile;
use crate::ranges::RangeRead;

/// An object that is opened again when it has changed: see [`Client::open_following`]. Cheap to clone; clones go on to
/// a new version together.
#[derive(Clone, Debug)]
pub struct FollowingFile {
    client: Client,
    name: Arc<str>,
    newest: Arc<Newest<ClientFile>>,
}

impl Client {
    /// Opens an object as [`Client::open`] does, for a reader that goes on with the new version when the object has
    /// changed, in place of an error. Until a fetch finds the change, reads of cached bytes are of the version that is
    /// open, and reads at or behind its end find nothing; [`FollowingFile::refresh`] asks the store.
    ///
    /// # Errors
    /// As [`Client::open`]; [`ErrorKind::Open`] also for a local file.
    pub fn open_following(&self, name: &str) -> Result<FollowingFile> {
        self.following(name, self.open(name)?)
    }

    /// As [`Client::open_following`], without blocking: see [`Client::open_async`].
    ///
    /// # Errors
    /// As [`Client::open_following`]; and [`ErrorKind::Start`].
    pub async fn open_following_async(&self, name: &str) -> Result<FollowingFile> {
        self.following(name, self.open_async(name).await?)
    }

    fn following(&self, name: &str, file: ClientFile) -> Result<FollowingFile> {
        if file.metadata().is_none() {
            let text =
                format!("cannot follow {name}: open_following is for objects; open a local file by open");
            return Err(Error::new(ErrorKind::Open, text));
        }
        let newest = Newest::new(file, |one, other| Arc::ptr_eq(&one.inner, &other.inner));
        Ok(FollowingFile { client: self.clone(), name: name.into(), newest: Arc::new(newest) })
    }
}

impl FollowingFile {
    /// The version that the next read is of, unless the object has changed meanwhile. Not for forked children, where
    /// this and what is told of it may wait for ever.
    pub fn current(&self) -> ClientFile {
        self.newest.get()
    }

    fn own(&self) -> Result<ClientFile> {
        self.newest.own().ok_or_else(Error::forked)
    }

    /// The size of [`FollowingFile::current`] in bytes.
    pub fn len(&self) -> u64 {
        self.current().len()
    }

    /// Whether that has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Asks the store, through the server, which version the object is now, and goes on with that if it is another.
    /// Returns whether it is. For readers of what is appended, and of objects that are wholly cached.
    ///
    /// # Errors
    /// Those of [`Client::open`]; [`ErrorKind::Changed`] only if the object changes faster than the store can be asked.
    /// The version that was open stays so.
    pub fn refresh(&self) -> Result<bool> {
        let before = self.own()?;
        for _ in 0..CHANGES_MAX {
            let file = self.own()?;
            let new = self.asking().open(&self.name)?;
            if self.newest.advance(&file, &new, ClientFile::is_same_object) {
                return Ok(!before.is_same_object(&new));
            }
        }
        Err(Error::changed(&self.name))
    }

    /// As [`FollowingFile::refresh`], without blocking: see [`Client::open_async`].
    ///
    /// # Errors
    /// As [`FollowingFile::refresh`]; and [`ErrorKind::Start`].
    pub async fn refresh_async(&self) -> Result<bool> {
        let before = self.own()?;
        for _ in 0..CHANGES_MAX {
            let file = self.own()?;
            let new = self.asking().open_async(&self.name).await?;
            if self.newest.advance(&file, &new, ClientFile::is_same_object) {
                return Ok(!before.is_same_object(&new));
            }
        }
        Err(Error::changed(&self.name))
    }

    /// The client, for an open that asks the store.
    fn asking(&self) -> Client {
        self.client.clone().with_freshness(Freshness::Always)
    }

    /// How often it went on to another version: if the number is the same before and after some reads, these were of
    /// one version, and its size was the same.
    pub fn changes(&self) -> u64 {
        self.newest.changes()
    }

    /// As [`ClientFile::read_at`]: all bytes of one call are of one version.
    ///
    /// # Errors
    /// Those of [`ClientFile::read_at`] and of [`Client::open`]; [`ErrorKind::Changed`] only if the object changes
    /// faster than it can be read. The buffer may have been written to.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.repeat(|file| file.read_at(buffer, offset))
    }

    /// As [`FollowingFile::read_at`], without blocking: see [`ClientFile::read_at_async`].
    ///
    /// # Errors
    /// As [`FollowingFile::read_at`]; and [`ErrorKind::Start`].
    pub async fn read_at_async(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut reopened = 0;
        loop {
            let file = self.own()?;
            match file.read_at_async(buffer, offset).await {
                Err(error) if reopened < CHANGES_MAX && is_change(&file, &error) => {
                    reopened += 1;
                    self.newest.replace(&file, self.client.open_async(&self.name).await?);
                }
                answer => return answer,
            }
        }
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

    fn repeat<T>(&self, read: impl FnMut(&ClientFile) -> Result<T>) -> Result<T> {
        let answer = self.newest.repeat(read, is_change, || self.client.open(&self.name));
        answer.unwrap_or_else(|| Err(Error::forked()))
    }
}

/// Whether the object is to be opened again: it has changed, or its server has ended and no other can tell whether it
/// has.
fn is_change(file: &ClientFile, error: &Error) -> bool {
    let is_unnamed = || file.metadata().is_some_and(|metadata| !metadata.names_its_version());
    error.kind() == ErrorKind::Changed || error.kind() == ErrorKind::OwnerDead && is_unnamed()
}

//! Named: objects that viewers open by a name, for an owner that was given an opener of names.
//!
//! ```text
//!   serve: a name --> CacheOwner --> NameOpener (quinion-service: URL --> store) --> NamedObject: a File, text, plans
//!                        |                                                               |
//!                        '-- notes it as attached, as any file --------------------------'
//! ```
//!
//! An object never changes: another version of it is another file. So its record says so from its first open on, and a
//! viewer asks nothing before it reads. Only files that never change can be pinned for a viewer, which finds the pages
//! by the index; a folio that is still being filled is not pinned, because it leaves the index if the fill fails.
//!
//! Invariant: an opener opens only objects that all processes of the owner's domain may read.

use std::fmt;
use std::sync::Arc;

use crate::serve::{NameRefusal, RevisionRequest};
use crate::viewer::sys::Errno;
use quinion::File;
use quinion::internals::error::Error;

/// Opens names for viewers. Called by several threads at a time; each call may wait.
pub trait NameOpener: Send + Sync + fmt::Debug {
    /// A number for the store of that name: the requests to one store that may be under way are bounded, as those to a
    /// file system are. Does not wait.
    ///
    /// # Errors
    /// There is no such store.
    fn place(&self, name: &[u8]) -> Result<u64, NameRefusal>;
    /// Opens the object of that name, through the owner's cache, as a file that never changes. May wait for the store.
    ///
    /// # Errors
    /// It cannot be opened: the error for the program, and a text for people.
    fn open(&self, name: &[u8]) -> Result<Arc<dyn NamedObject>, NameRefusal>;
    /// Whether it opens any revision of a file: where not, no descriptor of one is taken.
    fn opens_revisions(&self) -> bool;
    /// Opens a local file as it is now, through the owner's cache, as a file that never changes. May wait for the file
    /// system.
    ///
    /// # Errors
    /// As [`NameOpener::open`]; `ETXTBSY`: the file was changed just now.
    fn open_revision(&self, request: RevisionRequest<'_>) -> Result<Arc<dyn NamedObject>, NameRefusal>;
}

/// One open of one version of an object.
pub trait NamedObject: Send + Sync + fmt::Debug {
    /// The cache's file.
    fn file(&self) -> &File;
    /// The text that the viewer is sent with it.
    fn text(&self) -> String;
    /// A viewer is about to wait for up to `len` bytes at `position`: the missing bytes may be asked for in one plan.
    fn announce(&self, position: u64, len: u64);
    /// Starts to fetch the missing bytes of a range, and waits for none of them.
    fn will_need(&self, position: u64, len: u64);
    /// How a viewer is told of that error.
    fn errno(&self, error: Error) -> Errno;
}

//! Own changes: a mapping's record of its file's times besides the version that its folios were filled from.
//!
//! The cache's own flushes change a file's times. Without this they would look like the
//! writes of another process, for which clean pages are forgotten (`version.rs`).

use crate::backend::Version;
use std::sync::Mutex;

#[derive(Debug, Default)]
pub(super) struct OwnChanges(pub Mutex<ObservedVersion>);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ObservedVersion {
    /// The file's version after the last of the cache's flushes.
    pub after: Option<Version>,
    /// A flush found the version of the file unexpected, or could not read it.
    pub is_changed_externally: bool,
}

//! Own changes: what a mapping knows of its file's times besides the version that its folios were filled from.
//!
//! Our own flushes change a file's times. Without this they would look like the
//! writes of another process, for which clean pages are forgotten (`version.rs`).

use crate::backend::Version;
use crate::sync::lock::Mutex;

/// What is known of the file's times besides the version its folios were filled from.
#[derive(Debug, Default)]
pub(super) struct OwnChanges(pub Mutex<ObservedVersion>);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ObservedVersion {
    /// After the last of our flushes.
    pub after: Option<Version>,
    /// Before one of ours the file was not as we knew it.
    pub is_strange: bool,
}

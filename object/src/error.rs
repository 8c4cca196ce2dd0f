//! Errors: what was asked, what is wrong, what to do.
//!
//! A fetch fails on the network's threads, away from its readers: so a [`FetchError`] is shared, travels through the
//! cache as the cause of an [`io::Error`], and is found again by [`Error::of_read`].
//!
//! Of a store's answer their texts, also those for debugging, have the reason alone (`store_text.rs`). The whole of it
//! is in their sources, except that of a store that is busy (`retry_after.rs`).

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;

use crate::store_text::shown_of;

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an object. Its text has of the store's answer the reason alone; its source has all of it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options cannot be used.
    #[error("cannot build a cache of objects: {0}")]
    Options(String),
    /// The system gives no threads.
    #[error("cannot start the threads that fetch: {0}; allow this process some threads more")]
    Runtime(#[source] io::Error),
    /// The store does not tell what the object is.
    #[error("cannot open the object {path}: {}", shown_of(source))]
    Open {
        /// Which object.
        path: Path,
        /// The store's error.
        source: object_store::Error,
    },
    /// The object was replaced or deleted since it was opened.
    #[error("{0}")]
    Changed(#[source] FetchError),
    /// Bytes of the object could not be fetched.
    #[error("{0}")]
    Fetch(#[source] FetchError),
    /// The store says that the object is larger than any file can be.
    #[error("cannot open the object {path}: its store says that it has {size} bytes, which no file can have")]
    TooLarge {
        /// Which object.
        path: Path,
        /// The size that the store reports.
        size: u64,
    },
    /// The store tells neither an ETag, nor a version id, nor a time of change: bytes of two versions would be mixed.
    #[error(
        "cannot cache the object {0}: its store tells neither an ETag nor when it changed (Last-Modified), so bytes of \
         two versions could not be told apart; configure the server to send one of them"
    )]
    Unversioned(Path),
    /// The range is not one of the object's.
    #[error(
        "cannot read bytes {} to {} of {path}: the object has {size} bytes; ask for a range inside it",
        range.start, range.end
    )]
    Range {
        /// Which object.
        path: Path,
        /// The range asked for.
        range: Range<u64>,
        /// The object's size.
        size: u64,
    },
    /// The cache could not do it: it has no page to read into, or belongs to another process.
    #[error("cannot read the object {path} through the cache: {source}")]
    Cache {
        /// Which object.
        path: Path,
        /// The cache's error.
        source: quinion::Error,
    },
    /// The threads that fetch are gone: this is a fork of the process that has them.
    #[error(
        "there are no threads to fetch the object {0}, as this process was forked; build a cache after the fork"
    )]
    Ended(Path),
}

// A panic's message and many logs have these.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for FetchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The fetch behind an error of the cache, if there is one.
    pub(crate) fn of_read(path: &Path, error: quinion::Error) -> Self {
        match fetch_error_of(&error) {
            Some(fetch) if fetch.is_change() => Error::Changed(fetch),
            Some(fetch) => Error::Fetch(fetch),
            None => Error::Cache { path: path.clone(), source: error },
        }
    }

    /// Whether the object has changed since it was opened: open it again.
    pub fn is_change(&self) -> bool {
        matches!(self, Error::Changed(_))
    }
}

fn fetch_error_of(error: &quinion::Error) -> Option<FetchError> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(fetch) = error.downcast_ref::<FetchError>() {
            return Some(fetch.clone());
        }
        let inside = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(fetch) = inside.and_then(|inside| inside.downcast_ref::<FetchError>()) {
            return Some(fetch.clone());
        }
        source = error.source();
    }
    None
}

/// Why bytes of an object did not come. Cheap to clone: all readers of one fetch are told the same.
#[derive(Clone)]
pub struct FetchError(Arc<FetchReport>);

#[derive(Debug)]
pub(crate) struct FetchReport {
    pub(crate) path: Path,
    pub(crate) range: Range<u64>,
    pub(crate) attempts: u32,
    pub(crate) elapsed: Duration,
    pub(crate) failure: FetchFailure,
}

/// Where more is allowed: by the name of a program's option, and in Rust.
const IN_OPTIONS: &str =
    " (--deadline, --gets-in-flight; in Rust deadline, requests_max and stall_max of Options)";

/// The failure of the last GET of a fetch.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FetchFailure {
    /// The object has another version than when it was opened.
    #[error("it was opened as {known} and is {found} now; open it again to read what it is now")]
    Changed {
        /// The version that was opened.
        known: String,
        /// The version that the store has.
        found: String,
    },
    /// The object is there no more.
    #[error("it was deleted since it was opened; what is cached of it can still be read")]
    Deleted,
    /// The store refused, or could not be reached.
    #[error("the store said: {}", shown_of(.0))]
    Store(#[source] object_store::Error),
    /// The body ended early.
    #[error("the body ended after {got} of {asked} bytes; the connection or the store is at fault")]
    Short {
        /// How many bytes came.
        got: u64,
        /// How many were to come.
        asked: u64,
    },
    /// The store answered with another range than it was asked for.
    #[error("the store sent bytes {} to {} in answer to that; its ranges are broken", .0.start, .0.end)]
    OtherRange(Range<u64>),
    /// No byte came for as long as is waited.
    #[error(
        "no byte came for {} ms; the store hangs, or allow more time (--deadline, if that is what ended it; in Rust \
         deadline and stall_max of Options)",
        .0.as_millis()
    )]
    Stalled(Duration),
    /// The code of the store panicked.
    #[error("the code of the store panicked: {0}")]
    Panicked(String),
    /// The deadline passed while bytes came, or while it waited for its turn and no byte came to any fetch.
    #[error("it was not done before the deadline; allow more GETs at a time, or a later one{}", IN_OPTIONS)]
    Deadline,
}

impl FetchFailure {
    /// Whether another GET may do better.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            FetchFailure::Changed { .. } | FetchFailure::Deleted | FetchFailure::Panicked(_) => false,
            FetchFailure::Store(error) => crate::retry::is_transient(error),
            FetchFailure::Short { .. }
            | FetchFailure::OtherRange(_)
            | FetchFailure::Stalled(_)
            | FetchFailure::Deadline => true,
        }
    }
}

impl FetchError {
    pub(crate) fn new(report: FetchReport) -> Self {
        Self(Arc::new(report))
    }
    /// Which object.
    pub fn path(&self) -> &Path {
        &self.0.path
    }
    /// Which bytes were asked for and did not come.
    pub fn range(&self) -> Range<u64> {
        self.0.range.clone()
    }
    /// How many GETs were made for them.
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }
    /// The failure of the last of them.
    pub fn failure(&self) -> &FetchFailure {
        &self.0.failure
    }
    /// Whether the object has changed.
    pub fn is_change(&self) -> bool {
        matches!(self.0.failure, FetchFailure::Changed { .. } | FetchFailure::Deleted)
    }
    /// As a backend tells the cache, which counts a change apart.
    pub(crate) fn into_io(self) -> io::Error {
        let kind =
            if self.is_change() { io::ErrorKind::StaleNetworkFileHandle } else { io::ErrorKind::Other };
        io::Error::new(kind, self)
    }
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FetchReport { path, range, attempts, elapsed, failure } = &*self.0;
        write!(f, "cannot fetch bytes {} to {} of {path}: {failure}", range.start, range.end)?;
        if *attempts > 1 {
            write!(f, " (after {attempts} GETs in {} ms)", elapsed.as_millis())?;
        }
        Ok(())
    }
}

impl fmt::Debug for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for FetchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0.failure)
    }
}

impl From<Error> for object_store::Error {
    fn from(error: Error) -> Self {
        let generic =
            |error: Error| object_store::Error::Generic { store: "Quinion", source: Box::new(error) };
        match error {
            Error::Open { source, .. } => source,
            Error::Changed(fetch) => {
                let path = fetch.path().to_string();
                match fetch.failure() {
                    FetchFailure::Deleted => object_store::Error::NotFound { path, source: Box::new(fetch) },
                    _ => object_store::Error::Precondition { path, source: Box::new(fetch) },
                }
            }
            Error::Fetch(fetch) => match fetch.failure() {
                FetchFailure::Store(object_store::Error::PermissionDenied { .. }) => {
                    let path = fetch.path().to_string();
                    object_store::Error::PermissionDenied { path, source: Box::new(fetch) }
                }
                FetchFailure::Store(object_store::Error::Unauthenticated { .. }) => {
                    let path = fetch.path().to_string();
                    object_store::Error::Unauthenticated { path, source: Box::new(fetch) }
                }
                _ => generic(Error::Fetch(fetch)),
            },
            error => generic(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1. A store refuses an open, or a fetch, with a document that has a token.
    /// 2. The text of the error, which clients of a server and logs have, had all of it.
    #[test]
    fn errors_have_the_reason_of_a_stores_answer_and_no_more() {
        let body = "<Error><Code>Denied</Code><StringToSign>TOKEN</StringToSign></Error>";
        let text = format!("Server returned non-2xx status code: 403 Forbidden: {body}");
        let refused = || object_store::Error::Generic { store: "S3", source: text.clone().into() };
        let path = Path::from("a");
        let failure = FetchFailure::Store(refused());
        let fetch =
            FetchReport { path: path.clone(), range: 0..9, attempts: 3, elapsed: Duration::ZERO, failure };
        let fetch = FetchError::new(fetch);
        let fetched = format!("{fetch}");
        assert_eq!(
            fetched,
            "cannot fetch bytes 0 to 9 of a: the store said: Generic S3 error: the answer was 403 Forbidden: \
             Denied (after 3 GETs in 0 ms)"
        );
        let open = Error::Open { path, source: refused() };
        let failure = format!("{:?} {fetch:?}", fetch.failure());
        for shown in [fetched, failure, format!("{open} {open:?}"), format!("{:?}", Error::Fetch(fetch))] {
            assert!(shown.contains("Denied") && !shown.contains("TOKEN"), "{shown}");
        }
        let source = std::error::Error::source(&open).unwrap().to_string();
        assert!(source.contains("TOKEN"), "a program can have all of it: {source}");
    }
}

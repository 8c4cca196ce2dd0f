//! Error: what a failure becomes in Python.
//!
//! A [`Failure`] is made on any thread, even one without Python, and becomes an exception where it is raised. Python
//! picks the class by the number: `ENOENT` is a `FileNotFoundError`, `EACCES` a `PermissionError`, `ETIMEDOUT` a
//! `TimeoutError`, and so on. The text is the package's.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;

use pyo3::PyErr;
use pyo3::exceptions::{PyEOFError, PyOSError, PyRuntimeError};
use quinion_object::Error as ObjectError;
use quinion_service::{Error as ServiceError, ErrorKind as ServiceErrorKind};

use crate::target::Target;

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EACCES: i32 = 13;
pub(crate) const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
pub(crate) const ENODEV: i32 = 19;
pub(crate) const ESPIPE: i32 = 29;
const EADDRINUSE: i32 = 98;
const ENOBUFS: i32 = 105;
const ECONNRESET: i32 = 104;
const ETIMEDOUT: i32 = 110;
const ECONNREFUSED: i32 = 111;
const ESTALE: i32 = 116;
const EREMOTEIO: i32 = 121;

pub(crate) type Result<T> = std::result::Result<T, Failure>;

#[derive(Clone, Debug)]
pub(crate) enum Failure {
    EndOfFile(String),
    /// The caller is a fork of the process that has the cache or the connection.
    Forked(String),
    /// With an error number.
    Os(i32, String),
    /// An open failed: the error number, the text, and the name that was opened.
    Open(i32, String, PathBuf),
}

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Failure::Os(EINVAL, text.into())
    }
    pub(crate) fn io(text: impl Into<String>) -> Self {
        Failure::Os(EIO, text.into())
    }
    pub(crate) fn no_memory(text: impl Into<String>) -> Self {
        Failure::Os(ENOMEM, text.into())
    }
    /// The failure of a call to the kernel.
    pub(crate) fn of_kernel(text: &str, error: &io::Error) -> Self {
        Failure::Os(number_of(error).unwrap_or(EIO), format!("{text}: {error}"))
    }
    pub(crate) fn no_thread(error: &io::Error) -> Self {
        let text = format!("cannot start a thread that waits: {error}; allow this process some threads more");
        Failure::Os(number_of(error).unwrap_or(EIO), text)
    }
    /// Adds the name that was opened, as Python's own errors of opens have it.
    pub(crate) fn of_open(self, target: &Target) -> Self {
        match self {
            Failure::Os(number, text) => Failure::Open(number, text, target.path().to_owned()),
            other => other,
        }
    }
    /// The failure of a local file that was read through this process's cache.
    pub(crate) fn of_cache(name: &str, error: &quinion::Error) -> Self {
        let text = format!("cannot read {name}: {error}");
        match number_of_cache(error) {
            Some(number) => Failure::Os(number, text),
            None => Failure::Forked(text),
        }
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::EndOfFile(text) => PyEOFError::new_err(text),
            Failure::Forked(text) => PyRuntimeError::new_err(text),
            Failure::Os(number, text) => PyOSError::new_err((number, text)),
            Failure::Open(number, text, name) => PyOSError::new_err((number, text, name.into_os_string())),
        }
    }
}

/// Failures of a client.
impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        let text = error.to_string();
        let known = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        let known = known.and_then(number_of);
        let number = match error.kind() {
            ServiceErrorKind::EndOfFile => return Failure::EndOfFile(text),
            // No socket of that name is no server, and not a missing file of the caller's.
            ServiceErrorKind::Connect => known.filter(|&number| number != ENOENT).unwrap_or(ECONNREFUSED),
            ServiceErrorKind::Changed => ESTALE,
            ServiceErrorKind::Fetch => EREMOTEIO,
            ServiceErrorKind::OwnerDead => ECONNRESET,
            ServiceErrorKind::TimedOut => ETIMEDOUT,
            ServiceErrorKind::Full => ENOBUFS,
            _ => known.unwrap_or(EIO),
        };
        Failure::Os(number, text)
    }
}

/// Failures of this process's own cache: the numbers are those that a client is told.
impl From<ObjectError> for Failure {
    fn from(error: ObjectError) -> Self {
        use object_store::Error as StoreError;
        let text = error.to_string();
        let number = match &error {
            ObjectError::Range { .. } => return Failure::EndOfFile(text),
            ObjectError::Ended(_) => return Failure::Forked(text),
            ObjectError::Open { source: StoreError::NotFound { .. }, .. } => ENOENT,
            ObjectError::Open {
                source: StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. },
                ..
            } => EACCES,
            ObjectError::Open { .. } | ObjectError::Fetch(_) => EREMOTEIO,
            ObjectError::Changed(_) => ESTALE,
            ObjectError::Options(_) => EINVAL,
            ObjectError::Cache { source, .. } => match number_of_cache(source) {
                Some(number) => number,
                None => return Failure::Forked(text),
            },
            _ => EIO,
        };
        Failure::Os(number, text)
    }
}

/// The number of an error, which the kernel or this program made.
fn number_of(error: &io::Error) -> Option<i32> {
    error.raw_os_error().or(match error.kind() {
        io::ErrorKind::InvalidInput => Some(EINVAL),
        io::ErrorKind::AddrInUse => Some(EADDRINUSE),
        _ => None,
    })
}

/// `None`: the cache is the parent's.
fn number_of_cache(error: &quinion::Error) -> Option<i32> {
    use quinion::ErrorKind;
    match error.kind() {
        ErrorKind::Forked => None,
        ErrorKind::NoMemory => Some(ENOBUFS),
        _ => Some(error.raw_os_error().unwrap_or(EIO)),
    }
}

//! Error: what a failure of ours is in Python.
//!
//! Python picks the class by the number: `ENOENT` is a `FileNotFoundError`, `EACCES` a `PermissionError`, `ETIMEDOUT` a
//! `TimeoutError`, and so on. The text is ours.

use std::error::Error as _;
use std::io;

use pyo3::PyErr;
use pyo3::exceptions::{PyEOFError, PyOSError};
use quinion_service::{Error, ErrorKind};

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ENOBUFS: i32 = 105;
const ECONNRESET: i32 = 104;
const ETIMEDOUT: i32 = 110;
const ECONNREFUSED: i32 = 111;
const ESTALE: i32 = 116;
const EREMOTEIO: i32 = 121;

/// The exception for `error`.
pub(crate) fn python(error: Error) -> PyErr {
    let text = error.to_string();
    if error.kind() == ErrorKind::EndOfFile {
        return PyEOFError::new_err(text);
    }
    let known = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let known = known.and_then(io::Error::raw_os_error);
    PyOSError::new_err((number(error.kind(), known), text))
}

fn number(kind: ErrorKind, known: Option<i32>) -> i32 {
    match kind {
        // No socket of that name is no server, and not a missing file of the caller's.
        ErrorKind::Connect => known.filter(|&number| number != ENOENT).unwrap_or(ECONNREFUSED),
        ErrorKind::Changed => ESTALE,
        ErrorKind::Fetch => EREMOTEIO,
        ErrorKind::OwnerDead => ECONNRESET,
        ErrorKind::TimedOut => ETIMEDOUT,
        ErrorKind::Full => ENOBUFS,
        _ => known.unwrap_or(EIO),
    }
}

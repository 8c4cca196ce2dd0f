//! Target: what Python opens.
//!
//! Python's half of the package tells URLs from paths. It hands over a URL as text and a path as bytes, so that a path
//! need not be UTF-8.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pyo3::FromPyObject;

/// Text is a URL, and bytes are a path: any path, as Python's `os.fsencode` writes it.
#[derive(Clone, Debug, FromPyObject)]
pub(crate) enum Target {
    Url(String),
    Path(Vec<u8>),
}

impl Target {
    /// As a path.
    pub(crate) fn path(&self) -> &Path {
        Path::new(match self {
            Self::Url(url) => OsStr::new(url),
            Self::Path(bytes) => OsStr::from_bytes(bytes),
        })
    }
}

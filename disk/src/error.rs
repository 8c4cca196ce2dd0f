//! Error: why there is no store, and why one that was there is left alone.
//!
//! The first is an error for the caller that opens it. The second is a state: the cache goes on without the disk, and
//! says so once.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::layout::{BYTES_MAX, BYTES_MIN};

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// It would be too small, or too large.
    #[error("a disk tier of {bytes} bytes was asked for, and it can have {BYTES_MIN} to {BYTES_MAX}")]
    Size {
        /// The size asked for.
        bytes: u64,
    },
    /// Another process has it open.
    #[error("the disk tier in {folder} is in use by another process; end that one, or name another folder")]
    InUse {
        /// Where.
        folder: PathBuf,
    },
    /// The file has bytes that this crate did not write.
    #[error("{path} exists and is not a disk tier of Quinion; move it away, or name another folder")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// Others could have written to it.
    #[error(
        "{path} belongs to another user, or others may read or write it; a disk tier is private (mode 0600): \
         name a folder of your own"
    )]
    NotPrivate {
        /// The file.
        path: PathBuf,
    },
    /// The disk has no such space.
    #[error("{path}: no space for a disk tier of {bytes} bytes; free some, or ask for less")]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// The size asked for.
        bytes: u64,
    },
    /// The system refused something.
    #[error("cannot {action} the disk tier's file {path}: {source}")]
    Io {
        /// The operation that failed, as a verb phrase.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A device of the caller's own refused something.
    #[error("cannot {action} the disk tier's device: {source}")]
    Device {
        /// The operation that failed, as a verb phrase.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why a store is not used any more: its disk failed. Its contents are read from the store behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskTrouble {
    pub(crate) action: &'static str,
    pub(crate) error: String,
}

impl fmt::Display for DiskTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { action, error } = self;
        write!(f, "the disk tier is off because its disk failed to {action}: {error}; nothing is lost")
    }
}

//! Error: why there is no store, and why one that was there is left alone.
//!
//! The first is an error for the caller that opens it. The second is a state: the cache goes on without the disk, and
//! says so once.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::layout::{BYTES_MAX, BYTES_MIN};

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The store would be too small, or too large.
    #[error(
        "cannot have a disk tier of {bytes} bytes: it can have {BYTES_MIN} to {BYTES_MAX}; give it {} MiB or more, and \
         {} TiB at most",
        BYTES_MIN >> 20, BYTES_MAX >> 40
    )]
    Size {
        /// The size asked for.
        bytes: u64,
    },
    /// Another process has it open.
    #[error(
        "cannot use the disk tier in {folder}: it is in use by another process; end that one, or name another folder"
    )]
    InUse {
        /// The folder of the disk tier.
        folder: PathBuf,
    },
    /// The file has bytes that this crate did not write.
    #[error(
        "cannot use {path} for the disk tier: it exists and is not a disk tier of Quinion; move it away, or name \
         another folder"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file is not a regular file to which this user alone has access.
    #[error(
        "cannot use {path} for the disk tier: it belongs to another user, or others may read or write it, and a disk \
         tier is private (mode 0600); name a folder of your own"
    )]
    NotPrivate {
        /// The file.
        path: PathBuf,
    },
    /// The disk has no such space.
    #[error(
        "cannot take {bytes} bytes for the disk tier {path}: the disk has no such space; free some, ask for less, or \
         name a folder on another disk"
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// The size asked for.
        bytes: u64,
    },
    /// The system refused something.
    #[error("cannot {action} the disk tier's file {path}: {source}; {}", remedy(source))]
    Io {
        /// The operation that failed, as a verb phrase.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The device refused something, or did not answer.
    #[error("cannot {action} the disk tier's device: {source}; look after that device, or use another")]
    Device {
        /// The operation that failed, as a verb phrase.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The remedy for an error of the system's about a path.
fn remedy(error: &io::Error) -> &'static str {
    use io::ErrorKind as Kind;
    match error.kind() {
        Kind::NotFound => "make the folder that this one is to lie in, or name another",
        Kind::NotADirectory => "a part of that path is a file: name a folder",
        Kind::IsADirectory => "a folder has that name: move it away, or name another folder",
        Kind::PermissionDenied => "let this user make and write files in that folder, or name another",
        Kind::ReadOnlyFilesystem => "mount that file system for writing, or name a folder on another",
        Kind::StorageFull | Kind::QuotaExceeded => {
            "free some space, ask for less, or name a folder on another disk"
        }
        Kind::FileTooLarge => "ask for less, or name a folder on a file system that has such files",
        _ if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            "it is a symbolic link, which is not followed: remove it, or name another folder"
        }
        _ => "look after that disk (see the kernel's log), or name another folder",
    }
}

/// Why a store is not used: its disk failed, or does not answer. Its contents are read from the store behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskTrouble {
    pub(crate) action: &'static str,
    pub(crate) error: String,
}

impl fmt::Display for DiskTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { action, error } = self;
        write!(
            f,
            "the disk tier is off because its disk failed to {action}: {error}; nothing is lost, and "
        )?;
        f.write_str("the disk is tried again after a pause, once it has answered")
    }
}

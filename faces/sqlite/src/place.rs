//! Place: where a database file lies, and what the file system says of it.
//!
//! ```text
//!   path --stat--> inode   which file it is: device and number
//!                  times   which tell that it may have been changed
//! ```
//!
//! Only paths are asked. The process has no descriptor of the file but SQLite's own, and gets none here: the close of
//! any descriptor ends the process's locks on the file.

use std::ffi::{CStr, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Device and inode.
pub type Inode = (u64, u64);

/// What the file system says of a file, which tells that it may have been changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    bytes: u64,
    /// Seconds and nanoseconds: of its bytes, and of anything of it.
    modified: (i64, i64),
    changed: (i64, i64),
}

/// A path, and the file to which it led.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    inode: Inode,
}

impl Place {
    /// Where this name leads to. `None`: not to a regular file.
    pub fn of_name(name: &CStr) -> Option<Self> {
        let path = Path::new(OsStr::from_bytes(name.to_bytes())).to_owned();
        let known = regular(&path)?;
        Some(Self { path, inode: inode(&known) })
    }

    /// The file that it is.
    pub fn inode(&self) -> Inode {
        self.inode
    }

    /// The file's times. `None`: the path leads to it no longer.
    pub fn times(&self) -> Option<Times> {
        let known = regular(&self.path).filter(|known| inode(known) == self.inode)?;
        Some(Times {
            bytes: known.len(),
            modified: (known.mtime(), known.mtime_nsec()),
            changed: (known.ctime(), known.ctime_nsec()),
        })
    }
}

fn regular(path: &Path) -> Option<fs::Metadata> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file)
}

fn inode(known: &fs::Metadata) -> Inode {
    (known.dev(), known.ino())
}

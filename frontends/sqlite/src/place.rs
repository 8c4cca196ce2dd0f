//! Place: the path of a database file, and the file system's data about it.
//!
//! ```text
//!   path --stat----> inode   which file it is: device and number
//!                    times   which tell that it may have been changed
//!        --statfs--> whether this kernel alone changes the file, and sets its times at each write
//! ```
//!
//! Only paths are used. The process has no descriptor of the file but SQLite's own, and gets none here: the close of
//! any descriptor ends the process's locks on the file.

use std::ffi::{CStr, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;

pub type Inode = (u64, u64);

/// ext2 to ext4, XFS, Btrfs, F2FS and tmpfs, by the numbers that `statfs` tells: each write sets a file's times, by
/// this kernel's clock. Not among them: those of networks and FUSE, whose files change elsewhere, and overlayfs, whose
/// lower files do.
const CLOCKED: [u32; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994];

/// The file system's times of a file, which show that it may have been changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    bytes: u64,
    /// Seconds and nanoseconds: of its bytes, and of anything of it.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Times {
    #[cfg(test)]
    pub(crate) fn of_change(changed: (i64, i64)) -> Self {
        Self { bytes: 0, modified: changed, changed }
    }

    /// The file's size in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.bytes
    }

    /// When its bytes were changed last, in nanoseconds since 1970.
    pub fn modified_nanos(&self) -> i64 {
        let (seconds, nanoseconds) = self.modified;
        seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
    }

    /// When anything of the file was changed last, in nanoseconds since 1970.
    pub fn changed_nanos(&self) -> i64 {
        let (seconds, nanoseconds) = self.changed;
        seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
    }

    /// When anything of the file was changed last, in seconds and nanoseconds.
    pub fn changed(&self) -> (i64, i64) {
        self.changed
    }
}

#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    inode: Inode,
    is_clocked: bool,
}

impl Place {
    /// The file that this name leads to. `None`: not a regular file.
    pub fn of_name(name: &CStr) -> Option<Self> {
        let path = Path::new(OsStr::from_bytes(name.to_bytes())).to_owned();
        let known = regular(&path)?;
        let is_clocked = statfs(&path).is_ok_and(|system| CLOCKED.contains(&(system.f_type as u32)));
        Some(Self { path, inode: inode(&known), is_clocked })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn inode(&self) -> Inode {
        self.inode
    }

    /// Whether each write sets the file's times by this kernel's clock.
    pub fn is_clocked(&self) -> bool {
        self.is_clocked
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_whose_times_tell_of_each_write_is_known() {
        let path = format!("/dev/shm/quinion-place-{}\0", std::process::id());
        let name = CStr::from_bytes_with_nul(path.as_bytes()).unwrap();
        fs::write(path.trim_end_matches('\0'), "x").unwrap();
        let place = Place::of_name(name).unwrap();
        fs::remove_file(path.trim_end_matches('\0')).unwrap();
        assert!(place.is_clocked(), "tmpfs");
        assert_eq!(place.times(), None, "it is gone");
        assert!(!Place::of_name(c"/proc/self/status").unwrap().is_clocked());
    }
}

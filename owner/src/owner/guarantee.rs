//! Guarantee: which files may be served, and by which means a change of them is noticed.
//!
//! ```text
//!   a viewer's descriptor, by a handle that opens nothing (O_PATH)
//!     file system: not one that may be served ----------------------------------------> left to the kernel
//!     mount: each read is to move the time of the last access (strictatime) ----------> left to the kernel
//!     memory without a name (memfd): the kernel does not count who writes it ---------> left to the kernel
//!     it cannot be written: fs-verity, a file system that is read only by its nature -> Immutable
//!     below a folder that was declared never to change -------------------------------> Immutable
//!     the system gives no watch of its changes (inotify): a lease does not tell of all -> left to the kernel
//!     any other --------------------------------------------------------------------> opened, and asked for a lease
//!   opened
//!     a part of it was allocated and never written -----------------------------------> left to the kernel
//!     a lease -> Leased    none -> CheckTimes, by an owner that looks at times; else left to the kernel
//! ```
//!
//! A mount that is read only is no guarantee: the file may be written by way of another mount.
//!
//! **Access times.** The owner's reads move no time of last access (`O_NOATIME`), where its user may ask for that. A
//! viewer moves it once when it attaches a file, by a read of the kernel's at the file's end. Hits do not move it:
//! under `relatime`, the kernel's default, that is a difference of one move a day at most.
//!
//! Invariants:
//!  1. No file is opened before it was looked at here.
//!  2. Nothing here reads a file.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatVfsMountFlags, StatxFlags, fstatfs, fstatvfs, open, statx};

use quinion::internals::arena::Validation;
use quinion::internals::arena::file_systems::FileSystem;
use quinion::internals::units::FileId;

/// How a file is served on which the owner has no lease.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum WithoutLease {
    /// The kernel reads the file.
    #[default]
    LeaveToKernel,
    /// The owner looks at its times and size before each read. That may show an older state: while a `write` is
    /// under way for longer than the file system's clock takes to step (50 milliseconds are waited), and after it,
    /// until the next change; and while the file is stored to by a shared mapping.
    CheckTimes,
}

/// Which viewers' files are served, and by which guarantee.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServeRules {
    /// How files without a lease are served.
    pub coherence: WithoutLease,
    /// Folders below which no file ever changes, as this process sees them, links resolved.
    pub immutable: Vec<PathBuf>,
    /// Whether files are served of network file systems, FUSE, overlayfs, where a lease may not keep others out. They
    /// need one of the above. A read of such a file may never end.
    pub any_file_system: bool,
}

/// tmpfs, of which a memfd is a file, and ramfs.
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unserved {
    Closed,
    FileSystem,
    NoContent,
    AccessTimes,
    Nameless,
    Unwatched,
    Unwritten,
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "it was closed while it was being looked at",
            Self::FileSystem => {
                "its file system is not one of those where a lease keeps others from changing it; --file-systems all \
                 and --coherence times, or --immutable, serve it all the same"
            }
            Self::NoContent => "its bytes are made anew at each read",
            Self::AccessTimes => {
                "its mount (strictatime) wants each read to move the time of the last access; mount it with relatime"
            },
            Self::Nameless => "it is memory without a name (memfd), which is written past all leases",
            Self::Unwatched => {
                "no watch for it could be had (inotify), which would tell of a cut that breaks no lease; see \
                 /proc/sys/fs/inotify/max_user_watches and max_user_instances"
            }
            Self::Unwritten => {
                "a part of it was allocated and never written: what SEEK_HOLE says there depends on the kernel's reads"
            }
        })
    }
}

impl ServeRules {
    /// Checks the file behind `path`, a descriptor's in `/proc` that is called `name` there, without opening it; `file`
    /// is expected. Returns the rule for files without a lease.
    pub(super) fn check(&self, path: &str, name: &Path, file: FileId) -> Result<Validation, Unserved> {
        let handle =
            open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(|_| Unserved::Closed)?;
        self.check_handle(handle.as_fd(), name, file)
    }

    fn check_handle(
        &self,
        handle: BorrowedFd<'_>,
        name: &Path,
        file: FileId,
    ) -> Result<Validation, Unserved> {
        const VERITY: u64 = 0x0010_0000;
        let found = fstatfs(handle).map_err(|_| Unserved::Closed)?;
        let system = FileSystem::of(found.f_type as u64);
        match system {
            FileSystem::NoContent => return Err(Unserved::NoContent),
            _ if !system.may_be_served(self.any_file_system) => return Err(Unserved::FileSystem),
            _ => {}
        }
        let mount = fstatvfs(handle).map_err(|_| Unserved::Closed)?.f_flag;
        let lazy = StatVfsMountFlags::NOATIME | StatVfsMountFlags::RELATIME | StatVfsMountFlags::RDONLY;
        if !mount.intersects(lazy) {
            return Err(Unserved::AccessTimes);
        }
        let stat =
            statx(handle, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).map_err(|_| Unserved::Closed)?;
        if file_id(&stat) != file {
            return Err(Unserved::Closed);
        }
        // The kernel does not count the writers of a memfd, and gives leases on it while it is written.
        if stat.stx_nlink == 0 && IN_MEMORY.contains(&(found.f_type as u32)) {
            return Err(Unserved::Nameless);
        }
        let verity = stat.stx_attributes.bits() & VERITY != 0;
        if verity || system == FileSystem::ReadOnly || self.is_declared(name, file) {
            return Ok(Validation::Immutable);
        }
        Ok(self.without_lease())
    }

    pub(super) fn without_lease(&self) -> Validation {
        match self.coherence {
            WithoutLease::LeaveToKernel => Validation::Kernel,
            WithoutLease::CheckTimes => Validation::CheckTimes,
        }
    }

    /// The name is resolved by a viewer's mounts, so it must name that file here, too.
    fn is_declared(&self, name: &Path, file: FileId) -> bool {
        self.immutable.iter().any(|folder| name.starts_with(folder))
            && statx(CWD, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)
                .is_ok_and(|stat| file_id(&stat) == file)
    }
}

fn file_id(stat: &rustix::fs::Statx) -> FileId {
    FileId { device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor), inode: stat.stx_ino }
}

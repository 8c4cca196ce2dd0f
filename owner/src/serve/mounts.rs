//! Mounts: on which file system a file lies, without asking that file system.
//!
//! `stat`, `statfs`, `open` and the last `close` of a file ask its file system, and one that hangs answers none of
//! them; the asking thread cannot even be killed. The kernel's own tables answer without it: `/proc/self/fdinfo/N` has
//! the number of a descriptor's mount, and `/proc/PID/mountinfo` the type of each mount's file system. So a descriptor
//! that another process offers is taken only if its file system's type there may be served.
//!
//! A descriptor on a mount in no table (pipes, sockets, memfds, lazily unmounted file systems) is not taken.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use quinion::internals::arena::file_systems::FileSystem;
use quinion::internals::sys::mountinfo::Line;

/// A mount, as the kernel's table has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mount {
    /// The mount's number, which may be given again once the mount is gone.
    pub id: u64,
    /// The device of the file system, as `stat` has it of most files there (btrfs says others).
    pub device: u64,
    /// The type of the file system, as far as it is known.
    pub system: FileSystem,
    /// An overlay's files change past it, but the file systems below answer for it.
    pub is_overlay: bool,
}

impl Mount {
    fn of(line: &Line<'_>) -> Self {
        let (system, is_overlay) = (FileSystem::named(line.kind), line.kind == "overlay");
        Self { id: line.id, device: line.device, system, is_overlay }
    }
    /// Whether its type answers questions soon, as far as is known.
    pub fn answers(&self) -> bool {
        self.is_overlay || self.system.may_be_served(false)
    }
}

const FDINFO_BYTES_MAX: u64 = 64 << 10;
const MOUNTINFO_BYTES_MAX: u64 = 16 << 20;

/// The kernel's name for a descriptor of this process. Asks no file system, and takes no lock of the descriptor's file.
///
/// # Errors
/// It has no path: a pipe, a socket, an epoll instance. Do not ask more about it: reads of `/proc` wait for locks of
/// some of these, which their users hold for as long as they like.
pub fn path_of_own(descriptor: BorrowedFd<'_>) -> io::Result<PathBuf> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
    if path.is_absolute() { Ok(path) } else { Err(io::Error::new(io::ErrorKind::NotFound, "it has no path")) }
}

/// The mount of a descriptor that [has a path](path_of_own), and was given by `process`. Asks no file system.
///
/// # Errors
/// The mount is in no table.
pub fn of_own(descriptor: BorrowedFd<'_>, process: u32) -> io::Result<Mount> {
    find(number_of_mount(std::process::id(), descriptor.as_raw_fd())?, process)
}

/// Whether each mount that an absolute path without links and dots may lead through in `process`
/// [answers](Mount::answers). All above it count, not the deepest alone: one may cover another.
///
/// # Errors
/// The table cannot be read, or no mount of it lies above the path.
pub fn do_all_answer(process: u32, path: &Path) -> io::Result<bool> {
    let table = read(&format!("/proc/{process}/mountinfo"), MOUNTINFO_BYTES_MAX)?;
    let mut above =
        table.lines().filter_map(Line::parse).filter(|line| path.starts_with(&line.point)).peekable();
    above.peek().ok_or_else(unknown)?;
    Ok(above.all(|line| Mount::of(&line).answers()))
}

/// The type of the file system of an absolute path without links and dots, as this process sees it.
///
/// # Errors
/// The table cannot be read, or no mount of it lies above the path.
pub fn kind_at(path: &Path) -> io::Result<String> {
    kind_in(&read("/proc/self/mountinfo", MOUNTINFO_BYTES_MAX)?, path).ok_or_else(unknown)
}

fn kind_in(table: &str, path: &Path) -> Option<String> {
    let above = table.lines().filter_map(Line::parse).filter(|line| path.starts_with(&line.point));
    above.max_by_key(|line| line.point.len()).map(|line| line.kind.to_owned()) // the last of several
}

/// In the table of `process`, or, where that cannot be read or is of a changed root (chroot), in this process's.
/// Numbers mean the same in all.
fn find(id: u64, process: u32) -> io::Result<Mount> {
    let in_table_of = |process: u32| {
        let table = read(&format!("/proc/{process}/mountinfo"), MOUNTINFO_BYTES_MAX)?;
        let mut lines = table.lines().filter_map(Line::parse);
        lines.find(|line| line.id == id).map(|line| Mount::of(&line)).ok_or_else(unknown)
    };
    in_table_of(process).or_else(|_| in_table_of(std::process::id()))
}

fn number_of_mount(process: u32, descriptor: i32) -> io::Result<u64> {
    let info = read(&format!("/proc/{process}/fdinfo/{descriptor}"), FDINFO_BYTES_MAX)?;
    let number = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    number.ok_or_else(unknown)
}

fn read(path: &str, most: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn unknown() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "its mount is in no table")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_mount_of_a_descriptor_and_of_its_path_is_that_which_stat_tells() {
        let own = std::process::id();
        let path = std::env::current_exe().unwrap().canonicalize().unwrap();
        let file = File::open(&path).unwrap();
        let by_number = of_own(file.as_fd(), own).unwrap();
        assert_eq!(path_of_own(file.as_fd()).unwrap(), path);
        assert!(do_all_answer(own, &path).unwrap());
        let magic = rustix::fs::fstatfs(&file).unwrap().f_type as u64;
        assert_eq!(by_number.system, FileSystem::of(magic));
        assert!(!do_all_answer(own, Path::new("/proc/self/status")).unwrap());
    }

    #[test]
    fn a_path_lies_in_the_last_mount_on_the_deepest_place() {
        let table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                     a line that is none\n\
                     2 1 0:9 / /a\\040b rw - tmpfs tmpfs rw\n\
                     3 1 0:10 / /a\\040b rw - xfs /dev/sdb1 rw\n\
                     4 1 0:11 / /a rw - nfs host:/ rw\n";
        let kind = |path: &str| kind_in(table, Path::new(path));
        for (path, expected) in
            [("/a b/c", "xfs"), ("/a b", "xfs"), ("/a bc", "ext4"), ("/a/b", "nfs"), ("/", "ext4")]
        {
            assert_eq!(kind(path).as_deref(), Some(expected), "{path}");
        }
        assert_eq!(kind_in("", Path::new("/")), None);
    }

    #[test]
    fn a_file_without_a_mount_in_the_table_is_unknown() {
        let own = std::process::id();
        let (reader, _writer) = io::pipe().unwrap();
        assert!(of_own(reader.as_fd(), own).is_err());
        assert!(path_of_own(reader.as_fd()).is_err());
    }
}

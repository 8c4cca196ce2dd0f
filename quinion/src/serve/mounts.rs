//! Mounts: on which file system a file lies, without asking that file system.
//!
//! `stat`, `statfs`, `open` and the last `close` of a file are questions to its file system, and one that hangs (a FUSE
//! daemon that sleeps, a network that is gone) answers none of them; a thread that has asked cannot even be killed. The
//! kernel's own tables answer without it: `/proc/PID/fdinfo/N` has the number of the mount that a descriptor is of, and
//! `/proc/PID/mountinfo` has, for each mount, the type of its file system. So what another process offers is looked at
//! here first, and taken only if its type may be served.
//!
//! A mount that is in no table (pipes, sockets and memfds have such ones, and what was unmounted lazily) is unknown,
//! and what lies there is not taken.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use crate::arena::file_systems::FileSystem;

/// A mount, as the kernel's table tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Its number. It may be given again once the mount is gone.
    pub id: u64,
    /// The device of its file system, as `stat` has it of most files there (btrfs says others).
    pub device: u64,
    /// What is known of its type.
    pub system: FileSystem,
    /// Whether it is an overlay, as containers live on: its files change past it, but its questions are answered by
    /// the file systems below.
    pub is_overlay: bool,
}

impl Mount {
    /// Whether a question to its file system is answered soon, as far as that is known of its type.
    pub fn answers(&self) -> bool {
        self.is_overlay || self.system.may_be_served(false)
    }
}

/// More than the kernel writes of a descriptor that is of a file.
const FDINFO_BYTES_MAX: u64 = 64 << 10;
/// More than any sane number of mounts takes: what lies behind that is not known.
const MOUNTINFO_BYTES_MAX: u64 = 16 << 20;

/// The mount that a descriptor of `process` is of. Asks no file system.
///
/// # Errors
/// There is no such descriptor, this process may not look at that one, or the mount is in no table.
pub fn of_descriptor(process: u32, descriptor: i32) -> io::Result<Mount> {
    let id = number_of_mount(&read(&format!("/proc/{process}/fdinfo/{descriptor}"), FDINFO_BYTES_MAX)?);
    find(process, |line| Some(line.id) == id)
}

/// The mount that a descriptor of this process is of, which it was given by `process`: in the table of that one, or, if
/// it may not be looked at, in our own; numbers mean the same in all.
///
/// # Errors
/// As [`of_descriptor`].
pub fn of_own(descriptor: BorrowedFd<'_>, process: u32) -> io::Result<Mount> {
    let own = std::process::id();
    let info = read(&format!("/proc/{own}/fdinfo/{}", descriptor.as_raw_fd()), FDINFO_BYTES_MAX)?;
    let id = number_of_mount(&info);
    let is_it = |line: &Line<'_>| Some(line.id) == id;
    find(process, is_it).or_else(|_| find(own, is_it))
}

/// Whether each mount that an absolute path without links and dots may lead through in `process`, as its table is now,
/// [answers](Mount::answers). All that lie above it are looked at, not the deepest alone: one may cover another, and a
/// walk passes those on its way.
///
/// # Errors
/// As [`of_descriptor`].
pub fn do_all_answer(process: u32, path: &Path) -> io::Result<bool> {
    let table = read(&format!("/proc/{process}/mountinfo"), MOUNTINFO_BYTES_MAX)?;
    let mut above = table.lines().filter_map(parse).filter(|line| path.starts_with(&line.point)).peekable();
    above.peek().ok_or_else(unknown)?;
    Ok(above.all(|line| line.mount().answers()))
}

struct Line<'a> {
    id: u64,
    device: u64,
    point: String,
    system: &'a str,
}

impl Line<'_> {
    fn mount(&self) -> Mount {
        let is_overlay = self.system == "overlay";
        Mount { id: self.id, device: self.device, system: FileSystem::named(self.system), is_overlay }
    }
}

fn find(process: u32, is_it: impl Fn(&Line<'_>) -> bool) -> io::Result<Mount> {
    let table = read(&format!("/proc/{process}/mountinfo"), MOUNTINFO_BYTES_MAX)?;
    table.lines().filter_map(parse).find(is_it).map(|line| line.mount()).ok_or_else(unknown)
}

/// `id parent major:minor root point options [fields] - type source options`
fn parse(line: &str) -> Option<Line<'_>> {
    let (mount, system) = line.split_once(" - ")?;
    let mut words = mount.split(' ');
    let id = words.next()?.parse().ok()?;
    let (major, minor) = words.nth(1)?.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    let point = unescape(words.nth(1)?);
    Some(Line { id, device, point, system: system.split(' ').next()? })
}

/// Blanks, tabs, line ends and backslashes stand there in octal digits.
fn unescape(word: &str) -> String {
    let mut parts = word.split('\\');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                text.push(char::from(byte));
                text.push_str(&part[3..]);
            }
            None => {
                text.push('\\');
                text.push_str(part);
            }
        }
    }
    text
}

fn number_of_mount(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
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
    fn a_line_of_the_table_is_taken_apart() {
        let line =
            parse("36 35 98:4 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext4 /dev/sda1 rw").unwrap();
        assert_eq!((line.id, line.device), (36, rustix::fs::makedev(98, 4)));
        assert_eq!((line.point.as_str(), line.system), ("/mnt 2", "ext4"));
        assert!(parse("nothing of the kind").is_none() && parse("1 2 3 4 5 - ext4").is_none());
        let unscathed = unescape("a\\b\\13");
        assert_eq!(unscathed, "a\\b\\13", "what is no escape stays");
    }

    #[test]
    fn the_mount_of_a_descriptor_and_of_its_path_is_that_which_stat_tells() {
        let own = std::process::id();
        let path = std::env::current_exe().unwrap().canonicalize().unwrap();
        let file = File::open(&path).unwrap();
        let by_number = of_descriptor(own, file.as_raw_fd()).unwrap();
        assert_eq!(by_number, of_own(file.as_fd(), own).unwrap());
        assert!(do_all_answer(own, &path).unwrap());
        let magic = rustix::fs::fstatfs(&file).unwrap().f_type as u64;
        assert_eq!(by_number.system, FileSystem::of(magic));
        assert!(!do_all_answer(own, Path::new("/proc/self/status")).unwrap());
    }

    #[test]
    fn what_has_no_mount_of_the_table_is_unknown() {
        let own = std::process::id();
        let (reader, _writer) = io::pipe().unwrap();
        assert!(of_own(reader.as_fd(), own).is_err());
        assert!(of_descriptor(own, 1 << 20).is_err());
    }
}

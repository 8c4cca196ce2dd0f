//! Processes: whether a process has ended, and whether it has a file mapped.
//!
//! A process is named by its descriptor, since numbers are given again. `/proc` tells of the number: that counts if the
//! process has not ended when it was read.
//!
//! The list of what a process has mapped may be read by a process that could debug it. Its size may be read by any. So
//! of a program with other rights, as a set-user-id one, it is known that it has not mapped a file that is larger than
//! all that it has mapped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{fstat, major, minor};

/// Whether a process has ended.
pub fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

/// Whether it is certain that the process `number` has nothing of `file` mapped, a file of memory. May wait for that
/// process, which may be changing what it has mapped.
pub fn has_not_mapped(number: u32, file: impl AsFd) -> bool {
    let Ok(stat) = fstat(file) else { return false };
    // Of a process whose first thread has ended, the list is empty and the size 0, though others go on.
    match std::fs::read(format!("/proc/{number}/maps")) {
        Ok(maps) => {
            let device = format!("{:02x}:{:02x}", major(stat.st_dev), minor(stat.st_dev));
            let maps = String::from_utf8_lossy(&maps);
            !maps.is_empty() && !maps.lines().any(|line| is_of(line, &device, stat.st_ino))
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            mapped_bytes(number).is_some_and(|bytes| (1..stat.st_size as u64).contains(&bytes))
        }
        Err(_) => false,
    }
}

/// Whether a line of a list of mappings, `ADDRESSES RIGHTS OFFSET DEVICE INODE NAME`, is of that file.
fn is_of(line: &str, device: &str, inode: u64) -> bool {
    let mut words = line.split_ascii_whitespace().skip(3);
    words.next() == Some(device) && words.next().and_then(|word| word.parse().ok()) == Some(inode)
}

/// The size of all that a process has mapped.
fn mapped_bytes(number: u32) -> Option<u64> {
    const AFTER_NAME: usize = 20;
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(AFTER_NAME)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapped_file_is_found_and_another_is_not() {
        let memory = |name: &str| {
            let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
            rustix::fs::ftruncate(&file, 4096).expect("it has room");
            file
        };
        let (mapped, other) = (memory("one"), memory("other"));
        let text = std::fs::read_to_string("/proc/self/maps").expect("ours");
        let object = text.lines().find(|line| line.contains("/libc.so")).expect("a library");
        let name = object.split_ascii_whitespace().nth(5).expect("its path");
        let library = std::fs::File::open(name).expect("it is there");
        assert!(!has_not_mapped(std::process::id(), &library));
        assert!(has_not_mapped(std::process::id(), &mapped) && has_not_mapped(std::process::id(), &other));
        assert!(mapped_bytes(std::process::id()).is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn a_process_without_a_list_is_not_said_to_have_nothing_mapped() {
        let file = rustix::fs::memfd_create("one", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        assert!(!has_not_mapped(u32::MAX, &file));
    }
}

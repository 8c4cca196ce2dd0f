//! Sys: how much of a file the kernel has in its page cache, and what this kernel allows.
//!
//! ```text
//!   ending     a signal to end, as a descriptor      probes   what this kernel allows, by trying it
//! ```
//!
//! `cachestat` answers for a whole file at once, from kernel 6.5 on. Where it is missing or forbidden, `mincore` is
//! asked through a mapping, a piece at a time; it tells less, and only for files that this process may write.
//!
//! Nothing here reads the file, so asking does not change the answer.
#![allow(unsafe_code, reason = "system calls on addresses: none of them is safe by itself")]

mod ending;
mod probes;

pub use ending::EndSignals;
pub use probes::{can_read_uncached, can_take_lease, userfaultfd};

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

/// The kernel's cached pages of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Residency {
    /// Pages of 4 KiB in memory.
    pub pages: u64,
    /// Pages in memory that are not yet written to the device, where known.
    pub dirty_pages: Option<u64>,
    /// How it was found out: "cachestat" or "mincore".
    pub method: &'static str,
}

/// The kernel's cached pages of the first `bytes` bytes of `file`.
pub fn residency(file: &File, bytes: u64) -> io::Result<Residency> {
    cachestat(file).or_else(|_| mincore(file, bytes))
}

/// The system call's number on all machines that Rust supports.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct CachestatRange {
    start: u64,
    bytes: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

fn cachestat(file: &File) -> io::Result<Residency> {
    let range = CachestatRange { start: 0, bytes: 0 };
    let mut answer = Cachestat::default();
    // SAFETY: the kernel reads one range and writes one answer, both of this function and laid out as it documents.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            ptr::from_ref(&range),
            ptr::from_mut(&mut answer),
            0_u32,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Residency {
        pages: answer.cached,
        dirty_pages: Some(answer.dirty + answer.writeback),
        method: "cachestat",
    })
}

const PIECE_BYTES: u64 = 1 << 30;
const PAGE_BYTES: u64 = 4096;

fn mincore(file: &File, bytes: u64) -> io::Result<Residency> {
    let mut pages = 0;
    for start in (0..bytes).step_by(PIECE_BYTES as usize) {
        pages += mincore_piece(file, start, (bytes - start).min(PIECE_BYTES))?;
    }
    Ok(Residency { pages, dirty_pages: None, method: "mincore" })
}

fn mincore_piece(file: &File, start: u64, bytes: u64) -> io::Result<u64> {
    let len = bytes as usize;
    let mut states = vec![0_u8; bytes.div_ceil(PAGE_BYTES) as usize];
    // SAFETY: the kernel chooses an address that is free; nothing is ever read through it.
    let address = unsafe {
        rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), start)?
    };
    // SAFETY: the range is mapped, and there is a byte for each of its pages.
    let result = unsafe { libc::mincore(address, len, states.as_mut_ptr()) };
    let result = if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: this is the mapping made above, and its address was not given away.
    unsafe { rustix::mm::munmap(address, len)? };
    result?;
    Ok(states.iter().filter(|state| **state & 1 == 1).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A file of `pages` pages and one byte that has just been written, so that it is in memory.
    fn written(pages: u64) -> (File, u64) {
        let mut file = tempfile::tempfile().expect("a temporary file");
        let bytes = pages * PAGE_BYTES + 1;
        file.write_all(&vec![7; bytes as usize]).expect("room for it");
        (file, bytes)
    }

    #[test]
    fn a_page_just_written_is_resident() {
        let (file, bytes) = written(10);
        assert_eq!(mincore(&file, bytes).expect("we may write it").pages, 11);
        assert_eq!(residency(&file, bytes).expect("we may write it").pages, 11);
    }

    #[test]
    fn an_empty_file_has_no_pages() {
        let file = tempfile::tempfile().expect("a temporary file");
        assert_eq!(residency(&file, 0).expect("it is there").pages, 0);
        assert_eq!(mincore(&file, 0).expect("nothing is asked").pages, 0);
    }
}

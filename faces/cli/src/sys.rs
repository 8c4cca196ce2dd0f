//! Sys: how much of a file the kernel keeps in its own page cache, and memory in large pages.
//!
//! ```text
//!   mapped   a file by mmap           raw   a file by io_uring, past the page cache
//!   ram_disk   a block device in memory, and file systems that only one process sees
//!   region   memory as a virtual machine has it     uffd   what brings its pages
//!   ending     a signal to end, as a descriptor      probes   what this kernel lets us do, by trying it
//!   viewed     a file in the cache of another process
//! ```
//!
//! `cachestat` answers for a whole file at once, from kernel 6.5 on. Where it is
//! missing or forbidden, `mincore` is asked through a mapping, a piece at a time;
//! it knows fewer things and answers only for files that we may write.
//!
//! Nothing here reads the file, so asking does not change the answer.
#![allow(unsafe_code, reason = "system calls on addresses: none of them is safe by itself")]

mod ending;
mod mapped;
mod probes;
mod ram_disk;
mod raw;
mod region;
mod uffd;
mod viewed;

pub use ending::Ending;
pub use mapped::Mapped;
pub use probes::{can_read_uncached, can_take_lease, userfaultfd};
pub use ram_disk::{RamDisk, mount_privately};
pub use raw::RawReader;
pub use region::{PageKind, Region};
pub use uffd::{Absent, Uffd, Waiting};
pub use viewed::{Viewed, serve};

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

/// What the kernel keeps of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Residency {
    /// Pages of 4 KiB in memory.
    pub pages: u64,
    /// Of these, pages not yet written to the device, where known.
    pub dirty_pages: Option<u64>,
    /// How it was found out: "cachestat" or "mincore".
    pub method: &'static str,
}

/// What the kernel keeps of the first `bytes` bytes of `file`.
pub fn residency(file: &File, bytes: u64) -> io::Result<Residency> {
    cachestat(file).or_else(|_| mincore(file, bytes))
}

/// The system call's number, the same on every machine but one that Rust does not support.
const SYS_CACHESTAT: libc::c_long = 451;

/// A range of bytes, as the kernel wants it; a length of 0 means to the end.
#[repr(C)]
struct CachestatRange {
    start: u64,
    bytes: u64,
}

/// Numbers of pages, as the kernel answers.
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
    // SAFETY: the kernel reads one range and writes one answer, both ours and laid out as it documents.
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

/// Bytes that are mapped at a time.
const PIECE_BYTES: u64 = 1 << 30;
const PAGE_BYTES: u64 = 4096;

fn mincore(file: &File, bytes: u64) -> io::Result<Residency> {
    let mut pages = 0;
    for start in (0..bytes).step_by(PIECE_BYTES as usize) {
        pages += mincore_piece(file, start, (bytes - start).min(PIECE_BYTES))?;
    }
    Ok(Residency { pages, dirty_pages: None, method: "mincore" })
}

/// Resident pages of a piece of at least one byte at `start`.
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
    // SAFETY: this is the mapping made above, and nobody was given its address.
    unsafe { rustix::mm::munmap(address, len)? };
    result?;
    Ok(states.iter().filter(|state| **state & 1 == 1).count() as u64)
}

/// Nanoseconds that ended children of this process, and theirs, have computed.
pub fn children_cpu_ns() -> f64 {
    // SAFETY: all-zero bytes are a value of a struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one answer, which is ours.
    let result = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    assert_eq!(result, 0, "the arguments are right, and it has no other error");
    let ns = |time: libc::timeval| time.tv_sec as f64 * 1e9 + time.tv_usec as f64 * 1e3;
    ns(usage.ru_utime) + ns(usage.ru_stime)
}

/// Nanoseconds that another process has computed, with all of its threads; none if there is no such process.
pub fn cpu_ns_of(process: rustix::process::Pid) -> f64 {
    let mut clock: libc::clockid_t = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: each call writes one answer, which is ours.
    let failed = unsafe {
        libc::clock_getcpuclockid(process.as_raw_nonzero().get(), &mut clock) != 0
            || libc::clock_gettime(clock, &mut time) != 0
    };
    if failed { 0.0 } else { time.tv_sec as f64 * 1e9 + time.tv_nsec as f64 }
}

/// Memory in 2 MiB pages where the system gives them, zero at first.
pub struct HugeMemory {
    mapped: NonNull<libc::c_void>,
    start: NonNull<u8>,
    len: usize,
}

/// What a large page holds.
const HUGE_BYTES: usize = 2 << 20;

impl HugeMemory {
    /// `len` bytes.
    pub fn new(len: usize) -> io::Result<Self> {
        let (flags, protection) = (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses an address that is free.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len + HUGE_BYTES, protection, flags)? };
        let mapped = NonNull::new(mapped).expect("nothing is mapped at 0");
        let bytes = mapped.cast::<u8>();
        // SAFETY: the mapping is longer than what is wanted by a large page, and less than one is skipped.
        let start = unsafe { bytes.add(bytes.as_ptr().align_offset(HUGE_BYTES)) };
        // SAFETY: a hint about memory that is ours; without large pages it is of small ones.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, rustix::mm::Advice::LinuxHugepage) };
        Ok(Self { mapped, start, len })
    }
}

impl Deref for HugeMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes from there are mapped, initialised by the kernel, and ours alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for HugeMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else borrows them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and what was lent of it is given back.
        let unmapped = unsafe { rustix::mm::munmap(self.mapped.as_ptr(), self.len + HUGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

// SAFETY: it owns its memory as a Vec does; shared, it is only read.
unsafe impl Sync for HugeMemory {}

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
    fn what_was_just_written_is_resident() {
        let (file, bytes) = written(10);
        assert_eq!(mincore(&file, bytes).expect("we may write it").pages, 11);
        assert_eq!(residency(&file, bytes).expect("we may write it").pages, 11);
    }

    #[test]
    fn huge_memory_is_zero_aligned_and_keeps_what_is_written() {
        let mut memory = HugeMemory::new(3 << 20).expect("there is memory");
        assert!(memory.len() == 3 << 20 && memory.iter().all(|&byte| byte == 0));
        assert_eq!(memory.as_ptr().addr() % HUGE_BYTES, 0);
        memory[(3 << 20) - 1] = 7;
        assert_eq!(memory[(3 << 20) - 1], 7);
    }

    #[test]
    fn an_empty_file_has_no_pages() {
        let file = tempfile::tempfile().expect("a temporary file");
        assert_eq!(residency(&file, 0).expect("it is there").pages, 0);
        assert_eq!(mincore(&file, 0).expect("nothing is asked").pages, 0);
    }
}

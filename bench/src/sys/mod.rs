//! Sys: system calls that measurements need, each behind a safe function.
//!
//! ```text
//!   mapped   a file by mmap           raw   a file by io_uring, past the page cache
//!   ram_disk   a block device in memory, and file systems that only one process sees
//!   region   memory as a virtual machine has it     uffd   what brings its pages
//!   viewed   a file in the cache of another process             by_c   a file by the functions of `quinion.h`
//! ```
//!
//! Beside them: memory in large pages, and CPU time of processes.
#![allow(unsafe_code, reason = "system calls on addresses: none of them is safe by itself")]

mod by_c;
mod mapped;
mod ram_disk;
mod raw;
mod region;
mod uffd;
mod viewed;

pub use by_c::FileByC;
pub use mapped::Mapped;
pub use ram_disk::{RamDisk, mount_privately};
pub use raw::RawReader;
pub use region::{PageKind, Region};
pub use uffd::{Absent, Uffd, Waiting};
pub use viewed::{Viewed, serve};

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

/// CPU nanoseconds of children of this process that have ended, and of their children.
pub fn children_cpu_ns() -> f64 {
    // SAFETY: all-zero bytes are a value of a struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one answer, to a local variable.
    let result = unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage) };
    assert_eq!(result, 0, "the arguments are right, and it has no other error");
    let ns = |time: libc::timeval| time.tv_sec as f64 * 1e9 + time.tv_usec as f64 * 1e3;
    ns(usage.ru_utime) + ns(usage.ru_stime)
}

/// CPU nanoseconds of all threads of another process; 0 if there is no such process.
pub fn cpu_ns_of(process: rustix::process::Pid) -> f64 {
    let mut clock: libc::clockid_t = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: each call writes one answer, to a local variable.
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

const HUGE_BYTES: usize = 2 << 20;

impl HugeMemory {
    pub fn new(len: usize) -> io::Result<Self> {
        let (flags, protection) = (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses an unused address.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len + HUGE_BYTES, protection, flags)? };
        let mapped = NonNull::new(mapped).expect("nothing is mapped at 0");
        let bytes = mapped.cast::<u8>();
        // SAFETY: the mapping is a large page longer than `len`, and less than a large page is skipped.
        let start = unsafe { bytes.add(bytes.as_ptr().align_offset(HUGE_BYTES)) };
        // SAFETY: a hint about memory of this process; without large pages the kernel uses small ones.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, rustix::mm::Advice::LinuxHugepage) };
        Ok(Self { mapped, start, len })
    }
}

impl Deref for HugeMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from there are mapped, initialized by the kernel, and no other code has them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for HugeMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes other borrows.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and all borrows of it have ended.
        let unmapped = unsafe { rustix::mm::munmap(self.mapped.as_ptr(), self.len + HUGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

// SAFETY: it owns its memory as a Vec does; shared, it is only read.
unsafe impl Sync for HugeMemory {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_memory_is_zero_aligned_and_keeps_written_bytes() {
        let mut memory = HugeMemory::new(3 << 20).expect("there is memory");
        assert!(memory.len() == 3 << 20 && memory.iter().all(|&byte| byte == 0));
        assert_eq!(memory.as_ptr().addr() % HUGE_BYTES, 0);
        memory[(3 << 20) - 1] = 7;
        assert_eq!(memory[(3 << 20) - 1], 7);
    }
}

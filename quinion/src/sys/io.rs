//! Io: reads and writes of memory that others may be using, write-back of a range, and the pages of a file that the
//! kernel holds.
//!
//! A frame of the arena may be read, by mistake and harmlessly, while the kernel writes into it, and stored to while
//! the kernel writes it out, so no Rust reference to it may exist. These calls take an address.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::ioctl::{Getter, ioctl, opcode};

/// Reads up to `len` bytes at byte `position` of `file` to `buffer`. Returns how many came; 0 only at the
/// file's end or for a `len` of 0. Waits for the device.
///
/// # Errors
/// Those of `pread(2)`; `InvalidInput` for a position that no file can have.
///
/// # Safety
/// `buffer..buffer + len` is valid for writes, and its content is not relied on meanwhile.
pub unsafe fn pread(file: BorrowedFd<'_>, buffer: *mut u8, len: usize, position: u64) -> io::Result<usize> {
    let position = libc::off64_t::try_from(position)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no file has bytes beyond 2^63 - 1"))?;
    // SAFETY: the kernel writes at most `len` bytes to `buffer`, which the caller guarantees; the
    // descriptor is open as long as it is borrowed.
    let read = unsafe { libc::pread64(file.as_raw_fd(), buffer.cast(), len, position) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Writes up to `len` bytes at `buffer` to byte `position` of `file`. Returns how many. Waits for the device, if
/// the file is written directly.
///
/// # Errors
/// Those of `pwrite(2)`; `InvalidInput` for a position that no file can have.
///
/// # Safety
/// `buffer..buffer + len` is valid for reads. Others may be storing there.
pub unsafe fn pwrite(
    file: BorrowedFd<'_>,
    buffer: *const u8,
    len: usize,
    position: u64,
) -> io::Result<usize> {
    let position = libc::off64_t::try_from(position)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no file has bytes beyond 2^63 - 1"))?;
    // SAFETY: the kernel reads at most `len` bytes at `buffer`, which the caller guarantees; the
    // descriptor is open as long as it is borrowed.
    let written = unsafe { libc::pwrite64(file.as_raw_fd(), buffer.cast(), len, position) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Has the kernel write out its dirty pages of `len` bytes of `file` from byte `position` on, and waits until the
/// device has taken them. The device may hold it in a cache of its own: that is not durable.
///
/// # Errors
/// Those of `sync_file_range(2)`; of a write-back that failed since `file`'s description was opened or was
/// last told, too.
pub fn write_back(file: BorrowedFd<'_>, position: u64, len: u64) -> io::Result<()> {
    let whole =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let range = libc::off64_t::try_from(position).and_then(|at| Ok((at, libc::off64_t::try_from(len)?)));
    let (position, len) = range.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the arguments are a descriptor, which is open as long as it is borrowed, and numbers.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), position, len, whole) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Pages of a file in the kernel's page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelCacheCounts {
    /// Pages in memory.
    pub pages: u64,
    /// Pages in memory that are newer than the device's, or on their way there.
    pub unwritten: u64,
}

/// Pages of the first `bytes` bytes of `file` in the kernel's page cache. Where the kernel does not report them (before
/// 6.5, or a file of another user), some pages are read without waiting, and the rest is taken to be as they are.
///
/// # Errors
/// Those of `preadv2(2)`; the file system cannot read without waiting, say.
pub fn kernel_holds(file: BorrowedFd<'_>, bytes: u64) -> io::Result<KernelCacheCounts> {
    cachestat(file, bytes).or_else(|_| {
        let (samples, pages) = (8, bytes.div_ceil(4096));
        let places = (0..samples).map(|i| (pages.saturating_sub(1)) * i / (samples - 1) * 4096);
        let mut there = 0;
        for place in places {
            there += u64::from(is_in_memory(file, place)?);
        }
        Ok(KernelCacheCounts { pages: pages * there / samples, unwritten: 0 })
    })
}

/// The call has this number on every machine but one that Rust does not support.
const SYS_CACHESTAT: libc::c_long = 451;

fn cachestat(file: BorrowedFd<'_>, bytes: u64) -> io::Result<KernelCacheCounts> {
    // In pages: cached, dirty, under write-back, evicted, evicted lately.
    let (range, mut pages) = ([0, bytes], [0u64; 5]);
    // SAFETY: the kernel reads two numbers and writes five, all of them this function's.
    let done =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), pages.as_mut_ptr(), 0_u32) };
    let [cached, dirty, written, ..] = pages;
    match done {
        0 => Ok(KernelCacheCounts { pages: cached, unwritten: dirty + written }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn is_in_memory(file: BorrowedFd<'_>, position: u64) -> io::Result<bool> {
    let mut byte = 0u8;
    let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let position = libc::off64_t::try_from(position).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel writes one byte, which is this function's.
    let read = unsafe { libc::preadv64v2(file.as_raw_fd(), &part, 1, position, libc::RWF_NOWAIT) };
    match (read, io::Error::last_os_error()) {
        (-1, error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        (-1, error) => Err(error),
        _ => Ok(true),
    }
}

/// The size of a block device in bytes, now. Leaves the description's offset alone, which may be shared.
///
/// # Errors
/// It is not a block device, or the device is gone.
pub fn device_bytes(device: BorrowedFd<'_>) -> io::Result<u64> {
    // `BLKGETSIZE64`, which is declared with the size of a `size_t` and writes a u64.
    const GET_SIZE: rustix::ioctl::Opcode = opcode::read::<usize>(0x12, 114);
    // SAFETY: the request writes one u64, which is what the getter has room for.
    Ok(unsafe { ioctl(device, Getter::<GET_SIZE, u64>::new()) }?)
}

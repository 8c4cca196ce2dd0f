//! Io: reads and writes of memory that others may be using, write-back of a range, and the size of a device.
//!
//! A frame of the arena may be read, by mistake and harmlessly, while the
//! kernel writes into it, and stored to while the kernel writes it out, so no
//! Rust reference to it may exist. These calls take an address.

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
/// `buffer..buffer + len` is valid for writes, and nobody relies on its content meanwhile.
pub unsafe fn pread(file: BorrowedFd<'_>, buffer: *mut u8, len: usize, position: u64) -> io::Result<usize> {
    let position = libc::off64_t::try_from(position)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no file has bytes beyond 2^63 - 1"))?;
    // SAFETY: the kernel writes at most `len` bytes to `buffer`, which the caller vouches for; the
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
    // SAFETY: the kernel reads at most `len` bytes at `buffer`, which the caller vouches for; the
    // descriptor is open as long as it is borrowed.
    let written = unsafe { libc::pwrite64(file.as_raw_fd(), buffer.cast(), len, position) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Has the kernel write out what its page cache holds of `len` bytes of `file` from byte `position` on, and
/// waits until the device has taken it. The device may hold it in a cache of its own: that is not durable.
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

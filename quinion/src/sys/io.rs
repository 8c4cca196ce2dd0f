//! Io: reads into memory that others may be looking at, and the size of a device.
//!
//! A frame of the arena may be read, by mistake and harmlessly, while the
//! kernel writes into it, so no Rust reference to it may exist. These calls
//! take an address.

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

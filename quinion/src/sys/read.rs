//! Read: `pread` to an address.
//!
//! Frames of the arena may be looked at by others while they are written, so no
//! Rust slice of them may exist; the kernel is handed their address.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Reads up to `len` bytes at `position` of `file` to `to` and returns how many; 0 at the end of the file.
/// A call that a signal interrupts is made again.
///
/// # Safety
/// `to` is valid for `len` bytes of writes by nobody else.
pub unsafe fn read_at(file: BorrowedFd<'_>, to: *mut u8, len: usize, position: u64) -> io::Result<usize> {
    let offset = i64::try_from(position).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    loop {
        // SAFETY: the caller's promise.
        let read = unsafe { libc::pread64(file.as_raw_fd(), to.cast(), len, offset) };
        match usize::try_from(read) {
            Ok(bytes) => return Ok(bytes),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

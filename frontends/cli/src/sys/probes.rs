//! Probes: what this kernel allows, found out by trials.
//!
//! A version number says little: kernels are built without features, and containers forbid others. A trial leaves
//! nothing behind.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

/// Whether this process may have a read lease on `file`, which is open for reading and has no writer.
pub fn can_take_lease(file: &File) -> io::Result<()> {
    // SAFETY: numbers only.
    let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
    if taken != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above. It ends with the description at the latest.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    Ok(())
}

/// Whether `file` can be read through the kernel's cache without staying there.
pub fn can_read_uncached(file: &File) -> io::Result<()> {
    const RWF_DONTCACHE: libc::c_int = 0x80;
    let mut byte = 0u8;
    let part = libc::iovec { iov_base: std::ptr::from_mut(&mut byte).cast(), iov_len: 1 };
    // SAFETY: one part, of one byte of this function.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &part, 1, 0, RWF_DONTCACHE) };
    if read < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether this process may serve page faults, those of the kernel included.
pub fn userfaultfd() -> io::Result<()> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: no memory is concerned.
    let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    let opened = i32::try_from(opened).expect("a descriptor is an int");
    // SAFETY: the descriptor was just opened, and has no other owner; this closes it.
    drop(unsafe { File::from_raw_fd(opened) });
    Ok(())
}

//! Peer: the process at the other end of a connected Unix socket.
//!
//! The kernel notes it when the connection is made. If it can give a process descriptor (6.5), that is one of the
//! very process that connected; a number may be another process's by the time a descriptor is opened for it.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The option as all machines number it that this crate is built for (SPARC and PA-RISC have another number).
const SO_PEERPIDFD: libc::c_int = 77;

/// The number of the process that connected; `None` if it has none here: it may live in another name space.
pub fn process(socket: BorrowedFd<'_>) -> Option<i32> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    // SAFETY: the kernel writes so many bytes, which are there.
    let is_whole = unsafe { option(socket, libc::SO_PEERCRED, &mut peer) };
    // SAFETY: it has written all of them, and they are three numbers.
    is_whole.then(|| unsafe { peer.assume_init() }.pid).filter(|&process| process > 0)
}

/// The effective user of the process that connected, or listens, at the other end, as of then.
pub fn user(socket: BorrowedFd<'_>) -> Option<u32> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    // SAFETY: as in `process`.
    let is_whole = unsafe { option(socket, libc::SO_PEERCRED, &mut peer) };
    // SAFETY: as in `process`.
    is_whole.then(|| unsafe { peer.assume_init() }.uid)
}

/// A descriptor of the process that connected.
///
/// # Errors
/// The system's number: `ENOPROTOOPT` before Linux 6.5; another if the process was reaped before this was asked, or no
/// descriptor is left.
pub fn descriptor(socket: BorrowedFd<'_>) -> Result<OwnedFd, i32> {
    let mut fd = MaybeUninit::<libc::c_int>::uninit();
    // SAFETY: the kernel writes so many bytes, which are there.
    if !unsafe { option(socket, SO_PEERPIDFD, &mut fd) } {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
    }
    // SAFETY: it has written a number.
    let fd = unsafe { fd.assume_init() };
    if fd < 0 {
        return Err(libc::ESRCH);
    }
    // SAFETY: the kernel has just made this descriptor for us, close-on-exec, and says its number once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads an option of a socket. Whether all of `value` was written.
///
/// # Safety
/// The option writes `T` at most.
unsafe fn option<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut MaybeUninit<T>) -> bool {
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the caller's; the kernel writes `bytes` bytes at most.
    let result = unsafe {
        let value = value.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, &raw mut bytes)
    };
    result == 0 && bytes as usize == size_of::<T>()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_pair_of_ours_is_ours() {
        let (socket, _other) = UnixStream::pair().expect("a pair");
        assert_eq!(process(socket.as_fd()), i32::try_from(std::process::id()).ok());
        if let Ok(descriptor) = descriptor(socket.as_fd()) {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()));
            let wanted = format!("Pid:\t{}\n", std::process::id());
            assert!(info.expect("ours").contains(&wanted), "a descriptor of another process");
        }
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(process(file.as_fd()), None);
        assert_eq!(descriptor(file.as_fd()).map(drop), Err(libc::ENOTSOCK));
    }
}

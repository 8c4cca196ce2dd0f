//! Ending: the signals that ask this process to end, as a descriptor.
//!
//! The signals are blocked, in the calling thread and in all that it starts later, and come by a descriptor instead: no
//! handler runs. A signal that this process inherited as ignored (`nohup`) stays ignored.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// A descriptor that is readable when this process should end.
#[derive(Debug)]
pub struct EndSignals(OwnedFd);

impl EndSignals {
    /// Starts to receive SIGINT, SIGTERM and SIGHUP; called before other threads are started.
    pub fn listen() -> io::Result<Self> {
        // SAFETY: all zeros is a value of this C structure, which the calls fill; the descriptor is new, and this
        // process's.
        unsafe {
            let mut signals: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut signals);
            for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::sigaddset(&raw mut signals, number);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
            match libc::signalfd(-1, &raw const signals, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                fd if fd >= 0 => Ok(Self(OwnedFd::from_raw_fd(fd))),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }
}

impl AsFd for EndSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

//! Sys: what a process inherits, and which process is at the other end of a socket.
//!
//! ```text
//!   the runner                    the owner that stays
//!     terminal, session             a session of its own, without a terminal
//!     working folder                /
//!     descriptors 0, 1, 2           /dev/null      (0 and 1 are the lock and the way to say "ready", for the first
//! moment)
//!     all others                    closed, also those left open by the runner's parent
//!     ignored signals               those for the end of a process are handled again
//! ```
//!
//! What cannot be left is documented in the help of `run`: the mount name space, which the owner keeps alive while it
//! lives, the limits, and the control group.
#![allow(unsafe_code, reason = "descriptors are closed by number, and a socket's option is a C structure")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const FIRST_OTHER: libc::c_uint = 3;

/// Leaves all that is the starter's but descriptors 0 to 2. Called first, before this process has other descriptors or
/// a second thread.
pub fn leave_starter() -> io::Result<()> {
    close_others()?;
    restore_default_signals();
    // Until here a ctrl-C ends this process together with the starter: no run has a cache yet.
    rustix::process::setsid()?;
    std::env::set_current_dir("/")?;
    // Each known file has a descriptor. A limit that cannot be raised is no error.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    // For lists of processes; without /proc there is no such list.
    let _ = std::fs::write("/proc/self/comm", "quinion-keep");
    Ok(())
}

fn close_others() -> io::Result<()> {
    // SAFETY: nothing in this process has a descriptor yet: its `main` has just begun.
    if unsafe { libc::syscall(libc::SYS_close_range, FIRST_OTHER, libc::c_uint::MAX, 0) } == 0 {
        return Ok(());
    }
    // Before Linux 5.9. The list's own descriptor is among them, and is closed by its number when it is dropped.
    let open: Vec<libc::c_int> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&fd| fd >= FIRST_OTHER as libc::c_int)
        .collect();
    for fd in open {
        // SAFETY: as above; one that is closed already is an error of the call's.
        unsafe { libc::close(fd) };
    }
    Ok(())
}

/// Restores signals that end a process: the starter may have ignored (`nohup`) or blocked them.
fn restore_default_signals() {
    // SAFETY: the default is no handler; all zeros is a value of the C structure, an empty set.
    unsafe {
        for number in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::signal(number, libc::SIG_DFL);
        }
        let none: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// The process that made, or listens on, the other end of a connected socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its process; 0 if that has no number here: it lives in another name space of processes.
    pub process: u32,
    /// Its user.
    pub user: u32,
}

/// Asks the kernel, which recorded it when the connection was made.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut peer = MaybeUninit::<libc::ucred>::zeroed();
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most so many bytes, which are there.
    let answer = unsafe {
        let (fd, value) = (socket.as_fd().as_raw_fd(), peer.as_mut_ptr().cast());
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, value, &raw mut bytes)
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed and then written: three numbers.
    let peer = unsafe { peer.assume_init() };
    Ok(Peer { process: u32::try_from(peer.pid).unwrap_or(0), user: peer.uid })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_pair_of_ours_is_ours() {
        let (socket, _other) = UnixStream::pair().expect("a pair");
        let us = Peer { process: std::process::id(), user: rustix::process::geteuid().as_raw() };
        assert_eq!(peer(&socket).expect("it is a socket"), us);
    }
}

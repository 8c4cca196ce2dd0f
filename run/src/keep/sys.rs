//! Sys: the parts of its starter's state that an owner inherits, and leaves.
//!
//! ```text
//!   the runner                    the owner that stays
//!     terminal, session             a session of its own, without a terminal
//!     working folder                /
//!     descriptors 0, 1, 2           /dev/null; until it is ready, 0 is the lock and 1 the way to say "ready"
//!     all others                    closed, also those left open by the runner's parent
//!     ignored signals               those for the end of a process are handled again
//! ```
//!
//! What cannot be left is documented in the help of `run`: the mount name space, which the owner keeps alive while it
//! lives, the limits, and the control group.
#![allow(unsafe_code, reason = "descriptors are closed by number, and a set of signals is a C structure")]

use std::io;

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

//! Activation: the socket that systemd opens in this program's place, by its protocol `sd_listen_fds`.
//!
//! `LISTEN_FDS` says how many descriptors there are, from number 3 on, and `LISTEN_PID` for which process. Clients that
//! connect while no server runs, as between two versions of it, wait in the socket's queue.
#![allow(unsafe_code, reason = "descriptors that were given have a number and no type")]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The first descriptor that is given.
const FIRST: RawFd = 3;

/// The socket that was given, if one was. To be called once.
///
/// # Errors
/// More than one was given; it is not open.
pub fn socket() -> Result<Option<OwnedFd>, String> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => Ok(None),
        Some(1) if std::fs::symlink_metadata(format!("/proc/self/fd/{FIRST}")).is_err() => Err(format!(
            "the service manager gives no socket as descriptor {FIRST}, though LISTEN_FDS says so; check the \
                 socket unit, or unset LISTEN_FDS"
        )),
        // SAFETY: it is open, as was looked at just now. The manager has given it to this process, and the program
        // calls this before it opens anything that it keeps: so no other value owns it.
        Some(1) => Ok(Some(unsafe { OwnedFd::from_raw_fd(FIRST) })),
        Some(more) => Err(format!("the service manager gives {more} sockets; give one, for clients")),
    }
}

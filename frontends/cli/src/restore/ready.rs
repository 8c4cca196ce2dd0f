//! Ready: tells systemd that VMs may connect, by its protocol `sd_notify`.
//!
//! One datagram goes to the socket that `NOTIFY_SOCKET` names: a path, or after an `@` an abstract name. Without the
//! variable nothing is sent. The unit is `packaging/quinion-restore.service`.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `state`, such as `READY=1`.
///
/// # Errors
/// The manager cannot be told, in words.
pub fn notify(state: &str) -> Result<(), String> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return Ok(()) };
    let sent = address(&name).and_then(|to| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &to));
    sent.map(drop).map_err(|error| {
        format!("cannot tell the service manager by NOTIFY_SOCKET={}: {error}", name.to_string_lossy())
    })
}

fn address(name: &OsStr) -> std::io::Result<SocketAddr> {
    match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    }
}

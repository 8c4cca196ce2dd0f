//! Notify: messages to systemd, by its protocol `sd_notify`.
//!
//! It is one datagram to the socket that `NOTIFY_SOCKET` names: a path, or after an `@` an abstract name. Without the
//! variable nothing is sent.
//!
//! A manager with a watchdog (`WatchdogSec=`) ends a service of which it does not hear for some time; it says how long
//! in `WATCHDOG_USEC`, and which process it means in `WATCHDOG_PID`. It is told twice as often.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Sends a state such as `READY=1`.
///
/// # Errors
/// What the kernel says of that socket.
pub fn notify(state: &str) -> io::Result<()> {
    std::env::var_os("NOTIFY_SOCKET").map_or(Ok(()), |socket| send(&socket, state))
}

/// Tells a manager's watchdog that the thread which waits for this goes on; without a watchdog, nothing.
pub async fn keep_alive(tell: impl Fn(&str)) -> Infallible {
    let Some(every) = watchdog_interval() else { return std::future::pending().await };
    loop {
        tell("WATCHDOG=1");
        tokio::time::sleep(every).await;
    }
}

fn watchdog_interval() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    if number("WATCHDOG_PID").is_some_and(|process| process != u64::from(std::process::id())) {
        return None; // it is meant for the process that started this one
    }
    let limit = Duration::from_micros(number("WATCHDOG_USEC").filter(|&limit| limit > 0)?);
    Some((limit / 2).max(Duration::from_millis(1)))
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

//! Socket: where programs of a run find its cache's owner.
//!
//! It lies in the user's folder (`user_folder.rs`), which nobody else can enter or change, under a name of its own, and
//! is removed with its owner. One that a killed owner left is removed by the next that comes: nobody listens there.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use quinion::serve::listen;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::open_files;

/// How names of sockets begin and end.
const PREFIX: &str = "view-";
const SUFFIX: &str = ".socket";

/// The path of a socket that is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
}

impl Socket {
    /// Listens in that folder, the user's.
    pub(super) fn listen_in(folder: &Path) -> io::Result<(Self, OwnedFd)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        remove_left(folder);
        let path = folder.join(format!(
            "{PREFIX}{}.{}{SUFFIX}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        let listener = listen(&path).or_else(|_| {
            // A process of our number was killed here.
            let _ = std::fs::remove_file(&path);
            listen(&path)
        });
        let wrong = |error: io::Error| {
            if open_files::are_too_many(&error) {
                return error;
            }
            let path = path.display();
            io::Error::other(format!(
                "cannot listen for programs at {path}: {error}; set XDG_RUNTIME_DIR to a folder of your own, with a \
                 short path"
            ))
        };
        let listener = listener.map_err(wrong)?;
        Ok((Self { path }, listener))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Removes sockets at which nobody listens.
pub(super) fn remove_left(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_one = name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
        if is_one && nobody_listens(&entry.path()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn nobody_listens(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(end) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else { return false };
    SocketAddrUnix::new(path).is_ok_and(|address| connect(&end, &address) == Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_was_left_is_removed_and_one_that_is_listened_at_stays() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join("view-1.socket");
        drop(listen(&left).unwrap());
        let used = folder.path().join("view-2.socket");
        let _listener = listen(&used).unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "").unwrap();
        let (socket, _ours) = Socket::listen_in(folder.path()).unwrap();
        assert!(!left.exists() && used.exists() && other.exists());
        let path = socket.path().to_owned();
        assert!(path.exists());
        drop(socket);
        assert!(!path.exists());
    }
}

//! Socket: where programs of a run find its cache's owner.
//!
//! ```text
//!   new-RANDOM.socket   bind, listen  --RENAME_NOREPLACE-->  view-RANDOM.socket   connect   removed by its owner
//!        |                                                        |
//!        | old, and without a listener: removed by                | without a listener: removed by
//!        v the next process; its maker begins anew                v the next process
//! ```
//!
//! It lies in the user's folder (`user_folder.rs`), which no other user can enter or change, and is removed with its
//! owner. The next run removes one that a killed owner left: it has no listener.
//!
//! Between bind and listen a socket that is about to be used has no listener. So it is made under another name, and one
//! called `view-` has had a listener. A name is random and never used again: a socket that has lost its listener never
//! gets one again. So it may be removed at any time later, by any number of processes at once, without a lock. The
//! number of a process would not do: it is used again, and belongs to another process in another name space.

use std::fs::DirEntry;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quinion_owner::internals::serve::listen;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::open_files;

/// How names of sockets begin and end. With the random digits they have 24 letters.
const PREFIX: &str = "view-";
const SUFFIX: &str = ".socket";
const NEW: &str = "new-";
/// Random hexadecimal digits of a name.
const RANDOM_DIGITS: usize = 12;
/// The age at which a socket that had no listener yet counts as left behind.
const NEW_MAX: Duration = Duration::from_secs(60);
/// How often it is begun anew. Even one retry is rare: the process was stopped for a minute, or the name existed.
const TRIES_MAX: usize = 8;

/// The path of a socket that is removed when this is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
}

impl Socket {
    pub(super) fn listen_in(folder: &Path) -> io::Result<(Self, OwnedFd)> {
        remove_left(folder);
        let mut made = make(folder);
        for _ in 1..TRIES_MAX {
            match &made {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AddrInUse | io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound
                    ) => {}
                _ => break,
            }
            made = make(folder);
        }
        made.map_err(|error| {
            if open_files::are_too_many(&error) {
                return error;
            }
            io::Error::other(format!(
                "cannot listen for programs in {}: {error}; set XDG_RUNTIME_DIR to a folder of your own, with a \
                 short path",
                folder.display()
            ))
        })
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

/// Makes a socket, and renames it when it has a listener.
fn make(folder: &Path) -> io::Result<(Socket, OwnedFd)> {
    let random = random_name();
    // When dropped, it is removed under its name of then.
    let new = Socket { path: folder.join(format!("{NEW}{random}{SUFFIX}")) };
    let listener = listen(&new.path)?;
    let path = folder.join(format!("{PREFIX}{random}{SUFFIX}"));
    match renameat_with(CWD, &new.path, CWD, &path, RenameFlags::NOREPLACE) {
        // The file system lacks that flag; no other process has drawn this name.
        Err(Errno::INVAL | Errno::NOSYS) => std::fs::rename(&new.path, &path)?,
        renamed => renamed?,
    }
    Ok((Socket { path }, listener))
}

/// The standard library's hash tables have random keys, and no two are alike.
fn random_name() -> String {
    let random = RandomState::new().build_hasher().finish();
    format!("{:0RANDOM_DIGITS$x}", random >> (64 - 4 * RANDOM_DIGITS))
}

pub(super) fn remove_left(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| name.ends_with(SUFFIX)) else { continue };
        let is_one = name.starts_with(PREFIX) || name.starts_with(NEW) && is_old(&entry);
        if is_one && has_no_listener(&entry.path()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn is_old(entry: &DirEntry) -> bool {
    let made = entry.metadata().and_then(|data| data.modified());
    made.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > NEW_MAX))
}

fn has_no_listener(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(end) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else { return false };
    SocketAddrUnix::new(path).is_ok_and(|address| connect(&end, &address) == Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

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

    #[test]
    fn one_that_is_being_made_stays_and_one_whose_maker_was_killed_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let flags = SocketFlags::CLOEXEC;
        let bound = |name: &str| {
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            let path = folder.path().join(name);
            rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            (socket, path)
        };
        let (_socket, making) = bound("new-1.socket");
        let (_, left) = bound("new-2.socket");
        let long_ago = SystemTime::now() - 2 * NEW_MAX;
        let times = rustix::fs::Timespec {
            tv_sec: long_ago.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64,
            tv_nsec: 0,
        };
        let times = rustix::fs::Timestamps { last_access: times, last_modification: times };
        rustix::fs::utimensat(CWD, &left, &times, rustix::fs::AtFlags::empty()).unwrap();
        let (_ours, _listener) = Socket::listen_in(folder.path()).unwrap();
        assert!(making.exists() && !left.exists());
    }

    /// Each removes sockets that seem left behind, while the other is about to listen.
    #[test]
    fn two_owners_that_start_at_once_find_their_sockets_in_place() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for round in 0..2000 {
                        let (socket, listener) = Socket::listen_in(folder.path()).unwrap();
                        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                        let end =
                            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
                        let address = SocketAddrUnix::new(socket.path()).unwrap();
                        // The other connects to each socket to check it; a queue that is full of such checks is no lost
                        // socket: an owner accepts them.
                        let mut connected = connect(&end, &address);
                        while connected == Err(Errno::AGAIN) {
                            drop(rustix::net::accept(&listener).unwrap());
                            connected = connect(&end, &address);
                        }
                        assert_eq!(connected, Ok(()), "round {round}");
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something was left");
    }
}

//! Socket: the file at which VMMs connect, which users may do so, and whether the file is the server's own.
//!
//! ```text
//!   another listener there? --no--> remove what is left --> bind --> permissions, owner --> listen
//!                                                            by the file's own descriptor: no link is followed
//! ```
//!
//! No process can connect before the permissions are what the options say. Another user who may write to the folder can
//! put something else under the name at any moment; then what is changed is what was bound, or nothing.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::RestoreOptions;
use quinion::error::{Error, Result};

/// The longest path of a socket, in bytes (`sun_path`, and a zero behind it).
const SOCKET_PATH_MAX: usize = 107;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

pub(super) fn failed(socket: &Path, what: &str, error: impl fmt::Display) -> Error {
    let text = format!("page faults cannot be served there: {what}{error}");
    Error::cannot_open(socket, text)
}

/// Does not wait for a process that does not accept.
fn listens(path: &Path) -> rustix::io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A socket at `path` that listens, for the users that `options` say, and the number of its file.
pub(super) fn listen(path: &Path, options: &RestoreOptions) -> Result<(OwnedFd, u64)> {
    let failed = |error: &dyn fmt::Display| failed(path, "", error);
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(failed(&format_args!(
            "a socket's path has {SOCKET_PATH_MAX} bytes at most; name a shorter one"
        )));
    }
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(failed(&"something else is there; name another place, or remove it"));
        }
        match listens(path) {
            Ok(true) => {
                let text = "another server listens there; name another path, or end that server";
                return Err(failed(&text));
            }
            Ok(false) => fs::remove_file(path).map_err(|e| failed(&e))?,
            Err(error) => return Err(failed(&error)),
        }
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bound = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok::<_, io::Error>(socket)
    };
    let socket = bound().map_err(|e| failed(&e))?;
    let (file, inode) = file_of_socket(path).map_err(|e| failed(&e))?;
    let listening = open_to(path, &file, options)
        .and_then(|()| rustix::net::listen(&socket, BACKLOG).map_err(|e| failed(&e)));
    match listening {
        Ok(()) => Ok((socket, inode)),
        Err(wrong) => {
            // It is this server's, if no other has taken its place, and of no use.
            if fs::symlink_metadata(path).is_ok_and(|found| found.ino() == inode) {
                let _ = fs::remove_file(path);
            }
            Err(wrong)
        }
    }
}

/// The file of the socket that was just bound at `path`, by a descriptor that can neither read nor write, and its
/// number. Changes are made by this descriptor, and no link is followed.
fn file_of_socket(path: &Path) -> io::Result<(OwnedFd, u64)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::other(
            "another program replaced the socket; choose a folder that only you can write",
        ));
    }
    Ok((file, stat.st_ino))
}

/// Gives the socket's file its permissions, and then its owner, who may change them.
fn open_to(path: &Path, file: &OwnedFd, options: &RestoreOptions) -> Result<()> {
    let (user, group) = (options.socket_owner, options.socket_group);
    let mode = Mode::from_raw_mode(options.socket_mode);
    // The mode is set by the descriptor's name: `fchmod` takes no descriptor of this kind.
    rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode)
        .map_err(|e| failed(path, "", e))?;
    if user.or(group).is_none() {
        return Ok(());
    }
    let (uid, gid) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    rustix::fs::chownat(file, "", uid, gid, AtFlags::EMPTY_PATH).map_err(|error| {
        let shown = |id: Option<u32>| id.map_or_else(String::new, |id| id.to_string());
        let what = format!("it cannot be given to {}:{}: ", shown(user), shown(group));
        failed(path, &what, format_args!("{error}; run as root, or name a group of your own"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_the_place_of_the_socket_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (secret, planted) = (folder.path().join("secret"), folder.path().join("planted"));
        fs::write(&secret, "mine").expect("the disk has room");
        fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .expect("it is ours");
        std::os::unix::fs::symlink(&secret, &planted).expect("it is new");
        assert!(file_of_socket(&planted).is_err());
        assert!(file_of_socket(&secret).is_err(), "no socket");
        // Swapped after it was bound, and before its permissions are set.
        let path = folder.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).expect("it is new");
        let (file, inode) = file_of_socket(&path).expect("it is one");
        assert_eq!(fs::symlink_metadata(&path).expect("it is there").ino(), inode);
        fs::rename(&path, folder.path().join("moved")).expect("the folder is ours");
        std::os::unix::fs::symlink(&secret, &path).expect("it is new");
        let options = RestoreOptions { socket_mode: 0o666, ..RestoreOptions::default() };
        open_to(&path, &file, &options).expect("the file is there still");
        let mode = |path: &Path| fs::symlink_metadata(path).expect("it is there").mode() & 0o777;
        assert_eq!((mode(&secret), mode(&folder.path().join("moved"))), (0o600, 0o666));
    }
}

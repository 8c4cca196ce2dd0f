//! Socket: the file at which VMMs connect, which users may do so, and whether the file is the server's own.
//!
//! ```text
//!   another listener there? --no--> remove what is left --> bind --> permissions, owner --> listen
//!                                                            by the file's own descriptor: no link is followed
//!   '---------------------------- under a lock on the folder ----------------------------------------------'
//! ```
//!
//! Of two servers that start at one path, the second would take the socket of the first for a leftover, as long as that
//! does not listen, and remove it. So all of this is done under a lock on the folder (`flock`). It is waited for, but
//! not without end: any user who may read the folder can hold it, and must not keep a server from starting. Then, and
//! where the folder may not be read, there is no lock.
//!
//! No process can connect before the permissions are what the options say. Another user who may write to the folder can
//! put something else under the name at any moment; then what is changed is what was bound, or nothing.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, Uid, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::RestoreOptions;
use crate::fault_record::Fingerprint;
use quinion::error::{Error, Result};
use quinion::internals::hooks::cannot_open;

/// The longest path of a socket, in bytes (`sun_path`, and a zero behind it).
const SOCKET_PATH_MAX: usize = 107;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// How long the lock on the folder is waited for, and how often it is asked for.
const LOCK_WAIT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(2);

pub(super) fn failed(socket: &Path, what: &str, error: impl fmt::Display) -> Error {
    let text = format!("page faults cannot be served there: {what}{error}");
    cannot_open(socket, text)
}

/// A lock on the folder of `path` as long as the descriptor is open; `None` where the folder cannot be opened, of which
/// the bind tells, or only cannot be read, or where another program has it for [`LOCK_WAIT`].
fn lock_folder(path: &Path) -> Option<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    let until = Instant::now() + LOCK_WAIT;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(LOCK_PAUSE);
            }
            // A file system without such locks. Or another program holds one, as each can that may read the folder:
            // that keeps no server from starting.
            Err(_) => return None,
        }
    }
}

/// Which of a server's two sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SocketAddress {
    /// The socket of VMMs: at the path that the server was given.
    Vmms,
    /// The socket of a server which is to take over: beside it, and for the same user alone.
    Successors,
}

impl SocketAddress {
    /// Where its file is, for a server at `path`. Where the name beside it would be too long, it is a hash of it.
    pub(super) fn path(self, path: &Path) -> PathBuf {
        match self {
            Self::Vmms => path.to_owned(),
            Self::Successors => {
                let mut name = path.as_os_str().to_owned();
                name.push(".takeover");
                if name.len() <= SOCKET_PATH_MAX {
                    return name.into();
                }
                let mut sum = Fingerprint::new();
                sum.add(path.file_name().unwrap_or_default().as_bytes());
                path.with_file_name(format!("{:016x}.takeover", sum.value()))
            }
        }
    }

    fn socket(self) -> rustix::io::Result<OwnedFd> {
        let kind = match self {
            Self::Vmms => SocketType::STREAM,
            Self::Successors => SocketType::SEQPACKET,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
    }
}

/// Calls `call` with the address of `path`, which may be longer than an address can be: then by way of its folder's
/// descriptor.
fn with_address<T>(
    path: &Path,
    call: impl FnOnce(&SocketAddrUnix) -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Err(Errno::INVAL) };
    if path.as_os_str().len() <= SOCKET_PATH_MAX {
        return call(&SocketAddrUnix::new(path)?);
    }
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    call(&SocketAddrUnix::new(&short)?)
}

/// Connects to a server at `path`. Does not wait for a process that does not accept.
pub(super) fn connect_to(path: &Path, which: SocketAddress) -> rustix::io::Result<OwnedFd> {
    let socket = which.socket()?;
    with_address(&which.path(path), |address| rustix::net::connect(&socket, address))?;
    Ok(socket)
}

fn listens(path: &Path, which: SocketAddress) -> rustix::io::Result<bool> {
    match connect_to(path, which) {
        Ok(_) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A socket at `path` that listens, for the users that `options` say, and the number of its file.
pub(super) fn listen(path: &Path, options: &RestoreOptions) -> Result<(OwnedFd, u64)> {
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        let text = format!("a socket's path has {SOCKET_PATH_MAX} bytes at most; name a shorter one");
        return Err(failed(path, "", text));
    }
    let _locked = lock_folder(path);
    listen_at(path, SocketAddress::Vmms, options)
}

/// As [`listen`], for a server that is to take over.
pub(super) fn listen_for_successors(path: &Path) -> Result<(OwnedFd, u64)> {
    let _locked = lock_folder(path);
    listen_at(path, SocketAddress::Successors, &RestoreOptions::default())
}

fn listen_at(server: &Path, which: SocketAddress, options: &RestoreOptions) -> Result<(OwnedFd, u64)> {
    let path = &*which.path(server);
    let failed = |error: &dyn fmt::Display| failed(path, "", error);
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(failed(&"something else is there; name another place, or remove it"));
        }
        match listens(server, which) {
            Ok(true) => {
                let text = "another server listens there; name another path, end that server, or take over its \
                            VMs (--replace)";
                return Err(failed(&text));
            }
            Ok(false) => fs::remove_file(path).map_err(|e| failed(&e))?,
            Err(error) => return Err(failed(&error)),
        }
    }
    let bound = || {
        let socket = which.socket()?;
        with_address(path, |address| rustix::net::bind(&socket, address))?;
        Ok::<_, io::Error>(socket)
    };
    let socket = bound().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => failed(&format_args!(
            "{error}: its folder is missing; make that folder, or name a path in another"
        )),
        _ => failed(&error),
    })?;
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

    /// A leftover socket, and several servers that start at once: one of them has the path then, and listens.
    #[test]
    fn of_servers_that_start_at_one_leftover_socket_one_gets_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        for round in 0..200 {
            let _ = fs::remove_file(&path);
            drop(std::os::unix::net::UnixListener::bind(&path).expect("it is new"));
            let begin = std::sync::Barrier::new(4);
            let start = || {
                begin.wait();
                listen(&path, &RestoreOptions::default())
            };
            let started: Vec<_> = std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(start));
                threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
            });
            let listening: Vec<_> = started.iter().flatten().collect();
            assert_eq!(listening.len(), 1, "round {round}: {started:?}");
            assert_eq!(fs::symlink_metadata(&path).expect("it is there").ino(), listening[0].1);
            assert!(listens(&path, SocketAddress::Vmms).expect("it is a socket"), "round {round}");
        }
    }

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

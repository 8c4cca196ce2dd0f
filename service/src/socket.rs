//! Socket: where a server listens and clients find it.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/quinion/NAME.sock     or /tmp/quinion-UID/NAME.sock, where there is no such folder
//!   $XDG_RUNTIME_DIR/quinion/NAME.lock     held by the server that listens, which may remove a socket left behind
//! ```
//!
//! The folder is the user's alone (mode 0700), as the server makes sure. The server is told by the kernel
//! who connects, and the client whose process listens; so a wrong folder costs service and shows nothing.
//!
//! Invariant: a socket is removed by the process alone that took its lock, and by no fork of it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use quinion::internals::serve::listen;
use quinion::internals::sys::fork::ForkGuard;
use rustix::fs::{FlockOperation, flock};

/// Longer names make paths that no socket can have.
const NAME_BYTES_MAX: usize = 48;

/// The socket that `name` means: a path, if it has a slash, else one in the user's folder.
///
/// # Errors
/// It is no name.
pub(crate) fn path_of(name: &str) -> io::Result<PathBuf> {
    if name.contains('/') {
        return Ok(name.into());
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.starts_with('.') || !name.bytes().all(is_plain)
    {
        let text = "a server's name has 1 to 48 letters, digits, '-', '_' and '.', and begins with no '.'";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(folder().join(format!("{name}.sock")))
}

fn folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute()) {
        Some(folder) => folder.join("quinion"),
        None => format!("/tmp/quinion-{}", rustix::process::geteuid().as_raw()).into(),
    }
}

/// A socket that is listened at, until this is dropped.
#[derive(Debug)]
pub(crate) struct Listening {
    path: PathBuf,
    /// Held as long as the socket is there.
    _lock: File,
    process: ForkGuard,
}

impl Listening {
    /// Listens at `path`. What another server that has ended left there is removed.
    ///
    /// # Errors
    /// Another server listens there; the folder is not ours alone; the system refuses.
    pub(crate) fn at(path: &Path) -> io::Result<(Self, OwnedFd)> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        make_private(parent)?;
        let lock = path.with_extension("lock");
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(lock)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            io::Error::new(io::ErrorKind::AddrInUse, "another server has that name; give this one another")
        })?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = listen(path)?;
        Ok((Self { path: path.into(), _lock: lock, process: ForkGuard::new() }, socket))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return; // the server that listens there is the parent
        }
        let _ = std::fs::remove_file(&self.path); // gone already: as well
    }
}

/// Makes the folder, if there is none, and looks whether it is of this user alone.
fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let data = std::fs::symlink_metadata(folder)?;
    let is_ours =
        data.is_dir() && data.uid() == rustix::process::geteuid().as_raw() && data.mode() & 0o077 == 0;
    if is_ours {
        return Ok(());
    }
    let text = format!(
        "{} must be a folder of this user with mode 0700; make it so, or name another",
        folder.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_name_that_leads_elsewhere_is_none() {
        for name in ["", ".", "..", ".x", "a b", "a\n", &"x".repeat(49)] {
            assert!(path_of(name).is_err(), "{name:?}");
        }
        assert_eq!(path_of("/a/b").unwrap(), Path::new("/a/b"));
        assert!(path_of("tables-1.x_y").unwrap().ends_with("tables-1.x_y.sock"));
    }

    #[test]
    fn one_server_has_a_name_at_a_time_and_what_a_dead_one_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q/s.sock");
        let (listening, socket) = Listening::at(&path).unwrap();
        assert_eq!(Listening::at(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists(), "a server that was refused has removed the socket of the other");
        // As if it were killed: the lock goes, the socket stays.
        let lock = path.with_extension("lock");
        std::mem::forget(listening);
        std::fs::remove_file(&lock).unwrap();
        drop(socket);
        let (listening, _socket) = Listening::at(&path).unwrap();
        assert_eq!(listening.path(), path);
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = Listening::at(&folder.path().join("s.sock")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    }
}

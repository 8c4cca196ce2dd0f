//! Locks: the files of kept caches in the user's folder, and the lock that says whether one lives.
//!
//! ```text
//!   the user's folder/        where that is: see `user_folder`      0700
//!     NAME.lock      locked by the owner for as long as it lives, and by the run that starts it before that
//!     NAME.socket    where it listens
//!     view-RANDOM.socket       where an owner waits for programs: see `socket`
//!     libquinion-HASH.so       what programs load: see `object`
//!     plan-KEY, objects-KEY    what runs found out about files of programs: see `plan_cache`
//! ```
//!
//! The lock is the kernel's (`flock`): it ends with its holder, however that ends. So a file that is not locked was
//! left by a killed process, and the next process takes it; no other file in the folder proves that a cache lives. The
//! run that starts an owner hands it the locked description, so no two runs can start one, and the lock is never free
//! while one is being started.
//!
//! The holder of the lock may remove its file, as the last thing it does. So a process that gets a lock checks whether
//! the file is still the one of that name, and begins again if not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::Name;
use crate::user_folder::Folder;

const LOCK: &str = ".lock";
const SOCKET: &str = ".socket";

impl Folder {
    /// The address of the owner of cache `name`. By way of the descriptor, because the address of a socket is short.
    pub fn socket(&self, name: &Name) -> PathBuf {
        self.within(&format!("{name}{SOCKET}"))
    }

    /// The lock of `name`, if it is free. Does not wait.
    pub fn try_lock(&self, name: &Name) -> io::Result<Option<Lock>> {
        let file = format!("{name}{LOCK}");
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let descriptor = rustix::fs::openat(self, &file, flags, Mode::RUSR | Mode::WUSR)?;
            match rustix::fs::flock(&descriptor, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
                Ok(()) if self.is_named(&descriptor, &file)? => return Ok(Some(Lock(descriptor))),
                Ok(()) => {} // its holder has removed it meanwhile
            }
        }
    }

    /// Whether there is a lock of `name`, held or left.
    pub fn has(&self, name: &Name) -> io::Result<bool> {
        match rustix::fs::statat(self, format!("{name}{LOCK}"), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn is_named(&self, descriptor: impl AsFd, file: &str) -> io::Result<bool> {
        let ours = rustix::fs::fstat(descriptor)?;
        match rustix::fs::statat(self, file, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether `lock` is the lock of `name`: for a process that inherited one.
    pub fn is_lock_of(&self, lock: &Lock, name: &Name) -> io::Result<bool> {
        self.is_named(&lock.0, &format!("{name}{LOCK}"))
    }

    /// Removes the socket of `name`, if there is one. Only the holder of the lock may.
    pub fn remove_socket(&self, _lock: &Lock, name: &Name) -> io::Result<()> {
        self.remove(&format!("{name}{SOCKET}"))
    }

    /// Removes all files of `name`, the lock last, and releases it.
    pub fn remove_all(&self, lock: Lock, name: &Name) -> io::Result<()> {
        self.remove_socket(&lock, name)?;
        self.remove(&format!("{name}{LOCK}"))?;
        drop(lock);
        Ok(())
    }

    fn remove(&self, file: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(self, file, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The names of caches with a file here, in order.
    pub fn names(&self) -> io::Result<Vec<Name>> {
        let mut names: Vec<Name> = std::fs::read_dir(self.within(""))?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(LOCK)?.parse().ok())
            .collect();
        names.sort();
        Ok(names)
    }
}

/// While it is held, no other process starts, is, or cleans up after the owner of that name.
#[derive(Debug)]
pub struct Lock(OwnedFd);

impl Lock {
    /// The lock that another process handed over.
    pub fn handed(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
    /// For handing it over: it stays locked until every holder of the description has closed it.
    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn folder() -> (tempfile::TempDir, Folder) {
        let outer = tempfile::tempdir().unwrap();
        std::fs::set_permissions(outer.path(), Permissions::from_mode(0o700)).unwrap();
        let folder = Folder::open(outer.path()).unwrap();
        (outer, folder)
    }

    #[test]
    fn one_has_the_lock_and_the_next_takes_it_however_the_first_ended() {
        let (outer, folder) = folder();
        let name: Name = "one".parse().unwrap();
        let first = folder.try_lock(&name).unwrap().unwrap();
        assert!(folder.try_lock(&name).unwrap().is_none(), "another description is another's");
        assert!(folder.try_lock(&"two".parse().unwrap()).unwrap().is_some());
        drop(first); // killed: the file stays
        assert!(outer.path().join("one.lock").exists());
        let second = folder.try_lock(&name).unwrap().unwrap();
        std::fs::write(outer.path().join("one.socket"), "left").unwrap();
        folder.remove_all(second, &name).unwrap();
        assert!(!outer.path().join("one.lock").exists() && !outer.path().join("one.socket").exists());
    }

    /// 1. One opens the file of the lock.
    /// 2. The holder of the lock removes the file and ends.
    /// 3. The first gets a lock that no other process would look at: it must begin again.
    #[test]
    fn a_lock_on_a_file_that_was_removed_is_none() {
        let (outer, folder) = folder();
        let name: Name = "one".parse().unwrap();
        let lock = folder.try_lock(&name).unwrap().unwrap();
        assert!(folder.is_lock_of(&lock, &name).unwrap());
        std::fs::remove_file(outer.path().join("one.lock")).unwrap();
        assert!(!folder.is_lock_of(&lock, &name).unwrap());
        std::fs::write(outer.path().join("one.lock"), "").unwrap();
        assert!(!folder.is_lock_of(&lock, &name).unwrap(), "another file of that name");
        assert!(folder.try_lock(&name).unwrap().is_some());
    }
}

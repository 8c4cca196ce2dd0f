//! Folder: the user's folder, open; kept caches are found in it, and the lock that says whether one is there.
//!
//! ```text
//!   the user's folder/        where that is: see `user_folder`      0700
//!     NAME.lock      locked by the owner for as long as it lives, and by the run that starts it before that
//!     NAME.socket    where it listens
//!     view-RANDOM.socket       where an owner waits for programs: see `socket`
//!     libquinion-HASH.so       what programs load: see `object`
//!     plan-KEY, objects-KEY    what runs found out about files of programs: see `remembered`
//! ```
//!
//! The lock is the kernel's (`flock`): it ends with its holder, however that ends. So a file that is not locked was
//! left by somebody who was killed, and the next process that comes takes it; nothing else that lies here is believed
//! of caches. The run that starts an owner hands the locked description over to it, so there is no moment in which two
//! could start one, and none in which it is free while one is being started.
//!
//! The holder of the lock may remove its file, as the last thing it does. So a process that gets a lock looks whether
//! the file is still the one of that name, and begins again if not.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::Name;
use crate::run::user_folder;

const LOCK: &str = ".lock";
const SOCKET: &str = ".socket";

/// The folder, open.
#[derive(Debug)]
pub struct Folder {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// The user's folder, made if it is not there.
    ///
    /// # Errors
    /// There is no place for it.
    pub fn of_user() -> io::Result<Self> {
        user_folder::find(true)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The user's folder, if it is there: for a command that only looks.
    ///
    /// # Errors
    /// There is no place for it.
    pub fn of_user_if_any() -> io::Result<Option<Self>> {
        user_folder::find(false)
    }

    /// The folder at `path`, if it is one that nobody else can enter, or change, or put another in its place.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = user_folder::resolve(path)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let descriptor = rustix::fs::open(&path, flags, Mode::empty())?;
        if !is_ours_alone(&rustix::fs::fstat(&descriptor)?) {
            return Err(io::Error::other("it belongs to another user, or others may enter it"));
        }
        Ok(Self { descriptor, path })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of what lies here under `name`, while this is open.
    pub fn within(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.descriptor.as_raw_fd()))
    }

    /// Where the owner of cache `name` listens. By way of the descriptor, because the address of a socket is short.
    pub fn socket(&self, name: &Name) -> PathBuf {
        self.within(&format!("{name}{SOCKET}"))
    }

    /// The lock of `name`, if nobody has it. Does not wait.
    pub fn try_lock(&self, name: &Name) -> io::Result<Option<Lock>> {
        let file = format!("{name}{LOCK}");
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let descriptor = rustix::fs::openat(&self.descriptor, &file, flags, Mode::RUSR | Mode::WUSR)?;
            match rustix::fs::flock(&descriptor, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
                Ok(()) if self.is_named(&descriptor, &file)? => return Ok(Some(Lock(descriptor))),
                Ok(()) => {} // whoever had it has removed it meanwhile
            }
        }
    }

    /// Whether there is a lock of `name`, held or left.
    pub fn has(&self, name: &Name) -> io::Result<bool> {
        match rustix::fs::statat(&self.descriptor, format!("{name}{LOCK}"), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the file behind `descriptor` is the one of that name.
    fn is_named(&self, descriptor: impl AsFd, file: &str) -> io::Result<bool> {
        let ours = rustix::fs::fstat(descriptor)?;
        match rustix::fs::statat(&self.descriptor, file, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether `lock` is the lock of `name`: for a process that was handed one.
    pub fn is_lock_of(&self, lock: &Lock, name: &Name) -> io::Result<bool> {
        self.is_named(&lock.0, &format!("{name}{LOCK}"))
    }

    /// Removes the socket of `name`, if there is one. Only who has the lock may.
    pub fn remove_socket(&self, _lock: &Lock, name: &Name) -> io::Result<()> {
        self.remove(&format!("{name}{SOCKET}"))
    }

    /// Removes all that there is of `name`, the lock last, and gives it back.
    pub fn remove_all(&self, lock: Lock, name: &Name) -> io::Result<()> {
        self.remove_socket(&lock, name)?;
        self.remove(&format!("{name}{LOCK}"))?;
        drop(lock);
        Ok(())
    }

    fn remove(&self, file: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.descriptor, file, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes files that nobody has written for a month, of those whose names are `ours`: of commands that are no
    /// more, and of an owner that was killed.
    pub fn remove_old(&self, ours: impl Fn(&str) -> bool) {
        const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
        let Ok(entries) = std::fs::read_dir(self.within("")) else { return };
        for entry in entries.flatten() {
            let written = entry.metadata().and_then(|data| data.modified());
            let is_old = written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > MONTH));
            if is_old && ours(&entry.file_name().to_string_lossy()) {
                // Somebody else may have done it.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// The names of which there is something here, in order.
    pub fn names(&self) -> io::Result<Vec<Name>> {
        let mut names: Vec<Name> = std::fs::read_dir(self.within(""))?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(LOCK)?.parse().ok())
            .collect();
        names.sort();
        Ok(names)
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Held: nobody else starts, is, or cleans up after the owner of that name.
#[derive(Debug)]
pub struct Lock(OwnedFd);

impl Lock {
    /// The lock that somebody handed over.
    pub fn handed(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
    /// For handing it over: it stays locked until all who have the description have closed it.
    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }
}

fn is_ours_alone(stat: &Stat) -> bool {
    stat.st_uid == rustix::process::geteuid().as_raw()
        && Permissions::from_mode(stat.st_mode).mode() & 0o077 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

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
    /// 3. The first gets a lock that nobody else would look at: it must begin again.
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

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let (outer, _) = folder();
        for mode in [0o750, 0o701, 0o777] {
            std::fs::set_permissions(outer.path(), Permissions::from_mode(mode)).unwrap();
            let error = Folder::open(outer.path()).unwrap_err().to_string();
            assert!(error.contains("others may enter it"), "{error}");
        }
        let link = outer.path().join("link");
        std::fs::set_permissions(outer.path(), Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(outer.path(), &link).unwrap();
        assert!(Folder::open(&link).is_err(), "nor by way of a link");
    }
}

//! Lock: advisory locks of a file, as [`std::fs::File::lock`] has them.
//!
//! They are the system's (`flock`). A lock belongs to an open file description; the cache reads all handles of a file
//! by one, so each handle that locks opens the file once more. Clones of a handle share its lock.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;

use crate::error::{Repr, Result};

use super::File;

impl File {
    /// Locks the file for this handle and its clones alone. Waits until all other locks of it are gone.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io): the file cannot be opened once more, or its file system has no locks;
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the backend is not a file of the system;
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn lock(&self) -> Result<()> {
        self.lock_by(FlockOperation::LockExclusive).map(drop)
    }
    /// As [`File::lock`], but shared with other shared locks.
    ///
    /// # Errors
    /// As [`File::lock`].
    pub fn lock_shared(&self) -> Result<()> {
        self.lock_by(FlockOperation::LockShared).map(drop)
    }
    /// As [`File::lock`], without waiting: whether it is locked now.
    ///
    /// # Errors
    /// As [`File::lock`].
    pub fn try_lock(&self) -> Result<bool> {
        self.lock_by(FlockOperation::NonBlockingLockExclusive)
    }
    /// As [`File::lock_shared`], without waiting: whether it is locked now.
    ///
    /// # Errors
    /// As [`File::lock`].
    pub fn try_lock_shared(&self) -> Result<bool> {
        self.lock_by(FlockOperation::NonBlockingLockShared)
    }
    /// Gives the handle's lock back, if it has one. The end of the last clone does so, too.
    ///
    /// # Errors
    /// As [`File::lock`].
    pub fn unlock(&self) -> Result<()> {
        self.lock_by(FlockOperation::Unlock).map(drop)
    }

    fn lock_by(&self, operation: FlockOperation) -> Result<bool> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        let descriptor = match self.handle.lock.get() {
            Some(descriptor) => descriptor,
            None => {
                let opened = self.open_for_lock()?; // of two threads that do so at once one keeps it
                self.handle.lock.get_or_init(|| opened)
            }
        };
        loop {
            match flock(descriptor, operation) {
                Ok(()) => return Ok(true),
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Repr::Lock(error.into()).into()),
            }
        }
    }

    /// Opens a descriptor of this handle's own. It writes if the handle does: network file systems want that for an
    /// exclusive lock.
    fn open_for_lock(&self) -> Result<OwnedFd> {
        let backend = self.handle.mapping.backend();
        let Some(descriptor) = backend.descriptor() else {
            return Err(Repr::CannotLock { backend: backend.name() }.into());
        };
        let access = if self.is_writable() { OFlags::RDWR } else { OFlags::RDONLY };
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let flags = access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        open(path, flags, Mode::empty()).map_err(|error| Repr::Lock(error.into()).into())
    }
}

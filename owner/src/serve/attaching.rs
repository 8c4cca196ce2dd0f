//! Attaching: a viewer's descriptor becomes a handle of the owner's.
//!
//! ```text
//!   descriptor --duplicated, or sent--> of a file system that is served? may be read? is that file?
//!        '--refused: closed where no viewer waits for it                            |
//!                          counted as attached, for all that are about to write it --> Owner::attach --> handle
//! ```
//!
//! Nothing of the viewer's process is read before a descriptor is taken. A file counts as attached before the owner
//! attaches it, so that a process that opens it for writing meanwhile says so. A descriptor whose `close` may hang is
//! closed in the queue of its file system. Handles go back in `handles.rs`.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::Shared;
use super::mounts::{self, Mount};
use super::owner::{AttachReason, file_id};
use super::viewer_slot::{Handle, ViewerJob};
use super::workers::WorkKey;
use crate::sys::serial_queues::QueueKey;
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::{CREDIT_SPENT, SENT, TO_BE_SENT};
use quinion::internals::units::FileId;

impl Shared {
    pub(super) fn attach(&self, job: &ViewerJob, descriptor: u64, id: FileId) -> Result<[u64; 2], Errno> {
        let reason = match descriptor & CREDIT_SPENT {
            0 => AttachReason::Read,
            _ => AttachReason::CreditSpent,
        };
        let was_sent = descriptor & SENT != 0;
        let descriptor = i32::try_from(descriptor & !(CREDIT_SPENT | SENT)).map_err(|_| Errno::BADF)?;
        let probe = self.workers.probe(job.process.name).ok_or(Errno::AGAIN)?;
        // Its credentials may have changed.
        if !self.domain.has(&job.process.member) {
            return Err(Errno::ACCES);
        }
        let (file, mount) = if was_sent {
            self.take_sent(job, descriptor, id)?
        } else {
            self.take_from(job, descriptor, id)?
        };
        drop(probe);
        // A file system that may hang in `close` is closed where no viewer waits; else here, counted as work for it.
        let close = |file: OwnedFd| match mount.answers() {
            true => drop(file),
            false => self.queues.close(QueueKey::Device(mount.device), file),
        };
        let Some(_at_work) = self.workers.enter(WorkKey::Files(mount.device)) else {
            self.queues.close(QueueKey::Device(mount.device), file);
            return Err(Errno::AGAIN);
        };
        if let Err(error) = check_file(&file, id) {
            close(file);
            return Err(error);
        }
        if let Some(credit) = self.owner.leaves_to_kernel(file.as_fd(), id, reason) {
            close(file);
            return Ok([0, credit]);
        }
        self.viewers.wait_for_death_notice();
        // First, so that processes that open it for writing from here on notify the owner (`SaturatingCount`).
        let counted = self.handles.enter(id);
        let attached = self.owner.attach(file, id)?;
        self.publish_lease_deadline();
        let handle = Handle { place: counted.into_place(), device: mount.device };
        self.handles.note(job.viewer, attached, handle)
    }

    /// Takes a descriptor out of the viewer's process, if its file system is served. `/proc/PID/fdinfo/N` is not read
    /// before: it takes locks of the file behind the number, and a process can hold those of an epoll descriptor for
    /// ever. The taken descriptor has a number of this process, so no other process can exchange it.
    fn take_from(&self, job: &ViewerJob, descriptor: i32, id: FileId) -> Result<(OwnedFd, Mount), Errno> {
        let file = pidfd_getfd(&job.process.alive, descriptor, PidfdGetfdFlags::empty());
        let file = file.map_err(|error| match error {
            // Not to this process: the viewer may be none of its children.
            rustix::io::Errno::PERM | rustix::io::Errno::NOSYS if self.listener.is_open() => {
                Errno(TO_BE_SENT)
            }
            error => Errno(error.raw_os_error()),
        })?;
        self.check_mount(job, file, id)
    }

    fn take_sent(&self, job: &ViewerJob, ticket: i32, id: FileId) -> Result<(OwnedFd, Mount), Errno> {
        let offer =
            self.viewers.slot(job.viewer).lock().offers.remove(&(ticket as u32)).ok_or(Errno::BADF)?;
        // The message stays in the connection, which is closed where no viewer waits for it.
        self.check_mount(job, offer.connection.descriptor()?, id)
    }

    /// Refuses a descriptor of a file system that is not served, and closes it where no viewer waits.
    pub(super) fn check_mount(
        &self,
        job: &ViewerJob,
        file: OwnedFd,
        id: FileId,
    ) -> Result<(OwnedFd, Mount), Errno> {
        let known = mounts::path_of_own(file.as_fd())
            .and_then(|path| Ok((path, mounts::of_own(file.as_fd(), job.process.number)?)));
        let Ok((path, mount)) = known else {
            self.queues.close(QueueKey::Sender(job.process.name), file);
            return Err(Errno::OPNOTSUPP);
        };
        match self.check_file_system(mount) {
            Ok(()) => Ok((file, mount)),
            Err(error) => {
                self.owner.unserved_file_system(&path, id);
                // As a file of it that was served: a process that is about to unmount it waits for that.
                self.queues.close(QueueKey::Device(mount.device), file);
                Err(error)
            }
        }
    }

    fn check_file_system(&self, mount: Mount) -> Result<(), Errno> {
        let any = self.owner.attach_policy().any_file_system;
        if mount.system.may_be_served(any) { Ok(()) } else { Err(Errno::OPNOTSUPP) }
    }
}

fn check_file(file: &OwnedFd, id: FileId) -> Result<(), Errno> {
    check_readable(file)?;
    if file_id(file) != Some(id) {
        return Err(Errno(libc::ESTALE)); // the number is another file's by now
    }
    Ok(())
}

pub(super) fn check_readable(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file).map_err(|error| Errno(error.raw_os_error()))?;
    // Access mode 3 is for ioctl alone: it includes O_WRONLY.
    if flags.intersects(OFlags::PATH | OFlags::WRONLY) { Err(Errno::BADF) } else { Ok(()) }
}

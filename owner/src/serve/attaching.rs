//! Attaching: a viewer's descriptor becomes a handle of the owner's, and a handle goes back.
//!
//! ```text
//!   descriptor --duplicated, or sent--> of a file system that is served? may be read? is that file?
//!        '--refused: closed where no viewer waits for it                            |
//!                          counted as attached, for all that are about to write it --> Owner::attach --> handle
//! ```
//!
//! Nothing of the viewer's process is read before a descriptor is taken. A file counts as attached before the owner
//! attaches it, so that a process that opens it for writing meanwhile says so. What may hang in `close` is closed in
//! the queue of its file system.
//!
//! Invariant: each handle is in the list of one seat, or was taken out of it once, by the thread that detaches it.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::Shared;
use super::mounts::{self, Mount};
use super::owner::{AttachReason, Attached, Owner, file_id};
use super::viewer_slot::{Handle, ViewerJob};
use super::workers::WorkKey;
use crate::sys::serial_queues::QueueKey;
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::{CREDIT_SPENT, SENT, TO_BE_SENT};
use quinion::internals::units::FileId;

const HANDLES_MAX: usize = 4096;
const END_MAX: Duration = Duration::from_secs(1);

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
        self.wait_for_death_notice();
        // First, so that processes that open it for writing from here on notify the owner (`SaturatingCount`).
        let place = self.enter(id);
        let attached = match self.owner.attach(file, id) {
            Ok(attached) => attached,
            Err(error) => {
                self.leave(place);
                return Err(error);
            }
        };
        self.publish_lease_deadline();
        self.note_handle(job.viewer, attached, Handle { place, device: mount.device })
    }

    /// Viewers may not rely on the owner before the kernel will report its death (`DeathNotice`).
    pub(super) fn wait_for_death_notice(&self) {
        // Acquire, partner: the store in `DeathNotice::new`.
        while self.owner.arena().owner_lives().load(Ordering::Acquire) == 0 && !self.is_closed() {
            std::thread::yield_now(); // the keeper, which was started, is about to say so
        }
    }

    pub(super) fn note_handle(
        &self,
        viewer: usize,
        attached: Attached,
        handle: Handle,
    ) -> Result<[u64; 2], Errno> {
        let mut seat = self.seat(viewer).lock();
        if seat.handles.len() >= HANDLES_MAX {
            drop(seat);
            self.let_go(attached.handle, handle.place);
            return Err(Errno(libc::EMFILE));
        }
        let before = seat.handles.insert(attached.handle, handle);
        debug_assert!(before.is_none(), "a handle that was given already");
        Ok([attached.handle, u64::from(attached.id.0) << 32 | u64::from(attached.cell.0)])
    }

    /// Takes a descriptor out of the viewer's process, if its file system is served. `/proc/PID/fdinfo/N` is not read
    /// before: it takes locks of what the number is of, and a process can hold those of an epoll descriptor for ever.
    /// The taken descriptor has a number of this process, so no other process can exchange it.
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
        let offer = self.seat(job.viewer).lock().offers.remove(&(ticket as u32)).ok_or(Errno::BADF)?;
        // The message stays in the connection, which is closed where no viewer waits for it.
        self.check_mount(job, offer.connection.descriptor()?, id)
    }

    /// Refuses what is of a file system that is not served, and closes it where no viewer waits.
    fn check_mount(&self, job: &ViewerJob, file: OwnedFd, id: FileId) -> Result<(OwnedFd, Mount), Errno> {
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

    pub(super) fn detach(&self, viewer: usize, handle: u64) {
        let known = self.seat(viewer).lock().remove_handle(handle);
        if let Some(known) = known {
            self.let_go(handle, known.place);
        }
    }

    /// As [`Self::detach`], where no viewer waits for the file system.
    pub(super) fn detach_in_queue(&self, viewer: usize, handle: u64) {
        let known = self.seat(viewer).lock().remove_handle(handle);
        self.let_go_in_queues(known.map(|known| (handle, known)));
    }

    /// Counts a file as attached, so that processes about to write it notify the owner. Returns its place.
    pub(super) fn enter(&self, id: FileId) -> usize {
        self.control().enter(id)
    }

    pub(super) fn leave(&self, place: usize) {
        self.control().leave(place);
    }

    pub(super) fn let_go(&self, handle: u64, place: usize) {
        let_go(&*self.owner, handle, place);
    }

    /// Takes them back, each in the queue of its file system: what the owner closes may hang.
    pub(super) fn let_go_in_queues(&self, handles: impl IntoIterator<Item = (u64, Handle)>) {
        let mut by_device: HashMap<u64, Vec<(u64, usize)>> = HashMap::new();
        for (handle, known) in handles {
            by_device.entry(known.device).or_default().push((handle, known.place));
        }
        for (device, handles) in by_device {
            let owner = Arc::clone(&self.owner);
            self.queues.spawn(QueueKey::Device(device), move || {
                handles.into_iter().for_each(|(handle, place)| let_go(&*owner, handle, place));
            });
        }
    }

    pub(super) fn detach_all(&self) {
        for seat in self.seats.iter() {
            let mut seat = seat.lock(); // its sums stay
            let pinned = seat.take_pinned_handles();
            let handles = std::mem::take(&mut seat.handles);
            drop(seat);
            pinned.into_iter().for_each(|handle| self.owner.leave_pins(handle));
            self.let_go_in_queues(handles);
        }
        self.queues.wait_for_own(END_MAX);
    }
}

fn let_go(owner: &dyn Owner, handle: u64, place: usize) {
    let _ = catch_unwind(AssertUnwindSafe(|| owner.detach(handle)));
    owner.arena().control().control().leave(place);
}

fn check_file(file: &OwnedFd, id: FileId) -> Result<(), Errno> {
    check_readable(file)?;
    if file_id(file) != Some(id) {
        return Err(Errno(libc::ESTALE)); // the number is another file's by now
    }
    Ok(())
}

fn check_readable(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file).map_err(|error| Errno(error.raw_os_error()))?;
    // Access mode 3 is for ioctl alone: it includes O_WRONLY.
    if flags.intersects(OFlags::PATH | OFlags::WRONLY) { Err(Errno::BADF) } else { Ok(()) }
}

//! Owner: the calls of the service to a cache with viewers, and the calls of that cache to the service.
//!
//! ```text
//!   viewer --asks--> service --checks the number, the handle, the process--> Owner: attach, fill, advance, ..
//!                       ^                                                      |
//!                       '--ServiceHandle: is it over? who looks? <-------------'
//! ```
//!
//! The service knows viewers and no files; an owner knows files and no viewers. The service checks the arguments of
//! these calls, and hands on an owner's answers as they are.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, fstat};

use super::totals::ViewerTotals;
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::{Advice, AttachPolicy, SyscallAudit};
use quinion::internals::arena::{ArenaError, ArenaShare, CellNumber, Validation};
use quinion::internals::folio::KeptMemory;
use quinion::internals::sys::peer::ProcessName;
use quinion::internals::units::{FileId, Frame, MappingId, PageIndex};

/// In place of a device, for files that are opened by a name: no device of the system has one so large.
pub const NAMED_DEVICE: u64 = 1 << 63;

/// A file that was attached for a viewer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attached {
    /// The owner's number for this attachment: not 0, and unlike all that are not detached yet.
    pub handle: u64,
    /// Where the file's record is.
    pub cell: CellNumber,
    /// The mapping's number.
    pub id: MappingId,
}

/// The numbers of the regular file behind a descriptor; `None` if it is none.
pub fn file_id(file: impl AsFd) -> Option<FileId> {
    let stat = fstat(file).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode).is_file())?;
    Some(FileId { device: stat.st_dev, inode: stat.st_ino })
}

/// Why a viewer asks whether a file is to be attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttachReason {
    /// The viewer reads the file.
    Read,
    /// The kernel has read as much of it for the viewer as the owner's last answer said.
    CreditSpent,
}

/// The change that a viewer is about to open a file for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriterAccess {
    /// To write to it, which breaks a lease.
    Write,
    /// To truncate it in a way that breaks no lease; or the viewer has truncated it.
    Truncate,
}

/// Whether pages stay cached when a viewer has read them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Caching {
    /// The pages stay cached.
    Cached,
    /// The viewer says by [`Advice::Passed`] when it has read them; then they are dropped.
    Uncached,
}

/// How changes of a file by other processes are noticed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileMode {
    /// Where the file was when it was attached.
    pub path: PathBuf,
    /// The validation in force.
    pub validation: Validation,
    /// Why no stronger one; empty if there is none.
    pub why: String,
}

/// A file or object that was opened by its name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedAttachment {
    /// As a file that was attached.
    pub attached: Attached,
    /// The identity of the file or object; the device is the one that [`Owner::device_of_name`] gave.
    pub id: FileId,
    /// For the viewer: [`NAME_TEXT_MAX`](crate::viewer::handshake::NAME_TEXT_MAX) bytes at most.
    pub text: String,
}

/// A revision of a file that a viewer asks for: the file as it is now.
#[derive(Debug)]
pub struct RevisionRequest<'r> {
    /// Distinguishes contents that have the same size and times, as the viewer says.
    pub name: &'r [u8],
    /// A duplicate of the viewer's descriptor, which is open for reading: proof that it may read the file.
    pub file: OwnedFd,
}

/// Why nothing is opened by a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NameRefusal {
    /// The error number that the program gets.
    pub error: Errno,
    /// The reason, as a text for people.
    pub text: String,
}

/// A process that is about to watch files.
#[derive(Clone, Debug)]
pub struct WatchingProcess {
    /// Tells it from others, whichever programs it becomes.
    pub name: ProcessName,
    /// Tells when it has ended.
    pub alive: Arc<OwnedFd>,
}

/// A cache, as its viewers use it. Called by several threads at a time; every call may wait. A handle that arrives
/// was given by `attach` and not detached yet, except that `detach` may come while another call with it is under way.
pub trait Owner: Send + Sync + fmt::Debug {
    /// The memory viewers look at.
    fn arena(&self) -> ArenaShare<'_>;
    /// Attaches the file `id` for a viewer. `file` is a duplicate of that viewer's descriptor: proof that it may read
    /// the file, not to be read by, moved or kept. Size and times are looked at now, and when this returns the file's
    /// record says how far viewers may trust its cached pages ([`Validation`]). `ETXTBSY`: they may not, another
    /// process has it open for writing. `EOPNOTSUPP`: they may not, for another reason.
    fn attach(&self, file: OwnedFd, id: FileId) -> Result<Attached, Errno>;
    /// Sets memory aside in the arena for the pages of so many groups of viewers ([`ArenaShare::reserve_viewers`]);
    /// waits for a bounded time.
    ///
    /// # Errors
    /// The bound has no room for them.
    fn reserve_viewers(&self, groups: usize) -> Result<(), ArenaError> {
        self.arena().reserve_viewers(groups)
    }
    /// When viewers ask for files: at the first read of each by default.
    fn attach_policy(&self) -> AttachPolicy {
        AttachPolicy::default()
    }
    /// Whether the file that a viewer is about to attach is better left to the kernel for now; then how many bytes of
    /// it are to be read, as [`AttachPolicy::credit_of`] counts, before the viewer asks again.
    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, id: FileId, reason: AttachReason) -> Option<u64> {
        let _ = (file, id, reason);
        None
    }
    /// Called by the thread that has just answered an [`Owner::attach`], for work that is better done when no viewer
    /// waits. It ends soon after `service` says that it must not go on.
    fn prepare(&self, service: &dyn ServiceHandle) {
        let _ = service;
    }
    /// How long from now on viewers may trust [`Validation::Leased`] if nothing else comes from this owner, as when
    /// it is stopped. Asked ten times a second, and when a file was admitted.
    fn leases_valid_for(&self) -> Duration {
        Duration::ZERO
    }
    /// A viewer asked for a file of a file system that [`AttachPolicy::any_file_system`] leaves out. `id` is the
    /// viewer's claim.
    fn unserved_file_system(&self, path: &Path, id: FileId) {
        let _ = (path, id);
    }
    /// A viewer is about to open that file for writing. With [`WriterAccess::Truncate`], no viewer is shown old pages
    /// of the file once this has returned.
    fn writer_opened(&self, id: FileId, access: WriterAccess) {
        let _ = (id, access);
    }
    /// A viewer wants to be alone with that file: when this returns the owner has closed it, and no viewer has it.
    fn revoke(&self, id: FileId) {
        let _ = id;
    }
    /// A viewer is about to watch that file, or any if both are 0: as `revoke`, and it is not attached any more until
    /// its process has ended.
    fn watched(&self, id: FileId, watcher: &WatchingProcess) {
        let _ = watcher;
        self.revoke(id);
    }
    /// A viewer is about to unmount something: when this returns the owner has closed all files that no viewer has.
    fn release_idle(&self) {}
    /// A viewer is about to remove that file: when this returns the owner has closed it, unless a viewer has it open.
    fn close_idle(&self, id: FileId) {
        let _ = id;
    }
    /// No viewer is to wait for this process, which is about to be stopped.
    fn about_to_stop(&self) {}
    /// Called about twice a second with all that viewers have done, in a thread that nothing else waits for.
    fn window_ended(&self, totals: &ViewerTotals) {
        let _ = totals;
    }
    /// How changes of viewers' files are noticed, by file.
    fn modes(&self) -> Vec<FileMode> {
        Vec::new()
    }
    /// Makes up to `len` bytes at `position` ready, at least the first page of them.
    fn fill(&self, handle: u64, position: u64, len: u64, caching: Caching) -> Result<(), Errno>;
    /// A reader met the readahead marker on the folio that begins with `page`.
    fn advance(&self, handle: u64, page: PageIndex, caching: Caching);
    /// How the program will read; some advices mean `len` bytes at `position`. May be ignored.
    fn advise(&self, handle: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        let _ = (handle, advice, position, len);
        Ok(())
    }
    /// Checks the file's size and times, publishes the size in its record and returns it, in bytes.
    fn revalidate(&self, handle: u64) -> Result<u64, Errno>;
    /// The handle is not used any more.
    fn detach(&self, handle: u64);
    /// The number that bounds work on objects of that name, in place of a device's: one for each store, with
    /// [`NAMED_DEVICE`] added.
    ///
    /// # Errors
    /// Nothing of that name can be opened.
    fn device_of_name(&self, name: &[u8]) -> Result<u64, NameRefusal> {
        let _ = name;
        Err(NameRefusal {
            error: Errno::OPNOTSUPP,
            text: "this cache opens nothing by a name; ask a server that was given stores".into(),
        })
    }
    /// Opens the object of that name, for a viewer. Its record says that it never changes ([`Validation::Immutable`]):
    /// another version of the object is another file.
    ///
    /// # Errors
    /// It cannot be opened.
    fn open_named(&self, name: &[u8]) -> Result<NamedAttachment, NameRefusal> {
        self.device_of_name(name).and(Err(NameRefusal { error: Errno::OPNOTSUPP, text: String::new() }))
    }
    /// Whether [`Owner::open_revision`] may open any. Asked before a descriptor is taken: its close ends the locks of
    /// this process on the file.
    fn opens_revisions(&self) -> bool {
        false
    }
    /// Opens a file as it is now, for a viewer. Its record says that it never changes: bytes that are read of it after
    /// a change of the file are refused.
    ///
    /// # Errors
    /// `ETXTBSY`: it was changed just now. Others: it cannot be opened so.
    fn open_revision(&self, request: RevisionRequest<'_>) -> Result<NamedAttachment, NameRefusal> {
        drop(request);
        Err(NameRefusal {
            error: Errno::OPNOTSUPP,
            text: "this cache opens no revisions of files; ask a server".into(),
        })
    }
    /// Pins up to `len` bytes at `position` until they are unpinned or the handle is detached. Returns the pin's
    /// number, unlike all others, and how many bytes are pinned.
    ///
    /// # Errors
    /// They cannot be read, or no more can be pinned.
    fn pin(&self, handle: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        let _ = (handle, position, len);
        Err(Errno::OPNOTSUPP)
    }
    /// The memory that a pin keeps; `None`: as many bytes as are pinned, or the pin is not known.
    fn kept_by(&self, handle: u64, pin: u64) -> Option<KeptMemory> {
        let _ = (handle, pin);
        None
    }
    /// The pin is not needed any more.
    fn unpin(&self, handle: u64, pin: u64) {
        let _ = (handle, pin);
    }
    /// The service ends; pages that this file's viewer has pinned stay pinned as long as this process lives.
    fn leave_pins(&self, handle: u64) {
        let _ = handle;
    }
    /// The folio that starts at `frame` was read. A hint: it may be another by now. Called with a lock of the service
    /// held: it takes none.
    fn touched(&self, frame: Frame);
}

/// The service, as an [`Owner`] that prepares files sees it.
pub trait ServiceHandle {
    /// Whether to go on.
    fn is_running(&self) -> bool;
    /// Whether a program may be running that reads here.
    fn has_viewers(&self) -> bool;
    /// Does `work` while the file counts as attached, so that [`Owner::writer_opened`] is called for it.
    fn while_attached(&self, id: FileId, work: &mut dyn FnMut());
}

/// Examines the code of a process: see [`SyscallAudit`]. Called by several threads at a time.
pub type SyscallAuditor = Box<dyn Fn(u32) -> SyscallAudit + Send + Sync>;

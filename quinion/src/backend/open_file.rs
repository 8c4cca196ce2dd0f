//! Open file: regular files and block devices as backends.
//!
//! ```text
//!   path --look at its kind--> open (never hangs) --look again--> direct? --> LocalFile --submit--> Engine
//! ```
//!
//! A file is read **directly**, past the kernel's page cache, where the file system says how (`STATX_DIOALIGN`) and the
//! library's reads, of whole pages, satisfy it. Else it is read through the kernel's cache with the kernel's readahead
//! off, because the library's is at work. So it is once a direct read was refused, or the cache is known to hold it.
//!
//! A file that is opened for **writing** is written the same way, but for its last page, if that is partial: direct I/O
//! is of whole sectors, and nothing may be written behind the end, because a crash would leave it there. So a second
//! descriptor goes through the kernel's cache: the page is written by it, and written back to the device at once, so
//! that its failure is the flush's own and not the next sync's. These calls block: a thread of the pool makes them, or
//! a thread that waits for that page alone. Clean, the page stays in the kernel's cache, since a program that appends a
//! little soon appends again; the next direct write there drops it, and so does the end of this backend. It is a whole
//! page, because a sector that is written directly while the kernel's cache holds the block around it would be undone
//! by that. Where no second descriptor can be had, all of the file goes through the cache; and so it does where
//! the file system's blocks are larger than a page (XFS since Linux 6.12): the kernel's cache holds the whole block
//! around the end, and would undo direct writes of the pages beside it.
//!
//! A file that cannot be cached is refused at open, with the reason: directories; pipes, sockets and character devices,
//! whose bytes come once; and files of pseudo file systems, whose bytes are made when they are read.
//!
//! Invariants:
//!  1. Opening never waits for the other end of a pipe and never opens a character device.
//!  2. The descriptor's description is the library's alone: changing its flags affects no other descriptor.
//!  3. `IoMode` goes from direct to buffered, never back.
//!  4. A file that is read only is never changed: it has no [`WriteState`].
//!
//! Not an invariant: that the size is unchanged. Every short read asks for it again. Nor that an open file keeps its
//! identity on overlayfs: its inode is another one after its first write where the layers are of several file systems
//! (`xino=off`), or if it has several names in a lower layer. The latter is refused for handles that only read: two of
//! them, by two names, would share one identity, and then read two files.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{
    Advice, AtFlags, FallocateFlags, FileType, Mode, OFlags, Statx, StatxFlags, fadvise, fallocate,
    fcntl_getfl, fcntl_setfl, fdatasync, fstatfs, fsync, ftruncate, open, statx,
};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use super::threads::Source;
use super::transfer::{Transfer, TransferStep};
use super::{Attributes, FileTimes, Fill, Flush, FlushError, Identity, Leasable, SyncKind, Version, zero_by};
use crate::arena::file_systems::FileSystem;
use crate::units::PAGE_SIZE;

/// Why a file cannot be read through the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system refused: there is no such file, no permission, too many open files.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The open found a directory.
    #[error("it is a directory; name a file in it")]
    IsDirectory,
    /// The open found a pipe, or another thing that has no bytes at positions.
    #[error(
        "it is {kind}, whose bytes can be read only once; read it without the cache, or copy it to a file first"
    )]
    NotAFile {
        /// Kind of the thing that the open found.
        kind: NotAFileKind,
    },
    /// The kernel makes its bytes when it is read, so they may differ each time and its size says nothing.
    #[error(
        "it is a file of {file_system}, whose bytes are made anew at each read; read it without the cache"
    )]
    PseudoFile {
        /// Which file system.
        file_system: &'static str,
    },
    /// The file has several names on overlayfs, and is opened for reading only. The first write to one of them may make
    /// that one another file, with handles that are open, and nothing tells which handles have become which file.
    #[error(
        "it is one of {names} names of a file of overlayfs, which a write may make two files while they are open; \
         open it for writing, copy it, or read it without the cache"
    )]
    SharedOnOverlay {
        /// How many names it has.
        names: u32,
    },
}

/// The kind of a thing, not a file, that an open found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotAFileKind {
    /// A pipe, with or without a name.
    Pipe,
    /// A socket.
    Socket,
    /// A terminal or another character device.
    CharacterDevice,
    /// Something the kernel gives no type, such as an event descriptor.
    Other,
}

impl std::fmt::Display for NotAFileKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pipe => "a pipe",
            Self::Socket => "a socket",
            Self::CharacterDevice => "a character device",
            Self::Other => "neither a file nor a device",
        })
    }
}

/// Whether reads go past the kernel's page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoMode {
    /// Reads go past the kernel's page cache, by `O_DIRECT`.
    Direct,
    /// Reads use the kernel's page cache, for example because the file system refuses direct ones.
    Buffered,
}

/// How a file is opened for writing. The default is one that exists, with its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenForWrite {
    /// Whether it may be new.
    pub creation: Creation,
    /// Content of the file at first.
    pub start: InitialContent,
    /// The permissions of a new file, less the process's mask.
    pub mode: u32,
}

impl Default for OpenForWrite {
    fn default() -> Self {
        Self { creation: Creation::MustExist, start: InitialContent::Kept, mode: 0o666 }
    }
}

/// Whether a file may be new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Creation {
    /// The file must be there.
    MustExist,
    /// The file is made if it is not there.
    IfMissing,
    /// The file is made, and must not be there.
    MustBeNew,
}

/// The content, at first, of a file that is opened for writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InitialContent {
    /// The bytes it has.
    Kept,
    /// No bytes; but a block device keeps its own.
    Emptied,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FileKind {
    Regular,
    BlockDevice,
}

#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) descriptor: OwnedFd,
    pub(super) kind: FileKind,
    pub(super) is_direct: AtomicBool,
    /// Alignment of direct reads, in bytes; a power of two up to 4096.
    pub(super) direct_align: usize,
    pub(super) clock: TimestampClock,
    /// For leases: see [`FileTimes`]. `None` if the description is not the library's, or changes bypass this kernel.
    pub(super) lease: Option<FileTimes>,
    pub(super) writing: Option<WriteState>,
    /// The size of the file system's blocks.
    block_bytes: u64,
    /// The mount it was opened by, by a number that is used once.
    pub(super) mount: Option<u64>,
    /// The device of its file system, as `fstat` gives it; its own, if it is a block device.
    pub(super) device: u64,
    /// Dropped last: a thread that finds it unshared knows that the descriptors are closed.
    pub(super) open: Arc<()>,
}

#[derive(Debug)]
pub(super) struct WriteState {
    by_cache: Option<OwnedFd>,
    /// Where the page begins, in bytes, that was written by it last, and stays in that cache; [`NO_TAIL`] if none.
    tail: AtomicU64,
}

/// No byte of a file is so far from its start.
const NO_TAIL: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Description {
    /// Made by the library: its flags may be changed.
    Ours,
    Shared,
}

impl OpenFile {
    /// Opens `path` for reading. Waits only for the holder of a lease on it, a minute at most.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_by(path, |flags| open_past_leases(path, flags, Mode::empty()))
    }

    /// Opens `path` for reading. Never blocks, and leaves access times alone, if this process may.
    ///
    /// # Errors
    /// See [`OpenError`]; `EAGAIN`: another process has a lease on it.
    pub(super) fn open_unseen(path: &Path) -> Result<Self, OpenError> {
        Self::open_by(path, |flags| match open(path, flags | OFlags::NOATIME, Mode::empty()) {
            // Another user's file.
            Err(Errno::PERM) => Ok(open(path, flags, Mode::empty())?),
            opened => Ok(opened?),
        })
    }

    fn open_by(path: &Path, open: impl FnOnce(OFlags) -> io::Result<OwnedFd>) -> Result<Self, OpenError> {
        // 1 What is it? Opening a device or a pipe could do something to it.
        let wanted = StatxFlags::BASIC_STATS;
        kind_of(&statx(rustix::fs::CWD, path, AtFlags::empty(), wanted).map_err(io::Error::from)?)?;
        // 2 Open it, so that even a pipe that has taken its place meanwhile does not make this thread wait.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let descriptor = open(flags)?;
        check_for_reading(&descriptor)?;
        Self::of(descriptor, Description::Ours)
    }

    /// Opens `path` for reading and writing. Waits only for the holder of a lease on it, a minute at most.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub(super) fn open_for_writing(path: &Path, options: OpenForWrite) -> Result<Self, OpenError> {
        // 1 What is it? It may not be there yet.
        match statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS) {
            Ok(stat) => drop(kind_of(&stat)?),
            Err(Errno::NOENT) if options.creation != Creation::MustExist => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        // 2 Open it, as it is: its type decides whether it is emptied.
        let how = match options.creation {
            Creation::MustExist => OFlags::empty(),
            Creation::IfMissing => OFlags::CREATE,
            Creation::MustBeNew => OFlags::CREATE | OFlags::EXCL,
        };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | how;
        let descriptor = open_past_leases(path, flags, Mode::from_raw_mode(options.mode))?;
        // 3 Look again, and settle how to read and write it.
        let mut file = Self::of(descriptor, Description::Ours)?;
        file.begin_writing();
        if options.start == InitialContent::Emptied && file.kind == FileKind::Regular {
            file.set_size(0)?;
        }
        Ok(file)
    }

    fn begin_writing(&mut self) {
        let by_cache = writes_directly(self.way(), self.block_bytes)
            .then(|| reopen_for_writing(&self.descriptor))
            .and_then(Result::ok);
        if by_cache.is_none() {
            self.fall_back();
        }
        self.writing = Some(WriteState { by_cache, tail: AtomicU64::new(NO_TAIL) });
    }

    /// Reads by way of `descriptor`, which another party opened for reading. It is reopened, so that the other's
    /// description, with its offset and flags, stays as it is.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub(super) fn adopt(descriptor: OwnedFd) -> Result<Self, OpenError> {
        check_for_reading(&descriptor)?;
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        match open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()) {
            Ok(own) => Self::of(own, Description::Ours),
            // No /proc, or the file's mode changed since: the descriptor may still be read, as it is.
            Err(_) if is_readable(&descriptor)? => Self::of(descriptor, Description::Shared),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    fn of(descriptor: OwnedFd, description: Description) -> Result<Self, OpenError> {
        let CheckedFile { kind, stat, clock, block_bytes, .. } = check(&descriptor)?;
        let direct_align = direct_align(&stat);
        let way = match (description, direct_align) {
            (Description::Ours, Some(_)) if set_flags(&descriptor, OFlags::DIRECT).is_ok() => IoMode::Direct,
            (Description::Ours, _) => {
                set_flags(&descriptor, OFlags::empty())?;
                // A hint; without it the kernel reads ahead as well as the library.
                let _ = fadvise(&descriptor, 0, None, Advice::Random);
                IoMode::Buffered
            }
            (Description::Shared, _) => IoMode::Buffered,
        };
        let is_direct = AtomicBool::new(way == IoMode::Direct);
        Ok(Self {
            descriptor,
            kind,
            is_direct,
            direct_align: direct_align.unwrap_or(1),
            clock,
            lease: clock.local.filter(|_| description == Description::Ours && kind == FileKind::Regular),
            writing: None,
            block_bytes,
            mount: mount_of(&stat),
            device: device_of(kind, &stat),
            open: Arc::new(()),
        })
    }

    /// The description, unless it is shared with others or open for writing: then there is no read lease by it.
    pub(super) fn leasable(&self) -> Option<Leasable<'_>> {
        let times = self.lease.filter(|_| self.writing.is_none())?;
        Some(Leasable { descriptor: self.descriptor(), times })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    pub(super) fn way(&self) -> IoMode {
        if self.is_direct.load(Ordering::Relaxed) { IoMode::Direct } else { IoMode::Buffered }
    }

    pub(super) fn align(&self, way: IoMode) -> usize {
        match way {
            IoMode::Direct => self.direct_align,
            IoMode::Buffered => 1,
        }
    }

    /// A direct read was refused, or not wanted: reads the file by the kernel's cache from now on.
    pub(super) fn fall_back(&self) -> IoMode {
        if self.is_direct.swap(false, Ordering::Relaxed) {
            // If the flag stays, the next read is refused again and its error is told.
            let _ = set_flags(&self.descriptor, OFlags::empty());
            let _ = fadvise(&self.descriptor, 0, None, Advice::Random);
        }
        IoMode::Buffered
    }

    fn size(&self) -> io::Result<u64> {
        match self.kind {
            FileKind::Regular => Ok(rustix::fs::fstat(&self.descriptor)?.st_size as u64),
            FileKind::BlockDevice => crate::sys::io::device_bytes(self.descriptor()),
        }
    }

    /// Whether the kernel may ask another machine, or another program, for the file's size and times.
    pub(super) fn revalidation_may_wait(&self) -> bool {
        self.clock.local.is_none()
    }

    /// Whether the file ends at or before byte `position`. If the file does not say, a read will.
    pub(super) fn ends_by(&self, position: u64) -> bool {
        self.size().is_ok_and(|size| size <= position)
    }

    /// Whether each write sets the file's times, by this kernel's clock, before it changes a byte; `now` are those.
    /// Stores to mapped memory need not. Inodes of 128 bytes on ext4 have whole seconds, which tell of no second write.
    pub(super) fn writes_set_times(&self, now: Version) -> bool {
        let has_nanoseconds = now.changed % 1_000_000_000 != 0;
        self.kind == FileKind::Regular && self.clock.writes_set_times && has_nanoseconds
    }

    /// Whether the next write is sure to leave another time of change than `version` has. A program may set the time
    /// of modification to any, so that does not count.
    pub(super) fn has_settled_change(&self, version: Version) -> bool {
        now().saturating_sub(version.changed) > self.clock.settling
    }

    pub(super) fn attributes(&self) -> io::Result<Attributes> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = statx(&self.descriptor, "", AtFlags::EMPTY_PATH, wanted)?;
        Ok(match self.kind {
            FileKind::Regular => Attributes {
                identity: identity_by(&stat, self.clock),
                version: self.version(&stat),
                size: stat.stx_size,
            },
            FileKind::BlockDevice => Attributes {
                // Files of a file system on this device carry its number too, but none was born then.
                identity: Identity { device: device_of(self.kind, &stat), inode: 0, born: i64::MIN },
                // The times of the node say nothing about the device's bytes.
                version: Version { modified: 0, changed: 0, settled: false, steps: false },
                size: self.size()?,
            },
        })
    }

    /// The version of a regular file that was looked at just now. A time in the future is not settled.
    fn version(&self, stat: &Statx) -> Version {
        let (modified, changed) = (nanoseconds(stat.stx_mtime), nanoseconds(stat.stx_ctime));
        let age = now().saturating_sub(modified.max(changed));
        Version {
            modified,
            changed,
            settled: age > self.clock.settling || stat.stx_size == 0,
            // Old file systems keep whole seconds, whatever this kernel can do.
            steps: self.clock.steps && stat.stx_ctime.tv_nsec != 0,
        }
    }

    /// Returns how many bytes came.
    pub(super) fn read_blocking(&self, fill: &Fill) -> io::Result<usize> {
        let mut way = self.way();
        let mut transfer = Transfer::new(fill.len(), self.align(way));
        loop {
            let (from, len) = transfer.rest();
            let buffer = fill.as_ptr().wrapping_add(from);
            // SAFETY: the transfer's rest lies inside the fill, whose buffer is this call's alone.
            let read = unsafe {
                crate::sys::io::pread(self.descriptor(), buffer, len, fill.position() + from as u64)
            };
            match read {
                Ok(bytes) => match transfer.advance(bytes, |at| self.ends_by(fill.position() + at as u64)) {
                    TransferStep::Complete => return Ok(fill.len()),
                    TransferStep::Ended(bytes) => return Ok(bytes),
                    TransferStep::Again => {}
                },
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => std::thread::yield_now(),
                    Some(libc::EINVAL | libc::EOPNOTSUPP) if way == IoMode::Direct => {
                        way = self.fall_back();
                        transfer = transfer.restart(self.align(way));
                    }
                    _ => return Err(error),
                },
            }
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(writing) = &self.writing {
            self.forget_tail(writing.tail.load(Ordering::Relaxed));
        }
    }
}

impl Source for OpenFile {
    fn device(&self) -> u64 {
        self.device
    }
    fn read(&self, fill: &mut Fill, _bounce: &mut Vec<u8>) -> io::Result<usize> {
        self.read_blocking(fill)
    }
    fn write(&self, flush: &Flush, _bounce: &mut Vec<u8>) -> Result<(), FlushError> {
        self.write_blocking(flush)
    }
}

impl OpenFile {
    pub(super) fn tail_of(&self, flush: &Flush) -> Option<usize> {
        // Not by the alignment of the device: a direct write of the last page, which the file ends in, would share its
        // block with a write by the kernel's cache, or a change of size, that clears what lies behind the end.
        let align = match (self.way(), self.kind) {
            (IoMode::Direct, FileKind::Regular) => PAGE_SIZE,
            (way, _) => self.align(way),
        };
        (!flush.len().is_multiple_of(align)).then(|| flush.len() / PAGE_SIZE * PAGE_SIZE)
    }

    /// The descriptor that goes by the kernel's page cache. Once the file has fallen back, both descriptors do.
    fn by_cache(&self) -> BorrowedFd<'_> {
        let second = self.writing.as_ref().and_then(|writing| writing.by_cache.as_ref());
        second.unwrap_or(&self.descriptor).as_fd()
    }

    fn write_blocking(&self, flush: &Flush) -> Result<(), FlushError> {
        let mut way = self.way();
        let mut transfer = Transfer::new(flush.len(), self.align(way));
        loop {
            match write_step(self.descriptor(), flush, &mut transfer) {
                Ok(TransferStep::Complete) => return Ok(()),
                Ok(TransferStep::Ended(written)) => return Err(FlushError::stuck(written)),
                Ok(TransferStep::Again) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => std::thread::yield_now(),
                    Some(libc::EINVAL | libc::EOPNOTSUPP) if way == IoMode::Direct => {
                        way = self.fall_back();
                        transfer = transfer.restart(self.align(way));
                    }
                    _ => return Err(FlushError { written: transfer.rest().0, error }),
                },
            }
        }
    }

    /// Writes a flush through the kernel's cache, and has the kernel write it back. Its last page stays there.
    pub(super) fn write_by_cache(&self, flush: &Flush) -> Result<(), FlushError> {
        let mut transfer = Transfer::new(flush.len(), 1);
        loop {
            match write_step(self.by_cache(), flush, &mut transfer) {
                Ok(TransferStep::Complete) => break,
                Ok(TransferStep::Ended(written)) => return Err(FlushError::stuck(written)),
                Ok(TransferStep::Again) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(FlushError { written: transfer.rest().0, error }),
            }
        }
        let failed = |error| FlushError { written: 0, error };
        let (position, bytes) = (flush.position(), flush.len() as u64);
        self.write_back(position, bytes).map_err(failed)?;
        self.keep_tail((position + bytes - 1) / PAGE_SIZE as u64 * PAGE_SIZE as u64);
        Ok(())
    }

    fn write_back(&self, position: u64, bytes: u64) -> io::Result<()> {
        match crate::sys::io::write_back(self.by_cache(), position, bytes) {
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE)) =>
            {
                // The file system knows no ranges.
                fdatasync(self.by_cache())?;
            }
            written => written?,
        }
        Ok(())
    }

    /// The page from byte `page` on stays in the kernel's cache, and the one before it, if it is another, leaves.
    fn keep_tail(&self, page: u64) {
        let Some(writing) = &self.writing else { return };
        let before = writing.tail.swap(page, Ordering::Relaxed);
        if before != page {
            self.forget_tail(before);
        }
    }

    /// A hint: a page that stays is right; it costs its memory, and the next direct write an invalidation.
    fn forget_tail(&self, page: u64) {
        if page != NO_TAIL && self.way() == IoMode::Direct {
            self.leave_cache(page, PAGE_SIZE as u64);
        }
    }

    /// Drops the clean pages of these bytes from the kernel's cache, unless another process uses them there.
    fn leave_cache(&self, position: u64, bytes: u64) {
        let _ = fadvise(self.by_cache(), position, std::num::NonZeroU64::new(bytes), Advice::DontNeed);
    }

    /// Always by one descriptor, whose description is told each failure of the kernel's write-back once.
    pub(super) fn sync(&self, kind: SyncKind) -> io::Result<()> {
        let sync = || match kind {
            SyncKind::Data => fdatasync(&self.descriptor),
            SyncKind::All => fsync(&self.descriptor),
        };
        Ok(rustix::io::retry_on_intr(sync)?)
    }

    pub(super) fn set_size(&self, bytes: u64) -> io::Result<()> {
        if self.kind == FileKind::BlockDevice {
            let words = "a block device has the size it has; write to a file, or leave the size alone";
            return Err(io::Error::new(io::ErrorKind::Unsupported, words));
        }
        Ok(rustix::io::retry_on_intr(|| ftruncate(&self.descriptor, bytes))?)
    }

    pub(super) fn punch(&self, range: Range<u64>) -> io::Result<()> {
        let range = range.start..range.end.min(self.size()?);
        if range.is_empty() {
            return Ok(());
        }
        let bytes = range.end - range.start;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::io::retry_on_intr(|| fallocate(&self.descriptor, flags, range.start, bytes)) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV | Errno::INVAL) => self.zero(range),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes zeros, where there can be no hole.
    fn zero(&self, range: Range<u64>) -> io::Result<()> {
        zero_by(range.clone(), |zeros, position| {
            // SAFETY: a slice is valid for reads.
            unsafe { crate::sys::io::pwrite(self.by_cache(), zeros.as_ptr(), zeros.len(), position) }
        })?;
        self.write_back(range.start, range.end - range.start)?;
        self.leave_cache(range.start, range.end - range.start);
        Ok(())
    }

    pub(super) fn allocate(&self, range: Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let keep = || {
            let bytes = range.end - range.start;
            fallocate(&self.descriptor, FallocateFlags::KEEP_SIZE, range.start, bytes)
        };
        Ok(rustix::io::retry_on_intr(keep)?)
    }
}

/// Bytes of one write. A full device fails a call as a whole, so the bytes that the calls before it wrote are known.
const STEP_BYTES: usize = 512 << 10;

fn write_step(
    descriptor: BorrowedFd<'_>,
    flush: &Flush,
    transfer: &mut Transfer,
) -> io::Result<TransferStep> {
    let (from, rest) = transfer.rest();
    let len = rest.min(STEP_BYTES);
    let (buffer, position) = (flush.as_ptr().wrapping_add(from), flush.position() + from as u64);
    // SAFETY: the transfer's rest lies inside the flush, whose buffer is valid until it is completed.
    let written = unsafe { crate::sys::io::pwrite(descriptor, buffer, len, position) }?;
    Ok(transfer.advance(written, |_| false))
}

pub(super) struct BufferedFile(pub(super) Arc<OpenFile>);

impl Source for BufferedFile {
    fn device(&self) -> u64 {
        self.0.device()
    }
    fn read(&self, fill: &mut Fill, bounce: &mut Vec<u8>) -> io::Result<usize> {
        self.0.read(fill, bounce)
    }
    fn write(&self, flush: &Flush, _bounce: &mut Vec<u8>) -> Result<(), FlushError> {
        self.0.write_by_cache(flush)
    }
}

/// How long the holder of a lease on a file is given: longer than the kernel's default.
const LEASE_ENDS: Duration = Duration::from_secs(60);

/// Opens `path` without blocking, except for the holder of a lease on it, perhaps this process: the attempt makes the
/// kernel ask for the lease, and so the next attempt may succeed.
fn open_past_leases(path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    let (begun, mut pause) = (Instant::now(), Duration::from_micros(100));
    loop {
        match rustix::io::retry_on_intr(|| open(path, flags, mode)) {
            Err(Errno::AGAIN) if begun.elapsed() < LEASE_ENDS => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(50));
            }
            opened => return Ok(opened?),
        }
    }
}

/// Whether writes of a file with blocks of that size may go past the kernel's cache, and only its last page by it.
fn writes_directly(way: IoMode, block_bytes: u64) -> bool {
    way == IoMode::Direct && block_bytes <= PAGE_SIZE as u64
}

fn reopen_for_writing(descriptor: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    Ok(open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())?)
}

#[derive(Clone, Copy, Debug)]
pub(super) struct TimestampClock {
    /// How old a change must be before a later one is sure to carry another time, in nanoseconds.
    settling: i64,
    /// Whether a time that was looked at is not used again.
    steps: bool,
    pub(super) local: Option<FileTimes>,
    /// Whether each write sets the file's own times, by this kernel's clock, before it changes a byte.
    writes_set_times: bool,
    /// Whether a file is born once. On overlayfs a file of a lower layer is born again when it is opened for writing,
    /// and handles that were open before read and write the same file as those that come later.
    births_last: bool,
}

impl TimestampClock {
    fn of(magic: u64) -> Self {
        let is_local = matches!(FileSystem::of(magic), FileSystem::Local | FileSystem::ReadOnly);
        if !FINE_CLOCKS.contains(&magic) {
            let local = is_local.then_some(FileTimes::ChangedByWrites);
            return Self {
                settling: SETTLING_REMOTE,
                steps: false,
                local,
                writes_set_times: false,
                births_last: true,
            };
        }
        let times = if magic == TMPFS { FileTimes::ChangedByWrites } else { FileTimes::ChangedByStores };
        let steps = STEPPING_FILE_SYSTEMS.contains(&magic) && linux() >= STEPPING_LINUX;
        // The file behind an overlay may be another one after its first write.
        let births_last = magic != OVERLAYFS;
        let writes_set_times = is_local && births_last;
        let local = is_local.then_some(times);
        Self { settling: SETTLING_LOCAL, steps, local, writes_set_times, births_last }
    }
}

/// Whether the file is on tmpfs or ramfs, in which its cached pages are the file.
pub(crate) fn is_memory_file(descriptor: BorrowedFd<'_>) -> bool {
    fstatfs(descriptor).is_ok_and(|data| [TMPFS, RAMFS].contains(&(data.f_type as u64 & 0xffff_ffff)))
}

/// The identity of a file as [`Backend::attributes`] tells that of a regular one. A program that wants to know later
/// whether a path still leads to the same file keeps it: an inode number alone is given to the next file at once. Not
/// told apart are two files with one number that were born in one tick of the kernel's clock, of some milliseconds.
///
/// # Errors
/// Those of `statx` and `fstatfs`.
///
/// [`Backend::attributes`]: super::Backend::attributes
pub fn identity_of(file: impl AsFd) -> io::Result<Identity> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = statx(&file, "", AtFlags::EMPTY_PATH, wanted)?;
    let magic = fstatfs(&file)?.f_type as u64 & 0xffff_ffff;
    Ok(identity_by(&stat, TimestampClock::of(magic)))
}

fn identity_by(stat: &Statx, clock: TimestampClock) -> Identity {
    Identity {
        device: device_number(stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        born: match has(stat, StatxFlags::BTIME) && clock.births_last {
            true => nanoseconds(stat.stx_btime),
            false => 0,
        },
    }
}

struct CheckedFile {
    kind: FileKind,
    stat: Statx,
    /// The number of its file system's kind.
    magic: u64,
    clock: TimestampClock,
    block_bytes: u64,
}

fn check(descriptor: &OwnedFd) -> Result<CheckedFile, OpenError> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::from_bits_retain(STATX_DIOALIGN | STATX_MNT_ID_UNIQUE);
    let stat = statx(descriptor, "", AtFlags::EMPTY_PATH, wanted).map_err(io::Error::from)?;
    let kind = kind_of(&stat)?;
    let file_system = fstatfs(descriptor).map_err(io::Error::from)?;
    let magic = file_system.f_type as u64 & 0xffff_ffff;
    if kind == FileKind::Regular
        && let Some(&(_, file_system)) = PSEUDO_FILE_SYSTEMS.iter().find(|&&(pseudo, _)| pseudo == magic)
    {
        return Err(OpenError::PseudoFile { file_system });
    }
    // Of a block device, those of the file system that its node is in.
    let block_bytes = if kind == FileKind::Regular { file_system.f_bsize as u64 } else { 0 };
    Ok(CheckedFile { kind, stat, magic, clock: TimestampClock::of(magic), block_bytes })
}

/// Checks a file that is read only. On overlayfs two names of a lower layer's file have one inode number until one of
/// them is written to (without `index=on`); then it is a copy, and so are its handles from before. So handles by
/// both, which would share their pages, would read each other's files. A handle for writing is of the copy.
fn check_for_reading(descriptor: &OwnedFd) -> Result<(), OpenError> {
    let CheckedFile { kind, stat, magic, .. } = check(descriptor)?;
    match kind == FileKind::Regular && magic == OVERLAYFS && stat.stx_nlink > 1 {
        true => Err(OpenError::SharedOnOverlay { names: stat.stx_nlink }),
        false => Ok(()),
    }
}

fn kind_of(stat: &Statx) -> Result<FileKind, OpenError> {
    let kind = match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => return Ok(FileKind::Regular),
        FileType::BlockDevice => return Ok(FileKind::BlockDevice),
        FileType::Directory => return Err(OpenError::IsDirectory),
        FileType::Fifo => NotAFileKind::Pipe,
        FileType::Socket => NotAFileKind::Socket,
        FileType::CharacterDevice => NotAFileKind::CharacterDevice,
        FileType::Symlink | FileType::Unknown => NotAFileKind::Other,
    };
    Err(OpenError::NotAFile { kind })
}

/// The alignment of direct reads, if the file reports one that the library's reads keep.
fn direct_align(stat: &Statx) -> Option<usize> {
    let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
    let fits = |align: usize| align.is_power_of_two() && align <= PAGE_SIZE;
    let says = has(stat, StatxFlags::from_bits_retain(STATX_DIOALIGN));
    (says && fits(memory) && fits(offset)).then_some(offset)
}

/// The mount, where its number is one that no other ever has: with the older numbers, which are given anew, another
/// file system may be taken for this one.
fn mount_of(stat: &Statx) -> Option<u64> {
    has(stat, StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE)).then_some(stat.stx_mnt_id)
}

fn has(stat: &Statx, flag: StatxFlags) -> bool {
    stat.stx_mask & flag.bits() != 0
}

fn is_readable(descriptor: &OwnedFd) -> io::Result<bool> {
    Ok(!fcntl_getfl(descriptor)?.intersects(OFlags::WRONLY | OFlags::PATH))
}

/// Sets the description's flags to `flags`, which clears `O_NONBLOCK` and, unless named, `O_DIRECT`.
fn set_flags(descriptor: &OwnedFd, flags: OFlags) -> io::Result<()> {
    let kept = fcntl_getfl(descriptor)? - OFlags::NONBLOCK - OFlags::DIRECT;
    Ok(fcntl_setfl(descriptor, kept | flags)?)
}

fn device_of(kind: FileKind, stat: &Statx) -> u64 {
    match kind {
        FileKind::Regular => device_number(stat.stx_dev_major, stat.stx_dev_minor),
        FileKind::BlockDevice => device_number(stat.stx_rdev_major, stat.stx_rdev_minor),
    }
}

/// The number that `fstat` gives, so that a viewer's can be compared with it.
fn device_number(major: u32, minor: u32) -> u64 {
    rustix::fs::makedev(major, minor)
}

fn nanoseconds(time: rustix::fs::StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.tv_nsec))
}

/// Nanoseconds since 1970, as a write would give them to its file now: by the clock that goes in steps. The exact one
/// may be ahead of it, in a virtual machine for as long as the processor that keeps the time does not run.
fn now() -> i64 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

/// Major and minor version of the running kernel; 0 for a number that its release does not say.
fn linux() -> (u32, u32) {
    let names = rustix::system::uname();
    let mut numbers = names.release().to_str().unwrap_or("").split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next().and_then(|digits| digits.parse().ok()).unwrap_or(0);
    (number(), number())
}

/// The most bytes of a read that its reader makes by itself.
pub(super) const HERE_BYTES_MAX: usize = 64 << 10;

/// `STATX_DIOALIGN`, since Linux 6.1.
const STATX_DIOALIGN: u32 = 0x2000;

/// `STATX_MNT_ID_UNIQUE`, since Linux 6.8.
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// Local file systems stamp changes with the kernel's clock, which steps at most every 10 ms.
const SETTLING_LOCAL: i64 = 20_000_000;
/// Elsewhere the clock is another machine's or steps by whole seconds, 2 of them for FAT.
const SETTLING_REMOTE: i64 = 10_000_000_000;

/// ext2 to ext4, XFS, Btrfs, tmpfs, F2FS, ZFS, bcachefs, overlayfs: clocked by this kernel, to the nanosecond.
const FINE_CLOCKS: [u64; 8] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0x2fc1_2fc1, 0xca45_1a4e, OVERLAYFS];
const OVERLAYFS: u64 = 0x794c_7630;

/// ext4, XFS, Btrfs and tmpfs stamp a change with a finer clock if the file's times have been looked at since the last
/// one ("multigrain timestamps"), since Linux 6.13.
const STEPPING_FILE_SYSTEMS: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, TMPFS];
const STEPPING_LINUX: (u32, u32) = (6, 13);

/// tmpfs does not notice stores to mapped memory.
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;

/// File systems whose files have no content of their own, by magic number.
const PSEUDO_FILE_SYSTEMS: [(u64, &str); 20] = [
    (0x9fa0, "procfs"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x7363_6673, "securityfs"),
    (0xf97c_ff8c, "selinuxfs"),
    (0x4341_5d53, "smackfs"),
    (0xcafe_4a11, "bpf"),
    (0x6165_676c, "pstore"),
    (0xde5e_81e4, "efivarfs"),
    (0x6265_6570, "configfs"),
    (0x1cd1, "devpts"),
    (0x4249_4e4d, "binfmt_misc"),
    (0x6e73_6673, "nsfs"),
    (0x1980_0202, "mqueue"),
    (0x0765_5821, "resctrl"),
    (0x6573_5543, "fusectl"),
    (0x6c6f_6f70, "binderfs"),
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use super::*;

    /// The kernel's cache holds whole blocks of the file system, and the one around the end beside direct writes.
    #[test]
    fn a_file_whose_blocks_are_larger_than_a_page_is_written_by_the_kernels_cache() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for (block_bytes, may_be_direct) in [(4096, true), (16384, false), (65536, false)] {
            let path = folder.path().join(format!("{block_bytes}"));
            assert_eq!(writes_directly(IoMode::Direct, block_bytes), may_be_direct);
            assert!(!writes_directly(IoMode::Buffered, block_bytes));
            // And so a file is written, where the folder has direct I/O.
            fs::write(&path, [7; 10_000]).unwrap();
            let descriptor = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
            let mut file = OpenFile::of(descriptor, Description::Ours).unwrap();
            assert!(file.block_bytes.is_power_of_two(), "{}", file.block_bytes);
            let was_direct = file.way() == IoMode::Direct;
            file.block_bytes = block_bytes;
            file.begin_writing();
            assert_eq!(file.way() == IoMode::Direct, was_direct && may_be_direct);
            let writing = file.writing.as_ref().unwrap();
            assert_eq!(writing.by_cache.is_some(), was_direct && may_be_direct);
        }
    }

    #[test]
    fn times_of_whole_seconds_and_of_overlays_do_not_tell_of_each_write() {
        let mut file = OpenFile::open(&std::env::current_exe().unwrap()).unwrap();
        let at = |changed| Version { modified: 0, changed, settled: true, steps: true };
        for (magic, tells) in [(0xef53, true), (TMPFS, true), (OVERLAYFS, false), (0x6969, false)] {
            file.clock = TimestampClock::of(magic);
            assert_eq!(file.writes_set_times(at(5_000_000_001)), tells, "{magic:x}");
            assert!(!file.writes_set_times(at(5_000_000_000)), "{magic:x}");
        }
        file.clock = TimestampClock::of(0xef53);
        assert!(file.has_settled_change(at(5)) && !file.has_settled_change(at(now() + 1_000_000_000)));
    }

    /// ext4 gives the number of a deleted file to the next one, whose time of birth is another.
    #[test]
    fn a_file_with_the_inode_number_of_a_deleted_one_has_another_identity() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("file");
        let made = || {
            fs::write(&path, "x").unwrap();
            let identity = identity_of(fs::File::open(&path).unwrap()).unwrap();
            let again = OpenFile::open(&path).unwrap().attributes().unwrap().identity;
            assert_eq!(identity, again, "the library and a program know a file by the same numbers");
            fs::remove_file(&path).unwrap();
            identity
        };
        let first = made();
        if first.born == 0 {
            return; // this file system keeps no time of birth
        }
        for _ in 0..100 {
            // Longer than the kernel's clock stands still.
            std::thread::sleep(Duration::from_millis(11));
            let other = made();
            assert_ne!(other, first);
            if other.inode == first.inode {
                return;
            }
        }
    }

    #[test]
    fn now_is_never_ahead_of_the_time_that_a_file_gets() {
        let folder = Path::new("/dev/shm");
        for number in 0..200 {
            let path = folder.join(format!("quinion-now-{}-{number}", std::process::id()));
            let before = now();
            fs::write(&path, "x").unwrap();
            let known = fs::metadata(&path).unwrap();
            fs::remove_file(&path).unwrap();
            let changed = known.ctime() * 1_000_000_000 + known.ctime_nsec();
            assert!(before <= changed, "{before} is after {changed}");
        }
    }
}

//! File: regular files and block devices as backends.
//!
//! ```text
//!   path --look at its kind--> open (never hangs) --look again--> direct? --> LocalFile --submit--> Engine
//! ```
//!
//! A file is read **directly**, past the kernel's page cache, where the file
//! system says how (`STATX_DIOALIGN`) and our reads, which begin at multiples of
//! 4096 and go to whole pages, satisfy it. Else it is read through the kernel's
//! cache with the kernel's readahead off, because ours is at work. If a direct
//! read is refused later the file is read through the cache from then on.
//!
//! What cannot be cached is refused at once and in words: directories; pipes,
//! sockets and character devices, whose bytes come once; and files of pseudo
//! file systems, whose bytes are made when they are read.
//!
//! Invariants:
//!  1. Opening never waits for somebody at the other end of a pipe and never opens a character device.
//!  2. The descriptor's description is ours alone: changing its flags changes nobody else's.
//!  3. `Way` goes from direct to buffered, never back.
//!
//! Not an invariant: that the size is what it was. Every short read asks for it again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    Advice, AtFlags, FileType, Mode, OFlags, Statx, StatxFlags, fadvise, fcntl_getfl, fcntl_setfl, fstatfs,
    open, statx,
};
use rustix::time::{ClockId, clock_gettime};

use super::engine::EngineShared;
use super::threads::Source;
use super::transfer::{Step, Transfer};
use super::{Attributes, Backend, Fill, Identity, Reap, Reaped, Version, WaitRoom};
use crate::units::PAGE_SIZE;

/// Why a file cannot be read through the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system refused: there is no such file, no permission, too many open files.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is a directory.
    #[error("it is a directory; name a file in it")]
    IsDirectory,
    /// It is nothing that has bytes at positions.
    #[error(
        "it is {kind}, whose bytes can be read only once; read it without the cache, or copy it to a file first"
    )]
    NotAFile {
        /// What it is.
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
}

/// What an open found that is not a file.
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
pub enum Way {
    /// They do: `O_DIRECT`.
    Direct,
    /// They do not, because the file system cannot or the descriptor's description is not ours.
    Buffered,
}

/// A regular file or block device, read by an [`Engine`](super::Engine).
#[derive(Debug)]
pub struct LocalFile {
    file: Arc<OpenFile>,
    engine: Arc<EngineShared>,
}

impl LocalFile {
    pub(super) fn new(file: OpenFile, engine: Arc<EngineShared>) -> Self {
        Self { file: Arc::new(file), engine }
    }
    /// How it is read now. May turn from direct to buffered, once.
    pub fn way(&self) -> Way {
        self.file.way()
    }
}

impl AsFd for LocalFile {
    /// The descriptor it is read by. Changing its flags changes how it is read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.descriptor()
    }
}

impl Backend for LocalFile {
    fn name(&self) -> &'static str {
        self.engine.name()
    }
    /// # Panics
    /// If it is not the room of the engine that opened the file.
    fn attach(&self, room: &Arc<WaitRoom>) {
        self.engine.attach(room);
    }
    fn is_direct(&self) -> bool {
        self.way() == Way::Direct
    }

    fn attributes(&self) -> io::Result<Attributes> {
        self.file.attributes()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.engine.submit(&self.file, fills);
    }
    fn submit_with_reap(&self, fills: Vec<Fill>) {
        self.engine.submit_with_reap(&self.file, fills);
    }
    fn has_room(&self, fills: usize) -> bool {
        self.engine.has_room(fills)
    }
    fn reap(&self, how: Reap, done: &mut dyn FnMut() -> bool) -> Reaped {
        self.engine.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.engine.wants_leader()
    }
}

/// What is behind a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Regular,
    BlockDevice,
}

/// An open file, shared by the reads that are under way.
#[derive(Debug)]
pub(super) struct OpenFile {
    descriptor: OwnedFd,
    kind: Kind,
    is_direct: AtomicBool,
    /// What direct reads must be aligned to, in bytes; a power of two up to 4096.
    direct_align: usize,
    /// How old a change must be before a later one is sure to carry another time.
    settling: i64,
}

/// What a descriptor's description is, and whose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Description {
    /// Made by us: its flags may be changed.
    Ours,
    /// Shared with others.
    Shared,
}

impl OpenFile {
    /// Opens `path` for reading. Waits for nobody.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        // 1 What is it? Opening a device or a pipe could do something to it.
        let wanted = StatxFlags::BASIC_STATS;
        kind_of(&statx(rustix::fs::CWD, path, AtFlags::empty(), wanted).map_err(io::Error::from)?)?;
        // 2 Open it, so that even a pipe that has taken its place meanwhile does not make us wait.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let descriptor = open(path, flags, Mode::empty()).map_err(io::Error::from)?;
        // 3 Look again at what was opened, and settle how to read it.
        Self::of(descriptor, Description::Ours)
    }

    /// Reads by way of `descriptor`, which somebody else opened for reading. It is reopened, so that the
    /// other's description, with its offset and flags, stays as it is.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub(super) fn adopt(descriptor: OwnedFd) -> Result<Self, OpenError> {
        check(&descriptor)?;
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        match open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()) {
            Ok(own) => Self::of(own, Description::Ours),
            // No /proc, or the file's mode changed since: what was opened may still be read, as it is.
            Err(_) if is_readable(&descriptor)? => Self::of(descriptor, Description::Shared),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    fn of(descriptor: OwnedFd, description: Description) -> Result<Self, OpenError> {
        let (kind, stat, settling) = check(&descriptor)?;
        let direct_align = direct_align(&stat);
        let way = match (description, direct_align) {
            (Description::Ours, Some(_)) if set_flags(&descriptor, OFlags::DIRECT).is_ok() => Way::Direct,
            (Description::Ours, _) => {
                set_flags(&descriptor, OFlags::empty())?;
                // A hint; without it the kernel reads ahead as well as we do.
                let _ = fadvise(&descriptor, 0, None, Advice::Random);
                Way::Buffered
            }
            (Description::Shared, _) => Way::Buffered,
        };
        let is_direct = AtomicBool::new(way == Way::Direct);
        Ok(Self { descriptor, kind, is_direct, direct_align: direct_align.unwrap_or(1), settling })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    pub(super) fn way(&self) -> Way {
        if self.is_direct.load(Ordering::Relaxed) { Way::Direct } else { Way::Buffered }
    }

    /// What a read's position must be aligned to that goes by `way`.
    pub(super) fn align(&self, way: Way) -> usize {
        match way {
            Way::Direct => self.direct_align,
            Way::Buffered => 1,
        }
    }

    /// A direct read was refused: reads the file by the kernel's cache from now on.
    pub(super) fn fall_back(&self) -> Way {
        if self.is_direct.swap(false, Ordering::Relaxed) {
            // If the flag stays, the next read is refused again and its error is told.
            let _ = set_flags(&self.descriptor, OFlags::empty());
            let _ = fadvise(&self.descriptor, 0, None, Advice::Random);
        }
        Way::Buffered
    }

    /// The size in bytes, now.
    fn size(&self) -> io::Result<u64> {
        match self.kind {
            Kind::Regular => Ok(rustix::fs::fstat(&self.descriptor)?.st_size as u64),
            Kind::BlockDevice => crate::sys::io::device_bytes(self.descriptor()),
        }
    }

    /// Whether the file ends at or before byte `position`. If the file does not say, a read will.
    pub(super) fn ends_by(&self, position: u64) -> bool {
        self.size().is_ok_and(|size| size <= position)
    }

    fn attributes(&self) -> io::Result<Attributes> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = statx(&self.descriptor, "", AtFlags::EMPTY_PATH, wanted)?;
        Ok(match self.kind {
            Kind::Regular => Attributes {
                identity: Identity {
                    device: device_number(stat.stx_dev_major, stat.stx_dev_minor),
                    inode: stat.stx_ino,
                    born: if has(&stat, StatxFlags::BTIME) { nanoseconds(stat.stx_btime) } else { 0 },
                },
                version: version(
                    nanoseconds(stat.stx_mtime),
                    nanoseconds(stat.stx_ctime),
                    now(),
                    self.settling,
                ),
                size: stat.stx_size,
            },
            Kind::BlockDevice => Attributes {
                // Files of a file system on this device carry its number too, but none was born then.
                identity: Identity {
                    device: device_number(stat.stx_rdev_major, stat.stx_rdev_minor),
                    inode: 0,
                    born: i64::MIN,
                },
                // The times of the node say nothing about the device's bytes.
                version: Version { modified: 0, changed: 0, settled: false },
                size: self.size()?,
            },
        })
    }

    /// Reads a whole fill by calls that block. Returns how many bytes came.
    fn read_blocking(&self, fill: &Fill) -> io::Result<usize> {
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
                    Step::Complete => return Ok(fill.len()),
                    Step::Ended(bytes) => return Ok(bytes),
                    Step::Again => {}
                },
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => std::thread::yield_now(),
                    Some(libc::EINVAL | libc::EOPNOTSUPP) if way == Way::Direct => {
                        way = self.fall_back();
                        transfer = transfer.restart(self.align(way));
                    }
                    _ => return Err(error),
                },
            }
        }
    }
}

impl Source for OpenFile {
    fn read(&self, fill: &mut Fill, _bounce: &mut Vec<u8>) -> io::Result<usize> {
        self.read_blocking(fill)
    }
}

/// Looks at an open descriptor: what it is, and how long its times take to settle.
fn check(descriptor: &OwnedFd) -> Result<(Kind, Statx, i64), OpenError> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::from_bits_retain(STATX_DIOALIGN);
    let stat = statx(descriptor, "", AtFlags::EMPTY_PATH, wanted).map_err(io::Error::from)?;
    let kind = kind_of(&stat)?;
    let magic = fstatfs(descriptor).map_err(io::Error::from)?.f_type as u64 & 0xffff_ffff;
    if kind == Kind::Regular
        && let Some(&(_, file_system)) = PSEUDO_FILE_SYSTEMS.iter().find(|&&(pseudo, _)| pseudo == magic)
    {
        return Err(OpenError::PseudoFile { file_system });
    }
    let is_local = LOCAL_FILE_SYSTEMS.contains(&magic);
    Ok((kind, stat, if is_local { SETTLING_LOCAL } else { SETTLING_REMOTE }))
}

fn kind_of(stat: &Statx) -> Result<Kind, OpenError> {
    let kind = match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => return Ok(Kind::Regular),
        FileType::BlockDevice => return Ok(Kind::BlockDevice),
        FileType::Directory => return Err(OpenError::IsDirectory),
        FileType::Fifo => NotAFileKind::Pipe,
        FileType::Socket => NotAFileKind::Socket,
        FileType::CharacterDevice => NotAFileKind::CharacterDevice,
        FileType::Symlink | FileType::Unknown => NotAFileKind::Other,
    };
    Err(OpenError::NotAFile { kind })
}

/// What direct reads must be aligned to, if the file says so and our reads are.
fn direct_align(stat: &Statx) -> Option<usize> {
    let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
    let fits = |align: usize| align.is_power_of_two() && align <= PAGE_SIZE;
    let says = has(stat, StatxFlags::from_bits_retain(STATX_DIOALIGN));
    (says && fits(memory) && fits(offset)).then_some(offset)
}

fn has(stat: &Statx, flag: StatxFlags) -> bool {
    stat.stx_mask & flag.bits() != 0
}

/// Whether the description was opened for reading.
fn is_readable(descriptor: &OwnedFd) -> io::Result<bool> {
    Ok(!fcntl_getfl(descriptor)?.intersects(OFlags::WRONLY | OFlags::PATH))
}

/// Sets the description's flags to `flags`, which clears `O_NONBLOCK` and, unless named, `O_DIRECT`.
fn set_flags(descriptor: &OwnedFd, flags: OFlags) -> io::Result<()> {
    let kept = fcntl_getfl(descriptor)? - OFlags::NONBLOCK - OFlags::DIRECT;
    Ok(fcntl_setfl(descriptor, kept | flags)?)
}

/// The number that `fstat` gives, so that a viewer's can be compared with ours.
fn device_number(major: u32, minor: u32) -> u64 {
    rustix::fs::makedev(major, minor)
}

fn nanoseconds(time: rustix::fs::StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(i64::from(time.tv_nsec))
}

/// Nanoseconds since 1970.
fn now() -> i64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

/// A version as seen at `now`: settled if its times lie further back than `settling`. A time in the
/// future is not.
fn version(modified: i64, changed: i64, now: i64, settling: i64) -> Version {
    Version { modified, changed, settled: now.saturating_sub(modified.max(changed)) > settling }
}

/// `STATX_DIOALIGN`, since Linux 6.1.
const STATX_DIOALIGN: u32 = 0x2000;

/// Local file systems stamp changes with the kernel's clock, which steps at most every 10 ms.
const SETTLING_LOCAL: i64 = 20_000_000;
/// Elsewhere the clock is another machine's or steps by whole seconds, 2 of them for FAT.
const SETTLING_REMOTE: i64 = 10_000_000_000;

/// ext2 to ext4, XFS, Btrfs, tmpfs, F2FS, ZFS, bcachefs, overlayfs: clocked by this kernel, to the nanosecond.
const LOCAL_FILE_SYSTEMS: [u64; 8] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0x2fc1_2fc1, 0xca45_1a4e, 0x794c_7630];

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

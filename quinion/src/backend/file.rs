//! Files of this machine: regular files and block devices.
//!
//! ```text
//!   Engine   one for a cache: a ring, or where the system refuses one a pool of threads
//!   LocalFile  a descriptor of our own, O_DIRECT where the file system says it can
//! ```
//!
//! Reading past the kernel's own cache (O_DIRECT) is what makes a cache of ours
//! worth its memory: the bytes are in one place. The kernel writes dirty pages
//! of its own back before it answers such a read, so what other programs wrote
//! is seen. Positions, lengths and addresses of fills are multiples of 4096,
//! which any device's alignment divides; a file system that wants more is read
//! through the kernel's cache.
//!
//! The end of a file needs no care here: a direct read that meets it is short,
//! and short is what [`Fill::complete`] is told.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags, fcntl_setfl, fstatfs, makedev, seek, statx,
};
use rustix::io::Errno;

use super::ring::Ring;
use super::threads::Pool;
use super::{Attributes, Backend, Fill, Identity, Reap, Reaped, Version, WaitRoom};

/// What reads the files of one cache.
#[derive(Clone, Debug)]
pub struct Engine {
    works: Arc<Works>,
}

/// How an [`Engine`] is built.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// The mechanism wanted.
    pub mechanism: Mechanism,
    /// Reads in flight at most; 128 if not said otherwise.
    pub queue_depth: u32,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { mechanism: Mechanism::Auto, queue_depth: 128 }
    }
}

/// How files are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mechanism {
    /// A ring if the system gives us one, else threads. The environment variable `QUINION_IO`, set to
    /// `ring` or `threads`, decides instead.
    #[default]
    Auto,
    /// io_uring; threads if there is none to be had.
    Ring,
    /// A pool of threads that call `pread`.
    Threads,
}

impl Mechanism {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Auto => "auto",
            Mechanism::Ring => "io_uring",
            Mechanism::Threads => "threads",
        }
    }
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one for each cache")]
enum Works {
    Ring(Ring),
    Threads(Pool),
}

/// Why a path or descriptor is not a file that can be cached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system would not open it.
    #[error(transparent)]
    System(#[from] io::Error),
    /// It is a directory.
    #[error("it is a directory; name a file in it")]
    Directory,
    /// It is of a kind that has no pages.
    #[error("it is a {kind}, which has no pages to cache; read it directly")]
    NotAFile {
        /// The kind, in words.
        kind: &'static str,
    },
    /// It lives on a file system whose files are made up as they are read.
    #[error("it lives on {file_system}, whose files have no fixed content or size; read it directly")]
    Pseudo {
        /// The file system's name.
        file_system: &'static str,
    },
}

impl Engine {
    /// An engine whose completions wake `room`. Tries the mechanism wanted and falls back to threads.
    pub fn new(room: Arc<WaitRoom>, options: EngineOptions) -> Self {
        let ring = match (options.mechanism, std::env::var("QUINION_IO").as_deref()) {
            (Mechanism::Threads, _) | (Mechanism::Auto, Ok("threads")) => None,
            _ => Ring::new(Arc::clone(&room), options.queue_depth).ok(),
        };
        let works = ring.map_or_else(|| Works::Threads(Pool::new()), Works::Ring);
        Self { works: Arc::new(works) }
    }

    /// The mechanism in use.
    pub fn mechanism(&self) -> Mechanism {
        match *self.works {
            Works::Ring(_) => Mechanism::Ring,
            Works::Threads(_) => Mechanism::Threads,
        }
    }

    /// Opens the file at `path` for reading. Does not hang on a pipe that nobody writes to.
    pub fn open(&self, path: &Path) -> Result<LocalFile, OpenError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?;
        self.adopt(file)
    }

    /// Reads through `file`, whose description is nobody else's: its flags are changed.
    pub fn adopt(&self, file: OwnedFd) -> Result<LocalFile, OpenError> {
        let known = stat(file.as_fd())?;
        let kind = FileType::from_raw_mode(u32::from(known.stx_mode));
        refuse_other_kinds(kind)?;
        if kind == FileType::RegularFile {
            refuse_pseudo(file.as_fd())?;
        }
        let direct = can_be_direct(&known) && fcntl_setfl(&file, OFlags::DIRECT).is_ok();
        if !direct {
            fcntl_setfl(&file, OFlags::empty()).map_err(io::Error::from)?; // without O_NONBLOCK
        }
        let block = kind == FileType::BlockDevice;
        let source = Arc::new(Source { file, direct: AtomicBool::new(direct), block });
        Ok(LocalFile { source, works: Arc::clone(&self.works) })
    }

    /// Waits until nothing is in flight.
    pub fn drain(&self) {
        match &*self.works {
            Works::Ring(ring) => ring.drain(),
            Works::Threads(pool) => pool.drain(),
        }
    }
}

fn refuse_other_kinds(kind: FileType) -> Result<(), OpenError> {
    let kind = match kind {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Directory => return Err(OpenError::Directory),
        FileType::Fifo => "pipe",
        FileType::Socket => "socket",
        FileType::CharacterDevice => "character device",
        _ => "thing of an unknown kind",
    };
    Err(OpenError::NotAFile { kind })
}

/// File systems by the numbers that `statfs` gives.
const PSEUDO: &[(u32, &str)] = &[
    (0x9fa0, "procfs"),
    (0x6265_6572, "sysfs"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x0027_e0eb, "cgroupfs"),
    (0x6367_7270, "cgroupfs"),
    (0x7363_6673, "securityfs"),
    (0x6265_6570, "configfs"),
    (0xcafe_4a11, "bpffs"),
    (0x6165_676c, "pstore"),
    (0xde5e_81e4, "efivarfs"),
    (0x4249_4e4d, "binfmt_misc"),
    (0xf97c_ff8c, "selinuxfs"),
    (0x6e73_6673, "nsfs"),
];

fn refuse_pseudo(file: BorrowedFd<'_>) -> Result<(), OpenError> {
    let number = fstatfs(file).map_err(io::Error::from)?.f_type as u32;
    match PSEUDO.iter().find(|(known, _)| *known == number) {
        Some((_, file_system)) => Err(OpenError::Pseudo { file_system }),
        None => Ok(()),
    }
}

fn stat(file: BorrowedFd<'_>) -> io::Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::DIOALIGN;
    Ok(statx(file, c"", AtFlags::EMPTY_PATH, wanted)?)
}

/// Whether the file system says that positions and addresses in multiples of 4096 will do; one that does
/// not say is believed until a read is refused.
fn can_be_direct(known: &Statx) -> bool {
    let said = known.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    let fits = |align: u32| (1..=4096).contains(&align);
    !said || (fits(known.stx_dio_offset_align) && fits(known.stx_dio_mem_align))
}

/// An open file, as the mechanisms see it.
#[derive(Debug)]
pub(super) struct Source {
    file: OwnedFd,
    direct: AtomicBool,
    block: bool,
}

impl Source {
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// What a read of `wanted` bytes, of which `done` are there, means by its `answer`.
    pub(super) fn judge(&self, answer: io::Result<usize>, done: usize, wanted: usize) -> Answer {
        match answer {
            Ok(0) => Answer::Done(done),
            Ok(bytes) if done + bytes >= wanted => Answer::Done(wanted),
            // Within a block: the file ends there. A direct read cannot be taken up again inside a block.
            Ok(bytes) if self.is_direct() && !(done + bytes).is_multiple_of(512) => {
                Answer::Done(done + bytes)
            }
            Ok(bytes) => Answer::Again(done + bytes),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INTR | Errno::AGAIN) => Answer::Again(done),
                Some(Errno::INVAL) if self.give_up_direct() => Answer::Again(0),
                _ => Answer::Failed(error),
            },
        }
    }

    fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Reads through the kernel's cache from now on; false if it does already.
    fn give_up_direct(&self) -> bool {
        self.direct.swap(false, Ordering::Relaxed) && fcntl_setfl(&self.file, OFlags::empty()).is_ok()
    }
}

/// What to do after a read has been answered.
pub(super) enum Answer {
    /// All there is: so many bytes.
    Done(usize),
    /// Read on, with so many bytes there.
    Again(usize),
    /// It failed.
    Failed(io::Error),
}

/// A regular file or block device of this machine.
#[derive(Clone)]
pub struct LocalFile {
    source: Arc<Source>,
    works: Arc<Works>,
}

impl LocalFile {
    /// Whether it is read past the kernel's cache.
    pub fn is_direct(&self) -> bool {
        self.source.is_direct()
    }
}

/// A change that is younger than this when it is looked at may be followed by one of the same time.
const CLOCK_STEP: Duration = Duration::from_millis(100);

impl Backend for LocalFile {
    fn name(&self) -> &'static str {
        match *self.works {
            Works::Ring(_) => Mechanism::Ring.name(),
            Works::Threads(_) => Mechanism::Threads.name(),
        }
    }

    fn attributes(&self) -> io::Result<Attributes> {
        let known = stat(self.source.file())?;
        let nanos = |t: rustix::fs::StatxTimestamp| t.tv_sec * 1_000_000_000 + i64::from(t.tv_nsec);
        let device = makedev; // the number that fstat gives, so that viewers can compare
        let (modified, changed) = (nanos(known.stx_mtime), nanos(known.stx_ctime));
        if self.source.block {
            // A device's inode says nothing of its content: it is what it was until it is opened anew.
            let identity =
                Identity { device: device(known.stx_rdev_major, known.stx_rdev_minor), inode: 0, born: -1 };
            let size = seek(self.source.file(), SeekFrom::End(0))?;
            let version = Version { modified: 0, changed: 0, settled: false };
            return Ok(Attributes { identity, version, size });
        }
        let born = if known.stx_mask & StatxFlags::BTIME.bits() == 0 { 0 } else { nanos(known.stx_btime) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let newest = Duration::from_nanos(modified.max(changed).max(0) as u64);
        Ok(Attributes {
            identity: Identity {
                device: device(known.stx_dev_major, known.stx_dev_minor),
                inode: known.stx_ino,
                born,
            },
            version: Version { modified, changed, settled: now.saturating_sub(newest) > CLOCK_STEP },
            size: known.stx_size,
        })
    }

    fn submit(&self, fills: Vec<Fill>) {
        match &*self.works {
            Works::Ring(ring) => ring.submit(&self.source, fills),
            Works::Threads(pool) => pool.submit(&self.source, fills),
        }
    }

    fn has_room(&self, fills: usize) -> bool {
        match &*self.works {
            Works::Ring(ring) => ring.has_room(fills),
            Works::Threads(_) => true,
        }
    }

    fn reap(&self, how: Reap, done: &mut dyn FnMut() -> bool) -> Reaped {
        match &*self.works {
            Works::Ring(ring) => ring.reap(how, done),
            Works::Threads(_) => Reaped::Elsewhere,
        }
    }

    fn wants_leader(&self) -> bool {
        match &*self.works {
            Works::Ring(ring) => ring.wants_leader(),
            Works::Threads(_) => false,
        }
    }
}

impl fmt::Debug for LocalFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalFile").field("source", &self.source).field("mechanism", &self.name()).finish()
    }
}

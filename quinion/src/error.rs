//! Errors: what was asked, what is wrong, what to do.
//!
//! Programs decide by [`Error::kind`]; the message is for people and ends with a remedy where there is one. An input or
//! output error keeps its source.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// An error of this library: the call that failed, and why. `Debug` prints the message as well, for `main`.
#[derive(thiserror::Error)]
#[error(transparent)]
pub struct Error(Box<Repr>);

/// The result of a call of this library.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an error; more kinds may come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A cache could not be built: its options are wrong, or the system refused.
    Build,
    /// A file could not be opened, or is of a kind that cannot be cached.
    Open,
    /// A device or file system failed. The next reader tries again; nothing of it was cached.
    Io,
    /// The bytes are not there and the call was told not to wait.
    WouldBlock,
    /// No page can be had: all are pinned, held or in flight, in the cache or its pool; or pins keep all they may.
    NoMemory,
    /// The cache belongs to the parent process.
    Forked,
    /// An argument is out of its range.
    InvalidInput,
    /// The file ends before the bytes that had to be there.
    UnexpectedEof,
    /// The file's backend does not do this.
    Unsupported,
    /// The file was opened for reading only, or is where nothing can be written.
    ReadOnly,
    /// The file, or its store, could not be changed. Earlier writes stay in the cache, and are tried again.
    Write,
    /// Written data is not known to be durable; it may be lost until a later sync returns `Ok`.
    Sync,
    /// As [`ErrorKind::Write`] or [`ErrorKind::Sync`], because there is no space left, or a quota is used up.
    NoSpace,
    /// Users' pins kept bytes for longer than the call was to wait.
    Busy,
    /// A file that had to stay as it was has changed, or become shorter.
    Changed,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Repr {
    #[error("cannot build a cache: {0}")]
    Build(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot open {}: {source}", path.display())]
    Open { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("cannot open {}: it is a directory; name a file in it", path.display())]
    IsDirectory { path: PathBuf },
    #[error(
        "cannot read {len} bytes at byte {position}: {source}; nothing was cached, a later read tries again"
    )]
    Read { position: u64, len: usize, source: io::Error },
    #[error("cannot read the file's size and times again: {0}; close it and open it again")]
    Attributes(#[source] io::Error),
    #[error(
        "cannot read at byte {position} without waiting: the bytes are not in the cache; \
         read without nowait and cached_only; or, after nowait, which has them fetched, again later"
    )]
    WouldBlock { position: u64 },
    #[error(
        "cannot cache byte {position}: all {pages} pages of the cache are pinned or in flight; \
         drop some pins, or build the cache with more memory"
    )]
    NoMemory { position: u64, pages: u64 },
    #[error(
        "cannot cache byte {position}: the pool \"{pool}\" has its limit of {limit} bytes, and all of it is \
         pinned or in flight; drop some pins, or raise the limit by Pool::set_limit"
    )]
    PoolFull { position: u64, pool: std::sync::Arc<str>, limit: u64 },
    #[error(
        "cannot pin {asked} bytes: pins keep {pinned} bytes already, folios counted whole, and may keep {max}; \
         drop some pins, pin less at a time, or build the cache with a larger pinned_max"
    )]
    TooMuchPinned { asked: u64, pinned: u64, max: u64 },
    #[error(
        "{name}: {source} (memory files are not evicted: punch or drop what is not needed, give the cache or the pool \
         more memory; what was written before is untouched)"
    )]
    MemFile { name: std::sync::Arc<str>, source: Box<Error> },
    #[error(
        "{name}: {source} ({trouble}: punch or drop what is not needed, give the cache more memory or a larger spill \
         file, or look after its disk; what was written before is untouched)"
    )]
    Spill { name: std::sync::Arc<str>, trouble: String, source: Box<Error> },
    #[error("cannot resize the cache: {0}")]
    Resize(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(
        "cannot have {bytes} bytes of guest memory: the cache may have {memory} in all, and that much is not free \
         in one piece; take guest memory before the cache is full, drop pins, or build it with more memory, or \
         with a memory_max that is larger than memory by as much"
    )]
    NoSpaceForGuest { bytes: u64, memory: u64 },
    #[error("cannot have {bytes} bytes of guest memory: {source}")]
    Guest { bytes: u64, source: Box<dyn std::error::Error + Send + Sync> },
    #[error(
        "cannot read byte {position} of the snapshot {name}: the file has changed since it was opened, and that page \
         was not in memory then; open it anew, and serve a copy that no program writes"
    )]
    SnapshotChanged { name: std::sync::Arc<str>, position: u64 },
    #[error(
        "cannot pin or read this range: a folio of it is held {holds} times already; drop some pins of it"
    )]
    TooManyPins { holds: u32 },
    #[error(
        "cannot use this cache: it belongs to the process that built it, and this is a fork of it; \
         build a cache after the fork, or open the file directly"
    )]
    Forked,
    #[error(
        "cannot start the thread that waits for all pending reads: {0}; allow this process one thread more, \
         or use the calls that wait"
    )]
    NoThread(#[source] io::Error),
    #[error(
        "cannot read: the file's backend panicked while a read waited for it; \
         see its panic message on standard error"
    )]
    Panicked,
    #[error("{0}")]
    InvalidInput(String),
    #[error(
        "cannot read {len} bytes at byte {position}: the file ends at byte {size}; ask for less, or use read_at, which \
         returns what there is"
    )]
    UnexpectedEof { position: u64, len: usize, size: u64 },
    #[error(
        "cannot lock the file: {0}; call again, or lock another file beside it if this file system has no locks"
    )]
    Lock(#[source] io::Error),
    #[error(
        "cannot lock the file: the backend \"{backend}\" has no descriptor of the system; use a lock of your own, \
         such as one on a local file"
    )]
    CannotLock { backend: &'static str },
    #[error(
        "cannot read uncached: the backend \"{backend}\" of this file does not support that; read without `uncached`, \
         and drop what is not needed by dont_need"
    )]
    CannotDropBehind { backend: &'static str },
    #[error(
        "cannot change the file: it was opened for reading only; open it by Cache::open_with, with \
         OpenOptions::new().write(true)"
    )]
    ReadOnly,
    #[error(
        "cannot open the file for writing: its backend \"{backend}\" only reads; open it for reading, or give the \
         cache one that writes"
    )]
    CannotWrite { backend: &'static str },
    #[error(
        "cannot write {len} bytes at byte {position}: what was written to this file before cannot be written back: \
         {source}; nothing of it is lost: fix the cause, then sync again, or write later"
    )]
    Write { position: u64, len: usize, source: io::Error },
    #[error("cannot write at byte {position}: {why}")]
    WriteAgain { position: u64, why: &'static str },
    #[error(
        "cannot fill {len} bytes at byte {position} from their source: {source}; what came before them is in place, \
         fill the rest again"
    )]
    Populate { position: u64, len: usize, source: io::Error },
    #[error(
        "cannot write at byte {position}: the file is a device of {size} bytes, which does not grow; write inside it"
    )]
    DeviceEnds { position: u64, size: u64 },
    #[error(
        "cannot make durable what was written: {source}; what is still cached is written again by the next sync, \
         and may be lost with the machine until then"
    )]
    Sync { source: Box<dyn std::error::Error + Send + Sync> },
    #[error(
        "cannot give the file {bytes} bytes: {source}; its size is what it was, and the call can be made again"
    )]
    SetSize { bytes: u64, source: io::Error },
    #[error(
        "cannot punch {len} bytes at byte {position}: {source}; some of them may read as zeros now; punch them again"
    )]
    Punch { position: u64, len: u64, source: io::Error },
    #[error(
        "cannot keep space for {len} bytes at byte {position}: {source}; writes go on, and the sync of one that \
         finds no space says so"
    )]
    Allocate { position: u64, len: u64, source: io::Error },
    #[error(
        "cannot write at byte {position}: its bytes stayed pinned for as long as the call may wait; drop the pins, or \
         open the file with OnPinned::Detach"
    )]
    Pinned { position: u64 },
}

impl Error {
    /// The file at `path` cannot be opened, or nothing can be made there.
    pub(crate) fn cannot_open(
        path: &std::path::Path,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Repr::Open { path: path.to_owned(), source: source.into() }.into()
    }

    /// An argument is out of its range; the text says what was asked, what is wrong and what to do.
    pub(crate) fn invalid_input(text: impl Into<String>) -> Self {
        Repr::InvalidInput(text.into()).into()
    }
}

impl Error {
    pub(crate) fn would_block_at(&self) -> Option<u64> {
        match *self.0 {
            Repr::WouldBlock { position } => Some(position),
            _ => None,
        }
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match *self.0 {
            Repr::Build(_) => ErrorKind::Build,
            Repr::Open { .. } | Repr::IsDirectory { .. } => ErrorKind::Open,
            Repr::Read { .. } | Repr::Attributes(_) | Repr::Lock(_) | Repr::NoThread(_) | Repr::Panicked => {
                ErrorKind::Io
            }
            Repr::WouldBlock { .. } => ErrorKind::WouldBlock,
            Repr::SnapshotChanged { .. } => ErrorKind::Changed,
            Repr::NoMemory { .. }
            | Repr::NoSpaceForGuest { .. }
            | Repr::Guest { .. }
            | Repr::PoolFull { .. }
            | Repr::TooManyPins { .. }
            | Repr::TooMuchPinned { .. } => ErrorKind::NoMemory,
            Repr::MemFile { ref source, .. } | Repr::Spill { ref source, .. } => source.kind(),
            Repr::Forked => ErrorKind::Forked,
            Repr::InvalidInput(_) | Repr::Resize(_) => ErrorKind::InvalidInput,
            Repr::UnexpectedEof { .. } => ErrorKind::UnexpectedEof,
            Repr::CannotDropBehind { .. } | Repr::CannotLock { .. } => ErrorKind::Unsupported,
            Repr::ReadOnly | Repr::CannotWrite { .. } => ErrorKind::ReadOnly,
            Repr::DeviceEnds { .. } => ErrorKind::NoSpace,
            Repr::Sync { .. } => self.kind_of_change(ErrorKind::Sync),
            Repr::Write { .. }
            | Repr::WriteAgain { .. }
            | Repr::Populate { .. }
            | Repr::SetSize { .. }
            | Repr::Punch { .. }
            | Repr::Allocate { .. } => self.kind_of_change(ErrorKind::Write),
            Repr::Pinned { .. } => ErrorKind::Busy,
        }
    }

    pub(crate) fn is_of_memory(&self) -> bool {
        matches!(*self.0, Repr::NoMemory { .. } | Repr::PoolFull { .. })
    }

    /// `kind`, unless the system's error says more.
    fn kind_of_change(&self, kind: ErrorKind) -> ErrorKind {
        match self.cause() {
            Some(cause) if matches!(cause.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {
                ErrorKind::NoSpace
            }
            Some(cause) if cause.raw_os_error() == Some(libc::EROFS) => ErrorKind::ReadOnly,
            Some(cause) if cause.kind() == io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => kind,
        }
    }

    /// The system's error number, where a system call was the cause.
    pub fn raw_os_error(&self) -> Option<i32> {
        self.cause()?.raw_os_error()
    }

    fn cause(&self) -> Option<&io::Error> {
        let mut source: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(self);
        while let Some(error) = source {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return Some(io);
            }
            source = error.source();
        }
        None
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({:?})", self.kind())
    }
}

impl From<Repr> for Error {
    fn from(repr: Repr) -> Self {
        Self(Box::new(repr))
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::WouldBlock => io::ErrorKind::WouldBlock,
            ErrorKind::NoMemory => io::ErrorKind::OutOfMemory,
            ErrorKind::InvalidInput => io::ErrorKind::InvalidInput,
            ErrorKind::UnexpectedEof => io::ErrorKind::UnexpectedEof,
            ErrorKind::Open if matches!(*error.0, Repr::IsDirectory { .. }) => io::ErrorKind::IsADirectory,
            ErrorKind::Forked | ErrorKind::Unsupported => io::ErrorKind::Unsupported,
            // Nothing is wrong with the file system if it is the handle that does not write.
            ErrorKind::ReadOnly if error.raw_os_error().is_none() => io::ErrorKind::PermissionDenied,
            ErrorKind::Busy => io::ErrorKind::ResourceBusy,
            ErrorKind::NoSpace if error.raw_os_error().is_none() => io::ErrorKind::StorageFull,
            _ => error
                .raw_os_error()
                .map_or(io::ErrorKind::Other, |code| io::Error::from_raw_os_error(code).kind()),
        };
        io::Error::new(kind, error)
    }
}

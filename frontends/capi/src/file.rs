//! Files: of the system, of a backend, in memory, or a server's. One type of handle for all of them.
//!
//! | source | made by | reads | writes |
//! |---|---|---|---|
//! | a file of the cache | `qn_open`, `qn_open_fd`, `qn_open_backend` | yes | if it was opened so |
//! | a memory file | `qn_memory_file` | yes | yes |
//! | a file or object of a server | `qn_client_open` | yes | no |
//!
//! What a source does not do is -EOPNOTSUPP, with words.
//!
//! Invariant: a read takes an offset, and a handle has no position; so threads may share it.

use std::any::Any;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use quinion::internals::sys::fork::ForkGuard;
use quinion::{Cache, Coherence, Durability, File, Hint, MemFile, OpenOptions, ReadOptions};
use quinion_service::ClientFile;

use crate::args::{self, Handle, VersionedStruct, check_flags, check_range, count};
use crate::cache::{path_of, qn_cache};
use crate::ffi::{Failure, Result, ffi_call};
use crate::pool::qn_pool;

/// An open file, made by qn_open(), qn_open_fd(), qn_open_backend(), qn_memory_file() or qn_client_open().
pub struct qn_file {
    pub(crate) source: Source,
    /// The cache by which batches of its reads go.
    pub(crate) cache: Option<Cache>,
    /// The caller's backend that it was opened with: released at the earliest when this is closed.
    _backend: Option<Arc<dyn Any + Send + Sync>>,
    process: ForkGuard,
}

#[allow(clippy::large_enum_variant, reason = "a box would cost each hit a load, and handles are few")]
pub(crate) enum Source {
    Cached(File),
    Memory(MemFile),
    Served(ClientFile),
}

impl Handle for qn_file {
    fn process(&self) -> ForkGuard {
        self.process
    }
}

impl From<Source> for qn_file {
    fn from(source: Source) -> Self {
        Self { source, cache: None, _backend: None, process: ForkGuard::new() }
    }
}

impl qn_file {
    pub(crate) fn of_cache(file: File, cache: &qn_cache) -> Self {
        Self { cache: Some(cache.cache().clone()), ..Self::from(Source::Cached(file)) }
    }

    pub(crate) fn of_backend(file: File, cache: &qn_cache, backend: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _backend: Some(backend), ..Self::of_cache(file, cache) }
    }
}

/// qn_open_options.flags: the file may be written as well.
pub const QN_OPEN_WRITE: u32 = 1;
/// qn_open_options.flags: the same as QN_OPEN_WRITE. qn_append() goes to the end by every handle that may write, and
/// qn_pwrite() to its offset, by this one, too; pwrite(2) with O_APPEND would not.
pub const QN_OPEN_APPEND: u32 = 2;
/// qn_open_options.flags: make the file if there is none.
pub const QN_OPEN_CREATE: u32 = 4;
/// qn_open_options.flags: make the file, and fail if there is one.
pub const QN_OPEN_CREATE_NEW: u32 = 8;
/// qn_open_options.flags: cut the file to nothing.
pub const QN_OPEN_TRUNCATE: u32 = 16;
/// qn_open_options.flags: reads and writes leave nothing in the cache that other readers do not use.
pub const QN_OPEN_UNCACHED: u32 = 32;

/// qn_open_options.coherence: an open sees what was written and closed before it.
pub const QN_COHERENCE_CHECK: u32 = 0;
/// qn_open_options.coherence: a read also looks whether the file changed, if the last look is older than check_ms.
pub const QN_COHERENCE_CHECK_EVERY: u32 = 1;
/// qn_open_options.coherence: a read lease of the kernel, so that no read returns old bytes; without one, a look
/// before each read.
pub const QN_COHERENCE_LEASE: u32 = 2;
/// qn_open_options.coherence: the file never changes, and is not looked at again.
pub const QN_COHERENCE_IMMUTABLE: u32 = 3;

/// qn_open_options.durability: what was written is durable after qn_sync().
pub const QN_DURABLE_ON_SYNC: u32 = 0;
/// qn_open_options.durability: each write is durable when it returns, as with O_DSYNC.
pub const QN_DURABLE_DATA: u32 = 1;
/// qn_open_options.durability: the same with all attributes, as with O_SYNC.
pub const QN_DURABLE_ALL: u32 = 2;

/// How a file is to be opened. All zero but the size are the defaults: to read, as QN_COHERENCE_CHECK says.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_open_options {
    /// sizeof(struct qn_open_options).
    pub size: usize,
    /// QN_OPEN_... flags.
    pub flags: u32,
    /// The permissions of a file that is made, less the umask. 0: 0666.
    pub mode: u32,
    /// QN_COHERENCE_...
    pub coherence: u32,
    /// With QN_COHERENCE_CHECK_EVERY, in milliseconds; 0 looks before each read.
    pub check_ms: u32,
    /// QN_DURABLE_...
    pub durability: u32,
    /// 0.
    pub reserved: u32,
    /// The pool that its pages belong to, and whose cache is used then; NULL: the default pool of the cache.
    pub pool: *const qn_pool,
}

// SAFETY: numbers and a pointer without padding.
unsafe impl VersionedStruct for qn_open_options {
    const NAME: &'static str = "qn_open_options";
}

pub(crate) fn open_options(options: &qn_open_options) -> Result<OpenOptions> {
    check_flags(options.flags, 2 * QN_OPEN_UNCACHED - 1, "a struct qn_open_options")?;
    if options.reserved != 0 {
        return Err(Failure::invalid("the field reserved of a struct qn_open_options is not 0; set it to 0"));
    }
    let has = |flag| options.flags & flag != 0;
    let mut wanted = OpenOptions::new();
    wanted.write(has(QN_OPEN_WRITE)).append(has(QN_OPEN_APPEND)).create(has(QN_OPEN_CREATE));
    wanted.create_new(has(QN_OPEN_CREATE_NEW)).truncate(has(QN_OPEN_TRUNCATE));
    wanted.uncached(has(QN_OPEN_UNCACHED));
    if options.mode != 0 {
        wanted.mode(options.mode);
    }
    wanted.coherence(match options.coherence {
        QN_COHERENCE_CHECK => Coherence::Check,
        QN_COHERENCE_CHECK_EVERY => Coherence::CheckEvery(args::milliseconds(options.check_ms.into())),
        QN_COHERENCE_LEASE => Coherence::Lease,
        QN_COHERENCE_IMMUTABLE => Coherence::Immutable,
        other => return Err(args::unknown("the coherence", other)),
    });
    wanted.durability(match options.durability {
        QN_DURABLE_ON_SYNC => Durability::OnSync,
        QN_DURABLE_DATA => Durability::Data,
        QN_DURABLE_ALL => Durability::All,
        other => return Err(args::unknown("the durability", other)),
    });
    Ok(wanted)
}

pub(crate) struct OpenRequest<'a> {
    pub(crate) cache: &'a qn_cache,
    pub(crate) options: OpenOptions,
    pub(crate) pool: Option<&'a qn_pool>,
}

impl OpenRequest<'_> {
    pub(crate) unsafe fn of(cache: *const qn_cache, options: *const qn_open_options) -> Result<Self> {
        // SAFETY: as the caller's.
        let (cache, options) = unsafe { (args::handle(cache, "the cache")?, args::options(options)?) };
        // SAFETY: as the caller's.
        let pool = unsafe { options.pool.as_ref() };
        Ok(Self { cache, options: open_options(&options)?, pool })
    }
}

/// Opens a file of the system through a cache.
///
/// Regular files and block devices can be opened. options may be NULL. *file is yours until qn_close(), and keeps the
/// cache. All handles of a file share its pages: what one writes the others read at once. Blocks as open(2) does.
///
/// Errors: those of open(2), as -ENOENT and -EACCES; -EISDIR; -EINVAL (an argument, or a pipe, a socket, a terminal
/// or a file of procfs, which cannot be cached); -ENOBUFS (no memory for another file); -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_open(
    cache: *const qn_cache,
    path: *const c_char,
    options: *const qn_open_options,
    file: *mut *mut qn_file,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, path) = unsafe { (args::out(file)?, path_of(path, "the path")?) };
        // SAFETY: the caller's contract.
        let OpenRequest { cache, options, pool } = unsafe { OpenRequest::of(cache, options) }?;
        let file = match pool {
            Some(pool) => pool.pool.open_with(path, &options),
            None => cache.cache().open_with(path, &options),
        };
        args::give_handle(place, qn_file::of_cache(file?, cache));
        Ok(0)
    })
}

/// Opens the file that a descriptor is open of, as qn_open() does by a path.
///
/// The descriptor stays the caller's, and may be closed after the call.
///
/// Errors: -EBADF (not a descriptor); those of qn_open().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_open_fd(
    cache: *const qn_cache,
    fd: c_int,
    options: *const qn_open_options,
    file: *mut *mut qn_file,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let place = unsafe { args::out(file) }?;
        // SAFETY: the call takes any number.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            let text = format!("cannot open the file of descriptor {fd}: it is not open; pass one that is");
            return Err(Failure::new(libc::EBADF, text));
        }
        // SAFETY: the caller's contract.
        let OpenRequest { cache, options, pool } = unsafe { OpenRequest::of(cache, options) }?;
        // SAFETY: it was open just now, and the caller does not close it during the call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
        let file = match pool {
            Some(pool) => pool.pool.adopt_with(descriptor, &options),
            None => cache.cache().adopt_with(descriptor, &options),
        };
        args::give_handle(place, qn_file::of_cache(file?, cache));
        Ok(0)
    })
}

/// Gives a file's handle back. Written bytes stay in the cache, and are written to the file in the background.
///
/// It makes nothing durable that you may rely on: call qn_sync() before, and look at what it returns. Pins of the file
/// stay. May block for locks; for the device if a memory file has a spill file, or if many closed files were written
/// and not synced: then it syncs some of them, and so may call the sync of other backends. No call may use the handle
/// after it.
///
/// Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_close(file: *mut qn_file) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        drop(unsafe { args::take_handle(file, "the file") }?);
        Ok(0)
    })
}

/// qn_pread_with() and qn_pread_batch(): do not wait, for a device or a lock.
pub const QN_READ_NOWAIT: u32 = 1;
/// qn_pread_with() and qn_pread_batch(): start no input or output, and read what is cached.
pub const QN_READ_CACHED_ONLY: u32 = 2;
/// qn_pread_with() and qn_pread_batch(): leave nothing in the cache that other readers do not use.
pub const QN_READ_UNCACHED: u32 = 4;

pub(crate) fn read_options(flags: u32) -> Result<ReadOptions> {
    check_flags(flags, 2 * QN_READ_UNCACHED - 1, "a read")?;
    let has = |flag| flags & flag != 0;
    let options = ReadOptions::new().nowait(has(QN_READ_NOWAIT)).cached_only(has(QN_READ_CACHED_ONLY));
    Ok(options.uncached(has(QN_READ_UNCACHED)))
}

impl qn_file {
    #[inline(always)]
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<i64> {
        let read = match &self.source {
            Source::Cached(file) => file.read_at(buffer, offset)?,
            source => source.read_slowly(buffer, offset)?,
        };
        Ok(read as i64)
    }

    pub(crate) fn read_with(&self, buffer: &mut [u8], offset: u64, options: ReadOptions) -> Result<i64> {
        let read = match &self.source {
            Source::Cached(file) => file.read_at_with(buffer, offset, options)?,
            source if options == ReadOptions::new() => source.read_slowly(buffer, offset)?,
            source => return Err(source.unsupported("a read with flags", "read with qn_pread()")),
        };
        Ok(read as i64)
    }
}

impl Source {
    #[inline(never)]
    fn read_slowly(&self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        Ok(match self {
            Source::Cached(file) => file.read_at(buffer, offset)?,
            Source::Memory(file) => file.read_at(buffer, offset)?,
            Source::Served(file) => file.read_at(buffer, offset)?,
        })
    }

    #[cold]
    pub(crate) fn unsupported(&self, what: &str, instead: &str) -> Failure {
        let kind = match self {
            Source::Cached(_) => "a file of the cache",
            Source::Memory(_) => "a memory file",
            Source::Served(_) => "a file of a server",
        };
        Failure::new(libc::EOPNOTSUPP, format!("{kind} does not support {what}; {instead}"))
    }
}

/// Reads up to length bytes at byte offset into buffer, and returns how many: fewer only at the end of the file, or if
/// something went wrong after some of them, which the next call tells. 0: the end, or a length of 0.
///
/// A hit takes no lock and makes no system call. A miss blocks for the device, the backend or the server. It is not
/// interrupted by signals. buffer may be NULL if length is 0.
///
/// Errors: -EIO or what the device or backend says (nothing was cached, a later read tries again); -ENOBUFS (all pages
/// are pinned or in flight); -EINVAL; -ECHILD. Of a server's file also -ESTALE (the object was replaced), -EREMOTEIO
/// (the store failed), -ECONNRESET (the server has ended), -ETIMEDOUT. buffer may have been written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pread(
    file: *const qn_file,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (file, buffer) =
            unsafe { (args::handle(file, "the file")?, args::buffer(buffer, length, offset)?) };
        file.read(buffer, offset)
    })
}

/// As qn_pread(), with QN_READ_... flags, which files of a cache know.
///
/// Errors: those of qn_pread(); -EAGAIN (not even the first byte can be had without what the flags forbid); -EOPNOTSUPP
/// (a memory file, or one of a server).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pread_with(
    file: *const qn_file,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
    flags: u32,
) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (file, buffer) =
            unsafe { (args::handle(file, "the file")?, args::buffer(buffer, length, offset)?) };
        file.read_with(buffer, offset, read_options(flags)?)
    })
}

const READ_ONLY: (&str, &str) = ("writes", "write through the file's own store or file system");

/// Writes length bytes at byte offset, and returns how many: fewer only if something went wrong after some of them.
/// Bytes behind the end make the file longer, with zeros between.
///
/// The bytes are in the cache then, for all its readers; qn_sync() makes them durable. May block: for memory, for the
/// page that is written in part, and a little while too much is dirty. buffer may be NULL if length is 0.
///
/// Errors: -EBADF (opened for reading only), -EROFS, -ENOSPC and other numbers of the system, -EIO (earlier writes
/// cannot be written back), -ENOBUFS, -EBUSY (pins), -EOPNOTSUPP, -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pwrite(
    file: *const qn_file,
    buffer: *const c_void,
    length: usize,
    offset: u64,
) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (file, bytes) =
            unsafe { (args::handle(file, "the file")?, args::bytes(buffer, length, offset)?) };
        let written = match &file.source {
            Source::Cached(file) => file.write_at(bytes, offset)?,
            Source::Memory(file) => file.write_at(bytes, offset)?,
            source => return Err(source.unsupported(READ_ONLY.0, READ_ONLY.1)),
        };
        Ok(written as i64)
    })
}

/// Writes length bytes at the end of the file, all of them, and returns the byte at which they begin.
///
/// Appends of all handles of one cache follow each other. Blocks as qn_pwrite() does.
///
/// Errors: those of qn_pwrite().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_append(file: *const qn_file, buffer: *const c_void, length: usize) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (file, bytes) = unsafe { (args::handle(file, "the file")?, args::bytes(buffer, length, 0)?) };
        Ok(count(match &file.source {
            Source::Cached(file) => file.append(bytes)?,
            Source::Memory(file) => file.append(bytes)?,
            source => return Err(source.unsupported(READ_ONLY.0, READ_ONLY.1)),
        }))
    })
}

/// qn_sync(): the bytes, and what of the attributes is needed to read them, as fdatasync(2).
pub const QN_SYNC_DATA: u32 = 0;
/// qn_sync(): the bytes and all attributes, as fsync(2).
pub const QN_SYNC_ALL: u32 = 1;

/// Makes durable what was written to a file before the call, by any handle of the cache: QN_SYNC_DATA or QN_SYNC_ALL.
///
/// 0 is true whatever failed before. An error of writing is told to each handle once. After an error the bytes stay in
/// the cache, and the next sync tries them again. Of a memory file it does nothing. Blocks for the device.
///
/// Errors: -EIO, -ENOSPC and other numbers of the system; -EOPNOTSUPP (a file of a server), -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_sync(file: *const qn_file, kind: u32) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        match (&file.source, kind) {
            (Source::Cached(file), QN_SYNC_DATA) => file.sync_data()?,
            (Source::Cached(file), QN_SYNC_ALL) => file.sync_all()?,
            (Source::Memory(_), QN_SYNC_DATA | QN_SYNC_ALL) => {}
            (source, QN_SYNC_DATA | QN_SYNC_ALL) => {
                return Err(source.unsupported(READ_ONLY.0, READ_ONLY.1));
            }
            (_, other) => return Err(args::unknown("the kind of sync", other)),
        }
        Ok(0)
    })
}

/// Gives a file a length in bytes: cuts it, or makes it longer with zeros. Blocks for the device.
///
/// Errors: those of qn_pwrite(); the length is what it was then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_truncate(file: *const qn_file, length: u64) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        check_range(0, length)?;
        match &file.source {
            Source::Cached(file) => file.set_len(length)?,
            Source::Memory(file) => file.set_len(length)?,
            source => return Err(source.unsupported(READ_ONLY.0, READ_ONLY.1)),
        }
        Ok(0)
    })
}

/// The length of a file in bytes, as far as the cache knows it: what was written through it counts. Does not block.
///
/// Errors: -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_length(file: *const qn_file) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        if file.process.is_forked() {
            let text =
                "the length of a file was asked for in a forked child; open a cache of the child's own";
            return Err(Failure::new(libc::ECHILD, text));
        }
        Ok(count(match &file.source {
            Source::Cached(file) => file.len(),
            Source::Memory(file) => file.len(),
            Source::Served(file) => file.len(),
        }))
    })
}

/// Makes length bytes at byte offset a hole, which reads as zeros. The file's length does not change. Blocks for the
/// device.
///
/// Errors: those of qn_pwrite(); some of the bytes may read as zeros then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_punch_hole(file: *const qn_file, offset: u64, length: u64) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        check_range(offset, length)?;
        match &file.source {
            Source::Cached(file) => file.punch_hole(offset, length)?,
            Source::Memory(file) => file.punch_hole(offset, length)?,
            source => return Err(source.unsupported(READ_ONLY.0, READ_ONLY.1)),
        }
        Ok(0)
    })
}

/// Reserves space for length bytes at byte offset: on the file system, as fallocate(2) with FALLOC_FL_KEEP_SIZE, or in
/// memory for a memory file. Neither bytes nor length change. Blocks for the device.
///
/// Errors: those of qn_pwrite(); -EINVAL also if the bytes are not all of a memory file: qn_truncate() makes it longer;
/// -EOPNOTSUPP (a backend of functions, or a file system that reserves nothing).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_allocate(file: *const qn_file, offset: u64, length: u64) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        check_range(offset, length)?;
        match &file.source {
            Source::Cached(file) => file.allocate(offset, length)?,
            Source::Memory(file) => file.preallocate(offset, length)?,
            source => return Err(source.unsupported(READ_ONLY.0, READ_ONLY.1)),
        }
        Ok(0)
    })
}

/// Starts to read length bytes at byte offset into the cache, as far as they are not there, and does not wait for
/// them. Returns how many bytes were started; of a server's file, which does not say that, 0. May wait for locks.
///
/// Errors: -EOPNOTSUPP (a memory file), -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_will_need(file: *const qn_file, offset: u64, length: u64) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        check_range(offset, length)?;
        match &file.source {
            Source::Cached(file) => Ok(count(file.will_need(offset, length)?.started_pages * 4096)),
            Source::Served(file) => {
                file.prefetch(offset..offset + length)?;
                Ok(0)
            }
            source => Err(source.unsupported("hints", "its bytes are in memory; read them")),
        }
    })
}

/// Drops what of length bytes at byte offset is cached, clean and not pinned. Returns how many bytes were dropped. May
/// wait for locks.
///
/// Errors: -EOPNOTSUPP (a memory file, or one of a server), -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_dont_need(file: *const qn_file, offset: u64, length: u64) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        check_range(offset, length)?;
        match &file.source {
            Source::Cached(file) => Ok(count(file.dont_need(offset, length)? * 4096)),
            source => Err(source.unsupported("dropping pages", "punch a hole, or leave it to eviction")),
        }
    })
}

/// qn_advise(): no particular pattern.
pub const QN_ADVICE_NORMAL: u32 = 0;
/// qn_advise(): from the beginning to the end; larger readahead windows.
pub const QN_ADVICE_SEQUENTIAL: u32 = 1;
/// qn_advise(): no readahead.
pub const QN_ADVICE_RANDOM: u32 = 2;
/// qn_advise(): what is read is not read again.
pub const QN_ADVICE_NO_REUSE: u32 = 3;

/// Tells how this handle will be read: QN_ADVICE_... May wait for a read of the same handle.
///
/// Errors: -EOPNOTSUPP (a memory file, or one of a server), -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_advise(file: *const qn_file, advice: u32) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        let hint = match advice {
            QN_ADVICE_NORMAL => Hint::Normal,
            QN_ADVICE_SEQUENTIAL => Hint::Sequential,
            QN_ADVICE_RANDOM => Hint::Random,
            QN_ADVICE_NO_REUSE => Hint::NoReuse,
            other => return Err(args::unknown("the advice", other)),
        };
        match &file.source {
            Source::Cached(file) => file.advise(hint)?,
            source => return Err(source.unsupported("advice", "read it as you like")),
        }
        Ok(0)
    })
}

/// Looks whether another process has changed a file since its pages were cached, and forgets its clean pages if so.
/// Returns 1 then, also if the last change is too recent to tell; else 0. Blocks as fstat(2) does.
///
/// Errors: -EOPNOTSUPP (a memory file, or one of a server), -EIO and other numbers of the system, -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_revalidate(file: *const qn_file) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let file = unsafe { args::handle(file, "the file") }?;
        match &file.source {
            Source::Cached(file) => Ok(c_int::from(file.revalidate()?)),
            source => Err(source.unsupported("looking for changes", "its bytes do not change outside")),
        }
    })
}

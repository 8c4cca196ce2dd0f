//! Backends: where a file's bytes come from and go to, by functions of the caller's.
//!
//! ```text
//!   qn_open_backend       this thread: attributes()
//!   a miss, write-back    threads of the library, as many as asked for: read(), write()
//!   qn_sync, qn_truncate  the thread that calls: sync(), truncate(), attributes()
//!   qn_close              the thread that calls: sync() of files that were closed before, if many were not synced
//!   the end               any thread, once: release()
//! ```
//!
//! What a function returns is checked before it is used: more bytes than asked for, or a number that is no errno, is
//! -EIO. A panic of a callback that is written in Rust ends at `guarded`, and is -EIO too. An exception of C++ must not
//! leave a callback: the process ends then.
//!
//! Invariants:
//!  1. `release` is called once if the open succeeded, after all other calls have returned and the file was closed; and
//!     never if it failed.
//!  2. A backend's identity is a digest's (`Identity::of_digest`), so it is never that of a file of the system.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quinion::backend::{
    Attributes, BlockingSource, Identity, ReadAt, SyncKind, ThreadPool, Version, WaitQueue, WriteAt,
};

use crate::args::{self, VersionedStruct};
use crate::cache::qn_cache;
use crate::ffi::{Failure, ffi_call, guarded};
use crate::file::{OpenRequest, QN_SYNC_ALL, QN_SYNC_DATA, qn_file, qn_open_options};

/// Attributes of a backend's bytes at one moment.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_attributes {
    /// sizeof(struct qn_attributes) of the library that calls, set by it; to be left as it is.
    pub size: usize,
    /// How many bytes there are.
    pub length: u64,
    /// Which file it is: two opens with one identity share pages, and two different files must have different ones.
    pub identity: [u64; 2],
    /// Which content it has: another number after each change that was made elsewhere.
    pub version: i64,
}

// SAFETY: numbers without padding.
unsafe impl VersionedStruct for qn_attributes {
    const NAME: &'static str = "qn_attributes";
}

/// Functions that read and write a file in place of the system's.
///
/// They are called by several threads at a time, among them the library's own, which have all signals blocked. They may
/// block. They return a negative errno if they fail; -EINTR means that the call is to be made again. They must not call
/// this library for the same cache, not throw, not longjmp and not end the process.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_backend {
    /// sizeof(struct qn_backend).
    pub size: usize,
    /// Passed to each function.
    pub context: *mut c_void,
    /// Reads up to length bytes at byte offset into buffer, and returns how many: 0 only at the end.
    pub read: Option<
        unsafe extern "C-unwind" fn(
            context: *mut c_void,
            buffer: *mut c_void,
            length: usize,
            offset: u64,
        ) -> i64,
    >,
    /// Says what the bytes are: fills *attributes, whose size is set.
    pub attributes:
        Option<unsafe extern "C-unwind" fn(context: *mut c_void, attributes: *mut qn_attributes) -> c_int>,
    /// Writes up to length bytes at byte offset, and returns how many, not 0. Bytes behind the end make the file
    /// longer, with zeros between. NULL: the file is read only; then sync and truncate are NULL, too.
    pub write: Option<
        unsafe extern "C-unwind" fn(
            context: *mut c_void,
            buffer: *const c_void,
            length: usize,
            offset: u64,
        ) -> i64,
    >,
    /// Makes durable what was written before the call: QN_SYNC_DATA or QN_SYNC_ALL, at least length bytes at offset.
    /// qn_close() of another file may call it, too: hold no lock there that this takes.
    pub sync: Option<
        unsafe extern "C-unwind" fn(context: *mut c_void, kind: u32, offset: u64, length: u64) -> c_int,
    >,
    /// Cuts the bytes, or adds zeros.
    pub truncate: Option<unsafe extern "C-unwind" fn(context: *mut c_void, length: u64) -> c_int>,
    /// Called once for each open that succeeded, when no function of this backend will be called any more; may be
    /// NULL. It comes in qn_close() or long after it, because the cache keeps pages of closed files. It reads and
    /// writes a file by the first backend that it was opened with. A thread of the library may call it, shortly after
    /// the call that ended the cache has returned. Free the context here, and not before. If two opens have one
    /// context, it must last until both were released: count them.
    pub release: Option<unsafe extern "C-unwind" fn(context: *mut c_void)>,
    /// How many threads of the library may be in read and write at a time. 0: 4.
    pub threads: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: numbers, pointers and functions that may be NULL, without padding.
unsafe impl VersionedStruct for qn_backend {
    const NAME: &'static str = "qn_backend";
}

const THREADS: u32 = 4;
const THREADS_MAX: u32 = 1024;
/// More fills than this wait in the cache, and not in the queue of the threads.
const QUEUE_MAX: usize = 256;
/// No negative errno is less.
const ERRNO_LEAST: i64 = -4095;

struct Callbacks(Arc<Context>);

struct Context {
    functions: qn_backend,
    /// Whether the open has succeeded: then the library owns the context, and releases it.
    is_ours: AtomicBool,
}

// SAFETY: the context is passed to functions that several threads may call, by the caller's contract.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        let qn_backend { release, context, .. } = self.functions;
        // Relaxed: the counts of the `Arc` order this behind the store in `qn_open_backend`.
        if let (Some(release), true) = (release, self.is_ours.load(Ordering::Relaxed)) {
            let call = || {
                // SAFETY: the caller's contract; nothing else has the context any more.
                unsafe { release(context) };
                Ok(())
            };
            let _ = guarded(call);
        }
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("context", &self.0.functions.context).finish_non_exhaustive()
    }
}

/// The value that a function returned, as a count of at most `most` bytes.
fn counted(answer: i64, most: usize, name: &str) -> io::Result<usize> {
    match usize::try_from(answer) {
        Ok(bytes) if bytes <= most => Ok(bytes),
        Ok(bytes) => Err(io::Error::other(format!(
            "the backend's {name} returned {bytes} bytes for {most}; it must return no more than it was asked for"
        ))),
        Err(_) => Err(error_of(answer, name)),
    }
}

fn error_of(answer: i64, name: &str) -> io::Error {
    match answer {
        ERRNO_LEAST..=-1 => io::Error::from_raw_os_error(-answer as i32),
        _ => io::Error::other(format!(
            "the backend's {name} returned {answer}, which is neither a count nor an errno; return a negative one"
        )),
    }
}

fn done(answer: c_int, name: &str) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(error_of(answer.into(), name)) }
}

impl ReadAt for Callbacks {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        let qn_backend { read, context, .. } = self.0.functions;
        let read = read.expect("a backend without it was refused");
        // SAFETY: the caller's contract; the buffer has so many bytes.
        let call = || Ok(unsafe { read(context, buffer.as_mut_ptr().cast(), buffer.len(), position) });
        counted(guarded(call)?, buffer.len(), "read")
    }

    fn attributes(&self) -> io::Result<Attributes> {
        let qn_backend { attributes, context, .. } = self.0.functions;
        let attributes = attributes.expect("a backend without it was refused");
        let size = size_of::<qn_attributes>();
        let mut now = qn_attributes { size, length: 0, identity: [0; 2], version: 0 };
        // SAFETY: the caller's contract; the struct says its size.
        done(guarded(|| Ok(unsafe { attributes(context, &raw mut now) }))?, "attributes")?;
        if now.length > i64::MAX as u64 {
            let text = "the backend says that its length is above 2^63 - 1, which no file has";
            return Err(io::Error::other(text));
        }
        let mut digest = [0; 24];
        digest[8..16].copy_from_slice(&now.identity[0].to_le_bytes());
        digest[16..].copy_from_slice(&now.identity[1].to_le_bytes());
        let version = now.version;
        Ok(Attributes {
            identity: Identity::of_digest(digest),
            version: Version { modified: version, changed: version, settled: true, steps: true },
            size: now.length,
        })
    }
}

impl WriteAt for Callbacks {
    fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<usize> {
        let qn_backend { write, context, .. } = self.0.functions;
        let write = write.expect("a backend without it is not written");
        // SAFETY: the caller's contract; so many bytes are there.
        let call = || Ok(unsafe { write(context, bytes.as_ptr().cast(), bytes.len(), position) });
        counted(guarded(call)?, bytes.len(), "write")
    }

    fn sync(&self, kind: SyncKind, range: Range<u64>) -> io::Result<()> {
        let qn_backend { sync, context, .. } = self.0.functions;
        let sync = sync.expect("a backend without it is not written");
        let kind = match kind {
            SyncKind::Data => QN_SYNC_DATA,
            SyncKind::All => QN_SYNC_ALL,
        };
        let length = range.end.saturating_sub(range.start);
        // SAFETY: the caller's contract.
        done(guarded(|| Ok(unsafe { sync(context, kind, range.start, length) }))?, "sync")
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let qn_backend { truncate, context, .. } = self.0.functions;
        let truncate = truncate.expect("a backend without it is not written");
        // SAFETY: the caller's contract.
        done(guarded(|| Ok(unsafe { truncate(context, bytes) }))?, "truncate")
    }
}

/// Checks that the functions which must be there are, and the ranges of the numbers.
fn check(functions: &qn_backend) -> Result<(), Failure> {
    let qn_backend { read, attributes, write, sync, truncate, threads, reserved, .. } = functions;
    if read.is_none() || attributes.is_none() {
        return Err(Failure::invalid("the backend has no read or no attributes; set both functions"));
    }
    if [write.is_some(), sync.is_some(), truncate.is_some()].iter().any(|&is| is != write.is_some()) {
        let text = "the backend has some of write, sync and truncate; set all three, or none to read only";
        return Err(Failure::invalid(text));
    }
    if *threads > THREADS_MAX || *reserved != 0 {
        let text = format!("the backend wants {threads} threads, or its field reserved is not 0; at most");
        return Err(Failure::invalid(format!("{text} {THREADS_MAX} threads, and 0 there")));
    }
    Ok(())
}

/// Opens a file that functions of the caller's read and write.
///
/// The struct is copied; its context and functions must stay until release was called. If the call fails, release is
/// not called, and the context is the caller's again. options may be NULL; a coherence other than QN_COHERENCE_CHECK
/// looks at attributes(). *file is yours until qn_close(). Blocks as the function attributes does.
///
/// Errors: what attributes() returned; -EBADF (to be written, and the backend reads only); -EINVAL, -ENOBUFS, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_open_backend(
    cache: *const qn_cache,
    backend: *const qn_backend,
    options: *const qn_open_options,
    file: *mut *mut qn_file,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let place = unsafe { args::out(file) }?;
        args::not_null(backend, "the backend")?;
        // SAFETY: the caller's contract.
        let functions = unsafe { args::options(backend) }?;
        check(&functions)?;
        // SAFETY: the caller's contract.
        let OpenRequest { cache, options, pool } = unsafe { OpenRequest::of(cache, options) }?;
        let threads = if functions.threads == 0 { THREADS } else { functions.threads };
        let threads = ThreadPool::new(Arc::new(WaitQueue::new()), threads as usize, QUEUE_MAX);
        let context = Arc::new(Context { functions, is_ours: AtomicBool::new(false) });
        let callbacks = Callbacks(Arc::clone(&context));
        let source = match functions.write {
            Some(_) => BlockingSource::for_writing(callbacks, Arc::new(threads)),
            None => BlockingSource::new(callbacks, Arc::new(threads)),
        };
        let file = match pool {
            Some(pool) => pool.pool.open_backend_with(Arc::new(source), &options),
            None => cache.cache().open_backend_with(Arc::new(source), &options),
        };
        let file = file?;
        // If the file is known already, the cache keeps the backend that it has. This one is released with the handle
        // then, and not in this call: its caller does not expect it yet.
        context.is_ours.store(true, Ordering::Relaxed);
        args::give_handle(place, qn_file::of_backend(file, cache, context));
        Ok(0)
    })
}

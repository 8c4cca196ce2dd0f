//! Caches: built with a bound on their memory, resized, made durable, closed.
//!
//! The handle is one reference of several: open files, pools and pins keep the cache as well, so that the order in
//! which a program closes what it has does not matter.

use std::ffi::{OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

use quinion::internals::sys::fork::ForkGuard;
use quinion::{Builder, Cache, DiskOptions, Mechanism, SpillOptions};

use crate::args::{self, Handle, VersionedStruct, check_flags};
use crate::ffi::{Failure, Result, ffi_call};

/// A page cache of this process, made by qn_cache_open().
pub struct qn_cache {
    cache: Cache,
    process: ForkGuard,
}

impl qn_cache {
    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }
}

impl Handle for qn_cache {
    fn process(&self) -> ForkGuard {
        self.process
    }
}

/// qn_cache_options.flags: keep the cache's memory from being swapped, by mlock(2), which RLIMIT_MEMLOCK bounds.
pub const QN_CACHE_LOCK_MEMORY: u32 = 1;
/// qn_cache_options.flags: read and write by a pool of threads, and not by io_uring.
pub const QN_CACHE_THREADS: u32 = 2;
/// qn_cache_options.flags: take all of the cache's memory from the machine at once, as qn_cache_populate().
pub const QN_CACHE_POPULATE: u32 = 4;
/// qn_cache_options.readahead: read no page that was not asked for.
pub const QN_NO_READAHEAD: u64 = u64::MAX;

/// Options of a cache. All zero but the size are the defaults. Texts are copied.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_cache_options {
    /// sizeof(struct qn_cache_options).
    pub size: usize,
    /// The bound on its memory in bytes, at least 16 MiB: data, tables and reads in flight together. 0: a quarter of
    /// what the machine or the container allows.
    pub memory: u64,
    /// The most that qn_cache_resize() can give it later, in bytes. 0: memory.
    pub memory_max: u64,
    /// The most that pins may keep, in bytes. 0: half of memory.
    pub pinned_max: u64,
    /// The largest readahead window in bytes. 0: 4 MiB. QN_NO_READAHEAD: none.
    pub readahead: u64,
    /// A folder for a disk tier, or NULL. It takes pages of backends whose bytes never change.
    pub disk_folder: *const c_char,
    /// The most that the disk tier may take, in bytes. 0 without a folder.
    pub disk_bytes: u64,
    /// A file to which cold pages of memory files may go, or NULL. It is made, and removed.
    pub spill_path: *const c_char,
    /// The most that this file may take, in bytes. 0 without a path.
    pub spill_bytes: u64,
    /// QN_CACHE_... flags.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: numbers and pointers without padding.
unsafe impl VersionedStruct for qn_cache_options {
    const NAME: &'static str = "qn_cache_options";
}

pub(crate) unsafe fn path_of<'a>(pointer: *const c_char, what: &str) -> Result<&'a OsStr> {
    // SAFETY: as the caller's.
    Ok(OsStr::from_bytes(unsafe { args::text(pointer, what) }?.to_bytes()))
}

unsafe fn builder_of(options: &qn_cache_options) -> Result<Builder> {
    let known = QN_CACHE_LOCK_MEMORY | QN_CACHE_THREADS | QN_CACHE_POPULATE;
    check_flags(options.flags, known, "a struct qn_cache_options")?;
    if options.reserved != 0 {
        return Err(Failure::invalid(
            "the field reserved of a struct qn_cache_options is not 0; set it to 0",
        ));
    }
    let mut builder = Cache::builder().lock_memory(options.flags & QN_CACHE_LOCK_MEMORY != 0);
    type Setter = fn(Builder, u64) -> Builder;
    let setters: [(u64, Setter); 3] = [
        (options.memory, Builder::memory),
        (options.memory_max, Builder::memory_max),
        (options.pinned_max, Builder::pinned_max),
    ];
    for (bytes, set) in setters.into_iter().filter(|(bytes, _)| *bytes != 0) {
        builder = set(builder, bytes);
    }
    builder = match options.readahead {
        0 => builder,
        QN_NO_READAHEAD => builder.readahead(0),
        bytes => builder.readahead(bytes),
    };
    if options.flags & QN_CACHE_THREADS != 0 {
        builder = builder.mechanism(Mechanism::Threads);
    }
    if !options.disk_folder.is_null() {
        // SAFETY: as the caller's.
        let folder = unsafe { path_of(options.disk_folder, "the disk tier's folder") }?;
        builder = builder.disk(DiskOptions::new(folder, options.disk_bytes));
    } else if options.disk_bytes > 0 {
        return Err(size_without_place("disk_bytes", options.disk_bytes, "disk_folder"));
    }
    if !options.spill_path.is_null() {
        // SAFETY: as the caller's.
        let path = unsafe { path_of(options.spill_path, "the spill file's path") }?;
        builder = builder.spill(SpillOptions::new(path, options.spill_bytes));
    } else if options.spill_bytes > 0 {
        return Err(size_without_place("spill_bytes", options.spill_bytes, "spill_path"));
    }
    Ok(builder)
}

/// A caller that gives a size expects to get it.
fn size_without_place(size: &str, bytes: u64, place: &str) -> Failure {
    Failure::invalid(format!("{size} is {bytes} and {place} is NULL; say where, or leave {size} at 0"))
}

/// Builds a cache.
///
/// options may be NULL. *cache is yours until qn_cache_close(). Address space for memory_max is reserved, and memory is
/// taken as it is needed, or at once with QN_CACHE_POPULATE. May block for the disk tier and for that memory.
///
/// Errors: -EINVAL (an argument, or options that do not fit each other), -ENOMEM and other numbers of the system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_open(options: *const qn_cache_options, cache: *mut *mut qn_cache) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, options) = unsafe { (args::out(cache)?, args::options(options)?) };
        // SAFETY: the caller's contract, for the texts.
        let cache = unsafe { builder_of(&options) }?.build()?;
        if options.flags & QN_CACHE_POPULATE != 0 {
            cache.populate(u64::MAX)?;
        }
        args::give_handle(place, qn_cache { cache, process: ForkGuard::new() });
        Ok(0)
    })
}

/// Makes all that was written durable, as qn_cache_sync(), and gives the handle back, also if that failed.
///
/// The cache itself ends with the last of its handle, files, pools and pins; what could not be written is lost then.
/// Blocks for the device. No other call may use the handle then or later: that cannot be noticed, and is undefined.
///
/// Errors: those of qn_cache_sync(). In a forked child 0 is returned and nothing is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_close(cache: *mut qn_cache) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        if let Some(qn_cache { cache, .. }) = unsafe { args::take_handle(cache, "the cache") }? {
            cache.close()?;
        }
        Ok(0)
    })
}

/// Makes durable what was written to all files of a cache, as qn_sync() of each, also of those that are closed.
///
/// All files are tried, whatever went wrong with one. Blocks for the device.
///
/// Errors: the first error: -EIO, -ENOSPC and other numbers of the system; -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_sync(cache: *const qn_cache) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        unsafe { args::handle(cache, "the cache") }?.cache.sync_all()?;
        Ok(0)
    })
}

/// Gives a cache another bound on its memory, in bytes: 16 MiB to memory_max. Rounded down to whole 2 MiB.
///
/// A smaller bound evicts at once what it can; what is pinned or in flight leaves later. May block for locks.
///
/// Errors: -EINVAL (the bound is out of its range), -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_resize(cache: *const qn_cache, memory: u64) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        unsafe { args::handle(cache, "the cache") }?.cache.resize(memory)?;
        Ok(0)
    })
}

/// Takes memory from the machine now, until a cache has that many bytes, or its bound, or there is no more.
///
/// Returns how many it has. By itself a cache takes memory as it fills, and reads that fill it wait for that. Blocks
/// for the memory; other threads may read meanwhile.
///
/// Errors: -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_populate(cache: *const qn_cache, bytes: u64) -> i64 {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let grown = unsafe { args::handle(cache, "the cache") }?.cache.populate(bytes)?;
        Ok(args::count(grown))
    })
}

/// Walks a whole cache and compares what its parts know of each other, for tests and reports of defects.
///
/// Takes long, and wants that no other thread uses the cache meanwhile.
///
/// Errors: -EUCLEAN (the message says what does not fit), -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_check(cache: *const qn_cache) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let cache = unsafe { args::handle(cache, "the cache") }?;
        if cache.process.is_forked() {
            let text = "a cache was to be checked in a forked child; build a cache of the child's own";
            return Err(Failure::new(libc::ECHILD, text));
        }
        let wrong = |what| Failure::new(libc::EUCLEAN, format!("the cache is damaged: {what}; report this"));
        cache.cache.check().map_err(wrong)?;
        Ok(0)
    })
}

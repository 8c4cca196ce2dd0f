//! Memory files: files that exist only in a cache, and count against its bound.
//!
//! They are read, written, cut, punched and pinned by the functions of all files; a hole takes no memory and reads as
//! zeros. Their pages go to the cache's spill file, if it has one, and else stay until the file is closed.

use std::ffi::{c_char, c_int};

use quinion::{MemFileOptions, OnPinned};

use crate::args::{self, VersionedStruct, check_flags, check_range};
use crate::cache::qn_cache;
use crate::ffi::{Result, ffi_call};
use crate::file::{Source, qn_file};
use crate::pool::qn_pool;

/// qn_memory_file_options.flags: its pages do not go to the cache's spill file.
pub const QN_MEMORY_UNEVICTABLE: u32 = 1;

/// Options of a memory file. All zero but the size are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_memory_file_options {
    /// sizeof(struct qn_memory_file_options).
    pub size: usize,
    /// The file's length in bytes at first, all of it a hole.
    pub length: u64,
    /// The file's name in messages, in UTF-8, or NULL. It is copied.
    pub name: *const c_char,
    /// The pool that its pages belong to, and whose cache is used then; NULL: the default pool of the cache.
    pub pool: *const qn_pool,
    /// How long writes, cuts and punches wait for pins of the bytes that they change, in milliseconds, before they are
    /// -EBUSY. 0: they do not wait, and pins keep the old bytes.
    pub pin_wait_ms: u32,
    /// QN_MEMORY_... flags.
    pub flags: u32,
}

// SAFETY: numbers and pointers without padding.
unsafe impl VersionedStruct for qn_memory_file_options {
    const NAME: &'static str = "qn_memory_file_options";
}

unsafe fn wanted(options: &qn_memory_file_options) -> Result<MemFileOptions> {
    check_flags(options.flags, QN_MEMORY_UNEVICTABLE, "a struct qn_memory_file_options")?;
    check_range(0, options.length)?;
    let unevictable = options.flags & QN_MEMORY_UNEVICTABLE != 0;
    let mut wanted = MemFileOptions::new().size(options.length).unevictable(unevictable);
    if options.pin_wait_ms != 0 {
        wanted = wanted.on_pinned(OnPinned::Wait(args::milliseconds(options.pin_wait_ms.into())));
    }
    if !options.name.is_null() {
        // SAFETY: as the caller's.
        wanted = wanted.name(unsafe { args::utf8(options.name, "the name") }?);
    }
    Ok(wanted)
}

/// Makes a memory file in a cache: bytes that no file system has, and that end with qn_close().
///
/// options may be NULL. *file is yours until qn_close(). Each call makes a new file; a name need not be the only one.
/// May wait for locks.
///
/// Errors: -EINVAL, -ENOBUFS (no memory for its record), -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_memory_file(
    cache: *const qn_cache,
    options: *const qn_memory_file_options,
    file: *mut *mut qn_file,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, cache) = unsafe { (args::out(file)?, args::handle(cache, "the cache")?) };
        // SAFETY: the caller's contract.
        let options = unsafe { args::options(options) }?;
        // SAFETY: the caller's contract, for the name and the pool.
        let (wanted, pool) = unsafe { (wanted(&options)?, options.pool.as_ref()) };
        let file = match pool {
            Some(pool) => pool.pool.mem_file(wanted)?,
            None => cache.cache().mem_file(wanted)?,
        };
        args::give_handle(place, qn_file::from(Source::Memory(file)));
        Ok(0)
    })
}

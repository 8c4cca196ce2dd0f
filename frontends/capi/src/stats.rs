//! Statistics: the numbers of a cache, the most important ones as a struct, all of them by name.
//!
//! The struct grows at its end, as all structs here do. Pages of the library are bytes in it; by name they are what the
//! library calls them.

use std::ffi::{c_char, c_int};

use quinion::Stats;

use crate::args::{self, VersionedStruct};
use crate::cache::qn_cache;
use crate::ffi::{Failure, ffi_call};

const PAGE_BYTES: u64 = 4096;

/// Numbers of a cache. Counts are since it was built; sizes are now.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_stats {
    /// sizeof(struct qn_stats), set by the caller.
    pub size: usize,
    /// The bound in force, in bytes.
    pub memory_bytes: u64,
    /// Bytes of it in use.
    pub used_bytes: u64,
    /// Bytes of pages in the cache now.
    pub cached_bytes: u64,
    /// Bytes kept by pins, folios counted whole.
    pub pinned_bytes: u64,
    /// Bytes of pages that were written here and are not in their files yet.
    pub dirty_bytes: u64,
    /// Files known, open or idle.
    pub files: u64,
    /// Read calls, each read of a batch counted.
    pub reads: u64,
    /// Read calls answered from the cache alone.
    pub hits: u64,
    /// Read calls that waited for bytes, or would have.
    pub misses: u64,
    /// Bytes given to readers.
    pub read_bytes: u64,
    /// Requests sent to devices and backends.
    pub device_reads: u64,
    /// Bytes that they delivered.
    pub device_bytes: u64,
    /// Requests that failed.
    pub device_errors: u64,
    /// Bytes written to devices and backends.
    pub device_written_bytes: u64,
    /// Writes that failed. Their pages are tried again.
    pub device_write_errors: u64,
    /// Calls that asked for something to be made durable.
    pub syncs: u64,
    /// Syncs that failed.
    pub sync_errors: u64,
    /// Bytes of pages evicted to make room.
    pub evicted_bytes: u64,
    /// Bytes of pages that came back after they had been evicted.
    pub refaulted_bytes: u64,
}

// SAFETY: numbers without padding.
unsafe impl VersionedStruct for qn_stats {
    const NAME: &'static str = "qn_stats";
    /// A caller may want less than all of it: at least one number.
    const BYTES_MIN: usize = 2 * size_of::<usize>();
}

impl From<Stats> for qn_stats {
    fn from(now: Stats) -> Self {
        Self {
            size: size_of::<Self>(),
            memory_bytes: now.memory_bytes,
            used_bytes: now.grown_bytes,
            cached_bytes: now.cached_pages * PAGE_BYTES,
            pinned_bytes: now.pinned_bytes,
            dirty_bytes: now.dirty_pages * PAGE_BYTES,
            files: now.files,
            reads: now.reads,
            hits: now.hits,
            misses: now.misses,
            read_bytes: now.read_bytes,
            device_reads: now.device_reads,
            device_bytes: now.device_bytes,
            device_errors: now.device_errors,
            device_written_bytes: now.device_written_bytes,
            device_write_errors: now.device_write_errors,
            syncs: now.syncs,
            sync_errors: now.sync_errors,
            evicted_bytes: now.evicted_pages * PAGE_BYTES,
            refaulted_bytes: now.refaulted_pages * PAGE_BYTES,
        }
    }
}

/// Fills *stats, whose size the caller has set, with a cache's numbers. Does not block. In a forked child they are 0.
///
/// Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_stats(cache: *const qn_cache, stats: *mut qn_stats) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let cache = unsafe { args::handle(cache, "the cache") }?;
        // SAFETY: the caller's contract.
        unsafe { args::give(stats, &cache.cache().stats().into()) }.map(|()| 0)
    })
}

/// Tells one number of a cache by its name in the Rust library, as "hits" or "evicted_pages": there are more than in
/// struct qn_stats. Does not block.
///
/// Errors: -ENOENT (the message lists all names), -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_cache_stat(
    cache: *const qn_cache,
    name: *const c_char,
    value: *mut u64,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (cache, name) =
            unsafe { (args::handle(cache, "the cache")?, args::utf8(name, "the number's name")?) };
        // SAFETY: the caller's contract: a place for a number.
        let value = unsafe { value.as_mut() };
        let value = value.ok_or_else(|| Failure::invalid("the address for the number is NULL; pass one"))?;
        let numbers = cache.cache().stats().numbers();
        let Some((_, number)) = numbers.iter().find(|(known, _)| *known == name) else {
            let names: Vec<&str> = numbers.iter().map(|(name, _)| *name).collect();
            let text = format!("a cache has no number {name:?}; it has {}", names.join(", "));
            return Err(Failure::new(libc::ENOENT, text));
        };
        *value = *number;
        Ok(0)
    })
}

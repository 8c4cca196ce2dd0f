//! Pools: shares of a cache with a limit and a protected minimum.
//!
//! A pool's handle may be closed while files of it are open: they stay in the pool, which ends with the last of them.
//! Limits and minima are in bytes, and 0 stands for none.

use std::ffi::{c_char, c_int};
use std::mem::size_of;

use quinion::internals::sys::fork::ForkGuard;
use quinion::{Pool, PoolOptions};

use crate::args::{self, Handle, VersionedStruct};
use crate::cache::qn_cache;
use crate::ffi::{Result, ffi_call};

/// A share of a cache, made by qn_pool_add(); passed to opens by their options.
pub struct qn_pool {
    pub(crate) pool: Pool,
    process: ForkGuard,
}

impl Handle for qn_pool {
    fn process(&self) -> ForkGuard {
        self.process
    }
}

/// Options of a pool. All zero but the size are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_pool_options {
    /// sizeof(struct qn_pool_options).
    pub size: usize,
    /// The most memory that its files may take, in bytes. 0: as much as the cache has.
    pub limit: u64,
    /// Bytes of its memory that are not evicted for files of other pools. 0: none.
    pub protected_bytes: u64,
}

// SAFETY: numbers without padding.
unsafe impl VersionedStruct for qn_pool_options {
    const NAME: &'static str = "qn_pool_options";
}

/// Numbers of a pool. Counts are since it was made.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_pool_usage {
    /// sizeof(struct qn_pool_usage), set by the caller.
    pub size: usize,
    /// The limit in force, in bytes; 0 if there is none.
    pub limit: u64,
    /// The protected minimum in force, in bytes.
    pub protected_bytes: u64,
    /// Bytes that its files take now.
    pub used_bytes: u64,
    /// Pages of 4096 bytes that were put into the cache for it.
    pub inserted_pages: u64,
    /// Pages of the pool that were evicted.
    pub evicted_pages: u64,
    /// Pages of the pool that came back soon after they were evicted.
    pub refaulted_pages: u64,
}

// SAFETY: numbers without padding.
unsafe impl VersionedStruct for qn_pool_usage {
    const NAME: &'static str = "qn_pool_usage";
}

/// Makes a pool in a cache; a name is given once.
///
/// name is UTF-8, and is copied. options may be NULL. *pool is yours until qn_pool_close(). May wait for locks.
///
/// Errors: -EINVAL (an argument, a name that the cache has, too many pools, or more is protected than there is),
/// -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pool_add(
    cache: *const qn_cache,
    name: *const c_char,
    options: *const qn_pool_options,
    pool: *mut *mut qn_pool,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, cache) = unsafe { (args::out(pool)?, args::handle(cache, "the cache")?) };
        // SAFETY: the caller's contract.
        let (name, options) = unsafe { (args::utf8(name, "the name")?, args::options(options)?) };
        let mut wanted = PoolOptions::new().protected(options.protected_bytes);
        if options.limit > 0 {
            wanted = wanted.limit(options.limit);
        }
        let pool = cache.cache().add_pool(name, wanted)?;
        args::give_handle(place, qn_pool { pool, process: ForkGuard::new() });
        Ok(0)
    })
}

/// Changes a pool's limit, in bytes; 0 takes it away. Pages above it are evicted. May wait for locks.
///
/// Errors: -EINVAL, -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pool_set_limit(pool: *const qn_pool, limit: u64) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let pool = unsafe { args::handle(pool, "the pool") }?;
        pool.pool.set_limit((limit > 0).then_some(limit))?;
        Ok(0)
    })
}

/// Changes what of a pool's memory is not evicted for other pools, in bytes. May wait for locks.
///
/// Errors: -EINVAL (more is protected in all than the cache has), -ECHILD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pool_set_protected(pool: *const qn_pool, protected_bytes: u64) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let pool = unsafe { args::handle(pool, "the pool") }?;
        pool.pool.set_protected(protected_bytes)?;
        Ok(0)
    })
}

/// Fills *usage, whose size the caller has set, with a pool's numbers. Does not block.
///
/// Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pool_stats(pool: *const qn_pool, usage: *mut qn_pool_usage) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let usage_now = usage_of(&unsafe { args::handle(pool, "the pool") }?.pool);
        // SAFETY: the caller's contract.
        unsafe { args::give(usage, &usage_now) }.map(|()| 0)
    })
}

fn usage_of(pool: &Pool) -> qn_pool_usage {
    let now = pool.stats();
    qn_pool_usage {
        size: size_of::<qn_pool_usage>(),
        limit: now.limit_bytes.unwrap_or(0),
        protected_bytes: now.protected_bytes,
        used_bytes: now.used_pages * 4096,
        inserted_pages: now.inserted_pages,
        evicted_pages: now.evicted_pages,
        refaulted_pages: now.refaulted_pages,
    }
}

/// Gives a pool's handle back. Files of it stay open, and in the pool. May wait for locks.
///
/// Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pool_close(pool: *mut qn_pool) -> c_int {
    ffi_call(|| -> Result<c_int> {
        // SAFETY: the caller's contract.
        drop(unsafe { args::take_handle(pool, "the pool") }?);
        Ok(0)
    })
}

//! Pool: a named share of a cache, for a tenant or a kind of data.
//!
//! ```text
//!   cache 1 GiB      [ index: 200 MiB protected | .... | scratch: at most 64 MiB | default: the rest ]
//!
//!   index.open(a)    pages that its reads bring are the index's, until they are evicted
//!   cache.open(a)    the same file: hits the index's pages, and pages that it brings itself are the default pool's
//! ```
//!
//! A folio belongs to the pool of the handle whose read or write brought it; other pools' hits and writes change
//! nothing of that. A pool at its **limit** evicts of its own; its **protected** minimum is left to it by all others
//! (`policy/pools.rs`). A pool lives as long as a [`Pool`], or a [`File`] opened by one, does. Then its pages are the
//! default pool's, the oldest first.
//!
//! Invariants:
//!  1. A name is one pool's at a time, and a number one pool's.
//!  2. The protected shares of all pools fit into the bound, with a sixteenth of it left unprotected.
//!
//! Not an invariant: that the second holds after pressure has made the cache smaller.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

use crate::backend::Backend;
use crate::error::{Repr, Result};
use crate::lists::UNLIMITED;
use crate::reclaim::PoolCounts;
use crate::sync::{Rank, RankedMutex};
use crate::units::{PAGE_SIZE, POOLS_MAX, PoolNumber};

use super::{Cache, CacheInner, File, OpenOptions, OpenRequest};

/// The limit and the protected minimum of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolOptions {
    /// The most that the pool's pages may take, in bytes, those on their way included: rounded down to whole pages,
    /// at least one smallest folio. `None` is the default: as much as there is.
    pub limit: Option<u64>,
    /// The minimum that other pools leave to this one, in bytes: rounded up to whole pages, at most `limit`, and
    /// together with other pools' at most 15 parts in 16 of the cache's data. The default is 0.
    pub protected: u64,
}

impl PoolOptions {
    /// No limit, and nothing protected.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`PoolOptions::limit`].
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }
    /// Sets [`PoolOptions::protected`].
    #[must_use]
    pub fn protected(mut self, bytes: u64) -> Self {
        self.protected = bytes;
        self
    }
}

/// Numbers of a pool. Sizes in bytes, pages of 4 KiB; counts since the pool began.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolStats {
    /// Name of the pool; "default" for the pool of files opened without one.
    pub name: String,
    /// The most that it may have.
    pub limit_bytes: Option<u64>,
    /// The protected minimum, which other pools leave to it.
    pub protected_bytes: u64,
    /// Pages that are cached, or on their way.
    pub used_pages: u64,
    /// Pages that its readers brought.
    pub inserted_pages: u64,
    /// Evicted to make room. (Pages also leave as any others, see [`Stats`](crate::Stats).)
    pub evicted_pages: u64,
    /// Pages of `inserted_pages` that had been evicted, from this pool or another.
    pub refaulted_pages: u64,
}

/// A named share of a cache; clones share it. It ends with the last of them and of the files opened by them; then its
/// pages are the default pool's.
#[derive(Clone, Debug)]
pub struct Pool {
    share: Arc<PoolShare>,
}

pub(crate) struct PoolShare {
    shared: Arc<CacheInner>,
    pub(super) number: PoolNumber,
    pub(super) name: Arc<str>,
}

impl fmt::Debug for PoolShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolShare").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for PoolShare {
    fn drop(&mut self) {
        if self.shared.process.is_forked() {
            return;
        }
        let mut pools = self.shared.pools.lock();
        self.shared.filemap.supply.reclaim.end_pool(self.number);
        pools[usize::from(self.number.0)] = None;
    }
}

pub(super) type Directory = RankedMutex<[Option<Weak<PoolShare>>; POOLS_MAX]>;

pub(super) fn no_pools() -> Directory {
    RankedMutex::new(Rank::Pools, Default::default())
}

impl Cache {
    /// Begins a pool of this cache. There can be 15 at a time.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the name is empty, "default" or another pool's;
    /// there are too many pools; or the options do not fit, see [`PoolOptions`].
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn add_pool(&self, name: &str, options: PoolOptions) -> Result<Pool> {
        self.check_process()?;
        let shared = &self.shared;
        let mut known = shared.pools.lock();
        // Held until the lock is released: the end of a share takes it.
        let alive: Vec<_> = known.iter().flatten().filter_map(Weak::upgrade).collect();
        let is_known = name == "default" || alive.iter().any(|share| &*share.name == name);
        let (reclaim, taken) = (&shared.filemap.supply.reclaim, known.each_ref().map(Option::is_some));
        let begun = if is_known || name.is_empty() {
            let text = format!(
                "cannot add a pool named {name:?}: choose a name that no pool has, and not \"default\""
            );
            Err(Repr::InvalidInput(text).into())
        } else {
            shared.fitting(options, 0).and_then(|fitting| {
                let name = Arc::from(name);
                let number = reclaim.add_pool(&name, |pool| taken[usize::from(pool.0)]);
                let too_many = || {
                    let max = POOLS_MAX - 1;
                    let text = format!(
                        "cannot add the pool {name:?}: a cache has {max} at most; drop one that is not used"
                    );
                    Repr::InvalidInput(text)
                };
                Ok((number.ok_or_else(too_many)?, Arc::clone(&name), fitting))
            })
        };
        let begun = begun.map(|(number, name, (limit, protected))| {
            reclaim.lists().set_limit(number, limit);
            reclaim.set_protected(number, protected);
            let share = Arc::new(PoolShare { shared: Arc::clone(shared), number, name });
            known[usize::from(number.0)] = Some(Arc::downgrade(&share));
            Pool { share }
        });
        drop(known);
        drop(alive);
        begun
    }

    /// The pool of this name, if there is one; not the default pool. In a forked child there is none.
    pub fn pool(&self, name: &str) -> Option<Pool> {
        self.check_process().ok()?;
        self.shared.alive_pools().into_iter().find(|share| &*share.name == name).map(|share| Pool { share })
    }

    /// Numbers of all pools, the default pool first. In a forked child there are none.
    pub fn pools(&self) -> Vec<PoolStats> {
        if self.check_process().is_err() {
            return Vec::new();
        }
        let default = self.shared.pool_stats(PoolNumber::DEFAULT, "default");
        let alive = self.shared.alive_pools();
        let others = alive.iter().map(|share| self.shared.pool_stats(share.number, &share.name));
        std::iter::once(default).chain(others).collect()
    }
}

impl CacheInner {
    fn alive_pools(&self) -> Vec<Arc<PoolShare>> {
        self.pools.lock().iter().flatten().filter_map(Weak::upgrade).collect()
    }

    /// The limit and the protected minimum in pages, if they fit beside all that is protected but for `own` pages.
    fn fitting(&self, options: PoolOptions, own: u64) -> Result<(u64, u64)> {
        let PoolOptions { limit, protected } = options;
        let refused = |text: String| Err(Repr::InvalidInput(text).into());
        let least = self.filemap.supply.folio_orders.min.bytes() as u64;
        if let Some(limit) =
            limit.filter(|limit| *limit < least || *limit / PAGE_SIZE as u64 * (PAGE_SIZE as u64) < protected)
        {
            return refused(format!(
                "a pool cannot have a limit of {limit} bytes and {protected} of them protected: a limit is at \
                least {least} \
                 bytes, the cache's smallest folio, and what is protected is no more than the limit"
            ));
        }
        let (all, protected) =
            (self.filemap.bound().protected_pages_max(), protected.div_ceil(PAGE_SIZE as u64));
        let others = self.filemap.supply.reclaim.protected() - own;
        if protected > all.saturating_sub(others) {
            let [asked, others, all] =
                [protected, others, all].map(|pages| pages.saturating_mul(PAGE_SIZE as u64));
            return refused(format!(
                "cannot protect {asked} bytes for a pool: other pools have {others} bytes protected, and all \
                together may \
                 have {all} with this cache's memory; protect less, or give the cache more memory"
            ));
        }
        Ok((limit.map_or(UNLIMITED, |bytes| bytes / PAGE_SIZE as u64), protected))
    }

    fn pool_stats(&self, pool: PoolNumber, name: &str) -> PoolStats {
        let PoolCounts { limit, protected, charged, inserted, evicted, refaulted } =
            self.filemap.supply.reclaim.pool_counts(pool);
        let bytes = |pages: u64| pages * PAGE_SIZE as u64;
        PoolStats {
            name: name.to_owned(),
            limit_bytes: (limit != UNLIMITED).then(|| bytes(limit)),
            protected_bytes: bytes(protected),
            used_pages: charged,
            inserted_pages: inserted,
            evicted_pages: evicted,
            refaulted_pages: refaulted,
        }
    }
}

impl Pool {
    /// As [`Cache::open`]; pages that the file and its clones read are this pool's.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        self.cache()
            .open_in(path.as_ref(), OpenRequest { options: &OpenOptions::new(), pool: Some(&self.share) })
    }

    /// As [`Cache::open_with`]; pages that the file and its clones bring into the cache are this pool's.
    ///
    /// # Errors
    /// As [`Cache::open_with`].
    pub fn open_with(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        self.cache().open_in(path.as_ref(), OpenRequest { options, pool: Some(&self.share) })
    }

    /// As [`Cache::adopt`]; pages that the file and its clones read are this pool's.
    ///
    /// # Errors
    /// As [`Cache::adopt`].
    pub fn adopt(&self, descriptor: BorrowedFd<'_>) -> Result<File> {
        self.cache()
            .adopt_in(descriptor, OpenRequest { options: &OpenOptions::new(), pool: Some(&self.share) })
    }

    /// As [`Cache::adopt_with`]; pages that the file and its clones bring into the cache are this pool's.
    ///
    /// # Errors
    /// As [`Cache::adopt_with`].
    pub fn adopt_with(&self, descriptor: BorrowedFd<'_>, options: &OpenOptions) -> Result<File> {
        self.cache().adopt_in(descriptor, OpenRequest { options, pool: Some(&self.share) })
    }

    /// As [`Cache::open_backend`]; pages that the file and its clones read are this pool's.
    ///
    /// # Errors
    /// As [`Cache::open_backend`].
    pub fn open_backend(&self, backend: Arc<dyn Backend>) -> Result<File> {
        self.cache()
            .open_backend_in(backend, OpenRequest { options: &OpenOptions::new(), pool: Some(&self.share) })
    }

    /// As [`Cache::open_backend_with`]; pages that the file and its clones bring into the cache are this pool's.
    ///
    /// # Errors
    /// As [`Cache::open_backend_with`].
    pub fn open_backend_with(&self, backend: Arc<dyn Backend>, options: &OpenOptions) -> Result<File> {
        options.check()?;
        self.cache().open_backend_in(backend, OpenRequest { options, pool: Some(&self.share) })
    }

    pub(super) fn cache(&self) -> Cache {
        Cache { shared: Arc::clone(&self.share.shared) }
    }

    pub(super) fn share(&self) -> &Arc<PoolShare> {
        &self.share
    }

    /// Name of the pool.
    pub fn name(&self) -> &str {
        &self.share.name
    }

    /// Numbers of the pool now. Waits for nothing. In a forked child they are those at the fork.
    pub fn stats(&self) -> PoolStats {
        self.share.shared.pool_stats(self.share.number, &self.share.name)
    }

    /// Changes the pool's limit, in bytes, while it is in use. The excess is evicted now as far as can be, which may
    /// wait for locks of files; pages pinned or in flight go when they can, and until then the pool gets nothing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it is below the pool's protected minimum, or below
    /// the cache's smallest folio. [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn set_limit(&self, bytes: Option<u64>) -> Result<()> {
        let (shared, number) = (&self.share.shared, self.share.number);
        self.cache().check_process()?;
        let pools = shared.pools.lock();
        let protected = shared.filemap.supply.reclaim.pool_counts(number).protected;
        let options = PoolOptions { limit: bytes, protected: protected * PAGE_SIZE as u64 };
        let (limit, _) = shared.fitting(options, protected)?;
        shared.filemap.supply.reclaim.lists().set_limit(number, limit);
        drop(pools);
        shared.filemap.supply.shrink_to_limit(number);
        Ok(())
    }

    /// Changes the pool's protected minimum, in bytes. A part that the pool does not fill yet is not reserved for it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it is above the pool's limit, or the cache cannot
    /// hold it beside other pools' minima. [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn set_protected(&self, bytes: u64) -> Result<()> {
        let (shared, number) = (&self.share.shared, self.share.number);
        self.cache().check_process()?;
        let _one = shared.pools.lock();
        let PoolCounts { limit, protected, .. } = shared.filemap.supply.reclaim.pool_counts(number);
        let limit = (limit != UNLIMITED).then(|| limit * PAGE_SIZE as u64);
        let (_, pages) = shared.fitting(PoolOptions { limit, protected: bytes }, protected)?;
        shared.filemap.supply.reclaim.set_protected(number, pages);
        Ok(())
    }
}

impl File {
    /// The name of the pool that is charged for pages that this handle brings into the cache.
    pub fn pool(&self) -> &str {
        self.handle.pool.as_ref().map_or("default", |share| &share.name)
    }
}

//! Shmem: what happens to a request for a memory file, whose pages are in the cache and nowhere else.
//!
//! ```text
//!   read_at
//!    hit?   as of any file                                      no lock, no system call, no shared store
//!    else   1 batch     folios that follow each other, held together: bytes, or zeros where none were put yet
//!           2 look      nothing there? the tree under its lock, and only that, says that it is a hole, and how far
//!           3 zeros     all of the hole, in one step
//!           4 size      looked at again
//!   write    the steps of every write (filemap/write.rs), in which nothing is read, nothing waits for write-back, and
//!            what is around the bytes of a page is zeros
//! ```
//!
//! A memory file is sparse: pages that were not written take no memory (`mapping/memory.rs`). `grab.rs` gives memory to
//! ranges, and pins it whole; `populate.rs` fills many bytes at once; `read.rs` is the path of a read that was no hit;
//! `pin.rs` pins bytes; `holes.rs` cuts, punches and seeks; `deferred_release.rs` frees a file's memory with it.
//!
//! Pages of memory files are not reclaimed, so a cache can be full of them. Then a thread that wants more gets an
//! error, and nothing is lost. If the cache has a spill file, cold folios of memory files that allow it go there, and
//! come back for a caller that wants them (`filemap/spill_in.rs`).
//!
//! Invariants:
//!  1. A page that was not found without the tree lock may not be taken for a hole.
//!  2. A read takes no memory, of a hole of whatever size.
//!  3. No lock is held while the caller waits, and no hold of a folio is kept behind the batch that it belongs to.
//!  4. A byte behind the end of a file is zero in memory, or not there: a file that becomes longer shows zeros.
//!
//! Not an invariant: that a read of several pages is of one moment. Each page is.
//!
//! Kernel cousin: `mm/shmem.c`. This differs: nothing is a special case of a swap cache; a hole is zeros of any length
//! where the kernel copies its zero page piece by piece.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::filemap::{Filemap, WriteContext};
use crate::mapping::{Mapping, NewMemoryMapping, SpillTarget};
use crate::sys::fork::ForkGuard;
use crate::units::{MappingId, Order, PageIndex, PoolNumber};

mod deferred_release;
mod grab;
mod holes;
mod pin;
mod populate;
mod read;
mod target;

use deferred_release::EndedFiles;
pub(crate) use grab::FolioPinRequest;
pub use populate::PopulateSlice;
pub(crate) use target::{BufferList, OneBuffer, Target};

/// Bytes of a write that is put into a hole by a grab; a smaller one goes the way of every file's.
const GRABBED_WRITE_MIN: usize = 128 << 10;

/// The paths of a cache's memory files.
#[derive(Debug)]
pub struct Shmem {
    pub(crate) filemap: Arc<Filemap>,
    files: AtomicU64,
    /// Files that are gone, but for folios on their way to the spill file.
    ended: Arc<EndedFiles>,
}

/// A memory file that is to be made.
#[derive(Clone, Copy, Debug)]
pub struct NewMemory {
    /// The number of its mapping, which no other has.
    pub id: MappingId,
    /// The largest folio that writers make.
    pub folio_order_max: Order,
    /// The pool that is charged when its folios come back from the spill file; `None`: they stay in memory.
    pub spills: Option<PoolNumber>,
    /// The process that owns it.
    pub process: ForkGuard,
}

impl Shmem {
    /// The paths of memory files beside those of files.
    pub fn new(filemap: Arc<Filemap>) -> Self {
        Self { ended: EndedFiles::of(&filemap), filemap, files: AtomicU64::new(0) }
    }

    /// How many memory files there are.
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// The mapping of a memory file of no bytes, known to reclaim. `None` if there is no cell for its record.
    pub fn new_mapping(&self, new: NewMemory) -> Option<Arc<Mapping>> {
        let NewMemory { id, folio_order_max, spills, process } = new;
        let (arena, reclaim) = (&self.filemap.arena, self.filemap.reclaim());
        let spill = self.filemap.supply.spill.as_ref().zip(spills);
        let spill = spill.map(|(spill, pool)| SpillTarget { spill: Arc::clone(spill), pool });
        let new = NewMemoryMapping { arena, id, folio_order_max, spill, process };
        let mapping = Mapping::memory(new)?;
        let mapping = mapping.with_shadow_nodes(reclaim.shadow_nodes()).with_lists(reclaim.lists());
        let mapping = Arc::new(mapping.with_counters(&self.filemap.counters).with_hooks(self.filemap.hooks));
        reclaim.add_mapping(Arc::clone(&mapping));
        self.files.fetch_add(1, Ordering::Relaxed);
        Some(mapping)
    }

    /// The last handle of a memory file is gone: so is the file, when the caller drops the mapping, or soon after.
    pub fn end(&self, mapping: &Arc<Mapping>) {
        self.files.fetch_sub(1, Ordering::Relaxed);
        self.filemap.reclaim().remove_mapping(mapping.id());
        self.ended.add(&self.filemap, mapping);
    }

    /// Writes `bytes` at `position`; as [`Filemap::write`].
    ///
    /// # Errors
    /// There is no memory, or the pages are pinned and the call does not detach them.
    pub(crate) fn write(
        &self,
        writer: WriteContext<'_>,
        position: u64,
        bytes: &[u8],
    ) -> Result<usize, Error> {
        if bytes.len() >= GRABBED_WRITE_MIN && self.is_hole_inside(writer.mapping(), position, bytes.len()) {
            let end = position + bytes.len() as u64;
            let mut put = |slice: &mut PopulateSlice<'_>| {
                slice.put(&bytes[(slice.position() - position) as usize..]);
                Ok(())
            };
            let written = self.populate(writer, position..end, &mut put)?;
            if written > 0 {
                return Ok(written as usize);
            }
        }
        self.filemap.write(writer, position, bytes)
    }

    /// Whether `len` bytes from `position` on lie inside the file, and seem to begin in a hole of one without spills.
    fn is_hole_inside(&self, mapping: &Mapping, position: u64, len: usize) -> bool {
        let is_inside = position + len as u64 <= mapping.size();
        let mut first = std::iter::once(PageIndex::of_byte(position));
        is_inside && mapping.backing().is_kept() && mapping.index().first_missing(&mut first).is_some()
    }

    /// Writes `bytes` where the file ends: where that was, how many, and why not all.
    ///
    /// # Errors
    /// As [`Shmem::write`], if none was written.
    pub(crate) fn append(
        &self,
        writer: WriteContext<'_>,
        bytes: &[u8],
    ) -> Result<(u64, usize, Result<(), Error>), Error> {
        self.filemap.append(writer, bytes)
    }
}

#[cfg(test)]
mod tests;

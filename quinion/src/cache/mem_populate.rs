//! Populate: memory given to a memory file, filled, and lent, many pages at a time.
//!
//! The work is in `shmem/populate.rs` and `shmem/grab.rs`; these are its public methods.

use std::io::{self, Read};
use std::ops::Range;

use crate::error::Result;
use crate::folio::PinnedFolios;
use crate::shmem::{FolioPinRequest, PopulateSlice, Shmem};

use super::File;
use super::mem_file::{MemFile, MemHandle};

const PINNED_BYTES_MAX: u64 = 1 << 20;

impl MemFile {
    /// Gives memory to all of `len` bytes at byte `position` that has none, so that writes there cannot fail for want
    /// of it; they read as zeros. The range must lie inside the file. Waits for memory, and for calls that populate.
    ///
    /// # Errors
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): there is not enough; pages that were allocated before stay.
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the range lies not all inside the file.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn preallocate(&self, position: u64, len: u64) -> Result<()> {
        let range = self.inside(position..position.saturating_add(len))?;
        let MemHandle { shared, mapping, .. } = &*self.handle;
        let given = shared.shmem.preallocate(mapping, self.pool_number(), range);
        given.map_err(|error| self.explain(error))
    }

    /// Fills `range`, in bytes, by what `source` puts into one [`PopulateSlice`] of it after the other: up to 2 MiB
    /// each, straight into the file's memory. Returns how many bytes came: all, or fewer if `source` left a slice
    /// before it was full, or failed, or memory ended (a next call returns that). Behind them the file is as it was,
    /// but that the folio in which the source ended is filled up with zeros if it had no bytes.
    ///
    /// While `source` runs, readers and writers of its slice wait for it, and so do calls that truncate or punch the
    /// file there: `source` must not use this file, nor wait for a thread that does. No lock of the cache is held.
    /// Threads may populate different ranges of one file in parallel.
    ///
    /// # Errors
    /// As [`MemFile::write_at`] (the range must lie inside the file), or the error of `source`; no byte came then.
    pub fn populate_with(
        &self,
        range: Range<u64>,
        mut source: impl FnMut(&mut PopulateSlice<'_>) -> io::Result<()>,
    ) -> Result<u64> {
        let range = self.inside(range)?;
        let came = self.handle.shared.shmem.populate(self.write_context(), range, &mut source);
        came.map_err(|error| self.explain(error))
    }

    /// As [`MemFile::populate_with`], with the bytes of `reader`, until it ends. It must not read from this file.
    ///
    /// # Errors
    /// As there; `reader`'s, if it gave none.
    pub fn populate_from_reader(&self, range: Range<u64>, mut reader: impl Read) -> Result<u64> {
        let range = self.inside(range)?;
        let came = self.handle.shared.shmem.populate_from_reader(self.write_context(), range, &mut reader);
        came.map_err(|error| self.explain(error))
    }

    /// As [`MemFile::populate_with`], with the bytes of `file` from byte `position` on, through the cache.
    ///
    /// # Errors
    /// As there; as [`File::read_at`], if it gave none.
    pub fn populate_from_file(&self, range: Range<u64>, file: &File, position: u64) -> Result<u64> {
        let (mut position, mut failed) = (position, None);
        let came = self.populate_with(range, |slice| {
            while slice.left() > 0 {
                let len = slice.left().min(PINNED_BYTES_MAX as usize);
                let pinned = match file.pin(position, len) {
                    Ok(pinned) if pinned.is_empty() => break,
                    Ok(pinned) => pinned,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                };
                for chunk in pinned.chunks() {
                    slice.put(chunk);
                }
                position += pinned.len() as u64;
            }
            Ok(())
        })?;
        match failed {
            Some(error) if came == 0 => Err(error),
            _ => Ok(came),
        }
    }

    /// Pins the folios that hold `range`, in bytes, from its beginning on: at most `max` of them. Missing folios are
    /// created. The folios have stable addresses, for a device or another library. The range must lie inside the
    /// file; the first and the last folio may reach over its ends ([`PinnedFolios::offset`]).
    ///
    /// # Errors
    /// As [`MemFile::pin`] and [`MemFile::preallocate`]; nothing is pinned then, and pages that were created stay.
    pub fn pin_folios(&self, range: Range<u64>, max: usize) -> Result<PinnedFolios> {
        let range = self.inside(range)?;
        let MemHandle { shared, mapping, .. } = &*self.handle;
        let (pool, process) = (self.pool_number(), shared.process);
        let request = FolioPinRequest { range, folios_max: max, pool, process };
        let pinned = shared.shmem.pin_folios(mapping, request);
        pinned.map_err(|error| self.explain(error))
    }

    fn inside(&self, range: Range<u64>) -> Result<Range<u64>> {
        self.check_process()?;
        Shmem::check_inside(&self.handle.mapping, &range)?;
        Ok(range)
    }
}

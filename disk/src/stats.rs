//! Stats: what a store has done and holds.
//!
//! Counters are relaxed: each is right by itself, and two of them may be of different moments.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a store's operations since it was opened, and of its contents.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct DiskStats {
    /// Pages that can be found now.
    pub pages: u64,
    /// Extents that can be found now.
    pub extents: u64,
    /// Pages that were put.
    pub put_pages: u64,
    /// Pages that were not put, as the disk was behind or is off. A page that was put late and was refused again counts
    /// again.
    pub refused_pages: u64,
    /// Refused pages that wait in memory to be put later. Counted by the cache above, as the next two are; 0 for a
    /// store alone.
    pub pending_pages: u64,
    /// Refused pages that were put later.
    pub late_pages: u64,
    /// Refused pages that will not be put before they arrive again: they had left memory or been written since, or
    /// were too many; or the disk was full and they had arrived once only, or it had failed.
    pub missed_pages: u64,
    /// Pages that were read.
    pub hit_pages: u64,
    /// Pages that moved to the newest segment, as they had been read.
    pub kept_pages: u64,
    /// Bytes written to the disk, tables and padding included.
    pub written_bytes: u64,
    /// Extents whose bytes did not have their checksum.
    pub corrupt_extents: u64,
    /// Reads and writes that the disk refused, or did not answer.
    pub errors: u64,
    /// Whether the disk is left alone now, because it failed or does not answer.
    pub is_off: bool,
}

#[derive(Default, Debug)]
pub struct Counters {
    pub put_pages: AtomicU64,
    pub refused_pages: AtomicU64,
    pub hit_pages: AtomicU64,
    pub kept_pages: AtomicU64,
    pub written_bytes: AtomicU64,
    pub corrupt_extents: AtomicU64,
    pub errors: AtomicU64,
}

impl Counters {
    pub fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    /// The operations so far; the caller adds the contents.
    pub fn read(&self) -> DiskStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DiskStats {
            pages: 0,
            extents: 0,
            put_pages: of(&self.put_pages),
            refused_pages: of(&self.refused_pages),
            pending_pages: 0,
            late_pages: 0,
            missed_pages: 0,
            hit_pages: of(&self.hit_pages),
            kept_pages: of(&self.kept_pages),
            written_bytes: of(&self.written_bytes),
            corrupt_extents: of(&self.corrupt_extents),
            errors: of(&self.errors),
            is_off: false,
        }
    }
}

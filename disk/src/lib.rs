//! Disk: a bounded, checksummed log of pages on a local disk, which survives the process and a power cut.
//!
//! It is the second tier of a Quinion cache: a page that is put here comes back in one read instead of a request to a
//! slow store. The cache decides what is put (`quinion/src/backend/disk_tier.rs`): pages as they arrive from the store,
//! not as memory evicts them; all of them while there is space, and those that arrive a second time once it is full.
//! This crate knows contents, page numbers and bytes, and nothing of the cache.
//!
//! ```text
//!   put ----> open segment, in memory --full, or a second old--> writer thread --one O_DIRECT write--> segment
//!              | table | data data ..                                                                  of the ring
//!   read ---> index --> in memory still? copy it : read the extents, compare each checksum
//!   open ---> read each segment's table --> index           (what is torn, or of another store, is not there)
//! ```
//!
//! The file is a **ring of segments** of 1 MiB. A segment is filled in memory and written at once; then the oldest is
//! overwritten. So the disk sees large sequential writes only, and nothing is compacted. Up to half of a segment's
//! pages, those read since they were written, move on to the newest segment before theirs is overwritten.
//!
//! **Never wrong, by one rule**: bytes are given out only if they have the checksum of their entry, which is seeded by
//! the content's key and the page number. Torn writes, reordered writes, segments overwritten under a reader, and
//! rotted bits all look the same: the pages are not there, and the caller asks the store behind. Nothing needs an order
//! of writes, so nothing waits for a sync.
//!
//! **Never in the way**: a `put` copies into memory, or is refused because the disk is behind; it never waits for the
//! disk. A disk that fails, or does not answer for 5 seconds, is left alone for a while ([`DiskStore::trouble`]);
//! nothing is lost, as all its bytes have another home. Reads notice that, the end, and puts that are refused because
//! the writer gets no answer. To open a store on such a disk is an error.
//!
//! Invariants:
//!  1. No page is given out whose checksum was not compared, except those still in memory, which were never away.
//!  2. The file has the size that was asked for, from the first moment on; [`DiskOptions::buffer_bytes`] bounds the
//!     memory for segments.
//!  3. A file that is no store of this crate, or of another user, is never written to.
//!
//! Not an invariant: that pages that were put are found later. It is a cache.
//!
//! Locks: `staging`, then `index`; both for the time of a copy of 64 KiB at most. No lock is held at the disk. Kernel
//! cousins: bcache, and `fs/nilfs2` for the log. Compare CacheLib's Navy (region manager) and foyer's block engine.

mod device;
mod error;
mod health;
mod index;
mod layout;
mod opening;
mod options;
mod reads;
mod staging;
mod stats;
mod store;

pub use device::{Device, FileDevice};
pub use error::{DiskError, DiskTrouble};
pub use layout::ContentKey;
pub use options::DiskOptions;
pub use stats::DiskStats;
pub use store::{DiskStore, Missed};

#[doc(hidden)]
pub mod internals {
    //! For this repository's tests alone.
    pub use crate::layout::{DATA_PAGES, EXTENT_PAGES_MAX, PAGE_BYTES, SEGMENT_BYTES, segment_start};
    pub use crate::options::{TestTimes, with_times};
}

//! Quinion: a page cache you own.
//!
//! Files are cached as folios in one bounded arena, found through an XArray per file, filled in batches by readahead,
//! and read without a system call or a lock; a hot page is read without a store to shared memory.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cache = quinion::Cache::builder().memory(256 << 20).build()?;
//! let file = cache.open("/var/lib/data.db")?;
//! let mut page = [0u8; 4096];
//! let bytes = file.read_at(&mut page, 8192)?; // copied
//! let pinned = file.pin(0, 1 << 20)?; // not copied
//! let sum: u64 = pinned.chunks().flatten().map(|&byte| u64::from(byte)).sum();
//! println!("{bytes} bytes, sum {sum}, {:?}", cache.stats());
//! # Ok(())
//! # }
//! ```
//!
//! Files are written through it, too. A write is in the cache when it returns, and durable when a sync has said so:
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let cache = quinion::Cache::builder().build()?;
//! use quinion::OpenOptions;
//! let log = cache.open_with("/var/lib/log", OpenOptions::new().write(true).create(true))?;
//! let position = log.append(b"a record\n")?; // seen by every reader of this cache
//! log.sync_data()?; // survives the machine
//! # assert_eq!(position, 0);
//! # Ok(())
//! # }
//! ```
//!
//! And there are files that exist only in this memory, sparse and as large as you like:
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let cache = quinion::Cache::builder().memory(16 << 20).build()?;
//! let scratch = cache.mem_file(quinion::MemFileOptions::new().size(1 << 40))?;
//! scratch.write_all_at(b"a terabyte, of which this takes 4 KiB", 1 << 39)?;
//! assert_eq!(scratch.read_at(&mut [0; 1 << 20], 0)?, 1 << 20); // zeros, which take nothing
//! scratch.punch_hole(1 << 39, 4096)?; // and now neither does the rest
//! # Ok(())
//! # }
//! ```
//!
//! Begin with [`Cache`] and [`File`]; then [`OpenOptions`], [`ReadOptions`], [`WriteOptions`], [`BatchRead`],
//! [`Pinned`], [`MemFile`], [`Stats`] and [`Error`]. All else here serves these:
//!
//! | for | types |
//! |---|---|
//! | building a cache | [`Builder`], [`SpillOptions`], [`DiskOptions`], [`WritebackOptions`], [`Pressure`], [`Mechanism`], [`ReadaheadStyle`], [`process_limit`] |
//! | sharing it out | [`Pool`], [`PoolOptions`], [`PoolStats`], [`ResizeOutcome`] |
//! | reading | [`Hint`], [`Prefetch`], [`Coherence`], [`CoherenceInForce`], [`NoLease`], [`Metadata`], [`Chunks`] |
//! | writing | [`Durability`], [`BatchWrite`], [`OnPinned`] |
//! | waiting without a thread | [`ReadFuture`], [`PinFuture`], [`WriteFuture`], [`BatchReadFuture`], [`BlockingCall`]; `AsyncFile` with the feature `tokio` |
//! | files in memory, and memory of virtual machines | [`MemFileOptions`], [`MemFileStats`], [`PopulateSlice`], [`PinnedFolios`], [`PinnedFolio`], [`GuestMemory`], [`GuestSlice`], [`Image`], [`ImageStats`] |
//! | what it does, in numbers | [`StatDescription`], [`Residency`], [`ResidentRanges`], [`ResidentRange`], [`PageState`], [`ReadaheadUse`], [`ReadaheadReport`], [`AccessPattern`], [`RefaultCurve`], [`MissRatioCurve`], [`SpillStats`], [`DiskStats`] |
//! | errors | [`ErrorKind`]; all of them in [`error`] |
//!
//! A store of your own is a [`backend::Backend`]. The crate `quinion-service` shares a cache with other processes.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "Quinion is for 64-bit Linux: it uses memfd, futexes and io_uring, and maps its whole memory. Build it on or for \
     such a machine (--target x86_64-unknown-linux-gnu); it runs inside a container or a virtual machine, too."
);

// The test doubles are compiled into the unit tests as source and say `quinion::`.
#[cfg(all(test, not(quinion_model)))]
extern crate self as quinion;

/// The modules of the architecture, for this repository's command, benchmark and tests. No promise is made: names and
/// behaviour change without an entry in the change log.
#[doc(hidden)]
#[path = "."]
pub mod internals {
    // Lowest layer: numbers, errors, locks, system calls, memory.
    pub use quinion_view::units;
    #[cfg(not(quinion_model))]
    pub mod error;
    #[cfg(not(quinion_model))]
    pub mod stats;
    pub mod sync;
    pub mod errseq;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "system calls")]
    pub mod sys;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "numbers become references to mapped memory here")]
    pub mod arena;
    #[cfg(quinion_model)]
    pub use ::quinion_view::arena;
    // Data: a run of pages, and where bytes come from.
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "bytes are copied under the hit protocol")]
    pub mod folio;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "devices write into frames by address")]
    pub mod backend;
    /// Parts of [`backend`] that are not of the public interface: files of the system, and the engine for them.
    #[cfg(not(quinion_model))]
    pub mod system_files {
        pub use super::backend::engine::{ChosenMechanism, Engine, EngineOptions};
        pub use super::backend::local_file::LocalFile;
        pub use super::backend::open_file::{
            Creation, InitialContent, IoMode, NotAFileKind, OpenError, OpenForWrite, identity_of,
        };
    }
    // Index: which folio is where.
    pub mod xarray;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "what is spilled is written from frames, and comes back into them")]
    pub mod spill;
    #[cfg(not(quinion_model))]
    pub mod lists;
    #[cfg(not(quinion_model))]
    pub mod mapping;
    // Policy: numbers in, decisions out.
    pub mod readahead;
    pub mod workingset;
    pub mod policy;
    #[cfg(not(quinion_model))]
    pub mod pressure;
    pub mod curve;
    // Background: work that no caller waits for, and free memory for more.
    #[cfg(not(quinion_model))]
    pub mod background;
    #[cfg(not(quinion_model))]
    pub mod blocking_threads;
    #[cfg(not(quinion_model))]
    pub mod lease;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "folios on their way to the spill file hand out their frames")]
    pub mod reclaim;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "flushes hand out frames")]
    pub mod writeback;
    // Paths: what happens to a request.
    #[cfg(not(quinion_model))]
    #[allow(
        unsafe_code,
        reason = "hits copy to a caller's address, fills hand out frames, pins lend bytes, writes fill frames"
    )]
    pub mod filemap;
    #[cfg(not(quinion_model))]
    pub mod shmem;
    #[cfg(not(quinion_model))]
    #[allow(unsafe_code, reason = "a guest's memory is copied to and from an address")]
    pub mod guest;
    // Public API.
    #[cfg(not(quinion_model))]
    pub(crate) mod cache;
    #[cfg(not(quinion_model))]
    pub use cache::{hooks, serving};
    pub use quinion_view::fdstate;
}

#[allow(unused_imports, reason = "which modules there are depends on the features")]
pub(crate) use internals::*;

#[cfg(not(quinion_model))]
#[doc(inline)]
pub use internals::{backend, error};

#[cfg(not(quinion_model))]
pub use internals::arena::process_limit;
#[cfg(not(quinion_model))]
pub use internals::backend::Mechanism;
#[cfg(all(feature = "tokio", not(quinion_model)))]
pub use internals::cache::AsyncFile;
#[cfg(not(quinion_model))]
pub use internals::cache::{
    BatchRead, BatchReadFuture, BatchWrite, BlockingCall, Builder, Cache, Coherence, CoherenceInForce,
    Durability, File, GuestMemory, GuestSlice, Image, ImageStats, MemFile, MemFileOptions, MemFileStats,
    Metadata, OpenOptions, PinFuture, Pool, PoolOptions, PoolStats, ReadFuture, ReadOptions, ReadaheadUse,
    Residency, ResidentRange, ResidentRanges, ResizeOutcome, StatDescription, Stats, WriteFuture,
    WriteOptions,
};
pub use internals::curve::MissRatioCurve;
#[cfg(not(quinion_model))]
pub use internals::error::{Error, ErrorKind};
#[cfg(not(quinion_model))]
pub use internals::filemap::{OnPinned, Prefetch};
#[cfg(not(quinion_model))]
pub use internals::folio::{Chunks, Pinned, PinnedFolio, PinnedFolios};
#[cfg(not(quinion_model))]
pub use internals::lease::NoLease;
#[cfg(not(quinion_model))]
pub use internals::mapping::PageState;
#[cfg(not(quinion_model))]
pub use internals::pressure::Pressure;
#[cfg(not(quinion_model))]
pub use internals::readahead::{AccessPattern, Hint, ReadaheadReport, ReadaheadStyle};
#[cfg(not(quinion_model))]
pub use internals::shmem::PopulateSlice;
#[cfg(not(quinion_model))]
pub use internals::spill::{SpillOptions, SpillStats};
pub use internals::workingset::RefaultCurve;
#[cfg(not(quinion_model))]
pub use internals::writeback::WritebackOptions;
#[cfg(not(quinion_model))]
#[doc(inline)]
pub use quinion_disk::{DiskOptions, DiskStats};

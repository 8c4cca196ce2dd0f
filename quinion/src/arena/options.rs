//! Options: an arena's options, the errors of building one, and its numbers.
//!
//! A bound is the most memory that the arena and the control file take together, in bytes. Tables and address space are
//! made for the largest bound ([`Reservation::memory_max`]); the bound in force lies between the least and that.
//!
//! Invariant: a layout is made for bounds that were checked here, and for no others.

use super::Layout;
use super::cells::CELL_EXTENTS_MAX;
use super::limits::process_limit;
use crate::units::{EXTENT_PAGES, EXTENT_SIZE};
use quinion_view::arena::control::CONTROL_BYTES;

/// The least bound, in bytes.
pub(super) const MEMORY_MIN: u64 = 16 << 20;
/// The most memory an arena can be built with, in bytes: 256 GiB, as far as cells can be numbered, and
/// the control file.
pub(super) const MEMORY_MAX: u64 = CELL_EXTENTS_MAX as u64 * EXTENT_SIZE as u64 + CONTROL_BYTES as u64;
/// Extents that an arena has at least beside its tables.
const EXTENTS_MIN: u64 = 6;

/// Options of an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaOptions {
    /// The bound, in bytes: the arena and the control file together never take more. At least
    /// [`Arena::MEMORY_MIN`](super::Arena::MEMORY_MIN); a rest that is no whole extent (2 MiB) is not used.
    pub memory: u64,
}

/// How far an arena can be resized, and whether the system may swap it out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reservation {
    /// The largest bound it can be given, in bytes: its address space and its tables are made for this. At least the
    /// bound it is built with.
    pub memory_max: u64,
    /// Whether its memory is locked.
    pub swap: Swap,
}

/// Whether the system may write an arena's memory to its swap space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Swap {
    /// The system may swap the memory out, if it has swap space.
    #[default]
    Allowed,
    /// The system may not swap the memory out: each page is locked from the moment it is there.
    Locked,
}

/// Why an arena could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The bound is below the least with which a cache works.
    #[error("a cache of {asked} bytes was asked for, and the least is {min}: give it more memory")]
    TooSmall {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The least, in bytes.
        min: u64,
    },
    /// The bound is above the limit of this machine, container or version.
    #[error(
        "a cache of {asked} bytes was asked for, and this process may use {max}: give it less memory, or raise the \
         limit of the process or its control group"
    )]
    TooLarge {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The most to which it could grow is less than the bound.
    #[error(
        "a cache of {asked} bytes was asked for, and its memory_max is {max}: raise that, or lower memory"
    )]
    MaxBelowMemory {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The bound is above the arena's largest.
    #[error(
        "a bound of {asked} bytes was asked for, and this cache was built for {max} at most: build it with a larger \
         memory_max"
    )]
    AboveMax {
        /// The bound asked for, in bytes.
        asked: u64,
        /// The most, in bytes.
        max: u64,
    },
    /// The system does not let this process lock so much memory.
    #[error(
        "cannot lock {bytes} bytes of memory ({source}): this process may lock {}; raise RLIMIT_MEMLOCK \
         (ulimit -l, LimitMEMLOCK= of systemd) above that and what else it locks, give it CAP_IPC_LOCK, lower \
         memory_max, or build the cache without lock_memory",
        limit.map_or("any amount".into(), |limit| format!("{limit} bytes"))
    )]
    Locked {
        /// Bytes that were to be locked.
        bytes: u64,
        /// `RLIMIT_MEMLOCK` in bytes; `None` for no limit.
        limit: Option<u64>,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system refused something an arena needs.
    #[error(
        "no memory for a cache: {call} failed ({source}); ask for less memory, or raise the limit of this process or \
         container that it reached (RLIMIT_AS, vm.max_map_count, memory.max)"
    )]
    System {
        /// The call that failed.
        call: &'static str,
        /// Error of the call that failed.
        source: std::io::Error,
    },
}

/// Numbers of an arena at one moment. Bytes and pages are of the machine's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaStats {
    /// The bound in force.
    pub bound_bytes: u64,
    /// The largest bound it can be given.
    pub max_bytes: u64,
    /// Memory taken so far, the control file not included: `meta_bytes + cell_bytes + data_bytes + guest_bytes`.
    pub grown_bytes: u64,
    /// The header's and the tables' part of it. All of it counts from the start, though some has no memory until the
    /// frames come that need it.
    pub meta_bytes: u64,
    /// The part that is cut into cells, for index nodes and mapping records.
    pub cell_bytes: u64,
    /// Cells handed out.
    pub cells_used: u64,
    /// The part that is for data, free or not.
    pub data_bytes: u64,
    /// The part that is guests', all of it, whether their pages have memory yet or not.
    pub guest_bytes: u64,
    /// Pages of `data_bytes` that are free.
    pub free_pages: u64,
    /// Free pages of extents that are being emptied: they are not allocated, and not in `free_pages`.
    pub leaving_pages: u64,
    /// Extents that are one page of 2 MiB.
    pub extents_huge: u64,
    /// Extents that are pages of 4 KiB, because the kernel had no larger one.
    pub extents_small: u64,
    /// The control file's size, all of which counts against the bound.
    pub control_bytes: u64,
    /// How often the machine had no memory for an extent that the bound would have allowed.
    pub growth_failures: u64,
    /// Bytes still to be given back until the arena is within its bound.
    pub slack_bytes: u64,
    /// Bytes given back to the machine so far.
    pub returned_bytes: u64,
    /// Bytes kept by users' pins: of their folios, each counted once.
    pub pinned_bytes: u64,
}

/// The default size of a cache: a quarter of [`process_limit`] in bytes, in whole extents, and at least the least that
/// an arena can be built with.
pub fn default_memory() -> u64 {
    let quarter = process_limit() / 4;
    let whole = quarter - quarter % EXTENT_SIZE as u64;
    whole.clamp(MEMORY_MIN, MEMORY_MAX)
}

pub(super) fn extents_within(memory: u64) -> u32 {
    ((memory - CONTROL_BYTES as u64) / EXTENT_SIZE as u64) as u32
}

pub(super) fn memory_min(layout: &Layout) -> u64 {
    let extents = u64::from(layout.frames_meta / EXTENT_PAGES) + EXTENTS_MIN;
    CONTROL_BYTES as u64 + extents * EXTENT_SIZE as u64
}

/// The layout for bounds of `memory` to `memory_max` bytes, if these are bounds.
pub(super) fn layout_for(memory: u64, memory_max: u64) -> Result<Layout, ArenaError> {
    if memory < MEMORY_MIN {
        return Err(ArenaError::TooSmall { asked: memory, min: MEMORY_MIN });
    }
    if memory_max < memory {
        return Err(ArenaError::MaxBelowMemory { asked: memory, max: memory_max });
    }
    let max = MEMORY_MAX.min(process_limit());
    if memory_max > max {
        return Err(ArenaError::TooLarge { asked: memory_max, max });
    }
    let layout = Layout::new(memory_max - CONTROL_BYTES as u64);
    let layout = layout.expect("the bound is between the least and the most");
    match memory_min(&layout) {
        min if memory < min => Err(ArenaError::TooSmall { asked: memory, min }),
        _ => Ok(layout),
    }
}

pub(super) fn no_memory(source: std::io::Error) -> ArenaError {
    ArenaError::System { call: "madvise(MADV_POPULATE_WRITE)", source }
}

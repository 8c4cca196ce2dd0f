//! Backing: what stands behind the pages of a mapping: a file, nothing, or the spill file.
//!
//! Which it is does not change while the mapping lives. The paths of files
//! (`filemap`) and of memory files (`shmem`) ask it where they meet.

use std::sync::Arc;

use crate::spill::Spill;
use crate::units::PoolNumber;

/// What is behind the pages of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Backing {
    /// A file.
    #[default]
    Device,
    /// Nothing: it is a memory file, whose pages stay where they are until they are punched or the file ends.
    Kept,
    /// Nothing, but its folios may go to the spill file.
    Spills,
}

/// Where a mapping's folios go when memory is short.
#[derive(Clone, Debug)]
pub(super) struct SpillTarget {
    pub spill: Arc<Spill>,
    /// The pool that is charged when they come back.
    pub pool: PoolNumber,
}

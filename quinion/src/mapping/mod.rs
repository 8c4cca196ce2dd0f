//! Mapping: which folio holds which pages of one file.
//!
//! ```text
//!      index   0   1   2   3   4   5   6   7          F  folio of order 2 at 0
//!              [------ F -----] [G] [s]  .  .         G  order 0      s  shadow of an evicted folio
//! ```
//!
//! A mapping is a [`Record`](crate::arena::Record) in the arena, which readers in any process look at, and a part on
//! the heap that only the owner needs: the lock of its tree, its invalidate lock, the backend its bytes come from.
//!
//! Readers take no lock: see [`find`] here and the hit path in `filemap`; a reader that needs several folios to stay
//! gets a `ReadBatch` of them. Changes go through `Mapping::lock`: the `MappingGuard` is the tree lock, held; to
//! insert, a thread takes it by `Mapping::lock_to_add`. A folio enters the tree locked and not up to date, with a hold
//! that is the fill's; only the end of the fill makes it readable.
//!
//! ```text
//!   insert, evict, remove    how folios go in and leave        nodes      where nodes come from
//!   grab                     a range, found or created         split      a live folio in smaller ones
//!   dirty                    what differs from the file        memory     files whose pages are nowhere else
//!   spill                    values for spilled pages          hooks      steps that a benchmark or a test takes over
//! ```
//!
//! The **invalidate lock** is another one: a thread that adds folios holds it shared from the insertion until the fills
//! are submitted, whoever empties a range holds it alone. So no folio appears in a range that is being emptied.
//!
//! The **write lock** comes before it: a writer inside the file's size holds it shared, one that changes the size, or
//! takes pages out on behalf of this file's own writers, holds it alone.
//!
//! Invariants (asserted by `Mapping::check`):
//!  1. A folio in the tree is live, belongs to this mapping, and stands at its own index.
//!  2. The number of pages counted is the number of pages in the tree.
//!  3. The record's size is stored before any page beyond it is let go.
//!  4. The nodes of the tree that hold shadows only are listed as such, and no others.
//!  5. Bits, flags, marks and counts of dirty pages agree: those of `dirty.rs`.
//!
//! Not an invariant: that a folio found without the lock is still there. The descriptor tells.
//!
//! A mapping dies when no handle is left and it has no folios, or when the cache has too many that are not open; its
//! number is not used again while any descriptor may carry it.
//!
//! Kernel cousin: `struct address_space`. This differs: the lock is a value, outcomes are enums.

mod backing;
mod batch;
mod check;
mod dirty;
mod dirty_counts;
mod drop_behind;
mod entries;
mod evict;
mod grab;
mod hooks;
mod index;
mod insert;
mod invalidate;
mod memory;
mod new_folio;
mod nodes;
mod own_changes;
mod owner;
pub mod page_ranges;
mod remove;
mod residency;
mod shadow_nodes;
mod spill;
mod split;
mod version;
pub mod writeback_state;

pub use backing::{Backing, MemoryBacking, SpillTarget};
pub use batch::{BATCH_FOLIOS_MAX, BatchEnd, BatchRules, LastFolioRule, ReadBatch, StopRule};
pub use dirty::{
    MarkOutcome, RUN_PAGES_MAX, TAGGED_MAX, TakeEnd, TakeFilter, WritebackEnd, WritebackOutcome, WritebackRun,
};
pub use dirty_counts::DirtyPages;
pub use drop_behind::{BEHIND_FOLIOS_MAX, DropBehindOutcome, DropReason};
pub use evict::Replacement;
pub use grab::{
    Committed, FrameSource, GRAB_PAGES_MAX, GapFrames, Grab, GrabEnd, GrabObserver, GrabRequest, GrabStep,
    Grabbed, MarkDirty, MemoryWait, OnLocked,
};
pub use hooks::{IndexHooks, RunInsertion, TreeWalks};
pub use index::FolioIndex;
pub use memory::{MemoryEntry, MemoryPages, NewMemoryMapping, SeekTarget};
pub use new_folio::{
    AddedFolio, AddedRuns, AskedFor, FolioLifetime, FolioShape, InsertPurpose, NewFolio, RunOutcome,
    ShadowObserver, cut, folios_of,
};
pub use nodes::{SPARE_MAX, TreeCounts};
pub use owner::{Mapping, MappingGuard, NewMapping};
pub use quinion_view::lookup::{FolioFinder, NODE_BITS, find, finder, seek};
pub use remove::{InFlightFolio, REMOVED_FOLIOS_MAX, RemoveFilter, Removed};
pub use residency::{PageState, StateRange, StateRanges};
pub use shadow_nodes::{AgeLimit, OWNERS, ShadowNodes};
pub use spill::{PartOutcome, RestoreOutcome, SpillOut, SpillOutEnd};
pub use split::{DetachOutcome, SplitOutcome};
pub use version::{DueBeforeFlush, RevalidationAfterFlush, RevalidationBeforeFlush, VersionProbe};
pub use writeback_state::WritebackState;

//! Arena: the cache's memory, one reservation addressed by frame number.
//!
//! ```text
//!   offset 0        4096                     first extent            2 MiB each
//!   +--------+------------------------------+-----------+-----------+-----------+- - -
//!   | header | tables: descriptors 32 B,    |   data    |   nodes   |   data    |  not yet
//!   |        | referenced 1 B, write        | 512 pages | 12 a page | 512 pages |  grown
//!   |        | sequence 4 B, 3 bits a frame |           |           |           |
//!   +--------+------------------------------+-----------+-----------+-----------+- - -
//!   frame 0    1 ...                          512 * k
//! ```
//!
//! One memfd holds all that a viewer needs, and nothing in it is a pointer:
//! frames and nodes are numbers, so the arena may be mapped anywhere, by any
//! process, read-only. [`Layout`] says where each part lies; [`View`] is the
//! one place that turns a number into a reference, and checks it first.
//! [`Descriptor`] is what is known of one frame, and its byte in [`referenced`] whether it was read;
//! [`written`] is how pages are changed while others read them, and [`dirty`] which of them are not in the file yet.
//!
//! The second file, [`control`], is small, and viewers write it.
//!
//! ```text
//!   for viewers and owner, no_std       view -> layout, descriptor      control      doorbells      file_systems
//!   for the owner                       owner -> options   bounds, errors, numbers
//!                                             -> segment   memory from the machine, sealed to the largest bound
//!                                             -> stock     what is grown, and which of it is free
//!                                             -> allocate  frames and cells, handed out and given back
//!                                             -> share     what viewers and handles have of it
//!                                             -> buddy     which frames are free
//!                                             -> cells     which cells are free
//!                                             -> tables    memory for the tables, when frames need it
//!                                             -> shrink    extents out of use, and back to the machine
//!                                             -> guest     extents with files of their own
//!                                             -> limits    how much a process may hope for
//!                                             -> page_locks   changes of a page's bytes in place
//! ```
//!
//! Invariants:
//!  1. No pointer is ever stored in the arena.
//!  2. A number read from the arena is checked against what is grown before it is used.
//!  3. The arena never reclaims. It says "none", and the path that asked calls reclaim.
//!  4. The arena never exceeds its bound, except while a bound that was lowered has not been reached yet.

#[cfg_attr(quinion_model, allow(dead_code, reason = "each model uses its part"))]
pub mod doorbells;
mod descriptor;
pub mod dirty;
pub mod pages_read;
pub mod written;
pub use descriptor::{
    Descriptor, DescriptorWord, FillEnd, Flags, HOLDS_MAX, HoldRefused, LockRefused, NO_PLACE, NotReady,
    PutOutcome, ReadableState, RetireOutcome, Ticket, WriteRefused, before_bytes,
};

// The model checker's atomics are larger than real ones, so under it there is no shared layout.
#[cfg(not(quinion_model))]
pub mod control;
#[cfg(not(quinion_model))]
pub mod file_systems;
#[cfg(not(quinion_model))]
mod layout;
#[cfg(not(quinion_model))]
pub mod referenced;
#[cfg(not(quinion_model))]
mod view;
// The owner's side.
#[cfg(all(feature = "std", not(quinion_model)))]
mod allocate;
#[cfg(all(feature = "std", not(quinion_model)))]
mod buddy;
#[cfg(all(feature = "std", not(quinion_model)))]
mod cells;
#[cfg(all(feature = "std", not(quinion_model)))]
mod guest;
#[cfg(all(feature = "std", not(quinion_model)))]
mod guests;
#[cfg(all(feature = "std", not(quinion_model)))]
mod limits;
#[cfg(all(feature = "std", not(quinion_model)))]
mod options;
#[cfg(all(feature = "std", not(quinion_model)))]
mod owner;
#[cfg(all(feature = "std", not(quinion_model)))]
mod page_locks;
#[cfg(all(feature = "std", not(quinion_model)))]
mod segment;
#[cfg(all(feature = "std", not(quinion_model)))]
mod returned_frames;
#[cfg(all(feature = "std", not(quinion_model)))]
mod share;
#[cfg(all(feature = "std", not(quinion_model)))]
mod shrink;
#[cfg(all(feature = "std", not(quinion_model)))]
mod stock;
#[cfg(all(feature = "std", not(quinion_model)))]
mod tables;
#[cfg(all(feature = "std", not(quinion_model)))]
pub use buddy::FrameRun;
#[cfg(all(feature = "std", not(quinion_model)))]
pub use guest::{ClaimOutcome, GuestExtents, GuestRefused, GuestUse};
#[cfg(not(quinion_model))]
pub use layout::{Header, LAYOUT_VERSION, Layout, LayoutError, MAGIC, OWNER_ENDED};
#[cfg(all(feature = "std", not(quinion_model)))]
pub use limits::{GroupVersion, memory_groups, process_limit};
#[cfg(all(feature = "std", not(quinion_model)))]
pub use options::{ArenaError, ArenaOptions, ArenaStats, Reservation, Swap, default_memory};
#[cfg(all(feature = "std", not(quinion_model)))]
pub use owner::Arena;
#[cfg(all(feature = "std", not(quinion_model)))]
pub use page_locks::{PageLock, PageLocks};
#[cfg(all(feature = "std", not(quinion_model)))]
pub use share::{ArenaShare, OwnedRecord, OwnedView};
#[cfg(all(feature = "std", not(quinion_model)))]
pub use stock::{AllocAmount, FrameAlignment};
#[cfg(not(quinion_model))]
pub use view::{CELLS_PER_PAGE, CellNumber, GrownView, NodeHead, Record, Validation, View};

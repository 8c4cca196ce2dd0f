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
//! One memfd holds all that a viewer needs, and nothing in it is a pointer: frames and nodes are numbers, so the arena
//! may be mapped anywhere, by any process, read-only. Viewers share [`quinion_view::arena`]: [`Layout`] says where each
//! part lies; [`View`] is the one place that turns a number into a reference, and checks it first. [`Descriptor`] is
//! the state of one frame, and its byte in [`referenced`] whether it was read; [`written`] is how pages are changed
//! while others read them, and [`dirty`] which of them are not in the file yet.
//!
//! The second file, [`control`], is small, and viewers write it.
//!
//! ```text
//!   quinion_view::arena                 view -> layout, descriptor      control      doorbells      file_systems
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
//!  2. A number read from the arena is checked against the grown extents before it is used.
//!  3. The arena never reclaims. It says "none", and the path that asked calls reclaim.
//!  4. The arena never exceeds its bound, except while a bound that was lowered has not been reached yet.

// The part that viewers share.
pub use quinion_view::arena::*;

// The owner's side.
mod allocate;
mod buddy;
mod cells;
mod guest;
mod guests;
mod limits;
mod options;
mod owner;
mod page_locks;
mod segment;
mod returned_frames;
mod share;
mod shrink;
mod stock;
mod tables;
pub use allocate::AllocRequest;
pub use buddy::FrameRun;
pub use guest::{ClaimOutcome, GuestExtents, GuestRefused, GuestUse};
pub use limits::{GroupVersion, memory_groups, process_limit};
pub use options::{ArenaError, ArenaOptions, ArenaStats, Reservation, Swap, default_memory};
pub use owner::Arena;
pub use page_locks::{PageLock, PageLocks};
pub use share::{ArenaShare, OwnedRecord, OwnedView};
pub use stock::{AllocAmount, FrameAlignment, Gap};

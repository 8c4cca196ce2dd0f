//! Arena: the layout of the cache's memory, and of the file of requests beside it.
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
//! One memfd holds all that a viewer needs. Frames and nodes are numbers, not pointers, so any process may map the
//! arena anywhere, read-only. [`Layout`] says where each part lies; [`View`] is the one place that turns a number into
//! a reference, and checks it first. [`Descriptor`] is the state of one frame, and its byte in [`referenced`] whether
//! it was read; [`written`] is how pages are changed while others read them, [`dirty`] which of them are not in the
//! file yet, and [`pages_read`] which of a folio that is being filled have arrived.
//!
//! The second file, [`control`], is small, and viewers write it: each a page of its own. [`doorbells`] are how many
//! of them are heard by one thread; [`file_systems`] which file systems are served.
//!
//! How frames are handed out is the owner's own: `arena` of crate `quinion`.

#[cfg_attr(quinion_model, allow(dead_code, reason = "each model uses its part"))]
pub mod doorbells;
mod descriptor;
pub mod dirty;
pub mod pages_read;
pub mod written;
pub use descriptor::{
    Descriptor, DescriptorWord, FillEnd, Flags, FolioStamp, HOLDS_MAX, HoldRefused, LockRefused, NO_PLACE,
    NotReady, PutOutcome, ReadableState, RetireOutcome, WriteRefused, before_bytes,
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
#[cfg(not(quinion_model))]
pub use layout::{Header, LAYOUT_VERSION, Layout, LayoutError, MAGIC, OWNER_ENDED};
#[cfg(not(quinion_model))]
pub(crate) use view::fetch_line;
#[cfg(not(quinion_model))]
pub use view::{CELLS_PER_PAGE, CellNumber, GrownView, NodeHead, Record, Validation, View};

//! XArray: an index from page numbers to entries.

mod entry;
mod walk;

#[cfg(feature = "std")]
mod check;
#[cfg(feature = "std")]
mod erase;
#[cfg(feature = "std")]
mod insert;
#[cfg(feature = "std")]
mod iter;
#[cfg(feature = "std")]
mod mark;
#[cfg(feature = "std")]
mod node;
#[cfg(feature = "std")]
mod tree;

pub use entry::{ENTRY_ORDER_MAX, Entry, Kind, NUMBERS_MAX, PAYLOADS_MAX, Root, Value};
pub use walk::{RacySlots, walk, walk_to_leaf};

#[cfg(feature = "std")]
pub use erase::{Exchanged, Forgotten};
#[cfg(feature = "std")]
pub use insert::{AddedRange, Inserted, Stop, Stored};
#[cfg(feature = "std")]
pub use iter::Range;
#[cfg(feature = "std")]
pub use mark::Mark;
#[cfg(feature = "std")]
pub use node::{Head, KEEPER_WORD};
#[cfg(feature = "std")]
pub use tree::{INDICES_MAX, ShadowOnly, Slab, XArray};

//! XArray: an index from page numbers to entries.

mod entry;
mod walk;

pub use entry::{ENTRY_ORDER_MAX, Entry, Kind, NUMBERS_MAX, PAYLOADS_MAX, Root, Value};
pub use walk::{RacySlots, walk, walk_to_leaf};

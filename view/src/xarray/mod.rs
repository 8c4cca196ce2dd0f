//! XArray, the readers' half: the meaning of a slot, and the walk from a root to it.
//!
//! A tree of nodes with 64 slots, or 2^BITS of them. The owner changes it under a lock (`xarray` of crate `quinion`,
//! which draws it); a reader takes none. [`walk()`] may meet a tree that changes and nodes that were recycled. It
//! always ends, stays in bounds, and returns a hint, which the folio's descriptor confirms or not.
//!
//! ```text
//!   entry    what 32 bits of a slot, and the 64 of a root, mean
//!   walk     from a root's word down to one slot, through slots that may change
//! ```
//!
//! Invariant: a walk takes as many steps as its root's word says levels, whatever it meets.

mod entry;
mod walk;

pub use entry::{ENTRY_ORDER_MAX, Entry, Kind, NUMBERS_MAX, PAYLOADS_MAX, Root, Value};
pub use walk::{Finder, RacySlots, Steps, WalkResult, Walker, load_root, walk};

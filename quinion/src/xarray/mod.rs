//! XArray: an index from page numbers to entries.
//!
//! ```text
//!   root ---> node, shift 6 ---> node, shift 0     BITS 6: 64 slots in a node, 6 bits of the index a level
//!             [ . | * | . ]      [ F F F F | G | s | . ]     F  a folio of order 2, in four slots
//!                                                            G  order 0      s  a shadow
//! ```
//!
//! An [`Entry`] is 32 bits: nothing, a node, a folio, or a value. An entry of
//! order n stands at a multiple of 2^n, on the level whose slots are not larger
//! than it, and **in every slot that it covers**: a reader reads one slot and
//! has it. A **mark** is a bit of an entry that can be searched for.
//!
//! There are two sides. Readers [`walk`] without a lock and without a store;
//! what they bring back is a hint. Writers make an [`XArray`] of the nodes'
//! keeper and the root's word, under whatever lock guards the tree, and for
//! them it is exact.
//!
//! ```text
//!   entry, walk              what a reader needs; all there is without `std`
//!   tree, node               who keeps the nodes, and finding the way among them
//!   insert, erase, mark      changes       iter   searches       check   everything at once
//! ```
//!
//! Invariants (asserted by [`XArray::check`]):
//!  1. An entry is the same in all of its slots.
//!  2. A node holds something, and knows how much and how many shadows.
//!  3. The tree is as low as its entries allow.
//!  4. A mark of a node is set exactly if an entry below has it.
//!  5. A node is published with its content, so a reader never sees one that is half made.
//!
//! Not an invariant: that a node a reader is in still belongs to the tree. It
//! may be freed and used again at any time, which is why a walk is a hint.
//!
//! Here lives no knowledge of folios or of memory: a trait, [`Slab`], keeps the
//! nodes and tells an entry's order.
//!
//! Kernel cousin: `struct xarray` with multi-index entries. We differ: entries
//! are replicated instead of having sibling entries that point back.

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

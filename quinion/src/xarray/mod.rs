//! XArray: an index from page numbers to entries, sparse, with entries of many sizes.
//!
//! A tree of nodes with 2^BITS slots. An **entry** is a folio, by number, or a **value**: a **shadow**, which remembers
//! an eviction and may be dropped, split or replaced, or a **spill**, which is data that lives elsewhere. An entry of
//! **order** n covers 2^n pages from an **index** that is a multiple of 2^n. It stands on the level where one slot
//! covers the largest power of 2^BITS that fits in it, and there in every slot that it covers, whole:
//!
//! ```text
//!   a shadow of order 9 in 64-slot nodes          a page comes in at 77
//!
//!   slot   0   1   2   3       7                  0   1   2   3       7
//!        +---+---+---+---+-+-+---+              +---+---+---+---+-+-+---+
//!        | s9| s9| s9| s9| . | s9|              | s6| * | s6| s6| . | s6|     64 pages a slot
//!        +---+---+---+---+-+-+---+              +---+-|-+---+---+-+-+---+
//!                                                     |    64      77      95 96     127
//!        9 -> 6  in the same slots                    +->+--+- -+-----+- -+--+--+- -+--+
//!        6 -> 5  in one new node                         |s0| . |folio| . |s0|s5| . |s5|
//!        5 -> 0  in half of it                           +--+- -+-----+- -+--+--+- -+--+  a page a slot
//! ```
//!
//! Only the entry in the way is split, one step at a time, and the pieces split off stay as large as they can without a
//! node of their own. At each moment every slot holds the old shadow or a piece of it, and both say the same.
//!
//! An entry tells its own order, a value by its bits and a folio by asking the [`NodeSlab`]; so no slot points to
//! another slot, a reader never hops sideways, and the first index of an entry follows from any index inside it.
//!
//! **Writers** hold the one lock that guards the root; They hold it to use [`XArray`]. **Readers** need none:
//! [`walk()`] may meet a tree that changes and nodes that were recycled. It always ends, stays in bounds, and returns a
//! hint, which the folio's descriptor confirms or not.
//!
//! ```text
//!   entry    what 32 bits of a slot, and the 64 of a root, mean
//!   node     slots, and the writer's head: counts, marks, the way up
//!   tree     the Slab, and positions
//!   insert   one way down: conflict, shadow, split, store; and a run of folios
//!   erase    remove, replace, compare-exchange; nodes and levels that go with it
//!   split    a folio becomes several, each with a number of its own
//!   iter     entries in order, gaps        mark    three searchable bits, set and found by `marking`
//!   reserve  nodes taken before the lock   walk    readers
//!   check    all invariants, and text
//! ```
//!
//! The tree does not know what a folio is, nor where nodes lie. It never waits, and allocates by [`NodeSlab::alloc`]
//! only.
//!
//! Invariants (asserted by [`XArray::check`]):
//!  1. An entry of order n starts at a multiple of 2^n and fills its slots with the same bits.
//!  2. An entry's order and its level agree; the root's word holds an entry of order 0 at index 0, or a node.
//!  3. No node is empty. The topmost is needed: it holds more than a node, or a page, in slot 0.
//!  4. A node's counts are those of its slots; its parent, slot and shift are where it hangs.
//!  5. A mark stands at the first slot of its entry and in every slot above it, and nowhere else.
//!  6. The allocator knows exactly the nodes that hold shadows only.
//!  7. A node is initialized before it is linked and unlinked before it is freed.
//!
//! Not an invariant: that two slots of one entry change at once for a reader; that a node a reader is in
//! is still linked; that a shadow keeps its order.
//!
//! Cost: a load reads one slot a level: 1 TiB of pages takes 5 levels of 64 slots. An insertion is one way
//! down, split or not. A run of folios costs one way down and a step per node; in batches of 32 about an
//! eighth of one by one. Iteration reads each slot once.
//!
//! See also `struct xarray`, lib/xarray.c of Linux. This one differs: slots are numbers of 32 bits; an entry is
//! repeated instead of pointed at by siblings; no cursor outlives a call; and readers recognize stale nodes by the
//! entries they find instead of by a grace period.

mod check;
mod erase;
mod insert;
mod iter;
mod mark;
mod marking;
mod node;
mod reserve;
mod split;
mod tree;

pub use quinion_view::xarray::*;

pub use erase::{ExchangeOutcome, ForgetOutcome, Revision};
pub use insert::{AddedRange, Inserted, RangeStop, Split, Stored, StoredRange};
pub use iter::{Marked, Range};
pub use mark::Mark;
pub use node::{ALLOCATOR_WORD, Head};
pub use reserve::{Reserve, ReserveFill};
pub use tree::{INDICES_MAX, NodeSlab, ShadowOnly, XArray};

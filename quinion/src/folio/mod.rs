//! Folio: a naturally aligned run of 2^order pages, cached together.
//!
//! A folio is named by its first frame. Its state is in that frame's
//! [`Descriptor`](crate::arena::Descriptor); its bytes are the frames themselves and are touched
//! only by [`copy`] or by the device.
//!
//! ```text
//!   slot in the index --hint--> Descriptor { word, mapping, index } --same number--> 4 KiB of bytes
//!                                     |                                                    |
//!                        look, check  |                     copy                           |
//!                        look again   v  <-------------------------------------------------+
//! ```
//!
//! The **hit protocol** is [`begin_read`](crate::arena::Descriptor::begin_read), a copy, and
//! [`end_read`](crate::arena::Descriptor::end_read). It stores nothing that others see. It certifies
//! itself: whatever led the reader here, a stale slot or a recycled node, the
//! descriptor says whose bytes these are, before and after the copy.
//!
//! Invariants:
//!  1. The sequence is even exactly while the descriptor names a folio that the index may hold.
//!  2. Mapping, index and order change only while the sequence is odd.
//!  3. The bytes of a steady folio do not change while its sequence stays the same; those of a written one change page
//!     by page, each while its own sequence is odd ([`written`](crate::arena::written)), and not while it is pinned.
//!  4. A frame is given back to the arena by exactly one party: the thread that retires a folio without
//!     holds, or a thread that drops the last hold of a detached one.
//!  5. A thread that writes bytes has called [`before_bytes`](crate::arena::before_bytes) on the same thread;
//!     [`copy::copy_in`] and a fill's address do it for their callers.
//!
//! [`LockedFolio`] brings the first bytes of a folio, or keeps others from it: the folio lock as a value.
//!
//! [`FolioWriter`] changes pages in place, [`written::copy_page`] reads them without a lock, [`HeldFolio::copy_out`]
//! with one if it must.
//!
//! Not an invariant: that a folio found in the index is still there when its bytes have been copied.
//! The copy is right all the same.
//!
//! The model in `tests/model_hit.rs` runs this code under a model checker and
//! shows that no fence and no check of it can be left out.

pub use quinion_view::folio::*;

mod fresh;
pub use fresh::FreshFolio;
mod held;
pub use held::{HeldFolio, unpin};
mod locked;
pub use locked::{FinishOutcome, LockedFolio, LockedState};
mod pinned;
pub(crate) use pinned::UnpinObserver;
pub use pinned::{Chunks, KeptMemory, Pinned, PinnedFolio, PinnedFolios};
mod writer;
pub use writer::{FolioWriter, PageWriter, WriteOutcome};

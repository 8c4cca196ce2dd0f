//! Filemap: what happens to a request for a file's bytes.
//!
//! ```text
//!   read_at
//!    hit?   walk, check, copy, re-check                        no lock, no system call, no shared store
//!    miss   1 the ready prefix first; wait only for the first page that is not ready
//!           2 readahead judges                        -> Window
//!           3 arena.alloc_runs, all or none           -> None? reclaim, again, then less
//!           4 mapping.add_window(runs)                -> locked, not up to date  (invalidate lock shared
//!           5 backend.submit(contiguous runs)                                     from 4 to 5)
//!           6 wait for the folio, reaping completions meanwhile
//!           7 copy out, size looked at again after the data
//!           8 an uncached read: drop behind it what uncached reads alone have wanted
//! ```
//!
//! [`read_hits`] is the hit, in `hit.rs`; it is all that a viewer has of this
//! room. `fill.rs` is steps 3 to 5 and the end of a fill, with `refault.rs` for folios
//! that had been evicted; `read.rs` is the story as told above, for the owner's threads
//! and on behalf of viewers. `future.rs` tells it once more for those who have no thread
//! to wait with. [`read_group`], in `hits.rs`, is the hit of several reads side by side,
//! and `start.rs` what happens to those of a batch that missed. `uncached.rs` is step 8. `write.rs` is the story of a
//! write. `touched.rs` counts a
//! reader of small pieces once for each folio. `pin.rs` lends bytes instead
//! of copying them, and `resize.rs` gives memory back to the machine, in `give_way.rs` before the machine has none;
//! `background.rs` makes room before somebody needs it, and `truncate.rs` takes out what is taken out of a file.
//! `places.rs` gives out frames where each page has its own.
//! `bring_back.rs` fetches pages of memory files from the spill file.
//!
//! Invariants:
//!  1. A page of a window is asked of the device only if it was not in the cache.
//!  2. A page whose fill failed is not in the cache: the next reader asks the device again.
//!  3. An error of readahead alone fails no read.
//!  4. No lock is held while a reader waits, for a device or for memory.

#[cfg(feature = "std")]
mod ahead;
#[cfg(feature = "std")]
mod background;
#[cfg(feature = "std")]
mod bring_back;
#[cfg(feature = "std")]
mod fill;
#[cfg(feature = "std")]
mod future;
#[cfg(feature = "std")]
mod grab;
mod hit;
mod hits;
#[cfg(feature = "std")]
mod give_way;
#[cfg(feature = "std")]
mod hint;
#[cfg(feature = "std")]
mod pin;
#[cfg(feature = "std")]
mod places;
#[cfg(feature = "std")]
mod read;
#[cfg(feature = "std")]
mod refault;
#[cfg(feature = "std")]
mod resize;
#[cfg(feature = "std")]
mod start;
#[cfg(feature = "std")]
mod touched;
#[cfg(feature = "std")]
mod truncate;
#[cfg(feature = "std")]
mod uncached;
#[cfg(feature = "std")]
mod write;

#[cfg(feature = "std")]
pub use ahead::ReadaheadUse;
#[cfg(feature = "std")]
pub(crate) use background::MakesRoom;
#[cfg(feature = "std")]
pub(crate) use bring_back::Kept;
#[cfg(feature = "std")]
pub use fill::Filemap;
#[cfg(feature = "std")]
pub(crate) use fill::Need;
#[cfg(feature = "std")]
pub(crate) use future::Polled;
#[cfg(feature = "std")]
pub(crate) use give_way::GiveWay;
#[cfg(feature = "std")]
pub use hint::Prefetch;
pub use hit::{Hits, Stopped, read_hits, read_hits_into};
pub use hits::{GROUP_MAX, Served, Wanted, read_group};
#[cfg(feature = "std")]
pub use read::Patience;
#[cfg(feature = "std")]
pub(crate) use read::{Reading, touch};
#[cfg(feature = "std")]
pub(crate) use resize::Leftovers;
#[cfg(feature = "std")]
pub use resize::Resized;
#[cfg(feature = "std")]
pub(crate) use start::{Progress, Span};
#[cfg(feature = "std")]
pub(crate) use touched::Touched;
#[cfg(feature = "std")]
pub use truncate::OnPinned;
#[cfg(feature = "std")]
pub use uncached::{Behind, PAUSE, Passing, Reader, TRAILS_MAX};
#[cfg(feature = "std")]
pub(crate) use write::Author;

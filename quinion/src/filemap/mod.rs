//! Filemap: what happens to a request for a file's bytes.
//!
//! ```text
//!   read_at
//!    hit?   walk, check, copy, re-check                        no lock, no system call, no shared store
//!    miss   1 the ready prefix first; wait only for the first page that is not ready
//!           2 readahead decides                        -> Window
//!           3 arena.alloc_runs, all or none           -> None? reclaim, again, then less
//!           4 mapping.add_window(runs)                -> locked, not up to date  (invalidate lock shared
//!           5 backend.submit(contiguous runs)                                     from 4 to 5)
//!           6 wait for the folio, reaping completions meanwhile
//!           7 copy out, size looked at again after the data
//!           8 an uncached read: drop behind it what uncached reads alone have wanted
//! ```
//!
//! [`read_hits`] is the hit, in `hit.rs`; it is all that a viewer links of this module. `shared.rs` is what all paths
//! share. `fill.rs` is steps 3 to 5 and the end of a fill, `frame_supply.rs` where its frames come from, with
//! `refault.rs` for folios that had been evicted; `read.rs` is the story as told above, for the owner's threads and on
//! behalf of viewers. `future.rs` tells it once more for callers that must not block a thread. [`read_group`], in
//! `hit_batch.rs`, is the hit of several reads side by side, and `start.rs` what happens to those of a batch that
//! missed. `uncached.rs` is step 8. `write.rs` is the story of a write. `stream_positions.rs` counts a reader of small
//! pieces once for each folio. `pin.rs` lends bytes instead of copying them, and `resize.rs` gives memory back to the
//! machine, in `shrinker.rs` before the machine has none; `background_reclaim.rs` frees memory before an allocation
//! needs it, and `truncate.rs` cuts and punches files. `guest_places.rs` claims frames where each page has its own,
//! `guest_fill.rs` fills them. `spill_in.rs` fetches pages of memory files from the spill file.
//!
//! Invariants:
//!  1. A page of a window is asked of the device only if it was not in the cache.
//!  2. A page whose fill failed is not in the cache: the next reader asks the device again.
//!  3. An error of readahead alone fails no read.
//!  4. No lock is held while a reader waits, for a device or for memory.

#[cfg(feature = "std")]
mod ahead;
#[cfg(feature = "std")]
mod background_reclaim;
#[cfg(feature = "std")]
mod spill_in;
#[cfg(feature = "std")]
mod fill;
#[cfg(feature = "std")]
mod frame_supply;
#[cfg(feature = "std")]
mod future;
#[cfg(feature = "std")]
mod grab;
mod hit;
mod hit_batch;
mod locate;
#[cfg(feature = "std")]
mod shrinker;
#[cfg(feature = "std")]
mod hint;
#[cfg(feature = "std")]
mod pin;
#[cfg(feature = "std")]
mod guest_fill;
#[cfg(feature = "std")]
mod guest_places;
#[cfg(feature = "std")]
mod read;
#[cfg(feature = "std")]
mod touch;
#[cfg(feature = "std")]
mod wait_policy;
#[cfg(feature = "std")]
mod refault;
#[cfg(feature = "std")]
mod resize;
#[cfg(feature = "std")]
mod shared;
#[cfg(feature = "std")]
mod start;
#[cfg(feature = "std")]
mod stream_positions;
#[cfg(feature = "std")]
mod truncate;
#[cfg(feature = "std")]
mod uncached;
#[cfg(feature = "std")]
mod write;

#[cfg(feature = "std")]
pub use ahead::ReadaheadUse;
#[cfg(feature = "std")]
pub(crate) use background_reclaim::BackgroundReclaim;
#[cfg(feature = "std")]
pub(crate) use frame_supply::FillUrgency;
#[cfg(feature = "std")]
pub(crate) use future::PendingRead;
#[cfg(feature = "std")]
pub use hint::Prefetch;
pub use hit::{HitStop, Hits, read_hits, read_hits_into};
pub use hit_batch::{BatchedRead, GROUP_MAX, ServedSet, read_group};
pub use locate::{locate, resident};
#[cfg(feature = "std")]
pub use pin::PinRequest;
#[cfg(feature = "std")]
pub(crate) use read::ReadProgress;
#[cfg(feature = "std")]
pub(crate) use resize::DeferredShrink;
#[cfg(feature = "std")]
pub use resize::ResizeOutcome;
#[cfg(feature = "std")]
pub use shared::Filemap;
#[cfg(feature = "std")]
pub(crate) use shrinker::Shrinker;
#[cfg(feature = "std")]
pub(crate) use spill_in::TruncateExclusion;
#[cfg(feature = "std")]
pub(crate) use start::{Progress, Span};
#[cfg(feature = "std")]
pub(crate) use stream_positions::StreamPositions;
#[cfg(feature = "std")]
pub(crate) use touch::touch;
#[cfg(feature = "std")]
pub use truncate::OnPinned;
#[cfg(feature = "std")]
pub use uncached::{DropBehindState, PAUSE, Reader, TRAILS_MAX, UncachedRead};
#[cfg(feature = "std")]
pub use wait_policy::WaitPolicy;
#[cfg(feature = "std")]
pub(crate) use write::WriteContext;

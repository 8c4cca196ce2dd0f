//! Filemap: the paths of a request for a file's bytes.
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
//! [`read_hits`] is the hit, in [`quinion_view::hit`], which viewers run too; [`read_group`], there too, is the hit of
//! several reads side by side. `fill.rs` is steps 3 to 5 and the end of a fill, `frame_supply.rs` where its frames come
//! from, `uncached.rs` step 8, `read.rs` all steps of a read, and `future.rs` tells it for callers that must not block
//! a thread. Each other file's essay describes it.
//!
//! Invariants:
//!  1. A page of a window is asked of the device only if it was not in the cache.
//!  2. A page whose fill failed is not in the cache: the next reader asks the device again.
//!  3. An error of readahead alone fails no read.
//!  4. No lock is held while a reader waits, for a device or for memory.

mod ahead;
mod background_reclaim;
mod deferred_shrink;
mod spill_in;
mod fill;
mod frame_supply;
mod future;
mod grab;
mod shrinker;
mod hint;
mod pin;
mod guest_fill;
mod guest_places;
mod read;
mod touch;
mod wait_policy;
mod refault;
mod resize;
mod shared;
mod start;
mod stream_positions;
mod truncate;
mod uncached;
mod write;

pub use ahead::ReadaheadUse;
pub(crate) use background_reclaim::BackgroundReclaim;
pub(crate) use deferred_shrink::DeferredShrink;
pub(crate) use frame_supply::FillUrgency;
pub(crate) use future::{PendingRead, PolledRead};
pub use hint::Prefetch;
pub use pin::PinRequest;
pub use quinion_view::hit::{
    BatchedRead, FileView, GROUP_MAX, HitStop, Hits, PageHit, ServedSet, WantedBytes, locate,
    read_folios_into, read_group, read_hits, read_hits_into, read_page_into, resident,
};
pub(crate) use read::ReadProgress;
pub use resize::ResizeOutcome;
pub use shared::Filemap;
pub(crate) use shrinker::Shrinker;
pub(crate) use spill_in::{SpillIn, TruncateExclusion};
pub(crate) use start::{Progress, Span};
pub(crate) use stream_positions::StreamPositions;
pub use touch::touch;
pub use truncate::{OnPinned, Truncation};
pub use uncached::{DropBehindState, PAUSE, ReadCall, Reader, TRAILS_MAX, UncachedRead};
pub use wait_policy::WaitPolicy;
pub(crate) use write::WriteContext;

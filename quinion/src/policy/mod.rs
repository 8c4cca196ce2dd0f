//! Policy: which folio stays.
//!
//! Pure decisions. The cache keeps its folios in four rings, each in the order of arrival, and asks a policy: which
//! ring does a folio join, which ring's oldest folio is looked at next, and does it stay, move or leave. A policy sees
//! weights and counts; it sees no folio, does no I/O, takes no lock, reads no clock, allocates nothing.
//!
//! ```text
//!    arrival --admit--> [ Uncached ]   of DONTCACHE reads; leaves first
//!                       [ Stream   ]   of a sequential way through a file; leaves next
//!                       [ Probation]   new here: read again, or leave
//!                       [ Main     ]   has proved itself
//!                           |  next: which ring     decide: its oldest folio
//!                           v
//!                       Keep { class, reads }: to the young end of a ring;    Evict { remember }
//! ```
//!
//! An eviction leaves a shadow in the index, with the cache's age (`workingset.rs`). [`Policy::reach`] says up to which
//! distance a return counts as [`Refault::Recent`]; so the ghosts of the literature cost nothing here. The age counts
//! every eviction, also those that leave no shadow.
//!
//! The cache's policy is [`S3Fifo`]. Each pool has one, and rings, of its own; `pools.rs` says which makes room.
//!
//! Invariants of every policy, asserted by `quinion_testing::twins::rings`:
//!  1. `next` names a ring that holds something, and `None` only if none does.
//!  2. A folio that is not read is evicted after it was scanned [`SCANS_MAX`] times at most.
//!
//! Not an invariant: that a scan evicts. The thread that makes room asks again, and bounds its turns.

use core::fmt::Debug;

use crate::workingset::Refault;

mod moving_share;
mod pools;
mod recency;
mod s3fifo;
mod rotation;

pub use pools::{PoolPages, PoolTurn, PoolTurns};
pub use recency::SOON_PART;
pub use s3fifo::S3Fifo;

/// How many rings there are.
pub const CLASSES: usize = 4;
/// Reads beyond the first that are counted at most.
pub const READS_MAX: u8 = 3;
/// How often a folio that is not read meanwhile is scanned at most until it is evicted: out of Probation, and
/// once for each of its reads, and once more.
pub const SCANS_MAX: u32 = READS_MAX as u32 + 2;

/// In which ring a folio is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Class {
    /// Read by a caller that asked for it not to be cached.
    Uncached = 0,
    /// Read by a stream, which is unlikely to come back before it is gone.
    Stream = 1,
    /// New: it has not proved that it is read again.
    Probation = 2,
    /// Read again, or fetched again soon after its eviction.
    Main = 3,
}

impl Class {
    /// All classes, in their order.
    pub const ALL: [Self; CLASSES] = [Self::Uncached, Self::Stream, Self::Probation, Self::Main];
}

/// Pages listed in each ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Weights {
    /// Indexed by [`Class`].
    pub pages: [u64; CLASSES],
}

impl Weights {
    /// The pages of one ring.
    pub fn of(&self, class: Class) -> u64 {
        self.pages[class as usize]
    }

    /// The pages of all rings.
    pub fn total(&self) -> u64 {
        self.pages.iter().sum()
    }

    fn holds(&self, class: Class) -> bool {
        self.of(class) > 0
    }

    /// The weights as if the ring of `class` were alone.
    pub fn only(&self, class: Class) -> Self {
        let mut only = Self::default();
        only.pages[class as usize] = self.of(class);
        only
    }

    /// The weights as if there were no streams.
    fn without_streams(mut self) -> Self {
        self.pages[Class::Stream as usize] = 0;
        self
    }

    /// The rings whose folios are not meant to stay, in the order in which they go; if one of them holds something.
    pub fn passing(&self) -> Option<Class> {
        [Class::Uncached, Class::Stream].into_iter().find(|class| self.holds(*class))
    }
}

/// How a folio came to be fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FetchOrigin {
    /// A reader asked for just this.
    Asked,
    /// Readahead of a short run fetched it.
    Ahead,
    /// A stream fetched it.
    Stream,
    /// For a read that asked not to cache it.
    Uncached,
}

/// A folio that enters the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArrivingFolio {
    pub pages: u32,
    pub came: FetchOrigin,
    /// The class of the return by its shadow, if it left one.
    pub refault: Option<Refault>,
    /// Pages that came back soon, of it and of those that arrive with it after it: after no more evictions and
    /// activations than one part in [`SOON_PART`] of the pages that are listed in its pool.
    pub returned_soon: u64,
}

/// The decision about a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyVerdict {
    /// The folio leaves the cache.
    Evict {
        /// Whether it leaves a shadow.
        remember: bool,
    },
    /// The folio joins the young end of a ring.
    Keep {
        /// The class of that ring.
        class: Class,
        /// The reads that it is credited with: 0 to [`READS_MAX`].
        reads: u8,
    },
}

/// The rules of eviction. Numbers in, decisions out; nothing here waits or allocates.
pub trait Policy: Send + Debug {
    /// The ring that a folio joins, which is not listed in `held` yet.
    fn admit(&mut self, arrival: ArrivingFolio, held: &Weights) -> Class;

    /// Up to which refault distance, in pages, a return counts as recent. Asked when room was made.
    fn reach(&self, held: &Weights) -> u64;

    /// The ring whose oldest folio is scanned next; `None` if all are empty.
    fn next(&mut self, held: &Weights) -> Option<Class>;

    /// Decides about the oldest folio of `class`, of `pages` pages, which was read `reads` times (0 to
    /// [`READS_MAX`]) since it was put there. It is still counted in `held`.
    fn decide(&mut self, class: Class, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict;
}

/// Makes a policy that has seen nothing yet.
pub type NewPolicy = fn() -> Box<dyn Policy>;

/// The cache's own: an [`S3Fifo`].
pub const DEFAULT_POLICY: NewPolicy = || Box::new(S3Fifo::new());

//! Policy: which folio stays.
//!
//! Pure judgement. The cache keeps its folios in four rings, each in the order
//! of arrival, and asks a policy: which ring does a folio join, which ring's
//! oldest folio is looked at next, and what becomes of it. A policy sees
//! weights and counts; it sees no folio, does no I/O, takes no lock, reads no clock,
//! allocates nothing.
//!
//! ```text
//!    arrival --admit--> [ Uncached ]   of DONTCACHE reads; leaves first
//!                       [ Stream   ]   of a sequential way through a file; leaves next
//!                       [ Probation]   new here: read again, or leave
//!                       [ Main     ]   has proved itself
//!                           |  next: which ring     judge: its oldest folio
//!                           v
//!                       Keep { class, reads }: to the young end of a ring;    Evict { remember }
//! ```
//!
//! What is remembered of an eviction is a shadow in the index, with the cache's
//! age (`workingset.rs`). [`Policy::reach`] says up to which distance a return
//! counts as [`Refault::Recent`]; so the ghosts of the literature cost nothing
//! here.
//!
//! | policy | is |
//! |---|---|
//! | [`S3Fifo`] | ours, and the default |
//! | [`TwoList`] | Linux's active and inactive lists with refault distance, to compare with |
//!
//! Invariants of every policy, asserted by the tests at the end of this file:
//!  1. `next` names a ring that holds something, and `None` only if none does.
//!  2. A folio that nobody reads is evicted after it was judged [`JUDGED_MAX`] times at most.
//!
//! Not an invariant: that a judgement evicts. Whoever makes room asks again, and bounds his turns.

use core::fmt::Debug;

use crate::workingset::Refault;

mod s3fifo;
mod two_list;

pub use s3fifo::S3Fifo;
pub use two_list::TwoList;

/// How many rings there are.
pub const CLASSES: usize = 4;
/// Reads beyond the first that are counted at most.
pub const READS_MAX: u8 = 3;
/// How often a folio is judged at most, nobody reading it meanwhile, until it is evicted: out of Probation, and
/// once for each of its reads, and once more.
pub const JUDGED_MAX: u32 = READS_MAX as u32 + 2;

/// In which ring a folio is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Class {
    /// Read by somebody who asked that it not be cached.
    Uncached = 0,
    /// Read by a stream, which is unlikely to come back before it is gone.
    Stream = 1,
    /// New: it has not proved that it is read again.
    Probation = 2,
    /// It was read again, or came back soon.
    Main = 3,
}

impl Class {
    /// All of them, in their order.
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

    /// The rings whose folios are not meant to stay, in the order in which they go; if one of them holds something.
    fn passing(&self) -> Option<Class> {
        [Class::Uncached, Class::Stream].into_iter().find(|class| self.holds(*class))
    }
}

/// How a folio came to be fetched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// Somebody asked for just this.
    Asked,
    /// By readahead of a short run.
    Ahead,
    /// By a stream.
    Stream,
    /// For a read that asked not to cache it.
    Uncached,
}

/// A folio that enters the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Its pages.
    pub pages: u32,
    /// How it came.
    pub came: Came,
    /// What its shadow says, if it left one.
    pub refault: Option<Refault>,
}

/// What becomes of a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It leaves.
    Evict {
        /// Whether it leaves a shadow.
        remember: bool,
    },
    /// It joins the young end of a ring.
    Keep {
        /// Of this one.
        class: Class,
        /// With so many reads to its credit: 0 to [`READS_MAX`].
        reads: u8,
    },
}

/// The rules of eviction. Numbers in, decisions out; nothing here waits or allocates.
pub trait Policy: Send + Debug {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// The ring that a folio joins, which is not listed in `held` yet.
    fn admit(&mut self, arrival: Arrival, held: &Weights) -> Class;

    /// Up to which refault distance, in pages, a return counts as recent.
    fn reach(&self, held: &Weights) -> u64;

    /// The ring whose oldest folio is judged next; `None` if all are empty.
    fn next(&mut self, held: &Weights) -> Option<Class>;

    /// What becomes of the oldest folio of `class`, of `pages` pages, which was read `reads` times (0 to
    /// [`READS_MAX`]) since it was put there. It is still counted in `held`.
    fn judge(&mut self, class: Class, reads: u8, pages: u32, held: &Weights) -> Verdict;
}

/// Which policy a cache has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`S3Fifo`].
    #[default]
    S3Fifo,
    /// [`TwoList`].
    TwoList,
}

impl PolicyKind {
    /// A policy of this kind that has seen nothing yet.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::S3Fifo => Box::new(S3Fifo::new()),
            Self::TwoList => Box::new(TwoList::new()),
        }
    }
}

//! Policy: which folio goes next, and how long one stays.
//!
//! Pure judgement: numbers in, a decision out. What is cached stands in four **rings**, one
//! for each [`Class`], the oldest first. When room is wanted, a policy names the ring whose oldest
//! folio is to be looked at, is told how often that one was read, and says what
//! becomes of it. Reclaim does the rest.
//!
//! ```text
//!    arrives --> Probation (a tenth) --read twice more--> Main --read--> round again, one read less
//!    came back soon ----------------------------------->  |
//!                  |                                      not read
//!                  v                                      v
//!               evicted, remembered                    evicted, remembered
//!    for DONTCACHE --> Uncached, by a stream --> Stream:  the first to go, if nobody reads them
//! ```
//!
//! [`S3Fifo`] is that. What it remembers of a folio that left is its shadow in the index, and how long that
//! means anything is [`Policy::reach`]: there is no ghost queue besides.
//!
//! Invariants:
//!  1. A judgement does no I/O, takes no lock, reads no clock, allocates nothing.
//!  2. A folio that is judged again and again, and not read, is evicted after a bounded number of judgements.
//!
//! Not an invariant: that the weights are those of folios that can go. What is locked or held is left out as
//! far as reclaim has met it.
//!
//! Source: Yang, Zhang, Qiu, Yue, Vigfusson, "FIFO queues are all you need for cache eviction", SOSP 2023.
//! We differ: the ghosts are shadows, judged by their distance, and what was evicted from the main ring
//! leaves one too.

use core::fmt::Debug;

use std::boxed::Box;

use crate::tuning::PolicyKind;
use crate::workingset::Refault;

/// How many classes there are.
pub const CLASSES: usize = 4;

/// What a folio is to the cache; a ring for each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Class {
    /// Its reader asked that it be not kept.
    Uncached = 0,
    /// It came by a stream, which reads each page once.
    Stream = 1,
    /// It has shown nothing yet.
    Probation = 2,
    /// It was read again, or came back soon.
    Main = 3,
}

impl Class {
    /// All of them, in the order of their numbers.
    pub const ALL: [Class; CLASSES] = [Class::Uncached, Class::Stream, Class::Probation, Class::Main];
}

/// Pages listed in each ring.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Weights {
    /// By the classes' numbers.
    pub pages: [u64; CLASSES],
}

impl Weights {
    /// The pages of one class.
    pub fn of(&self, class: Class) -> u64 {
        self.pages[class as usize]
    }
    /// The pages of all classes.
    pub fn total(&self) -> u64 {
        self.pages.iter().sum()
    }
}

/// How a folio came to be inserted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Came {
    /// A page of it was asked for.
    Asked,
    /// By the readahead of a short run.
    Ahead,
    /// By a stream.
    Stream,
    /// For a reader who asked that it be not kept.
    Uncached,
}

/// A folio that is new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Its pages.
    pub pages: u32,
    /// How it came.
    pub came: Came,
    /// What its shadow said, if there was one.
    pub refault: Option<Refault>,
}

/// What becomes of a folio that was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It goes.
    Evict {
        /// Whether it leaves a shadow.
        remember: bool,
    },
    /// It stays: as the youngest of `class`, counted as read so often beyond the first.
    Keep {
        /// The ring it joins.
        class: Class,
        /// 0 to 3.
        reads: u8,
    },
}

/// Who goes.
pub trait Policy: Send + Debug {
    /// For reports.
    fn name(&self) -> &'static str;
    /// The ring that a folio joins.
    fn admit(&mut self, arrival: Arrival, held: &Weights) -> Class;
    /// Up to which distance in pages a folio that comes back counts as recent.
    fn reach(&self, held: &Weights) -> u64;
    /// The ring whose oldest folio is to be judged next, one that holds something; `None`: nothing is listed.
    fn next(&mut self, held: &Weights) -> Option<Class>;
    /// What becomes of the oldest folio of `class`, that was read `reads` times beyond the first (0 to 3).
    fn judge(&mut self, class: Class, reads: u8, pages: u32, held: &Weights) -> Verdict;
}

/// A policy of this kind that has seen nothing yet.
pub fn build(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::S3Fifo => Box::new(S3Fifo),
    }
}

/// One part in so many of what is held is on probation.
const PROBATION_SHARE: u64 = 10;
/// Reads beyond the first that end the probation.
const PROMOTING_READS: u8 = 2;

/// S3-FIFO; see the top of this file.
#[derive(Clone, Copy, Default, Debug)]
pub struct S3Fifo;

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "S3-FIFO"
    }

    fn admit(&mut self, arrival: Arrival, _: &Weights) -> Class {
        match (arrival.came, arrival.refault) {
            (Came::Uncached, _) => Class::Uncached,
            (_, Some(Refault::Recent)) => Class::Main,
            (Came::Stream, _) => Class::Stream,
            (Came::Asked | Came::Ahead, _) => Class::Probation,
        }
    }

    fn reach(&self, held: &Weights) -> u64 {
        held.total()
    }

    fn next(&mut self, held: &Weights) -> Option<Class> {
        if let Some(first) = [Class::Uncached, Class::Stream].into_iter().find(|&class| held.of(class) > 0) {
            return Some(first);
        }
        let (probation, main) = (held.of(Class::Probation), held.of(Class::Main));
        match (probation, main) {
            (0, 0) => None,
            (_, 0) => Some(Class::Probation),
            (0, _) => Some(Class::Main),
            _ if probation * PROBATION_SHARE >= probation + main => Some(Class::Probation),
            _ => Some(Class::Main),
        }
    }

    fn judge(&mut self, class: Class, reads: u8, _: u32, _: &Weights) -> Verdict {
        match class {
            Class::Uncached if reads > 0 => Verdict::Keep { class: Class::Probation, reads: 0 },
            Class::Stream if reads > 0 => Verdict::Keep { class: Class::Main, reads: 0 },
            Class::Probation if reads >= PROMOTING_READS => Verdict::Keep { class: Class::Main, reads: 0 },
            Class::Main if reads > 0 => Verdict::Keep { class: Class::Main, reads: reads - 1 },
            Class::Uncached => Verdict::Evict { remember: false },
            Class::Stream | Class::Probation | Class::Main => Verdict::Evict { remember: true },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(uncached: u64, stream: u64, probation: u64, main: u64) -> Weights {
        Weights { pages: [uncached, stream, probation, main] }
    }

    #[test]
    fn what_is_not_to_be_kept_goes_first_and_then_probation_above_its_tenth() {
        let next = |held| S3Fifo.next(&held);
        assert_eq!(next(held(0, 0, 0, 0)), None);
        assert_eq!(next(held(1, 1, 50, 50)), Some(Class::Uncached));
        assert_eq!(next(held(0, 1, 50, 50)), Some(Class::Stream));
        assert_eq!(next(held(0, 0, 10, 90)), Some(Class::Probation));
        assert_eq!(next(held(0, 0, 9, 90)), Some(Class::Main));
        assert_eq!(next(held(0, 0, 1, 0)), Some(Class::Probation));
        assert_eq!(next(held(0, 0, 0, 1)), Some(Class::Main));
    }

    #[test]
    fn two_more_reads_promote_and_every_folio_that_is_not_read_goes_in_the_end() {
        for class in Class::ALL {
            for reads in 0..=3 {
                let (mut at, mut left, mut rounds) = (class, reads, 0);
                while let Verdict::Keep { class, reads } = S3Fifo.judge(at, left, 1, &Weights::default()) {
                    assert!(reads <= left && rounds < 5, "{class:?} with {reads} is kept too long");
                    (at, left, rounds) = (class, reads, rounds + 1);
                }
            }
        }
        let promoted = Verdict::Keep { class: Class::Main, reads: 0 };
        assert_eq!(S3Fifo.judge(Class::Probation, 2, 1, &Weights::default()), promoted);
        assert_eq!(
            S3Fifo.judge(Class::Probation, 1, 1, &Weights::default()),
            Verdict::Evict { remember: true }
        );
    }

    #[test]
    fn what_comes_back_soon_joins_the_main_ring() {
        let class = |came, refault| S3Fifo.admit(Arrival { pages: 1, came, refault }, &Weights::default());
        assert_eq!(class(Came::Asked, None), Class::Probation);
        assert_eq!(class(Came::Ahead, Some(Refault::Old)), Class::Probation);
        assert_eq!(class(Came::Asked, Some(Refault::Recent)), Class::Main);
        assert_eq!(class(Came::Stream, None), Class::Stream);
        assert_eq!(class(Came::Uncached, Some(Refault::Recent)), Class::Uncached);
    }
}

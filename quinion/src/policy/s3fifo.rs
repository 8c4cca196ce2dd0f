//! S3-FIFO with shadows for ghosts and a Probation that is as large as it is useful: ours, and the default.
//!
//! ```text
//!             not read, or once            out, with a shadow ---- comes back within 1.5 caches ----+
//!    new ---> [ Probation ] -------------->                                                         |
//!                   | read twice more                                                               v
//!                   +-----------------------------------------> [ Main ] <--------------------------+
//!                                              read since: again, a read less  <--+  |
//!                                                                                    +--> out, without one
//! ```
//!
//! Most of what is new is not read again soon; so it gets a small ring, and what
//! passes through it does not move what has proved itself. How small? Where few folios are read again in
//! Probation, pages there are wasted, and where many are, more of them would be if it were larger. So
//! **Probation's share of the cache is the share of its folios that were read again**, of late, between 1 and
//! 40 %. On the traces of the benchmark `ratio` that is 1 to 3 % for a workstation's disk (where the cache is
//! a tenth of it or less), 8 % for a virtual machine's, and 12 to 35 % for a database's; each is near the best
//! fixed share for that trace, and no fixed share is right for all of them.
//!
//! Main's folios leave no shadow. They had their time, and what is remembered is bounded: a shadow of theirs
//! would cost one of a folio that could not be scanned yet.
//!
//! What streams bring, more than an eighth of the cache, leaves before all that, also if it comes back soon:
//! a loop a little larger than the cache comes back soon with every page, and would push out of Main what it
//! is about to read. It stays if it proves itself in the same way; one read more may be that of a second
//! stream, close behind the first. What an uncached read brought leaves first, and is new like others if
//! another reader has read it meanwhile.
//!
//! Tried and left out: a share moved by what the shadows say, as ARC's border is (up to 14 points below a fixed
//! one on these traces: each return of a page that a scan pushed out moves it the wrong way); promotion by one
//! read (better on large caches, below Linux on small ones); a second round through Probation for what leaves
//! Main; a reach of one cache (up to a point less where caches are small).
//!
//! Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vigfusson, "FIFO Queues are All You Need for Cache Eviction",
//! SOSP 2023. We differ: ghosts are shadows compared by distance instead of a queue, the share moves, and
//! what comes back is compared with one and a half caches.

use super::{ArrivingFolio, Class, FetchOrigin, Policy, PolicyVerdict, READS_MAX, Weights};
use crate::workingset::Refault;

/// Reads beyond the first by which a folio proves itself.
const PROVEN_AT: u8 = 2;

/// A share of one.
const ONE: u64 = 1 << 40;
/// Probation's share: at first, at least, and at most.
const SHARE_FIRST: u64 = ONE / 10;
const SHARE_MIN: u64 = ONE / 100;
const SHARE_MAX: u64 = ONE / 100 * 40;
/// Streams have one part in so many of the cache before they are the first to give.
const STREAM_SHARE: u64 = 8;
/// The share follows what was scanned lately: as many pages as the cache has, and at least some.
const LATELY_PAGES_MIN: u64 = 64;

/// Ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct S3Fifo {
    /// Of the pages scanned in Probation lately, the share that had been read again; in parts of [`ONE`].
    read_again: u64,
    /// Grows by the pages of streams with each look, up to all pages: then it is a stream's turn.
    streams_turn: u64,
}

impl S3Fifo {
    /// Nothing has happened yet.
    pub const fn new() -> Self {
        Self { read_again: SHARE_FIRST, streams_turn: 0 }
    }

    /// Pages that Probation is meant to have.
    fn probation_pages(&self, held: &Weights) -> u64 {
        let share = self.read_again.clamp(SHARE_MIN, SHARE_MAX);
        let listed = held.of(Class::Probation) + held.of(Class::Main);
        (u128::from(share) * u128::from(listed)).div_ceil(u128::from(ONE)) as u64
    }

    /// Whether a stream's folio goes next, though there are others. Above their share streams go first. Below it they
    /// take their turn with the others: what a stream is about to read, and what it has just passed, is
    /// not to be taken for what it left behind, and yet what was left behind goes in time.
    fn is_streams_turn(&mut self, held: &Weights) -> bool {
        let (streams, all) = (held.of(Class::Stream), held.total());
        if streams * STREAM_SHARE > all {
            return true;
        }
        self.streams_turn += streams;
        if self.streams_turn >= all {
            self.streams_turn = 0;
            return true;
        }
        false
    }

    /// Another `pages` pages were scanned in Probation.
    fn note(&mut self, reads: u8, pages: u32, held: &Weights) {
        let lately = held.total().max(LATELY_PAGES_MIN);
        let pages = u64::from(pages).min(lately);
        // A moving average: a part of the old is replaced by the new.
        self.read_again -= self.read_again / lately * pages;
        if reads > 0 {
            self.read_again = (self.read_again + ONE / lately * pages).min(ONE);
        }
    }
}

impl Default for S3Fifo {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "S3-FIFO"
    }

    fn admit(&mut self, arrival: ArrivingFolio, _held: &Weights) -> Class {
        match (arrival.came, arrival.refault) {
            (FetchOrigin::Uncached, _) => Class::Uncached,
            (FetchOrigin::Stream, _) => Class::Stream,
            (_, Some(Refault::Recent)) => Class::Main,
            (FetchOrigin::Asked | FetchOrigin::Ahead, _) => Class::Probation,
        }
    }

    fn reach(&self, held: &Weights) -> u64 {
        let pages = held.total();
        pages + pages / 2
    }

    fn next(&mut self, held: &Weights) -> Option<Class> {
        let (probation, main) = (held.of(Class::Probation), held.of(Class::Main));
        match held.passing() {
            Some(Class::Stream) if probation + main > 0 && !self.is_streams_turn(held) => {
                self.next(&held.without_streams())
            }
            Some(class) => Some(class),
            None if probation + main == 0 => None,
            None if main == 0 => Some(Class::Probation),
            None if probation >= self.probation_pages(held) => Some(Class::Probation),
            None => Some(Class::Main),
        }
    }

    fn decide(&mut self, class: Class, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict {
        let reads = reads.min(READS_MAX);
        if class == Class::Probation {
            self.note(reads, pages, held);
        }
        match class {
            Class::Uncached if reads > 0 => PolicyVerdict::Keep { class: Class::Probation, reads: 0 },
            Class::Stream | Class::Probation if reads >= PROVEN_AT => {
                PolicyVerdict::Keep { class: Class::Main, reads: 0 }
            }
            Class::Main if reads > 0 => PolicyVerdict::Keep { class: Class::Main, reads: reads - 1 },
            Class::Uncached | Class::Main => PolicyVerdict::Evict { remember: false },
            Class::Stream | Class::Probation => PolicyVerdict::Evict { remember: true },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(uncached: u64, stream: u64, probation: u64, main: u64) -> Weights {
        Weights { pages: [uncached, stream, probation, main] }
    }

    /// A policy that has scanned `folios` folios in Probation, of which every `nth` had been read.
    fn after(folios: u32, nth: u32) -> S3Fifo {
        let mut policy = S3Fifo::new();
        for folio in 0..folios {
            policy.decide(Class::Probation, u8::from(folio % nth == 0), 1, &held(0, 0, 100, 900));
        }
        policy
    }

    #[test]
    fn streams_are_evicted_first_and_then_probation_above_its_share() {
        let next = |held| S3Fifo::new().next(&held);
        assert_eq!(next(held(0, 0, 0, 0)), None);
        assert_eq!(next(held(1, 1, 50, 50)), Some(Class::Uncached));
        assert_eq!(next(held(0, 15, 50, 50)), Some(Class::Stream), "above an eighth");
        assert_eq!(next(held(0, 14, 50, 50)), Some(Class::Probation), "as if there were none");
        assert_eq!(next(held(0, 1, 0, 0)), Some(Class::Stream));
        assert_eq!(next(held(0, 0, 10, 90)), Some(Class::Probation));
        assert_eq!(next(held(0, 0, 9, 91)), Some(Class::Main));
        assert_eq!(next(held(0, 0, 1, 0)), Some(Class::Probation));
        assert_eq!(next(held(0, 0, 0, 1)), Some(Class::Main));
    }

    #[test]
    fn two_more_reads_promote_and_one_does_not() {
        let decide = |class, reads| S3Fifo::new().decide(class, reads, 1, &held(1, 1, 1, 1));
        assert_eq!(decide(Class::Probation, 1), PolicyVerdict::Evict { remember: true });
        assert_eq!(decide(Class::Probation, 2), PolicyVerdict::Keep { class: Class::Main, reads: 0 });
        assert_eq!(decide(Class::Main, 3), PolicyVerdict::Keep { class: Class::Main, reads: 2 });
        assert_eq!(decide(Class::Main, 0), PolicyVerdict::Evict { remember: false });
    }

    #[test]
    fn a_streams_folio_that_is_read_again_stays_and_an_uncached_one_becomes_new() {
        let decide = |class, reads| S3Fifo::new().decide(class, reads, 1, &held(1, 1, 1, 1));
        assert_eq!(decide(Class::Stream, 2), PolicyVerdict::Keep { class: Class::Main, reads: 0 });
        assert_eq!(decide(Class::Stream, 1), PolicyVerdict::Evict { remember: true });
        assert_eq!(decide(Class::Uncached, 1), PolicyVerdict::Keep { class: Class::Probation, reads: 0 });
        assert_eq!(decide(Class::Uncached, 0), PolicyVerdict::Evict { remember: false });
    }

    #[test]
    fn the_ring_of_a_folio_depends_on_its_origin_and_its_shadow() {
        let class = |came, refault| {
            S3Fifo::new().admit(ArrivingFolio { pages: 1, came, refault }, &Weights::default())
        };
        assert_eq!(class(FetchOrigin::Asked, None), Class::Probation);
        assert_eq!(class(FetchOrigin::Ahead, Some(Refault::Old)), Class::Probation);
        assert_eq!(class(FetchOrigin::Asked, Some(Refault::Recent)), Class::Main);
        assert_eq!(class(FetchOrigin::Stream, None), Class::Stream);
        assert_eq!(class(FetchOrigin::Stream, Some(Refault::Recent)), Class::Stream);
        assert_eq!(class(FetchOrigin::Uncached, Some(Refault::Recent)), Class::Uncached);
    }

    #[test]
    fn probation_is_as_large_a_share_as_is_read_again_in_it() {
        let pages = |policy: S3Fifo| policy.probation_pages(&held(0, 0, 100, 900));
        assert_eq!(pages(S3Fifo::new()), 100);
        assert_eq!(pages(after(5000, u32::MAX)), 10, "nothing is read again: one part in a hundred");
        assert_eq!(pages(after(5000, 1)), 400, "everything is: no more than four in ten");
        let fourth = pages(after(5000, 4));
        assert!((245..=255).contains(&fourth), "{fourth}");
    }

    #[test]
    fn a_large_folio_counts_its_pages_and_never_more_than_all() {
        let mut policy = S3Fifo::new();
        policy.decide(Class::Probation, 1, 512, &held(0, 0, 512, 0));
        assert!(policy.read_again <= ONE && policy.probation_pages(&held(0, 0, 512, 0)) > 200);
        policy.decide(Class::Probation, 0, 512, &held(0, 0, 512, 0));
        assert_eq!(policy.probation_pages(&held(0, 0, 100, 0)), 1);
    }
}

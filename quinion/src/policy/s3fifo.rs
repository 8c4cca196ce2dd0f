//! S3-FIFO with shadows for ghosts, a Probation that is as large as it is useful, and a Main that takes what it can
//! keep: ours, and the default.
//!
//! ```text
//!             not read, or once            out, with a shadow ---- comes back within a turn of Main ----+
//!    new ---> [ Probation ] -------------->                                                             |
//!                   | read twice more                                                                   v
//!                   +---------------------------------------------> [ Main ] <--------------------------+
//!                                                  read since: again, a read less  <--+  |
//!                                                                                        +--> out, without one
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
//! Where recency is everything, what has proved itself is gone for good by then, and Main holds only pages that are not
//! read again. So the same is asked of Main: **of its pages scanned of late, how many were read in their turn?** As
//! long as half were, all is as above. Below that the odds of Probation's share grow as Main's use, squared, falls; up
//! to 90 %. A turn shorter than one and a half caches has not shown what Main is of use for: what it lacks of them
//! counts as read. Without this, a Main that was pressed small turns fast, is not read for that, and never grows again.
//!
//! **A folio that comes back joins Main if it was away for no longer than Main takes to come round** (`turn.rs`): it
//! would leave unread else, and so would the folio in whose place it came. A loop a little larger than the cache is
//! kept in part that way, where it would pass through Main for nothing; and nothing has to recognize it. A full Main
//! is reached from one and a half caches away at most: of folios away for longer most came back by chance. Where Main
//! lacks pages, Probation being larger than its share, folios come from as far as Main takes to come round, and six
//! pages further away for each page lacking. So an empty Main takes any, which begins a loop of several caches.
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
//! one on these traces: each return of a page that a scan pushed out moves it the wrong way; and, weighed against the
//! reads of Main, up to 35 below on loops); promotion by one read (better on large caches, below Linux on small ones);
//! a second round through Probation for what leaves Main; a reach of one cache (up to a point less where caches are
//! small), or of a turn however long (a point less where reads follow a Zipf law); one lap more in Main however often a
//! folio was read (3 points more where popular pages drift fast, 1 less elsewhere); and to take one in 2 to 16 of what
//! comes back to a Main that lacks pages (1 to 7 less on loops).
//!
//! Sources: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vigfusson, "FIFO Queues are All You Need for Cache Eviction",
//! SOSP 2023. We differ: ghosts are shadows compared by distance instead of a queue, the share moves, and
//! what comes back is compared with Main's turn. That comparison is LIRS's (S. Jiang, X. Zhang, SIGMETRICS 2002). To
//! weigh two ways to keep pages by what each was of use for is the idea of ARC (N. Megiddo, D. S. Modha, FAST 2003),
//! LeCaR (HotStorage 2018) and Cacheus (FAST 2021), and of W-TinyLFU's hill climber (G. Einziger et al., Middleware
//! 2018); where they move a weight step by step, here two measured shares are the answer.

use super::turn::Turn;
use super::{ArrivingFolio, Class, FetchOrigin, Policy, PolicyVerdict, READS_MAX, Weights};
use crate::workingset::Refault;

/// Reads beyond the first by which a folio proves itself.
const PROVEN_AT: u8 = 2;

/// A share of one.
const ONE: u64 = 1 << 40;
/// A share that is multiplied has so many parts, of so many of [`ONE`] each.
const PARTS: u64 = 1 << 20;
const PART: u64 = ONE / PARTS;
/// Probation's share: at first, at least, and at most while Main is of use.
const SHARE_FIRST: u64 = ONE / 10;
const SHARE_MIN: u64 = ONE / 100;
const SHARE_MAX: u64 = ONE / 100 * 40;
/// At most where Main is of none.
const SHARE_MAX_ALONE: u64 = ONE / 100 * 90;
/// Streams have one part in so many of the cache before they are the first to give.
const STREAM_SHARE: u64 = 8;
/// The shares follow what was scanned lately: as many pages as the cache has, and at least some.
const LATELY_PAGES_MIN: u64 = 64;
/// How much further a return reaches for each page that Main lacks.
const REACH_PER_LACKING: u64 = 6;

/// Of the pages scanned lately, the share that had been read; in parts of [`ONE`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ReadShare(u64);

impl ReadShare {
    /// Another `pages` pages were scanned.
    fn note(&mut self, reads: u8, pages: u32, held: &Weights) {
        let lately = held.total().max(LATELY_PAGES_MIN);
        let pages = u64::from(pages).min(lately);
        // A moving average: a part of the old is replaced by the new.
        self.0 -= self.0 / lately * pages;
        if reads > 0 {
            self.0 = (self.0 + ONE / lately * pages).min(ONE);
        }
    }
}

/// Ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct S3Fifo {
    /// Of Probation: read again.
    read_again: ReadShare,
    /// Of Main: read since its last scan.
    read_on: ReadShare,
    /// How long Main takes to come round.
    turn: Turn,
    /// Grows by the pages of streams with each look, up to all pages: then it is a stream's turn.
    streams_turn: u64,
}

/// One and a half of `pages`: further than that no return reaches while Main is full, and a turn that is shorter has
/// not shown what Main is of use for.
const fn and_a_half(pages: u64) -> u64 {
    pages + pages / 2
}

impl S3Fifo {
    /// Nothing has happened yet.
    pub const fn new() -> Self {
        let (read_again, read_on) = (ReadShare(SHARE_FIRST), ReadShare(ONE));
        Self { read_again, read_on, turn: Turn::new(), streams_turn: 0 }
    }

    /// Pages that Probation is meant to have.
    fn probation_pages(&self, held: &Weights) -> u64 {
        let listed = held.of(Class::Probation) + held.of(Class::Main);
        (self.share(held) * listed).div_ceil(PARTS)
    }

    /// Probation's share, in parts of [`PARTS`]: what was read again there, while half of Main or more is read in a
    /// turn. Below that its odds grow as Main's use, squared, falls.
    fn share(&self, held: &Weights) -> u64 {
        let share = self.read_again.0.clamp(SHARE_MIN, SHARE_MAX) / PART;
        if self.read_on.0 >= ONE / 2 { share } else { self.share_beside_idle_main(share, held.total()) }
    }

    /// As [`S3Fifo::share`], where less than half of Main is read, in a cache of `pages` pages.
    #[cold]
    fn share_beside_idle_main(&self, share: u64, pages: u64) -> u64 {
        // What a turn lacks of one and a half caches counts as read.
        let lacking = and_a_half(pages).saturating_sub(self.turn.pages());
        let used_twice = 2 * (self.read_on.0 + ONE / pages.max(1) * lacking) / PART;
        if used_twice >= PARTS {
            return share;
        }
        let main = used_twice * used_twice / PARTS * (PARTS - share) / PARTS;
        (share * PARTS / (share + main)).min(SHARE_MAX_ALONE / PART)
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

    /// A folio goes.
    fn evict(&mut self, pages: u32, remember: bool) -> PolicyVerdict {
        self.turn.pass(u64::from(pages));
        PolicyVerdict::Evict { remember }
    }

    /// A folio of Probation or of a stream has had its time there: it goes, or joins Main.
    fn prove(&mut self, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict {
        if reads < PROVEN_AT {
            return self.evict(pages, true);
        }
        self.turn.join(u64::from(pages), held.of(Class::Main) + u64::from(pages));
        PolicyVerdict::Keep { class: Class::Main, reads: 0 }
    }

    /// A folio of Main has come round: it goes, or comes round once more.
    fn come_round(&mut self, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict {
        self.read_on.note(reads, pages, held);
        if reads == 0 {
            return self.evict(pages, false);
        }
        self.turn.join(u64::from(pages), held.of(Class::Main));
        PolicyVerdict::Keep { class: Class::Main, reads: reads - 1 }
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

    fn admit(&mut self, arrival: ArrivingFolio, held: &Weights) -> Class {
        let pages = u64::from(arrival.pages);
        if arrival.refault == Some(Refault::Recent) {
            self.turn.pass(pages);
        }
        match (arrival.came, arrival.refault) {
            (FetchOrigin::Uncached, _) => Class::Uncached,
            (FetchOrigin::Stream, _) => Class::Stream,
            (_, Some(Refault::Recent)) => {
                self.turn.join(pages, held.of(Class::Main) + pages);
                Class::Main
            }
            (FetchOrigin::Asked | FetchOrigin::Ahead, _) => Class::Probation,
        }
    }

    fn reach(&self, held: &Weights) -> u64 {
        let turn = self.turn.pages();
        match held.of(Class::Probation).saturating_sub(self.probation_pages(held)) {
            0 => turn.min(and_a_half(held.total())),
            lacking => turn.max(lacking * REACH_PER_LACKING),
        }
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
        match class {
            Class::Probation => {
                self.read_again.note(reads, pages, held);
                self.prove(reads, pages, held)
            }
            Class::Stream => self.prove(reads, pages, held),
            Class::Main => self.come_round(reads, pages, held),
            Class::Uncached if reads > 0 => PolicyVerdict::Keep { class: Class::Probation, reads: 0 },
            Class::Uncached => self.evict(pages, false),
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

    /// A policy with a full Main of 900 pages that came round in `turn` pages, of which every `nth` had been read.
    fn turned(turn: u64, nth: u64) -> S3Fifo {
        let mut policy = after(5000, 4);
        let listed = held(0, 0, 100, 900);
        for page in 0..9000 {
            policy.read_on.note(u8::from(page % nth == 0), 1, &listed);
            policy.turn.join(1, 900);
            policy.turn.pass((page + 1) * turn / 900 - page * turn / 900);
        }
        policy
    }

    #[test]
    fn a_return_reaches_as_far_as_main_turns_and_further_where_main_lacks_pages() {
        let listed = held(0, 0, 100, 900);
        let reach = |turn| turned(turn, 1).reach(&held(0, 0, 240, 760));
        for turn in [100, 500, 1000, 1400] {
            let reached = reach(turn);
            assert!((turn * 14 / 15..=turn * 18 / 15).contains(&reached), "{turn}: {reached}");
        }
        assert_eq!(reach(5000), 1500, "one and a half caches, however long it takes");
        let lacking = turned(100, 1).reach(&held(0, 0, 600, 400)) / REACH_PER_LACKING;
        assert!((345..=355).contains(&lacking), "{lacking} pages");
        assert!(turned(5000, 1).reach(&held(0, 0, 300, 700)) >= 5000, "as far as Main turns, at least");
        assert_eq!(S3Fifo::new().reach(&listed), 0, "there was no turn yet, and no page is lacking");
    }

    #[test]
    fn probation_takes_over_where_main_is_not_read_in_a_turn_that_was_long_enough() {
        let pages = |turn, nth| turned(turn, nth).probation_pages(&held(0, 0, 100, 900));
        assert!((245..=255).contains(&pages(3000, 1)), "all of Main is read");
        assert!((245..=255).contains(&pages(3000, 2)), "half of it");
        let (fourth, few) = (pages(3000, 4), pages(3000, 100));
        assert!((500..700).contains(&fourth), "{fourth}");
        assert_eq!(few, 900);
        assert!((245..=255).contains(&pages(800, 100)), "too soon to tell");
        let mut policy = turned(3000, 1);
        for _ in 0..5000 {
            policy.decide(Class::Main, 0, 1, &held(0, 0, 100, 900));
        }
        assert_eq!(
            policy.probation_pages(&held(0, 0, 100, 900)),
            900,
            "it is told what became of Main's folios"
        );
    }

    #[test]
    fn a_large_folio_counts_its_pages_and_never_more_than_all() {
        let mut policy = S3Fifo::new();
        policy.decide(Class::Probation, 1, 512, &held(0, 0, 512, 0));
        assert!(policy.read_again.0 <= ONE && policy.probation_pages(&held(0, 0, 512, 0)) > 200);
        policy.decide(Class::Probation, 0, 512, &held(0, 0, 512, 0));
        assert_eq!(policy.probation_pages(&held(0, 0, 100, 0)), 1);
    }
}

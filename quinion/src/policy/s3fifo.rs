//! S3-FIFO with shadows for ghosts, a Probation that is as large as it is useful, and a Main that takes as many pages
//! as it can keep: the default.
//!
//! ```text
//!             not read, or once            out, with a shadow ---- comes back within a rotation of Main ----+
//!    new ---> [ Probation ] -------------->                                                             |
//!                   | read twice more                                                                   v
//!                   +---------------------------------------------> [ Main ] <--------------------------+
//!                                                  read since: again, with fewer   <--+  |
//!                                                                                        +--> out, without one
//! ```
//!
//! Most new pages are not read again soon; so they get a small ring, and pages that pass through it do not evict pages
//! that were read again. How small? Where few folios are read again in Probation, pages there are wasted, and where
//! many are, more of them would be if it were larger. So **Probation's share of the cache is the share of its folios
//! that were read again**, of late, between 1 and 40 %. On the traces of the benchmark `ratio` that is 1 to 3 % for a
//! workstation's disk (where the cache is a tenth of it or less), 8 % for a virtual machine's, and 12 to 35 % for a
//! database's; each is near the best fixed share for that trace, and no fixed share is right for all of them.
//!
//! Where recency is everything, the promoted pages are no longer read by then, and Main holds only pages that are not
//! read again. So the same is asked of Main: **of its pages scanned of late, how many were read within one rotation?**
//! As long as half were, all is as above. Below that the odds of Probation's share grow as Main's use, squared, falls;
//! up to 90 %. A rotation shorter than one and a half caches has not shown the use of Main: the pages that it lacks of
//! them count as read. Without this, a Main that was pressed small rotates fast, is not read for that, and never grows
//! again.
//!
//! And where pages that Probation evicts come back soon, it gets as much as one page more of it is worth beside one
//! page of Main: `recency.rs`.
//!
//! **A folio that comes back joins Main if it was away for no longer than Main takes to come round** (`rotation.rs`):
//! otherwise it would be evicted unread, and so would the folio in whose place it came. A loop a little larger than
//! the cache is kept in part that way, where it would pass through Main for nothing; and nothing has to recognize it.
//! A full Main is reached from one and a half caches away at most: of folios away for longer most came back by chance.
//! Where Main lacks pages, Probation being larger than its share, folios come from as far as Main takes to come round,
//! and six pages further away for each page lacking. So an empty Main takes any, which begins a loop of several
//! caches.
//!
//! **Beside a Main whose pages are read within one rotation, the reach is shorter**: it falls from three quarters of
//! them on, to four tenths of the rotation where 95 % are. Of a loop, each page away comes back just as the rotation
//! ends. One that is taken pushes out another of the loop, so the rotation becomes short, and all of them are taken. A
//! page has to be clearly nearer than those it replaces (LIRS asks the same, with the last two reads of each page). A
//! Main that stands has ever longer rotations, and so the reach grows until something joins it.
//!
//! Main's folios leave no shadow: that would cost one of a folio that could not be scanned yet, as shadows are bounded.
//!
//! Folios of streams beyond an eighth of the cache leave before all that, also if they come back soon: a loop a little
//! larger than the cache comes back soon with every page, and would push pages out of Main that it is about to read. It
//! stays if it proves itself in the same way; one read more may be that of a second stream, close behind the first.
//! Folios of uncached reads leave first, and are new like others if another reader has read them meanwhile.
//!
//! Tried and left out: a share moved by what the shadows say alone, as ARC's border is (up to 14 points below a fixed
//! one on these traces: each return of a page that a scan pushed out moves it the wrong way); a share that climbs by
//! trial (up to 23 points less on loops: a trial destroys what it would measure); Main's credit halved everywhere
//! (half a point more where popularity moves, half a point less on P3); a second round through a large Probation for
//! pages read once (up to 1.3 points less), and through a small one for what leaves Main; promotion by one read
//! (better on large caches, below Linux on small ones); a reach of one cache (up to a point less where caches are
//! small), or of a rotation however long (a point less where reads follow a Zipf law); one lap more in Main however
//! often a folio was read (3 points more where popular pages drift fast, 1 less elsewhere); and to take one in 2 to 16
//! of what comes back to a Main that lacks pages (1 to 7 less on loops).
//!
//! Sources: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vigfusson, "FIFO Queues are All You Need for Cache Eviction", SOSP
//! 2023. This differs: ghosts are shadows compared by distance instead of a queue, the share moves, and distances of
//! returns are compared with Main's rotation. That comparison is LIRS's (S. Jiang, X. Zhang, SIGMETRICS 2002). To weigh
//! two ways to keep pages by the use of each is the idea of ARC (N. Megiddo, D. S. Modha, FAST 2003), LeCaR (HotStorage
//! 2018) and Cacheus (FAST 2021), and of W-TinyLFU's hill climber (G. Einziger et al., Middleware 2018); where they
//! move a weight step by step, here two measured shares are the answer.

use super::moving_share::{MovingShare, ONE};
use super::recency::{FloorStep, MainUse, ProbationUse, Recency};
use super::rotation::Rotation;
use super::{ArrivingFolio, Class, FetchOrigin, Policy, PolicyVerdict, READS_MAX, Weights};
use crate::workingset::Refault;

/// Reads beyond the first by which a folio proves itself.
const PROMOTION_READS: u8 = 2;

/// A share that is multiplied has so many parts, of so many of [`ONE`] each.
const PARTS: u64 = 1 << 20;
const PART: u64 = ONE / PARTS;
/// Probation's share: at first, at least, and at most while Main is of use.
const SHARE_FIRST: u64 = ONE / 10;
const SHARE_MIN: u64 = ONE / 100;
const SHARE_MAX: u64 = ONE / 100 * 40;
/// Probation's largest share while Main is of no use.
const SHARE_MAX_ALONE: u64 = ONE / 100 * 90;
/// Streams have one part in so many of the cache before they are the first to give.
const STREAM_SHARE: u64 = 8;
/// How much further a return reaches for each page that Main lacks.
const REACH_PER_LACKING: u64 = 6;
/// In per cent of Main's pages: up to so many that are read within one rotation, a return reaches as far as the
/// rotation is long.
const REACH_WHOLE_UP_TO: u64 = 75;
/// In per cent of the rotation: how much less for each per cent above, and the least that is left.
const REACH_FALL: u64 = 3;
const REACH_PERCENT_MIN: u64 = 40;
/// Rotations that a folio of Main has to its credit at most, while there is a floor of Probation's share.
const ROTATIONS_LEFT_MOVING: u8 = 1;

/// The policy of one pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct S3Fifo {
    read_again: MovingShare,
    read_on: MovingShare,
    rotation: Rotation,
    recency: Recency,
    /// Grows by the pages of streams with each look, up to all pages: then it is a stream's turn.
    streams_turn: u64,
}

/// Further than that no return reaches while Main is full, and a shorter rotation has not shown the use of Main.
const fn and_a_half(pages: u64) -> u64 {
    pages + pages / 2
}

impl S3Fifo {
    /// A policy that has seen nothing yet.
    pub const fn new() -> Self {
        let (read_again, read_on) = (MovingShare::of(SHARE_FIRST), MovingShare::of(ONE));
        Self { read_again, read_on, rotation: Rotation::new(), recency: Recency::new(), streams_turn: 0 }
    }

    fn probation_pages(&self, held: &Weights) -> u64 {
        let listed = held.of(Class::Probation) + held.of(Class::Main);
        (self.share(held) * listed).div_ceil(PARTS)
    }

    /// In parts of [`PARTS`]; see the head of this file. Never less than the pages that come back soon are worth.
    #[inline]
    fn share(&self, held: &Weights) -> u64 {
        let share = self.read_again.get().clamp(SHARE_MIN, SHARE_MAX) / PART;
        let share = if self.read_on.get() >= ONE / 2 {
            share
        } else {
            self.share_beside_idle_main(share, held.total())
        };
        share.max(self.recency.floor() / PART)
    }

    /// As [`S3Fifo::share`], where less than half of Main is read, in a cache of `pages` pages.
    #[cold]
    fn share_beside_idle_main(&self, share: u64, pages: u64) -> u64 {
        // The pages that a rotation is short of one and a half caches count as read.
        let lacking = and_a_half(pages).saturating_sub(self.rotation.pages());
        let used_twice = 2 * (self.read_on.get() + ONE / pages.max(1) * lacking) / PART;
        if used_twice >= PARTS {
            return share;
        }
        let main = used_twice * used_twice / PARTS * (PARTS - share) / PARTS;
        (share * PARTS / (share + main)).min(SHARE_MAX_ALONE / PART)
    }

    /// The part of a distance that a return reaches beside a Main whose pages are read within one rotation.
    fn near_part(&self, distance: u64) -> u64 {
        let busy = (self.read_on.get() / (ONE / 100)).saturating_sub(REACH_WHOLE_UP_TO);
        let percent = 100_u64.saturating_sub(REACH_FALL * busy).max(REACH_PERCENT_MIN);
        distance.saturating_mul(percent) / 100
    }

    /// Whether a stream's folio goes next, though there are others. Above their share streams go first. Below it they
    /// take their turn with the others: pages that a stream is about to read must not be taken for those that it left
    /// behind.
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

    /// Evicts a folio that leaves a shadow: an early return shows that it should have stayed.
    fn evict_remembered(&mut self, pages: u32) -> PolicyVerdict {
        self.rotation.pass(u64::from(pages));
        PolicyVerdict::Evict { remember: true }
    }

    fn evict_forgotten(&mut self, pages: u32) -> PolicyVerdict {
        self.rotation.pass(u64::from(pages));
        PolicyVerdict::Evict { remember: false }
    }

    fn promote_or_evict(&mut self, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict {
        if reads < PROMOTION_READS {
            return self.evict_remembered(pages);
        }
        self.rotation.join(u64::from(pages), held.of(Class::Main) + u64::from(pages));
        PolicyVerdict::Keep { class: Class::Main, reads: 0 }
    }

    fn decide_main(&mut self, reads: u8, pages: u32, held: &Weights) -> PolicyVerdict {
        let scanned = u64::from(pages);
        self.read_on.note(scanned, if reads > 0 { scanned } else { 0 }, held);
        self.recency.scan(scanned);
        if reads == 0 {
            return self.evict_forgotten(pages);
        }
        self.rotation.join(scanned, held.of(Class::Main));
        let rotations_left = if self.recency.floor() > 0 { ROTATIONS_LEFT_MOVING } else { READS_MAX };
        PolicyVerdict::Keep { class: Class::Main, reads: (reads - 1).min(rotations_left) }
    }

    /// Where the floor ends, Main counts as of use until it has shown the contrary.
    #[cold]
    fn move_floor(&mut self, held: &Weights) {
        if self.recency.end_step(held) {
            let share = self.share(held) * PART;
            let probation =
                ProbationUse { read: self.read_again.get(), share, pages: held.of(Class::Probation) };
            let main = MainUse { read: self.read_on.get(), rotation: self.rotation.pages() };
            if self.recency.step(probation, main, held) == FloorStep::Ends {
                self.read_on = MovingShare::of(ONE);
            }
        }
    }
}

impl Default for S3Fifo {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for S3Fifo {
    fn admit(&mut self, arrival: ArrivingFolio, held: &Weights) -> Class {
        let pages = u64::from(arrival.pages);
        let is_new = matches!(arrival.came, FetchOrigin::Asked | FetchOrigin::Ahead);
        if is_new && self.recency.arrive(pages, arrival.returned_soon, held) {
            self.move_floor(held);
        }
        if arrival.refault == Some(Refault::Recent) {
            self.rotation.pass(pages);
        }
        match (arrival.came, arrival.refault) {
            (FetchOrigin::Uncached, _) => Class::Uncached,
            (FetchOrigin::Stream, _) => Class::Stream,
            (_, Some(Refault::Recent)) => {
                self.rotation.join(pages, held.of(Class::Main) + pages);
                Class::Main
            }
            (FetchOrigin::Asked | FetchOrigin::Ahead, _) => Class::Probation,
        }
    }

    fn reach(&self, held: &Weights) -> u64 {
        let rotation = self.rotation.pages();
        match held.of(Class::Probation).saturating_sub(self.probation_pages(held)) {
            0 => self.near_part(rotation).min(and_a_half(held.total())),
            lacking => rotation.max(lacking * REACH_PER_LACKING),
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
                let scanned = u64::from(pages);
                self.read_again.note(scanned, if reads > 0 { scanned } else { 0 }, held);
                self.promote_or_evict(reads, pages, held)
            }
            Class::Stream => self.promote_or_evict(reads, pages, held),
            Class::Main => self.decide_main(reads, pages, held),
            Class::Uncached if reads > 0 => PolicyVerdict::Keep { class: Class::Probation, reads: 0 },
            Class::Uncached => self.evict_forgotten(pages),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(uncached: u64, stream: u64, probation: u64, main: u64) -> Weights {
        Weights { pages: [uncached, stream, probation, main] }
    }

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
            S3Fifo::new()
                .admit(ArrivingFolio { pages: 1, came, refault, returned_soon: 0 }, &Weights::default())
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

    fn rotated(rotation: u64, nth: u64) -> S3Fifo {
        let mut policy = after(5000, 4);
        let listed = held(0, 0, 100, 900);
        for page in 0..9000 {
            policy.read_on.note(1, u64::from(page % nth == 0), &listed);
            policy.rotation.join(1, 900);
            policy.rotation.pass((page + 1) * rotation / 900 - page * rotation / 900);
        }
        policy
    }

    #[test]
    fn a_return_reaches_as_far_as_main_turns_and_further_where_main_lacks_pages() {
        let listed = held(0, 0, 100, 900);
        let reach = |rotation| rotated(rotation, 2).reach(&held(0, 0, 240, 760));
        for rotation in [100, 500, 1000, 1400] {
            let reached = reach(rotation);
            assert!((rotation * 14 / 15..=rotation * 18 / 15).contains(&reached), "{rotation}: {reached}");
        }
        assert_eq!(reach(5000), 1500, "one and a half caches, however long it takes");
        let lacking = rotated(100, 1).reach(&held(0, 0, 600, 400)) / REACH_PER_LACKING;
        assert!((345..=355).contains(&lacking), "{lacking} pages");
        assert!(rotated(5000, 1).reach(&held(0, 0, 300, 700)) >= 5000, "as far as Main rotates, at least");
        assert_eq!(S3Fifo::new().reach(&listed), 0, "there was no rotation yet, and no page is lacking");
    }

    #[test]
    fn a_return_reaches_less_far_beside_a_main_that_is_read() {
        let part_of_rotation = |distance: u64, read: u64| {
            let policy = S3Fifo { read_on: MovingShare::of(ONE / 100 * read), ..S3Fifo::new() };
            policy.near_part(distance)
        };
        assert_eq!([10, 75].map(|read| part_of_rotation(1000, read)), [1000, 1000]);
        assert_eq!([76, 85, 95, 100].map(|read| part_of_rotation(1000, read)), [970, 700, 400, 400]);
        assert_eq!(part_of_rotation(u64::MAX, 100), u64::MAX / 100, "no product overflows");
    }

    #[test]
    fn a_floor_makes_probation_larger_and_rotations_to_a_folios_credit_fewer() {
        let (mut policy, listed) = (rotated(1000, 2), held(0, 0, 250, 750));
        policy.recency.scan(1000);
        let credit = |policy: &mut S3Fifo| policy.decide(Class::Main, 3, 1, &listed);
        assert_eq!(credit(&mut policy), PolicyVerdict::Keep { class: Class::Main, reads: 2 });
        let before = policy.probation_pages(&listed);
        for _ in 0..4000 {
            let back = ArrivingFolio { pages: 1, came: FetchOrigin::Asked, refault: None, returned_soon: 1 };
            policy.admit(back, &listed);
        }
        assert!(policy.probation_pages(&listed) > before + 100, "{}", policy.probation_pages(&listed));
        assert_eq!(credit(&mut policy), PolicyVerdict::Keep { class: Class::Main, reads: 1 });
        let mut streams = rotated(1000, 2);
        streams.recency.scan(1000);
        for _ in 0..4000 {
            let back = ArrivingFolio { pages: 1, came: FetchOrigin::Stream, refault: None, returned_soon: 1 };
            streams.admit(back, &listed);
        }
        assert_eq!(streams.probation_pages(&listed), before, "streams have a ring of their own");
    }

    #[test]
    fn probation_takes_over_where_main_is_not_read_in_a_rotation_that_was_long_enough() {
        let pages = |rotation, nth| rotated(rotation, nth).probation_pages(&held(0, 0, 100, 900));
        assert!((245..=255).contains(&pages(3000, 1)), "all of Main is read");
        assert!((245..=255).contains(&pages(3000, 2)), "half of it");
        let (fourth, few) = (pages(3000, 4), pages(3000, 100));
        assert!((500..700).contains(&fourth), "{fourth}");
        assert_eq!(few, 900);
        assert!((245..=255).contains(&pages(800, 100)), "too soon to tell");
        let mut policy = rotated(3000, 1);
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
        assert!(policy.read_again.get() <= ONE && policy.probation_pages(&held(0, 0, 512, 0)) > 200);
        policy.decide(Class::Probation, 0, 512, &held(0, 0, 512, 0));
        assert_eq!(policy.probation_pages(&held(0, 0, 100, 0)), 1);
    }
}

//! Rotation: how long Main takes to come round, and whether its pages are read in that time.
//!
//! ```text
//!   clock   pages that were evicted and activated so far: the time in which refault distances are told, too
//!   put     pages that joined Main so far             the oldest of it joined when `put` was what it holds less
//!   marks   put    0      50      100     150          a mark for each sixteenth of Main, with the clock then
//!           clock  7      90      310     480
//!                         |<- those in Main ->|        rotation: the clock now less that of the oldest mark still in Main
//! ```
//!
//! A page that joins Main is scanned one rotation later, and goes if it was not read by then. So a page that comes back
//! after a longer time than that would go again before it is wanted. This is the question that LIRS asks with its
//! stack, here asked of a ring, at the cost of some marks.
//!
//! Invariants:
//!  1. Marks rise in both numbers.
//!  2. Of the marks at or before the oldest page of Main one is kept: it is the first.
//!
//! Not an invariant: that a rotation is exact. It is too long by at most the pages that join between two marks. Pages
//! that leave from the middle (a truncated file's) count as if they had been the oldest.
//!
//! Nor that it is never short: of more than [`MARKS`] marks the oldest is forgotten, which happens while Main grows
//! fast. Then pages are taken from less far away than they could be.
//!
//! Sources: S. Jiang, X. Zhang, "LIRS", SIGMETRICS 2002, for the comparison; Y. Smaragdakis, S. Kaplan, P. Wilson,
//! "EELRU", SIGMETRICS 1999, which keeps a part of a loop by what its distances say.

/// Marks at most; twice as many as divide Main, since it grows and shrinks.
const MARKS: usize = 32;
const PARTS: u64 = 16;

/// Main had had so many pages put into it at this time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Checkpoint {
    put: u64,
    clock: u64,
}

/// Follows one ring. Numbers only; nothing here allocates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rotation {
    clock: u64,
    put: u64,
    begun: u64,
    /// A queue: from `first` on, `len` of them, in a circle.
    marks: [Checkpoint; MARKS],
    first: usize,
    len: usize,
}

impl Rotation {
    pub(super) const fn new() -> Self {
        Self { clock: 0, put: 0, begun: 0, marks: [Checkpoint { put: 0, clock: 0 }; MARKS], first: 0, len: 0 }
    }

    pub(super) fn pass(&mut self, pages: u64) {
        self.clock += pages;
    }

    pub(super) fn join(&mut self, pages: u64, held: u64) {
        let before = self.put;
        self.put += pages;
        if self.len == 0 || (before - self.mark(self.len - 1).put) * PARTS >= held {
            self.push(Checkpoint { put: before, clock: self.clock });
        }
        let oldest = self.put.saturating_sub(held);
        while self.len > 1 && self.mark(1).put <= oldest {
            self.drop_oldest();
        }
        self.begun = self.mark(0).clock;
    }

    /// Pages that passed since the oldest page of the ring joined it: 0 if none ever did.
    pub(super) fn pages(&self) -> u64 {
        if self.put == 0 { 0 } else { self.clock - self.begun }
    }

    fn mark(&self, at: usize) -> Checkpoint {
        self.marks[(self.first + at) % MARKS]
    }

    /// One more; of too many the oldest goes.
    fn push(&mut self, mark: Checkpoint) {
        if self.len == MARKS {
            self.drop_oldest();
        }
        self.marks[(self.first + self.len) % MARKS] = mark;
        self.len += 1;
    }

    fn drop_oldest(&mut self) {
        self.first = (self.first + 1) % MARKS;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Both {
        rotation: Rotation,
        clock: u64,
        joined: Vec<u64>,
        left: usize,
        held_max: u64,
    }

    impl Both {
        fn new() -> Self {
            Self { rotation: Rotation::new(), clock: 0, joined: Vec::new(), left: 0, held_max: 0 }
        }

        fn pass(&mut self, pages: u64) {
            self.rotation.pass(pages);
            self.clock += pages;
        }

        fn join(&mut self, pages: u64) {
            self.joined.extend((0..pages).map(|_| self.clock));
            let held = (self.joined.len() - self.left) as u64;
            self.held_max = self.held_max.max(held);
            self.rotation.join(pages, held);
        }

        fn go_round(&mut self, pages: u64) {
            self.left = (self.left + pages as usize).min(self.joined.len());
            self.join(pages);
        }

        fn since(&self, number: usize) -> u64 {
            self.clock - self.joined[number]
        }
    }

    #[test]
    fn a_ring_that_goes_round_evenly_takes_as_long_as_its_pages() {
        let mut both = Both::new();
        (0..1600).for_each(|_| both.join(1));
        for _ in 0..4000 {
            both.pass(3);
            both.go_round(1);
        }
        // Too long by a sixteenth at most.
        let rotation = both.rotation.pages();
        assert!((4797..=4797 + 300).contains(&rotation), "{rotation}");
    }

    #[test]
    fn a_ring_that_no_page_joins_ages_and_a_new_one_has_no_rotation() {
        let mut rotation = Rotation::new();
        rotation.pass(100);
        assert_eq!(rotation.pages(), 0);
        rotation.join(8, 8);
        assert_eq!(rotation.pages(), 0);
        rotation.pass(1000);
        assert_eq!(rotation.pages(), 1000);
    }

    #[test]
    fn the_rotation_of_a_ring_that_grows_fast_is_counted_short() {
        let mut both = Both::new();
        for _ in 0..5000 {
            both.pass(1);
            both.join(1);
        }
        let (rotation, exact) = (both.rotation.pages(), both.since(0));
        assert!(rotation < exact && rotation > exact / 2, "{rotation} of {exact}");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Pass(u64),
        Join(u64),
        GoRound(u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            3 => (0..100_u64).prop_map(Op::Pass),
            1 => (1..9_u64).prop_map(Op::Join),
            4 => (1..9_u64).prop_map(Op::GoRound),
        ];
        prop::collection::vec(op, 1..400)
    }

    proptest! {
        /// The rotation is that of a page which joined a sixteenth of the ring before its oldest at most; or of a
        /// younger one, if there were too many marks.
        #[test]
        fn agrees_with_a_ring_that_knows_when_each_page_joined(first in 1..200_u64, ops in ops()) {
            let mut both = Both::new();
            (0..first).for_each(|_| both.join(1));
            for op in ops {
                match op {
                    Op::Pass(pages) => both.pass(pages),
                    Op::Join(pages) => both.join(pages),
                    Op::GoRound(pages) => both.go_round(pages),
                }
                let marks: Vec<Checkpoint> = (0..both.rotation.len).map(|at| both.rotation.mark(at)).collect();
                prop_assert!(marks.is_sorted_by(|a, b| a.put < b.put && a.clock <= b.clock), "{:?}", marks);
                let (first, oldest) = (marks[0].put, both.left as u64);
                prop_assert_eq!(both.rotation.pages(), both.since(first as usize));
                prop_assert!(marks[1..].iter().all(|mark| mark.put > oldest), "{} {:?}", oldest, marks);
                prop_assert!(oldest < first + both.held_max / PARTS + 9, "{} {:?}", oldest, marks);
                prop_assert!(first <= oldest || marks.len() > MARKS / 2, "{} {:?}", oldest, marks);
            }
        }
    }
}

//! Doorbells: which of many viewers have asked, as a thread that sleeps for a group of them tells those that answer.
//!
//! One system call waits for some hundred futexes at most, and costs more the more there are. So each group of viewers
//! but the first has a **watcher**, a thread that only waits for their futexes; workers sleep for the doorbells of all.
//!
//! ```text
//!   viewer                   watcher of its group              worker
//!   slot -> PENDING
//!   its futex + 1, wakes     sees another number:              takes the doorbell down, looks at the
//!                            doorbell up, `rings` + 1, wakes   slots: takes a request; another is left:
//!                                                              doorbell up, and so on
//!                            sleeps while the numbers are      sleeps while `rings` is what it was
//!                            those that it saw                 before it looked for doorbells
//! ```
//!
//! Doorbells are the owner's own memory: a viewer can affect its own doorbell only.
//!
//! Invariant: while a request is pending, the watcher does not sleep on its viewer's futex; or its doorbell is up; or a
//! worker is about to look at the slots of its viewer.
//!
//! `tests/doorbells_model.rs` runs this under a model checker, and again without each step that [`mutant`] marks.

use core::ops::Range;

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutant, mutant, ordering};

const WORD: usize = u64::BITS as usize;

/// A doorbell for each viewer, in `WORDS` words.
#[derive(Debug)]
pub struct Doorbells<const WORDS: usize> {
    words: [AtomicU64; WORDS],
    rings: AtomicU32,
}

/// A worker's result of a look at a viewer whose doorbell was up.
#[derive(Clone, Copy, Debug)]
pub struct Found<Q> {
    /// The request that it takes.
    pub request: Option<Q>,
    /// Whether another one is left.
    pub more: bool,
}

impl<const WORDS: usize> Default for Doorbells<WORDS> {
    #[inline]
    fn default() -> Self {
        Self { words: core::array::from_fn(|_| AtomicU64::new(0)), rings: AtomicU32::new(0) }
    }
}

impl<const WORDS: usize> Doorbells<WORDS> {
    /// The futex on which workers sleep; and its number now, to be read before they look for doorbells.
    #[inline]
    pub fn rings(&self) -> (&AtomicU32, u32) {
        // Acquire, partner: the Release in `announce`: a worker that sees the number sees the doorbells.
        (&self.rings, self.rings.load(ordering(Mutant::DoorbellRings, Ordering::Acquire, Ordering::Relaxed)))
    }

    /// Puts up the doorbell of a viewer.
    #[inline]
    pub fn put_up(&self, viewer: usize) {
        // Release, partner: the Acquire in `take_down`: a worker that takes it down sees the request.
        let order = ordering(Mutant::DoorbellRelease, Ordering::Release, Ordering::Relaxed);
        self.words[viewer / WORD].fetch_or(1 << (viewer % WORD), order);
    }

    /// Changes the number on which workers sleep, after doorbells were put up; the caller wakes them.
    #[inline]
    pub fn announce(&self) -> &AtomicU32 {
        self.rings.fetch_add(1, Ordering::Release); // partner: `rings`
        &self.rings
    }

    /// Whether the doorbell was up.
    #[inline]
    fn take_down(&self, viewer: usize) -> bool {
        let bit = 1 << (viewer % WORD);
        // Acquire, partner: `put_up`.
        let order = ordering(Mutant::DoorbellAcquire, Ordering::Acquire, Ordering::Relaxed);
        self.words[viewer / WORD].fetch_and(!bit, order) & bit != 0
    }

    #[inline]
    fn is_up(&self, viewer: usize) -> bool {
        self.words[viewer / WORD].load(Ordering::Relaxed) >> (viewer % WORD) & 1 != 0
    }

    /// The first viewer from `from` on, below `end`, whose doorbell is up. A hint.
    #[inline]
    fn next_up(&self, from: usize, end: usize) -> Option<usize> {
        let mut word = from / WORD;
        while word * WORD < end {
            let passed = if word == from / WORD { from % WORD } else { 0 };
            let up = self.words[word].load(Ordering::Relaxed) >> passed << passed;
            if up != 0 {
                return Some(word * WORD + up.trailing_zeros() as usize).filter(|&viewer| viewer < end);
            }
            word += 1;
        }
        None
    }

    /// Takes a request of a viewer of `among` whose doorbell is up, as `find` finds it at that viewer. Also whether
    /// another one is left there: its doorbell is up again, and the caller wakes another worker.
    pub fn take<Q>(&self, among: Range<usize>, mut find: impl FnMut(usize) -> Found<Q>) -> Option<(Q, bool)> {
        let mut from = among.start;
        while let Some(viewer) = self.next_up(from, among.end) {
            from = viewer + 1;
            let late = mutant(Mutant::DoorbellFirst);
            if !(if late { self.is_up(viewer) } else { self.take_down(viewer) }) {
                continue; // another worker was faster
            }
            let Found { request, more } = find(viewer);
            if late {
                self.take_down(viewer);
            }
            if more && !mutant(Mutant::DoorbellAgain) {
                self.put_up(viewer);
            }
            if let Some(request) = request {
                return Some((request, more));
            }
        }
        None
    }
}

/// A watcher's state of one viewer.
#[derive(Clone, Copy, Default, Debug)]
pub struct WatchedViewers {
    /// Whose the viewer slot was when its doorbell was put up last, and the number of the futex then.
    heard: Option<(u32, u32)>,
}

impl WatchedViewers {
    /// Looks at a viewer's futex, and has its doorbell put up if the number or `whose` has changed: the next viewer in
    /// a viewer slot may have asked as often as the one before. The number while which the watcher may sleep.
    #[inline]
    pub fn check(&mut self, whose: u32, futex: &AtomicU32, put_up: impl FnOnce()) -> u32 {
        // Acquire, partner: the viewer's step of the futex, which its request precedes. SeqCst, partner: `wake_owner`
        // in the viewer.
        let now = futex.load(ordering(Mutant::DoorbellHeard, Ordering::SeqCst, Ordering::Relaxed));
        if self.heard != Some((whose, now)) {
            self.heard = Some((whose, now));
            put_up();
        }
        // SeqCst, partner: as above.
        if mutant(Mutant::DoorbellNumber) { futex.load(Ordering::SeqCst) } else { now }
    }
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use super::*;

    #[test]
    fn bells_are_taken_down_in_turn_and_once() {
        let doorbells = Doorbells::<3>::default();
        for viewer in [0, 63, 64, 100, 190] {
            doorbells.put_up(viewer);
        }
        let nothing = |viewer| Found { request: Some(viewer), more: false };
        let mut taken = Vec::new();
        for range in [64..101, 64..101, 64..101, 101..190, 0..192, 0..192, 0..192, 0..192] {
            taken.push(doorbells.take(range, nothing).map(|(viewer, _)| viewer));
        }
        assert_eq!(taken, [Some(64), Some(100), None, None, Some(0), Some(63), Some(190), None]);
    }

    #[test]
    fn a_viewer_that_has_more_is_found_again_and_one_whose_request_waits_holds_up_no_other() {
        let doorbells = Doorbells::<2>::default();
        doorbells.put_up(5);
        doorbells.put_up(70);
        let find = |viewer| Found { request: (viewer == 70).then_some(viewer), more: viewer == 5 };
        assert_eq!(doorbells.take(0..128, find), Some((70, false)));
        assert_eq!(doorbells.take(0..128, find), None);
        assert_eq!(
            doorbells.take(0..128, |viewer| Found { request: Some(viewer), more: true }),
            Some((5, true))
        );
        assert!(doorbells.is_up(5));
    }

    #[test]
    fn a_watcher_puts_a_bell_up_for_each_change_and_at_first() {
        let (mut watched, futex, mut rings) = (WatchedViewers::default(), AtomicU32::new(7), 0);
        let mut check = |whose| (watched.check(whose, &futex, || rings += 1), rings);
        assert_eq!((check(1), check(1)), ((7, 1), (7, 1)));
        futex.store(8, Ordering::Relaxed);
        assert_eq!((check(1), check(1)), ((8, 2), (8, 2)));
        assert_eq!((check(2), check(2)), ((8, 3), (8, 3)), "the next viewer of the slot has asked as often");
    }
}

//! Errseq: each handle learns of each error of writing once.
//!
//! A write-back fails when no caller waits for it. One later sync of each handle that has the file open must report the
//! failure. A handle that is opened afterwards must not report a failure that another handle has reported, but must
//! report one that no handle has. One word for each file and one for each handle suffice.
//!
//! ```text
//!    63                     13   12   11        0
//!   +--------------------------+------+-----------+
//!   |          counter         | seen |   errno   |     word of the file, and cursor of a handle
//!   +--------------------------+------+-----------+
//!
//!   record(errno)        seen?  counter + 1, not seen, errno      not seen?  only the errno changes
//!   sample()             seen?  cursor = word                     not seen?  cursor = 0, so that it will be told
//!   check_and_advance()  cursor = word?  nothing new              else: seen, cursor = word, tell the errno
//! ```
//!
//! The counter steps only if a handle has seen the error before. So a thousand failures without a
//! check between them are one report, and the number of steps is bounded by the number of reports.
//!
//! Invariants:
//!  1. A handle reports each recorded error at most once, however many threads ask it.
//!  2. After an error was recorded, each handle opened before reports it or a later one at its next check.
//!  3. A handle that is opened next reports an error that no handle has reported.
//!
//! Not an invariant: that every recorded error is reported. Of those that no handle has seen, the last one is.
//!
//! The idea and the rules are those of Linux (`lib/errseq.c`, since 4.13). This differs: its word has 32 bits, so after
//! 2^19 errors a handle that slept may miss one. This one counts 2^51.
//!
//! Each word is the whole message, so all accesses are `Relaxed`: a caller that must be told of an error has waited for
//! the write that failed, and that orders the two.

use crate::sync::atomic::{AtomicU64, Ordering};

const ERRNO: u64 = (1 << 12) - 1;
const SEEN: u64 = 1 << 12;
const STEP: u64 = SEEN << 1;

/// The errors of one file, as one word.
#[derive(Debug)]
pub struct ErrorSequence {
    word: AtomicU64,
}

/// How far one handle has been told. Belongs to the sequence that it was sampled from.
#[derive(Debug)]
pub struct ErrorCursor {
    word: AtomicU64,
}

impl Default for ErrorSequence {
    fn default() -> Self {
        Self::new()
    }
}

impl ErrorSequence {
    /// The word of a file that never failed.
    pub fn new() -> Self {
        Self { word: AtomicU64::new(0) }
    }

    /// Takes note of an error, by its number of the system. Takes no lock; any number of threads may call it.
    ///
    /// # Panics
    /// If `errno` is not from 1 to 4095, as all numbers of errors are.
    pub fn record(&self, errno: i32) {
        let errno = u64::try_from(errno).ok().filter(|errno| (1..=ERRNO).contains(errno));
        let errno = errno.expect("the number of an error is from 1 to 4095");
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let step = if word & SEEN != 0 { STEP } else { 0 };
            let next = ((word & !SEEN & !ERRNO) | errno).wrapping_add(step);
            // The same error, and no handle has seen the last one: there is nothing to add.
            if next == word {
                return;
            }
            match self.word.compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// A cursor for a handle that is opened now: it will report an error that no handle has reported yet, and later
    /// errors.
    pub fn sample(&self) -> ErrorCursor {
        let word = self.word.load(Ordering::Relaxed);
        ErrorCursor { word: AtomicU64::new(if word & SEEN != 0 { word } else { 0 }) }
    }

    /// The error that `cursor`'s handle has not been told of, if there is one. It is told of it by this. Takes
    /// no lock; of several threads that ask for one handle, one is told.
    pub fn check_and_advance(&self, cursor: &ErrorCursor) -> Option<i32> {
        loop {
            let told = cursor.word.load(Ordering::Relaxed);
            let word = self.word.load(Ordering::Relaxed);
            if word == told {
                return None;
            }
            let seen = word | SEEN;
            // 1 From now on it is seen. If the word changed meanwhile there is a later error, or another
            // thread was first.
            if seen != word && self.exchange(word, seen).is_err() {
                continue;
            }
            // 2 This handle knows it. If it did already, another thread of the handle has told it.
            if cursor.word.compare_exchange(told, seen, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Some((seen & ERRNO) as i32);
            }
        }
    }

    fn exchange(&self, before: u64, after: u64) -> Result<u64, u64> {
        self.word.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed)
    }
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;

    /// E01: an error recorded while two handles are open is reported once by each of them, and not again.
    #[test]
    fn e01_each_of_two_handles_reports_once() {
        let errors = ErrorSequence::new();
        let handles = [errors.sample(), errors.sample()];
        errors.record(EIO);
        for handle in &handles {
            assert_eq!(errors.check_and_advance(handle), Some(EIO));
            assert_eq!(errors.check_and_advance(handle), None);
        }
    }

    /// E02: a handle opened after an error that no handle has reported yet reports it, once.
    #[test]
    fn e02_an_open_after_an_unseen_error_reports_once() {
        let errors = ErrorSequence::new();
        errors.record(EIO);
        let handle = errors.sample();
        assert_eq!(errors.check_and_advance(&handle), Some(EIO));
        assert_eq!(errors.check_and_advance(&handle), None);
    }

    /// E03: a handle opened after another one has reported the error does not report it.
    #[test]
    fn e03_an_open_after_a_seen_error_reports_nothing() {
        let errors = ErrorSequence::new();
        let first = errors.sample();
        errors.record(EIO);
        assert_eq!(errors.check_and_advance(&first), Some(EIO));
        assert_eq!(errors.check_and_advance(&errors.sample()), None);
    }

    /// E04: the same error recorded twice, with no report between, is reported once.
    #[test]
    fn e04_the_same_error_twice_and_unseen_is_one_report() {
        let errors = ErrorSequence::new();
        let handle = errors.sample();
        errors.record(EIO);
        errors.record(EIO);
        assert_eq!(errors.check_and_advance(&handle), Some(EIO));
        assert_eq!(errors.check_and_advance(&handle), None);
    }

    /// E05: the same error recorded twice, with a report between, is reported twice by the handle that reported
    /// between. A handle that asked at neither time reports once.
    #[test]
    fn e05_the_same_error_twice_and_seen_between_is_two_reports() {
        let errors = ErrorSequence::new();
        let (handle, late) = (errors.sample(), errors.sample());
        errors.record(EIO);
        assert_eq!(errors.check_and_advance(&handle), Some(EIO));
        errors.record(EIO);
        assert_eq!(errors.check_and_advance(&handle), Some(EIO));
        assert_eq!(errors.check_and_advance(&handle), None);
        assert_eq!(errors.check_and_advance(&late), Some(EIO));
        assert_eq!(errors.check_and_advance(&late), None);
    }

    /// E06: of different errors recorded with no report between, the last is reported, once.
    #[test]
    fn e06_the_last_of_different_unseen_errors_wins() {
        let errors = ErrorSequence::new();
        let handle = errors.sample();
        errors.record(EIO);
        errors.record(ENOSPC);
        assert_eq!(errors.check_and_advance(&handle), Some(ENOSPC));
        assert_eq!(errors.check_and_advance(&handle), None);
    }

    /// E07: an error that the open handle never reported, because it was closed first, is reported by the next one
    /// opened.
    #[test]
    fn e07_a_handle_that_goes_without_asking_leaves_the_error_to_the_next() {
        let errors = ErrorSequence::new();
        {
            let _first = errors.sample();
            errors.record(EIO);
        }
        assert_eq!(errors.check_and_advance(&errors.sample()), Some(EIO));
        assert_eq!(errors.check_and_advance(&errors.sample()), None);
    }

    /// E08: a handle that missed 2^19 errors, each reported by another handle, still reports. The kernel's counter has
    /// come round there, and may miss the last; this one has not.
    #[test]
    fn e08_a_handle_that_slept_through_any_number_of_errors_reports() {
        let errors = ErrorSequence::new();
        let awake = errors.sample();
        errors.record(EIO);
        assert_eq!(errors.check_and_advance(&awake), Some(EIO));
        let asleep = errors.sample();
        for _ in 0..1 << 19 {
            errors.record(EIO);
            assert_eq!(errors.check_and_advance(&awake), Some(EIO));
        }
        assert_eq!(errors.check_and_advance(&asleep), Some(EIO));
        assert_eq!(errors.check_and_advance(&asleep), None);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Open,
        Close(prop::sample::Index),
        Record(i32),
        Check(prop::sample::Index),
    }

    fn ops() -> impl Strategy<Value = Op> {
        prop_oneof![
            2 => Just(Op::Open),
            1 => any::<prop::sample::Index>().prop_map(Op::Close),
            3 => prop::sample::select(vec![EIO, ENOSPC, 122]).prop_map(Op::Record),
            5 => any::<prop::sample::Index>().prop_map(Op::Check),
        ]
    }

    #[derive(Default)]
    struct Twin {
        last: Option<i32>,
        is_seen: bool,
        owed: BTreeMap<usize, bool>,
    }

    impl Twin {
        fn tell(&mut self, op: &Op, opened: usize) -> Option<i32> {
            match *op {
                Op::Open => {
                    self.owed.insert(opened, self.last.is_some() && !self.is_seen);
                }
                Op::Close(at) => {
                    self.pick(at).map(|handle| self.owed.remove(&handle));
                }
                Op::Record(errno) => {
                    self.last = Some(errno);
                    self.is_seen = false;
                    self.owed.values_mut().for_each(|owed| *owed = true);
                }
                Op::Check(at) => {
                    let handle = self.pick(at)?;
                    if self.owed.insert(handle, false) == Some(true) {
                        self.is_seen = true;
                        return self.last;
                    }
                }
            }
            None
        }
        fn pick(&self, at: prop::sample::Index) -> Option<usize> {
            (!self.owed.is_empty()).then(|| *self.owed.keys().nth(at.index(self.owed.len())).unwrap())
        }
    }

    proptest! {
        #[test]
        fn each_handle_reports_the_errors_that_the_rules_say(ops in prop::collection::vec(ops(), 1..60)) {
            let (errors, mut twin) = (ErrorSequence::new(), Twin::default());
            let mut cursors = BTreeMap::new();
            for (number, op) in ops.iter().enumerate() {
                let picked = match op {
                    Op::Close(at) | Op::Check(at) => twin.pick(*at),
                    _ => None,
                };
                let wanted = twin.tell(op, number);
                let told = match (op, picked) {
                    (Op::Open, _) => {
                        cursors.insert(number, errors.sample());
                        None
                    }
                    (Op::Record(errno), _) => {
                        errors.record(*errno);
                        None
                    }
                    (Op::Close(_), Some(handle)) => {
                        cursors.remove(&handle);
                        None
                    }
                    (Op::Check(_), Some(handle)) => errors.check_and_advance(&cursors[&handle]),
                    _ => None,
                };
                prop_assert_eq!(told, wanted, "{:?}", op);
            }
        }
    }
}

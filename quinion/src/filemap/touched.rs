//! Touched: a reader who takes a folio in small pieces has read it once.
//!
//! ```text
//!   64 bytes at a time     0  64  128  192 ...  4032 | 4096 ...
//!   counted                x                         | x          one access for each folio
//! ```
//!
//! What a folio is worth is told by how often somebody comes to it. A scan by small
//! reads comes once, however many calls that takes; counted by calls it would look like the hottest thing in the
//! cache. So a handle remembers, for each of its threads, the folio read last, and a
//! read of the same one again is not counted.
//!
//! Only what is not saturated asks this room at all: a hot hit loads the folio's byte and is done.
//!
//! Invariants:
//!  1. What is remembered is a number to compare with, and nothing is looked up by it.
//!
//! Not an invariant: that two threads have two places. There are eight; threads that share one forget each
//! other's folios, and then a read may count that should not. Nor that the number is still
//! that folio's: a frame that was given to another folio meanwhile costs that one a count.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use crate::arena::{Grown, referenced};
use crate::stats::thread_number;
use crate::units::Frame;

/// Places of a handle.
const PLACES: usize = 8;

/// The folios that the readers of one handle read last.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Touched([AtomicU32; PLACES]);

impl Touched {
    /// Notes that the folio at `frame` was read by this thread, if that says anything new.
    #[inline]
    pub(crate) fn note(&self, grown: Grown<'_>, frame: Frame) {
        if let Some(byte) = grown.referenced(frame)
            && !referenced::is_saturated(byte.load(Ordering::Relaxed))
        {
            self.count(byte, frame);
        }
    }

    #[inline(never)]
    fn count(&self, byte: &AtomicU8, frame: Frame) {
        let found = byte.load(Ordering::Relaxed);
        let again = self.remember(frame);
        if !again || referenced::is_first(found) {
            byte.store(referenced::after_read(found), Ordering::Relaxed);
        }
    }

    /// Remembers that this thread has read the folio at `frame`, which somebody else counted; whether it was the
    /// last one before, too.
    pub(crate) fn remember(&self, frame: Frame) -> bool {
        let last = &self.0[thread_number() % PLACES];
        let again = last.load(Ordering::Relaxed) == frame.0;
        if !again {
            last.store(frame.0, Ordering::Relaxed);
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_one_folio_in_a_row_count_once_and_a_first_read_always() {
        let touched = Touched::default();
        let [one, two] = [AtomicU8::new(referenced::ASKED), AtomicU8::new(0)];
        let count = |byte: &AtomicU8, frame| {
            touched.count(byte, Frame(frame));
            byte.load(Ordering::Relaxed)
        };
        assert_eq!([count(&one, 7), count(&one, 7), count(&one, 7)], [0, 0, 0]);
        assert_eq!([count(&two, 8), count(&two, 8)], [1, 1]);
        assert_eq!([count(&one, 7), count(&two, 8), count(&one, 7)], [1, 2, 2]);
        one.store(referenced::AHEAD, Ordering::Relaxed);
        assert_eq!(count(&one, 7), 0, "the frame is another folio's by now, and this is its first read");
        // Another thread has a place of its own.
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(count(&one, 7), 1));
        });
    }
}

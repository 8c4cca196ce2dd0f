//! Touched: a reader who goes through a folio in small pieces has read it once.
//!
//! ```text
//!   64 bytes at a time     0  64  128  192 ...  4032 | 4096 ...
//!   counted                x                         | x          one access for each folio
//! ```
//!
//! The policy ranks a folio by how often readers come to it. A scan by small reads comes once, however many calls that
//! takes; counted by calls, its folios would look like the hottest in the cache. So a handle remembers, for each of its
//! threads, where the last few reads ended. A read that begins there goes on with one of them, and the folio in whose
//! middle it begins was counted then. A page that is read again and again from the same place does count.
//!
//! Only what is not saturated asks this module at all: a hot hit loads the folio's byte and is done.
//!
//! Not an invariant: that two threads have two places. There are eight; threads that share one forget each
//! other's reads, as do more than seven scans that take turns, and then a read may count that should not.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::arena::{GrownView, referenced};
use crate::stats::thread_number;
use crate::units::Frame;

/// Places of a handle.
const PLACES: usize = 8;
/// Ends that a place remembers.
const ENDS: usize = 7;

/// Where the readers of one handle are.
#[derive(Debug, Default)]
pub(crate) struct StreamPositions([ReadPosition; PLACES]);

/// Where one thread's reads ended, in bytes of the file. 0, at which nothing goes on, is nowhere.
#[derive(Debug, Default)]
#[repr(align(64))]
struct ReadPosition {
    ends: [AtomicU64; ENDS],
    /// Which is forgotten next.
    next: AtomicU32,
}

impl StreamPositions {
    /// Notes that a read of `len` bytes at `position` by this thread met the folio at `frame`, if that says anything
    /// new.
    #[inline]
    pub(crate) fn note(&self, grown: GrownView<'_>, frame: Frame, position: u64, len: usize) {
        if let Some(byte) = grown.referenced(frame)
            && !referenced::is_saturated(byte.load(Ordering::Relaxed))
        {
            self.count_at(grown, frame, position, len);
        }
    }

    /// Away from the hit, which most often has nothing to note and is the smaller without.
    #[inline(never)]
    fn count_at(&self, grown: GrownView<'_>, frame: Frame, position: u64, len: usize) {
        let first = grown.descriptor(frame).map_or(0, |folio| folio.index().first_byte());
        if let Some(byte) = grown.referenced(frame) {
            self.count(byte, first, position, position + len as u64);
        }
    }

    /// The same, of a folio whose first byte is `first`, and a read that ends at `end`.
    fn count(&self, byte: &AtomicU8, first: u64, position: u64, end: u64) {
        let found = byte.load(Ordering::Relaxed);
        let goes_on = self.remember(position, end) && first < position;
        if !goes_on || referenced::is_first(found) {
            byte.store(referenced::after_read(found), Ordering::Relaxed);
        }
    }

    /// Remembers a read from `position` to `end`, whoever counts it; whether it goes on where one ended. Of a read of
    /// several folios this is asked for each.
    pub(crate) fn remember(&self, position: u64, end: u64) -> bool {
        let place = &self.0[thread_number() % PLACES];
        let mut ended_here = false;
        for last in &place.ends {
            let found = last.load(Ordering::Relaxed);
            if found == position {
                last.store(end, Ordering::Relaxed);
                return position > 0;
            }
            ended_here |= found == end;
        }
        if ended_here {
            return false;
        }
        let next = place.next.load(Ordering::Relaxed) as usize % ENDS;
        place.ends[next].store(end, Ordering::Relaxed);
        place.next.store(next as u32 + 1, Ordering::Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_counts_once_a_folio_and_repeated_reads_each_time() {
        let touched = StreamPositions::default();
        let bytes = [AtomicU8::new(referenced::ASKED), AtomicU8::new(0)];
        let read = |folio: usize, position: u64, len: u64| {
            touched.count(&bytes[folio], folio as u64 * 100, position, position + len);
            bytes[folio].load(Ordering::Relaxed)
        };
        assert_eq!([read(0, 0, 30), read(0, 30, 30), read(0, 60, 40)], [0, 0, 0]);
        assert_eq!([read(1, 100, 50), read(1, 150, 50)], [1, 1]);
        assert_eq!([read(0, 10, 30), read(1, 120, 10), read(0, 40, 5), read(1, 130, 5)], [1, 2, 1, 2]);
        assert_eq!([read(0, 10, 1), read(0, 10, 1), read(0, 10, 1)], [2, 3, 3], "the same place again");
        bytes[0].store(referenced::AHEAD, Ordering::Relaxed);
        assert_eq!(read(0, 11, 1), 0, "it goes on, and is the first read all the same");
    }
}

//! Stream positions: a reader who goes through a folio in small pieces has read it once.
//!
//! ```text
//!   64 bytes at a time     0  64  128  192 ...  4032 | 4096 ...
//!   counted                x                         | x          one access for each folio
//! ```
//!
//! The policy ranks a folio by how often readers come to it. Counted by calls, a scan by small reads would look like
//! the hottest in the cache. So a handle remembers, for each of its threads, where the last few reads ended: a read
//! that begins there continues one of them, and its first folio was counted then. A page that is read again and again
//! from the same place does count.
//!
//! A saturated folio's byte is loaded, and nothing else is done.
//!
//! Not an invariant: that two threads have two places. Threads that share one of the eight forget each other's reads,
//! as do more than seven scans in turn, and then a read may count that should not.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::arena::{GrownView, referenced};
use crate::stats::thread_number;
use crate::units::Frame;

const PLACES: usize = 8;
const ENDS: usize = 7;

#[derive(Debug, Default)]
pub(crate) struct StreamPositions([ReadPosition; PLACES]);

/// Where one thread's reads ended, in bytes of the file; 0 is nowhere.
#[derive(Debug, Default)]
#[repr(align(64))]
struct ReadPosition {
    ends: [AtomicU64; ENDS],
    next: AtomicU32,
}

impl StreamPositions {
    /// The folio that `frame` heads was met by a call that reads or writes the bytes `read` of the file.
    #[inline]
    pub(crate) fn note(&self, grown: GrownView<'_>, frame: Frame, read: Range<u64>) {
        if let Some(byte) = grown.referenced(frame)
            && !referenced::is_saturated(byte.load(Ordering::Relaxed))
        {
            self.count_at(grown, frame, read);
        }
    }

    /// Out of line: a hit most often has nothing to note.
    #[inline(never)]
    fn count_at(&self, grown: GrownView<'_>, frame: Frame, read: Range<u64>) {
        let first = grown.descriptor(frame).map_or(0, |folio| folio.index().first_byte());
        if let Some(byte) = grown.referenced(frame) {
            self.count(byte, first, read);
        }
    }

    fn count(&self, byte: &AtomicU8, first: u64, read: Range<u64>) {
        let found = byte.load(Ordering::Relaxed);
        let is_sequential = self.remember(read.start, read.end) && first < read.start;
        if !is_sequential || referenced::is_first(found) {
            byte.store(referenced::after_read(found), Ordering::Relaxed);
        }
    }

    /// Remembers a read; returns whether it continues one. Called for each folio of a read.
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
            touched.count(&bytes[folio], folio as u64 * 100, position..position + len);
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

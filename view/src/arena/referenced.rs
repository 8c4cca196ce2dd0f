//! Referenced: one byte a frame that says how often the folio it heads was read.
//!
//! ```text
//!     7        6       5 .. 2    1 0
//!   [unread] [fresh] [   0   ] [ reads ]      reads beyond the first, 3 at most
//! ```
//!
//! | byte | what is known | left so by | a read makes it | a scan |
//! |---|---|---|---|---|
//! | fresh | it was asked for, and a thread that asked is about to read it | insertion | 0 | spares it, once: 0 |
//! | unread, fresh | not asked for, not read | insertion of what is fetched ahead | 0 | spares it, once: unread |
//! | unread | the same, and it was spared | a scan | 0 | counts no reads |
//! | 0 | it was read as expected and not since | a reader | 1 | counts no reads |
//! | 1, 2 | it was read so often beyond that | a reader; a scan that keeps it | one more | counts them |
//! | 3 | so often at least | a reader | 3, and stores nothing | counts them |
//!
//! The folio was fetched for the first read, so that only clears the two flags. A hot folio soon has its byte at 3, and
//! from then on a hit of it stores nothing.
//!
//! An unread byte when a folio leaves counts as wasted readahead, and the used part is the rest: a hit does not count
//! anything.
//!
//! Invariant: an unread byte is that of a frame that heads a folio of some tree, or did until a moment ago.
//!
//! Not an invariant: that each read is seen. A touch may be lost to another, to a scan's store or in a viewer's ring,
//! and a late reader may touch the byte of the next folio. Numbers derived from these bytes are statistics.

use core::sync::atomic::{AtomicU8, Ordering};

/// The folio was asked for, and its first reader is still to come.
pub const ASKED: u8 = FRESH;
/// The folio was fetched ahead, before any reader asked for it: reclaim spares it once, for that reader.
pub const AHEAD: u8 = UNREAD | FRESH;
/// The most reads that are counted.
pub const READS_MAX: u8 = 3;

const UNREAD: u8 = 0x80;
const FRESH: u8 = 0x40;
const READS: u8 = 0x03;

/// Whether a reader has nothing to add to it.
#[inline]
pub fn is_saturated(byte: u8) -> bool {
    byte == READS_MAX
}

/// Whether the folio was fetched ahead, and has not been read.
#[inline]
pub fn is_unread(byte: u8) -> bool {
    byte & UNREAD != 0
}

/// Whether the folio was read since it was fetched ahead. Uncached reads leave no trace: of a folio that one of them
/// made it says whether an ordinary reader has used it.
#[inline]
pub fn was_read(byte: u8) -> bool {
    !is_unread(byte)
}

/// Whether its next read is the one that it was fetched for.
#[inline]
pub fn is_first(byte: u8) -> bool {
    byte & (UNREAD | FRESH) != 0
}

/// Whether it was read beyond the first time, or its first reader is still to come.
#[inline]
pub fn is_wanted(byte: u8) -> bool {
    byte & (FRESH | READS) != 0
}

/// Notes a read, if that says anything new.
#[inline]
pub fn touch(byte: &AtomicU8) {
    let found = byte.load(Ordering::Relaxed);
    if !is_saturated(found) {
        byte.store(after_read(found), Ordering::Relaxed);
    }
}

/// The byte's value after a read.
#[inline]
pub fn after_read(byte: u8) -> u8 {
    if is_first(byte) { 0 } else { (byte & READS).saturating_add(1).min(READS_MAX) }
}

/// A reader is about to use a folio that was fetched ahead: reclaim spares it.
#[inline]
pub fn expect_reader(byte: &AtomicU8) {
    if is_unread(byte.load(Ordering::Relaxed)) {
        byte.store(AHEAD, Ordering::Relaxed);
    }
}

/// A scan's result for a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReferenceState {
    /// The folio's reader is still to come: it is spared, and its byte is this now.
    Spared(u8),
    /// How often the folio was read beyond the first time, 0 to 3.
    Reads(u8),
}

/// The meaning of a byte to a scan.
#[inline]
pub fn found(byte: u8) -> ReferenceState {
    if byte & FRESH != 0 {
        ReferenceState::Spared(byte & UNREAD)
    } else {
        ReferenceState::Reads(byte & READS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(byte: u8, times: u32) -> u8 {
        let byte = AtomicU8::new(byte);
        (0..times).for_each(|_| touch(&byte));
        byte.into_inner()
    }

    #[test]
    fn the_first_read_counts_nothing_and_the_fourth_further_one_neither() {
        for first in [ASKED, AHEAD, UNREAD] {
            for (times, left) in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (100, 3)] {
                assert_eq!(read(first, times), left, "{first:#x} read {times} times");
            }
        }
    }

    #[test]
    fn an_expected_reader_is_waited_for_once() {
        assert_eq!((found(ASKED), found(AHEAD)), (ReferenceState::Spared(0), ReferenceState::Spared(UNREAD)));
        assert_eq!(
            (found(0), found(UNREAD), found(2)),
            (ReferenceState::Reads(0), ReferenceState::Reads(0), ReferenceState::Reads(2))
        );
    }

    #[test]
    fn an_expected_reader_makes_only_unread_bytes_fresh_again() {
        for (byte, left) in [(UNREAD, AHEAD), (AHEAD, AHEAD), (ASKED, ASKED), (0, 0), (2, 2)] {
            let expected = AtomicU8::new(byte);
            expect_reader(&expected);
            assert_eq!(expected.into_inner(), left, "{byte:#x}");
        }
    }
}

//! Referenced: one byte a frame that says whether the folio it heads was read, and how long it is spared.
//!
//! ```text
//!     7        6       5 .. 0
//!   [unread] [fresh] [ turns ]      the hand of the clock takes one turn, or the freshness, each time it comes
//! ```
//!
//! | byte | what is known | who leaves it so | the hand makes it |
//! |---|---|---|---|
//! | 0 | nobody has read it since the hand came | the hand | a victim |
//! | 1 | it was read since, or is about to be | a reader ([`touch`]); insertion of what was asked for | 0 |
//! | 2 | it counts as read twice | insertion of what came back soon after its eviction | 1 |
//! | unread, fresh | nobody asked for it, nobody has read it | insertion of what is fetched ahead | unread |
//! | unread | the same, and its turn is over | the hand | a victim |
//!
//! A reader writes 1 over whatever has no turns, so an unread byte that is
//! found when a folio leaves was never read. That is how the wasted part of readahead is
//! counted, and the used part is the rest: a hit does not count anything.
//! To a reader, 0 and unread are the same; he tests the turns, which costs what testing the byte does.
//!
//! Invariants:
//!  1. An unread byte is that of a frame that heads a folio of some tree, or did until a moment ago.
//!
//! Not an invariant: that each read is seen. A touch that falls between the hand's look at a byte and its
//! store is lost, as is what a viewer's ring forgets; and a reader who is late may touch the byte of the next
//! folio. What is derived from these bytes is a statistic.

use core::sync::atomic::{AtomicU8, Ordering};

/// It was read once, or is about to be.
pub const ONCE: u8 = 1;
/// It counts as read twice.
pub const TWICE: u8 = 2;
/// It was fetched ahead: nobody asked for it, and it has one turn to be read in.
pub const AHEAD: u8 = UNREAD | FRESH;
/// How often the hand meets a byte at most before it is a victim: the bits of [`TWICE`].
pub const TURNS_MAX: u32 = 2;

const UNREAD: u8 = 0x80;
const FRESH: u8 = 0x40;
const TURNS: u8 = 0x3f;

/// Whether a reader has nothing to add to it.
#[inline]
pub fn is_noted(byte: u8) -> bool {
    byte & TURNS != 0
}

/// Whether the folio was fetched ahead, and nobody has read it.
#[inline]
pub fn is_unread(byte: u8) -> bool {
    byte & UNREAD != 0
}

/// Whether somebody has read the folio since it was inserted as fetched ahead. Uncached reads leave no trace, so of
/// a folio that one of these made it says whether somebody else wants it.
#[inline]
pub fn was_read(byte: u8) -> bool {
    !is_unread(byte)
}

/// Whether it goes, if the hand comes now.
#[inline]
pub fn is_due(byte: u8) -> bool {
    byte & !UNREAD == 0
}

/// Notes a read, if that says anything new.
#[inline]
pub fn touch(byte: &AtomicU8) {
    if !is_noted(byte.load(Ordering::Relaxed)) {
        byte.store(ONCE, Ordering::Relaxed);
    }
}

/// What the hand leaves of a byte.
#[inline]
pub fn after_hand(byte: u8) -> u8 {
    (byte & TURNS) >> 1 | byte & UNREAD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_due_in_time_and_only_a_reader_clears_unread() {
        for (first, turns) in [(0, 0), (ONCE, 1), (TWICE, TURNS_MAX), (AHEAD, 1)] {
            let mut byte = first;
            for _ in 0..turns {
                assert!(!is_due(byte), "{first:#x} has {turns} turns");
                byte = after_hand(byte);
                assert_eq!(is_unread(byte), is_unread(first));
            }
            assert!(is_due(byte), "{first:#x} has {turns} turns");
            let read = AtomicU8::new(byte);
            touch(&read);
            assert_eq!(read.into_inner(), ONCE);
        }
        let twice = AtomicU8::new(TWICE);
        touch(&twice);
        assert_eq!(twice.into_inner(), TWICE, "a reader takes no turn away");
    }
}

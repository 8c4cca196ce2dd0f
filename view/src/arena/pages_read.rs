//! Pages read: which pages of a folio hold the file's bytes while its fill goes on.
//!
//! A folio with such pages is **partially up to date**, as the kernel calls it (`is_partially_uptodate`), and its
//! descriptor has the flag `PARTIAL_UPTODATE`.
//!
//! A fill of many pages is several requests that end one by one. A bit for each frame, in a table beside the
//! descriptors, says that its page has been read: its reader need not wait for the others, and a failed request loses
//! its own pages only.
//!
//! ```text
//!   frames       0 1 2 3 | 4 5 6 7 | 8 9 ...          one folio, LOCKED, in parts of four pages
//!   bits         1 1 1 1 | 0 0 0 0 | 1 1 ...          parts 1 and 3 have arrived
//!                  ^         ^
//!                  |         +-- its reader waits
//!                  +-- its reader reads, with a hold or without
//! ```
//!
//! | who | does what | when |
//! |---|---|---|
//! | the fill | `note_pages_read` on the folio, then sets bits | a part has ended and another has not, or failed |
//! | a holder of the folio | looks at the bit of its page | the folio is not up to date as a whole |
//! | a reader without a hold | looks at bits between two looks at the descriptor | its first look found a fill at work |
//! | the thread that frees the frames | clears all bits of a folio that was noted | before the arena has them back |
//!
//! A fill that ends well in one piece sets no bit. Bits that were set stay until the frames are freed: clearing them
//! earlier would take a page from a holder that was just told that it is there.
//!
//! A frame has many lives, and a reader without a hold means one of them. Bits of the other lives, as it sees them:
//!
//! ```text
//!   a life before     bit set .. cleared | freed .. prepare: Release -----------> first look: word, Acquire, then bits
//!   the life meant    prepare .. bytes .. bit, Release --------------------------> bit, Acquire, then the copy
//!   a life after      retire: odd sequence .. prepare .. bytes .. bit, Release --> bit, Acquire .. second look: odd
//! ```
//!
//! A bit of a life before is not seen: the clearing came before the `prepare` whose word the first look saw, or
//! whose word was changed, step by step, into what it saw. A bit of a life after may be seen, and then so is the
//! odd sequence that lies between, at the second look. A page that arrived of a folio that then fails is
//! the file's page: it is read until the folio is retired, and from then on the second look refuses.
//!
//! Invariants:
//!  1. A set bit is of a frame of a folio that was noted; so those of free frames are clear, and those of a folio
//!     that was just prepared (`Arena::check` of crate `quinion` sees the first).
//!  2. Bytes of a page whose bit is set are not written until the frame is freed.
//!
//! Not an invariant: that a bit is set. A folio that is up to date as a whole says so in its word alone.
//!
//! `tests/model_hit.rs` shows that the two orderings and the clearing are needed.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutant, mutant, ordering};
use crate::units::Frame;

/// Frames whose bits share a word.
pub const FRAMES_PER_WORD: u32 = 64;

/// Says that the pages of the frames in `mask` have come.
#[inline]
pub fn set(word: &AtomicU64, mask: u64) {
    // Release, partner: the Acquire in `load`: a thread that sees the bit sees the bytes.
    word.fetch_or(mask, ordering(Mutant::PagesReadRelease, Ordering::Release, Ordering::Relaxed));
}

/// The bits of a word, for the holder of the folio, or for a reader between its two looks at it.
#[inline]
pub fn load(word: &AtomicU64) -> u64 {
    // Acquire, partner: the Release in `set`. (No reader sees an earlier folio's bits: they were cleared before its
    // frames were freed, and the Acquire that gave the hold, or the word, has `prepare` for a partner.)
    word.load(ordering(Mutant::PagesReadAcquire, Ordering::Acquire, Ordering::Relaxed))
}

/// Clears the bits in `mask`, whose frames are the caller's alone, about to be freed. Other bits of the word may change
/// meanwhile.
#[inline]
pub fn clear(word: &AtomicU64, mask: u64) {
    if !mutant(Mutant::PagesReadClear) {
        word.fetch_and(!mask, Ordering::Relaxed);
    }
}

/// The words of `pages` frames from `frame` on, each by its first frame, with the mask of those that are meant.
#[inline]
pub fn words(frame: Frame, pages: u32) -> impl Iterator<Item = (Frame, u64)> {
    let end = frame.0 + pages;
    let mut at = frame.0;
    core::iter::from_fn(move || {
        let (first, bit) = (at & !(FRAMES_PER_WORD - 1), at % FRAMES_PER_WORD);
        let count = (end - at).min(FRAMES_PER_WORD - bit);
        at += count;
        (count > 0).then(|| (Frame(first), u64::MAX >> (FRAMES_PER_WORD - count) << bit))
    })
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use super::*;

    #[test]
    fn words_cover_the_frames_and_no_others() {
        for (first, pages) in [(0, 1), (63, 1), (63, 2), (5, 59), (5, 60), (64, 64), (100, 512), (7, 0)] {
            let mut covered = Vec::new();
            for (word, mask) in words(Frame(first), pages) {
                assert!(word.0 % FRAMES_PER_WORD == 0 && mask != 0);
                covered.extend((0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit| word.0 + bit));
            }
            assert_eq!(covered, (first..first + pages).collect::<Vec<_>>());
        }
    }

    #[test]
    fn neighbours_in_a_word_do_not_disturb_each_other() {
        let word = AtomicU64::new(0);
        set(&word, 0b1111_0000);
        set(&word, 0b0000_1100);
        clear(&word, 0b0011_0000);
        assert_eq!(load(&word), 0b1100_1100);
    }
}

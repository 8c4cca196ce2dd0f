//! Dirty: which pages differ from the file, and which are on their way to it.
//!
//! Two bits for each frame, in two tables beside the descriptors. A folio of 2 MiB with one changed page writes that
//! page; meanwhile the others may be changed, and written, too.
//!
//! ```text
//!   page      clean ----mark----> dirty ----begin----> write-back ----end, well----> clean
//!                                   ^                    |     |
//!                                   |      changed again |     | end, failed
//!                                   +---- both bits <----+     +------------> dirty
//!
//!   folio     DIRTY: one of its pages is       WRITEBACK: one of its pages is, and write-back holds it
//! ```
//!
//! | who | does what | under what |
//! |---|---|---|
//! | a writer | looks at the dirty bit of a page that it has changed; sets it if it is clear | nothing; the tree lock |
//! | write-back | takes the dirty bit for a write-back bit, then has the page written | the tree lock; nothing |
//! | the end of that | clears the write-back bit; sets the dirty bit again if it failed | the tree lock |
//! | what takes a folio out of the index | clears its dirty bits; those of write-back stay until that ends | the tree lock |
//!
//! The bits of a word are of frames of several mappings, so each is changed in one atomic step. The two flags of the
//! descriptor and the marks of the tree follow the bits under the same hold of the lock; `mapping/dirty.rs` does that.
//! Readers, and viewers, look at none of it.
//!
//! A writer whose page is dirty already takes no lock:
//!
//! ```text
//!   writer                                   write-back
//!   w1  bytes                                b1  the page's bit: clear        (under the tree lock)
//!   w2  SEQCST FENCE                         b2  SEQCST FENCE
//!   w3  the page's bit: set? then done       b3  reads the bytes, or has the device read them
//!       clear? the tree lock, and sets it
//! ```
//!
//! If w2 comes before b2 in the one order of such fences, b3 reads the bytes of w1. If b2 comes before w2, w3 sees the
//! bit clear, or set since, for which the same holds again. So every changed byte is written (Dekker's argument);
//! `tests/model_hit.rs` shows that both fences are needed.
//!
//! Invariants:
//!  1. A set bit is of a page of a folio: those of free frames are clear (`Arena::check` of crate `quinion`).
//!  2. A dirty bit is of a folio in the index; a write-back bit of one that write-back holds, in the index or not.
//!  3. A page has one flush under way at most: a page is not taken while its write-back bit is set.
//!
//! Not an invariant: that a page without either bit is on the device. Only a sync makes a write durable.

use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::{Mutant, mutant};

/// Which of the two tables is meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BitTable {
    /// The page differs from the file.
    Dirty,
    /// The page is being written to the file.
    Writeback,
}

/// Sets the bits in `mask`; those of them that were clear. The caller has the tree lock of the folios they are of.
#[inline]
pub fn set(word: &AtomicU64, mask: u64) -> u64 {
    // Relaxed: the bytes that the bit stands for are ordered by the tree lock, or by the fences below.
    mask & !word.fetch_or(mask, Ordering::Relaxed)
}

/// Clears the bits in `mask`; those of them that were set. As [`set`].
#[inline]
pub fn clear(word: &AtomicU64, mask: u64) -> u64 {
    mask & word.fetch_and(!mask, Ordering::Relaxed)
}

/// The bits of a word. The tree lock of their folios keeps them still; a writer looks at them after [`after_bytes`].
#[inline]
pub fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

/// Stands between a writer's bytes and its look at the dirty bits of the pages that it has changed (w2).
#[inline]
pub fn after_bytes() {
    // SeqCst fence, partner: the one in `before_flush`; see the head of this file.
    if !mutant(Mutant::DirtyWriteFence) {
        fence(Ordering::SeqCst);
    }
}

/// Stands between the clearing of dirty bits for write-back and the reading of the bytes (b2).
#[inline]
pub fn before_flush() {
    // SeqCst fence, partner: the one in `after_bytes`.
    if !mutant(Mutant::DirtyFlushFence) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_a_word_do_not_disturb_each_other_and_each_change_is_reported_once() {
        let word = AtomicU64::new(0);
        assert_eq!(set(&word, 0b1111_0000), 0b1111_0000);
        assert_eq!(set(&word, 0b0001_1100), 0b0000_1100);
        assert_eq!(clear(&word, 0b0011_0011), 0b0011_0000);
        assert_eq!(load(&word), 0b1100_1100);
    }
}

//! Written: pages that are changed in place while others read them.
//!
//! A folio whose bytes a fill brought is **steady** as long as its sequence does not change. The first writer makes it
//! **written** for the rest of its life; then each of its pages has a **write sequence** in a table beside the
//! descriptors: even while the page is quiet, odd while a writer is in it. (One sequence for a folio of 2 MiB would
//! retry its readers at a write of any page: measured, 324 retries for each read against 0.1.)
//!
//! ```text
//!   writer (holds the folio, and the page's lock)            reader of a written folio (holds nothing)
//!   p1  descriptor: written; its sequence by two, once       q1  descriptor, Acquire: live, the file's, written
//!   p2  page: odd                                            q2  page, Acquire: even
//!   p3  SEQCST FENCE                                         q3  copy
//!   p4  pinned? then p6 without p5                           q4  ACQUIRE FENCE
//!   p5  bytes                                                q5  page: as in q2?       (q2 to q5 for each page)
//!   p6  page: even, Release                                  q6  descriptor: as in q1?
//! ```
//!
//! The cases that a reader may see, and why each is right all the same:
//!
//!  1. q3 sees a byte of a write that was not over at q2: with q4 it sees what came before p3 of that writer, so q5
//!     sees its odd number or a later one, and refuses.
//!  2. q2 sees p6 of a write: it has the bytes of that write, and of all before it, which the page's lock put before
//!     it; q3 cannot see what they replaced.
//!  3. q2 sees a number from before any write, perhaps of another folio's life: then q1 has the fill's bytes, and 1.
//!     holds for any later ones. Numbers only rise, through all lives of a frame, so an old one does not come back.
//!  4. The folio is let go between q1 and q6: q6 sees that, as for a steady folio.
//!  5. The reader found the folio steady (`begin_read`), and looks at no page. If it copied a byte of p5, its second
//!     look sees p1 by the same two fences: another sequence. A second writer, who found p1 done, has seen p1 before
//!     its own p3, and so hands it on.
//!
//! A **pin** lends bytes that must not change. It is counted before its fence and looks for writers behind it; a writer
//! says that it is in the page before p3 and looks for pins behind it. So either the writer sees the pin and changes
//! nothing, or the pinner sees the writer and waits for p6 (Dekker's argument: such fences stand in one order).
//!
//! Invariants:
//!  1. A page's sequence is stepped by the holder of the page's lock (`page_locks.rs`), and is odd only meanwhile.
//!  2. Bytes of an up-to-date folio change only between p3 and p6, and not if p4 saw a pin.
//!  3. A page's sequence never falls, whatever its frame is used for.
//!
//! Not an invariant: that the pages of one read, or of one write, are of one moment. Each page is read whole, before or
//! after any write to it, as with a kernel's page cache. And not: that a written folio is still in the index, which the
//! file's write path sees to.
//!
//! A reader that sleeps in q3 while the page is written exactly 2^31 times is not noticed.
//!
//! `tests/model_hit.rs` shows that each of these steps is needed.

use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sync::{Mutant, mutant, ordering};

/// A page's sequence as a reader saw it, with no writer in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SequenceSnapshot(u32);

/// The reader's first look at a page (q2); `None` if a writer is in it.
#[inline]
pub fn read_begin(sequence: &AtomicU32) -> Option<SequenceSnapshot> {
    // Acquire, partner: the Release in `leave`: a thread that sees the number sees all bytes written under it.
    let number = sequence.load(ordering(Mutant::PageAcquire, Ordering::Acquire, Ordering::Relaxed));
    (number & 1 == 0 || mutant(Mutant::PageOdd)).then_some(SequenceSnapshot(number))
}

/// The reader's second look at a page (q4, q5): whether no writer came since the first.
#[inline]
pub fn is_still(sequence: &AtomicU32, seen: SequenceSnapshot) -> bool {
    // Acquire fence, partner: the fence in `enter`: a thread that copied a byte written since sees the odd number that
    // came before it, or a later one.
    if !mutant(Mutant::PageFence) {
        fence(Ordering::Acquire);
    }
    sequence.load(Ordering::Relaxed) == seen.0 || mutant(Mutant::PageRecheck)
}

/// Whether a thread that pins finds no writer in the page, after
/// [`may_have_writers`](super::Descriptor::may_have_writers). Then no writer changes the page before the pin is given
/// back.
#[inline]
pub fn has_no_writer(sequence: &AtomicU32) -> bool {
    // Acquire, partner: the Release in `leave`: the pinner reads the written bytes, without looking again.
    let order = ordering(Mutant::NoWriterAcquire, Ordering::Acquire, Ordering::Relaxed);
    sequence.load(order) & 1 == 0
}

/// The writer enters (p2, p3). It holds the folio and the page's lock, after
/// [`begin_writes`](super::Descriptor::begin_writes). It looks at [`is_pinned`](super::Descriptor::is_pinned) next.
#[inline]
pub fn enter(sequence: &AtomicU32) {
    let number = sequence.load(Ordering::Relaxed);
    debug_assert!(number & 1 == 0, "one writer at a time is in a page");
    let odd = if mutant(Mutant::WriteOdd) { number } else { number.wrapping_add(1) };
    sequence.store(odd, Ordering::Relaxed);
    // SeqCst fence, partners: the Acquire fences in `is_still`, `end_read` and `was_written` (for which Release
    // would do), and the SeqCst fence in `may_have_writers`; see the head of this file.
    if mutant(Mutant::WriteFenceOrder) {
        fence(Ordering::Release); // partner: as above, but for the pin
    } else if !mutant(Mutant::WriteFence) {
        fence(Ordering::SeqCst); // partner: as above
    }
}

/// The writer leaves (p6), whether it changed anything or not.
#[inline]
pub fn leave(sequence: &AtomicU32) {
    let number = sequence.load(Ordering::Relaxed);
    let step = if mutant(Mutant::WriteOdd) { 2 } else { 1 };
    // Release, partner: the Acquire in `read_begin` and `has_no_writer`.
    sequence.store(
        number.wrapping_add(step),
        ordering(Mutant::WriteRelease, Ordering::Release, Ordering::Relaxed),
    );
}

#[cfg(all(test, not(quinion_model)))]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_refused_while_a_writer_is_in_it_and_changed_when_it_has_left() {
        let page = AtomicU32::new(0);
        let before = read_begin(&page).unwrap();
        assert!(is_still(&page, before) && has_no_writer(&page));
        enter(&page);
        assert_eq!(read_begin(&page), None);
        assert!(!is_still(&page, before) && !has_no_writer(&page));
        leave(&page);
        assert!(!is_still(&page, before) && has_no_writer(&page));
        let after = read_begin(&page).unwrap();
        assert!(is_still(&page, after));
    }

    #[test]
    fn the_sequence_wraps_and_stays_even() {
        let page = AtomicU32::new(u32::MAX - 1);
        enter(&page);
        assert_eq!(read_begin(&page), None);
        leave(&page);
        assert_eq!(read_begin(&page), Some(SequenceSnapshot(0)));
    }
}

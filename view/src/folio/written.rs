//! Written: copies out of pages that a thread may be writing, a page at a time.
//!
//! ```text
//!   look      no writer in the page?          no -> wait a little
//!   copy
//!   look      the same sequence as before?    no -> again, three times at most
//! ```
//!
//! [`arena::written`](crate::arena::written) has the steps and why they suffice. A copy of a page takes less time than
//! a reader waits in one try, so a thread that fails three times has met a stopped writer, or a page that is written
//! without a pause. It goes to the reader's slow path, which has locks.
//!
//! Invariant: a copy that succeeded is the page's content of one moment, as far as the folio was the same before and
//! after. Not an invariant: that a buffer is untouched where the copy failed.

use core::sync::atomic::AtomicU32;

use super::copy;
use crate::arena::GrownView;
use crate::arena::written::{is_still, read_begin};
use crate::units::{Frame, PAGE_SIZE};

/// How often a page is tried to be copied without a lock.
pub const TRIES: u32 = 3;
/// How often, within a try, a page with a writer is looked at. With the pause between looks (some 40 cycles on
/// processors of today, less on old ones) longer than it takes to write a page.
const SPINS_MAX: u32 = 64;

/// One try: copies `len` bytes of a page; whether they are of one moment.
///
/// # Safety
/// As for [`copy::copy_out`], and the bytes are of the page whose sequence is given.
#[inline]
pub unsafe fn try_copy_page(sequence: &AtomicU32, from: *const u8, to: *mut u8, len: usize) -> bool {
    let Some(seen) = read_begin(sequence) else { return false };
    // SAFETY: the caller's promise.
    unsafe { copy::copy_out(from, to, len) };
    is_still(sequence, seen)
}

/// Copies `len` bytes of a page that may be being written; whether it found a moment when it was not.
///
/// # Safety
/// That of [`try_copy_page`].
#[inline]
pub unsafe fn copy_page(sequence: &AtomicU32, from: *const u8, to: *mut u8, len: usize) -> bool {
    (0..TRIES).any(|_| {
        let mut spins = (0..SPINS_MAX).take_while(|_| read_begin(sequence).is_none());
        spins.by_ref().for_each(|_| core::hint::spin_loop());
        // SAFETY: the caller's promise.
        unsafe { try_copy_page(sequence, from, to, len) }
    })
}

/// Copies `len` bytes from `inside` the folio of `head` on, page by page, up to the first with a writer in it: how
/// many. `None` if such frames do not exist, which is so of no folio.
///
/// # Safety
/// `to` is valid for `len` bytes of writes, no other thread writes there, and it does not overlap the arena.
pub unsafe fn copy_pages(
    grown: GrownView<'_>,
    head: Frame,
    inside: usize,
    to: *mut u8,
    len: usize,
) -> Option<usize> {
    let faults = copy::faults();
    for part in parts(inside, len) {
        if copy::faults() != faults {
            break;
        }
        let frame = head.plus(part.page);
        let from = grown.bytes(frame)?.cast_const();
        let sequence = grown.write_sequence(frame)?;
        // SAFETY: the part is within a page that exists, and within the caller's buffer.
        if !unsafe { copy_page(sequence, from.add(part.at), to.add(part.done), part.len) } {
            return Some(part.done);
        }
    }
    Some(len)
}

/// The part of a range that lies in one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagePart {
    /// The page, counted from the folio's first.
    pub page: u32,
    /// The part's first byte in its page.
    pub at: usize,
    /// The part's length in bytes.
    pub len: usize,
    /// The range's bytes before it.
    pub done: usize,
}

/// The parts of `len` bytes from `inside` a folio on, page by page.
#[inline]
pub fn parts(inside: usize, len: usize) -> impl Iterator<Item = PagePart> {
    let mut done = 0;
    core::iter::from_fn(move || {
        let (page, at) = ((inside + done) / PAGE_SIZE, (inside + done) % PAGE_SIZE);
        let part = PagePart { page: page as u32, at, len: (len - done).min(PAGE_SIZE - at), done };
        done += part.len;
        (part.len > 0).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_range_in_order_and_none_crosses_a_page() {
        for (inside, len) in [(0, 0), (0, 1), (4095, 1), (4095, 2), (100, 4096), (5000, 20_000), (8192, 8192)]
        {
            let mut next = inside;
            for part in parts(inside, len) {
                assert!(part.len > 0 && part.at + part.len <= PAGE_SIZE);
                assert_eq!((part.page as usize * PAGE_SIZE + part.at, part.done), (next, next - inside));
                next += part.len;
            }
            assert_eq!(next, inside + len);
        }
    }
}

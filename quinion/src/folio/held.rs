//! Held: a hold on a folio, as a value. Dropping it gives the hold back.
//!
//! ```text
//!   take --> Held --drop--> put:  not the last, or still in the index   nothing more
//!              |                  the last of a detached folio          its frames go back to the arena
//!              +--into_pin--> a user's pin --unpin--> put
//! ```
//!
//! The stamp is the folio's identity when it was taken: its first index, its order and its sequence. None of them
//! changes while it is held, so they are read from the stamp and not from the descriptor.
//!
//! Invariants:
//!  1. One value is one hold: it cannot be cloned, and giving it back twice does not compile.
//!  2. Bytes are copied out only of pages that were seen readable, and each page is copied whole: before or after
//!     any write to it.
//!  3. The thread that puts the last hold of a detached folio frees its frames, and no other thread does.
//!
//! Not an invariant: that a held folio is in the index, or will ever be
//! readable. A fill may fail, and a change of the file detaches it.

use crate::arena::written as arena_written;
use crate::arena::{Arena, Descriptor, FolioStamp, HoldRefused, PutOutcome, ReadableState};
use crate::units::{Frame, MappingId, Order, PAGE_SIZE, PageIndex};

use quinion_view::folio::{copy, written};

/// A folio that this value keeps from being reused. It may leave the index all the same.
#[derive(Debug)]
pub struct HeldFolio<'a> {
    arena: &'a Arena,
    descriptor: &'a Descriptor,
    frame: Frame,
    stamp: FolioStamp,
}

impl<'a> HeldFolio<'a> {
    /// Holds the folio that `frame` heads, filled or not, if it is `mapping`'s and covers `index`.
    #[inline]
    pub fn take(
        arena: &'a Arena,
        frame: Frame,
        mapping: MappingId,
        index: PageIndex,
    ) -> Result<Self, HoldRefused> {
        let descriptor = arena.view().descriptor(frame).ok_or(HoldRefused::Mismatch)?;
        let stamp = descriptor.try_hold_unfilled(mapping, index)?;
        Ok(Self { arena, descriptor, frame, stamp })
    }

    /// The hold that came with the caller's own fill of the folio that `frame` heads, also if that has left the index.
    pub(super) fn of_fill(arena: &'a Arena, frame: Frame) -> Self {
        let descriptor = arena.view().own(frame);
        Self { arena, descriptor, frame, stamp: descriptor.stamp_of_fill() }
    }

    pub(super) fn into_parts(self) -> (&'a Arena, Frame) {
        let parts = (self.arena, self.frame);
        std::mem::forget(self);
        parts
    }
    pub(super) fn stamp(&self) -> FolioStamp {
        self.stamp
    }

    /// The folio's first frame.
    #[inline]
    pub fn frame(&self) -> Frame {
        self.frame
    }
    /// The folio's first index.
    #[inline]
    pub fn first(&self) -> PageIndex {
        self.stamp.first
    }
    /// The folio's order.
    #[inline]
    pub fn order(&self) -> Order {
        self.stamp.order()
    }
    /// Whether a user has pinned it; a hint, as pins come and go.
    pub fn is_pinned(&self) -> bool {
        self.descriptor.is_pinned()
    }
    /// Whether it carried the readahead marker when it was held.
    pub fn has_marker(&self) -> bool {
        self.stamp.has_marker()
    }
    /// Whether it went, when it was held, as soon as an uncached reader or writer had passed.
    #[inline]
    pub fn drops_behind(&self) -> bool {
        self.stamp.drops_behind()
    }
    /// Whether its page at `index` may be read now: while the folio is filled, its pages become readable one by one.
    ///
    /// # Panics
    /// If the folio does not cover `index`.
    pub fn is_readable_at(&self, index: PageIndex) -> ReadableState {
        let view = self.arena.view();
        let frame = self.frame.plus(self.page_of(index));
        self.descriptor.is_page_readable(self.stamp, || view.is_page_read(frame))
    }
    /// Whether it has been in the index from when it was held until now.
    #[inline]
    pub fn is_attached(&self) -> bool {
        self.descriptor.is_attached(self.stamp)
    }
    /// Whether all of it may be read now.
    #[inline]
    pub fn is_readable(&self) -> ReadableState {
        self.descriptor.is_readable(self.stamp)
    }

    /// Copies the folio's bytes from file position `position` on into `to`, as many as there are; returns
    /// how many. Each page is copied as it was at one moment; while it is written, another may be of another moment.
    ///
    /// May wait for a writer that has a page, after having tried without: for a copy of at most a page, or as long
    /// as that writer is stopped. Takes `Rank::Page`.
    ///
    /// # Panics
    /// If the page at `position` is not filled, or the folio does not cover it.
    pub fn copy_out(&self, position: u64, to: &mut [u8]) -> usize {
        let bytes = to.len().min(self.ready_bytes(position));
        let inside = self.inside(position);
        let descriptor = self.descriptor;
        if !descriptor.word().is_written() {
            // SAFETY: the folio's frames are kept by this hold, `inside + bytes` is within them and filled, and
            // `to` is a unique slice of at least `bytes`.
            unsafe { copy::copy_out(self.bytes().add(inside), to.as_mut_ptr(), bytes) };
            if !descriptor.was_written() {
                return bytes;
            }
        }
        self.copy_out_written(inside, &mut to[..bytes]);
        bytes
    }

    /// Copies each page by itself, in a quiet moment, or under its lock if none was found.
    #[cold]
    fn copy_out_written(&self, inside: usize, to: &mut [u8]) {
        for part in written::parts(inside, to.len()) {
            let frame = self.frame.plus(part.page);
            let sequence = self.arena.view().own_write_sequence(frame);
            // SAFETY: the part is within the folio, whose frames this hold keeps.
            let from = unsafe { self.bytes().add(part.page as usize * PAGE_SIZE + part.at) };
            let to = &mut to[part.done..part.done + part.len];
            // SAFETY: as in `copy_out`.
            if !unsafe { written::copy_page(sequence, from, to.as_mut_ptr(), part.len) } {
                let _no_writer = self.arena.page_locks().lock(frame);
                // SAFETY: as above.
                unsafe { copy::copy_out(from, to.as_mut_ptr(), part.len) };
            }
        }
    }

    /// Waits, if a writer is in the page at `index`, until it has left. May wait as [`HeldFolio::copy_out`] may.
    ///
    /// # Panics
    /// If the folio does not cover `index`.
    pub fn wait_for_writer(&self, index: PageIndex) {
        self.pass_writer(self.page_of(index));
    }

    /// Waits until `page`, counted from the folio's first, was seen without a writer.
    fn pass_writer(&self, page: u32) {
        let frame = self.frame.plus(page);
        if !arena_written::has_no_writer(self.arena.view().own_write_sequence(frame)) {
            drop(self.arena.page_locks().lock(frame));
        }
    }

    /// How many bytes from file position `position` on can be read: to the folio's end, or while it is filled to
    /// the first page that has not arrived.
    ///
    /// # Panics
    /// As [`HeldFolio::copy_out`].
    pub fn ready_bytes(&self, position: u64) -> usize {
        let (view, inside) = (self.arena.view(), self.inside(position));
        // Not `is_readable`: a folio that has left the index since the caller found it so is still its holder's.
        if self.descriptor.is_filled() {
            return self.order().bytes() - inside;
        }
        let page = (inside / PAGE_SIZE) as u32;
        let pages = view.run_read(self.frame.plus(page), self.order().pages() - page);
        assert!(pages > 0, "a page is filled, then read");
        pages as usize * PAGE_SIZE - inside % PAGE_SIZE
    }

    fn page_of(&self, index: PageIndex) -> u32 {
        let page = index.0.wrapping_sub(self.first().0);
        assert!(page < u64::from(self.order().pages()), "the folio covers the page");
        page as u32
    }

    pub(super) fn inside(&self, position: u64) -> usize {
        let inside = position.checked_sub(self.first().first_byte()).expect("the folio covers the position");
        assert!(inside < self.order().bytes() as u64, "the folio covers the position");
        inside as usize
    }

    /// The address of the folio's first byte; valid for `PAGE_SIZE << order` bytes of reads while held.
    pub fn bytes(&self) -> *const u8 {
        debug_assert_eq!(self.frame.offset() % PAGE_SIZE, 0);
        self.arena.view().bytes(self.frame).expect("a held folio has frames")
    }

    pub(super) fn arena(&self) -> &'a Arena {
        self.arena
    }

    /// Turns the hold into a user's pin, to be given back by [`unpin`]; with the folio's order if it is its first.
    /// When it returns, no thread is writing the folio's bytes, and none will until then. May wait as
    /// [`HeldFolio::copy_out`] may.
    pub fn into_pin(self) -> (Frame, Option<Order>) {
        let descriptor = self.descriptor;
        let first = descriptor.pin();
        if descriptor.may_have_writers() {
            (0..self.order().pages()).for_each(|page| self.pass_writer(page));
        }
        let parts = (self.frame, first.then_some(self.order()));
        std::mem::forget(self);
        parts
    }
}

impl Drop for HeldFolio<'_> {
    #[inline]
    fn drop(&mut self) {
        put(self.arena, self.frame, self.descriptor);
    }
}

/// Gives back a pin made by [`HeldFolio::into_pin`]; the folio's order if it was the last.
pub fn unpin(arena: &Arena, frame: Frame) -> Option<Order> {
    let descriptor = arena.view().own(frame);
    let order = descriptor.word().order();
    let last = descriptor.unpin();
    put(arena, frame, descriptor);
    last.then_some(order)
}

#[inline]
fn put(arena: &Arena, frame: Frame, descriptor: &Descriptor) {
    if let PutOutcome::Last(order) = descriptor.put() {
        arena.free(frame, order);
    }
}

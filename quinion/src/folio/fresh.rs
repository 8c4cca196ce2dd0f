//! Fresh: frames that are not published yet, on their way to become a folio.
//!
//! ```text
//!   arena --alloc--> Fresh --copy_page, from a held folio--> Fresh --into_frame--> a tree
//!                      \--drop--> arena
//! ```
//!
//! Pages that have to leave the index while they are held, and must not be lost, are copied into such frames.
//!
//! Invariant: until [`FreshFolio::into_frame`] its frames are this value's alone, and their descriptors are odd.

use crate::arena::Arena;
use crate::units::{Frame, Order, PAGE_SIZE, PageIndex};

use super::held::HeldFolio;
use quinion_view::folio::copy;

/// 2^order frames of an arena that no folio owns yet. Dropping it gives them back.
#[derive(Debug)]
pub struct FreshFolio<'a> {
    arena: &'a Arena,
    frame: Frame,
    order: Order,
}

impl<'a> FreshFolio<'a> {
    /// `None` as for [`Arena::alloc`], whose locks it takes.
    pub fn alloc(arena: &'a Arena, order: Order) -> Option<Self> {
        arena.alloc(order).map(|frame| Self { arena, frame, order })
    }

    /// Copies the page at `index` of a held folio into its `page`th frame: of one moment, if it is being written. May
    /// wait as [`HeldFolio::copy_out`] may.
    ///
    /// # Panics
    /// If it has no such frame, or as [`HeldFolio::copy_out`].
    pub fn copy_page(&mut self, page: u32, held: &HeldFolio<'_>, index: PageIndex) {
        assert!(page < self.order.pages(), "the folio has the page");
        let mut bytes = [0; PAGE_SIZE];
        let copied = held.copy_out(index.first_byte(), &mut bytes);
        assert_eq!(copied, PAGE_SIZE, "a page of a folio is copied whole");
        let to = self.arena.view().bytes(self.frame.plus(page)).expect("a frame of ours");
        // SAFETY: the frame is this value's alone, and a page long; late readers of the folio it was are told by the
        // descriptor, as `copy_in` has the fence for.
        unsafe { copy::copy_in(bytes.as_ptr(), to, PAGE_SIZE) };
    }

    /// The first frame; all of them are the caller's from now on.
    pub fn into_frame(self) -> Frame {
        let frame = self.frame;
        std::mem::forget(self);
        frame
    }
}

impl Drop for FreshFolio<'_> {
    fn drop(&mut self) {
        self.arena.free(self.frame, self.order);
    }
}

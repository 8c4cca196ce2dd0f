//! Range: which pages a hint about a range of bytes is about.
//!
//! ```text
//!   bytes       |..xxxx|xxxxxxxx|xxx.....|
//!   will need   [------ every page it touches ------]    in pieces, one request each
//!   don't need         [ whole  ]                        only pages that lie in it as a whole
//! ```
//!
//! A will-need is carried out as a whole or says what it left out, and why: the
//! file ends before, or there is no room. Nothing is cut off in silence.
//!
//! Invariants: the windows of a plan follow on each other and are the plan's
//! pages exactly; wanted pages are planned pages and those left out.

use crate::units::{Order, PAGE_SIZE, PageIndex, pages_of_bytes};

use super::window::Window;

/// A range of a file that will be needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WillNeed {
    /// The first byte.
    pub position: u64,
    /// How many bytes; more than the file has means: up to its end.
    pub len: u64,
    /// The file's size in bytes.
    pub file_bytes: u64,
    /// How many pages there may be had room for.
    pub room_pages: u64,
    /// Pages of one piece, 1 at least: what is given to the device at a time.
    pub piece_pages: u32,
    /// The largest folio of a piece.
    pub order_max: Order,
}

/// How a will-need is carried out: an iterator over its windows, and what it leaves out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Pages that the windows cover.
    pub pages: u64,
    /// Pages of the range that do not fit into the cache, at its end.
    pub no_room_pages: u64,
    /// Pages of the range that the file does not have.
    pub past_end_pages: u64,
    next: PageIndex,
    left: u64,
    piece_pages: u32,
    order_max: Order,
}

impl WillNeed {
    /// The plan for it.
    pub fn plan(self) -> Plan {
        let (first, end) = covered_pages(self.position, self.len);
        let inside = pages_of_bytes(self.file_bytes).clamp(first.0, end.0) - first.0;
        let pages = inside.min(self.room_pages);
        Plan {
            pages,
            no_room_pages: inside - pages,
            past_end_pages: end.0 - first.0 - inside,
            next: first,
            left: pages,
            piece_pages: self.piece_pages.max(1),
            order_max: self.order_max,
        }
    }
}

impl Iterator for Plan {
    type Item = Window;

    fn next(&mut self) -> Option<Window> {
        // Pieces end where pieces of a file read from its start do, so that large folios find their places.
        let piece = u64::from(self.piece_pages);
        let pages = (piece - self.next.0 % piece).min(self.left) as u32;
        if pages == 0 {
            return None;
        }
        let order = self.order_max.min(Order::fitting(pages));
        let window = Window { order, ..Window::exact(self.next, pages) };
        (self.next, self.left) = (window.end(), self.left - u64::from(pages));
        Some(window)
    }
}

/// The first page that `len` bytes at `position` touch, and the page after the last one.
pub fn covered_pages(position: u64, len: u64) -> (PageIndex, PageIndex) {
    let first = PageIndex::of_byte(position);
    let end = if len == 0 { first } else { PageIndex(pages_of_bytes(position.saturating_add(len))) };
    (first, end)
}

/// The first page that lies in `len` bytes at `position` as a whole, and the page after the last one; the
/// last page of a file of `file_bytes` counts as whole where the range covers all the file has of it. Equal
/// if there is none.
pub fn whole_pages(position: u64, len: u64, file_bytes: u64) -> (PageIndex, PageIndex) {
    let first = PageIndex(pages_of_bytes(position));
    let end = position.saturating_add(len);
    let pages = if end >= file_bytes { pages_of_bytes(file_bytes) } else { end / PAGE_SIZE as u64 };
    (first, PageIndex(pages.max(first.0)))
}

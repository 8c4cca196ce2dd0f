//! Locate: where the bytes of a pinned range lie, found by a reader that has the index and not the pin.
//!
//! The owner pins a range and a viewer looks at it: both see one index, so the viewer finds the pages by the walk of a
//! read ([`hit`](super::hit)), and in place of a copy takes the addresses.
//!
//! The looks before and after are those of a read, and say that a folio was this file's while it was looked up. That
//! it stays so, and that its bytes do, is the pin's work: the caller has the range pinned, of a file that never
//! changes, and the owner gives a pin only of folios that are in the index and filled. Then no other folio takes the
//! place of a pinned one.
//!
//! A folio without any pin is not what the owner has pinned, and is not lent, whatever the owner said.

use super::hit::{is_still, page_of};
use crate::arena::{CellNumber, View};
use crate::mapping::find;
use crate::units::{Frame, MappingId, PAGE_SIZE, PageIndex};
use crate::xarray::Kind;

/// Says of `len` bytes at `position` of a file, from the first on, where they lie: pieces of a page at most, in order.
/// Ends at the first page that is not there, or whose folio is not filled or not pinned. How many bytes were found.
pub fn locate(
    view: &View,
    (cell, id): (CellNumber, MappingId),
    (position, len): (u64, usize),
    mut each: impl FnMut(*const u8, usize),
) -> usize {
    let grown = view.grown();
    let Some(record) = grown.record(cell) else { return 0 };
    let mut found = 0;
    while found < len {
        let at = position + found as u64;
        let index = PageIndex::of_byte(at);
        let inside = at as usize % PAGE_SIZE;
        let bytes = (len - found).min(PAGE_SIZE - inside);
        let Kind::Folio(number) = find(&grown, record, index).kind() else { break };
        let frame = Frame(number);
        let Some(descriptor) = grown.descriptor(frame) else { break };
        let Ok(ticket) = descriptor.begin_read(id, index) else { break };
        let Some(page) = page_of(grown, frame, ticket, index) else { break };
        if !descriptor.is_pinned() || !is_still(descriptor, ticket, record, id, at + bytes as u64) {
            break;
        }
        each(page.wrapping_add(inside), bytes);
        found += bytes;
    }
    found
}

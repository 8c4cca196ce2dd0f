//! Locate: where the bytes of a pinned range lie, found by a reader that has the index and not the pin.
//!
//! The owner pins a range and a viewer finds its pages by the walk of a read ([`hit`](super::hit)), and in place of a
//! copy takes the addresses.
//!
//! The looks before and after say that a folio was this file's while it was looked up. That it stays so, with its
//! bytes, is the pin's work: the range is pinned, of a file that never changes, and the owner pins only filled folios
//! in the index. A folio without any pin is not lent, whatever the owner said.
//!
//! [`resident`] takes the same walk without a pin, and lends nothing: it tells which bytes a read would find now.

use core::ops::Range;

use super::{FileView, FoundFile, page_of};
use crate::lookup::find;
use crate::units::{Frame, PAGE_SIZE, PageIndex};
use crate::xarray::Kind;

/// Says where the bytes `range` of a file lie: pieces of a folio at most, in order, up to the first page that is not
/// there, filled and pinned. How many bytes were found.
pub fn locate(file: FileView<'_>, range: Range<u64>, mut each: impl FnMut(*const u8, usize)) -> usize {
    let Some(file) = file.found() else { return 0 };
    let FoundFile { grown, record, id } = file;
    let (position, len) = (range.start, range.end.saturating_sub(range.start) as usize);
    let mut found = 0;
    while found < len {
        let at = position + found as u64;
        let index = PageIndex::of_byte(at);
        let inside = at as usize % PAGE_SIZE;
        let Kind::Folio(number) = find(&grown, record, index).kind() else { break };
        let frame = Frame(number);
        let Some(descriptor) = grown.descriptor(frame) else { break };
        let Ok(stamp) = descriptor.begin_read(id, index) else { break };
        let pages = (u64::from(stamp.order().pages()) + stamp.first.0 - index.0) as usize;
        let bytes = (len - found).min(pages * PAGE_SIZE - inside);
        // The frames of a folio lie together: if the first and the last of them exist, the others do.
        let last = PageIndex(index.0 + ((inside + bytes - 1) / PAGE_SIZE) as u64);
        let Some(page) = page_of(grown, frame, stamp, index) else { break };
        if page_of(grown, frame, stamp, last).is_none() {
            break;
        }
        if !descriptor.is_pinned() || !file.is_still(descriptor, stamp, at + bytes as u64) {
            break;
        }
        each(page.wrapping_add(inside), bytes);
        found += bytes;
    }
    found
}

/// Says which bytes of `range` a read would find in the cache now: parts of a folio at most, in rising order. Nothing
/// is kept, noted or waited for.
pub fn resident(file: FileView<'_>, range: Range<u64>, mut each: impl FnMut(Range<u64>)) {
    let Some(file) = file.found() else { return };
    let mut at = range.start;
    while at < range.end {
        let index = PageIndex::of_byte(at);
        let ready = ready_pages(file, index);
        let step = u64::from(ready.max(1)) * PAGE_SIZE as u64;
        let end = index.first_byte().saturating_add(step).min(range.end);
        if ready > 0 {
            each(at..end);
        }
        at = end;
    }
}

fn ready_pages(file: FoundFile<'_>, index: PageIndex) -> u32 {
    let Kind::Folio(number) = find(&file.grown, file.record, index).kind() else { return 0 };
    let Some(descriptor) = file.grown.descriptor(Frame(number)) else { return 0 };
    match file.begin_partial(descriptor, Frame(number), index) {
        Ok((stamp, pages)) if file.is_still(descriptor, stamp, index.first_byte()) => pages,
        _ => 0,
    }
}

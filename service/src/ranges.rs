//! Ranges: several reads of one file, asked for together.
//!
//! A read of many ranges tells the server of all that is missing before it waits for the first. Ranges that overlap or
//! touch are told as one span.

use std::ops::Range;

/// One range of a [`ClientFile::read_ranges`](crate::ClientFile::read_ranges).
#[derive(Debug)]
pub struct RangeRead<'b> {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Where the bytes go.
    pub buffer: &'b mut [u8],
}

/// In order; ranges that overlap or touch are one.
pub(crate) fn spans_of<'r>(ranges: impl Iterator<Item = &'r RangeRead<'r>>) -> Vec<Range<u64>> {
    let mut spans: Vec<Range<u64>> =
        ranges.map(|range| range.offset..range.offset.saturating_add(range.buffer.len() as u64)).collect();
    spans.sort_unstable_by_key(|span| span.start);
    spans.dedup_by(|next, before| {
        let is_one = next.start <= before.end;
        before.end = if is_one { before.end.max(next.end) } else { before.end };
        is_one
    });
    spans
}

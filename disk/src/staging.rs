//! Staging: segments in memory, on their way to the disk.
//!
//! ```text
//!   put --> open --full--> sealed, sealed .. --> writing --> its buffer is free again
//! ```
//!
//! Where no buffer is free a put is refused, so a slow disk costs hits and never time. A segment's number is chosen
//! when it is opened: the oldest one's, in turn.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::device::AlignedBuffer;
use crate::index::Extent;
use crate::layout::{ContentKey, DATA_PAGES, Entry, PAGE_BYTES, TABLE_PAGES, Table, data_bytes};

#[derive(Debug)]
pub struct OpenSegment {
    segment: u32,
    table: Table,
    buffer: AlignedBuffer,
    used: u16,
    /// When something was added first since it was last written.
    changed: Option<Instant>,
    /// Extents that the segment's place on the disk still holds: they were read, and may move.
    kept: Vec<(ContentKey, Extent)>,
}

impl OpenSegment {
    /// Writes its table before its data; how many bytes both are.
    fn complete(&mut self, store: u64) -> usize {
        self.table.encode(store, &mut self.buffer.bytes_mut()[..TABLE_PAGES * PAGE_BYTES]);
        data_bytes(self.used, 0).start
    }
}

#[derive(Debug)]
pub struct SealedSegment {
    pub segment: u32,
    pub buffer: AlignedBuffer,
    pub len: usize,
    /// Extents to be read before they are written over.
    pub kept: Vec<(ContentKey, Extent)>,
}

#[derive(Debug)]
pub struct Staging {
    at: RingPosition,
    open: Option<OpenSegment>,
    sealed: VecDeque<SealedSegment>,
    writing: Option<Arc<SealedSegment>>,
    free: Vec<AlignedBuffer>,
    buffers_left: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct RingPosition {
    pub store: u64,
    pub segments: u32,
    pub next: u32,
    pub sequence: u64,
}

impl Staging {
    pub fn new(at: RingPosition, buffers: usize) -> Self {
        Self {
            at,
            open: None,
            sealed: VecDeque::new(),
            writing: None,
            free: Vec::new(),
            buffers_left: buffers,
        }
    }

    /// Has a segment open with room for `pages` pages. `forget` is told of a segment that is about to be filled anew,
    /// and says what of it is to be kept. `false`: there is no buffer.
    pub fn reserve_pages(
        &mut self,
        pages: u16,
        forget: impl FnOnce(u32) -> Vec<(ContentKey, Extent)>,
    ) -> bool {
        if self.open.as_ref().is_some_and(|open| usize::from(open.used + pages) > DATA_PAGES) {
            self.seal();
        }
        if self.open.is_some() {
            return true;
        }
        let Some(buffer) = self.take_buffer() else { return false };
        let segment = self.at.next;
        self.at.next = (segment + 1) % self.at.segments;
        self.at.sequence += 1;
        let table = Table { sequence: self.at.sequence, entries: Vec::new() };
        let kept = forget(segment);
        self.open = Some(OpenSegment { segment, table, buffer, used: 0, changed: None, kept });
        true
    }

    fn take_buffer(&mut self) -> Option<AlignedBuffer> {
        self.free.pop().or_else(|| {
            self.buffers_left = self.buffers_left.checked_sub(1)?;
            Some(AlignedBuffer::new(crate::layout::SEGMENT_BYTES))
        })
    }

    pub fn free_segments(&self) -> usize {
        self.free.len() + self.buffers_left
    }

    /// Where the next extent goes: the segment, and the page in its data. After [`Staging::reserve_pages`].
    pub fn place(&self) -> Option<(u32, u16)> {
        self.open.as_ref().map(|open| (open.segment, open.used))
    }

    /// At [`Staging::place`]. Whether it is the first extent since the segment was written.
    pub fn add(&mut self, entry: Entry, bytes: &[u8]) -> bool {
        let open = self.open.as_mut().expect("room was made for it");
        debug_assert_eq!((entry.at, bytes.len()), (open.used, usize::from(entry.pages) * PAGE_BYTES));
        open.buffer.bytes_mut()[data_bytes(entry.at, entry.pages)].copy_from_slice(bytes);
        open.used += entry.pages;
        open.table.entries.push(entry);
        let is_first = open.changed.is_none();
        open.changed.get_or_insert_with(Instant::now);
        is_first
    }

    /// Whether there was an open segment.
    pub fn seal(&mut self) -> bool {
        let Some(mut open) = self.open.take() else { return false };
        let len = open.complete(self.at.store);
        self.sealed.push_back(SealedSegment {
            segment: open.segment,
            buffer: open.buffer,
            len,
            kept: open.kept,
        });
        true
    }

    pub fn begin_write(&mut self) -> Option<Arc<SealedSegment>> {
        let segment = Arc::new(self.sealed.pop_front()?);
        self.writing = Some(Arc::clone(&segment));
        Some(segment)
    }

    /// After a write, good or bad. The caller has dropped its own reference, the only other one.
    pub fn end_write(&mut self) {
        self.free.extend(self.writing.take().and_then(Arc::into_inner).map(|segment| segment.buffer));
    }

    /// A copy of the open segment, if it has waited since `before` or longer to be written.
    pub fn checkpoint(
        &mut self,
        before: Instant,
        mut scratch: AlignedBuffer,
    ) -> Result<SealedSegment, AlignedBuffer> {
        let store = self.at.store;
        let due = |open: &&mut OpenSegment| open.changed.is_some_and(|changed| changed <= before);
        let Some(open) = self.open.as_mut().filter(due) else { return Err(scratch) };
        open.changed = None;
        let len = open.complete(store);
        scratch.bytes_mut()[..len].copy_from_slice(&open.buffer.bytes()[..len]);
        Ok(SealedSegment {
            segment: open.segment,
            buffer: scratch,
            len,
            kept: std::mem::take(&mut open.kept),
        })
    }

    /// Whether the segment is in memory.
    pub fn copy_to(&self, segment: u32, range: Range<usize>, to: &mut [u8]) -> bool {
        let open = self.open.as_ref().filter(|open| open.segment == segment).map(|open| &open.buffer);
        let sealed =
            || self.sealed.iter().find(|sealed| sealed.segment == segment).map(|sealed| &sealed.buffer);
        let writing = || self.writing.as_deref().filter(|w| w.segment == segment).map(|w| &w.buffer);
        let found = open.or_else(sealed).or_else(writing);
        if let Some(buffer) = found {
            to.copy_from_slice(&buffer.bytes()[range]);
        }
        found.is_some()
    }

    pub fn is_open_changed(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.changed.is_some())
    }

    /// Whether no segment is left to be written, but perhaps an open one.
    pub fn is_drained(&self) -> bool {
        self.sealed.is_empty() && self.writing.is_none()
    }

    /// Forgets the segments that wait to be written, and says which they were. The one that is being written is its
    /// writer's until [`Staging::end_write`].
    pub fn clear(&mut self) -> Vec<u32> {
        let open = self.open.take().map(|open| (open.segment, open.buffer));
        let sealed = self.sealed.drain(..).map(|sealed| (sealed.segment, sealed.buffer));
        let (segments, buffers): (_, Vec<_>) = open.into_iter().chain(sealed).unzip();
        self.free.extend(buffers);
        segments
    }
}

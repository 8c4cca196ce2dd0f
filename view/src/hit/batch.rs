//! Batch: several hits side by side, so that the waits for memory of one are the work time of the others.
//!
//! A hit waits for memory four times in a row: for a slot of the tree, for the descriptor, for the page, and for the
//! memory accesses of the copy before it. The processor looks ahead less than one copy of 4 KiB, so hits one after
//! another wait one after another. Here each step is done for all reads of a **group** before the next step begins, and
//! the memory that it needs is prefetched:
//!
//! ```text
//!              read 0      read 1      read 2   ...            asks for
//!   1 size       .           .           .                     the top node's slot
//!   2 walk       .  level by level, all reads a level          the slot of the next level
//!   3 found      .           .           .                     descriptor, referenced byte
//!   4 look       .           .           .                     the first lines of the page
//!   5 copy, size, look, touch                                  nothing: the copy fetches the rest itself
//! ```
//!
//! Each read keeps the order of looks and the checks of `mod.rs`; the steps of other reads in between delay it as a
//! slow reader is delayed. Nothing is held here, and no thread waits.
//!
//! Only plain hits are served: a range within one page and within the file, of a page that is filled, of a folio
//! without a marker. The rest is left for the ordinary way. Reads of written folios are served one by one at the end.
//!
//! Invariants:
//!  1. A read is served whole or not at all; only the buffer of one that was not holds arbitrary bytes.
//!  2. Nothing is read through an unchecked address; to ask for a line early is no access.
//!
//! Not an invariant: that the reads of a group see the file at one moment.

use core::marker::PhantomData;
use core::sync::atomic::AtomicU32;

use crate::arena::{CellNumber, Descriptor, FolioStamp, GrownView, NotReady, Record, View, fetch_line};
use crate::folio::copy::copy_out;
use crate::lookup::{NODE_BITS, seek};
use crate::units::{Frame, MappingId, PAGE_SIZE, PageIndex};
use crate::xarray::{Kind, Steps};

use super::{FoundFile, WantedBytes, end_within_page, page_of, written_page};

/// The most reads that go side by side; more of them would push each other's lines out of the first cache.
pub const GROUP_MAX: usize = 16;

const PREFETCHED_LINES: usize = 4;
const LINE: usize = 64;

/// One read of a group.
#[derive(Debug)]
pub struct BatchedRead<'b> {
    cell: CellNumber,
    id: MappingId,
    bytes: WantedBytes,
    buffer: PhantomData<&'b mut [u8]>,
}

impl<'b> BatchedRead<'b> {
    /// `to.len()` bytes at `position` of the file whose record is in `cell` and is of `id`. (No slice overlaps an arena
    /// but those that a pin lends, which are read-only.)
    #[inline]
    pub fn new(cell: CellNumber, id: MappingId, position: u64, to: &'b mut [u8]) -> Self {
        let bytes = WantedBytes::of_slice(position, to);
        Self { cell, id, bytes, buffer: PhantomData }
    }
    /// As [`BatchedRead::new`], to an address.
    ///
    /// # Safety
    /// `bytes.to` is valid for `bytes.len` bytes of writes during `'b`, is not accessed by others, and does not overlap
    /// the arena.
    #[inline]
    pub unsafe fn from_raw(cell: CellNumber, id: MappingId, bytes: WantedBytes) -> Self {
        Self { cell, id, bytes, buffer: PhantomData }
    }
    /// A read that is never served; fills the end of an array.
    #[inline]
    pub const fn nothing() -> Self {
        let to = core::ptr::NonNull::dangling().as_ptr();
        Self {
            cell: CellNumber::nowhere(0),
            id: MappingId::NONE,
            bytes: WantedBytes { position: 0, to, len: 0 },
            buffer: PhantomData,
        }
    }
    #[inline]
    fn index(&self) -> PageIndex {
        PageIndex::of_byte(self.bytes.position)
    }
}

/// Which reads of a group were served.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ServedSet(u32);

const _: () = assert!(GROUP_MAX <= 32);

impl ServedSet {
    /// Whether the `nth` read, counted from 0, was served: all its bytes are in its buffer.
    #[inline]
    pub fn has(self, nth: usize) -> bool {
        self.0 >> nth & 1 != 0
    }
    /// How many were served.
    #[inline]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }
    #[inline]
    fn add(&mut self, nth: usize) {
        self.0 |= 1 << nth;
    }
}

/// Serves those of `wanted` that are plainly hits. `touch` is told the first frame of the folio of each.
///
/// # Panics
/// If there are more than [`GROUP_MAX`].
#[inline]
pub fn read_group(
    view: &View,
    wanted: &mut [BatchedRead<'_>],
    mut touch: impl FnMut(GrownView<'_>, Frame),
) -> ServedSet {
    assert!(wanted.len() <= GROUP_MAX, "a group has at most {GROUP_MAX} reads");
    let grown = view.grown();
    let mut seeks = [const { None }; GROUP_MAX];
    let mut founds = [const { None }; GROUP_MAX];
    let mut ready = [const { None }; GROUP_MAX];
    for (seek, wanted) in seeks.iter_mut().zip(wanted.iter()) {
        *seek = TreeDescent::begin(&grown, wanted); // 1
    }
    let seeks = &mut seeks[..wanted.len()];
    walk_all(&grown, seeks); // 2
    for (found, seek) in founds.iter_mut().zip(seeks) {
        *found = seek.as_ref().and_then(|seek| seek.found(grown)); // 3
    }
    let mut are_written = false;
    for ((ready, found), wanted) in ready.iter_mut().zip(&founds).zip(wanted.iter()) {
        *ready = found.as_ref().and_then(|found| found.begin(grown, wanted, &mut are_written)); // 4
    }
    let mut served = ServedSet::default();
    for (nth, (ready, wanted)) in ready.iter().zip(wanted.iter_mut()).enumerate() {
        // 5
        if let Some(ready) = ready
            && ready.copy(grown, wanted)
        {
            touch(grown, ready.frame);
            served.add(nth);
        }
    }
    if are_written {
        serve_written(grown, &founds, wanted, &mut served, touch);
    }
    served
}

#[cold]
#[inline(never)]
fn serve_written(
    grown: GrownView<'_>,
    founds: &[Option<LocatedRead<'_>>],
    wanted: &mut [BatchedRead<'_>],
    served: &mut ServedSet,
    mut touch: impl FnMut(GrownView<'_>, Frame),
) {
    for (nth, (found, wanted)) in founds.iter().zip(wanted).enumerate() {
        let &mut BatchedRead { id, bytes, .. } = wanted;
        let Some(&LocatedRead { record, frame, .. }) = found.as_ref().filter(|_| !served.has(nth)) else {
            continue;
        };
        // SAFETY: the destination is the caller's, by the promise that made `wanted`.
        if let Some(frame) = unsafe { written_page(FoundFile { grown, record, id }, frame, bytes) } {
            touch(grown, frame);
            served.add(nth);
        }
    }
}

#[inline]
fn walk_all<'a>(grown: &'a GrownView<'a>, seeks: &mut [Option<TreeDescent<'a>>]) {
    let mut under_way = true;
    while under_way {
        under_way = false;
        for seek in seeks.iter_mut().flatten() {
            seek.walk.step(grown);
            under_way |= seek.fetch_slot();
        }
    }
}

#[derive(Debug)]
struct TreeDescent<'a> {
    record: &'a Record,
    end: u64,
    walk: Steps<'a, NODE_BITS>,
}

impl<'a> TreeDescent<'a> {
    /// Looks at the size and begins the walk, if it is the kind of read that is served here.
    #[inline]
    fn begin(grown: &'a GrownView<'a>, wanted: &BatchedRead<'_>) -> Option<Self> {
        let record = grown.record(wanted.cell)?;
        let WantedBytes { position, len, .. } = wanted.bytes;
        let end = end_within_page(record, position, len).filter(|_| len > 0)?;
        let seek = Self { record, end, walk: seek(grown, record, wanted.index()) };
        seek.fetch_slot();
        Some(seek)
    }

    #[inline]
    fn fetch_slot(&self) -> bool {
        let slot = self.walk.slot();
        if let Some(slot) = slot {
            fetch_line(core::ptr::from_ref::<AtomicU32>(slot).cast());
        }
        slot.is_some()
    }

    #[inline]
    fn found(&self, grown: GrownView<'a>) -> Option<LocatedRead<'a>> {
        let Kind::Folio(number) = self.walk.entry().kind() else { return None };
        let frame = Frame(number);
        let descriptor = grown.descriptor(frame)?;
        fetch_line(core::ptr::from_ref(descriptor).cast());
        fetch_line(core::ptr::from_ref(grown.referenced(frame)?).cast());
        Some(LocatedRead { record: self.record, end: self.end, frame, descriptor })
    }
}

#[derive(Debug)]
struct LocatedRead<'a> {
    record: &'a Record,
    end: u64,
    frame: Frame,
    descriptor: &'a Descriptor,
}

impl<'a> LocatedRead<'a> {
    /// The first look. A written folio is noted in `are_written` and not ready here.
    #[inline]
    fn begin(
        &self,
        grown: GrownView<'a>,
        wanted: &BatchedRead<'_>,
        are_written: &mut bool,
    ) -> Option<ReadyRead<'a>> {
        let index = wanted.index();
        let stamp = match self.descriptor.begin_read(wanted.id, index) {
            Ok(stamp) => stamp,
            // The one wanted page has arrived, or none has.
            Err(NotReady::Filling) => {
                let file = FoundFile { grown, record: self.record, id: wanted.id };
                file.begin_partial(self.descriptor, self.frame, index).ok()?.0
            }
            Err(NotReady::Mismatch) => return None,
            Err(NotReady::Written) => {
                *are_written = true;
                return None;
            }
        };
        if stamp.has_marker() {
            return None;
        }
        let page = page_of(grown, self.frame, stamp, index)?;
        let in_page = wanted.bytes.position as usize % PAGE_SIZE;
        let from = page.wrapping_add(in_page).cast_const();
        for at in (0..wanted.bytes.len).step_by(LINE).take(PREFETCHED_LINES) {
            fetch_line(from.wrapping_add(at));
        }
        let &Self { record, end, frame, descriptor } = self;
        Some(ReadyRead { record, end, frame, descriptor, stamp, from })
    }
}

#[derive(Debug)]
struct ReadyRead<'a> {
    record: &'a Record,
    end: u64,
    frame: Frame,
    descriptor: &'a Descriptor,
    stamp: FolioStamp,
    /// The first byte, in a page of the arena that exists; the range ends within that page.
    from: *const u8,
}

impl ReadyRead<'_> {
    #[inline]
    fn copy(&self, grown: GrownView<'_>, wanted: &mut BatchedRead<'_>) -> bool {
        // SAFETY: the source lies within a grown frame, as `begin` and `end_within_page` saw; the destination is
        // the caller's, by the promise that made `wanted`.
        unsafe { copy_out(self.from, wanted.bytes.to, wanted.bytes.len) };
        let file = FoundFile { grown, record: self.record, id: wanted.id };
        file.is_still(self.descriptor, self.stamp, self.end)
    }
}

//! The hit: bytes out of the cache with no lock, no system call and no store that others see.
//!
//! ```text
//!   1 size      where does the file end?
//!   2 walk      root -> node -> slot: a frame number, a hint
//!   3 look      its descriptor: live, this mapping, this index, up to date?
//!               being filled: how many pages from here on have arrived?
//!   4 copy      written: page by page, each between two looks at its own sequence
//!   5 size      does the file still reach so far?
//!     look      same sequence as before?           no, to either -> 2, at most 3 times
//!   6 touch     note that it was read              (2 to 6 for each folio)
//!   7 record    still this mapping's? and how long is the file now?
//! ```
//!
//! In step 5 the size comes first. A fill that met the end of a file leaves zeroes in its last page, and cuts the size
//! off before readers may look; such a page is retired before a grown size is stored. So a size that reaches far enough
//! is from before the cut, and the first look did not see that page filled; or from after the growth, and the second
//! look sees that the page is gone. In the other order a whole cut and growth would fit between the two.
//!
//! Owner and viewers run this same code; they differ in `touch`. Whatever is not plainly a hit ends the run, and the
//! caller takes the slow path for the rest. "Not there" is never read as "a hole".

use core::sync::atomic::{Ordering, fence};

use crate::arena::{CellNumber, Descriptor, FolioStamp, GrownView, NotReady, Record, View};
use crate::folio::copy::{self, copy_out};
use crate::folio::written::{copy_page, copy_pages};
use crate::lookup::{FolioFinder, find, finder};
use crate::units::{Frame, MappingId, Order, PAGE_SIZE, PageIndex};
use crate::xarray::Kind;

mod batch;
mod locate;

pub use batch::{BatchedRead, GROUP_MAX, ServedSet, read_group};
pub use locate::{locate, resident};

/// How often a reader tries again when a folio changed under its copy.
const TRIES: u32 = 3;

/// The result of a run of hits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hits {
    /// Bytes copied, from the start of the range on.
    pub bytes: usize,
    /// Why it ended there.
    pub stopped: HitStop,
    /// The first page of the first folio met that carries the readahead marker.
    pub marker: Option<PageIndex>,
}

impl Hits {
    /// The result of a run that copied no bytes.
    pub fn none(stopped: HitStop) -> Self {
        Self { bytes: 0, stopped, marker: None }
    }
}

/// Why a run of hits ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HitStop {
    /// All that was asked for was copied.
    Full,
    /// The file ends here, at this size as the owner last knew it.
    EndOfFile(u64),
    /// The next page is not in the cache, as far as can be seen without a lock.
    Absent,
    /// The next page is in the cache, on its way, and has not arrived.
    Filling,
    /// The next page is in the cache, and a writer was in it at each look. The holder of its lock can read it.
    Writing,
    /// The record is not this mapping's any more: the handle is stale.
    Stale,
}

/// A file as a reader sees it: the view, the cell of its record, and the mapping that the record has to be of.
#[derive(Clone, Copy, Debug)]
pub struct FileView<'a> {
    /// The mapped arena.
    pub view: &'a View,
    /// The cell of the file's record.
    pub cell: CellNumber,
    /// The mapping that the record has to be of; if it is another's, the handle is stale.
    pub id: MappingId,
}

impl<'a> FileView<'a> {
    #[inline(always)]
    fn found(&self) -> Option<FoundFile<'a>> {
        let grown = self.view.grown();
        Some(FoundFile { grown, record: grown.record(self.cell)?, id: self.id })
    }
}

/// Bytes of a file that are wanted, and the address that they go to.
#[derive(Clone, Copy, Debug)]
pub struct WantedBytes {
    /// The first byte, from the start of the file.
    pub position: u64,
    /// The address of the first of `len` bytes.
    pub to: *mut u8,
    /// How many bytes.
    pub len: usize,
}

impl WantedBytes {
    /// The bytes at `position` that fill `to`, which must not be used before they were read.
    #[inline(always)]
    pub fn of_slice(position: u64, to: &mut [u8]) -> Self {
        Self { position, to: to.as_mut_ptr(), len: to.len() }
    }
}

/// Copies the wanted bytes that the cache holds, up to the first page it does not hold. `touch` is told the first frame
/// of each folio read.
///
/// # Safety
/// `wanted.to` is valid for `wanted.len` bytes of writes, is not accessed by others, and does not overlap the arena.
#[inline(always)]
pub unsafe fn read_hits(
    file: FileView<'_>,
    wanted: WantedBytes,
    mut touch: impl FnMut(GrownView<'_>, Frame),
) -> Hits {
    let Some(file) = file.found() else { return Hits::none(HitStop::Stale) };
    // SAFETY: the caller's promise.
    match unsafe { read_within_page(file, wanted, &mut touch) } {
        PageHit::Read => Hits { bytes: wanted.len, stopped: HitStop::Full, marker: None },
        PageHit::Absent => Hits::none(HitStop::Absent),
        // SAFETY: the caller's promise.
        PageHit::Unclear => unsafe { read_folios(file, wanted, touch) },
    }
}

/// The first half of [`read_hits_into`]: a caller that ends a hit in a branch of its own has all of it in registers.
/// After [`PageHit::Unclear`] comes [`read_folios_into`].
#[inline(always)]
pub fn read_page_into(
    file: FileView<'_>,
    position: u64,
    to: &mut [u8],
    touch: impl FnMut(GrownView<'_>, Frame),
) -> PageHit {
    let Some(file) = file.found() else { return PageHit::Unclear };
    let wanted = WantedBytes::of_slice(position, to);
    // SAFETY: a unique slice is valid for writes of its length, and is not accessed by others.
    unsafe { read_within_page(file, wanted, touch) }
}

/// The other half of [`read_hits_into`]: a range of any length.
#[inline(always)]
pub fn read_folios_into(
    file: FileView<'_>,
    position: u64,
    to: &mut [u8],
    touch: impl FnMut(GrownView<'_>, Frame),
) -> Hits {
    let Some(file) = file.found() else { return Hits::none(HitStop::Stale) };
    let wanted = WantedBytes::of_slice(position, to);
    // SAFETY: a unique slice is valid for writes of its length, and is not accessed by others.
    unsafe { read_folios(file, wanted, touch) }
}

/// A file whose record was found: in a grown part of the arena, and valid.
#[derive(Clone, Copy)]
struct FoundFile<'a> {
    grown: GrownView<'a>,
    record: &'a Record,
    id: MappingId,
}

/// The result of the short way through the commonest hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageHit {
    /// All of the range was copied, and its folio carries no marker.
    Read,
    /// The page is not in the cache, as far as can be seen without a lock.
    Absent,
    /// The short way gives no answer: the long way gives one.
    Unclear,
}

/// The commonest hit, a range within one page of the file, in the fewest steps: the processor then begins more of the
/// next reads' waiting for memory.
///
/// # Safety
/// That of [`read_hits`].
#[inline(always)]
unsafe fn read_within_page(
    file: FoundFile<'_>,
    wanted: WantedBytes,
    mut touch: impl FnMut(GrownView<'_>, Frame),
) -> PageHit {
    let FoundFile { grown, record, id } = file;
    let WantedBytes { position, to, len } = wanted;
    let in_page = position as usize % PAGE_SIZE;
    let Some(end) = end_within_page(record, position, len) else { return PageHit::Unclear };
    let index = PageIndex::of_byte(position);
    let Kind::Folio(number) = find(&grown, record, index).kind() else {
        return if file.is_same() { PageHit::Absent } else { PageHit::Unclear };
    };
    let frame = Frame(number);
    let Some(descriptor) = grown.descriptor(frame) else { return PageHit::Unclear };
    let Ok(stamp) = descriptor.begin_read(id, index) else { return PageHit::Unclear };
    let Some(from) = grown.bytes(frame).filter(|_| !stamp.has_marker()) else {
        return PageHit::Unclear;
    };
    if stamp.order() == Order::ZERO {
        // A single page's address is known before its descriptor has arrived; in a branch of its own the copy does not
        // wait for that.
        // SAFETY: the source lies in a grown frame; the destination is the caller's.
        unsafe { copy_out(from.add(in_page), to, len) };
    } else {
        let Some(from) = page_of(grown, frame, stamp, index) else { return PageHit::Unclear };
        // SAFETY: as above, and the range is within the page.
        unsafe { copy_out(from.add(in_page), to, len) };
    }
    if !file.is_still(descriptor, stamp, end) {
        return PageHit::Unclear;
    }
    touch(grown, frame);
    PageHit::Read
}

/// As [`read_within_page`] from the look on, if the folio that `frame` heads is written.
///
/// # Safety
/// That of [`read_hits`].
#[inline(never)]
unsafe fn written_page(file: FoundFile<'_>, frame: Frame, wanted: WantedBytes) -> Option<Frame> {
    let FoundFile { grown, record, id } = file;
    let WantedBytes { position, to, len } = wanted;
    let end = end_within_page(record, position, len)?;
    let index = PageIndex::of_byte(position);
    let descriptor = grown.descriptor(frame)?;
    let stamp = descriptor.begin_read_written(id, index).ok().filter(|stamp| !stamp.has_marker())?;
    let page = frame.plus((index.0 - stamp.first.0) as u32);
    let from = grown.bytes(page)?.wrapping_add(position as usize % PAGE_SIZE);
    // SAFETY: the range is within a grown page, and the sequence is that page's; the destination is the caller's.
    let is_whole = unsafe { copy_page(grown.write_sequence(page)?, from, to, len) };
    (is_whole && file.is_still(descriptor, stamp, end)).then_some(frame)
}

#[inline(always)]
fn end_within_page(record: &Record, position: u64, len: usize) -> Option<u64> {
    let end = position.checked_add(len as u64)?;
    let within_page = position as usize % PAGE_SIZE + len <= PAGE_SIZE;
    // Acquire, partner: as at 1 of the long way, the Release by which a file's growth stores its size.
    (within_page && end <= record.size.load(Ordering::Acquire)).then_some(end)
}

/// The address of the page at `index` of a folio that covers it, by its stamp; `None` if no such frame exists.
#[inline(always)]
fn page_of(grown: GrownView<'_>, frame: Frame, stamp: FolioStamp, index: PageIndex) -> Option<*mut u8> {
    grown.bytes(frame.plus((index.0 - stamp.first.0) as u32))
}

impl FoundFile<'_> {
    /// The first look at a folio that is being filled: its stamp, and how many pages from `index` on have arrived, at
    /// least one.
    fn begin_partial(
        self,
        descriptor: &Descriptor,
        frame: Frame,
        index: PageIndex,
    ) -> Result<(FolioStamp, u32), NotReady> {
        let grown = self.grown;
        descriptor.begin_read_partial(self.id, index, |place, pages| grown.run_read(frame.plus(place), pages))
    }

    /// The looks after a copy: does this mapping's file still reach to `end`, and was it this folio all the while?
    #[inline(always)]
    fn is_still(self, descriptor: &Descriptor, stamp: FolioStamp, end: u64) -> bool {
        // The acquire fence in `end_read` stands before the second load of the record, too.
        self.reaches(end) && descriptor.end_read(stamp) && self.is_same()
    }

    /// Whether the file still reaches to `end`, after a copy and before the second look at the copied folio.
    #[inline(always)]
    fn reaches(self, end: u64) -> bool {
        // Partner: the Release fence of `before_bytes`, and the SeqCst fence of `written::enter`. A cut of the file
        // stores the size before it lets go of a page, or changes one in place.
        fence(Ordering::Acquire);
        // Acquire, partner: the Release by which a file's growth stores its size, having retired the old last page: the
        // second look sees that.
        self.record.size.load(Ordering::Acquire) >= end
    }

    /// The second look at the record. Comes after an acquire fence, partner: the Release fence between a mapping's end
    /// and the reuse of its cell.
    #[inline]
    fn is_same(self) -> bool {
        self.record.id.load(Ordering::Relaxed) == self.id.0
    }
}

/// # Safety
/// That of [`read_hits`].
#[inline(never)]
unsafe fn read_folios(
    file: FoundFile<'_>,
    wanted: WantedBytes,
    mut touch: impl FnMut(GrownView<'_>, Frame),
) -> Hits {
    let FoundFile { ref grown, record, id } = file;
    let WantedBytes { position, to, len } = wanted;
    // Acquire, partner: the Release by which a mapping publishes its record.
    if record.id.load(Ordering::Acquire) != id.0 {
        return Hits::none(HitStop::Stale);
    }
    // 1: Acquire, partner: the Release by which a file's growth stores its size. The old last page, zeroes beyond its
    // end, is retired before that.
    let size = record.size.load(Ordering::Acquire);
    let want = u64::min(len as u64, size.saturating_sub(position)) as usize;
    let mut reader = Reader { file, finder: finder(grown, record), position, want };
    let mut marker = None;
    let mut done = 0;
    let faults = copy::faults();
    let mut stopped = None;
    while done < reader.want {
        let rest = WantedBytes {
            position: position + done as u64,
            // SAFETY: `done < want <= len`, so the rest of the range is the caller's.
            to: unsafe { to.add(done) },
            len: reader.want - done,
        };
        // SAFETY: as above.
        match unsafe { reader.read_folio(rest) } {
            Ok(read) => {
                done += read.bytes;
                touch(*grown, read.frame); // 6
                marker = marker.or(read.marker);
            }
            Err(reason) => {
                stopped = Some(reason);
                break;
            }
        }
        if copy::faults() != faults {
            // Not to be trusted, and not to be gone on with.
            return Hits { bytes: len, stopped: HitStop::Full, marker };
        }
    }
    // 7: Acquire, partner: the Release fence of `before_bytes`, and the one between a mapping's end and the reuse of
    // its cell. Of a file that has become shorter since, no more is shown than it has.
    fence(Ordering::Acquire);
    let size_now = record.size.load(Ordering::Relaxed);
    if !file.is_same() {
        return Hits::none(HitStop::Stale);
    }
    let left = size_now.saturating_sub(position);
    if (done as u64) > left {
        return Hits { bytes: left as usize, stopped: HitStop::EndOfFile(size_now), marker };
    }
    let at_end = match done {
        _ if done == len => HitStop::Full,
        _ if done == want => HitStop::EndOfFile(size),
        _ => HitStop::EndOfFile(position + done as u64), // it was cut meanwhile
    };
    Hits { bytes: done, stopped: stopped.unwrap_or(at_end), marker }
}

/// As [`read_hits`], into a slice. (No slice overlaps an arena but those that a pin lends, which are read-only.)
#[inline(always)]
pub fn read_hits_into(
    file: FileView<'_>,
    position: u64,
    to: &mut [u8],
    touch: impl FnMut(GrownView<'_>, Frame),
) -> Hits {
    let wanted = WantedBytes::of_slice(position, to);
    // SAFETY: a unique slice is valid for writes of its length, and is not accessed by others.
    unsafe { read_hits(file, wanted, touch) }
}

struct FolioRead {
    bytes: usize,
    frame: Frame,
    marker: Option<PageIndex>,
}

/// A folio found by a hint, until the looks have said that it is the file's.
#[derive(Clone, Copy)]
struct FoundFolio<'a> {
    frame: Frame,
    descriptor: &'a Descriptor,
}

/// A reader's way through one tree: the leaf it is in is kept between neighbouring folios.
struct Reader<'a> {
    file: FoundFile<'a>,
    finder: FolioFinder<'a>,
    position: u64,
    /// Bytes that the file has of the run, at most as many as are asked for. It only becomes less: bytes that the file
    /// has not had all the while are not joined to those that it had.
    want: usize,
}

impl Reader<'_> {
    /// # Safety
    /// That of [`read_hits`].
    #[inline]
    unsafe fn read_folio(&mut self, wanted: WantedBytes) -> Result<FolioRead, HitStop> {
        let WantedBytes { position, to, mut len } = wanted;
        let index = PageIndex::of_byte(position);
        for _ in 0..TRIES {
            // 2
            let Kind::Folio(number) = self.finder.find(index.0).entry.kind() else {
                return Err(HitStop::Absent);
            };
            let frame = Frame(number);
            let Some(descriptor) = self.file.grown.descriptor(frame) else { return Err(HitStop::Absent) };
            let folio = FoundFolio { frame, descriptor };
            // 3
            let stamp = match descriptor.begin_read(self.file.id, index) {
                Ok(stamp) => stamp,
                Err(reason) => {
                    // SAFETY: the caller's promise.
                    match unsafe { self.read_unsteady(reason, folio, WantedBytes { len, ..wanted }) } {
                        Ok(read) => return Ok(read),
                        Err(NotReady::Filling) => return Err(HitStop::Filling),
                        Err(NotReady::Written) => return Err(HitStop::Writing),
                        Err(NotReady::Mismatch) => {
                            len = self.retry(position, len)?;
                            continue;
                        }
                    }
                }
            };
            // 4, 5. As in `read_within_page`, a single page has a branch of its own.
            let read = if stamp.order() == Order::ZERO {
                let inside = position as usize % PAGE_SIZE;
                let bytes = len.min(PAGE_SIZE - inside);
                // SAFETY: the caller's promise.
                unsafe { self.copy(folio, stamp, FolioPart { inside, bytes }, to) }
            } else {
                let inside = (position - stamp.first.first_byte()) as usize;
                let bytes = len.min(stamp.order().bytes() - inside);
                // SAFETY: the caller's promise.
                unsafe { self.copy(folio, stamp, FolioPart { inside, bytes }, to) }
            };
            if let Some(read) = read {
                return Ok(read);
            }
            len = self.retry(position, len)?;
        }
        Err(HitStop::Absent)
    }

    /// Back to 2 from 5: how many of `len` bytes at `position` the file has now.
    #[cold]
    fn retry(&mut self, position: u64, len: usize) -> Result<usize, HitStop> {
        self.finder.reset();
        let size = self.file.record.size.load(Ordering::Acquire); // partner: as at 1
        self.want = self.want.min(size.saturating_sub(self.position) as usize);
        match len.min(size.saturating_sub(position).min(len as u64) as usize) {
            0 => Err(HitStop::EndOfFile(size)),
            len => Ok(len),
        }
    }

    /// 3 to 5 of a folio that cannot be copied as it stands, for `reason`: the bytes of it that can be read all the
    /// same, or why none can; `Mismatch` if it is to be looked up again.
    ///
    /// # Safety
    /// That of [`read_hits`].
    #[inline(never)]
    unsafe fn read_unsteady(
        &self,
        reason: NotReady,
        folio: FoundFolio<'_>,
        wanted: WantedBytes,
    ) -> Result<FolioRead, NotReady> {
        match reason {
            NotReady::Mismatch => Err(reason),
            // SAFETY: the caller's promise.
            NotReady::Filling => unsafe { self.read_partial(folio, wanted) },
            // SAFETY: as above.
            NotReady::Written => unsafe { self.read_written(folio, wanted) },
        }
    }

    /// Copies pages of a written folio up to the first with a writer in it. `Written` if that is the first of all,
    /// `Mismatch` if it was not the folio's all the while.
    ///
    /// # Safety
    /// That of [`read_hits`].
    unsafe fn read_written(
        &self,
        FoundFolio { frame, descriptor }: FoundFolio<'_>,
        WantedBytes { position, to, len }: WantedBytes,
    ) -> Result<FolioRead, NotReady> {
        let stamp = descriptor.begin_read_written(self.file.id, PageIndex::of_byte(position))?;
        let inside = (position - stamp.first.first_byte()) as usize;
        let len = len.min(stamp.order().bytes() - inside);
        // SAFETY: the caller's promise.
        let copied = unsafe { copy_pages(self.file.grown, frame, inside, to, len) };
        let was_ours =
            |&bytes: &usize| self.file.reaches(position + bytes as u64) && descriptor.end_read(stamp);
        let bytes = copied.filter(was_ours).ok_or(NotReady::Mismatch)?;
        let marker = stamp.has_marker().then_some(stamp.first);
        if bytes > 0 { Ok(FolioRead { bytes, frame, marker }) } else { Err(NotReady::Written) }
    }

    /// Copies the pages that have arrived in a row of a folio that is being filled: 3 to 5 once more, and rarely.
    /// `Mismatch` if it was not the folio's all the while.
    ///
    /// # Safety
    /// That of [`read_hits`].
    #[cold]
    #[inline(never)]
    unsafe fn read_partial(
        &self,
        folio: FoundFolio<'_>,
        WantedBytes { position, to, len }: WantedBytes,
    ) -> Result<FolioRead, NotReady> {
        let index = PageIndex::of_byte(position);
        let (stamp, pages) = match self.file.begin_partial(folio.descriptor, folio.frame, index) {
            // It has been filled meanwhile, and written.
            Err(NotReady::Written) => return Err(NotReady::Mismatch),
            begun => begun?,
        };
        let inside = (position - stamp.first.first_byte()) as usize;
        let bytes = len.min(pages as usize * PAGE_SIZE - inside % PAGE_SIZE);
        // SAFETY: the caller's promise.
        let read = unsafe { self.copy(folio, stamp, FolioPart { inside, bytes }, to) };
        read.ok_or(NotReady::Mismatch)
    }

    /// Copies a part of the folio, and looks again; `None` if it was not the folio's all the while.
    ///
    /// # Safety
    /// `to` is valid for `part.bytes` bytes of writes, is not accessed by others, and does not overlap the arena.
    #[inline(always)]
    unsafe fn copy(
        &self,
        FoundFolio { frame, descriptor }: FoundFolio<'_>,
        stamp: FolioStamp,
        FolioPart { inside, bytes }: FolioPart,
        to: *mut u8,
    ) -> Option<FolioRead> {
        let grown = self.file.grown;
        // The last page copied exists; a folio of the cache has no page that does not.
        let last = frame.plus(((inside + bytes - 1) / PAGE_SIZE) as u32);
        grown.bytes(last)?;
        let from = grown.bytes(frame)?;
        // SAFETY: the source lies in grown frames, the first and the last of which were just asked for;
        // the destination is the caller's.
        unsafe { copy_out(from.add(inside), to, bytes) };
        let marker = stamp.has_marker().then_some(stamp.first);
        let end = stamp.first.first_byte() + (inside + bytes) as u64;
        let was_ours = self.file.reaches(end) && descriptor.end_read(stamp);
        was_ours.then_some(FolioRead { bytes, frame, marker })
    }
}

struct FolioPart {
    inside: usize,
    bytes: usize,
}

//! Write: the steps of one write call.
//!
//! ```text
//!   write    0 throttle   too much is dirty? wait a little, before any lock is taken               writeback.rs
//!                         and again where the call itself has come above the ceiling, with no lock; but an append,
//!                         whose bytes follow each other, keeps Write
//!            1 lock       inside the file: Write, with other writers; to make it longer: alone
//!            2 piece by piece
//!                cached         hold the folio, write page by page, in place            folio/writer.rs
//!                               mark the pages dirty that are not; and the new size, in one hold of the tree's lock
//!                pages, whole   frames; bytes and zeros into them; then into the tree: locked, dirty, the new size;
//!                               unlocked. No reader sees such a folio before its bytes are there, and nothing is read
//!                a part of a page that the file has     that page is read, alone; then it is cached
//!                pinned         its users keep it, and a copy takes its place, alone      truncate.rs
//!            3 an uncached write starts its write-back
//! ```
//!
//! A page counts as **whole** if no byte of it that the file has is left as it was: it is overwritten, or lies behind
//! the end. Where the cache has a smallest folio, that folio is overwritten as a whole or not.
//!
//! **A memory file** (`shmem/`) is written by the same steps: missing pages are zeros, so every page is whole, put
//! together out of sight. Nothing is read or throttled, and write-back is not told: all pages of its folios are dirty
//! from birth. A folio that was allocated, and has no bytes, is filled under its lock by its first writer. One that
//! others are filling is waited for holding no lock, because a user's call may take any time.
//!
//! **Waiting.** Writers inside the file go on side by side, under the page's lock for one copy at a time. A caller that
//! makes the file longer, appends, cuts or punches has the Write lock alone. It may be held while a page is read or
//! memory is waited for, and an append throttled; the end of a fill or a flush takes neither it nor Invalidate.
//!
//! **The size** is published (Release) under the tree's lock, after the bytes are in their pages and in the same hold
//! in which these become dirty. So a reader who sees it finds the bytes; and write-back, which looks at the size in the
//! hold in which it takes dirty pages, writes them to the new end, and finds no dirty page behind it.
//!
//! **Left folios.** A clean folio may leave the index between the copy into it and its mark: the file was changed by
//! others, or an uncached reader has passed. Then the bytes just copied would never be written. [`MarkOutcome::Left`]
//! says so, under the lock under which folios leave, and the piece is written again. A page that was dirty when its
//! bytes were in is dirty still, or its flush has read them (`arena/dirty.rs`), and such a folio leaves only by a
//! truncation, which the Write lock holds off.
//!
//! Invariants:
//!  1. A page is dirty, or under a write-back that reads its new bytes, before the write that changed it returns.
//!  2. A folio that is inserted here is complete before it is unlocked, and zeros behind the bytes.
//!  3. No page that is overwritten as a whole is read from the device, and no other page but those at the two edges.
//!  4. No lock but Write is held while the device or memory is waited for.
//!  5. Only a thread that holds Write exclusively makes the file longer; but if others have cut the file under a
//!     write, it restores the size that its bytes need.
//!
//! Not an invariant: that a write of several pages is seen whole, or in order, or if it fails, that only its
//! beginning was written.
//!
//! Cost of an overwrite of a cached, dirty page: Write shared, a way down, a hold, the page's lock, the copy, two
//! fences, the bit. No lock of the tree, no clock, nothing allocated.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::arena::{FillEnd, Gap, HOLDS_MAX, HoldRefused, PutOutcome, ReadableState, WriteRefused};
use crate::backend::{DeferredWakes, FillRun, PageKey, pause};
use crate::error::{Error, Repr};
use crate::folio::{HeldFolio, copy};
use crate::mapping::{
    AskedFor, FolioLifetime, FolioShape, InsertPurpose, Mapping, MappingGuard, MarkOutcome, NewFolio,
};
use crate::readahead::Window;
use crate::stats::Count;
use crate::sync::LockWait;
use crate::units::{FILE_BYTES_MAX, Millis, Order, PAGE_SIZE, PageIndex, PoolNumber, pages_of_bytes};
use crate::xarray::RangeStop as TreeStop;

use super::fill::{folios_in, pages_of};
use super::frame_supply::{FillUrgency, FrameRequest, NoFrames, SuppliedFrames};
use super::shared::Filemap;
use super::spill_in::{SpillIn, TruncateExclusion};
use super::stream_positions::StreamPositions;
use super::truncate::{OnPinned, Truncation};
use super::uncached::Reader;
use super::wait_policy::WaitPolicy;

const INSERT_PAGES_MAX: u64 = Order::MAX.pages() as u64;
const TRIES: u32 = 1000;
/// A call that has made so many bytes dirty, some of them, looks whether it is too much by now.
const THROTTLED_BYTES: usize = 1 << 20;
const PIN_POLL: std::time::Duration = std::time::Duration::from_millis(1);

#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteContext<'a> {
    /// The file that is written.
    mapping: &'a Arc<Mapping>,
    /// Reads pages that are overwritten in part; `None` for a memory file.
    reader: Option<Reader<'a>>,
    pool: PoolNumber,
    touched: &'a StreamPositions,
    on_pinned: OnPinned,
}

impl<'a> WriteContext<'a> {
    pub fn new(
        mapping: &'a Arc<Mapping>,
        reader: Reader<'a>,
        touched: &'a StreamPositions,
        on_pinned: OnPinned,
    ) -> Self {
        Self { mapping, reader: Some(reader), pool: reader.pool(), touched, on_pinned }
    }
    pub fn of_memory(
        mapping: &'a Arc<Mapping>,
        pool: PoolNumber,
        touched: &'a StreamPositions,
        on_pinned: OnPinned,
    ) -> Self {
        Self { mapping, reader: None, pool, touched, on_pinned }
    }

    pub fn mapping(self) -> &'a Arc<Mapping> {
        self.mapping
    }

    pub fn pool(self) -> PoolNumber {
        self.pool
    }

    fn is_uncached(self) -> bool {
        self.reader.is_some_and(|reader| reader.behind().is_some())
    }
    fn fate(self) -> FolioLifetime {
        if self.is_uncached() { FolioLifetime::DropsBehind } else { FolioLifetime::Stays }
    }
    fn wants(self) -> CachePolicy {
        if self.is_uncached() { CachePolicy::Bytes } else { CachePolicy::Folio }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CachePolicy {
    Bytes,
    /// The folio, which an uncached reader or writer made: it is adopted.
    Folio,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteLockMode {
    Shared,
    Alone,
}

/// One write call, or append, on its way through the cache.
#[derive(Clone, Copy, Debug)]
struct WriteCall<'c> {
    filemap: &'c Arc<Filemap>,
    context: WriteContext<'c>,
    lock: WriteLockMode,
    on_dirty: OnDirty,
}

/// The next step of a call that finds too much dirty on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OnDirty {
    /// The call is throttled again, with no lock.
    Release,
    /// The call is throttled under its lock, because its bytes follow each other in the file.
    Keep,
    /// The call goes on: all that it writes is dirty for good.
    GoOn,
}

#[derive(Debug)]
enum WriteStop {
    Grows,
    Pinned(u64),
    /// The folio there is being filled, of a memory file: no lock is held while that is waited for.
    Filling(PageIndex),
    /// Too much is dirty by now: the rest comes after a wait, for which no lock is held.
    Dirty,
    Failed(Error),
}

impl WriteStop {
    fn into_error(self, position: u64) -> Error {
        match self {
            WriteStop::Failed(error) => error,
            WriteStop::Pinned(position) => Repr::Pinned { position }.into(),
            WriteStop::Filling(_) => {
                let why = "another call is filling that page from its source; write the rest again";
                Repr::WriteAgain { position, why }.into()
            }
            WriteStop::Dirty => {
                let why = "too many other bytes wait to be written; write the rest again";
                Repr::WriteAgain { position, why }.into()
            }
            WriteStop::Grows => {
                let why = "another program made the file shorter meanwhile, so the rest has no place; write it again";
                Repr::WriteAgain { position, why }.into()
            }
        }
    }
}

impl From<Error> for WriteStop {
    fn from(error: Error) -> Self {
        WriteStop::Failed(error)
    }
}

impl From<Repr> for WriteStop {
    fn from(error: Repr) -> Self {
        WriteStop::Failed(error.into())
    }
}

#[derive(Clone, Copy, Debug)]
struct WriteProgress<'b> {
    position: u64,
    bytes: &'b [u8],
}

impl<'b> WriteProgress<'b> {
    fn end(self) -> u64 {
        self.position + self.bytes.len() as u64
    }
    fn behind(self, done: usize) -> Self {
        Self { position: self.position + done as u64, bytes: &self.bytes[done..] }
    }
    fn pages(self, bytes: usize) -> Range<PageIndex> {
        PageIndex::of_byte(self.position)..PageIndex(pages_of_bytes(self.position + bytes as u64))
    }
}

/// The part of a folio that was just written, and is to be marked.
#[derive(Clone, Debug)]
struct WrittenPart {
    pages: Range<PageIndex>,
    /// The position in the file, in bytes, behind the last of it.
    end: u64,
    wants: CachePolicy,
}

impl Filemap {
    /// The commonest write: within a page that is cached and dirty. `false`: it is not that, or was not any more when
    /// it was done. It needs no throttle, and waits only for another writer's copy of a page.
    #[inline]
    pub(crate) fn overwrite(
        &self,
        mapping: &Arc<Mapping>,
        touched: &StreamPositions,
        position: u64,
        bytes: &[u8],
    ) -> bool {
        let (index, at) = (PageIndex::of_byte(position), position as usize % PAGE_SIZE);
        if bytes.len() > PAGE_SIZE - at {
            return false;
        }
        let Some(_with_others) = mapping.try_write_shared() else { return false };
        let end = position + bytes.len() as u64;
        if end > mapping.size() {
            return false;
        }
        let Ok(held) = mapping.try_hold(index) else { return false };
        if held.drops_behind() || !mapping.seems_dirty(&held, index) {
            return false;
        }
        let Ok(writer) = held.writer() else { return false };
        match writer.page((index.0 - held.first().0) as u32) {
            Ok(mut page) => page.copy_in(at, bytes),
            Err(_) => return false,
        }
        let marked = mapping.is_page_dirty(&held, index) || {
            let written = WrittenPart { pages: index..index.plus(1), end, wants: CachePolicy::Bytes };
            self.mark_slowly(mapping, &held, written)
        };
        touched.note(self.arena.view().grown(), held.frame(), position..end);
        marked
    }

    /// Returns how many bytes were written, at least one if there is no error.
    pub(crate) fn write(
        self: &Arc<Self>,
        context: WriteContext<'_>,
        position: u64,
        bytes: &[u8],
    ) -> Result<usize, Error> {
        let mapping = context.mapping;
        let piece = WriteProgress { position, bytes: within_device(mapping, position, bytes)? };
        // 0
        self.throttle(mapping, piece)?;
        let mut done = 0;
        let lock = if piece.end() <= mapping.size() { WriteLockMode::Shared } else { WriteLockMode::Alone };
        let on_dirty = if mapping.is_memory() { OnDirty::GoOn } else { OnDirty::Release };
        let call = WriteCall { filemap: self, context, lock, on_dirty };
        let outcome = call.write_shared_or_alone(piece, &mut done);
        call.end_write(done);
        if done > 0 { Ok(done) } else { outcome.map(|()| 0) }
    }

    /// Writes `bytes` where the file ends. Returns where that was, how many, and why not all; an error if none was.
    pub(crate) fn append(
        self: &Arc<Self>,
        context: WriteContext<'_>,
        bytes: &[u8],
    ) -> Result<(u64, usize, Result<(), Error>), Error> {
        let mapping = context.mapping;
        self.throttle(mapping, WriteProgress { position: mapping.size(), bytes })?;
        let (mut done, mut begun) = (0, None);
        loop {
            let wakes = DeferredWakes::new();
            let alone = mapping.write_alone();
            // While pins are waited for, others may append.
            let position = mapping.size();
            if bytes.len() as u64 > FILE_BYTES_MAX - position {
                return Err(too_large(position));
            }
            let piece = WriteProgress { position, bytes: within_device(mapping, position, bytes)? };
            let on_dirty = if mapping.is_memory() { OnDirty::GoOn } else { OnDirty::Keep };
            let call = WriteCall { filemap: self, context, lock: WriteLockMode::Alone, on_dirty };
            let outcome = call.write_pieces(piece, &mut done);
            drop(alone);
            drop(wakes);
            call.end_write(done);
            let why = match outcome {
                Ok(()) => return Ok((position, done, Ok(()))),
                // The rest would not follow the written bytes: others may append as soon as the lock is released.
                Err(stopped) if done > 0 => return Ok((position, done, Err(stopped.into_error(position)))),
                Err(WriteStop::Pinned(at)) => call.wait_unpinned(at, &mut begun),
                Err(WriteStop::Filling(index)) => {
                    call.wait_filled(index);
                    Ok(())
                }
                Err(WriteStop::Grows | WriteStop::Dirty) => Ok(()),
                Err(WriteStop::Failed(error)) => Err(error),
            };
            why?;
        }
    }

    #[inline]
    fn throttle(&self, mapping: &Arc<Mapping>, piece: WriteProgress<'_>) -> Result<(), Error> {
        let pages = piece.pages(piece.bytes.len());
        let failed = |source| {
            let WriteProgress { position, bytes } = piece;
            Repr::Write { position, len: bytes.len(), source }.into()
        };
        // All of it is dirty, and nothing is written back.
        if mapping.is_memory() {
            return Ok(());
        }
        self.supply.writeback.throttle(mapping, pages.end.0 - pages.start.0).map_err(failed)
    }

    /// As [`WriteCall::mark`], under the tree's lock. (`end` lies behind the size only for a caller that is alone, or
    /// if others have cut the file since the write began.)
    #[inline(never)]
    fn mark_slowly(
        &self,
        mapping: &Arc<Mapping>,
        held: &HeldFolio<'_>,
        WrittenPart { pages, end, wants }: WrittenPart,
    ) -> bool {
        let now = self.supply.writeback.now();
        let mut tree = mapping.lock();
        let marked = tree.mark_dirty(held, pages, now);
        if marked != MarkOutcome::Left {
            tree.grow_size(end);
        }
        if wants == CachePolicy::Folio {
            tree.adopt(held);
        }
        drop(tree);
        if matches!(marked, MarkOutcome::Done { newly: 1.. }) && !mapping.is_memory() {
            self.supply.writeback.note_dirty(mapping);
        }
        marked != MarkOutcome::Left
    }

    pub(super) fn no_memory(&self, position: u64) -> Error {
        Repr::NoMemory { position, pages: self.pages_max() }.into()
    }
}

impl WriteCall<'_> {
    /// 1: inside the file with other writers, and alone from where it has to be.
    fn write_shared_or_alone(mut self, piece: WriteProgress<'_>, done: &mut usize) -> Result<(), Error> {
        let mut begun = None;
        loop {
            // A wait reaps, and a waker runs its owner's code, which may take locks held here.
            let wakes = DeferredWakes::new();
            let outcome = match self.lock {
                WriteLockMode::Shared => {
                    let _with_others = self.context.mapping.write_shared();
                    self.write_pieces(piece, done)
                }
                WriteLockMode::Alone => {
                    let _alone = self.context.mapping.write_alone();
                    self.write_pieces(piece, done)
                }
            };
            drop(wakes);
            match outcome {
                Ok(()) => return Ok(()),
                Err(WriteStop::Grows) => self.lock = WriteLockMode::Alone,
                Err(WriteStop::Pinned(_)) if self.context.on_pinned == OnPinned::Detach => {
                    self.lock = WriteLockMode::Alone
                }
                Err(WriteStop::Pinned(at)) => self.wait_unpinned(at, &mut begun)?,
                Err(WriteStop::Filling(index)) => self.wait_filled(index),
                Err(WriteStop::Dirty) => self.filemap.throttle(self.context.mapping, piece.behind(*done))?,
                Err(WriteStop::Failed(error)) => return Err(error),
            }
        }
    }

    /// 2: writes the rest after `done` bytes, and advances that. It stops where it has come above the ceiling of dirty
    /// pages: one call could else have all of memory, for a device that takes nothing.
    fn write_pieces(self, piece: WriteProgress<'_>, done: &mut usize) -> Result<(), WriteStop> {
        let size = self.context.mapping.size();
        match self.lock {
            WriteLockMode::Shared if size < piece.end() => return Err(WriteStop::Grows),
            // Bytes between the old end and the piece become the file's.
            WriteLockMode::Alone if size < piece.behind(*done).position => {
                Truncation::of(self.filemap, self.context.mapping).zero_behind_end()?
            }
            _ => {}
        }
        let (mut tries, mut throttled_at) = (0, *done);
        while *done < piece.bytes.len() {
            if *done - throttled_at >= THROTTLED_BYTES {
                throttled_at = *done;
                self.throttle_again(piece.behind(*done))?;
            }
            let rest = piece.behind(*done);
            let written = match self.context.mapping.try_hold(PageIndex::of_byte(rest.position)) {
                Ok(held) => self.write_held(&held, rest)?,
                Err(HoldRefused::TooMany) => return Err(Repr::TooManyPins { holds: HOLDS_MAX }.into()),
                Err(_) => self.write_absent(rest)?,
            };
            *done += written;
            tries = if written > 0 { 0 } else { tries + 1 };
            if tries == TRIES {
                return Err(
                    Repr::NoMemory { position: rest.position, pages: self.filemap.pages_max() }.into()
                );
            }
        }
        Ok(())
    }

    /// The call may have come above the ceiling of dirty pages, and `rest` is to be written.
    fn throttle_again(self, rest: WriteProgress<'_>) -> Result<(), WriteStop> {
        let is_above = || self.filemap.supply.writeback.is_above_ceiling();
        match self.on_dirty {
            OnDirty::Release if is_above() => Err(WriteStop::Dirty),
            OnDirty::Keep if is_above() => {
                self.filemap.throttle(self.context.mapping, rest).map_err(WriteStop::from)
            }
            OnDirty::Release | OnDirty::Keep | OnDirty::GoOn => Ok(()),
        }
    }

    fn end_write(self, done: usize) {
        if done > 0 && self.context.is_uncached() {
            // Soon, and not at once, so that many small ones go to the device together.
            self.filemap.supply.writeback.request_writeback(self.context.mapping);
        }
    }

    // ---- cached ---------------------------------------------------------------------------------

    /// Writes the part of `piece` that a held folio covers; 0: it has left, or come meanwhile.
    #[inline]
    fn write_held(self, held: &HeldFolio<'_>, piece: WriteProgress<'_>) -> Result<usize, WriteStop> {
        let inside = (piece.position - held.first().first_byte()) as usize;
        let len = piece.bytes.len().min(held.order().bytes() - inside);
        let refused = match held.writer() {
            Ok(writer) => {
                let wrote = writer.write(piece.position, &piece.bytes[..len]);
                if wrote.bytes > 0 {
                    let marked = self.mark(held, piece, wrote.bytes);
                    self.touch_written(held, piece);
                    return Ok(if marked { wrote.bytes } else { 0 });
                }
                wrote.refused
            }
            Err(refused) => Some(refused),
        };
        match refused {
            Some(WriteRefused::Filling) if held.is_readable() == ReadableState::Zeros => {
                Ok(self.fill_allocated(held, piece))
            }
            Some(WriteRefused::Filling) if self.context.mapping.is_memory() => {
                Err(WriteStop::Filling(held.first()))
            }
            Some(WriteRefused::Filling) => {
                self.wait_filled(held.first());
                Ok(0)
            }
            Some(WriteRefused::Pinned) => self.write_pinned(held, piece),
            Some(WriteRefused::Left) | None => Ok(0),
        }
    }

    fn wait_filled(self, index: PageIndex) {
        if let Ok(held) = self.context.mapping.try_hold(index) {
            self.filemap
                .wait_queue
                .wait(&*self.context.mapping.backend(), &mut || held.is_readable() != ReadableState::NotYet);
        }
    }

    /// Makes the pages of the first `bytes` bytes of `piece`, which were just written, dirty, and the file as long.
    /// `false`: the folio has left the index, and they are to be written again.
    #[inline]
    fn mark(self, held: &HeldFolio<'_>, piece: WriteProgress<'_>, bytes: usize) -> bool {
        let Range { start, end } = piece.pages(bytes);
        let grows =
            self.lock == WriteLockMode::Alone && piece.position + bytes as u64 > self.context.mapping.size();
        let wants = if held.drops_behind() { self.context.wants() } else { CachePolicy::Bytes };
        if !grows && wants == CachePolicy::Bytes && self.context.mapping.is_dirty(held, start..end) {
            return true;
        }
        let written = WrittenPart { pages: start..end, end: piece.position + bytes as u64, wants };
        self.filemap.mark_slowly(self.context.mapping, held, written)
    }

    /// A write is a use of the folio; an uncached one is not.
    #[inline]
    fn touch_written(self, held: &HeldFolio<'_>, piece: WriteProgress<'_>) {
        if !self.context.is_uncached() {
            let grown = self.filemap.arena.view().grown();
            self.context.touched.note(grown, held.frame(), piece.position..piece.end());
        }
    }

    // ---- allocated ------------------------------------------------------------------------------

    /// The first write to a folio of a memory file that has memory and no bytes: those of `piece`, and zeros around
    /// them. As [`WriteCall::write_held`]. Optimistic readers do not look at it before it is up to date, and threads
    /// that hold it wait until it is unlocked.
    #[inline(never)]
    fn fill_allocated(self, held: &HeldFolio<'_>, piece: WriteProgress<'_>) -> usize {
        if !self.filemap.arena.view().own(held.frame()).try_lock_allocated() {
            return 0; // another thread does it
        }
        let run = FillRun { index: held.first(), frame: held.frame(), pages: held.order().pages() };
        self.put_bytes(run, piece);
        let end = run.index.plus(u64::from(run.pages)).first_byte().min(piece.end());
        // It was dirty before. The write lock keeps it in the index.
        self.context.mapping.lock().grow_size(end);
        self.unlock_new(run);
        (end - piece.position) as usize
    }

    // ---- not cached -----------------------------------------------------------------------------

    /// Writes the whole pages that `piece` begins with; else reads its first page. As [`WriteCall::write_held`].
    #[inline(never)]
    fn write_absent(self, piece: WriteProgress<'_>) -> Result<usize, WriteStop> {
        let index = PageIndex::of_byte(piece.position);
        if self.context.mapping.is_memory()
            && SpillIn::of(self.filemap, self.context.mapping).is_spilled(index)
        {
            // The write lock keeps the file from being cut. Overwritten pages are restored, too: rare.
            let end = PageIndex(pages_of_bytes(piece.end()));
            SpillIn::of(self.filemap, self.context.mapping).bring(index..end, TruncateExclusion::ByCaller)?;
            return Ok(0);
        }
        let pages = self.whole_pages(piece);
        if !pages.is_empty() {
            return self.write_new(piece, pages);
        }
        // The first byte of the folio to be is one that the file has; the piece's may not be.
        let first =
            PageIndex::of_byte(piece.position).align_down(self.filemap.supply.folio_orders.min).first_byte();
        let Some(reader) = self.context.reader else { return Ok(0) }; // a memory file's pages are all whole
        match self.filemap.hold_page(self.context.mapping, reader, first)? {
            Some(held) => self.write_held(&held, piece),
            // Others have made the file shorter, past the cache.
            None => Err(WriteStop::Grows),
        }
    }

    /// The pages from the beginning of `piece` on, in whole folios of the smallest order, of which the write leaves
    /// no byte; none if it does not begin with such. A few at a time.
    fn whole_pages(self, piece: WriteProgress<'_>) -> Range<PageIndex> {
        let unit = self.filemap.supply.folio_orders.min;
        // Missing pages of a memory file are zeros, as behind the end.
        let size = if self.context.mapping.is_memory() { 0 } else { self.context.mapping.size() };
        let first = PageIndex::of_byte(piece.position).align_down(unit);
        let is_whole = first.first_byte() == piece.position || first.first_byte() >= size;
        let end = match piece.end() {
            end if end >= size => PageIndex(pages_of_bytes(end)).align_up(unit),
            end => PageIndex::of_byte(end).align_down(unit),
        };
        let max = first.plus(INSERT_PAGES_MAX.max(u64::from(unit.pages())));
        if is_whole { first..end.min(max).max(first) } else { first..first }
    }

    /// Makes folios of bytes of `piece`, and zeros around them, from page `pages.start` on: as many of `pages` as are
    /// not there and memory allows.
    fn write_new(self, piece: WriteProgress<'_>, pages: Range<PageIndex>) -> Result<usize, WriteStop> {
        let pool = self.context.pool;
        // 1 Missing folios.
        let Some(pages) = self.absent_from(pages) else { return Ok(0) };
        let count = (pages.end.0 - pages.start.0) as u32;
        let order = Order::fitting(count).min(self.context.mapping.backing().folio_order_max());
        let window = Window { order, ..Window::exact(pages.start, count) };
        // 2 A charge and frames, as a read would have them.
        let (urgency, reservation, locks) = (FillUrgency::Asked, None, LockWait::Wait);
        let request =
            FrameRequest { mapping: self.context.mapping, pool, window, urgency, reservation, locks };
        let SuppliedFrames { charge, runs } =
            match self.filemap.supply.take(&request, vec![Gap { first: pages.start, pages: count }]) {
                Ok(supplied) => supplied,
                Err(NoFrames::Present) => return Ok(0), // others have brought the first page to its place
                Err(NoFrames::PoolFull) => return Err(self.filemap.pool_full(pool, piece.position).into()),
                Err(_) => return Err(self.filemap.no_memory(piece.position).into()),
            };
        let Some(list_entries) =
            self.filemap.supply.reserve_list_entries(self.context.mapping, &runs, WaitPolicy::Wait)
        else {
            self.filemap.supply.free_runs(&runs);
            let again = self.filemap.supply.make_nodes(pool);
            return if again { Ok(0) } else { Err(self.filemap.no_memory(piece.position).into()) };
        };
        // 3 The bytes, before a reader can see them.
        runs.iter().for_each(|&run| self.put_bytes(run, piece));
        // 4 Into the tree and the rings, and unlocked, while invalidations are held off.
        let held_off = self.context.mapping.hold_off_invalidation();
        let shape = FolioShape {
            orders: self.filemap.supply.orders_for(window),
            marker: None,
            purpose: InsertPurpose::Write,
            wanted: AskedFor::All,
            fate: self.context.fate(),
        };
        let added = self.context.mapping.add_window(&runs, shape, LockWait::Wait, &mut |_, _| {});
        let added = added.expect("a lock that is waited for is had");
        self.filemap.supply.free_runs(&added.left);
        let end = self.mark_new(piece, &added.inserted);
        self.filemap.supply.list_new(
            self.context.mapping,
            &added.inserted,
            window,
            shape,
            list_entries.with_charge(charge),
        );
        self.filemap.counters.add(Count::Inserted, pages_of(&added.inserted));
        self.filemap.supply.reclaim.count_inserted(pool, pages_of(&added.inserted), 0);
        added.inserted.iter().for_each(|&run| self.unlock_new(run));
        drop(held_off);
        if added.inserted.is_empty()
            && added.stop == TreeStop::NoNode
            && !self.filemap.supply.make_nodes(pool)
        {
            return Err(self.filemap.no_memory(piece.position).into());
        }
        let end = end.first_byte().min(piece.end());
        Ok(end.saturating_sub(piece.position) as usize)
    }

    fn absent_from(self, pages: Range<PageIndex>) -> Option<Range<PageIndex>> {
        if pages.end.0 - pages.start.0 == u64::from(self.filemap.supply.folio_orders.min.pages()) {
            return Some(pages); // if another thread was first, the insertion finds out
        }
        let (first, count) = self.context.mapping.lock().next_gap(pages.start, pages.end)?;
        (first == pages.start).then(|| first..first.plus(count))
    }

    fn put_bytes(self, run: FillRun, piece: WriteProgress<'_>) {
        let (start, len) = (run.index.first_byte(), run.pages as usize * PAGE_SIZE);
        let from = piece.position.clamp(start, start + len as u64);
        let end = piece.end().clamp(from, start + len as u64);
        let (before, bytes) = ((from - start) as usize, (end - from) as usize);
        let skipped = (from - piece.position.min(from)) as usize;
        let source = &piece.bytes[skipped..][..bytes];
        let to = self.filemap.arena.view().bytes(run.frame).expect("a run of ours exists");
        // SAFETY: the run's frames are this thread's alone, by the arena, and `before + bytes <= len` of them. The
        // source is a slice: if it is of an arena, it is pinned, and these frames are in no folio.
        unsafe {
            copy::zero(to, before);
            copy::copy_in(source.as_ptr(), to.add(before), bytes);
            copy::zero(to.add(before + bytes), len - before - bytes);
        }
    }

    /// Marks the pages of `runs`, which were just inserted, that hold bytes of `piece`, and makes the file as long:
    /// others may have cut it since the write began. Returns up to which page they are in the tree without a gap.
    fn mark_new(self, piece: WriteProgress<'_>, runs: &[FillRun]) -> PageIndex {
        let (now, changed) = (self.filemap.supply.writeback.now(), piece.pages(piece.bytes.len()));
        let begin = changed.start.align_down(self.filemap.supply.folio_orders.min);
        let mut end = begin;
        let mut tree = self.context.mapping.lock();
        for &run in runs {
            for (page, order) in folios_in(self.filemap.arena.view(), run) {
                let first = run.index.plus(u64::from(page));
                let folio = NewFolio { index: first, frame: run.frame.plus(page), order };
                let behind = first.plus(u64::from(order.pages()));
                let pages = match self.context.mapping.is_memory() {
                    true => first..behind, // the zeros beside them are nowhere else, either
                    false => first.max(changed.start)..behind.min(changed.end),
                };
                // One that goes when its reader has passed may have gone again.
                let is_in = self.mark_folio(&mut tree, folio, pages, now);
                end = if is_in && first == end { behind } else { end };
            }
        }
        if end > begin {
            tree.grow_size(end.first_byte().min(piece.end()));
        }
        drop(tree);
        if !self.context.mapping.is_memory() {
            self.filemap.supply.writeback.note_dirty(self.context.mapping);
        }
        end
    }

    fn mark_folio(
        self,
        tree: &mut MappingGuard<'_>,
        folio: NewFolio,
        pages: Range<PageIndex>,
        now: Millis,
    ) -> bool {
        let held = HeldFolio::take(&self.filemap.arena, folio.frame, self.context.mapping.id(), folio.index);
        held.is_ok_and(|held| pages.is_empty() || tree.mark_dirty(&held, pages, now) != MarkOutcome::Left)
    }

    fn unlock_new(self, run: FillRun) {
        let view = self.filemap.arena.view();
        for (page, _) in folios_in(view, run).collect::<Vec<_>>() {
            let frame = run.frame.plus(page);
            if let FillEnd::Detached(PutOutcome::Last(order)) = view.own(frame).complete() {
                self.filemap.arena.free(frame, order);
            }
        }
        self.filemap
            .wait_queue
            .wake_filled(PageKey { mapping: self.context.mapping.id(), page: run.index }, run.pages);
    }

    // ---- pinned ---------------------------------------------------------------------------------

    /// Detaches the part of the folio that stays, if the caller is alone and wants that.
    #[inline(never)]
    fn write_pinned(self, held: &HeldFolio<'_>, piece: WriteProgress<'_>) -> Result<usize, WriteStop> {
        if self.lock == WriteLockMode::Shared || self.context.on_pinned != OnPinned::Detach {
            return Err(WriteStop::Pinned(piece.position));
        }
        Truncation::of(self.filemap, self.context.mapping).detach_copy(held)?;
        Ok(0)
    }

    /// Waits until the folio at `position` is not pinned; `begun` is the first wait of a call.
    fn wait_unpinned(self, position: u64, begun: &mut Option<Instant>) -> Result<(), Error> {
        let OnPinned::Wait(wait_policy) = self.context.on_pinned else { return Ok(()) };
        let begun = *begun.get_or_insert_with(Instant::now);
        while let Ok(held) = self.context.mapping.try_hold(PageIndex::of_byte(position)) {
            if !self.filemap.arena.view().own(held.frame()).is_pinned() {
                return Ok(());
            }
            drop(held);
            if begun.elapsed() >= wait_policy {
                return Err(Repr::Pinned { position }.into());
            }
            pause(PIN_POLL);
        }
        Ok(())
    }
}

fn within_device<'b>(mapping: &Mapping, position: u64, bytes: &'b [u8]) -> Result<&'b [u8], Error> {
    let (size, end) = (mapping.size(), position + bytes.len() as u64);
    if end <= size || mapping.writeback().can_grow() {
        return Ok(bytes);
    }
    match size.saturating_sub(position) {
        0 => Err(Repr::DeviceEnds { position, size }.into()),
        left => Ok(&bytes[..left as usize]),
    }
}

fn too_large(position: u64) -> Error {
    let text =
        format!("cannot append at byte {position}: the file would be larger than a file can be; write less");
    Repr::InvalidInput(text).into()
}

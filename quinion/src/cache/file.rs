//! File: an open file, how it is read, and, in `write.rs` beside, how it is written.
//!
//! A [`File`] is one stream through one file: it has a position for [`Read`](std::io::Read) and
//! [`Seek`](std::io::Seek), and readahead state of its own. Each thread that reads its own way should have a clone.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use crate::arena::{CellNumber, GrownView, OwnedView};
use crate::blocking_threads::BlockingThreads;
use crate::error::{Repr, Result};
use crate::filemap::{
    DropBehindState, FileView, HitStop, Hits, PageHit, PendingRead, PinRequest, PolledRead, Prefetch,
    ReadCall, ReadProgress, Reader, Span, StreamPositions, UncachedRead, WaitPolicy, read_folios_into,
    read_hits_into, read_page_into,
};
use crate::folio::Pinned;
use crate::mapping::TreeCounts;
use crate::readahead::{Hint, Readahead, ReadaheadReport};
use crate::stats::Counters;
use crate::sync::{Rank, RankedMutex};
use crate::sys::fork::ForkGuard;
use crate::units::{FILE_BYTES_MAX, MappingId, Order, Orders};

use super::Handle;
use super::future::{PinFuture, ReadFuture};
use super::kernel_cache::use_kernel_cache_if_warm;

/// How a read behaves; the default waits for the device, for memory and for locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Never waits for the device, for memory, or for a lock of a mapping, of the policy or of readahead. Takes free
    /// pages, lets the cache grow within its bound (2 MiB at a time, half a millisecond of computing each), evicts
    /// clean pages and starts reads, so that a later call finds the bytes. (The locks of the free pages, of the nodes
    /// that only remember, of the submission queue, and of the policy and its rings it does take: they are held for a
    /// thousand scans at most, some hundred microseconds, and never by a thread that waits.)
    pub nowait: bool,
    /// Takes cached bytes only and starts nothing, readahead included.
    pub cached_only: bool,
    /// Leaves no page in the cache that it brought there: for data that is read once, so that it takes no room from
    /// data that is read again. The read uses cached pages, and readahead.
    ///
    /// Pages that it fetched leave the cache when the handle's reads have passed them: pages that lie wholly in the
    /// bytes read are gone when the call returns; of larger folios those that were read to their end. Pages that were
    /// read ahead and not used leave when the reads continue elsewhere, pause for a second or two, or when the handle
    /// is closed. Pages that others read without this option stay, and so do pages that were cached before.
    ///
    /// Refused by backends that do not support it ([`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)).
    /// A call with `nowait` leaves its pages for a later call to drop, if the lock for it is busy.
    pub uncached: bool,
}

impl ReadOptions {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`ReadOptions::nowait`].
    #[must_use]
    pub fn nowait(mut self, nowait: bool) -> Self {
        self.nowait = nowait;
        self
    }
    /// Sets [`ReadOptions::cached_only`].
    #[must_use]
    pub fn cached_only(mut self, cached_only: bool) -> Self {
        self.cached_only = cached_only;
        self
    }

    /// Sets [`ReadOptions::uncached`].
    #[must_use]
    pub fn uncached(mut self, uncached: bool) -> Self {
        self.uncached = uncached;
        self
    }

    pub(super) fn wait_policy(self) -> WaitPolicy {
        match (self.cached_only, self.nowait) {
            (true, _) => WaitPolicy::CacheOnly,
            (false, true) => WaitPolicy::Now,
            (false, false) => WaitPolicy::Wait,
        }
    }
}

/// A read call, but for the buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PositionedRead {
    /// The first byte of the file that it wants.
    pub position: u64,
    pub options: ReadOptions,
}

/// An open file of a [`Cache`](crate::Cache). Reading takes `&self` and may be done by many threads at once.
///
/// It lends no descriptor (`AsFd`): reads and writes by one would bypass the cache. In place of a descriptor there are
/// [`File::metadata`], [`File::lock`], [`File::sync_all`] and [`File::path`].
pub struct File {
    // Fields of the hit path, side by side.
    pub(super) view: OwnedView,
    /// Where a plain hit looks for the mapping's record: in its cell; or nowhere, if [`FOLLOWED`], [`UNCACHED`] or
    /// [`WATCHED`]. Then every read takes the cold way, which finds the record by the mapping, and other handles'
    /// hits have nothing to check.
    lookup_cell: AtomicU32,
    pub(super) id: MappingId,
    pub(super) process: ForkGuard,
    pub(super) counters: Arc<Counters>,
    pub(super) touched: StreamPositions,
    // Before the handle: pages it left behind go while the file is open.
    left_behind: DropBehindLeftovers,
    pub(super) handle: Arc<Handle>,
    pub(super) readahead: RankedMutex<Readahead>,
    /// Where [`Read`](std::io::Read), [`Write`](std::io::Write) and [`Seek`](std::io::Seek) go on, in bytes.
    pub(super) position: AtomicU64,
}

/// In place of a cell: each read takes the cold way, since the cache samples reads.
const FOLLOWED: CellNumber = CellNumber::nowhere(0);
/// In place of a cell: the handle's reads are uncached ones.
const UNCACHED: CellNumber = CellNumber::nowhere(1);
/// In place of a cell: the handle asks before each read whether other processes have changed the file.
const WATCHED: CellNumber = CellNumber::nowhere(2);

#[derive(Debug, Default)]
struct DropBehindLeftovers(OnceLock<Arc<DropBehindState>>);

impl DropBehindLeftovers {
    fn end(&self) {
        if let Some(behind) = self.0.get() {
            behind.end();
        }
    }
}

impl Drop for DropBehindLeftovers {
    fn drop(&mut self) {
        self.end();
    }
}

fn plain_cell(handle: &Handle) -> CellNumber {
    match handle.access.coherence.needs_revalidation() {
        _ if handle.shared.sampler.is_some() => FOLLOWED,
        true => WATCHED,
        false => handle.mapping.index().cell(),
    }
}

impl File {
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        let readahead = Readahead::new(handle.shared.readahead);
        Self {
            view: handle.shared.filemap.arena.owned_view(),
            lookup_cell: AtomicU32::new(plain_cell(&handle).0),
            id: handle.mapping.id(),
            process: handle.shared.process,
            counters: Arc::clone(&handle.shared.filemap.counters),
            left_behind: DropBehindLeftovers::default(),
            touched: StreamPositions::default(),
            readahead: RankedMutex::new(Rank::Readahead, readahead),
            handle,
            position: AtomicU64::new(0),
        }
    }

    /// Reads up to `buffer.len()` bytes at byte `position` and returns how many were read: all of them, or fewer at
    /// the end of the file, or because something failed after some bytes (the next call returns the error). 0 means
    /// the end of the file, or an empty buffer.
    ///
    /// A hit takes no lock, makes no system call and stores nothing that other threads look at. A miss waits.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io), [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory),
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked); nothing is read then.
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.read_at_with(buffer, position, ReadOptions::default())
    }

    /// As [`File::read_at`], with options.
    ///
    /// # Errors
    /// As [`File::read_at`]; and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock) if not even the first byte
    /// can be had within the options.
    // Always: left to itself, the compiler keeps the hit out of its caller, where it takes a fifth more instructions.
    #[inline(always)]
    pub fn read_at_with(&self, buffer: &mut [u8], position: u64, options: ReadOptions) -> Result<usize> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        if buffer.is_empty() || position >= FILE_BYTES_MAX {
            return Ok(0);
        }
        if options.uncached {
            return self.read_uncached(buffer, position, options);
        }
        let len = buffer.len();
        let touched = &self.touched;
        let touch =
            move |grown: GrownView<'_>, frame| touched.note(grown, frame, position..position + len as u64);
        match read_page_into(self.view_in(self.lookup_cell()), position, buffer, touch) {
            PageHit::Read => {
                self.counters.add_hit(len as u64);
                Ok(len)
            }
            PageHit::Absent => {
                self.read_slowly(buffer, PositionedRead { position, options }, Hits::none(HitStop::Absent))
            }
            PageHit::Unclear => self.read_folios(buffer, position, options),
        }
    }

    #[inline(never)]
    fn read_folios(&self, buffer: &mut [u8], position: u64, options: ReadOptions) -> Result<usize> {
        let (touched, len) = (&self.touched, buffer.len());
        let touch =
            move |grown: GrownView<'_>, frame| touched.note(grown, frame, position..position + len as u64);
        let hits = read_folios_into(self.view_in(self.lookup_cell()), position, buffer, touch);
        if hits.stopped == HitStop::Full && hits.marker.is_none() {
            self.counters.add_hit(hits.bytes as u64);
            return Ok(hits.bytes);
        }
        self.read_slowly(buffer, PositionedRead { position, options }, hits)
    }

    #[inline(always)]
    fn view_in(&self, cell: CellNumber) -> FileView<'_> {
        FileView { view: &self.view, cell, id: self.id }
    }

    #[cold]
    fn read_slowly(&self, buffer: &mut [u8], read: PositionedRead, hits: Hits) -> Result<usize> {
        match self.lookup_cell() {
            UNCACHED => return self.read_uncached(buffer, read.position, read.options),
            WATCHED => return self.read_watched(buffer, read),
            FOLLOWED => self.assure()?,
            _ => {}
        }
        self.end_read(buffer, read, hits)
    }

    /// As a read that does not wait, of bytes that the caller has had brought: they are not forgotten. The call before,
    /// which found them missing, has counted as the read.
    #[cfg(feature = "tokio")]
    pub(super) fn read_prefetched(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        let options = ReadOptions::new().nowait(true);
        if self.process.is_forked() || position >= FILE_BYTES_MAX {
            return self.read_at_with(buffer, position, options);
        }
        let passing = self.passing_with(options)?;
        let call = self.call(passing.as_ref(), options.wait_policy());
        let bytes = self.handle.shared.filemap.read_counted(&call, position, buffer)?;
        if passing.is_none() {
            self.touched.remember(position, position + bytes as u64);
        }
        self.note_read(position, bytes);
        Ok(bytes)
    }

    fn read_watched(&self, buffer: &mut [u8], read: PositionedRead) -> Result<usize> {
        self.assure()?;
        let (position, len) = (read.position, buffer.len());
        let touch =
            |grown: GrownView<'_>, frame| self.touched.note(grown, frame, position..position + len as u64);
        let file = self.view_in(self.handle.mapping.index().cell());
        let hits = read_hits_into(file, position, buffer, touch);
        if hits.stopped == HitStop::Full && hits.marker.is_none() {
            self.counters.add_hit(hits.bytes as u64);
            return Ok(hits.bytes);
        }
        self.end_read(buffer, read, hits)
    }

    fn end_read(&self, buffer: &mut [u8], read: PositionedRead, hits: Hits) -> Result<usize> {
        let PositionedRead { position, options } = read;
        let (filemap, call) = (&self.handle.shared.filemap, self.call(None, options.wait_policy()));
        // The copied bytes are done, and counted at their folios; only the rest is read again.
        if let Some(page) = hits.marker {
            filemap.advance(&call, page);
        }
        // (A cache that follows reads has given the hit no record to look at.)
        let stopped = Some(hits.stopped).filter(|stopped| *stopped != HitStop::Stale);
        let reading = ReadProgress { done: hits.bytes, hit: true, stopped };
        let bytes = filemap.finish(&call, position, buffer, reading)?;
        // The next read may go on in the same folio, by a hit; that counts as this read still.
        self.touched.remember(position, position + bytes as u64);
        self.note_read(position, bytes);
        Ok(bytes)
    }

    pub(super) fn note_read(&self, position: u64, bytes: usize) {
        self.handle.shared.note_read(&self.handle.mapping, position, bytes);
    }

    #[inline(never)]
    fn read_uncached(&self, buffer: &mut [u8], position: u64, options: ReadOptions) -> Result<usize> {
        self.assure()?;
        let passing = self.passing()?;
        let call = self.call(Some(&passing), options.wait_policy());
        let bytes = self.handle.shared.filemap.read(&call, position, buffer)?;
        self.note_read(position, bytes);
        Ok(bytes)
    }

    pub(super) fn call<'c>(
        &'c self,
        passing: Option<&'c UncachedRead<'c>>,
        wait_policy: WaitPolicy,
    ) -> ReadCall<'c> {
        self.reader(passing).call(&self.handle.mapping, wait_policy)
    }

    pub(super) fn reader<'r>(&'r self, passing: Option<&'r UncachedRead<'r>>) -> Reader<'r> {
        let reader = Reader::new(&self.readahead, self.handle.pool_number(), passing);
        if self.is_size_guaranteed() { reader.without_size_check() } else { reader }
    }

    pub(super) fn passing(&self) -> Result<UncachedRead<'_>> {
        let Handle { shared, mapping, .. } = &*self.handle;
        self.check_drops_behind()?;
        let new = || DropBehindState::new(&shared.filemap, mapping, shared.process);
        Ok(UncachedRead::new(self.left_behind.0.get_or_init(new)))
    }

    pub(super) fn passing_with(&self, options: ReadOptions) -> Result<Option<UncachedRead<'_>>> {
        if options.uncached | self.is_uncached() { self.passing().map(Some) } else { Ok(None) }
    }

    fn check_drops_behind(&self) -> Result<()> {
        let backend = self.handle.mapping.backend();
        if backend.can_drop_behind() {
            return Ok(());
        }
        Err(Repr::CannotDropBehind { backend: backend.name() }.into())
    }

    /// Makes every read of this handle an uncached one from now on ([`ReadOptions::uncached`]), pins, futures and
    /// [`Read`](std::io::Read) included. Pages that a pin brought go when it is dropped and the reads have passed
    /// them. With `false`, pages left behind go now; that may wait for locks. A clone begins as its original,
    /// and leaves its own pages behind.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked); [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)
    /// if the file's backend does not support it.
    pub fn set_uncached(&self, uncached: bool) -> Result<()> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        if uncached {
            self.check_drops_behind()?;
        }
        let cell = if uncached { UNCACHED } else { plain_cell(&self.handle) };
        self.lookup_cell.store(cell.0, Ordering::Relaxed);
        if !uncached {
            self.left_behind.end();
        }
        Ok(())
    }

    /// Whether [`File::set_uncached`] is in force.
    #[inline]
    pub fn is_uncached(&self) -> bool {
        self.lookup_cell() == UNCACHED
    }

    /// Where a hit of a batch looks for the record: under a lease no check is needed.
    #[inline]
    pub(super) fn current_lookup_cell(&self) -> CellNumber {
        match self.lookup_cell() {
            WATCHED if self.holds_lease() => self.handle.mapping.index().cell(),
            cell => cell,
        }
    }

    #[inline]
    pub(super) fn lookup_cell(&self) -> CellNumber {
        CellNumber(self.lookup_cell.load(Ordering::Relaxed))
    }

    /// As [`File::read_at`], as a future for any runtime. Nothing happens before the first poll, which answers a hit
    /// at once. Dropping the future cancels the read; bytes on their way then go to the cache. One thread waits for
    /// all futures of a cache: it starts when the first must wait, and ends with the cache.
    ///
    /// # Errors
    /// As [`File::read_at`]; and [`ErrorKind::Io`](crate::ErrorKind::Io) if that thread cannot be started.
    pub fn read_at_async<'a>(&'a self, buffer: &'a mut [u8], position: u64) -> ReadFuture<'a> {
        self.read_at_async_with(buffer, position, ReadOptions::default())
    }

    /// As [`File::read_at_async`], with options. With `nowait` or `cached_only` the first poll answers.
    ///
    /// # Errors
    /// As [`File::read_at_async`], and [`File::read_at_with`].
    pub fn read_at_async_with<'a>(
        &'a self,
        buffer: &'a mut [u8],
        position: u64,
        options: ReadOptions,
    ) -> ReadFuture<'a> {
        ReadFuture::new(self, buffer, position, options)
    }

    pub(super) fn poll_read(
        &self,
        progress: &mut PendingRead,
        buffer: &mut [u8],
        read: PositionedRead,
        context: &Context<'_>,
    ) -> Poll<Result<usize>> {
        let PositionedRead { position, options } = read;
        if self.process.is_forked() {
            return Poll::Ready(Err(Repr::Forked.into()));
        }
        if buffer.is_empty() || position >= FILE_BYTES_MAX {
            return Poll::Ready(Ok(0));
        }
        if options.nowait || options.cached_only {
            return Poll::Ready(self.read_at_with(buffer, position, options));
        }
        // Once: what comes after is of then or later, and a look may forget the page that was waited for. The call that
        // a probe waits for has looked.
        if !progress.has_begun() && !progress.is_probe() {
            self.assure()?;
        }
        let Handle { shared, mapping, .. } = &*self.handle;
        let passing = self.passing_with(options)?;
        let poll = PolledRead { mapping, reader: self.reader(passing.as_ref()), waker: context.waker() };
        let is_probe = progress.is_probe();
        let polled = shared.filemap.poll_read(poll, progress, position, buffer);
        if let Poll::Ready(Ok(bytes)) = &polled
            && !is_probe
        {
            self.note_read(position, *bytes);
        }
        polled
    }

    /// Reads exactly `buffer.len()` bytes at `position`.
    ///
    /// # Errors
    /// As [`File::read_at`]; and [`ErrorKind::UnexpectedEof`](crate::ErrorKind::UnexpectedEof) if the file
    /// ends before. The buffer's content is unspecified then.
    pub fn read_exact_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let at = position.saturating_add(done as u64);
            match self.read_at(&mut buffer[done..], at)? {
                0 => {
                    let (len, size) = (buffer.len(), self.len());
                    return Err(Repr::UnexpectedEof { position, len, size }.into());
                }
                bytes => done += bytes,
            }
        }
        Ok(())
    }

    /// Pins `len` bytes at `position`, or as many as the file has there: waits until they are in the cache and keeps
    /// them there, unchanged and uncopied, until the [`Pinned`] is dropped.
    ///
    /// # Errors
    /// As [`File::read_at`]; [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory) if the range does not fit
    /// beside the bytes that are pinned already.
    pub fn pin(&self, position: u64, len: usize) -> Result<Pinned> {
        self.pin_with(position, len, ReadOptions::default())
    }

    /// As [`File::pin`], with options. With `nowait` or `cached_only` it pins all of the range or nothing. With
    /// `nowait` the reads are under way by then, so a later call finds the bytes.
    ///
    /// # Errors
    /// As [`File::pin`]; and [`ErrorKind::WouldBlock`](crate::ErrorKind::WouldBlock) if not all of the range can be had
    /// within the options. Nothing stays pinned then.
    pub fn pin_with(&self, position: u64, len: usize, options: ReadOptions) -> Result<Pinned> {
        let (wait_policy, process) = (options.wait_policy(), self.process);
        self.pin_by(options, PinRequest { position, len, wait_policy, process, was_missing: false })
    }

    /// As [`File::pin`], as a future for any runtime. Nothing happens before the first poll, which asks the device
    /// for all that is missing. Dropping the future pins nothing; bytes on their way then go to the cache.
    ///
    /// # Errors
    /// As [`File::pin`] and [`File::read_at_async`].
    pub fn pin_async(&self, position: u64, len: usize) -> PinFuture<'_> {
        PinFuture::new(self, position, len)
    }

    /// As [`File::pin_with`]; the request says how long is waited, and not the options.
    pub(super) fn pin_by(&self, options: ReadOptions, request: PinRequest) -> Result<Pinned> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        self.assure()?;
        self.pin_assured(options, request)
    }

    /// Looks at the file, and has all pages fetched that a pin of these bytes misses. Returns how many they are.
    pub(super) fn start_pin(&self, position: u64, len: usize) -> Result<u64> {
        let Handle { shared, mapping, .. } = &*self.handle;
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        self.assure()?;
        let position = position.min(FILE_BYTES_MAX);
        let end = position.saturating_add(len as u64).min(mapping.size()).max(position);
        if end == position {
            return Ok(0);
        }
        let missing = shared.filemap.check_pin(mapping, position..end)?;
        if missing > 0 && self.is_uncached() {
            self.start(&[Span::of(position, (end - position) as usize)], ReadOptions::default());
        } else if missing > 0 {
            self.will_need(position, end - position)?;
        }
        Ok(missing)
    }

    /// As [`File::pin_by`], for a caller that has looked at the file: what was brought since is not forgotten.
    pub(super) fn pin_assured(&self, options: ReadOptions, request: PinRequest) -> Result<Pinned> {
        let Handle { shared, mapping, .. } = &*self.handle;
        let position = request.position.min(FILE_BYTES_MAX);
        let passing = self.passing_with(options)?;
        let reader = self.reader(passing.as_ref());
        let request = PinRequest { position, ..request };
        let pinned = shared.filemap.pin(mapping, reader, request)?;
        self.note_read(position, pinned.len());
        Ok(pinned)
    }

    pub(super) fn blocking_threads(&self) -> &BlockingThreads {
        &self.handle.shared.filemap.blocking_threads
    }

    /// Says how this handle will be read from now on (`posix_fadvise`); a clone begins without it. Readahead forgets
    /// the handle's reads so far, and its largest window is as configured again. Waits only for a reader of this
    /// handle that is starting a window.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn advise(&self, hint: Hint) -> Result<()> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        self.readahead.lock().set_hint(hint);
        Ok(())
    }

    /// Sets the least and the largest order of the folios that this handle's reads make, each log2 of pages; both are
    /// brought inside the cache's own ([`Builder::folio_order_max`](crate::Builder::folio_order_max)). Reads are
    /// rounded to whole folios of the least order; folios are smaller all the same where others made smaller ones, or
    /// memory is in pieces. Resets and waits as [`File::advise`] does.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked); [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput)
    /// if the least is larger than the largest.
    pub fn set_folio_orders(&self, least: u8, largest: u8) -> Result<()> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        if least > largest {
            let text = format!(
                "cannot use folios of order {least} at least and {largest} at most: let the first be no larger"
            );
            return Err(Repr::InvalidInput(text).into());
        }
        let Orders { min, max } = self.handle.shared.filemap.supply.folio_orders;
        let orders = Orders { min: Order(least).clamp(min, max), max: Order(largest).clamp(min, max) };
        self.readahead.lock().set_orders(orders);
        Ok(())
    }

    /// The state of this handle's readahead, and counts of its work. Waits as [`File::advise`] does.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn readahead_report(&self) -> Result<ReadaheadReport> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        Ok(self.readahead.lock().report())
    }

    /// Starts reading the part of `len` bytes at `position` that is not in the cache, and waits only for locks. The
    /// result says how much was not started, because half of the cache is in flight already or no page can be had.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked). Device errors are returned by the read that meets them.
    pub fn will_need(&self, position: u64, len: u64) -> Result<Prefetch> {
        let Handle { shared, mapping, .. } = &*self.handle;
        if shared.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        Ok(shared.filemap.will_need(self.handle.pool_number(), mapping, position, len))
    }

    /// As [`File::will_need`], of several ranges in order, each of bytes `start..end`. Their reads go to the device
    /// together: a backend of which a request is dear, as a store of objects, joins those that lie close to each other.
    ///
    /// # Errors
    /// As [`File::will_need`].
    pub fn will_need_ranges(&self, ranges: &[Range<u64>]) -> Result<Prefetch> {
        let Handle { shared, mapping, .. } = &*self.handle;
        if shared.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        Ok(shared.filemap.will_need_ranges(self.handle.pool_number(), mapping, ranges))
    }

    /// Drops the pages of `len` bytes at `position` from the cache, and returns how many went. Only folios that lie
    /// wholly in the range go, and none that is pinned or on its way. The range may reach past the file's end.
    /// Evictions in the range are forgotten: pages read again count as read for the first time. May wait for locks.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn dont_need(&self, position: u64, len: u64) -> Result<u64> {
        let Handle { shared, mapping, .. } = &*self.handle;
        if shared.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        Ok(shared.filemap.dont_need(mapping, position, len))
    }

    /// Has the file read through the kernel's page cache from now on, if that holds half of it or more now, and
    /// returns whether it does: bytes that the kernel has in memory are not read from the device again. A handle that
    /// writes, and a backend of your own, stay as they are. Looks at the kernel's cache once; waits for nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn use_kernel_cache_if_warm(&self) -> Result<bool> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        Ok(use_kernel_cache_if_warm(&*self.handle.mapping.backend(), self.len()))
    }

    /// The file's size in bytes, as last known: writes through the cache count at once, changes by others when the
    /// file is opened and when a read meets its end. 0 in a forked child, which does not have that memory.
    pub fn len(&self) -> u64 {
        if self.process.is_forked() { 0 } else { self.handle.mapping.size() }
    }

    /// Whether the file is empty, as last known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Looks at the file again; if it changed since its pages were cached, they are forgotten, except those written
    /// here and not written back. Returns whether it changed, or whether that cannot be told: so soon after a change
    /// that another one might carry the same time. Waits for the file system; a file with a lease
    /// ([`Coherence::Lease`](crate::Coherence)) needs no look.
    ///
    /// # Errors
    /// The backend cannot report the file's attributes.
    pub fn revalidate(&self) -> Result<bool> {
        let Handle { shared, mapping, .. } = &*self.handle;
        if shared.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        if self.handle.watch.holds_lease() { Ok(false) } else { shared.filemap.revalidate(mapping) }
    }

    /// How the file is read: the name of its backend's mechanism.
    pub fn mechanism(&self) -> &'static str {
        self.handle.mapping.backend().name()
    }

    /// Whether the file is read past the kernel's page cache, as far as is known: `false` for a backend that is not a
    /// file of the system, and once the file system refused such a read.
    pub fn is_direct(&self) -> bool {
        self.handle.mapping.backend().is_direct()
    }

    /// Counts of the file's index since the cache knows the file. Waits for nothing.
    pub(super) fn tree_counts(&self) -> TreeCounts {
        self.handle.mapping.index().tree_counts()
    }

    /// Pages of this file that are in the cache.
    pub fn cached_pages(&self) -> u64 {
        if self.handle.shared.process.is_forked() { 0 } else { self.handle.mapping.lock().pages() }
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("File");
        text.field("len", &self.len()).field("position", &self.position.load(Ordering::Relaxed));
        text.field("path", &self.path())
            .field("is_writable", &self.is_writable())
            .field("mechanism", &self.mechanism());
        text.finish_non_exhaustive()
    }
}

impl Clone for File {
    fn clone(&self) -> Self {
        let mut clone = Self::new(Arc::clone(&self.handle));
        clone.position = AtomicU64::new(self.position.load(Ordering::Relaxed));
        clone.lookup_cell = AtomicU32::new(self.lookup_cell().0);
        clone
    }
}

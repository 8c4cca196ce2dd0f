//! Write: how a program changes a file.
//!
//! ```text
//!   write_at       bytes -> the cache                       seen by every reader from now on, page by page
//!   sync_data      the cache -> the file -> the medium      survives the machine when it has returned Ok
//!   write_back     the cache -> the file                    begun, and by itself after a while
//! ```
//!
//! A write goes into the cache and no further: `filemap/write.rs` does it, and write-back (`writeback/`) takes it to
//! the file. The end of a handle starts that, and the end of the cache waits for it; neither makes it durable.
//!
//! **Guarantees, by step.**
//!
//! | after | any reader of this cache | other programs | after the machine failed |
//! |---|---|---|---|
//! | `write_at` has returned | sees it | may see some of it | may be there, in part, or not |
//! | `sync_data`, `sync_range` of it has returned `Ok` | sees it | see it | is there, and the size it needs |
//! | `sync_all` has returned `Ok` | sees it | see it | is there, with the file's times |
//! | any of them has returned an error | sees it | may see some of it | as before; the next sync tries again |
//!
//! Each 4 KiB page of a write is of one moment for every reader and writer: it is read whole, before or after. A write
//! of several pages may be seen in some of them before the others, and two that overlap may each win some of the pages.
//! Appends do not overlap: each has its place in the file to itself.
//!
//! Invariants:
//!  1. An error is returned only if not one byte was written; otherwise their number, and the error comes again with
//!     the next call. (If the write asked for a sync, the sync's error is returned.)
//!  2. Each handle is told of each error of write-back once, by the first of its syncs after it.

use std::fmt;
use std::future::Future;
use std::io::IoSlice;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::backend::{Backend, SyncKind};
use crate::error::{Error, Repr, Result};
use crate::filemap::{Truncation, UncachedRead, WriteContext};
use crate::mapping::writeback_state::SyncRange;
use crate::units::{FILE_BYTES_MAX, PAGE_SIZE, PageIndex, pages_of_bytes};
use crate::xarray::INDICES_MAX;

use super::blocking::BlockingCall;
use super::open::Durability;
use super::{File, Handle};

/// How a write behaves; the default is as its handle was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Leaves in the cache nothing that it brought there: its pages are written back at once, and dropped when that has
    /// ended well, unless another reader or writer has used them meanwhile. Pages that were cached before stay. A read
    /// that is under way when the write-back ends gets its bytes, and may come too late to keep its page.
    ///
    /// It makes nothing durable: that still takes a sync. Pages that could not be written back stay, and the next sync
    /// reports it; but pages that have left the cache are not written again if the device's flush fails in that sync:
    /// see [`File::sync_data`]. Refused by backends that do not support it
    /// ([`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)).
    pub uncached: bool,
    /// When the write is durable; `None`: when the handle says.
    pub durability: Option<Durability>,
}

impl WriteOptions {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`WriteOptions::uncached`].
    #[must_use]
    pub fn uncached(mut self, uncached: bool) -> Self {
        self.uncached = uncached;
        self
    }
    /// Sets [`WriteOptions::durability`].
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = Some(durability);
        self
    }
}

/// One write of a batch, and its result once it was made.
pub struct BatchWrite<'b> {
    bytes: &'b [u8],
    position: u64,
    answer: Result<usize>,
}

impl<'b> BatchWrite<'b> {
    /// A write of `bytes` at byte `position`.
    pub fn new(bytes: &'b [u8], position: u64) -> Self {
        Self { bytes, position, answer: Ok(0) }
    }
    /// The byte of the file that it begins at.
    pub fn position(&self) -> u64 {
        self.position
    }
    /// How many bytes were written, as [`File::write_at`] counts them; 0 before it was made.
    ///
    /// # Errors
    /// Those of [`File::write_at_with`].
    pub fn result(&self) -> std::result::Result<usize, &Error> {
        self.answer.as_ref().copied()
    }
    /// As [`BatchWrite::result`], with the error itself.
    ///
    /// # Errors
    /// As there.
    pub fn into_result(self) -> Result<usize> {
        self.answer
    }
}

impl fmt::Debug for BatchWrite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("BatchWrite");
        text.field("position", &self.position).field("len", &self.bytes.len());
        text.field("result", &self.answer).finish()
    }
}

/// A write that is under way or has not begun; see [`File::write_at_async`].
#[derive(Debug)]
#[must_use = "a future does nothing until it is polled"]
pub struct WriteFuture<'a> {
    file: &'a File,
    bytes: &'a [u8],
    position: u64,
    options: WriteOptions,
    handed_over: Option<BlockingCall<usize>>,
}

impl<'a> WriteFuture<'a> {
    fn new(file: &'a File, bytes: &'a [u8], position: u64, options: WriteOptions) -> Self {
        Self { file, bytes, position, options, handed_over: None }
    }
}

impl Future for WriteFuture<'_> {
    type Output = Result<usize>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { file, bytes, position, options, handed_over } = self.get_mut();
        let (position, options) = (*position, *options);
        if handed_over.is_none() {
            if let Some(written) = file.write_at_once(bytes, position, options) {
                return Poll::Ready(written);
            }
            let (clone, bytes) = (file.clone(), bytes.to_vec());
            let call = move || clone.write_at_with(&bytes, position, options);
            *handed_over = Some(file.run_blocking(call));
        }
        let call = handed_over.as_mut().expect("it was put there");
        Pin::new(call).poll(context)
    }
}

impl File {
    /// Writes `bytes` at byte `position`, and returns how many were written: all of them, or fewer because something
    /// went wrong after some (the next call returns the error). Past its end the file grows, by zeros up to
    /// `position`.
    ///
    /// They are in the cache when it returns, and every reader of the cache sees them;
    /// [`OpenOptions::durability`](crate::OpenOptions::durability) says when they are durable. Readers see each 4 KiB
    /// page whole, but not several. Only a page that is overwritten in part, and is not cached, is read first.
    ///
    /// Over cached bytes it takes no lock but that of the page, and one that all writers inside the file share, and
    /// does not block. It may wait for the device where it has to read, for memory, and for write-back where writers
    /// are throttled. Page faults on `bytes` must not be served by reading this file.
    ///
    /// # Errors
    /// [`ErrorKind::ReadOnly`](crate::ErrorKind::ReadOnly): the handle does not write.
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it would end behind byte 2^63 - 1.
    /// [`ErrorKind::Io`](crate::ErrorKind::Io): a page that is overwritten in part cannot be read.
    /// [`ErrorKind::Write`](crate::ErrorKind::Write), [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace): too much is
    /// dirty, and earlier writes to this file or to others of its device cannot be written back; or the file is a
    /// device that ends there.
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory); [`ErrorKind::Busy`](crate::ErrorKind::Busy): see
    /// [`OpenOptions::on_pinned`](crate::OpenOptions::on_pinned); [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    /// Nothing was written then. And, of a handle whose writes are durable, those of [`File::sync_data`]: then the
    /// bytes are in the cache.
    #[inline]
    pub fn write_at(&self, bytes: &[u8], position: u64) -> Result<usize> {
        self.write_at_with(bytes, position, WriteOptions::default())
    }

    /// As [`File::write_at`], with options.
    ///
    /// # Errors
    /// As [`File::write_at`]; and [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if it is to be an uncached
    /// one and the backend does not support that.
    #[inline]
    pub fn write_at_with(&self, bytes: &[u8], position: u64, options: WriteOptions) -> Result<usize> {
        self.check_writes()?;
        check_range(position, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(0);
        }
        let Handle { shared, mapping, access, .. } = &*self.handle;
        let plain = !(options.uncached | self.is_uncached());
        let written = match plain && shared.filemap.overwrite(mapping, &self.touched, position, bytes) {
            true => bytes.len(),
            false => self.write_slowly(bytes, position, plain)?,
        };
        match options.durability.unwrap_or(access.durability) {
            Durability::OnSync => {}
            durability => self.make_durable(durability, position..position + written as u64)?,
        }
        Ok(written)
    }

    /// As [`File::write_at`], as a future. The first poll writes at once if all pages are cached; a write that has to
    /// wait (for a page to be read, for memory, for write-back, for a sync of a durable handle) is copied and handed to
    /// a thread of the cache, and is made even if the future is dropped then. Wait for one write before you begin the
    /// next of the same bytes: two that are under way at once are made in any order.
    ///
    /// # Errors
    /// As [`File::write_at`]; and [`ErrorKind::Io`](crate::ErrorKind::Io) if no thread can be started.
    pub fn write_at_async<'a>(&'a self, bytes: &'a [u8], position: u64) -> WriteFuture<'a> {
        self.write_at_async_with(bytes, position, WriteOptions::default())
    }

    /// As [`File::write_at_async`], with options.
    ///
    /// # Errors
    /// As there, and [`File::write_at_with`].
    pub fn write_at_async_with<'a>(
        &'a self,
        bytes: &'a [u8],
        position: u64,
        options: WriteOptions,
    ) -> WriteFuture<'a> {
        WriteFuture::new(self, bytes, position, options)
    }

    pub(super) fn write_at_once(
        &self,
        bytes: &[u8],
        position: u64,
        options: WriteOptions,
    ) -> Option<Result<usize>> {
        if let Err(error) = self.check_writes().and_then(|()| check_range(position, bytes.len() as u64)) {
            return Some(Err(error));
        }
        let Handle { shared, mapping, access, .. } = &*self.handle;
        let durability = options.durability.unwrap_or(access.durability);
        let plain = !(options.uncached | self.is_uncached()) && durability == Durability::OnSync;
        let is_made =
            bytes.is_empty() || plain && shared.filemap.overwrite(mapping, &self.touched, position, bytes);
        is_made.then_some(Ok(bytes.len()))
    }

    /// As [`File::append`], by a thread of the cache: see [`BlockingCall`].
    ///
    /// # Errors
    /// As [`File::append`]; and [`ErrorKind::Io`](crate::ErrorKind::Io) if no thread can be started.
    pub fn append_async(&self, bytes: impl Into<Vec<u8>>) -> BlockingCall<u64> {
        let bytes = bytes.into();
        self.blocking_call(move |file| file.append(&bytes))
    }

    /// As [`File::sync_data`], by a thread of the cache: see [`BlockingCall`]. It covers writes before this call,
    /// not writes before the future is polled.
    ///
    /// # Errors
    /// As [`File::sync_data`]; and [`ErrorKind::Io`](crate::ErrorKind::Io) if no thread can be started.
    pub fn sync_data_async(&self) -> BlockingCall<()> {
        self.blocking_call(|file| file.sync_data())
    }

    /// As [`File::sync_all`], by a thread of the cache: see [`File::sync_data_async`].
    ///
    /// # Errors
    /// As [`File::sync_all`]; and [`ErrorKind::Io`](crate::ErrorKind::Io) if no thread can be started.
    pub fn sync_all_async(&self) -> BlockingCall<()> {
        self.blocking_call(|file| file.sync_all())
    }

    pub(super) fn blocking_call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&File) -> Result<T> + Send + 'static,
    ) -> BlockingCall<T> {
        if self.process.is_forked() {
            return BlockingCall::ready(Err(Repr::Forked.into()));
        }
        let file = self.clone();
        self.run_blocking(move || call(&file))
    }

    #[inline(never)]
    fn write_slowly(&self, bytes: &[u8], position: u64, plain: bool) -> Result<usize> {
        let shared = &self.handle.shared;
        let passing = if plain { None } else { Some(self.passing()?) };
        shared.filemap.write(self.write_context(passing.as_ref()), position, bytes)
    }

    /// Writes all of `bytes` at byte `position`.
    ///
    /// # Errors
    /// As [`File::write_at`]; some of the bytes may have been written.
    pub fn write_all_at(&self, bytes: &[u8], position: u64) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            done += self.write_at(&bytes[done..], position + done as u64)?;
        }
        // A write of no bytes, too, fails if the file may not be written.
        if bytes.is_empty() { self.write_at(bytes, position).map(drop) } else { Ok(()) }
    }

    /// As [`File::write_at`] of the bytes of all `pieces`, one after the other, also where several lie in one page.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn write_vectored_at(&self, pieces: &[IoSlice<'_>], position: u64) -> Result<usize> {
        let later = WriteOptions::new().durability(Durability::OnSync);
        let len = pieces.iter().map(|piece| piece.len() as u64).sum();
        self.check_writes()?;
        check_range(position, len)?;
        let (mut done, mut page, mut rest) = (0, [0; PAGE_SIZE], GatherCursor::of(pieces));
        loop {
            let bytes = rest.next(position + done as u64, &mut page);
            match self.write_at_with(bytes, position + done as u64, later) {
                Ok(written) => {
                    done += written;
                    if written < bytes.len() || bytes.is_empty() {
                        break; // something went wrong in the middle of this one; or it was the last
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break, // the next call tells
            }
        }
        self.make_durable(self.handle.access.durability, position..position + done as u64)?;
        Ok(done)
    }

    /// Makes several writes, in order; each [`BatchWrite`] gets the result that [`File::write_at`] would return.
    /// Where they are to be durable, one sync serves all.
    pub fn write_batch(&self, writes: &mut [BatchWrite<'_>]) {
        self.write_batch_with(writes, WriteOptions::default());
    }

    /// As [`File::write_batch`], with options, which hold for each write.
    pub fn write_batch_with(&self, writes: &mut [BatchWrite<'_>], options: WriteOptions) {
        let later = options.durability(Durability::OnSync);
        let mut wrote: Option<Range<u64>> = None;
        for write in &mut *writes {
            write.answer = self.write_at_with(write.bytes, write.position, later);
            if let Ok(bytes @ 1..) = write.answer {
                let end = write.position + bytes as u64;
                wrote = Some(match wrote {
                    Some(known) => known.start.min(write.position)..known.end.max(end),
                    None => write.position..end,
                });
            }
        }
        let Some(wrote) = wrote else { return };
        for write in writes.iter_mut().filter(|write| matches!(write.answer, Ok(1..))) {
            // One call is enough if it is Ok. If not, each write gets the result of a sync of its own.
            match self
                .make_durable(options.durability.unwrap_or(self.handle.access.durability), wrote.clone())
            {
                Ok(()) => return,
                Err(error) => write.answer = Err(error),
            }
        }
    }

    /// Writes `bytes` at the end of the file, and returns their position. Appends by several handles do not mix.
    ///
    /// # Errors
    /// As [`File::write_at`]; but some of the bytes may stand at the end of the file then ([`File::len`] says).
    pub fn append(&self, bytes: &[u8]) -> Result<u64> {
        self.append_with(bytes, WriteOptions::default())
    }

    /// As [`File::append`], with options.
    ///
    /// # Errors
    /// As [`File::append`], and [`File::write_at_with`].
    pub fn append_with(&self, bytes: &[u8], options: WriteOptions) -> Result<u64> {
        let (position, _, outcome) = self.append_some(bytes, options)?;
        outcome.map(|()| position)
    }

    pub(super) fn append_some(
        &self,
        bytes: &[u8],
        options: WriteOptions,
    ) -> Result<(u64, usize, Result<()>)> {
        self.check_writes()?;
        if bytes.is_empty() {
            return Ok((self.len(), 0, Ok(())));
        }
        let Handle { shared, access, .. } = &*self.handle;
        let passing = if options.uncached | self.is_uncached() { Some(self.passing()?) } else { None };
        let (position, written, outcome) =
            shared.filemap.append(self.write_context(passing.as_ref()), bytes)?;
        let durability = options.durability.unwrap_or(access.durability);
        self.make_durable(durability, position..position + written as u64)?;
        Ok((position, written, outcome))
    }

    /// Makes the file `bytes` long, for all handles: cuts it off there, or extends it with zeros. Pinned bytes behind
    /// the new end stay with their pins. Waits for reads and write-back in flight there, and for the file system.
    ///
    /// # Errors
    /// [`ErrorKind::ReadOnly`](crate::ErrorKind::ReadOnly),
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput), [`ErrorKind::Forked`](crate::ErrorKind::Forked),
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy): as [`File::write_at`].
    /// [`ErrorKind::Write`](crate::ErrorKind::Write) and its like: the file system refuses; the size is unchanged.
    pub fn set_len(&self, bytes: u64) -> Result<()> {
        self.check_writes()?;
        check_range(0, bytes)?;
        let Handle { shared, mapping, access, .. } = &*self.handle;
        Truncation::of(&shared.filemap, mapping).cut(bytes, access.on_pinned)
    }

    /// Cuts the file to nothing: by `device`, if it is not open for writing yet.
    pub(super) fn empty_by(&self, device: &Arc<dyn Backend>) -> Result<()> {
        let Handle { shared, mapping, access, .. } = &*self.handle;
        Truncation::of(&shared.filemap, mapping).by(device).cut(0, access.on_pinned)
    }

    /// Makes `len` bytes at byte `position` read as zeros, and gives their space back where the file system can. The
    /// size stays; the part of the range behind it is ignored. Waits as [`File::set_len`] does.
    ///
    /// # Errors
    /// As [`File::set_len`]; some of the range may be zeros then.
    pub fn punch_hole(&self, position: u64, len: u64) -> Result<()> {
        self.check_writes()?;
        check_range(position, len)?;
        let Handle { shared, mapping, access, .. } = &*self.handle;
        Truncation::of(&shared.filemap, mapping).punch(position..position + len, access.on_pinned)
    }

    /// Has the file system keep space for `len` bytes at byte `position`, so that their write-back does not run out of
    /// it. Neither bytes nor size change. Waits for the file system.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace), [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported),
    /// [`ErrorKind::Write`](crate::ErrorKind::Write): it cannot; [`ErrorKind::ReadOnly`](crate::ErrorKind::ReadOnly),
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput), [`ErrorKind::Forked`](crate::ErrorKind::Forked) as
    /// [`File::write_at`].
    pub fn allocate(&self, position: u64, len: u64) -> Result<()> {
        self.check_writes()?;
        check_range(position, len)?;
        let Some(backend) = self.handle.mapping.writeback().writer() else {
            return Err(Repr::ReadOnly.into());
        };
        let failed = |source| Repr::Allocate { position, len, source }.into();
        backend.allocate(position..position + len).map_err(failed)
    }

    /// Makes durable all writes to the file by handles of this cache before the call, and the size that they need:
    /// writes them back, waits for that, and has the system flush its own caches (`fdatasync`). Writes that begin while
    /// it waits do not prolong it.
    ///
    /// # Errors
    /// [`ErrorKind::Sync`](crate::ErrorKind::Sync), [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace): something that
    /// was written since the handle was opened, or since its last sync, could not be written back or made durable, be
    /// it that this call tried to or write-back before; each handle is told of it once. Pages that are still cached
    /// become dirty again, and the next sync tries it again: one that returns `Ok` has made it durable. Pages that were
    /// written to the file, and left the cache before this sync, as uncached writes do, may be lost where the device's
    /// own flush fails: the error says how many, and only their writer can write them again.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn sync_data(&self) -> Result<()> {
        self.sync(SyncKind::Data, 0..FILE_BYTES_MAX)
    }

    /// As [`File::sync_data`], and the file's times, too (`fsync`).
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub fn sync_all(&self) -> Result<()> {
        self.sync(SyncKind::All, 0..FILE_BYTES_MAX)
    }

    /// As [`File::sync_data`], of the `len` bytes at byte `position`, and perhaps more.
    ///
    /// # Errors
    /// As [`File::sync_data`]; and [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput).
    pub fn sync_range(&self, position: u64, len: u64) -> Result<()> {
        check_range(position, len)?;
        self.sync(SyncKind::Data, position..position + len)
    }

    /// Starts writing back the file's dirty pages, and waits for none of them. It makes nothing durable.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked). The next sync reports failures.
    pub fn write_back(&self) -> Result<()> {
        self.check_process()?;
        let Handle { shared, mapping, .. } = &*self.handle;
        shared.filemap.supply.writeback.start(mapping, PageIndex(0)..PageIndex(INDICES_MAX));
        Ok(())
    }

    /// Bytes of the file that the cache has and the file does not, in whole pages, those on their way among them.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn dirty_bytes(&self) -> Result<u64> {
        self.check_process()?;
        Ok(self.handle.mapping.writeback().dirty_pages().total() * PAGE_SIZE as u64)
    }

    /// Whether the handle may change the file.
    pub fn is_writable(&self) -> bool {
        self.handle.access.writes
    }

    fn sync(&self, kind: SyncKind, range: Range<u64>) -> Result<()> {
        self.check_process()?;
        let Handle { shared, mapping, cursor, .. } = &*self.handle;
        let pages = PageIndex::of_byte(range.start)..PageIndex(pages_of_bytes(range.end));
        let range = SyncRange { kind, pages: &pages };
        let failed = |failed| Repr::Sync { source: Box::new(failed) }.into();
        shared.filemap.supply.writeback.sync(mapping, range, cursor).map_err(failed)
    }

    fn make_durable(&self, durability: Durability, range: Range<u64>) -> Result<()> {
        match durability {
            _ if range.is_empty() => Ok(()),
            Durability::OnSync => Ok(()),
            Durability::Data => self.sync(SyncKind::Data, range),
            Durability::All => self.sync(SyncKind::All, range),
        }
    }

    fn write_context<'a>(&'a self, passing: Option<&'a UncachedRead<'a>>) -> WriteContext<'a> {
        let Handle { mapping, access, .. } = &*self.handle;
        WriteContext::new(mapping, self.reader(passing), &self.touched, access.on_pinned)
    }

    #[inline]
    fn check_writes(&self) -> Result<()> {
        self.check_process()?;
        if self.handle.access.writes { Ok(()) } else { Err(Repr::ReadOnly.into()) }
    }

    #[inline]
    fn check_process(&self) -> Result<()> {
        if self.process.is_forked() { Err(Repr::Forked.into()) } else { Ok(()) }
    }
}

/// Pieces that follow each other; `at` bytes of the first have been handed out.
pub(super) struct GatherCursor<'a, 'b> {
    pieces: &'a [IoSlice<'b>],
    at: usize,
}

impl<'a, 'b> GatherCursor<'a, 'b> {
    pub fn of(pieces: &'a [IoSlice<'b>]) -> Self {
        Self { pieces, at: 0 }
    }

    /// The next bytes, for byte `position` of the file, so that each page is written once: one piece up to the end of
    /// a page, or the parts that several pieces have of one page, in `page`. Empty: nothing is left.
    pub fn next<'p>(&mut self, position: u64, page: &'p mut [u8; PAGE_SIZE]) -> &'p [u8]
    where
        'a: 'p,
    {
        self.pass_ended();
        let to_page_end = PAGE_SIZE - position as usize % PAGE_SIZE;
        let left = self.first().len();
        if self.pieces.len() <= 1 {
            return self.take(left);
        }
        if left >= to_page_end {
            return self.take(left - (left - to_page_end) % PAGE_SIZE);
        }
        let mut len = 0;
        while len < to_page_end && !self.pieces.is_empty() {
            let some = self.take(self.first().len().min(to_page_end - len));
            page[len..len + some.len()].copy_from_slice(some);
            len += some.len();
            self.pass_ended();
        }
        &page[..len]
    }

    fn pass_ended(&mut self) {
        while let Some(piece) = self.pieces.first()
            && self.at == piece.len()
        {
            (self.pieces, self.at) = (&self.pieces[1..], 0);
        }
    }

    fn first(&self) -> &'a [u8] {
        self.pieces.first().map_or(&[], |piece| &piece[self.at..])
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let taken = &self.first()[..len];
        self.at += len;
        taken
    }
}

#[inline]
pub(super) fn check_range(position: u64, len: u64) -> Result<()> {
    if position <= FILE_BYTES_MAX && len <= FILE_BYTES_MAX - position {
        return Ok(());
    }
    let text = format!(
        "a file cannot have {len} bytes at byte {position}: they would reach beyond byte {FILE_BYTES_MAX}, the largest \
         size of a file; begin further to the front, or ask for less"
    );
    Err(Repr::InvalidInput(text).into())
}

//! MemFile: a file of memory, as tmpfs has them, in the memory of a cache.
//!
//! ```text
//!   mem_file(options) ----> MemFile --clone--> MemFile          handles of one file; each has a position of its own
//!                              |
//!                              v
//!                           mapping without a device            gone, with its pages, when the last handle is
//! ```
//!
//! A [`MemFile`] is sparse: bytes that were not written read as zeros and take no memory. It grows by writes, within
//! the cache's memory and its pool's limit. Its pages stay until they are punched, cut off, or the last handle
//! is dropped; the cache evicts files' pages for them. A smaller bound ([`Cache::resize`]) takes nothing of them
//! either: the excess is slack. Pinned bytes live on with their pins.
//!
//! It has no name in any file system, and viewers cannot open it. `shmem/` has the steps of a request.
//!
//! Invariants:
//!  1. An error is returned only if not one byte was read or written; otherwise their number.
//!  2. No call of a forked child reaches the arena or a lock.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use crate::arena::{CellNumber, GrownView, OwnedView};
use crate::error::{Error, Repr, Result};
use crate::filemap::{FileView, HitStop, Hits, OnPinned, StreamPositions, WriteContext, read_hits_into};
use crate::folio::Pinned;
use crate::mapping::{Mapping, MemoryPages, SeekTarget, TreeCounts};
use crate::shmem::{BufferList, NewMemory, OneBuffer, Target};
use crate::stats::Counters;
use crate::sys::fork::ForkGuard;
use crate::units::{FILE_BYTES_MAX, MappingId, Order, PAGE_SIZE, PoolNumber};

use super::pool::{Pool, PoolShare};
use super::write::{GatherCursor, check_range};
use super::{Cache, CacheInner};

/// How a memory file is made; see [`Cache::mem_file`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MemFileOptions {
    /// Length of the file in bytes, all of it a hole at first. The default is 0.
    pub size: u64,
    /// Name of the file in errors and in [`MemFile`]'s `Debug`; need not be unique. The default is "memory file".
    pub name: Option<String>,
    /// The largest folio that is made of its pages, as log2 of pages, 0 to 9; larger values mean 9. The default is the
    /// cache's ([`Builder::folio_order_max`](crate::Builder::folio_order_max)), and it is never more than that.
    pub folio_order_max: Option<u8>,
    /// How writes, cuts and punches treat pinned bytes.
    pub on_pinned: OnPinned,
    /// Whether its pages stay in memory also if the cache has a spill file
    /// ([`Builder::spill`](crate::Builder::spill)). The default is that they may go there.
    pub unevictable: bool,
}

impl MemFileOptions {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets [`MemFileOptions::size`].
    #[must_use]
    pub fn size(mut self, bytes: u64) -> Self {
        self.size = bytes;
        self
    }
    /// Sets [`MemFileOptions::name`].
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }
    /// Sets [`MemFileOptions::folio_order_max`].
    #[must_use]
    pub fn folio_order_max(mut self, order: u8) -> Self {
        self.folio_order_max = Some(order);
        self
    }
    /// Sets [`MemFileOptions::on_pinned`].
    #[must_use]
    pub fn on_pinned(mut self, on_pinned: OnPinned) -> Self {
        self.on_pinned = on_pinned;
        self
    }
    /// Sets [`MemFileOptions::unevictable`].
    #[must_use]
    pub fn unevictable(mut self, unevictable: bool) -> Self {
        self.unevictable = unevictable;
        self
    }
}

/// Numbers of a memory file, in pages of 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct MemFileStats {
    /// Pages with bytes, in memory.
    pub data_pages: u64,
    /// Pages with memory, and no bytes yet: they read as zeros.
    pub allocated_pages: u64,
    /// Pages with their bytes in the spill file.
    pub spilled_pages: u64,
    /// Pages of its length that take no memory at all.
    pub hole_pages: u64,
}

impl MemFileStats {
    /// Bytes of the cache's memory that the file takes.
    pub fn memory_bytes(&self) -> u64 {
        (self.data_pages + self.allocated_pages) * PAGE_SIZE as u64
    }
}

/// A file of memory, in a [`Cache`]. Clones are handles of the same file, at the same position. All of it takes
/// `&self`, and may be done by many threads at once.
pub struct MemFile {
    // Fields of the hit path, side by side.
    view: OwnedView,
    cell: CellNumber,
    id: MappingId,
    process: ForkGuard,
    counters: Arc<Counters>,
    touched: StreamPositions,
    pub(super) handle: Arc<MemHandle>,
    position: u64,
}

/// State shared by the handles of a memory file; the file ends with the last of them.
pub(super) struct MemHandle {
    pub mapping: Arc<Mapping>,
    /// `None`: the default pool.
    pool: Option<Arc<PoolShare>>,
    name: Arc<str>,
    on_pinned: OnPinned,
    // Last: the cache outlives its memory.
    pub shared: Arc<CacheInner>,
}

impl Drop for MemHandle {
    fn drop(&mut self) {
        if !self.shared.process.is_forked() {
            self.shared.shmem.end(&self.mapping);
        }
    }
}

impl Cache {
    /// Makes a memory file. It takes 256 bytes, and memory for the pages that are written.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it would be larger than a file can be.
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): there is no cell for its record.
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): see there.
    pub fn mem_file(&self, options: MemFileOptions) -> Result<MemFile> {
        self.mem_file_in(options, None)
    }

    fn mem_file_in(&self, options: MemFileOptions, pool: Option<&Arc<PoolShare>>) -> Result<MemFile> {
        self.check_process()?;
        check_range(0, options.size)?;
        let order = Order(options.folio_order_max.unwrap_or(Order::MAX.0)).min(Order::MAX);
        let spills = if options.unevictable {
            None
        } else {
            Some(pool.map_or(PoolNumber::DEFAULT, |pool| pool.number))
        };
        let mapping = self.shared.new_memory(order, spills)?;
        mapping.set_size(options.size);
        let name = Arc::from(options.name.as_deref().unwrap_or("memory file"));
        let (shared, on_pinned) = (Arc::clone(&self.shared), options.on_pinned);
        Ok(MemFile::new(Arc::new(MemHandle { mapping, pool: pool.cloned(), name, on_pinned, shared })))
    }
}

impl Pool {
    /// As [`Cache::mem_file`]; the pool is charged for the file's pages.
    ///
    /// # Errors
    /// As there.
    pub fn mem_file(&self, options: MemFileOptions) -> Result<MemFile> {
        self.cache().mem_file_in(options, Some(self.share()))
    }
}

impl CacheInner {
    /// `spills`: the pool that is charged when folios return from the spill file.
    fn new_memory(&self, folio_order_max: Order, spills: Option<PoolNumber>) -> Result<Arc<Mapping>> {
        self.with_record(|| {
            let mut table = self.table.lock();
            let id = table.next_id(&self.filemap);
            self.shmem.new_mapping(NewMemory { id, folio_order_max, spills, process: self.process })
        })
    }
}

impl MemFile {
    fn new(handle: Arc<MemHandle>) -> Self {
        let (shared, mapping) = (&handle.shared, &handle.mapping);
        Self {
            view: shared.filemap.arena.owned_view(),
            cell: mapping.index().cell(),
            id: mapping.id(),
            process: shared.process,
            counters: Arc::clone(&shared.filemap.counters),
            touched: StreamPositions::default(),
            position: 0,
            handle,
        }
    }

    #[inline]
    pub(super) fn check_process(&self) -> Result<()> {
        if self.process.is_forked() { Err(Repr::Forked.into()) } else { Ok(()) }
    }

    // ---- reading --------------------------------------------------------------------------------

    /// Reads up to `buffer.len()` bytes at byte `position` and returns how many were read: all of them, or fewer at
    /// the end of the file. 0 means the end of the file, or an empty buffer. Holes read as zeros, and take no memory.
    ///
    /// A read of written bytes takes no lock, makes no system call and stores nothing that other threads look at.
    /// A read of a hole takes the file's index lock briefly, once however large. Waits only for a call that is
    /// populating a page of the range.
    ///
    /// A read of bytes in the spill file ([`Builder::spill`](crate::Builder::spill)) brings them back into memory, and
    /// waits for that and for the device. If nothing that is in memory can go, since the spill file is full, say, they
    /// are read where they are, and stay there: bytes that were written can be read however short memory is. Each such
    /// call reads the device, by way of 512 KiB of the heap, or of three times the largest folio if these are packed;
    /// 8 MiB for all threads of a cache, which wait for each other.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked); [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): a folio is
    /// held more often than can be. [`ErrorKind::Io`](crate::ErrorKind::Io): the spill file cannot be read.
    /// Nothing was read then, and all bytes are where they were.
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.check_process()?;
        if buffer.is_empty() || position >= FILE_BYTES_MAX {
            return Ok(0);
        }
        let len = buffer.len();
        let touched = &self.touched;
        let touch =
            move |grown: GrownView<'_>, frame| touched.note(grown, frame, position..position + len as u64);
        let file = FileView { view: &self.view, cell: self.cell, id: self.id };
        let hits = read_hits_into(file, position, buffer, touch);
        if hits.stopped == HitStop::Full {
            self.counters.add_hit(hits.bytes as u64);
            return Ok(hits.bytes);
        }
        self.read_slowly(buffer, position, hits)
    }

    #[inline(never)]
    fn read_slowly(&self, buffer: &mut [u8], position: u64, hits: Hits) -> Result<usize> {
        let (done, why) = (hits.bytes, hits.stopped);
        let bytes = match why {
            // Such a read is over, though the file be longer by now.
            HitStop::EndOfFile(_) if done > 0 => done,
            _ => {
                let mut target = OneBuffer::from(buffer, done);
                let read = self.shmem_read(&mut target, position + done as u64, Some(why));
                done + if done > 0 { read.unwrap_or(0) } else { read? }
            }
        };
        self.counters.add_hit(bytes as u64);
        self.touched.remember(position, position + bytes as u64);
        Ok(bytes)
    }

    fn shmem_read(&self, target: &mut impl Target, position: u64, why: Option<HitStop>) -> Result<usize> {
        let MemHandle { shared, mapping, .. } = &*self.handle;
        shared.shmem.read(mapping, position, target, why).map_err(|error| self.explain(error))
    }

    /// As [`MemFile::read_at`] into the buffers of `pieces`, one after the other.
    ///
    /// # Errors
    /// As [`MemFile::read_at`].
    pub fn read_vectored_at(&self, pieces: &mut [IoSliceMut<'_>], position: u64) -> Result<usize> {
        self.check_process()?;
        if position >= FILE_BYTES_MAX {
            return Ok(0);
        }
        let bytes = self.shmem_read(&mut BufferList::of(pieces), position, None)?;
        self.counters.add_hit(bytes as u64);
        Ok(bytes)
    }

    /// Reads exactly `buffer.len()` bytes at `position`.
    ///
    /// # Errors
    /// As [`MemFile::read_at`]; and [`ErrorKind::UnexpectedEof`](crate::ErrorKind::UnexpectedEof) if the file
    /// ends before. The buffer's content is unspecified then.
    pub fn read_exact_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.read_at(&mut buffer[done..], position.saturating_add(done as u64))? {
                0 => {
                    let (len, size) = (buffer.len(), self.len());
                    return Err(Repr::UnexpectedEof { position, len, size }.into());
                }
                bytes => done += bytes,
            }
        }
        Ok(())
    }

    /// Pins `len` bytes at `position`, or as many as the file has there, without a copy. They stay as they are until
    /// the [`Pinned`] is dropped, even if the file is written. Holes are shared zeros, and nothing is pinned there.
    ///
    /// # Errors
    /// As [`MemFile::read_at`]; [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory) if the range does not fit beside
    /// the bytes that are pinned already, or a page in the spill file finds no memory, since nothing that is there can
    /// go.
    pub fn pin(&self, position: u64, len: usize) -> Result<Pinned> {
        self.check_process()?;
        let MemHandle { shared, mapping, .. } = &*self.handle;
        let pinned = shared.shmem.pin(mapping, position.min(FILE_BYTES_MAX), len, self.process);
        pinned.map_err(|error| self.explain(error))
    }

    // ---- writing --------------------------------------------------------------------------------

    /// Writes `bytes` at byte `position`, and returns how many were written: all of them, or fewer because memory ran
    /// out after some (the next call returns the error). Past the end the file grows by a hole.
    ///
    /// Every reader sees them when it returns, each 4 KiB page whole. It may wait for memory that other files' pages
    /// have to leave, and reads nothing. Over bytes written before it takes no lock but that of the page, and one
    /// that all writers inside the file share.
    ///
    /// # Errors
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): the cache, or the pool, has no page left that can go;
    /// earlier writes are untouched. [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): it would end
    /// behind byte 2^63 - 1. [`ErrorKind::Busy`](crate::ErrorKind::Busy): see [`MemFileOptions::on_pinned`].
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked). Nothing was written then.
    #[inline]
    pub fn write_at(&self, bytes: &[u8], position: u64) -> Result<usize> {
        self.check_process()?;
        check_range(position, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(0);
        }
        let MemHandle { shared, mapping, .. } = &*self.handle;
        if shared.filemap.overwrite(mapping, &self.touched, position, bytes) {
            return Ok(bytes.len());
        }
        self.write_slowly(bytes, position)
    }

    #[inline(never)]
    fn write_slowly(&self, bytes: &[u8], position: u64) -> Result<usize> {
        let written = self.handle.shared.shmem.write(self.write_context(), position, bytes);
        written.map_err(|error| self.explain(error))
    }

    /// Writes all of `bytes` at byte `position`.
    ///
    /// # Errors
    /// As [`MemFile::write_at`]; some of the bytes may have been written.
    pub fn write_all_at(&self, bytes: &[u8], position: u64) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            done += self.write_at(&bytes[done..], position + done as u64)?;
        }
        if bytes.is_empty() { self.write_at(bytes, position).map(drop) } else { Ok(()) }
    }

    /// As [`MemFile::write_at`] of the bytes of all `pieces` in turn, also where several lie in one page.
    ///
    /// # Errors
    /// As [`MemFile::write_at`].
    pub fn write_vectored_at(&self, pieces: &[IoSlice<'_>], position: u64) -> Result<usize> {
        self.check_process()?;
        check_range(position, pieces.iter().map(|piece| piece.len() as u64).sum())?;
        let (mut done, mut page, mut rest) = (0, [0; PAGE_SIZE], GatherCursor::of(pieces));
        loop {
            let bytes = rest.next(position + done as u64, &mut page);
            match self.write_at(bytes, position + done as u64) {
                Ok(written) if written < bytes.len() || bytes.is_empty() => return Ok(done + written),
                Ok(written) => done += written,
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done), // the next call tells
            }
        }
    }

    /// Writes `bytes` at the end of the file, and returns their position. Appends at once do not mix.
    ///
    /// # Errors
    /// As [`MemFile::write_at`]; but some of the bytes may stand at the end of the file then ([`MemFile::len`] says).
    pub fn append(&self, bytes: &[u8]) -> Result<u64> {
        self.check_process()?;
        if bytes.is_empty() {
            return Ok(self.len());
        }
        let appended = self.handle.shared.shmem.append(self.write_context(), bytes);
        let (position, _, outcome) = appended.map_err(|error| self.explain(error))?;
        outcome.map(|()| position).map_err(|error| self.explain(error))
    }

    // ---- size and holes -------------------------------------------------------------------------

    /// Makes the file `bytes` long: cuts it off there and frees the rest, or extends it by a hole. Bytes that
    /// were pinned behind the new end stay with their pins. Waits for writes in progress.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput), [`ErrorKind::Busy`](crate::ErrorKind::Busy),
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked): as [`MemFile::write_at`].
    /// [`ErrorKind::NoMemory`](crate::ErrorKind::NoMemory): a folio at the new end is pinned, and there is no page for
    /// the copy of the part that stays; the size is unchanged.
    pub fn set_len(&self, bytes: u64) -> Result<()> {
        self.check_process()?;
        check_range(0, bytes)?;
        let MemHandle { shared, mapping, on_pinned, .. } = &*self.handle;
        shared.shmem.set_len(mapping, bytes, *on_pinned).map_err(|error| self.explain(error))
    }

    /// Makes `len` bytes at byte `position` a hole: they read as zeros, and unpinned pages that lie wholly in them
    /// are freed. The size stays; the part of the range behind it is ignored. Waits as [`MemFile::set_len`].
    ///
    /// # Errors
    /// As [`MemFile::set_len`]; some of the range may be zeros then.
    pub fn punch_hole(&self, position: u64, len: u64) -> Result<()> {
        self.check_process()?;
        check_range(position, len)?;
        let MemHandle { shared, mapping, on_pinned, .. } = &*self.handle;
        let punched = shared.shmem.punch(mapping, position..position + len, *on_pinned);
        punched.map_err(|error| self.explain(error))
    }

    /// The first byte from `position` on that lies in a folio that was written to. `None`: there is none before the
    /// end of the file. Takes the file's index lock, some thousand folios at a time.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn seek_data(&self, position: u64) -> Result<Option<u64>> {
        self.check_process()?;
        Ok(self.handle.shared.shmem.seek(&self.handle.mapping, position, SeekTarget::Data))
    }

    /// The first byte from `position` on that lies in no data; the end of the file counts as such. `None`: `position`
    /// is not before the end. As [`MemFile::seek_data`].
    ///
    /// # Errors
    /// As there.
    pub fn seek_hole(&self, position: u64) -> Result<Option<u64>> {
        self.check_process()?;
        Ok(self.handle.shared.shmem.seek(&self.handle.mapping, position, SeekTarget::Hole))
    }

    // ---- numbers --------------------------------------------------------------------------------

    /// Length of the file in bytes; in a forked child 0.
    pub fn len(&self) -> u64 {
        if self.process.is_forked() { 0 } else { self.handle.mapping.size() }
    }
    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The file's name.
    pub fn name(&self) -> &str {
        &self.handle.name
    }
    /// The name of the pool that is charged for it.
    pub fn pool(&self) -> &str {
        self.handle.pool.as_ref().map_or("default", |share| &share.name)
    }

    /// How its pages are kept. Takes the file's index lock, some thousand folios at a time; while others change the
    /// file the numbers are of no one moment.
    ///
    /// # Errors
    /// [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn stats(&self) -> Result<MemFileStats> {
        self.check_process()?;
        let mapping = &self.handle.mapping;
        let MemoryPages { data, allocated, spilled } = mapping.memory_pages();
        let hole_pages = mapping.size_pages().saturating_sub(data + allocated + spilled);
        Ok(MemFileStats { data_pages: data, allocated_pages: allocated, spilled_pages: spilled, hole_pages })
    }

    /// Counts of the file's index. Waits for nothing.
    pub(super) fn tree_counts(&self) -> TreeCounts {
        self.handle.mapping.index().tree_counts()
    }

    pub(super) fn pool_number(&self) -> PoolNumber {
        self.handle.pool.as_ref().map_or(PoolNumber::DEFAULT, |share| share.number)
    }

    pub(super) fn write_context(&self) -> WriteContext<'_> {
        let MemHandle { mapping, on_pinned, .. } = &*self.handle;
        WriteContext::of_memory(mapping, self.pool_number(), &self.touched, *on_pinned)
    }

    pub(super) fn explain(&self, error: Error) -> Error {
        if !error.is_of_memory() {
            return error;
        }
        let MemHandle { mapping, name, .. } = &*self.handle;
        let trouble = mapping.backing().spill().and_then(|spill| spill.trouble());
        let (name, source) = (Arc::clone(name), Box::new(error));
        match trouble {
            Some(trouble) => Repr::Spill { name, trouble: trouble.to_string(), source }.into(),
            None => Repr::MemFile { name, source }.into(),
        }
    }
}

impl fmt::Debug for MemHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemHandle").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for MemFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("MemFile");
        text.field("name", &self.handle.name).field("len", &self.len()).field("position", &self.position);
        text.finish_non_exhaustive()
    }
}

impl Clone for MemFile {
    fn clone(&self) -> Self {
        let mut clone = Self::new(Arc::clone(&self.handle));
        clone.position = self.position;
        clone
    }
}

impl Read for MemFile {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.read_at(buffer, self.position)?;
        self.position += bytes as u64;
        Ok(bytes)
    }
    fn read_vectored(&mut self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let bytes = self.read_vectored_at(pieces, self.position)?;
        self.position += bytes as u64;
        Ok(bytes)
    }
}

impl Write for MemFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.write_at(bytes, self.position)?;
        self.position += written as u64;
        Ok(written)
    }
    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.write_vectored_at(pieces, self.position)?;
        self.position += written as u64;
        Ok(written)
    }
    /// Does nothing: there is no other place where the bytes could be.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for MemFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.check_process()?;
        let (base, offset) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::Current(offset) => (self.position, offset),
            SeekFrom::End(offset) => (self.len(), offset),
        };
        let position = base.checked_add_signed(offset).filter(|&position| position <= FILE_BYTES_MAX);
        self.position = position.ok_or_else(|| {
            let text = format!(
                "cannot seek {offset} bytes from byte {base}: positions go from 0 to {FILE_BYTES_MAX}"
            );
            io::Error::from(Error::from(Repr::InvalidInput(text)))
        })?;
        Ok(self.position)
    }
}

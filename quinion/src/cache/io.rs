//! The shapes of the standard library: [`Read`], [`Write`] and [`Seek`] of a [`File`] and of a reference to one,
//! vectored reads, the path and the metadata.
//!
//! A `File` has one position, which [`Read`], [`Write`] and [`Seek`] move; the calls whose names end in `_at` do not
//! use it. Threads that share a `File` by reference share the position: two reads at the same time may read the same
//! bytes. Give each thread a clone.

use std::io::{self, IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use crate::backend::Attributes;
use crate::error::{Error, Repr, Result};
use crate::units::FILE_BYTES_MAX;

use super::{Coherence, File, WriteOptions};

/// Metadata of a file, from the file system; see [`File::metadata`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metadata {
    attributes: Attributes,
    len: u64,
}

impl Metadata {
    /// In bytes: as the file system says, or more where bytes were appended here and not written back yet.
    #[expect(clippy::len_without_is_empty, reason = "as std::fs::Metadata")]
    pub fn len(&self) -> u64 {
        self.len
    }
    /// When the content changed last, as the file system has it.
    pub fn modified(&self) -> SystemTime {
        let nanoseconds = self.attributes.version.modified;
        let distance = Duration::from_nanos(nanoseconds.unsigned_abs());
        match nanoseconds {
            0.. => SystemTime::UNIX_EPOCH + distance,
            _ => SystemTime::UNIX_EPOCH - distance,
        }
    }
    /// The number of the device, as `stat` has it; of a backend of your own, the one it reports.
    pub fn dev(&self) -> u64 {
        self.attributes.identity.device
    }
    /// The number of the inode, as `stat` has it; of a backend of your own, the one it reports.
    pub fn ino(&self) -> u64 {
        self.attributes.identity.inode
    }
}

impl File {
    /// As [`File::read_at`] into several buffers in turn, until one is not filled. See also [`File::read_batch`].
    ///
    /// # Errors
    /// As [`File::read_at`].
    pub fn read_vectored_at(&self, buffers: &mut [IoSliceMut<'_>], position: u64) -> Result<usize> {
        let mut done = 0;
        for buffer in buffers {
            match self.read_at(buffer, position.saturating_add(done as u64)) {
                Ok(bytes) => {
                    done += bytes;
                    if bytes < buffer.len() {
                        break; // the end of the file, or something that the next call tells
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break, // the next call tells
            }
        }
        Ok(done)
    }

    /// The path by which the file was opened, and which it may have no more; `None` of one that was adopted, or is
    /// behind a backend of your own.
    pub fn path(&self) -> Option<&Path> {
        self.handle.path.as_deref()
    }

    /// The file's metadata, from the file system; [`File::len`] does not ask it. The size is that of the cache: before
    /// write-back the file may have another. Waits for the file system. If the file has changed, its cached pages
    /// are dropped, as by [`File::revalidate`]; not those of a handle with [`Coherence::Immutable`].
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind::Io), [`ErrorKind::Forked`](crate::ErrorKind::Forked).
    pub fn metadata(&self) -> Result<Metadata> {
        if self.process.is_forked() {
            return Err(Repr::Forked.into());
        }
        if self.handle.access.coherence != Coherence::Immutable {
            self.revalidate()?;
        }
        let attributes = self.handle.mapping.backend().attributes().map_err(Repr::Attributes)?;
        Ok(Metadata { attributes, len: self.len() })
    }

    fn read_on(&self, read: impl FnOnce(u64) -> Result<usize>) -> io::Result<usize> {
        let position = self.position.load(Ordering::Relaxed);
        let bytes = read(position)?;
        self.position.store(position + bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

impl Read for &File {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read_on(|position| self.read_at(buffer, position))
    }
    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.read_on(|position| self.read_vectored_at(buffers, position))
    }
}

/// Writes at the handle's position; if the handle appends, at the end of the file.
impl Write for &File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.handle.access.appends {
            return self.read_on(|position| self.write_at(bytes, position));
        }
        let (position, written, outcome) = self.append_some(bytes, WriteOptions::default())?;
        if written == 0 {
            outcome?;
        }
        self.position.store(position + written as u64, Ordering::Relaxed);
        Ok(written)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.handle.access.appends {
            let first = pieces.iter().find(|piece| !piece.is_empty());
            return self.write(first.map_or(&[], |piece| piece));
        }
        self.read_on(|position| self.write_vectored_at(pieces, position))
    }

    /// Does nothing: the written bytes are in the cache already. [`File::sync_data`] makes them durable.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for &File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, offset) = match to {
            SeekFrom::Start(position) => (position, 0),
            SeekFrom::Current(offset) => (self.position.load(Ordering::Relaxed), offset),
            SeekFrom::End(offset) => {
                self.revalidate()?;
                (self.len(), offset)
            }
        };
        let position = base.checked_add_signed(offset).filter(|&position| position <= FILE_BYTES_MAX);
        let position = position.ok_or_else(|| {
            let text = format!(
                "cannot seek {offset} bytes from byte {base}: positions go from 0 to {FILE_BYTES_MAX}"
            );
            io::Error::from(Error::from(Repr::InvalidInput(text)))
        })?;
        self.position.store(position, Ordering::Relaxed);
        Ok(position)
    }
}

impl Read for File {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self).read_vectored(buffers)
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }
    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(pieces)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        (&*self).seek(to)
    }
}

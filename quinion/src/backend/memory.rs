//! Memory: a file that is bytes in this process.
//!
//! For tests, and for a caller that wants the cache's folios over bytes that come from nowhere near a device. Fills
//! complete inside `submit`, flushes inside `flush`. There is nothing to make durable: a sync has nothing to do.
//!
//! Invariant: a fill sees the bytes of one moment, never a mixture of two contents.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Attributes, Backend, Fill, Flush, FlushError, Identity, SyncKind, Version};

/// [`Identity::device`] of memory files: no device has this number.
const DEVICE: u64 = u64::MAX;

static LAST_INODE: AtomicU64 = AtomicU64::new(0);

/// A file that is bytes in memory. Each is a file of its own.
pub struct MemoryFile {
    inode: u64,
    content: RwLock<Content>,
    reads: AtomicU64,
    read_bytes: AtomicU64,
}

struct Content {
    bytes: Vec<u8>,
    version: i64,
}

impl Content {
    fn reach(&mut self, size: usize) -> io::Result<()> {
        let more = size.saturating_sub(self.bytes.len());
        self.bytes.try_reserve(more).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if more > 0 {
            self.bytes.resize(size, 0);
        }
        Ok(())
    }
}

impl MemoryFile {
    /// A file with these bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            inode: LAST_INODE.fetch_add(1, Ordering::Relaxed) + 1,
            content: RwLock::new(Content { bytes: bytes.into(), version: 0 }),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        }
    }

    /// Gives it other bytes, and a new version.
    pub fn set_content(&self, bytes: impl Into<Vec<u8>>) {
        self.change(|content| *content = bytes.into());
    }

    /// Cuts it or extends it with zeros, and gives it a new version.
    pub fn set_size(&self, size: usize) {
        self.change(|content| content.resize(size, 0));
    }

    /// Changes its bytes in place, and gives it a new version.
    pub fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut content = self.write();
        change(&mut content.bytes);
        content.version += 1;
    }

    /// Gives it another version number, its bytes unchanged: as if it had been touched.
    pub fn set_version(&self, version: i64) {
        self.write().version = version;
    }

    /// Fills completed, the "device reads" of this file.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Bytes delivered.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Copies as many bytes at `position` as there are and fit; how many. Counted as a device read.
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> usize {
        self.copy_out(position, buffer.len(), |bytes| buffer[..bytes.len()].copy_from_slice(bytes))
    }

    /// Writes `bytes` at `position`, with zeros before it where the file ended, and gives the file a new version.
    ///
    /// # Errors
    /// There is no memory for a file of this size; nothing was written.
    pub fn write_at(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        self.copy_in(position, bytes.len(), |place| place.copy_from_slice(bytes))
    }

    fn copy_out(&self, position: u64, length: usize, copy: impl FnOnce(&[u8])) -> usize {
        let content = self.read();
        let from = usize::try_from(position).unwrap_or(usize::MAX).min(content.bytes.len());
        let bytes = (content.bytes.len() - from).min(length);
        copy(&content.bytes[from..from + bytes]);
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        bytes
    }

    fn copy_in(&self, position: u64, length: usize, copy: impl FnOnce(&mut [u8])) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        let mut content = self.write();
        let from = usize::try_from(position).ok();
        let to = from.and_then(|from| from.checked_add(length)).ok_or(io::ErrorKind::FileTooLarge)?;
        content.reach(to)?;
        copy(&mut content.bytes[to - length..to]);
        content.version += 1;
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, Content> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }
    fn write(&self) -> RwLockWriteGuard<'_, Content> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for MemoryFile {
    fn name(&self) -> &'static str {
        "memory"
    }
    fn attributes(&self) -> io::Result<Attributes> {
        let content = self.read();
        let version =
            Version { modified: content.version, changed: content.version, settled: true, steps: true };
        let identity = Identity { device: DEVICE, inode: self.inode, born: 0 };
        Ok(Attributes { identity, version, size: content.bytes.len() as u64 })
    }
    fn attributes_may_wait(&self) -> bool {
        false
    }
    fn submit(&self, fills: Vec<Fill>) {
        for mut fill in fills {
            let bytes = self.copy_out(fill.position(), fill.len(), |bytes| fill.write(0, bytes));
            fill.complete(Ok(bytes));
        }
    }
    fn can_write(&self) -> bool {
        true
    }
    fn flush(&self, flushes: Vec<Flush>) {
        for flush in flushes {
            let outcome = self.copy_in(flush.position(), flush.len(), |place| flush.read(0, place));
            flush.complete(outcome.map_err(|error| FlushError { written: 0, error }));
        }
    }
    fn sync(&self, _kind: SyncKind, _range: Range<u64>) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let size = usize::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mut content = self.write();
        content.reach(size)?;
        content.bytes.truncate(size);
        content.version += 1;
        Ok(())
    }
    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        let mut content = self.write();
        let size = content.bytes.len();
        let within = |byte| usize::try_from(byte).map_or(size, |byte| byte.min(size));
        let (from, to) = (within(range.start), within(range.end));
        if from < to {
            content.bytes[from..to].fill(0);
            content.version += 1;
        }
        Ok(())
    }
}

impl fmt::Debug for MemoryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let content = self.read();
        f.debug_struct("MemoryFile")
            .field("size", &content.bytes.len())
            .field("version", &content.version)
            .finish_non_exhaustive()
    }
}

//! Memory: a file that is bytes in this process.
//!
//! For tests, and for whoever wants the cache's folios over bytes that come
//! from nowhere near a device. Fills complete inside `submit`.
//!
//! Invariant: a fill sees the bytes of one moment, never a mixture of two contents.

use std::fmt;
use std::io;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Attributes, Backend, Fill, Identity, Version};
use crate::sync::lock::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What [`Identity::device`] of a memory file is: no device has this number.
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

    /// Copies what there is of the fill's range. Returns how many bytes.
    pub(super) fn copy_to(&self, fill: &mut Fill) -> usize {
        let content = self.read();
        let from = usize::try_from(fill.position()).unwrap_or(usize::MAX).min(content.bytes.len());
        let bytes = (content.bytes.len() - from).min(fill.len());
        fill.write(0, &content.bytes[from..from + bytes]);
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        bytes
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
        let version = Version { modified: content.version, changed: content.version, settled: true };
        let identity = Identity { device: DEVICE, inode: self.inode, born: 0 };
        Ok(Attributes { identity, version, size: content.bytes.len() as u64 })
    }
    fn submit(&self, fills: Vec<Fill>) {
        for mut fill in fills {
            let bytes = self.copy_to(&mut fill);
            fill.complete(Ok(bytes));
        }
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

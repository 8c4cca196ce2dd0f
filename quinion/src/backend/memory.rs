//! Memory: a file that is a vector of bytes, for tests and for data that never was on a disk.
//!
//! It is the shortest backend there can be, and so the best one to read first:
//!
//! ```text
//!   attributes   its number is its identity, its generation is its version
//!   submit       for each fill: copy what the vector has of it, complete
//! ```
//!
//! A fill is complete before `submit` returns, so nobody ever waits for this
//! backend and there is nothing to reap.
//!
//! Invariants:
//!  1. No two of them have the same identity, so no two share pages.
//!  2. One fill sees one content: the vector is not replaced while it is copied from.
//!  3. The lock of the content is not held while a fill is completed.
//!
//! Not an invariant: that two fills see the same content. As with a file on a
//! disk, the cache finds out at the next open, or when it is told to look.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use super::{Attributes, Backend, Fill, Identity, Version};

static NUMBER: AtomicU64 = AtomicU64::new(1);

/// A file in memory. Its content may be replaced; an open of it in a cache then sees the new content.
#[derive(Debug)]
pub struct MemoryFile {
    number: u64,
    content: RwLock<(Vec<u8>, i64)>,
    reads: AtomicU64,
}

impl MemoryFile {
    /// A file of these bytes, different from every other.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self { number, content: RwLock::new((bytes.into(), 0)), reads: AtomicU64::new(0) }
    }

    /// Replaces the content.
    pub fn set(&self, bytes: impl Into<Vec<u8>>) {
        let mut content = self.content.write().unwrap_or_else(PoisonError::into_inner);
        *content = (bytes.into(), content.1 + 1);
    }

    /// How many fills have been answered.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Backend for MemoryFile {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn attributes(&self) -> io::Result<Attributes> {
        let content = self.content.read().unwrap_or_else(PoisonError::into_inner);
        Ok(Attributes {
            identity: Identity { device: u64::MAX, inode: self.number, born: 0 },
            version: Version { modified: content.1, changed: content.1, settled: true },
            size: content.0.len() as u64,
        })
    }

    fn submit(&self, fills: Vec<Fill>) {
        for mut fill in fills {
            let content = self.content.read().unwrap_or_else(PoisonError::into_inner);
            let size = content.0.len() as u64;
            let (from, to) = (fill.position().min(size), (fill.position() + fill.len() as u64).min(size));
            fill.write(0, &content.0[from as usize..to as usize]);
            drop(content);
            self.reads.fetch_add(1, Ordering::Relaxed);
            fill.complete(Ok((to - from) as usize));
        }
    }
}

//! Pages: the source of the cache's bytes, which is the connection that asks for them.
//!
//! ```text
//!   xRead of a page --> read(real file, cached file) --miss--> PageSource::fill_here --> xRead of the real file
//!                              |                                   on the same thread, under the same lock
//!                              `------hit: copied
//! ```
//!
//! The cache opens no file by itself: by the rule of `fcntl` locks, the close of any descriptor of a database ends the
//! process's locks on it. And it reads nothing by threads of its own: the thread that wants a page reads it, while its
//! transaction lasts, and with the descriptor of its connection.
//!
//! A read that fails or ends early fails the fill, and the connection asks SQLite's own file again, which knows what an
//! end of file means.

use std::cell::Cell;
use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libsqlite3_sys::{SQLITE_OK, sqlite3_file};
use quinion::File;
use quinion::backend::{Attributes, Backend, Fill, Identity, Version};

/// No database of SQLite's is larger: 2^32 pages of 64 KiB.
pub const SOURCE_BYTES: u64 = 1 << 48;

thread_local! {
    /// The file of the connection for which this thread reads.
    static READER: Cell<*mut sqlite3_file> = const { Cell::new(null_mut()) };
}

/// Copies a page out of the cache, or has it read from `real` first. Returns whether the buffer has it.
///
/// # Safety
/// `real` is an open file of SQLite's, which this thread may read.
pub unsafe fn read(real: NonNull<sqlite3_file>, file: &File, buffer: &mut [u8], position: u64) -> bool {
    let before = READER.replace(real.as_ptr());
    let copied = file.read_at(buffer, position);
    READER.set(before);
    copied.is_ok_and(|copied| copied == buffer.len())
}

#[derive(Debug)]
pub struct PageSource {
    identity: Identity,
    /// Counts the pages that are read from the file, of all generations of a database.
    fills: Arc<AtomicU64>,
}

impl PageSource {
    pub fn new(fills: Arc<AtomicU64>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut digest = *b"quinion-sqlite-\0........";
        digest[16..].copy_from_slice(&number.to_le_bytes());
        Self { identity: Identity::of_digest(digest), fills }
    }
}

impl Backend for PageSource {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn attributes(&self) -> io::Result<Attributes> {
        let version = Version { modified: 0, changed: 0, settled: true, steps: true };
        Ok(Attributes { identity: self.identity, version, size: SOURCE_BYTES })
    }

    fn submit(&self, fills: Vec<Fill>) {
        fills.into_iter().for_each(|fill| self.fill_here(fill));
    }

    fn fills_here(&self, _bytes: usize) -> bool {
        true
    }

    fn fill_here(&self, fill: Fill) {
        self.fills.fetch_add(1, Ordering::Relaxed);
        let filled = fill_from(READER.get(), &fill);
        fill.complete(filled);
    }
}

fn fill_from(real: *mut sqlite3_file, fill: &Fill) -> io::Result<usize> {
    let len = i32::try_from(fill.len()).map_err(io::Error::other)?;
    let position = i64::try_from(fill.position()).map_err(io::Error::other)?;
    // SAFETY: the file is open while `read` lasts, which calls this; the methods of an open file are set.
    let xread =
        unsafe { real.as_ref().and_then(|file| file.pMethods.as_ref()) }.and_then(|methods| methods.xRead);
    let Some(xread) = xread else {
        return Err(io::Error::other("no connection reads on this thread"));
    };
    // SAFETY: this thread alone writes the fill until it is completed, and has so many bytes.
    let code = unsafe { xread(real, fill.as_ptr().cast(), len, position) };
    match code {
        SQLITE_OK => Ok(fill.len()),
        code => Err(io::Error::other(format!("SQLite's file ended or failed, with result code {code}"))),
    }
}

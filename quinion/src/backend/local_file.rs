//! Local file: a file of the kernel's as a backend, read and written by an engine.
//!
//! ```text
//!   Engine::open --> OpenFile (what it is, its flags, its leases) + the engine = LocalFile, a Backend
//! ```
//!
//! What a file is and how it is opened is in `open_file.rs`; how requests reach the kernel is the engine's.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use super::engine::{Engine, EngineShared};
use super::open_file::{FileKind, HERE_BYTES_MAX, IoMode, OpenError, OpenFile, OpenForWrite};
use super::{
    Attributes, Backend, Fill, Flush, FlushError, Leasable, ParkedBackend, ReapMode, ReapOutcome, SyncKind,
    WaitQueue, read_only,
};

impl Engine {
    /// Opens a file or a block device for reading. Does not wait for pipes.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<LocalFile, OpenError> {
        Ok(LocalFile::new(OpenFile::open(path.as_ref())?, Arc::clone(&self.shared)))
    }

    /// As [`Engine::open`], without leaving traces: where this process may, its reads leave the time of the last
    /// access alone; and it does not wait for the lease of another process.
    ///
    /// # Errors
    /// See [`OpenError`]; `EAGAIN`, where there is such a lease.
    pub fn open_unseen(&self, path: impl AsRef<Path>) -> Result<LocalFile, OpenError> {
        Ok(LocalFile::new(OpenFile::open_unseen(path.as_ref())?, Arc::clone(&self.shared)))
    }

    /// Opens a file or a block device for reading and writing; `options` say whether it may be new, and whether
    /// it begins empty. Does not wait for pipes. The name of a new file is durable when its folder has been
    /// synced, which no backend does. As with any program that writes, a process with a limit on the size of files
    /// (`RLIMIT_FSIZE`) is sent `SIGXFSZ` at the limit, and has to ignore it to be told `EFBIG` instead.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_for_writing(
        &self,
        path: impl AsRef<Path>,
        options: OpenForWrite,
    ) -> Result<LocalFile, OpenError> {
        let file = OpenFile::open_for_writing(path.as_ref(), options)?;
        Ok(LocalFile::new(file, Arc::clone(&self.shared)))
    }

    /// Reads a file that another party opened for reading. It is opened once more, so the other's offset and flags
    /// stay as they are. If that cannot be done it is read by the descriptor given, through the kernel's cache.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn adopt(&self, descriptor: OwnedFd) -> Result<LocalFile, OpenError> {
        Ok(LocalFile::new(OpenFile::adopt(descriptor)?, Arc::clone(&self.shared)))
    }
}

/// A regular file or block device, read, and written if it was opened for that, by an [`Engine`](super::Engine).
#[derive(Debug)]
pub struct LocalFile {
    file: Arc<OpenFile>,
    engine: Arc<EngineShared>,
}

impl LocalFile {
    pub(super) fn new(file: OpenFile, engine: Arc<EngineShared>) -> Self {
        Self { file: Arc::new(file), engine }
    }
    fn writing(&self) -> io::Result<()> {
        self.file.writing.as_ref().map(|_| ()).ok_or_else(|| read_only(self.name()))
    }
    /// How it is read and written now. May turn from direct to buffered, once.
    pub fn way(&self) -> IoMode {
        self.file.way()
    }
}

impl AsFd for LocalFile {
    /// The descriptor it is read by. Changing its flags changes how it is read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.descriptor()
    }
}

impl Backend for LocalFile {
    fn name(&self) -> &'static str {
        self.engine.name()
    }
    /// # Panics
    /// If it is not the wait queue of the engine that opened the file.
    fn attach(&self, wait_queue: &Arc<WaitQueue>) {
        self.engine.attach(wait_queue);
    }
    fn is_direct(&self) -> bool {
        self.way() == IoMode::Direct
    }

    fn read_by_kernels_cache(&self) {
        if self.file.writing.is_none() {
            self.file.fall_back();
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.descriptor())
    }
    fn leasable(&self) -> Option<Leasable<'_>> {
        self.file.leasable()
    }
    fn mount(&self) -> Option<u64> {
        self.file.mount
    }
    fn parked(&self) -> Option<ParkedBackend> {
        Some(ParkedBackend::new(&self.engine, &self.file.open))
    }
    fn attributes(&self) -> io::Result<Attributes> {
        self.file.attributes()
    }
    fn attributes_may_wait(&self) -> bool {
        self.file.revalidation_may_wait()
    }
    fn submit(&self, fills: Vec<Fill>) {
        self.engine.submit(&self.file, fills);
    }
    fn submit_with_reap(&self, fills: Vec<Fill>) {
        self.engine.submit_with_reap(&self.file, fills);
    }
    /// A small read by itself: one system call, no queue, and no thread to be woken.
    fn fills_here(&self, bytes: usize) -> bool {
        bytes <= HERE_BYTES_MAX
    }
    fn fill_here(&self, fill: Fill) {
        let outcome = self.file.read_blocking(&fill);
        fill.complete(outcome);
    }
    fn has_capacity(&self, fills: usize) -> bool {
        self.engine.has_capacity(&self.file, fills)
    }
    fn reap(&self, how: ReapMode, done: &mut dyn FnMut() -> bool) -> ReapOutcome {
        self.engine.reap(how, done)
    }
    fn wants_leader(&self) -> bool {
        self.engine.wants_leader()
    }
    fn can_write(&self) -> bool {
        self.file.writing.is_some()
    }
    fn can_grow(&self) -> bool {
        self.file.kind == FileKind::Regular
    }
    /// Asked of local file systems alone: others may have to wait for another machine.
    fn is_removed(&self) -> bool {
        let stat = || rustix::fs::fstat(&self.file.descriptor);
        self.file.kind == FileKind::Regular
            && self.file.clock.local.is_some()
            && stat().is_ok_and(|stat| stat.st_nlink == 0)
    }
    fn flush(&self, flushes: Vec<Flush>) {
        if self.can_write() {
            return self.engine.flush(&self.file, flushes);
        }
        for flush in flushes {
            flush.complete(Err(FlushError { written: 0, error: read_only(self.name()) }));
        }
    }
    /// A last partial page by itself: it goes by calls that block, and a thread that waits for it may make them.
    fn flushes_here(&self, flush: &Flush) -> bool {
        self.can_write() && self.file.tail_of(flush) == Some(0)
    }
    fn flush_here(&self, flush: Flush) {
        let outcome = self.file.write_by_cache(&flush);
        flush.complete(outcome);
    }
    /// Makes all of the file durable: Linux has no call for less.
    fn sync(&self, kind: SyncKind, _range: Range<u64>) -> io::Result<()> {
        self.writing()?;
        self.file.sync(kind)
    }
    /// The system syncs a file by any descriptor of it.
    fn sync_others(&self, kind: SyncKind) -> io::Result<()> {
        self.file.sync(kind)
    }
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.writing()?;
        self.file.set_size(bytes)
    }
    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        self.writing()?;
        self.file.punch(range)
    }
    fn allocate(&self, range: Range<u64>) -> io::Result<()> {
        self.writing()?;
        self.file.allocate(range)
    }
}

//! Serving: the calls of an owner of viewers to a cache besides its public methods, by way of `quinion::internals`
//! alone.
//!
//! | what | of |
//! |---|---|
//! | [`ServedCache`] | the cache: its memory, room for viewers, leases, files that no handle has open |
//! | [`ServedFile`] | a file: its record, pages for a viewer's read, and how far viewers may trust what is cached |
//! | [`CoherenceState`] | what all handles of a file know about changes by others, to be watched and told of |
//! | [`for_viewer`], [`touch`], [`is_same_open`] | an open for a viewer, a page that a viewer has read, one open or two |
//! | [`kept_memory`] | the memory of a viewer's pin |
//!
//! The crate `quinion-owner` shows a cache to other processes. Its viewers read where the cache's memory lies, so they
//! are told of records and pages by their numbers, which public methods never give out.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::arena::{Arena, ArenaError, CellNumber, Validation};
use crate::backend::{Attributes, FileRevision, Identity, ParkedBackend, RevisionOpen};
use crate::error::{Repr, Result};
use crate::filemap::WaitPolicy;
use crate::folio::{KeptMemory, Pinned};
use crate::lease::NoLease;
use crate::readahead::Hint;
use crate::sync::LockWait;
use crate::units::{FILE_BYTES_MAX, FileId, MappingId, PageIndex};

use super::{Cache, Coherence, File, Handle, OpenOptions};

pub use super::coherence::CoherenceState;
pub use crate::filemap::touch;

/// Operations on a cache that has viewers.
pub trait ServedCache {
    /// Where its pages and tables are.
    fn arena(&self) -> &Arena;
    /// Keeps as many groups of viewers' pages of its bound.
    ///
    /// # Errors
    /// There is no room for them.
    fn reserve_viewers(&self, groups: usize) -> std::result::Result<(), ArenaError>;
    /// How long from now on leases that are trusted now may be trusted without another look.
    fn leases_seen_for(&self) -> Duration;
    /// Closes the descriptor of each file with its last handle, from now on: other programs cannot know that this
    /// process has their files open. Pages stay where the next open can tell that they are the file's.
    fn park_idle_files(&self);
    /// Closes and forgets that file, if it has no open handle. Returns whether it is not known now, and nothing that
    /// was released is in flight still.
    fn forget_idle(&self, id: FileId) -> bool;
    /// Forgets the files that are kept open only because their mount has no number, and were not opened for a second.
    /// Returns them.
    fn forget_lingering(&self) -> Vec<FileId>;
    /// Closes the descriptors of all files without open handles, and waits for requests in flight by them, half a
    /// second at most.
    fn release_idle(&self);
    /// Opens a local file as it is now, as a file that never changes: a read of what is not cached fails with `ESTALE`
    /// once the file has changed. `identity` makes the identity from what the file is: another for another size or
    /// other times. There is no readahead, which the thread that wants a page would wait for.
    ///
    /// # Errors
    /// `ETXTBSY`: the file was changed just now; ask again later. `EOPNOTSUPP`: its times do not tell of each write.
    fn open_revision(&self, file: OwnedFd, identity: impl FnOnce(&Attributes) -> Identity) -> Result<File>;
}

impl ServedCache for Cache {
    fn arena(&self) -> &Arena {
        &self.shared.filemap.arena
    }
    fn reserve_viewers(&self, groups: usize) -> std::result::Result<(), ArenaError> {
        // As in `resize`.
        let pools = self.shared.pools.lock();
        self.shared.filemap.bound().reserve_viewers(groups, || drop(pools))
    }
    fn leases_seen_for(&self) -> Duration {
        self.shared.leases.seen_for()
    }
    fn park_idle_files(&self) {
        self.shared.parks.store(true, Ordering::Relaxed);
    }
    fn forget_idle(&self, id: FileId) -> bool {
        self.shared.forget_idle(id)
    }
    fn forget_lingering(&self) -> Vec<FileId> {
        self.shared.forget_lingering()
    }
    fn release_idle(&self) {
        self.shared.release_idle();
    }
    fn open_revision(&self, file: OwnedFd, identity: impl FnOnce(&Attributes) -> Identity) -> Result<File> {
        let opened = FileRevision::open(&self.shared.engine, RevisionOpen { file, identity });
        let mut options = OpenOptions::new();
        options.coherence(Coherence::Immutable);
        let file = self.open_backend_with(Arc::new(opened.map_err(Repr::Attributes)?), &options)?;
        file.advise(Hint::Random)?;
        Ok(file)
    }
}

/// Operations on a file that viewers read: its handle stands for theirs.
pub trait ServedFile {
    /// The file's record in the shared memory, and the number that the record has as long as it is this file's.
    fn record(&self) -> (CellNumber, MappingId);
    /// Whether it is that file.
    fn is_inode(&self, id: FileId) -> bool;
    /// Brings the page at byte `position`, as a read of `len` bytes would. May block for the device.
    ///
    /// # Errors
    /// As [`File::read_at`].
    fn make_ready(&self, position: u64, len: usize) -> Result<()>;
    /// As [`ServedFile::make_ready`], for an uncached read; its pages go with [`ServedFile::end_uncached`].
    ///
    /// # Errors
    /// As [`File::read_at`].
    fn make_ready_uncached(&self, position: u64, len: usize) -> Result<()>;
    /// An uncached read of `bytes` bytes has ended.
    ///
    /// # Errors
    /// The file cannot be read uncached.
    fn end_uncached(&self, position: u64, bytes: u64) -> Result<()>;
    /// A viewer has read a page with a marker: readahead goes on. Waits for locks alone.
    fn advance(&self, page: PageIndex);
    /// As [`ServedFile::advance`], for an uncached read.
    fn advance_uncached(&self, page: PageIndex);
    /// Whether it can be read uncached.
    fn can_drop_behind(&self) -> bool;
    /// Whether viewers find pinned pages in the index as long as they are pinned; of a file that never changes.
    fn is_indexed(&self, pinned: &Pinned) -> bool;
    /// Reads by the kernel's page cache from now on.
    fn read_by_kernels_cache(&self);

    /// See [`CoherenceState::admit`].
    ///
    /// # Errors
    /// The cached pages could not be forgotten, where that was wanted.
    fn admit(&self, without_lease: Validation) -> Result<(Validation, NoLease)>;
    /// See [`CoherenceState::expect_writer`].
    fn expect_writer(&self, without_lease: Validation);
    /// See [`CoherenceState::invalidate_for_cut`].
    fn invalidate_for_cut(&self);
    /// The coherence state that all handles of the file share.
    fn coherence_state(&self) -> &Arc<CoherenceState>;
    /// How viewers validate cached pages before they use them, as the record says.
    fn validation(&self) -> Validation;
    /// Tells whether the descriptor by which it is read is closed once it is idle; `None` if there is none.
    fn parked(&self) -> Option<ParkedBackend>;
    /// Whether a part of the file has room on its device and no bytes; `None`: not known.
    fn has_unwritten_extents(&self) -> Option<bool>;
}

impl ServedFile for File {
    fn record(&self) -> (CellNumber, MappingId) {
        (self.handle.mapping.index().cell(), self.id)
    }
    fn is_inode(&self, id: FileId) -> bool {
        let identity = self.handle.mapping.identity();
        (identity.device, identity.inode) == (id.device, id.inode)
    }
    fn make_ready(&self, position: u64, len: usize) -> Result<()> {
        self.assure_for_viewer()?;
        let call = self.call(None, WaitPolicy::Wait);
        self.handle.shared.filemap.make_ready(&call, position.min(FILE_BYTES_MAX), len)
    }
    fn make_ready_uncached(&self, position: u64, len: usize) -> Result<()> {
        self.assure_for_viewer()?;
        let passing = self.passing()?;
        let call = self.call(Some(&passing), WaitPolicy::Wait);
        self.handle.shared.filemap.make_ready(&call, position.min(FILE_BYTES_MAX), len)
    }
    fn end_uncached(&self, position: u64, bytes: u64) -> Result<()> {
        let passing = self.passing()?;
        let position = position.min(FILE_BYTES_MAX);
        let bytes = usize::try_from(bytes.min(FILE_BYTES_MAX - position)).unwrap_or(usize::MAX);
        self.reader(Some(&passing)).end_drop_behind(position, bytes, LockWait::Wait);
        Ok(())
    }
    fn advance(&self, page: PageIndex) {
        self.handle.shared.filemap.advance(&self.call(None, WaitPolicy::Wait), page);
    }
    fn advance_uncached(&self, page: PageIndex) {
        let passing = self.passing().ok();
        self.handle.shared.filemap.advance(&self.call(passing.as_ref(), WaitPolicy::Wait), page);
    }
    fn can_drop_behind(&self) -> bool {
        self.handle.mapping.backend().can_drop_behind()
    }
    fn is_indexed(&self, pinned: &Pinned) -> bool {
        let Handle { shared, mapping, .. } = &*self.handle;
        shared.filemap.is_indexed(mapping, pinned)
    }
    fn read_by_kernels_cache(&self) {
        self.handle.mapping.backend().read_by_kernels_cache();
    }

    fn admit(&self, without_lease: Validation) -> Result<(Validation, NoLease)> {
        self.handle.watch.admit(without_lease)
    }
    fn expect_writer(&self, without_lease: Validation) {
        self.handle.watch.expect_writer(without_lease);
    }
    fn invalidate_for_cut(&self) {
        self.handle.watch.invalidate_for_cut();
    }
    fn coherence_state(&self) -> &Arc<CoherenceState> {
        &self.handle.watch
    }
    fn validation(&self) -> Validation {
        self.handle.mapping.record().validation()
    }
    fn parked(&self) -> Option<ParkedBackend> {
        self.handle.mapping.backend().parked()
    }
    fn has_unwritten_extents(&self) -> Option<bool> {
        let backend = self.handle.mapping.backend();
        let leasable = backend.leasable()?;
        crate::sys::extents::has_unwritten(leasable.descriptor, self.len()).ok()
    }
}

/// Whether both stand for the same open of a file.
pub fn is_same_open(one: &ParkedBackend, other: &ParkedBackend) -> bool {
    one.is_of(other)
}

/// Makes `options` those of a handle that reads on behalf of a viewer: see
/// [`Engine::open_unseen`](crate::backend::Engine::open_unseen).
pub fn for_viewer(options: &mut OpenOptions) -> &mut OpenOptions {
    options.for_viewer = true;
    options
}

/// The memory that `pinned` keeps. Looks at the descriptor of each folio.
pub fn kept_memory(pinned: &Pinned) -> KeptMemory {
    pinned.kept_memory()
}

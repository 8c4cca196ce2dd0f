//! Admission: whether a file may be attached, by the rules, the programs that watch it, its lease and the memory.
//!
//! ```text
//!   watched by a program? --> rules --> watch for truncations --> open, same file? --> lease --> watched? refused?
//!        BUSY             not served       not served            ESTALE           not served    BUSY, ENOMEM
//! ```
//!
//! The decision is noted for the report ([`FileAdmission::modes`]).
//!
//! Locks: three, each held for a look or a change of its own table. No two of them are held at once, and nothing is
//! opened under them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::errno;
use super::guarantee::{ServeRules, Unserved};
use super::shortage::MemoryShortage;
use super::truncation_watch::{TruncationCheck, TruncationWatcher};
use crate::serve::FileMode;
use crate::viewer::sys::Errno;
use quinion::internals::arena::Validation;
use quinion::internals::lease::NoLease;
use quinion::internals::serving::{ServedFile, for_viewer};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::FileId;
use quinion::{Cache, Coherence, File, OpenOptions};

const MODES_MAX: usize = 1000;

/// As a program that watches something which is no file names it.
pub(super) const ALL_FILES: FileId = FileId { device: 0, inode: 0 };
pub(super) const WATCHED: &str = "a program watches it";
pub(super) const TOO_SMALL: &str = "--memory is too small for all files that are read at the same time";

/// A file that is to be opened for a viewer.
#[derive(Debug)]
pub(super) struct OpenRequest<'a> {
    /// The descriptor's name in `/proc`.
    pub(super) path: &'a str,
    /// The viewer's name for the file.
    pub(super) name: &'a Path,
    pub(super) id: FileId,
}

#[derive(Debug)]
pub(super) struct FileAdmission {
    pub(super) rules: ServeRules,
    pub(super) shortage: MemoryShortage,
    pub(super) truncations: TruncationWatcher,
    watched: RankedMutex<FilesWithWatches>,
    /// How each file is validated against changes by others.
    modes: RankedMutex<BTreeMap<FileId, FileMode>>,
}

#[derive(Debug, Default)]
struct FilesWithWatches {
    files: BTreeSet<FileId>,
    /// All files count as watched: too many were watched, or a watched object is no file.
    all: bool,
}

impl FilesWithWatches {
    const FILES_MAX: usize = 4096;

    fn add(&mut self, id: FileId) {
        self.all |= id == ALL_FILES || self.files.len() == Self::FILES_MAX;
        if !self.all {
            self.files.insert(id);
        }
    }

    fn has(&self, id: FileId) -> bool {
        self.all || self.files.contains(&id)
    }
}

impl FileAdmission {
    pub(super) fn new() -> Self {
        Self {
            rules: ServeRules::default(),
            shortage: MemoryShortage::new(),
            truncations: TruncationWatcher::default(),
            watched: RankedMutex::new(Rank::Viewer, FilesWithWatches::default()),
            modes: RankedMutex::new(Rank::Viewer, BTreeMap::new()),
        }
    }

    /// A program watches it: it is not attached from here on.
    pub(super) fn add_watched(&self, id: FileId) {
        self.watched.lock().add(id);
    }

    pub(super) fn is_watched(&self, id: FileId) -> bool {
        self.watched.lock().has(id)
    }

    pub(super) fn modes(&self) -> Vec<FileMode> {
        self.modes.lock().values().cloned().collect()
    }

    pub(super) fn note_mode(&self, id: FileId, mode: FileMode) {
        let mut modes = self.modes.lock();
        if modes.len() < MODES_MAX || modes.contains_key(&id) {
            modes.insert(id, mode);
        }
    }

    /// It is left to the kernel, for that reason.
    pub(super) fn note_unserved(&self, id: FileId, path: &Path, why: impl Into<String>) {
        let mode = FileMode { path: path.to_owned(), validation: Validation::Kernel, why: why.into() };
        self.note_mode(id, mode);
    }

    fn refuse_watched(&self, request: &OpenRequest<'_>) -> Result<(), Errno> {
        if self.is_watched(request.id) {
            self.note_unserved(request.id, request.name, WATCHED);
            return Err(Errno::BUSY);
        }
        Ok(())
    }

    /// Opens the file if it may be served, and sets its validation.
    pub(super) fn open(&self, cache: &Cache, request: &OpenRequest<'_>) -> Result<Arc<File>, Errno> {
        let OpenRequest { path, name, id } = *request;
        let unserved = |unserved: Unserved| {
            self.note_unserved(id, name, unserved.to_string());
            if unserved == Unserved::Closed { Errno(libc::ESTALE) } else { Errno::OPNOTSUPP }
        };
        self.refuse_watched(request)?; // a program that watches is told of opens, too
        let without_lease = self.rules.look(path, name, id).map_err(unserved)?;
        // A file that never changes is checked once, here: it may be another of the same number.
        let coherence =
            if without_lease == Validation::Immutable { Coherence::Check } else { Coherence::Lease };
        // No watch, no service: a lease does not tell of all changes.
        let watch = match without_lease {
            Validation::Immutable => None,
            _ => Some(self.truncations.watch(path).ok_or_else(|| unserved(Unserved::Unwatched))?),
        };
        let mut options = OpenOptions::new();
        for_viewer(options.coherence(coherence));
        let file = Arc::new(cache.open_with(path, &options).map_err(|error| errno(&error))?);
        if !file.is_inode(id) {
            return Err(unserved(Unserved::Closed));
        }
        // Watched first, leased then: whatever cuts it from here on, the lease ends with the notice.
        if let Some(watch) = watch {
            if watch.arm(file.coherence_state()) == TruncationCheck::Truncated {
                file.invalidate_for_cut();
                return Err(Errno::TXTBSY);
            }
            file.coherence_state().enter_watched().map_err(|error| errno(&error))?;
        }
        if file.has_unwritten_extents() == Some(true) {
            return Err(unserved(Unserved::Unwritten));
        }
        self.admit(file, without_lease, request)
    }

    fn admit(
        &self,
        file: Arc<File>,
        without_lease: Validation,
        request: &OpenRequest<'_>,
    ) -> Result<Arc<File>, Errno> {
        let OpenRequest { name, id, .. } = *request;
        let (validation, no_lease) = file.admit(without_lease).map_err(|error| errno(&error))?;
        // After it was admitted: the thread that leaves it to the kernel records that before it resets the record.
        self.refuse_watched(request).inspect_err(|_| file.invalidate_for_cut())?;
        if self.shortage.is_refused(id) {
            file.invalidate_for_cut();
            self.note_unserved(id, name, TOO_SMALL);
            return Err(Errno(libc::ENOMEM));
        }
        let why = if matches!(validation, Validation::Leased | Validation::Immutable) {
            String::new()
        } else {
            no_lease.to_string()
        };
        self.note_mode(id, FileMode { path: name.to_owned(), validation, why });
        match validation {
            Validation::Kernel if no_lease.is_transient() || no_lease == NoLease::WrittenHere => {
                Err(Errno::TXTBSY)
            }
            Validation::Kernel => Err(Errno::OPNOTSUPP),
            _ => Ok(file),
        }
    }
}

//! Admission: whether a file may be attached, by the rules, the programs that watch it, its lease and the memory.
//!
//! ```text
//!   watched by a program? --> rules --> watch for truncations --> open, same file? --> lease --> watched? refused?
//!        BUSY             not served       not served            ESTALE           not served    BUSY, ENOMEM
//! ```
//!
//! The decision is noted for the report ([`FileAdmission::modes`]).
//!
//! A watch counts until the process that set it has ended, whichever programs that becomes. A child that inherits a
//! watch is not known here, so its parent's end ends the watch, too.
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
use crate::serve::{FileMode, WatchingProcess};
use crate::sys::processes::has_ended;
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
pub(super) const TOO_LARGE: &str = "--memory is less than four times its size";

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

/// The watches of each process.
#[derive(Debug, Default)]
struct FilesWithWatches(Vec<Watcher>);

#[derive(Debug)]
struct Watcher {
    process: WatchingProcess,
    files: BTreeSet<FileId>,
    /// All files count as watched: too many were watched, or a watched object is no file.
    all: bool,
}

impl Watcher {
    fn has(&self, id: FileId) -> bool {
        self.all || self.files.contains(&id)
    }
}

impl FilesWithWatches {
    /// Watched files of one process: with more, all files count as watched.
    const FILES_MAX: usize = 4096;
    /// Watched files of all processes together: with more, all files count as watched.
    const SUM_MAX: usize = 1 << 16;

    fn add(&mut self, id: FileId, process: &WatchingProcess) {
        self.forget_ended();
        let sum: usize = self.0.iter().map(|watcher| watcher.files.len()).sum();
        let known = self.0.iter().position(|watcher| watcher.process.name == process.name);
        let place = known.unwrap_or_else(|| {
            let process = process.clone();
            self.0.push(Watcher { process, files: BTreeSet::new(), all: false });
            self.0.len() - 1
        });
        let watcher = &mut self.0[place];
        let is_full = sum >= Self::SUM_MAX || watcher.files.len() == Self::FILES_MAX;
        watcher.all |= id == ALL_FILES || (is_full && !watcher.files.contains(&id));
        if watcher.all {
            watcher.files.clear();
        } else {
            watcher.files.insert(id);
        }
    }

    fn has(&mut self, id: FileId) -> bool {
        if !self.0.iter().any(|watcher| watcher.has(id)) {
            return false;
        }
        self.forget_ended();
        self.0.iter().any(|watcher| watcher.has(id))
    }

    fn forget_ended(&mut self) {
        self.0.retain(|watcher| !has_ended(&watcher.process.alive));
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

    /// A program watches it: it is not attached from here on, until that process has ended.
    pub(super) fn add_watched(&self, id: FileId, watcher: &WatchingProcess) {
        self.watched.lock().add(id, watcher);
    }

    /// Forgets watches of processes that have ended: their descriptors are closed.
    pub(super) fn forget_ended_watchers(&self) {
        self.watched.lock().forget_ended();
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

    /// Notes that the file is left to the kernel, for that reason.
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
        let without_lease = self.rules.check(path, name, id).map_err(unserved)?;
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

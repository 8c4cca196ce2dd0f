//! Owner: a cache on behalf of viewers in other processes.
//!
//! ```text
//!   viewer: attach(a duplicate of its descriptor) --> the owner opens the very same file through that,
//!                                                     with a description of its own
//!           fill, advance, revalidate(handle)   --> the paths of the cache, with that handle's readahead
//! ```
//!
//! A handle is an open [`File`]: it keeps its mapping, so the viewer's record stays valid until it lets go.
//!
//! A file is served while there is a guarantee that it stays as it is (`owner/guarantee.rs`): a lease, or a
//! declaration. Others are left to the kernel, unless the owner was asked to serve them by a look at their times.
//!
//! Where the memory is too small for what is read (`owner/thrash.rs`), files are left to the kernel until the others
//! fit, and are refused from then on.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::serve::{
    AttachReason, Attached, Caching, FileMode, NAMED_DEVICE, NameRefusal, NamedAttachment, Owner,
    ServiceHandle, ViewerTotals, WriterAccess,
};
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::{Advice, AttachPolicy};
use quinion::internals::arena::{ArenaError, ArenaShare, Validation};
use quinion::internals::error::{Error, ErrorKind};
use quinion::internals::lease::NoLease;
use quinion::internals::readahead::Hint;
use quinion::internals::serving::{ServedCache, ServedFile, for_viewer, touch};
use quinion::internals::sync::{Rank, RankedMutex};
use quinion::internals::units::{FileId, Frame, MappingId, PAGE_SIZE, PageIndex};
use quinion::{Cache, Coherence, File, OpenOptions};

mod guarantee;
mod truncation_watch;
mod hot_files;
mod background_copy;
mod named;
mod still_open;
mod thrash;

use background_copy::{BackgroundCopies, CopyBudget, CopyEnd, CopyRequest};
use guarantee::Unserved;
pub use guarantee::{ServeRules, WithoutLease};
pub use hot_files::HotFile;
use hot_files::{AccessCounts, RankedFile};
use named::no_pins;
pub use named::{AttachmentCounts, NameOpener, NamedObject};
use still_open::StillOpen;
use thrash::{Candidate, Detector, WindowSums};
use truncation_watch::{SinceWatched, TruncationWatcher};

/// A [`Cache`] on behalf of viewers: opens what they attach, and keeps what they are shown true.
#[derive(Debug)]
pub struct CacheOwner {
    cache: Cache,
    rules: ServeRules,
    files: RankedMutex<HashMap<u64, Attachment>>,
    /// What was done about changes by others, by file.
    modes: RankedMutex<BTreeMap<FileId, FileMode>>,
    last: AtomicU64,
    accesses: AccessCounts,
    copies: Option<BackgroundCopies>,
    short: RankedMutex<ShortageState>,
    watched: RankedMutex<WatchedFiles>,
    still_open: StillOpen,
    truncations: TruncationWatcher,
    /// `None`: nothing is opened by a name.
    opener: Option<Arc<dyn NameOpener>>,
    /// How often viewers said that a file may not be trusted any more, whichever.
    revoked: AtomicU64,
    #[cfg(test)]
    before_noted: tests::BeforeNoted,
}

#[derive(Debug, Default)]
struct WatchedFiles {
    files: BTreeSet<FileId>,
    /// All files are: too many were watched, or what is watched is no file.
    all: bool,
}

impl WatchedFiles {
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

const ALL_FILES: FileId = FileId { device: 0, inode: 0 };
const WATCHED: &str = "a program watches it";

#[derive(Debug, Default)]
struct ShortageState {
    detector: Detector,
    files: BTreeMap<FileId, ShortageEntry>,
    /// Bytes that would have held all files.
    memory: u64,
    idle_windows: u32,
}

impl ShortageState {
    const FILES_MAX: usize = 4096;

    /// If there are too many, one is forgotten, first one that was not refused: that is looked at again.
    fn insert(&mut self, id: FileId, entry: ShortageEntry) {
        if self.files.len() >= Self::FILES_MAX && !self.files.contains_key(&id) {
            let noted = self.files.iter().find(|(_, file)| file.decision != Decision::Refused);
            let other = noted.or_else(|| self.files.first_key_value()).map(|(&other, _)| other);
            other.and_then(|other| self.files.remove(&other));
        }
        self.files.insert(id, entry);
    }
}

#[derive(Clone, Copy, Debug)]
struct ShortageEntry {
    bytes: u64,
    decision: Decision,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Decision {
    /// No viewer may attach it.
    Refused,
    /// It does not fit beside the files that were copied: the kernel serves it until it is asked for again.
    NotCopied,
}

/// What was left to the kernel because memory is too small; all 0 if nothing was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shortage {
    /// Files.
    pub files: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes of memory that would have held them beside those that were served.
    pub memory: u64,
}

#[derive(Clone, Debug)]
struct Attachment {
    file: Arc<File>,
    id: FileId,
    path: PathBuf,
    fills: u64,
    object: Option<Arc<dyn NamedObject>>,
    pins: named::Pins,
}

const LET_GO_LOOKS: u32 = 20;
const LET_GO_PAUSE: Duration = Duration::from_millis(5);

const MODES_MAX: usize = 1000;

/// Windows without an attach, five minutes, after which files are not refused any more.
const IDLE_WINDOWS_MAX: u32 = 600;

impl CacheOwner {
    /// An owner that serves files of `cache`. The cache closes the descriptors of files that no handle has open from
    /// now on.
    pub fn new(cache: Cache) -> Self {
        cache.park_idle_files();
        let files = RankedMutex::new(Rank::Viewer, HashMap::new());
        let modes = RankedMutex::new(Rank::Viewer, BTreeMap::new());
        let short = RankedMutex::new(Rank::Viewer, ShortageState::default());
        let watched = RankedMutex::new(Rank::Viewer, WatchedFiles::default());
        let (rules, last) = (ServeRules::default(), AtomicU64::new(0));
        Self {
            cache,
            rules,
            files,
            modes,
            last,
            accesses: AccessCounts::new(),
            copies: None,
            short,
            watched,
            still_open: StillOpen::new(),
            truncations: TruncationWatcher::default(),
            opener: None,
            revoked: AtomicU64::new(0),
            #[cfg(test)]
            before_noted: tests::BeforeNoted::default(),
        }
    }

    /// The same, which leaves files to the kernel until they have been read some times; then they are copied out of
    /// its page cache while no read waits. Reads of what is read once are as fast as the kernel's, and not faster.
    #[must_use]
    pub fn attach_lazily(mut self) -> Self {
        self.copies = Some(BackgroundCopies::new(self.cache.clone()));
        self
    }

    /// The same, by these rules. The default serves files that have a lease.
    #[must_use]
    pub fn with_rules(mut self, rules: ServeRules) -> Self {
        self.rules = rules;
        self
    }

    fn close(&self, gone: impl IntoIterator<Item = Attachment>) {
        for Attachment { file, id, .. } in gone {
            let open = file.parked();
            drop(file); // it may be the last handle of the file, whose end waits for readahead
            if let Some(open) = open {
                self.still_open.note(self.cache.share().control().control(), id, open);
            }
        }
    }

    fn settle_still_open(&self) {
        self.still_open.settle(self.cache.share().control().control());
    }

    /// Closes a file that no viewer has; a request that is being answered, or a copy, may keep it a moment longer.
    fn close_unattached(&self, id: FileId) {
        for _ in 0..LET_GO_LOOKS {
            if self.cache.forget_idle(id) {
                return;
            }
            sleep(LET_GO_PAUSE);
        }
    }

    /// The cache that it serves.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What was left to the kernel because memory is too small.
    pub fn shortage(&self) -> Shortage {
        let short = self.short.lock();
        let bytes = short.files.values().fold(0_u64, |sum, file| sum.saturating_add(file.bytes));
        let files = short.files.len() as u64;
        Shortage { files, bytes, memory: if files > 0 { short.memory } else { 0 } }
    }

    /// The files that viewers read most, hottest first. Costs some ten nanoseconds for each of their cached folios.
    pub fn hottest(&self, most: usize) -> Vec<HotFile> {
        let hottest = self.accesses.hottest(most).into_iter();
        hottest
            .map(|RankedFile { id, name, requests }| HotFile {
                name,
                requests,
                cached_bytes: self.cached_bytes(id),
            })
            .collect()
    }

    fn cached_bytes(&self, id: MappingId) -> Option<u64> {
        let open = self
            .files
            .lock()
            .values()
            .map(|known| &known.file)
            .find(|file| file.record().1 == id)
            .cloned()?;
        let residency = open.residency(0, u64::MAX).ok()?;
        Some(residency.cached_pages * PAGE_SIZE as u64)
    }

    fn file(&self, handle: u64) -> Result<Arc<File>, Errno> {
        self.files.lock().get(&handle).map(|known| Arc::clone(&known.file)).ok_or(Errno(libc::EBADF))
    }

    fn id_of(&self, handle: u64) -> FileId {
        self.files.lock().get(&handle).map(|known| known.id).unwrap_or_default()
    }

    /// `Err`: the viewer must not trust what it would find.
    fn valid_file(&self, handle: u64) -> Result<Arc<File>, Errno> {
        let file = self.file(handle)?;
        match file.validation() {
            Validation::Kernel if self.is_refused(self.id_of(handle)) => Err(Errno(libc::ENOMEM)),
            Validation::Kernel => Err(Errno::TXTBSY),
            _ => Ok(file),
        }
    }

    fn of_id(&self, id: FileId) -> Option<Arc<File>> {
        let files = self.files.lock();
        files.values().find(|known| known.id == id).map(|known| Arc::clone(&known.file))
    }

    /// The attached files, with their bytes and how often viewers asked for some.
    fn candidates(&self) -> HashMap<FileId, Candidate> {
        let mut found = HashMap::new();
        for Attachment { file, id, fills, .. } in self.files.lock().values() {
            let candidate = Candidate { id: *id, bytes: file.len(), fills: 0 };
            found.entry(*id).or_insert(candidate).fills += fills;
        }
        found
    }

    fn note_short(&self, id: FileId, entry: ShortageEntry) {
        let attached = self.candidates();
        let mut short = self.short.lock();
        short.insert(id, entry);
        let others = attached.values().filter(|file| !short.files.contains_key(&file.id));
        let all = others.map(|file| file.bytes).chain(short.files.values().map(|file| file.bytes));
        let memory = thrash::memory_for(all.fold(0, u64::saturating_add));
        short.memory = short.memory.max(memory);
        if self.copies.is_some() {
            short.memory = short.memory.max(entry.bytes.saturating_mul(background_copy::FILES_MIN));
        }
    }

    fn is_refused(&self, id: FileId) -> bool {
        self.short.lock().files.get(&id).is_some_and(|file| file.decision == Decision::Refused)
    }

    fn let_go_for(&self, id: FileId, why: &str) {
        let gone = self.take_from_viewers(id, why);
        self.close_for_good(id, gone);
    }

    /// No viewer is served this file when this returns. Returns what is to be closed.
    fn take_from_viewers(&self, id: FileId, why: &str) -> Vec<Attachment> {
        let mut gone = Vec::new();
        self.revoked.fetch_add(1, Ordering::Relaxed); // before it is looked for: see `open_and_note`
        self.files.lock().retain(|_, known| {
            let stays = known.id != id;
            if !stays {
                gone.push(known.clone());
            }
            stays
        });
        if let Some(known) = gone.first() {
            known.file.drop_before_cut(); // a viewer that looks from here on finds that it may trust nothing
            self.note_mode(&known.path, known.id, Validation::Kernel, why.into());
        }
        gone
    }

    /// Closes what was taken from viewers, which may wait for the file system.
    fn close_for_good(&self, id: FileId, gone: Vec<Attachment>) {
        self.close(gone);
        if let Some(copies) = &self.copies {
            copies.forget(id);
        }
        self.close_unattached(id);
        self.settle_still_open();
    }

    fn refuse_thrashing_files(&self) {
        let capacity = thrash::capacity_of(self.cache.arena().bound());
        let mut files: Vec<_> = self.candidates().into_values().collect();
        files.retain(|file| !self.is_refused(file.id)); // their viewers are about to detach them
        files.retain(|file| file.id.device & NAMED_DEVICE == 0); // the kernel cannot read an object
        for chosen in thrash::choose(files, capacity) {
            // First, so that a viewer that attaches it from here on is refused; see `open`.
            self.note_short(chosen.id, ShortageEntry { bytes: chosen.bytes, decision: Decision::Refused });
            if let Some(file) = self.of_id(chosen.id) {
                file.drop_before_cut(); // a viewer that looks from here on finds that it may trust nothing
            }
        }
    }

    /// Copies a file out of the kernel's cache, if it can be served. It is attached meanwhile, without a viewer, so a
    /// lease that ends drops what was copied.
    fn copy(&self, request: &CopyRequest, service: &dyn ServiceHandle) -> CopyEnd {
        let path = format!("/proc/self/fd/{}", request.file().as_raw_fd());
        let name = std::fs::read_link(&path).unwrap_or_default();
        let Ok((handle, file)) = self.open_and_note(&path, name, request.id(), |_| true) else {
            return CopyEnd::Aborted;
        };
        let is_whole = request.steps().all(|step| {
            let begun = Instant::now();
            let goes_on = service.goes_on() && !request.is_over() && self.valid_file(handle).is_ok();
            let done = goes_on && file.make_ready(step.start, (step.end - step.start) as usize).is_ok();
            if done && service.has_viewers() {
                sleep(background_copy::rest_after(begun.elapsed()));
            }
            done
        });
        let known = self.files.lock().remove(&handle);
        drop(file); // outside the lock
        self.close(known);
        if is_whole { CopyEnd::Copied } else { CopyEnd::Aborted }
    }

    /// Opens a file as [`open`](Self::open) does, and notes it as attached. `is_taken_over`: it is filled through the
    /// kernel's page cache. A viewer that says in between that the file is cut does not find it noted, and no lease
    /// tells of that. So this thread checks afterwards whether a cut of any file was told, and gives it up; or the
    /// file was noted before it was looked for. Both are done under the lock of the files.
    fn open_and_note(
        &self,
        path: &str,
        name: PathBuf,
        id: FileId,
        is_taken_over: impl FnOnce(&Self) -> bool,
    ) -> Result<(u64, Arc<File>), Errno> {
        let revoked = self.revoked.load(Ordering::Relaxed);
        let known = self.open(path, name, id)?;
        let file = Arc::clone(&known.file);
        if is_taken_over(self) {
            file.read_by_kernels_cache();
        }
        #[cfg(test)]
        self.before_noted.act(self);
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let mut files = self.files.lock();
        files.insert(handle, known);
        if self.revoked.load(Ordering::Relaxed) == revoked {
            return Ok((handle, file));
        }
        let known = files.remove(&handle);
        drop(files);
        drop(known); // outside the lock
        file.drop_before_cut();
        Err(Errno::TXTBSY)
    }

    /// Opens the file behind `path`, which a viewer calls `name`, if it may be served, and sets its validation.
    fn open(&self, path: &str, name: PathBuf, id: FileId) -> Result<Attachment, Errno> {
        let unserved = |unserved: Unserved| {
            self.note_mode(&name, id, Validation::Kernel, unserved.to_string());
            if unserved == Unserved::Closed { Errno(libc::ESTALE) } else { Errno::OPNOTSUPP }
        };
        let is_watched = || {
            let is_watched = self.watched.lock().has(id);
            if is_watched {
                self.note_mode(&name, id, Validation::Kernel, WATCHED.into());
            }
            is_watched
        };
        if is_watched() {
            return Err(Errno::BUSY); // a program that watches is told of opens, too
        }
        let without_lease = self.rules.look(path, &name, id).map_err(unserved)?;
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
        let file = Arc::new(self.cache.open_with(path, &options).map_err(|error| errno(&error))?);
        if !file.is_inode(id) {
            return Err(unserved(Unserved::Closed));
        }
        // Watched first, leased then: whatever cuts it from here on, the lease ends with the notice.
        if let Some(watch) = watch {
            if watch.arm(file.coherence_state()) == SinceWatched::Truncated {
                file.drop_before_cut();
                return Err(Errno::TXTBSY);
            }
            file.coherence_state().enter_watched().map_err(|error| errno(&error))?;
        }
        if file.has_unwritten_extents() == Some(true) {
            return Err(unserved(Unserved::Unwritten));
        }
        let (validation, no_lease) = file.admit(without_lease).map_err(|error| errno(&error))?;
        // After it was admitted: the thread that leaves it to the kernel records that before it resets the record.
        if is_watched() {
            file.drop_before_cut();
            return Err(Errno::BUSY);
        }
        if self.is_refused(id) {
            file.drop_before_cut();
            self.note_mode(&name, id, Validation::Kernel, TOO_SMALL.into());
            return Err(Errno(libc::ENOMEM));
        }
        let why = if matches!(validation, Validation::Leased | Validation::Immutable) {
            String::new()
        } else {
            no_lease.to_string()
        };
        self.note_mode(&name, id, validation, why);
        match validation {
            Validation::Kernel if no_lease.is_transient() || no_lease == NoLease::WrittenHere => {
                Err(Errno::TXTBSY)
            }
            Validation::Kernel => Err(Errno::OPNOTSUPP),
            _ => Ok(Attachment { file, id, path: name, fills: 0, object: None, pins: no_pins() }),
        }
    }

    fn note_mode(&self, path: &Path, id: FileId, validation: Validation, why: String) {
        let mut modes = self.modes.lock();
        if modes.len() < MODES_MAX || modes.contains_key(&id) {
            modes.insert(id, FileMode { path: path.to_owned(), validation, why });
        }
    }
}

const WRITTEN: &str = "another process has the file open for writing, or mapped for writing";
const TOO_SMALL: &str = "--memory is too small for all files that are read at the same time";

fn errno(error: &Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(match error.kind() {
        ErrorKind::NoMemory => libc::ENOMEM,
        ErrorKind::Open => libc::EINVAL,
        _ => libc::EIO,
    }))
}

impl Owner for CacheOwner {
    fn reserve_viewers(&self, groups: usize) -> Result<(), ArenaError> {
        self.cache.reserve_viewers(groups)
    }
    fn arena(&self) -> ArenaShare<'_> {
        self.cache.share()
    }

    fn unserved_file_system(&self, path: &Path, id: FileId) {
        let why = Unserved::FileSystem.to_string();
        self.note_mode(path, id, Validation::Kernel, why);
    }

    fn release_idle(&self) {
        if let Some(copies) = &self.copies {
            copies.release();
        }
        self.cache.release_idle();
        self.settle_still_open();
    }

    fn close_idle(&self, id: FileId) {
        if let Some(copies) = &self.copies {
            copies.close(id);
        }
        if !self.files.lock().values().any(|known| known.id == id) {
            self.close_unattached(id);
        }
        self.settle_still_open();
    }

    fn about_to_stop(&self) {
        self.cache.give_up_leases();
    }

    fn attach(&self, file: OwnedFd, id: FileId) -> Result<Attached, Errno> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = std::fs::read_link(&path).unwrap_or_else(|_| path.clone().into());
        let is_taken_over =
            |owner: &Self| owner.copies.as_ref().is_some_and(|copies| copies.is_taken_over(id));
        let (handle, opened) = self.open_and_note(&path, name.clone(), id, is_taken_over)?;
        drop(file); // it is the viewer's, too: locks that it holds end with its last duplicate
        let (cell, mapping) = opened.record();
        self.accesses.attached(mapping, name);
        Ok(Attached { handle, cell, id: mapping })
    }

    fn leases_valid_for(&self) -> Duration {
        self.cache.leases_seen_for() // records say that they are sure only where there is a lease
    }

    fn writer_opened(&self, id: FileId, access: WriterAccess) {
        if access == WriterAccess::Truncate {
            self.revoked.fetch_add(1, Ordering::Relaxed); // before it is looked for: see `open_and_note`
        }
        let file = self.of_id(id).filter(|_| id.device & NAMED_DEVICE == 0);
        let Some(file) = file else { return };
        match access {
            WriterAccess::Write => file.expect_writer(self.rules.without_lease()),
            WriterAccess::Truncate => file.drop_before_cut(),
        }
    }

    fn let_go(&self, id: FileId) {
        if id.device & NAMED_DEVICE != 0 {
            return; // no program has a lease on an object
        }
        self.let_go_for(id, "a program wants a lease on it");
    }

    fn watched(&self, id: FileId) {
        if id.device & NAMED_DEVICE != 0 {
            return;
        }
        // First, so that a viewer that attaches it from here on is refused; see `open`.
        self.watched.lock().add(id);
        if id != ALL_FILES {
            return self.let_go_for(id, WATCHED);
        }
        let mut files: BTreeSet<_> = self.files.lock().values().map(|known| known.id).collect();
        files.retain(|id| id.device & NAMED_DEVICE == 0); // no program watches an object of a store
        // No viewer is served any of them when the first is closed, which may hang.
        let gone: Vec<_> = files.into_iter().map(|id| (id, self.take_from_viewers(id, WATCHED))).collect();
        gone.into_iter().for_each(|(id, gone)| self.close_for_good(id, gone));
        self.release_idle();
    }

    fn modes(&self) -> Vec<FileMode> {
        self.modes.lock().values().cloned().collect()
    }

    fn window_ended(&self, totals: &ViewerTotals) {
        for gone in self.cache.forget_lingering() {
            self.copies.iter().for_each(|copies| copies.forget(gone)); // it is the kernel's again
        }
        self.settle_still_open();
        let Some(copies) = &self.copies else {
            return; // with `--attach at-once` each file is served, however small the cache is
        };
        copies.close_overdue();
        let stats = self.cache.stats();
        let (evicted, refaulted) = (stats.evicted_pages, stats.refaulted_pages);
        let sums = WindowSums { reads: totals.reads, misses: totals.misses, evicted, refaulted };
        let is_idle = self.files.lock().is_empty();
        let mut short = self.short.lock();
        short.idle_windows = if is_idle { short.idle_windows.saturating_add(1) } else { 0 };
        if short.idle_windows >= IDLE_WINDOWS_MAX {
            short.files.clear();
            short.memory = 0;
        }
        let is_too_small = short.detector.is_too_small(sums);
        drop(short);
        if is_too_small {
            self.refuse_thrashing_files();
        }
    }

    fn attach_policy(&self) -> AttachPolicy {
        let attach_policy =
            self.copies.as_ref().map_or(AttachPolicy::default(), |_| background_copy::LAZY_ATTACH);
        AttachPolicy {
            looks_at_times: self.rules.coherence == WithoutLease::CheckTimes,
            any_file_system: self.rules.any_file_system,
            ..attach_policy
        }
    }

    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, id: FileId, reason: AttachReason) -> Option<u64> {
        let copies = self.copies.as_ref()?;
        if self.watched.lock().has(id) {
            return None; // the viewer that attaches it is told
        }
        self.rules.look(&format!("/proc/self/fd/{}", file.as_raw_fd()), Path::new(""), id).ok()?;
        if self.is_refused(id) {
            return None; // the viewer that attaches it is told
        }
        let bound = self.cache.arena().bound();
        let budget = CopyBudget { file: bound / background_copy::FILES_MIN, all: thrash::capacity_of(bound) };
        let attached = || self.candidates().into_iter().map(|(id, file)| (id, file.bytes)).collect();
        let left = copies.kernel_credit(file, id, reason, budget, attached)?;
        if let Some(bytes) = left.short {
            self.note_short(id, ShortageEntry { bytes, decision: Decision::NotCopied });
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let name = std::fs::read_link(path).unwrap_or_default();
            self.note_mode(&name, id, Validation::Kernel, TOO_SMALL.into());
        }
        Some(left.credit)
    }

    fn prepare(&self, service: &dyn ServiceHandle) {
        let Some(copies) = &self.copies else { return };
        while let Some(request) = copies.next_request() {
            let id = request.id();
            let mut end = CopyEnd::Aborted;
            service.while_attached(id, &mut || end = self.copy(&request, service));
            copies.end(request, end);
            if end == CopyEnd::Copied {
                self.cache.share().control().control().note_taken(id);
            }
        }
    }

    fn device_of_name(&self, name: &[u8]) -> Result<u64, NameRefusal> {
        self.place_of_name(name)
    }

    fn open_named(&self, name: &[u8]) -> Result<NamedAttachment, NameRefusal> {
        self.open_by_name(name)
    }

    fn pin(&self, handle: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        self.pin_for(handle, position, len)
    }

    fn unpin(&self, handle: u64, pin: u64) {
        self.unpin_for(handle, pin);
    }

    fn leave_pins(&self, handle: u64) {
        self.leave_pins_of(handle);
    }

    fn fill(&self, handle: u64, position: u64, len: u64, caching: Caching) -> Result<(), Errno> {
        let len = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        if let Some(known) = self.files.lock().get_mut(&handle) {
            known.fills += 1;
        }
        let file = self.valid_file(handle)?;
        self.accesses.add(file.record().1);
        if let Some(object) = self.object(handle) {
            object.announce(position, len as u64);
            return file.make_ready(position, len).map_err(|error| object.errno(error));
        }
        let ready = if caching == Caching::Uncached && file.can_drop_behind() {
            file.make_ready_uncached(position, len)
        } else {
            file.make_ready(position, len)
        };
        ready.map_err(|e| errno(&e))
    }

    fn advance(&self, handle: u64, page: PageIndex, caching: Caching) {
        match (self.valid_file(handle), caching) {
            (Ok(file), Caching::Cached) => file.advance(page),
            (Ok(file), Caching::Uncached) => file.advance_uncached(page),
            (Err(_), _) => {}
        }
    }

    fn advise(&self, handle: u64, advice: Advice, position: u64, len: u64) -> Result<(), Errno> {
        let file = self.valid_file(handle)?;
        if let (Advice::WillNeed, Some(object)) = (advice, self.object(handle)) {
            object.will_need(position, len);
            return Ok(());
        }
        let done = match advice {
            Advice::Normal => file.advise(Hint::Normal),
            Advice::Random => file.advise(Hint::Random),
            Advice::Sequential => file.advise(Hint::Sequential),
            Advice::NoReuse => file.advise(Hint::NoReuse),
            Advice::WillNeed => file.will_need(position, len).map(drop),
            Advice::DontNeed => file.dont_need(position, len).map(drop),
            Advice::Passed => file.end_uncached(position, len),
        };
        done.map_err(|e| errno(&e))
    }

    fn revalidate(&self, handle: u64) -> Result<u64, Errno> {
        let file = self.valid_file(handle)?;
        file.revalidate().map_err(|e| errno(&e))?;
        Ok(file.len())
    }

    fn detach(&self, handle: u64) {
        let Some(gone) = self.files.lock().remove(&handle) else { return };
        if gone.file.validation() == Validation::Kernel {
            let why = if self.is_refused(gone.id) { TOO_SMALL } else { WRITTEN };
            self.note_mode(&gone.path, gone.id, Validation::Kernel, why.into());
        }
        self.close([gone]);
    }

    fn touched(&self, frame: Frame) {
        let grown = self.cache.arena().view().grown();
        touch(grown, frame);
        if let Some(descriptor) = grown.descriptor(frame) {
            self.accesses.add(descriptor.mapping());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quinion::Cache;
    use quinion::internals::filemap::{FileView, read_hits_into};
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::fs::OpenOptionsExt;

    type Act = Box<dyn FnOnce(&CacheOwner) + Send>;

    #[derive(Default)]
    pub(super) struct BeforeNoted(std::sync::Mutex<Option<Act>>);

    impl BeforeNoted {
        pub(super) fn act(&self, owner: &CacheOwner) {
            let act = self.0.lock().expect("nobody panics").take();
            act.into_iter().for_each(|act| act(owner));
        }
    }

    impl std::fmt::Debug for BeforeNoted {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("BeforeNoted")
        }
    }

    #[test]
    fn the_table_of_files_too_large_for_memory_is_bounded() {
        let mut short = ShortageState::default();
        let most = ShortageState::FILES_MAX as u64;
        for inode in 0..3 * most {
            let decision = if inode % 4 == 0 { Decision::Refused } else { Decision::NotCopied };
            short.insert(FileId { device: 1, inode }, ShortageEntry { bytes: 1, decision });
        }
        assert_eq!(short.files.len() as u64, most);
        let refused = short.files.values().filter(|file| file.decision == Decision::Refused).count() as u64;
        assert!(refused >= 3 * most / 4 - 1, "those that are refused stay: {refused}");
        for inode in 0..2 * most {
            short
                .insert(FileId { device: 2, inode }, ShortageEntry { bytes: 1, decision: Decision::Refused });
        }
        assert_eq!(short.files.len() as u64, most);
    }

    /// 1. Files that do not fit into the memory together are attached, and read over and over.
    /// 2. Each read evicts what the next one needs, and all of them wait for the device.
    #[test]
    fn files_that_thrash_are_left_to_the_kernel_until_the_others_fit() {
        const BYTES: u64 = 5 << 20;
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let owner =
            CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache")).attach_lazily();
        let attach = |file: u64| attach_by_path(&owner, &folder.path().join(file.to_string())).1;
        let handles: Vec<u64> = (0..3)
            .map(|file| {
                let mut new = std::fs::File::create(folder.path().join(file.to_string())).expect("a file");
                new.write_all(&vec![file as u8; BYTES as usize]).expect("it has room");
                drop(new);
                attach(file).expect("nobody has it open for writing").handle
            })
            .collect();
        let mut totals = ViewerTotals::default();
        let mut windows = 0;
        while owner.shortage() == Shortage::default() {
            for &handle in &handles {
                for position in (0..BYTES).step_by(PAGE_SIZE) {
                    owner.fill(handle, position, 1, Caching::Cached).expect("it is served");
                    (totals.reads, totals.misses) = (totals.reads + 1, totals.misses + 1);
                }
            }
            owner.window_ended(&totals);
            windows += 1;
            assert!(windows < 10, "nothing is left to the kernel: {:?}", owner.cache().stats());
        }
        let Shortage { files, bytes, memory } = owner.shortage();
        assert_eq!((files, bytes, memory), (1, BYTES, thrash::memory_for(3 * BYTES)), "two fit");
        let refused = |handle: &&u64| owner.fill(**handle, 0, 1, Caching::Cached) == Err(Errno(libc::ENOMEM));
        assert_eq!(handles.iter().filter(refused).count(), 1);
        let file = handles.iter().position(|handle| refused(&handle)).expect("one of them");
        assert_eq!(attach(file as u64), Err(Errno(libc::ENOMEM)), "it is not attached again");
        assert!(thrash::capacity_of(memory) >= 3 * BYTES && memory < 32 << 20, "as much as is said would do");
    }

    /// A lease does not tell of a file that is cut by being opened to read only.
    #[test]
    fn a_truncation_while_a_file_is_being_attached_is_noticed() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        let mut file = std::fs::File::create(&path).expect("a file");
        file.write_all(&[7; 100_000]).expect("it has room");
        drop(file);
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let attach = || attach_by_path(&owner, &path);
        let (id, attached) = attach();
        let handle = attached.expect("nobody has it open for writing").handle;
        assert!(owner.valid_file(handle).is_ok());
        owner.detach(handle);
        let cut = path.clone();
        *owner.before_noted.0.lock().expect("nobody panics") = Some(Box::new(move |owner| {
            owner.writer_opened(id, WriterAccess::Truncate);
            let options = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&cut);
            assert_eq!(options.expect("it is cut").metadata().expect("it is there").len(), 0);
            owner.writer_opened(id, WriterAccess::Truncate);
        }));
        let (_, attached) = attach();
        assert!(attached.is_err_and(|errno| errno == Errno::TXTBSY), "the old bytes would be believed");
        let (_, attached) = attach();
        if let Ok(attached) = attached {
            assert_eq!(owner.file(attached.handle).expect("it is attached").len(), 0);
        }
    }

    /// 1. Two viewers attach a file, and one of them lets go of it.
    /// 2. A process that tells nothing cuts it, and the kernel tells no lease.
    /// 3. What was cached is trusted no more. The next viewer that attaches it finds it watched again.
    #[test]
    fn a_cut_that_no_viewer_tells_of_is_heard() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let attach = || loop {
            match attach_by_path(&owner, &path).1 {
                Ok(attached) => return attached.handle,
                // For a second after it was cut.
                Err(errno) => assert_eq!(errno, Errno::TXTBSY),
            }
            sleep(Duration::from_millis(5));
        };
        for _ in 0..2 {
            std::fs::write(&path, vec![7; 100_000]).expect("it has room");
            let (handle, other) = (attach(), attach());
            owner.detach(handle);
            owner.fill(other, 0, 4096, Caching::Cached).expect("it is there");
            assert_eq!(owner.truncations.files(), 1);
            let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
            assert_eq!(cut.expect("it is cut").metadata().expect("it is there").len(), 0);
            while owner.valid_file(other).is_ok() {
                sleep(Duration::from_millis(1));
            }
            assert_eq!(owner.truncations.files(), 0, "one notice is enough");
            owner.detach(other);
        }
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        owner.detach(attach());
        assert_eq!(owner.truncations.files(), 0, "what is closed is watched no more");
    }

    /// 1. A viewer attaches a file, which is watched, and a process writes to it: the notice ends the watch.
    /// 2. A read of the owner's, for a viewer that looks at times, finds no lease, and no process that writes.
    /// 3. A process cuts the file in a way of which a lease does not tell: the next read finds the end.
    #[test]
    fn a_read_takes_no_lease_that_no_watch_goes_with() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let handle = attach_by_path(&owner, &path).1.expect("no process has it open for writing").handle;
        let file = owner.file(handle).expect("it is attached");
        let mut writer = std::fs::OpenOptions::new().write(true).open(&path).expect("it can be written");
        writer.write_all(&[8]).expect("it has room");
        drop(writer);
        while owner.truncations.files() > 0 {
            sleep(Duration::from_millis(1));
        }
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_millis(1300) {
            // A lease that was given up to a writer is asked for again after a second.
            sleep(Duration::from_millis(1));
            assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 10);
            assert_ne!(
                file.coherence().expect("it is open").in_force,
                Coherence::Lease,
                "it is blind for cuts"
            );
        }
        let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
        drop(cut.expect("it is cut"));
        assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 0, "old bytes");
        owner.detach(handle);
    }

    fn open_leased(owner: &CacheOwner, path: &Path) -> Arc<File> {
        let options = *OpenOptions::new().coherence(Coherence::Lease);
        Arc::new(owner.cache.open_with(path, &options).expect("it is there"))
    }

    /// 1. A viewer attaches a file, and a process writes to it: the notice ends the watch.
    /// 2. The program that serves it opens it, and reads: no lease is taken as long as the viewer has it.
    /// 3. The viewer is gone: the program has a lease again.
    #[test]
    fn an_open_takes_no_lease_while_a_viewer_has_the_file_and_no_watch() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let handle = attach_by_path(&owner, &path).1.expect("no process has it open for writing").handle;
        std::fs::write(&path, vec![8; 100_000]).expect("it has room");
        while owner.truncations.files() > 0 {
            sleep(Duration::from_millis(1));
        }
        let leased = |file: &File| file.coherence().expect("it is open").in_force == Coherence::Lease;
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_millis(1300) {
            // A lease that was given up to a writer is asked for again after a second.
            sleep(Duration::from_millis(10));
            assert!(!leased(&open_leased(&owner, &path)), "it is blind for cuts");
        }
        let file = open_leased(&owner, &path);
        owner.detach(handle);
        while !leased(&file) {
            assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 10);
            sleep(Duration::from_millis(1));
        }
    }

    /// 1. The program that serves a file has a lease on it, and has read it.
    /// 2. A process cuts it in a way of which a lease does not tell.
    /// 3. A viewer attaches it after that, and is shown no old byte.
    #[test]
    fn a_cut_of_before_the_watch_is_seen_by_what_attaches_the_file() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let file = open_leased(&owner, &path);
        while file.coherence().expect("it is open").in_force != Coherence::Lease {
            // As long as a child of another test starts it may have the file open for writing.
            assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 10);
            sleep(Duration::from_millis(5));
        }
        file.read_exact_at(&mut [0; 100_000], 0).expect("it can be read");
        let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
        drop(cut.expect("it is cut"));
        if let Ok(attached) = attach_by_path(&owner, &path).1 {
            let file = owner.file(attached.handle).expect("it is attached");
            assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 0, "old bytes");
            owner.detach(attached.handle);
        }
        assert_eq!(file.read_at(&mut [0; 10], 0).expect("it can be read"), 0, "old bytes");
    }

    /// 1. The program that serves a file has a lease on it, and has read it. A viewer attaches it, is to let go of it,
    ///    and does not look for a while.
    /// 2. Another viewer attaches it, and lets go of it: nothing watches the file from then on.
    /// 3. A process cuts it in a way of which a lease does not tell: the first viewer does not trust what it finds.
    #[test]
    fn no_viewer_believes_a_lease_when_nothing_watches_the_file() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let program = open_leased(&owner, &path);
        let attach = || loop {
            match attach_by_path(&owner, &path) {
                (id, Ok(attached)) => return (id, attached),
                (_, Err(errno)) => assert_eq!(errno, Errno::TXTBSY),
            }
            sleep(Duration::from_millis(5));
        };
        let (id, first) = attach();
        owner.let_go(id);
        assert_eq!(program.validation(), Validation::Kernel);
        let (_, other) = attach();
        program.read_exact_at(&mut [0; 100_000], 0).expect("it can be read");
        owner.detach(other.handle);
        assert_eq!(owner.truncations.files(), 0, "nothing watches it");
        let cut = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_TRUNC).open(&path);
        drop(cut.expect("it is cut"));
        let file = FileView { view: owner.cache.arena().view(), cell: first.cell, id: first.id };
        let is_leased = program.validation() == Validation::Leased;
        let hits = read_hits_into(file, 0, &mut [0; 10], |_, _| {});
        assert!(!is_leased || hits.bytes == 0, "old bytes, for good: {hits:?}");
    }

    fn attach_by_path(owner: &CacheOwner, path: &Path) -> (FileId, Result<Attached, Errno>) {
        let file = std::fs::File::open(path).expect("it is there");
        let stat = file.metadata().expect("it can be looked at");
        let id = FileId { device: stat.dev(), inode: stat.ino() };
        (id, owner.attach(file.into(), id))
    }

    /// 1. A viewer lets go of a file that another handle in this process still has open.
    /// 2. It counts as attached, so that a program that removes it asks; until it is closed.
    #[test]
    fn a_file_counts_as_attached_until_it_is_closed() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 100_000]).expect("it has room");
        let owner = CacheOwner::new(Cache::builder().memory(16 << 20).build().expect("a cache"));
        let (id, attached) = attach_by_path(&owner, &path);
        let other = owner.cache().open(&path).expect("it is there");
        let place = quinion::internals::arena::control::place_of(
            id,
            quinion::internals::arena::control::ATTACHED_PLACES,
        );
        let counts = || !owner.cache().share().control().control().attached[place].is_zero();
        for _ in 0..3 {
            owner.detach(attached.as_ref().expect("nobody has it open for writing").handle);
            let (_, again) = attach_by_path(&owner, &path);
            owner.detach(again.expect("nobody has it open for writing").handle);
            owner.settle_still_open();
            assert!(counts());
        }
        drop(other);
        owner.window_ended(&ViewerTotals::default());
        assert!(!counts(), "nobody would be told of it");
    }
}

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
//! Where the memory is too small for the files that are read (`owner/thrash.rs`), files are left to the kernel until
//! the others fit, and are refused from then on.
//!
//! Each part has its own file, and its own lock:
//!
//! | part | what |
//! |---|---|
//! | `AttachedFiles` | what viewers have open and pinned, by handle |
//! | `FileAdmission` | whether a file may be attached: rules, programs that watch, leases; and the report of it |
//! | `MemoryShortage` | files that are left to the kernel because memory is too small |
//! | `BackgroundCopies` | files that are copied out of the kernel's cache while no read waits |
//! | `AccessCounts` | which files are read most |
//! | `ClosingFiles` | files that no viewer has, and whose descriptors are open still |
//!
//! Locks: all are of the rank `Viewer`, so none is held while another of them is taken; nor while a file is opened,
//! read or closed.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::serve::{
    AttachReason, Attached, Caching, FileMode, NAMED_DEVICE, NameRefusal, NamedAttachment, Owner,
    RevisionRequest, ServiceHandle, ViewerTotals, WatchingProcess, WriterAccess, file_id,
};
use crate::viewer::sys::Errno;
use quinion::internals::arena::control::{Advice, AttachPolicy};
use quinion::internals::arena::{ArenaError, ArenaShare, Validation};
use quinion::internals::error::{Error, ErrorKind};
use quinion::internals::folio::KeptMemory;
use quinion::internals::readahead::Hint;
use quinion::internals::serving::{ServedCache, ServedFile, touch};
use quinion::internals::sync::contained;
use quinion::internals::units::{FileId, Frame, PAGE_SIZE, PageIndex};
use quinion::{Cache, File};

mod guarantee;
mod truncation_watch;
mod thrash;
mod shortage;
mod admission;
mod hot_files;
mod named;
mod attached_files;
mod background_copy;
mod closing_files;

use admission::{ALL_FILES, FileAdmission, OpenRequest, TOO_LARGE, TOO_SMALL, WATCHED};
pub use attached_files::AttachmentCounts;
use attached_files::{AttachedFiles, Attachment, Revocation};
use background_copy::{AttachAttempt, BackgroundCopies, CopyBudget, CopyEnd, CopyRequest};
use closing_files::ClosingFiles;
use guarantee::Unserved;
pub use guarantee::{ServeRules, WithoutLease};
pub use hot_files::HotFile;
use hot_files::{AccessCounts, RankedFile};
pub use named::{NameOpener, NamedObject};
pub use shortage::Shortage;
use shortage::{Decision, ShortageEntry};
use thrash::{Candidate, WindowSums};

/// A [`Cache`] on behalf of viewers: opens the files they attach, and keeps the bytes they are shown current.
#[derive(Debug)]
pub struct CacheOwner {
    cache: Cache,
    admission: FileAdmission,
    files: AttachedFiles,
    accesses: AccessCounts,
    copies: Option<BackgroundCopies>,
    closing: ClosingFiles,
    /// `None`: nothing is opened by a name.
    opener: Option<Arc<dyn NameOpener>>,
    #[cfg(test)]
    before_noted: tests::BeforeNoted,
}

const LET_GO_TRIES: u32 = 20;
const LET_GO_PAUSE: Duration = Duration::from_millis(5);

impl CacheOwner {
    /// An owner that serves files of `cache`. The cache closes the descriptors of files that no handle has open from
    /// now on.
    pub fn new(cache: Cache) -> Self {
        cache.park_idle_files();
        Self {
            cache,
            admission: FileAdmission::new(),
            files: AttachedFiles::new(),
            accesses: AccessCounts::new(),
            copies: None,
            closing: ClosingFiles::new(),
            opener: None,
            #[cfg(test)]
            before_noted: tests::BeforeNoted::default(),
        }
    }

    /// Has the owner leave files to the kernel until they have been read some times; then they are copied out of its
    /// page cache while no read waits. Reads of data that is read once are as fast as the kernel's, and not faster.
    #[must_use]
    pub fn attach_lazily(mut self) -> Self {
        self.copies = Some(BackgroundCopies::new(self.cache.clone()));
        self
    }

    /// Sets the rules by which files are served. The default serves files that have a lease.
    #[must_use]
    pub fn with_rules(mut self, rules: ServeRules) -> Self {
        self.admission.rules = rules;
        self
    }

    /// Has `opener` open names for viewers.
    #[must_use]
    pub fn with_opener(mut self, opener: Arc<dyn NameOpener>) -> Self {
        self.opener = Some(opener);
        self
    }

    /// Counts of the files and pins that viewers have now.
    pub fn attachments(&self) -> AttachmentCounts {
        self.files.counts()
    }

    fn opener(&self) -> Result<&Arc<dyn NameOpener>, NameRefusal> {
        let none = || NameRefusal {
            error: Errno::OPNOTSUPP,
            text: "this cache serves files alone; start one that was given stores".into(),
        };
        self.opener.as_ref().ok_or_else(none)
    }

    /// Notes an object that was opened by a name as attached.
    fn note_named(
        &self,
        object: Arc<dyn NamedObject>,
        place: NamedPlace,
    ) -> Result<NamedAttachment, NameRefusal> {
        let NamedPlace { device, path } = place;
        let file = Arc::new(object.file().clone());
        let failed = |error: Error| NameRefusal { error: errno(&error), text: error.to_string() };
        file.admit(Validation::Immutable).map_err(failed)?;
        let (cell, mapping) = file.record();
        let id = FileId { device, inode: u64::from(mapping.0) };
        self.accesses.attached(mapping, path.clone());
        let text = object.text();
        let handle = self.files.insert(Attachment::new(file, id, path).with_object(object));
        Ok(NamedAttachment { attached: Attached { handle, cell, id: mapping }, id, text })
    }

    fn close(&self, gone: impl IntoIterator<Item = Attachment>) {
        for Attachment { file, id, .. } in gone {
            let open = file.parked();
            drop(file); // it may be the last handle of the file, whose end waits for readahead
            if let Some(open) = open {
                self.closing.note(self.cache.arena().share().control().control(), id, open);
            }
        }
    }

    fn settle_closing(&self) {
        self.closing.settle(self.cache.arena().share().control().control());
    }

    /// Closes a file that no viewer has; a request that is being answered, or a copy, may keep it a moment longer.
    fn close_unattached(&self, id: FileId) {
        for _ in 0..LET_GO_TRIES {
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

    /// Files left to the kernel because memory is too small.
    pub fn shortage(&self) -> Shortage {
        self.admission.shortage.report()
    }

    /// The files that viewers read most, hottest first. Costs some ten nanoseconds for each of their cached folios.
    pub fn hottest(&self, most: usize) -> Vec<HotFile> {
        let cached_bytes = |mapping| {
            let residency = self.files.with_mapping(mapping)?.residency(0, u64::MAX).ok()?;
            Some(residency.cached_pages * PAGE_SIZE as u64)
        };
        let hot =
            |RankedFile { id, name, requests }| HotFile { name, requests, cached_bytes: cached_bytes(id) };
        self.accesses.hottest(most).into_iter().map(hot).collect()
    }

    /// `Err`: the viewer must not trust the cached pages.
    fn valid_file(&self, handle: u64) -> Result<Arc<File>, Errno> {
        let file = self.files.file(handle)?;
        match file.validation() {
            Validation::Kernel if self.admission.shortage.is_refused(self.files.id_of(handle)) => {
                Err(Errno(libc::ENOMEM))
            }
            Validation::Kernel => Err(Errno::TXTBSY),
            _ => Ok(file),
        }
    }

    fn revoke_for(&self, id: FileId, why: &str) {
        let gone = self.take_from_viewers(id, why);
        self.close_for_good(id, gone);
    }

    /// No viewer is served this file when this returns. Returns the files to be closed.
    fn take_from_viewers(&self, id: FileId, why: &str) -> Vec<Attachment> {
        self.files.revoke(id);
        let gone = self.files.remove_file(id);
        if let Some(known) = gone.first() {
            known.file.invalidate_for_cut(); // a viewer that looks from here on finds that it may trust nothing
            self.admission.note_unserved(id, &known.path, why);
        }
        gone
    }

    /// Closes the files taken from viewers, which may wait for the file system.
    fn close_for_good(&self, id: FileId, gone: Vec<Attachment>) {
        self.close(gone);
        if let Some(copies) = &self.copies {
            copies.forget(id);
        }
        self.close_unattached(id);
        self.settle_closing();
    }

    fn note_shortage(&self, entry: ShortageEntry) {
        // A file that is copied may have a part of memory at most.
        let memory_min =
            self.copies.as_ref().map_or(0, |_| entry.bytes.saturating_mul(background_copy::FILES_MIN));
        self.admission.shortage.note(entry, &self.files.candidates(), memory_min);
    }

    fn refuse_thrashing_files(&self) {
        let capacity = thrash::capacity_of(self.cache.arena().bound());
        let mut files: Vec<_> = self.files.candidates().into_values().collect();
        files.retain(|file| !self.admission.shortage.is_refused(file.id)); // their viewers are about to detach them
        files.retain(|file| file.id.device & NAMED_DEVICE == 0); // the kernel cannot read an object
        for chosen in thrash::choose(files, capacity) {
            let Candidate { id, bytes, .. } = chosen;
            // First, so that a viewer that attaches it from here on is refused; see `FileAdmission::admit`.
            self.note_shortage(ShortageEntry { id, bytes, decision: Decision::Refused });
            if let Some(file) = self.files.with_id(id) {
                file.invalidate_for_cut(); // a viewer that looks from here on finds that it may trust nothing
            }
        }
    }

    /// Copies a file out of the kernel's cache, if it can be served. It is attached meanwhile, without a viewer, so a
    /// lease that ends drops the copied pages.
    fn copy(&self, request: &CopyRequest, service: &dyn ServiceHandle) -> CopyEnd {
        let path = format!("/proc/self/fd/{}", request.file().as_raw_fd());
        let name = std::fs::read_link(&path).unwrap_or_default();
        let opened = OpenRequest { path: &path, name: &name, id: request.id() };
        let Ok((handle, file)) = self.open_and_note(&opened, || true) else {
            return CopyEnd::Aborted;
        };
        let copy_step = |step: Range<u64>| {
            let begun = Instant::now();
            let is_current = service.is_running() && !request.is_over() && self.valid_file(handle).is_ok();
            let done = is_current && file.make_ready(step.start, (step.end - step.start) as usize).is_ok();
            if done && service.has_viewers() {
                sleep(background_copy::rest_after(begun.elapsed()));
            }
            done
        };
        // After a panic, too, the file is closed.
        let is_whole = contained(|| request.steps().all(copy_step)).unwrap_or(false);
        let known = self.files.remove(handle);
        drop(file);
        self.close(known);
        if is_whole { CopyEnd::Copied } else { CopyEnd::Aborted }
    }

    /// Opens a file, if it may be served, and notes it as attached. `is_taken_over`: it is filled through the kernel's
    /// page cache. A viewer that says in between that the file is truncated does not find it noted, and no lease
    /// tells of that: then it is given up. If so many files were revoked that it is not known, it may be asked for
    /// again.
    fn open_and_note(
        &self,
        request: &OpenRequest<'_>,
        is_taken_over: impl FnOnce() -> bool,
    ) -> Result<(u64, Arc<File>), Errno> {
        let revocations = self.files.revocations();
        let file = self.admission.open(&self.cache, request)?;
        if is_taken_over() {
            file.read_by_kernels_cache();
        }
        #[cfg(test)]
        self.before_noted.act(self);
        let attachment = Attachment::new(Arc::clone(&file), request.id, request.name.to_owned());
        match self.files.insert_if_unrevoked(attachment, revocations) {
            Ok(handle) => Ok((handle, file)),
            Err(revocation) => {
                file.invalidate_for_cut();
                Err(if revocation == Revocation::Unknown { Errno::AGAIN } else { Errno::TXTBSY })
            }
        }
    }
}

/// Where an object is that is opened by a name.
struct NamedPlace {
    device: u64,
    path: PathBuf,
}

const WRITTEN: &str = "another process has the file open for writing, or mapped for writing";

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
        self.cache.arena().share()
    }

    fn unserved_file_system(&self, path: &Path, id: FileId) {
        self.admission.note_unserved(id, path, Unserved::FileSystem.to_string());
    }

    fn release_idle(&self) {
        if let Some(copies) = &self.copies {
            copies.release();
        }
        self.cache.release_idle();
        self.settle_closing();
    }

    fn close_idle(&self, id: FileId) {
        if let Some(copies) = &self.copies {
            copies.close(id);
        }
        if self.files.with_id(id).is_none() {
            self.close_unattached(id);
        }
        self.settle_closing();
    }

    fn about_to_stop(&self) {
        self.cache.give_up_leases();
    }

    fn attach(&self, file: OwnedFd, id: FileId) -> Result<Attached, Errno> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = std::fs::read_link(&path).unwrap_or_else(|_| path.clone().into());
        let is_taken_over = || self.copies.as_ref().is_some_and(|copies| copies.is_taken_over(id));
        let request = OpenRequest { path: &path, name: &name, id };
        let (handle, opened) = self.open_and_note(&request, is_taken_over)?;
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
            self.files.revoke(id);
        }
        let file = self.files.with_id(id).filter(|_| id.device & NAMED_DEVICE == 0);
        let Some(file) = file else { return };
        match access {
            WriterAccess::Write => file.expect_writer(self.admission.rules.without_lease()),
            WriterAccess::Truncate => file.invalidate_for_cut(),
        }
    }

    fn revoke(&self, id: FileId) {
        if id.device & NAMED_DEVICE != 0 {
            return; // no program has a lease on an object
        }
        self.revoke_for(id, "a program wants a lease on it");
    }

    fn watched(&self, id: FileId, watcher: &WatchingProcess) {
        if id.device & NAMED_DEVICE != 0 {
            return;
        }
        // First, so that a viewer that attaches it from here on is refused; see `FileAdmission::admit`.
        self.admission.add_watched(id, watcher);
        if id != ALL_FILES {
            return self.revoke_for(id, WATCHED);
        }
        self.files.revoke(ALL_FILES); // one that is being attached is not among the files
        let mut files = self.files.ids();
        files.retain(|id| id.device & NAMED_DEVICE == 0); // no program watches an object of a store
        // No viewer is served any of them when the first is closed, which may hang.
        let gone: Vec<_> = files.into_iter().map(|id| (id, self.take_from_viewers(id, WATCHED))).collect();
        gone.into_iter().for_each(|(id, gone)| self.close_for_good(id, gone));
        self.release_idle();
    }

    fn modes(&self) -> Vec<FileMode> {
        self.admission.modes()
    }

    fn window_ended(&self, totals: &ViewerTotals) {
        for gone in self.cache.forget_lingering() {
            self.copies.iter().for_each(|copies| copies.forget(gone)); // it is the kernel's again
        }
        self.settle_closing();
        self.admission.forget_ended_watchers();
        let Some(copies) = &self.copies else {
            return; // with `--attach at-once` each file is served, however small the cache is
        };
        copies.close_overdue();
        let stats = self.cache.stats();
        let (evicted, refaulted) = (stats.evicted_pages, stats.refaulted_pages);
        let sums = WindowSums { reads: totals.reads, misses: totals.misses, evicted, refaulted };
        if self.admission.shortage.window_ended(sums, self.files.is_empty()) {
            self.refuse_thrashing_files();
        }
    }

    fn attach_policy(&self) -> AttachPolicy {
        let attach_policy =
            self.copies.as_ref().map_or(AttachPolicy::default(), |_| background_copy::LAZY_ATTACH);
        AttachPolicy {
            checks_times: self.admission.rules.coherence == WithoutLease::CheckTimes,
            any_file_system: self.admission.rules.any_file_system,
            ..attach_policy
        }
    }

    fn leaves_to_kernel(&self, file: BorrowedFd<'_>, id: FileId, reason: AttachReason) -> Option<u64> {
        let copies = self.copies.as_ref()?;
        if self.admission.is_watched(id) {
            return None; // the viewer that attaches it is told
        }
        self.admission.rules.check(&format!("/proc/self/fd/{}", file.as_raw_fd()), Path::new(""), id).ok()?;
        if self.admission.shortage.is_refused(id) {
            return None; // the viewer that attaches it is told
        }
        let bound = self.cache.arena().bound();
        let budget = CopyBudget { file: bound / background_copy::FILES_MIN, all: thrash::capacity_of(bound) };
        let attached = || self.files.candidates().into_iter().map(|(id, file)| (id, file.bytes)).collect();
        let left = copies.kernel_credit(AttachAttempt { descriptor: file, id, reason }, budget, attached)?;
        if let Some(bytes) = left.short {
            self.note_shortage(ShortageEntry { id, bytes, decision: Decision::NotCopied });
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let name = std::fs::read_link(path).unwrap_or_default();
            let why = if bytes > budget.file { TOO_LARGE } else { TOO_SMALL };
            self.admission.note_unserved(id, &name, why);
        }
        Some(left.credit)
    }

    fn prepare(&self, service: &dyn ServiceHandle) {
        let Some(copies) = &self.copies else { return };
        while let Some(request) = copies.next_request() {
            let id = request.id();
            let mut end = CopyEnd::Aborted;
            // A copy that panics has failed, and is said to have ended: the others wait for that.
            contained(|| service.while_attached(id, &mut || end = self.copy(&request, service)));
            copies.end(request, end);
            if end == CopyEnd::Copied {
                self.cache.arena().share().control().control().note_taken(id);
            }
        }
    }

    fn device_of_name(&self, name: &[u8]) -> Result<u64, NameRefusal> {
        Ok(self.opener()?.place(name)? | NAMED_DEVICE)
    }

    fn open_named(&self, name: &[u8]) -> Result<NamedAttachment, NameRefusal> {
        let device = self.device_of_name(name)?;
        let object = self.opener()?.open(name)?;
        self.note_named(
            object,
            NamedPlace { device, path: String::from_utf8_lossy(name).into_owned().into() },
        )
    }

    fn opens_revisions(&self) -> bool {
        self.opener.as_ref().is_some_and(|opener| opener.opens_revisions())
    }

    fn open_revision(&self, request: RevisionRequest<'_>) -> Result<NamedAttachment, NameRefusal> {
        let id = file_id(&request.file).ok_or_else(|| NameRefusal {
            error: Errno::OPNOTSUPP,
            text: "it is no regular file; read it by itself".into(),
        })?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", request.file.as_raw_fd()));
        let object = self.opener()?.open_revision(request)?;
        let path = path.unwrap_or_default();
        self.note_named(object, NamedPlace { device: id.device | NAMED_DEVICE, path })
    }

    fn pin(&self, handle: u64, position: u64, len: u64) -> Result<(u64, u64), Errno> {
        self.files.pin(handle, position, len)
    }

    fn kept_by(&self, handle: u64, pin: u64) -> Option<KeptMemory> {
        self.files.kept_by(handle, pin)
    }

    fn unpin(&self, handle: u64, pin: u64) {
        self.files.unpin(handle, pin);
    }

    fn leave_pins(&self, handle: u64) {
        self.files.leave_pins(handle);
    }

    fn fill(&self, handle: u64, position: u64, len: u64, caching: Caching) -> Result<(), Errno> {
        let len = usize::try_from(len).map_err(|_| Errno(libc::EINVAL))?;
        self.files.count_fill(handle);
        let file = self.valid_file(handle)?;
        self.accesses.add(file.record().1);
        if let Some(object) = self.files.object(handle) {
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
        if let (Advice::WillNeed, Some(object)) = (advice, self.files.object(handle)) {
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
        let Some(gone) = self.files.remove(handle) else { return };
        if gone.file.validation() == Validation::Kernel {
            let why = if self.admission.shortage.is_refused(gone.id) { TOO_SMALL } else { WRITTEN };
            self.admission.note_unserved(gone.id, &gone.path, why);
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
mod tests;

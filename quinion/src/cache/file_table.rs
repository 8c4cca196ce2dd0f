//! The table of files: which file has which mapping, and how long a mapping without open handles stays.
//!
//! ```text
//!   open     identity --table--> known: one handle more          parked, and not to be trusted: taken for new
//!                                else a mapping of its own
//!   release  the last handle goes --> idle --> forgotten: it has no folio, there are too many, its file was removed
//!                                          --> parked: its descriptor is closed, and it is known by mount and version
//! ```
//!
//! A mapping without open handles is kept for its folios; the oldest goes when there are too many, because each keeps
//! a descriptor open. In a cache that reads on behalf of other programs it is **parked**, without a descriptor, and
//! known by its mount, identity and version; or forgotten, where these are not conclusive. One whose file was removed
//! goes soon, to free its space: each open, and each end of a handle, checks some of them. One that was written stays
//! until its dirty pages are written back. Files are closed, and mappings removed, with the table's lock released:
//! both may wait for a file system ([`DeferredRelease`]).
//!
//! Invariants:
//!  1. At most one mapping for an identity.
//!  2. A mapping that has something to be written stays known.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::backend::{Attributes, Backend, Identity, ParkedBackend, ReapMode};
use crate::error::{Repr, Result};
use crate::filemap::Filemap;
use crate::mapping::{Mapping, NewMapping};
use crate::sync::LockWait;
use crate::units::{FileId, MappingId, PAGE_SIZE, PageIndex, PoolNumber};
use crate::xarray::INDICES_MAX;

use super::coherence::{Coherence, CoherenceState, ObservedTimes};
use super::{Cache, CacheInner};

/// Files without open handles that are checked at a time for having been removed.
pub(super) const LOOKED_AT: usize = 4;
/// Others may take the cell that was made, each time.
const RECORD_TRIES: u32 = 1000;
/// How long a file without open handles keeps its descriptor, if its mount has no number of its own.
const LINGERS: Duration = Duration::from_secs(1);
/// How long the end of the last handle waits for readahead in the file, if descriptors are not kept.
const CLOSING_MAX: Duration = Duration::from_millis(50);
const CLOSING_PAUSE: Duration = Duration::from_micros(200);
const RELEASE_MAX: Duration = Duration::from_millis(500);
#[derive(Debug, Default)]
pub(super) struct FileTable {
    files: HashMap<Identity, KnownFile>,
    idle: BTreeMap<u64, Identity>,
    idle_clock: u64,
    /// The idle mapping from which on the next check for removed files goes.
    looked_from: u64,
    last_id: u32,
    /// Parked backends whose descriptors were released, and may be open still for requests in flight.
    closing: Vec<ParkedBackend>,
    /// Idle mappings that are forgotten soon: since when they are idle, by the table's clock and by the system's.
    lingering: Vec<(u64, Instant)>,
}

#[derive(Debug)]
struct KnownFile {
    mapping: Arc<Mapping>,
    watch: Arc<CoherenceState>,
    handles: usize,
    idle_since: Option<u64>,
    /// Its mount, while it has no descriptor.
    parked_on: Option<u64>,
}

/// Work that a change of the table leaves to do without its lock: mappings that are forgotten, and backends that were
/// replaced.
#[derive(Debug, Default)]
struct DeferredRelease {
    mappings: Vec<Arc<Mapping>>,
    backends: Vec<Arc<dyn Backend>>,
}

impl Cache {
    /// Checks up to `most` files without open handles, and releases those that were removed; the next call continues
    /// there. For a cache that is idle for long: each open, and each end of a handle, checks some anyway. Asks the
    /// file system for each; takes the lock of the table of files for some steps. In a forked child it does nothing.
    pub fn release_removed_files(&self, most: usize) {
        if !self.shared.process.is_forked() {
            self.shared.look_for_removed(most);
        }
    }
}

impl CacheInner {
    /// Closes and forgets that file, if it has no open handle. Returns whether it is not known now, and nothing that
    /// was released is in flight still.
    pub(super) fn forget_idle(&self, id: FileId) -> bool {
        let mut gone = DeferredRelease::default();
        let mut table = self.table.lock();
        let is_it = |identity: &Identity| file_id(identity) == id;
        let is_written = |identity| table.files[identity].mapping.writeback().dirty_pages().total() == 0;
        let found = table.idle.iter().find(|(_, identity)| is_it(identity) && is_written(identity));
        if let Some(since) = found.map(|(&since, _)| since) {
            table.forget_into(since, &mut gone);
        }
        let is_known = table.files.keys().any(is_it);
        drop(table);
        self.end_all(gone);
        !is_known && !self.is_closing()
    }

    /// Forgets the files that are kept open only because their mount has no number, and were not opened for a second.
    /// Returns them.
    pub(super) fn forget_lingering(&self) -> Vec<FileId> {
        let (mut gone, mut names) = (DeferredRelease::default(), Vec::new());
        let mut table = self.table.lock();
        let (due, not_yet) = std::mem::take(&mut table.lingering)
            .into_iter()
            .partition(|(_, closed)| closed.elapsed() >= LINGERS);
        table.lingering = not_yet;
        let due: Vec<(u64, Instant)> = due;
        for (since, _) in due {
            // One that was opened meanwhile is not idle, or since another time.
            names.extend(table.idle.get(&since).map(file_id));
            table.forget_into(since, &mut gone);
        }
        drop(table);
        self.end_all(gone);
        names
    }

    /// The mapping of the file that `attributes` are of, with one handle more. `backend` writes it from now on, if
    /// `writes` says so and no other does.
    pub(super) fn mapping_of(
        &self,
        backend: Arc<dyn Backend>,
        attributes: &Attributes,
        writes: bool,
    ) -> Result<(Arc<Mapping>, Arc<CoherenceState>)> {
        self.with_record(|| self.find_or_make(Arc::clone(&backend), attributes, writes))
    }

    /// Asks `make` for a value that takes a cell for a record, and evicts for the cell if there is none; no lock is
    /// held meanwhile.
    pub(super) fn with_record<T>(&self, mut make: impl FnMut() -> Option<T>) -> Result<T> {
        for _ in 0..RECORD_TRIES {
            if let Some(made) = make() {
                return Ok(made);
            }
            if !self.filemap.supply.make_nodes(PoolNumber::DEFAULT) {
                break;
            }
        }
        let pages = self.filemap.arena.stats().data_bytes / PAGE_SIZE as u64;
        Err(Repr::NoMemory { position: 0, pages }.into())
    }

    /// `None`: there is no cell for the mapping's record.
    fn find_or_make(
        &self,
        backend: Arc<dyn Backend>,
        attributes: &Attributes,
        writes: bool,
    ) -> Option<(Arc<Mapping>, Arc<CoherenceState>)> {
        let mut table = self.table.lock();
        // The same identity, and not to be trusted: another file, or another content. It is taken for new.
        let outdated = table.outdated(&*backend, attributes);
        if let Some(known) = table.files.get_mut(&attributes.identity) {
            known.handles += 1;
            let (mapping, watch) = (Arc::clone(&known.mapping), Arc::clone(&known.watch));
            if known.parked_on.take().is_some() {
                // Before another thread can find it: a thread that finds it asks this backend.
                drop(mapping.replace_backend(Arc::clone(&backend)));
            }
            if let Some(since) = known.idle_since.take() {
                table.idle.remove(&since);
            }
            drop(table);
            if writes {
                mapping.writeback().set_writer(backend);
            }
            return Some((mapping, watch));
        }
        let id = table.next_id(&self.filemap);
        let writer = writes.then(|| Arc::clone(&backend));
        let (arena, process) = (&self.filemap.arena, self.process);
        let new = Mapping::new(NewMapping { arena, id, backend, attributes, process });
        if let Some(gone) = outdated {
            self.filemap.supply.reclaim.remove_mapping(gone.id());
        }
        let mapping = new?;
        let reclaim = &self.filemap.supply.reclaim;
        let mapping = mapping.with_shadow_nodes(reclaim.shadow_nodes()).with_lists(reclaim.lists());
        let mapping = mapping.with_dirty_pages(self.filemap.supply.writeback.totals());
        let mapping = Arc::new(mapping.with_counters(&self.filemap.counters).with_hooks(self.filemap.hooks));
        if let Some(backend) = writer {
            mapping.writeback().set_writer(backend);
        }
        self.filemap.supply.reclaim.add_mapping(Arc::clone(&mapping));
        let watch = CoherenceState::new(&mapping, &self.filemap, &self.leases);
        let known = KnownFile {
            mapping: Arc::clone(&mapping),
            watch: Arc::clone(&watch),
            handles: 1,
            idle_since: None,
            parked_on: None,
        };
        table.files.insert(attributes.identity, known);
        Some((mapping, watch))
    }

    pub(super) fn release(&self, mapping: &Arc<Mapping>, watch: &CoherenceState, policy: Coherence) {
        let mut gone = DeferredRelease::default();
        let parks = self.parks.load(Ordering::Relaxed);
        // Before the lock of the table, which is not held while a lease's is waited for.
        let told = if parks { watch.observed_times(policy) } else { None };
        let open = if parks { mapping.backend().parked() } else { None };
        let mut table = self.table.lock();
        let Some(identity) = table.identity_of(mapping) else { return };
        let known = table.files.get_mut(&identity).expect("its identity was just found");
        known.handles -= 1;
        let is_idle = known.handles == 0;
        if is_idle {
            let since = table.retire(identity, &mut gone);
            if parks {
                table.park(since, told, KeepOpen::May, &mut gone);
            }
            table.bound_idle(self.idle_files_max, &mut gone);
        }
        drop(table);
        if is_idle && mapping.writeback().dirty_pages().dirty() > 0 {
            self.filemap.supply.writeback.start(mapping, PageIndex(0)..PageIndex(INDICES_MAX));
        }
        self.end_all(gone);
        if let Some(open) = open.filter(|_| is_idle && mapping.backend().parked().is_none()) {
            await_closed(&open);
        }
        if is_idle {
            self.look_for_removed(LOOKED_AT);
        }
    }

    /// With the table's lock released, since closing a file may wait for its file system.
    fn end_all(&self, gone: DeferredRelease) {
        for mapping in gone.mappings {
            self.filemap.supply.reclaim.remove_mapping(mapping.id());
        }
        drop(gone.backends);
    }

    /// Closes the descriptors of all files without open handles, and waits for requests in flight by them, half a
    /// second at most.
    pub(super) fn release_idle(&self) {
        let mut table = self.table.lock();
        let idle: Vec<_> = table
            .idle
            .iter()
            .map(|(&since, identity)| (since, Arc::clone(&table.files[identity].watch)))
            .collect();
        drop(table);
        let told: Vec<_> =
            idle.into_iter().map(|(since, watch)| (since, watch.observed_times(Coherence::Lease))).collect();
        let mut gone = DeferredRelease::default();
        table = self.table.lock();
        for (since, told) in told {
            table.park(since, told, KeepOpen::MustNot, &mut gone);
        }
        drop(table);
        self.end_all(gone);
        let begun = Instant::now();
        while self.is_closing() && begun.elapsed() < RELEASE_MAX {
            std::thread::sleep(CLOSING_PAUSE);
        }
    }

    /// Whether a released file is open still, for requests in flight by it. Reaps completions: readahead that no reader
    /// waits for completes only when a thread reaps it.
    fn is_closing(&self) -> bool {
        if let Some(parked) = self.closing() {
            parked.reap(ReapMode::Ready, &mut || false);
        }
        self.closing().is_some()
    }

    fn closing(&self) -> Option<ParkedBackend> {
        let mut table = self.table.lock();
        table.closing.retain(|parked| !parked.is_closed());
        table.closing.first().cloned()
    }

    pub(super) fn look_for_removed(&self, most: usize) {
        let mut removed = self.table.lock().some_idle(most);
        // No lock is held. A file without open handles is not dirtied.
        removed.retain(|(_, mapping)| {
            mapping.backend().is_removed() && mapping.writeback().dirty_pages().total() == 0
        });
        if removed.is_empty() {
            return;
        }
        let mut table = self.table.lock();
        // One that was opened meanwhile is not idle, or since another time.
        removed.retain(|&(since, _)| table.forget(since).is_some());
        drop(table);
        for (_, mapping) in removed {
            self.filemap.supply.reclaim.remove_mapping(mapping.id());
        }
    }
}

impl FileTable {
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    pub(super) fn mappings(&self) -> Vec<Arc<Mapping>> {
        self.files.values().map(|known| Arc::clone(&known.mapping)).collect()
    }

    pub(super) fn take(&mut self) -> Vec<Arc<Mapping>> {
        std::mem::take(&mut self.files).into_values().map(|known| known.mapping).collect()
    }

    pub(super) fn next_id(&mut self, filemap: &Filemap) -> MappingId {
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            let id = MappingId(self.last_id);
            if !filemap.supply.reclaim.knows(id) {
                return id;
            }
        }
    }

    fn identity_of(&self, mapping: &Arc<Mapping>) -> Option<Identity> {
        let identity = mapping.identity();
        self.files
            .get(&identity)
            .is_some_and(|known| Arc::ptr_eq(&known.mapping, mapping))
            .then_some(identity)
    }

    /// A mapping without handles goes if it has no folios, else it becomes idle. Returns since when.
    fn retire(&mut self, identity: Identity, gone: &mut DeferredRelease) -> u64 {
        let now = self.idle_clock;
        self.idle_clock += 1;
        self.idle.insert(now, identity);
        let known = self.files.get_mut(&identity).expect("an idle mapping is known");
        known.idle_since = Some(now);
        known.mapping.give_back_nodes(LockWait::Wait);
        // A page of a folio that has left may be on its way to the file still: a new open must not overtake it.
        if known.mapping.lock().pages() == 0 && known.mapping.writeback().dirty_pages().total() == 0 {
            self.forget_into(now, gone);
        }
        now
    }

    /// Forgets the oldest with nothing to be written, until `idle_max` are left.
    fn bound_idle(&mut self, idle_max: usize, gone: &mut DeferredRelease) {
        while self.idle.len() > idle_max {
            // Mappings with unwritten pages stay known, however many they are.
            let is_written = |identity| self.files[identity].mapping.writeback().dirty_pages().total() == 0;
            let oldest = self.idle.iter().find(|(_, identity)| is_written(identity)).map(|(&since, _)| since);
            let Some(oldest) = oldest else { break };
            self.forget_into(oldest, gone);
        }
    }

    /// Closes the descriptor of one that is idle since then. Its pages stay if they are of the version `told`, which
    /// its file's times will identify; else it is forgotten. One that has something to be written stays as it is;
    /// and, if it may linger, one of a mount that has no number, for [`Cache::forget_lingering`].
    fn park(
        &mut self,
        since: u64,
        told: Option<ObservedTimes>,
        linger: KeepOpen,
        gone: &mut DeferredRelease,
    ) {
        let Some(identity) = self.idle.get(&since) else { return };
        let known = self.files.get_mut(identity).expect("an idle mapping is known");
        let (mapping, backend) = (&known.mapping, known.mapping.backend());
        let Some(place) = backend.parked() else { return }; // it is parked, or has no descriptor
        if mapping.writeback().dirty_pages().total() > 0 {
            return;
        }
        let is_told = told == Some(ObservedTimes::of(mapping)) && mapping.writeback().writer().is_none();
        let Some(mount) = backend.mount().filter(|_| is_told) else {
            if is_told && linger == KeepOpen::May {
                return self.lingering.push((since, Instant::now()));
            }
            return self.forget_into(since, gone);
        };
        known.parked_on = Some(mount);
        gone.backends.extend([backend, mapping.replace_backend(Arc::new(place.clone()))]);
        self.note_closing(place);
    }

    fn note_closing(&mut self, place: ParkedBackend) {
        self.closing.retain(|parked| !parked.is_closed());
        self.closing.push(place);
    }

    /// Forgets the mapping that is parked under the identity of `now`, if it is outdated, and returns it.
    fn outdated(&mut self, backend: &dyn Backend, now: &Attributes) -> Option<Arc<Mapping>> {
        let known = self.files.get(&now.identity)?;
        let mount = known.parked_on?;
        let is_same =
            backend.mount() == Some(mount) && ObservedTimes::of(&known.mapping) == ObservedTimes::by(now);
        if is_same { None } else { self.forget(known.idle_since?) }
    }

    fn forget_into(&mut self, since: u64, gone: &mut DeferredRelease) {
        let Some(mapping) = self.forget(since) else { return };
        let backends = [Some(mapping.backend()), mapping.writeback().writer().cloned()];
        let places = backends.into_iter().flatten().filter_map(|backend| backend.parked());
        places.for_each(|place| self.note_closing(place));
        gone.mappings.push(mapping);
    }

    fn some_idle(&mut self, most: usize) -> Vec<(u64, Arc<Mapping>)> {
        let idle = self.idle.range(self.looked_from..).take(most);
        let some: Vec<_> =
            idle.map(|(&since, identity)| (since, Arc::clone(&self.files[identity].mapping))).collect();
        self.looked_from = some.last().filter(|_| some.len() == most).map_or(0, |&(since, _)| since + 1);
        some
    }

    fn forget(&mut self, since: u64) -> Option<Arc<Mapping>> {
        let identity = self.idle.remove(&since)?;
        self.files.remove(&identity).map(|known| known.mapping)
    }
}

/// Waits for a released file to be closed, [`CLOSING_MAX`] at most, and reaps.
fn await_closed(file: &ParkedBackend) {
    let begun = Instant::now();
    while !file.is_closed() && begun.elapsed() < CLOSING_MAX {
        file.reap(ReapMode::Ready, &mut || false);
        std::thread::sleep(CLOSING_PAUSE);
    }
}
/// Whether a file without open handles may stay open for a while, where only that keeps its cached pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeepOpen {
    May,
    MustNot,
}

fn file_id(identity: &Identity) -> FileId {
    FileId { device: identity.device, inode: identity.inode }
}

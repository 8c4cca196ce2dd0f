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
//! until its dirty pages are written back, and durable: a sync of the cache promises that of closed files, too. If too
//! many of a device wait for a sync, the end of a handle syncs some of them. One that has no name any more needs no
//! sync. Files are closed, and mappings removed, with the table's lock released: both may wait for a file system
//! ([`DeferredRelease`]).
//!
//! Invariants:
//!  1. At most one mapping for an identity.
//!  2. A mapping that has something to be written stays known; and one that has something to be made durable, unless
//!     its file has no name.
//!  3. An error of writing that was told to no handle is told by a later sync of the cache, if the file is forgotten.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::backend::{Attributes, Backend, Identity, ParkedBackend, ReapMode, is_waking};
use crate::error::{Repr, Result};
use crate::filemap::Filemap;
use crate::mapping::{Mapping, NewMapping};
use crate::sync::{LockWait, contained};
use crate::units::{FileId, MappingId, Millis, PAGE_SIZE, PageIndex, PoolNumber};
use crate::xarray::INDICES_MAX;

use super::coherence::{Coherence, CoherenceState, ObservedTimes};
use super::first_open::{FirstOpen, FirstOpens, TurnEnd};
use super::{Cache, CacheInner};

/// Files without open handles that are checked at a time for having been removed.
pub(super) const REMOVAL_CHECKS_MAX: usize = 4;
/// Tries to get a cell for a record: other threads may take the cell that was made, each time.
const RECORD_TRIES: u32 = 1000;
/// How long a file without open handles keeps its descriptor, if its mount has no number of its own.
const LINGERS: Duration = Duration::from_secs(1);
/// How long the end of the last handle waits for readahead in the file, if descriptors are not kept.
const CLOSING_MAX: Duration = Duration::from_millis(50);
const CLOSING_PAUSE: Duration = Duration::from_micros(200);
const RELEASE_MAX: Duration = Duration::from_millis(500);
/// Files that one end of a handle syncs at most, if too many wait for that. The first waits for a journal, and the
/// others were mostly in the same transaction.
const SYNCED_MAX: usize = 64;
/// Files that one end of a handle looks at at most, to find these.
const SYNC_CANDIDATES_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct FileTable {
    files: HashMap<Identity, KnownFile>,
    idle: BTreeMap<u64, Identity>,
    /// Idle files that had nothing to be written or synced when they were looked at last.
    settled: BTreeSet<u64>,
    unsettled: Unsettled,
    idle_clock: u64,
    /// The idle mapping from which on the next check for removed files goes.
    scan_from: u64,
    last_id: u32,
    pub(super) first_opens: FirstOpens,
    /// The last error of writing to a forgotten file that no handle was told of.
    untold_error: Option<i32>,
    /// Parked backends whose descriptors were released, and may be open still for requests in flight.
    closing: Vec<ParkedBackend>,
    /// Idle mappings that are forgotten soon: since when they are idle, by the table's clock and by the system's.
    lingering: Vec<(u64, Instant)>,
}

/// The other idle files, by device, since one may hang.
#[derive(Debug, Default)]
struct Unsettled {
    devices: HashMap<u64, UnsettledFiles>,
    /// How many there are.
    files: usize,
}

/// Unsettled files of one device, by the time since when they are idle.
#[derive(Debug, Default)]
struct UnsettledFiles {
    since: BTreeSet<u64>,
    /// Where the next look for files to sync begins: those before were looked at.
    scanned_to: u64,
}

impl Unsettled {
    fn insert(&mut self, device: u64, since: u64) {
        self.files += usize::from(self.devices.entry(device).or_default().since.insert(since));
    }
    fn remove(&mut self, device: u64, since: u64) {
        let Some(files) = self.devices.get_mut(&device) else { return };
        self.files -= usize::from(files.since.remove(&since));
        if files.since.is_empty() {
            self.devices.remove(&device);
        }
    }
    fn of_device(&self, device: u64) -> usize {
        self.devices.get(&device).map_or(0, |files| files.since.len())
    }
    fn iter(&self) -> impl Iterator<Item = &u64> {
        self.devices.values().flat_map(|files| &files.since)
    }
    /// Files of `device`, `SYNC_CANDIDATES_MAX` at most, from where the last look ended, in cyclic order.
    fn next_of(&mut self, device: u64) -> Vec<u64> {
        let Some(files) = self.devices.get_mut(&device) else { return Vec::new() };
        let (before, behind) = (files.since.range(..files.scanned_to), files.since.range(files.scanned_to..));
        behind.chain(before).copied().take(SYNC_CANDIDATES_MAX).collect()
    }
    fn note_scanned_to(&mut self, device: u64, since: u64) {
        if let Some(files) = self.devices.get_mut(&device) {
            files.scanned_to = since + 1;
        }
    }
}

#[derive(Debug)]
struct KnownFile {
    mapping: Arc<Mapping>,
    watch: Arc<CoherenceState>,
    handles: usize,
    idle_since: Option<u64>,
    /// Mount of the file, while it has no descriptor.
    parked_on: Option<u64>,
}

#[derive(Debug)]
pub(super) enum MappingLookup<'a> {
    /// One handle more is counted.
    Known(Arc<Mapping>, Arc<CoherenceState>),
    /// The mapping is new, with one handle; the open has it to itself until it ends its turn.
    Made(Arc<Mapping>, Arc<CoherenceState>, FirstOpen<'a>),
    /// Another open makes it: to be waited for.
    IsOpening(Arc<TurnEnd>),
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
            self.shared.release_removed(most);
        }
    }
}

impl CacheInner {
    /// Closes and forgets that file, if it has no open handle. Returns whether it is not known now, and nothing that
    /// was released is in flight still.
    pub(super) fn forget_idle(&self, id: FileId) -> bool {
        let is_it = |identity: &Identity| file_id(identity) == id;
        self.sync_idle(is_it);
        let mut gone = DeferredRelease::default();
        let mut table = self.table.lock();
        let is_done = |identity| table.files[identity].mapping.has_nothing_to_sync();
        let found = table.idle.iter().find(|(_, identity)| is_it(identity) && is_done(identity));
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

    /// The mapping of the file that `attributes` are of, with one handle more; if none is known, one that reads by
    /// `backend`.
    pub(super) fn mapping_of(
        &self,
        backend: &Arc<dyn Backend>,
        attributes: &Attributes,
    ) -> Result<MappingLookup<'_>> {
        self.with_record(|| self.find_or_make(Arc::clone(backend), attributes))
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
    fn find_or_make(&self, backend: Arc<dyn Backend>, attributes: &Attributes) -> Option<MappingLookup<'_>> {
        let mut table = self.table.lock();
        if let Some(end) = table.first_opens.turn_with(&attributes.identity) {
            return Some(MappingLookup::IsOpening(end));
        }
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
                table.settled.remove(&since);
                table.unsettled.remove(attributes.identity.shared_device(), since);
            }
            return Some(MappingLookup::Known(mapping, watch));
        }
        let id = table.next_id(&self.filemap);
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
        let turn = table.first_opens.begin(self, attributes.identity);
        Some(MappingLookup::Made(mapping, watch, turn))
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
        let mut unsynced = Vec::new();
        if is_idle {
            let since = table.retire(identity, &mut gone);
            if parks {
                table.park(since, told, KeepOpen::May, &mut gone);
            }
            // Of its own device, since another may hang.
            let now = self.filemap.supply.writeback.now();
            let bound = IdleBound { files_max: self.idle_files_max, device: identity.shared_device(), now };
            unsynced = table.bound_idle(bound, &mut gone);
        }
        drop(table);
        if is_idle && mapping.writeback().dirty_pages().dirty() > 0 {
            self.filemap.supply.writeback.start(mapping, PageIndex(0)..PageIndex(INDICES_MAX));
        }
        self.end_all(gone);
        // A waker does not wait for a device; the end of another handle does.
        if !is_waking() {
            self.forget_synced(unsynced);
        }
        if let Some(open) = open.filter(|_| is_idle && mapping.backend().parked().is_none()) {
            await_closed(&open);
        }
        if is_idle {
            self.release_removed(REMOVAL_CHECKS_MAX);
        }
    }

    /// Syncs those, and forgets the ones that are idle still and durable.
    fn forget_synced(&self, unsynced: Vec<(u64, Arc<Mapping>)>) {
        for (since, mapping) in unsynced {
            // A backend that panics has synced nothing, and is none of this handle's.
            contained(|| self.filemap.supply.writeback.make_flushed_durable(&mapping));
            let mut gone = DeferredRelease::default();
            let mut table = self.table.lock();
            if table.is_idle_since(since, &mapping) && table.settle(since) {
                table.forget_into(since, &mut gone);
            }
            drop(table);
            self.end_all(gone);
        }
    }

    /// Syncs the files without handles, of those that `which` says, that only have to be synced.
    fn sync_idle(&self, which: impl Fn(&Identity) -> bool) {
        let table = self.table.lock();
        let unsettled =
            table.unsettled.iter().map(|since| &table.idle[since]).filter(|identity| which(identity));
        let mappings: Vec<_> = unsettled.map(|identity| Arc::clone(&table.files[identity].mapping)).collect();
        drop(table);
        for mapping in mappings.into_iter().filter(|mapping| mapping.has_nothing_to_write()) {
            contained(|| self.filemap.supply.writeback.make_flushed_durable(&mapping));
        }
    }

    /// An error that [`CacheInner::untold_error`] is to tell, if there is one.
    pub(super) fn keep_untold(&self, error: Option<i32>) {
        let mut table = self.table.lock();
        table.untold_error = error.or(table.untold_error);
    }

    /// The last error of writing to a file that was forgotten before a handle was told.
    pub(super) fn untold_error(&self) -> Option<i32> {
        self.table.lock().untold_error.take()
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
        self.sync_idle(|_| true);
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

    pub(super) fn release_removed(&self, most: usize) {
        let mut removed = self.table.lock().some_idle(most);
        // No lock is held.
        removed.retain(|(_, mapping)| mapping.backend().is_removed());
        if removed.is_empty() {
            return;
        }
        let mut table = self.table.lock();
        // One that was opened meanwhile is not idle, or since another time. Others are not dirtied, unless a flush
        // fails.
        removed.retain(|(since, mapping)| {
            table.is_idle_since(*since, mapping)
                && mapping.has_nothing_to_write()
                && !mapping.writeback().is_syncing()
                && table.forget(*since).is_some()
        });
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

    /// Makes a mapping without handles idle, or forgets it if it has no folios. Returns when it became idle.
    fn retire(&mut self, identity: Identity, gone: &mut DeferredRelease) -> u64 {
        let now = self.idle_clock;
        self.idle_clock += 1;
        self.idle.insert(now, identity);
        let known = self.files.get_mut(&identity).expect("an idle mapping is known");
        known.idle_since = Some(now);
        known.mapping.give_back_nodes(LockWait::Wait);
        let is_empty = known.mapping.lock().pages() == 0;
        // A page of a folio that has left may be on its way to the file still: a new open must not overtake it.
        if self.settle(now) && is_empty {
            self.forget_into(now, gone);
        }
        now
    }

    /// Forgets settled files, the longest idle first, until `files_max` of them are left. Unsettled files stay, however
    /// many they are. If they are more than `files_max`, too, some of `device` are checked, and forgotten if they have
    /// settled. If `device` alone has more, [`SYNCED_MAX`] of its files at most are returned that only need a sync,
    /// each with when it became idle; a file whose write-back failed a moment ago is left out.
    fn bound_idle(&mut self, bound: IdleBound, gone: &mut DeferredRelease) -> Vec<(u64, Arc<Mapping>)> {
        let IdleBound { files_max, device, now } = bound;
        while self.settled.len() > files_max {
            let Some(&since) = self.settled.first() else { break };
            // A sync that failed has made pages dirty again.
            if self.settle(since) {
                self.forget_into(since, gone);
            }
        }
        let mut unsynced = Vec::new();
        if self.unsettled.files <= files_max {
            return unsynced;
        }
        let are_many = self.unsettled.of_device(device) > files_max;
        for since in self.unsettled.next_of(device) {
            if unsynced.len() == SYNCED_MAX {
                break;
            }
            self.unsettled.note_scanned_to(device, since);
            let mapping = &self.files[&self.idle[&since]].mapping;
            if mapping.has_nothing_to_sync() {
                self.forget_into(since, gone);
            } else if are_many
                && mapping.writeback().paused_until().is_none_or(|until| until <= now)
                && mapping.has_nothing_to_write()
            {
                unsynced.push((since, Arc::clone(mapping)));
            }
        }
        unsynced
    }

    /// Puts the file that is idle since `since` among the settled or the unsettled ones. Whether it is settled.
    fn settle(&mut self, since: u64) -> bool {
        let identity = &self.idle[&since];
        let is_settled = self.files[identity].mapping.has_nothing_to_sync();
        let device = identity.shared_device();
        if is_settled {
            self.unsettled.remove(device, since);
            self.settled.insert(since);
        } else {
            self.settled.remove(&since);
            self.unsettled.insert(device, since);
        }
        is_settled
    }

    fn is_idle_since(&self, since: u64, mapping: &Arc<Mapping>) -> bool {
        let identity = self.idle.get(&since);
        identity.is_some_and(|identity| Arc::ptr_eq(&self.files[identity].mapping, mapping))
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
        if !mapping.has_nothing_to_sync() {
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
        let idle = self.idle.range(self.scan_from..).take(most);
        let some: Vec<_> =
            idle.map(|(&since, identity)| (since, Arc::clone(&self.files[identity].mapping))).collect();
        self.scan_from = some.last().filter(|_| some.len() == most).map_or(0, |&(since, _)| since + 1);
        some
    }

    fn forget(&mut self, since: u64) -> Option<Arc<Mapping>> {
        let identity = self.idle.remove(&since)?;
        self.settled.remove(&since);
        self.unsettled.remove(identity.shared_device(), since);
        let mapping = self.files.remove(&identity).map(|known| known.mapping)?;
        let errors = mapping.writeback().errors();
        self.untold_error = errors.check_and_advance(&errors.sample()).or(self.untold_error);
        Some(mapping)
    }
}

/// How many files may be idle, at the end of a handle.
#[derive(Clone, Copy)]
struct IdleBound {
    files_max: usize,
    /// Device of the handle's file.
    device: u64,
    now: Millis,
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

//! Owner: a mapping as the process that changes it sees it: its index, its locks, and the store behind its pages.
//!
//! ```text
//!   Mapping -- FolioIndex       which folio holds which pages; the tree lock           index.rs
//!           -- Backing          a file, nothing but its pages, or a guest's memory     backing.rs
//!           -- WritebackState   the way of its content to the file                     writeback_state.rs
//!
//!   MappingGuard                the tree lock, held: insert.rs, evict.rs, remove.rs, split.rs, spill.rs, dirty.rs, ...
//! ```
//!
//! Locks: the write lock, the invalidate lock, the tree lock, by rank.
//!
//! Invariants: those of `mapping/mod.rs`.
//!
//! Not an invariant: that the size only falls while no thread holds a lock. An
//! invalidation may make it larger at any time.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Arena, GuestExtents, HoldRefused, Record, Validation, View};
use crate::backend::{Attributes, Backend, Identity, Version, lock_and_wake};
use crate::folio::HeldFolio;
use crate::lists::Lists;
use crate::mapping::{NODE_BITS, ShadowNodes};
use crate::stats::{Count, Counters};
use crate::sync::{LockWait, Rank, RankedGuard, RankedReadGuard, RankedRwLock, RankedWriteGuard};
use crate::sys::fork::ForkGuard;
use crate::units::{MappingId, PageIndex, pages_of_bytes};
use crate::xarray::XArray;

use super::backing::Backing;
use super::dirty_counts::DirtyPages;
use super::hooks::IndexHooks;
use super::index::{FolioIndex, Tree};
use super::nodes::{Nodes, Surplus};
use super::writeback_state::WritebackState;

/// One file's folios.
#[derive(Debug)]
pub struct Mapping {
    index: FolioIndex,
    /// The backend that its pages are read from. Replaced when a parked file, which had no handles, is opened again.
    backend: Mutex<Arc<dyn Backend>>,
    writeback: WritebackState,
    /// How often folios were forgotten and the file's size taken anew.
    pub(super) renewals: AtomicU64,
    /// Fills of its pages that are in flight.
    fills: AtomicU64,
    write: RankedRwLock<()>,
    /// The invalidate lock, and the content the folios were filled from.
    invalidate: RankedRwLock<Version>,
    identity: Identity,
    process: ForkGuard,
    lists: Option<Arc<Lists>>,
    counters: Option<Arc<Counters>>,
    backing: Backing,
}

/// The parts of a new mapping of a file.
#[derive(Debug)]
pub struct NewMapping<'a> {
    /// The arena its record, its nodes and its folios are in.
    pub arena: &'a Arc<Arena>,
    /// The mapping's number, which no other mapping has.
    pub id: MappingId,
    /// The backend that its pages are read from.
    pub backend: Arc<dyn Backend>,
    /// The file's attributes, by `backend`.
    pub attributes: &'a Attributes,
    /// The process that owns it.
    pub process: ForkGuard,
}

impl Mapping {
    /// A mapping of no folios for the file behind `backend`. `None` if the arena has no cell for its record.
    pub fn new(new: NewMapping<'_>) -> Option<Self> {
        let NewMapping { arena, id, backend, attributes, process } = new;
        let index = FolioIndex::new(arena, id)?;
        let record = index.record();
        let size = attributes.size_known();
        record.size.store(size, Ordering::Relaxed);
        record.device.store(attributes.identity.device, Ordering::Relaxed);
        record.inode.store(attributes.identity.inode, Ordering::Relaxed);
        // Release, partner: the Acquire in `read_hits`: a thread that sees the number sees the rest.
        record.set_validation(Validation::Kernel);
        record.id.store(id.0, Ordering::Release);
        let writeback = WritebackState::default();
        writeback.set_size_on_device(size);
        Some(Self {
            index,
            backend: Mutex::new(backend),
            writeback,
            renewals: AtomicU64::new(0),
            fills: AtomicU64::new(0),
            write: RankedRwLock::new(Rank::Write, ()),
            invalidate: RankedRwLock::new(Rank::Invalidate, attributes.version),
            identity: attributes.identity,
            process,
            lists: None,
            counters: None,
            backing: Backing::File,
        })
    }

    /// Sets the backing of the pages, before the mapping has folios.
    pub(super) fn backed(mut self, backing: Backing) -> Self {
        self.backing = backing;
        self
    }

    /// Makes the mapping count in `counters` the pages that were fetched ahead, and those that leave unused.
    #[must_use]
    pub fn with_counters(mut self, counters: &Arc<Counters>) -> Self {
        self.counters = Some(Arc::clone(counters));
        self
    }

    /// Makes the mapping count its dirty pages in `totals` as well, with those of the cache's other mappings.
    #[must_use]
    pub fn with_dirty_pages(mut self, totals: &Arc<DirtyPages>) -> Self {
        assert_eq!(
            self.writeback.dirty_pages().total(),
            0,
            "a mapping changes its totals before it is written to"
        );
        self.writeback.dirty.totals = Arc::clone(totals);
        self
    }

    /// Lets `hooks` take over some steps of the mapping's index. Without this call none are taken over.
    #[must_use]
    pub fn with_hooks(mut self, hooks: Option<&'static dyn IndexHooks>) -> Self {
        self.index.hooks = hooks;
        self
    }

    pub(super) fn count(&self, count: Count, amount: u64) {
        if amount > 0
            && let Some(counters) = &self.counters
        {
            counters.add(count, amount);
        }
    }

    /// Lists the mapping's nodes that only remember in `shadow_nodes`; else the mapping has a list of its own.
    #[must_use]
    pub fn with_shadow_nodes(mut self, shadow_nodes: &Arc<ShadowNodes>) -> Self {
        self.index.set_shadow_nodes(shadow_nodes);
        self
    }

    /// Puts the mapping's folios into the rings of `lists`; without this call they are not reclaimed.
    #[must_use]
    pub fn with_lists(mut self, lists: &Arc<Lists>) -> Self {
        assert!(self.backing.places().is_none(), "what has a place is not evicted");
        self.lists = Some(Arc::clone(lists));
        self
    }

    /// Gives each page of the mapping its place in `places`, which is as long: no other frame is ever in the tree. The
    /// folios stand in no ring, so reclaim never evicts them.
    #[must_use]
    pub fn with_places(self, places: Arc<GuestExtents>) -> Self {
        assert!(self.lists.is_none(), "what has a place is not evicted");
        self.backed(Backing::Guest(places))
    }

    /// The mapping's folios by their pages, for look-ups that take no lock.
    #[inline]
    pub fn index(&self) -> &FolioIndex {
        &self.index
    }
    /// The mapping's number.
    #[inline]
    pub fn id(&self) -> MappingId {
        self.index.id()
    }
    /// The rings in which its folios stand, if there are any.
    pub fn lists(&self) -> Option<&Arc<Lists>> {
        self.lists.as_ref()
    }
    /// Where its bytes come from.
    pub fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend.lock().unwrap_or_else(PoisonError::into_inner))
    }
    /// Has `backend` take the place of the one before, which is returned. The caller knows that the file has no
    /// handles, and that the pages are those of the file behind `backend`, or are not read before that was verified.
    pub fn replace_backend(&self, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        std::mem::replace(&mut *self.backend.lock().unwrap_or_else(PoisonError::into_inner), backend)
    }
    /// The way of its content to the file: pages dirty, in flight, or written and not durable.
    #[inline]
    pub fn writeback(&self) -> &WritebackState {
        &self.writeback
    }
    /// `fills` fills of its pages are submitted.
    #[inline]
    pub fn fills_begin(&self, fills: u64) {
        self.fills.fetch_add(fills, Ordering::Relaxed);
    }
    /// One of them has ended.
    #[inline]
    pub fn fill_ends(&self) {
        self.fills.fetch_sub(1, Ordering::Relaxed);
    }
    /// Whether fills of its pages are in flight, as of a moment ago.
    pub fn has_fills(&self) -> bool {
        self.fills.load(Ordering::Relaxed) > 0
    }
    /// Which file it is.
    pub fn identity(&self) -> Identity {
        self.identity
    }
    /// The store behind its pages.
    #[inline]
    pub fn backing(&self) -> &Backing {
        &self.backing
    }
    /// The arena its folios are in.
    #[inline]
    pub fn arena(&self) -> &Arena {
        self.index.arena()
    }
    /// Holds the folio at `index`, filled or not; as [`FolioIndex::try_hold`].
    #[inline]
    pub fn try_hold(&self, index: PageIndex) -> Result<HeldFolio<'_>, HoldRefused> {
        self.index.try_hold(index)
    }
    /// The file's size in bytes, as last known.
    #[inline]
    pub fn size(&self) -> u64 {
        // Acquire, partner: the Release in `invalidate`: a thread that sees a longer size finds no folio from before.
        self.record().size.load(Ordering::Acquire)
    }
    /// How often the file was taken for another and its folios forgotten. A holder of folios asks before it looks at
    /// the size and holds the first; and once the bytes cannot change any more, it asks [`Mapping::left_since`].
    #[inline]
    pub fn renewals(&self) -> u64 {
        // Acquire, partner: the Release in `invalidate`: a thread that sees this one holds no folio from before.
        self.renewals.load(Ordering::Acquire)
    }
    /// How many bytes the file has behind byte `position`, now; `None` if it was taken for another since there were so
    /// many `renewals`: then it may have been cut and have grown again, and bytes that lie within this size may be
    /// zeroes that lay behind another's end. `view/src/hit/mod.rs` tells more of that.
    #[inline]
    pub fn left_since(&self, renewals: u64, position: u64) -> Option<u64> {
        // The Acquire in `size`, partner: the Release in `invalidate`: a thread that sees the size of a renewal sees
        // its number.
        let left = self.size().saturating_sub(position);
        (self.renewals.load(Ordering::Relaxed) == renewals).then_some(left)
    }
    /// The file's size in pages, as last known.
    pub fn size_pages(&self) -> u64 {
        pages_of_bytes(self.size())
    }
    /// The file was found to end at `bytes`: nothing beyond is shown from now on. Never makes it longer.
    pub fn shrink_size(&self, bytes: u64) {
        self.record().size.fetch_min(bytes, Ordering::Relaxed);
    }
    /// The file ends at `bytes` from now on: the cache made it so. If it becomes longer, the pages between are zero in
    /// the cache or not there; if it becomes shorter, the pages behind are taken out next. The caller alone changes it.
    pub fn set_size(&self, bytes: u64) {
        // Release, partner: the Acquire in `read_hits`: a thread that sees a longer file finds no page from before. For
        // a shorter one the fences before the frames' next use, and before bytes are written in place, do as much.
        self.record().size.store(bytes, Ordering::Release);
    }

    /// The content this mapping is filled from. Waits for an invalidation.
    pub fn version(&self) -> Version {
        *self.invalidate.read()
    }

    #[inline]
    pub(crate) fn record(&self) -> &Record {
        self.index.record()
    }
    #[inline]
    pub(super) fn view(&self) -> &View {
        self.index.view()
    }
    #[inline]
    pub(super) fn nodes(&self) -> Nodes<'_> {
        self.index.nodes()
    }

    /// Whether nothing of the file has to be written. Takes the tree lock, without which a page that is taken for
    /// write-back, or becomes dirty again, is in no count for a moment.
    pub fn has_nothing_to_write(&self) -> bool {
        let nothing = || self.writeback.dirty_pages().total() == 0;
        nothing() && {
            let _exact = self.lock();
            nothing()
        }
    }
    /// Whether nothing of the file has to be written, nor to be made durable. Takes the tree lock.
    pub fn has_nothing_to_sync(&self) -> bool {
        // An open that failed may have cut it; nothing is promised of that.
        let is_done = || self.writeback.dirty_pages().total() == 0 && self.writeback.is_durable();
        self.writeback.writer().is_none()
            || is_done() && {
                let _exact = self.lock();
                is_done()
            }
    }

    /// Takes the tree lock.
    pub fn lock(&self) -> MappingGuard<'_> {
        self.lock_as(LockWait::Wait).expect("a lock that is waited for is had")
    }
    /// As [`Mapping::lock`], or not if that means waiting and `locks` says no. To insert: [`Mapping::lock_to_add`].
    pub fn lock_as(&self, locks: LockWait) -> Option<MappingGuard<'_>> {
        let tree = self.index.tree.lock_as(locks)?;
        self.index.stock.count_lock();
        let keep = self.index.stock.count(); // nodes that leave the tree go to the arena
        Some(MappingGuard { mapping: self, tree, keep, surplus: Surplus::none(self.arena()) })
    }
    /// The right to write inside the file's size, beside others who do. Comes before all other locks of the mapping,
    /// and may be held while a device is waited for.
    pub fn write_shared(&self) -> RankedReadGuard<'_, ()> {
        lock_and_wake(|| self.write.try_read(), || self.write.read())
    }
    /// As [`Mapping::write_shared`], without waiting.
    #[inline]
    pub fn try_write_shared(&self) -> Option<RankedReadGuard<'_, ()>> {
        self.write.try_read()
    }
    /// The right to change the size, to append, to punch: it excludes all other writers. As [`Mapping::write_shared`].
    pub fn write_alone(&self) -> RankedWriteGuard<'_, ()> {
        lock_and_wake(|| self.write.try_write(), || self.write.write())
    }
    /// Holds off invalidation while folios are added and their fills submitted.
    pub fn hold_off_invalidation(&self) -> RankedReadGuard<'_, Version> {
        lock_and_wake(|| self.invalidate.try_read(), || self.invalidate.read())
    }
    /// As [`Mapping::hold_off_invalidation`]; `None`: it would mean waiting, and `locks` says no.
    pub fn hold_off_invalidation_as(&self, locks: LockWait) -> Option<RankedReadGuard<'_, Version>> {
        match locks {
            LockWait::Wait => Some(self.hold_off_invalidation()),
            LockWait::Try => self.try_hold_off_invalidation(),
        }
    }
    /// As [`Mapping::hold_off_invalidation`], without waiting.
    pub fn try_hold_off_invalidation(&self) -> Option<RankedReadGuard<'_, Version>> {
        self.invalidate.try_read()
    }

    /// The right to take folios out. It excludes threads that add folios or hand fills and flushes to a backend, and
    /// waits for those that do: their changes to the file on its device happen before the lock is given.
    pub fn invalidate_alone(&self) -> RankedWriteGuard<'_, Version> {
        lock_and_wake(|| self.invalidate.try_write(), || self.invalidate.write())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.process.is_forked() {
            return; // the arena is not mapped here
        }
        let forgotten = self.lock().remove_all();
        self.count(Count::Forgotten, forgotten);
        self.record().id.store(MappingId::NONE.0, Ordering::Relaxed);
        // Partner: the Acquire fence before a reader's second look at the number. A thread that sees anything that
        // the cell is used for next sees that it is no mapping's record any more.
        fence(Ordering::Release);
        self.arena().free_cell(self.index.cell());
    }
}

/// The tree lock of a mapping, held.
#[derive(Debug)]
pub struct MappingGuard<'a> {
    pub(super) mapping: &'a Mapping,
    pub(super) tree: RankedGuard<'a, Tree>,
    /// Spare nodes that stay when the lock is let go.
    pub(super) keep: u32,
    // Last: dropped, and so given back, when the lock has been let go.
    surplus: Surplus<'a>,
}

impl Drop for MappingGuard<'_> {
    fn drop(&mut self) {
        let keep = if self.tree.pages == 0 { 0 } else { self.keep };
        let stock = &self.mapping.index.stock;
        if stock.count() > keep {
            self.surplus = stock.cut(self.mapping.arena(), keep);
        }
    }
}

impl<'a> MappingGuard<'a> {
    pub(super) fn xarray<'n>(&self, nodes: &'n Nodes<'a>) -> XArray<'n, Nodes<'a>, NODE_BITS>
    where
        'a: 'n,
    {
        XArray::new(nodes, &self.mapping.record().root)
    }

    /// Pages of all folios.
    pub fn pages(&self) -> u64 {
        self.tree.pages
    }

    /// The file reaches at least to byte `bytes`: its pages up to there that were written are marked dirty under this
    /// hold of the lock, or were before. The caller has the write lock alone, or knows that it did reach there.
    pub fn grow_size(&mut self, bytes: u64) {
        // Release, partner: the Acquire in `read_hits`: a thread that sees the new size finds the bytes.
        self.mapping.record().size.fetch_max(bytes, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::{Wake, Waker};
    use std::thread;

    use super::super::NewMapping;
    use super::*;
    use crate::arena::ArenaOptions;
    use crate::backend::{DeferredWakes, MemoryFile, PageKey, Registered, WaitQueue};

    struct Tells(mpsc::Sender<()>);

    impl Wake for Tells {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
        }
    }

    /// A future waits for a page, and this thread, which holds locks, ends the fill. Then it waits for `lock`, which
    /// the other thread gives back when the future has been woken.
    fn wakes_before<'m, H>(
        mapping: &'m Mapping,
        hold: impl FnOnce(&'m Mapping) -> H + Send,
        lock: impl FnOnce(),
    ) {
        let (queue, backend) = (Arc::new(WaitQueue::new()), mapping.backend());
        let page = PageKey { mapping: MappingId(1), page: PageIndex(0) };
        let (tell, told) = mpsc::channel();
        let is_filled = Arc::new(AtomicU64::new(0));
        let filled = Arc::clone(&is_filled);
        let condition = Box::new(move || filled.load(Ordering::Relaxed) == 1);
        let waker = Waker::from(Arc::new(Tells(tell)));
        let registered = queue.register(&backend, page, condition, waker).unwrap();
        assert!(matches!(registered, Registered::Waiting(_)));
        let (held, is_held) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let _held = hold(mapping);
                held.send(()).unwrap();
                told.recv().unwrap();
            });
            is_held.recv().unwrap();
            let _deferring = DeferredWakes::new();
            is_filled.store(1, Ordering::Relaxed);
            queue.wake_filled(page, 1);
            lock();
        });
        queue.close();
    }

    /// A wake-up that is kept is a test that hangs.
    #[test]
    fn no_future_waits_for_a_lock_of_a_mapping_with_the_thread_that_wakes_it() {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let file = Arc::new(MemoryFile::new(vec![7; 4096]));
        let (attributes, backend) = (&file.attributes().unwrap(), Arc::clone(&file) as Arc<dyn Backend>);
        let (arena, id, process) = (&arena, MappingId(1), ForkGuard::new());
        let mapping = &Mapping::new(NewMapping { arena, id, backend, attributes, process }).unwrap();
        wakes_before(mapping, Mapping::write_alone, || drop(mapping.write_shared()));
        wakes_before(mapping, Mapping::write_shared, || drop(mapping.write_alone()));
        wakes_before(mapping, Mapping::invalidate_alone, || drop(mapping.hold_off_invalidation()));
        wakes_before(mapping, Mapping::hold_off_invalidation, || drop(mapping.invalidate_alone()));
    }
}

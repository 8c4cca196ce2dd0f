//! Owner: a mapping as the process that changes it sees it: its locks, and every change of its tree.
//!
//! ```text
//!   add_folio ...     see insert.rs
//!   evict             retire if nobody holds it --> a shadow in its place --> off its ring --> frames to the
//!                     caller, to free
//!   remove_failed     erase --> off its ring, retire --> freed when the fill gives its hold back
//!   remove_all        erase --> off its ring, retire --> free those that nobody holds, the others at their last put
//! ```
//!
//! A descriptor is prepared when its entry goes in. It is retired under
//! the same hold of the tree lock under which the entry goes, before or after.
//! In between a reader may find the one without the other; it looks at the
//! descriptor, and the descriptor alone decides.
//!
//! A thread that retires what others hold loses its frames at that moment, for the last
//! holder may be quick. So it is taken off its ring before, and under the same hold of the lists' lock,
//! so that nobody lists it in between.
//!
//! Locks: the invalidate lock before the tree lock, by rank. The tree lock is
//! held for a batch and never while anybody waits for a device; the arena's
//! lock is taken under it to give a list of frames back, never to take anything.
//!
//! Invariants: those of the door, `mapping/mod.rs`, and
//!  1. A version is replaced only under the invalidate lock, together with the size.
//!
//! Not an invariant: that the size only falls while nobody holds the lock. An
//! invalidation may make it larger at any time.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, PoisonError};

use crate::arena::dirty::BitTable;
use crate::arena::{
    Arena, CellNumber, Descriptor, DescriptorWord, Flags, GuestExtents, HoldRefused, NotReady, Record,
    RetireOutcome, Validation, View, referenced,
};
use crate::backend::{Attributes, Backend, FillRun, Identity, Version};
use crate::folio::HeldFolio;
use crate::lists::Lists;
use crate::mapping::{AgeLimit, NODE_BITS, ShadowNodes, find, finder};
use crate::stats::{Count, Counters};
use crate::sync::lock::Mutex;
use crate::sync::{
    LockWait, Rank, RankedGuard, RankedMutex, RankedReadGuard, RankedRwLock, RankedWriteGuard,
};
use crate::sys::fork::ForkGuard;
use crate::tuning::Tuning;
use crate::units::{Frame, MappingId, Order, PageIndex, pages_of_bytes};
use crate::xarray::{Entry, ForgetOutcome, INDICES_MAX, Kind, Revision, Root, Value, XArray};

use super::backing::Backing;
use super::dirty_counts::DirtyPages;
use super::nodes::{Nodes, SpareNodes, Surplus, TreeCounts};
use super::writeback_state::WritebackState;

/// Folios given back to the arena at a time.
const FREE_BATCH: usize = 256;

/// One file's folios.
#[derive(Debug)]
pub struct Mapping {
    id: MappingId,
    cell: CellNumber,
    arena: Arc<Arena>,
    /// Where its bytes come from: another with each time that the file is opened after nobody had it open, if it is
    /// parked meanwhile.
    backend: Mutex<Arc<dyn Backend>>,
    /// The way of its content to the file.
    writeback: WritebackState,
    /// How often folios were forgotten and the file's size taken anew.
    renewals: AtomicU64,
    /// The write lock.
    write: RankedRwLock<()>,
    tree: RankedMutex<Tree>,
    /// The invalidate lock, and the content the folios were filled from.
    invalidate: RankedRwLock<Version>,
    identity: Identity,
    process: ForkGuard,
    /// Spare nodes of the tree; changed under its lock.
    pub(super) stock: SpareNodes,
    pub(super) tuning: Tuning,
    /// The cache's nodes that only remember; those of this tree are among them.
    shadow_nodes: Arc<ShadowNodes>,
    /// The rings in which its folios stand, if there are any.
    lists: Option<Arc<Lists>>,
    /// Where pages that were fetched ahead are counted, and those of them that nobody read.
    counters: Option<Arc<Counters>>,
    /// What is behind its pages.
    backing: Backing,
}

/// What a mapping of a file is made of.
#[derive(Debug)]
pub struct NewMapping<'a> {
    /// The arena its record, its nodes and its folios are in.
    pub arena: &'a Arc<Arena>,
    /// Its number, which no other mapping has.
    pub id: MappingId,
    /// What its pages are read from.
    pub backend: Arc<dyn Backend>,
    /// What `backend` says of the file.
    pub attributes: &'a Attributes,
    /// The process that owns it.
    pub process: ForkGuard,
    /// How its mechanisms work, for those who measure them.
    pub tuning: Tuning,
}

/// What the tree lock guards besides the tree itself.
#[derive(Debug)]
pub(super) struct Tree {
    /// Pages of all folios in the tree.
    pub pages: u64,
    /// Whether evictions leave shadows; no more when the cache has let the mapping go.
    remembers: bool,
}

/// What an eviction leaves in the folio's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replacement {
    /// Nothing: its nodes go with it, if they hold nothing else.
    Nothing,
    /// One shadow of the folio's order, with this payload of 25 bits. It needs no node that is not there.
    Shadow(u32),
}

impl Mapping {
    /// A mapping of no folios for the file behind `backend`. `None` if the arena has no cell for its record.
    pub fn new(new: NewMapping<'_>) -> Option<Self> {
        let NewMapping { arena, id, backend, attributes, process, tuning } = new;
        let arena = Arc::clone(arena);
        let cell = arena.alloc_cell()?;
        let record = arena.view().record(cell).expect("a cell of ours can be a record");
        record.root.store(Root::EMPTY.bits(), Ordering::Relaxed);
        record.size.store(attributes.size, Ordering::Relaxed);
        record.device.store(attributes.identity.device, Ordering::Relaxed);
        record.inode.store(attributes.identity.inode, Ordering::Relaxed);
        // Release, partner: the Acquire in `read_hits`: a thread that sees the number sees the rest.
        record.set_validation(Validation::Kernel);
        record.id.store(id.0, Ordering::Release);
        let writeback = WritebackState::default();
        writeback.set_size_on_device(attributes.size);
        Some(Self {
            id,
            cell,
            shadow_nodes: Arc::new(ShadowNodes::new(Arc::clone(&arena))),
            arena,
            backend: Mutex::new(backend),
            writeback,
            renewals: AtomicU64::new(0),
            write: RankedRwLock::new(Rank::Write, ()),
            tree: RankedMutex::new(Rank::Tree, Tree { pages: 0, remembers: true }),
            invalidate: RankedRwLock::new(Rank::Invalidate, attributes.version),
            identity: attributes.identity,
            process,
            stock: SpareNodes::default(),
            tuning,
            lists: None,
            counters: None,
            backing: Backing::File,
        })
    }

    /// The same mapping, before it has folios, with that behind its pages.
    pub(super) fn backed(mut self, backing: Backing) -> Self {
        self.backing = backing;
        self
    }

    /// The same mapping, which counts in `counters` what it alone sees: pages that were fetched ahead, and
    /// those of them that leave before anybody read them. Without this call nobody counts them.
    #[must_use]
    pub fn with_counters(mut self, counters: &Arc<Counters>) -> Self {
        self.counters = Some(Arc::clone(counters));
        self
    }

    /// The same mapping, which counts its dirty pages in `totals` as well, with those of the cache's other mappings.
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

    pub(super) fn count(&self, count: Count, amount: u64) {
        if amount > 0
            && let Some(counters) = &self.counters
        {
            counters.add(count, amount);
        }
    }

    /// The pages of the folio of `order` that `frame` heads, if nobody has read them, and it is known that it
    /// has left. The holder of the tree lock calls this when the folio has been retired.
    pub(super) fn take_unread(&self, frame: Frame, order: Order) -> u64 {
        let byte = self.view().referenced(frame).expect("a frame of ours");
        if !referenced::is_unread(byte.load(Ordering::Relaxed)) {
            return 0;
        }
        byte.store(0, Ordering::Relaxed);
        // What an uncached read made begins so, read or not.
        let behind = self.view().own(frame).word().has(Flags::DROPBEHIND);
        if behind { 0 } else { u64::from(order.pages()) }
    }

    /// Takes folios that were retired off their rings. They were held by nobody, and their frames are the caller's.
    pub(super) fn unlist(&self, folios: &[(Frame, Order)]) {
        if let Some(lists) = self.lists.as_ref().filter(|_| !folios.is_empty()) {
            let mut listed = lists.lock();
            folios.iter().for_each(|&(frame, _)| listed.remove(frame));
        }
    }

    /// Takes folios off their rings and retires them, whoever holds them; tells `retired` of each. Returns the pages
    /// of those that nobody had read. The caller has taken them out of the tree, whose lock it holds.
    pub(super) fn retire_all(
        &self,
        folios: &[(Frame, Order)],
        mut retired: impl FnMut(Frame, Order, RetireOutcome),
    ) -> u64 {
        let mut listed = self.lists.as_ref().filter(|_| !folios.is_empty()).map(|lists| lists.lock());
        let mut unread = 0;
        for &(frame, order) in folios {
            if let Some(listed) = &mut listed {
                listed.remove(frame);
            }
            // What is known of it, while it is: held by others, its frames are theirs to free from the next step on.
            unread += self.take_unread(frame, order);
            self.forget_leaving(frame, order);
            retired(frame, order, self.view().own(frame).retire());
        }
        unread
    }

    /// Retires folios that are out of the tree, frees those that nobody holds, and empties the list of them. Returns
    /// the pages of those that nobody had read.
    fn let_go(&self, folios: &mut Vec<(Frame, Order)>) -> u64 {
        let mut free = Vec::with_capacity(folios.len());
        let unread = self.retire_all(folios, |frame, order, retired| match retired {
            RetireOutcome::Free => free.push((frame, order)),
            RetireOutcome::Held => {}
        });
        self.arena.free_all(&free);
        folios.clear();
        unread
    }

    /// The same mapping, its nodes that only remember listed in `shadow_nodes`, with those of the cache's
    /// other mappings. Without this call it has a list of its own.
    #[must_use]
    pub fn with_shadow_nodes(mut self, shadow_nodes: &Arc<ShadowNodes>) -> Self {
        assert_eq!(self.shadow_nodes.count(), 0, "a mapping changes its list before it has nodes");
        self.shadow_nodes = Arc::clone(shadow_nodes);
        self
    }

    /// The same mapping, whose folios stand in rings of `lists` once somebody has listed them, and are taken off
    /// when they leave. Without this call they are in none, and nothing reclaims them.
    #[must_use]
    pub fn with_lists(mut self, lists: &Arc<Lists>) -> Self {
        assert!(self.backing.places().is_none(), "what has a place is not evicted");
        self.lists = Some(Arc::clone(lists));
        self
    }

    /// The same mapping, each page of which has its place in `places`: a thread that wants a frame for it claims that
    /// one, and no other is ever in the tree. Its folios stand in no ring, so reclaim never evicts them. The mapping
    /// is no longer than `places`.
    #[must_use]
    pub fn with_places(self, places: Arc<GuestExtents>) -> Self {
        assert!(self.lists.is_none(), "what has a place is not evicted");
        self.backed(Backing::Guest(places))
    }

    /// The mapping's number.
    pub fn id(&self) -> MappingId {
        self.id
    }
    /// The rings in which its folios stand, if there are any.
    pub fn lists(&self) -> Option<&Arc<Lists>> {
        self.lists.as_ref()
    }
    /// Where nodes of its tree are listed that only remember.
    pub fn shadow_nodes(&self) -> &ShadowNodes {
        &self.shadow_nodes
    }
    /// Where its record is.
    pub fn cell(&self) -> CellNumber {
        self.cell
    }
    /// Where its bytes come from.
    pub fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend.lock().unwrap_or_else(PoisonError::into_inner))
    }
    /// Has `backend` take the place of the one before, which is returned. The caller knows that nobody has a handle,
    /// and that the pages are those of the file behind `backend`, or that nobody reads them before somebody says so.
    pub fn replace_backend(&self, backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
        std::mem::replace(&mut *self.backend.lock().unwrap_or_else(PoisonError::into_inner), backend)
    }
    /// The way of its content to the file: what is dirty, in flight, or written and not durable.
    #[inline]
    pub fn writeback(&self) -> &WritebackState {
        &self.writeback
    }
    /// Which file it is.
    pub fn identity(&self) -> Identity {
        self.identity
    }
    /// What is behind its pages.
    #[inline]
    pub fn backing(&self) -> &Backing {
        &self.backing
    }
    /// The arena its folios are in.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }
    /// The file's size in bytes, as last known.
    #[inline]
    pub fn size(&self) -> u64 {
        // Acquire, partner: the Release in `invalidate`: a thread that sees a longer size finds no folio from before.
        self.record().size.load(Ordering::Acquire)
    }
    /// How often the file was taken for another and its folios forgotten. A holder of folios for their bytes asks
    /// before it looks at the size and holds the first; and then, once the bytes cannot change any more,
    /// [`Mapping::left_since`].
    #[inline]
    pub fn renewals(&self) -> u64 {
        // Acquire, partner: the Release in `invalidate`: a thread that sees this one holds no folio from before.
        self.renewals.load(Ordering::Acquire)
    }
    /// How many bytes the file has behind byte `position`, now; `None` if it was taken for another since there were so
    /// many `renewals`: then it may have been cut and have grown again, and bytes that lie within this size may be
    /// zeroes that lay behind another's end. `hit.rs` tells more of that.
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
    /// The file ends at `bytes` from now on, by our own doing. If it becomes longer, what lies between is zero in the
    /// cache or not there; if it becomes shorter, what lies behind is taken out next. The caller is alone to change it.
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
        self.arena.view().record(self.cell).expect("a mapping has its record")
    }
    #[inline]
    pub(super) fn view(&self) -> &View {
        self.arena.view()
    }
    /// The nodes of its tree, for the holder of the lock.
    pub(super) fn nodes(&self) -> Nodes<'_> {
        Nodes { arena: &self.arena, stock: &self.stock, mapping: self.id, shadow_nodes: &self.shadow_nodes }
    }
    /// What was counted of its tree so far.
    pub fn tree_counts(&self) -> TreeCounts {
        self.stock.counts()
    }

    /// Takes the tree lock; waits for it.
    pub fn lock(&self) -> MappingGuard<'_> {
        self.lock_as(LockWait::Wait).expect("a lock that is waited for is had")
    }
    /// Takes the tree lock, or not if that means waiting and `locks` says no. To insert, take it by
    /// [`Mapping::lock_to_add`].
    pub fn lock_as(&self, locks: LockWait) -> Option<MappingGuard<'_>> {
        let tree = self.tree.lock_as(locks)?;
        self.stock.count_lock();
        let keep = self.stock.count(); // what goes out of the tree goes to the arena
        Some(MappingGuard { mapping: self, tree, keep, surplus: Surplus::none(&self.arena) })
    }
    /// The right to write inside the file's size, beside others who do. Comes before all other locks of the mapping,
    /// and may be held while a device is waited for.
    pub fn write_shared(&self) -> RankedReadGuard<'_, ()> {
        self.write.read()
    }
    /// As [`Mapping::write_shared`], if nobody has to be waited for.
    #[inline]
    pub fn try_write_shared(&self) -> Option<RankedReadGuard<'_, ()>> {
        self.write.try_read()
    }
    /// The right to change the size, to append, to punch: nobody writes meanwhile. As [`Mapping::write_shared`].
    pub fn write_alone(&self) -> RankedWriteGuard<'_, ()> {
        self.write.write()
    }
    /// Holds off invalidation while folios are added and their fills submitted.
    pub fn hold_off_invalidation(&self) -> RankedReadGuard<'_, Version> {
        self.invalidate.read()
    }
    /// As [`Mapping::hold_off_invalidation`], without waiting.
    pub fn try_hold_off_invalidation(&self) -> Option<RankedReadGuard<'_, Version>> {
        self.invalidate.try_read()
    }

    /// The right to take out what is there, while nobody adds folios or hands fills and flushes to a backend: all that
    /// is to be done to the file on its device is done when it is given. Waits for those who do.
    pub fn invalidate_alone(&self) -> RankedWriteGuard<'_, Version> {
        self.invalidate.write()
    }

    // ---- without the lock -----------------------------------------------------------------------

    /// Takes the marker off the folio at `index`; true if it was there and this call took it.
    pub fn take_marker(&self, index: PageIndex) -> bool {
        let Some(descriptor) = self.find(index) else { return false };
        descriptor.identify(self.id, index).is_ok_and(|ticket| descriptor.take_marker(ticket))
    }

    /// The folio that covers `index`, as its first page and its order, if it goes when an uncached reader has passed.
    /// A hint, by a look without a lock.
    pub fn find_behind(&self, index: PageIndex) -> Option<(PageIndex, Order)> {
        let ticket = self.find(index)?.identify(self.id, index).ok()?;
        ticket.drops_behind().then(|| (ticket.first, ticket.order()))
    }

    /// The first of `indices` where no folio seems to stand, filled or not: a hint, by looks without a lock.
    pub fn first_missing(&self, mut indices: impl Iterator<Item = PageIndex>) -> Option<PageIndex> {
        let grown = self.view().grown();
        let mut finder = finder(&grown, self.record());
        indices.find(|index| !matches!(finder.find(index.0).entry.kind(), Kind::Folio(_)))
    }

    /// Whether the page at `index` is ready to be read, as far as can be seen without a lock.
    pub fn probe(&self, index: PageIndex) -> Result<(), NotReady> {
        let frame = self.find_frame(index).ok_or(NotReady::Mismatch)?;
        let descriptor = self.view().descriptor(frame).ok_or(NotReady::Mismatch)?;
        match descriptor.begin_read(self.id, index) {
            Err(NotReady::Filling) if self.is_page_read(descriptor, frame, index) => Ok(()),
            Err(NotReady::Written) => Ok(()), // its reader waits for no more than a writer's copy
            looked => looked.map(drop),
        }
    }

    /// Whether the page at `index` of a folio that is being filled has arrived; a hint, because nobody holds the
    /// folio.
    fn is_page_read(&self, descriptor: &Descriptor, head: Frame, index: PageIndex) -> bool {
        let page = index.0.wrapping_sub(descriptor.index().0);
        page < u64::from(descriptor.word().order().pages())
            && self.view().is_page_read(head.plus(page as u32))
    }

    /// Holds the folio at `index`, filled or not.
    #[inline]
    pub fn try_hold(&self, index: PageIndex) -> Result<HeldFolio<'_>, HoldRefused> {
        let frame = self.find_frame(index).ok_or(HoldRefused::Mismatch)?;
        HeldFolio::take(&self.arena, frame, self.id, index)
    }
    /// As [`Mapping::try_hold`], of a folio that `likely` heads: if it does, it need not be sought.
    pub fn try_hold_at(&self, likely: Frame, index: PageIndex) -> Result<HeldFolio<'_>, HoldRefused> {
        HeldFolio::take(&self.arena, likely, self.id, index).or_else(|_| self.try_hold(index))
    }

    #[inline]
    fn find_frame(&self, index: PageIndex) -> Option<Frame> {
        match find(&self.view().grown(), self.record(), index).kind() {
            Kind::Folio(frame) => Some(Frame(frame)),
            _ => None,
        }
    }

    fn find(&self, index: PageIndex) -> Option<&Descriptor> {
        self.find_frame(index).and_then(|frame| self.view().descriptor(frame))
    }

    // ---- the whole mapping ---------------------------------------------------------------------

    /// Forgets every folio and takes the file's attributes as they are now. Pinned and held bytes live on
    /// with those who hold them; fills in flight end in folios that nobody finds. Folios of which a page was written
    /// here, and is not in the file yet, stay, and the file reaches at least as far as they do: they will be written
    /// over what others did. Waits until no window is
    /// between insertion and submission, and for the file system. Returns the pages forgotten.
    pub fn invalidate(&self) -> io::Result<u64> {
        let mut version = self.invalidate.write();
        // Asked for under the lock: of two who come here at once, the one that asks later stores later. A flush that
        // ended between the question and the tree's lock has made the file longer than was said, and its pages are
        // no longer among those that are kept: then it is asked again. (None begins under this lock.)
        // The tree's lock before the size: a fill that ends between the two must not find its folios still
        // in their places and cut the new size off.
        let (attributes, mut tree) = loop {
            let ended = self.writeback().flushes_ended();
            let attributes = self.backend().attributes()?;
            let tree = self.lock();
            if self.writeback().flushes_ended() == ended {
                break (attributes, tree);
            }
        };
        // A shorter size first, so that no reader takes what is let go for the file's; a longer one last,
        // so that none takes the zeroes after the old end for the file's.
        let unwritten = tree.unwritten();
        let kept_end = unwritten.last().map_or(0, |(_, end)| end.first_byte().min(self.size()));
        let size = attributes.size.max(kept_end);
        self.record().size.fetch_min(size, Ordering::Relaxed);
        *version = attributes.version;
        self.forget_ours();
        self.writeback().set_size_on_device(attributes.size);
        let pages = tree.remove_all_but(&unwritten);
        self.renewals.fetch_add(1, Ordering::Release); // partner: the Acquire in `renewals`
        // Release, partner: the Acquire in `read_hits`, and in `size`.
        self.record().size.store(size, Ordering::Release);
        drop(tree);
        Ok(pages)
    }

    /// Whether an invalidation would leave pages of which none of the bytes are ours: others of a folio of which some
    /// page is not in the file yet.
    pub fn keeps_clean(&self) -> bool {
        if self.writeback().dirty_pages().total() == 0 {
            return false;
        }
        let (guard, nodes) = (self.lock(), self.nodes());
        let tree = guard.xarray(&nodes);
        tree.range(0, INDICES_MAX - 1).any(|(_, entry, order)| {
            let (Kind::Folio(frame), pages) = (entry.kind(), Order(order).pages()) else { return false };
            let head = Frame(frame);
            let is_clean = |page: u32| {
                let at = head.plus(page);
                self.view().count_bits(BitTable::Dirty, at, 1)
                    + self.view().count_bits(BitTable::Writeback, at, 1)
                    == 0
            };
            self.view().own(head).word().has(Flags::UNWRITTEN) && (0..pages).any(is_clean)
        })
    }

    /// As [`Mapping::invalidate`], and believes nothing of the file from now on until it is looked at: for a caller
    /// that knows that it is about to change. Waits for no file system.
    pub fn distrust(&self) -> u64 {
        let mut version = self.invalidate.write();
        version.settled = false;
        let mut tree = self.lock();
        let unwritten = tree.unwritten();
        tree.remove_all_but(&unwritten)
    }

    /// Whether every invariant holds; what does not, in words. Takes the tree lock.
    pub fn check(&self) -> Result<(), String> {
        let guard = self.lock();
        let nodes = self.nodes();
        let tree = guard.xarray(&nodes);
        tree.check().map_err(|what| format!("{:?}: {what}", self.id))?;
        let (mut from, mut pages, mut unlisted, mut spilled) = (0, 0, 0, 0);
        let listed = self.lists.as_ref().map(|lists| lists.lock());
        while let Some((first, entry, order)) = tree.next(from, INDICES_MAX - 1) {
            if let Kind::Folio(frame) = entry.kind() {
                unlisted += u64::from(listed.as_ref().is_some_and(|listed| !listed.holds(Frame(frame))));
                let descriptor = self.view().descriptor(Frame(frame)).ok_or("a folio has no frame")?;
                if let Some(places) = self.backing.places()
                    && places.place(PageIndex(first)) != Some(Frame(frame))
                {
                    return Err(format!("{:?}, page {first}: {frame} is not its place", self.id));
                }
                descriptor
                    .check_folio(Frame(frame), self.id, PageIndex(first))
                    .map_err(|what| format!("{:?}, page {first}: {what}", self.id))?;
                let backed = guard.check_backing(first, Frame(frame), Order(order));
                backed.map_err(|what| format!("{:?}, {what}", self.id))?;
                pages += 1u64 << order;
            }
            if matches!(entry.kind(), Kind::Value(value) if value.is_spill()) {
                spilled += 1u64 << order;
            }
            from = first + (1 << order);
        }
        if pages != guard.tree.pages {
            return Err(format!("{:?} counts {} pages and has {pages}", self.id, guard.tree.pages));
        }
        let counted = self.backing.spilled_pages();
        if spilled != counted {
            return Err(format!("{:?} counts {counted} spilled pages and has {spilled}", self.id));
        }
        guard.check_dirty().map_err(|what| format!("{:?}: {what}", self.id))?;
        let promised = listed.map_or(0, |listed| listed.promised());
        if unlisted > promised {
            let id = self.id;
            return Err(format!(
                "{id:?}: {unlisted} folios stand in no ring, and {promised} are on their way"
            ));
        }
        let (found, listed) = (tree.shadow_only_nodes(), self.shadow_nodes.all_of(self.id));
        if found != listed {
            return Err(format!("{:?}: nodes {found:?} hold shadows only, {listed:?} are listed", self.id));
        }
        self.shadow_nodes.check()
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
        self.arena.free_cell(self.cell);
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
        self.surplus = self.mapping.stock.cut(&self.mapping.arena, keep);
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

    /// The first index at or after `from`, and before `end`, at which no folio stands and nothing that was spilled, and
    /// how many such indices follow on each other there.
    pub fn next_gap(&self, from: PageIndex, end: PageIndex) -> Option<(PageIndex, u64)> {
        let nodes = self.mapping.nodes();
        let mut gap = from.0;
        for (first, entry, order) in self.xarray(&nodes).range(from.0, end.0.saturating_sub(1)) {
            match entry.kind() {
                Kind::Value(value) if !value.is_spill() => {} // what only remembers is no folio
                _ if first > gap => return Some((PageIndex(gap), first - gap)),
                _ => gap = first + (1 << order),
            }
        }
        (gap < end.0).then(|| (PageIndex(gap), end.0 - gap))
    }

    /// Takes the folio that `frame` heads out, if it stands at `index`, is ready and nobody holds it;
    /// its order then, and its frames are the caller's to free. `leave` is asked, with the folio's last
    /// word, what to leave in its place; a mapping that the cache has let go leaves nothing.
    pub fn evict(
        &mut self,
        index: PageIndex,
        frame: Frame,
        leave: impl FnOnce(DescriptorWord) -> Replacement,
    ) -> Option<Order> {
        let (mut leave, mut gone) = (Some(leave), Vec::with_capacity(1));
        let leave = |_, word| leave.take().map_or(Replacement::Nothing, |leave| leave(word));
        self.evict_all(&[(index, frame)], leave, &mut gone);
        gone.first().map(|&(_, order)| order)
    }

    /// Takes out those of `folios`, which stand in the rising order of their indices, that [`MappingGuard::evict`]
    /// would, and adds them to `gone`, in the same order. `leave` is told the place of each among them besides. A look
    /// at each leaf, one way down, and the lists' lock once.
    pub fn evict_all(
        &mut self,
        folios: &[(PageIndex, Frame)],
        mut leave: impl FnMut(usize, DescriptorWord) -> Replacement,
        gone: &mut Vec<(Frame, Order)>,
    ) {
        let (mapping, first) = (self.mapping, gone.len());
        if mapping.backing.places().is_some() {
            return; // others map what is there
        }
        let nodes = mapping.nodes();
        let (mut tree, remembers) = (self.xarray(&nodes), self.tree.remembers);
        let indices = || folios.iter().map(|(index, _)| index.0);
        if folios.len() > 1 {
            tree.approach(indices());
        }
        tree.revise(indices(), |nth, found| {
            let (_, frame) = folios[nth];
            if found != Entry::folio(frame.0) {
                return Revision::Keep;
            }
            let descriptor = mapping.view().own(frame);
            let Some(order) = descriptor.try_retire() else { return Revision::Keep };
            gone.push((frame, order));
            // What only uncached reads wanted leaves nothing, however it leaves.
            let word = descriptor.word();
            let remembers = remembers && !word.has(Flags::DROPBEHIND);
            match if remembers { leave(nth, word) } else { Replacement::Nothing } {
                Replacement::Nothing => Revision::Erase,
                Replacement::Shadow(payload) => Revision::Replace(Value::shadow(order.0, payload)),
            }
        });
        let gone = &gone[first..];
        mapping.unlist(gone);
        let unread: u64 = gone.iter().map(|&(frame, order)| mapping.take_unread(frame, order)).sum();
        mapping.count(Count::ReadaheadWasted, unread);
        self.tree.pages -= gone.iter().map(|(_, order)| u64::from(order.pages())).sum::<u64>();
    }

    /// Forgets nodes of this tree that only remember, as long as the next one is within `reach` of the
    /// cache's oldest, at most `max` of them. Returns how many.
    pub fn forget_nodes(&mut self, max: u64, reach: AgeLimit) -> u64 {
        let nodes = self.mapping.nodes();
        let mut forgotten = 0;
        while forgotten < max
            && let Some(node) = self.mapping.shadow_nodes.oldest_of(self.mapping.id, reach)
        {
            let done = self.xarray(&nodes).forget(node);
            assert_ne!(done, ForgetOutcome::Kept, "a node that is listed holds shadows only");
            forgotten += 1;
        }
        forgotten
    }

    /// Takes every shadow out, and has evictions leave none from now on: the cache lets the mapping go.
    pub fn forget_all(&mut self) {
        self.tree.remembers = false;
        let nodes = self.mapping.nodes();
        let (mut tree, mut from) = (self.xarray(&nodes), 0);
        while let Some((first, entry, order)) = tree.next(from, INDICES_MAX - 1) {
            if matches!(entry.kind(), Kind::Value(value) if !value.is_spill()) {
                tree.erase(first);
            }
            from = first + (1 << order);
        }
    }

    /// The first index at or after `from`, and before `end`, at which there is a folio or what remembers one.
    pub fn next_entry(&self, from: PageIndex, end: PageIndex) -> Option<PageIndex> {
        if from >= end {
            return None;
        }
        let nodes = self.mapping.nodes();
        let (first, ..) = self.xarray(&nodes).next(from.0, end.0 - 1)?;
        Some(PageIndex(first).max(from))
    }

    /// Takes out the folios that begin in `from..to`, end by `end`, are ready and held by nobody, and the shadows
    /// there that reach over neither edge. Frees the frames and returns how many pages went. Keep the range
    /// short: what stands in it is listed first.
    pub fn drop_range(&mut self, from: PageIndex, to: PageIndex, end: PageIndex) -> u64 {
        let (mut folios, mut gone) = (Vec::new(), Vec::new());
        for (first, entry, _) in self.inside(from, to, end) {
            match entry.kind() {
                Kind::Folio(frame) => folios.push((first, Frame(frame))),
                Kind::Value(value) if !value.is_spill() => self.forget_shadow(first),
                _ => {}
            }
        }
        self.evict_all(&folios, |_, _| Replacement::Nothing, &mut gone);
        self.mapping.arena.free_all(&gone);
        gone.iter().map(|(_, order)| u64::from(order.pages())).sum()
    }

    /// The folios that lie as a whole in `from..end`, in rising order.
    pub fn folios_within(&self, from: PageIndex, end: PageIndex) -> Vec<(PageIndex, Frame)> {
        let folio = |(index, entry, _): (PageIndex, Entry, Order)| match entry.kind() {
            Kind::Folio(frame) => Some((index, Frame(frame))),
            _ => None,
        };
        self.inside(from, end, end).into_iter().filter_map(folio).collect()
    }

    /// The entries that begin in `from..to` and end by `end`.
    fn inside(&self, from: PageIndex, to: PageIndex, end: PageIndex) -> Vec<(PageIndex, Entry, Order)> {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let within = |&(first, _, order): &(u64, Entry, u8)| first >= from.0 && first + (1 << order) <= end.0;
        let entries = tree.range(from.0, to.0.saturating_sub(1)).filter(within);
        entries.map(|(first, entry, order)| (PageIndex(first), entry, Order(order))).collect()
    }

    /// Takes out the shadow that begins at `index`: nothing is remembered of it.
    fn forget_shadow(&mut self, index: PageIndex) {
        let nodes = self.mapping.nodes();
        self.xarray(&nodes).erase(index.0);
    }

    /// Whether a folio of a fill still stands where it was put. Some may have been dropped behind a reader, who
    /// reads what has arrived; an invalidation takes them all.
    pub fn holds_run(&self, run: FillRun) -> bool {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let mut page = 0;
        while page < run.pages {
            let frame = run.frame.plus(page);
            if tree.load(run.index.0 + u64::from(page)) == Entry::folio(frame.0) {
                return true;
            }
            page += self.mapping.view().own(frame).word().order().pages();
        }
        false
    }

    /// Takes out the folios of a fill that `came`, told where each lies in the run and its order, says did not come
    /// as a whole. Each is still held by the fill, so its frames are freed when the last hold is given back. Returns
    /// the pages that went; what had left before is not among them.
    pub fn remove_failed(&mut self, run: FillRun, came: impl Fn(u32, Order) -> bool) -> u64 {
        let nodes = self.mapping.nodes();
        let mut tree = self.xarray(&nodes);
        let (mut page, mut failed) = (0, Vec::new());
        while page < run.pages {
            let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
            let order = self.mapping.view().own(frame).word().order();
            let ours = !came(page, order) && tree.load(index.0) == Entry::folio(frame.0);
            if ours {
                tree.erase(index.0);
                self.tree.pages -= u64::from(order.pages());
                failed.push((frame, order));
            }
            page += order.pages();
        }
        let unread = self.mapping.retire_all(&failed, |_, _, retired| {
            debug_assert_eq!(retired, RetireOutcome::Held, "a fill holds its folios");
        });
        self.mapping.count(Count::ReadaheadWasted, unread);
        failed.iter().map(|(_, order)| u64::from(order.pages())).sum()
    }

    /// Takes every folio and value out; frees what nobody holds. Returns the pages of the folios.
    pub fn remove_all(&mut self) -> u64 {
        self.remove_all_but(&[])
    }

    /// As [`MappingGuard::remove_all`], but for `kept` folios, as their first pages and the pages behind them (or
    /// inside), in rising order.
    fn remove_all_but(&mut self, kept: &[(PageIndex, PageIndex)]) -> u64 {
        let nodes = self.mapping.nodes();
        let (mut folios, mut unread, mut pages) = (Vec::with_capacity(FREE_BATCH), 0, 0);
        let mut tree = self.xarray(&nodes);
        let (mut from, ends) = (0, kept.iter().map(|(first, _)| first.0).chain([INDICES_MAX]));
        for end in ends {
            tree.erase_range(from, end, |_, entry, order| {
                let frame = match entry.kind() {
                    Kind::Folio(frame) => frame,
                    Kind::Value(value) => return self.mapping.forget_value(value),
                    Kind::Empty | Kind::Node(_) => return,
                };
                folios.push((Frame(frame), Order(order)));
                pages += u64::from(Order(order).pages());
                if folios.len() == FREE_BATCH {
                    unread += self.mapping.let_go(&mut folios);
                }
            });
            from = tree.next(end, INDICES_MAX - 1).map_or(end, |(first, _, order)| first + (1 << order));
        }
        unread += self.mapping.let_go(&mut folios);
        self.mapping.count(Count::ReadaheadWasted, unread);
        self.tree.pages -= pages;
        pages
    }

    /// The folios of which a page is not in the file yet, as their first pages and what follows the last such page.
    fn unwritten(&self) -> Vec<(PageIndex, PageIndex)> {
        if self.mapping.writeback().dirty_pages().total() == 0 {
            return Vec::new();
        }
        let (nodes, view) = (self.mapping.nodes(), self.mapping.view());
        let tree = self.xarray(&nodes);
        let unwritten = tree.range(0, INDICES_MAX - 1).filter_map(|(first, entry, order)| {
            let Kind::Folio(frame) = entry.kind() else { return None };
            if !view.own(Frame(frame)).word().has(Flags::UNWRITTEN) {
                return None;
            }
            let is_unwritten = |page: &u32| {
                let at = Frame(frame).plus(*page);
                view.count_bits(BitTable::Dirty, at, 1) + view.count_bits(BitTable::Writeback, at, 1) > 0
            };
            let last = (0..Order(order).pages()).rev().find(is_unwritten).expect("one of its pages is");
            Some((PageIndex(first), PageIndex(first).plus(u64::from(last) + 1)))
        });
        unwritten.collect()
    }

    /// The file reaches at least to byte `bytes`: what was written to its pages up to there is marked dirty under this
    /// hold of the lock, or was before. The caller has the write lock alone, or knows that it did reach there.
    pub fn grow_size(&mut self, bytes: u64) {
        // Release, partner: the Acquire in `read_hits`: a thread that sees the new size finds the bytes.
        self.mapping.record().size.fetch_max(bytes, Ordering::Release);
    }
}

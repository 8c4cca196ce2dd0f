//! Reclaim: room for more, by a policy that is shown the oldest folios of some rings.
//!
//! ```text
//!    ring      oldest                               youngest
//!    Probation  [3]  7   9   2  ...                      12      the policy names a ring: Probation
//!    Main        4  [8]  ...                                     its oldest, 3, was read twice more: to Main
//!                |    |                                          again: Probation; 7 was not: a victim
//!             scanned, popped
//!
//!    scan up to 64 victims  -->  by mapping and index  -->  each mapping locked once  -->  freed together
//!    under two locks              neighbours together       neighbours by one way down
//! ```
//!
//! Every folio stands in a ring (`lists/`) from its insertion on. When room is wanted, the policy (`policy/`) says
//! which ring's oldest folio is to be scanned, is told how often that was read, and says whether it goes or joins a
//! ring again. Folios that are locked, held or still waited for join their rings again without a verdict. So do
//! **dirty** folios, and those under write-back: reclaim writes nothing to a file. (Folios of a memory file are always
//! dirty. If it may go to the spill file it is scanned as others are, and sent there: `spill.rs`.) A caller that is
//! told that there is nothing to be had has pages written (`filemap/frame_supply.rs`).
//!
//! Each pool has rings and a policy of its own. Room is made of the pool whose turn it is (`policy/pools.rs`); a pool
//! that is at its limit makes room for itself alone.
//!
//! A stream that needs room makes it of pages that its own reader has **passed**, before others have to give: the
//! neighbours leave together, and their frames are the next window's.
//!
//! Each folio that goes leaves a **shadow** with the cache's age, if the policy wants it. A page that comes back is
//! compared with its shadow (`workingset.rs`), and the policy is told. Nodes that hold nothing but shadows are bounded
//! to 1.8 % of memory: the oldest are forgotten before more are made. Where that cannot be, because of locks that are
//! not waited for, an eviction leaves nothing.
//!
//! Invariants:
//!  1. Reclaim allocates no frame, no node and no chunk, and waits for no device.
//!  2. A folio that is locked or held, or whose bytes are not in its file, is never taken.
//!  3. No mapping's lock is held when reclaim is called.
//!  4. No eviction leaves a shadow while there are more nodes that only remember than their bound.
//!  5. A pool is not brought below its protected minimum as long as reclaim finds anything else: not by a page.
//!  6. A mapping that is not known here has no shadows, once the thread that removed it has returned.
//!
//! Not an invariant: that protected pages stay when whole extents are emptied for a smaller bound: folios do not move,
//! and those that stand there go. Nor that a victim is still there, or clean, when its mapping has been locked: it is
//! checked again under the lock. Nor that the oldest node goes first if another thread holds its tree's lock.
//!
//! Cost: two misses of the processor's caches for each folio scanned, under the locks of policy and lists, which are
//! let go after 64 victims or 1024 scans.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::arena::referenced::{self, ReferenceState};
use crate::arena::{Arena, CELLS_PER_PAGE, Descriptor, DescriptorWord, Flags, GrownView};
use crate::backend::Backend;
use crate::lists::{ListReservation, Lists, ListsGuard};
use crate::mapping::{AgeLimit, Mapping, Replacement, ShadowNodes};
use crate::policy::{
    ArrivingFolio, CLASSES, Class, DEFAULT_POLICY, FetchOrigin, NewPolicy, Policy, PolicyVerdict, PoolTurns,
    READS_MAX, SOON_PART, Weights,
};
use crate::readahead::StreamProgress;
use crate::spill::Spill;
use crate::stats::{Count, Counters};
use crate::sync::{LockWait, Rank, RankedMutex, RankedRwLock};
use crate::units::{EXTENT_PAGES, Frame, MappingId, Order, PAGE_SIZE, POOLS_MAX, PageIndex, PoolNumber};
use crate::workingset::{EvictedState, Refault, RefaultCounts, RefaultCurve, ShadowInfo};

mod pools;
mod spill;

pub use pools::PoolCounts;
use spill::SpillBatch;

/// Rings of a pool: those that its policy scans, and behind them the ring of unevictable folios.
const RINGS: usize = CLASSES + 1;
/// The ring of unevictable folios, which are of memory files: charged to the pool, and not scanned.
const KEPT: usize = CLASSES;
/// Victims that leave the index in one go.
const BATCH: usize = 64;
const UNCACHED_SCAN_MAX: u64 = 256;
/// Folios scanned under one hold of the locks.
const SCAN_BATCH_MAX: u64 = 1024;
/// How often each folio is scanned at most: reads are counted up to 3, one of them goes with each scan, and before all
/// of them a folio may be spared for its reader.
const SCANS_MAX: u64 = 5;
/// The share of memory that nodes with nothing but shadow entries may take, in thousandths.
const SHADOW_THOUSANDTHS: u64 = 18;
/// One part in so many of the cache stays behind a stream's reader.
const FOLLOWERS_SHARE: u64 = 16;
/// How a folio that comes back to the place of its shadow entry is classified, for its pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FolioReturn {
    /// Whether it was away for long.
    pub refault: Refault,
    /// Whether a Probation that is a little larger would have it still.
    pub is_soon: bool,
}

/// Bytes of a node, its share of the heads included.
pub const NODE_BYTES: u64 = PAGE_SIZE as u64 / CELLS_PER_PAGE as u64;

/// The most nodes of a cache of `memory` bytes that may only remember: 1.8 % of it.
pub fn shadow_nodes_max(memory: u64) -> u64 {
    memory * SHADOW_THOUSANDTHS / 1000 / NODE_BYTES
}

/// The reclaimer of one cache.
#[derive(Debug)]
pub struct Reclaim {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    mappings: RankedRwLock<HashMap<MappingId, Arc<Mapping>>>,
    policies: RankedMutex<PoolPolicies>,
    new_policy: NewPolicy,
    lists: Arc<Lists>,
    pools: Box<[pools::PoolState]>,
    pools_begun: AtomicU32,
    /// The extent that is emptied next.
    extent: AtomicU32,
    refaults: RefaultCounts,
    shadow_nodes: Arc<ShadowNodes>,
    spill: OnceLock<Arc<Spill>>,
}

#[derive(Debug)]
struct PoolPolicies {
    policies: Vec<Box<dyn Policy>>,
    turns: PoolTurns,
}

impl PoolPolicies {
    fn policy(&mut self, pool: PoolNumber) -> &mut dyn Policy {
        &mut *self.policies[usize::from(pool.0)]
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReclaimTarget {
    /// Pages of any pool, by turns, for the pool named here; as a last resort, protected pages.
    Any(PoolNumber),
    /// Pages of any pool, by turns, for no pool in particular; protected pages stay.
    Unprotected,
    Pool(PoolNumber),
    Uncached(PoolNumber),
}

/// Whether the protected pages of pools are spared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// As far as is possible.
    Kept,
    /// Everything that can go goes.
    Ignored,
}

#[derive(Clone, Copy, Debug)]
struct Victim {
    mapping: MappingId,
    index: PageIndex,
    frame: Frame,
    sequence: u32,
    /// Whether it leaves a shadow.
    remember: bool,
    /// The ring that it was popped from, and joins again if it stays; `None`: it is in one.
    from: Option<usize>,
}

#[derive(Clone, Copy, Default, Debug)]
struct ReclaimScan {
    left: Option<u64>,
    met: [ScanCounts; POOLS_MAX],
    over: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct ScanCounts {
    stuck: Weights,
    /// Whether a folio that was not stuck was scanned since `stuck` was last empty.
    moved: bool,
    at_minimum: bool,
    over: bool,
}

impl ScanCounts {
    /// The ring that `policy` names, when it is shown the weights in `listed` less those of folios that cannot be
    /// evicted. A folio that was scanned in several rounds was counted several times: when nothing seems to be left,
    /// the count begins anew, if anything has moved since.
    fn next(&mut self, policy: &mut dyn Policy, listed: Weights) -> Option<(Class, Weights)> {
        let held = without(listed, self.stuck);
        match policy.next(&held) {
            Some(class) => Some((class, held)),
            None if self.moved => {
                (self.stuck, self.moved) = (Weights::default(), false);
                policy.next(&listed).map(|class| (class, listed))
            }
            None => None,
        }
    }
}

impl Reclaim {
    /// A reclaimer for `arena`, which knows no mapping yet. Each pool has an S3-FIFO of its own.
    pub fn new(arena: Arc<Arena>, counters: Arc<Counters>) -> Self {
        let layout = arena.view().layout();
        let pages_max = u64::from(layout.frames_max - layout.frames_meta);
        Self {
            policies: RankedMutex::new(Rank::Policy, PoolPolicies::new(DEFAULT_POLICY)),
            new_policy: DEFAULT_POLICY,
            lists: Arc::new(Lists::new(Arc::clone(&arena), RINGS)),
            pools: pools::PoolState::all(pages_max),
            pools_begun: AtomicU32::new(1),
            extent: AtomicU32::new(0),
            refaults: RefaultCounts::default(),
            spill: OnceLock::new(),
            shadow_nodes: Arc::new(ShadowNodes::new(Arc::clone(&arena))),
            mappings: RankedRwLock::new(Rank::Directory, HashMap::new()),
            arena,
            counters,
        }
    }

    /// Has each pool evict by another policy, before any folio is listed.
    pub fn set_policy(&mut self, policy: NewPolicy) {
        *self.policies.lock() = PoolPolicies::new(policy);
        self.new_policy = policy;
    }

    /// Makes a mapping known; its folios may be taken from now on.
    pub fn add_mapping(&self, mapping: Arc<Mapping>) {
        let before = self.mappings.write().insert(mapping.id(), mapping);
        debug_assert!(before.is_none(), "a mapping's number is used once at a time");
    }

    /// Forgets a mapping. Waits for its lock.
    pub fn remove_mapping(&self, id: MappingId) {
        let gone = self.mappings.write().remove(&id);
        // Outside that lock: this may be the last reference to the mapping, and then its shadows go with it.
        // If it is not, no thread could take its nodes for as long as it lives.
        if let Some(Err(alive)) = gone.map(Arc::try_unwrap) {
            alive.lock().forget_all();
        }
    }

    /// The most nodes that may only remember, as memory is bounded now.
    pub fn shadow_nodes_max(&self) -> u64 {
        shadow_nodes_max(self.arena.bound())
    }

    /// The list in which the nodes of known mappings stand that only remember.
    pub fn shadow_nodes(&self) -> &Arc<ShadowNodes> {
        &self.shadow_nodes
    }

    /// The rings in which the folios of known mappings stand.
    pub fn lists(&self) -> &Arc<Lists> {
        &self.lists
    }

    /// Pages listed in the default pool, by class.
    pub fn weights(&self) -> Weights {
        weights(&self.lists.lock(), PoolNumber::DEFAULT)
    }

    /// Checks the rings and the list of shadow nodes. Cost: all folios, and all nodes that hold only shadow entries.
    pub fn check(&self) -> Result<(), String> {
        self.lists.check()?;
        self.shadow_nodes.check()
    }

    /// Lists folios that were inserted, each with how it came: those whose descriptors say that they came back soon are
    /// told apart by that. `reservation` is as large as there are folios, and its charge says which pool's they are.
    ///
    /// Locks: Policy, Lists, for some steps a folio.
    pub fn list(
        &self,
        folios: impl IntoIterator<Item = (Frame, FetchOrigin)>,
        mut reservation: ListReservation<'_>,
    ) {
        let pool = reservation.pool();
        let (mut policies, mut lists) = (self.policies.lock(), self.lists.lock());
        let (policy, mut held) = (policies.policy(pool), weights(&lists, pool));
        let (grown, mut returned_soon) = (self.arena.view().grown(), reservation.returned_soon());
        for (frame, came) in folios {
            let word = grown.descriptor(frame).expect("a folio of ours has its frame").word();
            let refault = word.has(Flags::WORKINGSET).then_some(Refault::Recent);
            let returned_soon = std::mem::take(&mut returned_soon);
            let arrival = ArrivingFolio { pages: word.order().pages(), came, refault, returned_soon };
            let class = policy.admit(arrival, &held) as usize;
            held.pages[class] += lists.list(frame, ring(pool, class), &mut reservation);
        }
    }

    /// Lists folios that were inserted and are not scanned, those of memory files that stay. As
    /// [`Reclaim::list`], with no lock but that of the rings.
    pub fn list_kept(&self, frames: impl IntoIterator<Item = Frame>, mut reservation: ListReservation<'_>) {
        let (pool, mut lists) = (reservation.pool(), self.lists.lock());
        for frame in frames {
            lists.list(frame, ring(pool, KEPT), &mut reservation);
        }
    }

    /// Pages that are not scanned, of all pools.
    pub fn unevictable_pages(&self) -> u64 {
        let lists = self.lists.lock();
        (0..lists.pools()).map(|pool| kept(&lists, PoolNumber(pool as u8))).sum()
    }

    /// The mappings that are known, those of memory files among them.
    pub fn mappings(&self) -> Vec<Arc<Mapping>> {
        self.mappings.read().values().cloned().collect()
    }

    /// Whether a mapping of this number is known.
    pub fn knows(&self, id: MappingId) -> bool {
        self.mappings.read().contains_key(&id)
    }

    /// A backend with completions to be fetched and no thread that fetches them.
    pub fn idle_backend(&self) -> Option<Arc<dyn Backend>> {
        let mappings = self.mappings.read();
        let spill = self.spill.get().map(|spill| Arc::clone(spill.backend()));
        let all = mappings.values().map(|mapping| mapping.backend()).chain(spill);
        all.into_iter().find(|backend| backend.wants_leader())
    }

    /// Whether fills are in flight of files of `device`, as their identities name it; all digests are of one.
    pub fn has_fills_of(&self, device: u64) -> bool {
        let is_its = |mapping: &Mapping| mapping.identity().shared_device() == device;
        self.mappings.read().values().any(|mapping| mapping.has_fills() && is_its(mapping))
    }

    /// The backend of some file, if there is one: for a caller that may have to reap completions that others wait for.
    pub fn some_backend(&self) -> Option<Arc<dyn Backend>> {
        let mappings = self.mappings.read();
        mappings.values().find(|mapping| !mapping.is_memory()).map(|mapping| mapping.backend())
    }

    /// Has every mapping give its spare nodes back to the arena. Waits for mappings' locks.
    pub fn collect_spare_nodes(&self) {
        self.mappings().iter().for_each(|mapping| mapping.give_back_nodes(LockWait::Wait));
    }

    /// A folio of `order` comes back to where its eviction left `memory`, for a reader of `pool`: whether it was away
    /// for long. Counts it among the refaults.
    pub fn note_refault(&self, pool: PoolNumber, memory: ShadowInfo, order: Order) -> FolioReturn {
        let (view, state) = (self.arena.view(), self.state(pool));
        // The cache's size is all that has grown, index nodes (a few hundredths) included. A pool's size is its charge,
        // and the default pool's is the rest.
        let grown = u64::from(view.frames_grown().saturating_sub(view.layout().frames_meta));
        let held = match pool {
            PoolNumber::DEFAULT => grown.min(self.arena.pages_max()).saturating_sub(self.charged_by_others()),
            _ => self.lists.charged(pool),
        };
        let distance = state.workingset.distance(memory);
        self.refaults.add(distance, held, u64::from(order.pages()));
        let is_soon = distance <= state.soon.load(Ordering::Relaxed);
        let reach = state.reach.load(Ordering::Relaxed);
        FolioReturn { refault: state.workingset.refault_after(distance, order, reach), is_soon }
    }

    /// Refaults so far, by the cache size that would have kept the page.
    pub fn refaults(&self) -> RefaultCurve {
        self.refaults.curve()
    }

    /// Forgets at least `nodes` nodes that only remember, the oldest first; returns how many were.
    pub fn forget_nodes(&self, nodes: u64, locks: LockWait) -> u64 {
        let mut forgotten = 0;
        while forgotten < nodes {
            match self.forget_some(nodes - forgotten, locks) {
                0 => break,
                some => forgotten += some,
            }
        }
        forgotten
    }

    fn forget_some(&self, max: u64, locks: LockWait) -> u64 {
        // As a rule that of the oldest; others that have old ones are asked if it cannot be had.
        let oldest = self.shadow_nodes.owner().map_or(0, |id| self.forget_some_of(id, max, locks));
        if oldest > 0 {
            return oldest;
        }
        let mut owners = self.shadow_nodes.owners().into_iter();
        owners.find_map(|id| Some(self.forget_some_of(id, max, locks)).filter(|&some| some > 0)).unwrap_or(0)
    }

    /// Forgets the oldest nodes of a mapping, at most `max`; none if its lock cannot be had.
    fn forget_some_of(&self, id: MappingId, max: u64, locks: LockWait) -> u64 {
        let Some(mapping) = self.mappings.read().get(&id).cloned() else { return 0 };
        let Some(mut guard) = mapping.lock_as(locks) else { return 0 };
        // The oldest, and those that follow of the same mapping; or one, if the oldest could not be had.
        match guard.forget_nodes(max, AgeLimit::Oldest) {
            0 => guard.forget_nodes(1, AgeLimit::Near),
            some => some,
        }
    }

    /// Frees at least `pages` pages if so many can be freed; returns how many were. Waits for locks, not for a device.
    pub fn reclaim(&self, pages: u32, locks: LockWait) -> u32 {
        self.reclaim_for(PoolNumber::DEFAULT, pages, locks)
    }

    /// As [`Reclaim::reclaim`], for a reader of `pool`.
    pub fn reclaim_for(&self, pool: PoolNumber, pages: u32, locks: LockWait) -> u32 {
        self.reclaim_from(ReclaimTarget::Any(pool), pages, locks)
    }

    /// As [`Reclaim::reclaim`], of the pages of `pool` and of no others.
    pub fn reclaim_in(&self, pool: PoolNumber, pages: u32, locks: LockWait) -> u32 {
        self.reclaim_from(ReclaimTarget::Pool(pool), pages, locks)
    }

    /// As [`Reclaim::reclaim`], and leaves alone the pages that pools protect, also if nothing else is to be had.
    pub fn reclaim_unprotected(&self, pages: u32, locks: LockWait) -> u32 {
        self.reclaim_from(ReclaimTarget::Unprotected, pages, locks)
    }

    /// As [`Reclaim::reclaim_in`], of folios that uncached reads have made and that no other reader has read.
    /// Checks a few hundred folios, since folios under way, or pinned, may be all that there are.
    pub fn reclaim_uncached(&self, pool: PoolNumber, pages: u32, locks: LockWait) -> u32 {
        self.reclaim_from(ReclaimTarget::Uncached(pool), pages, locks)
    }

    /// Pages that uncached reads have made and that stand in their ring, of a pool or of all. Pages under way
    /// are among them, and pages that were read since and not scanned yet. `None` if the lock is busy.
    pub fn uncached_pages(&self, of: Option<PoolNumber>, locks: LockWait) -> Option<u64> {
        let lists = self.lists.lock_as(locks)?;
        let pages = |pool| lists.pages(ring(pool, Class::Uncached as usize));
        Some(match of {
            Some(pool) => pages(pool),
            None => (0..lists.pools()).map(|pool| pages(PoolNumber(pool as u8))).sum(),
        })
    }

    fn reclaim_from(&self, from: ReclaimTarget, pages: u32, locks: LockWait) -> u32 {
        let (mut went, mut search) = (EvictedPages::default(), ReclaimScan::default());
        while went.freed + went.sent < pages && !search.over {
            // Protected pages are for a caller that would have nothing else.
            let from = if went.freed > 0 && matches!(from, ReclaimTarget::Any(_)) {
                ReclaimTarget::Unprotected
            } else {
                from
            };
            let left = pages - went.freed - went.sent;
            let Some((victims, reservation)) = self.gather(from, left, &mut search, locks) else {
                break;
            };
            let some = self.evict(victims, reservation, locks);
            went = EvictedPages { freed: went.freed + some.freed, sent: went.sent + some.sent };
        }
        went.freed
    }

    /// Makes room for a stream out of the pages that its reader has passed: evicts the newest folios there that came by
    /// a stream into `pool`, its own, and that the policy would let go, until they are `pages` pages, or no more are
    /// near. They leave no shadow. Returns the pages freed.
    ///
    /// The newest go, because of a stream that repeats a loop: pages that it keeps of the first pass are there in all
    /// others. Some of the pages that it has just passed are left alone, for readers close behind it.
    pub fn reclaim_passed(&self, stream: PassedStream<'_>, pages: u32, locks: LockWait) -> u32 {
        let PassedStream { pool, mapping, passed } = stream;
        let end = PageIndex(passed.to.0.saturating_sub(self.followers_pages()));
        let from = PageIndex(end.0.saturating_sub(2 * u64::from(pages))).max(passed.from);
        if from >= end {
            return 0;
        }
        let Some(goes) = self.reads_that_evict_of_stream(pool, locks) else { return 0 };
        let Some(mut guard) = mapping.lock_as(locks) else { return 0 };
        let folios = self.newest_passed(guard.folios_within(from, end), pool, pages, goes);
        let mut gone = Vec::with_capacity(folios.len());
        guard.evict_all(&folios, |_, _| Replacement::Nothing, &mut gone);
        drop(guard);
        self.arena.free_all(&gone);
        self.count_evicted(pool, &gone)
    }

    fn count_evicted(&self, pool: PoolNumber, gone: &[(Frame, Order)]) -> u32 {
        let pages = gone.iter().map(|(_, order)| order.pages()).sum();
        self.counters.add(Count::Evicted, u64::from(pages));
        self.state(pool).evicted.fetch_add(u64::from(pages), Ordering::Relaxed);
        pages
    }

    fn followers_pages(&self) -> u64 {
        self.arena.pages_max() / FOLLOWERS_SHARE
    }

    /// Whether the pool's policy would let a stream's folio go, by how often that was read beyond the first.
    fn reads_that_evict_of_stream(
        &self,
        pool: PoolNumber,
        locks: LockWait,
    ) -> Option<[bool; READS_MAX as usize + 1]> {
        let mut policies = self.policies.lock_as(locks)?;
        let held = weights(&self.lists.lock_as(locks)?, pool);
        let policy = policies.policy(pool);
        let goes = |reads| {
            matches!(policy.decide(Class::Stream, reads as u8, 1, &held), PolicyVerdict::Evict { .. })
        };
        Some([0, 1, 2, 3].map(goes))
    }

    /// The last `pages` pages, or a folio more, of those `folios` that `goes` lets go.
    fn newest_passed(
        &self,
        mut folios: Vec<(PageIndex, Frame)>,
        pool: PoolNumber,
        pages: u32,
        goes: [bool; READS_MAX as usize + 1],
    ) -> Vec<(PageIndex, Frame)> {
        let streams = Some(ring(pool, Class::Stream as usize));
        let lists = self.lists.lock();
        let (view, mut found) = (self.arena.view(), 0);
        let is_passed = |frame: Frame| {
            let reads = match referenced::found(self.byte(frame).load(Ordering::Relaxed)) {
                ReferenceState::Spared(_) => 0, // the reader has passed it by
                ReferenceState::Reads(reads) => reads,
            };
            lists.ring_of(frame) == streams && goes[reads as usize] && self.can_go(frame)
        };
        folios.reverse();
        folios.retain(|&(_, frame)| {
            let goes = found < pages && is_passed(frame);
            found += if goes { view.own(frame).word().order().pages() } else { 0 };
            goes
        });
        folios.reverse();
        folios
    }

    /// Empties one extent of folios as far as it can be, so that it can hold nodes; returns the pages freed.
    pub fn reclaim_extent(&self, protection: Protection) -> u32 {
        // Two at a time may choose the same: then one of them frees less.
        let Some(extent) = self.arena.next_data_extent(self.extent.load(Ordering::Relaxed)) else { return 0 };
        self.extent.store(extent + 1, Ordering::Relaxed);
        self.evict_extent(extent, protection)
    }

    /// Evicts the folios of one extent that can go, whatever they are worth; the pages freed. Waits for locks only.
    pub fn evict_extent(&self, extent: u32, protection: Protection) -> u32 {
        let frames = (extent * EXTENT_PAGES..(extent + 1) * EXTENT_PAGES).map(Frame);
        let mut victims: Vec<(PoolNumber, Victim)> = {
            // Under the lock of the rings, folios listed in them are not freed while they are looked at.
            let lists = self.lists.lock();
            let mut left: [u64; POOLS_MAX] = std::array::from_fn(|pool| match protection {
                Protection::Kept if pool < lists.pools() => self.excess(&lists, PoolNumber(pool as u8)),
                _ => u64::MAX,
            });
            let spend = |pool: PoolNumber, pages: u64| {
                let left = &mut left[usize::from(pool.0)];
                let may = *left >= pages;
                *left -= if may { pages } else { 0 };
                may
            };
            self.listed_victims(&lists, frames, spend)
        };
        victims.sort_by_key(|(pool, _)| *pool);
        let of_pool = |group: &[(PoolNumber, Victim)]| {
            let victims = group.iter().map(|(_, victim)| *victim).collect();
            self.evict(victims, self.lists.empty_reservation(group[0].0), LockWait::Wait).freed
        };
        victims.chunk_by(|a, b| a.0 == b.0).flat_map(|group| group.chunks(BATCH)).map(of_pool).sum()
    }

    /// The folios headed by `frames` that stand in a ring, look as if they could go, and `may` go, each with its pool.
    fn listed_victims(
        &self,
        lists: &ListsGuard<'_>,
        frames: impl Iterator<Item = Frame>,
        mut may: impl FnMut(PoolNumber, u64) -> bool,
    ) -> Vec<(PoolNumber, Victim)> {
        let victim = |frame: Frame| {
            let word = self.arena.view().own(frame).settled_word();
            // In a free frame these words are the arena's links, and no place in a ring.
            let ring = if word.is_live() { lists.ring_of(frame)? } else { return None };
            if !self.can_go(frame) && !self.can_spill(frame) {
                return None;
            }
            let pool = PoolNumber((ring / RINGS) as u8);
            let folio = || Scanned::of(self.arena.view().grown(), frame);
            may(pool, u64::from(word.order().pages())).then(|| (pool, folio().victim()))
        };
        frames.filter_map(victim).collect()
    }

    /// Has a pool's policy scan folios until there is a batch of victims, or `pages` pages of them; with their places.
    /// The search is over when each folio was scanned so often that nothing is to be had.
    fn gather(
        &self,
        whose: ReclaimTarget,
        pages: u32,
        search: &mut ReclaimScan,
        locks: LockWait,
    ) -> Option<(Vec<Victim>, ListReservation<'_>)> {
        let mut policies = self.policies.lock_as(locks)?;
        let mut lists = self.lists.lock_as(locks)?;
        let is_uncached = matches!(whose, ReclaimTarget::Uncached(_));
        let most = if is_uncached { UNCACHED_SCAN_MAX } else { lists.listed() * SCANS_MAX };
        let mut left = search.left.unwrap_or(most);
        let turn = self.choose(&mut policies, &lists, search, whose, pages).filter(|_| left > 0);
        let pool = PoolNumber(turn.map_or(0, |turn| turn.pool as u8));
        let (mut victims, mut reservation) = (Vec::with_capacity(BATCH), self.lists.empty_reservation(pool));
        let Some(turn) = turn else {
            search.over = true;
            return Some((victims, reservation));
        };
        let (policy, met) = (policies.policy(pool), &mut search.met[turn.pool]);
        let (mut listed, grown) = (weights(&lists, pool), self.arena.view().grown());
        let may_go = if turn.of_excess { turn.pages } else { u64::MAX };
        let (wanted, mut found) = (u64::from(pages).min(turn.pages), 0);
        for _ in 0..SCAN_BATCH_MAX {
            if found >= wanted || victims.len() == BATCH || met.at_minimum && turn.of_excess {
                break;
            }
            let next = met.next(policy, if is_uncached { listed.only(Class::Uncached) } else { listed });
            let Some((class, held)) = next.filter(|_| left > 0) else {
                met.over = true;
                break;
            };
            let from = ring(pool, class as usize);
            let popped = lists.pop(from, &mut reservation);
            let Some((frame, order)) = popped else { unreachable!("a ring that was named holds something") };
            left -= 1;
            let (folio, pages) = (Scanned::of(grown, frame), u64::from(order.pages()));
            listed.pages[class as usize] -= pages;
            let verdict = self.oldest_verdict(policy, &folio, order, class, &held);
            match verdict {
                OldestVerdict::Stuck => {
                    self.note_stuck(pool, folio.descriptor);
                    met.stuck.pages[class as usize] += pages;
                    listed.pages[class as usize] += lists.list(frame, from, &mut reservation);
                    continue;
                }
                OldestVerdict::Evict { .. } if found + pages > may_go => {
                    met.at_minimum = true;
                    listed.pages[class as usize] += lists.list(frame, from, &mut reservation);
                }
                OldestVerdict::Evict { remember } => {
                    found += pages;
                    victims.push(Victim { remember, from: Some(from), ..folio.victim() });
                }
                OldestVerdict::Keep(class) => {
                    let to = ring(pool, class as usize);
                    listed.pages[class as usize] += lists.list(frame, to, &mut reservation);
                }
            }
            met.moved = true;
        }
        search.left = Some(left);
        // Not when folios are listed: folios that are listed until the next scan go by it, and must not be taken for a
        // Probation that is larger than it should be.
        let state = self.state(pool);
        state.reach.store(policy.reach(&listed), Ordering::Relaxed);
        state.soon.store(listed.total() / SOON_PART, Ordering::Relaxed);
        Some((victims, reservation))
    }

    fn oldest_verdict(
        &self,
        policy: &mut dyn Policy,
        folio: &Scanned<'_>,
        order: Order,
        class: Class,
        held: &Weights,
    ) -> OldestVerdict {
        match self.check_references(folio) {
            OldestState::Stuck => OldestVerdict::Stuck,
            OldestState::Spared => OldestVerdict::Keep(class),
            OldestState::Due(_) if class == Class::Uncached && self.adopt(folio) => {
                OldestVerdict::Keep(Class::Probation)
            }
            OldestState::Due(reads) => match policy.decide(class, reads, order.pages(), held) {
                PolicyVerdict::Keep { class, reads } => {
                    folio.byte.store(reads, Ordering::Relaxed);
                    OldestVerdict::Keep(class)
                }
                PolicyVerdict::Evict { remember } => OldestVerdict::Evict { remember },
            },
        }
    }

    fn byte(&self, frame: Frame) -> &AtomicU8 {
        self.arena.view().referenced(frame).expect("a listed frame is grown")
    }

    /// Keeps a folio that an uncached read made if another reader has read it; whether it does.
    fn adopt(&self, folio: &Scanned<'_>) -> bool {
        let word = folio.descriptor.word();
        let flagged = word.has(Flags::DROPBEHIND);
        let is_read = || referenced::was_read(folio.byte.load(Ordering::Relaxed));
        let adopted = flagged && is_read() && folio.descriptor.adopt_clean();
        if adopted {
            self.counters.add(Count::Adopted, u64::from(word.order().pages()));
        }
        !flagged || adopted
    }

    /// The state of a scanned folio. The caller has had the lock of the rings since it was listed.
    fn check_references(&self, folio: &Scanned<'_>) -> OldestState {
        if !can_go(folio.descriptor) && !self.can_spill(folio.frame) {
            return OldestState::Stuck;
        }
        match referenced::found(folio.byte.load(Ordering::Relaxed)) {
            // A touch between the load and the store is lost: its folio is scanned as if it had not been.
            ReferenceState::Spared(left) => {
                folio.byte.store(left, Ordering::Relaxed);
                OldestState::Spared
            }
            ReferenceState::Reads(reads) => OldestState::Due(reads),
        }
    }

    fn can_go(&self, frame: Frame) -> bool {
        can_go(self.arena.view().own(frame))
    }

    /// Takes `victims`, all of the pool of `reservation`, out of their mappings and frees them, or sends them to the
    /// spill file. Folios that stay are listed again.
    fn evict(&self, victims: Vec<Victim>, reservation: ListReservation<'_>, locks: LockWait) -> EvictedPages {
        let pool = reservation.pool();
        self.prune_shadow_nodes(victims.len() as u64, locks);
        let victims = by_page(&victims);
        let mut evicted = Evicted { gone: Vec::with_capacity(victims.len()), going: SpillBatch::default() };
        let mut stayed: Vec<Victim> = Vec::new();
        for group in victims.chunk_by(|a, b| a.mapping == b.mapping) {
            let first = evicted.gone.len();
            self.evict_of_mapping(pool, group, &mut evicted, locks);
            if evicted.gone.len() - first == group.len() {
                continue; // as a rule
            }
            let mut left = evicted.gone[first..].iter().peekable();
            let went = |victim: &&Victim| left.next_if(|(frame, _)| *frame == victim.frame).is_none();
            stayed.extend(group.iter().filter(went));
        }
        let Evicted { gone, going } = evicted;
        self.arena.free_all(&gone);
        self.relist(&stayed, reservation);
        // A folio that left nothing may have left its node to shadows that were there before; and others evict, too.
        self.prune_shadow_nodes(0, locks);
        EvictedPages { freed: self.count_evicted(pool, &gone), sent: self.send(going) }
    }

    /// Takes out the folios of `group`, all of one mapping, that can go, and adds them to `evicted`.
    fn evict_of_mapping(&self, pool: PoolNumber, group: &[Victim], evicted: &mut Evicted, locks: LockWait) {
        let mapping = self.mappings.read().get(&group[0].mapping).cloned();
        let Some(mapping) = mapping else { return };
        if mapping.backing().spills() {
            return self.spill_of_mapping(&mapping, group, locks, &mut evicted.going);
        }
        let folios: Vec<_> = group.iter().map(|victim| (victim.index, victim.frame)).collect();
        if let Some(mut guard) = mapping.lock_as(locks) {
            let mut leaving = EvictionLimits {
                state: self.state(pool),
                nodes_max: self.shadow_nodes_max(),
                shadow_pages: 0,
            };
            guard.evict_all(
                &folios,
                |nth, word| self.leave(&mut leaving, &group[nth], word),
                &mut evicted.gone,
            );
            self.counters.add(Count::Shadows, leaving.shadow_pages);
        }
    }

    /// Victims that could not go after all join the rings they came from. The frame of one that is gone all the same
    /// may be another folio's by now, which is not listed here.
    fn relist(&self, stayed: &[Victim], mut reservation: ListReservation<'_>) {
        if !stayed.is_empty() {
            let mut lists = self.lists.lock();
            for victim in stayed {
                if let Some(ring) = victim.from {
                    lists.list_again(victim.frame, victim.sequence, ring, &mut reservation);
                }
            }
        }
    }

    fn prune_shadow_nodes(&self, folios: u64, locks: LockWait) {
        let wanted = self.shadow_nodes.count() + folios;
        let max = self.shadow_nodes_max();
        if wanted > max {
            self.forget_nodes(wanted - max, locks);
        }
    }

    /// The entry to replace `victim`, whose descriptor was `word` before. The caller holds its tree's lock.
    fn leave(&self, leaving: &mut EvictionLimits<'_>, victim: &Victim, word: DescriptorWord) -> Replacement {
        let standing =
            if word.has(Flags::WORKINGSET) { EvictedState::WorkingSet } else { EvictedState::Plain };
        // The pool ages by the evicted pages, remembered or not.
        let memory = leaving.state.workingset.remember(word.order(), standing);
        // Counted in any case, so that statistics show a working set that does not fit.
        let remember = victim.remember || standing == EvictedState::WorkingSet;
        if !remember || self.shadow_nodes.count() >= leaving.nodes_max {
            return Replacement::Nothing;
        }
        leaving.shadow_pages += u64::from(word.order().pages());
        Replacement::Shadow(memory.payload())
    }
}

/// A stream in a mapping, and the pages of it that its reader has passed.
#[derive(Clone, Copy, Debug)]
pub struct PassedStream<'m> {
    /// The pool of the reader.
    pub pool: PoolNumber,
    /// The mapping of the file that is read.
    pub mapping: &'m Mapping,
    /// How far its reader is.
    pub passed: StreamProgress,
}

#[derive(Default)]
struct Evicted {
    /// Folios that are in no mapping, and are to be freed.
    gone: Vec<(Frame, Order)>,
    /// Folios on their way to the spill file.
    going: SpillBatch,
}

struct EvictionLimits<'r> {
    state: &'r pools::PoolState,
    nodes_max: u64,
    shadow_pages: u64,
}

#[derive(Clone, Copy, Default, Debug)]
struct EvictedPages {
    freed: u32,
    sent: u32,
}

/// The oldest folio of a ring, which a scan has come to. The caller has had the lock of the rings since it was in one.
struct Scanned<'v> {
    frame: Frame,
    descriptor: &'v Descriptor,
    /// How often it was read; see `arena/referenced.rs`.
    byte: &'v AtomicU8,
}

impl<'v> Scanned<'v> {
    fn of(grown: GrownView<'v>, frame: Frame) -> Self {
        let descriptor = grown.descriptor(frame).expect("a listed frame is grown");
        Self { frame, descriptor, byte: grown.referenced(frame).expect("a listed frame is grown") }
    }

    /// The folio as a victim, which leaves a shadow, and names no ring to return to.
    fn victim(&self) -> Victim {
        let (mapping, index) = (self.descriptor.mapping(), self.descriptor.index());
        let sequence = self.descriptor.word().sequence();
        Victim { mapping, index, frame: self.frame, sequence, remember: true, from: None }
    }
}

/// Victims in the order of their mappings and indices. A number for each is sorted, as it is moved often: the index,
/// and the place among the victims. A stable sort by mapping follows, which finds nothing to do where all are of one.
fn by_page(victims: &[Victim]) -> Vec<Victim> {
    const PLACE_BITS: u32 = BATCH.ilog2() + 1;
    assert!(victims.len() <= BATCH, "a batch has {BATCH} victims at most");
    let key = |(place, victim): (usize, &Victim)| victim.index.0 << PLACE_BITS | place as u64;
    let victim = |key: u64| victims[key as usize & ((1 << PLACE_BITS) - 1)];
    let mut keys: Vec<u64> = victims.iter().enumerate().map(key).collect();
    keys.sort_unstable();
    keys.sort_by_key(|&key| victim(key).mapping.0);
    keys.into_iter().map(victim).collect()
}

/// Whether a folio is live, filled, neither locked nor held, and in its file.
fn can_go(descriptor: &Descriptor) -> bool {
    let word = descriptor.settled_word();
    let there = word.is_live() && word.has(Flags::UPTODATE) && !word.has(Flags::LOCKED | Flags::UNWRITTEN);
    there && word.holds() == 0
}

enum OldestState {
    /// The folio cannot go now, whatever the policy decides.
    Stuck,
    /// The folio's reader is still to come.
    Spared,
    /// The folio can go, and was read this often beyond the first time.
    Due(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OldestVerdict {
    Stuck,
    Keep(Class),
    Evict { remember: bool },
}

fn ring(pool: PoolNumber, class: usize) -> usize {
    usize::from(pool.0) * RINGS + class
}

fn kept(lists: &ListsGuard<'_>, pool: PoolNumber) -> u64 {
    lists.pages(ring(pool, KEPT))
}

fn weights(lists: &ListsGuard<'_>, pool: PoolNumber) -> Weights {
    Weights { pages: lists.pages_from(ring(pool, 0)) }
}

fn without(held: Weights, stuck: Weights) -> Weights {
    Weights { pages: std::array::from_fn(|class| held.pages[class].saturating_sub(stuck.pages[class])) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn victim(mapping: u32, index: u64, frame: u32) -> Victim {
        let (mapping, index) = (MappingId(mapping), PageIndex(index));
        Victim { mapping, index, frame: Frame(frame), sequence: 0, remember: true, from: None }
    }

    proptest! {
        /// The twin: the victims themselves, sorted. Some are of the last mapping and the last page that there can be.
        #[test]
        fn victims_are_in_the_order_of_their_pages(
            pages in prop::collection::vec(
                (prop_oneof![0..3u32, Just(u32::MAX)], prop_oneof![0..40u64, ((1u64 << 52) - 9)..(1 << 52)]),
                0..=BATCH,
            ),
        ) {
            let victims: Vec<_> =
                (0..).zip(&pages).map(|(frame, &(mapping, index))| victim(mapping, index, frame)).collect();
            let mut twin = victims.clone();
            twin.sort_by_key(|victim| (victim.mapping.0, victim.index)); // stable, as places are
            let frames = |victims: &[Victim]| victims.iter().map(|victim| victim.frame).collect::<Vec<_>>();
            prop_assert_eq!(frames(&by_page(&victims)), frames(&twin));
        }
    }
}

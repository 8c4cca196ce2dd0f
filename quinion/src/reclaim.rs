//! Reclaim: room for more, by a clock over the referenced bytes.
//!
//! ```text
//!    referenced   1 0 0 2 1 0 0 0   0 0 0 0 0 0 0 0   1 1 ...     one byte a frame
//!                 ^ hand: 2 -> 1 -> 0, spared;   0 -> a victim if it heads a folio that is ready and not held
//! ```
//!
//! A reader sets a folio's byte to 1 when it finds it clear; the hand halves it
//! and spares the folio. The table of all its values is in `arena/referenced.rs`. Victims are gathered in
//! batches and leave the index under one hold of each mapping's lock.
//!
//! The byte is not clear at the start: pages that were fetched ahead would else be
//! the first to go, before what was read and is done with, and so before their
//! reader came. He has one turn of the hand to come.
//!
//! Each leaves a **shadow** with the cache's age. A page that comes back to a
//! shadow is judged by it (`workingset.rs`); if it was not away for long, its
//! byte begins with 2, as if it had been read twice, and it outlives a round of
//! pages that were read once. Nodes that hold nothing but shadows are bounded to
//! 1.8 % of memory: the oldest are forgotten before more are made. Where
//! that cannot be, because of locks that are not waited for, an eviction leaves nothing.
//!
//! Invariants:
//!  1. Reclaim allocates no frame and no node, and waits for no device.
//!  2. A folio that is locked or held is never taken.
//!  3. No mapping's lock is held when reclaim is called.
//!  4. No eviction leaves a shadow while there are more nodes that only remember than their bound.
//!  5. A mapping that is not known here has no shadows, once whoever removed it has returned.
//!
//! Not an invariant: that a victim is still there when its mapping has been
//! locked. The tree and the descriptor are asked again under the lock. Nor that
//! the oldest node goes first if its tree is locked by somebody else.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::arena::referenced::{TURNS_MAX, after_hand, is_due};
use crate::arena::{Arena, CELLS_PER_PAGE, Flags, Word};
use crate::backend::Backend;
use crate::mapping::{Leave, Mapping, Reach, ShadowNodes};
use crate::stats::{Count, Counters};
use crate::sync::{Locks, Rank, RankedMutex, RankedRwLock};
use crate::units::{EXTENT_PAGES, Frame, MappingId, Order, PAGE_SIZE, PageIndex};
use crate::workingset::{Memory, Refault, RefaultCounts, RefaultCurve, Standing, WorkingSet};

/// Victims that leave the index in one go.
const BATCH: usize = 64;
/// Of memory, what nodes that only remember may take: so many thousandths.
const SHADOW_THOUSANDTHS: u64 = 18;
/// Bytes of a node, its share of the heads included.
pub const NODE_BYTES: u64 = PAGE_SIZE as u64 / CELLS_PER_PAGE as u64;

/// The reclaimer of one cache.
#[derive(Debug)]
pub struct Reclaim {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    mappings: RankedRwLock<HashMap<MappingId, Arc<Mapping>>>,
    hand: RankedMutex<u32>,
    workingset: WorkingSet,
    refaults: RefaultCounts,
    shadow_nodes: Arc<ShadowNodes>,
    /// The most nodes that only remember.
    shadow_nodes_max: u64,
}

/// A folio that may go.
#[derive(Clone, Copy, Debug)]
struct Victim {
    mapping: MappingId,
    index: PageIndex,
    frame: Frame,
    /// As it was when it was looked at.
    order: Order,
}

impl Reclaim {
    /// A reclaimer for `arena`, which knows no mapping yet.
    pub fn new(arena: Arc<Arena>, counters: Arc<Counters>) -> Self {
        let layout = arena.view().layout();
        let pages_max = u64::from(layout.frames_max - layout.frames_meta);
        Self {
            hand: RankedMutex::new(Rank::Clock, layout.frames_meta),
            workingset: WorkingSet::new(pages_max),
            refaults: RefaultCounts::default(),
            shadow_nodes: Arc::new(ShadowNodes::new(Arc::clone(&arena))),
            shadow_nodes_max: arena.stats().bound_bytes * SHADOW_THOUSANDTHS / 1000 / NODE_BYTES,
            mappings: RankedRwLock::new(Rank::Directory, HashMap::new()),
            arena,
            counters,
        }
    }

    /// Makes a mapping known; its folios may be taken from now on.
    pub fn add_mapping(&self, mapping: Arc<Mapping>) {
        let before = self.mappings.write().insert(mapping.id(), mapping);
        debug_assert!(before.is_none(), "a mapping's number is used once at a time");
    }

    /// Forgets a mapping. Waits for its lock.
    pub fn remove_mapping(&self, id: MappingId) {
        let gone = self.mappings.write().remove(&id);
        // Outside that lock: this may be the last to know the mapping, and then its shadows go with it. If it
        // is not, nobody could take its nodes for as long as it lives.
        if let Some(Err(alive)) = gone.map(Arc::try_unwrap) {
            alive.lock().forget_all();
        }
    }

    /// The most nodes that may only remember: 1.8 % of memory.
    pub fn shadow_nodes_max(&self) -> u64 {
        self.shadow_nodes_max
    }

    /// The list in which the nodes of known mappings stand that only remember.
    pub fn shadow_nodes(&self) -> &Arc<ShadowNodes> {
        &self.shadow_nodes
    }

    /// What is wrong with what is remembered, if anything. Cost: all nodes that only remember.
    pub fn check(&self) -> Result<(), String> {
        self.shadow_nodes.check()
    }

    /// Whether a mapping of this number is known.
    pub fn knows(&self, id: MappingId) -> bool {
        self.mappings.read().contains_key(&id)
    }

    /// A backend with completions to be fetched and nobody to fetch them.
    pub fn idle_backend(&self) -> Option<Arc<dyn Backend>> {
        let mappings = self.mappings.read();
        mappings.values().map(|mapping| mapping.backend()).find(|backend| backend.wants_leader()).cloned()
    }

    /// Has every mapping give its spare nodes back to the arena. Waits for mappings' locks.
    pub fn collect_spare_nodes(&self) {
        let mappings: Vec<_> = self.mappings.read().values().cloned().collect();
        mappings.iter().for_each(|mapping| mapping.give_back_nodes(Locks::Wait));
    }

    /// A folio of `order` comes back to where its eviction left `memory`: whether it was away for long. Counts it
    /// among what came back.
    pub fn judge(&self, memory: Memory, order: Order) -> Refault {
        let view = self.arena.view();
        // What the cache holds: all that has grown. The nodes among it, a few hundredths, count along.
        let held = u64::from(view.frames_grown().saturating_sub(view.layout().frames_meta));
        self.refaults.add(self.workingset.distance(memory), held, u64::from(order.pages()));
        self.workingset.judge(memory, order, held)
    }

    /// What came back so far, by what would have kept it.
    pub fn refaults(&self) -> RefaultCurve {
        self.refaults.curve()
    }

    /// Forgets at least `nodes` nodes that only remember, the oldest first, if there are so many; returns how
    /// many were. Passes over trees that are locked, if `locks` says so.
    pub fn forget_nodes(&self, nodes: u64, locks: Locks) -> u64 {
        let mut forgotten = 0;
        while forgotten < nodes {
            match self.forget_some(nodes - forgotten, locks) {
                0 => break,
                some => forgotten += some,
            }
        }
        forgotten
    }

    /// Forgets the oldest nodes of the first mapping that can be had; at most `max`.
    fn forget_some(&self, max: u64, locks: Locks) -> u64 {
        for id in self.shadow_nodes.owners() {
            let Some(mapping) = self.mappings.read().get(&id).cloned() else { continue };
            let Some(mut guard) = mapping.lock_as(locks) else { continue };
            // The oldest, and those that follow of the same mapping; or one, if the oldest could not be had.
            let forgotten = match guard.forget_nodes(max, Reach::Oldest) {
                0 => guard.forget_nodes(1, Reach::Near),
                some => some,
            };
            drop(guard);
            if forgotten > 0 {
                return forgotten;
            }
        }
        0
    }

    /// Frees at least `pages` pages if so many can be freed; returns how many were. Waits for mappings'
    /// locks, never for a device.
    pub fn reclaim(&self, pages: u32, locks: Locks) -> u32 {
        let mut freed = 0;
        // So many times round clear every byte, once more finds what nobody touched since.
        let mut budget = self.arena.view().frames_grown().saturating_mul(TURNS_MAX + 1) + EXTENT_PAGES;
        while freed < pages && budget > 0 {
            let Some((victims, scanned)) = self.gather(pages - freed, budget, locks) else { break };
            budget -= scanned.min(budget);
            if victims.is_empty() && budget == 0 {
                break;
            }
            freed += self.evict(victims, locks);
        }
        freed
    }

    /// Empties one extent of folios as far as it can be, so that it can hold nodes; the hand chooses.
    /// Returns the pages freed.
    pub fn reclaim_extent(&self) -> u32 {
        let view = self.arena.view();
        let (first, grown) = (view.layout().frames_meta, view.frames_grown());
        let start = {
            let mut hand = self.hand.lock();
            let start = (*hand).clamp(first, grown - 1) / EXTENT_PAGES * EXTENT_PAGES;
            *hand = if start + EXTENT_PAGES >= grown { first } else { start + EXTENT_PAGES };
            start
        };
        let victims: Vec<_> = (start..start + EXTENT_PAGES).filter_map(|f| self.victim(Frame(f))).collect();
        victims.chunks(BATCH).map(|batch| self.evict(batch.to_vec(), Locks::Wait)).sum()
    }

    /// Moves the hand over at most `budget` frames and returns up to a batch of victims, and how far it went. Where
    /// folios are large it stops at `pages` pages, which may be few folios: what goes beyond the need would have been
    /// read yet.
    fn gather(&self, pages: u32, budget: u32, locks: Locks) -> Option<(Vec<Victim>, u32)> {
        let (first, grown) = (self.arena.view().layout().frames_meta, self.arena.view().grown());
        let mut victims = Vec::with_capacity(BATCH);
        let (mut scanned, mut gathered) = (0, 0);
        if first >= grown.frames() {
            return Some((victims, budget));
        }
        let mut hand = self.hand.lock_as(locks)?;
        while scanned < budget && victims.len() < BATCH && gathered < pages {
            if *hand >= grown.frames() || *hand < first {
                *hand = first;
            }
            let byte = grown.referenced(Frame(*hand)).expect("the hand is on a grown frame");
            let found = byte.load(Ordering::Relaxed);
            if is_due(found) {
                let victim = self.victim(Frame(*hand));
                gathered += victim.as_ref().map_or(0, |victim| victim.order.pages());
                victims.extend(victim);
            } else {
                // A touch between the load and the store is lost: its folio is spared one time less.
                byte.store(after_hand(found), Ordering::Relaxed);
            }
            *hand += 1;
            scanned += 1;
        }
        Some((victims, scanned))
    }

    /// The folio that `frame` heads, if it looks as if it could go.
    fn victim(&self, frame: Frame) -> Option<Victim> {
        let descriptor = self.arena.view().descriptor(frame)?;
        let word = descriptor.word();
        let mapping = descriptor.mapping();
        let takeable = word.is_live()
            && word.has(Flags::UPTODATE)
            && !word.has(Flags::LOCKED)
            && word.holds() == 0
            && mapping != MappingId::NONE;
        takeable.then(|| Victim { mapping, index: descriptor.index(), frame, order: word.order() })
    }

    /// Takes `victims` out of their mappings and frees what went; returns the pages.
    fn evict(&self, mut victims: Vec<Victim>, locks: Locks) -> u32 {
        self.make_room_to_remember(victims.len() as u64, locks);
        victims.sort_unstable_by_key(|victim| victim.mapping.0);
        let mut gone: Vec<(Frame, Order)> = Vec::with_capacity(victims.len());
        for group in victims.chunk_by(|a, b| a.mapping == b.mapping) {
            let mapping = self.mappings.read().get(&group[0].mapping).cloned();
            let Some(mapping) = mapping else { continue };
            let Some(mut guard) = mapping.lock_as(locks) else { continue };
            for victim in group {
                let order = guard.evict(victim.index, victim.frame, |word| self.leave(word));
                gone.extend(order.map(|order| (victim.frame, order)));
            }
        }
        self.arena.free_all(&gone);
        let pages = gone.iter().map(|(_, order)| order.pages()).sum();
        self.counters.add(Count::Evicted, u64::from(pages));
        pages
    }

    /// Before so many folios leave, each of which may leave a node that only remembers.
    fn make_room_to_remember(&self, folios: u64, locks: Locks) {
        let wanted = self.shadow_nodes.count() + folios;
        if wanted > self.shadow_nodes_max {
            self.forget_nodes(wanted - self.shadow_nodes_max, locks);
        }
    }

    /// What the folio of this last word leaves behind. The caller holds its tree's lock.
    fn leave(&self, word: Word) -> Leave {
        if self.shadow_nodes.count() >= self.shadow_nodes_max {
            return Leave::Nothing;
        }
        let standing = if word.has(Flags::WORKINGSET) { Standing::WorkingSet } else { Standing::Plain };
        self.counters.add(Count::Shadows, u64::from(word.order().pages()));
        Leave::Shadow(self.workingset.remember(word.order(), standing).payload())
    }
}

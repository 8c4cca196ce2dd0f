//! Reclaim: room for more, by a clock over the referenced bytes.
//!
//! ```text
//!    referenced   1 0 0 1 1 0 0 0   0 0 0 0 0 0 0 0   1 1 ...     one byte a frame, eight at a look
//!                 ^ hand: 1 -> 0, spared;   0 -> a victim if it heads a folio that is ready and not held
//! ```
//!
//! A reader sets a folio's byte when it finds it clear; the hand clears it and
//! spares the folio once. Victims are gathered in batches and leave the index
//! under one hold of each mapping's lock. This is the simple policy; it
//! remembers nothing of what it evicted.
//!
//! Invariants:
//!  1. Reclaim allocates no frame and no node, and waits for no device.
//!  2. A folio that is locked or held is never taken.
//!  3. No mapping's lock is held when reclaim is called.
//!
//! Not an invariant: that a victim is still there when its mapping has been
//! locked. The tree and the descriptor are asked again under the lock.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::arena::{Arena, Flags};
use crate::backend::Backend;
use crate::mapping::Mapping;
use crate::stats::{Count, Counters};
use crate::sync::{Locks, Rank, RankedMutex, RankedRwLock};
use crate::units::{EXTENT_PAGES, Frame, MappingId, Order, PageIndex};

/// Victims that leave the index in one go.
const BATCH: usize = 64;

/// The reclaimer of one cache.
#[derive(Debug)]
pub struct Reclaim {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    mappings: RankedRwLock<HashMap<MappingId, Arc<Mapping>>>,
    hand: RankedMutex<u32>,
}

/// A folio that may go.
#[derive(Clone, Copy, Debug)]
struct Victim {
    mapping: MappingId,
    index: PageIndex,
    frame: Frame,
}

impl Reclaim {
    /// A reclaimer for `arena`, which knows no mapping yet.
    pub fn new(arena: Arc<Arena>, counters: Arc<Counters>) -> Self {
        let hand = RankedMutex::new(Rank::Clock, arena.view().layout().frames_meta);
        Self { arena, counters, mappings: RankedRwLock::new(Rank::Directory, HashMap::new()), hand }
    }

    /// Makes a mapping known; its folios may be taken from now on.
    pub fn add_mapping(&self, mapping: Arc<Mapping>) {
        let before = self.mappings.write().insert(mapping.id(), mapping);
        debug_assert!(before.is_none(), "a mapping's number is used once at a time");
    }

    /// Forgets a mapping.
    pub fn remove_mapping(&self, id: MappingId) {
        let gone = self.mappings.write().remove(&id);
        drop(gone); // outside the lock: it may be the last to know the mapping
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

    /// Frees at least `pages` pages if so many can be freed; returns how many were. Waits for mappings'
    /// locks, never for a device.
    pub fn reclaim(&self, pages: u32, locks: Locks) -> u32 {
        let mut freed = 0;
        // Once round clears every byte, once more finds what nobody touched since.
        let mut budget = self.arena.view().frames_grown().saturating_mul(2) + EXTENT_PAGES;
        while freed < pages && budget > 0 {
            let Some((victims, scanned)) = self.gather(budget, locks) else { break };
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

    /// Moves the hand over at most `budget` frames and returns up to a batch of victims, and how far it went.
    fn gather(&self, budget: u32, locks: Locks) -> Option<(Vec<Victim>, u32)> {
        let view = self.arena.view();
        let (first, grown) = (view.layout().frames_meta, view.frames_grown());
        let mut victims = Vec::with_capacity(BATCH);
        let mut scanned = 0;
        if first >= grown {
            return Some((victims, budget));
        }
        let mut hand = self.hand.lock_as(locks)?;
        while scanned < budget && victims.len() + 8 <= BATCH {
            if *hand >= grown || *hand < first {
                *hand = first;
            }
            let eight = view.referenced8(Frame(*hand)).expect("the hand is on a grown frame");
            let bytes = eight.load(Ordering::Relaxed);
            if bytes != 0 {
                // A byte set between the load and the store is lost: its folio is spared one time less.
                eight.store(0, Ordering::Relaxed);
            }
            for (at, referenced) in bytes.to_le_bytes().into_iter().enumerate() {
                if referenced == 0 {
                    victims.extend(self.victim(Frame(*hand + at as u32)));
                }
            }
            *hand += 8;
            scanned += 8;
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
        takeable.then(|| Victim { mapping, index: descriptor.index(), frame })
    }

    /// Takes `victims` out of their mappings and frees what went; returns the pages.
    fn evict(&self, mut victims: Vec<Victim>, locks: Locks) -> u32 {
        victims.sort_unstable_by_key(|victim| victim.mapping.0);
        let mut gone: Vec<(Frame, Order)> = Vec::with_capacity(victims.len());
        for group in victims.chunk_by(|a, b| a.mapping == b.mapping) {
            let mapping = self.mappings.read().get(&group[0].mapping).cloned();
            let Some(mapping) = mapping else { continue };
            let Some(mut guard) = mapping.lock_as(locks) else { continue };
            for victim in group {
                gone.extend(guard.evict(victim.index, victim.frame).map(|order| (victim.frame, order)));
            }
        }
        self.arena.free_all(&gone);
        let pages = gone.iter().map(|(_, order)| order.pages()).sum();
        self.counters.add(Count::Evicted, u64::from(pages));
        pages
    }
}

//! Spill: folios of memory files that the policy lets go, on their way out.
//!
//! ```text
//!   scan    clean: a victim         of a memory file that spills: a victim, too, while the spill file takes more
//!   evict   victims leave           those others: under write-back, back in their ring, then handed to the device
//!   end     any thread: not held, not written: a value in its place, the frames free; a thread that waits looks
//!   again
//! ```
//!
//! Such a folio frees nothing now, so a thread that reclaims does not count it as freed; spills under way show in
//! [`Spill::under_way`], and a thread that needs memory waits for that as it waits for fills and flushes. The number of
//! spills under way is bounded, and a folio beyond it is stuck like any dirty one: so few hot folios go.
//!
//! The invalidate lock is not taken: the thread that has it alone may be waiting for this very memory. A cut of the
//! file takes folios on their way out; their slots are given back at the end. A caller that writes to one, zeroes a
//! part, populates it or wants its address marks it dirty: it stays.
//!
//! Invariants:
//!  1. Nothing is waited for here, and nothing is allocated from the arena.
//!  2. A folio on its way stands in its ring, so its pool stays charged until its frames are free.

use std::io;
use std::sync::Arc;

use crate::backend::DeferredWakes;
use crate::mapping::{Mapping, SpillOut};
use crate::spill::{Spill, SpillSink};
use crate::sync::LockWait;
use crate::units::Frame;
use crate::xarray::Value;

use super::{Flags, Reclaim, Victim};

struct SpillingFolio {
    mapping: Arc<Mapping>,
    departure: SpillOut,
}

impl SpillSink for SpillingFolio {
    fn spill_completed(&self, outcome: io::Result<Value>) {
        self.mapping.lock().end_spill(&self.departure, outcome.ok());
    }
}

impl Reclaim {
    /// Has folios of memory files that may go to `spill` from now on. Once.
    pub fn spill_to(&self, spill: &Arc<Spill>) {
        let first = self.spill.set(Arc::clone(spill));
        assert!(first.is_ok(), "a cache has one spill file");
    }

    /// Whether a folio that is dirty, and was listed a moment ago, may go to the spill file now.
    pub(super) fn can_spill(&self, frame: Frame) -> bool {
        let Some(spill) = self.spill.get() else { return false };
        let descriptor = self.arena.view().own(frame);
        let word = descriptor.settled_word();
        let idle = word.holds() == 0 && !word.has(Flags::LOCKED | Flags::WRITEBACK);
        let there = word.is_live() && word.has(Flags::UPTODATE) && word.has(Flags::DIRTY);
        there && idle && spill.has_capacity(word.order()) && {
            let mappings = self.mappings.read();
            mappings.get(&descriptor.mapping()).is_some_and(|mapping| mapping.backing().spills())
        }
    }

    /// Takes those of `group`, which is of one mapping that spills, that can go, and adds a flush for each.
    pub(super) fn spill_of_mapping(
        &self,
        mapping: &Arc<Mapping>,
        group: &[Victim],
        locks: LockWait,
        out: &mut SpillBatch,
    ) {
        let Some(spill) = self.spill.get() else { return };
        let mut departures = Vec::with_capacity(group.len());
        let Some(mut guard) = mapping.lock_as(locks) else { return };
        for victim in group {
            // The first is worth it in any case.
            let order = self.arena.view().own(victim.frame).settled_word().order();
            if out.pages > 0 && !spill.has_capacity_beside(order, out.pages) {
                continue;
            }
            if let Some(departure) = guard.begin_spill(victim.index, victim.frame) {
                out.pages += u64::from(departure.order.pages());
                departures.push(departure);
            }
        }
        drop(guard);
        let leaving = |departure| SpillingFolio { mapping: Arc::clone(mapping), departure };
        out.leaving.extend(departures.into_iter().map(leaving).map(Arc::new));
    }

    pub(super) fn send(&self, going: SpillBatch) -> u32 {
        let Some(spill) = self.spill.get().filter(|_| !going.leaving.is_empty()) else { return 0 };
        // A backend may complete inside the call, and a waker runs its owner's code, which may take locks held here.
        let _wakes = DeferredWakes::new();
        let (mut flushes, mut pages) = (Vec::with_capacity(going.leaving.len()), 0);
        for leaving in going.leaving {
            let SpillOut { frame, order, .. } = leaving.departure;
            pages += order.pages();
            // SAFETY: write-back holds the folio until its end is told to the sink; writers use `copy_in`.
            flushes.extend(unsafe { spill.flush_of(frame, order, leaving as Arc<dyn SpillSink>) });
        }
        spill.send(flushes);
        pages
    }
}

#[derive(Default)]
pub(super) struct SpillBatch {
    leaving: Vec<Arc<SpillingFolio>>,
    pages: u64,
}

//! Batch: several folios that follow each other, found in one walk and held together.
//!
//! ```text
//!   index      5   6   7   8   9  10  11  12  13  14        asked for 6 to 12
//!              [G] [------ F of order 2 ---] [H] [ I ]      (each starts where its order lets it)
//!                   ^                         ^
//!                   |                         +-- H covers 12: it is in, and no slot behind it is read
//!                   +-- 6 lies inside F: F is the first, whole
//!
//!   for each folio   1 slot again?  the hold is right only if the slot still says the same
//!                    load slot --> hold what it names --> load slot
//!                    2 ready?       no: it is left out, or is the only one
//!                    3 marker?      it is the last one
//!                    4 covers last? it is the last one, and no step is taken past it
//! ```
//!
//! A batch is gathered without a lock. A slot's entry is a hint; the descriptor gives the hold only if it is this
//! mapping's folio and covers the index. The slot is looked at again behind the hold, so that a folio which was taken
//! out or replaced in between is not handed out: then the walk begins again, at the same index.
//!
//! Invariants:
//!  1. The folios of a batch follow each other without a gap; the first covers the first index asked for.
//!  2. All of them were readable when they were held, but for the one of [`BatchEnd::FirstNotReady`] and those
//!     of [`Mapping::get_folios_contig`].
//!  3. No slot is read behind the folio that covers the last index.
//!  4. Nothing waits, and no lock is taken.
//!
//! Not an invariant: that a held folio is still in the index; that [`BatchEnd::Absent`] is a hole: only the lock tells.
//!
//! Cost: one descent for the first folio; a slot for each further one in the same leaf, and a slot to
//! confirm each. A reader of one folio needs no batch: `Mapping::try_hold` is the same without.

use arrayvec::ArrayVec;

use crate::arena::{HoldRefused, ReadableState};
use crate::folio::HeldFolio;
use crate::units::{Frame, PageIndex};
use crate::xarray::{Kind, RacySlots, Walker};

use super::owner::Mapping;
use quinion_view::lookup::NODE_BITS;

/// The most folios that a batch holds.
pub const BATCH_FOLIOS_MAX: usize = 31;

/// How often a folio that changes under the reader is sought before it counts as absent.
const TRIES: u32 = 8;

/// Up to [`BATCH_FOLIOS_MAX`] held folios that follow each other. Dropping it or using it again gives all holds back.
/// It is not for keeping: as long as it lives, none of its folios is evicted.
#[derive(Debug)]
pub struct ReadBatch<'a> {
    /// Places that hold nothing are not touched: a read of one page pays for one.
    folios: ArrayVec<HeldFolio<'a>, BATCH_FOLIOS_MAX>,
}

/// Why a batch ends where it does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchEnd {
    /// The folio that covers the last index is in, or the range is empty.
    Covered,
    /// No folio was found at the next index: a hole, a shadow, or one that kept changing. A hint.
    Absent,
    /// The folio at the first index is not ready. It is the only one, held, so that it can be waited for.
    FirstNotReady,
    /// The next folio is not ready. It is left out: take the batch, then come again.
    NotReady,
    /// The last folio carries the readahead marker. It may cover the last index as well.
    Marked,
    /// The batch is full.
    Full,
    /// The next folio has all the holds that it can have.
    TooMany,
}

/// A condition that ends a batch, besides a hole and the end of its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopRule {
    /// A folio that is not ready, and one with the marker: for readers.
    NotReadyOrMarked,
    /// No condition: folios are taken as they stand.
    Nothing,
}

/// The step after the folio that covers the last index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LastFolioRule {
    /// No step: no slot behind the last folio is read.
    Stop,
    /// One more slot is read and not used; for measurements of its cost.
    ReadPast,
}

/// How a batch is gathered. Callers name constants of it, so unused rules are not compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchRules {
    /// The condition that ends it early.
    pub stops: StopRule,
    /// The step at its end.
    pub at_end: LastFolioRule,
    /// Folios at most, from 1 to [`BATCH_FOLIOS_MAX`].
    pub folios_max: usize,
}

impl BatchRules {
    /// The rules of [`Mapping::get_read_batch`].
    pub const READ: Self =
        Self { stops: StopRule::NotReadyOrMarked, at_end: LastFolioRule::Stop, folios_max: BATCH_FOLIOS_MAX };
    /// The rules of [`Mapping::get_folios_contig`].
    pub const CONTIG: Self = Self { stops: StopRule::Nothing, ..Self::READ };
    /// One folio at a time.
    pub const SINGLE: Self = Self { folios_max: 1, ..Self::READ };
}

impl<'a> ReadBatch<'a> {
    /// A batch of nothing.
    #[inline]
    pub fn new() -> Self {
        Self { folios: ArrayVec::new() }
    }
    /// How many folios it holds.
    pub fn len(&self) -> usize {
        self.folios.len()
    }
    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }
    /// The batch's folios, in the order of their indices.
    pub fn iter(&self) -> impl Iterator<Item = &HeldFolio<'a>> {
        self.folios.iter()
    }
    pub fn last(&self) -> Option<&HeldFolio<'a>> {
        self.folios.last()
    }
    /// Takes the last of them out; its hold is the caller's.
    pub fn pop(&mut self) -> Option<HeldFolio<'a>> {
        self.folios.pop()
    }
    /// Takes all of them out, in the order of their indices; each hold is the caller's. Folios that the caller
    /// leaves in the iterator are given back with it.
    pub fn drain(&mut self) -> impl Iterator<Item = HeldFolio<'a>> + use<'a> {
        std::mem::take(&mut self.folios).into_iter()
    }
    /// Gives all holds back.
    #[inline]
    pub fn clear(&mut self) {
        self.folios.clear();
    }

    /// Adds a folio that follows the last one.
    ///
    /// # Panics
    /// If the batch is full.
    #[inline]
    pub(crate) fn push(&mut self, held: HeldFolio<'a>) {
        self.folios.push(held);
    }
}

impl Default for ReadBatch<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl Mapping {
    /// Gathers into `batch` the folios from the one that covers `index` to the one that covers `last`: the
    /// ready ones, up to the first that is not, and up to the first with the readahead marker, which is
    /// in. If the very first is not ready it is given alone. The batch's earlier holds are given back.
    ///
    /// Takes no lock and waits for nothing.
    pub fn get_read_batch<'a>(
        &'a self,
        index: PageIndex,
        last: PageIndex,
        batch: &mut ReadBatch<'a>,
    ) -> BatchEnd {
        self.gather(&self.arena().view().grown(), index, last, batch, BatchRules::READ)
    }

    /// As [`Mapping::get_read_batch`], but folios are taken as they are: filled or not, marked or not.
    pub fn get_folios_contig<'a>(
        &'a self,
        index: PageIndex,
        last: PageIndex,
        batch: &mut ReadBatch<'a>,
    ) -> BatchEnd {
        self.gather(&self.arena().view().grown(), index, last, batch, BatchRules::CONTIG)
    }

    /// Gathers a batch by rules of the caller's, with an allocator of nodes that sees every slot read: for tests.
    ///
    /// # Panics
    /// If `rules.folios_max` is out of its range.
    #[inline]
    pub fn gather<'a, S: RacySlots + ?Sized>(
        &'a self,
        slab: &S,
        index: PageIndex,
        last: PageIndex,
        batch: &mut ReadBatch<'a>,
        rules: BatchRules,
    ) -> BatchEnd {
        assert!((1..=BATCH_FOLIOS_MAX).contains(&rules.folios_max), "a batch is of 1 to 31 folios");
        batch.clear();
        if index > last {
            return BatchEnd::Covered;
        }
        let mut walk = Walker::new(slab, &self.record().root, index.0);
        loop {
            let (held, readable) = match self.hold_at(&mut walk) {
                Ok(held) => held,
                Err(end) => return end,
            };
            let reads = rules.stops == StopRule::NotReadyOrMarked;
            if reads && readable != ReadableState::Yes {
                return Self::stop_at_unready(held, batch);
            }
            walk.step_past(held.order().0);
            let marked = held.has_marker();
            batch.push(held);
            if walk.index() > last.0 && rules.at_end == LastFolioRule::ReadPast {
                std::hint::black_box(walk.load());
            }
            if reads && marked {
                return BatchEnd::Marked;
            }
            if walk.index() > last.0 {
                return BatchEnd::Covered;
            }
            if batch.len() == rules.folios_max {
                return BatchEnd::Full;
            }
        }
    }

    /// Holds the folio that covers the walker's index, and says whether it may be read. One that left right behind
    /// the hold is noticed by a second look, at the slot and at the descriptor, and sought anew from the root.
    #[inline]
    fn hold_at<S: RacySlots + ?Sized>(
        &self,
        walk: &mut Walker<'_, S, NODE_BITS>,
    ) -> Result<(HeldFolio<'_>, ReadableState), BatchEnd> {
        for _ in 0..TRIES {
            let found = walk.load();
            let Kind::Folio(frame) = found.entry.kind() else { return Err(BatchEnd::Absent) };
            match HeldFolio::take(self.arena(), Frame(frame), self.id(), PageIndex(walk.index())) {
                Ok(held) if walk.is_still(found) => match held.is_readable() {
                    ReadableState::Never => walk.reset(),
                    readable => return Ok((held, readable)),
                },
                Ok(_) => walk.reset(),
                Err(HoldRefused::TooMany) => return Err(BatchEnd::TooMany),
                Err(HoldRefused::Mismatch | HoldRefused::Filling) => walk.reset(),
            }
        }
        Err(BatchEnd::Absent)
    }

    fn stop_at_unready<'a>(held: HeldFolio<'a>, batch: &mut ReadBatch<'a>) -> BatchEnd {
        if !batch.is_empty() {
            return BatchEnd::NotReady;
        }
        batch.push(held);
        BatchEnd::FirstNotReady
    }
}

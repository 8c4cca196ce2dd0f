//! Memory: a mapping without a device, whose pages are nowhere else.
//!
//! ```text
//!   index    0   1   2   3   4   5   6   7   8   9  10  11
//!            [---- F ----]    .   .  [s - s]  [---- A ----]    .  hole: nothing stands there, and it reads as zeros
//!                                                              F  data
//!                                                              s  spilled: data, in the spill file
//!                                                              A  allocated: memory is there, and no bytes yet: zeros
//! ```
//!
//! | state of a page | in the tree | descriptor | reads as |
//! |---|---|---|---|
//! | hole | nothing, ever: no eviction leaves a shadow here | | zeros |
//! | data | a folio | `UPTODATE`, `DIRTY` with the dirty bits of all its pages | its bytes |
//! | allocated | a folio | not `UPTODATE`, not `LOCKED`, `DIRTY` likewise | zeros |
//! | on its way | a folio | `LOCKED`, not `UPTODATE`, `DIRTY` when its insertion is done | its lock's holder is waited for |
//! | leaving | a folio | `WRITEBACK`, and dirty only where it was written since | its bytes |
//! | spilled | a value of kind spill (`spill.rs`) | | what the spill file has |
//!
//! **Dirty** says of a page that it differs from its copy on the device; a memory file has nothing behind it, so its
//! pages are always dirty. Eviction, drop-behind and invalidation therefore skip these folios without a case for memory
//! files, and a thread that overwrites one takes no lock. None of its pages count among the cache's dirty pages.
//!
//! The folios of a mapping that is **kept** stand in a ring of their pool that reclaim does not scan: they are charged
//! to the pool and found as any other. Those of one that **spills** stand in the rings that it does scan.
//!
//! Invariants (asserted by [`Mapping::check`]):
//!  1. A folio of a memory file is dirty in all its pages, unless it is locked, or on its way to the spill file.
//!  2. A folio of any other mapping that is not up to date is being filled.
//!
//! Not an invariant: that a page that was never written is a hole. It may share a folio with one that was.
//!
//! Kernel cousin: `shmem`. This differs: the dirty bit, which writers look at in any case, says that a folio has no
//! backing but itself; there is no flag of the mapping that each path has to ask.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::arena::dirty::BitTable;
use crate::arena::{Arena, Flags};
use crate::backend::{Backend, NullBackend};
use crate::sys::fork::ForkGuard;
use crate::units::{Frame, MappingId, Order, PageIndex};
use crate::xarray::{INDICES_MAX, Kind, Value};

use super::backing::{Backing, MemoryBacking, SpillTarget};
use super::owner::{Mapping, MappingGuard, NewMapping};

/// Entries that are looked at under one hold of the tree lock.
const SCANNED_ENTRIES_MAX: usize = 4096;

/// The entry of a page of a memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryEntry {
    /// A folio.
    Folio,
    /// No entry, from the requested page on up to `end`.
    Hole {
        /// The first page behind the hole, or the end of the range asked for.
        end: PageIndex,
    },
    /// A value: data that is in the spill file.
    Spilled {
        /// The first page it stands for.
        first: PageIndex,
        /// How many pages it stands for.
        order: Order,
        /// The value, which names their slots.
        value: Value,
    },
}

/// The parts of a new mapping of a memory file.
#[derive(Debug)]
pub struct NewMemoryMapping<'a> {
    /// The arena its record, its nodes and its folios are in.
    pub arena: &'a Arc<Arena>,
    /// The mapping's number, which no other mapping has.
    pub id: MappingId,
    /// The largest folio that writers make.
    pub folio_order_max: Order,
    /// Where its folios go when memory is short; `None`: they stay in memory.
    pub spill: Option<SpillTarget>,
    /// The process that owns it.
    pub process: ForkGuard,
}

/// How the pages of a memory file are kept.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MemoryPages {
    /// Pages that have bytes, in memory. Those that are just being filled are among them.
    pub data: u64,
    /// Pages that have memory and no bytes yet.
    pub allocated: u64,
    /// Pages that have their bytes in the spill file.
    pub spilled: u64,
}

impl Mapping {
    /// A mapping of no pages and no bytes, with nothing behind it. `None` if the arena has no cell for its record.
    pub fn memory(new: NewMemoryMapping<'_>) -> Option<Self> {
        let NewMemoryMapping { arena, id, folio_order_max, spill, process } = new;
        let nothing = NullBackend { number: u64::from(id.0) };
        let attributes = nothing.attributes().expect("a null backend always has attributes");
        let backend = Arc::new(nothing);
        let new = NewMapping { arena, id, backend, attributes: &attributes, process };
        let mapping = Self::new(new)?;
        mapping.lock().forget_all(); // evictions leave no shadows
        let spilled = AtomicU64::new(0);
        Some(mapping.backed(Backing::Memory(MemoryBacking { folio_order_max, spill, spilled })))
    }

    /// Whether it is a memory file: pages not in its tree are zeros, and those in it are nowhere else.
    #[inline]
    pub fn is_memory(&self) -> bool {
        self.backing().is_memory()
    }

    /// How its pages are kept now. Takes the tree lock for thousands of entries: the numbers are of no one moment.
    pub fn memory_pages(&self) -> MemoryPages {
        let (mut pages, mut from) = (MemoryPages::default(), Some(PageIndex(0)));
        while let Some(at) = from {
            from = self.lock().count_memory(at, &mut pages);
        }
        pages
    }

    /// The first page of `pages` that has bytes (`wanted` is data), or that has none. `None`: there is no such page. As
    /// [`Mapping::memory_pages`]. An allocated page has none.
    pub fn seek_memory(&self, pages: Range<PageIndex>, wanted: SeekTarget) -> Option<PageIndex> {
        let mut at = pages.start;
        while at < pages.end {
            match self.lock().seek_some(at..pages.end, wanted) {
                SeekResult::Found(page) => return Some(page),
                SeekResult::Not(next) => at = next,
            }
        }
        None
    }
}

/// The target of a seek in a memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeekTarget {
    /// A page with bytes.
    Data,
    /// A page without: a hole, or one that is allocated.
    Hole,
}

enum SeekResult {
    Found(PageIndex),
    /// No target before this page.
    Not(PageIndex),
}

impl MappingGuard<'_> {
    /// The entry at `index` of a memory file; of a hole, how far it goes, no further than `end`.
    pub fn at(&self, index: PageIndex, end: PageIndex) -> MemoryEntry {
        debug_assert!(self.mapping.is_memory() && index < end, "a page of a memory file is asked for");
        let nodes = self.mapping.nodes();
        match self.xarray(&nodes).next(index.0, end.0 - 1) {
            None => MemoryEntry::Hole { end },
            Some((first, ..)) if first > index.0 => MemoryEntry::Hole { end: PageIndex(first) },
            Some((first, entry, order)) => match entry.kind() {
                Kind::Value(value) if value.is_spill() => {
                    MemoryEntry::Spilled { first: PageIndex(first), order: Order(order), value }
                }
                Kind::Value(value) => unreachable!("a memory file remembers nothing: {value:?}"),
                _ => MemoryEntry::Folio,
            },
        }
    }

    fn count_memory(&self, from: PageIndex, pages: &mut MemoryPages) -> Option<PageIndex> {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        for (seen, (first, entry, order)) in tree.range(from.0, INDICES_MAX - 1).enumerate() {
            if seen == SCANNED_ENTRIES_MAX {
                return Some(PageIndex(first));
            }
            let number = match entry.kind() {
                Kind::Folio(frame) if self.has_bytes(Frame(frame)) => &mut pages.data,
                Kind::Folio(_) => &mut pages.allocated,
                _ => &mut pages.spilled,
            };
            *number += 1 << order;
        }
        None
    }

    fn seek_some(&self, pages: Range<PageIndex>, wanted: SeekTarget) -> SeekResult {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        // Before `at` there is nothing that is wanted.
        let mut at = pages.start;
        for (seen, (first, entry, order)) in tree.range(pages.start.0, pages.end.0 - 1).enumerate() {
            if wanted == SeekTarget::Hole && first > at.0 {
                return SeekResult::Found(at);
            }
            let is_data = match entry.kind() {
                Kind::Folio(frame) => self.has_bytes(Frame(frame)),
                _ => true,
            };
            if is_data == (wanted == SeekTarget::Data) {
                return SeekResult::Found(at.max(PageIndex(first)));
            }
            at = PageIndex(first + (1 << order));
            if seen == SCANNED_ENTRIES_MAX {
                return SeekResult::Not(at);
            }
        }
        match wanted {
            SeekTarget::Hole if at < pages.end => SeekResult::Found(at),
            _ => SeekResult::Not(pages.end),
        }
    }

    fn has_bytes(&self, frame: Frame) -> bool {
        self.mapping.view().own(frame).word().has(Flags::UPTODATE | Flags::LOCKED)
    }

    pub(super) fn check_backing(&self, first: u64, frame: Frame, order: Order) -> Result<(), String> {
        let (mapping, word) = (self.mapping, self.mapping.view().own(frame).word());
        // On its way to the spill file its pages are under write-back, and not dirty until they are written to.
        if word.has(Flags::LOCKED | Flags::WRITEBACK) {
            return Ok(());
        }
        if !mapping.is_memory() && !word.has(Flags::UPTODATE) {
            return Err(format!("page {first}: no fill is at work, and its bytes are not there: {word:?}"));
        }
        let dirty = mapping.view().count_bits(BitTable::Dirty, frame, order.pages());
        if mapping.is_memory() && dirty < order.pages() {
            return Err(format!(
                "page {first} of a memory file: {dirty} of {} pages are dirty",
                order.pages()
            ));
        }
        Ok(())
    }
}

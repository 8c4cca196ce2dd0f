//! Drop behind: folios that only uncached reads wanted leave, a range of them under one hold of the lock.
//!
//! ```text
//!   index    0   1   2   3   4   5   6   7   8   9         u  made by an uncached read, and flagged
//!            [u] [p] [---- u ----] [u] [u] [s] [u]         p  another reader's     s  a shadow
//!    range   |---------------------------------|
//!   looks     go  -     go          go  read    -          the one that another has read is adopted:
//!   erased   [x]    [------ x ------]                      its flag goes, and it stays
//! ```
//!
//! The range is walked once. Neighbours that may go are a run: their entries are erased together, and each is retired
//! as its entry goes. The frames are freed together when the lock has been let go.
//!
//! | the folio is | passed by its reader | left over |
//! |---|---|---|
//! | not flagged | is not looked at further | the same |
//! | read by another reader, as its referenced byte says | adopted | adopted |
//! | pinned, by an uncached handle | left to it, flagged | the same |
//! | being filled, and all of it has arrived, and only its fill holds it | goes; the fill frees it | goes; the fill frees it |
//! | being filled otherwise | kept, flagged | goes if only its fill holds it, else kept, flagged |
//! | held by readers | goes; the last of them frees it | the same |
//! | dirty, or being written back | left to the end of its write-back, flagged | the same |
//!
//! A folio whose write-back has ended is dropped as one that is left over: an uncached write may have it locked still,
//! as its maker, and then all of its bytes are there.
//!
//! All of this is looked at under the tree lock. A hold that is taken between the look and
//! the retirement finds a folio that is detached, and its holder seeks the page anew.
//!
//! Invariants:
//!  1. A folio that leaves here leaves no shadow, and takes none with it.
//!  2. A folio that is not flagged is as it was.
//!  3. No folio is erased that reaches over an edge of the range.
//!
//! Cost: one walk over the range, one way down for each run of neighbours that go.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::arena::{Flags, RetireOutcome, referenced};
use crate::stats::Count;
use crate::sync::LockWait;
use crate::units::{Frame, Order, PageIndex};
use crate::xarray::{Kind, NodeSlab, XArray};

use super::owner::{Mapping, MappingGuard};
use quinion_view::lookup::NODE_BITS;

/// The most folios that are looked at under one hold of the lock.
pub const BEHIND_FOLIOS_MAX: usize = 512;

/// Why a range is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropReason {
    /// A reader has read it and moved on.
    Passed,
    /// Write-back of the range has ended.
    Written,
    /// No reader will return to it: its stream has ended, or continues elsewhere.
    LeftOver,
}

/// The outcome of dropping a range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DropBehindOutcome {
    /// A range that covers the flagged folios that should be tried again; `None` if there are none.
    pub kept: Option<Range<PageIndex>>,
    /// Where the next call should begin; the end of the range if it is done.
    pub next: PageIndex,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FolioVerdict {
    Drop,
    Adopt,
    /// A later call drops it.
    KeepForLater,
    /// The thread that unpins it, or ends its write-back, drops it.
    Skip,
}

impl Mapping {
    /// Drops the flagged folios wholly in `pages`, at most [`BEHIND_FOLIOS_MAX`]. `None`: the lock is busy.
    pub fn drop_behind(
        &self,
        pages: Range<PageIndex>,
        leaving: DropReason,
        locks: LockWait,
    ) -> Option<DropBehindOutcome> {
        let folios = (pages.end.0.saturating_sub(pages.start.0)).min(BEHIND_FOLIOS_MAX as u64);
        let mut gone = Vec::with_capacity(folios as usize); // before the lock
        let behind = self.lock_as(locks)?.drop_behind(pages, leaving, &mut gone);
        self.arena().free_all(&gone);
        Some(behind)
    }
}

impl MappingGuard<'_> {
    /// As [`Mapping::drop_behind`]; adds to `free` the folios whose frames are the caller's to free.
    pub fn drop_behind(
        &mut self,
        pages: Range<PageIndex>,
        leaving: DropReason,
        free: &mut Vec<(Frame, Order)>,
    ) -> DropBehindOutcome {
        let mapping = self.mapping;
        let nodes = mapping.nodes();
        let mut tree = self.xarray(&nodes);
        let mut walk = DropWalk { from: pages.start, pages, leaving, seen: 0, adopted: 0, kept: None };
        let mut gone: Vec<(Frame, Order)> = Vec::new();
        loop {
            let (run, then) = walk.next_run(mapping, &tree);
            tree.erase_range(run.start, run.end, |_, entry, order| {
                if let Kind::Folio(frame) = entry.kind() {
                    gone.push((Frame(frame), Order(order)));
                }
            });
            if then == WalkStep::Stop {
                break;
            }
        }
        // Retired when the entries, which are erased by the folio's order, are gone: a last holder may free frames.
        let dropped: u64 = gone.iter().map(|(_, order)| u64::from(order.pages())).sum();
        let unread = mapping.retire_all(&gone, |frame, order, retired| match retired {
            RetireOutcome::Free => free.push((frame, order)),
            RetireOutcome::Held => {}
        });
        debug_assert_eq!(unread, 0, "a flagged folio is not counted as fetched ahead");
        self.tree.pages -= dropped;
        mapping.count_behind(leaving, dropped, walk.adopted);
        DropBehindOutcome { kept: walk.kept, next: walk.from }
    }
}

#[derive(Debug)]
struct DropWalk {
    pages: Range<PageIndex>,
    leaving: DropReason,
    from: PageIndex,
    seen: usize,
    adopted: u64,
    kept: Option<Range<PageIndex>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WalkStep {
    GoOn,
    Stop,
}

impl DropWalk {
    /// The next neighbours that go, none at the end; folios before them are adopted and kept.
    fn next_run<S: NodeSlab>(
        &mut self,
        mapping: &Mapping,
        tree: &XArray<'_, S, NODE_BITS>,
    ) -> (Range<u64>, WalkStep) {
        let mut run = self.from.0..self.from.0;
        for (first, entry, order) in tree.range(self.from.0, self.pages.end.0.saturating_sub(1)) {
            let end = first + (1 << order);
            let Kind::Folio(frame) = entry.kind() else { continue };
            let (frame, order) = (Frame(frame), Order(order));
            let inside = self.pages.start.0 <= first && end <= self.pages.end.0;
            if !inside || !mapping.view().own(frame).word().has(Flags::DROPBEHIND) {
                continue;
            }
            let full = self.seen == BEHIND_FOLIOS_MAX;
            if full || !(run.is_empty() || run.end == first) {
                self.from = PageIndex(first);
                return (run, if full { WalkStep::Stop } else { WalkStep::GoOn });
            }
            self.seen += 1;
            match mapping.drop_behind_verdict(frame, order, self.leaving) {
                FolioVerdict::Drop if run.is_empty() => run = first..end,
                FolioVerdict::Drop => run.end = end,
                FolioVerdict::Adopt => {
                    mapping.adopt(frame);
                    self.adopted += u64::from(order.pages());
                }
                FolioVerdict::Skip => {}
                FolioVerdict::KeepForLater => self.keep(PageIndex(first)..PageIndex(end)),
            }
        }
        self.from = self.pages.end;
        (run, WalkStep::Stop)
    }

    fn keep(&mut self, pages: Range<PageIndex>) {
        self.kept = Some(match self.kept.take() {
            Some(kept) => kept.start.min(pages.start)..kept.end.max(pages.end),
            None => pages,
        });
    }
}

impl Mapping {
    /// The decision about a flagged folio; see the table at the top. The caller holds the tree lock.
    fn drop_behind_verdict(&self, frame: Frame, order: Order, leaving: DropReason) -> FolioVerdict {
        let view = self.view();
        let (descriptor, byte) = (view.own(frame), view.referenced(frame).expect("a frame of ours"));
        if referenced::was_read(byte.load(Ordering::Relaxed)) {
            return FolioVerdict::Adopt;
        }
        if descriptor.pins() > 0 {
            return FolioVerdict::Skip;
        }
        let word = descriptor.word();
        // This changes under the tree lock alone, so a folio that is clean here is clean when it is retired.
        if word.has(Flags::UNWRITTEN) {
            return FolioVerdict::Skip;
        }
        if !word.has(Flags::LOCKED) {
            return FolioVerdict::Drop;
        }
        let has_come = || view.run_read(frame, order.pages()) == order.pages();
        if word.holds() == 1 && (leaving != DropReason::Passed || has_come()) {
            FolioVerdict::Drop
        } else {
            FolioVerdict::KeepForLater
        }
    }

    fn count_behind(&self, leaving: DropReason, dropped: u64, adopted: u64) {
        self.count(Count::DroppedBehind, dropped);
        if leaving == DropReason::LeftOver {
            self.count(Count::LeftOver, dropped);
        }
        self.count(Count::Adopted, adopted);
    }
}

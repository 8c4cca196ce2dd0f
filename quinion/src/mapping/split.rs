//! Split: a live folio becomes smaller ones in the same frames; and if it cannot, its needed pages are copied.
//!
//! ```text
//!   index      0                       8                      16
//!              [------------------- F, order 4 -----------------]      an edge at 5
//!              [---- order 2 --][0][0][ order 1][--- order 3 ---]      the same frames, the same bytes
//!
//!   1 before the lock   nodes, and places in the rings
//!   2 under it          F's descriptor odd, if F is not held             no reader finds it any more
//!   3                   F off its ring
//!   4                   for each piece: its descriptor, then its entry   xarray/split.rs
//!   5                   each piece on the ring that F was on; dirty if one of its own pages is
//! ```
//!
//! Between 2 and 4 a reader without the lock finds an odd descriptor or a smaller folio, and goes the way of a miss,
//! which looks under the tree's lock. A reader who has found F before finds its sequence changed at its second look. So
//! no page is hidden for good, and no reader takes one page for another. (The kernel had that bug for years: its pieces
//! became findable before all of their slots said so.)
//!
//! A piece is as the whole was: up to date, steady or written, read so often, of the working set or not, going when its
//! uncached reader has passed. The marker stays with the first.
//!
//! **Held.** A holder gives back as many frames as the folio's word says then, so a folio that is held is not split.
//! Its dirty pages, which exist nowhere else, are copied.
//! Holds of readers are short, and the thread that splits tries again. A user's pin may be long, and so may the hold of
//! a reader whose thread was stopped. Then the folio is **detached** and lives on for its holders. Its dirty pages are
//! copied into frames of their own; the rest is read from the device again on demand. A folio whose lock a thread has,
//! which may put bytes into it, is not copied: the copy would miss them.
//!
//! Invariants:
//!  1. All pages of a folio that is split stay in the index, and no holder of the tree lock sees fewer.
//!  2. The counts do not change: pages, dirty pages, the charge of a pool.
//!  3. A folio that is held, being filled, under write-back, or in no ring is not split.
//!  4. Copies are dirty, and to be written by a sync, as the folio was whose place they take.
//!
//! Not an invariant: that the pieces stand where the whole stood in its ring. They join its young end.
//!
//! Cost: ten pieces at most, some hundred steps under two locks. A copy costs a page of memory for each dirty page.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::arena::dirty::BitTable;
use crate::arena::{DescriptorWord, Flags, ReadableState};
use crate::folio::{FreshFolio, HeldFolio};
use crate::lists::ListReservation;
use crate::sync::LockWait;
use crate::units::{Frame, Millis, Order, PageIndex};
use crate::xarray::{Entry, Inserted, Kind, Split};

use super::dirty::TO_WRITE;
use super::owner::{Mapping, MappingGuard};
use super::spill::PartOutcome;

/// The most pieces that one edge leaves of a folio: one more for each time that it is halved.
const PIECES_MAX: usize = Order::MAX.0 as usize + 1;

/// The result of a request that no folio reaches over an edge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitOutcome {
    /// No folio reaches over the edge.
    Done,
    /// One does, and is held, being filled, under write-back, or in no ring for a moment: try again.
    Busy,
    /// A folio in the spill file reaches over it, and is packed: bring it back first.
    Packed,
    /// There is no cell for the nodes or the places in the rings.
    NoNode,
}

/// The outcome of detaching a folio.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DetachOutcome {
    /// The folio is out of the index, and copies of `pages` of its pages are there.
    Done { pages: u32 },
    /// The folio is not there any more: look again.
    Removed,
    /// The folio is locked, being filled or written, or was while the copies were made, and pages without a copy became
    /// dirty: wait for that, and try again. Nothing was changed.
    InFlight,
    /// There is no page, or no cell, for the copies. Nothing was changed.
    NoMemory,
    /// The folio's pages have their places, and there are no others for copies. Nothing was changed.
    NoPlace,
}

impl Mapping {
    /// Splits the folio that reaches over `edge`, if one does, or the spilled value there. Waits for locks.
    pub fn split_at(&self, edge: PageIndex) -> SplitOutcome {
        let mut pieces = Vec::with_capacity(PIECES_MAX);
        // 1
        let Some(mut reservation) = self.reserve_list_entries(PIECES_MAX as u32) else {
            return SplitOutcome::NoNode;
        };
        let (from, pages) = match self.backing().spill() {
            Some(_) => (edge.align_down(Order::MAX), u64::from(Order::MAX.pages())),
            None => (edge, 1),
        };
        let Some(mut guard) = self.lock_to_add(from, pages, LockWait::Wait) else {
            return SplitOutcome::NoNode;
        };
        // A folio may become a value between two holds of the lock, so both are seen to in one.
        match guard.part_at(edge) {
            PartOutcome::Done => guard.split_at(edge, reservation.as_mut(), &mut pieces),
            PartOutcome::Packed => SplitOutcome::Packed,
            PartOutcome::NoNode => SplitOutcome::NoNode,
        }
    }

    fn reserve_list_entries(&self, folios: u32) -> Option<Option<ListReservation<'_>>> {
        match self.lists() {
            Some(lists) => lists.reserve(folios, LockWait::Wait).map(Some),
            None => Some(None),
        }
    }

    /// Detaches a held folio, and leaves copies of those of its dirty pages that are not in `unwanted`, in folios of
    /// order `unit`, with the other pages of these. The caller has the write lock alone, which excludes writers. Waits
    /// for locks.
    pub fn detach_copy(
        &self,
        held: &HeldFolio<'_>,
        unwanted: Range<PageIndex>,
        unit: Order,
    ) -> DetachOutcome {
        // Before a page is copied: the owner of the lock puts bytes in place without the write lock, and may have put
        // them behind the copy, and be gone when the copy takes the page's place. No other thread locks it meanwhile.
        if self.view().own(held.frame()).settled_word().has(Flags::LOCKED) {
            return DetachOutcome::InFlight;
        }
        // An allocated folio of a memory file has no bytes, and its copies are allocated as well.
        let has_bytes = match held.is_readable() {
            ReadableState::Yes => true,
            ReadableState::Zeros => false,
            ReadableState::NotYet => return DetachOutcome::InFlight,
            ReadableState::Never => return DetachOutcome::Removed,
        };
        let (dirty, unit) = (self.lock().dirty_of(held, &unwanted), unit.min(held.order()));
        if self.backing().places().is_some() && !dirty.is_empty() {
            return DetachOutcome::NoPlace;
        }
        // 1 Copies of the pages dirty now: under the lock they are dirty still, or clean. Others are dirty then only if
        // a flush or a sync failed.
        let mut copies: Vec<DetachedCopy<'_>> = Vec::new();
        for &page in &dirty {
            let first = page.align_down(unit);
            if copies.last().is_none_or(|last| last.first != first) {
                let Some(mut fresh) = FreshFolio::alloc(self.arena(), unit) else {
                    return DetachOutcome::NoMemory;
                };
                if has_bytes {
                    (0..unit.pages()).for_each(|nth| fresh.copy_page(nth, held, first.plus(u64::from(nth))));
                }
                copies.push(DetachedCopy { first, fresh, dirty: Vec::new() });
            }
            copies.last_mut().expect("it was just added").dirty.push(page);
        }
        let Some(mut reservation) = self.reserve_list_entries(copies.len() as u32) else {
            return DetachOutcome::NoMemory;
        };
        let (first, pages) = (held.first(), u64::from(held.order().pages()));
        let Some(mut guard) = self.lock_to_add(first, pages, LockWait::Wait) else {
            return DetachOutcome::NoMemory;
        };
        // 2 The copies take the folio's place.
        guard.exchange(
            SplitReplacement { held, has_bytes, unit, unwanted: &unwanted },
            copies,
            reservation.as_mut(),
        )
    }
}

/// A held folio that copies take the place of.
#[derive(Clone, Copy, Debug)]
struct SplitReplacement<'r> {
    held: &'r HeldFolio<'r>,
    /// Whether it has bytes, as its copies do then.
    has_bytes: bool,
    /// The order of the copies.
    unit: Order,
    /// Pages that need no copy.
    unwanted: &'r Range<PageIndex>,
}

#[derive(Debug)]
struct DetachedCopy<'a> {
    first: PageIndex,
    fresh: FreshFolio<'a>,
    dirty: Vec<PageIndex>,
}

impl MappingGuard<'_> {
    /// Steps 2 to 5. `pieces` has room for [`PIECES_MAX`].
    fn split_at(
        &mut self,
        edge: PageIndex,
        reservation: Option<&mut ListReservation<'_>>,
        pieces: &mut Vec<(PageIndex, Frame, Order)>,
    ) -> SplitOutcome {
        let mapping = self.mapping;
        let (nodes, view) = (mapping.nodes(), mapping.view());
        let mut tree = self.xarray(&nodes);
        let (first, head) = match tree.entry_at(edge.0) {
            Some((first, entry, _)) if first < edge.0 => match entry.kind() {
                Kind::Folio(frame) => (first, Frame(frame)),
                _ => return SplitOutcome::Done,
            },
            _ => return SplitOutcome::Done,
        };
        if tree.nodes_to_split(edge.0) > mapping.index().stock.count() {
            return SplitOutcome::NoNode;
        }
        let mut listed = mapping.lists().map(|lists| lists.lock());
        let ring = listed.as_ref().and_then(|listed| listed.ring_of(head));
        if listed.is_some() && ring.is_none() {
            return SplitOutcome::Busy; // on its way into a ring, or out of one to be evicted
        }
        // 2
        let Some(whole) = view.own(head).try_begin_split() else { return SplitOutcome::Busy };
        // 3
        if let Some(listed) = &mut listed {
            listed.remove(head);
        }
        // 4
        let byte = view.referenced(head).expect("a frame of ours").load(Ordering::Relaxed);
        let split = tree.split_folio(edge.0, |index, order| {
            let (order, frame) = (Order(order), head.plus((index - first) as u32));
            let marker = if index == first { whole.0 & Flags::MARKER } else { 0 };
            let is_dirty = view.count_bits(BitTable::Dirty, frame, order.pages()) > 0;
            let dirty = if is_dirty { Flags::DIRTY } else { 0 };
            view.referenced(frame).expect("a frame of ours").store(byte, Ordering::Relaxed);
            view.own(frame).prepare_piece(mapping.id(), PageIndex(index), order, whole, marker | dirty);
            pieces.push((PageIndex(index), frame, order));
            frame.0
        });
        assert_eq!(split, Split::Done, "its nodes were there");
        // 5
        if let (Some(listed), Some(ring), Some(reservation)) = (&mut listed, ring, reservation) {
            for &(_, frame, _) in pieces.iter() {
                listed.list(frame, ring, reservation);
            }
        }
        drop(listed);
        pieces.iter().for_each(|&(index, frame, order)| self.settle_split(index, frame, order));
        SplitOutcome::Done
    }

    fn dirty_of(&self, held: &HeldFolio<'_>, unwanted: &Range<PageIndex>) -> Vec<PageIndex> {
        let view = self.mapping.view();
        let is_dirty = |page: &u32| view.count_bits(BitTable::Dirty, held.frame().plus(*page), 1) == 1;
        let pages = (0..held.order().pages()).filter(is_dirty);
        pages.map(|page| held.first().plus(u64::from(page))).filter(|page| !unwanted.contains(page)).collect()
    }

    /// Puts copies of the held folio's pages in its place; they are dirty. Of each dirty page that is not
    /// unwanted there has to be one.
    fn exchange(
        &mut self,
        exchange: SplitReplacement<'_>,
        copies: Vec<DetachedCopy<'_>>,
        reservation: Option<&mut ListReservation<'_>>,
    ) -> DetachOutcome {
        let (mapping, SplitReplacement { held, has_bytes, unit, unwanted }) = (self.mapping, exchange);
        let (nodes, view) = (mapping.nodes(), mapping.view());
        let (first, head, order) = (held.first(), held.frame(), held.order());
        let mut tree = self.xarray(&nodes);
        if tree.load(first.0) != Entry::folio(head.0) || !view.own(head).word().is_live() {
            return DetachOutcome::Removed;
        }
        let word = view.own(head).word();
        if word.has(Flags::LOCKED | Flags::WRITEBACK) || word.has(Flags::UPTODATE) != has_bytes {
            return DetachOutcome::InFlight;
        }
        let mut copied = copies.iter().flat_map(|copy| &copy.dirty);
        if !self.dirty_of(held, unwanted).iter().all(|page| copied.any(|other| other == page)) {
            return DetachOutcome::InFlight;
        }
        let needed = tree.nodes_needed(first.0, u64::from(order.pages()));
        if !copies.is_empty() && needed > mapping.index().stock.count() {
            return DetachOutcome::NoMemory;
        }
        // A sync that has tagged the folio counts on finding what was dirty, so the copies are tagged as it was.
        let is_tagged = tree.has_mark(first.0, TO_WRITE);
        let since = mapping.writeback().dirty_since().unwrap_or(Millis(0));
        let ring = mapping.lists().and_then(|lists| lists.lock().ring_of(head)).unwrap_or(0);
        tree.erase(first.0);
        let _unread = mapping.retire_all(&[(head, order)], |_, _, _| {}); // whoever holds it frees it
        self.tree.pages -= u64::from(order.pages());
        let mut frames = Vec::with_capacity(copies.len());
        for DetachedCopy { first, fresh, dirty } in copies {
            let frame = fresh.into_frame();
            view.referenced(frame).expect("a frame of ours").store(0, Ordering::Relaxed);
            let filled = DescriptorWord(if has_bytes { Flags::UPTODATE | Flags::STEADY } else { 0 });
            view.own(frame).prepare_piece(mapping.id(), first, unit, filled, 0);
            let inserted = self.xarray(&nodes).insert(first.0, unit.0, frame.0);
            assert!(
                matches!(inserted, Inserted::Done { .. }),
                "its place and its nodes were there: {inserted:?}"
            );
            self.tree.pages += u64::from(unit.pages());
            for page in dirty {
                let _marked = self.mark_folio(frame, page..page.plus(1), since);
            }
            if is_tagged {
                self.xarray(&nodes).set_mark(first.0, TO_WRITE);
            }
            frames.push(frame);
        }
        if let (Some(lists), Some(reservation)) = (mapping.lists(), reservation) {
            let mut listed = lists.lock();
            for &frame in &frames {
                listed.list(frame, ring, reservation);
            }
        }
        DetachOutcome::Done { pages: frames.len() as u32 * unit.pages() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::arena::{Arena, ArenaOptions};
    use crate::backend::{Backend, MemoryFile};
    use crate::mapping::{AddedFolio, InsertPurpose, MarkOutcome, NewFolio, NewMapping};
    use crate::sys::fork::ForkGuard;
    use crate::units::MappingId;

    /// 1 Page 1 of a pinned folio is under write-back, and not dirty; W, which writes to page 0, copies the dirty
    /// pages. 2 The flush fails: page 1 is dirty again. 3 W puts its copies in the folio's place: page 1 is lost, and
    /// no error is reported.
    #[test]
    fn a_page_that_gets_dirty_again_while_the_others_are_copied_is_not_lost() {
        let arena = Arc::new(Arena::build(ArenaOptions { memory: 16 << 20 }).unwrap());
        let memory = Arc::new(MemoryFile::new(vec![7; 4 << 12]));
        let (backend, known) = (Arc::clone(&memory) as Arc<dyn Backend>, memory.attributes().unwrap());
        let mapping = Mapping::new(NewMapping {
            arena: &arena,
            id: MappingId(1),
            backend,
            attributes: &known,
            process: ForkGuard::new(),
        });
        let mapping = mapping.unwrap();
        let (first, order) = (PageIndex(0), Order(2));
        let frame = arena.alloc(order).unwrap();
        let added =
            mapping.add_folio(NewFolio { index: first, frame, order }, InsertPurpose::Read, LockWait::Wait);
        assert_eq!(added, AddedFolio::Added { shadow: None });
        arena.view().own(frame).complete();
        let held = mapping.try_hold(first).unwrap();
        let dirty = |page: u64| {
            let marked = mapping.lock().mark_dirty(&held, PageIndex(page)..PageIndex(page + 1), Millis(1));
            assert_eq!(marked, MarkOutcome::Done { newly: 1 });
        };
        dirty(0);
        let none = first..first;
        let before = mapping.lock().dirty_of(&held, &none);
        dirty(1);
        let copies = |pages: &[PageIndex]| -> Vec<DetachedCopy<'_>> {
            let fresh = |_: &PageIndex| FreshFolio::alloc(&arena, Order(0)).unwrap();
            pages
                .iter()
                .map(|page| DetachedCopy { first: *page, fresh: fresh(page), dirty: vec![*page] })
                .collect()
        };
        let exchange = |copies, unwanted: &Range<PageIndex>| {
            let mut guard = mapping.lock_to_add(first, 4, LockWait::Wait).unwrap();
            guard.exchange(
                SplitReplacement { held: &held, has_bytes: true, unit: Order(0), unwanted },
                copies,
                None,
            )
        };
        assert_eq!(exchange(copies(&before), &none), DetachOutcome::InFlight, "there is no copy of page 1");
        assert_eq!(
            (mapping.writeback().dirty_pages().dirty(), mapping.check()),
            (2, Ok(())),
            "nothing was changed"
        );
        assert_eq!(
            exchange(copies(&before), &(PageIndex(1)..PageIndex(9))),
            DetachOutcome::Done { pages: 1 }
        );
        assert_eq!((mapping.writeback().dirty_pages().dirty(), mapping.check()), (1, Ok(())));
    }
}

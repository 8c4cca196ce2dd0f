//! Spill: folios of a memory file that go to the spill file and come back, as the tree sees it.
//!
//! ```text
//!   index    0   1   2   3   4   5   6   7
//!            [------ F, dirty, order 3 ---------]
//!   begin    [------ F, under write-back -------]      its pages are not dirty; a write to one makes it dirty again
//!   end      [s ------ order 3, slot 40 --------]      not held, not written: a value stands there, the frames
//!                                                      are free. Else it is dirty as before, and its slots are free
//!   restore  [s order 2, slot 40][G][H][s, 1: 46]      pages 4 and 5 are wanted: folios there, and values around them
//! ```
//!
//! A spilled page is **data**: an insertion answers that the place is taken, an eviction never meets it, and it leaves
//! the tree only when it is restored, punched or cut off, or with its file. Then its slots are given back at once.
//!
//! On its way out a folio is under write-back, by the bits, flags and marks that every flush uses (`dirty.rs`): so
//! it is not evicted, split or sent twice, and a thread that cuts the file waits for it. A writer finds its page not
//! dirty, takes the tree's lock and marks it; or it is still in its copy when the flush ends, and then it holds the
//! folio. Either shows at the end, under the lock, and the folio stays.
//!
//! To restore, a thread fills frames of its own from the spill file. Then, under one hold of the tree lock, it puts
//! folios in place of the values; if a value has changed since the read began, it does nothing. It may restore a part
//! of a plain value: the rest stays, as smaller values. (Slots follow each other as pages do.)
//!
//! Invariants (asserted by `Mapping::check` and `Spill::check`):
//!  1. The pages of values in the tree are counted.
//!  2. A value in the tree has its slots, and no slot has two. A slot of no value is on its way out, or being read.
//!  3. No folio is replaced by a value while it is held, or after it was written to.
//!
//! Not an invariant: that a value is as large as the folio was.
//!
//! Locks: the tree lock; under it the mutex of the slots, and frames are given back.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::arena::{DescriptorWord, Flags, referenced};
use crate::folio::HeldFolio;
use crate::spill::Spill;
use crate::units::{Frame, Millis, Order, PageIndex};
use crate::xarray::{ENTRY_ORDER_MAX, Entry, ExchangeOutcome, INDICES_MAX, Inserted, Kind, Stored, Value};

use super::dirty::{TakeEnd, TakeFilter, WritebackOutcome, WritebackRun};
use super::new_folio::NewFolio;
use super::owner::{Mapping, MappingGuard};

/// A folio on its way to the spill file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpillOut {
    pub index: PageIndex,
    pub frame: Frame,
    /// log2 of its pages.
    pub order: Order,
    runs: Vec<WritebackRun>,
}

/// The outcome of spilling a folio out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpillOutEnd {
    /// A value stands in the folio's place.
    Removed,
    /// The folio stays: its write failed, or it is held, or was written to.
    Stays,
    /// The folio had left the tree meanwhile.
    Left,
}

/// The outcome of putting folios back in place of their values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestoreOutcome {
    /// The folios stand in place of the values.
    Done,
    /// One of the values is not there any more, or not as it was: look again. Nothing was changed.
    Changed,
    /// There is no cell for the nodes. Nothing was changed.
    NoNode,
}

/// The result of a request that no value reaches over an edge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PartOutcome {
    /// No value crosses an edge of the range.
    Done,
    /// A packed value does: it is to be brought back as a whole.
    Packed,
    /// There is no cell for the nodes.
    NoNode,
}

impl Mapping {
    /// For the holder of the tree's lock. Values that only remember have no slots.
    pub(super) fn forget_value(&self, value: Value) {
        if value.is_spill() {
            self.backing().count_spilled(0, pages_of(value));
            self.expect_spill().free(value);
        }
    }

    /// The values of its tree that stand for spilled pages.
    pub fn spilled_values(&self) -> Vec<Value> {
        let guard = self.lock();
        let nodes = self.nodes();
        let tree = guard.xarray(&nodes);
        tree.range(0, INDICES_MAX - 1).filter_map(|(_, entry, _)| spilled(entry)).collect()
    }
}

impl MappingGuard<'_> {
    /// The folio that `frame` heads at `index` goes to the spill file next, if it is there, is not held, and no other
    /// operation is under way on it. It is under write-back from now on, until [`MappingGuard::end_spill`].
    pub fn begin_spill(&mut self, index: PageIndex, frame: Frame) -> Option<SpillOut> {
        let nodes = self.mapping.nodes();
        if self.xarray(&nodes).load(index.0) != Entry::folio(frame.0) {
            return None;
        }
        let word = self.mapping.view().own(frame).settled_word();
        let idle = !word.has(Flags::LOCKED | Flags::WRITEBACK) && word.holds() == 0;
        if !word.is_live() || !word.has(Flags::UPTODATE) || !word.has(Flags::DIRTY) || !idle {
            return None;
        }
        let (order, mut runs) = (word.order(), Vec::with_capacity(2));
        let pages = index..index.plus(u64::from(order.pages()));
        let begun = self.begin_writeback(pages, TakeFilter::Dirty, order.pages(), &mut runs);
        debug_assert_eq!(begun, TakeEnd::Done, "all of one folio is taken");
        Some(SpillOut { index, frame, order, runs })
    }

    /// The way of a folio has ended: `value` says where it is now, if it is. Slots that are not needed are free.
    pub fn end_spill(&mut self, departure: &SpillOut, value: Option<Value>) -> SpillOutEnd {
        let &SpillOut { index, frame, order, ref runs } = departure;
        let (mapping, pages) = (self.mapping, index..index.plus(u64::from(order.pages())));
        // Write-back holds it until here, so this is the folio that was sent.
        let is_in = mapping.view().own(frame).word().is_live();
        let since = mapping.writeback().dirty_since().unwrap_or(Millis(0));
        for &run in runs {
            self.end_writeback(run, WritebackOutcome::Written, since);
        }
        let unused = || value.into_iter().for_each(|value| self.mapping.expect_spill().free_unused(value));
        if !is_in {
            unused();
            return SpillOutEnd::Left;
        }
        let word = mapping.view().own(frame).word();
        let retired = match value {
            Some(_) if !word.has(Flags::DIRTY | Flags::LOCKED) => mapping.view().own(frame).try_retire(),
            _ => None,
        };
        let (Some(value), Some(_)) = (value, retired) else {
            unused();
            let _marked = self.mark_folio(frame, pages, since);
            return SpillOutEnd::Stays;
        };
        let nodes = mapping.nodes();
        let before = self.xarray(&nodes).replace(index.0, value);
        debug_assert_eq!(before, Entry::folio(frame.0), "a live folio stands at its index");
        mapping.unlist(&[(frame, order)]);
        let _unread = mapping.take_unread(frame, order);
        self.tree.pages -= u64::from(order.pages());
        mapping.backing().count_spilled(pages_of(value), 0);
        mapping.expect_spill().note_spilled(order.pages());
        mapping.arena().free_all(&[(frame, order)]);
        SpillOutEnd::Removed
    }

    /// The values that follow each other without a gap from the one that covers `pages.start` on, as far as they meet
    /// `pages`, each with its first page. None if another thing stands there, or nothing.
    pub fn spilled_from(&self, pages: Range<PageIndex>) -> Vec<(PageIndex, Value)> {
        let nodes = self.mapping.nodes();
        let (mut next, mut values) = (pages.start.0, Vec::new());
        for (first, entry, order) in self.xarray(&nodes).range(pages.start.0, pages.end.0.saturating_sub(1)) {
            let Some(value) = spilled(entry).filter(|_| first <= next) else { break };
            values.push((PageIndex(first), value));
            next = first + (1 << order);
        }
        values
    }

    /// Whether these values stand where they stood.
    pub fn has_values(&self, values: &[(PageIndex, Value)]) -> bool {
        let nodes = self.mapping.nodes();
        let tree = self.xarray(&nodes);
        let stands = |&(first, value): &(PageIndex, Value)| {
            tree.entry_at(first.0) == Some((first.0, Entry::value(value), value.order()))
        };
        values.iter().all(stands)
    }

    /// Takes values out, and leaves smaller ones for their parts outside `covered`. The nodes are there.
    fn part(&mut self, values: &[(PageIndex, Value)], covered: Range<u64>) {
        let nodes = self.mapping.nodes();
        let mut tree = self.xarray(&nodes);
        for (first, _) in values {
            tree.erase(first.0);
        }
        for &(first, value) in values {
            let end = first.0 + pages_of(value);
            let before = first.0..covered.start.clamp(first.0, end);
            let behind = covered.end.clamp(first.0, end).max(before.end)..end;
            for (index, order) in blocks(before).chain(blocks(behind)) {
                let piece = Value::spill(order, value.payload() + (index - first.0) as u32);
                let stored = tree.store(index, order, Entry::value(piece), |_, _, _| {});
                assert_eq!(stored, Stored::Done, "its place and its nodes were there");
            }
        }
    }

    fn prepare_restored(&self, folio: &NewFolio) {
        let (mapping, view) = (self.mapping, self.mapping.view());
        let byte = view.referenced(folio.frame).expect("a frame of ours");
        byte.store(referenced::ASKED, Ordering::Relaxed);
        let filled = DescriptorWord(Flags::UPTODATE | Flags::STEADY);
        view.own(folio.frame).prepare_piece(mapping.id(), folio.index, folio.order, filled, 0);
    }

    /// Folios stand in the place of the covered parts of `values`: they are dirty, and the slots are free.
    fn settle_restored(&mut self, values: &[(PageIndex, Value)], covered: Range<u64>, folios: &[NewFolio]) {
        let (mapping, since) = (self.mapping, self.mapping.writeback().dirty_since().unwrap_or(Millis(0)));
        for folio in folios {
            self.tree.pages += u64::from(folio.order.pages());
            let _marked = self.mark_folio(folio.frame, folio.index..folio.end(), since);
        }
        let spill = mapping.expect_spill();
        for &(first, value) in values {
            let end = first.0 + pages_of(value);
            let inside = covered.start.clamp(first.0, end)..covered.end.clamp(first.0, end);
            mapping.backing().count_spilled(0, inside.end - inside.start);
            spill.note_spilled_in(inside.end - inside.start);
            if inside == (first.0..end) {
                spill.free(value);
                continue;
            }
            assert!(!spill.is_packed(value), "what is packed comes back as a whole");
            for (index, order) in blocks(inside) {
                spill.free(Value::spill(order, value.payload() + (index - first.0) as u32));
            }
        }
    }

    /// Sees to it that no value reaches over `edge`. The caller has this lock by [`Mapping::lock_to_add`].
    pub fn part_at(&mut self, edge: PageIndex) -> PartOutcome {
        let nodes = self.mapping.nodes();
        let found = self.xarray(&nodes).entry_at(edge.0);
        let Some((first, value)) = found.and_then(|(first, entry, _)| Some((first, spilled(entry)?))) else {
            return PartOutcome::Done;
        };
        if first == edge.0 {
            return PartOutcome::Done;
        }
        if self.mapping.expect_spill().is_packed(value) {
            return PartOutcome::Packed;
        }
        if self.xarray(&nodes).nodes_needed(first, pages_of(value)) > self.mapping.index().stock.count() {
            return PartOutcome::NoNode;
        }
        self.part(&[(PageIndex(first), value)], edge.0..edge.0);
        PartOutcome::Done
    }
}

impl<'a> MappingGuard<'a> {
    /// Puts folios in the place of `values`; their frames are the caller's and hold the bytes that the values stand
    /// for. The folios follow each other, and the values, too, and cover them; the parts of the first and the last
    /// value that are not covered stay spilled, if these are plain. The folios are up to date and dirty then, and held:
    /// `held` gets the holds. The caller has this lock by [`Mapping::lock_to_add`].
    ///
    /// # Panics
    /// If a packed value is covered in part, or folios lie outside the values.
    pub fn restore(
        &mut self,
        values: &[(PageIndex, Value)],
        folios: &[NewFolio],
        held: &mut Vec<HeldFolio<'a>>,
    ) -> RestoreOutcome {
        let mapping = self.mapping;
        if !self.has_values(values) {
            return RestoreOutcome::Changed;
        }
        let (Some(&(first, _)), Some(&(last, last_value))) = (values.first(), values.last()) else {
            return RestoreOutcome::Done;
        };
        let end = last.0 + pages_of(last_value);
        let nodes = mapping.nodes();
        let needed = self.xarray(&nodes).nodes_needed(first.0, end - first.0);
        if needed > mapping.index().stock.count() {
            return RestoreOutcome::NoNode;
        }
        let covered = folios.first().map_or(first.0, |folio| folio.index.0)
            ..folios.last().map_or(first.0, |folio| folio.end().0);
        assert!(first.0 <= covered.start && covered.end <= end, "folios stand in the place of values");
        if let ([(_, value)], [folio]) = (values, folios)
            && value.order() == folio.order.0
        {
            self.prepare_restored(folio);
            let exchanged = self.xarray(&nodes).compare_exchange(
                folio.index.0,
                Entry::value(*value),
                Entry::folio(folio.frame.0),
            );
            debug_assert_eq!(exchanged, ExchangeOutcome::Done, "the value was there");
        } else {
            self.part(values, covered.clone());
            for folio in folios {
                self.prepare_restored(folio);
                let inserted = self.xarray(&nodes).insert(folio.index.0, folio.order.0, folio.frame.0);
                assert!(
                    matches!(inserted, Inserted::Done { .. }),
                    "its place and its nodes were there: {inserted:?}"
                );
            }
        }
        self.settle_restored(values, covered, folios);
        let hold =
            |folio: &NewFolio| HeldFolio::take(mapping.arena(), folio.frame, mapping.id(), folio.index);
        held.extend(folios.iter().map(|folio| hold(folio).expect("it was just put there, and few hold it")));
        RestoreOutcome::Done
    }
}

impl Mapping {
    fn expect_spill(&self) -> &Arc<Spill> {
        self.backing().spill().expect("what is spilled has a spill file")
    }
}

impl NewFolio {
    /// The first page behind it.
    pub fn end(&self) -> PageIndex {
        self.index.plus(u64::from(self.order.pages()))
    }
}

fn spilled(entry: Entry) -> Option<Value> {
    match entry.kind() {
        Kind::Value(value) if value.is_spill() => Some(value),
        _ => None,
    }
}

fn pages_of(value: Value) -> u64 {
    1 << value.order()
}

/// The pages of a range, as the fewest entries that a tree can have there: each begins at a multiple of its length.
fn blocks(range: Range<u64>) -> impl Iterator<Item = (u64, u8)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let left = range.end.checked_sub(at).filter(|left| *left > 0)?;
        let order = (at.trailing_zeros() as u8).min(left.ilog2() as u8).min(ENTRY_ORDER_MAX);
        let first = at;
        at += 1 << order;
        Some((first, order))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_into_the_fewest_aligned_blocks() {
        let of = |range| blocks(range).collect::<Vec<_>>();
        assert_eq!(of(5..5), []);
        assert_eq!(of(0..8), [(0, 3)]);
        assert_eq!(of(5..16), [(5, 0), (6, 1), (8, 3)]);
        assert_eq!(of(8..13), [(8, 2), (12, 0)]);
    }
}

//! The tree and its naive twin, side by side: each operation on both must give the same. Shared by the property tests,
//! the exhaustive tests and the fuzz target.
//!
//! ```text
//!   Op --> Pair.step --> the tree, with a budget of nodes --> what it answered
//!                   \--> the twin, a sorted map of entries --> the same, or a panic
//!   and then    compare: every entry, every mark, the walk without a lock, and the tree's own check
//! ```
//!
//! The twin knows no nodes: it has each entry once, by its first index, and searches by hand. Where an operation runs
//! out of nodes the twin does nothing, and the tree must hold the same as before, page by page; only its shadows may
//! have become finer.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use crate::nodes::{Forest, Reuse, TestNodes, folio};
use quinion::internals::xarray::{
    ENTRY_ORDER_MAX, Entry, ExchangeOutcome, ForgetOutcome, Inserted, Kind, Mark, RangeStop, Revision, Split,
    Stored, Value, XArray,
};

/// Entries by first index, with order and marks.
#[derive(Clone, Default)]
pub struct Twin {
    bits: u32,
    pub entries: BTreeMap<u64, (Entry, u8, u8)>,
}

/// Tells `piece` what is left of 2^`order` indices from `first` on when all that reaches over `edge` is halved.
fn halve(first: u64, order: u8, edge: u64, piece: &mut impl FnMut(u64, u8)) {
    if edge <= first || first + (1 << order) <= edge {
        return piece(first, order);
    }
    halve(first, order - 1, edge, piece);
    halve(first + (1 << (order - 1)), order - 1, edge, piece);
}

enum Outcome {
    Done(Vec<(u64, Entry, u8)>),
    Present(Entry),
}

fn is_shadow(entry: Entry) -> bool {
    matches!(entry.kind(), Kind::Value(value) if !value.is_spill())
}

impl Twin {
    fn covering(&self, index: u64) -> Option<(u64, Entry, u8, u8)> {
        let (&first, &(entry, order, marks)) = self.entries.range(..=index).next_back()?;
        (index < first + (1 << order)).then_some((first, entry, order, marks))
    }
    fn meeting(&self, from: u64, end: u64) -> Vec<(u64, Entry, u8)> {
        let all = self.entries.iter().map(|(&first, &(entry, order, _))| (first, entry, order));
        all.filter(|&(first, _, order)| first < end && from < first + (1 << order)).collect()
    }
    /// Splits the shadow at `first` until `order` fits at `index`, by the steps the tree documents.
    fn split(&mut self, first: u64, index: u64, target: u8) {
        let (entry, order, marks) = self.entries[&first];
        if order <= target {
            return;
        }
        let Kind::Value(value) = entry.kind() else { unreachable!() };
        let rest = (u32::from(order) % self.bits) as u8;
        let piece = if rest > 0 { (order - rest).max(target) } else { order - 1 };
        let mut at = first;
        while at < first + (1 << order) {
            self.entries.insert(at, (Entry::value(value.with_order(piece)), piece, marks));
            at += 1 << piece;
        }
        self.split(index & !((1 << piece) - 1), index, target);
    }
    fn place(&mut self, slot: Slot, entry: Entry, replaces: Replaces) -> Outcome {
        let Slot { index, order } = slot;
        let end = index + (1 << order);
        for (first, found, found_order) in self.meeting(index, end) {
            if !is_shadow(found) && (replaces == Replaces::Shadows || found_order > order || first < index) {
                return Outcome::Present(found);
            }
        }
        if let Some((first, _, found_order, _)) = self.covering(index)
            && found_order > order
        {
            self.split(first, index, order);
        }
        let displaced = self.meeting(index, end);
        for (first, ..) in &displaced {
            self.entries.remove(first);
        }
        self.entries.insert(index, (entry, order, 0));
        Outcome::Done(displaced)
    }
}

/// Gives a mark to the entries that have another one, to `max` of them at most.
#[derive(Clone, Copy)]
struct MarkCopy {
    have: u8,
    give: u8,
    max: usize,
}

/// The aligned place of one entry.
#[derive(Clone, Copy)]
struct Slot {
    index: u64,
    order: u8,
}

impl Slot {
    fn around(at: u64, order: u8) -> Self {
        Self { index: align(at, order), order }
    }
}

/// Entries that a new one may replace: shadows alone, or all that are no larger and begin no earlier.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replaces {
    Shadows,
    AnyEntry,
}

/// An operation on a tree. Indices need not be aligned, nor ranges end inside the tree: each is made to fit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    Insert {
        at: u64,
        order: u8,
    },
    InsertRange {
        at: u64,
        orders: Vec<u8>,
    },
    Store {
        at: u64,
        order: u8,
        what: u8,
    },
    Erase {
        at: u64,
    },
    EraseRange {
        at: u64,
        pages: u64,
    },
    StoreRange {
        at: u64,
        pages: u64,
        spill: bool,
    },
    Replace {
        at: u64,
        spill: bool,
    },
    /// From `at` on, an index each `step`: kept, erased or replaced.
    Revise {
        at: u64,
        step: u64,
        fates: Vec<u8>,
    },
    Exchange {
        at: u64,
        hit: bool,
        to: u8,
    },
    Mark {
        at: u64,
        mark: u8,
    },
    Unmark {
        at: u64,
        mark: u8,
    },
    /// The folio that reaches over `at` is split there.
    Split {
        at: u64,
    },
    /// `give` and `take` are sets of marks, a bit each.
    Remark {
        at: u64,
        give: u8,
        take: u8,
    },
    MarkMarked {
        at: u64,
        pages: u64,
        have: u8,
        give: u8,
        max: usize,
    },
    Forget {
        which: usize,
    },
    Scan {
        at: u64,
        pages: u64,
    },
    Budget {
        nodes: u64,
    },
}

/// A tree and its twin.
pub struct Pair<const BITS: u32> {
    pub forest: Forest<BITS>,
    pub twin: Twin,
    next_id: u32,
    /// Allocations left for the next operation only.
    budget: Option<u64>,
}

/// The last index of a tree.
pub const LAST: u64 = (1 << 52) - 1;

fn mark_of(mark: u8) -> Mark {
    Mark::ALL[mark as usize]
}
fn align(at: u64, order: u8) -> u64 {
    at & !((1 << order) - 1)
}

impl<const BITS: u32> Pair<BITS> {
    /// An empty tree and an empty twin, with `nodes` nodes to be had.
    pub fn new(nodes: u32) -> Self {
        let twin = Twin { bits: BITS, ..Twin::default() };
        Self { forest: Forest::new(nodes, Reuse::AtOnce), twin, next_id: 0, budget: None }
    }
    /// Empties both.
    pub fn clear(&mut self) {
        self.tree().erase_range(0, LAST + 1, |_, _, _| {});
        self.twin.entries.clear();
        assert!(self.tree().is_empty());
        (self.next_id, self.budget) = (0, None);
    }
    fn new_folio(&mut self, order: u8) -> u32 {
        self.next_id += 1;
        folio(self.next_id, order)
    }
    fn new_shadow(&mut self, order: u8) -> Value {
        self.next_id += 1;
        Value::shadow(order, self.next_id)
    }
    fn new_spill(&mut self, order: u8) -> Value {
        self.next_id += 1;
        Value::spill(order, self.next_id)
    }
    fn new_value(&mut self, order: u8, spill: bool) -> Value {
        if spill { self.new_spill(order) } else { self.new_shadow(order) }
    }
    pub fn tree(&self) -> XArray<'_, TestNodes, BITS> {
        self.forest.tree()
    }

    /// After "no node": page by page the tree holds the same as before; shadows may have become finer.
    fn take_over_finer_shadows(&mut self) {
        let tree = self.forest.tree();
        let mut finer = BTreeMap::new();
        for (first, entry, order) in tree.range(0, LAST) {
            let marks = Mark::ALL.iter().map(|&m| u8::from(tree.has_mark(first, m)) << m as u8).sum::<u8>();
            let (_, was, was_order, was_marks) = self.twin.covering(first).expect("nothing appeared");
            let same = match (was.kind(), entry.kind()) {
                (Kind::Value(was), Kind::Value(is)) => was == is.with_order(was.order()),
                (was, is) => was == is,
            };
            assert!(same && order <= was_order && marks == was_marks, "{was:?} became {entry:?}");
            assert!(order == was_order || is_shadow(entry), "{entry:?} was split");
            finer.insert(first, (entry, order, marks));
        }
        let pages =
            |entries: &BTreeMap<u64, (Entry, u8, u8)>| entries.values().map(|e| 1u64 << e.1).sum::<u64>();
        assert_eq!(pages(&finer), pages(&self.twin.entries), "pages were lost");
        self.twin.entries = finer;
    }

    /// Does an operation to both trees, and compares them.
    pub fn step(&mut self, op: &Op) {
        let budget = self.budget.take().unwrap_or(u64::MAX);
        match *op {
            Op::Budget { nodes } => self.budget = Some(nodes),
            Op::Insert { at, order } => self.insert(at, order, budget),
            Op::InsertRange { at, ref orders } => self.insert_range(at, orders, budget),
            Op::Store { at, order, what } => self.store(Slot::around(at, order), what, budget),
            Op::Erase { at } => self.erase(at),
            Op::EraseRange { at, pages } => self.erase_range(at, pages),
            Op::StoreRange { at, pages, spill } => {
                self.store_range(at..(at + pages).min(LAST + 1), spill, budget)
            }
            Op::Replace { at, spill } => self.replace(at, spill),
            Op::Revise { at, step, ref fates } => self.revise(at, step, fates),
            Op::Exchange { at, hit, to } => self.exchange(at, hit, to),
            Op::Mark { at, mark } => self.mark(at, mark),
            Op::Unmark { at, mark } => self.unmark(at, mark),
            Op::Split { at } => self.split(at, budget),
            Op::Remark { at, give, take } => self.remark(at, give, take),
            Op::MarkMarked { at, pages, have, give, max } => {
                let to = at.saturating_add(pages).min(LAST);
                self.mark_marked(at..=to, MarkCopy { have, give, max });
            }
            Op::Forget { which } => self.forget(which),
            Op::Scan { at, pages } => self.scan(at, pages),
        }
    }

    fn insert(&mut self, at: u64, order: u8, budget: u64) {
        let slot = Slot::around(at, order);
        let at = slot.index;
        let folio = self.new_folio(order);
        let refused = matches!(
            self.twin.clone().place(slot, Entry::folio(folio), Replaces::Shadows),
            Outcome::Present(_)
        );
        let before = refused.then(|| self.tree().dump_nodes());
        let got = self.forest.with_budget(budget, |tree| tree.insert(at, order, folio));
        match got {
            Inserted::NoNode => self.take_over_finer_shadows(),
            Inserted::Present(entry) => {
                assert_eq!(before, Some(self.tree().dump_nodes()), "A02: a refusal changed the tree");
                let Outcome::Present(want) = self.twin.place(slot, Entry::folio(folio), Replaces::Shadows)
                else {
                    panic!("{entry:?} was in the way of nothing");
                };
                assert_eq!(entry, want);
            }
            Inserted::Done { shadow } => {
                let Outcome::Done(gone) = self.twin.place(slot, Entry::folio(folio), Replaces::Shadows)
                else {
                    panic!("it went over something");
                };
                assert_eq!(shadow.map(Entry::value), gone.last().map(|&(_, entry, _)| entry));
            }
        }
    }

    fn store(&mut self, slot: Slot, what: u8, budget: u64) {
        let Slot { index: at, order } = slot;
        let entry = match what {
            0..=1 => Entry::folio(self.new_folio(order)),
            2..=4 => Entry::value(self.new_shadow(order)),
            _ => Entry::value(self.new_spill(order)),
        };
        let mut gone = Vec::new();
        let got = self.forest.with_budget(budget, |tree| {
            tree.store(at, order, entry, |first, entry, order| gone.push((first, entry, order)))
        });
        if got == Stored::NoNode {
            self.take_over_finer_shadows();
            return;
        }
        match (got, self.twin.place(slot, entry, Replaces::AnyEntry)) {
            (Stored::Done, Outcome::Done(want)) => assert_eq!(gone, want),
            (Stored::Present(got), Outcome::Present(want)) => assert_eq!(got, want),
            (got, _) => panic!("a store said {got:?}"),
        }
    }

    fn erase(&mut self, at: u64) {
        let want = self.twin.covering(at);
        assert_eq!(self.tree().erase(at), want.map_or(Entry::EMPTY, |found| found.1));
        if let Some((first, ..)) = want {
            self.twin.entries.remove(&first);
        }
    }

    fn erase_range(&mut self, at: u64, pages: u64) {
        let (from, end) = (at, (at + pages).min(LAST + 1));
        let mut want = self.twin.meeting(from, end);
        want.retain(|&(first, entry, order)| match entry.kind() {
            Kind::Value(value) if value.is_spill() => from <= first && first + (1 << order) <= end,
            _ => from < end,
        });
        let mut gone = Vec::new();
        self.tree().erase_range(from, end, |first, entry, order| gone.push((first, entry, order)));
        assert_eq!(gone, want);
        for (first, ..) in &want {
            self.twin.entries.remove(first);
        }
    }

    fn replace(&mut self, at: u64, spill: bool) {
        let Some((first, entry, order, _)) = self.twin.covering(at) else { return };
        let value = self.new_value(order, spill);
        assert_eq!(self.tree().replace(at, value), entry);
        self.twin.entries.insert(first, (Entry::value(value), order, 0));
    }

    fn revise(&mut self, at: u64, step: u64, fates: &[u8]) {
        let indices = (0..fates.len() as u64).map(|nth| at + nth * step).take_while(|&index| index <= LAST);
        let (mut want, mut values, mut told) = (Vec::new(), Vec::new(), Vec::new());
        for (index, fate) in indices.clone().zip(fates) {
            let Some((first, entry, order, _)) = self.twin.covering(index) else {
                want.push(Entry::EMPTY);
                values.push(Revision::Keep);
                continue;
            };
            want.push(entry);
            values.push(match fate % 3 {
                0 => Revision::Keep,
                1 => Revision::Erase,
                _ => Revision::Replace(self.new_shadow(order)),
            });
            match values.last() {
                Some(Revision::Erase) => drop(self.twin.entries.remove(&first)),
                Some(&Revision::Replace(value)) => {
                    self.twin.entries.insert(first, (Entry::value(value), order, 0));
                }
                _ => {}
            }
        }
        self.tree().revise(indices, |nth, entry| {
            assert_eq!(nth, told.len());
            told.push(entry);
            values[nth]
        });
        assert_eq!(told, want);
    }

    fn exchange(&mut self, at: u64, hit: bool, to: u8) {
        let Some((first, entry, order, _)) = self.twin.covering(at) else { return };
        let new = match to {
            0 => Entry::EMPTY,
            1 => Entry::folio(self.new_folio(order)),
            _ => Entry::value(self.new_shadow(order)),
        };
        let expected = if hit { entry } else { Entry::folio(self.new_folio(order)) };
        let got = self.tree().compare_exchange(at, expected, new);
        assert_eq!(got, if hit { ExchangeOutcome::Done } else { ExchangeOutcome::Found(entry) });
        if hit {
            self.twin.entries.remove(&first);
            if !new.is_empty() {
                self.twin.entries.insert(first, (new, order, 0));
            }
        }
    }

    fn mark(&mut self, at: u64, mark: u8) {
        let got = self.tree().set_mark(at, mark_of(mark));
        let found = self.twin.covering(at);
        assert_eq!(got, found.map_or(Entry::EMPTY, |found| found.1));
        if let Some((first, ..)) = found {
            self.twin.entries.get_mut(&first).unwrap().2 |= 1 << mark;
        }
    }

    fn unmark(&mut self, at: u64, mark: u8) {
        let got = self.tree().clear_mark(at, mark_of(mark));
        let found = self.twin.covering(at);
        assert_eq!(got, found.map_or(Entry::EMPTY, |found| found.1));
        if let Some((first, ..)) = found {
            self.twin.entries.get_mut(&first).unwrap().2 &= !(1 << mark);
        }
    }

    fn split(&mut self, at: u64, budget: u64) {
        let whole = self.twin.covering(at).filter(|found| matches!(found.1.kind(), Kind::Folio(_)));
        let Some((first, entry, order, marks)) = whole.filter(|found| found.0 < at) else {
            assert_eq!(self.tree().nodes_to_split(at), 0);
            assert_eq!(self.tree().split_folio(at, |_, _| panic!("nothing is split")), Split::Nothing);
            return;
        };
        let mut pieces: Vec<(u64, u8, u32)> = Vec::new();
        halve(first, order, at, &mut |first, order| {
            // The first piece may keep the whole's number: here it cannot, as a number tells its order.
            self.next_id += 1;
            pieces.push((first, order, folio(self.next_id, order)));
        });
        let (before, nodes) = (self.tree().dump_nodes(), self.tree().nodes_to_split(at));
        let allocs = |pair: &Self| pair.forest.nodes.allocs.load(std::sync::atomic::Ordering::Relaxed);
        let had = allocs(self);
        let mut asked = 0;
        let got = self.forest.with_budget(budget, |tree| {
            tree.split_folio(at, |first, order| {
                assert_eq!((first, order), (pieces[asked].0, pieces[asked].1));
                asked += 1;
                self.see_pieces(entry, &pieces);
                pieces[asked - 1].2
            })
        });
        if u64::from(nodes) > budget {
            assert_eq!((got, asked), (Split::NoNode, 0));
            assert_eq!(before, self.tree().dump_nodes(), "too few nodes changed the tree");
            return;
        }
        if got == Split::NoNode {
            assert_eq!((asked, before), (0, self.tree().dump_nodes()), "the allocator itself has run out");
            return;
        }
        assert_eq!((got, asked, allocs(self) - had), (Split::Done, pieces.len(), u64::from(nodes)));
        for &(first, order, number) in &pieces {
            self.twin.entries.insert(first, (Entry::folio(number), order, marks));
        }
    }

    /// Checks what readers find in the middle of a split: the whole, or their piece.
    fn see_pieces(&self, whole: Entry, pieces: &[(u64, u8, u32)]) {
        for &(first, order, number) in pieces {
            for index in [first, first + (1 << order) - 1] {
                let found = self.forest.walk(index);
                assert!(found == whole || found == Entry::folio(number), "{found:?} was found at {index}");
            }
        }
    }

    fn remark(&mut self, at: u64, give: u8, take: u8) {
        let set = |bits: u8| -> Vec<Mark> {
            Mark::ALL.into_iter().filter(|&mark| bits >> mark as u8 & 1 != 0).collect()
        };
        self.tree().remark(at, &set(give), &set(take));
        if let Some((first, ..)) = self.twin.covering(at) {
            let marks = &mut self.twin.entries.get_mut(&first).unwrap().2;
            *marks = (*marks | give) & !take;
        }
    }

    fn mark_marked(&mut self, range: RangeInclusive<u64>, copy: MarkCopy) {
        let ((at, to), MarkCopy { have, give, max }) = (range.into_inner(), copy);
        let next = self.tree().mark_marked(at, to, mark_of(have), mark_of(give), max);
        let has = |entry: &(Entry, u8, u8)| entry.2 >> have & 1 != 0;
        let meets = |first: u64, order: u8| first <= to && first + (1 << order) > at;
        let mut found =
            self.twin.entries.iter_mut().filter(|(first, entry)| meets(**first, entry.1) && has(entry));
        found.by_ref().take(max).for_each(|(_, entry)| entry.2 |= 1 << give);
        assert_eq!(next, found.next().map(|(&first, _)| first));
    }

    fn forget(&mut self, which: usize) {
        let nodes = self.forest.nodes.shadow_only_nodes();
        let Some(&node) = nodes.get(which) else { return };
        let gone: Vec<_> = self.tree().shadows_in(node).collect();
        assert_eq!(self.tree().forget(node), ForgetOutcome::Done);
        for (first, value) in gone {
            let (entry, ..) = self.twin.entries.remove(&first).expect("a shadow was there");
            assert_eq!(entry, Entry::value(value));
        }
    }

    fn insert_range(&mut self, at: u64, orders: &[u8], budget: u64) {
        // Only aligned entries make a legal batch.
        let (mut batch, mut end) = (Vec::new(), at);
        for &order in orders {
            let order = order.min(end.trailing_zeros() as u8);
            if end + (1 << order) > LAST + 1 {
                break;
            }
            batch.push((order, self.new_folio(order)));
            end += 1 << order;
        }
        let mut seen = Vec::new();
        let needed = self.tree().nodes_needed(at, end - at);
        let allocs = |pair: &Self| pair.forest.nodes.allocs.load(std::sync::atomic::Ordering::Relaxed);
        let before = allocs(self);
        let got = self.forest.with_budget(budget, |tree| {
            tree.insert_range(at, batch.iter().copied(), |k, shadow| seen.push((k, Entry::value(shadow))))
        });
        assert!(allocs(self) - before <= u64::from(needed), "the reserve would have been too small");
        let (mut want_seen, mut next) = (Vec::new(), at);
        for (k, &(order, folio)) in batch[..got.added].iter().enumerate() {
            let Outcome::Done(gone) =
                self.twin.place(Slot { index: next, order }, Entry::folio(folio), Replaces::Shadows)
            else {
                panic!("folio {k} went over something");
            };
            want_seen.extend(gone.into_iter().map(|(_, entry, _)| (k, entry)));
            next += 1 << order;
        }
        assert_eq!(seen, want_seen);
        assert_eq!(got.pages, next - at);
        match got.stop {
            RangeStop::All => assert_eq!(got.added, batch.len()),
            RangeStop::NoNode => self.take_over_finer_shadows(),
            RangeStop::Present(entry) => {
                let (order, folio) = batch[got.added];
                let Outcome::Present(want) =
                    self.twin.place(Slot { index: next, order }, Entry::folio(folio), Replaces::Shadows)
                else {
                    panic!("{entry:?} was in the way of nothing");
                };
                assert_eq!(entry, want);
            }
        }
    }

    fn store_range(&mut self, range: Range<u64>, spill: bool, budget: u64) {
        let (value, Range { start: at, end }) = (self.new_value(0, spill), range);
        let mut gone = Vec::new();
        let got = self.forest.with_budget(budget, |tree| {
            tree.store_range(at, end, value, |first, entry, order| gone.push((first, entry, order)))
        });
        let (mut next, mut want_removed) = (at, Vec::new());
        while next < end {
            let order = (0..=15).rev().find(|&o| align(next, o) == next && next + (1 << o) <= end).unwrap();
            if next == at + got.pages && got.stop == RangeStop::NoNode {
                break;
            }
            match self.twin.place(
                Slot { index: next, order },
                Entry::value(value.with_order(order)),
                Replaces::AnyEntry,
            ) {
                Outcome::Done(more) => want_removed.extend(more),
                Outcome::Present(entry) => {
                    assert_eq!(got.stop, RangeStop::Present(entry));
                    break;
                }
            }
            next += 1 << order;
        }
        assert_eq!((gone, got.pages), (want_removed, next - at));
        match got.stop {
            RangeStop::All => assert_eq!(next, end.max(at)),
            RangeStop::NoNode => self.take_over_finer_shadows(),
            RangeStop::Present(_) => {}
        }
    }

    /// Compares every kind of search, from `at` on, with a search by hand.
    fn scan(&self, at: u64, pages: u64) {
        let tree = self.tree();
        let to = (at + pages).min(LAST);
        let meeting = self.twin.meeting(at, to + 1);
        assert_eq!(tree.range(at, to).collect::<Vec<_>>(), meeting);
        assert!(tree.range(at, to).rev().eq(meeting.iter().rev().copied()), "backwards it is the same");
        let (mut ends, mut from_ends) = (tree.range(at, to), Vec::new());
        while let Some(found) = ends.next() {
            from_ends.extend([Some(found), ends.next_back()].into_iter().flatten());
        }
        from_ends.sort_unstable_by_key(|&(first, ..)| first);
        assert_eq!(from_ends, meeting, "from both ends each is met once");
        assert_eq!(tree.next(at, to), meeting.first().copied());
        assert_eq!(tree.prev(at, to), meeting.last().copied());
        assert_eq!(
            tree.entry_at(at),
            self.twin.covering(at).map(|(first, entry, order, _)| (first, entry, order))
        );
        assert_eq!(tree.order_at(at), self.twin.covering(at).map(|found| found.2));
        for mark in Mark::ALL {
            let bit = 1 << mark as u8;
            let marked = |&(first, ..): &(u64, Entry, u8)| self.twin.entries[&first].2 & bit != 0;
            let want: Vec<_> = meeting.iter().copied().filter(marked).collect();
            let (mut got, mut from) = (Vec::new(), at);
            while let Some(found) = tree.next_marked(from, to, mark) {
                got.push(found);
                from = found.0 + (1 << found.2);
            }
            assert_eq!(got, want);
            assert!(tree.marked(at, to, mark).eq(want), "in one go it is the same");
        }
        let taken = |index: u64| self.twin.covering(index).is_some_and(|(_, entry, ..)| !is_shadow(entry));
        let gap = (at..(at + pages).min(LAST + 1)).find(|&index| !taken(index));
        assert_eq!(tree.next_gap(at, pages.min(LAST + 1 - at)), gap);
        let gap = (at.saturating_sub(pages.max(1) - 1)..=at).rev().find(|&index| !taken(index));
        assert_eq!(tree.prev_gap(at, pages), if pages == 0 { None } else { gap });
    }

    /// Compares all that both can be asked.
    pub fn compare(&self) {
        self.forest.check();
        let tree = self.tree();
        let mut want = self.twin.entries.iter();
        for (first, entry, order) in tree.range(0, LAST) {
            let (&want_first, &(want_entry, want_order, marks)) = want.next().expect("too much in the tree");
            assert_eq!((first, entry, order), (want_first, want_entry, want_order));
            let last = first + (1 << order) - 1;
            for mark in Mark::ALL {
                let set = marks >> mark as u8 & 1 != 0;
                assert_eq!(tree.has_mark(first, mark), set);
                assert_eq!(tree.has_mark(last, mark), set, "a mark is found from any index");
            }
            for probe in [first, first + (1 << order) / 2, last] {
                assert_eq!(tree.load(probe), entry);
                assert_eq!(self.forest.walk(probe), entry, "readers and the writer disagree at {probe}");
            }
            for probe in [first.saturating_sub(1), last + 1] {
                let found = self.twin.covering(probe).map_or(Entry::EMPTY, |found| found.1);
                assert_eq!(tree.load(probe), found);
                assert_eq!(self.forest.walk(probe), found);
            }
        }
        assert!(want.next().is_none(), "something is missing in the tree");
    }
}

/// Operations from any bytes. Missing bytes count as zero, so that a prefix is a shorter run.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }
    /// Mostly near the start, sometimes far out, sometimes at the very end.
    fn index(&mut self) -> u64 {
        let near = u64::from(self.byte()) | u64::from(self.byte() & 3) << 8;
        match self.byte() {
            kind @ 240..=252 => (1 << (20 + 2 * (kind - 240))) + near,
            253.. => LAST - near,
            _ => near,
        }
    }
    fn order(&mut self) -> u8 {
        self.byte() % (ENTRY_ORDER_MAX + 1)
    }
    fn pages(&mut self) -> u64 {
        u64::from(self.byte()) << (self.byte() % 4)
    }
    fn orders(&mut self) -> Vec<u8> {
        (0..self.byte() % 40).map(|_| self.byte() % 10).collect()
    }
    fn yes(&mut self) -> bool {
        self.byte() & 1 != 0
    }
}

impl Iterator for Bytes<'_> {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        if self.0.is_empty() {
            return None;
        }
        let (what, at) = (self.byte(), self.index());
        Some(match what % 16 {
            0 | 1 => Op::Insert { at, order: self.order() },
            2 => Op::InsertRange { at, orders: self.orders() },
            3 | 4 => Op::Store { at, order: self.order(), what: self.byte() % 6 },
            5 => Op::Erase { at },
            6 => Op::EraseRange { at, pages: self.pages() },
            7 => Op::StoreRange { at, pages: self.pages(), spill: self.yes() },
            8 => Op::Replace { at, spill: self.yes() },
            9 => Op::Exchange { at, hit: self.yes(), to: self.byte() % 3 },
            10 if what > 128 => Op::MarkMarked {
                at,
                pages: self.pages(),
                have: self.byte() % 3,
                give: self.byte() % 3,
                max: usize::from(self.byte()) % 9,
            },
            12 if what > 128 => Op::Remark { at, give: self.byte() % 8, take: self.byte() % 8 },
            10 | 11 => Op::Mark { at, mark: self.byte() % 3 },
            12 => Op::Unmark { at, mark: self.byte() % 3 },
            13 if what > 200 => Op::Split { at },
            13 => Op::Forget { which: usize::from(self.byte()) },
            14 => Op::Scan { at, pages: self.pages() },
            _ if what > 240 => Op::Revise { at, step: self.pages() % 70 + 1, fates: self.orders() },
            _ => Op::Budget { nodes: u64::from(self.byte() % 6) },
        })
    }
}

/// Does all of it, comparing after each step, and empties the tree.
pub fn run<const BITS: u32>(nodes: u32, ops: &[Op]) {
    let mut pair = Pair::<BITS>::new(nodes);
    for op in ops {
        pair.step(op);
        pair.compare();
    }
    pair.clear();
    pair.forest.check();
}

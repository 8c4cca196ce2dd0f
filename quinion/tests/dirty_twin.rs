//! What is dirty, against a naive twin that notes for each page whether it is, and whether it is being written.
//!
//! ```text
//!   mapping   bits by frame, flags by folio, marks in the tree, counts       twin   folio -> two sets of its pages
//!             after every step: each page says the same, and so do the counts, the runs and the answers
//! ```
//!
//! Pages leave while they are being written, and come again as other folios; what is on its way then belongs to frames
//! that are no longer in the index, and the twin keeps them apart. Runs end in any order, in parts, with or without
//! errors. Folios are split, and are dropped while readers hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use proptest::prelude::*;
use quinion::internals::arena::Flags;
use quinion::internals::mapping::{
    AddedFolio, DropReason, FolioLifetime, FolioShape, MarkOutcome, NewFolio, RUN_PAGES_MAX, Replacement,
    SplitOutcome, TakeEnd, TakeFilter, WritebackEnd, WritebackOutcome, WritebackRun,
};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Frame, Millis, Order, Orders, PAGE_SIZE, PageIndex};
use quinion_testing::fixtures::mapping::{MappingFixture, page};

/// Pages that steps touch, in two regions: in one subtree and far away.
const PAGES: u64 = 160;
const REGIONS: [u64; 2] = [0, 1 << 19];
const EVERYTHING: Range<u64> = 0..1 << 20;

#[derive(Clone, Debug)]
enum Op {
    Insert {
        at: u64,
        order: u8,
        behind: bool,
    },
    Mark(Range<u64>),
    Tag(Range<u64>),
    Begin {
        pages: Range<u64>,
        which: TakeFilter,
        max: u32,
    },
    /// Ends a run, of which the pages behind the `cut`th fail, if that is in it.
    End {
        run: usize,
        cut: u32,
    },
    Forget(Range<u64>),
    Evict(Range<u64>),
    /// Drops flagged folios; readers hold those that go, if it says so, and read them afterwards.
    DropBehind {
        pages: Range<u64>,
        held: bool,
    },
    Adopt(u64),
    Split(u64),
    RemoveAll,
}

fn at() -> impl Strategy<Value = u64> {
    (0..PAGES, 0..2usize).prop_map(|(at, region)| REGIONS[region] + at)
}
fn range() -> impl Strategy<Value = Range<u64>> {
    prop_oneof![
        4 => (at(), 0..40u64).prop_map(|(at, pages)| at..at + pages),
        1 => Just(EVERYTHING),
    ]
}
fn which() -> impl Strategy<Value = TakeFilter> {
    prop_oneof![Just(TakeFilter::Dirty), Just(TakeFilter::ToWrite)]
}
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (at(), 0..=7u8, any::<bool>()).prop_map(|(at, order, behind)| Op::Insert { at, order, behind }),
        8 => range().prop_map(Op::Mark),
        3 => range().prop_map(Op::Tag),
        6 => (range(), which(), 0..300u32).prop_map(|(pages, which, max)| Op::Begin { pages, which, max }),
        8 => (any::<usize>(), 0..80u32).prop_map(|(run, cut)| Op::End { run, cut }),
        2 => range().prop_map(Op::Forget),
        2 => range().prop_map(Op::Evict),
        2 => (range(), any::<bool>()).prop_map(|(pages, held)| Op::DropBehind { pages, held }),
        1 => at().prop_map(Op::Adopt),
        2 => at().prop_map(Op::Split),
        1 => Just(Op::RemoveAll),
    ]
}

#[derive(Clone, Debug)]
struct Twin {
    folio: NewFolio,
    behind: bool,
    tagged: bool,
    dirty: BTreeSet<u64>,
    written: BTreeSet<u64>,
}

impl Twin {
    fn pages(&self) -> Range<u64> {
        self.folio.index.0..self.folio.index.0 + u64::from(self.folio.order.pages())
    }
    fn meets(&self, range: &Range<u64>) -> bool {
        self.pages().start < range.end && range.start < self.pages().end && !range.is_empty()
    }
    fn frame(&self, page: u64) -> Frame {
        self.folio.frame.plus((page - self.folio.index.0) as u32)
    }
    fn settle(&mut self) {
        self.tagged &= !self.dirty.is_empty();
    }
}

struct Fixture {
    base: MappingFixture,
    folios: BTreeMap<u64, Twin>,
    /// Frames, and so pages, under write-back whose folio has left, by the run's page and frame.
    detached: BTreeSet<(u64, Frame)>,
    runs: Vec<WritebackRun>,
    now: u64,
    since: Option<Millis>,
}

fn pages(range: &Range<u64>) -> Range<PageIndex> {
    page(range.start)..page(range.end)
}

impl Fixture {
    fn new() -> Self {
        let (folios, detached) = (BTreeMap::new(), BTreeSet::new());
        Self { base: MappingFixture::new(), folios, detached, runs: Vec::new(), now: 0, since: None }
    }

    fn met(&mut self, range: &Range<u64>) -> impl Iterator<Item = &mut Twin> {
        self.folios.values_mut().filter(move |folio| folio.meets(range))
    }
    fn dirty(&self) -> usize {
        self.folios.values().map(|folio| folio.dirty.len()).sum()
    }
    /// After a step: since when something is dirty.
    fn settle(&mut self, before: usize) {
        match (before, self.dirty()) {
            (_, 0) => self.since = None,
            (0, _) => self.since = Some(Millis(self.now)),
            _ => {}
        }
    }

    fn step(&mut self, op: Op) {
        self.now += 1;
        let before = self.dirty();
        match op {
            Op::Insert { at, order, behind } => self.insert(at, order, behind),
            Op::Mark(range) => self.mark(range),
            Op::Tag(range) => {
                assert_eq!(self.base.mapping.lock().tag_to_write(pages(&range)), page(range.end));
                self.met(&range).for_each(|folio| folio.tagged |= !folio.dirty.is_empty());
            }
            Op::Begin { pages, which, max } => self.begin(pages, which, max),
            Op::End { run, cut } => self.end(run, cut),
            Op::Forget(range) => {
                let forgotten = self.base.mapping.lock().forget_dirty(pages(&range));
                let mut expected = 0;
                for folio in self.met(&range) {
                    let dirty = folio.dirty.len();
                    folio.dirty.retain(|page| !range.contains(page));
                    expected += dirty - folio.dirty.len();
                    folio.settle();
                }
                assert_eq!(forgotten, expected as u64);
            }
            Op::Evict(range) => self.evict(&range),
            Op::DropBehind { pages, held } => self.drop_behind(pages, held),
            Op::Adopt(at) => {
                if let Ok(held) = self.base.mapping.try_hold(page(at)) {
                    self.base.mapping.lock().adopt(&held);
                }
                self.met(&(at..at + 1)).for_each(|folio| folio.behind = false);
            }
            Op::Split(at) => self.split(at),
            Op::RemoveAll => self.remove_all(),
        }
        self.settle(before);
    }

    fn insert(&mut self, at: u64, order: u8, behind: bool) {
        let Some(frame) = self.base.arena.alloc(Order(order)) else { return };
        let folio = NewFolio { index: page(at).align_down(Order(order)), frame, order: Order(order) };
        let fate = if behind { FolioLifetime::DropsBehind } else { FolioLifetime::Stays };
        let shape = FolioShape { fate, ..FolioShape::of(Orders::PAGES) };
        match self.base.mapping.add_folio_watched(folio, shape, LockWait::Wait, &mut || {}) {
            AddedFolio::Added { .. } => self.base.complete(folio),
            _ => return self.base.free(folio),
        }
        let (dirty, written) = (BTreeSet::new(), BTreeSet::new());
        let twin = Twin { folio, behind, tagged: false, dirty, written };
        self.folios.insert(folio.index.0, twin);
    }

    fn mark(&mut self, range: Range<u64>) {
        let (mapping, now) = (&self.base.mapping, Millis(self.now));
        for folio in self.folios.values_mut().filter(|folio| folio.meets(&range)) {
            let some = range.start.max(folio.pages().start)..range.end.min(folio.pages().end);
            let held = mapping.try_hold(page(some.start)).unwrap();
            let newly = some.clone().filter(|page| !folio.dirty.contains(page)).count() as u32;
            assert_eq!(mapping.is_dirty(&held, pages(&some)), newly == 0);
            let marked = mapping.lock().mark_dirty(&held, pages(&some), now);
            assert_eq!(marked, MarkOutcome::Done { newly });
            folio.dirty.extend(some);
        }
    }

    fn begin(&mut self, range: Range<u64>, which: TakeFilter, max: u32) {
        let mut runs = Vec::new();
        let begun = self.base.mapping.lock().begin_writeback(pages(&range), which, max, &mut runs);
        let (mut expected, mut taken) = (TakeEnd::Done, Vec::new());
        let wanted = |folio: &&mut Twin| folio.meets(&range) && (which == TakeFilter::Dirty || folio.tagged);
        'all: for folio in self.folios.values_mut().filter(wanted) {
            let dirty: Vec<u64> = folio.dirty.iter().copied().filter(|page| range.contains(page)).collect();
            for index in dirty {
                match (folio.written.contains(&index), which) {
                    (true, TakeFilter::Dirty) => continue,
                    (true, TakeFilter::ToWrite) => expected = TakeEnd::Busy(page(index)),
                    (false, _) if taken.len() == max as usize => expected = TakeEnd::More(page(index)),
                    (false, _) => {
                        taken.push((index, folio.frame(index)));
                        folio.dirty.remove(&index);
                        folio.written.insert(index);
                        continue;
                    }
                }
                folio.settle();
                break 'all;
            }
            folio.settle();
        }
        assert_eq!(begun, expected);
        let pages_of = |run: &WritebackRun| {
            let run = *run;
            (0..run.pages).map(move |nth| (run.index.0 + u64::from(nth), run.frame.plus(nth)))
        };
        assert_eq!(runs.iter().flat_map(pages_of).collect::<Vec<_>>(), taken);
        for two in runs.windows(2) {
            let follows = (two[0].end(), two[0].frame.plus(two[0].pages)) == (two[1].index, two[1].frame);
            assert!(!follows || two[0].pages == RUN_PAGES_MAX, "{two:?} are one");
        }
        self.runs.extend(runs);
    }

    fn end(&mut self, which: usize, cut: u32) {
        if self.runs.is_empty() {
            return;
        }
        let run = self.runs.swap_remove(which % self.runs.len());
        let cut = cut.min(run.pages);
        let good = WritebackRun { pages: cut, ..run };
        let (index, frame) = (run.index.plus(u64::from(cut)), run.frame.plus(cut));
        let bad = WritebackRun { index, frame, pages: run.pages - cut };
        for (part, outcome) in [(good, WritebackOutcome::Written), (bad, WritebackOutcome::Failed)] {
            let ended = self.base.mapping.lock().end_writeback(part, outcome, Millis(self.now));
            assert_eq!(ended, self.ended(part, outcome));
        }
    }

    /// What the end of `run` does to the twin.
    fn ended(&mut self, run: WritebackRun, outcome: WritebackOutcome) -> WritebackEnd {
        let mut ended = WritebackEnd::default();
        let mut touched = BTreeSet::new();
        for nth in 0..run.pages {
            let (index, frame) = (run.index.0 + u64::from(nth), run.frame.plus(nth));
            if self.detached.remove(&(index, frame)) {
                ended.left += 1;
                continue;
            }
            let folio = self.folios.values_mut().find(|folio| folio.pages().contains(&index)).unwrap();
            assert_eq!(folio.frame(index), frame);
            assert!(folio.written.remove(&index));
            ended.failed += u32::from(outcome == WritebackOutcome::Failed && folio.dirty.insert(index));
            touched.insert(folio.folio.index.0);
        }
        let done = |folio: &&Twin| folio.behind && folio.dirty.is_empty() && folio.written.is_empty();
        for folio in touched.iter().map(|first| &self.folios[first]).filter(done) {
            let from = ended.behind.map_or(folio.folio.index, |behind| behind.start);
            ended.behind = Some(from..page(folio.pages().end));
        }
        ended
    }

    fn evict(&mut self, range: &Range<u64>) {
        let (base, twins) = (&self.base, &mut self.folios);
        twins.retain(|_, twin| {
            let folio = twin.folio;
            if !twin.meets(range) {
                return true;
            }
            let gone =
                base.mapping.lock().evict(folio.index, folio.frame, |_| Replacement::Nothing).is_some();
            assert_eq!(gone, twin.dirty.is_empty() && twin.written.is_empty());
            if gone {
                base.free(folio);
            }
            !gone
        });
    }

    fn drop_behind(&mut self, range: Range<u64>, held: bool) {
        let (base, before) = (&self.base, self.base.pages());
        let goes = |folio: &Twin| {
            let inside = range.start <= folio.pages().start && folio.pages().end <= range.end;
            inside && folio.behind && folio.dirty.is_empty() && folio.written.is_empty()
        };
        let going = self.folios.values().filter(|folio| held && goes(folio));
        let readers: Vec<_> = going.map(|folio| base.mapping.try_hold(folio.folio.index).unwrap()).collect();
        let dropped = base.mapping.drop_behind(pages(&range), DropReason::Passed, LockWait::Wait).unwrap();
        assert_eq!((dropped.next, dropped.kept), (page(range.end), None));
        let mut gone = 0;
        self.folios.retain(|_, folio| {
            let goes = goes(folio);
            gone += if goes { u64::from(folio.folio.order.pages()) } else { 0 };
            !goes
        });
        assert_eq!(before - base.pages(), gone);
        for held in readers {
            assert!(base.mapping.try_hold(held.first()).is_err(), "it has left");
            let mut bytes = vec![0; held.order().bytes()];
            assert_eq!(held.copy_out(held.first().first_byte(), &mut bytes), bytes.len());
            for (index, words) in (held.first().0..).zip(bytes.chunks(PAGE_SIZE)) {
                assert!(words.chunks(8).all(|word| word == index.to_le_bytes()), "page {index}");
            }
        }
    }

    /// Each piece has of its whole what lies in it.
    fn split(&mut self, at: u64) {
        let before = self.folios.range(..at).next_back().map(|(_, whole)| whole.clone());
        let outcome = self.base.mapping.split_at(page(at));
        let Some(whole) = before.filter(|whole| at < whole.pages().end) else {
            return assert_eq!(outcome, SplitOutcome::Done);
        };
        if !whole.written.is_empty() {
            return assert_eq!(outcome, SplitOutcome::Busy);
        }
        assert_eq!(outcome, SplitOutcome::Done);
        self.folios.remove(&whole.folio.index.0);
        let mut first = whole.pages().start;
        while first < whole.pages().end {
            let order = self.base.mapping.try_hold(page(first)).unwrap().order();
            let folio = NewFolio { index: page(first), frame: whole.frame(first), order };
            let mut piece = Twin { folio, ..whole.clone() };
            piece.dirty.retain(|index| (first..first + u64::from(order.pages())).contains(index));
            piece.settle();
            first = piece.pages().end;
            assert!(piece.pages().start >= at || first <= at, "a piece reaches over {at}");
            self.folios.insert(folio.index.0, piece);
        }
    }

    fn remove_all(&mut self) {
        self.base.mapping.lock().remove_all();
        for folio in std::mem::take(&mut self.folios).into_values() {
            let left = folio.written.iter().map(|&page| (page, folio.frame(page)));
            self.detached.extend(left);
        }
    }

    fn check(&self) {
        self.base.check();
        let (mapping, counted) = (&self.base.mapping, self.base.mapping.writeback().dirty_pages());
        let sum = |of: fn(&Twin) -> usize| self.folios.values().map(of).sum::<usize>() as u64;
        let detached = self.detached.len() as u64;
        assert_eq!(counted.dirty(), sum(|folio| folio.dirty.len()));
        assert_eq!(counted.writeback(), sum(|folio| folio.written.len()) + detached);
        assert_eq!(counted.drop_behind(), sum(|folio| if folio.behind { folio.dirty.len() } else { 0 }));
        assert_eq!(mapping.writeback().detached_pages(), detached);
        assert_eq!(mapping.writeback().dirty_since(), self.since);
        for folio in self.folios.values() {
            let word = self.base.word(folio.folio.frame);
            assert_eq!(word.has(Flags::DIRTY), !folio.dirty.is_empty());
            assert_eq!(word.has(Flags::WRITEBACK), !folio.written.is_empty());
            assert_eq!(word.holds(), u32::from(!folio.written.is_empty()), "write-back has one hold");
            let held = mapping.try_hold(folio.folio.index).unwrap();
            for index in folio.pages() {
                let dirty = mapping.is_dirty(&held, page(index)..page(index + 1));
                assert_eq!(dirty, folio.dirty.contains(&index), "page {index}");
            }
        }
        let guard = mapping.lock();
        for from in [0, 37, PAGES, REGIONS[1] + 5] {
            let range = from..EVERYTHING.end;
            let first = |of: fn(&Twin) -> &BTreeSet<u64>| {
                self.folios
                    .values()
                    .flat_map(|folio| of(folio).range(range.clone()))
                    .min()
                    .map(|&at| page(at))
            };
            assert_eq!(guard.next_dirty(pages(&range)), first(|folio| &folio.dirty));
            assert_eq!(guard.next_writeback(pages(&range)), first(|folio| &folio.written));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    #[test]
    fn dirty_pages_agree_with_a_twin(ops in prop::collection::vec(op(), 1..80)) {
        let mut fixture = Fixture::new();
        for op in ops {
            fixture.step(op);
            fixture.check();
        }
        fixture.step(Op::RemoveAll);
        fixture.check();
        while !fixture.runs.is_empty() {
            fixture.step(Op::End { run: 0, cut: 3 });
        }
        fixture.check();
        fixture.base.finish();
    }
}

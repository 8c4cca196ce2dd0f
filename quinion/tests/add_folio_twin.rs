//! Insertion, splits, cuts and evictions of a mapping, against a naive twin that notes what each page is.
//!
//! ```text
//!   mapping   trees, stocks of nodes, descriptors            twin   page -> folio, or shadow, or nothing
//!             after every step: each page says the same, and so do the counts, the arena and the descriptors
//! ```
//!
//! Nodes run short in two ways: by a hook, a few at a time, and because the arena has hardly any left. Frames run short
//! by themselves: the arena is the smallest there is. Only when nodes are short may an answer be "no node"; and then
//! the frames that were not inserted are the caller's, who gives them back.

use quinion_testing::fixtures;
use std::collections::BTreeMap;
use std::ops::Range;

use proptest::prelude::*;
use quinion::backend::FillRun;
use quinion::internals::arena::CellNumber;
use quinion::internals::mapping::{
    AddedFolio, FolioShape, IndexHooks, InsertPurpose, NewFolio, RemoveFilter, Replacement, RunOutcome,
    SplitOutcome,
};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Frame, Order, Orders};
use quinion::internals::xarray::{Kind, RangeStop};
use quinion_testing::ablations::{NodesAtMost, OneByOne, ThreeWalks};
use quinion_testing::fixtures::mapping::{MappingFixture, page};

/// Pages from the start of each region that steps touch.
const PAGES: u64 = 1024;
/// Where they are: trees of two and of four levels.
const REGIONS: [u64; 2] = [0, 1 << 20];

#[derive(Clone, Copy, Debug)]
enum Op {
    Folio {
        at: u64,
        order: u8,
        purpose: InsertPurpose,
    },
    Range {
        at: u64,
        pages: u32,
        min: u8,
        max: u8,
        marker: u64,
        purpose: InsertPurpose,
    },
    /// A folio is evicted, and leaves a shadow if there is a payload for it.
    Evict {
        which: usize,
        leaves: Option<u32>,
    },
    /// No folio reaches over the page's start afterwards.
    Split(u64),
    /// What is wholly in the range goes, and is split at its edges before that if it says so.
    Cut {
        at: u64,
        pages: u64,
        is_split: bool,
    },
    Shadow {
        at: u64,
        order: u8,
        payload: u32,
    },
    /// Takes all cells of the arena but so many.
    Hoard(usize),
    Release,
}

/// An index; in a few places, so that steps meet.
fn at() -> impl Strategy<Value = u64> {
    (0..PAGES, 0..2usize).prop_map(|(at, region)| REGIONS[region] + at)
}
fn purpose() -> impl Strategy<Value = InsertPurpose> {
    prop_oneof![4 => Just(InsertPurpose::Read), 1 => Just(InsertPurpose::Write)]
}
fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (at(), 0..=9u8, purpose()).prop_map(|(at, order, purpose)| Op::Folio { at, order, purpose }),
        4 => (at(), 1..300u32, 0..4u8, 0..6u8, 0..400u64, purpose()).prop_map(
            |(at, pages, min, more, marker, purpose)| Op::Range { at, pages, min, max: min + more, marker, purpose }
        ),
        4 => (any::<usize>(), prop::option::of(1..1000u32)).prop_map(|(which, leaves)| Op::Evict { which, leaves }),
        2 => at().prop_map(Op::Split),
        1 => (at(), 1..600u64, any::<bool>()).prop_map(|(at, pages, is_split)| Op::Cut { at, pages, is_split }),
        4 => (at(), 0..=9u8, 1..1000u32).prop_map(|(at, order, payload)| Op::Shadow { at, order, payload }),
        1 => (0..6usize).prop_map(Op::Hoard),
        1 => Just(Op::Release),
    ]
}
/// The library's own ways, and their ablations.
fn hooks() -> impl Strategy<Value = Option<&'static dyn IndexHooks>> {
    const HOOKS: [Option<&'static dyn IndexHooks>; 7] = [
        None,
        Some(&NodesAtMost(0)),
        Some(&NodesAtMost(1)),
        Some(&NodesAtMost(2)),
        ThreeWalks::HOOKS,
        OneByOne::WINDOWS,
        OneByOne::GRABS,
    ];
    prop::sample::select(&HOOKS[..])
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Folio(NewFolio),
    Shadow(u32),
}

struct Fixture {
    base: MappingFixture,
    twin: BTreeMap<u64, Is>,
    hoard: Vec<CellNumber>,
    short: bool,
}

impl Fixture {
    fn new(hooks: Option<&'static dyn IndexHooks>) -> Self {
        let short = hooks.is_some_and(|hooks| hooks.nodes_taken_max() == 0);
        Self {
            base: MappingFixture::new().with_hooks(hooks),
            twin: BTreeMap::new(),
            hoard: Vec::new(),
            short,
        }
    }
    fn nodes_may_lack(&self) -> bool {
        self.short || !self.hoard.is_empty()
    }
    fn range(&self, folio: NewFolio) -> impl Iterator<Item = (&u64, &Is)> {
        let first = folio.index.0;
        self.twin.range(first..first + u64::from(folio.order.pages()))
    }
    fn is_free(&self, folio: NewFolio) -> bool {
        self.range(folio).all(|(_, is)| matches!(is, Is::Shadow(_)))
    }
    /// The folio goes in; the shadow at its highest page.
    fn insert(&mut self, folio: NewFolio) -> Option<u32> {
        let last = self.range(folio).last().map(|(_, is)| *is);
        let first = folio.index.0;
        (first..first + u64::from(folio.order.pages())).for_each(|page| {
            self.twin.insert(page, Is::Folio(folio));
        });
        self.base.complete(folio);
        last.map(|is| if let Is::Shadow(payload) = is { payload } else { panic!("over a folio") })
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Folio { at, order, purpose } => self.add(at, order, purpose),
            Op::Range { at, pages, min, max, marker, purpose } => {
                let index = at & !((1 << min) - 1);
                let shape = FolioShape {
                    orders: Orders { min: Order(min), max: Order(max) },
                    marker: Some(page(index + marker)),
                    purpose,
                    ..FolioShape::of(Orders::PAGES)
                };
                self.add_range(index, pages.next_multiple_of(1 << min), shape);
            }
            Op::Evict { which, leaves } => self.evict(which, leaves),
            Op::Split(at) => self.split(at),
            Op::Cut { at, pages, is_split } => {
                if is_split {
                    self.split(at);
                    self.split(at + pages);
                }
                self.cut(at..at + pages);
            }
            Op::Shadow { at, order, payload } => self.put_shadow(at >> order << order, order, payload),
            Op::Hoard(left) => self.hoard(left),
            Op::Release => self.base.arena.free_cells(self.hoard.drain(..)),
        }
    }

    fn add(&mut self, at: u64, order: u8, purpose: InsertPurpose) {
        let Some(frame) = self.base.arena.alloc(Order(order)) else { return };
        let folio = NewFolio { index: page(at).align_down(Order(order)), frame, order: Order(order) };
        match self.base.mapping.add_folio(folio, purpose, LockWait::Wait) {
            AddedFolio::Added { shadow } => {
                assert!(self.is_free(folio));
                let want = self.insert(folio).filter(|_| purpose == InsertPurpose::Read);
                assert_eq!(shadow.map(|value| value.payload()), want);
                return;
            }
            AddedFolio::Present => assert!(!self.is_free(folio)),
            AddedFolio::NoNode => assert!(self.nodes_may_lack()),
        }
        self.base.free(folio);
    }

    fn add_range(&mut self, index: u64, pages: u32, shape: FolioShape) {
        let Some(run) = self.base.try_run(index, pages) else { return };
        let mut heard = Vec::new();
        let note = &mut |frame: Frame, value: quinion::internals::xarray::Value| {
            heard.push((frame, value.payload()))
        };
        let got = self.base.mapping.add_folio_range(run, shape, LockWait::Wait, note).unwrap();
        let (mut expected, mut done) = (Vec::new(), 0);
        while done < got.pages {
            let folio = first_folio(run, done, shape.orders);
            assert!(self.is_free(folio), "{folio:?} went in over a folio");
            let marked = shape.marker.is_some_and(|marker| marker.align_down(folio.order) == folio.index);
            assert_eq!(self.base.mapping.try_hold(folio.index).unwrap().has_marker(), marked);
            expected.extend(self.insert(folio).map(|payload| (folio.frame, payload)));
            done += folio.order.pages();
        }
        if shape.purpose == InsertPurpose::Write {
            expected.clear();
        }
        assert_eq!(heard, expected);
        match got {
            RunOutcome { pages, stop: RangeStop::All } => assert_eq!(pages, run.pages),
            RunOutcome { stop: RangeStop::Present(_), .. } => {
                assert!(!self.is_free(first_folio(run, done, shape.orders)))
            }
            RunOutcome { stop: RangeStop::NoNode, .. } => assert!(self.nodes_may_lack()),
        }
        if done < run.pages {
            self.base.arena.free_run(run.frame.plus(done), run.pages - done);
        }
    }

    fn folios(&self) -> Vec<NewFolio> {
        let heads = self.twin.iter().filter_map(|(page, is)| match is {
            Is::Folio(folio) if folio.index.0 == *page => Some(*folio),
            _ => None,
        });
        heads.collect()
    }

    fn evict(&mut self, which: usize, leaves: Option<u32>) {
        let folios = self.folios();
        if folios.is_empty() {
            return;
        }
        let folio = folios[which % folios.len()];
        let leave = leaves.map_or(Replacement::Nothing, Replacement::Shadow);
        let gone = self.base.mapping.lock().evict(folio.index, folio.frame, |_| leave);
        assert_eq!(gone, Some(folio.order));
        self.base.free(folio);
        self.twin.retain(|_, is| *is != Is::Folio(folio));
        if let Some(payload) = leaves {
            let first = folio.index.0;
            let pages = first..first + u64::from(folio.order.pages());
            self.twin.extend(pages.map(|page| (page, Is::Shadow(payload))));
        }
    }

    /// The folio over the edge is halved, and the half over it again, until none is; a shadow is left as it is.
    fn split(&mut self, edge: u64) {
        let over = match self.twin.get(&edge) {
            Some(Is::Folio(folio)) if folio.index.0 < edge => Some(*folio),
            _ => None,
        };
        match self.base.mapping.split_at(page(edge)) {
            SplitOutcome::Done => {}
            SplitOutcome::NoNode => return assert!(self.nodes_may_lack()),
            other => panic!("{other:?} at {edge}"),
        }
        let Some(mut rest) = over else { return };
        while rest.index.0 < edge {
            let order = Order(rest.order.0 - 1);
            let (low, pages) = (NewFolio { order, ..rest }, order.pages());
            let (index, frame) = (low.index.plus(u64::from(pages)), low.frame.plus(pages));
            let high = NewFolio { index, frame, order };
            for half in [low, high] {
                let first = half.index.0;
                self.twin.extend((first..first + u64::from(pages)).map(|page| (page, Is::Folio(half))));
            }
            rest = if edge < index.0 { low } else { high };
        }
    }

    /// Folios that reach over an edge stay. A shadow goes whole, as the entry that it is now.
    fn cut(&mut self, range: Range<u64>) {
        let entries: Vec<_> = self.base.tree(|tree| tree.range(range.start, range.end - 1).collect());
        let gone = self.base.mapping.remove_range(page(range.start)..page(range.end), RemoveFilter::All);
        let mut folio_pages = 0;
        self.twin.retain(|_, is| match is {
            Is::Folio(NewFolio { index, order, .. }) => {
                let goes = range.start <= index.0 && index.0 + u64::from(order.pages()) <= range.end;
                folio_pages += u64::from(goes);
                !goes
            }
            Is::Shadow(_) => true,
        });
        assert_eq!(gone, folio_pages);
        for (first, _, order) in entries.iter().filter(|(_, entry, _)| matches!(entry.kind(), Kind::Value(_)))
        {
            let pages = *first..first + (1 << order);
            self.twin.retain(|page, _| !pages.contains(page));
        }
    }

    fn put_shadow(&mut self, first: u64, order: u8, payload: u32) {
        let pages = first..first + (1 << order);
        if !self.hoard.is_empty() || self.twin.range(pages.clone()).any(|(_, is)| matches!(is, Is::Folio(_)))
        {
            return;
        }
        self.base.put_shadow(first, order, payload);
        pages.for_each(|page| {
            self.twin.insert(page, Is::Shadow(payload));
        });
    }

    fn hoard(&mut self, left: usize) {
        self.base.arena.alloc_cells(usize::MAX / 2, &mut self.hoard, LockWait::Wait);
        let left = left.min(self.hoard.len() - 1);
        self.base.arena.free_cells(self.hoard.drain(..left));
    }

    fn check(&self) {
        self.base.mapping.check().unwrap();
        self.base.arena.check().unwrap();
        let found: BTreeMap<u64, Is> = self.base.tree(|tree| {
            let mut found = BTreeMap::new();
            for (first, entry, order) in tree.range(0, u64::MAX) {
                for page in first..first + (1 << order) {
                    let is = match entry.kind() {
                        Kind::Folio(frame) => {
                            let (index, order) = (fixtures::mapping::page(first), Order(order));
                            Is::Folio(NewFolio { index, frame: Frame(frame), order })
                        }
                        Kind::Value(value) => Is::Shadow(value.payload()),
                        other => panic!("{other:?} at {page}"),
                    };
                    found.insert(page, is);
                }
            }
            found
        });
        assert_eq!(found, self.twin);
        let folio_pages = self.twin.values().filter(|is| matches!(is, Is::Folio(_))).count();
        assert_eq!(self.base.pages(), folio_pages as u64);
        let nodes = self.base.tree(|tree| tree.check().unwrap()) + self.base.mapping.index().spare_nodes();
        let cells = self.base.arena.stats().cells_used;
        assert_eq!(cells, u64::from(nodes) + 1 + self.hoard.len() as u64, "nodes were lost or made up");
    }
}

/// The folio that a run makes at its `done`th page: the largest that fits there.
fn first_folio(run: FillRun, done: u32, orders: Orders) -> NewFolio {
    let (index, frame) = (run.index.plus(u64::from(done)), run.frame.plus(done));
    let fits = |order: &u8| {
        let pages = 1u64 << order;
        index.0 % pages == 0 && u64::from(frame.0) % pages == 0 && u64::from(run.pages - done) >= pages
    };
    let order = (orders.min.0..=orders.max.0).rev().find(fits).expect("a run is cut for its smallest folio");
    NewFolio { index, frame, order: Order(order) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    #[test]
    fn a_mapping_agrees_with_its_twin(hooks in hooks(), ops in prop::collection::vec(op(), 1..60)) {
        let mut fixture = Fixture::new(hooks);
        for op in ops {
            fixture.step(op);
            fixture.check();
        }
        fixture.step(Op::Release);
        fixture.base.finish();
    }
}

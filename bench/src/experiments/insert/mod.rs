//! Insert: what does it cost to put a folio into the index, alone and in batches?
//!
//! ```text
//!   one at a time   lock - way down - store - unlock,   for each folio
//!   batches of n    lock - way down - store, store, .. step to the next node, store, .. - unlock
//!
//!   index alone     the tree behind its lock, folios that are made-up numbers
//!   whole path      frames from the arena, nodes before the lock, descriptors, the tree: Mapping's own calls
//! ```
//!
//! Each thread inserts a range of its own into one file's tree and so meets the others at the lock only. Both sides
//! take their folios from the same source, in the same order and in the same runs, and end with the same tree, which is
//! then emptied outside the timing. The time of two threads is the elapsed time over the folios of both.
//!
//! This machine has processors for two threads. The cost of more is computed by a model of the lock from what is
//! measured here (`model`), in cases that say so.
//!
//! The goals are those for pages: a folio of order 4 or 9 fills many slots, of which no batch saves one, so these are
//! reported without a goal. The whole path has no rows of order 9: a run of frames is one such folio.

mod model;

use std::ops::Range;
use std::rc::Rc;
use std::sync::Mutex;

use quinion::backend::FillRun;
use quinion::internals::mapping::{AddedFolio, FolioShape, InsertPurpose, NewFolio};
use quinion::internals::sync::LockWait;
use quinion::internals::units::{Order, Orders};
use quinion::internals::xarray::{Inserted, RangeStop};

use crate::fixtures::index::{Index, made_up};
use crate::fixtures::mapping::{MappingFixture, RUN_PAGES_MAX};
use crate::harness::timing::together;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use crate::sys::HugeMemory;
use model::Round;

const MODELLED: [Metric; 1] = [Metric::cost("time (model)", "ns/folio")];
const METRICS: [Metric; 2] = [Metric::cost("time", "ns/folio"), Metric::cost("cpu", "ns/folio")];
const BATCHES: [(&str, usize); 3] = [("batches of 8", 8), ("batches of 32", 32), ("batches of 256", 256)];
const SINGLE: &str = "one at a time";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Level {
    Index,
    Path,
}

/// Levels, orders, threads, and the factors by which batches of 32 should be cheaper.
const ROWS: [(Level, u8, usize, Option<f64>); 10] = [
    (Level::Index, 0, 1, Some(4.0)),
    (Level::Index, 0, 2, Some(5.0)),
    (Level::Index, 4, 1, None),
    (Level::Index, 4, 2, None),
    (Level::Index, 9, 1, None),
    (Level::Index, 9, 2, None),
    (Level::Path, 0, 1, Some(4.0)),
    (Level::Path, 0, 2, None),
    (Level::Path, 4, 1, None),
    (Level::Path, 4, 2, None),
];

pub fn cases(settings: &Settings) -> Vec<Case> {
    let rounds = settings.pick(2, 4);
    let case = |(level, order, threads, goal)| {
        let folios = match level {
            Level::Index => settings.pick(8 << 10, 64 << 10),
            Level::Path => settings.pick(8_usize << 10, 32 << 10) >> order,
        };
        case(level, Load { order, threads, folios, rounds }, goal)
    };
    let folios = settings.pick(8 << 10, 64 << 10);
    let modelled =
        MODEL_THREADS.map(|threads| modelled(Load { order: 0, threads: 2, folios, rounds }, threads));
    ROWS.into_iter().map(case).chain(modelled).collect()
}

/// How many threads the model has, and the batch that stands beside one at a time.
const MODEL_THREADS: [usize; 3] = [4, 8, 32];
const BATCH: usize = 32;
/// The source that pages are copied from in the model's work: more than a processor's cache holds.
const COPIED_BYTES: usize = 128 << 20;

fn modelled(load: Load, threads: usize) -> Case {
    let name = format!("lock-hold model, order {}, {threads} threads", load.order);
    let case = Case::new(name, &MODELLED, move || {
        let alone: Rc<dyn Subject> = Rc::new(Alone::new(load)?);
        let from = Rc::new(HugeMemory::new(COPIED_BYTES)?);
        let of = |name, batch| {
            let (alone, from) = (Rc::clone(&alone), Rc::clone(&from));
            Alternative::new(name, move |_| {
                let round = measured(&*alone, load, batch, &from);
                Ok(vec![model::each_round(threads, round) / batch as f64])
            })
        };
        Ok(vec![of(SINGLE, 1), of(BATCHES[1].0, BATCH)])
    });
    case.compare("time (model)", BATCHES[1].0, SINGLE)
}

fn measured(alone: &dyn Subject, load: Load, batch: usize, from: &[u8]) -> Round {
    let hold_of = |threads: usize, batch: usize| {
        let insert = |thread| match batch {
            1 => alone.one_at_a_time(thread),
            _ => alone.in_batches(thread, batch),
        };
        let spent = together(threads, load.rounds, insert, |thread| alone.take_out(thread));
        spent.elapsed_ns / (threads * load.rounds * load.folios / batch) as f64
    };
    // A hand-over costs the same whatever the holder does, and shows best where it does little.
    let hand_over = (hold_of(2, 1) - hold_of(1, 1)).max(0.0);
    Round { work: batch as f64 * model::copy_ns(from), hold: hold_of(1, batch), hand_over }
}

#[derive(Clone, Copy)]
struct Load {
    order: u8,
    threads: usize,
    folios: usize,
    rounds: usize,
}

impl Load {
    fn range(self, thread: usize) -> Range<u64> {
        let pages = (self.folios as u64) << self.order;
        thread as u64 * pages..(thread as u64 + 1) * pages
    }
}

trait Subject: Sync {
    fn one_at_a_time(&self, thread: usize);
    fn in_batches(&self, thread: usize, batch: usize);
    fn take_out(&self, thread: usize);
}

fn case(level: Level, load: Load, goal: Option<f64>) -> Case {
    let threads = if load.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", load.threads) };
    let what = match level {
        Level::Index => "index alone",
        Level::Path => "whole path",
    };
    let name = format!("{what}, order {}, {threads}", load.order);
    let batches =
        BATCHES.into_iter().filter(move |&(_, batch)| level == Level::Index || fits(batch, load.order));
    let mut case = Case::new(name, &METRICS, {
        let batches = batches.clone();
        move || Ok(alternatives(&subject(level, load)?, load, batches))
    });
    for (name, batch) in batches {
        case = case.compare("time", name, SINGLE).goal(goal.filter(|_| batch == 32));
    }
    case.compare("cpu", "batches of 32", SINGLE)
}

fn fits(batch: usize, order: u8) -> bool {
    batch << order <= RUN_PAGES_MAX as usize
}

fn subject(level: Level, load: Load) -> Result<Rc<dyn Subject>, Unmeasured> {
    Ok(match level {
        Level::Index => Rc::new(Alone::new(load)?),
        Level::Path => Rc::new(Whole::new(load)?),
    })
}

fn alternatives(
    subject: &Rc<dyn Subject>,
    load: Load,
    batches: impl Iterator<Item = (&'static str, usize)>,
) -> Vec<Alternative> {
    let single = alternative(subject, load, SINGLE, |subject, thread| subject.one_at_a_time(thread));
    let batched = |(name, batch)| {
        alternative(subject, load, name, move |subject, thread| subject.in_batches(thread, batch))
    };
    std::iter::once(single).chain(batches.map(batched)).collect()
}

fn alternative(
    subject: &Rc<dyn Subject>,
    load: Load,
    name: &'static str,
    insert: impl Fn(&dyn Subject, usize) + Sync + 'static,
) -> Alternative {
    let subject = Rc::clone(subject);
    Alternative::new(name, move |_| {
        let subject: &dyn Subject = &*subject;
        let take_out = |thread| subject.take_out(thread);
        let spent = together(load.threads, load.rounds, |thread| insert(subject, thread), take_out);
        Ok(spent.each(load.threads * load.rounds * load.folios).to_vec())
    })
}

struct Alone {
    index: Index,
    load: Load,
}

impl Alone {
    fn new(load: Load) -> Result<Self, Unmeasured> {
        Ok(Self { index: Index::new(load.order, 128 << 20)?, load })
    }
}

impl Subject for Alone {
    fn one_at_a_time(&self, thread: usize) {
        let Self { index, load } = self;
        let (nodes, start) = (index.nodes(), load.range(thread).start);
        for count in 0..load.folios {
            let at = start + ((count as u64) << load.order);
            let lock = index.lock();
            let inserted = index.tree(&nodes, &lock).insert(at, load.order, made_up(count));
            assert!(matches!(inserted, Inserted::Done { .. }), "{inserted:?} at {at}");
        }
    }

    fn in_batches(&self, thread: usize, batch: usize) {
        let Self { index, load } = self;
        let (nodes, start) = (index.nodes(), load.range(thread).start);
        for count in (0..load.folios).step_by(batch) {
            let at = start + ((count as u64) << load.order);
            let folios = (count..count + batch).map(|count| (load.order, made_up(count)));
            let lock = index.lock();
            let added = index.tree(&nodes, &lock).insert_range(at, folios, |_, _| {});
            assert!(added.stop == RangeStop::All && added.added == batch, "{added:?} at {at}");
        }
    }

    fn take_out(&self, thread: usize) {
        self.index.erase(self.load.range(thread).start, self.load.range(thread).end);
    }
}

struct Whole {
    fixture: MappingFixture,
    load: Load,
    taken: Vec<Mutex<Vec<FillRun>>>,
}

impl Whole {
    fn new(load: Load) -> Result<Self, Unmeasured> {
        let pages = load.range(load.threads - 1).end;
        let fixture = MappingFixture::new(pages * 4096 + (64 << 20))?;
        Ok(Self { fixture, load, taken: (0..load.threads).map(|_| Mutex::default()).collect() })
    }

    /// Calls `insert` for each run of frames of a thread: the same runs, however they are inserted.
    fn each_run(&self, thread: usize, insert: impl Fn(FillRun)) {
        let run_pages = RUN_PAGES_MAX.min(256 << self.load.order);
        let mut taken = self.taken[thread].lock().expect("no thread panics while it holds the lock");
        for index in self.load.range(thread).step_by(run_pages as usize) {
            let run = self.fixture.take(index, run_pages);
            taken.push(run);
            insert(run);
        }
    }
}

impl Subject for Whole {
    fn one_at_a_time(&self, thread: usize) {
        let order = Order(self.load.order);
        self.each_run(thread, |run| {
            for page in (0..run.pages).step_by(order.pages() as usize) {
                let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
                let folio = NewFolio { index, frame, order };
                let added = self.fixture.mapping.add_folio(folio, InsertPurpose::Read, LockWait::Wait);
                assert!(matches!(added, AddedFolio::Added { .. }), "{added:?} of {folio:?}");
            }
        });
    }

    fn in_batches(&self, thread: usize, batch: usize) {
        let order = Order(self.load.order);
        let (shape, pages) = (FolioShape::of(Orders { min: order, max: order }), (batch as u32) << order.0);
        self.each_run(thread, |run| {
            for page in (0..run.pages).step_by(pages as usize) {
                let (index, frame) = (run.index.plus(u64::from(page)), run.frame.plus(page));
                let part = FillRun { index, frame, pages };
                let added = self.fixture.mapping.add_folio_range(part, shape, LockWait::Wait, &mut |_, _| {});
                assert!(added.is_some_and(|added| added.stop == RangeStop::All), "{added:?} of {part:?}");
            }
        });
    }

    fn take_out(&self, thread: usize) {
        let mut taken = self.taken[thread].lock().expect("no thread panics while it holds the lock");
        for run in taken.drain(..) {
            self.fixture.complete(run, Order(self.load.order));
            self.fixture.evict(run, Order(self.load.order));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_end_with_the_same_tree() {
        for order in [0, 4, 9] {
            let load = Load { order, threads: 1, folios: 512, rounds: 1 };
            let content = |insert: &dyn Fn(&Alone)| {
                let alone = Alone::new(load).expect("there is memory");
                insert(&alone);
                alone.index.content(0, load.range(0).end)
            };
            let single = content(&|alone| alone.one_at_a_time(0));
            assert_eq!(single.len(), load.folios);
            for (_, batch) in BATCHES {
                assert_eq!(content(&|alone| alone.in_batches(0, batch)), single);
            }
        }
    }

    #[test]
    fn the_whole_path_gives_everything_back() {
        for order in [0, 4] {
            let load = Load { order, threads: 2, folios: 512, rounds: 1 };
            let whole = Whole::new(load).expect("there is memory");
            let data = |whole: &Whole| {
                let stats = whole.fixture.arena.stats();
                stats.data_bytes - stats.free_pages * 4096
            };
            for batch in BATCHES.map(|(_, batch)| batch).into_iter().filter(|&batch| fits(batch, order)) {
                whole.one_at_a_time(0);
                whole.in_batches(1, batch);
                assert_eq!(data(&whole), load.range(1).end * 4096);
                whole.fixture.mapping.check().expect("the mapping is in order");
                (0..2).for_each(|thread| whole.take_out(thread));
                assert_eq!((data(&whole), whole.fixture.mapping.lock().pages()), (0, 0));
            }
        }
    }
}

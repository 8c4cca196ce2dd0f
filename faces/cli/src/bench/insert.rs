//! Insert: what does it cost to put a folio into the index, alone and in batches?
//!
//! ```text
//!   one at a time   lock - way down - store - unlock,   for each folio
//!   batches of n    lock - way down - store, store, .. step to the next node, store, .. - unlock
//! ```
//!
//! Each thread inserts a range of its own into one file's tree and so meets the
//! others at the lock only. Both sides take their folios from the same source,
//! in the same order, and end with the same tree, which is then emptied outside the
//! timing. The time of two threads is the elapsed time over the folios of both.
//!
//! The goals are those for pages: a folio of order 4 or 9 fills many slots, of
//! which no batch saves one, so these are reported without a goal.

use std::rc::Rc;

use quinion::xarray::{Inserted, Stop};

use super::harness::{Alternative, Case, Metric, Settings, Unmeasured};
use super::index::{Index, made_up};
use super::timing::together;

const ORDERS: [u8; 3] = [0, 4, 9];
const METRICS: [Metric; 2] = [Metric::cost("time", "ns/folio"), Metric::cost("cpu", "ns/folio")];
const BATCHES: [(&str, usize); 3] = [("batches of 8", 8), ("batches of 32", 32), ("batches of 256", 256)];
const SINGLE: &str = "one at a time";
/// What batches of 32 pages are wanted to be cheaper by, with one thread and with two.
const GOALS: [f64; 2] = [4.0, 5.0];

/// Orders, with one thread and with two.
pub fn cases(settings: &Settings) -> Vec<Case> {
    let folios = settings.pick(8 << 10, 64 << 10);
    let rounds = settings.pick(2, 4);
    let alone = ORDERS.into_iter().flat_map(|order| [1, 2].map(|threads| (order, threads)));
    alone.map(|(order, threads)| index_alone(Load { order, threads, folios, rounds })).collect()
}

/// Who inserts how much.
#[derive(Clone, Copy)]
struct Load {
    order: u8,
    threads: usize,
    /// Of each thread in each round.
    folios: usize,
    rounds: usize,
}

impl Load {
    /// The indices that are a thread's own.
    fn range(self, thread: usize) -> std::ops::Range<u64> {
        let pages = (self.folios as u64) << self.order;
        thread as u64 * pages..(thread as u64 + 1) * pages
    }
}

fn index_alone(load: Load) -> Case {
    let threads = if load.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", load.threads) };
    let name = format!("index alone, order {}, {threads}", load.order);
    let mut case = Case::new(name, &METRICS, move || prepare(load));
    for (name, folios) in BATCHES {
        let goal = (load.order == 0 && folios == 32).then_some(GOALS[load.threads - 1]);
        case = case.compare("time", name, SINGLE, goal);
    }
    case.compare("cpu", "batches of 32", SINGLE, None)
}

fn prepare(load: Load) -> Result<Vec<Alternative>, Unmeasured> {
    let index = Rc::new(Index::new(load.order, 128 << 20)?);
    let mut alternatives = vec![alternative(&index, load, SINGLE, one_at_a_time)];
    for (name, batch) in BATCHES {
        let insert = move |index: &Index, load, thread| in_batches(index, load, thread, batch);
        alternatives.push(alternative(&index, load, name, insert));
    }
    Ok(alternatives)
}

fn alternative(
    index: &Rc<Index>,
    load: Load,
    name: &'static str,
    insert: impl Fn(&Index, Load, usize) + Sync + 'static,
) -> Alternative {
    let index = Rc::clone(index);
    Alternative::new(name, move |_| {
        let index: &Index = &index;
        let erase = |thread| index.erase(load.range(thread).start, load.range(thread).end);
        let spent = together(load.threads, load.rounds, |thread| insert(index, load, thread), erase);
        Ok(spent.each(load.threads * load.rounds * load.folios).to_vec())
    })
}

fn one_at_a_time(index: &Index, load: Load, thread: usize) {
    let (nodes, start) = (index.nodes(), load.range(thread).start);
    for count in 0..load.folios {
        let at = start + ((count as u64) << load.order);
        let lock = index.lock();
        let inserted = index.tree(&nodes, &lock).insert(at, load.order, made_up(count));
        assert!(matches!(inserted, Inserted::Done { .. }), "{inserted:?} at {at}");
    }
}

fn in_batches(index: &Index, load: Load, thread: usize, batch: usize) {
    let (nodes, start) = (index.nodes(), load.range(thread).start);
    for count in (0..load.folios).step_by(batch) {
        let at = start + ((count as u64) << load.order);
        let folios = (count..count + batch).map(|count| (load.order, made_up(count)));
        let lock = index.lock();
        let added = index.tree(&nodes, &lock).insert_range(at, folios, |_, _| {});
        assert!(added.stop == Stop::All && added.added == batch, "{added:?} at {at}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_end_with_the_same_tree() {
        for order in ORDERS {
            let load = Load { order, threads: 1, folios: 512, rounds: 1 };
            let content = |insert: &dyn Fn(&Index)| {
                let index = Index::new(order, 32 << 20).expect("there is memory");
                insert(&index);
                index.content(0, load.range(0).end)
            };
            let single = content(&|index| one_at_a_time(index, load, 0));
            assert_eq!(single.len(), load.folios);
            for (_, batch) in BATCHES {
                assert_eq!(content(&|index| in_batches(index, load, 0, batch)), single);
            }
        }
    }
}

//! Split: what does it cost to insert where a shadow is, which may be larger?
//!
//! ```text
//!   single walk     insert              conflict, shadow, cut and store on one way down
//!   three walks     conflict check      first way down: is a folio there?
//!                   order lookup        second: how large is the shadow?
//!                   insert              third: the store, and the cut on its way
//! ```
//!
//! Both under one lock, a folio into each of many shadows, and with the same tree at the end. The allocator of the
//! nodes counts the descents. The three walks cut a larger shadow on the way to the store, and need no fourth: that
//! favours them. Where the shadow is as large as the folio nothing is cut.

use std::hint::black_box;
use std::rc::Rc;

use quinion::internals::xarray::{Inserted, Kind, NodeSlab, XArray};

use crate::fixtures::index::{Index, Nodes, made_up};
use crate::harness::timing::{Spent, alone};
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const PAIRS: [(u8, u8); 7] = [(0, 0), (0, 4), (0, 6), (0, 9), (4, 4), (4, 6), (4, 9)];
const METRICS: [Metric; 3] = [
    Metric::cost("time", "ns/insertion"),
    Metric::cost("cpu", "ns/insertion"),
    Metric::cost("descents", "per insertion"),
];
const SINGLE: &str = "single walk";
const NAIVE: &str = "three walks";

pub fn cases(settings: &Settings) -> Vec<Case> {
    let (shadows, rounds) = (settings.pick(1 << 10, 8 << 10), settings.pick(2, 4));
    let case = |(folio, shadow)| {
        let load = Load { folio, shadow, shadows, rounds };
        let name = format!("order {folio} into a shadow of order {shadow}");
        let case = Case::new(name, &METRICS, move || prepare(load));
        METRICS.iter().fold(case, |case, metric| case.compare(metric.name, SINGLE, NAIVE))
    };
    PAIRS.into_iter().map(case).collect()
}

#[derive(Clone, Copy)]
struct Load {
    folio: u8,
    shadow: u8,
    shadows: u64,
    rounds: usize,
}

impl Load {
    fn pages(self) -> u64 {
        self.shadows << self.shadow
    }

    /// Where the `n`th folio lies in its shadow: another place in each.
    fn place(self, n: u64) -> u64 {
        let hash = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let inside = hash.checked_shr(64 - u32::from(self.shadow)).unwrap_or(0);
        (n << self.shadow) + (inside >> self.folio << self.folio)
    }
}

type Tree<'n> = XArray<'n, Nodes<'n>>;
type Insert = fn(&mut Tree<'_>, &Nodes<'_>, NewFolio);

#[derive(Clone, Copy)]
struct NewFolio {
    index: u64,
    order: u8,
    folio: u32,
}

fn prepare(load: Load) -> Result<Vec<Alternative>, Unmeasured> {
    let index = Rc::new(Index::new(load.folio, 128 << 20)?);
    let alternative = |name, insert: Insert| {
        let index = Rc::clone(&index);
        Alternative::new(name, move |_| Ok(run(&index, load, insert)))
    };
    Ok(vec![alternative(SINGLE, single_walk), alternative(NAIVE, three_walks)])
}

fn run(index: &Index, load: Load, insert: Insert) -> Vec<f64> {
    let (mut spent, mut descents) = (Spent::default(), 0);
    for _ in 0..load.rounds {
        index.erase(0, load.pages());
        index.remember(0, load.pages(), load.shadow);
        let nodes = index.nodes();
        let lock = index.lock();
        let mut tree = index.tree(&nodes, &lock);
        let round = alone(|| {
            for n in 0..load.shadows {
                let new = NewFolio { index: load.place(n), order: load.folio, folio: made_up(n as usize) };
                insert(&mut tree, &nodes, new);
            }
        });
        spent.elapsed_ns += round.elapsed_ns;
        spent.cpu_ns += round.cpu_ns;
        descents += nodes.descents();
    }
    let insertions = load.shadows as usize * load.rounds;
    let [time, cpu] = spent.each(insertions);
    vec![time, cpu, descents as f64 / insertions as f64]
}

fn single_walk(tree: &mut Tree<'_>, _nodes: &Nodes<'_>, new: NewFolio) {
    let NewFolio { index, order, folio } = new;
    let inserted = tree.insert(index, order, folio);
    assert!(matches!(inserted, Inserted::Done { shadow: Some(_) }), "{inserted:?} at {index}");
}

fn three_walks(tree: &mut Tree<'_>, nodes: &Nodes<'_>, new: NewFolio) {
    let NewFolio { index, order, .. } = new;
    nodes.descended(); // the range counts none
    let mut there = tree.range(index, index + (1 << order) - 1);
    assert!(!there.any(|(_, entry, _)| matches!(entry.kind(), Kind::Folio(_))), "a folio at {index}");
    black_box(tree.order_at(index).expect("there is a shadow"));
    single_walk(tree, nodes, new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_end_with_the_same_tree_by_one_descent_and_by_three() {
        for (folio, shadow) in PAIRS {
            let load = Load { folio, shadow, shadows: 64, rounds: 1 };
            let after = |insert: Insert| {
                let index = Index::new(folio, 32 << 20).expect("there is memory");
                let descents = run(&index, load, insert)[2];
                (index.content(0, load.pages()), descents)
            };
            let ((single, one), (naive, three)) = (after(single_walk), after(three_walks));
            assert_eq!(single, naive, "order {folio} into {shadow}");
            assert_eq!((one, three), (1.0, 3.0), "order {folio} into {shadow}");
        }
    }
}

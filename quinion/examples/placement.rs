//! Placement: a cluster of nodes with a cache each, and where its reads go; a simulation.
//!
//! ```text
//!   Zipf over a million objects --> 100 nodes, each with an LRU of 2,000 --> misses are GETs of the store
//!
//!   any       a read goes to any node: its engine knows nothing of caches
//!   hash      it goes to the owner of its key on a ring of 128 points a node
//!   bounded   as hash, but a node that has 1.25 times its share of the last 10,000 reads passes it on to the next
//!   lost      as bounded, after a warm-up with a node more: what its loss costs
//! ```
//!
//! All objects are of one size. No node asks another: what a node has not, the store is asked for. It prints a line of
//! Markdown for each placement: misses, the load of the busiest node, and copies of what is cached. Run it by
//! `cargo run --release -p quinion --example placement`; its numbers are those of ARCHITECTURE.md, on any machine.

use std::collections::{BTreeMap, HashMap, HashSet};

const NODES: usize = 100;
const OBJECTS: usize = 1_000_000;
const NODE_OBJECTS: usize = 2_000;
const READS: usize = 4_000_000;
const POINTS: usize = 128;
const WINDOW_READS: usize = 10_000;
const LOAD_MAX: f64 = 1.25;
const SKEW: f64 = 0.9;

/// Numbers that are the same at each run (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Objects by rank: that of rank r is read in proportion to 1 / r^SKEW.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new() -> Self {
        let mut sum = 0.0;
        let shares = (1..=OBJECTS).map(|rank| {
            sum += (rank as f64).powf(-SKEW);
            sum
        });
        Self(shares.collect())
    }
    fn draw(&self, random: &mut Random) -> usize {
        let at = random.unit() * self.0[OBJECTS - 1];
        self.0.partition_point(|&share| share < at)
    }
}

/// A node's cache.
#[derive(Default)]
struct Lru {
    used: HashMap<usize, u64>,
    oldest: BTreeMap<u64, usize>,
}

impl Lru {
    /// Whether it was there; it is from now on.
    fn read(&mut self, object: usize, now: u64) -> bool {
        let before = self.used.insert(object, now);
        if let Some(before) = before {
            self.oldest.remove(&before);
        }
        self.oldest.insert(now, object);
        if self.used.len() > NODE_OBJECTS {
            let (_, evicted) = self.oldest.pop_first().expect("it is not empty");
            self.used.remove(&evicted);
        }
        before.is_some()
    }
}

/// The nodes on their ring.
struct Ring(Vec<(u64, usize)>);

impl Ring {
    fn new(nodes: usize) -> Self {
        let point = |at: usize| (mixed(mixed(at as u64 + 1)), at / POINTS);
        let mut points: Vec<_> = (0..nodes * POINTS).map(point).collect();
        points.sort_unstable();
        Self(points)
    }
    /// The nodes in the order in which they are asked for an object.
    fn nodes(&self, object: usize) -> impl Iterator<Item = usize> {
        let hash = mixed(object as u64 ^ 0x5bd1_e995);
        let first = self.0.partition_point(|&(point, _)| point < hash);
        (0..self.0.len()).map(move |step| self.0[(first + step) % self.0.len()].1)
    }
}

/// Where reads go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placement {
    Any,
    Hash,
    Bounded,
}

/// What came of a run, of its second half.
#[derive(Default)]
struct Counts {
    reads: u64,
    misses: u64,
    /// Reads of each node.
    loads: Vec<u64>,
}

struct Cluster {
    placement: Placement,
    ring: Ring,
    nodes: usize,
    caches: Vec<Lru>,
    window: Vec<usize>,
    random: Random,
    now: u64,
}

impl Cluster {
    fn new(placement: Placement, nodes: usize) -> Self {
        let caches = (0..nodes).map(|_| Lru::default()).collect();
        let (ring, random) = (Ring::new(nodes), Random(7));
        Self { placement, ring, nodes, caches, window: vec![0; nodes], random, now: 0 }
    }

    fn node_of(&mut self, object: usize) -> usize {
        let most = (LOAD_MAX * WINDOW_READS as f64 / self.nodes as f64) as usize;
        match self.placement {
            Placement::Any => (self.random.next() % self.nodes as u64) as usize,
            Placement::Hash => self.ring.nodes(object).next().expect("there are nodes"),
            Placement::Bounded => {
                let window = &self.window;
                self.ring
                    .nodes(object)
                    .find(|&node| window[node] < most)
                    .expect("not all have more than a share")
            }
        }
    }

    fn run(&mut self, zipf: &Zipf, reads: usize) -> Counts {
        let mut counts = Counts { loads: vec![0; self.nodes], ..Counts::default() };
        for _ in 0..reads {
            if self.now.is_multiple_of(WINDOW_READS as u64) {
                self.window.fill(0);
            }
            self.now += 1;
            let object = zipf.draw(&mut self.random);
            let node = self.node_of(object);
            self.window[node] += 1;
            counts.reads += 1;
            counts.loads[node] += 1;
            counts.misses += u64::from(!self.caches[node].read(object, self.now));
        }
        counts
    }

    /// The last node is lost, with its cache; keys of the others stay where they are.
    fn lose_one(&mut self) {
        self.nodes -= 1;
        self.caches.pop();
        self.window.pop();
        self.ring = Ring::new(self.nodes);
    }

    fn copies(&self) -> f64 {
        let all: usize = self.caches.iter().map(|cache| cache.used.len()).sum();
        let different: HashSet<_> = self.caches.iter().flat_map(|cache| cache.used.keys()).collect();
        all as f64 / different.len() as f64
    }
}

fn line(name: &str, counts: &Counts, cluster: &Cluster) {
    let share = counts.misses as f64 / counts.reads as f64 * 100.0;
    let mean = counts.reads as f64 / counts.loads.len() as f64;
    let busiest = *counts.loads.iter().max().expect("there are nodes") as f64 / mean;
    println!("| {name} | {share:.1} % | {busiest:.2} | {:.2} |", cluster.copies());
}

fn main() {
    let zipf = Zipf::new();
    println!("| placement | misses | load of the busiest node, in means | copies of a cached object |");
    println!("|---|---|---|---|");
    for (name, placement) in
        [("any", Placement::Any), ("hash", Placement::Hash), ("bounded", Placement::Bounded)]
    {
        let mut cluster = Cluster::new(placement, NODES);
        cluster.run(&zipf, READS / 2);
        let counts = cluster.run(&zipf, READS / 2);
        line(name, &counts, &cluster);
    }
    let mut cluster = Cluster::new(Placement::Bounded, NODES);
    cluster.run(&zipf, READS / 2);
    cluster.lose_one();
    let counts = cluster.run(&zipf, READS / 20);
    line("lost: the next 200,000 reads", &counts, &cluster);
}

//! Synthetic: traces that are made up, the same on every machine.
//!
//! ```text
//!   popular    7 of 10 references: page k of them 1 / k as often as the first (Zipf), and slowly others
//!   scan       pages that are read once, in runs
//!   loop       one file, again and again from end to end
//! ```
//!
//! The shares of the popular pages are sums and quotients, which every machine rounds alike (a power of one is exact).

use super::peers::spread;
use super::trace::Trace;
use crate::fixtures::places::Zipf;
use crate::harness::Extent;

pub const NAME: &str = "synthetic";

const POPULAR_PAGES: u64 = 20_000;
const LOOP_PAGES: u64 = 3_000;
/// Places that the popular pages are scattered over: half a GiB, a page in four of it popular at some time.
const PLACES: u64 = 1 << 17;
const DRIFT_EVERY: u64 = 50;
pub const SCAN_PAGES: u64 = 64;
/// Where the regions begin, in pages, far from each other.
pub const LOOP_AT: u64 = 1 << 30;
pub const SCAN_AT: u64 = 1 << 31;

pub fn trace(extent: Extent) -> Trace {
    let references = match extent {
        Extent::Quick => 100_000,
        Extent::Full => 1_000_000,
    };
    let popular = Zipf::new(POPULAR_PAGES, 1.0);
    let mut random = Random::new(1);
    let mut asked = Vec::with_capacity(references);
    let (mut drift, mut around, mut scanned) = (0, 0, 0);
    while asked.len() < references {
        match random.below(1000) {
            0..=989 if random.below(10) < 8 => {
                drift += 1;
                let rank = popular.rank(random.unit());
                asked.push(scattered(rank + drift / DRIFT_EVERY));
            }
            0..=989 => {
                asked.push(LOOP_AT + around % LOOP_PAGES);
                around += 1;
            }
            _ if random.below(5) == 0 => {
                asked.extend((0..SCAN_PAGES).map(|page| SCAN_AT + scanned + page));
                scanned += SCAN_PAGES;
            }
            _ => {}
        }
    }
    asked.truncate(references);
    Trace::new(NAME, &asked)
}

pub fn around(pages: u64, rounds: usize) -> Trace {
    let asked: Vec<u64> = (0..rounds).flat_map(|_| 0..pages).collect();
    Trace::new("loop", &asked)
}

/// The place of the popular page of this number: neighbours in popularity are none on the disk.
pub fn scattered(number: u64) -> u64 {
    spread(number % (4 * POPULAR_PAGES)) % PLACES
}

pub struct Random {
    state: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { state: spread(seed) }
    }
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(1);
        spread(self.state)
    }
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

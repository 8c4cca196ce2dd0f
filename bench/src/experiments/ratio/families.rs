//! Families: made-up workloads of one difficulty each, at sizes on both sides of it.
//!
//! | family | what is difficult |
//! |---|---|
//! | Zipf, as it is and drifting | how often a page is read tells more than when; and then less and less |
//! | Zipf with scans | what is read once pushes out what is read often |
//! | loops in random order | no stream is recognized, and a page comes back a little later than it is kept |
//! | two loops at once | one of them fits |
//! | Zipf with a loop | either takes the other's place |
//! | a moving window | the older a page, the sooner it is gone for good: recency is everything |
//! | phases | one after the other of Zipf, loop, Zipf elsewhere, moving window |
//!
//! Pages of different parts lie far from each other. Each family has its own pseudo-random numbers, and so the same
//! references in every run.

use std::rc::Rc;

use super::synthetic::{LOOP_AT, Random, SCAN_AT, SCAN_PAGES, scattered};
use super::trace::Trace;
use crate::fixtures::places::Zipf;
use crate::harness::Extent;

const POPULAR_PAGES: u64 = 20_000;
const SIDE_LOOP_PAGES: u64 = 6000;
const SIZES: [usize; 3] = [500, 2000, 5000];
/// The cache size, in pages, in which sizes of loops are given.
const LOOP_CACHE: usize = 4096;
const LOOP_ROUNDS: usize = 20;

#[derive(Clone)]
pub struct Family {
    pub name: String,
    pub caches: Vec<usize>,
    make: Rc<dyn Fn() -> Vec<u64>>,
}

impl Family {
    fn new(name: String, caches: &[usize], make: impl Fn() -> Vec<u64> + 'static) -> Self {
        Self { name, caches: caches.to_vec(), make: Rc::new(make) }
    }

    pub fn trace(&self) -> Trace {
        Trace::new(self.name.clone(), &(self.make)())
    }
}

pub fn all(extent: Extent) -> Vec<Family> {
    let count = match extent {
        Extent::Quick => 40_000,
        Extent::Full => 400_000,
    };
    let mut families = Vec::new();
    for exponent in [0.8, 1.0] {
        for every in [0, 400, 20] {
            let name = match every {
                0 => format!("Zipf {exponent}"),
                _ => format!("Zipf {exponent}, drift each {every}"),
            };
            families.push(Family::new(name, &SIZES, move || drifting(exponent, every, count)));
        }
        for tenths in [2, 5] {
            let name = format!("Zipf {exponent}, scans {tenths}0 %");
            families.push(Family::new(name, &SIZES, move || with_scans(exponent, tenths, count)));
        }
    }
    for caches in [0.9, 1.1, 1.25, 2.0, 5.0] {
        families.push(Family::new(format!("random loop of {caches}"), &[LOOP_CACHE], move || around(caches)));
    }
    for caches in [1.5, 3.0] {
        let name = format!("two loops of {caches}");
        families.push(Family::new(name, &[LOOP_CACHE], move || two_loops(caches, count)));
    }
    for percent in [20, 50] {
        let name = format!("Zipf 1, loop {percent} %");
        families.push(Family::new(name, &SIZES, move || with_a_loop(percent, count)));
    }
    for every in [count / 20, count / 4] {
        families.push(Family::new(format!("phases of {every}"), &SIZES, move || phases(every, 2 * count)));
    }
    for pages in [1000, 4000] {
        families.push(Family::new(format!("window of {pages}"), &SIZES, move || window(pages, count)));
    }
    families
}

/// References by a Zipf law; with each `every`th reference each rank belongs to the next page, with 0 never.
fn drifting(exponent: f64, every: u64, count: usize) -> Vec<u64> {
    let (zipf, mut random) = (Zipf::new(POPULAR_PAGES, exponent), Random::new(2));
    let moved = |at: u64| at.checked_div(every).unwrap_or(0);
    (0..count as u64).map(|at| scattered(zipf.rank(random.unit()) + moved(at))).collect()
}

/// References by a Zipf law, and `tenths` tenths of all references in runs over pages that are read once.
fn with_scans(exponent: f64, tenths: u64, count: usize) -> Vec<u64> {
    let (zipf, mut random) = (Zipf::new(POPULAR_PAGES, exponent), Random::new(3));
    let (mut asked, mut scanned) = (Vec::new(), SCAN_AT);
    while asked.len() < count {
        if random.below(10 * SCAN_PAGES) < 10 * tenths / (10 - tenths) {
            asked.extend(scanned..scanned + SCAN_PAGES);
            scanned += SCAN_PAGES;
        } else {
            asked.push(scattered(zipf.rank(random.unit())));
        }
    }
    asked
}

/// Round and round over as many pages as `caches` caches have, in one order that is random.
fn around(caches: f64) -> Vec<u64> {
    let mut random = Random::new(4);
    let mut order: Vec<u64> = (0..(LOOP_CACHE as f64 * caches) as u64).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    order.repeat(LOOP_ROUNDS)
}

/// Two loops, the second twice as long, of `caches` caches together; each reference is of either.
fn two_loops(caches: f64, count: usize) -> Vec<u64> {
    let mut random = Random::new(5);
    let short = (LOOP_CACHE as f64 * caches / 3.0) as u64;
    let mut at = [0, 0];
    let next = |_| {
        let which = random.below(2);
        let place = at[which as usize] % (short * (1 + which));
        at[which as usize] += 1;
        place + LOOP_AT * which
    };
    (0..count).map(next).collect()
}

/// References by a Zipf law, and `percent` % of the references round and round.
fn with_a_loop(percent: u64, count: usize) -> Vec<u64> {
    let (zipf, mut random) = (Zipf::new(POPULAR_PAGES, 1.0), Random::new(6));
    let mut around = 0;
    let next = |_| {
        if random.below(100) < percent {
            around += 1;
            LOOP_AT + around % SIDE_LOOP_PAGES
        } else {
            scattered(zipf.rank(random.unit()))
        }
    };
    (0..count).map(next).collect()
}

/// Zipf, a loop, Zipf elsewhere, a moving window; `every` references each, and from each four on elsewhere.
fn phases(every: usize, count: usize) -> Vec<u64> {
    let (zipf, mut random) = (Zipf::new(POPULAR_PAGES / 2, 0.9), Random::new(7));
    let (mut around, mut moved) = (0, 0);
    let next = |at: usize| {
        let elsewhere = POPULAR_PAGES / 2 * (at / every / 4) as u64;
        match at / every % 4 {
            0 => scattered(zipf.rank(random.unit()) + elsewhere),
            1 => {
                around += 1;
                LOOP_AT + around % SIDE_LOOP_PAGES
            }
            2 => scattered(zipf.rank(random.unit()) + elsewhere + POPULAR_PAGES * 3 / 2),
            _ => {
                moved += 1;
                let unit = random.unit();
                SCAN_AT + moved + (unit * unit * 3000.0) as u64
            }
        }
    };
    (0..count).map(next).collect()
}

/// Anywhere in a window of `pages` pages, which moves on by one with each second reference.
fn window(pages: u64, count: usize) -> Vec<u64> {
    let mut random = Random::new(8);
    (0..count as u64).map(|at| SCAN_AT + at / 2 + random.below(pages)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn unique(asked: &[u64]) -> usize {
        asked.iter().collect::<HashSet<_>>().len()
    }

    #[test]
    fn families_are_as_long_as_they_should_be_and_the_same_each_time() {
        for (one, other) in all(Extent::Quick).iter().zip(all(Extent::Quick)) {
            let asked = (one.make)();
            assert!(asked.len() >= 40_000 && asked == (other.make)(), "{}", one.name);
        }
    }

    #[test]
    fn each_family_reads_the_pattern_of_its_name() {
        let loops = around(1.25);
        assert_eq!((unique(&loops), loops.len()), (5120, 20 * 5120));
        assert_eq!(loops[..5120], loops[5120..2 * 5120]);
        assert!(!loops[..5120].is_sorted());
        let both = two_loops(1.5, 40_000);
        let second = both.iter().filter(|page| **page >= LOOP_AT).count();
        assert!(unique(&both) == 6144 && (19_500..20_500).contains(&second), "{second}");
        let scans = with_scans(1.0, 5, 40_000);
        let share = scans.iter().filter(|page| **page >= SCAN_AT).count() * 10 / scans.len();
        assert!((4..=5).contains(&share), "{share}");
        let moving = window(1000, 4000);
        assert!(moving[..2].iter().all(|page| *page < SCAN_AT + 1000));
        assert!(moving[3998..].iter().all(|page| (SCAN_AT + 1999..SCAN_AT + 3000).contains(page)));
        assert!(drifting(1.0, 20, 40_000) != drifting(1.0, 0, 40_000));
    }
}

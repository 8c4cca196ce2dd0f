//! Peers: the replacement policies of other caches, as published.
//!
//! | peer | source |
//! |---|---|
//! | FIFO, LRU | folklore |
//! | Linux | mm/vmscan.c, mm/workingset.c: two lists, a page active at its second read, refault distance |
//! | S3-FIFO | J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023; libCacheSim's defaults |
//! | W-TinyLFU | G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017 |
//! | W-TinyLFU, climbing | G. Einziger, O. Eytan, R. Friedman, B. Manes, "Adaptive Software Cache Management", 2018 |
//! | SIEVE | Y. Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024 |
//! | LIRS | S. Jiang, X. Zhang, SIGMETRICS 2002; a hundredth for pages that are not LIR, ghosts bounded to twice the cache |
//! | ARC | N. Megiddo, D. S. Modha, FAST 2003 |
//! | optimum | L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966 |
//!
//! Each policy gets one page number at a time and returns whether the page was cached. They are written here because no
//! one crate has them: Linux's lists, LIRS, ARC, a window that climbs and the optimum are in none that is linked here,
//! and foyer's crate, which has five of the others, needs a newer compiler than this workspace (the feature `peers`).
//! Where it is built, `published.rs` compares those five with the policies here.
//!
//! Invariant: no policy holds more pages than it was made for.

use std::collections::{BinaryHeap, VecDeque};

use super::lists::{Chain, Chains};

pub trait Simulated {
    /// References `page`, and returns whether it was cached. Most policies cache it then.
    fn ask(&mut self, page: u32) -> bool;
    fn held(&self) -> usize;
}

pub struct Fifo {
    pages_max: usize,
    queue: VecDeque<u32>,
    is_held: Vec<bool>,
}

impl Fifo {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        Self { pages_max, queue: VecDeque::new(), is_held: vec![false; unique] }
    }
}

impl Simulated for Fifo {
    fn ask(&mut self, page: u32) -> bool {
        if self.is_held[page as usize] {
            return true;
        }
        if self.queue.len() == self.pages_max {
            let oldest = self.queue.pop_front().expect("a full queue has an oldest");
            self.is_held[oldest as usize] = false;
        }
        self.queue.push_back(page);
        self.is_held[page as usize] = true;
        false
    }

    fn held(&self) -> usize {
        self.queue.len()
    }
}

pub struct Lru {
    pages_max: usize,
    chains: Chains<1>,
}

impl Lru {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        Self { pages_max, chains: Chains::new(unique) }
    }
}

impl Simulated for Lru {
    fn ask(&mut self, page: u32) -> bool {
        let is_hit = self.chains.of(page).is_some();
        if !is_hit && self.chains.len(0) == self.pages_max {
            self.chains.pop_oldest(0);
        }
        self.chains.put(0, page);
        is_hit
    }

    fn held(&self) -> usize {
        self.chains.len(0)
    }
}

const INACTIVE: Chain = 0;
const ACTIVE: Chain = 1;

/// Linux's two lists: a new page is inactive. Its second read makes it active, and so does a refault whose distance is
/// within the size of the active list. Shadows are not bounded.
pub struct Linux {
    pages_max: usize,
    chains: Chains<2>,
    referenced: Vec<bool>,
    age: u64,
    /// The age at which each page was evicted, plus one; 0 if it was not evicted.
    evicted: Vec<u64>,
}

impl Linux {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        let (referenced, evicted) = (vec![false; unique], vec![0; unique]);
        Self { pages_max, chains: Chains::new(unique), referenced, age: 0, evicted }
    }

    fn evict_one(&mut self) {
        if self.held() < self.pages_max {
            return;
        }
        while self.chains.len(INACTIVE) < self.chains.len(ACTIVE) || self.chains.len(INACTIVE) == 0 {
            let page = self.chains.pop_oldest(ACTIVE).expect("one of the two holds something");
            self.chains.put(INACTIVE, page);
        }
        let page = self.chains.pop_oldest(INACTIVE).expect("it was filled above");
        self.evicted[page as usize] = self.age + 1;
        self.age += 1;
    }
}

impl Simulated for Linux {
    fn ask(&mut self, page: u32) -> bool {
        let at = page as usize;
        match self.chains.of(page) {
            Some(INACTIVE) if self.referenced[at] => {
                self.chains.put(ACTIVE, page);
                self.referenced[at] = false;
                self.age += 1;
            }
            Some(_) => self.referenced[at] = true,
            None => {
                let shadow = std::mem::take(&mut self.evicted[at]);
                let is_recent = shadow > 0 && self.age - (shadow - 1) <= self.chains.len(ACTIVE) as u64;
                self.evict_one();
                self.age += u64::from(is_recent);
                self.chains.put(if is_recent { ACTIVE } else { INACTIVE }, page);
                self.referenced[at] = true;
                return false;
            }
        }
        true
    }

    fn held(&self) -> usize {
        self.chains.len(INACTIVE) + self.chains.len(ACTIVE)
    }
}

const SMALL: u8 = 1;
const MAIN: u8 = 2;

/// S3-FIFO as published: a small queue of a tenth, a main queue, and a ghost queue as long as the main one.
pub struct S3Fifo {
    pages_max: usize,
    small_max: usize,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghosts: VecDeque<(u32, u32)>,
    queue: Vec<u8>,
    reads: Vec<u8>,
    ghost: Vec<u32>,
    ghosts_made: u32,
    ghosts_alive: usize,
    has_evicted: bool,
}

/// Reads beyond the first that take a page from the small queue to the main one: libCacheSim's default.
const S3_MOVES_AT: u8 = 2;
const S3_READS_MAX: u8 = 3;

impl S3Fifo {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        Self {
            pages_max,
            small_max: (pages_max / 10).max(1),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: VecDeque::new(),
            queue: vec![0; unique],
            reads: vec![0; unique],
            ghost: vec![0; unique],
            ghosts_made: 0,
            ghosts_alive: 0,
            has_evicted: false,
        }
    }

    fn evict(&mut self) {
        self.has_evicted = true;
        let main_max = self.pages_max - self.small_max;
        while self.held() >= self.pages_max {
            if self.main.len() > main_max || self.small.is_empty() {
                self.evict_main();
            } else {
                self.evict_small();
            }
        }
    }

    fn evict_small(&mut self) {
        while let Some(page) = self.small.pop_front() {
            if self.reads[page as usize] >= S3_MOVES_AT {
                self.put_main(page, 0);
            } else {
                self.queue[page as usize] = 0;
                self.remember(page);
                return;
            }
        }
    }

    fn evict_main(&mut self) {
        while let Some(page) = self.main.pop_front() {
            let reads = self.reads[page as usize];
            if reads == 0 {
                self.queue[page as usize] = 0;
                return;
            }
            self.put_main(page, reads - 1);
        }
    }

    fn put_main(&mut self, page: u32, reads: u8) {
        self.main.push_back(page);
        self.queue[page as usize] = MAIN;
        self.reads[page as usize] = reads;
    }

    fn remember(&mut self, page: u32) {
        self.ghosts_made += 1;
        self.ghosts.push_back((page, self.ghosts_made));
        self.ghost[page as usize] = self.ghosts_made;
        self.ghosts_alive += 1;
        while self.ghosts_alive > self.pages_max - self.small_max {
            let (page, number) = self.ghosts.pop_front().expect("there are more than none");
            if self.ghost[page as usize] == number {
                self.ghost[page as usize] = 0;
                self.ghosts_alive -= 1;
            }
        }
    }
}

impl Simulated for S3Fifo {
    fn ask(&mut self, page: u32) -> bool {
        let at = page as usize;
        if self.queue[at] != 0 {
            self.reads[at] = (self.reads[at] + 1).min(S3_READS_MAX);
            return true;
        }
        let is_ghost = std::mem::take(&mut self.ghost[at]) != 0;
        self.ghosts_alive -= usize::from(is_ghost);
        self.evict();
        if is_ghost || (!self.has_evicted && self.small.len() >= self.small_max) {
            self.put_main(page, 0);
        } else {
            self.small.push_back(page);
            self.queue[at] = SMALL;
            self.reads[at] = 0;
        }
        false
    }

    fn held(&self) -> usize {
        self.small.len() + self.main.len()
    }
}

const RECENT: Chain = 0;
const FREQUENT: Chain = 1;
const RECENT_GHOSTS: Chain = 2;
const FREQUENT_GHOSTS: Chain = 3;

/// ARC: two lists by recency and by frequency, a ghost list of each, and a target that ghost hits move.
pub struct Arc {
    pages_max: usize,
    chains: Chains<4>,
    target: usize,
}

impl Arc {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        Self { pages_max, chains: Chains::new(unique), target: 0 }
    }

    /// Turns a page into a ghost: the paper's REPLACE.
    fn replace(&mut self, found: Option<Chain>) {
        let recent = self.chains.len(RECENT);
        let is_over = recent > self.target || (found == Some(FREQUENT_GHOSTS) && recent == self.target);
        let from = if recent > 0 && is_over || self.chains.len(FREQUENT) == 0 { RECENT } else { FREQUENT };
        if let Some(page) = self.chains.pop_oldest(from) {
            self.chains.put(from + 2, page);
        }
    }

    fn adapt(&mut self, found: Chain) {
        let [recent, frequent] = [RECENT_GHOSTS, FREQUENT_GHOSTS].map(|ghosts| self.chains.len(ghosts));
        self.target = match found {
            RECENT_GHOSTS => (self.target + (frequent / recent).max(1)).min(self.pages_max),
            _ => self.target.saturating_sub((recent / frequent).max(1)),
        };
    }

    /// Makes room for a page that is on no list: the paper's case IV.
    fn evict_one(&mut self) {
        let (recent, all) =
            (self.chains.len(RECENT), (0..4).map(|chain| self.chains.len(chain)).sum::<usize>());
        if recent + self.chains.len(RECENT_GHOSTS) == self.pages_max {
            if recent < self.pages_max {
                self.chains.pop_oldest(RECENT_GHOSTS);
                self.replace(None);
            } else {
                self.chains.pop_oldest(RECENT);
            }
        } else if all >= self.pages_max {
            if all == 2 * self.pages_max {
                self.chains.pop_oldest(FREQUENT_GHOSTS);
            }
            self.replace(None);
        }
    }
}

impl Simulated for Arc {
    fn ask(&mut self, page: u32) -> bool {
        match self.chains.of(page) {
            Some(RECENT | FREQUENT) => {
                self.chains.put(FREQUENT, page);
                true
            }
            Some(found) => {
                self.adapt(found);
                self.replace(Some(found));
                self.chains.put(FREQUENT, page);
                false
            }
            None => {
                self.evict_one();
                self.chains.put(RECENT, page);
                false
            }
        }
    }

    fn held(&self) -> usize {
        self.chains.len(RECENT) + self.chains.len(FREQUENT)
    }
}

/// SIEVE: one queue in the order of arrival, a bit for each page, and a hand that moves from old to young.
pub struct Sieve {
    pages_max: usize,
    chains: Chains<1>,
    visited: Vec<bool>,
    hand: Option<u32>,
}

impl Sieve {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        Self { pages_max, chains: Chains::new(unique), visited: vec![false; unique], hand: None }
    }

    fn evict_one(&mut self) {
        let mut page = self.hand.or_else(|| self.chains.oldest(0)).expect("a full queue has an oldest");
        while std::mem::take(&mut self.visited[page as usize]) {
            page = self.chains.younger(0, page).or_else(|| self.chains.oldest(0)).expect("it is not empty");
        }
        self.hand = self.chains.younger(0, page);
        self.chains.remove(page);
    }
}

impl Simulated for Sieve {
    fn ask(&mut self, page: u32) -> bool {
        if self.chains.of(page).is_some() {
            self.visited[page as usize] = true;
            return true;
        }
        if self.held() == self.pages_max {
            self.evict_one();
        }
        self.chains.put(0, page);
        false
    }

    fn held(&self) -> usize {
        self.chains.len(0)
    }
}

/// LIRS: pages of which the last two references lie close together (LIR) fill all but a hundredth of the cache; others
/// pass through a queue. The stack has the LIR pages and all referenced since the oldest of them.
pub struct Lirs {
    pages_max: usize,
    lir_max: usize,
    stack: Chains<1>,
    queue: Chains<1>,
    /// Pages on the stack that are not cached, the oldest first.
    gone: Chains<1>,
    is_lir: Vec<bool>,
    is_held: Vec<bool>,
    lir: usize,
    held: usize,
}

/// Pages on the stack that are not cached, for each one that is.
const LIRS_GHOSTS: usize = 2;

impl Lirs {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        Self {
            pages_max,
            lir_max: pages_max - (pages_max / 100).max(1),
            stack: Chains::new(unique),
            queue: Chains::new(unique),
            gone: Chains::new(unique),
            is_lir: vec![false; unique],
            is_held: vec![false; unique],
            lir: 0,
            held: 0,
        }
    }

    /// Takes pages off the stack's bottom until one is LIR.
    fn prune(&mut self) {
        while let Some(page) = self.stack.oldest(0) {
            if self.is_lir[page as usize] {
                break;
            }
            self.stack.remove(page);
            self.gone.remove(page);
        }
    }

    /// The oldest LIR page becomes one of the others.
    fn demote(&mut self) {
        let bottom = self.stack.pop_oldest(0).expect("there are LIR pages");
        self.is_lir[bottom as usize] = false;
        self.lir -= 1;
        self.queue.put(0, bottom);
        self.prune();
    }

    fn evict_one(&mut self) {
        if self.held < self.pages_max {
            return;
        }
        if self.queue.len(0) == 0 {
            self.demote();
        }
        let page = self.queue.pop_oldest(0).expect("it was filled above");
        self.is_held[page as usize] = false;
        self.held -= 1;
        if self.stack.of(page).is_some() {
            self.gone.put(0, page);
        }
        if self.gone.len(0) > LIRS_GHOSTS * self.pages_max {
            let oldest = self.gone.pop_oldest(0).expect("there are more than none");
            self.stack.remove(oldest);
        }
    }

    fn make_lir(&mut self, page: u32) {
        self.is_lir[page as usize] = true;
        self.lir += 1;
        self.queue.remove(page);
        if self.lir > self.lir_max {
            self.demote();
        }
    }
}

impl Simulated for Lirs {
    fn ask(&mut self, page: u32) -> bool {
        let at = page as usize;
        if self.is_lir[at] {
            self.stack.put(0, page);
            self.prune();
            return true;
        }
        let is_hit = self.is_held[at];
        if !is_hit {
            self.evict_one();
            self.is_held[at] = true;
            self.held += 1;
            self.gone.remove(page);
        }
        let was_recent = self.stack.of(page).is_some();
        self.stack.put(0, page);
        if was_recent || self.lir < self.lir_max {
            self.make_lir(page);
        } else {
            self.queue.put(0, page);
        }
        is_hit
    }

    fn held(&self) -> usize {
        self.held
    }
}

const WINDOW: Chain = 0;
const PROBATION: Chain = 1;
const PROTECTED: Chain = 2;

/// W-TinyLFU: a window of 1 %, and behind it a segmented LRU. That admits a page only if the page was referenced more
/// often, lately, than the page that it would replace.
pub struct TinyLfu {
    pages_max: usize,
    window_max: usize,
    protected_max: usize,
    chains: Chains<3>,
    sketch: Sketch,
    climber: Option<Climber>,
}

impl TinyLfu {
    pub fn new(unique: usize, pages_max: usize) -> Self {
        let mut made = Self {
            pages_max,
            window_max: 0,
            protected_max: 0,
            chains: Chains::new(unique),
            sketch: Sketch::new(pages_max),
            climber: None,
        };
        made.set_window((pages_max / 100).max(1));
        made
    }

    /// One whose window follows its hits.
    pub fn climbing(unique: usize, pages_max: usize) -> Self {
        Self { climber: Some(Climber::new(pages_max)), ..Self::new(unique, pages_max) }
    }

    fn set_window(&mut self, pages: usize) {
        self.window_max = pages;
        self.protected_max = (self.pages_max - pages) * 8 / 10;
    }

    /// Changes the window by so many pages. A larger one takes the oldest of the rest, of a smaller one the oldest
    /// go on to probation: nothing is evicted for it.
    fn move_window(&mut self, pages: f64) {
        let largest = (self.pages_max * 8 / 10).max(1);
        self.set_window((self.window_max as f64 + pages).round().clamp(1.0, largest as f64) as usize);
        while self.chains.len(PROTECTED) > self.protected_max {
            let oldest = self.chains.pop_oldest(PROTECTED).expect("it holds more than none");
            self.chains.put(PROBATION, oldest);
        }
        while self.held() == self.pages_max && self.chains.len(WINDOW) < self.window_max {
            let from = if self.chains.len(PROBATION) > 0 { PROBATION } else { PROTECTED };
            let Some(oldest) = self.chains.pop_oldest(from) else { break };
            self.chains.put(WINDOW, oldest);
        }
        while self.chains.len(WINDOW) > self.window_max {
            let oldest = self.chains.pop_oldest(WINDOW).expect("it holds more than none");
            self.chains.put(PROBATION, oldest);
        }
    }

    /// Shrinks the window to its size. Its oldest page moves on to probation, or is evicted, or replaces another page
    /// there.
    fn settle(&mut self) {
        while self.chains.len(WINDOW) > self.window_max {
            let candidate = self.chains.pop_oldest(WINDOW).expect("it holds more than none");
            if self.held() < self.pages_max {
                self.chains.put(PROBATION, candidate);
                continue;
            }
            let from = if self.chains.len(PROBATION) > 0 { PROBATION } else { PROTECTED };
            let Some(victim) = self.chains.oldest(from) else { continue };
            if self.sketch.count(candidate) > self.sketch.count(victim) {
                self.chains.pop_oldest(from);
                self.chains.put(PROBATION, candidate);
            }
        }
    }
}

impl Simulated for TinyLfu {
    fn ask(&mut self, page: u32) -> bool {
        self.sketch.add(page);
        let is_hit = self.find_or_put(page);
        if let Some(pages) = self.climber.as_mut().and_then(|climber| climber.note(is_hit)) {
            self.move_window(pages);
        }
        is_hit
    }

    fn held(&self) -> usize {
        (0..3).map(|chain| self.chains.len(chain)).sum()
    }
}

impl TinyLfu {
    fn find_or_put(&mut self, page: u32) -> bool {
        match self.chains.of(page) {
            Some(PROBATION) => {
                self.chains.put(PROTECTED, page);
                if self.chains.len(PROTECTED) > self.protected_max {
                    let oldest = self.chains.pop_oldest(PROTECTED).expect("it holds more than none");
                    self.chains.put(PROBATION, oldest);
                }
                true
            }
            Some(chain) => {
                self.chains.put(chain, page);
                true
            }
            None => {
                self.chains.put(WINDOW, page);
                self.settle();
                false
            }
        }
    }
}

/// A hill climber on the hits of samples: it goes on in its direction while they become more, and turns when they
/// become fewer, by ever smaller steps; a large change of the hits makes the step large again.
struct Climber {
    sample: usize,
    references: usize,
    hits: usize,
    before: Option<f64>,
    step_max: f64,
    step: f64,
}

impl Climber {
    const SAMPLE_SHARE: usize = 10;
    const STEP_SHARE: f64 = 0.0625;
    const STEP_DECAY: f64 = 0.98;
    const LARGE_CHANGE: f64 = 0.05;

    fn new(pages_max: usize) -> Self {
        let step_max = pages_max as f64 * Self::STEP_SHARE;
        Self {
            sample: pages_max * Self::SAMPLE_SHARE,
            references: 0,
            hits: 0,
            before: None,
            step_max,
            step: step_max,
        }
    }

    /// Counts a reference; at the end of a sample, by how many pages the window is to change.
    fn note(&mut self, is_hit: bool) -> Option<f64> {
        self.references += 1;
        self.hits += usize::from(is_hit);
        if self.references < self.sample {
            return None;
        }
        let now = self.hits as f64 / self.references as f64;
        (self.references, self.hits) = (0, 0);
        let change = now - self.before.replace(now).unwrap_or(now);
        let towards = if change >= 0.0 { self.step } else { -self.step };
        let is_large = change.abs() >= Self::LARGE_CHANGE;
        self.step = if is_large { self.step_max.copysign(towards) } else { towards * Self::STEP_DECAY };
        Some(towards)
    }
}

/// A count-min sketch: four rows of counters up to 15, all halved after as many additions as ten times the cache's
/// size.
struct Sketch {
    counters: Vec<[u8; ROWS]>,
    mask: u64,
    added: usize,
    added_max: usize,
}

const ROWS: usize = 4;
const COUNT_MAX: u8 = 15;
/// Counters for each page of the cache, and additions for each until all are halved.
const SKETCH_SHARE: usize = 8;
const SAMPLE_SHARE: usize = 10;

impl Sketch {
    fn new(pages_max: usize) -> Self {
        let width = (pages_max * SKETCH_SHARE).next_power_of_two();
        Self {
            counters: vec![[0; ROWS]; width],
            mask: width as u64 - 1,
            added: 0,
            added_max: pages_max * SAMPLE_SHARE,
        }
    }

    fn places(&self, page: u32) -> [usize; ROWS] {
        let hash = spread(u64::from(page) + 1);
        std::array::from_fn(|row| (hash.rotate_left(16 * row as u32) & self.mask) as usize)
    }

    fn count(&self, page: u32) -> u8 {
        let places = self.places(page);
        (0..ROWS).map(|row| self.counters[places[row]][row]).min().expect("there are rows")
    }

    fn add(&mut self, page: u32) {
        let places = self.places(page);
        let mut is_added = false;
        for (row, place) in places.into_iter().enumerate() {
            let counter = &mut self.counters[place][row];
            is_added |= *counter < COUNT_MAX;
            *counter = (*counter + 1).min(COUNT_MAX);
        }
        self.added += usize::from(is_added);
        if self.added == self.added_max {
            self.counters.iter_mut().flatten().for_each(|counter| *counter /= 2);
            self.added /= 2;
        }
    }
}

/// A number's bits spread over all 64: the last steps of splitmix64.
pub fn spread(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The most hits that a cache of `pages_max` pages can have: it evicts the page whose next reference is the latest. It
/// may decline to cache a page, since each policy here may evict a page at once.
pub fn optimum(references: &[u32], unique: usize, pages_max: usize) -> u64 {
    const NEVER: u32 = u32::MAX;
    let mut next = vec![NEVER; references.len()];
    let mut last = vec![NEVER; unique];
    for (at, page) in references.iter().enumerate().rev() {
        next[at] = last[*page as usize];
        last[*page as usize] = at as u32;
    }
    // The page whose next reference is the latest is on top; outdated entries stay and are skipped.
    let mut heap: BinaryHeap<(u32, u32)> = BinaryHeap::new();
    let mut due = vec![0_u32; unique];
    let mut is_held = vec![false; unique];
    let (mut held, mut hits) = (0, 0);
    for (at, page) in references.iter().enumerate() {
        let page_at = *page as usize;
        hits += u64::from(is_held[page_at]);
        held += usize::from(!is_held[page_at]);
        is_held[page_at] = true;
        due[page_at] = next[at];
        heap.push((next[at], *page));
        while held > pages_max {
            let (when, victim) = heap.pop().expect("what is held is in the heap");
            if is_held[victim as usize] && due[victim as usize] == when {
                is_held[victim as usize] = false;
                held -= 1;
            }
        }
    }
    hits
}

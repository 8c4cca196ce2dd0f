//! Curve: the share of reads that would miss in a cache of any size, from a sample of the pages.
//!
//! In an LRU cache a page is still there when it is read again exactly if the different pages read in between, and
//! itself, fit: its **reuse distance**. So one pass over all reads, with a histogram of distances, tells the misses at
//! every size at once. Too dear for all pages; but pages chosen by a hash of their place behave like the rest, and so:
//!
//! ```text
//!   read of a page --> hash < threshold?  no: that was all         (one in 1000 or so: yes)
//!                        |
//!                      lock: distance among the samples, / rate    histogram += 1 / rate
//!                        |
//!                      more samples than SAMPLES_MAX? the one of the largest hash goes,
//!                      and the threshold falls to it               rate = threshold / 2^64
//! ```
//!
//! Every read of a sampled page is seen, and none of the others. A distance of d different samples stands for d / rate
//! pages, and one read seen for 1 / rate reads. The threshold only falls: a page that is no sample stays none.
//!
//! Distances come from a row of 0s and 1s, with a 1 where some sample was read last, over which a Fenwick tree counts.
//!
//! The sample's excess or lack of reads, by hash and chance, is known, since all reads are counted. It is credited to
//! the smallest distance, since sampling errs most on hot pages (the paper's SHARDS-adj).
//!
//! Invariants:
//!  1. At most `samples_max` samples, so memory is bounded, for any reads and any time.
//!  2. Every sample has a hash below the threshold, and one 1 in the row.
//!
//! Not an invariant: that the cache does as the curve says. It is the curve of an LRU of single pages
//! without readahead; a policy that does better than LRU lies below it.
//!
//! Cost: a hash for each page read; for a sampled one some hundred nanoseconds under a lock.
//!
//! Source: Waldspurger, Park, Garthwaite, Ahmad: Efficient MRC construction with SHARDS, FAST 2015. This differs: each
//! read is weighted when it is seen, so that nothing is rescaled when the rate falls.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::units::{MappingId, PAGE_SIZE, PageIndex};

/// Pages that are followed at a time.
pub const SAMPLES_MAX: usize = 8192;
/// Places of the row for each sample.
const ROW: usize = 4;

/// log2 of the classes of distance in each octave; distances below twice as many are told exactly.
const CLASS_BITS: u32 = 5;
const CLASSES: usize = ((u64::BITS - CLASS_BITS) as usize + 1) << CLASS_BITS;

/// Follows a sample of the pages that are read. Shared by all threads.
#[derive(Debug)]
pub struct Sampler {
    /// A page is a sample if its hash is below. Only falls, under the lock.
    threshold: AtomicU64,
    samples: Mutex<Samples>,
}

#[derive(Debug)]
struct Samples {
    samples_max: usize,
    threshold: u64,
    /// The place of each page's last read in the row, by the page's hash.
    last: BTreeMap<u64, u32>,
    row: FenwickTree,
    seen: Histogram,
}

/// Reads by reuse distance, each weighted with the reads it stands for.
#[derive(Clone, Debug)]
struct Histogram {
    /// Reads again, by class of distance.
    again: Box<[f64]>,
    /// Reads of pages that had not been read before.
    first: f64,
}

#[derive(Debug)]
struct FenwickTree {
    sums: Box<[u32]>,
    next: u32,
    ones: u32,
}

impl FenwickTree {
    fn new(places: usize) -> Self {
        Self { sums: vec![0; places + 1].into(), next: 0, ones: 0 }
    }

    fn is_full(&self) -> bool {
        self.next as usize + 1 == self.sums.len()
    }

    /// A 1 at the next place, which is returned.
    fn push(&mut self) -> u32 {
        let place = self.next;
        self.next += 1;
        self.ones += 1;
        self.change(place, 1);
        place
    }

    fn clear(&mut self, place: u32) {
        self.ones -= 1;
        self.change(place, u32::MAX);
    }

    fn change(&mut self, place: u32, by: u32) {
        let mut at = place as usize + 1;
        while at < self.sums.len() {
            self.sums[at] = self.sums[at].wrapping_add(by);
            at += at & at.wrapping_neg();
        }
    }

    fn ones_behind(&self, place: u32) -> u32 {
        let (mut at, mut up_to) = (place as usize + 1, 0u32);
        while at > 0 {
            up_to = up_to.wrapping_add(self.sums[at]);
            at &= at - 1;
        }
        self.ones - up_to
    }

    fn reset(&mut self) {
        self.sums.fill(0);
        (self.next, self.ones) = (0, 0);
    }
}

impl Samples {
    fn add(&mut self, hash: u64) {
        if hash >= self.threshold {
            return; // it fell meanwhile
        }
        if self.row.is_full() {
            self.move_together();
        }
        let weight = 2f64.powi(64) / self.threshold as f64;
        let place = self.row.next;
        match self.last.insert(hash, place) {
            Some(before) => {
                let between = self.row.ones_behind(before);
                self.row.clear(before);
                self.seen.again[class_of((f64::from(between) * weight) as u64 + 1)] += weight;
            }
            None => self.seen.first += weight,
        }
        self.row.push();
        self.drop_excess_samples();
    }

    fn drop_excess_samples(&mut self) {
        while self.last.len() > self.samples_max
            && let Some((hash, place)) = self.last.pop_last()
        {
            self.row.clear(place);
            self.threshold = hash;
        }
    }

    fn move_together(&mut self) {
        let mut places: Vec<&mut u32> = self.last.values_mut().collect();
        places.sort_unstable();
        self.row.reset();
        places.into_iter().for_each(|place| *place = self.row.push());
    }
}

impl Default for Sampler {
    fn default() -> Self {
        Self::new(SAMPLES_MAX)
    }
}

impl Sampler {
    /// Follows at most `samples_max` pages (at least 1) at a time; every page, as long as these are all.
    pub fn new(samples_max: usize) -> Self {
        let samples = Samples {
            samples_max,
            threshold: u64::MAX,
            last: BTreeMap::new(),
            row: FenwickTree::new(samples_max.max(1) * ROW),
            seen: Histogram { again: vec![0.0; CLASSES].into(), first: 0.0 },
        };
        Self { threshold: AtomicU64::new(u64::MAX), samples: Mutex::new(samples) }
    }

    /// `pages` pages of a mapping were read, from `first` on. Takes the lock for each that is a sample.
    pub fn note(&self, mapping: MappingId, first: PageIndex, pages: u64) {
        for page in 0..pages {
            let hash = hash_of(mapping, first.plus(page));
            // Relaxed: an old threshold is a larger one, and the samples it admits are checked under the lock.
            if hash < self.threshold.load(Ordering::Relaxed) {
                self.note_sample(hash);
            }
        }
    }

    #[cold]
    fn note_sample(&self, hash: u64) {
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.add(hash);
        self.threshold.store(samples.threshold, Ordering::Relaxed);
    }

    /// The curve so far, of `reads` page reads in all. Copies the histogram under the lock.
    pub fn curve(&self, reads: u64) -> MissRatioCurve {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = samples.threshold as f64 / 2f64.powi(64);
        MissRatioCurve { reads, seen: samples.seen.clone(), rate, samples: samples.last.len() }
    }
}

/// The class of a distance of at least 1: itself below 64, then one of 32 in each octave.
fn class_of(distance: u64) -> usize {
    let shift = (u64::BITS - distance.leading_zeros()).saturating_sub(CLASS_BITS + 1);
    ((shift << CLASS_BITS) as u64 + (distance >> shift)) as usize
}

/// The least distance of a class; that of the class behind the last is more than there can be.
fn least_of(class: usize) -> f64 {
    let octave = (class >> CLASS_BITS).saturating_sub(1) as i32;
    (class - ((octave as usize) << CLASS_BITS)) as f64 * 2f64.powi(octave)
}

/// The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), twice.
fn hash_of(mapping: MappingId, page: PageIndex) -> u64 {
    let mix = |mut z: u64| {
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    mix(page.0 ^ mix(u64::from(mapping.0).wrapping_add(0x9e37_79b9_7f4a_7c15)))
}

/// Which share of page reads would miss in an LRU cache of any size; see
/// [`Cache::miss_ratio_curve`](crate::Cache::miss_ratio_curve).
#[derive(Clone, Debug)]
pub struct MissRatioCurve {
    reads: u64,
    seen: Histogram,
    rate: f64,
    samples: usize,
}

impl MissRatioCurve {
    /// The share of page reads, 0 to 1, that would miss in a cache that has room for `bytes` bytes of data; NaN if
    /// nothing was read. First reads of a page always miss. Cost: some thousand additions.
    pub fn at(&self, bytes: u64) -> f64 {
        let pages = (bytes / PAGE_SIZE as u64) as f64;
        let beyond: f64 = (0..CLASSES).map(|class| self.seen.again[class] * share_beyond(class, pages)).sum();
        let missed = if pages < 1.0 { self.reads as f64 } else { self.seen.first + beyond };
        (missed / self.reads as f64).clamp(0.0, 1.0)
    }

    /// Sizes in bytes, each with its [`MissRatioCurve::at`], from a page to where more memory would not help any
    /// more: where the curve bends, 32 in each octave.
    pub fn points(&self) -> Vec<(u64, f64)> {
        let last = self.seen.again.iter().rposition(|&weight| weight > 0.0).unwrap_or(0);
        let sizes = (1..=last + 1).map(|class| (least_of(class) as u64).saturating_mul(PAGE_SIZE as u64));
        sizes.map(|bytes| (bytes, self.at(bytes))).collect()
    }

    /// Page reads that it is of: each call counts once for each page that it read of.
    pub fn reads(&self) -> u64 {
        self.reads
    }

    /// The share of pages that are followed now, and how many these are: the sample behind the curve.
    pub fn sampled(&self) -> (f64, usize) {
        (self.rate, self.samples)
    }

    /// The curve of the reads since `before` was taken of the same cache: of the last hour, not of the whole life.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut seen = self.seen.clone();
        seen.first = (seen.first - before.seen.first).max(0.0);
        for (now, before) in seen.again.iter_mut().zip(&before.seen.again) {
            *now = (*now - before).max(0.0);
        }
        Self { reads: self.reads.saturating_sub(before.reads), seen, rate: self.rate, samples: self.samples }
    }
}

/// How much of a class lies at distances of more than `pages`, which miss; within a class they lie evenly.
fn share_beyond(class: usize, pages: f64) -> f64 {
    let (least, next) = (least_of(class), least_of(class + 1));
    // The distances of the class are least..=next - 1, and those up to `pages` are hits.
    ((next - 1.0 - pages) / (next - least)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const FILE: MappingId = MappingId(7);

    fn naive_misses(trace: &[u64], size: usize) -> u64 {
        let (mut by_time, mut last, mut misses) = (BTreeMap::new(), HashMap::new(), 0);
        for (now, &page) in trace.iter().enumerate() {
            match last.insert(page, now) {
                Some(before) => drop(by_time.remove(&before)),
                None => misses += 1,
            }
            by_time.insert(now, page);
            if by_time.len() > size {
                let (_, oldest) = by_time.pop_first().expect("it is not empty");
                last.remove(&oldest);
            }
        }
        misses
    }

    fn curve_of(trace: &[u64], samples_max: usize) -> MissRatioCurve {
        let sampler = Sampler::new(samples_max);
        trace.iter().for_each(|&page| sampler.note(FILE, PageIndex(page), 1));
        let samples = sampler.samples.lock().unwrap();
        assert!(samples.last.len() <= samples_max, "memory is bounded");
        assert_eq!(samples.row.sums.len(), samples_max * ROW + 1);
        assert_eq!(samples.last.len(), samples.row.ones as usize);
        assert!(samples.last.keys().all(|&hash| hash < samples.threshold));
        drop(samples);
        sampler.curve(trace.len() as u64)
    }

    fn random(seed: u64) -> impl FnMut() -> f64 {
        let mut at = 0;
        move || {
            at += 1;
            hash_of(MappingId(seed as u32), PageIndex(at)) as f64 / 2f64.powi(64)
        }
    }

    fn zipf(pages: usize, reads: usize, seed: u64) -> Vec<u64> {
        let mut sums: Vec<f64> = Vec::with_capacity(pages);
        (1..=pages).for_each(|rank| sums.push(sums.last().unwrap_or(&0.0) + 1.0 / rank as f64));
        let mut random = random(seed);
        let total = *sums.last().expect("there are pages");
        let mut place = || random() * total;
        let rank = |place: f64| sums.partition_point(|&sum| sum < place) as u64;
        (0..reads).map(|_| rank(place())).collect()
    }

    fn uniform(pages: u64, reads: usize, seed: u64) -> Vec<u64> {
        let mut random = random(seed);
        (0..reads).map(|_| (random() * pages as f64) as u64).collect()
    }

    fn differences(trace: &[u64], curve: &MissRatioCurve, pages: u64) -> Vec<f64> {
        let sizes = (1..=6).map(|part| pages * part / 6 + part % 3);
        let truth = |size: u64| naive_misses(trace, size as usize) as f64 / trace.len() as f64;
        sizes.map(|size| (curve.at(size * 4096) - truth(size)).abs()).collect()
    }

    #[test]
    fn a_sampled_curve_is_near_the_truth_on_zipf_and_uniform_reads() {
        let pages = 40_000;
        for seed in 1..3 {
            for (name, trace) in
                [("zipf", zipf(pages, 120_000, seed)), ("uniform", uniform(pages as u64, 120_000, seed))]
            {
                let curve = curve_of(&trace, SAMPLES_MAX);
                assert!(curve.sampled().0 < 0.5, "{name}: it is a sample: {:?}", curve.sampled());
                let differences = differences(&trace, &curve, pages as u64);
                assert!(differences.iter().all(|&d| d < 0.02), "{name}, seed {seed}: {differences:?}");
            }
        }
    }

    #[test]
    fn a_sampled_loop_misses_below_its_length_and_hits_above() {
        let pages = 50_000;
        let trace: Vec<u64> = (0..300_000).map(|read| read % pages).collect();
        let curve = curve_of(&trace, SAMPLES_MAX);
        assert!(curve.sampled().0 < 0.25);
        let first = 1.0 / 6.0;
        for (size, truth) in [(1, 1.0), (pages / 2, 1.0), (pages * 94 / 100, 1.0), (pages * 106 / 100, first)]
        {
            let (told, naive) =
                (curve.at(size * 4096), naive_misses(&trace, size as usize) as f64 / 300_000.0);
            assert!((naive - truth).abs() < 1e-6, "{size}: {naive}");
            assert!((told - truth).abs() < 0.02, "{size}: {told}, not {truth}");
        }
    }

    #[test]
    fn since_tells_the_one_time_from_the_other() {
        let sampler = Sampler::new(1000);
        let mut reads = 0;
        let mut read = |trace: &[u64]| {
            trace.iter().for_each(|&page| sampler.note(FILE, PageIndex(page), 1));
            reads += trace.len() as u64;
            sampler.curve(reads)
        };
        let small: Vec<u64> = (0..20_000).map(|read| read % 100).collect();
        let large: Vec<u64> = (0..20_000).map(|read| read % 600).collect();
        read(&large);
        let before = read(&small);
        let later = read(&large).since(&before);
        assert_eq!(later.reads(), 20_000);
        assert!(later.at(300 * 4096) > 0.98 && later.at(700 * 4096) < 0.02, "as if nothing had been before");
        assert!(before.at(300 * 4096) < 0.6);
    }

    #[test]
    fn classes_are_exact_where_small_and_fine_where_large() {
        for distance in (1..5000).chain([1 << 40, (1 << 40) + 1, u64::MAX]) {
            let class = class_of(distance);
            assert!(class < CLASSES);
            assert!(least_of(class) <= distance as f64, "{distance}");
            assert!(distance as f64 <= least_of(class + 1), "{distance}");
            assert!(distance >= 64 || least_of(class) == distance as f64, "{distance}");
            assert!(least_of(class + 1) - least_of(class) <= (distance as f64 / 32.0).max(1.0));
        }
    }

    #[test]
    fn no_read_is_no_ratio_and_no_memory_is_no_hit() {
        let sampler = Sampler::default();
        assert!(sampler.curve(0).at(1 << 30).is_nan());
        assert!(sampler.curve(0).points().len() == 1);
        sampler.note(FILE, PageIndex(3), 1);
        sampler.note(FILE, PageIndex(3), 1);
        let curve = sampler.curve(2);
        assert_eq!([0, 4095, 4096, u64::MAX].map(|bytes| curve.at(bytes)), [1.0, 1.0, 0.5, 0.5]);
        assert_eq!(curve.points(), [(4096, 0.5), (8192, 0.5)]);
    }

    #[test]
    fn threads_share_a_sampler() {
        let sampler = Sampler::new(500);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let sampler = &sampler;
                scope.spawn(move || {
                    for read in 0..20_000 {
                        sampler.note(MappingId(thread + 1), PageIndex(read % 500), 1);
                    }
                });
            }
        });
        let curve = sampler.curve(80_000);
        // Four loops of 500 pages, however they take turns: at most 2000 pages lie between two reads of one.
        assert!(curve.at(2300 * 4096) < 0.1, "{}", curve.at(2300 * 4096));
        assert!(curve.sampled().1 <= 500);
    }

    proptest! {
        /// Where every page is a sample, the curve is the truth, and the row is moved together all the time.
        #[test]
        fn an_unsampled_curve_is_exact(trace in prop::collection::vec(0..40u64, 1..400)) {
            let curve = curve_of(&trace, 40);
            for size in 1..50 {
                let truth = naive_misses(&trace, size) as f64 / trace.len() as f64;
                let told = curve.at(size as u64 * 4096);
                prop_assert!((told - truth).abs() < 1e-9, "{size}: {told}, not {truth}");
            }
        }
    }
}

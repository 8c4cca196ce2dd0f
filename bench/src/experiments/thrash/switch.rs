//! Switch: a file that was read in large folios is read page by page.
//!
//! ```text
//!   in sequence     [---- folio ----][---- folio ----]    of which most are evicted:
//!   remembered      [---- shadow ---][---- shadow ---]
//!   page by page          [f]                             the shadow around it is cut, and the rest remembered
//! ```
//!
//! | way | a page that is read alone enters the index |
//! |---|---|
//! | single walk | as a batch of one: conflict, shadow, cut and store on one way down |
//! | three walks | by three calls of the tree, each of which goes down |
//!
//! Both find the same, cut the same and end with the same tree; they differ
//! in how often they go down to it. What is around that, a page from nowhere and the copy, is the
//! same too, so a ratio of times says what the walks are worth to a whole read.

use std::sync::Arc;

use quinion::internals::tuning::{Descent, Tuning};
use quinion::{Cache, File, Hint};

use crate::fixtures::pages::{PAGE, Pages, shuffled, word_of};
use crate::harness::timing::alone;
use crate::harness::{Alternative, Case, Metric, Settings, Unmeasured};

const METRICS: [Metric; 5] = [
    Metric::cost("time", "ns/read"),
    Metric::cost("cpu", "ns/read"),
    Metric::cost("descents", "per insertion"),
    Metric::gain("splits", "steps per 1000 insertions"),
    Metric::gain("shadows found", "per 1000 insertions"),
];
const SINGLE: &str = "single walk";
const NAIVE: &str = "three walks";

/// One file and two ways.
pub fn case(settings: &Settings) -> Case {
    let (memory, pages_log2) = (settings.pick(32 << 20, 256 << 20), settings.pick(14, 17));
    let case = Case::new("large folios, then 4 KiB", &METRICS, move || {
        let of =
            |name, tuning| Alternative::new(name, move |_| Ok(run(memory, pages_log2, tuning)?.to_vec()));
        Ok(vec![of(SINGLE, Tuning::default()), of(NAIVE, Tuning::default().descent(Descent::Naive))])
    });
    case.compare("time", SINGLE, NAIVE, None)
        .compare("cpu", SINGLE, NAIVE, None)
        .compare("descents", SINGLE, NAIVE, None)
        .told("splits", SINGLE)
        .told("splits", NAIVE)
        .told("shadows found", SINGLE)
}

/// Reads the file of 2^`pages_log2` pages in both ways, through a cache of `memory` bytes: less than the file.
fn run(memory: u64, pages_log2: u32, tuning: Tuning) -> Result<[f64; METRICS.len()], Unmeasured> {
    let cache = Cache::builder().memory(memory).tuning(tuning).build()?;
    let file = cache.open_backend(Arc::new(Pages(1 << pages_log2)))?;
    in_sequence(&file)?;
    let (stats, counts) = (cache.stats(), file.tree_counts());
    let mut result = Ok(());
    let spent = alone(|| result = page_by_page(&file, pages_log2));
    result?;
    let (after, tree) = (cache.stats(), file.tree_counts());
    let inserted = (after.inserted_pages - stats.inserted_pages) as f64;
    let splits = tree.splits - counts.splits;
    if splits == 0 {
        return Err(Unmeasured::Failed("no shadow was cut, so nothing was measured".to_owned()));
    }
    cache.check().map_err(Unmeasured::Failed)?;
    let found = after.refaulted_pages - stats.refaulted_pages;
    let [time, cpu] = spent.each(1 << pages_log2);
    Ok([
        time,
        cpu,
        (tree.descents - counts.descents) as f64 / inserted,
        splits as f64 * 1e3 / inserted,
        found as f64 * 1e3 / inserted,
    ])
}

fn in_sequence(file: &File) -> Result<(), Unmeasured> {
    file.advise(Hint::Sequential)?;
    let (mut buffer, mut position) = (vec![0; 1 << 20], 0);
    while let bytes @ 1.. = file.read_at(&mut buffer, position)? {
        check(&buffer[..bytes], position)?;
        position += bytes as u64;
    }
    Ok(())
}

fn page_by_page(file: &File, pages_log2: u32) -> Result<(), Unmeasured> {
    file.advise(Hint::Random)?;
    let mut buffer = [0; PAGE];
    for number in 0..1 << pages_log2 {
        let position = shuffled(number, pages_log2) * PAGE as u64;
        file.read_exact_at(&mut buffer, position)?;
        check(&buffer, position)?;
    }
    Ok(())
}

/// Each page of `bytes` is the one that stands there.
fn check(bytes: &[u8], position: u64) -> Result<(), Unmeasured> {
    let mut pages = (position / PAGE as u64..).zip(bytes.chunks(PAGE));
    match pages.find(|(page, bytes)| bytes[..8] != word_of(*page)) {
        None => Ok(()),
        Some((page, _)) => Err(Unmeasured::Failed(format!("what was read is not page {page}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shadows_are_cut_the_same_by_either_way_and_a_single_walk_goes_down_less() {
        let of = |tuning| run(32 << 20, 14, tuning).expect("it runs");
        let (single, naive) = (of(Tuning::default()), of(Tuning::default().descent(Descent::Naive)));
        assert!(single[2] < naive[2], "{single:?} {naive:?}");
        assert_eq!(single[3..], naive[3..]);
        assert!(single[3] > 0.0 && single[4] > 0.0, "{single:?}");
    }

    #[test]
    fn a_wrong_page_is_seen() {
        let mut bytes = vec![0; 2 * PAGE];
        bytes[..8].copy_from_slice(&word_of(3));
        bytes[PAGE..PAGE + 8].copy_from_slice(&word_of(4));
        assert!(check(&bytes, 3 * PAGE as u64).is_ok());
        assert!(check(&bytes, 4 * PAGE as u64).is_err());
    }
}

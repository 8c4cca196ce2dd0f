//! Thrash: whether the memory is too small for the files that viewers read, and which to leave to the kernel then.
//!
//! ```text
//!   each window of half a second: reads, misses of viewers; evictions, refaults of the cache
//!      --Detector--> is pressure, twice in a row --> too small
//!   too small: files by fills --choose--> those with most fills, until the rest fits --> left to the kernel
//! ```
//!
//! **The threshold.** Take a hit as 1. The kernel's read is about 2, and a miss, which waits for another thread, is
//! about 100: where one read of a hundred is a miss the cache is as fast as the kernel, and above one of fifty
//! ([`MISS_SHARE`]) leaving the file pays. That alone would hold for any cold file, and for a scan of a file larger
//! than the memory; there the kernel would have to fetch the bytes, too. The sign of thrashing is that evicted pages
//! **refault**: more memory would have kept them. Shadow entries are bounded, so not all refaults are known; one in
//! sixteen misses is enough ([`REFAULT_SHARE`]).
//!
//! Numbers in, verdict out: nothing here is locked or looked at.

use quinion::internals::units::FileId;

/// One miss in so many reads is pressure.
const MISS_SHARE: u64 = 50;
/// One page that came back for so many misses is pressure.
const REFAULT_SHARE: u64 = 16;
/// With fewer misses in a window nothing is said.
const MISSES_MIN: u64 = 64;
/// Windows with pressure, in a row, until memory counts as too small.
const WINDOWS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct WindowSums {
    pub(super) reads: u64,
    pub(super) misses: u64,
    pub(super) evicted: u64,
    pub(super) refaulted: u64,
}

#[derive(Debug, Default)]
pub(super) struct Detector {
    before: WindowSums,
    windows: u32,
}

impl Detector {
    pub(super) fn is_too_small(&mut self, now: WindowSums) -> bool {
        let before = std::mem::replace(&mut self.before, now);
        let window = WindowSums {
            reads: now.reads.saturating_sub(before.reads),
            misses: now.misses.saturating_sub(before.misses),
            evicted: now.evicted.saturating_sub(before.evicted),
            refaulted: now.refaulted.saturating_sub(before.refaulted),
        };
        self.windows = if is_pressure(window) { self.windows + 1 } else { 0 };
        let too_small = self.windows >= WINDOWS;
        if too_small {
            self.windows = 0; // what is done about it is looked at for as long
        }
        too_small
    }
}

fn is_pressure(window: WindowSums) -> bool {
    window.misses >= MISSES_MIN
        && window.misses.saturating_mul(MISS_SHARE) >= window.reads
        && window.evicted > 0
        && window.refaulted.saturating_mul(REFAULT_SHARE) >= window.misses
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    pub(super) id: FileId,
    pub(super) bytes: u64,
    pub(super) fills: u64,
}

/// Chooses the files with most fills first, until the others have no more than `capacity` bytes; at least one that was
/// filled.
pub(super) fn choose(mut files: Vec<Candidate>, capacity: u64) -> Vec<Candidate> {
    files.sort_by_key(|file| std::cmp::Reverse((file.fills, file.id)));
    let mut rest = files.iter().fold(0_u64, |sum, file| sum.saturating_add(file.bytes));
    let mut count = 0;
    for file in files.iter().filter(|file| file.fills > 0) {
        if count > 0 && rest <= capacity {
            break;
        }
        rest = rest.saturating_sub(file.bytes);
        count += 1;
    }
    files.truncate(count);
    files
}

/// Bytes of files that a memory of `bound` bytes holds, besides the cache's metadata and its free reserve.
pub(super) fn capacity_of(bound: u64) -> u64 {
    bound.saturating_sub(OWN) / 9 * 8
}

/// The memory that holds `bytes` bytes of files: the reverse of [`capacity_of`], in whole MiB.
pub fn memory_for(bytes: u64) -> u64 {
    (bytes.div_ceil(8).saturating_mul(9).saturating_add(OWN)).div_ceil(MIB).saturating_mul(MIB)
}

const MIB: u64 = 1 << 20;
/// Memory that the cache needs however little it holds.
const OWN: u64 = 4 * MIB;

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(windows: u64, window: [u64; 4]) -> bool {
        let mut detector = Detector::default();
        (1..=windows).any(|n| {
            let [reads, misses, evicted, refaulted] = window.map(|number| number * n);
            detector.is_too_small(WindowSums { reads, misses, evicted, refaulted })
        })
    }

    #[test]
    fn random_reads_of_more_than_memory_holds_are_thrashing_after_two_windows() {
        let thrashing = [10_000, 7_500, 7_500, 7_000];
        assert!(!verdict(1, thrashing));
        assert!(verdict(2, thrashing));
    }

    #[test]
    fn cold_fills_and_scans_and_rare_misses_are_not() {
        assert!(!verdict(100, [10_000, 10_000, 0, 0]), "a cold file is filled");
        assert!(!verdict(100, [1_000, 1_000, 100_000, 0]), "a scan brings nothing back");
        assert!(!verdict(100, [1_000_000, 1_000, 5_000, 1_000]), "hits pay for the misses");
        assert!(!verdict(100, [63, 63, 63, 63]), "too few to tell");
    }

    #[test]
    fn a_window_without_pressure_begins_anew() {
        let mut detector = Detector::default();
        let at = |n: u64| WindowSums { reads: n, misses: n, evicted: n, refaulted: n };
        assert!(!detector.is_too_small(at(1000)));
        assert!(!detector.is_too_small(at(1000)));
        assert!(!detector.is_too_small(at(2000)));
        assert!(detector.is_too_small(at(3000)));
    }

    #[test]
    fn files_with_most_fills_are_left_until_the_rest_fits() {
        let file = |inode, bytes, fills| Candidate { id: FileId { device: 1, inode }, bytes, fills };
        let files = vec![file(1, 50, 3), file(2, 50, 9), file(3, 50, 5), file(4, 50, 0)];
        let chosen =
            |capacity| choose(files.clone(), capacity).iter().map(|file| file.id.inode).collect::<Vec<_>>();
        assert_eq!(chosen(100), [2, 3]);
        assert_eq!(chosen(1000), [2], "it was too small all the same");
        assert_eq!(chosen(0), [2, 3, 1], "what was never asked for is not in the way");
        assert!(choose(Vec::new(), 0).is_empty());
    }

    #[test]
    fn the_memory_that_is_named_holds_the_bytes() {
        for bytes in [0, 1, 1 << 20, 3 << 30, (1 << 40) + 1] {
            assert!(capacity_of(memory_for(bytes)) >= bytes, "{bytes}");
        }
    }
}

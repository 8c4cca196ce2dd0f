//! Answer times: how long the answers of a store to GETs of fetches took to begin, in buckets that are the same
//! everywhere and only rise.
//!
//! The quantiles of `first_byte.rs` follow a store that changes; those of several nodes cannot be added up. These
//! counts can: a monitor adds the buckets of all nodes, and takes the quantile of the sum.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where the buckets end; the last one has no end.
const ENDS: [Duration; 13] = [
    Duration::from_millis(1),
    Duration::from_micros(2500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_millis(2500),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// A histogram of the times in which answers to the GETs of fetches began: see
/// [`ObjectCache::answer_times`](crate::ObjectCache::answer_times). It does not have the GET by which an object was
/// opened, the later one of a hedge's two, nor GETs that were not answered in time ([`Options::stall_max`]).
///
/// [`Options::stall_max`]: crate::Options::stall_max
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AnswerTimes {
    counts: [u64; ENDS.len() + 1],
    sum: Duration,
}

impl AnswerTimes {
    /// Pairs of a bound and the number of answers that took at most that, and longer than the bound before; the last
    /// has none.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        ENDS.into_iter().map(Some).chain([None]).zip(self.counts)
    }
    /// How many there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
    /// The sum of their times.
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

#[derive(Debug, Default)]
pub(crate) struct AnswerCounters {
    counts: [AtomicU64; ENDS.len() + 1],
    micros: AtomicU64,
}

impl AnswerCounters {
    pub(crate) fn record(&self, time: Duration) {
        let bucket = ENDS.partition_point(|end| *end < time);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> AnswerTimes {
        let counts = self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        AnswerTimes { counts, sum: Duration::from_micros(self.micros.load(Ordering::Relaxed)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_that_does_not_end_before_it() {
        let counters = AnswerCounters::default();
        for micros in [0, 1000, 1001, 2500, 10_000_000, 10_000_001, 3_600_000_000] {
            counters.record(Duration::from_micros(micros));
        }
        let times = counters.snapshot();
        let found: Vec<_> = times.buckets().filter(|(_, count)| *count > 0).collect();
        let millis = |millis| Some(Duration::from_micros(millis));
        assert_eq!(found, [(millis(1000), 2), (millis(2500), 2), (millis(10_000_000), 1), (None, 2)]);
        assert_eq!((times.count(), times.sum()), (7, Duration::from_micros(3_620_004_502)));
        assert!(ENDS.is_sorted());
    }
}

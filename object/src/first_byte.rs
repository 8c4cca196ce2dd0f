//! First byte: how long the store takes to begin an answer, and when a GET is late.
//!
//! ```text
//!   GET --sent--> ........ headers     its time goes into the histogram
//!         |  later than the quantile?
//!         +------ a second GET -----> headers     the first answer of the two is used, the other is dropped
//! ```
//!
//! Stores answer some requests ten or a hundred times slower than most, and a second request is then nearly always
//! faster (J. Dean and L. A. Barroso, *The Tail at Scale*, 2013). The limit is a measured quantile, so the requests
//! that are added are a known share of all.
//!
//! Buckets are powers of two cut in four: a time is known to within 25 %. Counts are halved now and then, so that the
//! histogram follows a store that changes.
//!
//! Invariant: both requests carry the same condition, so whichever answers is of the version that was opened.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets of each power of two.
const CUTS: u32 = 4;
/// Buckets up to 2^32 microseconds, more than an hour.
const BUCKETS: usize = 31 * CUTS as usize;
/// Below so many answers no quantile is told.
const ANSWERS_MIN: u64 = 32;
/// With so many answers all counts are halved.
const ANSWERS_MAX: u64 = 4096;

/// Times to the first byte of an answer; see [`ObjectCache::first_byte`](crate::ObjectCache::first_byte).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct FirstByte {
    /// Half of the answers began within this time.
    pub p50: Duration,
    /// 95 of 100 did.
    pub p95: Duration,
    /// 99 of 100 did.
    pub p99: Duration,
}

/// Exact when no other thread records, and near enough when one does.
#[derive(Debug)]
pub(crate) struct FirstByteTimes {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for FirstByteTimes {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

/// The bucket is chosen by the time's highest set bit and the two bits that follow.
fn bucket_of(time: Duration) -> usize {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(u64::from(CUTS));
    let power = micros.ilog2();
    let cut = (micros >> (power - CUTS.ilog2())) as u32 - CUTS;
    (((power - CUTS.ilog2()) * CUTS + cut) as usize).min(BUCKETS - 1)
}

fn end_of(bucket: usize) -> Duration {
    let (shift, cut) = (bucket as u32 / CUTS, bucket as u32 % CUTS);
    Duration::from_micros(u64::from(CUTS + cut + 1) << shift)
}

impl FirstByteTimes {
    pub(crate) fn record(&self, time: Duration) {
        let count = self.buckets[bucket_of(time)].fetch_add(1, Ordering::Relaxed);
        if count >= ANSWERS_MAX / 8 && self.answers() >= ANSWERS_MAX {
            for bucket in &self.buckets {
                let half = bucket.load(Ordering::Relaxed) / 2;
                bucket.store(half, Ordering::Relaxed);
            }
        }
    }

    fn answers(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn quantile(&self, percent: u8) -> Option<Duration> {
        let answers = self.answers();
        if answers < ANSWERS_MIN {
            return None;
        }
        let wanted = (answers * u64::from(percent)).div_ceil(100);
        let mut seen = 0;
        let reaches = |bucket: &AtomicU64| {
            seen += bucket.load(Ordering::Relaxed);
            seen >= wanted
        };
        self.buckets.iter().position(reaches).map(end_of)
    }

    pub(crate) fn summary(&self) -> Option<FirstByte> {
        let [p50, p95, p99] = [50, 95, 99].map(|percent| self.quantile(percent));
        Some(FirstByte { p50: p50?, p95: p95?, p99: p99? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_are_given_when_enough_samples_are_known() {
        let times = FirstByteTimes::default();
        (1..32).for_each(|millis| times.record(Duration::from_millis(millis)));
        assert_eq!(times.summary(), None);
        times.record(Duration::from_millis(32));
        let summary = times.summary().unwrap();
        for (time, exact) in [(summary.p50, 16.0), (summary.p95, 31.0), (summary.p99, 32.0)] {
            let millis = time.as_secs_f64() * 1000.0;
            assert!((exact..=exact * 1.25).contains(&millis), "{time:?} for {exact} ms");
        }
    }

    #[test]
    fn a_store_that_becomes_slow_is_noticed() {
        let times = FirstByteTimes::default();
        (0..100_000).for_each(|_| times.record(Duration::from_millis(1)));
        (0..10_000).for_each(|_| times.record(Duration::from_millis(50)));
        assert!(times.quantile(50).unwrap() >= Duration::from_millis(50));
    }

    proptest! {
        #[test]
        fn a_time_is_in_its_bucket(micros in 0_u64..1 << 33) {
            let time = Duration::from_micros(micros);
            let bucket = bucket_of(time);
            let (start, end) = (bucket.checked_sub(1).map_or(Duration::ZERO, end_of), end_of(bucket));
            prop_assert!(bucket == BUCKETS - 1 || time < end, "{time:?} {end:?}");
            prop_assert!(bucket == 0 || start <= time, "{start:?} {time:?}");
        }
    }
}

//! Latency: how long faults took, in a few hundred numbers.
//!
//! ```text
//!   nanoseconds   0 1 .. 7 | 8  9 .. 15 | 16 18 .. 30 | 32 36 .. 60 | ..       eight buckets for each power of two
//! ```
//!
//! A bucket is as wide as an eighth of where it begins, so a value that is read off is at most an eighth too high.
//! Pure.
//!
//! Not an invariant: that the sum of all is exact in the end. It stops at the largest number there is.

/// Buckets for each power of two.
const STEPS: usize = 8;
/// Up to 2^48 nanoseconds, three days; longer times count as that.
const POWERS: usize = 46;
const BUCKETS: usize = POWERS * STEPS;

/// How often something took how long.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LatencyHistogram {
    counts: Vec<u64>,
    count: u64,
    sum: u64,
    max: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], count: 0, sum: 0, max: 0 }
    }
}

fn bucket(nanoseconds: u64) -> usize {
    if nanoseconds < STEPS as u64 {
        return nanoseconds as usize;
    }
    let power = nanoseconds.ilog2() as usize; // 3 at least
    let step = (nanoseconds >> (power - 3)) as usize - STEPS;
    ((power - 2) * STEPS + step).min(BUCKETS - 1)
}

fn top(bucket: usize) -> u64 {
    let (power, step) = (bucket / STEPS, (bucket % STEPS) as u64);
    if power == 0 { step } else { ((STEPS as u64 + step + 1) << (power - 1)) - 1 }
}

impl LatencyHistogram {
    /// Counts one more.
    pub fn add(&mut self, nanoseconds: u64) {
        self.counts[bucket(nanoseconds)] += 1;
        self.count += 1;
        self.sum = self.sum.saturating_add(nanoseconds);
        self.max = self.max.max(nanoseconds);
    }

    /// Counts what `other` counted.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, others)| *mine += others);
        self.count += other.count;
        self.sum = self.sum.saturating_add(other.sum);
        self.max = self.max.max(other.max);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Nanoseconds of all together.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The longest, in nanoseconds.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Nanoseconds that `share` of them (0 to 1) did not exceed, an eighth too high at most; `None` of nothing.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let wanted = ((share.clamp(0.0, 1.0) * self.count as f64).ceil() as u64).max(1);
        self.at_most(wanted)
    }

    fn at_most(&self, wanted: u64) -> Option<u64> {
        let mut seen = 0;
        let found = self.counts.iter().position(|&count| {
            seen += count;
            seen >= wanted
        })?;
        Some(top(found).min(self.max))
    }

    /// How many did not exceed `nanoseconds`, those in its bucket included.
    pub fn up_to(&self, nanoseconds: u64) -> u64 {
        self.counts[..=bucket(nanoseconds)].iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        for number in 0..BUCKETS - 1 {
            assert_eq!(bucket(top(number)), number);
            assert_eq!(bucket(top(number) + 1), number + 1);
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(LatencyHistogram::default().quantile(0.5), None);
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_list(
            mut times in prop::collection::vec(0..1_u64 << 40, 1..200),
            at in 0..200_usize,
            share in 0.0..=1.0_f64,
        ) {
            let (mut one, mut other) = (LatencyHistogram::default(), LatencyHistogram::default());
            let at = at % times.len();
            times[..at].iter().for_each(|&time| one.add(time));
            times[at..].iter().for_each(|&time| other.add(time));
            one.merge(&other);
            times.sort_unstable();
            let rank = ((share * times.len() as f64).ceil() as usize).max(1);
            let (exact, found) = (times[rank - 1], one.quantile(share).expect("there are some"));
            prop_assert!(exact <= found && found <= exact + exact / 8, "{} for {}", found, exact);
            prop_assert_eq!((one.count(), one.max()), (times.len() as u64, times[times.len() - 1]));
            prop_assert_eq!(one.sum(), times.iter().sum::<u64>());
            let within = times.iter().filter(|&&time| bucket(time) <= bucket(exact)).count();
            prop_assert_eq!(one.up_to(exact), within as u64);
        }
    }
}

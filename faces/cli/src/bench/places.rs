//! Places: numbers that look random, and are the same for everybody who begins with the same.
//!
//! Any of them as often as another, or some more often: by the law of G. K. Zipf, the k-th
//! of them 1 / k^s as often as the first, as programs often ask.
//!
//! The generator of D. E. Knuth's MMIX, of which the upper bits are used: the lower ones repeat soon.

/// The numbers, by the last one.
pub struct Places(pub u64);

impl Places {
    /// The next one, below `below`.
    pub fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((u128::from(self.0 >> 11) * u128::from(below)) >> 53) as u64
    }
}

/// Ranks from 0 on, rank k with a share of 1 / (k + 1)^s.
pub struct Zipf {
    /// The shares of all ranks up to each, together.
    sums: Vec<f64>,
}

impl Zipf {
    /// So many ranks, with this s.
    pub fn new(ranks: u64, exponent: f64) -> Self {
        let mut sum = 0.0;
        let add = |rank: u64| {
            sum += 1.0 / ((rank + 1) as f64).powf(exponent);
            sum
        };
        Self { sums: (0..ranks).map(add).collect() }
    }

    /// The rank at `unit`, of 0 to 1, of all shares.
    pub fn rank(&self, unit: f64) -> u64 {
        let wanted = unit * self.sums.last().expect("there are ranks");
        self.sums.partition_point(|sum| *sum <= wanted) as u64
    }

    /// A rank by the next of `places`.
    pub fn next(&self, places: &mut Places) -> u64 {
        const UNITS: u64 = 1 << 53;
        self.rank(places.next(UNITS) as f64 / UNITS as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_comes_as_often_as_its_share() {
        let (zipf, mut places) = (Zipf::new(1000, 1.0), Places(1));
        let mut seen = [0.0; 1000];
        (0..100_000).for_each(|_| seen[zipf.next(&mut places) as usize] += 1.0);
        for (rank, times) in [(1, 2.0), (3, 4.0), (9, 10.0)] {
            let ratio = seen[0] / seen[rank];
            assert!((0.8 * times..1.25 * times).contains(&ratio), "rank {rank}: {ratio}");
        }
        assert_eq!((zipf.rank(0.0), Zipf::new(7, 0.99).rank(0.999_999)), (0, 6));
    }

    #[test]
    fn places_stay_below_what_was_asked() {
        let mut places = Places(1);
        let seen: std::collections::BTreeSet<u64> = (0..1000).map(|_| places.next(7)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
    }
}

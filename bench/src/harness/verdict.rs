//! Verdict: whether a row's goal is met, missed, or cannot be judged. The one place that decides.
//!
//! ```text
//!   repetitions   ours 2.1 2.2 2.0    peer 4.0 4.4 4.1    ratio 1.90 2.00 2.05     the goal is met or missed
//!                 ours 0.4 5.1 0.5    peer 4.0 4.4 4.1    ratio 10.0 0.86 8.20     not steady
//! ```
//!
//! A median of numbers that lie far apart is the number of no run. So a row is judged only if it is steady: neither
//! Quinion's repetitions, nor the peer's, nor their ratios differ by more than [`SWING_MAX`], largest over smallest.
//!
//! | by | a side's number is | the ratio is |
//! |---|---|---|
//! | [`Estimator::Median`] | its median | the median of the repetitions' ratios |
//! | [`Estimator::LowerQuartile`] | its better quartile: the lower one of a cost | that of the two |
//!
//! The second is for work whose cost other processes can only add to, such as memory that the host has to find first:
//! it makes some repetitions slower, on whichever side.
//!
//! Not an invariant: that one repetition is steady. It is not known.

use super::Better;
use super::statistics::Quartiles;

/// The largest repetition of a steady row over the smallest, at most.
pub const SWING_MAX: f64 = 2.0;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Estimator {
    Median,
    /// The one that three quarters of them are not better than.
    LowerQuartile,
}

impl Estimator {
    pub fn name(self) -> &'static str {
        match self {
            Self::Median => "median",
            Self::LowerQuartile => "lower quartile",
        }
    }

    pub fn number(self, of: Quartiles, better: Better) -> f64 {
        match (self, better) {
            (Self::Median, _) => of.median,
            (Self::LowerQuartile, Better::Less) => of.low,
            (Self::LowerQuartile, Better::More) => of.high,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Steadiness {
    Steady,
    /// The row is neither met nor missed.
    NotSteady,
}

/// Decided by Quinion's values, the peer's, and their ratios.
pub fn steadiness(of: [&[f64]; 3]) -> Steadiness {
    let is_steady = |values: &&[f64]| swing(values) <= SWING_MAX;
    if of.iter().all(is_steady) { Steadiness::Steady } else { Steadiness::NotSteady }
}

/// Whether `goal` is reached by `ratio`; `None` without either, and of a row that is not steady.
pub fn met(ratio: Option<f64>, goal: Option<f64>, steadiness: Steadiness) -> Option<bool> {
    let estimator = ratio.zip(goal).filter(|_| steadiness == Steadiness::Steady);
    estimator.map(|(ratio, goal)| ratio >= goal)
}

/// The largest of the numbers that there are over the smallest: 1 of one or none, without bound beside a zero.
fn swing(values: &[f64]) -> f64 {
    let numbers = values.iter().copied().filter(|value| !value.is_nan());
    let ends = numbers
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    match ends {
        (low, high) if low >= high => 1.0,
        (low, _) if low <= 0.0 => f64::INFINITY,
        (low, high) => high / low,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_differs_by_more_than_twice_on_any_side_is_not_steady() {
        let steady: &[f64] = &[1.0, 2.0, 1.5];
        let wild: &[f64] = &[1.0, 2.01];
        assert_eq!(steadiness([steady, steady, steady]), Steadiness::Steady);
        for of in [[wild, steady, steady], [steady, wild, steady], [steady, steady, wild]] {
            assert_eq!(steadiness(of), Steadiness::NotSteady);
        }
    }

    /// 1. Two repetitions of a row come to 0.37x and 10.7x.
    /// 2. Their middle, 5.55x, was called met.
    #[test]
    fn the_middle_of_two_that_lie_far_apart_is_neither_met_nor_missed() {
        let ratios = [0.37, 10.7];
        let of = steadiness([&[8510.0, 294.0], &[3149.0, 3149.0], &ratios]);
        let middle = Quartiles::of(&ratios).map(|ratios| ratios.median);
        assert_eq!(met(middle, Some(1.5), of), None);
        assert_eq!(met(middle, Some(9.0), of), None);
        assert_eq!(met(middle, Some(1.5), Steadiness::Steady), Some(true));
    }

    #[test]
    fn one_number_none_and_zeros_swing_as_they_should() {
        assert_eq!([&[][..], &[3.0], &[0.0, 0.0], &[f64::NAN, 3.0, f64::NAN]].map(swing), [1.0; 4]);
        assert_eq!(swing(&[0.0, 0.1]), f64::INFINITY);
        assert_eq!(swing(&[4.0, 10.0, 5.0]), 2.5);
    }

    #[test]
    fn the_lower_quartile_is_the_better_one_of_either_kind_of_metric() {
        let of = Quartiles { low: 1.0, median: 2.0, high: 3.0 };
        let numbers =
            |estimator: Estimator| [Better::Less, Better::More].map(|better| estimator.number(of, better));
        assert_eq!(numbers(Estimator::Median), [2.0, 2.0]);
        assert_eq!(numbers(Estimator::LowerQuartile), [1.0, 3.0]);
    }
}

//! Statistics: the few numbers that stand for many repetitions.
//!
//! A ratio is taken within one repetition, because what slowed the machine then slowed both sides; the median of these
//! ratios is reported, and their quartiles say how far to trust it. There are no means: one slow moment would move
//! them.

/// The median of some numbers, and the quarters below and above it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Quartiles {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

impl Quartiles {
    /// The quartiles of `numbers`; `None` if there are none, or one of them could not be measured.
    pub fn of(numbers: &[f64]) -> Option<Self> {
        if numbers.is_empty() || numbers.iter().any(|number| !number.is_finite()) {
            return None;
        }
        let mut sorted = numbers.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |share| interpolated(&sorted, share);
        Some(Self { low: at(0.25), median: at(0.5), high: at(0.75) })
    }
}

/// The value below which `share` of some numbers lie, 0.5 for the median; not a number if there are none.
pub fn percentile(numbers: &[f64], share: f64) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() { f64::NAN } else { interpolated(&sorted, share) }
}

fn interpolated(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_in_the_middle_of_the_samples() {
        let of = |numbers: &[f64]| Quartiles::of(numbers).map(|q| (q.low, q.median, q.high));
        assert_eq!(of(&[3.0, 1.0, 2.0, 5.0, 4.0]), Some((2.0, 3.0, 4.0)));
        assert_eq!(of(&[1.0, 2.0]), Some((1.25, 1.5, 1.75)));
        assert_eq!(of(&[7.0]), Some((7.0, 7.0, 7.0)));
        assert_eq!([0.0, 0.25, 1.0].map(|share| percentile(&[5.0, 1.0, 9.0], share)), [1.0, 3.0, 9.0]);
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn unmeasured_values_have_no_median() {
        assert_eq!(Quartiles::of(&[]), None);
        assert_eq!(Quartiles::of(&[1.0, f64::NAN]), None);
    }
}

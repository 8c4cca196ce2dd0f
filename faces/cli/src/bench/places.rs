//! Places: numbers that look random, and are the same for everybody who begins with the same.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_stay_below_what_was_asked() {
        let mut places = Places(1);
        let seen: std::collections::BTreeSet<u64> = (0..1000).map(|_| places.next(7)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
    }
}

//! First GET: how long the GET is that opens an object of which nothing is known.
//!
//! ```text
//!   first GET     |-- to the first byte --|== its bytes ==============|
//!   those behind                          |-- to the first byte --|== side by side ==
//! ```
//!
//! Its answer tells the size, so no GET goes beside it. Those that follow begin to bring bytes as late again as the
//! first one did. Until then its connection brings as many bytes as its bandwidth multiplied by the time to the first
//! byte: their **bandwidth-delay product**. A first GET of fewer bytes leaves a pause before the others'; one of more
//! bytes keeps back what several connections would bring sooner. A connection of 80 MB/s and 20 ms brings 1.6 MB, less
//! than any GET of a long range; one of 1.4 GB/s brings 28 MB.
//!
//! Its pages are allocated before its first byte goes into one. So it is no longer than the others where so much memory
//! is not free: on a virtual machine that would be waited for, as long as for the bytes themselves or longer.
//!
//! The product is measured at first GETs alone: those that go side by side share the bandwidth of the machine.
//!
//! Not an invariant: that it is right for the next object. It decides about a length, and so about time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A shorter body says nothing: what came with the headers has taken no time.
const BODY_MIN: u64 = 1 << 20;
/// Lengths are multiples of it.
const STEP: u64 = 1 << 20;
/// The weight of what was known before, beside 1 of the new.
const KEPT: u64 = 3;

/// When the answer to a first GET came; it goes with the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstAnswer {
    pub(crate) first_byte: Duration,
    pub(crate) begun: Instant,
}

/// Bytes; 0 as long as nothing is known.
#[derive(Debug, Default)]
pub(crate) struct BandwidthDelay(AtomicU64);

impl BandwidthDelay {
    /// `bytes` of a body came within `time` after its first byte, and that after `first_byte`.
    pub(crate) fn record(&self, first_byte: Duration, bytes: u64, time: Duration) {
        if bytes < BODY_MIN {
            return;
        }
        let product = u128::from(bytes) * first_byte.as_nanos() / time.as_nanos().max(1);
        let product = u64::try_from(product).unwrap_or(u64::MAX).clamp(1, 1 << 40);
        // Two threads that do this at once lose one of two measurements.
        let known = self.0.load(Ordering::Relaxed);
        let mean = if known == 0 { product } else { (KEPT * known + product) / (KEPT + 1) };
        self.0.store(mean, Ordering::Relaxed);
    }

    /// How long a first GET is, where others have `request_max` bytes; `most` is the bound of a longer one.
    pub(crate) fn length(&self, request_max: u64, most: u64) -> u64 {
        (self.0.load(Ordering::Relaxed).min(most) / STEP * STEP).max(request_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn of(measured: &[(u64, u64, u64)]) -> u64 {
        let product = BandwidthDelay::default();
        for &(first_byte, bytes, time) in measured {
            product.record(Duration::from_millis(first_byte), bytes, Duration::from_millis(time));
        }
        product.length(8 * MIB, 32 * MIB)
    }

    #[test]
    fn a_slow_connection_has_the_length_of_other_gets_and_a_fast_one_its_product() {
        assert_eq!(of(&[]), 8 * MIB, "nothing is known");
        assert_eq!(of(&[(20, 8 * MIB, 100)]), 8 * MIB);
        assert_eq!(of(&[(20, 8 * MIB, 6)]), 26 * MIB);
        assert_eq!(of(&[(0, 8 * MIB, 6)]), 8 * MIB);
        assert_eq!(of(&[(20, 8 * MIB, 0), (20, u64::MAX, 0)]), 32 * MIB, "the bound");
        assert_eq!(of(&[(20, MIB - 1, 0)]), 8 * MIB, "a body that came with its headers");
    }

    #[test]
    fn one_measurement_of_several_changes_little() {
        assert_eq!(of(&[(20, 8 * MIB, 8), (20, 8 * MIB, 160)]), 15 * MIB);
        assert_eq!(of(&[(20, 8 * MIB, 160), (20, 8 * MIB, 8)]), 8 * MIB);
    }
}

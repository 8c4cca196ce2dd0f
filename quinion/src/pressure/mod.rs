//! Pressure: the bound that a cache should have while the machine is short of memory.
//!
//! ```text
//!    share of the time that any process     memory left to
//!    waited for memory (PSI)                the group or machine
//!
//!    100/1000 or more                  or   less than 1/16              pressed: less by 1/8, or by what is missing
//!        in between                                                  stay
//!    less than 10/1000                 and  more than 1/4               calm: after 20 looks a little larger
//! ```
//!
//! A kernel that is out of memory kills a process, and a cache can give memory back without harm. So a cache that was
//! told to ([`Builder::pressure`](crate::Builder)) checks twice a second (ten times while less than a quarter of a
//! limit is left), shrinks at once and by large steps, and grows late and by small ones: of two caches that both count
//! the memory freed by the other as available, neither then oscillates.
//!
//! [`target_size`] is the decision: no file, no clock, no lock. [`PressureSource`] finds the numbers; the background
//! thread takes the one to the other, in `filemap/shrinker.rs`.
//!
//! Invariants:
//!  1. The answer is between the least and the most that it was given, whatever the numbers.
//!  2. It is smaller than the memory of the cache only under pressure, and larger than the bound only when calm.
//!  3. A file that cannot be read means neither pressure nor calm: with no numbers at all nothing changes.
//!
//! Not an invariant: that the kernel never kills. A gigabyte taken within a tenth of a second is not seen in time.

mod source;
pub use source::{Group, PressureSource, SourceReading};

use crate::units::EXTENT_SIZE;

/// From so many thousandths of the time on that a process waited for memory, there is pressure.
const STALLED_PRESSED: u32 = 100;
/// Below so many there is none.
const STALLED_CALM: u32 = 10;
/// Looks without pressure before the cache grows again.
const CALM_SAMPLES: u32 = 20;

/// How a cache shrinks when the machine is short of memory; for [`Builder::pressure`](crate::Builder::pressure).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pressure {
    pub(crate) memory_min: u64,
    /// `None`: this process's.
    pub(crate) source: Option<PressureSource>,
}

impl Pressure {
    /// Shrinks a cache to `memory_min` bytes at the least (and never below what it needs), and back when there is room.
    #[must_use]
    pub fn shrink_to(memory_min: u64) -> Self {
        Self { memory_min, source: None }
    }

    /// Looks at the files of `source`, not at those of this process's control groups and of the machine.
    #[must_use]
    pub(crate) fn with_source(mut self, source: PressureSource) -> Self {
        self.source = Some(source);
        self
    }
}

/// Memory that is left below a limit. In bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headroom {
    /// Memory still available.
    pub free: u64,
    pub limit: u64,
}

/// One sample of the system's memory pressure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PressureSample {
    /// Thousandths of the time since the last look in which some task waited for memory.
    pub stalled_thousandths: Option<u32>,
    /// The tightest limit.
    pub headroom: Option<Headroom>,
}

/// A cache's memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// The bound in force.
    pub bound: u64,
    /// Memory taken from the machine.
    pub grown: u64,
    /// The least bound.
    pub min: u64,
    /// The bound where there is no pressure.
    pub max: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PressureLevel {
    Pressed,
    Between,
    Calm,
}

impl PressureSample {
    fn level(self) -> PressureLevel {
        let stalled = |from: u32| self.stalled_thousandths.is_some_and(|stalled| stalled >= from);
        let is_left =
            |parts: u64| self.headroom.is_none_or(|headroom| headroom.free >= headroom.limit / parts);
        if stalled(STALLED_PRESSED) || !is_left(16) {
            PressureLevel::Pressed
        } else if self == Self::default() || stalled(STALLED_CALM) || !is_left(4) {
            PressureLevel::Between
        } else {
            PressureLevel::Calm
        }
    }
}

/// The bound that a cache of `sizes` should have after `sample`; `calm_samples` counts those without pressure.
pub fn target_size(sample: PressureSample, sizes: Sizes, calm_samples: &mut u32) -> u64 {
    let extent = EXTENT_SIZE as u64;
    let weather = sample.level();
    *calm_samples = if weather == PressureLevel::Calm { calm_samples.saturating_add(1) } else { 0 };
    let target = match weather {
        PressureLevel::Pressed => {
            // The decrease is a part of what it holds: a bound that was never reached gives nothing back by being
            // lower.
            let held = sizes.grown.min(sizes.bound);
            let missing =
                sample.headroom.map_or(0, |headroom| (headroom.limit / 8).saturating_sub(headroom.free));
            held.saturating_sub((held / 8).max(missing).max(extent))
        }
        PressureLevel::Calm if *calm_samples >= CALM_SAMPLES => {
            // Half of the free memory beyond the quarter that makes it calm: others may want the same.
            let spare = sample.headroom.map_or(u64::MAX, |headroom| (headroom.free - headroom.limit / 4) / 2);
            sizes.bound.saturating_add((sizes.max / 32).max(extent).min(spare))
        }
        _ => sizes.bound,
    };
    target.max(sizes.min).min(sizes.max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const SIZES: Sizes = Sizes { bound: 800 * MIB, grown: 800 * MIB, min: 100 * MIB, max: 1000 * MIB };

    fn sample(stalled: u32, free: u64) -> PressureSample {
        PressureSample {
            stalled_thousandths: Some(stalled),
            headroom: Some(Headroom { free, limit: 1600 * MIB }),
        }
    }

    #[test]
    fn the_cache_shrinks_at_once_by_an_eighth_or_by_the_missing_memory() {
        for (stalled, free, target) in [
            (100, 800 * MIB, 700 * MIB), // stalls alone
            (0, 99 * MIB, 699 * MIB),    // 200 are to be free, 99 are
            (0, 0, 600 * MIB),
            (1000, 0, 600 * MIB),
            (99, 100 * MIB, 800 * MIB), // neither
        ] {
            assert_eq!(target_size(sample(stalled, free), SIZES, &mut 0), target, "{stalled} {free}");
        }
        // If the bound was never reached, the memory in use counts; and never below the least.
        let idle = Sizes { grown: 160 * MIB, ..SIZES };
        assert_eq!(target_size(sample(500, 800 * MIB), idle, &mut 0), 140 * MIB);
        let small = Sizes { bound: 101 * MIB, grown: 101 * MIB, ..SIZES };
        assert_eq!(target_size(sample(500, 0), small, &mut 0), 100 * MIB);
    }

    #[test]
    fn the_cache_grows_back_late_and_slowly_and_not_beyond_the_configured_size() {
        let (mut calm, mut sizes, mut samples) = (0, SIZES, 0);
        while sizes.bound < sizes.max {
            let target = target_size(sample(0, 1000 * MIB), sizes, &mut calm);
            assert!(target - sizes.bound <= sizes.max / 32);
            (sizes.bound, samples) = (target, samples + 1);
        }
        assert_eq!((sizes.bound, samples), (sizes.max, 19 + 7));
        assert_eq!(target_size(sample(0, 1000 * MIB), sizes, &mut calm), sizes.max);
        // One look that is not calm, and the patience begins anew.
        sizes.bound = SIZES.bound;
        assert_eq!(target_size(sample(50, 1000 * MIB), sizes, &mut calm), sizes.bound);
        assert_eq!((calm, target_size(sample(0, 1000 * MIB), sizes, &mut calm)), (0, sizes.bound));
    }

    #[test]
    fn an_unreadable_source_changes_nothing() {
        let mut calm = 1000;
        assert_eq!(target_size(PressureSample::default(), SIZES, &mut calm), SIZES.bound);
        assert_eq!(calm, 0);
    }

    proptest! {
        #[test]
        fn the_target_size_is_in_its_range_and_moves_one_way(
            stalled in prop::option::of(0..2000u32),
            headroom in prop::option::of((any::<u64>(), any::<u64>())),
            mut sizes in prop::array::uniform4(0..u64::MAX / 2),
            mut calm in 0..100u32,
        ) {
            sizes[2..].sort_unstable();
            let [grown, bound, min, max] = sizes;
            let bound = bound.clamp(min, max);
            let sizes = Sizes { bound, grown, min, max };
            let headroom = headroom.map(|(free, limit)| Headroom { free, limit });
            let sample = PressureSample { stalled_thousandths: stalled, headroom };
            let target = target_size(sample, sizes, &mut calm);
            prop_assert!((min..=max).contains(&target));
            match sample.level() {
                PressureLevel::Pressed => prop_assert!(target <= bound),
                PressureLevel::Between => prop_assert_eq!(target, bound),
                PressureLevel::Calm => prop_assert!(target >= bound),
            }
        }
    }
}

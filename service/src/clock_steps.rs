//! Clock steps: how often the time of day was set back while this process looked.
//!
//! ```text
//!   time of day - uptime:   falls only if the time of day is set back; the uptime never is
//! ```
//!
//! A content of after a setback may have the times of an earlier one. So the count is a part of what names a revision.
//!
//! Not seen: a clock that is set back, and forward again between two looks.

use std::sync::{Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};

#[derive(Debug)]
pub(crate) struct BackwardClockSteps(Mutex<BackwardStepCount>);

#[derive(Debug)]
struct BackwardStepCount {
    /// The most that the time of day was known to be ahead of the uptime, in nanoseconds.
    ahead: i64,
    count: u64,
}

/// The clocks' values in nanoseconds: the uptime is asked before and after, since the thread may be interrupted.
struct ClockSample {
    before: i64,
    now: i64,
    after: i64,
}

impl Default for BackwardClockSteps {
    fn default() -> Self {
        Self(Mutex::new(BackwardStepCount { ahead: i64::MIN, count: 0 }))
    }
}

impl BackwardClockSteps {
    /// Looks at the clocks. How many backward steps were seen until now.
    pub(crate) fn count(&self) -> u64 {
        let nanoseconds = |clock| {
            let time = clock_gettime(clock);
            time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
        };
        let before = nanoseconds(ClockId::Boottime);
        let now = nanoseconds(ClockId::Realtime);
        let sample = ClockSample { before, now, after: nanoseconds(ClockId::Boottime) };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(&sample)
    }
}

impl BackwardStepCount {
    fn note(&mut self, sample: &ClockSample) -> u64 {
        let (least, most) =
            (sample.now.saturating_sub(sample.after), sample.now.saturating_sub(sample.before));
        if most < self.ahead {
            (self.ahead, self.count) = (least, self.count + 1);
        }
        self.ahead = self.ahead.max(least);
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setback_is_counted_once_and_nothing_else_is() {
        let mut seen = BackwardStepCount { ahead: i64::MIN, count: 0 };
        let mut note = |before, now, after| seen.note(&ClockSample { before, now, after });
        assert_eq!(note(10, 1000, 11), 0, "the first look");
        assert_eq!(note(20, 1010, 21), 0);
        assert_eq!(note(30, 1025, 90), 0, "interrupted between the looks at the uptime");
        assert_eq!(note(100, 5000, 101), 0, "set forward");
        assert_eq!(note(110, 1100, 111), 1, "and back");
        assert_eq!(note(120, 1110, 121), 1);
        assert_eq!(note(130, 1000, 131), 2);
        let now = BackwardClockSteps::default();
        assert_eq!((now.count(), now.count()), (0, 0));
    }
}

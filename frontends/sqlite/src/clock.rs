//! Clock: whether a file's times change with its next write.
//!
//! ```text
//!   --- written at M ---- the clock steps, 10 ms at most ---- looked at, 100 ms or more after M ---- written again
//!                                                             the times are settled                  not at M
//! ```
//!
//! A write gives the file the time of the kernel's clock, which goes in steps: two writes of one step leave the same
//! times. So times change with the next write once the clock has left the step of the last one: then they are
//! *settled*. The clock is `CLOCK_REALTIME_COARSE`, and not the exact time of day: while a virtual machine's processor
//! that moves the clock is not run, a step lasts as long, and other processes write meanwhile.
//!
//! This holds while the clock is not set back. The clock of the machine's uptime never is, and both run equally fast,
//! so the difference of both falls only if the time of day is set back. Each fall is counted, and the count is a part
//! of what is compared.
//!
//! Not seen: a clock that is set back, and forward again between two looks. A write between would be taken for the old
//! one only at the very nanosecond of an earlier step.

use std::sync::{Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};

use crate::place::Times;

/// How old a change must be, in nanoseconds, before a later one is sure to have another time.
const SETTLING: i64 = 100_000_000;

/// The time of day, and how often it was set back between two looks.
#[derive(Debug)]
pub struct Clock(Mutex<Setbacks>);

#[derive(Debug)]
struct Setbacks {
    /// The most that the time of day was known to be ahead of the uptime.
    ahead: i64,
    count: u64,
}

/// Times of a file that change with its next write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settled {
    times: Times,
    setbacks: u64,
}

impl Settled {
    pub fn times(&self) -> &Times {
        &self.times
    }

    /// Whether the time of day was set back since this process has looked first.
    pub fn is_after_setback(&self) -> bool {
        self.setbacks > 0
    }
}

#[cfg(test)]
impl Settled {
    pub(crate) fn of_times(times: Times) -> Self {
        Self { times, setbacks: 0 }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self(Mutex::new(Setbacks { ahead: i64::MIN, count: 0 }))
    }
}

impl Clock {
    /// `times` of a file that was not written since they were read, nor is now. `None` if its next write may not change
    /// them.
    pub fn settled(&self, times: Times) -> Option<Settled> {
        let sample = ClockSample::now();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).settled(times, sample)
    }
}

/// The clocks' values, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct ClockSample {
    /// The time that a write would give to its file.
    step: i64,
    /// The time of day, and the uptime before and after it was asked.
    now: i64,
    before: i64,
    after: i64,
}

impl ClockSample {
    fn now() -> Self {
        let step = nanoseconds(ClockId::RealtimeCoarse);
        let (before, now, after) = (uptime(), nanoseconds(ClockId::Realtime), uptime());
        Self { step, now, before, after }
    }
}

impl Setbacks {
    fn settled(&mut self, times: Times, sample: ClockSample) -> Option<Settled> {
        let setbacks = self.note(sample);
        is_settled(times.changed(), sample.step).then_some(Settled { times, setbacks })
    }

    /// Returns how often the time of day was set back until this look.
    fn note(&mut self, ClockSample { before, now, after, .. }: ClockSample) -> u64 {
        let (least, most) = (now.saturating_sub(after), now.saturating_sub(before));
        if most < self.ahead {
            (self.ahead, self.count) = (least, self.count + 1);
        }
        self.ahead = self.ahead.max(least);
        self.count
    }
}

/// Whether a file that was changed at this time, in seconds and nanoseconds, gets another by a write from `step` on. (A
/// program may set the time of a file's bytes freely; that of a change is the clock's.)
fn is_settled((seconds, nanoseconds): (i64, i64), step: i64) -> bool {
    // A file system of whole seconds, as ext4 with inodes of 128 bytes is one, has no nanoseconds.
    let changed = seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
    nanoseconds != 0 && step.saturating_sub(changed) >= SETTLING
}

fn uptime() -> i64 {
    nanoseconds(ClockId::Boottime)
}

fn nanoseconds(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn a_change_settles_once_the_clock_has_left_its_step() {
        let changed = (1000, 5);
        let at = 1000 * SECOND + 5;
        assert!(is_settled(changed, at + SETTLING));
        assert!(!is_settled(changed, at + SETTLING - 1), "the next write may have the same time");
        assert!(!is_settled(changed, at - SECOND), "a time in the future comes again");
        assert!(!is_settled((1000, 0), at + 100 * SECOND), "whole seconds");
        assert!(!is_settled((i64::MAX, 5), at));
    }

    #[test]
    fn a_step_that_lasts_settles_nothing() {
        let (times, at) = (Times::of_change((1000, 5)), 1000 * SECOND + 5);
        let mut setbacks = Setbacks { ahead: i64::MIN, count: 0 };
        let mut is_settled = |step| {
            let sample = ClockSample { step, now: at + SECOND, before: 0, after: 0 };
            setbacks.settled(times, sample).is_some()
        };
        assert!(!is_settled(at), "a write would get the same time, whatever the time of day is");
        assert!(is_settled(at + SETTLING));
    }

    #[test]
    fn a_write_after_a_look_has_no_time_of_before() {
        let folder = format!("/dev/shm/quinion-clock-{}", std::process::id());
        fs::create_dir(&folder).unwrap();
        let went_back = (0..200).find(|number| {
            // A new file: once a file's times were read, the kernel gives it a finer time.
            let path = format!("{folder}/{number}");
            let sample = ClockSample::now();
            fs::write(&path, "x").unwrap();
            let known = fs::metadata(&path).unwrap();
            known.ctime() * SECOND + known.ctime_nsec() < sample.step
        });
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(went_back, None);
    }

    #[test]
    fn a_clock_that_is_set_back_is_counted() {
        let mut setbacks = Setbacks { ahead: i64::MIN, count: 0 };
        let mut note = |before, now, after| setbacks.note(ClockSample { step: now, now, before, after });
        let day = 50 * SECOND;
        assert_eq!(note(100, day + 100, 100), 0);
        assert_eq!(note(200, day + 200, 200), 0, "it goes on");
        assert_eq!(note(300, day + 400, 900), 0, "the thread waited between the looks");
        assert_eq!(note(1000, day + 999, 1000), 1, "back by a nanosecond");
        assert_eq!(note(1100, day + 1099, 1100), 1);
        assert_eq!(note(1200, day + SECOND, 1200), 1, "forward");
        assert_eq!(note(1300, day + 1300, 1300), 2, "and back again");
    }
}

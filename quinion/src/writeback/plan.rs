//! Plan: the decisions of write-back, as numbers in and decisions out: when the background begins and stops, which
//! files it writes, and how long a writer that dirties too much waits.
//!
//! ```text
//!   pages not in the files   0 ---- calm ---- background ------- throttle ------- ceiling ---- all of memory
//!                                 |   (3/4)      |                   |                |
//!                              the background    begins             the writer        a file that takes nothing
//!                              stops                                more waits        for so long is given up
//! ```
//!
//! **Who waits how long.** A writer above the throttle waits until the whole is below it, or until as much was written
//! since it came as it and those who came with it are about to dirty. A file of which little is dirty is not made to
//! wait for others, up to the ceiling: a stuck device does not hold up the writers of another. And no writer waits for
//! longer than a bound: then it continues, or, above the ceiling, gets the error that the device completes nothing.
//!
//! Invariants:
//!  1. No I/O, no lock, no clock.
//!  2. calm <= background <= throttle <= ceiling, whatever the options say.

use std::time::Duration;

use crate::units::Millis;

use super::WritebackOptions;

/// The throttle is no more of memory than this, in parts of a hundred: readers need some, too.
const THROTTLE_PERCENT_MAX: u64 = 80;
/// A writer is not held up if its file has less than one part in so many of its even share of the dirty limit.
const SMALL_PART: u64 = 4;

/// How many pages may be not in the files yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirtyLimits {
    /// Where the background stops.
    pub calm: u64,
    /// Above this, it writes whatever is dirty.
    pub background: u64,
    /// Above this, a thread that dirties more waits.
    pub throttle: u64,
    /// Above this, a wait in vain ends with an error.
    pub ceiling: u64,
}

impl DirtyLimits {
    /// The limits of a cache of so many pages.
    pub fn of(pages: u64, options: &WritebackOptions) -> Self {
        let share = |percent: u64| pages / 100 * percent + pages % 100 * percent / 100;
        let throttle = share(u64::from(options.throttle_share).min(THROTTLE_PERCENT_MAX));
        let background = share(u64::from(options.background_share).min(THROTTLE_PERCENT_MAX)).min(throttle);
        let ceiling = throttle.saturating_mul(2).min(share(90)).max(throttle);
        Self { calm: background / 4 * 3, background, throttle, ceiling }
    }

    /// Whether the background begins to write whatever is dirty, if `unwritten` pages are.
    pub fn begins_all(&self, unwritten: u64) -> bool {
        unwritten > self.background
    }

    /// Whether it goes on with that: until it is calm.
    pub fn continues_all(&self, unwritten: u64) -> bool {
        unwritten > self.calm
    }
}

/// The dirty state of one file, as the background task sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileDirtyState {
    /// Since when something is dirty, if anything is.
    pub since: Option<Millis>,
    /// Until when it is let alone because it failed.
    pub paused_until: Option<Millis>,
    /// Whether a caller asked for it.
    pub is_asked: bool,
}

/// Which files the background writes in one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlushScope {
    /// Files with old dirty pages, and files that a caller asked for.
    Due,
    /// All that are dirty, since there is too much.
    All,
}

/// Whether the background begins a pass of a file now.
pub fn is_due(seen: &FileDirtyState, now: Millis, expire: Duration, scope: FlushScope) -> bool {
    let Some(since) = seen.since else { return false };
    let is_paused = seen.paused_until.is_some_and(|until| now < until);
    let is_old = now.0.saturating_sub(since.0) >= expire.as_millis() as u64;
    !is_paused && (scope == FlushScope::All || is_old || seen.is_asked)
}

/// The state that decides whether a writer has to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriterState {
    /// Pages that are not in the files.
    pub unwritten: u64,
    /// Pages of its own file among them.
    pub own: u64,
    pub files: u64,
    /// Pages that were written since it came.
    pub written: u64,
    /// How many have to be, so that it has done its share.
    pub share: u64,
    /// How long it has waited.
    pub waited: Duration,
    /// Whether its file failed since it came.
    pub failed: bool,
}

/// The decision for a writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThrottleVerdict {
    /// It goes on.
    Go,
    /// It waits, and looks again soon.
    Wait,
    /// It gets its file's error.
    Fail,
    /// It gets the error that its device completes nothing.
    Stuck,
}

/// Decides how a writer is throttled; see the head of this file.
pub fn throttle_verdict(limits: &DirtyLimits, waiting: &WriterState, wait_max: Duration) -> ThrottleVerdict {
    let small = limits.throttle / (SMALL_PART * waiting.files.max(1));
    let fits = waiting.unwritten <= limits.ceiling;
    if waiting.unwritten <= limits.throttle {
        ThrottleVerdict::Go
    } else if waiting.failed {
        ThrottleVerdict::Fail
    } else if waiting.own <= small && fits || waiting.written >= waiting.share {
        ThrottleVerdict::Go
    } else if waiting.waited < wait_max {
        ThrottleVerdict::Wait
    } else if fits {
        ThrottleVerdict::Go
    } else {
        ThrottleVerdict::Stuck
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limits() -> DirtyLimits {
        DirtyLimits::of(1000, &WritebackOptions::default())
    }

    #[test]
    fn the_usual_limits_are_a_tenth_and_a_fifth() {
        assert_eq!(limits(), DirtyLimits { calm: 75, background: 100, throttle: 200, ceiling: 400 });
    }

    proptest! {
        #[test]
        fn limits_rise_for_any_options(pages: u64, background: u8, throttle: u8) {
            let options = WritebackOptions {
                background_share: background,
                throttle_share: throttle,
                ..WritebackOptions::default()
            };
            let limits = DirtyLimits::of(pages, &options);
            prop_assert!(limits.calm <= limits.background && limits.background <= limits.throttle);
            prop_assert!(limits.throttle <= limits.ceiling && limits.ceiling <= pages);
        }
    }

    #[test]
    fn the_background_begins_above_its_mark_and_stops_below_a_lower_one() {
        let limits = limits();
        assert!(!limits.begins_all(100) && limits.begins_all(101));
        assert!(limits.continues_all(76) && !limits.continues_all(75));
    }

    #[test]
    fn a_pass_begins_by_age_or_request_or_for_all_but_not_in_a_pause() {
        let seen = FileDirtyState { since: Some(Millis(1000)), paused_until: None, is_asked: false };
        let expire = 30 * SECOND;
        assert!(
            !is_due(&seen, Millis(30_999), expire, FlushScope::Due)
                && is_due(&seen, Millis(31_000), expire, FlushScope::Due)
        );
        assert!(is_due(&FileDirtyState { is_asked: true, ..seen }, Millis(1000), expire, FlushScope::Due));
        assert!(is_due(&seen, Millis(1000), expire, FlushScope::All));
        let paused = FileDirtyState { paused_until: Some(Millis(40_000)), ..seen };
        assert!(
            !is_due(&paused, Millis(39_999), expire, FlushScope::All)
                && is_due(&paused, Millis(40_000), expire, FlushScope::Due)
        );
        assert!(!is_due(
            &FileDirtyState { since: None, is_asked: true, ..seen },
            Millis(90_000),
            expire,
            FlushScope::All
        ));
    }

    #[test]
    fn a_throttled_writer_continues_by_its_share_or_time_and_gets_the_failure() {
        let waiting = WriterState {
            unwritten: 300,
            own: 300,
            files: 1,
            written: 0,
            share: 8,
            waited: Duration::ZERO,
            failed: false,
        };
        let throttle_verdict = |waiting: WriterState| throttle_verdict(&limits(), &waiting, SECOND);
        assert_eq!(
            throttle_verdict(WriterState { unwritten: 200, failed: true, ..waiting }),
            ThrottleVerdict::Go,
            "nothing is wrong yet"
        );
        assert_eq!(throttle_verdict(waiting), ThrottleVerdict::Wait);
        assert_eq!(throttle_verdict(WriterState { written: 8, ..waiting }), ThrottleVerdict::Go);
        assert_eq!(
            throttle_verdict(WriterState { failed: true, written: 8, ..waiting }),
            ThrottleVerdict::Fail
        );
        assert_eq!(
            throttle_verdict(WriterState { waited: SECOND, ..waiting }),
            ThrottleVerdict::Go,
            "he was held up long enough"
        );
        assert_eq!(
            throttle_verdict(WriterState { waited: SECOND, unwritten: 401, ..waiting }),
            ThrottleVerdict::Stuck
        );
        assert_eq!(
            throttle_verdict(WriterState { own: 25, files: 2, ..waiting }),
            ThrottleVerdict::Go,
            "others' pages"
        );
        assert_eq!(throttle_verdict(WriterState { own: 26, files: 2, ..waiting }), ThrottleVerdict::Wait);
        assert_eq!(
            throttle_verdict(WriterState { own: 1, unwritten: 401, ..waiting }),
            ThrottleVerdict::Wait
        );
    }

    struct Simulation {
        limits: DirtyLimits,
        unwritten: u64,
        written: u64,
        /// For each writer: pages dirtied; pages it asks for, since which count of written pages, its share, how long.
        writers: Vec<(u64, u64, u64, u64, Duration)>,
    }

    impl Simulation {
        fn new(asks: &[u64]) -> Self {
            let writers = asks.iter().map(|&pages| (0, pages, 0, pages, Duration::ZERO)).collect();
            Self { limits: limits(), unwritten: 0, written: 0, writers }
        }
        fn step(&mut self, pages: u64) {
            let done = pages.min(self.unwritten);
            (self.unwritten, self.written) = (self.unwritten - done, self.written + done);
            let together: u64 = self.writers.iter().map(|writer| writer.1).sum();
            for at in 0..self.writers.len() {
                let (dirtied, asked, since, share, waited) = self.writers[at];
                let waiting = WriterState {
                    unwritten: self.unwritten,
                    own: self.unwritten,
                    files: 1,
                    written: self.written - since,
                    share,
                    waited,
                    failed: false,
                };
                let writer = &mut self.writers[at];
                match throttle_verdict(&self.limits, &waiting, SECOND) {
                    ThrottleVerdict::Go => {
                        self.unwritten += asked;
                        *writer = (dirtied + asked, asked, self.written, together, Duration::ZERO);
                    }
                    _ => writer.4 += Duration::from_millis(1),
                }
            }
        }
    }

    #[test]
    fn writers_of_one_device_progress_alike_and_dirty_pages_stay_bounded() {
        for speed in [1, 3, 10, 100] {
            let mut all = Simulation::new(&[8; 10]);
            for _ in 0..20_000 {
                all.step(speed);
                assert!(all.unwritten <= all.limits.throttle + 2 * 80, "{} at {speed}", all.unwritten);
            }
            let least = all.writers.iter().map(|writer| writer.0).min().unwrap();
            let most = all.writers.iter().map(|writer| writer.0).max().unwrap();
            // The one that is asked first each time has a little more.
            assert!(most - least <= least / 5 && least > 1000 * speed, "{least} to {most} at {speed}");
        }
    }
}

//! Plan: the decisions of write-back, as numbers in and decisions out: when the background begins and stops, which
//! files it writes, and how long a writer that dirties too much waits.
//!
//! ```text
//!   pages not in the files   0 ---- calm ---- background ---- throttle ---- ceiling ---------- most ---- all of memory
//!                                 |   (3/4)      |                |             |                |
//!                              the background    begins          the writer     a wait in vain   no wait in vain ends
//!                              stops                             more waits     is an error      well above this
//!   which of them count      all of them                        all but those of devices that are stuck,
//!                                                                of which (most - ceiling) are left out at most
//! ```
//!
//! **Who waits how long.** A writer above the throttle waits until the whole is below it, or until as much was written
//! since it came as it and those who came with it are about to dirty. A file of which little is dirty is not made to
//! wait for others, up to the ceiling. And no writer waits for longer than a bound: then it continues, or, above the
//! ceiling, gets the error that too little is written.
//!
//! **Stuck devices.** The dirty pages of a device that takes nothing (`stuck.rs`) are no reason to hold up a writer of
//! another: no wait of that writer makes them fewer. They are left out of its count, up to a bound, since they are in
//! memory all the same. For writers of the stuck device they count, and what other devices write does not: so these
//! wait, and are refused above the ceiling. A device that is slow, and not stuck, may have more pages than the ceiling:
//! then a writer of a device that has no more than the throttle allows is held up, and not refused.
//!
//! **The bound of all of them.** A writer goes on if the pages that count are below the ceiling, and all but
//! (most - ceiling) of the dirty pages count; or if all are below `most`; or after others were written in their place.
//! So all dirty pages together exceed `most` by little more than what the waiting writers are about to dirty. That is
//! nine tenths of memory: the rest is for readers. With a throttle of 45 hundredths or more the ceiling is `most`, and
//! no pages are left out.
//!
//! Invariants:
//!  1. No I/O, no lock, no clock.
//!  2. calm <= background <= throttle <= ceiling <= most, whatever the options say.

use std::time::Duration;

use crate::units::Millis;

use super::WritebackOptions;

/// The throttle is no more of memory than this, in parts of a hundred: readers need some, too.
const THROTTLE_PERCENT_MAX: u64 = 80;
/// And all dirty pages together no more than this, those of stuck devices among them.
const DIRTY_PERCENT_MAX: u64 = 90;
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
    /// The most pages that may be dirty in all, those of stuck devices among them.
    pub most: u64,
}

impl DirtyLimits {
    /// The limits of a cache of so many pages.
    pub fn of(pages: u64, options: &WritebackOptions) -> Self {
        let share = |percent: u64| pages / 100 * percent + pages % 100 * percent / 100;
        let throttle = share(u64::from(options.throttle_share).min(THROTTLE_PERCENT_MAX));
        let background = share(u64::from(options.background_share).min(THROTTLE_PERCENT_MAX)).min(throttle);
        let most = share(DIRTY_PERCENT_MAX);
        let ceiling = throttle.saturating_mul(2).min(most).max(throttle);
        Self { calm: background / 4 * 3, background, throttle, ceiling, most: most.max(ceiling) }
    }

    /// How many of `dirty` pages count for a writer, if `of_stuck` of them are of stuck devices other than its own.
    pub fn counted(&self, dirty: u64, of_stuck: u64) -> u64 {
        dirty.saturating_sub(of_stuck.min(self.most - self.ceiling))
    }

    /// Whether a writer whose wait was in vain goes on all the same: of the `dirty` pages so few are of its own device,
    /// `of_device`, that it waited for others'.
    pub fn is_held_up_by_others(&self, dirty: u64, of_device: u64) -> bool {
        dirty <= self.most && of_device <= self.throttle
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
    /// Pages that are not in the files, as far as they count for it: see [`DirtyLimits::counted`].
    pub unwritten: u64,
    /// Pages of its own file among them.
    pub own: u64,
    pub files: u64,
    /// Pages that were written since it came; 0 if its device is stuck, whose pages are not among them.
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
    /// The writer goes on.
    Go,
    /// The writer waits, and looks again soon.
    Wait,
    /// The writer gets its file's error.
    Fail,
    /// The writer has waited in vain. It gets the error that too little is written, unless
    /// [`DirtyLimits::is_held_up_by_others`].
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
        let usual = DirtyLimits { calm: 75, background: 100, throttle: 200, ceiling: 400, most: 900 };
        assert_eq!(limits(), usual);
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
            prop_assert!(limits.throttle <= limits.ceiling && limits.ceiling <= limits.most);
            prop_assert!(limits.most <= pages);
        }
    }

    #[test]
    fn the_background_begins_above_its_mark_and_stops_below_a_lower_one() {
        let limits = limits();
        assert!(!limits.begins_all(100) && limits.begins_all(101));
        assert!(limits.continues_all(76) && !limits.continues_all(75));
    }

    #[test]
    fn pages_of_stuck_devices_are_left_out_up_to_a_bound() {
        let limits = limits();
        assert_eq!((limits.counted(700, 450), limits.counted(300, 300)), (250, 0));
        assert_eq!((limits.counted(800, 500), limits.counted(800, 501)), (300, 300));
        // A page may be written between the two counts.
        assert_eq!(limits.counted(10, 11), 0);
        // Where the ceiling is the bound of all, none is left out.
        let high = DirtyLimits::of(1000, &WritebackOptions::default().throttle_share(80));
        assert_eq!(high.counted(850, 850), 850);
    }

    #[test]
    fn a_writer_is_refused_for_pages_of_its_own_device_or_at_the_end_of_memory() {
        let limits = limits();
        assert!(limits.is_held_up_by_others(900, 200));
        assert!(!limits.is_held_up_by_others(900, 201) && !limits.is_held_up_by_others(901, 0));
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

    /// Devices with a writer each, some of which take nothing for a while. A writer is at its device's one file.
    #[derive(Debug)]
    struct StuckSimulation {
        limits: DirtyLimits,
        dirty: Vec<u64>,
        written: u64,
        /// For each writer: how many pages were written when it came, and for how many steps it has waited.
        waits: Vec<(u64, u64)>,
    }

    impl StuckSimulation {
        const WAIT_STEPS: u64 = 8;
        const SHARE: u64 = 8;

        fn new(devices: usize) -> Self {
            let (dirty, waits) = (vec![0; devices], vec![(0, 0); devices]);
            Self { limits: limits(), dirty, written: 0, waits }
        }
        fn all(&self) -> u64 {
            self.dirty.iter().sum()
        }
        fn counted(&self, device: usize, stuck: u32) -> u64 {
            let is_stuck = |device: usize| stuck & 1 << device != 0;
            let others =
                (0..self.dirty.len()).filter(|&other| is_stuck(other)).map(|other| self.dirty[other]);
            match is_stuck(device) {
                true => self.all(),
                false => self.limits.counted(self.all(), others.sum()),
            }
        }
        /// Each device takes some pages, and each writer writes if it may. Returns which writers were refused.
        fn step(&mut self, stuck: u32) -> u32 {
            let mut refused = 0;
            for device in 0..self.dirty.len() {
                let taken = if stuck & 1 << device == 0 { self.dirty[device].min(4) } else { 0 };
                self.dirty[device] -= taken;
                self.written += taken;
            }
            for device in 0..self.dirty.len() {
                let (since, steps) = self.waits[device];
                let waiting = WriterState {
                    unwritten: self.counted(device, stuck),
                    own: self.dirty[device],
                    files: self.dirty.len() as u64,
                    written: if stuck & 1 << device == 0 { self.written - since } else { 0 },
                    share: Self::SHARE * self.dirty.len() as u64,
                    waited: Duration::from_secs(steps),
                    failed: false,
                };
                let verdict = throttle_verdict(&self.limits, &waiting, Duration::from_secs(Self::WAIT_STEPS));
                let goes_on = verdict == ThrottleVerdict::Go
                    || verdict == ThrottleVerdict::Stuck
                        && self.limits.is_held_up_by_others(self.all(), self.dirty[device]);
                if goes_on {
                    self.dirty[device] += Self::SHARE;
                } else if verdict == ThrottleVerdict::Stuck {
                    refused |= 1 << device;
                }
                let is_over = goes_on || verdict == ThrottleVerdict::Stuck;
                self.waits[device] = if is_over { (self.written, 0) } else { (since, steps + 1) };
            }
            refused
        }
    }

    proptest! {
        /// Whichever devices are stuck, and when.
        #[test]
        fn dirty_pages_of_all_devices_together_stay_bounded(
            devices in 1..10usize,
            phases in prop::collection::vec((any::<u32>(), 1..2000u32), 1..8),
        ) {
            let mut all = StuckSimulation::new(devices);
            for (stuck, steps) in phases {
                for _ in 0..steps {
                    all.step(stuck);
                    let most = all.limits.most + 2 * devices as u64 * StuckSimulation::SHARE;
                    prop_assert!(all.all() <= most, "{all:?}");
                }
            }
        }
    }

    #[test]
    fn stuck_devices_are_refused_more_and_a_healthy_one_is_not() {
        let mut all = StuckSimulation::new(3);
        let refused = (0..10_000).fold(0, |refused, _| refused | all.step(0b011));
        assert_eq!(refused, 0b011, "{all:?}");
        assert!(all.dirty[2] <= all.limits.throttle + StuckSimulation::SHARE, "it is throttled: {all:?}");
        assert!(all.written > 10_000, "it goes on: {all:?}");
        // They take pages again.
        assert_eq!((0..10_000).fold(0, |refused, _| refused | all.step(0)), 0, "{all:?}");
    }
}

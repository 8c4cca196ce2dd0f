//! Bar: the progress of a run and its remaining time, on standard error.
//!
//! ```text
//!   expected   a number of seconds for each repetition of each case, as measured on another machine
//!   done       the expected seconds of the repetitions that are over
//!   left       (all of it - done) x pace, minus what has passed since the last repetition ended
//!   pace       seconds that passed for each expected one
//! ```
//!
//! A repetition takes a millisecond in one experiment and a minute in another, so repetitions do not measure time. The
//! expected times may be wrong as a whole (a faster machine), which the pace corrects, and for each experiment, which
//! nothing corrects. At first the pace is that of the machine on which the times were measured, since a few quick
//! repetitions say little.
//!
//! Invariant: no time is shown before the first repetition has ended.

use std::fmt::Write;
use std::io::{IsTerminal, stderr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

const TICK: Duration = Duration::from_millis(500);
/// The share of the work that has to be done before the machine's own pace counts as much as the expected one.
const PRIOR_PART: f64 = 0.05;
/// Steps of the bar for each expected second.
const PLACES: f64 = 1000.0;

pub struct Bar {
    bar: ProgressBar,
    start: Instant,
    expected: f64,
    done: f64,
    left: Left,
}

/// When the run will end, once that can be estimated. The bar's thread reads it.
type Left = Arc<Mutex<Option<Instant>>>;

impl Bar {
    pub fn new(expected: f64) -> Self {
        let is_watched = stderr().is_terminal();
        let target = if is_watched { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let left = Left::default();
        let seen = Arc::clone(&left);
        let tell = move |_: &ProgressState, out: &mut dyn Write| {
            let end = *seen.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = out.write_str(&words(end.map(|end| end.saturating_duration_since(Instant::now()))));
        };
        let style = ProgressStyle::with_template("[{bar:30}]  {elapsed} gone{left}  {msg}");
        let style = style.expect("the template is a constant").with_key("left", tell);
        let bar = ProgressBar::with_draw_target(Some((expected * PLACES) as u64), target);
        let bar = bar.with_style(style.progress_chars("=> "));
        if is_watched {
            bar.enable_steady_tick(TICK);
        }
        Self { bar, start: Instant::now(), expected, done: 0.0, left }
    }

    pub fn set_message(&self, what: String) {
        self.bar.set_message(what);
    }

    /// A repetition of `expected` seconds is over.
    pub fn passed(&mut self, expected: f64) {
        self.done += expected;
        self.bar.set_position((self.done * PLACES) as u64);
        let left = seconds_left(self.expected, self.done, self.start.elapsed().as_secs_f64());
        let end = Instant::now().checked_add(Duration::try_from_secs_f64(left).unwrap_or_default());
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = end;
    }

    /// A repetition that will not take place, because its case ended early, is no longer expected.
    pub fn skipped(&mut self, expected: f64) {
        self.expected -= expected;
        self.bar.set_length((self.expected * PLACES) as u64);
    }

    pub fn aside<R>(&self, print: impl FnOnce() -> R) -> R {
        self.bar.suspend(print)
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// How long the rest of `expected` takes when `done` of it took `elapsed`; all in seconds.
fn seconds_left(expected: f64, done: f64, elapsed: f64) -> f64 {
    let prior = expected * PRIOR_PART;
    let pace = (elapsed + prior) / (done + prior).max(f64::MIN_POSITIVE);
    (expected - done).max(0.0) * pace
}

fn words(left: Option<Duration>) -> String {
    match left.map(|left| left.as_secs()) {
        None => String::new(),
        Some(0) => ", nearly done".to_owned(),
        Some(seconds @ 1..60) => format!(", about {seconds} s left"),
        Some(seconds) => format!(", about {} min left", (seconds + 30) / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_the_machine_and_not_a_few_quick_repetitions() {
        assert_eq!(seconds_left(100.0, 50.0, 50.0), 50.0);
        // Twice as slow as expected, and that for a while.
        let slow = seconds_left(100.0, 50.0, 100.0);
        assert!((90.0..=100.0).contains(&slow), "{slow}");
        // A hundredth of the work in no time at all, and in five times as much.
        let (quick, late) = (seconds_left(100.0, 1.0, 0.0), seconds_left(100.0, 1.0, 5.0));
        assert!(quick > 80.0 && late < 200.0, "{quick}, {late}");
        assert_eq!(seconds_left(100.0, 101.0, 90.0), 0.0);
    }

    #[test]
    fn no_time_is_named_before_something_has_ended() {
        let mut bar = Bar::new(60.0);
        let left = |bar: &Bar| *bar.left.lock().unwrap();
        assert_eq!((left(&bar), words(None)), (None, String::new()));
        bar.passed(30.0);
        let end = left(&bar).expect("a repetition has ended");
        assert!(end > Instant::now());
        bar.skipped(30.0);
        assert_eq!((bar.expected, bar.bar.length(), bar.bar.position()), (30.0, Some(30_000), 30_000));
        let said = [0, 27, 150].map(|seconds| words(Some(Duration::from_secs(seconds))));
        assert_eq!(said, [", nearly done", ", about 27 s left", ", about 3 min left"]);
    }
}

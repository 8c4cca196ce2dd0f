//! Ring limit: a viewer that rings and asks nothing is polled, and not slept for.
//!
//! A viewer steps its futex with each request, and so wakes a thread. Nothing keeps it from doing so without a
//! request, as fast as it can; then that thread would do nothing else.
//!
//! ```text
//!   rings that no request explains    up to RINGS_MAX in a WINDOW    more
//!   the thread                         sleeps on its futex            polls it every POLL_INTERVAL
//!   until                                                             it has asked as often, or the window is over
//! ```
//!
//! Each thread that sleeps for viewers has a limit for each of them, so no lock is needed. It counts a ring when the
//! number has changed, and one less for each request that was taken of that viewer since then: a viewer that asks as
//! often as it rings is always slept for. A request of a polled viewer waits for [`POLL_INTERVAL`] at most.
//!
//! Invariants:
//!  1. A viewer that is polled is looked at within [`POLL_INTERVAL`], whatever it does.
//!  2. Rings without requests wake a thread [`RINGS_MAX`] times in each [`WINDOW`] at most, and twice in each
//!     [`POLL_INTERVAL`].
//!
//! Not an invariant: that the numbers rise. If a viewer writes back an earlier number before a look, that ring was
//! not seen, and cost nothing.

use std::time::{Duration, Instant};

use quinion::internals::arena::control::REQUEST_SLOTS;

const RINGS_MAX: u32 = 512;
const WINDOW: Duration = Duration::from_secs(1);
/// Viewers wait for an answer for longer than that.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Heartbeats in a window. With each, a viewer may ask anew by all its slots, and give up before a request is taken.
const BEATS: u32 = (WINDOW.as_millis() / super::BEAT.as_millis()) as u32;
const _: () =
    assert!((BEATS + 1) * (REQUEST_SLOTS as u32) < RINGS_MAX, "a late owner is no reason to poll a viewer");

#[derive(Clone, Copy, Debug)]
pub(super) struct Observation {
    /// Counts the processes that had its viewer slot.
    pub(super) whose: u32,
    pub(super) number: u32,
    pub(super) taken: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitMode {
    Futex,
    Poll,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingLimit {
    last: Option<Observation>,
    /// In the window that began then; at most one more than [`RINGS_MAX`].
    unexplained: u32,
    window_start: Option<Instant>,
    next_poll: Option<Instant>,
}

impl RingLimit {
    pub(super) fn until_poll(&self, now: impl FnOnce() -> Instant) -> Option<Duration> {
        let left = self.next_poll?.saturating_duration_since(now());
        (!left.is_zero()).then_some(left)
    }

    pub(super) fn has_rung(&self, seen: &Observation) -> bool {
        self.last.is_some_and(|last| last.whose == seen.whose && last.number != seen.number)
    }

    pub(super) fn note(&mut self, seen: Observation, now: impl FnOnce() -> Instant) -> WaitMode {
        let has_rung = self.has_rung(&seen);
        self.next_poll = None;
        let Some(last) = self.last.replace(seen).filter(|last| last.whose == seen.whose) else {
            *self = Self { last: Some(seen), ..Self::default() };
            return WaitMode::Futex;
        };
        self.unexplained = self.unexplained.saturating_sub(seen.taken.wrapping_sub(last.taken));
        if !has_rung {
            return WaitMode::Futex;
        }
        self.unexplained = (self.unexplained + 1).min(RINGS_MAX + 1);
        if (2..=RINGS_MAX).contains(&self.unexplained) {
            return WaitMode::Futex; // most rings: without a look at the clock
        }
        let now = now();
        let in_window = self.window_start.is_some_and(|start| now.saturating_duration_since(start) < WINDOW);
        if self.unexplained > RINGS_MAX && in_window {
            self.next_poll = Some(now + POLL_INTERVAL);
            return WaitMode::Poll;
        }
        (self.unexplained, self.window_start) = (1, Some(now)); // the first of a window
        WaitMode::Futex
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        limit: RingLimit,
        seen: Observation,
        now: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            let seen = Observation { whose: 1, number: 7, taken: 0 };
            let mut fixture = Self { limit: RingLimit::default(), seen, now: Instant::now() };
            assert_eq!(fixture.check(), WaitMode::Futex);
            fixture
        }
        fn check(&mut self) -> WaitMode {
            assert_eq!(self.limit.until_poll(|| self.now), None, "it is not looked at yet");
            self.limit.note(self.seen, || self.now)
        }
        fn ring(&mut self) -> WaitMode {
            self.seen.number = self.seen.number.wrapping_add(1);
            self.check()
        }
        fn ring_slept_for(&mut self, count: u32) {
            (0..count).for_each(|ring| assert_eq!(self.ring(), WaitMode::Futex, "ring {ring}"));
        }
        fn exhaust(&mut self) {
            self.ring_slept_for(RINGS_MAX);
            assert_eq!(self.ring(), WaitMode::Poll);
        }
    }

    #[test]
    fn a_viewer_that_rings_without_asking_is_polled_until_the_window_is_over() {
        let mut fixture = Fixture::new();
        for _ in 0..3 {
            let window_end = fixture.now + WINDOW;
            fixture.exhaust();
            loop {
                assert_eq!(fixture.limit.until_poll(|| fixture.now), Some(POLL_INTERVAL));
                fixture.now += POLL_INTERVAL;
                if fixture.now >= window_end {
                    break;
                }
                assert_eq!(fixture.ring(), WaitMode::Poll);
            }
            fixture.now += WINDOW; // the next ring is in a window of its own
        }
    }

    /// 1. A viewer that is polled writes back the number of the last look, so that it seems to be quiet.
    /// 2. It is slept for, and rings as often as in a new window.
    #[test]
    fn a_viewer_that_seems_to_be_quiet_rings_once_before_it_is_polled_again() {
        let mut fixture = Fixture::new();
        fixture.exhaust();
        for _ in 0..20 {
            fixture.now += POLL_INTERVAL;
            assert_eq!(fixture.check(), WaitMode::Futex, "it has not rung");
            assert_eq!(fixture.ring(), WaitMode::Poll);
        }
    }

    #[test]
    fn a_viewer_that_asks_as_often_as_it_rings_is_never_polled() {
        let mut fixture = Fixture::new();
        // Its requests are taken late, by another thread, and some rings are seen as one.
        for round in 0..20_000_u32 {
            assert_eq!(fixture.ring(), WaitMode::Futex, "{round}");
            if round % 31 == 30 {
                fixture.seen.taken += 31;
                assert_eq!(fixture.check(), WaitMode::Futex);
            }
        }
    }

    #[test]
    fn a_viewer_that_asks_is_slept_for_again_within_the_window() {
        let mut fixture = Fixture::new();
        fixture.exhaust();
        for _ in 0..10 {
            fixture.now += POLL_INTERVAL;
            assert_eq!(fixture.ring(), WaitMode::Poll);
        }
        fixture.now += POLL_INTERVAL;
        fixture.seen.taken += 5; // they explain the ring that was too many, and four more
        fixture.ring_slept_for(4);
        assert_eq!(fixture.ring(), WaitMode::Poll);
    }

    #[test]
    fn windows_in_which_a_viewer_rings_a_bounded_number_of_times_do_not_add_up() {
        let mut fixture = Fixture::new();
        for _ in 0..20 {
            fixture.ring_slept_for(RINGS_MAX);
            fixture.now += WINDOW;
        }
    }

    #[test]
    fn the_next_process_in_a_seat_begins_anew() {
        let mut fixture = Fixture::new();
        fixture.ring_slept_for(RINGS_MAX);
        fixture.seen.whose = 2;
        assert_eq!(fixture.ring(), WaitMode::Futex);
        fixture.exhaust();
    }
}

//! Doorbells under a model checker: whenever the watcher and the workers sleep, no request is pending.
//!
//! ```text
//! RUSTFLAGS="--cfg quinion_model" cargo test -p quinion --release --test doorbells_model --target-dir target/model
//! ```
//!
//! Without that cfg this file is empty. A viewer asks while the watcher of its group looks, and workers look for
//! doorbells: the real code of `quinion::internals::arena::doorbells`. A thread's sleep is its end, with the number
//! that it would sleep on. The kernel's part follows when all have ended: a thread whose number has changed looks
//! again. When all sleep in the end, each request has been taken, once.
//!
//! # What the checker does not show
//!
//! That a sleeper is woken when the number changes behind its back: the thread that changes it wakes, and the kernel
//! compares. The viewer leaves that out where no thread sleeps, for which it needs sequential consistency (`wake_owner`
//! in `viewer`).

#![cfg(quinion_model)]

use loom::sync::Arc;
use loom::thread;
use model_support::{Needed, all_needed, explore};
use quinion::internals::arena::doorbells::{Doorbells, Found, WatchedViewers};
use quinion::internals::sync::Mutant;
use quinion::internals::sync::atomic::{AtomicU32, Ordering};

mod model_support;

const FREE: u32 = 0;
const PENDING: u32 = 1;
const TAKEN: u32 = 2;
/// The viewer's number.
const VIEWER: usize = 3;

struct Fixture {
    doorbells: Doorbells<1>,
    futex: AtomicU32,
    slots: [AtomicU32; 2],
}

impl Fixture {
    fn new() -> Arc<Self> {
        let slots = [AtomicU32::new(FREE), AtomicU32::new(FREE)];
        Arc::new(Self { doorbells: Doorbells::default(), futex: AtomicU32::new(0), slots })
    }

    fn ask(&self, slot: usize) {
        self.slots[slot].store(PENDING, Ordering::Release); // partner: the Acquire in `take_slot`
        self.futex.fetch_add(1, Ordering::SeqCst);
    }

    /// The watcher's half, until it would sleep: returns the number that it would sleep on.
    fn watch(&self, watched: &mut WatchedViewers) -> u32 {
        let mut is_rung = false;
        let number = watched.check(1, &self.futex, || {
            self.doorbells.put_up(VIEWER);
            is_rung = true;
        });
        if is_rung {
            self.doorbells.announce();
        }
        number
    }

    fn take_slot(&self, slot: usize) -> bool {
        self.slots[slot].load(Ordering::Relaxed) == PENDING
            && self.slots[slot].compare_exchange(PENDING, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// A worker's half, until it would sleep: returns how many requests it took, and the number that it would sleep
    /// on.
    fn work(&self) -> (u32, u32) {
        let mut taken = 0;
        loop {
            let (_, number) = self.doorbells.rings();
            let find = |viewer| {
                assert_eq!(viewer, VIEWER);
                let request = (0..2).find(|&slot| self.take_slot(slot));
                let more = self.slots.iter().any(|slot| slot.load(Ordering::Relaxed) == PENDING);
                Found { request, more: more && request.is_some() }
            };
            match self.doorbells.take(0..64, find) {
                Some(_) => taken += 1,
                None => return (taken, number),
            }
        }
    }

    /// When all threads have ended: those whose number is another look again, until all sleep. Of the workers one is
    /// enough: `numbers` are what they sleep on.
    fn settle(&self, watched: &mut WatchedViewers, mut number: u32, mut numbers: Vec<u32>) -> u32 {
        let mut taken = 0;
        loop {
            if self.futex.load(Ordering::SeqCst) != number {
                number = self.watch(watched);
                continue;
            }
            let rings = self.doorbells.rings().1;
            let Some(place) = numbers.iter().position(|&slept| slept != rings) else { break };
            let (more, slept) = self.work();
            taken += more;
            numbers[place] = slept;
        }
        taken
    }

    fn outcome(&self, taken: u32, asked: u32) -> String {
        let pending = self.slots.iter().filter(|slot| slot.load(Ordering::Relaxed) == PENDING).count();
        assert_eq!((taken, pending), (asked, 0), "wrong: taken and pending, when all sleep");
        "answered".into()
    }
}

/// One request, while the watcher looks and a worker looks for it.
#[test]
fn one_request() {
    explore(Some(3), &["answered"], || {
        let fixture = Fixture::new();
        let viewer = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.ask(0))
        };
        let worker = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.work())
        };
        let mut watched = WatchedViewers::default();
        let number = fixture.watch(&mut watched);
        viewer.join().unwrap();
        let (taken, slept) = worker.join().unwrap();
        let more = fixture.settle(&mut watched, number, vec![slept]);
        fixture.outcome(taken + more, 1)
    });
}

/// The doorbell is up already, for a request that was answered: another is made while a worker takes it down.
#[test]
fn a_request_behind_a_doorbell_that_is_up() {
    explore(Some(3), &["answered"], || {
        let fixture = Fixture::new();
        let mut watched = WatchedViewers::default();
        fixture.watch(&mut watched); // the first look puts the doorbell up
        let asked = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                fixture.ask(0);
                let number = fixture.watch(&mut watched);
                (watched, number)
            })
        };
        let (taken, slept) = fixture.work();
        let (mut watched, number) = asked.join().unwrap();
        let more = fixture.settle(&mut watched, number, vec![slept]);
        fixture.outcome(taken + more, 1)
    });
}

/// Two requests of one viewer, of which the watcher may see one change, and two workers.
#[test]
fn two_requests_and_two_workers() {
    explore(Some(2), &["answered"], || {
        let fixture = Fixture::new();
        let viewer = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || {
                fixture.ask(0);
                fixture.ask(1);
            })
        };
        let worker = {
            let fixture = Arc::clone(&fixture);
            thread::spawn(move || fixture.work())
        };
        let mut watched = WatchedViewers::default();
        let number = fixture.watch(&mut watched);
        let (ours, slept) = fixture.work();
        viewer.join().unwrap();
        let (theirs, their_sleep) = worker.join().unwrap();
        let more = fixture.settle(&mut watched, number, vec![slept, their_sleep]);
        fixture.outcome(ours + theirs + more, 2)
    });
}

// ---- each step is needed ------------------------------------------------------------------------------

const WRONG: &str = "wrong: taken and pending";

const NEEDED: &[Needed] = &[
    (Mutant::DoorbellHeard, &[("one_request", WRONG)]),
    (Mutant::DoorbellNumber, &[("one_request", WRONG)]),
    (Mutant::DoorbellRelease, &[("one_request", WRONG)]),
    (Mutant::DoorbellAcquire, &[("one_request", WRONG)]),
    (Mutant::DoorbellRings, &[("one_request", WRONG)]),
    (Mutant::DoorbellFirst, &[("a_request_behind_a_doorbell_that_is_up", WRONG)]),
    (Mutant::DoorbellAgain, &[("two_requests_and_two_workers", WRONG)]),
];

#[test]
fn no_step_can_be_left_out() {
    all_needed(Mutant::of_doorbells(), NEEDED);
}

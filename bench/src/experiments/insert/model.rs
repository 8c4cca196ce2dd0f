//! Model: what one lock costs more threads than this machine has processors. Computed, not measured, and named so.
//!
//! ```text
//!   thread   | work ------ | wait | hold | work ---- | hold | ..      a processor for each
//!   lock              one at a time, in the order in which they came; a hand-over if a thread waits
//! ```
//!
//! | number | is measured here, in the same repetition |
//! |---|---|
//! | hold | the time of an insertion (or of a batch) by one thread, which meets no other |
//! | hand-over | what an insertion takes longer by two threads that do nothing else, for each hold of the lock |
//! | work | a copy of a page that no cache of the processor has: the least that a reader does with it |
//!
//! Work is spread as intervals between calls are (exponentially), by numbers that are the same in each run; the hold is
//! always as long. One thread at a time and in turn is what a fair lock does at best; real ones are worse by wake-ups,
//! and real readers better by all that they do beside the copy.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::fixtures::pages::PAGE;
use crate::fixtures::places::Places;

const ROUNDS: usize = 2_000;

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Round {
    pub work: f64,
    pub hold: f64,
    /// Until the next waiting thread has the lock.
    pub hand_over: f64,
}

/// How long a round takes, over all threads: the time that passes over all rounds that are done.
pub fn each_round(threads: usize, round: Round) -> f64 {
    let mut numbers = Places(threads as u64);
    let mut think = || {
        let share = (numbers.next(1 << 30) + 1) as f64 / f64::from(1 << 30);
        -share.ln() * round.work
    };
    // When each thread wants the lock next; a time is a whole number of picoseconds, so that it has an order.
    let mut wanting: BinaryHeap<Reverse<u64>> = (0..threads).map(|_| Reverse(picoseconds(think()))).collect();
    let (mut free_at, all) = (0, threads * ROUNDS);
    for _ in 0..all {
        let Reverse(wanted_at) = wanting.pop().expect("each thread is there");
        let begins = if wanted_at >= free_at { wanted_at } else { free_at + picoseconds(round.hand_over) };
        free_at = begins + picoseconds(round.hold);
        wanting.push(Reverse(free_at + picoseconds(think())));
    }
    free_at as f64 / 1e3 / all as f64
}

fn picoseconds(nanoseconds: f64) -> u64 {
    (nanoseconds * 1e3) as u64
}

/// Nanoseconds to copy a page of `from`, where nothing was read lately.
pub fn copy_ns(from: &[u8]) -> f64 {
    let (mut to, pages) = ([0; PAGE], from.len() / PAGE);
    let mut places = Places(1);
    let spent = crate::harness::timing::alone(|| {
        for _ in 0..pages {
            let at = places.next(pages as u64) as usize * PAGE;
            to.copy_from_slice(&from[at..at + PAGE]);
            std::hint::black_box(&mut to);
        }
    });
    spent.cpu_ns / pages as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_takes_its_work_and_its_hold_and_never_hands_over() {
        let round = Round { work: 300.0, hold: 50.0, hand_over: 1e6 };
        let each = each_round(1, round);
        assert!((330.0..370.0).contains(&each), "{each}");
    }

    #[test]
    fn many_threads_take_the_time_of_the_lock_and_few_share_the_work() {
        let round = Round { work: 300.0, hold: 50.0, hand_over: 40.0 };
        let [few, many] = [2, 64].map(|threads| each_round(threads, round));
        assert!((150.0..215.0).contains(&few), "{few}");
        assert!((89.0..91.0).contains(&many), "{many}");
        assert_eq!(each_round(64, round), many, "the same each time");
    }

    #[test]
    fn a_batch_pays_for_the_lock_once() {
        let single = each_round(32, Round { work: 300.0, hold: 55.0, hand_over: 40.0 });
        let batch = each_round(32, Round { work: 32.0 * 300.0, hold: 32.0 * 8.0, hand_over: 40.0 }) / 32.0;
        assert!(single / batch > 5.0, "{single} and {batch}");
    }
}

//! Thread list: the rule by which the object in a program knows that it has seen all threads, against a simulated
//! kernel whose lists leave threads out as the real one's may.
//!
//! ```text
//!   a process: one thread that blocks the signal and lives, others that start and end at random
//!   a list:    if a thread ends while it is made, it may leave out any thread that lives
//! ```

use std::cell::RefCell;

use proptest::prelude::*;

#[path = "../../preload/src/thread_list.rs"]
mod thread_list;

use thread_list::{BlockedBy, LISTS_MAX, ThreadList, blocked_by};

/// The thread that blocks the signal, from before the first list until after the last.
const BLOCKING: u32 = 1;

/// What happens before one step of the rule: a list, or a count.
#[derive(Clone, Debug)]
struct Change {
    /// How many threads start.
    started: u8,
    /// Which of those that live end.
    ended: Vec<prop::sample::Index>,
    /// Whether a list that is made meanwhile leaves the blocking thread out, if the kernel might.
    leaves_out: bool,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let ended = prop::collection::vec(any::<prop::sample::Index>(), 0..2);
    let change = (0..2_u8, ended, prop::bool::weighted(0.8))
        .prop_map(|(started, ended, leaves_out)| Change { started, ended, leaves_out });
    prop::collection::vec(change, 2 * LISTS_MAX as usize)
}

/// A process of some threads, and what is still to happen to it.
struct Process {
    threads: Vec<u32>,
    next: u32,
    changes: std::vec::IntoIter<Change>,
}

impl Process {
    fn new(others: u32, changes: Vec<Change>) -> Self {
        let next = BLOCKING + 1 + others;
        Self { threads: (BLOCKING + 1..next).collect(), next, changes: changes.into_iter() }
    }

    /// The next change; whether a thread ended, and whether a list may leave out the blocking thread for that.
    fn step(&mut self) -> bool {
        let Some(change) = self.changes.next() else { return false };
        for _ in 0..change.started {
            self.threads.push(self.next);
            self.next += 1;
        }
        let before = self.threads.len();
        for ended in change.ended {
            if !self.threads.is_empty() {
                self.threads.swap_remove(ended.index(self.threads.len()));
            }
        }
        self.threads.len() < before && change.leaves_out
    }

    /// A list during which the next change happens: threads that end then may be in it or not.
    fn list(&mut self) -> ThreadList {
        let before = self.threads.clone();
        let leaves_out = self.step();
        let mut list = ThreadList::EMPTY;
        let listed = if leaves_out { before } else { self.threads.clone() };
        listed.iter().for_each(|&thread| list.add(thread, BlockedBy::None));
        if !leaves_out {
            list.add(BLOCKING, BlockedBy::Sleepers);
        }
        list
    }

    fn count(&mut self) -> u64 {
        self.step();
        self.threads.len() as u64 + 1
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    #[test]
    fn a_thread_that_blocks_the_signal_is_found_though_lists_leave_threads_out(
        others in 0_u32..4,
        changes in changes(),
    ) {
        let process = RefCell::new(Process::new(others, changes));
        let found = blocked_by(|| Some(process.borrow_mut().list()), || Some(process.borrow_mut().count()));
        prop_assert_ne!(found, BlockedBy::None);
    }
}

/// 1. A thread ends while the first list is made, and another while the second is: both leave the blocking thread out.
/// 2. One of the listed threads ends behind the second list: as many are counted then as were listed.
#[test]
fn a_count_behind_two_equal_lists_that_leave_a_thread_out_does_not_complete_them() {
    let listed = [[7, 8], [7, 8], [7, 8], [8, 9], [8, 9], [8, 9], [8, 9], [8, 9]];
    let mut lists = listed.iter().map(|threads| {
        let mut list = ThreadList::EMPTY;
        threads.iter().for_each(|&thread| list.add(thread, BlockedBy::None));
        list
    });
    let mut counts = [3, 3, 2, 3, 3, 3, 3].into_iter();
    assert_eq!(blocked_by(|| lists.next(), || counts.next()), BlockedBy::Runner);
}

#[test]
fn threads_that_do_not_change_are_listed_twice_and_a_list_that_cannot_be_made_counts_as_blocked() {
    let process = RefCell::new(Process::new(3, Vec::new()));
    let mut lists = 0;
    let list = || {
        lists += 1;
        Some(process.borrow_mut().list())
    };
    assert_eq!(blocked_by(list, || Some(process.borrow_mut().count())), BlockedBy::Sleepers);
    assert_eq!(lists, 2);
    assert_eq!(blocked_by(|| None, || Some(1)), BlockedBy::Sleepers);
    assert_eq!(blocked_by(|| Some(ThreadList::EMPTY), || None), BlockedBy::Sleepers);
}

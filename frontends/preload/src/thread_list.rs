//! Thread list: when a list of a process's threads is complete. The object and the command's tests compile this file.
//!
//! ```text
//!   list, count, list, count, list ...   until a count stands between two equal lists, and is their length
//! ```
//!
//! The kernel lists threads in pieces, from the last one of the piece before: if that one has ended meanwhile, the list
//! may leave out another thread that lives. Two lists may leave out the same, so their length is compared with the
//! kernel's own count.
//!
//! Why that is enough: a thread that is in both lists lived at the count between them, for numbers of threads are not
//! used again so soon. A thread that both left out, and that lived all the time, makes the count larger than the lists.
//! (A count behind the second list can be equal: a listed thread may have ended before it.) If threads start and end
//! all the time, no list is complete; then at least one of them runs.

/// Which of a process's other threads block a signal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum BlockedBy {
    None,
    /// Threads that all sleep: a program that leaves its signals to one thread looks so, for as long as it lives.
    Sleepers,
    /// At least one that runs, or would if it had a processor: it may be new, or in a section of the library's.
    Runner,
}

/// The threads of a process, in short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ThreadList {
    count: u64,
    sum: u64,
    found: BlockedBy,
}

impl ThreadList {
    pub const EMPTY: Self = Self { count: 0, sum: 0, found: BlockedBy::None };

    /// Adds the thread of this number, and by which kind of thread it has the signal blocked.
    pub fn add(&mut self, number: u32, blocked: BlockedBy) {
        self.count += 1;
        // Each is large, and other than the next: two lists that differ hardly have the same sum.
        self.sum =
            self.sum.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23));
        self.found = self.found.max(blocked);
    }
}

/// How often threads are listed at most.
pub const LISTS_MAX: u32 = 8;

/// The verdict of a complete list, made by `list` and compared with the number of threads that `count` gives. If
/// either fails, sleeping threads block the signal.
pub fn blocked_by(
    mut list: impl FnMut() -> Option<ThreadList>,
    mut count: impl FnMut() -> Option<u64>,
) -> BlockedBy {
    let Some(mut before) = list() else { return BlockedBy::Sleepers };
    for _ in 1..LISTS_MAX {
        let (Some(threads), Some(now)) = (count(), list()) else {
            return BlockedBy::Sleepers;
        };
        if now == before && now.count == threads {
            return now.found;
        }
        before = now;
    }
    BlockedBy::Runner
}

//! Fork counts: which threads of this process are about to make a child, or to give a descriptor a number of their own
//! choice.
//!
//! | count | of threads that |
//! |---|---|
//! | `FORKS` | fork, or become another program, from before the descriptors go back until the child is there |
//! | `COPYING` | are in the very call that copies the process, or that gives a descriptor a number of its choice |
//! | `VFORKS` | are suspended until a child of theirs has left our memory |
//! | `SPAWNERS` | are inside `posix_spawn`, by their numbers |
//!
//! Numbers alone: what is done before a child is made is in `forks.rs`, and the child that finds out that it is one
//! (`process.rs`) begins with zeros. A handler that forks between two of these steps makes a child that counts none, so
//! no count goes below zero.
//!
//! Invariants:
//!  1. A thread counts first and then looks at the descriptors and the switch. A thread that publishes a descriptor, or
//!     takes the switch, does that first and then looks at the counts. Both in SeqCst steps: one sees the other.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use quinion_view::viewer::sys::clock_millis;

use crate::kernel;

/// How many threads are inside `vfork`, each suspended until its child has left our memory.
static VFORKS: AtomicU32 = AtomicU32::new(0);

/// The threads inside `posix_spawn`, 0 where there is none. Each looks for itself alone, so no order is needed.
static SPAWNERS: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];

/// Forks and execs that were begun (high half) and of these the ones under way (low half).
static FORKS: AtomicU64 = AtomicU64::new(0);

const BEGUN: u64 = 1 << 32;

/// Threads in the very call that copies the process, or in one that gives a descriptor a number that is chosen.
static COPYING: AtomicU32 = AtomicU32::new(0);

/// The number that [`forked_since`] compares with.
#[inline]
pub fn forks() -> u64 {
    FORKS.load(Ordering::SeqCst) // partner: `begin_fork`
}

/// Whether some thread forked, or is about to, since `before` was read: a descriptor opened meanwhile may be
/// a child's too.
pub fn forked_since(before: u64) -> bool {
    // SeqCst, partner: `begin_fork`, whose caller counts first and then looks at the descriptors. A thread that has
    // published a descriptor and sees no fork here is seen by the fork that comes later.
    before as u32 != 0 || FORKS.load(Ordering::SeqCst) != before
}

/// A fork is about to be made, or a program to be become; `copies` is 1 before the very call that copies the process,
/// else 0.
pub fn begin_fork(copies: u32) {
    COPYING.fetch_add(copies, Ordering::SeqCst); // partner: `wait_for_forks`
    FORKS.fetch_add(BEGUN + 1, Ordering::SeqCst); // partners: `forked_since`, `wait_for_forks`
}

/// The fork is done, or is not made. A child that was forked by a handler between the two counts counts none.
pub fn end_fork(copies: u32) {
    let less = |forks: u64| (forks as u32 != 0).then(|| forks - 1);
    let _ = FORKS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less); // partner: `forked_since`
    let fewer = |copying: u32| copying.checked_sub(copies);
    let _ = COPYING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer); // partner: `wait_for_forks`
}

/// A thread that is about to give a number of its own choice to a descriptor, until this is dropped. A number that is
/// free may be ours in a moment.
pub struct Renumbering(());

impl Renumbering {
    /// Counts the calling thread as one that is about to renumber a descriptor.
    pub fn count() -> Self {
        COPYING.fetch_add(1, Ordering::SeqCst); // partner: `wait_for_forks`
        Self(())
    }
}

impl Drop for Renumbering {
    fn drop(&mut self) {
        let fewer = |copying: u32| copying.checked_sub(1);
        let _ = COPYING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer); // partner: `wait_for_forks`
    }
}

/// Waits until no thread is in the middle of a fork, some milliseconds at most: its child would keep descriptors that
/// are ours for a moment. Called while the switch is BUSY, which keeps further forks from beginning. A thread in the
/// very call that makes the child, or that duplicates a descriptor onto a number, waits for nothing of ours. So it is
/// waited for longer: it may have no processor.
pub fn wait_for_forks() {
    /// About 10 ms. A child of `vfork` counts until it has its program; its descriptors were copied long before. And a
    /// thread that forks may be in a handler of the program's (`pthread_atfork`), which may wait for us; where the C
    /// library is patched it comes by here once more after that.
    const TURNS_MAX: u32 = 200;
    const COPYING_MILLIS_MAX: u64 = 1_000;
    // SeqCst twice, partner: the additions in `begin_fork`.
    (0..TURNS_MAX).take_while(|_| FORKS.load(Ordering::SeqCst) as u32 != 0).for_each(kernel::wait);
    let mut until = None;
    while COPYING.load(Ordering::SeqCst) != 0 {
        let now = clock_millis();
        if now >= *until.get_or_insert(now + COPYING_MILLIS_MAX) {
            return;
        }
        kernel::wait(TURNS_MAX);
    }
}

/// A child is about to be made that will run in our memory.
pub fn begin_vfork() {
    VFORKS.fetch_add(1, Ordering::SeqCst); // before the child exists; partner: `has_vforks`
}

/// Such a child has left our memory.
pub fn end_vfork() {
    // As forks. SeqCst, partner: `has_vforks`.
    let _ = VFORKS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
}

/// Whether such a child may be in our memory: the caller may be one.
#[inline]
pub fn has_vforks() -> bool {
    VFORKS.load(Ordering::Relaxed) != 0
}

/// Where a thread inside `posix_spawn` is noted, until it is over.
#[derive(Clone, Copy)]
pub struct Spawner(Option<&'static AtomicU32>);

impl Spawner {
    /// Notes a thread; of very many, some are not.
    pub fn note(thread: u32) -> Self {
        let is_mine = |place: &&AtomicU32| {
            place.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        Self(SPAWNERS.iter().find(is_mine))
    }

    /// It is over.
    pub fn end(self) {
        if let Some(place) = self.0 {
            place.store(0, Ordering::Relaxed); // as at `SPAWNERS`
        }
    }

    /// Whether this thread is noted.
    pub fn is_noted(thread: u32) -> bool {
        SPAWNERS.iter().any(|place| place.load(Ordering::Relaxed) == thread)
    }
}

/// In a forked child: what other threads of the parent were in the middle of is not under way here.
pub fn settle_child() {
    VFORKS.store(0, Ordering::Relaxed);
    FORKS.store(0, Ordering::Relaxed);
    COPYING.store(0, Ordering::Relaxed);
    SPAWNERS.iter().for_each(|place| place.store(0, Ordering::Relaxed));
}

//! Fork counts: which threads of this process are about to make a child, or to give a descriptor a number of their own
//! choice.
//!
//! | count | of threads that |
//! |---|---|
//! | `FORKS` | fork, or become another program, from before the descriptors go back until the child is there |
//! | `COPYING` | are in the very call that copies the process, or that gives a descriptor a number of its choice |
//! | `VFORKS` | are suspended in `vfork` until their child has left this memory |
//! | `SPAWNERS` | are inside `posix_spawn` or `pidfd_spawn`, by their numbers |
//!
//! What is done before a child is made is in `forks.rs`; a child (`process.rs`) begins with zeros. A handler that forks
//! between two of these steps makes a child that counts none, so no count goes below zero.
//!
//! Invariant: a thread counts first and then looks at the descriptors and the switch. A thread that publishes a
//! descriptor, or takes the switch, does that first and then looks at the counts. Both in SeqCst steps: one sees the
//! other.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use quinion_view::viewer::sys::clock_millis;

use crate::kernel;

/// How many threads are inside `vfork`, each suspended until its child has left this memory.
static VFORKS: AtomicU32 = AtomicU32::new(0);

/// 0: none. Each thread looks for itself alone, so no order is needed.
static SPAWNERS: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];

/// Begun (high half) and of these under way (low half).
static FORKS: AtomicU64 = AtomicU64::new(0);

const BEGUN: u64 = 1 << 32;

static COPYING: AtomicU32 = AtomicU32::new(0);

/// The number that [`forked_since`] compares with.
#[inline]
pub fn forks() -> u64 {
    FORKS.load(Ordering::SeqCst) // partner: `begin_fork`
}

/// Whether some thread forked, or is about to, since `before` was read: a child may have what was opened meanwhile.
pub fn forked_since(before: u64) -> bool {
    // SeqCst, partner: `begin_fork`, whose caller counts first and then looks at the descriptors. A later fork sees
    // what a thread that sees no fork here has published.
    before as u32 != 0 || FORKS.load(Ordering::SeqCst) != before
}

/// Before a fork or exec; `copies` is 1 before the very call that copies the process, else 0.
pub fn begin_fork(copies: u32) {
    COPYING.fetch_add(copies, Ordering::SeqCst); // partner: `wait_for_forks`
    FORKS.fetch_add(BEGUN + 1, Ordering::SeqCst); // partners: `forked_since`, `wait_for_forks`
}

/// After it. A child that was forked by a handler between the two counts counts none.
pub fn end_fork(copies: u32) {
    let less = |forks: u64| (forks as u32 != 0).then(|| forks - 1);
    let _ = FORKS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less); // partner: `forked_since`
    let fewer = |copying: u32| copying.checked_sub(copies);
    let _ = COPYING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer); // partner: `wait_for_forks`
}

/// A thread that is about to give a descriptor a number of the program's choice, until this is dropped. A free number
/// may become the library's.
pub struct Renumbering(());

impl Renumbering {
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

/// Waits until no thread is in the middle of a fork, some milliseconds at most: its child would keep the library's
/// momentary descriptors. Called while the switch is BUSY, which keeps further forks from beginning. A thread in the
/// very call that makes the child, or duplicates onto a number, waits for nothing of the library's, and may have no
/// processor: it is waited for longer.
pub fn wait_for_forks() {
    /// About 10 ms. A child of `vfork` counts until it has its program; its descriptors were copied long before. And a
    /// forking thread may be in a `pthread_atfork` handler that waits for this one; where the C library is patched it
    /// comes by here once more.
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

/// A child is about to be made that will run in this memory.
pub fn begin_vfork() {
    VFORKS.fetch_add(1, Ordering::SeqCst); // before the child exists; partner: `has_vforks`
}

/// A child that ran in this memory has left it.
pub fn end_vfork() {
    // As forks. SeqCst, partner: `has_vforks`.
    let _ = VFORKS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
}

/// Whether a child of `vfork` may be in this memory: the caller may be one.
#[inline]
pub fn has_vforks() -> bool {
    VFORKS.load(Ordering::Relaxed) != 0
}

#[derive(Clone, Copy)]
pub struct Spawner(Option<&'static AtomicU32>);

impl Spawner {
    pub fn note(thread: u32) -> Self {
        let is_mine = |place: &&AtomicU32| {
            place.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        Self(SPAWNERS.iter().find(is_mine))
    }

    pub fn end(self) {
        if let Some(place) = self.0 {
            place.store(0, Ordering::Relaxed); // as at `SPAWNERS`
        }
    }

    pub fn is_noted(thread: u32) -> bool {
        SPAWNERS.iter().any(|place| place.load(Ordering::Relaxed) == thread)
    }
}

/// In a forked child: the steps of the parent's other threads are not under way here.
pub fn settle_child() {
    VFORKS.store(0, Ordering::Relaxed);
    FORKS.store(0, Ordering::Relaxed);
    COPYING.store(0, Ordering::Relaxed);
    SPAWNERS.iter().for_each(|place| place.store(0, Ordering::Relaxed));
}

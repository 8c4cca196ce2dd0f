//! Deferred handles: the handles of which the owner could not be told that this process has given them back.
//!
//! A list of numbers without an order; what is done with them is in `deferred_detach.rs`.
//!
//! Not an invariant: that all are kept. Once the list is full, the owner takes back the rest at the end of the process.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PLACES: usize = 1024;

/// A number stands in one place at most: one thread gives a handle back.
static HANDLES: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];

/// A hint: a thread that misses one leaves it to the next.
static ARE_PENDING: AtomicBool = AtomicBool::new(false);

pub fn are_pending() -> bool {
    ARE_PENDING.load(Ordering::Relaxed)
}

#[cold]
pub fn add(handle: u64) {
    let put =
        |place: &AtomicU64| place.compare_exchange(0, handle, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    let _is_kept = HANDLES.iter().any(put);
    ARE_PENDING.store(true, Ordering::Relaxed);
}

#[cold]
pub fn send_all(tell: impl Fn(u64) -> bool) {
    ARE_PENDING.store(false, Ordering::Relaxed); // a thread that keeps one from here on says so again
    for place in &HANDLES {
        let handle = place.swap(0, Ordering::Relaxed); // no other memory goes with a number
        if handle != 0 && !tell(handle) {
            return add(handle);
        }
    }
}

/// In a forked child, by its only thread. It writes only if the parent owes something: nearly none does.
pub fn forget() {
    if ARE_PENDING.swap(false, Ordering::Relaxed) {
        HANDLES.iter().for_each(|place| place.store(0, Ordering::Relaxed));
    }
}

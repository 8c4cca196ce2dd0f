//! Deferred detach: handles that this process has given back and of which the owner could not be told.
//!
//! ```text
//!   give_back(handle) --told--> the owner closes the file, if no other viewer has it
//!                     `--late, or no slot is free--> owed --pay: the next time that this process opens, closes,
//!                                                          attaches or removes a file--> told
//! ```
//!
//! An owner that was stopped, or had no processor, for longer than a question waits is told nothing until it moves
//! again. A handle that it is not told of then would keep its file open until this process ends: the space of a removed
//! file would not come back, and its file system could not be unmounted.
//!
//! Not an invariant: that all is told. The owner takes back at the end of the process what finds no place here, what a
//! process owes that touches no file any more, and what one owed that has stopped while the owner was late. A forked
//! child owes nothing: the handles are its parent's.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use quinion_view::arena::control::Operation;
use quinion_view::viewer::RequestError;

use crate::process;

const PLACES: usize = 1024;
/// Handles, 0 for none. A number is in one place at most, as one thread gives it back.
static HANDLES: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// Whether there may be any. A hint: a thread that misses one leaves it to the next.
static IS_OWING: AtomicBool = AtomicBool::new(false);

/// Tells the owner that a handle is not used any more, now or later.
pub fn give_back(handle: u64) {
    pay();
    if !tell(handle) {
        keep(handle);
    }
}

/// Tells the owner what it could not be told, as far as it listens. The caller is counted ([`process::enter`]).
#[inline]
pub fn pay() {
    if IS_OWING.load(Ordering::Relaxed) {
        pay_all();
    }
}

/// Whether there may be something that the owner was not told.
pub fn is_owing() -> bool {
    IS_OWING.load(Ordering::Relaxed)
}

/// In a forked child, by its only thread. A child whose parent owes nothing, as nearly all, writes nothing.
pub fn forget() {
    if IS_OWING.swap(false, Ordering::Relaxed) {
        HANDLES.iter().for_each(|place| place.store(0, Ordering::Relaxed));
    }
}

#[cold]
fn pay_all() {
    IS_OWING.store(false, Ordering::Relaxed); // a thread that keeps one from here on says so again
    for place in &HANDLES {
        let handle = place.swap(0, Ordering::Relaxed); // no other memory goes with a number
        if handle != 0 && !tell(handle) {
            return keep(handle);
        }
    }
}

/// Whether the owner has been told, or has ended, and has all handles back.
fn tell(handle: u64) -> bool {
    let told = process::viewer().map(|viewer| viewer.tell(Operation::Detach, [handle, 0, 0]));
    !matches!(told, Some(Err(RequestError::Late | RequestError::NoSlot)))
}

#[cold]
fn keep(handle: u64) {
    let put =
        |place: &AtomicU64| place.compare_exchange(0, handle, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    let _is_kept = HANDLES.iter().any(put);
    IS_OWING.store(true, Ordering::Relaxed);
}

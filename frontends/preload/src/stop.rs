//! Stop: all descriptors go back to the kernel, for good, because something cannot be followed.
//!
//! ```text
//!   SERVING --> STOPPING: no new ones are served --> each goes back --> the owner is notified --> the switch is off
//!   CHILD --> LEFT ------------------------------------------------------------------------------------'
//! ```
//!
//! Two threads that stop at once give back the same descriptors, each of which goes once. A thread that publishes a
//! descriptor meanwhile gives that back itself (`descriptors.rs`).

use core::sync::atomic::Ordering;

use quinion_view::arena::control::Reason;

use crate::process::{self, CHILD, Inside, LEFT, SERVING, STOPPING, busy, is_on, mode, note_stopped, switch};
use crate::{deferred_detach, deferred_handles, descriptors, faults, kernel};

/// Whether the program's actions for the two signals are restored when a process is served no more.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Actions {
    Back,
    /// The library keeps them: what a read under way looks at may be gone.
    Stay,
}

pub fn stop(reason: Reason) {
    stop_with(reason, Actions::Back);
}

pub fn stop_with(reason: Reason, actions: Actions) {
    let _inside = Inside::count();
    match mode() {
        from @ (SERVING | STOPPING) => {
            note_stopped();
            // SeqCst, partner: `mode`. If it is BUSY meanwhile, SERVING would come back; if it is the constant, another
            // thread has stopped before.
            let stops = switch().compare_exchange(from, STOPPING, Ordering::SeqCst, Ordering::SeqCst);
            if stops.is_err() {
                return stop_with(reason, actions);
            }
            descriptors::detach_all(reason);
            send_pending_detaches();
            leave(actions);
        }
        CHILD => {
            note_stopped();
            busy(switch(), CHILD, || LEFT);
            if is_on() {
                return stop_with(reason, actions); // it joined meanwhile
            }
            leave(actions);
        }
        _ => {}
    }
}

/// Waits some milliseconds until the owner has read which handles were given back: a stopped process tells it no more.
fn send_pending_detaches() {
    const TURNS_MAX: u32 = 100;
    for turn in 0..TURNS_MAX {
        deferred_detach::send_pending();
        if !deferred_handles::are_pending() {
            return;
        }
        kernel::wait(turn);
    }
}

fn leave(actions: Actions) {
    if actions == Actions::Back {
        faults::uninstall();
    }
    process::leave();
}

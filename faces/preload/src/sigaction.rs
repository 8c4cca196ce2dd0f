//! Sigaction: the calls by which a program says what a signal does, where that is one of the two that are ours.
//!
//! The kernel is told an entry in place of the program's handler, and the program hears its own (`faults.rs`). A
//! program that ignores one of the signals, has more handlers than there are entries, or sets one in ways that are not
//! seen here is served no more ([`stop`]); from then on, the kernel has the program's own actions again.

use core::ffi::c_int;

use quinion_view::arena::control::Reason;

use crate::faults::{Action, SIG_IGN, is_ours, real_action};
use crate::stop::stop;
use crate::wrap::{call_real, names};

const SIG_ERR: usize = usize::MAX;
const SA_RESTART: u32 = 0x1000_0000;
const SA_INTERRUPT: u32 = 0x2000_0000;
const SA_NODEFER: u32 = 0x4000_0000;
const SA_RESETHAND: u32 = 0x8000_0000;

/// Sets an action of one of the two signals for the program, and says what it was; whether that worked.
fn change(signal: c_int, action: Option<&Action>, old: *mut Action) -> c_int {
    let told = action.and_then(|action| {
        let told = if action.handler == SIG_IGN { None } else { action.told_if_set() };
        if told.is_none() {
            stop(Reason::Passed);
        }
        told
    });
    let new = told.as_ref().or(action).map_or(core::ptr::null(), core::ptr::from_ref);
    let answer = real_action(signal, new, old);
    if answer == 0 && !old.is_null() {
        // SAFETY: the C library has just written it.
        unsafe { *old = (*old).heard() };
    }
    answer
}

/// As [`change`], for functions that answer with the handler before.
fn change_handler(signal: c_int, action: &Action) -> usize {
    let mut old = *action;
    if change(signal, Some(action), &raw mut old) == 0 { old.handler } else { SIG_ERR }
}

names! {
    /// Sets what a signal does; of two signals the kernel is told something else.
    sigaction | __sigaction (signal: c_int, action: *const Action, old: *mut Action) -> c_int {
        if is_ours(signal) {
            // SAFETY: the program's, as the C library would read it.
            return change(signal, unsafe { action.as_ref() }, old);
        }
        real_action(signal, action, old)
    }

    /// As `sigaction`.
    signal | bsd_signal | ssignal (signal: c_int, handler: usize) -> usize {
        if is_ours(signal) && handler != SIG_ERR {
            return change_handler(signal, &Action::new(handler, 1 << (signal - 1), SA_RESTART));
        }
        call_real!(signal(signal => c_int, handler => usize) -> usize)
    }

    /// As `sigaction`, for one time.
    sysv_signal | __sysv_signal (signal: c_int, handler: usize) -> usize {
        if is_ours(signal) && handler != SIG_ERR {
            let flags = SA_RESETHAND | SA_NODEFER | SA_INTERRUPT;
            return change_handler(signal, &Action::new(handler, 0, flags));
        }
        call_real!(sysv_signal(signal => c_int, handler => usize) -> usize)
    }
}

/// The action of a signal is about to be changed in a way that is not followed here.
pub extern "C" fn changes_unseen(signal: usize) {
    if is_ours(signal as c_int) {
        stop(Reason::Passed);
    }
}

//! Sigaction: the calls by which a program sets a signal's action, where the library uses that signal.
//!
//! The kernel is told an entry in place of the program's handler, and the program sees its own (`faults.rs`). A program
//! that ignores one of the signals, has more handlers than there are entries, or sets one unseen is served no more
//! ([`stop`]); from then on, the kernel has the program's own actions again.

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

/// Sets an action of one of the two signals for the program, and says what it was.
fn change(signal: c_int, action: Option<&Action>, old: *mut Action) -> c_int {
    let told = action.and_then(|action| {
        let told = if action.handler == SIG_IGN { None } else { action.kernel_action_if_set() };
        if told.is_none() {
            stop(Reason::Passed);
        }
        told
    });
    let new = told.as_ref().or(action).map_or(core::ptr::null(), core::ptr::from_ref);
    let answer = real_action(signal, new, old);
    if answer == 0 && !old.is_null() {
        // SAFETY: the C library has just written it.
        unsafe { *old = (*old).program_action() };
    }
    answer
}

/// As [`change`], for functions that answer with the handler before.
fn change_handler(signal: c_int, action: &Action) -> usize {
    let mut old = *action;
    if change(signal, Some(action), &raw mut old) == 0 { old.handler } else { SIG_ERR }
}

names! {
    sigaction | __sigaction (signal: c_int, action: *const Action, old: *mut Action) -> c_int {
        if is_ours(signal) {
            // SAFETY: the program's, as the C library would read it.
            return change(signal, unsafe { action.as_ref() }, old);
        }
        real_action(signal, action, old)
    }

    signal | bsd_signal | ssignal (signal: c_int, handler: usize) -> usize {
        if is_ours(signal) && handler != SIG_ERR {
            return change_handler(signal, &Action::new(handler, 1 << (signal - 1), SA_RESTART));
        }
        call_real!(signal(signal => c_int, handler => usize) -> usize)
    }

    sysv_signal | __sysv_signal (signal: c_int, handler: usize) -> usize {
        if is_ours(signal) && handler != SIG_ERR {
            let flags = SA_RESETHAND | SA_NODEFER | SA_INTERRUPT;
            return change_handler(signal, &Action::new(handler, 0, flags));
        }
        call_real!(sysv_signal(signal => c_int, handler => usize) -> usize)
    }
}

/// The action of a signal is about to be changed unseen.
pub extern "C" fn changes_unseen(signal: usize) {
    if is_ours(signal as c_int) {
        stop(Reason::Passed);
    }
}

//! Signals: what the kernel does with a signal, which ones the calling thread holds back, and sending one.
//!
//! The structures are the kernel's; the C library's handlers have another way back.

pub use quinion_view::viewer::sys::SignalsHeld;
use quinion_view::viewer::sys::{call, result};

use super::identity::{process, thread};
use super::number;

/// The signal of an access to memory that is not there, or may not be accessed so.
pub const SIGSEGV: i32 = 11;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct SignalAction {
    /// An address, or what stands for one.
    pub handler: usize,
    /// The SA_ flags.
    pub flags: u64,
    /// The way back from the handler.
    pub restorer: usize,
    /// Signals that are held back meanwhile.
    pub mask: u64,
}

pub fn signal_action(signal: i32) -> Option<SignalAction> {
    let mut action = SignalAction::default();
    // SAFETY: nothing is set, and the structure is the kernel's.
    let asked =
        unsafe { call(number::RT_SIGACTION, [signal as usize, 0, (&raw mut action) as usize, 8, 0, 0]) };
    result(asked).ok().map(|_| action)
}

pub fn set_signal_action(signal: i32, action: &SignalAction) -> Option<SignalAction> {
    let mut old = SignalAction::default();
    let addresses = [core::ptr::from_ref(action) as usize, (&raw mut old) as usize];
    // SAFETY: the structures are the kernel's; a handler in the first is one that was there, or none.
    let answer =
        unsafe { call(number::RT_SIGACTION, [signal as usize, addresses[0], addresses[1], 8, 0, 0]) };
    result(answer).ok().map(|_| old)
}

pub fn send_to_this_thread(signal: i32, info: *const core::ffi::c_void) {
    let args = [process() as usize, thread() as usize, signal as usize, info as usize, 0, 0];
    // SAFETY: the kernel reads what it made itself, or complains.
    let _ = unsafe { call(number::RT_TGSIGQUEUEINFO, args) };
}

pub fn holds_back(signal: i32) -> bool {
    const SIG_BLOCK: usize = 0;
    let mut mask = u64::MAX;
    // SAFETY: no new mask is given, and the kernel's is eight bytes.
    let _ = unsafe { call(number::RT_SIGPROCMASK, [SIG_BLOCK, 0, &raw mut mask as usize, 8, 0, 0]) };
    mask >> (signal - 1) & 1 != 0
}

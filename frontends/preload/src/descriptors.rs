//! Descriptors: how a descriptor's offset passes from the kernel to the library and back.
//!
//! The protocol is `quinion_view::fdstate`'s, and the words are in `table.rs`. This file makes the protocol's system
//! calls and tells the owner and the counters the outcome; it decides nothing about offsets. A number's new opening is
//! in `new_descriptors.rs`.
//!
//! ```text
//!   candidate, shared --publish--> served, positioned        a file of the owner's is behind it
//!        ^   the kernel's offset <--pause, show_offset--'    its offset is right again, for a while or a look
//!        '--share--> shared --detach--> the kernel's         for good: the offset alone, or all of it
//! ```
//!
//! SHARED does not mean that the descriptor is known to be readable: a thread that attaches looks at the descriptor
//! that there is then. So a number may be called shared too often, and a forked child calls all it inherited so.
//!
//! Invariants:
//!  1. The kernel's offset is right before any call that uses it runs: a thread that wants one shares or detaches
//!     first.
//!  2. A descriptor is SERVED only while its description is this process's alone, and never if it can write.
//!  3. A number is attached (SERVED, POSITIONED) only while the file behind it cannot become another unseen, or each
//!     read looks whether it did (`audit.rs`).
//!
//! Whatever here makes a system call is counted first ([`process::enter`]), or does nothing: a process that has stopped
//! has given all back.
//!
//! Opening against forking, and attaching against stopping: each thread publishes and then looks for the other's, in
//! SeqCst steps. In their one order the second sees the first.

use quinion_view::arena::control::Reason;
use quinion_view::fdstate::{Fd, Process};
use quinion_view::units::FileId;
use quinion_view::viewer::sys::Errno;

use crate::kernel::{self, SignalsHeld};
use crate::process::count_reason as count;
use crate::table::{
    self, Attachment, FdState, FdWord, OFFSETS_MAX, cell, end, identity, mark_reported, peek,
};
use crate::{audit, deferred_detach, process};

pub struct KernelProcess(i32);

impl Process for KernelProcess {
    type SignalsHeld = SignalsHeld;

    fn hold_signals(&self) -> SignalsHeld {
        SignalsHeld::new()
    }
    fn offset(&self) -> Option<u64> {
        kernel::lseek(self.0, 0, kernel::SEEK_CUR).ok().map(|offset| offset as u64)
    }
    fn set_offset(&self, offset: u64) {
        let _ = kernel::lseek(self.0, offset as i64, kernel::SEEK_SET);
    }
    fn wait(&self, turn: u32) {
        // The thread that moves it is counted, so that ends even if this one may not sleep any more.
        match process::enter() {
            Some(_inside) => kernel::wait(turn),
            None => core::hint::spin_loop(),
        }
    }
    fn handle(&self) -> u64 {
        table::handle(self.0)
    }
}

/// The protocol of `fd`; `None` if the number is beyond the table.
#[inline]
pub fn at(fd: i32) -> Option<Fd<'static, KernelProcess>> {
    cell(fd).map(|cell| Fd::new(cell, KernelProcess(fd)))
}

pub fn settled_word(fd: i32) -> Option<FdWord> {
    at(fd).map(|at| at.settled())
}

#[inline]
pub fn forget(fd: i32) {
    if peek(fd).is_some_and(|word| word.state() != FdState::Unknown)
        && let Some(_inside) = process::enter()
        && let Some(at) = at(fd)
    {
        give_back_any(at.forget());
    }
}

fn give_back_any(handle: Option<u64>) {
    handle.into_iter().for_each(deferred_detach::give_back);
}

pub fn forget_range(first: u32, last: u32) {
    let end = end();
    for fd in first..end.min(last.saturating_add(1)) {
        forget(fd as i32);
    }
}

// ---- candidates that the kernel serves for a while ------------------------------------------------------

/// The kernel is about to read a candidate at its offset. `false` if it is no candidate with a credit; else
/// [`end_kernels_read`] must follow.
pub fn begin_kernels_read(fd: i32, bytes: u64) -> bool {
    at(fd).is_some_and(|at| at.begin_kernels_call(bytes))
}

pub fn end_kernels_read(fd: i32) {
    if let Some(at) = at(fd) {
        at.end_kernels_call();
    }
}

// ---- serving ------------------------------------------------------------------------------------------

/// Makes a candidate that the kernel does not read served from its offset on, and one that is shared or can write
/// positioned. `false` if it is neither any more.
pub fn publish(fd: i32, from: FdWord, to: Attachment) -> bool {
    let Some(_inside) = process::enter() else { return false };
    let Some(at) = at(fd) else { return false };
    let published = at.publish(from, to.can_write, || table::attach(fd, &to));
    let Some(state) = published else { return false };
    if state == FdState::Positioned
        && from.state() == FdState::Candidate
        && let Some(word) = peek(fd)
        && mark_reported(fd, word)
    {
        count(Reason::Writable);
    }
    // A thread may have begun to read at the private offset: it goes back, stopped or not.
    if !process::may_serve_more() {
        detach_inside(fd, Reason::Passed);
    } else if !audit::is_clean() {
        pause_inside(fd);
    }
    true
}

/// Whether a descriptor that was found attached still is what was attached.
pub fn is_still(fd: i32, word: FdWord) -> bool {
    let Some(_inside) = process::enter() else { return false };
    if let Some((id, changed_at)) = table::identity_as_of(fd)
        && audit::is_still(fd, id, changed_at)
    {
        return true;
    }
    if let Some(at) = at(fd) {
        give_back_any(at.reattach(word));
    }
    false
}

/// Gives back what a restricted process has closed or replaced unseen, as far as the next reader of its number would
/// notice.
pub fn give_back_unseen() {
    if !audit::is_restricted() {
        return;
    }
    for fd in 0..end() as i32 {
        if let Some(word) = settled_word(fd).filter(|word| word.state().is_attached()) {
            let _ = is_still(fd, word);
        }
    }
}

/// Gives the kernel its offset of a served descriptor, for a while.
fn pause(fd: i32) {
    if peek(fd).is_some_and(|word| matches!(word.state(), FdState::Served | FdState::Moving))
        && let Some(_inside) = process::enter()
    {
        pause_inside(fd);
    }
}

fn pause_inside(fd: i32) {
    if let Some(at) = at(fd) {
        give_back_any(at.pause());
    }
}

/// Like `pause`, for all descriptors, before code that was not examined runs.
pub fn pause_all() {
    for fd in 0..end() {
        pause(fd as i32);
    }
}

/// A kernel's seek in a candidate or a served descriptor, while no other thread can serve it. `None`: it is neither any
/// more.
pub fn seek(fd: i32, from: FdWord, offset: i64, whence: i32) -> Option<Result<u64, Errno>> {
    let _inside = process::enter()?;
    let seek = || kernel::lseek(fd, offset, whence).map(|now| now as u64);
    let answer = at(fd)?.seek(from, seek)?;
    if from.state() == FdState::Served && answer.is_ok_and(|now| now >= OFFSETS_MAX) {
        count(Reason::Number);
    }
    Some(answer)
}

/// Sets the kernel's offset of a served descriptor for a call that looks at it; it stays served.
pub fn show_offset(fd: i32) {
    if let Some(_inside) = process::enter()
        && let Some(at) = at(fd)
    {
        at.show_offset();
    }
}

// ---- going back to the kernel ---------------------------------------------------------------------------

/// Leaves the offset of `fd`, set right, to the kernel for good. Positional reads are served still.
#[inline]
pub fn share(fd: i32, reason: Reason) {
    if peek(fd).is_some_and(|word| !word.is_offset_kernels()) {
        share_now(fd, reason);
    }
}

#[cold]
fn share_now(fd: i32, reason: Reason) {
    if let Some(_inside) = process::enter()
        && at(fd).is_some_and(|at| at.share())
    {
        count(reason);
    }
}

/// Leaves `fd`, its offset set right, to the kernel for good.
#[inline]
pub fn detach(fd: i32, reason: Reason) {
    let Some(word) = peek(fd) else { return };
    if !matches!(word.state(), FdState::Unknown | FdState::Kernel | FdState::Other) {
        detach_now(fd, reason);
    }
}

#[cold]
fn detach_now(fd: i32, reason: Reason) {
    if let Some(_inside) = process::enter() {
        detach_inside(fd, reason);
    }
}

/// As [`detach`], by a thread that is counted.
pub fn detach_inside(fd: i32, reason: Reason) {
    if let Some(handle) = at(fd).and_then(|at| at.detach()) {
        give_back_any(handle);
        count(reason);
    }
}

pub fn detach_all(reason: Reason) {
    for fd in 0..end() {
        detach(fd as i32, reason);
    }
}

pub fn share_all(reason: Reason) {
    for fd in 0..end() {
        share(fd as i32, reason);
    }
}

pub fn leave_file(id: FileId) {
    for fd in 0..end() {
        let attached = settled_word(fd as i32).is_some_and(|word| word.state().is_attached());
        if attached && identity(fd as i32) == id {
            detach(fd as i32, Reason::Unguaranteed);
        }
    }
}

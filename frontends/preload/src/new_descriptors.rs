//! New descriptors: a number comes to be of another opening, or to be known at all.
//!
//! ```text
//!   opened for reading only, seen --> a candidate, unless a fork came between
//!   opened in a way that is not served --> the kernel's
//!   duplicated, received, inherited --> shared: another process may have its description
//! ```
//!
//! If the number was attached until now, it was closed unseen. Then no number is safe any more, and the process stops
//! being served, unless each is looked at anyway (`audit.rs`).

use core::ffi::c_int;

use quinion_view::arena::control::Reason;

use crate::descriptors::{at, detach_inside};
use crate::process::count_reason as count;
use crate::stop::stop;
use crate::table::FdState;
use crate::table::{mark_reported, peek, see};
use crate::{audit, deferred_detach, fork_counts, kernel, process, table};

/// A descriptor was opened for reading only. `forks`: [`fork_counts::forks`] before the call.
pub fn opened(fd: i32, forks: u64) {
    let Some(_inside) = process::enter() else { return };
    deferred_detach::send_pending();
    see(fd);
    let Some(at) = at(fd) else { return };
    let opened = at.open_for_reading(|| !fork_counts::forked_since(forks));
    was_opened(fd, opened.stale);
    if opened.was_forked {
        count(Reason::Forked);
    } else if !process::may_serve_more() {
        detach_inside(fd, Reason::Passed);
    }
}

pub fn opened_for_kernel(fd: i32, state: FdState) {
    if let Some(at) = at(fd) {
        was_opened(fd, at.open(state));
    }
}

/// A descriptor has appeared whose description another process may have: positional reads may be served.
pub fn adopt(fd: i32) {
    see(fd);
    opened_for_kernel(fd, FdState::Shared);
}

/// As [`adopt`], where it has been counted why no others are.
pub fn adopt_counted(fd: i32) {
    adopt(fd);
    if let Some(word) = peek(fd) {
        mark_reported(fd, word);
    }
}

/// The number is of another opening now; `stale`: the handle of what it was attached to.
fn was_opened(fd: i32, stale: Option<u64>) {
    table::forget_advice(fd);
    if let Some(handle) = stale
        && let Some(_inside) = process::enter()
    {
        deferred_detach::give_back(handle);
        if !audit::is_restricted() {
            stop(Reason::Passed);
        }
    }
}

/// As [`adopt`], where only the kernel knows what the descriptor can do.
pub fn appeared(fd: c_int) {
    let Some(_inside) = process::enter() else { return };
    let flags = kernel::fcntl(fd, kernel::F_GETFL).unwrap_or(0) as c_int;
    if flags & (kernel::O_PATH | kernel::O_WRONLY) != 0 {
        opened_for_kernel(fd, FdState::Unknown);
    } else {
        adopt(fd);
    }
}

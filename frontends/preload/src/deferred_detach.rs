//! Deferred detach: handles that this process has given back and of which the owner could not be told.
//!
//! ```text
//!   give_back(handle) --told--> the owner closes the file, if no other viewer has it
//!                     `--late, or no slot is free--> pending --send_pending: the next time that this process
//!                                                     opens, closes, attaches or removes a file--> told
//! ```
//!
//! An owner that was stopped, or had no processor, for longer than a request waits is told nothing. A handle that it is
//! not told of later would keep its file open until this process ends: the space of a removed file would not come back,
//! and its file system could not be unmounted.
//!
//! Not an invariant: that all is told. At the end of the process the owner takes back the handles that found no place
//! here, those of a process that touches no file any more, and those of one that stopped while the owner was late. A
//! forked child has none to tell of.

use quinion_view::arena::control::Operation;
use quinion_view::viewer::RequestError;

use crate::{deferred_handles, process};

/// Tells the owner, now or later, that a handle is not used any more.
pub fn give_back(handle: u64) {
    send_pending();
    if !send_detach(handle) {
        deferred_handles::add(handle);
    }
}

/// Tells the owner what it could not be told, as far as it answers. The caller is counted ([`process::enter`]).
#[inline]
pub fn send_pending() {
    if deferred_handles::are_pending() {
        deferred_handles::send_all(send_detach);
    }
}

/// Whether the owner has been told, or has ended, and has all handles back.
fn send_detach(handle: u64) -> bool {
    let told = process::viewer().map(|viewer| viewer.notify(Operation::Detach, [handle, 0, 0]));
    !matches!(told, Some(Err(RequestError::Late | RequestError::NoSlot)))
}

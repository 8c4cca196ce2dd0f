//! Join: a forked child becomes a viewer, when it has something to ask or to tell; and a viewer sends a descriptor.
//!
//! The thread waits for the owner for [`WELCOME_MILLIS`] at most, or longer in a child that has something to tell it.
//! If the owner was too late, the child joins once more, to tell, when the owner's heartbeat has risen.
//!
//! For that time some numbers of descriptors are the library's. To be served reads, a child joins only while it has no
//! other thread, which could close such a number, or get another number for a file than without the library. To tell
//! the owner that it cuts, removes, locks or watches a file, or unmounts, it joins in any case; without that the call
//! would fail, give a wrong result or leave space allocated. The calls that close descriptors wait meanwhile
//! (`process.rs`, BUSY). So they do while a descriptor is sent ([`send`]), by a connection that is not kept.

use core::ffi::c_int;

use quinion_view::viewer::{LONG_MILLIS_MAX, Viewer};

use crate::fork_counts::wait_for_forks;
use crate::handshake::{self, WELCOME_MILLIS};
use crate::kernel::{self, JoinError};
use crate::patch;
use crate::process::{self, CHILD, LEFT, SERVING, busy, heartbeat, mode, place, switch, viewer};

/// The viewer, which a forked child becomes now: it is about to do something of which the owner has to be told.
pub fn join() -> Option<&'static Viewer> {
    join_if(LONG_MILLIS_MAX, || true)
}

/// As [`join`], to be served reads. Not a child that has other threads, which would notice the descriptors in use; nor
/// one that has waited in vain, as it would at each file.
pub fn join_to_read() -> Option<&'static Viewer> {
    if handshake::was_late() { viewer() } else { join_if(WELCOME_MILLIS, kernel::is_only_thread) }
}

/// `millis`: how long the owner is waited for. A child that it refuses is no viewer for good. One for which it was too
/// late may try once more when its heartbeat has risen.
fn join_if(millis: u32, may_join: impl FnOnce() -> bool) -> Option<&'static Viewer> {
    if mode() == CHILD && !handshake::was_late_at(heartbeat()) {
        busy(switch(), CHILD, || {
            let beat = heartbeat();
            if !may_join() || handshake::was_late_at(beat) {
                return CHILD;
            }
            wait_for_forks();
            let joined = match handshake::join_as_child(&place(), millis) {
                Ok(joined) => joined,
                Err(JoinError::Refused) => return LEFT,
                Err(JoinError::Late) => return if handshake::note_late(beat) { CHILD } else { LEFT },
            };
            patch::count(&joined.viewer);
            // SAFETY: this thread is BUSY, from CHILD.
            unsafe { process::become_viewer(joined) };
            SERVING
        });
    }
    viewer()
}

/// Sends a descriptor to the owner; the ticket for it. The open connection has a number, so all that open, duplicate or
/// close descriptors wait. `None`: the owner did not take it in time.
pub fn send(descriptor: c_int) -> Option<u32> {
    const TURNS_MAX: u32 = 4;
    let (mut ticket, mut has_tried) = (None, false);
    for _ in 0..TURNS_MAX {
        if has_tried || mode() != SERVING {
            break;
        }
        busy(switch(), SERVING, || {
            wait_for_forks();
            ticket = handshake::send(&place(), descriptor);
            has_tried = true;
            SERVING
        });
    }
    ticket
}

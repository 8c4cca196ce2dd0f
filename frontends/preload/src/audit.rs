//! Audit: processes with code that enters the kernel by itself.
//!
//! Such code may close a descriptor and open another file under its number, move its offset, or write, unseen by any
//! wrapper. The owner can see whether there is such code ([`Operation::Examine`]); it is asked before the first file is
//! attached, and again after an object was loaded (`loading.rs`).
//!
//! ```text
//!   UNKNOWN --ask--> CLEAN      as everywhere else in this object
//!      ^    `------> RESTRICTED only positional reads, each after a check of its descriptor; for good. So is a
//!                               process whose C library could not be patched: its own calls may go unseen
//!      |
//!      `-- dlopen: every offset goes back to the kernel first; while it is under way nothing is attached,
//!                  and what is attached is looked at before each read
//! ```
//!
//! A look is `fstat` and `F_GETFL`: the same file, unchanged since it was attached, by a description that reads it
//! plainly. A file that changed a moment ago is not attached, because one that changes again within a tick of the file
//! system's clock looks unchanged. A thread that closes the descriptor after the look cannot tell the
//! read from one a little earlier.
//!
//! Invariants:
//!  1. A descriptor is SERVED only if the state was CLEAN after that was said, or it is given back at once.
//!  2. RESTRICTED is for good.
//!
//! Not an invariant: that code which a program writes for itself is seen. Only what is there at the question is
//! examined.
use core::sync::atomic::{AtomicU64, Ordering};

use quinion_view::arena::control::{Operation, SyscallAudit};
use quinion_view::units::FileId;
use quinion_view::viewer::Viewer;

use crate::kernel::{self, Stat};
use crate::request_errors::is_passing;

/// Loads that were begun (high half), loads under way, and the verdict (lowest bits).
static STATE: AtomicU64 = AtomicU64::new(UNKNOWN);

const UNKNOWN: u64 = 0;
const CLEAN: u64 = 1;
const RESTRICTED: u64 = 2;
const VERDICT: u64 = 3;
const UNDER_WAY: u64 = 1 << 8;
const BEGUN: u64 = 1 << 32;

#[inline]
fn loads_under_way(state: u64) -> bool {
    state as u32 >= UNDER_WAY as u32
}

/// Whether descriptors may be served at private offsets, and without looks.
#[inline]
pub fn is_clean() -> bool {
    // SeqCst, partner: `begin_loading`, against `descriptors::publish`: the load that begins later sees the descriptor
    // that a thread which is free here has published.
    let state = STATE.load(Ordering::SeqCst);
    state & VERDICT == CLEAN && !loads_under_way(state)
}

pub fn is_restricted() -> bool {
    STATE.load(Ordering::Relaxed) & VERDICT == RESTRICTED
}

/// Whether a descriptor may be served at a private offset from now on; asks the owner if that is not known. `None`: it
/// has not answered in time.
pub fn permits_offsets(viewer: &Viewer) -> Option<bool> {
    loop {
        let state = STATE.load(Ordering::SeqCst); // partner: `begin_loading`, as in `is_clean`
        if state & VERDICT != UNKNOWN || loads_under_way(state) {
            return Some(state & VERDICT == CLEAN && !loads_under_way(state));
        }
        let verdict = ask(viewer)?;
        // Partner: `begin_loading`. If a load began meanwhile, the state has changed, and this thread asks again.
        let _ = STATE.compare_exchange(state, state | verdict, Ordering::SeqCst, Ordering::SeqCst);
    }
}

fn ask(viewer: &Viewer) -> Option<u64> {
    match viewer.request_long(Operation::Examine, [0; 3]) {
        Ok([audit, _]) if audit == SyscallAudit::Clean as u64 || audit == SyscallAudit::Harmless as u64 => {
            Some(CLEAN)
        }
        Err(error) if is_passing(&error) => None,
        _ => Some(RESTRICTED),
    }
}

/// Restricts for good. The caller then gives all offsets back.
pub fn restrict() {
    let restricted = |state| Some(state & !VERDICT | RESTRICTED);
    // SeqCst, partner: `is_clean`, as in `begin_loading`.
    let _ = STATE.fetch_update(Ordering::SeqCst, Ordering::SeqCst, restricted);
}

/// An object is about to be loaded. The caller then gives all offsets back.
pub fn begin_loading() {
    // SeqCst, partner: `is_clean`. The verdict is unknown from here on, in one step with the count.
    let mut state = STATE.load(Ordering::Relaxed);
    while let Err(now) = STATE.compare_exchange(
        state,
        (state & !(if state & VERDICT == CLEAN { VERDICT } else { 0 })).wrapping_add(BEGUN + UNDER_WAY),
        Ordering::SeqCst,
        Ordering::SeqCst,
    ) {
        state = now;
    }
}

pub fn end_loading() {
    STATE.fetch_sub(UNDER_WAY, Ordering::SeqCst); // partner: `is_clean`
}

// ---- looking at a descriptor ------------------------------------------------------------------------------

/// Whether a file was left alone for so long that a change from now on has another time than the last one.
pub fn is_settled(stat: &Stat) -> bool {
    /// The kernel's clock for files moves by some milliseconds; file systems of coarser times say whole seconds.
    const NANOS_MIN: i64 = 2_000_000_000;
    kernel::now_nanos().is_some_and(|now| now.saturating_sub(stat.changed_nanos()) > NANOS_MIN)
}

/// Whether `fd` still is a plain description of the file, as it was when that was attached.
pub fn is_still(fd: i32, id: FileId, changed_nanos: i64) -> bool {
    // The same flags as in `check_servable` of `attach.rs`, or it would be attached without end.
    const LEFT_ALONE: i32 = kernel::O_WRONLY | kernel::O_DIRECT | kernel::O_PATH;
    kernel::fstat(fd)
        .is_some_and(|now| now.id == id && now.changed_nanos() == changed_nanos && now.is_regular())
        && kernel::fcntl(fd, kernel::F_GETFL).is_ok_and(|flags| flags as i32 & LEFT_ALONE == 0)
}

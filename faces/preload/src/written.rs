//! Written: by which descriptors this process writes, and that nobody is shown what is old then.
//!
//! ```text
//!   descriptor   UNKNOWN --open for writing--> CAN --first write--> SAYS --close--> UNKNOWN
//!                   '--------first write, regular file------------^  '-shared-> SHARED      said for good
//!                   '--------first write, something else--> NEVER
//! ```
//!
//! All writes are the kernel's. Before the first one by a descriptor the file
//! is **said** to be written: in our own page, for whoever attaches it later;
//! and if it is attached anywhere, to the owner, whose answer is waited for.
//! From then on nobody believes what was cached of it: no viewer, and no
//! descriptor of ours. Only then comes the write. When the descriptor is
//! closed, that is taken back; the file is served again to who opens it anew.
//!
//! | | said by |
//! |---|---|
//! | write and its kin, ftruncate, fallocate | the first call by that descriptor |
//! | sendfile, splice, copy_file_range, ioctl | the first call that it is the target of |
//! | mmap, shared; libaio, POSIX aio; streams; `syscall` | the call that begins it, for good |
//! | dup, fork, exec, sendmsg | before somebody else has the descriptor, for good |
//! | truncate, O_TRUNC | before the call, and the latter after it again |
//!
//! "For good" is as long as the process lives, where there are no leases.
//! Where there are, a lease that the owner is given is proof that nobody has the
//! file open for writing, whatever was said.
//!
//! And before a file that is attached is opened for writing, the owner is told
//! that somebody will, who says so before he writes: so the open need not wait for a
//! lease to be broken, and what is cached stays, as long as nobody writes.
//!
//! Whether the process takes locks is noted here, too: who takes a lock wants to see
//! what others wrote before ([`has_locked`]).
//!
//! Not an invariant: that a writer of ours is still at work. And a program that writes by
//! instructions of its own, past the C library, is not seen here; a lease sees it.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use quinion::arena::control::Operation;
use quinion::viewer::{RequestError, Viewer};

use crate::kernel::{self, Stat};
use crate::process;
use crate::table::{self, DESCRIPTORS};

const UNKNOWN: u8 = 0;
const CAN: u8 = 1;
const SAYS: u8 = 2;
const SHARED: u8 = 3;
const NEVER: u8 = 4;

static WRITERS: [AtomicU8; DESCRIPTORS] = [const { AtomicU8::new(UNKNOWN) }; DESCRIPTORS];
/// One more than the highest descriptor that ever was anything but UNKNOWN.
static END: AtomicU32 = AtomicU32::new(0);
static LOCKED: AtomicBool = AtomicBool::new(false);

fn place(fd: c_int) -> Option<&'static AtomicU8> {
    WRITERS.get(usize::try_from(fd).ok()?)
}

fn state(fd: c_int) -> u8 {
    // SeqCst, partner: `set`, against `table::publish`, which looks here after it has published.
    place(fd).map_or(NEVER, |state| state.load(Ordering::SeqCst))
}

fn set(fd: c_int, from: u8, to: u8) -> bool {
    let Some(place) = place(fd) else { return false };
    END.fetch_max(fd as u32 + 1, Ordering::SeqCst); // before the state; partner: `shared_all`
    // SeqCst, partner: `state`.
    place.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}

/// Numbers of descriptors that may be anything but UNKNOWN.
pub fn end() -> u32 {
    END.load(Ordering::SeqCst) // partner: `set`
}

// ---- descriptors --------------------------------------------------------------------------------------

/// A descriptor that can write was opened by a call we saw.
pub fn can_write(fd: c_int) {
    forget(fd);
    if !set(fd, UNKNOWN, CAN) || !process::may_serve_more() {
        shared(fd); // beyond the table, or we do not see all that will be done to it
    }
}

/// A number means another descriptor from now on, or none.
fn forget(fd: c_int) {
    if let Some(place) = place(fd) {
        place.store(UNKNOWN, Ordering::SeqCst); // partner: `state`
    }
}

/// The descriptor is about to be closed.
#[inline]
pub fn closed(fd: c_int) {
    let Some(place) = place(fd) else { return };
    if place.load(Ordering::Relaxed) != UNKNOWN {
        close_now(fd, place);
    }
}

#[cold]
fn close_now(fd: c_int, place: &AtomicU8) {
    // SeqCst, partner: `state`.
    if place.swap(UNKNOWN, Ordering::SeqCst) == SAYS
        && let (Some(viewer), Some(stat)) = (process::viewer(), kernel::fstat(fd))
    {
        viewer.end_writing(stat.device, stat.inode);
    }
}

/// The number is about to mean another descriptor: what was said of it stays said, and of the other it is not known.
pub fn replaced(fd: c_int) {
    if state(fd) != UNKNOWN {
        forget(fd);
    }
}

/// Whether it was said that the file is written by this descriptor.
pub fn is_said(fd: c_int) -> bool {
    matches!(state(fd), SAYS | SHARED)
}

/// Before a call that writes by `fd`.
#[inline]
pub fn before_write(fd: c_int) {
    // First of all, for that is where a forked child finds out: what the table says was said by its parent.
    if !process::is_on() {
        return;
    }
    if let Some(place) = place(fd)
        && matches!(place.load(Ordering::Relaxed), SAYS | SHARED | NEVER)
    {
        return;
    }
    say(fd, SAYS);
}

/// Others may write by `fd` from now on, or in ways we do not see.
pub fn shared(fd: c_int) {
    match state(fd) {
        SHARED => {}
        SAYS if set(fd, SAYS, SHARED) => {}
        _ => say(fd, SHARED),
    }
}

/// As [`shared`], of a number that may be anything.
pub fn shared_if_any(argument: usize) {
    if c_int::try_from(argument).is_ok_and(|fd| matches!(state(fd), UNKNOWN | CAN)) {
        say(argument as c_int, SHARED);
    }
}

/// All descriptors that can write are others' too from now on.
pub fn shared_all() {
    for fd in 0..end() {
        if matches!(state(fd as c_int), CAN | SAYS) {
            shared(fd as c_int);
        }
    }
}

/// Says that the file is written by `fd`, if it is one that can be.
#[cold]
fn say(fd: c_int, to: u8) {
    if !process::is_on() {
        return;
    }
    let before = state(fd);
    let writes = kernel::fcntl(fd, kernel::F_GETFL).is_ok_and(|f| f as c_int & kernel::O_ACCMODE != 0);
    match kernel::fstat(fd).filter(|stat| writes && stat.is_regular()) {
        Some(stat) => {
            // A forked child becomes a viewer by that, or nobody hears it but the lease.
            let Some(viewer) = process::join() else { return };
            say_of(viewer, &stat);
            // Only now, so that another thread that writes by it does not take it for said too early.
            if to == SAYS && !set(fd, before, SAYS) {
                viewer.end_writing(stat.device, stat.inode); // another thread was faster
            } else if to == SHARED {
                set(fd, before, SHARED);
            }
            // Again: who published a descriptor after the first look has looked at ours before it was set. Who
            // publishes from now on sees it.
            table::file_is_written(stat.device, stat.inode);
        }
        // What can be read only may be opened anew for writing under the same number; it is looked at again.
        None if writes => drop(set(fd, before, NEVER)),
        None => {}
    }
}

/// In a forked child, by its only thread that looks: what its parent said was said by the parent, which may end before
/// us. The next call that writes says it anew.
pub fn settle_child() {
    for fd in 0..end() {
        if matches!(state(fd as c_int), SAYS | SHARED)
            && let Some(place) = place(fd as c_int)
        {
            place.store(CAN, Ordering::SeqCst); // partner: `state`
        }
    }
}

// ---- files --------------------------------------------------------------------------------------------

/// Says that a file is written. Nobody believes what was cached of it when this returns.
fn say_of(viewer: &Viewer, stat: &Stat) {
    if viewer.begin_writing(stat.device, stat.inode) {
        ask(viewer, Operation::Writing, stat);
    }
    // Ours also if there is no owner any more; and the offset is right before a write uses it.
    table::file_is_written(stat.device, stat.inode);
}

/// Tells the owner of a file and waits until it has heard. If it is gone there is nobody to hear.
fn ask(viewer: &Viewer, operation: Operation, stat: &Stat) {
    let question = [stat.device, stat.inode, 0];
    let mut turn = 0u32;
    while viewer.request(operation, question) == Err(RequestError::NoSlot) {
        kernel::wait(turn);
        turn = turn.saturating_add(1);
    }
}

/// Nobody believes what was cached of a file, if it is attached.
fn distrust(stat: &Stat) {
    if process::is_attached(stat.device, stat.inode)
        && let Some(viewer) = process::join()
    {
        ask(viewer, Operation::Writing, stat);
        table::file_is_written(stat.device, stat.inode);
    }
}

/// Before `truncate`: who attaches the file while that is under way is told for good that it is written, or has a lease
/// that the call waits for.
pub fn before_truncate(path: usize) {
    if let Some(stat) = kernel::stat(path).filter(Stat::is_regular)
        && let Some(viewer) = process::join()
    {
        say_of(viewer, &stat);
    }
}

/// Before an open that may write, or cut.
pub fn before_open(at: c_int, path: usize, flags: c_int) {
    const NEW: c_int = kernel::O_CREAT | kernel::O_EXCL;
    let (writes, cuts) = (flags & kernel::O_ACCMODE != 0, flags & kernel::O_TRUNC != 0);
    let concerns = (writes || cuts) && flags & kernel::O_PATH == 0 && flags & NEW != NEW;
    if !concerns || !process::is_on() || !process::has_attached_files() {
        return;
    }
    let Some(stat) = kernel::stat_at(at, path).filter(Stat::is_regular) else { return };
    if cuts {
        distrust(&stat);
    } else if process::is_attached(stat.device, stat.inode)
        && let Some(viewer) = process::join()
    {
        ask(viewer, Operation::WriterOpened, &stat);
    }
}

/// After an open that cut a file: again, for who attached it meanwhile.
pub fn after_cut(fd: c_int) {
    if process::has_attached_files()
        && let Some(stat) = kernel::fstat(fd)
    {
        distrust(&stat);
    }
}

// ---- locks --------------------------------------------------------------------------------------------

/// A lock is about to be taken.
pub fn locks() {
    LOCKED.store(true, Ordering::SeqCst); // before the lock is there; partner: `has_locked`
}

/// Whether this process ever took a lock.
#[inline]
pub fn has_locked() -> bool {
    LOCKED.load(Ordering::SeqCst) // partner: `locks`
}

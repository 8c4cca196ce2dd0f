//! Written: what this process is about to do to a file that others may be served.
//!
//! A file is served under a read lease. The kernel gives none while any process has the file open for writing, and has
//! an open for writing wait until the lease is given up. So the owner need not be told of writes, but of calls that
//! would wait, fail or leave space taken because of its lease or its descriptor:
//!
//! | before | the owner |
//! |---|---|
//! | an open for writing, `truncate` | gives its lease up, so that no process waits or gets `EAGAIN` |
//! | an open with `O_RDONLY \| O_TRUNC`, and after it | the same, and forgets the bytes: no lease is told of it |
//! | `F_SETLEASE` | closes the file: a process that wants a write lease has to be alone with it |
//! | `unlink`, `rename` over it | closes the file, if no program has it open: its space is free when the call returns |
//!
//! A file on which this process has asked for a lease is left to the kernel here from then on. So is, where files
//! without a lease are served by their times, one that it has mapped so that it can be stored to: stores need not move
//! the times. A forked child has the same lists.
//!
//! Not an invariant: that all opens are seen. An unseen one waits for the lease, as any other process does; but not one
//! with `O_RDONLY | O_TRUNC`, nor one by a process that is served no more, which makes no call but the program's.

use core::ffi::c_int;

use quinion_view::arena::control::Operation;
use quinion_view::units::FileId;
use quinion_view::viewer::sys::{Errno, clock_millis};
use quinion_view::viewer::{RequestError, Viewer};

use crate::kernel::{self, Stat};
use crate::{deferred_detach, descriptors, join, marked_files, process, real};

/// Tells the owner of a file and waits for its answer; whether it has answered, or has ended.
fn ask(viewer: &Viewer, operation: Operation, stat: &Stat, third: u64) -> bool {
    /// How often a thread that finds no free slot tries again: some milliseconds.
    const TURNS_MAX: u32 = 100;
    const SETTLED_MILLIS_MAX: u32 = 100;
    let arguments = [stat.id.device, stat.id.inode, third];
    // The kernel has an opener wait for the lease by itself; only this library tells of the rest.
    let ask = || match (operation, third) {
        (Operation::WriterOpened, 0) => viewer.request(operation, arguments),
        _ => viewer.request_long(operation, arguments),
    };
    for turn in 0..TURNS_MAX {
        match ask() {
            Err(RequestError::NoSlot) => {}
            answer => return answer != Err(RequestError::Late),
        }
        kernel::wait(turn);
    }
    viewer.settle(SETTLED_MILLIS_MAX);
    !matches!(ask(), Err(RequestError::NoSlot | RequestError::Late)) // one that is later than that is not waited for
}

/// The file is about to be opened for writing. Returns whether the owner has the file, as far as is known.
fn expect_writer(stat: &Stat) -> bool {
    let is_attached = process::is_attached(stat.id);
    if is_attached && let Some(viewer) = join::join() {
        ask(viewer, Operation::WriterOpened, stat, 0);
    }
    is_attached
}

/// The file is about to be truncated, or was, in a way of which the kernel tells no owner. A late owner is told when it
/// goes on; until then this process shows no bytes of before. Returns as [`expect_writer`].
fn expect_truncation(stat: &Stat) -> bool {
    let is_attached = process::is_attached(stat.id);
    if is_attached && let Some(viewer) = join::join() {
        let is_told = ask(viewer, Operation::WriterOpened, stat, 1);
        if !is_told {
            descriptors::leave_file(stat.id);
            viewer.post_late(Operation::WriterOpened, [stat.id.device, stat.id.inode, 1]);
        }
    }
    is_attached
}

pub fn truncates_unnoticed(flags: c_int) -> bool {
    flags & kernel::O_TRUNC != 0 && flags & kernel::O_ACCMODE == 0 && flags & kernel::O_PATH == 0
}

/// Runs an open. One that does not wait (`O_NONBLOCK`) fails where it meets a lease, when the owner was late or a
/// thread has attached the file since. The kernel has the lease given up by then, so the open is tried again, for 300
/// ms at most.
pub fn opening(at: c_int, path: usize, flags: c_int, open: impl Fn() -> c_int) -> c_int {
    const MILLIS_MAX: u64 = 300;
    let mut was_attached = before_open(at, path, flags);
    let mut until = None;
    let mut turn = 0;
    loop {
        let answer = open();
        if answer >= 0 || flags & kernel::O_NONBLOCK == 0 || real::last_error() != Errno::AGAIN.0 {
            return answer;
        }
        let is_attached = is_attached_at(at, path);
        let now = clock_millis();
        if !is_attached && !was_attached || now >= *until.get_or_insert(now + MILLIS_MAX) {
            return answer;
        }
        was_attached = is_attached;
        kernel::wait(turn);
        turn += 1;
    }
}

fn is_attached_at(at: c_int, path: usize) -> bool {
    let Some(_inside) = process::enter().filter(|_| process::has_attached_files()) else { return false };
    let stat = kernel::stat_at(at, path).filter(Stat::is_regular);
    stat.is_some_and(|stat| process::is_attached(stat.id))
}

/// Before an open that may write, or cut; whether the owner has the file.
pub fn before_open(at: c_int, path: usize, flags: c_int) -> bool {
    const NEW: c_int = kernel::O_CREAT | kernel::O_EXCL;
    let writes = flags & kernel::O_ACCMODE != 0 || flags & kernel::O_TRUNC != 0;
    let concerns = writes && flags & kernel::O_PATH == 0 && flags & NEW != NEW;
    if !concerns {
        return false;
    }
    let Some(_inside) = process::enter().filter(|_| process::has_attached_files()) else { return false };
    let stat = kernel::stat_at(at, path).filter(Stat::is_regular);
    stat.is_some_and(|stat| match truncates_unnoticed(flags) {
        true => expect_truncation(&stat),
        false => expect_writer(&stat),
    })
}

pub fn after_open(fd: c_int, flags: c_int) {
    if truncates_unnoticed(flags)
        && let Some(_inside) = process::enter()
        && process::has_attached_files()
        && let Some(stat) = kernel::fstat(fd)
    {
        expect_truncation(&stat);
    }
}

pub fn before_truncate(path: usize) {
    if let Some(_inside) = process::enter()
        && process::has_attached_files()
        && let Some(stat) = kernel::stat(path).filter(Stat::is_regular)
    {
        expect_writer(&stat);
    }
}

/// Before a name goes, by being removed or by another taking its place: the space of a file that only the cache has
/// open has to be free when the call returns.
pub fn before_removal(at: c_int, path: usize) {
    if let Some(_inside) = process::enter()
        && process::has_attached_files()
        && let Some(stat) = kernel::stat_at_itself(at, path).filter(Stat::is_regular)
        && process::is_attached(stat.id)
        && let Some(viewer) = join::join()
    {
        descriptors::give_back_unseen();
        deferred_detach::send_pending();
        ask(viewer, Operation::Removes, &stat, 0); // the owner hears before of what has been closed
    }
}

// ---- files that this process does more to ----------------------------------------------------------------

const ATTACHING_NANOS_MAX: i64 = 1_000_000_000;

/// `fd` is about to be mapped, shared. If it can write, the mapping can become writable at any time.
pub fn maps(fd: c_int) {
    let Some(_inside) = process::enter() else { return };
    let can_write = kernel::fcntl(fd, kernel::F_GETFL).is_ok_and(|f| f as c_int & kernel::O_ACCMODE != 0);
    if can_write && let Some(stat) = kernel::fstat(fd).filter(Stat::is_regular) {
        marked_files::MAPPED.add(stat.id);
    }
}

/// Whether this process, or one that it was forked from, may store to that file unseen.
pub fn is_mapped(id: FileId) -> bool {
    marked_files::MAPPED.has(id)
}

pub fn is_for_lease(command: usize, argument: usize) -> bool {
    const F_SETLEASE: c_int = 1024;
    const F_UNLCK: c_int = 2;
    // The kernel takes the lower half of the register for either.
    command as c_int == F_SETLEASE && argument as c_int != F_UNLCK
}

pub fn wants_lease(fd: c_int) {
    let Some(_inside) = process::enter() else { return };
    let Some(stat) = kernel::fstat(fd).filter(Stat::is_regular) else { return };
    marked_files::LEASED.add(stat.id);
    // A thread that is about to attach it has not looked at the list; one that comes later does. (Each look at the
    // clock ends in the kernel, so the awaited thread runs, if it can.)
    let begun = kernel::now_nanos();
    let is_over =
        || kernel::now_nanos().zip(begun).is_none_or(|(now, begun)| now - begun > ATTACHING_NANOS_MAX);
    let mut turn = 0;
    while marked_files::are_attaching() && !is_over() {
        kernel::wait(turn);
        turn += 1;
    }
    descriptors::leave_file(stat.id);
    if let Some(viewer) = join::join() {
        ask(viewer, Operation::LetGo, &stat, 0);
    }
}

/// Runs `ask`, by which the owner opens a file; `None` without, if this process wants a lease on it or has one.
pub fn attaching<T>(fd: c_int, stat: &Stat, ask: impl FnOnce() -> T) -> Option<T> {
    const F_GETLEASE: usize = 1025;
    const F_WRLCK: usize = 1;
    marked_files::attaching(|| {
        // A write lease of another process ended when `fd` was opened; so one that there is is by this very
        // description.
        let is_alone = marked_files::LEASED.has(stat.id) || kernel::fcntl(fd, F_GETLEASE) == Ok(F_WRLCK);
        (!is_alone).then(ask)
    })
}

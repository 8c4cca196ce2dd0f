//! Attach: asking the owner for the file behind a descriptor.
//!
//! A file that is not regular, lies on a file system that is not served or is opened in a way that is not served is
//! never asked for. The owner answers with the file, with how much the kernel is to read before it is asked again, or
//! with why not.
//!
//! A descriptor that can write is attached for positional reads (`pread`), and only by
//! an owner that looks at times: while it is open there is no lease on its file.
//!
//! The owner duplicates the descriptor from this process. Where the system does not let it, it says so, and the
//! descriptor is sent (`join::send`).
//!
//! The owner's reads and hits move no time of last access. So the kernel is asked for a byte once, where there is none,
//! at the end of the file: it moves the time by its own rule.

use core::ffi::c_int;

use quinion_view::arena::control::{CREDIT_SPENT, Counter, Operation, Reason, SENT, TO_BE_SENT};
use quinion_view::arena::file_systems::FileSystem;
use quinion_view::viewer::{RequestError, Viewer};

use crate::kernel::{self, Stat};
use crate::request_errors::{is_passing, why};
use crate::table::{self, Attachment, CreditGiver, FdState, FdWord};
use crate::{audit, deferred_detach, descriptors, join, process, written};

/// Asks the owner for the file behind a descriptor that may be served. Afterwards it is served, has an owner's credit,
/// or is left to the kernel.
pub fn attach(fd: c_int, word: FdWord) {
    let Some(_inside) = process::enter() else { return };
    deferred_detach::send_pending();
    match check_servable(fd).and_then(|fit| ask_to_attach(fd, word, &fit)) {
        Ok((viewer, Answer::AfterMore(bytes))) => {
            if table::give_credit(fd, word, bytes, CreditGiver::Owner) && word.credit().is_none() {
                viewer.count_reason(Reason::Left);
            }
        }
        Ok((_, Answer::Empty)) => {
            table::give_credit(fd, word, 1, word.credit_giver());
        }
        Ok((viewer, Answer::Attached(to, size))) => {
            if descriptors::publish(fd, word, to) {
                viewer.count(Counter::Files, 1);
                note_access(fd, size);
                if let Some(advice) = table::advice(fd) {
                    viewer.advise(&table::file(fd), advice, 0, u64::MAX);
                }
            } else {
                deferred_detach::give_back(to.handle); // another thread was faster
            }
        }
        Err(Reason::Restricted) => descriptors::share(fd, Reason::Restricted),
        Err(reason) => descriptors::detach(fd, reason),
    }
}

struct ServableFile {
    stat: Stat,
    can_write: bool,
}

fn check_servable(fd: c_int) -> Result<ServableFile, Reason> {
    let stat = kernel::fstat(fd).ok_or(Reason::NotRegular)?;
    if !stat.is_regular() || stat.size < 0 {
        return Err(Reason::NotRegular);
    }
    let flags = kernel::fcntl(fd, kernel::F_GETFL).map_err(|_| Reason::Flags)? as c_int;
    // O_WRONLY is in both modes that cannot read: its own, and the one that can do neither (open(2), access mode 3).
    if flags & (kernel::O_WRONLY | kernel::O_DIRECT | kernel::O_PATH) != 0 {
        return Err(Reason::Flags);
    }
    let (attach_policy, can_write) = (process::attach_policy(), flags & kernel::O_ACCMODE != 0);
    if can_write && !attach_policy.checks_times {
        return Err(Reason::Writable);
    }
    match kernel::file_system(fd).map_or(FileSystem::NoContent, FileSystem::of) {
        FileSystem::NoContent => Err(Reason::NotRegular),
        system if !system.may_be_served(attach_policy.any_file_system) => Err(Reason::Unguaranteed),
        // If it can write, its number means another file by now: it is positioned then.
        _ => Ok(ServableFile { stat, can_write }),
    }
}

/// Has the kernel move the time of the last access as for a read.
fn note_access(fd: c_int, size: u64) {
    let mut byte = 0u8;
    // SAFETY: `byte` is one byte that may be written, if the file has grown meanwhile.
    let _ = unsafe { kernel::pread(fd, &raw mut byte, 1, size) };
}

enum Answer {
    Attached(Attachment, u64),
    /// Ask again when the kernel has read so many bytes.
    AfterMore(u64),
    /// There is nothing to serve yet: look again at the next read.
    Empty,
}

/// Asks the owner; a forked child becomes a viewer first.
fn ask_to_attach(fd: c_int, word: FdWord, fit: &ServableFile) -> Result<(&'static Viewer, Answer), Reason> {
    let stat = &fit.stat;
    let viewer = join::join_to_read().ok_or(Reason::NoOwner)?;
    if stat.size == 0 {
        return Ok((viewer, Answer::Empty));
    }
    let Some(permits) = audit::permits_offsets(viewer) else {
        return Ok((viewer, Answer::AfterMore(LATE_BYTES)));
    };
    let changed_at = match (permits, word.state()) {
        (true, _) => None,
        (false, FdState::Candidate) => return Err(Reason::Restricted),
        (false, _) if !audit::is_settled(stat) => return Err(Reason::Changed),
        (false, _) => Some(stat.changed_nanos()),
    };
    let spent = if word.credit_giver() == CreditGiver::Owner { CREDIT_SPENT } else { 0 };
    let ask = |fd: u64| viewer.request(Operation::Attach, [fd | spent, stat.id.device, stat.id.inode]);
    let answer = written::attaching(fd, stat, || match ask(fd as u64) {
        Err(RequestError::Errno(TO_BE_SENT)) => {
            let ticket = join::send(fd).ok_or(RequestError::Late)?;
            ask(u64::from(ticket) | SENT)
        }
        answer => answer,
    });
    let [handle, place] = match answer.ok_or(Reason::Unguaranteed)? {
        Err(error) if is_passing(&error) => return Ok((viewer, Answer::AfterMore(LATE_BYTES))),
        answer => answer.map_err(|error| why(&error))?,
    };
    let answer = match handle {
        0 => Answer::AfterMore(place.max(1)),
        _ => {
            let (id, can_write) = (stat.id, fit.can_write);
            let to = Attachment { handle, place, id, changed_at, can_write };
            Answer::Attached(to, stat.size as u64)
        }
    };
    Ok((viewer, answer))
}

/// How many bytes of a file the kernel reads before an owner that was late is asked again.
const LATE_BYTES: u64 = 1 << 20;

//! Attach: asking the owner for the file behind a descriptor.
//!
//! What the kernel says of the file comes first: what is not regular, has no
//! fixed content or is opened in a way that is not served is never asked for.
//! The owner answers with the file, with how much the kernel is to read before
//! it is asked again, or with why not.

use core::ffi::c_int;

use quinion::arena::control::{CAN_WRITE, CREDIT_SPENT, Counter, Operation, Reason};
use quinion::viewer::sys::Errno;
use quinion::viewer::{RequestError, Viewer};

use crate::kernel::{self, Stat};
use crate::table::{self, Attachment, State, Word};
use crate::{careful, process, written};

/// Asks the owner for the file behind a descriptor that may be served. Afterwards it is, or has a credit of the
/// owner's, or is left to the kernel.
pub fn attach(fd: c_int, word: Word) {
    match look_over(fd).and_then(|fit| ask_to_attach(fd, word, &fit)) {
        Ok((viewer, Answer::AfterMore(bytes))) => {
            if table::give_credit(fd, word, bytes, true) && word.credit().is_none() {
                viewer.count_reason(Reason::Left);
            }
        }
        Ok((_, Answer::Empty)) => {
            table::give_credit(fd, word, 1, word.is_owners_credit());
        }
        Ok((viewer, Answer::Attached(to))) => {
            if table::publish(fd, word, to) {
                viewer.count(Counter::Files, 1);
                if let Some(advice) = table::advice(fd) {
                    viewer.advise(&table::file(fd), advice, 0, u64::MAX);
                }
            } else {
                let _ = viewer.tell(Operation::Detach, [to.handle, 0, 0]); // somebody was faster
            }
        }
        Err(Reason::Careful) => table::share(fd, Reason::Careful),
        Err(reason) => table::detach(fd, reason),
    }
}

/// What the kernel says of a descriptor whose file can be served.
struct Fit {
    stat: Stat,
    can_write: bool,
}

/// Whether a descriptor's file can be served, as far as the kernel knows.
fn look_over(fd: c_int) -> Result<Fit, Reason> {
    let stat = kernel::fstat(fd).ok_or(Reason::NotRegular)?;
    if !stat.is_regular() || stat.size < 0 || has_no_fixed_content(fd) {
        return Err(Reason::NotRegular);
    }
    let flags = kernel::fcntl(fd, kernel::F_GETFL).map_err(|_| Reason::Flags)? as c_int;
    // O_WRONLY is in both modes that cannot read: its own, and the one that can do neither (open(2), access mode 3).
    if flags & (kernel::O_WRONLY | kernel::O_DIRECT | kernel::O_PATH) != 0 {
        return Err(Reason::Flags);
    }
    if written::is_said(fd) {
        return Err(Reason::Writable);
    }
    Ok(Fit { stat, can_write: flags & kernel::O_ACCMODE == kernel::O_RDWR })
}

/// What the owner answers to who would attach a file.
enum Answer {
    /// Here it is.
    Attached(Attachment),
    /// Ask again when the kernel has read so many bytes.
    AfterMore(u64),
    /// There is nothing to serve yet: look again at the next read.
    Empty,
}

/// Asks the owner. A forked child becomes a viewer by that.
fn ask_to_attach(fd: c_int, word: Word, fit: &Fit) -> Result<(&'static Viewer, Answer), Reason> {
    let viewer = process::join().ok_or(Reason::NoOwner)?;
    let stat = &fit.stat;
    if stat.size == 0 {
        return Ok((viewer, Answer::Empty));
    }
    let changed_at = match (careful::permits_offsets(viewer), word.state()) {
        (true, _) => None,
        (false, State::Candidate) => return Err(Reason::Careful),
        (false, _) if !careful::is_settled(stat) => return Err(Reason::Changed),
        (false, _) => Some(stat.changed_nanos()),
    };
    let spent = if word.is_owners_credit() { CREDIT_SPENT } else { 0 };
    let can_write = if fit.can_write { CAN_WRITE } else { 0 };
    let question = [fd as u64 | spent | can_write, stat.device, stat.inode];
    let [handle, place] = viewer.request(Operation::Attach, question).map_err(|error| why(&error))?;
    let answer = match handle {
        0 => Answer::AfterMore(place.max(1)),
        _ => {
            let (device, inode, can_write) = (stat.device, stat.inode, fit.can_write);
            Answer::Attached(Attachment { handle, place, device, inode, changed_at, can_write })
        }
    };
    Ok((viewer, answer))
}

/// File systems whose files are answers, made anew for each read.
fn has_no_fixed_content(fd: c_int) -> bool {
    const PROC: u64 = 0x9fa0;
    const SYSFS: u64 = 0x6265_6572;
    const DEBUGFS: u64 = 0x6462_6720;
    const TRACEFS: u64 = 0x7472_6163;
    const SECURITYFS: u64 = 0x7363_6673;
    const SELINUX: u64 = 0xf97c_ff8c;
    const CGROUP: u64 = 0x0027_e0eb;
    const CGROUP2: u64 = 0x6367_7270;
    const CONFIGFS: u64 = 0x6265_6570;
    const EFIVARFS: u64 = 0xde5e_81e4;
    const PSTORE: u64 = 0x6165_676c;
    const BPF: u64 = 0xcafe_4a11;
    const MQUEUE: u64 = 0x1980_0202;
    const NSFS: u64 = 0x6e73_6673;
    kernel::file_system(fd).is_none_or(|magic| {
        matches!(
            magic,
            PROC | SYSFS
                | DEBUGFS
                | TRACEFS
                | SECURITYFS
                | SELINUX
                | CGROUP
                | CGROUP2
                | CONFIGFS
                | EFIVARFS
                | PSTORE
                | BPF
                | MQUEUE
                | NSFS
        )
    })
}

pub fn why(error: &RequestError) -> Reason {
    match error {
        RequestError::Errno(error) if *error == Errno::TXTBSY.0 => Reason::Writable,
        RequestError::Errno(_) | RequestError::Fruitless => Reason::Refused,
        RequestError::OwnerGone | RequestError::NoSlot => Reason::NoOwner,
    }
}

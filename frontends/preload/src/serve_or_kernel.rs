//! Serve or kernel: whether a read of a descriptor is answered from the cache or by the kernel.
//!
//! ```text
//!   Candidate --read--> credit? --the kernel has read so much, or the owner is known to have it--> attach
//!                          '----else the kernel reads, and the credit is charged
//!   Served, Positioned --------> the cache
//!   anything else -------------> the kernel, with its offset put right first
//! ```
//!
//! A file is attached when the owner says so. It is asked when a descriptor has been read for some time, or at once for
//! a large file that it is known to have; until it agrees, the kernel reads the file (`quinion_view::fdstate`, credit).
//!
//! The library makes no system call for a descriptor whose opening, duplication or arrival it did not see, or that was
//! there before it.

use core::ffi::c_int;

use quinion_view::arena::control::{AttachPolicy, Counter, Reason};
use quinion_view::viewer::Viewer;

use crate::attach::attach;
use crate::read_request::Target;
use crate::table::{self, CreditGiver, FdState, FdWord};
use crate::{descriptors, kernel, process};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Where the descriptor stands, which must be the private offset.
    Offset,
    /// At the position that the call passes, as `pread` does.
    Position,
}

impl Start {
    #[inline]
    fn is_served(self, state: FdState) -> bool {
        state == FdState::Served || self == Start::Position && state == FdState::Positioned
    }
}

/// The viewer and the word of a served descriptor; attaches one that may be, if it is time.
#[inline]
pub fn served(fd: c_int, to: Target<'_>, start: Start) -> Option<(&'static Viewer, FdWord)> {
    if let Some(viewer) = process::viewer() {
        let word = table::peek(fd)?;
        if start.is_served(word.state()) {
            return Some((viewer, word));
        }
    }
    not_served_yet(fd, to, start)
}

#[cold]
fn not_served_yet(fd: c_int, to: Target<'_>, start: Start) -> Option<(&'static Viewer, FdWord)> {
    while process::is_on() {
        let word = descriptors::settled_word(fd)?;
        match word.state() {
            state if start.is_served(state) => return Some((process::viewer()?, word)),
            FdState::Candidate | FdState::Shared
                if start == Start::Position || word.state() == FdState::Candidate =>
            {
                match whose_turn(fd, word) {
                    Reader::Ours => attach(fd, word),
                    // A read at the offset is charged by `pass_on`.
                    Reader::Kernels if start == Start::Offset || table::charge(fd, word, credit_of(to)) => {
                        left_to_the_kernel(fd, word);
                        return None;
                    }
                    Reader::Kernels | Reader::Unknown => {}
                }
            }
            FdState::Kernel
            | FdState::Candidate
            | FdState::Shared
            | FdState::Served
            | FdState::Positioned => {
                left_to_the_kernel(fd, word);
                return None;
            }
            FdState::Other | FdState::Moving => return None,
            // It was opened unseen: a pipe, a socket, or a file that the program's own code has opened. No call asks: a
            // filter of system calls that was never seen may forbid the request to the reading thread.
            FdState::Unknown => {
                table::settle(fd, word, FdState::Other);
                return None;
            }
        }
    }
    None
}

/// Whether positional reads of a descriptor are served; attaches a candidate, if it is time.
pub fn is_served(fd: c_int) -> bool {
    while process::is_on() {
        let Some(word) = descriptors::settled_word(fd) else { return false };
        match word.state() {
            FdState::Served | FdState::Positioned => return true,
            FdState::Candidate => match whose_turn(fd, word) {
                Reader::Ours => attach(fd, word),
                Reader::Kernels => return false,
                Reader::Unknown => {}
            },
            _ => return false,
        }
    }
    false
}

fn left_to_the_kernel(fd: c_int, word: FdWord) {
    if let Some(viewer) = process::viewer() {
        viewer.count(Counter::KernelReads, 1);
        if table::mark_reported(fd, word) {
            viewer.count_reason(Reason::Foreign);
        }
    }
}

enum Reader {
    /// The cache, once the owner has attached the file.
    Ours,
    /// The kernel, until the credit is used up.
    Kernels,
    /// The state has just changed: decide again.
    Unknown,
}

fn whose_turn(fd: c_int, word: FdWord) -> Reader {
    match word.credit() {
        _ if word.has_kernels_calls() => Reader::Kernels,
        Some(0) => Reader::Ours,
        Some(_) => Reader::Kernels,
        None => inspect_candidate(fd, word),
    }
}

/// The first read of a candidate: how much of it the kernel is to read before the owner is asked. The thread that
/// asks finds out whether it is a file with content.
fn inspect_candidate(fd: c_int, word: FdWord) -> Reader {
    let attach_policy = process::attach_policy();
    if attach_policy.large_bytes == 0 || attach_policy.credit_bytes == 0 {
        return Reader::Ours;
    }
    let Some(_inside) = process::enter() else { return Reader::Unknown };
    let Some(stat) = kernel::fstat(fd).filter(|stat| stat.is_regular() && stat.size > 0) else {
        return Reader::Ours;
    };
    let bytes = stat.size as u64;
    let (id, is_large) = (stat.id, bytes >= attach_policy.large_bytes);
    let is_wanted = || process::is_taken(id) || process::openings_before(id) >= OPENINGS_MAX;
    if is_large && is_wanted() {
        return Reader::Ours;
    }
    if table::give_credit(fd, word, attach_policy.first_credit(bytes), CreditGiver::Viewer) {
        process::count_reason(Reason::Left);
    }
    Reader::Unknown
}

/// A large file that was opened and read so often, by any process of the cache, is asked for at its next first read:
/// many descriptors read a little of it each.
const OPENINGS_MAX: u64 = 2;

fn credit_of(to: Target<'_>) -> u64 {
    match to {
        Target::One(part) => AttachPolicy::credit_of(part.len as u64),
        Target::Many(parts) => {
            AttachPolicy::credit_of(parts.iter().fold(0, |sum, part| part.len.saturating_add(sum)) as u64)
        }
    }
}

/// A call at a descriptor's offset that the kernel is to answer, from [`pass_on`] until [`PassedCall::end`].
pub struct PassedCall(bool);

/// Sets the kernel's offset right before a read that is not served uses it; a candidate's is right, and stays so until
/// the read has ended.
#[inline]
pub fn pass_on(fd: c_int, to: Option<Target<'_>>) -> PassedCall {
    if !process::is_on() {
        return PassedCall::nothing();
    }
    let reads = descriptors::begin_kernels_read(fd, to.map_or(0, credit_of));
    if !reads {
        descriptors::share(fd, Reason::Passed);
    }
    PassedCall(reads)
}

impl PassedCall {
    pub fn nothing() -> Self {
        Self(false)
    }

    #[inline]
    pub fn end(self, fd: c_int) {
        if self.0 {
            descriptors::end_kernels_read(fd);
        }
    }
}

//! Bytes: what a read of a served descriptor brings.
//!
//! ```text
//!   1 may what is cached be used?        not sure -> look at the file's times first
//!   2 copy, asking the owner for what is missing
//!   3 the end of the file?               ask the kernel whether it still is there
//! ```
//!
//! What is not plainly served is given back to the kernel, which then answers.

use core::ffi::c_int;

use quinion_view::arena::Validation;
use quinion_view::arena::control::{Advice, Counter, Operation, Reason};
use quinion_view::viewer::sys::Errno;
use quinion_view::viewer::{Hit, ReadEnd, ReadOutcome, ViewedFile, Viewer, WantedBytes};

use crate::read_request::{Part, ServeMode, Target};
use crate::request_errors::{is_passing, why};
use crate::{descriptors, faults, kernel, process, table, written};

/// The most bytes one call reads, as in the kernel.
pub const READ_BYTES_MAX: usize = 0x7fff_f000;
/// How often a read looks again after the file was seen to have grown.
const REVALIDATIONS_MAX: u32 = 3;

#[derive(Clone, Copy)]
pub enum Unserved {
    /// The descriptor has been given back to the kernel, which has to answer.
    ToKernel,
    NotReady,
}

#[derive(Clone, Copy)]
struct PartRead<'v> {
    viewer: &'v Viewer,
    fd: c_int,
    position: u64,
    to: Part,
    mode: ServeMode,
    is_whole: bool,
}

impl PartRead<'_> {
    #[inline(always)]
    fn wanted(&self) -> WantedBytes {
        WantedBytes { position: self.position, to: self.to.base, len: self.to.len }
    }

    /// One look at the cache; `None` if the read would have to wait and must not.
    #[inline(always)] // the caller knows the mode
    fn try_read(self, file: &ViewedFile<'_>) -> Option<ReadOutcome> {
        let (viewer, wanted) = (self.viewer, self.wanted());
        // SAFETY: the buffer is the program's, and it said it may be written.
        unsafe {
            match self.mode {
                ServeMode::Plain => Some(viewer.read(file, wanted)),
                ServeMode::Uncached => Some(viewer.read_uncached(file, wanted)),
                ServeMode::Now => viewer.read_ready(file, wanted),
            }
        }
    }

    #[inline(always)] // the caller knows the mode
    fn transfer(self) -> Result<usize, Unserved> {
        let viewer = self.viewer;
        let file = table::file(self.fd);
        if self.mode == ServeMode::Plain
            && matches!(viewer.validation(&file), Validation::Leased | Validation::Immutable)
        {
            // SAFETY: as in `try_read`.
            let hit = unsafe { viewer.read_hit(&file, self.wanted()) };
            return match hit.whole() {
                Some(bytes) => Ok(bytes),
                None => self.transfer_inside(Some(hit)),
            };
        }
        self.transfer_inside(None)
    }

    /// Like `transfer`, for a read that may make system calls; or the rest of one after a first look.
    #[cold]
    fn transfer_inside(self, hit: Option<Hit>) -> Result<usize, Unserved> {
        let Self { viewer, fd, .. } = self;
        let Some(_inside) = process::enter() else { return Err(Unserved::ToKernel) };
        let file = table::file(fd);
        if let Some(hit) = hit {
            // SAFETY: as in `try_read`.
            let read = unsafe { viewer.continue_read(&file, self.wanted(), hit) };
            return self.transfer_slowly(Some(read));
        }
        match viewer.validation(&file) {
            Validation::Leased | Validation::Immutable => {}
            validation => match check_times(viewer, fd, validation) {
                TimesCheck::Right => {}
                TimesCheck::Young if self.mode == ServeMode::Now => {
                    // SAFETY: as in `try_read`.
                    return unsafe { self.read_by_kernel_now() };
                }
                // SAFETY: as in `try_read`.
                TimesCheck::Young => return unsafe { self.read_by_kernel() },
                TimesCheck::Invalid(reason) => {
                    descriptors::detach(fd, reason);
                    return Err(Unserved::ToKernel);
                }
            },
        }
        let read = self.try_read(&file);
        self.transfer_slowly(read)
    }

    /// The kernel reads for once; the descriptor stays served, unless the kernel cannot read it.
    ///
    /// # Safety
    /// The buffer may be written.
    #[cold]
    unsafe fn read_by_kernel(self) -> Result<usize, Unserved> {
        let Self { fd, position, to, .. } = self;
        // SAFETY: the caller's promise.
        let Ok(bytes) = (unsafe { kernel::pread(fd, to.base, to.len, position) }) else {
            descriptors::detach(fd, Reason::Passed);
            return Err(Unserved::ToKernel);
        };
        Ok(self.count_kernels(bytes))
    }

    fn count_kernels(self, bytes: usize) -> usize {
        let Self { viewer, is_whole, .. } = self;
        viewer.count(Counter::KernelReads, 1);
        viewer.count(Counter::KernelBytes, bytes as u64);
        // Undoes the count in `counted`.
        viewer.count(Counter::Bytes, (bytes as u64).wrapping_neg());
        viewer.count(Counter::Reads, u64::from(is_whole).wrapping_neg());
        bytes
    }

    #[cold]
    fn transfer_slowly(self, mut read: Option<ReadOutcome>) -> Result<usize, Unserved> {
        let Self { viewer, fd, .. } = self;
        let file = table::file(fd);
        let mut asked = 0;
        let mut revalidations = 0;
        let reason = loop {
            // SAFETY: as in `try_read`.
            let Some(outcome) = read else { return unsafe { self.read_by_kernel_now() } };
            asked += outcome.asked;
            let size = match outcome.end {
                ReadEnd::Full => break None,
                ReadEnd::EndOfFile(size) => size,
                ReadEnd::Stale => break Some(Reason::Changed),
                // SAFETY: as in `try_read`.
                ReadEnd::Failed(error) if is_passing(&error) => unsafe {
                    return self.read_by_kernel();
                },
                ReadEnd::Failed(error) => break Some(why(&error)),
            };
            if kernel::fstat(fd).is_some_and(|stat| stat.size as u64 == size) {
                break None;
            }
            if self.mode == ServeMode::Now {
                // SAFETY: as in `try_read`.
                return unsafe { self.read_by_kernel_now() }; // the owner would have to be waited for
            }
            revalidations += 1;
            if revalidations > REVALIDATIONS_MAX {
                break Some(Reason::Changed);
            }
            match viewer.request(Operation::Revalidate, [file.handle, 0, 0]) {
                Ok(_) => {}
                // SAFETY: as in `try_read`.
                Err(error) if is_passing(&error) => unsafe {
                    return self.read_by_kernel();
                },
                Err(error) => break Some(why(&error)),
            }
            read = self.try_read(&file);
        };
        if let Some(reason) = reason {
            descriptors::detach(fd, reason);
            return Err(Unserved::ToKernel);
        }
        if asked > 0 {
            viewer.count(Counter::Asked, 1);
        }
        Ok(read.map_or(0, |read| read.bytes))
    }

    /// A read that must not wait finds nothing here: the kernel brings what it has and begins to read the rest, so that
    /// a retry gets on. The owner is told as well, once.
    ///
    /// # Safety
    /// The buffer may be written.
    #[cold]
    unsafe fn read_by_kernel_now(self) -> Result<usize, Unserved> {
        let Self { viewer, fd, position, to, .. } = self;
        if table::is_first_refusal(fd, position / 4096) {
            viewer.suggest(&table::file(fd), Advice::WillNeed, position, to.len as u64);
        }
        // SAFETY: the caller's promise.
        match unsafe { kernel::pread_nowait(fd, to.base, to.len, position) } {
            Ok(bytes) => Ok(self.count_kernels(bytes)),
            Err(Errno::AGAIN) => Err(Unserved::NotReady),
            Err(_) => {
                descriptors::detach(fd, Reason::Passed);
                Err(Unserved::ToKernel)
            }
        }
    }
}

/// The result of a look at a file's times.
enum TimesCheck {
    /// The cached bytes are the file's.
    Right,
    /// The file was changed so lately that its times are not conclusive, or a change is not ruled out.
    Young,
    /// The file is not to be served any more.
    Invalid(Reason),
}

/// Looks whether what is cached is the file's, before a read.
#[cold]
fn check_times(viewer: &Viewer, fd: c_int, validation: Validation) -> TimesCheck {
    if validation == Validation::Kernel {
        let ended = viewer.arena().owner_has_ended();
        return TimesCheck::Invalid(if ended { Reason::NoOwner } else { Reason::Writable });
    }
    if validation == Validation::OwnerLate {
        return TimesCheck::Young;
    }
    if written::is_mapped(table::identity(fd)) {
        return TimesCheck::Invalid(Reason::Mapped);
    }
    let Some(stat) = kernel::fstat(fd) else { return TimesCheck::Invalid(Reason::Changed) };
    if table::was_seen(fd, &stat) {
        return TimesCheck::Right;
    }
    if !stat.is_settled() {
        return TimesCheck::Young;
    }
    // The owner looks later than this thread did: what it leaves is no older than `stat`.
    match viewer.request(Operation::Revalidate, [table::file(fd).handle, 0, 0]) {
        Ok(_) => table::note_seen(fd, &stat),
        Err(error) if is_passing(&error) => return TimesCheck::Young,
        Err(error) => return TimesCheck::Invalid(why(&error)),
    }
    TimesCheck::Right
}

#[inline(always)] // the caller knows the mode
pub fn transfer_all(
    viewer: &Viewer,
    fd: c_int,
    position: u64,
    to: Target<'_>,
    mode: ServeMode,
) -> Result<usize, Unserved> {
    match to {
        Target::One(to) => PartRead { viewer, fd, position, to, mode, is_whole: true }.transfer(),
        Target::Many(parts) => {
            let mut done = 0;
            let faults = faults::seen();
            for &Part { base, len } in parts.iter().filter(|part| part.len > 0) {
                let len = len.min(READ_BYTES_MAX - done);
                let (position, to, is_whole) = (position + done as u64, Part { base, len }, parts.len() == 1);
                let bytes = match (PartRead { viewer, fd, position, to, mode, is_whole }).transfer() {
                    Err(Unserved::NotReady) if done > 0 => 0,
                    other => other?,
                };
                done += bytes;
                if faults::seen() != faults {
                    break; // the caller checks, too
                }
                if bytes < len || done == READ_BYTES_MAX {
                    break;
                }
            }
            Ok(done)
        }
    }
}

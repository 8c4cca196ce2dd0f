//! Pins: bytes without a copy, as runs of memory.
//!
//! ```text
//!   bytes of the file   [ 3 KiB | 2 MiB | 700 B ]
//!   runs                {data, length} {data, length} {data, length}      laid out as struct iovec
//! ```
//!
//! Runs that follow each other in memory are one. Holes of memory files are runs of one shared piece of zeros: a hole
//! has a run for each 64 KiB; a pin of more than [`RUNS_MAX`] runs is refused, as the list itself takes memory.
//!
//! Invariant: a handle keeps what its runs point to. The list does not change after it was made.

use std::ffi::{c_int, c_void};

use quinion::Pinned;
use quinion::internals::sys::fork::ForkGuard;
use quinion_service::PinnedBytes;

use crate::args::{self, Handle, check_range, count};
use crate::ffi::{Failure, ffi_call};
use crate::file::{Source, qn_file};

/// The most runs that a pin may have: 16 MiB of list.
const RUNS_MAX: usize = 1 << 20;

/// Consecutive bytes in memory; laid out as struct iovec.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qn_run {
    /// The first of the bytes, which must not be written.
    pub data: *const c_void,
    /// How many there are; not 0.
    pub length: usize,
}

/// Bytes of a file that stay where they are, made by qn_pin_range().
pub struct qn_pin {
    runs: Vec<qn_run>,
    length: u64,
    process: ForkGuard,
    kept: Kept,
}

enum Kept {
    Cached(Pinned),
    Served(PinnedBytes),
}

// SAFETY: the runs are of bytes that no thread writes while the pin stands, and the list itself does not change.
unsafe impl Send for qn_pin {}
// SAFETY: as above.
unsafe impl Sync for qn_pin {}

impl Handle for qn_pin {
    fn process(&self) -> ForkGuard {
        self.process
    }
}

fn runs_of<'c>(chunks: impl Iterator<Item = &'c [u8]>) -> Option<(Vec<qn_run>, u64)> {
    let (mut runs, mut length) = (Vec::<qn_run>::new(), 0);
    for chunk in chunks.filter(|chunk| !chunk.is_empty()) {
        let is_full = runs.len() == RUNS_MAX;
        length += chunk.len() as u64;
        let data = chunk.as_ptr().cast::<c_void>();
        match runs.last_mut() {
            Some(last) if std::ptr::eq(last.data.wrapping_byte_add(last.length), data) => {
                last.length += chunk.len()
            }
            _ if is_full => return None,
            _ => runs.push(qn_run { data, length: chunk.len() }),
        }
    }
    Some((runs, length))
}

fn new_pin(runs: Option<(Vec<qn_run>, u64)>, kept: Kept) -> Result<qn_pin, Failure> {
    let too_many = || {
        let text = format!("the bytes lie in more than {RUNS_MAX} runs of memory; pin less at a time");
        Failure::new(libc::ENOBUFS, text)
    };
    let (runs, length) = runs.ok_or_else(too_many)?;
    Ok(qn_pin { runs, length, process: ForkGuard::new(), kept })
}

/// Pins up to length bytes at byte offset, without a copy: as many as there are before the end of the file, and
/// possibly none. (A server's local files are copied.)
///
/// The bytes do not move and do not change until qn_unpin(), also if the file is written, cut or closed. They must not
/// be written. *pin is yours until then. A pin keeps whole folios of up to 2 MiB from eviction; qn_cache_options
/// .pinned_max bounds that. Blocks as qn_pread() does. In a forked child the bytes must not be looked at: its memory
/// does not have them.
///
/// Errors: those of qn_pread(); -ENOBUFS also: pins keep as much as they may, or there are too many runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pin_range(
    file: *const qn_file,
    offset: u64,
    length: usize,
    pin: *mut *mut qn_pin,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let (place, file) = unsafe { (args::out(pin)?, args::handle(file, "the file")?) };
        check_range(offset, length as u64)?;
        let pin = match &file.source {
            Source::Served(file) => {
                let bytes = file.pin(offset..offset + length as u64)?;
                new_pin(runs_of(bytes.chunks()), Kept::Served(bytes))?
            }
            Source::Cached(file) => pin_of(file.pin(offset, length)?)?,
            Source::Memory(file) => pin_of(file.pin(offset, length)?)?,
        };
        args::give_handle(place, pin);
        Ok(0)
    })
}

fn pin_of(pinned: Pinned) -> Result<qn_pin, Failure> {
    new_pin(runs_of(pinned.chunks()), Kept::Cached(pinned))
}

/// Tells where a pin's bytes are: *runs is the first of *count runs, in the order of the file.
///
/// The list is the pin's, and stays until qn_unpin(). *runs may be cast to const struct iovec *. Does not block.
///
/// Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pin_runs(
    pin: *const qn_pin,
    runs: *mut *const qn_run,
    count: *mut usize,
) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let pin = unsafe { args::handle(pin, "the pin") }?;
        // SAFETY: the caller's contract: places for a pointer and a number.
        let (Some(runs), Some(count)) = (unsafe { runs.as_mut() }, unsafe { count.as_mut() }) else {
            return Err(Failure::invalid("the address for the runs or for their count is NULL; pass both"));
        };
        (*runs, *count) = (pin.runs.as_ptr(), pin.runs.len());
        Ok(0)
    })
}

/// Tells where a pin's bytes are in one piece: *data is the first of qn_pin_length() bytes, which must not be written.
///
/// Runs that do not follow each other in memory are mapped a second time, side by side, without a copy: the first call
/// takes some microseconds for each. *data stays until qn_unpin(). Does not block.
///
/// Errors: -EINVAL; -EOPNOTSUPP: the runs have fewer than 64 KiB on average, or one is a hole of a memory file, or the
/// kernel refuses; use qn_pin_runs().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pin_mapped(pin: *const qn_pin, data: *mut *const c_void) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        let pin = unsafe { args::handle(pin, "the pin") }?;
        // SAFETY: the caller's contract: a place for a pointer.
        let Some(data) = (unsafe { data.as_mut() }) else {
            return Err(Failure::invalid("the address for the first byte is NULL; pass one"));
        };
        let mapped = match &pin.kept {
            Kept::Cached(pinned) => pinned.mapped(),
            Kept::Served(bytes) => bytes.mapped(),
        };
        let cannot = || {
            let text =
                "the bytes lie in short runs, or in memory that is not mapped twice; use qn_pin_runs()";
            Failure::new(libc::EOPNOTSUPP, text.to_owned())
        };
        *data = mapped.ok_or_else(cannot)?.as_ptr().cast();
        Ok(0)
    })
}

/// How many bytes are pinned. Does not block.
///
/// Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_pin_length(pin: *const qn_pin) -> i64 {
    // SAFETY: the caller's contract.
    ffi_call(|| Ok(count(unsafe { args::handle(pin, "the pin") }?.length)))
}

/// Gives a pin back; its bytes may be evicted or overwritten from then on. May block for the server of a file.
///
/// Errors: -EINVAL. In a forked child 0 is returned and nothing is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qn_unpin(pin: *mut qn_pin) -> c_int {
    ffi_call(|| {
        // SAFETY: the caller's contract.
        drop(unsafe { args::take_handle(pin, "the pin") }?);
        Ok(0)
    })
}

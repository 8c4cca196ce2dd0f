//! Served: the calls that are answered from the cache.
//!
//! ```text
//!   read(fd)   1 what is fd?           not served -> the real read, as a tail call
//!              2 copy at its private offset, asking the owner for what is missing
//!              3 the end of the file?  ask the kernel whether it still is there
//!              4 move the offset on, unless it changed meanwhile  else -> 1
//! ```
//!
//! Step 1 is `serve_or_kernel.rs`, and `attach.rs`; steps 2 and 3 are `bytes.rs`.
//!
//! Whatever is not plainly served goes to the real function, with the kernel's offset put right first: a bad argument,
//! an error of the owner's, a file that changed. So an error the program sees is always the kernel's own.
//!
//! No lock, no allocation, no `errno`: a signal handler may read the very descriptor whose read it interrupted.

use core::ffi::{c_int, c_long};
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering;

use quinion_view::arena::control::{Advice, Counter, Reason};
use quinion_view::viewer::sys::Errno;
use quinion_view::viewer::{Viewer, WantedBytes};

use crate::bytes::{READ_BYTES_MAX, Unserved, transfer_all};
use crate::read_request::{Part, ServeMode, Target};
use crate::real::{self, test_cancel};
use crate::serve_or_kernel::{PassedCall, Start, is_served, pass_on, served};
use crate::table::{self, FdState, FdWord};
use crate::wrap::{call_real, names};
use crate::{audit, descriptors, faults, kernel, process};

/// The most parts of a scattered read that is served: they are copied, without an allocation.
const PARTS_MAX: usize = 64;
type Parts = MaybeUninit<[Part; PARTS_MAX]>;

// ---- whole calls -----------------------------------------------------------------------------------

/// Whether a call is a cancellation point. The C library has forms of some calls for itself that are not.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cancel {
    Point,
    Never,
}

impl Cancel {
    #[inline]
    fn test(self) {
        if self == Cancel::Point {
            test_cancel();
        }
    }
}

/// A read at the descriptor's offset. `None`: the real function has to answer.
#[inline(always)] // the caller knows both modes
fn read_on(fd: c_int, to: Target<'_>, mode: ServeMode, cancel: Cancel) -> Option<isize> {
    loop {
        let (viewer, word) = served(fd, to, Start::Offset)?;
        cancel.test();
        let faults = faults::seen();
        let bytes = match transfer_all(viewer, fd, word.offset(), to, mode) {
            Ok(bytes) => bytes,
            Err(unserved) => return refused(unserved),
        };
        if faults::seen() != faults {
            return None;
        }
        let offset = word.offset() + bytes as u64;
        if offset >= table::OFFSETS_MAX {
            descriptors::share(fd, Reason::Number);
        } else if table::advance(fd, word, offset) {
            return Some(counted(viewer, bytes));
        }
    }
}

/// A read at `position`. `None`: the real function has to answer.
#[inline(always)] // the caller knows both modes
fn read_at(fd: c_int, to: Target<'_>, position: u64, mode: ServeMode, cancel: Cancel) -> Option<isize> {
    loop {
        let (viewer, word) = served(fd, to, Start::Position)?;
        if word.state() == FdState::Positioned && !audit::is_clean() && !descriptors::is_still(fd, word) {
            continue;
        }
        cancel.test();
        let faults = faults::seen();
        let bytes = match transfer_all(viewer, fd, position, to, mode) {
            Ok(bytes) => bytes,
            Err(unserved) => return refused(unserved),
        };
        if faults::seen() != faults {
            return None;
        }
        // The number may have been closed and opened anew under the copy.
        if table::is_still_attached(fd, word) {
            return Some(counted(viewer, bytes));
        }
    }
}

#[cold]
fn refused(unserved: Unserved) -> Option<isize> {
    match unserved {
        Unserved::ToKernel => None,
        Unserved::NotReady => Some(real::answer(-(Errno::AGAIN.0 as isize))),
    }
}

#[inline]
fn counted(viewer: &Viewer, bytes: usize) -> isize {
    viewer.count(Counter::Reads, 1);
    viewer.count(Counter::Bytes, bytes as u64);
    bytes as isize
}

/// Whether a buffer may be a program's, by its address alone, which the kernel checks first.
#[inline]
fn may_be_memory(base: *mut u8, len: usize) -> bool {
    /// Where the addresses of programs end, but for those that ask for more: theirs the kernel reads into.
    const END: usize = 0x7fff_ffff_f000;
    (base as usize).checked_add(len).is_some_and(|end| end <= END)
}

#[inline]
fn one(base: *mut u8, len: usize) -> Option<Target<'static>> {
    let fits = !base.is_null() && may_be_memory(base, len);
    fits.then_some(Target::One(Part { base, len: len.min(READ_BYTES_MAX) }))
}

/// Parts as the kernel would take them, copied to `room` as it does, against changes by other threads; `None` if it has
/// to complain, or there are too many.
fn many(room: &mut Parts, parts: *const Part, count: c_int) -> Option<Target<'_>> {
    let count = usize::try_from(count).ok().filter(|count| (1..=PARTS_MAX).contains(count))?;
    if !process::is_on() {
        return None;
    }
    // SAFETY: bytes that are only written, and lie in the room; it is not asked what was in them.
    let bytes =
        unsafe { core::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), count * size_of::<Part>()) };
    if !faults::read(parts as usize, bytes) {
        return None;
    }
    // SAFETY: they have just been written, and every pattern is a value.
    let parts = unsafe { core::slice::from_raw_parts(room.as_ptr().cast::<Part>(), count) };
    let sum = parts.iter().try_fold(0usize, |sum, part| {
        let is_bad = part.base.is_null() && part.len > 0 || !may_be_memory(part.base, part.len);
        sum.checked_add(part.len).filter(|&sum| !is_bad && sum <= isize::MAX as usize)
    });
    sum.map(|_| Target::Many(parts))
}

#[inline]
fn at(position: i64) -> Option<u64> {
    u64::try_from(position).ok().filter(|&position| position < table::OFFSETS_MAX)
}

// ---- the functions themselves -------------------------------------------------------------------------

names! {
    read | __read (fd: c_int, to: *mut u8, len: usize) -> isize {
        let target = one(to, len);
        if let Some(answer) = target.and_then(|to| read_on(fd, to, ServeMode::Plain, Cancel::Point)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(read(fd => c_int, to => *mut u8, len => usize) -> isize);
        passed.end(fd);
        answer
    }

    __read_nocancel(fd: c_int, to: *mut u8, len: usize) -> isize {
        let target = one(to, len);
        if let Some(answer) = target.and_then(|to| read_on(fd, to, ServeMode::Plain, Cancel::Never)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(__read_nocancel(fd => c_int, to => *mut u8, len => usize) -> isize);
        passed.end(fd);
        answer
    }

    /// A length the buffer cannot have is the real function's to punish.
    __read_chk(fd: c_int, to: *mut u8, len: usize, room: usize) -> isize {
        let target = if len <= room { one(to, len) } else { None };
        if let Some(answer) = target.and_then(|to| read_on(fd, to, ServeMode::Plain, Cancel::Point)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(__read_chk(fd => c_int, to => *mut u8, len => usize, room => usize) -> isize);
        passed.end(fd);
        answer
    }

    pread | pread64 | __pread64 (fd: c_int, to: *mut u8, len: usize, position: i64) -> isize {
        if let (Some(to), Some(position)) = (one(to, len), at(position))
            && let Some(answer) = read_at(fd, to, position, ServeMode::Plain, Cancel::Point)
        {
            return answer;
        }
        call_real!(pread64(fd => c_int, to => *mut u8, len => usize, position => i64) -> isize)
    }

    __pread64_nocancel(fd: c_int, to: *mut u8, len: usize, position: i64) -> isize {
        if let (Some(to), Some(position)) = (one(to, len), at(position))
            && let Some(answer) = read_at(fd, to, position, ServeMode::Plain, Cancel::Never)
        {
            return answer;
        }
        call_real!(__pread64_nocancel(fd => c_int, to => *mut u8, len => usize, position => i64) -> isize)
    }

    __pread_chk | __pread64_chk (fd: c_int, to: *mut u8, len: usize, position: i64, room: usize) -> isize {
        if len <= room
            && let (Some(to), Some(position)) = (one(to, len), at(position))
            && let Some(answer) = read_at(fd, to, position, ServeMode::Plain, Cancel::Point)
        {
            return answer;
        }
        call_real!(__pread64_chk(fd => c_int, to => *mut u8, len => usize, position => i64, room => usize) -> isize)
    }

    readv(fd: c_int, parts: *const Part, count: c_int) -> isize {
        let mut room = Parts::uninit();
        let target = many(&mut room, parts, count);
        if let Some(answer) = target.and_then(|to| read_on(fd, to, ServeMode::Plain, Cancel::Point)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(readv(fd => c_int, parts => *const Part, count => c_int) -> isize);
        passed.end(fd);
        answer
    }

    preadv | preadv64 (fd: c_int, parts: *const Part, count: c_int, position: i64) -> isize {
        let mut room = Parts::uninit();
        if let (Some(to), Some(position)) = (many(&mut room, parts, count), at(position))
            && let Some(answer) = read_at(fd, to, position, ServeMode::Plain, Cancel::Point)
        {
            return answer;
        }
        call_real!(preadv64(fd => c_int, parts => *const Part, count => c_int, position => i64) -> isize)
    }

    /// Flags as [`mode_of`] knows them; position -1 means the descriptor's offset.
    preadv2 | preadv64v2 (fd: c_int, parts: *const Part, count: c_int, position: i64, flags: c_int) -> isize {
        let mut room = Parts::uninit();
        let target = many(&mut room, parts, count);
        if let (Some(mode), Some(to)) = (mode_of(flags), target)
            && (mode == ServeMode::Plain || does_kernel_accept(fd, mode, flags))
        {
            let answer = match (position, at(position)) {
                (-1, _) => read_on(fd, to, mode, Cancel::Point),
                (_, Some(position)) => read_at(fd, to, position, mode, Cancel::Point),
                _ => None,
            };
            if let Some(answer) = answer {
                return answer;
            }
        }
        let passed = if position == -1 { pass_on(fd, target) } else { PassedCall::nothing() };
        let answer = call_real!(preadv64v2(
            fd => c_int, parts => *const Part, count => c_int, position => i64, flags => c_int
        ) -> isize);
        passed.end(fd);
        answer
    }

    lseek | lseek64 | __lseek | llseek (fd: c_int, offset: c_long, whence: c_int) -> c_long {
        match seek(fd, offset, whence) {
            Some(answer) => real::answer(answer) as c_long,
            None => call_real!(lseek64(fd => c_int, offset => c_long, whence => c_int) -> c_long),
        }
    }

    /// A hint to fill the kernel's page cache, from which no read of a served descriptor comes: the device would read
    /// everything twice. The hint goes to this cache.
    readahead(fd: c_int, position: i64, len: usize) -> isize {
        // The kernel complains of what is no length.
        if position >= 0 && len <= isize::MAX as usize && is_served(fd) {
            will_need(fd, position as u64, len as u64);
            return 0;
        }
        call_real!(readahead(fd => c_int, position => i64, len => usize) -> isize)
    }

    /// Hints, that of `readahead` among others that do the kernel's cache no harm. All go to this cache.
    posix_fadvise | posix_fadvise64 (fd: c_int, position: i64, len: i64, advice: c_int) -> c_int {
        let known = Advice::of(advice as u64).filter(|&advice| advice != Advice::Passed);
        let bytes = if len == 0 { u64::MAX } else { len as u64 };
        if known == Some(Advice::WillNeed) && position >= 0 && len >= 0 && is_served(fd) {
            will_need(fd, position as u64, bytes);
            return 0;
        }
        let answer =
            call_real!(posix_fadvise(fd => c_int, position => i64, len => i64, advice => c_int) -> c_int);
        if answer == 0 && let Some(advice) = known {
            advise(fd, advice_to_pass_on(advice), position as u64, bytes);
        }
        answer
    }

    /// Forgets the descriptor, then closes it; not one that a cancelled thread leaves open.
    close | __close (fd: c_int) -> c_int {
        if process::is_on() {
            test_cancel();
            descriptors::forget(fd);
        }
        call_real!(close(fd => c_int) -> c_int)
    }

    __close_nocancel(fd: c_int) -> c_int {
        if process::is_on() {
            descriptors::forget(fd);
        }
        call_real!(__close_nocancel(fd => c_int) -> c_int)
    }
}

/// `None` if only the kernel knows.
fn mode_of(flags: c_int) -> Option<ServeMode> {
    /// Poll for the answer of a device; nothing if the thread finds its bytes in memory.
    const RWF_HIPRI: c_int = 1;
    const RWF_DONTCACHE: c_int = 0x80;
    match flags & !RWF_HIPRI {
        0 => Some(ServeMode::Plain),
        RWF_DONTCACHE => Some(ServeMode::Uncached),
        kernel::RWF_NOWAIT => Some(ServeMode::Now),
        _ => None,
    }
}

/// Whether the kernel takes these flags for a descriptor: some file systems have no such reads. Asked by a read that
/// brings nothing, once while the descriptor is attached.
#[cold]
fn does_kernel_accept(fd: c_int, mode: ServeMode, flags: c_int) -> bool {
    if !process::is_on() {
        return false;
    }
    let Some(word) = table::peek(fd) else { return false };
    table::accepts(fd, word, mode, || kernel::accepts_flags(fd, flags))
}

/// The hint that the owner is given. Random reads get no readahead anyway, since that goes by the reads themselves;
/// and some programs announce random reads for each file, and then read it from end to end (RocksDB).
fn advice_to_pass_on(advice: Advice) -> Advice {
    if advice == Advice::Random { Advice::Normal } else { advice }
}

/// Tells the owner how a descriptor will be read, or keeps that until it is attached.
fn advise(fd: c_int, advice: Advice, position: u64, len: u64) {
    let Some(_inside) = process::enter() else { return };
    let state = table::peek(fd).map(|word| word.state());
    match (process::viewer(), state) {
        (Some(viewer), Some(state)) if state.is_attached() => {
            viewer.advise(&table::file(fd), advice, position, len);
        }
        (_, Some(FdState::Candidate | FdState::Shared)) if advice.is_of_handle() => {
            table::keep_advice(fd, advice)
        }
        _ => {}
    }
}

/// Passes on that bytes will be wanted, without waiting. If the first is cached a readahead is there already: programs
/// that say it before each piece of what they read in turn (RocksDB) would only disturb its larger windows.
fn will_need(fd: c_int, position: u64, len: u64) {
    let Some(_inside) = process::enter() else { return };
    let attached = table::peek(fd).is_some_and(|word| word.state().is_attached());
    let Some(viewer) = process::viewer().filter(|_| attached) else { return };
    let (file, mut byte) = (table::file(fd), 0u8);
    // SAFETY: `byte` is one byte that may be written.
    let first = unsafe { viewer.read_ready(&file, WantedBytes { position, to: &raw mut byte, len: 1 }) };
    if first.is_none() {
        viewer.suggest(&file, Advice::WillNeed, position, len);
    }
}

/// Where a seek leads: the kernel's answer, an error its number negated. `None`: the real function has to answer.
fn seek(fd: c_int, offset: i64, whence: c_int) -> Option<isize> {
    while process::is_on() {
        let word = table::peek(fd)?;
        let by_kernel = match word.state() {
            FdState::Served => match seek_inside(process::viewer()?, fd, word, offset, whence) {
                Some(to) if table::advance(fd, word, to) => return Some(to as isize),
                Some(_) => continue, // another thread was faster
                None => descriptors::seek(fd, word, offset, whence),
            },
            FdState::Candidate => descriptors::seek(fd, word, offset, whence),
            FdState::Moving => {
                let _ = descriptors::settled_word(fd);
                continue;
            }
            _ => {
                descriptors::share(fd, Reason::Passed); // if it is being opened
                return None;
            }
        };
        match by_kernel {
            Some(Ok(now)) => return Some(now as isize),
            Some(Err(error)) => return Some(-error.0 as isize),
            None => {}
        }
    }
    None
}

/// The offset a seek leads to, if it is plainly inside the file. All others the kernel works out: it knows the size,
/// the holes and its own limits.
fn seek_inside(viewer: &Viewer, fd: c_int, word: FdWord, offset: i64, whence: c_int) -> Option<u64> {
    let target = match whence {
        kernel::SEEK_SET => offset,
        kernel::SEEK_CUR => offset.checked_add(word.offset() as i64)?,
        _ => return None,
    };
    let size = viewer.arena().record(table::file(fd).cell).map_or(0, |r| r.size.load(Ordering::Relaxed));
    u64::try_from(target).ok().filter(|&target| target <= size && target < table::OFFSETS_MAX)
}

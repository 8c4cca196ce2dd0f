//! Served: the calls that are answered from the cache.
//!
//! ```text
//!   read(fd)   1 what is fd?           not served -> the real read, as a tail call
//!              2 copy at its private offset, asking the owner for what is missing
//!              3 the end of the file?  ask the kernel whether it still is there
//!              4 move the offset on, if nobody did meanwhile      else -> 1
//! ```
//!
//! A file is attached when the owner says so. It is asked when a descriptor has been read for some time, or at once
//! for a large file that it is known to have; until then, and until it agrees, the kernel reads the file
//! (`table.rs`, credit).
//!
//! Whatever is not plainly served goes to the real function, with the kernel's
//! offset put right first: a bad argument, an error of the owner's, a file
//! that changed. So an error the program sees is always the kernel's own.
//!
//! No lock, no allocation, no `errno`: a signal handler may read the very
//! descriptor whose read it interrupted.

use core::ffi::{c_int, c_long, c_void};
use core::sync::atomic::Ordering;

use quinion::arena::Trust;
use quinion::arena::control::{Advice, CAN_WRITE, CREDIT_SPENT, Counter, Manners, Operation, Reason};
use quinion::viewer::sys::Errno;
use quinion::viewer::{ReadEnd, ReadOutcome, RequestError, ViewedFile, Viewer};

use crate::kernel::{self, Stat};
use crate::real::{self, Real, test_cancel};
use crate::table::{self, Attachment, State, Word};
use crate::{careful, process, written};

/// The most bytes one call reads, as in the kernel.
const READ_BYTES_MAX: usize = 0x7fff_f000;
/// The most parts of a scattered read.
const PARTS_MAX: c_int = 1024;
/// How often a read looks again after the file was seen to have grown.
const REVALIDATIONS_MAX: u32 = 3;

/// The kernel's `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Part {
    base: *mut u8,
    len: usize,
}

/// Where the bytes go.
#[derive(Clone, Copy)]
enum Target<'a> {
    One(Part),
    Many(&'a [Part]),
}

// ---- 1: what is fd? -----------------------------------------------------------------------------------

/// At what place of a file a read begins, and so what a descriptor's state has to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Where the descriptor stands, which must be the private offset.
    Offset,
    /// Where the call says.
    Position,
}

impl Start {
    /// Whether a descriptor in this state is served.
    #[inline]
    fn is_served(self, state: State) -> bool {
        state == State::Served || self == Start::Position && state == State::Positioned
    }
}

/// The viewer and the word of a descriptor that is served; one that may be is attached on the way, if it is time.
#[inline]
fn served(fd: c_int, to: Target<'_>, start: Start) -> Option<(&'static Viewer, Word)> {
    if let Some(viewer) = process::viewer() {
        let word = table::look(fd)?;
        if start.is_served(word.state()) {
            return Some((viewer, word));
        }
    }
    not_served_yet(fd, to, start)
}

#[cold]
fn not_served_yet(fd: c_int, to: Target<'_>, start: Start) -> Option<(&'static Viewer, Word)> {
    if !process::is_on() {
        return None;
    }
    loop {
        let word = table::look(fd)?;
        match word.state() {
            state if start.is_served(state) => return Some((process::viewer()?, word)),
            State::Moving => kernel::yield_now(),
            State::Candidate | State::Shared
                if start == Start::Position || word.state() == State::Candidate =>
            {
                match whose_turn(fd, word) {
                    Turn::Ours => attach(fd, word),
                    // A read at the offset is charged by `pass_on`.
                    Turn::Kernels if start == Start::Offset || table::charge(fd, word, worth(to)) => {
                        left_to_the_kernel(fd, word);
                        return None;
                    }
                    Turn::Kernels | Turn::Unknown => {}
                }
            }
            State::Kernel | State::Candidate | State::Shared | State::Served | State::Positioned => {
                left_to_the_kernel(fd, word);
                return None;
            }
            State::Other => return None,
            State::Unknown => settle_unknown(fd, word),
        }
    }
}

/// Whether reads of a descriptor are served, if they say where; a candidate is attached on the way, if it is time.
fn is_served(fd: c_int) -> bool {
    if !process::is_on() {
        return false;
    }
    loop {
        let Some(word) = table::look(fd) else { return false };
        match word.state() {
            State::Served | State::Positioned => return true,
            State::Candidate => match whose_turn(fd, word) {
                Turn::Ours => attach(fd, word),
                Turn::Kernels => return false,
                Turn::Unknown => {}
            },
            State::Moving => kernel::yield_now(),
            _ => return false,
        }
    }
}

/// A read that might have been served is not.
fn left_to_the_kernel(fd: c_int, word: Word) {
    if let Some(viewer) = process::viewer() {
        viewer.count(Counter::KernelReads, 1);
        if table::tell(fd, word) {
            viewer.count_reason(Reason::Foreign);
        }
    }
}

/// Who is to read a candidate.
enum Turn {
    /// We, after asking the owner.
    Ours,
    /// The kernel, for a while.
    Kernels,
    /// That has just been found out: look again.
    Unknown,
}

fn whose_turn(fd: c_int, word: Word) -> Turn {
    match word.credit() {
        Some(0) if !word.has_kernels_reads() => Turn::Ours,
        Some(_) => Turn::Kernels,
        None => look_at(fd, word),
    }
}

/// The first read of a candidate: how much of it is the kernel to read before we ask? What is no file with content is
/// looked at by who asks.
fn look_at(fd: c_int, word: Word) -> Turn {
    let manners = process::manners();
    if manners.large_bytes == 0 || manners.credit_bytes == 0 {
        return Turn::Ours;
    }
    let Some(stat) = kernel::fstat(fd).filter(|stat| stat.is_regular() && stat.size > 0) else {
        return Turn::Ours;
    };
    let bytes = stat.size as u64;
    let (device, inode, is_large) = (stat.device, stat.inode, bytes >= manners.large_bytes);
    let is_wanted =
        || process::is_taken(device, inode) || process::openings_before(device, inode) >= OPENINGS_MAX;
    if is_large && is_wanted() {
        return Turn::Ours;
    }
    let credit = if is_large { bytes.saturating_mul(2) } else { manners.credit_bytes };
    if table::give_credit(fd, word, credit, false) {
        process::count_reason(Reason::Left);
    }
    Turn::Unknown
}

/// A large file that was opened and read so often, by any process of the cache, is asked for at its next first read: it
/// is read again and again, by descriptors none of which comes far.
const OPENINGS_MAX: u64 = 2;

/// What a read takes of a credit.
fn worth(to: Target<'_>) -> u64 {
    match to {
        Target::One(part) => Manners::worth(part.len as u64),
        Target::Many(parts) => {
            Manners::worth(parts.iter().fold(0, |sum, part| part.len.saturating_add(sum)) as u64)
        }
    }
}

/// A call at a descriptor's offset that the kernel is to answer, from [`pass_on`] until [`Passed::end`].
struct Passed(Option<Word>);

/// Puts the kernel's offset right before a read that is not served uses it; of a candidate it is right, and stays so
/// until the read has ended.
#[inline]
fn pass_on(fd: c_int, to: Option<Target<'_>>) -> Passed {
    if !process::is_on() {
        return Passed(None);
    }
    let reads = table::begin_kernels_read(fd, to.map_or(0, worth));
    if reads.is_none() {
        table::share(fd, Reason::Passed);
    }
    Passed(reads)
}

impl Passed {
    /// The kernel has answered.
    #[inline]
    fn end(self, fd: c_int) {
        if let Some(begun) = self.0 {
            table::end_kernels_read(fd, begun);
        }
    }
}

/// The first read of a descriptor that no call of ours opened: it is left to the kernel, and counted if it
/// might have been served.
fn settle_unknown(fd: c_int, word: Word) {
    let regular = kernel::fstat(fd).is_some_and(|stat| stat.is_regular());
    if regular && let Some(viewer) = process::viewer() {
        viewer.count_reason(Reason::Foreign);
    }
    table::settle(fd, word, word.with_state(if regular { State::Kernel } else { State::Other }));
}

/// Asks the owner for the file behind a descriptor that may be served. Afterwards it is, or has a credit of the
/// owner's, or is left to the kernel.
fn attach(fd: c_int, word: Word) {
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
            Answer::Attached(Attachment { handle, place, device: stat.device, inode: stat.inode, changed_at })
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

fn why(error: &RequestError) -> Reason {
    match error {
        RequestError::Errno(error) if *error == Errno::TXTBSY.0 => Reason::Writable,
        RequestError::Errno(_) | RequestError::Fruitless => Reason::Refused,
        RequestError::OwnerGone | RequestError::NoSlot => Reason::NoOwner,
    }
}

// ---- 2 and 3: copy, and the end of the file ---------------------------------------------------------------

/// How a read is to be served.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Whatever it takes, and what was read stays cached.
    Plain,
    /// RWF_DONTCACHE: what was not cached before is not afterwards.
    Uncached,
    /// RWF_NOWAIT: only what is cached.
    Now,
}

/// Why a read has no bytes.
#[derive(Clone, Copy)]
enum Unserved {
    /// The descriptor has been given back to the kernel, which has to answer.
    ToKernel,
    /// It would have to wait.
    NotReady,
}

/// One look at the cache; `None` if the read would have to wait and must not.
#[inline(always)] // the manner is known to who calls
fn look(
    viewer: &Viewer,
    file: &ViewedFile<'_>,
    position: u64,
    to: Part,
    manner: Manner,
) -> Option<ReadOutcome> {
    // SAFETY: the buffer is the program's, and it said it may be written.
    unsafe {
        match manner {
            Manner::Plain => Some(viewer.read(file, position, to.base, to.len)),
            Manner::Uncached => Some(viewer.read_uncached(file, position, to.base, to.len)),
            Manner::Now => viewer.read_ready(file, position, to.base, to.len),
        }
    }
}

/// Reads at `position` of a served descriptor; `is_whole` says that this is all of the program's call.
#[inline(always)] // the manner is known to who calls
fn transfer(
    viewer: &Viewer,
    fd: c_int,
    position: u64,
    to: Part,
    manner: Manner,
    is_whole: bool,
) -> Result<usize, Unserved> {
    let file = table::file(fd);
    match viewer.trust(&file) {
        Trust::Sure => {}
        Trust::Checked if !written::has_locked() => {}
        trust => match look_at_times(viewer, fd, trust) {
            Looked::Right => {}
            Looked::Young if manner == Manner::Now => return Err(Unserved::NotReady),
            // SAFETY: as in `look`.
            Looked::Young => return unsafe { read_by_kernel(viewer, fd, position, to, is_whole) },
            Looked::Gone(reason) => {
                table::detach(fd, reason);
                return Err(Unserved::ToKernel);
            }
        },
    }
    let read = look(viewer, &file, position, to, manner);
    match read {
        Some(read) if read.end == ReadEnd::Full && read.asked == 0 => Ok(read.bytes),
        read => transfer_slowly(viewer, fd, position, to, manner, read),
    }
}

/// What a look at a file's times told.
enum Looked {
    /// What is cached is the file's.
    Right,
    /// It was changed so lately that nothing can be told by its times.
    Young,
    /// It is not to be served any more.
    Gone(Reason),
}

/// Looks whether what is cached is the file's, before a read.
#[cold]
fn look_at_times(viewer: &Viewer, fd: c_int, trust: Trust) -> Looked {
    if trust == Trust::Kernel {
        let ended = viewer.arena().owner_has_ended();
        return Looked::Gone(if ended { Reason::NoOwner } else { Reason::Writable });
    }
    let Some(stat) = kernel::fstat(fd) else { return Looked::Gone(Reason::Changed) };
    if table::was_seen(fd, &stat) {
        return Looked::Right;
    }
    if !stat.is_settled() {
        return Looked::Young;
    }
    // The owner looks after we did: what it leaves is no older than `stat`.
    match viewer.request(Operation::Revalidate, [table::file(fd).handle, 0, 0]) {
        Ok(_) => table::note_seen(fd, &stat),
        Err(error) => return Looked::Gone(why(&error)),
    }
    Looked::Right
}

/// The kernel reads for once; the descriptor stays served, unless it cannot, and says so itself.
///
/// # Safety
/// The buffer may be written.
#[cold]
unsafe fn read_by_kernel(
    viewer: &Viewer,
    fd: c_int,
    position: u64,
    to: Part,
    is_whole: bool,
) -> Result<usize, Unserved> {
    // SAFETY: the caller's promise.
    let Ok(bytes) = (unsafe { kernel::pread(fd, to.base, to.len, position) }) else {
        table::detach(fd, Reason::Passed);
        return Err(Unserved::ToKernel);
    };
    viewer.count(Counter::KernelReads, 1);
    viewer.count(Counter::KernelBytes, bytes as u64);
    // `counted` takes them for served.
    viewer.count(Counter::Bytes, (bytes as u64).wrapping_neg());
    viewer.count(Counter::Reads, u64::from(is_whole).wrapping_neg());
    Ok(bytes)
}

#[cold]
fn transfer_slowly(
    viewer: &Viewer,
    fd: c_int,
    position: u64,
    to: Part,
    manner: Manner,
    mut read: Option<ReadOutcome>,
) -> Result<usize, Unserved> {
    let file = table::file(fd);
    let mut asked = 0;
    let mut revalidations = 0;
    let reason = loop {
        let Some(outcome) = read else {
            refuse(viewer, fd, position, to);
            return Err(Unserved::NotReady);
        };
        asked += outcome.asked;
        let size = match outcome.end {
            ReadEnd::Full => break None,
            ReadEnd::EndOfFile(size) => size,
            ReadEnd::Stale => break Some(Reason::Changed),
            ReadEnd::Failed(error) => break Some(why(&error)),
        };
        if kernel::fstat(fd).is_some_and(|stat| stat.size as u64 == size) {
            break None;
        }
        revalidations += 1;
        if revalidations > REVALIDATIONS_MAX {
            break Some(Reason::Changed);
        }
        if let Err(error) = viewer.request(Operation::Revalidate, [file.handle, 0, 0]) {
            break Some(why(&error));
        }
        read = look(viewer, &file, position, to, manner);
    };
    if let Some(reason) = reason {
        table::detach(fd, reason);
        return Err(Unserved::ToKernel);
    }
    if asked > 0 {
        viewer.count(Counter::Asked, 1);
    }
    Ok(read.map_or(0, |read| read.bytes))
}

/// A read that must not wait finds nothing: what it wants is read meanwhile, as the kernel does, so that who tries
/// again gets on. Who tries again and again says so once.
fn refuse(viewer: &Viewer, fd: c_int, position: u64, to: Part) {
    if table::is_first_refusal(fd, position / 4096) {
        viewer.suggest(&table::file(fd), Advice::WillNeed, position, to.len as u64);
    }
}

#[inline(always)] // the manner is known to who calls
fn transfer_all(
    viewer: &Viewer,
    fd: c_int,
    position: u64,
    to: Target<'_>,
    manner: Manner,
) -> Result<usize, Unserved> {
    match to {
        Target::One(part) => transfer(viewer, fd, position, part, manner, true),
        Target::Many(parts) => {
            let mut done = 0;
            for &Part { base, len } in parts.iter().filter(|part| part.len > 0) {
                let len = len.min(READ_BYTES_MAX - done);
                let (part, is_whole) = (Part { base, len }, parts.len() == 1);
                let bytes = match transfer(viewer, fd, position + done as u64, part, manner, is_whole) {
                    Err(Unserved::NotReady) if done > 0 => 0,
                    other => other?,
                };
                done += bytes;
                if bytes < len || done == READ_BYTES_MAX {
                    break;
                }
            }
            Ok(done)
        }
    }
}

// ---- 4: whole calls -----------------------------------------------------------------------------------

/// Whether a call is a point where a thread may be cancelled. The C library has forms of some calls for itself that
/// are not.
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
#[inline(always)] // both manners are known to who calls
fn read_on(fd: c_int, to: Target<'_>, manner: Manner, cancel: Cancel) -> Option<isize> {
    loop {
        let (viewer, word) = served(fd, to, Start::Offset)?;
        cancel.test();
        let bytes = match transfer_all(viewer, fd, word.offset(), to, manner) {
            Ok(bytes) => bytes,
            Err(unserved) => return refused(unserved),
        };
        let offset = word.offset() + bytes as u64;
        if offset >= table::OFFSETS_MAX {
            table::share(fd, Reason::Number);
        } else if table::advance(fd, word, offset) {
            return Some(counted(viewer, bytes));
        }
    }
}

/// A read at `position`. `None`: the real function has to answer.
#[inline(always)] // both manners are known to who calls
fn read_at(fd: c_int, to: Target<'_>, position: u64, manner: Manner, cancel: Cancel) -> Option<isize> {
    loop {
        let (viewer, word) = served(fd, to, Start::Position)?;
        if word.state() == State::Positioned && !careful::is_free() && !table::is_still(fd, word) {
            continue;
        }
        cancel.test();
        let bytes = match transfer_all(viewer, fd, position, to, manner) {
            Ok(bytes) => bytes,
            Err(unserved) => return refused(unserved),
        };
        // The number may have been closed and opened anew under the copy.
        if table::look(fd)?.is_same_opening(word) {
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

/// A buffer as the kernel would take it; `None` if it has to complain.
#[inline]
fn one(base: *mut u8, len: usize) -> Option<Target<'static>> {
    let fits = !base.is_null() && len <= isize::MAX as usize;
    fits.then_some(Target::One(Part { base, len: len.min(READ_BYTES_MAX) }))
}

/// # Safety
/// `parts` are `count` parts, as the program says.
unsafe fn many<'a>(parts: *const Part, count: c_int) -> Option<Target<'a>> {
    if parts.is_null() || !parts.is_aligned() || !(1..=PARTS_MAX).contains(&count) {
        return None;
    }
    // SAFETY: the program's promise to `readv`.
    let parts = unsafe { core::slice::from_raw_parts(parts, count as usize) };
    let sum = parts.iter().try_fold(0usize, |sum, part| {
        let is_bad = part.base.is_null() && part.len > 0;
        sum.checked_add(part.len).filter(|&sum| !is_bad && sum <= isize::MAX as usize)
    });
    sum.map(|_| Target::Many(parts))
}

#[inline]
fn at(position: i64) -> Option<u64> {
    u64::try_from(position).ok().filter(|&position| position < table::OFFSETS_MAX)
}

/// Calls a real function of the given type.
macro_rules! call_real {
    ($name:ident($($argument:expr => $type:ty),*) -> $answer:ty) => {{
        let function = Real::get(&real::$name);
        // SAFETY: the address is that of the function of this name, which has this type.
        unsafe {
            core::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> $answer>(function)
                ($($argument),*)
        }
    }};
}
pub(crate) use call_real;

// ---- the functions themselves -------------------------------------------------------------------------

/// Several names for one function.
macro_rules! names {
    ($($(#[$doc:meta])* $($name:ident)|+ ($($argument:ident: $type:ty),*) -> $answer:ty $body:block)*) => { $(
        names!(@each [$($name)+] [$(#[$doc])*] ($($argument: $type),*) -> $answer $body);
    )* };
    (@each [$($name:ident)+] $docs:tt $arguments:tt -> $answer:ty $body:block) => {
        $( names!(@one $name $docs $arguments -> $answer $body); )+
    };
    (@one $name:ident [$(#[$doc:meta])*] ($($argument:ident: $type:ty),*) -> $answer:ty $body:block) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// That of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $answer $body
    };
}
pub(crate) use names;

names! {
    /// Served.
    read | __read (fd: c_int, to: *mut u8, len: usize) -> isize {
        let target = one(to, len);
        if let Some(answer) = target.and_then(|to| read_on(fd, to, Manner::Plain, Cancel::Point)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(read(fd => c_int, to => *mut u8, len => usize) -> isize);
        passed.end(fd);
        answer
    }

    /// The C library's own `read`, where nobody is to be cancelled.
    __read_nocancel(fd: c_int, to: *mut u8, len: usize) -> isize {
        let target = one(to, len);
        if let Some(answer) = target.and_then(|to| read_on(fd, to, Manner::Plain, Cancel::Never)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(__read_nocancel(fd => c_int, to => *mut u8, len => usize) -> isize);
        passed.end(fd);
        answer
    }

    /// Served; a length the buffer cannot have is the real function's to punish.
    __read_chk(fd: c_int, to: *mut u8, len: usize, room: usize) -> isize {
        let target = if len <= room { one(to, len) } else { None };
        if let Some(answer) = target.and_then(|to| read_on(fd, to, Manner::Plain, Cancel::Point)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(__read_chk(fd => c_int, to => *mut u8, len => usize, room => usize) -> isize);
        passed.end(fd);
        answer
    }

    /// Served.
    pread | pread64 | __pread64 (fd: c_int, to: *mut u8, len: usize, position: i64) -> isize {
        if let (Some(to), Some(position)) = (one(to, len), at(position))
            && let Some(answer) = read_at(fd, to, position, Manner::Plain, Cancel::Point)
        {
            return answer;
        }
        call_real!(pread64(fd => c_int, to => *mut u8, len => usize, position => i64) -> isize)
    }

    /// The C library's own `pread`, where nobody is to be cancelled.
    __pread64_nocancel(fd: c_int, to: *mut u8, len: usize, position: i64) -> isize {
        if let (Some(to), Some(position)) = (one(to, len), at(position))
            && let Some(answer) = read_at(fd, to, position, Manner::Plain, Cancel::Never)
        {
            return answer;
        }
        call_real!(__pread64_nocancel(fd => c_int, to => *mut u8, len => usize, position => i64) -> isize)
    }

    /// Served; a length the buffer cannot have is the real function's to punish.
    __pread_chk | __pread64_chk (fd: c_int, to: *mut u8, len: usize, position: i64, room: usize) -> isize {
        if len <= room
            && let (Some(to), Some(position)) = (one(to, len), at(position))
            && let Some(answer) = read_at(fd, to, position, Manner::Plain, Cancel::Point)
        {
            return answer;
        }
        call_real!(__pread64_chk(fd => c_int, to => *mut u8, len => usize, position => i64, room => usize) -> isize)
    }

    /// Served.
    readv(fd: c_int, parts: *const Part, count: c_int) -> isize {
        // SAFETY: the program's promise.
        let target = unsafe { many(parts, count) };
        if let Some(answer) = target.and_then(|to| read_on(fd, to, Manner::Plain, Cancel::Point)) {
            return answer;
        }
        let passed = pass_on(fd, target);
        let answer = call_real!(readv(fd => c_int, parts => *const Part, count => c_int) -> isize);
        passed.end(fd);
        answer
    }

    /// Served.
    preadv | preadv64 (fd: c_int, parts: *const Part, count: c_int, position: i64) -> isize {
        // SAFETY: the program's promise.
        if let (Some(to), Some(position)) = (unsafe { many(parts, count) }, at(position))
            && let Some(answer) = read_at(fd, to, position, Manner::Plain, Cancel::Point)
        {
            return answer;
        }
        call_real!(preadv64(fd => c_int, parts => *const Part, count => c_int, position => i64) -> isize)
    }

    /// Served with flags that [`manner_of`] knows; position -1 means the descriptor's offset.
    preadv2 | preadv64v2 (fd: c_int, parts: *const Part, count: c_int, position: i64, flags: c_int) -> isize {
        // SAFETY: the program's promise.
        let target = unsafe { many(parts, count) };
        if let (Some(manner), Some(to)) = (manner_of(flags), target) {
            let answer = match (position, at(position)) {
                (-1, _) => read_on(fd, to, manner, Cancel::Point),
                (_, Some(position)) => read_at(fd, to, position, manner, Cancel::Point),
                _ => None,
            };
            if let Some(answer) = answer {
                return answer;
            }
        }
        let passed = if position == -1 { pass_on(fd, target) } else { Passed(None) };
        let answer = call_real!(preadv64v2(
            fd => c_int, parts => *const Part, count => c_int, position => i64, flags => c_int
        ) -> isize);
        passed.end(fd);
        answer
    }

    /// Served: the private offset moves.
    lseek | lseek64 | __lseek (fd: c_int, offset: c_long, whence: c_int) -> c_long {
        match seek(fd, offset, whence) {
            Some(answer) => real::answer(answer) as c_long,
            None => call_real!(lseek64(fd => c_int, offset => c_long, whence => c_int) -> c_long),
        }
    }

    /// A hint to fill the kernel's page cache, from which nobody reads a descriptor that is served: the device
    /// would read everything twice. Ours is filled.
    readahead(fd: c_int, position: i64, len: usize) -> isize {
        if position >= 0 && is_served(fd) {
            will_need(fd, position as u64, len as u64);
            return 0;
        }
        call_real!(readahead(fd => c_int, position => i64, len => usize) -> isize)
    }

    /// The same hint, among others that do the kernel's cache no harm. Ours hears them all.
    posix_fadvise | posix_fadvise64 (fd: c_int, position: i64, len: i64, advice: c_int) -> c_int {
        let known = Advice::of(advice as u64).filter(|&advice| advice != Advice::Passed);
        // No length is all that follows.
        let bytes = if len == 0 { u64::MAX } else { len as u64 };
        if known == Some(Advice::WillNeed) && position >= 0 && len >= 0 && is_served(fd) {
            will_need(fd, position as u64, bytes);
            return 0;
        }
        let answer =
            call_real!(posix_fadvise(fd => c_int, position => i64, len => i64, advice => c_int) -> c_int);
        if answer == 0 && let Some(advice) = known {
            advise(fd, believed(advice), position as u64, bytes);
        }
        answer
    }

    /// Forgets the descriptor, then closes it; not one that a cancelled thread leaves open.
    close | __close (fd: c_int) -> c_int {
        if process::is_on() {
            test_cancel();
            table::forget(fd);
        }
        call_real!(close(fd => c_int) -> c_int)
    }

    /// The C library's own `close`, where nobody is to be cancelled.
    __close_nocancel(fd: c_int) -> c_int {
        if process::is_on() {
            table::forget(fd);
        }
        call_real!(__close_nocancel(fd => c_int) -> c_int)
    }
}

/// What the flags of a read ask for; `None` if only the kernel knows.
fn manner_of(flags: c_int) -> Option<Manner> {
    /// Poll for the answer of a device; nothing to who finds his bytes in memory.
    const RWF_HIPRI: c_int = 1;
    const RWF_NOWAIT: c_int = 8;
    const RWF_DONTCACHE: c_int = 0x80;
    match flags & !RWF_HIPRI {
        0 => Some(Manner::Plain),
        RWF_DONTCACHE => Some(Manner::Uncached),
        RWF_NOWAIT => Some(Manner::Now),
        _ => None,
    }
}

/// What is made of a hint. Random reads get nothing ahead of them anyway, since what is done is judged; and some
/// programs say of each file that it will be read so, and then read it from end to end (RocksDB).
fn believed(advice: Advice) -> Advice {
    if advice == Advice::Random { Advice::Normal } else { advice }
}

/// Tells the owner how a descriptor will be read; of one that is not attached yet it is told then.
fn advise(fd: c_int, advice: Advice, position: u64, len: u64) {
    if !process::is_on() {
        return;
    }
    let state = table::look(fd).map(|word| word.state());
    match (process::viewer(), state) {
        (Some(viewer), Some(state)) if state.is_attached() => {
            viewer.advise(&table::file(fd), advice, position, len);
        }
        (_, Some(State::Candidate | State::Shared)) if advice.is_of_handle() => {
            table::keep_advice(fd, advice)
        }
        _ => {}
    }
}

/// Passes on that bytes will be wanted, without waiting. If the first is cached somebody is ahead already: programs say
/// it before each piece of what they read in turn (RocksDB), and would only disturb whose windows are larger.
fn will_need(fd: c_int, position: u64, len: u64) {
    let attached = table::look(fd).is_some_and(|word| word.state().is_attached());
    let Some(viewer) = process::viewer().filter(|_| attached) else { return };
    let (file, mut byte) = (table::file(fd), 0u8);
    // SAFETY: `byte` is one byte that may be written.
    let first = unsafe { viewer.read_ready(&file, position, &raw mut byte, 1) };
    if first.is_none() {
        viewer.suggest(&file, Advice::WillNeed, position, len);
    }
}

/// Where a seek leads; the answer is the kernel's, an error its number negated. `None`: the real function
/// has to answer.
fn seek(fd: c_int, offset: i64, whence: c_int) -> Option<isize> {
    if !process::is_on() {
        return None;
    }
    loop {
        let word = table::look(fd)?;
        match word.state() {
            State::Served => match seek_served(process::viewer()?, fd, word, offset, whence) {
                Ok(to) if to >= table::OFFSETS_MAX => table::share(fd, Reason::Number),
                Ok(to) if table::advance(fd, word, to) => return Some(to as isize),
                Ok(_) => {} // somebody was faster
                Err(error) => return Some(-error.0 as isize),
            },
            State::Candidate => {
                if let Some(answer) = table::seek_candidate(fd, word, offset, whence) {
                    return Some(answer);
                }
            }
            State::Moving => kernel::yield_now(),
            _ => return None,
        }
    }
}

/// The offset a seek leads to. What is not plainly inside the file the kernel works out: it knows
/// the size, the holes and its own limits, and its offset means nothing while the private one counts.
fn seek_served(viewer: &Viewer, fd: c_int, word: Word, offset: i64, whence: c_int) -> Result<u64, Errno> {
    let (target, whence) = match whence {
        kernel::SEEK_SET => (offset, kernel::SEEK_SET),
        kernel::SEEK_CUR => (offset.checked_add(word.offset() as i64).ok_or(Errno::INVAL)?, kernel::SEEK_SET),
        other => (offset, other),
    };
    let size = viewer.arena().record(table::file(fd).cell).map_or(0, |r| r.size.load(Ordering::Relaxed));
    if whence == kernel::SEEK_SET && u64::try_from(target).is_ok_and(|target| target <= size) {
        return Ok(target as u64);
    }
    kernel::lseek(fd, target, whence).map(|to| to as u64)
}

//! Table: what we know of each descriptor.
//!
//! A word for each number (`quinion_view::fdstate` has its states, the rules by which an offset passes from the kernel
//! to us and back, and why they hold), and beside it what a served descriptor is attached to. This file gives that
//! protocol the system calls it needs and tells the owner, the counters and `written.rs` what came of it; it decides
//! nothing about offsets itself.
//!
//! SHARED is a permission to look, no knowledge: a thread that attaches looks at the
//! descriptor that there is then. So it may be said of a number too often, and
//! a forked child says it of all it inherited.
//!
//! Invariants:
//!  1. The kernel's offset is right before any call that uses it runs: a thread that wants one shares or detaches
//!     first.
//!  2. A descriptor is SERVED only while its description is this process's alone, and never if it can write.
//!  3. What `FILES` holds for a number changes only in [`publish`], while its state is MOVING.
//!  4. A number is attached (SERVED, POSITIONED) only while the file behind it cannot become another unseen, or each
//!     read looks whether it did (`audit.rs`).
//!
//! Whatever here makes a system call is counted first ([`process::enter`]), or does nothing: a process that has stopped
//! has given all back.
//!
//! Two threads that each publish something and then look for the other's do so in SeqCst steps: opening
//! against forking, attaching against stopping. In their one order the second sees the first.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use quinion_view::arena::CellNumber;
use quinion_view::arena::control::{Advice, Reason};
use quinion_view::fdstate::{Fd, FdCell, Process};
pub use quinion_view::fdstate::{FdWord, OFFSETS_MAX, State};
use quinion_view::units::MappingId;
use quinion_view::viewer::ViewedFile;
use quinion_view::viewer::sys::Errno;

use crate::bytes::ServeMode;
use crate::kernel::{self, SignalsHeld};
use crate::{audit, deferred_detach, process};

/// Descriptors from this one on are left to the kernel.
pub const DESCRIPTORS: usize = 1 << 16;
/// The first descriptor that may be SERVED: streams of the C library read 0 to 2 past us, at the offset.
pub const FIRST: i32 = 3;

/// In place of a time: the file was attached when no look was needed. All of `FILES` begins as zeros, so it takes no
/// room in the object and no memory before it is used.
const NEVER: u64 = 0;

/// What a served descriptor is attached to.
struct File {
    handle: AtomicU64,
    /// The record's cell (low half) and the mapping's number (high half).
    place: AtomicU64,
    marker_reported: AtomicU64,
    touched: AtomicU64,
    /// The page of the last read that was refused for want of it and whose page the owner was told of, plus one.
    refused: AtomicU64,
    /// What the program said of how it will read, plus one: for when it is attached. The only one that changes in any
    /// state; what a race mixes up there costs speed.
    advice: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    /// When the file had changed last as it was attached, plus one, or [`NEVER`].
    changed_at: AtomicU64,
    /// The file's times and size as of which what is cached is known to be right, in one word; 0 for none.
    seen: AtomicU64,
}

/// What [`publish`] is told.
#[derive(Clone, Copy)]
pub struct Attachment {
    /// The owner's handle.
    pub handle: u64,
    /// The record's cell (low half) and the mapping's number (high half).
    pub place: u64,
    /// The file's device.
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
    /// When it had changed last, if each read is to look whether it did; see `audit.rs`.
    pub changed_at: Option<i64>,
    /// Whether it can write: then only positional reads are served.
    pub can_write: bool,
}

/// All zeros at first, so that the object has no bytes of them: what else there is to say, [`publish`] says.
static WORDS: [FdCell; DESCRIPTORS] = [const { FdCell::new() }; DESCRIPTORS];
static FILES: [File; DESCRIPTORS] = [const {
    File {
        handle: AtomicU64::new(0),
        place: AtomicU64::new(0),
        marker_reported: AtomicU64::new(0),
        touched: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        advice: AtomicU64::new(0),
        device: AtomicU64::new(0),
        inode: AtomicU64::new(0),
        changed_at: AtomicU64::new(0),
        seen: AtomicU64::new(0),
    }
}; DESCRIPTORS];
/// What the kernel is known to answer to reads with flags: two bits a mode, the lower one says that it is known and
/// the upper one what; and above, the low bits of the handle of which that is so.
static ACCEPTS: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];
/// One more than the highest descriptor that ever was a candidate.
static END: AtomicU32 = AtomicU32::new(0);

/// What the protocol needs for the descriptor of this number.
struct KernelProcess(i32);

impl Process for KernelProcess {
    type SignalsHeld = SignalsHeld;

    fn hold_signals(&self) -> SignalsHeld {
        SignalsHeld::new()
    }
    fn offset(&self) -> Option<u64> {
        kernel::lseek(self.0, 0, kernel::SEEK_CUR).ok().map(|offset| offset as u64)
    }
    fn set_offset(&self, offset: u64) {
        let _ = kernel::lseek(self.0, offset as i64, kernel::SEEK_SET);
    }
    fn wait(&self, turn: u32) {
        // A thread that is moving it is counted, so it ends also if we may not sleep any more.
        match process::enter() {
            Some(_inside) => kernel::wait(turn),
            None => core::hint::spin_loop(),
        }
    }
    fn handle(&self) -> u64 {
        FILES[self.0 as usize].handle.load(Ordering::Relaxed) // ordered by the word's `look`
    }
}

#[inline]
fn cell(fd: i32) -> Option<&'static FdCell> {
    WORDS.get(usize::try_from(fd).ok()?)
}

#[inline]
fn at(fd: i32) -> Option<Fd<'static, KernelProcess>> {
    cell(fd).map(|cell| Fd::new(cell, KernelProcess(fd)))
}

/// The word of `fd`; `None` if the number is beyond the table.
#[inline]
pub fn look(fd: i32) -> Option<FdWord> {
    cell(fd).map(FdCell::look)
}

/// The word of `fd` once no thread is moving it.
pub fn look_settled(fd: i32) -> Option<FdWord> {
    at(fd).map(|at| at.settled())
}

/// Moves the private offset; `false` if another thread changed the word first.
#[inline]
pub fn advance(fd: i32, from: FdWord, offset: u64) -> bool {
    cell(fd).is_some_and(|cell| cell.advance(from, offset))
}

/// After a copy, whether `fd` still is what it was when `word` was looked at.
#[inline]
pub fn is_still_attached(fd: i32, word: FdWord) -> bool {
    cell(fd).is_some_and(|cell| cell.is_still(word))
}

/// The file behind a served descriptor.
#[inline]
pub fn file(fd: i32) -> ViewedFile<'static> {
    let file = &FILES[fd as usize];
    let place = file.place.load(Ordering::Relaxed); // ordered by `look`
    ViewedFile {
        handle: file.handle.load(Ordering::Relaxed),
        cell: CellNumber(place as u32),
        id: MappingId((place >> 32) as u32),
        marker_reported: &file.marker_reported,
        touched: &file.touched,
    }
}

/// Whether what is cached was right when the file was as `stat` says.
pub fn was_seen(fd: i32, stat: &kernel::Stat) -> bool {
    FILES[fd as usize].seen.load(Ordering::Relaxed) == stat.digest()
}
/// What is cached is no older than that.
pub fn note_seen(fd: i32, stat: &kernel::Stat) {
    FILES[fd as usize].seen.store(stat.digest(), Ordering::Relaxed); // one word: two that note at once do not mix
}
/// Keeps what the program said of how it will read a descriptor that is not attached yet.
pub fn keep_advice(fd: i32, advice: Advice) {
    if let Some(file) = usize::try_from(fd).ok().and_then(|fd| FILES.get(fd)) {
        file.advice.store(advice as u64 + 1, Ordering::Relaxed);
    }
}

/// What was kept.
pub fn advice(fd: i32) -> Option<Advice> {
    Advice::of(FILES[fd as usize].advice.load(Ordering::Relaxed).checked_sub(1)?)
}

/// Whether a read that was refused at this page is the first of such in a row.
pub fn is_first_refusal(fd: i32, page: u64) -> bool {
    FILES[fd as usize].refused.swap(page + 1, Ordering::Relaxed) != page + 1
}

// ---- opening and closing ---------------------------------------------------------------------------

/// A descriptor was opened for reading only, by a call we saw. `forks` is what [`process::forks`] said before the
/// call.
pub fn opened(fd: i32, forks: u64) {
    let Some(_inside) = process::enter() else { return };
    deferred_detach::pay();
    see(fd);
    let Some(at) = at(fd) else { return };
    let opened = at.open_for_reading(|| !process::forked_since(forks));
    was_opened(fd, opened.stale);
    if opened.was_forked {
        count(Reason::Forked);
    } else if !process::may_serve_more() {
        detach_inside(fd, Reason::Passed);
    }
}

/// A descriptor was opened in a way that is not served.
pub fn opened_for_kernel(fd: i32, state: State) {
    if let Some(at) = at(fd) {
        was_opened(fd, at.open(state));
    }
}

/// A descriptor has appeared whose description another process may have: positional reads may be served.
/// `told` is whether it has been counted why no others are.
pub fn adopt(fd: i32, told: bool) {
    see(fd);
    opened_for_kernel(fd, State::Shared);
    if told && let Some(word) = look(fd) {
        tell(fd, word);
    }
}

/// A thread that looks at all descriptors looks at this one too from now on.
fn see(fd: i32) {
    if (fd as usize) < DESCRIPTORS {
        END.fetch_max(fd as u32 + 1, Ordering::SeqCst); // before the word; partners: the loads of END below
    }
}

/// The number is of another opening now. `stale` is the handle of what it was attached to.
fn was_opened(fd: i32, stale: Option<u64>) {
    FILES[fd as usize].advice.store(0, Ordering::Relaxed);
    if let Some(handle) = stale
        && let Some(_inside) = process::enter()
    {
        deferred_detach::give_back(handle);
        // It was closed by means we do not see, so no number is safe any more, unless each is looked at.
        if !audit::is_restricted() {
            process::stop(Reason::Passed);
        }
    }
}

/// A descriptor was looked at once: what is known of it now, if no other thread, which knew better, was faster.
pub fn settle(fd: i32, from: FdWord, state: State) {
    if let Some(cell) = cell(fd) {
        cell.settle(from, from.settled_as(state));
    }
}

/// Whether why this descriptor's reads are left to the kernel has not been told yet; it has from now on.
pub fn tell(fd: i32, word: FdWord) -> bool {
    cell(fd).is_some_and(|cell| cell.tell(word))
}

/// The descriptor is about to be closed.
#[inline]
pub fn forget(fd: i32) {
    if look(fd).is_some_and(|word| word.state() != State::Unknown)
        && let Some(_inside) = process::enter()
        && let Some(at) = at(fd)
    {
        give_back_any(at.forget());
    }
}

fn give_back_any(handle: Option<u64>) {
    handle.into_iter().for_each(deferred_detach::give_back);
}

// ---- candidates that the kernel serves for a while ------------------------------------------------------

/// Gives a candidate a credit; `is_owners` if the owner did. `false`: another thread was faster, and knew better.
pub fn give_credit(fd: i32, from: FdWord, bytes: u64, is_owners: bool) -> bool {
    cell(fd).is_some_and(|cell| cell.give_credit(from, bytes, is_owners))
}

/// Takes `bytes` off a candidate's credit; `false` if another thread was faster.
pub fn charge(fd: i32, from: FdWord, bytes: u64) -> bool {
    cell(fd).is_some_and(|cell| cell.charge(from, bytes))
}

/// The kernel is about to read a candidate at its offset. `false` if it is no candidate with a credit; else
/// [`end_kernels_read`] is to be called.
pub fn begin_kernels_read(fd: i32, bytes: u64) -> bool {
    at(fd).is_some_and(|at| at.begin_kernels_call(bytes))
}

/// It is over.
pub fn end_kernels_read(fd: i32) {
    if let Some(at) = at(fd) {
        at.end_kernels_call();
    }
}

// ---- serving ------------------------------------------------------------------------------------------

/// Makes a candidate, at whose offset the kernel does not read, served from that offset on, and one that is shared or
/// can write positioned. `false` if it is neither any more.
pub fn publish(fd: i32, from: FdWord, to: Attachment) -> bool {
    let Some(_inside) = process::enter() else { return false };
    let Some(at) = at(fd) else { return false };
    let published = at.publish(from, to.can_write, || {
        let file = &FILES[fd as usize];
        file.handle.store(to.handle, Ordering::Relaxed);
        file.place.store(to.place, Ordering::Relaxed);
        file.marker_reported.store(0, Ordering::Relaxed);
        file.touched.store(0, Ordering::Relaxed);
        file.refused.store(0, Ordering::Relaxed);
        file.device.store(to.device, Ordering::Relaxed);
        file.inode.store(to.inode, Ordering::Relaxed);
        file.changed_at
            .store(to.changed_at.map_or(NEVER, |at| (at as u64).wrapping_add(1)), Ordering::Relaxed);
        file.seen.store(0, Ordering::Relaxed);
    });
    let Some(state) = published else { return false };
    if state == State::Positioned
        && from.state() == State::Candidate
        && let Some(word) = look(fd)
        && tell(fd, word)
    {
        count(Reason::Writable);
    }
    // A thread may have begun to read at the private offset: it goes back, whether or not we have stopped meanwhile.
    if !process::may_serve_more() {
        detach_inside(fd, Reason::Passed);
    } else if !audit::is_clean() {
        pause_inside(fd);
    }
    true
}

/// Whether the kernel takes reads with flags of a descriptor that was looked at. It is asked by `ask`, once while the
/// descriptor is attached.
pub fn accepts(fd: i32, word: FdWord, mode: ServeMode, ask: impl FnOnce() -> bool) -> bool {
    const MODE_BITS: u32 = 6;
    if !word.state().is_attached() {
        return ask();
    }
    let place = match mode {
        ServeMode::Plain => 0,
        ServeMode::Uncached => 2,
        ServeMode::Now => 4,
    };
    let of = (file(fd).handle as u32) << MODE_BITS;
    let known = ACCEPTS[fd as usize].load(Ordering::Relaxed); // one word, which says of what it is true
    let bits = if known >> MODE_BITS << MODE_BITS == of { known } else { of };
    if bits >> place & 1 != 0 {
        return bits >> place & 2 != 0;
    }
    let does = ask();
    ACCEPTS[fd as usize].store(bits | (1 | u32::from(does) << 1) << place, Ordering::Relaxed); // as above
    does
}

/// Whether a descriptor that was found attached still is what was attached. If not, it is to be looked at anew.
pub fn is_still(fd: i32, word: FdWord) -> bool {
    let Some(_inside) = process::enter() else { return false };
    let of = &FILES[fd as usize];
    let [device, inode, changed_at] =
        [&of.device, &of.inode, &of.changed_at].map(|place| place.load(Ordering::Relaxed));
    if changed_at != NEVER && audit::is_still(fd, device, inode, changed_at.wrapping_sub(1) as i64) {
        return true;
    }
    if let Some(at) = at(fd) {
        give_back_any(at.reattach(word));
    }
    false
}

/// Gives back what a restricted process has closed or replaced by calls that we do not see, as far as the next reader
/// of its number would find that out.
pub fn give_back_unseen() {
    if !audit::is_restricted() {
        return;
    }
    // SeqCst, partner: the `fetch_max` in `see`.
    for fd in 0..END.load(Ordering::SeqCst) as i32 {
        if let Some(word) = look_settled(fd).filter(|word| word.state().is_attached()) {
            let _ = is_still(fd, word);
        }
    }
}

/// Gives the kernel its offset of a descriptor that is served; it may be served again when that is right again.
fn pause(fd: i32) {
    if look(fd).is_some_and(|word| matches!(word.state(), State::Served | State::Moving))
        && let Some(_inside) = process::enter()
    {
        pause_inside(fd);
    }
}

fn pause_inside(fd: i32) {
    if let Some(at) = at(fd) {
        give_back_any(at.pause());
    }
}

/// The same of all descriptors, because code that was not examined is about to run.
pub fn pause_all() {
    // SeqCst, partner: the `fetch_max` in `see`.
    for fd in 0..END.load(Ordering::SeqCst) {
        pause(fd as i32);
    }
}

/// Seeks in a candidate or a served descriptor as the kernel does, while no other thread can begin or go on to serve
/// it; the answer is the kernel's. `None`: it is neither any more.
pub fn seek(fd: i32, from: FdWord, offset: i64, whence: i32) -> Option<Result<u64, Errno>> {
    let _inside = process::enter()?;
    let seek = || kernel::lseek(fd, offset, whence).map(|now| now as u64);
    let answer = at(fd)?.seek(from, seek)?;
    if from.state() == State::Served && answer.is_ok_and(|now| now >= OFFSETS_MAX) {
        count(Reason::Number);
    }
    Some(answer)
}

/// Puts the kernel's offset of a served descriptor right for a call that looks at it; it stays served.
pub fn show_offset(fd: i32) {
    if let Some(_inside) = process::enter()
        && let Some(at) = at(fd)
    {
        at.show_offset();
    }
}

// ---- going back to the kernel ---------------------------------------------------------------------------

/// Leaves the offset of `fd` to the kernel for good; it is right afterwards. Positional reads are served
/// still.
#[inline]
pub fn share(fd: i32, reason: Reason) {
    if look(fd).is_some_and(|word| !word.is_offset_kernels()) {
        share_now(fd, reason);
    }
}

#[cold]
fn share_now(fd: i32, reason: Reason) {
    if let Some(_inside) = process::enter()
        && at(fd).is_some_and(|at| at.share())
    {
        count(reason);
    }
}

fn count(reason: Reason) {
    if let Some(viewer) = process::viewer() {
        viewer.count_reason(reason);
    }
}

/// Leaves `fd` to the kernel for good; the kernel's offset is right afterwards.
#[inline]
pub fn detach(fd: i32, reason: Reason) {
    let Some(word) = look(fd) else { return };
    if !matches!(word.state(), State::Unknown | State::Kernel | State::Other) {
        detach_now(fd, reason);
    }
}

#[cold]
fn detach_now(fd: i32, reason: Reason) {
    if let Some(_inside) = process::enter() {
        detach_inside(fd, reason);
    }
}

fn detach_inside(fd: i32, reason: Reason) {
    if let Some(handle) = at(fd).and_then(|at| at.detach()) {
        give_back_any(handle);
        count(reason);
    }
}

/// Leaves all descriptors to the kernel.
pub fn detach_all(reason: Reason) {
    // SeqCst, partner: the `fetch_max` in `see`.
    for fd in 0..END.load(Ordering::SeqCst) {
        detach(fd as i32, reason);
    }
}

/// Leaves all offsets to the kernel.
pub fn share_all(reason: Reason) {
    // SeqCst, partner: the `fetch_max` in `see`.
    for fd in 0..END.load(Ordering::SeqCst) {
        share(fd as i32, reason);
    }
}

/// In a forked child, by its only thread that looks: all it inherited is its parent's too. What other threads of
/// the parent were in the middle of they finish there, and the offset is the kernel's by then.
pub fn settle_child() {
    deferred_detach::forget();
    let end = END.load(Ordering::Relaxed) as usize;
    WORDS.iter().take(end).for_each(FdCell::inherit);
}

/// Forgets descriptors `first` to `last`.
pub fn forget_range(first: u32, last: u32) {
    // SeqCst, partner: the `fetch_max` in `see`.
    let end = END.load(Ordering::SeqCst);
    for fd in first..end.min(last.saturating_add(1)) {
        forget(fd as i32);
    }
}

/// Leaves all descriptors of a file that are attached to the kernel.
pub fn leave_file(device: u64, inode: u64) {
    // SeqCst, partner: the `fetch_max` in `see`.
    for fd in 0..END.load(Ordering::SeqCst) {
        let attached = look_settled(fd as i32).is_some_and(|word| word.state().is_attached());
        if attached && identity(fd as i32) == (device, inode) {
            detach(fd as i32, Reason::Unguaranteed);
        }
    }
}

/// Device and inode of the file that a descriptor is attached to.
pub fn identity(fd: i32) -> (u64, u64) {
    let file = &FILES[fd as usize];
    (file.device.load(Ordering::Relaxed), file.inode.load(Ordering::Relaxed)) // ordered by `look`
}

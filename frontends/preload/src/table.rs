//! Table: what the library knows of each descriptor.
//!
//! ```text
//!   number --> word    its state and the private offset         `quinion_view::fdstate` has the states and their rules
//!         '--> file    what a served descriptor is attached to: the owner's handle, its identity, what was seen of it
//! ```
//!
//! Plain memory: nothing here makes a system call, asks whether this process is served or tells anything.
//! `descriptors.rs` has the steps that change more than one word, or the kernel's offset.
//!
//! Invariant: what `FILES` holds for a number changes only while its word says MOVING ([`attach`]); but for what only
//! makes a read slower if it is wrong: advice, refusals, and what was seen.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use quinion_view::arena::CellNumber;
use quinion_view::arena::control::Advice;
use quinion_view::fdstate::FdCell;
pub use quinion_view::fdstate::{CreditGiver, FdState, FdWord, OFFSETS_MAX};
use quinion_view::units::{FileId, MappingId};
use quinion_view::viewer::ViewedFile;

use crate::kernel;
use crate::read_request::ServeMode;

pub const DESCRIPTORS: usize = 1 << 16;

/// The first descriptor that may be SERVED: the C library's streams read 0 to 2 unseen, at the offset.
pub const FIRST: i32 = 3;

/// In place of a time: the file was attached when no look was needed. 0, so that `FILES` takes no room in the object
/// and no memory before it is used.
const NEVER: u64 = 0;

struct File {
    handle: AtomicU64,
    /// The cell of the file's record (low half) and the number of its mapping (high half).
    place: AtomicU64,
    marker_reported: AtomicU64,
    touched: AtomicU64,
    /// The page, plus one, of the last read refused for want of it, of which the owner was told.
    refused: AtomicU64,
    /// The program's advice on how it will read, plus one, for when it is attached. It alone changes in any state; a
    /// race costs speed.
    advice: AtomicU64,
    device: AtomicU64,
    inode: AtomicU64,
    /// When the file had changed last as it was attached, plus one, or [`NEVER`].
    changed_at: AtomicU64,
    /// The file's digest as of which what is cached is known to be right; 0 for none.
    seen: AtomicU64,
}

#[derive(Clone, Copy)]
pub struct Attachment {
    pub handle: u64,
    pub place: u64,
    pub id: FileId,
    /// When it had changed last, if each read is to look whether it did; see `audit.rs`.
    pub changed_at: Option<i64>,
    /// Whether it can write: then only positional reads are served.
    pub can_write: bool,
}

/// All zeros at first, so that the object has no bytes of them; [`attach`] writes the rest.
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

/// The kernel's known answers to reads with flags: two bits a mode, whether it is known and what; above, the
/// low bits of the handle of which that is so.
static ACCEPTS: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];

static END: AtomicU32 = AtomicU32::new(0);

/// Includes a descriptor in what a thread that looks at all looks at.
pub fn see(fd: i32) {
    if (fd as usize) < DESCRIPTORS {
        END.fetch_max(fd as u32 + 1, Ordering::SeqCst); // before the word; partner: `end`
    }
}

/// One more than the highest descriptor that ever was a candidate.
pub fn end() -> u32 {
    END.load(Ordering::SeqCst) // partner: the `fetch_max` in `see`
}

#[inline]
pub fn cell(fd: i32) -> Option<&'static FdCell> {
    WORDS.get(usize::try_from(fd).ok()?)
}

#[inline]
pub fn peek(fd: i32) -> Option<FdWord> {
    cell(fd).map(FdCell::load)
}

#[inline]
pub fn advance(fd: i32, from: FdWord, offset: u64) -> bool {
    cell(fd).is_some_and(|cell| cell.advance(from, offset))
}

/// After a copy, whether `fd` still is what it was when `word` was looked at.
#[inline]
pub fn is_still_attached(fd: i32, word: FdWord) -> bool {
    cell(fd).is_some_and(|cell| cell.is_still(word))
}

#[inline]
pub fn file(fd: i32) -> ViewedFile<'static> {
    let file = &FILES[fd as usize];
    let place = file.place.load(Ordering::Relaxed); // ordered by `peek`
    ViewedFile {
        handle: file.handle.load(Ordering::Relaxed),
        cell: CellNumber(place as u32),
        id: MappingId((place >> 32) as u32),
        marker_reported: &file.marker_reported,
        touched: &file.touched,
    }
}

pub fn handle(fd: i32) -> u64 {
    FILES[fd as usize].handle.load(Ordering::Relaxed) // ordered by the word's `load`
}

/// Only by the thread that is moving the descriptor's word.
pub fn attach(fd: i32, to: &Attachment) {
    let file = &FILES[fd as usize];
    file.handle.store(to.handle, Ordering::Relaxed);
    file.place.store(to.place, Ordering::Relaxed);
    file.marker_reported.store(0, Ordering::Relaxed);
    file.touched.store(0, Ordering::Relaxed);
    file.refused.store(0, Ordering::Relaxed);
    file.device.store(to.id.device, Ordering::Relaxed);
    file.inode.store(to.id.inode, Ordering::Relaxed);
    file.changed_at.store(to.changed_at.map_or(NEVER, |at| (at as u64).wrapping_add(1)), Ordering::Relaxed);
    file.seen.store(0, Ordering::Relaxed);
}

pub fn identity(fd: i32) -> FileId {
    let file = &FILES[fd as usize];
    let [device, inode] = [&file.device, &file.inode].map(|place| place.load(Ordering::Relaxed));
    FileId { device, inode }
}

/// The file, and when the file had changed last as it was attached; `None` if no look was needed then.
#[inline]
pub fn identity_as_of(fd: i32) -> Option<(FileId, i64)> {
    let of = &FILES[fd as usize];
    let [device, inode, changed_at] =
        [&of.device, &of.inode, &of.changed_at].map(|place| place.load(Ordering::Relaxed)); // ordered by `peek`
    (changed_at != NEVER).then_some((FileId { device, inode }, changed_at.wrapping_sub(1) as i64))
}

pub fn was_seen(fd: i32, stat: &kernel::Stat) -> bool {
    FILES[fd as usize].seen.load(Ordering::Relaxed) == stat.digest()
}

pub fn note_seen(fd: i32, stat: &kernel::Stat) {
    FILES[fd as usize].seen.store(stat.digest(), Ordering::Relaxed); // one word: two that note at once do not mix
}

/// Keeps what the program said, of a descriptor that is not attached yet.
pub fn keep_advice(fd: i32, advice: Advice) {
    if let Some(file) = usize::try_from(fd).ok().and_then(|fd| FILES.get(fd)) {
        file.advice.store(advice as u64 + 1, Ordering::Relaxed);
    }
}

pub fn advice(fd: i32) -> Option<Advice> {
    Advice::of(FILES[fd as usize].advice.load(Ordering::Relaxed).checked_sub(1)?)
}

pub fn forget_advice(fd: i32) {
    FILES[fd as usize].advice.store(0, Ordering::Relaxed);
}

/// Whether a read that was refused at this page is the first of such in a row.
pub fn is_first_refusal(fd: i32, page: u64) -> bool {
    FILES[fd as usize].refused.swap(page + 1, Ordering::Relaxed) != page + 1
}

/// Whether the kernel takes reads with flags of this descriptor. Calls `ask` once while the descriptor is attached.
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

/// Notes what a look has shown, if no other thread, which knew better, was faster.
pub fn settle(fd: i32, from: FdWord, state: FdState) {
    if let Some(cell) = cell(fd) {
        cell.settle(from, from.settled_as(state));
    }
}

/// Whether the reason for this descriptor's reads by the kernel is still to be counted; marks it counted.
pub fn mark_reported(fd: i32, word: FdWord) -> bool {
    cell(fd).is_some_and(|cell| cell.mark_reported(word))
}

pub fn give_credit(fd: i32, from: FdWord, bytes: u64, giver: CreditGiver) -> bool {
    cell(fd).is_some_and(|cell| cell.give_credit(from, bytes, giver))
}

pub fn charge(fd: i32, from: FdWord, bytes: u64) -> bool {
    cell(fd).is_some_and(|cell| cell.charge(from, bytes))
}

/// In a forked child, by its only thread that looks: its parent has all it inherited, too. Operations that other
/// threads of the parent had begun finish there, and the offset is the kernel's by then.
pub fn settle_child() {
    let end = END.load(Ordering::Relaxed) as usize;
    WORDS.iter().take(end).for_each(FdCell::inherit);
}

//! Table: what we know of each descriptor.
//!
//! ```text
//!   word    63    61 60          48 47                        0
//!          [ state  | generation   | private offset in bytes   ]
//!
//!             open                first read                    close
//!   UNKNOWN --------> CANDIDATE -----------> SERVED -------------------> UNKNOWN
//!      |                  | dup, fork,         |  ^ reads and seeks: offset only
//!      | inherited,       v sendfile ..        v
//!      `----------->   SHARED ----------> POSITIONED     reads say where; the offset is the kernel's
//!        received,        |  first pread       |
//!        a duplicate      v                    v
//!                       KERNEL <--------- (from MOVING)   for good, until the number is opened anew
//! ```
//!
//! | state | meaning | whose offset counts |
//! |---|---|---|
//! | UNKNOWN | not opened by a call we saw, or closed | the kernel's |
//! | CANDIDATE | opened for reading only, here; nobody else can have it | the kernel's |
//! | SERVED | attached; `FILES` says to what | the private one |
//! | SHARED | somebody else may have it, or its offset is used past us; not attached | the kernel's |
//! | POSITIONED | as SHARED, and attached: only reads that say where are served | the kernel's |
//! | MOVING | one thread, its signals held back, carries the offset over | wait |
//! | KERNEL | a regular file that is left to the kernel | the kernel's |
//! | OTHER | looked at once: no regular file | the kernel's |
//!
//! A candidate has no private offset, nor has a shared one. Where others have it stands how much more of it the kernel
//! is to read before the owner is asked, its **credit**: a file that is read but once, in a few calls, is not worth a
//! question.
//!
//! ```text
//!   candidate  47     46      45            40 39   38                  0
//!             [looked|owner's| kernel's reads  |told| credit in bytes    ]
//! ```
//!
//! A read that the kernel makes at its offset stands in the word while it is under way, as does a seek, and nobody
//! attaches meanwhile: whoever did would take an offset that is about to move.
//!
//! State and offset are one word, so a read that was served while the
//! descriptor went back to the kernel fails its compare-exchange and starts
//! over there. The generation tells one opening of a number from the next.
//!
//! SHARED is a permission to look, no knowledge: whoever attaches looks at the
//! descriptor that there is then. So it may be said of a number too often, and
//! a forked child says it of all it inherited.
//!
//! Invariants:
//!  1. The kernel's offset is right before any call that uses it runs: who wants one shares or detaches first.
//!  2. A descriptor is SERVED only while its description is this process's alone.
//!  3. What `FILES` holds for a number changes only while its state is MOVING.
//!  4. A candidate with kernel's reads under way stays one, or is shared or left to the kernel, or is closed.
//!  5. Whoever is MOVING has its signals held back and takes three system calls at most, so waiting for it ends.
//!  6. A number is attached (SERVED, POSITIONED) only while the file behind it cannot become another unseen, or each
//!     read looks whether it did (`careful.rs`).
//!
//!  7. A description that can write is never a candidate, and never SERVED: its offset is the kernel's, which moves it
//!     by writes past us.
//!
//! Two threads that each publish something and then look for the other's do so in SeqCst steps: opening
//! against forking, attaching against stopping. In their one order the second sees the first.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use quinion::arena::CellNumber;
use quinion::arena::control::{Advice, Operation, Reason};
use quinion::units::MappingId;
use quinion::viewer::ViewedFile;

use crate::kernel::{self, SignalsHeld};
use crate::{careful, process};

/// Descriptors from this one on are left to the kernel.
pub const DESCRIPTORS: usize = 1 << 16;
/// The first descriptor that may be SERVED: streams of the C library read 0 to 2 past us, at the offset.
pub const FIRST: i32 = 3;
/// The first offset that does not fit.
pub const OFFSETS_MAX: u64 = 1 << 48;

/// In place of a time: the file was attached when no look was needed. All of `FILES` begins as zeros, so it takes no
/// room in the object and no memory before it is used.
const NEVER: u64 = 0;

/// What a descriptor is; see the head of this file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// Not opened by a call we saw, or closed.
    Unknown = 0,
    /// Opened for reading, not attached yet.
    Candidate = 1,
    /// Attached.
    Served = 2,
    /// Its offset is being carried over.
    Moving = 3,
    /// A regular file left to the kernel.
    Kernel = 4,
    /// No regular file.
    Other = 5,
    /// Attached, for reads that say where.
    Positioned = 6,
    /// Not attached, and only reads that say where may be served.
    Shared = 7,
}

impl State {
    /// Whether there is a file of the owner's behind it.
    #[inline]
    pub fn is_attached(self) -> bool {
        matches!(self, State::Served | State::Positioned)
    }
}

/// A descriptor's word, as read at one moment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl Word {
    const GENERATION: u64 = 1 << 48;

    /// The state.
    #[inline]
    pub fn state(self) -> State {
        match self.0 >> 61 {
            1 => State::Candidate,
            2 => State::Served,
            3 => State::Moving,
            4 => State::Kernel,
            5 => State::Other,
            6 => State::Positioned,
            7 => State::Shared,
            _ => State::Unknown,
        }
    }
    /// The private offset, in bytes.
    #[inline]
    pub fn offset(self) -> u64 {
        self.0 & (OFFSETS_MAX - 1)
    }
    /// The same word with another offset.
    #[inline]
    #[must_use]
    pub fn with_offset(self, offset: u64) -> Self {
        debug_assert!(offset < OFFSETS_MAX);
        Self(self.0 & !(OFFSETS_MAX - 1) | offset)
    }
    /// The same word with another state.
    #[must_use]
    pub fn with_state(self, state: State) -> Self {
        Self(self.0 & (u64::MAX >> 3) | (state as u64) << 61)
    }
    /// Of a shared or positioned one: it has been counted why it is.
    const TOLD: u64 = 1 << 39;
    const LOOKED: u64 = 1 << 47;
    const OWNERS: u64 = 1 << 46;
    const KERNELS_READ: u64 = 1 << 40;
    const KERNELS_READS: u64 = 0x3f << 40;
    const CREDIT_MAX: u64 = Self::TOLD - 1;

    /// Of a candidate or a shared one: the bytes that the kernel is still to read; `None` if nobody has looked at the
    /// file yet.
    pub fn credit(self) -> Option<u64> {
        (self.0 & Self::LOOKED != 0).then_some(self.0 & Self::CREDIT_MAX)
    }
    /// Of these: whether the credit is the owner's answer.
    pub fn is_owners_credit(self) -> bool {
        self.0 & Self::OWNERS != 0
    }
    /// Of a candidate: whether the kernel reads at its offset.
    pub fn has_kernels_reads(self) -> bool {
        self.0 & Self::KERNELS_READS != 0
    }
    fn with_credit(self, bytes: u64) -> Self {
        Self(self.0 & !Self::CREDIT_MAX | Self::LOOKED | bytes.min(Self::CREDIT_MAX))
    }
    fn charged(self, bytes: u64) -> Self {
        self.with_credit((self.0 & Self::CREDIT_MAX).saturating_sub(bytes))
    }
    /// Of a candidate: the same opening, whose offset is the kernel's from now on.
    fn shared(self) -> Self {
        Self(self.with_state(State::Shared).0 & !Self::KERNELS_READS).told()
    }
    /// Of a shared one: the same opening, attached.
    fn positioned(self) -> Self {
        self.with_state(State::Positioned).with_offset(self.0 & Self::TOLD)
    }
    fn told(self) -> Self {
        Self(self.0 | Self::TOLD)
    }
    /// The word of the next opening of this number.
    fn opened(self, state: State) -> Self {
        Self(self.0.wrapping_add(Self::GENERATION)).with_state(state).with_offset(0)
    }
    /// Whether both are of the same opening.
    pub fn is_same_opening(self, other: Word) -> bool {
        (self.0 ^ other.0) << 3 >> 51 == 0
    }
}

/// What a served descriptor is attached to.
struct File {
    handle: AtomicU64,
    /// The record's cell (low half) and the mapping's number (high half).
    place: AtomicU64,
    marker_told: AtomicU64,
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
    /// When it had changed last, if each read is to look whether it did; see `careful.rs`.
    pub changed_at: Option<i64>,
}

/// All zeros at first, so that the object has no bytes of them: what else there is to say, [`publish`] says.
static WORDS: [AtomicU64; DESCRIPTORS] = [const { AtomicU64::new(0) }; DESCRIPTORS];
static FILES: [File; DESCRIPTORS] = [const {
    File {
        handle: AtomicU64::new(0),
        place: AtomicU64::new(0),
        marker_told: AtomicU64::new(0),
        touched: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        advice: AtomicU64::new(0),
        device: AtomicU64::new(0),
        inode: AtomicU64::new(0),
        changed_at: AtomicU64::new(0),
        seen: AtomicU64::new(0),
    }
}; DESCRIPTORS];
/// One more than the highest descriptor that ever was a candidate.
static END: AtomicU32 = AtomicU32::new(0);

#[inline]
fn place(fd: i32) -> Option<&'static AtomicU64> {
    WORDS.get(usize::try_from(fd).ok()?)
}

/// The word of `fd`; `None` if the number is beyond the table.
#[inline]
pub fn look(fd: i32) -> Option<Word> {
    // SeqCst for the pairs in the head of this file; it also is the Acquire whose partner is `publish`'s
    // last store: who sees SERVED sees the file.
    place(fd).map(|word| Word(word.load(Ordering::SeqCst)))
}

/// Replaces `from` by `to`; the word as it is now if it is not `from`.
#[inline]
fn exchange(fd: i32, from: Word, to: Word) -> Result<(), Word> {
    let word = place(fd).expect("a descriptor that was looked at");
    // SeqCst: see the head of this file.
    match word.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(_) => Ok(()),
        Err(now) => Err(Word(now)),
    }
}

/// Moves the private offset; whether nobody was faster.
#[inline]
pub fn advance(fd: i32, from: Word, offset: u64) -> bool {
    exchange(fd, from, from.with_offset(offset)).is_ok()
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
        marker_told: &file.marker_told,
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

/// The word of `fd` once nobody is moving it.
fn look_settled(fd: i32) -> Option<Word> {
    loop {
        let word = look(fd)?;
        if word.state() != State::Moving {
            return Some(word);
        }
        kernel::yield_now();
    }
}

/// Takes `from` to MOVING with signals held back, does `work`, and goes on to the word it answers.
fn moving(fd: i32, from: Word, work: impl FnOnce() -> Word) -> Result<(), Word> {
    let _held = SignalsHeld::new();
    exchange(fd, from, from.with_state(State::Moving))?;
    let to = work();
    // SeqCst: see the head of this file; also the Release for what `work` stored.
    place(fd).expect("as above").store(to.0, Ordering::SeqCst);
    Ok(())
}

// ---- opening and closing ---------------------------------------------------------------------------

/// A descriptor was opened for reading by a call we saw. `forks` is what [`process::forks`] said before the
/// call.
pub fn opened(fd: i32, forks: u64) {
    see(fd);
    set_opened(fd, State::Candidate);
    if process::forked_since(forks) {
        share(fd, Reason::Forked);
    } else if !process::may_serve_more() {
        detach(fd, Reason::Passed);
    }
}

/// A descriptor was opened in a way that is not served.
pub fn opened_for_kernel(fd: i32, state: State) {
    set_opened(fd, state);
}

/// A descriptor has appeared whose description somebody else may have: reads that say where may be served.
/// `told` is whether it has been counted why no others are.
pub fn adopt(fd: i32, told: bool) {
    see(fd);
    set_opened(fd, State::Shared);
    if told && let Some(word) = look(fd) {
        settle(fd, word, word.told());
    }
}

/// Whoever looks at all descriptors looks at this one too from now on.
fn see(fd: i32) {
    if (fd as usize) < DESCRIPTORS {
        END.fetch_max(fd as u32 + 1, Ordering::SeqCst); // before the word; partners: the loads of END below
    }
}

fn set_opened(fd: i32, state: State) {
    while let Some(word) = look_settled(fd) {
        let handle = file(fd).handle;
        if exchange(fd, word, word.opened(state)).is_ok() {
            FILES[fd as usize].advice.store(0, Ordering::Relaxed);
            if word.state().is_attached() {
                give_back(handle);
                // It was closed by means we do not see, so no number is safe any more, unless each is looked at.
                if !careful::is_careful() {
                    process::stop(Reason::Passed);
                }
            }
            return;
        }
    }
}

/// A descriptor was looked at once: what is known of it now, if nobody was faster, who knew better.
pub fn settle(fd: i32, from: Word, to: Word) {
    let _ = exchange(fd, from, to);
}

/// Whether why this descriptor's reads are left to the kernel has not been told yet; it has from now on.
pub fn tell(fd: i32, word: Word) -> bool {
    matches!(word.state(), State::Shared | State::Positioned)
        && word.0 & Word::TOLD == 0
        && exchange(fd, word, word.told()).is_ok()
}

/// The descriptor is about to be closed.
#[inline]
pub fn forget(fd: i32) {
    while let Some(word) = look_settled(fd) {
        if word.state() == State::Unknown {
            return;
        }
        let handle = file(fd).handle;
        if exchange(fd, word, word.with_state(State::Unknown)).is_ok() {
            if word.state().is_attached() {
                give_back(handle);
            }
            return;
        }
    }
}

/// Tells the owner that a handle is not used any more.
fn give_back(handle: u64) {
    if let Some(viewer) = process::viewer() {
        let _ = viewer.tell(Operation::Detach, [handle, 0, 0]); // the owner sees to it when we end
    }
}

// ---- candidates that the kernel serves for a while ------------------------------------------------------

/// Gives a candidate a credit; `is_owners` if the owner did. `false`: somebody was faster, and knew better.
pub fn give_credit(fd: i32, from: Word, bytes: u64, is_owners: bool) -> bool {
    let owners = if is_owners { Word::OWNERS } else { 0 };
    exchange(fd, from, Word(from.with_credit(bytes).0 | owners)).is_ok()
}

/// Takes `bytes` off a candidate's credit; whether nobody was faster.
pub fn charge(fd: i32, from: Word, bytes: u64) -> bool {
    exchange(fd, from, from.charged(bytes)).is_ok()
}

/// The kernel is about to read a candidate at its offset, or to move that. `None` if it is no candidate with a credit;
/// else what [`end_kernels_read`] is to be told.
pub fn begin_kernels_read(fd: i32, bytes: u64) -> Option<Word> {
    loop {
        let word = look_settled(fd)?;
        let is_full = word.0 & Word::KERNELS_READS == Word::KERNELS_READS;
        if word.state() != State::Candidate || word.credit().is_none() || is_full {
            return None;
        }
        if exchange(fd, word, Word(word.charged(bytes).0 + Word::KERNELS_READ)).is_ok() {
            return Some(word);
        }
    }
}

/// It is over. One that never is, because its thread was cancelled, keeps the candidate with the kernel.
pub fn end_kernels_read(fd: i32, begun: Word) {
    while let Some(word) = look_settled(fd) {
        if word.state() != State::Candidate || !word.is_same_opening(begun) || !word.has_kernels_reads() {
            return; // it is the kernel's by now, or another file
        }
        if exchange(fd, word, Word(word.0 - Word::KERNELS_READ)).is_ok() {
            return;
        }
    }
}

// ---- serving ------------------------------------------------------------------------------------------

/// Makes a candidate, at whose offset the kernel does not read, served from that offset on, and a shared one
/// positioned. `false` if it is neither any more.
pub fn publish(fd: i32, from: Word, to: Attachment) -> bool {
    let published = moving(fd, from, || {
        let word = if from.state() == State::Shared {
            from.positioned()
        } else {
            let Some(offset) = kernel_offset(fd) else { return from.with_state(State::Kernel) };
            from.with_state(State::Served).with_offset(offset)
        };
        let file = &FILES[fd as usize];
        file.handle.store(to.handle, Ordering::Relaxed);
        file.place.store(to.place, Ordering::Relaxed);
        file.marker_told.store(0, Ordering::Relaxed);
        file.touched.store(0, Ordering::Relaxed);
        file.refused.store(0, Ordering::Relaxed);
        file.device.store(to.device, Ordering::Relaxed);
        file.inode.store(to.inode, Ordering::Relaxed);
        file.changed_at
            .store(to.changed_at.map_or(NEVER, |at| (at as u64).wrapping_add(1)), Ordering::Relaxed);
        file.seen.store(0, Ordering::Relaxed);
        word
    })
    .is_ok();
    if published && !process::may_serve_more() {
        detach(fd, Reason::Passed);
    } else if published && !careful::is_free() {
        pause(fd);
    }
    published
}

/// Whether a descriptor that was found attached still is what was attached. If not, it is to be looked at anew.
pub fn is_still(fd: i32, word: Word) -> bool {
    let of = &FILES[fd as usize];
    let [device, inode, changed_at] =
        [&of.device, &of.inode, &of.changed_at].map(|place| place.load(Ordering::Relaxed));
    if changed_at != NEVER && careful::is_still(fd, device, inode, changed_at.wrapping_sub(1) as i64) {
        return true;
    }
    let handle = file(fd).handle;
    if exchange(fd, word, word.opened(State::Shared)).is_ok() && word.state().is_attached() {
        give_back(handle);
    }
    false
}

/// Gives the kernel its offset of a descriptor that is served; it may be served again when that is right again.
fn pause(fd: i32) {
    while let Some(word) = look_settled(fd) {
        if word.state() != State::Served {
            return;
        }
        let handle = file(fd).handle;
        let paused = moving(fd, word, || {
            carry_over(fd, word);
            word.with_state(State::Candidate).with_offset(0)
        });
        if paused.is_ok() {
            return give_back(handle);
        }
    }
}

/// The same of all descriptors, because code that nobody has looked at is about to run.
pub fn pause_all() {
    // SeqCst, partner: the `fetch_max` in `see`.
    for fd in 0..END.load(Ordering::SeqCst) {
        pause(fd as i32);
    }
}

fn kernel_offset(fd: i32) -> Option<u64> {
    kernel::lseek(fd, 0, kernel::SEEK_CUR).ok().map(|offset| offset as u64).filter(|&o| o < OFFSETS_MAX)
}

/// Seeks in a candidate, while no other thread can begin to serve it. `None`: it is no candidate any more.
pub fn seek_candidate(fd: i32, from: Word, offset: i64, whence: i32) -> Option<isize> {
    let seek = || match kernel::lseek(fd, offset, whence) {
        Ok(now) => now as isize,
        Err(error) => -error.0 as isize,
    };
    // Programs that seek before each read do so without the two calls that hold back signals.
    if let Some(begun) = begin_kernels_read(fd, 0) {
        let answer = seek();
        end_kernels_read(fd, begun);
        return Some(answer);
    }
    let mut answer = 0;
    moving(fd, from, || {
        answer = seek();
        from
    })
    .ok()
    .map(|()| answer)
}

/// Puts the kernel's offset of a served descriptor right for a call that looks at it; it stays served.
pub fn show_offset(fd: i32) {
    while let Some(word) = look_settled(fd).filter(|word| word.state() == State::Served) {
        let carry = || {
            carry_over(fd, word);
            word
        };
        if moving(fd, word, carry).is_ok() {
            return;
        }
    }
}

// ---- going back to the kernel ---------------------------------------------------------------------------

/// Leaves the offset of `fd` to the kernel for good; it is right afterwards. Reads that say where are served
/// still.
#[inline]
pub fn share(fd: i32, reason: Reason) {
    let Some(word) = look(fd) else { return };
    if matches!(word.state(), State::Candidate | State::Served | State::Moving) {
        share_now(fd, reason);
    }
}

#[cold]
fn share_now(fd: i32, reason: Reason) {
    while let Some(word) = look_settled(fd) {
        let done = match word.state() {
            State::Candidate => exchange(fd, word, word.shared()),
            State::Served => moving(fd, word, || {
                carry_over(fd, word);
                word.with_state(State::Positioned).with_offset(0).told()
            }),
            _ => return,
        };
        if done.is_ok() {
            return count(reason);
        }
    }
}

/// The kernel's offset becomes what the private one was.
fn carry_over(fd: i32, word: Word) {
    let _ = kernel::lseek(fd, word.offset() as i64, kernel::SEEK_SET);
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
    while let Some(word) = look_settled(fd) {
        let left = word.with_state(State::Kernel);
        let handle = file(fd).handle;
        let done = match word.state() {
            State::Candidate | State::Shared | State::Positioned => exchange(fd, word, left),
            State::Served => moving(fd, word, || {
                carry_over(fd, word);
                left
            }),
            _ => return,
        };
        if done.is_ok() {
            if word.state().is_attached() {
                give_back(handle);
            }
            return count(reason);
        }
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
    for fd in 0..END.load(Ordering::Relaxed) {
        let Some(word) = look(fd as i32) else { return };
        if !matches!(word.state(), State::Unknown | State::Kernel | State::Other) {
            settle(fd as i32, word, word.opened(State::Shared).told());
        }
    }
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

//! Fdstate, file descriptor state: whether the kernel or this process keeps a descriptor's offset.
//!
//! A process that reads through a viewer may keep a descriptor's offset itself, the **private offset**, so that `read`
//! and `lseek` need no system call. This module is the protocol by which the offset passes between kernel and process.
//! By the trait [`Process`] it makes the few system calls that go with changes of a descriptor's word;
//! `frontends/preload/src/table.rs` keeps the words, `descriptors.rs` makes the calls.
//!
//! ```text
//!   word    63    61 60          48 47                        0
//!          [ state  | generation   | private offset in bytes   ]   Served
//!          [ state  | generation   | see below                 ]   all other states
//!
//!             open              publish                     close
//!   Unknown --------> Candidate --------> Served ----------------------> Unknown
//!      |                  | share, publish  |  ^ read, lseek: the private offset only
//!      | inherited,       v of a writer     v share
//!      `----------->   Shared ---------> Positioned      only positional reads are served; the offset is the kernel's
//!        received,        |   publish       |
//!        a duplicate      v                 v
//!                       Kernel <------- (from Served too: detach)   for good, until the number is opened anew
//! ```
//!
//! | state | meaning | whose offset counts |
//! |---|---|---|
//! | Unknown | not opened by a call that the library saw, or closed | the kernel's |
//! | Candidate | opened for reading only; no other process can have its description | the kernel's |
//! | Served | attached | the private one |
//! | Shared | another process may have the description, or it can write, or its offset is used unseen | the kernel's |
//! | Positioned | as Shared, and attached: only positional reads are served | the kernel's |
//! | Moving | one thread, its signals held back, hands the offset over | wait |
//! | Kernel | a regular file that is left to the kernel | the kernel's |
//! | Other | not a regular file | the kernel's |
//!
//! In all states but Served and Moving the lower bits are:
//!
//! ```text
//!   47     46             45          40 39      38                37            0
//!  [looked|owner's credit|kernel's calls|counted|being opened     |credit in bytes ]
//! ```
//!
//! The **credit** of a candidate or a shared descriptor is how many more bytes the kernel is to read of it before the
//! owner is asked for the file.
//!
//! **The kernel's calls** counts reads and seeks at the kernel's offset under way on a candidate. The count belongs to
//! the number, not to one opening, and stays until they end: a call that began before the number was closed and opened
//! anew may be executed on the new description.
//!
//! The **generation** tells one opening of a number, and one attachment of an opening, from the next. The attachment
//! of a descriptor changes only while the state is Moving and the generation is a new one; so a compare-exchange that
//! succeeds, or [`FdCell::is_still`], proves that it did not change.
//!
//! # Rules
//!
//!  1. Only a candidate becomes Served, and only if no kernel's call on the number is under way. A descriptor that can
//!     write is not served, and one that was opened while a fork was under way, or an exec, is never a candidate.
//!  2. The process reads and sets the kernel's offset only while the state is Moving. Before that the private offset is
//!     not in force or is held still; after it every caller finds the kernel's offset right.
//!  3. In Served the private offset moves by compare-exchange of the whole word. So a read that was served while
//!     another thread read, seeked, closed or left the descriptor to the kernel starts over.
//!  4. A thread that is about to use the kernel's offset either counts as a kernel's call (candidate) or has left the
//!     offset to the kernel for good ([`Fd::share`]) and waited for Moving to end.
//!  5. A thread that is Moving has its signals held back and makes four system calls at most, so waiting for it ends,
//!     provided that the waiters let it run: [`Process::wait`] must sleep after some turns, for a waiter of a real-time
//!     class that only yields never lets a holder of a lower class run.
//!
//! Opening against forking (or exec, which inherits alike): the opener publishes a shared word marked "being opened",
//! then looks whether a fork began, and only then makes it a candidate, by compare-exchange. The forker counts itself
//! and then clears the mark. In the one order of these SeqCst steps one of the two sees the other: no child ever has a
//! candidate.
//!
//! # What is shown, and how
//!
//! `tests/model_descriptor.rs` runs these functions under a model checker against a kernel with an offset for each
//! description: each history is one that the kernel alone could have given. Without any step marked by [`mutant`] it
//! must find a history that is not. `tests/descriptor_twin.rs` compares random sequences of calls with a kernel alone.
//!
//! # Not promised
//!
//! A program that closes a number which another of its threads is about to read, and opens it anew, has a race of its
//! own: the read may reach either file. Two things are worse here than in the kernel. A read left to the kernel in a
//! state other than Candidate is not counted; on the new description, it and the new reader may both get the first
//! bytes. And 8,192 openings and attachments of the number during one copy bring its word back.

use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::{Mutant, mutant, ordering};

/// The first offset that does not fit into a word.
pub const OFFSETS_MAX: u64 = 1 << 48;

/// The process that decided to leave bytes of a file to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CreditGiver {
    /// The viewer, before it asks the owner.
    Viewer,
    /// The owner, by its answer.
    Owner,
}

/// The state of a descriptor; the head of this file has the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FdState {
    /// Not opened by a call that the library saw, or closed.
    Unknown = 0,
    /// Opened for reading, not attached yet.
    Candidate = 1,
    /// Attached; the private offset counts.
    Served = 2,
    /// The descriptor's offset is being handed over.
    Moving = 3,
    /// A regular file left to the kernel.
    Kernel = 4,
    /// Not a regular file.
    Other = 5,
    /// Attached, for positional reads.
    Positioned = 6,
    /// Not attached, and only positional reads may be served.
    Shared = 7,
}

impl FdState {
    /// Whether there is a file of the owner's behind it.
    #[inline]
    pub fn is_attached(self) -> bool {
        matches!(self, FdState::Served | FdState::Positioned)
    }
}

/// A descriptor's word, as read at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FdWord(u64);

impl FdWord {
    const GENERATION: u64 = 1 << 48;
    const INSPECTED: u64 = 1 << 47;
    const OWNERS: u64 = 1 << 46;
    const CALL: u64 = 1 << 40;
    const CALLS: u64 = 0x3f << 40;
    /// The reason why a descriptor is shared or positioned has been counted.
    const REPORTED: u64 = 1 << 39;
    const OPENING: u64 = 1 << 38;
    const CREDIT_MAX: u64 = Self::OPENING - 1;

    /// The state.
    #[inline]
    pub fn state(self) -> FdState {
        match self.0 >> 61 {
            1 => FdState::Candidate,
            2 => FdState::Served,
            3 => FdState::Moving,
            4 => FdState::Kernel,
            5 => FdState::Other,
            6 => FdState::Positioned,
            7 => FdState::Shared,
            _ => FdState::Unknown,
        }
    }
    /// The private offset, in bytes.
    #[inline]
    pub fn offset(self) -> u64 {
        self.0 & (OFFSETS_MAX - 1)
    }
    #[inline]
    fn with_low(self, low: u64) -> Self {
        debug_assert!(low < OFFSETS_MAX);
        Self(self.0 & !(OFFSETS_MAX - 1) | low)
    }
    fn with_state(self, state: FdState) -> Self {
        Self(self.0 & (u64::MAX >> 3) | (state as u64) << 61)
    }
    /// An unsettled word, settled as an inspection has shown.
    #[must_use]
    pub fn settled_as(self, state: FdState) -> Self {
        debug_assert!(matches!(state, FdState::Kernel | FdState::Other));
        self.left(state)
    }
    /// The bytes that a candidate or a shared one leaves to the kernel; `None` if the file was not inspected yet.
    pub fn credit(self) -> Option<u64> {
        (self.0 & Self::INSPECTED != 0).then_some(self.0 & Self::CREDIT_MAX)
    }
    /// The giver of this credit.
    pub fn credit_giver(self) -> CreditGiver {
        if self.0 & Self::OWNERS == 0 { CreditGiver::Viewer } else { CreditGiver::Owner }
    }
    /// Whether calls at the kernel's offset are under way. They are not counted while a descriptor is served.
    pub fn has_kernels_calls(self) -> bool {
        self.kernels_calls() != 0
    }
    fn kernels_calls(self) -> u64 {
        if matches!(self.state(), FdState::Served | FdState::Moving) { 0 } else { self.0 & Self::CALLS }
    }
    fn with_credit(self, bytes: u64) -> Self {
        Self(self.0 & !Self::CREDIT_MAX | Self::INSPECTED | bytes.min(Self::CREDIT_MAX))
    }
    fn charged(self, bytes: u64) -> Self {
        self.with_credit((self.0 & Self::CREDIT_MAX).saturating_sub(bytes))
    }
    /// Whether the offset is the kernel's for good.
    #[inline]
    pub fn is_offset_kernels(self) -> bool {
        match self.state() {
            FdState::Candidate | FdState::Served | FdState::Moving => false,
            FdState::Shared => self.0 & Self::OPENING == 0,
            _ => true,
        }
    }
    /// Whether the reason for sharing has been counted.
    pub fn is_reported(self) -> bool {
        self.0 & Self::REPORTED != 0
    }
    fn reported(self) -> Self {
        Self(self.0 | Self::REPORTED)
    }
    fn shared(self) -> Self {
        Self(self.with_state(FdState::Shared).0 & !Self::OPENING).reported()
    }
    fn positioned(self) -> Self {
        self.with_state(FdState::Positioned).with_low(self.0 & Self::REPORTED | self.kernels_calls())
    }
    fn left(self, state: FdState) -> Self {
        self.with_state(state).with_low(self.kernels_calls())
    }
    /// The next generation, which keeps only the kernel's calls.
    fn next(self, state: FdState) -> Self {
        let calls = self.kernels_calls();
        let step = if mutant(Mutant::OpenGeneration) { 0 } else { Self::GENERATION };
        Self(self.0.wrapping_add(step)).with_state(state).with_low(calls)
    }
    /// Whether both are of the same opening and the same attachment.
    pub fn is_same_attachment(self, other: FdWord) -> bool {
        (self.0 ^ other.0) << 3 >> 51 == 0
    }
}

/// Where a descriptor's word is. All zeros at first: Unknown.
#[derive(Debug)]
#[repr(transparent)]
pub struct FdCell(AtomicU64);

impl FdCell {
    /// An unknown descriptor's.
    #[cfg(not(quinion_model))]
    #[allow(clippy::new_without_default, reason = "made in statics")]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }
    /// An unknown descriptor's.
    #[cfg(quinion_model)]
    #[allow(clippy::new_without_default, reason = "as above")]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The word.
    #[inline]
    pub fn load(&self) -> FdWord {
        // SeqCst for pairs of "publish, then look for the other's" (open and fork, publish and stop, publish and
        // write). Also the Acquire whose partner is the store in `Fd::moving`: a thread that sees SERVED sees the
        // attachment.
        FdWord(self.0.load(ordering(Mutant::WordAcquire, Ordering::SeqCst, Ordering::Relaxed)))
    }

    /// Replaces `from` by `to`; the word as it is now if it is not `from`.
    #[inline]
    fn exchange(&self, from: FdWord, to: FdWord) -> Result<(), FdWord> {
        // SeqCst: as in `load`, its partner.
        match self.0.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => Ok(()),
            Err(now) => Err(FdWord(now)),
        }
    }

    /// Moves the private offset; `false` if another thread changed the word first.
    #[inline]
    pub fn advance(&self, from: FdWord, offset: u64) -> bool {
        debug_assert!(from.state() == FdState::Served);
        let to = from.with_low(offset);
        if mutant(Mutant::AdvanceExchange) {
            self.0.store(to.0, Ordering::SeqCst); // partner: `load`
            return true;
        }
        self.exchange(from, to).is_ok()
    }

    /// After a copy, whether the descriptor is still attached to the same file as when `word` was looked at.
    #[inline]
    pub fn is_still(&self, word: FdWord) -> bool {
        if !mutant(Mutant::StillFence) {
            // Acquire, partner: the Release fence in `Fd::publish`. If a later attachment was read, the word seen now
            // is of that or a later one, too.
            fence(Ordering::Acquire);
        }
        let now = FdWord(self.0.load(Ordering::Relaxed));
        mutant(Mutant::StillRecheck) || now.is_same_attachment(word)
    }

    /// Notes the result of an inspection of the descriptor, unless another thread was first.
    pub fn settle(&self, from: FdWord, to: FdWord) {
        let _ = self.exchange(from, to);
    }

    /// Whether the reason for this descriptor's reads by the kernel is still to be counted; marks it counted.
    pub fn mark_reported(&self, word: FdWord) -> bool {
        matches!(word.state(), FdState::Shared | FdState::Positioned)
            && !word.is_reported()
            && self.exchange(word, word.reported()).is_ok()
    }

    /// Gives a candidate or a shared one a credit. `false`: another thread was faster.
    pub fn give_credit(&self, from: FdWord, bytes: u64, giver: CreditGiver) -> bool {
        let owners = match giver {
            CreditGiver::Owner => FdWord::OWNERS,
            CreditGiver::Viewer => 0,
        };
        self.exchange(from, FdWord(from.with_credit(bytes).0 | owners)).is_ok()
    }

    /// Takes `bytes` off a credit; `false` if another thread was faster.
    pub fn charge(&self, from: FdWord, bytes: u64) -> bool {
        self.exchange(from, from.charged(bytes)).is_ok()
    }

    /// In a forked child, by its only thread that looks: its inherited descriptors are its parent's, too, and the calls
    /// of the parent's other threads are not under way here.
    pub fn inherit(&self) {
        let word = self.load();
        let to = match word.state() {
            FdState::Unknown | FdState::Kernel | FdState::Other => word.with_low(0),
            _ => word.next(FdState::Shared).with_low(FdWord::REPORTED),
        };
        self.settle(word, to);
    }
}

/// The kernel and the process, as the protocol needs them for one descriptor.
pub trait Process {
    /// Signals are held back until this is dropped.
    type SignalsHeld;
    /// Holds all signals of the calling thread back.
    fn hold_signals(&self) -> Self::SignalsHeld;
    /// The kernel's offset of the descriptor, if it has one.
    fn offset(&self) -> Option<u64>;
    /// Sets the kernel's offset of the descriptor.
    fn set_offset(&self, offset: u64);
    /// Lets the awaited thread run; `turn` counts the waits before. It must sleep at some turns.
    fn wait(&self, turn: u32);
    /// The owner's handle of the file that the descriptor is attached to.
    fn handle(&self) -> u64;
}

/// The result of [`Fd::open_for_reading`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// The handle to give back: the number was attached, so it was closed by means that were not seen.
    pub stale: Option<u64>,
    /// Whether another process may have the description, because a fork was under way.
    pub was_forked: bool,
}

/// One descriptor: its word, and its process.
#[derive(Debug)]
pub struct Fd<'a, P> {
    cell: &'a FdCell,
    process: P,
}

impl<'a, P: Process> Fd<'a, P> {
    /// The descriptor whose word is in `cell`.
    #[inline]
    pub fn new(cell: &'a FdCell, process: P) -> Self {
        Self { cell, process }
    }

    /// The word once no thread is handing the offset over.
    pub fn settled(&self) -> FdWord {
        let mut turn = 0;
        loop {
            let word = self.cell.load();
            if word.state() != FdState::Moving || mutant(Mutant::SettledWait) {
                return word;
            }
            self.process.wait(turn);
            turn = turn.saturating_add(1);
        }
    }

    /// Takes `from` to Moving with signals held back, does `work`, and goes on to the word it answers.
    fn moving(&self, from: FdWord, work: impl FnOnce() -> FdWord) -> Result<(), FdWord> {
        let _held = self.process.hold_signals();
        self.cell.exchange(from, from.with_state(FdState::Moving))?;
        let to = work();
        // SeqCst, partner: `load`; also the Release for the stores of `work`.
        self.cell.0.store(to.0, ordering(Mutant::MovingRelease, Ordering::SeqCst, Ordering::Relaxed));
        Ok(())
    }

    /// From Served to `to`, with the private offset given to the kernel.
    fn leave(&self, from: FdWord, to: FdWord) -> Result<(), FdWord> {
        if mutant(Mutant::LeaveMoving) {
            self.process.set_offset(from.offset());
            return self.cell.exchange(from, to);
        }
        self.moving(from, || {
            if !mutant(Mutant::LeaveOffset) {
                self.process.set_offset(from.offset());
            }
            to
        })
    }

    /// The handle that `word` is attached to, valid if an exchange of `word` succeeds afterwards.
    fn handle_of(&self, word: FdWord) -> Option<u64> {
        word.state().is_attached().then(|| self.process.handle())
    }

    // ---- opening and closing ---------------------------------------------------------------------------

    /// The number was opened, received or made by a duplication, and is in `state` (Unknown, Kernel or Shared). The
    /// handle to give back, as in [`Opened::stale`].
    pub fn open(&self, state: FdState) -> Option<u64> {
        debug_assert!(matches!(state, FdState::Unknown | FdState::Kernel | FdState::Shared));
        self.open_as(|word| word.next(state))
    }

    fn open_as(&self, next: impl Fn(FdWord) -> FdWord) -> Option<u64> {
        loop {
            let word = self.settled();
            let handle = self.handle_of(word);
            if self.cell.exchange(word, next(word)).is_ok() {
                return handle;
            }
        }
    }

    /// The number was opened for reading only. `is_alone`: whether no child was forked since before the open.
    pub fn open_for_reading(&self, is_alone: impl FnOnce() -> bool) -> Opened {
        let early = mutant(Mutant::OpenForked);
        let stale = self.open_as(|word| {
            let next = word.next(FdState::Shared);
            if early { next.with_state(FdState::Candidate) } else { FdWord(next.0 | FdWord::OPENING) }
        });
        let word = self.cell.load();
        let was_forked = !is_alone();
        if was_forked {
            self.share();
        } else if word.state() == FdState::Shared && word.0 & FdWord::OPENING != 0 {
            // A thread that shared or attached it meanwhile has cleared the mark, and was right.
            let candidate = FdWord(word.with_state(FdState::Candidate).0 & !FdWord::OPENING);
            self.cell.settle(word, candidate);
        }
        Opened { stale, was_forked }
    }

    /// The descriptor is about to be closed. The kernel's offset is right afterwards, for another thread's read before
    /// the kernel's close, or another holder of the description. The handle to give back.
    pub fn forget(&self) -> Option<u64> {
        loop {
            let word = self.settled();
            let handle = self.handle_of(word);
            let left = word.left(FdState::Unknown);
            let done = match word.state() {
                FdState::Unknown => return None,
                FdState::Served => self.leave(word, left),
                _ => self.cell.exchange(word, left),
            };
            if done.is_ok() {
                return handle;
            }
        }
    }

    // ---- the kernel's calls ------------------------------------------------------------------------------

    /// The kernel is about to read a candidate at its offset, or to move that. `false` if it is no candidate with a
    /// credit; else [`end_kernels_call`](Self::end_kernels_call) must follow.
    pub fn begin_kernels_call(&self, bytes: u64) -> bool {
        loop {
            let word = self.settled();
            let is_full = word.0 & FdWord::CALLS == FdWord::CALLS;
            if word.state() != FdState::Candidate || word.credit().is_none() || is_full {
                return false;
            }
            let call = if mutant(Mutant::CallCounted) { 0 } else { FdWord::CALL };
            if self.cell.exchange(word, FdWord(word.charged(bytes).0 + call)).is_ok() {
                return true;
            }
        }
    }

    /// Ends it. A call whose thread was cancelled never does, and keeps the number's offset with the kernel.
    pub fn end_kernels_call(&self) {
        loop {
            let word = self.settled();
            if !word.has_kernels_calls() {
                return; // a child's, which was forked by a handler that interrupted the call
            }
            if self.cell.exchange(word, FdWord(word.0 - FdWord::CALL)).is_ok() {
                return;
            }
        }
    }

    // ---- serving ------------------------------------------------------------------------------------------

    /// Attaches; `attach` stores to what. A candidate is served from its offset on; one that is shared, or that
    /// `can_write`, only for positional reads. The state it is in now; `None` if it was not attached.
    pub fn publish(&self, from: FdWord, can_write: bool, attach: impl FnOnce()) -> Option<FdState> {
        let is_served = match from.state() {
            FdState::Candidate => !can_write || mutant(Mutant::PublishWriter),
            FdState::Shared => false,
            _ => return None,
        };
        if is_served && from.has_kernels_calls() && !mutant(Mutant::PublishCalls) {
            return None;
        }
        let early = mutant(Mutant::PublishMoving).then(|| self.process.offset());
        let mut published = None;
        let work = || {
            let to = if is_served {
                let offset = early.unwrap_or_else(|| self.process.offset());
                let Some(offset) = offset.filter(|&offset| offset < OFFSETS_MAX) else {
                    return from.left(FdState::Kernel);
                };
                from.with_state(FdState::Served).with_low(offset)
            } else {
                from.positioned()
            };
            if !mutant(Mutant::PublishFence) {
                fence(Ordering::Release); // partner: the Acquire fence in `is_still`
            }
            attach();
            published = Some(to.state());
            to
        };
        self.moving(from, work).ok()?;
        published
    }

    /// A seek that the kernel works out, as if it had the offset, of a candidate or a served descriptor. `None`: it is
    /// neither any more. A served one stays served at the new offset, or becomes positioned if that does not fit.
    pub fn seek<E>(&self, from: FdWord, seek: impl FnOnce() -> Result<u64, E>) -> Option<Result<u64, E>> {
        let mut answer = None;
        match from.state() {
            FdState::Candidate => {
                // Programs that seek before each read are spared the two calls that hold back signals.
                if mutant(Mutant::SeekCounted) {
                    return Some(seek());
                }
                if self.begin_kernels_call(0) {
                    let answer = seek();
                    self.end_kernels_call();
                    return Some(answer);
                }
                self.moving(from, || {
                    answer = Some(seek());
                    from
                })
                .ok()?;
            }
            FdState::Served if mutant(Mutant::SeekMoving) => {
                self.process.set_offset(from.offset());
                let now = seek();
                let to = now.as_ref().map_or(from.offset(), |&now| now);
                return self.cell.advance(from, to).then_some(now);
            }
            FdState::Served => self
                .moving(from, || {
                    self.process.set_offset(from.offset());
                    let now = seek();
                    let to = match now {
                        Ok(now) if now < OFFSETS_MAX => from.with_low(now),
                        Ok(_) => from.left(FdState::Positioned).reported(),
                        Err(_) => from,
                    };
                    answer = Some(now);
                    to
                })
                .ok()?,
            _ => return None,
        }
        answer
    }

    /// Sets the kernel's offset of a served descriptor for a call that looks at it and does not move it.
    pub fn show_offset(&self) {
        loop {
            let word = self.settled();
            if word.state() != FdState::Served || self.leave(word, word).is_ok() {
                return;
            }
        }
    }

    // ---- going back to the kernel ---------------------------------------------------------------------------

    /// Gives the offset to the kernel; it may be private again later. The handle to give back.
    pub fn pause(&self) -> Option<u64> {
        loop {
            let word = self.settled();
            if word.state() != FdState::Served {
                return None;
            }
            let handle = self.process.handle();
            let mut to = word.next(FdState::Candidate);
            if mutant(Mutant::PauseGeneration) {
                to = word.left(FdState::Candidate);
            }
            if self.leave(word, to).is_ok() {
                return Some(handle);
            }
        }
    }

    /// Leaves the offset to the kernel for good; positional reads are served still. Whether that is new.
    pub fn share(&self) -> bool {
        loop {
            let word = self.settled();
            let done = match word.state() {
                FdState::Candidate => self.cell.exchange(word, word.shared()),
                FdState::Served => self.leave(word, word.left(FdState::Positioned).reported()),
                FdState::Shared if !word.is_offset_kernels() => self.cell.exchange(word, word.shared()),
                _ => return false,
            };
            if done.is_ok() {
                return true;
            }
        }
    }

    /// Leaves the descriptor, with its right offset, to the kernel for good. `None` if it was so before; else the
    /// handle to give back, if there is one.
    pub fn detach(&self) -> Option<Option<u64>> {
        loop {
            let word = self.settled();
            let left = word.left(FdState::Kernel);
            let handle = self.handle_of(word);
            let done = match word.state() {
                FdState::Candidate | FdState::Shared | FdState::Positioned => self.cell.exchange(word, left),
                FdState::Served => self.leave(word, left),
                _ => return None,
            };
            if done.is_ok() {
                return Some(handle);
            }
        }
    }

    /// The attachment seen in `word` is outdated: the descriptor is to be attached anew, for positional reads. The
    /// handle to give back.
    pub fn reattach(&self, word: FdWord) -> Option<u64> {
        let handle = self.handle_of(word);
        self.cell.exchange(word, word.next(FdState::Shared)).ok().and(handle)
    }
}
